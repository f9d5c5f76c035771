#pragma once
#include "vectors.c"
/* --- states of fewer bytes: a register of codes -------------------------------------------- */
enum { mixpi_vlanes = sizeof(mixpi_vbits) / sizeof(uint32_t) };
typedef struct mixpi_vmaster_parts { mixpi_vbits weight, rest; } mixpi_vmaster_parts;

/* The functions below return the same bits as mixp_state_... and mixp_master_..., with two
 * differences of layout: weights and bf16 codes lie in the upper halves, and the codes that the
 * functions read are sign-extended. */
#if MIXPI_PASS == 0
MIXPI_V mixpi_vbits mixpi_vstate_random(uint64_t key, uint32_t first) {
    return mixpi_state_random(key, first);
}
MIXPI_V mixpi_vbits mixpi_vstate_bf16(mixpi_vbits x, mixpi_vbits random) {
    return mixpi_state_bf16(mixp_f32_of_bits(x), random) << 16;
}
MIXPI_V mixpi_vbits mixpi_vstate_m(mixpi_vbits x, uint32_t scale, mixpi_vbits random) {
    return mixpi_state_m(mixp_f32_of_bits(x), scale, random);
}
MIXPI_V mixpi_vreg mixpi_vstate_m_value(mixpi_vbits code, uint32_t scale) {
    return mixpi_state_m_value(code & 0xFFu, scale);
}
MIXPI_V mixpi_vbits mixpi_vstate_v(mixpi_vbits root, uint32_t scale, mixpi_vbits random) {
    return mixpi_state_v(mixp_f32_of_bits(root), scale, random);
}
MIXPI_V mixpi_vreg mixpi_vstate_v_value(mixpi_vbits code, uint32_t scale) {
    return mixpi_state_v_value(code & 0xFFu, scale);
}
MIXPI_V mixpi_vmaster_parts mixpi_vmaster_16(mixpi_vbits u) {
    mixpi_master_parts parts = mixpi_master_to_16(mixp_f32_of_bits(u));
    mixpi_vmaster_parts r = { parts.weight << 16, parts.rest };
    return r;
}
MIXPI_V mixpi_vmaster_parts mixpi_vmaster_8(mixpi_vbits u, mixpi_vbits random) {
    mixpi_master_parts parts = mixpi_master_to_8(mixp_f32_of_bits(u), random);
    mixpi_vmaster_parts r = { parts.weight << 16, parts.rest };
    return r;
}
MIXPI_V mixpi_vreg mixpi_vmaster_of(mixpi_vbits bits) { return mixp_f32_of_bits(bits); }

#else
/* mixpi_state_random in two parts: the places of the elements, and the hash of a place. A caller
 * that needs many words adds to the places. */
MIXPI_V mixpi_vbits mixpi_vstate_place(uint64_t key, uint32_t first) {
    const uint32_t lane[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    mixpi_vbits x;
    memcpy(&x, lane, sizeof x);
    return x + (first + (uint32_t)key);
}
MIXPI_V mixpi_vbits mixpi_vstate_word(uint64_t key, mixpi_vbits x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) + (uint32_t)(key >> 32);
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}
MIXPI_V mixpi_vbits mixpi_vstate_random(uint64_t key, uint32_t first) {
    return mixpi_vstate_word(key, mixpi_vstate_place(key, first));
}
MIXPI_V mixpi_vbits mixpi_vstate_bf16(mixpi_vbits x, mixpi_vbits random) {
    const mixpi_vbits a = x & 0x7FFFFFFFu, inf = mixpi_vbits_all(0x7F800000u);
    return mixpi_vbits_gt(a, inf, x | 0x400000u, x + random);
}
MIXPI_V mixpi_vbits mixpi_vstate_m(mixpi_vbits x, uint32_t scale, mixpi_vbits random) {
    const mixpi_vbits inf = mixpi_vbits_all(0x7F800000u);
    const mixpi_vbits least = mixpi_vbits_all(0x3C800000u);
    mixpi_vbits y = (mixpi_vbits)((mixpi_vreg)x * mixp_f32_of_bits((254u - scale) << 23));
    mixpi_vbits a = y & 0x7FFFFFFFu;
    mixpi_vbits code = ((a + (random << 4)) >> 20) - (120u << 3);
    mixpi_vbits tiny = (mixpi_vbits)((mixpi_vreg)a + 16384.0f) - 0x46800000u;
    code = mixpi_vbits_gt(least, a, tiny, code);
    code = mixpi_vbits_gt(inf, a, code, mixpi_vbits_all(0x7Fu));
    return (y >> 24 & 0x80u) | code;
}
MIXPI_V mixpi_vreg mixpi_vstate_m_value(mixpi_vbits code, uint32_t scale) {
    mixpi_vbits u = mixpi_vcode_widen(MIXP_F8_E4M3, code); /* keeps the sign */
    return (mixpi_vreg)u * mixp_f32_of_bits(scale << 23);
}
MIXPI_V mixpi_vbits mixpi_vstate_v(mixpi_vbits root, uint32_t scale, mixpi_vbits random) {
    const mixpi_vbits inf = mixpi_vbits_all(0x7F800000u), zero = mixpi_vbits_all(0);
    mixpi_vbits a = root & 0x7FFFFFFFu;
    mixpi_vbits code = ((a + (random << 3)) >> 19) - ((scale - 15u) << 4);
    code = mixpi_vbits_max(code, mixpi_vbits_all(1));
    code = mixpi_vbits_gt(inf, a, code, mixpi_vbits_all(255));
    return mixpi_vbits_gt(a, zero, code, zero);
}
MIXPI_V mixpi_vreg mixpi_vstate_v_value(mixpi_vbits code, uint32_t scale) {
    const mixpi_vbits inf = mixpi_vbits_all(0x7F800000u), zero = mixpi_vbits_all(0);
    mixpi_vbits c = code & 0xFFu, u = (c + ((scale - 15u) << 4)) << 19;
    u = mixpi_vbits_gt(mixpi_vbits_all(255), c, u, inf);
    u = mixpi_vbits_gt(c, zero, u, zero);
    return (mixpi_vreg)u * (mixpi_vreg)u;
}
MIXPI_V mixpi_vmaster_parts mixpi_vmaster_16(mixpi_vbits u) {
    const mixpi_vbits inf = mixpi_vbits_all(0x7F800000u), a = u & 0x7FFFFFFFu;
    mixpi_vmaster_parts r;
    r.weight = mixpi_vbits_gt(a, inf, u | 0x400000u, u + 0x8000u);
    r.rest = mixpi_vbits_gt(a, inf, mixpi_vbits_all(0), u);
    return r;
}
MIXPI_V mixpi_vmaster_parts mixpi_vmaster_8(mixpi_vbits u, mixpi_vbits random) {
    const mixpi_vbits inf = mixpi_vbits_all(0x7F800000u), a = u & 0x7FFFFFFFu;
    const mixpi_vbits sum = u + random;
    mixpi_vmaster_parts r;
    r.weight = mixpi_vbits_gt(a, inf, u | 0x400000u, sum + 0x8000u);
    r.rest = mixpi_vbits_gt(a, inf, mixpi_vbits_all(0), sum >> 8);
    return r;
}
MIXPI_V mixpi_vreg mixpi_vmaster_of(mixpi_vbits bits) { return (mixpi_vreg)bits; }
#endif

