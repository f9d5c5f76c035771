/* long_large.c - arrays of more than 2^31 elements: conversions and a step reach the last element,
 * and an error names the index of a bad element. The array is one block of memory mapped many
 * times, with a separate block at the end; the test checks only that end.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _XOPEN_SOURCE 700
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
#include "mixprec.h"
#include "test.h"

#define PIECE ((size_t)64 << 20)
#define COUNT (((int64_t)1 << 31) + 77777)
enum { END = 70000 };           /* elements that are looked at: all lie behind 2^31 */

/* Room for COUNT elements of so many bytes: the same piece again and again, then another. */
static void *mapped(size_t element) {
    size_t bytes = (size_t)COUNT * element, pieces = (bytes + PIECE - 1) / PIECE, i;
    FILE *f = tmpfile();
    if (!f || ftruncate(fileno(f), (off_t)(2 * PIECE)) != 0) return NULL;
    char *at = (char *)mmap(NULL, pieces * PIECE, PROT_NONE, MAP_SHARED, fileno(f), 0);
    if (at == (char *)MAP_FAILED) return NULL;
    for (i = 0; i < pieces; i++) {
        off_t from = i + 1 < pieces ? 0 : (off_t)PIECE;
        if (mmap(at + i * PIECE, PIECE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fileno(f), from) == MAP_FAILED)
            return NULL;
    }
    fclose(f);
    return at;
}

static void unmap(void *at, size_t element) {
    size_t bytes = (size_t)COUNT * element;
    if (at) munmap(at, (bytes + PIECE - 1) / PIECE * PIECE);
}

static void conversion_reaches_the_end(void) {
    float *from = (float *)mapped(4);
    mixp_bf16 *to = (mixp_bf16 *)mapped(2);
    int wrong = 0;
    if (!from || !to) SKIP("no address space, or no disk, for arrays of 13 GB");
    for (int64_t i = COUNT - END; i < COUNT; i++) from[i] = (float)(i % 1013) / 7;
    CHECK_INT(mixp_convert(to, MIXP_BF16, from, MIXP_F32, COUNT), MIXP_OK);
    for (int64_t i = COUNT - END; i < COUNT; i++) wrong += to[i].bits != mixp_bf16_from_f32(from[i]).bits;
    CHECK_INT(wrong, 0);
    unmap(from, 4);
    unmap(to, 2);
}

static void step_reaches_the_end(void) {
    const int64_t shape[1] = { COUNT };
    float *weight = (float *)mapped(4), *grad = (float *)mapped(4);
    mixp_scaler_desc by_four;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    int wrong = 0;
    if (!weight || !grad) SKIP("no address space, or no disk, for arrays of 17 GB");
    for (int64_t i = COUNT - END; i < COUNT; i++) weight[i] = (float)(i % 91);
    for (int64_t i = COUNT - END; i < COUNT; i++) grad[i] = (float)(i % 17);
    memset(&by_four, 0, sizeof by_four);
    by_four.init_scale = 4;
    sgd.lr = 0.5;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    mixp_scaler *scaler = mixp_scaler_new(ctx, &by_four);
    CHECK_INT(mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, shape, weight),
                                 mixp_view(ctx, "g", MIXP_F32, 1, shape, grad)), MIXP_OK);
    CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
    for (int64_t i = COUNT - END; i < COUNT; i++)   /* exact: eighths of small integers */
        wrong += weight[i] != (float)(i % 91) - (float)(i % 17) / 8;
    CHECK_INT(wrong, 0);
    grad[COUNT - 3] = INFINITY;
    CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
    CHECK_INT(mixp_scaler_verdict(scaler).outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(mixp_scaler_verdict(scaler).bad_element, COUNT - 3);
    for (int64_t i = COUNT - END; i < COUNT; i++) wrong += weight[i] != (float)(i % 91) - (float)(i % 17) / 8;
    CHECK_INT(wrong, 0);
    mixp_context_free(ctx);
    unmap(weight, 4);
    unmap(grad, 4);
}

int main(void) {
    RUN(conversion_reaches_the_end);
    RUN(step_reaches_the_end);
    return test_report();
}
