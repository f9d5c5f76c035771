/* test_late_device.c - a device outside the library, compared with the CPU. It has separate
 * memory, and it reports a step's result only after the next step has begun. Also: how operators
 * and kernels answer invalid arguments.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "examples/compare.h"
#include "test.h"

/* --- the device: its memory is the host's, but nobody is told so ----------------------------- */

enum { SLOTS = 3, SLOT_BYTES = 1 << 20 };
static char        slot[SLOTS][SLOT_BYTES];
static int         posts[SLOTS], collected[SLOTS];
static mixp_result copies_say;          /* what uploads and downloads answer */
static int         refused = -1;        /* the slot whose posts fail */

static void *late_allocate(const mixp_exec *x, size_t bytes) {
    (void)x;
    return malloc(bytes);
}
static void late_release(const mixp_exec *x, void *p) {
    (void)x;
    free(p);
}
static mixp_result late_upload(const mixp_exec *x, void *device, const void *host,
                               size_t bytes) {
    (void)x;
    if (copies_say == MIXP_OK) memcpy(device, host, bytes);
    return copies_say;
}
static mixp_result late_download(const mixp_exec *x, void *host, const void *device,
                                 size_t bytes) {
    (void)x;
    if (copies_say == MIXP_OK) memcpy(host, device, bytes);
    return copies_say;
}
static mixp_result late_wait(const mixp_exec *x) {
    (void)x;
    return MIXP_OK;
}
static mixp_result late_post(const mixp_exec *x, int which, const void *device,
                             size_t bytes) {
    (void)x;
    if (which == refused) return MIXP_ERR_DEVICE;
    CHECK(which >= 0 && which < SLOTS && bytes <= SLOT_BYTES);
    memcpy(slot[which], device, bytes);
    posts[which]++;
    return MIXP_OK;
}
static mixp_result late_collect(const mixp_exec *x, int which, void *host, size_t bytes) {
    (void)x;
    CHECK(posts[which] > 0);
    memcpy(host, slot[which], bytes);
    collected[which]++;
    return MIXP_OK;
}
static mixp_gemm_count late_count(const mixp_exec *x) {
    const mixp_gemm_count n = { 3, 2, 1, 4, 5 };
    (void)x;
    return n;
}

static mixp_device late_device(void) {
    mixp_device d = *mixp_cpu();
    d.name = "late";
    d.allocate = late_allocate;
    d.release = late_release;
    d.upload = late_upload;
    d.download = late_download;
    d.wait = late_wait;
    d.post = late_post;
    d.collect = late_collect;
    d.gemm_count = late_count;
    copies_say = MIXP_OK;
    refused = -1;
    memset(posts, 0, sizeof posts);
    memset(collected, 0, sizeof collected);
    return d;
}

static mixp_context *context_of(const mixp_device *device) {
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.device = device;
    d.threads = 1;
    d.seed = 5;
    return mixp_context_new(&d);
}

static void close_clean(mixp_context *ctx) {
    const char *why = "";
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_OK);
    if (*why) printf("  %s\n", why);
    mixp_context_free(ctx);
}

static void told(mixp_context *ctx, mixp_result code, const char *part) {
    const char *why = "";
    CHECK_INT(mixp_context_error(ctx, &why), code);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(ctx);
}

/* --- a guard's decisions, a step later --------------------------------------------------------- */

typedef struct net {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *up, *down;
} net;

/* 4 numbers times 300 times 300, summed over 4: 360,000, which no f16 holds; `down` brings it back. */
static net net_on(const mixp_device *device) {
    static const int64_t shape[2] = { 4, 4 };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_guard_desc guard;
    mixp_scaler_desc rule;
    net n;
    sgd.lr = 1e-6;
    memset(&guard, 0, sizeof guard);
    memset(&rule, 0, sizeof rule);
    guard.every = 1;
    rule.init_scale = 1.0f;
    n.ctx = context_of(device);
    n.scaler = mixp_scaler_new(n.ctx, &rule);
    n.opt = mixp_optimizer_new(n.ctx, &sgd);
    n.up = mixp_param(n.ctx, "up.w", MIXP_F32, 2, shape);
    n.down = mixp_param(n.ctx, "down.w", MIXP_F32, 2, shape);
    mixp_fill(n.up, 300.0);
    mixp_fill(n.down, 1e-6);
    mixp_optimizer_add(n.opt, n.up, NULL);
    mixp_optimizer_add(n.opt, n.down, NULL);
    CHECK_INT(mixp_guard_start(n.ctx, &guard), MIXP_OK);
    return n;
}

static void net_step(net *n) {
    static const int64_t shape[2] = { 2, 4 };
    static const float x[8] = { 300, 300, 300, 300, 300, 300, 300, 300 };
    mixp_tensor *y = NULL, *loss;
    mixp_step_begin(n->ctx);
    mixp_zero_grad(n->opt);
    MIXP_AUTOCAST(n->ctx, MIXP_F16) {
        y = mixp_linear(n->ctx, mixp_input(n->ctx, MIXP_F32, 2, shape, x), n->up, NULL);
        y = mixp_linear(n->ctx, y, n->down, NULL);
    }
    loss = mixp_mean(n->ctx, y, MIXP_ALL, 0);
    mixp_backward(n->ctx, mixp_scaler_scale(n->scaler, loss));
    mixp_scaler_step(n->scaler, n->opt);
    mixp_scaler_update(n->scaler);
}

/* In which of the steps 1, 2, ... the site of up.w was told of, if it was; 0 = never. */
static int fell_in(net *n, int steps, mixp_event *first) {
    for (int s = 1; s <= steps; s++) {
        net_step(n);
        for (int i = 0; mixp_guard_event(n->ctx, i, first); i++)
            if (first->kind == MIXP_EVENT_OVERFLOW || first->kind == MIXP_EVENT_HIGH) return s;
    }
    return 0;
}

static void guard_tells_later(void) {
    mixp_device device = late_device();
    net here = net_on(mixp_cpu()), late = net_on(&device);
    mixp_event a, b;
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    int now = fell_in(&here, 6, &a);
    int later = fell_in(&late, 6, &b);
    CHECK_INT(now, 1);
    CHECK(later > now && later <= now + 2);     /* "read two steps later" */
    CHECK_INT(b.kind, a.kind);
    CHECK_INT(b.step, a.step);
    CHECK_TEXT(a.site, "up.w");
    CHECK_TEXT(b.site, "up.w");
    CHECK(posts[0] > 0 && posts[1] > 0 && collected[0] > 0 && collected[1] > 0);
    for (int i = 0; i < 4; i++) {                   /* it stores f32 now: every step is applied */
        int64_t applied = mixp_scaler_verdict(late.scaler).applied;
        net_step(&late);
        CHECK_INT(mixp_scaler_verdict(late.scaler).applied, applied + 1);
    }
    /* Both skips began forward: the first is forgiven; the second came before the host knew. */
    CHECK_NEAR(mixp_scaler_loss_scale(here.scaler), 1.0, 0);
    CHECK_NEAR(mixp_scaler_loss_scale(late.scaler), 0.5, 0);
    close_clean(here.ctx);
    close_clean(late.ctx);
}

static void posts_that_fail(void) {
    static const char *const who[SLOTS] = { "guard: ", "guard: ", "mixp_optimizer_sample: " };
    mixp_device device = late_device();
    for (int which = 0; which < SLOTS; which++) {
        net n = net_on(&device);
        refused = which;
        net_step(&n);
        net_step(&n);
        told(n.ctx, MIXP_ERR_DEVICE, who[which]);
        mixp_context_free(n.ctx);
        refused = -1;
    }
}

/* --- counts of a gradient that arrive later ------------------------------------------------------- */

/* 0, 2^-30, which f16 flushes, 2^-20, which is subnormal there, and 1. */
static void counts_arrive(void) {
    static const int64_t shape[1] = { 4 };
    float w[4] = { 1, 1, 1, 1 }, g[4] = { 0.0f, 9.31322575e-10f, 9.53674316e-7f, 1.0f };
    mixp_device device = late_device();
    mixp_context *ctx = context_of(&device);
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    mixp_underflow u;
    mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, shape, w),
                       mixp_view(ctx, "g", MIXP_F32, 1, shape, g));
    CHECK_INT(mixp_optimizer_sample(opt), MIXP_OK);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK_INT(posts[2], 2);         /* the first, before the step, only takes the memory of the copy */
    CHECK_INT(mixp_optimizer_underflow(opt, 0, &u), 1);
    CHECK_INT(collected[2], 1);
    CHECK_INT(u.look.count, 4);
    CHECK_INT(u.look.zeros, 1);
    CHECK_NEAR(u.look.largest, 1.0, 0);
    CHECK_NEAR(u.flushed, 1.0 / 3, 1e-12);
    CHECK_NEAR(u.subnormal, 1.0 / 3, 1e-12);
    close_clean(ctx);
}

/* --- memory of its own ------------------------------------------------------------------------------- */

static void writes_and_reads(void) {
    static const int64_t shape[1] = { 4 };
    const float given[4] = { 1.0f, 1.0f + 0x1p-12f, -65504.0f, 0.5f };  /* the second is no f16 */
    const float want[4] = { 1.0f, 1.0f, -65504.0f, 0.5f };
    float got[4];
    mixp_device device = late_device();
    mixp_context *ctx = context_of(&device);
    mixp_tensor *t = mixp_param(ctx, "t", MIXP_F16, 1, shape);
    CHECK_INT(mixp_write(t, given, MIXP_F32, 4), MIXP_OK);
    CHECK_INT(mixp_read(t, got, MIXP_F32, 4), MIXP_OK);
    CHECK(memcmp(got, want, sizeof got) == 0);
    CHECK_INT(mixp_context_gemm_count(ctx).direct, 3);
    CHECK_INT(mixp_context_gemm_count(ctx).packed, 2);
    CHECK_INT(mixp_context_gemm_count(ctx).plain, 1);
    CHECK_INT(mixp_context_gemm_count(ctx).narrow, 4);
    CHECK_INT(mixp_context_gemm_count(ctx).apart, 5);
    CHECK_INT(mixp_context_gemm_count(NULL).direct, 0);
    copies_say = MIXP_ERR_DEVICE;
    CHECK_INT(mixp_write(t, given, MIXP_F32, 4), MIXP_ERR_DEVICE);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_init_normal(t, 0.0, 1.0), MIXP_ERR_DEVICE);
    mixp_context_clear_error(ctx);
    copies_say = MIXP_OK;
    CHECK_INT(mixp_read(t, got, MIXP_F32, 4), MIXP_OK);
    CHECK(memcmp(got, want, sizeof got) == 0);
    close_clean(ctx);
}

static void nothing_to_replay(void) {
    CHECK_INT(mixp_capture_begin(NULL), MIXP_ERR_ARGUMENT);
    CHECK(mixp_capture_end(NULL) == NULL);
    CHECK_INT(mixp_replay(NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_graph_stale(NULL), 0);
    CHECK_INT(mixp_graph_free(NULL), MIXP_OK);
}

/* One step in three is due: the third, sixth, ... */
static void when_a_sample_is_due(void) {
    mixp_context *ctx = context_of(NULL);
    mixp_guard_desc guard;
    int due[7], i;
    memset(&guard, 0, sizeof guard);
    guard.every = 3;
    CHECK_INT(mixp_guard_due(NULL), 0);
    CHECK_INT(mixp_guard_due(ctx), 0);
    mixp_guard_start(ctx, &guard);
    for (i = 0; i < 7; i++) {
        due[i] = mixp_guard_due(ctx);
        mixp_step_begin(ctx);
    }
    for (i = 1; i + 3 < 7; i++) CHECK_INT(due[i], due[i + 3]);
    CHECK_INT(due[1] + due[2] + due[3], 1);
    mixp_guard_stop(ctx);
    CHECK_INT(mixp_guard_due(ctx), 0);
    close_clean(ctx);
}

/* --- what operators say ------------------------------------------------------------------------------- */

static void shapes_that_no_operator_takes(void) {
    static const int64_t shape[3] = { 2, 4, 6 };
    mixp_context *ctx = context_of(NULL);
    mixp_tensor *cube = mixp_param(ctx, "cube", MIXP_F32, 3, shape), *ids, *counts;
    mixp_rope_desc rope;
    const int32_t none[2] = { 0, 1 };
    mixp_step_begin(ctx);
    ids = mixp_input(ctx, MIXP_I32, 1, shape, none);
    CHECK(mixp_embedding(ctx, cube, ids) == NULL);
    told(ctx, MIXP_ERR_SHAPE, "table[vocab, c]");
    CHECK(mixp_cross_entropy(ctx, cube, ids, -100) == NULL);
    told(ctx, MIXP_ERR_SHAPE, "x[..., classes]");
    memset(&rope, 0, sizeof rope);
    rope.head_dim = 2;
    rope.base = -1.0;
    CHECK(mixp_rope(ctx, cube, &rope) == NULL);
    told(ctx, MIXP_ERR_ARGUMENT, "base is -1");
    counts = ids;
    CHECK(mixp_cast(ctx, counts, MIXP_I32) == NULL);
    told(ctx, MIXP_ERR_DTYPE, "cast: the result must be");
    CHECK(mixp_exp(ctx, NULL) == NULL);
    told(ctx, MIXP_ERR_ARGUMENT, "input 0 is NULL");
    close_clean(ctx);
}

static mixp_tensor *no_loss(mixp_context *ctx, void *user) {
    (void)ctx;
    (void)user;
    return NULL;
}

static void settings_that_no_comparison_takes(void) {
    mixp_context *ctx = context_of(NULL);
    mixp_compare_desc d;
    mixp_difference row;
    int64_t n = 7;
    memset(&d, 0, sizeof d);
    d.fn = no_loss;
    d.a.dtype = MIXP_I32;
    CHECK_INT(mixp_compare(ctx, &d, &row, 1, &n), MIXP_ERR_ARGUMENT);
    told(ctx, MIXP_ERR_ARGUMENT, "a dtype must be f16, bf16 or f32");
    d.a.dtype = MIXP_F16;
    d.b.dtype = MIXP_F32;
    d.b.level = 4;
    CHECK_INT(mixp_compare(ctx, &d, &row, 1, &n), MIXP_ERR_ARGUMENT);
    told(ctx, MIXP_ERR_ARGUMENT, "a level must be 0 to 3");
    d.b.level = 0;
    d.scale = -1.0f;
    CHECK_INT(mixp_compare(ctx, &d, &row, 1, &n), MIXP_ERR_ARGUMENT);
    told(ctx, MIXP_ERR_ARGUMENT, "the scale must be finite and at least 0");
    close_clean(ctx);
}

static void rules_that_nobody_keeps(void) {
    mixp_context *ctx = context_of(NULL);
    mixp_scaler_desc rule;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    memset(&rule, 0, sizeof rule);
    rule.max_scale = 1e-40f;
    CHECK(mixp_scaler_new(ctx, &rule) == NULL);
    told(ctx, MIXP_ERR_ARGUMENT, "max_scale must lie in [2^-126, 2^126]");
    sgd.schedule.kind = (mixp_schedule_kind)99;
    CHECK(mixp_optimizer_new(ctx, &sgd) == NULL);
    told(ctx, MIXP_ERR_ARGUMENT, "schedule.kind is not a mixp_schedule_kind");
    close_clean(ctx);
}

/* --- what kernels say ----------------------------------------------------------------------------------- */

/* Of an array of whole numbers where real ones belong, or of one that is missing. */
static void kernels_of(const mixp_kernels *k, const mixp_exec *x) {
    float data[4] = { 0, 0, 0, 0 };
    const mixp_in real = mixpi_in(data, MIXP_F32), whole = mixpi_in(data, MIXP_I32);
    const mixp_out to = mixpi_out_to(data, MIXP_F32, 0);
    int32_t index[4] = { 0, 0, 0, 0 };
    mixp_max_args max;
    mixp_max_backward_args back;
    mixp_gather_args gather;
    mixp_softmax_backward_args softmax;
    mixp_norm_backward_args norm;
    mixp_cross_entropy_backward_args entropy;
    memset(&max, 0, sizeof max);
    max.outer = max.n = max.inner = 1;
    max.a = real;
    max.y = to;
    CHECK_INT(k->max(x, &max), MIXP_ERR_ARGUMENT);          /* no index */
    max.a = whole;
    CHECK_INT(k->max(x, &max), MIXP_ERR_DTYPE);
    memset(&back, 0, sizeof back);
    back.outer = back.n = back.inner = 1;
    back.dy = whole;
    back.da = to;
    CHECK_INT(k->max_backward(x, &back), MIXP_ERR_DTYPE);
    back.dy = real;
    CHECK_INT(k->max_backward(x, &back), MIXP_ERR_ARGUMENT);    /* no index */
    memset(&gather, 0, sizeof gather);
    gather.outer = gather.n = gather.m = gather.inner = 1;
    gather.ids = index;
    gather.a = real;
    gather.y = to;
    CHECK_INT(k->gather_backward(x, &gather), MIXP_ERR_ARGUMENT);   /* must accumulate */
    memset(&softmax, 0, sizeof softmax);
    softmax.rows = softmax.cols = 1;
    softmax.dy = whole;
    softmax.y = real;
    softmax.da = to;
    CHECK_INT(k->softmax_backward(x, &softmax), MIXP_ERR_DTYPE);
    memset(&norm, 0, sizeof norm);
    norm.rows = norm.cols = 1;
    norm.dy = real;
    norm.a = whole;
    CHECK_INT(k->norm_backward(x, &norm), MIXP_ERR_DTYPE);
    memset(&entropy, 0, sizeof entropy);
    entropy.rows = entropy.cols = 1;
    entropy.dloss = real;
    entropy.logits = whole;
    entropy.targets = index;
    entropy.dlogits = to;
    CHECK_INT(k->cross_entropy_backward(x, &entropy), MIXP_ERR_DTYPE);
    entropy.logits = real;
    index[0] = 1;                                           /* of one class */
    CHECK_INT(k->cross_entropy_backward(x, &entropy), MIXP_ERR_ARGUMENT);
    CHECK(data[0] == 0.0f);
}

static void kernels_refuse(void) {
    mixp_context *ctx = context_of(NULL);
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *d = mixp_cpu_with((mixp_isa)isa);
        if (d) kernels_of(d->kernels, mixp_context_exec(ctx));
    }
    close_clean(ctx);
}

int main(void) {
    RUN(guard_tells_later);
    RUN(posts_that_fail);
    RUN(counts_arrive);
    RUN(writes_and_reads);
    RUN(nothing_to_replay);
    RUN(when_a_sample_is_due);
    RUN(shapes_that_no_operator_takes);
    RUN(settings_that_no_comparison_takes);
    RUN(rules_that_nobody_keeps);
    RUN(kernels_refuse);
    return test_report();
}
