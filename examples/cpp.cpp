/* cpp.cpp - the training loop as C++17 writes it: layers are classes, an autocast region is a variable, an error is an
 * exception, and owners free what they own.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     c++ -std=c++17 -O2 -fopenmp cpp.cpp -I.. && ./a.out
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct FreeContext { void operator()(mixp_context *ctx) const { mixp_context_free(ctx); } };
using Context = std::unique_ptr<mixp_context, FreeContext>;

/* Calls of mixprec throw their first error. After catch, mixp_context_clear_error and mixp_step_begin continue. */
[[noreturn]] static void throw_error(mixp_result, const char *message, void *) { throw std::runtime_error(message); }

static Context make_context() {
    const char *why = "";
    mixp_context_desc desc = {};
    desc.why = &why;
    desc.on_error = throw_error;
    Context ctx(mixp_context_new(&desc));
    if (!ctx) throw std::runtime_error(why);
    return ctx;
}

/* Parameters belong to the context: a layer holds pointers, and frees nothing. */
class Linear {
public:
    Linear(mixp_context *ctx, const std::string &name, int64_t in, int64_t out)
        : w(mixp_param(ctx, (name + ".w").c_str(), MIXP_F32, MIXP_SHAPE(out, in))),
          b(mixp_param(ctx, (name + ".b").c_str(), MIXP_F32, MIXP_SHAPE(out))) {
        mixp_init_kaiming_uniform(w, 1.0 / std::sqrt(3.0));     /* as torch.nn.Linear begins */
    }
    mixp_tensor *operator()(mixp_context *ctx, mixp_tensor *x) const { return mixp_linear(ctx, x, w, b); }
private:
    mixp_tensor *w, *b;
};

class Net {
public:
    explicit Net(mixp_context *ctx) : first(ctx, "first", 1, 32), second(ctx, "second", 32, 1) {}
    mixp_tensor *operator()(mixp_context *ctx, mixp_tensor *x) const {
        return second(ctx, mixp_tanh(ctx, first(ctx, x)));
    }
private:
    Linear first, second;
};

static mixp_tensor *loss_of(mixp_context *ctx, const Net &net, const std::vector<float> &x, const std::vector<float> &y) {
    const auto rows = static_cast<int64_t>(x.size());
    mixp_autocast_scope scope(ctx, MIXP_F16);                   /* ends with the function, also by an exception */
    mixp_tensor *predicted = net(ctx, mixp_input(ctx, MIXP_F32, MIXP_SHAPE(rows, 1), x.data()));
    return mixp_mse(ctx, predicted, mixp_input(ctx, MIXP_F32, MIXP_SHAPE(rows, 1), y.data()));
}

static void train() {
    const Context owner = make_context();
    mixp_context *ctx = owner.get();
    const Net net(ctx);
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    adamw.lr = 1e-2;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);      /* freed with the context, as the scaler is */
    mixp_scaler *scaler = mixp_scaler_new(ctx, nullptr);
    mixp_optimizer_add_all(opt, "*");

    std::vector<float> x(64), y(64);
    for (std::size_t i = 0; i < x.size(); i++) {
        x[i] = static_cast<float>(i) / 32.0f - 1.0f;
        y[i] = std::sin(3.0f * x[i]);
    }
    for (int step = 0; step <= 400; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        mixp_tensor *loss = loss_of(ctx, net, x, y);
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
        if (step % 100 == 0) std::printf("step %3d  loss %.4f\n", step, static_cast<double>(mixp_item(loss)));
    }

    /* An error is an exception; after it the context goes on. */
    try {
        mixp_step_begin(ctx);
        net(ctx, mixp_input(ctx, MIXP_F32, MIXP_SHAPE(21, 3), x.data()));
    } catch (const std::runtime_error &e) {
        std::printf("caught: %s\n", e.what());
        mixp_context_clear_error(ctx);
    }
}

int main() {
    try { train(); }
    catch (const std::exception &e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
    return 0;
}
