/* test_small_work.c - work that is too small for threads stays in the calling thread, larger work
 * is shared, and both give the same bits.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "test.h"
#include "small_net.h"
#include "shared_work.h"

enum { STEPS = 3, THREADS = 2 };

static void (*parallel)(void *user, int64_t tasks, mixp_task task, void *arg);
static int regions;

static void count_region(void *user, int64_t tasks, mixp_task task, void *arg) {
    regions++;
    parallel(user, tasks, task, arg);
}

/* 0: this build has no threads. */
static int count_regions(mixp_context *ctx) {
    mixp_exec *x = exec_of(ctx);
    regions = 0;
    if (!x->parallel) return 0;
    parallel = x->parallel;
    x->parallel = count_region;
    return 1;
}

/* Parallel regions of a few steps; -1: this build has no threads. */
static int regions_of(int64_t width, int64_t batch) {
    small_net net;
    small_net_init(&net, THREADS, width, batch);
    int counted = count_regions(net.ctx);
    for (int step = 0; step < STEPS; step++) small_net_step(&net);
    CHECK_INT(mixp_context_error(net.ctx, NULL), MIXP_OK);
    CHECK(net.loss > 0);
    small_net_free(&net);
    return counted ? regions : -1;
}

static void small_steps_stay_in_their_thread(void) {
    static const int64_t batches[] = { 1, 16, 64, 128 };
    if (regions_of(64, 1) < 0) SKIP("built without threads");
    for (int i = 0; i < 4; i++) CHECK_INT(regions_of(64, batches[i]), 0);
}

static void large_steps_are_shared(void) {
    if (regions_of(64, 1) < 0) SKIP("built without threads");
    CHECK(regions_of(512, 256) >= 6 * STEPS);  /* the products of the wide layer, relu, the update */
}

enum { WIDTH = 96, BATCH = 80, ATTENDED = 2 * 24 * 96, MOST = 96 * 96 };

static void train(float *weights, int threads, int share) {
    small_net net;
    small_net_init(&net, threads, WIDTH, BATCH);
    if (share) share_all_work(net.ctx);
    for (int step = 0; step < STEPS; step++) small_net_step(&net);
    mixp_read(net.w[1], weights, MIXP_F32, WIDTH * WIDTH);
    small_net_free(&net);
}

/* Two sequences of 24 positions and 4 heads of 8, forward and backward; the gradient of q, k and v. */
static void attend(float *gradient, int threads, int share) {
    static const int64_t shape[] = { 2, 24, 96 };
    mixp_context_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;
    mixp_context *ctx = mixp_context_new(&desc);
    if (share) share_all_work(ctx);
    mixp_tensor *qkv = mixp_param(ctx, "qkv", MIXP_F32, 3, shape);
    mixp_init_normal(qkv, 0, 1);
    mixp_step_begin(ctx);
    mixp_tensor *y = mixp_attention(ctx, qkv, 4, 1, 0);
    y = mixp_softmax(ctx, mixp_layer_norm(ctx, y, NULL, NULL, 1e-5f));
    mixp_backward(ctx, mixp_mean(ctx, mixp_mul(ctx, y, y), MIXP_ALL, 0));
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_read(qkv->grad, gradient, MIXP_F32, ATTENDED);
    mixp_context_free(ctx);
}

static void the_same_bits_shared_or_not(void) {
    static float alone[MOST], got[MOST];
    train(alone, 1, 0);
    train(got, 3, 0);
    CHECK(memcmp(got, alone, sizeof alone) == 0);
    train(got, 3, 1);
    CHECK(memcmp(got, alone, sizeof alone) == 0);
    attend(alone, 1, 0);
    attend(got, 3, 0);
    CHECK(memcmp(got, alone, ATTENDED * sizeof *got) == 0);
    attend(got, 3, 1);
    CHECK(memcmp(got, alone, ATTENDED * sizeof *got) == 0);
}

int main(void) {
    RUN(small_steps_stay_in_their_thread);
    RUN(large_steps_are_shared);
    RUN(the_same_bits_shared_or_not);
    return test_report();
}
