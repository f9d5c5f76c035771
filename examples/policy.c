/* policy.c - reinforcement learning in fp16 and in bf16, side by side: a policy learns to balance a
 * pole on a cart by clipped policy gradients (PPO, Schulman et al., 2017).
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/policy.c -I. -lm && ./a.out [seed]
 *
 * Actions are drawn with the low-precision policy. Column `off` compares that policy with the same
 * weights in fp32: the mean |p_low / p_fp32 - 1| of the actions taken. Such ratios steer the update.
 * bf16 keeps 8 significant bits and fp16 keeps 11, so fp16 is about 8 times closer ("Defeating the
 * Training-Inference Mismatch via FP16", arXiv 2510.26788, 2025). The loss scaler keeps small
 * gradients from becoming 0 in fp16; this small problem can be learned without the scaler as well.
 *
 * The last line compares the policy that is trained with the policy that played, before an update has changed it. It
 * played in batches of 16, without gradients; training sees all pushes at once. On a CPU a row's bits do not depend on
 * its batch, so the ratio is exactly 1, and no correction for a mismatch is needed. */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { STATE = 4, ACTIONS = 2, HIDDEN = 64, CARTS = 16, LONGEST = 200, ROUNDS = 24, EPOCHS = 6 };
enum { ROWS = CARTS * LONGEST };

/* --- the environment: equations of motion of Barto, Sutton and Anderson (1983), constants of Gym --- */

typedef struct { float x, v, angle, spin; } cart;

static double random_number(unsigned long long *state) {    /* in [0, 1) */
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(*state >> 11) / 9007199254740992.0;
}

static cart cart_begin(unsigned long long *random) {
    cart  c = { 0 };
    float *part[4] = { &c.x, &c.v, &c.angle, &c.spin };
    for (int i = 0; i < 4; i++) *part[i] = (float)(random_number(random) * 0.1 - 0.05);
    return c;
}

/* Pushes the cart left (0) or right (1) for 1/50 s. Returns 1 while the pole stands. */
static int cart_push(cart *c, int action) {
    const float gravity = 9.8f, mass = 1.1f, pole = 0.1f, half = 0.5f, dt = 0.02f;
    float       push = action ? 10.0f : -10.0f, s = sinf(c->angle), k = cosf(c->angle);
    float       f = (push + pole * half * c->spin * c->spin * s) / mass;
    float       turn = (gravity * s - k * f) / (half * (4.0f / 3.0f - pole * k * k / mass));
    float       speed = f - pole * half * turn * k / mass;
    c->x += dt * c->v;
    c->v += dt * speed;
    c->angle += dt * c->spin;
    c->spin += dt * turn;
    return fabsf(c->x) < 2.4f && fabsf(c->angle) < 0.2095f;
}

/* --- a policy that learns ----------------------------------------------------------------------- */

typedef struct run {
    mixp_dtype      dtype;
    mixp_context   *ctx;
    mixp_tensor    *w1, *b1, *w2;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    unsigned long long random;
    int             rows, length[CARTS];                /* pushes of this round, of each cart */
    int             cart[ROWS], time[ROWS];
    float           state[ROWS][STATE], advantage[ROWS];
    float           old[ROWS];                          /* log p of the action when it was drawn */
    int32_t         action[ROWS];
    double          off;
    mixp_tensor    *ratio;                              /* p(action) / p_old(action) of this step */
    float           least, most;                        /* ratios before the first update of a round */
} run;

static run *run_new(mixp_dtype dtype, unsigned long long seed) {
    const int64_t    s1[2] = { HIDDEN, STATE }, s2[2] = { ACTIONS, HIDDEN };
    mixp_scaler_desc scaler = { .disabled = dtype == MIXP_BF16 };
    mixp_context_desc context = { .seed = seed };
    mixp_optimizer_desc adam = mixp_adam_defaults();
    run             *r = (run *)calloc(1, sizeof *r);
    r->dtype = dtype;
    r->random = seed;
    r->least = r->most = 1.0f;
    r->ctx = mixp_context_new(&context);
    r->w1 = mixp_param(r->ctx, "w1", MIXP_F32, 2, s1);
    r->b1 = mixp_param(r->ctx, "b1", MIXP_F32, 1, s1);
    r->w2 = mixp_param(r->ctx, "w2", MIXP_F32, 2, s2);
    mixp_init_kaiming_normal(r->w1, 5.0 / 3.0);
    mixp_init_kaiming_normal(r->w2, 0.1);
    adam.lr = 5e-3;
    adam.max_norm = 0.5;
    r->opt = mixp_optimizer_new(r->ctx, &adam);
    mixp_optimizer_add_all(r->opt, "*");
    r->scaler = mixp_scaler_new(r->ctx, &scaler);
    return r;
}

static void run_free(run *r) {
    mixp_context_free(r->ctx);
    free(r);
}

/* log p [n, ACTIONS] of the actions in n states. */
static mixp_tensor *log_policy(run *r, const float *states, int64_t n) {
    const int64_t shape[2] = { n, STATE };
    mixp_tensor  *h = mixp_linear(r->ctx, mixp_input_f32(r->ctx, 2, shape, states), r->w1, r->b1);
    return mixp_log_softmax(r->ctx, mixp_linear(r->ctx, mixp_tanh(r->ctx, h), r->w2, NULL));
}

/* log p of n states in `dtype`, without gradients. */
static void evaluate(run *r, mixp_dtype dtype, const float *states, int64_t n, float (*out)[ACTIONS]) {
    mixp_eval_begin(r->ctx);
    MIXP_NO_GRAD(r->ctx) MIXP_AUTOCAST(r->ctx, dtype)
        mixp_read(log_policy(r, states, n), out, MIXP_F32, n * ACTIONS);
}

/* Plays one episode on each cart. Keeps each push: its state, action, log p, cart and time. */
static void play(run *r) {
    cart  carts[CARTS];
    float log_p[CARTS][ACTIONS];
    int   stands[CARTS];
    r->rows = 0;
    for (int i = 0; i < CARTS; i++) {
        carts[i] = cart_begin(&r->random);
        r->length[i] = 0;
        stands[i] = 1;
    }
    for (int t = 0; t < LONGEST; t++) {
        evaluate(r, r->dtype, (const float *)carts, CARTS, log_p);
        for (int i = 0; i < CARTS; i++) {
            int a = random_number(&r->random) >= exp((double)log_p[i][0]), n = r->rows;
            if (!stands[i]) continue;
            memcpy(r->state[n], &carts[i], sizeof carts[i]);
            r->action[n] = a;
            r->old[n] = log_p[i][a];
            r->cart[n] = i;
            r->time[n] = t;
            r->rows++;
            r->length[i]++;
            stands[i] = cart_push(&carts[i], a);
        }
    }
}

/* Advantage of a push: its discounted return (1 for each push to come) less the mean return of the
 * pushes at the same time, divided by the standard deviation of these differences. */
static void judge(run *r) {
    double total[LONGEST] = { 0 }, squares = 0.0;
    int    count[LONGEST] = { 0 };
    for (int n = 0; n < r->rows; n++) {
        r->advantage[n] = (float)(100.0 * (1.0 - pow(0.99, r->length[r->cart[n]] - r->time[n])));
        total[r->time[n]] += (double)r->advantage[n];
        count[r->time[n]]++;
    }
    for (int n = 0; n < r->rows; n++) {
        r->advantage[n] -= (float)(total[r->time[n]] / count[r->time[n]]);
        squares += (double)r->advantage[n] * (double)r->advantage[n];
    }
    for (int n = 0; n < r->rows; n++) r->advantage[n] /= (float)sqrt(squares / r->rows + 1e-6);
}

/* Mean |p_low / p_fp32 - 1| of the actions taken. */
static double mismatch(run *r) {
    static float log_p[ROWS][ACTIONS];
    double       sum = 0.0;
    evaluate(r, MIXP_F32, r->state[0], r->rows, log_p);
    for (int n = 0; n < r->rows; n++) sum += fabs(exp((double)r->old[n] - (double)log_p[n][r->action[n]]) - 1.0);
    return sum / r->rows;
}

/* PPO's loss: -mean(min(ratio A, clamp(ratio, 0.8, 1.2) A)), ratio = p(action) / p_old(action). */
static mixp_tensor *loss_of(run *r) {
    mixp_context *c = r->ctx;
    const int64_t n[2] = { r->rows, 1 };
    mixp_tensor  *taken = mixp_input_i32(c, 2, n, r->action);
    mixp_tensor  *log_p = mixp_gather(c, log_policy(r, r->state[0], r->rows), 1, taken);
    mixp_tensor  *ratio = r->ratio = mixp_exp(c, mixp_sub(c, log_p, mixp_input_f32(c, 2, n, r->old)));
    mixp_tensor  *a = mixp_input_f32(c, 2, n, r->advantage);
    mixp_tensor  *clipped = mixp_mul(c, mixp_clamp(c, ratio, 0.8f, 1.2f), a);
    return mixp_neg(c, mixp_mean(c, mixp_minimum(c, mixp_mul(c, ratio, a), clipped), MIXP_ALL, 0));
}

/* Notes the ratios of a step before its update. */
static void compare_policies(run *r) {
    static float ratio[ROWS];
    mixp_read_f32(r->ratio, ratio, r->rows);
    for (int n = 0; n < r->rows; n++) {
        if (!(ratio[n] >= r->least)) r->least = ratio[n];
        if (!(ratio[n] <= r->most)) r->most = ratio[n];
    }
}

static void learn(run *r) {
    mixp_tensor *loss = NULL;
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        mixp_step_begin(r->ctx);
        mixp_zero_grad(r->opt);
        MIXP_AUTOCAST(r->ctx, r->dtype) loss = loss_of(r);
        if (epoch == 0) compare_policies(r);
        mixp_backward(r->ctx, mixp_scaler_scale(r->scaler, loss));
        mixp_scaler_step(r->scaler, r->opt);
        mixp_scaler_update(r->scaler);
    }
}

/* Plays, measures, learns. Returns 0 on an error. */
static int one_round(run *r) {
    const char *why;
    play(r);
    judge(r);
    r->off = mismatch(r);
    learn(r);
    if (mixp_context_error(r->ctx, &why)) fprintf(stderr, "policy: %s\n", why);
    return !mixp_context_error(r->ctx, NULL);
}

int main(int argc, char **argv) {
    unsigned long long seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    run               *half = run_new(MIXP_F16, seed), *brain = run_new(MIXP_BF16, seed);
    printf("%d carts, %d parameters, at most %d pushes\n", CARTS, HIDDEN * (STATE + 1 + ACTIONS), LONGEST);
    printf("         fp16 with scaler            bf16\n");
    printf("round    return  off        scale    return  off\n");
    for (int round = 1; round <= ROUNDS; round++) {
        if (!one_round(half) || !one_round(brain)) return 1;
        if (round == 1 || round % 2 == 0)
            printf("%5d    %6.1f  %.1e  %7g    %6.1f  %.1e\n", round, (double)half->rows / CARTS, half->off,
                   (double)mixp_scaler_loss_scale(half->scaler), (double)brain->rows / CARTS, brain->off);
    }
    printf("steps skipped in fp16: %d\n", (int)mixp_scaler_verdict(half->scaler).skipped);
    printf("trained / played policy before each first update: fp16 %.9g to %.9g, bf16 %.9g to %.9g\n",
           (double)half->least, (double)half->most, (double)brain->least, (double)brain->most);
    run_free(half);
    run_free(brain);
    return 0;
}
