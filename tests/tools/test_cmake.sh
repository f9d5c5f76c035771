#!/bin/sh
# test_cmake.sh - the CMake lines of docs/embedding.md, with -O0 and plain C instead of -O2, build a C++ program of
# three files. The program owns its context by a unique_ptr, throws errors as exceptions, and learns
# to tell bright from dark.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

if ! command -v cmake >/dev/null 2>&1; then
    skip 'a C++ project made with CMake (no cmake)'
    report
    exit
fi

cp mixprec.h "$tmp"
printf '#define MIXPREC_IMPLEMENTATION\n#include "mixprec.h"\n' >"$tmp/mixprec.c"
{
    printf 'cmake_minimum_required(VERSION 3.10)\nproject(brightness C CXX)\nset(CMAKE_CXX_STANDARD 11)\n'
    awk '/^```cmake$/ { block++; next } /^```$/ { if (block == 2) exit } block == 2' docs/embedding.md | sed 's/-O2/-O0 -DMIXPREC_NO_SIMD/'
    printf 'add_executable(brightness main.cpp net.cpp)\n'
    printf 'target_compile_options(brightness PRIVATE -Wall -Wextra -Wconversion -Wold-style-cast -Werror)\n'
    printf 'target_link_libraries(brightness mixprec)\n'
} >"$tmp/CMakeLists.txt"

cat >"$tmp/net.hpp" <<'END'
#pragma once
#include "mixprec.h"
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct FreeContext { void operator()(mixp_context *c) const { mixp_context_free(c); } };
using Context = std::unique_ptr<mixp_context, FreeContext>;

void need_no_error(mixp_context *c);

class Net {
public:
    Net(mixp_context *ctx, mixp_optimizer *opt, const std::vector<int64_t> &widths);
    mixp_tensor *operator()(mixp_tensor *x) const;
private:
    mixp_context *ctx;
    std::vector<mixp_tensor *> weights, biases;
};
END
cat >"$tmp/net.cpp" <<'END'
#include "net.hpp"

void need_no_error(mixp_context *c) {
    const char *why = nullptr;
    if (mixp_context_error(c, &why) != MIXP_OK) throw std::runtime_error(why);
}

Net::Net(mixp_context *context, mixp_optimizer *opt, const std::vector<int64_t> &widths)
    : ctx(context) {
    for (std::size_t i = 1; i < widths.size(); i++) {
        const int64_t shape[2] = {widths[i], widths[i - 1]};
        const std::string name = "layer" + std::to_string(i);
        weights.push_back(mixp_param(ctx, (name + ".weight").c_str(), MIXP_F32, 2, shape));
        biases.push_back(mixp_param(ctx, (name + ".bias").c_str(), MIXP_F32, 1, shape));
        mixp_init_kaiming_normal(weights.back(), 1);
        mixp_optimizer_add(opt, weights.back(), nullptr);
        mixp_optimizer_add(opt, biases.back(), nullptr);
    }
    need_no_error(ctx);
}

mixp_tensor *Net::operator()(mixp_tensor *x) const {
    for (std::size_t i = 0; i < weights.size(); i++) {
        x = mixp_linear(ctx, x, weights[i], biases[i]);
        if (i + 1 < weights.size()) x = mixp_relu(ctx, x);
    }
    return x;
}
END
cat >"$tmp/main.cpp" <<'END'
#include "net.hpp"
#include <cstdio>
#include <random>

static const int batch = 64, pixels = 16;

static double train(const std::string &bad) {
    Context owner(mixp_context_new(nullptr));
    mixp_context *ctx = owner.get();
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    mixp_scaler *scaler = mixp_scaler_new(ctx, nullptr);
    Net net(ctx, opt, {bad.empty() ? pixels : pixels - 1, 32, 2});
    std::mt19937 random(1);
    std::normal_distribution<float> noise(0.0f, 1.0f);
    const int64_t shape[2] = {batch, pixels};
    double loss_now = 0;
    for (int step = 0; step < 150; step++) {
        std::vector<float> image;
        std::vector<int32_t> bright;
        for (int i = 0; i < batch; i++) {
            bright.push_back(static_cast<int32_t>(random() % 2));
            for (int k = 0; k < pixels; k++)
                image.push_back(noise(random) + (bright.back() ? 0.9f : -0.9f));
        }
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        mixp_tensor *loss = nullptr;
        {
            mixp_autocast_scope low(ctx, MIXP_F16);
            mixp_tensor *logits = net(mixp_input(ctx, MIXP_F32, 2, shape, image.data()));
            loss = mixp_cross_entropy(ctx, logits, mixp_input(ctx, MIXP_I32, 1, shape, bright.data()),
                                      MIXP_IGNORE);
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
        need_no_error(ctx);
        loss_now = mixp_item(loss);
        if (step == 0 || step == 149) std::printf("step %d loss %.4f\n", step, loss_now);
    }
    return loss_now;
}

int main(int argc, char **) {
    try {
        return train(argc > 1 ? "bad" : "") < 0.1 ? 0 : 1;
    } catch (const std::exception &e) {
        std::printf("%s\n", e.what());
        return 2;
    }
}
END

configure() { env -u MAKEFLAGS -u MAKELEVEL cmake -S "$tmp" -B "$tmp/build"; }
compile()   { env -u MAKEFLAGS -u MAKELEVEL cmake --build "$tmp/build"; }
trains()    { OMP_NUM_THREADS=1 "$tmp/build/brightness" >"$tmp/out"; }
throws()    { OMP_NUM_THREADS=1 "$tmp/build/brightness" bad >"$tmp/out"; [ $? -eq 2 ]; }
check "CMake takes the lines of docs/embedding.md"         configure
check 'the C++ program compiles without a warning' compile
check 'it learns'                              trains
check 'the loss fell'                          awk 'NR == 1 { a = $4 } END { exit !(a > 5 * $4 && $4 < 0.1) }' "$tmp/out"
check 'an error is thrown'                     throws
check 'and says which layer does not fit'      grep -q "linear.*layer1.weight" "$tmp/out"
report
