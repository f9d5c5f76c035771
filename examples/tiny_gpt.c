/* tiny_gpt.c - trains a GPT on the bytes of a text, or on tokens, in fp32, fp16 or bf16
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     cc -O2 examples/tiny_gpt.c -o tiny_gpt -lm        (add -fopenmp for more threads)
 *     ./tiny_gpt --data input.txt --dtype fp16 --out run --sample 500
 *
 * With a GPU, mixprec_cuda.cu beside mixprec.h, and CUDA's compiler:
 *
 *     cc -O2 -DTINY_GPT_CUDA -c examples/tiny_gpt.c
 *     nvcc -O2 -arch=native tiny_gpt.o mixprec_cuda.cu -lcublasLt -o tiny_gpt
 *
 * The model is nanoGPT's: pre-norm blocks, learned positions, the output head tied to the
 * token embedding. The vocabulary of a text is the set of its bytes; a FILE.bin holds tokens
 * made elsewhere, as nanoGPT and llm.c write them.
 *
 * To see mixed precision at work, read train_batch and make_optimizer. What every trainer has
 * stands in the headers beside this file:
 *
 *     tiny_gpt_terminal.h   messages, the bar of progress, signals
 *     tiny_gpt_options.h    the command line, presets, config.json
 *     tiny_gpt_data.h       texts, tokens, vocabulary, batches, prompts
 *     tiny_gpt_machine.h    the device, its memory, where a step went
 *     tiny_gpt_output.h     what is printed and logged
 *     tiny_gpt_files.h      the folder of a run: checkpoints, metrics
 *     tiny_gpt_sample.h     writing on, token by token
 *     tiny_gpt_ranks.h      --ranks: many processes, perhaps on many machines
 *     profile.h             the time of each kernel, for any program
 *     report.h              the log of a run, and a page that shows it, for any program
 *     plant.h               an overflow of fp16
 *
 * Exit status: 0 done, 1 failed, 2 wrong usage, 128 + N stopped by signal N (Ctrl-C: 130).
 */
#ifndef _POSIX_C_SOURCE
#  define _POSIX_C_SOURCE 200809L       /* sigaction, isatty, mkdir, clock_gettime */
#endif
#define MIXPREC_IMPLEMENTATION
#include "../mixprec.h"
#include <fcntl.h>
#ifdef _OPENMP
#  include <omp.h>
#endif
#include "tiny_gpt_data.h"
#include "profile.h"
#include "report.h"
#include "plant.h"
#include "tiny_gpt_ranks.h"

/* ==== Model ========================================================================= */

typedef struct layer { mixp_tensor *w, *b; } layer;     /* weight; bias or NULL */

typedef struct block {
    layer norm1, qkv, attn_out, norm2, up, down;
} block;

typedef struct gpt {
    mixp_context *ctx;
    mixp_tensor  *tokens, *positions;
    layer         norm;
    block        *blocks;
    int32_t      *ramp;                 /* 0, 1, 2 ...: the numbers of the positions */
    mixp_dtype    dtype;                /* of the weights */
    int           layers, heads, bias;
    int           is_measured;          /* 1: nobody looks at its numbers */
    float         dropout;
    int64_t       n_parameters;
} gpt;

/* A tensor to train, all zeros. Names are nanoGPT's. */
static mixp_tensor *make_tensor(gpt *m, int index, const char *name, const char *part,
                                int64_t rows, int64_t cols) {
    int64_t      shape[2] = {rows, cols};
    char         full[64];
    mixp_tensor *t;
    if (index < 0) snprintf(full, sizeof full, "transformer.%s.%s", name, part);
    else snprintf(full, sizeof full, "transformer.h.%d.%s.%s", index, name, part);
    t = mixp_param(m->ctx, full, m->dtype, cols ? 2 : 1, shape);
    if (t) m->n_parameters += t->count;
    return t;
}

/* A weight drawn from N(0, std); std 0: a norm's gain, all ones. Biases begin as zeros. */
static layer make_layer(gpt *m, int index, const char *name, int64_t rows, int64_t cols,
                        double std) {
    layer l = {NULL, NULL};
    l.w = make_tensor(m, index, name, "weight", rows, cols);
    if (std <= 0) mixp_fill(l.w, 1);
    else if (!m->is_measured) mixp_init_normal(l.w, 0, std);
    if (m->bias) l.b = make_tensor(m, index, name, "bias", rows, 0);
    return l;
}

static mixp_tensor *make_table(gpt *m, const char *name, int64_t rows, int64_t cols) {
    mixp_tensor *t = make_tensor(m, -1, name, "weight", rows, cols);
    if (!m->is_measured) mixp_init_normal(t, 0, 0.02);
    return t;
}

static void make_gpt(gpt *m, mixp_context *ctx, const config *c, int64_t vocab) {
    mixp_dtype low = c->dtype == DTYPE_FP16 ? MIXP_F16 : MIXP_BF16;
    int64_t    w = c->width;
    /* Each block adds twice to the residual stream: its variance must not grow with depth. */
    double     out_std = 0.02 / sqrt(2.0 * (double)c->layers);
    m->ctx = ctx;
    /* Only products read what norms give, and would cast it: so it is stored low at once. */
    mixp_autocast_override(ctx, mixp_op_builtin(MIXP_OP_LAYER_NORM), MIXP_CLASS_LOW_OUT);
    m->dtype = c->level == 3 && c->dtype != DTYPE_FP32 ? low : MIXP_F32;
    m->layers = (int)c->layers;
    m->heads = (int)c->heads;
    m->bias = (int)c->bias;
    m->dropout = (float)c->dropout;
    m->blocks = (block *)calloc((size_t)c->layers, sizeof *m->blocks);
    m->ramp = (int32_t *)malloc((size_t)c->block * sizeof *m->ramp);
    if (!m->blocks || !m->ramp) die(1, "out of memory");
    for (int64_t i = 0; i < c->block; i++) m->ramp[i] = (int32_t)i;
    m->tokens = make_table(m, "wte", vocab, w);
    m->positions = make_table(m, "wpe", c->block, w);
    for (int i = 0; i < m->layers; i++) {
        block *b = &m->blocks[i];
        b->norm1 = make_layer(m, i, "ln_1", w, 0, 0);
        b->qkv = make_layer(m, i, "attn.c_attn", 3 * w, w, 0.02);
        b->attn_out = make_layer(m, i, "attn.c_proj", w, w, out_std);
        b->norm2 = make_layer(m, i, "ln_2", w, 0, 0);
        b->up = make_layer(m, i, "mlp.c_fc", 4 * w, w, 0.02);
        b->down = make_layer(m, i, "mlp.c_proj", w, 4 * w, out_std);
    }
    m->norm = make_layer(m, -1, "ln_f", w, 0, 0);
}

static mixp_tensor *linear(const gpt *m, mixp_tensor *x, layer l)
{ return mixp_linear(m->ctx, x, l.w, l.b); }

static mixp_tensor *norm(const gpt *m, mixp_tensor *x, layer l)
{ return mixp_layer_norm(m->ctx, x, l.w, l.b, 1e-5f); }

/* x += f, and the norm of that: add and layer_norm in one pass. */
static mixp_tensor *add_norm(const gpt *m, mixp_tensor **x, mixp_tensor *f, layer l)
{ return mixp_add_layer_norm(m->ctx, *x, f, l.w, l.b, 1e-5f, x); }

/* x += attention(h), then x += mlp(norm(x)), where h is norm(x); the next norm of x. */
static mixp_tensor *block_forward(const gpt *m, const block *b, layer next, mixp_tensor **x,
                                  mixp_tensor *h, int training) {
    mixp_context *ctx = m->ctx;
    h = mixp_attention(ctx, linear(m, h, b->qkv), m->heads, 1, 0);
    h = linear(m, h, b->attn_out);
    h = add_norm(m, x, mixp_dropout(ctx, h, m->dropout, training), b->norm2);

    h = mixp_gelu(ctx, linear(m, h, b->up));
    h = linear(m, h, b->down);
    return add_norm(m, x, mixp_dropout(ctx, h, m->dropout, training), next);
}

/* logits[batch, length, vocab] of the tokens ids[batch, length]; when `last`, of one sequence,
 * logits[1, vocab] of its last token alone. No line of it knows about precision: autocast
 * decides, operator by operator. */
static mixp_tensor *gpt_logits(const gpt *m, mixp_tensor *ids, int training, int last) {
    mixp_context *ctx = m->ctx;
    int64_t       length = ids ? ids->shape[1] : 1, one = 1;
    int64_t       rows[2] = {length, m->positions->shape[1]};
    mixp_tensor  *x, *h;
    x = mixp_add(ctx, mixp_embedding(ctx, m->tokens, ids),
                 mixp_embedding(ctx, m->positions, mixp_input(ctx, MIXP_I32, 1, &length, m->ramp)));
    x = mixp_dropout(ctx, x, m->dropout, training);
    h = norm(m, x, m->blocks[0].norm1);
    for (int i = 0; i < m->layers; i++) {
        layer next = i + 1 < m->layers ? m->blocks[i + 1].norm1 : m->norm;
        h = block_forward(m, &m->blocks[i], next, &x, h, training);
    }
    if (last)                           /* a row of h, as an embedding picks one of a table */
        h = mixp_embedding(ctx, mixp_reshape(ctx, h, 2, rows),
                           mixp_input(ctx, MIXP_I32, 1, &one, &m->ramp[length - 1]));
    return mixp_linear(ctx, h, m->tokens, NULL);
}

/* ==== Optimizer ===================================================================== */

typedef struct trainer {
    mixp_ranks_desc ranks;              /* size 0: there are none */
    config          c;
    const mixp_device *device;
    char            device_name[32];
    const char     *no_gpu;             /* why --device auto has found none, or "" */
    corpus          data;
    mixp_context   *ctx;
    gpt             model;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_dtype      dtype;              /* of the autocast region */
    int32_t        *x, *y;              /* a batch; replays read it where it was recorded */
    int             warm;               /* 1: a step has allocated all that steps need */
    mixp_graph     *first, *middle, *last;  /* --graph: batches of a step; last also of one alone */
    int64_t         step, last_skip;    /* done so far; last_skip 0 = none */
    double          best_val;           /* the lowest validation loss */
    int64_t         best_step;
    report_file    *metrics;
    int             is_profiled;        /* 1: kernels are timed, for --profile or the report */
    int             lock;               /* descriptor of the folder's lock; -1 = none */
    int             locked_out;         /* 1: another run had the folder when ours began */
    int             save_failed;
    int64_t         applied, streak;    /* steps applied; where a streak of skips began */
    int             warned;             /* 1: of divergence, in this streak */
    double          seconds;            /* of training since the last log line */
    int64_t         timed_steps;
    size_t          model_bytes, optimizer_bytes;   /* for --profile */
    double          step_bytes;         /* that a step will need; 0 = unknown */
    int64_t         trained_hash;       /* of the data it was trained on */
    int64_t         rows;               /* of the log so far */
    int64_t         events, events_told;    /* of the guard: read, printed */
    const char     *program;            /* as it was called */
} trainer;

static void         make_optimizer(trainer *t);
static void         make_scaler(trainer *t);
static mixp_tensor *train_batch(trainer *t, int64_t i);
static const mixp_dtype dtypes[] = {MIXP_F32, MIXP_F16, MIXP_BF16};

#include "tiny_gpt_machine.h"
#include "tiny_gpt_output.h"
#include "tiny_gpt_files.h"
#include "tiny_gpt_sample.h"

/* Matrices decay, vectors do not. The optimizer clips by itself (max_norm): scaler_step then
 * unscales, clips and updates in one pass over the parameters. */
static void make_optimizer(trainer *t) {
    const config   *c = &t->c;
    const gpt      *m = &t->model;
    mixp_adamw_desc d = mixp_adamw_defaults();
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
    t->opt = mixp_adamw_new(t->ctx, &d);
    mixp_optimizer_add(t->opt, m->tokens, NULL);
    mixp_optimizer_add(t->opt, m->positions, NULL);
    for (int i = 0; i < m->layers; i++) {
        mixp_optimizer_add(t->opt, m->blocks[i].qkv.w, NULL);
        mixp_optimizer_add(t->opt, m->blocks[i].attn_out.w, NULL);
        mixp_optimizer_add(t->opt, m->blocks[i].up.w, NULL);
        mixp_optimizer_add(t->opt, m->blocks[i].down.w, NULL);
    }
    mixp_optimizer_group(t->opt, 0, &plain);
    plain.weight_decay = 0;
    mixp_optimizer_add_group(t->opt, &plain);
    for (int i = 0; i < m->layers; i++) {
        const block *b = &m->blocks[i];
        const layer  all[] = {b->norm1, b->qkv, b->attn_out, b->norm2, b->up, b->down};
        mixp_optimizer_add(t->opt, b->norm1.w, NULL);
        mixp_optimizer_add(t->opt, b->norm2.w, NULL);
        for (int k = 0; m->bias && k < 6; k++) mixp_optimizer_add(t->opt, all[k].b, NULL);
    }
    mixp_optimizer_add(t->opt, m->norm.w, NULL);
    if (m->bias) mixp_optimizer_add(t->opt, m->norm.b, NULL);
}

/* Only fp16 needs a moving loss scale: its smallest number is 6e-8. For the others the scale
 * stays 1, and the scaler still skips a step whose gradients are not finite. */
static void make_scaler(trainer *t) {
    const config    *c = &t->c;
    mixp_scaler_desc d = {.rule = MIXP_RULE_STATIC, .init_scale = 1};
    if (c->rule != MIXP_RULE_COUNT) d = (mixp_scaler_desc){.rule = (mixp_scaler_preset)c->rule};
    else if (c->dtype == DTYPE_FP16) d = (mixp_scaler_desc){.rule = MIXP_RULE_TORCH};
    if (c->init_scale != AUTO) d.init_scale = (float)c->init_scale;
    if (c->growth_interval != AUTO) d.growth_interval = (int)c->growth_interval;
    t->scaler = mixp_scaler_new(t->ctx, &d);
}

static void make_trainer(trainer *t) {
    const config *c = &t->c;
    size_t        batch = (size_t)(c->batch * c->block) * sizeof(int32_t);
    int64_t       every = guard_every(c);
    t->best_val = HUGE_VAL;
    t->dtype = dtypes[c->dtype];
    t->ctx = mixp_context_new(&(mixp_context_desc){
        .device = t->is_profiled ? profile_device(t->device) : t->device,
        .seed = (uint64_t)c->seed, .threads = (int)c->threads,
        .ranks = t->ranks.size ? &t->ranks : NULL});
    t->x = (int32_t *)malloc(batch);
    t->y = (int32_t *)malloc(batch);
    if (!t->x || !t->y) die(1, "out of memory: use a smaller --batch or --block");
    if (!t->ctx) die(1, "%s cannot be used: it is out of memory, or fails", t->device_name);
    mixp_autocast_set_level(t->ctx, (int)c->level);
    if (every) mixp_guard_start(t->ctx, &(mixp_guard_desc){.every = every > 0 ? (int)every : 0});
    check(t, "starting the guard");
    t->model.n_parameters = 0;
    make_gpt(&t->model, t->ctx, c, t->data.rows);
    check(t, "making the model");
    t->model_bytes = mixp_context_memory(t->ctx).used;
    make_optimizer(t);
    make_scaler(t);
    check(t, "making the optimizer");
    t->optimizer_bytes = mixp_context_memory(t->ctx).used - t->model_bytes;
}

/* ==== Training ====================================================================== */

/* The tokens of a batch: t->x or t->y. */
static mixp_tensor *batch_input(trainer *t, const int32_t *tokens) {
    int64_t shape[2] = {t->c.batch, t->c.block};
    return mixp_input(t->ctx, MIXP_I32, 2, shape, tokens);
}

static mixp_tensor *batch_logits(trainer *t, int training) {
    mixp_tensor *logits = gpt_logits(&t->model, batch_input(t, t->x), training, 0);
    mixp_tensor_set_disposable(logits, 1);          /* their gradient may lie over them */
    return logits;
}

static double batch_loss(trainer *t) {
    mixp_tensor *loss = NULL;
    MIXP_AUTOCAST(t->ctx, t->dtype) {
        loss = mixp_cross_entropy(t->ctx, batch_logits(t, 0), batch_input(t, t->y), MIXP_IGNORE);
    }
    return mixp_item(loss);
}

/* Batch i of the --accumulate of a step: a step is all of them in order. Nothing here waits for
 * the device. */
static mixp_tensor *train_batch(trainer *t, int64_t i) {
    int64_t      n = t->c.accumulate;
    mixp_tensor *loss = NULL, *scaled = NULL;
    if (i == 0) mixp_zero_grad(t->opt);
    mixp_step_begin(t->ctx);
    MIXP_AUTOCAST(t->ctx, t->dtype) {           /* its mean, divided by n, times the loss scale */
        scaled = mixp_scaler_cross_entropy(t->scaler, batch_logits(t, 1), batch_input(t, t->y),
                                           MIXP_IGNORE, 1.0f / (float)n, &loss);
    }
    mixp_ranks_hold(t->ctx, i < n - 1);         /* only the last one's gradients leave the rank */
    mixp_backward(t->ctx, scaled);
    if (i < n - 1) return loss;
    if (t->c.plant && t->step + 1 >= t->c.plant) freeze_planted(t);
    mixp_scaler_step(t->scaler, t->opt);        /* unscales, clips and updates, or skips */
    mixp_scaler_update(t->scaler);
    return loss;
}

/* train_batch from its recording, made when there is none. Each batch is one of its own: all
 * in one would read the same t->x. */
static void replay_batch(trainer *t, int64_t i) {
    mixp_graph **graph = i == t->c.accumulate - 1 ? &t->last : i == 0 ? &t->first : &t->middle;
    if (*graph && mixp_graph_stale(*graph)) *graph = NULL;      /* a site has another dtype now */
    if (!*graph) {
        mixp_capture_begin(t->ctx);
        train_batch(t, i);
        *graph = mixp_capture_end(t->ctx);
        check(t, "recording a step for --graph");
    }
    mixp_replay(*graph);
}

/* One step of training. Reading the loss waits for the device: only when it is wanted. Such a
 * step is not replayed: its loss can be read, and mixp_scaler_update sees how training goes. */
static double train_step(trainer *t, int want_loss) {
    int64_t n = t->c.accumulate, ranks = t->ranks.size ? t->ranks.size : 1;
    double  mean = 0;
    for (int64_t i = 0; i < n; i++) {
        mixp_tensor *loss = NULL;
        fill_batch(&t->data, &t->c, STREAM_TRAIN, (t->step * n + i) * ranks + t->ranks.rank, t->x,
                   t->y);
        if (t->c.graph && t->warm && !want_loss && !mixp_guard_due(t->ctx)) replay_batch(t, i);
        else loss = train_batch(t, i);
        if (want_loss) mixp_ranks_sum(loss);
        if (want_loss) mean += mixp_item(loss) / (double)ranks;
    }
    t->warm = 1;
    return want_loss ? mean : ABSENT;
}

/* The mean loss over --eval-batches of the validation text, the same ones each time. */
static double validate(trainer *t) {
    double sum = 0;
    for (int64_t i = 0; i < t->c.eval_batches; i++) {
        fill_batch(&t->data, &t->c, STREAM_VAL, i, t->x, t->y);
        mixp_step_begin(t->ctx);
        MIXP_NO_GRAD(t->ctx) { sum += batch_loss(t); }
    }
    check(t, "validating");
    return sum / (double)t->c.eval_batches;
}

static void validate_log_save(trainer *t, double loss) {
    double val = validate(t);
    int    better = val < t->best_val;
    if (better) {
        t->best_val = val;
        t->best_step = t->step;
    }
    log_line(t, loss, val);
    if (better) save(t, BEST);
    save(t, CHECKPOINT);
    write_report(t);
}

/* A GPU may be some steps behind: then the verdict is that of an earlier step. */
static void note_step(trainer *t, double began, double loss) {
    mixp_verdict v = mixp_scaler_verdict(t->scaler);
    t->step++;
    t->timed_steps++;
    t->seconds += seconds_now() - began;
    if (v.outcome == MIXP_STEP_SKIPPED) t->last_skip = v.step;
    report_verdict(t->metrics, (double)t->step, &v);
    tell_events(t);
    check(t, "training");
    look_for_divergence(t, &v, loss);
}

static void train(trainer *t) {
    const config *c = &t->c;
    double        began = seconds_now();
    int64_t       first = t->step;
    if (!c->resume) validate_log_save(t, ABSENT);
    while (t->step < c->steps && !stop_signal) {
        int64_t next = t->step + 1;
        int     validates = next % c->eval_every == 0 || next == c->steps;
        int     logs = validates || next % c->log_every == 0;
        double  now = seconds_now(), loss;
        if (c->plant && next >= c->plant) plant(t);
        int     watches = logs && t->metrics && next % watch_every(c) == 0;
        if (watches) mixp_optimizer_sample(t->opt);
        if (t->is_profiled && t->warm) profile_begin();
        loss = train_step(t, logs);
        note_step(t, now, loss);
        profile_end();
        if (watches) report_watching(t->metrics, (double)t->step, t->ctx, t->opt);
        if (validates) validate_log_save(t, loss);
        else if (logs) log_line(t, loss, ABSENT);
        if (progress_bar)
            show_bar(t->step, c->steps, (seconds_now() - began) / (double)(t->step - first) *
                                            (double)(c->steps - t->step));
    }
    hide_bar();
}

/* ==== Main ========================================================================== */

static void train_or_validate(trainer *t) {
    if (t->c.compare) compare(t);
    if (t->c.eval_only) say("val %.4f at step %lld\n", validate(t), (long long)t->step);
    if (only_looks(t)) return;
    if (is_training(t)) train(t);
    if (!stop_signal && t->best_step + t->step > 0)
        say("best val %.4f at step %lld, after %lld steps%s%s\n", t->best_val,
            (long long)t->best_step, (long long)t->step, t->c.out[0] ? "; in " : "", t->c.out);
}

static int finish(trainer *t, int trained) {
    const config *c = &t->c;
    if (stop_signal) {
        save(t, CHECKPOINT);
        return report_stop(t);
    }
    if (c->sample > 0) sample_text(t);
    if (trained && c->out[0] && !c->quiet && !t->save_failed)
        say_line("again", "%s --out %s --resume --steps 0 --sample 500", t->program, c->out);
    return t->save_failed || stop_signal;
}

/* Nothing is written before all is known to be well. */
static void prepare(trainer *t) {
    int32_t ids[sizeof t->c.prompt];
    check_options(&t->c);
    t->device = choose_device(&t->c, t->device_name, sizeof t->device_name, &t->no_gpu);
    if (!read_vocabulary(&t->data, &t->c)) read_data(t);
    read_prompt(&t->c, &t->data, ids);
    check_memory(t);
    t->is_profiled = t->c.profile || (t->c.out[0] && t->device == mixp_cpu());
    make_trainer(t);
    resume_or_begin(t);
    if (t->ranks.rank) t->c.out[0] = '\0';      /* rank 0 writes */
    if (is_training(t) || only_looks(t) || t->data.count > 0) read_data(t);
    open_folder(t);
}

static int run(trainer *t) {
    int trained, status;
    if (t->c.report) return show_report(t);
    prepare(t);
    look_at_terminal((int)t->c.quiet);
    if (!t->ranks.rank) catch_signals();
    else signal(SIGINT, SIG_IGN);               /* rank 0 stops, and so do the others */
    quiet_terminal();
    if (!t->c.quiet) print_header(t);
    warn_of_threads(t);
    trained = is_training(t);
    train_or_validate(t);
    status = finish(t, trained);
    if (t->c.profile) print_profile(t);
    if (trained) end_report(t);
    return status;
}

int main(int argc, char **argv) {
    trainer t;
    char    warning[MIXP_MESSAGE_SIZE];
    int     status;
    memset(&t, 0, sizeof t);
    t.lock = -1;
    read_options(&t.c, argc, argv);
    if (t.c.help) { print_help(); return fflush(stdout) != 0; }
    if (t.c.version) { printf("tiny_gpt %s\n", mixp_version()); return fflush(stdout) != 0; }
    if (mixp_self_check(warning, sizeof warning) != MIXP_OK)
        fprintf(stderr, "tiny_gpt: warning: %s\n", warning);
    t.program = argv[0];
    t.ranks = start_ranks(&t.c, &argc, &argv);
    status = run(&t);
    free_trainer(&t);
    return end_ranks(&t.c, &t.ranks, status);
}
