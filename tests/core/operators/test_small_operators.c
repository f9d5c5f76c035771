/* test_small_operators.c - the cases of operator_cases.h on the CPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"

static mixp_context *case_context(void) { return mixp_context_new(NULL); }
#include "operator_cases.h"

int main(void) {
    operator_run_cases();
    return test_report();
}
