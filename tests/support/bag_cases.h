/* bag_cases.h - mixp_embedding_bag against loops in double: values, gradients of table and weights, tangents, for
 * every mode, dtype, padding and both forms of bags. For the CPU's tests and for a GPU's.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef BAG_CASES_H
#define BAG_CASES_H
#include "mixprec.h"
#include "test.h"
#include "numbers.h"

enum { BAG_VOCAB = 37, BAG_COLS = 70, BAG_BAGS = 9, BAG_IDS = 90, BAG_OUT = BAG_BAGS * BAG_COLS,
       BAG_TABLE = BAG_VOCAB * BAG_COLS };

typedef struct bag_case {
    mixp_bag_mode mode;
    mixp_dtype    dtype;        /* of the table                                            */
    int           flat, weighted, padding;  /* padding -1: none                            */
} bag_case;

typedef struct bag_data {
    int32_t ids[BAG_IDS], offsets[BAG_BAGS + 1];
    float   table[BAG_TABLE], dtable[BAG_TABLE], weights[BAG_IDS], dweights[BAG_IDS], dy[BAG_OUT];
} bag_data;

typedef struct bag_result {
    float y[BAG_OUT], dtable[BAG_TABLE], dweights[BAG_IDS], tangent[BAG_OUT];
} bag_result;

/* Bags of 0 to 23 ids, with an id twice in a bag; or of a fixed width. Values are multiples of 1/64. */
static void bag_fill(const bag_case *k, bag_data *d) {
    static const int begins[BAG_BAGS + 1] = { 0, 0, 1, 11, 34, 34, 50, 51, 90, 90 };
    random_state = 7;
    for (int i = 0; i < BAG_IDS; i++) d->ids[i] = random_to(BAG_VOCAB);
    d->ids[12] = d->ids[11];
    d->ids[50] = 5; /* a bag of one id, which may be the padding */
    for (int b = 0; b <= BAG_BAGS; b++) d->offsets[b] = k->flat ? begins[b] : b * (BAG_IDS / BAG_BAGS);
    for (int i = 0; i < BAG_TABLE; i++) d->table[i] = (float)(random_to(255) - 127) / 64.0f;
    for (int i = 0; i < BAG_TABLE; i++) d->dtable[i] = (float)(random_to(255) - 127) / 64.0f;
    for (int i = 0; i < BAG_IDS; i++) d->weights[i] = (float)(random_to(31) - 15) / 8.0f;
    for (int i = 0; i < BAG_IDS; i++) d->dweights[i] = (float)(random_to(31) - 15) / 8.0f;
    for (int i = 0; i < BAG_OUT; i++) d->dy[i] = (float)(random_to(31) - 15) / 8.0f;
}

/* The definition, in double. */
typedef struct bag_double { double y[BAG_OUT], dtable[BAG_TABLE], dweights[BAG_IDS], tangent[BAG_OUT]; } bag_double;
static void bag_define(const bag_case *k, const bag_data *d, bag_double *r) {
    memset(r, 0, sizeof *r);
    for (int b = 0; b < BAG_BAGS; b++)
        for (int c = 0; c < BAG_COLS; c++) {
            int n = 0, best = -1;
            for (int i = d->offsets[b]; i < d->offsets[b + 1]; i++) n += d->ids[i] != k->padding;
            for (int i = d->offsets[b]; i < d->offsets[b + 1]; i++) {
                const int at = d->ids[i] * BAG_COLS + c;
                const double w = k->weighted ? (double)d->weights[i] : k->mode == MIXP_BAG_MEAN ? 1.0 / n : 1.0;
                if (d->ids[i] == k->padding) continue;
                if (k->mode == MIXP_BAG_MAX) {
                    if (best < 0 || d->table[at] > d->table[d->ids[best] * BAG_COLS + c]) best = i;
                    continue;
                }
                r->y[b * BAG_COLS + c] += w * (double)d->table[at];
                r->dtable[at] += w * (double)d->dy[b * BAG_COLS + c];
                r->dweights[i] += (double)d->table[at] * (double)d->dy[b * BAG_COLS + c];
                r->tangent[b * BAG_COLS + c] += w * (double)d->dtable[at];
                if (k->weighted) r->tangent[b * BAG_COLS + c] += (double)d->dweights[i] * (double)d->table[at];
            }
            if (best < 0) continue;
            r->y[b * BAG_COLS + c] = (double)d->table[d->ids[best] * BAG_COLS + c];
            r->dtable[d->ids[best] * BAG_COLS + c] += (double)d->dy[b * BAG_COLS + c];
            r->tangent[b * BAG_COLS + c] = (double)d->dtable[d->ids[best] * BAG_COLS + c];
        }
}

static mixp_tensor *bag_input(mixp_context *ctx, mixp_dtype dtype, int rank, int64_t rows, int64_t cols, const void *from) {
    const int64_t shape[2] = { rows, cols };
    mixp_tensor *t = mixp_input(ctx, dtype == MIXP_I32 ? MIXP_I32 : MIXP_F32, rank, shape, from);
    return dtype == MIXP_F32 || dtype == MIXP_I32 ? t : mixp_cast(ctx, t, dtype);
}

static void bag_run(mixp_context *ctx, const bag_case *k, const bag_data *d, bag_result *r) {
    const int64_t width = k->flat ? 1 : BAG_IDS / BAG_BAGS, bags = k->flat ? BAG_IDS : BAG_BAGS;
    mixp_step_begin(ctx);
    mixp_tensor *table = bag_input(ctx, k->dtype, 2, BAG_VOCAB, BAG_COLS, d->table);
    mixp_tensor *ids = bag_input(ctx, MIXP_I32, k->flat ? 1 : 2, bags, width, d->ids);
    mixp_tensor *offsets = k->flat ? bag_input(ctx, MIXP_I32, 1, BAG_BAGS, 0, d->offsets) : NULL;
    mixp_tensor *weights = k->weighted ? bag_input(ctx, MIXP_F32, k->flat ? 1 : 2, bags, width, d->weights) : NULL;
    CHECK_INT(mixp_tensor_set_requires_grad(table, 1), MIXP_OK);
    if (weights) CHECK_INT(mixp_tensor_set_requires_grad(weights, 1), MIXP_OK);
    mixp_tensor *y = mixp_embedding_bag(ctx, table, ids, offsets, weights, k->mode,
                                        k->padding < 0 ? MIXP_NO_PADDING : k->padding);
    mixp_tensor *loss = mixp_sum(ctx, mixp_mul(ctx, y, bag_input(ctx, MIXP_F32, 2, BAG_BAGS, BAG_COLS, d->dy)), MIXP_ALL, 0);
    mixp_tensor *by = mixp_jvp(ctx, y, table, bag_input(ctx, k->dtype, 2, BAG_VOCAB, BAG_COLS, d->dtable));
    if (weights)
        by = mixp_add(ctx, by, mixp_jvp(ctx, y, weights,
                                        bag_input(ctx, MIXP_F32, k->flat ? 1 : 2, bags, width, d->dweights)));
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    memset(r, 0, sizeof *r);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    if (mixp_context_error(ctx, NULL) != MIXP_OK) return;
    CHECK_INT(mixp_read(y, r->y, MIXP_F32, BAG_OUT), MIXP_OK);
    CHECK_INT(mixp_read(table->grad, r->dtable, MIXP_F32, BAG_TABLE), MIXP_OK);
    CHECK_INT(mixp_read(by, r->tangent, MIXP_F32, BAG_OUT), MIXP_OK);
    if (weights) CHECK_INT(mixp_read(weights->grad, r->dweights, MIXP_F32, BAG_IDS), MIXP_OK);
}

static void bag_near(const char *what, const float *got, const double *want, int n, double unit, const bag_case *k) {
    for (int i = 0; i < n; i++) {
        if (fabs((double)got[i] - want[i]) <= unit * (1.0 + fabs(want[i]))) continue;
        test_bad++;
        TEST_SHOW("%s of mode %d, %s, flat %d, weighted %d, padding %d: element %d is %g, not %g", what, (int)k->mode,
                  mixp_dtype_name(k->dtype), k->flat, k->weighted, k->padding, i, (double)got[i], want[i]);
        return;
    }
}

/* Calls each(ctx, case, data, result, user) for all cases on a device. */
static int bag_each(const mixp_device *device, void (*each)(const bag_case *, const bag_data *, const bag_result *)) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    static bag_data d;
    static bag_result r;
    mixp_context_desc c;
    int n = 0;
    memset(&c, 0, sizeof c);
    c.device = device;
    mixp_context *ctx = mixp_context_new(&c);
    for (int i = 0; i < 3 * 3 * 2 * 2 * 2; i++) {
        bag_case k;
        k.mode = (mixp_bag_mode)(i % 3);
        k.dtype = dtypes[i / 3 % 3];
        k.flat = i / 9 % 2;
        k.weighted = i / 18 % 2;
        k.padding = i / 36 % 2 ? 5 : -1;
        if (k.weighted && k.mode != MIXP_BAG_SUM) continue;
        bag_fill(&k, &d);
        bag_run(ctx, &k, &d, &r);
        each(&k, &d, &r);
        n++;
    }
    mixp_context_free(ctx);
    return n;
}

static void bag_against_double(const bag_case *k, const bag_data *d, const bag_result *r) {
    static bag_double want;
    const double unit = k->dtype == MIXP_F32 ? 3e-7 : k->dtype == MIXP_F16 ? 6e-4 : 5e-3;
    bag_define(k, d, &want);
    bag_near("y", r->y, want.y, BAG_OUT, unit, k);
    bag_near("dtable", r->dtable, want.dtable, BAG_TABLE, 3.0 * unit, k);
    if (k->weighted) bag_near("dweights", r->dweights, want.dweights, BAG_IDS, 4.0 * unit, k);
    /* The tangent of both inputs is the sum of two rounded bags. */
    bag_near("tangent", r->tangent, want.tangent, BAG_OUT, (k->weighted ? 16.0 : 1.0) * unit, k);
}
#endif
