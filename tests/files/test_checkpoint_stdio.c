/* test_checkpoint_stdio.c - the tests of test_checkpoint.c with files written by plain stdio.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_NO_POSIX
#include "test_checkpoint.c"
