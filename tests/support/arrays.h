/* arrays.h - shared by kernel tests: guarded arrays of any real dtype, and an executor that runs
 * tasks backwards on workers of its own choice.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef ARRAYS_H
#define ARRAYS_H
#include <stdlib.h>
#include "args.h"
#include "numbers.h"

NUMBERS_MAYBE mixp_dtype random_dtype(void) {
    static const mixp_dtype real[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    return real[random_to(3)];
}

/* --- arrays, every byte set before use to a NaN of every format, guards around ---------- */

enum { ARRAY_GUARD = 64 };

NUMBERS_MAYBE test_array array_new(mixp_dtype dtype, int64_t n) {
    test_array a;
    size_t bytes = (size_t)n * mixp_dtype_size(dtype) + 2 * ARRAY_GUARD;
    char  *p = (char *)malloc(bytes);
    if (!p) exit(2);
    memset(p, 0xFF, bytes);
    a.dtype = dtype;
    a.data = p + ARRAY_GUARD;
    return a;
}

NUMBERS_MAYBE int array_guarded(test_array a, int64_t n) {
    const unsigned char *p = (const unsigned char *)a.data;
    size_t bytes = (size_t)n * mixp_dtype_size(a.dtype), i;
    for (i = 0; i < ARRAY_GUARD; i++)
        if (p[bytes + i] != 0xFF || p[(ptrdiff_t)i - ARRAY_GUARD] != 0xFF) return 0;
    return 1;
}

NUMBERS_MAYBE void array_free(test_array a) { free((char *)a.data - ARRAY_GUARD); }

NUMBERS_MAYBE double array_get(test_array a, int64_t i) {
    if (a.dtype == MIXP_F16) return (double)mixp_f32_from_f16(((const mixp_f16 *)a.data)[i]);
    if (a.dtype == MIXP_BF16) return (double)mixp_f32_from_bf16(((const mixp_bf16 *)a.data)[i]);
    return (double)((const float *)a.data)[i];
}

NUMBERS_MAYBE void array_set(test_array a, int64_t i, double v) {
    if (a.dtype == MIXP_F16) ((mixp_f16 *)a.data)[i] = mixp_f16_from_f32((float)v);
    else if (a.dtype == MIXP_BF16) ((mixp_bf16 *)a.data)[i] = mixp_bf16_from_f32((float)v);
    else ((float *)a.data)[i] = (float)v;
}

/* Does element i still hold the bytes of array_new? */
NUMBERS_MAYBE int array_untouched(test_array a, int64_t i) {
    size_t size = mixp_dtype_size(a.dtype);
    return memcmp((const char *)a.data + (size_t)i * size, "\377\377\377\377", size) == 0;
}

/* --- the executor ------------------------------------------------------------------------ */

typedef struct runner {
    int    threads, requests;
    char  *block;
    size_t bytes, lead;
} runner;

NUMBERS_MAYBE void runner_parallel(void *user, int64_t tasks, mixp_task task, void *arg) {
    const runner *r = (const runner *)user;
    for (int64_t i = tasks - 1; i >= 0; i--) task(arg, i, (int)((i * 7 + 3) % r->threads));
}

static void *runner_scratch(void *user, size_t bytes) {
    runner *r = (runner *)user;
    r->requests++;
    free(r->block);
    r->block = (char *)malloc(bytes + 128);
    if (!r->block) exit(2);
    memset(r->block, 0xFF, bytes + 128);
    r->bytes = bytes;
    r->lead = 64 - (size_t)((uintptr_t)r->block % 64);
    return r->block + r->lead;
}

/* threads 0: no parallel hook at all. */
NUMBERS_MAYBE mixp_exec runner_exec(runner *r, int threads) {
    mixp_exec x;
    memset(r, 0, sizeof *r);
    memset(&x, 0, sizeof x);
    r->threads = x.threads = threads ? threads : 1;
    x.user = r;
    x.parallel = threads ? runner_parallel : NULL;
    x.scratch = runner_scratch;
    return x;
}

/* Frees; 1 when the kernel stayed inside its scratch and asked for it at most once. */
NUMBERS_MAYBE int runner_end(runner *r) {
    int    good = r->requests <= 1;
    for (size_t i = 0; r->block && i < 128; i++)
        good &= (unsigned char)r->block[i < r->lead ? i : r->bytes + i] == 0xFF;
    free(r->block);
    return good;
}

static const char *const isa_names[MIXP_ISA_COUNT] = 
    { "scalar", "avx2", "avx512", "avx512 bf16", "neon", "neon f16", "neon bf16", "amx", "amx f16" };
#endif
