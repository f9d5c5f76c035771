/* measure.h - how much memory a step will need, without running it: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A device whose kernels do nothing and whose memory is only counted: a step on it takes no time,
 * and the context then knows how much memory the step needs.
 */
#ifndef TRAINER_MEASURE_H
#define TRAINER_MEASURE_H

#include "../plain_file.h"
#include "../profile.h"

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
    FILE  *f = plain_open("/sys/fs/cgroup/memory.max");
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

/* The peak memory of this process; 0 if the system does not report it. */
static inline double process_peak(void) {
    FILE  *f = plain_open("/proc/self/status");
    char   line[256];
    double kib = 0;
    while (f && fgets(line, sizeof line, f)) sscanf(line, "VmHWM: %lf", &kib);
    if (f) fclose(f);
    return 1024 * kib;
}

#endif
