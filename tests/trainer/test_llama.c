/* test_llama.c - examples/llama.c and examples/gguf.h: numbers of transformers, peft and the gguf
 * package, recorded beside this file's reference; and files that are refused, by the name of the
 * file and of its field.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *   test_llama                                  the tests   test_llama --logits DIR N ID...
 * [ARG...]    prints the loss, then the logits of N tokens, for interop_llama.py   test_llama
 * --run ARGUMENT...                runs llama       test_llama --make FOLDER    writes a small model
 */
#define main llama_main
#include "../../examples/llama.c"
#undef main
#include <sys/wait.h>
#include "reference/generate.h"
#include "reference/gguf_file.h"
#include "reference/llama.h"
#include "reference/tokenizer.h"
#include "test.h"

enum { MOST_ENTRIES = 64, MOST_VALUES = 1 << 16 };
#define TOKENIZER "tests/reference/tokenizer.json"

/* ==== Programs of this file ========================================================= */

/* Prints the mean loss of the next tokens, then the logits of all tokens, in f32. */
static int print_logits(int argc, char **argv) {
    char         numbers[2][8] = { "--dtype", "fp32" };
    char        *args[64] = { argv[0], argv[2], numbers[0], numbers[1] };
    int32_t      ids[256], y[256];
    int          n = atoi(argv[3]), more = argc - 4 - n;
    mixp_tensor *loss, *logits = NULL, *scaled;
    float       *values;
    for (int i = 0; i < n; i++) ids[i] = (int32_t)atoi(argv[4 + i]);
    for (int i = 0; i < n; i++) y[i] = i + 1 < n ? ids[i + 1] : MIXP_IGNORE;
    memcpy(args + 4, argv + 4 + n, (size_t)more * sizeof *args);
    begin(4 + more, args);
    make_optimizer();
    mixp_step_begin(m.ctx);
    loss = loss_of(ids, y, 1, n, 1, &scaled);
    printf("%.9g\n", mixp_item(loss));
    mixp_eval_begin(m.ctx);
    MIXP_NO_GRAD(m.ctx) logits = mixp_linear(m.ctx, hidden(ids, 1, n), m.head, NULL);
    check("computing logits");
    values = (float *)malloc((size_t)logits->count * sizeof *values);
    mixp_read(logits, values, MIXP_F32, logits->count);
    for (int64_t i = 0; i < logits->count; i++) printf("%.9g\n", (double)values[i]);
    free(values);
    return 0;
}

/* Prints the rows of --data: x and y of each. */
static int print_rows(int argc, char **argv) {
    char  quiet[] = "--quiet", *args[64];
    memcpy(args, argv, (size_t)argc * sizeof *args);
    args[argc] = quiet;
    begin(argc + 1, args);
    for (int64_t i = 0; i < data.n; i++)
        for (int64_t k = 0; k < data.rows[i].n; k++)
            printf("%d %d\n", data.rows[i].x[k], data.rows[i].y[k]);
    return 0;
}

/* Prints how many logits of a sample with its cache differ from those of all tokens at once. */
static int print_cache(int argc, char **argv) {
    static float cached[LLAMA_VOCAB], whole[LLAMA_LENGTH * LLAMA_VOCAB];
    int32_t      ids[LLAMA_LENGTH];
    uint32_t     state = gen_start(8);
    int          differ = 0;
    gen_ints(&state, LLAMA_VOCAB, ids, LLAMA_LENGTH);
    begin(argc, argv);
    kv_cache cache = open_cache(LLAMA_LENGTH);
    for (int n = 3; n <= LLAMA_LENGTH; n += 1 + n % 3) {
        mixp_tensor *y = NULL;
        m.cache = &cache;
        next_logits(ids, n, cached);
        m.cache = NULL;
        mixp_eval_begin(m.ctx);
        MIXP_NO_GRAD(m.ctx)
        MIXP_AUTOCAST(m.ctx, m.dtype) y = mixp_linear(m.ctx, hidden(ids, 1, n), m.head, NULL);
        mixp_read(y, whole, MIXP_F32, y->count);
        for (int i = 0; i < LLAMA_VOCAB; i++)
            differ += cached[i] != whole[(n - 1) * LLAMA_VOCAB + i];
    }
    close_cache(&cache);
    printf("%d\n", differ);
    return 0;
}

/* ==== Running them apart ============================================================ */

static char   folder[64];
static double printed[1 << 14];
static int    n_printed; /* of a program's numbers; of a run of llama, the losses of its lines and what rounding lost */
static char   said[4096];

static const char *in_folder_of_test(const char *name) {
    static char paths[4][160];
    static int  turn_of;
    char       *path = paths[turn_of++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void read_text_of(const char *path, char *text, size_t space) {
    FILE  *f = fopen(path, "r");
    size_t n = f ? fread(text, 1, space - 1, f) : 0;
    text[n] = '\0';
    if (f) fclose(f);
}

/* Runs a program with the words of a line, "@" for the folder, in a process of its own. Returns
 * its status; its numbers are in `printed`, what it wrote to stderr in `said`. */
static int run_apart(int (*program)(int argc, char **argv), const char *line) {
    static char words[2048], text[1 << 18];
    char       *argv[96];
    int         argc = 0, status = -1;
    char       *to = words;
    for (const char *p = line; *p; p++)
        to += snprintf(to, (size_t)(words + sizeof words - to), *p == '@' ? "%s" : "%.1s",
                       *p == '@' ? folder : p);
    for (char *p = strtok(words, " "); p; p = strtok(NULL, " ")) argv[argc++] = p;
    argv[argc] = NULL;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen(in_folder_of_test("said"), "w", stderr) ||
            !freopen(in_folder_of_test("printed"), "w", stdout))
            _exit(99);
        exit(program(argc, argv));
    }
    waitpid(child, &status, 0);
    read_text_of(in_folder_of_test("said"), said, sizeof said);
    read_text_of(in_folder_of_test("printed"), text, sizeof text);
    n_printed = 0;
    for (char *p = strtok(text, " \n"), *before = p; p && n_printed < 1 << 14;
         before = p, p = strtok(NULL, " \n")) {
        char  *end;
        double number = strtod(p, &end);
        if (!*end && (program != llama_main || strcmp(before, "loss") == 0 || strcmp(before, "lost") == 0))
            printed[n_printed++] = number;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* The message must have both parts: the file or option, and what is wrong with it. */
static void expect_refusal(const char *line, int status, const char *file, const char *what) {
    int got = run_apart(llama_main, line);
    if (got != status || !strstr(said, file) || !strstr(said, what))
        TEST_SHOW("\"%s\": %d, \"%s\"", line, got, said);
    CHECK_INT(got, status);
    CHECK_TEXT(said, file);
    CHECK_TEXT(said, what);
}

/* ==== Files of a model ============================================================== */

static struct made {
    mixp_st_entry e[MOST_ENTRIES];
    char          names[MOST_ENTRIES][96];
    float         values[MOST_VALUES];
    uint16_t      low[MOST_VALUES];
    int64_t       n, used;
    uint32_t      numbers;
} made;

static void put(const char *name, int64_t rows, int64_t cols, float over) {
    mixp_st_entry *e = &made.e[made.n];
    int64_t        count = rows * (cols ? cols : 1);
    float         *values = made.values + made.used;
    snprintf(made.names[made.n], sizeof made.names[0], "%s", name);
    memset(e, 0, sizeof *e);
    e->name = made.names[made.n++];
    e->dtype = MIXP_F32;
    e->rank = cols ? 2 : 1;
    e->shape[0] = rows;
    e->shape[1] = cols;
    e->data = values;
    e->bytes = (size_t)count * sizeof *values;
    gen_short(&made.numbers, values, (int)count);
    for (int64_t i = 0; i < count; i++) values[i] /= over;
    made.used += count;
}

static void put_linear(int i, const char *part, int64_t rows, int64_t cols, int bias) {
    char name[96];
    snprintf(name, sizeof name, "model.layers.%d.%s.weight", i, part);
    put(name, rows, cols, 2);
    snprintf(name, sizeof name, "model.layers.%d.%s.bias", i, part);
    if (bias) put(name, rows, 0, 2);
}

/* The cases of reference/record_llama.py. */
static const struct llama_case {
    const char   *name, *more;
    const double *recorded;
    int64_t       kv_heads, head_dim;
    int           tied, bias;
} llama_cases[] = {
    { "tied", "", llama_tied, 2, 8, 1, 0 },
    { "biases", ", \"attention_bias\": true, \"mlp_bias\": true", llama_biases, 4, 8, 0, 1 },
    { "llama3",
      ", \"head_dim\": 12, \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 4, \"low_freq_factor\": 1.0,"
      " \"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 32}, \"rope_theta\": 5e3",
      llama_llama3, 1, 12, 0, 0 },
    { "linear", ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 3.0}", llama_linear, 2, 8,
      1, 0 },
    { "dynamic",
      ", \"rope_parameters\": {\"rope_type\": \"dynamic\", \"factor\": 2.0, \"rope_theta\": 10000.0}",
      llama_dynamic, 2, 8, 1, 0 },
    { "yarn",
      ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0, \"original_max_position_embeddings\": 16}",
      llama_yarn, 2, 8, 1, 0 },
};
enum { LLAMA_CASES = sizeof llama_cases / sizeof llama_cases[0] };

static void make_weights(const struct llama_case *c) {
    int64_t q = LLAMA_HEADS * c->head_dim, kv = c->kv_heads * c->head_dim, w = LLAMA_WIDTH,
            in = LLAMA_INNER;
    char name[96];
    made.n = made.used = 0;
    made.numbers = gen_start(7);
    put("model.embed_tokens.weight", LLAMA_VOCAB, w, 2);
    for (int i = 0; i < LLAMA_LAYERS; i++) {
        snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", i);
        put(name, w, 0, 2);
        snprintf(name, sizeof name, "model.layers.%d.post_attention_layernorm.weight", i);
        put(name, w, 0, 2);
        put_linear(i, "self_attn.q_proj", q, w, c->bias);
        put_linear(i, "self_attn.k_proj", kv, w, c->bias);
        put_linear(i, "self_attn.v_proj", kv, w, c->bias);
        put_linear(i, "self_attn.o_proj", w, q, c->bias);
        put_linear(i, "mlp.gate_proj", in, w, c->bias);
        put_linear(i, "mlp.up_proj", in, w, c->bias);
        put_linear(i, "mlp.down_proj", w, in, c->bias);
    }
    put("model.norm.weight", w, 0, 2);
    if (!c->tied) put("lm_head.weight", LLAMA_VOCAB, w, 2);
}

static void write_text_of(const char *name, const char *text) {
    FILE *f = fopen(in_folder_of_test(name), "w");
    CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

/* config.json; more: behind the keys that are always there, of which the later of two counts. */
static void write_config_of(const struct llama_case *c, const char *more) {
    char text[2048];
    snprintf(
        text, sizeof text,
        "{\"model_type\": \"llama\", \"hidden_size\": %d, \"intermediate_size\": %d, \"num_hidden_layers\": %d,"
        " \"num_attention_heads\": %d, \"num_key_value_heads\": %lld, \"vocab_size\": %d, \"max_position_embeddings\": %d,"
        " \"rms_norm_eps\": 1e-5, \"hidden_act\": \"silu\", \"tie_word_embeddings\": %s%s%s}\n",
        LLAMA_WIDTH, LLAMA_INNER, LLAMA_LAYERS, LLAMA_HEADS, (long long)c->kv_heads, LLAMA_VOCAB,
        LLAMA_POSITIONS, c->tied ? "true" : "false", c->more, more);
    write_text_of("config.json", text);
}

static void write_entries(const char *file, int64_t first, int64_t n) {
    static const char *const pairs[][2] = { { "format", "pt" } };
    char                     error[MIXP_MESSAGE_SIZE] = "";
    CHECK_INT(mixp_safetensors_write(in_folder_of_test(file), made.e + first, n, pairs, 1, error,
                                     sizeof error),
              MIXP_OK);
}

static void write_model(const struct llama_case *c) {
    make_weights(c);
    write_config_of(c, "");
    write_entries("model.safetensors", 0, made.n);
    CHECK(copy_file(TOKENIZER, in_folder_of_test("tokenizer.json")));
}

static void in_dtype(mixp_dtype dtype) {
    for (int64_t i = 0, at = 0; i < made.n; i++) {
        int64_t count = (int64_t)(made.e[i].bytes / 4);
        CHECK_INT(mixp_convert(made.low + at, dtype, made.e[i].data, MIXP_F32, count), MIXP_OK);
        made.e[i].data = made.low + at;
        made.e[i].dtype = dtype;
        made.e[i].bytes = (size_t)count * 2;
        at += count;
    }
}

/* Logits and loss are those of transformers, within 1e-5 of the largest logit. model: a folder or
 * a file. */
static void expect_logits(const struct llama_case *c, const char *model, const char *more) {
    char     line[1024];
    int32_t  ids[LLAMA_LENGTH];
    uint32_t state = gen_start(8);
    double   most = 0;
    gen_ints(&state, LLAMA_VOCAB, ids, LLAMA_LENGTH);
    int n = snprintf(line, sizeof line, "test --logits %s %d", model, LLAMA_LENGTH);
    for (int i = 0; i < LLAMA_LENGTH; i++)
        n += snprintf(line + n, sizeof line - (size_t)n, " %d", ids[i]);
    snprintf(line + n, sizeof line - (size_t)n, " %s", more);
    CHECK_INT(run_apart(print_logits, line), 0);
    CHECK_INT(n_printed, 1 + LLAMA_LENGTH * LLAMA_VOCAB);
    if (said[0]) TEST_SHOW("%s: %s", c->name, said);
    if (n_printed != 1 + LLAMA_LENGTH * LLAMA_VOCAB) return;
    for (int i = 1; i < n_printed; i++) most = fmax(most, fabs(printed[i]));
    CHECK_NEAR(printed[0] / c->recorded[0], 1, 1e-5);
    for (int t = 0; t < LLAMA_LENGTH; t++)
        for (int k = 0; k < 2; k++)
            CHECK_NEAR(printed[1 + t * LLAMA_VOCAB + (37 * t + 101 * k) % LLAMA_VOCAB],
                       c->recorded[1 + 2 * t + k], 1e-5 * most);
}

/* ==== Numbers ======================================================================= */

static void logits_are_those_of_transformers(void) {
    for (int i = 0; i < LLAMA_CASES; i++) {
        write_model(&llama_cases[i]);
        expect_logits(&llama_cases[i], "@", "");
    }
    for (int i = 0; i < 2; i++) { /* the weights are exact in each dtype */
        write_model(&llama_cases[i]);
        in_dtype(i ? MIXP_F16 : MIXP_BF16);
        write_entries("model.safetensors", 0, made.n);
        expect_logits(&llama_cases[i], "@", "");
    }
}

/* Adapters of the generator, in peft's names and in its order. */
static void write_adapters(const char *settings) {
    static const struct {
        const char *part;
        int64_t     rows, cols;
    } parts[2] = { { "self_attn.q_proj", LLAMA_WIDTH, LLAMA_WIDTH },
                   { "mlp.down_proj", LLAMA_WIDTH, LLAMA_INNER } };
    char name[96], text[256];
    made.n = made.used = 0;
    made.numbers = gen_start(9);
    for (int i = 0; i < LLAMA_LAYERS; i++)
        for (int k = 0; k < 2; k++) {
            snprintf(name, sizeof name, "base_model.model.model.layers.%d.%s.lora_A.weight", i,
                     parts[k].part);
            put(name, LLAMA_RANK, parts[k].cols, 8);
            snprintf(name, sizeof name, "base_model.model.model.layers.%d.%s.lora_B.weight", i,
                     parts[k].part);
            put(name, parts[k].rows, LLAMA_RANK, 8);
        }
    write_entries("adapter_model.safetensors", 0, made.n);
    snprintf(text, sizeof text,
             "{\"peft_type\": \"LORA\", \"r\": %d, \"lora_alpha\": %d, \"bias\": \"none\"%s}",
             LLAMA_RANK, LLAMA_ALPHA, settings);
    write_text_of("adapter_config.json", text);
}

#define QUIET " --dtype fp32 --sample 0 "

static void lora_trains_as_in_peft(void) {
    write_model(&llama_cases[0]);
    write_adapters("");
    write_text_of("text", LLAMA_TEXT);
    CHECK_INT(
        run_apart(
            llama_main,
            "llama @ --adapter @ --data @/text --steps 20 --batch 1 --lr 1e-2 --out @/tuned" QUIET),
        0);
    CHECK(n_printed >= LLAMA_STEPS);
    for (int i = 0; i < LLAMA_STEPS; i++) CHECK_NEAR(printed[i] / llama_lora[i], 1, 1e-5);
    if (said[0]) TEST_SHOW("%s", said);
}

/* The saved adapters go on where they ended; merged weights give the logits of both apart. */
static void adapters_are_saved_and_merged(void) {
    static double apart[LLAMA_LENGTH * LLAMA_VOCAB + 1];
    double        most = 0;
    write_model(&llama_cases[1]);
    write_text_of("text", LLAMA_TEXT);
    CHECK_INT(
        run_apart(
            llama_main,
            "llama @ --lora 3 --targets *.1.*.k_proj,o_proj --data @/text --steps 9 --lr 1e-2 --out @/tuned --overwrite" QUIET),
        0);
    CHECK_INT(run_apart(llama_main, "llama @ --adapter @/tuned --merge 1 --out @/merged" QUIET), 0);
    CHECK_INT(run_apart(print_logits, "test --logits @ 6 1 2 3 4 5 6 --adapter @/tuned"), 0);
    int n = n_printed;
    CHECK_INT(n, 1 + 6 * LLAMA_VOCAB);
    memcpy(apart, printed, (size_t)n * sizeof *apart);
    CHECK_INT(run_apart(print_logits, "test --logits @/merged 6 1 2 3 4 5 6"), 0);
    CHECK_INT(n_printed, n);
    for (int i = 0; i < n; i++) most = fmax(most, fabs(apart[i]));
    for (int i = 0; i < n; i++) CHECK_NEAR(printed[i], apart[i], 1e-5 * most);
    CHECK_INT(run_apart(print_logits, "test --logits @ 6 1 2 3 4 5 6"), 0);
    CHECK(fabs(printed[0] - apart[0]) > 1e-3); /* the adapters change the model */
}

/* Training all weights, saving and reading them back; any number of threads gives the same bits. */
static void whole_models_are_saved(void) {
    write_model(&llama_cases[1]);
    write_text_of("text", LLAMA_TEXT);
    CHECK_INT(run_apart(llama_main,
                        "llama @ --data @/text --steps 12 --lr 1e-2 --threads 1 --out @/one" QUIET),
              0);
    CHECK(n_printed == 12 && printed[11] < printed[0] / 4);
    double loss = printed[11];
    CHECK_INT(run_apart(llama_main,
                        "llama @ --data @/text --steps 12 --lr 1e-2 --threads 2 --out @/two" QUIET),
              0);
    CHECK(printed[11] == loss);
    CHECK_INT(run_apart(llama_main, "llama @/one --data @/text --steps 1 --lr 0" QUIET), 0);
    CHECK(printed[0] < loss);
    loss = printed[0];
    CHECK_INT(run_apart(llama_main, "llama @/two --data @/text --steps 1 --lr 0" QUIET), 0);
    CHECK(printed[0] == loss);
    CHECK_INT(run_apart(llama_main, "llama @ --data @/text --steps 50 --batch 1 --lr 0" QUIET), 0);
    for (int i = 1; i < 26; i++) CHECK(printed[i] == printed[0]); /* means of equal losses */
    CHECK_INT(
        run_apart(llama_main, "llama @ --data @/text --steps 3 --dtype fp16 --sample 2 --lora 2"),
        0);
}

static void cached_samples_have_the_same_bits(void) {
    for (int i = 0; i < LLAMA_CASES; i++) {
        if (strcmp(llama_cases[i].name, "dynamic") == 0)
            continue; /* its angles depend on the length */
        write_model(&llama_cases[i]);
        CHECK_INT(run_apart(print_cache, i % 2 ? "test @ --dtype bf16" : "test @ --dtype fp32"), 0);
        CHECK_INT(n_printed, 1);
        CHECK_INT((int)printed[0], 0);
    }
}

/* ==== Rows ========================================================================== */

/* The rows must be these tokens; 1 in counts: the token counts as a target. */
static void expect_rows(const char *line, const int *ids, const char *counts, int n) {
    CHECK_INT(run_apart(print_rows, line), 0);
    CHECK_INT(n_printed, 2 * (n - 1));
    if (said[0]) TEST_SHOW("%s", said);
    for (int i = 0; n_printed == 2 * (n - 1) && i + 1 < n; i++) {
        CHECK_INT((int)printed[2 * i], ids[i]);
        CHECK_INT((int)printed[2 * i + 1], counts[i + 1] == '1' ? ids[i + 1] : MIXP_IGNORE);
    }
}

/* The row of a chat is cut as its text; the assistant's words and their end count. */
static void rows_count_what_the_assistant_says(void) {
    int         ids[64] = { 0 }, n = 0;
    const char *whole = "<|u|>\nq</s>\n<|assistant|>\nz</s>\n";
    tokenizer  *t = read_tokenizer(TOKENIZER, NULL);
    int64_t     count;
    int32_t    *all = encode_text(t, whole, (int64_t)strlen(whole), &count);
    char        counts[64] = "";
    for (int64_t at = 0, byte = 0; at < count; at++) { /* "z</s>" counts */
        int64_t from = (int64_t)(strstr(whole, "z</s>") - whole);
        counts[n] = byte >= from && byte < from + 5 ? '1' : '0';
        byte += t->tokens[all[at]].length;
        ids[n++] = all[at];
    }
    write_model(&llama_cases[0]);
    write_text_of(
        "chat.jsonl",
        "{\"messages\": [{\"role\": \"u\", \"content\": \"q\"}, {\"content\": \"z\", \"role\": \"assistant\"}]}\n\n");
    expect_rows("test @ --data @/chat.jsonl --chat zephyr", ids, counts, n);
    free(all);
    free_tokenizer(t);
    write_text_of("text", LLAMA_TEXT);
    expect_rows("test @ --data @/text", tokenizer_cases[2].ids, "11111111111111111111",
                tokenizer_cases[2].n);
    CHECK_INT(run_apart(print_rows, "test @ --data @/text --block 2"), 0);
    CHECK_INT(n_printed, 2 * (tokenizer_cases[2].n - 1));
}

/* Number of targets that count in a chat whose last two messages, with these keys, are the assistant's and the
 * user's. */
static int counted(const char *mark, const char *style, const char *content, const char *of_assistant, const char *of_user) {
    char text[512], line[128];
    int  n = 0;
    snprintf(text, sizeof text,
             "%s{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"%s\"%s},"
             " {\"role\": \"user\", \"content\": \"q\"%s}, {\"role\": \"assistant\", \"content\": \"z\"}]}\n",
             mark, content, of_assistant, of_user);
    write_text_of("marked.jsonl", text);
    snprintf(line, sizeof line, "test @ --data @/marked.jsonl --chat %s", style);
    CHECK_INT(run_apart(print_rows, line), 0);
    for (int i = 0; i < n_printed / 2; i++) n += (int)printed[2 * i + 1] != MIXP_IGNORE;
    return n;
}

/* Keys of a message exclude or include its words; what says nothing changes nothing; Llama 3 trims. */
static void chats_say_what_counts(void) {
    write_model(&llama_cases[0]);
    int two = counted("", "zephyr", "z", "", "");
    int rows = n_printed;
    int one = two / 2;
    CHECK(two > 0 && two % 2 == 0 && said[0] == 0);
    CHECK_INT(counted("", "zephyr", "z", ", \"weight\": 0", ""), one);
    CHECK_INT(counted("", "zephyr", "z", ", \"train\": false", ""), one);
    CHECK_INT(counted("", "zephyr", "z", ", \"loss\": false", ""), one);
    CHECK_INT(counted("", "zephyr", "z", ", \"weight\": 1, \"tool_calls\": null, \"id\": \"x\"", ""), two);
    CHECK(counted("", "zephyr", "z", "", ", \"train\": true") > two);
    CHECK_INT(counted("\xEF\xBB\xBF", "zephyr", "z", "", ""), two);
    CHECK_INT(n_printed, rows);
    CHECK_INT(counted("", "zephyr", "z", ", \"key_of_2030\": 1", ""), two);
    CHECK_TEXT(said, "the key \"key_of_2030\" is not used");
    counted("", "zephyr", "z<|endoftext|>", "", "");
    CHECK_TEXT(said, "1 messages have control tokens in their words");
    two = counted("", "llama3", "z", "", "");
    CHECK_INT(counted("", "llama3", " \\n\\u00a0\\u3000z\\u001f\\t ", "", ""), two);
    CHECK(counted("", "zephyr", " z ", "", "") > 2 * one);
}

static void bad_data_are_named(void) {
    static const struct {
        const char *text, *what;
    } lines[] = {
        { "{\"messages\": [{\"role\": \"user\"", "line 1: malformed" },
        { "\n{\"text\": \"a\"}", "line 2: there is no list \"messages\"" },
        { "{\"messages\": [{\"role\": \"user\", \"content\": 3}]}",
          "line 1: a message needs a \"role\" and a \"content\"" },
        { "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}",
          "has no token to train on" },
        { "", "has no token to train on" },
        { "{\"messages\": [{\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{\"id\": 1}]}]}",
          "line 1: \"tool_calls\" changes what is learnt" },
        { "{\"tools\": [{}], \"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}", "\"tools\" changes" },
        { "{\"system\": \"be\", \"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}", "\"system\" changes" },
        { "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"reasoning_content\": \"b\"}]}",
          "\"reasoning_content\" changes" },
        { "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"weight\": 0.5}]}", "weight of a message is 0.5" },
        { "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"train\": 1}]}", "\"train\" of a message must be" },
        { "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\\u0000b\"}]}", "line 1: a content holds \\u0000" },
        { "{}\n{\"messages\": [{\"role\": \"assistant\", \"content\": \"caf\xE9\"}]}", "line 2: byte 55, 0xe9, is not UTF-8" },
        { "{\"messages\": [{\"role\": \"assistant\", \"content\": \"\xED\xA0\x80\"}]}", "is not UTF-8" },
        { "\xF4\x90\x80\x80", "byte 1, 0xf4" },
        { "\xE0\x81\x81", "byte 1, 0xe0" },
    };
    static const char zero[] =
        "{\"messages\": [{\"role\": \"assistant\", \"content\": \"abc\"}]}\n"
        "\0{\"text\": \"a\"}";
    FILE *f;
    write_model(&llama_cases[0]);
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        write_text_of("bad.jsonl", lines[i].text);
        expect_refusal("llama @ --sample 0 --chat chatml --data @/bad.jsonl", 1, "bad.jsonl",
                       lines[i].what);
    }
    f = fopen(in_folder_of_test("zero.jsonl"), "wb");
    CHECK(f && fwrite(zero, 1, sizeof zero, f) == sizeof zero && fclose(f) == 0);
    expect_refusal("llama @ --sample 0 --chat chatml --data @/zero.jsonl", 1, "zero.jsonl",
                   "byte 57 is 0");
    write_text_of("bad.jsonl", "{}");
    expect_refusal("llama @ --sample 0 --data @/bad.jsonl", 1, "tokenizer.json",
                   "has no token of chats");
    expect_refusal("llama @ --sample 0 --data @/absent", 1, "absent", "Check --data");
}

/* ==== Files that are refused ======================================================== */

static void configs_are_refused_by_field(void) {
    static const struct {
        const char *more, *what;
    } bad[] = {
        { ", \"model_type\": \"mistral\"", "model_type is mistral" },
        { ", \"model_type\": \"gpt2\"", "model_type is gpt2" },
        { ", \"model_type\": null", "has no model_type" },
        { ", \"hidden_act\": \"gelu\"", "hidden_act is gelu" },
        { ", \"pretraining_tp\": 2", "pretraining_tp is 2" },
        { ", \"attention_dropout\": 0.1", "attention_dropout is 0.1" },
        { ", \"quantization_config\": {\"bits\": 4}", "quantization_config is an object" },
        { ", \"rope_scaling\": {\"rope_type\": \"longrope\", \"factor\": 2}",
          "rope_type of the rotary positions is longrope" },
        { ", \"rope_parameters\": {\"type\": \"su\"}", "type of the rotary positions is su" },
        { ", \"rope_scaling\": {\"rope_type\": 3}",
          "rope_type of the rotary positions is no text" },
        { ", \"rope_scaling\": {\"rope_type\": \"linear\"}", "has no factor" },
        { ", \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": \"2\"}",
          "factor is not a number" },
        { ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 2}",
          "has no low_freq_factor" },
        { ", \"rope_scaling\": {\"partial_rotary_factor\": 0.5}", "partial_rotary_factor is 0.5" },
        { ", \"num_key_value_heads\": 3", "num_key_value_heads does not divide" },
        { ", \"head_dim\": 7", "head_dim is odd" },
        { ", \"num_hidden_layers\": 0", "num_hidden_layers is 0" },
        { ", \"num_hidden_layers\": null", "has no num_hidden_layers" },
        { ", \"rms_norm_eps\": \"x\"", "rms_norm_eps is not a number" },
        { ", \"num_hidden_layers\": 3", "model.layers.2.input_layernorm.weight" },
        { ", \"hidden_size\": 64", "model.embed_tokens.weight is [424, 32]" },
        { ", \"num_hidden_layers\": 1", "has no place" },
        { ", \"tie_word_embeddings\": false", "lm_head.weight" },
        { ", \"vocab_size\": 100", "has 420 tokens" },
        { ", \"sliding_window\": 8", "sliding_window is 8, and this program does not know" },
        { ", \"attn_logit_softcapping\": 50.0", "attn_logit_softcapping is 50.0" },
        { ", \"embedding_multiplier\": 12", "embedding_multiplier is 12" },
        { ", \"text_config\": {\"hidden_size\": 8}", "text_config is an object" },
        { ", \"a_key_of_2030\": \"on\"", "a_key_of_2030 is on" },
        { ", \"layer_types\": [\"full_attention\", \"sliding_attention\"]", "layer_types has \"sliding" },
        { ", \"partial_rotary_factor\": 0.5", "partial_rotary_factor is 0.5" },
        { ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2, \"short_factor\": [1]}",
          "short_factor is an object or a list" },
        { ", \"model_type\": \"qwen2\", \"use_sliding_window\": true", "use_sliding_window is true" },
        { ", \"model_type\": \"qwen2\"", "self_attn.q_proj.bias" },
        { ", \"eos_token_id\": 421", "has no token 421" },
    };
    write_model(&llama_cases[0]);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        write_config_of(&llama_cases[0], bad[i].more);
        expect_refusal("llama @" QUIET, 1, "config.json", bad[i].what);
    }
    write_config_of(&llama_cases[0], /* all unset */
                    ", \"sliding_window\": null, \"use_qk_norm\": false, \"num_experts\": 0, \"text_config\": {},"
                    " \"embedding_multiplier\": 1.0, \"auto_map\": [], \"layer_types\": [\"full_attention\"]");
    expect_logits(&llama_cases[0], "@", "");
    write_text_of("config.json", "{\"model_type\": \"lla");
    expect_refusal("llama @", 1, "config.json", "is not whole");
    write_text_of("config.json", "[]");
    expect_refusal("llama @", 1, "config.json", "is malformed");
    expect_refusal("llama @/absent", 1, "absent/config.json", "cannot read");
}

static void weights_are_refused_by_tensor(void) {
    static double doubles[LLAMA_VOCAB * LLAMA_WIDTH];
    write_model(&llama_cases[0]);
    made.e[0].dtype = MIXP_F64;
    made.e[0].data = doubles;
    made.e[0].bytes = sizeof doubles;
    write_entries("model.safetensors", 0, made.n);
    expect_refusal("llama @", 1, "model.safetensors", "model.embed_tokens.weight is of dtype F64");
    made.e[0].dtype = MIXP_F8_E4M3;
    made.e[0].bytes = sizeof doubles / 8;
    write_entries("model.safetensors", 0, made.n);
    expect_refusal("llama @", 1, "model.safetensors",
                   "model.embed_tokens.weight is of dtype F8_E4M3");
    write_entries("model.safetensors", 1, made.n - 1);
    expect_refusal("llama @", 1, folder, "has no tensor model.embed_tokens.weight");
    write_model(&llama_cases[0]);
    write_text_of("tokenizer.json", "{\"model\": {}}");
    expect_refusal("llama @", 1, "tokenizer.json", "has no vocab");
}

/* Merging takes the base from its file: what bf16 would round away of an f32 base stays. */
static void merging_keeps_the_files_values(void) {
    static double apart[LLAMA_LENGTH * LLAMA_VOCAB + 1];
    double        most = 0;
    write_model(&llama_cases[0]);
    for (int64_t i = 0; i < made.used; i++) made.values[i] *= 1.001f; /* no bf16 number */
    write_entries("model.safetensors", 0, made.n);
    write_adapters("");
    CHECK_INT(run_apart(llama_main, "llama @ --adapter @ --merge 1 --sample 0 --out @/kept --gguf @/kept.gguf"), 0);
    CHECK(n_printed == 2 && printed[0] == 0 && printed[1] == 0);
    CHECK_INT(run_apart(print_logits, "test --logits @ 4 1 2 3 4 --adapter @"), 0);
    memcpy(apart, printed, sizeof apart);
    for (int k = 0; k < 2; k++) {
        CHECK_INT(run_apart(print_logits, k ? "test --logits @/kept.gguf 4 1 2 3 4" : "test --logits @/kept 4 1 2 3 4"), 0);
        for (int i = 0; i < n_printed; i++) most = fmax(most, fabs(apart[i]));
        for (int i = 0; i < n_printed; i++) CHECK_NEAR(printed[i], apart[i], 1e-6 * most);
    }
    CHECK_INT(run_apart(llama_main, "llama @ --adapter @ --gguf @/low.gguf --gguf-type q8_0 --sample 0"), 0);
    CHECK(n_printed == 1 && printed[0] > 0 && printed[0] < 20); /* the share that was lost, in % */
    write_model(&llama_cases[1]);
    write_config_of(&llama_cases[0], ", \"num_key_value_heads\": 4, \"attention_bias\": true, \"mlp_bias\": true");
    expect_refusal("llama @" QUIET, 1, "lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings");
}

/* The tokens of tokenizer_config.json come before those of config.json; the template goes into GGUF and back; chats that
 * were trained bring the template of their style. */
static void usage_is_carried(void) {
    static char text[4096];
    gguf       *g = NULL;
    size_t      n = 0;
    write_model(&llama_cases[0]);
    write_config_of(&llama_cases[0], ", \"eos_token_id\": [5, 6], \"bos_token_id\": 7");
    write_text_of("tokenizer_config.json", "{\"eos_token\": \"<|endoftext|>\", \"pad_token\": {\"content\": \"<|endoftext|>\"},"
                                           " \"chat_template\": [{\"name\": \"rag\", \"template\": \"R\"},"
                                           " {\"name\": \"default\", \"template\": \"T\\n<|im_start|>\"}]}");
    write_text_of("generation_config.json", "{\"bos_token_id\": 3, \"top_k\": 4}");
    write_text_of("chat.jsonl", "{\"messages\": [{\"role\": \"assistant\", \"content\": \"abc\"}]}\n");
    CHECK_INT(run_apart(llama_main, "llama @ --gguf @/used.gguf" QUIET), 0);
    CHECK_INT(gguf_read(in_folder_of_test("used.gguf"), &g, said, sizeof said), MIXP_OK);
    CHECK(g && gguf_number(g, "tokenizer.ggml.eos_token_id", -1) == 0);
    CHECK(g && gguf_number(g, "tokenizer.ggml.padding_token_id", -1) == 0);
    CHECK(g && gguf_number(g, "tokenizer.ggml.bos_token_id", -1) == 3);
    const char *found = g ? gguf_text(g, "tokenizer.chat_template", &n) : NULL;
    CHECK(found && n == 14 && memcmp(found, "T\n<|im_start|>", n) == 0);
    gguf_free(g);
    CHECK_INT(run_apart(llama_main, "llama @/used.gguf --out @/used" QUIET), 0);
    read_text_of(in_folder_of_test("used/chat_template.jinja"), text, sizeof text);
    CHECK(strcmp(text, "T\n<|im_start|>") == 0);
    CHECK_INT(run_apart(llama_main, "llama @ --data @/chat.jsonl --chat chatml --steps 1 --out @/same" QUIET), 0);
    read_text_of(in_folder_of_test("same/tokenizer_config.json"), text, sizeof text);
    CHECK_TEXT(text, "\"T\\n<|im_start|>\"");
    CHECK(!is_there(in_folder_of_test("same/chat_template.jinja")));
    CHECK_INT(run_apart(llama_main, "llama @ --data @/chat.jsonl --chat zephyr --steps 1 --out @/other" QUIET), 0);
    CHECK_TEXT(said, "does not write zephyr, which was trained");
    read_text_of(in_folder_of_test("other/tokenizer_config.json"), text, sizeof text);
    CHECK(strstr(text, "pad_token") && !strstr(text, "chat_template"));
    read_text_of(in_folder_of_test("other/chat_template.jinja"), text, sizeof text);
    CHECK_TEXT(text, "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '</s>' + '\\n' }}");
    for (int i = 0; i < COPIED_FILES; i++) remove(in_folder_of_test(copied_files[i]));
}

/* The adapters alone: each pair of tensors under llama.cpp's names; rows of q are turned as those of the model are. */
static void adapters_are_saved_as_gguf(void) {
    gguf                *g = NULL;
    const float         *b = NULL;
    write_model(&llama_cases[0]);
    write_adapters("");
    for (int64_t i = 0; i < made.n; i++)
        if (strstr(made.e[i].name, "layers.1.self_attn.q_proj.lora_B")) b = (const float *)made.e[i].data;
    CHECK_INT(run_apart(llama_main, "llama @ --adapter @ --gguf-adapter @/apart.gguf" QUIET), 0);
    CHECK_INT(gguf_read(in_folder_of_test("apart.gguf"), &g, said, sizeof said), MIXP_OK);
    if (!g || !b) return;
    CHECK(gguf_text_is(g, "general.type", "adapter") && gguf_text_is(g, "adapter.type", "lora"));
    CHECK(gguf_text_is(g, "general.architecture", "llama"));
    CHECK_NEAR(gguf_number(g, "adapter.lora.alpha", 0), LLAMA_ALPHA, 1e-6);
    CHECK_INT(g->n, 4 * LLAMA_LAYERS);
    const mixp_st_entry *e = gguf_find(g, "blk.0.ffn_down.weight.lora_a");
    CHECK(e && e->shape[0] == LLAMA_RANK && e->shape[1] == LLAMA_INNER);
    e = gguf_find(g, "blk.1.attn_q.weight.lora_b");
    CHECK(e && e->shape[0] == LLAMA_WIDTH && e->shape[1] == LLAMA_RANK);
    for (int r = 0; e && r < LLAMA_WIDTH; r++) { /* heads of 8 rows: 0 4 1 5 2 6 3 7 */
        int from = r / 8 * 8 + r % 2 * 4 + r % 8 / 2;
        CHECK(memcmp((const float *)e->data + r * LLAMA_RANK, b + from * LLAMA_RANK, LLAMA_RANK * sizeof *b) == 0);
    }
    gguf_free(g);
    expect_refusal("llama @/apart.gguf" QUIET, 1, "apart.gguf", "general.type is not model");
    expect_refusal("llama @ --gguf-adapter @/none.gguf" QUIET, 2, "--gguf-adapter", "add --lora or --adapter");
}

static void write_index(int64_t split, const char *second) {
    static char text[8192];
    int         n = snprintf(text, sizeof text, "{\"weight_map\": {");
    for (int64_t i = 0; i < made.n; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s\"%s\": \"%s\"", i ? ", " : "",
                      made.e[i].name, i < split ? "one.safetensors" : second);
    snprintf(text + n, sizeof text - (size_t)n, "}}");
    write_text_of("model.safetensors.index.json", text);
}

static void shards_are_read_once_each(void) {
    const char *index = "model.safetensors.index.json";
    write_model(&llama_cases[0]);
    write_index(9, "two.safetensors");
    expect_refusal("llama @", 1, index, "are both there");
    remove(in_folder_of_test("model.safetensors"));
    write_entries("one.safetensors", 0, 9);
    expect_refusal("llama @", 1, "two.safetensors", "No such file");
    write_entries("two.safetensors", 9, made.n - 9);
    expect_logits(&llama_cases[0], "@", "");
    write_entries("two.safetensors", 8, made.n - 8);
    expect_refusal("llama @", 1, "two.safetensors", "both hold");
    write_entries("two.safetensors", 10, made.n - 10);
    expect_refusal("llama @", 1, index, made.e[9].name);
    write_index(9, "../two.safetensors");
    expect_refusal("llama @", 1, index, "names ../two.safetensors");
    remove(in_folder_of_test(index));
    expect_refusal("llama @", 1, "model.safetensors", "No such file");
}

static void adapters_are_refused_by_field(void) {
    static const struct {
        const char *more, *what;
    } bad[] = {
        { ", \"peft_type\": \"IA3\"", "peft_type is IA3" },
        { ", \"use_dora\": true", "use_dora is true" },
        { ", \"use_rslora\": true", "use_rslora is true" },
        { ", \"bias\": \"all\"", "bias is all" },
        { ", \"modules_to_save\": [\"lm_head\"]", "modules_to_save" },
        { ", \"r\": null", "has no r" },
        { ", \"rank_pattern\": {\"q_proj\": 3}", "rank_pattern" },
        { ", \"alpha_pattern\": {\"q_proj\": 3}", "alpha_pattern" },
        { ", \"init_lora_weights\": \"pissa_niter_4\"", "init_lora_weights is pissa_niter_4" },
        { ", \"init_lora_weights\": \"olora\"", "init_lora_weights is olora" },
        { ", \"layer_replication\": [[0, 1]]", "layer_replication is an object or a list" },
        { ", \"lora_of_2030\": 3", "lora_of_2030 is 3, and this program does not know" },
    };
    static const struct {
        const char *options, *what;
    } contrary[] = {
        { "--lora 9", "the rank of" },
        { "--alpha 9", "the alpha of" },
        { "--targets q_proj", "disagree about model.layers.0.mlp.down_proj" },
    };
    char line[256];
    write_model(&llama_cases[0]);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        write_adapters(bad[i].more);
        expect_refusal("llama @ --adapter @" QUIET, 1, "adapter_config.json", bad[i].what);
    }
    write_adapters(", \"init_lora_weights\": \"gaussian\", \"lora_dropout\": 0.1, \"use_dora\": false");
    for (size_t i = 0; i < sizeof contrary / sizeof contrary[0]; i++) {
        snprintf(line, sizeof line, "llama @ --adapter @ %s" QUIET, contrary[i].options);
        expect_refusal(line, 2, "leave out --", contrary[i].what);
    }
    snprintf(line, sizeof line, "llama @ --adapter @ --lora %d --alpha %d --targets q_proj,down_proj" QUIET, LLAMA_RANK,
             LLAMA_ALPHA);
    CHECK_INT(run_apart(llama_main, line), 0);
    write_adapters(", \"r\": 3");
    expect_refusal("llama @ --adapter @" QUIET, 1, "adapter_model.safetensors", "lora_A.weight");
    write_adapters("");
    snprintf(made.names[0], sizeof made.names[0],
             "base_model.model.model.layers.7.mlp.down_proj.lora_A.weight");
    write_entries("adapter_model.safetensors", 0, made.n);
    expect_refusal("llama @ --adapter @" QUIET, 1, "adapter_model.safetensors",
                   "fits no linear layer");
    expect_refusal("llama @ --adapter @/absent", 1, "absent/adapter_config.json",
                   "Check --adapter");
    expect_refusal("llama @ --lora 4 --targets q_proj,c_attn", 2, "--targets",
                   "\"c_attn\" fits no linear layer");
}

static void wrong_usage_is_told(void) {
    expect_refusal("llama", 2, "llama", "name a model");
    expect_refusal("llama @ --frobnicate 9", 2, "--frobnicate", "llama --help lists all of them");
    expect_refusal("llama @ --learning-rate 1", 2, "--learning-rate", "Did you mean --lr?");
    expect_refusal("llama @ --target q_proj", 2, "--target", "Did you mean --targets?");
    expect_refusal("llama @ --steps", 2, "--steps", "needs a value");
    expect_refusal("llama @ --steps many", 2, "--steps", "is not a whole number");
    expect_refusal("llama @ --batch 0", 2, "--batch 0", "pass a number from 1");
    expect_refusal("llama @ --dtype int8", 2, "--dtype", "fp32|fp16|bf16");
    expect_refusal("llama @ --gguf-type q4_0", 2, "--gguf-type", "q8_0");
    expect_refusal("llama @ @", 2, "unexpected argument", folder);
    expect_refusal("llama @ --resume", 2, "--resume", "add its --out");
    expect_refusal("llama @ --level 3 --lora 2", 2, "--level 3", "use --level 2");
    expect_refusal("llama @ --masters 8bit", 2, "--masters", "--level 3 --dtype bf16");
    expect_refusal("llama @ --device cuda", 2, "--device cuda", "built without CUDA");
    expect_refusal("llama @ --device gpu", 2, "--device", "auto|cpu|cuda");
    expect_refusal("llama @ --ranks 4", 2, "--ranks", "fork:N");
    write_model(&llama_cases[0]);
    write_text_of("text", LLAMA_TEXT);
    write_text_of("a.jsonl", "{}");
    expect_refusal("llama @ --graph --data @/text", 2, "--graph", "needs a GPU");
    expect_refusal("llama @ --data @/text --val-rows 9", 1, "--val-rows 9", "none is left");
    expect_refusal("llama @ --data @/a.jsonl --chat mine", 2, "--chat is mine", "zephyr");
}

/* ==== GGUF ========================================================================== */

/* The file of reference/record_gguf.py again, byte for byte. */
static void gguf_is_the_packages_file(void) {
    static unsigned char written[sizeof gguf_file + 1];
    static const char   *names[] = { "blk.0.attn_q.weight", "token_embd.weight", "output.weight" };
    static const gguf_type types[] = { GGUF_Q8_0, GGUF_F16, GGUF_BF16 };
    static const int64_t   shapes[][2] = { { 3, 64 }, { 2, 5 }, { 3, 3 } };
    const int32_t          numbers[2] = { -1, 7 };
    float                  x[192], vector[5];
    char                   error[MIXP_MESSAGE_SIZE] = "";
    uint32_t               state = gen_start(5);
    mixp_context          *ctx = mixp_context_new(NULL);
    gguf_writer           *w = gguf_new("llama");
    FILE                  *f;
    gguf_put_u32(w, "test.u32", 4000000000u);
    gguf_put_float(w, "test.float", 0.1f);
    gguf_put_bool(w, "test.bool", 1);
    gguf_put_text(w, "test.text", "na\xc3\xafve");
    gguf_put_list(w, "test.texts", GGUF_TEXT, 3);
    gguf_text_n(w, "a", 1);
    gguf_text_n(w, "", 0);
    gguf_text_n(w, "bcd", 3);
    gguf_put_list(w, "test.numbers", GGUF_I32, 2);
    gguf_bytes(w, numbers, sizeof numbers);
    for (int k = 0; k < 3; k++) {
        mixp_tensor *t = mixp_param(ctx, names[k], MIXP_F32, 2, shapes[k]);
        gen_fill(&state, 4, x, (int)t->count);
        if (k == 0) {
            for (int i = 0; i < 32; i++) x[64 + i] = 0;
            x[128 + 3] = 2.5f;
        }
        mixp_write(t, x, MIXP_F32, t->count);
        gguf_put_tensor(w, names[k], types[k], t, 0);
    }
    gen_fill(&state, 4, vector, 5);
    gguf_put_floats(w, "output_norm.weight", vector, 5);
    CHECK_INT(gguf_write(w, in_folder_of_test("written.gguf"), error, sizeof error), MIXP_OK);
    f = fopen(in_folder_of_test("written.gguf"), "rb");
    CHECK_INT(f ? fread(written, 1, sizeof written, f) : 0, sizeof gguf_file);
    if (f) fclose(f);
    CHECK(memcmp(written, gguf_file, sizeof gguf_file) == 0);
    w = gguf_new("llama");
    CHECK_INT(gguf_write(w, in_folder_of_test("no/such/folder.gguf"), error, sizeof error),
              MIXP_ERR_IO);
    mixp_context_free(ctx);
}

/* A tensor that GGUF cannot hold, or that its readers refuse, is refused by gguf_write. */
static void tensors_that_gguf_lacks_are_refused(void) {
    static const struct {
        const char *name, *what;
        int         rank;
        int64_t     shape[5], heads;
    } bad[] = {
        { "a", "do not divide into heads", 2, { 4, 2 }, 8 },
        { "a", "do not divide into heads", 2, { 5, 2 }, 2 },
        { "a", "do not divide into heads", 2, { 6, 2 }, 2 },
        { "a", "do not divide into heads", 2, { 4, 2 }, -2 },
        { "a", "more than 4 dimensions", 5, { 1, 1, 1, 2, 2 }, 0 },
        { "first", "two tensors have one name", 2, { 4, 2 }, 0 },
        { "", "or empty", 2, { 4, 2 }, 0 },
        { "a.name.of.96.bytes.is.one.byte.longer.than.what.this.reader.takes.as.the.name.of.a.tensor.123456",
          "longer than 95 bytes", 2, { 4, 2 }, 0 },
    };
    static const float values[2] = { 1, 2 };
    mixp_context      *ctx = mixp_context_new(NULL);
    CHECK_INT(strlen(bad[7].name), 96);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char         name[8], error[MIXP_MESSAGE_SIZE] = "";
        gguf_writer *w = gguf_new("llama");
        snprintf(name, sizeof name, "t%d", (int)i);
        mixp_tensor *t = mixp_param(ctx, name, MIXP_F32, bad[i].rank, bad[i].shape);
        CHECK(t != NULL);
        gguf_put_floats(w, "first", values, 2);
        if (t) gguf_put_tensor(w, bad[i].name, GGUF_F32, t, bad[i].heads);
        CHECK_INT(gguf_write(w, in_folder_of_test("refused.gguf"), error, sizeof error),
                  MIXP_ERR_ARGUMENT);
        CHECK_TEXT(error, bad[i].what);
        CHECK(!is_there(in_folder_of_test("refused.gguf")));
    }
    mixp_context_free(ctx);
}

/* Rows of heads change their places whole, whatever the number of dimensions: 0 2 1 3. */
static void rows_of_heads_are_turned_whole(void) {
    static const float   values[8] = { 0, 1, 10, 11, 20, 21, 30, 31 };
    static const float   turned[8] = { 0, 1, 20, 21, 10, 11, 30, 31 };
    static const int64_t shape[3] = { 4, 1, 2 };
    mixp_context        *ctx = mixp_context_new(NULL);
    mixp_tensor         *t = mixp_param(ctx, "t", MIXP_F32, 3, shape);
    gguf_writer         *w = gguf_new("llama");
    gguf                *g = NULL;
    mixp_write(t, values, MIXP_F32, 8);
    gguf_put_tensor(w, "t", GGUF_F32, t, 1);
    CHECK_INT(gguf_write(w, in_folder_of_test("turned.gguf"), said, sizeof said), MIXP_OK);
    CHECK_INT(gguf_read(in_folder_of_test("turned.gguf"), &g, said, sizeof said), MIXP_OK);
    CHECK(g && g->n == 1 && memcmp(g->entries[0].data, turned, sizeof turned) == 0);
    gguf_free(g);
    mixp_context_free(ctx);
}

static void write_bytes(const unsigned char *bytes, size_t n) {
    FILE *f = fopen(in_folder_of_test("some.gguf"), "wb");
    CHECK(f && fwrite(bytes, 1, n, f) == n && fclose(f) == 0);
}

static mixp_result read_some(gguf **g) {
    return gguf_read(in_folder_of_test("some.gguf"), g, said, sizeof said);
}

static void gguf_of_the_package_is_read(void) {
    gguf                *g = NULL;
    uint32_t             state = gen_start(5);
    float                x[192], some[10];
    write_bytes(gguf_file, sizeof gguf_file);
    CHECK_INT(read_some(&g), MIXP_OK);
    if (!g) return;
    CHECK(gguf_text_is(g, "general.architecture", "llama"));
    CHECK(gguf_text_is(g, "test.text", "na\xc3\xafve"));
    CHECK(gguf_number(g, "test.u32", 0) == 4000000000.0 && gguf_number(g, "test.bool", 0) == 1);
    CHECK_NEAR(gguf_number(g, "test.float", 0), 0.1, 1e-8);
    CHECK(gguf_number(g, "test.absent", 7) == 7 && gguf_number(g, "test.text", 7) == 7);
    CHECK(gguf_pair_of(g, "test.texts") && gguf_pair_of(g, "test.texts")->count == 3);
    CHECK_INT(g->n, 4);
    const mixp_st_entry *e = gguf_find(g, "blk.0.attn_q.weight");
    CHECK(e && e->dtype == MIXP_DTYPE_COUNT && strcmp(e->type, "Q8_0") == 0);
    gen_fill(&state, 4, x, 192);
    gen_fill(&state, 4, x, 10);
    e = gguf_find(g, "token_embd.weight");
    CHECK(e && e->dtype == MIXP_F16 && e->rank == 2 && e->shape[0] == 2 && e->shape[1] == 5);
    if (e) mixp_convert(some, MIXP_F32, e->data, e->dtype, 10);
    for (int i = 0; e && i < 10; i++) CHECK_NEAR(some[i], x[i], 4.0 / 2048);
    gen_fill(&state, 4, x, 9);
    gen_fill(&state, 4, x, 5);
    e = gguf_find(g, "output_norm.weight");
    CHECK(e && e->dtype == MIXP_F32 && memcmp(e->data, x, 20) == 0);
    gguf_free(g);
}

/* Cut anywhere, or with any byte changed: it is read, or refused with a reason. */
static void gguf_that_is_damaged_is_refused(void) {
    static unsigned char       bytes[sizeof gguf_file];
    static const unsigned char values[] = { 0x00, 0x01, 0x7F, 0x80, 0xFF };
    gguf                      *g;
    for (size_t n = 0;
         n<sizeof gguf_file - 12; n += n> 560 ? 37 : 1) { /* 12 bytes of padding end it */
        write_bytes(gguf_file, n);
        CHECK_INT(read_some(&g), MIXP_ERR_FORMAT);
        CHECK(!g && said[0]);
    }
    for (size_t i = 0; i < 560; i++)
        for (size_t k = 0; k < sizeof values; k++) {
            memcpy(bytes, gguf_file, sizeof bytes);
            bytes[i] = values[k];
            write_bytes(bytes, sizeof bytes);
            mixp_result result = read_some(&g);
            CHECK(result == MIXP_OK ? g != NULL : result == MIXP_ERR_FORMAT && !g);
            gguf_free(g);
        }
    CHECK_INT(gguf_read(in_folder_of_test("absent.gguf"), &g, said, sizeof said), MIXP_ERR_IO);
    CHECK_TEXT(said, "absent.gguf");
}

/* An alignment is compared before it is converted to an integer. */
static void odd_alignments_are_refused(void) {
    static const double odd[] = { -1e300, 1e300, NAN, 32.5, 4, 48, 0 };
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        gguf_writer *w = gguf_new("llama");
        gguf        *g = NULL;
        gguf_key(w, "general.alignment", GGUF_DOUBLE);
        gguf_bytes(w, &odd[i], 8);
        CHECK_INT(gguf_write(w, in_folder_of_test("some.gguf"), said, sizeof said), MIXP_OK);
        CHECK_INT(read_some(&g), MIXP_ERR_FORMAT);
        CHECK_TEXT(said, "general.alignment");
        gguf_free(g);
    }
}

/* Writes some.gguf: model.gguf with one more float before its metadata. A text behind it keeps the
 * alignment. */
static void write_with_pair(const char *key, float value) {
    static unsigned char bytes[1 << 18], zeros[32];
    FILE                *f = fopen(in_folder_of_test("model.gguf"), "rb");
    size_t               size = f ? fread(bytes, 1, sizeof bytes, f) : 0, pad;
    gguf_writer          w;
    uint64_t             pairs;
    if (f) fclose(f);
    CHECK(size > 24 && size < sizeof bytes);
    memset(&w, 0, sizeof w);
    gguf_bytes(&w, bytes, 24);
    gguf_put_float(&w, key, value);
    gguf_key(&w, "x", GGUF_TEXT);
    pad = (32 - (w.length - 24 + 8) % 32) % 32;
    gguf_text_n(&w, (const char *)zeros, pad);
    memcpy(&pairs, bytes + 16, 8);
    pairs += 2;
    memcpy(w.meta + 16, &pairs, 8);
    gguf_bytes(&w, bytes + 24, size - 24);
    write_bytes(w.meta, w.length);
    free(w.meta);
}

/* Rotary positions that would be read as others are refused by their key. */
static void rope_of_gguf_is_refused_by_key(void) {
    static const struct {
        const char *key;
        float       value;
    } bad[] = {
        { "llama.rope.dimension_count", 4 },
        { "llama.rope.scale_linear", 2 },
        { "llama.rope.scaling.factor", 2 },
        { "llama.attention.sliding_window", 8 },
        { "llama.attn_logit_softcapping", 30 },
        { "llama.a_key_of_2030", 3 },
        { "split.count", 3 },
    };
    write_model(&llama_cases[0]);
    remove(in_folder_of_test("model.gguf"));
    CHECK_INT(run_apart(llama_main, "llama @ --gguf @/model.gguf --gguf-type f32" QUIET), 0);
    write_with_pair("llama.rope.scale_linear", 1);
    expect_logits(&llama_cases[0], "@/some.gguf", "");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        write_with_pair(bad[i].key, bad[i].value);
        expect_refusal("llama @/some.gguf" QUIET, 1, "some.gguf", i < 6 ? bad[i].key : "is one of 3 parts");
    }
}

/* Codes of four bits, as ggml lays them out: the first 16 of a block in the low halves of its bytes. */
static void blocks_of_four_bits_are_read(void) {
    unsigned char bytes[20] = { 0x00, 0x38, 0x00, 0xBC }; /* 0.5 and -1 */
    float         values[32];
    for (int i = 0; i < 16; i++) bytes[4 + i] = (unsigned char)(i | (15 - i) << 4);
    gguf_dequantise4(values, bytes, 32, 1);
    for (int i = 0; i < 16; i++) CHECK(values[i] == 0.5f * (float)i - 1 && values[16 + i] == 0.5f * (float)(15 - i) - 1);
    memmove(bytes + 2, bytes + 4, 16);
    gguf_dequantise4(values, bytes, 32, 0);
    for (int i = 0; i < 16; i++) CHECK(values[i] == 0.5f * (float)(i - 8) && values[16 + i] == 0.5f * (float)(7 - i));
}

/* A tensor of Q8_0 is loaded as scale times code, computed here in double. q8.gguf has the weights of `made`. */
static void values_of_q8_are_read(void) {
    static float  values[LLAMA_VOCAB * LLAMA_WIDTH];
    gguf         *g = NULL;
    mixp_safetensors    *back = NULL;
    CHECK_INT(run_apart(llama_main, "llama @/q8.gguf --out @/of_q8 --tokenizer " TOKENIZER QUIET), 0);
    CHECK_INT(gguf_read(in_folder_of_test("q8.gguf"), &g, said, sizeof said), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(in_folder_of_test("of_q8/model.safetensors"), &back, said, sizeof said), MIXP_OK);
    const mixp_st_entry *e = mixp_safetensors_find(back, "model.embed_tokens.weight");
    CHECK(e && e->dtype == MIXP_F32 && e->bytes == sizeof values);
    if (!g || !e || e->bytes != sizeof values) return;
    memcpy(values, e->data, sizeof values);
    const unsigned char *blocks = (const unsigned char *)gguf_find(g, "token_embd.weight")->data;
    for (int64_t i = 0; i < LLAMA_VOCAB * LLAMA_WIDTH; i++) {
        const unsigned char *b = blocks + i / 32 * 34;
        unsigned             bits = b[0] | (unsigned)b[1] << 8;
        double               scale = ldexp((bits & 1023) + 1024, (int)(bits >> 10) - 25); /* a normal number */
        CHECK(bits == 0 || (double)values[i] == scale * (b[2 + i % 32] - (b[2 + i % 32] > 127 ? 256 : 0)));
    }
    gguf_free(g);
    mixp_safetensors_free(back);
}

/* A model written as f32 and read again has the same logits; what GGUF lacks is refused. */
static void models_pass_through_gguf(void) {
    for (int i = 0; i < LLAMA_CASES; i++) {
        if (i == 2 || i == 4) continue; /* llama3, dynamic */
        write_model(&llama_cases[i]);
        CHECK_INT(run_apart(llama_main, "llama @ --gguf @/model.gguf --gguf-type f32" QUIET), 0);
        expect_logits(&llama_cases[i], "@/model.gguf", "");
    }
    CHECK_INT(run_apart(llama_main, "llama @/model.gguf --out @/back --tokenizer " TOKENIZER QUIET),
              0);
    expect_logits(&llama_cases[5], "@/back", "");
    CHECK_INT(run_apart(llama_main, "llama @ --gguf @/q8.gguf --gguf-type q8_0" QUIET), 0);
    values_of_q8_are_read();
    write_bytes(gguf_file, sizeof gguf_file);
    expect_refusal("llama @/some.gguf", 1, "some.gguf", "has no num_hidden_layers");
    write_model(&llama_cases[4]);
    expect_refusal("llama @ --gguf @/d.gguf" QUIET, 1, "config.json", "GGUF has no such scaling");
    write_model(&llama_cases[2]);
    CHECK_INT(run_apart(llama_main, "llama @ --gguf @/3.gguf" QUIET), 0);
    expect_refusal("llama @/3.gguf --tokenizer " TOKENIZER, 1, "3.gguf", "rope_freqs.weight");
}

/* A tokenizer that is made of the tokens and merges of a file cuts texts as the one that was
 * written. */
static void tokenizers_pass_through_gguf(void) {
    static const cut_kind cuts[][2] = { { CUT_GPT2, CUT_NOT },
                                        { CUT_DIGITS, CUT_GPT2 },
                                        { CUT_GPT4, CUT_NOT },
                                        { CUT_GPT4_1, CUT_NOT } };
    tokenizer            *t = read_tokenizer(TOKENIZER, NULL);
    for (int k = 0; k < 4; k++) {
        gguf_writer *w = gguf_new("llama");
        gguf        *g = NULL;
        const char  *root, *wrong;
        t->n_cuts = k == 0 ? 1 : 2;
        for (int i = 0; i < t->n_cuts; i++) {
            t->cuts[i].kind = cuts[k][i];
            t->cuts[i].prefix = 0;
        }
        t->ignore_merges = k == 2;
        gguf_put_tokenizer(w, t, "{}", 424, 0, 0);
        CHECK_INT(gguf_write(w, in_folder_of_test("some.gguf"), said, sizeof said), MIXP_OK);
        CHECK_INT(read_some(&g), MIXP_OK);
        char *json = gguf_tokenizer_json(g);
        CHECK(json && strcmp(json, "{}") == 0);
        free(json);
        for (uint64_t i = 0; i < g->n_pairs; i++) /* without the file itself */
            if (g->pairs[i].key_length == 26) g->pairs[i].key_length = 0;
        json = gguf_tokenizer_json(g);
        root = json ? json_check(json, (int64_t)strlen(json), &wrong) : NULL;
        CHECK(root != NULL);
        if (!root) return;
        tokenizer *back = tokenizer_of("some.gguf", root, strlen(json));
        CHECK_INT(back->count, t->count);
        CHECK_INT(back->ignore_merges, t->ignore_merges);
        for (size_t i = 0; i < sizeof tokenizer_cases / sizeof tokenizer_cases[0]; i++) {
            int64_t  n, m_;
            int64_t  size = (int64_t)strlen(tokenizer_cases[i].text);
            int32_t *a = encode_text(t, tokenizer_cases[i].text, size, &n);
            int32_t *b = encode_text(back, tokenizer_cases[i].text, size, &m_);
            CHECK(n == m_ && (n == 0 || memcmp(a, b, (size_t)n * sizeof *a) == 0));
            free(a);
            free(b);
        }
        free_tokenizer(back);
        free(json);
        gguf_free(g);
    }
    free_tokenizer(t);
}

/* A tokenizer whose added tokens have numbers far behind its vocab's: all merges, and no others. */
static void added_tokens_behind_the_vocab_are_put(void) {
#define ADDED "{\"added_tokens\": [{\"id\": 4000, \"content\": \"<x>\", \"special\": true}], "
#define VOCAB "\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"a b\"]}, "
    static const char *const files[2] = {
        ADDED "\"model\": {" VOCAB
              "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}}",
        ADDED "\"model\": {\"byte_fallback\": true, " VOCAB
              "\"pre_tokenizer\": {\"type\": \"Metaspace\", \"replacement\": \"\xE2\x96\x81\", "
              "\"prepend_scheme\": \"never\", \"split\": false}}",
    };
    for (int k = 0; k < 2; k++) {
        const char      *wrong, *root = json_check(files[k], (int64_t)strlen(files[k]), &wrong);
        tokenizer       *t = tokenizer_of("added.json", root, strlen(files[k]));
        gguf_writer     *w = gguf_new("llama");
        gguf            *g = NULL;
        float            scores[3] = { 9, 9, 9 };
        CHECK_INT(t->count, 4001);
        CHECK_INT(t->first_merge[t->count], 1);
        gguf_put_tokenizer(w, t, "{}", 4001, -1, -1);
        CHECK_INT(gguf_write(w, in_folder_of_test("some.gguf"), said, sizeof said), MIXP_OK);
        CHECK_INT(read_some(&g), MIXP_OK);
        const gguf_pair *list = g ? gguf_pair_of(g, k ? "tokenizer.ggml.scores" : "tokenizer.ggml.merges") : NULL;
        CHECK(list && list->count == (k ? 4001 : 1));
        if (k && list) memcpy(scores, list->value, sizeof scores);
        CHECK(!k || (scores[0] == 0 && scores[1] == 0 && scores[2] == -1));
        gguf_free(g);
        free_tokenizer(t);
    }
}

/* Puts a tokenizer of 420 tokens into a file of a model with 100 rows. */
static int put_into_few_rows(int argc, char **argv) {
    (void)argc;
    (void)argv;
    gguf_put_tokenizer(gguf_new("gpt2"), read_tokenizer(TOKENIZER, NULL), "{}", 100, -1, -1);
    return 0;
}

static void too_few_rows_are_refused(void) {
    CHECK_INT(run_apart(put_into_few_rows, "test"), 1);
    CHECK_TEXT(said, "has 420 tokens, and the model has rows for 100");
    CHECK_TEXT(said, "--vocab 420");
}

int main(int argc, char **argv) {
    char command[128];
    if (argc > 4 && strcmp(argv[1], "--logits") == 0) return print_logits(argc, argv);
    if (argc > 2 && strcmp(argv[1], "--run") == 0) return llama_main(argc - 1, argv + 1);
    if (argc > 2 && strcmp(argv[1], "--make") == 0) {
        snprintf(folder, sizeof folder, "%s", argv[2]);
        write_model(&llama_cases[argc > 3 ? atoi(argv[3]) : 0]);
        return test_report();
    }
    if (argc == 3 && strcmp(argv[1], "--make") == 0) {
        snprintf(folder, sizeof folder, "%s", argv[2]);
        write_model(&llama_cases[0]);
        return test_report();
    }
    snprintf(folder, sizeof folder,
             "/dev/shm/test_llama.XXXXXX"); /* in memory: saving flushes to the disk */
    if (!mkdtemp(folder)) snprintf(folder, sizeof folder, "/tmp/test_llama.XXXXXX");
    if (!strstr(folder, "/dev/shm/") && !mkdtemp(folder)) return 1;
    RUN(logits_are_those_of_transformers);
    RUN(lora_trains_as_in_peft);
    RUN(adapters_are_saved_and_merged);
    RUN(whole_models_are_saved);
    RUN(cached_samples_have_the_same_bits);
    RUN(rows_count_what_the_assistant_says);
    RUN(chats_say_what_counts);
    RUN(bad_data_are_named);
    RUN(usage_is_carried);
    RUN(adapters_are_saved_as_gguf);
    RUN(configs_are_refused_by_field);
    RUN(weights_are_refused_by_tensor);
    RUN(merging_keeps_the_files_values);
    RUN(shards_are_read_once_each);
    RUN(adapters_are_refused_by_field);
    RUN(wrong_usage_is_told);
    RUN(gguf_is_the_packages_file);
    RUN(tensors_that_gguf_lacks_are_refused);
    RUN(rows_of_heads_are_turned_whole);
    RUN(gguf_of_the_package_is_read);
    RUN(gguf_that_is_damaged_is_refused);
    RUN(odd_alignments_are_refused);
    RUN(blocks_of_four_bits_are_read);
    RUN(models_pass_through_gguf);
    RUN(rope_of_gguf_is_refused_by_key);
    RUN(tokenizers_pass_through_gguf);
    RUN(added_tokens_behind_the_vocab_are_put);
    RUN(too_few_rows_are_refused);
    snprintf(command, sizeof command, "rm -r %s", folder);
    return test_report() | (system(command) != 0);
}
