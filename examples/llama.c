/* llama.c - fine-tunes a Llama-like model from Hugging Face's files on a CPU, all weights or LoRA
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     cc -O2 -fopenmp -I. examples/llama.c -o llama -lm
 *     ./llama SmolLM2-135M --data chats.jsonl --lora 8 --out tuned --prompt "Who wrote Hamlet?"
 *
 * MODEL is a folder with config.json, tokenizer.json and model.safetensors, or its shards with
 * their index; or a FILE.gguf. Weights are f32, f16 or bf16. This file has the options, weights,
 * layers, data, training, sample and files, in this order. `llama --help` lists the options,
 * docs/llama.md explains them. Equal arguments give equal bits with any number of threads. Exit
 * status: 0 done, 1 failed, 2 wrong usage. */
#define _XOPEN_SOURCE 700 /* fnmatch, mkdir, getrusage, clock_gettime */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <sys/resource.h>
#include <time.h>
#include "trainer/gguf_words.h"
#include "trainer/isa.h"
#include "trainer/llama_config.h"
#include "trainer/llama_data.h"
#include "trainer/llama_options.h"
#include "trainer/weights.h"

/* ---- Weights --------------------------------------------------------------------------- */

/* y = x w' + b + scale (x a') b'; b NULL: no bias; a NULL: no adapter. */
typedef struct layer {
    mixp_tensor *w, *bias, *a, *b;
} layer;

static const char *const linear_names[] = { "self_attn.q_proj", "self_attn.k_proj",
                                            "self_attn.v_proj", "self_attn.o_proj",
                                            "mlp.gate_proj",    "mlp.up_proj",
                                            "mlp.down_proj" };
enum { Q, K, V, O, GATE, UP, DOWN, LINEARS };
typedef struct block {
    mixp_tensor *norm1, *norm2;
    layer        linear[LINEARS];
} block;

/* Keys and values of the earlier tokens of a sample, [layers, room, width of k], in f32, which
 * holds every dtype. */
typedef struct kv_cache {
    float  *k, *v;
    int64_t past, room, width;
} kv_cache;

static struct model {
    mixp_context   *ctx;
    mixp_optimizer *adamw;
    mixp_scaler    *scaler;
    mixp_dtype      dtype; /* of products */
    mixp_tensor    *tokens, *norm, *head;
    block          *blocks;
    float           lora_scale;
    int64_t         rank;  /* rank of the adapters; 0: the model has no adapters */
    kv_cache       *cache; /* NULL while training */
    weight_files    files;
    gguf           *gguf; /* NULL: the weights are in `files` */
} m;

static void check(const char *doing) {
    const char *why;
    if (mixp_context_error(m.ctx, &why) != MIXP_OK) die(1, "%s: %s", doing, why);
}

#include "trainer/llama_lora.h"
#include "trainer/llama_files.h"

static mixp_tensor *load_part(int64_t i, const char *part, const char *of, mixp_dtype dtype,
                              int64_t rows, int64_t cols) {
    char name[96];
    snprintf(name, sizeof name, "model.layers.%lld.%s.%s", (long long)i, part, of);
    return load(dtype, rows, cols, name);
}

static void load_block(block *b, int64_t i, mixp_dtype dtype) {
    int64_t q = cfg.heads * cfg.head_dim, kv = cfg.kv_heads * cfg.head_dim, w = cfg.width,
            in = cfg.inner;
    const int64_t shape[LINEARS][2] = { { q, w },  { kv, w }, { kv, w }, { w, q },
                                        { in, w }, { in, w }, { w, in } };
    b->norm1 = load_part(i, "input_layernorm", "weight", MIXP_F32, w, 0);
    b->norm2 = load_part(i, "post_attention_layernorm", "weight", MIXP_F32, w, 0);
    for (int k = 0; k < LINEARS; k++) {
        b->linear[k].w = load_part(i, linear_names[k], "weight", dtype, shape[k][0], shape[k][1]);
        if (k < O ? cfg.attention_bias : k == O ? cfg.out_bias : cfg.mlp_bias)
            b->linear[k].bias = load_part(i, linear_names[k], "bias", MIXP_F32, shape[k][0], 0);
    }
}

/* Frozen matrices that are only multiplied in bf16 are stored in bf16: their casts would be the
 * same in each step. */
static void load_model(void) {
    mixp_dtype frozen = opt.lora > 0 || opt.adapter ? MIXP_BF16 : MIXP_F32;
    mixp_dtype dtype = m.dtype == MIXP_BF16 ? frozen : MIXP_F32;
    m.blocks = (block *)calloc((size_t)cfg.layers, sizeof *m.blocks);
    if (!m.blocks) die(1, "out of memory");
    m.tokens = m.head = load(MIXP_F32, cfg.vocab, cfg.width, "model.embed_tokens.weight");
    for (int64_t i = 0; i < cfg.layers; i++) load_block(&m.blocks[i], i, dtype);
    m.norm = load(MIXP_F32, cfg.width, 0, "model.norm.weight");
    if (!cfg.tied) m.head = load(dtype, cfg.vocab, cfg.width, "lm_head.weight");
    check_extra();
    check("loading the model");
}

/* ---- Layers ---------------------------------------------------------------------------- */

static mixp_tensor *linear(mixp_tensor *x, const layer *l) {
    mixp_tensor *y = mixp_linear(m.ctx, x, l->w, l->bias), *low;
    if (!l->a) return y;
    low = mixp_linear(m.ctx, mixp_linear(m.ctx, x, l->a, NULL), l->b, NULL);
    return mixp_add(m.ctx, y, mixp_scale(m.ctx, low, m.lora_scale));
}

/* Turns pairs (i, i + d/2) of the heads of x[batch, t, heads * d] by their angles at positions
 * first, first + 1, ... */
static mixp_tensor *turn_by_table(mixp_tensor *x, int64_t first) {
    int64_t t = x->shape[1], half = cfg.head_dim / 2, table[3] = { t, 1, half };
    int64_t heads[4] = { x->shape[0], t, x->shape[2] / cfg.head_dim, cfg.head_dim },
            whole[3] = { heads[0], t, x->shape[2] };
    float *cosines = (float *)malloc(2 * (size_t)(t * half) * sizeof *cosines),
          *sines = cosines + t * half;
    mixp_tensor *part[2], *turned[2], *c, *s;
    if (!cosines) die(1, "out of memory for rotary positions");
    for (int64_t k = 0; k < t * half; k++) {
        double angle = (double)(first + k / half) * rope_angle(k % half);
        cosines[k] = (float)(cos(angle) * cfg.rope_scale);
        sines[k] = (float)(sin(angle) * cfg.rope_scale);
    }
    c = mixp_input(m.ctx, MIXP_F32, 3, table, cosines);
    s = mixp_input(m.ctx, MIXP_F32, 3, table, sines);
    free(cosines);
    mixp_split(m.ctx, mixp_reshape(m.ctx, x, 4, heads), -1, 2, part);
    turned[0] = mixp_sub(m.ctx, mixp_mul(m.ctx, part[0], c), mixp_mul(m.ctx, part[1], s));
    turned[1] = mixp_add(m.ctx, mixp_mul(m.ctx, part[1], c), mixp_mul(m.ctx, part[0], s));
    return mixp_reshape(m.ctx, mixp_concat(m.ctx, 2, turned, -1), 3, whole);
}

static mixp_tensor *turn(mixp_tensor *x, int64_t first) {
    mixp_rope_desc how = { .head_dim = (int)cfg.head_dim, .first = first };
    if (!x) return NULL;
    if (cfg.rope_kind != ROPE_DEFAULT && cfg.rope_kind != ROPE_DYNAMIC)
        return turn_by_table(x, first);
    how.base = rope_base(first + x->shape[1]);
    return mixp_rope(m.ctx, x, &how);
}

/* Appends new keys or values x[1, n, width] to those of a layer. Returns all, [1, past + n,
 * width]. */
static mixp_tensor *with_past(float *kept, int64_t layer_number, mixp_tensor *x) {
    const kv_cache *c = m.cache;
    int64_t         shape[3] = { 1, c->past, c->width };
    if (!x) return NULL;
    shape[1] += x->shape[1];
    kept += layer_number * c->room * c->width;
    mixp_read(x, kept + c->past * c->width, MIXP_F32, x->count);
    return mixp_input(m.ctx, MIXP_F32, 3, shape, kept);
}

static mixp_tensor *attention(const block *b, mixp_tensor *h) {
    mixp_attention_desc how = { .heads = (int)cfg.heads,
                                .kv_heads = (int)cfg.kv_heads,
                                .causal = 1,
                                .past = m.cache ? m.cache->past : 0 };
    mixp_tensor        *q = turn(linear(h, &b->linear[Q]), how.past),
                *k = turn(linear(h, &b->linear[K]), how.past);
    mixp_tensor *v = linear(h, &b->linear[V]);
    if (m.cache) {
        k = with_past(m.cache->k, b - m.blocks, k);
        v = with_past(m.cache->v, b - m.blocks, v);
    }
    return linear(mixp_attention_apply(m.ctx, q, k, v, &how), &b->linear[O]);
}

/* The input of the head, [batch, t, width], for the tokens ids[batch, t]. Autocast chooses the
 * dtype of each operator. */
static mixp_tensor *hidden(const int32_t *ids, int64_t batch, int64_t t) {
    const int64_t shape[2] = { batch, t };
    const float   eps = (float)cfg.eps;
    mixp_tensor  *x = mixp_embedding(m.ctx, m.tokens, mixp_input(m.ctx, MIXP_I32, 2, shape, ids));
    mixp_tensor  *h = mixp_rms_norm(m.ctx, x, m.blocks[0].norm1, eps);
    for (int64_t i = 0; i < cfg.layers; i++) {
        const block *b = &m.blocks[i];
        h = mixp_add_rms_norm(m.ctx, x, attention(b, h), b->norm2, eps, &x);
        h = mixp_swiglu(m.ctx, linear(h, &b->linear[GATE]), linear(h, &b->linear[UP]));
        h = linear(h, &b->linear[DOWN]);
        h = mixp_add_rms_norm(m.ctx, x, h, i + 1 < cfg.layers ? m.blocks[i + 1].norm1 : m.norm, eps,
                              &x);
    }
    return h;
}

/* ---- Training -------------------------------------------------------------------------- */

static void make_optimizer(void) {
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_scaler_desc    one = { .rule = MIXP_RULE_STATIC, .init_scale = 1 };
    mixp_param_group    vectors;
    adamw.lr = opt.lr;
    adamw.weight_decay = opt.decay;
    adamw.max_norm = opt.clip;
    adamw.schedule.kind = MIXP_SCHEDULE_LINEAR;
    adamw.schedule.warmup = (int64_t)opt.warmup;
    adamw.schedule.total = (int64_t)opt.steps;
    m.adamw = mixp_optimizer_new(m.ctx, &adamw);
    mixp_optimizer_group(m.adamw, 0, &vectors);
    if (m.rank) mixp_optimizer_add_all(m.adamw, PEFT "*");
    for (int64_t i = 0; !m.rank && mixp_context_param(m.ctx, i); i++)
        if (mixp_context_param(m.ctx, i)->rank == 2)
            mixp_optimizer_add(m.adamw, mixp_context_param(m.ctx, i), NULL);
    vectors.weight_decay = 0;
    if (!m.rank) mixp_optimizer_add_group(m.adamw, &vectors);
    for (int64_t i = 0; !m.rank && mixp_context_param(m.ctx, i); i++)
        if (mixp_context_param(m.ctx, i)->rank == 1)
            mixp_optimizer_add(m.adamw, mixp_context_param(m.ctx, i), NULL);
    m.scaler = mixp_scaler_new(
        m.ctx, m.dtype == MIXP_F16 ? NULL : &one); /* only fp16 needs a dynamic loss scale */
    check("making the optimizer");
}

/* The mean loss of the tokens y[batch, t] that count. *scaled: the loss times the loss scale, for
 * mixp_backward. With many tokens and a large vocabulary the logits are made a part at a time. */
static mixp_tensor *loss_of(const int32_t *x, const int32_t *y, int64_t batch, int64_t t,
                            mixp_tensor **scaled) {
    const int64_t shape[2] = { batch, t };
    mixp_tensor  *want = mixp_input(m.ctx, MIXP_I32, 2, shape, y), *loss = NULL, *h;
    MIXP_AUTOCAST(m.ctx, m.dtype) {
        h = hidden(x, batch, t);
        if (batch * t * cfg.vocab > (int64_t)1 << 26) {
            loss = mixp_linear_cross_entropy(m.ctx, h, m.head, want, MIXP_IGNORE, 0);
            *scaled = mixp_scaler_scale(m.scaler, loss);
        } else {
            h = mixp_linear(m.ctx, h, m.head, NULL);
            mixp_tensor_set_disposable(h, 1); /* their gradient may overwrite them */
            *scaled = mixp_scaler_cross_entropy(m.scaler, h, want, MIXP_IGNORE, 1, &loss);
        }
    }
    return loss;
}

/* One step. A skipped one is repeated with the same rows, at a lower loss scale or after the
 * guard has let an operator store f32. */
static double train_step(const int32_t *x, const int32_t *y, int64_t batch, int64_t t) {
    mixp_tensor *loss, *scaled = NULL;
    do {
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.adamw);
        loss = loss_of(x, y, batch, t, &scaled);
        mixp_backward(m.ctx, scaled);
        mixp_scaler_step(m.scaler, m.adamw); /* unscales, clips and updates, or skips */
        mixp_scaler_update(m.scaler);
    } while (mixp_retry(m.scaler, 3));
    check("training");
    return mixp_item(loss);
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void train(void) {
    int64_t batch = (int64_t)opt.batch, steps = (int64_t)opt.steps, tokens = 0,
            every = steps / 20 ? steps / 20 : 1;
    int32_t      *x = (int32_t *)malloc(2 * sizeof *x * (size_t)(batch * (int64_t)opt.block));
    double        began = seconds_now(), sum = 0, summed = 0, seconds;
    struct rusage use;
    if (!x) die(1, "out of memory for a batch");
    for (int64_t step = 0; step < steps; step++) {
        int32_t *y = x + batch * (int64_t)opt.block;
        int64_t  t = fill_rows(step, batch, (uint64_t)opt.seed, x, y);
        sum += train_step(x, y, batch, t);
        summed++;
        tokens += batch * t;
        if (step && (step + 1) % every && step + 1 < steps) continue;
        printf("step %5lld  loss %.6f\n", (long long)step + 1, sum / summed);
        fflush(stdout);
        sum = summed = 0;
    }
    seconds = seconds_now() - began;
    getrusage(RUSAGE_SELF, &use);
    printf("%lld steps in %.2f minutes, %.0f MB, %.0f tokens/s, %lld steps skipped\n",
           (long long)steps, seconds / 60, (double)use.ru_maxrss / 1024, (double)tokens / seconds,
           (long long)mixp_scaler_verdict(m.scaler).skipped);
    free(x);
}

/* ---- Sample ---------------------------------------------------------------------------- */

/* The likeliest token, or one drawn from softmax(logits / temperature). */
static int32_t draw(const float *logits, int64_t i) {
    double  sum = 0, u = mixp_random_u32((uint64_t)opt.seed, (uint64_t)i, 2, 0) / 4294967296.0;
    int32_t top = 0, k = 0,
            n = (int32_t)data.words->count; /* further rows of the table are no tokens */
    for (int32_t c = 1; c < n; c++)
        if (logits[c] > logits[top]) top = c;
    if (opt.temperature == 0) return top;
    for (int32_t c = 0; c < n; c++) sum += exp((double)(logits[c] - logits[top]) / opt.temperature);
    for (u *= sum; k < n - 1; k++)
        if ((u -= exp((double)(logits[k] - logits[top]) / opt.temperature)) < 0) break;
    return k;
}

/* The logits of the token after ids[0..n). Only tokens that the cache lacks are computed: the
 * same bits as of all. */
static void next_logits(const int32_t *ids, int64_t n, float *logits) {
    int64_t      new_ones = n - m.cache->past, one = 1, rows[2] = { new_ones, cfg.width };
    int32_t      last = (int32_t)new_ones - 1;
    mixp_tensor *h, *y = NULL;
    mixp_eval_begin(m.ctx);
    MIXP_NO_GRAD(m.ctx) MIXP_AUTOCAST(m.ctx, m.dtype) {
        h = mixp_reshape(m.ctx, hidden(ids + m.cache->past, 1, new_ones), 2, rows);
        h = mixp_embedding(m.ctx, h,
                           mixp_input(m.ctx, MIXP_I32, 1, &one, &last)); /* its last row */
        y = mixp_linear(m.ctx, h, m.head, NULL);
    }
    if (y) mixp_read(y, logits, MIXP_F32, cfg.vocab);
    m.cache->past = n;
    check("sampling");
}

/* Prints a token's bytes, and keeps control characters from the terminal. */
static void say_token(int32_t id) {
    const bpe_token *t = id < data.words->count ? &data.words->tokens[id] : NULL;
    for (int i = 0; t && t->bytes && i < t->length; i++) {
        unsigned char c = (unsigned char)t->bytes[i];
        putchar(c == '\n' || c == '\t' || (c > 31 && c != 127) ? c : '?');
    }
    fflush(stdout);
}

/* Writes on after --prompt, or answers it as an assistant. */
static void sample(const char *when) {
    int64_t  n, most, w = cfg.kv_heads * cfg.head_dim;
    kv_cache cache = { NULL, NULL, 0, 0, w };
    float   *logits;
    int32_t *ids;
    begin_row();
    if (data.chat)
        put_message("user", opt.prompt, (int64_t)strlen(opt.prompt), 0),
            put_message("assistant", NULL, 0, 0);
    else put_text(opt.prompt, (int64_t)strlen(opt.prompt), 0);
    if (!data.length) put_text("\n", 1, 0);
    n = data.length;
    most = cache.room = n + (int64_t)opt.sample;
    ids = (int32_t *)malloc((size_t)most * sizeof *ids);
    logits = (float *)malloc((size_t)(cfg.vocab + 2 * cfg.layers * most * w) * sizeof *logits);
    if (!ids || !logits) die(1, "out of memory for a sample");
    cache.k = logits + cfg.vocab;
    cache.v = cache.k + cfg.layers * most * w;
    m.cache = &cache;
    memcpy(ids, data.ids, (size_t)n * sizeof *ids);
    printf("--- sample %s\n%s", when, data.chat ? "" : opt.prompt);
    while (n < most) {
        next_logits(ids, n, logits);
        ids[n] = draw(logits, n);
        if (ids[n] == cfg.eos) break;
        say_token(ids[n++]);
    }
    printf("\n---\n");
    m.cache = NULL;
    free(ids);
    free(logits);
}

/* ---- Main ------------------------------------------------------------------------------ */

/* With LoRA, saves only the adapters; with --merge 1, the weights to which the adapters were added. A GGUF file always
 * holds these sums, of the values of the model's own files. */
static void save(void) {
    int whole = saves_whole();
    if (opt.out && !whole) save_adapters(opt.out);
    if (m.rank && opt.out && whole) say_rounding("--out", -1);
    if (m.rank && opt.gguf) say_rounding("--gguf", gguf_type_of_model());
    if (opt.out && whole) save_model(opt.out);
    if (opt.gguf) save_gguf(opt.gguf);
}

/* Reads the command line, the model and its adapters. */
static void begin(int argc, char **argv) {
    program_name = "llama";
    read_options(argc, argv);
    open_model();
    check_out();
    m.dtype = strcmp(opt.dtype, "fp32") == 0   ? MIXP_F32
              : strcmp(opt.dtype, "fp16") == 0 ? MIXP_F16
                                               : MIXP_BF16;
    m.ctx = mixp_context_new(
        &(mixp_context_desc){ .device = cpu_named(opt.isa),
                              .seed = (uint64_t)opt.seed,
                              .threads = (int)opt.threads });
    if (!m.ctx) die(1, "out of memory");
    mixp_autocast_override(m.ctx, mixp_op_builtin(MIXP_OP_RMS_NORM),
                           MIXP_CLASS_LOW_OUT); /* only products read norms */
    load_model();
    if (opt.lora > 0 || opt.adapter) mixp_freeze_all(m.ctx, "*", 1);
    if (opt.adapter) load_adapters();
    else if (opt.lora > 0) new_adapters();
    if (m.dtype == MIXP_F16) mixp_guard_start(m.ctx, NULL);
}

int main(int argc, char **argv) {
    begin(argc, argv);
    if (opt.data) read_rows(opt.data, opt.chat, (int64_t)opt.block);
    if (opt.sample > 0) sample("before");
    if (opt.data && opt.steps > 0) {
        make_optimizer();
        train();
        if (opt.sample > 0) sample("after");
    }
    save();
    free_tokenizer(data.words);
    mixp_context_free(m.ctx);
    return 0;
}
