/* test_cuda_jvp.cpp - the cases of jvp_cases.h on a GPU.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "companion.h"
#include "test.h"

static mixp_context *case_context(void) {
    mixp_context_desc desc = mixp_context_desc();
    const char       *why = "";
    desc.device = mixp_cuda(0, &why);
    if (!desc.device) {
        printf("no GPU: %s\n", why);
        exit(cudasim::simulated ? 2 : 77);
    }
    return mixp_context_new(&desc);
}
#include "jvp_cases.h"

int main() {
    jvp_run_cases();
    return test_report();
}
