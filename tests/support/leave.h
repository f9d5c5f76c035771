/* leave.h - ends a process that a test has forked.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef LEAVE_H
#define LEAVE_H
#include <unistd.h>

#ifdef TEST_COVERAGE
void __gcov_dump(void);
#endif

/* _exit, which by itself would forget what the process reached. */
static void leave(int status) {
#ifdef TEST_COVERAGE
    __gcov_dump();
#endif
    _exit(status);
}
#endif
