#pragma once
#include "optimizers.cu"

/* --- update ---------------------------------------------------------------------------- *
 *
 * Weights, moments and low copies get the CPU's bits: mixpi_adam_element and its relatives round
 * explicitly, so the compiler has nothing to contract. States of fewer bytes are widened before
 * these functions and narrowed after them. 16 threads share a block of 8-bit states, so all threads
 * of a warp go through a row together; threads past its end have no elements.
 */
namespace {

static_assert(MIXP_STATE_BLOCK == 16 * 8, "half a warp has a block of states");
static_assert(chunk_size % MIXP_STATE_BLOCK == 0, "a chunk has whole blocks of states");

/* May all arrays of a parameter be read 8 elements at a time? */
__device__ inline bool is_wide_row(const mixp_param_row &row) {
    uintptr_t all = (uintptr_t)row.weight | (uintptr_t)row.master | (uintptr_t)row.grad |
                    (uintptr_t)row.m | (uintptr_t)row.v | (uintptr_t)row.low_f16 |
                    (uintptr_t)row.low_bf16 | (uintptr_t)row.third;
    return all % 16 == 0;
}

/* 8 codes of a state. */
template <class T> struct alignas(8 * sizeof(T)) Eight { T code[8]; };

template <class T>
__device__ inline Eight<T> get_codes(const void *from, int64_t i, int n, bool wide) {
    const T *p = (const T *)from + i;
    Eight<T> e = {};
    if (wide && n == 8) return *(const Eight<T> *)(const void *)p;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k < n) e.code[k] = p[k];
    return e;
}
template <class T>
__device__ inline void put_codes(void *to, int64_t i, int n, bool wide, const Eight<T> &e) {
    T *p = (T *)to + i;
    if (wide && n == 8) {
        *(Eight<T> *)(void *)p = e;
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        if (k < n) p[k] = e.code[k];
}

/* 8 elements of a row: their places, their states as f32, and their random numbers. */
struct Cell {
    int64_t  i;
    int      n;
    bool     wide;
    float    rate;              /* of the row                                              */
    float    g[8], p[8], m[8], v[8];
    uint32_t random[8];
};

/* The maximum over the 16 threads that share a block of states. */
__device__ inline uint32_t half_warp_max(uint32_t x) {
    MIXPI_UNROLL
    for (int k = 8; k; k /= 2) {
        uint32_t y = __shfl_xor_sync(0xFFFFFFFFu, x, k);
        x = x > y ? x : y;
    }
    return x;
}
/* The largest finite magnitude of a block. */
__device__ inline uint32_t block_largest(const Cell &c, const float *x) {
    uint32_t largest = 0;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        uint32_t size = k < c.n ? mixpi_state_size(x[k]) : 0u;
        largest = largest > size ? largest : size;
    }
    return half_warp_max(largest);
}

__device__ inline void get_blocks(const mixp_param_row &row, Cell &c, bool second) {
    const uint8_t *scales = second ? row.v_scale : row.m_scale;
    const Eight<uint8_t> e = get_codes<uint8_t>(second ? row.v : row.m, c.i, c.n, c.wide);
    const uint32_t scale = c.n > 0 ? scales[c.i / MIXP_STATE_BLOCK] : 15u;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (second) c.v[k] = mixpi_state_v_value(e.code[k], scale);
        else c.m[k] = mixpi_state_m_value(e.code[k], scale);
    }
}
__device__ inline void put_m_blocks(const mixp_param_row &row, const Cell &c) {
    const uint32_t scale = mixpi_state_scale_m(block_largest(c, c.m));
    Eight<uint8_t> e;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        e.code[k] = (uint8_t)mixpi_state_m(c.m[k], scale, mixpi_random_m(c.random[k]));
    put_codes(row.m, c.i, c.n, c.wide, e);
    if (c.n > 0) row.m_scale[c.i / MIXP_STATE_BLOCK] = (uint8_t)scale;
}
__device__ inline void put_v_blocks(const mixp_param_row &row, const Cell &c) {
    /* Scale the roots by the largest of their block. */
    float root[8];
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) root[k] = sqrtf(c.v[k]);
    const uint32_t scale = mixpi_state_scale_v(block_largest(c, root));

    Eight<uint8_t> e;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        e.code[k] = (uint8_t)mixpi_state_v(root[k], scale, mixpi_random_v(c.random[k]));
    put_codes(row.v, c.i, c.n, c.wide, e);
    if (c.n > 0) row.v_scale[c.i / MIXP_STATE_BLOCK] = (uint8_t)scale;
}

/* Stores as bf16, rounded with the random bits at `shift` in the elements' words. */
__device__ inline void put_bf16(void *to, const Cell &c, const float *x, int shift) {
    Eight<uint16_t> e;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        e.code[k] = (uint16_t)mixpi_state_bf16(x[k], c.random[k] >> shift & 0xFFFFu);
    put_codes(to, c.i, c.n, c.wide, e);
}

template <bool with_small> __device__ inline void get_moments(const mixp_param_row &row, Cell &c) {
    if (with_small && row.m_scale) get_blocks(row, c, false);
    else if (row.m) get8_any(mixp_in{ row.m, row.m_dtype }, c.i, c.n, c.wide, c.m);
    if (with_small && row.v_scale) get_blocks(row, c, true);
    else if (row.v) get8_any(mixp_in{ row.v, row.v_dtype }, c.i, c.n, c.wide, c.v);
}
template <bool with_small>
__device__ inline void put_moments(const mixp_param_row &row, const Cell &c) {
    if (with_small && row.m_scale) put_m_blocks(row, c);
    else if (with_small && row.m && row.m_dtype == MIXP_BF16) put_bf16(row.m, c, c.m, 0);
    else if (row.m) put8_any(array_at(row.m, MIXP_F32), c.i, c.n, c.wide, c.m);
    if (with_small && row.v_scale) put_v_blocks(row, c);
    else if (with_small && row.v && row.v_dtype == MIXP_BF16) put_bf16(row.v, c, c.v, 16);
    else if (row.v) put8_any(array_at(row.v, MIXP_F32), c.i, c.n, c.wide, c.v);
}

/* Does the row's master store only the bits that its bf16 weight lacks? */
__device__ inline bool is_split(const mixp_param_row &row) {
    return row.master && row.master_dtype != MIXP_F32;
}

__device__ inline void get_split(const mixp_param_row &row, Cell &c) {
    Eight<uint16_t> w = get_codes<uint16_t>(row.weight, c.i, c.n, c.wide);
    if (row.master_dtype == MIXP_BF16) {
        Eight<uint16_t> rest = get_codes<uint16_t>(row.master, c.i, c.n, c.wide);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) c.p[k] = mixpi_master_from_16(w.code[k], rest.code[k]);
        return;
    }
    Eight<uint8_t> rest = get_codes<uint8_t>(row.master, c.i, c.n, c.wide);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) c.p[k] = mixpi_master_from_8(w.code[k], rest.code[k]);
}
__device__ inline void put_split(const mixp_param_row &row, const Cell &c) {
    /* Split each weight into bf16 and the rest, of 16 or 8 bits. */
    Eight<uint16_t> w, wide_rest;
    Eight<uint8_t> rest;
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        uint32_t random = mixpi_random_master(c.random[k]);
        mixpi_master_parts parts = row.master_dtype == MIXP_BF16
                                       ? mixpi_master_to_16(c.p[k])
                                       : mixpi_master_to_8(c.p[k], random);
        w.code[k] = (uint16_t)parts.weight;
        wide_rest.code[k] = (uint16_t)parts.rest;
        rest.code[k] = (uint8_t)parts.rest;
    }

    put_codes(row.weight, c.i, c.n, c.wide, w);
    if (row.master_dtype == MIXP_BF16) put_codes(row.master, c.i, c.n, c.wide, wide_rest);
    else put_codes(row.master, c.i, c.n, c.wide, rest);
}

template <bool with_small> __device__ inline void get_weight(const mixp_param_row &row, Cell &c) {
    mixp_in weight = { row.weight, row.weight_dtype };
    mixp_in master = { row.master, MIXP_F32 };
    if (with_small && is_split(row)) get_split(row, c);
    else get_of_row(row, row.master ? master : weight, c.i, c.n, c.wide, c.p);
}
template <bool with_small>
__device__ inline void put_weight(const mixp_param_row &row, const Cell &c) {
    /* Store the master, or the weight that has none; then the weight beside a whole master. */
    mixp_out weight = array_at(row.weight, row.weight_dtype);
    mixp_out master = array_at(row.master, MIXP_F32);
    if (with_small && is_split(row)) put_split(row, c);
    else put_of_row(row, row.master ? master : weight, c.i, c.n, c.wide, c.p);
    if (row.master && weight.dtype != MIXP_F32 && !(with_small && is_split(row)))
        put_of_row(row, weight, c.i, c.n, c.wide, c.p);

    /* Store the low copies. */
    if (row.low_f16) put8_any(array_at(row.low_f16, MIXP_F16), c.i, c.n, c.wide, c.p);
    if (row.low_bf16) put8_any(array_at(row.low_bf16, MIXP_BF16), c.i, c.n, c.wide, c.p);
}

/* The update of 8 elements by their optimizer. Each case has its own loop: a pointer that may be
 * NULL would move the moments out of the registers. */
__device__ inline void update_sgd(const mixp_step_scalars &u, bool momentum, Cell &c) {
    if (momentum) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_sgd_element(&u, c.g[k], &c.p[k], &c.m[k]);
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_sgd_element(&u, c.g[k], &c.p[k], NULL);
    }
}
__device__ inline void update_rms(const mixp_step_scalars &u, bool momentum, Cell &c) {
    if (momentum) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_rmsprop_element(&u, c.g[k], &c.p[k], &c.m[k], &c.v[k]);
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_rmsprop_element(&u, c.g[k], &c.p[k], NULL, &c.v[k]);
    }
}
/* The passes of Muon and of averages. */
__device__ inline void update_muon(const mixp_step_scalars &u, mixp_optimizer_kind kind, Cell &c) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (kind == MIXP_OPTIMIZER_MUON) mixpi_muon_element(&u, c.rate, c.g[k], &c.p[k]);
        else if (kind == MIXP_OPTIMIZER_MUON_UNIT) c.p[k] = c.g[k] * u.factor;
        else if (kind == MIXP_OPTIMIZER_EMA) c.p[k] = mixpi_lerp(c.p[k], c.g[k], c.rate);
        else mixpi_muon_momentum_element(&u, c.g[k], &c.p[k], &c.m[k]);
    }
}
/* NAdam and Adamax, and kinds with a third state. */
__device__ inline void update_later(
    const mixp_step_scalars &u, mixp_optimizer_kind kind, const mixp_param_row &row, Cell &c) {
    float third[8];
    if (row.third) get8_any(mixp_in{ row.third, MIXP_F32 }, c.i, c.n, c.wide, third);
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        mixpi_later_element(kind, &u, c.g[k], &c.p[k], &c.m[k], &c.v[k], &third[k]);
    if (row.third) put8_any(array_at(row.third, MIXP_F32), c.i, c.n, c.wide, third);
}
__device__ inline bool is_later(mixp_optimizer_kind kind, const mixp_param_row &row) {
    return kind == MIXP_OPTIMIZER_NADAM || kind == MIXP_OPTIMIZER_ADAMAX || row.third;
}

/* wide: the table may have small states and any kind; otherwise none of update_later. */
template <bool wide>
__device__ inline void update_elements(
    const mixp_step_scalars &u, mixp_optimizer_kind kind, const mixp_param_row &row, Cell &c) {
    const bool momentum = row.m != NULL;
    if (wide && is_later(kind, row)) update_later(u, kind, row, c);
    else if (kind >= MIXP_OPTIMIZER_MUON) update_muon(u, kind, c);
    else if (kind == MIXP_OPTIMIZER_SGD) update_sgd(u, momentum, c);
    else if (kind == MIXP_OPTIMIZER_RMSPROP || kind == MIXP_OPTIMIZER_ADAGRAD)
        update_rms(u, momentum, c);
    else if (kind == MIXP_OPTIMIZER_LION) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_lion_element(&u, c.g[k], &c.p[k], &c.m[k]);
    } else {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) mixpi_adam_element(&u, c.g[k], &c.p[k], &c.m[k], &c.v[k]);
    }
}

__device__ inline void count_lost(
    mixp_dtype low, const float *was, const Cell &c, mixp_lost &lost) {
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) {
        if (k >= c.n || mixp_bits_of_f32(was[k]) == mixp_bits_of_f32(c.p[k])) continue;
        lost.updates++;
        lost.lost += mixpi_update_is_lost(low, was[k], c.p[k]);
    }
}

/* key: for the row's random numbers in this step. with_small: the table may have states of fewer
 * bytes than f32, and be of any kind. counting: counts lost updates. */
template <bool with_small, bool counting>
__device__ inline void update_8(const mixp_step_scalars &u, const mixp_param_row &row,
    mixp_optimizer_kind kind, uint64_t key, Cell &c, mixp_lost &lost) {
    /* Read the gradient, the weight and the moments. */
    get_of_row(row, mixp_in{ row.grad, row.grad_dtype }, c.i, c.n, c.wide, c.g);
    get_weight<with_small>(row, c);
    get_moments<with_small>(row, c);

    /* Update the weight, and count the updates that its low copy loses. */
    float was[8];
    MIXPI_UNROLL
    for (int k = 0; counting && k < 8; k++) was[k] = c.p[k];
    update_elements<with_small>(u, kind, row, c);
    if (counting) count_lost(mixpi_row_low_weight(&row), was, c, lost);

    /* Store the weight and the moments; small states round with random numbers. */
    if (with_small) {
        for (int k = 0; k < 8; k++) c.random[k] = mixpi_state_random(key, (uint64_t)(c.i + k));
    }
    put_weight<with_small>(row, c);
    put_moments<with_small>(row, c);
}

__device__ inline void clear_8(const mixp_param_row &row, const Cell &c) {
    const float zeros[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
    put_of_row(row, array_at(row.grad, row.grad_dtype), c.i, c.n, c.wide, zeros);
}

/* The scalars of a row's update, with all threads of a block. A row that missed steps has its own
 * bias corrections. */
__device__ inline mixp_step_scalars update_for(
    const mixp_step_plan &plan, const mixp_step_state *step, const mixp_param_row &row) {
    MIXPI_SHARED(mixp_step_scalars, late, 1);
    if (!row.missed || !*row.missed) return step->update[row.group];
    if (threadIdx.x == 0)
        mixpi_step_scalars_of(&plan, step, row.group, step->applied - *row.missed, late);
    __syncthreads();
    return *late;
}

template <bool with_small, bool counting>
__global__ void __launch_bounds__(look_threads, with_small ? 1 : 2)
    update_chunks(const __grid_constant__ mixp_step_plan plan, const mixp_param_row *rows,
        int64_t count, const mixp_step_state *step, mixp_lost *lost) {
    Walk w = walk_of(rows, count);
    Chunk at;
    const bool skip = step->skip != 0;
    for (int64_t c = blockIdx.x; walk_to(w, c, &at); c += gridDim.x) {
        /* Read the chunk's row, and the scalars of its update. */
        const mixp_param_row row = rows[at.row];
        const mixp_step_scalars u = update_for(plan, step, row);
        const uint64_t key = mixpi_state_key(plan.seed, step->applied, row.tensor);
        const int64_t end = chunk_end(at, row.count);
        mixp_lost found = { 0, 0 };
        Cell cell;
        cell.wide = is_wide_row(row);
        cell.rate = row.rate;

        /* Update its elements, unless the step is skipped; clear a gradient that has been used. */
        for (int64_t from = at.first; from < end; from += 8 * (int64_t)blockDim.x) {
            cell.i = from + 8 * (int64_t)threadIdx.x;
            cell.n = (int)(cell.i < end ? least(8, end - cell.i) : 0);
            if (!skip) update_8<with_small, counting>(u, row, plan.kind, key, cell, found);
            if (row.active == 2) clear_8(row, cell);
        }
        if (counting) add_count(&lost[at.row].updates, found.updates);
        if (counting) add_count(&lost[at.row].lost, found.lost);
    }

    /* Count the steps that rows without a gradient have missed. */
    if (blockIdx.x || skip) return;
    for (int64_t i = (int64_t)threadIdx.x; i < count; i += (int64_t)blockDim.x)
        if (!rows[i].active && rows[i].missed) ++*rows[i].missed;
}

inline Prepare prepare_of(State *s, mixp_step_state *step, mixp_scaler_state *scaler) {
    const Mirrored none = { NULL, NULL, NULL, 0, 0 };
    Prepare p = { 1, &s->block->stop, scaler, mirror_of(s, step, sizeof *step),
        scaler ? mirror_of(s, scaler, sizeof *scaler) : none };
    return p;
}

}   /* namespace */

static mixp_result mixpi_cuda_grad_stats(const mixp_exec *x, const mixp_grad_stats_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    Look *bins = (Look *)scratch_of(x, bin_count * sizeof *bins);
    if (!bins) return MIXP_ERR_MEMORY;

    /* The plan is in host memory: the kernel gets a copy. */
    static const mixp_step_plan no_plan = {};
    mixp_grad_stats_args job = *args;
    Prepare then = {};
    if (args->plan) then = prepare_of(k.state, args->step, args->scaler);
    job.plan = NULL;
    return k.report(
        "grad_stats", MIXPI_LAUNCH(gather_chunks, (unsigned)least(bin_count, blocks_of(k.state, 8)),
                          look_threads, 0, k.stream, job, bins, k.state->block->arrived,
                          args->plan ? *args->plan : no_plan, then));
}

static mixp_result mixpi_cuda_clip(const mixp_exec *x, const mixp_clip_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report(
        "clip", MIXPI_LAUNCH(clip_chunks, blocks_of(k.state, 8), look_threads, 0, k.stream, *args));
}

static mixp_result mixpi_cuda_prepare(const mixp_exec *x, const mixp_prepare_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report("prepare", MIXPI_LAUNCH(prepare_step, 1, warp_size, 0, k.stream, *args->plan,
                                   args->step, prepare_of(k.state, args->step, args->scaler)));
}

/* Does the table need the kernel for small states and all kinds? */
static bool has_wide_rows(const mixp_step_plan *plan) {
    return plan->small_states || plan->amsgrad || plan->centered ||
           plan->kind == MIXP_OPTIMIZER_NADAM || plan->kind == MIXP_OPTIMIZER_ADAMAX;
}

static mixp_result mixpi_cuda_update(const mixp_exec *x, const mixp_update_args *args) {
    Kernel k(x);
    const bool wide = has_wide_rows(args->plan);
    auto kernel = wide ? update_chunks<true, false> : update_chunks<false, false>;
    if (args->lost) kernel = wide ? update_chunks<true, true> : update_chunks<false, true>;
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report("update", MIXPI_LAUNCH(kernel, blocks_of(k.state, 2), look_threads, 0, k.stream,
                                  *args->plan, args->rows, args->count, args->step, args->lost));
}

static mixp_result mixpi_cuda_advance(const mixp_exec *x, const mixp_advance_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    return k.report("advance",
        MIXPI_LAUNCH(advance_scaler, 1, warp_size, 0, k.stream, *args->rule, args->scaler,
            args->wide, args->narrow, args->forgives, args->falls, &k.state->block->stop,
            mirror_of(k.state, args->scaler, sizeof *args->scaler)));
}

static mixp_result mixpi_cuda_restore(const mixp_exec *x, const mixp_restore_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;

    /* Launch enough blocks for the largest part. */
    size_t most = 0;
    for (int i = 0; i < args->n_parts; i++)
        if (args->parts[i].bytes > most) most = args->parts[i].bytes;
    const int64_t blocks = ceil_div((int64_t)most, 16 * look_threads);
    const unsigned grid = (unsigned)least(blocks ? blocks : 1, blocks_of(k.state, 2));
    return k.report("restore", MIXPI_LAUNCH(restore_parts, grid, look_threads, 0, k.stream, *args));
}

static mixp_result mixpi_cuda_check_buffers(
    const mixp_exec *x, const mixp_check_buffers_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;

    /* A thread takes four words of the largest part. */
    int64_t most = 0;
    for (int i = 0; i < args->n_parts; i++)
        most = args->parts[i].count > most ? args->parts[i].count : most;
    const int64_t blocks = ceil_div(most, 8 * look_threads);
    const unsigned grid = (unsigned)least(blocks ? blocks : 1, blocks_of(k.state, 2));
    return k.report(
        "check_buffers", MIXPI_LAUNCH(check_parts, grid, look_threads, 0, k.stream, *args));
}

static mixp_result mixpi_cuda_look(const mixp_exec *x, const mixp_look_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    if (!is_real(args->x.dtype)) return MIXP_ERR_DTYPE;
    if (args->n <= 0) return args->n ? MIXP_ERR_ARGUMENT : MIXP_OK;
    if (!args->x.data || !args->row) return MIXP_ERR_ARGUMENT;
    int64_t pieces = ceil_div(args->n, look_piece), most = blocks_of(k.state, 8);
    return k.report("look", MIXPI_LAUNCH(look_pieces, (unsigned)least(pieces, most), look_threads,
                                0, k.stream, *args, mixpi_look_limits_of(args->low)));
}

static mixp_result mixpi_cuda_agree(const mixp_exec *x, const mixp_agree_args *args) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    mixp_agree_args job = *args;
    job.plan = NULL; /* the host's: the kernel gets the plan itself */
    return k.report("agree", MIXPI_LAUNCH(agree_ranks, 1, warp_size, 0, k.stream, *args->plan, job,
                                 &k.state->block->stop));
}
