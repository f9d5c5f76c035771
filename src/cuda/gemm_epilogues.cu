#pragma once
#include "gemm_measuring.cu"
/* --- epilogues ------------------------------------------------------------------------- */

namespace {

/* NULL, or what is wrong with a call. */
inline const char *epilogue_wrong(const mixp_gemm_epilogue_args &k) {
    const mixp_gemm_args &g = k.gemm;
    bool sums = k.kind == MIXP_EPILOGUE_ROW_SUMS;
    if ((unsigned)k.kind >= MIXP_EPILOGUE_COUNT) return "no such epilogue";
    if (g.batch != 1) return "an epilogue needs batch 1";
    const bool no_elements = g.m <= 0 || g.n <= 0;
    if (sums && ((!k.sums.data && g.m > 0) || g.lda != (g.trans_a ? g.m : g.k)))
        return "row sums need a buffer for the sums and a dense matrix a";
    if (!sums && ((!k.before.data && !no_elements) || g.c.accumulate || g.ldc != g.n ||
                     k.before.dtype != g.c.dtype))
        return "GELU needs `before`: dense, and of c's dtype";
    if (k.kind == MIXP_EPILOGUE_GELU_BACK && g.bias.data)
        return "the slope of GELU accepts no bias";
    return NULL;
}

inline cublasLtEpilogue_t epilogue_of(const mixp_gemm_epilogue_args &k) {
    if (k.kind == MIXP_EPILOGUE_ROW_SUMS) return CUBLASLT_EPILOGUE_BGRADB;
    if (k.kind == MIXP_EPILOGUE_GELU_BACK) return CUBLASLT_EPILOGUE_DGELU;
    return k.gemm.bias.data ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
}

/* May cuBLASLt support the epilogue? Requirements: operands need no packing; sums are overwritten
 * and have c's dtype; rows before GELU are multiples of 16 bytes. */
inline bool is_fusible(const mixp_gemm_epilogue_args &k, const Product &p) {
    if (p.pack_a || p.pack_b || p.finish) return false;
    if (k.kind == MIXP_EPILOGUE_ROW_SUMS)
        return !k.gemm.bias.data && k.sums.dtype == k.gemm.c.dtype && !k.sums.accumulate &&
               is_wide(as_in(k.sums));
    return is_wide(as_in(k.before)) && k.gemm.n % 8 == 0;
}

/* Computes the sums of op(a)'s rows in a separate kernel. */
inline mixp_result row_sums(const mixp_exec *x, const mixp_gemm_epilogue_args &k) {
    const mixp_gemm_args &g = k.gemm;
    mixp_reduce_args sum;
    memset((void *)&sum, 0, sizeof sum);
    sum.outer = g.trans_a ? 1 : g.m;
    sum.n = g.k;
    sum.inner = g.trans_a ? g.m : 1;
    sum.factor = 1.0f;
    sum.a = g.a;
    sum.y = k.sums;
    return mixpi_cuda_reduce(x, &sum);
}

inline mixp_result gelu_of(const mixp_exec *x, const mixp_gemm_epilogue_args &k) {
    mixp_unary_args f;
    memset((void *)&f, 0, sizeof f);
    f.op = MIXP_UNARY_GELU_TANH;
    f.n = k.gemm.m * k.gemm.n;
    f.a = as_in(k.before);
    f.y = k.gemm.c;
    return mixpi_cuda_unary(x, &f);
}

inline mixp_result gelu_back(const mixp_exec *x, const mixp_gemm_epilogue_args &k) {
    mixp_unary_backward_args f;
    memset((void *)&f, 0, sizeof f);
    f.op = MIXP_UNARY_GELU_TANH;
    f.n = k.gemm.m * k.gemm.n;
    f.dy = as_in(k.gemm.c);
    f.a = as_in(k.before);
    f.da = k.gemm.c;
    return mixpi_cuda_unary_backward(x, &f);
}

/* The product, and then its epilogue in a separate kernel. */
inline mixp_result epilogue_apart(const mixp_exec *x, const mixp_gemm_epilogue_args &k) {
    mixp_gemm_args g = k.gemm;
    if (k.kind == MIXP_EPILOGUE_GELU) g.c.data = k.before.data;
    mixp_result r = mixpi_cuda_gemm(x, &g);
    if (r != MIXP_OK) return r;
    return k.kind == MIXP_EPILOGUE_ROW_SUMS ? row_sums(x, k)
           : k.kind == MIXP_EPILOGUE_GELU   ? gelu_of(x, k)
                                            : gelu_back(x, k);
}

/* Times the fused product, and the product followed by a kernel, in turns. If the second is faster,
 * marks the fused plan as unusable. */
inline mixp_result epilogue_order(const mixp_exec *x, Kernel *on,
    const mixp_gemm_epilogue_args &trial, const Product &p, Plan *plan) {
    if (!product_point(p, plan)) return MIXP_OK;
    mixp_result done = MIXP_OK;
    const auto run_apart = [&] {
        if (done == MIXP_OK) done = epilogue_apart(x, trial);
    };

    /* Alternate. Trials do not count as products. */
    const mixp_gemm_count count = on->state->products;
    Trials t;
    float apart[measured_rounds];
    mixp_result r = warm_up(on, p, plan);
    for (int i = 0; i < measured_rounds && r == MIXP_OK; i++) {
        r = algorithms_time(on, p, plan, &t, i);
        if (r == MIXP_OK) r = time_of(on, run_apart, &apart[i]);
    }
    on->state->products = count;
    if (r != MIXP_OK || done != MIXP_OK) return r != MIXP_OK ? r : done;

    if (median_of(apart) < algorithms_order(plan, t) * worth_it) plan->at = plan->count;
    return MIXP_OK;
}

inline mixp_result epilogue_measure(
    const mixp_exec *x, Kernel *on, const mixp_gemm_epilogue_args &k, Product p) {
    Plan *plan = NULL;
    mixp_result r = plan_of(on->state, p, &plan);
    if (r != MIXP_OK || is_measured(on->state, plan)) return r;
    r = check_stream(on->state, "gemm");
    if (r != MIXP_OK) return r;
    plan->measured = true;

    /* The separate product makes plans too, and a full list is cleared: this plan with it. */
    if (on->state->plans->count + 4 > most_plans) return MIXP_OK;

    /* Measure with the trials' own c. */
    mixp_gemm_epilogue_args trial = k;
    void *c = NULL;
    if (k.before.data == k.gemm.c.data || !trial_memory(on->state, k.gemm, &c)) return MIXP_OK;
    if (c) p.g.c.data = trial.gemm.c.data = c;
    r = epilogue_order(x, on, trial, p, plan);
    if (c) memory_free(on->state, c);
    return r;
}

inline mixp_result epilogue_try(
    const mixp_exec *x, Kernel *on, const mixp_gemm_epilogue_args &k, bool *done) {
    Product p = product_of(k.gemm, false);
    mixp_result r = open_products(on->state);
    if (r != MIXP_OK || !is_fusible(k, p)) return r;

    p.epilogue = epilogue_of(k);
    p.sums = k.kind == MIXP_EPILOGUE_ROW_SUMS ? k.sums.data : NULL;
    p.before = k.before.data;
    if (on->state->measure) r = epilogue_measure(x, on, k, p);
    if (r == MIXP_OK) r = product_try(x, on, k.gemm, p, done);
    if (*done) on->state->products.direct++;
    return r;
}

}   /* namespace */

static mixp_result mixpi_cuda_gemm_epilogue(const mixp_exec *x, const mixp_gemm_epilogue_args *k) {
    Kernel on(x);
    if (!on.state) return MIXP_ERR_ORDER;
    const char *wrong = epilogue_wrong(*k);
    if (wrong) return say(on.state, MIXP_ERR_ARGUMENT, "gemm", wrong);
    const mixp_gemm_args &g = k->gemm;
    if (g.m <= 0) return MIXP_OK;
    if (!is_real(g.c.dtype) || (g.bias.data && !is_real(g.bias.dtype)) || !is_real(g.a.dtype) ||
        !is_real(g.b.dtype) || (k->sums.data && !is_real(k->sums.dtype)))
        return MIXP_ERR_DTYPE;

    /* Without columns the product has no elements, but the rows of op(a) still have sums. */
    if (g.n <= 0) return k->kind == MIXP_EPILOGUE_ROW_SUMS ? row_sums(x, *k) : MIXP_OK;

    /* Try cuBLASLt's epilogue, then the product and a kernel after it. */
    bool done = false;
    mixp_result r = MIXP_OK;
    if (g.k > 0 && (g.alpha != 0.0f || g.alpha_at)) r = epilogue_try(x, &on, *k, &done);
    if (r != MIXP_OK || done) return r;
    on.state->products.apart++;
    return epilogue_apart(x, *k);
}
