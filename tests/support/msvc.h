/* msvc.h - read before any source: mingw's headers as a compiler with MSVC's rules needs them.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Without __GNUC__, mingw's headers define __attribute__ as nothing, put __declspec behind declarators,
 * which MSVC's rules refuse, and read variable arguments by arithmetic that fits another compiler. */
#define MSVC_dllimport extern
#define MSVC_noreturn
#define MSVC_noinline
#define MSVC_restrict
#define MSVC_noalias
#define MSVC_deprecated
#define MSVC_align(bytes)
#define __declspec(x) MSVC_##x
#include <errno.h>
#include <float.h>
#include <math.h>
#include <process.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#undef __attribute__
#undef __declspec
#undef va_start
#undef va_arg
#undef va_copy
#undef va_end
#define va_start(list, last) __builtin_va_start(list, last)
#define va_arg(list, type)   __builtin_va_arg(list, type)
#define va_copy(to, from)    __builtin_va_copy(to, from)
#define va_end(list)         __builtin_va_end(list)
/* A long double is a double by MSVC's rules; mingw's functions of long double take 80 bits. */
#define sqrtl(x) sqrt(x)
#define fabsl(x) fabs(x)
#undef HUGE_VAL
#undef INFINITY
#undef NAN
#define HUGE_VAL __builtin_huge_val()
#define INFINITY __builtin_inff()
#define NAN      __builtin_nanf("")
#define __MINGW32__ 1       /* mixprec.h asks by it whether fmaf is mingw's, which rounds twice */
