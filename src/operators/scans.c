#pragma once
#include "sums.c"
#include "shapes.c"
/* --- prod, cumsum -------------------------------------------------------------------------- *
 *
 * Both work in f32 on columns: x[outer, n, inner] as [n, outer * inner], where all that lies s
 * places further along n is one array further on. The kernels are those of other operators.
 */
typedef struct mixpi_scan {
    int           dim, keep;
    mixpi_reduced x;
} mixpi_scan;

static int64_t mixpi_scan_cols(const mixpi_scan *p) { return p->x.outer * p->x.inner; }

/* Copies x's layout into columns, or back. */
static mixp_result mixpi_scan_copy(mixp_call *c, mixp_in from, mixp_out to, int back) {
    const mixpi_scan *p = (const mixpi_scan *)c->attrs;
    if (!c->in[0]->count) return MIXP_OK;
    mixp_copy_args k = MIXPI_ZERO;
    k.rank = 3;
    k.shape[0] = p->x.outer;
    k.shape[1] = p->x.n;
    k.shape[2] = p->x.inner;
    mixpi_dense_strides(3, k.shape, back ? k.dst_strides : k.src_strides);
    int64_t *columns = back ? k.src_strides : k.dst_strides;
    columns[0] = p->x.inner;
    columns[1] = mixpi_scan_cols(p);
    columns[2] = 1;
    k.src = from;
    k.dst = to;
    return MIXPI_RUN(c, copy, &k);
}

/* Allocates n f32 numbers in the arena. The call frees them. */
static float *mixpi_scan_room(mixp_call *c, int64_t n) {
    return (float *)mixpi_arena_take(c->ctx, &c->ctx->memory.dev, (size_t)n * sizeof(float));
}
static void mixpi_scan_give(mixp_call *c, float *room, int64_t n) {
    if (room) mixpi_arena_free(c->ctx, &c->ctx->memory.dev, room, (size_t)n * sizeof(float));
}

/* Rows of the lowest level of prod's tree: n, and ones up to a power of 2. */
static int64_t mixpi_prod_rows(const mixpi_scan *p) {
    int64_t rows = 1;
    while (rows < p->x.n) rows *= 2;
    return rows;
}

static mixp_result mixpi_prod_infer(mixp_call *c) {
    mixpi_scan *p = (mixpi_scan *)c->attrs;
    MIXPI_TRY(mixpi_reduce_shape(c, p->dim, p->keep, &p->x));
    mixpi_call_reads_all(c, 0); /* forward keeps the tree */
    return mixp_call_output(c, c->in[0]->dtype, p->x.rank, p->x.shape);
}

/* y = a * b, n numbers of f32. */
static mixp_result mixpi_prod_times(
    mixp_call *c, const float *a, const float *b, float *y, int64_t n) {
    const mixp_binary_args k = mixpi_binary_of(MIXP_BINARY_MUL, mixpi_in(a, MIXP_F32),
        mixpi_in(b, MIXP_F32), mixpi_out_to(y, MIXP_F32, 0), 1, n);
    return MIXPI_RUN(c, binary, &k);
}

/* Each level multiplies the two halves of the level below. */
static mixp_result mixpi_prod_forward(mixp_call *c) {
    const mixpi_scan *p = (const mixpi_scan *)c->attrs;
    int64_t cols = mixpi_scan_cols(p), m = mixpi_prod_rows(p), used = p->x.n * cols;
    int64_t count = (2 * m - 1) * cols;
    mixp_tensor *tree = mixp_call_save(c, 0, MIXP_F32, 1, &count);
    float *level = tree ? (float *)tree->data : NULL;
    if (!tree) return MIXP_ERR_MEMORY;
    mixp_result r = mixpi_scan_copy(c, mixpi_call_x(c, 0), mixpi_out_to(level, MIXP_F32, 0), 0);
    if (r == MIXP_OK && m > p->x.n)
        r = mixpi_fill_with(c->ctx, mixpi_out_to(level + used, MIXP_F32, 0), m * cols - used, 1.0);
    for (; m > 1 && r == MIXP_OK; m /= 2) {
        r = mixpi_prod_times(c, level, level + m / 2 * cols, level + m * cols, m / 2 * cols);
        level += m * cols;
    }
    if (r != MIXP_OK) return r;
    return mixpi_convert_to(c->ctx, mixpi_call_y(c), mixpi_in(level, MIXP_F32), cols);
}

/* From the top of the tree down: the gradient of a half is that of the product, times the other
 * half. Nothing is divided, so zeros do no harm. */
static mixp_result mixpi_prod_descend(mixp_call *c, float *g, float *next, mixp_out dx) {
    const mixpi_scan *p = (const mixpi_scan *)c->attrs;
    int64_t cols = mixpi_scan_cols(p), rows = mixpi_prod_rows(p), m;
    mixp_result r = mixpi_convert_to(c->ctx, mixpi_out_to(g, MIXP_F32, 0), mixpi_call_dy(c), cols);
    for (m = 1; m < rows && r == MIXP_OK; m *= 2) {
        const float *level = mixpi_saved(c, 0) + (2 * rows - 4 * m) * cols;
        float *swap = g;
        r = mixpi_prod_times(c, g, level + m * cols, next, m * cols);
        if (r == MIXP_OK) r = mixpi_prod_times(c, g, level, next + m * cols, m * cols);
        g = next;
        next = swap;
    }
    return r == MIXP_OK ? mixpi_scan_copy(c, mixpi_in(g, MIXP_F32), dx, 1) : r;
}

static mixp_result mixpi_prod_backward(mixp_call *c) {
    const mixpi_scan *p = (const mixpi_scan *)c->attrs;
    int64_t count = mixpi_prod_rows(p) * mixpi_scan_cols(p);
    mixp_out dx = mixpi_call_dx(c, 0);
    float *room = dx.data ? mixpi_scan_room(c, 2 * count) : NULL;
    if (!dx.data) return MIXP_OK;
    if (!room) return MIXP_ERR_MEMORY;
    mixp_result r = mixpi_prod_descend(c, room, room + count, dx);
    mixpi_scan_give(c, room, 2 * count);
    return r;
}

static mixp_tensor *mixpi_apply_scan(
    mixp_context *ctx, mixp_op_id id, mixp_tensor *x, int dim, int keep) {
    mixpi_scan p = MIXPI_ZERO;
    p.dim = dim;
    p.keep = keep != 0;
    return mixpi_apply_one(ctx, id, x, &p);
}

MIXPREC_API mixp_tensor *mixp_prod(mixp_context *ctx, mixp_tensor *x, int dim, int keep) {
    return mixpi_apply_scan(ctx, MIXP_OP_PROD, x, dim, keep);
}

static mixp_result mixpi_cumsum_infer(mixp_call *c) {
    mixpi_scan *p = (mixpi_scan *)c->attrs;
    MIXPI_TRY(mixpi_reduce_shape(c, p->dim == MIXP_ALL ? MIXP_MAX_RANK : p->dim, 1, &p->x));
    mixpi_call_reads_all(c, 0);
    return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape);
}

/* Hillis and Steele, 1986: each pass adds what lies 1, 2, 4 ... places before, or behind for the
 * gradient. a and b: one array each. The sums are in a or in b; sets *to to that one. */
static mixp_result mixpi_cumsum_passes(mixp_call *c, float *a, float *b, float **to) {
    const mixpi_scan *p = (const mixpi_scan *)c->attrs;
    const int back = c->out->grad != NULL;
    int64_t cols = mixpi_scan_cols(p), count = p->x.n * cols, s;
    mixp_result r = MIXP_OK;
    for (s = 1; s < p->x.n && r == MIXP_OK; s *= 2) {
        int64_t step = s * cols;
        float *swap = a;
        r = mixpi_convert_to(c->ctx, mixpi_out_to(b, MIXP_F32, 0), mixpi_in(a, MIXP_F32), count);
        if (r == MIXP_OK)
            r = mixpi_add_into(c->ctx, mixpi_out_to(back ? b : b + step, MIXP_F32, 1),
                mixpi_in(back ? a + step : a, MIXP_F32), count - step);
        a = b;
        b = swap;
    }
    *to = a;
    return r;
}

static mixp_result mixpi_cumsum_both(mixp_call *c) {
    int64_t count = c->out->count;
    mixp_in from = mixpi_call_from(c);
    mixp_out to = mixpi_call_to(c);
    float *room = to.data ? mixpi_scan_room(c, 2 * count) : NULL, *sums = room;
    if (!to.data) return MIXP_OK;
    if (!room) return MIXP_ERR_MEMORY;
    mixp_result r = mixpi_scan_copy(c, from, mixpi_out_to(room, MIXP_F32, 0), 0);
    if (r == MIXP_OK) r = mixpi_cumsum_passes(c, room, room + count, &sums);
    if (r == MIXP_OK) r = mixpi_scan_copy(c, mixpi_in(sums, MIXP_F32), to, 1);
    mixpi_scan_give(c, room, 2 * count);
    return r;
}

MIXPREC_API mixp_tensor *mixp_cumsum(mixp_context *ctx, mixp_tensor *x, int dim) {
    return mixpi_apply_scan(ctx, MIXP_OP_CUMSUM, x, dim, 1);
}
