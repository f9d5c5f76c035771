/* scales.c - loss scalers beside each other: planted spikes of the gradients, and gradients too small
 * for f16. Tables; every number is the same on every run.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     build/bench/scales                          all tables
 *     build/bench/scales INTERVAL LEAST MOST      of spikes of 2^LEAST to 2^MOST alone
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "../support/scale_runs.h"
#include <stdlib.h>

static void show(const char *name, const scale_setup *s) {
    scale_result r = scale_run(s);
    printf("%-34s %4d %7d %8d %9.4f %9.4f%% %9.4f%% %9.2f%% %9g%s%s\n", name, (int)s->seed, r.spikes, r.skipped,
           r.loss, 100 * r.flushed, 100 * r.subnormal, 100 * r.zeros, (double)r.scale,
           r.error[0] ? "\n    " : "", r.error);
}

static void head(const char *title) {
    printf("\n%s\n%-34s %4s %7s %8s %9s %10s %10s %10s %9s\n", title, "", "seed", "spikes", "skipped",
           "loss", "flushed", "subnormal", "zeros", "scale");
}

/* wide: also with other margins. */
static void spikes(int interval, int least, int most, int wide) {
    static const int margins[3] = { 3, 8, 13 };
    char title[160];
    snprintf(title, sizeof title,
             "Spikes of 2^%d to 2^%d in about 2%% of 1,000 steps; PyTorch's rule grows every %d",
             least, most, interval);
    head(title);
    for (int seed = 1; seed <= 3; seed++) {
        scale_setup torch = run_spiked((uint64_t)seed, MIXP_RULE_TORCH), other;
        torch.spike_least = least;
        torch.spike_most = most;
        torch.scaler.growth_interval = interval;
        other = torch;
        show("PyTorch's rule", &torch);
        memset(&other.scaler, 0, sizeof other.scaler);
        other.scaler.rule = MIXP_RULE_PREDICTIVE;
        show("predictive", &other);
        other.guarded = 1;
        show("predictive, with the guard", &other);
        other.guarded = 0;
        for (int i = 0; wide && i < 3; i++) {
            snprintf(title, sizeof title, "predictive, a margin of %d", margins[i]);
            other.scaler.margin = margins[i];
            show(title, &other);
        }
        other.scaler.margin = 0;
        other.scaler.rule = MIXP_RULE_STATIC;
        other.scaler.init_scale = 1024.0f;
        show("static, 1024", &other);
        other.dtype = MIXP_F32;
        other.scaler.rule = MIXP_RULE_COUNT;
        show("f32", &other);
    }
}

static void underflow(void) {
    head("Gradients of a mean over 2^19 positions, through six layers");
    for (int seed = 1; seed <= 3; seed++) {
        scale_setup none = run_deep((uint64_t)seed, MIXP_F16, MIXP_RULE_COUNT);
        scale_setup torch = run_deep((uint64_t)seed, MIXP_F16, MIXP_RULE_TORCH);
        scale_setup set = run_deep((uint64_t)seed, MIXP_F16, MIXP_RULE_PREDICTIVE);
        scale_setup f32 = run_deep((uint64_t)seed, MIXP_F32, MIXP_RULE_COUNT);
        show("f16 without a scaler", &none);
        show("f16, PyTorch's rule", &torch);
        show("f16, predictive, from a scale of 1", &set);
        show("f32", &f32);
    }
}

int main(int argc, char **argv) {
    if (argc == 4) {
        spikes(atoi(argv[1]), atoi(argv[2]), atoi(argv[3]), 1);
        return 0;
    }
    spikes(20, 1, 3, 0);
    spikes(20, 4, 8, 0);
    spikes(50, 1, 3, 0);
    spikes(2000, 1, 3, 0);
    spikes(2000, 4, 8, 0);
    spikes(2000, 4, 20, 1);
    underflow();
    return 0;
}
