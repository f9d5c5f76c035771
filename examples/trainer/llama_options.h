/* llama_options.h - the command line: a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_LLAMA_OPTIONS_H
#define TRAINER_LLAMA_OPTIONS_H

#include "../gguf.h"
#include "option_kinds.h"

enum { DTYPE_FP32, DTYPE_FP16, DTYPE_BF16 };
enum { LOSS_AUTO, LOSS_WHOLE, LOSS_CHUNKS };
enum { GUARD_AUTO, GUARD_ON, GUARD_OFF };

typedef struct run_options {
    const char *model, *tokenizer, *data, *val_data, *chat, *targets, *adapter, *out, *gguf, *gguf_type, *gguf_adapter, *prompt;
    char    device[16], isa[16], ranks[16];
    int64_t steps, batch, block, accumulate, total_batch, warmup, lora, val_rows, eval_every, log_every, save_every;
    int64_t dtype, level, frozen, moments, masters, recompute, loss, guard, retry;
    int64_t merge, resume, overwrite, csv, quiet, graph, threads, shard, ordered, sample, top_k, seed, help, version;
    double  lr, decay, clip, alpha, temperature, top_p, rank_seconds;
} config;
static config opt;

static const option options[] = {
    GROUP("Data"),
    POINTER_OPT("tokenizer", tokenizer, NULL, "FILE", "a tokenizer.json (default: the model's)"),
    POINTER_OPT("data", data, NULL, "FILE",
                "a text; or FILE.jsonl: one chat a line, {\"messages\": [{\"role\": ..., \"content\": ...}]}"),
    POINTER_OPT("chat", chat, "auto", "NAME",
                "how a chat is written: chatml, llama3 or zephyr; auto: the tokenizer's special tokens decide"),
    WHOLE_OPT("block", block, "256", 2, 1 << 20, "largest number of tokens in a row"),
    POINTER_OPT("val-data", val_data, NULL, "FILE", "rows for validation, as --data has them"),
    WHOLE_OPT("val-rows", val_rows, "0", 0, 1e9, "without --val-data: rows of --data that are kept for validation"),

    GROUP("Training"),
    WHOLE_OPT("steps", steps, "100", 0, 1e9, "updates of the weights"),
    WHOLE_OPT("batch", batch, "2", 1, 4096, "rows in a batch: chats, or pieces of the text"),
    WHOLE_OPT("accumulate", accumulate, "1", 1, 4096, "batches of each rank in a step"),
    WHOLE_OPT("total-batch", total_batch, "auto", 1, 1e7, "rows in a step of all ranks; auto = batch x accumulate x ranks"),
    REAL_OPT("lr", lr, "1e-4", 0, 1, "learning rate; falls linearly to 0 after the warm-up"),
    WHOLE_OPT("warmup", warmup, "0", 0, 1e9, "steps in which the learning rate rises"),
    REAL_OPT("decay", decay, "0", 0, 1, "weight decay of matrices"),
    REAL_OPT("clip", clip, "1", 0, 1e9, "largest norm of the gradients; 0 = no clipping"),
    WHOLE_OPT("seed", seed, "1", 0, 1e15, "seed of samples, of the order of rows and of new adapters"),

    GROUP("Adapters (LoRA)"),
    WHOLE_OPT("lora", lora, "0", 0, 65536, "rank of new adapters; 0 = train all weights"),
    REAL_OPT("alpha", alpha, "auto", 0, 1e9, "adapters are multiplied by alpha / rank; auto = 16, or the value of --adapter"),
    POINTER_OPT("targets", targets, NULL, "PATTERN,...",
                "linear layers that get adapters; * and ? as in file names (default: q_proj,v_proj)"),
    POINTER_OPT("adapter", adapter, NULL, "FOLDER", "begin with the adapters saved there"),
    WHOLE_OPT("merge", merge, "0", 0, 1, "1: add the adapters to the weights before the weights are saved"),

    GROUP("Precision and memory"),
    CHOICE_OPT("dtype", dtype, "bf16", "fp32|fp16|bf16", "dtype of products and activations"),
    CHOICE_OPT("level", level, "1", "0|1|2|3",
               "what is stored in 16 bits: 0 nothing, 1 as in PyTorch, 2 all activations, 3 trained weights too"),
    CHOICE_OPT("moments", moments, "f32", "f32|bf16|8bit", "how AdamW's two moments are stored"),
    CHOICE_OPT("masters", masters, "f32", "f32|16bit|8bit",
               "with level 3 and bf16: how the master copy of a weight is stored"),
    CHOICE_OPT("frozen", frozen, "dtype", "dtype|q8_0",
               "with adapters, how the layers' matrices are stored: in --dtype, or in 8 bits as GGUF's Q8_0"),
    FLAG_OPT("recompute", recompute, "keep only each layer's input, and compute the layer again in backward: the same "
                                     "bits in less memory, for a second forward pass"),
    CHOICE_OPT("loss", loss, "auto", "auto|whole|chunks",
               "whole: all logits of a batch at once; chunks: some rows at a time; auto = chunks on a CPU, for many logits"),
    CHOICE_OPT("guard", guard, "auto", "auto|on|off", "an operator that overflows falls back to f32; auto = on for fp16"),
    WHOLE_OPT("retry", retry, "auto", 0, 1000,
              "how often a skipped step is repeated with the same rows; auto = 3 for fp16 on a CPU, else 0"),

    GROUP("Saving"),
    POINTER_OPT("out", out, NULL, "FOLDER",
                "save the model there; with --lora, only the adapters. Also checkpoints, the log and report.html"),
    WHOLE_OPT("save-every", save_every, "auto", 0, 1e9,
              "steps between checkpoints in --out; auto = a tenth of --steps, at least 50; 0 = only when stopped"),
    FLAG_OPT("resume", resume, "continue the run in --out, with the other options as they were"),
    FLAG_OPT("overwrite", overwrite, "begin a new run in a folder that holds a checkpoint"),
    POINTER_OPT("gguf", gguf, NULL, "FILE.gguf", "save the model there for llama.cpp, with its adapters and its tokenizer"),
    POINTER_OPT("gguf-adapter", gguf_adapter, NULL, "FILE.gguf", "save only the adapters there, for llama-server --lora"),
    POINTER_OPT("gguf-type", gguf_type, NULL, "f32|f16|bf16|q8_0", "type of the matrices in FILE.gguf (default: the model's)"),
    WHOLE_OPT("log-every", log_every, "auto", 1, 1e9, "steps between lines; auto = a twentieth of --steps"),
    WHOLE_OPT("eval-every", eval_every, "auto", 1, 1e9, "steps between validations; auto = a tenth of --steps"),
    CHOICE_OPT("csv", csv, "off", "off|on", "also write metrics.csv in --out"),

    GROUP("Running"),
    {"device", TEXT, AT(device), "cpu", 0, 15, "auto|cpu|cuda[:N]", "device to train on"},
    TEXT_OPT("isa", isa, "NAME", "the CPU's instruction set: avx2, avx512, amx and others (default: the fastest)"),
    WHOLE_OPT("threads", threads, "0", 0, 1024, "CPU threads; 0 = all cores"),
    FLAG_OPT("graph", graph, "on a GPU: record a step as a graph, and replay it in steps without a line; rows have "
                             "--block tokens"),
    {"ranks", TEXT, AT(ranks), "", 0, 15, "fork:N|tcp|mpi|nccl",
     "train with many processes, each with its own batches; rank 0 prints"},
    CHOICE_OPT("shard", shard, "off", "off|states|sums",
               "states: each rank keeps a part of the optimizer's states; sums: also of the summed gradients"),
    FLAG_OPT("ordered", ordered, "with --total-batch: the same bits for any number of ranks, without a guard"),
    REAL_OPT("rank-seconds", rank_seconds, "600", 1, 1e6, "seconds that ranks wait for a rank that does not answer"),
    FLAG_OPT("quiet", quiet, "print only results and samples"),

    GROUP("Sampling"),
    POINTER_OPT("prompt", prompt, "", "TEXT", "samples continue this text, or answer it in a chat"),
    WHOLE_OPT("sample", sample, "60", 0, 1e6, "tokens to sample before and after training"),
    REAL_OPT("temperature", temperature, "0.8", 0, 100, "temperature of samples; 0 = always the likeliest token"),
    WHOLE_OPT("top-k", top_k, "0", 0, 1 << 24, "sample among the k likeliest tokens; 0 = among all"),
    REAL_OPT("top-p", top_p, "1", 1e-6, 1, "sample among the likeliest tokens that together have this probability"),

    GROUP("Help"),
    FLAG_OPT("help", help, "print this text (also -h)"),
    FLAG_OPT("version", version, "print the version"),
};
enum { N_OPTIONS = (int)(sizeof options / sizeof options[0]) };

/* The names of our options in other programs. */
static const char *const other_names[][2] = {
    {"output-dir", "out"}, {"out-dir", "out"}, {"save", "out"}, {"dataset", "data"}, {"train-file", "data"},
    {"learning-rate", "lr"}, {"batch-size", "batch"}, {"per-device-train-batch-size", "batch"},
    {"gradient-accumulation-steps", "accumulate"}, {"gradient-checkpointing", "recompute"}, {"max-steps", "steps"},
    {"iters", "steps"}, {"epochs", "steps"}, {"num-train-epochs", "steps"}, {"max-seq-length", "block"},
    {"seq-len", "block"}, {"ctx", "block"}, {"lora-r", "lora"}, {"lora-rank", "lora"}, {"rank", "lora"},
    {"lora-alpha", "alpha"}, {"target-modules", "targets"}, {"resume-from-checkpoint", "resume"},
    {"save-steps", "save-every"}, {"eval-steps", "eval-every"}, {"logging-steps", "log-every"},
    {"max-grad-norm", "clip"}, {"weight-decay", "decay"}, {"warmup-steps", "warmup"}, {"max-new-tokens", "sample"},
    {"n-predict", "sample"}, {"temp", "temperature"}, {"outtype", "gguf-type"},
};
enum { N_OTHER_NAMES = (int)(sizeof other_names / sizeof other_names[0]) };

static const char *const option_hints[][2] = {
    {"model", "Name the model's folder or FILE.gguf without an option: llama MODEL"},
    {"bf16", "Give --dtype bf16"},
    {"fp16", "Give --dtype fp16"},
    {"load-in-8bit", "Frozen matrices in 8 bits: --frozen q8_0"},
    {"load-in-4bit", "Frozen matrices take 8 bits at least: --frozen q8_0"},
};
enum { N_HINTS = (int)(sizeof option_hints / sizeof option_hints[0]) };

#include "command_line.h"

static void print_help(void) {
    measure_terminal();
    printf("llama - fine-tunes a Llama-like model, samples from it, and saves it\n\n"
           "Usage: llama MODEL [--option value | --option=value]...\n"
           "MODEL is a folder of Hugging Face's files, or a FILE.gguf.\n"
           "In brackets: the default and the range. In names, _ and - are the same.\n");
    for (int i = 0; i < N_OPTIONS; i++) print_option(&options[i]);
    printf("\nCtrl-C finishes the step, saves, prints the command that continues the run, and exits\n"
           "with 130. A second Ctrl-C exits at once.\n");
}

static int is_lora(void) { return opt.lora > 0 || opt.adapter != NULL; }
static int is_training(void) { return opt.data != NULL && opt.steps > 0; }

static void check_options(void) {
    if (!opt.model) die(2, "name a model: llama MODEL [--option value]...; llama --help lists the options");
    if (opt.gguf_type && gguf_type_named(opt.gguf_type) < 0)
        die(2, "--gguf-type is %s: choose f32, f16, bf16 or q8_0", opt.gguf_type);
    if (opt.resume && (!opt.out || !is_training()))
        die(2, "--resume continues a run: add its --out FOLDER, its --data and --steps");
    if (opt.resume && opt.overwrite) die(2, "--resume and --overwrite exclude each other");
    if (opt.val_data && opt.val_rows) die(2, "--val-data and --val-rows exclude each other");
    if (opt.level == 3 && is_lora())
        die(2, "--level 3 stores trained weights in 16 bits, and adapters are small: use --level 2");
    if (opt.frozen && !is_lora())
        die(2, "--frozen q8_0 is for matrices that are not trained: add --lora or --adapter");
    if (opt.level == 3 && opt.dtype == DTYPE_FP32) die(2, "--level 3 needs --dtype bf16 or fp16");
    if (opt.masters && (opt.level != 3 || opt.dtype != DTYPE_BF16))
        die(2, "--masters makes the master copies of bf16 weights smaller: add --level 3 --dtype bf16, or leave out --masters");
    if (opt.graph && opt.retry > 0) die(2, "--retry waits for each step, and --graph does not: leave one out");
    if (opt.ordered && opt.total_batch == AUTO)
        die(2, "--ordered needs a batch that does not depend on ranks: add --total-batch N");
    if (opt.ordered && (opt.guard == GUARD_ON || opt.shard > 1 || opt.graph || strcmp(opt.ranks, "nccl") == 0))
        die(2, "--ordered is for --ranks fork:N, tcp or mpi, without --guard on, --shard sums and --graph");
}

/* --total-batch sets the number of batches per step of each rank. */
static void settle_total_batch(int64_t ranks) {
    int64_t each = opt.batch * ranks, n = opt.total_batch / each;
    if (opt.total_batch == AUTO) return;
    if (n * each != opt.total_batch || n < 1 || n > 4096)
        die(2, "--total-batch %lld is not 1 to 4096 times the %lld rows of --batch %lld on %lld rank%s: change one of "
               "them", (long long)opt.total_batch, (long long)each, (long long)opt.batch, (long long)ranks,
            ranks == 1 ? "" : "s");
    opt.accumulate = n;
}

static int64_t share_of_steps(int64_t chosen, int64_t parts) {
    int64_t every = opt.steps / parts;
    return chosen != AUTO ? chosen : every ? every : 1;
}

static void read_options(int argc, char **argv) {
    const char *given[N_OPTIONS] = {NULL}, *model = NULL;
    parse_command_line(argc, argv, given, &model);
    for (int i = 0; i < N_OPTIONS; i++)
        if (options[i].name) set_option(&opt, &options[i], given[i] ? given[i] : options[i].initial);
    if (opt.help) { print_help(); exit(fflush(stdout) != 0); }
    if (opt.version) { printf("llama %s\n", mixp_version()); exit(fflush(stdout) != 0); }
    opt.model = model;
    check_options();
    opt.log_every = share_of_steps(opt.log_every, 20);
    opt.eval_every = share_of_steps(opt.eval_every, 10);
    if (opt.save_every == AUTO) opt.save_every = opt.steps / 10 > 50 ? opt.steps / 10 : 50;
}

#endif
