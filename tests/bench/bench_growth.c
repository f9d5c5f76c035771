/* bench_growth.c - how the optimizer phase of a step grows with parameters and with tensors.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *   bench_growth [largest number of parameters, 1e7] [threads, 0 = all] [seconds a point, 0.3]
 *
 * The phase is mixp_scaler_step with max_norm: gather, clip and AdamW in two passes, on f32
 * weights and f16 gradients (14 bytes a parameter in all), and mixp_scaler_update. A point is the
 * median of its steps, 5 at the least. What does not fit into memory is skipped, and said to be.
 * growth.sh runs it beside training steps, plot.py draws both.
 */
#define _POSIX_C_SOURCE 199309L
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { BYTES = 14, MOST_STEPS = 4000, LEAST_STEPS = 5 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Bytes that can be had without swapping; 0: this system does not tell. */
static double memory_available(void) {
    FILE  *f = fopen("/proc/meminfo", "r");
    char   line[128];
    double kib = 0;
    while (f && fgets(line, sizeof line, f)) sscanf(line, "MemAvailable: %lf", &kib);
    if (f) fclose(f);
    return 1024 * kib;
}

/* n parameters in `tensors` tensors, each with its f16 gradient. NULL: out of memory. */
static mixp_optimizer *make(mixp_context *ctx, int64_t n, int64_t tensors) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    int64_t each = n / tensors, i;
    d.max_norm = 1.0;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    for (i = 0; i < tensors; i++) {
        mixp_tensor *w = mixp_param(ctx, NULL, MIXP_F32, 1, &each);
        mixp_tensor *g = mixp_param(ctx, NULL, MIXP_F16, 1, &each);
        mixp_fill(g, 1.0);
        if (mixp_optimizer_add(opt, w, g) != MIXP_OK) return NULL;
    }
    return opt;
}

/* The median of steps that last `seconds` together, in seconds; the first is not counted: it
 * uploads the table of parameters. */
static double time_steps(mixp_optimizer *opt, mixp_scaler *scaler, double seconds) {
    static double took[MOST_STEPS];
    double sum = 0;
    int n = -1;
    while (n < LEAST_STEPS || (sum < seconds && n < MOST_STEPS)) {
        double began = now();
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
        if (n >= 0) sum += took[n] = now() - began;
        n++;
    }
    qsort(took, (size_t)n, sizeof *took, by_value);
    return took[n / 2];
}

static int fits(int64_t n, int64_t tensors) {
    double need = 1.05 * ((double)n * BYTES + (double)tensors * 4096), have = memory_available();
    if (have <= 0 || need <= have) return 1;
    printf("# optimizer %.0f %.0f skipped: it needs %.1f GiB of memory, and %.1f are free\n",
           (double)n, (double)tensors, need / 1073741824.0, have / 1073741824.0);
    return 0;
}

/* 0: an error, which is reported. */
static int point(int64_t n, int64_t tensors, int threads, double seconds) {
    mixp_context_desc d;
    mixp_scaler_desc s;
    const char *why = "";
    double took = 0;
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    d.threads = threads;
    s.rule = MIXP_RULE_STATIC;
    s.init_scale = 1;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_scaler *scaler = mixp_scaler_new(ctx, &s);
    mixp_optimizer *opt = make(ctx, n, tensors);
    if (opt) took = 1e9 * time_steps(opt, scaler, seconds);
    int good = mixp_context_error(ctx, &why) == MIXP_OK;
    if (good) printf("optimizer %.0f %.0f %.4f\n", (double)n, (double)tensors, took / (double)n);
    else fprintf(stderr, "bench_growth: %s\n", why);
    mixp_context_free(ctx);
    fflush(stdout);
    return good;
}

int main(int argc, char **argv) {
    double most = argc > 1 ? atof(argv[1]) : 1e7, seconds = argc > 3 ? atof(argv[3]) : 0.3;
    int threads = argc > 2 ? atoi(argv[2]) : 0;
    if (!(most >= 1e5 && most <= 1e10) || threads < 0 || !(seconds >= 0)) {
        fprintf(stderr, "usage: bench_growth [PARAMETERS [THREADS [SECONDS]]]: 1e5 to 1e10\n");
        return 2;
    }
    printf("# optimizer: parameters, tensors, nanoseconds a parameter and step\n");
    for (int64_t n = 100000; (double)n <= most; n *= 10)
        for (int64_t tensors = 1; tensors <= 10000; tensors *= 10)
            if (fits(n, tensors) && !point(n, tensors, threads, seconds)) return 1;
    return 0;
}
