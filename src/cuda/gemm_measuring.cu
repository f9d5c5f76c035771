#pragma once
#include "gemm.cu"

/* --- measuring ------------------------------------------------------------------------- *
 *
 * If the program asks for it, the first product of a plan times each algorithm and puts the fastest
 * first. A training step runs on a hot GPU, whose clock is lower than that of a cool one, and the
 * fastest algorithm may be another. So the first measurement of a context warms the GPU up. The
 * algorithms alternate, and the median of each counts. Trials write to the product's own c, unless
 * the product accumulates: then to other memory.
 */
namespace {

const int   measured_rounds = 5, measured_runs = 2, most_warm_runs = 2000;
const float warm_ms = 200.0f;
const float worth_it = 0.98f;   /* of the first one's time: a smaller gain is noise           */

/* Milliseconds of each algorithm, or of one other way, in each round. */
struct Trials { float ms[most_algorithms][measured_rounds]; };

inline bool is_measured(const State *s, const Plan *plan) {
    return !s->measure || s->capture || plan->measured || plan->given || !is_usable(plan);
}

inline float median_of(const float *ms) {
    float sorted[measured_rounds];
    for (int i = 0; i < measured_rounds; i++) {
        int at = i;
        for (; at > 0 && sorted[at - 1] > ms[i]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = ms[i];
    }
    return sorted[measured_rounds / 2];
}

/* *ms: the time of measured_runs runs, after another run. Waits for the GPU. */
template <class Run> inline mixp_result time_of(Kernel *k, const Run &run, float *ms) {
    cudaEvent_t from = NULL, to = NULL;
    cudaError_t e = cudaEventCreateWithFlags(&from, cudaEventDefault);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&to, cudaEventDefault);

    /* Run once, then between the two events. */
    run();
    *ms = INFINITY;
    float taken = INFINITY;
    if (e == cudaSuccess) e = cudaEventRecord(from, k->stream);
    for (int i = 0; i < measured_runs && e == cudaSuccess; i++) run();
    if (e == cudaSuccess) e = cudaEventRecord(to, k->stream);
    if (e == cudaSuccess) e = cudaEventSynchronize(to);
    if (e == cudaSuccess) e = cudaEventElapsedTime(&taken, from, to);
    if (e == cudaSuccess) *ms = taken;

    if (from) clear_error(cudaEventDestroy(from));
    if (to) clear_error(cudaEventDestroy(to));
    return k->report("gemm", e);
}

/* *ms: the time of one algorithm, INFINITY if cuBLASLt refuses it. */
inline mixp_result algorithm_time(Kernel *k, const Product &p, Plan *plan, int which, float *ms) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    const auto run = [&] {
        if (status == CUBLAS_STATUS_SUCCESS) status = product_call(k, p, plan, which);
    };
    const cudaError_t before = cudaPeekAtLastError();
    mixp_result r = time_of(k, run, ms);
    if (status != CUBLAS_STATUS_SUCCESS) *ms = INFINITY;
    if (r != MIXP_OK || status == CUBLAS_STATUS_SUCCESS) return r;
    if (!is_refusal(status)) return report_failure(k->state, status);
    clear_refusal(before);
    return MIXP_OK;
}

/* Runs the plan's first algorithm for warm_ms, once in a context. */
inline mixp_result warm_up(Kernel *k, const Product &p, Plan *plan) {
    if (k->state->warm) return MIXP_OK;
    k->state->warm = true;

    /* How long does a run take? */
    float ms = INFINITY;
    mixp_result r = algorithm_time(k, p, plan, plan->at, &ms);
    if (r != MIXP_OK || !(ms < warm_ms)) return r;

    const float runs = warm_ms * measured_runs / ms;
    const int count = runs < most_warm_runs ? (int)runs : most_warm_runs;
    for (int i = 0; i < count; i++)
        if (product_call(k, p, plan, plan->at) != CUBLAS_STATUS_SUCCESS) break;
    return MIXP_OK;
}

/* Times each algorithm once: round `round`, forwards or backwards. */
inline mixp_result algorithms_time(Kernel *k, const Product &p, Plan *plan, Trials *t, int round) {
    for (int i = plan->at; i < plan->count; i++) {
        const int which = round % 2 ? plan->count - 1 - (i - plan->at) : i;
        mixp_result r = algorithm_time(k, p, plan, which, &t->ms[which][round]);
        if (r != MIXP_OK) return r;
    }
    return MIXP_OK;
}

/* Puts the fastest algorithm first, if that is worth it. Returns the time of the first one then. */
inline float algorithms_order(Plan *plan, const Trials &t) {
    float ms[most_algorithms];
    for (int i = plan->at; i < plan->count; i++) ms[i] = median_of(t.ms[i]);
    int best = plan->at;
    for (int i = plan->at; i < plan->count; i++)
        if (ms[i] < ms[best]) best = i;
    if (!(ms[best] < ms[plan->at] * worth_it)) best = plan->at;
    cublasLtMatmulAlgo_t first = plan->algorithms[best];
    plan->algorithms[best] = plan->algorithms[plan->at];
    plan->algorithms[plan->at] = first;
    return ms[best];
}

/* Memory for the c of trials; *c NULL: trials write to the product's own c. Returns false: out of
 * memory, no trials. */
inline bool trial_memory(State *s, const mixp_gemm_args &g, void **c) {
    int64_t n = (g.batch - 1) * g.stride_c + (g.m - 1) * g.ldc + g.n;
    *c = NULL;
    if (!g.c.accumulate) return true;
    return memory_new(s, (size_t)(n * dtype_bytes(g.c.dtype)), c) == MIXP_OK;
}

inline mixp_result product_measure(Kernel *k, const Product &p, Plan *plan) {
    if (is_measured(k->state, plan)) return MIXP_OK;
    mixp_result r = check_stream(k->state, "gemm");
    if (r != MIXP_OK) return r;
    plan->measured = true;

    /* The trials' own c. */
    Product trial = p;
    void *c = NULL;
    if (plan->count - plan->at < 2 || !trial_memory(k->state, p.g, &c)) return MIXP_OK;
    if (c) trial.g.c.data = c;

    /* The algorithms alternate. */
    Trials t;
    if (product_point(trial, plan)) {
        r = warm_up(k, trial, plan);
        for (int i = 0; i < measured_rounds && r == MIXP_OK; i++)
            r = algorithms_time(k, trial, plan, &t, i);
        if (r == MIXP_OK) algorithms_order(plan, t);
    }
    if (c) memory_free(k->state, c);
    return r;
}

inline mixp_result product_finish(Kernel *k, const mixp_gemm_args &g, const Product &p) {
    Matrix c = matrix_c(g), sums = matrix_c(p.g);
    int64_t n = c.count * c.rows * ceil_div(c.cols, 8);
    return k->report("gemm", MIXPI_LAUNCH(gemm_finish, grid_for(n, 256), 256, 0, k->stream, g.c, c,
                                 sums, g.bias, has_aligned_rows(c)));
}

/* Tries cuBLASLt, with operands packed as needed. *done: cuBLASLt ran the product. */
inline mixp_result product_try(
    const mixp_exec *x, Kernel *k, const mixp_gemm_args &g, Product p, bool *done) {
    Plan *plan = NULL;
    mixp_result r = plan_of(k->state, p, &plan);
    if (r != MIXP_OK || !is_usable(plan)) return r;
    char *scratch = NULL;
    if (p.bytes && !(scratch = (char *)scratch_of(x, p.bytes))) return MIXP_ERR_MEMORY;

    /* Pack, measure if wanted, multiply, and finish what cuBLASLt cannot. */
    r = product_pack(k, g, &p, scratch);
    if (r == MIXP_OK) r = product_measure(k, p, plan);
    if (r == MIXP_OK) r = product_run(k, p, plan);
    *done = r == MIXP_OK && is_usable(plan);
    return *done && p.finish ? product_finish(k, g, p) : r;
}

inline mixp_result product_by_tiles(Kernel *k, const mixp_gemm_args &g) {
    int64_t tiles = ceil_div(g.m, tile_side) * ceil_div(g.n, tile_side) * g.batch;
    return k->report("gemm",
        MIXPI_LAUNCH(gemm_tiles, (unsigned)least(tiles, 65536), tile_threads, 0, k->stream, g));
}

/* Tries cuBLASLt with the operands as they are, then with packed operands, then our own kernel,
 * which is 50 times slower and is counted to make it visible. */
inline mixp_result product_any(const mixp_exec *x, Kernel *k, const mixp_gemm_args &g) {
    mixp_gemm_count *count = &k->state->products;
    bool done = false;
    mixp_result r = product_try(x, k, g, product_of(g, false), &done);
    if (r == MIXP_OK && done) {
        count->direct++;
        return MIXP_OK;
    }

    if (r == MIXP_OK) r = product_try(x, k, g, product_of(g, true), &done);
    if (r == MIXP_OK && done) {
        count->packed++;
        return MIXP_OK;
    }

    if (r != MIXP_OK) return r;
    count->plain++;
    return product_by_tiles(k, g);
}

/* Matrices [first, first + count) of a batch. */
inline mixp_gemm_args batch_slice(const mixp_gemm_args &g, int64_t first, int64_t count) {
    mixp_gemm_args part = g;
    part.batch = count;
    part.a.data = byte_at(g.a, first * g.stride_a);
    part.b.data = byte_at(g.b, first * g.stride_b);
    part.c.data = byte_at(g.c, first * g.stride_c);
    return part;
}

}   /* namespace */

static mixp_result mixpi_cuda_gemm(const mixp_exec *x, const mixp_gemm_args *g) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    if (g->m <= 0 || g->n <= 0 || g->batch <= 0) return MIXP_OK;
    if (!is_real(g->c.dtype) || (g->bias.data && !is_real(g->bias.dtype)) ||
        (g->k > 0 && (!is_real(g->a.dtype) || !is_real(g->b.dtype))))
        return MIXP_ERR_DTYPE;

    /* With alpha 0 cuBLASLt does not read the operands, and their NaNs would be lost. */
    if (g->k <= 0 || (g->alpha == 0.0f && !g->alpha_at)) return product_by_tiles(&k, *g);

    mixp_result r = open_products(k.state);
    for (int64_t z = 0; z < g->batch && r == MIXP_OK; z += most_batch)
        r = product_any(x, &k, batch_slice(*g, z, least(most_batch, g->batch - z)));
    return r;
}
