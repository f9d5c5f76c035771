#pragma once
#include "link_names.c"
/* gcc 12 warns about its own AVX-512 intrinsics: about their "undefined" operand, and at -O0 about
 * the mask. */
#if MIXPI_PASS == 2 && defined(__GNUC__) && !defined(__clang__)
#  pragma GCC diagnostic push
#  pragma GCC diagnostic ignored "-Wuninitialized"
#  pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#  pragma GCC diagnostic ignored "-Wsign-conversion"
#endif

/* MIXPI_K: a kernel or one of its tasks. The plain C kernels are cold on processors that have
 * vectors. */
#if MIXPI_PASS == 0 && (MIXPI_X86 || MIXPI_ARM)
#  define MIXPI_SPEED    MIXPI_SELDOM
#  define MIXPI_PASS_END MIXPI_SELDOM_END
MIXPI_SELDOM_BEGIN
#else
#  define MIXPI_SPEED
#  define MIXPI_PASS_END
#endif
#define MIXPI_K static MIXPI_SPEED MIXPI_TARGET
/* The kernel mixpi_NAME of this set: what `starts`, the function mixpi_cpu_NAME, does with the
 * set's tasks. */
#define MIXPI_KERNEL(name, starts, args, tasks)                                           \
    MIXPI_K mixp_result MIXPI_P(name)(const mixp_exec *x, const args *k)                  \
    { return starts(x, k, tasks); }
/* Does this set use AVX2's functions for codes below 16 bits? AVX-512's would be as fast. */
#define MIXPI_BORROWS (MIXPI_PASS == 2 && MIXPI_WITH_AVX2)
/* Vectors stay in registers only if their functions are inlined. Plain C, -O0 and sanitizers do not
 * inline them: there speed matters less, and inlining would take minutes to compile. */
#if MIXPI_PASS != 0 && defined(__OPTIMIZE__) && !defined(MIXPI_SANITIZED)
#  define MIXPI_V static __inline__ MIXPI_TARGET __attribute__((__always_inline__, __unused__))
#elif MIXPI_GNU
#  define MIXPI_V static __inline__ MIXPI_TARGET __attribute__((__unused__))
#else
#  define MIXPI_V static inline
#endif
/* MIXPI_FLAT: a task that inlines all it calls, so that functions for host and device alike use the
 * set's instructions. */
#if MIXPI_PASS != 0 && defined(__OPTIMIZE__) && !defined(MIXPI_SANITIZED)
#  define MIXPI_FLAT static MIXPI_TARGET __attribute__((__flatten__))
#else
#  define MIXPI_FLAT MIXPI_K
#endif
/* MIXPI_RARE: a large function that seldom takes most of a step. It is compiled once per set and
 * called; inlining it would add seconds of compile time. MIXPI_F: MIXPI_RARE in plain C, inlined in
 * the other sets. */
#if MIXPI_GNU
#  define MIXPI_RARE static MIXPI_SPEED MIXPI_TARGET __attribute__((__noinline__, __unused__))
#else
#  define MIXPI_RARE static
#endif
#if MIXPI_PASS != 0
#  define MIXPI_F MIXPI_V
#else
#  define MIXPI_F MIXPI_RARE
#endif

/* Prefetches a cache line that is used soon, or (FAR) later: FAR does not fill L1. */
#if MIXPI_GNU
#  define MIXPI_PREFETCH(p)     __builtin_prefetch(p)
#  define MIXPI_PREFETCH_FAR(p) __builtin_prefetch(p, 0, 2)
#else
#  define MIXPI_PREFETCH(p)     (void)(p)
#  define MIXPI_PREFETCH_FAR(p) (void)(p)
#endif

