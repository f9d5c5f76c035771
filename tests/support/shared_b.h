/* shared_b.h - the gradient of a matrix that an entire batch is multiplied by, on any device,
 * compared with a double loop: the sum over the batch is taken in f32 and rounded once.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef SHARED_B_H
#define SHARED_B_H

/* op(a)[batch, m, k] op(b)[k, n]: shapes and transposes of one case. */
typedef struct shared_b {
    int64_t    batch, m, n, k;
    int        trans_a, trans_b, twice;     /* twice: two uses, so that gradients add up      */
    mixp_dtype a, b;
} shared_b;

/* Small whole numbers: every sum is exact in f32, so the true value, rounded once, must come. */
static float shared_b_number(int64_t i, int64_t salt)
{ return (float)((i * 7919 + salt * 104729) % 13) - 5.0f; }

static mixp_tensor *shared_b_param(mixp_context *ctx, mixp_dtype dtype, int rank,
                                   const int64_t *shape, int64_t salt) {
    mixp_tensor *t = mixp_param(ctx, "", dtype, rank, shape);
    float *v = (float *)malloc((size_t)t->count * sizeof *v);
    int64_t i;
    for (i = 0; i < t->count; i++) v[i] = shared_b_number(i, salt);
    CHECK_INT(mixp_write(t, v, MIXP_F32, t->count), MIXP_OK);
    free(v);
    return t;
}

/* Row p, column j of op(b)'s gradient: over the batch and the rows of c, a' dy. */
static double shared_b_want(const shared_b *s, int64_t p, int64_t j) {
    double  sum = 0;
    for (int64_t z = 0; z < s->batch; z++)
        for (int64_t i = 0; i < s->m; i++) {
            int64_t a = z * s->m * s->k + (s->trans_a ? p * s->m + i : i * s->k + p);
            int64_t dy = (z * s->m + i) * s->n + j;
            sum += (double)shared_b_number(a, 1) * (double)shared_b_number(dy, 3);
        }
    return sum;
}

/* The true value in b's dtype. With two uses the first is rounded before the second adds. */
static double shared_b_rounded(const shared_b *s, double want) {
    double once = mixp_decode(s->b, mixp_encode(s->b, want, 0));
    return s->twice ? mixp_decode(s->b, mixp_encode(s->b, once + want, 0)) : once;
}

static void shared_b_check(const shared_b *s, const mixp_tensor *b) {
    float  *got = (float *)malloc((size_t)b->count * sizeof *got);
    memset(got, 0, (size_t)b->count * sizeof *got);
    CHECK(b->grad && mixp_read(b->grad, got, MIXP_F32, b->count) == MIXP_OK);
    for (int64_t p = 0; p < s->k; p++)
        for (int64_t j = 0; j < s->n; j++) {
            double want = shared_b_rounded(s, shared_b_want(s, p, j));
            double have = (double)got[s->trans_b ? j * s->k + p : p * s->n + j];
            if (have == want) continue;
            test_bad++;
            TEST_SHOW("b %s, trans %d%d, batch %lld: db[%lld, %lld] is %.9g, not %.9g",
                      mixp_dtype_name(s->b), s->trans_a, s->trans_b, (long long)s->batch,
                      (long long)p, (long long)j, have, want);
        }
    free(got);
}

static void shared_b_run(const mixp_device *device, const shared_b *s) {
    int64_t a_shape[3], b_shape[2], y_shape[3];
    mixp_context_desc desc;
    mixp_tensor *a, *b, *dy, *loss = NULL;
    memset(&desc, 0, sizeof desc);
    desc.device = device;
    a_shape[0] = y_shape[0] = s->batch;
    a_shape[1] = s->trans_a ? s->k : s->m;
    a_shape[2] = s->trans_a ? s->m : s->k;
    b_shape[0] = s->trans_b ? s->n : s->k;
    b_shape[1] = s->trans_b ? s->k : s->n;
    y_shape[1] = s->m;
    y_shape[2] = s->n;
    mixp_context *ctx = mixp_context_new(&desc);
    if (!ctx) { test_bad++; return; }
    a = shared_b_param(ctx, s->a, 3, a_shape, 1);
    b = shared_b_param(ctx, s->b, 2, b_shape, 2);
    dy = shared_b_param(ctx, MIXP_F32, 3, y_shape, 3);
    mixp_step_begin(ctx);
    for (int use = 0; use <= s->twice; use++) {
        mixp_tensor *y = mixp_matmul(ctx, a, b, s->trans_a, s->trans_b);
        mixp_tensor *sum = mixp_sum(ctx, mixp_mul(ctx, y, dy), MIXP_ALL, 0);
        loss = loss ? mixp_add(ctx, loss, sum) : sum;
    }
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    shared_b_check(s, b);
    mixp_context_free(ctx);
}

/* a[batch, 1, 1] of ones with b = 1, whose gradient is the batch: no more than 256 where bf16
 * holds the sum, than 2048 where f16 does. */
static void shared_b_ones(const mixp_device *device, mixp_dtype dtype, int64_t batch) {
    int64_t a_shape[3] = { 0, 1, 1 }, b_shape[2] = { 1, 1 };
    mixp_context_desc desc;
    float got = 0;
    a_shape[0] = batch;
    memset(&desc, 0, sizeof desc);
    desc.device = device;
    mixp_context *ctx = mixp_context_new(&desc);
    if (!ctx) { test_bad++; return; }
    mixp_tensor *a = mixp_param(ctx, "a", MIXP_F32, 3, a_shape);
    mixp_tensor *b = mixp_param(ctx, "b", dtype, 2, b_shape);
    mixp_fill(a, 1);
    mixp_fill(b, 1);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, mixp_matmul(ctx, a, b, 1, 0), MIXP_ALL, 0)), MIXP_OK);
    CHECK(b->grad && mixp_read(b->grad, &got, MIXP_F32, 1) == MIXP_OK);
    CHECK_NEAR(got, batch, 0);
    mixp_context_free(ctx);
}

static void shared_b_everywhere(const mixp_device *device) {
    static const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    for (int i = 0; i < 24; i++) {
        shared_b s = { 40, 3, 5, 7, 0, 0, 0, MIXP_F32, MIXP_F32 };
        s.b = dtypes[i % 3];
        s.trans_a = i / 3 % 2;
        s.trans_b = i / 6 % 2;
        s.twice = i / 12;
        shared_b_run(device, &s);
    }
    shared_b_ones(device, MIXP_BF16, 512);
}
#endif
