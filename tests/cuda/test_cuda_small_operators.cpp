/* test_cuda_small_operators.cpp - the cases of operator_cases.h on a GPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "companion.h"
#include "test.h"
#include "gpu_context.h"

static mixp_context *case_context(void) { return gpu_context(); }
#define LOSS_STEP (test_later() ? 7 : 1)
#include "operator_cases.h"

int main() {
    operator_run_cases();
    return test_report();
}
