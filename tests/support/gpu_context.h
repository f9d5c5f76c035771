/* gpu_context.h - a context on the GPU, for the CUDA tests that only need one.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include it after companion.h and test.h. Without a GPU the program ends: 77 is a skip; 2 means that the
 * simulated GPU is missing.
 */
#ifndef GPU_CONTEXT_H
#define GPU_CONTEXT_H

static mixp_context *gpu_context(void) {
    mixp_context_desc desc = mixp_context_desc();
    const char       *why = "";
    desc.device = mixp_cuda(0, &why);
    if (!desc.device) {
        printf("no GPU: %s\n", why);
        exit(cudasim::simulated ? 2 : 77);
    }
    return mixp_context_new(&desc);
}

#endif
