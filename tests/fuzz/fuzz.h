/* fuzz.h - what the harnesses of this folder share: fuzz_X.c is a libFuzzer target, and, compiled
 * by any C compiler, a program that replays its seeds and mutations of them.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *   fuzz_X                  replays its seeds, and mutations of each, the same ones every time
 *   fuzz_X FILE...          replays these
 *   fuzz_X --seeds FOLDER   writes the seeds there, for libFuzzer to begin with
 *
 * A harness defines fuzz_one and fuzz_seed, and FUZZ_OF_FILES when big-endian machines have nothing
 * to test. Inputs run with floating-point exceptions that trap; a harness that computes what it expects in double
 * defines FUZZ_TRAPS_ON as nothing, and lets them trap itself around its calls. With FUZZ_EXPLORE there is no main: libFuzzer's is used.
 */
#ifndef FUZZ_H
#define FUZZ_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "traps.h"

#ifndef FUZZ_MUTATIONS
#define FUZZ_MUTATIONS 500      /* of each seed: fewer where an input takes long */
#endif
#ifndef FUZZ_TRAPS_ON
#define FUZZ_TRAPS_ON traps_on(1)
#endif
enum { FUZZ_ROOM = 1 << 16 };

/* Tries one input; EXPECT inside it. */
static void fuzz_one(const uint8_t *data, size_t size);
/* Seed number i into out, FUZZ_ROOM bytes; its size, 0 when there is none of that number. */
static size_t fuzz_seed(int i, uint8_t *out);

/* What must hold whatever the input is. */
#define EXPECT(condition)                                                                  \
    do { if (!(condition)) {                                                               \
        printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                     \
        fflush(stdout);                                                                    \
        abort(); } } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    /* A copy of the very size, so that a sanitizer sees every byte too far. */
    uint8_t *copy = (uint8_t *)malloc(size ? size : 1);
    if (!copy) return 0;
    if (size) memcpy(copy, data, size);
    FUZZ_TRAPS_ON;
    fuzz_one(copy, size);
    traps_off();
    free(copy);
    return 0;
}

#ifndef FUZZ_EXPLORE
static uint32_t fuzz_random(void) {
    static uint32_t x = 0x9E3779B9u;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return x;
}

/* One to four changes: a byte, a bit, a piece moved, a piece cut out, digits. */
static size_t fuzz_mutate(uint8_t *p, size_t n) {
    uint32_t changes = 1 + fuzz_random() % 4;
    while (changes-- > 0 && n > 0) {
        size_t at = fuzz_random() % n, to = fuzz_random() % n, most = n - (at > to ? at : to);
        size_t piece = 1 + fuzz_random() % (most < 16 ? most : 16);
        switch (fuzz_random() % 5) {
        case 0: p[at] = (uint8_t)fuzz_random(); break;
        case 1: p[at] = (uint8_t)(p[at] ^ 1u << fuzz_random() % 8); break;
        case 2: memmove(p + to, p + at, piece); break;
        case 3: p[at] = (uint8_t)"\"\\{}[],:0192"[fuzz_random() % 12]; break;
        default:
            memmove(p + at, p + at + piece, n - at - piece);
            n -= piece;
        }
    }
    return n;
}

static int fuzz_file(const char *path) {
    static uint8_t bytes[1 << 20];
    FILE *f = fopen(path, "rb");
    if (!f) { printf("cannot read %s\n", path); return 1; }
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    LLVMFuzzerTestOneInput(bytes, n);
    return 0;
}

static int fuzz_write_seeds(const char *folder) {
    static uint8_t bytes[FUZZ_ROOM];
    char path[1024];
    size_t n;
    for (int i = 0; (n = fuzz_seed(i, bytes)) > 0; i++) {
        FILE *f;
        snprintf(path, sizeof path, "%s/seed%d", folder, i);
        f = fopen(path, "wb");
        if (!f || fwrite(bytes, 1, n, f) != n || fclose(f) != 0) return 1;
    }
    return 0;
}

int main(int argc, char **argv) {
    static uint8_t seed[FUZZ_ROOM], bytes[FUZZ_ROOM];
    int i, k, passed = 0, inputs = 0, bad = 0;   /* a test: a seed and its mutations */
    size_t n;
#ifdef FUZZ_OF_FILES
    const uint16_t one = 1;
    if (!*(const char *)&one) { printf("0 passed, 0 failed, 1 skipped\n"); return 0; }
#endif
    if (argc == 3 && strcmp(argv[1], "--seeds") == 0) return fuzz_write_seeds(argv[2]);
    for (i = 1; i < argc; i++, passed++) bad |= fuzz_file(argv[i]);
    for (i = 0; argc == 1 && (n = fuzz_seed(i, seed)) > 0; i++) {
        LLVMFuzzerTestOneInput(seed, n);
        for (k = 0; k < FUZZ_MUTATIONS; k++) {
            memcpy(bytes, seed, n);
            LLVMFuzzerTestOneInput(bytes, fuzz_mutate(bytes, n));
        }
        passed++;
        inputs += k + 1;
    }
    printf("%d inputs\n", inputs);
    printf("%d passed, %d failed, 0 skipped\n", passed, bad);
    return bad;
}
#endif
#endif
