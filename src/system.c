#pragma once
#include "results.h"
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>      /* vsnprintf for messages; files for checkpoints */
#include <stdlib.h>
#include <errno.h>

#if defined(MIXPREC_PART) && defined(MIXPREC_STATIC)
#  error MIXPREC_STATIC keeps all parts in one file: do not define MIXPREC_PART
#elif defined(MIXPREC_PART)
#  if MIXPREC_PART < MIXPREC_HOST || MIXPREC_PART > MIXPREC_NEON
#    error MIXPREC_PART: define it as MIXPREC_HOST, _SCALAR, _AVX2, _AVX512 or _NEON
#  endif
#endif

/* A part, and MIXPREC_ONLY_FORMATS, do not use all shared functions and tables. */
#if (defined(MIXPREC_ONLY_FORMATS) || defined(MIXPREC_PART)) && MIXPI_GNU
#  pragma GCC diagnostic push
#  pragma GCC diagnostic ignored "-Wunused-function"
#  pragma GCC diagnostic ignored "-Wunused-const-variable"
#endif

/* The kernels' bits require arithmetic in float. The x87, and gcc on s390x in its strict modes,
 * would compute in a wider type and round later. */
#if defined(FLT_EVAL_METHOD) && (FLT_EVAL_METHOD == 1 || FLT_EVAL_METHOD == 2)
#  error mixprec.h needs FLT_EVAL_METHOD 0: x86 -msse2 -mfpmath=sse, s390x -fexcess-precision=fast
#endif

/* Checkpoints are written by POSIX calls if there are any, because stdio cannot flush to disk. */
#if !defined(MIXPREC_NO_POSIX) && !defined(MIXPREC_NO_CHECKPOINT) && \
    (defined(__unix__) || defined(__APPLE__))
#  define MIXPI_POSIX 1
#  include <fcntl.h>
#  include <sys/stat.h>
#  include <time.h>
#  include <unistd.h>
#else
#  define MIXPI_POSIX 0
#endif

