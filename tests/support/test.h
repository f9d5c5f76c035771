/* test.h - the test harness: each test_*.c is one program of RUN(...) lines.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A test is a function. It passes if none of its CHECKs failed and it did not skip. The program
 * ends with the line `N passed, N failed, N skipped` and exits with 1 if a test failed. With
 * MIXPREC_TEST_ONLY=name in the environment only that test runs. MIXPREC_TEST_QUICK=1 shortens long
 * tests (emulators, sanitizers), and 2 shortens or skips more of them (make test).
 */
#ifndef TEST_H
#define TEST_H
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int test_passed, test_failed, test_skipped;
static int test_bad, test_skip;     /* of the running test */
static int test_shown;              /* only the first failures of a test are printed */

#define TEST_SHOW(...)                                                                    \
    do { if (test_shown++ < 10) { printf("  %s:%d: ", __FILE__, __LINE__); printf(__VA_ARGS__); printf("\n"); } } while (0)

#define CHECK(condition)                                                                  \
    do { if (!(condition)) { test_bad++; TEST_SHOW("%s", #condition); } } while (0)
#define CHECK_INT(got, want)                                                              \
    do { long long g_ = (long long)(got), w_ = (long long)(want);                         \
         if (g_ != w_) { test_bad++; TEST_SHOW("%s is %lld, not %lld", #got, g_, w_); } } while (0)
/* |got - want| <= tolerance; a NaN fails. */
#define CHECK_NEAR(got, want, tolerance)                                                  \
    do { double g_ = (double)(got), w_ = (double)(want);                                  \
         if (!(fabs(g_ - w_) <= (double)(tolerance))) { test_bad++;                       \
             TEST_SHOW("%s is %.9g, not %.9g", #got, g_, w_); } } while (0)
#define CHECK_TEXT(got, part)   /* got contains part */                                   \
    do { const char *g_ = (got); if (!g_ || !strstr(g_, (part))) { test_bad++;            \
             TEST_SHOW("\"%s\" does not contain \"%s\"", g_ ? g_ : "NULL", (part)); } } while (0)
/* Leaves the running test, counted as skipped. */
#define SKIP(why) do { printf("  skipped: %s\n", (why)); test_skip = 1; return; } while (0)
#ifdef __FAST_MATH__    /* which leaves few bits to promise */
#  define FAST_MATH 1
#else
#  define FAST_MATH 0
#endif
#define NEEDS_SIMULATION if (!cudasim::simulated) SKIP("needs the simulated CUDA")

static int test_wanted(const char *name) {
    const char *only = getenv("MIXPREC_TEST_ONLY");
    return !only || !*only || strcmp(only, name) == 0;
}

#define RUN(test)                                                                         \
    do { if (!test_wanted(#test)) break;                                                  \
         test_bad = test_skip = test_shown = 0; test();                                   \
         if (test_bad) { test_failed++; printf("FAIL %s (%d checks)\n", #test, test_bad); }  \
         else if (test_skip) { test_skipped++; printf("skip %s\n", #test); }              \
         else { test_passed++; printf("ok   %s\n", #test); } fflush(stdout); } while (0)

/* What `make test` leaves out, and `make test-long` runs. */
static inline int test_later(void) {
    const char *quick = getenv("MIXPREC_TEST_QUICK");
    return quick && strcmp(quick, "2") == 0;
}
#define RUN_LATER(test)                                                                   \
    do { if (!test_later()) RUN(test);                                                    \
         else if (test_wanted(#test)) {                                                   \
             test_skipped++; printf("skip %s: in make test-long\n", #test); } } while (0)

static int test_report(void) {
    printf("%d passed, %d failed, %d skipped\n", test_passed, test_failed, test_skipped);
    return test_failed != 0;
}
#endif
