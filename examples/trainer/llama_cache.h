/* llama_cache.h - keys and values of the earlier tokens of a sample, on the device: a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_LLAMA_CACHE_H
#define TRAINER_LLAMA_CACHE_H

/* [layers, 2, room, width], in device memory. */
typedef struct kv_cache {
    char      *memory;
    mixp_dtype dtype;
    int64_t    past, room, width;
} kv_cache;

/* A cache for `room` tokens. A guard may let an operator store f32, which holds every dtype. */
static kv_cache open_cache(int64_t room) {
    kv_cache c = { NULL, opt.level && m.dtype != MIXP_F16 ? m.dtype : MIXP_F32, 0, room,
                   cfg.kv_heads * cfg.head_dim };
    size_t   bytes = (size_t)(2 * cfg.layers * room * c.width) * mixp_dtype_size(c.dtype);
    c.memory = (char *)(m.device->allocate ? m.device->allocate(mixp_context_exec(m.ctx), bytes)
                                           : malloc(bytes));
    if (!c.memory) die(1, "out of memory for a sample of %lld tokens: use a lower --sample", (long long)room);
    return c;
}

static void close_cache(kv_cache *c) {
    if (m.device->allocate) m.device->release(mixp_context_exec(m.ctx), c->memory);
    else free(c->memory);
}

/* Appends new keys or values x[1, n, width] to array `number` of the cache, in place and without waiting for
 * the device. Returns all of the array, [1, past + n, width]. */
static mixp_tensor *with_past(int64_t number, mixp_tensor *x) {
    const kv_cache *c = m.cache;
    int64_t         size = (int64_t)mixp_dtype_size(c->dtype) * c->width, more[3] = { 1, 0, c->width };
    int64_t         all[3] = { 1, c->past, c->width };
    char           *at = c->memory + number * c->room * size;
    if (!x) return NULL;
    more[1] = x->shape[1];
    all[1] += x->shape[1];
    mixp_copy(mixp_input_view(m.ctx, c->dtype, 3, more, at + c->past * size), x);
    return mixp_input_view(m.ctx, c->dtype, 3, all, at);
}

#endif
