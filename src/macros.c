#pragma once
#include "system.c"
/* Fails to compile unless the condition holds. */
#define MIXPI_STATIC_ASSERT(name, condition)                                              \
    struct mixpi_static_##name { char holds[(condition) ? 1 : -1]; }

/* Does this unit compile `part` of the implementation? */
#ifdef MIXPREC_PART
#  define MIXPI_IN_PART(part) (MIXPREC_PART == (part))
#else
#  define MIXPI_IN_PART(part) 1
#endif

/* Cold path, which runs once or seldom: optimise for size and compile time, together with the
 * functions that only it calls. */
#if MIXPI_GNU
#  define MIXPI_SELDOM __attribute__((__cold__))
#else
#  define MIXPI_SELDOM
#endif

/* The value of a struct whose fields are all 0. */
#ifdef __cplusplus
#  define MIXPI_ZERO {}
#else
#  define MIXPI_ZERO {0}
#endif

/* Calls, and returns from this function if the call failed. For functions that clean up nothing. */
#define MIXPI_TRY(call) \
    do { \
        const mixp_result mixpi_tried = (call); \
        if (mixpi_tried != MIXP_OK) return mixpi_tried; \
    } while (0)

/* The function's argument number `format` is a printf format for the arguments from `first` on. */
#if MIXPI_GNU
#  define MIXPI_PRINTF(format, first) __attribute__((__format__(__printf__, format, first)))
#else
#  define MIXPI_PRINTF(format, first)
#endif

/* gcc leaves out passes that take a quarter of the time to compile and make no step faster: around
 * the host's rooms (HOST), where it still optimises for speed, and around rooms that take little of
 * a step and the plain C kernels where a processor has vectors (SELDOM), where it optimises for
 * size, as clang does. Products and kernels of vectors keep every pass. Before version 12, gcc's
 * pragma drops other flags of the program. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && defined(__OPTIMIZE__)
#  define MIXPI_FEWER_PASSES \
       _Pragma("GCC optimize(\"no-tree-dominator-opts\", \"no-tree-pta\", \"no-tree-vrp\")") \
       _Pragma("GCC optimize(\"no-gcse\", \"no-rerun-cse-after-loop\", \"no-cse-follow-jumps\")") \
       _Pragma("GCC optimize(\"no-caller-saves\", \"no-tree-slsr\", \"no-tree-reassoc\")") \
       _Pragma("GCC optimize(\"no-split-paths\", \"no-tree-bit-ccp\", \"no-if-conversion2\")") \
       _Pragma("GCC optimize(\"no-ree\", \"no-cprop-registers\", \"no-ivopts\")") \
       _Pragma("GCC optimize(\"no-move-loop-invariants\", \"no-tree-loop-optimize\")")
#  define MIXPI_HOST_BEGIN \
       _Pragma("GCC push_options") \
       MIXPI_FEWER_PASSES \
       _Pragma("GCC optimize(\"no-tree-slp-vectorize\", \"no-tree-loop-vectorize\")") \
       _Pragma("GCC optimize(\"no-schedule-insns2\", \"no-if-conversion\")")
#  define MIXPI_SELDOM_BEGIN \
       _Pragma("GCC push_options") \
       _Pragma("GCC optimize(\"Os\", \"no-tree-pre\", \"no-thread-jumps\")") \
       _Pragma("GCC optimize(\"no-code-hoisting\", \"no-tree-sink\")") \
       MIXPI_FEWER_PASSES
#  define MIXPI_HOST_END     _Pragma("GCC pop_options")
#  define MIXPI_SELDOM_END   _Pragma("GCC pop_options")
#elif defined(__clang__) && __clang_major__ >= 7 && defined(__OPTIMIZE__)
#  define MIXPI_HOST_BEGIN
#  define MIXPI_HOST_END
#  define MIXPI_SELDOM_BEGIN \
       _Pragma("clang attribute push(__attribute__((__minsize__)), apply_to = function)")
#  define MIXPI_SELDOM_END   _Pragma("clang attribute pop")
#else
#  define MIXPI_HOST_BEGIN
#  define MIXPI_HOST_END
#  define MIXPI_SELDOM_BEGIN
#  define MIXPI_SELDOM_END
#endif

/* Around everything but conversions and products. With MIXPREC_SMALL clang optimises the code
 * between them for size, as -Oz does. */
#if defined(MIXPREC_SMALL) && defined(__clang__)
#  define MIXPI_SMALL_BEGIN \
       _Pragma("clang attribute push(__attribute__((__minsize__)), apply_to = function)")
#  define MIXPI_SMALL_END   _Pragma("clang attribute pop")
#else
#  define MIXPI_SMALL_BEGIN
#  define MIXPI_SMALL_END
#endif

#ifdef MIXPREC_ASSERT
#  define MIXPI_ASSERT(condition) MIXPREC_ASSERT(condition)
#else
#  define MIXPI_ASSERT(condition) ((void)0)
#endif

