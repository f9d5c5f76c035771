/* test_autocast.c - the dtype that each operator stores at every level; regions, the cast cache,
 * overrides, counts. The expected classes are those of PyTorch's CUDA autocast lists
 * (aten/src/ATen/autocast_mode.h).
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include "operators.h"

static mixp_context *ctx;
static mixp_tensor *w, *b;      /* f32 parameters: w[8,8], b[8] */
static int64_t mat[2] = { 8, 8 }, vec[1] = { 8 };

/* 1: input returns parameters, which have gradients, one for each dtype and rank. */
static int inputs_are_trained;
static mixp_tensor *trained[3][MIXP_MAX_RANK];

static mixp_tensor *constant(mixp_dtype dtype, int rank, const int64_t *shape) {
    mixp_tensor *t = mixp_activation(ctx, dtype, rank, shape);
    mixp_fill(t, 0.5);
    return t;
}

static mixp_tensor *input(mixp_dtype dtype, int rank, const int64_t *shape) {
    mixp_tensor **t = &trained[dtype == MIXP_F16 ? 1 : dtype == MIXP_BF16 ? 2 : 0][rank];
    if (!inputs_are_trained) return constant(dtype, rank, shape);
    if (!*t) *t = mixp_param(ctx, NULL, dtype, rank, shape);
    mixp_fill(*t, 0.5);
    return *t;
}

/* Of w and b, which are f32: low parameters, for level 3. */
static mixp_tensor *w_low[2], *b_low[2];
static mixp_tensor *fitting(mixp_tensor *f32, mixp_tensor *const *low) {
    mixp_autocast now = mixp_autocast_current(ctx);
    return now.level == 3 ? low[now.dtype == MIXP_BF16] : f32;
}

/* Does the operator read f32 parameters? */
static int reads_f32(const op_row *row) { return row->is[OP_LEVEL1] != 'K' && row->id != MIXP_OP_PRELU && strpbrk(row->gradients, "wv"); }

/* One operator on an input of dtype d. */
static mixp_tensor *run(mixp_op_id id, mixp_dtype d) {
    const op_row *row = op_row_of(id);
    int32_t ids[64];
    uint8_t mask[64];
    op_in   o;
    for (int i = 0; i < 64; i++) ids[i] = i % 8, mask[i] = 1;
    memset(&o, 0, sizeof o);
    o.c = ctx;
    o.x = input(d, 2, mat);
    o.y = o.z = constant(d, 2, mat);
    o.w = reads_f32(row) ? fitting(w, w_low) : o.x;
    o.v = o.u = id == MIXP_OP_PRELU ? constant(d, 1, vec) : fitting(b, b_low);  /* a slope has the dtype of x */
    o.i = o.j = mixp_input(ctx, MIXP_I32, 1, vec, ids);
    o.a = mixp_input(ctx, MIXP_I32, 2, mat, ids);
    o.m = mixp_input(ctx, MIXP_U8, 2, mat, mask);
    o.k = row->k < -1.0f ? 0.0f : row->k;
    return row->run(&o);
}

/* By the letters of OPERATORS. At level 2 every array is low but scalars and what was asked for by name are not. */
static mixp_dtype want(char rule, mixp_dtype in, mixp_dtype region) {
    if (rule == 'I' || rule == 'B') return rule == 'I' ? MIXP_I32 : MIXP_U8;
    if (rule == 'C') return in == MIXP_F32 ? MIXP_BF16 : MIXP_F32;
    return rule == 'L' ? region : rule == 'F' ? MIXP_F32 : in;
}

static void test_dtype_of_every_operator(void) {
    static const mixp_dtype inputs[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    for (int i = 0; i < MIXP_OP_COUNT * 27; i++) {
        const op_row *row = op_row_of((mixp_op_id)(i / 27));
        const mixp_dtype region = inputs[1 + i % 2], in = inputs[i % 3];
        const int  level = 1 + i / 3 % 3, first = level == 1;
        mixp_dtype wanted = want(row->is[first ? OP_LEVEL1 : OP_LEVEL2], in, region);
        mixp_tensor *y = NULL;
        if (mixp_op_builtin(row->id)->cls == MIXP_CLASS_BANNED) continue;
        mixp_step_begin(ctx);
        mixp_autocast_set_level(ctx, level);
        MIXP_AUTOCAST(ctx, region) { y = run(row->id, in); }
        if (y && y->dtype == wanted) continue;
        test_bad++;
        TEST_SHOW("%s level %d region %s input %s: %s, not %s", op_name(row->id), level, mixp_dtype_name(region),
                  mixp_dtype_name(in), y ? mixp_dtype_name(y->dtype) : "NULL", mixp_dtype_name(wanted));
    }
    mixp_autocast_set_level(ctx, 1);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
}

static void test_outside_of_regions_nothing_changes(void) {
    mixp_step_begin(ctx);
    for (int i = 0; i < MIXP_OP_COUNT; i++) {
        const op_row *row = op_row_of((mixp_op_id)i);
        const char    rule = row->is[OP_LEVEL1];
        mixp_tensor  *y = run(row->id, MIXP_F16);
        const mixp_dtype real = y && y->rank == 0 ? MIXP_F32 : MIXP_F16;     /* losses are f32 */
        CHECK(y && y->dtype == want(rule == 'F' ? 'K' : rule, real, real));
    }
}

static void test_promotion_takes_the_widest(void) {
    mixp_step_begin(ctx);
    mixp_tensor *h = input(MIXP_F16, 2, mat);
    mixp_tensor *g = input(MIXP_BF16, 2, mat);
    mixp_tensor *f = input(MIXP_F32, 2, mat);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        CHECK_INT(mixp_add(ctx, h, f)->dtype, MIXP_F32);
        CHECK_INT(mixp_add(ctx, h, g)->dtype, MIXP_F32);
        CHECK_INT(mixp_mul(ctx, h, h)->dtype, MIXP_F16);
    }
}

static void test_regions_nest_and_restore(void) {
    mixp_autocast off = { MIXP_F32, 0, NULL };
    mixp_dtype seen[5] = { MIXP_I32, MIXP_I32, MIXP_I32, MIXP_I32, MIXP_I32 };
    off.dtype = MIXP_F32;
    off.level = 1;
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        seen[0] = run(MIXP_OP_MATMUL, MIXP_F32)->dtype;
        MIXP_AUTOCAST(ctx, MIXP_BF16) { seen[1] = run(MIXP_OP_MATMUL, MIXP_F32)->dtype; }
        const int opened = mixp_autocast_open_with(ctx, &off);
        seen[2] = run(MIXP_OP_MATMUL, MIXP_F32)->dtype;
        mixp_autocast_close(ctx, opened);
        seen[3] = run(MIXP_OP_MATMUL, MIXP_F32)->dtype;
    }
    seen[4] = run(MIXP_OP_MATMUL, MIXP_F32)->dtype;
    CHECK_INT(seen[0], MIXP_F16);
    CHECK_INT(seen[1], MIXP_BF16);
    CHECK_INT(seen[2], MIXP_F32);
    CHECK_INT(seen[3], MIXP_F16);
    CHECK_INT(seen[4], MIXP_F32);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
}

static void left_by_return(void) {
    MIXP_AUTOCAST(ctx, MIXP_F16) { return; }
}

static void left_by_break(void) {
    MIXP_AUTOCAST(ctx, MIXP_F16) { break; }
}

static void left_by_goto(void) {
    MIXP_AUTOCAST(ctx, MIXP_F16) { goto out; }
out:
    return;
}

static void no_grad_left_by_return(void) {
    MIXP_NO_GRAD(ctx) { return; }
}

static void no_grad_left_by_break(void) {
    MIXP_NO_GRAD(ctx) { break; }
}

static void no_grad_left_by_goto(void) {
    MIXP_NO_GRAD(ctx) { goto out; }
out:
    return;
}

/* Is a product with the parameter w recorded, so that a backward pass can start from it? */
static int is_recorded(void) {
    mixp_tensor *loss = mixp_sum(ctx, mixp_matmul(ctx, input(MIXP_F32, 2, mat), w, 0, 0), MIXP_ALL, 0);
    mixp_result r = mixp_backward(ctx, loss);
    mixp_context_clear_error(ctx);
    return r == MIXP_OK;
}

static void test_blocks_left_open_are_told_and_closed(void) {
    static void (*const leave[6])(void) = { left_by_return, left_by_break, left_by_goto,
        no_grad_left_by_return, no_grad_left_by_break, no_grad_left_by_goto };
    const char *why = "";
    int i;
    for (i = 0; i < 6; i++) {
        CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
        leave[i]();
        CHECK_INT(mixp_step_begin(ctx), MIXP_ERR_ORDER);
        mixp_context_error(ctx, &why);
        CHECK_TEXT(why, i < 3 ? "MIXP_AUTOCAST" : "MIXP_NO_GRAD");
        mixp_context_clear_error(ctx);
        CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
        CHECK(is_recorded());
    }
    /* A step begun within a block: the same. */
    MIXP_NO_GRAD(ctx) { CHECK_INT(mixp_step_begin(ctx), MIXP_ERR_ORDER); }
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "around a loop of steps, use mixp_no_grad_open");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
}

/* continue ends the block, as the manual says: the rest of the loop's round is run. */
static void test_continue_ends_the_block_alone(void) {
    int i, after = 0;
    mixp_step_begin(ctx);
    for (i = 0; i < 3; i++) {
        MIXP_AUTOCAST(ctx, MIXP_F16) { if (i == 1) continue; }
        MIXP_NO_GRAD(ctx) { if (i == 1) continue; }
        after++;
    }
    CHECK_INT(after, 3);
    CHECK(is_recorded());
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
}

static void test_blocks_on_one_line(void) {
    mixp_dtype seen = MIXP_I32;
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_BF16) MIXP_NO_GRAD(ctx) seen = run(MIXP_OP_MATMUL, MIXP_F32)->dtype;
    CHECK_INT(seen, MIXP_BF16);
    MIXP_NO_GRAD(ctx) { MIXP_AUTOCAST(ctx, MIXP_F16) { seen = run(MIXP_OP_MATMUL, MIXP_F32)->dtype; } CHECK(!is_recorded()); }
    CHECK_INT(seen, MIXP_F16);
    CHECK(is_recorded());
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
}

/* The end of a block closes every region that was opened in it. */
static void test_a_block_closes_what_was_opened_in_it(void) {
    mixp_autocast region = { MIXP_F32, 0, NULL };
    region.dtype = MIXP_BF16;
    region.level = 1;
    mixp_step_begin(ctx);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        MIXP_NO_GRAD(ctx) {
            CHECK_INT(mixp_autocast_open_with(ctx, &region), 2);
            CHECK(!is_recorded());
        }
        CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F16);
        CHECK(is_recorded());
    }
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
}

/* Regions by number, for those who cannot use blocks: steps may begin in them. */
static void test_open_and_close(void) {
    mixp_step_begin(ctx);
    int none = mixp_no_grad_open(ctx);
    int one = mixp_autocast_open(ctx, MIXP_F16);
    int two = mixp_autocast_open(ctx, MIXP_BF16);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_BF16);
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    mixp_autocast_close(ctx, two);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F16);
    mixp_autocast_close(ctx, two);                      /* twice: nothing more */
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F16);
    CHECK(!is_recorded());
    mixp_autocast_close(ctx, none);                     /* all that was opened since */
    mixp_autocast_close(ctx, one);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    CHECK(is_recorded());
    CHECK_INT(mixp_autocast_open(NULL, MIXP_F16), -1);
    CHECK_INT(mixp_no_grad_open(NULL), -1);
    mixp_autocast_close(ctx, -1);
    mixp_autocast_close(NULL, 0);
}

static void test_blocks_left_open(void) {
    const char *why = "";
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    left_by_return();
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F16);
    CHECK_INT(mixp_step_begin(ctx), MIXP_ERR_ORDER);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "MIXP_AUTOCAST");
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_no_grad_open(ctx), 0);
    mixp_autocast_close(ctx, 0);
}

static void bad_region(const mixp_autocast *region) {
    CHECK_INT(mixp_autocast_open_with(ctx, region), -1);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
}

static void test_bad_regions(void) {
    mixp_autocast r = { MIXP_F32, 0, NULL };
    r.dtype = MIXP_I32;
    r.level = 1;
    bad_region(&r);
    r.dtype = MIXP_F16;
    r.level = 4;
    bad_region(&r);
    bad_region(NULL);
    CHECK_INT(mixp_autocast_open(ctx, MIXP_F16), 0);    /* a refused region opens nothing */
    mixp_autocast_close(ctx, 0);
    CHECK_INT(mixp_autocast_set_level(ctx, -1), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    for (int i = 0; i < 100; i++) mixpi_autocast_enter(ctx, MIXP_F16);   /* too deep: an error, no crash */
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ARGUMENT);
    for (int i = 0; i < 100; i++) mixpi_autocast_leave(ctx);
    CHECK_INT(mixp_autocast_current(ctx).dtype, MIXP_F32);
    mixp_context_clear_error(ctx);
}

static void test_banned_and_override(void) {
    const char *why = "";
    mixp_tensor *y = NULL;
    mixp_step_begin(ctx);
    CHECK(run(MIXP_OP_BCE, MIXP_F32) != NULL);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = run(MIXP_OP_BCE, MIXP_F16); }
    CHECK(y == NULL);
    CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_BANNED);
    CHECK_TEXT(why, "mixp_bce_with_logits");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_BCE), MIXP_CLASS_F32), MIXP_OK);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = run(MIXP_OP_BCE, MIXP_F16); }
    CHECK(y && y->dtype == MIXP_F32);
    CHECK_INT(mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_BCE), MIXP_CLASS_BANNED), MIXP_OK);
    CHECK_INT(mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_GELU), MIXP_CLASS_F32), MIXP_OK);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = run(MIXP_OP_GELU, MIXP_F16); }
    CHECK(y && y->dtype == MIXP_F32);
    CHECK_INT(mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_GELU), MIXP_CLASS_KEEP), MIXP_OK);
    CHECK_INT(mixp_autocast_override(ctx, NULL, MIXP_CLASS_KEEP), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
}

/* The dtype of a result at level 1 in a region of f16: what the class's line in the header says. A result that
 * is no real number, a view, and a loss keep their dtype. */
static mixp_dtype want_of_class(const op_row *row, mixp_op_class cls, mixp_dtype in) {
    const char rule = row->is[OP_LEVEL2];
    const int  fixed = rule != 'L';
    if (row->id == MIXP_OP_TOPK || row->id == MIXP_OP_SORT) return in;     /* gather reads the values */
    if (cls == MIXP_CLASS_ALL_F32 && fixed && rule == 'K') return MIXP_F32;
    if (cls == MIXP_CLASS_LOW && rule == 'K') return MIXP_F16;
    if (fixed) return want(rule, in, MIXP_F16);
    if (cls == MIXP_CLASS_LOW || cls == MIXP_CLASS_LOW_OUT) return MIXP_F16;
    if (cls == MIXP_CLASS_PROMOTE && reads_f32(row)) return MIXP_F32;
    return cls == MIXP_CLASS_KEEP || cls == MIXP_CLASS_PROMOTE ? in : MIXP_F32;
}

/* Are all numbers of t finite? */
static int finite_numbers(const mixp_tensor *t) {
    static double v[256];
    if (!t || t->count > 256 || mixp_read(t, v, MIXP_F64, t->count) != MIXP_OK) return 0;
    for (int64_t i = 0; i < t->count; i++)
        if (!(v[i] - v[i] == 0.0)) return 0;
    return 1;
}

/* One forward and one backward of the operator with this class. Returns 0 if the result's dtype, its numbers or
 * the gradient of the first input are wrong. */
static int runs_with_class(const op_row *row, mixp_op_class cls, mixp_dtype in) {
    const mixp_op *op = mixp_op_builtin(row->id);
    mixp_tensor *x = input(in, 2, mat), *y = NULL;
    mixp_step_begin(ctx);
    CHECK_INT(mixp_autocast_override(ctx, op, cls), MIXP_OK);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = run(row->id, in); }
    CHECK_INT(mixp_autocast_override(ctx, op, op->cls), MIXP_OK);
    mixp_result r = mixp_context_error(ctx, NULL);
    mixp_context_clear_error(ctx);
    if (cls == MIXP_CLASS_BANNED && row->id != MIXP_OP_CAST) return !y && r == MIXP_ERR_BANNED;
    int good = y && r == MIXP_OK && y->dtype == want_of_class(row, cls, in);
    if (!good || (y->dtype != MIXP_F32 && y->dtype != MIXP_F16 && y->dtype != MIXP_BF16)) return good;
    if (!op->backward || row->id == MIXP_OP_DETACH) return finite_numbers(y);
    r = mixp_backward(ctx, mixp_sum(ctx, y, MIXP_ALL, 0));
    mixp_context_clear_error(ctx);
    return r == MIXP_OK && finite_numbers(y) && (row->id == MIXP_OP_ATTENTION || finite_numbers(x->grad));
}

/* Casts are operators, too: autocast applies them for itself, and no class may make it do so without end. */
static void test_each_class_for_each_operator(void) {
    static const mixp_dtype inputs[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    mixp_context *kept = ctx;
    unsigned i, d;
    inputs_are_trained = 1;
    for (i = 0; i < MIXP_OP_COUNT; i++) {      /* a context takes 64 overrides */
        memset(trained, 0, sizeof trained);
        ctx = mixp_context_new(NULL);
        w = mixp_param(ctx, "w", MIXP_F32, 2, mat);
        b = mixp_param(ctx, "b", MIXP_F32, 1, vec);
        for (int cls = 0; cls < MIXP_CLASS_COUNT; cls++)
            for (d = 0; d < 3; d++)
                if (!runs_with_class(op_row_of((mixp_op_id)i), (mixp_op_class)cls, inputs[d])) {
                    test_bad++;
                    TEST_SHOW("%s as class %d, input %s", op_name((mixp_op_id)i), cls, mixp_dtype_name(inputs[d]));
                }
        mixp_context_free(ctx);
    }
    inputs_are_trained = 0;
    ctx = kept;
}

/* The result must be that of casting by hand, bit for bit. */
static void test_cast_by_hand_is_the_same(void) {
    float a[64], h[64];
    mixp_tensor *x, *y = NULL;
    mixp_step_begin(ctx);
    mixp_init_normal(w, 0.0, 1.0);
    x = input(MIXP_F32, 2, mat);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = mixp_linear(ctx, x, w, NULL); }
    mixp_read(y, a, MIXP_F32, 64);
    y = mixp_linear(ctx, mixp_cast(ctx, x, MIXP_F16), mixp_cast(ctx, w, MIXP_F16), NULL);
    CHECK_INT(y->dtype, MIXP_F16);
    mixp_read(y, h, MIXP_F32, 64);
    CHECK(!memcmp(a, h, sizeof a));
}

static void test_cache_casts_once_and_is_never_stale(void) {
    float value[64];
    mixp_tensor *x, *y = NULL;
    int i;
    mixp_fill(w, 1.0);
    mixp_step_begin(ctx);
    mixp_autocast_reset_counts(ctx);
    x = input(MIXP_F16, 2, mat);
    MIXP_AUTOCAST(ctx, MIXP_F16) { for (i = 0; i < 3; i++) y = mixp_linear(ctx, x, w, NULL); }
    mixp_cast_count after = mixp_autocast_casts(ctx);
    CHECK_INT(after.weight_casts, 1);
    CHECK_INT(after.weight_hits, 2);
    CHECK_INT(after.activation_casts, 0);
    mixp_read(y, value, MIXP_F32, 64);
    CHECK_NEAR(value[0], 4.0, 0);           /* 8 * 0.5 * 1 */
    mixp_cast_count before = after;
    mixp_fill(w, 2.0);                      /* in place: the copy must not be used again */
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = mixp_linear(ctx, x, w, NULL); }
    mixp_read(y, value, MIXP_F32, 64);
    CHECK_NEAR(value[0], 8.0, 0);
    CHECK_INT(mixp_autocast_casts(ctx).weight_casts, before.weight_casts + 1);
    ((float *)w->data)[0] = 6.0f;           /* behind the library's back, then told */
    mixp_tensor_touch(w);
    MIXP_AUTOCAST(ctx, MIXP_F16) { y = mixp_linear(ctx, x, w, NULL); }
    mixp_read(y, value, MIXP_F32, 64);
    CHECK_NEAR(value[0], 10.0, 0);
    MIXP_AUTOCAST(ctx, MIXP_BF16) { y = mixp_linear(ctx, x, w, NULL); }     /* another dtype, another copy */
    CHECK_INT(y->dtype, MIXP_BF16);
    mixp_read(y, value, MIXP_F32, 64);
    CHECK_NEAR(value[0], 10.0, 0);
}

static void test_no_grad_first_does_not_poison_the_cache(void) {
    mixp_tensor *x, *y = NULL;
    mixp_fill(w, 1.0);
    mixp_step_begin(ctx);
    x = input(MIXP_F32, 2, mat);
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        MIXP_NO_GRAD(ctx) { y = mixp_linear(ctx, x, w, NULL); }
        y = mixp_mean(ctx, mixp_linear(ctx, x, w, NULL), MIXP_ALL, 0);
    }
    w->grad = NULL;
    CHECK_INT(mixp_backward(ctx, y), MIXP_OK);
    CHECK(w->grad != NULL && w->grad->dtype == MIXP_F32);
}

static void test_casts_are_counted(void) {
    mixp_step_begin(ctx);
    mixp_autocast_reset_counts(ctx);
    MIXP_AUTOCAST(ctx, MIXP_F16) { run(MIXP_OP_SOFTMAX, MIXP_F16); run(MIXP_OP_MATMUL, MIXP_F32); }
    MIXP_AUTOCAST(ctx, MIXP_BF16) { run(MIXP_OP_MATMUL, MIXP_F32); }
    CHECK_INT(mixp_autocast_casts(ctx).activation_casts, 2);     /* of x, once for each matmul */
}

/* Backward runs in the dtype that forward used: activations' gradients are low. */
static void test_gradient_dtypes(void) {
    mixp_tensor *x, *h = NULL, *loss = NULL;
    mixp_step_begin(ctx);
    x = input(MIXP_F32, 2, mat);
    w->grad = NULL;
    MIXP_AUTOCAST(ctx, MIXP_F16) {
        h = mixp_linear(ctx, x, w, NULL);
        mixp_tensor_set_requires_grad(h, 1);
        loss = mixp_mean(ctx, mixp_cast(ctx, h, MIXP_F32), MIXP_ALL, 0);
    }
    CHECK_INT(mixp_backward(ctx, loss), MIXP_OK);
    CHECK(h->grad && h->grad->dtype == MIXP_F16);
    CHECK(w->grad && w->grad->dtype == MIXP_F32);
}

int main(void) {
    ctx = mixp_context_new(NULL);
    w = mixp_param(ctx, "w", MIXP_F32, 2, mat);
    b = mixp_param(ctx, "b", MIXP_F32, 1, vec);
    w_low[0] = mixp_param(ctx, "w.f16", MIXP_F16, 2, mat);
    b_low[0] = mixp_param(ctx, "b.f16", MIXP_F16, 1, vec);
    w_low[1] = mixp_param(ctx, "w.bf16", MIXP_BF16, 2, mat);
    b_low[1] = mixp_param(ctx, "b.bf16", MIXP_BF16, 1, vec);
    RUN(test_dtype_of_every_operator);
    RUN(test_outside_of_regions_nothing_changes);
    RUN(test_promotion_takes_the_widest);
    RUN(test_regions_nest_and_restore);
    RUN(test_blocks_left_open);
    RUN(test_blocks_left_open_are_told_and_closed);
    RUN(test_continue_ends_the_block_alone);
    RUN(test_blocks_on_one_line);
    RUN(test_a_block_closes_what_was_opened_in_it);
    RUN(test_open_and_close);
    RUN(test_bad_regions);
    RUN(test_banned_and_override);
    RUN(test_cast_by_hand_is_the_same);
    RUN(test_cache_casts_once_and_is_never_stale);
    RUN(test_no_grad_first_does_not_poison_the_cache);
    RUN(test_casts_are_counted);
    RUN(test_gradient_dtypes);
    RUN(test_each_class_for_each_operator);
    mixp_context_free(ctx);
    return test_report();
}
