/* machine.h - the device, its memory, and where time and memory of a step went: a part of
 * trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_MACHINE_H
#define TRAINER_MACHINE_H

static int only_looks(const trainer *t) { return t->c.eval_only || t->c.compare; }
static int is_training(const trainer *t) { return !only_looks(t) && t->step < t->c.steps; }

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
static void check(const trainer *t, const char *doing) {
    const char *why = "";
    mixp_result result = mixp_context_error(t->ctx, &why);
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

/* ==== The device ==================================================================== */

#ifdef TRAINER_CUDA
enum { HAS_CUDA = 1 };
static const mixp_device *find_gpu(int ordinal, const char **why)
{ return mixp_cuda(ordinal, why); }
#else
enum { HAS_CUDA = 0 };
static const mixp_device *find_gpu(int ordinal, const char **why) {
    (void)ordinal;
    *why = "this trainer was built without CUDA. Build it with -DTRAINER_CUDA and "
           "mixprec_cuda.cu, as the head of trainer.c says";
    return NULL;
}
#endif

/* The value of --device: the number of a GPU, or one of these. */
enum { THE_CPU = -1, ANY = -2 };

static int wanted_device(const config *c) {
    const char *name = c->device;
    int         number = 0, length = 0;
    if (strcmp(name, "auto") == 0) return ANY;
    if (strcmp(name, "cpu") == 0) return THE_CPU;
    if (strcmp(name, "cuda") == 0) return 0;
    if (sscanf(name, "cuda:%5d%n", &number, &length) != 1 || name[length] || number < 0)
        die(2, "--device: \"%s\" is not one of auto|cpu|cuda|cuda:1, and so on", name);
    return number;
}

/* The device to train on, and its name for messages. *no_gpu: why auto found no GPU, or "". */
static const mixp_device *choose_device(const config *c, char *name, size_t space,
                                        const char **no_gpu) {
    int                wanted = wanted_device(c), ordinal = wanted < 0 ? 0 : wanted;
    const mixp_device *gpu = NULL, *device;
    *no_gpu = "";
    if (wanted != THE_CPU) gpu = find_gpu(ordinal, no_gpu);
    if (!gpu && wanted >= 0)
        die(HAS_CUDA ? 1 : 2, "--device %s: %s; --device cpu needs none", c->device, *no_gpu);
    device = gpu ? gpu : cpu_named(c->isa);
    if (gpu) snprintf(name, space, "cuda:%d", ordinal);
    else snprintf(name, space, "%s", device->name);
    if (c->graph && !device->capture_begin)
        die(2, "--graph needs a GPU, and this is %s: leave it out%s", name,
            HAS_CUDA ? ", or use --device cuda" : "");
    return device;
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

/* ==== Memory, before it is allocated ================================================
 *
 * A device whose kernels do nothing and whose memory is only counted: a step on it takes no time,
 * and the context then knows how much memory the step needs.
 */
#define MEASURE_STUB(group, kernel, what, parameters, arguments)                                  \
    static mixp_result measured_##kernel parameters {                                             \
        (void)x;                                                                                  \
        (void)k;                                                                                  \
        return MIXP_OK;                                                                           \
    }
PROFILE_KERNELS(MEASURE_STUB)

static uintptr_t measured_address;

static void *measured_allocate(const mixp_exec *x, size_t bytes) {
    uintptr_t at = measured_address;
    (void)x;
    measured_address += (bytes + 255) & ~(size_t)255;
    return (void *)at;
}

static void measured_release(const mixp_exec *x, void *p) {
    (void)x;
    (void)p;
}

static mixp_result measured_upload(const mixp_exec *x, void *to, const void *from, size_t bytes) {
    (void)x;
    (void)to;
    (void)from;
    (void)bytes;
    return MIXP_OK;
}

static mixp_result measured_download(const mixp_exec *x, void *to, const void *from, size_t bytes) {
    (void)x;
    (void)from;
    memset(to, 0, bytes);
    return MIXP_OK;
}

static const mixp_device *measuring_device(void) {
    static mixp_kernels kernels;        /* kernels that this file does not know are NULL */
    static mixp_device  device;
#define MEASURE_PUT(group, kernel, what, parameters, arguments) kernels.kernel = measured_##kernel;
    PROFILE_KERNELS(MEASURE_PUT)
    device.name = "measure";
    device.kernels = &kernels;
    device.allocate = measured_allocate;
    device.release = measured_release;
    device.upload = measured_upload;
    device.download = measured_download;
    measured_address = (uintptr_t)1 << 5 * sizeof measured_address;    /* 2^40 with 64-bit pointers  */
    return &device;
}

/* The memory of this machine, or the limit of this process's group; 0 = unknown. */
static double machine_memory(void) {
    double all = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE), limit;
    FILE  *f = fopen("/sys/fs/cgroup/memory.max", "r");
    if (f && fscanf(f, "%lf", &limit) == 1 && limit < all) all = limit;
    if (f) fclose(f);
    return all > 0 ? all : 0;
}

static const char *bytes_text(double bytes, char *text, size_t space) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    for (bytes /= 1024; bytes >= 1000 && unit < 3; unit++) bytes /= 1024;
    snprintf(text, space, bytes < 100 && unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return text;
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
    die(1, "this needs about %s, and the machine has %s: take a smaller --batch, --block, --width "
           "or fewer --layers (%.1f M parameters)", bytes_text(need, need_text, 32),
        bytes_text(have, have_text, 32), (double)t->model.n_parameters / 1e6);
}

/* ==== Where time and memory went ==================================================== */

/* The peak memory of this process; 0 if the system does not report it. */
static double process_peak(void) {
    FILE  *f = fopen("/proc/self/status", "r");
    char   line[256];
    double kib = 0;
    while (f && fgets(line, sizeof line, f)) sscanf(line, "VmHWM: %lf", &kib);
    if (f) fclose(f);
    return 1024 * kib;
}

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
