/* fuzz_options.c - the trainer's command line, a line each, or its config.json: understood, or
 * refused with a message; never a crash.
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

#define exit(status) fuzz_exit(status)
#define main tiny_gpt_main
#include "../../examples/tiny_gpt.c"
#undef main
#undef exit
#include "fuzz.h"

static char folder[64];

static void parse(int argc, char **argv) {
    static config c;
    if (setjmp(fuzz_ended) == 0) {
        read_options(&c, argc, argv);
        if (!c.help && !c.version) check_options(&c);
    } else EXPECT(fuzz_status == 1 || fuzz_status == 2);
}

static void remove_folder(void) {
    char path[128];
    snprintf(path, sizeof path, "%s/config.json", folder);
    remove(path);
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

static void put_config(const uint8_t *data, size_t size) {
    char  path[128];
    FILE *f;
    snprintf(path, sizeof path, "%s/config.json", folder);
    f = fopen(path, "wb");
    EXPECT(f && (!size || fwrite(data, 1, size, f) == size) && fclose(f) == 0);
}

static void fuzz_one(const uint8_t *data, size_t size) {
    enum { MOST = 32 };
    static char text[4096];
    char *argv[MOST + 2], *p, *end, given[64];
    int   argc = 1;
    argv[0] = text + sizeof text - 1;
    if (!folder[0]) make_folder();
    if (size && data[0] == '{') {
        put_config(data, size);
        char resume[] = "--resume", out[] = "--out";
        snprintf(given, sizeof given, "%s", folder);
        argv[1] = resume;
        argv[2] = out;
        argv[3] = given;
        argv[4] = NULL;
        parse(4, argv);
        return;
    }
    if (size > sizeof text - 2) size = sizeof text - 2;
    memcpy(text, data, size);
    text[size] = '\0';
    for (p = text, end = text + size; p < end && argc < MOST; p += strlen(p) + 1) {
        p[strcspn(p, "\n")] = '\0';
        argv[argc++] = p;
    }
    argv[argc] = NULL;
    parse(argc, argv);
}

static size_t fuzz_seed(int i, uint8_t *out) {
    static const char *const seeds[] = {
        "--steps\n20\n--dtype=fp16\n--lr\n1e-3", "--out\nx\n--resume\n--overwrite", "--preset\ngpt2\n--level=3",
        "--width=16\n--heads\n3", "--help", "--no-such\n1", "--betas=0.9,0.95\n--seed\n18446744073709551615",
        "{\n  \"width\": \"16\",\n  \"heads\": \"2\",\n  \"lr\": \"1e-3\"\n}\n",
        "{\"prompt\": \"\\u000a\\u0041x\", \"data\": \"t\"}" };
    if (i >= (int)(sizeof seeds / sizeof seeds[0])) return 0;
    memcpy(out, seeds[i], strlen(seeds[i]));
    return strlen(seeds[i]);
}
