/* bench_threads.c - how a training step scales with threads, kernel by kernel.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     bench_threads [real|model] [nano|gpt2|long ...]        real, and all three, by default
 *
 * real: measures 1, 2, 4, ... threads, up to OpenMP's number (OMP_NUM_THREADS). model: predicts 2, 8, 16
 * and 64 threads on one core: each task of each loop is timed by itself, then dealt in order to the thread
 * that is free first; a loop costs LOOP_COST. The model knows no limit of memory, caches or clock rate.
 *
 * Prints milliseconds with one thread, then the efficiency with n: the ideal time divided by the time. Each
 * call of a kernel counts with its least time of some steps. bf16, AdamW, level 1.
 *
 * nano: nanoGPT's CPU configuration. gpt2: GPT-2 124M, 4 sequences of 64 tokens. long: 6 layers of width 192
 * with 3 heads, one sequence of 768 tokens.
 */
#define _POSIX_C_SOURCE 200112L
#include "mixprec.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "gpt.h"

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#include "../../examples/profile.h"

enum { HOST = PROFILE_SLOTS, SLOTS, LOOP, TASK };      /* kinds of events; below HOST: a kernel */
enum { MOST_COUNTS = 8, MOST_THREADS = 64 };
static const double LOOP_COST = 5e-6;

typedef struct workload {
    const char *name;
    shape       is;
} workload;
static const workload workloads[] = {
    { "nano", { 4, 128, 4, 65, 64, 12, 20 } },
    { "gpt2", { 12, 768, 12, 50257, 64, 4, 4 } },
    { "long", { 6, 192, 3, 500, 768, 1, 8 } }
};
enum { WORKLOADS = sizeof workloads / sizeof *workloads };

/* --- the trace of a step: the same events in each step, each with its least value --- */

typedef struct event {
    int    kind;
    double value;               /* LOOP: its number of tasks; else seconds; a kernel's are without its loops */
} event;

static struct {
    event *events;
    long   count, room, known;  /* known: events of an earlier step */
    int    threads;             /* of the model; 0: kernels run as they are */
    double in_loops, in_kernels;
    const mixp_device *inner;
} trace;

static void note(int kind, double value) {
    event *e;
    if (trace.count == trace.room) {
        trace.room = trace.room ? 2 * trace.room : 4096;
        trace.events = (event *)realloc(trace.events, (size_t)trace.room * sizeof *e);
        if (!trace.events) exit(2);
    }
    e = &trace.events[trace.count++];
    if (trace.count > trace.known || e->kind != kind || value < e->value) e->value = value;
    e->kind = kind;
}

/* A parallel loop whose tasks run one after another. */
static void run_tasks(void *user, int64_t tasks, mixp_task task, void *arg) {
    const double began = seconds_now();
    (void)user;
    note(LOOP, (double)tasks);
    for (int64_t i = 0; i < tasks; i++) {
        const double start = seconds_now();
        task(arg, i, (int)(i % trace.threads));
        note(TASK, seconds_now() - start);
    }
    trace.in_loops += seconds_now() - began;
}

static mixp_exec traced_exec(const mixp_exec *x) {
    mixp_exec own = *x;
    if (!trace.threads) return own;
    own.threads = trace.threads;
    own.parallel = trace.threads > 1 ? run_tasks : NULL;
    return own;
}

static mixp_result kernel_ended(int slot, double began, double in_loops, mixp_result result) {
    const double seconds = seconds_now() - began;
    trace.in_kernels += seconds;
    note(slot, seconds - (trace.in_loops - in_loops));
    return result;
}

#define TRACED(group, kernel, what, parameters, arguments)                              \
    static mixp_result traced_##kernel parameters {                                     \
        const mixp_exec own = traced_exec(x);                                           \
        const double began = seconds_now(), in_loops = trace.in_loops;                  \
        mixp_result result;                                                             \
        x = &own;                                                                       \
        result = trace.inner->kernels->kernel arguments;                                \
        return kernel_ended(PROFILE_##kernel, began, in_loops, result);                 \
    }
PROFILE_KERNELS(TRACED)

static const mixp_device *traced_device(void) {
    static mixp_device device;
    static mixp_kernels kernels;
    trace.inner = mixp_cpu();
    device = *trace.inner;
    kernels = *trace.inner->kernels;
#define PUT_TRACED(group, kernel, what, parameters, arguments) \
    if (kernels.kernel) kernels.kernel = traced_##kernel;
    PROFILE_KERNELS(PUT_TRACED)
    device.kernels = &kernels;
    return &device;
}

static void step(model *m) {
    const double began = seconds_now();
    mixp_tensor *loss = NULL;
    trace.count = 0;
    trace.in_kernels = 0;
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    MIXP_AUTOCAST(m->ctx, MIXP_BF16) {
        loss = model_loss_of(m, mixp_linear(m->ctx, model_top(m), m->wte, NULL));
    }
    mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss));
    mixp_scaler_step(m->scaler, m->opt);
    mixp_scaler_update(m->scaler);
    note(HOST, seconds_now() - began - trace.in_kernels);
    trace.known = trace.count;
}

/* --- the sums of a trace --- */

/* Deals the tasks of a loop, events from `first` on, to n threads. Returns the seconds of the last. */
static double loop_seconds(long first, long tasks, int n) {
    double busy[MOST_THREADS] = { 0 }, end = 0;
    for (long i = first; i < first + tasks; i++) {
        int free_first = 0, k;
        for (k = 1; k < n; k++)
            if (busy[k] < busy[free_first]) free_first = k;
        busy[free_first] += trace.events[i].value;
        if (busy[free_first] > end) end = busy[free_first];
    }
    return end + (n > 1 ? LOOP_COST : 0);
}

/* Adds up the seconds of each kernel with n threads. by[SLOTS]: the step's. */
static void sum_up(int n, double by[SLOTS + 1]) {
    double loops = 0;
    memset(by, 0, (SLOTS + 1) * sizeof *by);
    for (long i = 0; i < trace.count; i++) {
        const event e = trace.events[i];
        if (e.kind == LOOP) {
            loops += loop_seconds(i + 1, (long)e.value, n);
            i += (long)e.value;
            continue;
        }
        by[e.kind] += e.value + loops;
        by[SLOTS] += e.value + loops;
        loops = 0;
    }
}

/* --- workloads by numbers of threads --- */

/* 1, then the numbers of the model, or 1, 2, 4, ... and all. Returns how many. */
static int counts_of(int modelled, int counts[MOST_COUNTS]) {
    static const int predicted[] = { 1, 2, 8, 16, 64 };
    mixp_context *ctx = mixp_context_new(NULL);
    const int all = mixp_context_exec(ctx)->threads;
    int many = 0, n;
    mixp_context_free(ctx);
    if (modelled) {
        memcpy(counts, predicted, sizeof predicted);
        return 5;
    }
    for (n = 1; n < all && many < MOST_COUNTS - 1; n *= 2) counts[many++] = n;
    counts[many++] = all;
    return many;
}

static int run(const workload *w, const mixp_device *device, int modelled, int threads,
               double by[SLOTS + 1]) {
    static model m;
    mixp_context_desc machine;
    mixp_result r;
    int i;
    memset(&machine, 0, sizeof machine);
    machine.device = device;
    machine.threads = modelled ? 1 : threads;
    trace.threads = modelled ? threads : 0;
    trace.known = 0;
    model_open(&m, w->is, &machine, 1.0);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    mixp_autocast_set_level(m.ctx, 1);
    step(&m);
    trace.known = 0;            /* the first step allocates */
    for (i = 0; i < w->is.steps; i++) step(&m);
    sum_up(modelled ? threads : 1, by);
    r = mixp_context_error(m.ctx, NULL);
    mixp_context_free(m.ctx);
    return r == MIXP_OK;
}

static void print_row(const char *name, int slot, int many, const int *counts,
                      double by[MOST_COUNTS][SLOTS + 1]) {
    const double one = by[0][slot];
    int i;
    printf("%-26s %9.3f", name, 1e3 * one);
    for (i = 1; i < many; i++) printf(" %7.2f", one / counts[i] / by[i][slot]);
    printf("\n");
}

static void print_heads(const char *what, int many, const int *counts) {
    printf("%-26s %9s", what, "ms, 1");
    for (int i = 1; i < many; i++) printf(" %7d", counts[i]);
    printf("\n");
}

#define KERNEL_NAME(group, kernel, what, parameters, arguments) #kernel,
static const char *const slot_names[] = { PROFILE_KERNELS(KERNEL_NAME) "host code" };

static int usage(void) {
    fprintf(stderr, "bench_threads [real|model] [nano|gpt2|long ...]\n");
    return 1;
}

int main(int argc, char **argv) {
    static double by[WORKLOADS][MOST_COUNTS][SLOTS + 1];
    const int modelled = argc > 1 && strcmp(argv[1], "model") == 0;
    const int first = argc > 1 && (modelled || strcmp(argv[1], "real") == 0) ? 2 : 1;
    const mixp_device *device = traced_device();
    int counts[MOST_COUNTS], chosen[WORKLOADS], any = 0, i, w, k;
    const int many = counts_of(modelled, counts);

    memset(chosen, 0, sizeof chosen);
    for (i = first; i < argc; i++) {
        for (w = 0; w < WORKLOADS && strcmp(argv[i], workloads[w].name) != 0; w++) {}
        if (w == WORKLOADS) return usage();
        chosen[w] = any = 1;
    }

    for (w = 0; w < WORKLOADS; w++) {
        if (any && !chosen[w]) continue;
        for (i = 0; i < many; i++)
            if (!run(&workloads[w], device, modelled, counts[i], by[w][i])) return 2;
        print_heads(workloads[w].name, many, counts);
        for (k = 0; k < SLOTS; k++)
            if (by[w][0][k] > 0.003 * by[w][0][SLOTS]) print_row(slot_names[k], k, many, counts, by[w]);
        fflush(stdout);
    }

    print_heads(modelled ? "efficiency, PREDICTED" : "efficiency, measured", many, counts);
    for (w = 0; w < WORKLOADS; w++)
        if (!any || chosen[w]) print_row(workloads[w].name, SLOTS, many, counts, by[w]);
    return 0;
}
