/* test_checkpoint.c - safetensors files and checkpoints: round trips, golden bytes, every class of
 * malformed file, a fault in every system call, resume with equal bits.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * tests/files/test_checkpoint_stdio.c is this file with MIXPREC_NO_POSIX. For
 * tests/files/interop_safetensors.py:
 *   test_checkpoint --write FILE     writes a file that holds one tensor of each dtype
 *   test_checkpoint --read FILE      lists a file: name, dtype, shape, bytes in hexadecimal
 *   test_checkpoint --judge FILE...  a line for each: empty if it can be read, else the error
 */
#define _XOPEN_SOURCE 700
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "checkpoint/faults.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/malformed.h"
#include "checkpoint/system.h"
#include "checkpoint/resume.h"
#include "checkpoint/states.h"
#include "checkpoint/weights.h"

/* --- for the interop script ------------------------------------------------------------------- */

static int write_sample(const char *path) {
    static const char *const metadata[1][2] = { { "format", "pt" } };
    static unsigned char data[64];
    char name[N_TYPES][32], error[MIXP_MESSAGE_SIZE];
    mixp_st_entry e[N_TYPES];
    size_t i, n = 0;
    for (i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i + 1);
    for (i = 0; i < N_TYPES; i++) {     /* bool data must be 0 or 1, and numpy has no packed types */
        if (types[i].bits < 8 || strcmp(types[i].name, "BOOL") == 0) continue;
        snprintf(name[n], sizeof name[n], "a/%s \xC3\xA9\"\\\t", types[i].name);
        e[n] = entry(name[n], types[i].name, types[i].dtype, 2, 2, 3, data, 6 * types[i].bits / 8);
        n++;
    }
    if (mixp_safetensors_write(path, e, (int64_t)n, metadata, 1, error, MIXP_MESSAGE_SIZE) == MIXP_OK) return 0;
    printf("%s\n", error);
    return 1;
}

static int list_file(const char *path) {
    char error[MIXP_MESSAGE_SIZE];
    mixp_safetensors *f;
    if (mixp_safetensors_read(path, &f, error, MIXP_MESSAGE_SIZE) != MIXP_OK) { printf("%s\n", error); return 1; }
    for (int64_t i = 0; i < mixp_safetensors_count(f); i++) {
        const mixp_st_entry *e = mixp_safetensors_at(f, i);
        printf("%s|%s|", e->name, e->type);
        for (int64_t k = 0; k < e->rank; k++) printf(k ? ",%lld" : "%lld", (long long)e->shape[k]);
        printf("|");
        for (int64_t k = 0; k < (int64_t)e->bytes; k++) printf("%02x", ((const unsigned char *)e->data)[k]);
        printf("\n");
    }
    mixp_safetensors_free(f);
    return 0;
}

static int judge_files(int n, char **paths) {
    char error[MIXP_MESSAGE_SIZE];
    mixp_safetensors *f;
    for (int i = 0; i < n; i++) {
        mixp_safetensors_read(paths[i], &f, error, sizeof error);
        printf("%s\n", error);
        mixp_safetensors_free(f);
    }
    return 0;
}

/* Files are little-endian; other machines are told so, and write nothing. */
static int big_endian(void) {
    const uint16_t one = 1;
    return !*(const unsigned char *)&one;
}
static void test_big_endian_refused(void) {
    char error[MIXP_MESSAGE_SIZE];
    mixp_safetensors *file = NULL;
    CHECK_INT(mixp_safetensors_write("b", NULL, 0, NULL, 0, error, sizeof error), MIXP_ERR_DEVICE);
    CHECK_TEXT(error, "big-endian");
    CHECK_INT(mixp_safetensors_read("b", &file, error, sizeof error), MIXP_ERR_DEVICE);
    CHECK(file == NULL);
}

int main(int argc, char **argv) {
    static char folder[] = "/tmp/test_checkpoint.XXXXXX";
    char command[64];
    if (argc == 3 && strcmp(argv[1], "--write") == 0) return write_sample(argv[2]);
    if (argc == 3 && strcmp(argv[1], "--read") == 0) return list_file(argv[2]);
    if (argc > 2 && strcmp(argv[1], "--judge") == 0) return judge_files(argc - 2, argv + 2);
    if (argc == 2 && strcmp(argv[1], "--small-disk") == 0) return on_a_small_disk();
    if (!realpath(argv[0], program)) program[0] = '\0';
    if (!mkdtemp(folder) || chdir(folder) != 0) { printf("no temporary folder\n"); return 1; }
    if (big_endian()) { RUN(test_big_endian_refused); return test_report(); }
    RUN(test_golden_bytes);
    RUN(test_round_trip);
    RUN(test_write_refuses);
    RUN(test_malformed_rows);
    RUN(test_malformed_bytes);
    RUN(test_truncated);
    RUN(test_flipped);
    RUN(test_many_entries);
    RUN(test_deep_nesting);
    RUN(test_bad_paths);
    RUN(test_no_permission);
    RUN(test_real_disks);
    RUN(test_mode_and_links);
    RUN(test_fault_at_each_call);
    RUN(test_refused_niceties);
    RUN(test_fault_at_each_call_of_a_read);
    RUN(test_full_disk);
    RUN(test_out_of_memory_for_a_file);
    RUN(test_death_at_each_call);
    RUN(test_killed);
    RUN(test_in_pieces);
    RUN(test_short_messages);
    RUN(test_resume);
    RUN(test_resume_on_a_device);
    RUN(test_file_of_a_checkpoint);
    RUN(test_load_refuses);
    RUN(test_kinds);
    RUN(test_optimizers_in_another_order);
    RUN(test_kinds_in_the_file);
    RUN(test_of_another_cpu);
    RUN(test_load_of_two_metadata);
    RUN(test_load_looks_first);
    RUN(test_fault_at_each_call_of_a_load);
    RUN(test_values);
    RUN(test_save_refuses);
    RUN(test_between_step_and_update);
    RUN(test_between_micro_batches);
    RUN(test_a_parameter_called_spike);
    RUN(test_groups_with_anything);
    RUN(test_out_of_memory);
    RUN(test_weights);
    RUN(test_weights_left_alone);
    RUN(test_weights_of_a_checkpoint);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (chdir("/") != 0 || system(command) != 0) return 1;
    return test_report();
}
