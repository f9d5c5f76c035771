/* test_gpt2.c - GPT-2's files in the trainer: it reads weights of transformers, and writes weights
 * for transformers.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *   test_gpt2                       compares with logits from transformers (reference/gpt2.h)
 *   test_gpt2 --logits DIR ID...    prints the logits of all tokens, for interop_gpt2.py
 *   test_gpt2 --run ARGUMENT...     runs trainer
 */
#define _XOPEN_SOURCE 700
#define main trainer_main
#include "../../examples/trainer/trainer.c"
#undef main
#include <sys/wait.h>
#include "test.h"
#include "reference/generate.h"
#include "reference/gpt2.h"

enum { W = GPT2_WIDTH, ROWS = GPT2_BATCH * GPT2_LENGTH, MOST_ENTRIES = 48, MOST_VALUES = 1 << 14 };

/* A file of GPT-2's weights before it is written. */
typedef struct made {
    mixp_st_entry e[MOST_ENTRIES];
    char          names[MOST_ENTRIES][64];
    float         values[MOST_VALUES];
    double        bytes[MOST_VALUES];   /* values in the file's dtype */
    int64_t       n, used;
    uint32_t      numbers;
} made;

static made file_made;
static char folder[64];

static const char *in_folder_of_test(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* Those of weights() in reference/record_gpt2.py. */
static void put(made *f, const char *name, int64_t rows, int64_t cols) {
    mixp_st_entry *e = &f->e[f->n];
    int64_t        count = rows * (cols ? cols : 1);
    float         *values = f->values + f->used;
    snprintf(f->names[f->n], sizeof f->names[0], "%s", name);
    e->name = f->names[f->n++];
    e->dtype = MIXP_F32;
    e->rank = cols ? 2 : 1;
    e->shape[0] = rows;
    e->shape[1] = cols;
    e->data = values;
    e->bytes = (size_t)count * sizeof *values;
    gen_short(&f->numbers, values, (int)count);
    for (int64_t i = 0; i < count; i++) values[i] /= 2;
    f->used += count;
}

static void put_layer_of(made *f, int index, const char *name, int64_t rows, int64_t cols) {
    char full[64];
    snprintf(full, sizeof full, "h.%d.%s.weight", index, name);
    put(f, full, rows, cols);
    snprintf(full, sizeof full, "h.%d.%s.bias", index, name);
    put(f, full, cols ? cols : rows, 0);
}

static made *make_file(void) {
    made *f = &file_made;
    memset(f, 0, sizeof *f);
    f->numbers = gen_start(7);
    put(f, "wte.weight", GPT2_VOCAB, W);
    put(f, "wpe.weight", GPT2_POSITIONS, W);
    for (int i = 0; i < GPT2_LAYERS; i++) {
        put_layer_of(f, i, "ln_1", W, 0);
        put_layer_of(f, i, "attn.c_attn", W, 3 * W);
        put_layer_of(f, i, "attn.c_proj", W, W);
        put_layer_of(f, i, "ln_2", W, 0);
        put_layer_of(f, i, "mlp.c_fc", W, 4 * W);
        put_layer_of(f, i, "mlp.c_proj", 4 * W, W);
    }
    put(f, "ln_f.weight", W, 0);
    put(f, "ln_f.bias", W, 0);
    return f;
}

static mixp_st_entry *entry_of(made *f, const char *name) {
    for (int64_t i = 0; i < f->n; i++)
        if (strcmp(f->e[i].name, name) == 0) return &f->e[i];
    return NULL;
}

static void add_prefix(made *f) {
    for (int64_t i = 0; i < f->n; i++) {
        char name[64];
        memcpy(name, f->names[i], sizeof name);
        snprintf(f->names[i], sizeof f->names[i], "transformer.%.50s", name);
    }
}

static void in_dtype(made *f, mixp_dtype dtype) {
    char *to = (char *)f->bytes;
    for (int64_t i = 0; i < f->n; i++) {
        int64_t count = (int64_t)(f->e[i].bytes / sizeof(float));
        CHECK_INT(mixp_convert(to, dtype, f->e[i].data, MIXP_F32, count), MIXP_OK);
        f->e[i].dtype = dtype;
        f->e[i].data = to;
        f->e[i].bytes = (size_t)count * mixp_dtype_size(dtype);
        to += (f->e[i].bytes + 7) & ~(size_t)7;
    }
}

/* As nanoGPT has linear layers: [out, in]. */
static void in_rows_and_columns(made *f) {
    float *to = (float *)f->bytes;
    for (int64_t i = 0; i < f->n; i++) {
        mixp_st_entry *e = &f->e[i];
        int64_t        rows = e->shape[0], cols = e->shape[1];
        if (e->rank != 2 || !strstr(e->name, "h.")) continue;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++)
                to[c * rows + r] = ((const float *)e->data)[r * cols + c];
        e->data = to;
        e->shape[0] = cols;
        e->shape[1] = rows;
        to += rows * cols;
    }
}

/* The config.json, with more keys or others behind those that are always there. */
static void write_json(const char *more) {
    FILE *f = fopen(in_folder_of_test("config.json"), "w");
    if (!f) { CHECK(f != NULL); return; }
    fprintf(f, "{\"model_type\": \"gpt2\",\n \"n_layer\": %d, \"n_head\": %d, \"n_embd\": %d,"
               " \"n_positions\": %d,\n \"vocab_size\": %d%s}\n",
            GPT2_LAYERS, GPT2_HEADS, W, GPT2_POSITIONS, GPT2_VOCAB, more);
    CHECK(fclose(f) == 0);
}

static void write_file(const made *f, const char *more) {
    static const char *const pairs[][2] = {{"format", "pt"}};
    char error[MIXP_MESSAGE_SIZE] = "";
    CHECK_INT(mixp_safetensors_write(in_folder_of_test("model.safetensors"), f->e, f->n, pairs, 1,
                                     error, sizeof error), MIXP_OK);
    write_json(more);
}

/* What a command line makes of itself, ready to compute. */
static void open_trainer(trainer *t, int argc, char **argv) {
    memset(t, 0, sizeof *t);
    t->run.lock = -1;
    t->program = "trainer";
    read_options(&t->c, argc, argv);
    prepare(t);
}

/* A command line, split at its spaces, into argv with room for 32. */
static int split(char *line, char **argv) {
    int argc = 0;
    for (char *p = strtok(line, " "); p && argc < 31; p = strtok(NULL, " ")) argv[argc++] = p;
    argv[argc] = NULL;
    return argc;
}

#define INIT "trainer --init %s --steps 0 --dtype fp32 --device cpu --threads 1 "

static void open_folder_of_test(trainer *t, const char *more) {
    static char line[512], *argv[32];
    snprintf(line, sizeof line, INIT "%s", folder, more);
    open_trainer(t, split(line, argv), argv);
}

static void logits_of(trainer *t, const int32_t *ids, int64_t batch, int64_t length, float *out) {
    int64_t      shape[2] = {batch, length};
    mixp_tensor *y = NULL;
    mixp_step_begin(t->ctx);
    MIXP_NO_GRAD(t->ctx) {
        y = gpt_logits(&t->model, mixp_input(t->ctx, MIXP_I32, 2, shape, ids), 0, 0);
        CHECK(y && mixp_read(y, out, MIXP_F32, y->count) == MIXP_OK);
    }
}

static void expect_logits(const double *want, const char *more) {
    trainer  t;
    uint32_t numbers = gen_start(8);
    int32_t  ids[ROWS];
    float    got[ROWS * GPT2_VOCAB] = {0};
    gen_ints(&numbers, GPT2_VOCAB, ids, ROWS);
    open_folder_of_test(&t, more);
    logits_of(&t, ids, GPT2_BATCH, GPT2_LENGTH, got);
    for (int i = 0; i < ROWS * GPT2_VOCAB; i++) CHECK_NEAR(got[i], want[i], 2e-5);
    free_trainer(&t);
}

static void gpt2_has_the_logits_of_transformers(void) {
    static const mixp_dtype dtypes_of_files[] = {MIXP_F32, MIXP_F16, MIXP_BF16, MIXP_F64};
    for (int i = 0; i < 4; i++) {
        made *f = make_file();
        if (i % 2) add_prefix(f);
        in_dtype(f, dtypes_of_files[i]);
        write_file(f, ", \"activation_function\": \"gelu_new\", \"layer_norm_epsilon\": 1e-05");
        expect_logits(gpt2_logits_gelu_new, "");
    }
}

static void name_with(made *f, const char *prefix) {
    for (int64_t i = 0; i < f->n; i++) {
        char name[64];
        memcpy(name, f->names[i], sizeof name);
        snprintf(f->names[i], sizeof f->names[i], "%s%.36s", prefix, name);
    }
}

/* What DistributedDataParallel and torch.compile put before the names. */
static void gpt2_is_read_behind_prefixes(void) {
    static const char *const prefixes[] = {"module.", "_orig_mod.", "module.transformer.", "_orig_mod.transformer.",
                                           "_orig_mod.module.", "model.transformer."};
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
        made *f = make_file();
        name_with(f, prefixes[i]);
        write_file(f, "");
        expect_logits(gpt2_logits_gelu_new, "");
    }
}

static void gpt2_knows_both_kinds_of_gelu(void) {
    write_file(make_file(), ", \"activation_function\": \"gelu\", \"n_inner\": null");
    expect_logits(gpt2_logits_gelu, "");
    write_file(make_file(), "");
    expect_logits(gpt2_logits_gelu_new, "");
}

static void gpt2_is_read_as_nanogpt_keeps_it(void) {
    made *f = make_file();
    in_rows_and_columns(f);
    write_file(f, "");
    expect_logits(gpt2_logits_gelu_new, "");
}

/* Of positions the first ones do. */
static void gpt2_may_have_a_shorter_block(void) {
    write_file(make_file(), "");
    expect_logits(gpt2_logits_gelu_new, "--block 8");
}

static void put_mask(made *f) {
    static unsigned char ones[GPT2_POSITIONS * GPT2_POSITIONS];
    mixp_st_entry       *e = &f->e[f->n];
    e->name = "h.0.attn.bias";
    e->type = "BOOL";
    e->dtype = MIXP_DTYPE_COUNT;
    e->rank = 4;
    e->shape[0] = e->shape[1] = 1;
    e->shape[2] = e->shape[3] = GPT2_POSITIONS;
    e->data = ones;
    e->bytes = sizeof ones;
    f->n++;
}

static void gpt2_masks_and_a_tied_head_are_passed_over(void) {
    made *f = make_file();
    put_mask(f);
    put(f, "lm_head.weight", GPT2_VOCAB, W);
    f->e[f->n - 1].data = entry_of(f, "wte.weight")->data;
    write_file(f, "");
    expect_logits(gpt2_logits_gelu_new, "");
}

static void gpt2_may_have_a_head_of_its_own(void) {
    made   *f = make_file();
    trainer t;
    float   head[GPT2_VOCAB * W];
    put(f, "lm_head.weight", GPT2_VOCAB, W);
    write_file(f, ", \"tie_word_embeddings\": false");
    open_folder_of_test(&t, "");
    CHECK(t.model.head != t.model.tokens);
    CHECK_INT(mixp_read(t.model.head, head, MIXP_F32, GPT2_VOCAB * W), MIXP_OK);
    CHECK(memcmp(head, f->e[f->n - 1].data, sizeof head) == 0);
    free_trainer(&t);
}

/* Runs trainer in a process of its own; its exit status, and what it wrote to stderr. */
static int run_apart(char *line, char *said, size_t space) {
    char  *argv[32];
    int    status = -1, argc = split(line, argv);
    FILE  *f;
    size_t n = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen(in_folder_of_test("said"), "w", stderr)) _exit(99);
        if (!freopen("/dev/null", "w", stdout)) _exit(99);
        exit(trainer_main(argc, argv));
    }
    waitpid(child, &status, 0);
    f = fopen(in_folder_of_test("said"), "r");
    if (f) n = fread(said, 1, space - 1, f);
    said[n] = '\0';
    if (f) fclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void expect_refusal(const char *text) {
    char said[1024], line[512];
    snprintf(line, sizeof line, INIT, folder);
    CHECK_INT(run_apart(line, said, sizeof said), 1);
    CHECK_TEXT(said, text);
}

static void gpt2_of_another_kind_is_refused(void) {
    made *f = make_file();
    write_file(f, ", \"layer_norm_epsilon\": 1e-06");
    expect_refusal("layer_norm_epsilon is 1e-06, and the trainer's GPT-2 has 1e-5 only");
    write_json(", \"scale_attn_by_inverse_layer_idx\": true");
    expect_refusal("scale_attn_by_inverse_layer_idx is true");
    write_json(", \"scale_attn_weights\": false");
    expect_refusal("scale_attn_weights is false");
    write_json(", \"n_inner\": 40");
    expect_refusal("n_inner is 40");
    write_json(", \"logit_softcapping\": 30.0");
    expect_refusal("logit_softcapping is 30.0, and this program does not know that key");
    write_json(", \"add_cross_attention\": true");
    expect_refusal("add_cross_attention is true, and this program does not know that key");
    write_json(", \"activation_function\": \"relu\"");
    expect_refusal("activation_function is relu, and the trainer has gelu and gelu_new");
    write_json(", \"tie_word_embeddings\": false");
    expect_refusal("lacks lm_head.weight, which this model has");
}

static void gpt2_that_does_not_fit_is_refused(void) {
    made *f = make_file();
    f->n--;
    write_file(f, "");
    expect_refusal("model.safetensors lacks transformer.ln_f.bias, which this model has");
    f = make_file();
    put_layer_of(f, GPT2_LAYERS, "ln_1", W, 0);
    write_file(f, "");
    expect_refusal("h.2.ln_1.bias has no place in this model: check --layers");
    f = make_file();
    put(f, "lm_head.weight", GPT2_VOCAB, W);
    write_file(f, "");
    expect_refusal("lm_head.weight has no place in this model: check --layers, --bias and --head");
    f = make_file();
    entry_of(f, "h.1.mlp.c_fc.bias")->shape[0] = 2 * W;
    entry_of(f, "h.1.mlp.c_fc.bias")->bytes /= 2;
    write_file(f, "");
    expect_refusal("h.1.mlp.c_fc.bias is [32, 1], which does not fit this model's [64, 1]");
    f = make_file();
    entry_of(f, "ln_f.bias")->dtype = MIXP_I32;
    write_file(f, "");
    expect_refusal("ln_f.bias is of dtype I32, and weights are");
}

static void gpt2_with_half_a_config_is_refused(void) {
    FILE *f;
    write_file(make_file(), "");
    f = fopen(in_folder_of_test("config.json"), "w");
    CHECK(f && fputs("{\"model_type\": \"gpt2\", \"n_layer\": 2", f) >= 0 && fclose(f) == 0);
    expect_refusal("config.json is not whole: its JSON is malformed in line 1");
    f = fopen(in_folder_of_test("config.json"), "w");
    CHECK(f && fputs("{\"model_type\":\"gpt2\",\"n_layer\":2}", f) >= 0 && fclose(f) == 0);
    expect_refusal("has no n_head: use the one of the weights");
    f = fopen(in_folder_of_test("config.json"), "w");
    CHECK(f && fputs("{\"model_type\":\"llama\",\"n_layer\":2}", f) >= 0 && fclose(f) == 0);
    expect_refusal("config.json is neither the config.json of a run nor that of a GPT-2 model");
}

/* What is written has GPT-2's layout, and is read back to the bit. */
static void gpt2_is_written_as_it_was_read(void) {
    made             *f = make_file();
    trainer           t;
    mixp_safetensors *back = NULL;
    char              error[MIXP_MESSAGE_SIZE] = "", line[128];
    add_prefix(f);
    write_file(f, ", \"activation_function\": \"gelu\"");
    snprintf(line, sizeof line, "--quiet --export %s/written", folder);
    open_folder_of_test(&t, line);
    export_weights(&t);
    free_trainer(&t);
    CHECK_INT(mixp_safetensors_read(in_folder_of_test("written/model.safetensors"), &back, error,
                                    sizeof error), MIXP_OK);
    CHECK_INT(mixp_safetensors_count(back), f->n);
    for (int64_t i = 0; i < f->n; i++) {
        const mixp_st_entry *e = mixp_safetensors_find(back, f->e[i].name);
        CHECK(e && e->rank == f->e[i].rank && e->bytes == f->e[i].bytes);
        CHECK(e && memcmp(e->shape, f->e[i].shape, (size_t)e->rank * sizeof *e->shape) == 0);
        CHECK(e && memcmp(e->data, f->e[i].data, e->bytes) == 0);
    }
    CHECK_TEXT(mixp_safetensors_metadata(back, "format"), "pt");
    mixp_safetensors_free(back);
    strcat(folder, "/written");
    expect_logits(gpt2_logits_gelu, "");
    *strrchr(folder, '/') = '\0';
}

/* Trains on a text without biases, writes it, and reads it: the same logits, the same alphabet. */
static void gpt2_of_a_text_keeps_its_alphabet(void) {
    static const char form[] =
        "trainer --data %s/text --steps 3 --layers 2 --heads 2 --width 8 --block 8 "
        "--eval-batches 1 --threads 1 --device cpu --export %s/of_text";
    char    said[1024], line[512];
    trainer t;
    FILE   *f;
    f = fopen(in_folder_of_test("text"), "w");
    for (int i = 0; f && i < 200; i++) fputs("the fox jumps. ", f);
    CHECK(f && fclose(f) == 0);
    for (int again = 0; again < 2; again++) {
        snprintf(line, sizeof line, form, folder, folder);
        CHECK_INT(run_apart(line, said, sizeof said), again);
    }
    CHECK_TEXT(said, "model.safetensors is there already: name another --export");
    strcat(folder, "/of_text");
    open_folder_of_test(&t, "");
    CHECK_INT(t.data.rows, 13);
    CHECK(t.data.is_text && t.data.id_of_byte['x'] >= 0 && t.data.id_of_byte['z'] < 0);
    CHECK_INT(t.c.activation, ACTIVATION_GELU);
    CHECK(t.model.blocks[0].up.b != NULL);
    free_trainer(&t);
    *strrchr(folder, '/') = '\0';
}

static void clean_folder(void) {
    static const char *const names[] = {"config.json", "model.safetensors", "said", "text",
        "written/config.json", "written/model.safetensors", "written", "of_text/config.json",
        "of_text/model.safetensors", "of_text"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) remove(in_folder_of_test(names[i]));
    rmdir(folder);
}

/* The logits of each token, a line a number. */
static int print_logits(int argc, char **argv) {
    trainer t;
    int32_t ids[64];
    int     n = argc - 3;
    float  *out;
    if (n < 1 || n > 64) return 2;
    snprintf(folder, sizeof folder, "%s", argv[2]);
    for (int i = 0; i < n; i++) ids[i] = (int32_t)atol(argv[3 + i]);
    open_folder_of_test(&t, "");
    out = (float *)calloc((size_t)n * (size_t)t.data.rows, sizeof *out);
    if (!out) return 1;
    logits_of(&t, ids, 1, n, out);
    for (int64_t i = 0; i < n * t.data.rows; i++) printf("%.9g\n", (double)out[i]);
    free(out);
    free_trainer(&t);
    return test_bad != 0;
}

/* The entries first .. first + n of a model, in a file of its own. */
static void write_shard(const made *f, const char *name, int64_t first, int64_t n) {
    static const char *const pairs[][2] = {{"format", "pt"}};
    char error[MIXP_MESSAGE_SIZE] = "";
    CHECK_INT(mixp_safetensors_write(in_folder_of_test(name), f->e + first, n, pairs, 1, error,
                                     sizeof error), MIXP_OK);
}

/* The index that `transformers` writes beside them; `two`: how the second file is named. */
static void write_index(const made *f, int64_t first, const char *two) {
    FILE *file = fopen(in_folder_of_test("model.safetensors.index.json"), "w");
    if (!file) { CHECK(file != NULL); return; }
    fprintf(file, "{\n  \"metadata\": {\"total_size\": 1},\n  \"weight_map\": {\n");
    for (int64_t i = 0; i < f->n; i++)
        fprintf(file, "    \"%s\": \"%s\"%s\n", f->e[i].name, i < first ? "one.safetensors" : two,
                i + 1 < f->n ? "," : "");
    fprintf(file, "  }\n}\n");
    CHECK(fclose(file) == 0);
}

static void write_text(const char *name, const char *text) {
    FILE *file = fopen(in_folder_of_test(name), "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void gpt2_of_many_files_is_read(void) {
    made *f = make_file();
    write_json(", \"activation_function\": \"gelu_new\"");
    remove(in_folder_of_test("model.safetensors"));
    write_shard(f, "one.safetensors", 0, 9);
    write_shard(f, "two.safetensors", 9, f->n - 9);
    write_index(f, 9, "two.safetensors");
    expect_logits(gpt2_logits_gelu_new, "");
    write_index(f, 9, "three.safetensors");
    expect_refusal("three.safetensors");
    write_index(f, 9, "../two.safetensors");
    expect_refusal("names ../two.safetensors, which is not a file in the same folder");
    write_index(f, f->n, "");
    expect_refusal("its weight_map has h.0.ln_2.bias, and no file that it names holds this tensor");
    write_text("model.safetensors.index.json", "{\"weight_map\": {\"a\": 3}}");
    expect_refusal("is malformed in its weight_map");
    write_text("model.safetensors.index.json", "{\"weight_map\": {}}");
    expect_refusal("names no tensor");
    write_text("model.safetensors.index.json", "{}");
    expect_refusal("it has no weight_map");
    remove(in_folder_of_test("model.safetensors.index.json"));
    remove(in_folder_of_test("one.safetensors"));
    remove(in_folder_of_test("two.safetensors"));
}

/* Token by token, with keys and values kept, as all at once: in pieces of 1, 2, 3... tokens. */
static void check_cache(const char *form, double tolerance) {
    trainer  t;
    char     line[512], *argv[32];
    int32_t  ids[16];
    float    whole[64], pieces[64];
    snprintf(line, sizeof line, "trainer --data %s/text --layers 2 --heads 2 --width 16 --block 16 "
             "--steps 0 --seed 5 --device cpu --threads 1 --quiet %s", folder, form);
    open_trainer(&t, split(line, argv), argv);
    kv_cache cache = make_cache(&t);
    CHECK(t.data.rows <= 64);
    for (int i = 0; i < 16; i++) ids[i] = (int32_t)(i * 7 % t.data.rows);
    for (int64_t n = 1, step = 1; n <= 16; n += step, step = step % 4 + 1) {
        double worst = 0, largest = 0;
        next_logits(&t, ids, n, whole);
        sample_logits(&t, &cache, ids, n, pieces);
        CHECK_INT(cache.past, n);
        for (int64_t k = 0; k < t.data.rows; k++) {
            worst = fmax(worst, fabs((double)whole[k] - (double)pieces[k]));
            largest = fmax(largest, fabs((double)whole[k]));
        }
        if (!(worst <= tolerance * largest)) TEST_SHOW("%s, %lld: %g of %g", form, (long long)n, worst, largest);
        CHECK(worst <= tolerance * largest && largest > 0);
    }
    free(cache.k);
    free(cache.v);
    free_trainer(&t);
}

static void samples_keep_keys_and_values(void) {
    FILE *f = fopen(in_folder_of_test("text"), "w");
    for (int i = 0; f && i < 60; i++) fprintf(f, "the quick brown fox %d jumps\n", i);
    CHECK(f && fclose(f) == 0);
    check_cache("--dtype fp32", 2e-6);
    check_cache("--dtype fp32 --bias on --activation gelu-tanh", 2e-6);
    check_cache("--dtype fp32 --preset modern --zero-init off", 2e-6);
    check_cache("--dtype fp32 --qk-norm on", 2e-6);
    check_cache("--dtype fp16", 4e-3);
    check_cache("--dtype bf16 --level 2 --positions rope", 3e-2);
    remove(in_folder_of_test("text"));
}

/* Tokens with probabilities 0.1, 0.4, 0.2 and 0.3: how often each is drawn of 4000 times. */
static void draw(double top_p, int64_t top_k, int counts[4]) {
    static const float share[4] = {0.1f, 0.4f, 0.2f, 0.3f};
    float              logits[4], spare[4];
    const choosing     c = {1, top_p, top_k, 0, STREAM_SAMPLE};
    memset(counts, 0, 4 * sizeof counts[0]);
    for (int i = 0; i < 4; i++) logits[i] = logf(share[i]) + 3;
    for (int64_t i = 0; i < 4000; i++) counts[choose(&c, logits, spare, 4, i)]++;
}

static void likely_tokens_are_drawn(void) {
    int n[4];
    draw(1, 0, n);
    CHECK_NEAR(n[0], 400, 100);
    CHECK_NEAR(n[1], 1600, 150);
    draw(0.6, 0, n);                    /* 0.4 + 0.3 */
    CHECK_INT(n[0] + n[2], 0);
    CHECK_NEAR(n[1], 4000 * 4 / 7, 150);
    draw(0.75, 0, n);                   /* 0.4 + 0.3 + 0.2 */
    CHECK_INT(n[0], 0);
    CHECK_NEAR(n[2], 4000 * 2 / 9, 150);
    draw(0.39, 0, n);
    CHECK_INT(n[1], 4000);
    draw(0.6, 3, n);                    /* of 0.9: 0.4 is not 0.54, 0.7 is */
    CHECK_INT(n[0] + n[2], 0);
    draw(0.4, 2, n);                    /* of 0.7: 0.4 is 0.28 and more */
    CHECK_INT(n[1], 4000);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--run") == 0) return trainer_main(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "--logits") == 0) return print_logits(argc, argv);
    strcpy(folder, "/tmp/test_gpt2.XXXXXX");
    if (!mkdtemp(folder)) return 1;
    RUN(gpt2_has_the_logits_of_transformers);
    RUN(gpt2_is_read_behind_prefixes);
    RUN(gpt2_knows_both_kinds_of_gelu);
    RUN(gpt2_is_read_as_nanogpt_keeps_it);
    RUN(gpt2_may_have_a_shorter_block);
    RUN(gpt2_masks_and_a_tied_head_are_passed_over);
    RUN(gpt2_may_have_a_head_of_its_own);
    RUN(gpt2_of_another_kind_is_refused);
    RUN(gpt2_that_does_not_fit_is_refused);
    RUN(gpt2_with_half_a_config_is_refused);
    RUN(gpt2_is_written_as_it_was_read);
    RUN(gpt2_of_a_text_keeps_its_alphabet);
    RUN(gpt2_of_many_files_is_read);
    RUN(samples_keep_keys_and_values);
    clean_folder();
    RUN(likely_tokens_are_drawn);
    return test_report();
}
