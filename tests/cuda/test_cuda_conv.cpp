// test_cuda_conv.cpp - examples/conv.h on a GPU: an add-on that knows the public API alone runs on every device.
// SPDX-License-Identifier: MIT OR Unlicense
#include "companion.h"
#include "test.h"

static mixp_context *conv_context(void) {
    mixp_context_desc desc = mixp_context_desc();
    const char       *why = "";
    desc.device = mixp_cuda(0, &why);
    if (!desc.device) {
        printf("no GPU: %s\n", why);
        exit(cudasim::simulated ? 2 : 77);
    }
    return mixp_context_new(&desc);
}
#include "conv_cases.h"

int main() {
    conv_run_cases();
    return test_report();
}
