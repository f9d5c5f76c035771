/* llama_rows.h - which rows of the data a batch has: a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Batch number i is a function of i, the seed and the data alone: a run that resumes needs its step only,
 * and ranks take the batches in turn.
 */
#ifndef TRAINER_LLAMA_ROWS_H
#define TRAINER_LLAMA_ROWS_H

#include "llama_data.h"

enum { WINDOW = 64, RANDOM_ORDER = 1, RANDOM_SAMPLE, RANDOM_BATCHES, RANDOM_HELD };

static struct row_order {
    int64_t  held;                      /* rows of validation: data.rows[data.n, data.n + held) */
    int64_t  hash;                      /* of all rows */
    int64_t *order, pass;               /* the order of rows in this pass over the data; 0: none yet */
} kept;

/* A random number in [0, n). */
static int64_t random_below(int64_t n, int64_t stream, int64_t pass, int64_t k) {
    uint64_t u = mixp_random_u32((uint64_t)opt.seed, (uint64_t)pass, (uint64_t)stream, (uint64_t)k);
    return (int64_t)(u * (uint64_t)n >> 32);
}

/* FNV-1a, of Fowler, Noll and Vo, by words. */
static void add_to_hash(const void *words, int64_t n) {
    const unsigned char *p = (const unsigned char *)words;
    uint64_t             h = (uint64_t)kept.hash;
    for (int64_t i = 0; i < n; i++) {
        uint32_t word;
        memcpy(&word, p + 4 * i, 4);
        h = (h ^ word) * 1099511628211u;
    }
    kept.hash = (int64_t)h;
}

/* Reads --data, and the rows of validation behind its rows. */
static void read_all_rows(void) {
    int64_t n;
    read_rows(opt.data, opt.chat, opt.block);
    n = data.n;
    data.cut = data.empty = 0;
    if (opt.val_data) read_rows(opt.val_data, opt.chat, opt.block);
    if (opt.val_rows >= n)
        die(1, "%s has %lld rows: with --val-rows %lld none is left to train on", opt.data, (long long)n,
            (long long)opt.val_rows);
    for (int64_t k = 0; k < opt.val_rows; k++) {
        int64_t j = random_below(n - k, RANDOM_HELD, 0, k);
        row     r = data.rows[j];
        data.rows[j] = data.rows[n - 1 - k];
        data.rows[n - 1 - k] = r;
    }
    kept.held = opt.val_data ? data.n - n : opt.val_rows;
    kept.hash = 1469598103934665603;
    for (int64_t i = 0; i < data.n; i++) add_to_hash(data.rows[i].x, 2 * data.rows[i].n);
    data.n -= kept.held;
}

static int by_length(const void *a, const void *b) {
    int64_t i, j;
    memcpy(&i, a, sizeof i);
    memcpy(&j, b, sizeof j);
    if (data.rows[i].n != data.rows[j].n) return data.rows[i].n < data.rows[j].n ? -1 : 1;
    return (i > j) - (i < j);
}

/* Rows of similar length meet in a batch, because shorter ones are padded: sorts each window of batches by
 * length, then shuffles its batches. `first` rows of the pass belong to a batch of the pass before. */
static void sort_windows(int64_t first, int64_t pass) {
    int64_t batch = opt.batch, size;
    for (int64_t at = first; at < data.n; at += size) {
        size = data.n - at < WINDOW * batch ? data.n - at : WINDOW * batch;
        qsort(kept.order + at, (size_t)size, sizeof *kept.order, by_length);
        for (int64_t k = size / batch - 1; k > 0; k--) {
            int64_t *a = kept.order + at + k * batch;
            int64_t *b = kept.order + at + random_below(k + 1, RANDOM_BATCHES, pass, at + k) * batch;
            for (int64_t i = 0; i < batch; i++) {
                int64_t row_of_a = a[i];
                a[i] = b[i];
                b[i] = row_of_a;
            }
        }
    }
}

/* Row `at` of the endless sequence of passes; each pass has its own order. */
static const row *row_at(int64_t at) {
    int64_t pass = at / data.n;
    if (!kept.order) kept.order = (int64_t *)rows_memory(NULL, (size_t)data.n, sizeof *kept.order);
    if (kept.pass != pass + 1) {
        kept.pass = pass + 1;
        for (int64_t k = 0; k < data.n; k++) {
            int64_t j = random_below(k + 1, RANDOM_ORDER, pass, k);
            kept.order[k] = kept.order[j];
            kept.order[j] = k;
        }
        if (data.chat) sort_windows((opt.batch - pass * data.n % opt.batch) % opt.batch, pass);
    }
    return &data.rows[kept.order[at % data.n]];
}

/* The rows of batch `number` of the training data, or of validation, where the last rows may be NULL. */
static const row *const *rows_of_batch(int64_t number, int held) {
    static const row *chosen[4096];
    static int64_t    known = -1;
    if (known == 2 * number + held) return chosen;
    for (int64_t i = 0; i < opt.batch; i++) {
        int64_t at = number * opt.batch + i;
        chosen[i] = !held ? row_at(at) : at < kept.held ? &data.rows[data.n + at] : NULL;
    }
    known = 2 * number + held;
    return chosen;
}

/* The tokens of a batch that count in the loss. */
static int64_t counted_in(int64_t number, int held) {
    const row *const *r = rows_of_batch(number, held);
    int64_t           n = 0;
    for (int64_t i = 0; i < opt.batch; i++)
        for (int64_t k = 0; r[i] && k < r[i]->n; k++) n += r[i]->y[k] != MIXP_IGNORE;
    return n;
}

/* Fills x and y[batch, t] with a batch; t, the longest of its rows, is returned; with --graph t is --block.
 * Shorter rows end with tokens that do not count. */
static int64_t fill_rows(int64_t number, int held, int32_t *x, int32_t *y) {
    const row *const *r = rows_of_batch(number, held);
    int64_t           t = opt.graph && !held ? opt.block : 0;
    for (int64_t i = 0; i < opt.batch; i++)
        if (r[i] && r[i]->n > t) t = r[i]->n;
    for (int64_t i = 0; i < opt.batch; i++)
        for (int64_t k = 0; k < t; k++) {
            x[i * t + k] = r[i] && k < r[i]->n ? r[i]->x[k] : 0;
            y[i * t + k] = r[i] && k < r[i]->n ? r[i]->y[k] : MIXP_IGNORE;
        }
    return t;
}

#endif
