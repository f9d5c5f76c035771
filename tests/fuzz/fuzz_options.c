/* fuzz_options.c - the trainer's command line, a line each, its config.json ("{...") or the metrics
 * of a run that is resumed ("m..."): understood, or refused with a message; never a crash.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _XOPEN_SOURCE 700
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static jmp_buf fuzz_ended;
static int fuzz_status;
static void fuzz_exit(int status) { fuzz_status = status; longjmp(fuzz_ended, 1); }

/* What the trainer had not freed when it ended, which in life the system does. */
static void *fuzz_kept[16];
static int fuzz_slot(const void *p) {
    int i = 0;
    while (i < 15 && fuzz_kept[i] != p) i++;
    return i;
}
static void *fuzz_realloc(void *p, size_t bytes) {
    int   slot = fuzz_slot(p);          /* an empty one, when p is NULL */
    void *now = realloc(p, bytes);
    if (now) fuzz_kept[slot] = now;
    return now;
}
static void fuzz_free(void *p) {
    int slot = fuzz_slot(p);
    if (fuzz_kept[slot] == p) fuzz_kept[slot] = NULL;
    free(p);
}
static void fuzz_clean(void) {
    for (int i = 0; i < 16; i++) fuzz_free(fuzz_kept[i]);
}

#define exit(status) fuzz_exit(status)
#define main trainer_main
#define realloc(p, bytes) fuzz_realloc(p, bytes)
#define free(p) fuzz_free(p)
#include "../../examples/trainer/trainer.c"
#undef main
#undef exit
#undef realloc
#undef free
#include "fuzz.h"

static char folder[64];

static void parse(int argc, char **argv) {
    static config c;
    if (setjmp(fuzz_ended) == 0) {
        read_options(&c, argc, argv);
        if (!c.help && !c.version) check_options(&c);
    } else EXPECT(fuzz_status == 1 || fuzz_status == 2);
    fuzz_clean();
}

static const char *in_fuzz_folder(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void remove_folder(void) {
    remove(in_fuzz_folder("config.json"));
    remove(in_fuzz_folder("metrics.jsonl"));
    rmdir(folder);
}

static void make_folder(void) {
    strcpy(folder, "/tmp/fuzz_options.XXXXXX");
    EXPECT(mkdtemp(folder) != NULL);
    EXPECT(atexit(remove_folder) == 0);
#ifndef FUZZ_EXPLORE        /* there, -close_fd_mask=2 silences the messages, thousands of them */
    EXPECT(freopen("/dev/null", "w", stderr) != NULL);
#endif
}

static void put_file(const char *path, const uint8_t *data, size_t size) {
    FILE *f = fopen(path, "wb");
    EXPECT(f && (!size || fwrite(data, 1, size, f) == size) && fclose(f) == 0);
}

static void try_config(const uint8_t *data, size_t size) {
    char name[] = "trainer", resume[] = "--resume", out[] = "--out", init[] = "--init";
    char  where[64];
    char *argv[5] = { name, resume, out, where, NULL };
    put_file(in_fuzz_folder("config.json"), data, size);
    snprintf(where, sizeof where, "%s", folder);
    parse(4, argv);
    argv[1] = init;                     /* of weights, perhaps GPT-2's */
    argv[2] = where;
    argv[3] = NULL;
    parse(3, argv);
    remove(in_fuzz_folder("config.json"));
}

/* What stays of the metrics are whole lines: headers, and steps that are done. */
static void try_metrics(const uint8_t *data, size_t size) {
    static run r;
    static char line[1 << 17];
    const char *path = in_fuzz_folder("metrics.jsonl");
    long long step;
    FILE *f;
    r.step = 20;
    put_file(path, data, size);
    if (setjmp(fuzz_ended) == 0) trim_metrics(&r, path, "{\"metrics\":\"mixprec\"}\n");
    fuzz_clean();
    f = fopen(path, "rb");
    EXPECT(f != NULL);
    while (fgets(line, sizeof line, f)) {
        EXPECT(line[strlen(line) - 1] == '\n');
        if (strncmp(line, "{\"metrics\":", 11) == 0) continue;
        EXPECT(sscanf(line, "{\"step\":%lld", &step) == 1 && step <= 20);
    }
    fclose(f);
}

static void try_command_line(const uint8_t *data, size_t size) {
    enum { MOST = 32 };
    static char text[4096];
    char *argv[MOST + 2], *p;
    int   argc = 1;
    argv[0] = text + sizeof text - 1;
    if (size > sizeof text - 2) size = sizeof text - 2;
    memcpy(text, data, size);
    text[size] = '\0';
    for (p = text; p < text + size && argc < MOST; p += strlen(p) + 1) {
        p[strcspn(p, "\n")] = '\0';
        argv[argc++] = p;
    }
    argv[argc] = NULL;
    parse(argc, argv);
}

static void fuzz_one(const uint8_t *data, size_t size) {
    if (!folder[0]) make_folder();
    if (size && data[0] == '{') try_config(data, size);
    else if (size && data[0] == 'm') try_metrics(data + 1, size - 1);
    else if (size) try_command_line(data, size);
}

static size_t fuzz_seed(int i, uint8_t *out) {
    static const char *const seeds[] = {
        "--steps\n20\n--dtype=fp16\n--lr\n1e-3", "--out\nx\n--resume\n--overwrite", "--preset\ngpt2\n--level=3",
        "--width=16\n--heads\n3", "--help", "--no-such\n1", "--betas=0.9,0.95\n--seed\n18446744073709551615",
        "{\n  \"width\": \"16\",\n  \"heads\": \"2\",\n  \"lr\": \"1e-3\"\n}\n",
        "{\"val-data\": \"\\u000a\\u0041x\", \"data\": \"t\"}",
        ("{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_head\": 2, \"n_embd\": 16, \"n_positions\": 12,\n"
         "\"vocab_size\": 29, \"layer_norm_epsilon\": 1e-05, \"vocabulary\": null}"),
        "{\"model_type\": \"gpt2\", \"n_layer\": \"2",
        "m{\"metrics\":\"mixprec\",\"version\":1}\n{\"step\":5,\"loss\":1.5}\n{\"step\":20,\"loss\":1}\n{\"step\":25}\n{\"st",
        "m{\"step\":\n2}\n{\"step\":\n" };      /* a number is not to be sought on the next line */
    if (i >= (int)(sizeof seeds / sizeof seeds[0])) return 0;
    memcpy(out, seeds[i], strlen(seeds[i]));
    return strlen(seeds[i]);
}
