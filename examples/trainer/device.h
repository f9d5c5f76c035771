/* device.h - the options --device, --isa and --graph: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_DEVICE_H
#define TRAINER_DEVICE_H

#include "isa.h"

static int gpu_ordinal;                 /* of the GPU that was found */

#ifdef TRAINER_CUDA
/* Functions of CUDA's runtime, which mixprec_cuda.cu links; NULL where a device of another kind stands in. */
#  ifdef TRAINER_NCCL
#    include <cuda_runtime_api.h>
static inline int has_runtime(void) { return 1; }
#  else
extern int cudaSetDevice(int device) __attribute__((__weak__));
extern int cudaMemGetInfo(size_t *left, size_t *all) __attribute__((__weak__));
static inline int has_runtime(void) { return cudaSetDevice != NULL && cudaMemGetInfo != NULL; }
#  endif
enum { HAS_CUDA = 1 };
static const mixp_device *find_gpu(int ordinal, const char **why) {
    gpu_ordinal = ordinal;
    return mixp_cuda(ordinal, why);
}

/* The free memory of the GPU that was found; 0 = unknown. */
static inline double gpu_memory(void) {
    size_t left = 0, all = 0;
    if (!has_runtime() || cudaSetDevice(gpu_ordinal) != 0) return 0;
    return cudaMemGetInfo(&left, &all) == 0 ? (double)left : 0;
}
#else
static inline double gpu_memory(void) { return 0; }
enum { HAS_CUDA = 0 };
static const mixp_device *find_gpu(int ordinal, const char **why) {
    gpu_ordinal = ordinal;
    *why = "this program was built without CUDA. Build it with -DTRAINER_CUDA and "
           "mixprec_cuda.cu, as the top of trainer.c shows";
    return NULL;
}
#endif

/* The value of --device: the number of a GPU, or one of these. */
enum { THE_CPU = -1, ANY = -2 };

static int wanted_device(const char *name) {
    int         number = 0, length = 0;
    if (strcmp(name, "auto") == 0) return ANY;
    if (strcmp(name, "cpu") == 0) return THE_CPU;
    if (strcmp(name, "cuda") == 0) return 0;
    if (sscanf(name, "cuda:%5d%n", &number, &length) != 1 || name[length] || number < 0)
        die(2, "--device: \"%s\" is not one of auto|cpu|cuda|cuda:1, and so on", name);
    return number;
}

/* The device of --device, --isa and --graph, and its name for messages. *no_gpu: why auto found no GPU, or what
 * makes the code of the GPU slow ("slow: ..."), or "". */
static const mixp_device *choose_device(const char *wish, const char *isa, int graph, char *name,
                                        size_t space, const char **no_gpu) {
    int                wanted = wanted_device(wish), ordinal = wanted < 0 ? 0 : wanted;
    const mixp_device *gpu = NULL, *device;
    *no_gpu = "";
    if (wanted != THE_CPU) gpu = find_gpu(ordinal, no_gpu);
    if (!gpu && wanted >= 0)
        die(HAS_CUDA ? 1 : 2, "--device %s: %s; --device cpu needs none", wish, *no_gpu);
    device = gpu ? gpu : cpu_named(isa);
    if (gpu) snprintf(name, space, "cuda:%d", ordinal);
    else snprintf(name, space, "%s", device->name);
    if (graph && !device->capture_begin)
        die(2, "--graph needs a GPU, and this is %s: leave out --graph%s", name,
            HAS_CUDA ? ", or use --device cuda" : "");
    return device;
}

#endif
