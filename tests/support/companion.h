/* companion.h - mixprec_cuda.cu in a test. The Makefile compiles the companion once, in
 * tests/cuda/inside.cu, and a test sees only its public declarations (COMPANION_LINKED). Without
 * COMPANION_LINKED, a test compiles the companion itself.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef COMPANION_H
#define COMPANION_H

#ifdef COMPANION_LINKED
#  include "mixprec.h"
#  include "cuda/inside.h"
#  include <stdio.h>
#  include <stdlib.h>
#  ifdef MIXPREC_CUDASIM
#    include "cudasim.h"
#  else
#    include "cudareal.h"
#  endif
#  define MIXPI_LAUNCH(kernel, grid, threads, bytes, stream, ...)                         \
       cudasim::launch(kernel, grid, threads, bytes, stream, __VA_ARGS__)
#else
#  include "cuda/inside.cu"
#  ifndef MIXPREC_CUDASIM
#    include "cudareal.h"
#  endif
#endif

#endif
