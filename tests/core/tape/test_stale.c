/* test_stale.c - stale tensors, from an earlier step, are refused by every call that takes a
 * tensor. A state is carried over on the device. A walk refuses inputs written since their
 * operator read them. Numbers never change silently.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "new_optimizer.h"
#include "operators.h"

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
    for (int i = 0; i < 64; i++) x[i] = number(i + (int)name[0]);
    mixp_write(t, x, MIXP_F32, t->count);
    return t;
}

/* --- tensors of an earlier step -------------------------------------------------------------- */

/* A step of an RNN: seven tensors, in the same order each time. */
static mixp_tensor *cell(mixp_tensor *w, mixp_tensor *u, mixp_tensor *h, int at, int late) {
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = number(i + at);
    mixp_tensor *in = mixp_input(ctx, MIXP_F32, 2, square, x);
    mixp_tensor *z = mixp_linear(ctx, in, w, NULL);
    if (late) z = mixp_tanh(ctx, mixp_gelu(ctx, mixp_scale(ctx, z, 0.5f)));
    if (!h) return mixp_tanh(ctx, z);
    return mixp_tanh(ctx, mixp_add(ctx, z, mixp_linear(ctx, h, u, NULL)));
}

/* The state of the last step kept as a tensor, read early in this step and late in it, where other
 * tensors have long been made. */
static void a_state_kept_as_a_tensor(void) {
    for (int late = 0; late < 2; late++) {
        mixp_tensor *w, *u, *h = NULL;
        ctx = mixp_context_new(NULL);
        w = filled("w", 2, square);
        u = filled("u", 2, square);
        for (int at = 0; at < 9; at++) {
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
    float x[16];
    ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = new_sgd(ctx);
    live = filled("w", 2, square);
    for (int i = 0; i < 3; i++) {
        mixp_step_begin(ctx);
        t = mixp_tanh(ctx, live);
        mixp_step_begin(ctx);
        mixp_sigmoid(ctx, mixp_tanh(ctx, live));
        CHECK_INT(mixp_read(t, x, MIXP_F32, 16), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "mixp_read: the tensor is from an earlier step");
        CHECK_INT(mixp_write(t, x, MIXP_F32, 16), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "mixp_write: the tensor is from an earlier step");
        CHECK_INT(mixp_fill(t, 1.0), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "mixp_fill: the tensor is from an earlier step");
        CHECK_INT(mixp_init_normal(t, 0.0, 1.0), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "mixp_init_normal: the tensor is from an earlier step");
        CHECK_INT(mixp_init_xavier_normal(t, 1.0), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "from an earlier step");
        CHECK_INT(mixp_copy(live, t), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "mixp_copy: the tensor is from an earlier step");
        CHECK_INT(mixp_copy(t, live), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "from an earlier step");
        CHECK(mixp_relu(ctx, t) == NULL);
        told(MIXP_ERR_ORDER, "relu: input 0 is from an earlier step");
        CHECK(mixp_add(ctx, live, t) == NULL);
        told(MIXP_ERR_ORDER, "add: input 1 is from an earlier step");
        CHECK(mixp_dropout(ctx, t, 0.0f, 1) == NULL);
        told(MIXP_ERR_ORDER, "from an earlier step");
        CHECK_INT(mixp_split(ctx, t, 0, 2, parts), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "from an earlier step");
        CHECK_INT(mixp_backward(ctx, t), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "from an earlier step");
        CHECK_INT(mixp_tensor_set_requires_grad(t, 1), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "from an earlier step");
        CHECK_INT(mixp_tensor_set_disposable(t, 1), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "from an earlier step");
        mixp_tensor_touch(t);
        told(MIXP_ERR_ORDER, "from an earlier step");
        CHECK_INT(mixp_ranks_sum(t), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "from an earlier step");
        CHECK_INT(mixp_optimizer_set_loss(opt, t), MIXP_ERR_ORDER);
        told(MIXP_ERR_ORDER, "from an earlier step");
        t = mixp_mean(ctx, live, MIXP_ALL, 0);
        mixp_step_begin(ctx);
        CHECK(isnan(mixp_item(t)));
        told(MIXP_ERR_ORDER, "mixp_item: the tensor is from an earlier step");
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
    told(MIXP_ERR_ORDER, "mixp_item: the tensor is from an earlier step");
    mixp_context_free(ctx);
}

static void losses_kept_in_a_list(void) {
    for (int apart = 1; apart <= 12; apart++) losses_in_a_list(apart);
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
    int64_t allocations = 0;
    memset(&d, 0, sizeof d);
    kernels.convert = copies_kernel;
    device.kernels = &kernels;
    d.device = &device;
    ctx = mixp_context_new(&d);
    mixp_tensor *tw = filled("w", 2, square);
    mixp_tensor *tu = filled("u", 2, square);
    mixp_tensor *h = mixp_param(ctx, "h", MIXP_F32, 2, square);
    mixp_tensor_set_requires_grad(h, 0);
    mixp_read(tw, w, MIXP_F32, 16);
    mixp_read(tu, u, MIXP_F32, 16);
    for (int at = 0; at < 6; at++) {
        mixp_step_begin(ctx);
        tw->grad = tu->grad = NULL;
        mixp_tensor *new_h = cell(tw, tu, h, at, 0);
        CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, new_h, MIXP_ALL, 0)), MIXP_OK);
        copies = 0;
        CHECK_INT(mixp_copy(h, new_h), MIXP_OK);
        CHECK_INT(copies, 1);
        for (int r = 0; r < 4; r++)
            for (int c = 0; c < 4; c++) {
                double z = 0;
                for (int i = 0; i < 4; i++)
                    z += (double)number(r * 4 + i + at) * w[c * 4 + i] + state[r * 4 + i] * u[c * 4 + i];
                next[r * 4 + c] = tanh(z);
            }
        memcpy(state, next, sizeof state);
        CHECK_INT(mixp_read(h, got, MIXP_F32, 16), MIXP_OK);
        for (int i = 0; i < 16; i++) CHECK_NEAR(got[i], state[i], 1e-5);
        if (at == 1) allocations = mixp_context_memory(ctx).allocations;
    }
    CHECK_INT(mixp_context_memory(ctx).allocations, allocations);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* Between dtypes, onto itself; and what it refuses. */
static void what_mixp_copy_takes(void) {
    static const float x[4] = { 1.0f, -2.5f, 65504.0f, 1e-7f };
    float got[4];
    ctx = mixp_context_new(NULL);
    mixp_context *other = mixp_context_new(NULL);
    mixp_tensor *a = mixp_param(ctx, "a", MIXP_F32, 1, four);
    mixp_tensor *b = mixp_param(ctx, "b", MIXP_F16, 1, four);
    mixp_tensor *ids = mixp_input(ctx, MIXP_I32, 1, four, x);
    mixp_write(a, x, MIXP_F32, 4);
    uint64_t version = b->version;
    CHECK_INT(mixp_copy(b, a), MIXP_OK);
    CHECK(b->version > version);
    CHECK_INT(mixp_read(b, got, MIXP_F32, 4), MIXP_OK);
    for (int i = 0; i < 4; i++)
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

/* An operator of a program's own, 2 a, that says nothing of what its backward pass reads, and the
 * same one when it does. */
static mixp_result twice_infer(mixp_call *c)
{ return mixp_call_output(c, MIXP_F32, c->in[0]->rank, c->in[0]->shape); }
static mixp_result twice_forward(mixp_call *c) {
    for (int64_t i = 0; i < c->out->count; i++)
        mixp_put(mixp_call_y(c), i, 2.0f * mixp_get(mixp_call_x(c, 0), i));
    return MIXP_OK;
}
static mixp_result twice_unread(mixp_call *c) {
    mixp_call_reads(c, 0, 0);
    return twice_forward(c);
}
static mixp_result twice_backward(mixp_call *c) {
    mixp_out dx = mixp_call_dx(c, 0);
    for (int64_t i = 0; dx.data && i < c->out->count; i++) mixp_put(dx, i, 2.0f * mixp_get(mixp_call_dy(c), i));
    return MIXP_OK;
}
static mixp_tensor *own(const op_in *o) {
    static const mixp_op twice = { "twice", MIXP_CLASS_KEEP, 0, twice_infer, twice_forward,
                                   twice_backward, NULL };
    mixp_tensor *x = o->x;
    return mixp_apply(ctx, &twice, 1, &x, 1, NULL);
}
static mixp_tensor *own_unread(const op_in *o) {
    static const mixp_op twice = { "twice", MIXP_CLASS_KEEP, 0, twice_infer, twice_unread,
                                   twice_backward, NULL };
    mixp_tensor *x = o->x;
    return mixp_apply(ctx, &twice, 1, &x, 1, NULL);
}

/* A maximum of all elements is compared with them again; that of a row has kept its place. */
static mixp_tensor *max_of_all(const op_in *o) { return mixp_max(ctx, o->x, MIXP_ALL, 0); }

static const op_row more_rows[] = {
    { "twice", MIXP_OP_COUNT, "KLRR", "", 0, "x:xr", own }, { "twice", MIXP_OP_COUNT, "KLRR", "", 0, "x:", own_unread },
    { "max", MIXP_OP_COUNT, "KLRR", "", 0, "x:x", max_of_all }
};
enum { MORE_ROWS = sizeof more_rows / sizeof *more_rows };

static const char letters[] = "xyzwvuiajmr";

/* The operands of a row: parameters of 4 x 4 and of 4 numbers, of which those in `wanted` want a gradient; and ids. */
static op_in operands_of(const op_row *r, const op_input *in, int n, int wanted) {
    static const int32_t ids[16] = { 1, 2, 0, 3, 2, 1, 3, 0, 1, 1, 2, 0, 3, 2, 1, 0 };
    uint8_t mask[16];
    op_in   o;
    memset(&o, 0, sizeof o);
    o.c = ctx;
    for (const char *l = letters; *l != 'i'; l++) {
        const int    flat = *l == 'v' || *l == 'u';
        const char   name[2] = { *l, '\0' };
        mixp_tensor *t = *op_operand(&o, *l) = filled(name, flat ? 1 : 2, flat ? four : square);
        float        x[16];
        CHECK_INT(mixp_read(t, x, MIXP_F32, t->count), MIXP_OK);
        for (int i = 0; i < t->count && (*l == 'x' || *l == 'y'); i++) x[i] = op_in_domain(r, x[i]);
        CHECK_INT(mixp_write(t, x, MIXP_F32, t->count), MIXP_OK);
        mixp_tensor_set_requires_grad(t, 0);
    }
    for (int i = 0; i < n; i++) mixp_tensor_set_requires_grad(*op_operand(&o, in[i].letter), wanted >> i & 1);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    for (int i = 0; i < 16; i++) mask[i] = (uint8_t)ids[i];
    o.i = mixp_input(ctx, MIXP_I32, 1, four, ids);
    o.j = mixp_input(ctx, MIXP_I32, 1, four, ids + 4);
    o.a = mixp_input(ctx, MIXP_I32, 2, square, ids);
    o.m = mixp_input(ctx, MIXP_U8, 2, square, mask);
    o.k = r->k < -1.0f ? 2.0f : r->k;
    return o;
}

static float first_grads[OP_INPUTS][16], grads[OP_INPUTS][16];

/* One walk: `wanted` has a bit for each input that wants a gradient; `written` is the letter of what is written before
 * it, r: the result, 0: nothing. */
static mixp_result walk(const op_row *r, const char *name, int wanted, char written, float out[OP_INPUTS][16]) {
    op_input in[OP_INPUTS];
    const int n = op_inputs(r, in);
    ctx = mixp_context_new(NULL);
    op_in o = operands_of(r, in, n, wanted);
    mixp_tensor *y = r->run(&o);
    mixp_tensor *loss = y && y->count > 1 ? mixp_mean(ctx, mixp_scale(ctx, y, 3.0f), MIXP_ALL, 0) : y;

    /* The vectors of means and of the loss are there already: only what the row says may matter. */
    mixp_tensor *t = !written ? NULL : written == 'r' ? y : *op_operand(&o, written);
    if (t) CHECK_INT(mixp_fill(t, t->dtype == MIXP_I32 ? 3.0 : 0.125), MIXP_OK);
    mixp_result got = mixp_backward(ctx, loss);
    memset(out, 0, OP_INPUTS * sizeof out[0]);
    for (int i = 0; i < n; i++) {
        t = *op_operand(&o, in[i].letter);
        if (got != MIXP_OK) CHECK(t->grad == NULL);
        else if (wanted >> i & 1) mixp_read(t->grad, out[i], MIXP_F32, t->count);
    }
    if (got != MIXP_OK) {
        char said[96];
        snprintf(said, sizeof said, "was written by mixp_fill since %s read it", name);
        told(MIXP_ERR_ORDER, said);
    }
    mixp_context_free(ctx);
    return got;
}

/* Every set of inputs that want a gradient, and each tensor written: a walk is refused where its gradients are made
 * from that, and has the same bits where they are not. */
static void what_a_walk_of(const op_row *r, const char *name) {
    op_input in[OP_INPUTS];
    const int n = op_inputs(r, in);
    for (int wanted = 1; wanted < 1 << n; wanted++) {
        CHECK_INT(walk(r, name, wanted, 0, first_grads), MIXP_OK);
        for (const char *written = letters; *written; written++) {
            mixp_result got = walk(r, name, wanted, *written, grads);
            int reads = 0;
            for (int i = 0; i < n; i++) reads |= (wanted >> i & 1) && strchr(in[i].reads, *written);
            if (got != (reads ? MIXP_ERR_ORDER : MIXP_OK)) {
                test_bad++;
                TEST_SHOW("%s, wanted %d, written %c: %s", name, wanted, *written, mixp_result_text(got));
            }
            if (got == MIXP_OK) CHECK_INT(memcmp(first_grads, grads, sizeof grads), 0);
        }
    }
}

static void what_a_walk_reads(void) {
    for (int i = 0; i < MIXP_OP_COUNT; i++) what_a_walk_of(op_row_of((mixp_op_id)i), op_name((mixp_op_id)i));
    for (int i = 0; i < MORE_ROWS; i++) what_a_walk_of(&more_rows[i], more_rows[i].name);
}

/* Who wrote it is named; and a step, the usual one. */
static void who_has_written(void) {
    static const char *const by[] = { "mixp_write", "mixp_fill", "mixp_init", "mixp_tensor_touch",
                                      "mixp_copy", "an optimizer" };
    float x[16] = { 0 };
    for (int i = 0; i < 6; i++) {
        ctx = mixp_context_new(NULL);
        mixp_tensor *w = filled("fc.w", 2, square);
        mixp_tensor *other = filled("other", 2, square);
        mixp_optimizer *opt = new_sgd(ctx);
        mixp_optimizer_add(opt, w, NULL);
        mixp_optimizer_add(opt, other, NULL);
        mixp_step_begin(ctx);
        mixp_tensor *once = mixp_mean(ctx, mixp_mul(ctx, w, other), MIXP_ALL, 0);
        mixp_tensor *twice = mixp_sum(ctx, mixp_mul(ctx, w, other), MIXP_ALL, 0);
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
    for (int which = 0; which < 4; which++) {
        ctx = mixp_context_new(NULL);
        mixp_tensor *w = filled("w", 2, square);
        mixp_step_begin(ctx);
        mixp_tensor *h = mixp_scale(ctx, w, 2.0f);
        mixp_tensor *flat = mixp_reshape(ctx, h, 1, sixteen);
        mixp_tensor *again = mixp_reshape(ctx, flat, 2, square);
        mixp_tensor *loss = mixp_add(ctx, mixp_mean(ctx, mixp_gelu(ctx, which < 2 ? flat : h), MIXP_ALL, 0),
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
    ctx = mixp_context_new(NULL);
    mixp_tensor *w = filled("w", 2, square);
    mixp_tensor *b = filled("b", 2, square);
    for (int i = 0; i < 3; i++) {
        mixp_step_begin(ctx);
        w->grad = b->grad = NULL;
        mixp_fill(b, 1.0 + i);
        mixp_tensor *h = mixp_mul(ctx, w, b);
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
