/* long_step.c - a few hundred thousand random sequences of calls: see step_model.h.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "step_model.h"

static void test_sequences(void) { world_sequences(400000); }

int main(void) {
    RUN(test_sequences);
    return test_report();
}
