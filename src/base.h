#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>     /* memcpy: reads a float's bits portably */
#ifdef __cplusplus
#  include <initializer_list>       /* MIXP_SHAPE */
#endif

#define MIXPREC_VERSION_MAJOR 0
#define MIXPREC_VERSION_MINOR 1
#define MIXPREC_VERSION_PATCH 0
#define MIXPREC_VERSION "0.1.0"

/* The name of this file, which includes itself to compile the kernels once per instruction set. */
#ifndef MIXPREC_SELF
#  define MIXPREC_SELF "mixprec.h"
#endif

/* -Wmisleading-indentation, which -Wall contains, reads the lines of an `if` again. Before version
 * 15, gcc remembers where lines stand only up to the last line that it knows when it first reads
 * one, and searches from there: in C 2.5 seconds. So the first `if` that gcc reads is this file's
 * last one, in mixpi_last_lines. */
#if defined(MIXPREC_IMPLEMENTATION) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__cplusplus) && __GNUC__ < 15
#  define MIXPI_LAST_LINES
#  include MIXPREC_SELF
#  undef MIXPI_LAST_LINES
#endif

/* MIXPI_GNU: gcc and clang, and clang-cl, which does not define __GNUC__. */
#if defined(__GNUC__) || defined(__clang__)
#  define MIXPI_GNU 1
#else
#  define MIXPI_GNU 0
#endif

/* MIXPI_LIBM(name): libm's function for the inline functions of the API. In C++17, <math.h> takes
 * longer to compile than the rest of the API; gcc and clang have the functions built in. */
#if defined(__cplusplus) && MIXPI_GNU && !defined(__CUDACC__)
#  define MIXPI_LIBM(name) __builtin_##name
#else
#  include <math.h>
#  define MIXPI_LIBM(name) name
#endif

/* The parts of the implementation: values of MIXPREC_PART. */
#define MIXPREC_HOST   1        /* all but the CPU's kernels                               */
#define MIXPREC_SCALAR 2        /* the CPU's kernels in plain C                            */
#define MIXPREC_AVX2   3
#define MIXPREC_AVX512 4
#define MIXPREC_NEON   5

/* MIXPREC_STATIC makes the complete library private to one source file. */
#ifndef MIXPREC_API
#  if !defined(MIXPREC_STATIC)
#    define MIXPREC_API extern
#  elif MIXPI_GNU
#    define MIXPREC_API static __attribute__((__unused__))
#  else
#    define MIXPREC_API static
#  endif
#endif

/* Arithmetic shared by host and device: one definition, inlined on both sides. A shared library
 * defines MIXPREC_HD as extern in one file, and so exports these functions too. */
#if defined(MIXPREC_HD)
#elif defined(__CUDACC__)
#  define MIXPREC_HD static __host__ __device__ __forceinline__
#elif MIXPI_GNU
#  define MIXPREC_HD static __inline__ __attribute__((__unused__))
#else
#  define MIXPREC_HD static inline
#endif
/* Marks an inline function that only the host calls. */
#ifdef __CUDACC__
#  define MIXPI_HOST static inline
#else
#  define MIXPI_HOST MIXPREC_HD
#endif

/* Marks a MIXPREC_HD function that runs a few times per step: the host compiler optimises it for
 * size. */
#if MIXPI_GNU && !defined(__CUDACC__)
#  define MIXPI_HD_SELDOM __attribute__((__cold__))
#else
#  define MIXPI_HD_SELDOM
#endif

