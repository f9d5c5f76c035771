/* test_recurrent.c - examples/recurrent.h compared with PyTorch's LSTM, GRU and RNN; its gradients
 * compared with finite differences.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "../../examples/ops.h"
#include "../../examples/recurrent.h"
#include "../reference/recurrent.h"

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
    CHECK(t != NULL);
    if (!t) return;
    CHECK_INT(mixp_read(t, got, MIXP_F32, t->count), MIXP_OK);
    for (int64_t i = 0; i < t->count; i++) CHECK_NEAR((double)got[i], want[i], within);
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
    CHECK(got && got->dtype == MIXP_F16);
    near(got, y, 4e-3);
    CHECK_INT(mixp_context_error(l.ctx, NULL), MIXP_OK);
    mixp_context_free(l.ctx);
}
static void lstm(void) { beside_pytorch(4, lstm_y, lstm_dw); }
static void gru(void) { beside_pytorch(3, gru_y, gru_dw); }

static void differences(void) {
    for (int64_t gates = 3; gates < 5; gates++) {
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
    mixp_tensor *h, *c, *h0, *c0, *y = NULL;
    int64_t t, shape[3] = { BATCH, 1, IN };
    float   x[BATCH * TIME * IN], part[BATCH * IN];
    layer_open(&l, 4);
    h0 = mixp_buffer(l.ctx, "state.h", MIXP_F32, 2, l.h->shape);
    c0 = mixp_buffer(l.ctx, "state.c", MIXP_F32, 2, l.c->shape);
    CHECK_INT(mixp_copy(h0, l.h), MIXP_OK);
    CHECK_INT(mixp_copy(c0, l.c), MIXP_OK);
    CHECK_INT(mixp_read(l.x, x, MIXP_F32, BATCH * TIME * IN), MIXP_OK);
    for (t = 0; t < TIME; t++) {
        for (int64_t b = 0; b < BATCH; b++)
            for (int64_t i = 0; i < IN; i++) part[b * IN + i] = x[(b * TIME + t) * IN + i];
        mixp_step_begin(l.ctx);
        h = h0;
        c = c0;
        y = lstm_layer(l.ctx, mixp_input(l.ctx, MIXP_F32, 3, shape, part), &h, &c, &l.w);
        CHECK_INT(mixp_copy(h0, h), MIXP_OK);
        CHECK_INT(mixp_copy(c0, c), MIXP_OK);
    }
    near(c0, lstm_c, 1e-6);
    CHECK(y != NULL);
    CHECK_INT(mixp_context_error(l.ctx, NULL), MIXP_OK);
    mixp_context_free(l.ctx);
}

/* --- layers, directions, projections, lengths --------------------------------------------------- */

enum { LINES = 4, WEIGHTS = 5 * LINES };

typedef struct network {
    const network_case *n;
    mixp_context       *ctx;
    mixp_tensor        *x, *h[LINES], *c[LINES], *made[WEIGHTS], *proj[LINES];
    recurrent_weights   w[LINES];
    int                 lines, weights;
} network;

/* The next weight, in PyTorch's order. */
static mixp_tensor *weight(network *k, int rank, int64_t rows, int64_t cols) {
    char name[16];
    snprintf(name, sizeof name, "w%d", k->weights);
    return k->made[k->weights++] = fill(k->ctx, name, rank, rows, cols, 0);
}

static void state_parts(network *k, mixp_tensor **part, const char *kind, int64_t width) {
    for (int i = 0; i < k->lines; i++) {
        char name[16];
        snprintf(name, sizeof name, "%s%d", kind, i);
        part[i] = fill(k->ctx, name, 2, BATCH, width, 0);
    }
}

static void network_open(network *k, const network_case *n) {
    const int64_t gates = n->kind == RECURRENT_LSTM ? 4 : n->kind == RECURRENT_GRU ? 3 : 1;
    const int64_t out = n->proj ? n->proj : HIDDEN;
    memset(k, 0, sizeof *k);
    state = 1;
    k->n = n;
    k->ctx = mixp_context_new(NULL);
    k->lines = n->layers * (1 + n->two);
    for (int i = 0; i < k->lines; i++) {
        const int64_t in = i <= n->two ? IN : out * (1 + n->two);
        k->w[i].w_x = weight(k, 2, gates * HIDDEN, in);
        k->w[i].w_h = weight(k, 2, gates * HIDDEN, out);
        if (n->bias) k->w[i].b_x = weight(k, 1, gates * HIDDEN, 0);
        if (n->bias) k->w[i].b_h = weight(k, 1, gates * HIDDEN, 0);
        if (n->proj) k->proj[i] = weight(k, 2, n->proj, HIDDEN);
    }
    k->x = fill(k->ctx, "x", 3, BATCH, TIME, IN);
    if (n->given) state_parts(k, k->h, "h", out);
    if (n->given && n->kind == RECURRENT_LSTM) state_parts(k, k->c, "c", HIDDEN);
}

/* h and c: the states before and after, where they are given. */
static mixp_tensor *network_run(network *k, mixp_tensor **h, mixp_tensor **c) {
    const int64_t  rows = BATCH;
    const int      lstm = k->n->kind == RECURRENT_LSTM;
    recurrent_desc d;
    memset(&d, 0, sizeof d);
    d.kind = (recurrent_kind)k->n->kind;
    d.layers = k->n->layers;
    d.bidirectional = k->n->two;
    d.w_proj = k->n->proj ? k->proj : NULL;
    if (k->n->lengths[0]) {
        int32_t lengths[BATCH];
        memcpy(lengths, k->n->lengths, sizeof lengths);
        d.lengths = mixp_input(k->ctx, MIXP_I32, 1, &rows, lengths);
    }
    memcpy(h, k->h, sizeof k->h);
    memcpy(c, k->c, sizeof k->c);
    return recurrent(k->ctx, k->x, k->n->given ? h : NULL, k->n->given && lstm ? c : NULL, k->w, &d);
}

static const double *near_all(mixp_tensor *const *t, int n, int gradient, const double *want) {
    int i;
    for (i = 0; i < n; i++) {
        const mixp_tensor *one = gradient && t[i] ? t[i]->grad : t[i];
        near(one, want, 1e-6);
        want += one ? one->count : 0;
    }
    return want;
}

static void networks_beside_pytorch(void) {
    for (size_t at = 0; at < sizeof network_cases / sizeof network_cases[0]; at++) {
        const network_case *n = &network_cases[at];
        const double       *want = network_numbers + n->first;
        const int64_t       out = n->proj ? n->proj : HIDDEN;
        mixp_tensor        *h[LINES], *c[LINES], *y;
        network             k;
        network_open(&k, n);
        mixp_step_begin(k.ctx);
        y = network_run(&k, h, c);
        want = near_all(&y, 1, 0, want);
        if (n->given) near_all(h, k.lines, 0, want);
        want += k.lines * BATCH * out;
        if (n->given && n->kind == RECURRENT_LSTM) near_all(c, k.lines, 0, want);
        if (n->kind == RECURRENT_LSTM) want += k.lines * BATCH * HIDDEN;
        CHECK_INT(mixp_backward(k.ctx, mixp_mean(k.ctx, mixp_sin(k.ctx, y), MIXP_ALL, 0)), MIXP_OK);
        want = near_all(&k.x, 1, 1, want);
        if (n->given) want = near_all(k.h, k.lines, 1, want);
        if (n->given && n->kind == RECURRENT_LSTM) want = near_all(k.c, k.lines, 1, want);
        want = near_all(k.made, k.weights, 1, want);
        CHECK(at + 1 == sizeof network_cases / sizeof network_cases[0] ||
              want == network_numbers + network_cases[at + 1].first);
        CHECK_INT(mixp_context_error(k.ctx, NULL), MIXP_OK);
        mixp_context_free(k.ctx);
    }
}

/* Under autocast h is low, as in PyTorch; a c of f32 stays f32. */
static void states_under_autocast(void) {
    for (size_t at = 0; at < sizeof network_cases / sizeof network_cases[0]; at++) {
        const network_case *n = &network_cases[at];
        mixp_tensor        *h[LINES], *c[LINES], *y = NULL;
        network             k;
        network_open(&k, n);
        mixp_step_begin(k.ctx);
        MIXP_AUTOCAST(k.ctx, MIXP_F16) y = network_run(&k, h, c);
        CHECK(y && y->dtype == MIXP_F16);
        near(y, network_numbers + n->first, 8e-3);
        for (int i = 0; n->given && i < k.lines; i++) {
            CHECK(h[i] && h[i]->dtype == MIXP_F16);
            if (n->kind == RECURRENT_LSTM) CHECK(c[i] && c[i]->dtype == MIXP_F32);
        }
        CHECK_INT(mixp_context_error(k.ctx, NULL), MIXP_OK);
        mixp_context_free(k.ctx);
    }
}

/* A longer sequence than the pieces in which results are joined: a sum, since w_h is 1 and x is 1 at each position. */
static void a_long_sequence(void) {
    enum { LONG = 700 };
    const int64_t     one[2] = { 1, 1 }, shape[3] = { 1, LONG, 1 };
    static float      got[LONG];
    mixp_context     *ctx = mixp_context_new(NULL);
    recurrent_weights w;
    recurrent_desc    d;
    memset(&w, 0, sizeof w);
    memset(&d, 0, sizeof d);
    d.kind = RECURRENT_RELU;
    mixp_step_begin(ctx);
    w.w_x = w.w_h = mixp_full(ctx, MIXP_F32, 2, one, 1);
    mixp_tensor *h = mixp_full(ctx, MIXP_F32, 2, one, 5);
    mixp_tensor *y = recurrent(ctx, mixp_full(ctx, MIXP_F32, 3, shape, 1), &h, NULL, &w, &d);
    CHECK_INT(mixp_read(y, got, MIXP_F32, LONG), MIXP_OK);
    for (int t = 0; t < LONG; t++) CHECK_NEAR((double)got[t], 6 + t, 0);
    CHECK_NEAR(mixp_item(h), 5 + LONG, 0);
    mixp_context_free(ctx);
}

/* Dropout lies between layers: it changes a second layer and not the first, and scales what it keeps. */
static void dropout_between_layers(void) {
    const int64_t     one[2] = { 1, 1 }, shape[3] = { 64, 1, 1 };
    mixp_context     *ctx = mixp_context_new(NULL);
    recurrent_weights w[2];
    recurrent_desc    d;
    float             got[64];
    int               layers, i, dropped = 0;
    memset(w, 0, sizeof w);
    memset(&d, 0, sizeof d);
    d.kind = RECURRENT_RELU;
    d.dropout = 0.5f;
    mixp_step_begin(ctx);
    w[0].w_x = w[0].w_h = w[1].w_x = w[1].w_h = mixp_full(ctx, MIXP_F32, 2, one, 1);
    for (layers = 1; layers < 3; layers++) {
        d.layers = layers;
        CHECK_INT(mixp_read(recurrent(ctx, mixp_full(ctx, MIXP_F32, 3, shape, 1), NULL, NULL, w, &d), got, MIXP_F32, 64),
                  MIXP_OK);
        for (i = 0; i < 64; i++) {
            CHECK(layers == 1 ? got[i] == 1.0f : got[i] == 0.0f || got[i] == 2.0f);
            dropped += got[i] == 0.0f;
        }
    }
    CHECK(dropped > 16 && dropped < 48);
    mixp_context_free(ctx);
}

/* A batch of none: results of none, and gradients of 0. */
static void an_empty_batch(void) {
    const int64_t shape[3] = { 0, TIME, IN };
    for (size_t at = 0; at < sizeof network_cases / sizeof network_cases[0]; at++) {
        network        k;
        recurrent_desc d;
        float          got[64] = { 0 };
        if (network_cases[at].proj) continue;
        network_open(&k, &network_cases[at]);
        memset(&d, 0, sizeof d);
        d.kind = (recurrent_kind)k.n->kind;
        d.layers = k.n->layers;
        d.bidirectional = k.n->two;
        mixp_step_begin(k.ctx);
        mixp_tensor *y = recurrent(k.ctx, mixp_input(k.ctx, MIXP_F32, 3, shape, got), NULL, NULL, k.w, &d);
        CHECK(y && y->shape[0] == 0 && y->shape[1] == TIME && y->shape[2] == HIDDEN * (1 + k.n->two));
        CHECK_INT(mixp_backward(k.ctx, mixp_sum(k.ctx, y, MIXP_ALL, 0)), MIXP_OK);
        CHECK_INT(mixp_read(k.w[0].w_h->grad, got, MIXP_F32, k.w[0].w_h->count), MIXP_OK);
        for (int64_t i = 0; i < k.w[0].w_h->count; i++) CHECK_NEAR((double)got[i], 0, 0);
        CHECK_INT(mixp_context_error(k.ctx, NULL), MIXP_OK);
        mixp_context_free(k.ctx);
    }
}

static void refused(mixp_context *ctx, const mixp_tensor *y, mixp_result code, const char *text) {
    const char *why;
    CHECK(y == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), code);
    CHECK_TEXT(why, text);
    mixp_context_clear_error(ctx);
}

static void refusals(void) {
    const int64_t  long_shape[3] = { 1, 65537, 1 }, three = 3;
    const int32_t  lengths[3] = { 1, 1, 1 };
    recurrent_desc d;
    network        k;
    network_open(&k, &network_cases[3]);
    memset(&d, 0, sizeof d);
    mixp_step_begin(k.ctx);
    refused(k.ctx, recurrent(k.ctx, k.w[0].w_x, NULL, NULL, k.w, NULL), MIXP_ERR_SHAPE, "the rank of x is 2");
    refused(k.ctx, recurrent(k.ctx, mixp_full(k.ctx, MIXP_F32, 3, long_shape, 0), NULL, NULL, k.w, NULL), MIXP_ERR_SHAPE,
            "at most 65536");
    d.lengths = mixp_input(k.ctx, MIXP_I32, 1, &three, lengths);
    refused(k.ctx, recurrent(k.ctx, k.x, NULL, NULL, k.w, &d), MIXP_ERR_SHAPE, "one length for each sequence");
    for (int i = 0; i < 2; i++) {
        int32_t beyond[8] = { 0 };
        beyond[k.x->shape[0] - 1] = i ? -1 : (int32_t)k.x->shape[1] + 1;
        d.lengths = mixp_input(k.ctx, MIXP_I32, 1, k.x->shape, beyond);
        refused(k.ctx, recurrent(k.ctx, k.x, NULL, NULL, k.w, &d), MIXP_ERR_ARGUMENT, "below 0 or above t");
    }
    d.lengths = NULL;
    d.layers = -1;
    refused(k.ctx, recurrent(k.ctx, k.x, NULL, NULL, k.w, &d), MIXP_ERR_ARGUMENT, "layers is not negative");
    d.layers = 0;
    d.kind = (recurrent_kind)4;
    refused(k.ctx, recurrent(k.ctx, k.x, NULL, NULL, k.w, &d), MIXP_ERR_ARGUMENT, "kind is a recurrent_kind");
    d.kind = RECURRENT_GRU;
    d.w_proj = k.proj;
    refused(k.ctx, recurrent(k.ctx, k.x, NULL, NULL, k.w, &d), MIXP_ERR_ARGUMENT, "only an LSTM has w_proj");
    refused(k.ctx, recurrent(k.ctx, NULL, NULL, NULL, k.w, NULL), MIXP_ERR_ARGUMENT, "recurrent: x is NULL");
    mixp_context_free(k.ctx);
}

/* A dropout that mixp_dropout refuses is refused, also where no layer follows. 1 is valid there, and here. */
static void refused_dropout(void) {
    const float    wrong[4] = { -1.0f, 1.5f, INFINITY, NAN };
    recurrent_desc d;
    network        k;
    network_open(&k, &network_cases[0]);
    memset(&d, 0, sizeof d);
    d.kind = (recurrent_kind)k.n->kind;
    d.bidirectional = k.n->two;
    mixp_step_begin(k.ctx);
    for (int i = 0; i < 8; i++) {
        d.layers = i < 4 ? 1 : k.n->layers;
        d.dropout = wrong[i % 4];
        refused(k.ctx, recurrent(k.ctx, k.x, NULL, NULL, k.w, &d), MIXP_ERR_ARGUMENT, "dropout is in [0, 1]");
    }
    d.layers = 1;
    d.dropout = 1.0f;
    CHECK(recurrent(k.ctx, k.x, NULL, NULL, k.w, &d) != NULL);
    d.dropout = -0.0f;
    CHECK(recurrent(k.ctx, k.x, NULL, NULL, k.w, &d) != NULL);
    CHECK_INT(mixp_context_error(k.ctx, NULL), MIXP_OK);
    mixp_context_free(k.ctx);
}

/* An error leaves h and c as they are, in a layer and in a cell. */
static void an_error_keeps_the_state(void) {
    for (int at = 0; at < 3; at++) {
        layer        l;
        layer_open(&l, at == 1 ? 3 : 4);
        mixp_step_begin(l.ctx);
        mixp_tensor *h = l.h;
        mixp_tensor *c = l.c;
        l.w.w_h = l.w.w_x;                      /* of IN columns, which h does not have */
        if (at == 0) CHECK(lstm_layer(l.ctx, l.x, &h, &c, &l.w) == NULL);
        if (at == 1) CHECK(gru_layer(l.ctx, l.x, &h, &l.w) == NULL);
        if (at == 2) CHECK(lstm_cell(l.ctx, recurrent_at(l.ctx, l.x, 0), h, &c, &l.w) == NULL);
        CHECK_INT(mixp_context_error(l.ctx, NULL), MIXP_ERR_SHAPE);
        CHECK(h == l.h && c == l.c);
        mixp_context_free(l.ctx);
    }
}

/* Also where the gates' products are valid, and only the sum with c is not. */
static void a_wrong_c_is_kept(void) {
    const int64_t three[2] = { BATCH, HIDDEN + 1 };
    mixp_tensor  *h, *c, *wrong;
    layer         l;
    layer_open(&l, 4);
    mixp_step_begin(l.ctx);
    h = l.h;
    c = wrong = mixp_full(l.ctx, MIXP_F32, 2, three, 0);
    CHECK(lstm_layer(l.ctx, l.x, &h, &c, &l.w) == NULL);
    CHECK(h == l.h && c == wrong);
    mixp_context_clear_error(l.ctx);
    CHECK(lstm_cell(l.ctx, recurrent_at(l.ctx, l.x, 0), h, &c, &l.w) == NULL);
    CHECK(c == wrong);
    mixp_context_free(l.ctx);
}

/* --- a carried state and skipped steps --------------------------------------------------------- */

enum { NET_ROWS = 4, NET_WIDTH = 8, NET_CLASSES = 3, NET_STEPS = 120, NET_LARGE = 50 };

/* A cell h' = f(wx x + wh h), whose h is a buffer; f is relu, or a norm and tanh. The batch NET_LARGE is 40,000 times too large: its
 * product overflows fp16, and f32 does not mind. */
typedef struct net {
    mixp_context   *ctx;
    mixp_tensor    *wx, *wh, *wo, *h;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_dtype      dtype;
    int             bounded, steps, tries;
    double          loss;
    float           x[NET_ROWS * NET_WIDTH], state[NET_ROWS * NET_WIDTH];
    int32_t         label[NET_ROWS];
} net;

static void net_open(net *n, mixp_dtype dtype, int bounded, float scale) {
    const int64_t square[2] = { NET_WIDTH, NET_WIDTH }, out[2] = { NET_CLASSES, NET_WIDTH };
    const int64_t shape[2] = { NET_ROWS, NET_WIDTH };
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_scaler_desc d;
    memset(n, 0, sizeof *n);
    memset(&d, 0, sizeof d);
    n->ctx = mixp_context_new(NULL);
    n->dtype = dtype;
    n->bounded = bounded;
    n->wx = mixp_param(n->ctx, "wx", MIXP_F32, 2, square);
    n->wh = mixp_param(n->ctx, "wh", MIXP_F32, 2, square);
    n->wo = mixp_param(n->ctx, "wo", MIXP_F32, 2, out);
    n->h = mixp_buffer(n->ctx, "h", MIXP_F32, 2, shape);
    mixp_init_all(n->ctx, "w*", mixp_init_xavier_normal, 0.8);
    adamw.lr = 0.003;
    adamw.max_norm = 1;
    d.init_scale = scale;
    n->scaler = mixp_scaler_new(n->ctx, &d);
    n->opt = mixp_optimizer_new(n->ctx, &adamw);
    mixp_optimizer_add_all(n->opt, "w*");
    mixp_guard_start(n->ctx, NULL);
}

static void net_batch(net *n, int step) {
    for (int i = 0; i < NET_ROWS * NET_WIDTH; i++) {
        const int row = i / NET_WIDTH;
        n->label[row] = (row + step / 7) % NET_CLASSES;
        n->x[i] = (float)((i * 37 + step * 11) % 64) / 64.0f + (i % NET_WIDTH == n->label[row] ? 0.5f : 0.0f);
        if (step == NET_LARGE) n->x[i] *= 40000.0f;
    }
}

static mixp_tensor *net_loss(net *n, mixp_tensor **new_state) {
    const int64_t shape[2] = { NET_ROWS, NET_WIDTH }, rows[1] = { NET_ROWS };
    mixp_tensor  *next = NULL, *loss = NULL;
    MIXP_AUTOCAST(n->ctx, n->dtype) {
        next = mixp_linear(n->ctx, mixp_input(n->ctx, MIXP_F32, 2, shape, n->x), n->wx, NULL);
        next = mixp_add(n->ctx, next, mixp_linear(n->ctx, n->h, n->wh, NULL));
        if (n->bounded) next = mixp_tanh(n->ctx, mixp_rms_norm(n->ctx, next, NULL, 1e-5f));
        else next = mixp_relu(n->ctx, next);
        loss = mixp_linear(n->ctx, mixp_rms_norm(n->ctx, next, NULL, 1e-5f), n->wo, NULL);
        loss = mixp_cross_entropy(n->ctx, loss, mixp_input(n->ctx, MIXP_I32, 1, rows, n->label), MIXP_IGNORE);
    }
    if (new_state) *new_state = next;
    return loss;
}

/* One try. Returns the new state. */
static mixp_tensor *net_try(net *n) {
    mixp_tensor *next = NULL, *loss;
    mixp_step_begin(n->ctx);
    mixp_zero_grad(n->opt);
    loss = net_loss(n, &next);
    mixp_backward(n->ctx, mixp_scaler_scale(n->scaler, loss));
    mixp_copy(n->h, next);
    mixp_scaler_step(n->scaler, n->opt);
    mixp_scaler_update(n->scaler);
    n->loss = mixp_item(loss);
    return next;
}

/* After each try the buffer has the new state, or the bytes from before a step that was skipped. */
static void net_step(net *n, int step, int tries) {
    float before[NET_ROWS * NET_WIDTH], after[NET_ROWS * NET_WIDTH];
    net_batch(n, step);
    CHECK_INT(mixp_read(n->h, before, MIXP_F32, NET_ROWS * NET_WIDTH), MIXP_OK);
    do {
        mixp_tensor *next = net_try(n);
        const int    skipped = mixp_scaler_verdict(n->scaler).outcome == MIXP_STEP_SKIPPED;
        CHECK_INT(mixp_read(next, after, MIXP_F32, NET_ROWS * NET_WIDTH), MIXP_OK);
        CHECK_INT(mixp_read(n->h, n->state, MIXP_F32, NET_ROWS * NET_WIDTH), MIXP_OK);
        CHECK(memcmp(n->state, skipped ? before : after, sizeof before) == 0);
        n->tries++;
    } while (tries && mixp_retry(n->scaler, tries));
}

static void net_train(net *n, mixp_dtype dtype, int bounded, float scale, int tries) {
    net_open(n, dtype, bounded, scale);
    for (n->steps = 0; n->steps < NET_STEPS; n->steps++) net_step(n, n->steps, tries);
    CHECK_INT(mixp_context_error(n->ctx, NULL), MIXP_OK);
    CHECK_TEXT(mixp_context_warning(n->ctx), "");
}

/* fp16 with guard and retry applies each step, and ends as f32 does, also if the scale is too large at first. */
static void a_state_survives_an_overflow(void) {
    for (int i = 0; i < 4; i++) {
        net f32, f16;
        net_train(&f32, MIXP_F32, i & 1, 1024, 3);
        net_train(&f16, MIXP_F16, i & 1, i & 2 ? 16777216.0f : 1024.0f, 20);
        CHECK_INT(f32.tries, NET_STEPS);
        CHECK(f16.tries > NET_STEPS);
        CHECK_INT(mixp_scaler_verdict(f16.scaler).applied, NET_STEPS);
        CHECK_NEAR(f16.loss, f32.loss, 1e-2);
        for (int k = 0; k < NET_ROWS * NET_WIDTH; k++) CHECK_NEAR((double)f16.state[k], (double)f32.state[k], 2e-2);
        mixp_context_free(f32.ctx);
        mixp_context_free(f16.ctx);
    }
}

/* Without mixp_retry the large batch is skipped, and the state goes on from before it. */
static void a_skipped_batch_moves_no_state(void) {
    for (int i = 0; i < 2; i++) {
        net n;
        net_train(&n, MIXP_F16, i, 1024, 0);
        CHECK(mixp_scaler_verdict(n.scaler).skipped > 0);
        CHECK(fabs(n.loss) < 10);
        mixp_context_free(n.ctx);
    }
}

static int count_sites(const net *n) {
    mixp_site_info info;
    int            count = 0;
    while (mixp_site(n->ctx, count, &info)) count++;
    return count;
}

/* A guard that has learned which products overflow in training knows them in an evaluation that begins with zeros: a
 * buffer is data, as the zeros are. */
static void an_evaluation_from_zeros_has_the_sites_of_training(void) {
    const int64_t shape[2] = { NET_ROWS, NET_WIDTH };
    const float   zeros[NET_ROWS * NET_WIDTH] = { 0 };
    net           n;
    net_open(&n, MIXP_F16, 1, 1024);
    for (int i = 0; i < 6; i++) {
        net_batch(&n, NET_LARGE);
        do net_try(&n);
        while (mixp_retry(n.scaler, 20));
    }
    CHECK(mixp_scaler_verdict(n.scaler).skipped > 0);
    int sites = count_sites(&n);
    mixp_tensor *carried = n.h;
    mixp_eval_begin(n.ctx);
    n.h = mixp_input(n.ctx, MIXP_F32, 2, shape, zeros);
    MIXP_NO_GRAD(n.ctx) CHECK(fabs(mixp_item(net_loss(&n, NULL))) < 10);
    n.h = carried;
    CHECK_INT(count_sites(&n), sites);
    CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
    mixp_context_free(n.ctx);
}

int main(void) {
    RUN(lstm);
    RUN(gru);
    RUN(differences);
    RUN(carried);
    RUN(networks_beside_pytorch);
    RUN(states_under_autocast);
    RUN(a_long_sequence);
    RUN(dropout_between_layers);
    RUN(an_empty_batch);
    RUN(refusals);
    RUN(refused_dropout);
    RUN(an_error_keeps_the_state);
    RUN(a_wrong_c_is_kept);
    RUN(a_state_survives_an_overflow);
    RUN(a_skipped_batch_moves_no_state);
    RUN(an_evaluation_from_zeros_has_the_sites_of_training);
    return test_report();
}
