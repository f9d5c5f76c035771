#pragma once
#include "elementwise.c"
/* --- softmax, norms, embedding, losses ------------------------------------------------- */
/* e = exp(p + shift). e has room for a multiple of 16 floats; p may have n only. */
MIXPI_K void MIXPI_P(floats_exp)(float *e, const float *p, float shift, int64_t n) {
    mixpi_v s = mixpi_vset(shift);
    for (int64_t j = 0; j < n; j += 16)
        mixpi_vstore(e + j, mixpi_vexp(mixpi_vadd(mixpi_vpart(p + j, n - j), s)));
}

/* y = (p + shift) * by; same room as above. */
MIXPI_K void MIXPI_P(floats_affine)(float *y, const float *p, float shift, float by,
                                    int64_t n) {
    mixpi_v s = mixpi_vset(shift), f = mixpi_vset(by);
    for (int64_t j = 0; j < n; j += 16)
        mixpi_vstore(y + j, mixpi_vmul(mixpi_vadd(mixpi_vpart(p + j, n - j), s), f));
}

/* The largest of `best` and n floats. It may miss a NaN, which a sum then propagates. */
MIXPI_K float MIXPI_P(floats_max)(const float *p, int64_t n, float best) {
    static const float lanes[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    mixpi_v m = mixpi_vset(best);
    int64_t j;
    for (j = 0; j + 16 <= n; j += 16) m = mixpi_vmax(mixpi_vload(p + j), m);
    if (j < n && j > 0) m = mixpi_vmax(mixpi_vload(p + n - 16), m);
    else if (j < n)
        m = mixpi_vmax(mixpi_vselect_gt(mixpi_vset((float)n), mixpi_vload(lanes),
                                        mixpi_vpart(p, n), m), m);
    return mixpi_vmaxof(m);
}

/* The place of the first of n floats that is at least `least`, or -1. */
MIXPI_K int64_t MIXPI_P(floats_first)(const float *p, int64_t n, float least) {
    int64_t j = 0;
    if (!(MIXPI_P(floats_max)(p, n, mixp_f32_of_bits(0xFF800000u)) >= least)) return -1;
    while (!(p[j] >= least)) j++;
    return j;
}

/* The largest of a[at, at+cols). */
MIXPI_K float MIXPI_P(row_max)(mixp_in a, int64_t at, int64_t cols) {
    float buf[MIXPI_BLOCK], best = mixp_f32_of_bits(0xFF800000u);
    MIXPI_BLOCKS(i, n, cols)
        best = MIXPI_P(floats_max)(MIXPI_P(read)(a, at + i, n, buf), n, best);
    return best;
}

/* The sum of exp(a - max) over a[at, at+cols). On return, e holds the last block's exps. */
MIXPI_K double MIXPI_P(row_sumexp)(mixp_in a, int64_t at, int64_t cols, float max,
                                   float *e) {
    float buf[MIXPI_BLOCK];
    double sum = 0.0;
    MIXPI_BLOCKS(i, n, cols) {
        MIXPI_P(floats_exp)(e, MIXPI_P(read)(a, at + i, n, buf), -max, n);
        sum += (double)MIXPI_P(floats_sum)(e, n);
    }
    return sum;
}

/* row_sumexp without the first column that equals max, whose exp is 1: added to 1, the others would
 * lose precision. If the row is one block, e holds its exps. */
MIXPI_K double MIXPI_P(row_others)(mixp_in a, int64_t at, int64_t cols, float max, float *e) {
    float buf[MIXPI_BLOCK];
    double sum = 0.0;
    int found = 0;
    MIXPI_BLOCKS(i, n, cols) {
        if (cols > MIXPI_BLOCK)
            MIXPI_P(floats_exp)(e, MIXPI_P(read)(a, at + i, n, buf), -max, n);
        const int64_t j = found ? -1 : MIXPI_P(floats_first)(e, n, 1.0f);
        if (j >= 0) e[j] = 0.0f;
        found |= j >= 0;
        sum += (double)MIXPI_P(floats_sum)(e, n);
    }
    return sum;
}

/* --- softmax --- */

/* (a - max) - lse, each difference rounded. */
MIXPI_K void MIXPI_P(log_softmax_row)(const mixp_softmax_args *k, int64_t at, float max,
                                      float lse) {
    float buf[MIXPI_BLOCK], v[MIXPI_BLOCK];
    MIXPI_BLOCKS(i, n, k->cols) {
        MIXPI_P(floats_affine)(v, MIXPI_P(read)(k->a, at + i, n, buf), -max, 1.0f, n);
        MIXPI_P(floats_affine)(v, v, -lse, 1.0f, n);
        MIXPI_P(write)(k->y, at + i, n, v);
    }
}

/* If the row is one block, e still holds its exps. */
MIXPI_K void MIXPI_P(softmax_row)(const void *args, int64_t row) {
    const mixp_softmax_args *k = (const mixp_softmax_args *)args;
    int64_t at = row * k->cols;
    float buf[MIXPI_BLOCK], e[MIXPI_BLOCK];
    float max = MIXPI_P(row_max)(k->a, at, k->cols);
    double sum = MIXPI_P(row_sumexp)(k->a, at, k->cols, max, e);
    if (k->log_of) {
        const int sure = sum < 1.0 + MIXPI_SURE;
        MIXPI_P(log_softmax_row)(k, at, max,
            sure ? log1pf((float)MIXPI_P(row_others)(k->a, at, k->cols, max, e))
                 : logf((float)sum));
        return;
    }
    MIXPI_BLOCKS(i, n, k->cols) {
        if (k->cols > MIXPI_BLOCK)
            MIXPI_P(floats_exp)(e, MIXPI_P(read)(k->a, at + i, n, buf), -max, n);
        MIXPI_P(floats_affine)(e, e, 0.0f, 1.0f / (float)sum, n);
        MIXPI_P(write)(k->y, at + i, n, e);
    }
}

MIXPI_KERNEL(softmax, mixpi_cpu_softmax, mixp_softmax_args, MIXPI_P(softmax_row))

/* The sum over a row of (dy - dy[but]) y, or of dy for the log, without column `but`. With -1, the
 * sum of dy y, or of dy, over all columns; then the column that has 3/4 or more of y goes to
 * *sure. */
MIXPI_K double MIXPI_P(softmax_back_sum)(const mixp_softmax_backward_args *k, int64_t at,
                                         int64_t but, int64_t *sure) {
    const float shift = but < 0 || k->log_of ? 0.0f : MIXPI_P(read_one)(k->dy, at + but);
    float dy_buf[MIXPI_BLOCK], y_buf[MIXPI_BLOCK], part[MIXPI_BLOCK];
    double sum = 0.0;
    MIXPI_BLOCKS(i, n, k->cols) {
        const float *dy = MIXPI_P(read)(k->dy, at + i, n, dy_buf), *y = NULL;
        if (!k->log_of) y = MIXPI_P(read)(k->y, at + i, n, y_buf);
        if (but >= 0) {
            MIXPI_P(floats_affine)(part, dy, -shift, 1.0f, n);
            if (but >= i && but < i + n) part[but - i] = 0.0f;
            dy = part;
        } else if (y && *sure < 0) {
            const int64_t j = MIXPI_P(floats_first)(y, n, 0.75f);
            if (j >= 0) *sure = i + j;
        }
        sum += (double)(y ? MIXPI_P(floats_dot)(dy, y, n) : MIXPI_P(floats_sum)(dy, n));
    }
    return sum;
}

/* The slope of log_softmax at a column with 3/4 of the probability or more: dy - e^y sum(dy). */
MIXPI_K float MIXPI_P(log_softmax_sure)(const mixp_softmax_backward_args *k, int64_t at,
                                        int64_t col, float y) {
    const double others = MIXPI_P(softmax_back_sum)(k, at, col, NULL);
    const double all = others + (double)MIXPI_P(read_one)(k->dy, at + col);
    return (float)-(others + all * expm1((double)y));
}

/* da = y (dy - sum(dy y)), or dy - e^y sum(dy) for the log. In a column with 3/4 of the probability
 * or more these differences cancel, so its slope comes from the other columns: softmax counts all
 * dy from this column's. */
MIXPI_K void MIXPI_P(softmax_back_row)(const void *args, int64_t row) {
    const mixp_softmax_backward_args *k = (const mixp_softmax_backward_args *)args;
    float dy_buf[MIXPI_BLOCK], y_buf[MIXPI_BLOCK], da[MIXPI_BLOCK], shift = 0.0f;
    int64_t at = row * k->cols, sure = -1;
    double all = MIXPI_P(softmax_back_sum)(k, at, -1, &sure);
    if (sure >= 0) {
        shift = MIXPI_P(read_one)(k->dy, at + sure);
        all = MIXPI_P(softmax_back_sum)(k, at, sure, NULL);
    }
    const mixpi_v from = mixpi_vset(shift), sum = mixpi_vset(-(float)all);
    MIXPI_BLOCKS(i, n, k->cols) {
        const float *dy = MIXPI_P(read)(k->dy, at + i, n, dy_buf);
        const float *y = MIXPI_P(read)(k->y, at + i, n, y_buf);
        for (int64_t j = 0; j < n; j += 16) {
            mixpi_v g = mixpi_vpart(dy + j, n - j), v = mixpi_vpart(y + j, n - j);
            if (k->log_of) v = mixpi_vfma(mixpi_vexp(v), sum, g);
            else v = mixpi_vmul(v, mixpi_vadd(mixpi_vsub(g, from), sum));
            mixpi_vstore(da + j, v);
        }
        sure = k->log_of ? MIXPI_P(floats_first)(y, n, -0.2876821f) : -1;
        if (sure >= 0) da[sure] = MIXPI_P(log_softmax_sure)(k, at, i + sure, y[sure]);
        MIXPI_P(write)(k->da, at + i, n, da);
    }
}

MIXPI_KERNEL(softmax_backward, mixpi_cpu_softmax_backward, mixp_softmax_backward_args,
             MIXPI_P(softmax_back_row))

/* --- layer norm, rms norm --- */

/* Elements [i, i+n) of a as floats, or `value` if a has no data. */
MIXPI_V const float *MIXPI_P(read_or)(mixp_in a, float value, int64_t i, int64_t n,
                                      float *buf) {
    if (a.data) return MIXPI_P(read)(a, i, n, buf);
    for (int64_t j = 0; j < n; j += 16) mixpi_vstore(buf + j, mixpi_vset(value));
    return buf;
}

MIXPI_K float MIXPI_P(norm_mean)(const mixp_norm_args *k, int64_t at) {
    float buf[MIXPI_BLOCK];
    double sum = 0.0;
    MIXPI_BLOCKS(i, n, k->cols)
        sum += (double)MIXPI_P(floats_sum)(MIXPI_P(read)(k->a, at + i, n, buf), n);
    return (float)(sum / (double)k->cols);
}

/* x = a[at, at+n) - mean. */
MIXPI_K void MIXPI_P(norm_center)(mixp_in a, int64_t at, int64_t n, float mean,
                                  float *x) {
    float buf[MIXPI_BLOCK];
    MIXPI_P(floats_affine)(x, MIXPI_P(read)(a, at, n, buf), -mean, 1.0f, n);
}

/* On return, x holds a - mean of the last block. */
MIXPI_K float MIXPI_P(norm_rstd)(const mixp_norm_args *k, int64_t at, float mean,
                                 float *x) {
    double sum = 0.0;
    MIXPI_BLOCKS(i, n, k->cols) {
        MIXPI_P(norm_center)(k->a, at + i, n, mean, x);
        sum += (double)MIXPI_P(floats_dot)(x, x, n);
    }
    return (float)(1.0 / sqrt(sum / (double)k->cols + (double)k->eps));
}

/* x = x * rstd * gamma + beta for columns [i, i+n). */
MIXPI_K void MIXPI_P(norm_scale)(const mixp_norm_args *k, int64_t i, int64_t n,
                                 float rstd, float *x) {
    static const mixp_in none = { NULL, MIXP_F32 };
    float gamma_buf[MIXPI_BLOCK], beta_buf[MIXPI_BLOCK];
    const float *gamma = MIXPI_P(read_or)(k->gamma, 1.0f, i, n, gamma_buf);
    const float *beta = MIXPI_P(read_or)(k->rms ? none : k->beta, 0.0f, i, n, beta_buf);
    for (int64_t j = 0; j < n; j += 16) {
        mixpi_v h = mixpi_vmul(mixpi_vload(x + j), mixpi_vset(rstd));
        mixpi_v g = mixpi_vpart(gamma + j, n - j);
        mixpi_vstore(x + j, mixpi_vfma(h, g, mixpi_vpart(beta + j, n - j)));
    }
}

MIXPI_K void MIXPI_P(norm_row)(const void *args, int64_t row) {
    const mixp_norm_args *k = (const mixp_norm_args *)args;
    int64_t at = row * k->cols;
    float x[MIXPI_BLOCK];
    float mean = k->rms ? 0.0f : MIXPI_P(norm_mean)(k, at);
    float rstd = MIXPI_P(norm_rstd)(k, at, mean, x);
    if (!k->rms) k->mean[row] = mean;
    k->rstd[row] = rstd;
    MIXPI_BLOCKS(i, n, k->cols) {
        if (k->cols > MIXPI_BLOCK) MIXPI_P(norm_center)(k->a, at + i, n, mean, x);
        MIXPI_P(norm_scale)(k, i, n, rstd, x);
        MIXPI_P(write)(k->y, at + i, n, x);
    }
}

MIXPI_KERNEL(norm, mixpi_cpu_norm, mixp_norm_args, MIXPI_P(norm_row))

/* Computes a row of sums, and its norm while the row is in the cache. */
MIXPI_K void MIXPI_P(add_norm_row)(const void *args, int64_t row) {
    const mixp_norm_args *k = (const mixp_norm_args *)args;
    mixp_norm_args of_sum = *k;
    float a_buf[MIXPI_BLOCK], b_buf[MIXPI_BLOCK], sum[MIXPI_BLOCK];
    int64_t at = row * k->cols;
    MIXPI_BLOCKS(i, n, k->cols) {
        const float *a = MIXPI_P(read)(k->a, at + i, n, a_buf);
        const float *b = MIXPI_P(read)(k->b, at + i, n, b_buf);
        MIXPI_P(floats_add)(sum, a, b, n);
        MIXPI_P(write)(k->sum, at + i, n, sum);
    }
    of_sum.a = mixpi_in(k->sum.data, k->sum.dtype);
    MIXPI_P(norm_row)(&of_sum, row);
}

MIXPI_KERNEL(add_norm, mixpi_cpu_add_norm, mixp_norm_args, MIXPI_P(add_norm_row))

/* h = (a - mean) rstd and d = dy gamma for columns [i, i+n) of a row. Returns dy. */
MIXPI_K const float *MIXPI_P(norm_back_block)(const mixp_norm_backward_args *k,
                                              int64_t row, int64_t i, int64_t n, float *h,
                                              float *d, float *dy_buf) {
    float buf[MIXPI_BLOCK], shift = k->rms ? 0.0f : -k->mean[row];
    const float *a = MIXPI_P(read)(k->a, row * k->cols + i, n, buf), *gamma;
    const float *dy = MIXPI_P(read)(k->dy, row * k->cols + i, n, dy_buf);
    MIXPI_P(floats_affine)(h, a, shift, k->rstd[row], n);
    gamma = MIXPI_P(read_or)(k->gamma, 1.0f, i, n, buf);
    for (int64_t j = 0; j < n; j += 16) {
        mixpi_v g = mixpi_vpart(gamma + j, n - j);
        mixpi_vstore(d + j, mixpi_vmul(mixpi_vpart(dy + j, n - j), g));
    }
    return dy;
}

/* dgamma += dy h and dbeta += dy, n columns of each. */
MIXPI_K void MIXPI_P(norm_back_add)(const float *dy, const float *h, int64_t n,
                                    float *dgamma, float *dbeta) {
    for (int64_t j = 0; j < n; j += 16) {
        mixpi_v g = mixpi_vpart(dy + j, n - j);
        mixpi_v hg = mixpi_vfma(g, mixpi_vload(h + j), mixpi_vload(dgamma + j));
        mixpi_vstore(dgamma + j, hg);
        mixpi_vstore(dbeta + j, mixpi_vadd(g, mixpi_vload(dbeta + j)));
    }
}

/* d = rstd (d + minus_mean + h minus_dot). */
MIXPI_K void MIXPI_P(norm_back_slope)(const float *h, float *d, int64_t n,
                                      float minus_mean, float minus_dot, float rstd) {
    mixpi_v m1 = mixpi_vset(minus_mean), m2 = mixpi_vset(minus_dot), r = mixpi_vset(rstd);
    for (int64_t j = 0; j < n; j += 16) {
        mixpi_v v = mixpi_vadd(mixpi_vload(d + j), m1);
        mixpi_vstore(d + j, mixpi_vmul(mixpi_vfma(mixpi_vload(h + j), m2, v), r));
    }
}

/* Copies the row at `at` of da to db. */
MIXPI_K void MIXPI_P(norm_back_copy)(const mixp_norm_backward_args *k, int64_t at) {
    float buf[MIXPI_BLOCK];
    if (!k->db.data) return;
    MIXPI_BLOCKS(i, n, k->cols) {
        memcpy(buf, (const float *)k->da.data + at + i, (size_t)n * sizeof *buf);
        MIXPI_P(write)(k->db, at + i, n, buf);
    }
}

/* Adds a row's part to the task's sums, then computes the row's da. */
MIXPI_K void MIXPI_P(norm_back_row)(const void *args, int64_t row) {
    const mixpi_norm_back_job *job = (const mixpi_norm_back_job *)args;
    const mixp_norm_backward_args *k = job->k;
    int64_t wide = job->wide;
    float *sums = job->sums ? job->sums + row / job->per_task * 2 * wide : NULL;
    float h[MIXPI_BLOCK], d[MIXPI_BLOCK], dy_buf[MIXPI_BLOCK], minus_mean, minus_dot;
    double sum = 0.0, dot = 0.0;

    /* The two means over the row, and its part of the sums for gamma and beta. */
    if (sums && row % job->per_task == 0)
        memset(sums, 0, (size_t)(2 * wide) * sizeof(float));
    MIXPI_BLOCKS(i, n, k->cols) {
        const float *dy = MIXPI_P(norm_back_block)(k, row, i, n, h, d, dy_buf);
        if (!k->rms) sum += (double)MIXPI_P(floats_sum)(d, n);
        dot += (double)MIXPI_P(floats_dot)(d, h, n);
        if (sums) MIXPI_P(norm_back_add)(dy, h, n, sums + i, sums + wide + i);
    }

    if (!k->da.data) return;

    /* The gradient needs both means. */
    minus_mean = -(float)(sum / (double)k->cols);
    minus_dot = -(float)(dot / (double)k->cols);
    MIXPI_BLOCKS(i, n, k->cols) {
        if (k->cols > MIXPI_BLOCK) MIXPI_P(norm_back_block)(k, row, i, n, h, d, dy_buf);
        MIXPI_P(norm_back_slope)(h, d, n, minus_mean, minus_dot, k->rstd[row]);
        MIXPI_P(write)(k->da, row * k->cols + i, n, d);
    }
    MIXPI_P(norm_back_copy)(k, row * k->cols);
}

/* out (+)= the tasks' sums of columns [i, i+n), in the order of tasks. The sums begin at `sums`. */
MIXPI_K void MIXPI_P(norm_back_total)(const mixpi_norm_back_job *job, const float *sums,
                                      mixp_out out, int64_t i, int64_t n) {
    float total[MIXPI_BLOCK];
    if (!out.data) return;
    memset(total, 0, sizeof total);
    for (int64_t task = 0; task < job->tasks; task++)
        MIXPI_P(floats_add)(total, total, sums + task * 2 * job->wide + i, n);
    MIXPI_P(write)(out, i, n, total);
}

/* A block of columns of dgamma and dbeta. */
MIXPI_K void MIXPI_P(norm_back_join)(const void *args, int64_t block) {
    const mixpi_norm_back_job *job = (const mixpi_norm_back_job *)args;
    int64_t i = block * MIXPI_BLOCK, n = mixpi_min(MIXPI_BLOCK, job->k->cols - i);
    MIXPI_P(norm_back_total)(job, job->sums, job->k->dgamma, i, n);
    MIXPI_P(norm_back_total)(job, job->sums + job->wide, job->k->dbeta, i, n);
}

MIXPI_K mixp_result MIXPI_P(norm_backward)(const mixp_exec *x,
                                           const mixp_norm_backward_args *k)
{ return mixpi_cpu_norm_backward(x, k, MIXPI_P(norm_back_row), MIXPI_P(norm_back_join)); }

/* --- embedding --- */

MIXPI_K void MIXPI_P(embedding_row)(const void *args, int64_t row) {
    const mixp_embedding_args *k = (const mixp_embedding_args *)args;
    mixp_in from = mixpi_in_at(k->table, k->ids[row] * k->cols);
    MIXPI_P(convert_plain)(mixpi_out_at(k->y, row * k->cols), from, k->cols);
}

/* y = f x + y */
MIXPI_K void MIXPI_P(floats_add_times)(float *y, float f, const float *x, int64_t n) {
    const mixpi_v by = mixpi_vset(f);
    int64_t j;
    for (j = 0; j + 16 <= n; j += 16)
        mixpi_vstore(y + j, mixpi_vfma(by, mixpi_vload(x + j), mixpi_vload(y + j)));
    for (; j < n; j++) y[j] = mixpi_fmaf(f, x[j], y[j]);
}

/* The maxima of n columns of a bag, from column i on, and the places of their ids, first -1. A NaN
 * is the maximum. */
MIXPI_RARE void MIXPI_P(bag_max)(const mixp_embedding_args *k, int64_t bag, int64_t i, int64_t n,
                                 float *top) {
    const mixp_bags *b = &k->bags;
    const int64_t end = mixpi_bag_first(b, k->rows, bag + 1);
    int32_t *at = b->largest + bag * k->cols + i;
    float buf[MIXPI_BLOCK];
    for (int64_t c = 0; b->follow && c < n; c++)
        if (at[c] >= 0)
            top[c] = MIXPI_P(read_one)(k->table, (int64_t)k->ids[at[c]] * k->cols + i + c);
    if (b->follow) return;
    for (int64_t c = 0; c < n; c++) at[c] = -1;
    for (int64_t j = mixpi_bag_first(b, k->rows, bag); j < end; j++) {
        if (k->ids[j] == b->padding) continue;
        const float *x = MIXPI_P(read)(k->table, (int64_t)k->ids[j] * k->cols + i, n, buf);
        for (int64_t c = 0; c < n; c++) {
            const int is_nan = (mixp_bits_of_f32(x[c]) & 0x7FFFFFFFu) > 0x7F800000u;
            const int has_nan = (mixp_bits_of_f32(top[c]) & 0x7FFFFFFFu) > 0x7F800000u;
            if (at[c] >= 0 && (has_nan || !(is_nan || x[c] > top[c]))) continue;
            top[c] = x[c];
            at[c] = (int32_t)j;
        }
    }
}

/* The sum, mean or maximum of the rows of a bag, rounded once. */
MIXPI_K void MIXPI_P(embedding_bag)(const void *args, int64_t bag) {
    const mixp_embedding_args *k = (const mixp_embedding_args *)args;
    const mixp_bags *b = &k->bags;
    const int64_t first = mixpi_bag_first(b, k->rows, bag);
    const int64_t end = mixpi_bag_first(b, k->rows, bag + 1);
    const int64_t counted = mixpi_bag_counted(b, k->ids, k->rows, bag);
    float sum[MIXPI_BLOCK], buf[MIXPI_BLOCK];
    MIXPI_BLOCKS(i, n, k->cols) {
        memset(sum, 0, sizeof sum);
        if (b->mode == MIXP_BAG_MAX) MIXPI_P(bag_max)(k, bag, i, n, sum);
        for (int64_t j = first; j < end && b->mode != MIXP_BAG_MAX; j++) {
            if (k->ids[j] == b->padding) continue;
            const float *x = MIXPI_P(read)(k->table, (int64_t)k->ids[j] * k->cols + i, n, buf);
            if (!b->weights.data) MIXPI_P(floats_add)(sum, sum, x, n);
            else MIXPI_P(floats_add_times)(sum, MIXPI_P(read_one)(b->weights, j), x, n);
        }
        for (int64_t c = 0; c < n && b->mode == MIXP_BAG_MEAN && counted; c++)
            sum[c] /= (float)counted;
        MIXPI_P(write)(k->y, bag * k->cols + i, n, sum);
    }
}

MIXPI_K mixp_result MIXPI_P(embedding)(const mixp_exec *x, const mixp_embedding_args *k)
{ return mixpi_cpu_embedding(x, k, MIXPI_P(embedding_row), MIXPI_P(embedding_bag)); }

/* A row of dtable: adds the rows of dy on its list, and rounds once. */
MIXPI_K void MIXPI_P(embedding_back_row)(const void *args, int64_t id) {
    const mixpi_embedding_back_job *job = (const mixpi_embedding_back_job *)args;
    const mixp_embedding_backward_args *k = job->k;
    mixp_in had = { k->dtable.data, k->dtable.dtype };
    mixp_out sums = { k->dtable.data, k->dtable.dtype, 0 };
    float sum[MIXPI_BLOCK], buf[MIXPI_BLOCK];
    int64_t row, at = id * k->cols;
    if (job->first[id] < 0 && k->dtable.accumulate) return;
    MIXPI_BLOCKS(i, n, k->cols) {
        memset(sum, 0, sizeof sum);
        if (k->dtable.accumulate)
            memcpy(sum, MIXPI_P(read)(had, at + i, n, buf), (size_t)n * sizeof(float));
        for (row = job->first[id]; row >= 0; row = job->next[row]) {
            const int64_t from = (job->bag ? job->bag[row] : row) * k->cols + i;
            const float *dy = MIXPI_P(read)(k->dy, from, n, buf);
            if (!job->bag) MIXPI_P(floats_add)(sum, sum, dy, n);
            else if (k->bags.mode != MIXP_BAG_MAX)
                MIXPI_P(floats_add_times)(sum, job->factor[row], dy, n);
            for (int64_t c = 0; k->bags.largest && c < n; c++)
                if (k->bags.largest[from + c] == row) sum[c] += dy[c];
        }
        MIXPI_P(write)(sums, at + i, n, sum);
    }
}

/* The gradients of a bag's weights. */
MIXPI_K void MIXPI_P(embedding_back_weights)(const void *args, int64_t bag) {
    const mixp_embedding_backward_args *k = (const mixp_embedding_backward_args *)args;
    const int64_t end = mixpi_bag_first(&k->bags, k->rows, bag + 1);
    float row[MIXPI_BLOCK], buf[MIXPI_BLOCK];
    for (int64_t j = mixpi_bag_first(&k->bags, k->rows, bag); j < end; j++) {
        const int64_t at = (int64_t)k->ids[j] * k->cols;
        float sum = 0.0f;
        MIXPI_BLOCKS(i, n, k->ids[j] == k->bags.padding ? 0 : k->cols) {
            const float *x = MIXPI_P(read)(k->table, at + i, n, row);
            sum += MIXPI_P(floats_dot)(x, MIXPI_P(read)(k->dy, bag * k->cols + i, n, buf), n);
        }
        MIXPI_P(write)(k->dweights, j, 1, &sum);
    }
}

MIXPI_K mixp_result MIXPI_P(embedding_backward)(const mixp_exec *x,
                                                const mixp_embedding_backward_args *k) {
    return mixpi_cpu_embedding_backward(x, k, MIXPI_P(embedding_back_row),
                                        MIXPI_P(embedding_back_weights));
}

/* --- losses --- */

/* The smoothed part of a row's loss: the mean over the columns of the distance below the largest
 * logit, times the columns' weights, and as much of log_sum as the weights' mean. */
MIXPI_K double MIXPI_P(entropy_smooth)(const mixp_cross_entropy_args *k, int64_t at, float max,
                                       double log_sum) {
    const float share = (float)(1.0 / (double)k->cols);
    float buf[MIXPI_BLOCK], below[MIXPI_BLOCK];
    double sum = k->weights ? (double)k->weights[k->cols] * log_sum : log_sum;
    MIXPI_BLOCKS(i, n, k->cols) {
        const float *x = MIXPI_P(read)(k->logits, at + i, n, buf);
        MIXPI_P(floats_affine)(below, x, -max, -share, n);
        for (int64_t j = 0; k->weights && j < n; j++) below[j] *= k->weights[i + j];
        sum += (double)MIXPI_P(floats_sum)(below, n);
    }
    return sum;
}

/* The row's loss, with its parts added in double. */
MIXPI_K void MIXPI_P(entropy_row)(const void *args, int64_t row) {
    const mixpi_entropy_job *job = (const mixpi_entropy_job *)args;
    const mixp_cross_entropy_args *k = job->k;
    const int64_t at = row * k->cols;
    const int32_t target = k->targets[row];
    const int counts = target != k->ignore;
    const float at_target = counts ? MIXPI_P(read_one)(k->logits, at + target) : 0.0f;
    float e[MIXPI_BLOCK], max = 0.0f, log_sum = 0.0f;
    const double smooth = (double)k->smoothing;

    /* The largest logit, the sum of exponentials, and the sum without the target's. */
    if (!k->logs) {
        max = MIXPI_P(row_max)(k->logits, at, k->cols);
        const double sum = MIXPI_P(row_sumexp)(k->logits, at, k->cols, max, e), rsum = 1.0 / sum;
        double rest = sum;
        if (counts) rest -= (double)(k->cols > MIXPI_BLOCK ? expf(at_target - max) : e[target]);
        if (counts && at_target >= max && sum < 1.0 + MIXPI_SURE) {
            rest = MIXPI_P(row_others)(k->logits, at, k->cols, max, e);
            log_sum = log1pf((float)rest);
        } else {
            log_sum = logf((float)sum);
        }
        k->stats[3 * row] = max;
        k->stats[3 * row + 1] = (float)rsum;
        k->stats[3 * row + 2] = (float)(rest * rsum);
    }

    /* The loss of the target; smoothing mixes in those of all classes. */
    if (!counts) return;
    job->losses[row] = (double)(max - at_target) + (double)log_sum;
    if (k->weights) job->losses[row] *= (double)k->weights[target];
    if (!(smooth > 0.0)) return;
    job->losses[row] *= 1.0 - smooth;
    job->losses[row] += smooth * MIXPI_P(entropy_smooth)(k, at, max, (double)log_sum);
}

MIXPI_KERNEL(cross_entropy, mixpi_cpu_cross_entropy, mixp_cross_entropy_args, MIXPI_P(entropy_row))

/* d = factor (all softmax + others) of the columns i to i + n of a row; the target's is computed
 * separately. */
MIXPI_K void MIXPI_P(entropy_back_part)(const mixp_cross_entropy_backward_args *k, int64_t row,
                                        mixpi_entropy_slopes s, int64_t i, int64_t n, float *d) {
    const int64_t target = k->targets[row];
    float buf[MIXPI_BLOCK];

    /* The part that all classes share. */
    if (k->logs) {
        memset(d, 0, MIXPI_BLOCK * sizeof *d);
    } else {
        const float top = k->stats[3 * row], rsum = k->stats[3 * row + 1];
        const float *a = MIXPI_P(read)(k->logits, row * k->cols + i, n, buf);
        MIXPI_P(floats_exp)(d, a, -top, n);
        MIXPI_P(floats_affine)(d, d, 0.0f, k->weights ? rsum * s.all : rsum, n);
    }

    /* The parts of the target and of smoothing. */
    if (target >= i && target < i + n) d[target - i] = s.target;
    if (k->weights && k->smoothing > 0.0f) {
        MIXPI_P(floats_affine)(buf, k->weights + i, 0.0f, s.others, n);
        MIXPI_P(floats_add)(d, d, buf, n);
        s.others = 0.0f;
    }
    MIXPI_P(floats_affine)(d, d, s.others, s.factor, n);
}

MIXPI_K void MIXPI_P(entropy_back_row)(const void *args, int64_t row) {
    const mixpi_entropy_back_job *job = (const mixpi_entropy_back_job *)args;
    const mixp_cross_entropy_backward_args *k = job->k;
    const int ignored = k->targets[row] == k->ignore;
    const mixpi_entropy_slopes s = mixpi_entropy_slopes_of(job, row);
    float d[MIXPI_BLOCK];

    if (ignored && k->dlogits.accumulate) return;
    if (ignored) memset(d, 0, sizeof d);
    MIXPI_BLOCKS(i, n, k->cols) {
        if (!ignored) MIXPI_P(entropy_back_part)(k, row, s, i, n, d);
        MIXPI_P(write)(k->dlogits, row * k->cols + i, n, d);
    }
}

MIXPI_KERNEL(cross_entropy_backward, mixpi_cpu_cross_entropy_backward,
             mixp_cross_entropy_backward_args, MIXPI_P(entropy_back_row))

/* Computes a row's loss, and its gradient while the row is in the cache. */
MIXPI_K void MIXPI_P(entropy_both_row)(const void *args, int64_t row) {
    const mixpi_entropy_both_job *job = (const mixpi_entropy_both_job *)args;
    MIXPI_P(entropy_row)(&job->loss, row);
    MIXPI_P(entropy_back_row)(&job->back, row);
}

MIXPI_KERNEL(cross_entropy_both, mixpi_cpu_cross_entropy_both, mixp_cross_entropy_both_args,
             MIXPI_P(entropy_both_row))

MIXPI_KERNEL(loss, mixpi_cpu_loss, mixp_loss_args, &MIXPI_P(map_units))
MIXPI_KERNEL(loss_backward, mixpi_cpu_loss_backward, mixp_loss_backward_args, &MIXPI_P(map_units))

