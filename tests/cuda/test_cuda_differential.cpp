/* test_cuda_differential.cpp - differential_cases.h on a GPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "companion.h"
#include "test.h"
#include "differential_cases.h"
#include "gpu_context.h"

static void test_small_operators_against_torch() { differential_on(gpu_context()); }

int main() {
    (void)gen_fill;             /* of other tests */
    RUN(test_small_operators_against_torch);
    return test_report();
}
