/* test_watch_events.c - a guard's messages to people, and site patterns that are set repeatedly:
 * messages must contain given words, and sites must store the expected dtype.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"

enum { N = 4, MOST_PINS = 64 };

typedef struct net {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *w;
} net;

static net net_open(void) {
    static const int64_t shape[2] = { N, N };
    mixp_scaler_desc scale;
    net m;
    memset(&scale, 0, sizeof scale);
    scale.init_scale = 1024.0f;
    m.ctx = mixp_context_new(NULL);
    m.opt = new_sgd(m.ctx);
    m.scaler = mixp_scaler_new(m.ctx, &scale);
    m.w = mixp_param(m.ctx, "w", MIXP_F32, 2, shape);
    mixp_fill(m.w, 1e-3);
    CHECK_INT(mixp_optimizer_add(m.opt, m.w, NULL), MIXP_OK);
    return m;
}

static void net_close(net *m) {
    const char *why = "";
    CHECK_INT(mixp_context_error(m->ctx, &why), MIXP_OK);
    if (*why) printf("  %s\n", why);
    mixp_context_free(m->ctx);
}

/* One step; the loss is multiplied by `factor`, which may be too large for its gradient. */
static void net_step(net *m, float value, float factor) {
    static const int64_t shape[2] = { N, N };
    float x[N * N];
    mixp_tensor *loss = NULL;
    for (int i = 0; i < N * N; i++) x[i] = value;
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) {
        loss = mixp_linear(m->ctx, mixp_input(m->ctx, MIXP_F32, 2, shape, x), m->w, NULL);
        loss = mixp_scale(m->ctx, mixp_mean(m->ctx, loss, MIXP_ALL, 0), factor);
    }
    mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss));
    CHECK_INT(mixp_scaler_step(m->scaler, m->opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(m->scaler), MIXP_OK);
}

/* --- sentences ------------------------------------------------------------------------------ */

static mixp_event event_of(mixp_event_kind kind, const char *site, mixp_origin origin) {
    mixp_event e;
    memset(&e, 0, sizeof e);
    e.step = 1234567890123;
    e.kind = kind;
    e.what = "";
    e.site = site;
    e.largest = 40960.0f;
    e.flushed = 0.125;
    e.nonfinite = 3;
    e.origin = origin;
    return e;
}

/* Where, what, and what to do. */
static void test_sentences(void) {
    static const struct { mixp_event_kind kind; const char *number, *advice; } cases[] = {
        { MIXP_EVENT_OVERFLOW, "overflowed: stores f32 now (3 values not finite)", "No action needed" },
        { MIXP_EVENT_HIGH, "(largest 40960)", "No action needed" },
        { MIXP_EVENT_FLUSHED, "(12.5% of its values)", "No action needed" },
        { MIXP_EVENT_BACK, "(largest 40960)", "No action needed" },
        { MIXP_EVENT_PINNED, "pinned by a pattern", "MIXP_DTYPE_COUNT" },
        { MIXP_EVENT_FULL, "max_sites is reached", "Set a larger max_sites" } };
    char text[400];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mixp_event e = event_of(cases[i].kind, "h.3: linear", MIXP_ORIGIN_UNKNOWN);
        CHECK(mixp_event_text(&e, text, sizeof text) == text);
        CHECK_TEXT(text, "step 1234567890123: h.3: linear ");
        CHECK_TEXT(text, cases[i].number);
        CHECK_TEXT(text, cases[i].advice);
    }
}

/* A skip says in one sentence why, and of which site, and then what to do. */
static void test_sentences_of_skips(void) {
    static const char *const says[MIXP_ORIGIN_COUNT][2] = {
        { "a gradient or a buffer was not finite. The step was not sampled. The next step is sampled", "a gradient or a buffer was not" },
        { "the result of 'h.3: linear' overflowed. No site can fall back. ", "the result of a site overflowed." },
        { "the gradient of 'h.3: linear' overflowed. No action needed.", "the gradient of a site overflowed." },
        { "a gradient overflowed when it was unscaled. The loss scale is below 1. Look at", "a gradient overf" },
        { "the loss of 'h.3: linear' is not finite, although all activations are finite. Look at logs", "the loss " },
        { "a weight or a buffer of 'h.3: linear' is not finite. Resume from a checkpoint", "a weight or a buffer of a site is not finite." },
        { "the batch that 'h.3: linear' reads contains Inf or NaN. Look at the data.", "the batch that a site reads " },
        { "the loss is not finite, or a buffer became so. Turn on a guard", "the loss is not finite, or a buffer became so." },
        { "the result of 'h.3: linear' is not finite because the program wrote Inf, such as", "the result of a site is" },
        { "no value was Inf or NaN. No action needed", "no value was Inf or NaN" } };
    char text[400], expected[400];
    for (int i = 0; i < MIXP_ORIGIN_COUNT; i++) {
        mixp_event e = event_of(MIXP_EVENT_SKIP, i ? "h.3: linear" : "", (mixp_origin)i);
        mixp_event_text(&e, text, sizeof text);
        snprintf(expected, sizeof expected, "step 1234567890123: skipped because %s", says[i][0]);
        CHECK(strncmp(text, expected, strlen(expected)) == 0);
        e.site = "";
        mixp_event_text(&e, text, sizeof text);
        snprintf(expected, sizeof expected, "step 1234567890123: skipped because %s", says[i][1]);
        CHECK(strncmp(text, expected, strlen(expected)) == 0);
        CHECK(strchr(text, ':') == strrchr(text, ':'));
    }
}

/* A gradient is told from a value, what fell with a site is counted, and a skip says whether a site
 * fell back for it. */
static void test_sentences_of_others(void) {
    mixp_event e = event_of(MIXP_EVENT_FLUSHED, "h.3: linear", MIXP_ORIGIN_UNKNOWN);
    char text[400];
    e.of_gradient = 1;
    e.also = 47;
    mixp_event_text(&e, text, sizeof text);
    CHECK_TEXT(text, "the gradient of h.3: linear flushed too much to zero: stores f32 now (12.5%");
    CHECK_TEXT(text, ", and 47 more sites with this operator and parameter.");
    e = event_of(MIXP_EVENT_OVERFLOW, "h.3: linear", MIXP_ORIGIN_UNKNOWN);
    e.nonfinite = 0;            /* seen in f32 */
    CHECK_TEXT(mixp_event_text(&e, text, sizeof text), "(largest 40960)");
    e = event_of(MIXP_EVENT_SKIP, "h.3: linear", MIXP_ORIGIN_FORWARD);
    e.also = 1;
    CHECK_TEXT(mixp_event_text(&e, text, sizeof text), "overflowed. A site stores f32 from now on. No action needed.");
}

/* All of them fit, and what does not is cut. */
static void test_sentences_fit(void) {
    char text[2000], site[96];
    mixp_event e;
    memset(site, 'x', sizeof site - 1);
    site[sizeof site - 1] = 0;
    for (int kind = 0; kind < MIXP_EVENT_COUNT; kind++)
        for (int origin = 0; origin < MIXP_ORIGIN_COUNT; origin++) {
            e = event_of((mixp_event_kind)kind, site, (mixp_origin)origin);
            CHECK(strlen(mixp_event_text(&e, text, sizeof text)) <= 400);
            CHECK(text[strlen(text) - 1] == '.');
        }
    e = event_of(MIXP_EVENT_HIGH, "w", MIXP_ORIGIN_UNKNOWN);
    CHECK(strcmp(mixp_event_text(&e, text, 8), "step 12") == 0);
    CHECK(strcmp(mixp_event_text(NULL, text, 8), "") == 0);
    CHECK(mixp_event_text(&e, NULL, 8) == NULL && mixp_event_text(&e, text, 0) == NULL);
    e.kind = MIXP_EVENT_COUNT;
    CHECK(strcmp(mixp_event_text(&e, text, sizeof text), "") == 0);
}

/* A gradient overflows in a step that is not sampled: the event has no site, and says why; the next
 * step is sampled, and the event of its skip names one. */
static void test_a_skip_nobody_saw(void) {
    net m = net_open();
    mixp_event e;
    char text[400];
    CHECK_INT(mixp_guard_start(m.ctx, NULL), MIXP_OK);
    for (int i = 0; i < 5; i++) net_step(&m, 1.0f, i < 3 ? 1.0f : 1e5f);
    CHECK_INT(mixp_guard_event(m.ctx, 0, &e), 1);
    CHECK_INT(e.kind, MIXP_EVENT_SKIP);
    CHECK_INT(e.step, 4);
    CHECK_TEXT(e.what, "not sampled");
    CHECK(strcmp(e.site, "") == 0);
    CHECK_TEXT(mixp_event_text(&e, text, sizeof text), "step 4: skipped because a gradient or a buffer was not finite.");
    CHECK_INT(mixp_guard_event(m.ctx, 1, &e), 1);
    CHECK_INT(e.step, 5);
    CHECK_INT(e.origin, MIXP_ORIGIN_BACKWARD);
    CHECK_TEXT(e.what, "caused a skipped step");
    CHECK_TEXT(mixp_event_text(&e, text, sizeof text), "step 5: skipped because the gradient of '");
    net_close(&m);
}

/* --- patterns ------------------------------------------------------------------------------- */

/* Does the product store f32? */
static int product_is_f32(net *m) {
    mixp_site_info s;
    net_step(m, 1.0f, 1.0f);
    for (int i = 0; mixp_site(m->ctx, i, &s); i++)
        if (strcmp(s.name, "w: linear") == 0) return s.dtype == MIXP_F32;
    CHECK(0 && "no such site");
    return 0;
}

/* 64 different ones are kept; one of them given again takes its own place, the newest. */
static void test_patterns_given_again(void) {
    net m = net_open();
    const char *why = "";
    char pattern[32];
    CHECK_INT(mixp_guard_pin(m.ctx, "w: linear", MIXP_F32), MIXP_OK);
    for (int i = 1; i < MOST_PINS; i++) {
        snprintf(pattern, sizeof pattern, "*%d", i);
        CHECK_INT(mixp_guard_pin(m.ctx, pattern, MIXP_F32), MIXP_OK);
    }
    CHECK_INT(mixp_guard_pin(m.ctx, "one more", MIXP_F32), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "64 patterns");
    CHECK_TEXT(why, "'*' with MIXP_DTYPE_COUNT to remove all");
    mixp_context_clear_error(m.ctx);
    for (int i = 0; i < 200; i++)
        CHECK_INT(mixp_guard_pin(m.ctx, "w: linear", i % 2 ? MIXP_F32 : MIXP_F16), MIXP_OK);
    CHECK_INT(mixp_guard_pin(m.ctx, "*", MIXP_DTYPE_COUNT), MIXP_OK);
    for (int i = 0; i < MOST_PINS; i++) {
        snprintf(pattern, sizeof pattern, "w: *%d", i);
        CHECK_INT(mixp_guard_pin(m.ctx, pattern, MIXP_F32), MIXP_OK);
    }
    CHECK_INT(mixp_guard_pin(m.ctx, "*", MIXP_F32), MIXP_OK);
    CHECK_INT(mixp_guard_start(m.ctx, NULL), MIXP_OK);
    CHECK(product_is_f32(&m));
    net_close(&m);
}

/* The newest that fits counts, also where it stood before an older one. */
static void test_the_newest_counts(void) {
    net m = net_open();
    CHECK_INT(mixp_guard_start(m.ctx, NULL), MIXP_OK);
    CHECK_INT(mixp_guard_pin(m.ctx, "w: linear", MIXP_F32), MIXP_OK);
    CHECK(product_is_f32(&m));
    CHECK_INT(mixp_guard_pin(m.ctx, "w: *", MIXP_DTYPE_COUNT), MIXP_OK);
    CHECK(!product_is_f32(&m));
    CHECK_INT(mixp_guard_pin(m.ctx, "w: linear", MIXP_F32), MIXP_OK);
    CHECK(product_is_f32(&m));
    CHECK_INT(mixp_guard_pin(m.ctx, "w: *", MIXP_DTYPE_COUNT), MIXP_OK);
    CHECK(!product_is_f32(&m));
    CHECK_INT(mixp_guard_pin(m.ctx, "w: linear", MIXP_DTYPE_COUNT), MIXP_OK);
    CHECK_INT(mixp_guard_pin(m.ctx, "w: *", MIXP_F32), MIXP_OK);
    CHECK(product_is_f32(&m));
    net_close(&m);
}

int main(void) {
    RUN(test_sentences);
    RUN(test_sentences_of_skips);
    RUN(test_sentences_of_others);
    RUN(test_sentences_fit);
    RUN(test_a_skip_nobody_saw);
    RUN(test_patterns_given_again);
    RUN(test_the_newest_counts);
    return test_report();
}
