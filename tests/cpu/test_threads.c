/* test_threads.c - mixprec's own threads (MIXPREC_THREADS): every task runs once, the bits are
 * those of one thread, across fork, and with fewer threads than requested. The default number obeys
 * the affinity mask and a container's quota. Works with -fsanitize=thread.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* The system gives so many threads and no more; negative: any number. */
static int threads_left = -1;
static int create_thread(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg) {
    if (threads_left == 0) return 11;   /* EAGAIN */
    if (threads_left > 0) threads_left--;
    return pthread_create(thread, attr, run, arg);
}
#define pthread_create create_thread

/* The files of a container: the end of a path, and the text. */
typedef struct quota_file {
    const char *end, *text;
} quota_file;
static quota_file quota_files[2];

static FILE *open_quota(const char *path, const char *mode) {
    FILE *f = NULL;
    int i;
    if (strncmp(path, "/sys/fs/cgroup/", 15) != 0) return fopen(path, mode);
    for (i = 0; i < 2 && !f; i++)
        if (quota_files[i].end && strstr(path, quota_files[i].end)) f = tmpfile();
    if (!f) return NULL;
    fputs(quota_files[i - 1].text, f);
    rewind(f);
    return f;
}
#define fopen open_quota

#undef MIXPREC_IMPLEMENTATION_DONE
#ifndef MIXPREC_THREADS
#  define MIXPREC_THREADS
#endif
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#undef pthread_create
#undef fopen
#include <sys/wait.h>
#include "test.h"
#include "shared_work.h"

enum { TASKS = 300 };
static const int counts[] = { 1, 2, 3, 8, 16 };
enum { COUNTS = sizeof counts / sizeof *counts };

/* Its work is shared however small. */
static mixp_context *context_with(int threads) {
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.seed = 7;
    mixp_context *ctx = mixp_context_new(&d);
    share_all_work(ctx);
    return ctx;
}

typedef struct tally {
    int done[TASKS];            /* by index: one worker writes each */
    int worker_wrong, threads;
} tally;

static void count_task(void *arg, int64_t i, int worker) {
    tally *t = (tally *)arg;
    t->done[i]++;
    if (worker < 0 || worker >= t->threads) t->worker_wrong = 1;
}

static int each_once(mixp_context *ctx, int64_t tasks) {
    const mixp_exec *x = mixp_context_exec(ctx);
    static tally t;
    int i, wrong = 0;
    memset(&t, 0, sizeof t);
    t.threads = x->threads;
    x->parallel(x->user, tasks, count_task, &t);
    for (i = 0; i < TASKS; i++) wrong += t.done[i] != (i < tasks);
    return !wrong && !t.worker_wrong;
}

static void every_task_once(void) {
    int c, round, bad = 0;
    for (c = 1; c < COUNTS; c++) {
        mixp_context *ctx = context_with(counts[c]);
        CHECK_INT(mixp_context_exec(ctx)->threads, counts[c]);
        for (round = 0; round < 400; round++) bad += !each_once(ctx, 1 + round % TASKS);
        mixp_context_free(ctx);
    }
    CHECK_INT(bad, 0);
}

static void freed_before_any_loop(void) {
    mixp_context_free(context_with(4));
}

/* Three steps of a small network, large enough to be cut; its weights and loss as bytes. */
enum { WIDTH = 160, ROWS = 96, BYTES = WIDTH * WIDTH + WIDTH + 1 };

static void train(mixp_context *ctx, float *result) {
    static const int64_t w_shape[2] = { WIDTH, WIDTH }, b_shape[1] = { WIDTH }, x_shape[2] = { ROWS, WIDTH };
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, w_shape), *loss = NULL;
    mixp_tensor *b = mixp_param(ctx, "b", MIXP_F32, 1, b_shape);
    static float x[ROWS * WIDTH];
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = (float)(i * 37 % 101 - 50) / 40;
    mixp_init_normal(w, 0, 0.1);
    mixp_fill(b, 0);
    mixp_optimizer_add(opt, w, NULL);
    mixp_optimizer_add(opt, b, NULL);
    for (int step = 0; step < 3; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, step % 2 ? MIXP_BF16 : MIXP_F16) {
            mixp_tensor *in = mixp_input(ctx, MIXP_F32, 2, x_shape, x);
            mixp_tensor *y = mixp_gelu(ctx, mixp_linear(ctx, in, w, b));
            y = mixp_layer_norm(ctx, mixp_dropout(ctx, y, 0.1f, 1), NULL, NULL, 1e-5f);
            loss = mixp_mse(ctx, mixp_softmax(ctx, y), in);
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_read(w, result, MIXP_F32, WIDTH * WIDTH);
    mixp_read(b, result + WIDTH * WIDTH, MIXP_F32, WIDTH);
    result[BYTES - 1] = (float)mixp_item(loss);
}

static float alone[BYTES], got[BYTES];

static void train_alone(void) {
    mixp_context *ctx = context_with(1);
    train(ctx, alone);
    mixp_context_free(ctx);
}

static int same_as_alone(int threads) {
    mixp_context *ctx = context_with(threads);
    train(ctx, got);
    mixp_context_free(ctx);
    return memcmp(got, alone, sizeof got) == 0;
}

static void same_bits_at_any_count(void) {
    train_alone();
    CHECK(alone[0] != 0 && alone[BYTES - 1] > 0);
    for (int c = 1; c < COUNTS; c++) CHECK(same_as_alone(counts[c]));
}

static void fewer_threads_than_asked(void) {
    train_alone();
    threads_left = 2;
    CHECK(same_as_alone(8));
    threads_left = 0;
    CHECK(same_as_alone(8));
    threads_left = -1;
}

#ifdef __linux__
static int threads_of(int asked) {
    mixp_context *ctx = context_with(asked);
    int threads = mixp_context_exec(ctx)->threads;
    mixp_context_free(ctx);
    return threads;
}

static int threads_with(const char *end, const char *text, const char *next_end, const char *next_text) {
    quota_files[0].end = end;
    quota_files[0].text = text;
    quota_files[1].end = next_end;
    quota_files[1].text = next_text;
    return threads_of(0);
}

static void quota_limits_the_default(void) {
    const int cores = threads_of(0), two = cores < 2 ? cores : 2;
    CHECK_INT(threads_with("/cpu.max", "max 100000\n", NULL, NULL), cores);
    CHECK_INT(threads_with("/cpu.max", "100000 100000\n", NULL, NULL), 1);
    CHECK_INT(threads_with("/cpu.max", "25000 50000\n", NULL, NULL), 1);
    CHECK_INT(threads_with("/cpu.max", "150000 100000\n", NULL, NULL), two);
    CHECK_INT(threads_with("/cpu.max", "900000000 100000\n", NULL, NULL), cores);
    CHECK_INT(threads_with("/cpu.max", "", NULL, NULL), cores);
    CHECK_INT(threads_with("_quota_us", "-1\n", "_period_us", "100000\n"), cores);
    CHECK_INT(threads_with("_quota_us", "60000\n", "_period_us", "100000\n"), 1);
    CHECK_INT(threads_with("_quota_us", "60000\n", NULL, NULL), cores);
    CHECK_INT(threads_with("/cpu.max", "100000 100000\n", NULL, NULL), 1);
    CHECK_INT(threads_of(3), 3);
    memset(quota_files, 0, sizeof quota_files);
}

/* Leaves the process one core, then gives back all. */
static void mask_limits_the_default(void) {
    unsigned char all[1024], one[1024];
    const int cores = threads_of(0);
    int core = 0;
    memset(all, 0, sizeof all);
    memset(one, 0, sizeof one);
    long bytes = syscall(SYS_sched_getaffinity, 0L, sizeof all, all);
    CHECK(bytes > 0);
    while (!(all[core / 8] >> core % 8 & 1)) core++;
    one[core / 8] = (unsigned char)(1 << core % 8);
    CHECK_INT(syscall(SYS_sched_setaffinity, 0L, (size_t)bytes, one), 0);
    CHECK_INT(threads_of(0), 1);
    CHECK_INT(threads_of(2), 2);
    CHECK_INT(syscall(SYS_sched_setaffinity, 0L, (size_t)bytes, all), 0);
    CHECK_INT(threads_of(0), cores);
}
#else
static void quota_limits_the_default(void) { SKIP("only Linux has quotas"); }
static void mask_limits_the_default(void) { SKIP("only Linux has affinity masks"); }
#endif

static void *count_beside(void *arg) {
    mixp_context *ctx = context_with(3);
    const mixp_exec *x = mixp_context_exec(ctx);
    tally *t = (tally *)arg;
    t->threads = x->threads;
    for (int round = 0; round < 200; round++) x->parallel(x->user, TASKS, count_task, t);
    mixp_context_free(ctx);
    return NULL;
}

static void contexts_in_threads(void) {
    static tally t[2];
    pthread_t other[2];
    int i, k, wrong = 0;
    memset(t, 0, sizeof t);
    for (i = 0; i < 2; i++) CHECK_INT(pthread_create(&other[i], NULL, count_beside, &t[i]), 0);
    for (i = 0; i < 2; i++) pthread_join(other[i], NULL);
    for (i = 0; i < 2; i++)
        for (k = 0; k < TASKS; k++) wrong += t[i].done[k] != 200;
    CHECK_INT(wrong, 0);
    CHECK_INT(t[0].worker_wrong + t[1].worker_wrong, 0);
}

static int write_all(int to, const void *data, size_t bytes) {
    const char *p = (const char *)data;
    ssize_t n = 1;
    for (; bytes > 0 && n > 0; p += n, bytes -= (size_t)n) n = write(to, p, bytes);
    return n > 0;
}

static int read_all(int from, void *data, size_t bytes) {
    char *p = (char *)data;
    ssize_t n = 1;
    for (; bytes > 0 && n > 0; p += n, bytes -= (size_t)n) n = read(from, p, bytes);
    return n > 0;
}

/* The thread sanitizer keeps the parent's threads in a child's books, and ends it when the system
 * gives one of their ids again ("dup thread with used id"). qemu's emulation of one program ends a
 * child that starts threads by an assertion of its own (TEST_EMULATED: tests/tools/variant.sh). */
#if defined(__SANITIZE_THREAD__) || defined(TEST_EMULATED)
enum { THREADS_AFTER_FORK = 0 };
#else
enum { THREADS_AFTER_FORK = 1 };
#endif

/* The child inherits a context whose threads it does not have: it trains on with new ones, gives the
 * same bits as its parent, and frees it. */
static void goes_on_after_fork(void) {
    static float of_child[BYTES];
    int ends[2], status = -1;
    if (!THREADS_AFTER_FORK) SKIP("neither the thread sanitizer nor an emulator knows threads after a fork");
    mixp_context *ctx = context_with(4);
    CHECK(each_once(ctx, TASKS));
    CHECK_INT(pipe(ends), 0);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        train(ctx, got);
        mixp_context_free(ctx);
        _exit(!write_all(ends[1], got, sizeof got));
    }
    close(ends[1]);
    CHECK(read_all(ends[0], of_child, sizeof of_child));
    close(ends[0]);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    train(ctx, got);
    CHECK(memcmp(got, of_child, sizeof got) == 0);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(every_task_once);
    RUN(freed_before_any_loop);
    RUN(same_bits_at_any_count);
    RUN(fewer_threads_than_asked);
    RUN(quota_limits_the_default);
    RUN(mask_limits_the_default);
    RUN(contexts_in_threads);
    RUN(goes_on_after_fork);
    return test_report();
}
