/* test_buffers.c - what a step writes beside its weights: a skipped step leaves every byte of every
 * buffer, a repeated one counts once, and a write outside of steps stays.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The expected bytes are those that the test itself wrote, or plain C's arithmetic on them.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include <stdint.h>
#include <unistd.h>

enum { N = 6 };
static const int64_t six[1] = { N };

/* One parameter of 1 for each optimizer. A step's gradient is `grad`, times the scale: Inf skips. */
typedef struct rig {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt[2];
    mixp_tensor    *w[2], *buffer;
    int             warnings;
    char            warning[400];
} rig;

static void hear(const char *message, void *user) {
    rig *r = (rig *)user;
    r->warnings++;
    snprintf(r->warning, sizeof r->warning, "%s", message);
}

static void rig_open_with(rig *r, mixp_context_desc *d, const mixp_optimizer_desc *of, mixp_dtype dtype) {
    static const int64_t one[1] = { 1 };
    memset(r, 0, sizeof *r);
    d->on_warning = hear;
    d->user = r;
    r->ctx = mixp_context_new(d);
    r->scaler = mixp_scaler_new(r->ctx, NULL);
    for (int i = 0; i < 2; i++) {
        r->w[i] = mixp_param(r->ctx, i ? "b" : "a", MIXP_F32, 1, one);
        r->opt[i] = mixp_optimizer_new(r->ctx, of);
        mixp_fill(r->w[i], 1.0);
        mixp_optimizer_add(r->opt[i], r->w[i], NULL);
    }
    r->buffer = mixp_buffer(r->ctx, "state", dtype, 1, six);
    CHECK(r->buffer != NULL);
}

static void rig_open(rig *r, mixp_dtype dtype) {
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    sgd.lr = 0.25;
    rig_open_with(r, &d, &sgd, dtype);
}

static void rig_close(rig *r, int warnings) {
    const char *why = "";
    CHECK_INT(mixp_context_error(r->ctx, &why), MIXP_OK);
    if (*why) printf("  %s\n", why);
    CHECK_INT(r->warnings, warnings);
    if (r->warnings != warnings) printf("  %s\n", r->warning);
    mixp_context_free(r->ctx);
}

/* Writes the scaled gradient of parameter i. grad Inf: the step will be skipped. */
static void walk(rig *r, int i, float grad) {
    mixp_tensor *x = mixp_input(r->ctx, MIXP_F32, 1, (const int64_t[1]) { 1 }, &grad);
    mixp_tensor *loss = mixp_sum(r->ctx, mixp_mul(r->ctx, r->w[i], x), MIXP_ALL, 0);
    CHECK_INT(mixp_backward(r->ctx, mixp_scaler_scale(r->scaler, loss)), MIXP_OK);
}

static void begin(rig *r) {
    CHECK_INT(mixp_step_begin(r->ctx), MIXP_OK);
    mixp_zero_grad(r->opt[0]);
    mixp_zero_grad(r->opt[1]);
}

static void end(rig *r) {
    CHECK_INT(mixp_scaler_step(r->scaler, r->opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(r->scaler), MIXP_OK);
}

/* A whole step without a write. */
static void plain_step(rig *r, float grad) {
    begin(r);
    walk(r, 0, grad);
    end(r);
}

static void set(rig *r, const double *x) { CHECK_INT(mixp_write(r->buffer, x, MIXP_F64, N), MIXP_OK); }

static void is(const mixp_tensor *t, const double *want) {
    double got[N];
    CHECK_INT(mixp_read(t, got, MIXP_F64, N), MIXP_OK);
    for (int i = 0; i < N; i++) CHECK_NEAR(got[i], want[i], 0);
}

static const double first[N] = { 1, 2, 3, 4, 5, 6 }, second[N] = { 9, 8, 7, 6, 5, 4 };
static const double third[N] = { 0, 1, 0, 1, 0, 1 };

/* --- each way to write, each dtype --------------------------------------------------------------- */

enum { BY_WRITE, BY_COPY, BY_FILL, BY_INIT, BY_RESHAPE, BY_HAND, WAYS };

static void write_by(rig *r, int way) {
    const int64_t two[2] = { 2, N / 2 };
    mixp_tensor *t = r->buffer;
    int i;
    switch (way) {
    case BY_WRITE: set(r, second); break;
    case BY_COPY: {
        float x[N];
        for (i = 0; i < N; i++) x[i] = (float)second[i];
        CHECK_INT(mixp_copy(t, mixp_input(r->ctx, MIXP_F32, 1, six, x)), MIXP_OK);
        break;
    }
    case BY_FILL: CHECK_INT(mixp_fill(t, 3), MIXP_OK); break;
    case BY_INIT: CHECK_INT(mixp_init_uniform(t, 10, 100), MIXP_OK); break;
    case BY_RESHAPE:
        CHECK_INT(mixp_fill(mixp_reshape(r->ctx, t, 2, two), 2), MIXP_OK);
        break;
    default:
        CHECK_INT(mixp_buffer_save(t), MIXP_OK);
        memset(t->data, 0x3F, N * mixp_dtype_size(t->dtype));   /* finite in each dtype */
        mixp_tensor_touch(t);
    }
}

static void test_ways(void) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F64, MIXP_F16, MIXP_BF16, MIXP_I32, MIXP_I64,
                                         MIXP_U8 };
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (int way = 0; way < WAYS; way++) {
            unsigned char before[N * 8], after[N * 8];
            const size_t bytes = N * mixp_dtype_size(dtypes[d]);
            const int reshapes = dtypes[d] == MIXP_F32 || dtypes[d] == MIXP_F16;
            rig r;
            if (way == BY_RESHAPE && !reshapes) continue;   /* operators take floats of 16 and 32 bits */
            rig_open(&r, dtypes[d]);
            set(&r, first);
            memcpy(before, r.buffer->data, bytes);

            begin(&r);
            walk(&r, 0, INFINITY);
            write_by(&r, way);
            memcpy(after, r.buffer->data, bytes);
            CHECK(memcmp(before, after, bytes) != 0);       /* visible at once */
            end(&r);
            CHECK_INT(mixp_scaler_verdict(r.scaler).outcome, MIXP_STEP_SKIPPED);
            CHECK(memcmp(before, r.buffer->data, bytes) == 0);

            begin(&r);
            walk(&r, 0, 1);
            write_by(&r, way);
            memcpy(after, r.buffer->data, bytes);
            end(&r);
            CHECK_INT(mixp_scaler_verdict(r.scaler).outcome, MIXP_STEP_APPLIED);
            CHECK(memcmp(after, r.buffer->data, bytes) == 0);
            rig_close(&r, 0);
        }
}

/* What follows in the step reads the new values, and a second write of the step is undone too. */
static void test_two_writes(void) {
    const int64_t at[1] = { N };
    double want[N];
    rig r;
    rig_open(&r, MIXP_F32);
    set(&r, first);
    begin(&r);
    set(&r, second);
    MIXP_NO_GRAD(r.ctx) {
        mixp_tensor *sum = mixp_add(r.ctx, r.buffer, mixp_full(r.ctx, MIXP_F32, 1, at, 0));
        for (int i = 0; i < N; i++) want[i] = second[i];
        is(sum, want);
        CHECK_INT(mixp_copy(r.buffer, mixp_scale(r.ctx, sum, 2)), MIXP_OK);
    }
    for (int i = 0; i < N; i++) want[i] = 2 * second[i];
    is(r.buffer, want);
    walk(&r, 0, NAN);
    end(&r);
    is(r.buffer, first);
    rig_close(&r, 0);
}

/* --- where a window begins and ends ---------------------------------------------------------------- */

/* Micro-batches are one window: a skip undoes what all of them wrote. */
static void test_accumulation(void) {
    rig r;
    for (int bad = 0; bad < 3; bad++) {
        rig_open(&r, MIXP_F32);
        set(&r, first);
        for (int batch = 0; batch < 3; batch++) {
            CHECK_INT(mixp_step_begin(r.ctx), MIXP_OK);
            if (!batch) mixp_zero_grad(r.opt[0]);
            walk(&r, 0, batch == bad ? INFINITY : 1.0f);
            set(&r, batch == 1 ? third : second);
            is(r.buffer, batch == 1 ? third : second);
        }
        end(&r);
        is(r.buffer, first);
        plain_step(&r, 1);
        plain_step(&r, INFINITY);       /* without a write: nothing to restore */
        is(r.buffer, first);
        rig_close(&r, 0);
    }
}

/* Writes before the first step, between steps and in evaluations stay. */
static void test_outside(void) {
    rig r;
    rig_open(&r, MIXP_F32);
    set(&r, first);
    plain_step(&r, INFINITY);
    is(r.buffer, first);
    set(&r, second);                    /* after an update, as a teacher is written */
    plain_step(&r, INFINITY);
    is(r.buffer, second);
    mixp_eval_begin(r.ctx);
    set(&r, third);
    plain_step(&r, INFINITY);
    is(r.buffer, third);
    rig_close(&r, 0);
}

/* A step in which a call fails, and which no update ends, is undone as the next step begins, also the second time; of
 * micro-batches, what the failed one was the first to write. Without a failure the writes belong to the window. */
static void test_failed_step(void) {
    for (int kind = 0; kind < 4; kind++) {
        const int64_t two[1] = { 2 };
        float x[2] = { 1, 2 };
        rig r;
        rig_open(&r, MIXP_F32);
        mixp_tensor *other = mixp_buffer(r.ctx, "other", MIXP_F32, 1, six);
        set(&r, first);
        mixp_write(other, first, MIXP_F64, N);
        for (int batch = 0; batch < 2; batch++) {
            begin(&r);
            walk(&r, 0, 1);
            if (batch == 0 && kind == 1) set(&r, third);
            if (batch == 0 && kind == 1) continue;      /* the micro-batch before the failed one */
            set(&r, second);
            mixp_write(other, second, MIXP_F64, N);
            if (kind == 3) continue;
            CHECK(!mixp_add(r.ctx, r.buffer, mixp_input(r.ctx, MIXP_F32, 1, two, x)));
            if (kind == 2) CHECK(mixp_backward(r.ctx, NULL) != MIXP_OK);
            CHECK(mixp_context_error(r.ctx, NULL) != MIXP_OK);
            mixp_context_clear_error(r.ctx);
        }
        begin(&r);
        is(r.buffer, kind == 1 || kind == 3 ? second : first);
        is(other, kind == 3 ? second : first);
        walk(&r, 0, 1);
        mixp_write(other, third, MIXP_F64, N);
        end(&r);
        is(other, third);
        is(r.buffer, kind == 1 || kind == 3 ? second : first);
        begin(&r);
        walk(&r, 0, INFINITY);
        mixp_write(other, second, MIXP_F64, N);
        end(&r);
        is(other, third);
        rig_close(&r, 0);
    }
}

/* One scaler of two optimizers: a skip of either is a skip of the step. */
static void test_two_optimizers(void) {
    for (int bad = 0; bad < 3; bad++) {     /* 2: neither */
        rig r;
        rig_open(&r, MIXP_F32);
        set(&r, first);
        begin(&r);
        walk(&r, 0, bad == 0 ? INFINITY : 1.0f);
        walk(&r, 1, bad == 1 ? INFINITY : 1.0f);
        set(&r, second);
        CHECK_INT(mixp_scaler_step(r.scaler, r.opt[0]), MIXP_OK);
        CHECK_INT(mixp_scaler_step(r.scaler, r.opt[1]), MIXP_OK);
        CHECK_INT(mixp_scaler_update(r.scaler), MIXP_OK);
        is(r.buffer, bad < 2 ? first : second);
        rig_close(&r, 0);
    }
}

/* More optimizers than one launch of the kernel has flags. */
static void test_many_optimizers(void) {
    enum { MANY = 11 };
    for (int bad = 0; bad < MANY; bad++) {
        const int64_t one[1] = { 1 };
        mixp_optimizer *opt[MANY];
        mixp_tensor *w[MANY];
        rig r;
        rig_open(&r, MIXP_F32);
        set(&r, first);
        for (int i = 0; i < MANY; i++) {
            w[i] = mixp_param(r.ctx, "", MIXP_F32, 1, one);
            opt[i] = mixp_optimizer_new(r.ctx, NULL);
            mixp_optimizer_add(opt[i], w[i], NULL);
        }
        begin(&r);
        for (int i = 0; i < MANY; i++) {
            float g = i == bad ? INFINITY : 1.0f;
            mixp_tensor *x = mixp_input(r.ctx, MIXP_F32, 1, one, &g);
            mixp_tensor *loss = mixp_sum(r.ctx, mixp_mul(r.ctx, w[i], x), MIXP_ALL, 0);
            CHECK_INT(mixp_backward(r.ctx, mixp_scaler_scale(r.scaler, loss)), MIXP_OK);
            CHECK_INT(mixp_scaler_step(r.scaler, opt[i]), MIXP_OK);
        }
        set(&r, second);
        CHECK_INT(mixp_scaler_update(r.scaler), MIXP_OK);
        is(r.buffer, first);
        rig_close(&r, 0);
    }
}

/* Two scalers update in one step. The buffer is written before the first update, and perhaps again
 * between the two. */
static void test_two_scalers(void) {
    for (int bad = 0; bad < 3; bad++)
        for (int again = 0; again < 2; again++) {
            mixp_scaler *s[2];
            rig r;
            rig_open(&r, MIXP_F32);
            set(&r, first);
            s[0] = r.scaler;
            s[1] = mixp_scaler_new(r.ctx, NULL);
            begin(&r);
            set(&r, second);
            for (int i = 0; i < 2; i++) {
                r.scaler = s[i];
                walk(&r, i, bad == i ? INFINITY : 1.0f);
                CHECK_INT(mixp_scaler_step(s[i], r.opt[i]), MIXP_OK);
                CHECK_INT(mixp_scaler_update(s[i]), MIXP_OK);
                if (!i) is(r.buffer, bad == 0 ? first : second);
                if (!i && again) set(&r, third);
            }
            if (!again) is(r.buffer, bad < 2 ? first : second);
            else if (bad == 1) is(r.buffer, second);
            else is(r.buffer, third);
            rig_close(&r, 0);
        }
}

/* A spike skips a step whose gradients are finite, with a scaler and without one. Also a buffer that
 * the step made NaN is then restored, without a warning. */
static void spike(int scaled, int spoils) {
    const float bad[N] = { 1, 2, NAN, 4, 5, 6 };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_context_desc d;
    rig r;
    memset(&d, 0, sizeof d);
    sgd.spike.of = MIXP_SPIKE_NORM;
    sgd.spike.window = 4;
    sgd.spike.z = 3;
    rig_open_with(&r, &d, &sgd, MIXP_F32);
    for (int step = 0; step < 9; step++) {
        const float grad = step == 8 ? 1000.0f : 1.0f + 0.01f * (float)(step % 3);
        const float one = 1.0f;
        const int64_t shape[1] = { 1 };
        begin(&r);
        mixp_tensor *x = mixp_input(r.ctx, MIXP_F32, 1, shape, step == 8 ? &grad : &one);
        x = mixp_scale(r.ctx, x, step == 8 ? 1.0f : grad);
        mixp_tensor *loss = mixp_sum(r.ctx, mixp_mul(r.ctx, r.w[0], x), MIXP_ALL, 0);
        CHECK_INT(mixp_backward(r.ctx, scaled ? mixp_scaler_scale(r.scaler, loss) : loss), MIXP_OK);
        set(&r, step == 8 ? second : first);
        if (spoils && step == 8) mixp_copy(r.buffer, mixp_input(r.ctx, MIXP_F32, 1, six, bad));
        if (scaled) end(&r);
        else CHECK_INT(mixp_optimizer_step(r.opt[0]), MIXP_OK);
    }
    CHECK_INT(mixp_optimizer_verdict(r.opt[0]).reason, MIXP_SKIP_SPIKE_NORM);
    is(r.buffer, first);
    rig_close(&r, 0);
}

static void test_spikes(void) {
    spike(0, 0);
    spike(0, 1);
    spike(1, 0);
}

/* A disabled scaler and a step without a scaler apply Inf, as PyTorch does: the write stays. */
static void test_unscaled(void) {
    rig r;
    float inf = INFINITY;
    const int64_t one[1] = { 1 };
    rig_open(&r, MIXP_F32);
    set(&r, first);
    begin(&r);
    CHECK_INT(mixp_backward(r.ctx, mixp_sum(r.ctx, mixp_mul(r.ctx, r.w[0],
              mixp_input(r.ctx, MIXP_F32, 1, one, &inf)), MIXP_ALL, 0)), MIXP_OK);
    set(&r, second);
    CHECK_INT(mixp_optimizer_step(r.opt[0]), MIXP_OK);
    is(r.buffer, second);
    rig_close(&r, 0);
}

static void refused(mixp_context *ctx, int got_it, mixp_result code, const char *part) {
    const char *why = "";
    CHECK(!got_it);
    CHECK_INT(mixp_context_error(ctx, &why), code);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(ctx);
}

/* --- elements that a step makes Inf or NaN ------------------------------------------------------------ */

/* The step whose gradients are finite, and which writes x over the buffer: it must be skipped, with all
 * bytes of weights and buffer as before, and its verdict names the buffer, the element and the kind. */
static void spoils(rig *r, const float *x, int element, int is_nan) {
    unsigned char before[N * 8];
    const size_t bytes = N * mixp_dtype_size(r->buffer->dtype);
    const float w = *(const float *)r->w[0]->data, scale = mixp_scaler_loss_scale(r->scaler);
    memcpy(before, r->buffer->data, bytes);
    begin(r);
    walk(r, 0, 1);
    CHECK_INT(mixp_copy(r->buffer, mixp_input(r->ctx, MIXP_F32, 1, six, x)), MIXP_OK);
    end(r);
    mixp_verdict v = mixp_scaler_verdict(r->scaler);
    CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(v.reason, MIXP_SKIP_BUFFER);
    CHECK_INT(v.origin, MIXP_ORIGIN_NO_GUARD);
    CHECK_INT(v.bad_element, element);
    CHECK_INT(v.bad_is_nan, is_nan);
    CHECK_INT(v.loss_bad, 0);
    CHECK_TEXT(v.bad_tensor ? v.bad_tensor : "", "state");
    CHECK_NEAR(v.grad_norm, 1, 0);
    CHECK(memcmp(before, r->buffer->data, bytes) == 0);
    CHECK_NEAR(*(const float *)r->w[0]->data, w, 0);
    CHECK_NEAR(mixp_scaler_loss_scale(r->scaler), scale / 2, 0);
}

static void test_spoilt(void) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F64, MIXP_F16, MIXP_BF16 };
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        rig r;
        rig_open(&r, dtypes[d]);
        set(&r, first);
        for (int element = 0; element < N; element++)
            for (int kind = 0; kind < 3; kind++) {
                float x[N] = { 1, 1, 1, 1, 1, 1 };
                x[N - 1] = -INFINITY;           /* the first element counts */
                x[element] = kind == 0 ? INFINITY : kind == 1 ? -INFINITY : NAN;
                spoils(&r, x, element, kind == 2);
            }
        rig_close(&r, 0);
    }
}

/* What was Inf or NaN before may stay so; so may what the program writes itself; integers are not looked at. */
static void test_meant(void) {
    double start[N] = { -INFINITY, NAN, 1, INFINITY, 2, 3 };
    float next[N] = { INFINITY, -INFINITY, 5, NAN, 6, 7 };
    for (int way = 0; way < 5; way++) {
        rig r;
        rig_open(&r, way == 4 ? MIXP_I32 : MIXP_F32);
        set(&r, way ? first : start);
        begin(&r);
        walk(&r, 0, 1);
        if (way == 1) set(&r, start);
        else if (way == 2) CHECK_INT(mixp_fill(r.buffer, -INFINITY), MIXP_OK);
        else if (way == 3) {                    /* before the first read, and then as a running maximum */
            float x[N] = { 5, 5, 5, 5, 5, 5 };
            CHECK_INT(mixp_fill(r.buffer, -INFINITY), MIXP_OK);
            CHECK_INT(mixp_copy(r.buffer, mixp_input(r.ctx, MIXP_F32, 1, six, x)), MIXP_OK);
        } else if (way == 4) {                  /* the bits of Inf */
            int32_t x[N];
            for (int i = 0; i < N; i++) x[i] = 0x7F800000;
            CHECK_INT(mixp_copy(r.buffer, mixp_input(r.ctx, MIXP_I32, 1, six, x)), MIXP_OK);
        } else CHECK_INT(mixp_copy(r.buffer, mixp_input(r.ctx, MIXP_F32, 1, six, next)), MIXP_OK);
        end(&r);
        CHECK_INT(mixp_scaler_verdict(r.scaler).outcome, MIXP_STEP_APPLIED);
        if (way == 0) {
            spoils(&r, (float[N]) { INFINITY, 0, NAN, 0, 0, 0 }, 2, 1);
            spoils(&r, (float[N]) { 0, 0, 0, 0, 0, -INFINITY }, 5, 0);
        }
        rig_close(&r, 0);
    }
}

/* The bad element lies anywhere in a buffer of some length, written by the program's own code; many buffers. */
static void test_spoilt_anywhere(void) {
    enum { MOST = 1500, MANY = 19 };
    static const int lengths[] = { 1, 2, 3, 63, 64, 65, 127, 129, 1024, MOST };
    mixp_tensor *all[MANY];
    static float x[MOST];
    rig r;
    rig_open(&r, MIXP_F32);
    for (int i = 0; i < MANY; i++) {
        const int64_t length = i < 10 ? lengths[i] : 7 + i;
        char name[16];
        snprintf(name, sizeof name, "s%d", i);
        all[i] = mixp_buffer(r.ctx, name, i % 3 == 2 ? MIXP_BF16 : MIXP_F32, 1, &length);
    }
    mixp_scaler_update_to(r.scaler, 8e37f);     /* room for many skips */
    for (size_t n = 0; n < MANY; n++)
        for (int way = 0; way < 3; way++) {
            const int64_t count = all[n]->count, at = way == 0 ? 0 : way == 1 ? count - 1 : count / 2;
            begin(&r);
            walk(&r, 0, 0);
            for (int i = (int)n; i < MANY; i++) CHECK_INT(mixp_buffer_save(all[i]), MIXP_OK);
            for (int i = 0; i < MOST; i++) x[i] = (float)i;
            x[at] = way ? INFINITY : NAN;
            mixp_convert(all[n]->data, all[n]->dtype, x, MIXP_F32, count);
            if (n + 1 < MANY) memset(all[n + 1]->data, 0xFF, (size_t)all[n + 1]->count * 2);    /* a later one */
            end(&r);
            mixp_verdict v = mixp_scaler_verdict(r.scaler);
            CHECK_INT(v.reason, MIXP_SKIP_BUFFER);
            CHECK_TEXT(v.bad_tensor ? v.bad_tensor : "", all[n]->name);
            CHECK_INT(v.bad_element, at);
            CHECK_INT(v.bad_is_nan, !way);
            CHECK_INT(mixp_read(all[n], x, MIXP_F32, count), MIXP_OK);
            for (int i = 0; i < count; i++) CHECK_NEAR(x[i], 0, 0);
        }
    rig_close(&r, 0);
}

/* A micro-batch spoils the buffer, and a later one hides the write: only what the window leaves counts. Both
 * optimizers of a step are skipped. Of two scalers the first puts the buffer back, so the second applies. */
static void test_spoilt_windows(void) {
    float x[N] = { 1, 1, INFINITY, 1, 1, 1 };
    for (int bad = 0; bad < 2; bad++) {
        rig r;
        rig_open(&r, MIXP_F32);
        set(&r, first);
        for (int batch = 0; batch < 2; batch++) {
            CHECK_INT(mixp_step_begin(r.ctx), MIXP_OK);
            if (!batch) mixp_zero_grad(r.opt[0]);
            walk(&r, 0, 1);
            if (batch == bad) mixp_copy(r.buffer, mixp_input(r.ctx, MIXP_F32, 1, six, x));
            else set(&r, second);
        }
        end(&r);
        CHECK_INT(mixp_scaler_verdict(r.scaler).outcome, bad ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
        is(r.buffer, bad ? first : second);

        begin(&r);
        walk(&r, 0, 1);
        walk(&r, 1, 1);
        mixp_copy(r.buffer, mixp_input(r.ctx, MIXP_F32, 1, six, x));
        mixp_scaler_unscale(r.scaler, r.opt[0]);
        mixp_clip_grad_norm(r.opt[0], 0.5);
        CHECK_INT(mixp_scaler_step(r.scaler, r.opt[0]), MIXP_OK);
        CHECK_INT(mixp_scaler_step(r.scaler, r.opt[1]), MIXP_OK);
        CHECK_INT(mixp_scaler_update(r.scaler), MIXP_OK);
        for (int batch = 0; batch < 2; batch++)
            CHECK_INT(mixp_optimizer_verdict(r.opt[batch]).reason, MIXP_SKIP_BUFFER);
        is(r.buffer, bad ? first : second);
        rig_close(&r, 0);
    }
    {
        mixp_scaler *of[2];
        rig r;
        rig_open(&r, MIXP_F32);
        set(&r, first);
        of[0] = r.scaler;
        of[1] = mixp_scaler_new(r.ctx, NULL);
        begin(&r);
        for (int batch = 0; batch < 2; batch++) {
            r.scaler = of[batch];
            walk(&r, batch, 1);
            if (!batch) mixp_copy(r.buffer, mixp_input(r.ctx, MIXP_F32, 1, six, x));
            CHECK_INT(mixp_scaler_step(of[batch], r.opt[batch]), MIXP_OK);
            CHECK_INT(mixp_scaler_update(of[batch]), MIXP_OK);
            CHECK_INT(mixp_scaler_verdict(of[batch]).reason, batch ? MIXP_SKIP_NONE : MIXP_SKIP_BUFFER);
            is(r.buffer, first);
        }
        rig_close(&r, 0);
    }
}

/* Without a scaler the step is applied, as it is for gradients; a warning and the verdict name the element. */
static void test_spoilt_unscaled(void) {
    const int64_t one[1] = { 1 };
    float x[N] = { 1, 1, 1, 1, NAN, 1 }, g = 1;
    for (int disabled = 0; disabled < 2; disabled++) {
        mixp_scaler_desc off;
        rig r;
        rig_open(&r, MIXP_F32);
        memset(&off, 0, sizeof off);
        off.disabled = 1;
        if (disabled) r.scaler = mixp_scaler_new(r.ctx, &off);
        set(&r, first);
        begin(&r);
        CHECK_INT(mixp_backward(r.ctx, mixp_sum(r.ctx, mixp_mul(r.ctx, r.w[0],
                  mixp_input(r.ctx, MIXP_F32, 1, one, &g)), MIXP_ALL, 0)), MIXP_OK);
        mixp_copy(r.buffer, mixp_input(r.ctx, MIXP_F32, 1, six, x));
        if (disabled) end(&r);
        else CHECK_INT(mixp_optimizer_step(r.opt[0]), MIXP_OK);
        mixp_verdict v = mixp_optimizer_verdict(r.opt[0]);
        CHECK_INT(v.outcome, MIXP_STEP_APPLIED);
        CHECK_INT(v.reason, MIXP_SKIP_NONE);
        CHECK_TEXT(v.bad_tensor ? v.bad_tensor : "", "state");
        CHECK_INT(v.bad_element, 4);
        CHECK_TEXT(r.warning, "NaN at element 4 of the buffer 'state'");
        CHECK(((const float *)r.buffer->data)[4] != ((const float *)r.buffer->data)[4]);
        CHECK_NEAR(*(const float *)r.w[0]->data, 0.75, 0);
        rig_close(&r, 1);
    }
}

/* Skips that no scale cures end the run with an error that names the buffer. */
static void test_spoilt_for_ever(void) {
    float x[N] = { 1, 1, 1, INFINITY, 1, 1 };
    mixp_scaler_desc s;
    mixp_result last = MIXP_OK;
    rig r;
    rig_open(&r, MIXP_F32);
    memset(&s, 0, sizeof s);
    s.rule = MIXP_RULE_STATIC;
    s.init_scale = 1;
    s.max_floor_skips = 3;
    r.scaler = mixp_scaler_new(r.ctx, &s);
    set(&r, first);
    for (int i = 0; i < 3; i++) {
        begin(&r);
        walk(&r, 0, 1);
        mixp_copy(r.buffer, mixp_input(r.ctx, MIXP_F32, 1, six, x));
        CHECK_INT(mixp_scaler_step(r.scaler, r.opt[0]), MIXP_OK);
        last = mixp_scaler_update(r.scaler);
    }
    refused(r.ctx, last == MIXP_OK, MIXP_ERR_DIVERGED, "Inf of the buffer 'state' at element 3");
    is(r.buffer, first);
    rig_close(&r, 0);
}

/* --- retries ----------------------------------------------------------------------------------------- */

#ifndef MIXPREC_NO_WATCH
/* A counter in a buffer counts batches, not tries. */
static void test_retry_counts_once(void) {
    double count[N];
    float ones[N] = { 1, 1, 1, 1, 1, 1 };
    int step, tries = 0;
    rig r;
    rig_open(&r, MIXP_F32);
    mixp_scaler_update_to(r.scaler, 8.50705917e37f);    /* the first tries overflow */
    for (step = 0; step < 20; step++)
        do {
            begin(&r);
            walk(&r, 0, 1000);
            MIXP_NO_GRAD(r.ctx)
                mixp_copy(r.buffer, mixp_add(r.ctx, r.buffer,
                                             mixp_input(r.ctx, MIXP_F32, 1, six, ones)));
            end(&r);
            tries++;
        } while (mixp_retry(r.scaler, 100));
    CHECK(tries > 20);
    mixp_read(r.buffer, count, MIXP_F64, N);
    CHECK_NEAR(count[0], 20, 0);
    CHECK_NEAR(count[N - 1], 20, 0);
    rig_close(&r, 0);
}

/* A recurrent cell whose state is a buffer, and a batch that overflows f16 once. */
typedef struct cell {
    mixp_tensor *(*next)(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, mixp_tensor *const w[2]);
    mixp_tensor *(*read)(mixp_context *ctx, mixp_tensor *next);     /* the loss is the mean of this */
    float largest;          /* input of the batch that overflows */
    float init_scale;       /* 0 = the default */
} cell;

typedef struct course {
    double loss;            /* of the last step */
    float  scale;           /* after it */
    int    applied, forward;    /* number of steps applied; of skips for an overflow in the forward pass */
} course;

static course carry(const cell *c, int f16) {
    enum { B = 4, H = 8 };
    const int64_t square[2] = { H, H }, state[2] = { B, H };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w[2], *h = mixp_buffer(ctx, "h", MIXP_F32, 2, state), *loss = NULL;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_scaler_desc desc;
    unsigned random = 1;
    course end;
    memset(&end, 0, sizeof end);
    memset(&desc, 0, sizeof desc);
    desc.init_scale = c->init_scale;
    mixp_scaler *scaler = mixp_scaler_new(ctx, &desc);
    w[0] = mixp_param(ctx, "wx", MIXP_F32, 2, square);
    w[1] = mixp_param(ctx, "wh", MIXP_F32, 2, square);
    mixp_init_normal(w[0], 0, 0.3);
    mixp_init_normal(w[1], 0, 0.1);
    mixp_optimizer_add_all(opt, "w*");
    mixp_guard_start(ctx, NULL);
    for (int step = 0; step < 60; step++) {
        float x[B * H], held[B * H];
        for (int i = 0; i < B * H; i++) {
            random = random * 1664525u + 1013904223u;
            x[i] = (float)(random >> 8) / 16777216.0f * (step == 30 ? c->largest : 1.0f);
        }
        do {
            mixp_step_begin(ctx);
            mixp_zero_grad(opt);
            MIXP_AUTOCAST(ctx, f16 ? MIXP_F16 : MIXP_F32) {
                mixp_tensor *next = c->next(ctx, mixp_input(ctx, MIXP_F32, 2, state, x), h, w);
                loss = mixp_mean(ctx, c->read(ctx, next), MIXP_ALL, 0);
                mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
                mixp_copy(h, next);
            }
            mixp_scaler_step(scaler, opt);
            mixp_scaler_update(scaler);
            end.forward += mixp_scaler_verdict(scaler).origin == MIXP_ORIGIN_FORWARD;
        } while (mixp_retry(scaler, 5));
        end.applied += mixp_scaler_verdict(scaler).outcome == MIXP_STEP_APPLIED;
        mixp_read(h, held, MIXP_F32, B * H);
        for (int i = 0; i < B * H; i++) CHECK(held[i] - held[i] == 0.0f);
        end.loss = mixp_item(loss);
    }
    end.scale = mixp_scaler_loss_scale(scaler);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
    return end;
}

/* fp16 with a guard ends where f32 ends, and the state never holds Inf. */
static void carried(const cell *c, int lowers_scale) {
    const course f32 = carry(c, 0), f16 = carry(c, 1);
    CHECK_INT(f32.applied, 60);
    CHECK_INT(f16.applied, 60);
    CHECK_NEAR(f16.loss, f32.loss, 0.001);
    CHECK_INT(f32.forward, 0);
    CHECK(f16.forward > 0);
    if (!lowers_scale) CHECK_NEAR(f16.scale, f32.scale, 0);
}

static mixp_tensor *relu_next(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, mixp_tensor *const w[2]) {
    return mixp_relu(ctx, mixp_add(ctx, mixp_linear(ctx, x, w[0], NULL), mixp_linear(ctx, h, w[1], NULL)));
}
static mixp_tensor *relu_read(mixp_context *ctx, mixp_tensor *next)
{ return mixp_tanh(ctx, mixp_rms_norm(ctx, next, NULL, 1e-5f)); }
static void test_carried_state(void) {
    const cell c = { relu_next, relu_read, 90000.0f, 0.0f };
    carried(&c, 1);
}

/* Only tanh reads the state, so the step that overflows has a finite loss and finite gradients. */
static mixp_tensor *tanh_next(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, mixp_tensor *const w[2]) {
    mixp_tensor *in = mixp_mul(ctx, x, mixp_full(ctx, MIXP_F32, x->rank, x->shape, 2));
    return mixp_add(ctx, mixp_linear(ctx, mixp_tanh(ctx, h), w[1], NULL), mixp_linear(ctx, in, w[0], NULL));
}
static mixp_tensor *tanh_read(mixp_context *ctx, mixp_tensor *next) { return mixp_tanh(ctx, next); }
static void test_saturated_state(void) {
    const cell c = { tanh_next, tanh_read, 3e4f, 256.0f };
    carried(&c, 0);
}

/* An evaluation that mixp_retry_loss repeats starts from the state that it met. */
static void test_retry_loss(void) {
    float big[N] = { 6e4f, 6e4f, 6e4f, 6e4f, 6e4f, 6e4f };
    double count[N];
    mixp_tensor *loss = NULL, *one;
    int tries = 0;
    rig r;
    rig_open(&r, MIXP_F32);
    CHECK_INT(mixp_guard_start(r.ctx, NULL), MIXP_OK);
    plain_step(&r, 1);
    do {
        mixp_eval_begin(r.ctx);
        MIXP_NO_GRAD(r.ctx) MIXP_AUTOCAST(r.ctx, MIXP_F16) {
            mixp_tensor *x = mixp_cast(r.ctx, mixp_input(r.ctx, MIXP_F32, 1, six, big), MIXP_F16);
            loss = mixp_mean(r.ctx, mixp_add(r.ctx, x, x), MIXP_ALL, 0);
            one = mixp_full(r.ctx, MIXP_F32, 1, six, 1);
            mixp_copy(r.buffer, mixp_add(r.ctx, r.buffer, one));
        }
        tries++;
    } while (mixp_retry_loss(r.ctx, loss));
    CHECK_INT(tries, 2);
    mixp_read(r.buffer, count, MIXP_F64, N);
    CHECK_NEAR(count[0], 1, 0);
    rig_close(&r, 0);
}

/* So does one whose loss is finite and which spoils a buffer. */
static void test_retry_loss_spoilt(void) {
    float big[N] = { 6e4f, 6e4f, 6e4f, 6e4f, 6e4f, 6e4f };
    mixp_tensor *loss = NULL, *twice;
    double want[N];
    int tries = 0, i;
    rig r;
    rig_open(&r, MIXP_F32);
    CHECK_INT(mixp_guard_start(r.ctx, NULL), MIXP_OK);
    set(&r, first);
    plain_step(&r, 1);
    do {
        mixp_eval_begin(r.ctx);
        MIXP_NO_GRAD(r.ctx) MIXP_AUTOCAST(r.ctx, MIXP_F16) {
            mixp_tensor *x = mixp_cast(r.ctx, mixp_input(r.ctx, MIXP_F32, 1, six, big), MIXP_F16);
            twice = mixp_add(r.ctx, x, x);
            loss = mixp_mean(r.ctx, mixp_tanh(r.ctx, twice), MIXP_ALL, 0);
            mixp_copy(r.buffer, mixp_add(r.ctx, r.buffer, twice));
        }
        CHECK_NEAR(mixp_item(loss), 1, 0);
        tries++;
    } while (mixp_retry_loss(r.ctx, loss));
    CHECK_INT(tries, 2);
    mixp_read(r.buffer, want, MIXP_F64, N);
    for (i = 0; i < N; i++) CHECK_NEAR(want[i], first[i] + 2 * 60000.0, 0);     /* 6e4 is a number of f16 */
    rig_close(&r, 0);
}

/* --- mistakes ------------------------------------------------------------------------------------------ */

/* A frozen parameter that a repeated step reads and writes gets a warning; one that is only written
 * (a loss kept for later), or written after the update, does not. */
static void test_frozen_parameter(void) {
    for (int kind = 0; kind < 3; kind++) {
        rig r;
        rig_open(&r, MIXP_F32);
        mixp_tensor *h = mixp_param(r.ctx, "h", MIXP_F32, 1, six);
        mixp_tensor_set_requires_grad(h, 0);
        for (int step = 0; step < 3; step++)
            do {
                begin(&r);
                walk(&r, 0, 1);
                mixp_tensor *copy = kind == 1 ? mixp_full(r.ctx, MIXP_F32, 1, six, 1) : mixp_scale(r.ctx, h, 2);
                if (kind < 2) mixp_copy(h, copy);
                end(&r);
                if (kind == 2) mixp_copy(h, copy);
            } while (mixp_retry(r.scaler, 3));
        if (!kind) CHECK_TEXT(r.warning, "make 'h' with mixp_buffer");
        rig_close(&r, kind == 0);
    }
}
#endif

static void test_mistakes(void) {
    const int64_t bad[1] = { 0 };
    rig r;
    rig_open(&r, MIXP_F32);
    refused(r.ctx, mixp_buffer(r.ctx, "state", MIXP_F32, 1, six) != NULL, MIXP_ERR_ARGUMENT, "taken");
    refused(r.ctx, mixp_param(r.ctx, "state", MIXP_F32, 1, six) != NULL, MIXP_ERR_ARGUMENT, "taken");
    refused(r.ctx, mixp_buffer(r.ctx, "a", MIXP_F32, 1, six) != NULL, MIXP_ERR_ARGUMENT, "taken");
    refused(r.ctx, mixp_buffer(r.ctx, "x", MIXP_F8_E4M3, 1, six) != NULL, MIXP_ERR_DTYPE, "f8_e4m3");
    refused(r.ctx, mixp_buffer(r.ctx, "x", MIXP_F32, 1, bad) != NULL, MIXP_ERR_SHAPE, "at least 1");
    refused(r.ctx, mixp_optimizer_add(r.opt[0], r.buffer, NULL) == MIXP_OK, MIXP_ERR_ARGUMENT, "buffer");
    refused(r.ctx, mixp_tensor_set_requires_grad(r.buffer, 1) == MIXP_OK, MIXP_ERR_ARGUMENT, "buffer");
    refused(r.ctx, mixp_buffer_save(r.w[0]) == MIXP_OK, MIXP_ERR_ARGUMENT, "not a buffer");
    refused(r.ctx, mixp_buffer_set_ranks(r.w[0], MIXP_BUFFER_OWN) == MIXP_OK, MIXP_ERR_ARGUMENT,
            "not a buffer");
    refused(r.ctx, mixp_buffer_set_ranks(r.buffer, (mixp_buffer_ranks)7) == MIXP_OK,
            MIXP_ERR_ARGUMENT, "mixp_buffer_ranks");
    mixp_tensor *w = mixp_buffer(r.ctx, "counts", MIXP_I64, 1, six);
    refused(r.ctx, mixp_buffer_set_ranks(w, MIXP_BUFFER_MEAN) == MIXP_OK, MIXP_ERR_ARGUMENT, "mean");
    CHECK_INT(mixp_buffer_set_ranks(w, MIXP_BUFFER_RANK_0), MIXP_OK);
    CHECK(mixp_buffer(NULL, "x", MIXP_F32, 1, six) == NULL);
    CHECK_INT(mixp_buffer_save(NULL), MIXP_ERR_ARGUMENT);

    /* Lists: parameters and buffers apart, one set of names. */
    CHECK(mixp_context_find(r.ctx, "state") == r.buffer && mixp_context_find(r.ctx, "a") == r.w[0]);
    CHECK(mixp_context_buffer(r.ctx, 0) == r.buffer && mixp_context_buffer(r.ctx, 1) == w);
    CHECK(!mixp_context_buffer(r.ctx, 2) && !mixp_context_buffer(r.ctx, -1));
    CHECK(!mixp_context_buffer(NULL, 0) && !mixp_context_param(r.ctx, 2));
    set(&r, first);
    CHECK_INT(mixp_init_all(r.ctx, "*", mixp_fill, 5), MIXP_OK);
    is(r.buffer, first);
    rig_close(&r, 0);
}

/* The program's own code writes the buffer, and says so too late. */
static void test_touched_late(void) {
    rig r;
    rig_open(&r, MIXP_F32);
    mixp_tensor_touch(r.buffer);        /* before the first step: no window */
    plain_step(&r, 1);
    mixp_tensor_touch(r.buffer);
    CHECK_INT(r.warnings, 0);
    begin(&r);
    mixp_tensor_touch(r.buffer);
    CHECK_TEXT(mixp_context_warning(r.ctx), "mixp_buffer_save");
    mixp_context_free(r.ctx);
}

/* --- memory, devices, files -------------------------------------------------------------------------------- */

static int refuse;
static void *allocate(size_t bytes, void *user) { (void)user; return refuse ? NULL : malloc(bytes); }
static void release(void *p, void *user) { (void)user; free(p); }

/* No memory for the old bytes: the write fails, and changes nothing. */
static void test_memory_refused(void) {
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_context_desc d;
    rig r;
    for (int way = 0; way < 3; way++) {
        float zeros[N] = { 0, 0, 0, 0, 0, 0 };
        memset(&d, 0, sizeof d);
        d.allocate = allocate;
        d.release = release;
        rig_open_with(&r, &d, &sgd, MIXP_F32);
        set(&r, first);
        begin(&r);
        mixp_tensor *x = mixp_input(r.ctx, MIXP_F32, 1, six, zeros);
        uint64_t version = r.buffer->version;
        refuse = 1;
        mixp_result got = way == 0 ? mixp_copy(r.buffer, x) : way == 1 ? mixp_fill(r.buffer, 0)
                                                         : mixp_write(r.buffer, zeros, MIXP_F32, N);
        refuse = 0;
        CHECK_INT(got, MIXP_ERR_MEMORY);
        CHECK(r.buffer->version == version);
        is(r.buffer, first);
        mixp_context_clear_error(r.ctx);
        walk(&r, 0, INFINITY);
        CHECK_INT(mixp_copy(r.buffer, x), MIXP_OK);
        end(&r);
        is(r.buffer, first);
        mixp_context_free(r.ctx);
    }
}

/* After the first step with a write, none allocates. */
static void test_allocations(void) {
    int64_t made = 0;
    rig r;
    rig_open(&r, MIXP_F32);
    for (int step = 0; step < 10; step++) {
        begin(&r);
        walk(&r, 0, step % 3 ? 1.0f : INFINITY);
        set(&r, step % 2 ? first : second);
        end(&r);
        if (step == 1) made = mixp_context_memory(r.ctx).allocations;
    }
    CHECK_INT(mixp_context_memory(r.ctx).allocations, made);
    rig_close(&r, 0);
}

/* A device whose table lacks the kernel. */
static void test_without_kernel(void) {
    static mixp_kernels kernels;
    static mixp_device device;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_context_desc d;
    rig r;
    memset(&d, 0, sizeof d);
    device = *mixp_cpu();
    kernels = *device.kernels;
    kernels.restore = NULL;
    device.kernels = &kernels;
    d.device = &device;
    rig_open_with(&r, &d, &sgd, MIXP_F32);
    set(&r, first);
    begin(&r);
    walk(&r, 0, INFINITY);
    set(&r, second);
    end(&r);
    is(r.buffer, first);
    begin(&r);
    walk(&r, 0, 1);
    set(&r, second);
    end(&r);
    is(r.buffer, second);
    rig_close(&r, 0);
}

/* More buffers than one launch has parts. */
static void test_many_buffers(void) {
    enum { MANY = 40 };
    mixp_tensor *all[MANY];
    rig r;
    rig_open(&r, MIXP_F32);
    for (int i = 0; i < MANY; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%d", i);
        all[i] = mixp_buffer(r.ctx, name, MIXP_F32, 1, six);
        mixp_write(all[i], first, MIXP_F64, N);
    }
    begin(&r);
    walk(&r, 0, INFINITY);
    for (int i = 0; i < MANY; i += 1 + i % 2) mixp_write(all[i], second, MIXP_F64, N);
    end(&r);
    for (int i = 0; i < MANY; i++) is(all[i], first);
    rig_close(&r, 0);
}

#ifndef MIXPREC_NO_CHECKPOINT
static void test_checkpoint(void) {
    mixp_checkpoint what;
    mixp_optimizer *opts[1];
    mixp_weights_desc weights;
    const char *why;
    char path[64];
    rig a, b;
    snprintf(path, sizeof path, "/tmp/mixprec_buffers_%ld.st", (long)getpid());
    rig_open(&a, MIXP_I32);
    set(&a, first);
    plain_step(&a, 1);
    memset(&what, 0, sizeof what);
    what.ctx = a.ctx;
    what.scaler = a.scaler;
    opts[0] = a.opt[0];
    what.optimizers = opts;
    what.n_optimizers = 1;
    CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);

    /* A load gives the bytes back, and no window of before undoes it. */
    begin(&a);
    walk(&a, 0, INFINITY);
    set(&a, second);
    CHECK_INT(mixp_scaler_step(a.scaler, a.opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(a.scaler), MIXP_OK);
    set(&a, third);
    CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_OK);
    is(a.buffer, first);
    plain_step(&a, INFINITY);
    is(a.buffer, first);

    /* By its name among the weights, and left out by a pattern. */
    set(&a, third);
    memset(&weights, 0, sizeof weights);
    weights.pattern = "state";
    CHECK_INT(mixp_checkpoint_load_weights(path, a.ctx, &weights), MIXP_OK);
    is(a.buffer, first);
    set(&a, third);
    weights.pattern = "a";
    CHECK_INT(mixp_checkpoint_load_weights(path, a.ctx, &weights), MIXP_OK);
    is(a.buffer, third);

    /* Another dtype is another model. */
    rig_open(&b, MIXP_F32);
    set(&b, second);
    what.ctx = b.ctx;
    what.scaler = b.scaler;
    opts[0] = b.opt[0];
    CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_ERR_DTYPE);
    mixp_context_error(b.ctx, &why);
    CHECK_TEXT(why, "'state' is i32 [6], not f32 [6]");
    mixp_context_clear_error(b.ctx);
    is(b.buffer, second);

    /* A buffer that the file lacks. */
    mixp_context_free(b.ctx);
    rig_open(&b, MIXP_I32);
    CHECK(mixp_buffer(b.ctx, "more", MIXP_F32, 1, six) != NULL);
    what.ctx = b.ctx;
    what.scaler = b.scaler;
    opts[0] = b.opt[0];
    CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_ERR_SHAPE);
    mixp_context_error(b.ctx, &why);
    CHECK_TEXT(why, "'more' is missing");
    mixp_context_free(b.ctx);
    remove(path);
    mixp_context_free(a.ctx);
}
#endif

/* A program with gradients of its own begins no step: there is no backup of a buffer then, and what the program wrote
 * into it stays, NaN too. */
static void test_without_steps(void) {
    static const int64_t one[1] = { 1 };
    static float         w = 1.0f, g = 1.0f;
    rig     r;
    float   numbers[N];
    rig_open(&r, MIXP_F32);
    mixp_optimizer *opt = mixp_optimizer_new(r.ctx, NULL);
    CHECK_INT(mixp_optimizer_add(opt, mixp_view(r.ctx, "w", MIXP_F32, 1, one, &w), mixp_view(r.ctx, "g", MIXP_F32, 1, one, &g)),
              MIXP_OK);
    ((float *)r.buffer->data)[2] = NAN;
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK_INT(mixp_read(r.buffer, numbers, MIXP_F32, N), MIXP_OK);
    CHECK(w < 1.0f && numbers[2] != numbers[2]);
    mixp_context_free(r.ctx);
}

int main(void) {
    RUN(test_without_steps);
    RUN(test_ways);
    RUN(test_two_writes);
    RUN(test_accumulation);
    RUN(test_outside);
    RUN(test_failed_step);
    RUN(test_two_optimizers);
    RUN(test_many_optimizers);
    RUN(test_two_scalers);
    RUN(test_spikes);
    RUN(test_unscaled);
    RUN(test_spoilt);
    RUN(test_meant);
    RUN(test_spoilt_anywhere);
    RUN(test_spoilt_windows);
    RUN(test_spoilt_unscaled);
    RUN(test_spoilt_for_ever);
#ifndef MIXPREC_NO_WATCH
    RUN(test_retry_counts_once);
    RUN(test_carried_state);
    RUN(test_saturated_state);
    RUN(test_retry_loss);
    RUN(test_retry_loss_spoilt);
    RUN(test_frozen_parameter);
#endif
    RUN(test_mistakes);
    RUN(test_touched_late);
    RUN(test_memory_refused);
    RUN(test_allocations);
    RUN(test_without_kernel);
    RUN(test_many_buffers);
#ifndef MIXPREC_NO_CHECKPOINT
    RUN(test_checkpoint);
#endif
    return test_report();
}
