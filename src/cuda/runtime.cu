#pragma once
#include "numbers.cu"
/* ==== 2. RUNTIME ========================================================= >>runtime ====
 *
 * A context has a State: its stream, the memory outside the arena that a step reads and writes,
 * and a text of the last error. Functions here do not wait for the GPU unless their comment
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
    FAULT_BAG_OFFSET,
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
    int              by_groups; /* is the code for sm_90a? 1: yes, -1: no, 0: not asked yet */
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
    bool             measure;   /* 1: the first product of a shape measures cuBLASLt's
                                   algorithms                                                */
    bool             warm;      /* 1: such a measurement has warmed the GPU up               */
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
inline void clear_error(cudaError_t e) {
    if (e != cudaSuccess) cudaGetLastError();
}

/* The driver's query: does this process have a context on a GPU? NULL: the query is missing. */
typedef int PrimaryState(int device, unsigned *flags, int *active);
inline PrimaryState *find_primary_state() {
    cudaDriverEntryPointQueryResult how;
    void *found = NULL;
#if CUDART_VERSION >= 12050
    cudaError_t e = cudaGetDriverEntryPointByVersion(
        "cuDevicePrimaryCtxGetState", &found, 7000, cudaEnableDefault, &how);
#else
    cudaError_t e =
        cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &found, cudaEnableDefault, &how);
#endif
    clear_error(e);
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
        clear_error(error);
    }
    ~OnDevice() {
        if (before != now && has_context(before)) clear_error(cudaSetDevice(before));
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
    /* A capture was disturbed. */
    case cudaErrorStreamCaptureImplicit:
        return "; a call used the legacy default stream while a blocking stream was captured; use "
               "another stream";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
        return "; between mixp_capture_begin and mixp_capture_end call nothing that allocates or "
               "waits, such as cudaMalloc and cudaEventSynchronize";

    /* The process has lost its GPU. */
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

/* Returns the result of a CUDA call. Reports an error, and clears it for cudaGetLastError. */
inline mixp_result report_error(State *s, cudaError_t e, const char *what) {
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
__global__ void clear_stop(const FaultFlag f) {
    if (*(const volatile uint64_t *)f.fault == 0) *f.stop = 0;
}

/* A known answer: half of the smallest normal number is not 0, except in a program that was
 * compiled with --use_fast_math or -ftz=true. nvcc defines no macro for either. */
__global__ void check_subnormals(const FaultFlag f, float smallest) {
    if (mixp_bits_of_f32(smallest * 0.5f) == 0) note_fault(f, FAULT_FLUSHED, 0, 0);
}

/* Reports the fault that kernels recorded. Steps queued so far see the stop flag; later steps do
 * not. */
inline mixp_result report_fault(State *s) {
    const uint64_t fault = *(volatile uint64_t *)&s->shared->fault;
    if (!fault || s->capture) return MIXP_OK;

    /* Clear the fault, and let later steps be applied. */
    *(volatile uint64_t *)&s->shared->fault = 0;
    report_error(s, MIXPI_LAUNCH(clear_stop, 1, 1, 0, s->stream, fault_flag(s)), "a fault");

    /* Name the kernel, the index, its row and its range: one text for each Fault. */
    static const char *const texts[][3] = { { "", "", "" }, { "embedding", "id", "vocab)" },
        { "cross_entropy", "target", "cols)" }, { "attention", "length", "keys]" },
        { "gather", "id", "n)" }, { "embedding_bag", "offset", "ids], or falls" },
        { "mixprec_cuda.cu", "", "" } };
    const char *const *text = texts[fault >> 61];
    if (fault >> 61 == FAULT_FLUSHED)
        return say(s, MIXP_ERR_DEVICE, text[0],
            "compiled with --use_fast_math or -ftz=true, which turns small numbers into 0 and "
            "breaks every promise about bits: compile it without; no step was applied");
    char why[96];
    snprintf(why, sizeof why, "%s %d at row %d is outside [0, %s; no step was applied", text[1],
        (int)(int32_t)(uint32_t)fault, (int)(fault >> 32 & (uint64_t)(fault_rows - 1)), text[2]);
    return say(s, MIXP_ERR_ARGUMENT, text[0], why);
}

/* The stream to launch on: during a capture, the stream that records. */
inline cudaStream_t queue_of(const State *s) { return s->capture ? s->recorder : s->stream; }

/* --- kernels' entry and exit ----------------------------------------------------------- *
 *
 *     Kernel k(x);                                    the context, its GPU made current
 *     if (!k.state) return MIXP_ERR_ORDER;
 *     return k.report("softmax", MIXPI_LAUNCH(softmax_rows, grid, 256, 0, k.stream, ...));
 */
class Kernel {
public:
    explicit Kernel(const mixp_exec *x)
        : state(state_of(x)), stream(state ? queue_of(state) : NULL),
          on(state ? state->ordinal : -1) {}
    /* Returns the result of a launch, or of the call that made the GPU current. */
    mixp_result report(const char *what, cudaError_t e)
    { return report_error(state, on.error != cudaSuccess ? on.error : e, what); }
    State       *state;
    cudaStream_t stream;
private:
    OnDevice on;
};

/* Lets a kernel use more than 48 KB of dynamic shared memory: all of the GPU's, except what CUDA
 * says that the kernel has beside it. Requests it once per kernel, because CUDA takes a lock for a
 * request; kernels that do not fit the table request it at every launch. The limit is a property of
 * the GPU, not of the context. So it is always the maximum: a context that needs less must not
 * lower the limit of a context that needs more. */
inline cudaError_t make_room(State *s, const void *kernel, size_t bytes) {
    if (bytes <= 48 * 1024) return cudaSuccess;
    int i = 0;
    while (i < roomy_kernels && s->roomy[i] && s->roomy[i] != kernel) i++;
    if (i < roomy_kernels && s->roomy[i] == kernel) return cudaSuccess;

    cudaFuncAttributes own = {};
    cudaError_t e = cudaFuncGetAttributes(&own, kernel);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
            s->most_shared - (int)own.sharedSizeBytes);
    if (e == cudaSuccess && i < roomy_kernels) s->roomy[i] = kernel;
    return e;
}

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
    /* Find the block's mirror, or a free one. */
    const Mirrored none = { NULL, NULL, device, 0, 0 };
    int i = 0;
    while (i < mirror_count && s->mirrored[i] != device) i++;
    if (i == mirror_count)
        for (i = 0; i < mirror_count && s->mirrored[i];) i++;
    if (i == mirror_count || bytes > mirror_bytes) return none;

    /* Begin a new mirror, which nothing has written yet. */
    if (s->mirrored[i] != device || s->mirrored_bytes[i] != bytes) {
        s->shared->mirrors[i].sequence = 0;
        s->mirrored[i] = device;
        s->mirrored_bytes[i] = bytes;
    }
    return mirrored(s, i);
}

/* Begins or ends a write of these mirrors, visibly to the host. Each sequence is kept in device
 * memory, because reading host memory would take a microsecond. */
template <int n> __device__ inline void turn_mirrors(const Mirrored (&m)[n]) {
    MIXPI_UNROLL
    for (int k = 0; k < n; k++)
        if (m[k].to) *(volatile uint64_t *)&m[k].to->sequence = ++*m[k].turn;
}

/* Copies blocks of memory to their mirrors, if any. All threads of the one thread block that writes
 * the memory call it, after their last write. Two fences serve all mirrors, because each fence
 * waits for host memory. */
template <int n> __device__ inline void mirror_store(const Mirrored (&m)[n]) {
    __syncthreads();
    if (threadIdx.x == 0) turn_mirrors(m);
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
    if (threadIdx.x == 0) turn_mirrors(m);
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

/* The mirror that contains these bytes of device memory, or -1. */
inline int mirror_at(const State *s, const void *device, size_t bytes) {
    uintptr_t p = (uintptr_t)device;
    for (int i = 0; i < mirror_count; i++) {
        uintptr_t q = (uintptr_t)s->mirrored[i];
        if (q && p >= q && p + bytes <= q + s->mirrored_bytes[i]) return i;
    }
    return -1;
}

}   /* namespace */
