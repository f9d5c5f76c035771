/* ledger.h - what a training step asks of a device: a device that runs nothing and writes down
 * every kernel call, with its bytes, its arithmetic and a model of its time on an H200.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * It is one more mixp_device. Its memory is addresses alone, which nothing may read or write; so the
 * whole library runs, tape, autocast, optimizer and memory, and a step of GPT-2 at 65,536 tokens
 * takes 30 microseconds. What it counts is exact: calls, bytes that a kernel must read and write,
 * FLOP, memory. Launches and milliseconds are of mixprec_cuda.cu: launches as it makes them, times
 * by the model at the end of this comment, which no hardware has confirmed yet.
 *
 *     tests/test_ledger.c         holds the figures: a change that adds a pass is seen
 *     tests/bench/ledger.c        shows them (make ledger)
 *
 * The model: a kernel takes the longest of its launches at 2.5 us each, its bytes at a share of what
 * copying reaches (4.3 TB/s on an H200), and its FLOP at a rate. Shares are instruction counts of the
 * compiled kernels (sm_90) against the issue slots that a byte leaves; rates of products are what
 * cuBLASLt reaches on an H100 by published figures.
 */
#ifndef LEDGER_H
#define LEDGER_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LEDGER_COPY    4.3e12           /* bytes a second */
#define LEDGER_PRODUCT 3.9e12           /* bytes a second beside products */
#define LEDGER_ISSUE   8.83e11          /* instructions of warps: 132 SMs, 4 each, 1.9 GHz, 88% */
#define LEDGER_LAUNCH  2.5e-6           /* seconds */

typedef struct ledger_line {
    char    what[32];
    int64_t calls, launches;
    double  read, written, flop, seconds;
} ledger_line;

typedef struct ledger_block { uint64_t at; size_t bytes; } ledger_block;

static struct {
    int          on;                    /* 1: calls are written down */
    int          backward;              /* 1: they belong to the backward pass */
    FILE        *calls;                 /* where each call is shown, or NULL */
    ledger_line  lines[64], sum;
    int          count;
    uint64_t     next;                  /* the address that memory is handed out from */
    ledger_block blocks[8192];
    int          block_count;
    size_t       allocated, most;
    mixp_param_row *rows;               /* the parameters, as they were uploaded last */
    int64_t      row_count;
} ledger;

/* --- writing down ------------------------------------------------------------------ */

/* One call: what a kernel moves and computes, and how well. */
typedef struct ledger_call {
    const char *what;
    int64_t     launches;
    double      read, written;
    double      flop, rate;             /* rate 0: bytes alone take time */
    double      share;                  /* of LEDGER_COPY; 0: LEDGER_PRODUCT */
    double      issued;                 /* instructions of warps, where they take longer; or 0 */
    double      more;                   /* seconds beside */
} ledger_call;

static double ledger_seconds(const ledger_call *c) {
    double bandwidth = c->share > 0 ? c->share * LEDGER_COPY : LEDGER_PRODUCT;
    double t = (c->read + c->written) / bandwidth, launches = LEDGER_LAUNCH * (double)c->launches;
    if (c->rate > 0 && c->flop / c->rate > t) t = c->flop / c->rate;
    if (c->issued / LEDGER_ISSUE > t) t = c->issued / LEDGER_ISSUE;
    t += c->more;
    return t > launches ? t : launches;
}

static void ledger_add(ledger_line *line, const ledger_call *c) {
    line->calls++;
    line->launches += c->launches;
    line->read += c->read;
    line->written += c->written;
    line->flop += c->flop;
    line->seconds += ledger_seconds(c);
}

static ledger_line *ledger_line_of(const char *what) {
    for (int i = 0; i < ledger.count; i++)
        if (!strcmp(ledger.lines[i].what, what)) return &ledger.lines[i];
    if (ledger.count == (int)(sizeof ledger.lines / sizeof *ledger.lines)) abort();
    snprintf(ledger.lines[ledger.count].what, sizeof ledger.lines->what, "%s", what);
    return &ledger.lines[ledger.count++];
}

static mixp_result ledger_note(const ledger_call *c) {
    if (!ledger.on) return MIXP_OK;
    ledger_add(ledger_line_of(c->what), c);
    ledger_add(&ledger.sum, c);
    if (ledger.calls)
        fprintf(ledger.calls, "%s|%s|%d|%.0f|%.0f|%.0f|%.3f us\n",
                ledger.backward ? "back" : "forward", c->what, (int)c->launches, c->read, c->written, c->flop, 1e6 * ledger_seconds(c));
    return MIXP_OK;
}

/* A kernel that moves bytes. */
static mixp_result ledger_moves(const char *what, int launches, double read, double written,
                                double share) {
    ledger_call c = { what, launches, read, written, 0, 0, share, 0, 0 };
    return ledger_note(&c);
}

static double ledger_size(mixp_dtype d) { return (double)mixp_dtype_size(d); }
static double ledger_in(mixp_in a, double n) { return a.data ? n * ledger_size(a.dtype) : 0; }
/* What an output of n elements costs to write, and to read first where it is added to. */
static double ledger_out(mixp_out y, double n) { return y.data ? n * ledger_size(y.dtype) : 0; }
static double ledger_old(mixp_out y, double n) { return y.accumulate ? ledger_out(y, n) : 0; }
static int ledger_low(mixp_dtype d) { return mixp_dtype_size(d) == 2; }

/* --- memory ------------------------------------------------------------------------ */

static void *ledger_allocate(const mixp_exec *x, size_t bytes) {
    const int   room = (int)(sizeof ledger.blocks / sizeof *ledger.blocks);
    ledger_block *b = &ledger.blocks[ledger.block_count];
    (void)x;
    if (ledger.block_count == room) return NULL;
    ledger.block_count++;
    b->at = ledger.next;
    b->bytes = bytes;
    ledger.next += (bytes + 4095) / 4096 * 4096;
    ledger.allocated += bytes;
    if (ledger.allocated > ledger.most) ledger.most = ledger.allocated;
    return (void *)(uintptr_t)b->at;
}

static void ledger_release(const mixp_exec *x, void *p) {
    (void)x;
    for (int i = 0; i < ledger.block_count; i++) {
        ledger_block *b = &ledger.blocks[i];
        if (b->at != (uint64_t)(uintptr_t)p) continue;
        ledger.allocated -= b->bytes;
        *b = ledger.blocks[--ledger.block_count];
        return;
    }
}

/* The optimizer's table of parameters is the largest array of whole rows that it uploads. */
static mixp_result ledger_upload(const mixp_exec *x, void *to, const void *from, size_t bytes) {
    mixp_param_row *rows;
    (void)x, (void)to;
    if (bytes % sizeof *rows || bytes / sizeof *rows < 8) return MIXP_OK;
    rows = (mixp_param_row *)malloc(bytes);
    if (!rows) return MIXP_ERR_MEMORY;
    memcpy(rows, from, bytes);
    free(ledger.rows);
    ledger.rows = rows;
    ledger.row_count = (int64_t)(bytes / sizeof *rows);
    return MIXP_OK;
}
static mixp_result ledger_feed(const mixp_exec *x, void *to, const void *from, size_t bytes) {
    (void)x, (void)to, (void)from, (void)bytes;
    return MIXP_OK;
}
static mixp_result ledger_download(const mixp_exec *x, void *to, const void *from, size_t bytes) {
    (void)x, (void)from;
    memset(to, 0, bytes);
    return MIXP_OK;
}
static mixp_result ledger_wait(const mixp_exec *x) { (void)x; return MIXP_OK; }

/* --- kernels ----------------------------------------------------------------------- */

#define LEDGER_KERNEL(name) \
    static mixp_result ledger_##name(const mixp_exec *x, const mixp_##name##_args *k)

LEDGER_KERNEL(convert) {
    double n = (double)k->n;
    (void)x;
    return ledger_moves(ledger.backward ? "casts backward" : "casts", 1, ledger_in(k->src, n),
                        ledger_out(k->dst, n), 0.85);
}
LEDGER_KERNEL(fill) {
    (void)x;
    return ledger_moves("fill", 1, 0, ledger_out(k->dst, (double)k->n), 0.7);
}
LEDGER_KERNEL(copy) {
    double n = 1;
    (void)x;
    for (int i = 0; i < k->rank; i++) n *= (double)k->shape[i];
    return ledger_moves("copy", 1, ledger_in(k->src, n) + ledger_old(k->dst, n),
                        ledger_out(k->dst, n), 0.7);
}

/* A function of an element: 8 a thread, so 256 a warp, at so many instructions. */
static mixp_result ledger_map(const char *what, double n, double instructions, double read,
                              double written) {
    ledger_call c = { what, 1, read, written, 0, 0, 0.85, n / 256 * instructions, 0 };
    return ledger_note(&c);
}
LEDGER_KERNEL(unary) {
    double n = (double)k->n;
    int erf = k->op == MIXP_UNARY_GELU_ERF;
    int quick = ledger_low(k->a.dtype) && ledger_low(k->y.dtype);
    (void)x;
    return ledger_map(erf ? "gelu" : "unary", n, quick ? 180 : erf ? 640 : 370,
                      ledger_in(k->a, n) + ledger_old(k->y, n), ledger_out(k->y, n));
}
LEDGER_KERNEL(unary_backward) {
    double n = (double)k->n;
    double told = mixpi_unary_by_result(k->op) ? ledger_in(k->y, n) : ledger_in(k->a, n);
    int erf = k->op == MIXP_UNARY_GELU_ERF;
    int quick = ledger_low(k->a.dtype) && ledger_low(k->dy.dtype) && ledger_low(k->da.dtype);
    (void)x;
    return ledger_map(erf ? "gelu backward" : "unary backward", n, quick ? 250 : erf ? 826 : 480,
                      ledger_in(k->dy, n) + told + ledger_old(k->da, n), ledger_out(k->da, n));
}

/* The elements of an operand, whose stride is 0 along the axes that it is repeated along. */
static double ledger_operand(const mixp_binary_args *k, const int64_t *strides) {
    double n = 1;
    for (int i = 0; i < k->rank; i++)
        if (strides[i] || k->shape[i] == 1) n *= (double)k->shape[i];
    return n;
}
static double ledger_points(const mixp_binary_args *k) {
    double n = 1;
    for (int i = 0; i < k->rank; i++) n *= (double)k->shape[i];
    return n;
}
LEDGER_KERNEL(binary) {
    double n = ledger_points(k);
    double a = ledger_operand(k, k->a_strides), b = ledger_operand(k, k->b_strides);
    (void)x;
    return ledger_moves("add", 1, ledger_in(k->a, a) + ledger_in(k->b, b) + ledger_old(k->y, n),
                        ledger_out(k->y, n), 0.85);
}
static mixp_result ledger_binary_backward(const mixp_exec *x, const mixp_binary_args *k) {
    double n = ledger_points(k), out = ledger_operand(k, k->which ? k->b_strides : k->a_strides);
    int low = ledger_low(k->dy.dtype) && ledger_low(k->dx.dtype);
    double read = ledger_in(k->dy, n) + ledger_old(k->dx, out);
    (void)x;
    if (out < n) return ledger_moves("sum of a broadcast", 2, read, ledger_out(k->dx, out), 0.55);
    return ledger_moves("residual copied", 1, read, ledger_out(k->dx, n), low ? 0.68 : 0.82);
}

/* Columns are added in runs of rows, by threads; then the runs, by blocks. */
LEDGER_KERNEL(reduce) {
    double out = (double)k->outer * (double)k->inner, n = out * (double)k->n;
    int64_t run = 8 * ((k->n + 4095) / 4096) > 64 ? 8 * ((k->n + 4095) / 4096) : 64;
    int64_t runs = (k->n + run - 1) / run;
    double  partial = runs > 1 ? (double)runs * out * 4 : 0;
    (void)x;
    return ledger_moves("bias gradients", 2, ledger_in(k->a, n) + ledger_old(k->y, out) + partial,
                        ledger_out(k->y, out) + partial, 0.85);
}
static mixp_result ledger_reduce_backward(const mixp_exec *x, const mixp_reduce_args *k) {
    double in = (double)k->outer * (double)k->inner, n = in * (double)k->n;
    (void)x;
    return ledger_moves("reduce backward", 1, ledger_in(k->a, in) + ledger_old(k->y, n),
                        ledger_out(k->y, n), 0.7);
}
LEDGER_KERNEL(softmax) {
    double n = (double)k->rows * (double)k->cols;
    (void)x;
    return ledger_moves("softmax", 1, ledger_in(k->a, n), ledger_out(k->y, n), 0.7);
}
LEDGER_KERNEL(softmax_backward) {
    double n = (double)k->rows * (double)k->cols;
    (void)x;
    return ledger_moves("softmax backward", 1,
                        ledger_in(k->dy, n) + ledger_in(k->y, n) + ledger_old(k->da, n),
                        ledger_out(k->da, n), 0.7);
}
LEDGER_KERNEL(norm) {
    double rows = (double)k->rows, n = rows * (double)k->cols;
    (void)x;
    return ledger_moves("norm", 1, ledger_in(k->a, n), ledger_out(k->y, n) + 8 * rows,
                        0.85);
}

static mixp_result ledger_add_norm(const mixp_exec *x, const mixp_norm_args *k) {
    double rows = (double)k->rows, n = rows * (double)k->cols;
    (void)x;
    return ledger_moves("sum and norm", 1, ledger_in(k->a, n) + ledger_in(k->b, n),
                        ledger_out(k->sum, n) + ledger_out(k->y, n) + 8 * rows, 0.85);
}

/* 1,024 slices of the rows keep their own sums for gamma and beta. */
LEDGER_KERNEL(norm_backward) {
    double rows = (double)k->rows, cols = (double)k->cols, n = rows * cols;
    double slices = 1024 * 2 * 4 * cols;
    double read = ledger_in(k->dy, n) + ledger_in(k->a, n) + ledger_old(k->da, n) + 8 * rows;
    (void)x;
    return ledger_moves("norm backward", 2, read + slices,
                        ledger_out(k->da, n) + ledger_out(k->db, n) + slices, 0.80);
}
LEDGER_KERNEL(embedding) {
    double n = (double)k->rows * (double)k->cols;
    (void)x;
    return ledger_moves("embedding", 1, ledger_in(k->table, n), ledger_out(k->y, n), 0.75);
}
LEDGER_KERNEL(embedding_backward) {
    double n = (double)k->rows * (double)k->cols, all = (double)k->vocab * (double)k->cols;
    double at_gpt2 = n / 50331648.0 > 0.3 ? n / 50331648.0 : 0.3;
    ledger_call c = { "embedding backward", 2, ledger_in(k->dy, n) + ledger_old(k->dtable, n),
                      ledger_out(k->dtable, k->dtable.accumulate ? n : all), 0, 0, 1e3, 0, 0 };
    (void)x;
    c.more = (k->vocab > 5000 ? 0.55e-3 : 0.05e-3) * at_gpt2;
    return ledger_note(&c);
}

/* Of its keys and values, each head of theirs once; a mask once. */
static double ledger_keys(const mixp_attention_args *k) {
    double keys = (double)k->b * (double)k->keys * (double)k->kv_heads * (double)k->d;
    return ledger_in(k->k, keys) + ledger_in(k->v, keys);
}
static double ledger_mask(const mixp_attention_args *k) {
    double n = (double)(k->mask_key ? k->keys : 1);
    if (k->mask_at.row) n *= (double)k->t;
    if (k->mask_at.head) n *= (double)k->heads;
    return ledger_in(k->mask, k->mask_at.sequence ? n * (double)k->b : n);
}

/* 4 n keys flop forward, 10 backward (5 products; what is computed again is not counted), half of it
 * where no later key is seen. Backward is two launches, of dQ, with delta, and of dK and dV. */
LEDGER_KERNEL(attention) {
    double rows = (double)k->b * (double)k->t * (double)k->heads, n = rows * (double)k->d;
    ledger_call c = { "attention", 1, ledger_in(k->q, n) + ledger_keys(k) + ledger_mask(k),
                      ledger_out(k->y, n) + 4 * rows, 0, 195e12, 0.9, 0, 0 };
    (void)x;
    c.flop = 4 * n * (double)k->keys * (k->causal ? 0.5 : 1);
    return ledger_note(&c);
}
LEDGER_KERNEL(attention_backward) {
    const mixp_attention_args *f = &k->forward;
    double rows = (double)f->b * (double)f->t * (double)f->heads, n = rows * (double)f->d;
    double keys = (double)f->b * (double)f->keys * (double)f->kv_heads * (double)f->d;
    ledger_call c = { "attention backward", 2, 0, 0, 0, 140e12, 0.9, 0, 0 };
    (void)x;
    c.read = 2 * (ledger_in(f->q, n) + ledger_keys(f) + ledger_mask(f) + ledger_in(k->dy, n)) +
             12 * rows + ledger_out(f->y, n) + ledger_old(k->dq, n) + ledger_old(k->dk, keys) +
             ledger_old(k->dv, keys);
    c.written = ledger_out(k->dq, n) + ledger_out(k->dk, keys) + ledger_out(k->dv, keys) + 4 * rows;
    c.flop = 10 * n * (double)f->keys * (f->causal ? 0.5 : 1);
    return ledger_note(&c);
}
LEDGER_KERNEL(cross_entropy) {
    double rows = (double)k->rows, n = rows * (double)k->cols;
    (void)x;
    return ledger_moves("cross-entropy", 2, ledger_in(k->logits, n) + 4 * rows, 12 * rows, 0.85);
}
LEDGER_KERNEL(cross_entropy_backward) {
    double rows = (double)k->rows, n = rows * (double)k->cols;
    (void)x;
    return ledger_moves("cross-entropy backward", 1,
                        ledger_in(k->logits, n) + ledger_old(k->dlogits, n) + 12 * rows,
                        ledger_out(k->dlogits, n), 0.80);
}
LEDGER_KERNEL(cross_entropy_both) {
    double rows = (double)k->loss.rows, n = rows * (double)k->loss.cols;
    (void)x;
    return ledger_moves("cross-entropy, both ways", 3, ledger_in(k->loss.logits, n) + 12 * rows,
                        ledger_out(k->dlogits, n) + 12 * rows, 0.80);
}
LEDGER_KERNEL(loss) {
    double n = (double)k->n;
    (void)x;
    return ledger_moves("loss", 2, ledger_in(k->a, n) + ledger_in(k->target, n), 4, 0.7);
}
LEDGER_KERNEL(loss_backward) {
    double n = (double)k->n;
    (void)x;
    return ledger_moves("loss backward", 1,
                        ledger_in(k->a, n) + ledger_in(k->target, n) + ledger_old(k->da, n),
                        ledger_out(k->da, n), 0.7);
}
LEDGER_KERNEL(dropout) {
    double n = (double)k->n;
    (void)x;
    return ledger_moves("dropout", 1, ledger_in(k->a, n) + ledger_old(k->y, n),
                        ledger_out(k->y, n), 0.6);
}

/* TFLOP/s by shape: weight gradients are slower, the more the fewer tiles they have. */
static double ledger_product_rate(const mixp_gemm_args *k) {
    if (!ledger_low(k->a.dtype)) return 50e12;      /* no tensor cores */
    if (k->trans_a) return k->m > 10000 ? 700e12 : k->m * k->n < 600000 ? 520e12 : 600e12;
    return k->n > 10000 ? 690e12 : k->k > 10000 ? 730e12 : 650e12;
}
static mixp_result ledger_gemm(const mixp_exec *x, const mixp_gemm_args *k) {
    double m = (double)k->m, n = (double)k->n, depth = (double)k->k, batch = (double)k->batch;
    const char *what = !ledger.backward ? "products"
                       : k->trans_a     ? "products, weights' gradients"
                                        : "products, inputs' gradients";
    ledger_call c = { what, 1, 0, 0, 0, 0, 0, 0, 0 };
    (void)x;
    c.read = ledger_in(k->a, m * depth) + ledger_in(k->b, depth * n) + ledger_old(k->c, m * n);
    c.read = batch * c.read + ledger_in(k->bias, n);
    c.written = batch * ledger_out(k->c, m * n);
    c.flop = 2 * m * n * depth * batch;
    c.rate = ledger_product_rate(k);
    return ledger_note(&c);
}

/* With sums or GELU in its pass: one launch, and the bytes of what was before GELU. Its time is taken
 * to be the product's alone, as on an H100 and H200 by published figures: not on every GPU. */
LEDGER_KERNEL(gemm_epilogue) {
    double m = (double)k->gemm.m, n = (double)k->gemm.n, depth = (double)k->gemm.k;
    const char *what = k->kind == MIXP_EPILOGUE_ROW_SUMS ? "products, weights' gradients"
                     : k->kind == MIXP_EPILOGUE_GELU     ? "products with gelu"
                                                         : "products with gelu backward";
    int back = k->kind == MIXP_EPILOGUE_GELU_BACK;
    ledger_call c = { what, 1, 0, 0, 0, 0, 0, 0, 0 };
    (void)x;
    c.read = ledger_in(k->gemm.a, m * depth) + ledger_in(k->gemm.b, depth * n) +
             ledger_old(k->gemm.c, m * n) + ledger_in(k->gemm.bias, n) + ledger_old(k->sums, m) +
             (back ? ledger_out(k->before, m * n) : 0);
    c.written = ledger_out(k->gemm.c, m * n) + ledger_out(k->sums, m) +
                (back ? 0 : ledger_out(k->before, m * n));
    c.flop = 2 * m * n * depth;
    c.rate = ledger_product_rate(&k->gemm);
    return ledger_note(&c);
}
LEDGER_KERNEL(scale_by) {
    double n = (double)k->n;
    (void)x;
    return ledger_moves("scale", 1, ledger_in(k->a, n) + ledger_old(k->y, n),
                        ledger_out(k->y, n), 0.7);
}

/* --- kernels of the optimizer: over the rows that were uploaded -------------------- */

LEDGER_KERNEL(grad_stats) {
    double grads = 0;
    (void)x;
    for (int64_t i = 0; i < ledger.row_count && i < k->count; i++)
        grads += (double)ledger.rows[i].count * ledger_size(ledger.rows[i].grad_dtype);
    return ledger_moves("statistics", 1, grads, k->unscale ? grads : 0, 0.75);
}
LEDGER_KERNEL(clip) {
    (void)x, (void)k;
    return ledger_moves("clip", 1, 0, 0, 0.7);
}
LEDGER_KERNEL(prepare) {
    (void)x, (void)k;
    return ledger_moves("prepare", 1, 0, 0, 0.7);
}
/* Weight or master, moments and gradient are read; all but the gradient are written, and the copies
 * for autocast. */
LEDGER_KERNEL(update) {
    double state = 0, grads = 0, copies = 0;
    (void)x;
    for (int64_t i = 0; i < ledger.row_count && i < k->count; i++) {
        const mixp_param_row *r = &ledger.rows[i];
        double n = (double)r->count;
        state += n * ledger_size(r->master ? r->master_dtype : r->weight_dtype);
        if (r->m) state += n * ledger_size(r->m_dtype);
        if (r->v) state += n * ledger_size(r->v_dtype);
        grads += n * ledger_size(r->grad_dtype);
        copies += n * (r->master ? ledger_size(r->weight_dtype) : 0);
        copies += n * 2 * ((r->low_f16 != NULL) + (r->low_bf16 != NULL));
    }
    return ledger_moves("update", 1, state + grads, state + copies, 0.85);
}
LEDGER_KERNEL(advance) {
    (void)x, (void)k;
    return ledger_moves("advance", 1, 0, 0, 0.7);
}

/* --- the device -------------------------------------------------------------------- */

/* Kernels that this file does not know are not there. */
static const mixp_device *ledger_device(void) {
    static mixp_kernels kernels;
    static mixp_device  device;
    kernels.convert = ledger_convert;
    kernels.fill = ledger_fill;
    kernels.copy = ledger_copy;
    kernels.unary = ledger_unary;
    kernels.unary_backward = ledger_unary_backward;
    kernels.binary = ledger_binary;
    kernels.binary_backward = ledger_binary_backward;
    kernels.reduce = ledger_reduce;
    kernels.reduce_backward = ledger_reduce_backward;
    kernels.softmax = ledger_softmax;
    kernels.softmax_backward = ledger_softmax_backward;
    kernels.norm = ledger_norm;
    kernels.norm_backward = ledger_norm_backward;
    kernels.embedding = ledger_embedding;
    kernels.embedding_backward = ledger_embedding_backward;
    kernels.attention = ledger_attention;
    kernels.attention_backward = ledger_attention_backward;
    kernels.cross_entropy = ledger_cross_entropy;
    kernels.cross_entropy_backward = ledger_cross_entropy_backward;
    kernels.loss = ledger_loss;
    kernels.loss_backward = ledger_loss_backward;
    kernels.dropout = ledger_dropout;
    kernels.gemm = ledger_gemm;
    kernels.scale_by = ledger_scale_by;
    kernels.grad_stats = ledger_grad_stats;
    kernels.clip = ledger_clip;
    kernels.prepare = ledger_prepare;
    kernels.update = ledger_update;
    kernels.advance = ledger_advance;
    kernels.add_norm = ledger_add_norm;
    kernels.cross_entropy_both = ledger_cross_entropy_both;
    kernels.gemm_epilogue = ledger_gemm_epilogue;
    device.name = "ledger";
    device.kernels = &kernels;
    device.allocate = ledger_allocate;
    device.release = ledger_release;
    device.upload = ledger_upload;
    device.feed = ledger_feed;
    device.download = device.peek = ledger_download;
    device.wait = ledger_wait;
    return &device;
}

static void ledger_clear(void) {
    free(ledger.rows);
    memset(&ledger, 0, sizeof ledger);
    ledger.next = (uint64_t)1 << 40;
}

/* --- GPTs, as examples/tiny_gpt.c trains them -------------------------------------------------------------------------- */

typedef struct ledger_config {
    const char *name;
    int64_t     vocab, length, batch, layers, heads, width;
    mixp_dtype  dtype;
    int         level, accumulate;      /* micro-batches a step */
    int         epilogues;              /* MIXP_EPILOGUES_; with that of GELU, GELU is by tanh */
} ledger_config;

typedef struct ledger_layer { mixp_tensor *w, *b; } ledger_layer;
typedef struct ledger_part { ledger_layer norm1, qkv, proj, norm2, up, down; } ledger_part;

typedef struct ledger_gpt {
    ledger_config   c;
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *wte, *wpe;
    ledger_layer    norm;
    ledger_part     parts[48];
    int32_t        *ids;
    int64_t         parameters;
} ledger_gpt;

typedef struct ledger_result {
    double  parameters;
    size_t  permanent, forward, peak;   /* bytes in use: between steps, after forward, at most */
    size_t  allocated, given;           /* bytes taken from the device: by the context, and by it */
    int64_t pieces;
    char    error[400];                 /* "" for none */
} ledger_result;

static mixp_tensor *ledger_parameter(ledger_gpt *m, const char *part, int i, int64_t rows,
                                     int64_t cols) {
    int64_t shape[2];
    char    name[48];
    mixp_tensor *t;
    shape[0] = rows;
    shape[1] = cols;
    snprintf(name, sizeof name, "%s.%d.%s", part, i, cols ? "weight" : "bias");
    t = mixp_param(m->ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    mixp_optimizer_add(m->opt, t, NULL);
    m->parameters += rows * (cols ? cols : 1);
    return t;
}
static ledger_layer ledger_layer_of(ledger_gpt *m, const char *part, int i, int64_t rows,
                                    int64_t cols) {
    ledger_layer l;
    char name[32];
    snprintf(name, sizeof name, "%s.w", part);
    l.w = ledger_parameter(m, name, i, rows, cols);
    l.b = ledger_parameter(m, part, i, rows, 0);
    return l;
}

static void ledger_make(ledger_gpt *m) {
    mixp_context_desc desc = { 0 };
    mixp_adamw_desc adamw = mixp_adamw_defaults();
    mixp_scaler_desc scaler = { 0 };
    int64_t w = m->c.width;
    desc.device = ledger_device();
    desc.threads = 1;
    desc.epilogues = m->c.epilogues;
    m->ctx = mixp_context_new(&desc);
    mixp_autocast_set_level(m->ctx, m->c.level);
    mixp_autocast_override(m->ctx, mixp_op_builtin(MIXP_OP_LAYER_NORM), MIXP_CLASS_LOW_OUT);
    adamw.max_norm = 1.0;
    m->opt = mixp_adamw_new(m->ctx, &adamw);
    if (m->c.dtype != MIXP_F16) {
        scaler.rule = MIXP_RULE_STATIC;
        scaler.init_scale = 1;
    }
    m->scaler = mixp_scaler_new(m->ctx, &scaler);
    m->wte = ledger_parameter(m, "wte", 0, m->c.vocab, w);
    m->wpe = ledger_parameter(m, "wpe", 0, m->c.length, w);
    for (int i = 0; i < m->c.layers; i++) {
        ledger_part *p = &m->parts[i];
        p->norm1 = ledger_layer_of(m, "norm1", i, w, 0);
        p->qkv = ledger_layer_of(m, "qkv", i, 3 * w, w);
        p->proj = ledger_layer_of(m, "proj", i, w, w);
        p->norm2 = ledger_layer_of(m, "norm2", i, w, 0);
        p->up = ledger_layer_of(m, "up", i, 4 * w, w);
        p->down = ledger_layer_of(m, "down", i, w, 4 * w);
    }
    m->norm = ledger_layer_of(m, "norm", 0, w, 0);
    m->ids = (int32_t *)calloc((size_t)(m->c.batch * m->c.length), sizeof *m->ids);
}

static mixp_tensor *ledger_linear(ledger_gpt *m, mixp_tensor *h, ledger_layer l)
{ return mixp_linear(m->ctx, h, l.w, l.b); }
static mixp_tensor *ledger_normed(ledger_gpt *m, mixp_tensor *h, ledger_layer l)
{ return mixp_layer_norm(m->ctx, h, l.w, l.b, 1e-5f); }

static mixp_tensor *ledger_added(ledger_gpt *m, mixp_tensor **h, mixp_tensor *f, ledger_layer l)
{
    mixp_tensor_set_disposable(f, 1);
    return mixp_add_layer_norm(m->ctx, *h, f, l.w, l.b, 1e-5f, h);
}

/* GELU by erf, which no library's product makes, or by tanh. */
static mixp_tensor *ledger_mlp(ledger_gpt *m, mixp_tensor *y, const ledger_part *p) {
    if (m->c.epilogues & MIXP_EPILOGUES_GELU)
        return mixp_mlp(m->ctx, y, p->up.w, p->up.b, p->down.w, p->down.b);
    return ledger_linear(m, mixp_gelu(m->ctx, ledger_linear(m, y, p->up)), p->down);
}

/* y: the norm of *h, before and after. */
static mixp_tensor *ledger_part_of(ledger_gpt *m, const ledger_part *p, ledger_layer next,
                                   mixp_tensor **h, mixp_tensor *y) {
    y = mixp_attention(m->ctx, ledger_linear(m, y, p->qkv), (int)m->c.heads, 1, 0);
    y = ledger_added(m, h, ledger_linear(m, y, p->proj), p->norm2);
    return ledger_added(m, h, ledger_mlp(m, y, p), next);
}

/* The scaled loss of a micro-batch. */
static mixp_tensor *ledger_loss_of(ledger_gpt *m) {
    float share = 1.0f / (float)m->c.accumulate;
    int64_t shape[2];
    mixp_context *c = m->ctx;
    mixp_tensor *in, *h, *y, *loss = NULL;
    shape[0] = m->c.batch;
    shape[1] = m->c.length;
    in = mixp_input(c, MIXP_I32, 2, shape, m->ids);
    MIXP_AUTOCAST(c, m->c.dtype) {
        h = mixp_embedding(c, m->wpe, mixp_input(c, MIXP_I32, 1, &m->c.length, m->ids));
        h = mixp_add(c, mixp_embedding(c, m->wte, in), h);
        y = ledger_normed(m, h, m->parts[0].norm1);
        for (int i = 0; i < m->c.layers; i++) {
            ledger_layer next = i + 1 < m->c.layers ? m->parts[i + 1].norm1 : m->norm;
            y = ledger_part_of(m, &m->parts[i], next, &h, y);
        }
        h = mixp_linear(c, y, m->wte, NULL);
        mixp_tensor_set_disposable(h, 1);
        loss = mixp_scaler_cross_entropy(m->scaler, h, mixp_input(c, MIXP_I32, 2, shape, m->ids),
                                         MIXP_IGNORE, share, NULL);
    }
    return loss;
}

/* One step; used, if given: bytes in use after its first forward pass. */
static void ledger_step(ledger_gpt *m, size_t *used) {
    for (int i = 0; i < m->c.accumulate; i++) {
        mixp_tensor *loss;
        if (i == 0) mixp_zero_grad(m->opt);
        mixp_step_begin(m->ctx);
        ledger.backward = 0;
        loss = ledger_loss_of(m);
        if (used && i == 0) *used = mixp_context_memory(m->ctx).used;
        ledger.backward = 1;
        mixp_backward(m->ctx, loss);
    }
    mixp_scaler_step(m->scaler, m->opt);
    mixp_scaler_update(m->scaler);
}

/* What the third step of c asks for, in `ledger`; the first two fill caches and settle memory. */
static ledger_result ledger_run(const ledger_config *c, FILE *calls) {
    static ledger_gpt m;
    ledger_result r;
    const char *why = "";
    memset(&m, 0, sizeof m);
    memset(&r, 0, sizeof r);
    ledger_clear();
    m.c = *c;
    if (m.c.accumulate < 1) m.c.accumulate = 1;
    ledger_make(&m);
    r.permanent = mixp_context_memory(m.ctx).used;
    for (int i = 0; i < 3; i++) {
        ledger.on = i == 2;
        ledger.calls = ledger.on ? calls : NULL;
        ledger_step(&m, &r.forward);
    }
    ledger.on = 0;
    r.parameters = (double)m.parameters;
    r.peak = mixp_context_memory(m.ctx).peak;
    r.allocated = mixp_context_memory(m.ctx).allocated;
    r.given = ledger.most;
    r.pieces = ledger.block_count;
    if (mixp_context_error(m.ctx, &why) != MIXP_OK) snprintf(r.error, sizeof r.error, "%s", why);
    mixp_context_free(m.ctx);
    free(m.ids);
    return r;
}

/* The two GPTs that figures are given for: GPT-2 124M with its rows padded, and the character GPT
 * that nanoGPT trains on a GPU. */
static ledger_config ledger_gpt2(mixp_dtype dtype, int level) {
    ledger_config c = { "GPT-2 124M", 50304, 1024, 64, 12, 12, 768, MIXP_F32, 0, 1, 0 };
    c.dtype = dtype;
    c.level = level;
    return c;
}
static ledger_config ledger_char(mixp_dtype dtype, int level) {
    ledger_config c = { "character GPT", 65, 256, 64, 6, 6, 384, MIXP_F32, 0, 1, 0 };
    c.dtype = dtype;
    c.level = level;
    return c;
}

#endif
