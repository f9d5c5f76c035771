/* test_bags.c - mixp_embedding_bag: values, gradients and tangents against loops in double; every instruction set; any
 * batch; NaN; refusals.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "bag_cases.h"

static void against_double(void) {
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
        if (mixp_cpu_with((mixp_isa)isa))
            CHECK_INT(bag_each(mixp_cpu_with((mixp_isa)isa), bag_against_double), 48);
}

/* The result of a bag is bit-identical with and without other bags in the batch. The padding row is not read, so a NaN
 * or an Inf in it changes nothing. */
static void any_batch(void) {
    static bag_data d;
    bag_case k = { MIXP_BAG_MEAN, MIXP_F16, 1, 0, 5 };
    float all[BAG_OUT], one[BAG_COLS];
    mixp_context *ctx = mixp_context_new(NULL);
    bag_fill(&k, &d);
    for (int i = 0; i < BAG_COLS; i++) d.table[5 * BAG_COLS + i] = i % 2 ? (float)NAN : (float)INFINITY;
    for (int mode = 0; mode < 3; mode++) {
        mixp_step_begin(ctx);
        mixp_tensor *table = bag_input(ctx, k.dtype, 2, BAG_VOCAB, BAG_COLS, d.table);
        mixp_tensor *y = mixp_embedding_bag(ctx, table, bag_input(ctx, MIXP_I32, 1, BAG_IDS, 0, d.ids),
                                            bag_input(ctx, MIXP_I32, 1, BAG_BAGS, 0, d.offsets), NULL,
                                            (mixp_bag_mode)mode, 5 - BAG_VOCAB);
        CHECK_INT(mixp_read(y, all, MIXP_F32, BAG_OUT), MIXP_OK);
        for (int b = 0; b < BAG_BAGS; b++) {
            const int n = d.offsets[b + 1] - d.offsets[b];
            y = mixp_embedding_bag(ctx, table, bag_input(ctx, MIXP_I32, 2, 1, n, d.ids + d.offsets[b]), NULL, NULL,
                                   (mixp_bag_mode)mode, 5);
            CHECK_INT(mixp_read(y, one, MIXP_F32, BAG_COLS), MIXP_OK);
            CHECK(!memcmp(one, all + b * BAG_COLS, sizeof one));
            for (int c = 0; c < BAG_COLS; c++) CHECK(isfinite(one[c]));
        }
        /* As an ordinary row, it is read. */
        y = mixp_embedding_bag(ctx, table, bag_input(ctx, MIXP_I32, 1, BAG_IDS, 0, d.ids),
                               bag_input(ctx, MIXP_I32, 1, BAG_BAGS, 0, d.offsets), NULL, (mixp_bag_mode)mode,
                               MIXP_NO_PADDING);
        CHECK_INT(mixp_read(y, all, MIXP_F32, BAG_OUT), MIXP_OK);
        CHECK(isnan(all[6 * BAG_COLS + 1]) && isinf(all[6 * BAG_COLS]));
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

typedef struct refusal { mixp_result code; const char *text; } refusal;
static void refusals(void) {
    static bag_data d;
    static const bag_case k = { MIXP_BAG_SUM, MIXP_F32, 1, 1, -1 };
    static const refusal want[] = {
        { MIXP_ERR_ARGUMENT, "id 37 at row 3 is outside [0, 37)" }, { MIXP_ERR_ARGUMENT, "id -1 at row 3" },
        { MIXP_ERR_ARGUMENT, "the offset of bag 2 is 5" }, { MIXP_ERR_ARGUMENT, "the offset of bag 0 is 1" },
        { MIXP_ERR_ARGUMENT, "the offset of bag 8 is 91" }, { MIXP_ERR_SHAPE, "padding must be a row of the table" },
        { MIXP_ERR_ARGUMENT, "the mode must be MIXP_BAG_SUM" }, { MIXP_ERR_ARGUMENT, "the mode must be MIXP_BAG_SUM" },
        { MIXP_ERR_SHAPE, "weights need the shape of ids" }, { MIXP_ERR_SHAPE, "ids[n] with offsets[bags]" },
        { MIXP_ERR_DTYPE, "offsets are f32; they must be i32" }, { MIXP_ERR_DTYPE, "indices must be i32" },
        { MIXP_ERR_SHAPE, "table[vocab, c]" }, { MIXP_ERR_DTYPE, "weights are i32" }
    };
    for (int i = 0; i < (int)(sizeof want / sizeof want[0]); i++) {
        mixp_context *ctx = mixp_context_new(NULL);
        const char *why = "";
        bag_fill(&k, &d);
        if (i == 0) d.ids[3] = BAG_VOCAB;
        if (i == 1) d.ids[3] = -1;
        if (i == 2) d.offsets[2] = 5, d.offsets[3] = 4;
        if (i == 3) d.offsets[0] = 1;
        if (i == 4) d.offsets[8] = 91;
        mixp_step_begin(ctx);
        mixp_tensor *table = bag_input(ctx, MIXP_F32, i == 12 ? 1 : 2, BAG_VOCAB, BAG_COLS, d.table);
        mixp_tensor *ids = bag_input(ctx, i == 11 ? MIXP_F32 : MIXP_I32, 1, BAG_IDS, 0, d.ids);
        mixp_tensor *offsets = bag_input(ctx, i == 10 ? MIXP_F32 : MIXP_I32, 1, BAG_BAGS, 0, d.offsets);
        mixp_tensor *weights = bag_input(ctx, i == 13 ? MIXP_I32 : MIXP_F32, 1, i == 8 ? 3 : BAG_IDS, 0, d.weights);
        CHECK(!mixp_embedding_bag(ctx, table, ids, i == 9 ? NULL : offsets, i == 6 ? NULL : weights,
                                  i == 6 ? (mixp_bag_mode)3 : i == 7 ? MIXP_BAG_MAX : MIXP_BAG_SUM,
                                  i == 5 ? BAG_VOCAB : MIXP_NO_PADDING));
        CHECK_INT(mixp_context_error(ctx, &why), want[i].code);
        CHECK_TEXT(why, want[i].text);
        CHECK_TEXT(why, "embedding_bag");
        mixp_context_free(ctx);
    }
}

int main(void) {
    RUN(against_double);
    RUN(any_batch);
    RUN(refusals);
    return test_report();
}
