/* trainer.c - trains a GPT on the bytes of a text, or on tokens, in fp32, fp16 or bf16
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     cc -O2 examples/trainer/trainer.c -o trainer -lm        (add -fopenmp for more threads)
 *     ./trainer --data input.txt --dtype fp16 --out run --sample 500
 *
 * For a GPU, compile mixprec_cuda.cu as well, with CUDA's compiler:
 *
 *     cc -O2 -DTRAINER_CUDA -c examples/trainer/trainer.c
 *     nvcc -O2 -arch=native trainer.o mixprec_cuda.cu -lcublasLt -o trainer
 *
 * On an H100 or H200 use -arch=sm_90a: attention is then 1.5 times as fast (docs/gpu.md).
 *
 * The model is nanoGPT's: pre-norm blocks, learned positions, the output head tied to the token
 * embedding. --preset modern has RMSNorm, rotary positions and other newer parts. The vocabulary of
 * a text is the set of its bytes. A FILE.bin holds tokens, in the format of nanoGPT and llm.c.
 *
 * train_batch and make_optimizer show mixed precision. The headers beside this file hold the parts
 * that every trainer has:
 *
 *     messages.h     what goes to stderr
 *     terminal.h     lines of output, progress bar, signals
 *     disk.h         reads and writes whole files, in folders that may come from elsewhere
 *     json.h         reads JSON, strictly; json_file.h: a file of it
 *     options.h      the options, presets; option_kinds.h, command_line.h: any program's options
 *     config.h       config.json, what a checkpoint says of its model
 *     model.h        the tensors and the layers of the model
 *     gpt2.h         reads and writes GPT-2's files of the transformers library; weights.h opens them
 *     data.h         texts, tokens, vocabulary, batches, prompts
 *     token_files.h  the formats of files of tokens
 *     tokenizer.h    --tokenizer: reads a tokenizer.json
 *     words.h        text as tokens
 *     letters.h      the letters, numbers and spaces of Unicode
 *     device.h       --device; measure.h: a step's memory, counted before it is taken
 *     machine.h      the machine's memory, the parts of a step's time
 *     output.h       printed lines and the log
 *     run.h          the folder of a run: lock, checkpoints, log, report
 *     log.h          the log of a run, its warnings
 *     files.h        config.json, kept checkpoints, exports
 *     sample.h       generates text, token by token; choose.h: draws a token
 *     ranks.h        --ranks: several processes, on one or more machines
 *     ../profile.h   the time of each kernel, for any program
 *     ../trail.h     what each step computes, to compare two runs
 *     ../report.h    the log of a run, and a page drawn from the log, for any program
 *     ../plant.h     --plant: an overflow of fp16, for tests of the guard
 *
 * Exit status: 0 done, 1 failed, 2 wrong usage, 128 + N stopped by signal N (Ctrl-C: 130).
 */
#ifndef _POSIX_C_SOURCE
#  define _POSIX_C_SOURCE 200809L       /* sigaction, isatty, mkdir, clock_gettime */
#endif
#define MIXPREC_IMPLEMENTATION
#include "../../mixprec.h"
#include <dirent.h>
#include <fcntl.h>
#ifdef _OPENMP
#  include <omp.h>
#endif
#include "config.h"
#include "data.h"
#include "isa.h"
#include "../profile.h"
#include "../trail.h"
#include "../report.h"
#include "../compare.h"
#include "../plant.h"
#include "model.h"
#include "gpt2.h"
#include "ranks.h"
#include "log.h"

/* ==== Model ========================================================================= */

/* h = norm(x). Computes x += attention(h), then x += mlp(norm(x)). Returns the next norm of x. */
static mixp_tensor *block_forward(const gpt *m, const block *b, layer next, mixp_tensor **x,
                                  mixp_tensor *h, int training) {
    mixp_context *ctx = m->ctx;
    h = linear(m, attention(m, linear(m, h, b->qkv)), b->attn_out);
    h = add_norm(m, x, mixp_dropout(ctx, h, m->dropout, training), b->norm2);

    h = feed_forward(m, h, b);
    return add_norm(m, x, mixp_dropout(ctx, h, m->dropout, training), next);
}

/* Returns the input of the head, [batch, length, width], for the tokens ids[batch, length]. last 1:
 * one sequence, and [1, width] for its last token only. No line chooses a precision: autocast
 * chooses the dtype of each operator. */
static mixp_tensor *gpt_hidden(const gpt *m, mixp_tensor *ids, int training, int last) {
    mixp_context *ctx = m->ctx;
    int64_t       length = ids ? ids->shape[1] : 1, one = 1;
    int64_t       rows[2] = {length, m->tokens->shape[1]};
    mixp_tensor  *x = mixp_embedding(ctx, m->tokens, ids), *h, *at;
    if (m->positions) {
        at = mixp_input_i32(ctx, 1, &length, m->ramp + (m->cache ? m->cache->past : 0));
        x = mixp_add(ctx, x, mixp_embedding(ctx, m->positions, at));
    }
    x = mixp_dropout(ctx, x, m->dropout, training);
    if (m->cache) m->cache->layer = 0;
    h = norm(m, x, m->blocks[0].norm1);
    for (int i = 0; i < m->layers; i++) {
        layer next = i + 1 < m->layers ? m->blocks[i + 1].norm1 : m->norm;
        h = block_forward(m, &m->blocks[i], next, &x, h, training);
    }
    if (!last) return h;
    /* picks a row of h, as an embedding picks a row of a table */
    at = mixp_input_i32(ctx, 1, &one, &m->ramp[length - 1]);
    return mixp_embedding(ctx, mixp_reshape(ctx, h, 2, rows), at);
}

static mixp_tensor *gpt_logits(const gpt *m, mixp_tensor *ids, int training, int last)
{ return mixp_linear(m->ctx, gpt_hidden(m, ids, training, last), m->head, NULL); }

/* ==== Optimizer ===================================================================== */

typedef struct trainer {
    run             run;                /* its folder, log and state: see run.h */
    mixp_ranks_desc ranks;              /* size 0: one process without ranks */
    int             stopped;            /* 1: all ranks that share states know of a signal */
    config          c;
    const mixp_device *device;
    char            device_name[32];
    const char     *no_gpu;             /* why --device auto found no GPU, or what makes its code slow, or "" */
    corpus          data;
    mixp_context   *ctx;
    gpt             model;
    mixp_optimizer *opt, *muon;         /* muon NULL: opt has all parameters */
    mixp_scaler    *scaler;
    mixp_dtype      dtype;              /* dtype of the autocast region */
    int32_t        *x, *y;              /* a batch; a replay reads the same addresses */
    float          *losses;             /* losses of all batches of a step, of all ranks */
    int             warm;               /* 1: a step has run, so later steps allocate nothing */
    mixp_graph     *first, *middle, *last;  /* --graph: a step's batches; a single one: last */
    mixp_trail     *trail;              /* --trail; NULL = none */
    int             is_profiled;        /* 1: kernels are timed, for --profile or the report */
    size_t          model_bytes, optimizer_bytes;   /* for --profile */
    double          step_bytes;         /* memory that a step will need; 0 = unknown */
    const char     *program;            /* argv[0] */
    char            go_on[PATH_SPACE + 1100];   /* the command that continues the run */
    char            model_text[MODEL_SPACE], vocabulary_text[VOCABULARY_SPACE];
    const char     *pairs[2][2];        /* these two in a checkpoint */
} trainer;

static int64_t ranks_of(const trainer *t) { return t->ranks.size ? t->ranks.size : 1; }

static void         make_optimizer(trainer *t);
static void         make_scaler(trainer *t);
static mixp_tensor *train_batch(trainer *t, int64_t i);
static const mixp_dtype dtypes[] = {MIXP_F32, MIXP_F16, MIXP_BF16};

#include "machine.h"
#include "output.h"
#include "files.h"
#include "sample.h"

static void add_matrices(const gpt *m, mixp_optimizer *to) {
    for (int i = 0; i < m->layers; i++) {
        mixp_optimizer_add(to, m->blocks[i].qkv.w, NULL);
        mixp_optimizer_add(to, m->blocks[i].attn_out.w, NULL);
        mixp_optimizer_add(to, m->blocks[i].up.w, NULL);
        mixp_optimizer_add(to, m->blocks[i].down.w, NULL);
    }
}

/* Muon takes AdamW's learning rate and decay. It needs no clipping: only the direction of a gradient
 * counts. */
static void make_muon(trainer *t, const mixp_optimizer_desc *adamw) {
    mixp_optimizer_desc d = mixp_muon_defaults();
    d.lr = t->c.muon_lr == AUTO ? adamw->lr : t->c.muon_lr;
    d.muon.rate = MIXP_MUON_RATE_MATCH_RMS_ADAMW;
    d.weight_decay = adamw->weight_decay;
    d.no_master = adamw->no_master;
    d.states = adamw->states;
    d.schedule = adamw->schedule;
    t->muon = mixp_optimizer_new(t->ctx, &d);
}

/* Matrices have weight decay, vectors have none. The optimizer clips (max_norm): mixp_scaler_step
 * unscales, clips and updates in one pass over the parameters. */
static void make_optimizer(trainer *t) {
    const config   *c = &t->c;
    const gpt      *m = &t->model;
    mixp_optimizer_desc d = mixp_adamw_defaults();
    mixp_param_group plain;
    d.lr = c->lr;
    d.beta1 = c->beta1;
    d.beta2 = c->beta2;
    d.weight_decay = c->weight_decay;
    d.max_norm = c->clip;
    d.no_master = (int)c->no_master;
    d.states.m = d.states.v = (mixp_moment_kind)c->moments;
    d.states.master = (mixp_master_kind)c->masters;
    d.schedule.kind = (mixp_schedule_kind)c->schedule;
    d.schedule.warmup = warmup_steps(c);
    d.schedule.total = decay_steps(c);
    d.schedule.min_factor = c->min_lr == AUTO ? 0.1 : c->lr > 0 ? c->min_lr / c->lr : 0;
    t->opt = mixp_optimizer_new(t->ctx, &d);
    if (c->optimizer == OPTIMIZER_MUON) make_muon(t, &d);
    mixp_optimizer_add(t->opt, m->tokens, NULL);
    if (m->positions) mixp_optimizer_add(t->opt, m->positions, NULL);
    if (m->head != m->tokens) mixp_optimizer_add(t->opt, m->head, NULL);
    add_matrices(m, t->muon ? t->muon : t->opt);
    mixp_optimizer_group(t->opt, 0, &plain);
    plain.weight_decay = 0;
    mixp_optimizer_add_group(t->opt, &plain);
    for (int i = 0; i < m->layers; i++) {
        layer all[BLOCK_LAYERS];
        block_layers(&m->blocks[i], all);
        mixp_optimizer_add(t->opt, m->blocks[i].norm1.w, NULL);
        mixp_optimizer_add(t->opt, m->blocks[i].norm2.w, NULL);
        for (int k = 0; k < BLOCK_LAYERS; k++)
            if (all[k].b) mixp_optimizer_add(t->opt, all[k].b, NULL);
    }
    mixp_optimizer_add(t->opt, m->norm.w, NULL);
    if (m->norm.b) mixp_optimizer_add(t->opt, m->norm.b, NULL);
}

/* Only fp16 needs a dynamic loss scale: its smallest number is 6e-8. For other dtypes the scale is
 * always 1, and the scaler skips steps with non-finite gradients. */
static void make_scaler(trainer *t) {
    const config    *c = &t->c;
    mixp_scaler_desc d = {.rule = MIXP_RULE_STATIC, .init_scale = 1};
    if (c->rule != MIXP_RULE_COUNT) d = (mixp_scaler_desc){.rule = (mixp_scaler_preset)c->rule};
    else if (c->dtype == DTYPE_FP16) d = (mixp_scaler_desc){.rule = MIXP_RULE_TORCH};
    if (c->init_scale != AUTO) d.init_scale = (float)c->init_scale;
    if (c->growth_interval != AUTO) d.growth_interval = (int)c->growth_interval;
    t->scaler = mixp_scaler_new(t->ctx, &d);
}

/* The options' recipe of this kind. */
static mixp_recipe recipe_of(const config *c, int64_t kind) {
    enum { NONE, STOCHASTIC, HADAMARD, BLOCKS_2D, ALL };
    mixp_recipe r = {.kind = (mixp_recipe_kind)kind, .codes = kind ? (int)c->codes : 0,
                     .e8m0 = (mixp_e8m0_rounding)c->e8m0};
    r.no_stochastic = c->without == STOCHASTIC || c->without == ALL;
    r.no_hadamard = c->without == HADAMARD || c->without == ALL;
    r.no_2d = c->without == BLOCKS_2D || c->without == ALL;
    if (c->over6 & 1) r.w_4over6 = MIXP_4OVER6_MAE;
    if (c->over6 & 2) r.x_4over6 = MIXP_4OVER6_MAE;
    r.row_scaled = (int)c->row_scaled;
    return r;
}

/* Sets the recipe, or the rules of --recipe-of, which end with --recipe for the other weights. */
static void set_recipes(trainer *t) {
    enum { MOST = 64 };
    const char      *choices = options[find_option("recipe", 6)].choices;
    char             text[sizeof t->c.recipe_of], *at = text, *next, *kind;
    mixp_recipe      recipes[MOST];
    mixp_recipe_rule rules[MOST];
    int              n = 0;
    memcpy(text, t->c.recipe_of, sizeof text);
    for (; at && *at; at = next) {
        next = strchr(at, ',');
        if (next) *next++ = '\0';
        kind = strrchr(at, '=');
        if (n == MOST - 1) die(2, "--recipe-of has more than %d names", MOST - 1);
        if (!kind || find_choice(choices, kind + 1) < 0)
            die(2, "--recipe-of: \"%s\" is not NAME=RECIPE, with a RECIPE of %s", at, choices);
        *kind = '\0';
        recipes[n] = recipe_of(&t->c, find_choice(choices, kind + 1));
        rules[n] = (mixp_recipe_rule){at, &recipes[n]};
        n++;
    }
    recipes[n] = recipe_of(&t->c, t->c.recipe);
    rules[n] = (mixp_recipe_rule){"*", &recipes[n]};
    if (n) mixp_autocast_set_recipes(t->ctx, rules, n + 1);
    else mixp_autocast_set_recipe(t->ctx, &recipes[0]);
    check(t, "setting the recipe");
}

/* Each rank but rank 0 writes a file of its own: FILE.1, ... */
static void begin_trail(trainer *t) {
    char path[PATH_SPACE];
    if (!t->c.trail[0]) return;
    snprintf(path, sizeof path, t->ranks.rank ? "%s.%d" : "%s", t->c.trail, t->ranks.rank);
    t->trail = mixp_trail_open(t->ctx, path);
    check(t, "beginning the trail");
}

static void make_trainer(trainer *t) {
    const config *c = &t->c;
    size_t        batch = (size_t)(c->batch * c->block) * sizeof(int32_t);
    int64_t       every = guard_every(c);
    t->dtype = dtypes[c->dtype];
    t->ctx = mixp_context_new(&(mixp_context_desc){
        .device = t->is_profiled ? profile_device(t->device) : t->device,
        .seed = (uint64_t)c->seed, .threads = (int)c->threads, .epilogues = c->epilogues ? (int)c->epilogues : MIXP_EPILOGUES_NONE,
        .narrow_products = (int)c->narrow,
        .ranks = !t->ranks.size ? NULL : t->is_profiled ? profile_ranks(&t->ranks) : &t->ranks});
    t->x = (int32_t *)malloc(batch);
    t->y = (int32_t *)malloc(batch);
    t->losses = (float *)malloc((size_t)(c->accumulate * ranks_of(t)) * sizeof *t->losses);
    if (!t->x || !t->y || !t->losses) die(1, "out of memory: use a smaller --batch or --block");
    if (!t->ctx) die(1, "%s cannot be used: it is out of memory, or fails", t->device_name);
    mixp_autocast_set_level(t->ctx, (int)c->level);
    if (every) mixp_guard_start(t->ctx, &(mixp_guard_desc){.every = every > 0 ? (int)every : 0});
    check(t, "starting the guard");
    t->model.n_parameters = 0;
    make_gpt(&t->model, t->ctx, c, t->data.rows);
    check(t, "making the model");
    set_recipes(t);
    t->model_bytes = mixp_context_memory(t->ctx).used;
    make_optimizer(t);
    make_scaler(t);
    check(t, "making the optimizer");
    t->optimizer_bytes = mixp_context_memory(t->ctx).used - t->model_bytes;
    begin_trail(t);
}

/* What the shared rooms of a run need to know of this one. */
static void settle_run(trainer *t) {
    const config *c = &t->c;
    run          *r = &t->run;
    snprintf(t->go_on, sizeof t->go_on, "%.1000s --out %s --resume", t->program, c->out);
    describe_model(c, t->data.rows, t->model_text);
    vocabulary_text(&t->data, t->vocabulary_text, sizeof t->vocabulary_text);
    t->pairs[0][0] = MODEL_KEY, t->pairs[0][1] = t->model_text;
    t->pairs[1][0] = VOCABULARY_KEY, t->pairs[1][1] = t->vocabulary_text;
    r->pairs = (const char *const (*)[2])t->pairs;
    r->n_pairs = 2;
    r->out = c->out;
    r->from = checkpoint_name(c);
    r->go_on = t->go_on;
    r->advice = what_to_try(c);
    r->resume = (int)c->resume;
    r->overwrite = (int)c->overwrite;
    r->quiet = (int)c->quiet;
    r->csv = (int)c->csv;
    r->only_looks = only_looks(t);
    r->tells_best = !c->init[0];
    r->guarded = guard_every(c) != 0;
    r->rank = t->ranks.rank;
    r->ranks = &t->ranks;
    r->step_tokens = (double)(total_batch(t) * c->block);
    r->token_flops = token_flops(t);
    r->peak_flops = c->peak_tflops == AUTO ? 0 : c->peak_tflops * 1e12 * (double)ranks_of(t);
    r->ctx = t->ctx;
    r->scaler = t->scaler;
    r->optimizers[0] = t->opt;
    r->optimizers[1] = t->muon;
    r->best_val = HUGE_VAL;
}

/* ==== Training ====================================================================== */

/* Returns the loss of the batch in t->x and t->y, multiplied by share. In training, *scaled is that
 * loss multiplied by the loss scale, and its gradient is computed in the same pass over the logits.
 * If the logits need too much memory, they are computed some rows at a time, and again for their
 * gradient. */
static mixp_tensor *batch_loss(trainer *t, float share, mixp_tensor **scaled) {
    mixp_context *ctx = t->ctx;
    int64_t       shape[2] = {t->c.batch, t->c.block};
    mixp_tensor  *loss = NULL, *x, *y, *h;
    x = mixp_input_i32(ctx, 2, shape, t->x);
    y = mixp_input_i32(ctx, 2, shape, t->y);
    MIXP_AUTOCAST(ctx, t->dtype) {
        h = gpt_hidden(&t->model, x, scaled != NULL, 0);
        if (has_chunks(t)) {
            loss = mixp_linear_cross_entropy(ctx, h, t->model.head, y, MIXP_IGNORE, 0);
            if (share < 1) loss = mixp_scale(ctx, loss, share);
            if (scaled) *scaled = mixp_scaler_scale(t->scaler, loss);
        } else {
            h = mixp_linear(ctx, h, t->model.head, NULL);
            mixp_tensor_set_disposable(h, 1);   /* the gradient may overwrite the logits */
            if (!scaled) loss = mixp_cross_entropy(ctx, h, y, MIXP_IGNORE);
            else *scaled = mixp_scaler_cross_entropy(t->scaler, h, y, MIXP_IGNORE, share, &loss);
        }
    }
    return loss;
}

/* Batch i of the --accumulate batches of a step. Does not wait for the device. Ranks exchange
 * gradients after the last batch; with --ordered after each batch. */
static mixp_tensor *train_batch(trainer *t, int64_t i) {
    int64_t      n = t->c.accumulate, ranks = ranks_of(t);
    int          exchanges = t->c.ordered && ranks > 1;
    mixp_tensor *loss, *scaled = NULL;
    if (i == 0 || exchanges) mixp_zero_grad(t->opt);
    if ((i == 0 || exchanges) && t->muon) mixp_zero_grad(t->muon);
    mixp_step_begin(t->ctx);
    if (t->trail && i == 0) mixp_trail_step(t->trail);
    order_batch(i, n);
    loss = batch_loss(t, 1.0f / (float)(exchanges ? n * ranks : n), &scaled);
    mixp_ranks_hold(t->ctx, i < n - 1 && !exchanges);
    mixp_backward(t->ctx, scaled);
    if (i < n - 1) return loss;
    if (t->c.plant && t->run.step + 1 >= t->c.plant) freeze_planted(t);
    if (t->muon) mixp_scaler_step(t->scaler, t->muon);
    mixp_scaler_step(t->scaler, t->opt);        /* unscales, clips and updates, or skips */
    mixp_scaler_update(t->scaler);
    return loss;
}

/* Replays the recording of train_batch, and records it first if there is no recording. Each batch
 * has its own recording, because all batches of one recording would read the same t->x. */
static void replay_batch(trainer *t, int64_t i) {
    mixp_graph **graph = i == t->c.accumulate - 1 ? &t->last : i == 0 ? &t->first : &t->middle;
    if (*graph && mixp_graph_stale(*graph)) *graph = NULL;      /* the dtype of a site changed */
    if (!*graph) {
        mixp_capture_begin(t->ctx);
        train_batch(t, i);
        *graph = mixp_capture_end(t->ctx);
        check(t, "recording a step for --graph");
    }
    mixp_replay(*graph);
}

/* Shares a table among ranks: each rank fills in its own numbers and leaves zeros elsewhere. */
static void share_losses(trainer *t, float *losses, int64_t n) {
    mixp_tensor *all;
    if (ranks_of(t) == 1) return;
    all = mixp_input_f32(t->ctx, 1, &n, losses);
    mixp_ranks_sum(all);
    if (all) mixp_read_f32(all, losses, n);
}

/* Sums the n losses of all ranks in the order of batches, with the bits of a run on one rank. */
static double sum_losses(trainer *t, float *losses, int64_t n) {
    double sum = 0;
    share_losses(t, losses, n);
    for (int64_t i = 0; i < n; i++) sum += (double)losses[i];
    return sum;
}

/* Reads the loss only if the caller wants it, because that waits for the device. Such a step is not
 * replayed, so its loss can be read and mixp_scaler_update sees the state of training. */
static double try_step(trainer *t, int want_loss) {
    int64_t n = t->c.accumulate, ranks = ranks_of(t);
    double  share = t->c.ordered ? 1 : (double)ranks;   /* divides the sum of all losses */
    if (want_loss) memset(t->losses, 0, (size_t)(n * ranks) * sizeof *t->losses);
    for (int64_t i = 0; i < n; i++) {
        mixp_tensor *loss = NULL;
        int64_t      mine = i * ranks + t->ranks.rank;
        fill_batch(&t->data, &t->c, STREAM_TRAIN, t->run.step * n * ranks + mine, t->x, t->y);
        if (t->c.graph && t->warm && !want_loss && !mixp_guard_due(t->ctx)) replay_batch(t, i);
        else loss = train_batch(t, i);
        if (want_loss) t->losses[mine] = (float)mixp_item(loss);
    }
    t->warm = 1;
    return want_loss ? sum_losses(t, t->losses, n * ranks) / share : ABSENT;
}

/* One step of training. A skipped step is repeated with the same batches (--retry). */
static double train_step(trainer *t, int want_loss) {
    double loss = try_step(t, want_loss);
    while (t->c.retry && mixp_retry(t->scaler, (int)t->c.retry)) {
        t->run.last_skip = t->run.step + 1;
        loss = try_step(t, want_loss);
    }
    return loss;
}

/* Returns the mean loss over --eval-batches batches of the validation text, or, for
 * STREAM_EVAL_TRAIN, of the training text. The batches are always the same. Ranks divide the batches,
 * and each rank makes the same number of passes, because a guard counts passes. The losses are added
 * in the order of batches, with the bits of a run on one rank. */
static double mean_loss(trainer *t, uint64_t stream) {
    int64_t n = t->c.eval_batches, ranks = ranks_of(t);
    float  *losses = (float *)calloc((size_t)n, sizeof *losses);
    double  sum;
    if (!losses) die(1, "out of memory: use fewer --eval-batches");
    for (int64_t first = 0; first < n; first += ranks) {
        int64_t mine = first + t->ranks.rank;
        double  loss = 0;
        show_work("validating on", stream == STREAM_VAL ? "validation data" : "training data", first, n);
        fill_batch(&t->data, &t->c, stream, mine < n ? mine : first, t->x, t->y);
        mixp_eval_begin(t->ctx);
        MIXP_NO_GRAD(t->ctx) { loss = mixp_item(batch_loss(t, 1, NULL)); }
        if (mine < n) losses[mine] = (float)loss;
    }
    sum = sum_losses(t, losses, n);
    free(losses);
    check(t, "validating");
    return sum / (double)n;
}

static double validate(trainer *t) { return mean_loss(t, STREAM_VAL); }

static void validate_log_save(trainer *t, double loss) {
    double val = validate(t);
    if (t->c.eval_train) t->run.train_loss = mean_loss(t, STREAM_EVAL_TRAIN);
    int    better = val < t->run.best_val;
    if (better) {
        t->run.best_val = val;
        t->run.best_step = t->run.step;
    }
    log_line(&t->run, loss, val);
    t->run.train_loss = ABSENT;
    if (better) save_run(&t->run, BEST);
    if (better) t->run.best_failed = t->run.save_failed;
    save_run(&t->run, CHECKPOINT);
    keep(t);
    write_report(&t->run);
}

/* A GPU may be a few steps behind; the verdict then belongs to an earlier step. */
static void note_step(trainer *t, double began, double loss) {
    mixp_verdict v = mixp_scaler_verdict(t->scaler);
    t->run.step++;
    t->run.tokens += (double)(total_batch(t) * t->c.block);
    t->run.timed_steps++;
    t->run.seconds += seconds_now() - began;
    if (v.outcome == MIXP_STEP_SKIPPED) t->run.last_skip = t->c.retry ? t->run.step : v.step;
    report_verdict(t->run.metrics, (double)t->run.step, &v);
    tell_events(&t->run);
    check(t, "training");
    look_for_divergence(&t->run, &v, loss);
}

/* Ranks that share optimizer states save together, so they also stop together: at a step that reads
 * the loss, where they wait for each other in any case. */
static void hear_of_signals(trainer *t) {
    float        signal_here = stop_signal ? 1 : 0;
    int64_t      one = 1;
    mixp_tensor *all = mixp_input_f32(t->ctx, 1, &one, &signal_here);
    mixp_ranks_max(all);
    t->stopped = mixp_item(all) > 0;
    if (t->stopped && !stop_signal) stop_signal = SIGTERM;      /* rank 0 reports the signal */
}
static int is_stopped(const trainer *t) { return t->ranks.shard ? t->stopped : stop_signal != 0; }

static void train(trainer *t) {
    const config *c = &t->c;
    double        began = seconds_now();
    int64_t       first = t->run.step;
    t->run.began = began;
    t->run.train_loss = ABSENT;
    if (!c->resume) validate_log_save(t, ABSENT);
    while (t->run.step < c->steps && !is_stopped(t)) {
        int64_t next = t->run.step + 1;
        int     validates = next % c->eval_every == 0 || next == c->steps;
        int     logs = validates || next % c->log_every == 0;
        double  now = seconds_now(), loss;
        if (c->plant && next >= c->plant) plant(t);
        int     watches = logs && t->run.metrics && next % watch_every(c->steps, c->log_every) == 0;
        if (watches) mixp_optimizer_sample(t->opt);
        if (t->is_profiled && t->warm) profile_begin();
        loss = train_step(t, logs);
        if (logs && t->ranks.shard) hear_of_signals(t);
        note_step(t, now, loss);
        profile_end();
        if (watches) report_watching(t->run.metrics, (double)t->run.step, t->ctx, t->opt);
        if (validates) validate_log_save(t, loss);
        else if (logs) log_line(&t->run, loss, ABSENT);
        if (c->sample_every && next % c->sample_every == 0 && next < c->steps) sample_text(t);
        if (progress_bar)
            show_bar(t->run.step, c->steps, (seconds_now() - began) / (double)(t->run.step - first) *
                                            (double)(c->steps - t->run.step));
    }
    hide_bar();
}

/* ==== Main ========================================================================== */

static void train_or_validate(trainer *t) {
    if (t->c.compare) compare(t);
    if (t->c.eval_only) say("val %.4f at step %lld\n", validate(t), (long long)t->run.step);
    if (only_looks(t)) return;
    if (is_training(t)) {
        train(t);
        if (!stop_signal) tell_no_events(&t->run);
    }
    if (!stop_signal && t->run.best_step + t->run.step > 0)
        say("best val %.4f at step %lld, after %lld step%s%s%s\n", t->run.best_val,
            (long long)t->run.best_step, (long long)t->run.step, t->run.step == 1 ? "" : "s",
            t->c.out[0] ? "; in " : "", t->c.out);
}

static int finish(trainer *t, int trained) {
    const config *c = &t->c;
    int           status;
    if (is_stopped(t) || (stop_signal && !trained)) {
        if (trained) save_run(&t->run, CHECKPOINT);       /* without training there is nothing new to save */
        status = report_stop(&t->run, trained);
        return t->ranks.rank ? t->run.save_failed : status;     /* rank 0 may still save */
    }
    if (c->sample > 0 && !t->ranks.rank) sample_text(t);
    if (c->export_to[0] && !t->ranks.rank) export_weights(t);
    if (trained && c->out[0] && !c->quiet && !t->run.save_failed)
        say_line("to sample:", " %s --out %s --resume --steps 0 --sample 500", t->program, c->out);
    return stop_signal ? stop_status() : t->run.save_failed || t->run.best_failed;
}

/* Checks all settings and files before the first write. */
static void prepare(trainer *t) {
    int     known;
    int32_t ids[PROMPT_TOKENS];
    check_options(&t->c);
    settle_total_batch(&t->c, ranks_of(t));
    check_ordered_ranks(&t->c, ranks_of(t));
    if (!t->ranks.rank) tell_idle_options(&t->c);
    check_export_path(&t->c);
    t->device = choose_device(t->c.device, t->c.isa, (int)t->c.graph, t->device_name,
                              sizeof t->device_name, &t->no_gpu);
    if (!t->ranks.rank) tell_idle_epilogues(&t->c, t->device->kernels->gemm_epilogue != NULL);
    if (!t->ranks.rank) tell_idle(&t->c, "isa", on_gpu(t), "the run is on a GPU; add --device cpu");
    known = read_vocabulary(&t->data, &t->c);
    read_words(&t->data, &t->c);
    if (!known) read_data(t);
    read_prompt(&t->c, &t->data, ids);
    check_memory(t);
    t->is_profiled = t->c.profile || (t->c.out[0] && !on_gpu(t));
    make_trainer(t);
    settle_run(t);
    resume_or_begin(t);
    if (t->ranks.rank) t->c.out[0] = '\0';      /* only rank 0 writes */
    if (is_training(t) || only_looks(t) || t->data.count > 0) read_data(t);
    open_folder(t);
    if (!t->ranks.rank) make_export_folder(&t->c);
}

static int run_trainer(trainer *t) {
    int trained, status;
    if (t->c.report) return show_report(t);
    look_at_terminal(t->c.quiet || under_launcher(t->c.ranks));
    prepare(t);
    hide_bar();
    if (!t->ranks.rank) catch_signals();        /* rank 0 stops the other ranks */
    quiet_terminal();
    if (!t->c.quiet) print_header(t);
    if (!t->ranks.rank && is_training(t)) tell_of_ranks(t);
    warn_of_threads(t);
    trained = is_training(t);
    train_or_validate(t);
    status = finish(t, trained);
    if (t->c.profile) print_profile(t);
    if (trained) end_report(t);
    return status;
}

/* If a standard stream is closed, the next opened file would get its descriptor, and printed lines
 * would go into that file. Opens a placeholder on which reads and writes fail. */
static void hold_standard_files(void) {
    for (int i = 0; i <= STDERR_FILENO; i++)
        if (fcntl(i, F_GETFD) < 0 && open("/dev/null", i == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0)
            return;
}

/* Only rank 0 prints and writes; but all ranks read a resumed folder first. One process writes a report. */
static mixp_ranks_desc join_ranks(config *c, int *argc, char ***argv) {
    ranks_options   how = {.ranks = c->report ? "" : c->ranks, .seconds = c->rank_seconds,
                           .shard = (int)c->shard, .ordered = c->ordered && !c->report, .device = c->device};
    mixp_ranks_desc d;
    if (strncmp(how.ranks, "fork:", 5) == 0 && c->threads == 0) c->threads = 1;
    d = start_ranks(&how, argc, argv);
    if (d.rank) c->quiet = 1;
    if (d.rank && !c->resume) c->out[0] = '\0';
    return d;
}

int main(int argc, char **argv) {
    trainer t;
    char    warning[MIXP_MESSAGE_SIZE], sets[256] = "";
    int     status;
    memset(&t, 0, sizeof t);
    t.run.lock = -1;
    hold_standard_files();
#ifdef SIGXFSZ
    signal(SIGXFSZ, SIG_IGN);           /* at a size limit a write fails, as on a full disk */
#endif
    read_options(&t.c, argc, argv);
    keep_command_line(argc, argv);
    if (t.c.help) { print_help(); return fflush(stdout) != 0; }
    if (strcmp(t.c.isa, "list") == 0) { puts(isa_list(sets, sizeof sets)); return fflush(stdout) != 0; }
    if (t.c.version) { printf("trainer %s\n", mixp_version()); return fflush(stdout) != 0; }
    if (mixp_self_check(warning, sizeof warning) != MIXP_OK || warning[0])
        fprintf(stderr, "trainer: warning: %s\n", warning);
    t.program = argv[0];
    t.run.saves = t.c.out[0] != '\0';
    t.ranks = join_ranks(&t.c, &argc, &argv);
    if (t.ranks.rank && !t.ranks.shard) t.run.saves = 0;
    status = run_trainer(&t);
    free_trainer(&t);
    return end_ranks(t.c.report ? "" : t.c.ranks, &t.ranks, status);
}
