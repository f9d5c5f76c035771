/* test_stale.c - stale tensors, from an earlier step, are refused by every call that takes a
 * tensor. A state is carried over on the device. A walk refuses inputs written since their
 * operator read them. Numbers never change silently.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"

static mixp_context *ctx;

static void told(mixp_result code, const char *part) {
    const char *text = "";
    CHECK_INT(mixp_context_error(ctx, &text), code);
    CHECK_TEXT(text, part);
    mixp_context_clear_error(ctx);
}

/* A value in [-0.875, 0.875], none of them 0, and different from its neighbours. */
static float number(int i) { return (float)((i * 5 + 3) % 15 - 7) / 8.0f + 0.0625f; }

static const int64_t square[2] = { 4, 4 }, four[1] = { 4 };

static mixp_tensor *filled(const char *name, int rank, const int64_t *shape) {
    mixp_tensor *t = mixp_param(ctx, name, MIXP_F32, rank, shape);
    float x[64];
    int i;
    for (i = 0; i < 64; i++) x[i] = number(i + (int)name[0]);
    mixp_write(t, x, MIXP_F32, t->count);
    return t;
}

/* --- tensors of an earlier step -------------------------------------------------------------- */

/* A step of an RNN: seven tensors, in the same order each time. */
static mixp_tensor *cell(mixp_tensor *w, mixp_tensor *u, mixp_tensor *h, int at, int late) {
    float x[16];
    mixp_tensor *in, *z;
    int i;
    for (i = 0; i < 16; i++) x[i] = number(i + at);
    in = mixp_input(ctx, MIXP_F32, 2, square, x);
    z = mixp_linear(ctx, in, w, NULL);
    if (late) z = mixp_tanh(ctx, mixp_gelu(ctx, mixp_scale(ctx, z, 0.5f)));
    if (!h) return mixp_tanh(ctx, z);
    return mixp_tanh(ctx, mixp_add(ctx, z, mixp_linear(ctx, h, u, NULL)));
}

/* The state of the last step kept as a tensor, read early in this step and late in it, where other
 * tensors have long been made. */
static void a_state_kept_as_a_tensor(void) {
    int late, at;
    for (late = 0; late < 2; late++) {
        mixp_tensor *w, *u, *h = NULL;
        ctx = mixp_context_new(NULL);
        w = filled("w", 2, square);
        u = filled("u", 2, square);
        for (at = 0; at < 9; at++) {
            mixp_tensor *old = h;
            mixp_step_begin(ctx);
            h = cell(w, u, NULL, at, late);
            CHECK(h != old);                /* a pointer of the last step is none of this */
            CHECK(cell(w, u, old, at, late) ? !old : old != NULL);
            if (old) told(MIXP_ERR_ORDER, "mixp_copy");
        }
        mixp_context_free(ctx);
    }
}

/* Each call that is given a tensor of the step before says so, and what to do. */
static void every_call_refuses_it(void) {
    mixp_tensor *t, *live, *parts[2];
    mixp_optimizer *opt;
    mixp_look look;
    float x[16];
    int i;
    ctx = mixp_context_new(NULL);
    opt = new_sgd(ctx);
    live = filled("w", 2, square);
    for (i = 0; i < 3; i++) {
        mixp_step_begin(ctx);
        t = mixp_tanh(ctx, live);
        mixp_step_begin(ctx);
        mixp_sigmoid(ctx, mixp_tanh(ctx, live));
        CHECK_INT(mixp_read(t, x, MIXP_F32, 16), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "mixp_read: the tensor is of an earlier step");
        CHECK_INT(mixp_write(t, x, MIXP_F32, 16), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "mixp_write: the tensor is of an earlier step");
        CHECK_INT(mixp_fill(t, 1.0), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "mixp_fill: the tensor is of an earlier step");
        CHECK_INT(mixp_init_normal(t, 0.0, 1.0), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "mixp_init_normal: the tensor is of an earlier step");
        CHECK_INT(mixp_init_xavier_normal(t, 1.0), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "of an earlier step");
        CHECK_INT(mixp_copy(live, t), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "mixp_copy: the tensor is of an earlier step");
        CHECK_INT(mixp_copy(t, live), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "of an earlier step");
        CHECK(mixp_relu(ctx, t) == NULL);
        told(MIXP_ERR_ORDER, "relu: input 0 is of an earlier step");
        CHECK(mixp_add(ctx, live, t) == NULL);
        told(MIXP_ERR_ORDER, "add: input 1 is of an earlier step");
        CHECK(mixp_dropout(ctx, t, 0.0f, 1) == NULL);
        told(MIXP_ERR_ORDER, "of an earlier step");
        CHECK_INT(mixp_split(ctx, t, 0, 2, parts), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "of an earlier step");
        CHECK_INT(mixp_backward(ctx, t), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "of an earlier step");
        CHECK_INT(mixp_tensor_set_requires_grad(t, 1), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "of an earlier step");
        CHECK_INT(mixp_tensor_set_disposable(t, 1), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "of an earlier step");
        mixp_tensor_touch(t);
        told(MIXP_ERR_ORDER, "of an earlier step");
        CHECK_INT(mixp_look_at(t, MIXP_F16, &look), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "of an earlier step");
        CHECK_INT(mixp_ranks_sum(t), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "of an earlier step");
        CHECK_INT(mixp_optimizer_set_loss(opt, t), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "of an earlier step");
        t = mixp_mean(ctx, live, MIXP_ALL, 0);
        mixp_step_begin(ctx);
        CHECK(isnan(mixp_item(t)));
        told(MIXP_ERR_ORDER, "mixp_item: the tensor is of an earlier step");
    }
    mixp_context_free(ctx);
}

/* Losses kept in a list, one of every `apart` steps, and read at the end. */
static void losses_in_a_list(int apart) {
    enum { KEPT = 24 };
    mixp_tensor *w, *list[KEPT], *loss = NULL;
    double at[KEPT];
    int i, wrong = 0;
    ctx = mixp_context_new(NULL);
    w = filled("w", 2, square);
    for (i = 0; i < KEPT * apart; i++) {
        mixp_step_begin(ctx);
        mixp_fill(w, 0.25 * i);
        loss = mixp_mean(ctx, mixp_mul(ctx, w, w), MIXP_ALL, 0);
        if (i % apart) continue;
        list[i / apart] = loss;
        at[i / apart] = mixp_item(loss);
    }
    CHECK_NEAR(mixp_item(loss), 0.0625 * (i - 1) * (i - 1), 0.01 * i);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    for (i = 0; i < KEPT && mixp_context_error(ctx, NULL) == MIXP_OK; i++)
        wrong += mixp_item(list[i]) != at[i];
    CHECK(wrong < 12);              /* long before the list ends */
    if (apart < 3) CHECK(wrong < 3);
    told(MIXP_ERR_ORDER, "mixp_item: the tensor is of an earlier step");
    mixp_context_free(ctx);
}

static void losses_kept_in_a_list(void) {
    int apart;
    for (apart = 1; apart <= 12; apart++) losses_in_a_list(apart);
    losses_in_a_list(50);
    losses_in_a_list(100);
}

/* --- a state that is carried ------------------------------------------------------------------ */

static int copies;
static mixp_result copies_kernel(const mixp_exec *x, const mixp_convert_args *k) {
    copies++;
    return mixp_cpu()->kernels->convert(x, k);
}

/* tanh(x w' + h u') over steps, its state in a tensor of the program's; in double beside it. */
static void a_state_is_carried(void) {
    mixp_kernels kernels = *mixp_cpu()->kernels;
    mixp_device device = *mixp_cpu();
    mixp_context_desc d;
    double state[16] = { 0 }, next[16];
    float w[16], u[16], got[16];
    mixp_tensor *tw, *tu, *h;
    int64_t allocations = 0;
    int at, i, r, c;
    memset(&d, 0, sizeof d);
    kernels.convert = copies_kernel;
    device.kernels = &kernels;
    d.device = &device;
    ctx = mixp_context_new(&d);
    tw = filled("w", 2, square);
    tu = filled("u", 2, square);
    h = mixp_param(ctx, "h", MIXP_F32, 2, square);
    mixp_tensor_set_requires_grad(h, 0);
    mixp_read(tw, w, MIXP_F32, 16);
    mixp_read(tu, u, MIXP_F32, 16);
    for (at = 0; at < 6; at++) {
        mixp_tensor *new_h;
        mixp_step_begin(ctx);
        tw->grad = tu->grad = NULL;
        new_h = cell(tw, tu, h, at, 0);
        CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, new_h, MIXP_ALL, 0)), MIXP_OK);
        copies = 0;
        CHECK_INT(mixp_copy(h, new_h), MIXP_OK);
        CHECK_INT(copies, 1);
        for (r = 0; r < 4; r++)
            for (c = 0; c < 4; c++) {
                double z = 0;
                for (i = 0; i < 4; i++)
                    z += (double)number(r * 4 + i + at) * w[c * 4 + i] + state[r * 4 + i] * u[c * 4 + i];
                next[r * 4 + c] = tanh(z);
            }
        memcpy(state, next, sizeof state);
        CHECK_INT(mixp_read(h, got, MIXP_F32, 16), MIXP_OK);
        for (i = 0; i < 16; i++) CHECK_NEAR(got[i], state[i], 1e-5);
        if (at == 1) allocations = mixp_context_memory(ctx).allocations;
    }
    CHECK_INT(mixp_context_memory(ctx).allocations, allocations);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* Between dtypes, onto itself; and what it refuses. */
static void what_mixp_copy_takes(void) {
    static const float x[4] = { 1.0f, -2.5f, 65504.0f, 1e-7f };
    mixp_tensor *a, *b, *ids;
    mixp_context *other;
    float got[4];
    uint64_t version;
    int i;
    ctx = mixp_context_new(NULL);
    other = mixp_context_new(NULL);
    a = mixp_param(ctx, "a", MIXP_F32, 1, four);
    b = mixp_param(ctx, "b", MIXP_F16, 1, four);
    ids = mixp_input(ctx, MIXP_I32, 1, four, x);
    mixp_write(a, x, MIXP_F32, 4);
    version = b->version;
    CHECK_INT(mixp_copy(b, a), MIXP_OK);
    CHECK(b->version > version);
    CHECK_INT(mixp_read(b, got, MIXP_F32, 4), MIXP_OK);
    for (i = 0; i < 4; i++)
        CHECK_NEAR(got[i], mixp_f32_from_f16(mixp_f16_from_f32(x[i])), 0);
    CHECK_INT(mixp_copy(a, a), MIXP_OK);
    CHECK_INT(mixp_copy(NULL, a), MIXP_ERR_ARGUMENT);
    told(MIXP_OK, "");
    CHECK_INT(mixp_copy(a, NULL), MIXP_ERR_ARGUMENT);
    told(MIXP_ERR_ARGUMENT, "mixp_copy: `from` is NULL");
    CHECK_INT(mixp_copy(a, mixp_param(ctx, "c", MIXP_F32, 2, square)), MIXP_ERR_SHAPE);
    told(MIXP_ERR_SHAPE, "mixp_copy: 'a' is [4] with 4 elements, but `from` is [4, 4] with 16");
    CHECK_INT(mixp_copy(a, mixp_param(other, "d", MIXP_F32, 1, four)), MIXP_ERR_ARGUMENT);
    told(MIXP_ERR_ARGUMENT, "another context");
    CHECK_INT(mixp_copy(a, ids), MIXP_OK);
    CHECK_INT(mixp_copy(ids, a), MIXP_OK);
    mixp_context_free(other);
    mixp_context_free(ctx);
}

/* --- what is written before the walk ------------------------------------------------------------ */

typedef struct operands { mixp_tensor *in[3]; } operands;

static mixp_tensor *ids_of(int rank, const int64_t *shape) {
    static const int32_t ids[16] = { 1, 2, 0, 3, 2, 1, 3, 0, 1, 1, 2, 0, 3, 2, 1, 0 };
    return mixp_input(ctx, MIXP_I32, rank, shape, ids);
}

#define UNARY(name) \
    static mixp_tensor *do_##name(operands *o) { return mixp_##name(ctx, o->in[0]); }
#define BINARY(name) \
    static mixp_tensor *do_##name(operands *o) { return mixp_##name(ctx, o->in[0], o->in[1]); }
UNARY(relu) UNARY(gelu) UNARY(gelu_tanh) UNARY(silu) UNARY(tanh) UNARY(sigmoid) UNARY(sqrt)
UNARY(neg) UNARY(abs) UNARY(sin) UNARY(cos) UNARY(relu_squared) UNARY(exp) UNARY(log)
UNARY(softmax) UNARY(log_softmax) UNARY(swiglu_packed)
UNARY(square) UNARY(reciprocal) UNARY(log1p) UNARY(expm1) UNARY(erf)
UNARY(log2) UNARY(log10) UNARY(acos) UNARY(asin) UNARY(tan) UNARY(sinh) UNARY(cosh) UNARY(erfinv)
BINARY(power) BINARY(atan2)
BINARY(add) BINARY(sub) BINARY(mul) BINARY(div) BINARY(maximum) BINARY(minimum) BINARY(swiglu)
BINARY(mse) BINARY(l1)
static mixp_tensor *do_bce_with_logits(operands *o) {
    return mixp_bce_with_logits(ctx, o->in[0], o->in[1]);
}
static mixp_tensor *do_huber(operands *o) { return mixp_huber(ctx, o->in[0], o->in[1], 0.5f); }
static mixp_tensor *do_scale(operands *o) { return mixp_scale(ctx, o->in[0], 3.0f); }
static mixp_tensor *do_pow(operands *o) { return mixp_pow(ctx, o->in[0], 3.0f); }
static mixp_tensor *do_clamp(operands *o) { return mixp_clamp(ctx, o->in[0], 0.4f, 0.6f); }
static mixp_tensor *do_soft_cap(operands *o) { return mixp_soft_cap(ctx, o->in[0], 2.0f); }
static mixp_tensor *do_softplus(operands *o) { return mixp_softplus(ctx, o->in[0], 2.0f); }
static mixp_tensor *do_leaky_relu(operands *o) { return mixp_leaky_relu(ctx, o->in[0], 0.1f); }
static mixp_tensor *do_elu(operands *o) { return mixp_elu(ctx, o->in[0], 2.0f); }
static mixp_tensor *do_add_scalar(operands *o) { return mixp_add_scalar(ctx, o->in[0], 2.0f); }
static mixp_tensor *do_rsub(operands *o) { return mixp_rsub(ctx, o->in[0], 2.0f); }
static mixp_tensor *do_permute(operands *o) {
    static const int turned[2] = { 1, 0 };
    return mixp_permute(ctx, o->in[0], 2, turned);
}
static mixp_tensor *do_flip(operands *o) { return mixp_flip(ctx, o->in[0], 0); }
static mixp_tensor *do_expand(operands *o) {
    const int64_t wide[3] = { 2, -1, -1 };
    return mixp_expand(ctx, o->in[0], 3, wide);
}
static mixp_tensor *do_pad(operands *o) { return mixp_pad(ctx, o->in[0], 1, 1, 0, 2.0f); }
static mixp_tensor *do_stack(operands *o) { return mixp_stack(ctx, 3, o->in, 1); }
static mixp_tensor *do_linear(operands *o) {
    return mixp_linear(ctx, o->in[0], o->in[1], o->in[2]);
}
static mixp_tensor *do_matmul(operands *o) {
    return mixp_matmul(ctx, o->in[0], o->in[1], 1, 0);
}
static mixp_tensor *do_sum(operands *o) { return mixp_sum(ctx, o->in[0], 0, 0); }
static mixp_tensor *do_mean(operands *o) { return mixp_mean(ctx, o->in[0], MIXP_ALL, 0); }
static mixp_tensor *do_max(operands *o) { return mixp_max(ctx, o->in[0], 1, 0); }
static mixp_tensor *do_max_all(operands *o) { return mixp_max(ctx, o->in[0], MIXP_ALL, 0); }
static mixp_tensor *do_layer_norm(operands *o) {
    return mixp_layer_norm(ctx, o->in[0], o->in[1], o->in[2], 1e-5f);
}
static mixp_tensor *do_rms_norm(operands *o) {
    return mixp_rms_norm(ctx, o->in[0], o->in[1], 1e-5f);
}
static mixp_tensor *do_embedding(operands *o) {
    o->in[1] = ids_of(2, square);
    return mixp_embedding(ctx, o->in[0], o->in[1]);
}
static mixp_tensor *do_gather(operands *o) {
    o->in[1] = ids_of(2, square);
    return mixp_gather(ctx, o->in[0], 1, o->in[1]);
}
static mixp_tensor *do_prod(operands *o) { return mixp_prod(ctx, o->in[0], 1, 0); }
static mixp_tensor *do_cumsum(operands *o) { return mixp_cumsum(ctx, o->in[0], 1); }
static mixp_tensor *do_scatter_add(operands *o) {
    o->in[2] = ids_of(2, square);
    return mixp_scatter_add(ctx, o->in[0], 1, o->in[2], o->in[1]);
}
static mixp_tensor *do_where(operands *o) {
    o->in[2] = ids_of(2, square);
    return mixp_where(ctx, o->in[2], o->in[0], o->in[1]);
}
static mixp_tensor *do_masked_fill(operands *o) {
    o->in[1] = ids_of(2, square);
    return mixp_masked_fill(ctx, o->in[0], o->in[1], 2.0f);
}
static mixp_tensor *do_dropout(operands *o) { return mixp_dropout(ctx, o->in[0], 0.5f, 1); }
static mixp_tensor *do_rope(operands *o) {
    mixp_rope_desc d;
    memset(&d, 0, sizeof d);
    d.head_dim = 2;
    return mixp_rope(ctx, o->in[0], &d);
}
static mixp_tensor *do_cast(operands *o) { return mixp_cast(ctx, o->in[0], MIXP_BF16); }
static mixp_tensor *do_transpose(operands *o) { return mixp_transpose(ctx, o->in[0], 0, 1); }
static mixp_tensor *do_concat(operands *o) { return mixp_concat(ctx, 3, o->in, 1); }
static mixp_tensor *do_slice(operands *o) { return mixp_slice(ctx, o->in[0], 1, 1, 2); }
static mixp_tensor *do_cross_entropy(operands *o) {
    o->in[1] = ids_of(1, four);
    return mixp_cross_entropy(ctx, o->in[0], o->in[1], MIXP_IGNORE);
}
static mixp_tensor *do_linear_cross_entropy(operands *o) {
    o->in[2] = ids_of(1, four);
    return mixp_linear_cross_entropy(ctx, o->in[0], o->in[1], o->in[2], MIXP_IGNORE, 2);
}
static mixp_tensor *do_attention(operands *o) {
    const int64_t bthd[3] = { 1, 4, 4 };
    mixp_attention_desc d;
    int i;
    memset(&d, 0, sizeof d);
    d.heads = 2;
    for (i = 0; i < 3; i++) o->in[i] = mixp_reshape(ctx, o->in[i], 3, bthd);
    return mixp_attention_apply(ctx, o->in[0], o->in[1], o->in[2], &d);
}

/* An operator of a program's own, 2 a, that says nothing of what its backward pass reads, and the
 * same one when it does. */
static mixp_result twice_infer(mixp_call *c)
{ return mixp_call_output(c, MIXP_F32, c->in[0]->rank, c->in[0]->shape); }
static mixp_result twice_forward(mixp_call *c) {
    int64_t i;
    for (i = 0; i < c->out->count; i++)
        mixp_put(mixp_call_y(c), i, 2.0f * mixp_get(mixp_call_x(c, 0), i));
    return MIXP_OK;
}
static mixp_result twice_unread(mixp_call *c) {
    mixp_call_reads(c, 0, 0);
    return twice_forward(c);
}
static mixp_result twice_backward(mixp_call *c) {
    mixp_out dx = mixp_call_dx(c, 0);
    int64_t i;
    for (i = 0; dx.data && i < c->out->count; i++) mixp_put(dx, i, 2.0f * mixp_get(mixp_call_dy(c), i));
    return MIXP_OK;
}
static mixp_tensor *do_own(operands *o) {
    static const mixp_op twice = { "twice", MIXP_CLASS_KEEP, 0, twice_infer, twice_forward,
                                   twice_backward, NULL };
    return mixp_apply(ctx, &twice, 1, o->in, 1, NULL);
}
static mixp_tensor *do_own_unread(operands *o) {
    static const mixp_op twice = { "twice", MIXP_CLASS_KEEP, 0, twice_infer, twice_unread,
                                   twice_backward, NULL };
    return mixp_apply(ctx, &twice, 1, o->in, 1, NULL);
}

/* Of each operator: how many inputs are parameters, and what gradients are made from, as calculus
 * has it: of input i, digit i: a sum of 1, 2, 4 for the inputs, 8 for the result. The slopes of
 * exp, tanh, sigmoid, sqrt and softmax are made from the result. */
typedef struct row {
    const char  *name;
    mixp_tensor *(*apply)(operands *);
    int          params;
    int          reads[3];
} row;

static const row rows[] = {
    { "linear", do_linear, 3, { 2, 1, 0 } }, { "matmul", do_matmul, 2, { 2, 1, 0 } },
    { "attention", do_attention, 3, { 15, 15, 15 } },
    { "add", do_add, 2, { 0, 0, 0 } }, { "sub", do_sub, 2, { 0, 0, 0 } },
    { "mul", do_mul, 2, { 2, 1, 0 } }, { "div", do_div, 2, { 2, 3, 0 } },
    { "maximum", do_maximum, 2, { 3, 3, 0 } }, { "minimum", do_minimum, 2, { 3, 3, 0 } },
    { "swiglu", do_swiglu, 2, { 3, 1, 0 } }, { "swiglu_packed", do_swiglu_packed, 1, { 1, 0, 0 } },
    { "scale", do_scale, 1, { 0, 0, 0 } }, { "neg", do_neg, 1, { 0, 0, 0 } },
    { "relu", do_relu, 1, { 1, 0, 0 } }, { "gelu", do_gelu, 1, { 1, 0, 0 } },
    { "gelu_tanh", do_gelu_tanh, 1, { 1, 0, 0 } }, { "silu", do_silu, 1, { 1, 0, 0 } },
    { "tanh", do_tanh, 1, { 8, 0, 0 } }, { "sigmoid", do_sigmoid, 1, { 8, 0, 0 } },
    { "sqrt", do_sqrt, 1, { 8, 0, 0 } }, { "exp", do_exp, 1, { 8, 0, 0 } },
    { "abs", do_abs, 1, { 1, 0, 0 } }, { "sin", do_sin, 1, { 1, 0, 0 } },
    { "cos", do_cos, 1, { 1, 0, 0 } }, { "clamp", do_clamp, 1, { 1, 0, 0 } },
    { "relu_squared", do_relu_squared, 1, { 1, 0, 0 } },
    { "soft_cap", do_soft_cap, 1, { 1, 0, 0 } }, { "log", do_log, 1, { 1, 0, 0 } },
    { "pow", do_pow, 1, { 1, 0, 0 } }, { "square", do_square, 1, { 1, 0, 0 } },
    { "reciprocal", do_reciprocal, 1, { 1, 0, 0 } }, { "log1p", do_log1p, 1, { 1, 0, 0 } },
    { "expm1", do_expm1, 1, { 1, 0, 0 } }, { "erf", do_erf, 1, { 1, 0, 0 } },
    { "softplus", do_softplus, 1, { 1, 0, 0 } }, { "leaky_relu", do_leaky_relu, 1, { 1, 0, 0 } },
    { "elu", do_elu, 1, { 1, 0, 0 } }, { "add_scalar", do_add_scalar, 1, { 0, 0, 0 } },
    { "rsub", do_rsub, 1, { 0, 0, 0 } }, { "log2", do_log2, 1, { 1, 0, 0 } },
    { "log10", do_log10, 1, { 1, 0, 0 } }, { "acos", do_acos, 1, { 1, 0, 0 } },
    { "asin", do_asin, 1, { 1, 0, 0 } }, { "tan", do_tan, 1, { 8, 0, 0 } },
    { "sinh", do_sinh, 1, { 1, 0, 0 } }, { "cosh", do_cosh, 1, { 1, 0, 0 } },
    { "erfinv", do_erfinv, 1, { 1, 0, 0 } }, { "power", do_power, 2, { 3, 3, 0 } },
    { "atan2", do_atan2, 2, { 3, 3, 0 } }, { "permute", do_permute, 1, { 0, 0, 0 } },
    { "flip", do_flip, 1, { 0, 0, 0 } }, { "expand", do_expand, 1, { 0, 0, 0 } },
    { "pad", do_pad, 1, { 0, 0, 0 } }, { "stack", do_stack, 3, { 0, 0, 0 } },
    { "prod", do_prod, 1, { 0, 0, 0 } }, { "cumsum", do_cumsum, 1, { 0, 0, 0 } },
    { "scatter_add", do_scatter_add, 2, { 4, 4, 0 } },
    { "sum", do_sum, 1, { 0, 0, 0 } }, { "mean", do_mean, 1, { 0, 0, 0 } },
    { "max", do_max, 1, { 0, 0, 0 } }, { "max", do_max_all, 1, { 1, 0, 0 } },
    { "softmax", do_softmax, 1, { 8, 0, 0 } }, { "log_softmax", do_log_softmax, 1, { 8, 0, 0 } },
    { "layer_norm", do_layer_norm, 3, { 3, 1, 0 } }, { "rms_norm", do_rms_norm, 2, { 3, 1, 0 } },
    { "embedding", do_embedding, 1, { 2, 0, 0 } }, { "gather", do_gather, 1, { 2, 0, 0 } },
    { "where", do_where, 2, { 0, 0, 0 } }, { "masked_fill", do_masked_fill, 1, { 0, 0, 0 } },
    { "dropout", do_dropout, 1, { 0, 0, 0 } }, { "rope", do_rope, 1, { 0, 0, 0 } },
    { "cast", do_cast, 1, { 0, 0, 0 } }, { "transpose", do_transpose, 1, { 0, 0, 0 } },
    { "concat", do_concat, 3, { 0, 0, 0 } }, { "slice", do_slice, 1, { 0, 0, 0 } },
    { "cross_entropy", do_cross_entropy, 1, { 3, 0, 0 } },
    { "mse", do_mse, 2, { 3, 3, 0 } }, { "l1", do_l1, 2, { 3, 3, 0 } },
    { "huber", do_huber, 2, { 3, 3, 0 } },
    { "bce_with_logits", do_bce_with_logits, 1, { 3, 0, 0 } },
    { "linear_cross_entropy", do_linear_cross_entropy, 2, { 7, 7, 0 } },
    { "twice", do_own, 1, { 9, 0, 0 } }, { "twice", do_own_unread, 1, { 0, 0, 0 } }
};

static float first_grads[3][16], grads[3][16];

/* One walk: `wanted` has a bit for each input that wants a gradient; `written` is what is written
 * before it, 3: the result, -1: nothing. */
static mixp_result walk(const row *r, int wanted, int written, float out[3][16]) {
    static const char *const names[3] = { "a", "b", "c" };
    operands o;
    mixp_tensor *p[3], *y, *loss, *t;
    mixp_result got;
    int i, vector = r->apply == do_linear || r->apply == do_layer_norm || r->apply == do_rms_norm;
    ctx = mixp_context_new(NULL);
    for (i = 0; i < 3; i++) {
        int flat = vector && (i == 2 || (i == 1 && r->apply != do_linear));
        o.in[i] = p[i] = filled(names[i], flat ? 1 : 2, flat ? four : square);
        if (r->apply == do_sqrt || r->apply == do_log) mixp_fill(p[i], 0.75);
        mixp_tensor_set_requires_grad(p[i], wanted >> i & 1);
    }
    mixp_step_begin(ctx);
    y = r->apply(&o);
    loss = y && y->count > 1 ? mixp_mean(ctx, mixp_scale(ctx, y, 3.0f), MIXP_ALL, 0) : y;
    t = written < 0 ? NULL : written == 3 ? y : o.in[written];
    /* The vectors of means and of the loss are there already: only what `reads` says may matter. */
    if (t) CHECK_INT(mixp_fill(t, t->dtype == MIXP_I32 ? 3.0 : 0.125), MIXP_OK);
    got = mixp_backward(ctx, loss);
    memset(out, 0, 3 * sizeof out[0]);
    for (i = 0; i < r->params && got == MIXP_OK; i++)
        if (wanted >> i & 1) mixp_read(p[i]->grad, out[i], MIXP_F32, p[i]->count);
    if (got != MIXP_OK) {
        char said[96];
        snprintf(said, sizeof said, "was written by mixp_fill since %s read it", r->name);
        told(MIXP_ERR_ORDER, said);
        for (i = 0; i < 3; i++) CHECK(p[i]->grad == NULL);
    }
    mixp_context_free(ctx);
    return got;
}

/* Every operator, every set of inputs that want a gradient, and each tensor written: a walk is
 * refused where its gradients are made from that, and has the same bits where they are not. */
static void what_a_walk_reads(void) {
    size_t k;
    int wanted, written, i;
    for (k = 0; k < sizeof rows / sizeof rows[0]; k++)
        for (wanted = 1; wanted < 1 << rows[k].params; wanted++) {
            int reads = 0;
            for (i = 0; i < rows[k].params; i++)
                if (wanted >> i & 1) reads |= rows[k].reads[i];
            CHECK_INT(walk(&rows[k], wanted, -1, first_grads), MIXP_OK);
            for (written = 0; written < 4; written++) {
                mixp_result got = walk(&rows[k], wanted, written, grads);
                if (got != (reads >> written & 1 ? MIXP_ERR_ORDER : MIXP_OK)) {
                    test_bad++;
                    TEST_SHOW("%s, wanted %d, written %d: %s", rows[k].name, wanted, written,
                              mixp_result_text(got));
                }
                if (got == MIXP_OK) CHECK_INT(memcmp(first_grads, grads, sizeof grads), 0);
            }
        }
}

/* Who wrote it is named; and a step, the usual one. */
static void who_has_written(void) {
    static const char *const by[] = { "mixp_write", "mixp_fill", "mixp_init", "mixp_tensor_touch",
                                      "mixp_copy", "an optimizer" };
    float x[16] = { 0 };
    int i;
    for (i = 0; i < 6; i++) {
        mixp_tensor *w, *other, *once, *twice;
        mixp_optimizer *opt;
        ctx = mixp_context_new(NULL);
        w = filled("fc.w", 2, square);
        other = filled("other", 2, square);
        opt = new_sgd(ctx);
        mixp_optimizer_add(opt, w, NULL);
        mixp_optimizer_add(opt, other, NULL);
        mixp_step_begin(ctx);
        once = mixp_mean(ctx, mixp_mul(ctx, w, other), MIXP_ALL, 0);
        twice = mixp_sum(ctx, mixp_mul(ctx, w, other), MIXP_ALL, 0);
        CHECK_INT(mixp_backward(ctx, once), MIXP_OK);
        if (i == 0) mixp_write(w, x, MIXP_F32, 16);
        if (i == 1) mixp_fill(w, 1.0);
        if (i == 2) mixp_init_normal(w, 0.0, 1.0);
        if (i == 3) mixp_tensor_touch(w);
        if (i == 4) mixp_copy(w, other);
        if (i == 5) CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        CHECK_INT(mixp_backward(ctx, twice), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, by[i]);
        CHECK(w->grad != NULL && other->grad != NULL);    /* of the walk before */
        mixp_context_free(ctx);
    }
}

/* Two shapes of one memory: what is written through one is written for those who read the other. */
static void written_through_another_shape(void) {
    const int64_t sixteen[1] = { 16 };
    int which;
    for (which = 0; which < 4; which++) {
        mixp_tensor *w, *h, *flat, *again, *loss;
        ctx = mixp_context_new(NULL);
        w = filled("w", 2, square);
        mixp_step_begin(ctx);
        h = mixp_scale(ctx, w, 2.0f);
        flat = mixp_reshape(ctx, h, 1, sixteen);
        again = mixp_reshape(ctx, flat, 2, square);
        loss = mixp_add(ctx, mixp_mean(ctx, mixp_gelu(ctx, which < 2 ? flat : h), MIXP_ALL, 0),
                        mixp_mean(ctx, again, MIXP_ALL, 0));
        mixp_fill(which == 0 ? h : which == 1 || which == 2 ? again : flat, 1.0);
        CHECK_INT(mixp_backward(ctx, loss), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "gelu read it");
        mixp_context_free(ctx);
    }
}

/* A weight under autocast is read as its low copy. */
static void written_behind_a_low_copy(void) {
    mixp_tensor *w, *x, *loss = NULL;
    ctx = mixp_context_new(NULL);
    w = filled("w", 2, square);
    x = filled("x", 2, square);
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_BF16) { loss = mixp_mean(ctx, mixp_linear(ctx, x, w, NULL), MIXP_ALL, 0); }
    mixp_fill(w, 1.0);
    CHECK_INT(mixp_backward(ctx, loss), MIXP_ERR_ORDER);
    told(MIXP_ERR_ORDER, "'w'");
    mixp_context_free(ctx);
}

/* Legal: what is written after the walk, before the forward pass, or read by nothing that is walked. */
static void written_in_time(void) {
    mixp_tensor *w, *b, *h;
    int i;
    ctx = mixp_context_new(NULL);
    w = filled("w", 2, square);
    b = filled("b", 2, square);
    for (i = 0; i < 3; i++) {
        mixp_step_begin(ctx);
        w->grad = b->grad = NULL;
        mixp_fill(b, 1.0 + i);
        h = mixp_mul(ctx, w, b);
        MIXP_NO_GRAD(ctx) { mixp_gelu(ctx, h); }
        CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, h, MIXP_ALL, 0)), MIXP_OK);
        mixp_fill(b, 7.0);
        mixp_fill(h, 7.0);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(a_state_kept_as_a_tensor);
    RUN(every_call_refuses_it);
    RUN(losses_kept_in_a_list);
    RUN(a_state_is_carried);
    RUN(what_mixp_copy_takes);
    RUN(what_a_walk_reads);
    RUN(who_has_written);
    RUN(written_through_another_shape);
    RUN(written_behind_a_low_copy);
    RUN(written_in_time);
    return test_report();
}
