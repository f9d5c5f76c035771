/* ddp_sum.h - sums in the order of ranks: a part of ddp_fork.c, ddp_mpi.c, ddp_tcp.c and
 * ddp_threads.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * f16 and bf16 are added in f32 and rounded once, for any number of ranks. So only 16 bits per
 * number are sent, and the sum is as accurate as an f32 sum rounded at its end.
 */
#ifndef DDP_SUM_H
#define DDP_SUM_H

#include <stdio.h>
#include <string.h>

enum { DDP_SUM, DDP_MAX, DDP_GATHER, DDP_SCATTER };     /* what a hook asks for */
enum { DDP_BLOCK = 256 };                               /* elements that are added at once */

/* A rank that works on its own (it saves, it evaluates) has so many times the limit of a sum: with the
 * default of 600 s, 4 hours. Without a limit, a stopped rank would be waited for without end. */
#ifndef DDP_BUSY_TIMES
#  define DDP_BUSY_TIMES 24
#endif

typedef union ddp_block {
    float    f32[DDP_BLOCK];
    double   f64[DDP_BLOCK];
    int32_t  i32[DDP_BLOCK];
    uint32_t u32[DDP_BLOCK];
} ddp_block;

/* a = a + b, or the larger of both; a NaN in a stays. Works on full blocks, because compilers
 * vectorise loops of known length. */
#define DDP_FOLD(a, b, max)                                                                       \
    do {                                                                                          \
        if (max) for (int i = 0; i < DDP_BLOCK; i++) (a)[i] = (b)[i] > (a)[i] ? (b)[i] : (a)[i];  \
        else for (int i = 0; i < DDP_BLOCK; i++) (a)[i] += (b)[i];                                \
    } while (0)

static void ddp_fold_block(ddp_block *a, const ddp_block *b, mixp_dtype dtype, int max) {
    if (dtype == MIXP_F64) DDP_FOLD(a->f64, b->f64, max);
    else if (dtype != MIXP_I32) DDP_FOLD(a->f32, b->f32, max);
    else if (max) DDP_FOLD(a->i32, b->i32, 1);
    else DDP_FOLD(a->u32, b->u32, 0);           /* wraps around */
}

static void ddp_block_copy(void *to, mixp_dtype to_dtype, const void *from, mixp_dtype dtype,
                           int64_t n) {
    if (to_dtype == dtype) memcpy(to, from, (size_t)n * mixp_dtype_size(dtype));
    else mixp_convert(to, to_dtype, from, dtype, n);
}

/* to = rows[0] + rows[1] + ..., or their maximum, n elements. `to` may be one of the rows. */
static void ddp_fold(void *to, const void *const *rows, int n_rows, int64_t n, mixp_dtype dtype,
                     int max) {
    const size_t     size = mixp_dtype_size(dtype);
    const mixp_dtype wide = dtype == MIXP_F64 || dtype == MIXP_I32 ? dtype : MIXP_F32;
    ddp_block        sum, next;
    memset(&sum, 0, sizeof sum), memset(&next, 0, sizeof next);
    for (int64_t at = 0, m; at < n; at += m) {
        const size_t first = (size_t)at * size;
        m = n - at < DDP_BLOCK ? n - at : DDP_BLOCK;
        ddp_block_copy(&sum, wide, (const char *)rows[0] + first, dtype, m);
        for (int r = 1; r < n_rows; r++) {
            ddp_block_copy(&next, wide, (const char *)rows[r] + first, dtype, m);
            ddp_fold_block(&sum, &next, wide, max);
        }
        ddp_block_copy((char *)to + first, dtype, &sum, wide, m);
    }
}

/* A rank's request as text: "a sum of 64 f32". */
static inline const char *ddp_asked(char *text, size_t room, const int64_t asked[3]) {
    static const char *const what[] = {"sum", "maximum", "gathering", "scattered sum"};
    const int known = asked[0] >= DDP_SUM && asked[0] <= DDP_SCATTER;
    snprintf(text, room, "a %s of %.0f %s", known ? what[asked[0]] : "call", (double)asked[1],
             mixp_dtype_name((mixp_dtype)asked[2]));
    return text;
}

/* The message on every rank when ranks ask for different things. */
static inline const char *ddp_unlike(char *why, size_t room, int rank, const int64_t own[3],
                                     int other, const int64_t its[3]) {
    char here[48], there[48];
    snprintf(why, room, "ranks request different operations: rank %d requests %s, rank %d %s", rank,
             ddp_asked(here, sizeof here, own), other, ddp_asked(there, sizeof there, its));
    return why;
}

#endif
