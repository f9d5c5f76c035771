/* test_cuda_recompute.cpp - blocks that are computed again, on the simulated GPU: the bits of a run
 * that keeps everything, also from a captured step, whose dropout is fresh in each replay.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "companion.h"
#include "test.h"
#include "numbers.h"
#include "gpu_context.h"
#include <vector>

enum { LAYERS = 3, WIDTH = 32, ROWS = 16 };
static float batch[ROWS * WIDTH];

struct Model {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *gain[LAYERS], *up[LAYERS], *down[LAYERS];
};

static Model model_on_gpu() {
    static const char *const names[3][LAYERS] = { { "g0", "g1", "g2" }, { "u0", "u1", "u2" },
                                                  { "d0", "d1", "d2" } };
    static const int64_t up[2] = { 4 * WIDTH, WIDTH }, down[2] = { WIDTH, 4 * WIDTH };
    mixp_context_desc desc;
    Model m;
    memset(&desc, 0, sizeof desc);
    desc.device = gpu();
    desc.seed = 5;
    m.ctx = mixp_context_new(&desc);
    m.opt = mixp_optimizer_new(m.ctx, NULL);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    for (int i = 0; i < LAYERS; i++) {
        m.gain[i] = mixp_param(m.ctx, names[0][i], MIXP_F32, 1, down);
        m.up[i] = mixp_param(m.ctx, names[1][i], MIXP_F32, 2, up);
        m.down[i] = mixp_param(m.ctx, names[2][i], MIXP_F32, 2, down);
        mixp_fill(m.gain[i], 1.0);
        mixp_init_normal(m.up[i], 0, 0.2);
        mixp_init_normal(m.down[i], 0, 0.2);
    }
    CHECK_INT(mixp_optimizer_add_all(m.opt, "*"), MIXP_OK);
    return m;
}

struct Layer { Model *m; int i; };
static mixp_tensor *one_layer(mixp_context *ctx, mixp_tensor *x, void *user) {
    const Layer *l = (const Layer *)user;
    mixp_tensor *h = mixp_rms_norm(ctx, x, l->m->gain[l->i], 1e-5f);
    h = mixp_gelu(ctx, mixp_linear(ctx, h, l->m->up[l->i], NULL));
    h = mixp_dropout(ctx, mixp_linear(ctx, h, l->m->down[l->i], NULL), 0.2f, 1);
    return mixp_mul(ctx, mixp_add(ctx, x, h), mixp_tanh(ctx, h));
}

static void train(Model &m, bool again) {
    static const int64_t shape[2] = { ROWS, WIDTH };
    Layer layers[LAYERS];
    CHECK_INT(mixp_step_begin(m.ctx), MIXP_OK);
    mixp_zero_grad(m.opt);
    mixp_tensor *x = mixp_input(m.ctx, MIXP_F32, 2, shape, batch);
    MIXP_AUTOCAST(m.ctx, MIXP_F16) {
        for (int i = 0; i < LAYERS; i++) {
            layers[i].m = &m;
            layers[i].i = i;
            x = again ? mixp_recompute(m.ctx, one_layer, &layers[i], x)
                      : one_layer(m.ctx, x, &layers[i]);
        }
        x = mixp_mean(m.ctx, mixp_mean(m.ctx, mixp_mul(m.ctx, x, x), 1, 0), 0, 0);
    }
    CHECK_INT(mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, x)), MIXP_OK);
    CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(m.scaler), MIXP_OK);
}

static std::vector<float> weights(Model &m) {
    std::vector<float> all;
    for (int64_t i = 0; mixp_context_param(m.ctx, i); i++) {
        mixp_tensor *t = mixp_context_param(m.ctx, i);
        std::vector<float> x((size_t)t->count);
        CHECK_INT(mixp_read(t, x.data(), MIXP_F32, t->count), MIXP_OK);
        all.insert(all.end(), x.begin(), x.end());
    }
    return all;
}

static void new_batch(int t) {
    random_state = (uint64_t)t + 1;
    for (float &x : batch) x = (float)random_value();
}

static void same_bits() {
    Model a = model_on_gpu(), b = model_on_gpu();
    for (int t = 0; t < 4; t++) {
        std::vector<float> before = weights(a);
        new_batch(t);
        train(a, false);
        train(b, true);
        CHECK(weights(a) == weights(b));
        CHECK(weights(a) != before);
    }
    CHECK(mixp_context_memory(b.ctx).peak < mixp_context_memory(a.ctx).peak);
    CHECK_INT(mixp_context_error(b.ctx, NULL), MIXP_OK);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

static void a_recorded_step() {
    Model a = model_on_gpu(), b = model_on_gpu();
    for (int t = 0; t < 2; t++) {
        new_batch(t);
        train(a, false);
        train(b, true);
    }
    CHECK_INT(mixp_capture_begin(b.ctx), MIXP_OK);
    train(b, true);
    mixp_graph *graph = mixp_capture_end(b.ctx);
    CHECK(graph != NULL);
    for (int t = 2; t < 6; t++) {
        new_batch(t);
        train(a, false);
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        CHECK(weights(a) == weights(b));
    }
    CHECK_INT(mixp_context_error(b.ctx, NULL), MIXP_OK);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

int main() {
    RUN(same_bits);
    RUN(a_recorded_step);
    return test_report();
}
