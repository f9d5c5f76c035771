#pragma once
#include "device.h"
/* --- recipes: products below 16 bits -------------------------------------------------------- *
 *
 * A recipe quantises the operands of mixp_linear's three products: x, the input; w, the weight; and
 * dy, the gradient of the result. The products are the result, from x and w; the gradient of x,
 * from dy and w; and the gradient of w, from dy and x. A quantised operand is a bf16 array of
 * decoded values, which bf16 holds exactly; the product is the bf16 product with f32 sums. The
 * numbers are therefore those of exact fp8 or fp4 products, on every processor.
 *
 * By itself a recipe saves no time: it shows what a format does to training. On request some GPUs
 * multiply the codes themselves: see NARROW PRODUCTS below mixp_context_desc. On request a recipe
 * saves memory: see CODES. On the CPU a parameter keeps its quantised values until the parameter is
 * written: 2 bytes for each element, or 4 if its two products need different blocks (MXFP8;
 * FP8_BLOCK and NVFP4 with no_2d).
 *
 * A training loop in NVFP4, whose first layer stays bf16, under a guard:
 *
 *     mixp_recipe r;
 *     memset(&r, 0, sizeof r);
 *     r.kind = MIXP_RECIPE_NVFP4;
 *     mixp_recipe_rule rules[] = { { "h.0.*", NULL }, { "*", &r } };
 *     mixp_autocast_set_recipes(ctx, rules, 2);
 *     mixp_guard_start(ctx, NULL);
 *     for (step = 0; step < 1000; step++) {
 *         mixp_step_begin(ctx);
 *         mixp_zero_grad(opt);
 *         MIXP_AUTOCAST(ctx, MIXP_BF16) loss = model(ctx, batch(step));
 *         mixp_backward(ctx, loss);
 *         mixp_optimizer_step(opt);
 *     }
 *
 * Begin with FP8_CURRENT or MXFP8: both have no state, and train like bf16. A linear whose sizes do
 * not fit stays bf16; one warning names the first such linear. mixp_autocast_set_recipes sets a
 * recipe for each weight by its name, as models do that have some layers in fp4 and others in fp8.
 * To see how many linears were quantised, call mixp_autocast_recipe_counts. With a guard, an
 * operand that the format cannot represent (outlier channels) falls back to bf16, with an event;
 * see FALLBACK below. Without a guard nothing is measured.
 *
 * An Inf or NaN of x, w or dy makes the product Inf or NaN, as it does in bf16: the step is
 * skipped, and a guard names the batch, the operator or the weight. Only finite values saturate.
 * See docs/recipes.md for other systems.
 *
 * A block "along the sum" lies along the dimension over which its product adds. An operand of two
 * products is quantised for each of them, from bf16, as autocast casts it. Norms, attention,
 * softmax, losses, embeddings and biases do not change. Master weights and gradients of weights
 * stay f32.
 */
typedef enum mixp_recipe_kind {
    MIXP_RECIPE_NONE,
    MIXP_RECIPE_FP8_CURRENT,    /* x, w in e4m3, dy in e5m2; one f32 scale for each tensor, from its
                                   largest magnitude. Sizes: multiples of 16. Source:
                                   TransformerEngine, Float8CurrentScaling                   */
    MIXP_RECIPE_FP8_DELAYED,    /* the same elements; the scales come from the largest magnitudes of
                                   earlier updates, so a larger value is clipped. See
                                   mixp_recipe.history. Multiples of 16. Source:
                                   TransformerEngine, DelayedScaling                       */
    MIXP_RECIPE_FP8_BLOCK,      /* e4m3; x and dy in blocks of 1 x 128 along the sum, w of 128 x
                                   128; scales are powers of two. Multiples of 128. Source:
                                   DeepSeek-V3, 3.3; TransformerEngine, Float8BlockScaling   */
    MIXP_RECIPE_MXFP8,          /* e4m3 in blocks of 1 x 32 along the sum, e8m0 scales rounded up.
                                   Multiples of 32. See mixp_recipe.e8m0. Source: OCP MX 1.0,
                                   arXiv 2506.08027                                        */
    MIXP_RECIPE_NVFP4,          /* e2m1 in blocks of 1 x 16 along the sum, w of 16 x 16; e4m3 scales
                                   under an f32 scale for each tensor; dy rounds stochastically;
                                   a random Hadamard transform of 16 on both operands of the
                                   weight's gradient. Multiples of 16. Source: arXiv 2509.25149,
                                   TransformerEngine, NVFP4BlockScaling                      */
    MIXP_RECIPE_COUNT
} mixp_recipe_kind;

/* Zero is the source's default in every field. A field whose comment begins with kinds and a colon
 * is used only by these kinds; the others ignore it. "block" is FP8_BLOCK.
 *
 * docs/recipes.md lists the switches of the sources that mixprec lacks. */
typedef struct mixp_recipe {
    mixp_recipe_kind kind;
    int dy_e4m3;                /* current, delayed: 1 = dy in e4m3 as well                */
    int power_2;                /* current: 1 = scales are rounded down to powers of two   */
    int no_stochastic;          /* NVFP4: 1 = dy rounds to nearest even                    */
    int no_hadamard;            /* NVFP4: 1 = no transform                                 */
    int no_2d;                  /* NVFP4: 1 = w in blocks of 1 x 16; block: of 1 x 128     */
    int wgrad_high;             /* 1 = the gradient of the weight is the bf16 product      */
    int history;                /* delayed: number of amax stored;  0 = 1024, at most 2^20 */
    int most_recent;            /* delayed: 1 = the scale comes from the latest amax; 0 = from the
                                   largest of the history                                  */
    int margin;                 /* delayed: the scale is divided by 2^margin; 0 to 100     */
    float error;                /* with a guard: an operand falls back whose mean relative error is
                                   above this; 0 = 0.1 (e4m3), 0.15 (e5m2), 0.6 (e2m1); at most 1;
                                   negative = never                                        */
    float clipped;              /* with a guard: the same for the share of its values that are
                                   clipped; 0 = 0.01                                       */
    mixp_e8m0_rounding e8m0;    /* MXFP8: how the scales of blocks are rounded. FLOOR and EVEN clip:
                                   `error` counts what that loses, `clipped` does not count it */
    int codes;                  /* 1 = keep the input of a linear as codes; see CODES        */
    mixp_4over6 x_4over6;       /* NVFP4: each block of x is quantised with two scales, and keeps
                                   the scale with the smaller error. Needs no_hadamard, or
                                   wgrad_high, as in the source; see 4OVER6                */
    mixp_4over6 w_4over6;       /* NVFP4: the same for each block of w                     */
    int bound_448;              /* NVFP4: 1 = with 4over6 the array's scale is 2688 / amax as
                                   without it; 0 = 1536 / amax                             */
    int row_scaled;             /* NVFP4: 1 = x has an f32 scale for each row instead of one for the
                                   array; for the gradient of the weight, for each column. Needs
                                   no_hadamard, or wgrad_high; with x_4over6 wgrad_high, as in the
                                   source; see ROWS                                        */
} mixp_recipe;

/* ROWS. With row_scaled each row of x has its own scale. A row of the result then depends on
 * no other row: an outlier in one token does not change the rows of other tokens, and on a CPU a
 * row has the same bits in every batch whose number of rows is a multiple of 16. The product of x
 * and w, and of dy and x, is made in f32, without the factors of the rows or columns of x; the
 * factors and the bias follow, and the result is rounded once. The f32 product needs 4 bytes
 * per element of the result while it runs. Source: TransformerEngine, NVFP4BlockScaling,
 * row_scaled_activation. */

/* 4OVER6. The largest value of a block of NVFP4 usually becomes 6, the largest number of e2m1. Then
 * nothing lies between 2/3 of that value and the value itself. With 4over6 the value becomes 6 or
 * 4, whichever loses less of the block; mixp_4over6 has the formulas. dy is quantised as usual, as
 * in the source. In squares (w, without no_2d) one choice holds for both products. There
 * TransformerEngine adds the errors of w for the gradient of x in another order, so that it may
 * choose otherwise where both errors are nearly equal. */

/* CODES. For the gradient of a weight, the tape keeps the input x of each linear until backward.
 * With codes = 1 a linear keeps x as the codes of its quantised values: 1 byte for each element
 * (FP8_CURRENT, FP8_DELAYED), 1 + 1/128 (FP8_BLOCK), 1 + 1/32 (MXFP8), or 4.5 bits (NVFP4). Then
 * mixp_linear frees x, whose elements have 2 bytes, or 6 if autocast has cast x from f32. Backward
 * turns the codes into bf16 values, for one linear at a time. Gradients are bit-identical to those
 * without codes. FP8_BLOCK, MXFP8 and NVFP4 quantise x for this gradient in forward instead of
 * backward. FP8_DELAYED with an update between forward and backward, as when two optimizers
 * alternate: codes keep forward's scale of x; without codes backward quantises x by the scale after
 * the update.
 *
 * The program declares that it does not read x again: call mixp_tensor_set_disposable(x, 1) before
 * the last mixp_linear that reads x. A later read of x is MIXP_ERR_ORDER. A copy that autocast
 * makes for a linear, and the GELU inside of mixp_mlp, are disposable by themselves. mixp_jvp
 * along the weight of a linear reads x again, which is then MIXP_ERR_ORDER.
 *
 * x stays in memory, without codes, if
 * - the gradient of another operator reads x: of another linear (join q, k and v in one weight), of
 *   an operator whose gradient reads its result (attention, softmax, tanh, sigmoid, exp), or of
 *   your own operator without mixp_call_reads;
 * - x is not the result of a recorded operator, or shares memory with another tensor
 *   (mixp_reshape);
 * - the weight needs no gradient, or the step is an evaluation or a trial. An evaluation with
 *   batches as large as those of training may then set the peak of memory: use smaller ones;
 * - the linear lies in a block of mixp_recompute, multiplies in bf16, or has an x or dy that fell
 *   back to bf16.
 *
 * If no linear of a training step keeps x as codes, on_warning gets one linear and the reason.
 *
 * MIXP_ERR_ARGUMENT: codes with wgrad_high, whose product reads x itself, or without a kind.
 * MIXP_ERR_DEVICE: the device has its own memory, but no kernel `recode`. */

/* FALLBACK. In the steps that a guard samples, mixp_linear measures what quantising its operands x,
 * w and dy loses: the mean of |q - x| / |x| over the values that are not 0, and the share of values
 * beyond the largest that the scale can hold (delayed scaling; Inf in any kind). An operand beyond
 * a bound falls back: the two products that read it are bf16 products, whose other operand is not
 * quantised either. MIXP_EVENT_OPERAND names the site and the operand. Sampled steps continue to
 * measure it. It is quantised again after mixp_guard_desc.clean samples in a row of at most 0.8 of
 * the bounds; each relapse doubles the number. Ranks decide by the largest loss of all. Checkpoints
 * keep the state (mixprec.guard.operands). Delayed scaling is not judged while the scale is the
 * first one, 1. On a GPU a sampled step reads each operand once more and waits for nothing; its
 * decisions come one step later, as the guard's do there. */

/* DELAYED SCALING. Each parameter that mixp_linear multiplies by has three scales, of x, w and dy,
 * each 1 at first, and a history of amax for each: the largest magnitudes in the updates so far. An
 * operand is quantised with its scale. Its amax enters the first place of the history: the largest
 * of all linears with that parameter, of all micro-batches and of all ranks. Evaluations
 * (MIXP_NO_GRAD, mixp_eval_begin) and trials of mixp_observe use the scales, but enter no amax.
 *
 * mixp_scaler_update, or mixp_optimizer_step without a scaler, ends an update, also a skipped one.
 * For each operand with an amax above 0: s = max / 2^margin / amax; the history moves by one place,
 * its first place becomes 0. An operand with an Inf or NaN enters nothing, and its scale stays for
 * that update. (TransformerEngine enters the Inf, and keeps the scale until the Inf has left the
 * history.) A linear whose weight is not a parameter stays in bf16.
 *
 * A checkpoint holds the state as f32: mixprec.recipe.amax_history.NAME [3, history] and
 * mixprec.recipe.scales.NAME [3]. Set the recipe before mixp_checkpoint_load. A state in the file
 * that the program's recipe does not use, or of another length, is MIXP_ERR_SHAPE. If the file has
 * no state, scales are 1 and histories are empty. All ranks must set the same recipe, and open its
 * region in each step that trains; a rank may apply no linear there.
 *
 * On a GPU the state is kept and updated in device memory, with the CPU's bits, also in replays of
 * a captured step. No update waits for the host, except between ranks. MIXP_ERR_ORDER: a linear
 * without a state in a capture (run an ordinary step first); a capture of an update between ranks;
 * a replay of an update after another linear has met delayed scaling (record the step again).
 * MIXP_ERR_DEVICE: the device has its own memory, but no kernel `turn`. */

#ifndef MIXPREC_NO_RECIPES
/* "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"; "none". "?" for an unknown kind. */
MIXPREC_API const char *mixp_recipe_name(mixp_recipe_kind kind);

/* The kernel `quantise` on the CPU, in the threads of x (mixp_context_exec); k->decode and k->times
 * are ignored. *decode: the factor by which a product with y must be multiplied: 1 / s for TENSOR
 * and E4M3, otherwise 1. MIXP_ERR_ARGUMENT: NULL, an unknown scale or element, or k->given is
 * negative or not finite. MIXP_ERR_SHAPE: blocks that do not fit. MIXP_ERR_DTYPE: x is neither f32
 * nor bf16. On an error y, *decode and *k->amax are unchanged. */
MIXPREC_API mixp_result mixp_quantise(const mixp_exec *x, const mixp_quantise_args *k,
                                      float *decode);

/* The kernel `hadamard` on the CPU; see mixp_hadamard_args. Errors as mixp_quantise's. */
MIXPREC_API mixp_result mixp_hadamard(const mixp_exec *x, int64_t rows, int64_t cols, mixp_in a,
                                      mixp_bf16 *y);
#endif

/* The blocks of an operand in a sample of a guard, all its quantisations together, also those by
 * which the guard recomputes a site: see mixp_site_info. If an array has one scale (FP8_CURRENT,
 * FP8_DELAYED), a row counts as a block. A block without a value other than 0, or with an Inf or
 * NaN, does not count. */
typedef struct mixp_block_look {
    int64_t blocks;             /* blocks that count; 0: not measured                      */
    int64_t clipped;            /* blocks with a value beyond the range of their scale     */
    int64_t flushed;            /* blocks whose values all rounded to 0                    */
    int     least, largest;     /* exponents e of the smallest and the largest scale above 0. A
                                   value is its element times the scale; 2^e <= scale < 2^(e+1) */
} mixp_block_look;

/* Counts of mixp_linear under recipes since mixp_autocast_reset_counts. */
typedef struct mixp_recipe_counts {
    int64_t products;           /* products of quantised operands, backward included       */
    int64_t fallen;             /* products that are bf16 because an operand fell back     */
    int64_t quantised;          /* linears with a quantised forward product                */
    int64_t kept;               /* linears left bf16: a rule, a pin or the guard           */
    int64_t unfit;              /* linears left bf16 because a size does not fit           */
    char    unfit_name[64];     /* name of the first such weight; "" if it has none        */
    int64_t unfit_sizes[3];     /* rows of x, outputs and inputs of that linear            */
    int64_t coded;              /* linears that have kept their input as codes             */
} mixp_recipe_counts;
