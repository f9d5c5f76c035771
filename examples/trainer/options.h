/* options.h - the trainer's command line and presets: a part of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * One table is the source of everything: parsing, ranges, defaults, --help, config.json.
 */
#ifndef TRAINER_OPTIONS_H
#define TRAINER_OPTIONS_H

#include <sys/stat.h>
#include "disk.h"
#include "run.h"


enum { DTYPE_FP32, DTYPE_FP16, DTYPE_BF16 };
enum { ACTIVATION_GELU, ACTIVATION_GELU_TANH, ACTIVATION_RELU2 };
enum { NORM_LAYER, NORM_RMS };
enum { POSITIONS_LEARNED, POSITIONS_ROPE };
enum { HEAD_TIED, HEAD_OWN };
enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON };
enum { TOKEN_BITS_AUTO, TOKEN_BITS_16, TOKEN_BITS_32, TOKEN_BITS_64 };
enum { TOKENS_MOST = 1 << 24 };         /* rows of a token table */
enum { LOSS_AUTO, LOSS_WHOLE, LOSS_CHUNKS };

typedef struct config {
    char    data[1024], val_data[1024], preset[32], config[1024], out[1024], prompt[1024];
    char    trail[1024], tokenizer[1024], device[16], isa[16], from[16], ranks[16], guard[16], recipe_of[600], vocabulary[600], init[1024], export_to[1024];
    int64_t vocab, token_bits, layers, heads, width, block, bias;
    int64_t activation, norm, positions, qk_norm, head, zero_init;
    double  dropout;
    int64_t batch, accumulate, steps, warmup, decay_steps, seed;
    double  lr, muon_lr, min_lr, weight_decay, beta1, beta2, clip;
    int64_t optimizer, schedule, loss, retry, dtype, level, recipe, without, over6, row_scaled, e8m0, codes, narrow,
            no_master, moments, masters, rule;
    int64_t growth_interval;
    int64_t epilogues;                  /* MIXP_EPILOGUES_ */
    double  init_scale;
    int64_t eval_train, sample_every, keep, csv;
    int64_t eval_every, eval_batches, log_every, plant;
    int64_t export_type;
    int64_t resume, compare, eval_only, report, overwrite, quiet, threads, graph, profile;
    int64_t shard, total_batch, ordered;
    double  rank_seconds, peak_tflops;
    int64_t ranks_before, total_before; /* of the resumed run, from its config.json                */
    int64_t help, version;
    int64_t sample, top_k;
    double  temperature, top_p;
} config;

#include "option_kinds.h"

#define PRESETS "char-cpu|char-gpu|gpt2|modern"

/* The groups up to "Running" describe the experiment: config.json holds them. */
static const option options[] = {
    GROUP("Data and model"),
    TEXT_OPT("data", data, "FILE",
             "a text, or tokens in a FILE.bin or FILE.npy; or a pattern of many files, such as "
             "'dir/train_*.bin' (default: the source of mixprec.h)"),
    TEXT_OPT("val-data", val_data, "FILE", "text or tokens for validation (default: the last tenth of --data)"),
    CHOICE_OPT("token-bits", token_bits, "auto", "auto|16|32|64",
               "bits of a token in a FILE.bin without llm.c's or numpy's header; auto = 16, unless the content "
               "looks like 32 or 64"),
    TEXT_OPT("tokenizer", tokenizer, "FILE",
             "a tokenizer.json, such as GPT-2's or Llama 2's: it cuts texts and prompts into tokens, and turns "
             "samples into text"),
    WHOLE_OPT("vocab", vocab, "auto", 2, TOKENS_MOST,
              "rows of the token table; auto = the number of the tokenizer's or the data's tokens"),
    TEXT_OPT("vocabulary", vocabulary, "TEXT",
             "vocabulary of an earlier model, copied from its config.json (default: the data's)"),
    WHOLE_OPT("layers", layers, "4", 1, 512, "transformer blocks"),
    WHOLE_OPT("heads", heads, "4", 1, 512, "attention heads; must divide the width"),
    WHOLE_OPT("width", width, "128", 1, 65536, "size of the residual stream"),
    WHOLE_OPT("block", block, "64", 1, 65536, "context length in tokens"),
    CHOICE_OPT("bias", bias, "off", "off|on", "biases of linear layers and norms, as in GPT-2"),
    CHOICE_OPT("activation", activation, "gelu", "gelu|gelu-tanh|relu2",
               "activation of feed-forward layers; gelu-tanh is GPT-2's, relu2 is relu squared"),
    CHOICE_OPT("norm", norm, "layer", "layer|rms", "layer norm, or RMSNorm (without biases)"),
    CHOICE_OPT("positions", positions, "learned", "learned|rope",
               "a learned table of positions, or rotary embeddings (RoPE) of queries and keys"),
    CHOICE_OPT("qk-norm", qk_norm, "off", "off|on", "RMSNorm of each head's queries and keys"),
    CHOICE_OPT("head", head, "tied", "tied|own", "tied: the head uses the token table; own: it has its own weights"),
    CHOICE_OPT("zero-init", zero_init, "off", "off|on",
               "layers that add to the residual stream, and an untied head, begin with zeros"),
    REAL_OPT("dropout", dropout, "0", 0, 0.99, "share of activations dropped in training"),

    GROUP("Training"),
    WHOLE_OPT("batch", batch, "12", 1, 65536, "sequences in a batch"),
    WHOLE_OPT("accumulate", accumulate, "1", 1, 65536, "batches of each rank in a step"),
    WHOLE_OPT("total-batch", total_batch, "auto", 1, 4294967296,
              "sequences in a step of all ranks together; auto = batch x accumulate x ranks"),
    FLAG_OPT("ordered", ordered,
             "with --total-batch: the same bits for any number of ranks, without a guard; ranks exchange "
             "gradients after each batch"),
    WHOLE_OPT("steps", steps, "600", 0, 1e12, "last step; counts the steps before --resume too"),
    CHOICE_OPT("optimizer", optimizer, "adamw", "adamw|muon",
               "muon: Muon for the matrices of the blocks, AdamW for all other weights"),
    REAL_OPT("lr", lr, "1e-3", 0, 100, "learning rate"),
    REAL_OPT("muon-lr", muon_lr, "auto", 0, 100,
             "learning rate of Muon, scaled to match AdamW's; auto = lr. Both have the same schedule"),
    REAL_OPT("min-lr", min_lr, "auto", 0, 100, "learning rate at the end of the schedule; auto = lr / 10"),
    WHOLE_OPT("warmup", warmup, "auto", 0, 1e12,
              "steps of linear warm-up; auto = 5% of all steps, at most 100"),
    WHOLE_OPT("decay-steps", decay_steps, "auto", 1, 1e12,
              "step at which min-lr is reached; auto = --steps"),
    CHOICE_OPT("schedule", schedule, "cosine", "constant|linear|cosine",
               "schedule of the learning rate after the warm-up"),
    REAL_OPT("weight-decay", weight_decay, "0.1", 0, 10, "weight decay of matrices; vectors have none"),
    REAL_OPT("beta1", beta1, "0.9", 0, 0.999999, "decay of AdamW's first moment"),
    REAL_OPT("beta2", beta2, "0.99", 0, 0.999999, "decay of AdamW's second moment"),
    REAL_OPT("clip", clip, "1", 0, 1e9, "largest gradient norm; 0 = no clipping"),
    CHOICE_OPT("loss", loss, "auto", "auto|whole|chunks",
               "whole: all logits of a batch at once; chunks: some rows at a time; auto = chunks if they save "
               "much memory"),
    WHOLE_OPT("retry", retry, "0", 0, 1000,
              "how often to repeat a skipped step with the same batch; 0 = never"),
    WHOLE_OPT("seed", seed, "1337", 0, 9e15, "seed of weights, batches, dropout and samples"),

    GROUP("Mixed precision"),
    CHOICE_OPT("dtype", dtype, "fp16", "fp32|fp16|bf16", "dtype of products and activations"),
    CHOICE_OPT("level", level, "1", "0|1|2|3",
               "what is stored in 16 bits: 0 nothing, 1 as in PyTorch, 2 all activations, 3 weights too"),
    CHOICE_OPT("recipe", recipe, "none", "none|fp8|fp8-delayed|fp8-block|mxfp8|nvfp4",
               "with bf16: the format of the numbers that linear layers multiply"),
    TEXT_OPT("recipe-of", recipe_of, "NAME=RECIPE,...",
             "recipes of weights by name; * matches any text, and the first match counts: "
             "*.h.0.*=none,*.mlp.*=nvfp4"),
    CHOICE_OPT("recipe-without", without, "none", "none|stochastic|hadamard|2d|all",
               "leave out a part of nvfp4, to see its effect"),
    CHOICE_OPT("over6", over6, "none", "none|w|x|both",
               "with nvfp4: 4over6, two scales for each block of weights, inputs of linear layers, or both"),
    FLAG_OPT("row-scaled", row_scaled, "with nvfp4: an fp32 scale for each row of the inputs of linear layers"),
    CHOICE_OPT("e8m0", e8m0, "rceil", "rceil|floor|ceil|even", "with mxfp8: how the scales of blocks are rounded"),
    FLAG_OPT("codes", codes, "with a recipe: keep the inputs of linear layers for backward as codes of 4 to 8 bits"),
    FLAG_OPT("narrow-products", narrow, "with a recipe, on a GPU: multiply in cuBLASLt's fp8 and fp4"),
    FLAG_OPT("no-master", no_master, "with level 3: no fp32 master weights"),
    CHOICE_OPT("moments", moments, "f32", "f32|bf16|8bit", "how AdamW's two moments are stored"),
    CHOICE_OPT("masters", masters, "f32", "f32|16bit|8bit",
               "with level 3 and bf16: how the master copy of a weight is stored"),
    CHOICE_OPT("rule", rule, "auto",
               "torch|static|apex|apex-hysteresis|deepspeed|megatron|tensorflow|keras|paddle|"
               "jmp|modulus|colossalai|predictive|auto",
               "rule of the loss scale; auto = torch for fp16, else a constant scale of 1"),
    REAL_OPT("init-scale", init_scale, "auto", 1e-30, 1e30, "first loss scale; auto = the rule's"),
    WHOLE_OPT("growth-interval", growth_interval, "auto", 1, 2147483647,
              "clean steps before the scale grows; auto = the rule's"),

    {"guard", TEXT, AT(guard), "auto", 0, 15, "on|off|auto|N",
     "a site (an operator of one layer) that overflows falls back to f32; with a recipe, an operand that loses "
     "too much falls back to bf16; N: sample every N steps; auto = on (16) for fp16"},
    /* in the order of MIXP_EPILOGUES_BIAS, _GELU and both */
    CHOICE_OPT("epilogues", epilogues, "off", "off|bias|gelu|on",
               "on a GPU: compute the gradients of biases, GELU by tanh, or both within products"),

    GROUP("Logging and validation"),
    WHOLE_OPT("eval-every", eval_every, "100", 1, 1e12, "steps between validations"),
    WHOLE_OPT("eval-batches", eval_batches, "20", 1, 1e9, "batches in a validation"),
    CHOICE_OPT("eval-train", eval_train, "off", "off|on",
               "at a validation, also compute the loss of as many batches of the training data"),
    WHOLE_OPT("log-every", log_every, "20", 1, 1e12, "steps between log lines"),
    WHOLE_OPT("sample-every", sample_every, "0", 0, 1e12,
              "steps between samples in training, of --sample tokens or 100; 0 = only at the end. With --dropout "
              "a sample changes which elements are dropped next"),
    WHOLE_OPT("keep", keep, "0", 0, 1e6,
              "how many of the last validations' checkpoints to keep, as step-N.safetensors"),
    CHOICE_OPT("csv", csv, "off", "off|on", "also write metrics.csv in --out"),

    WHOLE_OPT("plant", plant, "0", 0, 1e12,
              "step in which a product exceeds 65504, to see the guard work (needs --bias on); 0 = never"),

    GROUP("Running"),
    TEXT_OPT("preset", preset, "NAME",
             PRESETS "; or two, as in gpt2,modern; other options take precedence"),
    TEXT_OPT("config", config, "FILE", "options from a config.json; other options take precedence"),
    TEXT_OPT("out", out, "DIR",
             "folder for checkpoints, config.json, metrics.jsonl and report.html"),
    FLAG_OPT("report", report, "write report.html again from metrics.jsonl, and exit"),
    FLAG_OPT("overwrite", overwrite, "start a new run in a folder that holds a checkpoint"),
    FLAG_OPT("resume", resume,
             "continue the run in --out; with decay-steps=auto a larger --steps lengthens the schedule"),
    {"from", TEXT, AT(from), "last", 0, 15, "last|best|N",
     "the checkpoint that --resume loads; N: that of step N, which --keep kept"},
    TEXT_OPT("init", init, "FILE",
             "begin with these weights, also GPT-2's; their config.json must be in the same folder"),
    TEXT_OPT("export", export_to, "DIR",
             "at the end write the weights in GPT-2's layout, for transformers; FILE.gguf: for llama.cpp"),
    CHOICE_OPT("export-type", export_type, "f16", "f32|f16|bf16|q8_0", "type of the matrices in a FILE.gguf"),
    FLAG_OPT("eval-only", eval_only, "validate and sample, without training"),
    CHOICE_OPT("compare", compare, "no", "no|fp32|fp16|bf16",
               "do not train: print how far the result of each site (an operator of one layer) is from the result "
               "in this dtype"),
    {"device", TEXT, AT(device), "auto", 0, 15, "auto|cpu|cuda[:N]",
     "device to train on; auto = a GPU if there is one"},
    TEXT_OPT("isa", isa, "NAME|list",
             "the CPU's instruction set: avx2, avx512, amx and others (default: the fastest). With amx and amx_f16, "
             "products of fp16 and bf16 differ from those of the other sets; list: print this machine's sets"),
    {"ranks", TEXT, AT(ranks), "", 0, 15, "fork:N|tcp|mpi|nccl",
     "train with many processes, each with its own --batch; rank 0 prints"},
    CHOICE_OPT("shard", shard, "off", "off|states|sums",
               "states: each rank keeps a part of the optimizer's states; sums: also a part of the summed "
               "gradients"),
    REAL_OPT("rank-seconds", rank_seconds, "600", 1, 1e6,
             "seconds that ranks wait for a rank that does not answer, before they end"),
    REAL_OPT("peak-tflops", peak_tflops, "auto", 1e-6, 1e6,
             "peak of each rank's device in --dtype: the log then has the share that the model uses (MFU); "
             "auto = unknown"),
    FLAG_OPT("graph", graph, "on a GPU: record a step as a graph, and replay it in steps without a log line"),
    WHOLE_OPT("threads", threads, "0", 0, 4096, "CPU threads; 0 = OMP_NUM_THREADS, or all cores"),
    FLAG_OPT("profile", profile, "at the end, print where the time and memory of a step went"),
    TEXT_OPT("trail", trail, "FILE",
             "write hashes of what each step computes; build/trail compares two such files, and names the first "
             "operator in which two runs differ"),
    FLAG_OPT("quiet", quiet, "print only the result and the sample"),

    GROUP("Sampling"),
    WHOLE_OPT("sample", sample, "0", 0, 1e9, "tokens to sample at the end"),
    TEXT_OPT("prompt", prompt, "TEXT", "beginning of the sample; for a FILE.bin without --tokenizer, numbers of tokens"),
    REAL_OPT("temperature", temperature, "0.8", 0, 100, "temperature of sampling; 0 = always the likeliest token"),
    WHOLE_OPT("top-k", top_k, "0", 0, TOKENS_MOST, "sample among the k likeliest tokens; 0 = among all"),
    REAL_OPT("top-p", top_p, "1", 1e-6, 1,
             "sample among the likeliest tokens that together have this probability; 1 = among all"),

    GROUP("Help"),
    FLAG_OPT("help", help, "print this text (also -h)"),
    FLAG_OPT("version", version, "print the version"),
};
enum { N_OPTIONS = (int)(sizeof options / sizeof options[0]) };

static const char *const presets[][2] = {
    /* Modern architecture for any size; combine it with a size, as in gpt2,modern. */
    {"modern", "bias=off activation=relu2 norm=rms positions=rope qk-norm=on head=own "
               "zero-init=on optimizer=muon"},
    {"char-cpu", "block=64 batch=12 layers=4 heads=4 width=128 dropout=0 steps=2000 lr=1e-3 "
                 "min-lr=1e-4 warmup=100 decay-steps=2000 schedule=cosine beta2=0.99 "
                 "eval-every=250 eval-batches=20"},
    {"char-gpu", "block=256 batch=64 layers=6 heads=6 width=384 dropout=0.2 steps=5000 lr=1e-3 "
                 "min-lr=1e-4 warmup=100 decay-steps=5000 schedule=cosine beta2=0.99 "
                 "eval-every=250 eval-batches=200"},
    /* GPT-2 124M, half a million tokens per step; the 50257 tokens are padded for the GPU. */
    {"gpt2", "vocab=50304 block=1024 batch=64 accumulate=8 layers=12 heads=12 width=768 bias=on "
             "dropout=0 steps=600000 lr=6e-4 min-lr=6e-5 warmup=2000 decay-steps=600000 "
             "schedule=cosine beta2=0.95 eval-every=1000 eval-batches=20"},
};

/* The names of our options in other trainers, for example nanoGPT. */
static const char *const other_names[][2] = {
    {"save", "out"}, {"output", "out"}, {"out-dir", "out"}, {"dataset", "data"},
    {"max-iters", "steps"}, {"learning-rate", "lr"}, {"batch-size", "batch"},
    {"block-size", "block"}, {"n-layer", "layers"}, {"n-head", "heads"}, {"n-embd", "width"},
    {"grad-clip", "clip"}, {"gradient-accumulation-steps", "accumulate"},
    {"eval-interval", "eval-every"}, {"eval-iters", "eval-batches"}, {"log-interval", "log-every"},
    {"init-from", "init"}, {"load", "init"}, {"finetune", "init"}, {"eval", "eval-only"},
    {"start", "prompt"}, {"max-new-tokens", "sample"}, {"device-batch-size", "batch"},
    {"decay-lr", "schedule"}, {"lr-decay-iters", "decay-steps"}, {"warmup-iters", "warmup"},
    {"epochs", "steps"}, {"max-steps", "steps"}, {"num-layers", "layers"}, {"num-heads", "heads"},
    {"seq-len", "block"}, {"val-every", "eval-every"},
};
enum { N_OTHER_NAMES = (int)(sizeof other_names / sizeof other_names[0]) };

/* Options of other trainers that have no counterpart here, and what to do. */
static const char *const option_hints[][2] = {
    {"compile", "The kernels are compiled already: leave out --compile"},
    {"num-samples", "--sample N writes one sample of N tokens. Another --seed draws another: run the program again"},
    {"depth", "Give --layers N, and --width and --heads with it"},
    {"always-save-checkpoint", "Each validation saves checkpoint.safetensors, and the best so far as "
                               "best.safetensors; --keep N keeps the last N. Leave it out"},
};
enum { N_HINTS = (int)(sizeof option_hints / sizeof option_hints[0]) };

#include "command_line.h"

static void print_help(void) {
    measure_terminal();
    printf("trainer - trains a GPT on a text, or on tokens, in fp32, fp16 or bf16\n\n"
           "Usage: trainer [--option value | --option=value]...\n"
           "In brackets: the default and the range. In names, _ and - are the same.\n");
    for (int i = 0; i < N_OPTIONS; i++) print_option(&options[i]);
    printf("\nExamples\n"
           "  trainer                                 a short training on mixprec.h\n"
           "  trainer --data input.txt --preset char-cpu --out run --sample 500\n"
           "  trainer --out run --resume              continue after Ctrl-C\n"
           "  trainer --out run --resume --steps 0 --sample 500 --prompt \"ROMEO:\"\n"
           "                                          sample only, without the text\n"
           "  trainer --init run/best.safetensors --data other.txt --out tuned --lr 1e-4\n"
           "                                          fine-tune on another text\n"
           "  trainer --out run --resume --compare fp32     fp16's error, by site\n"
           "  trainer --dtype bf16 --level 2 --lr 3e-4 --steps 1000\n"
           "  trainer --preset gpt2 --data train.bin --val-data val.bin --dtype bf16\n\n"
           "Ctrl-C finishes the step, saves, and exits with 130. A second Ctrl-C exits at\nonce.\n");
}

static void apply_preset(config *c, const char *name, size_t length) {
    char        word[64];
    const char *p = NULL;
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++)
        if (strlen(presets[i][0]) == length && strncmp(presets[i][0], name, length) == 0)
            p = presets[i][1];
    if (!p) die(2, "--preset: \"%.*s\" is not one of " PRESETS, (int)length, name);
    while (*p) {
        size_t n = strcspn(p, " "), key;
        snprintf(word, sizeof word, "%.*s", (int)n, p);
        key = strcspn(word, "=");
        set_option(c, &options[find_option(word, key)], word + key + 1);
        p += n + (p[n] == ' ');
    }
}

/* One preset, or several separated by commas; later presets override earlier ones. */
static void apply_presets(config *c, const char *names) {
    for (const char *p = names; *p;) {
        size_t n = strcspn(p, ",");
        apply_preset(c, p, n);
        p += n + (p[n] == ',');
    }
}

static int64_t decay_steps(const config *c) {
    return c->decay_steps != AUTO ? c->decay_steps : c->steps > 0 ? c->steps : 1;
}

static int64_t warmup_steps(const config *c) {
    int64_t twentieth = decay_steps(c) / 20;
    return c->warmup != AUTO ? c->warmup : twentieth < 100 ? twentieth : 100;
}

/* The guard's sampling interval in steps; 0 = off, AUTO = the default. */
static int64_t guard_every(const config *c) {
    const char *text = c->guard;
    char       *end = NULL;
    long        every = strtol(text, &end, 10);
    if (strcmp(text, "off") == 0 || strcmp(text, "0") == 0) return 0;
    if (strcmp(text, "auto") == 0)
        return c->dtype == DTYPE_FP16 && c->level > 0 && !c->ordered ? AUTO : 0;
    if (strcmp(text, "on") == 0) return AUTO;
    if (end == text || *end || every < 1 || every > 1 << 20)
        die(2, "--guard: \"%s\" is not one of on|off|auto or a number of steps from 0 to 1048576, where 0 is "
               "off", text);
    return every;
}

static int is_gguf(const char *path) {
    size_t n = strlen(path);
    return n > 5 && strcmp(path + n - 5, ".gguf") == 0;
}

/* Rejects a model with parts that GPT-2 lacks: it cannot be exported as GPT-2. */
static void check_export(const config *c) {
    if (!c->export_to[0]) return;
    if (c->norm == NORM_RMS || c->positions == POSITIONS_ROPE || c->qk_norm ||
        c->activation == ACTIVATION_RELU2)
        die(2, "--export writes GPT-2's, which has layer norms, learned positions and GELU: "
               "this model is another");
    if (is_gguf(c->export_to) && c->activation != ACTIVATION_GELU_TANH)
        die(2, "--export FILE.gguf: llama.cpp's GPT-2 has --activation gelu-tanh only");
    if (is_gguf(c->export_to) && !c->tokenizer[0])
        die(2, "--export FILE.gguf needs --tokenizer: the file holds the tokenizer too");
}

/* The file that --from names: "checkpoint.safetensors", "best.safetensors" or
 * "step-000000100.safetensors". */
static const char *checkpoint_name(const config *c) {
    static char name[40];
    long long   step = 0;
    int         end = 0;
    if (strcmp(c->from, "last") == 0) return CHECKPOINT;
    if (strcmp(c->from, "best") == 0) return BEST;
    if (sscanf(c->from, "%12lld%n", &step, &end) != 1 || c->from[end] || step < 0)
        die(2, "--from: \"%s\" is not one of last|best or the number of a step", c->from);
    snprintf(name, sizeof name, KEPT, step);
    return name;
}

/* --total-batch sets the number of batches per step of each rank. */
static void settle_total_batch(config *c, int64_t ranks) {
    int64_t each = c->batch * ranks, n = c->total_batch / each;
    if (c->total_batch == AUTO) return;
    if (n * each != c->total_batch || n < 1 || n > 65536)
        die(2, "--total-batch %lld is not 1 to 65536 times the %lld sequences of --batch %lld on %lld "
               "rank%s: change one of them", (long long)c->total_batch, (long long)each,
            (long long)c->batch, (long long)ranks, ranks == 1 ? "" : "s");
    if (c->accumulate != 1 && c->accumulate != n && !c->resume)
        die(2, "--total-batch %lld takes --accumulate %lld here, not %lld: leave out --accumulate",
            (long long)c->total_batch, (long long)n, (long long)c->accumulate);
    c->accumulate = n;
}

/* Rejects options that make the bits depend on the number of ranks. */
static void check_ordered(const config *c) {
    if (!c->ordered) return;
    if (c->total_batch == AUTO)
        die(2, "--ordered needs a batch that does not depend on ranks: add --total-batch N");
    if (guard_every(c))
        die(2, "--ordered and --guard %s exclude each other: ranks look at other batches than one "
               "rank does. Leave one out", c->guard);
    if (c->shard > 1)
        die(2, "--ordered and --shard sums exclude each other: ranks would clip to the norm of "
               "their parts. Use --shard states");
    if (c->sample_every)
        die(2, "--ordered and --sample-every exclude each other: a sample changes what dropout "
               "draws next. Use --sample");
    if (c->graph || strcmp(c->ranks, "nccl") == 0)
        die(2, "--ordered is for --ranks fork:N, tcp or mpi, without --graph: change one of them");
}

/* Ranks divide a validation: each takes the same number of batches. */
static void check_ordered_ranks(const config *c, int64_t ranks) {
    if (c->ordered && c->eval_batches % ranks)
        die(2, "--ordered: %lld ranks cannot divide --eval-batches %lld: change one of them",
            (long long)ranks, (long long)c->eval_batches);
}

/* Checks the options of a recipe. */
static void check_recipe(const config *c) {
    if ((c->recipe || c->recipe_of[0]) && (c->dtype != DTYPE_BF16 || c->level == 0))
        die(2, "--recipe needs bf16, which represents all its numbers: add --dtype bf16, and no --level 0, "
               "or leave out --recipe");
    if (c->recipe_of[0]) return;            /* its names are checked where they are read */
    if (c->without && c->recipe != MIXP_RECIPE_NVFP4)
        die(2, "--recipe-without leaves out a part of nvfp4: add --recipe nvfp4, or leave out --recipe-without");
    if (c->over6 && c->recipe != MIXP_RECIPE_NVFP4)
        die(2, "--over6 is for blocks of nvfp4: add --recipe nvfp4, or leave out --over6");
    if (c->over6 > 1 && c->without != 2 && c->without != 4)
        die(2, "--over6 x and both need inputs without the Hadamard transform: add --recipe-without hadamard");
    if (c->row_scaled && c->recipe != MIXP_RECIPE_NVFP4)
        die(2, "--row-scaled is for inputs in nvfp4: add --recipe nvfp4, or leave out --row-scaled");
    if (c->row_scaled && c->without != 2 && c->without != 4)
        die(2, "--row-scaled needs inputs without the Hadamard transform: add --recipe-without hadamard");
    if (c->row_scaled && c->over6 > 1)
        die(2, "--row-scaled and --over6 %s do not go together: use --over6 w", c->over6 == 2 ? "x" : "both");
    if (c->e8m0 && c->recipe != MIXP_RECIPE_MXFP8)
        die(2, "--e8m0 rounds the scales of mxfp8: add --recipe mxfp8, or leave out --e8m0");
    if (c->codes && !c->recipe)
        die(2, "--codes keeps the codes of a recipe: add --recipe, or leave out --codes");
    if (c->narrow && !c->recipe)
        die(2, "--narrow-products multiplies the codes of a recipe: add --recipe, or leave out --narrow-products");
}

/* Checks combinations of options. */
static void check_options(const config *c) {
    if (c->width % c->heads != 0)
        die(2, "--width %lld is not divisible by --heads %lld: change one of them",
            (long long)c->width, (long long)c->heads);
    if (c->resume && !c->out[0]) die(2, "--resume needs the folder of the run: --out DIR");
    if (c->resume && c->overwrite) die(2, "--resume and --overwrite exclude each other");
    if (c->report && !c->out[0]) die(2, "--report needs the folder of the run: --out DIR");
    if (c->resume && c->init[0])
        die(2, "--init begins a run, --resume continues one: leave one of them out");
    if (strcmp(c->from, "last") != 0 && !c->resume)
        die(2, "--from %s is for --resume: add that, or leave out --from", c->from);
    checkpoint_name(c);
    guard_every(c);
    check_ordered(c);
    if (c->plant && (!c->bias || c->level == 3 || c->graph || c->norm == NORM_RMS ||
                     c->activation == ACTIVATION_RELU2))
        die(2, "--plant needs --bias on, --norm layer, a --activation of gelu, weights in f32 "
               "(--level 2 or less) and no --graph");
    if (c->positions == POSITIONS_ROPE && c->width / c->heads % 2 != 0)
        die(2, "--positions rope rotates pairs of numbers, so --width / --heads must be even, not %lld: change one of them",
            (long long)(c->width / c->heads));
    if (c->retry && c->graph)
        die(2, "--retry waits for the result of each step, and --graph does not wait: leave one "
               "out");
    check_export(c);
    if (c->graph && c->profile)
        die(2, "--profile times kernel by kernel, --graph runs them all at once: leave one out");
    if (c->graph && c->trail[0])
        die(2, "--trail reads the result of each operator, and --graph runs all of them at once: leave one out");
    if (c->no_master && (c->level != 3 || c->dtype == DTYPE_FP32))
        die(2, "--no-master is for weights stored low: add --level 3 with --dtype fp16 or bf16, or "
               "leave out --no-master");
    check_recipe(c);
    if (c->masters && (c->level != 3 || c->dtype != DTYPE_BF16 || c->no_master))
        die(2, "--masters makes the master copies of bf16 weights smaller: add --level 3 --dtype bf16, "
               "without --no-master, or leave out --masters");
    if (c->min_lr > c->lr)
        die(2, "--min-lr %g is above --lr %g: lower it, or leave out --min-lr", c->min_lr, c->lr);
    if (c->schedule != MIXP_SCHEDULE_CONSTANT && warmup_steps(c) > decay_steps(c))
        die(2, "--warmup %lld is longer than the %lld steps of the schedule: lower it, or raise "
               "--decay-steps", (long long)c->warmup, (long long)decay_steps(c));
}

/* Warns of an option that has no effect because of another option. */
static void tell_idle(const config *c, const char *name, int is_idle, const char *why) {
    const option *o = &options[find_option(name, strlen(name))];
    char          text[2048];
    option_text(c, o, text, sizeof text);
    if (is_idle && strcmp(text, o->initial) != 0)
        warn("--%s %s does nothing here: %s", name, o->kind == FLAG ? "" : text, why);
}

static void tell_idle_options(const config *c) {
    int samples = c->sample > 0 || c->sample_every > 0;
    int is_constant = c->schedule == MIXP_SCHEDULE_CONSTANT, idle_scale = c->rule == MIXP_RULE_STATIC;
    if (c->rule == MIXP_RULE_COUNT) idle_scale = c->dtype != DTYPE_FP16;
    tell_idle(c, "muon-lr", c->optimizer != OPTIMIZER_MUON, "it is for --optimizer muon");
    tell_idle(c, "min-lr", is_constant, "with --schedule constant the learning rate does not fall");
    tell_idle(c, "decay-steps", is_constant,
              "with --schedule constant the learning rate does not fall");
    tell_idle(c, "growth-interval", idle_scale,
              "this --rule is static, or auto without fp16: the loss scale does not grow");
    tell_idle(c, "prompt", !samples, "nothing is sampled; add --sample N");
    tell_idle(c, "top-k", !samples, "nothing is sampled; add --sample N");
    tell_idle(c, "top-p", !samples, "nothing is sampled; add --sample N");
    tell_idle(c, "temperature", !samples, "nothing is sampled; add --sample N");
    tell_idle(c, "top-k", samples && c->temperature == 0, "--temperature 0 picks the likeliest token");
    tell_idle(c, "top-p", samples && c->temperature == 0, "--temperature 0 picks the likeliest token");
    tell_idle(c, "keep", !c->out[0], "nothing is saved; add --out DIR");
    tell_idle(c, "csv", !c->out[0], "nothing is logged; add --out DIR");
    tell_idle(c, "retry", c->eval_only || c->compare, "no step is trained");
    tell_idle(c, "shard", !c->ranks[0], "there is one rank; add --ranks");
    tell_idle(c, "rank-seconds", !c->ranks[0], "there is one rank; add --ranks");
}

/* can: 1 if the device has them. */
static void tell_idle_epilogues(const config *c, int can) {
    int sums = (c->epilogues & MIXP_EPILOGUES_BIAS) && c->bias;
    int gelu = (c->epilogues & MIXP_EPILOGUES_GELU) && c->activation == ACTIVATION_GELU_TANH &&
               !guard_every(c);
    tell_idle(c, "epilogues", !can, "they are a GPU's");
    tell_idle(c, "epilogues", can && !sums && !gelu,
              "sums want --bias on, and GELU --activation gelu-tanh and no guard (--guard off)");
}

#endif
