/* test_cuda_muon.cpp - Muon on the simulated GPU: near the CPU's weights, without a wait, and with
 * the same bits from a captured step, which decides on the device whether to skip.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "companion.h"
#include "test.h"
#include "numbers.h"
#include "gpu_context.h"
#include <vector>

static const int64_t shapes[2][2] = { { 24, 16 }, { 16, 40 } };
enum { MOST = 640 };

struct Model {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *w[2], *g[2];
};

static Model model_on(const mixp_device *device, int f32) {
    mixp_optimizer_desc d = mixp_muon_defaults();
    mixp_context_desc desc;
    Model m;
    memset(&desc, 0, sizeof desc);
    desc.device = device;
    d.muon.f32 = f32;
    d.lr = 0.02;
    m.ctx = mixp_context_new(&desc);
    m.opt = mixp_optimizer_new(m.ctx, &d);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    CHECK(mixp_scaler_loss_scale(m.scaler) > 0.0f);     /* whoever multiplies by it asks */
    random_state = 3;
    for (int k = 0; k < 2; k++) {
        float start[MOST];
        for (float &x : start) x = (float)random_value();
        m.w[k] = mixp_param(m.ctx, k ? "wide" : "tall", MIXP_BF16, 2, shapes[k]);
        m.g[k] = mixp_param(m.ctx, k ? "g1" : "g0", MIXP_F32, 2, shapes[k]);
        CHECK_INT(mixp_write(m.w[k], start, MIXP_F32, m.w[k]->count), MIXP_OK);
        CHECK_INT(mixp_optimizer_add(m.opt, m.w[k], m.g[k]), MIXP_OK);
    }
    return m;
}

/* The gradients of step t; those of steps 2 and 5 are bad. */
static void gradients(Model &m, int t) {
    random_state = (uint64_t)t + 100;
    for (int k = 0; k < 2; k++) {
        float g[MOST];
        for (float &x : g) x = 65536.0f * (float)random_value();
        if (t % 3 == 2 && k) g[300] = NAN;
        CHECK_INT(mixp_write(m.g[k], g, MIXP_F32, m.g[k]->count), MIXP_OK);
    }
}
static void step(Model &m) {
    CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(m.scaler), MIXP_OK);
}
static std::vector<float> weights(Model &m) {
    std::vector<float> all(2 * MOST);
    for (int k = 0; k < 2; k++)
        CHECK_INT(mixp_read(m.w[k], all.data() + k * MOST, MIXP_F32, m.w[k]->count), MIXP_OK);
    return all;
}

static void as_on_the_cpu() {
    for (int f32 = 0; f32 < 2; f32++) {
        Model a = model_on(gpu(), f32), b = model_on(mixp_cpu(), f32);
        for (int t = 0; t < 8; t++) {
            gradients(a, t);
            gradients(b, t);
            step(a);
            step(b);
        }
        std::vector<float> x = weights(a), y = weights(b);
        for (size_t i = 0; i < x.size(); i++) CHECK_NEAR(x[i], y[i], 0.01);  /* of bf16: one step */
        CHECK_INT(mixp_optimizer_applied(a.opt), 6);
        CHECK_INT(mixp_optimizer_applied(b.opt), 6);
        mixp_context_free(a.ctx);
        mixp_context_free(b.ctx);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

static void no_step_waits() {
    NEEDS_SIMULATION;
    Model m = model_on(gpu(), 0);
    gradients(m, 0);
    step(m);
    gradients(m, 1);
    cudasim::eager = true;
    cudasim::Count before = cudasim::count;
    for (int i = 0; i < 3; i++) step(m);
    CHECK_INT(cudasim::count.waits, before.waits);
    CHECK_INT(cudasim::count.resources, before.resources);
    cudasim::eager = false;
    mixp_context_free(m.ctx);
}

static void a_recorded_step() {
    Model a = model_on(gpu(), 0), b = model_on(gpu(), 0);
    for (int t = 0; t < 2; t++) {
        gradients(a, t);
        gradients(b, t);
        step(a);
        step(b);
    }
    CHECK_INT(mixp_capture_begin(a.ctx), MIXP_OK);
    step(a);
    mixp_graph *graph = mixp_capture_end(a.ctx);
    CHECK(graph != NULL);
    for (int t = 2; t < 7; t++) {       /* skips 2 and 5 */
        std::vector<float> before = weights(a);
        gradients(a, t);
        gradients(b, t);
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        step(b);
        CHECK(weights(a) == weights(b));
        CHECK((weights(a) == before) == (t % 3 == 2));
    }
    CHECK_INT(mixp_optimizer_applied(a.opt), 5);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

int main() {
    RUN(as_on_the_cpu);
    RUN(no_step_waits);
    RUN(a_recorded_step);
    return test_report();
}
