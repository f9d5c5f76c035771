/* trail.h - writes hashes of what each step computes to a file, to find the first site in which two runs differ
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include this file after mixprec.h, in C or C++. It uses only the public API: the observer of mixp_observe. It needs
 * a build without MIXPREC_NO_WATCH. A call belongs to the thread that uses the context.
 *
 *     mixp_trail *trail = mixp_trail_open(ctx, "a.trail");        before the loop
 *     mixp_step_begin(ctx);
 *     mixp_trail_step(trail);                                     in each step, after mixp_step_begin
 *     mixp_trail_close(trail);                                    after the loop, before mixp_context_free
 *
 *     build/trail a.trail b.trail                                 names the first site that differs, and by how much
 *
 * A record is one line: the weights and buffers at the beginning of a step, each site's stored values, and their
 * gradients (multiplied by the loss scale). Runs that the manual's table SAME BITS calls equal have equal files: on
 * any number of threads, on other machines, compilers and versions. With ranks, each rank writes its own file. */
#ifndef MIXPREC_TRAIL_H
#define MIXPREC_TRAIL_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "plain_file.h"

#ifdef MIXPREC_NO_WATCH
#  error "trail.h needs mixp_observe, which MIXPREC_NO_WATCH leaves out"
#endif

#if defined(__GNUC__)
#  define TRAIL_API static __attribute__((__unused__))
#else
#  define TRAIL_API static
#endif

/* The first line of a file. A record has TRAIL_FIELDS fields between tabs: kind (w weight or buffer, f values, b
 * gradient), step, dtype, shape, TRAIL_PARTS hashes of as many equal parts of the array, the largest magnitude, the
 * mean magnitude (both as the bits of an f32), number of zeros, number of Inf and NaN, name. */
#define TRAIL_HEAD "mixprec trail 1"
enum { TRAIL_FIELDS = 10, TRAIL_PARTS = 8, TRAIL_BLOCK = 4096 };

typedef struct mixp_trail {
    mixp_context *ctx;
    mixp_observer before;       /* the observer that was installed before; is called too   */
    FILE         *file;
    int64_t       step;         /* number of calls of mixp_trail_step                      */
    char         *bytes;        /* `room` bytes, for the tensor that is being written      */
    size_t        room;
} mixp_trail;

/* A record's data about an array's values. */
typedef struct trail_sums { double largest, total; int64_t zeros, bad; } trail_sums;

/* A hash of n bytes, four words at a time. */
static uint64_t trail_hash(const char *p, size_t n) {
    const uint64_t factor = 0x9E3779B97F4A7C15u;
    uint64_t h[4] = { 1, 2, 3, 4 }, word[4];
    size_t   size, i;
    for (; n; p += size, n -= size) {
        size = n < sizeof word ? n : sizeof word;
        if (size < sizeof word) memset(word, 0, sizeof word);
        memcpy(word, p, size);
        for (i = 0; i < 4; i++) {
            h[i] = (h[i] ^ word[i]) * factor;
            h[i] ^= h[i] >> 29;
        }
    }
    for (i = 1; i < 4; i++) {
        h[0] = (h[0] ^ h[i]) * factor;
        h[0] ^= h[0] >> 32;
    }
    return h[0];
}

/* Adds n values of an array to the sums. Inf and NaN are found by their bits. */
static void trail_add(trail_sums *sums, const float *x, int64_t n) {
    int64_t i;
    for (i = 0; i < n; i++) {
        const uint32_t size = mixp_bits_of_f32(x[i]) & 0x7FFFFFFFu;
        const double   value = (double)mixp_f32_of_bits(size);
        if (size >= 0x7F800000u) {
            sums->bad++;
            continue;
        }
        sums->zeros += size == 0;
        sums->total += value;
        if (value > sums->largest) sums->largest = value;
    }
}

static trail_sums trail_sums_of(const char *bytes, mixp_dtype dtype, int64_t n) {
    float      block[TRAIL_BLOCK];
    trail_sums sums = { 0.0, 0.0, 0, 0 };
    int64_t    from, some = TRAIL_BLOCK;
    for (from = 0; from < n; from += some) {
        if (some > n - from) some = n - from;
        mixp_convert(block, MIXP_F32, bytes + (size_t)from * mixp_dtype_size(dtype), dtype, some);
        trail_add(&sums, block, some);
    }
    return sums;
}

/* Reads a tensor into the trail's memory; 0 with the context's error set. */
static int trail_read(mixp_trail *t, const mixp_tensor *x) {
    const size_t bytes = (size_t)x->count * mixp_dtype_size(x->dtype);
    if (bytes > t->room) {
        char *longer = (char *)realloc(t->bytes, bytes);
        if (!longer) {
            mixp_context_fail(t->ctx, MIXP_ERR_MEMORY, "mixp_trail: no memory for %.0f bytes on the host", (double)bytes);
            return 0;
        }
        t->bytes = longer;
        t->room = bytes;
    }
    return mixp_read(x, t->bytes, x->dtype, x->count) == MIXP_OK;
}

/* A name on one line, without tabs. */
static void trail_name(FILE *file, const char *name) {
    for (; *name; name++) fputc((unsigned char)*name < ' ' ? '?' : *name, file);
    fputc('\n', file);
}

static void trail_record(mixp_trail *t, char kind, const mixp_tensor *x, const char *name) {
    const size_t size = mixp_dtype_size(x->dtype);
    trail_sums   sums;
    int          i;
    if (!trail_read(t, x)) return;
    sums = trail_sums_of(t->bytes, x->dtype, x->count);
    fprintf(t->file, "%c\t%" PRId64 "\t%s\t", kind, t->step, mixp_dtype_name(x->dtype));
    for (i = 0; i < x->rank; i++) fprintf(t->file, "%s%" PRId64, i ? "," : "", x->shape[i]);
    fputc('\t', t->file);
    for (i = 0; i < TRAIL_PARTS; i++) {
        const size_t from = (size_t)(x->count * i / TRAIL_PARTS), end = (size_t)(x->count * (i + 1) / TRAIL_PARTS);
        fprintf(t->file, "%016" PRIx64, trail_hash(t->bytes + from * size, (end - from) * size));
    }
    fprintf(t->file, "\t%08" PRIx32 "\t%08" PRIx32 "\t%" PRId64 "\t%" PRId64 "\t", mixp_bits_of_f32((float)sums.largest),
            mixp_bits_of_f32((float)(x->count ? sums.total / (double)x->count : 0.0)), sums.zeros, sums.bad);
    trail_name(t->file, name);
}

/* The observer. */
static void trail_see(mixp_context *ctx, const mixp_sight *s, void *user) {
    mixp_trail *t = (mixp_trail *)user;
    if (t->before.see) t->before.see(ctx, s, t->before.user);
    trail_record(t, s->backward ? 'b' : 'f', s->tensor, s->name);
}

/* Installs the trail's observer, which calls the one that was there. */
static mixp_result trail_install(mixp_trail *t) {
    mixp_observer observer;
    observer.see = trail_see;
    observer.user = t;
    observer.trial = 0;
    return mixp_observe(t->ctx, &observer, &t->before);
}

/* Begins to write the context's sites to the file `path`, which is replaced; a link, a FIFO or a device is
 * refused. Reads each stored tensor back from the device, hashes it and sums it up: a step of a small GPT takes 1.6
 * times as long. It changes no bits of the run. Close the trail before you free the context. Returns NULL with the
 * context's error set. MIXP_ERR_IO: the file cannot be written. MIXP_ERR_ORDER: a region or a scope is open. MIXP_ERR_MEMORY. */
TRAIL_API mixp_trail *mixp_trail_open(mixp_context *ctx, const char *path) {
    mixp_trail *t = ctx && path ? (mixp_trail *)calloc(1, sizeof *t) : NULL;
    if (!t) {
        mixp_context_fail(ctx, path ? MIXP_ERR_MEMORY : MIXP_ERR_ARGUMENT, "mixp_trail_open: %s",
                          path ? "no memory" : "path is NULL");
        return NULL;
    }
    t->ctx = ctx;
    t->file = plain_log(path, 0);
    if (!t->file) mixp_context_fail(ctx, MIXP_ERR_IO, "mixp_trail_open: cannot write %s: %s", path, plain_error());
    else if (trail_install(t) == MIXP_OK) {
        fprintf(t->file, "%s\n", TRAIL_HEAD);
        return t;
    }
    if (t->file) fclose(t->file);
    free(t);
    return NULL;
}

/* Begins the records of a step, and writes those of all parameters and buffers. Call it after mixp_step_begin; the
 * batches of one update may be one step or several. Returns the context's error, or MIXP_OK. */
TRAIL_API mixp_result mixp_trail_step(mixp_trail *t) {
    const mixp_tensor *x;
    int64_t i;
    if (!t) return MIXP_ERR_ARGUMENT;
    t->step++;
    for (i = 0; (x = mixp_context_param(t->ctx, i)) != NULL; i++) trail_record(t, 'w', x, x->name ? x->name : "?");
    for (i = 0; (x = mixp_context_buffer(t->ctx, i)) != NULL; i++) trail_record(t, 'w', x, x->name ? x->name : "?");
    return mixp_context_error(t->ctx, NULL);
}

/* Ends the file, installs the observer that was there before, and frees t. NULL is allowed. Call it between steps. With
 * MIXP_ERR_ORDER t continues and nothing is freed: a region or a scope is open, or a newer observer is still there.
 * MIXP_ERR_IO: the file is not complete; t is freed. */
TRAIL_API mixp_result mixp_trail_close(mixp_trail *t) {
    mixp_context *ctx = t ? t->ctx : NULL;
    mixp_observer now;
    mixp_result   r;
    int           failed;
    if (!t) return MIXP_OK;
    r = mixp_observe(ctx, &t->before, &now);
    if (r != MIXP_OK) return r;
    if (now.see && now.user != t) {
        mixp_observe(ctx, &now, NULL);
        return mixp_context_fail(ctx, MIXP_ERR_ORDER, "mixp_trail_close: remove the newer observer first");
    }
    failed = ferror(t->file) != 0;
    failed |= fclose(t->file) != 0;
    free(t->bytes);
    free(t);
    return failed ? mixp_context_fail(ctx, MIXP_ERR_IO, "mixp_trail_close: the file could not be written") : MIXP_OK;
}

#endif
