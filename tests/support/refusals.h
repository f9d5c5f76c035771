/* refusals.h - an allocator and a device that number each request for memory, kernels and copies,
 * so that a test can refuse each request in turn.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef REFUSALS_H
#define REFUSALS_H

static double seconds_now(void) { return 0; }
#include "../../examples/profile.h"        /* for its list of all kernels */

/* --- requests, numbered ------------------------------------------------------------------------ */

static struct {
    long made, refuse, most;    /* so far; the first that is refused; how many are at most */
    long refused;
    long alive;                 /* pieces of memory */
    int  memory_only;           /* 1: kernels and copies are never refused */
    const char *what;           /* the newest that was refused */
} requests;

static int refuses(const char *what) {
    long n = requests.made++;
    if (requests.refuse < 0 || n < requests.refuse || requests.refused >= requests.most) return 0;
    requests.refused++;
    requests.what = what;
    return 1;
}

/* A request that is not for memory. */
static int refuses_call(const char *what) { return !requests.memory_only && refuses(what); }

static void *give(size_t bytes, const char *what) {
    void *p = refuses(what) ? NULL : malloc(bytes ? bytes : 1);
    if (!p) return NULL;
    memset(p, 0xA5, bytes);
    requests.alive++;
    return p;
}

static void take_back(void *p) {
    requests.alive -= p != NULL;
    free(p);
}

static void *host_allocate(size_t bytes, void *user) {
    (void)user;
    return give(bytes, "host memory");
}

static void host_release(void *p, void *user) {
    (void)user;
    take_back(p);
}

/* --- a device with memory of its own ------------------------------------------------------------ */

static void *far_allocate(const mixp_exec *x, size_t bytes) {
    (void)x;
    return give(bytes, "device memory");
}

static void far_release(const mixp_exec *x, void *p) {
    (void)x;
    take_back(p);
}

static mixp_result far_upload(const mixp_exec *x, void *device, const void *host, size_t bytes) {
    (void)x;
    if (refuses_call("upload")) return MIXP_ERR_DEVICE;
    memcpy(device, host, bytes);
    return MIXP_OK;
}

static mixp_result far_download(const mixp_exec *x, void *host, const void *device, size_t bytes) {
    (void)x;
    if (refuses_call("download")) return MIXP_ERR_DEVICE;
    memcpy(host, device, bytes);
    return MIXP_OK;
}

static const mixp_device *first_cpu;    /* kept, because each call of mixp_cpu asks AMX for known answers */
#define REFUSED_WRAP(group, kernel, words, parameters, arguments)                                \
    static mixp_result refused_##kernel parameters {                                             \
        if (refuses_call(#kernel)) return MIXP_ERR_DEVICE;                                       \
        return first_cpu->kernels->kernel arguments;                                             \
    }
PROFILE_KERNELS(REFUSED_WRAP)

static mixp_kernels kernels;
static mixp_device  device;

/* far: host and device memory are apart. */
static void device_make(int far) {
    if (!first_cpu) first_cpu = mixp_cpu();
    device = *first_cpu;
    kernels = *device.kernels;
#define REFUSED_PUT(group, kernel, words, parameters, arguments)                                 \
    if (kernels.kernel) kernels.kernel = refused_##kernel;
    PROFILE_KERNELS(REFUSED_PUT)
    device.kernels = &kernels;
    if (!far) return;
    device.allocate = far_allocate;
    device.release = far_release;
    device.upload = far_upload;
    device.download = far_download;
}

#endif
