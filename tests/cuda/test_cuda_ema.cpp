/* test_cuda_ema.cpp - averages of weights on the simulated GPU: the CPU's bits, without a wait; a
 * captured step averages, and is not replayed onto the averages; after a swap its forward pass reads
 * the weights again. A program's own schedule: the CPU's rates, also where steps are skipped.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "companion.h"
#include "test.h"
#include "numbers.h"
#include "gpu_context.h"
#include <vector>

typedef std::vector<float> Floats;
static const int64_t shape[2] = { 24, 40 };
enum { COUNT = 24 * 40 };

struct Model {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *w, *g;
};

static void set(mixp_tensor *t, uint64_t seed, double size, int bad) {
    float values[COUNT];
    random_state = seed;
    for (float &x : values) x = (float)(size * random_value());
    if (bad) values[COUNT / 2] = NAN;
    CHECK_INT(mixp_write(t, values, MIXP_F32, COUNT), MIXP_OK);
}

/* g NULL: the gradients are those of backward. */
static double (*own_factor)(void *, int64_t);
static Model model_on(const mixp_device *device, mixp_dtype dtype, double decay, bool views) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    if (own_factor) d.schedule.kind = MIXP_SCHEDULE_FUNCTION;
    d.schedule.factor = own_factor;
    mixp_context_desc desc;
    Model m;
    memset(&desc, 0, sizeof desc);
    desc.device = device;
    d.lr = 0.02;
    m.ctx = mixp_context_new(&desc);
    m.opt = mixp_optimizer_new(m.ctx, &d);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    CHECK(mixp_scaler_loss_scale(m.scaler) > 0.0f);
    m.w = mixp_param(m.ctx, "w", dtype, 2, shape);
    m.g = views ? mixp_param(m.ctx, "g", MIXP_F32, 2, shape) : NULL;
    set(m.w, 3, 1.0, 0);
    CHECK_INT(mixp_optimizer_add(m.opt, m.w, m.g), MIXP_OK);
    CHECK_INT(mixp_optimizer_set_ema(m.opt, decay), MIXP_OK);
    return m;
}
static void step(Model &m) {
    CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(m.scaler), MIXP_OK);
}
static Floats averages(Model &m) {
    Floats x(COUNT);
    CHECK_INT(mixp_optimizer_read(m.opt, m.w, MIXP_STATE_EMA, x.data(), COUNT), MIXP_OK);
    return x;
}
static Floats weights(Model &m) {
    Floats x(COUNT);
    CHECK_INT(mixp_read(m.w, x.data(), MIXP_F32, COUNT), MIXP_OK);
    return x;
}

static void as_on_the_cpu() {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    for (mixp_dtype dtype : dtypes)
        for (double decay : { 0.25, 0.99 }) {
            Model a = model_on(gpu(), dtype, decay, true), b = model_on(mixp_cpu(), dtype, decay, true);
            for (int t = 0; t < 6; t++) {
                Floats before = averages(a);
                set(a.g, (uint64_t)t + 9, 65536.0, t == 3);
                set(b.g, (uint64_t)t + 9, 65536.0, t == 3);
                step(a);
                step(b);
                CHECK(averages(a) == averages(b));
                CHECK((averages(a) == before) == (t == 3));
            }
            Floats own = weights(a);
            CHECK_INT(mixp_optimizer_swap_ema(a.opt), MIXP_OK);
            CHECK_INT(mixp_optimizer_swap_ema(b.opt), MIXP_OK);
            CHECK(weights(a) == weights(b) && weights(a) != own);
            CHECK_INT(mixp_optimizer_swap_ema(a.opt), MIXP_OK);
            CHECK(weights(a) == own);
            mixp_context_free(a.ctx);
            mixp_context_free(b.ctx);
        }
    CHECK_INT(cudasim::leaks(), 0);
}

static void no_step_waits() {
    NEEDS_SIMULATION;
    Model m = model_on(gpu(), MIXP_F16, 0.9, true);
    set(m.g, 1, 65536.0, 0);
    step(m);
    cudasim::eager = true;
    cudasim::Count before = cudasim::count;
    for (int i = 0; i < 3; i++) step(m);
    CHECK_INT(cudasim::count.waits, before.waits);
    CHECK_INT(cudasim::count.resources, before.resources);
    cudasim::eager = false;
    mixp_context_free(m.ctx);
}

/* The device decides which steps count; the host asks for the factors of all steps it may be at, and waits
 * only when it is 16 steps ahead. */
static double inverse(void *, int64_t applied) { return 1.0 / (1.0 + (double)applied); }
static void own_schedule() {
    own_factor = inverse;
    for (bool ahead : { false, true }) {
        Model a = model_on(gpu(), MIXP_F32, 0.5, true), b = model_on(mixp_cpu(), MIXP_F32, 0.5, true);
        set(a.g, 9, 65536.0, 0);
        set(b.g, 9, 65536.0, 0);
        for (int t = 0; t < 40; t++) {
            if (!ahead) set(a.g, (uint64_t)t + 9, 65536.0, t % 5 == 3);
            if (!ahead) set(b.g, (uint64_t)t + 9, 65536.0, t % 5 == 3);
            step(a);
            step(b);
            if (!ahead) CHECK_NEAR(mixp_scaler_verdict(b.scaler).lr, 0.02 / (1.0 + t - (t + 1) / 5), 1e-12);
        }
        CHECK(weights(a) == weights(b));
        CHECK_INT(mixp_optimizer_applied(a.opt), ahead ? 40 : 32);
        mixp_context_free(a.ctx);
        mixp_context_free(b.ctx);
    }
    Model m = model_on(gpu(), MIXP_F32, 0.5, true);
    const char *why = "";
    set(m.g, 1, 65536.0, 0);
    step(m);
    CHECK_INT(mixp_capture_begin(m.ctx), MIXP_OK);
    CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_ERR_ORDER);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "a captured step cannot call schedule.factor");
    mixp_context_free(m.ctx);
    own_factor = NULL;
}

/* The loss is the mean of x w' under autocast, which reads w's low copy; x is the batch. */
static float batch[8 * 40];
static void train(Model &m) {
    const int64_t x_shape[2] = { 8, 40 };
    CHECK_INT(mixp_step_begin(m.ctx), MIXP_OK);
    mixp_zero_grad(m.opt);
    mixp_tensor *x = mixp_input(m.ctx, MIXP_F32, 2, x_shape, batch), *y = NULL;
    MIXP_AUTOCAST(m.ctx, MIXP_F16) y = mixp_linear(m.ctx, x, m.w, NULL);
    mixp_tensor *loss = mixp_mean(m.ctx, mixp_mean(m.ctx, mixp_mul(m.ctx, y, y), 1, 0), 0, 0);
    CHECK_INT(mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, loss)), MIXP_OK);
    step(m);
}

static void a_recorded_step() {
    Model a = model_on(gpu(), MIXP_F32, 0.75, false), b = model_on(gpu(), MIXP_F32, 0.75, false);
    random_state = 6;
    for (float &x : batch) x = (float)random_value();
    for (int t = 0; t < 2; t++) {
        train(a);
        train(b);
    }
    CHECK_INT(mixp_capture_begin(a.ctx), MIXP_OK);
    train(a);
    CHECK_INT(mixp_optimizer_swap_ema(a.opt), MIXP_ERR_ORDER);
    mixp_context_clear_error(a.ctx);
    CHECK(mixp_capture_end(a.ctx) == NULL);         /* the graph would lack what was refused */
    mixp_context_clear_error(a.ctx);
    CHECK_INT(mixp_capture_begin(a.ctx), MIXP_OK);
    train(a);
    mixp_graph *graph = mixp_capture_end(a.ctx);
    CHECK(graph != NULL);
    for (int t = 2; t < 6; t++) {
        Floats before = averages(a);
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        train(b);
        CHECK(averages(a) == averages(b) && averages(a) != before);
        CHECK_INT(mixp_optimizer_swap_ema(a.opt), MIXP_OK);
        CHECK_INT(mixp_replay(graph), MIXP_ERR_ORDER);
        mixp_context_clear_error(a.ctx);
        CHECK_INT(mixp_optimizer_swap_ema(a.opt), MIXP_OK);
        CHECK(weights(a) == weights(b));
    }
    CHECK_INT(mixp_context_error(a.ctx, NULL), MIXP_OK);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* If a weight is written before its first step, its average starts again from the weight. A captured
 * step would start it in each replay, so the capture is refused. */
static void a_recorded_step_after_a_write() {
    Model a = model_on(gpu(), MIXP_F32, 0.75, false);
    const char *why;
    train(a);
    train(a);
    mixp_tensor *late = mixp_param(a.ctx, "late", MIXP_F32, 2, shape);
    CHECK_INT(mixp_optimizer_add(a.opt, late, NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_set_ema(a.opt, 0.75), MIXP_OK);
    set(late, 3, 1.0, 0);
    CHECK_INT(mixp_capture_begin(a.ctx), MIXP_OK);
    mixp_step_begin(a.ctx);
    mixp_zero_grad(a.opt);
    mixp_tensor *loss = mixp_mean(a.ctx, mixp_mul(a.ctx, a.w, a.w), MIXP_ALL, 0);
    mixp_backward(a.ctx, mixp_scaler_scale(a.scaler, loss));
    CHECK_INT(mixp_scaler_step(a.scaler, a.opt), MIXP_ERR_ORDER);
    mixp_context_error(a.ctx, &why);
    CHECK_TEXT(why, "'late' was written since mixp_optimizer_set_ema");
    mixp_capture_end(a.ctx);
    mixp_context_free(a.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

int main() {
    RUN(as_on_the_cpu);
    RUN(a_recorded_step_after_a_write);
    RUN(no_step_waits);
    RUN(own_schedule);
    RUN(a_recorded_step);
    return test_report();
}
