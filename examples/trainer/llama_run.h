/* llama_run.h - a run of hours: its memory, its folder, its checkpoints, its losses, its ranks: a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The rooms that trainer.c shares do the work: run.h, log.h, ranks.h, measure.h.
 */
#ifndef TRAINER_LLAMA_RUN_H
#define TRAINER_LLAMA_RUN_H

#define RUN_KEY "llama.run"             /* the options that a checkpoint was made with */
#define BEST_FOLDER "best"

static int64_t ranks_of_run(void) { return m.ranks.size ? m.ranks.size : 1; }

static int has_guard(void) {
    return opt.guard == GUARD_ON || (opt.guard == GUARD_AUTO && m.dtype == MIXP_F16 && opt.level && !opt.ordered);
}

/* ==== Ranks ========================================================================= */

static mixp_ranks_desc join_ranks(int *argc, char ***argv) {
    ranks_options   how = { .ranks = opt.ranks, .seconds = opt.rank_seconds, .shard = (int)opt.shard,
                            .ordered = (int)opt.ordered, .device = opt.device };
    mixp_ranks_desc d;
    if (strncmp(how.ranks, "fork:", 5) == 0 && opt.threads == 0) opt.threads = 1;
    d = start_ranks(&how, argc, argv);
    d.mean = MIXP_MEAN_NONE;            /* the shares of a step's batches add up to 1 over all ranks */
    if (d.rank) opt.quiet = 1;
    return d;
}

/* Shares a table among ranks: each rank fills in its own numbers and leaves zeros elsewhere. */
static void share_losses(float *losses, int64_t n) {
    mixp_tensor *all;
    if (ranks_of_run() == 1) return;
    all = mixp_input_f32(m.ctx, 1, &n, losses);
    mixp_ranks_sum(all);
    if (all) mixp_read_f32(all, losses, n);
}

/* Ranks that share optimizer states save together, so they also stop together: at a line of the log. */
static int stopped_together;
static void hear_of_signals(void) {
    float        signal_here = stop_signal ? 1 : 0;
    int64_t      one = 1;
    mixp_tensor *all = mixp_input_f32(m.ctx, 1, &one, &signal_here);
    mixp_ranks_max(all);
    stopped_together = mixp_item(all) > 0;
    if (stopped_together && !stop_signal) stop_signal = SIGTERM;
}
static int is_stopped(void) { return m.ranks.shard ? stopped_together : stop_signal != 0; }

/* ==== Losses ======================================================================== */

/* The losses since the last line, times their shares of a step, for each batch of a step of all ranks. On a GPU
 * without --retry they are added on the device, so a step need not wait for it. */
static struct losses {
    double       *sums, attempt[4096];
    mixp_tensor  *on_device, *slots[4096];
    int64_t       steps;                /* in `sums` */
} losses;

/* After the optimizer, before the first step. */
static void begin_losses(void) {
    int64_t n = opt.accumulate, one = 1;
    char   *memory;
    losses.sums = (double *)rows_memory(NULL, (size_t)(n * ranks_of_run()), sizeof *losses.sums);
    memset(losses.sums, 0, (size_t)(n * ranks_of_run()) * sizeof *losses.sums);
    if (!m.device->allocate || opt.retry) return; /* a CPU, or a device with host memory */
    memory = (char *)m.device->allocate(mixp_context_exec(m.ctx), 4 * (size_t)n);
    if (!memory) die(1, "out of memory on %s", m.device_name);
    losses.on_device = mixp_view(m.ctx, "losses", MIXP_F32, 1, &n, memory);
    for (int64_t i = 0; i < n; i++) losses.slots[i] = mixp_view(m.ctx, "", MIXP_F32, 1, &one, memory + 4 * i);
    mixp_fill(losses.on_device, 0);
    check("making room for losses");
}

/* Called with the loss of batch i of an attempt of a step. */
static void add_loss(int64_t i, mixp_tensor *loss) {
    const int64_t one = 1;
    if (m.is_measured || !losses.sums) return;
    if (!losses.on_device) losses.attempt[i] = mixp_item(loss);
    else mixp_copy(losses.slots[i], mixp_add(m.ctx, losses.slots[i], mixp_reshape(m.ctx, loss, 1, &one)));
}

/* Called when the step of these attempts is over. */
static void add_step(void) {
    for (int64_t i = 0; i < opt.accumulate && !losses.on_device; i++)
        losses.sums[i * ranks_of_run() + m.ranks.rank] += losses.attempt[i];
    losses.steps++;
}

/* The mean loss of the steps since the last call. Batches are added in their order, with the bits of one rank. */
static double mean_loss(void) {
    int64_t n = opt.accumulate, all = n * ranks_of_run();
    float  *table = (float *)rows_memory(NULL, (size_t)(all + n), sizeof *table), *mine = table + all;
    double  sum = 0;
    if (losses.on_device) {
        mixp_read_f32(losses.on_device, mine, n);
        mixp_fill(losses.on_device, 0);
        for (int64_t i = 0; i < n; i++) losses.sums[i * ranks_of_run() + m.ranks.rank] = (double)mine[i];
    }
    for (int64_t i = 0; i < all; i++) table[i] = (float)(losses.sums[i] / (double)losses.steps);
    share_losses(table, all);
    for (int64_t i = 0; i < all; i++) sum += (double)table[i];
    memset(losses.sums, 0, (size_t)all * sizeof *losses.sums);
    losses.steps = 0;
    free(table);
    return sum;
}

/* ==== Memory, before it is taken ==================================================== */

static mixp_tensor *train_batch(const int32_t *x, const int32_t *y, int64_t t, int64_t i, float share);

/* The bytes of a step with these options, on a device that only counts them. The second step has the peak. */
static double measure_step(void) {
    struct model before = m;
    config       options_before = opt;
    int32_t     *zeros = (int32_t *)rows_memory(NULL, (size_t)(opt.batch * opt.block), sizeof *zeros);
    double       bytes;
    memset(zeros, 0, (size_t)(opt.batch * opt.block) * sizeof *zeros);
    m.is_measured = 1;
    opt.accumulate = 1;                 /* the last batch of a step takes as much as a single batch */
    make_model(measuring_device());
    make_optimizer();
    for (int i = 0; i < 2; i++) train_batch(zeros, zeros, opt.block, 0, 1);
    check("counting the memory of a step");
    bytes = (double)mixp_context_memory(m.ctx).allocated + m.code_bytes;
    mixp_context_free(m.ctx);
    free(m.blocks);
    free(m.coded);
    free(zeros);
    m = before;
    opt = options_before;
    return bytes;
}

/* The choices that save memory: an option, its value, and whether it is for this run. */
static int try_saving(int i, const char **name) {
    static const char *const names[] = { "--recompute", "--level 2", "--moments 8bit",
                                         "--frozen q8_0", "--level 3 --masters 8bit --moments 8bit" };
    int whole = !is_lora(), low = m.dtype != MIXP_F32;
    *name = names[i];
    switch (i) {
    case 0: opt.recompute = !opt.recompute; return opt.recompute != 0;
    case 1: return low && opt.level < 2 && (opt.level = 2) != 0;
    case 2: return whole && !opt.moments && (opt.moments = MIXP_MOMENT_8BIT) != 0;
    case 3: return !whole && !opt.frozen && (opt.frozen = 1) != 0;
    default:
        if (!whole || m.dtype != MIXP_BF16 || opt.masters) return 0;
        opt.level = 3;
        opt.masters = MIXP_MASTER_8BIT;
        opt.moments = MIXP_MOMENT_8BIT;
        return 1;
    }
}

/* "; with --recompute 2.1 GB": of each choice that saves a tenth or more. */
static void tell_savings(double need, char *text, size_t space) {
    size_t n = 0;
    text[0] = '\0';
    for (int i = 0; i < 5; i++) {
        config      before = opt;
        const char *name;
        char        bytes[32];
        double      other = try_saving(i, &name) ? measure_step() : need;
        opt = before;
        if (other > 0.9 * need) continue;
        n += (size_t)snprintf(text + n, space - n, "%s %s %s", n ? "," : "; with", name,
                              bytes_text(other, bytes, sizeof bytes));
    }
}

/* Says what a step needs of what there is, and which options need less; ends a run that does not fit. Forked ranks on
 * CPUs share the machine's memory. */
static void plan_memory(void) {
    double      need = measure_step(), have = m.on_gpu ? gpu_memory() : machine_memory(), all = need;
    const char *of = m.on_gpu ? "GPU" : "machine";
    char        need_text[32], have_text[32] = "memory", less[400];
    int         forked = strncmp(opt.ranks, "fork:", 5) == 0 && !m.on_gpu;
    if (forked) all *= (double)ranks_of_run();
    tell_savings(need, less, sizeof less);
    bytes_text(need, need_text, sizeof need_text);
    if (have > 0) bytes_text(have, have_text, sizeof have_text);
    snprintf(plan_text, sizeof plan_text, ". A step needs about %s of the %s's %s%s", need_text, of, have_text, less);
    if (have > 0 && all > have)
        die(1, "a step needs about %s%s, and the %s has %s%s. A smaller --batch or --block also reduces the need",
            need_text, forked ? " for each rank" : "", of, have_text, less);
    if (!opt.quiet)
        say_line("memory", "a step needs about %s%s of the %s's %s%s", need_text, forked ? " a rank" : "", of,
                 have_text, less);
}

/* ==== The folder ==================================================================== */

static char run_text[600];
static const char *const run_pairs[1][2] = { { RUN_KEY, run_text } };

/* What must be the same when a run continues. Steps, rates and ranks may change. */
static void describe_run(void) {
    static const char *const dtypes[] = { "fp32", "fp16", "bf16" };
    int n = snprintf(run_text, sizeof run_text, "dtype %s, level %lld, seed %lld, %lld rows a batch, %lld batches a step, "
                     "block %lld", dtypes[opt.dtype], (long long)opt.level, (long long)opt.seed, (long long)opt.batch,
                     (long long)(opt.accumulate * ranks_of_run()), (long long)opt.block);
    if (is_lora())
        snprintf(run_text + n, sizeof run_text - (size_t)n, ", adapters of rank %lld, scale %g, base %016llx%s",
                 (long long)m.rank, (double)m.lora_scale, (unsigned long long)m.base_hash,
                 opt.frozen ? " as q8_0" : "");
}

/* Compares this command with what the checkpoint says. */
static void compare_run(const char *path) {
    int64_t     size = 0;
    char       *header = read_header(path, &size), text[sizeof run_text] = "";
    const char *wrong, *pairs = header ? json_get(json_check(header, size, &wrong), "__metadata__") : NULL;
    if (json_string(json_get(pairs, RUN_KEY), text, sizeof text) < 1) text[0] = '\0';
    free(header);
    if (!text[0]) die(1, "%s is not a checkpoint of this program: begin a new run with --overwrite", path);
    if (strcmp(text, run_text) != 0)
        die(1, "%s was begun with \"%s\", and this command says \"%s\": use the same options, data and model, or begin "
               "a new run with --overwrite", path, text, run_text);
}

/* Loads the checkpoint. The rates of this command override its own. */
static void resume_run(void) {
    mixp_param_group groups[2];
    int              n = m.rank ? 1 : 2;
    char             path[PATH_SPACE];
    if (!in_run(&m.run, CHECKPOINT, path))
        die(1, "no checkpoint in %s: leave out --resume to begin a run", opt.out);
    compare_run(path);
    for (int g = 0; g < n; g++) mixp_optimizer_group(m.adamw, g, &groups[g]);
    m.run.locked_out = !lock_folder(&m.run, 0);
    note_checkpoint(&m.run, &m.run.loaded);
    save_or_load(&m.run, CHECKPOINT, 1);
    for (int g = 0; g < n; g++) mixp_optimizer_set_group(m.adamw, g, &groups[g]);
    check("resuming");
    if (m.run.data_hash != kept.hash)
        die(1, "%s is not the data that this run was trained on: use the same --data, --chat and rows of validation",
            opt.data);
    if (!m.ranks.rank && *mixp_context_warning(m.ctx)) warn("%s", mixp_context_warning(m.ctx));
}

static void settle_run(void) {
    run *r = &m.run;
    memset(r, 0, sizeof *r);
    r->lock = -1;
    r->out = opt.out && (!m.ranks.rank || opt.resume) ? opt.out : "";
    r->from = CHECKPOINT;
    r->go_on = command_that_continues;
    r->advice = m.dtype == MIXP_F16 ? "Try a lower --lr, a longer --warmup or --dtype bf16"
                                    : "Try a lower --lr or a longer --warmup";
    r->resume = (int)opt.resume;
    r->overwrite = (int)opt.overwrite;
    r->quiet = (int)opt.quiet;
    r->csv = (int)opt.csv;
    r->saves = opt.out && (!m.ranks.rank || m.ranks.shard);
    r->guarded = has_guard();
    r->rank = m.ranks.rank;
    r->ranks = &m.ranks;
    r->step_tokens = (double)(opt.batch * opt.block * opt.accumulate * ranks_of_run());
    r->only_trained = is_lora();
    r->ctx = m.ctx;
    r->scaler = m.scaler;
    r->optimizers[0] = m.adamw;
    r->pairs = run_pairs;
    r->n_pairs = 1;
    r->best_val = HUGE_VAL;
    r->train_loss = ABSENT;
    r->data_hash = kept.hash;
}

static void print_run(void) {
    char how[48];
    snprintf(how, sizeof how, m.on_gpu ? opt.graph ? "as a graph" : "step by step" : "%d thread%s",
             mixp_context_exec(m.ctx)->threads, mixp_context_exec(m.ctx)->threads == 1 ? "" : "s");
    say_line("data", "%lld rows, %lld tokens that count%s; %lld rows of validation", (long long)data.n,
             (long long)data.counted, kept.held ? ", with validation" : "", (long long)kept.held);
    say_line("run", "%s at level %lld on %s, %s, %lld rows a step, %.2f M weights are trained",
             opt.dtype == DTYPE_FP32 ? "fp32" : opt.dtype == DTYPE_FP16 ? "fp16" : "bf16", (long long)opt.level,
             m.device_name, how, (long long)(opt.batch * opt.accumulate * ranks_of_run()), trained_weights(m.ctx) / 1e6);
    if (m.run.resume) say_line("resumed", "at step %lld of %lld", (long long)m.run.step, (long long)opt.steps);
}

/* Makes the optimizer; loads the checkpoint, or makes sure that none is overwritten; opens folder and log. */
static void begin_run(void) {
    char header[1400], title[600], path[PATH_SPACE];
    if (cfg.rope_kind == ROPE_DYNAMIC && opt.graph)
        die(2, "--graph fills rows up, and dynamic rotary positions depend on a row's length: leave out --graph");
    make_optimizer();
    describe_run();
    settle_run();
    if (opt.resume) resume_run();
    else if (m.run.out[0] && in_run(&m.run, CHECKPOINT, path)) keep_checkpoint(&m.run);
    if (m.ranks.rank) m.run.out = "";   /* only rank 0 writes */
    begin_losses();
    snprintf(title, sizeof title, "%.300s on %.200s, %s", opt.model, opt.data, is_lora() ? "adapters" : "all weights");
    report_header(header, sizeof header, title, m.device_name);
    if (m.run.step < opt.steps) open_run(&m.run, header);
    m.run.tokens = 0;
    if (!m.ranks.rank) catch_signals();
    quiet_terminal();
    if (!opt.quiet) print_run();
}

/* ==== Lines and saves =============================================================== */

/* On a GPU the verdict may belong to an earlier step. */
static void note_step(double began, double loss) {
    mixp_verdict v = mixp_scaler_verdict(m.scaler);
    m.run.step++;
    m.run.timed_steps++;
    m.run.seconds += seconds_now() - began;
    if (v.outcome == MIXP_STEP_SKIPPED) m.run.last_skip = opt.retry ? m.run.step : v.step;
    report_verdict(m.run.metrics, (double)m.run.step, &v);
    tell_events(&m.run);
    look_for_divergence(&m.run, &v, loss);
}

static double seconds_left(int64_t first) {
    return (seconds_now() - m.run.began) / (double)(m.run.step - first) * (double)(opt.steps - m.run.step);
}

static void time_text(double seconds, char *text, size_t space) {
    if (seconds < 100) snprintf(text, space, "%.0f s", seconds);
    else if (seconds < 6000) snprintf(text, space, "%.0f min", seconds / 60);
    else snprintf(text, space, "%.1f h", seconds / 3600);
}

/* A line, and the same in the log. tokens: of the steps since the last line. */
static void say_step(double loss, double val, double tokens, int64_t first) {
    char         left[32], of_val[40] = "";
    double       rate = m.run.seconds > 0 ? tokens / m.run.seconds : 0;
    mixp_verdict v = mixp_scaler_verdict(m.scaler);
    time_text(seconds_left(first), left, sizeof left);
    if (val != ABSENT) snprintf(of_val, sizeof of_val, "  val %.6f", val);
    m.run.tokens += tokens;
    write_metrics(&m.run, loss, val, &v, 1e3 * m.run.seconds / (double)m.run.timed_steps);
    if (!opt.quiet)
        say("step %5lld  loss %.6f%s  %.0f tokens/s, %s left\n", (long long)m.run.step, loss, of_val, rate, left);
    m.run.seconds = 0;
    m.run.timed_steps = 0;
}

static void save_checkpoint(void) {
    save_run(&m.run, CHECKPOINT);
    if (!m.ranks.rank) write_report(&m.run);
}

/* Saves the adapters, or with `whole` the model, in a folder. */
static void save_into(const char *folder, int whole) {
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        die(1, "cannot make the folder %s: %s", folder, strerror(errno));
    if (whole) open_again();
    if (data.chat && whole && is_training()) use_style(data.chat);
    if (whole) save_model(folder);
    else save_adapters(folder);
}

/* Keeps the weights of the lowest validation loss, in the folder "best". */
static void keep_best(double val) {
    char path[PATH_SPACE];
    if (!(val < m.run.best_val)) return;
    m.run.best_val = val;
    m.run.best_step = m.run.step;
    if (!m.run.out[0]) return;
    in_run(&m.run, BEST_FOLDER, path);
    save_into(path, !m.rank);
}

/* With LoRA, saves only the adapters; with --merge 1, the weights to which the adapters were added. A GGUF file always
 * holds these sums, of the values of the model's own files. */
static void save(void) {
    int whole = saves_whole();
    if (data.chat && is_training()) use_style(data.chat);
    if (opt.out && !whole) save_into(opt.out, 0);
    if ((opt.out && whole) || opt.gguf) open_again();
    if (m.rank && opt.out && whole) say_rounding("--out", -1);
    if (m.rank && opt.gguf) say_rounding("--gguf", (int)gguf_type_of_model());
    if (opt.out && whole) save_into(opt.out, 1);
    if (opt.gguf) save_gguf(opt.gguf);
    if (opt.gguf_adapter) save_gguf_adapters(opt.gguf_adapter);
}

/* At a signal: saves, and prints the command that continues the run. Returns the exit status. */
static int stop_run(int64_t trained) {
    if (trained) save_checkpoint();
    return m.ranks.rank ? m.run.save_failed : report_stop(&m.run, trained > 0);
}

static void finish_run(int64_t trained, double tokens) {
    char          taken[32];
    double        seconds = seconds_now() - m.run.began;
    struct rusage use;
    if (opt.save_every) save_checkpoint();
    getrusage(RUSAGE_SELF, &use);
    printf("%lld steps in %.2f minutes, %.0f MB, %.0f tokens/s, %lld steps skipped\n",
           (long long)trained, seconds / 60, (double)use.ru_maxrss / 1024, tokens / seconds,
           (long long)mixp_scaler_verdict(m.scaler).skipped);
    if (!opt.quiet)
        say_line("memory", "%s were taken on %s",
                 bytes_text((double)mixp_context_memory(m.ctx).allocated + m.code_bytes, taken, sizeof taken),
                 m.device_name);
    if (!opt.quiet) tell_no_events(&m.run);
    if (!opt.quiet && m.run.best_step)
        say_line("best", "val %.6f at step %lld%s%s%s", m.run.best_val, (long long)m.run.best_step,
                 m.run.out[0] ? ", in " : "", m.run.out, m.run.out[0] ? "/" BEST_FOLDER : "");
    if (m.run.metrics && !opt.quiet) say_line("report", "%s/report.html", m.run.out);
}

/* Frees what the run has, and ends the ranks. */
static int end_run(int status) {
    report_close(m.run.metrics);
    free_tokenizer(data.words);
    if (losses.on_device) m.device->release(mixp_context_exec(m.ctx), losses.on_device->data);
    mixp_context_free(m.ctx);
    return end_ranks(opt.ranks, &m.ranks, status);
}

#endif
