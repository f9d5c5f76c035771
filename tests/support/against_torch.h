/* against_torch.h - makes the inputs of a recorded case from its text, such as "s2,3 i2": the same
 * numbers that the script beside the record made.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef AGAINST_TORCH_H
#define AGAINST_TORCH_H
#include "reference/generate.h"

enum { VOCAB = 6, MAX_VALUES = 512 };

typedef struct inputs {
    int          n, has_grad[3];
    mixp_tensor *t[3];
} inputs;

/* Kind e: every third number is one of these. f16 and bf16 hold all of them. */
static void put_edges(float *v, int n) {
    static const uint32_t bits[10] = { 0x7FC00000u, 0x7F800000u, 0xFF800000u, 0u, 0x80000000u,
                                       0x47700000u, 0xC7700000u, 0x38800000u, 0xB3800000u, 0x3F800000u };
    for (int i = 1; i < n; i += 3) v[i] = mixp_f32_of_bits(bits[i / 3 % 10]);
}

static mixp_tensor *make_real(mixp_context *ctx, char kind, uint32_t *gen, mixp_dtype dtype,
                              int rank, const int64_t *shape, int n) {
    float v[MAX_VALUES];
    mixp_tensor *t = kind == 't' ? mixp_activation(ctx, dtype, rank, shape)
                                 : mixp_param(ctx, NULL, dtype, rank, shape);
    int i;
    gen_short(gen, v, n);
    for (i = 0; kind == 't' && i < n; i++) v[i] = (v[i] + 2.0f) / 4.0f;
    for (i = 0; kind == 'p' && i < n; i++) v[i] = fabsf(v[i]) + 1.0f / 64.0f;
    if (kind == 'e') put_edges(v, n);
    if (t) mixp_write(t, v, MIXP_F32, n);
    return t;
}

/* u: bytes. n: integers up to both ends. m: a mask. i: ids. j: ids, every third of which does not count. */
static mixp_tensor *make_integers(mixp_context *ctx, char kind, uint32_t *gen, int rank,
                                  const int64_t *shape, int n) {
    static const int32_t whole[12] = { 0, 1, -1, 255, 2047, -2048, 65504, 16777217, -16777219,
                                       2147483647, -2147483647 - 1, 77777777 };
    int32_t ids[MAX_VALUES];
    uint8_t bytes[MAX_VALUES];
    int i;
    if (kind == 'n') return mixp_input(ctx, MIXP_I32, rank, shape, whole);
    gen_ints(gen, kind == 'm' ? 2 : kind == 'u' ? 256 : VOCAB, ids, n);
    for (i = 0; i < n; i++) bytes[i] = (uint8_t)ids[i];
    for (i = 0; kind == 'j' && i < n; i += 3) ids[i] = MIXP_IGNORE;
    return kind == 'u' ? mixp_input(ctx, MIXP_U8, rank, shape, bytes)
                       : mixp_input(ctx, MIXP_I32, rank, shape, ids);
}

/* One input from its text. Returns where the next one begins. */
static const char *make_input(mixp_context *ctx, const char *text, uint32_t *gen,
                              mixp_dtype dtype, inputs *in) {
    int64_t shape[MIXP_MAX_RANK];
    int rank = 0, n = 1;
    char kind = *text, *end;
    do {
        shape[rank] = strtol(text + 1, &end, 10);
        n *= (int)shape[rank++];
        text = end;
    } while (*text == ',');
    in->has_grad[in->n] = strchr("spe", kind) != NULL;
    in->t[in->n++] = strchr("spet", kind) ? make_real(ctx, kind, gen, dtype, rank, shape, n)
                                          : make_integers(ctx, kind, gen, rank, shape, n);
    return text;
}
#endif
