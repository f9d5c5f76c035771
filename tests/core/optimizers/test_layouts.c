/* test_layouts.c - an optimizer on arrays of other programs: f64, and rows with a pitch.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "layout_cases.h"

static void as_dense_f32(void) {
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
        if (mixp_cpu_with((mixp_isa)isa) && (!test_later() || isa == MIXP_ISA_SCALAR || !mixp_cpu_with((mixp_isa)(isa + 1))))
            layout_law(mixp_cpu_with((mixp_isa)isa));
}

/* A weight of f64 that f32 does not hold is rounded by the first step; a weight without a gradient keeps its digits. */
static void digits_of_f64(void) {
    double        w[3] = { 1.0 / 3.0, 1e300, -2.0 }, g[3] = { 0.0, 0.0, 1.0 };
    const int64_t three = 3;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_sgd_defaults();
    d.lr = 0.25;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    CHECK_INT(mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F64, 1, &three, w),
                                 mixp_view(ctx, "g", MIXP_F64, 1, &three, g)), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK(w[0] == (double)(1.0f / 3.0f) && w[2] == -2.25);
    CHECK(!isfinite(w[1])); /* beyond f32 */
    w[2] = 8.0; /* a write of the program: no call is needed */
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK(w[2] == 7.75);
    mixp_context_free(ctx);
}

/* Every refusal is typed and names the array; nothing is added. */
static void refusals(void) {
    static float  w[40], g[40];
    static double w64[40];
    const int64_t shape[2] = { 4, 10 }, flat = 40;
    const char   *why = "";
    for (int i = 0; i < 9; i++) {
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_optimizer_desc d = i == 5 ? mixp_muon_defaults() : mixp_adamw_defaults();
        mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
        mixp_tensor *p = mixp_view(ctx, "weight", MIXP_F32, 2, shape, w);
        mixp_tensor *dp = mixp_view(ctx, "gradient", MIXP_F32, 2, shape, g);
        static const struct { mixp_result code; const char *text; } want[] = {
            { MIXP_ERR_SHAPE, "rows of 10 elements; width is 0" }, { MIXP_ERR_SHAPE, "width is 11" },
            { MIXP_ERR_SHAPE, "width is -1" }, { MIXP_ERR_ARGUMENT, "is a view without a gradient" },
            { MIXP_ERR_ARGUMENT, "a gradient of the same shape" }, { MIXP_ERR_ARGUMENT, "Muon needs dense rows" },
            { MIXP_ERR_DTYPE, "pass your own gradient" }, { MIXP_ERR_DTYPE, "must be f32, f64, f16 or bf16" },
            { MIXP_ERR_DTYPE, "a parameter must be f32, f16 or bf16, not f64" }
        };
        mixp_result r = MIXP_OK;
        if (i < 3) r = mixp_optimizer_add_rows(opt, p, dp, i == 0 ? 0 : i == 1 ? 11 : -1);
        if (i == 3) r = mixp_optimizer_add_rows(opt, p, NULL, 9);
        if (i == 4) r = mixp_optimizer_add_rows(opt, p, mixp_view(ctx, "flat", MIXP_F32, 1, &flat, g), 9);
        if (i == 5) r = mixp_optimizer_add_rows(opt, p, dp, 9);
        if (i == 6) r = mixp_optimizer_add(opt, mixp_view(ctx, "weight", MIXP_F64, 2, shape, w64), NULL);
        if (i == 7) r = mixp_optimizer_add(opt, mixp_view(ctx, "weight", MIXP_I64, 2, shape, w64), dp);
        if (i == 8) r = mixp_param(ctx, "weight", MIXP_F64, 2, shape) ? MIXP_OK : mixp_context_error(ctx, NULL);
        CHECK_INT(r, want[i].code);
        CHECK_INT(mixp_context_error(ctx, &why), want[i].code);
        CHECK_TEXT(why, want[i].text);
        CHECK_TEXT(why, "weight");
        mixp_context_clear_error(ctx);
        if (i != 5) CHECK_INT(mixp_optimizer_add(opt, p, dp), MIXP_OK); /* it was not added */
        mixp_context_free(ctx);
    }
}

int main(void) {
    RUN(as_dense_f32);
    RUN(digits_of_f64);
    RUN(refusals);
    return test_report();
}
