/* test_two_networks.c - a GAN's two networks train in turn: the four forms that the manual names (STEP) end
 * with the same bits, also with skipped steps that are repeated; a missing mixp_zero_grad and a loss from
 * before a step are refused.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"

enum { ROWS = 16, NOISE = 4, WIDTH = 12, ROUNDS = 200, WEIGHTS = WIDTH * NOISE + 4 * WIDTH + WIDTH };

typedef struct gan {
    mixp_context   *ctx;
    mixp_optimizer *opt[2];         /* of the discriminator and of the generator               */
    mixp_scaler    *scaler[2];      /* may be the same                                         */
    mixp_tensor    *d1, *d2, *g1, *g2;
    float           real[2 * ROWS], noise[NOISE * ROWS];
    int             draws;          /* 1: the context draws the noise                          */
    int             bad;            /* the generator's next points are too large for f16       */
} gan;

static mixp_tensor *weight(gan *m, const char *name, int rows, int cols) {
    const int64_t shape[2] = { rows, cols };
    mixp_tensor *w = mixp_param(m->ctx, name, MIXP_F32, 2, shape);
    mixp_init_normal(w, 0, 0.4f);
    return w;
}

static void gan_open(gan *m, int scalers) {
    static const char *const part[2] = { "d.*", "g.*" };
    mixp_optimizer_desc adam = mixp_adam_defaults();
    mixp_scaler_desc d;
    memset(m, 0, sizeof *m);
    memset(&d, 0, sizeof d);
    d.init_scale = 1024;
    adam.lr = 0.01;
    m->ctx = mixp_context_new(NULL);
    m->d1 = weight(m, "d.1", WIDTH, 2);
    m->d2 = weight(m, "d.2", 1, WIDTH);
    m->g1 = weight(m, "g.1", WIDTH, NOISE);
    m->g2 = weight(m, "g.2", 2, WIDTH);
    for (int i = 0; i < 2; i++) {
        m->opt[i] = mixp_optimizer_new(m->ctx, &adam);
        CHECK_INT(mixp_optimizer_add_all(m->opt[i], part[i]), MIXP_OK);
        m->scaler[i] = i < scalers ? mixp_scaler_new(m->ctx, &d) : m->scaler[0];
    }
}

static void next_batch(gan *m, int round) {
    for (int i = 0; i < 2 * ROWS; i++) m->real[i] = (float)((i * 37 + round * 11) % 23) / 23.0f + 1.0f;
    for (int i = 0; i < NOISE * ROWS; i++) m->noise[i] = (float)((i * 29 + round * 7) % 31 - 15) / 15.0f;
}

static mixp_tensor *fake_of(gan *m) {
    const int64_t shape[2] = { ROWS, NOISE };
    mixp_tensor *z = m->draws ? mixp_uniform(m->ctx, MIXP_F32, 2, shape, -1.0, 1.0)
                              : mixp_input(m->ctx, MIXP_F32, 2, shape, m->noise);
    z = mixp_linear(m->ctx, mixp_tanh(m->ctx, mixp_linear(m->ctx, z, m->g1, NULL)), m->g2, NULL);
    return m->bad ? mixp_scale(m->ctx, z, 1e6f) : z;
}

static mixp_tensor *judged(gan *m, mixp_tensor *x, double label) {
    const int64_t shape[2] = { ROWS, 1 };
    mixp_tensor *score = mixp_linear(m->ctx, mixp_tanh(m->ctx, mixp_linear(m->ctx, x, m->d1, NULL)), m->d2, NULL);
    return mixp_bce_with_logits(m->ctx, score, mixp_full(m->ctx, MIXP_F32, 2, shape, label));
}

/* The discriminator's loss. fake: points without a gradient to the generator. */
static mixp_tensor *judges(gan *m, mixp_tensor *fake) {
    const int64_t shape[2] = { ROWS, 2 };
    mixp_tensor *real = mixp_input(m->ctx, MIXP_F32, 2, shape, m->real);
    return mixp_add(m->ctx, judged(m, real, 1), judged(m, fake, 0));
}

static void learn(gan *m, int turn, mixp_tensor *loss, int updates) {
    CHECK_INT(mixp_backward(m->ctx, mixp_scaler_scale(m->scaler[turn], loss)), MIXP_OK);
    CHECK_INT(mixp_scaler_step(m->scaler[turn], m->opt[turn]), MIXP_OK);
    if (updates) CHECK_INT(mixp_scaler_update(m->scaler[turn]), MIXP_OK);
}

/* A step for each network. late: one update, after both. */
static void round_of_two_steps(gan *m, int late) {
    mixp_tensor *fake = NULL, *loss = NULL;
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt[0]);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) {
        MIXP_NO_GRAD(m->ctx) fake = fake_of(m);
        loss = judges(m, fake);
    }
    learn(m, 0, loss, !late);
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt[1]);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) loss = judged(m, fake_of(m), 1);
    learn(m, 1, loss, 1);
}

/* A step for each network, each repeated if it is skipped. bad[i] 1: the first try of network i overflows. */
static void round_with_retries(gan *m, const int bad[2]) {
    mixp_tensor *fake = NULL, *loss = NULL;
    m->bad = bad[0];
    do {
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt[0]);
        MIXP_AUTOCAST(m->ctx, MIXP_F16) {
            MIXP_NO_GRAD(m->ctx) fake = fake_of(m);
            loss = judges(m, fake);
        }
        learn(m, 0, loss, 1);
        m->bad = 0;
    } while (mixp_retry(m->scaler[0], 3));
    m->bad = bad[1];
    do {
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt[1]);
        MIXP_AUTOCAST(m->ctx, MIXP_F16) loss = judged(m, fake_of(m), 1);
        learn(m, 1, loss, 1);
        m->bad = 0;
    } while (mixp_retry(m->scaler[1], 3));
}

/* One step for both: the generator runs once. */
static void round_of_one_step(gan *m) {
    mixp_tensor *fake = NULL, *loss = NULL;
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt[0]);
    mixp_zero_grad(m->opt[1]);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) {
        fake = fake_of(m);
        loss = judges(m, mixp_detach(m->ctx, fake));
    }
    learn(m, 0, loss, 1);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) loss = judged(m, fake, 1);
    learn(m, 1, loss, 1);
}

/* How far the mean of the generated points lies from that of the real ones. */
static double distance(gan *m) {
    double off[2] = { 0, 0 };
    float made[2 * ROWS];
    mixp_eval_begin(m->ctx);
    MIXP_NO_GRAD(m->ctx) mixp_read(fake_of(m), made, MIXP_F32, 2 * ROWS);
    for (int i = 0; i < 2 * ROWS; i++) off[i % 2] += ((double)made[i] - (double)m->real[i]) / ROWS;
    return fabs(off[0]) + fabs(off[1]);
}

static int64_t read_weights(gan *m, float *weights) {
    mixp_tensor *const all[4] = { m->d1, m->d2, m->g1, m->g2 };
    int64_t at = 0;
    for (int i = 0; i < 4; at += all[i++]->count) mixp_read(all[i], weights + at, MIXP_F32, all[i]->count);
    return at;
}

/* form 0: two steps, two scalers; 1: one scaler; 2: one scaler, one update; 3: one step, two scalers. */
static void train(int form, float *weights) {
    gan m;
    const char *why = "";
    gan_open(&m, form == 1 || form == 2 ? 1 : 2);
    next_batch(&m, 0);
    double before = distance(&m);
    for (int i = 0; i < ROUNDS; i++) {
        next_batch(&m, i);
        if (form == 3) round_of_one_step(&m);
        else round_of_two_steps(&m, form == 2);
    }
    CHECK(distance(&m) < 0.7 * before);
    CHECK_INT(read_weights(&m, weights), WEIGHTS);
    CHECK_INT(mixp_optimizer_applied(m.opt[0]), ROUNDS);
    CHECK_INT(mixp_optimizer_applied(m.opt[1]), ROUNDS);
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_OK);
    if (*why) printf("  %s\n", why);
    mixp_context_free(m.ctx);
}

static void four_forms_of_one_training(void) {
    static float first[WEIGHTS], other[WEIGHTS];
    train(0, first);
    for (int form = 1; form < 4; form++) {
        train(form, other);
        CHECK(memcmp(first, other, sizeof first) == 0);
    }
}

/* Trains with retries. Some steps of the networks in `bad` are skipped at first. */
static void train_with_retries(int scalers, int bad, float *weights) {
    const int rounds = 30;
    const char *why = "";
    gan m;
    int i, skips = 0;
    gan_open(&m, scalers);
    m.draws = 1;
    for (i = 0; i < rounds; i++) {
        const int now[2] = { (bad & 1) && i % 10 == 3, (bad & 2) && i % 10 == 5 };
        next_batch(&m, i);
        round_with_retries(&m, now);
        skips += now[1];
    }
    CHECK_INT(read_weights(&m, weights), WEIGHTS);
    for (i = 0; i < 2; i++) CHECK_INT(mixp_optimizer_applied(m.opt[i]), rounds);
    CHECK_INT(mixp_optimizer_verdict(m.opt[1]).skipped, skips);
    if (scalers == 2) CHECK_NEAR(mixp_scaler_loss_scale(m.scaler[0]), bad & 1 ? 128.0 : 1024.0, 0);
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_OK);
    if (*why) printf("  %s\n", why);
    mixp_context_free(m.ctx);
}

/* A skipped step of either network is repeated with its own random numbers, and leaves the other network as it
 * is, with a scaler each and with one for both: the end has the bits of a training without a skip. */
static void a_step_of_one_network_is_repeated(void) {
    static float first[WEIGHTS], other[WEIGHTS];
    train_with_retries(2, 0, first);
    for (int scalers = 1; scalers < 3; scalers++)
        for (int bad = 1; bad < 4; bad++) {
            train_with_retries(scalers, bad, other);
            CHECK(memcmp(first, other, sizeof first) == 0);
        }
}

static void refused(gan *m, mixp_result got, const char *part) {
    const char *why = "";
    CHECK_INT(got, MIXP_ERR_ORDER);
    mixp_context_error(m->ctx, &why);
    CHECK_TEXT(why, part);
    mixp_context_free(m->ctx);
}

/* The walk of the generator's loss adds to the discriminator's gradients. */
static void gradients_of_the_other_must_be_cleared(void) {
    gan m;
    mixp_tensor *fake = NULL, *loss = NULL;
    gan_open(&m, 2);
    next_batch(&m, 0);
    round_of_two_steps(&m, 0);
    mixp_step_begin(m.ctx);                     /* without mixp_zero_grad */
    MIXP_AUTOCAST(m.ctx, MIXP_F16) {
        MIXP_NO_GRAD(m.ctx) fake = fake_of(&m);
        loss = judges(&m, fake);
    }
    CHECK_INT(mixp_backward(m.ctx, mixp_scaler_scale(m.scaler[0], loss)), MIXP_OK);
    refused(&m, mixp_scaler_step(m.scaler[0], m.opt[0]), "call mixp_zero_grad on this optimizer");
}

/* In one step the generator's loss must be made after the discriminator has stepped. */
static void a_loss_from_before_the_step(void) {
    gan m;
    mixp_tensor *fake = NULL, *loss[2] = { NULL, NULL };
    gan_open(&m, 2);
    next_batch(&m, 0);
    mixp_step_begin(m.ctx);
    MIXP_AUTOCAST(m.ctx, MIXP_F16) {
        fake = fake_of(&m);
        loss[0] = judges(&m, mixp_detach(m.ctx, fake));
        loss[1] = judged(&m, fake, 1);
    }
    learn(&m, 0, loss[0], 1);
    refused(&m, mixp_backward(m.ctx, mixp_scaler_scale(m.scaler[1], loss[1])), "'d.");
}

int main(void) {
    RUN(four_forms_of_one_training);
    RUN(a_step_of_one_network_is_repeated);
    RUN(gradients_of_the_other_must_be_cleared);
    RUN(a_loss_from_before_the_step);
    return test_report();
}
