/* llama_memory.c - how much memory a step of examples/llama.c takes at the shapes of released models, on a CPU and on
 * a GPU, by the device that only counts memory: no weight is read and nothing is computed.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     build/bench/llama_memory [BATCH [BLOCK]]      docs/llama.md has its table: BATCH 8, BLOCK 1024
 *
 * tests/cuda/cuda_programs.sh compares what llama plans with what it then takes on the simulated GPU.
 */
#define main llama_main
#include "../../examples/llama.c"
#undef main

static const struct shape {
    const char *name;
    int64_t     vocab, width, inner, layers, heads, kv, d;
    int         bias, scaled;
} shapes[] = {
    { "SmolLM2 135M", 49152, 576, 1536, 30, 9, 3, 64, 0, 0 },
    { "SmolLM2 360M", 49152, 960, 2560, 32, 15, 5, 64, 0, 0 },
    { "Qwen 2.5 0.5B", 151936, 896, 4864, 24, 14, 2, 64, 1, 0 },
    { "Llama 3.2 1B", 128256, 2048, 8192, 16, 32, 8, 64, 0, 1 },
    { "Llama 3.2 3B", 128256, 3072, 8192, 28, 24, 8, 128, 0, 1 },
};

static const struct way {
    const char *name, *options;
} ways[] = {
    { "full", "" },
    { "full, level 2", "--level 2" },
    { "full, recompute", "--level 2 --recompute" },
    { "full, 8-bit states", "--level 3 --masters 8bit --moments 8bit" },
    { "full, both", "--level 3 --masters 8bit --moments 8bit --recompute" },
    { "LoRA", "--lora 16" },
    { "LoRA, recompute", "--lora 16 --level 2 --recompute" },
    { "LoRA of all layers, recompute", "--lora 16 --targets *_proj --level 2 --recompute" },
    { "the same, --frozen q8_0", "--lora 16 --targets *_proj --level 2 --recompute --frozen q8_0" },
};

static void choose_shape(const struct shape *s) {
    memset(&cfg, 0, sizeof cfg);
    cfg.path = (char *)(uintptr_t)s->name;
    strcpy(cfg.kind, "llama");
    cfg.layers = s->layers, cfg.heads = s->heads, cfg.kv_heads = s->kv, cfg.head_dim = s->d;
    cfg.width = s->width, cfg.inner = s->inner, cfg.vocab = s->vocab, cfg.tied = 1;
    cfg.attention_bias = s->bias;
    cfg.positions = 131072, cfg.eps = 1e-5, cfg.theta = 500000, cfg.rope_scale = 1;
    cfg.rope_kind = s->scaled ? ROPE_LLAMA3 : ROPE_DEFAULT;
    cfg.rope_factor = 32, cfg.rope_context = 8192, cfg.rope_low = 1, cfg.rope_high = 4;
}

/* The bytes of a step of these options. */
static double bytes_of(const char *options_text, const char *batch, const char *length) {
    char  words[256], *argv[32];
    int   argc = 0;
    snprintf(words, sizeof words, "llama model --data x --batch %s --block %s %s", batch, length, options_text);
    for (char *p = strtok(words, " "); p; p = strtok(NULL, " ")) argv[argc++] = p;
    read_options(argc, argv);
    m.dtype = MIXP_BF16;
    return measure_step();
}

int main(int argc, char **argv) {
    const char *batch = argc > 1 ? argv[1] : "8", *length = argc > 2 ? argv[2] : "1024";
    printf("GB (1e9 bytes) of a step of %s rows of %s tokens in bf16: on a GPU / on a CPU\n\n| |", batch, length);
    for (size_t k = 0; k < sizeof ways / sizeof ways[0]; k++) printf(" %s |", ways[k].name);
    printf("\n|---|");
    for (size_t k = 0; k < sizeof ways / sizeof ways[0]; k++) printf("---|");
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        printf("\n| %s |", shapes[i].name);
        choose_shape(&shapes[i]);
        for (size_t k = 0; k < sizeof ways / sizeof ways[0]; k++) {
            m.on_gpu = 1;
            double on_gpu = bytes_of(ways[k].options, batch, length);
            m.on_gpu = 0;
            printf(" %.1f / %.1f |", on_gpu / 1e9, bytes_of(ways[k].options, batch, length) / 1e9);
        }
    }
    printf("\n");
    return 0;
}
