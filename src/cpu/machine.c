#pragma once
#include "../macros.c"
#if MIXPI_GNU && defined(__x86_64__) && !defined(MIXPREC_NO_SIMD)
#  define MIXPI_X86 1
#  include <immintrin.h>
/* In clang-cl, <immintrin.h> leaves out what the flags do not promise. */
#  if defined(_MSC_VER)
#    include <smmintrin.h>
#    include <avxintrin.h>
#    include <avx2intrin.h>
#    include <f16cintrin.h>
#    include <fmaintrin.h>
#    include <avx512fintrin.h>
#    include <avx512bwintrin.h>
#    include <avx512dqintrin.h>
#    include <avx512vlintrin.h>
#    include <avx512vlbwintrin.h>
#    include <avx512vldqintrin.h>
#    include <avx512bf16intrin.h>
#    include <avx512vlbf16intrin.h>
#  endif
#else
#  define MIXPI_X86 0
#endif
/* The lowest pass that is compiled (0: plain C, 1: AVX2, 2: AVX-512). If flags like -march=native
 * guarantee an instruction set, the lower passes would never run. MIXPREC_ALL_ISAS compiles all
 * passes, for tests. */
#if !MIXPI_X86 || defined(MIXPREC_ALL_ISAS)
#  define MIXPI_LEAST 0
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) &&           \
    defined(__AVX512VL__) && defined(__FMA__) && defined(__F16C__)
#  define MIXPI_LEAST 2
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#  define MIXPI_LEAST 1
#else
#  define MIXPI_LEAST 0
#endif
/* Which instruction sets have kernels? Builds with only conversions stop at AVX2, because memory
 * limits conversions. */
#define MIXPI_WITH_SCALAR (MIXPI_LEAST == 0)
#define MIXPI_WITH_AVX2   (MIXPI_X86 && MIXPI_LEAST <= 1)
#ifndef MIXPREC_ONLY_FORMATS
#  define MIXPI_WITH_AVX512 MIXPI_X86
#else
#  define MIXPI_WITH_AVX512 (MIXPI_LEAST == 2)
#endif
/* Does the processor have vector instructions for which there are kernels? */
#if defined(__x86_64__) || defined(_M_X64) || defined(__aarch64__) || defined(_M_ARM64)
#  define MIXPI_HAS_VECTORS 1
#else
#  define MIXPI_HAS_VECTORS 0
#endif
/* Does the compiler know AVX512_BF16? */
#define MIXPI_BF16 0
#if MIXPI_X86 && defined(__clang__)
#  if __clang_major__ >= 9
#    undef MIXPI_BF16
#    define MIXPI_BF16 1
#  endif
#elif MIXPI_X86
#  if __GNUC__ >= 10
#    undef MIXPI_BF16
#    define MIXPI_BF16 1
#  endif
#endif
#if MIXPI_GNU && defined(__aarch64__) && !defined(MIXPREC_NO_SIMD)
#  define MIXPI_ARM 1
#  include <arm_neon.h>
#else
#  define MIXPI_ARM 0
#endif
/* FMLAL and BFMLAL are used if the assembler knows them and Linux can report them. */
#define MIXPI_ARM_PAIRS 0
#if MIXPI_ARM && defined(__linux__) && defined(__AARCH64EL__)
#  if defined(__clang__) ? __clang_major__ >= 11 : __GNUC__ >= 10
#    undef MIXPI_ARM_PAIRS
#    define MIXPI_ARM_PAIRS 1
#    include <sys/auxv.h>
#  endif
#endif
/* AMX instructions are written as bytes, which every assembler accepts. */
#if MIXPI_BF16 && defined(__linux__) && defined(__LP64__)
#  define MIXPI_AMX 1
#else
#  define MIXPI_AMX 0
#endif

/* clang-cl does not link the library that the compiler's own functions need. A test defines
 * MIXPI_CPU_EMULATED, mixpi_cpuid and mixpi_xcr0. */
#if MIXPI_X86 && (defined(_MSC_VER) || defined(MIXPI_CPU_EMULATED))
#  define MIXPI_ASKS_CPU 1
#else
#  define MIXPI_ASKS_CPU 0
#endif

#if (MIXPI_ASKS_CPU || (MIXPI_AMX && !defined(MIXPI_AMX_EMULATED))) && !defined(MIXPI_CPU_EMULATED)
static void mixpi_cpuid(uint32_t leaf, uint32_t part, uint32_t out[4]) {
    __asm__ volatile("cpuid"
                     : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3])
                     : "a"(leaf), "c"(part));
}

/* Which registers the system saves. The processor must have XGETBV. */
static uint32_t mixpi_xcr0(void) {
    uint32_t low;
    __asm__ volatile("xgetbv" : "=a"(low) : "c"(0) : "edx");
    return low;
}
#endif

/* MIXPI_CPU_HAS(feature): does the processor have it, and does the system save its registers?
 * MIXPI_CPU_IS_AMD(): is the processor AMD's? Only speed depends on this answer. */
#if !MIXPI_ASKS_CPU
#  define MIXPI_CPU_HAS(feature) __builtin_cpu_supports(#feature)
#  define MIXPI_CPU_IS_AMD()     __builtin_cpu_is("amd")
#else
#  define MIXPI_CPU_HAS(feature) ((mixpi_cpu_answers() & mixpi_cpu_##feature) != 0)
#  define MIXPI_CPU_IS_AMD()     ((mixpi_cpu_answers() & mixpi_cpu_amd) != 0)
enum {
    mixpi_cpu_asked    = 1 << 0,
    mixpi_cpu_amd      = 1 << 1,
    mixpi_cpu_fma      = 1 << 2,
    mixpi_cpu_avx2     = 1 << 3,
    mixpi_cpu_avx512f  = 1 << 4,
    mixpi_cpu_avx512dq = 1 << 5,
    mixpi_cpu_avx512bw = 1 << 6,
    mixpi_cpu_avx512vl = 1 << 7,
    mixpi_cpu_avx512bf16 = 1 << 8
};

/* AVX-512, of a processor whose registers the system saves. Bits of CPUID leaf 7: Intel's Software
 * Developer's Manual, volume 2A. */
static unsigned mixpi_cpu_ask_avx512(const uint32_t wide[4]) {
    uint32_t more[4] = { 0, 0, 0, 0 };
    unsigned has = 0;
    if (wide[0] >= 1) mixpi_cpuid(7, 1, more);
    if (wide[1] >> 16 & 1u) has |= mixpi_cpu_avx512f;
    if (wide[1] >> 17 & 1u) has |= mixpi_cpu_avx512dq;
    if (wide[1] >> 30 & 1u) has |= mixpi_cpu_avx512bw;
    if (wide[1] >> 31 & 1u) has |= mixpi_cpu_avx512vl;
    if (more[0] >> 5 & 1u) has |= mixpi_cpu_avx512bf16;
    return has;
}

static unsigned mixpi_cpu_ask(void) {
    uint32_t id[4], wide[4], saved;
    unsigned has = mixpi_cpu_asked;
    mixpi_cpuid(0, 0, id);
    if (id[1] == 0x68747541u) has |= mixpi_cpu_amd; /* "Auth" of "AuthenticAMD" */
    if (id[0] < 7) return has;
    mixpi_cpuid(1, 0, id);
    if (!(id[2] >> 27 & 1u)) return has; /* OSXSAVE: XGETBV exists */
    saved = mixpi_xcr0();
    if ((saved & 6u) != 6u) return has; /* xmm and ymm */
    mixpi_cpuid(7, 0, wide);
    if (id[2] >> 12 & 1u) has |= mixpi_cpu_fma;
    if (wide[1] >> 5 & 1u) has |= mixpi_cpu_avx2;
    if ((saved & 0xE0u) == 0xE0u) has |= mixpi_cpu_ask_avx512(wide); /* masks and zmm */
    return has;
}

/* The library's only writable data, and only in clang-cl. Under a hypervisor each CPUID instruction
 * traps, which takes microseconds, so the answers are kept. Threads that ask at the same time store
 * the same answers. */
static unsigned mixpi_cpu_kept;

static unsigned mixpi_cpu_answers(void) {
    unsigned has = __atomic_load_n(&mixpi_cpu_kept, __ATOMIC_RELAXED);
    if (has) return has;
    has = mixpi_cpu_ask();
    __atomic_store_n(&mixpi_cpu_kept, has, __ATOMIC_RELAXED);
    return has;
}
#endif

/* A tile is named by a digit, 0 to 7. tests/support/amxsim.h replaces these macros with C. */
#if MIXPI_AMX && !defined(MIXPI_AMX_EMULATED)
#  define MIXPI_AMX_BYTES(bytes) __asm__ volatile(".byte 0xC4, 0xE2, " bytes ::: "memory")
#  define MIXPI_AMX_MEMORY(bytes, p, stride)                                              \
       __asm__ volatile(".byte 0xC4, 0xE2, " bytes ::"a"(p), "d"(stride) : "memory")
#  define MIXPI_AMX_CONFIGURE(p)        MIXPI_AMX_MEMORY("0x78, 0x49, 0x00", p, 0)
#  define MIXPI_AMX_RELEASE()           MIXPI_AMX_BYTES("0x78, 0x49, 0xC0")
#  define MIXPI_AMX_ZERO(tile)          MIXPI_AMX_BYTES("0x7B, 0x49, 0xC0 + 8 * " #tile)
#  define MIXPI_AMX_LOAD(tile, p, stride)                                                 \
       MIXPI_AMX_MEMORY("0x7B, 0x4B, 0x04 + 8 * " #tile ", 0x10", p, stride)
/* TILELOADDT1: as MIXPI_AMX_LOAD, but the lines need not stay in L1. */
#  define MIXPI_AMX_LOAD_PAST(tile, p, stride)                                            \
       MIXPI_AMX_MEMORY("0x79, 0x4B, 0x04 + 8 * " #tile ", 0x10", p, stride)
#  define MIXPI_AMX_STORE(tile, p, stride)                                                \
       MIXPI_AMX_MEMORY("0x7A, 0x4B, 0x04 + 8 * " #tile ", 0x10", p, stride)
#  define MIXPI_AMX_DOT_BF16(sum, a, b)                                                   \
       MIXPI_AMX_BYTES("0x7A - 8 * " #b ", 0x5C, 0xC0 + 8 * " #sum " + " #a)
#  define MIXPI_AMX_DOT_F16(sum, a, b)                                                    \
       MIXPI_AMX_BYTES("0x7B - 8 * " #b ", 0x5C, 0xC0 + 8 * " #sum " + " #a)
#  define MIXPI_AMX_CPUID(part, out) mixpi_cpuid(7, part, out)
#  define MIXPI_AMX_XCR0()           mixpi_xcr0()
#  define MIXPI_AMX_PERMIT()         mixpi_amx_permit()

/* Requests tiles for this process: ARCH_REQ_XCOMP_PERM. Linux requires the request, and repeated
 * requests get the same answer. 0: granted. */
static long mixpi_amx_permit(void) {
    long answer = 158; /* arch_prctl */
    __asm__ volatile("syscall" : "+a"(answer) : "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
    return answer;
}
#endif

/* Which tiles this process can use, or why it can use none. */
typedef enum mixpi_amx_state {
    MIXPI_AMX_ABSENT,           /* the processor has no AMX-TILE or no AMX-BF16            */
    MIXPI_AMX_UNSAVED,          /* the system does not save tiles                          */
    MIXPI_AMX_REFUSED,          /* the system refuses tiles to this process                */
    MIXPI_AMX_WRONG,            /* a product with a known answer is wrong                  */
    MIXPI_AMX_ONLY_BF16,        /* tiles multiply bf16                                     */
    MIXPI_AMX_ALSO_F16          /* tiles multiply bf16 and f16                             */
} mixpi_amx_state;

#if MIXPI_AMX
/* Asks the processor and the system which tiles this process can use. The machine must have
 * AVX-512, which implies CPUID leaf 7 and XGETBV. */
static mixpi_amx_state mixpi_amx_there(void) {
    uint32_t id[4], more[4] = { 0, 0, 0, 0 };
    MIXPI_AMX_CPUID(0, id);
    if (!(id[3] & 1u << 24) || !(id[3] & 1u << 22)) return MIXPI_AMX_ABSENT; /* TILE, BF16 */
    if (id[0] >= 1) MIXPI_AMX_CPUID(1, more);
    if ((MIXPI_AMX_XCR0() & 0x60000u) != 0x60000u) return MIXPI_AMX_UNSAVED;
    if (MIXPI_AMX_PERMIT() != 0) return MIXPI_AMX_REFUSED;
    return more[0] & 1u << 21 ? MIXPI_AMX_ALSO_F16 : MIXPI_AMX_ONLY_BF16; /* AMX-FP16 */
}
#endif

#if defined(__SANITIZE_ADDRESS__)
#  define MIXPI_SANITIZED 1
#elif defined(__has_feature)
#  if __has_feature(address_sanitizer) || __has_feature(memory_sanitizer)
#    define MIXPI_SANITIZED 1
#  endif
#endif

