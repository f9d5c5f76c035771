#pragma once
#include "hooks.c"
#include "../walk/blocks.c"
/* --- gradients of many ranks ------------------------------------------------------------ *
 *
 * With ranks, the gradients of leaves lie in one arena, in the order in which the first walk
 * completes them. A gradient is final once the oldest tape entry that uses its tensor has been
 * walked. A bucket is a range of complete tensors of one dtype. As soon as all gradients of a
 * bucket are final, this rank looks at them, because the sum would hide which rank's gradient was
 * Inf, and sends them. Buckets are sent in their order, which is the same on all ranks.
 *
 *     the walk     completes a, b, c, d, e ...            oldest entries last
 *     the arena    | a | b |pad| c | d |pad| e | ...      gradients of one dtype, in that order
 *     buckets      |<-- 0 ---->|<-- 1 ---->|<-- 2 ...
 *     now            arrived     sent        written      a walk ends when all have arrived
 *
 * A divided gradient (see SCATTERED SUMS) has only this rank's piece in the arena. During a walk
 * the complete gradient lies in a buffer, from its first write until its sum has arrived; then the
 * piece is copied into the arena, and another gradient may use the buffer. Between walks that are
 * held back (mixp_ranks_hold) each gradient keeps its buffer, so that they take the memory of
 * complete gradients. Each rank chooses its buffers by itself: no sum depends on the choice.
 */
typedef struct mixpi_buffer {
    char   *data;               /* device memory */
    size_t  bytes;
    int64_t bucket;             /* the bucket that used it last */
    struct mixpi_buffer *next;
} mixpi_buffer;

typedef struct mixpi_leaf {
    mixp_tensor *tensor;
    int64_t      last;          /* entry, counted by the walk, that completes it; -1 = none */
    int64_t      bucket;
    int          summed;        /* 1: summed over the ranks since its gradient was last cleared */
    int          filled;        /* 1: this rank's walk did not reach it, so zeros were sent */
    int64_t      each;          /* elements of a rank's piece; 0: all ranks get all */
    void        *piece;         /* device memory: this rank's piece of the sum; NULL if each is 0 */
    mixpi_mark   mark;          /* mark of the gradient that is held                        */
} mixpi_leaf;

typedef struct mixpi_bucket {
    int64_t  first, end;        /* numbers of its leaves: first to end - 1                  */
    int64_t  count;             /* elements, including the zeros between tensors            */
    int64_t  each;              /* elements that each rank gets; 0: every rank gets all */
    mixp_out grads;             /* range of the arena, or place in a buffer                 */
    mixp_out wire;              /* memory to sum: grads, or a copy in another dtype         */
    void    *held;              /* f32: the sum of earlier walks, or NULL                   */
    int      holds;             /* 1: held contains a sum                                   */
    int      due;               /* 1: a walk has met one of its leaves                      */
    int64_t  awaited;           /* leaves that the walk has not yet completed               */
    mixpi_buffer *buffer;       /* buffer of a divided gradient, or NULL before the first walk
                                   that writes it */
    int      flying;            /* 1: in this walk, its sum was sent and has not arrived    */
    int      landed;            /* 1: in this walk, its sum has arrived                     */
} mixpi_bucket;

struct mixpi_exchange {
    mixpi_leaf      *leaves;
    int64_t          n_leaves;
    mixpi_bucket    *buckets;
    int64_t          n_buckets;
    mixpi_buffer    *buffers;   /* all of them, latest first                                */
    mixp_param_row  *rows;      /* device memory: table of the leaves for grad_stats        */
    mixp_step_state *looks;     /* device memory: the look at each bucket                   */
    int64_t         *first;     /* device memory: each bucket's first leaf                  */
    float           *parts;     /* device memory: divisor of the mean                       */
    double          *numbers;   /* table of one number for each rank                        */
    int64_t          position, sent;    /* progress of the walk: entries walked, buckets sent */
    int              hold;
    int              unlike;    /* 1: ranks met the new leaves in different orders          */
    int              is_apart;      /* 1: on some rank, device memory is not host memory        */
};

/* The exchange of ctx, made at its first use. Returns NULL with the error set. */
static mixpi_exchange *mixpi_exchange_of(mixp_context *ctx) {
    float parts = (float)ctx->ranks->parts;
    mixpi_exchange *d = ctx->exchange;
    if (d) return d;
    d = (mixpi_exchange *)mixpi_host_alloc(ctx, sizeof *d);
    if (!d) return NULL;
    d->parts = (float *)mixpi_device_alloc(ctx, sizeof parts);
    d->numbers = (double *)mixpi_host_alloc(ctx, (size_t)ctx->ranks->size * sizeof *d->numbers);
    if (!d->parts || !d->numbers || mixpi_upload(ctx, d->parts, &parts, sizeof parts) != MIXP_OK)
        return NULL;
    ctx->exchange = d;
    return d;
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_ranks_hold(mixp_context *ctx, int on) {
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (!ctx->ranks->size) return MIXP_OK;
    if (!mixpi_exchange_of(ctx)) return MIXP_ERR_MEMORY;
    ctx->exchange->hold = on != 0;
    return MIXP_OK;
}

/* Drops all gradients that were held back. */
MIXPI_SELDOM
static void mixpi_exchange_forget(mixp_context *ctx) {
    mixpi_exchange *d = ctx->exchange;
    for (int64_t i = 0; d && i < d->n_buckets; i++) {
        d->buckets[i].holds = 0;
        d->buckets[i].due = 0;
    }
}

/* data *= 1/parts; n elements. */
static mixp_result mixpi_divide_by_parts(mixp_context *ctx, mixp_out data, int64_t n) {
    const mixp_unary_args k = mixpi_unary_of(MIXP_UNARY_SCALE,
        mixpi_scaler_inverse((float)ctx->ranks->parts), mixpi_in(data.data, data.dtype), data, n);
    return ctx->device->kernels->unary(&ctx->exec, &k);
}

/* Waits until everything that grad_ready started has arrived. */
static MIXPI_APART mixp_result mixpi_ranks_await(mixp_context *ctx) {
    const mixp_ranks_desc *k = ctx->ranks;
    volatile char here = 0;
    const int before = mixpi_inside_begin(ctx, MIXPI_FRAME(&here));
    const char *why = k->grad_wait(k->user, ctx->exec.stream, k->seconds);
    mixpi_inside_end(ctx, before);
    return mixpi_ranks_report(ctx, "the wait for gradients", why);
}
