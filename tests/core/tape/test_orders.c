/* test_orders.c - calls in an impossible or unusual order: pops that meet another owner's region,
 * captures that fail, a low parameter of two optimizers, views written between clip and step,
 * parameters that a step of several ranks leaves out. A refused call changes nothing.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"

static void told(mixp_context *ctx, mixp_result code, const char *part) {
    const char *text = "";
    CHECK_INT(mixp_context_error(ctx, &text), code);
    CHECK_TEXT(text, part);
    mixp_context_clear_error(ctx);
}
#define TOLD(ctx, call, part)                                                                   \
    do { CHECK_INT((call), MIXP_ERR_ORDER); told(ctx, MIXP_ERR_ORDER, part); } while (0)

/* --- ends without a beginning, beginnings inside --------------------------------------------------- */

static void a_capture_that_did_not_begin(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    CHECK(mixp_capture_end(ctx) == NULL);
    told(ctx, MIXP_ERR_ORDER, "mixp_capture_end: no step is being captured; call mixp_capture_begin first");
    mixp_context_free(ctx);
}

static int begins_in_forward;

/* Begins a step although that is refused: the second try counts as the end of an exception. The step recycles the
 * call. */
static mixp_result begins_twice(mixp_call *c) {
    static const float x[2] = { 1, 2 };
    static const int64_t n[1] = { 2 };
    mixp_context *ctx = c->ctx;
    CHECK_INT(mixp_step_begin(ctx), MIXP_ERR_ORDER);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    /* A call without a result takes the place of this one. */
    CHECK(mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 1, n, x), mixp_input(ctx, MIXP_F32, 1, n, x), NULL) == NULL);
    return MIXP_OK;
}
static mixp_result beginner_infer(mixp_call *c) {
    return begins_in_forward ? mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape)
                             : begins_twice(c);
}
static const mixp_op beginner = { "beginner", MIXP_CLASS_KEEP, 0, beginner_infer, begins_twice, NULL, NULL };

static void an_operator_that_insists_on_a_step(void) {
    static const float x[2] = { 1, 2 };
    static const int64_t two[1] = { 2 };
    mixp_context *ctx = mixp_context_new(NULL);
    for (begins_in_forward = 0; begins_in_forward < 2; begins_in_forward++) {
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
        mixp_tensor *in = mixp_input(ctx, MIXP_F32, 1, two, x);
        CHECK(mixp_apply(ctx, &beginner, 1, &in, 1, NULL) == NULL);
        told(ctx, MIXP_ERR_ORDER, "not possible inside an operator's infer, forward or backward");
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
        CHECK_NEAR(mixp_item(mixp_sum(ctx, mixp_input(ctx, MIXP_F32, 1, two, x), 0, 0)), 3.0, 0);
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    }
    mixp_context_free(ctx);
}

/* --- regions and scopes ----------------------------------------------------------------------- */

/* The name of the newest site: what is applied now is called so. */
static const char *name_now(mixp_context *ctx) {
    static const float x[2] = { 1, 2 };
    static const int64_t two[1] = { 2 };
    static mixp_site_info site;
    int i = 0;
    mixp_gelu(ctx, mixp_input(ctx, MIXP_F32, 1, two, x));
    while (mixp_site(ctx, i, &site)) i++;
    return i && mixp_site(ctx, i - 1, &site) ? site.name : "";
}

/* Numbers of regions of every kind nest: a close ends what was opened since. */
static void regions_of_every_kind(void) {
    const mixp_autocast low = { MIXP_BF16, 1, NULL };
    mixp_context *ctx = mixp_context_new(NULL);
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_autocast_open_with(ctx, &low), 0);
    CHECK_INT(mixp_scope_open(ctx, "h.3"), 1);
    CHECK_INT(mixp_scope_open(ctx, "mlp"), 2);
    mixp_autocast_close(ctx, 2);
    mixp_autocast_close(ctx, 2);                /* nothing to close */
    CHECK_TEXT(name_now(ctx), "h.3");
    CHECK_INT(mixp_no_grad_open(ctx), 2);
    mixp_autocast_close(ctx, 1);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_BF16);
    mixp_autocast_close(ctx, 0);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    mixp_context_free(ctx);
}

/* Blocks past the 64th are refused, and left all the same: none ends what stands below. */
static void blocks_among_too_many(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    for (int i = 0; i < 64; i++) CHECK_INT(mixp_scope_open(ctx, "s"), i);
    mixpi_scope_enter(ctx, "one too many");
    told(ctx, MIXP_ERR_ARGUMENT, "too many nested");
    mixpi_scope_leave(ctx);
    mixp_autocast_close(ctx, 63);
    CHECK_INT(mixp_scope_open(ctx, "s"), 63);
    mixp_context_free(ctx);
}

/* --- captures, on a device that only says that it records ----------------------------------------- */

static mixp_result end_result;
static int frees;

static mixp_result recorder_begin(mixp_exec *x) {
    (void)x;
    return MIXP_OK;
}
static mixp_result recorder_end(mixp_exec *x, void **graph) {
    *graph = end_result == MIXP_OK ? x : NULL;
    return end_result;
}
static mixp_result recorder_replay(const mixp_exec *x, void *graph, uint64_t later) {
    (void)x, (void)graph, (void)later;
    return MIXP_OK;
}
static void recorder_free(const mixp_exec *x, void *graph) { frees += graph == x; }

static mixp_device recorder_of(void) {
    mixp_device d = *mixp_cpu();
    d.capture_begin = recorder_begin;
    d.capture_end = recorder_end;
    d.replay = recorder_replay;
    d.graph_free = recorder_free;
    end_result = MIXP_OK;
    frees = 0;
    return d;
}

/* The steps that a failed capture recorded have not run: none is counted, and the numbers that are drawn
 * next are those of a run without it. */
static void a_capture_that_fails(void) {
    static const int64_t n[1] = { 64 };
    const mixp_device recorder = recorder_of();
    float ones[64], drawn[2][64];
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.device = &recorder;
    for (int i = 0; i < 64; i++) ones[i] = 1;
    for (int way = 0; way < 2; way++) {
        mixp_context *ctx = mixp_context_new(&d);
        mixp_step_begin(ctx);
        if (way) {
            CHECK_INT(mixp_capture_begin(ctx), MIXP_OK);
            mixp_step_begin(ctx);
            mixp_step_begin(ctx);
            end_result = MIXP_ERR_DEVICE;
            CHECK(mixp_capture_end(ctx) == NULL);
            end_result = MIXP_OK;
            told(ctx, MIXP_ERR_DEVICE, "mixp_capture_end");
        }
        CHECK_INT(mixp_context_steps(ctx), 1);
        CHECK(mixp_capture_end(ctx) == NULL);       /* of nothing that was begun: no step is taken back */
        told(ctx, MIXP_ERR_ORDER, "call mixp_capture_begin first");
        CHECK_INT(mixp_context_steps(ctx), 1);
        mixp_step_begin(ctx);
        CHECK_INT(mixp_context_steps(ctx), 2);
        mixp_read(mixp_dropout(ctx, mixp_input(ctx, MIXP_F32, 1, n, ones), 0.5f, 1), drawn[way], MIXP_F32, 64);
        CHECK_INT(mixp_capture_begin(ctx), MIXP_OK);
        CHECK(mixp_capture_end(ctx) != NULL);
        mixp_context_free(ctx);
        CHECK_INT(frees, way + 1);                  /* the graph went with it */
    }
    CHECK(memcmp(drawn[0], drawn[1], sizeof drawn[0]) == 0);
}

/* One low parameter, two optimizers with masters of their own. */
static void two_masters(void) {
    static const int64_t n[1] = { 4 };
    const mixp_device recorder = recorder_of();
    mixp_context_desc d;
    mixp_optimizer *opt[2];
    memset(&d, 0, sizeof d);
    d.device = &recorder;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_BF16, 1, n);
    for (int i = 0; i < 2; i++) {
        opt[i] = new_sgd(ctx);
        CHECK_INT(mixp_optimizer_add(opt[i], w, NULL), MIXP_OK);
    }
    for (int step = 0; step < 2; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt[0]);
        mixp_backward(ctx, mixp_sum(ctx, w, MIXP_ALL, 0));
        if (step) CHECK_INT(mixp_capture_begin(ctx), MIXP_OK);
        if (step) TOLD(ctx, mixp_optimizer_step(opt[0]),
                       "mixp_optimizer_step: 'w' has 2 optimizers; a captured step cannot copy one optimizer's "
                       "update into another's master weight: use one optimizer, or set no_master");
        for (int i = 0; i < 2 && !step; i++) CHECK_INT(mixp_optimizer_step(opt[i]), MIXP_OK);
    }
    CHECK(mixp_capture_end(ctx) == NULL);           /* the graph would lack the step that was refused */
    told(ctx, MIXP_ERR_ORDER, "mixp_capture_end: a call failed during the capture");
    CHECK_INT(frees, 1);
    mixp_context_free(ctx);
}

/* --- two ranks, of which the other has the same gradients ------------------------------------------ */

static int sums;
static const char *double_it(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                             double seconds) {
    double *table = (double *)data;
    int64_t i;
    (void)user, (void)stream, (void)seconds;
    if (dtype == MIXP_F64)              /* a table: the other's row is like this one's */
        for (i = 0; i < count / 2; i++) table[count / 2 + i] = table[i];
    else for (i = 0; i < count; i++) ((float *)data)[i] *= 2;
    sums += dtype == MIXP_F32;
    return NULL;
}

static int stops;
static void count_stop(void *user, const char *why) {
    (void)user;
    stops += *why != '\0';
}

static mixp_context *one_of_two_on(const mixp_device *device, mixp_ranks_mean mean) {
    mixp_ranks_desc ranks;
    mixp_context_desc d;
    memset(&ranks, 0, sizeof ranks);
    memset(&d, 0, sizeof d);
    ranks.size = 2;
    ranks.sum = double_it;
    ranks.mean = mean;
    ranks.stop = count_stop;
    d.ranks = &ranks;
    d.device = device;
    sums = stops = 0;
    return mixp_context_new(&d);
}
static mixp_context *one_of_two(void) { return one_of_two_on(NULL, MIXP_MEAN_NONE); }

/* A view is summed once in a step: also where it was written between clip and step, and where the step
 * was given up after clipping, by mixp_zero_grad or by the next step's beginning. */
static void views_are_summed_once(void) {
    static const int64_t n[1] = { 1 };
    static const float want[4] = { 2, 8, 10, 12 };
    for (int way = 0; way < 4; way++) {
        mixp_context *ctx = one_of_two();
        mixp_optimizer_desc sgd = mixp_sgd_defaults();
        float w = 0, g = 1;
        mixp_tensor *view = mixp_view(ctx, "g", MIXP_F32, 1, n, &g);
        sgd.lr = 1;
        mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
        mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, n, &w), view);
        mixp_step_begin(ctx);
        CHECK_INT(mixp_clip_grad_norm(opt, 1e9), MIXP_OK);
        CHECK_NEAR(g, 2, 0);
        if (way == 1) g *= 4;                       /* the program scales what it clipped */
        if (way == 2) mixp_zero_grad(opt);          /* or gives it up, and fills it anew */
        if (way == 3) mixp_step_begin(ctx);
        if (way >= 2) g = (float)(3 + way);
        if (way) mixp_tensor_touch(view);
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        CHECK_NEAR(-w, want[way], 0);
        g = 3;                                      /* the next step's is new again */
        mixp_tensor_touch(view);
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        CHECK_NEAR(-w, want[way] + 6, 0);
        CHECK_INT(sums, way < 2 ? 2 : 3);
        mixp_context_free(ctx);
    }
}

static mixp_result no_unary(const mixp_exec *x, const mixp_unary_args *k) {
    (void)x, (void)k;
    return MIXP_ERR_DEVICE;
}

/* A mean that cannot be taken is told, to the program and to the other rank; the weight rests. */
static void a_mean_that_fails(void) {
    static const int64_t n[1] = { 1 };
    mixp_kernels kernels = *mixp_cpu()->kernels;
    mixp_device device = *mixp_cpu();
    float w = 5, g = 1;
    kernels.unary = no_unary;
    device.kernels = &kernels;
    mixp_context *ctx = one_of_two_on(&device, MIXP_MEAN_AFTER);
    mixp_optimizer *opt = new_sgd(ctx);
    mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, n, &w), mixp_view(ctx, "g", MIXP_F32, 1, n, &g));
    CHECK_INT(mixp_optimizer_step(opt), MIXP_ERR_DEVICE);
    told(ctx, MIXP_ERR_DEVICE, "the mean of a view: ");
    CHECK_INT(stops, 1);
    CHECK_NEAR(w, 5, 0);
    mixp_context_free(ctx);
}

/* What a loss leaves out beside others of its range has zeros, and weight decay moves it; without ranks
 * it has no gradient, and rests; so it does among ranks once it is frozen. */
static void what_a_step_leaves_out(void) {
    static const int64_t n[1] = { 2 };
    static const double moved[3] = { 1 - 0.5, 1, 1 };       /* lr 1, decay 0.5 */
    for (int way = 0; way < 3; way++) {
        mixp_context *ctx = way == 1 ? mixp_context_new(NULL) : one_of_two();
        mixp_optimizer_desc adamw = mixp_adamw_defaults();
        mixp_tensor *p[2];
        float after[2];
        adamw.lr = 1;
        adamw.weight_decay = 0.5;
        mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
        for (int i = 0; i < 2; i++) {
            p[i] = mixp_param(ctx, &"a\0b"[2 * i], MIXP_F32, 1, n);
            mixp_optimizer_add(opt, p[i], NULL);
        }
        for (int step = 0; step < 2; step++) {
            mixp_step_begin(ctx);
            mixp_zero_grad(opt);
            if (step && way == 2) mixp_tensor_set_requires_grad(p[1], 0);
            mixp_tensor *loss = mixp_sum(ctx, step ? p[0] : mixp_mul(ctx, p[0], p[1]), MIXP_ALL, 0);
            CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
            if (!step) mixp_fill(p[1], 1);
            if (step) CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
            CHECK_INT(p[1]->grad != NULL, !step || !way);
        }
        CHECK_INT(mixp_read(p[1], after, MIXP_F32, 2), MIXP_OK);
        CHECK_NEAR(after[1], moved[way], 0);
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
        mixp_context_free(ctx);
    }
}

/* --- evaluations ------------------------------------------------------------------------------ */

/* The values that dropout leaves of 64 ones. */
static void drawn_now(mixp_context *ctx, float *out) {
    static const int64_t n[1] = { 64 };
    float ones[64];
    for (int i = 0; i < 64; i++) ones[i] = 1;
    mixp_read(mixp_dropout(ctx, mixp_input(ctx, MIXP_F32, 1, n, ones), 0.5f, 1), out, MIXP_F32, 64);
}

/* Evaluations between steps move no random number, and none of them walks back. */
static void evaluations_count_nothing(void) {
    float drawn[2][2][64];
    for (int way = 0; way < 2; way++) {
        mixp_context *ctx = mixp_context_new(NULL);
        const int64_t one[1] = { 1 };
        mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, one), *y;
        for (int i = 0; i < 2; i++) {
            if (way) CHECK_INT(mixp_eval_begin(ctx), MIXP_OK);
            CHECK_INT((int64_t)mixp_context_steps(ctx), i);
            if (way) CHECK_INT(mixp_eval_begin(ctx), MIXP_OK);
            CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
            CHECK_INT((int64_t)mixp_context_steps(ctx), i + 1);
            drawn_now(ctx, drawn[way][i]);
        }
        CHECK_INT(mixp_eval_begin(ctx), MIXP_OK);
        y = mixp_mul(ctx, w, w);
        TOLD(ctx, mixp_backward(ctx, y), "this step began with mixp_eval_begin");
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
        TOLD(ctx, mixp_backward(ctx, y), "earlier step");
        CHECK_INT(mixp_backward(ctx, mixp_mul(ctx, w, w)), MIXP_OK);
        mixp_context_free(ctx);
    }
    CHECK(memcmp(drawn[0], drawn[1], sizeof drawn[0]) == 0);
    CHECK(memcmp(drawn[0][0], drawn[0][1], sizeof drawn[0][0]) != 0);
    CHECK_INT(mixp_eval_begin(NULL), MIXP_ERR_ARGUMENT);
}

int main(void) {
    RUN(a_capture_that_did_not_begin);
    RUN(an_operator_that_insists_on_a_step);
    RUN(regions_of_every_kind);
    RUN(blocks_among_too_many);
    RUN(a_capture_that_fails);
    RUN(two_masters);
    RUN(views_are_summed_once);
    RUN(a_mean_that_fails);
    RUN(what_a_step_leaves_out);
    RUN(evaluations_count_nothing);
    return test_report();
}
