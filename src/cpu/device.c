#pragma once
#include "passes.c"
/* Defines a CPU device. Its memory is host memory, so it has kernels and no other functions. */
#define MIXPI_CPU(isa, kernels, name)                                                     \
    static const mixp_device isa =                                                        \
        { name, &kernels, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,   \
          NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

#if MIXPI_X86
/* The next functions use kept answers. A CPUID instruction would trap under a hypervisor. */
static int mixpi_has_avx2(void) {
    if (MIXPI_LEAST >= 1) return 1;
    return MIXPI_CPU_HAS(avx2) && MIXPI_CPU_HAS(fma);
}
static int mixpi_has_avx512(void) {
    if (MIXPI_LEAST >= 2) return 1;
    return mixpi_has_avx2() && MIXPI_CPU_HAS(avx512f) && MIXPI_CPU_HAS(avx512bw) &&
           MIXPI_CPU_HAS(avx512dq) && MIXPI_CPU_HAS(avx512vl);
}
#endif

#ifndef MIXPREC_ONLY_FORMATS
#if MIXPI_X86
/* Also checks a known answer. The check takes about 20 ns and runs at each call, because the
 * library caches no state. */
static int mixpi_has_avx512_bf16(void) {
#    if MIXPI_BF16
    return mixpi_has_avx512() && MIXPI_CPU_HAS(avx512bf16) && mixpi_bf16_answers_avx512();
#    else
    return 0;
#    endif
}
#  endif

/* Which tiles this process can use. Asks CPUID, because compilers differ in which AMX features they
 * can test, and asks the system: up to 25 microseconds under a hypervisor. So only mixp_cpu and
 * mixp_cpu_with ask, never a call that a program makes in each step. */
static mixpi_amx_state mixpi_amx_usable(void) {
#  if MIXPI_X86 && MIXPI_AMX
    const mixpi_amx_state there = mixpi_has_avx512() ? mixpi_amx_there() : MIXPI_AMX_ABSENT;
    if (there < MIXPI_AMX_ONLY_BF16) return there;
    if (!mixpi_amx_answers_avx512(0)) return MIXPI_AMX_WRONG;
    if (there == MIXPI_AMX_ALSO_F16 && !mixpi_amx_answers_avx512(1)) return MIXPI_AMX_ONLY_BF16;
    return there;
#  else
    return MIXPI_AMX_ABSENT;
#  endif
}

#  if MIXPI_ARM_PAIRS
/* Asks Linux about the processor, then checks known answers. */
static int mixpi_has_neon_f16(void) {
    const unsigned long fhm = 1ul << 23; /* HWCAP_ASIMDFHM */
    if (!(getauxval(AT_HWCAP) & fhm)) return 0;
    return mixpi_f16_answers_neon();
}
static int mixpi_has_neon_bf16(void) {
    const unsigned long bf16 = 1ul << 14; /* HWCAP2_BF16 */
    if (!mixpi_has_neon_f16()) return 0;
    if (!(getauxval(AT_HWCAP2) & bf16)) return 0;
    return mixpi_bf16_answers_neon();
}
#  endif

/* The device of a set. amx_state: the answer of mixpi_amx_usable, for the sets with tiles. */
static const mixp_device *mixpi_cpu_of(mixp_isa isa, mixpi_amx_state amx_state) {
    (void)amx_state;
#  if MIXPI_WITH_SCALAR
    MIXPI_CPU(scalar, mixpi_kernels_scalar, "cpu scalar");
    if (isa == MIXP_ISA_SCALAR) return &scalar;
#  endif
#  if MIXPI_WITH_AVX2
    MIXPI_CPU(avx2, mixpi_kernels_avx2, "cpu avx2");
    if (isa == MIXP_ISA_AVX2) return mixpi_has_avx2() ? &avx2 : NULL;
#  endif
#  if MIXPI_X86
    MIXPI_CPU(avx512, mixpi_kernels_avx512, "cpu avx512");
    if (isa == MIXP_ISA_AVX512) return mixpi_has_avx512() ? &avx512 : NULL;
#    if MIXPI_BF16
    MIXPI_CPU(avx512_bf16, mixpi_kernels_bf16_avx512, "cpu avx512 bf16");
    if (isa == MIXP_ISA_AVX512_BF16) return mixpi_has_avx512_bf16() ? &avx512_bf16 : NULL;
#    endif
#    if MIXPI_AMX
    MIXPI_CPU(amx, mixpi_kernels_amx_avx512, "cpu avx512 amx");
    MIXPI_CPU(amx_f16, mixpi_kernels_amx_f16_avx512, "cpu avx512 amx f16");
    if (isa == MIXP_ISA_AMX) return amx_state >= MIXPI_AMX_ONLY_BF16 ? &amx : NULL;
    if (isa == MIXP_ISA_AMX_F16) return amx_state == MIXPI_AMX_ALSO_F16 ? &amx_f16 : NULL;
#    endif
#  endif
#  if MIXPI_ARM
    MIXPI_CPU(neon, mixpi_kernels_neon, "cpu neon");
    if (isa == MIXP_ISA_NEON) return &neon;
#    if MIXPI_ARM_PAIRS
    MIXPI_CPU(neon_f16, mixpi_kernels_f16_neon, "cpu neon f16");
    MIXPI_CPU(neon_bf16, mixpi_kernels_bf16_neon, "cpu neon f16 bf16");
    if (isa == MIXP_ISA_NEON_F16) return mixpi_has_neon_f16() ? &neon_f16 : NULL;
    if (isa == MIXP_ISA_NEON_BF16) return mixpi_has_neon_bf16() ? &neon_bf16 : NULL;
#    endif
#  endif
    return NULL;
}

#  undef MIXPI_CPU

MIXPREC_API const mixp_device *mixp_cpu_with(mixp_isa isa) {
    return mixpi_cpu_of(isa, isa < MIXP_ISA_AMX ? MIXPI_AMX_ABSENT : mixpi_amx_usable());
}

/* Is this instruction set selected by default if the processor has it? vdpbf16ps runs at twice the
 * rate of f32's multiply-add on AMD (Zen 4 and later) and at half the rate on Intel. */
static int mixpi_isa_pays(mixp_isa isa) {
#  if MIXPI_X86
    if (isa == MIXP_ISA_AVX512_BF16) return MIXPI_CPU_IS_AMD();
#  endif
    (void)isa;
    return 1;
}

MIXPREC_API const mixp_device *mixp_cpu(void) {
    const mixpi_amx_state amx_state = mixpi_amx_usable();
    const mixp_device *d = NULL;
    for (int isa = MIXP_ISA_COUNT - 1; !d; isa--)
        if (mixpi_isa_pays((mixp_isa)isa)) d = mixpi_cpu_of((mixp_isa)isa, amx_state);
    return d;
}

/* The fastest instruction set whose bits all sets but AVX512_BF16 and AMX share. Takes nanoseconds:
 * it asks neither CPUID nor the system. */
static const mixp_device *mixpi_cpu_portable(void) {
    const mixp_device *d = NULL;
    for (int isa = MIXP_ISA_NEON_BF16; !d; isa--)
        if (isa != MIXP_ISA_AVX512_BF16) d = mixpi_cpu_of((mixp_isa)isa, MIXPI_AMX_ABSENT);
    return d;
}

/* --- which devices have the same bits -------------------------------------------------------- */

#  if !defined(MIXPREC_NO_RANKS) || !defined(MIXPREC_NO_CHECKPOINT)
/* The bits of products of f16 and bf16. */
typedef enum mixpi_bits {
    MIXPI_BITS_OTHER,           /* not a CPU of this file: never compared                  */
    MIXPI_BITS_SHARED,          /* every set of this file that has no tiles                */
    MIXPI_BITS_AMX,
    MIXPI_BITS_AMX_F16,
    MIXPI_BITS_COUNT
} mixpi_bits;

static const char *const mixpi_bits_names[MIXPI_BITS_COUNT] = { "", "cpu", "cpu amx",
                                                                "cpu amx f16" };

/* Asks the name, because a program may wrap a device in its own table. */
static mixpi_bits mixpi_bits_of(const mixp_device *d) {
    if (!d->name || strncmp(d->name, "cpu ", 4) != 0) return MIXPI_BITS_OTHER;
    if (!strstr(d->name, " amx")) return MIXPI_BITS_SHARED;
    return strstr(d->name, " amx f16") ? MIXPI_BITS_AMX_F16 : MIXPI_BITS_AMX;
}
#  endif
#endif  /* MIXPREC_ONLY_FORMATS */

