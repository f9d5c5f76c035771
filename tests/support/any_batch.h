/* any_batch.h - a row's result does not depend on the rows beside it: each operator that models are
 * made of computes a batch in a training step, and then parts of it in an evaluation: sequences,
 * single rows, prefixes, and queries beside a cache of keys and values. Every bit must be the same.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include it after mixprec.h, test.h, operators.h, shared_work.h, examples/conv.h and examples/recurrent.h.
 */
enum { AB_BATCH = 3, AB_TIME = 71, AB_WIDTH = 48, AB_HEADS = 4, AB_DEEP = 401, AB_VOCAB = 13,
       AB_ROWS = AB_BATCH * AB_TIME, AB_SIDE = 6, AB_MOST = AB_ROWS * AB_DEEP };

/* How results are computed. low: the inputs and at level 3 the weights are stored in dtype. */
typedef struct ab_mode {
    const char *name;
    mixp_dtype  dtype;
    int         level;
} ab_mode;
static const ab_mode ab_modes[] = {
    { "f32", MIXP_F32, 0 },
    { "f16, level 1", MIXP_F16, 1 },  { "f16, level 2", MIXP_F16, 2 },
    { "bf16, level 1", MIXP_BF16, 1 }, { "bf16, level 2", MIXP_BF16, 2 }, { "bf16, level 3", MIXP_BF16, 3 }
};
enum { AB_MODES = sizeof ab_modes / sizeof *ab_modes };

/* Sequences [b, b + nb) and their tokens [t, t + nt). */
typedef struct ab_part { int64_t b, nb, t, nt; } ab_part;

/* A context with the weights, and the inputs of one part of the batch. */
typedef struct ab_net {
    mixp_context *ctx;
    const ab_mode *mode;
    mixp_tensor  *square, *bias, *wide, *deep, *deep_bias, *column, *gain, *shift, *table, *left, *image_w, *up_w,
                 *taps;
    recurrent_weights lstm, gru;
    norm_statistics statistics;
    ab_part       part;
    mixp_tensor  *x, *y;                            /* of the part's tokens                */
} ab_net;

/* --- data --------------------------------------------------------------------------------------- */

static float   ab_x[AB_ROWS * AB_WIDTH], ab_y[AB_ROWS * AB_WIDTH], ab_deep[AB_MOST];
static int32_t ab_ids[AB_ROWS], ab_lengths[AB_BATCH] = { 71, 5, 66 };
static uint8_t ab_mask[AB_ROWS * AB_WIDTH];
static float   ab_scores[AB_TIME * AB_TIME];

static uint32_t ab_seed = 1;
static float ab_random(void) {
    ab_seed = ab_seed * 1664525u + 1013904223u;
    return (float)(ab_seed >> 8) / 4194304.0f - 2.0f;
}
static void ab_fill(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = ab_random();
}
static void ab_data(void) {
    ab_seed = 1;
    ab_fill(ab_x, AB_ROWS * AB_WIDTH);
    ab_fill(ab_y, AB_ROWS * AB_WIDTH);
    ab_fill(ab_deep, AB_MOST);
    ab_fill(ab_scores, AB_TIME * AB_TIME);
    for (int i = 0; i < AB_ROWS; i++) ab_ids[i] = (i * 7 + i / 5) % AB_VOCAB;
    for (int i = 0; i < AB_ROWS * AB_WIDTH; i++) ab_mask[i] = (uint8_t)(ab_random() > 0.0f);
}

static mixp_dtype ab_weights(const ab_mode *m) { return m->level == 3 ? m->dtype : MIXP_F32; }
static mixp_dtype ab_inputs(const ab_mode *m) { return m->level >= 2 ? m->dtype : MIXP_F32; }

static mixp_tensor *ab_weight(ab_net *n, const char *name, int64_t rows, int64_t cols) {
    const int64_t shape[2] = { rows, cols };
    static float  values[AB_WIDTH * AB_DEEP];
    mixp_tensor  *w = cols ? mixp_param(n->ctx, name, ab_weights(n->mode), 2, shape)
                           : mixp_param(n->ctx, name, ab_weights(n->mode), 1, shape);
    ab_fill(values, w->count);
    for (int64_t i = 0; i < w->count; i++) values[i] *= cols > 1 ? 0.2f : 1.0f;
    CHECK_INT(mixp_write(w, values, MIXP_F32, w->count), MIXP_OK);
    return w;
}
/* Weights of a convolution: the same memory with four dimensions. */
static mixp_tensor *ab_filter(ab_net *n, const char *name, int64_t maps, int64_t channels, int64_t taps) {
    const int64_t shape[4] = { maps, channels, taps, taps };
    static float  values[AB_WIDTH * 8 * 9];
    mixp_tensor  *w = mixp_param(n->ctx, name, ab_weights(n->mode), 4, shape);
    ab_fill(values, w->count);
    CHECK_INT(mixp_write(w, values, MIXP_F32, w->count), MIXP_OK);
    return w;
}
static recurrent_weights ab_recurrent(ab_net *n, const char *name, int64_t gates) {
    recurrent_weights w;
    char text[4][16];
    for (int i = 0; i < 4; i++) snprintf(text[i], sizeof text[i], "%s.%d", name, i);
    w.w_x = ab_weight(n, text[0], gates * 8, AB_WIDTH);
    w.w_h = ab_weight(n, text[1], gates * 8, 8);
    w.b_x = ab_weight(n, text[2], gates * 8, 0);
    w.b_h = ab_weight(n, text[3], gates * 8, 0);
    return w;
}

static void ab_open(ab_net *n, const mixp_device *device, const ab_mode *mode, int threads) {
    memset(n, 0, sizeof *n);
    n->mode = mode;
    n->ctx = context_on(device, threads);
    CHECK_INT(mixp_autocast_set_level(n->ctx, mode->level), MIXP_OK);
    ab_seed = 2;
    n->square = ab_weight(n, "square", AB_WIDTH, AB_WIDTH);
    n->bias = ab_weight(n, "bias", AB_WIDTH, 0);
    n->wide = ab_weight(n, "wide", 2 * AB_WIDTH, AB_WIDTH);
    n->deep = ab_weight(n, "deep", 37, AB_DEEP);
    n->deep_bias = ab_weight(n, "deep.bias", 37, 0);
    n->column = ab_weight(n, "column", AB_WIDTH, 1);
    n->gain = ab_weight(n, "gain", AB_WIDTH, 0);
    n->shift = ab_weight(n, "shift", AB_WIDTH, 0);
    n->table = ab_weight(n, "table", AB_VOCAB, AB_WIDTH);
    n->left = ab_weight(n, "left", 9, AB_TIME);
    n->image_w = ab_filter(n, "image", 5, 2, 3);
    n->up_w = ab_filter(n, "up", 2, 3, 2);
    n->taps = mixp_param(n->ctx, "taps", ab_weights(mode), 3, (const int64_t[]){ 4, AB_TIME, 3 });
    mixp_init_normal(n->taps, 0.0, 0.2);
    n->lstm = ab_recurrent(n, "lstm", 4);
    n->gru = ab_recurrent(n, "gru", 3);
    n->statistics = batch_norm_statistics(n->ctx, "norm", 2);
    mixp_fill(n->statistics.mean, 0.3);
    mixp_fill(n->statistics.variance, 1.7);
}

/* Copies the rows of sequences [b, b + nb) from tokens t to t + nt, in the dtype of inputs. */
static mixp_tensor *ab_rows(ab_net *n, const float *from, ab_part p, int64_t width) {
    static float rows[AB_MOST], low[AB_MOST];
    const int64_t shape[3] = { p.nb, p.nt, width }, row = p.nt * width;
    for (int64_t b = 0; b < p.nb; b++)
        memcpy(rows + b * row, from + ((p.b + b) * AB_TIME + p.t) * width, (size_t)row * sizeof *rows);
    CHECK_INT(mixp_convert(low, ab_inputs(n->mode), rows, MIXP_F32, p.nb * row), MIXP_OK);
    return mixp_input(n->ctx, ab_inputs(n->mode), 3, shape, low);
}
static mixp_tensor *ab_deep_x(ab_net *n) { return ab_rows(n, ab_deep, n->part, AB_DEEP); }

/* The part's tokens, and all before them. */
static mixp_tensor *ab_until(ab_net *n, const float *from) {
    ab_part all = n->part;
    all.t = 0;
    all.nt = n->part.t + n->part.nt;
    return ab_rows(n, from, all, AB_WIDTH);
}

static mixp_tensor *ab_named(ab_net *n) {
    static int32_t ids[AB_ROWS];
    const ab_part  p = n->part;
    const int64_t  shape[2] = { p.nb, p.nt };
    for (int64_t b = 0; b < p.nb; b++)
        memcpy(ids + b * p.nt, ab_ids + (p.b + b) * AB_TIME + p.t, (size_t)p.nt * sizeof *ids);
    return mixp_input(n->ctx, MIXP_I32, 2, shape, ids);
}
/* The same with a last dimension of 1. */
static mixp_tensor *ab_column(ab_net *n) { return mixp_unsqueeze(n->ctx, ab_named(n), -1); }

static mixp_tensor *ab_masked(ab_net *n) {
    static uint8_t mask[AB_ROWS * AB_WIDTH];
    const ab_part  p = n->part;
    const int64_t  shape[3] = { p.nb, p.nt, AB_WIDTH }, row = p.nt * AB_WIDTH;
    for (int64_t b = 0; b < p.nb; b++)
        memcpy(mask + b * row, ab_mask + ((p.b + b) * AB_TIME + p.t) * AB_WIDTH, (size_t)row);
    return mixp_input(n->ctx, MIXP_U8, 3, shape, mask);
}

/* --- what models are made of -------------------------------------------------------------------- */

static mixp_tensor *ab_rope(ab_net *n, int interleaved) {
    static const double angles[AB_WIDTH / AB_HEADS / 2] = { 1.0, 0.5, 0.25, 0.1, 0.01, 0.001 };
    mixp_rope_desc d;
    memset(&d, 0, sizeof d);
    d.head_dim = AB_WIDTH / AB_HEADS;
    d.interleaved = interleaved;
    d.base = 500.0;
    if (interleaved) d.frequencies = angles, d.scale = 1.25;
    d.first = n->part.t;
    return mixp_rope(n->ctx, n->x, &d);
}

/* Adds five rows to four places of each sequence. */
static mixp_tensor *ab_index_add(ab_net *n) {
    static const int32_t places[5] = { 3, 70, 3, 0, 41 };
    const int64_t many = 5;
    mixp_tensor  *to = mixp_input(n->ctx, MIXP_I32, 1, &many, places);
    return mixp_index_add(n->ctx, n->x, 1, to, mixp_slice(n->ctx, n->y, 1, 0, many));
}

/* Log-probabilities of the token that each row names. */
static mixp_tensor *ab_log_p(ab_net *n) {
    mixp_tensor *logits = mixp_linear(n->ctx, n->x, n->table, NULL);
    return mixp_gather(n->ctx, mixp_log_softmax(n->ctx, logits), -1, ab_column(n));
}

/* Attention of q = x, k = x, v = y, whose first kv_heads heads count. Tokens before the part are the cache. */
static mixp_tensor *ab_attend(ab_net *n, int kv_heads, int causal, float softcap, int mask, int lengths) {
    mixp_attention_desc d;
    static float   scores[AB_TIME * AB_TIME];
    const int64_t  keys = n->part.t + n->part.nt, shape[2] = { n->part.nt, keys };
    const int64_t  width = AB_WIDTH / AB_HEADS * kv_heads;
    memset(&d, 0, sizeof d);
    d.heads = AB_HEADS;
    d.kv_heads = kv_heads;
    d.causal = causal;
    d.past = n->part.t;
    d.softcap = softcap;
    d.scale = softcap > 0.0f ? 0.25f : 0.0f;
    for (int64_t t = 0; mask && t < n->part.nt; t++)
        memcpy(scores + t * keys, ab_scores + (n->part.t + t) * AB_TIME, (size_t)keys * sizeof *scores);
    if (mask) d.mask = mixp_input(n->ctx, MIXP_F32, 2, shape, scores);
    if (lengths) d.lengths = mixp_input(n->ctx, MIXP_I32, 1, &n->part.nb, ab_lengths + n->part.b);
    return mixp_attention_apply(n->ctx, n->x, mixp_slice(n->ctx, ab_until(n, ab_x), -1, 0, width),
                                mixp_slice(n->ctx, ab_until(n, ab_y), -1, 0, width), &d);
}

static mixp_tensor *ab_heads_first(ab_net *n) {
    const int64_t shape[4] = { n->part.nb, AB_TIME, AB_HEADS, AB_WIDTH / AB_HEADS };
    mixp_tensor  *q = mixp_transpose(n->ctx, mixp_reshape(n->ctx, n->x, 4, shape), 1, 2);
    mixp_tensor  *v = mixp_transpose(n->ctx, mixp_reshape(n->ctx, n->y, 4, shape), 1, 2);
    return mixp_scaled_dot_product_attention(n->ctx, q, q, v, NULL);
}

static mixp_tensor *ab_image(ab_net *n, int kind) {
    const int64_t shape[4] = { n->part.nb, 2, AB_SIDE, AB_SIDE };
    mixp_tensor  *flat = mixp_reshape(n->ctx, n->x, 2, (const int64_t[]){ n->part.nb, -1 });
    mixp_tensor  *image = mixp_reshape(n->ctx, mixp_slice(n->ctx, flat, 1, 0, 2 * AB_SIDE * AB_SIDE), 4, shape);
    conv_desc     d;
    memset(&d, 0, sizeof d);
    d.padding[0] = d.padding[1] = 1;
    if (kind == 0) return conv2d(n->ctx, image, n->image_w, NULL, &d);
    if (kind == 1) return conv_transpose2d(n->ctx, image, n->up_w, NULL, NULL);
    if (kind == 2) return max_pool2d(n->ctx, image, 3, 2, 1);
    if (kind == 3) return avg_pool2d(n->ctx, image, 2, 2, 0);
    if (kind == 4) return group_norm(n->ctx, image, 2, NULL, NULL, 1e-5f);
    if (kind == 5) return upsample_nearest2d(n->ctx, image, 9, 11);
    return batch_norm(n->ctx, image, NULL, NULL, &n->statistics, 0, 1e-5f);
}

/* One sequence after another: x as [t, b, in] or [b, t, in], as the layer wants it. */
static mixp_tensor *ab_recur(ab_net *n, int gru) {
    const int64_t shape[2] = { n->part.nb, 8 };
    mixp_tensor  *h = mixp_full(n->ctx, MIXP_F32, 2, shape, 0.0), *c = mixp_full(n->ctx, MIXP_F32, 2, shape, 0.0);
    mixp_tensor  *some = mixp_slice(n->ctx, n->x, 1, 0, 5);
    return gru ? gru_layer(n->ctx, some, &h, &n->gru) : lstm_layer(n->ctx, some, &h, &c, &n->lstm);
}

/* Which parts of a batch a function may be given: any tokens; whole sequences; prefixes; tokens with a cache of all
 * before them. */
typedef enum ab_kind { AB_ROW, AB_SEQUENCE, AB_PREFIX, AB_CAUSAL } ab_kind;
typedef struct ab_case {
    const char   *name;
    ab_kind       kind;
    mixp_tensor *(*run)(ab_net *n);
    const op_row *row;          /* of tests/support/operators.h, in place of run           */
} ab_case;

/* x in the domain of a row. */
static mixp_tensor *ab_in_domain(ab_net *n, const op_row *r, mixp_tensor *x) {
    mixp_context *c = n->ctx;
    switch (r->is[OP_DOMAIN]) {
    case 'P': return mixp_add_scalar(c, mixp_abs(c, x), 0.125f);
    case 'U': return mixp_scale(c, x, 0.4f);
    case '1': return mixp_sigmoid(c, x);
    default:  return x;
    }
}

/* The operator of a row, on the part's tokens. */
static mixp_tensor *ab_operator(ab_net *n, const op_row *r) {
    op_in o;
    memset(&o, 0, sizeof o);
    o.c = n->ctx;
    o.x = ab_in_domain(n, r, n->x);
    o.y = ab_in_domain(n, r, n->y);
    o.z = n->y;
    o.w = n->square;
    o.v = n->gain;
    o.u = n->shift;
    o.i = ab_named(n);
    o.a = mixp_expand(n->ctx, ab_column(n), 3, n->x->shape);
    o.j = mixp_input(n->ctx, MIXP_I32, 1, (const int64_t[]){ AB_WIDTH }, ab_ids);
    o.m = ab_masked(n);
    o.k = r->k;
    o.reduction = MIXP_REDUCE_NONE;
    return r->run(&o);
}

#define AB_PRODUCTS(X)                                                                               \
    X(linear, AB_ROW, mixp_linear(c, x, n->square, n->bias))                                         \
    X(linear_without_bias, AB_ROW, mixp_linear(c, x, n->wide, NULL))                                 \
    X(linear_deep, AB_ROW, mixp_linear(c, ab_deep_x(n), n->deep, n->deep_bias))                      \
    X(linear_to_one, AB_ROW, mixp_linear(c, x, mixp_transpose(c, n->column, 0, 1), NULL))            \
    X(matmul, AB_ROW, mixp_matmul(c, x, n->square, 0, 0))                                            \
    X(matmul_transposed, AB_ROW, mixp_matmul(c, x, n->wide, 0, 1))                                   \
    X(matmul_column, AB_ROW, mixp_matmul(c, x, n->column, 0, 0))                                     \
    X(matmul_vector, AB_ROW, mixp_matmul(c, x, n->gain, 0, 0))                                       \
    X(mlp, AB_ROW, mixp_mlp(c, x, n->square, n->bias, n->square, NULL))                              \
    X(log_probability, AB_ROW, ab_log_p(n)) X(scores, AB_SEQUENCE, mixp_matmul(c, x, y, 0, 1))       \
    X(products_of_columns, AB_SEQUENCE, mixp_matmul(c, x, y, 1, 0))                                  \
    X(matmul_from_the_left, AB_SEQUENCE, mixp_matmul(c, n->left, x, 0, 0))                           \
    X(conv2d, AB_SEQUENCE, ab_image(n, 0)) X(conv_transpose2d, AB_SEQUENCE, ab_image(n, 1))          \
    X(conv1d, AB_SEQUENCE, conv1d(c, x, n->taps, NULL, NULL))                                        \
    X(lstm, AB_SEQUENCE, ab_recur(n, 0)) X(gru, AB_SEQUENCE, ab_recur(n, 1))
#define AB_OTHERS(X)                                                                                 \
    X(add_vector, AB_ROW, mixp_add(c, x, n->gain)) X(mul_vector, AB_ROW, mixp_mul(c, n->gain, x))    \
    X(layer_norm_plain, AB_ROW, mixp_layer_norm(c, x, NULL, NULL, 1e-5f))                            \
    X(where_both, AB_ROW, mixp_where(c, ab_masked(n), x, y))                                         \
    X(rope_interleaved, AB_ROW, ab_rope(n, 1)) X(rope_from_first, AB_ROW, ab_rope(n, 0))             \
    X(leaky_relu_of_a_slope, AB_ROW, mixp_leaky_relu(c, x, 0.01f))                                   \
    X(squared_error, AB_ROW, mixp_mean(c, mixp_square(c, mixp_sub(c, x, y)), -1, 0))                 \
    X(sum_over_time, AB_SEQUENCE, mixp_sum(c, x, 1, 0))                                              \
    X(mean_over_time, AB_SEQUENCE, mixp_mean(c, x, 1, 0))                                            \
    X(max_over_time, AB_SEQUENCE, mixp_max(c, x, 1, 0))                                              \
    X(var_over_time, AB_SEQUENCE, mixp_var(c, x, 1, 1, 0))                                           \
    X(logsumexp_over_time, AB_SEQUENCE, mixp_logsumexp(c, x, 1, 0))                                  \
    X(cumsum_over_time, AB_PREFIX, mixp_cumsum(c, x, 1))                                             \
    X(index_add_over_time, AB_SEQUENCE, ab_index_add(n))                                             \
    X(attention, AB_SEQUENCE, ab_attend(n, AB_HEADS, 0, 0.0f, 0, 0))                                 \
    X(attention_masked, AB_SEQUENCE, ab_attend(n, AB_HEADS, 0, 0.0f, 1, 0))                          \
    X(attention_padded, AB_SEQUENCE, ab_attend(n, AB_HEADS, 0, 0.0f, 0, 1))                          \
    X(attention_heads_first, AB_SEQUENCE, ab_heads_first(n))                                         \
    X(attention_causal, AB_CAUSAL, ab_attend(n, AB_HEADS, 1, 0.0f, 0, 0))                            \
    X(attention_grouped, AB_CAUSAL, ab_attend(n, 2, 1, 0.0f, 0, 0))                                  \
    X(attention_multi_query, AB_CAUSAL, ab_attend(n, 1, 1, 0.0f, 0, 0))                              \
    X(attention_capped, AB_CAUSAL, ab_attend(n, AB_HEADS, 1, 5.0f, 0, 0))                            \
    X(attention_biased, AB_CAUSAL, ab_attend(n, AB_HEADS, 1, 0.0f, 1, 0))                            \
    X(attention_packed, AB_SEQUENCE, mixp_attention(c, x, AB_HEADS, 1, 0.0f))                        \
    X(max_pool2d, AB_SEQUENCE, ab_image(n, 2)) X(avg_pool2d, AB_SEQUENCE, ab_image(n, 3))            \
    X(group_norm, AB_SEQUENCE, ab_image(n, 4)) X(upsample, AB_SEQUENCE, ab_image(n, 5))              \
    X(batch_norm_evaluated, AB_SEQUENCE, ab_image(n, 6))

#define AB_FUNCTION(name, kind, call)                                                                \
    static mixp_tensor *ab_run_##name(ab_net *n) {                                                   \
        mixp_context *c = n->ctx;                                                                    \
        mixp_tensor  *x = n->x, *y = n->y;                                                           \
        (void)c, (void)x, (void)y;                                                                   \
        return call;                                                                                 \
    }
AB_PRODUCTS(AB_FUNCTION)
AB_OTHERS(AB_FUNCTION)
#define AB_ENTRY(name, kind, call) { #name, kind, ab_run_##name, NULL },
static const ab_case ab_products[] = { AB_PRODUCTS(AB_ENTRY) };
static const ab_case ab_others[] = { AB_OTHERS(AB_ENTRY) };
/* Each row of tests/support/operators.h; its column says the kind, and whether it is compared. */
static int ab_row_case(int i, ab_case *to) {
    memset(to, 0, sizeof *to);
    to->name = op_rows[i].name;
    to->row = &op_rows[i];
    to->kind = op_rows[i].is[OP_BATCH] == 'S' ? AB_SEQUENCE : AB_ROW;
    return op_rows[i].is[OP_BATCH] != 'N';
}

/* --- comparing ---------------------------------------------------------------------------------- */

typedef struct ab_result { mixp_dtype dtype; int64_t count; char bytes[AB_MOST * 4]; } ab_result;

static mixp_tensor *ab_result_of(ab_net *n, const ab_case *test, ab_part p) {
    mixp_tensor *y = NULL;
    MIXP_AUTOCAST(n->ctx, n->mode->dtype) {
        n->part = p;
        n->x = ab_rows(n, ab_x, p, AB_WIDTH);
        n->y = ab_rows(n, ab_y, p, AB_WIDTH);
        y = test->row ? ab_operator(n, test->row) : test->run(n);
    }
    return y;
}

/* Runs a case on a part: recorded in a training step, or in an evaluation without gradients. */
static int ab_compute(ab_net *n, const ab_case *test, ab_part p, int training, ab_result *to) {
    mixp_tensor *y = NULL;
    const char  *why = "";
    if (training) {
        mixp_step_begin(n->ctx);
        y = ab_result_of(n, test, p);
    } else {
        mixp_eval_begin(n->ctx);
        MIXP_NO_GRAD(n->ctx) y = ab_result_of(n, test, p);
    }
    to->count = y ? y->count : 0;
    if (y) to->dtype = y->dtype;
    if (y) CHECK_INT(mixp_read(y, to->bytes, y->dtype, y->count), MIXP_OK);
    if (y) return 1;
    test_bad++;
    mixp_context_error(n->ctx, &why);
    TEST_SHOW("%s, %s: no result: %s", test->name, n->mode->name, why);
    mixp_context_clear_error(n->ctx);
    return 0;
}

/* Elements of the part that differ from the whole batch's. */
static int64_t ab_differing(const ab_result *whole, const ab_result *some, ab_part p, ab_kind kind) {
    const int64_t size = (int64_t)mixp_dtype_size(whole->dtype);
    const int64_t unit = kind == AB_SEQUENCE ? whole->count / AB_BATCH : whole->count / AB_ROWS;
    const int64_t row = size * (kind == AB_SEQUENCE ? unit : unit * p.nt);
    int64_t bad = 0;
    if (some->dtype != whole->dtype || some->count * size != row * p.nb) return -1;
    for (int64_t b = 0; b < p.nb; b++) {
        const int64_t at = kind == AB_SEQUENCE ? p.b + b : (p.b + b) * AB_TIME + p.t;
        const char *want = whole->bytes + at * unit * size, *got = some->bytes + b * row;
        for (int64_t i = 0; i < row; i += size) bad += memcmp(want + i, got + i, (size_t)size) != 0;
    }
    return bad;
}

static const ab_part ab_whole = { 0, AB_BATCH, 0, AB_TIME };
/* Whole sequences come first, then prefixes, then tokens from the middle. */
static const ab_part ab_parts[] = {
    { 0, 1, 0, AB_TIME }, { 1, 2, 0, AB_TIME }, { 2, 1, 0, AB_TIME },
    { 0, 1, 0, 1 },  { 1, 1, 0, 7 },   { 2, 1, 0, 33 }, { 0, 3, 0, 5 },   { 1, 2, 0, 65 },
    { 0, 1, 1, 1 },  { 1, 1, 70, 1 },  { 2, 1, 64, 3 }, { 0, 2, 31, 11 }, { 1, 1, 13, 9 }, { 0, 3, 69, 1 },
    { 2, 1, 5, 13 }, { 1, 1, 33, 15 }, { 0, 1, 2, 2 },  { 2, 1, 20, 6 }
};
enum { AB_PARTS = sizeof ab_parts / sizeof *ab_parts, AB_SEQUENCES = 3, AB_PREFIXES = 8 };

static int64_t ab_compared;

/* nets[2] computes the batch; nets[0] and nets[1], which have other numbers of threads, its parts. */
static void ab_try(ab_net nets[3], const mixp_device *device, const ab_case *test) {
    static ab_result whole, some;
    const int parts = test->kind == AB_SEQUENCE ? AB_SEQUENCES : test->kind == AB_PREFIX ? AB_PREFIXES : AB_PARTS;
    if (!ab_compute(&nets[2], test, ab_whole, 1, &whole)) return;
    for (int i = 0; i < parts; i++) {
        ab_net *n = &nets[i % 2];
        if (!ab_compute(n, test, ab_parts[i], i % 3 == 2, &some)) continue;
        ab_compared += some.count;
        int64_t bad = ab_differing(&whole, &some, ab_parts[i], test->kind);
        if (!bad) continue;
        test_bad++;
        TEST_SHOW("%s, %s, %s: %lld of %lld elements differ in part %d", test->name, n->mode->name,
                  device->name, (long long)bad, (long long)some.count, i);
    }
}

/* n cases on a device, and with `rows` those of operators.h, in the modes whose bits are set in `modes`. */
static void ab_run(const mixp_device *device, unsigned modes, const ab_case *cases, size_t n, int rows) {
    ab_net nets[3];
    ab_data();
    for (int m = 0; m < AB_MODES; m++) {
        if (!(modes >> m & 1)) continue;
        for (int i = 0; i < 3; i++) ab_open(&nets[i], device, &ab_modes[m], i + 1);
        for (size_t i = 0; i < n; i++) ab_try(nets, device, &cases[i]);
        for (int i = 0; rows && i < OP_ROWS; i++) {
            ab_case row;
            if (ab_row_case(i, &row)) ab_try(nets, device, &row);
        }
        for (int i = 0; i < 3; i++) mixp_context_free(nets[i].ctx);
    }
}
/* Is a row's result the same in any batch? Runs `products` of the products (0 = all), and all other operators if
 * others is 1. */
static inline void ab_check(const mixp_device *device, unsigned modes, size_t products, int others) {
    const size_t all = sizeof ab_products / sizeof *ab_products;
    ab_run(device, modes, ab_products, products ? products : all, 0);
    if (others) ab_run(device, modes, ab_others, sizeof ab_others / sizeof *ab_others, 1);
}
