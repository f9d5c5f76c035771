/* companion.h - mixprec_cuda.cu in a test: all of it, for tests that look inside; or, with
 * COMPANION_LINKED, which the Makefile says of the others, only its face, for it is compiled once.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef COMPANION_H
#define COMPANION_H

#ifdef COMPANION_LINKED
#  include "mixprec.h"
#  include "cudasim.h"
#  include <stdio.h>
#  include <stdlib.h>
#  define MIXPI_LAUNCH(kernel, grid, threads, bytes, stream, ...)                         \
       cudasim::launch(kernel, grid, threads, bytes, stream, __VA_ARGS__)
#else
#  include "../mixprec_cuda.cu"
#  ifndef MIXPREC_CUDASIM
#    include "cudareal.h"
#  endif
#endif

#endif
