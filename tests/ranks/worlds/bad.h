/* bad.h - an Inf, a spike or a guard's verdict on one rank holds for all.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* --- one bad gradient ------------------------------------------------------------------------ */

static void planted_inf(void) {
    plan p = plan_of(3), before = plan_of(2);
    static result kept;
    for (int size = 2; size <= 4; size += 2) {
        result *got = run(&before, size);
        kept = got[0];
        p.plant_step = 2;
        p.plant_rank = size - 1;
        got = run(&p, size);
        for (int r = 0; r < size; r++) {
            CHECK_INT(got[r].code, MIXP_OK);
            CHECK_INT(got[r].step, 2);
            CHECK_INT(got[r].verdict.outcome, MIXP_STEP_SKIPPED);
            CHECK_INT(got[r].verdict.skipped, 1);
            CHECK_TEXT(got[r].bad_tensor, "up");
            CHECK_INT(strlen(got[r].bad_tensor), 2);
            CHECK_INT(got[r].verdict.bad_rank, size - 1);
            CHECK_INT(got[r].verdict.bad_element, 5);
            CHECK_INT(got[r].verdict.bad_is_nan, 0);
            CHECK_NEAR(got[r].scale, kept.scale / 2, 0);
            CHECK(memcmp(got[r].weights, kept.weights, kept.bytes) == 0);
        }
    }
    /* Of several the lowest is named. */
    p.plant_rank = 1;
    p.plant_more = 1;
    CHECK_INT(run(&p, 4)[0].verdict.bad_rank, 1);
    /* And training goes on as that of one rank does. */
    p = plan_of(5);
    p.plant_step = 2;
    p.plant_rank = 1;
    reference(&p, 2, &kept);
    CHECK_INT(kept.verdict.skipped, 1);
    check_like(run(&p, 2), 2, &kept);
}

/* A loss that is no number on one rank is a spike on all; losses are compared by their mean. */
static void spikes(void) {
    plan p = plan_of(3);
    p.spikes = 1;
    p.odd = ODD_LOSS;
    result *got = run(&p, 4);
    for (int r = 0; r < 4; r++) {
        CHECK_INT(got[r].code, MIXP_OK);
        CHECK_INT(got[r].verdict.outcome, MIXP_STEP_SKIPPED);
        CHECK_INT(got[r].verdict.reason, MIXP_SKIP_SPIKE_LOSS);
        CHECK(memcmp(got[r].weights, got[0].weights, got[0].bytes) == 0);
    }
    p.odd = ODD_NOT;
    got = run(&p, 4);
    CHECK_INT(got[3].verdict.outcome, MIXP_STEP_APPLIED);
}

/* Gradients that the program makes itself, without a walk: their mean is taken in the step. */
static void own_gradients(void) {
    result *out = results();
    const int way = 3;
    int status, i, k;
    for (i = 0; i < way; i++) {
        fflush(stdout);
        pid_t root = fork();
        if (root == 0) {
            mixp_ranks_desc ranks = ddp_fork(2);
            mixp_optimizer_desc sgd = mixp_sgd_defaults();
            mixp_context_desc d;
            const int64_t shape[1] = {4};
            float w[4] = {1, 2, 3, 4}, g[4] = {1, 1, 1, 1};
            memset(&d, 0, sizeof d);
            d.ranks = &ranks;
            d.threads = 1;
            sgd.lr = 0.5;
            mixp_context *ctx = mixp_context_new(&d);
            mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
            mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
            CHECK_NEAR(mixp_scaler_loss_scale(scaler), 65536.0, 0);
            mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, shape, w), mixp_view(ctx, "g", MIXP_F32, 1, shape, g));
            for (k = 0; k < 4; k++) g[k] = (float)(ranks.rank ? 3 * k : k) * (i ? 65536.0f : 1.0f);
            if (i == 0) mixp_optimizer_step(opt);           /* nobody looks at the gradients */
            if (i == 2) mixp_scaler_unscale(scaler, opt);   /* and the step does not sum them again */
            if (i) mixp_scaler_step(scaler, opt);
            if (i) mixp_scaler_update(scaler);
            memcpy(out[ranks.rank].weights, w, sizeof w);
            out[ranks.rank].code = mixp_context_error(ctx, NULL);
            mixp_context_free(ctx);
            leave(ddp_wait(0));
        }
        CHECK(waitpid(root, &status, 0) > 0);
        for (k = 0; k < 2; k++) {       /* w - 0.5 (k + 3 k) / 2 */
            static const float want[4] = {1, 1, 1, 1};
            CHECK_INT(out[k].code, MIXP_OK);
            CHECK(memcmp(out[k].weights, want, sizeof want) == 0);
        }
    }
}

/* What overflows on one rank falls back on all: their sites stay alike. */
static void guarded_sites(void) {
    plan p = plan_of(4);
    p.guard = 1;
    result *got = run(&p, 4);
    CHECK_INT(got[0].code, MIXP_OK);
    CHECK_INT(got[0].fallen, 0);
    p.plant_step = 2;
    p.plant_rank = 2;
    got = run(&p, 4);
    CHECK(got[0].fallen != 0);
    for (int r = 0; r < 4; r++) {
        CHECK_TEXT(got[r].code ? got[r].text : "fine", "fine");
        CHECK_INT(got[r].fallen, got[0].fallen);
        CHECK_INT(got[r].verdict.skipped, 1);
        CHECK(memcmp(got[r].weights, got[0].weights, got[0].bytes) == 0);
    }
}

/* A skip that began in the forward pass of one rank lowers the loss scale of none, sampled or not;
 * one that began in a gradient lowers it on all. The scale of 1024 doubles after three clean steps. */
static void guarded_skips(void) {
    plan p = plan_of(4);
    p.plant_step = 2;
    p.plant_rank = 1;
    for (int way = 0; way < 4; way++) {
        p.guard = way % 2 ? 16 : 1;
        p.guard_backward = way / 2;
        result *got = run(&p, 4);
        for (int r = 0; r < 4; r++) {
            CHECK_TEXT(got[r].code ? got[r].text : "fine", "fine");
            CHECK_INT(got[r].verdict.skipped, 1);
            CHECK_NEAR(got[r].scale, p.guard_backward ? 512 : 2048, 0);
            CHECK(memcmp(got[r].weights, got[0].weights, got[0].bytes) == 0);
        }
    }
}

/* What nothing cures ends all ranks. Of two such skips in a row one is forgiven. */
static void guarded_to_the_end(void) {
    plan p = plan_of(12);
    p.guard = 1;
    p.guard_pins = 1;
    p.plant_step = 1;
    p.plant_rank = 3;
    result *got = run(&p, 4);
    for (int r = 0; r < 4; r++) {
        CHECK_INT(got[r].code, MIXP_ERR_DIVERGED);
        CHECK_TEXT(got[r].text, "2 steps in a row were skipped because of their forward pass");
        CHECK_INT(got[r].verdict.skipped, 2);
        CHECK_NEAR(got[r].scale, 512, 0);
    }
}
