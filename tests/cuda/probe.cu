/* probe.cu - what CUDA on this machine does with the calls that mixprec_cuda.cu and its tests rely on, in seconds.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     probe [--short | --tiny]
 *
 * One line for each question: attributes, memory that the host sees, calls in the middle of a capture, cuBLASLt's
 * offers for GPT-2's products. --short stops after the attributes; --tiny takes small products, for the
 * interpreter. The lines that begin with "capture" are those of tests/cuda/probe.txt where the driver
 * behaves as tests/support/cudasim.h does. Exit status: 77 without a GPU, 1 if the GPU was lost meanwhile.
 */
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>

static bool tiny;

/* "ok" or the error's number; the program's last error is cleared. */
static std::string answer(cudaError_t e) {
    cudaGetLastError();
    return e == cudaSuccess ? "ok" : "error " + std::to_string((int)e);
}
static int attribute(cudaDeviceAttr a) {
    int v = -1;
    cudaDeviceGetAttribute(&v, a, 0);
    return v;
}
static double seconds() {
    return 1e-9 * (double)std::chrono::steady_clock::now().time_since_epoch().count();
}

__global__ void add_one(volatile int *p) { *p += 1; }
__global__ void touch(float *p, int n) {
    for (int i = (int)threadIdx.x; i < n; i += 32) p[i] = (float)i;
}

/* --- the machine --------------------------------------------------------------------------- */

/* Returns false without a GPU. */
static bool machine() {
    cudaDeviceProp p;
    int            driver = 0, runtime = 0, count = 0;
    size_t         free_bytes = 0, all = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    printf("driver %d, runtime %d, cuBLASLt %zu\n", driver, runtime, cublasLtGetVersion());
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaSuccess && count > 0) e = cudaGetDeviceProperties(&p, 0);
    if (e != cudaSuccess || count == 0) {
        printf("no GPU: error %d, %s\n", (int)e, cudaGetErrorString(e));
        return false;
    }
    cudaMemGetInfo(&free_bytes, &all);
    printf("%s, capability %d.%d, %d SMs, L2 %.0f MB, %.1f of %.1f GB free, %d visible\n", p.name, p.major,
           p.minor, p.multiProcessorCount, p.l2CacheSize / 1e6, (double)free_bytes / 1e9, (double)all / 1e9, count);
    printf("concurrentManagedAccess %d, pageableMemoryAccess %d, shared opt-in %d, compute mode %d\n",
           attribute(cudaDevAttrConcurrentManagedAccess), attribute(cudaDevAttrPageableMemoryAccess),
           attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), attribute(cudaDevAttrComputeMode));
    return true;
}

/* --- shared memory ------------------------------------------------------------------------- */

__global__ void exchange(float *p) {
    extern __shared__ float cells[];
    cells[threadIdx.x] = 1.0f;
    __syncthreads();
    p[threadIdx.x] = cells[31 - threadIdx.x];
}

/* May a kernel without static shared memory have all of the opt-in? Objects for 9.0 name 1,024 reserved bytes. */
static void shared_memory() {
    cudaFuncAttributes a = {};
    float *p = nullptr;
    int    most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    cudaFuncGetAttributes(&a, exchange);
    cudaError_t granted = cudaFuncSetAttribute(exchange, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    cudaMalloc((void **)&p, 256);
    exchange<<<1, 32, (size_t)most>>>(p);
    cudaError_t launched = cudaGetLastError();
    if (launched == cudaSuccess) launched = cudaDeviceSynchronize();
    printf("shared memory: %zu static, all %d dynamic: %s, launched: %s\n", a.sharedSizeBytes, most,
           answer(granted).c_str(), answer(launched).c_str());
    cudaFree(p);
}

/* --- memory that kernels write and the host reads ------------------------------------------ */

static void managed_memory() {
    int *p = nullptr;
    cudaError_t e = cudaMallocManaged((void **)&p, 4096, cudaMemAttachGlobal);
    if (e == cudaSuccess) {
        *p = 41;
        add_one<<<1, 1>>>(p);
        e = cudaDeviceSynchronize();
    }
    printf("managed memory: %s, 42 is %d\n", answer(e).c_str(), e == cudaSuccess ? *p : -1);
    cudaFree(p);
}

/* Does the host see a kernel's write without a wait, and how soon? */
static void mapped_memory() {
    int *host = nullptr, *device = nullptr;
    int  writes = tiny ? 2 : 200;
    double least = 1e9;
    cudaError_t e = cudaHostAlloc((void **)&host, 4096, cudaHostAllocMapped);
    if (e == cudaSuccess) e = cudaHostGetDevicePointer((void **)&device, host, 0);
    if (e != cudaSuccess) {
        printf("mapped memory: %s\n", answer(e).c_str());
        return;
    }
    volatile int *seen = host;
    *seen = 0;
    for (int i = 1; i <= writes; i++) {
        double began = seconds();
        add_one<<<1, 1>>>(device);
        while (*seen < i && seconds() - began < (tiny ? 0.01 : 1.0)) {}
        double took = seconds() - began;
        if (took < least) least = took;
    }
    e = cudaDeviceSynchronize();
    printf("mapped memory: %s, same address %d, %d of %d writes seen without a wait, %.1f us at best\n",
           answer(e).c_str(), device == host, *seen, writes, 1e6 * least);
    cudaFreeHost(host);
}

/* --- calls in the middle of a capture ------------------------------------------------------ */

typedef std::function<cudaError_t(cudaStream_t)> Call;
enum Mode { as_it_is, relaxed };
enum Kind { non_blocking, blocking };

static float *scrap;

/* What the call returns, and whether the capture survives the call. */
static void in_capture(const char *name, Mode mode, Kind kind, const Call &call) {
    cudaStreamCaptureMode before = cudaStreamCaptureModeRelaxed;
    cudaStream_t s;
    cudaGraph_t  graph = nullptr;
    cudaStreamCreateWithFlags(&s, kind == blocking ? cudaStreamDefault : cudaStreamNonBlocking);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    touch<<<1, 32, 0, s>>>(scrap, 64);
    if (mode == relaxed) cudaThreadExchangeStreamCaptureMode(&before);
    cudaError_t e = call(s);
    cudaGetLastError();
    if (mode == relaxed) cudaThreadExchangeStreamCaptureMode(&before);
    cudaError_t end = cudaStreamEndCapture(s, &graph);
    printf("capture of a %s stream, %s%s: %s, end: %s\n", kind == blocking ? "blocking" : "non-blocking", name,
           mode == relaxed ? " (relaxed)" : "", answer(e).c_str(), answer(end).c_str());
    if (graph) cudaGraphDestroy(graph);
    cudaStreamDestroy(s);
}

static cudaError_t clear_on_legacy(cudaStream_t) {
    cudaError_t e = cudaMemsetAsync(scrap, 0, 256, cudaStreamLegacy);
    return e != cudaSuccess ? e : cudaStreamSynchronize(cudaStreamLegacy);
}
static cudaError_t launch_on_legacy(cudaStream_t) {
    touch<<<1, 32, 0, cudaStreamLegacy>>>(scrap, 64);
    return cudaGetLastError();
}
static cudaError_t copy_to_host(cudaStream_t) {
    float host[16];
    return cudaMemcpy(host, scrap, sizeof host, cudaMemcpyDeviceToHost);
}
static cudaError_t copy_on_device(cudaStream_t s) {
    return cudaMemcpyAsync(scrap, scrap + 256, 256, cudaMemcpyDefault, s);
}
static cudaError_t allocate(cudaStream_t) {
    void *p;
    return cudaMalloc(&p, 256);
}
static cudaError_t allocate_managed(cudaStream_t) {
    void *p;
    return cudaMallocManaged(&p, 256, cudaMemAttachGlobal);
}
static cudaError_t allocate_mapped(cudaStream_t) {
    void *p;
    return cudaHostAlloc(&p, 256, cudaHostAllocMapped);
}
static cudaError_t ask_for_shared(cudaStream_t) {
    return cudaFuncSetAttribute(touch, cudaFuncAttributeMaxDynamicSharedMemorySize, 49152);
}
static cudaError_t ask_pointer(cudaStream_t) {
    cudaPointerAttributes a;
    return cudaPointerGetAttributes(&a, scrap);
}

static void captures() {
    cudaEvent_t event;
    cudaMalloc((void **)&scrap, 4096);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaEventRecord(event, 0);
    cudaDeviceSynchronize();
    Call wait = [=](cudaStream_t) { return cudaEventSynchronize(event); };
    Call poll = [=](cudaStream_t) { return cudaEventQuery(event); };
    in_capture("cudaMalloc", as_it_is, non_blocking, allocate);
    in_capture("cudaMalloc", relaxed, non_blocking, allocate);
    in_capture("cudaMallocManaged", relaxed, non_blocking, allocate_managed);
    in_capture("cudaHostAlloc", relaxed, non_blocking, allocate_mapped);
    in_capture("memset and wait, legacy stream", relaxed, non_blocking, clear_on_legacy);
    in_capture("cudaMemcpy to the host", as_it_is, non_blocking, copy_to_host);
    in_capture("cudaMemcpy to the host", relaxed, non_blocking, copy_to_host);
    in_capture("cudaMemcpy to the host", as_it_is, blocking, copy_to_host);
    in_capture("a launch on the legacy stream", as_it_is, non_blocking, launch_on_legacy);
    in_capture("cudaEventSynchronize", as_it_is, non_blocking, wait);
    in_capture("cudaEventQuery", as_it_is, non_blocking, poll);
    in_capture("cudaFuncSetAttribute", as_it_is, non_blocking, ask_for_shared);
    in_capture("cudaPointerGetAttributes", as_it_is, non_blocking, ask_pointer);
    in_capture("a copy on the device", as_it_is, non_blocking, copy_on_device);
    cudaEventDestroy(event);
    cudaFree(scrap);
}

/* --- a copy -------------------------------------------------------------------------------- */

static void copies() {
    char  *from = nullptr, *to = nullptr;
    size_t n = (size_t)1 << (tiny ? 12 : 30);
    float  ms = 0;
    cudaEvent_t begin, end;
    cudaEventCreateWithFlags(&begin, cudaEventDefault);
    cudaEventCreateWithFlags(&end, cudaEventDefault);
    if (cudaMalloc((void **)&from, n) != cudaSuccess || cudaMalloc((void **)&to, n) != cudaSuccess) {
        printf("a copy on the device: no memory for two times %zu bytes\n", n);
        return;
    }
    for (int i = 0; i < 11; i++) {
        if (i == 1) cudaEventRecord(begin, 0);
        cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, 0);
    }
    cudaEventRecord(end, 0);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&ms, begin, end);
    printf("a copy on the device: %.0f GB/s read and written\n", 2e-6 * (double)n * 10 / ms);
    cudaFree(from);
    cudaFree(to);
}

/* --- cuBLASLt ------------------------------------------------------------------------------ */

/* D[m,n] = op(A) op(B), in columns. */
struct Product {
    const char        *name;
    cudaDataType       in, out;
    bool               turn_a, turn_b;
    uint64_t           m, n, k;
    cublasLtEpilogue_t epilogue;
    uint32_t           reductions;          /* the schemes that split k may take; 0: any */
};

static cublasLtHandle_t lt;
static const size_t     room = (size_t)32 << 20;
static void            *workspace, *a_at, *b_at, *d_at, *aux;

struct Layout {
    cublasLtMatrixLayout_t at;
    Layout(cudaDataType type, uint64_t rows, uint64_t cols) {
        cublasLtMatrixLayoutCreate(&at, type, rows, cols, (int64_t)rows);
    }
    ~Layout() { cublasLtMatrixLayoutDestroy(at); }
};

template <class T>
static void set(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what, const T &value) {
    cublasLtMatmulDescSetAttribute(d, what, &value, sizeof value);
}
template <class T>
static void prefer(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t what, const T &value) {
    cublasLtMatmulPreferenceSetAttribute(p, what, &value, sizeof value);
}

static cublasLtMatmulDesc_t description(const Product &w) {
    cublasLtMatmulDesc_t d;
    cublasOperation_t    a = w.turn_a ? CUBLAS_OP_T : CUBLAS_OP_N, b = w.turn_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    int64_t              ld = (int64_t)w.m;
    const void          *at = aux;
    cublasLtMatmulDescCreate(&d, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    set(d, CUBLASLT_MATMUL_DESC_TRANSA, a);
    set(d, CUBLASLT_MATMUL_DESC_TRANSB, b);
    if (w.epilogue == CUBLASLT_EPILOGUE_DEFAULT) return d;
    set(d, CUBLASLT_MATMUL_DESC_EPILOGUE, w.epilogue);
    if (w.epilogue != CUBLASLT_EPILOGUE_DGELU) {
        set(d, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, w.out);
        set(d, CUBLASLT_MATMUL_DESC_BIAS_POINTER, at);
    }
    if (w.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || w.epilogue == CUBLASLT_EPILOGUE_DGELU) {
        set(d, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, ld);
        set(d, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, at);
    }
    return d;
}

/* The companion's preferences. */
static cublasLtMatmulPreference_t preference(const Product &w) {
    cublasLtMatmulPreference_t p;
    const uint32_t aligned = 16;
    cublasLtMatmulPreferenceCreate(&p);
    prefer(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, room);
    if (w.reductions) prefer(p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, w.reductions);
    prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned);
    prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned);
    prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned);
    prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned);
    return p;
}

/* Milliseconds a call of one offer, of five after one; negative if it fails. */
static float offer_ms(cublasLtMatmulDesc_t d, const Layout &a, const Layout &b, const Layout &c,
                      const cublasLtMatmulAlgo_t *algorithm) {
    const float    one = 1.0f, zero = 0.0f;
    float          ms = 0;
    cudaEvent_t    from, to;
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    cudaEventCreateWithFlags(&from, cudaEventDefault);
    cudaEventCreateWithFlags(&to, cudaEventDefault);
    for (int i = 0; i < 6 && s == CUBLAS_STATUS_SUCCESS; i++) {
        if (i == 1) cudaEventRecord(from, 0);
        s = cublasLtMatmul(lt, d, &one, a_at, a.at, b_at, b.at, &zero, d_at, c.at, d_at, c.at, algorithm,
                           workspace, room, 0);
    }
    cudaEventRecord(to, 0);
    cudaError_t waited = cudaEventSynchronize(to);
    if (s == CUBLAS_STATUS_SUCCESS && waited == cudaSuccess) cudaEventElapsedTime(&ms, from, to);
    else ms = -5.0f;
    cudaGetLastError();
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    return ms / 5;
}

/* How many offers there are; the times of the first and of the best of eight. */
static void product(const Product &w) {
    cublasLtMatmulHeuristicResult_t offers[8];
    Layout a(w.in, w.turn_a ? w.k : w.m, w.turn_a ? w.m : w.k), b(w.in, w.turn_b ? w.n : w.k, w.turn_b ? w.k : w.n);
    Layout c(w.out, w.m, w.n);
    int    found = 0, ran = 0, best = -1;
    float  first_ms = -1.0f, best_ms = 1e9f;
    cublasLtMatmulDesc_t d = description(w);
    cublasLtMatmulPreference_t p = preference(w);
    cublasStatus_t s = cublasLtMatmulAlgoGetHeuristic(lt, d, a.at, b.at, c.at, c.at, p, 8, offers, &found);
    for (int i = 0; i < found; i++) {
        float ms = offer_ms(d, a, b, c, &offers[i].algo);
        if (ms < 0) continue;
        if (ran++ == 0) first_ms = ms;
        if (ms >= best_ms) continue;
        best_ms = ms;
        best = i;
    }
    printf("Lt %-26s status %d, %d offers, %d ran", w.name, (int)s, found, ran);
    double flop = 2e-9 * (double)w.m * (double)w.n * (double)w.k;
    if (ran) printf("; first %.3f ms %.0f TFLOP/s, best (%d) %.3f ms %.0f TFLOP/s", (double)first_ms,
                    flop / first_ms, best, (double)best_ms, flop / best_ms);
    printf("\n");
    cublasLtMatmulPreferenceDestroy(p);
    cublasLtMatmulDescDestroy(d);
}

/* bf16 numbers of about 0.01 to 0.03: zeros would let a GPU clock higher. */
__global__ void noise(uint16_t *p, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u;
        p[i] = (uint16_t)(0x3C00u | (h >> 31 << 15) | (h >> 20 & 0x1FFu));
    }
}
static bool take(void **p, size_t bytes) {
    if (cudaMalloc(p, bytes) != cudaSuccess) return false;
    noise<<<tiny ? 1 : 1024, 256>>>((uint16_t *)*p, (tiny ? 2048 : bytes) / 2);
    return true;
}

/* GPT-2's layers at 65,536 tokens: `up` is 768 to 3,072, `down` is back, `proj` is 768 to 768. */
static void products() {
    const uint64_t rows = tiny ? 16 : 65536, w = tiny ? 16 : 768;
    const size_t   big = rows * 4 * w * 2;
    const uint32_t ours = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t in_place = ours | CUBLASLT_REDUCTION_SCHEME_INPLACE;
    const cublasLtEpilogue_t none = CUBLASLT_EPILOGUE_DEFAULT, sums = CUBLASLT_EPILOGUE_BGRADB;
    const cudaDataType bf16 = CUDA_R_16BF, f32 = CUDA_R_32F, e4m3 = CUDA_R_8F_E4M3;
    const Product list[] = {
        { "up, y, bias", bf16, bf16, true, false, 4 * w, rows, w, CUBLASLT_EPILOGUE_BIAS, ours },
        { "up, y, GELU_AUX_BIAS", bf16, bf16, true, false, 4 * w, rows, w, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, ours },
        { "down, dx", bf16, bf16, false, false, 4 * w, rows, w, none, ours },
        { "down, dx, DGELU", bf16, bf16, false, false, 4 * w, rows, w, CUBLASLT_EPILOGUE_DGELU, ours },
        { "up, dw in f32", bf16, f32, false, true, w, 4 * w, rows, none, ours },
        { "up, dw in f32, in place too", bf16, f32, false, true, w, 4 * w, rows, none, in_place },
        { "up, dw in f32, any scheme", bf16, f32, false, true, w, 4 * w, rows, none, 0 },
        { "up, dw in f32, BGRADB", bf16, f32, false, true, w, 4 * w, rows, sums, ours },
        { "up, dw in bf16, BGRADB", bf16, bf16, false, true, w, 4 * w, rows, sums, ours },
        { "proj, dw in f32, BGRADB", bf16, f32, false, true, w, w, rows, sums, ours },
        { "up, y in f32 (f32)", f32, f32, true, false, 4 * w, rows / 4, w, none, ours },
        { "up, y, e4m3", e4m3, bf16, true, false, 4 * w, rows, w, none, ours },
    };
    if (cublasLtCreate(&lt) != CUBLAS_STATUS_SUCCESS) {
        printf("Lt: cublasLtCreate failed\n");
        return;
    }
    if (!take(&workspace, room) || !take(&a_at, big) || !take(&b_at, big) || !take(&d_at, big * 2) ||
        !take(&aux, big)) {
        printf("Lt: no memory for the products: %.1f GB are needed\n", 5e-9 * (double)big);
        return;
    }
    for (const Product &p : list) product(p);
}

int main(int argc, char **argv) {
    bool only_machine = argc > 1 && !strcmp(argv[1], "--short");
    tiny = argc > 1 && !strcmp(argv[1], "--tiny");
    setvbuf(stdout, NULL, _IOLBF, 1 << 12);
    if (!machine()) return 77;
    if (only_machine) return 0;
    shared_memory();
    managed_memory();
    mapped_memory();
    captures();
    copies();
    products();
    cudaError_t e = cudaDeviceSynchronize();
    printf("at the end: %s\n", answer(e).c_str());
    return e != cudaSuccess;
}
