/* shared_work.h - a context that gives all of its work to its threads, however small, or counts it.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef SHARED_WORK_H
#define SHARED_WORK_H
#include "mixprec.h"
#include <string.h>

/* The context's own: kernels only read it. */
static mixp_exec *exec_of(mixp_context *ctx) {
    const mixp_exec *x = mixp_context_exec(ctx);
    mixp_exec *own;
    memcpy(&own, &x, sizeof own);
    return own;
}

static void share_all_work(mixp_context *ctx) { exec_of(ctx)->least_work = 0; }

/* A new context that gives all of its work to `threads` threads. */
static inline mixp_context *context_on(const mixp_device *device, int threads) {
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.device = device;
    d.threads = threads;
    mixp_context *ctx = mixp_context_new(&d);
    share_all_work(ctx);
    return ctx;
}
#endif
