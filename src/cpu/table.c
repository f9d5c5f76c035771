#pragma once
#include "picks.c"
#include "rows.c"
#include "gemm_tiles.c"
#include "attention_tiles_back.c"
#include "states.c"
#include "recode.c"
/* --- the table -------------------------------------------------------------------------- */

#ifndef MIXPREC_ONLY_FORMATS
#ifdef MIXPREC_NO_RECIPES
#  define MIXPI_CODER(name) NULL
#elif MIXPI_BORROWS
#  define MIXPI_CODER(name) mixpi_##name##_avx2
#else
#  define MIXPI_CODER(name) MIXPI_P(name)
#endif
#define MIXPI_TABLE(attention, attention_backward, gemm) {                                \
    MIXPI_P(convert), MIXPI_P(fill), MIXPI_P(copy), MIXPI_P(unary), MIXPI_P(unary_backward),\
    MIXPI_P(binary), MIXPI_P(binary_backward), MIXPI_P(reduce), MIXPI_P(reduce_backward), \
    MIXPI_P(softmax), MIXPI_P(softmax_backward), MIXPI_P(norm), MIXPI_P(norm_backward),   \
    MIXPI_P(embedding), MIXPI_P(embedding_backward), attention,                           \
    attention_backward, MIXPI_P(cross_entropy), MIXPI_P(cross_entropy_backward),          \
    MIXPI_P(loss), MIXPI_P(loss_backward), MIXPI_P(dropout), gemm, MIXPI_P(scale_by),     \
    MIXPI_P(grad_stats), MIXPI_P(clip), mixpi_prepare, MIXPI_P(update),                \
    mixpi_advance, MIXPI_P(look_at), mixpi_agree,                                   \
    MIXPI_P(where), MIXPI_P(where_backward), MIXPI_P(max), MIXPI_P(max_backward),         \
    MIXPI_P(gather), MIXPI_P(gather_backward), MIXPI_P(rope), MIXPI_P(random),            \
    mixpi_compare, mixpi_topk, MIXPI_P(add_norm),                                         \
    MIXPI_P(cross_entropy_both), NULL, MIXPI_CODER(quantise), MIXPI_CODER(hadamard), NULL,\
    NULL, MIXPI_CODER(recode), NULL, mixpi_cpu_restore, MIXPI_P(check_buffers),           \
    MIXPI_INDEXED(gemm_indexed)                                                           \
}
MIXPI_LINKED const mixp_kernels MIXPI_P(kernels) =
    MIXPI_TABLE(MIXPI_P(attention), MIXPI_P(attention_backward), MIXPI_P(gemm));
#if MIXPI_PAIRED
MIXPI_LINKED const mixp_kernels MIXPI_P(kernels_bf16) =
    MIXPI_TABLE(MIXPI_P(attention_bf16), MIXPI_P(attention_backward_bf16), MIXPI_P(gemm_bf16));
#endif
#if MIXPI_PASS == 2 && MIXPI_AMX
MIXPI_LINKED const mixp_kernels MIXPI_P(kernels_amx) =
    MIXPI_TABLE(MIXPI_P(attention_amx), MIXPI_P(attention_backward_amx), MIXPI_P(gemm_amx));
MIXPI_LINKED const mixp_kernels MIXPI_P(kernels_amx_f16) =
    MIXPI_TABLE(MIXPI_P(attention_amx_f16), MIXPI_P(attention_backward_amx_f16),
                MIXPI_P(gemm_amx_f16));
#endif
#if MIXPI_PASS == 3 && MIXPI_ARM_PAIRS
MIXPI_LINKED const mixp_kernels MIXPI_P(kernels_f16) =
    MIXPI_TABLE(MIXPI_P(attention_f16), MIXPI_P(attention_backward_f16), MIXPI_P(gemm_f16));
#endif
#undef MIXPI_TABLE
#undef MIXPI_CODER
#endif

MIXPI_PASS_END
#if MIXPI_PASS == 2 && defined(__GNUC__) && !defined(__clang__)
#  pragma GCC diagnostic pop
#endif
#undef MIXPI_PAIRED
#undef MIXPI_SUFFIX
#undef MIXPI_TARGET
#undef MIXPI_REGS
#undef MIXPI_LANES
#undef MIXPI_EACH
#undef MIXPI_FOLD
#undef MIXPI_R
#undef MIXPI_K
#undef MIXPI_KERNEL
#undef MIXPI_BORROWS
#undef MIXPI_SUM_LANES
#undef MIXPI_FLAT
#undef MIXPI_SPEED
#undef MIXPI_PASS_END
#undef MIXPI_V
#undef MIXPI_F
#undef MIXPI_RARE
#undef MIXPI_PREFETCH
#undef MIXPI_PREFETCH_FAR
