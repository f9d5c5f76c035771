/* test_scaled_entropy.c - a loss, its scale and its gradient in one pass: the bits are those of the
 * three operators, and unsupported cases return an error.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"

enum { ROWS = 6, WIDTH = 8, VOCAB = 40, VALUES = ROWS * WIDTH + VOCAB * WIDTH + 3 };

static struct { mixp_kernels kernels; mixp_device device; int calls; } seen;

static mixp_result counted(const mixp_exec *x, const mixp_cross_entropy_both_args *k) {
    seen.calls++;
    return mixp_cpu()->kernels->cross_entropy_both(x, k);
}

/* What is unlike the plain case, where all is one pass. */
enum { KEPT = 1, READ = 2, LASTING = 4, NO_KERNEL = 8, NO_SCALER = 16, GUARDED = 32 };

typedef struct head {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *x, *w, *logits;
    int             how;
} head;

static head head_new(int how) {
    int64_t x_shape[2] = { ROWS, WIDTH }, w_shape[2] = { VOCAB, WIDTH };
    mixp_context_desc desc = { 0 };
    mixp_scaler_desc scaler = { 0 };
    head h = { 0 };
    memset(&seen, 0, sizeof seen);
    seen.kernels = *mixp_cpu()->kernels;
    seen.kernels.cross_entropy_both = how & NO_KERNEL ? NULL : counted;
    seen.device = *mixp_cpu();
    seen.device.kernels = &seen.kernels;
    desc.device = &seen.device;
    h.how = how;
    h.ctx = mixp_context_new(&desc);
    scaler.disabled = (how & NO_SCALER) != 0;
    h.scaler = mixp_scaler_new(h.ctx, &scaler);
    h.opt = mixp_optimizer_new(h.ctx, NULL);
    if (how & GUARDED) CHECK_INT(mixp_guard_start(h.ctx, NULL), MIXP_OK);
    h.x = mixp_param(h.ctx, "x", MIXP_F32, 2, x_shape);
    h.w = mixp_param(h.ctx, "w", MIXP_F32, 2, w_shape);
    mixp_init_normal(h.x, 0, 1);
    mixp_init_normal(h.w, 0, 1);
    mixp_optimizer_add(h.opt, h.x, NULL);
    mixp_optimizer_add(h.opt, h.w, NULL);
    return h;
}

static mixp_tensor *targets_of(head *h) {
    static const int32_t targets[ROWS] = { 3, 0, 39, -100, 7, 7 };
    int64_t rows[1] = { ROWS };
    return mixp_input(h->ctx, MIXP_I32, 1, rows, targets);
}

static void logits_of(head *h) {
    h->logits = mixp_linear(h->ctx, h->x, h->w, NULL);
    if (!(h->how & LASTING)) mixp_tensor_set_disposable(h->logits, 1);
    if (h->how & KEPT) mixp_tensor_set_requires_grad(h->logits, 1);
    if (h->how & READ) mixp_mean(h->ctx, h->logits, MIXP_ALL, 0);
}

/* Two micro-batches of two steps: the losses, and what the weights are then. */
static void trained(head h, int apart, mixp_dtype dtype, float share, float *out) {
    memset(out, 0, VALUES * sizeof *out);
    for (int i = 0; i < 4; i++) {
        mixp_tensor *loss = NULL, *scaled = NULL;
        if (i % 2 == 0) mixp_zero_grad(h.opt);
        mixp_step_begin(h.ctx);
        MIXP_AUTOCAST(h.ctx, dtype) {
            logits_of(&h);
            if (apart) {
                loss = mixp_cross_entropy(h.ctx, h.logits, targets_of(&h), MIXP_IGNORE);
                if (share != 1) loss = mixp_scale(h.ctx, loss, share);
                scaled = mixp_scaler_scale(h.scaler, loss);
            } else {
                scaled = mixp_scaler_cross_entropy(h.scaler, h.logits, targets_of(&h), MIXP_IGNORE,
                                                   share, &loss);
            }
        }
        out[0] += (float)mixp_item(loss);
        out[1] += (float)mixp_item(scaled);
        CHECK_INT(mixp_backward(h.ctx, scaled), MIXP_OK);
        if (i % 2 == 0) continue;
        CHECK_INT(mixp_scaler_step(h.scaler, h.opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(h.scaler), MIXP_OK);
    }
    /* A random number behind it: a loss in one operator or in several draws nothing. */
    out[2] = (float)mixp_item(mixp_sum(h.ctx, mixp_dropout(h.ctx, h.x, 0.5f, 1), MIXP_ALL, 0));
    mixp_read(h.x, out + 3, MIXP_F32, ROWS * WIDTH);
    mixp_read(h.w, out + 3 + ROWS * WIDTH, MIXP_F32, VOCAB * WIDTH);
    CHECK_INT(mixp_context_error(h.ctx, NULL), MIXP_OK);
    mixp_context_free(h.ctx);
}

static void bits_are_those_of_the_operators(void) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    static const float shares[] = { 1.0f, 0.5f, 1.0f / 3.0f };
    for (int how = 0; how < 64; how++)
        for (int i = 0; i < 3; i++) {
            static float one[VALUES], three[VALUES];
            int bad = test_bad;
            trained(head_new(how), 0, dtypes[i], shares[i], one);
            CHECK_INT(seen.calls, how ? 0 : 4);
            trained(head_new(how), 1, dtypes[i], shares[i], three);
            CHECK_INT(memcmp(one, three, sizeof one), 0);
            if (test_bad > bad) printf("  how %d, %s\n", how, mixp_dtype_name(dtypes[i]));
        }
}

/* Against differences of the loss itself. */
static void gradients_are_differences(void) {
    head h = head_new(0);
    float dw[VOCAB * WIDTH], w[VOCAB * WIDTH];
    mixp_step_begin(h.ctx);
    logits_of(&h);
    mixp_backward(h.ctx, mixp_scaler_cross_entropy(h.scaler, h.logits, targets_of(&h), MIXP_IGNORE,
                                                   0.25f, NULL));
    CHECK_INT(seen.calls, 1);
    CHECK_INT(mixp_scaler_unscale(h.scaler, h.opt), MIXP_OK);
    mixp_read(h.w->grad, dw, MIXP_F32, VOCAB * WIDTH);
    mixp_read(h.w, w, MIXP_F32, VOCAB * WIDTH);
    for (int i = 0; i < VOCAB * WIDTH; i += 7) {
        double at[2], step = 1e-2;
        for (int k = 0; k < 2; k++) {
            float old = w[i];
            w[i] += (float)(k ? step : -step);
            mixp_write(h.w, w, MIXP_F32, VOCAB * WIDTH);
            w[i] = old;
            mixp_step_begin(h.ctx);
            logits_of(&h);
            at[k] = mixp_item(mixp_cross_entropy(h.ctx, h.logits, targets_of(&h), MIXP_IGNORE));
        }
        CHECK_NEAR(dw[i], 0.25 * (at[1] - at[0]) / (2 * step), 1e-4);
    }
    mixp_context_free(h.ctx);
}

static void misuse_is_told(void) {
    for (int i = 0; i < 3; i++) {
        head h = head_new(0);
        mixp_tensor *loss = NULL, *scaled;
        const char *why = "";
        mixp_step_begin(h.ctx);
        logits_of(&h);
        scaled = mixp_scaler_cross_entropy(h.scaler, h.logits, targets_of(&h), MIXP_IGNORE, 1, &loss);
        CHECK(scaled && loss);
        if (i == 0) CHECK_INT(mixp_backward(h.ctx, mixp_scale(h.ctx, scaled, 2)), MIXP_ERR_ORDER);
        if (i == 1) CHECK(!mixp_argmax(h.ctx, h.logits, -1, 0));
        if (i == 2) CHECK_INT(mixp_backward(h.ctx, loss), MIXP_ERR_ORDER);
        mixp_result r = mixp_context_error(h.ctx, &why);
        CHECK_INT(r, MIXP_ERR_ORDER);
        CHECK_TEXT(why, i == 0 ? "can only be passed to mixp_backward"
                      : i == 1 ? "no longer exists: it was disposable" : "nothing was recorded");
        mixp_context_free(h.ctx);
    }
}

static void bad_input_is_told(void) {
    int32_t bad[ROWS] = { 0, 1, VOCAB, 0, 0, 0 };
    int64_t rows[1] = { ROWS };
    head h = head_new(0);
    const char *why = "";
    mixp_tensor *loss = h.x;
    float before[ROWS * VOCAB], after[ROWS * VOCAB];
    CHECK(!mixp_scaler_cross_entropy(NULL, NULL, NULL, 0, 1, &loss) && !loss);
    mixp_step_begin(h.ctx);
    logits_of(&h);
    CHECK_INT(mixp_read(h.logits, before, MIXP_F32, ROWS * VOCAB), MIXP_OK);
    CHECK(!mixp_scaler_cross_entropy(h.scaler, h.logits, mixp_input(h.ctx, MIXP_I32, 1, rows, bad),
                                     MIXP_IGNORE, 1, &loss));
    CHECK(!loss);
    CHECK_INT(mixp_read(h.logits, after, MIXP_F32, ROWS * VOCAB), MIXP_OK);
    CHECK_INT(memcmp(before, after, sizeof before), 0);     /* and the logits are as they were */
    CHECK_INT(mixp_context_error(h.ctx, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, "target 40 at row 2 is outside [0, 40)");
    mixp_context_free(h.ctx);
    h = head_new(0);
    mixp_step_begin(h.ctx);
    CHECK(!mixp_scaler_cross_entropy(h.scaler, NULL, targets_of(&h), MIXP_IGNORE, 1, NULL));
    CHECK(mixp_context_error(h.ctx, NULL) != MIXP_OK);
    mixp_context_free(h.ctx);
}

int main(void) {
    RUN(bits_are_those_of_the_operators);
    RUN(gradients_are_differences);
    RUN(misuse_is_told);
    RUN(bad_input_is_told);
    return test_report();
}
