#pragma once
#include "maps.c"

/* The first row whose id is neither in [0, limit) nor `ignore`; -1 if all are valid. */
#define MIXPI_NO_INDEX ((int64_t)1 << 40)   /* as `ignore`: no id is ignored                 */
static int64_t mixpi_bad_id(const int32_t *ids, int64_t rows, int64_t limit, int64_t ignore) {
    for (int64_t i = 0; i < rows; i++)
        if ((ids[i] < 0 || ids[i] >= limit) && ids[i] != ignore) return i;
    return -1;
}

/* The first id of bag i; of the bag after the last, the number of ids. */
static int64_t mixpi_bag_first(const mixp_bags *b, int64_t rows, int64_t i) {
    if (!b->offsets) return i * b->width;
    return i < b->count ? b->offsets[i] : rows;
}

/* The number of ids of bag i that count. */
static int64_t mixpi_bag_counted(const mixp_bags *b, const int32_t *ids, int64_t rows, int64_t i) {
    int64_t n = 0;
    const int64_t end = mixpi_bag_first(b, rows, i + 1);
    for (int64_t j = mixpi_bag_first(b, rows, i); j < end; j++) n += ids[j] != b->padding;
    return n;
}

/* The first bag whose offset is wrong; -1 = none. */
static int64_t mixpi_bad_bag(const mixp_bags *b, int64_t rows) {
    for (int64_t i = 0; i < b->count; i++) {
        const int64_t first = mixpi_bag_first(b, rows, i), next = mixpi_bag_first(b, rows, i + 1);
        if (first < 0 || first > rows || next < first || (i == 0 && first)) return i;
    }
    return -1;
}

/* Are the ids of an embedding, or of bags, out of range? */
static int mixpi_bad_embedding(
    const int32_t *ids, int64_t rows, int64_t vocab, const mixp_bags *bags) {
    if (!bags->count) return mixpi_bad_id(ids, rows, vocab, MIXPI_NO_INDEX) >= 0;
    return mixpi_bad_id(ids, rows, vocab, bags->padding) >= 0 || mixpi_bad_bag(bags, rows) >= 0;
}

/* Returns the error of norm's arguments, or MIXP_OK. */
static mixp_result mixpi_norm_check(const mixp_norm_args *k) {
    if (!mixpi_reads(k->a) || !mixpi_writes(k->y) || !mixpi_may_read(k->gamma) ||
        !(k->rms || mixpi_may_read(k->beta)))
        return MIXP_ERR_DTYPE;
    return k->y.accumulate ? MIXP_ERR_ARGUMENT : MIXP_OK;
}

/* norm_backward: each task adds its rows' parts of dgamma and dbeta to its own sums. The limit of
 * the number of tasks bounds the memory of these sums. */
#define MIXPI_NORM_TASKS 256                /* limit                                         */
typedef struct mixpi_norm_back_job {
    const mixp_norm_backward_args *k;
    int64_t per_task, tasks;
    int64_t wide;               /* cols, rounded up to full vectors                        */
    float  *sums;               /* 2 * wide per task; NULL: dgamma and dbeta not needed    */
} mixpi_norm_back_job;

static mixpi_norm_back_job mixpi_norm_back_plan(const mixp_norm_backward_args *k) {
    mixpi_norm_back_job job = { k, mixpi_units_of_task(k->cols), 0, 0, NULL };
    int64_t least = mixpi_ceil_div(k->rows, MIXPI_NORM_TASKS);
    if (job.per_task < least) job.per_task = least;
    job.tasks = mixpi_ceil_div(k->rows, job.per_task);
    job.wide = (k->cols + 15) & ~(int64_t)15;
    return job;
}

/* embedding_backward: for each row of the table, a list of the rows of dy that used it, in
 * increasing order. Each row of the table belongs to one task, for every dtype, and is rounded
 * once. */
typedef struct mixpi_embedding_back_job {
    const mixp_embedding_backward_args *k;
    int64_t *first;             /* first row of each id; -1 = none                         */
    int64_t *next;              /* next row with the same id; -1 = none                    */
    int64_t *bag;               /* the bag of each id                                      */
    float   *factor;            /* by which its gradient is multiplied                     */
} mixpi_embedding_back_job;

/* Lays the lists out in memory, unless memory is NULL. Returns the bytes that they need. */
static size_t mixpi_embedding_back_carve(mixpi_embedding_back_job *job, void *memory) {
    size_t ids = (size_t)job->k->vocab, rows = (size_t)job->k->rows;
    if (memory) {
        job->first = (int64_t *)memory;
        job->next = job->first + ids;
        if (job->k->bags.count) job->bag = job->next + rows;
        if (job->k->bags.count) job->factor = (float *)(void *)(job->bag + rows);
    }
    return (ids + rows) * sizeof(int64_t) +
           (job->k->bags.count ? rows * (sizeof(int64_t) + sizeof(float)) : 0);
}

/* Sets the bag and the factor of each id. */
static void mixpi_embedding_back_bags(const mixpi_embedding_back_job *job) {
    const mixp_embedding_backward_args *k = job->k;
    const mixp_bags *b = &k->bags;
    for (int64_t i = 0; i < b->count; i++) {
        const int64_t end = mixpi_bag_first(b, k->rows, i + 1);
        const float n =
            b->mode == MIXP_BAG_MEAN ? (float)mixpi_bag_counted(b, k->ids, k->rows, i) : 1.0f;
        for (int64_t j = mixpi_bag_first(b, k->rows, i); j < end; j++) {
            job->bag[j] = i;
            job->factor[j] = b->weights.data ? mixp_get(b->weights, j) : 1.0f / n;
        }
    }
}

static void mixpi_embedding_back_lists(const mixpi_embedding_back_job *job) {
    const mixp_embedding_backward_args *k = job->k;
    for (int64_t i = 0; i < k->vocab; i++) job->first[i] = -1;
    for (int64_t i = k->rows - 1; i >= 0; i--) {
        if (k->bags.count && k->ids[i] == k->bags.padding) continue;
        job->next[i] = job->first[k->ids[i]];
        job->first[k->ids[i]] = i;
    }
    if (k->bags.count) mixpi_embedding_back_bags(job);
}

/* Elements of work for an id: the average number of rows of dy per id, times the columns. */
static int64_t mixpi_embedding_back_work(const mixp_embedding_backward_args *k) {
    return mixpi_ceil_div((k->rows + k->vocab) * k->cols, k->vocab > 0 ? k->vocab : 1);
}

/* The largest exponential of a row is 1. Where the sum of the others is less than this, it is
 * summed without the largest, because 1 + others loses digits. */
#define MIXPI_SURE 0.25

/* cross_entropy: the rows' losses in double, added in order. */
typedef struct mixpi_entropy_job {
    const mixp_cross_entropy_args *k;
    double *losses;
} mixpi_entropy_job;

/* The number of rows that count. */
static int64_t mixpi_entropy_count(const mixp_cross_entropy_args *k) {
    int64_t i, count = 0;
    for (i = 0; i < k->rows; i++) count += k->targets[i] != k->ignore;
    return count;
}

/* Is a sum of weights, which may be negative, not 0? */
static int mixpi_weighs(double count) { return count > 0.0 || count < 0.0; }

static void mixpi_entropy_mean(const mixpi_entropy_job *job) {
    const mixp_cross_entropy_args *k = job->k;
    double sum = 0.0, count = k->before > 0 ? (double)*k->counted : 0.0;
    if (k->before > 0) sum = (double)*k->loss * (mixpi_weighs(count) ? count : 1.0);
    for (int64_t i = 0; i < k->rows; i++) {
        if (k->targets[i] == k->ignore) continue;
        sum += job->losses[i];
        count += k->weights ? (double)k->weights[k->targets[i]] : 1.0;
    }
    if (k->sum) count = 1.0;
    *k->counted = (float)count;
    if (mixpi_weighs(count)) *k->loss = (float)(sum / count);
    else *k->loss = k->more ? (float)sum : mixp_f32_of_bits(0x7FC00000u);
}

/* The rows' losses without a mean. */
static void mixpi_entropy_each(const mixpi_entropy_job *job) {
    const mixp_cross_entropy_args *k = job->k;
    for (int64_t i = 0; i < k->rows; i++)
        k->each[i] = k->targets[i] == k->ignore ? 0.0f : (float)job->losses[i];
}

typedef struct mixpi_entropy_back_job {
    const mixp_cross_entropy_backward_args *k;
    float factor;
} mixpi_entropy_back_job;

/* A row's gradient: factor (all softmax + others), and factor (target + others) at the target. */
typedef struct mixpi_entropy_slopes {
    float factor, all, target, others;
} mixpi_entropy_slopes;

/* The target's slope, all p - hot with p near 1, is made of the others' probability, 1 - p, which
 * keeps its digits. Products in double are exact, so contracting them changes nothing. */
static mixpi_entropy_slopes mixpi_entropy_slopes_of(
    const mixpi_entropy_back_job *job, int64_t row) {
    const mixp_cross_entropy_backward_args *k = job->k;
    mixpi_entropy_slopes s = { job->factor, 1.0f, 0.0f, 0.0f };
    float hot = 1.0f - k->smoothing;
    double spread = (double)k->smoothing;
    if (k->smoothing > 0.0f) s.others = -k->smoothing / (float)k->cols;
    if (k->each) s.factor = mixp_get(k->dloss, row);
    if (k->targets[row] == k->ignore) return s;
    if (k->weights) {
        hot *= k->weights[k->targets[row]];
        spread *= (double)k->weights[k->cols];
        s.all = (float)((double)hot + spread);
    }
    if (k->logs) s.target = -hot;
    else s.target = (float)(spread - (double)s.all * (double)k->stats[3 * row + 2]);
    return s;
}

typedef struct mixpi_entropy_both_job {
    mixpi_entropy_job      loss;
    mixpi_entropy_back_job back;
} mixpi_entropy_both_job;

/* The backward pass of the loss that k computes. */
static mixp_cross_entropy_backward_args mixpi_entropy_back_of(
    const mixp_cross_entropy_both_args *k) {
    mixp_cross_entropy_backward_args back = MIXPI_ZERO;
    back.rows = k->loss.rows;
    back.cols = k->loss.cols;
    back.ignore = k->loss.ignore;
    back.smoothing = k->loss.smoothing;
    back.targets = k->loss.targets;
    back.logits = k->loss.logits;
    back.stats = k->loss.stats;
    back.counted = k->loss.counted;
    back.dlogits = k->dlogits;
    return back;
}

/* --- the largest --- */

typedef struct mixpi_most {
    float   value;
    int32_t index, ties;
} mixpi_most;

static int mixpi_is_nan(float x) { return mixp_bits_of_f32(x) << 1 > 0xFF000000u; }

/* Are both equal, or both NaN? */
static int mixpi_most_equals(float x, float most) {
    return x == most || (mixpi_is_nan(x) && mixpi_is_nan(most));
}

static void mixpi_most_take(mixpi_most *m, float x, int64_t index) {
    int larger = x > m->value || mixpi_is_nan(x);
    if (index > 0 && mixpi_most_equals(x, m->value)) {
        m->ties++;
    } else if (index == 0 || (larger && !mixpi_is_nan(m->value))) {
        m->value = x;
        m->index = (int32_t)index;
        m->ties = 1;
    }
}

/* The order of a kernel over [outer, n, inner]: line by line, in pieces of a block. If inner is 1,
 * a line runs along n, one line for each o; otherwise a line runs along inner, one for each o and
 * j. */
typedef struct mixpi_lines {
    int     along_n;
    int64_t length, blocks;
} mixpi_lines;

static mixpi_lines mixpi_lines_of(int64_t n, int64_t inner) {
    mixpi_lines lines;
    lines.along_n = inner == 1;
    lines.length = lines.along_n ? n : inner;
    lines.blocks = (lines.length + MIXPI_BLOCK - 1) / MIXPI_BLOCK;
    return lines;
}

/* --- rotary embeddings --- */

typedef struct mixpi_rope_job {
    const mixp_rope_args *k;
    float *cosine, *sine;       /* [t][d / 2]                                              */
} mixpi_rope_job;

#define MIXPI_ROPE_RUN 256      /* positions whose angles follow from one sine and cosine  */
#define MIXPI_ROPE_WIDE 16      /* frequencies of a unit: a cache line of the table        */

/* A run of positions for some frequencies: from each position to the next, a frequency's pair
 * rotates by its angle. In f64 the error at the last position is about 1e-14, a hundred-thousandth
 * of the rounding of f32. */
static void mixpi_rope_run(const void *args, int64_t unit) {
    const mixpi_rope_job *job = (const mixpi_rope_job *)args;
    const mixp_rope_args *k = job->k;
    const int64_t half = k->d / 2, blocks = mixpi_ceil_div(half, MIXPI_ROPE_WIDE);
    const int64_t first = unit % blocks * MIXPI_ROPE_WIDE, from = unit / blocks * MIXPI_ROPE_RUN;
    const int64_t n = mixpi_min(MIXPI_ROPE_WIDE, half - first);
    const int64_t end = mixpi_min(from + MIXPI_ROPE_RUN, k->t);
    const double scale = k->scaled ? k->scale : 1.0;
    double c[MIXPI_ROPE_WIDE], s[MIXPI_ROPE_WIDE];
    double step_c[MIXPI_ROPE_WIDE], step_s[MIXPI_ROPE_WIDE];
    for (int64_t i = 0; i < n; i++) {
        double step = k->scaled ? k->frequency[first + i]
                                : pow(k->base, -2.0 * (double)(first + i) / (double)k->d);
        double angle = (double)(k->first + from) * step;
        c[i] = cos(angle);
        s[i] = sin(angle);
        step_c[i] = cos(step);
        step_s[i] = sin(step);
    }

    for (int64_t p = from; p < end; p++)
        for (int64_t i = 0; i < n; i++) {
            double next = c[i] * step_c[i] - s[i] * step_s[i];
            job->cosine[p * half + first + i] = (float)(c[i] * scale);
            job->sine[p * half + first + i] = (float)(s[i] * scale);
            s[i] = s[i] * step_c[i] + c[i] * step_s[i];
            c[i] = next;
        }
}

/* --- random numbers, comparisons, topk --- */

typedef struct mixpi_random_job {
    const mixp_random_args *k;
    uint64_t key;
} mixpi_random_job;

static int mixpi_is_comparable(mixp_in a) {
    return a.data && (mixpi_reads(a) || a.dtype == MIXP_U8 || a.dtype == MIXP_I32);
}

/* Element i of a comparable array, exactly. */
static double mixpi_exact(mixp_in a, int64_t i) {
    if (a.dtype == MIXP_I32) return (double)((const int32_t *)a.data)[i];
    if (a.dtype == MIXP_U8) return (double)((const uint8_t *)a.data)[i];
    return (double)mixp_get(a, i);
}

/* One line: the last axis, from the first elements of a and b. */
static void mixpi_compare_unit(const void *args, int64_t line) {
    const mixp_compare_args *k = (const mixp_compare_args *)args;
    const int last = k->rank - 1;
    int64_t n = last < 0 ? 1 : k->shape[last], a = 0, b = 0, i, rest = line;
    int64_t step_a = last < 0 ? 0 : k->a_strides[last], step_b = last < 0 ? 0 : k->b_strides[last];
    for (int axis = last - 1; axis >= 0; axis--) {
        int64_t at = rest % k->shape[axis];
        a += at * k->a_strides[axis];
        b += at * k->b_strides[axis];
        rest /= k->shape[axis];
    }
    for (i = 0; i < n; i++)
        k->y[line * n + i] = (uint8_t)mixpi_holds(
            k->how, mixpi_exact(k->a, a + i * step_a), mixpi_exact(k->b, b + i * step_b));
}

static mixp_result mixpi_compare(const mixp_exec *x, const mixp_compare_args *k) {
    int64_t lines = 1;
    if ((unsigned)k->how >= MIXP_COMPARE_COUNT || k->rank < 0 || k->rank > MIXP_MAX_RANK || !k->y)
        return MIXP_ERR_ARGUMENT;
    if (!mixpi_is_comparable(k->a) || !mixpi_is_comparable(k->b)) return MIXP_ERR_DTYPE;
    for (int axis = 0; axis < k->rank - 1; axis++) lines *= k->shape[axis];
    return mixpi_each_unit(
        x, lines, 8 * (k->rank ? k->shape[k->rank - 1] : 1), mixpi_compare_unit, k);
}

/* The rank of element i of a row: one that comes earlier has a larger rank. */
static uint64_t mixpi_topk_rank(const mixp_topk_args *k, int64_t row, int32_t i) {
    uint32_t key = mixpi_topk_key(mixp_get(k->a, row * k->cols + i), k->smallest);
    return (uint64_t)key << 32 | (uint32_t)~i;
}

/* Moves `moved` down from `at` in a heap of n positions; each position ranks after its children. */
static void mixpi_topk_sift(
    const mixp_topk_args *k, int64_t row, int32_t *heap, int64_t at, int64_t n, int32_t moved) {
    const uint64_t own = mixpi_topk_rank(k, row, moved);
    for (int64_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
        uint64_t last = mixpi_topk_rank(k, row, heap[child]), other;
        other = child + 1 < n ? mixpi_topk_rank(k, row, heap[child + 1]) : last;
        if (other < last) {
            last = other;
            child++;
        }
        if (own <= last) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

/* One row: a heap of the best k positions, whose top is the last of them; then that heap sorted. */
static void mixpi_topk_unit(const void *args, int64_t row) {
    const mixp_topk_args *k = (const mixp_topk_args *)args;
    int32_t *heap = k->index + row * k->k;
    for (int64_t i = 0; i < k->k; i++) heap[i] = (int32_t)i;
    for (int64_t i = k->k / 2; i-- > 0;) mixpi_topk_sift(k, row, heap, i, k->k, heap[i]);
    for (int64_t i = k->k; i < k->cols; i++)
        if (mixpi_topk_rank(k, row, (int32_t)i) > mixpi_topk_rank(k, row, heap[0]))
            mixpi_topk_sift(k, row, heap, 0, k->k, (int32_t)i);
    for (int64_t i = k->k - 1; i > 0; i--) {
        int32_t moved = heap[i];
        heap[i] = heap[0];
        mixpi_topk_sift(k, row, heap, 0, i, moved);
    }
}

static mixp_result mixpi_topk(const mixp_exec *x, const mixp_topk_args *k) {
    if (!mixpi_reads(k->a)) return MIXP_ERR_DTYPE;
    if (k->k < 1 || k->k > k->cols || k->cols > 0x7FFFFFFF || !k->index) return MIXP_ERR_ARGUMENT;
    return mixpi_each_unit(x, k->rows, 16 * k->cols, mixpi_topk_unit, k);
}
