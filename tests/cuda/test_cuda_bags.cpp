/* test_cuda_bags.cpp - mixp_embedding_bag on a GPU: against loops in double, the CPU's bits, late reports.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "companion.h"
#include "bag_cases.h"
#include "gpu_context.h"
#include <vector>

static std::vector<bag_result> results;
static size_t compared;
static void keep(const bag_case *, const bag_data *, const bag_result *r) { results.push_back(*r); }
static void equal(const bag_case *k, const bag_data *d, const bag_result *r) {
    const bag_result &want = results[compared++];
    CHECK(!memcmp(r->y, want.y, sizeof want.y));
    CHECK(!memcmp(r->dtable, want.dtable, sizeof want.dtable));
    CHECK(!memcmp(r->tangent, want.tangent, sizeof want.tangent));
    bag_against_double(k, d, r);
}

static void as_on_the_cpu() {
    CHECK_INT(bag_each(mixp_cpu(), keep), 48);
    CHECK_INT(bag_each(gpu(), equal), 48);
}

/* An offset that falls, and an id out of range: NaN, then the error of the next call that waits. */
static void late_reports() {
    for (int i = 0; i < 2; i++) {
        static bag_data d;
        const bag_case k = { MIXP_BAG_SUM, MIXP_F32, 1, 0, -1 };
        std::vector<float> y(BAG_OUT);
        const char *why = "";
        mixp_context_desc c;
        memset(&c, 0, sizeof c);
        c.device = gpu();
        mixp_context *ctx = mixp_context_new(&c);
        bag_fill(&k, &d);
        if (i) d.offsets[3] = 0;
        else d.ids[11] = BAG_VOCAB;
        mixp_step_begin(ctx);
        mixp_tensor *t = mixp_embedding_bag(ctx, bag_input(ctx, MIXP_F32, 2, BAG_VOCAB, BAG_COLS, d.table),
                                            bag_input(ctx, MIXP_I32, 1, BAG_IDS, 0, d.ids),
                                            bag_input(ctx, MIXP_I32, 1, BAG_BAGS, 0, d.offsets), NULL, MIXP_BAG_SUM,
                                            MIXP_NO_PADDING);
        mixp_read(t, y.data(), MIXP_F32, BAG_OUT);
        CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_ARGUMENT);
        CHECK_TEXT(why, i ? "offset 1 at row 2" : "id 37 at row 11");
        mixp_context_free(ctx);
    }
}

int main() {
    RUN(as_on_the_cpu);
    RUN(late_reports);
    return test_report();
}
