/* llama.c - fine-tunes a Llama-like model from Hugging Face's files on a CPU or a GPU, all weights or LoRA
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     cc -O2 -fopenmp -I. examples/llama.c -o llama -lm
 *     ./llama SmolLM2-135M --data chats.jsonl --lora 8 --out tuned --prompt "Who wrote Hamlet?"
 *
 * For a GPU, compile mixprec_cuda.cu as well, with CUDA's compiler:
 *
 *     cc -O2 -I. -DTRAINER_CUDA -c examples/llama.c
 *     nvcc -O2 -arch=native llama.o mixprec_cuda.cu -lcublasLt -o llama
 *
 * On an H100 or H200 use -arch=sm_90a: attention is then 1.5 times as fast (docs/gpu.md).
 *
 * MODEL is a folder with config.json, tokenizer.json and model.safetensors, or its shards with
 * their index; or a FILE.gguf. Weights are f32, f16 or bf16. This file has the weights, layers,
 * loss, steps, validation, sample and saves, in this order; the headers in trainer/ have the rest, which
 * trainer.c shares: command line, device, log, report, checkpoints, ranks. `llama --help` lists the options,
 * docs/llama.md explains them. Equal arguments give equal bits with any number of threads. Exit
 * status: 0 done, 1 failed, 2 wrong usage, 128 + N stopped by signal N (Ctrl-C: 130). */
#define _XOPEN_SOURCE 700 /* fnmatch, mkdir, getrusage, clock_gettime */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <sys/resource.h>
#include "trainer/choose.h"
#include "trainer/device.h"
#include "trainer/gguf_words.h"
#include "trainer/log.h"
#include "trainer/measure.h"
#include "trainer/weights.h"
#include "trainer/llama_config.h"
#include "trainer/llama_options.h"
#include "trainer/llama_rows.h"

/* ---- Weights --------------------------------------------------------------------------- */

/* y = x w' + bias + scale (x a') b'; bias NULL: no bias; a NULL: no adapter; scales: w has codes, see llama_codes.h. */
typedef struct layer {
    mixp_tensor *w, *bias, *a, *b;
    void        *scales;
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

static struct model {
    run                run;
    mixp_ranks_desc    ranks; /* size 0: one process without ranks */
    const mixp_device *device;
    char               device_name[32];
    int                on_gpu, is_measured; /* is_measured: only the memory of a step is counted */
    mixp_context      *ctx;
    mixp_optimizer    *adamw;
    mixp_scaler       *scaler;
    mixp_dtype         dtype; /* of products */
    mixp_tensor       *tokens, *norm, *head;
    block             *blocks;
    double             frequencies[MIXP_ROPE_PAIRS]; /* of rotary positions with a scaling */
    float              lora_scale;
    int64_t            rank;  /* rank of the adapters; 0: the model has no adapters */
    struct kv_cache   *cache; /* NULL while training */
    mixp_tensor      **coded;   /* the matrices that are kept as codes: see llama_codes.h */
    int64_t            n_coded;
    double             code_bytes;
    mixp_out           decoded; /* memory for one decoded matrix */
    weight_files       files;
    gguf              *gguf; /* NULL: the weights are in `files` */
    uint64_t           base_hash; /* of samples of all weights in the file */
    double             seen; /* tokens of all steps of this process, with those that do not count */
} m;

static char plan_text[600], command_that_continues[4096 + 16];

/* The first error waits in the context. Says what a step needs if memory is short, and where the last checkpoint is. */
static void check(const char *doing) {
    char        path[PATH_SPACE];
    const char *why;
    mixp_result result = mixp_context_error(m.ctx, &why);
    int         saved = m.run.saves && m.run.step > 0 && m.run.out[0] && in_run(&m.run, CHECKPOINT, path);
    if (result != MIXP_OK) end_by_error(&m.run, why);
    if (result != MIXP_OK)
        die(1, "%s: %s%s%s%s", doing, why, result == MIXP_ERR_MEMORY ? plan_text : "",
            saved ? ". The last checkpoint is complete; continue with: " : "", saved ? command_that_continues : "");
}

#include "trainer/llama_cache.h"
#include "trainer/llama_lora.h"
#include "trainer/llama_files.h"
#include "trainer/llama_codes.h"

static mixp_tensor *load_named(const char *name, int64_t rows, int64_t cols) {
    return load(dtype_of(name, cols > 0), rows, cols, name);
}

static mixp_tensor *load_part(int64_t i, const char *part, const char *of, int64_t rows, int64_t cols) {
    char name[96];
    snprintf(name, sizeof name, "model.layers.%lld.%s.%s", (long long)i, part, of);
    return load_named(name, rows, cols);
}

/* The matrix of a linear layer of block i: values, or codes where its rows divide into blocks. */
static void load_matrix(layer *l, int64_t i, const char *part, int64_t rows, int64_t cols) {
    char name[96];
    snprintf(name, sizeof name, "model.layers.%lld.%s.weight", (long long)i, part);
    if (opt.frozen && cols % GGUF_BLOCK == 0) load_codes(l, name, rows, cols);
    else l->w = load_named(name, rows, cols);
}

static void load_block(block *b, int64_t i) {
    int64_t q = cfg.heads * cfg.head_dim, kv = cfg.kv_heads * cfg.head_dim, w = cfg.width,
            in = cfg.inner;
    const int64_t shape[LINEARS][2] = { { q, w },  { kv, w }, { kv, w }, { w, q },
                                        { in, w }, { in, w }, { w, in } };
    b->norm1 = load_part(i, "input_layernorm", "weight", w, 0);
    b->norm2 = load_part(i, "post_attention_layernorm", "weight", w, 0);
    for (int k = 0; k < LINEARS; k++) {
        load_matrix(&b->linear[k], i, linear_names[k], shape[k][0], shape[k][1]);
        if (k < O ? cfg.attention_bias : k == O ? cfg.out_bias : cfg.mlp_bias)
            b->linear[k].bias = load_part(i, linear_names[k], "bias", shape[k][0], 0);
    }
}

static void load_model(void) {
    m.blocks = (block *)calloc((size_t)cfg.layers, sizeof *m.blocks);
    if (!m.blocks) die(1, "out of memory");
    if (opt.frozen) make_decoded();
    m.tokens = m.head = load_named("model.embed_tokens.weight", cfg.vocab, cfg.width);
    for (int64_t i = 0; i < cfg.layers; i++) load_block(&m.blocks[i], i);
    m.norm = load_named("model.norm.weight", cfg.width, 0);
    if (!cfg.tied) m.head = load_named("lm_head.weight", cfg.vocab, cfg.width);
    check_extra();
    check("loading the model");
    for (int64_t i = 0; i < cfg.head_dim / 2 && i < MIXP_ROPE_PAIRS; i++) m.frequencies[i] = rope_angle(i);
}

/* A context with the model and its adapters. */
static void make_model(const mixp_device *device) {
    mixp_context_desc d = { .device = device,
                            .seed = (uint64_t)opt.seed,
                            .threads = (int)opt.threads,
                            .ranks = m.ranks.size && !m.is_measured ? &m.ranks : NULL };
    m.ctx = mixp_context_new(&d);
    if (!m.ctx) die(1, "%s cannot be used: it is out of memory, or fails", m.device_name);
    mixp_autocast_set_level(m.ctx, (int)opt.level);
    mixp_autocast_override(m.ctx, mixp_op_builtin(MIXP_OP_RMS_NORM),
                           MIXP_CLASS_LOW_OUT); /* only products read norms */
    load_model();
    if (is_lora()) mixp_freeze_all(m.ctx, "*", 1);
    if (opt.adapter) load_adapters();
    else if (opt.lora > 0) new_adapters();
}

/* ---- Layers ---------------------------------------------------------------------------- */

/* LoRA's scale is applied where the tensor is narrow. */
static mixp_tensor *linear(mixp_tensor *x, const layer *l) {
    mixp_tensor *y = l->scales ? linear_of_codes(x, l) : mixp_linear(m.ctx, x, l->w, l->bias), *low;
    if (!l->a) return y;
    low = mixp_scale(m.ctx, mixp_linear(m.ctx, x, l->a, NULL), m.lora_scale);
    return mixp_add(m.ctx, y, mixp_linear(m.ctx, low, l->b, NULL));
}

/* Turns the heads of queries or keys by their positions first, first + 1, ... */
static mixp_tensor *turn(mixp_tensor *x, int64_t first) {
    mixp_rope_desc how = { .head_dim = (int)cfg.head_dim, .first = first };
    if (!x) return NULL;
    if (cfg.rope_kind == ROPE_DEFAULT || cfg.rope_kind == ROPE_DYNAMIC)
        how.base = rope_base(first + x->shape[1]);
    else {
        how.frequencies = m.frequencies;
        how.scale = cfg.rope_scale;
    }
    return mixp_rope(m.ctx, x, &how);
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
        k = with_past(2 * (b - m.blocks), k);
        v = with_past(2 * (b - m.blocks) + 1, v);
    }
    return linear(mixp_attention_apply(m.ctx, q, k, v, &how), &b->linear[O]);
}

static mixp_tensor *feed_forward(const block *b, mixp_tensor *h) {
    h = mixp_swiglu(m.ctx, linear(h, &b->linear[GATE]), linear(h, &b->linear[UP]));
    return linear(h, &b->linear[DOWN]);
}

/* A block as mixp_recompute wants it, with one tensor in and one out. */
static mixp_tensor *block_apart(mixp_context *ctx, mixp_tensor *x, void *user) {
    const block *b = (const block *)user;
    mixp_tensor *h = mixp_rms_norm(ctx, x, b->norm1, (float)cfg.eps);
    h = mixp_add_rms_norm(ctx, x, attention(b, h), b->norm2, (float)cfg.eps, &x);
    return mixp_add(ctx, x, feed_forward(b, h));
}

/* The input of the head, [batch, t, width], for the tokens ids[batch, t]. Autocast chooses the
 * dtype of each operator. */
static mixp_tensor *hidden(const int32_t *ids, int64_t batch, int64_t t) {
    const int64_t shape[2] = { batch, t };
    const float   eps = (float)cfg.eps;
    mixp_tensor  *x = mixp_embedding(m.ctx, m.tokens, mixp_input_i32(m.ctx, 2, shape, ids)), *h;
    if (opt.level < 2 && m.tokens->dtype != MIXP_F32) x = mixp_cast(m.ctx, x, MIXP_F32);
    for (int64_t i = 0; opt.recompute && !m.cache && i < cfg.layers; i++)
        x = mixp_recompute(m.ctx, block_apart, &m.blocks[i], x);
    if (opt.recompute && !m.cache) return mixp_rms_norm(m.ctx, x, m.norm, eps);
    h = mixp_rms_norm(m.ctx, x, m.blocks[0].norm1, eps);
    for (int64_t i = 0; i < cfg.layers; i++) {
        const block *b = &m.blocks[i];
        h = mixp_add_rms_norm(m.ctx, x, attention(b, h), b->norm2, eps, &x);
        h = mixp_add_rms_norm(m.ctx, x, feed_forward(b, h),
                              i + 1 < cfg.layers ? m.blocks[i + 1].norm1 : m.norm, eps, &x);
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
    adamw.states.m = adamw.states.v = (mixp_moment_kind)opt.moments;
    adamw.states.master = (mixp_master_kind)opt.masters;
    adamw.schedule.kind = MIXP_SCHEDULE_LINEAR;
    adamw.schedule.warmup = opt.warmup;
    adamw.schedule.total = opt.steps > 0 ? opt.steps : 1;
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

/* Are the logits made a part at a time? They are then made twice, which on a GPU costs more than it saves. */
static int has_chunks(int64_t tokens) {
    if (opt.loss != LOSS_AUTO) return opt.loss == LOSS_CHUNKS;
    return !m.on_gpu && tokens * cfg.vocab > (int64_t)1 << 26;
}

/* The mean loss of the tokens y[batch, t] that count, times share. *scaled: that loss times the loss scale,
 * for mixp_backward; scaled NULL: a validation. */
static mixp_tensor *loss_of(const int32_t *x, const int32_t *y, int64_t batch, int64_t t, float share,
                            mixp_tensor **scaled) {
    const int64_t shape[2] = { batch, t };
    mixp_tensor  *want = mixp_input_i32(m.ctx, 2, shape, y), *loss = NULL, *h;
    MIXP_AUTOCAST(m.ctx, m.dtype) {
        h = hidden(x, batch, t);
        if (has_chunks(batch * t)) {
            loss = mixp_linear_cross_entropy(m.ctx, h, m.head, want, MIXP_IGNORE, 0);
            if (share != 1) loss = mixp_scale(m.ctx, loss, share);
            if (scaled) *scaled = mixp_scaler_scale(m.scaler, loss);
        } else {
            h = mixp_linear(m.ctx, h, m.head, NULL);
            mixp_tensor_set_disposable(h, 1); /* their gradient may overwrite them */
            if (!scaled) loss = mixp_cross_entropy(m.ctx, h, want, MIXP_IGNORE);
            else *scaled = mixp_scaler_cross_entropy(m.scaler, h, want, MIXP_IGNORE, share, &loss);
        }
    }
    return loss;
}

#include "trainer/llama_run.h"

/* Batch i of the --accumulate batches of a step, x and y[batch, t], whose tokens are a share of those of the
 * step. Ranks exchange gradients after the last batch; with --ordered after each batch. */
static mixp_tensor *train_batch(const int32_t *x, const int32_t *y, int64_t t, int64_t i, float share) {
    int          last = i == opt.accumulate - 1, exchanges = opt.ordered && m.ranks.size > 1;
    mixp_tensor *loss, *scaled = NULL;
    if (i == 0 || exchanges) mixp_zero_grad(m.adamw);
    mixp_step_begin(m.ctx);
    order_batch(i, opt.accumulate);
    loss = loss_of(x, y, opt.batch, t, share, &scaled);
    mixp_ranks_hold(m.ctx, !last && !exchanges);
    mixp_backward(m.ctx, scaled);
    add_loss(i, loss);
    if (!last) return loss;
    mixp_scaler_step(m.scaler, m.adamw); /* unscales, clips and updates, or skips */
    mixp_scaler_update(m.scaler);
    return loss;
}

/* Replays the recorded step of batch i. Records the step first if there is no recording. Returns 0 and runs
 * nothing if the batch has another length or another share. */
static int replay_batch(const int32_t *x, const int32_t *y, int64_t t, int64_t i, float share) {
    static mixp_graph *graphs[4096];
    static float       shares[4096];
    if (t != opt.block || (graphs[i] && shares[i] != share)) return 0;
    if (graphs[i] && mixp_graph_stale(graphs[i])) graphs[i] = NULL; /* the dtype of a site changed */
    if (!graphs[i]) {
        mixp_capture_begin(m.ctx);
        train_batch(x, y, t, i, share);
        graphs[i] = mixp_capture_end(m.ctx);
        shares[i] = share;
        check("recording a step for --graph");
    }
    mixp_replay(graphs[i]);
    return 1;
}

/* One attempt of a step. Reads no loss, so it does not wait for a GPU. is_plain 1: nothing is replayed. */
static void try_step(int32_t *x, int32_t *y, int is_plain) {
    int64_t ranks = ranks_of_run(), n = opt.accumulate * ranks, first = m.run.step * n;
    double  counted = 0;
    for (int64_t k = 0; k < n; k++) counted += (double)counted_in(first + k, 0);
    for (int64_t i = 0; i < opt.accumulate; i++) {
        int64_t mine = first + i * ranks + m.ranks.rank, t = fill_rows(mine, 0, x, y);
        float   share = (float)((double)counted_in(mine, 0) / counted);
        m.seen += (double)(opt.batch * t * ranks);
        if (is_plain || !replay_batch(x, y, t, i, share)) train_batch(x, y, t, i, share);
    }
}

/* One step. A skipped one is repeated with the same rows, at a lower loss scale or after the
 * guard has let an operator store f32. */
static void train_step(int32_t *x, int32_t *y, int is_plain) {
    do {
        try_step(x, y, is_plain || !opt.graph || mixp_guard_due(m.ctx));
    } while (opt.retry && mixp_retry(m.scaler, (int)opt.retry));
    add_step();
    check("training");
}

/* The mean loss of the rows of validation. Ranks divide the batches, and each makes as many passes; the
 * losses are added in the order of batches, with the bits of a run on one rank. */
static double validate(int32_t *x, int32_t *y) {
    int64_t ranks = ranks_of_run(), n = (kept.held + opt.batch - 1) / opt.batch;
    float  *table = (float *)rows_memory(NULL, (size_t)n, sizeof *table);
    double  counted = 0, sum = 0;
    memset(table, 0, (size_t)n * sizeof *table);
    for (int64_t first = 0; first < n; first += ranks) {
        int64_t mine = first + m.ranks.rank, at = mine < n ? mine : first, t = fill_rows(at, 1, x, y);
        double  loss = 0;
        show_work("validating", "", first, n);
        mixp_eval_begin(m.ctx);
        MIXP_NO_GRAD(m.ctx) { loss = mixp_item(loss_of(x, y, opt.batch, t, 1, NULL)); }
        if (mine < n) table[mine] = (float)loss;
    }
    share_losses(table, n);
    for (int64_t i = 0; i < n; i++) {
        double of_batch = (double)counted_in(i, 1);
        sum += of_batch * (double)table[i];
        counted += of_batch;
    }
    free(table);
    check("validating");
    return sum / counted;
}

/* Trains to the last step, or to a signal. Returns the number of steps. */
static int64_t train(void) {
    int64_t  first = m.run.step;
    int32_t *x = (int32_t *)rows_memory(NULL, 2 * (size_t)(opt.batch * opt.block), sizeof *x);
    int32_t *y = x + opt.batch * opt.block;
    double   told = 0; /* tokens up to the last line */
    m.run.began = seconds_now();
    while (m.run.step < opt.steps && !is_stopped()) {
        int64_t next = m.run.step + 1;
        int     validates = kept.held && (next % opt.eval_every == 0 || next == opt.steps);
        int     logs = validates || next % opt.log_every == 0 || next == 1 || next == opt.steps;
        double  began = seconds_now(), loss = ABSENT, val = ABSENT;
        int     watches = m.run.metrics && next % watch_every(opt.steps, opt.log_every) == 0;
        if (watches) mixp_optimizer_sample(m.adamw);
        train_step(x, y, m.run.step == first || logs);
        if (logs) loss = mean_loss();
        if (logs && m.ranks.shard) hear_of_signals();
        note_step(began, loss);
        if (watches) report_watching(m.run.metrics, (double)next, m.ctx, m.adamw);
        if (validates) val = validate(x, y);
        if (logs) say_step(loss, val, m.seen - told, first);
        if (logs) told = m.seen;
        if (validates) keep_best(val);
        if (opt.save_every && next % opt.save_every == 0 && next < opt.steps) save_checkpoint();
        if (progress_bar) show_bar(next, opt.steps, seconds_left(first));
    }
    hide_bar();
    free(x);
    return m.run.step - first;
}

/* ---- Sample ---------------------------------------------------------------------------- */

/* The logits of the token after ids[0..n). Only tokens that the cache lacks are computed: the
 * same bits as of all. */
static void next_logits(const int32_t *ids, int64_t n, float *logits) {
    int64_t      new_ones = n - m.cache->past, one = 1, shape[2] = { new_ones, cfg.width };
    int32_t      last = (int32_t)new_ones - 1;
    mixp_tensor *h, *y = NULL;
    mixp_eval_begin(m.ctx);
    MIXP_NO_GRAD(m.ctx) MIXP_AUTOCAST(m.ctx, m.dtype) {
        h = mixp_reshape(m.ctx, hidden(ids + m.cache->past, 1, new_ones), 2, shape);
        h = mixp_embedding(m.ctx, h,
                           mixp_input_i32(m.ctx, 1, &one, &last)); /* its last row */
        y = mixp_linear(m.ctx, h, m.head, NULL);
    }
    if (y) mixp_read_f32(y, logits, cfg.vocab);
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
    choosing how = { opt.temperature, opt.top_p, opt.top_k, (uint64_t)opt.seed, RANDOM_SAMPLE };
    int64_t  n, most;
    kv_cache cache;
    float   *logits;
    int32_t *ids;
    begin_row();
    if (data.chat) {
        put_message("user", opt.prompt, (int64_t)strlen(opt.prompt), 0);
        put_message("assistant", NULL, 0, 0);
    } else put_text(opt.prompt, (int64_t)strlen(opt.prompt), 0);
    if (!data.length) put_text("\n", 1, 0);
    n = data.length;
    most = n + opt.sample;
    ids = (int32_t *)rows_memory(NULL, (size_t)most, sizeof *ids);
    logits = (float *)rows_memory(NULL, 2 * (size_t)cfg.vocab, sizeof *logits);
    cache = open_cache(most);
    m.cache = &cache;
    memcpy(ids, data.ids, (size_t)n * sizeof *ids);
    printf("--- sample %s\n%s", when, data.chat ? "" : opt.prompt);
    while (n < most && !stop_signal) {
        next_logits(ids, n, logits);
        /* further rows of the table are no tokens */
        ids[n] = choose(&how, logits, logits + cfg.vocab, data.words->count, n);
        if (is_end(ids[n])) break;
        say_token(ids[n++]);
    }
    printf("\n---\n");
    m.cache = NULL;
    close_cache(&cache);
    free(ids);
    free(logits);
}

/* ---- Main ------------------------------------------------------------------------------ */

/* Reads the command line and the model; plans the memory of a run; loads the model and its adapters. */
static void begin(int argc, char **argv) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F16, MIXP_BF16 };
    const char             *no_gpu;
    program_name = "llama";
    read_options(argc, argv);
    keep_command_line(argc, argv);
    snprintf(command_that_continues, sizeof command_that_continues, "%s --resume", command_line);
    m.ranks = join_ranks(&argc, &argv);
    settle_total_batch(ranks_of_run());
    look_at_terminal(opt.quiet || m.ranks.rank || under_launcher(opt.ranks));
    open_model();
    if (!m.ranks.rank) check_out();
    m.device = choose_device(opt.device, opt.isa, (int)opt.graph, m.device_name, sizeof m.device_name, &no_gpu);
    m.on_gpu = m.device->wait != NULL;
    m.dtype = dtypes[opt.dtype];
    if (opt.retry == AUTO) opt.retry = m.dtype == MIXP_F16 && !m.on_gpu ? 3 : 0;
    if (opt.data) read_all_rows();
    if (is_training()) plan_memory();
    make_model(m.device);
    close_weights(&m.files); /* else their bytes stay in memory while training */
    if (has_guard()) mixp_guard_start(m.ctx, NULL);
}

int main(int argc, char **argv) {
    int64_t trained = 0;
    begin(argc, argv);
    if (is_training()) begin_run();
    if (opt.sample > 0 && m.run.step == 0) sample("before");
    if (is_training()) trained = train();
    if (is_stopped()) return end_run(stop_run(trained));
    if (trained && opt.sample > 0) sample("after");
    if (trained) finish_run(trained, m.seen);
    if (!m.ranks.rank) save();
    return end_run(m.run.save_failed);
}
