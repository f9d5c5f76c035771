/* differential_cases.h - the small operators beside PyTorch's float64 numbers in reference/small.h, on the
 * device of a context: values and gradients in f32, f16 and bf16, and under autocast.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "examples/ops.h"
#include "against_torch.h"
#include "reference/small.h"

static mixp_tensor *apply_small(mixp_context *c, const char *name, mixp_tensor *const *t, mixp_dtype dtype) {
    const int64_t wide[4] = { 2, -1, 5, 4 }, row[2] = { 3, 7 }, fives[2] = { 2, 5 }, fours[2] = { 3, 4 };
    const int64_t sizes[3] = { 1, 4, 2 };
    const int turned[4] = { 2, 0, 3, 1 };
    mixp_tensor *places = NULL, *parts[3];
#define IS(text) if (!strcmp(name, text))
#define BEGINS(text) if (!strncmp(name, text, sizeof text - 1))
    BEGINS("square")            return mixp_square(c, t[0]);
    IS("reciprocal")            return mixp_reciprocal(c, t[0]);
    BEGINS("log1p")             return mixp_log1p(c, t[0]);
    IS("expm1")                 return mixp_expm1(c, t[0]);
    IS("erfinv")                return mixp_erfinv(c, mixp_scale(c, t[0], 0.25f));
    BEGINS("erf")               return mixp_erf(c, t[0]);
    IS("softplus")              return mixp_softplus(c, t[0], 2.0f);
    IS("softplus_near")         return mixp_softplus(c, t[0], 0.5f);
    IS("leaky_relu")            return mixp_leaky_relu(c, t[0], 0.125f);
    IS("elu")                   return mixp_elu(c, t[0], 1.5f);
    IS("add_scalar")            return mixp_add_scalar(c, t[0], 2.75f);
    IS("rsub")                  return mixp_rsub(c, t[0], 2.75f);
    IS("detach")                return mixp_mul(c, t[0], mixp_detach(c, t[0]));
    IS("permute")               return mixp_permute(c, t[0], 4, turned);
    IS("flip_first")            return mixp_flip(c, t[0], 0);
    IS("flip_last")             return mixp_flip(c, t[0], -1);
    IS("flip_one")              return mixp_flip(c, t[0], 1);
    IS("expand")                return mixp_expand(c, t[0], 4, wide);
    IS("expand_one")            return mixp_expand(c, t[0], 2, row);
    IS("pad_first")             return mixp_pad(c, t[0], 0, 2, 1, -2.5f);
    IS("pad_last")              return mixp_pad(c, t[0], -1, 0, 3, HUGE_VALF);
    IS("squeeze")               return mixp_squeeze(c, t[0], 1);
    IS("squeeze_all")           return mixp_squeeze(c, t[0], MIXP_ALL);
    IS("unsqueeze")             return mixp_unsqueeze(c, t[0], -1);
    IS("stack_middle")          return mixp_stack(c, 3, t, 1);
    IS("stack_last")            return mixp_stack(c, 2, t, -1);
    IS("split_sizes") {
        if (mixp_split_sizes(c, t[0], 1, 3, sizes, parts) != MIXP_OK) return NULL;
        places = parts[0];
        parts[0] = parts[2];
        parts[2] = places;
        return mixp_concat(c, 3, parts, 1);
    }
    IS("min_first")             return mixp_min(c, t[0], 0, 0);
    IS("min_last")              return mixp_min(c, t[0], -1, 1);
    IS("min_all")               return mixp_min(c, t[0], MIXP_ALL, 0);
    IS("min_of_equals")         return mixp_min(c, mixp_expand(c, t[0], 2, fives), MIXP_ALL, 0);
    IS("!argmin_first")         return mixp_argmin(c, t[0], 0, 0);
    IS("!argmin_last")          return mixp_argmin(c, t[0], -1, 0);
    IS("!argmin_all")           return mixp_argmin(c, t[0], MIXP_ALL, 0);
    IS("logsumexp_last")        return mixp_logsumexp(c, t[0], -1, 0);
    IS("logsumexp_first")       return mixp_logsumexp(c, t[0], 0, 1);
    IS("logsumexp_middle")      return mixp_logsumexp(c, t[0], 1, 0);
    IS("logsumexp_all")         return mixp_logsumexp(c, t[0], MIXP_ALL, 0);
    IS("var_last")              return mixp_var(c, t[0], -1, 1, 0);
    IS("var_first")             return mixp_var(c, t[0], 0, 0, 1);
    IS("var_edges")             return mixp_var(c, t[0], -1, 1, 0);
    IS("var_one")               return mixp_var(c, t[0], 1, 0, 0);
    IS("var_none")              return mixp_var(c, t[0], 1, 1, 0);
    IS("var_all")               return mixp_var(c, t[0], MIXP_ALL, 1, 0);
    IS("std_last")              return mixp_std(c, t[0], -1, 1, 0);
    IS("std_edges")             return mixp_std(c, t[0], -1, 1, 0);
    IS("std_equals")            return mixp_std(c, mixp_expand(c, t[0], 2, fours), -1, 1, 0);
    IS("std_all")               return mixp_std(c, t[0], MIXP_ALL, 0, 0);
    IS("norm_one")              return mixp_vector_norm(c, t[0], 1, 1);
    IS("norm_all")              return mixp_vector_norm(c, t[0], MIXP_ALL, 0);
    BEGINS("norm")              return mixp_vector_norm(c, t[0], -1, 0);
    IS("prod_first")            return mixp_prod(c, t[0], 0, 1);
    IS("prod_all")              return mixp_prod(c, t[0], MIXP_ALL, 0);
    BEGINS("prod")              return mixp_prod(c, t[0], 1, 0);
    IS("!prod_edges")           return mixp_prod(c, t[0], -1, 0);
    IS("cumsum_first")          return mixp_cumsum(c, t[0], 0);
    IS("cumsum_one")            return mixp_cumsum(c, t[0], 1);
    BEGINS("cumsum")            return mixp_cumsum(c, t[0], -1);
    IS("!eq")                   return mixp_eq(c, t[0], t[1]);
    IS("!ne")                   return mixp_ne(c, t[0], t[1]);
    IS("!gt")                   return mixp_gt(c, t[0], t[1]);
    IS("!ge")                   return mixp_ge(c, t[0], t[1]);
    IS("!lt")                   return mixp_lt(c, t[0], t[1]);
    IS("!le")                   return mixp_le(c, t[0], t[1]);
    IS("!one_hot")              return mixp_one_hot(c, t[0], VOCAB, dtype);
    IS("scatter_last")          return mixp_scatter_add(c, t[0], -1, t[1], t[2]);
    BEGINS("scatter")           return mixp_scatter_add(c, t[0], 0, t[1], t[2]);
    IS("index_first")           return mixp_index_add(c, t[0], 0, t[1], t[2]);
    IS("index_last")            return mixp_index_add(c, t[0], 1, t[1], t[2]);
    IS("topk_largest")          return mixp_topk(c, t[0], 3, -1, 1, NULL);
    IS("topk_smallest")         return mixp_topk(c, t[0], 4, -1, 0, NULL);
    IS("topk_one")              return mixp_topk(c, t[0], 1, -1, 1, NULL);
    IS("sort_up")               return mixp_sort(c, t[0], -1, 0, NULL);
    IS("sort_down")             return mixp_sort(c, t[0], -1, 1, NULL);
    IS("!topk_places")          return mixp_topk(c, t[0], 3, -1, 1, &places) ? places : NULL;
    IS("!sort_places")          return mixp_sort(c, t[0], -1, 0, &places) ? places : NULL;
    IS("!sort_places_down")     return mixp_sort(c, t[0], -1, 1, &places) ? places : NULL;
    BEGINS("!cast")             return mixp_cast(c, t[0], dtype);
    BEGINS("nll")               return mixp_nll(c, t[0], t[1], MIXP_IGNORE);
    IS("triplet")               return mixp_triplet_margin(c, t[0], t[1], t[2], 1.0f, 0, MIXP_REDUCE_MEAN);
    IS("triplet_one")           return mixp_triplet_margin(c, t[0], t[1], t[2], 0.25f, 0, MIXP_REDUCE_MEAN);
    IS("log2")                  return mixp_log2(c, t[0]);
    IS("log10")                 return mixp_log10(c, t[0]);
    IS("acos")                  return mixp_acos(c, mixp_scale(c, t[0], 0.25f));
    IS("asin")                  return mixp_asin(c, mixp_scale(c, t[0], 0.25f));
    IS("tan")                   return mixp_tan(c, mixp_scale(c, t[0], 0.5f));
    IS("sinh")                  return mixp_sinh(c, t[0]);
    IS("cosh")                  return mixp_cosh(c, t[0]);
    BEGINS("power")             return mixp_power(c, t[0], t[1]);
    IS("atan2")                 return mixp_atan2(c, t[0], t[1]);
    BEGINS("prelu")             return mixp_prelu(c, t[0], t[1]);
    IS("addcdiv")               return mixp_addcdiv(c, t[0], t[1], t[2], 0.5f);
    IS("cumprod_last")          return mixp_cumprod(c, t[0], -1);
    IS("cumprod_zeros")         return mixp_cumprod(c, mixp_relu(c, t[0]), 0);
    IS("order_3")               return mixp_norm(c, t[0], 3.0f, -1, 0);
    IS("order_1")               return mixp_norm(c, t[0], 1.0f, 0, 0);
    IS("order_low")             return mixp_norm(c, mixp_relu(c, t[0]), 1.5f, -1, 1);
    IS("order_below")           return mixp_norm(c, t[0], -2.0f, -1, 0);
    IS("order_most")            return mixp_norm(c, t[0], HUGE_VALF, MIXP_ALL, 0);
    IS("tril")                  return mixp_tril(c, t[0], 0);
    IS("triu")                  return mixp_triu(c, t[0], -1);
    IS("roll_first")            return mixp_roll(c, t[0], 2, 0);
    IS("roll_last")             return mixp_roll(c, t[0], -1, -1);
    IS("einsum_batch")          return mixp_einsum(c, "bij,bjk->bik", t[0], t[1]);
    IS("einsum_heads")          return mixp_einsum(c, "bqhd,bkhd->bhqk", t[0], t[1]);
    IS("einsum_implicit")       return mixp_einsum(c, "ki, ji", t[0], t[1]);
    IS("einsum_sums")           return mixp_einsum(c, "abc,cd->b", t[0], t[1]);
    IS("einsum_outer")          return mixp_einsum(c, "i,j->ji", t[0], t[1]);
    IS("!searched")             return mixp_searchsorted(c, mixp_sort(c, t[0], -1, 0, NULL), t[1], 0);
#undef IS
#undef BEGINS
    return NULL;
}

/* 0: finite; 1, 2: Inf; 3: NaN. */
static int kind_of(double v) { return v != v ? 3 : v > 1.7e308 ? 1 : v < -1.7e308 ? 2 : 0; }

/* How far t is from `want` by record_small.py's measure: the largest |got - want| / max(1, |want|), and
 * how many numbers are of another kind. */
static double small_off(const mixp_tensor *t, const double *want, int *lost) {
    const double most = t && t->dtype == MIXP_F16 ? 65519.99 : 3.39617752923e38;
    double got[MAX_VALUES], off = 0.0;
    if (!t || mixp_read(t, got, MIXP_F64, t->count) != MIXP_OK) return HUGE_VAL;
    for (int64_t i = 0; i < t->count; i++) {
        double w = want[i] > most ? HUGE_VAL : want[i] < -most ? -HUGE_VAL : want[i];
        double by = fabs(w) > 1.0 ? fabs(w) : 1.0;
        if (kind_of(got[i]) != kind_of(w)) ++*lost;
        else if (!kind_of(w) && fabs(got[i] - w) / by > off) off = fabs(got[i] - w) / by;
    }
    return off;
}

static const char *const small_modes[5] = { "f32", "f16", "bf16", "f16 under autocast", "bf16 under autocast" };

/* At most 1.1 times as far from the truth as PyTorch, or, where PyTorch was lucky, half a unit in the
 * last place of a half, four units of f32; and not more numbers of the wrong kind. */
static void small_check(const small_case *k, int mode, int gradient, mixp_dtype dtype, double off, int lost) {
    double unit = dtype == MIXP_F16 ? 1.0 / 2048 : dtype == MIXP_BF16 ? 1.0 / 256 : 1.0 / 4194304;
    double most = 1.1 * k->off[mode][gradient];
    if (most < unit) most = unit;
    if (off <= most + 1e-9 && lost <= k->lost[mode][gradient]) return;
    test_bad++;
    TEST_SHOW("%s in %s: the %s is %.3g off, PyTorch's %.3g; %d of the wrong kind, PyTorch %d", k->name,
              small_modes[mode], gradient ? "gradient" : "value", off, k->off[mode][gradient], lost,
              k->lost[mode][gradient]);
}

static void small_gradients(mixp_context *ctx, const small_case *k, int mode, inputs *in, mixp_tensor *y,
                            uint32_t *gen, const double *want) {
    float v[MAX_VALUES];
    double off = 0.0;
    mixp_tensor *dy;
    int i, lost = 0;
    gen_short(gen, v, k->count);
    dy = mixp_input(ctx, MIXP_F32, y->rank, y->shape, v);
    CHECK_INT(mixp_backward(ctx, mixp_sum(ctx, mixp_mul(ctx, y, dy), MIXP_ALL, 0)), MIXP_OK);
    for (i = 0; i < in->n; i++) {
        double here;
        if (!in->has_grad[i]) continue;
        here = small_off(in->t[i]->grad, want, &lost);
        if (here > off) off = here;
        want += in->t[i]->count;
    }
    small_check(k, mode, 1, in->t[0]->dtype, off, lost);
}

/* Returns how many recorded values the case has. */
static int small_one(mixp_context *ctx, int index, int mode, const double *want) {
    static const mixp_dtype dtypes[5] = { MIXP_F32, MIXP_F16, MIXP_BF16, MIXP_F16, MIXP_BF16 };
    const small_case *k = &small_cases[index];
    uint32_t gen = gen_start(600u + (uint32_t)index);
    mixp_tensor *y = NULL;
    inputs in;
    int i, lost = 0, used = k->count;
    memset(&in, 0, sizeof in);
    mixp_step_begin(ctx);
    for (const char *text = k->inputs; *text; text += *text == ' ')
        text = make_input(ctx, text, &gen, dtypes[mode], &in);
    if (mode < 3) y = apply_small(ctx, k->name, in.t, dtypes[mode]);
    else MIXP_AUTOCAST(ctx, dtypes[mode]) y = apply_small(ctx, k->name, in.t, dtypes[mode]);
    CHECK(y && y->count == k->count);
    for (i = 0; i < in.n && *k->name != '!'; i++)
        if (in.has_grad[i]) used += (int)in.t[i]->count;
    if (!y || y->count != k->count) return used;
    if (mode > 2 && *k->name != '!') CHECK(y->dtype == (k->wide ? MIXP_F32 : dtypes[mode]));
    small_check(k, mode, 0, y->dtype, small_off(y, want, &lost), lost);
    if (*k->name != '!') small_gradients(ctx, k, mode, &in, y, &gen, want + k->count);
    return used;
}

static void differential_on(mixp_context *ctx) {
    const char *why = "";
    int mode, i, at;
    for (mode = 0; mode < 5; mode++) {
        for (i = at = 0; i < SMALL_CASES; i++) at += small_one(ctx, i, mode, small_values + at);
        CHECK_INT(at, sizeof small_values / sizeof *small_values);
    }
    if (mixp_context_error(ctx, &why) != MIXP_OK) { test_bad++; TEST_SHOW("%s", why); }
    mixp_context_free(ctx);
}
