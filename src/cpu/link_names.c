#pragma once
#include "shared.c"
#include "machine.c"
/* --- what the parts of the implementation share ------------------------------------------- *
 * MIXPREC_PART compiles one part in a source file: the host, or the kernels of one instruction
 * set. All parts have the text above, as static functions. A set defines the names below, and the
 * host, or another set, uses them: they are the only private names that the linker sees. Without
 * MIXPREC_PART they are static as well.
 */
#ifndef MIXPREC_PART
#  define MIXPI_LINKED static
#else
#  define MIXPI_LINKED
#  if MIXPI_GNU && !defined(_WIN32)
#    define MIXPI_HIDDEN __attribute__((__visibility__("hidden")))
#  else
#    define MIXPI_HIDDEN
#  endif
#  define MIXPI_OF_SET_KERNEL(name, set)                                                  \
       MIXPI_HIDDEN mixp_result mixpi_##name##_##set(const mixp_exec *x,                  \
                                                     const mixp_##name##_args *k);
#  define MIXPI_OF_SET(set)                                                               \
       extern MIXPI_HIDDEN const mixp_kernels mixpi_kernels_##set;                        \
       MIXPI_OF_SET_KERNEL(convert, set)                                                  \
       MIXPI_OF_SET_KERNEL(quantise, set)                                                 \
       MIXPI_OF_SET_KERNEL(hadamard, set)                                                 \
       MIXPI_OF_SET_KERNEL(recode, set)
MIXPI_OF_SET(scalar)
MIXPI_OF_SET(avx2)
MIXPI_OF_SET(avx512)
MIXPI_OF_SET(neon)
#  undef MIXPI_OF_SET
#  undef MIXPI_OF_SET_KERNEL
extern MIXPI_HIDDEN const mixp_kernels mixpi_kernels_bf16_avx512, mixpi_kernels_amx_avx512,
    mixpi_kernels_amx_f16_avx512, mixpi_kernels_f16_neon, mixpi_kernels_bf16_neon;
/* Does the processor compute the known answer? See mixpi_pairs_answer and mixpi_amx_answer. */
MIXPI_HIDDEN int mixpi_bf16_answers_avx512(void);
MIXPI_HIDDEN int mixpi_amx_answers_avx512(int f16);
MIXPI_HIDDEN int mixpi_f16_answers_neon(void);
MIXPI_HIDDEN int mixpi_bf16_answers_neon(void);
#endif
