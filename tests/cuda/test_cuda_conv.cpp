// test_cuda_conv.cpp - examples/conv.h on a GPU: an add-on that knows the public API alone runs on every device.
// SPDX-License-Identifier: MIT OR Unlicense
#include "companion.h"
#include "test.h"
#include "gpu_context.h"

static mixp_context *conv_context(void) { return gpu_context(); }

/* Quick: every third case (make test: every ninth), because tests/programs/test_conv.c runs all of them on the CPU. */
static int conv_each(void) { return test_later() ? 9 : getenv("MIXPREC_TEST_QUICK") ? 3 : 1; }
#define CONV_EACH conv_each()
#include "conv_cases.h"
#include "window_cases.h"

int main() {
    conv_run_cases();
    RUN(windows_beside_pytorch);
    RUN(windows_keep_dtypes);
    RUN(windows_of_an_empty_batch);
    return test_report();
}
