/* platform_macros.h - macros with names in lower case that headers of known platforms define: the Windows SDK, Apple's
 * AssertMacros.h, curses, Arduino, X11's and the BSDs' helpers, kernels, Qt, OpenCL, and the standard's own. Here each
 * expands to what no compiler accepts, so a header that uses such a word as a name of its own does not compile.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef PLATFORM_MACROS_H
#define PLATFORM_MACROS_H
/* First the system's headers, which may use the names. */
#include <stddef.h>
#include <stdint.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <limits.h>
#include <errno.h>
#include <math.h>
#include <time.h>
#include <fcntl.h>
#include <unistd.h>
#include <dirent.h>
#include <sched.h>
#include <pthread.h>
#include <sys/types.h>
#include <sys/stat.h>
#include <sys/file.h>
#if defined(_OPENMP)
#  include <omp.h>
#endif
#if defined(__x86_64__)
#  include <immintrin.h>
#endif
#if defined(__cplusplus)
#  include <atomic>
#  include <type_traits>
#  include <utility>
#else
#  include <complex.h>      /* complex, imaginary */
#  include <tgmath.h>       /* sqrt, exp, log ... of any type */
#  include <iso646.h>       /* and, or, not ... */
#endif

#define PLATFORM_WORD 1 platform defines this word

/* windows.h, rpcndr.h, objbase.h, minwindef.h; compilers of DOS; winsock.h */
#define near      PLATFORM_WORD
#define far       PLATFORM_WORD
#define huge      PLATFORM_WORD
#define small     PLATFORM_WORD
#define hyper     PLATFORM_WORD
#define interface PLATFORM_WORD
#define cdecl     PLATFORM_WORD
#define pascal    PLATFORM_WORD
#define boolean   PLATFORM_WORD
#define grp1      PLATFORM_WORD
#define psh1      PLATFORM_WORD
#define rad1      PLATFORM_WORD
#define h_addr    PLATFORM_WORD
#define s_addr    PLATFORM_WORD
#define min(a, b) PLATFORM_WORD
#define max(a, b) PLATFORM_WORD

/* AssertMacros.h */
#define check(a)               PLATFORM_WORD
#define check_noerr(a)         PLATFORM_WORD
#define check_string(a, b)     PLATFORM_WORD
#define ncheck(a)              PLATFORM_WORD
#define verify(a)              PLATFORM_WORD
#define verify_noerr(a)        PLATFORM_WORD
#define verify_action(a, b)    PLATFORM_WORD
#define require(a, b)          PLATFORM_WORD
#define require_noerr(a, b)    PLATFORM_WORD
#define require_action(a, b, c) PLATFORM_WORD
#define require_quiet(a, b)    PLATFORM_WORD
#define debug_string(a)        PLATFORM_WORD

/* curses.h */
#define addch(a)       PLATFORM_WORD
#define addstr(a)      PLATFORM_WORD
#define attron(a)      PLATFORM_WORD
#define attroff(a)     PLATFORM_WORD
#define attrset(a)     PLATFORM_WORD
#define border(a, ...) PLATFORM_WORD
#define box(a, b, c)   PLATFORM_WORD
#define clear()        PLATFORM_WORD
#define delch()        PLATFORM_WORD
#define erase()        PLATFORM_WORD
#define getch()        PLATFORM_WORD
#define getyx(a, b, c) PLATFORM_WORD
#define hline(a, b)    PLATFORM_WORD
#define inch()         PLATFORM_WORD
#define insch(a)       PLATFORM_WORD
#define instr(a)       PLATFORM_WORD
#define move(a, b)     PLATFORM_WORD
#define refresh()      PLATFORM_WORD
#define scrl(a)        PLATFORM_WORD
#define scroll(a)      PLATFORM_WORD
#define standend()     PLATFORM_WORD
#define standout()     PLATFORM_WORD
#define timeout(a)     PLATFORM_WORD
#define vline(a, b)    PLATFORM_WORD

/* term.h, which no program needs where it compiles the implementation. */
#if defined(PLATFORM_TERM)
#  define columns         PLATFORM_WORD
#  define lines           PLATFORM_WORD
#  define tab             PLATFORM_WORD
#  define bell            PLATFORM_WORD
#endif

/* Arduino.h, avr/io.h; sys/param.h, sys/sysmacros.h, strings.h; cpp of old systems */
#define bit(a)            PLATFORM_WORD
#define word(...)         PLATFORM_WORD
#define sq(a)             PLATFORM_WORD
#define radians(a)        PLATFORM_WORD
#define degrees(a)        PLATFORM_WORD
#define constrain(a, b, c) PLATFORM_WORD
#define interrupts()      PLATFORM_WORD
#define cli()             PLATFORM_WORD
#define sei()             PLATFORM_WORD
#define round(a)          PLATFORM_WORD
#define abs(a)            PLATFORM_WORD
#define howmany(a, b)     PLATFORM_WORD
#define roundup(a, b)     PLATFORM_WORD
#define powerof2(a)       PLATFORM_WORD
#define isset(a, b)       PLATFORM_WORD
#define setbit(a, b)      PLATFORM_WORD
#undef major
#define major(a)          PLATFORM_WORD
#undef minor
#define minor(a)          PLATFORM_WORD
#undef makedev
#define makedev(a, b)     PLATFORM_WORD
#define index(a, b)       PLATFORM_WORD
#define bcopy(a, b, c)    PLATFORM_WORD
#undef unix
#define unix              PLATFORM_WORD
#undef linux
#define linux             PLATFORM_WORD
#define sun               PLATFORM_WORD
#define sgi               PLATFORM_WORD
#define mips              PLATFORM_WORD
#define vax               PLATFORM_WORD
#define i386              PLATFORM_WORD

/* Kernels, zlib, Qt, OpenCL, Metal */
#define likely(a)         PLATFORM_WORD
#define unlikely(a)       PLATFORM_WORD
#define swap(a, b)        PLATFORM_WORD
#define container_of(a, ...) PLATFORM_WORD
#define clamp(a, b, c)    PLATFORM_WORD
#define local             PLATFORM_WORD
#define global            PLATFORM_WORD
#define kernel            PLATFORM_WORD
#define constant          PLATFORM_WORD
#define signals           PLATFORM_WORD
#define slots             PLATFORM_WORD
#define emit              PLATFORM_WORD
#define foreach           PLATFORM_WORD
#define forever           PLATFORM_WORD
#endif
