/* traps.h - floating-point exceptions that trap, where the system has them.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAPS_H
#define TRAPS_H
#include <fenv.h>

#if defined(__GLIBC__) && defined(_GNU_SOURCE) && (defined(__x86_64__) || defined(__i386__))
#  define CAN_TRAP 1
/* tiny 1: also underflow, as mixprec.h promises. Inexact results never trap: they are no errors. */
static inline void traps_on(int tiny) {
    feclearexcept(FE_ALL_EXCEPT);
    feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | (tiny ? FE_UNDERFLOW : 0));
}
static inline int traps_off(void) { return fedisableexcept(FE_ALL_EXCEPT); }
#else
#  define CAN_TRAP 0
static inline void traps_on(int tiny) { (void)tiny; }
static inline int traps_off(void) { return 0; }
#endif
#endif
