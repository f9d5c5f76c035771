#pragma once
#include "autocast.h"
/* ==== 7. TAPE ============================================================= >>tape ====
 *
 * An operator is a row (mixp_op). Built-in operators and yours go through the same mixp_apply,
 * which asks autocast for dtypes, infers the result, runs the forward and records the call.
 * mixp_backward walks the recorded calls back.
 */
/* Begins a step. Call it first in every training or evaluation step. Frees the activations, their
 * gradients and the tape of the previous step, and counts the step for random numbers. Every call
 * refuses a tensor of the previous step (MIXP_ERR_ORDER), and usually those of older steps. To keep
 * values, use mixp_copy; to keep a loss, mixp_item. Networks that train alternately, as in a GAN,
 * have one step each: see the top of STEP.
 *
 * MIXP_ERR_ORDER: a MIXP_AUTOCAST or MIXP_NO_GRAD block is still open, for example left by return,
 * goto or break; mixp_step_begin then closes the block. MIXP_ERR_ORDER without any change: your own
 * operator or hook calls mixp_step_begin from its functions. If an exception has left such a
 * function, mixp_step_begin cleans up instead. */
MIXPREC_API mixp_result mixp_step_begin(mixp_context *ctx);

/* As mixp_step_begin, for a step that evaluates or samples, in training too. Does not count the
 * step: later steps draw the same random numbers with and without the evaluation, so a resumed run
 * is bit-identical to an uninterrupted run, whenever each was evaluated. Dropout that is on in such
 * a step draws the numbers of the step before. mixp_backward refuses to walk in such a step
 * (MIXP_ERR_ORDER), because all of them would have the same dropout. A guard looks as in other
 * steps. Works with mixp_retry_loss. Errors are those of mixp_step_begin. */
MIXPREC_API mixp_result mixp_eval_begin(mixp_context *ctx);

/* Fills the gradients of everything that loss (one element) was computed from. Gradients of
 * parameters and views accumulate until mixp_zero_grad. Activations keep t->grad only if you called
 * mixp_tensor_set_requires_grad on them. Each loss of a step can be walked back once; a step may
 * have several losses. A walk that fails forgets the gradients that it wrote.
 *
 * MIXP_ERR_ORDER: loss was not recorded, was walked before, or belongs to an earlier step; the step
 * began with mixp_eval_begin; an operator's own function calls mixp_backward; or a tensor that the
 * gradients depend on was overwritten since (by a step, mixp_write, mixp_fill ...). The message
 * names the tensor, the operator and the writer. */
MIXPREC_API mixp_result mixp_backward(mixp_context *ctx, mixp_tensor *loss);

/* The derivative of y along a direction, in forward mode, as by torch.func.jvp: the sum over
 * the elements of x of dy/dx times tangent, in y's shape and dtype. tangent: x's shape, real. NULL
 * means ones: for x[rows, 1] the result is the derivative of each row of y by its own row of x. If
 * x has several columns, NULL means the sum of all partial derivatives; for one of them pass a
 * tangent with 1 in its column and 0 elsewhere. y was made from x in this step. If x is an input,
 * call mixp_tensor_set_requires_grad(x, 1) before the first operator reads x. The result is 0 if y
 * does not depend on x, for example if y is a constant derivative. Results under MIXP_NO_GRAD and
 * of mixp_detach count as constants.
 *
 * Recorded operators make the result, in the region of autocast that is open now. So mixp_backward
 * walks it back as part of a loss, and its own mixp_jvp is the second derivative:
 *
 *     u_x  = mixp_jvp(ctx, u, x, NULL);
 *     u_xx = mixp_jvp(ctx, u_x, x, NULL);
 *
 * A partial derivative, where the columns of xt[rows, 2] are x and t:
 *
 *     const float   d[2]   = {0, 1};
 *     const int64_t row[2] = {1, 2}, all[2] = {rows, 2};
 *     mixp_tensor  *by_t = mixp_expand(ctx, mixp_input(ctx, MIXP_F32, 2, row, d), 2, all);
 *     mixp_tensor  *u_t  = mixp_jvp(ctx, u, xt, by_t);
 *
 * The norm of a gradient as part of a loss (PyTorch's create_graph=True): with a parameter as x,
 * and its gradient divided by the norm of all gradients as tangent, the results for all parameters
 * add up to that norm, and mixp_backward makes its exact gradients: examples/amp/penalty.c.
 *
 * Supported: elementwise operators of one and two operands, where, masked_fill, linear, matmul,
 * sum, mean, cumsum, cast, reshape, transpose, permute, flip, expand, pad, concat, stack, slice,
 * gather, embedding, embedding_bag, scatter_add, index_add, softmax, log_softmax, cross_entropy,
 * nll, mse, l1, huber, smooth_l1, bce_with_logits, and functions made of these, such as mixp_mlp,
 * var, std, vector_norm, logsumexp, split, topk and sort. Not supported: layer_norm, rms_norm,
 * attention, rope, other losses, max (use mixp_topk with k = 1), prod, dropout (use mixp_bernoulli
 * and mixp_mul), and swiglu_packed (use mixp_split and mixp_swiglu). Each operator that mixp_jvp
 * applies rounds. Under a recipe, products of tangents are bf16 products. The call needs up to
 * three times the time of the forward pass from x to y. Bits, threads and lifetime are those of the
 * operators.
 *
 * NULL on error. MIXP_ERR_ARGUMENT: NULL, another context, or an operator without a tangent, which
 * the message names. MIXP_ERR_SHAPE, MIXP_ERR_DTYPE: of tangent. MIXP_ERR_ORDER: x required no
 * gradient; y was not recorded; a tensor in between was overwritten or freed since; an operator's
 * own function calls mixp_jvp. */
MIXPREC_API mixp_tensor *mixp_jvp(mixp_context *ctx, mixp_tensor *y, mixp_tensor *x,
                                  mixp_tensor *tangent);

/* Computes y = block(ctx, x, user) and frees all that the block recorded, except y. mixp_backward
 * computes the block's operators again when it reaches them, and then frees their results. This
 * trades time for memory, as torch.utils.checkpoint does. The bits are those without
 * mixp_recompute, also with dropout, under autocast and under a guard. The function block is called
 * once. y is the only tensor of the block that may be used afterwards. The block may read other
 * tensors than x through user. A nested block is part of the outer block. Under MIXP_NO_GRAD a
 * block also frees all that it made, except y; without mixp_recompute an evaluation keeps its
 * activations until the next step begins. A block in a trial of mixp_observe frees nothing. A
 * recorded block frees nothing if one of its operators has freed a disposable tensor. Returns what
 * the block returns; NULL on error.
 *
 * Your own operator runs its forward again too: its attrs must not hold addresses of
 * activations, and its forward must do the same each time.
 *
 * MIXP_ERR_ARGUMENT: block is NULL. MIXP_ERR_ORDER, from later calls: a tensor of the block other
 * than y was used; or a tensor that the block read was written before mixp_backward. */
typedef mixp_tensor *(*mixp_block_fn)(mixp_context *ctx, mixp_tensor *x, void *user);
MIXPREC_API mixp_tensor *mixp_recompute(mixp_context *ctx, mixp_block_fn block, void *user,
                                        mixp_tensor *x);

/* --- for authors of operators ---------------------------------------------------------------- */

#define MIXP_MAX_INPUTS 65536   /* sanity limit for an uninitialised count                 */
#define MIXP_MAX_SAVED  4

typedef struct mixp_call {
    mixp_context  *ctx;
    const mixp_op *op;
    int            n_in;
    mixp_tensor  **in;      /* at least 4 slots, dtypes after autocast; NULL = optional input left
                               out                                                          */
    mixp_tensor   *out;
    mixp_tensor   *saved[MIXP_MAX_SAVED];/* tensors that forward keeps for backward         */
    void          *attrs;                /* copy of the attrs given to mixp_apply           */
} mixp_call;

/* An operator. The row and its name must live as long as the contexts that apply it. */
struct mixp_op {
    const char *name;           /* "layer_norm": used in messages and counts               */
    mixp_op_class  cls;
    size_t      attrs_size;     /* bytes of attrs that mixp_apply copies                   */
    /* Checks inputs and attrs and calls mixp_call_output (or ..._alias). */
    mixp_result (*infer)(mixp_call *c);
    /* Computes c->out. May keep tensors with mixp_call_save. Neither forward nor backward is called
     * for a result without elements: its gradients are zeros. */
    mixp_result (*forward)(mixp_call *c);
    /* Reads c->out->grad and adds to the tensors of mixp_call_grad. Operators that it applies run
     * as under MIXP_NO_GRAD. NULL: no gradient flows. */
    mixp_result (*backward)(mixp_call *c);
    const char *instead;        /* for BANNED: the operator to use instead                 */
};

/* Applies op to the inputs (NULL where optional) with attrs (attrs_size bytes, or NULL when
 * attrs_size is 0). The first `required` inputs, at least one, must not be NULL. A NULL there,
 * usually the result of an earlier error, makes mixp_apply return NULL, as any other error does.
 * The result lives until the next step. */
MIXPREC_API mixp_tensor *mixp_apply(mixp_context *ctx, const mixp_op *op, int n_in,
                                    mixp_tensor *const *in, int required,
                                    const void *attrs);

/* Call the functions below only in an operator's functions. c, the call, must not be NULL.
 *
 * For infer: declares the result. dtype is the natural dtype (the first input's). Autocast may
 * change it: forward reads the final dtype in c->out->dtype. On an error infer must return it. */
MIXPREC_API mixp_result mixp_call_output(mixp_call *c, mixp_dtype dtype, int rank,
                                         const int64_t *shape);
/* For infer: makes the result share c->in[0]'s memory under another shape of the same count.
 * MIXP_ERR_SHAPE: another count. */
MIXPREC_API mixp_result mixp_call_alias(mixp_call *c, int rank, const int64_t *shape);
/* For forward: makes a tensor in c->saved[slot], kept for backward. NULL on error. */
MIXPREC_API mixp_tensor *mixp_call_save(mixp_call *c, int slot, mixp_dtype dtype,
                                        int rank, const int64_t *shape);
/* For infer or forward: declares which tensors backward reads to compute the gradient of input i:
 * bits 1 << j for input j (0..30), and MIXP_READS_RESULT; 0 = none. All inputs from 7 on share one
 * mask. A walk back refuses a declared tensor that was overwritten since (MIXP_ERR_ORDER). Without
 * a call, backward counts as reading all inputs and the result. */
#define MIXP_READS_RESULT 0x80000000u
#define MIXP_READS_ALL    0xFFFFFFFFu
MIXPREC_API void mixp_call_reads(mixp_call *c, int i, uint32_t what);
/* For backward only: returns the gradient of input i, to be filled. NULL: the gradient is not
 * wanted. accumulate must not be NULL. *accumulate 1: add to the values; 0: overwrite them, which
 * are uninitialised. Backward must ask for each wanted gradient and write it, otherwise
 * mixp_backward fails with MIXP_ERR_ARGUMENT. (A GPU does not detect a gradient that was asked for
 * and not written.) */
MIXPREC_API mixp_tensor *mixp_call_grad(mixp_call *c, int i, int *accumulate);
/* 1: the gradient of input i is wanted. */
MIXPREC_API int mixp_call_wants(const mixp_call *c, int i);
/* Arguments for kernels, mixp_get and mixp_put. mixp_call_x is input i, mixp_call_y the result.
 * For backward, mixp_call_dy is the result's gradient, and mixp_call_dx the gradient of input i,
 * as mixp_call_grad returns it; dx also holds `accumulate`. data is NULL if the tensor is absent or
 * not wanted. */
MIXPREC_API mixp_in  mixp_call_x(const mixp_call *c, int i);
MIXPREC_API mixp_out mixp_call_y(const mixp_call *c);
MIXPREC_API mixp_in  mixp_call_dy(const mixp_call *c);
MIXPREC_API mixp_out mixp_call_dx(mixp_call *c, int i);

