/* llama_config.h - reads the config.json of a Llama-like model: a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Llama and Qwen 2, whose queries, keys and values have biases. A key that asks for something else than llama.c
 * computes, or that llama.c does not know, is refused by its name. The formulas
 * of the scalings of rotary positions are those of the `transformers` library,
 * modeling_rope_utils.py.
 */
#ifndef TRAINER_LLAMA_CONFIG_H
#define TRAINER_LLAMA_CONFIG_H

#include <math.h>
#include "known_keys.h"

typedef enum rope_kind {
    ROPE_DEFAULT,
    ROPE_LINEAR,
    ROPE_DYNAMIC,
    ROPE_LLAMA3,
    ROPE_YARN
} rope_kind;

/* config.json. kind: "llama" or "qwen2". Where the numbers of rotary positions stand: in rope_scaling; without it, as
 * newer programs save them, in rope_parameters. */
static struct config {
    char       *path, *text, kind[16];
    const char *root, *rope;
    int64_t     layers, heads, kv_heads, head_dim, width, inner, vocab, positions, eos;
    int         tied, attention_bias, out_bias, mlp_bias; /* biases of q, k, v; of o; of the others */
    double      eps, theta, rope_factor, rope_context,
        rope_scale;                /* rope_scale: yarn's, of sines and cosines */
    double    rope_low, rope_high; /* llama3: frequency factors; yarn: beta_slow, beta_fast */
    rope_kind rope_kind;
} cfg;

/* A number of an object of the JSON at path, or `otherwise` where it is absent or null; NAN: it
 * must be there. */
static double number_of(const char *path, const char *object, const char *key, double otherwise,
                        double low, double high) {
    const char *value = json_find(object, key);
    char        text[64] = "not a number", *end = text;
    double      number = otherwise;
    if (value && (!json_text(value, text, sizeof text) || *value == '"')) strcpy(text, "not a number");
    if (value) number = *value == 't' ? 1 : *value == 'f' ? 0 : strtod(text, &end);
    if (value && *value != 't' && *value != 'f' && *end) number = NAN;
    if (!value && isnan(otherwise))
        die(1, "%s has no %s: use the file that belongs to the weights", path, key);
    if (!(number >= low && number <= high))
        die(1, "%s: %s is %.40s, and must be a number from %g to %g", path, key, text, low, high);
    return number;
}

static int64_t count_of(const char *key, double otherwise) {
    return (int64_t)number_of(cfg.path, cfg.root, key, otherwise, 1, 1 << 24);
}

static int flag_of(const char *key) { return number_of(cfg.path, cfg.root, key, 0, 0, 1) != 0; }

/* Refuses a key that has another value than the one that this program computes; NULL: no value at
 * all. */
static void must_be(const char *path, const char *object, const char *key, const char *only) {
    char        text[64] = "an object or a list";
    const char *value = json_find(object, key);
    json_text(value, text, sizeof text);
    if (!value || (only && strcmp(text, only) == 0)) return;
    if (only && *only >= '0' && *only <= '9' && *value >= '0' && *value <= '9' &&
        atof(text) == atof(only))
        return;
    die(1, "%s: %s is %s, and this program has %s", path, key, text,
        only ? only : "no such models");
}

static void read_rope(void) {
    static const char *const kinds[] = { "default", "linear", "dynamic", "llama3", "yarn" };
    char                     type[64] = "default";
    const char              *name, *value;
    double                   m, all;
    cfg.rope = json_find(cfg.root, "rope_scaling");
    if (!cfg.rope || !json_first(cfg.rope)) cfg.rope = json_find(cfg.root, "rope_parameters");
    if (cfg.rope)
        check_keys(cfg.path, cfg.rope,
                   "rope_type type rope_theta factor partial_rotary_factor original_max_position_embeddings "
                   "low_freq_factor high_freq_factor beta_slow beta_fast mscale mscale_all_dim attention_factor "
                   "truncate max_position_embeddings finetuned", "");
    cfg.theta = number_of(cfg.path, cfg.root, "rope_theta", 10000, 1, 1e12);
    cfg.theta = number_of(cfg.path, cfg.rope, "rope_theta", cfg.theta, 1, 1e12);
    name = json_find(cfg.rope, "rope_type") ? "rope_type" : "type";
    if (json_find(cfg.rope, name) && json_string(json_find(cfg.rope, name), type, sizeof type) < 0)
        strcpy(type, "no text");
    while (cfg.rope_kind <= ROPE_YARN && strcmp(type, kinds[cfg.rope_kind]) != 0) cfg.rope_kind++;
    if (cfg.rope_kind > ROPE_YARN)
        die(1,
            "%s: %s of the rotary positions is %s, and this program has default, linear, dynamic, llama3 and yarn",
            cfg.path, name, type);
    must_be(cfg.path, cfg.rope, "partial_rotary_factor", "1");
    must_be(cfg.path, cfg.root, "partial_rotary_factor", "1");
    cfg.rope_scale = 1;
    if (cfg.rope_kind == ROPE_DEFAULT) return;
    cfg.rope_factor = number_of(cfg.path, cfg.rope, "factor", NAN, 1, 1e6);
    cfg.rope_context = number_of(cfg.path, cfg.root, "original_max_position_embeddings",
                                 (double)cfg.positions, 1, 1e9);
    cfg.rope_context =
        number_of(cfg.path, cfg.rope, "original_max_position_embeddings", cfg.rope_context, 1, 1e9);
    if (cfg.rope_kind == ROPE_LLAMA3) {
        cfg.rope_low = number_of(cfg.path, cfg.rope, "low_freq_factor", NAN, 1e-6, 1e6);
        cfg.rope_high =
            number_of(cfg.path, cfg.rope, "high_freq_factor", NAN, cfg.rope_low * (1 + 1e-9), 1e6);
    }
    if (cfg.rope_kind != ROPE_YARN) return;
    cfg.rope_low = number_of(cfg.path, cfg.rope, "beta_slow", 1, 1e-6, 1e6);
    cfg.rope_high = number_of(cfg.path, cfg.rope, "beta_fast", 32, 1e-6, 1e6);
    m = number_of(cfg.path, cfg.rope, "mscale", 0, 0, 1e6);
    all = number_of(cfg.path, cfg.rope, "mscale_all_dim", 0, 0, 1e6);
    if (m == 0 || all == 0) {
        m = 1;
        all = 0;
    }
    value = json_find(cfg.rope, "attention_factor");
    cfg.rope_scale = (0.1 * m * log(cfg.rope_factor) + 1) / (0.1 * all * log(cfg.rope_factor) + 1);
    if (value) cfg.rope_scale = number_of(cfg.path, cfg.rope, "attention_factor", 1, 1e-6, 1e6);
}

/* The keys that read_config reads; of Qwen 2 also those of a window that is not used. */
#define LLAMA_KEYS                                                                                          \
    "hidden_act hidden_activation pretraining_tp attention_dropout num_hidden_layers num_attention_heads "  \
    "num_key_value_heads hidden_size head_dim intermediate_size vocab_size max_position_embeddings "        \
    "rms_norm_eps tie_word_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor "       \
    "original_max_position_embeddings layer_types quantization_config "

/* Each layer must attend to all tokens. */
static void check_layer_types(void) {
    const char *list = json_find(cfg.root, "layer_types");
    char        type[64];
    if (list && *list != '[') must_be(cfg.path, cfg.root, "layer_types", NULL);
    for (const char *p = list ? json_first(list) : NULL; p; p = json_next(p))
        if (json_string(p, type, sizeof type) < 0 || strcmp(type, "full_attention") != 0)
            die(1, "%s: layer_types has %.40s, and this program has full_attention only", cfg.path, p);
}

static void read_kind(void) {
    const char *type = json_find(cfg.root, "model_type");
    if (!type) die(1, "%s has no model_type: this program reads llama and qwen2 only", cfg.path);
    if (json_string(type, cfg.kind, sizeof cfg.kind) > 0 && strcmp(cfg.kind, "qwen2") == 0) {
        check_keys(cfg.path, cfg.root, COMMON_CONFIG,
                   LLAMA_KEYS "sliding_window max_window_layers"); /* use_sliding_window must be unset */
        cfg.attention_bias = 1;
        return;
    }
    must_be(cfg.path, cfg.root, "model_type", "llama");
    check_keys(cfg.path, cfg.root, COMMON_CONFIG, LLAMA_KEYS "attention_bias mlp_bias");
    cfg.attention_bias = cfg.out_bias = flag_of("attention_bias");
    cfg.mlp_bias = flag_of("mlp_bias");
}

static void read_config(void) {
    const char *wrong, *eos;
    cfg.root = json_check(cfg.text, (int64_t)strlen(cfg.text), &wrong);
    if (!cfg.root || *cfg.root != '{')
        die(1, "%s is malformed at \"%.30s\"", cfg.path, cfg.root ? cfg.root : wrong);
    read_kind();
    check_layer_types();
    must_be(cfg.path, cfg.root, "hidden_act", "silu");
    must_be(cfg.path, cfg.root, "hidden_activation", "silu");
    must_be(cfg.path, cfg.root, "pretraining_tp", "1");
    must_be(cfg.path, cfg.root, "attention_dropout", "0");
    must_be(cfg.path, cfg.root, "quantization_config", NULL);
    cfg.layers = count_of("num_hidden_layers", NAN);
    cfg.heads = count_of("num_attention_heads", NAN);
    cfg.kv_heads = count_of("num_key_value_heads", (double)cfg.heads);
    cfg.width = count_of("hidden_size", NAN);
    cfg.head_dim = count_of("head_dim", (double)(cfg.width / cfg.heads));
    cfg.inner = count_of("intermediate_size", NAN);
    cfg.vocab = count_of("vocab_size", NAN);
    cfg.positions = count_of("max_position_embeddings", 2048);
    cfg.eps = number_of(cfg.path, cfg.root, "rms_norm_eps", 1e-6, 0, 1);
    cfg.tied = flag_of("tie_word_embeddings");
    eos = json_find(cfg.root, "eos_token_id");
    if (eos && *eos == '[') eos = json_first(eos);
    cfg.eos = json_count(eos);
    if (cfg.heads % cfg.kv_heads)
        die(1, "%s: num_key_value_heads does not divide num_attention_heads", cfg.path);
    if (cfg.head_dim % 2) die(1, "%s: head_dim is odd, and rotary positions need pairs", cfg.path);
    read_rope();
}

/* YaRN: the pair of a head that turns `rotations` times in the context of the first training. */
static double yarn_pair(double rotations) {
    return (double)cfg.head_dim * log(cfg.rope_context / (rotations * 2 * 3.14159265358979323846)) /
           (2 * log(cfg.theta));
}

/* The base of the frequencies for a sequence of `length` tokens: dynamic scaling raises it. */
static double rope_base(int64_t length) {
    double d = (double)cfg.head_dim, longer = (double)length / (double)cfg.positions;
    if (cfg.rope_kind != ROPE_DYNAMIC || longer <= 1) return cfg.theta;
    return cfg.theta * pow(cfg.rope_factor * longer - (cfg.rope_factor - 1), d / (d - 2));
}

/* The angle by which pair i of a head turns from one position to the next. */
static double rope_angle(int64_t i) {
    double angle = pow(cfg.theta, -2.0 * (double)i / (double)cfg.head_dim),
           slow = angle / cfg.rope_factor, share, low, high;
    switch (cfg.rope_kind) {
    case ROPE_LINEAR: return slow;
    case ROPE_LLAMA3: /* share: 0 for wavelengths beyond context / low, 1 for those below context / high */
        share = (cfg.rope_context * angle / (2 * 3.14159265358979323846) - cfg.rope_low) /
                (cfg.rope_high - cfg.rope_low);
        share = fmin(fmax(share, 0), 1);
        return (1 - share) * slow + share * angle;
    case ROPE_YARN:
        low = yarn_pair(cfg.rope_high);
        high = yarn_pair(cfg.rope_low);
        if (number_of(cfg.path, cfg.rope, "truncate", 1, 0, 1) != 0) {
            low = floor(low);
            high = ceil(high);
        }
        low = fmax(low, 0);
        high = fmin(high, (double)cfg.head_dim - 1);
        share = fmin(fmax(((double)i - low) / (high == low ? 0.001 : high - low), 0), 1);
        return (1 - share) * angle + share * slow;
    default: return angle;
    }
}

#endif
