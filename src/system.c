#pragma once
#include "results.h"
#include <float.h>
#include <stdarg.h>
#include <stdio.h>      /* vsnprintf for messages; files for checkpoints */
#include <stdlib.h>
#include <errno.h>

/* With MIXPREC_ONLY_FORMATS, most shared functions are unused. */
#if defined(MIXPREC_ONLY_FORMATS) && MIXPI_GNU
#  pragma GCC diagnostic push
#  pragma GCC diagnostic ignored "-Wunused-function"
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

/* The name of this file, which includes itself to compile the kernels once per instruction set. */
#ifndef MIXPREC_SELF
#  define MIXPREC_SELF "mixprec.h"
#endif

