#pragma once
#include "shared.c"
/* --- attention ------------------------------------------------------------------------- */

enum {
    MIXPI_ATTENTION_Q, MIXPI_ATTENTION_K, MIXPI_ATTENTION_V, MIXPI_ATTENTION_MASK,
    MIXPI_ATTENTION_LENGTHS, MIXPI_ATTENTION_INPUTS
};

static mixp_tensor *mixpi_attention_input(const mixp_call *c, int i) {
    return i < c->n_in ? c->in[i] : NULL;
}

/* Reports q and one more input, and the rule that they break. */
static mixp_result mixpi_attention_misfit(mixp_call *c, int i, const char *rule) {
    static const char *const names[] = { "q", "k", "v", "mask", "lengths" };
    const mixp_tensor *q = c->in[MIXPI_ATTENTION_Q], *t = mixpi_attention_input(c, i);
    char first[352], second[352] = "";
    int two = t != NULL && i > 0;
    mixpi_input_text(q, c->in[MIXPI_ATTENTION_K] ? "q" : "qkv", first, sizeof first);
    if (two) mixpi_input_text(t, names[i], second, sizeof second);
    return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE, "attention: %s%s%s %s not fit: %s", first,
        two ? " and " : "", second, two ? "do" : "does", rule);
}

/* Reports a number of the description that is out of range. */
static mixp_result mixpi_attention_number(
    mixp_call *c, const char *name, double value, const char *rule) {
    return mixp_context_fail(
        c->ctx, MIXP_ERR_ARGUMENT, "attention: %s is %g; it must be %s", name, value, rule);
}

/* Checks the numbers of the description. A scale of 0 becomes the default. */
static mixp_result mixpi_attention_numbers(mixp_call *c, mixp_attention_args *k) {
    if (mixp_bits_of_f32(k->scale) << 1 == 0) k->scale = (float)(1.0 / sqrt((double)k->d));
    if (!mixpi_f32_is_positive(k->scale))
        return mixpi_attention_number(
            c, "scale", (double)k->scale, "above 0, or 0 for 1/sqrt(c/heads)");
    if (mixp_bits_of_f32(k->softcap) << 1 != 0 && !mixpi_f32_is_positive(k->softcap))
        return mixpi_attention_number(c, "softcap", (double)k->softcap, "above 0, or 0 for none");
    if (mixp_bits_of_f32(k->dropout) >= 0x3F800000u)
        return mixpi_attention_number(c, "dropout", (double)k->dropout, "in [0, 1)");
    if (k->past < 0) return mixpi_attention_number(c, "past", (double)k->past, "0 or more");
    k->past = mixpi_min(k->past, k->keys); /* a larger past means all keys */
    return MIXP_OK;
}

/* Strides of rows with `heads` heads of d elements, followed by `other` elements of other
 * inputs. */
static mixp_head_strides mixpi_head_rows_of(int64_t rows, int64_t heads, int64_t other, int64_t d) {
    mixp_head_strides at;
    at.head = d;
    at.row = heads * d + other;
    at.sequence = rows * at.row;
    return at;
}

/* qkv[b, t, heads*d, kv_heads*d, kv_heads*d] in one tensor. */
static mixp_result mixpi_attention_packed(mixp_call *c, mixp_attention_args *k) {
    const mixp_tensor *x = c->in[MIXPI_ATTENTION_Q];
    int64_t all = k->heads + 2 * k->kv_heads;
    char rule[128];
    if (k->heads == k->kv_heads || k->heads < 1)
        snprintf(rule, sizeof rule,
            "qkv[b, t, 3*c] with c a multiple of heads >= 1 (heads is %.0f)", (double)k->heads);
    else
        snprintf(rule, sizeof rule,
            "qkv[b, t, (heads + 2*kv_heads)*d] with heads a multiple of kv_heads (they are %.0f "
            "and %.0f)",
            (double)k->heads, (double)k->kv_heads);
    if (x->rank != 3 || k->heads < 1 || k->heads % k->kv_heads || x->shape[2] % all)
        return mixpi_bad_shapes(c, rule);

    /* A row has all heads of q, then those of k and of v. */
    k->b = x->shape[0];
    k->t = k->keys = x->shape[1];
    k->d = x->shape[2] / all;
    k->q_at = mixpi_head_rows_of(k->t, k->heads, 2 * k->kv_heads * k->d, k->d);
    k->k_at = k->v_at = k->q_at;
    return MIXP_OK;
}

/* The heads dimension of t, or `given` if t has none; 0 if neither fits. */
static int64_t mixpi_heads_in(const mixp_tensor *t, int64_t given) {
    if (t->rank == 4) return !given || t->shape[2] == given ? t->shape[2] : 0;
    return t->rank == 3 && given > 0 && t->shape[2] % given == 0 ? given : 0;
}

static int64_t mixpi_row_of(const mixp_tensor *t) {
    return t->rank == 4 ? t->shape[2] * t->shape[3] : t->shape[2];
}

/* Does k, or v, fit the problem? */
static int mixpi_attention_fits(const mixp_tensor *t, const mixp_attention_args *k) {
    return t && mixpi_heads_in(t, k->kv_heads) && t->shape[0] == k->b && t->shape[1] == k->keys &&
           mixpi_row_of(t) == k->kv_heads * k->d;
}

static mixp_result mixpi_attention_apart(mixp_call *c, mixp_attention_args *k) {
    const mixp_tensor *q = c->in[MIXPI_ATTENTION_Q], *key = c->in[MIXPI_ATTENTION_K];

    k->heads = mixpi_heads_in(q, k->heads);
    if (!k->heads)
        return mixpi_attention_misfit(c, 0,
            "q[b, t, heads*d], or q[b, t, heads, d]; for [b, heads, t, d] call "
            "mixp_scaled_dot_product_attention of examples/ops.h");
    if (!k->kv_heads) k->kv_heads = key->rank == 4 ? key->shape[2] : k->heads;
    if (k->kv_heads < 1 || k->heads % k->kv_heads)
        return mixpi_attention_misfit(c, 1, "heads must be a multiple of kv_heads");

    /* The sizes are those of q and k; v must fit them. */
    k->b = q->shape[0];
    k->t = q->shape[1];
    k->d = mixpi_row_of(q) / k->heads;
    k->keys = key->rank > 1 ? key->shape[1] : 0;
    if (k->keys < 1) return mixpi_attention_misfit(c, 1, "q[b, t, heads*d] and at least one key");
    if (!mixpi_attention_fits(key, k))
        return mixpi_attention_misfit(c, 1, "q[b, t, heads*d] and k[b, keys, kv_heads*d]");
    if (!mixpi_attention_fits(c->in[MIXPI_ATTENTION_V], k))
        return mixpi_attention_misfit(
            c, 2, "v must have k's shape [b, keys, kv_heads*d], and q's d");

    k->q_at = mixpi_head_rows_of(k->t, k->heads, 0, k->d);
    k->k_at = k->v_at = mixpi_head_rows_of(k->keys, k->kv_heads, 0, k->d);
    return MIXP_OK;
}

/* Sets the mask's strides; 0 along a dimension that the mask repeats. */
static mixp_result mixpi_attention_mask(mixp_call *c, mixp_attention_args *k) {
    const mixp_tensor *mask = mixpi_attention_input(c, MIXPI_ATTENTION_MASK);
    int64_t full[4], stride[4], step = 1;
    if (!mask) return MIXP_OK;

    /* From the last dimension on, each is 1 or as large as that of the scores. */
    full[0] = k->b;
    full[1] = k->heads;
    full[2] = k->t;
    full[3] = k->keys;
    for (int i = 3; i >= 0; i--) {
        int own = i - (4 - mask->rank);
        int64_t n = own < 0 ? 1 : mask->shape[own];
        if (mask->rank > 4 || (n != 1 && n != full[i]))
            return mixpi_attention_misfit(
                c, MIXPI_ATTENTION_MASK, "the mask must broadcast to [b, heads, t, keys]");
        stride[i] = n == 1 ? 0 : step;
        step *= n;
    }

    k->mask_at.sequence = stride[0];
    k->mask_at.head = stride[1];
    k->mask_at.row = stride[2];
    k->mask_key = stride[3];

    /* Attention computes no gradient of the mask. */
    if (mixpi_is_no_grad(c->ctx) || !mixp_call_wants(c, MIXPI_ATTENTION_MASK)) return MIXP_OK;
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
        "attention: the mask '%.60s' requires a gradient, but a mask gets no gradient; for a "
        "learned bias, compute the scores with mixp_matmul and mixp_add",
        mask->name);
}

static mixp_result mixpi_attention_lengths(mixp_call *c, const mixp_attention_args *k) {
    const mixp_tensor *t = mixpi_attention_input(c, MIXPI_ATTENTION_LENGTHS);
    char quoted[MIXPI_QUOTED];
    if (!t) return MIXP_OK;
    if (t->dtype != MIXP_I32)
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
            "attention: lengths%s is %s; it must be i32", mixpi_quoted(t, quoted),
            mixp_dtype_name(t->dtype));
    if (t->rank == 1 && t->count == k->b) return MIXP_OK;
    return mixpi_attention_misfit(
        c, MIXPI_ATTENTION_LENGTHS, "lengths must have shape [b], one length per sequence");
}

static mixp_result mixpi_attention_infer(mixp_call *c) {
    mixp_attention_args *k = (mixp_attention_args *)c->attrs;
    mixp_tensor *q = c->in[MIXPI_ATTENTION_Q];
    int64_t shape[3];
    int packed = !c->in[MIXPI_ATTENTION_K] && !c->in[MIXPI_ATTENTION_V];
    const mixp_tensor *mask = mixpi_attention_input(c, MIXPI_ATTENTION_MASK);
    if (mask && !mixpi_is_real(mask->dtype))
        return mixp_context_fail(c->ctx, MIXP_ERR_DTYPE,
            "attention: the mask is %s; a mask is added to the scores and must be f32, f16 or "
            "bf16: 0 where a key is seen, -Inf where it is hidden",
            mixp_dtype_name(mask->dtype));

    /* q, k and v in one tensor or apart, then what all forms have. */
    MIXPI_TRY(mixpi_need_real(c, packed ? 1 : 3, 4));
    if (packed && !k->kv_heads) k->kv_heads = k->heads;
    MIXPI_TRY(packed ? mixpi_attention_packed(c, k) : mixpi_attention_apart(c, k));
    MIXPI_TRY(mixpi_attention_numbers(c, k));
    MIXPI_TRY(mixpi_attention_mask(c, k));
    MIXPI_TRY(mixpi_attention_lengths(c, k));

    /* The result has the shape of q. */
    if (!packed) return mixp_call_output(c, q->dtype, q->rank, q->shape);
    shape[0] = k->b;
    shape[1] = k->t;
    shape[2] = k->d * k->heads;
    return mixp_call_output(c, q->dtype, 3, shape);
}

/* Names the invalid length that made a kernel fail. Possible only if lengths are in host memory. */
static mixp_result mixpi_attention_bad_length(mixp_call *c, const mixp_attention_args *k) {
    int64_t i = 0;
    if (c->ctx->device->download) return MIXP_ERR_ARGUMENT;
    while (i < k->b && k->lengths[i] >= 0 && k->lengths[i] <= k->keys) i++;
    if (i == k->b) return MIXP_ERR_ARGUMENT;
    return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
        "attention: length %d of sequence %.0f is outside [0, %.0f]", (int)k->lengths[i], (double)i,
        (double)k->keys);
}

static mixp_result mixpi_attention_forward(mixp_call *c) {
    mixp_attention_args *k = (mixp_attention_args *)c->attrs;
    const mixp_tensor *lengths = mixpi_attention_input(c, MIXPI_ATTENTION_LENGTHS);
    int64_t shape[3] = { k->b, k->heads, k->t };
    if (!mixp_call_save(c, 0, MIXP_F32, 3, shape)) return MIXP_ERR_MEMORY;

    /* A packed tensor has k behind q, and v behind k. */
    k->q = mixpi_call_x(c, MIXPI_ATTENTION_Q);
    k->k = mixpi_call_x(c, MIXPI_ATTENTION_K);
    k->v = mixpi_call_x(c, MIXPI_ATTENTION_V);
    if (!k->k.data) {
        k->k = mixpi_in_at(k->q, k->heads * k->d);
        k->v = mixpi_in_at(k->k, k->kv_heads * k->d);
    }
    k->mask = mixpi_call_x(c, MIXPI_ATTENTION_MASK);
    k->lengths = lengths ? (const int32_t *)lengths->data : NULL;
    k->y = mixpi_call_y(c);
    k->lse = mixpi_saved(c, 0);

    /* The kernel finds a length that is out of range. */
    mixp_result r = MIXPI_RUN(c, attention, k);
    if (r != MIXP_ERR_ARGUMENT || !k->lengths) return r;
    return mixpi_attention_bad_length(c, k);
}

/* If a tensor is used as two of q, k and v, adds its gradients one after the other. */
static mixp_result mixpi_attention_one_by_one(
    mixp_call *c, const mixp_attention_backward_args *all) {
    mixp_attention_backward_args one = *all;
    mixp_result r = MIXP_OK;
    for (int i = 0; i < 3 && r == MIXP_OK; i++) {
        one.dq = all->dq;
        one.dk = all->dk;
        one.dv = all->dv;
        if (i != 0) one.dq.data = NULL;
        if (i != 1) one.dk.data = NULL;
        if (i != 2) one.dv.data = NULL;
        if (one.dq.data || one.dk.data || one.dv.data) r = MIXPI_RUN(c, attention_backward, &one);
    }
    return r;
}

static mixp_result mixpi_attention_backward(mixp_call *c) {
    mixp_attention_backward_args k = MIXPI_ZERO;
    k.forward = *(const mixp_attention_args *)c->attrs;
    k.dy = mixpi_call_dy(c);
    k.dq = mixpi_call_dx(c, MIXPI_ATTENTION_Q);
    if (!c->in[MIXPI_ATTENTION_K]) {
        if (!k.dq.data) return MIXP_OK;
        k.dk = mixpi_out_at(k.dq, k.forward.heads * k.forward.d);
        k.dv = mixpi_out_at(k.dk, k.forward.kv_heads * k.forward.d);
        return MIXPI_RUN(c, attention_backward, &k);
    }
    k.dk = mixpi_call_dx(c, MIXPI_ATTENTION_K);
    k.dv = mixpi_call_dx(c, MIXPI_ATTENTION_V);
    int twice = k.dq.data == k.dk.data || k.dq.data == k.dv.data || k.dk.data == k.dv.data;
    if (twice) return mixpi_attention_one_by_one(c, &k);
    return MIXPI_RUN(c, attention_backward, &k);
}

MIXPREC_API mixp_tensor *mixp_attention(
    mixp_context *ctx, mixp_tensor *qkv, int heads, int causal, float scale) {
    mixp_attention_args k = MIXPI_ZERO;
    k.heads = heads;
    k.causal = causal != 0;
    k.scale = scale;
    return mixpi_apply_one(ctx, MIXP_OP_ATTENTION, qkv, &k);
}

/* Are the required arguments given? Reports a missing one. */
static mixp_result mixpi_attention_given(mixp_context *ctx, const mixp_tensor *k,
    const mixp_tensor *v, const mixp_attention_desc *desc) {
    if (desc && (desc->heads < 0 || desc->kv_heads < 0))
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "attention: heads is %d and kv_heads is %d; both must be at least 0", desc->heads,
            desc->kv_heads);
    if (desc && !k == !v) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "attention: %s is NULL%s",
        !desc ? "the description"
        : k   ? "v"
              : "k",
        desc ? "; pass both k and v, or neither" : "");
}

MIXPREC_API mixp_tensor *mixp_attention_apply(mixp_context *ctx, mixp_tensor *q, mixp_tensor *k,
    mixp_tensor *v, const mixp_attention_desc *desc) {
    mixp_tensor *in[MIXPI_ATTENTION_INPUTS];
    if (!ctx || mixpi_attention_given(ctx, k, v, desc) != MIXP_OK) return NULL;

    /* The description, and what keys the dropout. */
    mixp_attention_args a = MIXPI_ZERO;
    a.heads = desc->heads;
    a.kv_heads = desc->kv_heads;
    a.causal = desc->causal != 0;
    a.past = desc->past;
    a.scale = desc->scale;
    a.softcap = desc->softcap;
    a.dropout = desc->dropout;
    a.seed = ctx->seed;
    a.step = mixpi_random_step(ctx);
    if (mixp_bits_of_f32(a.dropout) << 1) a.tensor = mixpi_dropout_key(ctx);

    in[MIXPI_ATTENTION_Q] = q;
    in[MIXPI_ATTENTION_K] = k;
    in[MIXPI_ATTENTION_V] = v;
    in[MIXPI_ATTENTION_MASK] = desc->mask;
    in[MIXPI_ATTENTION_LENGTHS] = desc->lengths;
    return mixp_apply(ctx, mixp_op_builtin(MIXP_OP_ATTENTION), MIXPI_ATTENTION_INPUTS, in, 1, &a);
}

/* --- scores --- */

/* The call that made y, or that made what y transposes; NULL: no recorded attention made it, or
 * what it keeps is not in memory. A call with an empty result keeps nothing. */
static const mixp_call *mixpi_attention_of(const mixp_tensor *y) {
    const mixpi_tape_entry *e = y->ctx->tape.newest;
    for (; e; e = e->older) {
        if (e->call.out != y) continue;
        if (e->call.op != mixp_op_builtin(MIXP_OP_TRANSPOSE)) break;
        y = e->call.in[0];
    }
    if (!e || e->call.op != mixp_op_builtin(MIXP_OP_ATTENTION) || e->block) return NULL;
    if (!e->call.out->count) return &e->call;
    return e->call.saved[0] && e->call.saved[0]->data ? &e->call : NULL;
}

/* The largest finite value of n; -Inf without one. */
static float mixpi_largest_finite(const float *x, int64_t n) {
    float most = mixp_f32_of_bits(0xFF800000u);
    for (int64_t i = 0; i < n; i++)
        if ((mixp_bits_of_f32(x[i]) & 0x7F800000u) != 0x7F800000u && x[i] > most) most = x[i];
    return most;
}

MIXPI_SELDOM
MIXPREC_API mixp_result mixp_attention_scores(const mixp_tensor *y, int64_t heads, float *most) {
    const mixp_call *c = mixpi_is_live(y) ? mixpi_attention_of(y) : NULL;
    if (!mixpi_is_tensor(y)) return MIXP_ERR_ARGUMENT;
    if (!c)
        return mixp_context_fail(y->ctx, MIXP_ERR_ORDER,
            "mixp_attention_scores: y is not a recorded result of attention; pass what "
            "mixp_attention returned in this step, outside of MIXP_NO_GRAD and mixp_recompute");
    const mixp_attention_args *k = (const mixp_attention_args *)c->attrs;
    if (!most || heads != k->heads)
        return mixp_context_fail(y->ctx, MIXP_ERR_ARGUMENT,
            "mixp_attention_scores: %s; the attention has %.0f heads",
            most ? "heads is wrong" : "most is NULL", (double)k->heads);

    /* The log-sum-exp of each query, [b, heads, t]. */
    const int64_t count = c->out->count ? c->saved[0]->count : 0;
    const size_t bytes = (size_t)count * sizeof(float);
    float *lse = count ? (float *)mixpi_host_take(y->ctx, bytes) : NULL;
    if (!lse && count) return mixpi_out_of_memory(y->ctx, bytes);
    mixp_result r = count ? mixp_read(c->saved[0], lse, MIXP_F32, count) : MIXP_OK;
    for (int64_t h = 0; h < heads && r == MIXP_OK; h++) {
        most[h] = mixp_f32_of_bits(0xFF800000u);
        for (int64_t b = 0; b < k->b && count; b++) {
            const float one = mixpi_largest_finite(lse + (b * heads + h) * k->t, k->t);
            if (one > most[h]) most[h] = one;
        }
    }
    if (lse) mixpi_host_free(y->ctx, lse);
    return r;
}
