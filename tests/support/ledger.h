/* ledger.h - the cost of a training step: a device that runs nothing and records every kernel
 * call, with its bytes, its arithmetic, and a model of its time on a GPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The ledger is a mixp_device. Its memory consists only of addresses, which must not be read or
 * written. The complete library runs on it: tape, autocast, optimizer and memory. A step of GPT-2
 * at 65,536 tokens takes 30 microseconds. Its counts are exact: calls, bytes that a kernel must
 * read and write, FLOP, memory. Launches and milliseconds are those of mixprec_cuda.cu: launches
 * as the companion makes them, times by the model below. On an H100 the model predicts GPT-2's step
 * to 3 % (tests/bench/results/2026-11-28_h100_kernels.txt). No step has been measured on another GPU.
 *
 *     tests/core/step/test_ledger.c         checks the figures, so that an added pass is noticed
 *     tests/bench/ledger.c        shows them (make ledger)
 *     tests/bench/bench_cuda.cpp  prints them beside its measurements
 *
 * Each call has two times. The roofline: its bytes at the GPU's published bandwidth, or its FLOP
 * at the published rate, whichever takes longer. The model: the longest of its bytes at a share of
 * the speed of a copy, its FLOP at a share of the rate, and its instructions; plus, for each
 * launch, the gap before it and the tail of its last blocks. The shares of kernels were measured
 * beside copies on an H100, those of attention on an H200 too. The shares of products are published
 * figures of cuBLASLt on an H100. All are assumed to be the same on other GPUs.
 */
#ifndef LEDGER_H
#define LEDGER_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LEDGER_COPY    0.896            /* of the published bandwidth: what a copy reaches */
#define LEDGER_PRODUCT 0.8125           /* of it beside products */
#define LEDGER_EPILOGUE 1.3             /* of a copy's time for the bytes beside a product: an H100 has 1.1 to 1.5 */
#define LEDGER_ISSUE   0.845            /* of the issue slots at the highest clock, 4 an SM */
#define LEDGER_LEAST   0.5e-6           /* seconds that a kernel takes at least */
#define LEDGER_GAP     2.0e-6           /* seconds a launch: between kernels 1, for their tails 1 */
#define LEDGER_LATENCY 0.8e-6           /* seconds from a load to its value, on a busy GPU */

/* What NVIDIA's data sheets say: dense, f16 and bf16 with f32 sums, at the boost clock. */
typedef struct ledger_gpu {
    const char *name;           /* part of what CUDA calls it */
    double      bytes;          /* a second */
    double      tensor, f32;    /* FLOP a second: of f16 and bf16; of f32 */
    double      sms, clock;
    double      memory;
    int         shared;         /* bytes a block may have */
    int         per_sm;         /* bytes of shared memory an SM has */
    double      mma;            /* share of `tensor` for attention: Hopper's by wgmma; 0.62 by mma.sync */
    int         bf16;           /* 0: it has no tensor cores for bf16 */
} ledger_gpu;

/* A name that contains another comes first. */
static ledger_gpu ledger_gpus[] = {
    { "H200", 4.8e12, 989e12, 67e12, 132, 1.98e9, 141e9, 232448, 233472, 0.96, 1 },
    { "H100 PCIe", 2.0e12, 756e12, 51e12, 114, 1.755e9, 80e9, 232448, 233472, 0.96, 1 },
    { "H100 NVL", 3.9e12, 835e12, 60e12, 132, 1.785e9, 94e9, 232448, 233472, 0.96, 1 },
    { "H100", 3.35e12, 989e12, 67e12, 132, 1.98e9, 80e9, 232448, 233472, 0.96, 1 },
    { "GH200", 4.0e12, 989e12, 67e12, 132, 1.98e9, 96e9, 232448, 233472, 0.96, 1 },
    { "A100", 2.039e12, 312e12, 19.5e12, 108, 1.41e9, 80e9, 166912, 167936, 1, 1 },
    { "L40S", 0.864e12, 362e12, 91.6e12, 142, 2.52e9, 48e9, 101376, 102400, 1, 1 },
    { "RTX 4090", 1.008e12, 165.2e12, 82.6e12, 128, 2.52e9, 24e9, 101376, 102400, 1, 1 },
    { "T4", 0.32e12, 65e12, 8.1e12, 40, 1.59e9, 16e9, 65536, 65536, 1, 0 },
};

/* The one of that name; NULL: none of these. */
static const ledger_gpu *ledger_gpu_of(const char *name) {
    for (size_t i = 0; i < sizeof ledger_gpus / sizeof *ledger_gpus; i++)
        if (strstr(name, ledger_gpus[i].name)) return &ledger_gpus[i];
    return NULL;
}
/* Whose times are told. */
static const ledger_gpu *ledger_on = &ledger_gpus[0];

typedef struct ledger_line {
    char    what[32];
    int64_t calls, launches;
    double  read, written, flop;
    double  seconds, roof;              /* by the model, by the roofline */
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
    double      flop, peak;             /* peak: FLOP a second, published; 0: no matter */
    double      rate;                   /* share of it that is reached */
    double      share;                  /* of LEDGER_COPY; 0: LEDGER_PRODUCT */
    double      issued;                 /* instructions of warps, where they take longer; or 0 */
    double      more;                   /* seconds beside */
} ledger_call;

static double ledger_seconds(const ledger_call *c) {
    const ledger_gpu *gpu = ledger_on;
    double bandwidth = gpu->bytes * (c->share > 0 ? c->share * LEDGER_COPY : LEDGER_PRODUCT);
    double slots = 4 * gpu->sms * gpu->clock * LEDGER_ISSUE, launches = (double)c->launches;
    double t = (c->read + c->written) / bandwidth;
    if (c->peak > 0 && c->flop / (c->peak * c->rate) > t) t = c->flop / (c->peak * c->rate);
    if (c->issued / slots > t) t = c->issued / slots;
    t += c->more;
    if (t < LEDGER_LEAST * launches) t = LEDGER_LEAST * launches;
    return t + LEDGER_GAP * launches;
}

static double ledger_roof(const ledger_call *c) {
    double t = (c->read + c->written) / ledger_on->bytes;
    return c->peak > 0 && c->flop / c->peak > t ? c->flop / c->peak : t;
}

/* FLOP a second by the data sheet where operands are of d. */
static double ledger_peak(mixp_dtype d)
{ return mixp_dtype_size(d) == 2 ? ledger_on->tensor : ledger_on->f32; }

static void ledger_add(ledger_line *line, const ledger_call *c) {
    line->calls++;
    line->launches += c->launches;
    line->read += c->read;
    line->written += c->written;
    line->flop += c->flop;
    line->seconds += ledger_seconds(c);
    line->roof += ledger_roof(c);
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
    ledger_call c = { what, launches, read, written, 0, 0, 0, share, 0, 0 };
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
                        ledger_out(k->dst, n), 0.95);
}
LEDGER_KERNEL(fill) {
    (void)x;
    return ledger_moves("fill", 1, 0, ledger_out(k->dst, (double)k->n), 0.95);
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
    ledger_call c = { what, 1, read, written, 0, 0, 0, 0.94, n / 256 * instructions, 0 };
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
    double told = mixpi_slope_reads_result(k->op) ? ledger_in(k->y, n) : ledger_in(k->a, n);
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
                        ledger_out(k->y, n), 0.95);
}
static mixp_result ledger_binary_backward(const mixp_exec *x, const mixp_binary_args *k) {
    double n = ledger_points(k), out = ledger_operand(k, k->which ? k->b_strides : k->a_strides);
    int low = ledger_low(k->dy.dtype) && ledger_low(k->dx.dtype);
    double read = ledger_in(k->dy, n) + ledger_old(k->dx, out);
    (void)x;
    if (out < n) return ledger_moves("sum of a broadcast", 2, read, ledger_out(k->dx, out), 0.94);
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
                        ledger_out(k->y, out) + partial, 0.94);
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
    return ledger_moves("softmax", 1, ledger_in(k->a, n), ledger_out(k->y, n), 0.77);
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
                        0.94);
}

static mixp_result ledger_add_norm(const mixp_exec *x, const mixp_norm_args *k) {
    double rows = (double)k->rows, n = rows * (double)k->cols;
    (void)x;
    return ledger_moves("sum and norm", 1, ledger_in(k->a, n) + ledger_in(k->b, n),
                        ledger_out(k->sum, n) + ledger_out(k->y, n) + 8 * rows, 0.92);
}

/* 1,024 slices of the rows keep their own sums for gamma and beta. */
LEDGER_KERNEL(norm_backward) {
    double rows = (double)k->rows, cols = (double)k->cols, n = rows * cols;
    double slices = 1024 * 2 * 4 * cols;
    double read = ledger_in(k->dy, n) + ledger_in(k->a, n) + ledger_old(k->da, n) + 8 * rows;
    (void)x;
    return ledger_moves("norm backward", 2, read + slices,
                        ledger_out(k->da, n) + ledger_out(k->db, n) + slices, 0.90);
}
LEDGER_KERNEL(embedding) {
    double n = (double)k->rows * (double)k->cols;
    (void)x;
    return ledger_moves("embedding", 1, ledger_in(k->table, n), ledger_out(k->y, n), 0.97);
}
/* The sort's blocks read all ids twice, 256 threads with 8 loads at a time. Predicted: the sort and the sums that an
 * H100 measured (0.51 ms for GPT-2) had one load at a time. */
LEDGER_KERNEL(embedding_backward) {
    double n = (double)k->rows * (double)k->cols, all = (double)k->vocab * (double)k->cols;
    ledger_call c = { "embedding backward", 2, ledger_in(k->dy, n) + ledger_old(k->dtable, n),
                      ledger_out(k->dtable, k->dtable.accumulate ? n : all), 0, 0, 0, 0.75, 0, 0 };
    (void)x;
    c.more = 2 * (double)k->rows / 2048 * LEDGER_LATENCY;
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

/* The share of the rate that an H100 and an H200 reach; the last tiles of a causal row are half empty. f32
 * products run without tensor cores. */
static double ledger_attention_share(const mixp_attention_args *k, int back) {
    static const double low[2][2] = { { 0.429, 0.288 }, { 0.308, 0.236 } };
    static const double plain[2][2] = { { 0.460, 0.428 }, { 0.284, 0.288 } };
    return ledger_low(k->q.dtype) ? low[back][k->causal != 0] * ledger_on->mma : plain[back][k->causal != 0];
}

/* 4 n keys flop forward, 10 backward (5 products; what is computed again is not counted), half of it
 * where no later key is seen. Backward is two launches, of dQ, with delta, and of dK and dV. */
LEDGER_KERNEL(attention) {
    double rows = (double)k->b * (double)k->t * (double)k->heads, n = rows * (double)k->d;
    ledger_call c = { "attention", 1, ledger_in(k->q, n) + ledger_keys(k) + ledger_mask(k),
                      ledger_out(k->y, n) + 4 * rows, 0, ledger_peak(k->q.dtype), 0, 0.9, 0, 0 };
    (void)x;
    c.rate = ledger_attention_share(k, 0);
    c.flop = 4 * n * (double)k->keys * (k->causal ? 0.5 : 1);
    return ledger_note(&c);
}
LEDGER_KERNEL(attention_backward) {
    const mixp_attention_args *f = &k->forward;
    double rows = (double)f->b * (double)f->t * (double)f->heads, n = rows * (double)f->d;
    double keys = (double)f->b * (double)f->keys * (double)f->kv_heads * (double)f->d;
    ledger_call c = { "attention backward", 2, 0, 0, 0, ledger_peak(f->q.dtype), 0, 0.9, 0, 0 };
    (void)x;
    c.rate = ledger_attention_share(f, 1);
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
    return ledger_moves("cross-entropy", 2, ledger_in(k->logits, n) + 4 * rows, 12 * rows, 0.93);
}
LEDGER_KERNEL(cross_entropy_backward) {
    double rows = (double)k->rows, n = rows * (double)k->cols;
    (void)x;
    return ledger_moves("cross-entropy backward", 1,
                        ledger_in(k->logits, n) + ledger_old(k->dlogits, n) + 12 * rows,
                        ledger_out(k->dlogits, n), 0.87);
}
/* The share is predicted: an H100 measured 0.83 when the kernel executed a third more instructions.
 * A row stays in shared memory for its second reading where there is room, else it is read twice.
 * With room for one block an SM, that block waits for the end of its next row. Two kernels of one
 * block count the rows and take their mean: 1,024 threads with 8 loads at a time. */
LEDGER_KERNEL(cross_entropy_both) {
    double rows = (double)k->loss.rows, n = rows * (double)k->loss.cols;
    double row = (double)k->loss.cols * ledger_size(k->loss.logits.dtype), read;
    int kept = row + 512 <= ledger_on->shared, alone = 2 * (row + 1536) > ledger_on->per_sm;
    ledger_call c = { "cross-entropy, both ways", 3, 0, 0, 0, 0, 0, 0.92, 0, 0 };
    (void)x;
    read = ledger_in(k->loss.logits, n);
    c.read = (kept ? read : 2 * read) + 12 * rows;
    c.written = ledger_out(k->dlogits, n) + 12 * rows;
    if (kept && alone) c.more = rows / ledger_on->sms * LEDGER_LATENCY;
    c.more += 2 * rows / 8192 * LEDGER_LATENCY;
    return ledger_note(&c);
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
                        ledger_out(k->y, n), 0.72);
}

/* The share of the published rate, by shape: weight gradients are slower, the more the fewer tiles
 * they have. Without tensor cores 0.75. */
static double ledger_product_share(const mixp_gemm_args *k) {
    if (!ledger_low(k->a.dtype)) return 0.75;
    if (k->trans_a) return k->m > 10000 ? 0.708 : k->m * k->n < 600000 ? 0.526 : 0.607;
    return k->n > 10000 ? 0.698 : k->k > 10000 ? 0.738 : 0.657;
}
static mixp_result ledger_gemm(const mixp_exec *x, const mixp_gemm_args *k) {
    double m = (double)k->m, n = (double)k->n, depth = (double)k->k, batch = (double)k->batch;
    const char *what = !ledger.backward ? "products"
                       : k->trans_a     ? "products, weights' gradients"
                                        : "products, inputs' gradients";
    ledger_call c = { what, 1, 0, 0, 0, 0, 0, 0, 0, 0 };
    (void)x;
    c.read = ledger_in(k->a, m * depth) + ledger_in(k->b, depth * n) + ledger_old(k->c, m * n);
    c.read = batch * c.read + ledger_in(k->bias, n);
    c.written = batch * ledger_out(k->c, m * n);
    c.flop = 2 * m * n * depth * batch;
    c.peak = ledger_peak(k->a.dtype);
    c.rate = ledger_product_share(k);
    return ledger_note(&c);
}

/* Fp8 has twice bf16's rate; a kernel first reads the values and writes their codes. MXFP8 and NVFP4, which an
 * H200 does not have, stay bf16. */
LEDGER_KERNEL(gemm_narrow) {
    const mixp_gemm_args *g = &k->gemm;
    const double result = (double)g->m * (double)g->n;
    const double operands = ((double)g->m + (double)g->n) * (double)g->k;
    ledger_call c = { "products of fp8 codes", 3, 0, 0, 0, 0, 0, 0, 0, 0 };
    if (k->a.scale == MIXP_SCALE_E8M0 || k->a.scale == MIXP_SCALE_E4M3) return ledger_gemm(x, g);
    c.read = 3 * operands + ledger_old(g->c, result) + ledger_in(g->bias, (double)g->n);
    c.written = operands + ledger_out(g->c, result);
    c.flop = 2 * result * (double)g->k;
    c.peak = 2 * ledger_peak(MIXP_BF16);
    c.rate = ledger_product_share(g);
    return ledger_note(&c);
}

/* A product with sums or GELU in its pass: one launch, and the bytes of the values before GELU. Its time is
 * the product's, and that of the values before GELU or of the operand whose rows are summed. */
LEDGER_KERNEL(gemm_epilogue) {
    double m = (double)k->gemm.m, n = (double)k->gemm.n, depth = (double)k->gemm.k;
    const char *what = k->kind == MIXP_EPILOGUE_ROW_SUMS ? "products, weights' gradients"
                     : k->kind == MIXP_EPILOGUE_GELU     ? "products with gelu"
                                                         : "products with gelu backward";
    int back = k->kind == MIXP_EPILOGUE_GELU_BACK;
    ledger_call c = { what, 1, 0, 0, 0, 0, 0, 0, 0, 0 };
    (void)x;
    c.read = ledger_in(k->gemm.a, m * depth) + ledger_in(k->gemm.b, depth * n) +
             ledger_old(k->gemm.c, m * n) + ledger_in(k->gemm.bias, n) + ledger_old(k->sums, m) +
             (back ? ledger_out(k->before, m * n) : 0);
    c.written = ledger_out(k->gemm.c, m * n) + ledger_out(k->sums, m) +
                (back ? 0 : ledger_out(k->before, m * n));
    c.flop = 2 * m * n * depth;
    c.peak = ledger_peak(k->gemm.a.dtype);
    c.rate = ledger_product_share(&k->gemm);
    c.more = (k->sums.data ? ledger_in(k->gemm.a, m * depth) : ledger_out(k->before, m * n)) *
             LEDGER_EPILOGUE / (ledger_on->bytes * LEDGER_COPY);
    return ledger_note(&c);
}
LEDGER_KERNEL(scale_by) {
    double n = (double)k->n;
    (void)x;
    return ledger_moves("scale", 1, ledger_in(k->a, n) + ledger_old(k->y, n),
                        ledger_out(k->y, n), 0.95);
}

/* --- kernels of the optimizer: over the rows that were uploaded -------------------- */

LEDGER_KERNEL(grad_stats) {
    double grads = 0;
    (void)x;
    for (int64_t i = 0; i < ledger.row_count && i < k->count; i++)
        grads += (double)ledger.rows[i].count * ledger_size(ledger.rows[i].grad_dtype);
    return ledger_moves("statistics", 1, grads, k->unscale ? grads : 0, 0.97);
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

/* --- kernels that no GPT here has: bytes alone -------------------------------------- */

static double ledger_where_points(const mixp_where_args *k) {
    double n = 1;
    for (int i = 0; i < k->rank; i++) n *= (double)k->shape[i];
    return n;
}
LEDGER_KERNEL(where) {
    double n = ledger_where_points(k);
    (void)x;
    return ledger_moves("where", 1, ledger_in(k->mask, n) + ledger_in(k->a, n) + ledger_in(k->b, n),
                        ledger_out(k->y, n), 0.7);
}
static mixp_result ledger_where_backward(const mixp_exec *x, const mixp_where_args *k) {
    double n = ledger_where_points(k);
    (void)x;
    return ledger_moves("where backward", 1, ledger_in(k->mask, n) + ledger_in(k->dy, n),
                        ledger_out(k->dx, n), 0.7);
}
LEDGER_KERNEL(max) {
    double out = (double)k->outer * (double)k->inner;
    (void)x;
    return ledger_moves("max", 1, ledger_in(k->a, out * (double)k->n), ledger_out(k->y, out) + 8 * out,
                        0.7);
}
LEDGER_KERNEL(max_backward) {
    double out = (double)k->outer * (double)k->inner;
    (void)x;
    return ledger_moves("max backward", 1, ledger_in(k->dy, out) + 8 * out,
                        ledger_out(k->da, out * (double)k->n), 0.7);
}
LEDGER_KERNEL(gather) {
    double n = (double)k->outer * (double)k->m * (double)k->inner;
    (void)x;
    return ledger_moves("gather", 1, ledger_in(k->a, n) + 4 * n, ledger_out(k->y, n), 0.6);
}
static mixp_result ledger_gather_backward(const mixp_exec *x, const mixp_gather_args *k) {
    double n = (double)k->outer * (double)k->m * (double)k->inner;
    (void)x;
    return ledger_moves("gather backward", 1, ledger_in(k->a, n) + 4 * n + ledger_old(k->y, n),
                        ledger_out(k->y, n), 0.5);
}
LEDGER_KERNEL(rope) {
    double n = (double)k->rows * (double)k->t * (double)k->heads * (double)k->d;
    (void)x;
    return ledger_moves("rope", 1, ledger_in(k->a, n), ledger_out(k->y, n), 0.7);
}
LEDGER_KERNEL(random) {
    (void)x;
    return ledger_moves("random", 1, 0, ledger_out(k->y, (double)k->n), 0.7);
}
LEDGER_KERNEL(compare) {
    double n = 1;
    for (int i = 0; i < k->rank; i++) n *= (double)k->shape[i];
    (void)x;
    return ledger_moves("compare", 1, ledger_in(k->a, n) + ledger_in(k->b, n), n, 0.7);
}
/* Bytes only: the cost of sorting is not counted. Long rows are sorted in pieces of 2,048 elements; each
 * later pass reads and writes 8 bytes an element, and merges runs in pairs. */
LEDGER_KERNEL(topk) {
    const double n = (double)k->rows * (double)k->cols;
    int64_t run = 2048;
    int passes = 0;
    (void)x;
    for (; k->k > 1024 && run < k->cols; run *= 2) passes++;
    return ledger_moves("topk", 1 + passes, ledger_in(k->a, n) + 8 * passes * n,
                        4.0 * (double)k->rows * (double)k->k + 8 * passes * n, 0.7);
}
/* A second launch, which reads once more, where the array has a scale. */
LEDGER_KERNEL(quantise) {
    double n = (double)k->rows * (double)k->cols;
    int passes = k->scale == MIXP_SCALE_TENSOR || k->scale == MIXP_SCALE_E4M3 ? 2 : 1;
    (void)x;
    return ledger_moves("quantise", passes, passes * ledger_in(k->x, n), 2 * n, 0.7);
}
LEDGER_KERNEL(hadamard) {
    double n = (double)k->rows * (double)k->cols;
    (void)x;
    return ledger_moves("hadamard", 1, ledger_in(k->a, n), 2 * n, 0.7);
}
LEDGER_KERNEL(recode) {
    double n = (double)k->rows * (double)k->cols, codes = k->element == MIXP_F4_E2M1 ? n / 2 : n;
    double scales = k->block_rows ? n / (double)k->block_rows : 0;
    (void)x;
    return ledger_moves("recode", 1, scales + (k->decodes ? codes : 2 * n), k->decodes ? 2 * n : codes, 0.7);
}
LEDGER_KERNEL(restore) {      /* a step that is applied reads the flags only */
    (void)x;
    return ledger_moves("restore", 1, 4.0 * k->n_flags, 0, 0.1);
}
LEDGER_KERNEL(check_buffers) {
    double bytes = 0;
    (void)x;
    for (int i = 0; i < k->n_parts; i++)
        bytes += (double)k->parts[i].count * (double)mixp_dtype_size(k->parts[i].dtype);
    return ledger_moves("check_buffers", 1, bytes, 0, 0.5);
}
LEDGER_KERNEL(turn) {
    double n = (double)k->n * (double)k->length;
    (void)x;
    return ledger_moves("turn", 1, 4 * n, 4 * n, 0.7);
}
LEDGER_KERNEL(lose) {
    double n = (double)k->n;
    (void)x;
    return ledger_moves("lose", 2, ledger_in(k->x, n) + 2 * n, 0, 0.7);
}
LEDGER_KERNEL(look) {
    (void)x;
    return ledger_moves("look", 1, ledger_in(k->x, (double)k->n), 0, 0.8);
}
LEDGER_KERNEL(agree) {
    (void)x, (void)k;
    return ledger_moves("agree", 1, 0, 0, 0.7);
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
    kernels.where = ledger_where;
    kernels.where_backward = ledger_where_backward;
    kernels.max = ledger_max;
    kernels.max_backward = ledger_max_backward;
    kernels.gather = ledger_gather;
    kernels.gather_backward = ledger_gather_backward;
    kernels.rope = ledger_rope;
    kernels.random = ledger_random;
    kernels.compare = ledger_compare;
    kernels.topk = ledger_topk;
    kernels.quantise = ledger_quantise;
    kernels.hadamard = ledger_hadamard;
    kernels.turn = ledger_turn;
    kernels.recode = ledger_recode;
    kernels.gemm_narrow = ledger_gemm_narrow;
    kernels.lose = ledger_lose;
    kernels.restore = ledger_restore;
    kernels.check_buffers = ledger_check_buffers;
    kernels.look = ledger_look;
    kernels.agree = ledger_agree;
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

#endif
