#pragma once
#include "combined.c"
#include "products.c"
/* --- einsum of two operands: sums, transposes and one product --- */

/* The letters of an equation. A letter's kind is a sum: 1 (in a), 2 (in b), 4 (in the result). */
typedef struct mixpi_einsum {
    char    text[3][MIXP_MAX_RANK + 1];     /* the letters of a, b and the result          */
    int     rank[3];
    int64_t size[128];
    int     kind[128];
} mixpi_einsum;

enum { MIXPI_OF_A = 1, MIXPI_OF_B = 2, MIXPI_OF_RESULT = 4 };

static int mixpi_is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

static mixp_result mixpi_einsum_wrong(mixp_context *ctx, const char *equation, const char *why) {
    return mixp_context_fail(
        ctx, MIXP_ERR_ARGUMENT, "einsum: equation '%.60s': %s", equation ? equation : "", why);
}

/* Reads the equation into text. Without an arrow, the result has the letters that occur once, in
 * alphabetical order. */
static mixp_result mixpi_einsum_read(mixp_context *ctx, const char *equation, mixpi_einsum *e) {
    int part = 0;
    memset(e, 0, sizeof *e);

    /* Each letter goes to its operand, or behind the arrow to the result. */
    for (const char *s = equation; s && *s; s++) {
        if (*s == ' ') continue;
        if (*s == ',' && part == 0) {
            part = 1;
            continue;
        }
        if (s[0] == '-' && s[1] == '>' && part == 1) {
            part = 2;
            s++;
            continue;
        }
        if (!mixpi_is_letter(*s) || e->rank[part] == MIXP_MAX_RANK)
            return mixpi_einsum_wrong(ctx, equation,
                "write the letters of two operands, as in \"bij,bjk->bik\", at most 8 for each");
        if (e->kind[(int)*s] & 1 << part)
            return mixpi_einsum_wrong(ctx, equation, "a letter occurs twice in one operand");
        e->kind[(int)*s] |= 1 << part;
        e->text[part][e->rank[part]++] = *s;
    }

    if (part == 0)
        return mixpi_einsum_wrong(ctx, equation, "it needs two operands, as in \"ij,jk\"");

    /* Without an arrow, a letter of one operand goes to the result. */
    for (int c = 'A'; c <= 'z'; c++) {
        const int in = e->kind[c] & (MIXPI_OF_A | MIXPI_OF_B);
        if (part < 2 && (in == MIXPI_OF_A || in == MIXPI_OF_B)) {
            if (e->rank[2] == MIXP_MAX_RANK)
                return mixpi_einsum_wrong(ctx, equation, "the result has more than 8 letters");
            e->kind[c] |= MIXPI_OF_RESULT;
            e->text[2][e->rank[2]++] = (char)c;
        }
        if (e->kind[c] == MIXPI_OF_RESULT)
            return mixpi_einsum_wrong(ctx, equation, "a letter of the result is in no operand");
    }
    return MIXP_OK;
}

/* Reads the sizes of the letters from the operands. */
static mixp_result mixpi_einsum_sizes(mixp_call *c, mixpi_einsum *e) {
    for (int part = 0; part < 2; part++) {
        const mixp_tensor *t = c->in[part];
        if (t->rank != e->rank[part])
            return mixpi_bad_shapes(c, "an operand needs one letter for each dimension");
        for (int i = 0; i < t->rank; i++) {
            int64_t *size = &e->size[(int)e->text[part][i]];
            if (part == 1 && (e->kind[(int)e->text[1][i]] & MIXPI_OF_A) && *size != t->shape[i])
                return mixpi_bad_shapes(c, "a letter's dimensions must be equal");
            *size = t->shape[i];
        }
    }
    return MIXP_OK;
}

/* The letters of this kind in the order of `from`, appended to `to`. Returns their elements. */
static int64_t mixpi_einsum_letters(const mixpi_einsum *e, const char *from, int kind, char *to) {
    int64_t count = 1;
    size_t n = strlen(to);
    for (; *from; from++) {
        if (e->kind[(int)*from] != kind) continue;
        to[n++] = *from;
        count *= e->size[(int)*from];
    }
    to[n] = 0;
    return count;
}

/* t, whose dimensions have the letters `from`, with those of `to`. */
static mixp_tensor *mixpi_einsum_permute(
    mixp_context *ctx, mixp_tensor *t, const char *from, const char *to) {
    int dims[MIXP_MAX_RANK], n = 0;
    if (!t || !strcmp(from, to)) return t;
    for (; *to; to++) dims[n++] = (int)(strchr(from, *to) - from);
    return mixp_permute(ctx, t, n, dims);
}

/* Sums an operand over the letters that occur only in it. */
static mixp_tensor *mixpi_einsum_summed(
    mixp_context *ctx, const mixpi_einsum *e, mixp_tensor *t, int part, char *left) {
    int n = 0;
    for (const char *s = e->text[part]; *s; s++) {
        if (e->kind[(int)*s] == 1 << part) t = mixp_sum(ctx, t, n, 0);
        else left[n++] = *s;
    }
    left[n] = 0;
    return t;
}

/* As [batch, rows of a, columns of b]: one product. */
static mixp_tensor *mixpi_einsum_product(
    mixp_context *ctx, const mixpi_einsum *e, mixp_tensor *a, mixp_tensor *b) {
    const int batch = MIXPI_OF_A | MIXPI_OF_B | MIXPI_OF_RESULT, both = MIXPI_OF_A | MIXPI_OF_B;
    char of_a[MIXP_MAX_RANK + 1], of_b[MIXP_MAX_RANK + 1];
    char as_a[MIXP_MAX_RANK + 1] = "", as_b[MIXP_MAX_RANK + 1] = "",
                              as_y[2 * MIXP_MAX_RANK + 1] = "";
    int64_t m[3], n[3], y[MIXP_MAX_RANK];
    a = mixpi_einsum_summed(ctx, e, a, 0, of_a);
    b = mixpi_einsum_summed(ctx, e, b, 1, of_b);

    /* a becomes [batch, rows, summed], and b [batch, summed, columns]. */
    m[0] = mixpi_einsum_letters(e, of_a, batch, as_a);
    m[1] = mixpi_einsum_letters(e, of_a, MIXPI_OF_A | MIXPI_OF_RESULT, as_a);
    m[2] = mixpi_einsum_letters(e, of_a, both, as_a);
    n[0] = mixpi_einsum_letters(e, of_a, batch, as_b);
    n[1] = mixpi_einsum_letters(e, of_a, both, as_b);
    n[2] = mixpi_einsum_letters(e, of_b, MIXPI_OF_B | MIXPI_OF_RESULT, as_b);
    a = mixp_reshape(ctx, mixpi_einsum_permute(ctx, a, of_a, as_a), 3, m);
    b = mixp_reshape(ctx, mixpi_einsum_permute(ctx, b, of_b, as_b), 3, n);

    /* The product is [batch, rows, columns]; the result may have another order. */
    mixpi_einsum_letters(e, of_a, batch, as_y);
    mixpi_einsum_letters(e, of_a, MIXPI_OF_A | MIXPI_OF_RESULT, as_y);
    mixpi_einsum_letters(e, of_b, MIXPI_OF_B | MIXPI_OF_RESULT, as_y);
    for (int i = 0; i < e->rank[2]; i++) y[i] = e->size[(int)as_y[i]];
    a = mixp_reshape(ctx, mixp_matmul(ctx, a, b, 0, 0), e->rank[2], y);
    return mixpi_einsum_permute(ctx, a, as_y, e->text[2]);
}

MIXPREC_API mixp_tensor *mixp_einsum(
    mixp_context *ctx, const char *equation, mixp_tensor *a, mixp_tensor *b) {
    mixpi_outer o;
    mixpi_einsum e;
    mixp_call *c = mixpi_outer_call(&o, ctx, "einsum", 2, a, b, NULL);
    if (!c || mixpi_need_real(c, 2, 2) != MIXP_OK) return NULL;
    if (mixpi_einsum_read(ctx, equation, &e) != MIXP_OK) return NULL;
    if (mixpi_einsum_sizes(c, &e) != MIXP_OK) return NULL;
    return mixpi_einsum_product(ctx, &e, a, b);
}
