/* test_recurrent.c - examples/recurrent.h compared with PyTorch's LSTM and GRU; its gradients
 * compared with finite differences.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "../../examples/recurrent.h"

enum { IN = 3, HIDDEN = 2, BATCH = 2, TIME = 3 };

/* Recorded by tests/reference/record_recurrent.py with PyTorch 2.15, in f64. */
static const double lstm_y[] = { 0.341967991291258, -0.259466316598305, 0.33594734039252, -0.144117464488848, 0.232294935120397, -0.17101023671877, 0.287693769006548, -0.0922857632706414, 0.404948213278354, -0.00545554195523225, 0.245522790750312, -0.0965289177463171 };
static const double lstm_c[] = { 0.518647867363521, -0.920049444694566, 0.517773327588198, -0.689911023281325 };
static const double lstm_dw[] = { 0.00757824899002472, -0.00628752148864717, -0.00276484794263495, 0.00117554857265827, 0.00498458132276811, -0.00334075361207257, -0.00022797203937924, 0.000422208625219098, 0.0172944817752243, -0.0204287309256688, 0.00353114131773882, -0.00810814816861067, 0.0146853436959474, -0.00893900242198989, -0.015773165767318, 0.00978130563973353 };
static const double gru_y[] = { 0.310958358911582, -0.241212151567431, 0.436091605348667, -0.15798938124916, 0.563019166637827, 0.14723391867819, -0.294213655862477, 0.240335298540172, -0.240565809851846, 0.293163670731537, -0.0133083369025902, 0.236487791522167 };
static const double gru_dw[] = { 0.00712533072474019, -0.000566873966653681, -0.00291469390820024, 0.00104571136890021, 0.0460309566037666, -0.0140618538837601, 0.0054084410913924, 0.000553246754140256, 0.0361282152709673, -0.00356908572466289, 0.00695313745714671, -0.00214834216029074 };

static uint32_t state = 1;

/* A parameter of sixteenths between -1 and 1. */
static mixp_tensor *fill(mixp_context *ctx, const char *name, int rank, int64_t a, int64_t b, int64_t c) {
    int64_t shape[3] = { a, b, c }, i;
    float   v[64];
    mixp_tensor *t = mixp_param(ctx, name, MIXP_F32, rank, shape);
    for (i = 0; i < t->count; i++) {
        state = state * 1664525u + 1013904223u;
        v[i] = (float)(int)(16.0f * ((float)(state >> 8) / 8388608.0f - 1.0f)) / 16.0f;
    }
    CHECK_INT(mixp_write(t, v, MIXP_F32, t->count), MIXP_OK);
    return t;
}

typedef struct layer {
    mixp_context *ctx;
    recurrent_weights w;
    mixp_tensor *x, *h, *c;
} layer;

static void layer_open(layer *l, int64_t gates) {
    state = 1;
    l->ctx = mixp_context_new(NULL);
    l->w.w_x = fill(l->ctx, "w_x", 2, gates * HIDDEN, IN, 0);
    l->w.w_h = fill(l->ctx, "w_h", 2, gates * HIDDEN, HIDDEN, 0);
    l->w.b_x = fill(l->ctx, "b_x", 1, gates * HIDDEN, 0, 0);
    l->w.b_h = fill(l->ctx, "b_h", 1, gates * HIDDEN, 0, 0);
    l->x = fill(l->ctx, "x", 3, BATCH, TIME, IN);
    l->h = fill(l->ctx, "h", 2, BATCH, HIDDEN, 0);
    l->c = gates == 4 ? fill(l->ctx, "c", 2, BATCH, HIDDEN, 0) : NULL;
}

static void near(const mixp_tensor *t, const double *want, double within) {
    float got[64];
    int64_t i;
    CHECK(t != NULL);
    if (!t) return;
    CHECK_INT(mixp_read(t, got, MIXP_F32, t->count), MIXP_OK);
    for (i = 0; i < t->count; i++) CHECK_NEAR((double)got[i], want[i], within);
}

static mixp_tensor *forward(layer *l, mixp_tensor **c) {
    mixp_tensor *h = l->h;
    *c = l->c;
    return l->c ? lstm_layer(l->ctx, l->x, &h, c, &l->w) : gru_layer(l->ctx, l->x, &h, &l->w);
}

static mixp_tensor *scalar(mixp_context *ctx, void *user) {
    mixp_tensor *c;
    return mixp_mean(ctx, mixp_sin(ctx, forward((layer *)user, &c)), MIXP_ALL, 0);
}

static void beside_pytorch(int64_t gates, const double *y, const double *dw) {
    layer l;
    mixp_tensor *c, *got;
    layer_open(&l, gates);
    mixp_step_begin(l.ctx);
    got = forward(&l, &c);
    near(got, y, 1e-6);
    if (l.c) near(c, lstm_c, 1e-6);
    CHECK_INT(mixp_backward(l.ctx, mixp_mean(l.ctx, mixp_sin(l.ctx, got), MIXP_ALL, 0)), MIXP_OK);
    near(l.w.w_h->grad, dw, 1e-6);
    /* Half precision: as PyTorch's cells under autocast, to its rounding. */
    mixp_step_begin(l.ctx);
    MIXP_AUTOCAST(l.ctx, MIXP_F16) { got = forward(&l, &c); }
    near(got, y, 4e-3);
    CHECK_INT(mixp_context_error(l.ctx, NULL), MIXP_OK);
    mixp_context_free(l.ctx);
}
static void lstm(void) { beside_pytorch(4, lstm_y, lstm_dw); }
static void gru(void) { beside_pytorch(3, gru_y, gru_dw); }

static void differences(void) {
    int64_t gates;
    for (gates = 3; gates < 5; gates++) {
        layer l;
        mixp_tensor *in[7];
        double worst = 1;
        layer_open(&l, gates);
        in[0] = l.w.w_x;
        in[1] = l.w.w_h;
        in[2] = l.w.b_x;
        in[3] = l.w.b_h;
        in[4] = l.x;
        in[5] = l.h;
        in[6] = l.c;
        CHECK_INT(mixp_check_gradients(l.ctx, scalar, &l, gates == 4 ? 7 : 6, in, 1e-2, &worst), MIXP_OK);
        CHECK_NEAR(worst, 0, 1e-3);
        mixp_context_free(l.ctx);
    }
}

/* A state that is carried: three steps of one position each are one step of three. */
static void carried(void) {
    layer l;
    mixp_tensor *h, *c, *y = NULL;
    int64_t t, shape[3] = { BATCH, 1, IN };
    float   x[BATCH * TIME * IN], part[BATCH * IN];
    layer_open(&l, 4);
    mixp_tensor_set_requires_grad(l.h, 0);
    mixp_tensor_set_requires_grad(l.c, 0);
    CHECK_INT(mixp_read(l.x, x, MIXP_F32, BATCH * TIME * IN), MIXP_OK);
    for (t = 0; t < TIME; t++) {
        int64_t b, i;
        for (b = 0; b < BATCH; b++)
            for (i = 0; i < IN; i++) part[b * IN + i] = x[(b * TIME + t) * IN + i];
        mixp_step_begin(l.ctx);
        h = l.h;
        c = l.c;
        y = lstm_layer(l.ctx, mixp_input(l.ctx, MIXP_F32, 3, shape, part), &h, &c, &l.w);
        CHECK_INT(mixp_copy(l.h, h), MIXP_OK);
        CHECK_INT(mixp_copy(l.c, c), MIXP_OK);
    }
    near(l.c, lstm_c, 1e-6);
    CHECK(y != NULL);
    CHECK_INT(mixp_context_error(l.ctx, NULL), MIXP_OK);
    mixp_context_free(l.ctx);
}

int main(void) {
    RUN(lstm);
    RUN(gru);
    RUN(differences);
    RUN(carried);
    return test_report();
}
