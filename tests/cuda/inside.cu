/* inside.cu - the companion, with what a few tests look at inside of it. See inside.h. Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec_cuda.cu"
#include "inside.h"

InsideLimits inside_limits() {
    return { ring_pieces, mirror_count, mirror_bytes, most_plans, bin_count, chunk_size };
}

int64_t inside_plans(const mixp_exec *x) { return state_of(x)->plans->count; }

int inside_most_shared(const mixp_exec *x, int bytes) {
    int had = state_of(x)->most_shared;
    if (bytes) state_of(x)->most_shared = bytes;
    return had;
}
int inside_capability(const mixp_exec *x) { return state_of(x)->capability; }

mixp_result inside_tensor_takes(mixp_exec *x, const mixp_attention_backward_args &args,
                                bool *takes) {
    Kernel kernel(x);
    Heads h;
    mixp_result result = heads_make(kernel, args, &h);
    *takes = result == MIXP_OK && tensor_takes(kernel.state, h, true);
    return result;
}
mixp_result inside_product_by_tiles(mixp_exec *x, const mixp_gemm_args &args) {
    Kernel kernel(x);
    return product_by_tiles(&kernel, args);
}

__global__ void add_and_mirror(uint64_t *p, const Mirrored m) {
    const Mirrored one[1] = { m };
    if (threadIdx.x < 8) p[threadIdx.x] += threadIdx.x + 1;
    mirror_store(one);
}
void inside_add_and_mirror(const mixp_exec *x, uint64_t *p) {
    State *s = state_of(x);
    MIXPI_LAUNCH(add_and_mirror, 1, 64, 0, s->stream, p, mirror_of(s, p, 64));
}
bool inside_has_mirror(const mixp_exec *x, void *p, size_t bytes)
{ return mirror_of(state_of(x), p, bytes).to != NULL; }

__global__ void find_fault(FaultFlag flag, int32_t target)
{ if (threadIdx.x > 3) note_fault(flag, FAULT_TARGET, 7, target); }

void inside_bad_target(const mixp_exec *x, int32_t target) {
    State *s = state_of(x);
    MIXPI_LAUNCH(find_fault, 1, 32, 0, s->stream, fault_flag(s), target);
}
void inside_forget_on_host(const mixp_exec *x) { state_of(x)->shared->fault = 0; }
void inside_forget_on_gpu(const mixp_exec *x) {
    State *s = state_of(x);
    MIXPI_LAUNCH(clear_stop, 1, 1, 0, s->stream, fault_flag(s));
}
int inside_stops(const mixp_exec *x) { return state_of(x)->block->stop; }

#ifdef MIXPREC_CUDASIM
int64_t inside_quotient(int64_t a, int64_t n) { return over(a, n, inverse_of(n)); }

int inside_last(int rank, const int64_t *shape, const int64_t *strides, int64_t at[4]) {
    Axes x = dense_axes(rank, shape);
    set_strides(&x, 1, strides);
    x = merge_axes(x);
    locate(x, count_of(x) - 1, at);
    return x.rank;
}
int64_t inside_grid(int64_t n, int threads) { return grid_for(n, threads); }
#endif
