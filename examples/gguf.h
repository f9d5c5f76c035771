/* gguf.h - writes and reads GGUF, the files of llama.cpp and of programs built on it
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Writes mixprec's parameters as f32, f16, bf16 or Q8_0, with any metadata. Reads files whose
 * tensors are f32, f16, bf16, Q8_0, Q4_0 or Q4_1 (gguf_values); tensors of other types are listed without their values. Hugging
 * Face's tensor names of GPT-2 and of Llama-like models are translated to GGUF's. The format is
 * version 3 (docs/gguf.md of the ggml project). Include mixprec.h before this file; plain_file.h lies
 * beside it.
 *
 *     gguf_writer *w = gguf_new("gpt2");
 *     gguf_put_u32(w, "gpt2.block_count", 12);
 *     gguf_put_tensor(w, "token_embd.weight", GGUF_F16, tokens, 0);
 *     if (gguf_write(w, "model.gguf", error, sizeof error) != MIXP_OK) puts(error);
 *
 * gguf_write and gguf_read return MIXP_ERR_IO, MIXP_ERR_FORMAT (malformed, or not enough memory for
 * it) or, of gguf_write, MIXP_ERR_ARGUMENT (a tensor that GGUF cannot hold), with a text in `error`.
 * Numbers are little-endian, and so must the machine be.
 */
#ifndef GGUF_H
#define GGUF_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "plain_file.h"

enum { GGUF_NAME = 96, GGUF_ALIGN = 32, GGUF_BLOCK = 32 /* values in a block of Q8_0 */ };

/* Numbers of the specification: types of tensors, and of metadata. */
typedef enum gguf_type { GGUF_F32 = 0, GGUF_F16 = 1, GGUF_Q8_0 = 8, GGUF_BF16 = 30 } gguf_type;
typedef enum gguf_kind {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_FLOAT,
    GGUF_BOOL,
    GGUF_TEXT,
    GGUF_LIST,
    GGUF_U64,
    GGUF_I64,
    GGUF_DOUBLE,
    GGUF_KINDS
} gguf_kind;

/* The type called "f32", "f16", "bf16" or "q8_0", or -1. */
static inline int gguf_type_named(const char *name) {
    static const char *const names[] = { "f32", "f16", "q8_0", "bf16" };
    static const int         types[] = { GGUF_F32, GGUF_F16, GGUF_Q8_0, GGUF_BF16 };
    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0) return types[i];
    return -1;
}

/* ==== Names ========================================================================= */

static const char *const gguf_names[][2] = {
    { "transformer.wte", "token_embd" },   { "transformer.wpe", "position_embd" },
    { "transformer.ln_f", "output_norm" }, { "model.embed_tokens", "token_embd" },
    { "model.norm", "output_norm" },       { "lm_head", "output" },
};
static const char *const gguf_parts[][2] = {
    { "ln_1", "attn_norm" },
    { "attn.c_attn", "attn_qkv" },
    { "attn.c_proj", "attn_output" },
    { "ln_2", "ffn_norm" },
    { "mlp.c_fc", "ffn_up" },
    { "mlp.c_proj", "ffn_down" },
    { "input_layernorm", "attn_norm" },
    { "self_attn.q_proj", "attn_q" },
    { "self_attn.k_proj", "attn_k" },
    { "self_attn.v_proj", "attn_v" },
    { "self_attn.o_proj", "attn_output" },
    { "post_attention_layernorm", "ffn_norm" },
    { "mlp.gate_proj", "ffn_gate" },
    { "mlp.up_proj", "ffn_up" },
    { "mlp.down_proj", "ffn_down" },
};

/* The name in GGUF of a tensor of GPT-2 ("transformer.h.0.ln_1.weight") or of a Llama
 * ("model.layers.0. ..."), in `to`, which has GGUF_NAME bytes. Returns 0 if GGUF
 * has no name for the tensor. */
static inline int gguf_name(const char *name, char *to) {
    const char *end = strrchr(name, '.'), *part = NULL;
    int         block = -1, length = 0, n;
    if (!end) return 0;
    if (sscanf(name, "transformer.h.%d.%n", &block, &length) == 1 && length) part = name + length;
    else if (sscanf(name, "model.layers.%d.%n", &block, &length) == 1 && length)
        part = name + length;
    n = part && part < end ? (int)(end - part) : (int)(end - name);
    for (size_t i = 0; !part && i < sizeof gguf_names / sizeof gguf_names[0]; i++)
        if ((int)strlen(gguf_names[i][0]) == n && strncmp(name, gguf_names[i][0], (size_t)n) == 0)
            return snprintf(to, GGUF_NAME, "%s%s", gguf_names[i][1], end) < GGUF_NAME;
    for (size_t i = 0; part && i < sizeof gguf_parts / sizeof gguf_parts[0]; i++)
        if ((int)strlen(gguf_parts[i][0]) == n && strncmp(part, gguf_parts[i][0], (size_t)n) == 0)
            return snprintf(to, GGUF_NAME, "blk.%d.%s%s", block, gguf_parts[i][1], end) < GGUF_NAME;
    return 0;
}

/* ==== Rows of heads ================================================================= */

/* Rotary positions turn pairs (i, i + d/2) of a head in Hugging Face's files, and pairs (2i, 2i +
 * 1) in GGUF's. So the rows of the weights of queries and keys [heads * d, cols] have another order there. d is even.
 * Of more dimensions than 2, cols counts the values of a row. */
static inline void gguf_turn(float *to, const float *from, int64_t rows, int64_t cols,
                             int64_t heads) {
    int64_t d = rows / heads;
    for (int64_t r = 0; r < rows; r++) {
        int64_t k = r % d, there = r - k + (k < d / 2 ? 2 * k : 2 * (k - d / 2) + 1);
        memcpy(to + there * cols, from + r * cols, (size_t)cols * sizeof *to);
    }
}

static inline void gguf_turn_back(void *to, const void *from, int64_t rows, size_t row_bytes,
                                  int64_t heads) {
    int64_t d = rows / heads;
    for (int64_t r = 0; r < rows; r++) {
        int64_t k = r % d, there = r - k + (k < d / 2 ? 2 * k : 2 * (k - d / 2) + 1);
        memcpy((char *)to + (size_t)r * row_bytes, (const char *)from + (size_t)there * row_bytes, row_bytes);
    }
}

/* ==== Writing ======================================================================= */

typedef struct gguf_tensor {
    char               name[GGUF_NAME];
    gguf_type          type;
    const mixp_tensor *values;
    const float       *floats;       /* instead of values: `count` of them */
    int64_t            count, heads; /* heads: gguf_turn's, or 0 */
} gguf_tensor;

typedef struct gguf_writer {
    unsigned char *meta; /* the metadata's bytes */
    size_t         length, room;
    gguf_tensor   *tensors;
    uint64_t       pairs, n; /* of metadata; of tensors */
    int            failed;   /* 1: out of memory, or wrong is set */
    const char    *wrong;    /* about a tensor that was put, or NULL */
    int (*read)(const mixp_tensor *t, float *to); /* the values of a tensor, instead of mixp_read's; 0: it failed */
} gguf_writer;

static inline void gguf_bytes(gguf_writer *w, const void *bytes, size_t n) {
    if (w->length + n > w->room) {
        size_t         room = 2 * (w->length + n);
        unsigned char *meta = (unsigned char *)realloc(w->meta, room);
        if (!meta) {
            w->failed = 1;
            return;
        }
        w->meta = meta;
        w->room = room;
    }
    memcpy(w->meta + w->length, bytes, n);
    w->length += n;
}

static inline void gguf_u32(gguf_writer *w, uint32_t value) { gguf_bytes(w, &value, 4); }
static inline void gguf_u64(gguf_writer *w, uint64_t value) { gguf_bytes(w, &value, 8); }

/* A text of n bytes. */
static inline void gguf_text_n(gguf_writer *w, const char *text, size_t n) {
    gguf_u64(w, n);
    gguf_bytes(w, text, n);
}

static inline void gguf_key(gguf_writer *w, const char *key, gguf_kind kind) {
    gguf_text_n(w, key, strlen(key));
    gguf_u32(w, (uint32_t)kind);
    w->pairs++;
}

static inline void gguf_put_u32(gguf_writer *w, const char *key, uint32_t value) {
    gguf_key(w, key, GGUF_U32);
    gguf_u32(w, value);
}

static inline void gguf_put_float(gguf_writer *w, const char *key, float value) {
    gguf_key(w, key, GGUF_FLOAT);
    gguf_bytes(w, &value, 4);
}

static inline void gguf_put_bool(gguf_writer *w, const char *key, int value) {
    unsigned char byte = value != 0;
    gguf_key(w, key, GGUF_BOOL);
    gguf_bytes(w, &byte, 1);
}

static inline void gguf_put_text(gguf_writer *w, const char *key, const char *text) {
    gguf_key(w, key, GGUF_TEXT);
    gguf_text_n(w, text, strlen(text));
}

/* Begins a list of `count` elements, which the caller then puts by gguf_text_n, gguf_u32 or
 * gguf_bytes. */
static inline void gguf_put_list(gguf_writer *w, const char *key, gguf_kind kind, uint64_t count) {
    gguf_key(w, key, GGUF_LIST);
    gguf_u32(w, (uint32_t)kind);
    gguf_u64(w, count);
}

/* A new writer for a model of this architecture, "llama" or "gpt2". NULL: out of memory. */
static inline gguf_writer *gguf_new(const char *architecture) {
    gguf_writer *w = (gguf_writer *)calloc(1, sizeof *w);
    if (w) gguf_put_text(w, "general.architecture", architecture);
    return w;
}

/* Keeps the first reason why gguf_write will refuse. */
static inline void gguf_refuse(gguf_writer *w, const char *wrong) {
    if (!w->wrong) w->wrong = wrong;
    w->failed = 1;
}

static inline gguf_tensor *gguf_add(gguf_writer *w, const char *name, gguf_type type) {
    gguf_tensor *all = (gguf_tensor *)realloc(w->tensors, (size_t)(w->n + 1) * sizeof *all), *t;
    if (!all) {
        w->failed = 1;
        return NULL;
    }
    w->tensors = all;
    if (!name[0] || strlen(name) >= GGUF_NAME)
        gguf_refuse(w, "the name of a tensor is longer than 95 bytes, or empty");
    for (uint64_t i = 0; i < w->n; i++)
        if (strcmp(all[i].name, name) == 0) gguf_refuse(w, "two tensors have one name");
    t = &all[w->n++];
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%s", name);
    t->type = type;
    return t;
}

/* Adds a parameter, which is read when the file is written. Vectors are stored as f32, as all
 * programs do, and so are matrices for Q8_0 whose row length is not a multiple of 32. heads: see
 * gguf_turn; 0: the rows keep their order. gguf_write then fails, with MIXP_ERR_ARGUMENT, if the
 * tensor has no dimension, more than 4 or no values, if its name is taken or has no place in
 * GGUF_NAME bytes, or if its rows are not `heads` heads of an even number of rows each. */
static inline void gguf_put_tensor(gguf_writer *w, const char *name, gguf_type type,
                                   const mixp_tensor *values, int64_t heads) {
    int whole = values->rank > 1 &&
                (type != GGUF_Q8_0 || values->shape[values->rank - 1] % GGUF_BLOCK == 0);
    gguf_tensor *t = gguf_add(w, name, whole ? type : GGUF_F32);
    if (!t) return;
    t->values = values;
    t->count = values->count;
    t->heads = heads;
    if (values->rank < 1 || values->rank > 4)
        gguf_refuse(w, "a tensor has more than 4 dimensions, or none");
    else if (values->count < 1) gguf_refuse(w, "a tensor has no values");
    else if (heads < 0 || (heads && values->shape[0] % heads) ||
             (heads && values->shape[0] / heads % 2))
        gguf_refuse(w, "a tensor's rows do not divide into heads with an even number of rows");
}

/* Adds a vector of floats, which must stay until the file is written. */
static inline void gguf_put_floats(gguf_writer *w, const char *name, const float *floats,
                                   int64_t count) {
    gguf_tensor *t = gguf_add(w, name, GGUF_F32);
    if (!t) return;
    t->floats = floats;
    t->count = count;
    if (count < 1) gguf_refuse(w, "a tensor has no values");
}

static inline size_t gguf_size(gguf_type type, int64_t count) {
    if (type == GGUF_Q8_0) return (size_t)(count / GGUF_BLOCK) * (2 + GGUF_BLOCK);
    return (size_t)count * (type == GGUF_F32 ? 4 : 2);
}

static inline uint64_t gguf_padded(uint64_t n) {
    return (n + GGUF_ALIGN - 1) / GGUF_ALIGN * GGUF_ALIGN;
}

/* Q8_0: each 32 values are an f16 scale and 32 bytes. The scale is their largest size / 127;
 * halves round away from zero, with the unrounded scale, as ggml does. */
static inline void gguf_quantise(unsigned char *to, const float *from, int64_t count) {
    for (int64_t b = 0; b < count; b += GGUF_BLOCK, to += 2 + GGUF_BLOCK) {
        float    most = 0, scale, inverse;
        mixp_f16 half;
        for (int i = 0; i < GGUF_BLOCK; i++) most = fmaxf(most, fabsf(from[b + i]));
        scale = most / 127;
        inverse = scale != 0 ? 1 / scale : 0;
        half = mixp_f16_from_f32(scale);
        memcpy(to, &half.bits, 2);
        for (int i = 0; i < GGUF_BLOCK; i++) {
            float q = roundf(from[b + i] * inverse);
            to[2 + i] = (unsigned char)(q >= -127 && q <= 127 ? (int)q : 0); /* 0 for a NaN */
        }
    }
}

static inline float gguf_half(const unsigned char *from) {
    mixp_f16 half;
    memcpy(&half.bits, from, 2);
    return mixp_f32_from_f16(half);
}

/* The values of Q8_0, which f32 holds exactly. */
static inline void gguf_dequantise(float *to, const unsigned char *from, int64_t count) {
    for (int64_t b = 0; b < count; b += GGUF_BLOCK, from += 2 + GGUF_BLOCK) {
        float scale = gguf_half(from);
        for (int i = 0; i < GGUF_BLOCK; i++) to[b + i] = scale * (float)(signed char)from[2 + i];
    }
}

/* The values of Q4_0, scale (code - 8), and of Q4_1, scale code + least. A block has its first 16 codes in the low
 * halves of its bytes, the others in the high halves. */
static inline void gguf_dequantise4(float *to, const unsigned char *from, int64_t count, int has_least) {
    const int head = has_least ? 4 : 2, half = GGUF_BLOCK / 2;
    for (int64_t b = 0; b < count; b += GGUF_BLOCK, from += head + half) {
        float scale = gguf_half(from), least = has_least ? gguf_half(from + 2) : 0;
        for (int i = 0; i < GGUF_BLOCK; i++) {
            int code = from[head + i % half] >> (i < half ? 0 : 4) & 15;
            to[b + i] = scale * (float)(has_least ? code : code - 8) + least;
        }
    }
}

/* Writes one tensor and the zeros after it. Returns 0 on failure. */
static inline int gguf_write_tensor(const gguf_writer *w, FILE *f, const gguf_tensor *t, float *spare,
                                    unsigned char *bytes) {
    static const char  zeros[GGUF_ALIGN] = { 0 };
    const mixp_tensor *v = t->values;
    const float       *floats = t->floats ? t->floats : spare;
    size_t size = gguf_size(t->type, t->count), pad = (size_t)(gguf_padded(size) - size);
    if (v && !(w->read ? w->read(v, spare) : mixp_read_f32(v, spare, v->count) == MIXP_OK)) return 0;
    if (v && t->heads) {
        gguf_turn(spare + t->count, spare, v->shape[0], v->count / v->shape[0], t->heads);
        floats = spare + t->count;
    }
    if (t->type == GGUF_Q8_0) gguf_quantise(bytes, floats, t->count);
    else
        mixp_convert(bytes,
                     t->type == GGUF_F32   ? MIXP_F32
                     : t->type == GGUF_F16 ? MIXP_F16
                                           : MIXP_BF16,
                     floats, MIXP_F32, t->count);
    return fwrite(bytes, 1, size, f) == size && fwrite(zeros, 1, pad, f) == pad;
}

/* Appends names, shapes and places of the tensors to the metadata. */
static inline void gguf_put_infos(gguf_writer *w) {
    uint64_t at = 0;
    for (uint64_t i = 0; i < w->n; i++) {
        const gguf_tensor *t = &w->tensors[i];
        int                rank = t->values ? t->values->rank : 1;
        gguf_text_n(w, t->name, strlen(t->name));
        gguf_u32(w, (uint32_t)rank);
        for (int k = rank - 1; k >= 0; k--)
            gguf_u64(w, (uint64_t)(t->values ? t->values->shape[k] : t->count));
        gguf_u32(w, (uint32_t)t->type);
        gguf_u64(w, at);
        at += gguf_padded(gguf_size(t->type, t->count));
    }
}

static inline int gguf_write_all(gguf_writer *w, FILE *f) {
    static const char zeros[GGUF_ALIGN] = { 0 };
    const uint32_t    version = 3;
    int64_t           most = 1;
    size_t            pad;
    float            *spare;
    int               good;
    gguf_put_infos(w);
    pad = (size_t)(gguf_padded(24 + w->length) - 24 - w->length);
    for (uint64_t i = 0; i < w->n; i++)
        if (w->tensors[i].count > most) most = w->tensors[i].count;
    spare = (float *)malloc(3 * (size_t)most * sizeof *spare);
    good = spare && !w->failed && fwrite("GGUF", 1, 4, f) == 4 && fwrite(&version, 4, 1, f) == 1 &&
           fwrite(&w->n, 8, 1, f) == 1 && fwrite(&w->pairs, 8, 1, f) == 1 &&
           fwrite(w->meta, 1, w->length, f) == w->length && fwrite(zeros, 1, pad, f) == pad;
    for (uint64_t i = 0; good && i < w->n; i++)
        good = gguf_write_tensor(w, f, &w->tensors[i], spare, (unsigned char *)(spare + 2 * most));
    free(spare);
    return good;
}

static inline mixp_result gguf_says(mixp_result result, char *error, size_t size, const char *path,
                                    const char *what) {
    if (error && size) snprintf(error, size, "%.160s: %s", path, what);
    return result;
}

/* Writes the file and frees the writer: first PATH.tmp, which then gets the name. On failure the
 * file at path is unchanged. */
static inline mixp_result gguf_write(gguf_writer *w, const char *path, char *error,
                                     size_t error_size) {
    char        temporary[1280];
    const char *wrong = w->wrong;
    FILE       *f = wrong ? NULL : plain_begin(path, temporary, sizeof temporary);
    int         good = f && gguf_write_all(w, f);
    if (f) good = plain_end_after(f, temporary, path, good ? 0 : EIO) == 0;
    free(w->meta);
    free(w->tensors);
    free(w);
    if (wrong) return gguf_says(MIXP_ERR_ARGUMENT, error, error_size, path, wrong);
    return good ? MIXP_OK
                : gguf_says(MIXP_ERR_IO, error, error_size, path,
                            "cannot be written: is it a file in a folder that is there, with room?");
}

/* ==== Reading ======================================================================= */

/* One pair of metadata, inside the file's bytes. count: elements of a list. */
typedef struct gguf_pair {
    const char          *key;
    size_t               key_length;
    gguf_kind            kind, of;
    uint64_t             count;
    const unsigned char *value;
} gguf_pair;

typedef struct gguf {
    unsigned char *bytes;
    size_t         size, at; /* at: what has been read */
    gguf_pair     *pairs;
    mixp_st_entry *entries;
    char (*names)[GGUF_NAME];
    uint64_t    n_pairs, n;
    const char *wrong; /* the first error, or NULL */
} gguf;

static inline void gguf_free(gguf *g) {
    if (!g) return;
    free(g->bytes);
    free(g->pairs);
    free(g->entries);
    free(g->names);
    free(g);
}

/* The next n bytes of the file, or NULL at its end. */
static inline const unsigned char *gguf_take(gguf *g, uint64_t n) {
    const unsigned char *p = g->bytes + g->at;
    if (g->wrong || n > g->size - g->at) {
        if (!g->wrong) g->wrong = "the file ends too early";
        return NULL;
    }
    g->at += (size_t)n;
    return p;
}

static inline uint64_t gguf_take_number(gguf *g, size_t bytes) {
    const unsigned char *p = gguf_take(g, bytes);
    uint64_t             n = 0;
    for (size_t i = bytes; p && i-- > 0;) n = n << 8 | p[i];
    return n;
}

/* A text inside the file's bytes. */
static inline const char *gguf_take_text(gguf *g, size_t *length) {
    *length = (size_t)gguf_take_number(g, 8);
    return (const char *)gguf_take(g, *length);
}

static inline size_t gguf_kind_size(gguf_kind kind) {
    static const unsigned char sizes[GGUF_KINDS] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
    return sizes[kind];
}

static inline gguf_kind gguf_take_kind(gguf *g) {
    uint64_t kind = gguf_take_number(g, 4);
    if (kind < GGUF_KINDS) return (gguf_kind)kind;
    if (!g->wrong) g->wrong = "a value of its metadata has an unknown type";
    return GGUF_U8;
}

static inline void gguf_take_pair(gguf *g, gguf_pair *p) {
    size_t length;
    p->key = gguf_take_text(g, &p->key_length);
    p->kind = p->of = gguf_take_kind(g);
    p->count = 1;
    if (p->kind == GGUF_LIST) {
        p->of = gguf_take_kind(g);
        p->count = gguf_take_number(g, 8);
        if (p->of == GGUF_LIST && !g->wrong) g->wrong = "its metadata has lists of lists";
    }
    p->value = g->bytes + g->at;
    if (p->of != GGUF_TEXT && p->count > g->size) gguf_take(g, g->size + 1);
    else if (p->of != GGUF_TEXT) gguf_take(g, p->count * gguf_kind_size(p->of));
    for (uint64_t i = 0; p->of == GGUF_TEXT && i < p->count && !g->wrong; i++)
        gguf_take_text(g, &length);
}

/* The pair of a key, or NULL. */
static inline const gguf_pair *gguf_pair_of(const gguf *g, const char *key) {
    for (uint64_t i = 0; i < g->n_pairs; i++)
        if (g->pairs[i].key_length == strlen(key) && memcmp(g->pairs[i].key, key, strlen(key)) == 0)
            return &g->pairs[i];
    return NULL;
}

/* The number of a key, of whatever type, or `otherwise`. */
static inline double gguf_number(const gguf *g, const char *key, double otherwise) {
    const gguf_pair *p = gguf_pair_of(g, key);
    uint64_t         n = 0;
    float            f;
    double           d;
    if (!p || p->kind == GGUF_LIST || p->kind == GGUF_TEXT) return otherwise;
    memcpy(&n, p->value, gguf_kind_size(p->kind));
    if (p->kind == GGUF_FLOAT) {
        memcpy(&f, p->value, 4);
        return (double)f;
    }
    if (p->kind == GGUF_DOUBLE) {
        memcpy(&d, p->value, 8);
        return d;
    }
    if (p->kind == GGUF_I8) return (int8_t)n;
    if (p->kind == GGUF_I16) return (int16_t)n;
    if (p->kind == GGUF_I32) return (int32_t)n;
    return p->kind == GGUF_I64 ? (double)(int64_t)n : (double)n;
}

/* The text of a key, without a '\0' after it, or NULL. */
static inline const char *gguf_text(const gguf *g, const char *key, size_t *length) {
    const gguf_pair *p = gguf_pair_of(g, key);
    uint64_t         n = 0;
    if (!p || p->kind != GGUF_TEXT) return NULL;
    memcpy(&n, p->value, 8);
    *length = (size_t)n;
    return (const char *)p->value + 8;
}

static inline int gguf_text_is(const gguf *g, const char *key, const char *text) {
    size_t      n;
    const char *found = gguf_text(g, key, &n);
    return found && n == strlen(text) && memcmp(found, text, n) == 0;
}

static inline const mixp_st_entry *gguf_find(const gguf *g, const char *name) {
    for (uint64_t i = 0; i < g->n; i++)
        if (strcmp(g->entries[i].name, name) == 0) return &g->entries[i];
    return NULL;
}

/* Bytes of a block of 32 values in the types that are read; 0: another type. The name of a type in ggml's enum. */
static inline size_t gguf_block_bytes(uint64_t type) { return type == 2 ? 18 : type == 3 ? 20 : type == GGUF_Q8_0 ? 34 : 0; }
static inline const char *gguf_type_name(uint64_t type) {
    static const char *const names[] = { "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1",
                                         "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K" };
    return type < sizeof names / sizeof names[0] ? names[type] : "another type";
}

/* Name, shape, type and place of a tensor. data is its place until all are known. */
static inline uint64_t gguf_take_info(gguf *g, mixp_st_entry *e, char *name) {
    size_t      length;
    const char *text = gguf_take_text(g, &length);
    uint64_t    rank = gguf_take_number(g, 4), type, count = 1;
    if (!g->wrong && (length >= GGUF_NAME || !length || memchr(text, 0, length)))
        g->wrong = "the name of a tensor is too long, or none";
    if (!g->wrong && (rank < 1 || rank > 4))
        g->wrong = "a tensor has more than 4 dimensions, or none";
    if (g->wrong) return 0;
    memcpy(name, text, length);
    e->name = name;
    e->rank = (int)rank;
    for (uint64_t k = rank; k-- > 0;) {
        uint64_t n = gguf_take_number(g, 8);
        if (!g->wrong && (n < 1 || n > g->size || count * n / n != count || count * n > g->size))
            g->wrong = "a tensor is larger than the file";
        e->shape[k] = (int64_t)n;
        count *= n;
    }
    type = gguf_take_number(g, 4);
    e->dtype = type == GGUF_F32    ? MIXP_F32
               : type == GGUF_F16  ? MIXP_F16
               : type == GGUF_BF16 ? MIXP_BF16
                                   : MIXP_DTYPE_COUNT;
    e->type = e->dtype != MIXP_DTYPE_COUNT ? mixp_dtype_name(e->dtype) : gguf_type_name(type);
    if (e->dtype != MIXP_DTYPE_COUNT) e->bytes = (size_t)count * mixp_dtype_size(e->dtype);
    else if (e->shape[rank - 1] % GGUF_BLOCK == 0) e->bytes = (size_t)(count / GGUF_BLOCK) * gguf_block_bytes(type);
    else if (gguf_block_bytes(type) && !g->wrong) g->wrong = "rows do not divide into blocks of 32";
    return gguf_take_number(g, 8);
}

/* Does gguf_values read a tensor of this entry? */
static inline int gguf_has_values(const mixp_st_entry *e) { return e->dtype != MIXP_DTYPE_COUNT || e->bytes; }

/* The values of a tensor that was read, in f32. Returns 0 for a type that has none. */
static inline int gguf_values(const mixp_st_entry *e, float *to, int64_t count) {
    const unsigned char *from = (const unsigned char *)e->data;
    if (e->dtype != MIXP_DTYPE_COUNT) mixp_convert(to, MIXP_F32, e->data, e->dtype, count);
    else if (strcmp(e->type, "Q8_0") == 0) gguf_dequantise(to, from, count);
    else if (e->bytes) gguf_dequantise4(to, from, count, strcmp(e->type, "Q4_1") == 0);
    else return 0;
    return 1;
}

static inline int gguf_by_name(const void *a, const void *b) {
    const mixp_st_entry *x = (const mixp_st_entry *)a, *y = (const mixp_st_entry *)b;
    return strcmp(x->name, y->name);
}

/* Reads the tensors' infos, then gives each its data. */
static inline void gguf_take_tensors(gguf *g) {
    uint64_t *places = (uint64_t *)calloc((size_t)g->n + 1, sizeof *places), align = 8, begin;
    double    aligned = gguf_number(g, "general.alignment", GGUF_ALIGN);
    if (!places) g->wrong = "out of memory";
    for (uint64_t i = 0; !g->wrong && i < g->n; i++)
        places[i] = gguf_take_info(g, &g->entries[i], g->names[i]);
    if (aligned >= 8 && aligned <= 1 << 20) align = (uint64_t)aligned;
    if (!g->wrong && ((double)align != aligned || (align & (align - 1))))
        g->wrong = "its general.alignment is not a power of 2 of at least 8";
    begin = g->wrong ? 0 : (g->at + align - 1) / align * align;
    for (uint64_t i = 0; !g->wrong && i < g->n; i++) {
        mixp_st_entry *e = &g->entries[i];
        if (places[i] % align) g->wrong = "a tensor is not aligned";
        else if (begin > g->size || places[i] > g->size - begin ||
                 e->bytes > g->size - begin - places[i])
            g->wrong = "the file ends too early";
        else e->data = g->bytes + begin + places[i];
    }
    free(places);
    if (g->wrong) return;
    qsort(g->entries, (size_t)g->n, sizeof *g->entries, gguf_by_name);
    for (uint64_t i = 0; i + 1 < g->n; i++)
        if (strcmp(g->entries[i].name, g->entries[i + 1].name) == 0)
            g->wrong = "two tensors have one name";
}

static inline void gguf_parse(gguf *g) {
    const unsigned char *magic = gguf_take(g, 4);
    uint64_t             version = gguf_take_number(g, 4);
    if (!magic || memcmp(magic, "GGUF", 4) != 0) {
        g->wrong = "it is not a GGUF file";
        return;
    }
    g->n = gguf_take_number(g, 8);
    g->n_pairs = gguf_take_number(g, 8);
    if (version != 2 && version != 3) {
        g->wrong = "its version is neither 2 nor 3";
        return;
    }
    if (g->n > g->size / 24 || g->n_pairs > g->size / 13) {
        g->n = g->n_pairs = 0;
        g->wrong = "it has fewer bytes than its counts need";
        return;
    }
    g->pairs = (gguf_pair *)calloc((size_t)g->n_pairs + 1, sizeof *g->pairs);
    g->entries = (mixp_st_entry *)calloc((size_t)g->n + 1, sizeof *g->entries);
    g->names = (char(*)[GGUF_NAME])calloc((size_t)g->n + 1, GGUF_NAME);
    if (!g->pairs || !g->entries || !g->names) {
        g->wrong = "out of memory";
        return;
    }
    for (uint64_t i = 0; i < g->n_pairs && !g->wrong; i++) gguf_take_pair(g, &g->pairs[i]);
    if (!g->wrong) gguf_take_tensors(g);
}

/* Reads a whole file, which is untrusted. Free *out by gguf_free; NULL on error. */
static inline mixp_result gguf_read(const char *path, gguf **out, char *error, size_t error_size) {
    gguf *g = (gguf *)calloc(1, sizeof *g);
    FILE *f = plain_open(path);
    long  size = -1;
    int   failed;
    const char *why;
    *out = NULL;
    if (f && fseek(f, 0, SEEK_END) == 0) size = ftell(f);
    if (f) rewind(f);
    if (g && size >= 0) g->bytes = (unsigned char *)malloc((size_t)size + 1);
    failed =
        !f || size < 0 || !g || !g->bytes || fread(g->bytes, 1, (size_t)size, f) != (size_t)size;
    why = f ? "cannot be read" : plain_error();
    if (f) fclose(f);
    if (failed) {
        gguf_free(g);
        return gguf_says(MIXP_ERR_IO, error, error_size, path, why);
    }
    g->size = (size_t)size;
    gguf_parse(g);
    if (!g->wrong) {
        *out = g;
        return MIXP_OK;
    }
    gguf_says(MIXP_ERR_FORMAT, error, error_size, path, g->wrong);
    gguf_free(g);
    return MIXP_ERR_FORMAT;
}

#endif
