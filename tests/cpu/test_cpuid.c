/* test_cpuid.c - what mixprec asks the processor itself, as it does in clang-cl: the same features as
 * the compiler's own functions find, asked once in a program's life; and other processors, emulated.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include <stdint.h>
#define MIXPI_CPU_EMULATED

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(MIXPREC_NO_SIMD)
#define X86 1

/* The processor: this machine's, or its leaves 0, 1, 7 and 7.1 as a test states them. */
typedef struct processor {
    int      emulated;
    uint32_t leaf[4][4];        /* eax, ebx, ecx, edx */
    uint32_t xcr0;
} processor;
static processor here;
static int asked;               /* CPUID instructions */

static void mixpi_cpuid(uint32_t leaf, uint32_t part, uint32_t out[4]) {
    int i, row = leaf == 0 ? 0 : leaf == 1 ? 1 : part == 0 ? 2 : 3;
    asked++;
    if (!here.emulated)
        __asm__ volatile("cpuid"
                         : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3])
                         : "a"(leaf), "c"(part));
    else
        for (i = 0; i < 4; i++) out[i] = here.leaf[row][i];
}

static uint32_t mixpi_xcr0(void) {
    uint32_t low = here.xcr0;
    if (!here.emulated) __asm__ volatile("xgetbv" : "=a"(low) : "c"(0) : "edx");
    return low;
}
#else
#define X86 0
#endif

#define MIXPREC_ONLY_FORMATS
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"

#if X86 && MIXPI_X86
/* Forgets what was asked, as a new program. */
static void forget(void) {
    mixpi_cpu_kept = 0;
    asked = 0;
}

static void test_as_the_compiler_says(void) {
    here.emulated = 0;
    forget();
#ifdef _MSC_VER
    SKIP("clang-cl links no function of the compiler's");
#else
    CHECK_INT(MIXPI_CPU_HAS(fma), __builtin_cpu_supports("fma") != 0);
    CHECK_INT(MIXPI_CPU_HAS(avx2), __builtin_cpu_supports("avx2") != 0);
    CHECK_INT(MIXPI_CPU_HAS(avx512f), __builtin_cpu_supports("avx512f") != 0);
    CHECK_INT(MIXPI_CPU_HAS(avx512dq), __builtin_cpu_supports("avx512dq") != 0);
    CHECK_INT(MIXPI_CPU_HAS(avx512bw), __builtin_cpu_supports("avx512bw") != 0);
    CHECK_INT(MIXPI_CPU_HAS(avx512vl), __builtin_cpu_supports("avx512vl") != 0);
#  if MIXPI_BF16
    CHECK_INT(MIXPI_CPU_HAS(avx512bf16), __builtin_cpu_supports("avx512bf16") != 0);
#  endif
    CHECK_INT(MIXPI_CPU_IS_AMD(), __builtin_cpu_is("amd") != 0);
#endif
}

/* Under a hypervisor CPUID takes microseconds, and a conversion of one value nanoseconds. */
static void test_asked_once(void) {
    float x = 1.5f;
    mixp_f16 h = { 0 };
    here.emulated = 0;
    forget();
    for (int i = 0; i < 1000; i++) CHECK_INT(mixp_convert(&h, MIXP_F16, &x, MIXP_F32, 1), MIXP_OK);
    CHECK_INT(h.bits, 0x3E00);
    CHECK(asked >= 1 && asked <= 4);
}

/* A processor with all features, whose system saves all registers. Vendor's names and bits: Intel's
 * and AMD's manuals. */
static void all_features(const char *vendor) {
    memset(&here, 0, sizeof here);
    here.emulated = 1;
    here.leaf[0][0] = 7;
    memcpy(&here.leaf[0][1], vendor, 4);
    memcpy(&here.leaf[0][3], vendor + 4, 4);
    memcpy(&here.leaf[0][2], vendor + 8, 4);
    here.leaf[1][2] = 1u << 27 | 1u << 12;                              /* OSXSAVE, FMA */
    here.leaf[2][0] = 1;
    here.leaf[2][1] = 1u << 5 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  /* AVX2, F, DQ, BW, VL */
    here.leaf[3][0] = 1u << 5;                                          /* AVX512_BF16 */
    here.xcr0 = 0xE7;                                                   /* x87, xmm, ymm, masks, zmm */
    forget();
}

/* level: 0 neither, 1 AVX2, 2 AVX-512. */
static void has(int level, int bf16) {
    if (MIXPI_LEAST < 1) CHECK_INT(mixpi_has_avx2(), level >= 1);
    if (MIXPI_LEAST < 2) CHECK_INT(mixpi_has_avx512(), level >= 2);
    CHECK_INT(MIXPI_CPU_HAS(avx512bf16), bf16);
}

static void test_features(void) {
    static const int of_512[] = { 16, 17, 30, 31 };
    all_features("GenuineIntel");
    has(2, 1);
    CHECK(!MIXPI_CPU_IS_AMD());
    all_features("AuthenticAMD");
    has(2, 1);
    CHECK(MIXPI_CPU_IS_AMD());
    for (int i = 0; i < 4; i++) {
        all_features("GenuineIntel");
        here.leaf[2][1] &= ~(1u << of_512[i]);
        has(1, 1);
    }
    all_features("GenuineIntel");
    here.leaf[2][1] &= ~(1u << 5);          /* no AVX2 */
    has(0, 1);
    all_features("GenuineIntel");
    here.leaf[1][2] &= ~(1u << 12);         /* no FMA */
    has(0, 1);
    all_features("GenuineIntel");
    here.leaf[2][0] = 0;                    /* no leaf 7.1: its row is another leaf's */
    has(2, 0);
}

static void test_registers_that_are_not_saved(void) {
    all_features("GenuineIntel");
    here.leaf[1][2] &= ~(1u << 27);         /* no OSXSAVE */
    has(0, 0);
    all_features("GenuineIntel");
    here.xcr0 = 3;                          /* no ymm */
    has(0, 0);
    all_features("GenuineIntel");
    here.xcr0 = 7;                          /* no zmm, no masks */
    has(1, 0);
    all_features("AuthenticAMD");
    here.leaf[0][0] = 6;                    /* no leaf 7 */
    has(0, 0);
    CHECK(MIXPI_CPU_IS_AMD());
}
#else
static void test_as_the_compiler_says(void) { SKIP("no vectors of x86"); }
static void test_asked_once(void) { SKIP("no vectors of x86"); }
static void test_features(void) { SKIP("no vectors of x86"); }
static void test_registers_that_are_not_saved(void) { SKIP("no vectors of x86"); }
#endif

int main(void) {
    RUN(test_as_the_compiler_says);
    RUN(test_asked_once);
    RUN(test_features);
    RUN(test_registers_that_are_not_saved);
    return test_report();
}
