/* llama_options.h - the command line: a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_LLAMA_OPTIONS_H
#define TRAINER_LLAMA_OPTIONS_H

#include "../gguf.h"
#include "messages.h"

static struct options {
    const char *model, *tokenizer, *data, *chat, *dtype, *targets, *adapter, *out, *gguf, *gguf_type, *prompt, *isa;
    double      steps, batch, block, lr, decay, warmup, clip, lora, alpha, merge, sample, temperature, seed, threads;
} opt = { .chat = "auto", .dtype = "bf16", .prompt = "", .isa = "",
          .steps = 100, .batch = 2, .block = 256, .lr = 1e-4, .clip = 1, .alpha = -1, /* -1 and NULL: not given */ .sample = 60,
          .temperature = 0.8, .seed = 1 };

/* An option sets a text or a number in [low, high]. */
static const struct option {
    const char *name, **text;
    double     *number, low, high;
    const char *help;
} options[] = {
    { "tokenizer", &opt.tokenizer, NULL, 0, 0, "FILE: a tokenizer.json [the model's]" },
    { "data", &opt.data, NULL, 0, 0, "FILE: a text; or FILE.jsonl: one chat a line, {\"messages\": [{\"role\": ..., \"content\": ...}]}" },
    { "chat", &opt.chat, NULL, 0, 0, "chatml, llama3 or zephyr: how a chat is written [auto: the tokenizer's special tokens decide]" },
    { "dtype", &opt.dtype, NULL, 0, 0, "fp32, bf16 or fp16: dtype of products and activations [bf16]" },
    { "steps", NULL, &opt.steps, 0, 1e9, "updates of the weights [100]" },
    { "batch", NULL, &opt.batch, 1, 4096, "rows in a step: chats, or pieces of the text [2]" },
    { "block", NULL, &opt.block, 2, 1 << 20, "largest number of tokens in a row [256]" },
    { "lr", NULL, &opt.lr, 0, 1, "learning rate; falls linearly to 0 after the warm-up [1e-4]" },
    { "warmup", NULL, &opt.warmup, 0, 1e9, "steps in which the learning rate rises [0]" },
    { "decay", NULL, &opt.decay, 0, 1, "weight decay of matrices [0]" },
    { "clip", NULL, &opt.clip, 0, 1e9, "largest norm of the gradients; 0 = no clipping [1]" },
    { "lora", NULL, &opt.lora, 0, 65536, "rank of LoRA's adapters; 0 = train all weights [0]" },
    { "alpha", NULL, &opt.alpha, 0, 1e9, "LoRA's alpha: adapters are multiplied by alpha / rank [16]" },
    { "targets", &opt.targets, NULL, 0, 0, "PATTERN,...: linear layers that get adapters; * and ? as in file names [q_proj,v_proj]" },
    { "adapter", &opt.adapter, NULL, 0, 0, "FOLDER: begin with the adapters saved there" },
    { "merge", NULL, &opt.merge, 0, 1, "1: add the adapters to the weights before the weights are saved [0]" },
    { "out", &opt.out, NULL, 0, 0, "FOLDER: save the model there; with --lora, only the adapters" },
    { "gguf", &opt.gguf, NULL, 0, 0, "FILE.gguf: save the model there for llama.cpp, with its adapters and its tokenizer" },
    { "gguf-type", &opt.gguf_type, NULL, 0, 0, "f32, f16, bf16 or q8_0: type of the matrices in FILE.gguf [the model's]" },
    { "prompt", &opt.prompt, NULL, 0, 0, "TEXT: samples continue this text, or answer it in a chat" },
    { "sample", NULL, &opt.sample, 0, 1e6, "tokens to sample before and after training [60]" },
    { "temperature", NULL, &opt.temperature, 0, 100, "temperature of samples; 0 = always the likeliest token [0.8]" },
    { "seed", NULL, &opt.seed, 0, 1e15, "seed of samples, of the order of rows and of new adapters [1]" },
    { "isa", &opt.isa, NULL, 0, 0, "NAME: the CPU's instruction set: avx2, avx512, amx and others [the fastest]" },
    { "threads", NULL, &opt.threads, 0, 1024, "CPU threads; 0 = all cores [0]" },
};
enum { OPTIONS = sizeof options / sizeof options[0] };

static void help(void) {
    printf("llama - fine-tunes a Llama-like model, samples from it, and saves it\n\n"
           "Usage: llama MODEL [--OPTION VALUE]...\n"
           "MODEL is a folder of Hugging Face's files, or a FILE.gguf. In brackets: the default.\n\n");
    for (int i = 0; i < OPTIONS; i++) printf("  --%-12s %s\n", options[i].name, options[i].help);
    exit(0);
}

static void read_option(const char *name, const char *value) {
    const struct option *o = options;
    char  *end;
    while (o < options + OPTIONS && strcmp(o->name, name) != 0) o++;
    if (o == options + OPTIONS) die(2, "there is no option --%s: llama --help lists them", name);
    if (!value) die(2, "--%s needs a value: %s", name, o->help);
    if (o->text) { *o->text = value; return; }
    *o->number = strtod(value, &end);
    if (*end || end == value || !(*o->number >= o->low && *o->number <= o->high))
        die(2, "--%s is %s: give a number from %g to %g", name, value, o->low, o->high);
}

static void read_options(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) help();
        if (strncmp(argv[i], "--", 2) != 0) { opt.model = argv[i]; continue; }
        read_option(argv[i] + 2, i + 1 < argc ? argv[i + 1] : NULL);
        i++;
    }
    if (!opt.model) die(2, "name a model: llama MODEL [--OPTION VALUE]...; llama --help lists the options");
    if (strcmp(opt.dtype, "fp32") && strcmp(opt.dtype, "bf16") && strcmp(opt.dtype, "fp16"))
        die(2, "--dtype is %s: choose fp32, bf16 or fp16", opt.dtype);
    if (opt.gguf_type && gguf_type_named(opt.gguf_type) < 0) die(2, "--gguf-type is %s: choose f32, f16, bf16 or q8_0", opt.gguf_type);
}

#endif
