/* test_cuda_products.cpp - epilogues of products on the simulated GPU, and choices of algorithms
 * that are saved and passed in again. The expected values come from double loops.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"

/* One product c[m,n] = op(a) op(b) + bias with an epilogue. */
struct Job {
    int64_t    m, n, k;
    int        trans_a, trans_b, accumulate, sums_accumulate, bias;
    mixp_dtype in, out, sums;
    mixp_epilogue kind;
};

struct Arrays { Pair a, b, c, bias, sums, before; mixp_gemm_epilogue_args k; };

static Arrays arrays_of(const Job &t) {
    Arrays o;
    mixp_gemm_args &g = o.k.gemm;
    memset(&o.k, 0, sizeof o.k);
    o.k.kind = t.kind;
    g.m = t.m; g.n = t.n; g.k = t.k; g.batch = 1; g.alpha = 1.0f;
    g.trans_a = t.trans_a; g.trans_b = t.trans_b;
    g.lda = t.trans_a ? t.m : t.k;
    g.ldb = t.trans_b ? t.k : t.n;
    g.ldc = t.n;
    o.a = numbers(t.in, t.m * t.k, 1.0, 0);
    o.b = numbers(t.in, t.k * t.n, 0.5, 0);
    o.c = output(t.out, t.m * t.n, t.accumulate);
    o.bias = numbers(t.out, t.n, 1.0, 0);
    o.sums = output(t.sums, t.m, t.sums_accumulate);
    o.before = t.kind == MIXP_EPILOGUE_GELU ? output(t.out, t.m * t.n, 0)
                                            : numbers(t.out, t.m * t.n, 1.5, 0);
    return o;
}

static const mixp_gemm_epilogue_args *on_gpu_side(Arrays &o, const Job &t) {
    on_gpu = 1;
    o.k.gemm.a = args_in(ON(o.a));
    o.k.gemm.b = args_in(ON(o.b));
    o.k.gemm.bias = args_in(ON(o.bias));
    if (!t.bias) o.k.gemm.bias.data = NULL;
    o.k.gemm.c = args_out(ON(o.c), t.accumulate);
    if (t.kind == MIXP_EPILOGUE_ROW_SUMS) o.k.sums = args_out(ON(o.sums), t.sums_accumulate);
    else o.k.before = args_out(ON(o.before), 0);
    return &o.k;
}

static void finish_arrays(Arrays &o) {
    Pair *all[] = { &o.a, &o.b, &o.c, &o.bias, &o.sums, &o.before };
    for (Pair *p : all) finish(*p);
}

static double a_at(const Arrays &o, int64_t i, int64_t p) {
    const mixp_gemm_args &g = o.k.gemm;
    return value_at(o.a.cpu, o.a.dtype, g.trans_a ? p * g.m + i : i * g.k + p);
}
static double b_at(const Arrays &o, int64_t p, int64_t j) {
    const mixp_gemm_args &g = o.k.gemm;
    return value_at(o.b.cpu, o.b.dtype, g.trans_b ? j * g.k + p : p * g.n + j);
}

/* Element (i, j) of the product with its bias, and a bound of what f32 sums are off. */
static double product_at(const Arrays &o, const Job &t, int64_t i, int64_t j, double *slack) {
    double sum = t.bias ? value_at(o.bias.cpu, o.bias.dtype, j) : 0.0, size = fabs(sum);
    for (int64_t p = 0; p < t.k; p++) {
        sum += a_at(o, i, p) * b_at(o, p, j);
        size += fabs(a_at(o, i, p) * b_at(o, p, j));
    }
    *slack = (double)(t.k + 4) * 6e-8 * size;
    return sum;
}

/* GELU by tanh, from its definition, and its slope as a difference. */
static double gelu_tanh(double x)
{ return 0.5 * x * (1.0 + tanh(sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x))); }
static double gelu_erf(double x) { return 0.5 * x * (1.0 + erf(x * sqrt(0.5))); }
static double slope_at(double (*gelu)(double), double x)
{ return (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5; }
static double gelu_slope_at(double x) { return slope_at(gelu_tanh, x); }

/* cuBLASLt does not say which tanh it takes. That of the hardware, tanh.approx.f32, is off by up to
 * 2^-11 of its value (PTX ISA): so much GELU at x may be off for that, and so much its slope. It is
 * as much as erf's GELU differs, so test_which_gelu looks at many at once. */
static double tanh_room(void) { return cudasim::gelu_kind == cudasim::exact_tanh ? 0.0 : 1.0 / 2048; }
static double gelu_room(double x) { return 0.5 * fabs(x) * tanh_room(); }
static double slope_room(double x) {
    double inner = 0.7978845608 * (1.0 + 3.0 * 0.044715 * x * x);
    return (0.5 + fabs(x) * inner) * tanh_room();
}

static void near_to(const Pair &p, int64_t i, double want, double slack, const char *what) {
    double got = value_at(p.gpu, p.dtype, i);
    if (fabs(got - want) <= slack + one_rounding(p.dtype, fabs(want) + slack)) return;
    test_bad++;
    TEST_SHOW("%s %lld is %.9g, not %.9g (slack %.3g)", what, (long long)i, got, want, slack);
}

/* Twice a rounding: that of what was before, and of GELU's own approximation. */
static void check_gelu(const Arrays &o, const Job &t, int64_t at, double x, double slack) {
    double low = one_rounding(o.c.dtype, fabs(x) + slack);
    if (t.kind == MIXP_EPILOGUE_GELU) {
        near_to(o.before, at, x, slack, "before");
        near_to(o.c, at, gelu_tanh(x), 1.13 * (slack + low) + low + 3e-6 + gelu_room(x),
                "gelu");
        return;
    }
    double before = value_at(o.before.cpu, o.before.dtype, at), room = 1e-5 + slope_room(before);
    near_to(o.c, at, x * gelu_slope_at(before), 1.13 * (slack + 2.0 * low) + room * fabs(x),
            "gelu back");
}

/* Sums are held to k roundings of f32, for each dtype. */
static void check_sums(const Arrays &o, const Job &t) {
    for (int64_t i = 0; i < t.m; i++) {
        double sum = t.sums_accumulate ? value_at(o.sums.cpu, o.sums.dtype, i) : 0.0, size = 0.0;
        for (int64_t p = 0; p < t.k; p++) {
            sum += a_at(o, i, p);
            size += fabs(a_at(o, i, p));
        }
        near_to(o.sums, i, sum, (double)(t.k + 4) * 6e-8 * (size + fabs(sum)), "sum");
    }
}

static void check_arrays(const Arrays &o, const Job &t) {
    WAIT();
    for (int64_t i = 0; i < t.m; i++)
        for (int64_t j = 0; j < t.n; j++) {
            double slack, x = product_at(o, t, i, j, &slack);
            int64_t at = i * t.n + j;
            if (t.kind != MIXP_EPILOGUE_ROW_SUMS) { check_gelu(o, t, at, x, slack); continue; }
            slack += lost_before_adding(o.c.dtype, t.accumulate, fabs(x) + slack);
            if (t.accumulate) x += value_at(o.c.cpu, o.c.dtype, at);
            near_to(o.c, at, x, slack + 1e-6, "c");
        }
    if (t.kind == MIXP_EPILOGUE_ROW_SUMS) check_sums(o, t);
}

/* joined: whether cuBLASLt does it in one pass. */
static void run_job(const Job &t, int joined) {
    Arrays o = arrays_of(t);
    long before = cudasim::count.joined;
    CHECK_INT(gpu_kernels->gemm_epilogue(&gpu_exec, on_gpu_side(o, t)), MIXP_OK);
    if (cudasim::simulated) CHECK_INT(cudasim::count.joined - before, joined);
    check_arrays(o, t);
    finish_arrays(o);
}

static Job job_of(mixp_epilogue kind, mixp_dtype in, mixp_dtype out) {
    Job t;
    memset(&t, 0, sizeof t);
    t.m = 16; t.n = 24; t.k = 40;
    t.kind = kind;
    t.in = in;
    t.out = out;
    t.sums = MIXP_F32;
    return t;
}

static const mixp_dtype dtypes[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };

static void sums_body(void) {
    for (int i = 0; i < 24; i++) {
        Job t = job_of(MIXP_EPILOGUE_ROW_SUMS, dtypes[i % 3], i % 4 == 3 ? dtypes[i % 3] : MIXP_F32);
        t.trans_a = i & 1; t.trans_b = i >> 1 & 1; t.accumulate = i >> 2 & 1;
        t.sums_accumulate = i >> 3 & 1;
        t.sums = i % 5 == 4 ? MIXP_BF16 : MIXP_F32;
        cudasim::epilogues = i % 7 != 6;
        t.k += 8 * !cudasim::epilogues;         /* a refusal is remembered */
        run_job(t, cudasim::epilogues && t.sums == t.out && !t.sums_accumulate);
    }
    cudasim::epilogues = true;
}
static void test_sums(void) { in_all_schedules(sums_body); }

/* Products rounded before an old c is added: the bounds allow that. */
static void test_sums_rounded_first(void) {
    NEEDS_SIMULATION;
    cudasim::rounds_first = true;
    test_sums();
    cudasim::rounds_first = false;
}

/* cuBLASLt may have sums in a product's pass, but none that writes f32 from f16 or bf16: then a kernel
 * of its own sums, and the count says so. Where both are of one dtype nothing changes. */
static void test_sums_apart(void) {
    NEEDS_SIMULATION;
    pair_open();
    cudasim::sums_in_f32 = false;
    for (mixp_dtype in : dtypes)
        for (mixp_dtype out : { MIXP_F32, in }) {
            Job t = job_of(MIXP_EPILOGUE_ROW_SUMS, in, out);
            int64_t before = gpu_device->gemm_count(&gpu_exec).apart;
            t.k = 56;                           /* a refusal is remembered */
            t.sums = out;
            run_job(t, in == out);
            CHECK_INT(gpu_device->gemm_count(&gpu_exec).apart - before, in != out);
        }
    cudasim::sums_in_f32 = true;
    pair_close();
}

/* Partial sums of a split k in place: only where c is f32, as the sums are. */
static void test_in_place(void) {
    NEEDS_SIMULATION;
    pair_open();
    int64_t k = 72;                             /* each shape is new */
    for (mixp_dtype in : dtypes)
        for (mixp_dtype out : { MIXP_F32, in }) {
            Job t = job_of(MIXP_EPILOGUE_ROW_SUMS, in, out);
            t.k = k += 8;
            t.sums = out;
            cudasim::reductions = 0;
            run_job(t, 1);
            CHECK_INT((int)cudasim::reductions, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE |
                      (out == MIXP_F32 ? CUBLASLT_REDUCTION_SCHEME_INPLACE : 0));
        }
    pair_close();
}

static void gelu_body(void) {
    for (int i = 0; i < 24; i++) {
        Job t = job_of(i & 1 ? MIXP_EPILOGUE_GELU_BACK : MIXP_EPILOGUE_GELU, dtypes[i % 3],
                       dtypes[i % 3]);
        t.trans_b = i >> 1 & 1;
        t.bias = t.kind == MIXP_EPILOGUE_GELU && i % 4 == 0;
        if (i % 5 == 4) t.n = 21;               /* rows that are not of 16 bytes */
        cudasim::epilogues = i % 7 != 6;
        t.k += 8 * !cudasim::epilogues;         /* a refusal is remembered */
        run_job(t, cudasim::epilogues && t.n == 24);
    }
    cudasim::epilogues = true;
}
static void test_gelu(void) { in_all_schedules(gelu_body); }

/* The same with a tanh that is as rough as the hardware's: what a first run on a GPU may meet. */
static void test_gelu_rough(void) {
    NEEDS_SIMULATION;
    cudasim::gelu_kind = cudasim::rough_tanh;
    pair_open();
    gelu_body();
    pair_close();
    cudasim::gelu_kind = cudasim::exact_tanh;
}

/* How much of the way from tanh's GELU (0) to erf's (1) the results are, by least squares: what is
 * rounded at each weighs little in thousands. */
static double way_to_erf(const Job &t) {
    Arrays o = arrays_of(t);
    double along = 0.0, whole = 0.0, slack;
    CHECK_INT(gpu_kernels->gemm_epilogue(&gpu_exec, on_gpu_side(o, t)), MIXP_OK);
    WAIT();
    for (int64_t i = 0; i < t.m * t.n; i++) {
        double x = product_at(o, t, i / t.n, i % t.n, &slack), by_tanh, by_erf;
        double before = value_at(o.before.cpu, o.before.dtype, i);
        if (t.kind == MIXP_EPILOGUE_GELU) { by_tanh = gelu_tanh(x); by_erf = gelu_erf(x); }
        else {
            by_tanh = x * gelu_slope_at(before);
            by_erf = x * slope_at(gelu_erf, before);
        }
        along += (value_at(o.c.gpu, o.c.dtype, i) - by_tanh) * (by_erf - by_tanh);
        whole += (by_erf - by_tanh) * (by_erf - by_tanh);
    }
    finish_arrays(o);
    return along / whole;
}

/* Of f32 and f16; bf16 is too coarse to tell. */
static void which_gelu(double least, double most) {
    pair_open();
    for (int i = 0; i < 4; i++) {
        Job t = job_of(i & 1 ? MIXP_EPILOGUE_GELU_BACK : MIXP_EPILOGUE_GELU, dtypes[i / 2],
                       dtypes[i / 2]);
        t.m = t.n = 64;
        double way = way_to_erf(t);
        if (!(way > least && way < most)) {
            test_bad++;
            TEST_SHOW("kind %d of %s is %.3f of the way to erf's GELU", t.kind,
                      mixp_dtype_name(t.in), way);
        }
    }
    pair_close();
}
static void test_which_gelu(void) {
    which_gelu(-0.4, 0.4);
    if (!cudasim::simulated) return;
    cudasim::gelu_kind = cudasim::rough_tanh;
    which_gelu(-0.4, 0.4);
    cudasim::gelu_kind = cudasim::by_erf;       /* the wrong one is seen */
    which_gelu(0.6, 1.4);
    cudasim::gelu_kind = cudasim::exact_tanh;
}

/* What cuBLASLt takes back when it is asked to run is done apart. */
static void test_taken_back(void) {
    NEEDS_SIMULATION;
    pair_open();
    for (int kind = 0; kind < MIXP_EPILOGUE_COUNT; kind++) {
        Job t = job_of((mixp_epilogue)kind, MIXP_BF16,
                       kind == MIXP_EPILOGUE_ROW_SUMS ? MIXP_F32 : MIXP_BF16);
        cudasim::refused_products = 3;
        run_job(t, 0);
        CHECK_INT(cudasim::refused_products, 0);
    }
    pair_close();
}

static mixp_result epilogue_with(Arrays &o) { return gpu_kernels->gemm_epilogue(&gpu_exec, &o.k); }

/* A product of 0 columns needs no arrays, and its row sums are those of any product. */
static void test_no_columns(void) {
    pair_open();
    Job sums = job_of(MIXP_EPILOGUE_ROW_SUMS, MIXP_F16, MIXP_F32);
    Arrays s = arrays_of(sums);
    on_gpu_side(s, sums);
    s.k.gemm.n = s.k.gemm.ldb = s.k.gemm.ldc = 0;
    s.k.gemm.b.data = NULL;
    s.k.gemm.c.data = NULL;
    CHECK_INT(epilogue_with(s), MIXP_OK);
    WAIT();
    check_sums(s, sums);
    finish_arrays(s);

    /* GELU, and its slope. */
    for (int kind = MIXP_EPILOGUE_GELU; kind <= MIXP_EPILOGUE_GELU_BACK; kind++) {
        Job gelu = job_of((mixp_epilogue)kind, MIXP_F16, MIXP_F16);
        Arrays g = arrays_of(gelu);
        on_gpu_side(g, gelu);
        g.k.gemm.n = g.k.gemm.ldc = 0;
        g.k.gemm.c.data = g.k.before.data = NULL;
        CHECK_INT(epilogue_with(g), MIXP_OK);
        finish_arrays(g);
    }
    pair_close();
}

static void test_misused(void) {
    pair_open();
    Job sums = job_of(MIXP_EPILOGUE_ROW_SUMS, MIXP_F16, MIXP_F32);
    Job gelu = job_of(MIXP_EPILOGUE_GELU, MIXP_F16, MIXP_F16);
    Arrays s = arrays_of(sums), g = arrays_of(gelu);
    mixp_gemm_epilogue_args good = *on_gpu_side(s, sums), fine = *on_gpu_side(g, gelu);
    s.k.sums.data = NULL;
    CHECK_INT(epilogue_with(s), MIXP_ERR_ARGUMENT);
    s.k = good; s.k.gemm.batch = 2;
    CHECK_INT(epilogue_with(s), MIXP_ERR_ARGUMENT);
    s.k = good; s.k.gemm.lda++;
    CHECK_INT(epilogue_with(s), MIXP_ERR_ARGUMENT);
    s.k = good; s.k.kind = MIXP_EPILOGUE_COUNT;
    CHECK_INT(epilogue_with(s), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(gpu_device->message(&gpu_exec), "no such epilogue");
    s.k = good; s.k.sums.dtype = MIXP_I32;
    CHECK_INT(epilogue_with(s), MIXP_ERR_DTYPE);
    g.k.gemm.c.accumulate = 1;
    CHECK_INT(epilogue_with(g), MIXP_ERR_ARGUMENT);
    g.k = fine; g.k.before.data = NULL;
    CHECK_INT(epilogue_with(g), MIXP_ERR_ARGUMENT);
    g.k = fine; g.k.before.dtype = MIXP_F32;
    CHECK_INT(epilogue_with(g), MIXP_ERR_ARGUMENT);
    g.k = fine; g.k.kind = MIXP_EPILOGUE_GELU_BACK; g.k.gemm.bias = g.k.gemm.a;
    CHECK_INT(epilogue_with(g), MIXP_ERR_ARGUMENT);
    g.k = fine; g.k.gemm.m = 0;
    CHECK_INT(epilogue_with(g), MIXP_OK);
    s.k = good;
    g.k = fine;
    finish_arrays(s);
    finish_arrays(g);
    pair_close();
}

/* --- in a step --------------------------------------------------------------------------- */

enum { ROWS = 8, WIDTH = 16, MIDDLE = 32, WEIGHTS = 4 };

/* Two layers with GELU between them, and what a step leaves. */
struct Step {
    mixp_context *ctx;
    mixp_tensor  *w[WEIGHTS];           /* up, its bias, down, its bias */
    float         x[ROWS * WIDTH], y[ROWS * WIDTH], dx[ROWS * WIDTH];
    float         grad[WEIGHTS][MIDDLE * WIDTH];
};

static int measuring;                   /* gemm_measure of the contexts to come */
static const mixp_device *other;        /* their device, if it is not mixp_cuda's */
/* epilogues: -1: none named */
static mixp_context *context_of(int epilogues, const char *choices, const char **why) {
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.device = mixp_cuda(0, why);
    if (!desc.device && !cudasim::simulated) exit(77);
    desc.seed = 3;
    desc.threads = 1;
    if (other) desc.device = other;
    desc.epilogues = epilogues < 0 ? 0 : epilogues ? epilogues : MIXP_EPILOGUES_NONE;
    desc.gemm_choices = choices;
    desc.gemm_measure = measuring;
    desc.why = why;
    return mixp_context_new(&desc);
}

static void step_open(Step *s, int epilogues, const char *choices) {
    static const int64_t shapes[WEIGHTS][2] = { { MIDDLE, WIDTH }, { MIDDLE, 0 },
                                                { WIDTH, MIDDLE }, { WIDTH, 0 } };
    static const char *const names[WEIGHTS] = { "up", "up.b", "down", "down.b" };
    const char *why = "";
    memset(s, 0, sizeof *s);
    s->ctx = context_of(epilogues, choices, &why);
    CHECK(s->ctx != NULL);
    if (!s->ctx) { printf("%s\n", why); exit(2); }
    for (int i = 0; i < WEIGHTS; i++) {
        s->w[i] = mixp_param(s->ctx, names[i], MIXP_F32, i % 2 ? 1 : 2, shapes[i]);
        mixp_init_normal(s->w[i], 0, 0.5);
    }
    for (int i = 0; i < ROWS * WIDTH; i++) s->x[i] = (float)((i * 7 + 3) % 29 - 14) / 16.0f;
}

/* Forward and backward of the mean of squares. *y: the layers' result. Returns their input. */
static mixp_tensor *step_once(Step *s, mixp_dtype dtype, mixp_tensor **y) {
    int64_t shape[2] = { ROWS, WIDTH };
    mixp_context *c = s->ctx;
    mixp_step_begin(c);
    mixp_tensor *x = mixp_input(c, MIXP_F32, 2, shape, s->x);
    mixp_tensor_set_requires_grad(x, 1);
    MIXP_AUTOCAST(c, dtype)
        *y = mixp_mlp(c, x, s->w[0], s->w[1], s->w[2], s->w[3]);
    mixp_backward(c, mixp_mean(c, mixp_mean(c, mixp_mul(c, *y, *y), -1, 0), -1, 0));
    return x;
}

/* `times` over without clearing gradients. */
static void step_run(Step *s, mixp_dtype dtype, int times) {
    for (int i = 0; i < times; i++) {
        mixp_tensor *y = NULL, *x = step_once(s, dtype, &y);
        CHECK_INT(mixp_read(y, s->y, MIXP_F32, ROWS * WIDTH), MIXP_OK);
        CHECK_INT(mixp_read(x->grad, s->dx, MIXP_F32, ROWS * WIDTH), MIXP_OK);
    }
    for (int i = 0; i < WEIGHTS; i++)
        CHECK_INT(mixp_read(s->w[i]->grad, s->grad[i], MIXP_F32, s->w[i]->count), MIXP_OK);
}

static void step_close(Step *s) {
    const char *why = "";
    CHECK_INT(mixp_context_error(s->ctx, &why), MIXP_OK);
    CHECK_TEXT(why, "");
    mixp_context_free(s->ctx);
    CHECK_INT(cudasim::leaks(), 0);
}

/* The largest difference over the largest value. */
static double apart(const float *a, const float *b, int n) {
    double most = 0.0, size = 1e-30;
    for (int i = 0; i < n; i++) {
        if (fabs((double)a[i] - (double)b[i]) > most) most = fabs((double)a[i] - (double)b[i]);
        if (fabs((double)b[i]) > size) size = fabs((double)b[i]);
    }
    return most / size;
}

/* How many products took an epilogue, and that the results are those of three operators apart. */
static void same_step(int epilogues, mixp_dtype dtype, int times, long joined) {
    static Step plain, with;
    double slack = dtype != MIXP_F32 ? 2e-2 : cudasim::simulated ? 2e-6 : 2e-5;
    long before = cudasim::count.joined;
    if (epilogues & MIXP_EPILOGUES_GELU) slack += 8.0 * tanh_room();
    step_open(&plain, 0, NULL);
    step_run(&plain, dtype, times);
    CHECK_INT(cudasim::count.joined - before, 0);
    step_open(&with, epilogues, NULL);
    before = cudasim::count.joined;
    step_run(&with, dtype, times);
    if (cudasim::simulated) CHECK_INT(cudasim::count.joined - before, joined);
    CHECK(apart(with.y, plain.y, ROWS * WIDTH) <= slack);
    CHECK(apart(with.dx, plain.dx, ROWS * WIDTH) <= slack);
    for (int i = 0; i < WEIGHTS; i++)
        CHECK(apart(with.grad[i], plain.grad[i], (int)plain.w[i]->count) <= slack);
    mixp_context_free(plain.ctx);
    step_close(&with);
}

static int both_flags(const mixp_exec *) { return MIXP_EPILOGUES_GELU | MIXP_EPILOGUES_BIAS; }

/* How many products of a step take an epilogue on the device `other`. */
static long joined_by(int epilogues) {
    static Step s;
    long before = cudasim::count.joined;
    step_open(&s, epilogues, NULL);
    step_run(&s, MIXP_BF16, 1);
    step_close(&s);
    return cudasim::count.joined - before;
}

/* A description without flags has those that the device names: GELU's on 9.0, where it was measured. */
static void named_by_the_device(void) {
    const char *why = "";
    mixp_device device = *mixp_cuda(0, &why);
    if (!cudasim::simulated) return;
    const int major = cudasim::capability_major;
    CHECK_INT(joined_by(-1), 2);
    cudasim::capability_major = 8;
    CHECK_INT(joined_by(-1), 0);
    cudasim::capability_major = major;
    device.epilogues = both_flags;
    other = &device;
    CHECK_INT(joined_by(-1), 4);
    CHECK_INT(joined_by(MIXP_EPILOGUES_BIAS), 2);
    CHECK_INT(joined_by(0), 0);
    CHECK(!context_of(MIXP_EPILOGUES_NONE | MIXP_EPILOGUES_BIAS, NULL, &why));
    CHECK_TEXT(why, "MIXP_EPILOGUES_NONE");
    other = NULL;
}

/* The first micro-batch's bias gradients are sums of a product; those that add are not. */
static void test_step(void) {
    for (int d = 0; d < 3; d++) {
        same_step(MIXP_EPILOGUES_BIAS, dtypes[d], 1, 2);
        same_step(MIXP_EPILOGUES_BIAS, dtypes[d], 3, 2);
        same_step(MIXP_EPILOGUES_GELU, dtypes[d], 1, 2);
        same_step(MIXP_EPILOGUES_GELU | MIXP_EPILOGUES_BIAS, dtypes[d], 2, 6);
    }
    if (cudasim::simulated) {
        cudasim::gelu_kind = cudasim::rough_tanh;
        same_step(MIXP_EPILOGUES_GELU, MIXP_F32, 1, 2);
        cudasim::gelu_kind = cudasim::exact_tanh;
    }
    named_by_the_device();
    cudasim::epilogues = false;
    same_step(MIXP_EPILOGUES_GELU | MIXP_EPILOGUES_BIAS, MIXP_BF16, 1, 0);
    cudasim::epilogues = true;
}

/* What does not fit is told as ever, by the operator that it does not fit. */
static void test_step_misfit(void) {
    static Step s;
    const char *why = "";
    step_open(&s, MIXP_EPILOGUES_GELU, NULL);
    mixp_step_begin(s.ctx);
    CHECK(!mixp_mlp(s.ctx, s.w[0], s.w[2], NULL, s.w[0], NULL));
    CHECK_INT(mixp_context_error(s.ctx, &why), MIXP_ERR_SHAPE);
    CHECK(strstr(why, "linear") != NULL);
    mixp_context_clear_error(s.ctx);
    CHECK(!mixp_mlp(s.ctx, NULL, s.w[0], NULL, s.w[2], NULL));
    mixp_context_clear_error(s.ctx);
    step_close(&s);
}

/* --- choices ------------------------------------------------------------------------------ */

static char choices[8192];

/* The choices of a context that has taken a step, its heuristic offering algorithm `first` first. */
static size_t choices_of(int first, Step *s) {
    cudasim::first_algorithm = first;
    step_open(s, 0, NULL);
    step_run(s, MIXP_F16, 1);                   /* cuBLASLt multiplies bf16 from 8.0 on */
    size_t bytes = mixp_context_gemm_choices(s->ctx, choices, sizeof choices);
    CHECK(bytes > 200 && bytes == strlen(choices) + 1);
    CHECK_INT(mixp_context_gemm_choices(s->ctx, NULL, 0), bytes);
    step_close(s);
    cudasim::first_algorithm = 0;
    return bytes;
}

/* Given, they are taken, nobody is asked, and the context gives them again. */
static void test_choices(void) {
    static Step first, second;
    static char again[8192];
    choices_of(1, &first);
    step_open(&second, 0, choices);
    long asked = cudasim::count.heuristics;
    cudasim::count.algorithm = -1;
    step_run(&second, MIXP_F16, 1);
    CHECK_INT(cudasim::count.heuristics, asked);
    if (cudasim::simulated) CHECK_INT(cudasim::count.algorithm, 1);
    CHECK(!memcmp(first.grad, second.grad, sizeof first.grad));
    mixp_context_gemm_choices(second.ctx, again, sizeof again);
    CHECK(strstr(again, "use ") != NULL);
    CHECK_INT(strlen(again), strlen(choices));
    step_run(&second, MIXP_BF16, 1);            /* a dtype that they do not name */
    if (cudasim::simulated) CHECK(cudasim::count.heuristics > asked);
    step_close(&second);
}

static int refuses(const char *text) {
    const char *why = "";
    mixp_context *ctx = context_of(0, text, &why);
    int no = !ctx && strstr(why, "gemm_choices is") != NULL;
    mixp_context_free(ctx);
    return no;
}
static void refused_as(const char *text, const char *word) {
    const char *why = "";
    CHECK(!context_of(0, text, &why));
    CHECK_TEXT(why, word);
    CHECK_INT(cudasim::leaks(), 0);
}

/* Every cut of the text, and every word that is none, is refused, and nothing leaks. */
static void test_choices_cut(void) {
    static Step s;
    static char text[8192];
    size_t bytes = choices_of(0, &s) - 1;
    for (size_t n = 0; n < bytes; n += n < 100 ? 1 : 37) {
        memcpy(text, choices, n);
        text[n] = 0;
        CHECK(refuses(text));
    }
    refused_as("nothing of the kind\n", "gemm_choices is truncated, or is not a text");
    memcpy(text, choices, bytes + 1);
    *strstr(text, "use ") = 'x';
    refused_as(text, "gemm_choices is truncated");
    memcpy(text, choices, bytes + 1);
    strstr(text, "use ")[4] = 'g';              /* no digit */
    refused_as(text, "gemm_choices is truncated");
    memcpy(text, choices, bytes + 1);
    strcat(text, "more\n");
    refused_as(text, "gemm_choices is truncated");
}

/* The choices with the first word of their first plan replaced by `word`. */
static const char *with_word(const char *word) {
    static char text[8192];
    const char *from = strstr(choices, "use ") + 4, *rest = strchr(from, ' ');
    snprintf(text, sizeof text, "%.*s%s%s", (int)(from - choices), choices, word, rest);
    return text;
}

/* Only what is written is read: nothing else that strtoull takes for a number. */
static void test_choices_words(void) {
    static const char *const wrong[] = {
        "-1", "+8", "0x8", "0X8", "8A", " 8", "\t8", "8.", "", "00000000000000008",
        "10000000000000000", "-ffffffffffffff8", "8\n" };
    static const char *const right[] = { "8", "0008", "ffffffffffffffff", "0000000000000008" };
    static Step s;
    choices_of(0, &s);
    for (const char *word : wrong) CHECK(refuses(with_word(word)));
    for (const char *word : right) CHECK(!refuses(with_word(word)));
    CHECK_INT(cudasim::leaks(), 0);
}

/* Of another GPU, or another library. */
static void test_choices_elsewhere(void) {
    NEEDS_SIMULATION;
    static Step s;
    choices_of(0, &s);
    cudasim::library_version++;
    refused_as(choices, "from another GPU, or another version");
    cudasim::library_version--;
    cudasim::processors++;
    refused_as(choices, "from another GPU, or another version");
    cudasim::processors--;
    cudasim::capability_major++;
    refused_as(choices, "from another GPU, or another version");
    cudasim::capability_major--;
    step_open(&s, 0, choices);
    step_close(&s);
}

/* A product that the choices name; why: what the context says of it. */
static mixp_result first_product(Step *s, const char **why) {
    int64_t shape[2] = { ROWS, WIDTH };
    mixp_step_begin(s->ctx);
    MIXP_AUTOCAST(s->ctx, MIXP_F16)
        mixp_linear(s->ctx, mixp_input(s->ctx, MIXP_F32, 2, shape, s->x), s->w[0], s->w[1]);
    return mixp_context_error(s->ctx, why);
}

/* An algorithm that the library does not take is an error, and not another algorithm. */
static void test_choices_refused(void) {
    NEEDS_SIMULATION;
    static Step s;
    const char *why = "";
    choices_of(0, &s);
    step_open(&s, 0, choices);
    cudasim::refused_products = 1;
    CHECK_INT(first_product(&s, &why), MIXP_ERR_DEVICE);
    CHECK(strstr(why, "gemm_choices") != NULL);
    mixp_context_clear_error(s.ctx);
    step_close(&s);
}

/* It fails in the check, before a product runs; once the check takes it, so does the context. */
static void checked_as(const char *text, const char *word, mixp_result code) {
    static Step s;
    const char *why = "";
    step_open(&s, 0, text);
    long ran = cudasim::count.products;
    CHECK_INT(first_product(&s, &why), code);
    if (!strstr(why, word)) CHECK_TEXT(why, word);
    CHECK_INT(cudasim::count.products - ran, code == MIXP_OK);
    mixp_context_clear_error(s.ctx);
    cudasim::check_says = CUBLAS_STATUS_SUCCESS;
    cudasim::check_wants = 0;
    step_close(&s);
}

/* What was saved is looked at by cuBLASLt before it is used: once a plan. */
static void test_choices_checked(void) {
    NEEDS_SIMULATION;
    static Step s;
    static char text[8192];
    choices_of(0, &s);
    long before = cudasim::count.checks;
    checked_as(choices, "", MIXP_OK);
    CHECK_INT(cudasim::count.checks - before, 1);
    for (cublasStatus_t e : { CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_INVALID_VALUE,
                              CUBLAS_STATUS_ARCH_MISMATCH }) {
        cudasim::check_says = e;
        checked_as(choices, "gemm_choices", MIXP_ERR_DEVICE);
    }
    cudasim::check_says = CUBLAS_STATUS_ALLOC_FAILED;
    checked_as(choices, "out of memory", MIXP_ERR_MEMORY);
    cudasim::check_wants = 64u << 20;
    checked_as(choices, "gemm_choices", MIXP_ERR_DEVICE);
    /* every algorithm another one, that cuBLASLt has not: 51, 52 and 53 are the simulated ones */
    strcpy(text, choices);
    for (char *at = strstr(text, " 51 "); at; at = strstr(at, " 51 ")) memcpy(at, " 77 ", 4);
    checked_as(text, "gemm_choices", MIXP_ERR_DEVICE);
}

/* --- measuring ---------------------------------------------------------------------------- */

/* What the simulated GPU takes, in ms that its events count: so much that no noise decides. */
static void takes(double first, double second, double third, double joined, double kernel) {
    cudasim::algorithm_ms[0] = first;
    cudasim::algorithm_ms[1] = second;
    cudasim::algorithm_ms[2] = third;
    cudasim::joined_ms = joined;
    cudasim::kernel_ms = kernel;
}

/* The algorithm of a measuring context's newest product; it saves its choices. */
static int measured_algorithm(Step *s, int epilogues) {
    measuring = 1;
    step_open(s, epilogues, NULL);
    measuring = 0;
    step_run(s, MIXP_BF16, 1);
    CHECK(mixp_context_gemm_choices(s->ctx, choices, sizeof choices) < sizeof choices);
    return cudasim::count.algorithm;
}

/* The quickest of those that are offered, once for each shape; 1 % is noise. */
static void test_measured(void) {
    NEEDS_SIMULATION;
    static Step s;
    takes(5e3, 1e3, 9e3, 0, 0);
    CHECK_INT(measured_algorithm(&s, 0), 1);
    long ran = cudasim::count.products, asked = cudasim::count.heuristics;
    step_run(&s, MIXP_BF16, 1);
    CHECK_INT(cudasim::count.products - ran, 6);        /* two layers, three products each */
    CHECK_INT(cudasim::count.heuristics, asked);
    CHECK_INT(mixp_context_gemm_count(s.ctx).direct, 12);       /* trials are not counted */
    step_close(&s);
    takes(5e3, 9e3, 1e3, 0, 0);
    CHECK_INT(measured_algorithm(&s, 0), 2);
    step_close(&s);
    takes(5e3, 4.95e3, 9e3, 0, 0);
    CHECK_INT(measured_algorithm(&s, 0), 0);
    step_close(&s);
    takes(5e3, 1e3, 9e3, 0, 0);
    cudasim::refused_products = 1;                      /* the first trial: the next go on */
    CHECK_INT(measured_algorithm(&s, 0), 1);
    step_close(&s);
    step_open(&s, 0, NULL);                             /* nobody asks for it */
    step_run(&s, MIXP_BF16, 1);
    CHECK_INT(cudasim::count.algorithm, 0);
    step_close(&s);
    takes(0, 0, 0, 0, 0);
}

/* What was measured is given to another context: the same algorithms, the same bits, no trial. */
static void test_measured_and_given(void) {
    NEEDS_SIMULATION;
    static Step first, second;
    takes(5e3, 1e3, 9e3, 0, 0);
    measured_algorithm(&first, 0);
    step_close(&first);
    takes(1, 5e3, 9e3, 0, 0);                           /* now another would be */
    measuring = 1;
    step_open(&second, 0, choices);
    measuring = 0;
    long ran = cudasim::count.products;
    step_run(&second, MIXP_BF16, 1);
    CHECK_INT(cudasim::count.products - ran, 6);
    CHECK_INT(cudasim::count.algorithm, 1);
    CHECK(!memcmp(first.grad, second.grad, sizeof first.grad));
    step_close(&second);
    takes(0, 0, 0, 0, 0);
}

/* Sums and GELU: in the product's pass where that is quicker, else apart, and the text says so. */
static void test_measured_epilogues(void) {
    NEEDS_SIMULATION;
    static Step s, again;
    const int all = MIXP_EPILOGUES_BIAS | MIXP_EPILOGUES_GELU;
    takes(10, 20, 30, 5e3, 0);
    measured_algorithm(&s, all);
    CHECK(strstr(choices, "none ") != NULL);
    step_close(&s);
    takes(10, 20, 30, 0, 0);
    step_open(&again, all, choices);
    long joined = cudasim::count.joined;
    step_run(&again, MIXP_BF16, 1);
    CHECK_INT(cudasim::count.joined, joined);
    CHECK(!memcmp(s.grad, again.grad, sizeof s.grad));
    step_close(&again);
    takes(10, 20, 30, 0, 5e3);
    measured_algorithm(&s, all);
    CHECK(strstr(choices, "none ") == NULL);
    joined = cudasim::count.joined;
    step_run(&s, MIXP_BF16, 1);
    CHECK_INT(cudasim::count.joined - joined, 2);       /* GELU and its slope: sums add now */
    step_close(&s);
    takes(0, 0, 0, 0, 0);
}

/* Trials leave results alone, those that are added to as well. */
static void measured_values_body(void) {
    gpu_device->detach(&gpu_exec);
    gpu_exec.gemm_measure = 1;
    CHECK_INT(gpu_device->attach(&gpu_exec), MIXP_OK);
    for (int i = 0; i < 6; i++) {
        Job t = job_of((mixp_epilogue)(i % 3), dtypes[1 + i % 2], i % 3 ? dtypes[1 + i % 2] : MIXP_F32);
        t.accumulate = i % 3 == 0 && i % 2;
        t.bias = t.kind == MIXP_EPILOGUE_GELU && i % 2 == 0;
        Arrays o = arrays_of(t);
        CHECK_INT(gpu_kernels->gemm_epilogue(&gpu_exec, on_gpu_side(o, t)), MIXP_OK);
        check_arrays(o, t);
        finish_arrays(o);
    }
}
static void test_measured_values(void) {
    takes(5e3, 1e3, 9e3, 0, 100);
    in_all_schedules(measured_values_body);
    takes(5e3, 1e3, 9e3, 9e3, 0);
    in_all_schedules(measured_values_body);
    takes(0, 0, 0, 0, 0);
}

/* Without memory for trials of a product that adds to its result, the first algorithm stays. */
static void unmeasured_body(void) {
    gpu_device->detach(&gpu_exec);
    gpu_exec.gemm_measure = 1;
    CHECK_INT(gpu_device->attach(&gpu_exec), MIXP_OK);
    for (int i = 0; i < 2; i++) {
        Job t = job_of(MIXP_EPILOGUE_ROW_SUMS, MIXP_BF16, MIXP_F32);
        t.m += 8 * i;
        t.accumulate = 1;
        Arrays o = arrays_of(t);
        long ran = cudasim::count.products;
        mixp_result r = MIXP_ERR_MEMORY;
        for (int at = 1; r == MIXP_ERR_MEMORY && at < 20; at++) {   /* the plan's, then that one */
            cudasim::fail_at = i ? at : 0;
            r = gpu_kernels->gemm_epilogue(&gpu_exec, on_gpu_side(o, t));
            CHECK_INT(cudasim::fail_at, 0);
        }
        CHECK_INT(r, MIXP_OK);
        CHECK_INT(cudaPeekAtLastError(), cudaSuccess);
        CHECK_INT(cudasim::count.algorithm, !i);
        if (i) CHECK_INT(cudasim::count.products - ran, 1);
        check_arrays(o, t);
        finish_arrays(o);
    }
}
static void test_unmeasured(void) {
    NEEDS_SIMULATION;
    takes(5e3, 1e3, 9e3, 0, 1e3);
    in_all_schedules(unmeasured_body);
    takes(0, 0, 0, 0, 0);
}

/* A captured step measures nothing: a step before it has. */
static void test_measured_and_captured(void) {
    static Step s;
    takes(5e3, 1e3, 9e3, 0, 0);
    measured_algorithm(&s, 0);
    CHECK_INT(mixp_capture_begin(s.ctx), MIXP_OK);
    mixp_tensor *y = NULL;
    step_once(&s, MIXP_BF16, &y);
    mixp_graph *graph = mixp_capture_end(s.ctx);
    CHECK(graph != NULL);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    step_close(&s);
    takes(0, 0, 0, 0, 0);
}

int main(void) {
    RUN(test_sums);
    RUN(test_sums_rounded_first);
    RUN(test_sums_apart);
    RUN(test_in_place);
    RUN(test_gelu);
    RUN(test_gelu_rough);
    RUN(test_which_gelu);
    RUN(test_taken_back);
    RUN(test_no_columns);
    RUN(test_misused);
    RUN(test_step);
    RUN(test_step_misfit);
    RUN(test_choices);
    RUN(test_choices_cut);
    RUN(test_choices_words);
    RUN(test_choices_elsewhere);
    RUN(test_choices_refused);
    RUN(test_choices_checked);
    RUN(test_measured);
    RUN(test_measured_and_given);
    RUN(test_measured_epilogues);
    RUN(test_measured_values);
    RUN(test_unmeasured);
    RUN(test_measured_and_captured);
    return test_report();
}
