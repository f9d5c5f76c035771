#pragma once
#include "coded.c"
/* --- recipes: the three products of a linear layer ------------------------------------------- */

/* Keeps x[m, k] as codes, after the product. q: x as the product read it; released here. */
static mixp_result mixpi_linear_codes(mixp_call *c, mixpi_quantised *q) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    mixpi_recipe_call *rc = p->recipe;
    mixp_quantise_args x = mixpi_recipe_of(p->g.a, p->g.m, p->g.k);
    if (!q->lent) *q = mixpi_recipe_empty(rc, MIXPI_ROLE_DY, MIXPI_ROLE_X);
    mixp_result r = mixpi_coded_keep(c, rc, &x, q);
    mixpi_recipe_free(c->ctx, q->y);
    return r;
}

/* c = x w' of quantised operands. */
static mixp_result mixpi_linear_forward(mixp_call *c) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    mixpi_recipe_call *rc = p->recipe;
    mixp_gemm_args g = p->g;
    const int coded = mixpi_wants_codes(c, rc);
    mixp_quantise_args x = mixpi_recipe_of(g.a, g.m, g.k), w = mixpi_recipe_of(g.b, g.n, g.k);
    mixpi_quantised qx = mixpi_recipe_empty(rc, MIXPI_ROLE_X, MIXPI_ROLE_W), qw = qx;
    mixp_result r = mixpi_recipe_operand(c, rc, MIXPI_ROLE_X, 0, &x, &qx);
    w.times = mixpi_recipe_factor(&qx);
    if (r == MIXP_OK) r = mixpi_recipe_operand(c, rc, MIXPI_ROLE_W, 0, &w, &qw);
    if (r == MIXP_OK && !qx.high) {
        g.a = mixpi_tensor_in(qx.y);
        g.b = mixpi_tensor_in(qw.y);
    }
    qx.lent = coded && !qx.high && mixpi_recipe_has_one_scale(rc);
    r = mixpi_recipe_run(c, &g, r, &qx, &qw);
    return coded && r == MIXP_OK ? mixpi_linear_codes(c, &qx) : r;
}

/* Quantises dy for a product that reads dy and `other`, or uses the quantised dy in `both`. */
static mixp_result mixpi_linear_dy(mixp_call *c, const mixpi_product *p, mixpi_role other,
    const mixpi_quantised *both, mixpi_quantised *q) {
    const int over_rows = other == MIXPI_ROLE_X;
    mixp_quantise_args dy = mixpi_recipe_of(mixpi_call_dy(c), p->g.m, p->g.n);
    *q = mixpi_recipe_empty(p->recipe, MIXPI_ROLE_DY, other);
    if (!both->y) return mixpi_recipe_operand(c, p->recipe, MIXPI_ROLE_DY, over_rows, &dy, q);
    q->y = both->y;
    q->factor = both->factor;
    q->decode = both->decode;
    q->how = both->how;
    q->lent = 1;
    return MIXP_OK;
}

/* dx = dy w of quantised operands. */
static mixp_result mixpi_linear_dx(
    mixp_call *c, const mixpi_product *p, const mixpi_quantised *both) {
    mixp_gemm_args g = p->g;
    mixp_quantise_args w = mixpi_recipe_of(g.b, g.n, g.k);
    mixpi_quantised qw = mixpi_recipe_empty(p->recipe, MIXPI_ROLE_DY, MIXPI_ROLE_W), qdy;
    mixp_out to = mixpi_call_dx(c, 0);
    if (!to.data) return MIXP_OK;
    mixp_result r = mixpi_linear_dy(c, p, MIXPI_ROLE_W, both, &qdy);
    w.times = mixpi_recipe_factor(&qdy);
    if (r == MIXP_OK) r = mixpi_recipe_operand(c, p->recipe, MIXPI_ROLE_W, 1, &w, &qw);
    if (r == MIXP_OK) {
        if (!qw.high) g.b = mixpi_tensor_in(qw.y);
        g = mixpi_product_da(&g, qdy.high ? mixpi_call_dy(c) : mixpi_tensor_in(qdy.y));
        g.c = to;
    }
    return mixpi_recipe_run(c, &g, r, &qdy, &qw);
}

/* dw = dy' x of quantised operands. */
static mixp_result mixpi_linear_dw(
    mixp_call *c, const mixpi_product *p, const mixpi_quantised *both) {
    mixp_gemm_args g = p->g;
    mixp_quantise_args x = mixpi_recipe_of(g.a, g.m, g.k);
    mixpi_quantised qx = mixpi_recipe_empty(p->recipe, MIXPI_ROLE_DY, MIXPI_ROLE_X), qdy;
    mixp_out to = mixpi_call_dx(c, 1);
    if (!to.data) return MIXP_OK;
    mixp_result r = mixpi_linear_dy(c, p, MIXPI_ROLE_X, both, &qdy);
    x.times = mixpi_recipe_factor(&qdy);
    if (r == MIXP_OK && p->recipe->coded) r = mixpi_coded_values(c, p->recipe, &x, &qx);
    else if (r == MIXP_OK) r = mixpi_recipe_operand(c, p->recipe, MIXPI_ROLE_X, 1, &x, &qx);
    if (r == MIXP_OK) {
        if (!qx.high) g.a = mixpi_tensor_in(qx.y);
        g = mixpi_product_db(&g, qdy.high ? mixpi_call_dy(c) : mixpi_tensor_in(qdy.y));
        g.c = to;
    }
    return mixpi_recipe_run(c, &g, r, &qdy, &qx);
}

/* Quantises dy once for both products that read it, if its values are the same for both. */
static mixp_result mixpi_linear_both(mixp_call *c, const mixpi_product *p, mixpi_quantised *both) {
    const mixpi_recipe_call *rc = p->recipe;
    const mixpi_quantised for_x = mixpi_recipe_empty(rc, MIXPI_ROLE_DY, MIXPI_ROLE_W);
    const mixpi_quantised for_w = mixpi_recipe_empty(rc, MIXPI_ROLE_DY, MIXPI_ROLE_X);
    mixp_quantise_args dy = mixpi_recipe_of(mixpi_call_dy(c), p->g.m, p->g.n);
    *both = for_x;
    if (!mixpi_recipe_has_one_scale(rc)) return MIXP_OK;
    if (rc->recipe.wgrad_high) return MIXP_OK;
    if (for_x.high || for_w.high) return MIXP_OK;
    if (!mixp_call_wants(c, 0) || !mixp_call_wants(c, 1)) return MIXP_OK;
    return mixpi_recipe_operand(c, rc, MIXPI_ROLE_DY, 0, &dy, both);
}

/* The backward pass of a linear under a recipe. The bias's gradient is made from dy itself. */
static mixp_result mixpi_linear_backward(mixp_call *c) {
    const mixpi_product *p = (const mixpi_product *)c->attrs;
    mixpi_quantised both;
    mixp_result r = mixpi_linear_both(c, p, &both);
    if (r == MIXP_OK) r = mixpi_linear_dx(c, p, &both);
    if (r == MIXP_OK)
        r = p->recipe->recipe.wgrad_high ? mixpi_product_grad(c, 1) : mixpi_linear_dw(c, p, &both);
    mixpi_quantised_free(c->ctx, &both);
    return r == MIXP_OK ? mixpi_product_dbias(c, &p->g, mixpi_call_dy(c), 2) : r;
}

/* Frees the input of the linear that was recorded last, if the linear keeps codes of it. */
static void mixpi_linear_recorded(mixp_call *c) {
    const mixpi_recipe_call *rc = ((const mixpi_product *)c->attrs)->recipe;
    if (rc && rc->coded) mixpi_coded_free(c->ctx, c->in[0]);
}
