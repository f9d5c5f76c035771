#pragma once
#include "elementwise.c"

/* --- max, argmax and gather --- */

/* The largest of each column of one o: columns from `first` on, at most a block of them. */
MIXPI_K void MIXPI_P(max_columns)(const mixp_max_args *k, int64_t o, int64_t first,
                                  int64_t n, mixpi_most *most) {
    float buf[MIXPI_BLOCK];
    for (int64_t j = 0; j < k->n; j++) {
        const float *p =
            MIXPI_P(read)(k->a, (o * k->n + j) * k->inner + first, n, buf);
        for (int64_t i = 0; i < n; i++) mixpi_most_take(&most[i], p[i], j);
    }
}

/* A single column of one o, along which the array is dense. */
MIXPI_K void MIXPI_P(max_line)(const mixp_max_args *k, int64_t o, mixpi_most *most) {
    float buf[MIXPI_BLOCK];
    MIXPI_BLOCKS(i, n, k->n) {
        const float *p = MIXPI_P(read)(k->a, o * k->n + i, n, buf);
        for (int64_t j = 0; j < n; j++) mixpi_most_take(most, p[j], i + j);
    }
}

MIXPI_K void MIXPI_P(max_unit)(const void *args, int64_t unit) {
    const mixp_max_args *k = (const mixp_max_args *)args;
    int64_t tiles = mixpi_ceil_div(k->inner, MIXPI_BLOCK), o = unit / tiles;
    int64_t first = unit % tiles * MIXPI_BLOCK, at = o * k->inner + first, i;
    int64_t n = mixpi_min(MIXPI_BLOCK, k->inner - first);
    mixpi_most most[MIXPI_BLOCK];
    float value[MIXPI_BLOCK];
    memset(most, 0, sizeof most);
    if (k->inner == 1) MIXPI_P(max_line)(k, o, most);
    else MIXPI_P(max_columns)(k, o, first, n, most);
    for (i = 0; i < n; i++) {
        value[i] = most[i].value;
        k->index[at + i] = most[i].index;
        if (k->ties) k->ties[at + i] = most[i].ties;
    }
    if (k->y.data) MIXPI_P(write)(k->y, at, n, value);
}

MIXPI_KERNEL(max, mixpi_cpu_max, mixp_max_args, MIXPI_P(max_unit))

/* The gradient of element j of a column; the column's index is at `at`. */
MIXPI_V float MIXPI_P(max_share)(const mixp_max_backward_args *k, int64_t at, int64_t j,
                                 float x, float dy) {
    int64_t row;
    if (!k->shared) return k->index[at] == j ? dy : 0.0f;
    row = at / k->inner * k->n + k->index[at];
    if (!mixpi_most_equals(x, MIXPI_P(read_one)(k->a, row * k->inner + at % k->inner)))
        return 0.0f;
    return dy / (float)k->ties[at];
}

/* A piece of a line. */
MIXPI_K void MIXPI_P(max_back_unit)(const void *args, int64_t unit) {
    const mixp_max_backward_args *k = (const mixp_max_backward_args *)args;
    mixpi_lines lines = mixpi_lines_of(k->n, k->inner);
    int64_t line = unit / lines.blocks, first = unit % lines.blocks * MIXPI_BLOCK, i;
    int64_t n = mixpi_min(MIXPI_BLOCK, lines.length - first), from = line * lines.length + first;
    int64_t at = lines.along_n ? line : line / k->n * k->inner + first;
    int64_t j = lines.along_n ? first : line % k->n, step = lines.along_n ? 0 : 1;
    float dys[MIXPI_BLOCK], xs[MIXPI_BLOCK], out[MIXPI_BLOCK];
    const float *dy = MIXPI_P(read)(k->dy, at, lines.along_n ? 1 : n, dys), *x = xs;
    memset(xs, 0, sizeof xs);
    if (k->shared) x = MIXPI_P(read)(k->a, from, n, xs);
    for (i = 0; i < n; i++)
        out[i] = MIXPI_P(max_share)(k, at + i * step, j + i * !step, x[i], dy[i * step]);
    MIXPI_P(write)(k->da, from, n, out);
}

MIXPI_KERNEL(max_backward, mixpi_cpu_max_backward, mixp_max_backward_args, MIXPI_P(max_back_unit))

/* A piece of the gathered elements. */
MIXPI_K void MIXPI_P(gather_unit)(const void *args, int64_t unit) {
    const mixp_gather_args *k = (const mixp_gather_args *)args;
    int64_t first = unit * MIXPI_BLOCK, of_o = k->m * k->inner, i;
    int64_t n = mixpi_min(MIXPI_BLOCK, k->outer * of_o - first);
    float out[MIXPI_BLOCK];
    for (i = 0; i < n; i++) {
        int64_t at = first + i, row = at / of_o * k->n + k->ids[at];
        out[i] = MIXPI_P(read_one)(k->a, row * k->inner + at % k->inner);
    }
    MIXPI_P(write)(k->y, first, n, out);
}

MIXPI_KERNEL(gather, mixpi_cpu_gather, mixp_gather_args, MIXPI_P(gather_unit))

/* Up to a block of columns of one o; no other unit adds to these columns. */
MIXPI_K void MIXPI_P(gather_back_unit)(const void *args, int64_t unit) {
    const mixp_gather_args *k = (const mixp_gather_args *)args;
    int64_t tiles = mixpi_ceil_div(k->inner, MIXPI_BLOCK), o = unit / tiles;
    int64_t first = unit % tiles * MIXPI_BLOCK, i, j;
    int64_t n = mixpi_min(MIXPI_BLOCK, k->inner - first);
    float buf[MIXPI_BLOCK];
    for (j = 0; j < k->m; j++) {
        int64_t from = (o * k->m + j) * k->inner + first;
        const float *dy = MIXPI_P(read)(k->a, from, n, buf);
        for (i = 0; i < n; i++) {
            int64_t row = o * k->n + k->ids[from + i];
            float one = dy[i];
            MIXPI_P(write)(k->y, row * k->inner + first + i, 1, &one);
        }
    }
}

MIXPI_KERNEL(gather_backward, mixpi_cpu_gather_backward, mixp_gather_args,
             MIXPI_P(gather_back_unit))

/* --- rotary embeddings --- */

#define MIXPI_ROPE_PART (MIXPI_BLOCK / 2)

/* p and q become p cos - q sin and q cos + p sin. All arrays have room for a multiple of 16. */
MIXPI_K void MIXPI_P(rope_rotate)(float *p, float *q, const float *c, const float *s,
                                float sign, int64_t n) {
    for (int64_t j = 0; j < n; j += 16) {
        mixpi_v a = mixpi_vload(p + j), b = mixpi_vload(q + j);
        mixpi_v cosine = mixpi_vpart(c + j, n - j);
        mixpi_v sine = mixpi_vmul(mixpi_vset(sign), mixpi_vpart(s + j, n - j));
        mixpi_vstore(p + j, mixpi_vfma(a, cosine, mixpi_vneg(mixpi_vmul(b, sine))));
        mixpi_vstore(q + j, mixpi_vfma(b, cosine, mixpi_vmul(a, sine)));
    }
}

/* Pairs [i, i+n) of the head at `at`; the two elements of a pair are neighbours. */
MIXPI_K void MIXPI_P(rope_interleaved)(const mixpi_rope_job *job, int64_t at, int64_t row,
                                       int64_t i, int64_t n) {
    const mixp_rope_args *k = job->k;
    float buf[MIXPI_BLOCK], p[MIXPI_ROPE_PART], q[MIXPI_ROPE_PART];
    const float *a = MIXPI_P(read)(k->a, at + 2 * i, 2 * n, buf);

    /* rope_rotate wants the two elements of pairs apart. */
    memset(p, 0, sizeof p);
    memset(q, 0, sizeof q);
    for (int64_t j = 0; j < n; j++) {
        p[j] = a[2 * j];
        q[j] = a[2 * j + 1];
    }

    MIXPI_P(rope_rotate)(p, q, job->cosine + row + i, job->sine + row + i,
                       k->back ? -1.0f : 1.0f, n);
    for (int64_t j = 0; j < n; j++) {
        buf[2 * j] = p[j];
        buf[2 * j + 1] = q[j];
    }
    MIXPI_P(write)(k->y, at + 2 * i, 2 * n, buf);
}

/* Rotates pairs whose elements are half a head apart. */
MIXPI_K void MIXPI_P(rope_halves)(const mixpi_rope_job *job, int64_t at, int64_t row,
                                  int64_t i, int64_t n) {
    const mixp_rope_args *k = job->k;
    float buf[MIXPI_BLOCK], p[MIXPI_ROPE_PART], q[MIXPI_ROPE_PART];
    int64_t half = k->d / 2;
    memset(p, 0, sizeof p);
    memset(q, 0, sizeof q);
    memcpy(p, MIXPI_P(read)(k->a, at + i, n, buf), (size_t)n * sizeof *p);
    memcpy(q, MIXPI_P(read)(k->a, at + half + i, n, buf), (size_t)n * sizeof *q);
    MIXPI_P(rope_rotate)(p, q, job->cosine + row + i, job->sine + row + i,
                       k->back ? -1.0f : 1.0f, n);
    MIXPI_P(write)(k->y, at + i, n, p);
    MIXPI_P(write)(k->y, at + half + i, n, q);
}

/* All heads of a position. */
MIXPI_K void MIXPI_P(rope_unit)(const void *args, int64_t unit) {
    const mixpi_rope_job *job = (const mixpi_rope_job *)args;
    const mixp_rope_args *k = job->k;
    int64_t half = k->d / 2, row = unit % k->t * half, h, i;
    for (h = 0; h < k->heads; h++)
        for (i = 0; i < half; i += MIXPI_ROPE_PART) {
            int64_t n = mixpi_min(MIXPI_ROPE_PART, half - i);
            int64_t at = (unit * k->heads + h) * k->d;
            if (k->interleaved) MIXPI_P(rope_interleaved)(job, at, row, i, n);
            else MIXPI_P(rope_halves)(job, at, row, i, n);
        }
}
#undef MIXPI_ROPE_PART

MIXPI_KERNEL(rope, mixpi_cpu_rope, mixp_rope_args, MIXPI_P(rope_unit))

