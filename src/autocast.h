#pragma once
#include "tensors.h"
#include "recipe.h"
/* ==== 6. AUTOCAST ===================================================== >>autocast ====
 *
 * Inside a region every operator runs in the dtype of its class, as in PyTorch's torch.amp.autocast
 * on CUDA. Regions nest; leaving a region restores the one around it.
 *
 * Up-casts are never materialised. Down-casts of parameters are cached, keyed by (tensor, dtype,
 * version). The optimizer's update refreshes the cached copies: in steady state a step casts no
 * weight.
 */
typedef enum mixp_op_class {
    MIXP_CLASS_KEEP,            /* runs in the dtype of its first input                    */
    MIXP_CLASS_LOW,             /* GEMM-like: inputs and result in the region's dtype      */
    MIXP_CLASS_F32,             /* losses, norms, exp, log, pow: f32 result                */
    MIXP_CLASS_F32_OUT,         /* softmax, sum: f32 result                                */
    MIXP_CLASS_PROMOTE,         /* runs in the widest dtype of its inputs                  */
    MIXP_CLASS_BANNED,          /* an error that names the safe operator                   */
    MIXP_CLASS_LOW_OUT,         /* inputs unchanged, result in the region's dtype. For norms that
                                   only a LOW operator reads, which would cast the result: the same
                                   bits, without the f32 array and its cast                */
    MIXP_CLASS_ALL_F32,         /* inputs are cast to f32, inside and outside of regions; the result
                                   has the dtype of infer. For your own operators that read and
                                   write float arrays                                      */
    MIXP_CLASS_COUNT
} mixp_op_class;

/* Autocast settings. Set every field, or begin with zeros. The level selects which results are
 * stored in the region's dtype. Scalars (rank 0) are always f32. All arithmetic inside norms,
 * softmax, losses and accumulations is f32 at every level.
 *
 *     0  autocast off: every operator runs as given
 *     1  as PyTorch's autocast (Apex O1): results have the dtypes of the classes above
 *     2  every activation low, also the residual stream (Apex O2), over fp32 weights
 *     3  like 2, for low parameters (Apex O3, "pure"): make the parameters with dtype f16 or
 *        bf16. Set the optimizer's no_master to keep no f32 copy. A product of an f32 parameter
 *        is MIXP_ERR_DTYPE, because it would need a low copy, as at level 2
 *
 * A gradient has its parameter's dtype. At level 3 a sum over many micro-batches or uses therefore
 * stops growing once it is 256 (bf16) or 2048 (f16) times as large as an addend: 256 + 1 is 256.
 * The sum within one product is f32. For more micro-batches set f32_gradients in
 * mixp_context_desc, or use level 2, whose gradients are f32.
 */
typedef struct mixp_autocast {
    mixp_dtype dtype;           /* MIXP_F16 or MIXP_BF16; MIXP_F32 = autocast off in this region */
    int        level;           /* 0..3; the block form uses the context's level, initially 1 */
    const mixp_recipe *recipe;  /* copied; NULL = none. The block form uses the context's recipe,
                                   initially none; see mixp_autocast_set_recipe. Under the rules of
                                   mixp_autocast_set_recipes, mixp_autocast_current has a recipe
                                   of kind NONE that represents the rules                    */
} mixp_autocast;

/* Returns the current region; dtype MIXP_F32 and level 0 outside of all regions. */
MIXPREC_API mixp_autocast mixp_autocast_current(const mixp_context *ctx);

/* Sets the level, 0..3, that the block form uses from now on.
 * MIXP_ERR_ARGUMENT: another level; the old level stays. MIXP_ERR_MEMORY. */
MIXPREC_API mixp_result mixp_autocast_set_level(mixp_context *ctx, int level);

#ifndef MIXPREC_NO_RECIPES
/* Sets the recipe that bf16 regions of the block form use from now on; it
 * is copied. NULL or kind MIXP_RECIPE_NONE = none. While a recipe is set, an f16 block is
 * MIXP_ERR_DTYPE; f32 blocks ignore the recipe. Errors: those of mixp_autocast_open_with with a
 * recipe; the old recipe then stays.
 *
 * A linear is quantised if its rows, inputs and outputs are multiples of the kind's size, both its
 * operands are bf16, no guard has raised or pinned it (mixp_guard_pin to MIXP_BF16 leaves a site
 * out of the recipe). Otherwise it multiplies in bf16.
 * mixp_autocast_recipe_counts counts both cases. mixp_mlp runs as three operators, unless rules
 * leave both its linears in bf16. Random numbers are keyed by the context's seed, the step and the
 * call: runs repeat bit for bit, also after a resume. */
MIXPREC_API mixp_result mixp_autocast_set_recipe(mixp_context *ctx, const mixp_recipe *recipe);

/* One rule of mixp_autocast_set_recipes. */
typedef struct mixp_recipe_rule {
    const char *pattern;        /* pattern of a weight's name: * matches any characters, ?
                                   matches one                                               */
    const mixp_recipe *recipe;  /* NULL or kind MIXP_RECIPE_NONE: bf16 products            */
} mixp_recipe_rule;

/* Like mixp_autocast_set_recipe, with a recipe for each weight. A linear uses the recipe of the
 * first of the n rules whose pattern fits the name of its weight; if no rule fits, it multiplies in
 * bf16, as attention always does. A weight that is the result of an operator has no name: only a
 * pattern such as "*" fits it. Patterns and recipes are copied. Call the function after the
 * parameters are made, outside of regions. It replaces the recipe of mixp_autocast_set_recipe,
 * which in turn replaces the rules; n = 0 removes them. The first and the last layer and the
 * projections of attention in bf16, the MLPs in NVFP4, everything else in FP8:
 *
 *     mixp_recipe fp4, fp8;
 *     memset(&fp4, 0, sizeof fp4);
 *     memset(&fp8, 0, sizeof fp8);
 *     fp4.kind = MIXP_RECIPE_NVFP4;
 *     fp8.kind = MIXP_RECIPE_FP8_CURRENT;
 *     mixp_recipe_rule rules[] = { { "h.0.*", NULL },    { "h.11.*", NULL }, { "*.attn.*", NULL },
 *                                  { "*.mlp.*", &fp4 }, { "*", &fp8 } };
 *     mixp_autocast_set_recipes(ctx, rules, 5);
 *
 * A guard and its pins work as under one recipe. A checkpoint stores no rules: set them before
 * mixp_checkpoint_load. Ranks with different rules fail the step with MIXP_ERR_RANKS.
 *
 * MIXP_ERR_ARGUMENT: rules is NULL; more than 64 rules; a pattern is empty, longer than 95
 * characters, or fits no permanent tensor of the context ("*" is always accepted); two recipes of
 * delayed scaling differ.
 * MIXP_ERR_ORDER: a region or a scope is open. Otherwise the errors of mixp_autocast_set_recipe. On
 * an error nothing changes. */
MIXPREC_API mixp_result mixp_autocast_set_recipes(mixp_context *ctx, const mixp_recipe_rule *rules,
                                                  int n);
/* Returns the counts since mixp_autocast_reset_counts; zeros if ctx is NULL. */
MIXPREC_API mixp_recipe_counts mixp_autocast_recipe_counts(const mixp_context *ctx);
#endif

/* MIXP_AUTOCAST(ctx, MIXP_F16) { loss = model(ctx, x); }
 *
 * A region for one block. Leave the block only at its end. return, goto and break leave the region
 * open; the next mixp_step_begin reports it, so call mixp_step_begin outside of such blocks.
 * continue ends the block, not the iteration of the loop around it, because C cannot tell continue
 * from the end of the block. */
#define MIXP_AUTOCAST(ctx, dtype)                                                         \
    MIXPI_IN_REGION(mixpi_cast_, mixpi_autocast_enter((ctx), (dtype)),                  \
                       mixpi_autocast_leave(ctx), __LINE__)
/* Names contain kind and line, so that nested blocks do not shadow each other. */
#define MIXPI_IN_REGION(kind, enter, leave, line)                                      \
    MIXPI_IN_REGION_AT(kind, enter, leave, line)
#define MIXPI_IN_REGION_AT(kind, enter, leave, line)                                   \
    for (int kind##line = (enter); kind##line; kind##line = (leave))
MIXPREC_API int mixpi_autocast_enter(mixp_context *ctx, mixp_dtype dtype);  /* always 1 */
MIXPREC_API int mixpi_autocast_leave(mixp_context *ctx);                    /* always 0 */

/* MIXP_NO_GRAD(ctx) { loss = model(ctx, x); }
 *
 * For evaluation: operators inside are not recorded for backward. Blocks nest. Leave the block only
 * at its end, and keep it within a step, as with MIXP_AUTOCAST. */
#define MIXP_NO_GRAD(ctx)                                                                 \
    MIXPI_IN_REGION(mixpi_no_grad_, mixpi_no_grad_enter(ctx), mixpi_no_grad_leave(ctx), __LINE__)
MIXPREC_API int mixpi_no_grad_enter(mixp_context *ctx);                     /* always 1 */
MIXPREC_API int mixpi_no_grad_leave(mixp_context *ctx);                     /* always 0 */

/* MIXP_SCOPE(ctx, "h.3") { ... }
 *
 * Names the operators applied inside, for WATCH: see mixp_site. Scopes nest, and their names are
 * joined by dots; a joined name is cut after 200 characters. Leave the block only at its end, and
 * keep it within a step, as with MIXP_AUTOCAST. */
#define MIXP_SCOPE(ctx, name) \
    MIXPI_IN_REGION(mixpi_scope_, mixpi_scope_enter((ctx), (name)), mixpi_scope_leave(ctx), \
                    __LINE__)
MIXPREC_API int mixpi_scope_enter(mixp_context *ctx, const char *name);     /* always 1 */
MIXPREC_API int mixpi_scope_leave(mixp_context *ctx);                       /* always 0 */

/* Regions that can be left in any way. Each open function returns the number of the region that it
 * opens. mixp_autocast_close closes that region and every region opened since, of any kind. Steps
 * may begin in between.
 *
 * mixp_autocast_open opens a region with the level and the recipe of the block form,
 * mixp_autocast_open_with a region with its own settings, mixp_no_grad_open a region as
 * MIXP_NO_GRAD, and mixp_scope_open a scope.
 *
 * On an error they return -1 and open nothing; the context has the error. MIXP_ERR_ARGUMENT:
 * another dtype or level, a name that is NULL or empty, or more than 64 nested regions and scopes.
 * With a recipe, also: MIXP_ERR_DTYPE: the dtype is not MIXP_BF16, because f16 cannot represent the
 * decoded values. MIXP_ERR_ARGUMENT: an unknown kind, or a field out of range. MIXP_ERR_DEVICE: the
 * context's device has no kernel for recipes. */
MIXPREC_API int  mixp_autocast_open(mixp_context *ctx, mixp_dtype dtype);
MIXPREC_API int  mixp_autocast_open_with(mixp_context *ctx, const mixp_autocast *region);
MIXPREC_API int  mixp_no_grad_open(mixp_context *ctx);
MIXPREC_API int  mixp_scope_open(mixp_context *ctx, const char *name);
MIXPREC_API void mixp_autocast_close(mixp_context *ctx, int opened);

#ifdef __cplusplus
/* C++: a region that lasts as long as the variable, also with return, break or an exception:
 *
 *     { mixp_autocast_scope scope(ctx, MIXP_F16); loss = model(ctx, x); }
 *
 * Name the variable: an unnamed object ends its region at once, and compilers warn of it. */
#if (defined(__clang__) && __clang_major__ >= 10 && __cplusplus >= 201703L) || \
    (defined(__GNUC__) && !defined(__clang__) && !defined(__EDG__) && __GNUC__ >= 10)
#  define MIXPI_NODISCARD [[nodiscard]]
#else
#  define MIXPI_NODISCARD
#endif
class mixp_autocast_scope {
public:
    MIXPI_NODISCARD mixp_autocast_scope(mixp_context *context, mixp_dtype dtype)
        : ctx(context), opened(mixp_autocast_open(context, dtype)) {}
    ~mixp_autocast_scope() { mixp_autocast_close(ctx, opened); }
    mixp_autocast_scope(const mixp_autocast_scope &) = delete;
    mixp_autocast_scope &operator=(const mixp_autocast_scope &) = delete;
private:
    mixp_context *ctx;
    int           opened;
};

class mixp_no_grad_scope {
public:
    MIXPI_NODISCARD explicit mixp_no_grad_scope(mixp_context *context)
        : ctx(context), opened(mixp_no_grad_open(context)) {}
    ~mixp_no_grad_scope() { mixp_autocast_close(ctx, opened); }
    mixp_no_grad_scope(const mixp_no_grad_scope &) = delete;
    mixp_no_grad_scope &operator=(const mixp_no_grad_scope &) = delete;
private:
    mixp_context *ctx;
    int           opened;
};
#endif

/* Returns an up-to-date f16 or bf16 copy of a permanent f32 tensor, for your own products. Returns
 * t itself if t has that dtype. The first call makes the copy. Optimizers then write the copy in
 * the pass that updates the weight, and its address stays. Call mixp_tensor_low again in every
 * step, which costs nothing. After you wrote the weight yourself, call mixp_tensor_touch first.
 * NULL on error. */
MIXPREC_API mixp_tensor *mixp_tensor_low(mixp_tensor *t, mixp_dtype dtype);

typedef struct mixp_op mixp_op;

/* Changes the class of an operator (mixp_op_builtin's, or yours) in one context; at most 64
 * operators. MIXP_OP_CAST accepts each class and stays MIXP_CLASS_KEEP: a cast converts to the
 * given dtype, and autocast uses it for its own casts. op must live as long as the context.
 *
 * MIXP_ERR_ARGUMENT: op is NULL, cls is not a mixp_op_class, or 64 other operators have overrides.
 * MIXP_ERR_MEMORY. */
MIXPREC_API mixp_result mixp_autocast_override(mixp_context *ctx, const mixp_op *op,
                                               mixp_op_class cls);

/* Casts since the last reset. */
typedef struct mixp_cast_count {
    int64_t weight_casts;       /* parameter copies made because the cache was stale       */
    int64_t weight_hits;        /* parameter copies found up to date                       */
    int64_t activation_casts;
} mixp_cast_count;
/* Returns the counts of casts since the last reset; zeros if ctx is NULL. */
MIXPREC_API mixp_cast_count mixp_autocast_casts(const mixp_context *ctx);
/* Sets the counts of casts and of recipes to 0. */
MIXPREC_API void mixp_autocast_reset_counts(mixp_context *ctx);

