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
 * Contents: options, data, model, device, optimizer, output, checkpoints, training, profile,
 * sampling, main. profile.h, beside this file, times the kernels for --profile.
 * To see mixed precision at work, read train_step and make_optimizer; the rest is a trainer
 * as any other.
 *
 * Exit status: 0 done, 1 failed, 2 wrong usage, 128 + N stopped by signal N (Ctrl-C: 130).
 */
#ifndef _POSIX_C_SOURCE
#  define _POSIX_C_SOURCE 200809L       /* sigaction, isatty, mkdir, clock_gettime */
#endif
#define MIXPREC_IMPLEMENTATION
#include "../mixprec.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#  include <omp.h>
#endif

#define PATH_SPACE 1200                 /* a --out folder and the name of a file in it */
#define CHECKPOINT "checkpoint.safetensors"
#define BEST       "best.safetensors"
#define LOCK       ".lock"              /* in the --out folder; its file stays, its lock does not */

/* Set by a signal, or when nobody reads our output any more: the step is finished, the state
 * saved, and then the program ends. */
static volatile sig_atomic_t stop_signal;
static int output_error;                        /* errno of a failed write to stdout */
static int progress_bar, colour, bar_shown;     /* of the terminal */

static void hide_bar(void) {
    if (bar_shown) fputs("\r\033[K", stdout);
    bar_shown = 0;
}

/* Every failure ends here, with a message that says what is wrong and what to do. */
static void die(int status, const char *format, ...) {
    va_list args;
    hide_bar();
    fflush(stdout);
    fputs("tiny_gpt: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(status);
}

/* Training goes on, but perhaps not as the user meant it. */
static void warn(const char *format, ...) {
    va_list args;
    hide_bar();
    fflush(stdout);
    fputs("tiny_gpt: warning: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

static void say(const char *format, ...) {
    va_list args;
    hide_bar();
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    if (fflush(stdout) != 0 && !stop_signal) { output_error = errno; stop_signal = SIGPIPE; }
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

#include "profile.h"

/* ==== Options =======================================================================
 *
 * One table is the source of everything: parsing, ranges, defaults, --help, config.json.
 */
enum { DTYPE_FP32, DTYPE_FP16, DTYPE_BF16 };

typedef struct config {
    char    data[1024], val_data[1024], preset[32], config[1024], out[1024], prompt[1024];
    char    device[16];
    int64_t vocab, layers, heads, width, block, bias;
    double  dropout;
    int64_t batch, accumulate, steps, warmup, decay_steps, seed;
    double  lr, min_lr, weight_decay, beta1, beta2, clip;
    int64_t schedule, dtype, level, no_master, rule, growth_interval;
    double  init_scale;
    int64_t eval_every, eval_batches, log_every;
    int64_t resume, overwrite, quiet, threads, graph, profile, help, version;
    int64_t sample, top_k;
    double  temperature;
} config;

#define AUTO (-1)                       /* what "auto" is stored as: the program chooses */

typedef enum kind { WHOLE, REAL, TEXT, CHOICE, FLAG } kind;

typedef struct option {
    const char *name;
    kind        kind;
    size_t      offset;                 /* of its field in struct config */
    const char *initial;
    double      low, high;              /* of numbers; of a text: high = longest */
    const char *choices;                /* "a|b|c": stored as 0, 1, 2 */
    const char *help;
} option;

#define AT(field)  offsetof(config, field)
#define GROUP(title)                          {NULL, FLAG, 0, NULL, 0, 0, NULL, title}
#define WHOLE_OPT(name, field, initial, low, high, help) \
    {name, WHOLE, AT(field), initial, low, high, NULL, help}
#define REAL_OPT(name, field, initial, low, high, help) \
    {name, REAL, AT(field), initial, low, high, NULL, help}
#define TEXT_OPT(name, field, what, help) \
    {name, TEXT, AT(field), "", 0, sizeof ((config *)0)->field - 1, what, help}
#define CHOICE_OPT(name, field, initial, choices, help) \
    {name, CHOICE, AT(field), initial, 0, 0, choices, help}
#define FLAG_OPT(name, field, help)           {name, FLAG, AT(field), "0", 0, 1, NULL, help}

#define PRESETS "char-cpu|char-gpu|gpt2"

/* The groups up to "Running" describe the experiment: config.json holds them. */
static const option options[] = {
    GROUP("Data and model"),
    TEXT_OPT("data", data, "FILE", "text, or tokens in a FILE.bin (default: mixprec.h's source)"),
    TEXT_OPT("val-data", val_data, "FILE", "to validate on (default: the last tenth of --data)"),
    WHOLE_OPT("vocab", vocab, "auto", 2, 65536,
              "rows of the token table; auto = what the data needs"),
    WHOLE_OPT("layers", layers, "4", 1, 512, "transformer blocks"),
    WHOLE_OPT("heads", heads, "4", 1, 512, "attention heads; they divide the width"),
    WHOLE_OPT("width", width, "128", 1, 65536, "size of the residual stream"),
    WHOLE_OPT("block", block, "64", 1, 65536, "context length in tokens"),
    CHOICE_OPT("bias", bias, "off", "off|on", "of linear layers and norms, as GPT-2 has them"),
    REAL_OPT("dropout", dropout, "0", 0, 0.99, "share of activations dropped in training"),

    GROUP("Training"),
    WHOLE_OPT("batch", batch, "12", 1, 65536, "sequences in a batch"),
    WHOLE_OPT("accumulate", accumulate, "1", 1, 65536, "batches in a step"),
    WHOLE_OPT("steps", steps, "600", 0, 1e12, "steps in all, those before --resume included"),
    REAL_OPT("lr", lr, "1e-3", 0, 100, "learning rate"),
    REAL_OPT("min-lr", min_lr, "auto", 0, 100, "where the schedule ends; auto = lr / 10"),
    WHOLE_OPT("warmup", warmup, "auto", 0, 1e12,
              "steps of linear warm-up; auto = 5% of all, 100 at most"),
    WHOLE_OPT("decay-steps", decay_steps, "auto", 1, 1e12,
              "step at which min-lr is reached; auto = --steps"),
    CHOICE_OPT("schedule", schedule, "cosine", "constant|linear|cosine",
               "of the learning rate after the warm-up"),
    REAL_OPT("weight-decay", weight_decay, "0.1", 0, 10, "of matrices; vectors have none"),
    REAL_OPT("beta1", beta1, "0.9", 0, 0.999999, "AdamW's first decay"),
    REAL_OPT("beta2", beta2, "0.99", 0, 0.999999, "AdamW's second decay"),
    REAL_OPT("clip", clip, "1", 0, 1e9, "largest gradient norm; 0 = no clipping"),
    WHOLE_OPT("seed", seed, "1337", 0, 9e15, "of weights, batches, dropout and samples"),

    GROUP("Mixed precision"),
    CHOICE_OPT("dtype", dtype, "fp16", "fp32|fp16|bf16", "of the forward and backward pass"),
    CHOICE_OPT("level", level, "1", "0|1|2|3",
               "stored low: 0 nothing, 1 as in PyTorch, 2 activations, 3 weights too"),
    FLAG_OPT("no-master", no_master, "with level 3: no fp32 master weights"),
    CHOICE_OPT("rule", rule, "auto",
               "torch|static|apex|apex-hysteresis|deepspeed|megatron|tensorflow|keras|paddle|"
               "jmp|modulus|colossalai|auto",
               "of the loss scale; auto = torch for fp16, else static 1"),
    REAL_OPT("init-scale", init_scale, "auto", 1e-30, 1e30, "first loss scale; auto = the rule's"),
    WHOLE_OPT("growth-interval", growth_interval, "auto", 1, 2147483647,
              "clean steps before the scale grows; auto = the rule's"),

    GROUP("Watching"),
    WHOLE_OPT("eval-every", eval_every, "100", 1, 1e12, "steps between validations"),
    WHOLE_OPT("eval-batches", eval_batches, "20", 1, 1e9, "batches in a validation"),
    WHOLE_OPT("log-every", log_every, "20", 1, 1e12, "steps between log lines"),

    GROUP("Running"),
    TEXT_OPT("preset", preset, "NAME", PRESETS ": nanoGPT's; other options win"),
    TEXT_OPT("config", config, "FILE", "options from a config.json; other options win"),
    TEXT_OPT("out", out, "DIR", "folder for checkpoints, metrics.jsonl and config.json"),
    FLAG_OPT("overwrite", overwrite, "begin anew in a folder that holds a checkpoint"),
    FLAG_OPT("resume", resume,
             "go on in --out with its options; decay-steps=auto stretches with --steps"),
    {"device", TEXT, AT(device), "auto", 0, 15, "auto|cpu|cuda[:N]",
     "what to train on; auto = a GPU when there is one"},
    FLAG_OPT("graph", graph, "on a GPU: record a step, and replay it where none is logged"),
    WHOLE_OPT("threads", threads, "0", 0, 4096, "CPU threads; 0 = OMP_NUM_THREADS, or all"),
    FLAG_OPT("profile", profile, "at the end: where the time and memory of a step went"),
    FLAG_OPT("quiet", quiet, "print the result and the sample only"),

    GROUP("Sampling"),
    WHOLE_OPT("sample", sample, "0", 0, 1e9, "tokens to write at the end"),
    TEXT_OPT("prompt", prompt, "TEXT", "how the sample begins; for a FILE.bin, token numbers"),
    REAL_OPT("temperature", temperature, "0.8", 0, 100, "0 = always the likeliest token"),
    WHOLE_OPT("top-k", top_k, "0", 0, 65536, "choose among the k likeliest; 0 = among all"),

    GROUP("Help"),
    FLAG_OPT("help", help, "print this text (also -h)"),
    FLAG_OPT("version", version, "print the version"),
};
enum { N_OPTIONS = (int)(sizeof options / sizeof options[0]) };

static const char *const presets[][2] = {
    {"char-cpu", "block=64 batch=12 layers=4 heads=4 width=128 dropout=0 steps=2000 lr=1e-3 "
                 "min-lr=1e-4 warmup=100 decay-steps=2000 schedule=cosine beta2=0.99 "
                 "eval-every=250 eval-batches=20"},
    {"char-gpu", "block=256 batch=64 layers=6 heads=6 width=384 dropout=0.2 steps=5000 lr=1e-3 "
                 "min-lr=1e-4 warmup=100 decay-steps=5000 schedule=cosine beta2=0.99 "
                 "eval-every=250 eval-batches=200"},
    /* GPT-2 124M, half a million tokens a step; 50257 tokens, padded for the GPU's sake. */
    {"gpt2", "vocab=50304 block=1024 batch=64 accumulate=8 layers=12 heads=12 width=768 bias=on "
             "dropout=0 steps=600000 lr=6e-4 min-lr=6e-5 warmup=2000 decay-steps=600000 "
             "schedule=cosine beta2=0.95 eval-every=1000 eval-batches=20"},
};

/* The number of edits that turn a into b: for "did you mean". */
static int edits_between(const char *a, const char *b) {
    int row[64], n = (int)strlen(b);
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int least = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j - 1] + 1 < least) least = row[j - 1] + 1;
            if (diagonal + 1 < least) least = diagonal + 1;
            row[j] = least;
        }
    }
    return row[n];
}

/* What other trainers, nanoGPT among them, call our options. */
static const char *const other_names[][2] = {
    {"save", "out"}, {"output", "out"}, {"out-dir", "out"}, {"dataset", "data"},
    {"max-iters", "steps"}, {"learning-rate", "lr"}, {"batch-size", "batch"},
    {"block-size", "block"}, {"n-layer", "layers"}, {"n-head", "heads"}, {"n-embd", "width"},
    {"grad-clip", "clip"}, {"gradient-accumulation-steps", "accumulate"},
    {"eval-interval", "eval-every"}, {"eval-iters", "eval-batches"}, {"log-interval", "log-every"},
};
enum { N_OTHER_NAMES = (int)(sizeof other_names / sizeof other_names[0]) };

/* In a short name few edits are typing errors: more of them make any name of another. */
static const char *nearest_option(const char *name) {
    const char *best = NULL;
    int         least = ((int)strlen(name) + 1) / 3 + 1;
    if (least > 4) least = 4;
    for (int i = 0; i < N_OTHER_NAMES; i++)
        if (strcmp(name, other_names[i][0]) == 0) return other_names[i][1];
    for (int i = 0; i < N_OPTIONS; i++) {
        int d = options[i].name ? edits_between(name, options[i].name) : least;
        if (d < least) { least = d; best = options[i].name; }
    }
    return best;
}

/* The index of the option name[0..length), or -1. */
static int find_option(const char *name, size_t length) {
    for (int i = 0; i < N_OPTIONS; i++) {
        const char *have = options[i].name;
        size_t      k = 0;
        if (!have || strlen(have) != length) continue;
        while (k < length && have[k] == (name[k] == '_' ? '-' : name[k])) k++;
        if (k == length) return i;
    }
    return -1;
}

/* The index of word in "a|b|c", or -1. */
static int64_t find_choice(const char *choices, const char *word) {
    size_t  length = strlen(word);
    int64_t index = 0;
    for (const char *p = choices;; index++) {
        size_t n = strcspn(p, "|");
        if (n == length && strncmp(p, word, n) == 0) return index;
        if (p[n] == '\0') return -1;
        p += n + 1;
    }
}

static double parse_number(const option *o, const char *text) {
    char  *end = NULL;
    double value = strtod(text, &end);
    int    is_number = end != text && *end == '\0' && strchr("-.0123456789", text[0]);
    if (!is_number || (o->kind == WHOLE && value != floor(value)))
        die(2, "--%s: \"%s\" is not a %snumber. Give one, such as --%s %g", o->name, text,
            o->kind == WHOLE ? "whole " : "", o->name,
            strcmp(o->initial, "auto") == 0 ? (o->kind == WHOLE ? 100 : 0.1) : atof(o->initial));
    if (!(value >= o->low && value <= o->high))
        die(2, "--%s %s is out of range: give a number from %.10g to %.10g", o->name, text, o->low,
            o->high);
    return value;
}

/* Sets one field of c from its text: a default, a preset, config.json and the command line
 * all come through here. */
static void set_option(config *c, const option *o, const char *text) {
    void   *field = (char *)c + o->offset;
    double  number = AUTO;
    int64_t whole;
    if (o->kind == TEXT) {
        if (strlen(text) > (size_t)o->high)
            die(2, "--%s is too long: at most %g bytes", o->name, o->high);
        memcpy(field, text, strlen(text) + 1);
        return;
    }
    if (o->kind == CHOICE) number = (double)find_choice(o->choices, text);
    else if (strcmp(text, "auto") != 0 || strcmp(o->initial, "auto") != 0)
        number = parse_number(o, text);
    if (o->kind == CHOICE && number < 0)
        die(2, "--%s: \"%s\" is not one of %s", o->name, text, o->choices);
    whole = (int64_t)number;
    if (o->kind == REAL) memcpy(field, &number, sizeof number);
    else memcpy(field, &whole, sizeof whole);
}

/* Writes the value of an option as the text that set_option reads. */
static void option_text(const config *c, const option *o, char *text, size_t space) {
    const char *field = (const char *)c + o->offset, *p = o->choices;
    int64_t     whole;
    double      number;
    memcpy(&whole, field, sizeof whole);
    memcpy(&number, field, sizeof number);
    if (o->kind == TEXT) {
        snprintf(text, space, "%s", field);
    } else if (o->kind == CHOICE) {
        while (whole-- > 0) p += strcspn(p, "|") + 1;
        snprintf(text, space, "%.*s", (int)strcspn(p, "|"), p);
    } else if (o->kind == REAL ? number < 0 : whole < 0) {
        snprintf(text, space, "auto");
    } else if (o->kind == REAL) {
        snprintf(text, space, "%.15g", number);     /* 0.1; 17 digits where 15 lose bits */
        if (strtod(text, NULL) != number) snprintf(text, space, "%.17g", number);
    } else {
        snprintf(text, space, "%lld", (long long)whole);
    }
}

static void print_option(const option *o) {
    int  long_list = o->kind == CHOICE && strlen(o->choices) > 16;
    char left[64], limits[64] = "";
    if (!o->name) { printf("\n%s\n", o->help); return; }
    snprintf(left, sizeof left, "--%s %s", o->name,
             o->kind == WHOLE ? "N" : o->kind == REAL ? "X" : o->kind == FLAG ? ""
             : long_list ? "NAME" : o->choices);
    if (o->kind == CHOICE) snprintf(limits, sizeof limits, " [%s]", o->initial);
    if (o->kind == WHOLE || o->kind == REAL)
        snprintf(limits, sizeof limits, o->high < 1e8 ? " [%s; %g to %g]" : " [%s; from %g]",
                 o->initial, o->low, o->high);
    printf("  %-26s %s%s\n", left, o->help, limits);
    for (const char *p = o->choices; long_list && *p; p += *p == '|') {
        size_t n = strlen(p) < 64 ? strlen(p) : 64;
        while (p[n] && p[n] != '|') n--;
        printf("  %-26s %.*s\n", "", (int)n, p);
        p += n;
    }
}

static void print_help(void) {
    printf("tiny_gpt - trains a GPT on a text, or on tokens, in fp32, fp16 or bf16\n\n"
           "Usage: tiny_gpt [--option value | --option=value]...\n"
           "In brackets: the default and the range. In names, _ and - are the same.\n");
    for (int i = 0; i < N_OPTIONS; i++) print_option(&options[i]);
    printf("\nExamples\n"
           "  tiny_gpt                                      a minute of training, on mixprec.h\n"
           "  tiny_gpt --data input.txt --preset char-cpu --out run --sample 500\n"
           "  tiny_gpt --out run --resume                   go on after Ctrl-C\n"
           "  tiny_gpt --out run --resume --steps 0 --sample 500 --prompt \"ROMEO:\"\n"
           "                                                sample only\n"
           "  tiny_gpt --dtype bf16 --level 2 --lr 3e-4 --steps 1000\n"
           "  tiny_gpt --preset gpt2 --data train.bin --val-data val.bin --dtype bf16\n\n"
           "Ctrl-C finishes the step, saves, and exits with 130; a second one ends at once.\n");
}

static void apply_preset(config *c, const char *name) {
    char        word[64];
    const char *p = NULL;
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++)
        if (strcmp(presets[i][0], name) == 0) p = presets[i][1];
    if (!p) die(2, "--preset: \"%s\" is not one of " PRESETS, name);
    while (*p) {
        size_t n = strcspn(p, " "), key;
        snprintf(word, sizeof word, "%.*s", (int)n, p);
        key = strcspn(word, "=");
        set_option(c, &options[find_option(word, key)], word + key + 1);
        p += n + (p[n] == ' ');
    }
}

static char *read_file(const char *path, int64_t most, int64_t *size);

/* Reads what write_config wrote: a line `"name": "value"` for each option. */
static void apply_config_file(config *c, const char *path) {
    char    name[64], value[6 * 1024];
    int64_t size = 0;
    char   *text = read_file(path, 1 << 20, &size);
    if (!text) die(1, "cannot read %s: %s", path, strerror(errno));
    for (const char *line = strtok(text, "{},\r\n"); line; line = strtok(NULL, "{},\r\n")) {
        int  i = -1;
        char *to = value;
        value[0] = '\0';
        if (line[strspn(line, " \t")] == '\0') continue;
        if (sscanf(line, " \"%63[^\"]\" : \"%6143[^\"]", name, value) > 0)
            i = find_option(name, strlen(name));
        if (i < 0) die(1, "%s: \"%.40s\" is not the line of an option", path, line);
        for (const char *from = value; *from; from++) {     /* \u00XX: a special character */
            unsigned code = (unsigned char)*from;
            if (code == '\\' && sscanf(from, "\\u%4x", &code) == 1) from += 5;
            *to++ = (char)code;
        }
        *to = '\0';
        set_option(c, &options[i], value);
    }
    free(text);
}

static void die_unknown(const char *argument) {
    char        name[64], dashes[64];
    const char *near;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(argument, "="), argument);
    memcpy(dashes, name, sizeof name);
    for (char *p = dashes; *p; p++) if (*p == '_') *p = '-';
    near = nearest_option(dashes);
    if (near) die(2, "unknown option --%s. Did you mean --%s?", name, near);
    die(2, "unknown option --%s. tiny_gpt --help lists all of them", name);
}

/* Finds the texts of the options on the command line; the last one of a name counts. */
static void parse_command_line(int argc, char **argv, const char **given) {
    for (int a = 1; a < argc; a++) {
        const char *name = strcmp(argv[a], "-h") == 0 ? "--help" : argv[a], *value;
        int         i;
        if (strncmp(name, "--", 2) != 0)
            die(2, "unexpected argument \"%s\". To train on a file: --data FILE", name);
        name += 2;
        value = strchr(name, '=');
        i = find_option(name, strcspn(name, "="));
        if (i < 0) die_unknown(name);
        if (options[i].kind == FLAG) {
            if (value) die(2, "--%s takes no value", options[i].name);
            given[i] = "1";
        } else if (value) {
            given[i] = value + 1;
        } else if (a + 1 < argc && strncmp(argv[a + 1], "--", 2) != 0) {
            given[i] = argv[++a];
        } else {
            die(2, "--%s needs a value, as in --%s %s", options[i].name, options[i].name,
                options[i].choices ? options[i].choices : options[i].initial);
        }
    }
}

static int64_t decay_steps(const config *c) {
    return c->decay_steps != AUTO ? c->decay_steps : c->steps > 0 ? c->steps : 1;
}

static int64_t warmup_steps(const config *c) {
    int64_t twentieth = decay_steps(c) / 20;
    return c->warmup != AUTO ? c->warmup : twentieth < 100 ? twentieth : 100;
}

/* What no single option can know to be wrong. */
static void check_options(const config *c) {
    if (c->width % c->heads != 0)
        die(2, "--width %lld is not divisible by --heads %lld: change one of them",
            (long long)c->width, (long long)c->heads);
    if (c->resume && !c->out[0]) die(2, "--resume needs the folder of the run: --out DIR");
    if (c->resume && c->overwrite) die(2, "--resume and --overwrite exclude each other");
    if (c->graph && c->profile)
        die(2, "--profile times kernel by kernel, --graph runs them all at once: leave one out");
    if (c->no_master && (c->level != 3 || c->dtype == DTYPE_FP32))
        die(2, "--no-master is for weights stored low: add --level 3 with --dtype fp16 or bf16, or "
               "leave it out");
    if (c->min_lr > c->lr)
        die(2, "--min-lr %g is above --lr %g: lower it, or leave it out", c->min_lr, c->lr);
    if (c->schedule != MIXP_SCHEDULE_CONSTANT && warmup_steps(c) > decay_steps(c))
        die(2, "--warmup %lld is longer than the %lld steps of the schedule: lower it, or raise "
               "--decay-steps", (long long)c->warmup, (long long)decay_steps(c));
}

/* Writes the path of a file in --out; 1 when there is such a file. */
static int in_folder(const config *c, const char *file, char *path) {
    struct stat info;
    snprintf(path, PATH_SPACE, "%s/%s", c->out, file);
    return stat(path, &info) == 0;
}

/* A run goes on with the sizes it was begun with; c holds them, as config.json at path. */
static void check_sizes(const config *c, const char *const *given, const char *path) {
    static const char *const sizes[] = {"layers", "heads", "width", "block", "bias"};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        int    i = find_option(sizes[k], strlen(sizes[k]));
        config other = *c;
        char   was[32], is[32];
        if (!given[i]) continue;
        set_option(&other, &options[i], given[i]);
        option_text(&other, &options[i], is, sizeof is);
        option_text(c, &options[i], was, sizeof was);
        if (strcmp(is, was) == 0) continue;
        die(2, "--%s is %s in %s: a resumed run keeps its sizes. Leave out --%s %s, or begin "
               "another run", sizes[k], was, path, sizes[k], is);
    }
}

/* Defaults, then the preset, then config.json, then what the user typed. */
static void read_options(config *c, int argc, char **argv) {
    const char *given[N_OPTIONS] = {NULL};
    char        path[PATH_SPACE];
    memset(c, 0, sizeof *c);
    parse_command_line(argc, argv, given);
    for (int i = 0; i < N_OPTIONS; i++)
        if (options[i].name) set_option(c, &options[i], options[i].initial);
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < N_OPTIONS; i++)
            if (given[i]) set_option(c, &options[i], given[i]);
        if (pass == 1 || c->help || c->version) return;
        if (c->preset[0]) apply_preset(c, c->preset);
        if (c->config[0]) apply_config_file(c, c->config);
        if (!c->resume || !in_folder(c, "config.json", path)) continue;
        apply_config_file(c, path);
        check_sizes(c, given, path);
    }
}

/* ==== Data ========================================================================== */

/* A whole file in memory with a '\0' after it; NULL with errno set. */
static char *read_file(const char *path, int64_t most, int64_t *size) {
    FILE  *f = fopen(path, "rb");
    char  *text = NULL;
    size_t space = 1 << 16, n = 0, got = 1;
    if (!f) return NULL;
    while (got > 0) {
        char *bigger = (char *)realloc(text, space + 1);
        if (!bigger) { free(text); fclose(f); errno = ENOMEM; return NULL; }
        text = bigger;
        got = fread(text + n, 1, space - n, f);
        n += got;
        if (n > (size_t)most) break;
        if (n == space) space *= 2;
    }
    if (ferror(f) || n > (size_t)most) {
        if (!ferror(f)) errno = EFBIG;
        free(text);
        fclose(f);
        return NULL;
    }
    fclose(f);
    text[n] = '\0';
    *size = (int64_t)n;
    return text;
}

/* What is learned: tokens 0 .. vocab-1, the first `train` of them to train on, the rest to
 * validate. Of a text, a token is the number of a byte among those that occur. */
typedef struct corpus {
    uint16_t     *tokens;
    int64_t       count, train, vocab;
    int64_t       rows;                 /* of the token table: vocab, or --vocab */
    int           is_text;
    int           id_of_byte[256];      /* of a text; -1: does not occur */
    unsigned char byte_of_id[256];
    int64_t       hash;                 /* tells a resumed run that the data have changed */
} corpus;

/* Without --data: mixprec.h, looked for in the current folder and beside the program. */
static void find_default_data(char *path, size_t space, const char *program) {
    static const char *const places[] = {"", "../", "../../"};
    const char *slash = strrchr(program, '/');
    for (int beside = 0; beside < 2; beside++)
        for (int i = 0; i < 3; i++) {
            struct stat info;
            int folder = beside && slash ? (int)(slash - program + 1) : 0;
            snprintf(path, space, "%.*s%smixprec.h", folder, program, places[i]);
            if (stat(path, &info) == 0) return;
        }
    die(1, "no text to train on: mixprec.h is not here nor beside the program. "
           "Name a file with --data FILE");
}

/* Room for `more` tokens after those that d has. */
static uint16_t *more_tokens(corpus *d, int64_t more, const char *path) {
    size_t    bytes = (size_t)(d->count + more + 1) * sizeof *d->tokens;
    uint16_t *bigger = (uint16_t *)realloc(d->tokens, bytes);
    if (!bigger) die(1, "out of memory: %s has %lld tokens", path, (long long)more);
    d->tokens = bigger;
    return bigger + d->count;
}

/* A text's bytes, for the moment as they are. */
static void append_text(corpus *d, const char *path, const char *flag) {
    int64_t   n = 0;
    char     *text = read_file(path, (int64_t)1 << 30, &n);
    uint16_t *to;
    if (!text) die(1, "cannot read %s: %s. Check %s", path, strerror(errno), flag);
    to = more_tokens(d, n, path);
    for (int64_t i = 0; i < n; i++) to[i] = (unsigned char)text[i];
    d->count += n;
    free(text);
}

static int32_t little_endian_i32(const unsigned char *b) {
    return (int32_t)(b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24);
}

/* The number of tokens in a FILE.bin of `size` bytes, f at the first of them. llm.c writes a
 * header of 256 numbers: magic, version, count. nanoGPT writes none. */
static int64_t begin_tokens(FILE *f, const char *path, int64_t size) {
    enum { MAGIC = 20240520, MAGIC_32_BITS = 20240801, HEADER = 1024 };
    unsigned char header[HEADER] = {0};
    int32_t       magic, version, count;
    size_t        got = fread(header, 1, HEADER, f);
    magic = little_endian_i32(header);
    version = little_endian_i32(header + 4);
    count = little_endian_i32(header + 8);
    if (magic == MAGIC_32_BITS)
        die(1, "%s holds tokens of 32 bits: only those of 16 bits can be read", path);
    if (magic != MAGIC) {
        if (size % 2 != 0)
            die(1, "%s has an odd number of bytes, %lld: tokens of 16 bits were expected. Is it "
                   "whole? (A text must not be named .bin)", path, (long long)size);
        rewind(f);
        return size / 2;
    }
    if (got < HEADER) die(1, "%s is cut off within its header: get the whole file", path);
    if (version != 1) die(1, "%s has version %ld of llm.c's format: only 1 can be read", path,
                          (long)version);
    if (count < 0 || size != HEADER + 2 * (int64_t)count)
        die(1, "%s has %lld bytes, but its header promises %ld tokens, which are %lld: get the "
               "whole file", path, (long long)size, (long)count, HEADER + 2 * (long long)count);
    return count;
}

/* The tokens of a FILE.bin: 16 bits each, the low byte first. */
static void append_tokens(corpus *d, const char *path, const char *flag) {
    struct stat info;
    FILE       *f = fopen(path, "rb");
    int64_t     n = 0;
    uint16_t   *to;
    if (!f || fstat(fileno(f), &info) != 0)
        die(1, "cannot read %s: %s. Check %s", path, strerror(errno), flag);
    n = begin_tokens(f, path, (int64_t)info.st_size);
    to = more_tokens(d, n, path);
    if (fread(to, sizeof *to, (size_t)n, f) != (size_t)n)
        die(1, "cannot read %s: %s", path, ferror(f) ? strerror(errno) : "it became shorter");
    fclose(f);
    for (int64_t i = 0; i < n; i++) {
        unsigned char b[2];
        memcpy(b, to + i, 2);
        to[i] = (uint16_t)(b[0] | b[1] << 8);
    }
    d->count += n;
}

static int is_bin(const char *path) {
    size_t n = strlen(path);
    return n > 4 && strcmp(path + n - 4, ".bin") == 0;
}

/* Numbers the bytes that occur, in their order. */
static void number_bytes(corpus *d) {
    for (int64_t i = 0; i < d->count; i++) d->id_of_byte[d->tokens[i]] = 0;
    for (int b = 0; b < 256; b++)
        if (d->id_of_byte[b] == 0) {
            d->byte_of_id[d->vocab] = (unsigned char)b;
            d->id_of_byte[b] = (int)d->vocab++;
        }
    for (int64_t i = 0; i < d->count; i++) d->tokens[i] = (uint16_t)d->id_of_byte[d->tokens[i]];
}

/* Finds the vocabulary, and that the token table has a row for each of it. */
static void make_vocabulary(corpus *d, const config *c) {
    if (d->is_text) number_bytes(d);
    for (int64_t i = 0; i < d->count; i++) {
        if (c->vocab != AUTO && d->tokens[i] >= c->vocab && !d->is_text)
            die(1, "%s holds token %d, beyond those of --vocab %lld: raise it, or leave it out",
                i < d->train || !c->val_data[0] ? c->data : c->val_data, d->tokens[i],
                (long long)c->vocab);
        if (d->tokens[i] >= d->vocab) d->vocab = d->tokens[i] + 1;
    }
    if (d->vocab < 2)
        die(1, "%s is one %s repeated: nothing to learn", c->data, d->is_text ? "byte" : "token");
    if (c->vocab != AUTO && c->vocab < d->vocab)
        die(1, "%s has %lld different bytes: raise --vocab %lld, or leave it out", c->data,
            (long long)d->vocab, (long long)c->vocab);
    d->rows = c->vocab == AUTO ? d->vocab : c->vocab;
}

/* Training and validation need a block each, and the token after it. */
static void check_length(const corpus *d, const char *path, int64_t have, int64_t least,
                         int64_t block) {
    if (have < least)
        die(1, "%s has %lld %s; --block %lld needs %lld or more: take a longer text or a smaller "
               "--block", path, (long long)have, d->is_text ? "bytes" : "tokens", (long long)block,
            (long long)least);
}

static void read_corpus(corpus *d, const config *c) {
    void  (*append)(corpus *, const char *, const char *);
    int64_t first;
    d->is_text = !is_bin(c->data);
    append = d->is_text ? append_text : append_tokens;
    if (c->val_data[0] && is_bin(c->val_data) == d->is_text)
        die(2, "--data and --val-data must both be texts, or both be tokens (FILE.bin)");
    for (int b = 0; b < 256; b++) d->id_of_byte[b] = -1;
    append(d, c->data, "--data");
    first = d->count;
    if (c->val_data[0]) append(d, c->val_data, "--val-data");
    d->train = c->val_data[0] ? first : d->count * 9 / 10;
    check_length(d, c->data, first, (c->val_data[0] ? 1 : 10) * (c->block + 1), c->block);
    if (c->val_data[0])
        check_length(d, c->val_data, d->count - first, c->block + 1, c->block);
    d->hash = 1469598103934665603;
    for (int64_t i = 0; i < d->count; i++)
        d->hash = (int64_t)(((uint64_t)d->hash ^ d->tokens[i]) * 1099511628211u);
    make_vocabulary(d, c);
}

/* Where row `row` of batch `step` begins is a pure function of its key: a resumed run sees
 * the batches that an uninterrupted one would have seen. */
#define STREAM_TRAIN  (((uint64_t)1 << 62) + 1)
#define STREAM_VAL    (((uint64_t)1 << 62) + 2)
#define STREAM_SAMPLE (((uint64_t)1 << 62) + 3)

static int64_t row_start(const config *c, uint64_t stream, int64_t step, int64_t row,
                         uint64_t choices) {
    uint64_t seed = (uint64_t)c->seed, r, low;
    r = mixp_random_u32(seed, (uint64_t)step, stream, (uint64_t)row);
    if (choices >> 32 == 0) return (int64_t)((r * choices) >> 32);
    low = mixp_random_u32(seed, (uint64_t)step, stream, (uint64_t)row + ((uint64_t)1 << 32));
    return (int64_t)((r << 32 | low) % choices);
}

static void fill_batch(const corpus *d, const config *c, uint64_t stream, int64_t step,
                       int32_t *x, int32_t *y) {
    int64_t  first = stream == STREAM_VAL ? d->train : 0;
    int64_t  last = stream == STREAM_VAL ? d->count : d->train;
    uint64_t choices = (uint64_t)(last - first - c->block);
    for (int64_t row = 0; row < c->batch; row++) {
        const uint16_t *from = d->tokens + first + row_start(c, stream, step, row, choices);
        for (int64_t i = 0; i < c->block; i++) {
            x[row * c->block + i] = from[i];
            y[row * c->block + i] = from[i + 1];
        }
    }
}

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
    if (std > 0) mixp_init_normal(l.w, 0, std);
    else mixp_fill(l.w, 1);
    if (m->bias) l.b = make_tensor(m, index, name, "bias", rows, 0);
    return l;
}

static mixp_tensor *make_table(gpt *m, const char *name, int64_t rows, int64_t cols) {
    mixp_tensor *t = make_tensor(m, -1, name, "weight", rows, cols);
    mixp_init_normal(t, 0, 0.02);
    return t;
}

static void make_gpt(gpt *m, mixp_context *ctx, const config *c, int64_t vocab) {
    mixp_dtype low = c->dtype == DTYPE_FP16 ? MIXP_F16 : MIXP_BF16;
    int64_t    w = c->width;
    /* Each block adds twice to the residual stream: its variance must not grow with depth. */
    double     out_std = 0.02 / sqrt(2.0 * (double)c->layers);
    m->ctx = ctx;
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

/* x + attention(norm(x)), then x + mlp(norm(x)). */
static mixp_tensor *block_forward(const gpt *m, const block *b, mixp_tensor *x, int training) {
    mixp_context *ctx = m->ctx;
    mixp_tensor  *h;
    h = mixp_attention(ctx, linear(m, norm(m, x, b->norm1), b->qkv), m->heads, 1, 0);
    h = linear(m, h, b->attn_out);
    x = mixp_add(ctx, x, mixp_dropout(ctx, h, m->dropout, training));

    h = mixp_gelu(ctx, linear(m, norm(m, x, b->norm2), b->up));
    h = linear(m, h, b->down);
    return mixp_add(ctx, x, mixp_dropout(ctx, h, m->dropout, training));
}

/* logits[batch, length, vocab] of the tokens ids[batch, length]; when `last`, of one sequence,
 * logits[1, vocab] of its last token alone. No line of it knows about precision: autocast
 * decides, operator by operator. */
static mixp_tensor *gpt_logits(const gpt *m, mixp_tensor *ids, int training, int last) {
    mixp_context *ctx = m->ctx;
    int64_t       length = ids ? ids->shape[1] : 1, one = 1;
    int64_t       rows[2] = {length, m->positions->shape[1]};
    mixp_tensor  *x;
    x = mixp_add(ctx, mixp_embedding(ctx, m->tokens, ids),
                 mixp_embedding(ctx, m->positions, mixp_input(ctx, MIXP_I32, 1, &length, m->ramp)));
    x = mixp_dropout(ctx, x, m->dropout, training);
    for (int i = 0; i < m->layers; i++) x = block_forward(m, &m->blocks[i], x, training);
    if (last)                           /* a row of x, as an embedding picks one of a table */
        x = mixp_embedding(ctx, mixp_reshape(ctx, x, 2, rows),
                           mixp_input(ctx, MIXP_I32, 1, &one, &m->ramp[length - 1]));
    return mixp_linear(ctx, norm(m, x, m->norm), m->tokens, NULL);
}

/* ==== Device ======================================================================== */

#ifdef TINY_GPT_CUDA
enum { HAS_CUDA = 1 };
static const mixp_device *find_gpu(int ordinal, const char **why)
{ return mixp_cuda(ordinal, why); }
#else
enum { HAS_CUDA = 0 };
static const mixp_device *find_gpu(int ordinal, const char **why) {
    (void)ordinal;
    *why = "this tiny_gpt was built without CUDA. Build it with -DTINY_GPT_CUDA and "
           "mixprec_cuda.cu, as the head of tiny_gpt.c says";
    return NULL;
}
#endif

/* What --device names: the number of a GPU, or one of these. */
enum { THE_CPU = -1, ANY = -2 };

static int wanted_device(const config *c) {
    const char *name = c->device;
    int         number = 0, length = 0;
    if (strcmp(name, "auto") == 0) return ANY;
    if (strcmp(name, "cpu") == 0) return THE_CPU;
    if (strcmp(name, "cuda") == 0) return 0;
    if (sscanf(name, "cuda:%5d%n", &number, &length) != 1 || name[length] || number < 0)
        die(2, "--device: \"%s\" is not one of auto|cpu|cuda|cuda:1, and so on", name);
    return number;
}

/* The device to train on, and its name for people. *no_gpu: why auto has found no GPU, or "". */
static const mixp_device *choose_device(const config *c, char *name, size_t space,
                                        const char **no_gpu) {
    int                wanted = wanted_device(c), ordinal = wanted < 0 ? 0 : wanted;
    const mixp_device *gpu = NULL, *device;
    *no_gpu = "";
    if (wanted != THE_CPU) gpu = find_gpu(ordinal, no_gpu);
    if (!gpu && wanted >= 0)
        die(HAS_CUDA ? 1 : 2, "--device %s: %s; --device cpu needs none", c->device, *no_gpu);
    device = gpu ? gpu : mixp_cpu();
    if (gpu) snprintf(name, space, "cuda:%d", ordinal);
    else snprintf(name, space, "%s", device->name);
    if (c->graph && !device->capture_begin)
        die(2, "--graph needs a GPU, and this is %s: leave it out%s", name,
            HAS_CUDA ? ", or use --device cuda" : "");
    return device;
}

/* ==== Optimizer ===================================================================== */

typedef struct trainer {
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
    FILE           *metrics;
    int             lock;               /* descriptor of the folder's lock; -1 = none */
    int             locked_out;         /* 1: another run had the folder when ours began */
    int             save_failed;
    int64_t         applied, streak;    /* steps applied; where a streak of skips began */
    int             warned;             /* 1: of divergence, in this streak */
    double          seconds;            /* of training since the last log line */
    int64_t         timed_steps;
    size_t          model_bytes, optimizer_bytes;   /* for --profile */
} trainer;

/* fp16 overflows at 65504; bf16 reaches as far as fp32. */
static const char *what_to_try(const config *c) {
    if (c->rule == MIXP_RULE_STATIC && c->init_scale != AUTO)
        return "Try a lower --init-scale, another --rule or a lower --lr";
    return c->dtype == DTYPE_FP16 ? "Try a lower --lr, a longer --warmup or --dtype bf16"
                                  : "Try a lower --lr or a longer --warmup";
}

/* The library never prints or exits: the first error waits in the context. */
static void check(const trainer *t, const char *doing) {
    const char *why = "";
    mixp_result result = mixp_context_error(t->ctx, &why);
    if (result == MIXP_ERR_DIVERGED) die(1, "while %s: %s. %s", doing, why, what_to_try(&t->c));
    if (result != MIXP_OK) die(1, "while %s: %s", doing, why);
}

/* Matrices decay, vectors do not. The optimizer clips by itself (max_norm): scaler_step then
 * unscales, clips and updates in one pass over the parameters. */
static void make_optimizer(trainer *t) {
    const config   *c = &t->c;
    const gpt      *m = &t->model;
    mixp_adamw_desc d = mixp_adamw_defaults();
    mixp_param_group      plain;
    d.lr = c->lr;
    d.beta1 = c->beta1;
    d.beta2 = c->beta2;
    d.weight_decay = c->weight_decay;
    d.max_norm = c->clip;
    d.no_master = (int)c->no_master;
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
    static const mixp_dtype dtypes[] = {MIXP_F32, MIXP_F16, MIXP_BF16};
    const config *c = &t->c;
    size_t        batch = (size_t)(c->batch * c->block) * sizeof(int32_t);
    t->best_val = HUGE_VAL;
    t->dtype = dtypes[c->dtype];
    t->ctx = mixp_context_new(&(mixp_context_desc){
        .device = c->profile ? profile_device(t->device) : t->device,
        .seed = (uint64_t)c->seed, .threads = (int)c->threads});
    t->x = (int32_t *)malloc(batch);
    t->y = (int32_t *)malloc(batch);
    if (!t->x || !t->y) die(1, "out of memory: use a smaller --batch or --block");
    if (!t->ctx) die(1, "%s cannot be used: it is out of memory, or fails", t->device_name);
    mixp_autocast_set_level(t->ctx, (int)c->level);
    make_gpt(&t->model, t->ctx, c, t->data.rows);
    check(t, "making the model");
    t->model_bytes = mixp_context_memory(t->ctx).used;
    make_optimizer(t);
    make_scaler(t);
    check(t, "making the optimizer");
    t->optimizer_bytes = mixp_context_memory(t->ctx).used - t->model_bytes;
}

static void free_trainer(trainer *t) {
    if (t->metrics) fclose(t->metrics);
    if (t->lock >= 0) close(t->lock);
    mixp_context_free(t->ctx);          /* and all that was made from it */
    free(t->model.blocks);
    free(t->model.ramp);
    free(t->data.tokens);
    free(t->x);
    free(t->y);
}

/* ==== Output ======================================================================== */

/* In what the forward and backward pass compute: --level is nothing without a low dtype. */
static void precision_text(const config *c, char *text, size_t space) {
    char dtype[16];
    option_text(c, &options[find_option("dtype", 5)], dtype, sizeof dtype);
    if (c->dtype == DTYPE_FP32)
        snprintf(text, space, c->level > 1 ? "fp32 (level %d is for fp16 and bf16)" : "fp32",
                 (int)c->level);
    else if (c->level == 0) snprintf(text, space, "fp32 (level 0: no autocast)");
    else snprintf(text, space, "%s at level %d", dtype, (int)c->level);
}

static void print_header(const trainer *t) {
    const config *c = &t->c;
    char          precision[48], rule[32], padded[32] = "", how[32];
    int           threads = mixp_context_exec(t->ctx)->threads, on_gpu = t->device != mixp_cpu();
    const char   *unit = t->data.is_text ? "bytes" : "tokens";
    precision_text(c, precision, sizeof precision);
    option_text(c, &options[find_option("rule", 4)], rule, sizeof rule);
    if (t->data.rows > t->data.vocab)
        snprintf(padded, sizeof padded, " padded to %lld", (long long)t->data.rows);
    say("model    %.2f M parameters: %lld layers, %lld heads, width %lld, block %lld, "
        "vocabulary %lld%s\n", (double)t->model.n_parameters / 1e6, (long long)c->layers,
        (long long)c->heads, (long long)c->width, (long long)c->block, (long long)t->data.vocab,
        padded);
    say("data     %s: %lld %s to train on, %lld to validate%s%s\n", c->data,
        (long long)t->data.train, unit, (long long)(t->data.count - t->data.train),
        c->val_data[0] ? " of " : "", c->val_data);
    snprintf(how, sizeof how, "%d thread%s", threads, threads == 1 ? "" : "s");
    if (on_gpu) snprintf(how, sizeof how, c->graph ? "as a graph" : "step by step");
    if (HAS_CUDA && t->no_gpu[0]) say("device   no GPU is used: %s\n", t->no_gpu);
    say("run      %s, loss scale %s, %s, %s, %lld x %lld tokens a step\n", precision, rule,
        t->device_name, how, (long long)(c->batch * c->accumulate), (long long)c->block);
    if (c->resume && t->step >= c->steps)
        say("resumed  at step %lld; nothing is left to train: --steps is %lld\n",
            (long long)t->step, (long long)c->steps);
    else if (c->resume)
        say("resumed  at step %lld of %lld\n", (long long)t->step, (long long)c->steps);
}

/* More threads than processors take turns, and wait for each other. */
static void warn_of_threads(const trainer *t) {
#ifdef _OPENMP
    int threads = mixp_context_exec(t->ctx)->threads, processors = omp_get_num_procs();
    if (t->device == mixp_cpu() && threads > processors)
        warn("%d threads on %d processor%s wait for each other: --threads %d is faster", threads,
             processors, processors == 1 ? "" : "s", processors);
#else
    (void)t;                            /* there is one */
#endif
}

static void show_bar(const trainer *t, double began, int64_t first_step) {
    enum { WIDTH = 30 };
    char    bar[WIDTH + 1];
    double  done = (double)t->step / (double)t->c.steps;
    double  each = (seconds_now() - began) / (double)(t->step - first_step);
    for (int i = 0; i < WIDTH; i++) bar[i] = (double)i < done * WIDTH ? '#' : '.';
    bar[WIDTH] = '\0';
    printf("\r%s%s%s %3.0f%% step %lld, %.0f s left\033[K", colour ? "\033[36m" : "", bar,
           colour ? "\033[0m" : "", 100 * done, (long long)t->step,
           each * (double)(t->c.steps - t->step));
    fflush(stdout);
    bar_shown = 1;
}

#define ABSENT (-1.0)                   /* no loss is negative */

static void number_text(char *text, size_t space, const char *format, double value) {
    if (value == ABSENT) snprintf(text, space, "-");
    else if (isnan(value)) snprintf(text, space, "nan");    /* of either sign */
    else snprintf(text, space, format, value);
}

/* JSON has no NaN and no Inf. */
static void json_number(FILE *f, const char *name, double value) {
    if (value == ABSENT || !(fabs(value) < HUGE_VAL)) fprintf(f, ",\"%s\":null", name);
    else fprintf(f, ",\"%s\":%.9g", name, value);
}

static void write_metrics(trainer *t, double loss, double val, const mixp_verdict *v, double ms) {
    FILE *f = t->metrics;
    if (!f) return;
    fprintf(f, "{\"step\":%lld", (long long)t->step);
    json_number(f, "loss", loss);
    json_number(f, "val", val);
    json_number(f, "norm", v->grad_norm);
    json_number(f, "lr", v->lr);
    json_number(f, "scale", v->scale);
    fprintf(f, ",\"skipped\":%lld,\"last_skip\":%lld", (long long)v->skipped,
            (long long)t->last_skip);
    json_number(f, "ms", ms);
    fprintf(f, ",\"mem\":%llu}\n", (unsigned long long)mixp_context_memory(t->ctx).peak);
    if (fflush(f) != 0) {
        fprintf(stderr, "tiny_gpt: cannot write metrics.jsonl: %s. Training goes on without it\n",
                strerror(errno));
        fclose(f);
        t->metrics = NULL;
    }
}

/* One line of the log: the state of training, and of mixed precision. */
static void log_line(trainer *t, double loss, double val) {
    const config *c = &t->c;
    mixp_verdict  v = mixp_scaler_verdict(t->scaler);
    char          loss_of[32], val_of[32], norm_of[32], skips[48] = "";
    double        each = t->timed_steps ? t->seconds / (double)t->timed_steps : 0;
    double        tokens = (double)(c->batch * c->block * c->accumulate);
    if (v.outcome == MIXP_STEP_NONE) {          /* before the first step */
        v.grad_norm = ABSENT;
        v.lr = mixp_optimizer_lr(t->opt, 0);
        v.scale = mixp_scaler_loss_scale(t->scaler);
    }
    number_text(loss_of, sizeof loss_of, "%.4f", loss);
    number_text(val_of, sizeof val_of, "%.4f", val);
    number_text(norm_of, sizeof norm_of, "%.3f", v.grad_norm);
    write_metrics(t, loss, val, &v, 1e3 * each);
    if (t->last_skip) snprintf(skips, sizeof skips, " (last @%lld)", (long long)t->last_skip);
    if (!c->quiet)
        say("step %4lld/%lld | loss %6s | val %6s | norm %5s | lr %.2e | scale %g | "
            "skip %lld%s | %.0f tok/s | %.1f ms | %.0f MiB\n", (long long)t->step,
            (long long)c->steps, loss_of, val_of, norm_of, v.lr, (double)v.scale,
            (long long)v.skipped, skips, each > 0 ? tokens / each : 0, 1e3 * each,
            (double)mixp_context_memory(t->ctx).peak / 1048576.0);
    t->seconds = 0;
    t->timed_steps = 0;
}

/* ==== Checkpoints =================================================================== */

/* Writes beside the target and renames: the old file is there, or the new one. */
static int replace_file(const char *path, const char *text, size_t length) {
    char  temporary[PATH_SPACE + 8];
    FILE *f;
    int   good;
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    f = fopen(temporary, "wb");
    if (!f) return 0;
    good = fwrite(text, 1, length, f) == length;
    good = fclose(f) == 0 && good;
    return good && rename(temporary, path) == 0;
}

static void write_config(const trainer *t) {
    char   path[PATH_SPACE], value[1100], *text = (char *)malloc(1 << 16);
    size_t n = 0;
    if (!text) die(1, "out of memory");
    for (int i = 0; i < N_OPTIONS; i++) {
        const option *o = &options[i];
        if (!o->name && strcmp(o->help, "Running") == 0) break;
        if (!o->name) continue;
        option_text(&t->c, o, value, sizeof value);
        n += (size_t)sprintf(text + n, "%s  \"%s\": \"", n ? ",\n" : "{\n", o->name);
        for (const char *p = value; *p; p++)
            if ((unsigned char)*p < 32 || strchr("\"\\{},", *p))
                n += (size_t)sprintf(text + n, "\\u%04x", (unsigned)*p);
            else text[n++] = *p;
        text[n++] = '"';
    }
    n += (size_t)sprintf(text + n, "\n}\n");
    in_folder(&t->c, "config.json", path);
    if (!replace_file(path, text, n)) die(1, "cannot write %s: %s", path, strerror(errno));
    free(text);
}

/* Everything that the next step depends on goes through this one list. */
static mixp_result save_or_load(trainer *t, const char *file, int load) {
    char                  path[PATH_SPACE];
    mixp_result           result;
    mixp_checkpoint_value values[] = {
        {"step", MIXP_I64, 1, &t->step}, {"last_skip", MIXP_I64, 1, &t->last_skip},
        {"best_val", MIXP_F64, 1, &t->best_val}, {"best_step", MIXP_I64, 1, &t->best_step},
        {"text_hash", MIXP_I64, 1, &t->data.hash}};
    mixp_checkpoint what = {
        .ctx = t->ctx, .scaler = t->scaler, .optimizers = &t->opt, .n_optimizers = 1,
        .values = values, .n_values = (int)(sizeof values / sizeof values[0])};
    in_folder(&t->c, file, path);
    if (!load) return mixp_checkpoint_save(path, &what);
    result = mixp_checkpoint_load(path, &what);
    if (result != MIXP_ERR_SHAPE) return result;
    values[2].name = "best_bits";       /* so version 0.1 called the bits of that double */
    values[2].dtype = MIXP_I64;
    if (mixp_checkpoint_load(path, &what) != MIXP_OK) return result;
    mixp_context_clear_error(t->ctx);
    return MIXP_OK;
}

/* A full disk must not end a long training: the next save may work. */
static void save(trainer *t, const char *file) {
    const char *why = "";
    if (!t->c.out[0]) return;
    t->save_failed = save_or_load(t, file, 0) != MIXP_OK;
    if (!t->save_failed) return;
    mixp_context_error(t->ctx, &why);
    hide_bar();
    fprintf(stderr, "tiny_gpt: %s was not saved: %s\n", file, why);
    mixp_context_clear_error(t->ctx);
}

/* The step that a line of the metrics is of; -1 for any other line. */
static int64_t step_of_line(const char *line) {
    static const char before[] = "{\"step\":";
    size_t n = sizeof before - 1;
    if (strncmp(line, before, n) != 0 || line[n] < '0' || line[n] > '9') return -1;
    return strtoll(line + n, NULL, 10);
}

/* A killed run may have logged steps after its last checkpoint: they will be done again. 1 when
 * the newest header that stays is this one. */
static int trim_metrics(const trainer *t, const char *path, const char *header) {
    int64_t   size = 0, kept = 0;
    int       same = 0;
    char     *text = read_file(path, (int64_t)1 << 30, &size);
    if (!text) return 0;
    for (char *line = text; *line;) {
        size_t  n = strcspn(line, "\n");
        int     is_header = strncmp(line, "{\"device\":", 10) == 0;
        int64_t step = step_of_line(line);
        n += line[n] == '\n';
        if (line[n - 1] == '\n' && (is_header || (step >= 0 && step <= t->step))) {
            if (is_header) same = n == strlen(header) && memcmp(line, header, n) == 0;
            memmove(text + kept, line, n);
            kept += (int64_t)n;
        }
        line += n;
    }
    if (kept < size && !replace_file(path, text, (size_t)kept))
        die(1, "cannot write %s: %s", path, strerror(errno));
    free(text);
    return same;
}

/* A damaged checkpoint need not be the end of a run. */
static void load_checkpoint(trainer *t) {
    char        best[PATH_SPACE];
    const char *why = "", *out = t->c.out;
    if (save_or_load(t, CHECKPOINT, 1) != MIXP_ERR_FORMAT) { check(t, "resuming"); return; }
    mixp_context_error(t->ctx, &why);
    if (in_folder(&t->c, BEST, best))
        die(1, "while resuming: %s. The best one lies beside it: copy %s to %s/" CHECKPOINT
               ", or start over with --overwrite", why, best, out);
    die(1, "while resuming: %s. Start over with --overwrite", why);
}

/* Takes the lock of the folder; 0 when another run has it. The system gives it back when a
 * process ends, however that happens. Where no lock can be had, on a disk that is read-only or
 * knows none, there is none. */
static int lock_folder(trainer *t, int create) {
    struct flock whole;
    char         path[PATH_SPACE];
    if (t->lock >= 0) return 1;
    in_folder(&t->c, LOCK, path);
    t->lock = open(path, O_RDWR | (create ? O_CREAT : 0), 0666);
    if (t->lock < 0) return 1;
    memset(&whole, 0, sizeof whole);
    whole.l_type = F_WRLCK;
    whole.l_whence = SEEK_SET;
    if (fcntl(t->lock, F_SETLK, &whole) == 0 || (errno != EACCES && errno != EAGAIN)) return 1;
    close(t->lock);
    t->lock = -1;
    return 0;
}

/* Loads the checkpoint, or makes sure that none is lost. Creates nothing. */
static void resume_or_begin(trainer *t) {
    const config *c = &t->c;
    int64_t       hash = t->data.hash;
    mixp_param_group    groups[2];
    char          path[PATH_SPACE];
    int           exists = c->out[0] && in_folder(c, CHECKPOINT, path);
    if (exists && !c->resume && !c->overwrite)
        die(1, "%s holds a checkpoint: continue it with --resume, choose another --out, or "
               "replace it with --overwrite", c->out);
    if (!c->resume) return;
    if (!exists) die(1, "no checkpoint in %s: leave out --resume to begin a run", c->out);
    for (int g = 0; g < 2; g++) mixp_optimizer_group(t->opt, g, &groups[g]);
    t->locked_out = !lock_folder(t, 0);     /* to sample from a run that goes on is fine */
    load_checkpoint(t);
    /* It brought the learning rate it was saved with: the options have the last word. */
    for (int g = 0; g < 2; g++) mixp_optimizer_set_group(t->opt, g, &groups[g]);
    mixp_scaler_change(t->scaler, &(mixp_scaler_desc){
        .growth_interval = c->growth_interval == AUTO ? 0 : (int)c->growth_interval});
    check(t, "resuming");
    if (t->data.hash != hash)
        die(1, "%s is not the text that this run was trained on: name that one with --data%s",
            c->data, c->val_data[0] ? " and --val-data" : "");
}

/* Makes the folder, and those above it that are missing. */
static void make_folders(const char *folder) {
    char        path[PATH_SPACE];
    struct stat info;
    for (size_t n = 1; n <= strlen(folder); n++) {
        if (folder[n] != '/' && folder[n] != '\0') continue;
        snprintf(path, sizeof path, "%.*s", (int)n, folder);
        if (stat(path, &info) != 0 && mkdir(path, 0777) != 0 && errno != EEXIST)
            die(1, "cannot make the folder %s: %s. Choose another --out", path, strerror(errno));
    }
}

static void open_folder(trainer *t) {
    const config *c = &t->c;
    char          path[PATH_SPACE], header[64];
    int           has_header;
    if (!c->out[0] || t->step >= c->steps) return;      /* nothing will be written */
    make_folders(c->out);
    if (t->locked_out || !lock_folder(t, 1))
        die(1, "another tiny_gpt is training in %s: wait until it is done, or choose another "
               "--out", c->out);
    in_folder(c, "metrics.jsonl", path);
    snprintf(header, sizeof header, "{\"device\":\"%s\"}\n", t->device_name);
    has_header = c->resume && trim_metrics(t, path, header);
    t->metrics = fopen(path, c->resume ? "a" : "w");
    if (!t->metrics) die(1, "cannot write %s: %s. Choose another --out", path, strerror(errno));
    if (!has_header) fputs(header, t->metrics);
    write_config(t);
}

/* ==== Training ====================================================================== */

/* The loss of the batch in t->x and t->y. */
static mixp_tensor *batch_loss(trainer *t, int training) {
    int64_t      shape[2] = {t->c.batch, t->c.block};
    mixp_tensor *loss = NULL, *x, *y;
    x = mixp_input(t->ctx, MIXP_I32, 2, shape, t->x);
    y = mixp_input(t->ctx, MIXP_I32, 2, shape, t->y);
    MIXP_AUTOCAST(t->ctx, t->dtype) {
        loss = mixp_cross_entropy(t->ctx, gpt_logits(&t->model, x, training, 0), y, MIXP_IGNORE);
    }
    return loss;
}

/* Batch i of the --accumulate of a step: a step is all of them in order. Nothing here waits for
 * the device. */
static mixp_tensor *train_batch(trainer *t, int64_t i) {
    int64_t      n = t->c.accumulate;
    mixp_tensor *loss;
    if (i == 0) mixp_zero_grad(t->opt);
    mixp_step_begin(t->ctx);
    loss = batch_loss(t, 1);
    if (n > 1) loss = mixp_scale(t->ctx, loss, 1.0f / (float)n);
    mixp_backward(t->ctx, mixp_scaler_scale(t->scaler, loss));
    if (i < n - 1) return loss;
    mixp_scaler_step(t->scaler, t->opt);        /* unscales, clips and updates, or skips */
    mixp_scaler_update(t->scaler);
    return loss;
}

/* train_batch from its recording, made when there is none. Each batch is one of its own: all
 * in one would read the same t->x. */
static void replay_batch(trainer *t, int64_t i) {
    mixp_graph **graph = i == t->c.accumulate - 1 ? &t->last : i == 0 ? &t->first : &t->middle;
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
    int64_t n = t->c.accumulate;
    double  mean = 0;
    for (int64_t i = 0; i < n; i++) {
        mixp_tensor *loss = NULL;
        fill_batch(&t->data, &t->c, STREAM_TRAIN, t->step * n + i, t->x, t->y);
        if (t->c.graph && t->warm && !want_loss) replay_batch(t, i);
        else loss = train_batch(t, i);
        if (want_loss) mean += mixp_item(loss);
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
        MIXP_NO_GRAD(t->ctx) { sum += mixp_item(batch_loss(t, 0)); }
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
}

/* Such a run learns nothing any more: says so once, and again only if it had recovered. */
static void look_for_divergence(trainer *t, const mixp_verdict *v, double loss) {
    enum { MANY = 20 };                 /* skips in a row; a scale far too high needs fewer */
    char what[48] = "the loss is nan", where[160] = "";
    if (v->applied != t->applied) { t->streak = v->step; t->warned = 0; }
    t->applied = v->applied;
    if (t->warned || (!isnan(loss) && v->step - t->streak < MANY)) return;
    t->warned = 1;
    if (!isnan(loss))
        snprintf(what, sizeof what, "the last %d steps were skipped", (int)(v->step - t->streak));
    if (v->bad_tensor)
        snprintf(where, sizeof where, " (%s in the gradient of %s)", v->bad_is_nan ? "NaN" : "Inf",
                 v->bad_tensor);
    warn("at step %lld %s%s: the run seems to have diverged. %s", (long long)t->step, what, where,
         what_to_try(&t->c));
}

/* A GPU may be some steps behind: then the verdict is that of an earlier step. */
static void note_step(trainer *t, double began, double loss) {
    mixp_verdict v = mixp_scaler_verdict(t->scaler);
    t->step++;
    t->timed_steps++;
    t->seconds += seconds_now() - began;
    if (v.outcome == MIXP_STEP_SKIPPED) t->last_skip = v.step;
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
        if (c->profile && t->warm) profile_begin();
        loss = train_step(t, logs);
        note_step(t, now, loss);
        profile_end();
        if (validates) validate_log_save(t, loss);
        else if (logs) log_line(t, loss, ABSENT);
        if (progress_bar) show_bar(t, began, first);
    }
    hide_bar();
}

/* ==== Profile ======================================================================= */

/* The most memory this process has had, 0 where nobody tells. */
static double process_peak(void) {
    FILE  *f = fopen("/proc/self/status", "r");
    char   line[256];
    double kib = 0;
    while (f && fgets(line, sizeof line, f)) sscanf(line, "VmHWM: %lf", &kib);
    if (f) fclose(f);
    return 1024 * kib;
}

static void memory_line(const char *what, double bytes) {
    if (bytes > 0) say("%-32s %10.2f\n", what, bytes / 1048576.0);
}

/* A new step has given the activations back: what is in use then stays. */
static void print_memory(trainer *t) {
    const mixp_tensor *grad = t->model.tokens->grad;
    double peak = (double)mixp_context_memory(t->ctx).peak, stays, gradients = 0;
    if (grad) gradients = (double)t->model.n_parameters * (double)mixp_dtype_size(grad->dtype);
    mixp_step_begin(t->ctx);
    stays = (double)mixp_context_memory(t->ctx).used;
    say("%-32s %10s\n", "memory", "MiB");
    memory_line("parameters", (double)t->model_bytes);
    memory_line("gradients", gradients);
    memory_line("optimizer state", (double)t->optimizer_bytes);
    memory_line("low copies of parameters",
                stays - gradients - (double)(t->model_bytes + t->optimizer_bytes));
    memory_line("activations, at most", peak - stays);
    memory_line("the process, at most", process_peak());
}

/* On a GPU, products that its library refuses are slow: they should be none. */
static void print_products(trainer *t) {
    mixp_gemm_count n = mixp_context_gemm_count(t->ctx);
    if (n.direct + n.packed + n.plain == 0) return;
    say("products: %.0f as they are, %.0f with packed operands, %.0f without tensor cores\n",
        (double)n.direct, (double)n.packed, (double)n.plain);
}

/* The first step allocates and is no measure: it is left out. */
static void print_profile(trainer *t) {
    if (profile.steps == 0) { say("--profile needs two steps of training or more\n"); return; }
    profile_print(say);
    print_memory(t);
    print_products(t);
}

/* ==== Sampling ====================================================================== */

static int falling(const void *a, const void *b) {
    float x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x < y) - (x > y);
}

/* Draws from softmax(logits / temperature), cut to the top_k likeliest; spare: as many floats. */
static int choose(const config *c, const float *logits, float *spare, int64_t vocab,
                  int64_t position) {
    double  sum = 0, u;
    float   least = -HUGE_VALF;
    int64_t top = 0, last = 0;
    for (int64_t i = 1; i < vocab; i++) if (logits[i] > logits[top]) top = i;
    if (c->temperature == 0) return (int)top;
    if (c->top_k && c->top_k < vocab) {
        memcpy(spare, logits, (size_t)vocab * sizeof *spare);
        qsort(spare, (size_t)vocab, sizeof *spare, falling);
        least = spare[c->top_k - 1];
    }
#define WEIGHT(i) (logits[i] < least ? 0 : exp((double)(logits[i] - logits[top]) / c->temperature))
    for (int64_t i = 0; i < vocab; i++) sum += WEIGHT(i);
    u = mixp_random_u32((uint64_t)c->seed, (uint64_t)position, STREAM_SAMPLE, 0) * 0x1p-32 * sum;
    for (int64_t i = 0; i < vocab; i++) {
        double weight = WEIGHT(i);
        if (weight > 0) last = i;
        if (u < weight) break;
        u -= weight;
    }
#undef WEIGHT
    return (int)last;
}

/* The logits of the token after ids[0..length). */
static void next_logits(trainer *t, const int32_t *ids, int64_t length, float *logits) {
    int64_t      shape[2] = {1, length};
    mixp_tensor *y = NULL;
    mixp_step_begin(t->ctx);
    MIXP_NO_GRAD(t->ctx) {
        MIXP_AUTOCAST(t->ctx, t->dtype) {
            y = gpt_logits(&t->model, mixp_input(t->ctx, MIXP_I32, 2, shape, ids), 0, 1);
        }
        if (y) mixp_read(y, logits, MIXP_F32, y->count);
    }
    check(t, "sampling");
}

/* A FILE.bin comes without a tokenizer: its prompt is token numbers. */
static int64_t read_numbers(const config *c, const corpus *d, int32_t *ids) {
    int64_t n = 0;
    for (const char *p = c->prompt; p[strspn(p, " ")];) {
        char *end = NULL;
        long  id = strtol(p, &end, 10);
        if (end == p || (*end && *end != ' ') || id < 0 || id >= d->rows)
            die(2, "--prompt \"%s\": give token numbers below %lld, such as --prompt \"1 0 1\": "
                   "%s has no text", c->prompt, (long long)d->rows, c->data);
        ids[n++] = (int32_t)id;
        p = end;
    }
    return n;
}

/* The prompt as tokens, so that a bad one is known before training. Without one: a text begins
 * at a line's start, GPT-2's tokens at its end of a text. */
static int64_t read_prompt(const config *c, const corpus *d, int32_t *ids) {
    enum { END_OF_TEXT = 50256 };
    int64_t n = d->is_text ? 0 : read_numbers(c, d, ids);
    for (const char *p = c->prompt; d->is_text && *p; p++) {
        int byte = (unsigned char)*p, id = d->id_of_byte[byte];
        if (id < 0)
            die(2, "--prompt holds the byte 0x%02x '%c', which does not occur in %s", byte,
                byte >= 32 && byte < 127 ? byte : '?', c->data);
        ids[n++] = id;
    }
    if (n == 0) {
        int first = d->is_text ? d->id_of_byte['\n'] : END_OF_TEXT;
        ids[n++] = first >= 0 && first < d->vocab ? first : 0;
    }
    return n;
}

/* A text's token as its byte, where it could not do anything to the terminal; else a number. */
static void say_token(const corpus *d, int token, int is_first) {
    int byte = d->is_text ? d->byte_of_id[token] : 0;
    if (!d->is_text) say("%s%d", is_first ? "" : " ", token);
    else say("%c", (byte < 32 && byte != '\n' && byte != '\t') || byte == 127 ? '?' : byte);
}

static void sample_text(trainer *t) {
    const config *c = &t->c;
    int32_t      *ids = (int32_t *)malloc(sizeof *ids * (sizeof c->prompt + (size_t)c->sample));
    float        *logits = (float *)malloc(sizeof *logits * 2 * (size_t)t->data.rows);
    if (!ids || !logits) die(1, "out of memory");
    int64_t n = read_prompt(c, &t->data, ids);
    if (!c->quiet) say("--- sample\n");
    say("%s", c->prompt);
    for (int64_t i = 0; i < c->sample && !stop_signal; i++) {
        int64_t length = n < c->block ? n : c->block;
        next_logits(t, ids + n - length, length, logits);
        /* Rows that only pad the table stand for no token. */
        ids[n] = choose(c, logits, logits + t->data.rows, t->data.vocab, i);
        say_token(&t->data, ids[n++], i == 0 && !c->prompt[0]);
    }
    say("\n");
    free(ids);
    free(logits);
}

/* ==== Main ========================================================================== */

static void on_signal(int number) { stop_signal = number; }

/* A second signal of the kind finds the default action again, and ends the program. */
static void catch_signals(void) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction action, old;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = (int)SA_RESETHAND;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 3; i++)
        if (sigaction(numbers[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            sigaction(numbers[i], &action, NULL);
    signal(SIGPIPE, SIG_IGN);           /* a write to a closed pipe fails instead */
}

static void look_at_terminal(const config *c) {
    const char *term = getenv("TERM"), *no_colour = getenv("NO_COLOR");
    progress_bar = isatty(STDOUT_FILENO) && !c->quiet && term && strcmp(term, "dumb") != 0;
    colour = progress_bar && !(no_colour && no_colour[0]);
}

static int finish(trainer *t) {
    const config *c = &t->c;
    if (stop_signal) {
        save(t, CHECKPOINT);
        fprintf(stderr, "tiny_gpt: stopped after step %lld: %s. ", (long long)t->step,
                output_error ? strerror(output_error) : strsignal(stop_signal));
        if (c->out[0] && !t->save_failed)
            fprintf(stderr, "Go on with: tiny_gpt --out %s --resume\n", c->out);
        else fprintf(stderr, "Nothing is saved%s\n", c->out[0] ? "" : ": there was no --out DIR");
        return output_error && output_error != EPIPE ? 1 : 128 + stop_signal;
    }
    if (c->sample > 0) sample_text(t);
    return t->save_failed || stop_signal;
}

static int run(trainer *t, const char *program) {
    int32_t ids[sizeof t->c.prompt];
    int     status;
    check_options(&t->c);
    t->device = choose_device(&t->c, t->device_name, sizeof t->device_name, &t->no_gpu);
    if (!t->c.data[0]) find_default_data(t->c.data, sizeof t->c.data, program);
    read_corpus(&t->data, &t->c);
    read_prompt(&t->c, &t->data, ids);
    make_trainer(t);
    resume_or_begin(t);
    open_folder(t);                     /* all is well: now files may be made */
    look_at_terminal(&t->c);
    catch_signals();
    if (!t->c.quiet) print_header(t);
    warn_of_threads(t);
    if (t->step < t->c.steps) train(t);
    if (!stop_signal && t->best_step + t->step > 0)
        say("best val %.4f at step %lld, after %lld steps%s%s\n", t->best_val,
            (long long)t->best_step, (long long)t->step, t->c.out[0] ? "; in " : "", t->c.out);
    status = finish(t);
    if (t->c.profile) print_profile(t);
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
    status = run(&t, argv[0]);
    free_trainer(&t);
    return status;
}
