#pragma once
#include "block.c"
/* --- memory ---------------------------------------------------------------------------- */

static void *mixpi_default_allocate(size_t bytes, void *user) {
    (void)user;
    return malloc(bytes);
}

static void mixpi_default_release(void *p, void *user) {
    (void)user;
    free(p);
}

static void *mixpi_host_take(mixp_context *ctx, size_t bytes) {
    return ctx->exec.host.allocate(bytes, ctx->exec.host.user);
}

static void mixpi_host_free(mixp_context *ctx, void *p) {
    ctx->exec.host.release(p, ctx->exec.host.user);
}

/* Returns the device's reason for a failed call, or the text of r if the device has none. */
static const char *mixpi_why(const mixp_context *ctx, mixp_result r) {
    const char *why = ctx->device->message ? ctx->device->message(&ctx->exec) : "";
    return *why ? why : mixp_result_text(r);
}

/* Reports every failure of the device, in whichever call it appears. */
static mixp_result mixpi_note_failure(mixp_context *ctx, const char *who, mixp_result r) {
    return r == MIXP_OK ? r : mixp_context_fail(ctx, r, "%s: %s", who, mixpi_why(ctx, r));
}

/* Like mixpi_note_failure, but silent if an error was reported since ctx->errors.reported was
 * `reported`: on_error is called once for a failure, even if it cleared the error. */
static mixp_result mixpi_note_failure_since(
    mixp_context *ctx, uint64_t reported, const char *who, mixp_result r) {
    return ctx->errors.reported != reported ? r : mixpi_note_failure(ctx, who, r);
}

/* Explains high memory use in a loop that forgot mixp_step_begin; "" otherwise. */
static const char *mixpi_piled_up(const mixp_context *ctx, char text[160]) {
    *text = '\0';
    if (ctx->tape.calls > 64)
        snprintf(text, 160,
            "; %.0f operators were applied since mixp_step_begin: if they are of several steps, "
            "call mixp_step_begin first in every step, also in evaluation",
            (double)ctx->tape.calls);
    return text;
}

static mixp_result mixpi_out_of_memory(mixp_context *ctx, size_t bytes) {
    const mixpi_block *b = ctx->memory.block;
    char piled[160];
    if (b)
        return mixp_context_fail(ctx, MIXP_ERR_MEMORY,
            "out of memory: %.0f bytes do not fit in the block of %.0f bytes; to find the size, "
            "run with large memory_bytes and read mixp_context_memory(ctx).block%s",
            (double)bytes, (double)(b->before + b->size), mixpi_piled_up(ctx, piled));
    return mixp_context_fail(ctx, MIXP_ERR_MEMORY,
        "out of memory: %.0f bytes could not be allocated (%.0f in use); use a smaller batch or "
        "model%s",
        (double)bytes, (double)ctx->memory.permanent, mixpi_piled_up(ctx, piled));
}

/* Large buffers start at multiples of MIXPI_LARGE_ALIGN bytes, all others at multiples of 64. A
 * processor first compares only low bits of addresses to see whether a load reads what an earlier
 * store writes. If a loop writes, in the low 12 bits, 64 to 512 bytes behind the place that it
 * reads, it can take 1.3 to 2.6 times as long on Zen 4; the higher bits decide. */
enum { MIXPI_LARGE_ALIGN = 1024, MIXPI_LARGE = 8192 };

/* Where a buffer of `bytes` bytes may start: a multiple of this. */
static size_t mixpi_alignment(size_t bytes) { return bytes < MIXPI_LARGE ? 64 : MIXPI_LARGE_ALIGN; }

/* Bytes from p to the next place for a buffer of `bytes` bytes. */
static size_t mixpi_skip(const void *p, size_t bytes) {
    return (0u - (uintptr_t)p) & (mixpi_alignment(bytes) - 1);
}

/* Allocates a piece of memory, with a record in host memory. Returns NULL with the error set. */
static mixpi_piece *mixpi_piece_new(mixp_context *ctx, size_t bytes, int on_device) {
    int from_device = on_device && ctx->device->allocate;
    size_t extra = sizeof(mixpi_piece) + mixpi_alignment(bytes);
    mixpi_piece *p = NULL;
    char piled[160];
    if (bytes <= (size_t)-1 - extra)
        p = (mixpi_piece *)mixpi_host_take(ctx, from_device ? sizeof *p : bytes + extra);
    if (!p) {
        mixpi_out_of_memory(ctx, bytes);
        return NULL;
    }

    p->next = NULL;
    p->size = bytes;
    p->used = 0;
    p->from_device = from_device;
    p->on_device = on_device;
    p->owner = NULL;

    /* The memory itself: the device's, or what follows the record. */
    p->data = from_device ? ctx->device->allocate(&ctx->exec, bytes)
                          : (char *)(p + 1) + mixpi_skip(p + 1, bytes);
    if (!p->data) {
        mixpi_host_free(ctx, p);
        mixp_context_fail(ctx, MIXP_ERR_MEMORY,
            "%.0f bytes of device memory could not be allocated (%.0f in use): %s%s", (double)bytes,
            (double)ctx->memory.permanent, mixpi_why(ctx, MIXP_ERR_MEMORY),
            mixpi_piled_up(ctx, piled));
        return NULL;
    }

    ctx->memory.allocations++;
    if (on_device) ctx->memory.allocated += bytes;
    return p;
}

static void mixpi_piece_free(mixp_context *ctx, mixpi_piece *p) {
    mixpi_piece *next;
    for (; p; p = next) {
        next = p->next;
        if (p->from_device && ctx->device->release) ctx->device->release(&ctx->exec, p->data);
        mixpi_host_free(ctx, p);
    }
}

static void mixpi_note_peak(mixp_context *ctx) {
    size_t used = ctx->memory.permanent + ctx->memory.dev.used;
    if (used > ctx->memory.peak) ctx->memory.peak = used;
}

/* Fills n elements of dst with value, or converts n elements from src to dst. */
static mixp_result mixpi_fill_with(mixp_context *ctx, mixp_out dst, int64_t n, double value) {
    mixp_fill_args k = MIXPI_ZERO;
    k.n = n;
    k.value = value;
    k.dst = dst;
    return mixpi_note_failure(ctx, "fill", ctx->device->kernels->fill(&ctx->exec, &k));
}
static mixp_result mixpi_convert_to(mixp_context *ctx, mixp_out dst, mixp_in src, int64_t n) {
    mixp_convert_args k = MIXPI_ZERO;
    k.n = n;
    k.src = src;
    k.dst = dst;
    return mixpi_note_failure(ctx, "convert", ctx->device->kernels->convert(&ctx->exec, &k));
}

/* The arguments of kernels over dense arrays, other fields 0. A look at x[n]: */
static mixp_look_args mixpi_look_at(mixp_in x, int64_t n, mixp_dtype low, mixp_look *row) {
    mixp_look_args k = MIXPI_ZERO;
    k.n = n;
    k.x = x;
    k.low = low;
    k.row = row;
    return k;
}

/* y = op(a) with the parameter p, n elements. */
static mixp_unary_args mixpi_unary_of(mixp_unary op, float p, mixp_in a, mixp_out y, int64_t n) {
    mixp_unary_args k = MIXPI_ZERO;
    k.op = op;
    k.p = p;
    k.n = n;
    k.a = a;
    k.y = y;
    return k;
}

/* y = a op b, rows by cols. */
static mixp_binary_args mixpi_binary_of(
    mixp_binary op, mixp_in a, mixp_in b, mixp_out y, int64_t rows, int64_t cols) {
    mixp_binary_args k = MIXPI_ZERO;
    k.op = op;
    k.rank = 2;
    k.shape[0] = rows;
    k.shape[1] = cols;
    k.a_strides[0] = k.b_strides[0] = cols;
    k.a_strides[1] = k.b_strides[1] = 1;
    k.a = a;
    k.b = b;
    k.y = y;
    return k;
}

/* y[cols] = factor times the sums of the columns of a[n, cols]. */
static mixp_reduce_args mixpi_reduce_of(
    mixp_in a, int64_t n, int64_t cols, double factor, mixp_out y) {
    mixp_reduce_args k = MIXPI_ZERO;
    k.outer = 1;
    k.n = n;
    k.inner = cols;
    k.factor = (float)factor;
    k.a = a;
    k.y = y;
    return k;
}

/* Bytes of t's data. */
static size_t mixpi_bytes(const mixp_tensor *t) {
    return (size_t)t->count * mixp_dtype_size(t->dtype);
}

/* Copies bytes within device memory. */
static mixp_result mixpi_copy_bytes(mixp_context *ctx, void *to, const void *from, size_t bytes) {
    const size_t words = bytes / 4, rest = bytes % 4;
    mixp_result r = mixpi_convert_to(
        ctx, mixpi_out_to(to, MIXP_I32, 0), mixpi_in(from, MIXP_I32), (int64_t)words);
    if (!rest || r != MIXP_OK) return r;
    return mixpi_convert_to(ctx, mixpi_out_to((char *)to + 4 * words, MIXP_U8, 0),
        mixpi_in((const char *)from + 4 * words, MIXP_U8), (int64_t)rest);
}

static mixp_result mixpi_device_zero(mixp_context *ctx, void *data, size_t bytes) {
    return mixpi_fill_with(ctx, mixpi_out_to(data, MIXP_U8, 0), (int64_t)bytes, 0.0);
}

/* Zeroed memory that lives as long as the context; NULL with the error set. */
static void *mixpi_permanent(mixp_context *ctx, size_t bytes, int on_device) {
    mixpi_piece *p = mixpi_piece_new(ctx, bytes, on_device);
    if (!p) return NULL;
    p->next = ctx->memory.pieces;
    ctx->memory.pieces = p;
    if (!on_device) return memset(p->data, 0, bytes);
    ctx->memory.permanent += bytes;
    mixpi_note_peak(ctx);
    mixp_result r = mixpi_device_zero(ctx, p->data, bytes);
    if (r == MIXP_OK) return p->data;
    mixp_context_fail(ctx, r, "%.0f bytes of device memory could not be zeroed: %s", (double)bytes,
        mixp_result_text(r));
    return NULL;
}

static void *mixpi_device_alloc(mixp_context *ctx, size_t n) { return mixpi_permanent(ctx, n, 1); }
static void *mixpi_host_alloc(mixp_context *ctx, size_t n) { return mixpi_permanent(ctx, n, 0); }

/* Like mixpi_permanent, for memory that may be freed before the context: the piece knows its
 * owner. */
static void *mixpi_owned_alloc(mixp_context *ctx, const void *owner, size_t bytes, int on_device) {
    void *p = mixpi_permanent(ctx, bytes, on_device);
    if (p) ctx->memory.pieces->owner = owner;
    return p;
}

/* Allocates a record in host memory that is its own owner. */
static void *mixpi_owner_new(mixp_context *ctx, size_t bytes) {
    void *p = mixpi_host_alloc(ctx, bytes);
    if (p) ctx->memory.pieces->owner = p;
    return p;
}

/* Frees all pieces of owner, and owner itself. */
static void mixpi_owned_free(mixp_context *ctx, const void *owner) {
    mixpi_piece **at = &ctx->memory.pieces, *gone = NULL, *p;
    while ((p = *at) != NULL) {
        if (p->owner != owner) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        p->next = gone;
        gone = p;
        if (!p->on_device) continue;
        ctx->memory.permanent -= p->size;
        ctx->memory.allocated -= p->size;
    }
    mixpi_piece_free(ctx, gone);
}

static size_t mixpi_round_up(size_t bytes) { return (bytes + 63u) & ~(size_t)63u; }

/* The bytes that a buffer needs in an arena. */
static size_t mixpi_room(size_t bytes) {
    const size_t to = mixpi_alignment(bytes);
    return bytes ? (bytes + to - 1) & ~(to - 1) : to;
}

/* Adds a piece for `bytes` or a quarter of all existing pieces, whichever is larger: the unused end
 * of the last piece then stays small. */
static mixpi_piece *mixpi_arena_grow(mixp_context *ctx, mixpi_arena *a, size_t bytes) {
    size_t total = 0, least = (size_t)1 << (ctx->memory.block ? 12 : 16), most = (size_t)1 << 30;
    mixpi_piece **at = &a->first;
    if (a->turns) bytes *= (size_t)a->turns;
    for (; *at; at = &(*at)->next) total += (*at)->size;
    total /= 4;
    if (total < least) total = least;
    if (total > most) total = most;
    *at = mixpi_piece_new(ctx, bytes > total ? bytes : total, a->on_device);
    if (!*at) return NULL;
    (*at)->part = (*at)->size;
    if (a->turns) {
        (*at)->part /= (size_t)a->turns;
        (*at)->part -= (*at)->part % mixpi_alignment((*at)->part);
    }
    return *at;
}

/* Reuses a free buffer: one of exactly that size, or part of a larger one. A small buffer uses the
 * end, so that the front stays at its multiple of MIXPI_LARGE_ALIGN. Returns NULL if none fits. */
static void *mixpi_arena_again(mixpi_arena *a, size_t bytes) {
    mixpi_free **at = &a->free, **larger = NULL;
    for (; *at && (*at)->size != bytes; at = &(*at)->next)
        if ((*at)->size > bytes && !larger) larger = at;
    if (!*at) at = larger;
    if (!at) return NULL;
    (*at)->size -= bytes;
    void *data = (char *)(*at)->data + (bytes < MIXPI_LARGE ? (*at)->size : 0);
    if (data == (*at)->data) (*at)->data = (char *)data + bytes;
    if ((*at)->size == 0) *at = (*at)->next;
    return data;
}

/* The end of what is used of a piece, and the bytes from there to the next buffer's start. */
static char *mixpi_arena_end(const mixpi_arena *a, const mixpi_piece *p) {
    return (char *)p->data + (size_t)a->turn * p->part + p->used;
}
static size_t mixpi_arena_skip(const mixpi_arena *a, const mixpi_piece *p, size_t bytes) {
    return p->from_device ? 0 : mixpi_skip(mixpi_arena_end(a, p), bytes);
}

/* Allocates from the first piece with room. Returns NULL with the error set. */
static void *mixpi_arena_place(mixp_context *ctx, mixpi_arena *a, size_t bytes) {
    mixpi_piece *p = a->first;
    while (p && p->part - p->used < mixpi_arena_skip(a, p, bytes) + bytes) p = p->next;
    if (!p) p = mixpi_arena_grow(ctx, a, bytes);
    if (!p) return NULL;
    p->used += mixpi_arena_skip(a, p, bytes);
    void *data = mixpi_arena_end(a, p);
    p->used += bytes;
    MIXPI_ASSERT((uintptr_t)data % 64 == 0 || ctx->device->allocate);
    MIXPI_ASSERT(p->used <= p->part);
    return data;
}

/* Allocates uninitialised memory until the next reset. Returns NULL with the error set. */
static void *mixpi_arena_take(mixp_context *ctx, mixpi_arena *a, size_t bytes) {
    if (bytes > (size_t)-1 - MIXPI_LARGE) {
        mixpi_out_of_memory(ctx, bytes);
        return NULL;
    }
    bytes = mixpi_room(bytes);
    void *p = mixpi_arena_again(a, bytes);
    if (!p) p = mixpi_arena_place(ctx, a, bytes);
    if (!p) return NULL;
    a->used += bytes;
    mixpi_note_peak(ctx);
    return p;
}

/* Allocates zeroed host memory that lasts until the next step. */
static void *mixpi_step_alloc(mixp_context *ctx, size_t bytes) {
    void *p = mixpi_arena_take(ctx, &ctx->memory.host, bytes);
    if (p) memset(p, 0, bytes);
    return p;
}

/* Frees a buffer within the step. Later requests that fit may reuse the buffer. */
static void mixpi_arena_free(mixp_context *ctx, mixpi_arena *a, void *data, size_t bytes) {
    mixpi_free *f = (mixpi_free *)mixpi_step_alloc(ctx, sizeof *f);
    if (!f) return; /* no harm: the buffer is not reused */
    f->data = data;
    f->size = mixpi_room(bytes);
    f->next = a->free;
    a->free = f;
    MIXPI_ASSERT(a->used >= f->size);
    a->used -= f->size;
}

static void mixpi_arena_reset(mixpi_arena *a) {
    for (mixpi_piece *p = a->first; p; p = p->next) p->used = 0;
    a->used = 0;
    a->free = NULL;
}

/* Chooses the part for the next step, pseudo-randomly, among the parts that this step does not use.
 * A program that keeps old tensors, one of every few steps, soon meets a tensor that is refused. */
static void mixpi_records_turn(mixp_context *ctx) {
    mixpi_arena *a = &ctx->memory.records;
    int skipped = a->turns > 2 && ctx->generation * 0x9E3779B97F4A7C15u >> 63;
    mixpi_arena_reset(a);
    a->turn = (a->turn + 1 + skipped) % a->turns;
}

static void *mixpi_context_scratch(void *user, size_t bytes) {
    mixp_context *ctx = (mixp_context *)user;
    mixpi_piece *p = ctx->memory.scratch;
    if (p && p->size >= bytes) return p->data;
    p = mixpi_piece_new(ctx, bytes + bytes / 4, 1);
    if (!p) return NULL;
    p->next = ctx->memory.scratch; /* a queued kernel may still use the old piece */
    ctx->memory.scratch = p;
    return p->data;
}
