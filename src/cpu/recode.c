#pragma once
#include "quantise.c"
/* --- recode: see mixp_recode_args ------------------------------------------------------------ */

/* The factors of 16 columns of a row of blocks. */
MIXPI_RARE mixpi_v MIXPI_P(recode_scales)(const mixp_recode_args *k, int64_t strip, int64_t col) {
    const uint8_t *codes = k->scales;
    const mixpi_v one = mixpi_vset(1.0f);
    float s[16];
    if (k->scale == MIXP_SCALE_TENSOR) return one;
    codes += strip * k->cols + col;
    if (k->scale == MIXP_SCALE_E4M3) {          /* 1 for 0, as mixpi_scale_of_code */
        mixpi_v v = mixpi_vget(MIXP_F8_E4M3, codes);
        return mixpi_vselect_gt(mixpi_vset(0.5f * MIXP_E4M3_TINY), v, one, v);
    }
    for (int i = 0; i < 16; i++) s[i] = mixpi_scale_of_code(k->scale, codes[i]);
    return mixpi_vload(s);
}

/* Writes the codes of 16 quantised values. */
MIXPI_V void MIXPI_P(put_e2m1)(uint8_t *codes, mixpi_v v) {
    float x[16];
    mixpi_vstore(x, v);
    for (int i = 0; i < 8; i++)
        codes[i] = (uint8_t)(mixpi_e2m1_code(x[2 * i]) | mixpi_e2m1_code(x[2 * i + 1]) << 4);
}
MIXPI_V void MIXPI_P(put_e4m3)(uint8_t *codes, mixpi_v v) {
    static const mixp_rounding nearest = { 0, 0, 0, 0, 0, 0 };      /* an Inf becomes NaN */
    static const uint32_t no_random[16] = { 0 };
    mixpi_vput_rounded(MIXP_F8_E4M3, codes, v, &nearest, no_random);
}

MIXPI_V mixpi_v MIXPI_P(get_e2m1)(const uint8_t *codes) {
    float x[16];
    for (int i = 0; i < 8; i++) {
        x[2 * i] = mixpi_e2m1_value(codes[i]);
        x[2 * i + 1] = mixpi_e2m1_value((uint32_t)codes[i] >> 4);
    }
    return mixpi_vload(x);
}

/* 16 elements from element `at` on. scales: their factors. */
MIXPI_V void MIXPI_P(encode_16)(const mixp_recode_args *k, int64_t at, mixpi_v scales) {
    const mixpi_v x = mixpi_vdiv(mixpi_vget(MIXP_BF16, k->y + at), scales);
    if (k->element == MIXP_F4_E2M1) MIXPI_P(put_e2m1)(k->codes + at / 2, x);
    else MIXPI_P(put_e4m3)(k->codes + at, x);
}
MIXPI_V void MIXPI_P(decode_16)(const mixp_recode_args *k, int64_t at, mixpi_v scales) {
    mixpi_v x = k->element == MIXP_F4_E2M1 ? MIXPI_P(get_e2m1)(k->codes + at / 2)
                                           : mixpi_vget(MIXP_F8_E4M3, k->codes + at);
    mixpi_vcodes c;
    x = mixpi_vmul(x, scales);
    MIXPI_EACH(MIXPI_R(c, i) = MIXPI_P(q_bf16)(mixpi_rbits(MIXPI_R(x, i))))
    mixpi_vput_codes(k->y + at, c, 1, 0);
}

/* A row of blocks, or a row of the array. */
MIXPI_K void MIXPI_P(recode_strip)(const void *job, int64_t strip) {
    const mixp_recode_args k = *(const mixp_recode_args *)job;
    const int64_t rows = k.block_rows ? k.block_rows : 1;
    for (int64_t col = 0; col < k.cols; col += 16) {
        const mixpi_v scales = MIXPI_P(recode_scales)(&k, strip, col);
        for (int64_t r = strip * rows; r < (strip + 1) * rows; r++) {
            if (k.decodes) MIXPI_P(decode_16)(&k, r * k.cols + col, scales);
            else MIXPI_P(encode_16)(&k, r * k.cols + col, scales);
        }
    }
}

MIXPI_LINKED MIXPI_SPEED MIXPI_TARGET
mixp_result MIXPI_P(recode)(const mixp_exec *x, const mixp_recode_args *k) {
    const int64_t rows = k->block_rows ? k->block_rows : 1;
    mixp_result r = mixpi_recode_wrong(k);
    if (r != MIXP_OK) return r;
    mixpi_each_unit(x, k->rows / rows, rows * k->cols, MIXPI_P(recode_strip), k);
    if (k->decodes && k->decode) *k->decode = *k->own * (k->times ? *k->times : 1.0f);
    return MIXP_OK;
}
