/* internals.h - mixprec.h with the private parts of its implementation, for a test that looks
 * inside.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A compiler that knows gnu_inline takes the public functions from the library that the test is
 * linked with, and compiles only those private functions that the test calls itself: this saves
 * seconds. Other compilers compile all of it again. So does a test that defines
 * MIXPREC_IMPLEMENTATION first, which then needs no library.
 */
#ifndef INTERNALS_H
#define INTERNALS_H
#undef MIXPREC_IMPLEMENTATION_DONE
#if defined(__GNUC__) && !defined(__TINYC__) && !defined(MIXPREC_IMPLEMENTATION)
#  pragma GCC system_header     /* no warning of static functions in those that are not compiled */
#  define MIXPREC_API extern __inline__ __attribute__((__gnu_inline__))
#endif
#undef MIXPREC_IMPLEMENTATION
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#endif
