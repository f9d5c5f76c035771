/* test_conv.c - the convolutions of examples/conv.h on the CPU, also with few samples at a time.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#define CONV_COLUMNS 300        /* so that the larger cases are done in several parts */

static mixp_context *conv_context(void) { return mixp_context_new(NULL); }
#include "conv_cases.h"

/* conv1d is the plain sum along a line. */
static void one_dimension(void) {
    static double x[CONV_MOST], w[CONV_MOST];
    mixp_context *ctx = conv_context();
    int64_t sx[3] = { 2, 2, 7 }, sw[3] = { 3, 2, 3 }, n, o, p;
    mixp_tensor *tx = conv_numbers(ctx, "x", 3, sx, x), *tw = conv_numbers(ctx, "w", 3, sw, w), *y;
    float got[2 * 3 * 4];
    conv_desc d;
    memset(&d, 0, sizeof d);
    d.stride[1] = 2;
    d.padding[1] = 1;
    mixp_step_begin(ctx);
    y = conv1d(ctx, tx, tw, NULL, &d);
    CHECK(y && y->rank == 3 && y->shape[2] == 4);
    CHECK_INT(mixp_read(y, got, MIXP_F32, 24), MIXP_OK);
    for (n = 0; n < 2; n++)
        for (o = 0; o < 3; o++)
            for (p = 0; p < 4; p++) {
                double sum = 0;
                int64_t c, j;
                for (c = 0; c < 2; c++)
                    for (j = 0; j < 3; j++)
                        if (2 * p - 1 + j >= 0 && 2 * p - 1 + j < 7)
                            sum += x[(n * 2 + c) * 7 + 2 * p - 1 + j] * w[(o * 2 + c) * 3 + j];
                CHECK_NEAR((double)got[(n * 3 + o) * 4 + p], sum, 1e-5);
            }
    mixp_context_free(ctx);
}

int main(void) {
    conv_run_cases();
    RUN(one_dimension);
    return test_report();
}
