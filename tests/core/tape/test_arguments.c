/* test_arguments.c - arguments that the API refuses, one at a time: NULL, out of range, of another
 * context, of the wrong kind. The call returns the documented code, and the message names the
 * argument.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _XOPEN_SOURCE 700
#include <unistd.h>
#include "mixprec.h"
#include "examples/ops.h"
#include "examples/compare.h"
#include "test.h"
#include "new_optimizer.h"

static const int64_t four[1] = { 4 }, one_element[1] = { 1 };

/* The context has this error, whose message says so; it has none any more. */
static void told(mixp_context *ctx, mixp_result code, const char *part) {
    const char *why;
    CHECK_INT(mixp_context_error(ctx, &why), code);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(ctx);
}

#define REFUSED(ctx, call, code, part)                                                          \
    do { CHECK_INT(call, code); told(ctx, code, part); } while (0)
#define NOT_MADE(ctx, call, code, part)                                                         \
    do { CHECK((call) == NULL); told(ctx, code, part); } while (0)

static float quiet_nan(void) { return mixp_f32_of_bits(0x7FC00000u); }
static double inf64(void) { return (double)mixp_f32_of_bits(0x7F800000u); }
static double nan64(void) { return inf64() - inf64(); }

/* --- nothing ------------------------------------------------------------------------------------- */

static mixp_tensor *no_loss(mixp_context *ctx, void *user) {
    (void)ctx;
    (void)user;
    return NULL;
}

static void no_context(void) {
    const mixp_autocast half = { MIXP_F16, 1, NULL };
    mixp_gemm_args gemm;
    char text[4] = "xyz";
    memset(&gemm, 0, sizeof gemm);
    mixp_memory memory = mixp_context_memory(NULL);
    CHECK(memory.used == 0 && memory.peak == 0 && memory.block == 0);
    CHECK(mixp_context_steps(NULL) == 0);
    CHECK_INT(mixp_context_gemm_count(NULL).direct, 0);
    CHECK_INT((int64_t)mixp_context_gemm_choices(NULL, text, sizeof text), 1);
    CHECK(text[0] == '\0');
    CHECK_INT((int64_t)mixp_context_gemm_choices(NULL, NULL, 0), 1);
    CHECK(mixp_context_exec(NULL) == NULL && mixp_context_device(NULL) == NULL);
    CHECK_INT(mixp_gemm(NULL, &gemm), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_autocast_current(NULL).level, 0);
    CHECK_INT(mixp_autocast_open_with(NULL, &half), -1);
    CHECK_INT(mixp_autocast_set_level(NULL, 1), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_scope_open(NULL, "a"), -1);
    CHECK_INT(mixpi_autocast_leave(NULL), 0);
    CHECK_INT(mixpi_autocast_enter(NULL, MIXP_F16), 1);
    CHECK_INT(mixpi_no_grad_enter(NULL), 1);
    CHECK_INT(mixpi_scope_enter(NULL, "a"), 1);
    CHECK_INT(mixp_autocast_override(NULL, mixp_op_builtin(MIXP_OP_ADD), MIXP_CLASS_LOW), MIXP_ERR_ARGUMENT);
    CHECK(mixp_autocast_casts(NULL).weight_casts == 0);
    mixp_autocast_reset_counts(NULL);
    CHECK_INT(mixp_ranks_hold(NULL, 1), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_backward(NULL, NULL), MIXP_ERR_ARGUMENT);
    CHECK(mixp_attention_apply(NULL, NULL, NULL, NULL, NULL) == NULL);
    CHECK(mixp_dropout(NULL, NULL, 0.5f, 1) == NULL);
}

static void no_scaler_and_no_optimizer(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = new_sgd(ctx);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    mixp_scaler_saved saved;
    mixp_scaler_desc desc;
    mixp_param_group group;
    mixp_underflow flow;
    memset(&desc, 0, sizeof desc);
    memset(&saved, 0, sizeof saved);
    CHECK_NEAR(mixp_scaler_loss_scale(NULL), 1, 0);
    CHECK_INT(mixp_scaler_update_to(NULL, 2), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_scaler_change(NULL, &desc), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_scaler_change(scaler, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_scaler_save(NULL, &saved), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_scaler_save(scaler, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_scaler_load(NULL, &saved), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_scaler_load(scaler, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_scaler_unscale(NULL, opt), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_scaler_unscale(scaler, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_clip_grad_norm(NULL, 1), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_step(NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_zero_grad(NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_add_group(NULL, &group), -1);
    CHECK_INT(mixp_optimizer_add_group(opt, NULL), -1);
    CHECK_INT(mixp_optimizer_group(NULL, 0, &group), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_set_group(NULL, 0, &group), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_set_group(opt, 0, NULL), MIXP_ERR_ARGUMENT);
    CHECK_NEAR(mixp_optimizer_lr(NULL, 0), 0, 0);
    CHECK_INT(mixp_optimizer_underflow(NULL, 0, &flow), 0);
    CHECK_INT(mixp_optimizer_underflow(opt, 0, NULL), 0);
    CHECK_INT(mixp_optimizer_underflow(opt, -1, &flow), 0);     /* it has no parameter yet */
    CHECK_INT(mixp_scaler_verdict(NULL).outcome, MIXP_STEP_NONE);
    CHECK_INT(mixp_optimizer_verdict(NULL).outcome, MIXP_STEP_NONE);
    CHECK_INT(mixp_retry(NULL, 3), 0);
    CHECK_INT(mixp_scaler_free(NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_free(NULL), MIXP_OK);
    mixp_context_clear_error(ctx);
    mixp_context_free(ctx);
}

static void no_watch(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    char text[16] = "", all[512];
    mixp_event event, nowhere;
    mixp_site_info site;
    memset(&event, 0, sizeof event);
    memset(&nowhere, 0, sizeof nowhere);
    event.kind = MIXP_EVENT_COUNT;
    event.site = "";
    CHECK_INT(mixp_guard_event(NULL, 0, &event), 0);
    CHECK_INT(mixp_guard_event(ctx, -1, &event), 0);
    CHECK_INT(mixp_site(NULL, 0, &site), 0);
    CHECK_INT(mixp_observe(NULL, NULL, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_guard_due(NULL), 0);
    CHECK_INT(mixp_guard_stop(NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_guard_start(NULL, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_guard_pin(NULL, "*", MIXP_F32), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_compare(NULL, NULL, NULL, 0, NULL), MIXP_ERR_ARGUMENT);
    CHECK(*mixp_event_text(NULL, all, sizeof all) == '\0');
    CHECK(*mixp_event_text(&event, all, sizeof all) == '\0');    /* of no such kind */
    CHECK(*mixp_event_text(&nowhere, text, sizeof text) == '\0');   /* of no site */
    CHECK_NEAR(mixp_look_flushed(NULL, 0), 0, 0);
    CHECK_TEXT(mixp_origin_text(MIXP_ORIGIN_COUNT), "?");
    CHECK_INT(mixp_guard_stop(ctx), MIXP_OK);       /* none is on */
    mixp_context_free(ctx);
}

/* --- devices ------------------------------------------------------------------------------------- */

static mixp_result attach_gives;
static int detached, memory_refused;

static mixp_result odd_attach(mixp_exec *x) { (void)x; return attach_gives; }
static void odd_detach(mixp_exec *x) { (void)x; detached++; }
static mixp_result odd_check(const mixp_exec *x, const void *p, size_t bytes) {
    (void)x;
    (void)p;
    (void)bytes;
    return memory_refused ? MIXP_ERR_DEVICE : MIXP_OK;
}
static const char *odd_message(const mixp_exec *x) { (void)x; return "it is unplugged"; }
static size_t odd_choices(const mixp_exec *x, char *text, size_t size) {
    (void)x;
    if (size) text[0] = 'A';
    return size + 7;
}
static mixp_result odd_wait(const mixp_exec *x) { (void)x; return attach_gives; }

static void devices_that_do_not_begin(void) {
    static const struct { mixp_result gives; const char *part; } rows[] = {
        { MIXP_ERR_ARGUMENT, "the stream does not belong to this device" },
        { MIXP_ERR_MEMORY, "too little memory left for a context" },
        { MIXP_ERR_FORMAT, "is not a text of mixp_context_gemm_choices" },
        { MIXP_ERR_SHAPE, "from another GPU, or another version" },
        { MIXP_ERR_DEVICE, "check whether another program uses it" } };
    mixp_device device = *mixp_cpu();
    mixp_context_desc d;
    const char *why;
    memset(&d, 0, sizeof d);
    device.attach = odd_attach;
    device.detach = odd_detach;
    d.device = &device;
    d.why = &why;
    detached = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        attach_gives = rows[i].gives;
        CHECK(mixp_context_new(&d) == NULL);
        CHECK_TEXT(why, rows[i].part);
    }
    CHECK_INT(detached, 0);                     /* it never was attached */
    attach_gives = MIXP_OK;
    mixp_context_free(mixp_context_new(&d));
    CHECK_INT(detached, 1);
}

static void what_a_device_says(void) {
    mixp_device device = *mixp_cpu();
    float memory[16] = { 0 };
    mixp_context_desc d;
    char text[8] = "";
    memset(&d, 0, sizeof d);
    device.check = odd_check;
    device.message = odd_message;
    device.gemm_choices = odd_choices;
    device.wait = odd_wait;
    d.device = &device;
    attach_gives = MIXP_OK;
    memory_refused = 0;
    mixp_context *ctx = mixp_context_new(&d);
    CHECK(mixp_view(ctx, "v", MIXP_F32, 1, four, memory) != NULL);
    memory_refused = 1;
    NOT_MADE(ctx, mixp_view(ctx, NULL, MIXP_F32, 1, four, memory), MIXP_ERR_ARGUMENT, "is not device memory");
    NOT_MADE(ctx, mixp_input_view(ctx, MIXP_F32, 1, four, memory), MIXP_ERR_ARGUMENT, "is not device memory");
    memory_refused = 0;
    CHECK_INT((int64_t)mixp_context_gemm_choices(ctx, text, sizeof text), 15);
    CHECK_TEXT(text, "A");
    CHECK_INT((int64_t)mixp_context_gemm_choices(ctx, NULL, sizeof text), 7);     /* no room without a place */
    mixp_optimizer *opt = new_sgd(ctx);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    attach_gives = MIXP_ERR_DEVICE;
    REFUSED(ctx, mixp_scaler_free(scaler), MIXP_ERR_DEVICE, "it is unplugged");
    REFUSED(ctx, mixp_optimizer_free(opt), MIXP_ERR_DEVICE, "it is unplugged");     /* it waits first */
    CHECK_INT(mixp_checkpoint_load_weights("nowhere", ctx, NULL), MIXP_ERR_DEVICE);     /* so does that */
    attach_gives = MIXP_OK;
    CHECK_INT(mixp_optimizer_free(opt), MIXP_OK);
    mixp_context_free(ctx);
}

/* --- tensors ------------------------------------------------------------------------------------- */

static void views_and_inputs(void) {
    float memory[16] = { 0 };
    mixp_context *ctx = mixp_context_new(NULL);
    CHECK(mixp_view(NULL, "v", MIXP_F32, 1, four, NULL) == NULL);
    CHECK(mixp_input(NULL, MIXP_F32, 1, four, NULL) == NULL);
    CHECK(mixp_input_view(NULL, MIXP_F32, 1, four, NULL) == NULL);
    NOT_MADE(ctx, mixp_view(ctx, NULL, MIXP_F32, 1, four, NULL), MIXP_ERR_ARGUMENT, "mixp_view '': data is NULL");
    NOT_MADE(ctx, mixp_input(ctx, MIXP_F32, 1, four, NULL), MIXP_ERR_ARGUMENT, "host_data is NULL");
    NOT_MADE(ctx, mixp_input(ctx, (mixp_dtype)99, 1, four, memory), MIXP_ERR_DTYPE, "");
    NOT_MADE(ctx, mixp_view(ctx, "v", (mixp_dtype)99, 1, four, memory), MIXP_ERR_DTYPE, "");
    NOT_MADE(ctx, mixp_param(ctx, NULL, MIXP_I32, 1, four), MIXP_ERR_DTYPE, "mixp_param '': a parameter must be f32");
    CHECK(mixp_item(NULL) != mixp_item(NULL));
    mixp_context_free(ctx);
}

static mixp_gemm_args product(float *c) {
    static float a[16], b[16];
    mixp_gemm_args k;
    memset(&k, 0, sizeof k);
    k.m = k.n = k.k = k.lda = k.ldb = k.ldc = 4;
    k.batch = 1;
    k.alpha = 1;
    k.a = mixpi_in(a, MIXP_F32);
    k.b = mixpi_in(b, MIXP_F32);
    k.bias = mixpi_in(NULL, MIXP_F32);
    k.c = mixpi_out_to(c, MIXP_F32, 0);
    return k;
}

static void products(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    float c[16];
    mixp_gemm_args k;
#define PRODUCT(change, code, part)                                                             \
    do { k = product(c); change; REFUSED(ctx, mixp_gemm(ctx, &k), code, part); } while (0)
    k = product(c);
    CHECK_INT(mixp_gemm(ctx, &k), MIXP_OK);
    PRODUCT(k.m = -1, MIXP_ERR_ARGUMENT, "a size is negative");
    PRODUCT(k.n = -1, MIXP_ERR_ARGUMENT, "a size is negative");
    PRODUCT(k.k = -1, MIXP_ERR_ARGUMENT, "a size is negative");
    PRODUCT(k.batch = -1, MIXP_ERR_ARGUMENT, "a size is negative");
    PRODUCT(k.batch = 0, MIXP_ERR_ARGUMENT, "batch is 0; set it to 1 for one product");
    PRODUCT(k.alpha = 0, MIXP_ERR_ARGUMENT, "alpha is 0; set it to 1 for the plain product");
    PRODUCT(k.stride_a = -1, MIXP_ERR_ARGUMENT, "a stride is negative");
    PRODUCT(k.stride_b = -1, MIXP_ERR_ARGUMENT, "a stride is negative");
    PRODUCT(k.stride_c = -1, MIXP_ERR_ARGUMENT, "a stride is negative");
    PRODUCT(k.a.data = NULL, MIXP_ERR_ARGUMENT, "a, b or c has no data");
    PRODUCT(k.b.data = NULL, MIXP_ERR_ARGUMENT, "a, b or c has no data");
    PRODUCT(k.c.data = NULL, MIXP_ERR_ARGUMENT, "a, b or c has no data");
    PRODUCT(k.a.data = c, MIXP_ERR_ARGUMENT, "c's memory is a's or b's");
    PRODUCT(k.b.data = c, MIXP_ERR_ARGUMENT, "c's memory is a's or b's");
    PRODUCT(k.lda = 3, MIXP_ERR_SHAPE, "lda 3, ldb 4 or ldc 4 is shorter");
    PRODUCT(k.ldb = 3, MIXP_ERR_SHAPE, "lda 4, ldb 3 or ldc 4 is shorter");
    PRODUCT(k.ldc = 3, MIXP_ERR_SHAPE, "lda 4, ldb 4 or ldc 3 is shorter");
    PRODUCT((k.lda = 3, k.trans_a = 1), MIXP_ERR_SHAPE, ", a transposed");
    PRODUCT((k.ldb = 3, k.trans_b = 1), MIXP_ERR_SHAPE, ", b transposed");
    REFUSED(ctx, mixp_gemm(ctx, NULL), MIXP_ERR_ARGUMENT, "the arguments are NULL");
    k = product(c);
    k.k = 0;                                    /* no products: a and b need not be there */
    k.a.data = k.b.data = NULL;
    CHECK_INT(mixp_gemm(ctx, &k), MIXP_OK);
    mixp_context_free(ctx);
}

/* --- autocast, operators --------------------------------------------------------------------------- */

static void not_opened(mixp_context *ctx, int region, const char *why) {
    CHECK_INT(region, -1);
    REFUSED(ctx, mixp_context_error(ctx, NULL), MIXP_ERR_ARGUMENT, why);
}

static void regions(void) {
    const mixp_autocast bad_level = { MIXP_F16, 4, NULL }, low_level = { MIXP_F16, -1, NULL };
    mixp_context *ctx = mixp_context_new(NULL);
    not_opened(ctx, mixp_autocast_open_with(ctx, NULL), "region is NULL");
    not_opened(ctx, mixp_autocast_open_with(ctx, &bad_level), "the level must be 0 to 3");
    not_opened(ctx, mixp_autocast_open_with(ctx, &low_level), "the level must be 0 to 3");
    REFUSED(ctx, mixp_autocast_set_level(ctx, -1), MIXP_ERR_ARGUMENT, "");
    not_opened(ctx, mixp_scope_open(ctx, NULL), "the name is NULL");
    not_opened(ctx, mixp_scope_open(ctx, ""), "the name is empty");
    REFUSED(ctx, mixp_autocast_override(ctx, NULL, MIXP_CLASS_LOW), MIXP_ERR_ARGUMENT, "op is NULL");
    REFUSED(ctx, mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_ADD), MIXP_CLASS_COUNT),
            MIXP_ERR_ARGUMENT, "cls is not a mixp_op_class");
    mixp_context_free(ctx);
}

/* 64 operators can have a class of their own, and any of these another one. */
static void overrides(void) {
    static mixp_op ops[65];
    mixp_context *ctx = mixp_context_new(NULL);
    for (int i = 0; i < 64; i++) CHECK_INT(mixp_autocast_override(ctx, &ops[i], MIXP_CLASS_LOW), MIXP_OK);
    REFUSED(ctx, mixp_autocast_override(ctx, &ops[64], MIXP_CLASS_LOW), MIXP_ERR_ARGUMENT, "64 operators have an override already");
    CHECK_INT(mixp_autocast_override(ctx, &ops[63], MIXP_CLASS_F32), MIXP_OK);
    mixp_context_free(ctx);
}

static mixp_result same_infer(mixp_call *c) {
    const mixp_tensor *t = c->in[0];
    return mixp_call_output(c, t->dtype, t->rank, t->shape);
}
static mixp_result saves_nowhere(mixp_call *c) {
    CHECK(mixp_call_save(c, -1, MIXP_F32, 1, four) == NULL);
    CHECK(mixp_call_save(c, MIXP_MAX_SAVED, MIXP_F32, 1, four) == NULL);
    CHECK_INT(mixp_call_wants(c, -1), 0);
    CHECK_INT(mixp_call_wants(c, 7), 0);
    return MIXP_OK;
}

static void operators(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *in[MIXP_MAX_INPUTS + 1] = { NULL };
    mixp_op good, op;
    float zeros[4] = { 0 };
    memset(&good, 0, sizeof good);
    good.name = "odd";
    good.infer = same_infer;
    good.forward = saves_nowhere;
    mixp_step_begin(ctx);
    in[0] = mixp_input(ctx, MIXP_F32, 1, four, zeros);
#define APPLIED(change, n, required, part)                                                      \
    do { op = good; change;                                                                     \
         NOT_MADE(ctx, mixp_apply(ctx, &op, n, in, required, NULL), MIXP_ERR_ARGUMENT, part); } while (0)
    APPLIED(op.name = NULL, 1, 1, "are missing");
    APPLIED(op.infer = NULL, 1, 1, "are missing");
    APPLIED(op.forward = NULL, 1, 1, "are missing");
    APPLIED(op.attrs_size = 4, 1, 1, "attrs is NULL, but the operator's attrs_size is 4");
    APPLIED((void)0, 0, 0, "odd: 0 inputs");
    APPLIED((void)0, MIXP_MAX_INPUTS + 1, 1, "inputs, of which 1 required");
    APPLIED((void)0, 1, -1, "1 inputs, of which -1 required");
    APPLIED((void)0, 1, 2, "1 inputs, of which 2 required");
    APPLIED((void)0, 2, 2, "odd: input 1 is NULL");
    NOT_MADE(ctx, mixp_apply(ctx, NULL, 1, in, 1, NULL), MIXP_ERR_ARGUMENT, "are missing");
    NOT_MADE(ctx, mixp_apply(ctx, &good, 1, NULL, 1, NULL), MIXP_ERR_ARGUMENT, "are missing");
    (void)mixp_apply(ctx, &good, 1, in, 1, NULL);
    mixp_context_clear_error(ctx);
    mixp_context_free(ctx);
}

static void gradients_checked(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, four), *h = mixp_param(ctx, "h", MIXP_F16, 1, four);
    mixp_tensor *none = NULL;
    double worst;
    CHECK_INT(mixp_check_gradients(NULL, no_loss, NULL, 1, &w, 1e-3, &worst), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_check_gradients(ctx, NULL, NULL, 1, &w, 1e-3, &worst), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_check_gradients(ctx, no_loss, NULL, 1, NULL, 1e-3, &worst), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_check_gradients(ctx, no_loss, NULL, 1, &w, 1e-3, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_check_gradients(ctx, no_loss, NULL, 0, &w, 1e-3, &worst), MIXP_ERR_ARGUMENT);
    CHECK(mixp_check_gradients(ctx, no_loss, NULL, 1, &none, 1e-3, &worst) != MIXP_OK);
    mixp_context_clear_error(ctx);
    CHECK(mixp_check_gradients(ctx, no_loss, NULL, 1, &h, 1e-3, &worst) != MIXP_OK);
    mixp_context_clear_error(ctx);
    mixp_context_free(ctx);
}

/* --- attention ------------------------------------------------------------------------------------- */

static void attentions(void) {
    static const int64_t q_shape[4] = { 2, 3, 4, 8 }, packed[3] = { 2, 3, 24 }, three[1] = { 3 }, flat[2] = { 3, 8 };
    static const int64_t other[4] = { 2, 5, 4, 8 }, kv[4] = { 2, 3, 2, 8 }, wide[4] = { 2, 3, 2, 6 }, five[4] = { 2, 5, 2, 8 };
    static float zeros[1024];
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_attention_desc d;
    mixp_step_begin(ctx);
    mixp_tensor *q = mixp_input(ctx, MIXP_F32, 4, q_shape, zeros);
    mixp_tensor *k = mixp_input(ctx, MIXP_F32, 4, kv, zeros);
    mixp_tensor *v = k;
#define ATTENTION(change, q_, k_, v_)                                                           \
    do { memset(&d, 0, sizeof d); d.kv_heads = 2; change;                                       \
         CHECK(mixp_attention_apply(ctx, q_, k_, v_, &d) == NULL);                              \
         CHECK(mixp_context_error(ctx, NULL) == MIXP_ERR_SHAPE || mixp_context_error(ctx, NULL) == MIXP_ERR_ARGUMENT); \
         mixp_context_clear_error(ctx); } while (0)
    memset(&d, 0, sizeof d);
    d.kv_heads = 2;
    CHECK(mixp_attention_apply(ctx, q, k, v, &d) != NULL);
    ATTENTION(d.heads = -1, q, k, v);
    ATTENTION(d.kv_heads = -1, q, k, v);
    ATTENTION(d.kv_heads = 3, q, k, v);
    ATTENTION(d.heads = 3, q, k, v);                                     /* q says 4 */
    ATTENTION(d.past = -1, q, k, v);
    ATTENTION(d.softcap = -1, q, k, v);
    ATTENTION(d.dropout = 1, q, k, v);
    ATTENTION((void)0, q, k, NULL);
    ATTENTION((void)0, q, NULL, v);
    ATTENTION((void)0, q, k, mixp_input(ctx, MIXP_F32, 4, five, zeros));  /* as many as keys */
    ATTENTION((void)0, q, mixp_input(ctx, MIXP_F32, 4, wide, zeros), v);  /* of q's width */
    ATTENTION((void)0, mixp_input(ctx, MIXP_F32, 2, flat, zeros), k, v);
    ATTENTION(d.mask = mixp_input(ctx, MIXP_F32, 1, four, zeros), q, k, v);
    ATTENTION(d.mask = mixp_input(ctx, MIXP_F32, 4, other, zeros), q, k, v);
    ATTENTION(d.lengths = mixp_input(ctx, MIXP_I32, 1, three, zeros), q, k, v);
    CHECK(mixp_attention_apply(ctx, q, k, v, NULL) == NULL);
    mixp_context_clear_error(ctx);
    NOT_MADE(ctx, mixp_attention(ctx, mixp_input(ctx, MIXP_F32, 3, packed, zeros), 0, 1, 0), MIXP_ERR_SHAPE, "");
    NOT_MADE(ctx, mixp_attention(ctx, mixp_input(ctx, MIXP_F32, 2, flat, zeros), 2, 1, 0), MIXP_ERR_SHAPE, "");
    mixp_context_free(ctx);
}

/* --- scaler ---------------------------------------------------------------------------------------- */

static void scaler_descriptions(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_scaler_desc d;
    mixp_scaler_rule rule;
#define DESCRIBED(change, part)                                                                 \
    do { memset(&d, 0, sizeof d); d.rule = MIXP_RULE_PREDICTIVE; change;                        \
         CHECK_INT(mixp_scaler_rule_resolve(&d, &rule), MIXP_ERR_ARGUMENT);                     \
         NOT_MADE(ctx, mixp_scaler_new(ctx, &d), MIXP_ERR_ARGUMENT, part); } while (0)
    DESCRIBED(d.rule = MIXP_RULE_COUNT, "rule is not a");
    DESCRIBED(d.growth_factor = inf64(), "a field is Inf or NaN");
    DESCRIBED(d.growth_factor = -1, "growth_factor must be above 1");
    DESCRIBED(d.init_scale = 1e-39f, "init_scale must lie");
    DESCRIBED(d.init_scale = 1e38f, "init_scale must lie");
    DESCRIBED((d.min_scale = 16, d.max_scale = 8), "");
    DESCRIBED(d.backoff_factor = (double)quiet_nan(), "a field is Inf or NaN");
    DESCRIBED(d.init_scale = quiet_nan(), "a field is Inf or NaN");
    DESCRIBED(d.min_scale = (float)inf64(), "a field is Inf or NaN");
    DESCRIBED(d.max_scale = quiet_nan(), "a field is Inf or NaN");
    DESCRIBED(d.growth_factor = 1, "growth_factor must be above 1");
    DESCRIBED(d.backoff_factor = 1, "backoff_factor must lie");
    DESCRIBED(d.backoff_factor = -0.5, "backoff_factor must lie");
    DESCRIBED(d.growth_interval = -1, "growth_interval must be at least 1");
    DESCRIBED(d.growth_interval = INT32_MAX, "growth_interval must be below");
    DESCRIBED(d.hysteresis = -1, "hysteresis must be at least 1");
    DESCRIBED(d.margin = -1, "margin must lie");
    DESCRIBED(d.margin = 31, "margin must lie");
    DESCRIBED(d.init_scale = -2, "init_scale must lie");
    DESCRIBED(d.min_scale = -2, "min_scale must lie");
    DESCRIBED(d.max_scale = -2, "max_scale must lie");
    DESCRIBED((d.init_scale = 2, d.min_scale = 4), "");
    DESCRIBED((d.init_scale = 8, d.max_scale = 4), "");
    mixp_context_free(ctx);
}

/* A field that is not 0 replaces the rule's, in the rule that the next step uses; 0 leaves it. */
static void scaler_changes(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_scaler_desc d;
    mixp_scaler_saved saved;
    memset(&d, 0, sizeof d);
    d.rule = MIXP_RULE_PREDICTIVE;
    mixp_scaler *scaler = mixp_scaler_new(ctx, &d);
    memset(&d, 0, sizeof d);
    CHECK_INT(mixp_scaler_change(scaler, &d), MIXP_OK);
    CHECK_INT(mixp_scaler_save(scaler, &saved), MIXP_OK);
    CHECK_NEAR(saved.growth_factor, 2, 0);
    d.growth_factor = 4;
    d.backoff_factor = 0.25;
    d.growth_interval = 7;
    d.hysteresis = 2;
    d.min_scale = 0.5f;
    d.max_scale = 1024 * 1024;
    d.margin = 2;
    d.max_floor_skips = 9;
    CHECK_INT(mixp_scaler_change(scaler, &d), MIXP_OK);
    CHECK_INT(mixp_scaler_save(scaler, &saved), MIXP_OK);
    CHECK_NEAR(saved.growth_factor, 4, 0);
    CHECK_NEAR(saved.backoff_factor, 0.25, 0);
    CHECK_INT(saved.growth_interval, 7);
    CHECK_NEAR(saved.scale, 65536, 0);
#define CHANGED(change, part)                                                                   \
    do { memset(&d, 0, sizeof d); change;                                                       \
         REFUSED(ctx, mixp_scaler_change(scaler, &d), MIXP_ERR_ARGUMENT, part); } while (0)
    CHANGED(d.init_scale = 2, "init_scale has no effect");
    CHANGED(d.disabled = 1, "disabled is for mixp_scaler_new only");
    CHANGED(d.margin = 31, "margin must lie");
    CHANGED(d.growth_factor = 0.5, "growth_factor must be above 1");
    memset(&d, 0, sizeof d);
    d.rule = MIXP_RULE_TORCH + 2;               /* another rule, what was changed on top of it */
    CHECK_INT(mixp_scaler_change(scaler, &d), MIXP_OK);
    CHECK_INT(mixp_scaler_save(scaler, &saved), MIXP_OK);
    CHECK_INT(saved.growth_interval, 7);
#define LOADED(change, part)                                                                    \
    do { mixp_scaler_saved s = saved; change;                                                   \
         REFUSED(ctx, mixp_scaler_load(scaler, &s), MIXP_ERR_ARGUMENT, part); } while (0)
    LOADED(s.growth_factor = 1, "a factor or the interval");
    LOADED(s.backoff_factor = 0, "a factor or the interval");
    LOADED(s.growth_interval = 0, "a factor or the interval");
    LOADED(s.growth_tracker = -1, "a counter is negative");
    LOADED(s.hysteresis_left = -1, "a counter is negative");
    LOADED(s.forgiven = -1, "a counter is negative");
    LOADED(s.peak = -1, "largest or peak is negative");
    LOADED(s.largest = (float)inf64(), "largest or peak is negative");
    LOADED(s.scale = (float)inf64(), "the scale is not in");
    LOADED(s.scale = 0, "saved by a disabled scaler");
    mixp_context_free(ctx);
}

static void disabled_scaler(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_scaler_saved saved;
    mixp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.disabled = 1;
    mixp_scaler *scaler = mixp_scaler_new(ctx, &d);
    CHECK_NEAR(mixp_scaler_loss_scale(scaler), 1, 0);
    CHECK_INT(mixp_scaler_update_to(scaler, 4), MIXP_OK);
    CHECK_NEAR(mixp_scaler_loss_scale(scaler), 1, 0);
    CHECK_INT(mixp_scaler_save(scaler, &saved), MIXP_OK);
    CHECK_NEAR(saved.scale, 0, 0);
    CHECK_INT(mixp_scaler_load(scaler, &saved), MIXP_OK);
    CHECK_INT(mixp_retry(scaler, 3), 0);
    mixp_context_free(ctx);
}

/* --- optimizers ------------------------------------------------------------------------------------ */

static void optimizer_descriptions(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc muon, adamw, sgd;
    CHECK(new_rmsprop(ctx) != NULL && new_lion(ctx) != NULL);
    CHECK(new_adam(ctx) != NULL && new_muon(ctx) != NULL);
#define MUON(change, part)                                                                      \
    do { muon = mixp_muon_defaults(); change;                                                   \
         NOT_MADE(ctx, mixp_optimizer_new(ctx, &muon), MIXP_ERR_ARGUMENT, part); } while (0)
    MUON(muon.muon.a = inf64(), "");
    MUON(muon.muon.b = inf64(), "");
    MUON(muon.muon.c = inf64(), "");
    MUON(muon.muon.iterations = 0, "muon.iterations must lie in [1, 99]");
    MUON(muon.muon.iterations = 100, "muon.iterations must lie in [1, 99]");
#define ADAMW(change, part)                                                                     \
    do { adamw = mixp_adamw_defaults(); change;                                                 \
         NOT_MADE(ctx, mixp_optimizer_new(ctx, &adamw), MIXP_ERR_ARGUMENT, part); } while (0)
    ADAMW(adamw.schedule.min_factor = -1, "schedule.min_factor must lie");
    ADAMW(adamw.schedule.min_factor = 2, "schedule.min_factor must lie");
    ADAMW(adamw.schedule.warmup = -1, "schedule.warmup is negative");
    ADAMW((adamw.spike.of = MIXP_SPIKE_NORM, adamw.spike.window = 3), "window");
    ADAMW((adamw.spike.of = MIXP_SPIKE_NORM, adamw.spike.window = 4097), "window");
#define SGD(change)                                                                             \
    do { sgd = mixp_sgd_defaults(); sgd.nesterov = 1; sgd.momentum = 0.5; change;               \
         NOT_MADE(ctx, mixp_optimizer_new(ctx, &sgd), MIXP_ERR_ARGUMENT, "nesterov needs momentum and no dampening"); } while (0)
    SGD(sgd.momentum = 0);
    SGD(sgd.dampening = 0.5);
    SGD(sgd.dampening = -0.5);
    mixp_context_free(ctx);
}

/* Fields that a kind of optimizer does not have; torch.optim's constructors do not have them either. */
static void fields_of_other_kinds(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d;
#define EXTRA(kind, name, field, value)                                                         \
    do { d = mixp_##kind##_defaults(); d.field = value;                                         \
         NOT_MADE(ctx, mixp_optimizer_new(ctx, &d), MIXP_ERR_ARGUMENT,                          \
                  "mixp_optimizer_new: " name " has no "); } while (0)
    EXTRA(adam, "Adam", momentum, 0.9);
    EXTRA(adam, "Adam", cautious, 1);
    EXTRA(adamw, "AdamW", momentum, 0.9);
    EXTRA(adamw, "AdamW", dampening, 0.1);
    EXTRA(adamw, "AdamW", nesterov, 1);
    EXTRA(adamw, "AdamW", muon.iterations, 5);
    EXTRA(sgd, "SGD", beta1, 0.9);
    EXTRA(sgd, "SGD", beta2, nan64());
    EXTRA(sgd, "SGD", eps, 1e-8);
    EXTRA(sgd, "SGD", cautious, 1);
    EXTRA(rmsprop, "RMSprop", beta1, 0.9);
    EXTRA(rmsprop, "RMSprop", nesterov, 1);
    EXTRA(lion, "Lion", eps, 1e-8);
    EXTRA(lion, "Lion", momentum, 0.9);
    EXTRA(muon, "Muon", beta1, 0.9);
    EXTRA(muon, "Muon", dampening, 0.1);
    d = mixp_adamw_defaults();
    d.kind = MIXP_OPTIMIZER_SGD;
    NOT_MADE(ctx, mixp_optimizer_new(ctx, &d), MIXP_ERR_ARGUMENT, "SGD has no beta1: leave it 0");
    d.kind = MIXP_OPTIMIZER_EMA;
    NOT_MADE(ctx, mixp_optimizer_new(ctx, &d), MIXP_ERR_ARGUMENT, "kind is not a mixp_optimizer_kind");
    mixp_context_free(ctx);
}

static void groups(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_param_group g;
    CHECK_INT(mixp_optimizer_group(opt, 0, &g), MIXP_OK);
    REFUSED(ctx, mixp_optimizer_group(opt, 0, NULL), MIXP_ERR_ARGUMENT, "");
    REFUSED(ctx, mixp_optimizer_group(opt, -1, &g), MIXP_ERR_ARGUMENT, "");
    REFUSED(ctx, mixp_optimizer_group(opt, 1, &g), MIXP_ERR_ARGUMENT, "");
    REFUSED(ctx, mixp_optimizer_set_group(opt, -1, &g), MIXP_ERR_ARGUMENT, "no group has this index");
    REFUSED(ctx, mixp_optimizer_set_group(opt, 1, &g), MIXP_ERR_ARGUMENT, "no group has this index");
    for (int i = 1; i < MIXP_MAX_GROUPS; i++) CHECK_INT(mixp_optimizer_add_group(opt, &g), i);
    REFUSED(ctx, mixp_optimizer_add_group(opt, &g) == -1 ? MIXP_ERR_ARGUMENT : MIXP_OK, MIXP_ERR_ARGUMENT,
            "the limit is MIXP_MAX_GROUPS groups");
    CHECK_NEAR(mixp_optimizer_lr(opt, -1), 0, 0);
    CHECK_NEAR(mixp_optimizer_lr(opt, MIXP_MAX_GROUPS), 0, 0);
    CHECK_NEAR(mixp_optimizer_lr(opt, 1), g.lr, 0);
    mixp_context_free(ctx);
}

static void added(void) {
    static float memory[16];
    mixp_context *ctx = mixp_context_new(NULL), *other = mixp_context_new(NULL);
    mixp_tensor *w = mixp_view(ctx, "w", MIXP_F32, 1, four, memory), *g = mixp_view(ctx, "g", MIXP_F32, 1, four, memory + 4);
    mixp_tensor *ids = mixp_view(ctx, "ids", MIXP_I32, 1, four, memory + 8), *far, *step, *same;
    mixp_optimizer *opt = new_sgd(ctx);
    far = mixp_view(other, "far", MIXP_F32, 1, four, memory + 12);
    same = mixp_view(ctx, "same", MIXP_F32, 1, four, memory);
    mixp_step_begin(ctx);
    step = mixp_activation(ctx, MIXP_F32, 1, four);
    CHECK_INT(mixp_optimizer_add(NULL, w, g), MIXP_ERR_ARGUMENT);
    REFUSED(ctx, mixp_optimizer_add(opt, NULL, g), MIXP_ERR_ARGUMENT, "param is NULL");
    REFUSED(ctx, mixp_optimizer_add(opt, ids, g), MIXP_ERR_DTYPE, "must be f32, f64, f16 or bf16");
    REFUSED(ctx, mixp_optimizer_add(opt, w, ids), MIXP_ERR_DTYPE, "must be f32, f64, f16 or bf16");
    REFUSED(ctx, mixp_optimizer_add(opt, w, same), MIXP_ERR_ARGUMENT, "is its own gradient");
    REFUSED(ctx, mixp_optimizer_add(opt, step, g), MIXP_ERR_ARGUMENT, "lives for one step only");
    REFUSED(ctx, mixp_optimizer_add(opt, w, step), MIXP_ERR_ARGUMENT, "lives for one step only");
    REFUSED(ctx, mixp_optimizer_add(opt, far, g), MIXP_ERR_ARGUMENT, "belongs to another context");
    REFUSED(ctx, mixp_optimizer_add(opt, w, far), MIXP_ERR_ARGUMENT, "belongs to another context");
    REFUSED(ctx, mixp_optimizer_add(opt, w, NULL), MIXP_ERR_ARGUMENT, "is a view without a gradient");
    CHECK_INT(mixp_optimizer_add(opt, w, g), MIXP_OK);
    mixp_context_free(other);
    mixp_context_free(ctx);
}

/* With zero_grad the first of two that share a gradient would clear it before the second reads it. */
static void shared_gradient(void) {
    static float memory[16];
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_adamw_defaults();
    mixp_tensor *g = mixp_view(ctx, "g", MIXP_F32, 1, four, memory);
    mixp_tensor *a = mixp_view(ctx, "a", MIXP_F32, 1, four, memory + 4), *b = mixp_view(ctx, "b", MIXP_F32, 1, four, memory + 8);
    d.zero_grad = 1;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    CHECK_INT(mixp_optimizer_add(opt, a, g), MIXP_OK);
    REFUSED(ctx, mixp_optimizer_add(opt, b, g), MIXP_ERR_ARGUMENT, "shares its gradient");
    CHECK_INT(mixp_optimizer_add(opt, b, mixp_view(ctx, "h", MIXP_F32, 1, four, memory + 12)), MIXP_OK);
    mixp_context_free(ctx);
}

static void losses(void) {
    const float one = 1;
    mixp_context *ctx = mixp_context_new(NULL), *other = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_adamw_defaults();
    mixp_optimizer *plain = mixp_optimizer_new(ctx, &d);
    d.spike.of = MIXP_SPIKE_LOSS;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    mixp_step_begin(ctx);
    mixp_step_begin(other);
    mixp_tensor *loss = mixp_input(ctx, MIXP_F32, 1, one_element, &one);
    CHECK_INT(mixp_optimizer_set_loss(NULL, loss), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_set_loss(opt, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_set_loss(opt, loss), MIXP_OK);
    REFUSED(ctx, mixp_optimizer_set_loss(plain, loss), MIXP_ERR_ARGUMENT, "is neither MIXP_SPIKE_LOSS");
    REFUSED(ctx, mixp_optimizer_set_loss(opt, mixp_activation(ctx, MIXP_F32, 1, four)), MIXP_ERR_ARGUMENT,
            "a loss has one element");
    REFUSED(ctx, mixp_optimizer_set_loss(opt, mixp_activation(ctx, MIXP_F16, 1, one_element)), MIXP_ERR_DTYPE,
            "pass an f32 loss");
    REFUSED(ctx, mixp_optimizer_set_loss(opt, mixp_input(other, MIXP_F32, 1, one_element, &one)),
            MIXP_ERR_ARGUMENT, "to another context");
    mixp_context_free(other);
    mixp_context_free(ctx);
}

/* --- watching -------------------------------------------------------------------------------------- */

static void guards(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_guard_desc d;
    char pattern[100];
#define GUARD(change, part)                                                                     \
    do { memset(&d, 0, sizeof d); change;                                                       \
         REFUSED(ctx, mixp_guard_start(ctx, &d), MIXP_ERR_ARGUMENT, part); } while (0)
    GUARD(d.every = -1, "every must lie");
    GUARD(d.every = (1 << 20) + 1, "every must lie");
    GUARD(d.clean = -1, "clean must lie");
    GUARD(d.clean = (1 << 20) + 1, "clean must lie");
    GUARD(d.high = 1.5f, "high must lie");
    GUARD(d.high = quiet_nan(), "high must lie");
    GUARD(d.low_again = -1, "low_again");
    GUARD(d.low_again = 0.5f, "low_again");
    GUARD(d.flushed = -1, "flushed");
    GUARD(d.flushed = 1.5f, "flushed");
    GUARD(d.max_sites = -1, "max_sites must lie");
    GUARD(d.max_sites = (1 << 20) + 1, "max_sites must lie");
    REFUSED(ctx, mixp_guard_pin(ctx, NULL, MIXP_F32), MIXP_ERR_ARGUMENT, "the pattern is empty");
    REFUSED(ctx, mixp_guard_pin(ctx, "", MIXP_F32), MIXP_ERR_ARGUMENT, "the pattern is empty");
    memset(pattern, 'a', sizeof pattern);
    pattern[96] = '\0';
    REFUSED(ctx, mixp_guard_pin(ctx, pattern, MIXP_F32), MIXP_ERR_ARGUMENT, "more than 95 characters");
    pattern[95] = '\0';
    CHECK_INT(mixp_guard_pin(ctx, pattern, MIXP_F32), MIXP_OK);
    CHECK_INT(mixp_guard_pin(ctx, "***b", MIXP_F32), MIXP_OK);
    mixp_context_free(ctx);
}

static void a_guard_needs_the_kernel_that_looks(void) {
    mixp_kernels kernels = *mixp_cpu()->kernels;
    mixp_device blind = *mixp_cpu();
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    kernels.look = NULL;
    blind.kernels = &kernels;
    d.device = &blind;
    mixp_context *none = mixp_context_new(&d);
    REFUSED(none, mixp_guard_start(none, NULL), MIXP_ERR_DEVICE, "");
    mixp_context_free(none);
}

static void comparisons(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_compare_desc good, d;
    mixp_difference rows[4];
    int64_t n;
    memset(&good, 0, sizeof good);
    good.a.dtype = MIXP_F16;
    good.a.level = 1;
    good.fn = no_loss;
#define COMPARED(change, part)                                                                  \
    do { d = good; change;                                                                      \
         REFUSED(ctx, mixp_compare(ctx, &d, rows, 4, &n), MIXP_ERR_ARGUMENT, part); } while (0)
    COMPARED(d.fn = NULL, "fn is NULL");
    COMPARED(d.a.dtype = MIXP_I32, "");
    COMPARED(d.b.dtype = MIXP_F64, "");
    COMPARED(d.a.level = -1, "");
    COMPARED(d.a.level = 4, "");
    COMPARED(d.b.level = -1, "");
    COMPARED(d.b.level = 4, "");
    COMPARED(d.scale = -1, "");
    COMPARED(d.scale = (float)inf64(), "");
    REFUSED(ctx, mixp_compare(ctx, NULL, rows, 4, &n), MIXP_ERR_ARGUMENT, "fn is NULL");
    REFUSED(ctx, mixp_compare(ctx, &good, NULL, 4, &n), MIXP_ERR_ARGUMENT, "must not be NULL, and room");
    REFUSED(ctx, mixp_compare(ctx, &good, rows, 0, &n), MIXP_ERR_ARGUMENT, "must not be NULL, and room");
    REFUSED(ctx, mixp_compare(ctx, &good, rows, 4, NULL), MIXP_ERR_ARGUMENT, "must not be NULL, and room");
    mixp_context_free(ctx);
}

/* --- files ----------------------------------------------------------------------------------------- */

static void checkpoints(void) {
    mixp_context *ctx = mixp_context_new(NULL), *other = mixp_context_new(NULL);
    mixp_optimizer *far = new_sgd(other), *none = NULL;
    mixp_checkpoint_value value;
    int64_t number = 0;
    mixp_checkpoint c;
    memset(&value, 0, sizeof value);
    value.name = "n";
    value.dtype = MIXP_I64;
    value.count = 1;
    value.data = &number;
#define SAVED(change, part)                                                                     \
    do { memset(&c, 0, sizeof c); c.ctx = ctx; change;                                          \
         REFUSED(ctx, mixp_checkpoint_save("/nowhere/at/all", &c), MIXP_ERR_ARGUMENT, part);    \
         REFUSED(ctx, mixp_checkpoint_load("/nowhere/at/all", &c), MIXP_ERR_ARGUMENT, part); } while (0)
    SAVED(c.n_optimizers = -1, "a count is negative");
    SAVED(c.n_values = -1, "a count is negative");
    SAVED(c.n_optimizers = 1, "an array is NULL");
    SAVED(c.n_values = 1, "an array is NULL");
    SAVED((c.n_optimizers = 1, c.optimizers = &far), "an optimizer is NULL, or belongs to another context");
    SAVED((c.n_optimizers = 1, c.optimizers = &none), "an optimizer is NULL, or belongs to another context");
    SAVED(c.scaler = mixp_scaler_new(other, NULL), "the scaler belongs to another context");
#define SAVED_VALUE(change, part)                                                               \
    do { mixp_checkpoint_value v = value; change;                                               \
         SAVED((c.n_values = 1, c.values = &v), part); } while (0)
    SAVED_VALUE(v.name = NULL, "a value or its name is NULL");
    SAVED_VALUE(v.data = NULL, "a value or its name is NULL");
    SAVED_VALUE(v.count = 0, "a value's count is below 1");
    SAVED_VALUE(v.count = INT64_MAX, "a value is larger than memory can be");
    SAVED_VALUE(v.dtype = MIXP_DTYPE_COUNT, "a dtype that safetensors lacks");
    memset(&c, 0, sizeof c);
    CHECK_INT(mixp_checkpoint_save("x", NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_checkpoint_load("x", &c), MIXP_ERR_ARGUMENT);
    c.ctx = ctx;
    REFUSED(ctx, mixp_checkpoint_save(NULL, &c), MIXP_ERR_ARGUMENT, "path is NULL");
    CHECK_INT(mixp_checkpoint_load_weights("x", NULL, NULL), MIXP_ERR_ARGUMENT);
    REFUSED(ctx, mixp_checkpoint_load_weights(NULL, ctx, NULL), MIXP_ERR_ARGUMENT, "path is NULL");
    CHECK_INT(mixp_checkpoint_save_weights("x", NULL), MIXP_ERR_ARGUMENT);
    REFUSED(ctx, mixp_checkpoint_save_weights(NULL, ctx), MIXP_ERR_ARGUMENT, "path is NULL");
    mixp_context_free(other);
    mixp_context_free(ctx);
}

static void safetensors(void) {
    static const char *const not_text[1][2] = { { "k", NULL } }, *const not_utf8[1][2] = { { "\xff", "v" } };
    static const char *const pair[1][2] = { { "k", "v" } };
    mixp_safetensors *file;
    mixp_st_entry e;
    char path[64];
    snprintf(path, sizeof path, "/tmp/mixprec_arguments_%ld.st", (long)getpid());
    memset(&e, 0, sizeof e);
    e.name = "e";
    e.dtype = MIXP_F32;
    CHECK_INT(mixp_safetensors_write(NULL, &e, 1, NULL, 0, NULL, 0), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_write(path, &e, -1, NULL, 0, NULL, 0), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_write(path, NULL, 1, NULL, 0, NULL, 0), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_write(path, NULL, 0, NULL, -1, NULL, 0), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_write(path, NULL, 0, NULL, 1, NULL, 0), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_write(path, NULL, 0, not_text, 1, NULL, 0), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_write(path, NULL, 0, not_utf8, 1, NULL, 0), MIXP_ERR_ARGUMENT);
    e.rank = -1;
    CHECK_INT(mixp_safetensors_write(path, &e, 1, NULL, 0, NULL, 0), MIXP_ERR_ARGUMENT);
    e.rank = MIXP_MAX_RANK + 1;
    CHECK_INT(mixp_safetensors_write(path, &e, 1, NULL, 0, NULL, 0), MIXP_ERR_ARGUMENT);
    e.rank = 0;
    e.bytes = 4;                                /* and no data */
    CHECK_INT(mixp_safetensors_write(path, &e, 1, NULL, 0, NULL, 0), MIXP_ERR_ARGUMENT);
    e.bytes = (size_t)-1;
    CHECK_INT(mixp_safetensors_write(path, &e, 1, NULL, 0, NULL, 0), MIXP_ERR_ARGUMENT);
    CHECK(access(path, F_OK) != 0);             /* none of these left a file */
    CHECK_INT(mixp_safetensors_write(path, NULL, 0, pair, 1, NULL, 0), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(path, NULL, NULL, 0), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_read(NULL, &file, NULL, 0), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_safetensors_read(path, &file, NULL, 0), MIXP_OK);
    CHECK_TEXT(mixp_safetensors_metadata(file, "k"), "v");
    CHECK(mixp_safetensors_metadata(file, NULL) == NULL && mixp_safetensors_metadata(NULL, "k") == NULL);
    CHECK(mixp_safetensors_find(file, NULL) == NULL && mixp_safetensors_find(NULL, "e") == NULL);
    CHECK(mixp_safetensors_at(file, -1) == NULL && mixp_safetensors_at(file, 0) == NULL);
    mixp_safetensors_free(file);
    CHECK_INT(mixp_safetensors_write(path, NULL, 0, NULL, 0, NULL, 0), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(path, &file, NULL, 0), MIXP_OK);
    CHECK(mixp_safetensors_metadata(file, "k") == NULL);        /* it has no pairs at all */
    mixp_safetensors_free(file);
    mixp_safetensors_free(NULL);
    remove(path);
}

int main(void) {
    const uint16_t one = 1;
    RUN(no_context);
    RUN(no_scaler_and_no_optimizer);
    RUN(no_watch);
    RUN(devices_that_do_not_begin);
    RUN(what_a_device_says);
    RUN(views_and_inputs);
    RUN(products);
    RUN(regions);
    RUN(overrides);
    RUN(operators);
    RUN(gradients_checked);
    RUN(attentions);
    RUN(scaler_descriptions);
    RUN(scaler_changes);
    RUN(disabled_scaler);
    RUN(optimizer_descriptions);
    RUN(fields_of_other_kinds);
    RUN(groups);
    RUN(added);
    RUN(shared_gradient);
    RUN(losses);
    RUN(guards);
    RUN(a_guard_needs_the_kernel_that_looks);
    RUN(comparisons);
    if (*(const char *)&one) {                  /* no checkpoints on big-endian machines */
        RUN(checkpoints);
        RUN(safetensors);
    }
    return test_report();
}
