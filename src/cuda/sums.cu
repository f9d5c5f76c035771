#pragma once
#include "functions.cu"
/* --- maps and sums with strides ------------------------------------------------------------ */

namespace {

struct Strided {
    mixp_out   y;
    mixp_in    a[4];            /* y as an input, then the sources; data NULL: absent        */
    Axes       kept, summed;    /* summed: the axes along which the output repeats           */
    int64_t    outputs, rows;   /* products of the sizes of kept and of summed               */
    int64_t    run, runs;       /* rows of a run, runs of a sum; runs > 1: the sums go to
                                   partial[run][output]                                      */
    int64_t    groups;          /* groups of 1 or 8 outputs that one run computes at once    */
    uint64_t   per_group;       /* the inverse of groups                                     */
    float     *partial;
    float      p;               /* the factor of a sum, or the function's parameter          */
    float      q;               /* the parameter of a loss or of where                       */
    int        width;           /* 8 or 1 elements at a time                                 */
};

/* Reads a source's next `width` elements. step: their distance. */
__device__ inline void read_source(
    const mixp_in &a, int64_t at, int64_t step, int width, float *v) {
    if (!a.data) return;
    if (width == 8 && step == 1) {
        get8(a, at, v);
        return;
    }
    v[0] = get1(a, at);
    MIXPI_UNROLL
    for (int k = 1; k < 8; k++) v[k] = v[0];
}

/* The function of the elements at at[]. axes: the walk goes along the last of them. */
template <int fn>
__device__ inline void values_at(const Strided &m, const Axes &axes, const int64_t *at, float *v) {
    /* Read the sources that fn has. */
    const int last = axes.rank - 1;
    float b[8] = { 0, 0, 0, 0, 0, 0, 0, 0 }, c[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
    read_source(m.a[1], at[1], last < 0 ? 0 : axes.s[1][last], m.width, v);
    if (fn != FN_COPY && fn != FN_UNARY + MIXP_UNARY_SCALE)
        read_source(m.a[2], at[2], last < 0 ? 0 : axes.s[2][last], m.width, b);
    if (fn >= FN_DIVISOR_D && fn <= FN_WHERE)
        read_source(m.a[3], at[3], last < 0 ? 0 : axes.s[3][last], m.width, c);

    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] = value<fn>(v[k], b[k], c[k], m.p, m.q);
}

/* No sum: out (+)= fn(...). */
template <int fn>
__global__ void __launch_bounds__(map_threads) map_strided(const __grid_constant__ Strided m) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.groups; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t at[4] = { 0, 0, 0, 0 };
        float v[8];
        locate(m.kept, i * m.width, at);
        values_at<fn>(m, m.kept, at, v);
        store8(m.y, at[0], m.width, m.width == 8, v);
    }
}

/* A sum of two dense arrays whose dtypes the compiler knows. */
template <mixp_dtype A, mixp_dtype B, mixp_dtype Y>
__global__ void __launch_bounds__(map_threads, map_blocks)
    add_dense(const __grid_constant__ Strided m) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.groups; i += (int64_t)gridDim.x * blockDim.x) {
        float a[8], b[8];
        plain_get8<A>(m.a[1].data, i * 8, a);
        plain_get8<B>(m.a[2].data, i * 8, b);
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) a[k] += b[k];
        plain_put8<Y>(m.y.data, i * 8, a);
    }
}

/* Stores a run's sums of `width` outputs from `output` on, which are at `at` in the result. */
__device__ inline void store_run(
    const Strided &m, int64_t run, int64_t output, int64_t at, float *v) {
    if (m.runs > 1) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++)
            if (k < m.width) m.partial[run * m.outputs + output + k] = v[k];
        return;
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++) v[k] *= m.p;
    store8(m.y, at, m.width, m.width == 8, v);
}

/* Each thread adds one run of rows for 8 outputs, or one. */
template <int fn>
__global__ void __launch_bounds__(map_threads) sum_columns(const __grid_constant__ Strided m) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.groups * m.runs; i += (int64_t)gridDim.x * blockDim.x) {
        /* Find the run and its outputs. */
        const int64_t run = over(i, m.groups, m.per_group);
        const int64_t output = (i - run * m.groups) * m.width;
        const int64_t end = least((run + 1) * m.run, m.rows);
        int64_t base[4] = { 0, 0, 0, 0 };
        locate(m.kept, output, base);

        /* Add the run's rows in order. */
        float sum[8] = { 0, 0, 0, 0, 0, 0, 0, 0 }, v[8];
        for (int64_t r = run * m.run; r < end; r++) {
            int64_t at[4] = { base[0], base[1], base[2], base[3] };
            locate(m.summed, r, at);
            values_at<fn>(m, m.kept, at, v);
            MIXPI_UNROLL
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
        store_run(m, run, output, base[0], sum);
    }
}

/* Adds rows of a dense array: loads 8 rows at a time and adds them in a tree. */
template <mixp_dtype D>
__device__ inline void add_rows(const Strided &m, int64_t at, int rows, float *sum) {
    int64_t step = m.summed.s[1][0];
    float v[8][8];
    MIXPI_UNROLL
    for (int r = 0; r < 8; r++) {
        MIXPI_UNROLL
        for (int k = 0; k < 8; k++) v[r][k] = 0.0f;
        if (r < rows) plain_get8<D>(m.a[1].data, at + r * step, v[r]);
    }
    MIXPI_UNROLL
    for (int k = 0; k < 8; k++)
        sum[k] += ((v[0][k] + v[1][k]) + (v[2][k] + v[3][k])) +
                  ((v[4][k] + v[5][k]) + (v[6][k] + v[7][k]));
}
template <mixp_dtype D>
__global__ void __launch_bounds__(map_threads, 2)
    sum_dense_columns(const __grid_constant__ Strided m) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.groups * m.runs; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t run = over(i, m.groups, m.per_group), output = (i - run * m.groups) * 8;
        int64_t r = run * m.run, end = least(r + m.run, m.rows), step = m.summed.s[1][0];
        float sum[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
        for (; r + 8 <= end; r += 8) add_rows<D>(m, r * step + output, 8, sum);
        if (r < end) add_rows<D>(m, r * step + output, (int)(end - r), sum);
        store_run(m, run, output, output, sum);
    }
}

/* Each block adds one run of one output; `width` is along the summed axis. */
template <int fn>
__global__ void __launch_bounds__(map_threads) sum_rows(const __grid_constant__ Strided m) {
    for (int64_t i = blockIdx.x; i < m.groups * m.runs; i += gridDim.x) {
        /* Find the run and its output. */
        const int64_t run = over(i, m.groups, m.per_group), output = i - run * m.groups;
        const int64_t end = least((run + 1) * m.run, m.rows);
        int64_t r = run * m.run + threadIdx.x * m.width;
        int64_t base[4] = { 0, 0, 0, 0 };
        locate(m.kept, output, base);

        /* Add the thread's elements, 8 of them in a tree, then the threads' sums. */
        float sum = 0.0f, v[8];
        for (; r < end; r += (int64_t)blockDim.x * m.width) {
            int64_t at[4] = { base[0], base[1], base[2], base[3] };
            locate(m.summed, r, at);
            values_at<fn>(m, m.summed, at, v);
            sum += m.width == 8 ? ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
                                : v[0];
        }
        sum = block_sum(sum);

        /* Store the run's sum. */
        if (threadIdx.x) continue;
        if (m.runs > 1) m.partial[run * m.outputs + output] = sum;
        else store_real(m.y, base[0], sum * m.p);
    }
}

/* Adds the runs of each output, with one thread per output, or one block if outputs are few. */
__global__ void __launch_bounds__(map_threads)
    sum_runs(const __grid_constant__ Strided m, bool by_block) {
    int64_t step = by_block ? blockDim.x : 1, first = by_block ? threadIdx.x : 0;
    int64_t o = by_block ? blockIdx.x : (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; o < m.outputs; o += by_block ? gridDim.x : (int64_t)gridDim.x * blockDim.x) {
        int64_t at[4] = { 0, 0, 0, 0 };
        double sum = 0.0;
        for (int64_t r = first; r < m.runs; r += step) sum += (double)m.partial[r * m.outputs + o];
        if (by_block) sum = block_sum(sum);
        if (first) continue;
        locate(m.kept, o, at);
        store_real(m.y, at[0], (float)(sum * (double)m.p));
    }
}

/* sum_runs for many runs and many outputs: 32 sums for each output, then these sums in order. */
const int sums_each = 32;

__global__ void __launch_bounds__(warp_size *sums_each)
    sum_many_runs(const __grid_constant__ Strided m) {
    MIXPI_SHARED(double, part, sums_each *(warp_size + 1));
    const int lane = (int)threadIdx.x % warp_size, own = (int)threadIdx.x / warp_size;

    /* Add every 32nd run of the output. */
    const int64_t o = (int64_t)blockIdx.x * warp_size + lane;
    double sum = 0.0;
    for (int64_t r = own; r < m.runs && o < m.outputs; r += sums_each)
        sum += (double)m.partial[r * m.outputs + o];
    part[own * (warp_size + 1) + lane] = sum;
    __syncthreads();

    /* Add the output's 32 sums in order. */
    if (own || o >= m.outputs) return;
    for (int i = 1; i < sums_each; i++) sum += part[i * (warp_size + 1) + lane];
    int64_t at[4] = { 0, 0, 0, 0 };
    locate(m.kept, o, at);
    store_real(m.y, at[0], (float)(sum * (double)m.p));
}

typedef void (*StridedKernel)(Strided m);
struct Strided3 { StridedKernel map, columns, rows; };

/* The kernels of fn that are in use. */
/* clang-format off */
inline Strided3 strided_kernels(int fn) {
    Strided3 s = { NULL, NULL, NULL };
    switch (fn) {
    /* The kernels of a function: a map, sums of rows, sums of rows and columns, or nothing. */
#define MIXPI_MAP(f)  s.map = map_strided<f>;
#define MIXPI_ROWS(f) s.rows = sum_rows<f>;
#define MIXPI_SUM(f)  s.columns = sum_columns<f>; s.rows = sum_rows<f>;
#define MIXPI_CASE(f, a, b) case f: a(f) b(f) break;
#define MIXPI_NONE(f)

    /* Sums, and what computes the gradients of binary functions. */
    MIXPI_CASE(FN_COPY, MIXPI_NONE, MIXPI_SUM)
    MIXPI_CASE(FN_UNARY + MIXP_UNARY_SCALE, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_ADD, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_SUB, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_MUL, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_DIV, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_MAXIMUM, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_MINIMUM, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_SWIGLU, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_POWER, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_ATAN2, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_BINARY + MIXP_BINARY_PRELU, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_PAIR_D, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_PAIR_D + 1, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_PAIR_D + 2, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_PAIR_D + 3, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_PAIR_D + 4, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_PAIR_D + 5, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_DIVISOR_D, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_LARGER_D, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_GATE_D, MIXPI_MAP, MIXPI_SUM)

    /* where, and its gradients. */
    MIXPI_CASE(FN_WHERE, MIXPI_MAP, MIXPI_NONE)
    MIXPI_CASE(FN_KEPT, MIXPI_MAP, MIXPI_SUM)
    MIXPI_CASE(FN_MASKED, MIXPI_MAP, MIXPI_SUM)

    /* Losses, each or summed. */
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_MSE, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_BCE_LOGITS, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_BCE, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_L1, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_HUBER, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_SMOOTH_L1, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_KL, MIXPI_MAP, MIXPI_ROWS)
    MIXPI_CASE(FN_LOSS + MIXP_LOSS_KL_LOG, MIXPI_MAP, MIXPI_ROWS)
#undef MIXPI_MAP
#undef MIXPI_ROWS
#undef MIXPI_SUM
#undef MIXPI_CASE
#undef MIXPI_NONE
    default: break;
    }
    return s;
}
/* clang-format on */

/* Splits the merged axes by whether the output repeats along them. */
inline void split_axes(Strided *m, const Axes &x, bool sums) {
    for (int i = 0; i < x.rank; i++) append(sums && x.s[0][i] == 0 ? &m->summed : &m->kept, x, i);
    m->outputs = count_of(m->kept);
    m->rows = count_of(m->summed);
}

/* Can the last axis of `walked` be read 8 elements at a time? `fixed`: the other axes. */
inline bool is_by_eight(const Strided &m, const Axes &walked, const Axes &fixed, int first) {
    const int last = walked.rank - 1;
    if (last < 0 || walked.n[last] % 8) return false;
    for (int k = first; k < 4; k++) {
        /* An absent source, or one that repeats along the axis, is not read 8 at a time. */
        if (!m.a[k].data) continue;
        if (walked.s[k][last] == 0 && k > 0) continue;

        /* Elements are neighbours, and each group of 8 begins at a multiple of 8. */
        if (walked.s[k][last] != 1 || !is_wide(m.a[k])) return false;
        for (int i = 0; i < last; i++)
            if (walked.s[k][i] % 8) return false;
        for (int i = 0; i < fixed.rank; i++)
            if (fixed.s[k][i] % 8) return false;
    }
    return true;
}

template <mixp_dtype A, mixp_dtype Y> inline StridedKernel dense_sum(mixp_dtype b) {
    return b == MIXP_F32   ? add_dense<A, MIXP_F32, Y>
           : b == MIXP_F16 ? add_dense<A, MIXP_F16, Y>
                           : add_dense<A, MIXP_BF16, Y>;
}
/* add_dense if it applies, otherwise NULL. It applies to dense arrays: all of one low dtype, or the
 * first f32. */
inline StridedKernel dense_sum_of(int fn, const Strided &m) {
    mixp_dtype a = m.a[1].dtype, b = m.a[2].dtype, y = m.y.dtype;
    if (fn != FN_BINARY + MIXP_BINARY_ADD || m.width != 8 || m.kept.rank != 1) return NULL;
    if (m.y.accumulate || !m.a[2].data) return NULL;
    for (int k = 0; k < 3; k++)
        if (m.kept.s[k][0] != 1) return NULL;
    if (a == MIXP_F32 && y == a) return dense_sum<MIXP_F32, MIXP_F32>(b);
    if (a != b || y != a) return NULL;
    return a == MIXP_F16 ? add_dense<MIXP_F16, MIXP_F16, MIXP_F16>
                         : add_dense<MIXP_BF16, MIXP_BF16, MIXP_BF16>;
}

inline mixp_result run_strided_map(Kernel *k, const char *what, int fn, Strided *m) {
    Axes none;
    none.rank = 0;
    m->width = is_by_eight(*m, m->kept, none, 0) ? 8 : 1;
    m->groups = m->outputs / m->width;
    StridedKernel dense = dense_sum_of(fn, *m);
    return k->report(what, MIXPI_LAUNCH(dense ? dense : strided_kernels(fn).map,
                               grid_for(m->groups, map_threads), map_threads, 0, k->stream, *m));
}

/* The variant of sum_dense_columns that applies; NULL: none. */
inline StridedKernel dense_columns(int fn, const Strided &m) {
    if (fn != FN_COPY || m.width != 8 || m.kept.rank != 1 || m.summed.rank != 1) return NULL;
    return m.a[1].dtype == MIXP_F32   ? sum_dense_columns<MIXP_F32>
           : m.a[1].dtype == MIXP_F16 ? sum_dense_columns<MIXP_F16>
                                      : sum_dense_columns<MIXP_BF16>;
}

inline mixp_result add_runs(Kernel *k, const char *what, const Strided &m) {
    bool many = m.outputs >= warp_size && m.runs > 32;
    bool by_block = m.outputs < 1024 && m.runs > 32;
    unsigned grid = grid_for(m.outputs, by_block ? 1 : map_threads);
    if (many)
        return k->report(what, MIXPI_LAUNCH(sum_many_runs, (unsigned)ceil_div(m.outputs, warp_size),
                                   warp_size * sums_each, 0, k->stream, m));
    return k->report(what, MIXPI_LAUNCH(sum_runs, grid, map_threads, 0, k->stream, m, by_block));
}

/* A block sums a long row; a thread sums a short row, or one of several adjacent outputs. */
inline mixp_result run_sum(const mixp_exec *x, Kernel *k, const char *what, int fn, Strided *m) {
    /* Choose columns for many adjacent outputs, or for several short rows: not for a loss. */
    const int last = m->kept.rank - 1;
    const bool beside = last >= 0 && m->kept.n[last] >= 32 && m->kept.s[1][last] == 1;
    const bool columns = beside || (m->rows < 64 && m->outputs > 1);
    const bool wide =
        columns ? is_by_eight(*m, m->kept, m->summed, 0) : is_by_eight(*m, m->summed, m->kept, 1);
    m->width = wide ? 8 : 1;
    const StridedKernel dense = columns ? dense_columns(fn, *m) : NULL;

    /* Cut the rows into runs. */
    const int64_t shortest = columns ? 64 : 8192;
    m->run = m->rows <= shortest ? shortest : 8 * ceil_div(m->rows, dense ? 4096 : 16384);
    if (m->run < shortest) m->run = shortest;
    m->runs = m->rows ? ceil_div(m->rows, m->run) : 1;
    m->groups = columns ? m->outputs / m->width : m->outputs;
    m->per_group = inverse_of(m->groups);
    if (m->runs > 1) {
        m->partial = (float *)scratch_of(x, (size_t)(m->runs * m->outputs) * sizeof(float));
        if (!m->partial) return MIXP_ERR_MEMORY;
    }

    /* Sum each run, by a thread for columns or by a block for rows; then add the runs. */
    const int threads = columns || m->rows > 1024 ? map_threads : 32;
    const StridedKernel kernel = dense     ? dense
                                 : columns ? strided_kernels(fn).columns
                                           : strided_kernels(fn).rows;
    const unsigned grid = grid_for(m->groups * m->runs, columns ? threads : 1);
    mixp_result r =
        k->report(what, MIXPI_LAUNCH(kernel, grid, (unsigned)threads, 0, k->stream, *m));
    return r != MIXP_OK || m->runs == 1 ? r : add_runs(k, what, *m);
}

/* out (+)= fn over the axes; or p times the sum over those along which the output repeats. */
inline mixp_result run_strided(
    const mixp_exec *x, const char *what, int fn, const Axes &axes, Strided *m, bool sums) {
    Kernel k(x);
    for (int i = 0; i < 4; i++)
        if (!is_real(m->a[i].dtype)) return MIXP_ERR_DTYPE;
    if (!k.state) return MIXP_ERR_ORDER;
    split_axes(m, merge_axes(axes), sums);
    if (m->outputs == 0) return MIXP_OK;
    if (!m->y.data || (m->rows && !m->a[1].data)) return MIXP_ERR_ARGUMENT;
    return sums ? run_sum(x, &k, what, fn, m) : run_strided_map(&k, what, fn, m);
}

/* A Strided with an output and no sources. */
inline Strided strided_of(const mixp_out &y, float p) {
    Strided m;
    memset((void *)&m, 0, sizeof m);
    for (int i = 0; i < 4; i++) m.a[i] = nothing_in;
    m.y = y;
    m.a[0] = as_in(y);
    m.p = p;
    return m;
}

inline void set_strides(Axes *axes, int k, const int64_t *strides) {
    for (int i = 0; i < axes->rank; i++) axes->s[k][i] = strides[i];
}

/* Gives absent arrays the output's strides, so that they do not keep axes from merging. */
inline void follow(Axes *axes, const Strided &m) {
    for (int k = 1; k < 4; k++)
        if (!m.a[k].data) memcpy(axes->s[k], axes->s[0], sizeof axes->s[0]);
}

}   /* namespace */

static mixp_result mixpi_cuda_binary(const mixp_exec *x, const mixp_binary_args *k) {
    Strided m = strided_of(k->y, 0.0f);
    if ((unsigned)k->op >= MIXP_BINARY_COUNT || k->rank < 0 || k->rank > MIXP_MAX_RANK)
        return MIXP_ERR_ARGUMENT;
    if (!k->a.data || !k->b.data) return MIXP_ERR_ARGUMENT;
    Axes axes = dense_axes(k->rank, k->shape);
    m.a[1] = k->a;
    m.a[2] = k->b;
    set_strides(&axes, 1, k->a_strides);
    set_strides(&axes, 2, k->b_strides);
    follow(&axes, m);
    return run_strided(x, "binary", FN_BINARY + k->op, axes, &m, false);
}

namespace {

/* The function that computes an operand's gradient: dy or -dy for a sum; dy times the other factor
 * for a product; dy / b or FN_DIVISOR_D for a quotient. */
inline int binary_slope(const mixp_binary_args *k, bool sums) {
    switch (k->op) {
    case MIXP_BINARY_ADD:
    case MIXP_BINARY_SUB: return sums ? FN_COPY : FN_UNARY + MIXP_UNARY_SCALE;
    case MIXP_BINARY_MUL: return FN_BINARY + MIXP_BINARY_MUL;
    case MIXP_BINARY_DIV: return k->which ? FN_DIVISOR_D : FN_BINARY + MIXP_BINARY_DIV;
    case MIXP_BINARY_MAXIMUM:
    case MIXP_BINARY_MINIMUM: return FN_LARGER_D;
    case MIXP_BINARY_POWER:
    case MIXP_BINARY_ATAN2:
    case MIXP_BINARY_PRELU: return FN_PAIR_D + 2 * ((int)k->op - (int)MIXP_BINARY_POWER) + k->which;
    case MIXP_BINARY_SWIGLU: break;
    case MIXP_BINARY_COUNT: break;
    }
    return k->which ? FN_BINARY + MIXP_BINARY_SWIGLU : FN_GATE_D;
}

/* Adds the next source of the gradient. strides NULL: dense, as the axes. */
inline bool add_source(
    Strided *m, Axes *axes, int source, const mixp_in &a, const int64_t *strides) {
    m->a[source] = a;
    if (strides) set_strides(axes, source, strides);
    return a.data != NULL;
}

/* Adds the sources that the gradient needs. Returns false if an operand is absent. */
inline bool add_sources(Strided *m, Axes *axes, const mixp_binary_args *k) {
    const char *of = mixpi_binary_slope_of(k);
    bool there = true;
    for (int i = 0; of[i]; i++) {
        if (of[i] == 'd') add_source(m, axes, i + 1, k->dy, NULL);
        if (of[i] == 'a') there = add_source(m, axes, i + 1, k->a, k->a_strides) && there;
        if (of[i] == 'b') there = add_source(m, axes, i + 1, k->b, k->b_strides) && there;
    }
    return there;
}

}   /* namespace */

static mixp_result mixpi_cuda_binary_backward(const mixp_exec *x, const mixp_binary_args *k) {
    if ((unsigned)k->op >= MIXP_BINARY_COUNT || k->rank < 0 || k->rank > MIXP_MAX_RANK)
        return MIXP_ERR_ARGUMENT;

    /* The gradient sums along the axes that the operand repeats along. */
    const int64_t *own = k->which ? k->b_strides : k->a_strides;
    bool sums = false;
    Axes axes = dense_axes(k->rank, k->shape);
    set_strides(&axes, 0, own);
    for (int i = 0; i < k->rank; i++) sums = sums || (own[i] == 0 && k->shape[i] != 1);

    Strided m = strided_of(k->dx, k->which && k->op == MIXP_BINARY_SUB ? -1.0f : 1.0f);
    if (!add_sources(&m, &axes, k)) return MIXP_ERR_ARGUMENT;
    follow(&axes, m);
    return run_strided(x, "binary_backward", binary_slope(k, sums), axes, &m, sums);
}

static mixp_result mixpi_cuda_where(const mixp_exec *x, const mixp_where_args *k) {
    Strided m = strided_of(k->y, 0.0f);
    int fn = k->a.data ? k->b.data ? FN_WHERE : FN_KEPT : FN_MASKED;
    if (k->rank < 0 || k->rank > MIXP_MAX_RANK || !k->mask.data || !(k->a.data || k->b.data))
        return MIXP_ERR_ARGUMENT;
    Axes axes = dense_axes(k->rank, k->shape);
    add_source(&m, &axes, 1, k->mask, k->mask_strides);
    if (k->a.data) add_source(&m, &axes, 2, k->a, k->a_strides);
    if (k->b.data) add_source(&m, &axes, k->a.data ? 3 : 2, k->b, k->b_strides);
    m.q = k->value;
    follow(&axes, m);
    return run_strided(x, "where", fn, axes, &m, false);
}

static mixp_result mixpi_cuda_where_backward(const mixp_exec *x, const mixp_where_args *k) {
    if (k->rank < 0 || k->rank > MIXP_MAX_RANK || !k->mask.data || !k->dy.data)
        return MIXP_ERR_ARGUMENT;

    /* The gradient sums along the axes that the operand repeats along. */
    const int64_t *own = k->which ? k->b_strides : k->a_strides;
    bool sums = false;
    Axes axes = dense_axes(k->rank, k->shape);
    set_strides(&axes, 0, own);
    for (int i = 0; i < k->rank; i++) sums = sums || (own[i] == 0 && k->shape[i] != 1);

    Strided m = strided_of(k->dx, 1.0f);
    add_source(&m, &axes, 1, k->mask, k->mask_strides);
    add_source(&m, &axes, 2, k->dy, NULL);
    follow(&axes, m);
    return run_strided(x, "where_backward", k->which ? FN_MASKED : FN_KEPT, axes, &m, sums);
}

/* --- comparisons ------------------------------------------------------------------- */

namespace {

/* Array 0 of the axes: y, 1: a, 2: b. */
struct CompareJob {
    mixp_comparison how;
    Axes     axes;
    int64_t  count;
    mixp_in  a, b;
    uint8_t *y;
};

/* Element i of a real array, of u8 or of i32, exactly. */
__device__ inline double exact1(const mixp_in &a, int64_t i) {
    if (a.dtype == MIXP_I32) return (double)((const int32_t *)a.data)[i];
    if (a.dtype == MIXP_U8) return (double)((const uint8_t *)a.data)[i];
    return (double)get1(a, i);
}

/* One thread per element of y. */
__global__ void __launch_bounds__(map_threads)
    compare_elements(const __grid_constant__ CompareJob s) {
    int64_t i = (int64_t)blockIdx.x * map_threads + threadIdx.x;
    for (; i < s.count; i += (int64_t)gridDim.x * map_threads) {
        int64_t at[4] = { 0, 0, 0, 0 };
        locate(s.axes, i, at);
        s.y[i] = (uint8_t)mixpi_holds(s.how, exact1(s.a, at[1]), exact1(s.b, at[2]));
    }
}

}   /* namespace */

static bool is_comparable(const mixp_in &a) {
    return a.data && (is_real(a.dtype) || a.dtype == MIXP_U8 || a.dtype == MIXP_I32);
}

static mixp_result mixpi_cuda_compare(const mixp_exec *x, const mixp_compare_args *k) {
    Kernel on(x);
    if ((unsigned)k->how >= MIXP_COMPARE_COUNT || k->rank < 0 || k->rank > MIXP_MAX_RANK || !k->y)
        return MIXP_ERR_ARGUMENT;
    if (!is_comparable(k->a) || !is_comparable(k->b)) return MIXP_ERR_DTYPE;
    if (!on.state) return MIXP_ERR_ORDER;

    /* Merge the axes of y, a and b. */
    Axes axes = dense_axes(k->rank, k->shape);
    set_strides(&axes, 1, k->a_strides);
    set_strides(&axes, 2, k->b_strides);

    CompareJob job;
    memset((void *)&job, 0, sizeof job);
    job.how = k->how;
    job.axes = merge_axes(axes);
    job.count = count_of(axes);
    job.a = k->a;
    job.b = k->b;
    job.y = k->y;
    if (job.count <= 0) return MIXP_OK;
    return on.report("compare", MIXPI_LAUNCH(compare_elements, grid_for(job.count, map_threads),
                                    map_threads, 0, on.stream, job));
}

/* --- reductions and losses --------------------------------------------------------- */

namespace {

/* A reduction over (outer, n, inner). `repeated`: the array (output or source) that repeats along
 * n. */
inline mixp_result reduce_any(
    const mixp_exec *x, const char *what, int fn, int repeated, const mixp_reduce_args *k) {
    int64_t shape[3] = { k->outer, k->n, k->inner }, strides[3] = { k->inner, 0, 1 };
    Strided m = strided_of(k->y, k->factor);
    if (k->outer < 0 || k->n < 0 || k->inner < 0) return MIXP_ERR_ARGUMENT;
    Axes axes = dense_axes(3, shape);
    m.a[1] = k->a;
    set_strides(&axes, repeated, strides);
    follow(&axes, m);
    return run_strided(x, what, fn, axes, &m, repeated == 0);
}

}   /* namespace */

static mixp_result mixpi_cuda_reduce(const mixp_exec *x, const mixp_reduce_args *k) {
    return reduce_any(x, "reduce", FN_COPY, 0, k);
}

static mixp_result mixpi_cuda_reduce_backward(const mixp_exec *x, const mixp_reduce_args *k) {
    return reduce_any(x, "reduce_backward", FN_UNARY + MIXP_UNARY_SCALE, 1, k);
}

static mixp_result mixpi_cuda_loss(const mixp_exec *x, const mixp_loss_args *k) {
    int64_t zero = 0, over = k->over ? k->over : k->n;
    Strided m = strided_of(mixpi_out_to(k->each ? k->each : k->y, MIXP_F32, 0),
        k->each ? 1.0f : (float)(1.0 / (double)over));
    if ((unsigned)k->kind >= MIXP_LOSS_COUNT || k->n < 0) return MIXP_ERR_ARGUMENT;
    if (k->n > 0 && !k->target.data) return MIXP_ERR_ARGUMENT;
    Axes axes = dense_axes(1, &k->n);
    m.a[1] = k->a;
    m.a[2] = k->target;
    m.q = k->delta;
    if (!k->each) set_strides(&axes, 0, &zero);
    return run_strided(x, "loss", FN_LOSS + k->kind, axes, &m, !k->each);
}
