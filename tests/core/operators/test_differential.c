/* test_differential.c - differential_cases.h on every instruction set of the CPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"
#include "differential_cases.h"

static void test_small_operators_against_torch(void) {
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        mixp_context_desc d;
        memset(&d, 0, sizeof d);
        d.device = mixp_cpu_with((mixp_isa)isa);
        if (d.device) differential_on(mixp_context_new(&d));
    }
}

int main(void) {
    (void)gen_fill;             /* of other tests */
    RUN(test_small_operators_against_torch);
    return test_report();
}
