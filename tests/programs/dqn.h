/* dqn.h - Q-learning with a target network: buffers that get a copy of the weights every 4 updates. Nothing
 * in it leaves fp16's range. A reward of 1 and more ends its episode.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { DQN_ROWS = FIT(16), DQN_IN = FIT(5), DQN_HIDDEN = FIT(24), DQN_ACTIONS = 3, DQN_NETS = 2 };

typedef struct dqn {
    mixp_tensor *w1[DQN_NETS], *w2[DQN_NETS];
    float        state[DQN_ROWS * DQN_IN], next[DQN_ROWS * DQN_IN], reward[DQN_ROWS];
    int32_t      action[DQN_ROWS];
} dqn;

static void dqn_copy(session *s) {
    dqn *m = (dqn *)s->model;
    mixp_copy(m->w1[1], m->w1[0]);
    mixp_copy(m->w2[1], m->w2[0]);
}

static void dqn_open(session *s) {
    dqn *m = (dqn *)s->model;
    m->w1[0] = matrix(s, "q.fc1.w", DQN_HIDDEN, DQN_IN, 0.4);
    m->w2[0] = matrix(s, "q.fc2.w", DQN_ACTIONS, DQN_HIDDEN, 0.2);
    m->w1[1] = buffer(s, "target.fc1.w", DQN_HIDDEN, DQN_IN, MIXP_BUFFER_RANK_0);
    m->w2[1] = buffer(s, "target.fc2.w", DQN_ACTIONS, DQN_HIDDEN, MIXP_BUFFER_RANK_0);
    dqn_copy(s);
}

static void dqn_batch(session *s) {
    dqn *m = (dqn *)s->model;
    for (int i = 0; i < DQN_ROWS; i++) {
        m->action[i] = below(s, DQN_ACTIONS);
        for (int j = 0; j < DQN_IN; j++) m->state[i * DQN_IN + j] = normal(s);
        for (int j = 0; j < DQN_IN; j++) m->next[i * DQN_IN + j] = normal(s);
        m->reward[i] = m->state[i * DQN_IN + m->action[i]];
    }
}

static mixp_tensor *dqn_values(session *s, int net, float *state) {
    dqn          *m = (dqn *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *h = mixp_linear(c, floats(s, state, DQN_ROWS, DQN_IN, 0), m->w1[net], NULL);
    return mixp_linear(c, mixp_relu(c, h), m->w2[net], NULL);
}

static mixp_tensor *dqn_loss(session *s, int turn, int training) {
    dqn          *m = (dqn *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *q, *want = NULL, *reward = floats(s, m->reward, DQN_ROWS, 1, 0);
    (void)turn, (void)training;
    MIXP_NO_GRAD(c) want = mixp_scale(c, mixp_max(c, dqn_values(s, 1, m->next), 1, 1), 0.5f);
    want = mixp_where(c, mixp_lt(c, reward, mixp_full(c, MIXP_F32, 0, NULL, 1.0)), mixp_add(c, want, reward),
                      reward);
    q = mixp_gather(c, dqn_values(s, 0, m->state), 1, ints(s, m->action, DQN_ROWS, 1));
    return mixp_smooth_l1(c, q, want, 1.0f);
}

static void dqn_after(session *s, int turn) {
    (void)turn;
    if (s->step % 4 == 3) dqn_copy(s);
}
