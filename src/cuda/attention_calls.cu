#pragma once
#include "attention_f32.cu"
namespace {

/* --- calls ------------------------------------------------------------------------------- */

inline int64_t query_blocks(const Heads &h, int rows) {
    return ceil_div(h.t, rows) * h.b * h.heads;
}
inline int64_t key_blocks(const Heads &h, int rows) {
    return ceil_div(h.keys, rows) * h.b * (h.heads / h.group);
}

inline mixp_result attention_launch(Kernel *k, void (*kernel)(Heads), int64_t blocks, size_t bytes,
    const Heads &h, int threads = attention_threads) {
    cudaError_t e = cudaSuccess;
    if (blocks > 0x7FFFFFFF)
        return say(k->state, MIXP_ERR_SHAPE, "attention",
            "more rows than the grid of a kernel can hold; split the batch");
    e = make_room(k->state, (const void *)kernel, bytes);
    if (e == cudaSuccess) e = MIXPI_LAUNCH(kernel, (unsigned)blocks, threads, bytes, k->stream, h);
    return k->report("attention", e);
}

inline bool wants_keys(const Heads &h) { return h.dk.data || h.dv.data; }

template <int D, bool bf16, bool modified>
mixp_result tensor_run(Kernel *k, const Heads &h, bool backward) {
    typedef Forward<D, modified> Ahead;
    typedef Backward<D, modified> Back;
    if (!backward)
        return attention_launch(
            k, attention_forward<D, bf16, modified>, query_blocks(h, Ahead::rows), Ahead::bytes, h);
    mixp_result r = attention_launch(k, attention_backward<D, bf16, false, modified>,
        query_blocks(h, Back::rows), Back::bytes, h);
    if (r != MIXP_OK || !wants_keys(h)) return r;
    return attention_launch(
        k, attention_backward<D, bf16, true, modified>, key_blocks(h, Back::rows), Back::bytes, h);
}

#ifndef MIXPREC_CUDASIM
/* Does the current GPU, of capability 9.0, run code that was compiled for sm_90a? The bounds of a
 * kernel show it. */
inline bool has_group_code() {
    cudaFuncAttributes own = {};
    cudaError_t e = cudaFuncGetAttributes(&own, wide_forward<64, true>);
    clear_error(e);
    return e == cudaSuccess && own.maxThreadsPerBlock == WideForward<64>::threads;
}
inline bool is_by_groups(State *s) {
    if (s->capability == 90 && !s->by_groups) s->by_groups = has_group_code() ? 1 : -1;
    return s->by_groups > 0;
}

template <int D> inline int wide_bytes(bool backward) {
    int own = WideBackward<D, false>::bytes, own_keys = WideBackward<D, true>::bytes;
    return !backward ? WideForward<D>::bytes : own > own_keys ? own : own_keys;
}

template <int D, bool bf16> mixp_result wide_run(Kernel *k, const Heads &h, bool backward) {
    typedef WideForward<D> Ahead;
    typedef WideBackward<D, false> Back;
    typedef WideBackward<D, true> BackKeys;
    if (!backward)
        return attention_launch(k, wide_forward<D, bf16>, query_blocks(h, Ahead::rows),
            Ahead::bytes, h, Ahead::threads);
    mixp_result r = attention_launch(k, wide_backward<D, bf16, false>, query_blocks(h, Back::rows),
        Back::bytes, h, Back::threads);
    if (r != MIXP_OK || !wants_keys(h)) return r;
    return attention_launch(k, wide_backward<D, bf16, true>, key_blocks(h, BackKeys::rows),
        BackKeys::bytes, h, BackKeys::threads);
}
#endif

template <int D> mixp_result tensor_by_dtype(Kernel *k, const Heads &h, bool backward) {
#ifndef MIXPREC_CUDASIM
    const int wide_d = D == 32 ? 64 : D;
    if (D != 32 && !h.modified && wide_bytes<wide_d>(backward) <= k->state->most_shared &&
        is_by_groups(k->state))
        return h.q.dtype == MIXP_BF16 ? wide_run<wide_d, true>(k, h, backward)
                                      : wide_run<wide_d, false>(k, h, backward);
#endif
    if (h.q.dtype == MIXP_BF16)
        return h.modified ? tensor_run<D, true, true>(k, h, backward)
                          : tensor_run<D, true, false>(k, h, backward);
    return h.modified ? tensor_run<D, false, true>(k, h, backward)
                      : tensor_run<D, false, false>(k, h, backward);
}

inline mixp_result tensor_run(Kernel *k, const Heads &h, bool backward) {
    switch (h.d) {
    case 32: return tensor_by_dtype<32>(k, h, backward);
    case 64: return tensor_by_dtype<64>(k, h, backward);
    default: return tensor_by_dtype<128>(k, h, backward);
    }
}

/* Can 16 bytes of a row of D be read at once? Yes for an absent array. */
inline bool is_wide(mixp_in a, const mixp_head_strides &at) {
    return is_wide(a) && (at.sequence | at.head | at.row) % 8 == 0;
}

/* Can each row of each array? */
inline bool is_wide(const Heads &h) {
    return h.d % 8 == 0 && is_wide(h.q, h.q_at) && is_wide(h.k, h.k_at) && is_wide(h.v, h.v_at) &&
           is_wide(h.y) && is_wide(h.dy) && is_wide(h.out) && is_wide(h.dk) && is_wide(h.dv);
}

/* Bytes of shared memory that the kernel for this head dimension needs. */
template <int D> inline int tensor_bytes(const Heads &h, bool backward) {
    if (backward) return h.modified ? Backward<D, true>::bytes : Backward<D, false>::bytes;
    return h.modified ? Forward<D, true>::bytes : Forward<D, false>::bytes;
}
inline int tensor_bytes(const Heads &h, bool backward) {
    return h.d == 32   ? tensor_bytes<32>(h, backward)
           : h.d == 64 ? tensor_bytes<64>(h, backward)
                       : tensor_bytes<128>(h, backward);
}
/* Does the GPU have the tensor cores and the shared memory? Kernels that change scores have fewer
 * rows per block, so they fit where the others do not. */
inline bool tensor_can(const State *s, Heads &h, bool backward) {
    if (s->capability < 75 || (s->capability < 80 && h.q.dtype != MIXP_F16)) return false;
    if (tensor_bytes(h, backward) > s->most_shared) h.modified = true;
    return tensor_bytes(h, backward) <= s->most_shared;
}

/* Can tensor cores compute it? */
inline bool tensor_takes(const State *s, Heads &h, bool backward) {
    mixp_dtype dtype = h.q.dtype;
    return tensor_can(s, h, backward) && (h.d == 32 || h.d == 64 || h.d == 128) &&
           dtype != MIXP_F32 && h.k.dtype == dtype && h.v.dtype == dtype &&
           (!backward || h.dy.dtype == dtype) && h.scale > 1e-30f && h.scale < 1e30f && is_wide(h);
}

inline bool is_modified(const Heads &h) { return h.mask.data || h.limit || h.softcap > 0.0f; }

template <int parts> inline mixp_result plain_run(Kernel *k, const Heads &h, bool backward) {
    const int M = parts == 4 ? 2 : 4, of_keys = parts == 1 ? 4 : 2;
    if (!backward)
        return attention_launch(
            k, plain_forward<parts, M>, query_blocks(h, 16 * M), plain_bytes(M), h);
    mixp_result r = attention_launch(
        k, plain_backward<false, parts, M>, query_blocks(h, 16 * M), plain_bytes(M), h);
    if (r != MIXP_OK || !wants_keys(h)) return r;
    return attention_launch(k, plain_backward<true, parts, of_keys>, key_blocks(h, 16 * of_keys),
        plain_bytes(of_keys), h);
}
inline mixp_result plain_run(Kernel *k, Heads &h, bool backward) {
    h.modified = is_modified(h); /* whatever tensor cores have no room for */
    h.wide = is_wide(h);
    return h.d <= plain_columns       ? plain_run<1>(k, h, backward)
           : h.d <= 2 * plain_columns ? plain_run<2>(k, h, backward)
                                      : plain_run<4>(k, h, backward);
}

inline bool attends_nothing(const mixp_attention_args &args) {
    return args.b <= 0 || args.t <= 0 || args.keys <= 0 || args.heads <= 0 || args.d <= 0;
}

inline bool short_row(const mixp_head_strides &at) { return at.row <= 0x7FFFFFFF; }

/* Reports a call that the kernels do not support; otherwise MIXP_OK. */
inline mixp_result attention_check(const Kernel &k, const mixp_attention_args &args) {
    if (args.d > attention_most_d)
        return say(
            k.state, MIXP_ERR_SHAPE, "attention", "a head is wider than 256; use more heads");
    if (args.t > most_rows || args.keys > most_rows || args.heads > 0x1FFFFF ||
        !short_row(args.q_at) || !short_row(args.k_at) || !short_row(args.v_at))
        return say(k.state, MIXP_ERR_SHAPE, "attention",
            "a sequence, a head count or a row stride exceeds the kernel's limit; use shorter "
            "sequences");
    if (!is_real(args.q.dtype) || !is_real(args.k.dtype) || !is_real(args.v.dtype) ||
        !is_real(args.y.dtype) || (args.mask.data && !is_real(args.mask.dtype)))
        return MIXP_ERR_DTYPE;
    if (args.kv_heads < 1 || args.heads % args.kv_heads || args.past < 0 ||
        !(args.softcap >= 0.0f) || !(args.dropout >= 0.0f && args.dropout < 1.0f))
        return MIXP_ERR_ARGUMENT;
    return MIXP_OK;
}

/* Sets the fields that change scores: cap, mask, dropout. */
inline void heads_modify(Heads *h, const mixp_attention_args &args) {
    h->lengths = args.lengths;
    h->mask = args.mask;
    h->mask_at = args.mask_at;
    h->mask_key = (int)args.mask_key;
    h->softcap = args.softcap;
    h->limit = (uint64_t)ceil((double)args.dropout * 4294967296.0);
    h->kept = (float)(1.0 / (1.0 - (double)args.dropout));
    h->modified = is_modified(*h);
    h->may_hide = h->mask.data || h->lengths;
}

inline mixp_result heads_make(const Kernel &k, const mixp_attention_args &args, Heads *h) {
    mixp_result r = attention_check(k, args);
    if (r != MIXP_OK) return r;
    memset((void *)h, 0, sizeof *h);

    /* The sizes. */
    h->b = args.b;
    h->t = (int)args.t;
    h->keys = (int)args.keys;
    h->heads = (int)args.heads;
    h->group = (int)(args.heads / args.kv_heads);
    h->d = (int)args.d;
    h->ahead = args.causal ? (int)least(args.past, most_ahead) : most_ahead;
    h->scale = args.scale;

    /* The arrays, and where their rows stand. */
    h->q = args.q;
    h->k = args.k;
    h->v = args.v;
    h->q_at = args.q_at;
    h->k_at = args.k_at;
    h->v_at = args.v_at;
    h->y_at.head = args.d;
    h->y_at.row = args.heads * args.d;
    h->y_at.sequence = args.t * h->y_at.row;
    h->out = args.y;
    h->lse = args.lse;

    /* Set what changes scores, and the place of faults. */
    h->fault = fault_flag(k.state);
    h->draws = draws_of(k.state, args.seed, args.step, args.tensor);
    heads_modify(h, args);
    return MIXP_OK;
}

inline bool writes(mixp_out a) { return !a.data || is_real(a.dtype); }

inline mixp_result heads_make(const Kernel &k, const mixp_attention_backward_args &args, Heads *h) {
    mixp_result r = heads_make(k, args.forward, h);
    if (r != MIXP_OK) return r;
    if (!is_real(args.dy.dtype) || !writes(args.dq) || !writes(args.dk) || !writes(args.dv))
        return MIXP_ERR_DTYPE;
    h->y = as_in(args.forward.y);
    h->dy = args.dy;
    h->out = args.dq;
    h->dk = args.dk;
    h->dv = args.dv;
    return MIXP_OK;
}

}   /* namespace */

static mixp_result mixpi_cuda_attention(const mixp_exec *x, const mixp_attention_args *args) {
    Kernel k(x);
    Heads h;
    if (!k.state) return MIXP_ERR_ORDER;
    if (attends_nothing(*args)) return MIXP_OK;
    mixp_result r = heads_make(k, *args, &h);
    if (r != MIXP_OK) return r;
    return tensor_takes(k.state, h, false) ? tensor_run(&k, h, false) : plain_run(&k, h, false);
}

static mixp_result mixpi_cuda_attention_backward(
    const mixp_exec *x, const mixp_attention_backward_args *args) {
    Kernel k(x);
    Heads h;
    mixp_result r;
    if (!k.state) return MIXP_ERR_ORDER;
    if (attends_nothing(args->forward)) return MIXP_OK;
    r = heads_make(k, *args, &h);
    if (r != MIXP_OK) return r;
    h.delta = (float *)scratch_of(x, (size_t)(h.b * h.heads * h.t) * sizeof(float));
    if (!h.delta) return MIXP_ERR_MEMORY;
    return tensor_takes(k.state, h, true) ? tensor_run(&k, h, true) : plain_run(&k, h, true);
}
