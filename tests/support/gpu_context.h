/* gpu_context.h - the GPU, and a context on it, for CUDA tests.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include it after companion.h and test.h. Without a GPU the program ends: 77 is a skip; 2 means that the
 * simulated GPU is missing.
 */
#ifndef GPU_CONTEXT_H
#define GPU_CONTEXT_H

static inline const mixp_device *gpu(void) {
    const char        *why = "";
    const mixp_device *device = mixp_cuda(0, &why);
    if (device) return device;
    printf("no GPU: %s\n", why);
    exit(cudasim::simulated ? 2 : 77);
}

static inline mixp_context *gpu_context(void) {
    mixp_context_desc desc = mixp_context_desc();
    desc.device = gpu();
    return mixp_context_new(&desc);
}

#endif
