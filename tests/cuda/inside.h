/* inside.h - what a few tests look at inside mixprec_cuda.cu. Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * tests/cuda/inside.cu compiles the companion with these functions behind it, once; all CUDA tests
 * link that object, so that none compiles the companion again.
 */
#ifndef INSIDE_H
#define INSIDE_H
#include "mixprec.h"

struct InsideLimits {
    int     ring_pieces;            /* uploads that need not wait                               */
    int     mirrors;                /* blocks that have a mirror, at most                       */
    size_t  mirror_bytes;           /* of one mirror, at most                                   */
    int64_t plans;                  /* products' plans that are kept                            */
    int64_t bins, chunk_elements;   /* of statistics                                            */
};
InsideLimits inside_limits();

/* Plans of products that a context keeps. */
int64_t inside_plans(const mixp_exec *x);

/* Shared memory that a block may have, in bytes; returns what it was. 0: only looks. */
int inside_most_shared(const mixp_exec *x, int bytes);
/* The GPU's capability, times ten. */
int inside_capability(const mixp_exec *x);

/* Do tensor cores take this attention, forward and backward? */
mixp_result inside_tensor_takes(mixp_exec *x, const mixp_attention_backward_args &args, bool *takes);

/* A product by the tiled kernel that serves where cuBLASLt does not. */
mixp_result inside_product_by_tiles(mixp_exec *x, const mixp_gemm_args &args);

/* Mirrors: a kernel adds 1 to 8 to p[0] to p[7], and copies the block to its mirror. */
void inside_add_and_mirror(const mixp_exec *x, uint64_t *p);
bool inside_has_mirror(const mixp_exec *x, void *p, size_t bytes);

/* Faults: a kernel reports a bad target; the host forgets the report, then the GPU does. */
void inside_bad_target(const mixp_exec *x, int32_t target);
void inside_forget_on_host(const mixp_exec *x);
void inside_forget_on_gpu(const mixp_exec *x);
/* Does the next step stop? */
int inside_stops(const mixp_exec *x);

#ifdef MIXPREC_CUDASIM
/* Functions of the device, called on the host: a / n, and where the last element of an array of this
 * shape lies, densely and with the strides. */
int64_t inside_quotient(int64_t a, int64_t n);
int inside_last(int rank, const int64_t *shape, const int64_t *strides, int64_t at[4]);
int64_t inside_grid(int64_t n, int threads);
#endif
#endif
