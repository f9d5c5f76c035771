/* recurrent.h - LSTM and GRU for mixprec, made of its operators.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include it behind mixprec.h. Gates lie as PyTorch's (LSTM: input, forget, cell, output; GRU: reset, update, new), so
 * that weights of torch.nn.LSTM and GRU fit by name. A function returns NULL on an error, which stays in the context.
 *
 * A state that goes on into the next step is a buffer, because a tensor of the last step is refused:
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

/* For a layer of `hidden`: w_x[gates hidden, in], w_h[gates hidden, hidden], b_x and b_h[gates hidden], both or none. */
typedef struct recurrent_weights { mixp_tensor *w_x, *w_h, *b_x, *b_h; } recurrent_weights;

RECURRENT_API mixp_tensor *lstm_cell(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, mixp_tensor **c,
                                     const recurrent_weights *w);
RECURRENT_API mixp_tensor *gru_cell(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, const recurrent_weights *w);
RECURRENT_API mixp_tensor *lstm_layer(mixp_context *ctx, mixp_tensor *x, mixp_tensor **h, mixp_tensor **c,
                                      const recurrent_weights *w);
RECURRENT_API mixp_tensor *gru_layer(mixp_context *ctx, mixp_tensor *x, mixp_tensor **h, const recurrent_weights *w);

#ifndef RECURRENT_NO_IMPLEMENTATION

/* From what x gives to the gates, x_gates[b, 4 hidden], and the state h, c [b, hidden]: the new ones. */
static mixp_tensor *lstm_gates(mixp_context *ctx, mixp_tensor *x_gates, mixp_tensor *h, mixp_tensor **c,
                               const recurrent_weights *w) {
    mixp_tensor *part[4] = { NULL, NULL, NULL, NULL };
    mixp_tensor *gates = mixp_add(ctx, x_gates, mixp_linear(ctx, h, w->w_h, w->b_h));
    if (mixp_split(ctx, gates, -1, 4, part) != MIXP_OK) return NULL;
    *c = mixp_add(ctx, mixp_mul(ctx, mixp_sigmoid(ctx, part[1]), *c),
                  mixp_mul(ctx, mixp_sigmoid(ctx, part[0]), mixp_tanh(ctx, part[2])));
    return mixp_mul(ctx, mixp_sigmoid(ctx, part[3]), mixp_tanh(ctx, *c));
}

/* torch.nn.LSTMCell: x[b, in], h[b, hidden]; *c is the cell's state before, and after. Returns the new h. */
RECURRENT_API mixp_tensor *lstm_cell(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, mixp_tensor **c,
                                     const recurrent_weights *w)
{ return lstm_gates(ctx, mixp_linear(ctx, x, w->w_x, w->b_x), h, c, w); }

static mixp_tensor *gru_gates(mixp_context *ctx, mixp_tensor *x_gates, mixp_tensor *h, const recurrent_weights *w) {
    mixp_tensor *x[3] = { NULL, NULL, NULL }, *s[3] = { NULL, NULL, NULL }, *reset, *update, *fresh;
    if (mixp_split(ctx, x_gates, -1, 3, x) != MIXP_OK) return NULL;
    if (mixp_split(ctx, mixp_linear(ctx, h, w->w_h, w->b_h), -1, 3, s) != MIXP_OK) return NULL;
    reset = mixp_sigmoid(ctx, mixp_add(ctx, x[0], s[0]));
    update = mixp_sigmoid(ctx, mixp_add(ctx, x[1], s[1]));
    fresh = mixp_tanh(ctx, mixp_add(ctx, x[2], mixp_mul(ctx, reset, s[2])));
    return mixp_add(ctx, fresh, mixp_mul(ctx, update, mixp_sub(ctx, h, fresh)));
}

/* torch.nn.GRUCell: x[b, in], h[b, hidden]. Returns the new h. */
RECURRENT_API mixp_tensor *gru_cell(mixp_context *ctx, mixp_tensor *x, mixp_tensor *h, const recurrent_weights *w)
{ return gru_gates(ctx, mixp_linear(ctx, x, w->w_x, w->b_x), h, w); }

/* Position t of x[b, t, n], as [b, n]. */
static mixp_tensor *recurrent_at(mixp_context *ctx, mixp_tensor *x, int64_t t) {
    int64_t shape[2];
    if (!x) return NULL;
    shape[0] = x->shape[0];
    shape[1] = x->shape[2];
    return mixp_reshape(ctx, mixp_slice(ctx, x, 1, t, 1), 2, shape);
}

/* A layer along x[b, t, in]: all its h, [b, t, hidden]. *h and *c (c NULL: GRU) are the state before, and after. At
 * most 1,024 positions. The weights of x meet all positions in one product. */
static mixp_tensor *recurrent_layer(mixp_context *ctx, mixp_tensor *x, mixp_tensor **h, mixp_tensor **c,
                                    const recurrent_weights *w) {
    mixp_tensor *all[1024], *gates;
    int64_t shape[3], t;
    if (!x || x->rank != 3 || x->shape[1] > 1024) {
        if (x) mixp_context_fail(ctx, MIXP_ERR_SHAPE, "a recurrent layer takes x[b, t, in] with t of at most 1024");
        return NULL;
    }
    gates = mixp_linear(ctx, x, w->w_x, w->b_x);
    for (t = 0; t < x->shape[1]; t++) {
        mixp_tensor *now = recurrent_at(ctx, gates, t);
        *h = c ? lstm_gates(ctx, now, *h, c, w) : gru_gates(ctx, now, *h, w);
        if (!*h) return NULL;
        shape[0] = (*h)->shape[0];
        shape[1] = 1;
        shape[2] = (*h)->shape[1];
        all[t] = mixp_reshape(ctx, *h, 3, shape);
    }
    return mixp_concat(ctx, (int)x->shape[1], all, 1);
}

/* torch.nn.LSTM and GRU of one layer, batch first. */
RECURRENT_API mixp_tensor *lstm_layer(mixp_context *ctx, mixp_tensor *x, mixp_tensor **h, mixp_tensor **c,
                                      const recurrent_weights *w) { return recurrent_layer(ctx, x, h, c, w); }
RECURRENT_API mixp_tensor *gru_layer(mixp_context *ctx, mixp_tensor *x, mixp_tensor **h, const recurrent_weights *w)
{ return recurrent_layer(ctx, x, h, NULL, w); }

#endif  /* RECURRENT_NO_IMPLEMENTATION */
#endif
