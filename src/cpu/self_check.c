#pragma once
#include "../device.h"
#include "../formats.c"
#include "device.c"
/* --- the environment -------------------------------------------------------------------- */

/* Values at the limits of the formats, with their codes: ones, zeros, the largest numbers, ties,
 * subnormals, overflows. The codes were computed with exact fractions from the formats'
 * definitions. */
typedef struct mixpi_known_code {
    uint32_t f32;
    uint16_t f16, bf16;
    uint8_t  e4m3, e5m2;
} mixpi_known_code;

static const mixpi_known_code mixpi_known_codes[] = {
    { 0x3F800000, 0x3C00, 0x3F80, 0x38, 0x3C },
    { 0x80000000, 0x8000, 0x8000, 0x80, 0x80 },
    { 0x477FE000, 0x7BFF, 0x4780, 0x7F, 0x7C },
    { 0x477FEFFF, 0x7BFF, 0x4780, 0x7F, 0x7C },
    { 0x477FF000, 0x7C00, 0x4780, 0x7F, 0x7C },
    { 0x33800000, 0x0001, 0x3380, 0x00, 0x00 },
    { 0x33000000, 0x0000, 0x3300, 0x00, 0x00 },
    { 0x33000001, 0x0001, 0x3300, 0x00, 0x00 },
    { 0xBEAAAAAB, 0xB555, 0xBEAB, 0xAB, 0xB5 },
    { 0x43E00000, 0x5F00, 0x43E0, 0x7E, 0x5F },
    { 0x43E80000, 0x5F40, 0x43E8, 0x7E, 0x5F },
    { 0x43E80001, 0x5F40, 0x43E8, 0x7F, 0x5F },
    { 0xC7600000, 0xFB00, 0xC760, 0xFF, 0xFB },
    { 0x47700000, 0x7B80, 0x4770, 0x7F, 0x7C },
    { 0x7F7F8000, 0x7C00, 0x7F80, 0x7F, 0x7C },
    { 0x7F7FFFFF, 0x7C00, 0x7F80, 0x7F, 0x7C },
    { 0x00400000, 0x0000, 0x0040, 0x00, 0x00 },
    { 0x80000001, 0x8000, 0x8000, 0x80, 0x80 },
    { 0x3A800000, 0x1400, 0x3A80, 0x00, 0x14 },
    { 0xFF800000, 0xFC00, 0xFF80, 0xFF, 0xFC }
};
enum { MIXPI_KNOWN_CODES = sizeof mixpi_known_codes / sizeof mixpi_known_codes[0] };

static uint32_t mixpi_known_code_as(const mixpi_known_code *k, mixp_dtype to) {
    switch (to) {
    case MIXP_F16: return k->f16;
    case MIXP_BF16: return k->bf16;
    case MIXP_F8_E4M3: return k->e4m3;
    case MIXP_F8_E5M2: return k->e5m2;
    default: return k->f32;
    }
}

/* Converts all of the values in one array: whole vectors and a remainder. */
static int mixpi_check_array(const mixp_device *cpu, mixp_dtype to) {
    uint32_t from[MIXPI_KNOWN_CODES];
    unsigned char codes[MIXPI_KNOWN_CODES * 2];
    size_t size = mixp_dtype_size(to);
    for (int i = 0; i < MIXPI_KNOWN_CODES; i++) from[i] = mixpi_known_codes[i].f32;
    if (mixp_convert_with(cpu, codes, to, from, MIXP_F32, MIXPI_KNOWN_CODES, NULL) != MIXP_OK)
        return 0;
    for (int i = 0; i < MIXPI_KNOWN_CODES; i++)
        if (mixpi_load_code(codes + (size_t)i * size, size) !=
            mixpi_known_code_as(&mixpi_known_codes[i], to))
            return 0;
    return 1;
}

static int mixpi_check_conversions(const mixp_device *cpu) {
    return mixpi_check_array(cpu, MIXP_F16) && mixpi_check_array(cpu, MIXP_BF16) &&
           mixpi_check_array(cpu, MIXP_F8_E4M3) && mixpi_check_array(cpu, MIXP_F8_E5M2);
}

/* Checks a scale that doubles after three clean steps: two clean steps, an overflow, three clean
 * steps. */
static int mixpi_check_scaler(void) {
    static const int found_inf[] = { 0, 0, 1, 0, 0, 0 };
    static const float scales[] = { 1024.0f, 1024.0f, 512.0f, 512.0f, 512.0f, 1024.0f };
    mixp_scaler_state s = MIXPI_ZERO;
    mixp_scaler_rule rule = MIXPI_ZERO;
    s.scale = 1024.0f;
    s.hysteresis_left = rule.hysteresis = 1;
    rule.growth_factor = 2.0;
    rule.backoff_factor = 0.5;
    rule.growth_interval = rule.recovery_interval = 3;
    rule.min_scale = 1.0f;
    rule.max_scale = 65536.0f;

    /* Each step must produce the scale at its place in the list. */
    for (int i = 0; i < 6; i++) {
        mixpi_scaler_advance(&s, &rule, found_inf[i]);
        if (mixp_bits_of_f32(s.scale) != mixp_bits_of_f32(scales[i])) return 0;
    }
    return 1;
}

/* Is `got` within a few f32 roundings of `want`? A NaN fails. */
static int mixpi_check_near(float got, double want) {
    double off = fabs((double)got - want);
    return mixp_bits_of_f64(off) <= mixp_bits_of_f64(4e-7 * fabs(want));
}

/* Checks the third step of Adam with its default kind (a plan of zeros) and a gradient scaled by
 * 1024. The expected results are those of Adam's definition in double precision. */
static int mixpi_check_update(void) {
    float p = 0.5f, m = 0.125f, v = 0.01f;
    mixp_step_scalars u;
    mixp_step_plan plan = MIXPI_ZERO;
    mixp_step_state state = MIXPI_ZERO;
    plan.groups[0].lr = 1e-3;
    plan.groups[0].beta1 = 0.9;
    plan.groups[0].beta2 = 0.999;
    plan.groups[0].eps = 1e-8;
    state.applied = 3;
    state.factor = 1.0 / 1024.0;
    mixpi_step_scalars_of(&plan, &state, 0, 3, &u);
    mixpi_adam_element(&u, -256.0f, &p, &m, &v);
    return mixpi_check_near(m, 0.08750000000000001) && mixpi_check_near(v, 0.0100525) &&
           mixpi_check_near(p, 0.4998237029022782);
}

/* x + y and x * y, as the machine computes them in the current environment. */
static uint32_t mixpi_check_sum(float x, float y) {
    volatile float a = x, b = y, sum = a + b;
    return mixp_bits_of_f32(sum);
}
static uint32_t mixpi_check_product(float x, float y) {
    volatile float a = x, b = y, product = a * b;
    return mixp_bits_of_f32(product);
}

/* Is (2^24 + 1) - 2^24 = 0, as in f32? It is 1 in a wider type, or if the compiler cancels. */
static int mixpi_check_float(void) {
    volatile float big = 16777216.0f, one = 1.0f;
    float a = big, b = one;
    volatile float left = (a + b) - a;
    return mixp_bits_of_f32(left) == 0;
}

static int mixpi_check_nearest(void) {
    const float least = 1.4901161193847656e-08f; /* 2^-26 */
    return mixpi_check_sum(1.0f, least) == 0x3F800000u &&
           mixpi_check_sum(-1.0f, -least) == 0xBF800000u &&
           mixpi_check_sum(1.0f, -least) == 0x3F800000u;
}

/* Are subnormals kept? Halves the smallest normal number, and doubles that half. */
static int mixpi_check_subnormals(void) {
    return mixpi_check_product(mixp_f32_of_bits(0x00800000u), 0.5f) == 0x00400000u &&
           mixpi_check_product(mixp_f32_of_bits(0x00400000u), 2.0f) == 0x00800000u;
}

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#  define MIXPI_FAST_MATH 1
#else
#  define MIXPI_FAST_MATH 0
#endif

/* Returns a text on what the environment or compiler flags break, or NULL. */
static const char *mixpi_check_environment(void) {
    if (MIXPI_FAST_MATH)
        return "compiled with fast-math: operators may lose Inf and NaN, and results differ from "
               "other builds; only conversions and the search for Inf and NaN are unaffected; "
               "compile without -ffast-math";
    if (!mixpi_check_nearest())
        return "the rounding mode is not to nearest: all results except conversions are rounded "
               "differently; call fesetround(FE_TONEAREST) in this thread";
    if (!mixpi_check_subnormals())
        return "subnormal numbers are flushed to 0 (FTZ or DAZ): small gradients and moments are "
               "lost; clear both flags in this thread, and link without -ffast-math";
    if (!mixpi_check_float())
        return "floats are computed in a wider type or regrouped: results differ from other "
               "builds; compile with -msse2 -mfpmath=sse and without -ffast-math";
    return NULL;
}

/* Which speed of the machine this build does not use, as a text; NULL = it uses all. */
static const char *mixpi_check_speed(void) {
#if MIXPI_GNU && !defined(__OPTIMIZE__)
    return "slow: compiled without optimisation: products take 10 to 100 times as long; compile "
           "with -O2";
#elif !MIXPI_X86 && !MIXPI_ARM && MIXPI_HAS_VECTORS
    return "slow: compiled without vector instructions: products take 10 times as long; compile "
           "with gcc or clang, and without MIXPREC_NO_SIMD";
#elif !defined(_OPENMP) && !defined(MIXPREC_THREADS) && MIXPI_POSIX
    if (sysconf(_SC_NPROCESSORS_ONLN) > 1)
        return "slow: compiled without threads: only one core is used; compile with -fopenmp, or "
               "with -DMIXPREC_THREADS -pthread";
    return NULL;
#else
    return NULL;
#endif
}

/* Why Intel's tiles are not used although the processor has them, as a text; NULL = they are used,
 * or the processor has none. */
static const char *mixpi_check_amx(mixpi_amx_state tiles) {
    switch (tiles) {
    case MIXPI_AMX_UNSAVED:
        return "slow: AMX is not used: the system does not save tiles (XCR0): products of f16 and "
               "bf16 take 2 to 5 times as long; use Linux 5.16 or later, and a hypervisor that "
               "passes AMX on";
    case MIXPI_AMX_REFUSED:
        return "slow: AMX is not used: the system refuses tiles to this process "
               "(ARCH_REQ_XCOMP_PERM): products of f16 and bf16 take 2 to 5 times as long; allow "
               "arch_prctl in seccomp, and give sigaltstack at least AT_MINSIGSTKSZ bytes";
    case MIXPI_AMX_WRONG:
        return "slow: AMX is not used: it computes a known product wrong: products of f16 and bf16 "
               "take 2 to 5 times as long; check the emulator or the processor";
    default: return NULL;
    }
}

static mixp_result mixpi_check_failed(
    char *message, size_t size, const char *why, const char *where) {
    if (message && size) snprintf(message, size, "%s%s", why, where);
    return MIXP_ERR_DEVICE;
}

MIXPI_SELDOM
static mixp_result mixpi_do_self_check(char *message, size_t size) {
    const char *why = mixpi_check_environment();
    if (message && size) message[0] = '\0';
    if (why) return mixpi_check_failed(message, size, why, "");

    /* Conversions on every instruction set that this machine has. */
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *cpu = mixp_cpu_with((mixp_isa)isa);
        if (cpu && !mixpi_check_conversions(cpu))
            return mixpi_check_failed(message, size,
                "conversions give wrong results: do not use this build on this machine; try "
                "another compiler; device ",
                cpu->name);
    }

    /* The scale, and an update. */
    if (!mixpi_check_scaler())
        return mixpi_check_failed(message, size, "the loss scale is computed wrongly: ",
            "do not use this build on this machine; try another compiler");
    if (!mixpi_check_update())
        return mixpi_check_failed(message, size, "Adam's update is computed wrongly: ",
            "do not use this build on this machine; try another compiler");

    /* A slow build is worth a message, but no error. */
    why = mixpi_check_speed();
    if (!why) why = mixpi_check_amx(mixpi_amx_usable());
    if (why && message && size) snprintf(message, size, "%s", why);
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_self_check(char *message, size_t size) {
    const mixpi_float_mode mode = mixpi_float_calm();
    const mixp_result r = mixpi_do_self_check(message, size);
    mixpi_float_leave(mode);
    return r;
}
