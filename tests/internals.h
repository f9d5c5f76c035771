/* internals.h - mixprec.h with what is private to its implementation, for a test that looks inside.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A compiler that knows gnu_inline takes public functions from the library that the test is linked
 * with, and compiles of the private ones those that the test calls itself: seconds less. Others
 * compile all of it again, and so does who defines MIXPREC_IMPLEMENTATION first, to be without library.
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
