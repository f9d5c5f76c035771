/* test_cuda_jvp.cpp - the cases of jvp_cases.h on a GPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "companion.h"
#include "test.h"
#include "gpu_context.h"

static mixp_context *case_context(void) { return gpu_context(); }
#include "jvp_cases.h"

int main() {
    jvp_run_cases();
    return test_report();
}
