/* test_state_bytes.c - entire blocks of AdamW with one-byte moments, on every instruction set: each
 * code, at scales across the range, gives the result of the functions for one element.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "args.h"
#include "test.h"
#include "numbers.h"

enum { N = 2048, BLOCKS = N / MIXP_STATE_BLOCK };

typedef struct states {
    float    grad[N], master[N];
    uint16_t weight[N], rest[N];
    uint8_t  m[N], v[N], m_scale[BLOCKS], v_scale[BLOCKS];
} states;

static mixp_dtype master_dtype;         /* f32; bf16: the other half; u8: a quarter */

static float weight_of(const states *s, int i) {
    if (master_dtype == MIXP_F32) return s->master[i];
    if (master_dtype == MIXP_BF16) return mixpi_master_from_16(s->weight[i], s->rest[i]);
    return mixpi_master_from_8(s->weight[i], ((const uint8_t *)s->rest)[i]);
}
static void put_weight(states *s, int i, float x, uint32_t random) {
    if (master_dtype == MIXP_F32) {
        s->master[i] = x;
        s->weight[i] = mixp_bf16_from_f32(x).bits;
        return;
    }
    mixpi_master_parts parts = master_dtype == MIXP_BF16 ? mixpi_master_to_16(x) : mixpi_master_to_8(x, random);
    s->weight[i] = (uint16_t)parts.weight;
    if (master_dtype == MIXP_BF16) s->rest[i] = (uint16_t)parts.rest;
    else ((uint8_t *)s->rest)[i] = (uint8_t)parts.rest;
}

/* One block, an element at a time. */
static void block_expected(states *s, int block, const mixp_step_scalars *u, uint64_t key) {
    float m[MIXP_STATE_BLOCK], root[MIXP_STATE_BLOCK];
    const int first = block * MIXP_STATE_BLOCK;
    uint32_t m_top = 0, v_top = 0, size;
    for (int k = 0; k < MIXP_STATE_BLOCK; k++) {
        const int i = first + k;
        const uint32_t word = mixpi_state_random(key, (uint64_t)i);
        float p = weight_of(s, i), v = mixpi_state_v_value(s->v[i], s->v_scale[block]);
        m[k] = mixpi_state_m_value(s->m[i], s->m_scale[block]);
        mixpi_adam_element(u, s->grad[i], &p, &m[k], &v);
        put_weight(s, i, p, mixpi_random_master(word));
        root[k] = sqrtf(v);
        size = mixpi_state_size(m[k]);
        m_top = size > m_top ? size : m_top;
        size = mixpi_state_size(root[k]);
        v_top = size > v_top ? size : v_top;
    }
    s->m_scale[block] = (uint8_t)mixpi_state_scale_m(m_top);
    s->v_scale[block] = (uint8_t)mixpi_state_scale_v(v_top);
    for (int k = 0; k < MIXP_STATE_BLOCK; k++) {
        const uint32_t word = mixpi_state_random(key, (uint64_t)(first + k));
        s->m[first + k] =
            (uint8_t)mixpi_state_m(m[k], s->m_scale[block], mixpi_random_m(word));
        s->v[first + k] =
            (uint8_t)mixpi_state_v(root[k], s->v_scale[block], mixpi_random_v(word));
    }
}

static void *scratch(void *user, size_t bytes) {
    static char room[1 << 16];
    (void)user;
    return bytes <= sizeof room ? room : NULL;
}

static mixp_step_plan plan_of(int cautious) {
    mixp_step_plan plan;
    mixp_param_group *g = &plan.groups[0];
    memset(&plan, 0, sizeof plan);
    plan.kind = MIXP_OPTIMIZER_ADAMW;
    plan.n_groups = 1;
    plan.seed = 5;
    plan.cautious = cautious;
    g->lr = 1e-3;
    g->beta1 = 0.9;
    g->beta2 = 0.99;
    g->eps = 1e-8;
    g->weight_decay = 0.1;
    return plan;
}

static void step_of(const mixp_device *cpu, const mixp_step_plan *plan, mixp_step_state *step,
                    states *s) {
    mixp_param_row row;
    mixp_exec x;
    memset(&x, 0, sizeof x);
    memset(&row, 0, sizeof row);
    x.threads = 1;
    x.scratch = scratch;
    row.grad = s->grad;
    row.m = s->m;
    row.v = s->v;
    row.m_dtype = MIXP_F8_E4M3;
    row.v_dtype = MIXP_U8;
    row.m_scale = s->m_scale;
    row.v_scale = s->v_scale;
    row.master_dtype = master_dtype;
    row.master = master_dtype == MIXP_F32 ? (void *)s->master : (void *)s->rest;
    row.weight = s->weight;
    row.weight_dtype = MIXP_BF16;
    row.count = N;
    row.active = 1;
    row.tensor = 3;
    CHECK_INT(cpu->kernels->prepare(&x, args_prepare(plan, step, NULL)), MIXP_OK);
    CHECK_INT(cpu->kernels->update(&x, args_update(plan, &row, 1, step)), MIXP_OK);
}

/* Which NaN it is depends on the order of an operation's two. */
static uint32_t weight_class(uint32_t bits)
{ return (bits & 0x7FFFu) > 0x7F80u ? 0x7FC0u : bits; }
static uint8_t code_class(uint8_t code) { return (code & 127u) == 127u ? 127u : code; }

static int differ(const states *a, const states *b) {
    int i, n = memcmp(a->v, b->v, N) != 0;
    n += memcmp(a->m_scale, b->m_scale, BLOCKS) || memcmp(a->v_scale, b->v_scale, BLOCKS);
    for (i = 0; i < N; i++) {
        const uint32_t x = f32_bits(weight_of(a, i)), y = f32_bits(weight_of(b, i));
        n += code_class(a->m[i]) != code_class(b->m[i]);
        n += weight_class(a->weight[i]) != weight_class(b->weight[i]);
        n += weight_class(x >> 16) != weight_class(y >> 16);
        n += weight_class(x >> 16) != 0x7FC0u && x != y;
    }
    return n;
}

#define EACH_CPU(isa, cpu)                                                                \
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++)                                            \
        if ((cpu = mixp_cpu_with((mixp_isa)isa)) != NULL)

/* Codes in an order of their own. Of four blocks one has gradients of its moments' size, one in
 * addition weights that are NaN or Inf, one a second moment that becomes Inf, and one no gradient.
 * special: codes of NaN and Inf. */
static void fill(states *s, uint32_t m_scale, uint32_t v_scale, int special) {
    memset(s, 0, sizeof *s);
    for (int i = 0; i < N; i++) {
        const int kind = i / MIXP_STATE_BLOCK % 4;
        const uint32_t m = (uint32_t)(i * 37 + i / 256) & 255u, v = (uint32_t)(i * 91) & 255u;
        float p = (float)ldexp(random_value(), random_to(40) - 30);
        s->m[i] = (uint8_t)(special || (m & 127u) != 127u ? m : 0u);
        s->v[i] = (uint8_t)(special || v != 255u ? v : 1u);
        if (kind == 1 && i % 61 == 7) p = i % 2 ? bits_f32(0x7F800000u) : bits_f32(0x7FC01234u);
        put_weight(s, i, p, 0);
        if (i % 5 == 0 || kind == 3) continue;
        s->grad[i] = (float)ldexp(random_value(), (int)m_scale - 124 + random_to(24) - 16);
        if (kind == 2 && i % 128 == 77) s->grad[i] = 1e30f;
    }
    memset(s->m_scale, (int)m_scale, BLOCKS);
    memset(s->v_scale, (int)v_scale, BLOCKS);
}

static void steps_agree(uint32_t m_scale, uint32_t v_scale, int special, int cautious) {
    static states start, want, got;
    const mixp_step_plan plan = plan_of(cautious);
    const mixp_device *cpu;
    int isa, t, block;
    fill(&start, m_scale, v_scale, special);
    EACH_CPU(isa, cpu) {
        mixp_step_state step;
        memset(&step, 0, sizeof step);
        want = got = start;
        for (t = 0; t < 2; t++) {
            step_of(cpu, &plan, &step, &got);
            for (block = 0; block < BLOCKS; block++)
                block_expected(&want, block, &step.update[0],
                               mixpi_state_key(plan.seed, step.applied, 3));
        }
        CHECK_INT(differ(&want, &got), 0);
    }
}

static void test_every_code(void) {
    static const mixp_dtype masters[3] = { MIXP_F32, MIXP_BF16, MIXP_U8 };
    static const uint32_t m_scales[] = { 0, 1, 2, 9, 60, 100, 127, 180, 244, 245, 246, 247, 254 };
    static const uint32_t v_scales[] = { 15, 16, 64, 100, 127, 190, 254 };
    int master, m, v, k = 0;
    for (master = 0; master < 3; master++)
        for (m = 0; m < 13; m++) for (v = 0; v < 7; v++, k++) {
            master_dtype = masters[master];
            steps_agree(m_scales[m], v_scales[v], 0, k % 5 == 2);
            if (k % 4 == 0) steps_agree(m_scales[m], v_scales[v], 1, 0);
        }
}

int main(void) {
    RUN(test_every_code);
    return test_report();
}
