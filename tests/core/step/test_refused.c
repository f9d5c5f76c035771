/* test_refused.c - a training in which one request is refused, each in turn: host memory, device
 * memory, a kernel, a copy between them. The error is reported, nothing is lost or leaks, and the
 * next step runs as if there had been no refusal.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _XOPEN_SOURCE 700
#include <limits.h>
#include <unistd.h>
#include "mixprec.h"
#include "examples/compare.h"
#include "test.h"
#include "refusals.h"

static mixp_result far_wait(const mixp_exec *x) {
    (void)x;
    return refuses("wait") ? MIXP_ERR_DEVICE : MIXP_OK;
}

/* --- a training --------------------------------------------------------------------------------- */

enum { D = 64, VOCAB = 8, B = 2, T = 2, OPTIMIZERS = 3 };

typedef struct training {
    mixp_context   *ctx;
    mixp_tensor    *table, *w, *qkv, *gamma, *beta, *bias, *buffer;
    mixp_optimizer *opt[OPTIMIZERS];
    mixp_scaler    *scaler;
    mixp_checkpoint all;
    char            path[64];
    int             told;       /* a call returned an error */
} training;

static void hear(training *t, mixp_result r) { t->told |= r != MIXP_OK; }

static mixp_tensor *matrix(training *t, const char *name, mixp_dtype dtype, int64_t rows) {
    int64_t shape[2] = { 0, D };
    shape[0] = rows;
    mixp_tensor *p = rows ? mixp_param(t->ctx, name, dtype, 2, shape) : mixp_param(t->ctx, name, dtype, 1, shape + 1);
    if (p) hear(t, mixp_init_uniform(p, -0.2, 0.2));
    return p;
}

static void training_optimizers(training *t) {
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_optimizer_desc muon = mixp_muon_defaults();
    adamw.states.m = adamw.states.v = MIXP_MOMENT_8BIT;
    adamw.states.master = MIXP_MASTER_8BIT;
    adamw.spike.of = MIXP_SPIKE_BOTH;
    sgd.momentum = 0.9;
    t->opt[0] = mixp_optimizer_new(t->ctx, &adamw);
    t->opt[1] = mixp_optimizer_new(t->ctx, &sgd);
    t->opt[2] = mixp_optimizer_new(t->ctx, &muon);
    hear(t, mixp_optimizer_add(t->opt[0], t->w, NULL));
    hear(t, mixp_optimizer_add(t->opt[0], t->qkv, NULL));
    hear(t, mixp_optimizer_add(t->opt[1], t->gamma, NULL));
    hear(t, mixp_optimizer_add(t->opt[1], t->beta, NULL));
    hear(t, mixp_optimizer_add(t->opt[1], t->bias, NULL));
    hear(t, mixp_optimizer_add(t->opt[2], t->table, NULL));
}

static void training_make(training *t, int far) {
    static const int64_t buffer[2] = { 3, D };
    mixp_context_desc desc;
    mixp_guard_desc guard;
    memset(t, 0, sizeof *t);
    memset(&desc, 0, sizeof desc);
    memset(&guard, 0, sizeof guard);
    snprintf(t->path, sizeof t->path, "/tmp/mixprec_refused_%ld.st", (long)getpid());
    device_make(far);
    if (far) device.wait = far_wait;
    desc.device = &device;
    desc.allocate = host_allocate;
    desc.release = host_release;
    desc.threads = 1;
    t->ctx = mixp_context_new(&desc);
    t->table = matrix(t, "table", MIXP_F32, VOCAB);
    t->w = matrix(t, "w", MIXP_BF16, D);
    t->qkv = matrix(t, "qkv", MIXP_BF16, 3 * D);
    t->gamma = matrix(t, "gamma", MIXP_F32, 0);
    t->beta = matrix(t, "beta", MIXP_F32, 0);
    t->bias = matrix(t, "bias", MIXP_F16, 0);
    t->buffer = mixp_buffer(t->ctx, "buffer", MIXP_BF16, 2, buffer);
    t->scaler = mixp_scaler_new(t->ctx, NULL);
    training_optimizers(t);
    guard.every = 1;
    guard.max_sites = 64;
    hear(t, mixp_guard_start(t->ctx, &guard));
    t->all.ctx = t->ctx;
    t->all.scaler = t->scaler;
    t->all.optimizers = t->opt;
    t->all.n_optimizers = OPTIMIZERS;
}

/* One of every kind of operator that keeps something. */
static mixp_tensor *training_hidden(training *t) {
    static const int64_t shape[2] = { B, T };
    static const int32_t ids[B * T] = { 1, 5, 7, 0 };
    mixp_context *ctx = t->ctx;
    mixp_tensor *x = mixp_embedding(ctx, t->table, mixp_input(ctx, MIXP_I32, 2, shape, ids));
    mixp_tensor *sum = NULL, *h, *parts[2];
    x = mixp_dropout(ctx, x, 0.25f, 1);
    h = mixp_add_layer_norm(ctx, x, mixp_linear(ctx, x, t->w, t->bias), t->gamma, t->beta, 1e-5f, &sum);
    h = mixp_attention(ctx, mixp_linear(ctx, h, t->qkv, NULL), 2, 1, 0.0f);
    parts[0] = mixp_gelu(ctx, h);
    parts[1] = mixp_softmax(ctx, sum);
    return mixp_swiglu_packed(ctx, mixp_concat(ctx, 2, parts, 2));
}

/* Operators that the model above has no use for. */
static mixp_tensor *training_others(training *t) {
    static const int64_t heads[4] = { B, T, 2, D / 2 }, whole[3] = { B, T, D }, pick[3] = { B, T, 3 },
                         flat[2] = { B * T, D }, mask[3] = { B, T, 1 };
    static const int32_t places[B * T * 3] = { 0, 5, 9, 1, 1, 2, 63, 62, 0, 7, 8, 9 };
    mixp_context *ctx = t->ctx;
    mixp_tensor *h = training_hidden(t), *sum = NULL, *parts[2], *q;
    mixp_attention_desc how;
    mixp_rope_desc turn;
    memset(&how, 0, sizeof how);
    how.dropout = 0.25f;
    how.softcap = 5.0f;
    memset(&turn, 0, sizeof turn);
    turn.head_dim = D / 2;
    q = mixp_reshape(ctx, mixp_rope(ctx, h, &turn), 4, heads);
    q = mixp_reshape(ctx, mixp_attention_apply(ctx, q, q, q, &how), 3, whole);
    q = mixp_add_rms_norm(ctx, q, mixp_tanh(ctx, h), t->gamma, 1e-5f, &sum);
    sum = mixp_maximum(ctx, sum, mixp_exp(ctx, mixp_neg(ctx, h)));
    q = mixp_where(ctx, mixp_input(ctx, MIXP_I32, 3, mask, places), q, sum);
    q = mixp_transpose(ctx, mixp_reshape(ctx, q, 2, flat), 0, 1);
    q = mixp_reshape(ctx, mixp_transpose(ctx, q, 0, 1), 3, whole);
    parts[0] = parts[1] = NULL;
    hear(t, mixp_split(ctx, q, 2, 2, parts));
    q = mixp_div(ctx, mixp_sub(ctx, parts[0], parts[1]),
                 mixp_add(ctx, mixp_abs(ctx, parts[1]), mixp_exp(ctx, parts[0])));
    q = mixp_add(ctx, mixp_mean(ctx, mixp_log_softmax(ctx, q), -1, 1), mixp_sum(ctx, q, -1, 1));
    h = mixp_gather(ctx, h, 2, mixp_input(ctx, MIXP_I32, 3, pick, places));
    return mixp_add(ctx, mixp_smooth_l1(ctx, h, mixp_mul(ctx, h, q), 0.5f),
                    mixp_huber(ctx, h, mixp_sigmoid(ctx, h), 1.0f));
}

static mixp_tensor *training_loss(training *t, int kind) {
    static const int64_t shape[2] = { B, T };
    static const int32_t targets[B * T] = { 2, 3, 0, 7 };
    mixp_context *ctx = t->ctx;
    if (kind == 3) return training_others(t);
    mixp_tensor *h = training_hidden(t);
    if (kind == 0) return mixp_mean(ctx, mixp_mul(ctx, h, h), MIXP_ALL, 0);
    if (kind == 1)
        return mixp_linear_cross_entropy(ctx, h, t->table, mixp_input(ctx, MIXP_I32, 2, shape, targets),
                                         -1, 3);
    mixp_tensor *logits = mixp_linear(ctx, h, t->table, NULL);
    if (kind == 2) return mixp_mean(ctx, mixp_max(ctx, logits, -1, 0), MIXP_ALL, 0);
    return mixp_cross_entropy(ctx, logits, mixp_input(ctx, MIXP_I32, 2, shape, targets), -1);
}

static mixp_tensor *compared(mixp_context *ctx, void *user) {
    training *t = (training *)user;
    (void)ctx;
    mixp_tensor *h = mixp_linear(t->ctx, t->table, t->w, t->bias);
    return mixp_mean(t->ctx, mixp_mul(t->ctx, h, h), MIXP_ALL, 0);
}

static void training_step(training *t, int kind, int careful) {
    mixp_autocast region = { MIXP_F16, 2, NULL };
    hear(t, mixp_step_begin(t->ctx));
    const int opened = mixp_autocast_open_with(t->ctx, &region);
    hear(t, opened < 0 ? MIXP_ERR_MEMORY : MIXP_OK);
    mixp_tensor *loss = training_loss(t, kind);
    mixp_autocast_close(t->ctx, opened);
    hear(t, mixp_optimizer_set_loss(t->opt[0], loss));
    hear(t, mixp_backward(t->ctx, mixp_scaler_scale(t->scaler, loss)));
    hear(t, mixp_fill(t->buffer, kind));
    for (int o = 0; o < OPTIMIZERS; o++) {
        if (careful) hear(t, mixp_scaler_unscale(t->scaler, t->opt[o]));
        if (careful) hear(t, mixp_clip_grad_norm(t->opt[o], 0.5));
        hear(t, mixp_scaler_step(t->scaler, t->opt[o]));
    }
    hear(t, mixp_scaler_update(t->scaler));
    for (int o = 0; o < OPTIMIZERS; o++) hear(t, mixp_zero_grad(t->opt[o]));
}

static void training_all(training *t) {
    mixp_compare_desc compare;
    mixp_difference rows[8];
    mixp_underflow underflow;
    int64_t n = 0;
    training_step(t, 0, 0);
    hear(t, mixp_optimizer_sample(t->opt[1]));
    training_step(t, 1, 1);
    training_step(t, 3, 0);
    training_step(t, 4, 0);
    mixp_optimizer_underflow(t->opt[1], 0, &underflow);
    hear(t, mixp_scaler_update_to(t->scaler, 8e37f));   /* too much: skipped, and tried again */
    training_step(t, 2, 0);
    if (mixp_retry(t->scaler, 1)) training_step(t, 2, 0);
    mixp_scaler_verdict(t->scaler);
    hear(t, mixp_scaler_update_to(t->scaler, 1024.0f));
    memset(&compare, 0, sizeof compare);
    compare.a.dtype = MIXP_F16;
    compare.a.level = 1;
    compare.b.dtype = MIXP_F32;
    compare.fn = compared;
    compare.user = t;
    hear(t, mixp_compare(t->ctx, &compare, rows, 8, &n));
    hear(t, mixp_checkpoint_save(t->path, &t->all));
    hear(t, mixp_checkpoint_load(t->path, &t->all));
}

/* --- what must hold ------------------------------------------------------------------------------ */

/* Was everything made? */
static int training_is_whole(const training *t) {
    const mixp_checkpoint *all = &t->all;
    return all->ctx && t->table && t->w && t->qkv && t->gamma && t->beta && t->bias && t->buffer &&
           t->scaler && t->opt[0] && t->opt[1] && t->opt[2];
}

/* A run of it with requests from `from` on refused, `most` of them; 0: there were not so many. */
static int run_refused(int far, long from, long most) {
    training t;
    memset(&requests, 0, sizeof requests);
    requests.refuse = from;
    requests.most = most;
    training_make(&t, far);
    if (t.ctx && mixp_context_error(t.ctx, NULL) == MIXP_OK) training_all(&t);
    int hit = requests.refused > 0;
    requests.refuse = -1;
    /* Whoever asks the context alone hears of it, too. */
    if (hit && t.ctx && mixp_context_error(t.ctx, NULL) == MIXP_OK) {
        CHECK(hit == 0);
        TEST_SHOW("request %ld, %s: nobody was told", from, requests.what);
    }
    if (!hit) {
        const char *why = "";
        mixp_context_error(t.ctx, &why);
        CHECK(t.ctx && !t.told && !why[0]);
        if (why[0]) TEST_SHOW("%s", why);
    }
    mixp_context_clear_error(t.ctx);
    if (training_is_whole(&t)) training_step(&t, 1, 0);     /* however it ends: no crash */
    mixp_context_free(t.ctx);
    CHECK_INT(requests.alive, 0);
    remove(t.path);
    return hit;
}

static void each_once(int far, long most) {
    long k = 0, step = test_later() ? 17 : getenv("MIXPREC_TEST_QUICK") ? 7 : 1;
    while (run_refused(far, k, most)) k += step;
    CHECK(k > 300);
    printf("  %ld requests\n", requests.made);
}

static void one_on_the_host(void)      { each_once(0, 1); }
static void all_after_it_on_the_host(void) { each_once(0, LONG_MAX); }
static void one_on_a_device(void)      { each_once(1, 1); }
static void all_after_it_on_a_device(void) { each_once(1, LONG_MAX); }

int main(void) {
    (void)profile_begin, (void)profile_end, (void)profile_print, (void)profile_device;    /* not used */
    RUN(one_on_the_host);
    RUN(all_after_it_on_the_host);
    RUN(one_on_a_device);
    RUN(all_after_it_on_a_device);
    return test_report();
}
