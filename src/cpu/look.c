#pragma once
#include "update.c"
/* --- look -------------------------------------------------------------------------------- */

/* The common case: full lanes, with only zeros and numbers that are finite and normal in the low
 * format. Returns 0 and records nothing in any other case. */
MIXPI_K int MIXPI_P(look_plain)(mixpi_look_piece *p, const float *x, int n,
                                const mixpi_look_limits *at) {
    uint32_t a[MIXPI_LOOK_LANES], top[MIXPI_LOOK_LANES], low[MIXPI_LOOK_LANES];
    int32_t zeros[MIXPI_LOOK_LANES], all = 0;
    uint32_t largest = 0, smallest = 0xFFFFFFFFu;
    if (n % MIXPI_LOOK_LANES) return 0;

    /* Each lane keeps its own largest, smallest and zeros. */
    memset(top, 0, sizeof top);
    memset(low, 0xFF, sizeof low);
    memset(zeros, 0, sizeof zeros);
    for (int i = 0; i < n; i += MIXPI_LOOK_LANES) {
        memcpy(a, x + i, sizeof a);
        for (int j = 0; j < MIXPI_LOOK_LANES; j++) {
            uint32_t v = a[j] & 0x7FFFFFFFu, below = v - 1u;    /* of 0: the largest there is */
            top[j] = v > top[j] ? v : top[j];
            low[j] = below < low[j] ? below : low[j];
            zeros[j] += v == 0;
        }
    }
    for (int j = 0; j < MIXPI_LOOK_LANES; j++) {
        largest = top[j] > largest ? top[j] : largest;
        smallest = low[j] < smallest ? low[j] : smallest;
        all += zeros[j];
    }

    /* Not plain: something lies beyond a limit. */
    if (largest >= at->past || smallest < at->subnormal) return 0;
    if ((int32_t)largest > p->top) p->top = (int32_t)largest;
    p->zeros += all;
    p->flushed += all;          /* counts include all below a limit */
    p->least += all;
    p->subnormal += all;
    return 1;
}

/* 16 magnitudes at a time, as integers: fast-math, FTZ and DAZ cannot change them. */
MIXPI_K void MIXPI_P(look_block)(mixpi_look_piece *p, const float *x, int n,
                                 const mixpi_look_limits *at) {
    const int32_t inf = 0x7F800000, flushed = (int32_t)at->flushed;
    const int32_t least = (int32_t)at->least, subnormal = (int32_t)at->subnormal;
    const int32_t past = (int32_t)at->past;
    int32_t a[MIXPI_LOOK_LANES], found[8][MIXPI_LOOK_LANES];

    /* Each lane counts for itself. */
    memset(found, 0, sizeof found);
    for (int i = 0; i < n; i += MIXPI_LOOK_LANES) {
        int m = n - i < MIXPI_LOOK_LANES ? n - i : MIXPI_LOOK_LANES;
        /* Lanes beyond the end are Inf, which only `nonfinite` counts. */
        for (int j = m; j < MIXPI_LOOK_LANES; j++) a[j] = inf;
        memcpy(a, x + i, (size_t)m * sizeof *a);
        for (int j = 0; j < MIXPI_LOOK_LANES; j++) {
            int32_t v = a[j] & 0x7FFFFFFF, finite = v < inf ? v : 0;
            found[0][j] = finite > found[0][j] ? finite : found[0][j];
            found[1][j] += v >= inf;
            found[2][j] += v == 0;
            found[3][j] += v <= flushed;
            found[4][j] += v < least;
            found[5][j] += v < subnormal;
            found[6][j] += finite >= past;
            found[7][j] |= v > inf;
        }
    }
    for (int j = 0; j < MIXPI_LOOK_LANES; j++) {
        if (found[0][j] > p->top) p->top = found[0][j];
        p->nonfinite += found[1][j];
        p->zeros += found[2][j];
        p->flushed += found[3][j];
        p->least += found[4][j];
        p->subnormal += found[5][j];
        p->past += found[6][j];
        p->nan |= found[7][j];
    }

    /* The lanes beyond the end. */
    p->nonfinite -= (MIXPI_LOOK_LANES - n % MIXPI_LOOK_LANES) % MIXPI_LOOK_LANES;
}

MIXPI_K void MIXPI_P(look_piece)(void *arg, int64_t index, int worker) {
    const mixpi_look_job *job = (const mixpi_look_job *)arg;
    const mixp_look_args *k = job->k;
    mixpi_look_piece *p = &job->pieces[index];
    int64_t i = index * MIXPI_CHUNK, end = mixpi_min(i + MIXPI_CHUNK, k->n);
    float buf[MIXPI_BLOCK];
    (void)worker;
    memset(p, 0, sizeof *p);
    for (; i < end; i += MIXPI_BLOCK) {
        int n = (int)mixpi_min(MIXPI_BLOCK, end - i), j;
        const float *x = MIXPI_P(read)(k->x, i, n, buf);
        if (!MIXPI_P(look_plain)(p, x, n, &job->at)) MIXPI_P(look_block)(p, x, n, &job->at);
        for (j = 0; k->exponents && j < n; j++)
            p->exponents[(mixp_bits_of_f32(x[j]) >> 23) & 255u]++;
    }
}

MIXPI_KERNEL(look_at, mixpi_cpu_look_at, mixp_look_args, MIXPI_P(look_piece))

/* --- buffers that became Inf or NaN --- */

/* Is any number of the block Inf or NaN? */
MIXPI_K int MIXPI_P(check_any)(const mixpi_lanes *l, const char *now) {
    const uint64_t exponent = l->exponent, unit = l->unit;
    uint64_t any[8], word[8], all = 0;
    memset(any, 0, sizeof any);
    for (int i = 0; i < MIXPI_CHECK_WORDS; i += 8) {
        memcpy(word, now + 8 * i, sizeof word);
        for (int j = 0; j < 8; j++) any[j] |= (word[j] & exponent) + unit;
    }
    for (int j = 0; j < 8; j++) all |= any[j];
    return (all & l->sign) != 0;
}

/* Looks at `bytes` bytes, at most 8 for each word from number i on. */
MIXPI_K uint64_t MIXPI_P(check_words)(const mixp_check_part *p, const mixpi_lanes *l, int64_t i,
                                      int64_t bytes) {
    const char *now = (const char *)p->now + 8 * i, *before = (const char *)p->before + 8 * i;
    uint64_t found = 0;
    for (; bytes > 0 && !found; i++, bytes -= 8, now += 8, before += 8) {
        uint64_t is = 0, was = 0;
        if (bytes >= 8) {
            memcpy(&is, now, 8);
            memcpy(&was, before, 8);
        } else {
            memcpy(&is, now, (size_t)bytes);
            memcpy(&was, before, (size_t)bytes);
        }
        found = mixpi_lanes_bad(p, l, i, is, was);
    }
    return found;
}

/* Reads what was there before only in blocks where a number is bad now. */
MIXPI_K uint64_t MIXPI_P(check_part)(const mixp_check_part *p) {
    const mixpi_lanes l = mixpi_lanes_of(p->dtype);
    const int64_t bytes = p->count * l.bits / 8, block = 8 * MIXPI_CHECK_WORDS;
    uint64_t found = 0;
    for (int64_t at = 0; at < bytes && !found; at += block) {
        const int64_t n = mixpi_min(block, bytes - at);
        if (n == block && !MIXPI_P(check_any)(&l, (const char *)p->now + at)) continue;
        found = MIXPI_P(check_words)(p, &l, at / 8, n);
    }
    return found;
}

MIXPI_K mixp_result MIXPI_P(check_buffers)(const mixp_exec *x, const mixp_check_buffers_args *k) {
    uint64_t found = 0;
    (void)x;
    for (int i = 0; i < k->n_parts && !found; i++) found = MIXPI_P(check_part)(&k->parts[i]);
    if (found > *k->found) *k->found = found;
    return MIXP_OK;
}

