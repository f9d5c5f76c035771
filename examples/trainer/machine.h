/* machine.h - memory before the first step, and where time and memory of a step went: a part of
 * trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_MACHINE_H
#define TRAINER_MACHINE_H

#include "device.h"
#include "measure.h"

static int only_looks(const trainer *t) { return t->c.eval_only || t->c.compare; }
static int is_training(const trainer *t) { return !only_looks(t) && t->run.step < t->c.steps; }

/* fp16 overflows above 65504; bf16 has the range of fp32. */
static const char *what_to_try(const config *c) {
    if (c->rule == MIXP_RULE_STATIC && c->init_scale != AUTO)
        return "Try a lower --init-scale, another --rule or a lower --lr";
    return c->dtype == DTYPE_FP16 ? "Try a lower --lr, a longer --warmup or --dtype bf16"
                                  : "Try a lower --lr or a longer --warmup";
}

/* Does the trainer compute on a GPU? A CPU's calls return when their work is done: there is nothing
 * to wait for. */
static int on_gpu(const trainer *t) { return t->device->wait != NULL; }

/* The library never prints or exits: the first error waits in the context. */
static void check(trainer *t, const char *doing) {
    const char *why = "";
    mixp_result result = mixp_context_error(t->ctx, &why);
    if (result != MIXP_OK) end_by_error(&t->run, why);
    if (result == MIXP_ERR_DIVERGED) die(1, "while %s: %s. %s", doing, why, what_to_try(&t->c));
    if (result != MIXP_OK) die(1, "while %s: %s", doing, why);
}

/* Should the logits be computed in chunks? Chunks compute the logits twice, which takes a tenth of
 * a step for GPT-2 124M. So chunks are used only on a CPU, only above 4 million logits (fewer fit
 * in one chunk), and only if the logits would take more than an eighth of the model's memory. With
 * low weights, the f32 sum of the head's gradient must also pay off. */
static int has_chunks(const trainer *t) {
    const config *c = &t->c;
    int64_t       logits = c->batch * c->block * t->data.rows, least = t->model.n_parameters / 2;
    if (c->loss != LOSS_AUTO) return c->loss == LOSS_CHUNKS;
    if (t->model.dtype != MIXP_F32 && least < 3 * t->model.head->count)
        least = 3 * t->model.head->count;
    return !on_gpu(t) && logits > (int64_t)1 << 22 && logits > least;
}

/* More threads than processors take turns and wait for each other. */
static void warn_of_threads(const trainer *t) {
#ifdef _OPENMP
    int threads = mixp_context_exec(t->ctx)->threads, processors = omp_get_num_procs();
    if (!on_gpu(t) && threads > processors)
        warn("%d threads on %d processor%s wait for each other: --threads %d is faster", threads,
             processors, processors == 1 ? "" : "s", processors);
#else
    (void)t;                            /* the context exists */
#endif
}

/* The bytes of a training step on a device that only counts them. Measures the second step: in the
 * first step, gradients are allocated while activations are freed, so it needs less. */
static void measure_step(trainer *t) {
    static int32_t nothing;             /* the counting device reads no data */
    trainer        m = *t;
    m.ctx = mixp_context_new(&(mixp_context_desc){.device = measuring_device()});
    m.x = m.y = &nothing;
    m.dtype = dtypes[m.c.dtype];
    m.model.is_measured = 1;
    mixp_autocast_set_level(m.ctx, (int)m.c.level);
    make_gpt(&m.model, m.ctx, &m.c, m.data.rows);
    make_optimizer(&m);
    make_scaler(&m);
    m.c.accumulate = 1;                 /* the last batch of a step takes as much memory as a single batch */
    for (int i = 0; i < 2; i++) train_batch(&m, 0);
    if (mixp_context_error(m.ctx, NULL) == MIXP_OK)
        t->step_bytes = (double)mixp_context_memory(m.ctx).peak;
    if (m.c.ordered) t->step_bytes += 4.0 * (double)m.model.n_parameters;   /* the running sum */
    t->model.n_parameters = m.model.n_parameters;
    mixp_context_free(m.ctx);
    free(m.model.blocks);
    free(m.model.ramp);
}

/* Only the GPU knows its memory. Forked ranks all run on this machine. */
static void check_memory(trainer *t) {
    double data = (double)t->data.own, have = machine_memory(), need;
    char   need_text[32], have_text[32];
    measure_step(t);
    need = (t->step_bytes + data) * (strncmp(t->c.ranks, "fork:", 5) == 0 ? (double)ranks_of(t) : 1);
    if (on_gpu(t) || have == 0 || need <= have) return;
    die(1, "this needs about %s, and the machine has %s: use a smaller --batch, --block, --width "
           "or fewer --layers (%.1f M parameters)", bytes_text(need, need_text, 32),
        bytes_text(have, have_text, 32), (double)t->model.n_parameters / 1e6);
}

/* ==== Where time and memory went ==================================================== */

enum { MEMORY_PARTS = 5 };
typedef struct part { const char *name; double bytes; } part;

/* A new step has freed the activations: the memory in use now is permanent. */
static void memory_parts(trainer *t, part *parts) {
    const mixp_tensor *grad = t->model.tokens->grad;
    double peak = (double)mixp_context_memory(t->ctx).peak, stays, gradients = 0;
    if (grad) gradients = (double)t->model.n_parameters * (double)mixp_dtype_size(grad->dtype);
    mixp_step_begin(t->ctx);
    stays = (double)mixp_context_memory(t->ctx).used;
    parts[0] = (part){"parameters", (double)t->model_bytes};
    parts[1] = (part){"gradients", gradients};
    parts[2] = (part){"optimizer state", (double)t->optimizer_bytes};
    parts[3] = (part){"low copies of weights",
                      stays - gradients - (double)(t->model_bytes + t->optimizer_bytes)};
    parts[4] = (part){"activations, at most", peak - stays};
}

static void memory_line(const char *what, double bytes) {
    if (bytes > 0) say("%-32s %10.2f\n", what, bytes / 1048576.0);
}

static void print_memory(trainer *t) {
    part parts[MEMORY_PARTS];
    memory_parts(t, parts);
    say("%-32s %10s\n", "memory", "MiB");
    for (int i = 0; i < MEMORY_PARTS; i++) memory_line(parts[i].name, parts[i].bytes);
    memory_line("the process, at most", process_peak());
}

/* On a GPU, products that cuBLASLt refuses are slow: there should be none. */
static void print_products(trainer *t) {
    mixp_gemm_count n = mixp_context_gemm_count(t->ctx);
    if (n.direct + n.packed + n.plain + n.narrow == 0) return;
    say("products: %.0f as they are, %.0f in fp8 or fp4, %.0f with packed operands, %.0f without tensor cores\n",
        (double)n.direct, (double)n.narrow, (double)n.packed, (double)n.plain);
}

/* The first step allocates memory, so it is not timed. */
static void print_profile(trainer *t) {
    if (profile.steps == 0) { say("--profile needs two steps of training or more\n"); return; }
    profile_print(say);
    print_memory(t);
    print_products(t);
}


#endif
