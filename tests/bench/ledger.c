/* ledger.c - what a training step moves, computes and keeps, kernel by kernel, without running it.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     make ledger                             GPT-2 124M and the character GPT, each dtype and
 *                                             level; and GPT-2 on several GPUs
 *     build/bench/ledger gpt2 bf16 2          one of them, kernel by kernel
 *     build/bench/ledger gpt2 bf16 2 calls    and call by call
 *     build/bench/ledger gpt2 bf16 2 joined   with sums and GELU by tanh in the products' passes
 *     GPU=A100 build/bench/ledger ...         on another GPU of tests/support/ledger.h
 *
 * Calls, bytes, FLOP and memory are exact and hold for every device. Launches and times are those of
 * mixprec_cuda.cu, times by a model that an H100 has confirmed to 3 %: see tests/support/ledger.h.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "ledger_gpt.h"

static void print_head(void) {
    printf("%-14s %-5s %5s %6s %8s %9s %7s %9s %9s %10s %9s\n", "", "dtype", "level", "calls",
           "launches", "GB moved", "TFLOP", "GB in use", "GB taken", "ms (model)", "roofline");
}

static void print_total(const ledger_config *c, const ledger_result *r) {
    const ledger_line *s = &ledger.sum;
    printf("%-14s %-5s %5d %6d %8d %9.2f %7.2f %9.2f %9.2f %10.1f %9.1f\n", c->name,
           mixp_dtype_name(c->dtype), c->level, (int)s->calls, (int)s->launches,
           (s->read + s->written) / 1e9, s->flop / 1e12, (double)r->peak / 1e9,
           (double)r->allocated / 1e9, 1e3 * s->seconds, 1e3 * s->roof);
    if (r->error[0]) printf("  error: %s\n", r->error);
}

static int slower(const void *a, const void *b) {
    double s = ((const ledger_line *)a)->seconds, t = ((const ledger_line *)b)->seconds;
    return s < t ? 1 : s > t ? -1 : 0;
}

static void print_lines(void) {
    printf("\n%-30s %6s %8s %9s %10s %7s %10s %9s\n", "", "calls", "launches", "GB read",
           "GB written", "TFLOP", "ms (model)", "roofline");
    qsort(ledger.lines, (size_t)ledger.count, sizeof *ledger.lines, slower);
    for (int i = 0; i < ledger.count; i++) {
        const ledger_line *l = &ledger.lines[i];
        printf("%-30s %6d %8d %9.2f %10.2f %7.2f %10.2f %9.2f\n", l->what, (int)l->calls,
               (int)l->launches, l->read / 1e9, l->written / 1e9, l->flop / 1e12, 1e3 * l->seconds,
               1e3 * l->roof);
    }
}

static const struct { const char *name; mixp_dtype dtype; } dtypes[] = {
    { "f32", MIXP_F32 }, { "f16", MIXP_F16 }, { "bf16", MIXP_BF16 }
};

enum { all_epilogues = MIXP_EPILOGUES_BIAS | MIXP_EPILOGUES_GELU };

static int show_all(void) {
    static const struct { mixp_dtype dtype; int level; } kinds[] = {
        { MIXP_F32, 0 }, { MIXP_F16, 1 }, { MIXP_F16, 2 }, { MIXP_BF16, 1 }, { MIXP_BF16, 2 }
    };
    int bad = 0;
    for (int joined = 0; joined < 2; joined++) {
        printf(joined ? "\nWith both epilogues switched on, and GELU by tanh:\n" : "");
        print_head();
        for (int i = 0; i < 10; i++) {
            ledger_config c = (i / 5 ? ledger_char : ledger_gpt2)(kinds[i % 5].dtype,
                                                                 kinds[i % 5].level);
            c.epilogues = joined ? all_epilogues : 0;
            ledger_result r = ledger_run(&c, NULL);
            print_total(&c, &r);
            bad |= r.error[0] != 0;
        }
    }
    return bad;
}

/* The largest batch of GPT-2 that a GPU's memory holds at both levels, with 5 % left. */
static int64_t batch_for(const ledger_gpu *gpu, mixp_dtype dtype) {
    ledger_config c = ledger_gpt2(dtype, 1);
    while (c.batch > 1 && (double)ledger_run(&c, NULL).allocated > 0.95 * gpu->memory) c.batch /= 2;
    return c.batch;
}

/* A step at a level, its epilogues apart or joined: ms, and the roofline's share of them. */
static int print_step(ledger_config c, int level, int joined) {
    c.level = level;
    c.epilogues = joined ? all_epilogues : 0;
    ledger_result r = ledger_run(&c, NULL);
    printf("  %7.1f (%5.1f, %2.0f%%)", 1e3 * ledger.sum.seconds, 1e3 * ledger.sum.roof,
           100 * ledger.sum.roof / ledger.sum.seconds);
    return r.error[0] != 0;
}

/* GPT-2 124M on each GPU against that GPU's own roofline. */
static int show_gpus(void) {
    static const char *const names[] = { "H200", "H100", "A100", "RTX 4090", "T4" };
    int bad = 0;
    printf("\nGPT-2 124M, ms of a step by the model (by the roofline of published rates, its share).\n"
           "Joined: sums and GELU in the passes of products, at an H100's cost.\n"
           "%-9s %5s %-5s  %-22s  %-22s  %-22s  %-22s\n", "", "batch", "dtype", "level 2",
           "level 2, joined", "level 1", "level 1, joined");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        ledger_config c = ledger_gpt2(MIXP_BF16, 2);
        ledger_on = ledger_gpu_of(names[i]);
        if (!ledger_on->bf16) c.dtype = MIXP_F16;
        c.batch = batch_for(ledger_on, c.dtype);
        printf("%-9s %5d %-5s", names[i], (int)c.batch, mixp_dtype_name(c.dtype));
        for (int k = 0; k < 4; k++) bad |= print_step(c, 2 - k / 2, k % 2);
        printf("\n");
    }
    return bad;
}

static int show_one(const char *model, const char *dtype, int level, const char *how) {
    mixp_dtype d = MIXP_F32;
    for (int i = 0; i < 3; i++)
        if (!strcmp(dtype, dtypes[i].name)) d = dtypes[i].dtype;
    ledger_config c = (strcmp(model, "gpt2") ? ledger_char : ledger_gpt2)(d, level);
    if (!strcmp(how, "joined")) c.epilogues = all_epilogues;
    ledger_result r = ledger_run(&c, strcmp(how, "calls") ? NULL : stdout);
    print_head();
    print_total(&c, &r);
    print_lines();
    return r.error[0] != 0;
}

int main(int argc, char **argv) {
    const char *gpu = getenv("GPU");
    if (gpu && *gpu && !(ledger_on = ledger_gpu_of(gpu))) {
        fprintf(stderr, "ledger: GPU=%s is in no table of tests/support/ledger.h\n", gpu);
        return 2;
    }
    if (argc == 1) {
        printf("Steps on an %s; the times are a model's, which an H100 has confirmed to 3 %%.\n",
               ledger_on->name);
        return show_all() | show_gpus();
    }
    if (argc < 4) {
        fprintf(stderr, "usage: ledger [gpt2|char f32|f16|bf16 LEVEL [calls|joined]]\n");
        return 2;
    }
    return show_one(argv[1], argv[2], atoi(argv[3]), argc > 4 ? argv[4] : "");
}
