/* test_hostile.c - misplaced calls and extreme numbers: an operator that begins a step, a scaler
 * that is freed before its loss, one tensor used twice, counts at the limits of their types.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "examples/ops.h"
#include "examples/compare.h"
#include "test.h"
#include "new_optimizer.h"
#include <math.h>

static mixp_context *context_of(const mixp_ranks_desc *ranks) {
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.threads = 1;
    d.ranks = ranks;
    return mixp_context_new(&d);
}

static mixp_tensor *matrix(mixp_context *ctx, const char *name, int64_t rows, int64_t cols) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    mixp_tensor *t = mixp_param(ctx, name, MIXP_F32, 2, shape);
    mixp_init_normal(t, 0, 0.3);
    return t;
}

/* The context's error is this one, and is forgotten. */
static void told(mixp_context *ctx, mixp_result code, const char *part) {
    const char *why = "";
    CHECK_INT(mixp_context_error(ctx, &why), code);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(ctx);
}

static void close_clean(mixp_context *ctx) {
    const char *why = "";
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_OK);
    CHECK_TEXT(why, "");
    mixp_context_free(ctx);
}

/* --- a loss, its scale and its gradient in one pass ----------------------------------------- */

typedef struct head {
    mixp_context   *ctx;
    mixp_tensor    *w;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
} head;

static head head_new(void) {
    head h;
    h.ctx = context_of(NULL);
    h.w = matrix(h.ctx, "w", 5, 3);
    h.scaler = mixp_scaler_new(h.ctx, NULL);
    h.opt = new_sgd(h.ctx);
    mixp_optimizer_add(h.opt, h.w, NULL);
    return h;
}

/* The scaled loss of logits that may be overwritten; x0: the first number of the batch. */
static mixp_tensor *head_loss(head *h, float x0) {
    const int64_t x_shape[2] = { 2, 3 }, rows[1] = { 2 };
    const int32_t targets[2] = { 4, 1 };
    float x[6] = { 0, 1, -1, 0.5f, 2, 1 };
    x[0] = x0;
    mixp_step_begin(h->ctx);
    mixp_tensor *logits = mixp_linear(h->ctx, mixp_input(h->ctx, MIXP_F32, 2, x_shape, x), h->w, NULL);
    mixp_tensor_set_disposable(logits, 1);
    return mixp_scaler_cross_entropy(h->scaler, logits,
                                     mixp_input(h->ctx, MIXP_I32, 1, rows, targets),
                                     MIXP_IGNORE, 1, NULL);
}

static void scaler_goes_before_its_loss(void) {
    head h = head_new();
    mixp_tensor *loss = head_loss(&h, 1);
    CHECK_INT(mixp_scaler_free(h.scaler), MIXP_OK);
    CHECK_INT(mixp_backward(h.ctx, loss), MIXP_ERR_ORDER);
    told(h.ctx, MIXP_ERR_ORDER, "freed");
    close_clean(h.ctx);
}

static void bad_loss_is_told(void) {
    head h = head_new();
    mixp_backward(h.ctx, head_loss(&h, HUGE_VALF));
    CHECK_INT(mixp_scaler_step(h.scaler, h.opt), MIXP_OK);
    mixp_verdict v = mixp_scaler_verdict(h.scaler);
    CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(v.loss_bad, 1);
    CHECK_INT(v.origin, MIXP_ORIGIN_NO_GUARD);
    CHECK_INT(mixp_scaler_update(h.scaler), MIXP_OK);
    close_clean(h.ctx);
}

/* What overrides the class of the loss counts for the one pass, too. */
static void banned_loss(void) {
    head h = head_new();
    mixp_autocast region = { MIXP_BF16, 1, NULL };
    mixp_autocast_override(h.ctx, mixp_op_builtin(MIXP_OP_CROSS_ENTROPY), MIXP_CLASS_BANNED);
    mixp_autocast_open_with(h.ctx, &region);
    CHECK(head_loss(&h, 1) == NULL);
    mixp_autocast_close(h.ctx, 0);
    told(h.ctx, MIXP_ERR_BANNED, "cross_entropy");
    close_clean(h.ctx);
}

/* --- the scaler's state ----------------------------------------------------------------------- */

/* A step of the loss factor * sum(w), without its update. */
static void scaled_step(head *h, float factor) {
    mixp_step_begin(h->ctx);
    mixp_zero_grad(h->opt);
    mixp_tensor *loss = mixp_scale(h->ctx, mixp_sum(h->ctx, h->w, MIXP_ALL, 0), factor);
    CHECK_INT(mixp_backward(h->ctx, mixp_scaler_scale(h->scaler, loss)), MIXP_OK);
    CHECK_INT(mixp_scaler_step(h->scaler, h->opt), MIXP_OK);
}

/* A new scale in place of an update: what the step before it found is not the next one's. */
static void new_scale_forgets(void) {
    mixp_scaler_saved saved;
    head h = head_new();
    CHECK_INT(mixp_scaler_save(h.scaler, &saved), MIXP_OK);
    scaled_step(&h, HUGE_VALF);
    CHECK_INT(mixp_scaler_verdict(h.scaler).loss_bad, 1);
    CHECK_INT(mixp_scaler_update_to(h.scaler, 1024), MIXP_OK);
    scaled_step(&h, 1);
    CHECK_INT(mixp_scaler_verdict(h.scaler).outcome, MIXP_STEP_APPLIED);
    CHECK_INT(mixp_scaler_verdict(h.scaler).loss_bad, 0);
    CHECK_INT(mixp_scaler_update(h.scaler), MIXP_OK);
    CHECK_NEAR(mixp_scaler_loss_scale(h.scaler), 1024, 0);
    scaled_step(&h, HUGE_VALF);
    CHECK_INT(mixp_scaler_load(h.scaler, &saved), MIXP_OK);
    scaled_step(&h, 1);
    CHECK_INT(mixp_scaler_update(h.scaler), MIXP_OK);
    CHECK_NEAR(mixp_scaler_loss_scale(h.scaler), 65536, 0);
    close_clean(h.ctx);
}

static void saved_state_of_zeros(void) {
    mixp_scaler_saved saved;
    head h = head_new();
    memset(&saved, 0, sizeof saved);
    saved.scale = 8;
    CHECK_INT(mixp_scaler_load(h.scaler, &saved), MIXP_ERR_ARGUMENT);
    told(h.ctx, MIXP_ERR_ARGUMENT, "out of range");
    CHECK_NEAR(mixp_scaler_loss_scale(h.scaler), 65536, 0);
    close_clean(h.ctx);
}

/* --- operators ---------------------------------------------------------------------------------- */

static mixp_tensor *tied_loss(mixp_context *ctx, void *user) {
    mixp_tensor *const *in = (mixp_tensor *const *)user;
    return mixp_linear_cross_entropy(ctx, in[0], in[0], in[1], MIXP_IGNORE, 2);
}

/* x is w: both gradients are added, by finite differences. */
static void one_tensor_twice(void) {
    mixp_context *ctx = context_of(NULL);
    int64_t rows[1] = { 6 };
    int32_t targets[6] = { 1, 2, 3, 0, 5, 4 };
    mixp_tensor *in[2];
    double worst = 1;
    in[0] = matrix(ctx, "w", 6, 4);
    in[1] = mixp_view(ctx, "targets", MIXP_I32, 1, rows, targets);
    CHECK_INT(mixp_check_gradients(ctx, tied_loss, in, 1, in, 0, &worst), MIXP_OK);
    CHECK(worst < 1e-3);
    close_clean(ctx);
}

static mixp_tensor *root_loss(mixp_context *ctx, void *user)
{ return mixp_sum(ctx, mixp_sqrt(ctx, (mixp_tensor *)user), MIXP_ALL, 0); }

/* The root of 0 - eps is a NaN, and those behind it hide nothing. */
static void checker_keeps_a_nan(void) {
    mixp_context *ctx = context_of(NULL);
    const int64_t three[1] = { 3 };
    const float values[3] = { 0, 1, 2 };
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, three);
    double worst = 0;
    mixp_write(w, values, MIXP_F32, 3);
    CHECK_INT(mixp_check_gradients(ctx, root_loss, w, 1, &w, 0, &worst), MIXP_OK);
    CHECK(worst != worst);
    close_clean(ctx);
}

/* Keys before the first query's own, more than there are: all are seen, as without causal. */
static void past_of_any_length(void) {
    mixp_context *ctx = context_of(NULL);
    mixp_tensor *qkv = matrix(ctx, "qkv", 4, 12);
    const int64_t packed[3] = { 1, 4, 12 };
    mixp_attention_desc d;
    float all[16], late[16];
    memset(&d, 0, sizeof d);
    d.heads = 2;
    mixp_step_begin(ctx);
    qkv = mixp_reshape(ctx, qkv, 3, packed);
    mixp_read(mixp_attention_apply(ctx, qkv, NULL, NULL, &d), all, MIXP_F32, 16);
    d.causal = 1;
    d.past = INT64_MAX;
    mixp_read(mixp_attention_apply(ctx, qkv, NULL, NULL, &d), late, MIXP_F32, 16);
    for (int i = 0; i < 16; i++) CHECK_NEAR(late[i], all[i], 1e-6);
    close_clean(ctx);
}

static void concat_beyond_counting(void) {
    mixp_context *ctx = context_of(NULL);
    const int64_t many[1] = { (int64_t)1 << 61 };
    mixp_tensor *in[4];
    float x = 0;
    mixp_step_begin(ctx);
    in[0] = in[1] = in[2] = in[3] = mixp_input_view(ctx, MIXP_F16, 1, many, &x);
    CHECK(in[0] != NULL);
    CHECK(mixp_concat(ctx, 4, in, 0) == NULL);
    told(ctx, MIXP_ERR_SHAPE, "2^63");
    close_clean(ctx);
}

/* --- an operator that calls what it must not ------------------------------------------------- */

enum { WELL, GRADIENT_FORWARD, STEP_FORWARD, STEP_BACKWARD, WALK_BACKWARD };

typedef struct visitor { int does; mixp_tensor *other; } visitor;

static mixp_result visitor_infer(mixp_call *c)
{ return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape); }

static mixp_result visitor_forward(mixp_call *c) {
    const visitor *v = *(const visitor **)c->attrs;
    if (v->does == GRADIENT_FORWARD) CHECK(mixp_call_dx(c, 0).data == NULL);
    if (v->does == STEP_FORWARD) CHECK_INT(mixp_step_begin(c->ctx), MIXP_ERR_ORDER);
    return mixp_convert(c->out->data, c->out->dtype, c->in[0]->data, c->in[0]->dtype,
                        c->out->count);
}

static mixp_result visitor_backward(mixp_call *c) {
    const visitor *v = *(const visitor **)c->attrs;
    const float *dy = (const float *)mixp_call_dy(c).data;
    if (v->does == STEP_BACKWARD) CHECK_INT(mixp_step_begin(c->ctx), MIXP_ERR_ORDER);
    if (v->does == WALK_BACKWARD) CHECK_INT(mixp_backward(c->ctx, v->other), MIXP_ERR_ORDER);
    mixp_out dx = mixp_call_dx(c, 0);
    for (int64_t i = 0; dx.data && i < c->out->count; i++) ((float *)dx.data)[i] = dy[i];
    return MIXP_OK;
}

/* The gradient of sum(w w w), with a visit on the way, and what is told of it. */
static void visit(int does, const char *part, float *grad) {
    static const mixp_op op = { "visitor", MIXP_CLASS_F32, sizeof(visitor *), visitor_infer,
                                visitor_forward, visitor_backward, NULL };
    mixp_context *ctx = context_of(NULL);
    mixp_tensor *w = matrix(ctx, "w", 1, 3), *y, *loss;
    visitor v, *at = &v;
    v.does = does;
    mixp_step_begin(ctx);
    y = mixp_mul(ctx, w, w);
    v.other = mixp_sum(ctx, mixp_mul(ctx, y, y), MIXP_ALL, 0);
    y = mixp_apply(ctx, &op, 1, &y, 1, &at);
    loss = mixp_sum(ctx, mixp_mul(ctx, y, w), MIXP_ALL, 0);
    if (does != WELL && does < STEP_BACKWARD) told(ctx, MIXP_ERR_ORDER, part);
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    if (does >= STEP_BACKWARD) told(ctx, MIXP_ERR_ORDER, part);
    mixp_read(w->grad, grad, MIXP_F32, 3);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    close_clean(ctx);
}

static void operator_calls_what_it_must_not(void) {
    static const char *const parts[] = { "", "only in an operator's backward",
                                         "not possible inside an operator", "not possible inside an operator",
                                         "not possible inside an operator" };
    float well[3], grad[3];
    visit(WELL, parts[WELL], well);
    for (int does = GRADIENT_FORWARD; does <= WALK_BACKWARD; does++) {
        visit(does, parts[does], grad);
        for (int i = 0; i < 3; i++) CHECK_NEAR(grad[i], well[i], 0);
    }
}

/* --- attention's dropout ------------------------------------------------------------------------ */

static mixp_tensor *dropping(mixp_context *ctx, void *user) {
    const int64_t packed[3] = { 1, 4, 12 };
    mixp_tensor *x = mixp_reshape(ctx, (mixp_tensor *)user, 3, packed);
    mixp_attention_desc d;
    memset(&d, 0, sizeof d);
    d.heads = 2;
    d.dropout = 0.5f;
    return mixp_attention_apply(ctx, x, NULL, NULL, &d);
}

static mixp_tensor *dropping_loss(mixp_context *ctx, void *user)
{ return mixp_mean(ctx, dropping(ctx, user), MIXP_ALL, 0); }

static void compared_with_dropout(void) {
    mixp_context *ctx = context_of(NULL);
    mixp_difference rows[4];
    mixp_compare_desc d;
    int64_t n = 0;
    memset(&d, 0, sizeof d);
    d.a.dtype = MIXP_BF16;
    d.a.level = 1;
    d.fn = dropping_loss;
    d.user = matrix(ctx, "qkv", 4, 12);
    CHECK_INT(mixp_compare(ctx, &d, rows, 4, &n), MIXP_ERR_ORDER);
    told(ctx, MIXP_ERR_ORDER, "uses dropout");
    close_clean(ctx);
}

static const char *no_hook(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                           double seconds) {
    (void)user; (void)data; (void)count; (void)dtype; (void)stream; (void)seconds;
    return NULL;
}

/* Rank r of two draws in its first step what one rank draws in its step r. */
static void ranks_drop_as_steps_do(void) {
    float step[2][16], rank[16];
    mixp_context *ctx = context_of(NULL);
    mixp_tensor *x = matrix(ctx, "qkv", 4, 12);
    mixp_ranks_desc ranks;
    for (int r = 0; r < 2; r++) {
        mixp_step_begin(ctx);
        mixp_read(dropping(ctx, x), step[r], MIXP_F32, 16);
    }
    CHECK(memcmp(step[0], step[1], sizeof step[0]) != 0);
    close_clean(ctx);
    for (int r = 0; r < 2; r++) {
        memset(&ranks, 0, sizeof ranks);
        ranks.rank = r;
        ranks.size = 2;
        ranks.sum = no_hook;
        ctx = context_of(&ranks);
        x = matrix(ctx, "qkv", 4, 12);
        mixp_step_begin(ctx);
        mixp_read(dropping(ctx, x), rank, MIXP_F32, 16);
        for (int i = 0; i < 16; i++) CHECK_NEAR(rank[i], step[r][i], 0);
        close_clean(ctx);
    }
}

/* --- optimizers, context ---------------------------------------------------------------------- */

/* A weight that was written by hand is its own master until the next step. */
static void master_of_a_written_weight(void) {
    mixp_context *ctx = context_of(NULL);
    const int64_t three[1] = { 3 };
    const float values[3] = { 7, -8, 9 };
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F16, 1, three);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    float master[3] = { 0, 0, 0 };
    CHECK_INT(mixp_optimizer_add(opt, w, NULL), MIXP_OK);
    mixp_write(w, values, MIXP_F32, 3);
    CHECK_INT(mixp_optimizer_read(opt, w, MIXP_STATE_MASTER, master, 3), MIXP_OK);
    for (int i = 0; i < 3; i++) CHECK_NEAR(master[i], values[i], 0);
    close_clean(ctx);
}

static void views_that_overlap(void) {
    static float memory[16];
    mixp_context *ctx = context_of(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    const int64_t shape[1] = { 8 }, one[1] = { 1 };
    mixp_tensor *v[4];
    v[0] = mixp_view(ctx, "first", MIXP_F32, 1, shape, memory);
    v[1] = mixp_view(ctx, "second", MIXP_F32, 1, shape, memory + 8);
    v[2] = mixp_view(ctx, "both", MIXP_F32, 1, shape, memory + 4);
    v[3] = mixp_view(ctx, "last", MIXP_F32, 1, one, memory + 15);
    for (int i = 0; i < 4; i++) mixp_tensor_set_requires_grad(v[i], 1);
    CHECK_INT(mixp_optimizer_add(opt, v[0], NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(opt, v[1], NULL), MIXP_OK);
    for (int i = 2; i < 4; i++) {
        CHECK_INT(mixp_optimizer_add(opt, v[i], NULL), MIXP_ERR_ARGUMENT);
        told(ctx, MIXP_ERR_ARGUMENT, "shares memory with a parameter");
    }
    close_clean(ctx);
}

static void settings_that_no_machine_has(void) {
    mixp_context_desc d;
    const char *why = "";
    memset(&d, 0, sizeof d);
    d.threads = INT32_MAX;
    d.why = &why;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "above 4096");
    d.threads = 1;
    d.epilogues = 16;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "epilogues has an unknown flag");
}

/* A program that clears each error as it is told: what has failed says so all the same. */
static void forget_error(mixp_result code, const char *message, void *user) {
    (void)code;
    (void)message;
    mixp_context_clear_error(*(mixp_context **)user);
}

static mixp_result no_rows(mixp_call *c) {
    const int64_t shape[2] = { -1, 3 };
    CHECK_INT(mixp_call_alias(c, 2, shape), MIXP_ERR_SHAPE);  /* on_error waits */
    return mixp_call_output(c, MIXP_F32, 2, shape);
}

static mixp_result does_nothing(mixp_call *c) {
    (void)c;
    return MIXP_OK;
}

static void errors_cleared_at_once(void) {
    static const mixp_op op = { "no_rows", MIXP_CLASS_KEEP, 0, no_rows, does_nothing, NULL, NULL };
    mixp_context_desc d;
    mixp_context *ctx = NULL;
    mixp_tensor *w, *parts[2];
    memset(&d, 0, sizeof d);
    d.on_error = forget_error;
    d.user = &ctx;
    ctx = mixp_context_new(&d);
    w = matrix(ctx, "w", 1, 3);
    mixp_step_begin(ctx);
    CHECK(mixp_apply(ctx, &op, 1, &w, 1, NULL) == NULL);
    CHECK_INT(mixp_split(ctx, NULL, 0, 2, parts), MIXP_ERR_ARGUMENT);
    close_clean(ctx);
}

/* And it is told once, by who knows most. */
typedef struct listener { mixp_context *ctx; int told; } listener;

static void count_error(mixp_result code, const char *message, void *user) {
    listener *l = (listener *)user;
    (void)code;
    (void)message;
    l->told++;
    mixp_context_clear_error(l->ctx);
}

static mixp_result fails_backward(mixp_call *c) {
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT, "as it says itself");
}

static mixp_result fails_in_silence(mixp_call *c) { (void)c; return MIXP_ERR_DEVICE; }

static void a_failure_is_told_once(void) {
    mixp_op op = { "row", MIXP_CLASS_KEEP, 0, visitor_infer, does_nothing, fails_backward, NULL };
    mixp_context_desc d;
    listener l = { NULL, 0 };
    memset(&d, 0, sizeof d);
    d.on_error = count_error;
    d.user = &l;
    l.ctx = mixp_context_new(&d);
    mixp_tensor *a = matrix(l.ctx, "a", 1, 3);
    mixp_tensor *b = matrix(l.ctx, "b", 2, 5);
    mixp_step_begin(l.ctx);
    CHECK(!mixp_linear(l.ctx, a, b, NULL));
    CHECK_INT(l.told, 1);
    CHECK(!mixp_softplus(l.ctx, a, -1.0f));
    CHECK_INT(l.told, 2);
    CHECK(!mixp_add_layer_norm(l.ctx, a, b, NULL, NULL, 1e-5f, NULL));
    CHECK_INT(l.told, 3);
    CHECK(!mixp_mlp(l.ctx, a, b, NULL, b, NULL));
    CHECK_INT(l.told, 4);
    mixp_tensor *loss = mixp_apply(l.ctx, &op, 1, &a, 1, NULL);
    CHECK_INT(mixp_backward(l.ctx, mixp_sum(l.ctx, loss, MIXP_ALL, 0)), MIXP_ERR_ARGUMENT);
    CHECK_INT(l.told, 5);
    op.backward = fails_in_silence;     /* and what says nothing is told by the tape */
    CHECK_INT(mixp_backward(l.ctx, mixp_mean(l.ctx, loss, MIXP_ALL, 0)), MIXP_ERR_DEVICE);
    CHECK_INT(l.told, 6);
    close_clean(l.ctx);
}

/* Not within an operator that fails, but when mixp_apply returns. */
static listener *waiting;

static mixp_result fails_and_asks(mixp_call *c) {
    mixp_context_fail(c->ctx, MIXP_ERR_IO, "from within");
    CHECK_INT(waiting->told, 0);
    return MIXP_ERR_IO;
}

static void on_error_waits_for_the_outermost_call(void) {
    static const mixp_op op = { "waits", MIXP_CLASS_KEEP, 0, visitor_infer, fails_and_asks, NULL, NULL };
    mixp_context_desc d;
    listener l = { NULL, 0 };
    memset(&d, 0, sizeof d);
    d.on_error = count_error;
    d.user = waiting = &l;
    l.ctx = mixp_context_new(&d);
    mixp_tensor *a = matrix(l.ctx, "a", 1, 3);
    mixp_step_begin(l.ctx);
    CHECK(!mixp_apply(l.ctx, &op, 1, &a, 1, NULL));
    CHECK_INT(l.told, 1);
    close_clean(l.ctx);
}

static int converts;                    /* 0: conversions fail, too */
static mixp_result may_convert(const mixp_exec *x, const mixp_convert_args *k)
{ return converts ? mixp_cpu()->kernels->convert(x, k) : MIXP_ERR_DEVICE; }

/* Nor is one of a kernel, behind which several stand. */
static void a_kernel_s_failure_is_told_once(void) {
    mixp_kernels kernels = *mixp_cpu()->kernels;
    mixp_device device = *mixp_cpu();
    const int64_t n = 6;
    mixp_ranks_desc ranks;
    mixp_context_desc d;
    listener l = { NULL, 0 };
    memset(&ranks, 0, sizeof ranks);
    memset(&d, 0, sizeof d);
    kernels.convert = may_convert;
    device.kernels = &kernels;
    converts = 1;
    ranks.size = ranks.apart = 1;
    d.device = &device;
    d.ranks = &ranks;
    d.on_error = count_error;
    d.user = &l;
    l.ctx = mixp_context_new(&d);
    mixp_tensor *w = mixp_param(l.ctx, "w", MIXP_BF16, 1, &n);
    mixp_fill(w, 1.0);
    mixp_step_begin(l.ctx);
    w = mixp_sum(l.ctx, w, MIXP_ALL, 0);
    converts = 0;
    CHECK_INT(mixp_backward(l.ctx, w), MIXP_ERR_DEVICE);
    CHECK_INT(l.told, 1);
    mixp_context_free(l.ctx);
}

/* --- tensors of an earlier step, whose data is other memory by now ----------------------------- */

enum { LATE = 12, FILLER = 1 << 14 };
typedef struct filler { unsigned char byte[FILLER]; } filler;

/* An operator whose attributes lie where the step before had those of its operators. */
static void write_over(mixp_context *ctx, int byte) {
    static const mixp_op op = { "filler", MIXP_CLASS_KEEP, sizeof(filler), visitor_infer,
                                does_nothing, NULL, NULL };
    static filler all;
    const int64_t one[1] = { 1 };
    float x = 0;
    mixp_tensor *in = mixp_input(ctx, MIXP_F32, 1, one, &x);
    memset(&all, byte, sizeof all);
    CHECK(mixp_apply(ctx, &op, 1, &in, 1, &all) != NULL);
}

/* Each call says that it is no tensor of this step, and none crashes. */
#define LATE_CALL(call) do { CHECK_INT(call, MIXP_ERR_ORDER); told(ctx, MIXP_ERR_ORDER, "earlier step"); } while (0)
static void late(mixp_context *ctx, mixp_optimizer *opt, mixp_tensor *t) {
    mixp_tensor *parts[2];
    float x;
    CHECK(mixp_relu(ctx, t) == NULL);
    told(ctx, MIXP_ERR_ORDER, "earlier step");
    CHECK(mixp_add_layer_norm(ctx, t, t, NULL, NULL, 1e-5f, NULL) == NULL);
    told(ctx, MIXP_ERR_ORDER, "earlier step");
    LATE_CALL(mixp_backward(ctx, t));
    LATE_CALL(mixp_split(ctx, t, 0, 2, parts));
    CHECK_INT(mixp_optimizer_add(opt, t, NULL), MIXP_ERR_ARGUMENT);
    told(ctx, MIXP_ERR_ARGUMENT, "one step only");
    CHECK(isnan(mixp_item(t)));
    told(ctx, MIXP_ERR_ORDER, "earlier step");
    LATE_CALL(mixp_read(t, &x, MIXP_F32, 1));
    LATE_CALL(mixp_write(t, &x, MIXP_F32, 1));
    LATE_CALL(mixp_fill(t, 1));
    LATE_CALL(mixp_init_normal(t, 0, 1));
    LATE_CALL(mixp_init_xavier_normal(t, 1));
    LATE_CALL(mixp_optimizer_set_loss(opt, t));
    LATE_CALL(mixp_tensor_set_requires_grad(t, 1));
    LATE_CALL(mixp_tensor_set_disposable(t, 1));
    CHECK_INT(mixp_optimizer_read(opt, t, MIXP_STATE_M, &x, 1), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    CHECK(mixp_tensor_low(t, MIXP_F16) == NULL);
    told(ctx, MIXP_ERR_DTYPE, "an activation has no low copies");
    mixp_tensor_touch(t);
    told(ctx, MIXP_ERR_ORDER, "earlier step");
}

static void tensors_of_an_earlier_step(void) {
    static const int bytes[3] = { 0, 1, 0x55 };
    const int64_t one[1] = { 1 };
    mixp_context *ctx = context_of(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_tensor *t[LATE];
    for (int k = 0; k < 3; k++) {
        mixp_step_begin(ctx);
        for (int i = 0; i < LATE; i++) t[i] = mixp_activation(ctx, MIXP_F32, 1, one);
        mixp_step_begin(ctx);
        write_over(ctx, bytes[k]);
        for (int i = 4; i < LATE; i++) late(ctx, opt, t[i]);
    }
    close_clean(ctx);
}

/* --- graphs, on a device that only says that it records --------------------------------------- */

static mixp_result recorder_begin(mixp_exec *x) {
    (void)x;
    return MIXP_OK;
}

static mixp_result recorder_end(mixp_exec *x, void **graph) {
    *graph = x;
    return MIXP_OK;
}

static mixp_result recorder_replay(const mixp_exec *x, void *graph, uint64_t later) {
    (void)later;
    return graph == x ? MIXP_OK : MIXP_ERR_DEVICE;
}

static void recorder_free(const mixp_exec *x, void *graph) { CHECK(graph == x); }

/* A second capture, and a replay, are refused while one is under way, and it goes on. */
static void capture_within_a_capture(void) {
    mixp_context_desc d;
    mixp_device recorder = *mixp_cpu();
    recorder.capture_begin = recorder_begin;
    recorder.capture_end = recorder_end;
    recorder.replay = recorder_replay;
    recorder.graph_free = recorder_free;
    memset(&d, 0, sizeof d);
    d.device = &recorder;
    mixp_context *ctx = mixp_context_new(&d);
    CHECK_INT(mixp_capture_begin(ctx), MIXP_OK);
    mixp_graph *first = mixp_capture_end(ctx);
    CHECK_INT(mixp_capture_begin(ctx), MIXP_OK);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_capture_begin(ctx), MIXP_ERR_ORDER);
    told(ctx, MIXP_ERR_ORDER, "a capture is already active");
    CHECK_INT(mixp_replay(first), MIXP_ERR_ORDER);
    told(ctx, MIXP_ERR_ORDER, "mixp_capture_end");
    CHECK_INT(mixp_graph_free(first), MIXP_ERR_ORDER);
    told(ctx, MIXP_ERR_ORDER, "captured");
    CHECK_INT(mixp_observe(ctx, NULL, NULL), MIXP_ERR_ORDER);
    told(ctx, MIXP_ERR_ORDER, "mixp_observe: a step is being captured");
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_ERR_ORDER);
    told(ctx, MIXP_ERR_ORDER, "mixp_guard_start: a step is being captured");
    CHECK_INT(mixp_guard_stop(ctx), MIXP_ERR_ORDER);
    told(ctx, MIXP_ERR_ORDER, "mixp_guard_stop: a step is being captured");
    CHECK_INT(mixp_guard_pin(ctx, "*", MIXP_F32), MIXP_ERR_ORDER);
    told(ctx, MIXP_ERR_ORDER, "mixp_guard_pin: a step is being captured");
    CHECK(mixp_scaler_new(ctx, NULL) == NULL);      /* each replay would reset its state */
    told(ctx, MIXP_ERR_ORDER, "mixp_scaler_new: a step is being captured");
    CHECK(mixp_capture_end(ctx) == NULL);           /* the graph would lack what was refused */
    told(ctx, MIXP_ERR_ORDER, "mixp_capture_end: a call failed during the capture");
    CHECK_INT((int64_t)mixp_context_steps(ctx), 0);     /* it was recorded, not run */
    CHECK_INT(mixp_graph_free(first), MIXP_OK);
    close_clean(ctx);
}

static void block_without_memory(void) {
    mixp_context_desc d;
    const char *why = "";
    memset(&d, 0, sizeof d);
    d.memory_bytes = 1 << 20;
    d.why = &why;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "memory is NULL");
}

int main(void) {
    RUN(scaler_goes_before_its_loss);
    RUN(bad_loss_is_told);
    RUN(banned_loss);
    RUN(new_scale_forgets);
    RUN(saved_state_of_zeros);
    RUN(one_tensor_twice);
    RUN(checker_keeps_a_nan);
    RUN(past_of_any_length);
    RUN(concat_beyond_counting);
    RUN(operator_calls_what_it_must_not);
    RUN(compared_with_dropout);
    RUN(ranks_drop_as_steps_do);
    RUN(master_of_a_written_weight);
    RUN(views_that_overlap);
    RUN(settings_that_no_machine_has);
    RUN(errors_cleared_at_once);
    RUN(a_failure_is_told_once);
    RUN(on_error_waits_for_the_outermost_call);
    RUN(a_kernel_s_failure_is_told_once);
    RUN(tensors_of_an_earlier_step);
    RUN(capture_within_a_capture);
    RUN(block_without_memory);
    return test_report();
}
