/* recurrent.h - LSTM, GRU and plain RNN for mixprec, made of its operators.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include this file after mixprec.h. Gates are in PyTorch's order (LSTM: input, forget, cell, output; GRU: reset,
 * update, new), so that weights of torch.nn.LSTM, GRU and RNN fit by name. A function returns NULL on an error, which
 * stays in the context.
 *
 * Under autocast h has the dtype of the products, as in PyTorch's cells. An LSTM's c keeps the dtype of the c that you
 * pass; a c of zeros that the layer makes is f32. PyTorch's c is low: c is a sum over time, and in fp16 it loses terms
 * below 2^-11 of its value. For PyTorch's behaviour pass a low c.
 *
 * A state that continues into the next step is a buffer, because a tensor of the last step is refused:
 *
 *     mixp_tensor *h0 = mixp_buffer(ctx, "lstm.h", MIXP_F32, 2, shape);      before the loop: [b, hidden], 0 at first
 *     mixp_tensor *c0 = mixp_buffer(ctx, "lstm.c", MIXP_F32, 2, shape);
 *     h = h0, c = c0;
 *     y = lstm_layer(ctx, x, &h, &c, &w);
 *     mixp_backward(ctx, mixp_scaler_scale(scaler, loss));                   reads h0 and c0
 *     mixp_copy(h0, h);
 *     mixp_copy(c0, c);                                                      both before mixp_scaler_update
 *
 * If the update skips the step, or mixp_retry repeats it, h0 and c0 are what they were: each batch moves the state
 * once. mixp_fill(h0, 0) between two steps begins a new sequence. See BUFFERS in mixprec.h, and examples/11_state.c. */
#ifndef RECURRENT_H
#define RECURRENT_H

/* To export the functions from a library, define RECURRENT_API as what declares them, such as extern, before one file
 * of the library includes this file. Its users define the same RECURRENT_API and RECURRENT_NO_IMPLEMENTATION. */
#if defined(RECURRENT_API)
#elif defined(__GNUC__)
#  define RECURRENT_API static __attribute__((__unused__))
#else
#  define RECURRENT_API static
#endif

/* For a layer of `hidden`, with 4 gates (LSTM), 3 (GRU) or 1 (RNN): w_x[gates hidden, in], w_h[gates hidden, hidden],
 * b_x and b_h[gates hidden], both or none. */
typedef struct recurrent_weights { mixp_tensor *w_x, *w_h, *b_x, *b_h; } recurrent_weights;

typedef enum recurrent_kind {
    RECURRENT_LSTM, RECURRENT_GRU,
    RECURRENT_TANH, RECURRENT_RELU      /* torch.nn.RNN, by its nonlinearity                                 */
} recurrent_kind;

/* Zeroed: an LSTM of one layer. */
typedef struct recurrent_desc {
    recurrent_kind kind;
    int            layers;              /* 0 = 1                                                             */
    int            bidirectional;       /* 1: two directions a layer; results lie side by side               */
    float          dropout;             /* between layers, in [0, 1]; 0 when not training                    */
    mixp_tensor   *lengths;             /* i32 [b]: valid positions of each sequence; the results after them are 0 and
                                           do not change the state, as with pack_padded_sequence. NULL = all */
    mixp_tensor *const *w_proj;         /* LSTM with proj_size: PyTorch's weight_hr[proj, hidden], one for each layer
                                           and direction. h is [b, proj], w_h[gates hidden, proj]. NULL: none */
} recurrent_desc;

RECURRENT_API mixp_tensor *lstm_cell(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, mixp_tensor **c,
                                     const recurrent_weights *w);
RECURRENT_API mixp_tensor *gru_cell(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, const recurrent_weights *w);
RECURRENT_API mixp_tensor *rnn_cell(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, const recurrent_weights *w,
                                    int relu);
RECURRENT_API mixp_tensor *lstm_layer(mixp_context *ctx, mixp_tensor *x, mixp_tensor **h, mixp_tensor **c,
                                      const recurrent_weights *w);
RECURRENT_API mixp_tensor *gru_layer(mixp_context *ctx, mixp_tensor *x, mixp_tensor **h, const recurrent_weights *w);
RECURRENT_API mixp_tensor *recurrent(mixp_context *ctx, mixp_tensor *x, mixp_tensor **h, mixp_tensor **c,
                                     const recurrent_weights *w, const recurrent_desc *desc);

#ifndef RECURRENT_NO_IMPLEMENTATION

/* h in the dtype of the products. */
static mixp_tensor *recurrent_low(mixp_context *ctx, mixp_tensor *h, const mixp_tensor *product)
{ return h && product && h->dtype != product->dtype ? mixp_cast(ctx, h, product->dtype) : h; }

/* Is one of the pointers that a cell needs NULL? */
static int recurrent_missing(mixp_context *ctx, const char *name, const void *x, const void *h, const void *c,
                             const void *w) {
    if (x && h && c && w) return 0;
    mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "%s: %s is NULL", name, !x ? "x" : !h ? "h" : !c ? "c" : "w");
    return 1;
}

/* From x's part of the gates, x_gates[b, 4 hidden], and the state h [b, hidden or proj], c [b, hidden]: the
 * new state. */
static mixp_tensor *lstm_gates(mixp_context *ctx, mixp_tensor *x_gates, mixp_tensor *h, mixp_tensor **c,
                               const recurrent_weights *w, mixp_tensor *w_proj) {
    mixp_tensor *part[4] = { NULL, NULL, NULL, NULL }, *next;
    mixp_tensor *gates = mixp_add(ctx, x_gates, mixp_linear(ctx, h, w->w_h, w->b_h));
    if (mixp_split(ctx, gates, -1, 4, part) != MIXP_OK) return NULL;
    next = mixp_add(ctx, mixp_mul(ctx, mixp_sigmoid(ctx, part[1]), *c),
                    mixp_mul(ctx, mixp_sigmoid(ctx, part[0]), mixp_tanh(ctx, part[2])));
    h = recurrent_low(ctx, mixp_mul(ctx, mixp_sigmoid(ctx, part[3]), mixp_tanh(ctx, next)), gates);
    if (w_proj) h = mixp_linear(ctx, h, w_proj, NULL);
    if (h) *c = next;
    return h;
}

/* torch.nn.LSTMCell: x[b, in], h[b, hidden]; *c is the cell's state before, and after. Returns the new h. An
 * error leaves *c as it is. MIXP_ERR_ARGUMENT: a pointer is NULL. */
RECURRENT_API mixp_tensor *lstm_cell(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, mixp_tensor **c,
                                     const recurrent_weights *w)
{
    if (recurrent_missing(ctx, "lstm_cell", x, h, c, w)) return NULL;
    return lstm_gates(ctx, mixp_linear(ctx, x, w->w_x, w->b_x), h, c, w, NULL);
}

static mixp_tensor *gru_gates(mixp_context *ctx, mixp_tensor *x_gates, mixp_tensor *h, const recurrent_weights *w) {
    mixp_tensor *x[3] = { NULL, NULL, NULL }, *s[3] = { NULL, NULL, NULL }, *reset, *update, *fresh;
    if (mixp_split(ctx, x_gates, -1, 3, x) != MIXP_OK) return NULL;
    if (mixp_split(ctx, mixp_linear(ctx, h, w->w_h, w->b_h), -1, 3, s) != MIXP_OK) return NULL;
    reset = mixp_sigmoid(ctx, mixp_add(ctx, x[0], s[0]));
    update = mixp_sigmoid(ctx, mixp_add(ctx, x[1], s[1]));
    fresh = mixp_tanh(ctx, mixp_add(ctx, x[2], mixp_mul(ctx, reset, s[2])));
    h = mixp_add(ctx, fresh, mixp_mul(ctx, update, mixp_sub(ctx, h, fresh)));
    return recurrent_low(ctx, h, fresh);
}

/* torch.nn.GRUCell: x[b, in], h[b, hidden]. Returns the new h. MIXP_ERR_ARGUMENT: a pointer is NULL. */
RECURRENT_API mixp_tensor *gru_cell(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, const recurrent_weights *w)
{ return recurrent_missing(ctx, "gru_cell", x, h, x, w) ? NULL : gru_gates(ctx, mixp_linear(ctx, x, w->w_x, w->b_x), h, w); }

static mixp_tensor *rnn_gates(mixp_context *ctx, mixp_tensor *x_gates, mixp_tensor *h, const recurrent_weights *w,
                              int relu) {
    h = mixp_add(ctx, x_gates, mixp_linear(ctx, h, w->w_h, w->b_h));
    return relu ? mixp_relu(ctx, h) : mixp_tanh(ctx, h);
}

/* torch.nn.RNNCell: x[b, in], h[b, hidden]. Returns the new h: tanh, or with relu 1 max(0, ...), of w_x x + w_h h.
 * MIXP_ERR_ARGUMENT: a pointer is NULL. */
RECURRENT_API mixp_tensor *rnn_cell(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, const recurrent_weights *w,
                                    int relu)
{
    if (recurrent_missing(ctx, "rnn_cell", x, h, x, w)) return NULL;
    return rnn_gates(ctx, mixp_linear(ctx, x, w->w_x, w->b_x), h, w, relu);
}

/* Position t of x[b, t, n], as [b, n]. */
static mixp_tensor *recurrent_at(mixp_context *ctx, mixp_tensor *x, int64_t t) {
    int64_t shape[2];
    if (!x) return NULL;
    shape[0] = x->shape[0];
    shape[1] = x->shape[2];
    return mixp_reshape(ctx, mixp_slice(ctx, x, 1, t, 1), 2, shape);
}

/* Results of positions, joined in the order in which they come: 256 at a time, at most 65,536. */
enum { RECURRENT_PIECE = 256 };
typedef struct recurrent_results {
    mixp_tensor *at[RECURRENT_PIECE], *piece[RECURRENT_PIECE];
    int          count, pieces;
} recurrent_results;

static void recurrent_keep(mixp_context *ctx, recurrent_results *r, mixp_tensor *y) {
    r->at[r->count++] = mixp_unsqueeze(ctx, y, 1);
    if (r->count < RECURRENT_PIECE) return;
    r->piece[r->pieces++] = mixp_concat(ctx, r->count, r->at, 1);
    r->count = 0;
}

static mixp_tensor *recurrent_joined(mixp_context *ctx, recurrent_results *r) {
    if (r->count) r->piece[r->pieces++] = mixp_concat(ctx, r->count, r->at, 1);
    return r->pieces == 1 ? r->piece[0] : mixp_concat(ctx, r->pieces, r->piece, 1);
}

/* A layer in one direction. */
typedef struct recurrent_line {
    recurrent_kind kind;
    const recurrent_weights *w;
    mixp_tensor   *w_proj;              /* NULL: none                                                        */
    mixp_tensor   *h, *c;               /* the state                                                         */
    mixp_tensor   *lengths;
    int            backward;
} recurrent_line;

static mixp_tensor *recurrent_step(mixp_context *ctx, recurrent_line *l, mixp_tensor *x_gates) {
    if (l->kind == RECURRENT_LSTM) return lstm_gates(ctx, x_gates, l->h, &l->c, l->w, l->w_proj);
    if (l->kind == RECURRENT_GRU) return gru_gates(ctx, x_gates, l->h, l->w);
    return rnn_gates(ctx, x_gates, l->h, l->w, l->kind == RECURRENT_RELU);
}

/* Steps at position t. Sequences that have ended keep their state, and their result is 0. */
static mixp_tensor *recurrent_masked(mixp_context *ctx, recurrent_line *l, mixp_tensor *x_gates, int64_t t) {
    const int64_t one[2] = { 1, 1 };
    mixp_tensor  *h = l->h, *c = l->c, *valid, *none;
    l->h = recurrent_step(ctx, l, x_gates);
    if (!l->lengths || !l->h) return l->h;
    valid = mixp_gt(ctx, mixp_unsqueeze(ctx, l->lengths, 1), mixp_full(ctx, MIXP_I32, 2, one, (double)t));
    none = mixp_full(ctx, l->h->dtype, 2, one, 0);
    if (c) l->c = mixp_where(ctx, valid, l->c, c);
    x_gates = mixp_where(ctx, valid, l->h, none);
    l->h = mixp_where(ctx, valid, l->h, recurrent_low(ctx, h, l->h));
    return x_gates;
}

/* All h of x[b, t, in]: [b, t, hidden]. The weights of x meet all positions in one product. */
static mixp_tensor *recurrent_run(mixp_context *ctx, mixp_tensor *x, recurrent_line *l) {
    mixp_tensor      *gates = mixp_linear(ctx, x, l->w->w_x, l->w->b_x), *y;
    recurrent_results all;
    int64_t           i;
    all.count = all.pieces = 0;
    for (i = 0; i < x->shape[1]; i++) {
        const int64_t t = l->backward ? x->shape[1] - 1 - i : i;
        y = recurrent_masked(ctx, l, recurrent_at(ctx, gates, t), t);
        if (!y) return NULL;
        recurrent_keep(ctx, &all, y);
    }
    y = recurrent_joined(ctx, &all);
    return l->backward ? mixp_flip(ctx, y, 1) : y;
}

static mixp_tensor *recurrent_zeros(mixp_context *ctx, const mixp_tensor *x, const mixp_tensor *w, int dim) {
    int64_t shape[2];
    if (!w || w->rank != 2) return NULL;
    shape[0] = x->shape[0];
    shape[1] = w->shape[dim];
    return mixp_full(ctx, MIXP_F32, 2, shape, 0);
}

/* Runs direction i of a network; h and c may be NULL. */
static mixp_tensor *recurrent_direction(mixp_context *ctx, mixp_tensor *x, recurrent_line *l, mixp_tensor **h,
                                        mixp_tensor **c) {
    mixp_tensor *y;
    l->h = h ? *h : recurrent_zeros(ctx, x, l->w->w_h, 1);
    l->c = NULL;
    if (l->kind == RECURRENT_LSTM)
        l->c = c ? *c : recurrent_zeros(ctx, x, l->w_proj ? l->w_proj : l->w->w_h, 1);
    y = recurrent_run(ctx, x, l);
    if (y && h) *h = l->h;
    if (y && c) *c = l->c;
    return y;
}

/* Looks where lengths are in host memory: on a GPU a look would wait for the device. */
static int recurrent_lengths_fit(mixp_context *ctx, const mixp_tensor *x, const mixp_tensor *lengths) {
    int64_t i;
    if (!lengths || mixp_context_device(ctx)->download) return 1;
    for (i = 0; i < lengths->count; i++) {
        const int32_t length = ((const int32_t *)lengths->data)[i];
        if (length < 0 || length > x->shape[1]) return 0;
    }
    return 1;
}

static int recurrent_refused(mixp_context *ctx, const mixp_tensor *x, const recurrent_desc *d) {
    const char *wrong = NULL;
    if (x->rank != 3 || x->shape[1] > RECURRENT_PIECE * RECURRENT_PIECE)
        wrong = "x is [b, t, in] with t of at most 65536";
    if (d->lengths && (d->lengths->rank != 1 || d->lengths->dtype != MIXP_I32 || d->lengths->count != x->shape[0]))
        wrong = "lengths is i32 [b], one length for each sequence of x";
    if (wrong) mixp_context_fail(ctx, MIXP_ERR_SHAPE, "recurrent: %s (the rank of x is %d)", wrong, x->rank);
    if (wrong) return 1;
    if (d->layers < 0 || (int)d->kind < 0 || d->kind > RECURRENT_RELU)
        wrong = "layers is not negative, and kind is a recurrent_kind";
    if (d->dropout != 0.0f && mixp_bits_of_f32(d->dropout) > 0x3F800000u)  /* bits: NaN, negative, above 1 */
        wrong = "dropout is in [0, 1]";
    if (d->w_proj && d->kind != RECURRENT_LSTM) wrong = "only an LSTM has w_proj";
    if (!recurrent_lengths_fit(ctx, x, d->lengths)) wrong = "a length is below 0 or above t";
    if (wrong) mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "recurrent: %s", wrong);
    return wrong != NULL;
}

/* torch.nn.LSTM, GRU and RNN, batch first: x[b, t, in] to y[b, t, directions * hidden] (or proj) of the last layer.
 * w, h and c: one for each layer and direction, in PyTorch's order: layer 0, layer 0 backward, layer 1 ... h[i] and
 * c[i] (LSTM only) are the states before, [b, hidden], and after. h or c NULL: zeros before, not returned after. desc
 * NULL: as zeroed. Dropout follows the result of each layer but the last. MIXP_ERR_SHAPE: x is not of rank 3, more
 * than 65,536 positions, lengths or weights that do not fit. MIXP_ERR_ARGUMENT: x or w is NULL, an unknown kind, w_proj of
 * another kind than LSTM, or dropout outside [0, 1]. After an error each of h and c is a tensor still: the state before, or
 * after where its layer and direction had ended. */
RECURRENT_API mixp_tensor *recurrent(mixp_context *ctx, mixp_tensor *x, mixp_tensor **h, mixp_tensor **c,
                                     const recurrent_weights *w, const recurrent_desc *desc) {
    recurrent_desc d;
    recurrent_line line;
    int            layer, way, ways;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (recurrent_missing(ctx, "recurrent", x, x, x, w) || recurrent_refused(ctx, x, &d)) return NULL;
    ways = d.bidirectional ? 2 : 1;
    line.kind = d.kind;
    line.lengths = d.lengths;
    for (layer = 0; x && layer < (d.layers ? d.layers : 1); layer++) {
        mixp_tensor *y[2] = { NULL, NULL };
        if (layer && d.dropout != 0.0f) x = mixp_dropout(ctx, x, d.dropout, 1);
        for (way = 0; x && way < ways; way++) {
            const int i = layer * ways + way;
            line.w = w + i;
            line.w_proj = d.w_proj ? d.w_proj[i] : NULL;
            line.backward = way;
            y[way] = recurrent_direction(ctx, x, &line, h ? h + i : NULL, c ? c + i : NULL);
        }
        x = ways == 1 ? y[0] : mixp_concat(ctx, 2, y, 2);
    }
    return x;
}

/* torch.nn.LSTM and GRU of one layer, batch first: recurrent in short. */
RECURRENT_API mixp_tensor *lstm_layer(mixp_context *ctx, mixp_tensor *x, mixp_tensor **h, mixp_tensor **c,
                                      const recurrent_weights *w) { return recurrent(ctx, x, h, c, w, NULL); }
RECURRENT_API mixp_tensor *gru_layer(mixp_context *ctx, mixp_tensor *x, mixp_tensor **h, const recurrent_weights *w) {
    recurrent_desc d;
    memset(&d, 0, sizeof d);
    d.kind = RECURRENT_GRU;
    return recurrent(ctx, x, h, NULL, w, &d);
}

#endif  /* RECURRENT_NO_IMPLEMENTATION */
#endif
