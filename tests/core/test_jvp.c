/* test_jvp.c - the cases of jvp_cases.h on the CPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"

static mixp_context *case_context(void) { return mixp_context_new(NULL); }
#include "jvp_cases.h"

int main(void) {
    jvp_run_cases();
    return test_report();
}
