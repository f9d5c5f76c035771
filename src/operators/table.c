#pragma once
#include "attention.c"
#include "sums.c"
#include "losses.c"
#include "shapes.c"
#include "scans.c"
#include "picking.c"
/* --- the table ------------------------------------------------------------------------- */

#define MIXPI_ROW(name, cls, attrs, infer, forward, backward)                             \
    { #name, MIXP_CLASS_##cls, attrs, mixpi_##infer##_infer, mixpi_##forward,             \
      mixpi_##backward, NULL }
#define MIXPI_OP(name, cls, attrs, infer, family)                                         \
    MIXPI_ROW(name, cls, attrs, infer, family##_forward, family##_backward)
#define MIXPI_BOTH(name, cls, attrs, infer, family)                                       \
    MIXPI_ROW(name, cls, attrs, infer, family##_both, family##_both)
#define MIXPI_UNARY(name, cls) MIXPI_OP(name, cls, sizeof(mixp_unary_args), same, unary)
#define MIXPI_PAIR(name, cls) MIXPI_OP(name, cls, sizeof(mixp_binary_args), binary, binary)
#define MIXPI_BINARY(name)    MIXPI_PAIR(name, PROMOTE)
#define MIXPI_COMPARISON(name)                                                            \
    { #name, MIXP_CLASS_KEEP, sizeof(mixp_compare_args), mixpi_compare_infer,             \
      mixpi_compare_forward, NULL, NULL }
#define MIXPI_LOSS(name) MIXPI_OP(name, F32, sizeof(mixpi_compared), loss, loss)

/* One row for each operator, in the order of mixp_op_id; class as in PyTorch on CUDA. */
/* clang-format off */
MIXPREC_API const mixp_op *mixp_op_builtin(mixp_op_id id) {
    static const mixp_op ops[MIXP_OP_COUNT] = {
        MIXPI_OP(linear, LOW, sizeof(mixpi_product), product, product),
        MIXPI_OP(matmul, LOW, sizeof(mixpi_product), product, product),
        MIXPI_OP(attention, LOW, sizeof(mixp_attention_args), attention, attention),
        MIXPI_BINARY(add), MIXPI_BINARY(sub), MIXPI_BINARY(mul), MIXPI_BINARY(div),
        MIXPI_UNARY(scale, KEEP), MIXPI_UNARY(relu, KEEP), MIXPI_UNARY(gelu, KEEP),
        MIXPI_UNARY(gelu_tanh, KEEP), MIXPI_UNARY(silu, KEEP), MIXPI_UNARY(tanh, KEEP),
        MIXPI_UNARY(sigmoid, KEEP), MIXPI_UNARY(sqrt, KEEP), MIXPI_UNARY(exp, F32),
        MIXPI_UNARY(log, F32), MIXPI_UNARY(pow, F32),
        MIXPI_BOTH(sum, F32_OUT, sizeof(mixpi_reduction), reduce, reduce),
        MIXPI_BOTH(mean, KEEP, sizeof(mixpi_reduction), reduce, reduce),
        MIXPI_OP(softmax, F32_OUT, sizeof(mixp_softmax_args), same, softmax),
        MIXPI_OP(log_softmax, F32_OUT, sizeof(mixp_softmax_args), same, softmax),
        MIXPI_OP(layer_norm, F32, sizeof(mixp_norm_args), norm, norm),
        MIXPI_OP(rms_norm, F32, sizeof(mixp_norm_args), norm, norm),
        MIXPI_OP(embedding, KEEP, sizeof(mixpi_embedded), embedding, embedding),
        MIXPI_BOTH(dropout, KEEP, sizeof(mixp_dropout_args), dropout, dropout),
        MIXPI_OP(cross_entropy, F32, sizeof(mixpi_entropy), cross_entropy, cross_entropy),
        MIXPI_LOSS(mse), MIXPI_LOSS(bce_with_logits),
        { "bce", MIXP_CLASS_BANNED, sizeof(mixpi_compared), mixpi_loss_infer, mixpi_loss_forward,
          mixpi_loss_backward, "mixp_bce_with_logits on the logits" },
        { NULL, MIXP_CLASS_KEEP, 0, NULL, NULL, NULL, NULL },   /* the tape's own cast */
        MIXPI_OP(reshape, KEEP, sizeof(mixpi_reshape), reshape, cast),
        MIXPI_BOTH(transpose, KEEP, sizeof(mixpi_reorder), transpose, reorder),
        MIXPI_BOTH(concat, PROMOTE, sizeof(int), concat, concat),
        MIXPI_OP(slice, KEEP, sizeof(mixpi_range), slice, slice),
        MIXPI_UNARY(neg, KEEP), MIXPI_UNARY(abs, KEEP), MIXPI_UNARY(sin, KEEP),
        MIXPI_UNARY(cos, KEEP),
        MIXPI_ROW(clamp, KEEP, sizeof(mixp_unary_args), clamp, clamp_forward, unary_backward),
        MIXPI_UNARY(relu_squared, KEEP),
        MIXPI_OP(soft_cap, KEEP, sizeof(mixp_unary_args), soft_cap, unary),
        MIXPI_BINARY(maximum), MIXPI_BINARY(minimum), MIXPI_BINARY(swiglu),
        MIXPI_OP(swiglu_packed, KEEP, sizeof(mixp_binary_args), packed, packed),
        MIXPI_LOSS(l1), MIXPI_LOSS(smooth_l1), MIXPI_LOSS(huber), MIXPI_LOSS(kl_div),
        MIXPI_OP(linear_cross_entropy, LOW, sizeof(mixpi_chunked),
                 chunked, chunked),
        MIXPI_OP(max, KEEP, sizeof(mixpi_maximum), max, max),
        { "argmax", MIXP_CLASS_KEEP, sizeof(mixpi_maximum), mixpi_max_infer, mixpi_max_forward,
          NULL, NULL },
        MIXPI_OP(gather, KEEP, sizeof(mixpi_gathering), gather, gather),
        MIXPI_OP(where, PROMOTE, sizeof(mixpi_choice), choice, choice),
        MIXPI_OP(masked_fill, KEEP, sizeof(mixpi_choice), choice, choice),
        MIXPI_BOTH(rope, KEEP, sizeof(mixp_rope_args), rope, rope),
        { "detach", MIXP_CLASS_KEEP, 0, mixpi_detach_infer, mixpi_cast_forward, NULL, NULL },
        MIXPI_UNARY(square, F32), MIXPI_UNARY(reciprocal, F32), MIXPI_UNARY(log1p, F32),
        MIXPI_UNARY(expm1, F32), MIXPI_UNARY(erf, KEEP),
        MIXPI_OP(softplus, F32, sizeof(mixp_unary_args), softplus, unary),
        MIXPI_UNARY(leaky_relu, KEEP), MIXPI_UNARY(elu, KEEP), MIXPI_UNARY(add_scalar, KEEP),
        MIXPI_UNARY(rsub, KEEP),
        MIXPI_BOTH(permute, KEEP, sizeof(mixpi_reorder), permute, reorder),
        MIXPI_BOTH(flip, KEEP, sizeof(mixpi_reorder), flip, reorder),
        MIXPI_OP(expand, KEEP, sizeof(mixpi_expansion), expand, expand),
        MIXPI_BOTH(pad, KEEP, sizeof(mixpi_padding), pad, pad),
        MIXPI_BOTH(stack, PROMOTE, sizeof(int), stack, stack),
        MIXPI_COMPARISON(eq), MIXPI_COMPARISON(ne), MIXPI_COMPARISON(gt), MIXPI_COMPARISON(ge),
        MIXPI_COMPARISON(lt), MIXPI_COMPARISON(le),
        MIXPI_OP(prod, F32_OUT, sizeof(mixpi_scan), prod, prod),
        MIXPI_BOTH(cumsum, F32_OUT, sizeof(mixpi_scan), cumsum, cumsum),
        { "one_hot", MIXP_CLASS_KEEP, sizeof(mixpi_hot), mixpi_one_hot_infer,
          mixpi_one_hot_forward, NULL, NULL },
        MIXPI_OP(scatter_add, PROMOTE, sizeof(mixpi_gathering), scatter, scatter),
        { "topk", MIXP_CLASS_KEEP, sizeof(mixp_topk_args), mixpi_topk_infer, mixpi_topk_forward,
          NULL, NULL },
        { "sort", MIXP_CLASS_KEEP, sizeof(mixp_topk_args), mixpi_topk_infer, mixpi_topk_forward,
          NULL, NULL },
        MIXPI_OP(index_add, PROMOTE, sizeof(mixpi_gathering), scatter, scatter),
        MIXPI_OP(nll, F32, sizeof(mixpi_entropy), cross_entropy, cross_entropy),
        MIXPI_UNARY(log2, F32), MIXPI_UNARY(log10, F32), MIXPI_UNARY(acos, F32),
        MIXPI_UNARY(asin, F32), MIXPI_UNARY(tan, F32), MIXPI_UNARY(sinh, F32),
        MIXPI_UNARY(cosh, F32), MIXPI_UNARY(erfinv, F32),
        MIXPI_PAIR(power, F32), MIXPI_PAIR(atan2, PROMOTE), MIXPI_PAIR(prelu, LOW)
    };
    if (id == MIXP_OP_CAST) return &mixpi_cast_op;
    return (unsigned)id < MIXP_OP_COUNT ? &ops[id] : NULL;
}
/* clang-format on */
#undef MIXPI_UNARY
#undef MIXPI_BINARY
#undef MIXPI_PAIR
#undef MIXPI_COMPARISON
#undef MIXPI_LOSS

