#pragma once
#include "attention.c"
#include "sums.c"
#include "losses.c"
#include "shapes.c"
#include "scans.c"
#include "picking.c"
#include "bags.c"
/* --- the table ------------------------------------------------------------------------- */

/* A row. It has the complete names of its functions, so that a search for a name finds the row. */
#define MIXPI_ROW(name, cls, attrs, infer, forward, backward)                             \
    { #name, MIXP_CLASS_##cls, attrs, infer, forward, backward, NULL }
#define MIXPI_UNARY_ROW(name, cls)                                                        \
    MIXPI_ROW(name, cls, sizeof(mixp_unary_args), mixpi_same_infer, mixpi_unary_forward,  \
              mixpi_unary_backward)
#define MIXPI_PAIR_ROW(name, cls)                                                         \
    MIXPI_ROW(name, cls, sizeof(mixp_binary_args), mixpi_binary_infer,                    \
              mixpi_binary_forward, mixpi_binary_backward)
#define MIXPI_COMPARE_ROW(name)                                                           \
    MIXPI_ROW(name, KEEP, sizeof(mixp_compare_args), mixpi_compare_infer,                 \
              mixpi_compare_forward, NULL)
#define MIXPI_LOSS_ROW(name)                                                              \
    MIXPI_ROW(name, F32, sizeof(mixpi_compared), mixpi_loss_infer, mixpi_loss_forward,    \
              mixpi_loss_backward)

/* One row for each operator, in the order of mixp_op_id; class as in PyTorch on CUDA. */
/* clang-format off */
MIXPREC_API const mixp_op *mixp_op_builtin(mixp_op_id id) {
    static const mixp_op ops[MIXP_OP_COUNT] = {
        MIXPI_ROW(linear, LOW, sizeof(mixpi_product), mixpi_product_infer, mixpi_product_forward,
                  mixpi_product_backward),
        MIXPI_ROW(matmul, LOW, sizeof(mixpi_product), mixpi_product_infer, mixpi_product_forward,
                  mixpi_product_backward),
        MIXPI_ROW(attention, LOW, sizeof(mixp_attention_args), mixpi_attention_infer,
                  mixpi_attention_forward, mixpi_attention_backward),
        MIXPI_PAIR_ROW(add, PROMOTE), MIXPI_PAIR_ROW(sub, PROMOTE), MIXPI_PAIR_ROW(mul, PROMOTE),
        MIXPI_PAIR_ROW(div, PROMOTE), MIXPI_UNARY_ROW(scale, KEEP), MIXPI_UNARY_ROW(relu, KEEP),
        MIXPI_UNARY_ROW(gelu, KEEP), MIXPI_UNARY_ROW(gelu_tanh, KEEP), MIXPI_UNARY_ROW(silu, KEEP),
        MIXPI_UNARY_ROW(tanh, KEEP), MIXPI_UNARY_ROW(sigmoid, KEEP), MIXPI_UNARY_ROW(sqrt, KEEP),
        MIXPI_UNARY_ROW(exp, F32), MIXPI_UNARY_ROW(log, F32), MIXPI_UNARY_ROW(pow, F32),
        MIXPI_ROW(sum, F32_OUT, sizeof(mixpi_reduction), mixpi_reduce_infer, mixpi_reduce_both,
                  mixpi_reduce_both),
        MIXPI_ROW(mean, KEEP, sizeof(mixpi_reduction), mixpi_reduce_infer, mixpi_reduce_both,
                  mixpi_reduce_both),
        MIXPI_ROW(softmax, F32_OUT, sizeof(mixp_softmax_args), mixpi_same_infer,
                  mixpi_softmax_forward, mixpi_softmax_backward),
        MIXPI_ROW(log_softmax, F32_OUT, sizeof(mixp_softmax_args), mixpi_same_infer,
                  mixpi_softmax_forward, mixpi_softmax_backward),
        MIXPI_ROW(layer_norm, F32, sizeof(mixp_norm_args), mixpi_norm_infer, mixpi_norm_forward,
                  mixpi_norm_backward),
        MIXPI_ROW(rms_norm, F32, sizeof(mixp_norm_args), mixpi_norm_infer, mixpi_norm_forward,
                  mixpi_norm_backward),
        MIXPI_ROW(embedding, KEEP, sizeof(mixpi_embedded), mixpi_embedding_infer,
                  mixpi_embedding_forward, mixpi_embedding_backward),
        MIXPI_ROW(dropout, KEEP, sizeof(mixp_dropout_args), mixpi_dropout_infer,
                  mixpi_dropout_both, mixpi_dropout_both),
        MIXPI_ROW(cross_entropy, F32, sizeof(mixpi_entropy), mixpi_cross_entropy_infer,
                  mixpi_cross_entropy_forward, mixpi_cross_entropy_backward),
        MIXPI_LOSS_ROW(mse), MIXPI_LOSS_ROW(bce_with_logits),
        { "bce", MIXP_CLASS_BANNED, sizeof(mixpi_compared), mixpi_loss_infer, mixpi_loss_forward,
          mixpi_loss_backward, "mixp_bce_with_logits on the logits" },
        { NULL, MIXP_CLASS_KEEP, 0, NULL, NULL, NULL, NULL },   /* the tape's own cast */
        MIXPI_ROW(reshape, KEEP, sizeof(mixpi_reshape), mixpi_reshape_infer, mixpi_cast_forward,
                  mixpi_cast_backward),
        MIXPI_ROW(transpose, KEEP, sizeof(mixpi_reorder), mixpi_transpose_infer,
                  mixpi_reorder_both, mixpi_reorder_both),
        MIXPI_ROW(concat, PROMOTE, sizeof(int), mixpi_concat_infer, mixpi_concat_both,
                  mixpi_concat_both),
        MIXPI_ROW(slice, KEEP, sizeof(mixpi_range), mixpi_slice_infer, mixpi_slice_forward,
                  mixpi_slice_backward),
        MIXPI_UNARY_ROW(neg, KEEP), MIXPI_UNARY_ROW(abs, KEEP), MIXPI_UNARY_ROW(sin, KEEP),
        MIXPI_UNARY_ROW(cos, KEEP),
        MIXPI_ROW(clamp, KEEP, sizeof(mixp_unary_args), mixpi_clamp_infer, mixpi_clamp_forward,
                  mixpi_unary_backward),
        MIXPI_UNARY_ROW(relu_squared, KEEP),
        MIXPI_ROW(soft_cap, KEEP, sizeof(mixp_unary_args), mixpi_soft_cap_infer,
                  mixpi_unary_forward, mixpi_unary_backward),
        MIXPI_PAIR_ROW(maximum, PROMOTE), MIXPI_PAIR_ROW(minimum, PROMOTE),
        MIXPI_PAIR_ROW(swiglu, PROMOTE),
        MIXPI_ROW(swiglu_packed, KEEP, sizeof(mixp_binary_args), mixpi_packed_infer,
                  mixpi_packed_forward, mixpi_packed_backward),
        MIXPI_LOSS_ROW(l1), MIXPI_LOSS_ROW(smooth_l1), MIXPI_LOSS_ROW(huber),
        MIXPI_LOSS_ROW(kl_div),
        MIXPI_ROW(linear_cross_entropy, LOW, sizeof(mixpi_chunked), mixpi_chunked_infer,
                  mixpi_chunked_forward, mixpi_chunked_backward),
        MIXPI_ROW(max, KEEP, sizeof(mixpi_maximum), mixpi_max_infer, mixpi_max_forward,
                  mixpi_max_backward),
        { "argmax", MIXP_CLASS_KEEP, sizeof(mixpi_maximum), mixpi_max_infer, mixpi_max_forward,
          NULL, NULL },
        MIXPI_ROW(gather, KEEP, sizeof(mixpi_gathering), mixpi_gather_infer, mixpi_gather_forward,
                  mixpi_gather_backward),
        MIXPI_ROW(where, PROMOTE, sizeof(mixpi_choice), mixpi_choice_infer, mixpi_choice_forward,
                  mixpi_choice_backward),
        MIXPI_ROW(masked_fill, KEEP, sizeof(mixpi_choice), mixpi_choice_infer,
                  mixpi_choice_forward, mixpi_choice_backward),
        MIXPI_ROW(rope, KEEP, sizeof(mixp_rope_args), mixpi_rope_infer, mixpi_rope_both,
                  mixpi_rope_both),
        { "detach", MIXP_CLASS_KEEP, 0, mixpi_detach_infer, mixpi_cast_forward, NULL, NULL },
        MIXPI_UNARY_ROW(square, F32), MIXPI_UNARY_ROW(reciprocal, F32),
        MIXPI_UNARY_ROW(log1p, F32), MIXPI_UNARY_ROW(expm1, F32), MIXPI_UNARY_ROW(erf, KEEP),
        MIXPI_ROW(softplus, F32, sizeof(mixp_unary_args), mixpi_softplus_infer,
                  mixpi_unary_forward, mixpi_unary_backward),
        MIXPI_UNARY_ROW(leaky_relu, KEEP), MIXPI_UNARY_ROW(elu, KEEP),
        MIXPI_UNARY_ROW(add_scalar, KEEP), MIXPI_UNARY_ROW(rsub, KEEP),
        MIXPI_ROW(permute, KEEP, sizeof(mixpi_reorder), mixpi_permute_infer, mixpi_reorder_both,
                  mixpi_reorder_both),
        MIXPI_ROW(flip, KEEP, sizeof(mixpi_reorder), mixpi_flip_infer, mixpi_reorder_both,
                  mixpi_reorder_both),
        MIXPI_ROW(expand, KEEP, sizeof(mixpi_expansion), mixpi_expand_infer, mixpi_expand_forward,
                  mixpi_expand_backward),
        MIXPI_ROW(pad, KEEP, sizeof(mixpi_padding), mixpi_pad_infer, mixpi_pad_both,
                  mixpi_pad_both),
        MIXPI_ROW(stack, PROMOTE, sizeof(int), mixpi_stack_infer, mixpi_stack_both,
                  mixpi_stack_both),
        MIXPI_COMPARE_ROW(eq), MIXPI_COMPARE_ROW(ne), MIXPI_COMPARE_ROW(gt), MIXPI_COMPARE_ROW(ge),
        MIXPI_COMPARE_ROW(lt), MIXPI_COMPARE_ROW(le),
        MIXPI_ROW(prod, F32_OUT, sizeof(mixpi_scan), mixpi_prod_infer, mixpi_prod_forward,
                  mixpi_prod_backward),
        MIXPI_ROW(cumsum, F32_OUT, sizeof(mixpi_scan), mixpi_cumsum_infer, mixpi_cumsum_both,
                  mixpi_cumsum_both),
        { "one_hot", MIXP_CLASS_KEEP, sizeof(mixpi_hot), mixpi_one_hot_infer,
          mixpi_one_hot_forward, NULL, NULL },
        MIXPI_ROW(scatter_add, PROMOTE, sizeof(mixpi_gathering), mixpi_scatter_infer,
                  mixpi_scatter_forward, mixpi_scatter_backward),
        { "topk", MIXP_CLASS_KEEP, sizeof(mixp_topk_args), mixpi_topk_infer, mixpi_topk_forward,
          NULL, NULL },
        { "sort", MIXP_CLASS_KEEP, sizeof(mixp_topk_args), mixpi_topk_infer, mixpi_topk_forward,
          NULL, NULL },
        MIXPI_ROW(index_add, PROMOTE, sizeof(mixpi_gathering), mixpi_scatter_infer,
                  mixpi_scatter_forward, mixpi_scatter_backward),
        MIXPI_ROW(nll, F32, sizeof(mixpi_entropy), mixpi_cross_entropy_infer,
                  mixpi_cross_entropy_forward, mixpi_cross_entropy_backward),
        MIXPI_UNARY_ROW(log2, F32), MIXPI_UNARY_ROW(log10, F32), MIXPI_UNARY_ROW(acos, F32),
        MIXPI_UNARY_ROW(asin, F32), MIXPI_UNARY_ROW(tan, F32), MIXPI_UNARY_ROW(sinh, F32),
        MIXPI_UNARY_ROW(cosh, F32), MIXPI_UNARY_ROW(erfinv, F32), MIXPI_PAIR_ROW(power, F32),
        MIXPI_PAIR_ROW(atan2, PROMOTE), MIXPI_PAIR_ROW(prelu, LOW),
        MIXPI_ROW(embedding_bag, KEEP, sizeof(mixpi_bagged), mixpi_bag_infer, mixpi_bag_forward,
                  mixpi_bag_backward)
    };
    if (id == MIXP_OP_CAST) return &mixpi_cast_op;
    return (unsigned)id < MIXP_OP_COUNT ? &ops[id] : NULL;
}
/* clang-format on */
#undef MIXPI_UNARY_ROW
#undef MIXPI_PAIR_ROW
#undef MIXPI_COMPARE_ROW
#undef MIXPI_LOSS_ROW

