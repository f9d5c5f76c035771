/* tiny_gpt.c - a GPT learns to write like a text, byte by byte, in fp16 with a loss scaler and a
 * guard. Data, model, loop and sample, in this order. `make run` trains on mixprec.h itself.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     cc -O2 -fopenmp -I. examples/tiny_gpt.c -o tiny_gpt -lm
 *     ./tiny_gpt [fp16|bf16|fp32 [TEXT [STEPS [FOLDER]]]]
 *
 * TEXT: any file (default: mixprec.h). STEPS: 1500 take about 40 s on 2 cores. FOLDER: exists, and
 * gets the log, metrics.jsonl, and the page, report.html. The model is GPT-2's without biases, with
 * 0.8 million weights. Equal arguments give equal bits with any number of threads. For token files,
 * GPUs, ranks, checkpoints and options see examples/trainer. */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "report.h"
#include <time.h>

enum {
    T = 64, C = 128, HEADS = 4, LAYERS = 4,     /* context, channels, attention heads, blocks */
    BATCH = 12,                                 /* sequences in a step */
    LOG_EVERY = 60, EVAL_EVERY = 300,           /* steps */
    EVAL_BATCHES = 20,                          /* batches in a validation */
    SAMPLE = 500,                               /* bytes to write at the end */
    FILE_MOST = 1 << 28                         /* bytes of TEXT */
};

/* Keys of random numbers. */
enum { SEED = 1337, FOR_TRAINING = 1, FOR_VALIDATION, FOR_SAMPLE };

static int fail(const char *what, const char *why) {
    fprintf(stderr, "tiny_gpt: %s%s\n", what, why);
    return 1;
}

/* ---- Data ------------------------------------------------------------------------------ */

/* A token is the index of a byte among the bytes that occur in the text. */
static struct {
    int32_t      *ids;                          /* the whole text as tokens */
    int64_t       count, train;                 /* the last tenth, from `train` on, validates */
    int           vocab, id_of[256];
    unsigned char byte_of[256];
} text;

/* Returns 0 if the file cannot be read, or is too long. */
static int read_text(const char *path) {
    unsigned char *bytes = (unsigned char *)malloc(FILE_MOST);
    FILE          *f = plain_open(path);
    if (f && bytes) text.count = (int64_t)fread(bytes, 1, FILE_MOST, f);
    text.ids = (int32_t *)malloc(sizeof *text.ids * (size_t)(text.count + 1));
    if (!f || !bytes || !text.ids || ferror(f) || text.count == FILE_MOST) return 0;
    fclose(f);
    for (int byte = 0; byte < 256; byte++) {
        if (!memchr(bytes, byte, (size_t)text.count)) continue;
        text.byte_of[text.vocab] = (unsigned char)byte;
        text.id_of[byte] = text.vocab++;
    }
    for (int64_t i = 0; i < text.count; i++) text.ids[i] = text.id_of[bytes[i]];
    text.train = text.count - text.count / 10;
    free(bytes);
    return 1;
}

/* Fills x[BATCH, T] with pieces of the text, and y with the same pieces one token ahead. The pieces
 * depend on purpose and index only: each validation sees the same ones. */
static void fill_batch(int purpose, int64_t index, int32_t *x, int32_t *y) {
    int64_t first = purpose == FOR_TRAINING ? 0 : text.train;
    int64_t end = purpose == FOR_TRAINING ? text.train : text.count;
    for (int row = 0; row < BATCH; row++) {
        uint64_t random = mixp_random_u32(SEED, (uint64_t)index, (uint64_t)purpose,
                                          (uint64_t)row);
        int64_t  at = first + (int64_t)(random * (uint64_t)(end - first - T) >> 32);
        memcpy(x + row * T, text.ids + at, T * sizeof *x);
        memcpy(y + row * T, text.ids + at + 1, T * sizeof *y);
    }
}

/* ---- Model ----------------------------------------------------------------------------- */

typedef struct block { mixp_tensor *norm1, *qkv, *out, *norm2, *up, *down; } block;

static struct {
    mixp_tensor *tokens, *positions, *norm;     /* the table of tokens is also the head */
    block        blocks[LAYERS];
} model;

/* The name of a parameter of block `at`, such as "h.2.mlp.up.weight". */
static const char *name_of(int at, const char *part) {
    static char name[64];
    snprintf(name, sizeof name, "h.%d.%s", at, part);
    return name;
}

/* A matrix [rows, cols] of random numbers from N(0, std). */
static mixp_tensor *matrix(mixp_context *ctx, const char *name, int64_t rows, int64_t cols,
                           double std) {
    const int64_t shape[2] = { rows, cols };
    mixp_tensor  *w = mixp_param(ctx, name, MIXP_F32, 2, shape);
    mixp_init_normal(w, 0.0, std);
    return w;
}

/* The gain of a norm: C ones. */
static mixp_tensor *gain(mixp_context *ctx, const char *name) {
    const int64_t shape[1] = { C };
    mixp_tensor  *w = mixp_param(ctx, name, MIXP_F32, 1, shape);
    mixp_fill(w, 1.0);
    return w;
}

/* Each block adds twice to the residual stream: smaller weights there keep its variance near 1. */
static void make_model(mixp_context *ctx) {
    const double std = 0.02, out_std = std / sqrt(2.0 * LAYERS);
    model.tokens = matrix(ctx, "tokens.weight", text.vocab, C, std);
    model.positions = matrix(ctx, "positions.weight", T, C, std);
    for (int i = 0; i < LAYERS; i++) {
        block *b = &model.blocks[i];
        b->norm1 = gain(ctx, name_of(i, "norm1.gain"));
        b->qkv = matrix(ctx, name_of(i, "attention.qkv.weight"), 3 * C, C, std);
        b->out = matrix(ctx, name_of(i, "attention.out.weight"), C, C, out_std);
        b->norm2 = gain(ctx, name_of(i, "norm2.gain"));
        b->up = matrix(ctx, name_of(i, "mlp.up.weight"), 4 * C, C, std);
        b->down = matrix(ctx, name_of(i, "mlp.down.weight"), C, 4 * C, out_std);
    }
    model.norm = gain(ctx, "norm.gain");
}

static mixp_tensor *norm(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w)
{ return mixp_layer_norm(ctx, x, w, NULL, 1e-5f); }

/* x += attention(norm(x)), then x += mlp(norm(x)). Autocast chooses the dtype of each operator. */
static mixp_tensor *block_forward(mixp_context *ctx, const block *b, mixp_tensor *x) {
    mixp_tensor *h = mixp_linear(ctx, norm(ctx, x, b->norm1), b->qkv, NULL);
    h = mixp_attention(ctx, h, HEADS, 1, 0);
    x = mixp_add(ctx, x, mixp_linear(ctx, h, b->out, NULL));
    h = mixp_gelu(ctx, mixp_linear(ctx, norm(ctx, x, b->norm2), b->up, NULL));
    return mixp_add(ctx, x, mixp_linear(ctx, h, b->down, NULL));
}

/* Logits [rows, T, vocab] of the token after each of ids[rows, T]. */
static mixp_tensor *logits_of(mixp_context *ctx, const int32_t *ids, int64_t rows) {
    const int64_t shape[2] = { rows, T };
    mixp_tensor  *x = mixp_embedding(ctx, model.tokens, mixp_input_i32(ctx, 2, shape, ids));
    x = mixp_add(ctx, x, model.positions);
    for (int i = 0; i < LAYERS; i++) x = block_forward(ctx, &model.blocks[i], x);
    return mixp_linear(ctx, norm(ctx, x, model.norm), model.tokens, NULL);
}

static mixp_tensor *loss_of(mixp_context *ctx, const int32_t *x, const int32_t *y) {
    const int64_t shape[2] = { BATCH, T };
    mixp_tensor  *logits = logits_of(ctx, x, BATCH);
    return mixp_cross_entropy(ctx, logits, mixp_input_i32(ctx, 2, shape, y), MIXP_IGNORE);
}

/* ---- Loop ------------------------------------------------------------------------------ */

/* AdamW on fp32 weights. Gradients are clipped to a norm of 1. The learning rate rises for a
 * twentieth of the steps, then falls by a cosine to a tenth. Matrices decay, gains do not. */
static mixp_optimizer *make_optimizer(mixp_context *ctx, int steps) {
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_param_group    gains;
    mixp_optimizer     *opt;
    adamw.lr = 1e-3;
    adamw.beta2 = 0.99;
    adamw.weight_decay = 0.1;
    adamw.max_norm = 1.0;
    adamw.schedule.kind = MIXP_SCHEDULE_COSINE;
    adamw.schedule.warmup = steps / 20;
    adamw.schedule.total = steps;
    adamw.schedule.min_factor = 0.1;
    opt = mixp_optimizer_new(ctx, &adamw);
    mixp_optimizer_add_all(opt, "*.weight");
    mixp_optimizer_group(opt, 0, &gains);
    gains.weight_decay = 0.0;
    mixp_optimizer_add_group(opt, &gains);
    mixp_optimizer_add_all(opt, "*.gain");
    return opt;
}

/* One step of training. A skipped step is repeated with the same batch: at a lower loss scale, or
 * after the guard let a site (an operator of one layer) store f32. Returns the loss. */
static double train_step(mixp_context *ctx, mixp_dtype dtype, mixp_optimizer *opt,
                         mixp_scaler *scaler, int step) {
    int32_t      x[BATCH * T], y[BATCH * T];
    mixp_tensor *loss = NULL;
    fill_batch(FOR_TRAINING, step, x, y);
    do {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, dtype) loss = loss_of(ctx, x, y);
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);          /* unscales, clips and updates, or skips */
        mixp_scaler_update(scaler);
    } while (mixp_retry(scaler, 3));
    return mixp_item(loss);
}

/* The mean loss over the same EVAL_BATCHES batches of the last tenth of the text. */
static double validate(mixp_context *ctx, mixp_dtype dtype) {
    int32_t      x[BATCH * T], y[BATCH * T];
    mixp_tensor *loss = NULL;
    double       sum = 0.0;
    for (int i = 0; i < EVAL_BATCHES; i++) {
        fill_batch(FOR_VALIDATION, i, x, y);
        mixp_eval_begin(ctx);
        MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, dtype) loss = loss_of(ctx, x, y);
        sum += mixp_item(loss);
    }
    return sum / EVAL_BATCHES;
}

/* Prints the mean loss of the steps since the last line, and a validation; logs the step. */
static void show_step(mixp_context *ctx, mixp_dtype dtype, int step, int steps, double loss,
                      const mixp_scaler *scaler, report_file *log) {
    static double sum, n;
    double        val = REPORT_NONE;
    sum += loss;
    n++;
    if (step % EVAL_EVERY == 0 || step == steps) val = validate(ctx, dtype);
    report_training(log, step, loss, val, scaler);
    if (step > 1 && step % LOG_EVERY && step < steps) return;
    printf("step %5d  loss %.4f  scale %g", step, sum / n, (double)mixp_scaler_loss_scale(scaler));
    if (val > REPORT_NONE) printf("  val %.4f", val);
    printf("\n");
    fflush(stdout);
    sum = n = 0.0;
}

/* Returns 0, or 1 after an error. log NULL: nothing is logged. */
static int train(mixp_context *ctx, mixp_dtype dtype, int steps, report_file *log) {
    mixp_scaler    *scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer *opt = make_optimizer(ctx, steps);
    const char     *why;
    for (int step = 1; step <= steps; step++) {
        int    watches = log && step % LOG_EVERY == 0;      /* logs exponents of gradients */
        double loss;
        if (watches) mixp_optimizer_sample(opt);
        loss = train_step(ctx, dtype, opt, scaler, step);
        if (mixp_context_error(ctx, &why)) return fail("", why);
        report_guard(log, step, ctx);           /* which sites fell back, and which returned */
        if (watches) report_watching(log, step, ctx, opt);
        show_step(ctx, dtype, step, steps, loss, scaler, log);
    }
    printf("%d of %d steps skipped\n", (int)mixp_scaler_verdict(scaler).skipped, steps);
    return 0;
}

/* ---- Sample ---------------------------------------------------------------------------- */

/* Draws a token from softmax(logits / 0.8). r in [0, 1). */
static int32_t draw(const float *logits, double r) {
    double  p[256], sum = 0.0, most = (double)logits[0];
    int32_t i;
    for (i = 1; i < text.vocab; i++) most = fmax(most, (double)logits[i]);
    for (i = 0; i < text.vocab; i++) sum += p[i] = exp(((double)logits[i] - most) / 0.8);
    r *= sum;
    for (i = 0; i < text.vocab - 1 && (r -= p[i]) >= 0.0; i++) {}
    return i;
}

/* Keeps control characters from the terminal. */
static void write_byte(int byte)
{ putchar(byte == '\n' || byte == '\t' || (byte > 31 && byte != 127) ? byte : '?'); }

/* Writes SAMPLE bytes. ids holds the newest n tokens, at most T. */
static void sample(mixp_context *ctx, mixp_dtype dtype) {
    static float logits[T * 256];
    int32_t      ids[T] = { text.id_of['\n'] };
    int          n = 1;
    for (int i = 0; i < SAMPLE; i++) {
        double  random = mixp_random_u32(SEED, (uint64_t)i, FOR_SAMPLE, 0) / 4294967296.0;
        int32_t next;
        mixp_eval_begin(ctx);
        MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, dtype)
            mixp_read_f32(logits_of(ctx, ids, 1), logits, T * text.vocab);
        next = draw(logits + (n - 1) * text.vocab, random);
        write_byte(text.byte_of[next]);
        if (n == T) memmove(ids, ids + 1, (T - 1) * sizeof *ids);
        else n++;
        ids[n - 1] = next;
    }
    putchar('\n');
}

/* ---- Main ------------------------------------------------------------------------------ */

/* Draws the page from the log, and prints its summary. Returns 0 on success. */
static int draw_report(const char *log, const char *folder) {
    char page[1024], error[REPORT_MESSAGE];
    snprintf(page, sizeof page, "%s/report.html", folder);
    if (report_render(log, page, error) != REPORT_OK) return fail("", error);
    printf("--- %s\n", page);
    return report_summary(log, stdout, error) != REPORT_OK;
}

/* An earlier trainer had this program's name, so the message names the trainer for options. */
static int usage(const char *argument) {
    fprintf(stderr, "tiny_gpt: wrong argument \"%s\". Call tiny_gpt [fp16|bf16|fp32 [TEXT [STEPS "
            "[FOLDER]]]]. For options call build/trainer; build/trainer --help lists them\n",
            argument);
    return 2;
}

/* Returns the number of the wrong argument, or 0. */
static int wrong_argument(int argc, char **argv) {
    int steps = argc > 3 ? atoi(argv[3]) : 1;
    for (int i = 1; i < argc; i++) if (argv[i][0] == '-') return i;
    if (argc > 1 && strcmp(argv[1], "fp16") && strcmp(argv[1], "bf16") && strcmp(argv[1], "fp32"))
        return 1;
    return steps < 1 || steps > 1000000 ? 3 : argc > 5 ? 5 : 0;
}

int main(int argc, char **argv) {
    const char   *in = argc > 1 ? argv[1] : "fp16", *path = argc > 2 ? argv[2] : "mixprec.h";
    const char   *folder = argc > 4 ? argv[4] : NULL;
    mixp_dtype    low = !strcmp(in, "bf16") ? MIXP_BF16 : MIXP_F16;
    mixp_dtype    dtype = !strcmp(in, "fp32") ? MIXP_F32 : low;
    int           steps = argc > 3 ? atoi(argv[3]) : 1500, failed;
    char          header[REPORT_MESSAGE], log_path[1024];
    report_file  *log = NULL;
    mixp_context *ctx;
    clock_t       begin = clock();

    /* data, model, guard */
    if (wrong_argument(argc, argv)) return usage(argv[wrong_argument(argc, argv)]);
    if (!read_text(path)) return fail("cannot read the text; pass another file as TEXT: ", path);
    if (text.count < 20 * T) return fail("the text is shorter than 1280 bytes; pass a longer text than ", path);
    printf("%s: %lld bytes, %d different characters, %s\n", path, (long long)text.count, text.vocab, in);
    ctx = mixp_context_new(NULL);
    make_model(ctx);
    mixp_guard_start(ctx, NULL);

    /* the log */
    report_header(header, sizeof header, "tiny_gpt", in);
    snprintf(log_path, sizeof log_path, "%s/metrics.jsonl", folder ? folder : "");
    if (folder) log = report_open(log_path, header, 0);
    if (folder && !log) return fail("make the folder first. Cannot write ", log_path);

    /* training, sample, report */
    failed = train(ctx, dtype, steps, log);
    if (!failed) {
        printf("%.1f s of CPU time\n--- sample\n", (double)(clock() - begin) / CLOCKS_PER_SEC);
        sample(ctx, dtype);
    }
    if (report_close(log)) failed = fail("the log is incomplete: ", log_path);
    if (folder && !failed) failed = draw_report(log_path, folder);
    mixp_context_free(ctx);
    free(text.ids);
    return failed;
}
