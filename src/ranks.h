#pragma once
#include "tensors.h"
/* ==== 14. RANKS =========================================================== >>ranks ====
 *
 * Many machines. mixprec decides which data ranks exchange, and when. You supply the transport:
 * MPI, NCCL or shared memory (examples/ddp_mpi.c, ddp_nccl.c, ddp_fork.c). Each rank is a process
 * with its own context. All ranks make the same calls in the same order. Each rank calls
 * mixp_backward with its share of the batch. The gradients are then those of the complete batch,
 * and all ranks apply or skip the same step with the same scale.
 *
 * A hook works in place on `count` elements of device memory. On a GPU the hook works in the order
 * of `stream`. On a CPU stream is NULL, and the hook finishes before it returns. The hook gives up
 * after `seconds`. It must not begin a step or walk back (MIXP_ERR_ORDER). It returns NULL on
 * success, or the reason for its failure, a text that stays valid: mixprec reports MIXP_ERR_RANKS.
 * dtype: f32, f16, bf16, f64, and i32: bytes of weights, states and buffers travel as i32, in `sum`
 * and `all_gather`. In a captured step, hooks are called once, for recording. */
typedef const char *(*mixp_ranks_hook)(void *user, void *data, int64_t count,
                                       mixp_dtype dtype, void *stream, double seconds);

/* How the gradients of `size` ranks become their mean. */
typedef enum mixp_ranks_mean {
    MIXP_MEAN_BEFORE,           /* divide each, then sum: the sum cannot overflow */
    MIXP_MEAN_AFTER,            /* sum, then divide: small values are not lost             */
    MIXP_MEAN_NONE              /* sum only, do not divide                                 */
} mixp_ranks_mean;

struct mixp_ranks_desc {
    int             rank, size; /* rank of this process, from 0; number of ranks, at least 1 */
    mixp_ranks_hook sum;        /* sums over all ranks, same bits on each. If it adds in the order
                                   of ranks, N ranks are bit-identical to one with N parts */
    mixp_ranks_hook max;        /* maximum over all ranks. NULL = none: mixp_ranks_max fails */
    mixp_ranks_hook all_gather; /* each rank sends count elements, at data + rank * count; all ranks
                                   get all elements. NULL = none                           */
    mixp_ranks_hook grad_ready; /* a range of gradients is final: begins its sum while backward
                                   continues; grad_wait ends it. NULL = call `sum` at once */
    const char *(*grad_wait)(void *user, void *stream, double seconds);
                                /* waits until every sum that grad_ready began is in place */
    void (*stop)(void *user, const char *why);
                                /* this rank has failed: tells the other ranks not to wait. NULL =
                                   they wait for `seconds`                                 */
    void           *user;
    double          seconds;    /* time limit of one hook call, in seconds; 0 = 600        */
    int64_t         bucket_bytes;   /* minimum bytes of gradients in a range; 0 = 25 MiB. A range
                                       ends at the end of a tensor                         */
    mixp_ranks_mean mean;
    int             parts;      /* divisor of the mean; 0 = size                           */
    int             low_sums;   /* 1: f16 and bf16 gradients travel in their own dtype, not in f32:
                                   half the bytes. The adapters for CPUs in examples/ add in f32 and
                                   round the sum once; NCCL rounds each addition           */
    int             apart;      /* 1: the walks that mixp_ranks_hold holds back keep their own sums,
                                   which are added like the sums of ranks. Needs memory for a second
                                   set of gradients. With size 1 and parts N: as on N ranks */
    int             shard;      /* 1: ZeRO-1. Each rank updates one piece of each tensor and keeps
                                   moments and master weights only for its pieces. Then all ranks
                                   get the weights. Tensors of Muon, small tensors and tensors with
                                   small states are not cut: one rank updates each. Same bits as
                                   without shard. Needs all_gather; see CHECKPOINT         */
    mixp_ranks_hook reduce_scatter; /* data has size * count elements. Those at data + rank * count
                                       become the sum over all ranks; the others are undefined
                                       afterwards. NULL = none */
    mixp_ranks_hook scatter_ready;  /* begins a reduce_scatter; grad_wait ends it, also
                                       within mixp_backward. NULL = call
                                       reduce_scatter at once */
    int             scatter;    /* 1: with shard, a rank gets only the sums of the pieces it
                                   updates: see SCATTERED SUMS. Needs reduce_scatter */
    int             unused;     /* 1: on a GPU, ranks may use different parameters in each walk.
                                   Each walk then waits for the device. Ranks that all run on a CPU
                                   always may: see mixp_ranks_hold. Same on all ranks */
    mixp_dtype      wire;       /* dtype of gradients in transit: MIXP_F32 or MIXP_BF16. BF16 is
                                   half the bytes: each rank's part and the sum are rounded to bf16,
                                   as under low_sums                                       */
    int64_t         check_every;    /* one step in check_every compares 64 MiB of the weights
                                       between ranks, each time the next 64 MiB; that step waits for
                                       the device. 0 = 100, negative = never */
    void (*busy)(void *user, int on);
                                /* on 1: from now this rank works without the others, which the
                                   other ranks must wait for much longer than `seconds` (the
                                   adapters of examples/: 24 times); on 0: this rank is back. NULL =
                                   the other ranks wait for `seconds`                      */
    const char *(*replayed)(void *user, void *stream);
                                /* called when a recorded step is replayed, because the sums of a
                                   replay call no hook. Returns what a hook returns. NULL = not
                                   called                                                  */
};

/* SCATTERED SUMS. With N ranks, each rank sends and receives (N-1)/N of the gradients' bytes
 * instead of 2 (N-1)/N, and checks 1/N of the gradients. Each sharded tensor of at least 1/100 of
 * bucket_bytes is summed by its own reduce_scatter. All other tensors are summed as without
 * `scatter`.
 *
 * Memory of these gradients: a rank keeps its pieces, 1/N. A complete gradient exists from its
 * first write in mixp_backward until its sum has arrived, in a buffer that other gradients use
 * afterwards. With scatter_ready at most 2 * bucket_bytes of buffers are in flight: to stay within
 * this limit, mixp_backward calls grad_wait, and hides less of the sums. A gradient that is written
 * early and complete late (a tied embedding, a recurrent weight) keeps its buffer for that time.
 * Walks that mixp_ranks_hold holds back add to complete gradients: then each has its own buffer.
 *
 * After mixp_backward a rank has only its piece of a scattered gradient: mixp_read of the gradient
 * is MIXP_ERR_ORDER, and neither operators nor your code may read its data. After unscaling or
 * clipping, the same is true of all other gradients, except those that this rank updates, because a
 * rank unscales and clips only its own. A gradient in your own view would still be readable, so
 * mixp_optimizer_add refuses one. A parameter has one optimizer.
 *
 * If the transport adds in the same order for both kinds of sum, the sums have the same bits as
 * without scatter. So do the weights if nothing is clipped. The norm is computed from the ranks'
 * parts, in double, in the order of ranks. The norm is the same on all ranks and in every run with
 * as many ranks, and within 2^-22 of the norm without scatter. Clipping therefore changes last
 * bits. mixp_optimizer_sample counts only this rank's pieces.
 *
 * docs/ranks.md shows what sums in f32 and low_sums lose. */

#ifndef MIXPREC_NO_RANKS
/* With ranks, mixp_backward sums the gradients over the ranks and divides them. If several walks
 * make one batch, call mixp_ranks_hold with on = 1 before the first walk and on = 0 before the
 * last. Only the last walk then sends gradients, with everything accumulated in them. Walking back
 * into a gradient that was already summed, before mixp_zero_grad, is MIXP_ERR_ORDER. The first walk
 * compares the ranks' settings: MIXP_ERR_RANKS names the setting that differs, and the rank.
 * Without ranks nothing happens.
 *
 * UNUSED PARAMETERS. Ranks may use different parameters, from the first walk on. If a rank's loss
 * does not depend on a parameter, its gradient counts as 0 there. A range (see bucket_bytes) is
 * sent if the walk of any rank has reached a parameter in it. Ranks therefore compare a number
 * before each walk and, if the number differs, one bit for each range. On a GPU that comparison
 * waits for the device, so you must ask for it with `unused` of mixp_ranks_desc, on all ranks, if
 * any rank has a GPU. Without `unused`, all ranks must use the same parameters. Otherwise
 * mixp_backward or the step fails with MIXP_ERR_RANKS (the step is skipped); an engine that does
 * not compare sizes, such as NCCL, may hang or add wrong elements.
 *
 * If no rank uses a parameter, but its range is sent, the parameter gets a gradient of zeros, and
 * not NULL as without ranks. Momentum and weight decay then move the parameter. (PyTorch's DDP
 * refuses such a step; with find_unused_parameters it does not change parameters that no rank has
 * used.) To prevent that, freeze the parameter for the step on all ranks with
 * mixp_tensor_set_requires_grad(t, 0). Or use a separate optimizer for it, and step that
 * optimizer only when the parameter was used. */
MIXPREC_API mixp_result mixp_ranks_hold(mixp_context *ctx, int on);

/* mixp_ranks_sum and mixp_ranks_max: the sum, or maximum, of each element over all ranks, in
 * place. Use them for your own numbers, such as the loss that you print. With one rank nothing
 * changes. MIXP_ERR_RANKS: the hook failed or is NULL. */
MIXPREC_API mixp_result mixp_ranks_sum(mixp_tensor *t);
MIXPREC_API mixp_result mixp_ranks_max(mixp_tensor *t);

/* Checks that all ranks have the same weights. Compares names, shapes, dtypes and every bit of all
 * parameters, of views that an optimizer has, and of buffers that ranks share (see BUFFERS). All
 * ranks call it, between two steps. Waits for the device. Steps already compare a part of the
 * weights: see check_every. MIXP_ERR_RANKS names the first tensor that differs, and the rank; all
 * ranks then stop. */
MIXPREC_API mixp_result mixp_ranks_check(mixp_context *ctx);

/* Copies the weights and the shared buffers of one rank to all ranks. All ranks call it, between
 * two steps: for example after only that rank has loaded a file or initialised the weights.
 * Buffers of MIXP_BUFFER_OWN, moments and counters do not change: to load those, load a checkpoint
 * on all ranks. MIXP_ERR_ARGUMENT: no such rank.
 * MIXP_ERR_RANKS: a hook failed, or ranks differ in `rank` or in the number of weights. */
MIXPREC_API mixp_result mixp_ranks_from(mixp_context *ctx, int rank);

/* on 1: from now on only this rank works (it evaluates, samples or writes), and the other ranks
 * wait for much longer than their limit. on 0: this rank is back. Saves make these two calls
 * themselves. Without the hook `busy` the call does nothing, and the other ranks wait for
 * `seconds`. MIXP_ERR_ARGUMENT: ctx is NULL. */
MIXPREC_API mixp_result mixp_ranks_busy(mixp_context *ctx, int on);
#endif
