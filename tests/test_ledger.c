/* test_ledger.c - what GPTs' training steps ask of a device: so many calls, launches, bytes, FLOP and
 * so much memory, and no more. A change that moves a figure says so here.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A figure that became smaller is good news, and its new value belongs into the table. FLOP are also
 * held to the formula of the literature, bytes to what no implementation can leave out.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "ledger.h"
#include "test.h"

typedef struct figures {
    int        gpt2;
    mixp_dtype dtype;
    int        level, accumulate;
    int64_t    calls, launches;
    double     megabytes;               /* read and written, of 1e6 bytes                         */
    double     peak, taken;             /* megabytes in use at most, and taken from the device    */
    int        epilogues;
} figures;

enum { JOINED = MIXP_EPILOGUES_BIAS | MIXP_EPILOGUES_GELU };

static const figures table[] = {
    { 1, MIXP_F32, 0, 1, 305, 395, 338847, 54693, 58168, 0 },
    { 1, MIXP_F16, 1, 1, 305, 395, 187957, 31235, 33004, 0 },
    { 1, MIXP_F16, 2, 1, 305, 395, 172650, 28616, 30232, 0 },
    { 1, MIXP_BF16, 1, 1, 305, 395, 187957, 31235, 33004, 0 },
    { 1, MIXP_BF16, 2, 1, 305, 395, 172650, 28616, 30232, 0 },
    { 0, MIXP_F32, 0, 1, 161, 209, 17497, 2895, 3404, 0 },
    { 0, MIXP_F16, 1, 1, 161, 209, 10079, 1746, 2043, 0 },
    { 0, MIXP_F16, 2, 1, 161, 209, 9072, 1557, 1811, 0 },
    { 0, MIXP_BF16, 1, 1, 161, 209, 10079, 1746, 2043, 0 },
    { 0, MIXP_BF16, 2, 1, 161, 209, 9072, 1557, 1811, 0 },
    { 1, MIXP_BF16, 2, 4, 1215, 1575, 679403, 28616, 30232, 0 },
    { 1, MIXP_BF16, 2, 1, 257, 299, 161439, 28616, 30232, MIXP_EPILOGUES_BIAS },
    { 1, MIXP_F16, 2, 1, 233, 275, 146943, 28616, 30232, JOINED },
    { 1, MIXP_BF16, 1, 1, 233, 275, 162250, 31235, 33004, JOINED },
    { 1, MIXP_BF16, 2, 1, 233, 275, 146943, 28616, 30232, JOINED },
    { 0, MIXP_BF16, 1, 1, 125, 149, 8451, 1721, 2043, JOINED },
    { 1, MIXP_BF16, 2, 4, 927, 1095, 576575, 28616, 30232, JOINED },
};

static ledger_config config_of(const figures *f) {
    ledger_config c = (f->gpt2 ? ledger_gpt2 : ledger_char)(f->dtype, f->level);
    c.accumulate = f->accumulate;
    c.epilogues = f->epilogues;
    return c;
}

/* A megabyte or two is the room of small blocks: of a scaler, of a verdict. */
static void a_step_asks_for_no_more_than_it_did(void) {
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const figures *f = &table[i];
        ledger_config  c = config_of(f);
        ledger_result  r = ledger_run(&c, NULL);
        int bad = test_bad;
        CHECK_TEXT(r.error, "");
        CHECK_INT(r.error[0], 0);
        CHECK_INT(ledger.sum.calls, f->calls);
        CHECK_INT(ledger.sum.launches, f->launches);
        CHECK_NEAR((ledger.sum.read + ledger.sum.written) / 1e6, f->megabytes, 1);
        CHECK_NEAR((double)r.peak / 1e6, f->peak, 2);
        CHECK_NEAR((double)r.allocated / 1e6, f->taken, 2);
        CHECK_INT(r.allocated, r.given);
        if (test_bad > bad)
            printf("  %s %s level %d, %d micro-batches: { %d, MIXP_%s, %d, %d, %d, %d, %.0f, %.0f, "
                   "%.0f, %d }\n", c.name, mixp_dtype_name(c.dtype), c.level, c.accumulate, f->gpt2,
                   c.dtype == MIXP_F32 ? "F32" : c.dtype == MIXP_F16 ? "F16" : "BF16", c.level,
                   c.accumulate, (int)ledger.sum.calls, (int)ledger.sum.launches,
                   (ledger.sum.read + ledger.sum.written) / 1e6, (double)r.peak / 1e6,
                   (double)r.allocated / 1e6, c.epilogues);
    }
}

/* 6 a weight of the products and a token, 12 layers x width x length a token for attention, of which
 * the causal half is computed. wpe, norms and biases are in no product. */
static void flop_are_those_of_the_literature(void) {
    ledger_config c = ledger_gpt2(MIXP_BF16, 2);
    double tokens = (double)(c.batch * c.length), w = (double)c.width, weights, attention;
    weights = 12.0 * (double)c.layers * w * w + (double)c.vocab * w;
    attention = 0.5 * 14.0 * (double)c.layers * w * (double)c.length;
    CHECK_INT(ledger_run(&c, NULL).error[0], 0);
    CHECK_NEAR(ledger.sum.flop, tokens * (6 * weights + attention), 1e6);
}

/* The optimizer reads 16 bytes a weight and writes 12, and a copy of 2 for each that a product or a
 * norm reads low. */
static void the_optimizer_moves_what_adam_must(void) {
    ledger_config c = ledger_gpt2(MIXP_BF16, 2);
    double n = ledger_run(&c, NULL).parameters;
    ledger_line *update = ledger_line_of("update"), *statistics = ledger_line_of("statistics");
    CHECK_NEAR(update->read, 16 * n, 0);
    CHECK(update->written > 12 * n && update->written <= 14 * n);
    CHECK_NEAR(statistics->read, 4 * n, 0);
    CHECK_NEAR(statistics->written, 0, 0);
}

/* Whatever the dtype, each layer has its calls; level 2 casts nothing. */
static void level_two_casts_no_activation(void) {
    ledger_config c = ledger_gpt2(MIXP_F16, 2);
    CHECK_INT(ledger_run(&c, NULL).error[0], 0);
    CHECK_INT(ledger_line_of("casts")->calls + ledger_line_of("casts backward")->calls, 0);
    CHECK_INT(ledger_line_of("norm")->calls, 1);
    CHECK_INT(ledger_line_of("sum and norm")->calls, 2 * c.layers);
    CHECK_INT(ledger_line_of("attention")->calls, c.layers);
    CHECK_INT(ledger_line_of("products")->calls, 4 * c.layers + 1);
}

/* What is between buffers is a tenth at most, where buffers are large. */
static void memory_is_not_scattered(void) {
    for (int level = 1; level <= 2; level++) {
        ledger_config c = ledger_gpt2(MIXP_BF16, level);
        ledger_result r = ledger_run(&c, NULL);
        CHECK(r.allocated < r.peak + r.peak / 10);
        CHECK(r.allocated >= r.peak);
    }
}

int main(void) {
    RUN(a_step_asks_for_no_more_than_it_did);
    RUN(flop_are_those_of_the_literature);
    RUN(the_optimizer_moves_what_adam_must);
    RUN(level_two_casts_no_activation);
    RUN(memory_is_not_scattered);
    return test_report();
}
