/* test_states.c - compact optimizer states, RMSprop, Lion and cautious decay. Codes are compared
 * with separately written formulas, runs with double loops, on every instruction set. Also: what
 * fails without stochastic rounding and without the floor; checkpoints; errors.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "args.h"
#include "test.h"
#include "numbers.h"
#include <unistd.h>

/* --- codes ------------------------------------------------------------------------------------ */

/* f8_e4m3 times a power of two, from its definition. */
static double m_value(uint32_t code, uint32_t scale) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double x = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return ldexp(code & 128 ? -x : x, (int)scale - 127);
}
/* The root of a second moment: 16 codes to the octave, those from 240 on in the scale's own. */
static double root_value(uint32_t code, uint32_t scale) {
    return code ? ldexp(16 + (code & 15), (int)(code >> 4) - 15 - 4 + (int)scale - 127) : 0.0;
}

static uint32_t bits_of(double x) { return f32_bits((float)x); }

/* Over all random numbers, x becomes the two neighbours `lower` and `upper` of its format, upper as
 * often as is its share. */
static double share(double x, double lower, double upper)
{ return upper > lower ? (x - lower) / (upper - lower) : 0.0; }

static void test_codes_of_m(void) {
    for (uint32_t code = 0; code < 256; code++) {
        if ((code & 127) == 127) continue;
        for (uint32_t scale = 1; scale < 247; scale += 41)
            CHECK(mixpi_state_m_value(code, scale) == (float)m_value(code, scale));
    }
    for (int k = 0; k < 400; k++) {
        double x = ldexp(random_value(), random_to(20) - 12), up = 0, lower, upper;
        uint32_t at = mixpi_state_m((float)x, 127, 0);
        x = (double)(float)x;
        if (fabs(x) >= 128 || fabs(x) < 1.0 / 64) continue;
        lower = m_value(at, 127);
        upper = m_value(at + 1, 127);
        CHECK(fabs(lower) <= fabs(x) && fabs(x) < fabs(upper));
        for (int random = 0; random < 65536; random += 16) {
            uint32_t got = mixpi_state_m((float)x, 127, (uint32_t)random);
            CHECK(got == at || got == at + 1);
            up += got == at + 1;
        }
        CHECK_NEAR(up / 4096, share(fabs(x), fabs(lower), fabs(upper)), 1.0 / 2048);
    }
    for (int k = -16; k <= 16; k++)         /* subnormals: to nearest, ties to even */
        for (int random = 0; random < 65536; random += 65535) {
            double x = k / 4.0, near = nearbyint(x);
            if (fabs(near) > 4) continue;
            CHECK(m_value(mixpi_state_m((float)ldexp(x, -9), 127, (uint32_t)random), 127) ==
                  ldexp(near, -9));
        }
    CHECK_INT(mixpi_state_m(bits_f32(0x7FC00000u), 127, 9) & 127, 127);
    CHECK_INT(mixpi_state_m(bits_f32(0x7F800000u), 127, 9) & 127, 127);
    CHECK(mixpi_state_m_value(127, 100) != mixpi_state_m_value(127, 100));
}

/* The largest of a block becomes 128 to 256, whatever it is. */
static void test_scales(void) {
    for (int e = -126; e < 128; e++) {
        float x = (float)ldexp(1.9999, e);
        uint32_t m = mixpi_state_scale_m(f32_bits(x)), v = mixpi_state_scale_v(f32_bits(x));
        double y = ldexp((double)x, 127 - (int)m);
        CHECK(m >= 1 && m <= 254 && y < 256 && (y >= 128 || m == 1));
        CHECK(mixpi_state_m(x, m, 65535) <= 0x78);
        CHECK(mixpi_state_v(x, v, 65535) <= 254);
        x = (float)ldexp(1.0, e);
        CHECK(mixpi_state_v(x, mixpi_state_scale_v(f32_bits(x)), 0) == 240 || e < -112);
    }
    CHECK(mixpi_state_scale_m(0) == 1 && mixpi_state_scale_v(0) == 15);
}

static void test_codes_of_v(void) {
    const double infinite = (double)bits_f32(0x7F800000u);
    for (uint32_t code = 0; code < 255; code++)
        for (uint32_t scale = 30; scale < 180; scale += 31) {
            float root = (float)root_value(code, scale);
            CHECK(mixpi_state_v_value(code, scale) == root * root);
            CHECK_INT(mixpi_state_v(root, scale, 0), code);
        }
    for (int k = 0; k < 400; k++) {
        double x = (double)(float)ldexp(1.0 + random_value() * 0.4, -random_to(13)), up = 0;
        uint32_t at = mixpi_state_v((float)x, 128, 0);
        double lower = root_value(at, 128), upper = root_value(at + 1, 128);
        CHECK(lower <= x && x < upper);
        for (int random = 0; random < 65536; random += 16)
            up += mixpi_state_v((float)x, 128, (uint32_t)random) == at + 1;
        CHECK_NEAR(up / 4096, share(x, lower, upper), 1.0 / 2048);
    }
    CHECK_INT(mixpi_state_v(1e-20f, 127, 0), 1);         /* never 0, */
    CHECK_INT(mixpi_state_v(0.0f, 127, 65535), 0);       /* unless it is */
    CHECK_INT(mixpi_state_v(bits_f32(0xFFC00000u), 127, 0), 255);
    CHECK((double)mixpi_state_v_value(255, 127) == infinite);
}

static void test_codes_of_bf16(void) {
    for (int k = 0; k < 300; k++) {
        float x = (float)ldexp(random_value(), random_to(200) - 100);
        uint32_t at = f32_bits(x) >> 16;
        double lower = bits_f32(at << 16), upper = bits_f32((at + 1) << 16), up = 0;
        for (int random = 0; random < 65536; random += 16)
            up += mixpi_state_bf16(x, (uint32_t)random) == at + 1;
        CHECK_NEAR(up / 4096, share(fabs((double)x), fabs(lower), fabs(upper)), 1.0 / 2048);
    }
    CHECK_INT(mixpi_state_bf16(bits_f32(0x7FFFFFFFu), 65535), 0x7FFF);
    CHECK_INT(mixpi_state_bf16(bits_f32(0x7F800001u), 65535), 0x7FC0);
    CHECK_INT(mixpi_state_bf16(bits_f32(0xFF800000u), 65535), 0xFF80);
}

/* Every exponent, every tail of 16 bits, a few of what is between. */
static void test_masters_of_16_bits(void) {
    uint32_t high, low, bad = 0;
    for (high = 0; high < 65536; high += 13)
        for (low = 0; low < 65536; low += low < 32700 || low > 32800 ? 97 : 1) {
            uint32_t u = high << 16 | low, a = u & 0x7FFFFFFFu;
            mixpi_master_parts parts = mixpi_master_to_16(bits_f32(u));
            uint32_t back = f32_bits(mixpi_master_from_16(parts.weight, parts.rest));
            if (a > 0x7F800000u)
                bad += (parts.weight & 0x7FFF) <= 0x7F80 || (back & 0x7FFFFFFFu) <= 0x7F800000u;
            else bad += back != u || parts.weight != high + (low >= 0x8000) || parts.rest > 0xFFFF;
        }
    CHECK_INT(bad, 0);
    CHECK_INT(mixpi_master_to_16(bits_f32(0x7FFFFFFFu)).weight & 0x7FFF, 0x7FFF);    /* not -0 */
}

static void test_masters_of_8_bits(void) {
    for (int k = 0; k < 3000; k++) {
        uint32_t u = random_bits(), kept = u >> 8;
        int ups = 0;
        if ((u & 0x7FFFFFFFu) > 0x7F700000u) continue;
        for (int random = 0; random < 256; random++) {
            mixpi_master_parts parts = mixpi_master_to_8(bits_f32(u), (uint32_t)random);
            uint32_t back = f32_bits(mixpi_master_from_8(parts.weight, parts.rest));
            uint32_t nearest = (back + 0x8000u) >> 16;
            CHECK(back == kept << 8 || back == (kept + 1) << 8);
            CHECK(parts.weight == nearest && parts.rest < 256);
            ups += back != kept << 8;
        }
        CHECK_INT(ups, u & 255);
    }
    CHECK((mixpi_master_to_8(bits_f32(0x7FFFFFFFu), 255).weight & 0x7FFF) > 0x7F80);
    CHECK_INT(mixpi_master_to_8(bits_f32(0xFF800000u), 255).weight, 0xFF80);
}

/* --- a parameter as kernels see it -------------------------------------------------------- */

enum { N = 5000, BLOCKS = (N + MIXP_STATE_BLOCK - 1) / MIXP_STATE_BLOCK };

typedef struct row_memory {
    float    grad[N], m[N], v[N], master[N], wide[N];
    uint16_t weight[N], rest[N];
    uint8_t  m_scale[BLOCKS], v_scale[BLOCKS];
} row_memory;

typedef struct run {
    const mixp_device *device;
    mixp_step_plan     plan;
    mixp_step_state    step;
    mixp_param_row     row;
    row_memory        *memory;
} run;

static mixp_result loop(void *user, size_t bytes, void **memory) {
    void **held = (void **)user;
    free(*held);
    *memory = *held = malloc(bytes);
    return MIXP_OK;
}
static void *scratch(void *user, size_t bytes) {
    void *p = NULL;
    loop(user, bytes, &p);
    return p;
}

/* kinds as of mixp_optimizer_states; the weight is bf16, or f32 with MIXP_MASTER_F32 + 3. */
enum { F32_WEIGHT = 3 };
static run run_of(const mixp_device *device, mixp_optimizer_kind kind, int m, int v, int master,
                  row_memory *memory) {
    static const mixp_dtype m_dtypes[3] = { MIXP_F32, MIXP_BF16, MIXP_F8_E4M3 };
    static const mixp_dtype v_dtypes[3] = { MIXP_F32, MIXP_BF16, MIXP_U8 };
    static const mixp_dtype masters[4] = { MIXP_F32, MIXP_BF16, MIXP_U8, MIXP_F32 };
    mixp_param_group *g;
    run r;
    memset(&r, 0, sizeof r);
    memset(memory, 0, sizeof *memory);
    r.device = device;
    r.memory = memory;
    r.plan.kind = kind;
    r.plan.n_groups = 1;
    r.plan.seed = 5;
    g = &r.plan.groups[0];
    g->lr = 1e-3; g->beta1 = 0.9; g->beta2 = 0.999; g->eps = 1e-8;
    r.row.grad = memory->grad;
    r.row.m = memory->m;
    r.row.v = memory->v;
    r.row.m_dtype = m_dtypes[m];
    r.row.v_dtype = v_dtypes[v];
    if (m == MIXP_MOMENT_8BIT) r.row.m_scale = memory->m_scale;
    if (v == MIXP_MOMENT_8BIT) r.row.v_scale = memory->v_scale;
    r.row.master_dtype = masters[master];
    r.row.master = master == MIXP_MASTER_F32 ? (void *)memory->master : (void *)memory->rest;
    r.row.weight = memory->weight;
    r.row.weight_dtype = MIXP_BF16;
    if (master == F32_WEIGHT) {
        r.row.weight = memory->wide;
        r.row.weight_dtype = MIXP_F32;
        r.row.master = NULL;
    }
    r.row.count = N;
    r.row.active = 1;
    r.row.tensor = 3;
    return r;
}

static void set_weight(run *r, int i, float x) {
    mixpi_master_parts parts = mixpi_master_to_16(x);
    r->memory->wide[i] = r->memory->master[i] = x;
    r->memory->weight[i] = (uint16_t)parts.weight;
    r->memory->rest[i] = (uint16_t)parts.rest;
    if (r->row.master_dtype == MIXP_U8) ((uint8_t *)r->memory->rest)[i] = 0;
}
static float weight_of(const run *r, int i) {
    const row_memory *m = r->memory;
    if (!r->row.master) return m->wide[i];
    if (r->row.master_dtype == MIXP_F32) return m->master[i];
    if (r->row.master_dtype == MIXP_BF16) return mixpi_master_from_16(m->weight[i], m->rest[i]);
    return mixpi_master_from_8(m->weight[i], ((const uint8_t *)m->rest)[i]);
}

static void step_of(run *r) {
    static void *held;
    mixp_exec x;
    memset(&x, 0, sizeof x);
    x.threads = 1;
    x.user = &held;
    x.scratch = scratch;
    CHECK_INT(r->device->kernels->prepare(&x, args_prepare(&r->plan, &r->step, NULL)), MIXP_OK);
    CHECK_INT(r->device->kernels->update(&x, args_update(&r->plan, &r->row, 1, &r->step)), MIXP_OK);
}

#define EACH_CPU(isa, cpu)                                                                \
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++)                                            \
        if ((cpu = mixp_cpu_with((mixp_isa)isa)) != NULL)

/* --- optimizers against double loops ------------------------------------------------------- */

typedef struct reference { double p, m, v; } reference;

static double sign_of(double x) { return x > 0 ? 1 : x < 0 ? -1 : 0; }
static double decayed(const mixp_step_plan *plan, double p, double update) {
    const mixp_param_group *g = &plan->groups[0];
    return plan->cautious && update * p < 0 ? p : p - g->lr * g->weight_decay * p;
}

/* torch.optim.AdamW. */
static void adamw_reference(reference *r, double grad, const mixp_step_plan *plan, int t) {
    const mixp_param_group *g = &plan->groups[0];
    r->m = g->beta1 * r->m + (1 - g->beta1) * grad;
    r->v = g->beta2 * r->v + (1 - g->beta2) * grad * grad;
    double update = r->m / (1 - pow(g->beta1, t)) / (sqrt(r->v / (1 - pow(g->beta2, t))) + g->eps);
    r->p = decayed(plan, r->p, update) - g->lr * update;
}
/* torch.optim.RMSprop. */
static void rmsprop_reference(reference *r, double grad, const mixp_step_plan *plan, int t) {
    const mixp_param_group *g = &plan->groups[0];
    (void)t;
    grad += g->weight_decay * r->p;
    r->v = g->beta2 * r->v + (1 - g->beta2) * grad * grad;
    double update = grad / (sqrt(r->v) + g->eps);
    r->m = g->momentum * r->m + update;
    r->p -= g->lr * (g->momentum > 0 ? r->m : update);
}
/* The paper's Lion. */
static void lion_reference(reference *r, double grad, const mixp_step_plan *plan, int t) {
    const mixp_param_group *g = &plan->groups[0];
    double blend = g->beta1 * r->m + (1 - g->beta1) * grad;
    (void)t;
    r->p = decayed(plan, r->p, blend) - g->lr * sign_of(blend);
    r->m = g->beta2 * r->m + (1 - g->beta2) * grad;
}
typedef void (*reference_step)(reference *, double, const mixp_step_plan *, int);

/* The largest distance of the weights from the reference, in learning rates. */
static double distance(run *r, reference_step reference_of, int steps) {
    static reference ref[N];
    double most = 0, lr = r->plan.groups[0].lr;
    random_state = 17;
    memset(ref, 0, sizeof ref);
    for (int i = 0; i < N; i++) {
        set_weight(r, i, (float)random_value());
        ref[i].p = (double)weight_of(r, i);
        if (r->row.master_dtype == MIXP_U8) ref[i].p = (double)weight_of(r, i);
    }
    for (int t = 1; t <= steps; t++) {
        for (int i = 0; i < N; i++) {
            float g = (float)(random_value() * (1 + i % 3) * (i % 7 ? 1.0 : 1e-3));
            r->memory->grad[i] = g;
            reference_of(&ref[i], (double)g, &r->plan, t);
        }
        step_of(r);
    }
    for (int i = 0; i < N; i++) {
        double d = fabs((double)weight_of(r, i) - ref[i].p) / lr;
        if (!(d <= most)) most = d;
    }
    return most;
}

static row_memory memory, other;

static void test_rmsprop(void) {
    const mixp_device *cpu;
    int isa, momentum;
    EACH_CPU(isa, cpu) for (momentum = 0; momentum < 2; momentum++) {
        run r = run_of(cpu, MIXP_OPTIMIZER_RMSPROP, 0, 0, F32_WEIGHT, &memory);
        r.plan.groups[0].beta2 = 0.99;
        r.plan.groups[0].weight_decay = 0.1;
        r.plan.groups[0].momentum = momentum * 0.9;
        if (!momentum) r.row.m = NULL;
        CHECK_NEAR(distance(&r, rmsprop_reference, 40), 0, 2e-2);
    }
}

static void test_lion(void) {
    const mixp_device *cpu;
    int isa, cautious;
    EACH_CPU(isa, cpu) for (cautious = 0; cautious < 2; cautious++) {
        run r = run_of(cpu, MIXP_OPTIMIZER_LION, 0, 0, F32_WEIGHT, &memory);
        r.plan.groups[0].beta2 = 0.99;
        r.plan.groups[0].weight_decay = 1.0;
        r.plan.cautious = cautious;
        r.row.v = NULL;
        CHECK_NEAR(distance(&r, lion_reference, 40), 0, 2e-2);
    }
}

/* A blend of 0 moves nothing; NaN makes the weight NaN, as the sign of NaN is in PyTorch. */
static void test_lion_signs(void) {
    const mixp_device *cpu;
    int isa, i;
    EACH_CPU(isa, cpu) {
        run r = run_of(cpu, MIXP_OPTIMIZER_LION, 0, 0, F32_WEIGHT, &memory);
        for (i = 0; i < N; i++) set_weight(&r, i, 1.0f);
        memory.grad[7] = bits_f32(0x7FC00000u);
        memory.grad[8] = -1e-30f;
        step_of(&r);
        CHECK(memory.wide[6] == 1.0f);
        CHECK(memory.wide[7] != memory.wide[7]);
        CHECK(memory.wide[8] > 1.0009f);
    }
}

static void test_cautious(void) {
    const mixp_device *cpu;
    int isa, i;
    EACH_CPU(isa, cpu) {
        run r = run_of(cpu, MIXP_OPTIMIZER_ADAMW, 0, 0, F32_WEIGHT, &memory);
        r.plan.groups[0].weight_decay = 0.5;
        r.plan.cautious = 1;
        CHECK_NEAR(distance(&r, adamw_reference, 40), 0, 2e-2);
        r = run_of(cpu, MIXP_OPTIMIZER_ADAMW, 0, 0, F32_WEIGHT, &memory);
        r.plan.groups[0].weight_decay = 0.5;
        r.plan.cautious = 1;
        for (i = 0; i < N; i++) {       /* signs alike: towards 0, so it decays */
            set_weight(&r, i, i % 2 ? 2.0f : -2.0f);
            memory.grad[i] = i % 4 < 2 ? 1.0f : -1.0f;
        }
        step_of(&r);
        for (i = 0; i < 8; i++) {
            double w = i % 2 ? 2 : -2, update = i % 4 < 2 ? 1 : -1;
            w -= w * update > 0 ? 1e-3 * 0.5 * w : 0;
            CHECK_NEAR(memory.wide[i], w - 1e-3 * update, 1e-6);
        }
    }
}

/* --- kinds ---------------------------------------------------------------------------------- */

/* How far 60 steps of AdamW may stray from exact ones, in learning rates. */
static void test_kinds_follow(void) {
    static const double bound_m[3] = { 2e-2, 1.0, 9.0 }, bound_master[4] = { 0, 0, 1.5, 0 };
    const mixp_device *cpu;
    int isa, m, v, master;
    EACH_CPU(isa, cpu)
    for (m = 0; m < 3; m++) for (v = 0; v < 3; v++) for (master = 0; master < 4; master++) {
        run r = run_of(cpu, MIXP_OPTIMIZER_ADAMW, m, v, master, &memory);
        double bound = bound_m[m > v ? m : v] + bound_master[master];
        if (isa && (m + v + master) % 2) continue;
        r.plan.groups[0].weight_decay = 0.01;
        CHECK_NEAR(distance(&r, adamw_reference, 60), 0, bound);
    }
}

/* Element i, if it is a NaN, without its sign: of two NaNs musl's fmaf hands on the sum's, a
 * processor the first. */
static void forget_nan_sign(void *array, mixp_dtype dtype, int i) {
    uint32_t *wide = (uint32_t *)array + i;
    uint16_t *low = (uint16_t *)array + i;
    uint8_t *code = (uint8_t *)array + i;
    if (dtype == MIXP_F32 && (*wide & 0x7FFFFFFFu) > 0x7F800000u) *wide &= 0x7FFFFFFFu;
    if (dtype == MIXP_BF16 && (*low & 0x7FFFu) > 0x7F80u) *low &= 0x7FFFu;
    if (dtype == MIXP_F8_E4M3 && (*code & 0x7Fu) == 0x7Fu) *code &= 0x7Fu;
}
static void forget_nan_signs(run *r, int i) {
    forget_nan_sign(r->row.m, r->row.m_dtype, i);
    forget_nan_sign(r->row.v, r->row.v_dtype, i);
    forget_nan_sign(r->row.weight, r->row.weight_dtype, i);
    if (r->row.master_dtype == MIXP_F32) forget_nan_sign(r->memory->master, MIXP_F32, i);
}

/* Every instruction set gives the same bytes, for whole blocks, tails and every kind. */
static void test_same_bytes(void) {
    static row_memory first;
    const mixp_device *cpu;
    int isa, kind, m, v, master, n, i, t;
    for (kind = 0; kind <= MIXP_OPTIMIZER_LION; kind++)
    for (m = 0; m < 3; m++) for (v = 0; v < 3; v++) {
        int have = 0;
        master = (m + v) % 3;
        n = (m + 2 * v) % 3 == 0 ? N : 1000 + 37 * (m + 3 * v + 9 * kind);
        EACH_CPU(isa, cpu) {
            run r = run_of(cpu, (mixp_optimizer_kind)kind, m, v, master, &memory);
            r.row.count = n;
            r.plan.groups[0].momentum = 0.9;
            r.plan.groups[0].weight_decay = 0.1;
            r.plan.cautious = kind % 2;
            random_state = 3;
            for (i = 0; i < N; i++) set_weight(&r, i, (float)random_value());
            for (t = 0; t < 3; t++) {
                for (i = 0; i < N; i++)
                    memory.grad[i] = (float)ldexp(random_value(), random_to(60) - 40);
                memory.grad[200] = bits_f32(0x7F800000u);
                memory.grad[700] = bits_f32(0x7FC00000u);
                if (!t) memory.grad[300] = memory.grad[2300] = 1e30f;       /* v alone: Inf */
                step_of(&r);
            }
            forget_nan_signs(&r, 200);
            forget_nan_signs(&r, 700);
            if (have) CHECK(memcmp(&first, &memory, sizeof first) == 0);
            else first = memory;
            have = 1;
        }
    }
}

/* Counting lost updates takes another way through the kernel, to the same bytes. */
static void step_counted(run *r, mixp_lost *lost) {
    static void *held;
    mixp_update_args k = *args_update(&r->plan, &r->row, 1, &r->step);
    mixp_exec x;
    memset(&x, 0, sizeof x);
    x.threads = 1;
    x.user = &held;
    x.scratch = scratch;
    k.lost = lost;
    CHECK_INT(r->device->kernels->prepare(&x, args_prepare(&r->plan, &r->step, NULL)), MIXP_OK);
    CHECK_INT(r->device->kernels->update(&x, &k), MIXP_OK);
}
static void test_counting_changes_nothing(void) {
    const mixp_device *cpu;
    int isa, kind, i, t;
    EACH_CPU(isa, cpu)
    for (kind = 0; kind < 6; kind++) {
        const int moments = 1 + kind % 2, master = kind / 2 % 3 + (kind / 2 % 3 == 0 ? 3 : 0);
        mixp_lost lost = { 0, 0 };
        run a = run_of(cpu, MIXP_OPTIMIZER_ADAMW, moments, moments, master, &memory);
        run b = run_of(cpu, MIXP_OPTIMIZER_ADAMW, moments, moments, master, &other);
        a.row.count = b.row.count = 3 * 1024 + 256 * (kind % 4);
        for (i = 0; i < N; i++) {
            float x = (float)random_value();
            set_weight(&a, i, x);
            set_weight(&b, i, x);
        }
        for (t = 0; t < 3; t++) {
            for (i = 0; i < N; i++)
                memory.grad[i] = other.grad[i] = (float)ldexp(random_value(), random_to(60) - 40);
            step_of(&a);
            step_counted(&b, &lost);
        }
        CHECK(lost.updates > 0);
        CHECK(memcmp(&memory, &other, sizeof memory) == 0);
    }
}

/* The words that states round by: even in each byte, alike in no two places that stand near, be it
 * an element, a step, a tensor, 2^32 elements, or the halves that the two moments take. */
enum { WORDS = 1 << 16 };
static double evenness(const uint32_t *word, int shift) {      /* chi squared, 255 degrees */
    static double count[256];
    double sum = 0;
    memset(count, 0, sizeof count);
    for (int i = 0; i < WORDS; i++) count[word[i] >> shift & 255]++;
    for (int i = 0; i < 256; i++) sum += pow(count[i] - WORDS / 256.0, 2) / (WORDS / 256.0);
    return sum;
}
static double half(uint32_t word, int upper)
{ return ((word >> (upper ? 16 : 0) & 0xFFFFu) - 32767.5) / 32768.0 * sqrt(3.0); }
static double likeness(const uint32_t *a, const uint32_t *b, int upper_a, int upper_b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += half(a[i], upper_a) * half(b[i], upper_b);
    return fabs(sum) / sqrt(n);         /* in deviations */
}
static void words_of(uint32_t *word, uint64_t seed, int64_t step, uint64_t tensor, uint64_t first) {
    const uint64_t key = mixpi_state_key(seed, step, tensor);
    for (int i = 0; i < WORDS; i++) word[i] = mixpi_state_random(key, first + (uint64_t)i);
}
static void test_random_words(void) {
    static uint32_t a[WORDS], b[WORDS];
    uint32_t one = 0;
    int k, shift, ua, ub;
    for (k = 0; k < 8; k++) {
        words_of(a, 5, k, 3, (uint64_t)k << 30);
        for (shift = 0; shift < 32; shift += 8) CHECK(fabs(evenness(a, shift) - 255) < 5 * 22.6);
        for (shift = 1; shift <= 4096; shift *= 2)
            for (ua = 0; ua < 2; ua++) for (ub = 0; ub < 2; ub++)
                CHECK(likeness(a, a + shift, ua, ub, WORDS - shift) < 5);
        CHECK(likeness(a, a, 0, 1, WORDS) < 5);
        words_of(b, 5, k + 1, 3, (uint64_t)k << 30);
        for (ua = 0; ua < 2; ua++) CHECK(likeness(a, b, ua, ua, WORDS) < 5);
        words_of(b, 5, k, 4, (uint64_t)k << 30);
        for (ua = 0; ua < 2; ua++) CHECK(likeness(a, b, ua, ua, WORDS) < 5);
        words_of(b, 5, k, 3, ((uint64_t)k << 30) + ((uint64_t)1 << 32));
        for (ua = 0; ua < 2; ua++) CHECK(likeness(a, b, ua, ua, WORDS) < 5);
    }
    for (k = 0; k < WORDS; k++) one |= a[k] ^ b[k];
    CHECK(one == 0xFFFFFFFFu);
}

/* A master of 16 bits is the f32 master, to the bit. */
static void test_16_bits_are_f32(void) {
    run a = run_of(mixp_cpu(), MIXP_OPTIMIZER_ADAMW, 0, 0, MIXP_MASTER_F32, &memory);
    run b = run_of(mixp_cpu(), MIXP_OPTIMIZER_ADAMW, 0, 0, MIXP_MASTER_16BIT, &other);
    for (int i = 0; i < N; i++) {
        float x = (float)ldexp(random_value(), random_to(30) - 20);
        set_weight(&a, i, x);
        set_weight(&b, i, x);
    }
    for (int t = 0; t < 50; t++) {
        for (int i = 0; i < N; i++) memory.grad[i] = other.grad[i] = (float)random_value();
        step_of(&a);
        step_of(&b);
    }
    for (int i = 0; i < N; i++) {
        CHECK(f32_bits(weight_of(&a, i)) == f32_bits(weight_of(&b, i)));
        if ((f32_bits(weight_of(&a, i)) & 0xFFFF) != 0x8000)
            CHECK_INT(memory.weight[i], other.weight[i]);
    }
}

/* Numbers differ with seed, step, tensor and element: moments of equal gradients differ. */
static void test_random_keys(void) {
    enum { SAME = 64 };
    static uint8_t seen[4][N];
    int k, i, j, different;
    for (k = 0; k < 4; k++) {
        run r = run_of(mixp_cpu(), MIXP_OPTIMIZER_ADAMW, 2, 2, F32_WEIGHT, &memory);
        if (k == 1) r.plan.seed = 6;
        if (k == 2) r.row.tensor = 4;
        if (k == 3) r.step.applied = 1;
        for (i = 0; i < N; i++) memory.grad[i] = 1.03f;
        memory.grad[N - 1] = 1.0f;
        step_of(&r);
        if (k == 3) r.plan.groups[0].beta1 = 0.9;
        memcpy(seen[k], memory.v, sizeof seen[k]);
    }
    for (k = 0; k < 4; k++) {
        for (different = 0, i = 1; i < N; i++) different += seen[k][i] != seen[k][0];
        CHECK(different > SAME);
        for (j = 0; j < k; j++) CHECK(memcmp(seen[k], seen[j], N) != 0);
    }
}

/* --- what fails otherwise ------------------------------------------------------------------- */

/* The second moment after gradients that shrink tenfold over 4000 steps, of the true one. */
static double v_left_over(float (*rounded)(float, uint32_t)) {
    double exact = 0, kept = 0, all = 0;
    random_state = 5;
    for (int i = 0; i < 200; i++) {
        float v = 0;
        exact = 0;
        for (int t = 0; t < 4000; t++) {
            float g = (float)(random_value() * pow(10, -t / 4000.0));
            exact = 0.999 * exact + 0.001 * (double)g * (double)g;
            v = rounded(0.999f * v + 0.001f * g * g, random_bits());
        }
        kept += (double)v;
        all += exact;
    }
    return kept / all;
}
static float to_nearest(float x, uint32_t random)
{ (void)random; return mixp_f32_from_bf16(mixp_bf16_from_f32(x)); }
static float at_random(float x, uint32_t random)
{ return bits_f32(mixpi_state_bf16(x, random >> 16) << 16); }

static void test_bf16_v_sticks_to_nearest(void) {
    double nearest = v_left_over(to_nearest), random = v_left_over(at_random);
    printf("  v after a tenfold decline, of the true one: %.2f to nearest, %.3f at random\n",
           nearest, random);
    CHECK(nearest > 4);
    CHECK_NEAR(random, 1, 0.05);
}

/* 10,000 updates of 1e-5 from 1.0: all, in f32. */
static void test_8_bit_masters_stagnate_to_nearest(void) {
    double sum = 0, squares = 0;
    float nearest = 1.0f;
    for (int i = 0; i < 200; i++) {
        float p = 1.0f;
        for (int t = 0; t < 10000; t++) {
            mixpi_master_parts parts = mixpi_master_to_8(p - 1e-5f, random_bits() >> 24);
            p = mixpi_master_from_8(parts.weight, parts.rest);
        }
        sum += (double)p / 200;
        squares += (double)p * (double)p / 200;
    }
    for (int t = 0; t < 10000; t++) {       /* half of the smallest step that counts is 3.8e-6 */
        uint32_t u = f32_bits(nearest - 3e-6f);
        nearest = bits_f32((u + 0x7Fu + (u >> 8 & 1u)) & 0xFFFFFF00u);
    }
    printf("  1.0 after 10000 updates of -1e-5: %.4f, deviation %.4f; of -3e-6 to nearest: %.4f\n",
           sum, sqrt(squares - sum * sum), (double)nearest);
    CHECK_NEAR(sum, 0.9, 5e-4);
    CHECK(sqrt(squares - sum * sum) < 1.5e-3);
    CHECK(nearest == 1.0f);
}

/* Adam's largest update of 300 steps with gradients whose sizes differ by e^2 within a block. */
static double largest_update(int floor) {
    static float m[128], v[128], size[128];
    double most = 0;
    random_state = 11;
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    for (int i = 0; i < 128; i++) size[i] = (float)exp(8 * random_value());
    for (int t = 1; t <= 300; t++) {
        uint32_t largest = 0, scale;
        float root[128];
        for (int i = 0; i < 128; i++) {
            float g = size[i] * (float)random_value();
            double update, bias = sqrt(1 - pow(0.999, t));
            m[i] = 0.9f * m[i] + 0.1f * g;
            v[i] = 0.999f * v[i] + 0.001f * g * g;
            update = (double)m[i] / (1 - pow(0.9, t)) / (sqrt((double)v[i]) / bias + 1e-8);
            if (fabs(update) > most) most = fabs(update);
            root[i] = sqrtf(v[i]);
            if (bits_of((double)root[i]) > largest) largest = bits_of((double)root[i]);
        }
        scale = mixpi_state_scale_v(largest);
        for (int i = 0; i < 128; i++) {
            uint32_t code = mixpi_state_v(root[i], scale, random_bits() >> 16);
            if (!floor && (double)root[i] < root_value(1, scale)) code = 0;
            v[i] = mixpi_state_v_value(code, scale);
        }
    }
    return most;
}

static void test_8_bit_v_explodes_without_its_floor(void) {
    double with = largest_update(1), without = largest_update(0);
    printf("  largest update of 8-bit v: %.2f with its floor, %.0f without\n", with, without);
    CHECK(with < 4);
    CHECK(without > 100);
}

/* --- bad gradients, skipped steps ------------------------------------------------------------ */

/* One NaN or Inf, unchecked: that weight and its moments are NaN, and nothing else differs. */
static void test_nan_stays_alone(void) {
    const mixp_device *cpu;
    int isa, master, i, t, k;
    EACH_CPU(isa, cpu) for (master = 0; master < 4; master++) {
        run r[2];
        row_memory *both[2] = { &memory, &other };
        const uint32_t bad = master % 2 ? 0x7F800000u : 0x7FFFFFFFu;
        for (k = 0; k < 2; k++) {
            r[k] = run_of(cpu, MIXP_OPTIMIZER_ADAMW, 2, 2, master, both[k]);
            random_state = 23;
            for (i = 0; i < N; i++) set_weight(&r[k], i, (float)random_value());
            for (t = 0; t < 4; t++) {
                for (i = 0; i < N; i++) both[k]->grad[i] = (float)random_value();
                both[k]->grad[300] = k && t == 1 ? bits_f32(bad) : 1e-9f;
                step_of(&r[k]);
            }
        }
        CHECK(weight_of(&r[1], 300) != weight_of(&r[1], 300));
        CHECK(master == F32_WEIGHT || (other.weight[300] & 0x7FFF) > 0x7F80);
        for (i = 0; i < N; i++)
            if (i != 300) CHECK(f32_bits(weight_of(&r[0], i)) == f32_bits(weight_of(&r[1], i)));
        CHECK(memcmp(memory.m_scale, other.m_scale, sizeof memory.m_scale) == 0);
        CHECK(memcmp(memory.v_scale, other.v_scale, sizeof memory.v_scale) == 0);
    }
}

static const char *error_of(const mixp_context *ctx) {
    const char *why = "";
    mixp_context_error(ctx, &why);
    return why;
}

/* --- in a context --------------------------------------------------------------------------- */

typedef struct model {
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *w, *norm, *table, *grads[3];
} model;

static const int64_t shape[2] = { 64, 100 };
static float numbers[6400];

static mixp_optimizer_states states_of(int m, int v, int master) {
    mixp_optimizer_states s;
    memset(&s, 0, sizeof s);
    s.m = (mixp_moment_kind)m;
    s.v = (mixp_moment_kind)v;
    s.master = (mixp_master_kind)master;
    return s;
}

static void fill(mixp_tensor *t, double scale) {
    for (int64_t i = 0; i < t->count; i++) numbers[i] = (float)(scale * random_value());
    CHECK_INT(mixp_write(t, numbers, MIXP_F32, t->count), MIXP_OK);
}

/* A matrix, a norm's scale, and a table in a group that keeps f32. */
static model model_of(mixp_optimizer_states states) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    mixp_param_group g;
    model m;
    random_state = 77;
    m.ctx = mixp_context_new(NULL);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    d.states = states;
    m.opt = mixp_optimizer_new(m.ctx, &d);
    m.w = mixp_param(m.ctx, "w", MIXP_BF16, 2, shape);
    m.norm = mixp_param(m.ctx, "norm", MIXP_BF16, 1, shape);
    m.table = mixp_param(m.ctx, "table", MIXP_BF16, 2, shape);
    m.grads[0] = mixp_param(m.ctx, "g0", MIXP_F32, 2, shape);
    m.grads[1] = mixp_param(m.ctx, "g1", MIXP_F32, 1, shape);
    m.grads[2] = mixp_param(m.ctx, "g2", MIXP_F32, 2, shape);
    fill(m.w, 1);
    fill(m.norm, 1);
    fill(m.table, 1);
    CHECK_INT(mixp_optimizer_add(m.opt, m.w, m.grads[0]), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(m.opt, m.norm, m.grads[1]), MIXP_OK);
    CHECK_INT(mixp_optimizer_group(m.opt, 0, &g), MIXP_OK);
    g.f32_states = 1;
    CHECK_INT(mixp_optimizer_add_group(m.opt, &g), 1);
    CHECK_INT(mixp_optimizer_add(m.opt, m.table, m.grads[2]), MIXP_OK);
    return m;
}

static void train(model *m, int steps, int overflow) {
    while (steps--) {
        for (int i = 0; i < 3; i++) fill(m->grads[i], 65536.0);
        CHECK(mixp_scaler_loss_scale(m->scaler) > 0.0f);    /* whoever multiplies by it asks */
        if (overflow) {
            numbers[9] = bits_f32(0x7F800000u);
            CHECK_INT(mixp_write(m->grads[2], numbers, MIXP_F32, 6400), MIXP_OK);
        }
        CHECK_INT(mixp_scaler_step(m->scaler, m->opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(m->scaler), MIXP_OK);
    }
}

/* Masters of 16 and 8 bits lose the further digits of a weight that is written: a warning, once a program writes it
 * before each of four steps, but not if it does so now and then, and not of f32 masters, also where only some are. */
static void test_masters_of_written_weights(void) {
    int kind, when;
    for (kind = MIXP_MASTER_F32; kind <= MIXP_MASTER_8BIT; kind++)
        for (when = 0; when < 3; when++) {          /* writes before: each step, each other step, each step but of f32 */
            model m = model_of(states_of(0, 0, kind));
            mixp_tensor *t = when == 2 ? m.table : m.w;
            for (int step = 0; step < 9; step++) {
                static float values[6400];
                CHECK_INT(mixp_read(t, values, MIXP_F32, t->count), MIXP_OK);
                if (when != 1 || step % 2) CHECK_INT(mixp_write(t, values, MIXP_F32, t->count), MIXP_OK);
                train(&m, 1, 0);
                if (kind == MIXP_MASTER_F32 || when || step < 3) CHECK(!*mixp_context_warning(m.ctx));
            }
            if (kind != MIXP_MASTER_F32 && !when) CHECK_TEXT(mixp_context_warning(m.ctx), "'w' is written before each step");
            CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
            mixp_context_free(m.ctx);
        }
}

static char path[64];
static mixp_checkpoint checkpoint_of(const model *m) {
    mixp_checkpoint c;
    memset(&c, 0, sizeof c);
    c.ctx = m->ctx;
    c.scaler = m->scaler;
    c.optimizers = &m->opt;
    c.n_optimizers = 1;
    sprintf(path, "/tmp/mixprec_states_%ld.safetensors", (long)getpid());
    return c;
}

static mixp_safetensors *saved(const model *m) {
    mixp_checkpoint c = checkpoint_of(m);
    mixp_safetensors *file = NULL;
    CHECK_INT(mixp_checkpoint_save(path, &c), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(path, &file, NULL, 0), MIXP_OK);
    return file;
}

/* Of two files, the tensors whose names contain `part` hold the same bytes. */
static void same_files(const mixp_safetensors *a, const mixp_safetensors *b, const char *part) {
    CHECK_INT(mixp_safetensors_count(a), mixp_safetensors_count(b));
    for (int64_t i = 0; i < mixp_safetensors_count(a); i++) {
        const mixp_st_entry *x = mixp_safetensors_at(a, i);
        const mixp_st_entry *y = mixp_safetensors_find(b, x->name);
        if (!strstr(x->name, part)) continue;
        CHECK(y && x->bytes == y->bytes && memcmp(x->data, y->data, x->bytes) == 0);
    }
}
static const char *type_in(const mixp_safetensors *file, const char *name) {
    const mixp_st_entry *e = mixp_safetensors_find(file, name);
    return e ? e->type : "none";
}

static void test_what_is_kept(void) {
    static const char *const m_types[3] = { "F32", "BF16", "F8_E4M3" };
    static const char *const v_types[3] = { "F32", "BF16", "U8" };
    static const char *const masters[3] = { "F32", "U16", "U8" };
    for (int kind = 0; kind < 3; kind++) {
        model m = model_of(states_of(kind, 2 - kind, kind));
        train(&m, 2, 0);
        mixp_safetensors *file = saved(&m);
        CHECK_TEXT(type_in(file, "optimizer.0.m.w"), m_types[kind]);
        CHECK_TEXT(type_in(file, "optimizer.0.v.w"), v_types[2 - kind]);
        CHECK_TEXT(type_in(file, "optimizer.0.master.w"), masters[kind]);
        CHECK_TEXT(type_in(file, "optimizer.0.m_scale.w"), kind == 2 ? "F8_E8M0" : "none");
        CHECK_TEXT(type_in(file, "optimizer.0.v_scale.w"), kind == 0 ? "F8_E8M0" : "none");
        CHECK_TEXT(type_in(file, "optimizer.0.m.norm"), "F32");
        CHECK_TEXT(type_in(file, "optimizer.0.v.table"), "F32");
        CHECK_TEXT(type_in(file, "optimizer.0.master.norm"), "F32");
        mixp_safetensors_free(file);
        mixp_context_free(m.ctx);
    }
    remove(path);
}

static void test_skipped_means_untouched(void) {
    for (int kind = 0; kind < 3; kind++) {
        model m = model_of(states_of(kind, kind, kind));
        train(&m, 3, 0);
        mixp_safetensors *before = saved(&m);
        train(&m, 1, 1);
        CHECK_INT(mixp_scaler_verdict(m.scaler).outcome, MIXP_STEP_SKIPPED);
        mixp_safetensors *after = saved(&m);
        same_files(before, after, ".w");
        same_files(before, after, ".norm");
        same_files(before, after, ".table");
        same_files(before, after, "applied");
        mixp_safetensors_free(before);
        mixp_safetensors_free(after);
        mixp_context_free(m.ctx);
    }
    remove(path);
}

/* Saved, loaded into another process' model, trained on: the bytes of one that never stopped. */
static void test_resume(void) {
    for (int kind = 0; kind < 3; kind++) {
        model a = model_of(states_of(kind, kind, kind)), b;
        train(&a, 3, 0);
        mixp_safetensors_free(saved(&a));
        b = model_of(states_of(kind, kind, kind));
        mixp_checkpoint c = checkpoint_of(&b);
        CHECK_INT(mixp_checkpoint_load(path, &c), MIXP_OK);
        random_state = 1;
        train(&a, 3, 0);
        mixp_safetensors *of_a = saved(&a);
        random_state = 1;
        train(&b, 3, 0);
        mixp_safetensors *of_b = saved(&b);
        same_files(of_a, of_b, "");
        mixp_safetensors_free(of_a);
        mixp_safetensors_free(of_b);
        mixp_context_free(a.ctx);
        mixp_context_free(b.ctx);
    }
    remove(path);
}

/* Another kind in the file: an error that names both, and nothing changed. */
static void test_another_kind_in_the_file(void) {
    static const char *const there[4] = { "'optimizer.0.m.w' is bf16 [64, 100], not f32 [64, 100]",
        "'optimizer.0.v.w' is bf16 [64, 100], not f32 [64, 100]",
        "'optimizer.0.master.w' is U16 [64, 100], not f32 [64, 100]",
        "'optimizer.0.m.w' is f8_e4m3 [64, 100], not f32 [64, 100]" };
    for (int k = 0; k < 4; k++) {
        model a = model_of(states_of(k == 0 ? 1 : k == 3 ? 2 : 0, k == 1, k == 2)), b;
        train(&a, 2, 0);
        b = model_of(states_of(0, 0, 0));
        train(&b, 1, 0);
        mixp_safetensors *before = saved(&b);
        mixp_safetensors_free(saved(&a));
        mixp_checkpoint c = checkpoint_of(&b);
        CHECK_INT(mixp_checkpoint_load(path, &c), k == 3 ? MIXP_ERR_SHAPE : MIXP_ERR_DTYPE);
        CHECK_TEXT(error_of(b.ctx), there[k]);
        mixp_context_clear_error(b.ctx);
        mixp_safetensors *after = saved(&b);
        same_files(before, after, "");
        mixp_safetensors_free(before);
        mixp_safetensors_free(after);
        mixp_context_free(a.ctx);
        mixp_context_free(b.ctx);
    }
    remove(path);
}

/* A weight that the program writes is its own truth: nothing of the old master stays beside it. */
static void test_written_weights(void) {
    model m = model_of(states_of(0, 0, 1));
    train(&m, 3, 0);
    fill(m.w, 3);
    mixp_safetensors *file = saved(&m);
    const mixp_st_entry *rest = mixp_safetensors_find(file, "optimizer.0.master.w");
    for (size_t i = 0; rest && i < rest->bytes; i++) CHECK_INT(((const char *)rest->data)[i], 0);
    CHECK(rest != NULL);
    mixp_safetensors_free(file);
    mixp_context_free(m.ctx);
    remove(path);
}

static void refused(mixp_context *ctx, const mixp_optimizer *opt, const char *why) {
    CHECK(opt == NULL);
    CHECK_TEXT(error_of(ctx), why);
    mixp_context_clear_error(ctx);
}

static void test_errors(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_adamw_defaults();
    mixp_optimizer_desc rms = mixp_rmsprop_defaults();
    mixp_optimizer_desc lion = mixp_lion_defaults();
    d.states = states_of(3, 0, 0);
    refused(ctx, mixp_optimizer_new(ctx, &d), "states.m is not a mixp_moment_kind");
    d.states = states_of(0, -1, 0);
    refused(ctx, mixp_optimizer_new(ctx, &d), "states.v is not a mixp_moment_kind");
    d.states = states_of(0, 0, 3);
    refused(ctx, mixp_optimizer_new(ctx, &d), "states.master is not a mixp_master_kind");
    d.states = states_of(0, 0, 2);
    d.no_master = 1;
    refused(ctx, mixp_optimizer_new(ctx, &d), "no_master and states.master contradict");
    rms.beta2 = 1;
    refused(ctx, mixp_optimizer_new(ctx, &rms), "mixp_optimizer_new: RMSprop: alpha (beta2) must lie in [0,1)");
    rms = mixp_rmsprop_defaults();
    rms.momentum = -1;
    refused(ctx, mixp_optimizer_new(ctx, &rms), "momentum must be finite");
    lion.beta2 = -0.1;
    refused(ctx, mixp_optimizer_new(ctx, &lion), "mixp_optimizer_new: Lion: beta2 must lie in [0,1)");
    d.no_master = 0;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    CHECK_INT(mixp_optimizer_add(opt, mixp_param(ctx, "half", MIXP_F16, 2, shape), NULL),
              MIXP_ERR_DTYPE);
    CHECK_TEXT(error_of(ctx), "'half' is f16, but this states.master completes bf16 weights");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_add(opt, mixp_param(ctx, "bias", MIXP_F16, 1, shape), NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(opt, mixp_param(ctx, "wide", MIXP_F32, 2, shape), NULL), MIXP_OK);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(test_masters_of_written_weights);
    RUN(test_codes_of_m);
    RUN(test_scales);
    RUN(test_codes_of_v);
    RUN(test_codes_of_bf16);
    RUN(test_masters_of_16_bits);
    RUN(test_masters_of_8_bits);
    RUN(test_rmsprop);
    RUN(test_lion);
    RUN(test_lion_signs);
    RUN(test_cautious);
    RUN(test_kinds_follow);
    RUN(test_same_bytes);
    RUN(test_counting_changes_nothing);
    RUN(test_random_words);
    RUN(test_16_bits_are_f32);
    RUN(test_random_keys);
    RUN(test_bf16_v_sticks_to_nearest);
    RUN(test_8_bit_masters_stagnate_to_nearest);
    RUN(test_8_bit_v_explodes_without_its_floor);
    RUN(test_nan_stays_alone);
    RUN(test_what_is_kept);
    RUN(test_skipped_means_untouched);
    RUN(test_resume);
    RUN(test_another_kind_in_the_file);
    RUN(test_written_weights);
    RUN(test_errors);
    return test_report();
}
