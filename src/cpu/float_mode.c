#pragma once
#include "../device.h"
/* --- the floating-point mode of a thread ------------------------------------------------- *
 *
 * One register controls how a thread rounds, whether it flushes subnormals, and which exceptions
 * trap. A host may let them trap (feenableexcept, -ffpe-trap). Loss scaling overflows by design, so
 * kernels run with traps off. All threads of a loop run in the mode of the thread that called.
 * Without such a register here (neither x86 nor AArch64), all three functions do nothing.
 */
#if (defined(__GNUC__) && defined(__SSE__) && !defined(__TINYC__)) || defined(_M_X64)
typedef unsigned mixpi_float_mode;
#  define MIXPI_FLOAT_TRAPS 0x1F80u     /* MXCSR: a trap is masked where its bit is 1      */
#  define MIXPI_FLOAT_FLAGS 0x3Fu       /* exceptions met so far                           */
#  if defined(_M_X64) && !defined(__GNUC__)
#    include <xmmintrin.h>
static mixpi_float_mode mixpi_float_get(void) { return _mm_getcsr(); }
static void mixpi_float_set(mixpi_float_mode m) { _mm_setcsr(m); }
#  else
static mixpi_float_mode mixpi_float_get(void) { return __builtin_ia32_stmxcsr(); }
static void mixpi_float_set(mixpi_float_mode m) { __builtin_ia32_ldmxcsr(m); }
#  endif
static mixpi_float_mode mixpi_float_untrapped(mixpi_float_mode m) { return m | MIXPI_FLOAT_TRAPS; }
#elif defined(__GNUC__) && defined(__aarch64__)
typedef uint64_t mixpi_float_mode;
#  define MIXPI_FLOAT_TRAPS 0x9F00u     /* FPCR: an exception traps where its bit is 1     */
#  define MIXPI_FLOAT_FLAGS 0u
static mixpi_float_mode mixpi_float_get(void) {
    mixpi_float_mode m;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(m));
    return m;
}
static void mixpi_float_set(mixpi_float_mode m) { __asm__ __volatile__("msr fpcr, %0" : : "r"(m)); }
static mixpi_float_mode mixpi_float_untrapped(mixpi_float_mode m) {
    return m & ~(mixpi_float_mode)MIXPI_FLOAT_TRAPS;
}
#else
typedef unsigned mixpi_float_mode;
#  define MIXPI_FLOAT_FLAGS 0u
static mixpi_float_mode mixpi_float_get(void) { return 0; }
static void mixpi_float_set(mixpi_float_mode m) { (void)m; }
static mixpi_float_mode mixpi_float_untrapped(mixpi_float_mode m) { return m; }
#endif

/* Sets the thread's mode, unless it has this mode. Returns the mode before, for
 * mixpi_float_leave. */
static mixpi_float_mode mixpi_float_enter(mixpi_float_mode to) {
    const mixpi_float_mode was = mixpi_float_get();
    if ((was ^ to) & ~(mixpi_float_mode)MIXPI_FLOAT_FLAGS) mixpi_float_set(to);
    return was;
}

/* Restores the thread's mode. Exceptions that would have trapped leave no flag. */
static void mixpi_float_leave(mixpi_float_mode was) { (void)mixpi_float_enter(was); }

/* Lets no exception of this thread trap. Returns what it was, for mixpi_float_leave. */
static mixpi_float_mode mixpi_float_calm(void) {
    const mixpi_float_mode was = mixpi_float_get(), to = mixpi_float_untrapped(was);
    if (was != to) mixpi_float_set(to);
    return was;
}
