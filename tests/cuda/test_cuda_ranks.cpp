/* test_cuda_ranks.cpp - ranks on the simulated GPU: agreement without the host, also in a graph.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The hooks are kernels on the context's stream. The other rank of this world of two has the same
 * gradients as this rank, so their mean equals the gradients of a single rank, bit for bit. A
 * context without ranks is the reference.
 */
#include "cuda_pair.h"
#include <unistd.h>
#include <vector>

/* --- the kernel ---------------------------------------------------------------------------- */

enum { RANKS = 5, LOOKS = 3 };

static mixp_step_state look_of(int found, int64_t row, int64_t element, double norm, float largest) {
    mixp_step_state s;
    memset((void *)&s, 0, sizeof s);
    s.stats.found_inf = found;
    s.stats.bad_row = row;
    s.stats.bad_element = element;
    s.stats.norm = norm;
    s.stats.largest = largest;
    return s;
}

static void *given(const void *host, size_t bytes) {
    void *p = gpu_device->allocate(&gpu_exec, bytes);
    CHECK_INT(gpu_device->upload(&gpu_exec, p, host, bytes), MIXP_OK);
    return p;
}

/* Fills on both sides, then reads a table in which the others' rows stand too. */
static void kernel_body(void) {
    mixp_step_plan plan;
    memset((void *)&plan, 0, sizeof plan);
    plan.groups[0].lr = 0.25;
    for (int i = 0; i < 8; i++) {
        mixp_step_state looks[LOOKS], step = look_of(i == 3, 1, 7, 3.0 + i, 2.0f), from_gpu;
        const int64_t first[LOOKS] = { 0, 4, 9 };
        double table[RANKS * MIXP_AGREE_WORDS], back[RANKS * MIXP_AGREE_WORDS];
        mixp_scaler_state scaler;
        mixp_agree_args cpu, on;
        memset((void *)&scaler, 0, sizeof scaler);
        scaler.scale = 512;
        step.applied = 11;
        for (int k = 0; k < LOOKS; k++) looks[k] = look_of(i % 2 && k >= 1, 2 + k, 40 + k, 0, 0);
        memset(table, 0x7F, sizeof table);
        memset((void *)&cpu, 0, sizeof cpu);
        cpu.plan = &plan;
        cpu.looks = looks;
        cpu.first_leaf = first;
        cpu.n_looks = LOOKS;
        cpu.scaler = i == 5 ? NULL : &scaler;
        cpu.step = &step;
        cpu.table = table;
        cpu.rank = i % RANKS;
        cpu.size = RANKS;
        on = cpu;
        on.looks = (const mixp_step_state *)given(looks, sizeof looks);
        on.first_leaf = (const int64_t *)given(first, sizeof first);
        on.scaler = i == 5 ? NULL : (mixp_scaler_state *)given(&scaler, sizeof scaler);
        on.step = (mixp_step_state *)given(&step, sizeof step);
        on.table = (double *)given(table, sizeof table);
        CHECK_INT(cpu_kernels->agree(&cpu_exec, &cpu), MIXP_OK);
        CHECK_INT(gpu_kernels->agree(&gpu_exec, &on), MIXP_OK);
        CHECK_INT(gpu_device->download(&gpu_exec, back, on.table, sizeof back), MIXP_OK);
        CHECK(memcmp(back, table, sizeof back) == 0);
        CHECK_NEAR(table[cpu.rank * MIXP_AGREE_WORDS + MIXP_AGREE_SCALE], i == 5 ? 1 : 512, 0);
        CHECK_NEAR(table[cpu.rank * MIXP_AGREE_WORDS + MIXP_AGREE_LEAF], i % 2 ? 4 + 3 : 0, 0);
        for (int r = 0; r < RANKS; r++) {       /* the others tell the same, but for some */
            double *row = table + r * MIXP_AGREE_WORDS, *own = table + cpu.rank * MIXP_AGREE_WORDS;
            if (r != cpu.rank) memcpy(row, own, MIXP_AGREE_WORDS * sizeof *row);
            row[MIXP_AGREE_LARGEST] = r;
            if (i == 6) row[MIXP_AGREE_NORM] += r == 2;
            if (i == 7 && r == 1) row[MIXP_AGREE_FORWARD] = 1;
            if (i == 4) row[MIXP_AGREE_APPLIED] += r >= 3;
        }
        CHECK_INT(gpu_device->upload(&gpu_exec, on.table, table, sizeof table), MIXP_OK);
        cpu.reads = on.reads = 1;
        CHECK_INT(cpu_kernels->agree(&cpu_exec, &cpu), MIXP_OK);
        CHECK_INT(gpu_kernels->agree(&gpu_exec, &on), MIXP_OK);
        CHECK_INT(gpu_device->download(&gpu_exec, &from_gpu, on.step, sizeof from_gpu), MIXP_OK);
        CHECK(memcmp(&from_gpu, &step, sizeof step) == 0);
        CHECK_NEAR(step.stats.largest, 4, 0);
        CHECK_NEAR(step.stats.norm, 3.0 + i, 0);
        CHECK_INT(step.stats.found_inf, i == 3);
        CHECK_INT(step.agreed.bad_rank, i % 2);
        CHECK_INT(step.agreed.bad_leaf, i % 2 ? 7 : 0);
        CHECK_INT(step.agreed.bad_element, i % 2 ? 41 : 0);
        CHECK_INT(step.agreed.differs, i == 4 ? 4 : i == 6 ? 3 : 0);
        CHECK_NEAR(step.agreed.there, i == 4 ? 12 : i == 6 ? 10 : 0, 0);
        gpu_device->release(&gpu_exec, (void *)on.looks);
        gpu_device->release(&gpu_exec, (void *)on.first_leaf);
        if (on.scaler) {
            mixp_scaler_state seen;
            CHECK_INT(gpu_device->download(&gpu_exec, &seen, on.scaler, sizeof seen), MIXP_OK);
            CHECK(memcmp(&seen, &scaler, sizeof seen) == 0);
            CHECK_INT(scaler.loss_bad, i == 7);
            gpu_device->release(&gpu_exec, on.scaler);
        }
        gpu_device->release(&gpu_exec, on.step);
        gpu_device->release(&gpu_exec, on.table);
    }
}
static void kernel(void) { in_all_schedules(kernel_body); }

/* Each rank has looked at its part of the sums alone: a norm of all parts, and the first bad row, of
 * which the lowest rank has the beginning. */
static void parts_body(void) {
    static const double norms[RANKS] = { 3, 0, 4, 12, 84 };     /* 3 4 12 84: 85 */
    static const int64_t rows[RANKS] = { -1, 7, 2, 2, 9 };
    mixp_step_plan plan;
    double table[RANKS * MIXP_AGREE_WORDS], own[RANKS * MIXP_AGREE_WORDS], back[RANKS * MIXP_AGREE_WORDS];
    mixp_step_state step, from_gpu;
    mixp_agree_args cpu, on;
    memset((void *)&plan, 0, sizeof plan);
    memset((void *)&cpu, 0, sizeof cpu);
    memset(table, 0, sizeof table);
    cpu.plan = on.plan = &plan;
    cpu.size = RANKS;
    cpu.in_parts = 1;
    cpu.step = &step;
    for (int r = 0; r < RANKS; r++) {
        step = look_of(rows[r] >= 0, rows[r], rows[r] < 0 ? -1 : 30 + r, norms[r], (float)r);
        step.stats.bad_is_nan = r == 2;
        cpu.rank = r;
        cpu.table = own;
        on = cpu;
        on.step = (mixp_step_state *)given(&step, sizeof step);
        on.table = (double *)given(own, sizeof own);
        CHECK_INT(cpu_kernels->agree(&cpu_exec, &cpu), MIXP_OK);
        CHECK_INT(gpu_kernels->agree(&gpu_exec, &on), MIXP_OK);
        CHECK_INT(gpu_device->download(&gpu_exec, back, on.table, sizeof back), MIXP_OK);
        CHECK(memcmp(back, own, sizeof back) == 0);
        for (int i = 0; i < RANKS * MIXP_AGREE_WORDS; i++) table[i] += own[i];
        gpu_device->release(&gpu_exec, on.step);
        gpu_device->release(&gpu_exec, on.table);
    }
    cpu.table = table;
    cpu.reads = 1;
    on = cpu;
    on.step = (mixp_step_state *)given(&step, sizeof step);
    on.table = (double *)given(table, sizeof table);
    CHECK_INT(cpu_kernels->agree(&cpu_exec, &cpu), MIXP_OK);
    CHECK_INT(gpu_kernels->agree(&gpu_exec, &on), MIXP_OK);
    CHECK_INT(gpu_device->download(&gpu_exec, &from_gpu, on.step, sizeof from_gpu), MIXP_OK);
    CHECK(memcmp(&from_gpu, &step, sizeof step) == 0);
    CHECK_NEAR(step.stats.norm, 85, 0);
    CHECK_INT(step.stats.found_inf, 1);
    CHECK_INT(step.stats.bad_row, 2);
    CHECK_INT(step.stats.bad_element, 32);
    CHECK_INT(step.stats.bad_is_nan, 1);
    CHECK_INT(step.agreed.part_rank, 3);
    CHECK_INT(step.agreed.differs, 0);          /* norms of parts may */
    table[3 * MIXP_AGREE_WORDS + MIXP_AGREE_HERE] = 1;
    CHECK_INT(cpu_kernels->agree(&cpu_exec, &cpu), MIXP_OK);
    CHECK_INT(step.agreed.differs, 4);
    CHECK_INT(step.agreed.word, MIXP_AGREE_HERE);
    gpu_device->release(&gpu_exec, on.step);
    gpu_device->release(&gpu_exec, on.table);
}
static void kernel_of_parts(void) { in_all_schedules(parts_body); }

/* --- a world of two ------------------------------------------------------------------------- */

__global__ void twice(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= 2;
}
/* The other rank's row is this one's, but that *bad says whether it met an Inf in leaf 1. */
__global__ void other_row(const double *own, double *other, int64_t words, const int32_t *bad) {
    for (int64_t i = 0; i < words; i++) other[i] = own[i];
    if (words != MIXP_AGREE_WORDS || !*bad) return;
    other[MIXP_AGREE_FOUND] = other[MIXP_AGREE_BAD] = 1;
    other[MIXP_AGREE_LEAF] = 1;
    other[MIXP_AGREE_ELEMENT] = 3;
}

struct World { int32_t *bad; int sums, rank, pieces; };

/* Of a sum of pieces: this rank's, and what nobody may read of the other's. */
__global__ void own_piece(float *x, int64_t n, int rank) {
    for (int64_t i = 0; i < 2 * n; i++) x[i] = i / n == rank ? 2 * x[i] : INFINITY;
}
static const char *world_pieces(void *user, void *data, int64_t count, mixp_dtype, void *stream, double) {
    World *w = (World *)user;
    w->pieces++;
    MIXPI_LAUNCH(own_piece, 1, 1, 0, (cudaStream_t)stream, (float *)data, count, w->rank);
    return cudaPeekAtLastError() == cudaSuccess ? NULL : "the kernel could not be launched";
}

static const char *world_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double) {
    World *w = (World *)user;
    cudaStream_t on = (cudaStream_t)stream;
    w->sums++;
    double *own = (double *)data + w->rank * (count / 2), *other = (double *)data + (1 - w->rank) * (count / 2);
    if (dtype == MIXP_I32) return NULL;         /* rank 0's bytes: the other one adds zeros */
    if (dtype == MIXP_F64)
        MIXPI_LAUNCH(other_row, 1, 1, 0, on, (const double *)own, other, count / 2, (const int32_t *)w->bad);
    else
        MIXPI_LAUNCH(twice, 1, 1, 0, on, (float *)data, count);
    return cudaPeekAtLastError() == cudaSuccess ? NULL : "the kernel could not be launched";
}

struct Net {
    mixp_context   *ctx;
    mixp_tensor    *w[3], *h, *code;    /* h: the mean of the ranks; code: rank 0's */
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    float           x[8 * 16], y[8 * 4];
};

static double clip_at = 1.0;

static void net_open(Net *n, const mixp_ranks_desc *ranks, mixp_dtype dtype) {
    const int64_t shape[3][2] = { { 32, 16 }, { 32, 32 }, { 4, 32 } };
    const int64_t h_shape[2] = { 8, 32 }, codes = 37;
    const char *names[3] = { "a", "b", "c" };
    mixp_context_desc d;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_scaler_desc s;
    memset(&d, 0, sizeof d);
    memset((void *)&s, 0, sizeof s);
    d.device = mixp_cuda(0, NULL);
    d.seed = 3;
    d.ranks = ranks;
    adamw.max_norm = clip_at;
    s.init_scale = 256;
    n->ctx = mixp_context_new(&d);
    n->opt = mixp_optimizer_new(n->ctx, &adamw);
    n->scaler = mixp_scaler_new(n->ctx, &s);
    for (int i = 0; i < 3; i++) {
        n->w[i] = mixp_param(n->ctx, names[i], dtype, 2, shape[i]);
        mixp_init_normal(n->w[i], 0, 0.2);
        mixp_optimizer_add(n->opt, n->w[i], NULL);
    }
    n->h = mixp_buffer(n->ctx, "h", MIXP_BF16, 2, h_shape);
    n->code = mixp_buffer(n->ctx, "code", MIXP_U8, 1, &codes);
    mixp_buffer_set_ranks(n->h, MIXP_BUFFER_MEAN);
    mixp_buffer_set_ranks(n->code, ranks && ranks->rank ? MIXP_BUFFER_OWN : MIXP_BUFFER_RANK_0);
}

static void net_batch(Net *n, int step) {
    for (int i = 0; i < 8 * 16; i++) n->x[i] = (float)((i * 7 + step * 5) % 11) / 11 - 0.4f;
    for (int i = 0; i < 8 * 4; i++) n->y[i] = (float)((i + step) % 3) - 1;
}

static void net_train(Net *n) {
    const int64_t in[2] = { 8, 16 }, out[2] = { 8, 4 };
    mixp_context *c = n->ctx;
    mixp_tensor *h = NULL, *loss = NULL;
    mixp_step_begin(c);
    mixp_zero_grad(n->opt);
    MIXP_AUTOCAST(c, MIXP_F16) {
        h = mixp_relu(c, mixp_linear(c, mixp_input(c, MIXP_F32, 2, in, n->x), n->w[0], NULL));
        h = mixp_relu(c, mixp_linear(c, h, n->w[1], NULL));
        loss = mixp_mse(c, mixp_linear(c, h, n->w[2], NULL), mixp_input(c, MIXP_F32, 2, out, n->y));
    }
    mixp_backward(c, mixp_scaler_scale(n->scaler, loss));
    mixp_copy(n->h, h);
    mixp_write(n->code, n->x, MIXP_U8, 37);
    mixp_scaler_step(n->scaler, n->opt);
    mixp_scaler_update(n->scaler);
}

static void net_fine(const Net *n) {
    const char *why;
    if (mixp_context_error(n->ctx, &why) == MIXP_OK) return;
    test_bad++;
    TEST_SHOW("%s", why);
}

/* The newest applied step of `a` has written its batch into `code`. */
static void buffers_same(const Net *a, const Net *b) {
    static float x[8 * 32], y[8 * 32];
    CHECK_INT(mixp_read(a->h, x, MIXP_F32, a->h->count), MIXP_OK);
    CHECK_INT(mixp_read(b->h, y, MIXP_F32, b->h->count), MIXP_OK);
    CHECK(memcmp(x, y, (size_t)a->h->count * sizeof *x) == 0);
    CHECK_INT(mixp_read(a->code, x, MIXP_U8, a->code->count), MIXP_OK);
    CHECK_INT(mixp_read(b->code, y, MIXP_U8, b->code->count), MIXP_OK);
    CHECK(memcmp(x, y, (size_t)a->code->count) == 0);
    CHECK(memcmp(x, a->x, (size_t)a->code->count) == 0);
}

static void net_same(const Net *a, const Net *b) {
    static float x[32 * 32], y[32 * 32];
    for (int i = 0; i < 3; i++) {
        CHECK_INT(mixp_read(a->w[i], x, MIXP_F32, a->w[i]->count), MIXP_OK);
        CHECK_INT(mixp_read(b->w[i], y, MIXP_F32, b->w[i]->count), MIXP_OK);
        CHECK(memcmp(x, y, (size_t)a->w[i]->count * sizeof *x) == 0);
    }
    buffers_same(a, b);
    CHECK_NEAR(mixp_scaler_loss_scale(a->scaler), mixp_scaler_loss_scale(b->scaler), 0);
    net_fine(a);
    net_fine(b);
}

static void set_bad(World *w, int32_t bad) {
    CHECK_INT(cudaMemcpy(w->bad, &bad, sizeof bad, cudaMemcpyHostToDevice), cudaSuccess);
}

static mixp_ranks_desc world_of_two(World *w) {
    mixp_ranks_desc d;
    memset(&d, 0, sizeof d);
    d.size = 2;
    d.sum = world_sum;
    d.user = w;
    d.bucket_bytes = 2048;
    CHECK_INT(cudaMalloc((void **)&w->bad, sizeof *w->bad), cudaSuccess);
    set_bad(w, 0);
    w->sums = w->rank = w->pieces = 0;
    return d;
}

/* A step neither waits for the GPU nor allocates, has the bits of one rank, and is skipped on the
 * word of the other. Then the same as a graph, whose replays call no hook. */
static void steps_of(mixp_dtype dtype, mixp_ranks_mean mean) {
    World w;
    mixp_ranks_desc ranks = world_of_two(&w);
    cudasim::Count before = cudasim::count;
    Net a, b;
    ranks.mean = mean;
    net_open(&a, NULL, dtype);
    net_open(&b, &ranks, dtype);
    for (int i = 0; i < 4; i++) {
        net_batch(&a, i);
        net_batch(&b, i);
        net_train(&a);
        if (i == 2) before = cudasim::count;
        net_train(&b);
    }
    CHECK_INT(cudasim::count.resources, before.resources);
    net_same(&a, &b);
    CHECK_INT(mixp_capture_begin(b.ctx), MIXP_OK);
    net_train(&b);
    mixp_graph *graph = mixp_capture_end(b.ctx);
    CHECK(graph != NULL);
    net_fine(&b);
    w.sums = 0;
    for (int i = 4; i < 7; i++) {
        net_batch(&a, i);
        net_batch(&b, i);
        net_train(&a);
        CHECK_INT(mixp_replay(graph), MIXP_OK);
    }
    CHECK_INT(w.sums, 0);
    net_same(&a, &b);
    set_bad(&w, 1);                         /* the other rank has met an Inf */
    net_batch(&b, 9);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    buffers_same(&a, &b);
    CHECK_INT(mixp_optimizer_applied(b.opt), 7);
    CHECK_NEAR(mixp_scaler_loss_scale(b.scaler), 128, 0);
    mixp_verdict v = mixp_optimizer_verdict(b.opt);
    CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(v.bad_rank, 1);
    CHECK_TEXT(v.bad_tensor, "b");          /* backward meets c, b, a */
    CHECK_INT(v.bad_element, 3);
    set_bad(&w, 0);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    CHECK_INT(mixp_optimizer_applied(b.opt), 8);
    net_fine(&b);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    CHECK_INT(cudaFree(w.bad), cudaSuccess);
    CHECK_INT(cudasim::leaks(), 0);
}
static void steps(void) { steps_of(MIXP_F32, MIXP_MEAN_BEFORE); }
static void steps_of_low_gradients(void) { steps_of(MIXP_F16, MIXP_MEAN_AFTER); }

/* The hooks run on the context's stream, and no step waits. */
static void no_waits(void) {
    NEEDS_SIMULATION;
    World w;
    mixp_ranks_desc ranks = world_of_two(&w);
    cudasim::Count before = cudasim::count;
    Net n;
    net_open(&n, &ranks, MIXP_F32);
    for (int i = 0; i < 2; i++) { net_batch(&n, i); net_train(&n); }
    cudasim::eager = true;
    before = cudasim::count;
    for (int i = 2; i < 5; i++) { net_batch(&n, i); net_train(&n); }
    CHECK_INT(cudasim::count.waits, before.waits);
    CHECK_INT(cudasim::count.resources, before.resources);
    cudasim::eager = false;
    net_fine(&n);
    mixp_context_free(n.ctx);
    CHECK_INT(cudaFree(w.bad), cudaSuccess);
}

/* ZeRO-1: a rank updates its piece of a and of b, and rank 0 all of c, which is small, with the bits
 * of one rank. Nobody sends the others: they are written after each step. */
static const char *no_gather(void *, void *, int64_t, mixp_dtype, void *, double) { return NULL; }

static void step_of(Net *n, int in_graph) {
    if (!in_graph) {
        net_train(n);
        return;
    }
    CHECK_INT(mixp_capture_begin(n->ctx), MIXP_OK);
    net_train(n);
    mixp_graph *graph = mixp_capture_end(n->ctx);
    CHECK(graph != NULL);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
}

static void shards_of(mixp_dtype dtype, int rank, int steps, int scatter) {
    static float want[32 * 32], got[32 * 32];
    World w;
    mixp_ranks_desc ranks = world_of_two(&w);
    Net a, b;
    w.rank = ranks.rank = rank;
    ranks.shard = 1;
    ranks.all_gather = no_gather;
    ranks.reduce_scatter = world_pieces;
    ranks.scatter = scatter;
    net_open(&a, NULL, dtype);
    net_open(&b, &ranks, dtype);
    for (int step = 0; step < steps; step++) {
        net_batch(&a, step);
        net_batch(&b, step);
        net_train(&a);
        step_of(&b, scatter && step && step == steps - 1);
        for (int i = 0; i < 3; i++) {
            int64_t n = a.w[i]->count, half = n / 2, first = i < 2 ? rank * half : 0;
            int64_t own = i < 2 ? half : rank ? 0 : n;
            CHECK_INT(mixp_read(a.w[i], want, MIXP_F32, n), MIXP_OK);
            CHECK_INT(mixp_read(b.w[i], got, MIXP_F32, n), MIXP_OK);
            CHECK(memcmp(want + first, got + first, (size_t)own * sizeof *got) == 0);
            mixp_write(b.w[i], want, MIXP_F32, n);
        }
    }
    CHECK_INT(w.pieces, scatter ? 2 * steps : 0);      /* of a and b */
    net_fine(&a);
    net_fine(&b);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
    cudaFree(w.bad);
}

/* The other's pieces of the sums are spoilt: nothing may read them. The last step is a graph. */
static void scattered(void) {
    clip_at = 0;                        /* this world's parts make no norm */
    for (int rank = 0; rank < 2; rank++) {
        shards_of(MIXP_F32, rank, 4, 1);
        shards_of(MIXP_F16, rank, 1, 1);
    }
    clip_at = 1.0;
}

static void shards(void) {
    for (int rank = 0; rank < 2; rank++) {
        shards_of(MIXP_F32, rank, 4, 0);
        shards_of(MIXP_BF16, rank, 1, 0);   /* a master weight would be rounded by what is written */
    }
}

/* A step of many ranks writes weights but none of their low copies: a graph makes these anew, though
 * they were fresh when it was recorded. */
static void low_copies_in_a_graph(void) {
    static float before[32 * 16], low[32 * 16];
    const int n = 32 * 16;
    World w;
    mixp_ranks_desc ranks = world_of_two(&w);
    Net a;
    w.rank = ranks.rank = 0;
    ranks.shard = 1;
    ranks.all_gather = no_gather;
    net_open(&a, &ranks, MIXP_F32);
    net_batch(&a, 0);
    net_train(&a);
    mixp_tensor *copy = mixp_tensor_low(a.w[0], MIXP_F16);
    CHECK_INT(mixp_capture_begin(a.ctx), MIXP_OK);
    net_train(&a);
    mixp_graph *graph = mixp_capture_end(a.ctx);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    CHECK_INT(mixp_read(a.w[0], before, MIXP_F32, n), MIXP_OK);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    CHECK_INT(mixp_read(copy, low, MIXP_F32, n), MIXP_OK);
    for (int i = 0; i < n; i++) CHECK(low[i] == mixp_f32_from_f16(mixp_f16_from_f32(before[i])));
    for (int turn = 0; turn < 2; turn++) {      /* and so does who reads them after a replay */
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        CHECK_INT(mixp_read(a.w[0], before, MIXP_F32, n), MIXP_OK);
        CHECK_INT(mixp_read(mixp_tensor_low(a.w[0], MIXP_F16), low, MIXP_F32, n), MIXP_OK);
        for (int i = 0; i < n; i++) CHECK(low[i] == mixp_f32_from_f16(mixp_f16_from_f32(before[i])));
    }
    net_fine(&a);
    mixp_context_free(a.ctx);
    cudaFree(w.bad);
}

/* --- delayed scaling ------------------------------------------------------------------------ */

/* The other rank's row of amax: that of x is 4 times this rank's, that of w a quarter. Tables of other
 * sizes are equal. */
__global__ void other_amax(const double *own, double *other, int64_t words) {
    for (int64_t i = 0; i < words; i++)
        other[i] = words != 3 ? own[i] : i == 0 ? 4 * own[i] : i == 1 ? own[i] / 4 : own[i];
}
static const char *amax_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double d) {
    double *own = (double *)data;
    if (dtype != MIXP_F64) return world_sum(user, data, count, dtype, stream, d);
    MIXPI_LAUNCH(other_amax, 1, 1, 0, (cudaStream_t)stream, own, own + count / 2, count / 2);
    return cudaPeekAtLastError() == cudaSuccess ? NULL : "the kernel could not be launched";
}

static void one_linear(mixp_context *ctx, mixp_tensor *w, mixp_optimizer *opt, float x0) {
    const int64_t shape[2] = { 16, 16 };
    static float x[256];
    mixp_tensor *y = NULL;
    for (int i = 0; i < 256; i++) x[i] = i ? 0.5f : x0;
    mixp_step_begin(ctx);
    mixp_zero_grad(opt);
    MIXP_AUTOCAST(ctx, MIXP_BF16)
        y = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, shape, x), w, NULL);
    mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0));
    mixp_optimizer_step(opt);
}

/* Scales [3] and history [3, 4] of w. */
static void delayed_state(mixp_context *ctx, float *all) {
    static const char *const names[] = { "mixprec.recipe.scales.w", "mixprec.recipe.amax_history.w" };
    mixp_safetensors *file = NULL;
    mixp_checkpoint c;
    char path[64];
    memset((void *)&c, 0, sizeof c);
    c.ctx = ctx;
    snprintf(path, sizeof path, "/tmp/mixprec_cuda_ranks.%d", (int)getpid());
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(path, &file, NULL, 0), MIXP_OK);
    for (int i = 0; i < 2 && file; i++) {
        const mixp_st_entry *e = mixp_safetensors_find(file, names[i]);
        CHECK(e && e->bytes == (i ? 48u : 12u));
        if (e && e->bytes <= 48) memcpy(all + 3 * i, e->data, e->bytes);
    }
    mixp_safetensors_free(file);
    remove(path);
}

/* The scales come from the largest amax of both ranks. A capture would have to wait: refused. */
static void delayed_scaling(void) {
    const int64_t shape[2] = { 16, 16 };
    World w;
    mixp_ranks_desc ranks = world_of_two(&w);
    mixp_context_desc d;
    mixp_recipe r;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    std::vector<float> ones(256, 2.0f);
    float state[15] = { 0 };
    const char *why = "";
    memset(&d, 0, sizeof d);
    memset((void *)&r, 0, sizeof r);
    r.kind = MIXP_RECIPE_FP8_DELAYED;
    r.history = 4;
    sgd.lr = 0;
    ranks.sum = amax_sum;
    d.device = mixp_cuda(0, NULL);
    d.ranks = &ranks;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_tensor *p = mixp_param(ctx, "w", MIXP_F32, 2, shape);
    CHECK_INT(mixp_write(p, ones.data(), MIXP_F32, 256), MIXP_OK);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    mixp_optimizer_add(opt, p, NULL);
    CHECK_INT(mixp_autocast_set_recipe(ctx, &r), MIXP_OK);
    one_linear(ctx, p, opt, 3.0f);
    one_linear(ctx, p, opt, 1.0f);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_OK);
    if (*why) TEST_SHOW("%s", why);
    delayed_state(ctx, state);
    const float want[15] = { 448.0f / 12, 448.0f / 2, 57344.0f,
                             0, 0, 12, 4, 0, 0, 2, 2, 0, 0, 1, 1 };
    for (int i = 0; i < 15; i++) CHECK_NEAR(state[i], want[i], 0);
    CHECK_INT(mixp_capture_begin(ctx), MIXP_OK);
    one_linear(ctx, p, opt, 1.0f);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_ORDER);
    CHECK_TEXT(why, "run each step without capturing, or use fp8_current");
    CHECK(mixp_capture_end(ctx) == NULL);
    mixp_context_free(ctx);
    CHECK_INT(cudaFree(w.bad), cudaSuccess);
}

int main(void) {
    RUN(kernel);
    RUN(kernel_of_parts);
    RUN(steps);
    RUN_LATER(steps_of_low_gradients);
    RUN(no_waits);
    RUN(shards);
    RUN_LATER(scattered);
    RUN(low_copies_in_a_graph);
    RUN(delayed_scaling);
    return test_report();
}
