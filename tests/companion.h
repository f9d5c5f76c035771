/* companion.h - mixprec_cuda.cu in a test: all of it, on a GPU. On the simulated one it is compiled
 * once and linked, so that a test has less to compile, as the Makefile says: with COMPANION_LINKED only
 * its face, with COMPANION_INSIDE, a file's name, all that stands before its table.
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
