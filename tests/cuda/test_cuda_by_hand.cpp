/* test_cuda_by_hand.cpp - examples/by_hand_cuda.cu, a training loop with its own kernels, learns.
 * SPDX-License-Identifier: MIT OR Unlicense */
#define MIXPREC_IMPLEMENTATION_DONE
#define main by_hand_cuda
#include "../../examples/by_hand_cuda.cu"
#undef main
#include "test.h"

/* It ends with 0 when the loss is small and steps were counted as they should be. */
static void test_it_learns(void) {
    int code = by_hand_cuda();
    if (code == 77) SKIP("no GPU");
    CHECK_INT(code, 0);
}

int main(void) {
    RUN(test_it_learns);
    return test_report();
}
