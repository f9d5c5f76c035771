/* checked.h - the Makefile includes it before every file, so that mixprec.h checks its invariants
 * in every build of the project. A broken invariant is a fault of mixprec: it is reported, and the
 * program ends. (It uses only built-in functions: a header here would precede a file's own feature
 * macros for the system's headers.)
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef CHECKED_H
#define CHECKED_H
#define MIXPREC_ALL_ISAS        /* whatever flags say, all that the processor has is tested */
#ifdef __clang__                /* it has no __builtin_exit */
#  ifdef __cplusplus
extern "C" void exit(int) noexcept __attribute__((noreturn));
#  else
void exit(int) __attribute__((noreturn));
#  endif
#  define CHECKED_EXIT exit
#else
#  define CHECKED_EXIT __builtin_exit
#endif
#define MIXPREC_ASSERT(condition)                                                         \
    ((condition) ? (void)0                                                                \
                 : (void)(__builtin_printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition), \
                          CHECKED_EXIT(3)))
#endif
