#pragma once
#include "numbers.cu"
/* ==== 2. RUNTIME ========================================================= >>runtime ====
 *
 * A context has a State: its stream, the memory outside the arena that a step reads and writes,
 * and a text of the newest error. Functions here do not wait for the GPU unless their comment
 * says so.
 *
 * Errors. A launch reports its own error at once. A kernel that finds a fault while it runs (an
 * index out of range) records the fault in memory that the host sees; the next call that waits or
 * peeks reports the fault, once. Steps queued before that report are not applied.
 *
 * Uploads go through a ring of pinned pieces. The caller may reuse its buffer when the call
 * returns. The call waits only when all pieces are in flight.
 */
namespace {

/* A fault that a kernel found while it ran, packed in one 64-bit word, so that racing threads write
 * it atomically: the kind of fault (3 bits), the row (29 bits) and the index (32 bits). */
enum Fault {
    FAULT_NONE,
    FAULT_EMBEDDING_ID,
    FAULT_TARGET,
    FAULT_LENGTH,
    FAULT_GATHER_ID,
    FAULT_FLUSHED
};
const int64_t fault_rows = (int64_t)1 << 29;

const int    ring_pieces = 8, mirror_count = 32, post_slots = 3, roomy_kernels = 32;
const size_t piece_bytes = (size_t)256 << 10, mirror_bytes = 2048 - 8;
const size_t workspace_bytes = (size_t)32 << 20, memory_alignment = 256;

/* A copy of a small block of device memory that the host can read while kernels write the copy:
 * sequence is odd during a write. */
struct Mirror {
    uint64_t sequence;
    uint32_t words[mirror_bytes / 4];
};

/* Pinned memory that kernels see. */
struct Shared {
    uint64_t fault;             /* not reported yet; 0 = none                                */
    uint64_t unused[7];
    Mirror  mirrors[mirror_count];
};

/* Device memory of a context. */
struct Private {
    uint64_t later;             /* steps from the captured step to the replayed step         */
    uint32_t arrived[16];       /* counters of last-block patterns; 0 between kernels        */
    int32_t  stop;              /* 1: no step is applied until a fault has been reported     */
    float    betas[2];          /* 0 and 1: cuBLASLt reads beta where it reads alpha         */
    uint64_t turns[mirror_count];       /* the sequence of each mirror                       */
};

/* Where kernels record a fault. */
struct FaultFlag { uint64_t *fault; int32_t *stop; };

/* An upload of a captured step. The graph copies `stage` to the destination. `stage` is filled
 * beforehand: once from `kept`, or before each replay from `host`. */
struct Upload {
    void       *stage;
    const void *host;
    void       *kept;           /* a copy, until it is sent; NULL: each replay reads host    */
    size_t      bytes;
    bool        sent;
};

/* Device memory for stages. */
struct Block {
    Block *next;
    void  *memory;
    size_t size, used;
};

/* A captured step. */
struct Graph {
    cudaGraphExec_t exec;
    Block  *blocks;
    Upload *uploads;
    int     count, room;
};

struct Plans;                   /* of products: see section 6                                */
struct Choice;

struct State {
    int              ordinal, processors;
    int              capability;        /* 75, 80, 90, ...                                  */
    int              most_shared;       /* largest shared memory of a block, in bytes        */
    mixp_allocator   host, device;  /* the context's                                         */
    cudaStream_t     stream;
    cudaStream_t     recorder;  /* the stream that captures record; the given stream, if any
                                   and if possible                                       */
    void            *given;     /* the program's stream; NULL: stream is our own             */
    Shared          *shared, *shared_on_device;
    Private         *block;
    unsigned char   *ring;
    cudaEvent_t      sent[ring_pieces];
    unsigned         next;
    const void      *mirrored[mirror_count];
    size_t           mirrored_bytes[mirror_count];
    Graph           *capture;   /* the current capture                                       */
    mixp_exec       *captured;  /* its stream is the recorder during the capture             */
    cublasLtHandle_t lt;
    void            *workspace;
    Plans           *plans;
    void           (*free_plans)(State *s);
    mixp_gemm_count  products;
    bool             measure;   /* a shape's first product times cuBLASLt's algorithms       */
    Choice          *choices;   /* of algorithms, given by the program                       */
    int              choice_count;
    void            *post[post_slots];  /* pinned copies of the posted memory               */
    size_t           post_bytes[post_slots];
    cudaEvent_t      post_sent[post_slots];
    const void      *roomy[roomy_kernels];      /* may use more than 48 KB of shared memory */
    char             message[384];
};

inline State *state_of(const mixp_exec *x) { return x ? (State *)x->state : NULL; }

/* Clears the error that a failed call left for cudaGetLastError. After a success, keeps the
 * program's own error there. */
inline void quiet(cudaError_t e) {
    if (e != cudaSuccess) cudaGetLastError();
}

/* The driver's query: does this process have a context on a GPU? NULL: the query is missing. */
typedef int PrimaryState(int device, unsigned *flags, int *active);
inline PrimaryState *find_primary_state() {
    cudaDriverEntryPointQueryResult how;
    void *found = NULL;
#if CUDART_VERSION >= 12050
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, 7000,
                                                     cudaEnableDefault, &how);
#else
    cudaError_t e =
        cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &found, cudaEnableDefault, &how);
#endif
    quiet(e);
    return e == cudaSuccess && how == cudaDriverEntryPointSuccess ? (PrimaryState *)found : NULL;
}
inline bool has_context(int ordinal) {
    static PrimaryState *const primary_state = find_primary_state();
    unsigned flags = 0;
    int active = 1;
    if (primary_state && primary_state(ordinal, &flags, &active) != 0) active = 1;
    return active != 0;
}

/* Makes GPU `ordinal` current for the lifetime of the object; -1: changes nothing. The destructor
 * restores the previous GPU only if the program has a context there. Otherwise cudaSetDevice would
 * create a context: half a gigabyte on GPU 0 for each rank of a program. */
class OnDevice {
  public:
    explicit OnDevice(int ordinal) : error(cudaSuccess), before(ordinal), now(ordinal) {
        if (now < 0) return;
        error = cudaGetDevice(&before);
        if (error == cudaSuccess && before != now) error = cudaSetDevice(now);
        quiet(error);
    }
    ~OnDevice() {
        if (before != now && has_context(before)) quiet(cudaSetDevice(before));
    }
    cudaError_t error; /* why the GPU could not be made current                     */
  private:
    int before, now;
};

/* --- errors ---------------------------------------------------------------------------- */

inline mixp_result say(State *s, mixp_result r, const char *what, const char *why) {
    if (s) snprintf(s->message, sizeof s->message, "%s: %s", what, why);
    return r;
}

/* Advice to append to the text of an error. */
inline const char *advice(cudaError_t e) {
    switch (e) {
    case cudaErrorStreamCaptureImplicit:
        return "; a call used the legacy default stream while a blocking stream was captured; use "
               "another stream";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
        return "; between mixp_capture_begin and mixp_capture_end call nothing that allocates or "
               "waits, such as cudaMalloc and cudaEventSynchronize";
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorDevicesUnavailable:
        return "; this process can no longer use the GPU: restart the process from a checkpoint";
    default: return "";
    }
}

inline bool is_capture_error(cudaError_t e) {
    return (e >= cudaErrorStreamCaptureUnsupported && e <= 908) || e == cudaErrorIllegalState;
}

/* The result of a CUDA call. Clears the error that the call left for cudaGetLastError. */
inline mixp_result checked(State *s, cudaError_t e, const char *what) {
    char text[256];
    if (e == cudaSuccess) return MIXP_OK;
    cudaGetLastError();
    snprintf(text, sizeof text, "%s%s", cudaGetErrorString(e), advice(e));
    say(s, MIXP_ERR_DEVICE, what, text);
    if (e == cudaErrorMemoryAllocation) return MIXP_ERR_MEMORY;
    return is_capture_error(e) ? MIXP_ERR_ORDER : MIXP_ERR_DEVICE;
}

inline FaultFlag fault_flag(const State *s) {
    FaultFlag f = { s ? &s->shared_on_device->fault : NULL, s ? &s->block->stop : NULL };
    return f;
}

/* Records a fault. Any of several racing threads may win; a fault of an earlier kernel stays. */
__device__ inline void note_fault(const FaultFlag &f, Fault what, int64_t row, int32_t index) {
    volatile uint64_t *noted = f.fault;
    uint64_t place = (uint64_t)least(row, fault_rows - 1);
    *(volatile int32_t *)f.stop = 1;
    if (*noted) return;
    *noted = (uint64_t)what << 61 | place << 32 | (uint32_t)index;
}

/* Lets steps be applied again, unless another fault was recorded after the reported fault. */
__global__ void forget_fault(const FaultFlag f) {
    if (*(const volatile uint64_t *)f.fault == 0) *f.stop = 0;
}

/* A known answer: half of the smallest normal number is not 0, except in a program that was
 * compiled with --use_fast_math or -ftz=true. nvcc defines no macro for either. */
__global__ void check_subnormals(const FaultFlag f, float smallest) {
    if (mixp_bits_of_f32(smallest * 0.5f) == 0) note_fault(f, FAULT_FLUSHED, 0, 0);
}

/* Reports the fault that kernels recorded. Steps queued so far see the stop flag; later steps do
 * not. */
inline mixp_result tell_fault(State *s) {
    static const char *const texts[][3] = { /* for each Fault: who, what, its range      */
                                            { "", "", "" },
                                            { "embedding", "id", "vocab)" },
                                            { "cross_entropy", "target", "cols)" },
                                            { "attention", "length", "keys]" },
                                            { "gather", "id", "n)" },
                                            { "mixprec_cuda.cu", "", "" }
    };
    uint64_t fault = *(volatile uint64_t *)&s->shared->fault;
    const char *const *text = texts[fault >> 61];
    char why[96];
    if (!fault || s->capture) return MIXP_OK;
    *(volatile uint64_t *)&s->shared->fault = 0;
    checked(s, MIXPI_LAUNCH(forget_fault, 1, 1, 0, s->stream, fault_flag(s)), "a fault");
    if (fault >> 61 == FAULT_FLUSHED)
        return say(
            s, MIXP_ERR_DEVICE, text[0],
            "compiled with --use_fast_math or -ftz=true, which turns small numbers into 0 and "
            "breaks every promise about bits: compile it without; no step was applied");
    snprintf(why, sizeof why, "%s %d at row %d is outside [0, %s; no step was applied", text[1],
             (int)(int32_t)(uint32_t)fault, (int)(fault >> 32 & (uint64_t)(fault_rows - 1)),
             text[2]);
    return say(s, MIXP_ERR_ARGUMENT, text[0], why);
}

/* The stream to launch on: during a capture, the stream that records. */
inline cudaStream_t queue_of(const State *s) { return s->capture ? s->recorder : s->stream; }

/* --- kernels' entry and exit ----------------------------------------------------------- *
 *
 *     Kernel k(x);                                    the context, its GPU made current
 *     if (!k.state) return MIXP_ERR_ORDER;
 *     return k.launched("softmax", MIXPI_LAUNCH(softmax_rows, grid, 256, 0, k.stream, ...));
 */
class Kernel {
public:
    explicit Kernel(const mixp_exec *x)
        : state(state_of(x)), stream(state ? queue_of(state) : NULL),
          on(state ? state->ordinal : -1) {}
    mixp_result launched(const char *what, cudaError_t e)
    { return checked(state, on.error != cudaSuccess ? on.error : e, what); }
    State       *state;
    cudaStream_t stream;
private:
    OnDevice on;
};

/* Device memory for one kernel; see mixp_exec. */
inline void *scratch_of(const mixp_exec *x, size_t bytes) {
    return x->scratch ? x->scratch(x->user, bytes ? bytes : 1) : NULL;
}

/* Device address of the number of steps between capture and replay; NULL outside a capture. */
inline const uint64_t *later_of(const State *s) { return s->capture ? &s->block->later : NULL; }

/* The parts of the key of a kernel's random numbers. A captured kernel runs in many steps and adds
 * the steps since its capture. So each thread computes the key once; the host computes none. */
struct Draws {
    uint64_t        seed, step, tensor;
    const uint64_t *later;
};

inline Draws draws_of(const State *s, uint64_t seed, uint64_t step, uint64_t tensor) {
    Draws d = { seed, step, tensor, later_of(s) };
    return d;
}

__device__ inline uint64_t key_now(const Draws &d) {
    uint64_t step = d.later ? d.step + *d.later : d.step;
    return mixp_random_key(d.seed, step, d.tensor);
}

__global__ void set_later(uint64_t *to, uint64_t later) { *to = later; }
__global__ void set_betas(float *betas) { betas[0] = 0.0f; betas[1] = 1.0f; }

/* --- peeks ----------------------------------------------------------------------------- */

/* A block of device memory, its mirror, and the mirror's sequence. to NULL: no mirror. A kernel's
 * argument: without the last field it would end in bytes that nothing sets. */
struct Mirrored {
    Mirror     *to;
    uint64_t   *turn;
    const void *from;
    int         bytes;
    int         unused;
};

inline Mirrored mirrored(const State *s, int i) {
    Mirrored m = { &s->shared_on_device->mirrors[i], &s->block->turns[i], s->mirrored[i],
                   (int)s->mirrored_bytes[i], 0 };
    return m;
}

/* A block with its mirror, which is made at the first use. Without a mirror when all are taken. */
inline Mirrored mirror_of(State *s, const void *device, size_t bytes) {
    const Mirrored none = { NULL, NULL, device, 0, 0 };
    int i = 0;
    while (i < mirror_count && s->mirrored[i] != device) i++;
    if (i == mirror_count)
        for (i = 0; i < mirror_count && s->mirrored[i];) i++;
    if (i == mirror_count || bytes > mirror_bytes) return none;
    if (s->mirrored[i] != device || s->mirrored_bytes[i] != bytes) {
        s->shared->mirrors[i].sequence = 0;
        s->mirrored[i] = device;
        s->mirrored_bytes[i] = bytes;
    }
    return mirrored(s, i);
}

/* Begins or ends a write of these mirrors, visibly to the host. Each sequence is kept in device
 * memory, because reading host memory would take a microsecond. */
template <int n> __device__ inline void mirrors_turn(const Mirrored (&m)[n]) {
    MIXPI_UNROLL
    for (int k = 0; k < n; k++)
        if (m[k].to) *(volatile uint64_t *)&m[k].to->sequence = ++*m[k].turn;
}

/* Copies blocks of memory to their mirrors, if any. All threads of the one thread block that writes
 * the memory call it, after their last write. Two fences serve all mirrors, because each fence
 * waits for host memory. */
template <int n> __device__ inline void mirror_store(const Mirrored (&m)[n]) {
    __syncthreads();
    if (threadIdx.x == 0) mirrors_turn(m);
    __threadfence_system();
    __syncthreads();
    MIXPI_UNROLL
    for (int k = 0; k < n; k++) {
        volatile uint32_t *to = m[k].to ? m[k].to->words : NULL;
        const uint32_t *from = (const uint32_t *)m[k].from;
        for (int i = (int)threadIdx.x; to && i < m[k].bytes / 4; i += (int)blockDim.x)
            to[i] = from[i];
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) mirrors_turn(m);
}

__global__ void mirror_again(const Mirrored m) {
    const Mirrored one[1] = { m };
    mirror_store(one);
}

/* Returns 1 when *host was read completely and consistently. Returns 0 when nothing was written to
 * the mirror yet, or a kernel died during a write. */
inline int mirror_load(const Mirror *m, void *host, size_t offset, size_t bytes) {
    const volatile uint64_t *sequence = &m->sequence;
    for (int tries = 0; tries < 1000000; tries++) {
        uint64_t before = *sequence;
        std::atomic_thread_fence(std::memory_order_acquire);
        if (before == 0) return 0;
        memcpy(host, (const char *)m->words + offset, bytes);
        std::atomic_thread_fence(std::memory_order_acquire);
        if (before % 2 == 0 && before == *sequence) return 1;
    }
    return 0;
}

/* The mirror that holds bytes of device memory, or -1. */
inline int mirror_at(const State *s, const void *device, size_t bytes) {
    uintptr_t p = (uintptr_t)device;
    for (int i = 0; i < mirror_count; i++) {
        uintptr_t q = (uintptr_t)s->mirrored[i];
        if (q && p >= q && p + bytes <= q + s->mirrored_bytes[i]) return i;
    }
    return -1;
}

/* --- memory ---------------------------------------------------------------------------- */

inline mixp_result in_capture(State *s, const char *what) {
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
    cudaPointerAttributes a = {};
    mixp_result r;
    if (!p) return say(s, MIXP_ERR_ARGUMENT, what, "the pointer is NULL");
    r = checked(s, cudaPointerGetAttributes(&a, p), what);
    if (r != MIXP_OK) return r;
    if (a.type == cudaMemoryTypeUnregistered)
        return say(s, MIXP_ERR_ARGUMENT, what, "the pointer is to host memory; pass device memory");
    if (a.type == cudaMemoryTypeDevice && a.device != s->ordinal)
        return say(s, MIXP_ERR_ARGUMENT, what, "the pointer is to another GPU's memory");
    return MIXP_OK;
}

/* GPU memory from the user's allocator, if any; such memory is checked before use. */
inline mixp_result memory_new(State *s, size_t bytes, void **p) {
    const mixp_allocator &from = s->device;
    mixp_result r = MIXP_OK;
    *p = NULL;
    if (!from.allocate) return checked(s, cudaMalloc(p, bytes ? bytes : 1), "allocation");
    *p = from.allocate(bytes ? bytes : 1, from.user);
    if (!*p) return say(s, MIXP_ERR_MEMORY, "device_allocator", "out of memory");
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
    else if (p) checked(s, cudaFree(p), "release");
}

void *device_allocate(const mixp_exec *x, size_t bytes) {
    Kernel k(x);
    void *p = NULL;
    if (!k.state) return NULL;
    if (k.state->capture) {
        in_capture(k.state, "allocation");
        return NULL;
    }
    if (k.launched("allocation", cudaSuccess) != MIXP_OK) return NULL;
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
        size_t n = bytes - done < piece_bytes ? bytes - done : piece_bytes;
        unsigned i = s->next++ % ring_pieces;
        unsigned char *piece = s->ring + i * piece_bytes;
        cudaError_t e = cudaEventSynchronize(s->sent[i]);
        if (e == cudaSuccess) {
            memcpy(piece, (const char *)host + done, n);
            e = cudaMemcpyAsync((char *)device + done, piece, n, cudaMemcpyDefault, s->stream);
        }
        if (e == cudaSuccess) e = cudaEventRecord(s->sent[i], s->stream);
        r = checked(s, e, "upload");
        done += n;
    }
    return r;
}

/* Updates the mirror after an upload to a mirrored block. */
inline mixp_result mirror_follows(State *s, const void *device, size_t bytes) {
    int i = mirror_at(s, device, bytes);
    if (i < 0) return MIXP_OK;
    return checked(s, MIXPI_LAUNCH(mirror_again, 1, 256, 0, queue_of(s), mirrored(s, i)), "upload");
}

/* Refuses to run while the program itself captures the stream that it gave us. Uploads would become
 * part of that capture, from pinned memory that later uploads overwrite, and every replay would
 * draw the same random numbers. */
inline mixp_result check_stream(State *s, const char *what) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    mixp_result r;
    if (!s->given || s->capture) return MIXP_OK;
    r = checked(s, cudaStreamIsCapturing(s->stream, &status), what);
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

inline size_t whole_alignments(size_t bytes) {
    return (bytes + memory_alignment - 1) / memory_alignment * memory_alignment;
}

inline mixp_result block_new(State *s, Graph *g, size_t bytes) {
    Block *b = (Block *)host_new(s->host, sizeof *b);
    mixp_result r;
    if (!b) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");
    b->size = bytes > piece_bytes ? bytes : piece_bytes;
    r = memory_new(s, b->size, &b->memory);
    if (r != MIXP_OK) {
        host_free(s->host, b);
        return r;
    }
    b->next = g->blocks;
    g->blocks = b;
    return MIXP_OK;
}

inline mixp_result stage_new(State *s, Graph *g, size_t bytes, void **stage) {
    size_t room = whole_alignments(bytes);
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
inline mixp_result record_upload(State *s, void *device, const void *host, size_t bytes,
                                 bool again) {
    Graph *g = s->capture;
    Upload *u = upload_new(s, g);
    mixp_result r;
    if (!u) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");
    memset((void *)u, 0, sizeof *u);
    r = stage_new(s, g, bytes, &u->stage);
    if (r != MIXP_OK) return r;
    u->host = host;
    u->bytes = bytes;
    if (!again) {
        u->kept = host_new(s->host, bytes);
        if (!u->kept) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");
        memcpy(u->kept, host, bytes);
    }
    g->count++;
    r = checked(s, cudaMemcpyAsync(device, u->stage, bytes, cudaMemcpyDefault, s->recorder),
                "upload");
    return r == MIXP_OK ? mirror_follows(s, device, bytes) : r;
}

/* Fills an upload's stage, before a replay or at the end of the capture. */
inline mixp_result upload_send(State *s, Upload *u) {
    mixp_result r = MIXP_OK;
    if (!u->sent) r = send(s, u->stage, u->kept ? u->kept : u->host, u->bytes);
    u->sent = u->kept && r == MIXP_OK;
    return r;
}

inline mixp_result upload(const mixp_exec *x, void *device, const void *host, size_t bytes,
                          bool again) {
    Kernel k(x);
    mixp_result r;
    if (!k.state) return MIXP_ERR_ORDER;
    if (!bytes) return MIXP_OK;
    if (!device || !host) return say(k.state, MIXP_ERR_ARGUMENT, "upload", "a pointer is NULL");
    if (k.state->capture) return record_upload(k.state, device, host, bytes, again);
    r = check_stream(k.state, "upload");
    if (r == MIXP_OK) r = send(k.state, device, host, bytes);
    return r == MIXP_OK ? mirror_follows(k.state, device, bytes) : r;
}

mixp_result device_upload(const mixp_exec *x, void *device, const void *host, size_t bytes) {
    return upload(x, device, host, bytes, false);
}
mixp_result device_feed(const mixp_exec *x, void *device, const void *host, size_t bytes) {
    return upload(x, device, host, bytes, true);
}

mixp_result device_wait(const mixp_exec *x) {
    Kernel k(x);
    mixp_result r;
    if (!k.state) return MIXP_ERR_ORDER;
    if (k.state->capture) return in_capture(k.state, "waiting");
    r = check_stream(k.state, "waiting");
    if (r == MIXP_OK) r = k.launched("an earlier kernel", cudaStreamSynchronize(k.stream));
    return r == MIXP_OK ? tell_fault(k.state) : r;
}

mixp_result device_download(const mixp_exec *x, void *host, const void *device, size_t bytes) {
    Kernel k(x);
    mixp_result r;
    if (!k.state) return MIXP_ERR_ORDER;
    if (!bytes) return MIXP_OK;
    if (!device || !host) return say(k.state, MIXP_ERR_ARGUMENT, "download", "a pointer is NULL");
    if (k.state->capture) return in_capture(k.state, "download");
    r = check_stream(k.state, "download");
    if (r == MIXP_OK)
        r = k.launched("download",
                       cudaMemcpyAsync(host, device, bytes, cudaMemcpyDefault, k.stream));
    return r == MIXP_OK ? device_wait(x) : r;
}

/* The pinned copy of a slot, enlarged when needed. Enlarging waits for copies in flight. */
inline mixp_result post_room(State *s, int slot, size_t bytes) {
    cudaError_t e = cudaSuccess;
    if (s->post_bytes[slot] >= bytes) return MIXP_OK;
    if (s->post[slot]) quiet(cudaStreamSynchronize(s->stream));
    if (s->post[slot]) quiet(cudaFreeHost(s->post[slot]));
    s->post[slot] = NULL;
    s->post_bytes[slot] = 0;
    e = cudaHostAlloc(&s->post[slot], bytes, cudaHostAllocDefault);
    if (e == cudaSuccess && !s->post_sent[slot])
        e = cudaEventCreateWithFlags(&s->post_sent[slot], cudaEventDisableTiming);
    if (e == cudaSuccess) s->post_bytes[slot] = bytes;
    return checked(s, e, "pinned memory");
}

mixp_result device_post(const mixp_exec *x, int slot, const void *device, size_t bytes) {
    Kernel k(x);
    State *s = k.state;
    mixp_result r;
    if (!s) return MIXP_ERR_ORDER;
    if (s->capture) return in_capture(s, "post");
    r = check_stream(s, "post");
    if (r == MIXP_OK) r = post_room(s, slot, bytes);
    if (r == MIXP_OK)
        r = k.launched("post",
                       cudaMemcpyAsync(s->post[slot], device, bytes, cudaMemcpyDefault, k.stream));
    return r == MIXP_OK ? checked(s, cudaEventRecord(s->post_sent[slot], k.stream), "post") : r;
}

/* Reports the fault that kernels recorded. Deferred while the program captures the stream. */
inline mixp_result tell_unless_captured(State *s) {
    if (!s->shared->fault || check_stream(s, "a look") != MIXP_OK) return MIXP_OK;
    return tell_fault(s);
}

mixp_result device_collect(const mixp_exec *x, int slot, void *host, size_t bytes) {
    Kernel k(x);
    State *s = k.state;
    mixp_result r;
    if (!s || s->post_bytes[slot] < bytes) return MIXP_ERR_ORDER;
    r = checked(s, cudaEventSynchronize(s->post_sent[slot]), "collect");
    if (r == MIXP_OK) memcpy(host, s->post[slot], bytes);
    return r == MIXP_OK ? tell_unless_captured(s) : r;
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
            return tell_unless_captured(s);
    }
    return device_download(x, host, device, bytes);
}

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
    if (g->exec) k.launched("graph", cudaGraphExecDestroy(g->exec));
    if (g->blocks) k.launched("graph", cudaStreamSynchronize(k.state->stream));
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
    Graph *g;
    mixp_result r;
    if (!s) return MIXP_ERR_ORDER;
    if (s->capture)
        return say(s, MIXP_ERR_ORDER, "capture",
                   "a capture is already active; call mixp_capture_end first");
    r = check_stream(s, "capture");
    if (r != MIXP_OK) return r;
    r = k.launched("capture", load_recorded());
    if (r != MIXP_OK) return r;
    g = (Graph *)host_new(x->host, sizeof *g);
    if (!g) return say(s, MIXP_ERR_MEMORY, "capture", "out of memory");
    r = k.launched("capture",
                   cudaStreamBeginCapture(s->recorder, cudaStreamCaptureModeThreadLocal));
    if (r != MIXP_OK) {
        host_free(x->host, g);
        return r;
    }
    s->capture = g;
    s->captured = x;
    x->stream = (void *)s->recorder;
    return MIXP_OK;
}

/* Ends the capture. *graph: the recorded graph; NULL: the graph cannot be run. */
inline mixp_result capture_stop(const mixp_exec *x, Graph **graph) {
    Kernel k(x);
    State *s = k.state;
    cudaGraph_t recorded = NULL;
    Graph *g = s->capture;
    mixp_result r;
    s->capture = NULL;
    s->captured->stream = (void *)s->stream;
    r = k.launched("capture", cudaStreamEndCapture(s->recorder, &recorded));
    if (r == MIXP_OK) r = k.launched("capture", cudaGraphInstantiate(&g->exec, recorded, 0ull));
    if (recorded) quiet(cudaGraphDestroy(recorded));
    for (int i = 0; i < g->count && r == MIXP_OK; i++)
        if (g->uploads[i].kept) r = upload_send(s, &g->uploads[i]);
    if (r == MIXP_OK) *graph = g;
    else graph_free(x, g);
    return r;
}

mixp_result capture_end(mixp_exec *x, void **graph) {
    State *s = state_of(x);
    Graph *g = NULL;
    mixp_result r;
    *graph = NULL;
    if (!s || !s->capture) return MIXP_ERR_ORDER;
    r = capture_stop(x, &g);
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
    mixp_result r;
    int i;
    if (!k.state || !g || k.state->capture) return MIXP_ERR_ORDER;
    r = check_stream(k.state, "replay");
    for (i = 0; i < g->count && r == MIXP_OK; i++) r = upload_send(k.state, &g->uploads[i]);
    if (r == MIXP_OK)
        r = k.launched("replay",
                       MIXPI_LAUNCH(set_later, 1, 1, 0, k.stream, &k.state->block->later, later));
    return r == MIXP_OK ? k.launched("replay", cudaGraphLaunch(g->exec, k.stream)) : r;
}

/* --- a context's state ----------------------------------------------------------------- */

void device_close(mixp_exec *x) {
    State *s = state_of(x);
    if (!s) return;
    OnDevice on(s->ordinal);
    if (s->capture) abandon_capture(x);
    if (s->stream) quiet(cudaStreamSynchronize(s->stream));
    if (s->plans) s->free_plans(s);
    if (s->lt) cublasLtDestroy(s->lt);
    host_free(s->host, s->choices);
    memory_free(s, s->workspace);
    for (int i = 0; i < ring_pieces; i++)
        if (s->sent[i]) quiet(cudaEventDestroy(s->sent[i]));
    for (int i = 0; i < post_slots; i++) {
        if (s->post_sent[i]) quiet(cudaEventDestroy(s->post_sent[i]));
        if (s->post[i]) quiet(cudaFreeHost(s->post[i]));
    }
    if (s->ring) quiet(cudaFreeHost(s->ring));
    memory_free(s, s->block);
    if (s->shared) quiet(cudaFreeHost(s->shared));
    if (s->recorder && s->recorder != s->stream) quiet(cudaStreamDestroy(s->recorder));
    if (s->stream && !s->given) quiet(cudaStreamDestroy(s->stream));
    x->stream = s->given;
    x->state = NULL;
    host_free(s->host, s);
}

inline cudaError_t open_pinned(State *s) {
    cudaError_t e =
        cudaHostAlloc((void **)(void *)&s->shared, sizeof *s->shared, cudaHostAllocMapped);
    if (e != cudaSuccess) return e;
    memset((void *)s->shared, 0, sizeof *s->shared);
    e = cudaHostGetDevicePointer((void **)(void *)&s->shared_on_device, s->shared, 0);
    if (e == cudaSuccess)
        e = cudaHostAlloc((void **)(void *)&s->ring, ring_pieces * piece_bytes,
                          cudaHostAllocDefault);
    for (int i = 0; i < ring_pieces && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&s->sent[i], cudaEventDisableTiming);
    return e;
}

inline mixp_result open_memory(State *s) {
    void *p = NULL;
    mixp_result r = checked(s, open_pinned(s), "pinned memory");
    if (r == MIXP_OK) r = memory_new(s, sizeof *s->block, &p);
    s->block = (Private *)p;
    if (r == MIXP_OK)
        r = checked(s, cudaMemsetAsync(p, 0, sizeof *s->block, s->stream), "device memory");
    if (r != MIXP_OK) return r;
    return checked(
        s, MIXPI_LAUNCH(check_subnormals, 1, 1, 0, s->stream, fault_flag(s), 1.17549435e-38f),
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
    State *s = (State *)host_new(x->host, sizeof *s);
    void *given = x->stream;
    cudaError_t e;
    mixp_result r;
    x->state = NULL;
    if (!s) return MIXP_ERR_MEMORY;
    OnDevice on(ordinal);
    s->ordinal = ordinal;
    s->host = x->host;
    s->device = x->device;
    s->given = given;
    s->measure = x->gemm_measure != 0;
    e = on.error;
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&s->processors, cudaDevAttrMultiProcessorCount, ordinal);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&s->most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                   ordinal);
    if (e == cudaSuccess) e = capability_of(ordinal, &s->capability);
    if (e == cudaSuccess) e = open_stream(s);
    r = checked(s, e, "stream");
    if (given && (e == cudaErrorInvalidDevice || e == cudaErrorInvalidResourceHandle))
        r = MIXP_ERR_ARGUMENT;
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
    if (s->capture) return in_capture(s, "the first product");
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

/* The text of the newest error; "" when there was none. */
const char *device_message(const mixp_exec *x) {
    State *s = state_of(x);
    return s ? s->message : "";
}

}   /* namespace */

