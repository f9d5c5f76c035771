/* ddp_secret.h - proofs that both ends of a connection know one secret: a part of ddp_tcp.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * HMAC (RFC 2104) with SHA-256 (FIPS 180-4) over numbers that the other end has just chosen. The secret
 * itself is never sent. See SECURITY.md for what this protects from, and what not.
 */
#ifndef DDP_SECRET_H
#define DDP_SECRET_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { DDP_PROOF = 32, DDP_NONCE = 16 };

typedef struct ddp_hash {
    uint32_t      state[8];
    unsigned char block[64];
    uint64_t      bytes;
} ddp_hash;

static uint32_t ddp_turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void ddp_hash_block(ddp_hash *h) {
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++) {
        const unsigned char *b = h->block + 4 * i;
        w[i] = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
    }
    for (int i = 16; i < 64; i++) {
        const uint32_t a = ddp_turn(w[i - 15], 7) ^ ddp_turn(w[i - 15], 18) ^ w[i - 15] >> 3;
        const uint32_t b = ddp_turn(w[i - 2], 17) ^ ddp_turn(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + a + w[i - 7] + b;
    }
    memcpy(s, h->state, sizeof s);
    for (int i = 0; i < 64; i++) {
        const uint32_t a = ddp_turn(s[4], 6) ^ ddp_turn(s[4], 11) ^ ddp_turn(s[4], 25);
        const uint32_t b = ddp_turn(s[0], 2) ^ ddp_turn(s[0], 13) ^ ddp_turn(s[0], 22);
        const uint32_t first = s[7] + a + ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
        const uint32_t second = b + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += first;
        s[0] = first + second;
    }
    for (int i = 0; i < 8; i++) h->state[i] += s[i];
}

static ddp_hash ddp_hash_begin(void) {
    ddp_hash h = {{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19},
                  {0}, 0};
    return h;
}

static void ddp_hash_add(ddp_hash *h, const void *data, size_t n) {
    for (size_t i = 0; i < n; i++) {
        h->block[h->bytes++ % 64] = ((const unsigned char *)data)[i];
        if (h->bytes % 64 == 0) ddp_hash_block(h);
    }
}

static void ddp_hash_end(ddp_hash *h, unsigned char out[DDP_PROOF]) {
    const uint64_t bits = 8 * h->bytes;
    unsigned char  byte = 0x80;
    do {
        ddp_hash_add(h, &byte, 1);
        byte = 0;
    } while (h->bytes % 64 != 56);
    for (int i = 7; i >= 0; i--) {
        byte = (unsigned char)(bits >> 8 * i);
        ddp_hash_add(h, &byte, 1);
    }
    for (int i = 0; i < DDP_PROOF; i++) out[i] = (unsigned char)(h->state[i / 4] >> (24 - 8 * (i % 4)));
}

/* Begins the inner (0x36) or outer (0x5C) hash of HMAC. */
static ddp_hash ddp_keyed(const char *secret, unsigned char pad) {
    unsigned char key[64] = {0};
    const size_t  n = strlen(secret);
    ddp_hash      h = ddp_hash_begin();
    if (n <= sizeof key) memcpy(key, secret, n);
    else {
        ddp_hash_add(&h, secret, n);
        ddp_hash_end(&h, key);
        h = ddp_hash_begin();
    }
    for (size_t i = 0; i < sizeof key; i++) key[i] ^= pad;
    ddp_hash_add(&h, key, sizeof key);
    return h;
}

/* HMAC-SHA-256 of what, the nonce and the data, in this order. */
static void ddp_prove(const char *secret, const char *what, const unsigned char nonce[DDP_NONCE], const void *data,
                      size_t n, unsigned char proof[DDP_PROOF]) {
    ddp_hash h = ddp_keyed(secret, 0x36);
    ddp_hash_add(&h, what, strlen(what) + 1);
    ddp_hash_add(&h, nonce, DDP_NONCE);
    ddp_hash_add(&h, data, n);
    ddp_hash_end(&h, proof);
    h = ddp_keyed(secret, 0x5C);
    ddp_hash_add(&h, proof, DDP_PROOF);
    ddp_hash_end(&h, proof);
}

/* Takes the same time wherever the proofs differ. */
static int ddp_is_proof(const unsigned char *a, const unsigned char *b) {
    unsigned char differ = 0;
    for (int i = 0; i < DDP_PROOF; i++) differ |= a[i] ^ b[i];
    return differ == 0;
}

/* A number that was never used before: of the system's random bytes, or without them of the clock, the process and
 * a counter. */
static void ddp_nonce(unsigned char nonce[DDP_NONCE]) {
    static unsigned char seed[DDP_PROOF];
    static uint64_t      used;
    const long long      now[3] = {(long long)time(NULL), (long long)clock(), (long long)getpid()};
    unsigned char        out[DDP_PROOF];
    ddp_hash             h = ddp_hash_begin();
    FILE                *f = used ? NULL : fopen("/dev/urandom", "rb");
    if (f && fread(seed, 1, sizeof seed, f) != sizeof seed) seed[0] ^= 1;
    if (f) fclose(f);
    used++;
    ddp_hash_add(&h, seed, sizeof seed);
    ddp_hash_add(&h, &used, sizeof used);
    ddp_hash_add(&h, now, sizeof now);
    ddp_hash_end(&h, out);
    memcpy(nonce, out, DDP_NONCE);
}
#endif
