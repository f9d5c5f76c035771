/* test_cuda_replays.cpp - every kernel that draws random numbers, in a captured and replayed step.
 * Each replay draws different numbers, which equal those of the eager call with the same seed and
 * step.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"
#include <functional>
#include <vector>

typedef std::vector<unsigned char> Bytes;
typedef std::vector<Pair *>        Outputs;

enum { CAPTURED = 10, REPLAYS = 3 };

/* A capture allocates nothing: one block of scratch memory that no call outgrows. */
static Pair  block;
static void *block_scratch(void *, size_t bytes) {
    CHECK(bytes <= (size_t)block.n * sizeof(float));
    return block.gpu;
}

static Bytes taken(const Outputs &out) {
    Bytes all;
    WAIT();
    for (Pair *p : out) {
        const unsigned char *from = (const unsigned char *)p->gpu;
        all.insert(all.end(), from, from + (size_t)p->n * mixp_dtype_size(p->dtype));
        memset(p->gpu, 0x5A, (size_t)p->n * mixp_dtype_size(p->dtype));
    }
    return all;
}

static void all_differ(const Bytes *draws) {
    for (int i = 0; i < REPLAYS; i++)
        for (int j = 0; j < i; j++) CHECK(draws[i] != draws[j]);
}

/* launch(step) queues the calls of one step, which write `out`. Replays come out of order, so that
 * no replay profits from the one before. */
static void draws_anew(const Outputs &out, const std::function<void(uint64_t)> &launch) {
    static const uint64_t order[REPLAYS] = { 0, 2, 1 };
    Bytes eager[REPLAYS];
    void *graph = NULL;
    on_gpu = 1;
    taken(out);
    for (uint64_t later = 0; later < REPLAYS; later++) {
        launch(CAPTURED + later);
        eager[later] = taken(out);
    }
    all_differ(eager);
    CHECK_INT(gpu_device->capture_begin(&gpu_exec), MIXP_OK);
    launch(CAPTURED);
    CHECK_INT(gpu_device->capture_end(&gpu_exec, &graph), MIXP_OK);
    for (uint64_t later : order) {
        CHECK_INT(gpu_device->replay(&gpu_exec, graph, later), MIXP_OK);
        CHECK(taken(out) == eager[later]);
    }
    launch(CAPTURED + 1);               /* outside of captures: as it says */
    CHECK(taken(out) == eager[1]);
    gpu_device->graph_free(&gpu_exec, graph);
}

static void begin(void) {
    block = empty(MIXP_F32, 1 << 14, 0);
    gpu_exec.scratch = block_scratch;
}

/* --- attention ------------------------------------------------------------------------------ */

/* bent: with a cap and a mask of every query and key. */
struct Head { mixp_dtype dtype; int64_t t, heads, kv_heads, d; int causal, bent; };

/* Both passes of a head, on the GPU's side. */
static mixp_attention_backward_args both_passes(const Head &c, const Pair &q, const Pair &k,
                                                const Pair &v, const Pair &mask) {
    mixp_attention_backward_args back;
    memset((void *)&back, 0, sizeof back);
    mixp_attention_args &a = back.forward;
    a.b = 1; a.t = a.keys = c.t; a.heads = c.heads; a.kv_heads = c.kv_heads; a.d = c.d;
    a.q = args_in(ON(q)); a.k = args_in(ON(k)); a.v = args_in(ON(v));
    a.q_at.head = a.k_at.head = a.v_at.head = c.d;
    a.q_at.row = c.heads * c.d;
    a.k_at.row = a.v_at.row = c.kv_heads * c.d;
    a.causal = c.causal;
    a.scale = 0.2f;
    a.dropout = 0.4f;
    a.seed = 1;
    a.tensor = 7;
    if (!c.bent) return back;
    a.softcap = 5.0f;
    a.mask = args_in(ON(mask));
    a.mask_at.row = c.t;
    a.mask_key = 1;
    return back;
}

static void attend(const Head &c) {
    int64_t n = c.t * c.heads * c.d, n_kv = c.t * c.kv_heads * c.d;
    Pair q = numbers(c.dtype, n, 1.0, 0), k = numbers(c.dtype, n_kv, 1.0, 0),
         v = numbers(c.dtype, n_kv, 1.0, 0), dy = numbers(c.dtype, n, 1.0, 0),
         mask = numbers(MIXP_F32, c.t * c.t, 1.0, 0);
    Pair y = empty(c.dtype, n, 0), lse = empty(MIXP_F32, c.heads * c.t, 0),
         dq = empty(c.dtype, n, 0), dk = empty(c.dtype, n_kv, 0), dv = empty(c.dtype, n_kv, 0);
    Pair *all[] = { &q, &k, &v, &dy, &mask, &y, &lse, &dq, &dk, &dv };
    on_gpu = 1;
    mixp_attention_backward_args back = both_passes(c, q, k, v, mask);
    back.forward.y = args_out(ON(y), 0);
    back.forward.lse = AT(float, lse);
    back.dy = args_in(ON(dy)); back.dq = args_out(ON(dq), 0);
    back.dk = args_out(ON(dk), 0); back.dv = args_out(ON(dv), 0);
    draws_anew({ &y, &lse, &dq, &dk, &dv }, [&](uint64_t step) {
        back.forward.step = step;
        CHECK_INT(gpu_kernels->attention(X, &back.forward), MIXP_OK);
        CHECK_INT(gpu_kernels->attention_backward(X, &back), MIXP_OK);
    });
    for (Pair *p : all) finish(*p);
}

static void tensor_attention_body(void) {
    begin();
    for (int64_t d : { 32, 64, 128 }) {
        const Head half = { MIXP_F16, d == 64 ? 70 : 20, 1, 1, d, 1, 0 };
        const Head brain = { MIXP_BF16, 20, 2, 1, d, 0, 1 };
        attend(half);
        attend(brain);
    }
    finish(block);
}
static void tensor_attention(void) { in_all_schedules(tensor_attention_body); }

static void plain_attention_body(void) {
    const Head full = { MIXP_F32, 35, 2, 1, 20, 1, 0 }, odd = { MIXP_F16, 20, 1, 1, 13, 0, 1 };
    begin();
    attend(full);
    attend(odd);
    finish(block);
}
static void plain_attention(void) { in_all_schedules(plain_attention_body); }

/* --- the others ------------------------------------------------------------------------------- */

static void dropout_body(void) {
    begin();
    for (mixp_dtype dtype : { MIXP_F32, MIXP_F16, MIXP_BF16 })
        for (int off = 0; off < 2; off++) {
            Pair a = numbers(dtype, 1003, 1.0, off), y = empty(dtype, 1003, off);
            draws_anew({ &y }, [&](uint64_t step) {
                GPU_SAYS(dropout(X, args_dropout(1003, ON(y), 0, ON(a), 0.5f, 1, step, 2)),
                         MIXP_OK);
            });
            finish(a);
            finish(y);
        }
    finish(block);
}
static void dropout(void) { in_all_schedules(dropout_body); }

static void random_body(void) {
    begin();
    for (int kind = 0; kind < MIXP_RANDOM_COUNT; kind++) {
        Pair y = empty(MIXP_F32, 1003, 0);
        mixp_random_args k;
        memset((void *)&k, 0, sizeof k);
        k.kind = (mixp_random_kind)kind;
        k.n = 1003;
        k.at = 0.5f; k.by = 1.0f;
        k.seed = 1; k.tensor = 2;
        on_gpu = 1;
        k.y = args_out(ON(y), 0);
        draws_anew({ &y }, [&](uint64_t step) {
            k.step = step;
            GPU_SAYS(random(X, &k), MIXP_OK);
        });
        finish(y);
    }
    finish(block);
}
static void random_tensors(void) { in_all_schedules(random_body); }

/* Stochastic rounding to every dtype that has it, by the wide kernels and one by one. */
static void rounding_body(void) {
    begin();
    for (mixp_dtype to : { MIXP_F16, MIXP_BF16, MIXP_F8_E4M3, MIXP_F8_E5M2 })
        for (int off = 0; off < 2; off++) {
            Pair a = numbers(MIXP_F32, 1003, 1.0, off), y = empty(to, 1003, off);
            mixp_rounding r;
            memset((void *)&r, 0, sizeof r);
            r.stochastic = 1;
            r.seed = 3;
            r.tensor = 4;
            draws_anew({ &y }, [&](uint64_t step) {
                r.step = step;
                GPU_SAYS(convert(X, args_convert(ON(y), ON(a), 1003, &r)), MIXP_OK);
            });
            finish(a);
            finish(y);
        }
    finish(block);
}
static void rounding(void) { in_all_schedules(rounding_body); }

/* The stochastic rounding of recipes, along rows and columns. */
static void quantiser_body(void) {
    begin();
    for (int down = 0; down < 2; down++) {
        Pair a = numbers(MIXP_BF16, 48 * 80, 1.0, 0), y = empty(MIXP_BF16, 48 * 80, 0);
        mixp_quantise_args k;
        memset((void *)&k, 0, sizeof k);
        on_gpu = 1;
        k.rows = 48; k.cols = 80;
        k.x = args_in(ON(a)); k.y = AT(mixp_bf16, y);
        k.element = MIXP_F4_E2M1; k.scale = MIXP_SCALE_E4M3;
        k.block_rows = down ? 16 : 1; k.block_cols = down ? 1 : 16;
        k.stochastic = 1;
        k.seed = 5; k.tensor = 6;
        draws_anew({ &y }, [&](uint64_t step) {
            k.step = step;
            CHECK_INT(gpu_kernels->quantise(X, &k), MIXP_OK);
        });
        finish(a);
        finish(y);
    }
    finish(block);
}
static void quantiser(void) { in_all_schedules(quantiser_body); }

/* --- whole steps ------------------------------------------------------------------------------ */

enum { TIME = 16, WIDTH = 64, HEADS = 2 };

/* A block with both dropouts, whose optimizer keeps states of kind `states` and rounds them
 * stochastically; its twin runs each step by hand. */
struct Twin {
    mixp_context   *ctx;
    mixp_tensor    *qkv, *out;
    mixp_optimizer *opt;
    mixp_dtype      dtype;
};

static Twin twin_of(mixp_dtype dtype, int states) {
    const int64_t three[2] = { 3 * WIDTH, WIDTH }, square[2] = { WIDTH, WIDTH };
    mixp_context_desc desc;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    Twin w;
    memset((void *)&desc, 0, sizeof desc);
    desc.device = mixp_cuda(0, NULL);
    desc.seed = 7;
    desc.threads = 1;
    adamw.states.m = (mixp_moment_kind)states;
    adamw.states.v = (mixp_moment_kind)states;
    adamw.states.master = (mixp_master_kind)states;
    w.dtype = dtype;
    w.ctx = mixp_context_new(&desc);
    w.opt = mixp_optimizer_new(w.ctx, &adamw);
    w.qkv = mixp_param(w.ctx, "qkv", states ? MIXP_BF16 : MIXP_F32, 2, three);
    w.out = mixp_param(w.ctx, "out", states ? MIXP_BF16 : MIXP_F32, 2, square);
    for (mixp_tensor *p : { w.qkv, w.out }) {
        mixp_init_normal(p, 0, 0.1);
        CHECK_INT(mixp_optimizer_add(w.opt, p, NULL), MIXP_OK);
    }
    return w;
}

static void twin_step(const Twin &w, const float *x) {
    const int64_t shape[3] = { 1, TIME, WIDTH };
    mixp_attention_desc d;
    mixp_tensor *h, *loss = NULL;
    memset((void *)&d, 0, sizeof d);
    d.heads = HEADS;
    d.causal = 1;
    d.dropout = 0.3f;
    mixp_step_begin(w.ctx);
    mixp_zero_grad(w.opt);
    MIXP_AUTOCAST(w.ctx, w.dtype) {
        h = mixp_linear(w.ctx, mixp_input(w.ctx, MIXP_F32, 3, shape, x), w.qkv, NULL);
        h = mixp_attention_apply(w.ctx, h, NULL, NULL, &d);
        h = mixp_linear(w.ctx, mixp_dropout(w.ctx, h, 0.2f, 1), w.out, NULL);
        loss = mixp_mean(w.ctx, mixp_mul(w.ctx, h, h), MIXP_ALL, 0);
    }
    mixp_backward(w.ctx, loss);
    CHECK_INT(mixp_optimizer_step(w.opt), MIXP_OK);
}

static std::vector<float> weights_of(const Twin &w) {
    std::vector<float> all(4 * WIDTH * WIDTH);
    CHECK_INT(mixp_read(w.qkv, all.data(), MIXP_F32, 3 * WIDTH * WIDTH), MIXP_OK);
    CHECK_INT(mixp_read(w.out, all.data() + 3 * WIDTH * WIDTH, MIXP_F32, WIDTH * WIDTH), MIXP_OK);
    return all;
}

static void replayed_steps(mixp_dtype dtype, int states) {
    Twin eager = twin_of(dtype, states), played = twin_of(dtype, states);
    float x[TIME * WIDTH];
    const char *why = "";
    for (int i = 0; i < TIME * WIDTH; i++) x[i] = (float)(i * 7 % 23) / 11.0f - 1.0f;
    twin_step(eager, x);
    twin_step(played, x);
    CHECK_INT(mixp_capture_begin(played.ctx), MIXP_OK);
    twin_step(played, x);
    mixp_graph *graph = mixp_capture_end(played.ctx);
    CHECK(graph != NULL);
    for (int i = 0; i < 3 && graph; i++) {
        twin_step(eager, x);
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        CHECK(weights_of(eager) == weights_of(played));
    }
    CHECK_INT(mixp_context_error(played.ctx, &why), MIXP_OK);
    CHECK_TEXT(why, "");
    mixp_context_free(eager.ctx);
    mixp_context_free(played.ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

static void whole_steps(void) {
    for (int states = 0; states < 3; states++) {
        replayed_steps(MIXP_BF16, states);
        replayed_steps(MIXP_F32, states);
    }
    replayed_steps(MIXP_F16, 0);
}

int main(void) {
    RUN(tensor_attention);
    RUN(plain_attention);
    RUN(dropout);
    RUN(random_tensors);
    RUN(rounding);
    RUN(quantiser);
    RUN(whole_steps);
    return test_report();
}
