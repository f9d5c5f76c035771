/* checked.h - the Makefile includes it before every file, so that mixprec.h checks its invariants
 * in all that is built here. One that does not hold is a fault of mixprec's: told, and the end.
 * (By built-in functions: a header here would come before what a file says of the system's.)
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef CHECKED_H
#define CHECKED_H
#define MIXPREC_ASSERT(condition)                                                         \
    ((condition) ? (void)0                                                                \
                 : (void)(__builtin_printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition), \
                          __builtin_exit(3)))
#endif
