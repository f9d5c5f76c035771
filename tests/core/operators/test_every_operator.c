/* test_every_operator.c - what is true of every operator, asserted over tests/support/operators.h, which has a row for
 * each operator of the table: the tangent of mixp_jvp, the gradient of mixp_backward and central differences are three
 * views of one derivative J,
 *     s (J t)  =  (J' s) t  =  d/dh s f(x + h t) at h = 0,
 * by each input, in each dtype, at numbers, reductions and options that select another formula, and at corners
 * (ties, zeros, bounds), where differences say nothing but the first two still agree.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"
#include "operators.h"
#include "shared_work.h"
#include "examples/conv.h"
#include "examples/recurrent.h"
#include "any_batch.h"

enum { ROWS = 3, COLS = 8, N = ROWS * COLS, MOST = 64 * N, NUMBERS = 8 };

/* One evaluation: which function, by which input, on which data. */
typedef struct setting {
    const op_row  *row;
    char           letter;      /* of the input that the derivative is taken by */
    float          k;
    mixp_reduction reduction;
    mixp_op_id     loss;
    unsigned       options;
    int            corners;     /* small whole numbers, in which inputs have ties */
    mixp_dtype     dtype;
} setting;

/* What the three views are made from. */
typedef struct views {
    double forward, forward_size, back, back_size;
    int    has_tangent, is_made;
} views;

static mixp_context *ctx;
static int64_t laws, without_tangent, refused;

/* Numbers of which no two are equal, none is 0, and bf16 holds all. */
static float number(int i) { return (float)(2 * ((i * 37 + 11) % 101 - 50) + 1) / 64.0f; }
static float corner(int i) { return (float)((i * 7 + 3) % 5 - 2) / 2.0f; }
static float direction(int i) { return (float)((i * 5 + 2) % 7 - 3) / 4.0f + 0.125f; }
static float weight(int i) { return (float)((i * 11 + 4) % 9 - 4) / 4.0f + 0.125f; }

/* An operand whose data begin at number `from`; the one of the setting's letter is moved by h along its direction. */
static mixp_tensor *real(const setting *s, char letter, int from, int rank, const int64_t *shape, float h) {
    float v[MOST];
    int n = 1;
    for (int i = 0; i < rank; i++) n *= (int)shape[i];
    for (int i = 0; i < n; i++) {
        v[i] = s->corners ? corner(from + i) : number(from + i);
        if (letter == 'x' || letter == 'y') v[i] = s->corners ? v[i] : op_in_domain(s->row, v[i]);
        if (s->letter == letter) v[i] += h * direction(i);
    }
    mixp_tensor *t = mixp_input(ctx, MIXP_F32, rank, shape, v);
    if (s->dtype != MIXP_F32) t = mixp_cast(ctx, t, s->dtype);
    if (s->letter == letter) mixp_tensor_set_requires_grad(t, 1);
    return t;
}

static op_in operands(const setting *s, float h) {
    static const int64_t matrix[2] = { ROWS, COLS }, square[2] = { COLS, COLS }, row[1] = { COLS }, column[1] = { ROWS };
    int32_t ids[N];
    uint8_t mask[N];
    op_in o;
    memset(&o, 0, sizeof o);
    o.c = ctx;
    o.x = real(s, 'x', 0, 2, matrix, h);
    o.y = real(s, 'y', N, 2, matrix, h);
    o.z = real(s, 'z', 2 * N, 2, matrix, h);
    o.w = real(s, 'w', 10, 2, square, h);
    o.v = real(s, 'v', 30, 1, row, h);
    o.u = real(s, 'u', 60, 1, row, h);
    for (int i = 0; i < N; i++) ids[i] = (i * 5 + i / 8) % COLS;
    for (int i = 0; i < N; i++) mask[i] = (uint8_t)(i % 3 == 0);
    o.i = mixp_input(ctx, MIXP_I32, 1, column, ids + 3);
    o.a = mixp_input(ctx, MIXP_I32, 2, matrix, ids);
    o.j = mixp_input(ctx, MIXP_I32, 1, row, ids + 2);
    o.m = mixp_input(ctx, MIXP_U8, 2, matrix, mask);
    o.k = s->k;
    o.reduction = s->reduction;
    o.loss = s->loss;
    o.options = s->options;
    return o;
}

/* The result, or NULL if the operator refuses the setting. */
static mixp_tensor *result_of(const setting *s, float h, op_in *o) {
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    *o = operands(s, h);
    mixp_tensor *y = s->row->run(o);
    if (!y) CHECK(mixp_context_error(ctx, NULL) != MIXP_OK);
    mixp_context_clear_error(ctx);
    return y;
}

/* sum of s f(x + h t), in double. */
static double value_at(const setting *s, float h) {
    static double out[MOST];
    double sum = 0;
    op_in  o;
    mixp_tensor *y = result_of(s, h, &o);
    if (!y || y->count > MOST || mixp_read(y, out, MIXP_F64, y->count) != MIXP_OK) return NAN;
    for (int64_t i = 0; i < y->count; i++) sum += out[i] * (double)weight((int)i);
    return sum;
}

/* sum of a[i] of(i), and of its terms' sizes. */
static double dot(const mixp_tensor *t, float (*of)(int), double *size) {
    static double v[AB_MOST];
    double sum = *size = 0;
    CHECK_INT(mixp_read(t, v, MIXP_F64, t->count), MIXP_OK);
    for (int64_t i = 0; i < t->count; i++) sum += v[i] * (double)of((int)i), *size += fabs(v[i] * (double)of((int)i));
    return sum;
}

static views views_of(const setting *s) {
    float t[MOST], w[MOST];
    views v;
    op_in o;
    mixp_tensor *y = result_of(s, 0, &o), *x = *op_operand(&o, s->letter), *d, *loss;
    memset(&v, 0, sizeof v);
    if (!y) return v;
    for (int i = 0; i < MOST; i++) t[i] = direction(i), w[i] = weight(i);

    /* Forward. An operator without a tangent is refused by its name. */
    if (!y->own.from_tape) {        /* dropout of nothing is x itself; of the losses not each has each operand */
        CHECK(s->row->id == MIXP_OP_COUNT || strchr(s->row->traits, 'D'));
        return v;
    }
    d = mixp_jvp(ctx, y, x, mixp_input(ctx, MIXP_F32, x->rank, x->shape, t));
    if (d) v.forward = dot(d, weight, &v.forward_size);
    else CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    v.has_tangent = d != NULL;
    if (s->row->id < MIXP_OP_COUNT && (d == NULL) != op_has_no_tangent(s->row)) {
        test_bad++;
        TEST_SHOW("%s: mixp_jvp %s it; the row's gradients say otherwise", s->row->name, d ? "supports" : "refuses");
    }

    /* Back. */
    loss = mixp_sum(ctx, mixp_mul(ctx, mixp_cast(ctx, y, MIXP_F32), mixp_input(ctx, MIXP_F32, y->rank, y->shape, w)), MIXP_ALL, 0);
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    CHECK(x->grad != NULL);
    if (x->grad) v.back = dot(x->grad, direction, &v.back_size);
    v.is_made = 1;
    return v;
}

static int is_finite(double v) { return fabs(v) < HUGE_VAL; }

static void differ(const setting *s, const char *what, double a, double b) {
    test_bad++;
    TEST_SHOW("%s by %c, k %g, reduction %d, loss %d, options %x, %s%s: %s %.8g, %.8g", s->row->name, s->letter, (double)s->k,
              (int)s->reduction, (int)s->loss, s->options, mixp_dtype_name(s->dtype), s->corners ? ", corners" : "", what, a, b);
}

/* What a random operator makes again is another result, and a cast rounds what moves: no differences of these. */
static int has_differences(const setting *s) {
    return s->dtype == MIXP_F32 && !s->corners && s->row->is[OP_LEVEL1] != 'C' && !strchr(s->row->traits, 'D');
}

static void law(setting s) {
    static const double shares[3] = { 2e-6, 4e-3, 3e-2 };
    const double share = shares[s.dtype == MIXP_F16 ? 1 : s.dtype == MIXP_BF16 ? 2 : 0];
    const float  h = 1.0f / 1024.0f;
    const views  v = views_of(&s);
    refused += !v.is_made;
    if (!v.is_made) return;
    laws++;
    without_tangent += !v.has_tangent;
    if (v.has_tangent && is_finite(v.forward) != is_finite(v.back))
        differ(&s, "tangent and gradient: only one is finite:", v.forward, v.back);
    if (!is_finite(v.back)) {
        if (!s.corners && s.k < 4.0f) differ(&s, "gradient is not finite, tangent", v.back, v.forward);
        return;
    }
    if (v.has_tangent && !(fabs(v.forward - v.back) <= share * (v.forward_size + v.back_size) + 1e-7))
        differ(&s, "tangent and gradient", v.forward, v.back);

    /* Beside differences, which a border of Inf has none of, or a low gradient beside that of the same numbers in f32. */
    if (has_differences(&s) && s.k < 4.0f) {
        const double numeric = (value_at(&s, h) - value_at(&s, -h)) / (2.0 * (double)h);
        if (!(fabs(numeric - v.back) <= 1e-3 * v.back_size + 1e-3)) differ(&s, "gradient and difference", v.back, numeric);
    } else if (s.dtype != MIXP_F32 && s.row->is[OP_LEVEL1] != 'C' && !strchr(s.row->traits, 'D')) {
        setting f32 = s;
        f32.dtype = MIXP_F32;
        views wide = views_of(&f32);
        if (!(fabs(wide.back - v.back) <= share * (wide.back_size + v.back_size) + 1e-7))
            differ(&s, "gradient, and that in f32", v.back, wide.back);
    }
}

static void every_tangent_and_gradient(void) {
    static const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    static const float numbers[NUMBERS] = { 1.25f, 0.0f, 1.0f, -1.0f, 2.0f, 0.5f, 3.0f, INFINITY };
    setting s;
    ctx = mixp_context_new(NULL);
    memset(&s, 0, sizeof s);
    for (int i = 0; i < OP_ROWS; i++) {
        op_input in[OP_INPUTS];
        const int n = op_inputs(&op_rows[i], in);
        s.row = &op_rows[i];
        for (int at = 0; at < n * 3 * NUMBERS * 3 * 2 && strcmp(s.row->name, "mixp_LOSS"); at++) {
            s.letter = in[at % n].letter;
            s.dtype = dtypes[at / n % 3];
            s.k = numbers[at / n / 3 % NUMBERS];
            s.reduction = (mixp_reduction)(at / n / 3 / NUMBERS % 3);
            s.corners = at / n / 9 / NUMBERS;
            law(s);
        }
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
    printf("  %lld laws, %lld without a tangent, %lld refused\n", (long long)laws, (long long)without_tangent, (long long)refused);
}

/* --- each row applies the operator that it names --------------------------------------------- */

static int seen;
static void note(mixp_context *of, const mixp_sight *sight, void *name) {
    (void)of;
    seen |= strcmp(sight->op, (const char *)name) == 0;
}

static void each_row_applies_its_operator(void) {
    setting s;
    op_in   o;
    ctx = mixp_context_new(NULL);
    memset(&s, 0, sizeof s);
    for (int i = 0; i < MIXP_OP_COUNT; i++) {
        mixp_op_id id = (mixp_op_id)i;
        const op_row *r = op_row_of(id);
        mixp_observer observer = { note, NULL, 0 };
        char name[64];
        snprintf(name, sizeof name, "%s", op_name(id));
        observer.user = name;
        s.row = r;
        s.k = r->k;
        seen = 0;
        CHECK_INT(mixp_observe(ctx, &observer, NULL), MIXP_OK);
        CHECK(result_of(&s, 0, &o) != NULL);
        /* Reshapes, masks and ids have no site, and so no observer. */
        if (!seen && !strchr(r->traits, 'O')) { test_bad++; TEST_SHOW("%s: the row applies another operator", op_name(id)); }
        /* Not compared in other batches: random numbers, and what autocast bans. */
        if (r->is[OP_BATCH] == 'N') CHECK(strchr(r->traits, 'D') || mixp_op_builtin(id)->cls == MIXP_CLASS_BANNED);
    }
    CHECK_INT(mixp_observe(ctx, NULL, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

/* Each loss with each option, and with each two of them. */
static void every_option_of_losses(void) {
    setting s;
    ctx = mixp_context_new(NULL);
    memset(&s, 0, sizeof s);
    s.row = &op_rows[OP_ROWS - 1];
    laws = without_tangent = refused = 0;
    for (int loss = 0; loss <= MIXP_OP_COUNT; loss++) {
        const char *traits = loss == MIXP_OP_COUNT ? "O" : op_row_of((mixp_op_id)loss)->traits;
        if (!strchr(traits, 'O')) continue;
        for (unsigned options = 0; options < OP_OPTIONS; options++) {
            const unsigned rest = options & (options - 1);
            if (rest & (rest - 1)) continue;
            for (int at = 0; at < 5 * MIXP_REDUCE_COUNT * 2; at++) {
                s.loss = (mixp_op_id)loss;
                s.options = options;
                s.letter = "xywvz"[at % 5];
                s.reduction = (mixp_reduction)(at / 5 % MIXP_REDUCE_COUNT);
                s.corners = at / 5 / MIXP_REDUCE_COUNT;
                law(s);
            }
        }
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
    printf("  %lld laws, %lld without a tangent, %lld refused\n", (long long)laws, (long long)without_tangent, (long long)refused);
}

/* --- the cases of any_batch.h: kinds of attention, products, convolutions, layers ------------------ */

/* x moved by h along its direction, in one sequence. */
static mixp_tensor *case_at(ab_net *n, const ab_case *k, float h) {
    static float  x[AB_TIME * AB_WIDTH];
    const int64_t shape[3] = { 1, n->part.nt, AB_WIDTH };
    for (int64_t i = 0; i < shape[1] * AB_WIDTH; i++) x[i] = ab_x[i] + h * direction((int)i);
    CHECK_INT(mixp_step_begin(n->ctx), MIXP_OK);
    n->x = mixp_input(n->ctx, MIXP_F32, 3, shape, x);
    n->y = mixp_input(n->ctx, MIXP_F32, 3, shape, ab_y);
    mixp_tensor_set_requires_grad(n->x, 1);
    return k->run(n);
}

static mixp_tensor *case_loss(ab_net *n, mixp_tensor *y) {
    static float w[AB_MOST];
    for (int i = 0; i < AB_MOST; i++) w[i] = weight(i);
    return mixp_sum(n->ctx, mixp_mul(n->ctx, y, mixp_input(n->ctx, MIXP_F32, y->rank, y->shape, w)), MIXP_ALL, 0);
}

static void case_law(const ab_case *k) {
    static float t[AB_TIME * AB_WIDTH];
    const float  h = 1.0f / 2048.0f;
    double up, down, back, back_size, forward, forward_size;
    ab_net n;
    ab_open(&n, NULL, &ab_modes[0], 1);
    n.part = ab_whole;
    n.part.nb = 1;
    n.part.nt = k->kind == AB_ROW ? 3 : AB_TIME;
    for (int i = 0; i < AB_TIME * AB_WIDTH; i++) t[i] = direction(i);
    up = mixp_item(case_loss(&n, case_at(&n, k, h)));
    down = mixp_item(case_loss(&n, case_at(&n, k, -h)));
    mixp_tensor *y = case_at(&n, k, 0);
    mixp_tensor *d = mixp_jvp(n.ctx, y, n.x, mixp_input(n.ctx, MIXP_F32, 3, n.x->shape, t));
    mixp_context_clear_error(n.ctx);
    forward = d ? dot(d, weight, &forward_size) : 0.0;
    CHECK_INT(mixp_backward(n.ctx, case_loss(&n, y)), MIXP_OK);
    back = dot(n.x->grad, direction, &back_size);
    if (d && !(fabs(forward - back) <= 2e-6 * (forward_size + back_size))) {
        test_bad++;
        TEST_SHOW("%s: tangent %.8g, gradient %.8g", k->name, forward, back);
    }
    if (!(fabs((up - down) / (2.0 * (double)h) - back) <= 2e-3 * back_size + 2e-3)) {
        test_bad++;
        TEST_SHOW("%s: gradient %.8g, difference %.8g", k->name, back, (up - down) / (2.0 * (double)h));
    }
    CHECK_INT(mixp_context_error(n.ctx, NULL), MIXP_OK);
    mixp_context_free(n.ctx);
}

static void every_case_of_any_batch(void) {
    ab_data();
    for (size_t i = 0; i < sizeof ab_products / sizeof *ab_products; i++)
        if (strcmp(ab_products[i].name, "linear_deep")) case_law(&ab_products[i]);      /* it reads another x */
    for (size_t i = 0; i < sizeof ab_others / sizeof *ab_others; i++) case_law(&ab_others[i]);
}

int main(void) {
    RUN(each_row_applies_its_operator);
    RUN(every_tangent_and_gradient);
    RUN(every_option_of_losses);
    RUN(every_case_of_any_batch);
    return test_report();
}
