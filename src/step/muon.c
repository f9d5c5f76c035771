#pragma once
#include "table.c"
/* --- Muon: the products between its passes ------------------------------------------------ */

/* The product c (+)= alpha op(a) op(b) of dense matrices: m by n results, each a sum of k terms. */
static mixp_gemm_args mixpi_muon_gemm(int64_t m, int64_t n, int64_t k, double alpha) {
    mixp_gemm_args g = MIXPI_ZERO;
    g.m = m;
    g.n = n;
    g.k = k;
    g.batch = 1;
    g.alpha = (float)alpha;
    g.lda = k;
    g.ldb = g.ldc = n;
    return g;
}

/* sum = factor * a, n elements. A product is then added to sum. */
static mixp_result mixpi_muon_begin_sum(
    mixp_optimizer *o, float *sum, mixp_out a, int64_t n, double factor) {
    const mixp_unary_args k = mixpi_unary_of(MIXP_UNARY_SCALE, (float)factor,
        mixpi_in(a.data, a.dtype), mixpi_out_to(sum, MIXP_F32, 0), n);
    return MIXPI_STEP_RUN(o, unary, &k);
}

/* to = sum, rounded once. */
static mixp_result mixpi_muon_end_sum(mixp_optimizer *o, mixp_out to, const float *sum, int64_t n) {
    mixp_convert_args k = MIXPI_ZERO;
    k.n = n;
    k.src = mixpi_in(sum, MIXP_F32);
    k.dst = to;
    return MIXPI_STEP_RUN(o, convert, &k);
}

/* gram = x x', or x' x if that is smaller, which iterates on the transposed matrix. */
static mixp_result mixpi_muon_gram(mixp_optimizer *o, int64_t rows, int64_t cols) {
    const mixpi_muon *m = o->muon;
    const int tall = rows > cols;
    const int64_t side = tall ? cols : rows;
    mixp_gemm_args g = mixpi_muon_gemm(side, side, tall ? rows : cols, 1.0);
    g.trans_a = tall;
    g.trans_b = !tall;
    g.a = g.b = mixpi_in(m->x.data, m->x.dtype);
    g.c = m->gram;
    g.lda = g.ldb = cols;
    return MIXPI_STEP_RUN(o, gemm, &g);
}

/* poly = b gram + c gram gram. */
static mixp_result mixpi_muon_poly(mixp_optimizer *o, int64_t side) {
    const mixpi_muon *m = o->muon;
    mixp_gemm_args g = mixpi_muon_gemm(side, side, side, m->settings.c);
    mixp_result r = mixpi_muon_begin_sum(o, m->poly_sum, m->gram, side * side, m->settings.b);
    g.a = g.b = mixpi_in(m->gram.data, m->gram.dtype);
    g.c = mixpi_out_to(m->poly_sum, MIXP_F32, 1);
    if (r == MIXP_OK) r = MIXPI_STEP_RUN(o, gemm, &g);
    return r == MIXP_OK ? mixpi_muon_end_sum(o, m->poly, m->poly_sum, side * side) : r;
}

/* x = a x + poly x, or a x + x poly. */
static mixp_result mixpi_muon_next(mixp_optimizer *o, int64_t rows, int64_t cols) {
    const mixpi_muon *m = o->muon;
    const int tall = rows > cols;
    mixp_in x = mixpi_in(m->x.data, m->x.dtype);
    mixp_in poly = mixpi_in(m->poly.data, m->poly.dtype);
    mixp_gemm_args g = mixpi_muon_gemm(rows, cols, tall ? cols : rows, 1.0);
    mixp_result r = mixpi_muon_begin_sum(o, m->x_sum, m->x, rows * cols, m->settings.a);
    g.a = tall ? x : poly;
    g.b = tall ? poly : x;
    g.c = mixpi_out_to(m->x_sum, MIXP_F32, 1);
    if (r == MIXP_OK) r = MIXPI_STEP_RUN(o, gemm, &g);
    return r == MIXP_OK ? mixpi_muon_end_sum(o, m->x, m->x_sum, rows * cols) : r;
}

/* One iteration for parameter i. */
static mixp_result mixpi_muon_iterate(mixp_optimizer *o, int64_t i) {
    const mixp_tensor *p = o->slot[i].param;
    MIXPI_TRY(mixpi_muon_gram(o, p->shape[0], p->shape[1]));
    MIXPI_TRY(mixpi_muon_poly(o, mixpi_muon_side(p)));
    return mixpi_muon_next(o, p->shape[0], p->shape[1]);
}

/* Allocates the scratch memory of the products before a step changes anything: runs one iteration
 * for each parameter added since the last step, on whatever the working memory holds. A captured
 * step changes nothing while it is recorded. */
static mixp_result mixpi_muon_scratch(mixp_optimizer *o) {
    mixp_result r = MIXP_OK;
    if (!o->muon || o->ctx->capture.active) return MIXP_OK;
    for (int64_t i = o->muon->tried; i < o->count && r == MIXP_OK; i++) {
        if (o->rows[i].count && mixpi_is_own(o, i)) r = mixpi_muon_iterate(o, i);
        if (r == MIXP_OK) o->muon->tried = i + 1;
    }
    return r;
}

/* One pass of the kernel `update` over parameter i. */
static mixp_result mixpi_muon_pass(mixp_optimizer *o, int64_t i, int pass,
    const mixp_step_plan *plan, const mixp_step_state *step) {
    mixp_update_args k = MIXPI_ZERO;
    k.plan = plan;
    k.rows = &o->muon->device_rows[i * MIXPI_MUON_PASSES + pass];
    k.count = 1;
    k.step = step;
    return MIXPI_STEP_RUN(o, update, &k);
}

/* Scales x to norm 1: one pass finds the norm, in a separate step state, and another multiplies. */
static mixp_result mixpi_muon_unit_norm(mixp_optimizer *o, int64_t i) {
    mixp_grad_stats_args k = MIXPI_ZERO;
    mixp_step_plan plan = MIXPI_ZERO;
    plan.kind = MIXP_OPTIMIZER_MUON_UNIT;
    plan.unscaled = plan.gathered = 1;
    plan.n_groups = 1;
    plan.groups[0] = o->plan.groups[o->rows[i].group];
    plan.groups[0].f32_states = o->muon->settings.f32;
    k.rows = &o->muon->device_rows[i * MIXPI_MUON_PASSES + MIXPI_MUON_UNIT];
    k.count = 1;
    k.step = o->muon->look;
    k.plan = &plan;
    MIXPI_TRY(MIXPI_STEP_RUN(o, grad_stats, &k));
    return mixpi_muon_pass(o, i, MIXPI_MUON_UNIT, &plan, o->muon->look);
}

/* The complete update of parameter i. In a skipped step the passes change nothing, and the products
 * work on the remains of another matrix; their result is never read. */
static mixp_result mixpi_muon_matrix(mixp_optimizer *o, int64_t i) {
    mixp_step_plan plan = o->plan;
    plan.kind = MIXP_OPTIMIZER_MUON_MOMENTUM;
    MIXPI_TRY(mixpi_muon_pass(o, i, MIXPI_MUON_MOMENTUM, &plan, o->state));
    MIXPI_TRY(mixpi_muon_unit_norm(o, i));
    for (int k = 0; k < o->muon->settings.iterations; k++) {
        if (o->muon->coefficients) {
            o->muon->settings.a = o->muon->coefficients[k][0];
            o->muon->settings.b = o->muon->coefficients[k][1];
            o->muon->settings.c = o->muon->coefficients[k][2];
        }
        MIXPI_TRY(mixpi_muon_iterate(o, i));
    }
    return mixpi_muon_pass(o, i, MIXPI_MUON_LAST, &o->plan, o->state);
}

/* The update kernel; Muon's matrices one after another. counting 1: also counts lost updates. */
static mixp_result mixpi_opt_update(mixp_optimizer *o, int counting) {
    mixp_result r = MIXP_OK;
    for (int64_t i = 0; o->muon && i < o->count && r == MIXP_OK; i++)
        if (o->rows[i].active && o->rows[i].count && mixpi_is_own(o, i))
            r = mixpi_muon_matrix(o, i);
    if (o->muon) return r;

    mixp_update_args k = MIXPI_ZERO;
    k.plan = &o->plan;
    k.rows = o->device_own_rows;
    k.count = o->count;
    k.step = o->state;
    k.lost = counting ? o->lost : NULL;
    return MIXPI_STEP_RUN(o, update, &k);
}

static mixp_result mixpi_opt_clip(mixp_optimizer *o, double max_norm) {
    mixp_clip_args k = MIXPI_ZERO;
    k.rows = mixpi_rows_to_look_at(o);
    k.count = o->count;
    k.max_norm = max_norm;
    k.step = o->state;
    return MIXPI_STEP_RUN(o, clip, &k);
}
