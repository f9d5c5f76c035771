/* output.h - what a run prints and logs: a part of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_OUTPUT_H
#define TRAINER_OUTPUT_H

/* The dtype and level of the forward and backward pass; without a low dtype, --level has no
 * effect. */
static void precision_text(const config *c, char *text, size_t space) {
    char dtype[16];
    option_text(c, &options[find_option("dtype", 5)], dtype, sizeof dtype);
    if (c->dtype == DTYPE_FP32)
        snprintf(text, space, c->level > 1 ? "fp32 (level %d is for fp16 and bf16)" : "fp32",
                 (int)c->level);
    else if (c->level == 0) snprintf(text, space, "fp32 (level 0: no autocast)");
    else if (!c->recipe && !c->recipe_of[0])
        snprintf(text, space, "%s at level %d", dtype, (int)c->level);
    else
        snprintf(text, space, "%s at level %d, linear layers in %s%s%s%s", dtype, (int)c->level,
                 c->recipe ? mixp_recipe_name((mixp_recipe_kind)c->recipe) : "bf16",
                 c->recipe_of[0] ? " but for " : "", c->recipe_of,
                 c->codes ? ", their inputs kept as codes" : "");
}

/* How the architecture differs from nanoGPT's. */
static void print_form(const config *c) {
    char text[128] = "";
    if (c->activation == ACTIVATION_GELU_TANH) strcat(text, ", gelu-tanh");
    if (c->activation == ACTIVATION_RELU2) strcat(text, ", relu2");
    if (c->norm == NORM_RMS) strcat(text, ", rms norm");
    if (c->positions == POSITIONS_ROPE) strcat(text, ", rope");
    if (c->qk_norm) strcat(text, ", qk norm");
    if (c->head == HEAD_OWN) strcat(text, ", own head");
    if (c->optimizer == OPTIMIZER_MUON) strcat(text, ", Muon");
    if (text[0]) say_line("form", "%s", text + 2);
}

static void print_model(const trainer *t) {
    const config *c = &t->c;
    char          padded[32] = "", need[32], have[32], of[96] = "";
    double        data = (double)t->data.own, machine;
    if (t->data.rows > t->data.vocab)
        snprintf(padded, sizeof padded, " padded to %lld", (long long)t->data.rows);
    say_line("model", "%lld layers, %lld heads, width %lld, block %lld, vocabulary %lld%s",
             (long long)c->layers, (long long)c->heads, (long long)c->width, (long long)c->block,
             (long long)t->data.vocab, padded);
    print_form(c);
    machine = on_gpu(t) ? 0 : machine_memory();
    if (t->step_bytes > 0)
        snprintf(of, sizeof of, ", about %s%s", bytes_text(t->step_bytes + data, need, sizeof need),
                 t->ranks.size > 1 ? " a rank" : "");
    if (t->step_bytes > 0 && machine > 0)
        snprintf(of + strlen(of), sizeof of - strlen(of), " of the machine's %s",
                 bytes_text(machine, have, sizeof have));
    say_line("size", "%.2f M parameters%s", (double)t->model.n_parameters / 1e6, of);
}

static void print_data(const trainer *t) {
    const config *c = &t->c;
    const char   *unit = t->data.is_text ? "bytes" : "tokens";
    char          files[32] = "";
    if (t->data.count == 0) return;
    if (t->data.n_shards > 1 + (c->val_data[0] != '\0'))
        snprintf(files, sizeof files, "%lld files, ", (long long)t->data.n_shards);
    say_line("data", "%s: %s%lld %s to train on, %lld to validate%s%s", c->data, files,
             (long long)t->data.train, unit, (long long)(t->data.count - t->data.train),
             c->val_data[0] ? " of " : "", c->val_data);
}

/* The number of sequences in a step of all ranks. */
static int64_t total_batch(const trainer *t)
{ return t->c.batch * t->c.accumulate * ranks_of(t); }

/* Reports what changes if a run resumes with another number of ranks. */
static void tell_of_ranks(const trainer *t) {
    const config *c = &t->c;
    int64_t       now = ranks_of(t), before = c->ranks_before;
    long long     total = (long long)total_batch(t), was = (long long)c->total_before;
    if (!c->resume || now == before) return;
    if (total != was)
        warn("%lld rank%s in place of %lld: a step has %lld sequences, and had %lld: --total-batch %lld "
             "keeps that", (long long)now, now == 1 ? "" : "s", (long long)before, total, was, was);
    else if (!c->quiet)
        say_line("ranks", "%lld in place of %lld: a step has %lld sequences, as before",
                 (long long)now, (long long)before, total);
}

static void print_run(const trainer *t) {
    const config *c = &t->c;
    char          precision[760], rule[32], how[32], world[32] = "";
    int           threads = mixp_context_exec(t->ctx)->threads;
    int64_t       ranks = ranks_of(t);
    precision_text(c, precision, sizeof precision);
    option_text(c, &options[find_option("rule", 4)], rule, sizeof rule);
    snprintf(how, sizeof how, "%d thread%s", threads, threads == 1 ? "" : "s");
    if (ranks > 1) snprintf(world, sizeof world, "%lld ranks, ", (long long)ranks);
    if (on_gpu(t))
        snprintf(how, sizeof how, c->graph ? "as a graph" : "step by step");
    if (HAS_CUDA && t->no_gpu[0])
        say_line("device", "%s%s", on_gpu(t) ? "" : "no GPU is used: ", t->no_gpu);
    say_line("run", "%s, loss scale %s, %s, %s, %s%lld x %lld tokens a step", precision, rule,
             t->device_name, how, world, (long long)total_batch(t), (long long)c->block);
    if (c->resume && t->run.step >= c->steps)
        say_line("resumed", "at step %lld; nothing is left to train: --steps is %lld",
                 (long long)t->run.step, (long long)c->steps);
    else if (c->resume)
        say_line("resumed", "at step %lld of %lld", (long long)t->run.step, (long long)c->steps);
    if (guard_every(c))
        say_line("guard", "on: a site that overflows falls back to f32%s",
                 c->recipe || c->recipe_of[0] ? "; an operand that loses too much, to bf16" : "");
    if (c->init[0]) say_line("begun", "with the weights of %s", c->init);
}

static void print_header(const trainer *t) {
    print_model(t);
    print_data(t);
    print_run(t);
}

/* Floating-point operations of a token in training, of the model alone: what is computed twice counts
 * once. Source: A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022,
 * arXiv:2204.02311, appendix B: 6N + 12LHQT, where N are the parameters, without tables that are only
 * looked up, L layers, H heads of Q elements and T tokens in a sequence. */
static double token_flops(const trainer *t) {
    const config *c = &t->c;
    const gpt    *m = &t->model;
    int64_t       n = m->n_parameters;
    if (m->positions) n -= m->positions->count;
    if (m->head != m->tokens) n -= m->tokens->count;
    return 6 * (double)n + 12 * (double)(c->layers * c->width * c->block);
}

static void print_utilization(const run *r, double seconds) {
    double mfu = utilization(r, seconds);
    if (mfu == ABSENT) return;
    say_line("mfu", "%.2f %% of %g Tflop/s%s", 100 * mfu, r->peak_flops / (double)(r->ranks->size ? r->ranks->size : 1) / 1e12, r->ranks->size > 1 ? " a rank" : "");
}

/* The log: one row per --log-every steps, below a row of names. On a narrow terminal the columns of the
 * highest number in `gives_way` are left out first. */
typedef enum log_column { AT_STEP, LOSS, VAL, NORM, LR, SCALE, SKIPS, RATE, MS, LOG_COLUMNS } log_column;
static const struct { const char *name; int width, gives_way; } log_columns[LOG_COLUMNS] = {
    {"step", 6, 0}, {"loss", 7, 0}, {"val", 7, 0}, {"norm", 6, 4}, {"lr", 8, 6}, {"scale", 9, 2},
    {"skips @step", 11, 3}, {"tok/s", 8, 5}, {"ms", 8, 7}};

typedef char log_cells[LOG_COLUMNS][40];

/* Columns whose gives_way is below the result are shown. */
static int shown_columns(void) {
    for (int most = 8;; most--) {
        int width = -1;
        for (int i = 0; i < LOG_COLUMNS; i++)
            if (log_columns[i].gives_way < most) width += 1 + log_columns[i].width;
        if (width <= line_columns || most == 1) return most;
    }
}

static void print_cells(log_cells cells) {
    int    most = shown_columns();
    char   line[LOG_COLUMNS * 40] = "";
    size_t n = 0;
    for (int i = 0; i < LOG_COLUMNS; i++)
        if (log_columns[i].gives_way < most)
            n += (size_t)snprintf(line + n, sizeof line - n, "%s%*s", n ? " " : "", log_columns[i].width,
                                  cells[i]);
    say("%s\n", line);
}

static void print_names(void) {
    log_cells cells;
    for (int i = 0; i < LOG_COLUMNS; i++) snprintf(cells[i], sizeof cells[i], "%s", log_columns[i].name);
    print_cells(cells);
}

static void print_row(const run *r, const mixp_verdict *v, double loss, double val,
                      double each) {
    enum { CELL = sizeof(log_cells) / LOG_COLUMNS };
    log_cells cells;
    double    tokens = r->step_tokens;
    snprintf(cells[AT_STEP], CELL, "%lld", (long long)r->step);
    number_text(cells[LOSS], CELL, 7, 4, loss);
    number_text(cells[VAL], CELL, 7, 4, val);
    number_text(cells[NORM], CELL, 6, 3, v->grad_norm);
    snprintf(cells[LR], CELL, "%.2e", v->lr);
    snprintf(cells[SCALE], CELL, "%g", (double)v->scale);
    if (strlen(cells[SCALE]) > 9) snprintf(cells[SCALE], CELL, "%.2e", (double)v->scale);
    snprintf(cells[SKIPS], CELL, "%lld", (long long)v->skipped);
    if (r->last_skip)
        snprintf(cells[SKIPS], CELL, "%lld @%lld", (long long)v->skipped, (long long)r->last_skip);
    number_text(cells[RATE], CELL, 8, 0, each > 0 ? tokens / each : ABSENT);
    number_text(cells[MS], CELL, 8, 1, each > 0 ? 1e3 * each : ABSENT);
    print_cells(cells);
}

static void log_line(run *r, double loss, double val) {
    mixp_verdict v = mixp_scaler_verdict(r->scaler);
    double       each = r->timed_steps ? r->seconds / (double)r->timed_steps : 0;
    if (v.outcome == MIXP_STEP_NONE) {          /* before the first step */
        v.grad_norm = ABSENT;
        v.lr = mixp_optimizer_lr(r->optimizers[0], 0);
        v.scale = mixp_scaler_loss_scale(r->scaler);
    }
    write_metrics(r, loss, val, &v, 1e3 * each);
    if (!r->quiet && !r->rows++) print_names();
    if (!r->quiet) print_row(r, &v, loss, val, each);
    if (!r->quiet && r->train_loss != ABSENT)
        say_line("train", "loss %.4f on as many batches of the training data", r->train_loss);
    if (!r->quiet && val != ABSENT) print_utilization(r, each);
    r->seconds = 0;
    r->timed_steps = 0;
}

static block *planted_block(const trainer *t) { return &t->model.blocks[t->model.layers / 2]; }

/* From step --plant on, a product of the middle block overflows fp16. The overflow is planted again
 * in each step, because momentum from earlier steps would change it. */
static void plant(trainer *t) {
    block *b = planted_block(t);
    if (!plant_overflow(b->up.w, b->up.b, b->down.w)) check(t, "planting");
    if (!t->c.quiet && t->run.step + 1 == t->c.plant)
        say_line("plant", "step %lld: 66246 in %s", (long long)t->run.step + 1, b->down.w->name);
}

/* Clears the planted gradients: they would dominate the norm. */
static void freeze_planted(trainer *t) {
    block *b = planted_block(t);
    if (!plant_freeze(b->up.w, b->up.b, b->down.w)) check(t, "planting");
}

/* Prints the scales and blocks of operand k of all linear layers under a recipe. */
static void print_blocks(const trainer *t, int k) {
    static const char *const names[3] = {"x", "w", "dy"};
    mixp_block_look all = {0};
    mixp_site_info s;
    for (int i = 0; t->ctx && mixp_site(t->ctx, i, &s); i++) {
        const mixp_block_look b = s.blocks[k];
        if (b.blocks > b.flushed && (all.blocks == all.flushed || b.least < all.least)) all.least = b.least;
        if (b.blocks > b.flushed && (all.blocks == all.flushed || b.largest > all.largest)) all.largest = b.largest;
        all.blocks += b.blocks;
        all.clipped += b.clipped;
        all.flushed += b.flushed;
    }
    if (all.blocks > all.flushed)
        say_line("scales", "of %s from 2^%d to 2^%d; blocks that clip %.2g%%, that are flushed %.2g%%", names[k],
                 all.least, all.largest, 100.0 * (double)all.clipped / (double)all.blocks,
                 100.0 * (double)all.flushed / (double)all.blocks);
}

/* Prints the sites that store f32 now, and the values that they would have had to store; then the
 * attention with the largest scores. */
static void print_fallen(const trainer *t) {
    mixp_site_info s, most = {.scores = 0};
    for (int i = 0; t->ctx && mixp_site(t->ctx, i, &s); i++) {
        if (s.fallen) say_line("in f32", "%s, largest %g", s.name, (double)s.value.largest);
        if (s.scores > most.scores) most = s;
    }
    for (int k = 0; k < 3; k++) print_blocks(t, k);
    if (most.scores > 0)
        say_line("scores", "of attention up to %.3g, at %s%s", (double)most.scores, most.name,
                 most.scores > 100 ? "; add --qk-norm on, or clip weights: examples/qk_clip.h" : "");
}

/* --- --compare --- */

/* The loss of the batch in t->x and t->y; the caller sets the dtype. */
static mixp_tensor *compared_loss(mixp_context *ctx, void *user) {
    trainer     *t = (trainer *)user;
    int64_t      shape[2] = {t->c.batch, t->c.block};
    mixp_tensor *x = mixp_input_i32(ctx, 2, shape, t->x);
    mixp_tensor *y = mixp_input_i32(ctx, 2, shape, t->y);
    return mixp_cross_entropy(ctx, gpt_logits(&t->model, x, 0, 0), y, MIXP_IGNORE);
}

/* Columns of the names of sites beside four numbers. */
static int site_columns(void) { return line_columns - 36 < 42 ? line_columns - 36 : 42; }

static void print_difference(const mixp_difference *d) {
    int n = site_columns();
    say("%-*.*s %8.1e %8.1e %8.6f", n, n, d->site, d->relative, d->added, d->cosine);
    if (d->has_grad) say(" %8.1e", d->grad_relative);
    say("\n");
}

/* Compares one batch in the run's dtype and in another dtype, site by site, largest difference
 * first. */
static void compare(trainer *t) {
    enum { ROOM = 4096, SHOWN = 20 };
    static const mixp_dtype choices[] = {MIXP_F32, MIXP_F32, MIXP_F16, MIXP_BF16};
    int               level = (int)t->c.level;
    mixp_compare_desc d;
    mixp_difference  *rows = (mixp_difference *)malloc(ROOM * sizeof *rows);
    int64_t           n = 0;
    if (!rows) die(1, "out of memory");
    memset(&d, 0, sizeof d);
    d.a.dtype = t->dtype;
    d.b.dtype = choices[t->c.compare];
    d.a.level = t->dtype == MIXP_F32 ? 0 : level;
    d.b.level = d.b.dtype == MIXP_F32 ? 0 : level;
    d.fn = compared_loss;
    d.user = t;
    d.scale = mixp_scaler_loss_scale(t->scaler);
    fill_batch(&t->data, &t->c, STREAM_VAL, 0, t->x, t->y);
    mixp_compare(t->ctx, &d, rows, ROOM, &n);
    check(t, "comparing");
    say("%-*s %8s %8s %8s %8s\n", site_columns(), "site", "differs", "adds", "cosine", "gradient");
    for (int64_t i = 0; i < n && i < SHOWN; i++) print_difference(&rows[i]);
    if (n > SHOWN) say("and %lld more, which add less\n", (long long)(n - SHOWN));
    free(rows);
}

#endif
