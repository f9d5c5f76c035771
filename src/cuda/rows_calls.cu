#pragma once
#include "rows.cu"

/* A job on k; all other fields are 0. */
template <class Job, class Args> static Job mixpi_cuda_job(const Args &k) {
    Job job;
    memset((void *)&job, 0, sizeof job);
    (Args &)job = k;
    return job;
}

/* A missing array may have any dtype. */
template <class A> static bool mixpi_cuda_may_be(const A &a) { return !a.data || is_real(a.dtype); }

static mixp_result mixpi_cuda_softmax(const mixp_exec *x, const mixp_softmax_args *k) {
    Kernel on(x);
    SoftmaxJob job = mixpi_cuda_job<SoftmaxJob>(*k);
    job.wide = is_wide(k->y) && is_wide(k->a);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->y.dtype) || !is_real(k->a.dtype)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate) return MIXP_ERR_ARGUMENT;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    return on.launched("softmax", MIXPI_ROWS(softmax_rows, on, job));
}

static mixp_result mixpi_cuda_softmax_backward(const mixp_exec *x,
                                               const mixp_softmax_backward_args *k) {
    Kernel on(x);
    SoftmaxBackJob job = mixpi_cuda_job<SoftmaxBackJob>(*k);
    job.wide = is_wide(k->da) && is_wide(k->dy) && is_wide(k->y);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->da.dtype) || !is_real(k->dy.dtype) || !is_real(k->y.dtype))
        return MIXP_ERR_DTYPE;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    return on.launched("softmax_backward", MIXPI_ROWS(softmax_back_rows, on, job));
}

static NormJob mixpi_cuda_norm_job(const mixp_norm_args *k) {
    NormJob job = mixpi_cuda_job<NormJob>(*k);
    double power = 1.0;
    while (power < (double)k->cols) power *= 2.0;
    job.share = (float)(1.0 / power);
    job.back = k->cols > 0 ? (float)(power / (double)k->cols) : 1.0f;
    job.rest = k->cols > 0 ? (float)(power / (double)k->cols - (double)job.back) : 0.0f;
    if (k->rms) job.beta.data = NULL;
    job.wide = is_wide(k->y) && is_wide(k->a) && is_wide(k->gamma) && is_wide(job.beta);
    return job;
}
static mixp_result mixpi_cuda_norm_check(const NormJob &job) {
    if (!is_real(job.y.dtype) || !is_real(job.a.dtype) || !mixpi_cuda_may_be(job.gamma) ||
        !mixpi_cuda_may_be(job.beta))
        return MIXP_ERR_DTYPE;
    return job.y.accumulate ? MIXP_ERR_ARGUMENT : MIXP_OK;
}

static mixp_result mixpi_cuda_norm(const mixp_exec *x, const mixp_norm_args *k) {
    Kernel on(x);
    NormJob job = mixpi_cuda_norm_job(k);
    mixp_result r = mixpi_cuda_norm_check(job);
    if (!on.state) return MIXP_ERR_ORDER;
    if (r != MIXP_OK) return r;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    NormKernel kept = norm_kernel(job);
    if (kept)
        return on.launched("norm", MIXPI_LAUNCH(kept, grid_for(k->rows * warp_size, team_threads),
                                                team_threads, 0, on.stream, job));
    return on.launched("norm", MIXPI_ROWS(norm_rows, on, job));
}

/* Computes the sum in a separate kernel, then its norm. */
static mixp_result mixpi_cuda_add_then_norm(const mixp_exec *x, const mixp_norm_args *k) {
    mixp_norm_args norm = *k;
    mixp_binary_args sum;
    memset((void *)&sum, 0, sizeof sum);
    sum.op = MIXP_BINARY_ADD;
    sum.rank = 1;
    sum.shape[0] = k->rows * k->cols;
    sum.a_strides[0] = sum.b_strides[0] = 1;
    sum.a = k->a;
    sum.b = k->b;
    sum.y = k->sum;
    norm.a = as_in(k->sum);
    mixp_result r = mixpi_cuda_binary(x, &sum);
    return r == MIXP_OK ? mixpi_cuda_norm(x, &norm) : r;
}

static mixp_result mixpi_cuda_add_norm(const mixp_exec *x, const mixp_norm_args *k) {
    Kernel on(x);
    NormJob job = mixpi_cuda_norm_job(k);
    mixp_result r = mixpi_cuda_norm_check(job);
    job.wide = job.wide && is_wide(k->b) && is_wide(k->sum);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->b.dtype) || !is_real(k->sum.dtype)) return MIXP_ERR_DTYPE;
    if (r != MIXP_OK || k->sum.accumulate) return r != MIXP_OK ? r : MIXP_ERR_ARGUMENT;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    NormKernel kept = add_norm_kernel(job);
    if (!kept) return mixpi_cuda_add_then_norm(x, k);
    return on.launched("add_norm", MIXPI_LAUNCH(kept, grid_for(k->rows * warp_size, team_threads),
                                                team_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_norm_back_slices(Kernel *on, const NormBackJob &job, int64_t slices) {
    int64_t threads = round_up(ceil_div(job.cols, 8), warp_size);
    return on->launched("norm_backward",
                        MIXPI_LAUNCH(norm_back_kernel(job), (unsigned)slices,
                                     (unsigned)least(threads, back_threads), 0, on->stream, job));
}

static mixp_result mixpi_cuda_norm_backward(const mixp_exec *x, const mixp_norm_backward_args *k) {
    Kernel on(x);
    NormBackJob job = mixpi_cuda_job<NormBackJob>(*k);
    bool sums = k->dgamma.data || k->dbeta.data;
    int64_t slices;
    mixp_result r = MIXP_OK;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->dy.dtype) || !is_real(k->a.dtype) || !mixpi_cuda_may_be(k->gamma) ||
        !mixpi_cuda_may_be(k->da) || !mixpi_cuda_may_be(k->dgamma) ||
        !mixpi_cuda_may_be(k->dbeta) || !mixpi_cuda_may_be(k->db))
        return MIXP_ERR_DTYPE;
    if (k->db.data && (!k->da.data || k->da.dtype != MIXP_F32 || k->db.accumulate))
        return MIXP_ERR_ARGUMENT;
    job.wide =
        is_wide(k->da) && is_wide(k->dy) && is_wide(k->a) && is_wide(k->gamma) && is_wide(k->db);
    job.per = ceil_div(k->rows, most_slices);
    if (sums && job.per < 4) job.per = 4;
    slices = ceil_div(k->rows, job.per > 0 ? job.per : 1);
    if (sums) job.partial = (float *)scratch_of(x, (size_t)(slices * 2 * k->cols) * sizeof(float));
    if (sums && !job.partial) return MIXP_ERR_MEMORY;
    if (k->cols <= 0) return MIXP_OK;
    if (k->rows > 0 && (sums || k->da.data)) r = mixpi_cuda_norm_back_slices(&on, job, slices);
    if (r != MIXP_OK || !sums) return r;
    return on.launched("norm_backward",
                       MIXPI_LAUNCH(norm_back_join, dim3((unsigned)ceil_div(k->cols, join_cols), 2),
                                    join_cols * join_rows, 0, on.stream, job, slices));
}

static mixp_result mixpi_cuda_embedding(const mixp_exec *x, const mixp_embedding_args *k) {
    Kernel on(x);
    EmbeddingJob job = mixpi_cuda_job<EmbeddingJob>(*k);
    job.fault = fault_flag(on.state);
    job.wide = is_wide(k->y) && is_wide(k->table);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->y.dtype) || !is_real(k->table.dtype)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate || (k->rows > 0 && k->vocab <= 0)) return MIXP_ERR_ARGUMENT;
    if (k->rows <= 0) return MIXP_OK;
    return on.launched("embedding",
                       MIXPI_LAUNCH(embedding_rows, grid_for(k->rows * warp_size, team_threads),
                                    team_threads, 0, on.stream, job));
}

/* Lays the lists out in memory, unless memory is NULL. Returns the bytes that they need. */
static size_t mixpi_cuda_carve_sorted(Sorted *to, const mixp_embedding_backward_args *k,
                                      void *memory) {
    if (memory) {
        to->list = (int64_t *)memory;
        to->order = to->list + k->rows;
        to->start = to->order + k->rows;
    }
    return (size_t)(2 * k->rows + k->vocab + 1) * sizeof(int64_t);
}

static mixp_result mixpi_cuda_embedding_sums(Kernel *on, const EmbeddingBackJob &job,
                                             const Sorted &by) {
    int64_t threads = least(round_up(job.cols, warp_size), team_threads);
    return on->launched("embedding_backward",
                        MIXPI_LAUNCH(embedding_sums,
                                     grid_for(job.vocab * ceil_div(job.cols, threads), 1),
                                     (unsigned)threads, 0, on->stream, job, by));
}

static mixp_result mixpi_cuda_embedding_backward(const mixp_exec *x,
                                                 const mixp_embedding_backward_args *k) {
    Kernel on(x);
    EmbeddingBackJob job = mixpi_cuda_job<EmbeddingBackJob>(*k);
    Sorted to = { NULL, NULL, NULL };
    int64_t each = least(ceil_div(k->vocab, id_blocks), team_threads);
    void *memory;
    mixp_result r;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->dtable.dtype) || !is_real(k->dy.dtype)) return MIXP_ERR_DTYPE;
    if (k->rows > 0 && k->vocab <= 0) return MIXP_ERR_ARGUMENT;
    if (k->vocab <= 0) return MIXP_OK;
    job.fault = fault_flag(on.state);
    memory = scratch_of(x, mixpi_cuda_carve_sorted(&to, k, NULL));
    if (!memory) return MIXP_ERR_MEMORY;
    mixpi_cuda_carve_sorted(&to, k, memory);
    r = on.launched("embedding_backward",
                    MIXPI_LAUNCH(embedding_sort, (unsigned)ceil_div(k->vocab, each), team_threads,
                                 0, on.stream, job, to, each));
    return r == MIXP_OK && k->cols > 0 ? mixpi_cuda_embedding_sums(&on, job, to) : r;
}

static cudaError_t mixpi_cuda_entropy(const Kernel &on, const EntropyJob &job) {
    switch (job.logits.dtype) {
    case MIXP_F16: return MIXPI_TYPED_ROWS(entropy_rows, MIXP_F16, on, job);
    case MIXP_BF16: return MIXPI_TYPED_ROWS(entropy_rows, MIXP_BF16, on, job);
    default: return MIXPI_TYPED_ROWS(entropy_rows, MIXP_F32, on, job);
    }
}

static cudaError_t mixpi_cuda_entropy_back(const Kernel &on, const EntropyBackJob &job) {
    if (job.logits.dtype == MIXP_F16 && job.dlogits.dtype == MIXP_F16)
        return MIXPI_TYPED_ROWS(entropy_back_rows, MIXP_F16, on, job);
    if (job.logits.dtype == MIXP_BF16 && job.dlogits.dtype == MIXP_BF16)
        return MIXPI_TYPED_ROWS(entropy_back_rows, MIXP_BF16, on, job);
    return MIXPI_TYPED_ROWS(entropy_back_rows, any_real, on, job);
}

static mixp_result mixpi_cuda_cross_entropy(const mixp_exec *x, const mixp_cross_entropy_args *k) {
    Kernel on(x);
    EntropyJob job = mixpi_cuda_job<EntropyJob>(*k);
    mixp_result r = MIXP_OK;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->logits.dtype)) return MIXP_ERR_DTYPE;
    job.fault = fault_flag(on.state);
    job.wide = is_wide(k->logits);
    job.losses = (double *)scratch_of(x, (size_t)k->rows * sizeof(double));
    if (!job.losses) return MIXP_ERR_MEMORY;
    if (k->rows > 0) r = on.launched("cross_entropy", mixpi_cuda_entropy(on, job));
    if (r != MIXP_OK || k->each) return r;
    return on.launched("cross_entropy", MIXPI_LAUNCH(entropy_mean, 1, 1024, 0, on.stream, job));
}

static mixp_result mixpi_cuda_cross_entropy_backward(const mixp_exec *x,
                                                     const mixp_cross_entropy_backward_args *k) {
    Kernel on(x);
    EntropyBackJob job = mixpi_cuda_job<EntropyBackJob>(*k);
    job.fault = fault_flag(on.state);
    job.wide = is_wide(k->dlogits) && is_wide(k->logits);
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->dlogits.dtype) || !is_real(k->dloss.dtype) || !is_real(k->logits.dtype))
        return MIXP_ERR_DTYPE;
    if (k->rows <= 0 || k->cols <= 0) return MIXP_OK;
    return on.launched("cross_entropy_backward", mixpi_cuda_entropy_back(on, job));
}

template <mixp_dtype D>
static cudaError_t mixpi_cuda_entropy_both_of(const Kernel &on, const EntropyBothJob &job) {
    auto kernel = job.cols <= warp_cols ? entropy_both_rows<warp_size, D>
                                        : entropy_both_rows<team_threads, D>;
    int64_t team = job.cols <= warp_cols ? warp_size : team_threads;
    /* If rows stay in shared memory, launches only as many blocks as run at once: each block loads
     * its next row while it computes. */
    int64_t most = job.kept ? 2 * (int64_t)on.state->processors : INT64_MAX;
    int64_t blocks = least(grid_for(job.rows * team, team_threads), most);
    size_t room = job.kept ? (size_t)job.kept + beside_row : 0;
    cudaError_t e = make_room(on.state, (const void *)kernel, room);
    if (e != cudaSuccess) return e;
    return MIXPI_LAUNCH(kernel, (unsigned)blocks, team_threads, (size_t)job.kept, on.stream, job);
}
static cudaError_t mixpi_cuda_entropy_both(const Kernel &on, const EntropyBothJob &job) {
    switch (job.logits.dtype) {
    case MIXP_F16: return mixpi_cuda_entropy_both_of<MIXP_F16>(on, job);
    case MIXP_BF16: return mixpi_cuda_entropy_both_of<MIXP_BF16>(on, job);
    default: return mixpi_cuda_entropy_both_of<MIXP_F32>(on, job);
    }
}

/* The bytes of a row that stays in shared memory, next to the memory for a block's sums. */
static int mixpi_cuda_kept_row(const EntropyBothJob &job, int most) {
    int64_t bytes = job.cols * dtype_bytes(job.logits.dtype);
    bool fits = job.wide && job.cols % 8 == 0 && bytes <= most - beside_row;
    return fits && job.cols > warp_cols ? (int)bytes : 0;
}

static mixp_result mixpi_cuda_cross_entropy_both(const mixp_exec *x,
                                                 const mixp_cross_entropy_both_args *k) {
    Kernel on(x);
    EntropyBothJob job = mixpi_cuda_job<EntropyBothJob>(k->loss);
    mixp_result r;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(job.logits.dtype) || !is_real(k->dlogits.dtype)) return MIXP_ERR_DTYPE;
    if (k->dlogits.accumulate || mixpi_entropy_has_options(&k->loss)) return MIXP_ERR_ARGUMENT;
    job.fault = fault_flag(on.state);
    job.dlogits = k->dlogits;
    job.scale = k->scale;
    job.share = k->share;
    job.wide = is_wide(job.logits) && is_wide(job.dlogits);
    job.kept = mixpi_cuda_kept_row(job, on.state->most_shared);
    job.losses = (double *)scratch_of(x, (size_t)job.rows * sizeof(double));
    if (!job.losses) return MIXP_ERR_MEMORY;
    r = on.launched("cross_entropy", MIXPI_LAUNCH(entropy_count, 1, 1024, 0, on.stream, job));
    if (r == MIXP_OK && job.rows > 0)
        r = on.launched("cross_entropy", mixpi_cuda_entropy_both(on, job));
    if (r != MIXP_OK) return r;
    return on.launched("cross_entropy",
                       MIXPI_LAUNCH(entropy_mean, 1, 1024, 0, on.stream, (const EntropyJob &)job));
}

static mixp_result mixpi_cuda_max(const mixp_exec *x, const mixp_max_args *k) {
    Kernel on(x);
    int64_t columns = k->outer * k->inner;
    int lanes = columns < 4096 || k->inner == 1 ? warp_size : 1;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !mixpi_cuda_may_be(k->y)) return MIXP_ERR_DTYPE;
    if (k->n < 1 || k->n > 0x7FFFFFFF || !k->index || k->y.accumulate) return MIXP_ERR_ARGUMENT;
    if (columns <= 0) return MIXP_OK;
    return on.launched("max", MIXPI_LAUNCH(max_columns, grid_for(columns * lanes, team_threads),
                                           team_threads, 0, on.stream, *k, lanes));
}

static mixp_result mixpi_cuda_max_backward(const mixp_exec *x, const mixp_max_backward_args *k) {
    Kernel on(x);
    int64_t count = k->outer * k->n * k->inner;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->dy.dtype) || !is_real(k->da.dtype) || (k->shared && !is_real(k->a.dtype)))
        return MIXP_ERR_DTYPE;
    if (!k->index || (k->shared && !k->ties)) return MIXP_ERR_ARGUMENT;
    if (count <= 0) return MIXP_OK;
    return on.launched("max_backward", MIXPI_LAUNCH(max_back, grid_for(count, team_threads),
                                                    team_threads, 0, on.stream, *k));
}

static mixp_result mixpi_cuda_gather(const mixp_exec *x, const mixp_gather_args *k) {
    Kernel on(x);
    GatherJob job = mixpi_cuda_job<GatherJob>(*k);
    int64_t count = k->outer * k->m * k->inner;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !is_real(k->y.dtype)) return MIXP_ERR_DTYPE;
    if (k->y.accumulate || (count > 0 && k->n <= 0)) return MIXP_ERR_ARGUMENT;
    if (count <= 0) return MIXP_OK;
    job.fault = fault_flag(on.state);
    return on.launched("gather", MIXPI_LAUNCH(gather_elements, grid_for(count, team_threads),
                                              team_threads, 0, on.stream, job));
}

static mixp_result mixpi_cuda_gather_backward(const mixp_exec *x, const mixp_gather_args *k) {
    Kernel on(x);
    GatherJob job = mixpi_cuda_job<GatherJob>(*k);
    int64_t columns = k->outer * k->inner;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !is_real(k->y.dtype)) return MIXP_ERR_DTYPE;
    if (!k->y.accumulate) return MIXP_ERR_ARGUMENT;
    if (columns <= 0 || k->m <= 0) return MIXP_OK;
    job.fault = fault_flag(on.state);
    return on.launched("gather_backward", MIXPI_LAUNCH(gather_back, grid_for(columns, team_threads),
                                                       team_threads, 0, on.stream, job));
}

static bool mixpi_cuda_comparable(const mixp_in &a) {
    return a.data && (is_real(a.dtype) || a.dtype == MIXP_U8 || a.dtype == MIXP_I32);
}

static mixp_result mixpi_cuda_compare(const mixp_exec *x, const mixp_compare_args *k) {
    Kernel on(x);
    CompareJob job;
    if ((unsigned)k->how >= MIXP_COMPARE_COUNT || k->rank < 0 || k->rank > MIXP_MAX_RANK || !k->y)
        return MIXP_ERR_ARGUMENT;
    if (!mixpi_cuda_comparable(k->a) || !mixpi_cuda_comparable(k->b)) return MIXP_ERR_DTYPE;
    if (!on.state) return MIXP_ERR_ORDER;
    memset((void *)&job, 0, sizeof job);
    Axes axes = dense_axes(k->rank, k->shape);
    for (int i = 0; i < k->rank; i++) {
        axes.s[1][i] = k->a_strides[i];
        axes.s[2][i] = k->b_strides[i];
    }
    job.how = k->how;
    job.axes = merged(axes);
    job.count = count_of(axes);
    job.a = k->a;
    job.b = k->b;
    job.y = k->y;
    if (job.count <= 0) return MIXP_OK;
    return on.launched("compare", MIXPI_LAUNCH(compare_elements, grid_for(job.count, team_threads),
                                               team_threads, 0, on.stream, job));
}

/* The ranks of a pass and of the next one take turns in two halves of scratch memory. */
static mixp_result mixpi_cuda_merged(Kernel *on, const mixp_exec *x, const mixp_topk_args *k) {
    MergeJob job = mixpi_cuda_job<MergeJob>(*k);
    int64_t count = k->rows * k->cols, pieces = k->rows * ceil_div(k->cols, sort_room);
    uint64_t *ranks = (uint64_t *)scratch_of(x, (size_t)(2 * count) * sizeof(uint64_t));
    if (!ranks) return MIXP_ERR_MEMORY;
    job.to = ranks;
    mixp_result r = on->launched(
        "topk", MIXPI_LAUNCH(topk_pieces, grid_for(pieces, 1), team_threads, 0, on->stream, job));
    for (job.width = sort_room; r == MIXP_OK && job.width < k->cols; job.width *= 2) {
        job.from = job.to;
        job.to = job.from == ranks ? ranks + count : ranks;
        if (2 * job.width >= k->cols) job.to = NULL;
        r = on->launched("topk", MIXPI_LAUNCH(topk_merge, grid_for(count, team_threads),
                                              team_threads, 0, on->stream, job));
    }
    return r;
}

static mixp_result mixpi_cuda_topk(const mixp_exec *x, const mixp_topk_args *k) {
    Kernel on(x);
    int64_t count = k->rows * k->cols;
    if (!is_real(k->a.dtype)) return MIXP_ERR_DTYPE;
    if (k->k < 1 || k->k > k->cols || k->cols > 0x7FFFFFFF || !k->index) return MIXP_ERR_ARGUMENT;
    if (!on.state) return MIXP_ERR_ORDER;
    if (count <= 0) return MIXP_OK;
    if (k->cols <= topk_short)
        return on.launched("topk", MIXPI_LAUNCH(topk_places, grid_for(count, team_threads),
                                                team_threads, 0, on.stream, *k));
    if (!topk_is_sorted(*k)) return mixpi_cuda_merged(&on, x, k);
    return on.launched(
        "topk", MIXPI_LAUNCH(topk_sorted, grid_for(k->rows, 1), team_threads, 0, on.stream, *k));
}

static mixp_result mixpi_cuda_rope(const mixp_exec *x, const mixp_rope_args *k) {
    Kernel on(x);
    RopeJob job = mixpi_cuda_job<RopeJob>(*k);
    int64_t angles = k->t * (k->d / 2), pairs = k->rows * k->heads * angles;
    mixp_result r;
    if (!on.state) return MIXP_ERR_ORDER;
    if (!is_real(k->a.dtype) || !is_real(k->y.dtype)) return MIXP_ERR_DTYPE;
    if (k->d < 2 || k->d % 2 || !(k->base > 0.0)) return MIXP_ERR_ARGUMENT;
    if (pairs <= 0) return MIXP_OK;
    job.cosine = (float *)scratch_of(x, (size_t)(2 * angles) * sizeof(float));
    if (!job.cosine) return MIXP_ERR_MEMORY;
    job.sine = job.cosine + angles;
    r = on.launched("rope", MIXPI_LAUNCH(rope_angles, grid_for(angles, team_threads), team_threads,
                                         0, on.stream, job));
    if (r != MIXP_OK) return r;
    return on.launched("rope", MIXPI_LAUNCH(rope_pairs, grid_for(pairs, team_threads), team_threads,
                                            0, on.stream, job));
}
#undef MIXPI_ROWS
#undef MIXPI_PARTS

