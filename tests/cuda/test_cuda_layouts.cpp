/* test_cuda_layouts.cpp - an optimizer on arrays of other programs, on a GPU: f64, and rows with a pitch.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "companion.h"
#include "layout_cases.h"
#include "gpu_context.h"

static void as_dense_f32() {
    if (getenv("MIXPREC_TEST_QUICK")) layout_steps = LAYOUT_BAD + 2;
    layout_law(gpu());
}

int main() {
    RUN(as_dense_f32);
    return test_report();
}
