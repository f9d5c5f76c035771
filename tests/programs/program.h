/* program.h - what an everyday program is, and the few words that all of them are written with.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A program makes its parameters, fills the memory of its batch, and gives its loss, as a newcomer writes
 * them from the README. harness.h runs each of them in every mode. A program keeps everything in one
 * struct, so that two runs stand side by side. Its batch depends on the step and the part alone.
 */
#ifndef PROGRAM_H
#define PROGRAM_H
#include "mixprec.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)        /* not every test calls all of it */
#  pragma GCC diagnostic ignored "-Wunused-function"
#endif

/* Recipes need sizes of linears that are multiples of 16, 32 or 128: FIT rounds a size up to that. */
#ifndef PROGRAMS_UNIT
#  define PROGRAMS_UNIT 1
#endif
#define FIT(n) (((n) + PROGRAMS_UNIT - 1) / PROGRAMS_UNIT * PROGRAMS_UNIT)

enum { TURNS = 2, PARTS = 4, MOST_PARAMS = 64, MOST_BUFFERS = 16 };

/* How a program is run. Zeroed: f32, without anything. */
typedef struct mode {
    mixp_dtype dtype;           /* of autocast; MIXP_F32: none                                   */
    int level;                  /* of autocast                                                   */
    int guard;                  /* 0: none, 1: all defaults, 2: looks often, forgives soon       */
    int retry;                  /* 1: mixp_retry(scaler, 3)                                      */
    int evaluate;               /* an evaluation of 2 batches every so many steps; 0: none       */
    int parts;                  /* micro-batches of a step; 0: the program's own number          */
    int rule;                   /* an index of rules                                             */
    int cut;                    /* saved and resumed after so many steps; 0: never               */
    int steps;                  /* 0: the program's own number                                   */
    int recipe, codes;          /* a mixp_recipe_kind, and its codes                             */
    int narrow;                 /* 1: its products in the GPU's own formats                      */
} mode;

/* Who calls the program: made by harness.h, passed to each of its functions. */
typedef struct session {
    mixp_context   *ctx;
    mixp_optimizer *opt[TURNS];
    mixp_scaler    *scaler[TURNS];
    const struct program *program;
    void           *model;              /* the program's struct                                  */
    mode            how;
    int             owner;              /* whose optimizer gets new parameters; -1: they are frozen */
    int             step, part;         /* of the batch that is filled                           */
    int             filled;             /* 1: a step is captured, and finds its batch as it is   */
    int             apart;              /* 1: its micro-batches are what ranks would have        */
    uint64_t        random;
    double          largest_input;      /* of all floats that the program has fed                */
    mixp_tensor    *param[MOST_PARAMS], *buffer[MOST_BUFFERS];
    int             params, buffers;
    int             shared[MOST_BUFFERS];   /* 1: the ranks share that buffer                    */
} session;

typedef struct program {
    const char *name;
    size_t      size;                                   /* of its struct                         */
    void        (*open)(session *s);                    /* makes and initialises the parameters  */
    void        (*batch)(session *s);                   /* fills the batch                       */
    mixp_tensor *(*loss)(session *s, int turn, int training);
    double      lr;
    void        (*carry)(session *s);                   /* after mixp_backward of each part: writes
                                                           buffers; NULL: nothing                */
    void        (*after)(session *s, int turn);         /* after an update; NULL: nothing        */
    int         steps;                                  /* 0: 60                                 */
    int         turns, scalers;                         /* networks with an optimizer of their own, and
                                                           how many scalers they have; 0: 1      */
    int         parts;                                  /* micro-batches of a step; 0: 1         */
    int         dropout;                                /* 1: training is random                 */
    int         mixes;                                  /* 1: a part of a step reads buffers that other
                                                           parts write, or the mean of all ranks */
    double      near;                                   /* a guarded run's loss exceeds f32's by at most
                                                           that share of the way that it went; 0: 0.15 */
    int         offset;                                 /* 1: its numbers vary little beside their size:
                                                           low dtypes lose what they tell */
    int         spared;                                 /* steps that f16 without a guard applies though its
                                                           forward overflowed: behind a division by Inf the
                                                           gradients are 0, and it learns nothing. With a
                                                           guard they may be skipped; 0: none */
} program;

/* --- random numbers: keyed by step and part, the same in each mode ------------------------- */

static void reseed(session *s, int step, int part) {
    s->step = step;
    s->part = part;
    s->random = (uint64_t)(step * 64 + part + 1) * 0x9E3779B97F4A7C15u;
}
static float uniform(session *s) {                      /* in [0, 1)                             */
    uint64_t x = s->random += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (float)((x ^ x >> 31) >> 40) / 16777216.0f;
}
static float normal(session *s) {                       /* nearly                                */
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) sum += uniform(s);
    return sum;
}
static int below(session *s, int n) { return (int)(uniform(s) * (float)n); }

/* --- parameters ---------------------------------------------------------------------------- */

static mixp_tensor *parameter(session *s, const char *name, int64_t rows, int64_t cols) {
    const int64_t shape[2] = { rows, cols };
    mixp_dtype    dtype = s->how.level == 3 ? s->how.dtype : MIXP_F32;
    mixp_tensor  *t = mixp_param(s->ctx, name, dtype, cols ? 2 : 1, shape);
    if (s->owner < 0) mixp_tensor_set_requires_grad(t, 0);
    else mixp_optimizer_add(s->opt[s->owner], t, NULL);
    return s->param[s->params++] = t;
}
static mixp_tensor *matrix(session *s, const char *name, int64_t rows, int64_t cols, double std) {
    mixp_tensor *t = parameter(s, name, rows, cols);
    mixp_init_normal(t, 0, std);
    return t;
}
static mixp_tensor *vector(session *s, const char *name, int64_t n, double value) {
    mixp_tensor *t = parameter(s, name, n, 0);
    mixp_fill(t, value);
    return t;
}
/* The same, with a number in its name: "h.3.up". */
static mixp_tensor *layer(session *s, int i, const char *part, int64_t rows, int64_t cols, double std) {
    char name[64];
    snprintf(name, sizeof name, "h.%d.%s", i, part);
    return matrix(s, name, rows, cols, std);
}

/* --- buffers ------------------------------------------------------------------------------- */

/* f32, of zeros. */
static mixp_tensor *buffer(session *s, const char *name, int64_t rows, int64_t cols, mixp_buffer_ranks ranks) {
    const int64_t shape[2] = { rows, cols };
    mixp_tensor  *t = mixp_buffer(s->ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    mixp_buffer_set_ranks(t, ranks);
    s->shared[s->buffers] = ranks != MIXP_BUFFER_OWN;
    return s->buffer[s->buffers++] = t;
}
/* One for each part, with a number in its name: "h.3". */
static void buffer_of_parts(session *s, mixp_tensor **of_part, const char *name, int64_t rows, int64_t cols) {
    for (int i = 0; i < PARTS; i++) {
        char numbered[64];
        snprintf(numbered, sizeof numbered, "%s.%d", name, i);
        of_part[i] = buffer(s, numbered, rows, cols, MIXP_BUFFER_OWN);
    }
}

/* --- inputs -------------------------------------------------------------------------------- */

static mixp_tensor *floats(session *s, float *x, int64_t a, int64_t b, int64_t c) {
    const int64_t shape[3] = { a, b, c };
    const int     rank = 1 + (b > 0) + (c > 0);
    const int64_t n = a * (b ? b : 1) * (c ? c : 1);
    for (int64_t i = 0; i < n; i++)
        if (fabs((double)x[i]) > s->largest_input && fabs((double)x[i]) < HUGE_VAL)
            s->largest_input = fabs((double)x[i]);
    return mixp_input(s->ctx, MIXP_F32, rank, shape, x);
}
static mixp_tensor *ints(session *s, int32_t *x, int64_t a, int64_t b) {
    const int64_t shape[2] = { a, b };
    return mixp_input(s->ctx, MIXP_I32, 1 + (b > 0), shape, x);
}
static mixp_tensor *bytes(session *s, uint8_t *x, int64_t a, int64_t b) {
    const int64_t shape[2] = { a, b };
    return mixp_input(s->ctx, MIXP_U8, 1 + (b > 0), shape, x);
}
static mixp_tensor *shaped(session *s, mixp_tensor *x, int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t shape[4] = { a, b, c, d };
    return mixp_reshape(s->ctx, x, 2 + (c > 0) + (d > 0), shape);
}
#endif
