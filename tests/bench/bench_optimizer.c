/* bench_optimizer.c - the optimizer phase of a step against memcpy, in one process.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *   bench_optimizer [millions of parameters, 16] [rounds, 15] [threads, 0 = all] [row, -1 = all]
 *
 * Each round times memcpy and every kernel in turn, so that a noisy machine hits them alike;
 * medians are printed, of one row alone (0: memcpy) with the least and its processor time, for a
 * profiler. Bytes are those that must move. Ratio: bandwidth over memcpy's, whose
 * bytes are counted once read and once written.
 */
#define _POSIX_C_SOURCE 199309L
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "args.h"
#include <time.h>

enum { PLAIN = 9, SMALL = 4, KINDS = PLAIN + SMALL, ROUNDS = 101, TENSORS = 16 };

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct rig {
    mixp_context *ctx;
    mixp_scaler *scaler;
    mixp_optimizer *f32, *f16, *clip, *small[SMALL];
    int64_t n;
    void *from, *to;
} rig;

/* n parameters in TENSORS tensors, with an f16 copy for autocast where low is set. */
static mixp_optimizer *make(rig *r, mixp_dtype grad, int low, double max_norm) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    int64_t n = r->n / TENSORS;
    d.max_norm = max_norm;
    mixp_optimizer *opt = mixp_optimizer_new(r->ctx, &d);
    for (int k = 0; k < TENSORS; k++) {
        mixp_tensor *w = mixp_param(r->ctx, NULL, MIXP_F32, 1, &n);
        mixp_tensor *g = mixp_param(r->ctx, NULL, grad, 1, &n);
        mixp_fill(g, 1.0);
        if (low) { w->own.low[0] = mixp_param(r->ctx, NULL, MIXP_F16, 1, &n); }
        if (mixp_optimizer_add(opt, w, g) != MIXP_OK) return NULL;
    }
    return mixpi_refresh(opt, "bench") == MIXP_OK ? opt : NULL;
}

/* The same parameters in bf16, with bf16 gradients and states of a kind. */
static mixp_optimizer *make_small(rig *r, mixp_moment_kind moments, mixp_master_kind masters) {
    mixp_optimizer_desc d = mixp_adamw_defaults();
    int64_t shape[2];
    shape[0] = r->n / TENSORS / 64;
    shape[1] = 64;
    d.states.m = d.states.v = moments;
    d.states.master = masters;
    mixp_optimizer *opt = mixp_optimizer_new(r->ctx, &d);
    for (int k = 0; k < TENSORS; k++) {
        mixp_tensor *w = mixp_param(r->ctx, NULL, MIXP_BF16, 2, shape);
        mixp_tensor *g = mixp_param(r->ctx, NULL, MIXP_BF16, 2, shape);
        mixp_fill(g, 1.0);
        if (mixp_optimizer_add(opt, w, g) != MIXP_OK) return NULL;
    }
    return mixpi_refresh(opt, "bench") == MIXP_OK ? opt : NULL;
}
static int make_all_small(rig *r) {
    r->small[0] = make_small(r, MIXP_MOMENT_F32, MIXP_MASTER_F32);
    r->small[1] = make_small(r, MIXP_MOMENT_BF16, MIXP_MASTER_16BIT);
    r->small[2] = make_small(r, MIXP_MOMENT_8BIT, MIXP_MASTER_16BIT);
    r->small[3] = make_small(r, MIXP_MOMENT_8BIT, MIXP_MASTER_8BIT);
    return r->small[0] && r->small[1] && r->small[2] && r->small[3];
}

static void whole_step(rig *r, mixp_optimizer *opt, int unscale) {
    if (unscale) { mixp_scaler_unscale(r->scaler, opt); mixp_clip_grad_norm(opt, 1e9); }
    mixp_scaler_step(r->scaler, opt);
    mixp_scaler_update_to(r->scaler, 1.0f);
}

static void run(rig *r, int kind) {
    const mixp_kernels *k = r->ctx->device->kernels;
    const mixp_exec *x = &r->ctx->exec;
    mixp_optimizer *opt = kind == 3 || kind == 5 || kind == 8 ? r->f16 : r->f32;
    mixp_step_plan plan = opt->plan;
    if (kind >= PLAIN) { whole_step(r, r->small[kind - PLAIN], 0); return; }
    plan.gathered = plan.unscaled = 1;
    switch (kind) {
    case 0: memcpy(r->to, r->from, (size_t)r->n * 4); break;
    case 1: case 2: case 3:
        k->grad_stats(x, args_grad_stats(opt->device_rows, opt->count,
                &r->scaler->state->scale, kind == 1, opt->state,
                  NULL, NULL));
        break;
    case 4: case 5:
        k->prepare(x, args_prepare(&plan, opt->state, NULL));
        k->update(x, args_update(&plan, opt->device_rows, opt->count, opt->state));
        break;
    case 6: whole_step(r, r->f32, 1); break;
    case 7: whole_step(r, r->clip, 0); break;
    default: whole_step(r, r->f16, 0); break;
    }
}

/* One row alone. */
static void run_one(rig *r, int kind, const char *name, int rounds) {
    double ms[ROUNDS], spent;
    run(r, kind);
    clock_t start = clock();
    for (int i = 0; i < rounds; i++) {
        double begun = now_ms();
        run(r, kind);
        ms[i] = now_ms() - begun;
    }
    spent = (double)(clock() - start) / CLOCKS_PER_SEC / rounds;
    qsort(ms, (size_t)rounds, sizeof ms[0], by_value);
    printf("%-40s %9.3f ms  least %9.3f  processor time %7.3f ns a parameter\n", name,
           ms[rounds / 2], ms[0], spent / (double)r->n * 1e9);
}

int main(int argc, char **argv) {
    static const char *const name[KINDS] = {
        "memcpy, 4 B", "unscale + statistics in place, f32", "statistics, f32", "statistics, f16",
        "AdamW, f32 gradients", "AdamW, f16 gradients + f16 copy", "unscale, clip, step as PyTorch",
        "step with max_norm, f32 (lean)", "step, f16 gradients + f16 copy (lean)",
        "step, bf16, f32 states", "step, bf16, moments 2 B, masters 2 B",
        "step, bf16, moments 1 B, masters 2 B", "step, bf16, moments 1 B, masters 1 B"
    };
    static const double bytes[KINDS] = { 8, 8, 4, 2, 28, 28, 44, 32, 30, 30, 20, 16, 14 };
    static double ms[KINDS][ROUNDS];
    int rounds = argc > 2 ? atoi(argv[2]) : 15, i, k;
    const int only = argc > 4 ? atoi(argv[4]) : -1;
    mixp_context_desc d;
    rig r;
    memset(&d, 0, sizeof d);
    memset(&r, 0, sizeof r);
    d.threads = argc > 3 ? atoi(argv[3]) : 0;
    r.n = (int64_t)((argc > 1 ? atof(argv[1]) : 16.0) * 1048576.0);
    if (rounds < 1 || rounds > ROUNDS || r.n < TENSORS) return 2;
    r.ctx = mixp_context_new(&d);
    r.scaler = mixp_scaler_new(r.ctx, NULL);
    (void)mixp_scaler_loss_scale(r.scaler);     /* whoever multiplies by it asks */
    r.from = mixpi_host_alloc(r.ctx, (size_t)r.n * 4);
    r.to = mixpi_host_alloc(r.ctx, (size_t)r.n * 4);
    r.f32 = make(&r, MIXP_F32, 0, 0.0);
    r.f16 = make(&r, MIXP_F16, 1, 0.0);
    r.clip = make(&r, MIXP_F32, 0, 1.0);
    if (!r.from || !r.to || !r.f32 || !r.f16 || !r.clip || !make_all_small(&r) ||
        mixp_scaler_update_to(r.scaler, 1.0f) != MIXP_OK) {
        fprintf(stderr, "out of memory: try fewer parameters\n");
        return 1;
    }
    if (only >= 0) {
        if (only < KINDS) run_one(&r, only, name[only], rounds);
        mixp_context_free(r.ctx);
        return only >= KINDS;
    }
    for (k = 0; k < KINDS; k++) run(&r, k);
    for (i = 0; i < rounds; i++)
        for (k = 0; k < KINDS; k++) {
            double start = now_ms();
            run(&r, k);
            ms[k][i] = now_ms() - start;
        }
    printf("%.1f M parameters in %d tensors, %d thread(s), %s, median of %d\n", (double)r.n / 1e6,
           TENSORS, r.ctx->exec.threads, r.ctx->device->name, rounds);
    for (k = 0; k < KINDS; k++) qsort(ms[k], (size_t)rounds, sizeof **ms, by_value);
    for (k = 0; k < KINDS; k++) {
        double mid = ms[k][rounds / 2], rate = bytes[k] / mid, copy = bytes[0] / ms[0][rounds / 2];
        printf("%-40s %9.3f ms  %5.1f GB/s  %5.2f x memcpy\n", name[k], mid,
               bytes[k] * (double)r.n / mid * 1e-6, rate / copy);
    }
    if (mixp_context_error(r.ctx, NULL) != MIXP_OK) { printf("FAILED\n"); return 1; }
    mixp_context_free(r.ctx);
    return 0;
}
