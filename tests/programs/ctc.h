/* ctc.h - sequences of symbols without alignment (CTC, Graves et al., 2006): the loss adds the likelihoods of all
 * alignments by logsumexp, one time after the other. A state that no alignment reaches is -1e4, and two of them add up
 * to what a guard holds for the end of fp16's range. Sequences end early, and the two symbols of a label may be equal.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { CTC_ROWS = FIT(6), CTC_TIME = 6, CTC_IN = FIT(5), CTC_WIDTH = FIT(16), CTC_SYMBOLS = FIT(4), CTC_STATES = 5 };
#define CTC_NEVER (-1e4f)

typedef struct ctc {
    mixp_tensor *in, *bias, *out;
    float        x[CTC_ROWS * CTC_TIME * CTC_IN], first[CTC_ROWS * CTC_STATES], jump[CTC_ROWS * CTC_STATES];
    int32_t      state[CTC_ROWS * CTC_STATES];
    uint8_t      ended[CTC_TIME][CTC_ROWS];
} ctc;

static void ctc_open(session *s) {
    ctc *m = (ctc *)s->model;
    m->in = matrix(s, "in.w", CTC_WIDTH, CTC_IN, 0.5);
    m->bias = vector(s, "in.b", CTC_WIDTH, 0);
    m->out = matrix(s, "out", CTC_SYMBOLS, CTC_WIDTH, 0.3);
}

/* A label has two symbols. Its states: blank, symbol, blank, symbol, blank; symbol 0 is the blank. The sequence shows
 * the first symbol in its first half, and the second one behind. */
static void ctc_batch(session *s) {
    ctc *m = (ctc *)s->model;
    for (int i = 0; i < CTC_ROWS; i++) {
        const int32_t label[2] = { 1 + below(s, 3), 1 + below(s, 3) };
        const int     length = CTC_TIME - below(s, 3);
        for (int k = 0; k < CTC_STATES; k++) {
            m->state[i * CTC_STATES + k] = k % 2 ? label[k / 2] : 0;
            m->first[i * CTC_STATES + k] = k < 2 ? 0 : CTC_NEVER;
            m->jump[i * CTC_STATES + k] = k == 3 && label[0] != label[1] ? 0 : CTC_NEVER;
        }
        for (int t = 0; t < CTC_TIME; t++) {
            float *x = m->x + (i * CTC_TIME + t) * CTC_IN;
            for (int j = 0; j < CTC_IN; j++) x[j] = 0.5f * normal(s);
            x[label[2 * t >= length]] += 1.5f;
            m->ended[t][i] = t >= length;
        }
    }
}

/* x, moved to the states `by` places behind. */
static mixp_tensor *ctc_behind(mixp_context *c, mixp_tensor *x, int by)
{ return mixp_slice(c, mixp_pad(c, x, 1, by, 0, CTC_NEVER), 1, 0, CTC_STATES); }

static mixp_tensor *ctc_loss(session *s, int turn, int training) {
    ctc          *m = (ctc *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = floats(s, m->x, CTC_ROWS, CTC_TIME, CTC_IN), *at = NULL, *from[3];
    mixp_tensor  *jump = floats(s, m->jump, CTC_ROWS, CTC_STATES, 0), *state = ints(s, m->state, CTC_ROWS, CTC_STATES);
    (void)turn, (void)training;
    x = mixp_log_softmax(c, mixp_linear(c, mixp_silu(c, mixp_linear(c, x, m->in, m->bias)), m->out, NULL));
    for (int t = 0; t < CTC_TIME; t++) {
        mixp_tensor *log_p = mixp_gather(c, mixp_squeeze(c, mixp_slice(c, x, 1, t, 1), 1), 1, state);
        if (t == 0) {
            at = mixp_add(c, log_p, floats(s, m->first, CTC_ROWS, CTC_STATES, 0));
            continue;
        }
        from[0] = at;
        from[1] = ctc_behind(c, at, 1);
        from[2] = mixp_add(c, ctc_behind(c, at, 2), jump);
        log_p = mixp_add(c, mixp_logsumexp(c, mixp_stack(c, 3, from, 2), 2, 0), log_p);
        at = mixp_where(c, bytes(s, m->ended[t], CTC_ROWS, 1), at, log_p);
    }
    at = mixp_logsumexp(c, mixp_slice(c, at, 1, CTC_STATES - 2, 2), 1, 0);
    return mixp_neg(c, mixp_mean(c, at, MIXP_ALL, 0));
}
