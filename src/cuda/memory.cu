#pragma once
#include "runtime.cu"
namespace {

/* --- memory ---------------------------------------------------------------------------- */

inline mixp_result refuse_in_capture(State *s, const char *what) {
    return say(s, MIXP_ERR_ORDER, what, "not possible while a step is captured");
}

/* Zeroed memory of the host, from the context's allocator. */
inline void *host_new(const mixp_allocator &from, size_t bytes) {
    void *p = from.allocate ? from.allocate(bytes, from.user) : malloc(bytes);
    if (p) memset(p, 0, bytes);
    return p;
}
inline void host_free(mixp_allocator from, void *p) {
    if (p && from.release) from.release(p, from.user);
    else free(p);
}

inline mixp_result check_pointer(State *s, const void *p, const char *what) {
    if (!p) return say(s, MIXP_ERR_ARGUMENT, what, "the pointer is NULL");
    cudaPointerAttributes a = {};
    mixp_result r = report_error(s, cudaPointerGetAttributes(&a, p), what);
    if (r != MIXP_OK) return r;
    if (a.type == cudaMemoryTypeUnregistered)
        return say(s, MIXP_ERR_ARGUMENT, what, "the pointer is to host memory; pass device memory");
    if (a.type == cudaMemoryTypeDevice && a.device != s->ordinal)
        return say(s, MIXP_ERR_ARGUMENT, what, "the pointer is to another GPU's memory");
    return MIXP_OK;
}

/* GPU memory from the user's allocator, if any; such memory is checked before use. */
inline mixp_result memory_new(State *s, size_t bytes, void **p) {
    *p = NULL;
    const mixp_allocator &from = s->device;
    if (!from.allocate) return report_error(s, cudaMalloc(p, bytes ? bytes : 1), "allocation");
    *p = from.allocate(bytes ? bytes : 1, from.user);
    if (!*p) return say(s, MIXP_ERR_MEMORY, "device_allocator", "out of memory");

    /* Check the user's memory, and free unusable memory. */
    mixp_result r = MIXP_OK;
    if ((uintptr_t)*p % memory_alignment)
        r = say(s, MIXP_ERR_ARGUMENT, "device_allocator",
            "the allocator's memory is not aligned to 256 bytes");
    if (r == MIXP_OK) r = check_pointer(s, *p, "device_allocator");
    if (r != MIXP_OK) {
        from.release(*p, from.user);
        *p = NULL;
    }
    return r;
}
/* Frees p when no queued work uses p any more. cudaFree waits; the user's allocator need not. */
inline void memory_free(State *s, void *p) {
    if (p && s->device.allocate) s->device.release(p, s->device.user);
    else if (p) report_error(s, cudaFree(p), "release");
}

void *device_allocate(const mixp_exec *x, size_t bytes) {
    Kernel k(x);
    void *p = NULL;
    if (!k.state) return NULL;
    if (k.state->capture) {
        refuse_in_capture(k.state, "allocation");
        return NULL;
    }
    if (k.report("allocation", cudaSuccess) != MIXP_OK) return NULL;
    return memory_new(k.state, bytes, &p) == MIXP_OK ? p : NULL;
}

void abandon_capture(const mixp_exec *x);

void device_release(const mixp_exec *x, void *p) {
    Kernel k(x);
    if (!p || !k.state) return;
    if (k.state->capture) abandon_capture(x);
    memory_free(k.state, p);
    for (int i = 0; i < mirror_count; i++) /* the address may be reused */
        if (k.state->mirrored[i] == p) k.state->mirrored[i] = NULL;
}

/* MIXP_OK when the bytes at p are memory of the context's GPU. */
mixp_result device_check(const mixp_exec *x, const void *p, size_t bytes) {
    Kernel k(x);
    (void)bytes;
    return k.state ? check_pointer(k.state, p, "device memory") : MIXP_ERR_ORDER;
}

/* Uploads through the ring, piece by piece. It waits for a piece instead of polling, because
 * cudaEventQuery would leave "not ready" as the program's last error. */
inline mixp_result send(State *s, void *device, const void *host, size_t bytes) {
    mixp_result r = MIXP_OK;
    size_t done = 0;
    while (done < bytes && r == MIXP_OK) {
        /* Wait until the next piece is free. */
        const size_t n = bytes - done < piece_bytes ? bytes - done : piece_bytes;
        const unsigned i = s->next++ % ring_pieces;
        unsigned char *piece = s->ring + i * piece_bytes;
        cudaError_t e = cudaEventSynchronize(s->sent[i]);

        /* Fill it, and queue its copy. */
        if (e == cudaSuccess) {
            memcpy(piece, (const char *)host + done, n);
            e = cudaMemcpyAsync((char *)device + done, piece, n, cudaMemcpyDefault, s->stream);
        }
        if (e == cudaSuccess) e = cudaEventRecord(s->sent[i], s->stream);
        r = report_error(s, e, "upload");
        done += n;
    }
    return r;
}

/* Updates the mirror after an upload to a mirrored block. */
inline mixp_result update_mirror(State *s, const void *device, size_t bytes) {
    int i = mirror_at(s, device, bytes);
    if (i < 0) return MIXP_OK;
    return report_error(
        s, MIXPI_LAUNCH(mirror_again, 1, 256, 0, queue_of(s), mirrored(s, i)), "upload");
}

/* Refuses to run while the program itself captures the stream that it passed. Uploads would become
 * part of that capture, from pinned memory that later uploads overwrite, and every replay would
 * draw the same random numbers. */
inline mixp_result check_stream(State *s, const char *what) {
    if (!s->given || s->capture) return MIXP_OK;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    mixp_result r = report_error(s, cudaStreamIsCapturing(s->stream, &status), what);
    if (r != MIXP_OK || status == cudaStreamCaptureStatusNone) return r;
    return say(s, MIXP_ERR_ORDER, what,
        "the program captures this stream; use mixp_capture_begin instead");
}

/* Lets this thread allocate memory during a capture, outside of the captured graph. */
class Relaxed {
  public:
    Relaxed() : mode(cudaStreamCaptureModeRelaxed) { cudaThreadExchangeStreamCaptureMode(&mode); }
    ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode); }

  private:
    cudaStreamCaptureMode mode;
};

inline mixp_result block_new(State *s, Graph *g, size_t bytes) {
    Block *b = (Block *)host_new(s->host, sizeof *b);
    if (!b) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");
    b->size = bytes > piece_bytes ? bytes : piece_bytes;
    mixp_result r = memory_new(s, b->size, &b->memory);
    if (r != MIXP_OK) {
        host_free(s->host, b);
        return r;
    }
    b->next = g->blocks;
    g->blocks = b;
    return MIXP_OK;
}

inline mixp_result stage_new(State *s, Graph *g, size_t bytes, void **stage) {
    const size_t room = (bytes + memory_alignment - 1) / memory_alignment * memory_alignment;
    Relaxed relaxed;
    mixp_result r = MIXP_OK;
    if (!g->blocks || g->blocks->size - g->blocks->used < room) r = block_new(s, g, room);
    if (r != MIXP_OK) return r;
    *stage = (char *)g->blocks->memory + g->blocks->used;
    g->blocks->used += room;
    return MIXP_OK;
}

inline Upload *upload_new(State *s, Graph *g) {
    if (g->count == g->room) {
        int room = g->room ? 2 * g->room : 16;
        Upload *more = (Upload *)host_new(s->host, (size_t)room * sizeof *more);
        if (!more) return NULL;
        if (g->count) memcpy((void *)more, (void *)g->uploads, (size_t)g->count * sizeof *more);
        host_free(s->host, (void *)g->uploads);
        g->uploads = more;
        g->room = room;
    }
    return &g->uploads[g->count];
}

/* Records an upload in the captured step. again: each replay reads host again. */
inline mixp_result record_upload(
    State *s, void *device, const void *host, size_t bytes, bool again) {
    Graph *g = s->capture;
    Upload *u = upload_new(s, g);
    if (!u) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");

    /* Use a separate stage, and keep a copy of memory that is read once. */
    memset((void *)u, 0, sizeof *u);
    mixp_result r = stage_new(s, g, bytes, &u->stage);
    if (r != MIXP_OK) return r;
    u->host = host;
    u->bytes = bytes;
    if (!again) {
        u->kept = host_new(s->host, bytes);
        if (!u->kept) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");
        memcpy(u->kept, host, bytes);
    }
    g->count++;

    /* Record the copy from the stage. */
    r = report_error(
        s, cudaMemcpyAsync(device, u->stage, bytes, cudaMemcpyDefault, s->recorder), "upload");
    return r == MIXP_OK ? update_mirror(s, device, bytes) : r;
}

/* Fills an upload's stage, before a replay or at the end of the capture. */
inline mixp_result upload_send(State *s, Upload *u) {
    mixp_result r = MIXP_OK;
    if (!u->sent) r = send(s, u->stage, u->kept ? u->kept : u->host, u->bytes);
    u->sent = u->kept && r == MIXP_OK;
    return r;
}

inline mixp_result upload(
    const mixp_exec *x, void *device, const void *host, size_t bytes, bool again) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    if (!bytes) return MIXP_OK;
    if (!device || !host) return say(k.state, MIXP_ERR_ARGUMENT, "upload", "a pointer is NULL");
    if (k.state->capture) return record_upload(k.state, device, host, bytes, again);

    mixp_result r = check_stream(k.state, "upload");
    if (r == MIXP_OK) r = send(k.state, device, host, bytes);
    return r == MIXP_OK ? update_mirror(k.state, device, bytes) : r;
}

mixp_result device_upload(const mixp_exec *x, void *device, const void *host, size_t bytes) {
    return upload(x, device, host, bytes, false);
}
mixp_result device_feed(const mixp_exec *x, void *device, const void *host, size_t bytes) {
    return upload(x, device, host, bytes, true);
}

mixp_result device_wait(const mixp_exec *x) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    if (k.state->capture) return refuse_in_capture(k.state, "waiting");
    mixp_result r = check_stream(k.state, "waiting");
    if (r == MIXP_OK) r = k.report("an earlier kernel", cudaStreamSynchronize(k.stream));
    return r == MIXP_OK ? report_fault(k.state) : r;
}

mixp_result device_download(const mixp_exec *x, void *host, const void *device, size_t bytes) {
    Kernel k(x);
    if (!k.state) return MIXP_ERR_ORDER;
    if (!bytes) return MIXP_OK;
    if (!device || !host) return say(k.state, MIXP_ERR_ARGUMENT, "download", "a pointer is NULL");
    if (k.state->capture) return refuse_in_capture(k.state, "download");

    mixp_result r = check_stream(k.state, "download");
    if (r == MIXP_OK)
        r = k.report("download", cudaMemcpyAsync(host, device, bytes, cudaMemcpyDefault, k.stream));
    return r == MIXP_OK ? device_wait(x) : r;
}

/* The pinned copy of a slot, enlarged when needed. Enlarging waits for copies in flight. */
inline mixp_result make_post_room(State *s, int slot, size_t bytes) {
    if (s->post_bytes[slot] >= bytes) return MIXP_OK;

    /* Free the smaller copy when no queued work writes it any more. */
    if (s->post[slot]) clear_error(cudaStreamSynchronize(s->stream));
    if (s->post[slot]) clear_error(cudaFreeHost(s->post[slot]));
    s->post[slot] = NULL;
    s->post_bytes[slot] = 0;

    cudaError_t e = cudaHostAlloc(&s->post[slot], bytes, cudaHostAllocDefault);
    if (e == cudaSuccess && !s->post_sent[slot])
        e = cudaEventCreateWithFlags(&s->post_sent[slot], cudaEventDisableTiming);
    if (e == cudaSuccess) s->post_bytes[slot] = bytes;
    return report_error(s, e, "pinned memory");
}

mixp_result device_post(const mixp_exec *x, int slot, const void *device, size_t bytes) {
    Kernel k(x);
    State *s = k.state;
    if (!s) return MIXP_ERR_ORDER;
    if (s->capture) return refuse_in_capture(s, "post");
    mixp_result r = check_stream(s, "post");
    if (r == MIXP_OK) r = make_post_room(s, slot, bytes);
    if (r == MIXP_OK)
        r = k.report(
            "post", cudaMemcpyAsync(s->post[slot], device, bytes, cudaMemcpyDefault, k.stream));
    return r == MIXP_OK ? report_error(s, cudaEventRecord(s->post_sent[slot], k.stream), "post")
                        : r;
}

/* Reports the fault that kernels recorded. Deferred while the program captures the stream. */
inline mixp_result report_unless_captured(State *s) {
    if (!s->shared->fault || check_stream(s, "a look") != MIXP_OK) return MIXP_OK;
    return report_fault(s);
}

mixp_result device_collect(const mixp_exec *x, int slot, void *host, size_t bytes) {
    Kernel k(x);
    State *s = k.state;
    if (!s || s->post_bytes[slot] < bytes) return MIXP_ERR_ORDER;
    mixp_result r = report_error(s, cudaEventSynchronize(s->post_sent[slot]), "collect");
    if (r == MIXP_OK) memcpy(host, s->post[slot], bytes);
    return r == MIXP_OK ? report_unless_captured(s) : r;
}

/* Before the first write to the mirror, reads the block itself. Host memory is filled even when a
 * fault is reported. */
mixp_result device_peek(const mixp_exec *x, void *host, const void *device, size_t bytes) {
    Kernel k(x);
    State *s = k.state;
    int i = s ? mirror_at(s, device, bytes) : -1;
    if (i >= 0) {
        size_t offset = (size_t)((const char *)device - (const char *)s->mirrored[i]);
        if (mirror_load(&s->shared->mirrors[i], host, offset, bytes))
            return report_unless_captured(s);
    }
    return device_download(x, host, device, bytes);
}

}   /* namespace */
