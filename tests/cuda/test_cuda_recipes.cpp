/* test_cuda_recipes.cpp - the quantiser of recipes on the simulated GPU: the bits of the CPU's
 * quantiser, which tests/core/test_recipes.c holds to a search through the grid; linear layers whose sums
 * are exact, bit for bit; a training near the CPU's; and captured steps, which draw anew.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"
#include <vector>

/* --- the quantiser ---------------------------------------------------------------------------- */

struct Form {
    mixp_block_scale scale;
    mixp_dtype element;
    int64_t    block_rows, block_cols, rows, cols;
    int        stochastic;
};
/* Each recipe's operands, then blocks that share warps otherwise, and arrays of odd sizes. */
static const Form forms[] = {
    { MIXP_SCALE_TENSOR, MIXP_F8_E4M3, 0, 0, 48, 64, 0 },
    { MIXP_SCALE_TENSOR, MIXP_F8_E5M2, 0, 0, 33, 37, 0 },
    { MIXP_SCALE_TENSOR, MIXP_F4_E2M1, 0, 0, 1, 5, 1 },
    { MIXP_SCALE_POWER, MIXP_F8_E4M3, 1, 128, 5, 384, 0 },
    { MIXP_SCALE_POWER, MIXP_F8_E4M3, 128, 1, 128, 35, 0 },
    { MIXP_SCALE_POWER, MIXP_F8_E4M3, 128, 128, 128, 256, 0 },
    { MIXP_SCALE_E8M0, MIXP_F8_E4M3, 1, 32, 7, 96, 0 },
    { MIXP_SCALE_E8M0, MIXP_F8_E4M3, 32, 1, 64, 300, 0 },
    { MIXP_SCALE_E8M0, MIXP_F8_E5M2, 1, 32, 3, 32, 0 },
    { MIXP_SCALE_E8M0, MIXP_F4_E2M1, 48, 48, 96, 96, 1 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 9, 80, 0 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 33, 48, 1 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 16, 1, 48, 67, 1 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 16, 16, 32, 48, 0 },
    { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 64, 4, 192, 1 },
    { MIXP_SCALE_POWER, MIXP_F8_E4M3, 1, 4096, 2, 4096, 0 },
};

enum Edges { plain, spread, zeros, huge, with_nan, with_inf, tiny, edge_kinds };

/* Numbers like a network's; then with an edge in some blocks. */
static Pair source_of(const Form &p, mixp_dtype dtype, Edges edges, int off) {
    int64_t n = p.rows * p.cols;
    Pair x = numbers(dtype, n, 1.0, off);
    if (edges == spread)
        for (int64_t i = 0; i < n; i++)
            set_value(x, i, ldexp(value_at(x.cpu, dtype, i), (int)(random_u64() % 60) - 30));
    if (edges == zeros)
        for (int64_t i = 0; i < n / 2; i++) set_value(x, i, i % 2 ? 0.0 : -0.0);
    if (edges == tiny)
        for (int64_t i = 0; i < n; i++) set_value(x, i, (double)(i % 50) * 1e-41);
    if (edges == huge) set_value(x, n / 3, 3e38);
    if (edges == with_nan) set_value(x, n / 2, NAN);
    if (edges == with_inf) set_value(x, n - 1, -INFINITY);
    return x;
}

static mixp_quantise_args args_of(const Form &p, const Pair &x, const Pair &y) {
    mixp_quantise_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = p.rows;
    k.cols = p.cols;
    k.x = args_in(ON(x));
    k.y = AT(mixp_bf16, y);
    k.element = p.element;
    k.scale = p.scale;
    k.block_rows = p.block_rows;
    k.block_cols = p.block_cols;
    k.stochastic = p.stochastic;
    k.seed = 3;
    k.step = 4;
    k.tensor = 5;
    return k;
}

static void quantise_both(const Form &p, const Pair &x, const Pair &y, Pair &decode) {
    on_gpu = 1;
    mixp_quantise_args k = args_of(p, x, y);
    k.decode = AT(float, decode);
    scratch_requests = 0;
    CHECK_INT(gpu_kernels->quantise(&gpu_exec, &k), MIXP_OK);
    CHECK(scratch_requests <= 1);
    on_gpu = 0;
    k = args_of(p, x, y);
    CHECK_INT(mixp_quantise(&cpu_exec, &k, AT(float, decode)), MIXP_OK);
}

static void same_numbers_body(void) {
    for (const Form &p : forms)
        for (mixp_dtype dtype : { MIXP_F32, MIXP_BF16 })
            for (int edges = 0; edges < edge_kinds; edges++) {
                int off = edges % 2;
                Pair x = source_of(p, dtype, (Edges)edges, off);
                Pair y = empty(MIXP_BF16, p.rows * p.cols, off), decode = empty(MIXP_F32, 1, 0);
                quantise_both(p, x, y, decode);
                same_but_nan(y);
                same_bits(decode);
                Pair *all[] = { &x, &y, &decode };
                for (Pair *one : all) finish(*one);
            }
}
static void same_numbers(void) { in_all_schedules(same_numbers_body); }

/* More parts of the array's amax than thread blocks look at together. */
static void large_body(void) {
    const Form large[] = { { MIXP_SCALE_TENSOR, MIXP_F8_E4M3, 0, 0, 801, 1001, 0 },
                           { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 512, 1200, 1 } };
    for (const Form &p : large) {
        Pair x = source_of(p, MIXP_BF16, plain, 0);
        Pair y = empty(MIXP_BF16, p.rows * p.cols, 0), decode = empty(MIXP_F32, 1, 0);
        set_value(x, p.rows * p.cols - 1, 100.0);
        quantise_both(p, x, y, decode);
        same_bits(y);
        same_bits(decode);
        Pair *all[] = { &x, &y, &decode };
        for (Pair *one : all) finish(*one);
    }
}
static void large(void) { in_all_schedules(large_body); }

/* Every bf16 number, each as it is and scaled by an amax beyond all. */
static void every_bf16_body(void) {
    for (mixp_dtype element : { MIXP_F8_E4M3, MIXP_F8_E5M2, MIXP_F4_E2M1 })
        for (mixp_block_scale scale : { MIXP_SCALE_TENSOR, MIXP_SCALE_E8M0 }) {
            const int64_t n = scale == MIXP_SCALE_TENSOR ? 0 : 16;
            const Form p = { scale, element, n ? 1 : 0, n, 256, 256, 0 };
            Pair x = empty(MIXP_BF16, 65536, 0), y = empty(MIXP_BF16, 65536, 0),
                 decode = empty(MIXP_F32, 1, 0);
            for (int64_t i = 0; i < 65536; i++) set_code(x, i, (uint64_t)i);
            quantise_both(p, x, y, decode);
            same_but_nan(y);
            same_bits(decode);
            Pair *all[] = { &x, &y, &decode };
            for (Pair *one : all) finish(*one);
        }
}
static void every_bf16(void) { in_all_schedules(every_bf16_body); }

/* The second operand's factor is that of the product. */
static void factors_body(void) {
    const Form p = { MIXP_SCALE_TENSOR, MIXP_F8_E4M3, 0, 0, 16, 16, 0 };
    Pair x = numbers(MIXP_BF16, 256, 1.0, 0), y = empty(MIXP_BF16, 256, 0);
    Pair first = empty(MIXP_F32, 1, 0), both = empty(MIXP_F32, 1, 0);
    on_gpu = 1;
    mixp_quantise_args k = args_of(p, x, y);
    k.decode = AT(float, first);
    CHECK_INT(gpu_kernels->quantise(&gpu_exec, &k), MIXP_OK);
    k.times = AT(float, first);
    k.decode = AT(float, both);
    CHECK_INT(gpu_kernels->quantise(&gpu_exec, &k), MIXP_OK);
    WAIT();
    float one = *(float *)first.gpu;
    CHECK(one > 0.0f && one < 1.0f);
    CHECK_INT(mixp_bits_of_f32(*(float *)both.gpu), mixp_bits_of_f32(one * one));
    Pair *all[] = { &x, &y, &first, &both };
    for (Pair *pair : all) finish(*pair);
}
static void factors(void) { in_all_schedules(factors_body); }

/* A given scale, and the amax, of an array whose size is odd. */
static void given_body(void) {
    const Form p = { MIXP_SCALE_TENSOR, MIXP_F8_E5M2, 0, 0, 37, 61, 0 };
    for (float given : { 0.0f, 3.5f }) {
        Pair x = numbers(MIXP_BF16, 37 * 61, 1.0, 0), y = empty(MIXP_BF16, 37 * 61, 0);
        Pair decode = empty(MIXP_F32, 1, 0), amax = empty(MIXP_F32, 1, 0);
        on_gpu = 1;
        mixp_quantise_args k = args_of(p, x, y);
        k.given = given;
        k.decode = AT(float, decode);
        k.amax = AT(float, amax);
        CHECK_INT(gpu_kernels->quantise(&gpu_exec, &k), MIXP_OK);
        on_gpu = 0;
        k = args_of(p, x, y);
        k.given = given;
        k.amax = AT(float, amax);
        CHECK_INT(mixp_quantise(&cpu_exec, &k, AT(float, decode)), MIXP_OK);
        Pair *all[] = { &x, &y, &decode, &amax };
        for (Pair *one : all) same_bits(*one);
        for (Pair *one : all) finish(*one);
    }
}
static void given(void) { in_all_schedules(given_body); }

static void hadamard_body(void) {
    for (mixp_dtype dtype : { MIXP_F32, MIXP_BF16 })
        for (int64_t cols : { 1, 21, 64 }) {
            Pair a = numbers(dtype, 48 * cols, 1.0, 1), y = empty(MIXP_F32, 48 * cols, 1);
            mixp_hadamard_args k;
            set_value(a, cols / 2, 3e38);
            on_gpu = 1;
            k.rows = 48; k.cols = cols; k.a = args_in(ON(a)); k.y = AT(float, y);
            CHECK_INT(gpu_kernels->hadamard(&gpu_exec, &k), MIXP_OK);
            on_gpu = 0;
            CHECK_INT(mixp_hadamard(&cpu_exec, 48, cols, args_in(ON(a)), AT(float, y)), MIXP_OK);
            same_but_nan(y);
            finish(a);
            finish(y);
        }
}
static void hadamard(void) { in_all_schedules(hadamard_body); }

static void *no_scratch(void *, size_t) { return NULL; }

/* The CPU's errors; nothing is written. */
static void refused_body(void) {
    const Form p = { MIXP_SCALE_E4M3, MIXP_F4_E2M1, 1, 16, 32, 32, 0 };
    Pair x = numbers(MIXP_F32, 1024, 1.0, 0), y = numbers(MIXP_BF16, 1024, 1.0, 0);
    Pair decode = numbers(MIXP_F32, 1, 1.0, 0);
    float ignored;
    on_gpu = 1;
    mixp_quantise_args good = args_of(p, x, y), k;
    mixp_hadamard_args h = { 32, 32, args_in(ON(x)), AT(float, x) };
    good.decode = AT(float, decode);
#define REFUSES(change, code)                                                             \
    do { k = good; change;                                                                \
         CHECK_INT(gpu_kernels->quantise(&gpu_exec, &k), code);                           \
         CHECK_INT(mixp_quantise(&cpu_exec, &k, &ignored), code); } while (0)
    REFUSES(k.x.data = NULL, MIXP_ERR_ARGUMENT);
    REFUSES(k.y = NULL, MIXP_ERR_ARGUMENT);
    REFUSES(k.cols = 0, MIXP_ERR_ARGUMENT);
    REFUSES(k.element = MIXP_F16, MIXP_ERR_ARGUMENT);
    REFUSES(k.scale = MIXP_SCALE_COUNT, MIXP_ERR_ARGUMENT);
    REFUSES(k.element = MIXP_F8_E4M3; k.stochastic = 1, MIXP_ERR_ARGUMENT);
    REFUSES(k.given = -1.0f, MIXP_ERR_ARGUMENT);
    REFUSES(k.given = NAN, MIXP_ERR_ARGUMENT);
    REFUSES(k.x.dtype = MIXP_F16, MIXP_ERR_DTYPE);
    REFUSES(k.block_cols = 24, MIXP_ERR_SHAPE);
    REFUSES(k.block_rows = 16; k.block_cols = 32, MIXP_ERR_SHAPE);
    REFUSES(k.scale = MIXP_SCALE_TENSOR, MIXP_ERR_SHAPE);
    gpu_exec.scratch = no_scratch;
    CHECK_INT(gpu_kernels->quantise(&gpu_exec, &good), MIXP_ERR_MEMORY);
    gpu_exec.scratch = test_scratch;
    h.rows = 24;
    CHECK_INT(gpu_kernels->hadamard(&gpu_exec, &h), MIXP_ERR_SHAPE);
    h.rows = 32;
    h.a.dtype = MIXP_F16;
    CHECK_INT(gpu_kernels->hadamard(&gpu_exec, &h), MIXP_ERR_DTYPE);
    h.a.data = NULL;
    CHECK_INT(gpu_kernels->hadamard(&gpu_exec, &h), MIXP_ERR_ARGUMENT);
    same_bits(x);
    same_bits(y);
    same_bits(decode);
    Pair *all[] = { &x, &y, &decode };
    for (Pair *pair : all) finish(*pair);
}
static void refused(void) { in_all_schedules(refused_body); }

/* --- linear layers ---------------------------------------------------------------------------- */

struct Mode { const char *name; mixp_recipe recipe; };
static std::vector<Mode> modes(void) {
    std::vector<Mode> all;
    for (int kind = 1; kind < MIXP_RECIPE_COUNT; kind++) {
        Mode m;
        if (kind == MIXP_RECIPE_FP8_DELAYED) continue;
        memset((void *)&m, 0, sizeof m);
        m.recipe.kind = (mixp_recipe_kind)kind;
        m.name = mixp_recipe_name(m.recipe.kind);
        all.push_back(m);
    }
    Mode bare = all.back();
    bare.name = "nvfp4 without its parts";
    bare.recipe.no_stochastic = bare.recipe.no_hadamard = bare.recipe.no_2d = 1;
    all.push_back(bare);
    bare.name = "nvfp4, high wgrad";
    bare.recipe.wgrad_high = 1;
    all.push_back(bare);
    return all;
}

static mixp_context *context_on(bool gpu) {
    const char *why = "";
    mixp_context_desc desc;
    memset((void *)&desc, 0, sizeof desc);
    desc.device = gpu ? mixp_cuda(0, &why) : mixp_cpu();
    if (!desc.device) { printf("no GPU: %s\n", why); exit(cudasim::simulated ? 2 : 77); }
    desc.threads = 1;
    desc.seed = 7;
    return mixp_context_new(&desc);
}

enum { ROWS = 128, OUT = 128, IN = 256 };

/* A small whole number, which sums of products keep exact in f32. */
static float whole(uint64_t key, int64_t i)
{ return (float)((int)(mixp_random_at(key, (uint64_t)i) % 7u) - 3); }

/* The layer's result and the gradients of x, w and bias. */
static std::vector<float> layer(const mixp_recipe &recipe, bool gpu) {
    const int64_t of_x[2] = { ROWS, IN }, of_w[2] = { OUT, IN }, of_y[2] = { ROWS, OUT }, of_b = OUT;
    std::vector<float> x(ROWS * IN), g(ROWS * OUT), w(OUT * IN), b(OUT), all, part;
    for (size_t i = 0; i < x.size(); i++) x[i] = whole(1, (int64_t)i);
    for (size_t i = 0; i < w.size(); i++) w[i] = whole(2, (int64_t)i);
    for (size_t i = 0; i < g.size(); i++) g[i] = whole(3, (int64_t)i);
    mixp_context *ctx = context_on(gpu);
    mixp_tensor *px = mixp_param(ctx, "x", MIXP_F32, 2, of_x),
                *pw = mixp_param(ctx, "w", MIXP_F32, 2, of_w),
                *pb = mixp_param(ctx, "b", MIXP_F32, 1, &of_b), *y = NULL, *sum;
    CHECK_INT(mixp_write(px, x.data(), MIXP_F32, ROWS * IN), MIXP_OK);
    CHECK_INT(mixp_write(pw, w.data(), MIXP_F32, OUT * IN), MIXP_OK);
    CHECK_INT(mixp_write(pb, b.data(), MIXP_F32, OUT), MIXP_OK);
    CHECK_INT(mixp_autocast_set_recipe(ctx, &recipe), MIXP_OK);
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_BF16) y = mixp_linear(ctx, px, pw, pb);
    sum = mixp_sum(ctx, mixp_mul(ctx, y, mixp_input(ctx, MIXP_F32, 2, of_y, g.data())), MIXP_ALL, 0);
    CHECK_INT(mixp_backward(ctx, sum), MIXP_OK);
    for (mixp_tensor *t : { y, px->grad, pw->grad, pb->grad }) {
        CHECK(t != NULL);
        if (!t) continue;
        part.resize((size_t)t->count);
        CHECK_INT(mixp_read(t, part.data(), MIXP_F32, t->count), MIXP_OK);
        all.insert(all.end(), part.begin(), part.end());
    }
    CHECK_INT(mixp_autocast_recipe_counts(ctx).quantised, 1);
    CHECK_INT(mixp_autocast_recipe_counts(ctx).products, recipe.wgrad_high ? 2 : 3);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
    return all;
}

static void exact_sums(void) {
    for (const Mode &m : modes()) {
        std::vector<float> cpu = layer(m.recipe, false), gpu = layer(m.recipe, true);
        int different = 0;
        CHECK_INT(gpu.size(), cpu.size());
        for (size_t i = 0; i < cpu.size() && i < gpu.size(); i++)
            if (mixp_bits_of_f32(cpu[i]) != mixp_bits_of_f32(gpu[i]) && !different++)
                printf("  %s: element %zu is %.9g on the GPU, %.9g on the CPU\n", m.name, i,
                       (double)gpu[i], (double)cpu[i]);
        CHECK_INT(different, 0);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* --- training --------------------------------------------------------------------------------- */

enum { BATCH = 128, WIDTH = 128 };
static float batch[BATCH * WIDTH], target[BATCH * WIDTH];

struct Net {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_tensor    *w[2];
};

static Net net_of(const mixp_recipe *recipe, bool gpu) {
    const int64_t shape[2] = { WIDTH, WIDTH };
    Net n;
    n.ctx = context_on(gpu);
    n.opt = mixp_optimizer_new(n.ctx, NULL);
    for (int i = 0; i < 2; i++) {
        n.w[i] = mixp_param(n.ctx, i ? "w1" : "w0", MIXP_F32, 2, shape);
        mixp_init_normal(n.w[i], 0, 0.1);
    }
    CHECK_INT(mixp_optimizer_add_all(n.opt, "*"), MIXP_OK);
    CHECK_INT(mixp_autocast_set_recipe(n.ctx, recipe), MIXP_OK);
    return n;
}

static mixp_tensor *two_linears(mixp_context *ctx, mixp_tensor *x, void *user) {
    const Net *n = (const Net *)user;
    return mixp_linear(ctx, mixp_gelu_tanh(ctx, mixp_linear(ctx, x, n->w[0], NULL)), n->w[1], NULL);
}

static void new_batch(int t) {
    for (int i = 0; i < BATCH * WIDTH; i++) {
        batch[i] = whole((uint64_t)(10 + t), i) * 0.37f;
        target[i] = 0.5f * batch[i] + 0.1f;
    }
}

/* One step; its loss. */
static mixp_tensor *train(Net &n, bool again) {
    const int64_t shape[2] = { BATCH, WIDTH };
    mixp_tensor *loss = NULL, *h;
    mixp_step_begin(n.ctx);
    mixp_zero_grad(n.opt);
    h = mixp_input(n.ctx, MIXP_F32, 2, shape, batch);
    mixp_tensor *t = mixp_input(n.ctx, MIXP_F32, 2, shape, target);
    MIXP_AUTOCAST(n.ctx, MIXP_BF16) {
        h = again ? mixp_recompute(n.ctx, two_linears, &n, h) : two_linears(n.ctx, h, &n);
        loss = mixp_mse(n.ctx, h, t);
    }
    CHECK_INT(mixp_backward(n.ctx, loss), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(n.opt), MIXP_OK);
    return loss;
}

static std::vector<float> weights(Net &n) {
    std::vector<float> all(2 * WIDTH * WIDTH);
    for (int i = 0; i < 2; i++)
        CHECK_INT(mixp_read(n.w[i], all.data() + i * WIDTH * WIDTH, MIXP_F32, WIDTH * WIDTH), MIXP_OK);
    return all;
}

static void finish_net(Net &n) {
    const char *why = "";
    CHECK_INT(mixp_context_error(n.ctx, &why), MIXP_OK);
    if (*why) printf("  %s\n", why);
    mixp_context_free(n.ctx);
}

/* Sums in another order turn few roundings over. With `again` the GPU computes its blocks twice, and
 * its weights keep their bits. */
static void near_the_cpu(void) {
    for (const Mode &m : modes()) {
        Net cpu = net_of(&m.recipe, false), gpu = net_of(&m.recipe, true),
            twice = net_of(&m.recipe, true);
        for (int t = 0; t < 4; t++) {
            new_batch(t);
            double a = mixp_item(train(cpu, false)), b = mixp_item(train(gpu, false));
            train(twice, true);
            CHECK_NEAR(b, a, 2e-3 * a);
        }
        CHECK(weights(gpu) == weights(twice));
        finish_net(cpu);
        finish_net(gpu);
        finish_net(twice);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* A captured step: each replay is the eager step, with its own random numbers. */
static void replays(void) {
    for (const Mode &m : modes()) {
        Net eager = net_of(&m.recipe, true), played = net_of(&m.recipe, true);
        new_batch(0);
        train(eager, false);
        train(played, false);
        CHECK_INT(mixp_capture_begin(played.ctx), MIXP_OK);
        train(played, false);
        mixp_graph *graph = mixp_capture_end(played.ctx);
        CHECK(graph != NULL);
        for (int t = 1; t < 4 && graph; t++) {
            new_batch(t);
            train(eager, false);
            CHECK_INT(mixp_replay(graph), MIXP_OK);
            CHECK(weights(eager) == weights(played));
        }
        finish_net(eager);
        finish_net(played);
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* Delayed scaling keeps its state on the host: a typed error on a GPU, and nothing changes. */
static void delayed_is_refused(void) {
    mixp_context *ctx = context_on(true);
    const char *why = "";
    mixp_recipe r;
    memset((void *)&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_FP8_DELAYED;
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_ERR_DEVICE);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_DEVICE);
    CHECK(strstr(why, "use fp8_current") != NULL);
    mixp_context_free(ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

int main(void) {
    RUN(same_numbers);
    RUN(large);
    RUN(every_bf16);
    RUN(factors);
    RUN(given);
    RUN(hadamard);
    RUN(refused);
    RUN(exact_sums);
    RUN(near_the_cpu);
    RUN(replays);
    RUN(delayed_is_refused);
    return test_report();
}
