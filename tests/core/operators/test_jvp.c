/* test_jvp.c - the cases of jvp_cases.h on the CPU, and a mixp_jvp that on_error leaves.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include <setjmp.h>
#include "mixprec.h"
#include "test.h"

static mixp_context *case_context(void) { return mixp_context_new(NULL); }
#include "jvp_cases.h"

static jmp_buf out_of_it;
static void jumps(mixp_result code, const char *message, void *user) {
    (void)code; (void)message; (void)user;
    longjmp(out_of_it, 1);
}

/* An operator without a tangent stands behind p w. The derivative of p w along p, afterwards, is the
 * row sums of w: 3 and 7. */
static void test_left_by_a_jump(void) {
    static const int64_t square[2] = { 2, 2 };
    static const float values[4] = { 1, 2, 3, 4 };
    static mixp_context *ctx;
    static mixp_tensor *p, *w;
    mixp_context_desc d;
    float got[4];
    memset(&d, 0, sizeof d);
    d.on_error = jumps;
    ctx = mixp_context_new(&d);
    p = mixp_param(ctx, "p", MIXP_F32, 2, square);
    w = mixp_param(ctx, "w", MIXP_F32, 2, square);
    CHECK_INT(mixp_write(w, values, MIXP_F32, 4), MIXP_OK);
    if (!setjmp(out_of_it)) {
        mixp_step_begin(ctx);
        mixp_jvp(ctx, mixp_rms_norm(ctx, mixp_matmul(ctx, p, w, 0, 0), NULL, 1e-5f), w, NULL);
        CHECK(0);
    }
    mixp_context_clear_error(ctx);
    int turn = setjmp(out_of_it);
    CHECK_INT(turn, 0);
    if (!turn) {
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
        mixp_tensor *y = mixp_jvp(ctx, mixp_matmul(ctx, p, w, 0, 1), p, NULL);
        CHECK_INT(mixp_read(y, got, MIXP_F32, 4), MIXP_OK);
        CHECK(got[0] == 3 && got[1] == 7 && got[2] == 3 && got[3] == 7);
    }
    mixp_context_free(ctx);
}

/* Sites of tangents are named by the operators that the program called, in a second derivative too. The
 * tangent of x w along w is 4 * 60,000, which passes f16's range. */
static void test_names_of_sites(void) {
    static const int64_t n[1] = { 16 };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F16, 1, n), *y = NULL;
    mixp_site_info site;
    mixp_event e;
    char text[500] = "";
    int i, of_tanh = 0;
    mixp_fill(w, 0.125);
    CHECK_INT(mixp_optimizer_add(opt, w, NULL), MIXP_OK);
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        mixp_tensor *x = mixp_full(ctx, MIXP_F16, 1, n, 4.0), *d = mixp_full(ctx, MIXP_F16, 1, n, 60000.0);
        y = mixp_tanh(ctx, mixp_mul(ctx, x, w));
        y = mixp_jvp(ctx, mixp_jvp(ctx, y, w, d), w, NULL);
    }
    CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, y, MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    for (i = 0; mixp_site(ctx, i, &site); i++) {
        const char *colon = strstr(site.name, ": "), *op = colon ? colon + 2 : site.name;
        of_tanh += strncmp(op, "tangent of tanh", 15) == 0;
        if (strncmp(op, "tangent of tanh", 15) == 0 || strncmp(op, "tangent of mul", 14) == 0) continue;
        CHECK(!strcmp(op, "tanh") || !strcmp(op, "mul") || !strcmp(op, "mean"));
    }
    CHECK(of_tanh >= 4);
    for (i = 0; mixp_guard_event(ctx, i, &e) && strcmp(e.site, "tangent of mul"); i++) {}
    CHECK_TEXT(mixp_event_text(&e, text, sizeof text), "step 1: tangent of mul overflowed: stores f32 now");
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* Reductions of no elements: values as PyTorch's, and derivatives along x. torch.func's of sum, mean, var, std
 * and norms are these; that of logsumexp is NaN there, the slope of log at 0 times 0. Here it is 0, that of a
 * constant, as var's is in both. The gradient has no elements. */
static void test_of_nothing(void) {
    enum { SUM, MEAN, LOGSUMEXP, VAR, STD, VECTOR_NORM, NORM, KINDS };
    static const double values[KINDS] = { 0, NAN, -HUGE_VAL, NAN, NAN, 0, 0 };
    static const double slopes[KINDS] = { 0, NAN, 0, 0, NAN, 0, 0 };
    static const int64_t shapes[3][2] = { { 0, 0 }, { 2, 0 }, { 0, 3 } };
    for (int kind = 0; kind < KINDS; kind++)
        for (int s = 0; s < 3; s++) {
            mixp_context *c = mixp_context_new(NULL);
            float got[4];
            const int rank = s ? 2 : 1, n = s == 0 ? 1 : s == 1 ? 2 : 0;
            mixp_step_begin(c);
            mixp_tensor *x = mixp_activation(c, MIXP_F32, rank, shapes[s]);
            mixp_tensor_set_requires_grad(x, 1);
            mixp_tensor *y = kind == SUM         ? mixp_sum(c, x, -1, 0)
                : kind == MEAN      ? mixp_mean(c, x, -1, 0)
                : kind == LOGSUMEXP ? mixp_logsumexp(c, x, -1, 0)
                : kind == VAR       ? mixp_var(c, x, -1, 1, 0)
                : kind == STD       ? mixp_std(c, x, -1, 1, 0)
                : kind == NORM      ? mixp_norm(c, x, 3.0f, -1, 0)
                                    : mixp_vector_norm(c, x, -1, 0);
            mixp_tensor *d = mixp_jvp(c, y, x, NULL);
            CHECK_INT(y ? y->count : -1, n);
            CHECK_INT(d ? d->count : -1, n);
            CHECK_INT(mixp_read(y, got, MIXP_F32, n), MIXP_OK);
            CHECK_INT(mixp_read(d, got + 2, MIXP_F32, n), MIXP_OK);
            for (int i = 0; i < n; i++) {
                CHECK((double)got[i] == values[kind] || (values[kind] != values[kind] && got[i] != got[i]));
                CHECK((double)got[2 + i] == slopes[kind] || (slopes[kind] != slopes[kind] && got[2 + i] != got[2 + i]));
            }
            CHECK_INT(mixp_backward(c, mixp_sum(c, y, MIXP_ALL, 0)), MIXP_OK);
            CHECK(x->grad && x->grad->count == 0);
            mixp_context_free(c);
        }
}

/* --- the norm of a gradient in a loss -------------------------------------------------------- */

enum { NORM_ROWS = 6, NORM_IN = 3, NORM_HIDDEN = 4, NORM_WEIGHTS = 2 };
typedef struct normed {
    mixp_context *ctx;
    mixp_tensor  *w[NORM_WEIGHTS], *loss;
    float         x[NORM_ROWS * NORM_IN];
} normed;

/* Walks a loss back. Returns the norm of its gradients by the weights. */
static double norm_of_gradients(normed *n, mixp_tensor **d) {
    static const int64_t shape[2] = { NORM_ROWS, NORM_IN };
    mixp_context *ctx = n->ctx;
    double square = 0.0;
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    for (int i = 0; i < NORM_WEIGHTS; i++) n->w[i]->grad = NULL;
    mixp_tensor *h = mixp_tanh(ctx, mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, shape, n->x), n->w[0], NULL));
    h = mixp_add_scalar(ctx, mixp_linear(ctx, h, n->w[1], NULL), -1.0f);
    n->loss = mixp_mean(ctx, mixp_square(ctx, h), MIXP_ALL, 0);
    CHECK_INT(mixp_backward(ctx, n->loss), MIXP_OK);
    for (int i = 0; i < NORM_WEIGHTS; i++) {
        float g[NORM_HIDDEN * NORM_IN];
        CHECK_INT(mixp_read(n->w[i]->grad, g, MIXP_F32, n->w[i]->count), MIXP_OK);
        for (int64_t k = 0; k < n->w[i]->count; k++) square += (double)g[k] * (double)g[k];
    }
    for (int i = 0; i < NORM_WEIGHTS && d; i++)
        MIXP_NO_GRAD(ctx) d[i] = mixp_scale(ctx, n->w[i]->grad, (float)(1.0 / sqrt(square)));
    return sqrt(square);
}

/* Along the gradient, mixp_jvp is the gradient's norm, and its gradients are those of the norm: central differences
 * of the norm that a walk back gives. */
static void test_norm_of_a_gradient(void) {
    static const int64_t in[2] = { NORM_HIDDEN, NORM_IN }, out[2] = { 1, NORM_HIDDEN };
    static const float   eps = 1e-2f;
    mixp_tensor *d[NORM_WEIGHTS], *norm;
    float got[NORM_WEIGHTS][NORM_HIDDEN * NORM_IN], w[NORM_HIDDEN * NORM_IN];
    normed n;
    memset(&n, 0, sizeof n);
    n.ctx = mixp_context_new(NULL);
    n.w[0] = mixp_param(n.ctx, "w1", MIXP_F32, 2, in);
    n.w[1] = mixp_param(n.ctx, "w2", MIXP_F32, 2, out);
    for (int i = 0; i < NORM_WEIGHTS; i++) CHECK_INT(mixp_init_normal(n.w[i], 0.2, 0.7), MIXP_OK);
    for (int i = 0; i < NORM_ROWS * NORM_IN; i++) n.x[i] = (float)(i * 7 % 11 - 5) / 4.0f;

    double want = norm_of_gradients(&n, d);
    norm = mixp_add(n.ctx, mixp_jvp(n.ctx, n.loss, n.w[0], d[0]), mixp_jvp(n.ctx, n.loss, n.w[1], d[1]));
    CHECK_NEAR(mixp_item(norm), want, 1e-5 * want);
    for (int i = 0; i < NORM_WEIGHTS; i++) n.w[i]->grad = NULL;
    CHECK_INT(mixp_backward(n.ctx, norm), MIXP_OK);
    for (int i = 0; i < NORM_WEIGHTS; i++)
        CHECK_INT(mixp_read(n.w[i]->grad, got[i], MIXP_F32, n.w[i]->count), MIXP_OK);

    for (int i = 0; i < NORM_WEIGHTS; i++) {
        for (int64_t k = 0; k < n.w[i]->count; k++) {
            CHECK_INT(mixp_read(n.w[i], w, MIXP_F32, n.w[i]->count), MIXP_OK);
            w[k] += eps;
            CHECK_INT(mixp_write(n.w[i], w, MIXP_F32, n.w[i]->count), MIXP_OK);
            double above = norm_of_gradients(&n, NULL);
            w[k] -= 2 * eps;
            CHECK_INT(mixp_write(n.w[i], w, MIXP_F32, n.w[i]->count), MIXP_OK);
            double below = norm_of_gradients(&n, NULL);
            w[k] += eps;
            CHECK_INT(mixp_write(n.w[i], w, MIXP_F32, n.w[i]->count), MIXP_OK);
            CHECK_NEAR((double)got[i][k], (above - below) / (2.0 * (double)eps), 2e-3);
        }
    }
    CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
    mixp_context_free(n.ctx);
}

int main(void) {
    jvp_run_cases();
    RUN(test_left_by_a_jump);
    RUN(test_names_of_sites);
    RUN(test_of_nothing);
    RUN(test_norm_of_a_gradient);
    return test_report();
}
