/* profile.h - where the time of a training step goes, kernel by kernel
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A device is a table of kernels, so another table can wrap it. Each kernel of this table reads the
 * clock, calls the device's own kernel, and reads the clock again. A program changes only here:
 *
 *     desc.device = profile_device(mixp_cpu());       before mixp_context_new
 *     profile_begin(); ...one step...; profile_end();
 *     profile_print(printf);
 *
 * A GPU works asynchronously, so the profile waits for each kernel: the kernel's time is right, but
 * the step is slower than without a profile. To measure how long ranks wait for each other, give the
 * context profile_ranks(&ranks) in place of &ranks.
 *
 * Include it in one source file of a program, after mixprec.h and after a function seconds_now(). It
 * profiles one context.
 */
#ifndef PROFILE_H
#define PROFILE_H

typedef enum profile_group {
    PROFILE_GEMM, PROFILE_ATTENTION, PROFILE_ELEMENTWISE, PROFILE_OPTIMIZER, PROFILE_WATCH,
    PROFILE_GROUPS
} profile_group;

/* X(group, kernel, displayed name, parameters, arguments), one row for each line of mixp_kernels. */
#define PROFILE_KERNELS(X)                                                                        \
    X(GEMM, gemm, "gemm", (const mixp_exec *x, const mixp_gemm_args *k), (x, k))                  \
    X(GEMM, gemm_indexed, "gemm of an image's columns",                                           \
      (const mixp_exec *x, const mixp_gemm_indexed_args *k), (x, k))                              \
    X(GEMM, gemm_epilogue, "gemm with sums or gelu",                                              \
      (const mixp_exec *x, const mixp_gemm_epilogue_args *k), (x, k))                             \
    X(GEMM, gemm_narrow, "gemm in fp8 or fp4",                                                    \
      (const mixp_exec *x, const mixp_gemm_narrow_args *k), (x, k))                               \
    X(ATTENTION, attention, "forward",                                                            \
      (const mixp_exec *x, const mixp_attention_args *k), (x, k))                                 \
    X(ATTENTION, attention_backward, "backward",                                                  \
      (const mixp_exec *x, const mixp_attention_backward_args *k), (x, k))                        \
    X(ELEMENTWISE, embedding, "embedding",                                                        \
      (const mixp_exec *x, const mixp_embedding_args *k), (x, k))                                 \
    X(ELEMENTWISE, embedding_backward, "embedding backward",                                      \
      (const mixp_exec *x, const mixp_embedding_backward_args *k), (x, k))                        \
    X(ELEMENTWISE, norm, "layer norm",                                                            \
      (const mixp_exec *x, const mixp_norm_args *k), (x, k))                                      \
    X(ELEMENTWISE, norm_backward, "layer norm backward",                                          \
      (const mixp_exec *x, const mixp_norm_backward_args *k), (x, k))                             \
    X(ELEMENTWISE, unary, "gelu and its like",                                                    \
      (const mixp_exec *x, const mixp_unary_args *k), (x, k))                                     \
    X(ELEMENTWISE, unary_backward, "gelu backward",                                               \
      (const mixp_exec *x, const mixp_unary_backward_args *k), (x, k))                            \
    X(ELEMENTWISE, binary, "add and its like",                                                    \
      (const mixp_exec *x, const mixp_binary_args *k), (x, k))                                    \
    X(ELEMENTWISE, binary_backward, "add backward",                                               \
      (const mixp_exec *x, const mixp_binary_args *k), (x, k))                                    \
    X(ELEMENTWISE, quantise, "quantisers of recipes",                                             \
      (const mixp_exec *x, const mixp_quantise_args *k), (x, k))                                  \
    X(ELEMENTWISE, hadamard, "hadamard",                                                          \
      (const mixp_exec *x, const mixp_hadamard_args *k), (x, k))                                  \
    X(ELEMENTWISE, turn, "histories of delayed scaling",                                          \
      (const mixp_exec *x, const mixp_turn_args *k), (x, k))                                      \
    X(ELEMENTWISE, recode, "codes of recipes",                                                    \
      (const mixp_exec *x, const mixp_recode_args *k), (x, k))                                    \
    X(OPTIMIZER, restore, "buffers of skipped steps",                                             \
      (const mixp_exec *x, const mixp_restore_args *k), (x, k))                                   \
    X(ELEMENTWISE, lose, "losses of recipes",                                                     \
      (const mixp_exec *x, const mixp_lose_args *k), (x, k))                                      \
    X(ELEMENTWISE, dropout, "dropout, both ways",                                                 \
      (const mixp_exec *x, const mixp_dropout_args *k), (x, k))                                   \
    X(ELEMENTWISE, softmax, "softmax",                                                            \
      (const mixp_exec *x, const mixp_softmax_args *k), (x, k))                                   \
    X(ELEMENTWISE, softmax_backward, "softmax backward",                                          \
      (const mixp_exec *x, const mixp_softmax_backward_args *k), (x, k))                          \
    X(ELEMENTWISE, cross_entropy, "cross-entropy",                                                \
      (const mixp_exec *x, const mixp_cross_entropy_args *k), (x, k))                             \
    X(ELEMENTWISE, cross_entropy_backward, "cross-entropy backward",                              \
      (const mixp_exec *x, const mixp_cross_entropy_backward_args *k), (x, k))                    \
    X(ELEMENTWISE, loss, "other losses",                                                          \
      (const mixp_exec *x, const mixp_loss_args *k), (x, k))                                      \
    X(ELEMENTWISE, loss_backward, "other losses backward",                                        \
      (const mixp_exec *x, const mixp_loss_backward_args *k), (x, k))                             \
    X(ELEMENTWISE, reduce, "sums",                                                                \
      (const mixp_exec *x, const mixp_reduce_args *k), (x, k))                                    \
    X(ELEMENTWISE, reduce_backward, "sums backward",                                              \
      (const mixp_exec *x, const mixp_reduce_args *k), (x, k))                                    \
    X(ELEMENTWISE, convert, "casts", (const mixp_exec *x, const mixp_convert_args *k), (x, k))    \
    X(ELEMENTWISE, copy, "copies and sums of gradients",                                          \
      (const mixp_exec *x, const mixp_copy_args *k), (x, k))                                      \
    X(ELEMENTWISE, fill, "fill with zeros",                                                       \
      (const mixp_exec *x, const mixp_fill_args *k), (x, k))                                      \
    X(ELEMENTWISE, scale_by, "loss times its scale",                                              \
      (const mixp_exec *x, const mixp_scale_by_args *k), (x, k))                                  \
    X(OPTIMIZER, grad_stats, "gather: overflow and norm",                                         \
      (const mixp_exec *x, const mixp_grad_stats_args *k), (x, k))                                \
    X(OPTIMIZER, clip, "clip",                                                                    \
      (const mixp_exec *x, const mixp_clip_args *k), (x, k))                                      \
    X(OPTIMIZER, prepare, "prepare: apply or skip",                                               \
      (const mixp_exec *x, const mixp_prepare_args *k), (x, k))                                   \
    X(OPTIMIZER, update, "update",                                                                \
      (const mixp_exec *x, const mixp_update_args *k), (x, k))                                    \
    X(ELEMENTWISE, where, "where and masked fill",                                                \
      (const mixp_exec *x, const mixp_where_args *k), (x, k))                                     \
    X(ELEMENTWISE, where_backward, "where backward",                                              \
      (const mixp_exec *x, const mixp_where_args *k), (x, k))                                     \
    X(ELEMENTWISE, max, "max and argmax",                                                         \
      (const mixp_exec *x, const mixp_max_args *k), (x, k))                                       \
    X(ELEMENTWISE, max_backward, "max backward",                                                  \
      (const mixp_exec *x, const mixp_max_backward_args *k), (x, k))                              \
    X(ELEMENTWISE, gather, "gather",                                                              \
      (const mixp_exec *x, const mixp_gather_args *k), (x, k))                                    \
    X(ELEMENTWISE, gather_backward, "gather backward",                                            \
      (const mixp_exec *x, const mixp_gather_args *k), (x, k))                                    \
    X(ELEMENTWISE, rope, "rotary embeddings, both ways",                                          \
      (const mixp_exec *x, const mixp_rope_args *k), (x, k))                                      \
    X(ELEMENTWISE, add_norm, "sums with their norms",                                             \
      (const mixp_exec *x, const mixp_norm_args *k), (x, k))                                      \
    X(ELEMENTWISE, cross_entropy_both, "cross-entropy, both ways in one",                         \
      (const mixp_exec *x, const mixp_cross_entropy_both_args *k), (x, k))                        \
    X(OPTIMIZER, advance, "advance: the loss scale",                                              \
      (const mixp_exec *x, const mixp_advance_args *k), (x, k))                                   \
    X(OPTIMIZER, agree, "agree: what all ranks found",                                            \
      (const mixp_exec *x, const mixp_agree_args *k), (x, k))                                   \
    X(WATCH, look, "looks of the guard and the log",                                              \
      (const mixp_exec *x, const mixp_look_args *k), (x, k))

#define PROFILE_SLOT(group, kernel, what, parameters, arguments)  PROFILE_##kernel,
enum { PROFILE_KERNELS(PROFILE_SLOT) PROFILE_SLOTS };

static struct {
    const mixp_device *inner;           /* the device whose kernels are timed */
    mixp_device        device;
    mixp_kernels       kernels;
    int                on;              /* 1: between profile_begin and profile_end */
    int64_t            steps, calls[PROFILE_SLOTS];
    double             began, wall, seconds[PROFILE_SLOTS];
    mixp_ranks_desc    world;           /* the ranks whose hooks are timed */
    double             ranks;           /* seconds in those hooks */
} profile;

/* Records the end of a kernel. Returns the kernel's result. */
static mixp_result profile_note(const mixp_exec *x, int slot, double began, mixp_result result) {
    if (!profile.on) return result;
    if (profile.inner->wait && result == MIXP_OK) result = profile.inner->wait(x);
    profile.seconds[slot] += seconds_now() - began;
    profile.calls[slot]++;
    return result;
}

#define PROFILE_WRAP(group, kernel, what, parameters, arguments)                                  \
    static mixp_result profile_of_##kernel parameters {                                           \
        double      began = seconds_now();                                                        \
        mixp_result result = profile.inner->kernels->kernel arguments;                            \
        return profile_note(x, PROFILE_##kernel, began, result);                                  \
    }
PROFILE_KERNELS(PROFILE_WRAP)

/* Returns the device with timed kernels. Kernels unknown to this file are not timed: their time
 * counts as the host's. */
static inline const mixp_device *profile_device(const mixp_device *device) {
    profile.inner = device;
    profile.device = *device;
    profile.kernels = *device->kernels;
#define PROFILE_PUT(group, kernel, what, parameters, arguments) \
    if (profile.kernels.kernel) profile.kernels.kernel = profile_of_##kernel;
    PROFILE_KERNELS(PROFILE_PUT)
    profile.device.kernels = &profile.kernels;
    return &profile.device;
}

/* --- ranks: time in their hooks, which send and wait --- */

#define PROFILE_HOOK(hook)                                                                        \
    static const char *profile_##hook(void *user, void *data, int64_t count, mixp_dtype dtype,    \
                                      void *stream, double seconds) {                             \
        double      began = seconds_now();                                                        \
        const char *why = profile.world.hook(user, data, count, dtype, stream, seconds);          \
        if (profile.on) profile.ranks += seconds_now() - began;                                   \
        return why;                                                                               \
    }
PROFILE_HOOK(sum)
PROFILE_HOOK(max)
PROFILE_HOOK(all_gather)
PROFILE_HOOK(grad_ready)
PROFILE_HOOK(reduce_scatter)
PROFILE_HOOK(scatter_ready)

static const char *profile_grad_wait(void *user, void *stream, double seconds) {
    double      began = seconds_now();
    const char *why = profile.world.grad_wait(user, stream, seconds);
    if (profile.on) profile.ranks += seconds_now() - began;
    return why;
}

/* Returns ranks with hooks that call the given ranks' hooks and measure their time. */
#ifdef __GNUC__
__attribute__((__unused__))
#endif
static inline const mixp_ranks_desc *profile_ranks(const mixp_ranks_desc *ranks) {
    static mixp_ranks_desc timed;
    profile.world = timed = *ranks;
    if (timed.sum) timed.sum = profile_sum;
    if (timed.max) timed.max = profile_max;
    if (timed.all_gather) timed.all_gather = profile_all_gather;
    if (timed.grad_ready) timed.grad_ready = profile_grad_ready;
    if (timed.grad_wait) timed.grad_wait = profile_grad_wait;
    if (timed.reduce_scatter) timed.reduce_scatter = profile_reduce_scatter;
    if (timed.scatter_ready) timed.scatter_ready = profile_scatter_ready;
    return &timed;
}

static inline void profile_begin(void) {
    profile.on = 1;
    profile.began = seconds_now();
}

static inline void profile_end(void) {
    if (!profile.on) return;
    profile.wall += seconds_now() - profile.began;
    profile.steps++;
    profile.on = 0;
}

typedef int (*profile_printer)(const char *format, ...);     /* as printf */

static void profile_line(profile_printer print, const char *indent, const char *what,
                         double seconds, double calls) {
    double steps = (double)profile.steps;
    print("%s%-*s %10.3f %7.1f%%", indent, 32 - (int)strlen(indent), what, 1e3 * seconds / steps,
          100 * seconds / profile.wall);
    if (calls > 0) print(" %11.1f", calls / steps);
    print("\n");
}

static const char *const profile_groups[] = {"GEMM", "attention", "elementwise", "optimizer",
                                             "guard+log"};
#define PROFILE_GROUP(group, kernel, what, parameters, arguments)  PROFILE_##group,
#define PROFILE_WHAT(group, kernel, what, parameters, arguments)   what,
static const profile_group profile_group_of[] = {PROFILE_KERNELS(PROFILE_GROUP)};
static const char *const   profile_what[] = {PROFILE_KERNELS(PROFILE_WHAT)};

/* Returns the seconds that all steps spent in a group. *calls: number of calls. *kernels: number of
 * kernels used. */
static inline double profile_group_seconds(int group, double *calls, int *kernels) {
    double seconds = 0;
    *calls = 0;
    *kernels = 0;
    for (int i = 0; i < PROFILE_SLOTS; i++) {
        if ((int)profile_group_of[i] != group) continue;
        seconds += profile.seconds[i];
        *calls += (double)profile.calls[i];
        *kernels += profile.calls[i] > 0;
    }
    return seconds;
}

static void profile_group_lines(profile_printer print, int group, double *seconds) {
    double calls;
    int    kernels;                     /* a group of one kernel gets one line */
    *seconds = profile_group_seconds(group, &calls, &kernels);
    if (kernels == 0 && group == PROFILE_WATCH) return;
    profile_line(print, "", profile_groups[group], *seconds, calls);
    for (int i = 0; i < PROFILE_SLOTS; i++)
        if ((int)profile_group_of[i] == group && kernels > 1 && profile.calls[i])
            profile_line(print, "  ", profile_what[i], profile.seconds[i],
                         (double)profile.calls[i]);
}

/* Prints the profile. Time outside kernels is the host's: operators, tape, batches, verdicts. */
static inline void profile_print(profile_printer print) {
    double rest = profile.wall, seconds;
    if (!profile.steps) return;
    print("%-32s %10s %8s %11s\n", "where a step goes", "ms", "share", "calls");
    for (int g = 0; g < PROFILE_GROUPS; g++) {
        profile_group_lines(print, g, &seconds);
        rest -= seconds;
    }
    rest -= profile.ranks;
    if (profile.ranks > 0) profile_line(print, "", "waiting for ranks", profile.ranks, 0);
    profile_line(print, "", "the rest: host code", rest, 0);
    profile_line(print, "", "a whole step", profile.wall, 0);
    if (profile.inner->wait)
        print("The profile waits for each kernel: without --profile a step on %s is faster.\n",
              profile.inner->name);
}

#endif
