/* test_cuda_differential.cpp - differential_cases.h on a GPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "companion.h"
#include "test.h"
#include "differential_cases.h"

static void test_small_operators_against_torch() {
    mixp_context_desc desc = mixp_context_desc();
    const char       *why = "";
    desc.device = mixp_cuda(0, &why);
    if (!desc.device) {
        printf("no GPU: %s\n", why);
        exit(cudasim::simulated ? 2 : 77);
    }
    differential_on(mixp_context_new(&desc));
}

int main() {
    (void)gen_fill;             /* of other tests */
    RUN(test_small_operators_against_torch);
    return test_report();
}
