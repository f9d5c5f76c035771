#pragma once
#include "memory.cu"
namespace {

/* --- captures -------------------------------------------------------------------------- *
 *
 * Between begin and end, kernels are recorded instead of run, on a stream used for nothing else. So
 * work that the program queues meanwhile on the legacy stream is not captured. A call that waits,
 * such as cudaMemcpy, may end the capture: the driver's rules leave that open. An upload is
 * recorded as a copy from memory that belongs to the graph. Each upload has its own memory, even if
 * a step writes to one address several times. A kernel that draws random numbers adds `later` to
 * its step (struct Draws), so that each replay draws its own numbers.
 */
void graph_free(const mixp_exec *x, void *graph) {
    Kernel k(x);
    Graph *g = (Graph *)graph;
    if (!g) return;
    if (k.state->capture) abandon_capture(x); /* CUDA frees nothing in a capture */

    /* Wait for replays that read the graph's blocks. */
    if (g->exec) k.report("graph", cudaGraphExecDestroy(g->exec));
    if (g->blocks) k.report("graph", cudaStreamSynchronize(k.state->stream));

    for (int i = 0; i < g->count; i++) host_free(x->host, g->uploads[i].kept);
    while (g->blocks) {
        Block *b = g->blocks;
        g->blocks = b->next;
        memory_free(k.state, b->memory);
        host_free(x->host, b);
    }
    host_free(x->host, (void *)g->uploads);
    host_free(x->host, g);
}

/* Loads the one kernel that a capture records without an earlier run. Drivers before 12.3 cannot
 * load a kernel during a capture. */
inline cudaError_t load_recorded() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, (const void *)mirror_again);
}

mixp_result capture_begin(mixp_exec *x) {
    Kernel k(x);
    State *s = k.state;
    if (!s) return MIXP_ERR_ORDER;
    if (s->capture)
        return say(s, MIXP_ERR_ORDER, "capture",
            "a capture is already active; call mixp_capture_end first");
    mixp_result r = check_stream(s, "capture");
    if (r != MIXP_OK) return r;
    r = k.report("capture", load_recorded());
    if (r != MIXP_OK) return r;

    /* Begin to record, on the stream that is used for nothing else. */
    Graph *g = (Graph *)host_new(x->host, sizeof *g);
    if (!g) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");
    r = k.report("capture", cudaStreamBeginCapture(s->recorder, cudaStreamCaptureModeThreadLocal));
    if (r != MIXP_OK) {
        host_free(x->host, g);
        return r;
    }

    /* Kernels launch on it until the capture ends. */
    s->capture = g;
    s->captured = x;
    x->stream = (void *)s->recorder;
    return MIXP_OK;
}

/* Ends the capture. *graph: the recorded graph; NULL: the graph cannot be run. */
inline mixp_result capture_stop(const mixp_exec *x, Graph **graph) {
    Kernel k(x);
    State *s = k.state;
    Graph *g = s->capture;
    s->capture = NULL;
    s->captured->stream = (void *)s->stream;

    /* Make the recorded kernels a graph that can run. */
    cudaGraph_t recorded = NULL;
    mixp_result r = k.report("capture", cudaStreamEndCapture(s->recorder, &recorded));
    if (r == MIXP_OK) r = k.report("capture", cudaGraphInstantiate(&g->exec, recorded, 0ull));
    if (recorded) clear_error(cudaGraphDestroy(recorded));

    /* Fill the stages of uploads that every replay repeats. */
    for (int i = 0; i < g->count && r == MIXP_OK; i++)
        if (g->uploads[i].kept) r = upload_send(s, &g->uploads[i]);
    if (r == MIXP_OK) *graph = g;
    else graph_free(x, g);
    return r;
}

mixp_result capture_end(mixp_exec *x, void **graph) {
    State *s = state_of(x);
    *graph = NULL;
    if (!s || !s->capture) return MIXP_ERR_ORDER;
    Graph *g = NULL;
    mixp_result r = capture_stop(x, &g);
    *graph = g;
    return r;
}

/* Abandons the capture because memory is to be freed in the middle of it. CUDA frees no memory
 * during a capture, and work queued before the capture may still use the memory. */
void abandon_capture(const mixp_exec *x) {
    Graph *g = NULL;
    if (capture_stop(x, &g) == MIXP_OK) graph_free(x, g);
    device_wait(x);
}

mixp_result replay(const mixp_exec *x, void *graph, uint64_t later) {
    Kernel k(x);
    Graph *g = (Graph *)graph;
    if (!k.state || !g || k.state->capture) return MIXP_ERR_ORDER;

    /* Fill the stages of uploads that are read again, and set the steps since the capture. */
    mixp_result r = check_stream(k.state, "replay");
    for (int i = 0; i < g->count && r == MIXP_OK; i++) r = upload_send(k.state, &g->uploads[i]);
    if (r == MIXP_OK)
        r = k.report(
            "replay", MIXPI_LAUNCH(set_later, 1, 1, 0, k.stream, &k.state->block->later, later));

    return r == MIXP_OK ? k.report("replay", cudaGraphLaunch(g->exec, k.stream)) : r;
}

/* --- a context's state ----------------------------------------------------------------- */

void device_close(mixp_exec *x) {
    State *s = state_of(x);
    if (!s) return;
    OnDevice on(s->ordinal);
    if (s->capture) abandon_capture(x);
    if (s->stream) clear_error(cudaStreamSynchronize(s->stream));

    /* Free the products' plans and workspace. */
    if (s->plans) s->free_plans(s);
    if (s->lt) cublasLtDestroy(s->lt);
    host_free(s->host, s->choices);
    memory_free(s, s->workspace);

    /* Free pinned and device memory, with the events of its copies. */
    for (int i = 0; i < ring_pieces; i++)
        if (s->sent[i]) clear_error(cudaEventDestroy(s->sent[i]));
    for (int i = 0; i < post_slots; i++) {
        if (s->post_sent[i]) clear_error(cudaEventDestroy(s->post_sent[i]));
        if (s->post[i]) clear_error(cudaFreeHost(s->post[i]));
    }
    if (s->ring) clear_error(cudaFreeHost(s->ring));
    memory_free(s, s->block);
    if (s->shared) clear_error(cudaFreeHost(s->shared));

    /* Destroy our streams, and restore the program's own. */
    if (s->recorder && s->recorder != s->stream) clear_error(cudaStreamDestroy(s->recorder));
    if (s->stream && !s->given) clear_error(cudaStreamDestroy(s->stream));
    x->stream = s->given;
    x->state = NULL;
    host_free(s->host, s);
}

inline cudaError_t open_pinned(State *s) {
    /* Memory that kernels see. */
    cudaError_t e =
        cudaHostAlloc((void **)(void *)&s->shared, sizeof *s->shared, cudaHostAllocMapped);
    if (e != cudaSuccess) return e;
    memset((void *)s->shared, 0, sizeof *s->shared);
    e = cudaHostGetDevicePointer((void **)(void *)&s->shared_on_device, s->shared, 0);

    /* The ring of uploads. */
    if (e == cudaSuccess)
        e = cudaHostAlloc(
            (void **)(void *)&s->ring, ring_pieces * piece_bytes, cudaHostAllocDefault);
    for (int i = 0; i < ring_pieces && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&s->sent[i], cudaEventDisableTiming);
    return e;
}

inline mixp_result open_memory(State *s) {
    void *p = NULL;
    mixp_result r = report_error(s, open_pinned(s), "pinned memory");
    if (r == MIXP_OK) r = memory_new(s, sizeof *s->block, &p);
    s->block = (Private *)p;
    if (r == MIXP_OK)
        r = report_error(s, cudaMemsetAsync(p, 0, sizeof *s->block, s->stream), "device memory");
    if (r != MIXP_OK) return r;
    return report_error(s,
        MIXPI_LAUNCH(check_subnormals, 1, 1, 0, s->stream, fault_flag(s), 1.17549435e-38f),
        "a known answer");
}

/* Does a given stream belong to this GPU? CUDA and drivers before 12.8 cannot tell. */
inline cudaError_t check_given(int ordinal, cudaStream_t given) {
#if CUDART_VERSION >= 12080
    int device = -1;
    cudaError_t e = cudaStreamGetDevice(given, &device);
    if (e == cudaSuccess && device != ordinal) return cudaErrorInvalidDevice;
    if (e != cudaErrorCallRequiresNewerDriver && e != cudaErrorNotSupported) return e;
    cudaGetLastError();
#endif
    (void)ordinal;
    (void)given;
    return cudaSuccess;
}

/* Opens the program's stream, or our own. Ours is a blocking stream: it and the legacy default
 * stream wait for each other, as in a program without streams. Captures record a separate stream,
 * except with a given stream, where the program's own launches belong to the step. */
inline cudaError_t open_stream(State *s) {
    cudaStream_t given = (cudaStream_t)s->given;
    cudaError_t e = given ? check_given(s->ordinal, given)
                          : cudaStreamCreateWithFlags(&s->stream, cudaStreamDefault);
    if (e != cudaSuccess) return e;
    if (given) s->stream = given;
    if (given && given != cudaStreamLegacy) {
        s->recorder = given;
        return cudaSuccess;
    }
    return cudaStreamCreateWithFlags(&s->recorder, cudaStreamNonBlocking);
}

/* Major and minor in one number. */
inline cudaError_t capability_of(int ordinal, int *capability) {
    int major = 0, minor = 0;
    cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    *capability = 10 * major + minor;
    return e;
}

mixp_result choices_read(State *s, const char *text);       /* see section 6                 */

mixp_result device_open(mixp_exec *x, int ordinal) {
    x->state = NULL;
    State *s = (State *)host_new(x->host, sizeof *s);
    if (!s) return MIXP_ERR_MEMORY;
    OnDevice on(ordinal);
    s->ordinal = ordinal;
    s->host = x->host;
    s->device = x->device;
    s->given = x->stream;
    s->measure = x->gemm_measure != 0;

    /* Ask for the GPU's properties, and open the stream. */
    cudaError_t e = on.error;
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&s->processors, cudaDevAttrMultiProcessorCount, ordinal);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(
            &s->most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
    if (e == cudaSuccess) e = capability_of(ordinal, &s->capability);
    if (e == cudaSuccess) e = open_stream(s);
    mixp_result r = report_error(s, e, "stream");
    if (s->given && (e == cudaErrorInvalidDevice || e == cudaErrorInvalidResourceHandle))
        r = MIXP_ERR_ARGUMENT;

    /* Allocate memory, and read the program's choices of algorithms. */
    if (r == MIXP_OK) r = open_memory(s);
    if (r == MIXP_OK) r = choices_read(s, x->gemm_choices);
    x->state = s;
    x->stream = (void *)s->stream;
    if (r != MIXP_OK) device_close(x);
    return r;
}

/* The handle and workspace of products, made at the first. */
inline mixp_result open_products(State *s) {
    if (s->lt && s->workspace) return MIXP_OK;
    if (s->capture) return refuse_in_capture(s, "the first product");
    if (!s->lt && cublasLtCreate(&s->lt) != CUBLAS_STATUS_SUCCESS)
        return say(s, MIXP_ERR_DEVICE, "cuBLASLt", "could not be started");
    return memory_new(s, workspace_bytes, &s->workspace);
}

/* How many products have run in each way so far. */
mixp_gemm_count gemm_count(const mixp_exec *x) {
    State *s = state_of(x);
    mixp_gemm_count none = { 0, 0, 0, 0, 0 };
    return s ? s->products : none;
}

/* The text of the last error; "" when there was none. */
const char *device_message(const mixp_exec *x) {
    State *s = state_of(x);
    return s ? s->message : "";
}

}   /* namespace */
