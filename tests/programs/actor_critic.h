/* actor_critic.h - an actor and a critic on rewards of thousands: two optimizers share one scaler, which
 * is updated after each. The critic's values pass 65,504.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { AC_ROWS = FIT(24), AC_IN = FIT(6), AC_HIDDEN = FIT(24), AC_ACTIONS = 3 };

typedef struct actor_critic {
    mixp_tensor *a1, *a2, *v1, *v2;
    float        state[AC_ROWS * AC_IN], gain[AC_ROWS], advantage[AC_ROWS];
    int32_t      action[AC_ROWS];
} actor_critic;

static void actor_critic_open(session *s) {
    actor_critic *m = (actor_critic *)s->model;
    s->owner = 0;
    m->v1 = matrix(s, "critic.fc1.w", AC_HIDDEN, AC_IN, 0.4);
    m->v2 = matrix(s, "critic.fc2.w", 1, AC_HIDDEN, 14000);
    s->owner = 1;
    m->a1 = matrix(s, "actor.fc1.w", AC_HIDDEN, AC_IN, 0.4);
    m->a2 = matrix(s, "actor.fc2.w", AC_ACTIONS, AC_HIDDEN, 0.2);
}

/* The best action is that of the largest of the first three numbers of the state. */
static void actor_critic_batch(session *s) {
    actor_critic *m = (actor_critic *)s->model;
    for (int i = 0; i < AC_ROWS; i++) {
        float *x = m->state + i * AC_IN;
        for (int j = 0; j < AC_IN; j++) x[j] = normal(s);
        m->action[i] = below(s, AC_ACTIONS);
        m->gain[i] = 1e5f * x[3];
        m->advantage[i] = x[m->action[i]] - (x[0] + x[1] + x[2]) / 3.0f;
    }
}

static mixp_tensor *actor_critic_loss(session *s, int turn, int training) {
    actor_critic *m = (actor_critic *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = floats(s, m->state, AC_ROWS, AC_IN, 0), *h;
    (void)training;
    if (turn == 0) {
        h = mixp_linear(c, mixp_tanh(c, mixp_linear(c, x, m->v1, NULL)), m->v2, NULL);
        return mixp_scale(c, mixp_huber(c, h, floats(s, m->gain, AC_ROWS, 1, 0), 1000.0f), 1e-6f);
    }
    h = mixp_linear(c, mixp_tanh(c, mixp_linear(c, x, m->a1, NULL)), m->a2, NULL);
    h = mixp_gather(c, mixp_log_softmax(c, h), 1, ints(s, m->action, AC_ROWS, 1));
    h = mixp_mul(c, h, floats(s, m->advantage, AC_ROWS, 1, 0));
    return mixp_neg(c, mixp_mean(c, h, MIXP_ALL, 0));
}
