/* companion.h - mixprec_cuda.cu in a test. Mostly it is compiled once and linked, so that a test has
 * less to compile, as the Makefile says: with COMPANION_LINKED only its face, with COMPANION_INSIDE (on
 * the simulated GPU), a file's name, all that stands before its table; with neither, all of it.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef COMPANION_H
#define COMPANION_H

#ifdef COMPANION_LINKED
#  include "mixprec.h"
#  include <stdio.h>
#  include <stdlib.h>
#  ifdef MIXPREC_CUDASIM
#    include "cudasim.h"
#  else
#    include "cudareal.h"
#  endif
#  define MIXPI_LAUNCH(kernel, grid, threads, bytes, stream, ...)                         \
       cudasim::launch(kernel, grid, threads, bytes, stream, __VA_ARGS__)
#elif defined(COMPANION_INSIDE)
#  include COMPANION_INSIDE
#  include <stdio.h>
#  include <stdlib.h>
#else
#  include "../mixprec_cuda.cu"
#  ifndef MIXPREC_CUDASIM
#    include "cudareal.h"
#  endif
#endif

#endif
