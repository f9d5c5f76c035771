/* test_borders.c - calls at the limit of what is allowed: saves that must not depend on earlier
 * saves, names that a terminal would interpret, the maximum of open regions, kernels that fail
 * once, callbacks that change the data a walk works on.
 * SPDX-License-Identifier: MIT OR Unlicense */
#define _POSIX_C_SOURCE 200809L
#include <unistd.h>
#include "mixprec.h"
#include "examples/ops.h"
#include "comma.h"
#include "test.h"
#include "new_optimizer.h"

static const int64_t four[1] = { 4 };
static const float   values[4] = { 1, -2, 0.5f, 3 };

static char file[64];

static void clear(mixp_context *ctx, mixp_result code, const char *part) {
    const char *why;
    CHECK_INT(mixp_context_error(ctx, &why), code);
    CHECK_TEXT(why, part);
    mixp_context_clear_error(ctx);
}

static void quiet(mixp_context *ctx) {
    const char *why;
    mixp_result code = mixp_context_error(ctx, &why);
    CHECK_INT(code, MIXP_OK);
    if (code != MIXP_OK) printf("  %s\n", why);
}

/* --- views in checkpoints ------------------------------------------------------------------- */

/* A parameter with an optimizer, a view with another. */
typedef struct two {
    mixp_context   *ctx;
    mixp_tensor    *p, *view;
    mixp_optimizer *opt[2];
    float           memory[4];
} two;

static void two_new(two *m, const char *name) {
    memset(m, 0, sizeof *m);
    memcpy(m->memory, values, sizeof values);
    m->ctx = mixp_context_new(NULL);
    m->p = mixp_param(m->ctx, "p", MIXP_F32, 1, four);
    m->view = mixp_view(m->ctx, name, MIXP_F32, 1, four, m->memory);
    mixp_tensor_set_requires_grad(m->view, 1);
    for (int i = 0; i < 2; i++) {
        m->opt[i] = new_sgd(m->ctx);
        CHECK_INT(mixp_optimizer_add(m->opt[i], i ? m->view : m->p, NULL), MIXP_OK);
    }
}

static mixp_checkpoint what_of(const two *m, int optimizers) {
    mixp_checkpoint what;
    memset(&what, 0, sizeof what);
    what.ctx = m->ctx;
    what.optimizers = m->opt;
    what.n_optimizers = optimizers;
    return what;
}

static int64_t entries(const char *path) {
    mixp_safetensors *f = NULL;
    int64_t           n = -1;
    if (mixp_safetensors_read(path, &f, NULL, 0) == MIXP_OK) n = mixp_safetensors_count(f);
    mixp_safetensors_free(f);
    return n;
}

/* What a save holds is no matter of the saves before it: another program could not load it. */
static void a_save_is_as_those_before_it(void) {
    two             m, other;
    two_new(&m, "view");
    mixp_checkpoint one = what_of(&m, 1);
    mixp_checkpoint both = what_of(&m, 2);
    CHECK_INT(mixp_checkpoint_save(file, &one), MIXP_OK);
    int64_t before = entries(file);
    CHECK_INT(mixp_checkpoint_save(file, &both), MIXP_OK);
    CHECK_INT(mixp_checkpoint_save(file, &one), MIXP_OK);
    CHECK_INT(entries(file), before);
    two_new(&other, "view");
    memset(other.memory, 0, sizeof other.memory);
    mixp_checkpoint there = what_of(&other, 1);
    CHECK_INT(mixp_checkpoint_load(file, &there), MIXP_OK);
    quiet(other.ctx);
    CHECK(memcmp(other.memory, values, sizeof values) == 0);    /* a view that an optimizer trains */
    mixp_context_free(m.ctx);
    mixp_context_free(other.ctx);
}

/* The second optimizer's view has no name: that call is refused, and no later one. */
static void a_refused_save_changes_nothing(void) {
    two             m;
    float           memory[4] = { 0 };
    two_new(&m, "view");
    mixp_tensor *loose = mixp_view(m.ctx, "", MIXP_F32, 1, four, memory);
    mixp_tensor_set_requires_grad(loose, 1);
    mixp_checkpoint none = what_of(&m, 2);
    CHECK_INT(mixp_checkpoint_save(file, &none), MIXP_OK);
    {
        mixp_optimizer *third = new_sgd(m.ctx);
        CHECK_INT(mixp_optimizer_add(third, loose, NULL), MIXP_OK);
        CHECK_INT(mixp_checkpoint_save(file, &none), MIXP_ERR_ARGUMENT);
        clear(m.ctx, MIXP_ERR_ARGUMENT, "a parameter has no name");
        CHECK_INT(mixp_optimizer_free(third), MIXP_OK);
    }
    CHECK_INT(mixp_checkpoint_save(file, &none), MIXP_OK);
    quiet(m.ctx);
    mixp_context_free(m.ctx);
}

/* Weights alone: of views those that an optimizer trains, while it does. */
static void weights_go_to_trained_views(void) {
    two             m, other;
    two_new(&m, "view");
    mixp_checkpoint both = what_of(&m, 2);
    CHECK_INT(mixp_checkpoint_save(file, &both), MIXP_OK);
    two_new(&other, "view");
    memset(other.memory, 0, sizeof other.memory);
    CHECK_INT(mixp_checkpoint_load_weights(file, other.ctx, NULL), MIXP_OK);
    quiet(other.ctx);
    CHECK(memcmp(other.memory, values, sizeof values) == 0);
    mixp_context_free(other.ctx);
    two_new(&other, "");
    CHECK_INT(mixp_checkpoint_load_weights(file, other.ctx, NULL), MIXP_ERR_ARGUMENT);
    clear(other.ctx, MIXP_ERR_ARGUMENT, "a parameter has no name");
    CHECK_INT(mixp_optimizer_free(other.opt[1]), MIXP_OK);      /* then it is none of the weights */
    CHECK_INT(mixp_checkpoint_load_weights(file, other.ctx, NULL), MIXP_ERR_SHAPE);
    clear(other.ctx, MIXP_ERR_SHAPE, "'view' is in the file only");
    mixp_context_free(other.ctx);
    mixp_context_free(m.ctx);
}

/* --- names of files ------------------------------------------------------------------------- */

/* U+009B begins what ESC [ does; all others, U+00A0 among them, are letters. */
static void no_control_character_of_a_name_is_told(void) {
    static const char *const names[] = { "a\xC2\x9B" "31m", "b\x1B[31m", "c\x7F", "d\xC2\x80", "e\xC2\x9F" };
    mixp_context *ctx = mixp_context_new(NULL);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        mixp_st_entry e;
        const char   *why, *p;
        memset(&e, 0, sizeof e);
        e.name = names[i];
        e.dtype = MIXP_F32;
        e.rank = 1;
        e.shape[0] = 4;
        e.data = values;
        e.bytes = sizeof values;
        CHECK_INT(mixp_safetensors_write(file, &e, 1, NULL, 0, NULL, 0), MIXP_OK);
        CHECK_INT(mixp_checkpoint_load_weights(file, ctx, NULL), MIXP_ERR_SHAPE);
        mixp_context_error(ctx, &why);
        for (p = why; *p; p++)
            CHECK((unsigned char)*p >= 32 && *p != 0x7F &&
                  !((unsigned char)p[0] == 0xC2 && (unsigned char)p[1] < 0xA0));
        CHECK(strchr(why, names[i][0]) != NULL);
        clear(ctx, MIXP_ERR_SHAPE, "in the file only");
    }
    mixp_context_free(ctx);
}

/* Messages of the context: names of parameters, texts of the program's operators, warnings. */
static void no_control_character_is_told(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    const char   *why;
    CHECK(mixp_param(ctx, "a\x1B]0;b\a\xC2\x9B\x7F" "c\nd", MIXP_I32, 0, NULL) == NULL);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "a?]0;b????c d");
    mixp_context_clear_error(ctx);
    mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "two\nlines\tof \xC3\xA4");
    mixp_context_error(ctx, &why);
    CHECK(strcmp(why, "two lines of \xC3\xA4") == 0);
    mixp_context_free(ctx);
}

/* Numbers of messages have a point where the program's locale has a comma. Names keep their commas
 * beside letters. */
static void points_in_each_locale(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_adamw_defaults();
    mixp_event event;
    char text[400];
    const char *why;
    if (!comma_begin()) {
        mixp_context_free(ctx);
        SKIP(COMMA_SKIP);
    }
    mixp_clip_grad_norm(mixp_optimizer_new(ctx, &d), -1.5);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "max_norm -1.5 must");
    mixp_context_clear_error(ctx);
    mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "'a,b' is [%d, %d], %g of %.3f, not %.0f", 2, 3, 1e-5, 12.25, 7.0);
    mixp_context_error(ctx, &why);
    CHECK(strcmp(why, "'a,b' is [2, 3], 1e-05 of 12.250, not 7") == 0);
    memset(&event, 0, sizeof event);
    event.kind = MIXP_EVENT_HIGH;
    event.site = "h.3: linear";
    event.dtype = MIXP_F32;
    event.largest = 40000.5f;
    CHECK_TEXT(mixp_event_text(&event, text, sizeof text), "largest 40000.5");
    comma_end();
    mixp_context_free(ctx);
}

static void letters_of_a_name_are_told(void) {
    static const char name[] = "\xC2\xA0\xC3\x9F\xE2\x80\x9B";
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_st_entry e;
    memset(&e, 0, sizeof e);
    e.name = name;
    e.dtype = MIXP_U8;
    e.rank = 1;
    e.shape[0] = 16;
    e.data = values;
    e.bytes = 16;
    CHECK_INT(mixp_safetensors_write(file, &e, 1, NULL, 0, NULL, 0), MIXP_OK);
    CHECK_INT(mixp_checkpoint_load_weights(file, ctx, NULL), MIXP_ERR_SHAPE);
    clear(ctx, MIXP_ERR_SHAPE, name);
    mixp_context_free(ctx);
}

/* --- regions -------------------------------------------------------------------------------- */

/* 64 may be open: a walk has a region of its own besides, in which its operators record nothing. */
static mixp_tensor *seen;

static mixp_result watch_infer(mixp_call *c)
{ return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape); }
static mixp_result watch_forward(mixp_call *c) {
    memcpy(c->out->data, c->in[0]->data, (size_t)c->out->count * sizeof(float));
    return MIXP_OK;
}
static mixp_result watch_backward(mixp_call *c) {
    mixp_out dx = mixp_call_dx(c, 0);
    seen = mixp_scale(c->ctx, c->in[0], 2);
    if (dx.data) memcpy(dx.data, mixp_call_dy(c).data, (size_t)c->out->count * sizeof(float));
    return MIXP_OK;
}
static const mixp_op watch_op = { "watch", MIXP_CLASS_KEEP, 0, watch_infer, watch_forward, watch_backward, NULL };

static void a_walk_within_as_many_regions_as_may_be(void) {
    for (int open = 62; open <= 64; open++) {
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_tensor  *p = mixp_param(ctx, "p", MIXP_F32, 1, four), *in[1], *loss;
        mixp_autocast region = { MIXP_F16, 1, NULL };
        in[0] = p;
        mixp_step_begin(ctx);
        for (int i = 0; i < open; i++) CHECK_INT(mixp_autocast_open_with(ctx, &region), i);
        loss = mixp_sum(ctx, mixp_apply(ctx, &watch_op, 1, in, 1, NULL), MIXP_ALL, 0);
        CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
        quiet(ctx);
        CHECK(seen != NULL);
        CHECK_INT(mixp_backward(ctx, seen ? mixp_sum(ctx, seen, MIXP_ALL, 0) : NULL), MIXP_ERR_ORDER);
        clear(ctx, MIXP_ERR_ORDER, "nothing was recorded");
        CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F16);
        mixp_autocast_close(ctx, 0);
        CHECK_INT(mixp_autocast_current(ctx).level, 0);
        mixp_context_free(ctx);
    }
}

/* One more than may be is refused, and left as it was opened. */
static void a_region_too_many_is_left_all_the_same(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_autocast region = { MIXP_BF16, 2, NULL };
    for (int i = 0; i < 64; i++) CHECK_INT(mixp_autocast_open_with(ctx, &region), i);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        MIXP_NO_GRAD(ctx) {
            CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_BF16);
            CHECK_INT(mixp_autocast_current(ctx).level, 2);
        }
    }
    clear(ctx, MIXP_ERR_ARGUMENT, "too many nested regions");
    CHECK_INT(mixp_autocast_open_with(ctx, &region), -1);
    clear(ctx, MIXP_ERR_ARGUMENT, "too many nested regions");
    mixp_autocast_close(ctx, 1);
    CHECK_INT(mixp_autocast_current(ctx).level, 2);
    mixp_autocast_close(ctx, 0);
    CHECK_INT(mixp_autocast_current(ctx).level, 0);
    mixp_context_free(ctx);
}

/* on_error may close what is open: then a refused region has nothing to take back. */
static mixp_context *closing;

static void close_all(mixp_result code, const char *message, void *user) {
    (void)code; (void)message; (void)user;
    mixp_context_clear_error(closing);
    mixp_autocast_close(closing, 0);
}

static void a_refused_region_that_is_closed_at_once(void) {
    mixp_context_desc d;
    mixp_autocast     region = { MIXP_I32, 1, NULL };
    memset(&d, 0, sizeof d);
    d.on_error = close_all;
    closing = mixp_context_new(&d);
    for (int i = 0; i < 3; i++) CHECK_INT(mixp_autocast_open_with(closing, &region), -1);
    CHECK_INT(mixp_autocast_open(closing, MIXP_F16), 0);
    CHECK_INT(mixp_autocast_current(closing).dtype, MIXP_F16);
    mixp_autocast_close(closing, 0);
    for (int i = 0; i < 64; i++) CHECK_INT(mixp_scope_open(closing, "s"), i);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(mixp_scope_open(closing, "s"), i - 1);
        CHECK_INT(mixp_autocast_current(closing).level, 0);
    }
    CHECK_INT(mixp_autocast_open(closing, MIXP_F16), 2);
    mixp_context_free(closing);
}

/* --- what an earlier step left --------------------------------------------------------------- */

/* Each is refused, however much of this step has been made. */
static void a_tensor_that_is_recycled_by_and_by(void) {
    enum { OLD = 12 };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor  *p = mixp_param(ctx, "p", MIXP_F32, 1, four), *old[OLD], *y;
    float         x[4];
    mixp_step_begin(ctx);
    for (int i = 0; i < OLD; i++) CHECK((old[i] = mixp_activation(ctx, MIXP_F32, 1, four)) != NULL);
    mixp_step_begin(ctx);
    for (int n = 0; n < 16; n++) {
        y = n % 3 ? mixp_relu(ctx, p) : mixp_cast(ctx, p, MIXP_F16);
        CHECK(y != NULL);
        for (int i = 0; i < OLD; i++) {
            CHECK(old[i] != y);
            CHECK_INT(mixp_fill(old[i], 1), MIXP_ERR_ORDER);
            CHECK_INT(mixp_read(old[i], x, MIXP_F32, 4), MIXP_ERR_ORDER);
            mixp_tensor_set_disposable(old[i], 1);
            mixp_context_clear_error(ctx);
        }
    }
    mixp_context_free(ctx);
}

/* The gradient of an activation is gone once its operator was walked. */
static mixp_tensor *taken;
static mixp_result taker_infer(mixp_call *c) { return mixp_call_output(c, MIXP_F32, 1, four); }
static mixp_result taker_forward(mixp_call *c) {
    return mixp_convert(c->out->data, MIXP_F32, c->in[0]->data, MIXP_F32, 4);
}
static mixp_result taker_backward(mixp_call *c) {
    taken = c->out->grad;
    return mixp_convert(mixp_call_dx(c, 0).data, MIXP_F32, taken->data, MIXP_F32, 4);
}

static void a_gradient_that_was_given_back(void) {
    static const mixp_op op = { "taker", MIXP_CLASS_F32, 0, taker_infer, taker_forward,
                                taker_backward, NULL };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor  *p = mixp_param(ctx, "p", MIXP_F32, 1, four), *y;
    float         x[4];
    mixp_step_begin(ctx);
    y = mixp_apply(ctx, &op, 1, &p, 1, NULL);
    CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, mixp_mul(ctx, y, y), MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(taken, x, MIXP_F32, 4), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_fill(taken, 1.0), MIXP_ERR_ARGUMENT);
    CHECK(!mixp_relu(ctx, taken));
    clear(ctx, MIXP_ERR_ORDER, "input 0 is not a tensor");
    mixp_context_free(ctx);
}

/* --- a kernel that fails once ---------------------------------------------------------------- */

static mixp_kernels kernels;
static mixp_device  device;
static int          fail_convert;

static mixp_result convert_or_not(const mixp_exec *x, const mixp_convert_args *k) {
    if (fail_convert && fail_convert-- == 1) return MIXP_ERR_DEVICE;
    return mixp_cpu()->kernels->convert(x, k);
}

/* A parameter's, and a view's, whose numbers nobody wrote by a call. */
static void a_cast_that_failed_is_made_again(void) {
    mixp_context_desc d;
    device = *mixp_cpu();
    kernels = *device.kernels;
    kernels.convert = convert_or_not;
    device.kernels = &kernels;
    memset(&d, 0, sizeof d);
    d.device = &device;
    mixp_context *ctx = mixp_context_new(&d);
    for (int i = 0; i < 2; i++) {
        float        data[4], got[4] = { 0 };
        mixp_tensor *low, *p = i ? mixp_view(ctx, "v", MIXP_F32, 1, four, data)
                                 : mixp_param(ctx, "p", MIXP_F32, 1, four);
        memcpy(data, values, sizeof data);
        if (!i) CHECK_INT(mixp_write(p, values, MIXP_F32, 4), MIXP_OK);
        fail_convert = 1;
        CHECK(!mixp_tensor_low(p, MIXP_BF16));
        clear(ctx, MIXP_ERR_DEVICE, "convert");
        low = mixp_tensor_low(p, MIXP_BF16);
        CHECK(low != NULL);
        if (low) CHECK_INT(mixp_read(low, got, MIXP_F32, 4), MIXP_OK);
        CHECK(memcmp(got, values, sizeof values) == 0);
    }
    mixp_context_free(ctx);
}

/* A step on `device` that fails once, by *failure, and changes nothing: the next one is whole, and takes
 * over what was written by hand before both. */
static void steps_when_tried_again(mixp_dtype dtype, int *failure) {
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_context_desc d;
    float           got[4];
    memset(&d, 0, sizeof d);
    d.device = &device;
    mixp_context *ctx = mixp_context_new(&d);
    sgd.lr = 1;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    mixp_tensor *p = mixp_param(ctx, "p", dtype, 1, four);
    CHECK_INT(mixp_optimizer_add(opt, p, NULL), MIXP_OK);
    CHECK_INT(mixp_write(p, values, MIXP_F32, 4), MIXP_OK);
    mixp_step_begin(ctx);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, p, MIXP_ALL, 0)), MIXP_OK);
    *failure = 1;
    CHECK_INT(mixp_optimizer_step(opt), MIXP_ERR_DEVICE);
    CHECK_INT(*failure, 0);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK_INT(mixp_read(p, got, MIXP_F32, 4), MIXP_OK);
    for (int i = 0; i < 4; i++) CHECK_NEAR(got[i], values[i] - 1, 0);
    mixp_context_free(ctx);
}

/* What a step sends before it begins arrives late: the next step sends it again. */
static int fail_upload;
static mixp_result upload_or_not(const mixp_exec *x, void *to, const void *from, size_t bytes) {
    (void)x;
    if (fail_upload && fail_upload-- == 1) return MIXP_ERR_DEVICE;
    memcpy(to, from, bytes);
    return MIXP_OK;
}
static void a_table_that_was_not_sent_is_sent_again(void) {
    device = *mixp_cpu();
    device.upload = upload_or_not;
    steps_when_tried_again(MIXP_F32, &fail_upload);
}

/* A weight is written by hand, and the step that would take it over fails: the next one does. */
static void a_master_that_did_not_follow_follows_later(void) {
    device = *mixp_cpu();
    kernels = *device.kernels;
    kernels.convert = convert_or_not;
    device.kernels = &kernels;
    steps_when_tried_again(MIXP_F16, &fail_convert);
}

/* --- an evaluation before a step ------------------------------------------------------------- */

/* The guard looks at the first step, which walks nothing back: of the next one, which it does not
 * look at and which is skipped, it knows nothing. */
static void an_evaluation_explains_no_skip(void) {
    enum { WIDTH = 8 };
    const int64_t    w_shape[2] = { WIDTH, WIDTH }, x_shape[2] = { 2, WIDTH };
    const mixp_origin want[2] = { MIXP_ORIGIN_UNKNOWN, MIXP_ORIGIN_BACKWARD };
    mixp_context    *ctx = mixp_context_new(NULL);
    mixp_tensor     *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape), *loss = NULL;
    mixp_optimizer  *opt = new_sgd(ctx);
    mixp_scaler_desc d;
    float            x[2 * WIDTH];
    memset(&d, 0, sizeof d);
    d.init_scale = 1e12f;
    mixp_scaler *scaler = mixp_scaler_new(ctx, &d);
    for (int i = 0; i < 2 * WIDTH; i++) x[i] = (float)(i % 3) - 1.5f;
    mixp_init_normal(w, 0, 0.5);
    CHECK_INT(mixp_optimizer_add(opt, w, NULL), MIXP_OK);
    CHECK_INT(mixp_guard_start(ctx, NULL), MIXP_OK);
    for (int step = -1; step < 2; step++) {
        mixp_zero_grad(opt);
        mixp_step_begin(ctx);
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            if (step < 0) MIXP_NO_GRAD(ctx) { loss = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, x_shape, x), w, NULL); }
            else loss = mixp_mean(ctx, mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, x_shape, x), w, NULL), MIXP_ALL, 0);
        }
        CHECK(loss != NULL);
        if (step < 0) continue;
        CHECK_INT(mixp_backward(ctx, mixp_scaler_scale(scaler, loss)), MIXP_OK);
        CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
        CHECK_INT(mixp_scaler_verdict(scaler).outcome, MIXP_STEP_SKIPPED);
        CHECK_INT(mixp_scaler_verdict(scaler).origin, want[step]);
    }
    quiet(ctx);
    mixp_context_free(ctx);
}

/* --- functions of the program ---------------------------------------------------------------- */

/* Frozen after it was used, and thawed by a backward: it had no place among ranks' gradients. */
static mixp_tensor *frozen;

static mixp_result thaw_backward(mixp_call *c) {
    mixp_tensor_set_requires_grad(frozen, 1);
    return watch_backward(c);
}
static const mixp_op thaw_op = { "thaw", MIXP_CLASS_KEEP, 0, watch_infer, watch_forward, thaw_backward, NULL };

static const char *sum_of_one(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double seconds)
{ (void)user; (void)data; (void)count; (void)dtype; (void)stream; (void)seconds; return NULL; }

static mixp_context *ranks_new(int size, mixp_ranks_hook sum) {
    mixp_context_desc d;
    mixp_ranks_desc   k;
    memset(&d, 0, sizeof d);
    memset(&k, 0, sizeof k);
    k.size = size;
    k.sum = sum;
    k.bucket_bytes = 1;
    d.ranks = &k;
    return mixp_context_new(&d);
}

static void a_parameter_that_thaws_in_a_walk(void) {
    mixp_context *ctx = ranks_new(1, sum_of_one);
    mixp_tensor  *q = mixp_param(ctx, "q", MIXP_F32, 1, four), *in[1];
    float         got[4];
    frozen = mixp_param(ctx, "p", MIXP_F32, 1, four);
    mixp_step_begin(ctx);
    in[0] = mixp_add(ctx, frozen, q);
    in[0] = mixp_apply(ctx, &thaw_op, 1, in, 1, NULL);
    mixp_tensor_set_requires_grad(frozen, 0);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, in[0], MIXP_ALL, 0)), MIXP_OK);
    quiet(ctx);
    CHECK(q->grad != NULL);
    if (q->grad) CHECK_INT(mixp_read(q->grad, got, MIXP_F32, 4), MIXP_OK);
    for (int i = 0; q->grad && i < 4; i++) CHECK_NEAR(got[i], 1, 0);
    mixp_context_free(ctx);
}

/* A hook runs in the middle of a walk, whose tape a step would recycle. */
static mixp_context *hooked;
static mixp_result   of_step, of_walk;
static mixp_tensor  *hooked_loss;

static const char *sum_that_begins(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                                   double seconds) {
    double *rows = (double *)data;
    (void)user; (void)stream; (void)seconds;
    /* What ranks compare is alike on the other. */
    if (dtype == MIXP_F64) memcpy(rows + count / 2, rows, (size_t)(count / 2) * sizeof *rows);
    if (dtype == MIXP_F64 || !hooked_loss) return NULL;
    of_step = mixp_step_begin(hooked);
    mixp_context_clear_error(hooked);
    of_walk = mixp_backward(hooked, hooked_loss);
    mixp_context_clear_error(hooked);
    return NULL;
}

static void a_hook_begins_no_step(void) {
    hooked = ranks_new(2, sum_that_begins);
    mixp_tensor *p = mixp_param(hooked, "p", MIXP_F32, 1, four);
    mixp_tensor *q = mixp_param(hooked, "q", MIXP_F32, 1, four);
    mixp_write(p, values, MIXP_F32, 4);
    mixp_write(q, values, MIXP_F32, 4);
    for (int step = 0; step < 2; step++) {
        p->grad = q->grad = hooked_loss = NULL;
        mixp_step_begin(hooked);
        uint64_t steps = mixp_context_steps(hooked);
        mixp_tensor *loss = mixp_sum(hooked, mixp_gelu(hooked, mixp_mul(hooked, mixp_gelu(hooked, p), q)), MIXP_ALL, 0);
        of_step = of_walk = MIXP_OK;
        if (step) hooked_loss = mixp_sum(hooked, mixp_mul(hooked, p, q), MIXP_ALL, 0);
        CHECK_INT(mixp_backward(hooked, loss), MIXP_OK);
        CHECK_INT(of_step, step ? MIXP_ERR_ORDER : MIXP_OK);
        CHECK_INT(of_walk, step ? MIXP_ERR_ORDER : MIXP_OK);
        CHECK_INT(mixp_context_steps(hooked), steps);
    }
    CHECK_INT(mixp_step_begin(hooked), MIXP_OK);
    mixp_context_free(hooked);
}

static mixp_tensor *sum_of(mixp_context *ctx, void *user)
{ return mixp_sum(ctx, (mixp_tensor *)user, MIXP_ALL, 0); }

static void a_refused_check_forgets_no_gradient(void) {
    mixp_context *ctx = mixp_context_new(NULL), *other = mixp_context_new(NULL);
    mixp_tensor  *p = mixp_param(ctx, "p", MIXP_F32, 1, four), *in[2];
    double        worst;
    in[0] = p;
    mixp_step_begin(ctx);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, p, MIXP_ALL, 0)), MIXP_OK);
    in[1] = mixp_param(ctx, "h", MIXP_F16, 1, four);
    CHECK_INT(mixp_check_gradients(ctx, sum_of, p, 2, in, 0, &worst), MIXP_ERR_DTYPE);
    clear(ctx, MIXP_ERR_DTYPE, "input 1 must be a permanent f32 tensor");
    CHECK(p->grad != NULL);
    in[1] = mixp_param(other, "p", MIXP_F32, 1, four);
    CHECK_INT(mixp_check_gradients(ctx, sum_of, p, 2, in, 0, &worst), MIXP_ERR_ARGUMENT);
    clear(ctx, MIXP_ERR_ARGUMENT, "input 1 belongs to another context");
    CHECK(p->grad != NULL);
    CHECK_INT(mixp_check_gradients(ctx, sum_of, p, 1, in, 0, &worst), MIXP_OK);
    CHECK_NEAR(worst, 0, 1e-3);
    mixp_step_begin(ctx);
    in[0] = mixp_scale(ctx, p, 2.0f);
    CHECK_INT(mixp_check_gradients(ctx, sum_of, p, 1, in, 0, &worst), MIXP_ERR_ORDER);
    clear(ctx, MIXP_ERR_ORDER, "earlier step");
    mixp_context_free(ctx);
    mixp_context_free(other);
}

int main(void) {
    snprintf(file, sizeof file, "/tmp/mixprec_borders_%ld.st", (long)getpid());
    RUN(a_save_is_as_those_before_it);
    RUN(a_refused_save_changes_nothing);
    RUN(weights_go_to_trained_views);
    RUN(no_control_character_of_a_name_is_told);
    RUN(no_control_character_is_told);
    RUN(points_in_each_locale);
    RUN(letters_of_a_name_are_told);
    RUN(a_walk_within_as_many_regions_as_may_be);
    RUN(a_region_too_many_is_left_all_the_same);
    RUN(a_refused_region_that_is_closed_at_once);
    RUN(a_tensor_that_is_recycled_by_and_by);
    RUN(a_gradient_that_was_given_back);
    RUN(a_cast_that_failed_is_made_again);
    RUN(a_table_that_was_not_sent_is_sent_again);
    RUN(a_master_that_did_not_follow_follows_later);
    RUN(an_evaluation_explains_no_skip);
    RUN(a_parameter_that_thaws_in_a_walk);
    RUN(a_hook_begins_no_step);
    RUN(a_refused_check_forgets_no_gradient);
    remove(file);
    return test_report();
}
