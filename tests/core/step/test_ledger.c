/* test_ledger.c - the cost of a GPT's training step on a device, as limits: calls, launches,
 * bytes, FLOP and memory. A change that moves a figure must change it here.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * If a figure becomes smaller, enter its new value in the table. The test also compares FLOP with
 * the formula of the literature, and bytes with the minimum of any implementation.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "ledger_gpt.h"
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

/* --- the model ------------------------------------------------------------------------------ */

/* The step's model and roofline in ms on a GPU. */
static ledger_line step_on(const char *gpu, int level, int epilogues) {
    ledger_config c = ledger_gpt2(MIXP_BF16, level);
    c.epilogues = epilogues;
    ledger_on = ledger_gpu_of(gpu);
    CHECK_INT(ledger_run(&c, NULL).error[0], 0);
    ledger_line sum = ledger.sum;
    ledger_on = &ledger_gpus[0];
    return sum;
}

/* One product by hand: 2 x 65,536 x 3,072 x 768 FLOP at 989 TFLOP/s, and 506 MB at 4.8 TB/s. */
static void the_roofline_is_the_data_sheet_s(void) {
    mixp_gemm_args g;
    double flop = 2.0 * 65536 * 3072 * 768;
    double bytes = 2.0 * (65536.0 * 768 + 768.0 * 3072 + 65536.0 * 3072);
    memset(&g, 0, sizeof g);
    g.m = 65536;
    g.n = 3072;
    g.k = 768;
    g.batch = 1;
    g.a.dtype = g.b.dtype = g.c.dtype = MIXP_BF16;
    g.a.data = g.b.data = g.c.data = &g;
    ledger_clear();
    ledger.on = 1;
    CHECK_INT(ledger_device()->kernels->gemm(NULL, &g), MIXP_OK);
    CHECK_NEAR(ledger.sum.roof, flop / 989e12, 1e-12);
    CHECK_NEAR(ledger.sum.read + ledger.sum.written, bytes, 0);
    CHECK(ledger.sum.seconds > flop / 989e12 / 0.7);
    ledger_clear();
    ledger.on = 1;
    ledger_on = ledger_gpu_of("Tesla T4");
    CHECK_INT(ledger_device()->kernels->gemm(NULL, &g), MIXP_OK);
    CHECK_NEAR(ledger.sum.roof, flop / 65e12, 1e-12);
    ledger_on = &ledger_gpus[0];
    ledger_clear();
}

/* Gaps and tails are in it: 2 us a launch. What no kernel can beat is below it, on every GPU. */
static void the_model_counts_gaps(void) {
    static const char *const names[] = { "NVIDIA H200", "NVIDIA H100 80GB HBM3",
                                         "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090",
                                         "Tesla T4" };
    double before = 0;
    for (int i = 0; i < 5; i++) {
        ledger_line s = step_on(names[i], 2, 0);
        CHECK(s.seconds > s.roof + 2e-6 * (double)s.launches);
        CHECK(s.seconds > before);          /* from the quickest to the slowest */
        before = s.seconds;
    }
    CHECK(!ledger_gpu_of("GeForce GTX 1080"));
    CHECK(strcmp(ledger_gpu_of("NVIDIA H100 PCIe")->name, "H100 PCIe") == 0);
}

/* GPT-2's steps of 64 sequences in bf16, measured on an H100 (2026-11-28_h100_kernels.txt), as graphs; attention ran
 * by mma.sync. */
static void the_model_is_near_an_h100(void) {
    static const struct { int epilogues; double ms; } measured[] = {
        { 0, 130.151 }, { MIXP_EPILOGUES_GELU, 126.526 }, { JOINED, 127.862 } };
    ledger_gpu *h100 = &ledger_gpus[3];
    double      by_wgmma = h100->mma;
    CHECK(!strcmp(h100->name, "H100"));
    h100->mma = 0.62;
    for (int i = 0; i < 3; i++)
        CHECK_NEAR(1e3 * step_on("H100", 2, measured[i].epilogues).seconds, measured[i].ms,
                   0.03 * measured[i].ms);
    h100->mma = by_wgmma;
}

/* Predictions for an H200; whoever changes the model sees them here. */
static void predictions_stay(void) {
    static const struct { int level, epilogues; double ms; } want[] = {
        { 2, 0, 112.42 }, { 1, 0, 116.34 }, { 2, JOINED, 109.64 }, { 1, JOINED, 113.56 } };
    for (int i = 0; i < 4; i++)
        CHECK_NEAR(1e3 * step_on("H200", want[i].level, want[i].epilogues).seconds, want[i].ms,
                   0.06);
}

/* The loss: a row of 50,304 stays in the shared memory of an H200, an A100 and an RTX 4090. A T4 reads
 * it twice. An A100 has room for one row, and waits for the end of the next. */
static void the_loss_reads_rows_once_where_they_fit(void) {
    static const struct { const char *gpu; double reads; } want[] = {
        { "H200", 1 }, { "A100", 1 }, { "RTX 4090", 1 }, { "T4", 2 } };
    double row = 65536.0 * 50304 * 2, share[4];
    for (int i = 0; i < 4; i++) {
        ledger_config c = ledger_gpt2(MIXP_F16, 2);
        ledger_on = ledger_gpu_of(want[i].gpu);
        ledger_run(&c, NULL);
        CHECK_NEAR(ledger_line_of("cross-entropy, both ways")->read, want[i].reads * row, 1e6);
        share[i] = ledger_line_of("cross-entropy, both ways")->roof /
                   ledger_line_of("cross-entropy, both ways")->seconds;
    }
    CHECK(share[1] < share[0]);
    ledger_on = &ledger_gpus[0];
}

int main(void) {
    RUN(a_step_asks_for_no_more_than_it_did);
    RUN(flop_are_those_of_the_literature);
    RUN(the_optimizer_moves_what_adam_must);
    RUN(level_two_casts_no_activation);
    RUN(memory_is_not_scattered);
    RUN(the_roofline_is_the_data_sheet_s);
    RUN(the_model_counts_gaps);
    RUN(the_model_is_near_an_h100);
    RUN(predictions_stay);
    RUN(the_loss_reads_rows_once_where_they_fit);
    return test_report();
}
