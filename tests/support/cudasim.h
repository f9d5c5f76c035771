/* cudasim.h - CUDA kernels on a machine without a GPU: tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A plain C++17 compiler compiles a .cu file, kernels included, with CUDA's own headers and this
 * one. The program runs under the sanitizers. It links nothing of CUDA: this file defines the
 * runtime and cuBLASLt functions that mixprec calls.
 *
 * Kernels. Each thread of a block is a fiber that runs to its next barrier or warp collective;
 * blocks run one after another. `schedule` sets the order of fibers and blocks; results must not
 * depend on that order. forward and reversed let a warp run as far ahead of the others as barriers
 * permit, so that it overwrites data that the others have not read yet; permuted keeps all threads
 * level. Shared memory is allocated for each block, filled with 0xFF (NaN) and fenced by the
 * address sanitizer. cp.async copies only when the program waits for it. If something would hang
 * or be undefined on a GPU (a barrier that some threads miss, a lane missing from a mask), the
 * program ends with a message.
 *
 * Streams are queues. Their work is done only when someone waits for it, so a missing wait shows.
 * The legacy stream and blocking streams wait for each other as CUDA specifies; non-blocking
 * streams wait for no other stream. A capture records the same work; calls that CUDA forbids in a
 * capture fail with CUDA's error. Where NVIDIA's text leaves open whether a call is forbidden (a
 * synchronous copy while another stream is captured), the simulation forbids it. Calls leave the same last error as CUDA's calls,
 * cudaErrorNotReady included. A call that needs a context makes one on the current GPU; `contexts`
 * lists the GPUs that have one.
 *
 * Device memory is filled with 0xFF. If host_sees_device is false when memory is allocated, the
 * host may not access that memory: its pages are closed except while queued work is done, which
 * takes time. Host pointers and freed pointers are detected when they are passed to a copy or a
 * kernel. `count` has the number of each call; with CUDASIM_COUNT in the environment a program
 * prints the counts at its end. `fail_at` makes the n-th resource request from now on fail,
 * `fault_at` the n-th kernel.
 *
 * cuBLASLt is as strict as NVIDIA's documentation: products of fp8, MXFP8 and NVFP4 codes are accepted
 * only for the capability, the library's version, the layouts and the sizes that it lists.
 *
 * A program that is built through tests/cuda/canonical_nan.awk has the NaNs of a GPU: every NaN that
 * its arithmetic makes is 0x7FFFFFFF.
 *
 * Not simulated: weak memory order, true concurrency, speed.
 */
#ifndef CUDASIM_H
#define CUDASIM_H
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <csignal>
#include <sys/mman.h>
#include <ucontext.h>
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cublasLt.h>
#if defined(__SANITIZE_ADDRESS__)           /* gcc says it so, clang otherwise              */
#  define CUDASIM_SANITIZED
#elif defined(__has_feature)
#  if __has_feature(address_sanitizer)
#    define CUDASIM_SANITIZED
#  endif
#endif
#ifdef CUDASIM_SANITIZED
#  include <sanitizer/asan_interface.h>
#  include <sanitizer/common_interface_defs.h>
#endif

#ifndef __launch_bounds__
#  define __launch_bounds__(...)
#endif
#ifndef __grid_constant__
#  define __grid_constant__
#endif

namespace cudasim {

/* ==== settings and counters ============================================================== */

const bool simulated = true;                /* cudareal.h says false                         */

enum Schedule { forward, reversed, permuted };
inline Schedule schedule = forward;         /* of threads and blocks                         */
inline int  devices = 1;                    /* what cudaGetDeviceCount says                  */
inline size_t memory_of_device = (size_t)80 << 30;     /* what cudaMemGetInfo says of the whole; all but an eightieth is free */
inline int  driver = 13000;                 /* 0: no driver                                  */
inline int  capability_major = 9, capability_minor = 0;
inline int  processors = 3;
inline int  max_shared = 227 * 1024;        /* of a block: 99 KB on 8.6, 8.9 and 12.0        */
inline int  static_shared = 0;              /* bytes that each kernel says it has beside,    */
inline size_t (*static_shared_of)(const void *kernel) = nullptr;    /* and those of one of PTX   */
inline int (*most_threads_of)(const void *kernel) = nullptr;         /* launch bounds of one      */
inline bool flushes = false;                /* kernels flush subnormals: built with -ftz=true */
inline bool eager = false;                  /* do queued work at once                        */
inline bool pointers_abort = true;          /* false: a bad pointer is an illegal address    */
inline long fail_at = 0, fault_at = 0;      /* 0 = never                                     */
inline long refused_products = 0;           /* so many of the next that cuBLASLt refuses     */
inline cublasStatus_t refused_with = CUBLAS_STATUS_NOT_SUPPORTED;
inline cublasStatus_t heuristic_says = CUBLAS_STATUS_SUCCESS;   /* else: it fails with this  */
inline bool unaligned_algorithms = true;    /* has cuBLASLt any below 16 bytes?              */
inline bool epilogues = true;               /* has it sums and GELU in a product's pass?     */
inline bool sums_in_f32 = true;             /* has it BGRADB that writes f32 from f16 or bf16? */
inline uint32_t reductions = 0;             /* the mask of the newest heuristic              */
inline bool narrow_products = true;         /* has it any algorithm for fp8, MXFP8 and NVFP4? */
inline long refused_narrow = 0;             /* so many of the next narrow products it refuses */
enum Gelu { exact_tanh, rough_tanh, by_erf };       /* rough: as tanh.approx; erf: another one */
inline Gelu gelu_kind = exact_tanh;
inline bool rounds_first = false;       /* sums with an old c are rounded to its dtype one by one */
inline cublasStatus_t check_says = CUBLAS_STATUS_SUCCESS;       /* of an algorithm that was kept */
inline size_t check_wants = 0;              /* so many bytes more than there were            */
inline size_t library_version = 130100;     /* cuBLASLt's                                    */
/* Milliseconds that events count besides the time that passes: for a product by one of the three
 * algorithms, for sums or GELU in its pass, for a kernel. */
inline double algorithm_ms[3] = { 0, 0, 0 }, joined_ms = 0, kernel_ms = 0, counted_ms = 0;
inline int first_algorithm = 0;             /* which of three its heuristic offers first     */
inline bool other_libm = false;             /* kernels' expf and its like are a unit off     */
inline bool cut_sums = false;               /* tensor cores cut sums off, as a GPU's do      */
inline bool old_loader = false;             /* as before 12.3: none is loaded in a capture   */
/* CUDASIM_ROUGH in the environment: both of numbers, in any program. */
inline const bool rough = std::getenv("CUDASIM_ROUGH") && (other_libm = cut_sums = true);
inline bool touches_managed = true;         /* may the host, while the GPU works?            */
inline bool host_sees_device = true;        /* false: what is allocated is hidden from it    */
#ifdef CUDASIM_ONE_NAN                      /* f32 arithmetic makes NaNs as a GPU does: see  */
const bool one_nan = true;                  /* tests/cuda/canonical_nan.awk                       */
#else
const bool one_nan = false;
#endif

struct Count {
    long launches, copies, waits, resources, released, queries, pageable, replays, products,
         heuristics, checks, joined,        /* joined: products with sums or GELU            */
         narrow;                            /* of the products: of fp8, MXFP8, NVFP4 codes   */
    int  algorithm;                         /* of the newest product                         */
    long shared;                            /* dynamic bytes of the newest launch with any   */
};
inline Count count;

[[noreturn]] inline void fatal(const char *format, ...) {
    va_list list;
    va_start(list, format);
    std::fflush(stdout);
    std::fputs("cudasim: ", stderr);
    std::vfprintf(stderr, format, list);
    std::fputs("\n", stderr);
    va_end(list);
    #ifdef CUDASIM_SANITIZED
    __sanitizer_print_stack_trace();
#endif
    std::abort();
}

/* ==== threads, blocks, warps ============================================================= */

const size_t stack_bytes = 256 * 1024;

/* Where a stack that was left goes on. ucontext knows any machine, but asks the kernel for the
 * signals' mask at each change: without it the tests take a fifth of the time. */
#if defined(__x86_64__) && defined(__unix__)
typedef void *Context;

/* The registers that a called function must keep stay on the stack that is left. */
__attribute__((naked, noinline)) inline void change_stacks(void **, void *) {
    asm("pushq %rbp\n\t"
        "pushq %rbx\n\t"
        "pushq %r12\n\t"
        "pushq %r13\n\t"
        "pushq %r14\n\t"
        "pushq %r15\n\t"
        "movq %rsp, (%rdi)\n\t"
        "movq %rsi, %rsp\n\t"
        "popq %r15\n\t"
        "popq %r14\n\t"
        "popq %r13\n\t"
        "popq %r12\n\t"
        "popq %rbx\n\t"
        "popq %rbp\n\t"
        "ret");
}

inline void change_context(Context &left, Context &next) { change_stacks(&left, next); }

/* Six registers, where to return to, and nothing above it: aligned as after a call. */
inline void begin_context(Context &c, char *stack, void (*run)()) {
    void **top = (void **)(((uintptr_t)stack + stack_bytes) & ~(uintptr_t)15);
#ifdef CUDASIM_SANITIZED       /* what the last thread on this stack did not return from */
    __asan_unpoison_memory_region(stack + stack_bytes - 4096, 4096);
#endif
    std::memset((void *)(top - 8), 0, 8 * sizeof *top);
    top[-2] = (void *)run;
    c = top - 8;
}
#else
typedef ucontext_t Context;

inline void change_context(Context &left, Context &next) { swapcontext(&left, &next); }

inline void begin_context(Context &c, char *stack, void (*run)()) {
    getcontext(&c);
    c.uc_stack.ss_sp = stack;
    c.uc_stack.ss_size = stack_bytes;
    c.uc_link = nullptr;
    makecontext(&c, run, 0);
}
#endif

struct Async { void *to; const void *from; int bytes, given, group; };

struct Fiber {
    Context  context;
    void    *fake = nullptr;
    uint3    thread;
    int      index = 0;
    bool     done = false;
    const unsigned *generation = nullptr;   /* waits while *generation == seen               */
    unsigned seen = 0;
    const char *at = "";
    int      line = 0;
    std::vector<Async> copies;
    int      groups = 0;
};

/* Where the lanes of one mask meet. Two sides: a round is read while the next is written. */
struct Meeting {
    unsigned arrived = 0, generation = 0;
    const char *what = "";
    unsigned char slot[2][32][64];
};

struct Warp {
    unsigned all = 0, exited = 0;
    std::map<unsigned, Meeting> meetings;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp>  warps;
    int      live = 0, arrived = 0;
    unsigned generation = 0;
    const char *site = nullptr;             /* of the barrier that fills up                  */
    int      line = 0, votes = 0, counted[2] = { 0, 0 };
    std::map<const void *, void *> shared;
    size_t   fixed = 0, dynamic_bytes = 0, limit = 0;
    void    *dynamic = nullptr;
    uint3    index;
    dim3     size, grid;
    Context  scheduler;
    const void *scheduler_stack = nullptr;
    size_t   scheduler_bytes = 0;
    const std::function<void()> *body = nullptr;
};

inline Block *block;
inline Fiber *fiber;

inline int lane() { return fiber->index % 32; }

inline void yield(bool last) {
#ifdef CUDASIM_SANITIZED
    __sanitizer_start_switch_fiber(last ? nullptr : &fiber->fake, block->scheduler_stack,
                                   block->scheduler_bytes);
#else
    (void)last;
#endif
    change_context(fiber->context, block->scheduler);
#ifdef CUDASIM_SANITIZED
    __sanitizer_finish_switch_fiber(fiber->fake, nullptr, nullptr);
#endif
}

inline void wait_past(const unsigned *generation, unsigned seen, const char *at, int line) {
    fiber->generation = generation;
    fiber->seen = seen;
    fiber->at = at;
    fiber->line = line;
    yield(false);
    fiber->generation = nullptr;
}

inline void release_barrier() {
    block->counted[block->generation & 1] = block->votes;
    block->votes = block->arrived = 0;
    block->generation++;
}

/* How many threads of the block brought a true vote. */
inline int barrier(const char *file, int line, bool vote) {
    unsigned generation = block->generation;
    if (block->arrived == 0) { block->site = file; block->line = line; }
    else if (block->line != line || std::strcmp(block->site, file) != 0)
        fatal("divergent barrier: some threads are at %s:%d, others at %s:%d", block->site,
              block->line, file, line);
    block->votes += vote;
    if (++block->arrived == block->live) release_barrier();
    else wait_past(&block->generation, generation, "__syncthreads", line);
    return block->counted[generation & 1];
}

/* Meets the other lanes of mask; returns what each of them brought, 64 bytes a lane. */
inline unsigned char (*meet(unsigned mask, const char *what, const void *data, size_t bytes))[64] {
    Warp &warp = block->warps[(size_t)fiber->index / 32];
    unsigned me = 1u << lane();
    if (!(mask & me)) fatal("%s: lane %d is not in its own mask %08x", what, lane(), mask);
    if (mask & ~warp.all) fatal("%s: mask %08x names lanes that do not exist", what, mask);
    if (mask & warp.exited) fatal("%s: mask %08x names lanes that have exited", what, mask);
    Meeting &m = warp.meetings[mask];
    unsigned generation = m.generation;
    if (!m.arrived) m.what = what;
    else if (std::strcmp(m.what, what) != 0)
        fatal("lanes of one warp are at %s and at %s", m.what, what);
    if (bytes) std::memcpy(m.slot[generation & 1][lane()], data, bytes);
    m.arrived |= me;
    if (m.arrived == mask) { m.arrived = 0; m.generation++; }
    else wait_past(&m.generation, generation, what, (int)mask);
    return m.slot[generation & 1];
}

inline void thread_exit() {
    Warp &warp = block->warps[(size_t)fiber->index / 32];
    if (!fiber->copies.empty()) fatal("a thread exits while copies of its are under way");
    fiber->done = true;
    warp.exited |= 1u << lane();
    for (auto &entry : warp.meetings)
        if (entry.second.arrived && (entry.first >> lane() & 1u))
            fatal("lane %d exits while its warp waits for it at %s", lane(), entry.second.what);
    block->live--;
    if (block->live && block->arrived == block->live) release_barrier();
}

inline void thread_main() {
#ifdef CUDASIM_SANITIZED
    __sanitizer_finish_switch_fiber(nullptr, &block->scheduler_stack, &block->scheduler_bytes);
#endif
    (*block->body)();
    thread_exit();
    yield(true);
}

/* The k-th of n in the schedule's order. */
inline long ordered(long k, long n) {
    static const long steps[] = { 7, 11, 13, 17, 5, 3 };
    if (schedule == reversed) return n - 1 - k;
    if (schedule == forward || n < 2) return k;
    for (long step : steps)
        if (n % step) return (k * step + n / 2) % n;
    return (k * (n - 1) + n / 2) % n;
}

inline void *aligned(size_t bytes) {
    void *p = nullptr;
    if (posix_memalign(&p, 256, bytes ? bytes : 1)) fatal("out of host memory");
    std::memset(p, 0xFF, bytes);
    return p;
}

inline void *shared(const void *key, size_t bytes) {
    void *&p = block->shared[key];
    if (p) return p;
    block->fixed += bytes;
    if (block->fixed > 48 * 1024) fatal("more than 48 KB of static shared memory");
    if (block->fixed + block->dynamic_bytes > block->limit)
        fatal("static and dynamic shared memory pass the limit of %zu bytes", block->limit);
    return p = aligned(bytes);
}

inline void *dynamic_shared() {
    if (!block->dynamic) fatal("dynamic shared memory used but not asked for at the launch");
    return block->dynamic;
}

inline bool is_shared(const void *p) {
    const char *c = (const char *)p, *d = (const char *)block->dynamic;
    if (d && c >= d && c < d + block->dynamic_bytes) return true;
    for (auto &entry : block->shared)       /* the size is the sanitizer's business          */
        if (c >= (char *)entry.second && c < (char *)entry.second + 48 * 1024) return true;
    return false;
}

inline void report_deadlock() {
    std::fprintf(stderr, "cudasim: deadlock in block (%u,%u,%u):\n", block->index.x,
                 block->index.y, block->index.z);
    for (Fiber &f : block->fibers)
        if (!f.done) std::fprintf(stderr, "  thread %d waits at %s (%s %x)\n", f.index, f.at,
                                  std::strcmp(f.at, "__syncthreads") ? "mask" : "line hex", f.line);
    fatal("deadlock");
}

inline void resume(Fiber &f, char *stack) {
    fiber = &f;
#ifdef CUDASIM_SANITIZED
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stack, stack_bytes);
#else
    (void)stack;
#endif
    change_context(block->scheduler, f.context);
#ifdef CUDASIM_SANITIZED
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

struct Stacks {     /* kept from block to block */
    std::vector<char *> p;
    ~Stacks() { for (char *s : p) std::free(s); }
};
inline Stacks stacks;

inline void prepare_fibers(Block &b) {
    size_t n = b.fibers.size();
    while (stacks.p.size() < n) stacks.p.push_back((char *)std::malloc(stack_bytes));
    for (size_t i = 0; i < n; i++) {
        Fiber &f = b.fibers[i];
        f.index = (int)i;
        f.thread = uint3{ (unsigned)(i % b.size.x), (unsigned)(i / b.size.x % b.size.y),
                          (unsigned)(i / b.size.x / b.size.y) };
        b.warps[i / 32].all |= 1u << i % 32;
        begin_context(f.context, stacks.p[i], thread_main);
    }
}

/* Lets each of some threads run to where it waits; false when all of them waited already. */
inline bool run_threads(Block &b, long first, long count) {
    long n = (long)b.fibers.size() - first < count ? (long)b.fibers.size() - first : count;
    bool progress = false;
    for (long k = 0; k < n; k++) {
        size_t i = (size_t)(first + ordered(k, n));
        Fiber &f = b.fibers[i];
        if (f.done || (f.generation && *f.generation == f.seen)) continue;
        progress = true;
        resume(f, stacks.p[i]);
    }
    return progress;
}

/* A team runs on until all of it waits: a warp, or the whole block. The warp that fills a
 * barrier goes on at once, so that each is the first of some stretch between two barriers. */
inline void run_block(Block &b) {
    long n = (long)b.fibers.size(), team = schedule == permuted ? n : 32;
    block = &b;
    prepare_fibers(b);
    while (b.live) {
        bool progress = false;
        for (long k = 0; k < n; k += team)
            while (run_threads(b, ordered(k / team, (n + team - 1) / team) * team, team))
                progress = true;
        if (!progress) report_deadlock();
    }
    for (auto &entry : b.shared) std::free(entry.second);
    std::free(b.dynamic);
    block = nullptr;
}

/* Sets flush-to-zero as in a kernel built with -ftz=true, while it lives. */
struct Flushed {
#ifdef __SSE__
    unsigned before = __builtin_ia32_stmxcsr();
    Flushed() { if (flushes) __builtin_ia32_ldmxcsr(before | 0x8040u); }
    ~Flushed() { if (flushes) __builtin_ia32_ldmxcsr(before); }
#else
    ~Flushed() {}
#endif
};

inline void run_grid(dim3 grid, dim3 size, size_t dynamic, size_t limit,
                     const std::function<void()> &body) {
    Flushed now;
    long blocks = (long)grid.x * grid.y * grid.z, threads = (long)size.x * size.y * size.z;
    if (blocks * threads > (1l << 24)) fatal("%ld threads: too many to simulate", blocks * threads);
    for (long k = 0; k < blocks; k++) {
        long i = ordered(k, blocks);
        Block b;
        b.fibers.resize((size_t)threads);
        b.warps.resize((size_t)(threads + 31) / 32);
        b.live = (int)threads;
        b.size = size; b.grid = grid; b.body = &body; b.limit = limit;
        b.index = uint3{ (unsigned)(i % grid.x), (unsigned)(i / grid.x % grid.y),
                         (unsigned)(i / grid.x / grid.y) };
        b.dynamic_bytes = dynamic;
        if (dynamic) b.dynamic = aligned(dynamic);
        run_block(b);
    }
}

/* ==== warp collectives, matrix instructions, asynchronous copies ========================= */

template <class T> T shuffle(unsigned mask, const char *what, T value, int from) {
    static_assert(sizeof(T) <= 64, "too large for a shuffle");
    auto *slot = meet(mask, what, &value, sizeof value);
    T r;
    if (!(mask >> from & 1u)) fatal("%s: lane %d reads lane %d, which is not in mask %08x", what,
                                    lane(), from, mask);
    std::memcpy(&r, slot[from], sizeof r);
    return r;
}

inline unsigned ballot(unsigned mask, const char *what, bool vote) {
    unsigned char byte = vote, r;
    unsigned all = 0;
    auto *slot = meet(mask, what, &byte, 1);
    for (int i = 0; i < 32; i++) {
        std::memcpy(&r, slot[i], 1);
        if ((mask >> i & 1u) && r) all |= 1u << i;
    }
    return all;
}

inline double half_at(uint32_t pair, int high, bool bf16) {
    uint32_t code = high ? pair >> 16 : pair & 0xFFFFu, wide = code << 16;
    float f;
    __half_raw h;
    std::memcpy(&f, &wide, 4);
    h.x = (unsigned short)code;
    return bf16 ? (double)f : (double)__half2float(__half(h));
}

/* x without what lies below the last of f32's bits of a number as large as `largest`. */
inline double cut_off(double x, double largest) {
    int e;
    std::frexp(largest, &e);
    return std::ldexp(std::trunc(std::ldexp(x, 24 - e)), e - 24);
}

/* start + four terms, or fewer, as tensor cores add them: all are cut off where the largest ends,
 * and so is their sum, towards 0. So found Fasi, Higham, Mikaitis and Pranesh on V100 (Numerical
 * behavior of NVIDIA tensor cores, 2021); T4 and A100 keep more. */
inline float cut_four(float start, const double *terms, int n) {
    double largest = std::fabs((double)start), sum;
    bool finite = std::isfinite(start);
    for (int i = 0; i < n; i++) {
        largest = std::fmax(largest, std::fabs(terms[i]));
        finite = finite && std::isfinite(terms[i]);
    }
    if (!finite) {
        for (int i = 0; i < n; i++) start += (float)terms[i];
        return start;
    }
    sum = cut_off((double)start, largest);
    for (int i = 0; i < n; i++) sum += cut_off(terms[i], largest);
    return (float)cut_off(sum, std::fabs(sum));
}
inline float cut_sum(float start, const double *terms, int n) {
    for (int i = 0; i < n; i += 4) start = cut_four(start, terms + i, n - i < 4 ? n - i : 4);
    return start;
}

inline int capability() { return 10 * capability_major + capability_minor; }

/* d += a b, of 16 x 16 and 16 x 8 elements, in the fragments that PTX prescribes. */
inline void mma_m16n8k16(float *d, const uint32_t *a, const uint32_t *b, bool bf16) {
    uint32_t mine[6];
    int row = lane() / 4, pair = lane() % 4;
    if (capability() < (bf16 ? 80 : 75)) fatal("capability %d has no such mma", capability());
    std::memcpy(mine, a, 16);
    std::memcpy(mine + 4, b, 8);
    auto *slot = meet(0xFFFFFFFFu, "mma", mine, sizeof mine);
    double rows[2][16], columns[2][16];     /* of this lane's four results: widened once     */
    for (int k = 0; k < 16; k++) for (int side = 0; side < 2; side++) {
        uint32_t x, y;
        std::memcpy(&x, slot[row * 4 + k % 8 / 2] + 4 * (side + k / 8 * 2), 4);
        std::memcpy(&y, slot[(pair * 2 + side) * 4 + k % 8 / 2] + 4 * (4 + k / 8), 4);
        rows[side][k] = half_at(x, k % 2, bf16);
        columns[side][k] = half_at(y, k % 2, bf16);
    }
    for (int i = 0; i < 4; i++) {
        double sum = 0.0, terms[16];
        for (int k = 0; k < 16; k++) sum += terms[k] = rows[i / 2][k] * columns[i % 2][k];
        d[i] = cut_sums ? cut_sum(d[i], terms, 16) : (float)((double)d[i] + sum);
    }
}

/* Lane 8 i + j gives the address of row j of matrix i; 8 x 8 elements of 2 bytes each. */
template <int N, bool transposed> void ldmatrix(uint32_t *r, const void *row) {
    if (capability() < 75) fatal("capability %d has no ldmatrix", capability());
    if (lane() < 8 * N && (uintptr_t)row % 16) fatal("ldmatrix: a row is not aligned to 16 bytes");
    if (lane() < 8 * N && !is_shared(row)) fatal("ldmatrix: a row is not in shared memory");
    auto *slot = meet(0xFFFFFFFFu, transposed ? "ldmatrix.trans" : "ldmatrix", &row, sizeof row);
    for (int i = 0; i < N; i++) {
        uint16_t two[2];
        for (int e = 0; e < 2; e++) {
            int j = transposed ? lane() % 4 * 2 + e : lane() / 4;
            int k = transposed ? lane() / 4 : lane() % 4 * 2 + e;
            const char *p;
            std::memcpy(&p, slot[8 * i + j], sizeof p);
            std::memcpy(&two[e], p + 2 * k, 2);
        }
        std::memcpy(&r[i], two, 4);
    }
}

/* Until its wait, the target holds NaN. given < bytes: the rest becomes 0. */
inline void cp_async(void *to, const void *from, int bytes, int given) {
    if (bytes != 4 && bytes != 8 && bytes != 16) fatal("cp.async of %d bytes", bytes);
    if ((uintptr_t)to % (size_t)bytes || (given && (uintptr_t)from % (size_t)bytes))
        fatal("cp.async: misaligned");
    if (!is_shared(to)) fatal("cp.async: the target is not in shared memory");
    std::memset(to, 0xFF, (size_t)bytes);
    fiber->copies.push_back(Async{ to, from, bytes, given, fiber->groups });
}
inline void cp_async_commit() { fiber->groups++; }
/* Leaves the newest n groups under way. */
inline void cp_async_wait(int n) {
    std::vector<Async> rest;
    for (Async &c : fiber->copies) {
        if (c.group >= fiber->groups - n) { rest.push_back(c); continue; }
        if (c.given) std::memcpy(c.to, c.from, (size_t)c.given);
        std::memset((char *)c.to + c.given, 0, (size_t)(c.bytes - c.given));
    }
    fiber->copies.swap(rest);
}

/* ==== memory, streams, capture =========================================================== */

struct Region { size_t bytes; bool pinned; int device; bool hidden; };

}   /* namespace cudasim */

struct CUgraph_st { std::vector<std::function<void()>> work; };
struct CUgraphExec_st { std::vector<std::function<void()>> work; };
struct CUstream_st {
    int device = 0;
    unsigned flags = 0;                     /* 0: waits for the legacy stream, and it for us */
    std::deque<std::function<void()>> queue;
    long asked = 0, done = 0;               /* pieces of work so far                         */
    CUgraph_st *graph = nullptr;            /* being captured                                */
    bool broken = false;                    /* the capture is                                */
};
struct CUevent_st {
    CUstream_st *stream = nullptr;
    long asked = 0, done = 0;
    bool captured = false;                  /* recorded in a capture: nobody may look        */
    int  device = 0;
    std::chrono::steady_clock::time_point when;     /* of the newest                          */
    double counted = 0;                     /* of counted_ms                                  */
};

namespace cudasim {

/* Device memory that the host must not touch: one range of addresses, closed but while work is done.
 * What was freed comes back for the next of its size. The sanitizer sees what lies between. */
struct Hidden {
    static const size_t range = (size_t)1 << 36;
    static const size_t page = (size_t)2 << 20;     /* a large one is soon opened and closed    */
    char  *base = nullptr;
    size_t top = 0;
    int    opened = 0;
    std::map<size_t, std::vector<char *>> spare;
};
inline Hidden hidden;

inline void poison(void *p, size_t bytes, bool on) {
#ifdef CUDASIM_SANITIZED
    if (on) __asan_poison_memory_region(p, bytes);
    else __asan_unpoison_memory_region(p, bytes);
#else
    (void)p, (void)bytes, (void)on;
#endif
}

inline void open_memory(bool on) {
    hidden.opened += on ? 1 : -1;
    if (!hidden.top || hidden.opened != (on ? 1 : 0)) return;
    if (mprotect(hidden.base, hidden.top, on ? PROT_READ | PROT_WRITE : PROT_NONE))
        fatal("mprotect of device memory failed");
}
struct Opened {
    Opened() { open_memory(true); }
    ~Opened() { open_memory(false); }
};

/* By what touched it: the host, or a kernel that passed the end. */
inline void touched(int number, siginfo_t *info, void *) {
    const char *p = (const char *)info->si_addr;
    if (p >= hidden.base && p < hidden.base + Hidden::range)
        fatal("the host touches device memory, or a kernel what is beyond it");
    std::signal(number, SIG_DFL);
}
inline void reserve_hidden() {
    struct sigaction action;
    void *p = mmap(nullptr, Hidden::range + Hidden::page, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fatal("no addresses for device memory");
    hidden.base = (char *)(((uintptr_t)p + Hidden::page - 1) / Hidden::page * Hidden::page);
#ifdef MADV_HUGEPAGE
    madvise(hidden.base, Hidden::range, MADV_HUGEPAGE);
#endif
    std::memset((void *)&action, 0, sizeof action);
    action.sa_sigaction = touched;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
}

inline size_t hidden_room(size_t bytes) { return (bytes + 64 + 255) / 256 * 256; }

inline void *hidden_new(size_t bytes) {
    size_t room = hidden_room(bytes);
    std::vector<char *> &spare = hidden.spare[room];
    char *p;
    if (!hidden.base) reserve_hidden();
    if (!spare.empty()) {
        p = spare.back();
        spare.pop_back();
    } else {
        static size_t used;
        if (used + room > Hidden::range) fatal("out of addresses for device memory");
        p = hidden.base + used;
        used += room;
        hidden.top = (used + Hidden::page - 1) / Hidden::page * Hidden::page;
    }
    Opened now;
    poison(p, room, true);
    poison(p, bytes, false);
    std::memset(p, 0xFF, bytes);
    return p;
}
inline void hidden_back(void *p, size_t bytes) {
    poison(p, hidden_room(bytes), true);
    hidden.spare[hidden_room(bytes)].push_back((char *)p);
}

struct Machine {
    std::map<uintptr_t, Region> memory;
    std::map<uintptr_t, size_t> freed;
    std::set<CUstream_st *> streams;
    std::set<CUevent_st *> events;
    std::set<CUgraph_st *> graphs;
    std::set<CUgraphExec_st *> execs;
    std::map<std::pair<int, const void *>, int> shared_limit;   /* on each GPU               */
    std::set<std::pair<int, const void *>> loaded;              /* kernels that are there    */
    long handles = 0;                       /* of cuBLASLt, descriptors included              */
    std::map<int, CUstream_st> legacy, per_thread;  /* the default streams of each GPU        */
    std::set<int> contexts;                 /* GPUs that have one                             */
    int device = 0;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;   /* what captures forbid       */
    cudaError_t last = cudaSuccess, sticky = cudaSuccess;
    ~Machine() {
        for (auto &m : memory) if (!m.second.hidden) std::free((void *)m.first);
        if (std::getenv("CUDASIM_COUNT"))
            std::fprintf(stderr, "cudasim: %ld launches, %ld copies, %ld waits, %ld replays, "
                         "%ld epilogues\n", count.launches, count.copies, count.waits,
                         count.replays, count.joined);
    }
};
inline Machine &machine() { static Machine m; return m; }

/* What was made and not yet given back. */
inline long leaks() {
    Machine &m = machine();
    return (long)(m.memory.size() + m.streams.size() + m.events.size() + m.graphs.size() +
                  m.execs.size()) + m.handles;
}

inline cudaError_t result(cudaError_t e) {
    Machine &m = machine();
    if (m.sticky != cudaSuccess) return m.sticky;
    if (e != cudaSuccess) m.last = e;
    return e;
}

inline const Region *region(const void *p, size_t bytes = 1) {
    Machine &m = machine();
    auto it = m.memory.upper_bound((uintptr_t)p);
    if (it == m.memory.begin()) return nullptr;
    --it;
    return (uintptr_t)p + bytes <= it->first + it->second.bytes ? &it->second : nullptr;
}
inline bool on_device(const void *p, size_t bytes) {    /* as the device sees it: mapped too */
    return region(p, bytes) != nullptr;
}

/* A resource request: fails when its turn has come. */
inline bool refused() {
    count.resources++;
    return fail_at > 0 && --fail_at == 0;
}

/* What follows needs a context on the current GPU. */
inline void need_context() { machine().contexts.insert(machine().device); }

inline CUstream_st *default_stream(std::map<int, CUstream_st> &of) {
    CUstream_st &s = of[machine().device];
    s.device = machine().device;
    return &s;
}
inline CUstream_st *stream_of(cudaStream_t s) {
    Machine &m = machine();
    if (!s || s == cudaStreamLegacy) return default_stream(m.legacy);
    if (s == cudaStreamPerThread) return default_stream(m.per_thread);
    return m.streams.count(s) ? s : nullptr;
}
inline bool is_legacy(const CUstream_st *s) {
    auto it = machine().legacy.find(s->device);
    return it != machine().legacy.end() && &it->second == s;
}
inline bool is_blocking(const CUstream_st *s)
{ return !is_legacy(s) && !(s->flags & cudaStreamNonBlocking); }

/* All streams but the legacy ones. */
inline std::vector<CUstream_st *> other_streams() {
    std::vector<CUstream_st *> all(machine().streams.begin(), machine().streams.end());
    for (auto &s : machine().per_thread) all.push_back(&s.second);
    return all;
}

inline CUstream_st *capturing(bool blocking = false) {
    for (CUstream_st *s : other_streams())
        if (s->graph && (!blocking || is_blocking(s))) return s;
    return nullptr;
}

/* Calls that no capture allows, on any stream, unless the thread relaxed that. */
inline bool breaks_capture() {
    CUstream_st *s = capturing();
    if (!s || machine().mode == cudaStreamCaptureModeRelaxed) return false;
    s->broken = true;
    return true;
}
/* Use of the legacy stream while one that waits for it is captured. */
inline bool breaks_implicitly(const CUstream_st *legacy) {
    CUstream_st *s = is_legacy(legacy) ? capturing(true) : nullptr;
    if (s) s->broken = true;
    return s != nullptr;
}

inline void step(CUstream_st *s) {
    std::function<void()> work = std::move(s->queue.front());
    s->queue.pop_front();
    Opened now;
    if (machine().sticky == cudaSuccess) work();
    s->done++;
}
inline void drain(CUstream_st *s) {
    if (s->queue.empty()) return;
    Opened now;
    while (!s->queue.empty()) step(s);
}
inline void drain_to(CUstream_st *s, long mark)
{ while (s->done < mark && !s->queue.empty()) step(s); }

inline void drain_all() {
    for (auto &s : machine().legacy) drain(&s.second);
    for (CUstream_st *s : other_streams()) drain(s);
}

inline void append(CUstream_st *s, std::function<void()> work) {
    s->asked++;
    s->queue.push_back(std::move(work));
}
/* What comes now on s waits for all that is queued on `other`. */
inline void fence(CUstream_st *s, CUstream_st *other) {
    long mark = other->asked;
    if (s == other || s->device != other->device || other->done >= mark) return;
    append(s, [=] {
        for (CUstream_st *still : other_streams()) if (still == other) drain_to(other, mark);
        if (is_legacy(other)) drain_to(other, mark);
    });
}
/* The legacy stream waits for blocking streams, and they for it. */
inline void order_implicitly(CUstream_st *s) {
    if (is_legacy(s)) {
        for (CUstream_st *other : other_streams()) if (is_blocking(other)) fence(s, other);
    } else if (is_blocking(s)) {
        auto it = machine().legacy.find(s->device);
        if (it != machine().legacy.end()) fence(s, &it->second);
    }
}

inline cudaError_t enqueue(CUstream_st *s, std::function<void()> work) {
    if (!s) return result(cudaErrorInvalidResourceHandle);
    if (machine().sticky != cudaSuccess) return machine().sticky;
    if (s->broken) return result(cudaErrorStreamCaptureInvalidated);
    if (s->graph) { s->graph->work.push_back(std::move(work)); return cudaSuccess; }
    if (breaks_implicitly(s)) return result(cudaErrorStreamCaptureImplicit);
    order_implicitly(s);
    append(s, std::move(work));
    if (eager) drain(s);
    return cudaSuccess;
}

inline void *allocate(size_t bytes, bool pinned) {
    Machine &m = machine();
    bool hide = !pinned && !host_sees_device;
    void *p = hide ? hidden_new(bytes ? bytes : 1) : aligned(bytes);
    m.memory[(uintptr_t)p] = Region{ bytes ? bytes : 1, pinned, m.device, hide };
    for (auto it = m.freed.begin(); it != m.freed.end();)
        it = it->first < (uintptr_t)p + bytes && (uintptr_t)p < it->first + it->second
           ? m.freed.erase(it) : std::next(it);
    return p;
}
inline cudaError_t release(void *p, bool pinned) {
    Machine &m = machine();
    auto it = m.memory.find((uintptr_t)p);
    if (!p) return cudaSuccess;
    if (it == m.memory.end() || it->second.pinned != pinned) return result(cudaErrorInvalidValue);
    drain_all();
    void *own = (void *)it->first;      /* p itself: the compiler has seen callers' wrong ones */
    Region was = it->second;
    m.freed[it->first] = was.bytes;
    m.memory.erase(it);
    if (was.hidden) hidden_back(own, was.bytes);
    else std::free(own);
    count.released++;
    return cudaSuccess;
}

/* Would a kernel that uses p touch memory that no GPU sees? A dtype with padding behind it may
 * look like an address just above a multiple of 2^32: that is none, a heap begins 16 bytes up. */
inline bool bad_pointer(uint64_t p) {
    if (p < 0x10000 || p >> 47 || (uint32_t)p < 16) return false;
    if (const Region *r = region((const void *)(uintptr_t)p))   /* another GPU's is out of reach */
        return !r->pinned && r->device != machine().device;
    for (auto &f : machine().freed)
        if (p >= f.first && p < f.first + f.second) return true;
#ifdef CUDASIM_SANITIZED
    char name[8];
    void *at;
    size_t bytes;
    if (p < 0x10000000) return false;
    const char *kind = __asan_locate_address((void *)(uintptr_t)p, name, sizeof name, &at, &bytes);
    return kind && (!std::strcmp(kind, "heap") || !std::strcmp(kind, "stack")) && bytes > 0 &&
           p >= (uintptr_t)at && p < (uintptr_t)at + bytes;
#else
    return false;
#endif
}

/* Every aligned word of an argument that looks like an address. */
template <class T> bool bad_argument(const T &value) {
    uint64_t words[sizeof(T) / 8 + 1];
    std::memcpy(words, (const void *)&value, sizeof(T));
    for (size_t i = 0; i < sizeof(T) / 8; i++)
        if (bad_pointer(words[i])) return true;
    return false;
}
/* An array is given as its address. */
template <class T, size_t n> bool bad_argument(const T (&array)[n])
{ return bad_pointer((uint64_t)(uintptr_t)array); }

inline cudaError_t check_launch(const void *kernel, dim3 grid, dim3 size, size_t dynamic,
                                size_t *limit) {
    Machine &m = machine();
    auto it = m.shared_limit.find({ m.device, kernel });
    *limit = it == m.shared_limit.end() ? 48 * 1024 : (size_t)it->second;
    if (*limit < 48 * 1024) *limit = 48 * 1024;
    if (!grid.x || !grid.y || !grid.z || !size.x || !size.y || !size.z ||
        grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535 || size.x > 1024 ||
        size.y > 1024 || size.z > 64 || (size_t)size.x * size.y * size.z > 1024)
        return cudaErrorInvalidConfiguration;
    return dynamic > *limit ? cudaErrorInvalidValue : cudaSuccess;
}

/* kernel<<<grid, size, dynamic, stream>>>(arguments...), and the error of just this launch. The
 * caller's own arguments are looked at: a copy of a struct may have anything between its fields. */
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 size, size_t dynamic, cudaStream_t stream,
                   A &&...arguments) {
    static_assert((0 + ... + sizeof(P)) <= 4096, "a kernel's parameters pass 4 KB");
    std::tuple<P...> values(static_cast<P>(arguments)...);
    size_t limit;
    CUstream_st *s = stream_of(stream);
    cudaError_t e = check_launch((const void *)kernel, grid, size, dynamic, &limit);
    if (machine().sticky != cudaSuccess) return machine().sticky;
    if (!s || s->device != machine().device) return result(cudaErrorInvalidResourceHandle);
    if (e != cudaSuccess) return result(e);
    bool bad = (false || ... || bad_argument(arguments));
    if (bad && pointers_abort) fatal("a kernel was given a host pointer, or a freed one");
    need_context();
    if (machine().loaded.insert({ machine().device, (const void *)kernel }).second && old_loader &&
        s->graph) {
        s->broken = true;
        return result(cudaErrorStreamCaptureUnsupported);
    }
    count.launches++;
    if (dynamic) count.shared = (long)dynamic;
    return enqueue(s, [=] {
        counted_ms += kernel_ms;
        if (bad || (fault_at > 0 && --fault_at == 0)) {
            machine().sticky = cudaErrorIllegalAddress;
            return;
        }
        run_grid(grid, size, dynamic, limit, [&] { std::apply(kernel, values); });
    });
}

}   /* namespace cudasim */

/* ==== what kernels see =================================================================== */

#define threadIdx (cudasim::fiber->thread)
#define blockIdx  (cudasim::block->index)
#define blockDim  (cudasim::block->size)
#define gridDim   (cudasim::block->grid)
#define __syncthreads()         ((void)cudasim::barrier(__FILE__, __LINE__, false))
#define __syncthreads_count(p)  cudasim::barrier(__FILE__, __LINE__, (p) != 0)
#define __syncthreads_or(p)     (cudasim::barrier(__FILE__, __LINE__, (p) != 0) != 0)
#define __syncthreads_and(p)    (cudasim::barrier(__FILE__, __LINE__, (p) == 0) == 0)

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { cudasim::meet(mask, "__syncwarp", "", 0); }
template <class T> T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
    int l = cudasim::lane();
    return cudasim::shuffle(mask, "__shfl_sync", v, l / width * width + (from & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
    int l = cudasim::lane(), from = l ^ bits;
    return cudasim::shuffle(mask, "__shfl_xor_sync", v, from / width > l / width ? l : from);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
    int l = cudasim::lane(), from = l + (int)by;
    return cudasim::shuffle(mask, "__shfl_down_sync", v, from / width != l / width ? l : from);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
    int l = cudasim::lane(), from = l - (int)by;
    return cudasim::shuffle(mask, "__shfl_up_sync", v, from < l / width * width ? l : from);
}
inline unsigned __ballot_sync(unsigned mask, int p)
{ return cudasim::ballot(mask, "__ballot_sync", p != 0); }
inline int __any_sync(unsigned mask, int p)
{ return cudasim::ballot(mask, "__any_sync", p != 0) != 0; }
inline int __all_sync(unsigned mask, int p)
{ return cudasim::ballot(mask, "__all_sync", p != 0) == mask; }

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
[[noreturn]] inline void __trap() { cudasim::fatal("__trap"); }

template <class T> T atomicAdd(T *p, T v) { T old = *p; *p = (T)(old + v); return old; }
template <class T> T atomicSub(T *p, T v) { T old = *p; *p = (T)(old - v); return old; }
template <class T> T atomicExch(T *p, T v) { T old = *p; *p = v; return old; }
template <class T> T atomicMax(T *p, T v) { T old = *p; *p = v > old ? v : old; return old; }
template <class T> T atomicMin(T *p, T v) { T old = *p; *p = v < old ? v : old; return old; }
template <class T> T atomicOr(T *p, T v) { T old = *p; *p = old | v; return old; }
template <class T> T atomicAnd(T *p, T v) { T old = *p; *p = old & v; return old; }
template <class T> T atomicCAS(T *p, T want, T v)
{ T old = *p; if (old == want) *p = v; return old; }
inline unsigned atomicInc(unsigned *p, unsigned top)
{ unsigned old = *p; *p = old >= top ? 0 : old + 1; return old; }

template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldcs(const T *p) { return *p; }
template <class T> T __ldcg(const T *p) { return *p; }
template <class T> T __ldca(const T *p) { return *p; }
template <class T> void __stcs(T *p, T v) { *p = v; }
template <class T> void __stcg(T *p, T v) { *p = v; }
template <class T> void __stwb(T *p, T v) { *p = v; }

inline void sincospi(double x, double *s, double *c) {
    double half_turns = std::remainder(x, 2.0) * 3.14159265358979323846;
    *s = std::sin(half_turns);
    *c = std::cos(half_turns);
}
/* By bisection in double; in the tails by erfc. */
inline float erfinvf(float x) {
    const double size = std::fabs((double)x);
    double low = 0.0, high = 7.0;
    if (!(size < 1.0)) return size > 1.0 || size != size ? NAN : x * HUGE_VALF;
    if (size < 1e-8) return (float)(x * 0.88622692545275801365);
    for (int i = 0; i < 60; i++) {
        const double y = 0.5 * (low + high);
        if (size > 0.5 ? std::erfc(y) > 1.0 - size : std::erf(y) < size) low = y;
        else high = y;
    }
    return std::copysign((float)high, x);
}
inline float normcdff(float x) { return (float)(0.5 * std::erfc(-0.70710678118654752440 * x)); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
inline int __float_as_int(float x) { int u; std::memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }
inline float __int_as_float(int u) { float x; std::memcpy(&x, &u, 4); return x; }
inline long long __double_as_longlong(double x) { long long u; std::memcpy(&u, &x, 8); return u; }
inline double __longlong_as_double(long long u) { double x; std::memcpy(&x, &u, 8); return x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{ return (unsigned long long)((unsigned __int128)a * b >> 64); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }

/* ==== the runtime ======================================================================== */

#define CUDASIM_LIVE() \
    do { if (cudasim::machine().sticky != cudaSuccess) return cudasim::machine().sticky; } while (0)

extern "C" {

inline cudaError_t cudaDriverGetVersion(int *v) { *v = cudasim::driver; return cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int *n) {
    *n = 0;
    if (!cudasim::driver || cudasim::driver / 1000 < CUDART_VERSION / 1000)
        return cudasim::result(cudaErrorInsufficientDriver);
    if (cudasim::devices <= 0) return cudasim::result(cudaErrorNoDevice);
    *n = cudasim::devices;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *d) { *d = cudasim::machine().device; return cudaSuccess; }
__attribute__((used)) inline cudaError_t cudaSetDevice(int d) {
    CUDASIM_LIVE();
    if (d < 0 || d >= cudasim::devices) return cudasim::result(cudaErrorInvalidDevice);
    cudasim::machine().device = d;
    cudasim::need_context();        /* since CUDA 12 */
    return cudaSuccess;
}
inline int cudasim_primary_context(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = (int)cudasim::machine().contexts.count(device);
    return 0;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **to, unsigned,
        unsigned long long, cudaDriverEntryPointQueryResult *found) {
    bool known = std::strcmp(name, "cuDevicePrimaryCtxGetState") == 0;
    *to = known ? (void *)cudasim_primary_context : nullptr;
    if (found) *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int d) {
    if (d < 0 || d >= cudasim::devices) return cudasim::result(cudaErrorInvalidDevice);
    std::memset((void *)p, 0, sizeof *p);
    std::strcpy(p->name, "simulated");
    p->major = cudasim::capability_major;
    p->minor = cudasim::capability_minor;
    p->multiProcessorCount = cudasim::processors;
    p->sharedMemPerBlock = 48 * 1024;
    p->sharedMemPerBlockOptin = (size_t)cudasim::max_shared;
    p->maxThreadsPerBlock = 1024;
    p->warpSize = 32;
    p->canMapHostMemory = p->unifiedAddressing = 1;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr a, int d) {
    if (d < 0 || d >= cudasim::devices) return cudasim::result(cudaErrorInvalidDevice);
    *v = a == cudaDevAttrMultiProcessorCount ? cudasim::processors
       : a == cudaDevAttrComputeCapabilityMajor ? cudasim::capability_major
       : a == cudaDevAttrComputeCapabilityMinor ? cudasim::capability_minor
       : a == cudaDevAttrMaxSharedMemoryPerBlockOptin ? cudasim::max_shared
       : a == cudaDevAttrConcurrentManagedAccess ? cudasim::touches_managed
       : 0;
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError(void) {
    cudasim::Machine &m = cudasim::machine();
    cudaError_t e = m.sticky != cudaSuccess ? m.sticky : m.last;
    m.last = cudaSuccess;
    return e;
}
inline cudaError_t cudaPeekAtLastError(void) {
    cudasim::Machine &m = cudasim::machine();
    return m.sticky != cudaSuccess ? m.sticky : m.last;
}
inline const char *cudaGetErrorString(cudaError_t e) {
    switch (e) {
    case cudaSuccess:                       return "no error";
    case cudaErrorInvalidValue:             return "invalid argument";
    case cudaErrorMemoryAllocation:         return "out of memory";
    case cudaErrorInsufficientDriver:       return "CUDA driver version is insufficient";
    case cudaErrorNoDevice:                 return "no CUDA-capable device is detected";
    case cudaErrorIllegalAddress:           return "an illegal memory access was encountered";
    case cudaErrorInvalidResourceHandle:    return "invalid resource handle";
    case cudaErrorNotReady:                 return "device not ready";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureImplicit:
        return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent:
        return "operation not permitted on an event last recorded in a capturing stream";
    default:                                return "another CUDA error";
    }
}
inline const char *cudaGetErrorName(cudaError_t e) {
    switch (e) {
    case cudaErrorUnsupportedPtxVersion:    return "cudaErrorUnsupportedPtxVersion";
    case cudaErrorInvalidPtx:               return "cudaErrorInvalidPtx";
    case cudaErrorSystemNotReady:           return "cudaErrorSystemNotReady";
    case cudaErrorInitializationError:      return "cudaErrorInitializationError";
    default:                                return cudaGetErrorString(e);
    }
}

/* Programs that link the simulation call it, so it must not be left out. */
__attribute__((used)) inline cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
    CUDASIM_LIVE();
    *all = cudasim::memory_of_device;
    *left = *all - *all / 80;
    return cudaSuccess;
}
inline cudaError_t cudaMalloc(void **p, size_t bytes) {
    CUDASIM_LIVE();
    cudasim::need_context();
    *p = nullptr;
    if (cudasim::breaks_capture()) return cudasim::result(cudaErrorStreamCaptureUnsupported);
    if (cudasim::refused()) return cudasim::result(cudaErrorMemoryAllocation);
    *p = cudasim::allocate(bytes, false);
    return cudaSuccess;
}
inline cudaError_t cudaFree(void *p) {
    if (cudasim::breaks_capture()) return cudasim::result(cudaErrorStreamCaptureUnsupported);
    return cudasim::release(p, false);
}
inline cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) {
    CUDASIM_LIVE();
    cudasim::need_context();
    *p = nullptr;
    if (cudasim::breaks_capture()) return cudasim::result(cudaErrorStreamCaptureUnsupported);
    if (cudasim::refused()) return cudasim::result(cudaErrorMemoryAllocation);
    *p = cudasim::allocate(bytes, true);
    return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void *p) {
    if (cudasim::breaks_capture()) return cudasim::result(cudaErrorStreamCaptureUnsupported);
    return cudasim::release(p, true);
}
inline cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
    const cudasim::Region *r = cudasim::region(host);
    if (!r || !r->pinned) return cudasim::result(cudaErrorInvalidValue);
    *device = host;
    return cudaSuccess;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
    const cudasim::Region *r = cudasim::region(p);
    CUDASIM_LIVE();
    std::memset((void *)a, 0, sizeof *a);
    a->type = !r ? cudaMemoryTypeUnregistered : r->pinned ? cudaMemoryTypeHost
                                                          : cudaMemoryTypeDevice;
    a->device = r ? r->device : -2;
    return cudaSuccess;
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    CUDASIM_LIVE();
    cudasim::need_context();
    *s = nullptr;
    if (cudasim::refused()) return cudasim::result(cudaErrorMemoryAllocation);
    *s = new CUstream_st;
    (*s)->device = cudasim::machine().device;
    (*s)->flags = flags;
    cudasim::machine().streams.insert(*s);
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t *s)
{ return cudaStreamCreateWithFlags(s, cudaStreamDefault); }
inline cudaError_t cudaStreamDestroy(cudaStream_t s) {
    if (!cudasim::machine().streams.count(s))
        return cudasim::result(cudaErrorInvalidResourceHandle);
    cudasim::drain(s);
    delete s->graph;
    cudasim::machine().streams.erase(s);
    delete s;
    return cudaSuccess;
}
inline cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    CUstream_st *s = cudasim::stream_of(stream);
    CUDASIM_LIVE();
    if (!s) return cudasim::result(cudaErrorInvalidResourceHandle);
    *flags = s->flags;
    return cudaSuccess;
}
inline cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
    CUstream_st *s = cudasim::stream_of(stream);
    CUDASIM_LIVE();
    if (!s) return cudasim::result(cudaErrorInvalidResourceHandle);
    *device = s->device;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    CUstream_st *s = cudasim::stream_of(stream);
    CUDASIM_LIVE();
    if (!s) return cudasim::result(cudaErrorInvalidResourceHandle);
    if (s->graph) s->broken = true;
    if (s->graph) return cudasim::result(cudaErrorStreamCaptureUnsupported);
    if (cudasim::breaks_implicitly(s)) return cudasim::result(cudaErrorStreamCaptureImplicit);
    cudasim::count.waits++;
    cudasim::order_implicitly(s);
    cudasim::drain(s);
    return cudasim::result(cudaSuccess);
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    std::swap(*mode, cudasim::machine().mode);
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize(void) {
    CUDASIM_LIVE();
    if (CUstream_st *s = cudasim::capturing()) {    /* relaxed or not: it would wait for that */
        s->broken = true;
        return cudasim::result(cudaErrorStreamCaptureUnsupported);
    }
    cudasim::count.waits++;
    cudasim::drain_all();
    return cudasim::result(cudaSuccess);
}

/* Is p what a copy of this kind wants at this end? pinned memory is the host's. */
inline bool cudasim_fits(const cudasim::Region *r, bool host, cudaMemcpyKind kind) {
    if (kind == cudaMemcpyDefault) return true;
    return host ? !r || r->pinned : r && !r->pinned;
}
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    CUstream_st *s = cudasim::stream_of(stream);
    const cudasim::Region *a = cudasim::region(to, bytes), *b = cudasim::region(from, bytes);
    bool to_host = kind == cudaMemcpyDeviceToHost, from_host = kind == cudaMemcpyHostToDevice;
    CUDASIM_LIVE();
    if (!s) return cudasim::result(cudaErrorInvalidResourceHandle);
    if (!bytes) return cudaSuccess;
    if (!to || !from || !cudasim_fits(a, to_host, kind) || !cudasim_fits(b, from_host, kind) ||
        (!a && cudasim::region(to)) || (!b && cudasim::region(from)))
        return cudasim::result(cudaErrorInvalidValue);
    cudasim::need_context();
    cudasim::count.copies++;
    if (!a || !b) {
        cudasim::count.pageable++;
        if (s->graph) s->broken = true;
        if (s->graph) return cudasim::result(cudaErrorStreamCaptureUnsupported);
    }
    if (!b) {                   /* pageable: taken at once */
        std::string copy((const char *)from, bytes);
        return cudasim::enqueue(s, [=] { std::memcpy(to, copy.data(), bytes); });
    }
    cudaError_t e = cudasim::enqueue(s, [=] { std::memmove(to, from, bytes); });
    if (a || e != cudaSuccess) return e;
    cudasim::count.waits++;     /* pageable: comes back when it is done */
    cudasim::drain(s);
    return cudasim::result(cudaSuccess);
}
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    cudaError_t e = cudaMemcpyAsync(to, from, bytes, kind, cudaStreamLegacy);
    if (e == cudaSuccess) cudasim::drain(cudasim::stream_of(cudaStreamLegacy));
    return e == cudaSuccess ? cudasim::result(cudaSuccess) : e;
}
inline cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t stream) {
    CUDASIM_LIVE();
    if (bytes && !cudasim::on_device(p, bytes)) return cudasim::result(cudaErrorInvalidValue);
    return cudasim::enqueue(cudasim::stream_of(stream), [=] { std::memset(p, byte, bytes); });
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    CUDASIM_LIVE();
    cudasim::need_context();
    *e = nullptr;
    if (cudasim::refused()) return cudasim::result(cudaErrorMemoryAllocation);
    *e = new CUevent_st;
    (*e)->device = cudasim::machine().device;
    cudasim::machine().events.insert(*e);
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t e) {
    if (!cudasim::machine().events.erase(e)) return cudasim::result(cudaErrorInvalidResourceHandle);
    cudasim::drain_all();
    delete e;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream) {
    CUstream_st *s = cudasim::stream_of(stream);
    CUDASIM_LIVE();
    if (!s || s->device != e->device) return cudasim::result(cudaErrorInvalidResourceHandle);
    e->captured = s->graph != nullptr;
    if (e->captured) return cudaSuccess;
    long mark = ++e->asked;
    e->stream = s;
    return cudasim::enqueue(s, [=] {
        if (e->done < mark) e->done = mark;
        e->when = std::chrono::steady_clock::now();
        e->counted = cudasim::counted_ms;
    });
}
/* Lets one piece of the stream's work be done: time passes. */
inline cudaError_t cudaEventQuery(cudaEvent_t e) {
    CUDASIM_LIVE();
    cudasim::count.queries++;
    if (e->captured) return cudasim::result(cudaErrorCapturedEvent);
    if (cudasim::breaks_capture()) return cudasim::result(cudaErrorStreamCaptureUnsupported);
    if (e->done < e->asked && !e->stream->queue.empty()) cudasim::step(e->stream);
    return cudasim::result(e->done >= e->asked ? cudaSuccess : cudaErrorNotReady);
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    CUDASIM_LIVE();
    if (e->captured) return cudasim::result(cudaErrorCapturedEvent);
    if (cudasim::breaks_capture()) return cudasim::result(cudaErrorStreamCaptureUnsupported);
    if (e->done < e->asked) cudasim::count.waits++;
    while (e->done < e->asked && !e->stream->queue.empty()) cudasim::step(e->stream);
    return cudasim::result(cudaSuccess);
}
/* The simulation's own time: no GPU's. */
inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    CUDASIM_LIVE();
    if (!from->asked || !to->asked) return cudasim::result(cudaErrorInvalidResourceHandle);
    if (from->done < from->asked || to->done < to->asked)
        return cudasim::result(cudaErrorNotReady);
    *ms = std::chrono::duration<float, std::milli>(to->when - from->when).count() +
          (float)(to->counted - from->counted);
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned) {
    CUstream_st *s = cudasim::stream_of(stream);
    CUDASIM_LIVE();
    if (!s) return cudasim::result(cudaErrorInvalidResourceHandle);
    long mark = e->asked;
    return cudasim::enqueue(s, [=] { if (e->done < mark && e->stream) cudasim::drain(e->stream); });
}

inline int cudasim_beside(const void *kernel) {
    return cudasim::static_shared +
           (cudasim::static_shared_of ? (int)cudasim::static_shared_of(kernel) : 0);
}
inline cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute a, int value) {
    CUDASIM_LIVE();
    if (a != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || value > cudasim::max_shared - cudasim_beside(kernel))
        return cudasim::result(cudaErrorInvalidValue);
    cudasim::machine().shared_limit[{ cudasim::machine().device, kernel }] = value;
    return cudaSuccess;
}

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *kernel) {
    CUDASIM_LIVE();
    cudasim::need_context();
    cudasim::machine().loaded.insert({ cudasim::machine().device, kernel });
    std::memset((void *)a, 0, sizeof *a);
    a->maxThreadsPerBlock = cudasim::most_threads_of ? cudasim::most_threads_of(kernel) : 1024;
    a->sharedSizeBytes = (size_t)cudasim_beside(kernel);
    return cudaSuccess;
}

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    CUDASIM_LIVE();
    CUstream_st *s = cudasim::stream_of(stream);
    if (!s) return cudasim::result(cudaErrorInvalidResourceHandle);
    if (cudasim::is_legacy(s)) return cudasim::result(cudaErrorStreamCaptureUnsupported);
    if (s->graph) return cudasim::result(cudaErrorIllegalState);
    s->graph = new CUgraph_st;
    s->broken = false;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    CUDASIM_LIVE();
    CUstream_st *s = cudasim::stream_of(stream);
    *graph = nullptr;
    if (!s || !s->graph) return cudasim::result(cudaErrorIllegalState);
    if (s->broken) {
        delete s->graph;
        s->graph = nullptr;
        s->broken = false;
        return cudasim::result(cudaErrorStreamCaptureInvalidated);
    }
    *graph = s->graph;
    s->graph = nullptr;
    cudasim::machine().graphs.insert(*graph);
    return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    CUstream_st *s = cudasim::stream_of(stream);
    CUDASIM_LIVE();
    if (!s) return cudasim::result(cudaErrorInvalidResourceHandle);
    if (cudasim::is_legacy(s) && cudasim::capturing(true))
        return cudasim::result(cudaErrorStreamCaptureImplicit);
    *status = s->broken ? cudaStreamCaptureStatusInvalidated
            : s->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                        unsigned long long) {
    CUDASIM_LIVE();
    *exec = nullptr;
    if (cudasim::refused()) return cudasim::result(cudaErrorMemoryAllocation);
    *exec = new CUgraphExec_st{ graph->work };
    cudasim::machine().execs.insert(*exec);
    return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    CUstream_st *s = cudasim::stream_of(stream);
    CUDASIM_LIVE();
    if (!s || !cudasim::machine().execs.count(exec))
        return cudasim::result(cudaErrorInvalidResourceHandle);
    cudasim::count.replays++;
    for (auto &work : exec->work) {
        cudaError_t e = cudasim::enqueue(s, work);
        if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    if (!cudasim::machine().graphs.erase(graph)) return cudasim::result(cudaErrorInvalidValue);
    delete graph;
    return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    if (!cudasim::machine().execs.erase(exec)) return cudasim::result(cudaErrorInvalidValue);
    delete exec;
    return cudaSuccess;
}

}   /* extern "C" */

/* ==== cuBLASLt =========================================================================== */

namespace cudasim {

struct Attributes { std::map<int, std::string> set; };
struct Desc : Attributes { cublasComputeType_t compute; cudaDataType_t scale; };
struct Layout : Attributes { cudaDataType_t type; uint64_t rows, cols; int64_t ld; };

template <class T> T attribute(const Attributes &a, int key, T otherwise) {
    auto it = a.set.find(key);
    T value = otherwise;
    if (it != a.set.end() && it->second.size() == sizeof(T))
        std::memcpy((void *)&value, it->second.data(), sizeof(T));
    return value;
}

inline size_t type_bytes(cudaDataType_t t)
{ return t == CUDA_R_32F ? 4 : t == CUDA_R_16F || t == CUDA_R_16BF ? 2 : 0; }

/* Of a narrow type's code; 0: an ordinary type. CUDA's headers before 12.8 do not name e2m1. */
inline bool is_e2m1(cudaDataType_t t) { return (int)t == 33; }
inline int code_bits(cudaDataType_t t)
{ return t == CUDA_R_8F_E4M3 || t == CUDA_R_8F_E5M2 ? 8 : is_e2m1(t) ? 4 : 0; }

/* How the scales of A or B lie: cublasLtMatmulMatrixScale_t, of which headers name all from 12.9. */
enum Scaling { one_scale = 0, by_16 = 1, by_32 = 2, by_128 = 4, by_128x128 = 5 };
const int a_scale_mode = 31, b_scale_mode = 32;     /* attributes of a matmul's descriptor   */
#if CUDART_VERSION >= 12090
static_assert((int)one_scale == (int)CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F &&
              (int)by_16 == (int)CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 &&
              (int)by_32 == (int)CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 &&
              (int)by_128 == (int)CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F &&
              (int)by_128x128 == (int)CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, "of scales");
static_assert(a_scale_mode == (int)CUBLASLT_MATMUL_DESC_A_SCALE_MODE &&
              b_scale_mode == (int)CUBLASLT_MATMUL_DESC_B_SCALE_MODE &&
              (int)CUDA_R_4F_E2M1 == 33, "of attributes and types");
#endif

inline double get(const void *p, cudaDataType_t t, int64_t i) {
    const char *at = (const char *)p + i * (int64_t)type_bytes(t);
    float f;
    uint16_t u;
    if (t == CUDA_R_32F) { std::memcpy(&f, at, 4); return f; }
    std::memcpy(&u, at, 2);
    return half_at(u, 0, t == CUDA_R_16BF);
}
inline void put(void *p, cudaDataType_t t, int64_t i, double x) {
    char *at = (char *)p + i * (int64_t)type_bytes(t);
    float f = (float)x;
    __half h = __float2half_rn(f);
    __nv_bfloat16 b = __float2bfloat16_rn(f);
    if (t == CUDA_R_32F) std::memcpy(at, &f, 4);
    else if (t == CUDA_R_16F) std::memcpy(at, (void *)&h, 2);
    else std::memcpy(at, (void *)&b, 2);
}

inline double rounded(cudaDataType_t t, double x) {
    float one;
    put(&one, t, 0, x);
    return get(&one, t, 0);
}

struct Product {        /* one matmul, its descriptors copied */
    Desc d;
    Layout A, B, C, D;
    const void *a, *b, *c;
    void *bias, *aux, *out;             /* bias: or sums. aux: what is before GELU       */
    int64_t aux_ld;
    cudaDataType_t bias_type;
    const float *alpha, *beta;          /* in device memory; NULL: here[0] and here[1]   */
    float here[2];
    bool ta, tb;
    int epilogue;
    uint64_t m, n, k;
};

inline int32_t batch_of(const Layout &l)
{ return attribute<int32_t>(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 1); }
inline int64_t stride_of(const Layout &l)
{ return attribute<int64_t>(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, 0); }

inline bool is_joined(int e) {
    return e == CUBLASLT_EPILOGUE_BGRADB || e == CUBLASLT_EPILOGUE_GELU_AUX ||
           e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || e == CUBLASLT_EPILOGUE_DGELU;
}
inline bool has_aux(int e) { return is_joined(e) && e != CUBLASLT_EPILOGUE_BGRADB; }
inline bool has_vector(int e) {
    return e == CUBLASLT_EPILOGUE_BIAS || e == CUBLASLT_EPILOGUE_BGRADB ||
           e == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

#include "cudasim_narrow.h"

/* What a call's descriptors say, copied; and is that a product that cuBLASLt's tables list? */
inline cublasStatus_t read_product(Product &p, cublasLtMatmulDesc_t desc,
                                   const cublasLtMatrixLayout_t (&of)[4]) {
    Layout *const to[4] = { &p.A, &p.B, &p.C, &p.D };
    p.d = *(Desc *)(void *)desc;
    for (int i = 0; i < 4; i++) *to[i] = *(Layout *)(void *)of[i];

    bool same = is_narrow(p) ? narrow_types(p)
                             : p.A.type == p.B.type && p.C.type == p.D.type && type_bytes(p.A.type) &&
                               (p.D.type == p.A.type || p.D.type == CUDA_R_32F);
    if (p.A.type == CUDA_R_16BF && capability() < 80) return CUBLAS_STATUS_NOT_SUPPORTED;
    bool compute = p.d.compute == CUBLAS_COMPUTE_32F ||
                   (p.d.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && p.A.type == CUDA_R_32F);
    p.ta = attribute(p.d, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N) != CUBLAS_OP_N;
    p.tb = attribute(p.d, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N) != CUBLAS_OP_N;
    p.epilogue = attribute<cublasLtEpilogue_t>(p.d, CUBLASLT_MATMUL_DESC_EPILOGUE,
                                               CUBLASLT_EPILOGUE_DEFAULT);
    p.m = p.D.rows;
    p.n = p.D.cols;
    p.k = p.ta ? p.A.rows : p.A.cols;
    if (!same || !compute || p.d.scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    if ((p.ta ? p.A.cols : p.A.rows) != p.m || (p.tb ? p.B.rows : p.B.cols) != p.n ||
        (p.tb ? p.B.cols : p.B.rows) != p.k || p.C.rows != p.m || p.C.cols != p.n)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (const Layout *l : { &p.A, &p.B, &p.C, &p.D }) {
        if (l->ld < (int64_t)l->rows || !l->rows || !l->cols) return CUBLAS_STATUS_INVALID_VALUE;
        if (batch_of(*l) != batch_of(p.D)) return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (p.epilogue != CUBLASLT_EPILOGUE_DEFAULT && p.epilogue != CUBLASLT_EPILOGUE_BIAS &&
        (!epilogues || !is_joined(p.epilogue) || batch_of(p.D) != 1))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (p.epilogue == CUBLASLT_EPILOGUE_BGRADB && !sums_in_f32 && p.D.type != p.A.type)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    p.bias_type = attribute<cudaDataType_t>(p.d, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, p.D.type);
    if (has_vector(p.epilogue) && p.bias_type != (is_narrow(p) ? narrow_bias(p) : p.D.type))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    p.bias = attribute<void *>(p.d, CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr);
    p.aux = attribute<void *>(p.d, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, nullptr);
    p.aux_ld = attribute<int64_t>(p.d, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 0);
    if (has_vector(p.epilogue) && !p.bias) return CUBLAS_STATUS_INVALID_VALUE;
    if (has_aux(p.epilogue) && (!p.aux || p.aux_ld % 8 || p.aux_ld < (int64_t)p.D.rows))
        return CUBLAS_STATUS_INVALID_VALUE;
    return is_narrow(p) ? check_narrow(p)
         : has_scales(p.d) ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
}

/* tanh; when it is rough, off by up to 2^-11 of its value, as PTX has it for tanh.approx.f32. */
inline double tanh_of(double x) {
    uint64_t bits;
    double t = std::tanh(x);
    if (gelu_kind != rough_tanh) return t;
    std::memcpy(&bits, &x, sizeof bits);
    bits = (bits ^ bits >> 33) * 0xFF51AFD7ED558CCDu;
    return t * (1.0 + ((double)(bits >> 40) / 8388608.0 - 1.0) / 2048.0);
}

/* GELU by tanh and its slope, as cuBLASLt's, in double. */
inline double gelu(double x) {
    if (gelu_kind == by_erf) return 0.5 * x * (1.0 + std::erf(x * 0.7071067811865476));
    return 0.5 * x * (1.0 + tanh_of(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}
inline double gelu_slope(double x) {
    double t = tanh_of(0.7978845608028654 * (x + 0.044715 * x * x * x));
    if (gelu_kind == by_erf)
        return 0.5 * (1.0 + std::erf(x * 0.7071067811865476)) +
               x * 0.3989422804014327 * std::exp(-0.5 * x * x);
    return 0.5 * (1.0 + t) +
           0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x);
}

/* What an epilogue does to element (i, j), which is x so far. */
inline double finished(const Product &p, uint64_t i, uint64_t j, double x) {
    int64_t at = (int64_t)i + (int64_t)j * p.aux_ld;
    if (p.epilogue == CUBLASLT_EPILOGUE_BIAS || p.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
        x += get(p.bias, p.bias_type, (int64_t)i);
    if (p.epilogue == CUBLASLT_EPILOGUE_DGELU) return x * gelu_slope(get(p.aux, p.D.type, at));
    if (!has_aux(p.epilogue)) return x;
    put(p.aux, p.D.type, at, x);
    return gelu(x);
}

/* Sums over k of the columns of op(B): they overwrite. */
inline void column_sums(const Product &p) {
    for (uint64_t j = 0; j < p.n; j++) {
        double sum = 0.0;
        for (uint64_t l = 0; l < p.k; l++)
            sum += get(p.b, p.B.type, (int64_t)(p.tb ? j + l * (uint64_t)p.B.ld
                                                     : l + j * (uint64_t)p.B.ld));
        put(p.bias, p.D.type, (int64_t)j, sum);
    }
}

/* Element (i, j) of product z becomes what its sum over k makes of it. */
inline void put_sum(const Product &p, int64_t z, uint64_t i, uint64_t j, double sum) {
    float alpha = p.alpha ? *p.alpha : p.here[0], beta = p.beta ? *p.beta : p.here[1];
    int64_t o = (int64_t)(i + j * (uint64_t)p.D.ld) + z * stride_of(p.D);
    int64_t c = (int64_t)(i + j * (uint64_t)p.C.ld) + z * stride_of(p.C);
    sum *= (double)alpha;
    if (beta != 0.0f) {
        if (rounds_first) sum = rounded(p.D.type, sum);
        sum += get(p.c, p.C.type, c) * (double)beta;
        if (rounds_first) sum = rounded(p.D.type, sum);
    }
    put(p.out, p.D.type, o, finished(p, i, j, sum));
}

/* The sum over k of codes times codes, each block's times its two scales. */
inline void multiply_narrow(const Product &p) {
    const Operand A = operand(p, false), B = operand(p, true);
    const std::vector<double> a = scale_values(A), b = scale_values(B);
    const std::vector<double> x = code_values(A), y = code_values(B);
    const uint64_t width = block_width(A), blocks = blocks_of(A);
    for (uint64_t j = 0; j < p.n; j++)
        for (uint64_t i = 0; i < p.m; i++) {
            double sum = 0.0;
            for (uint64_t block = 0; block < blocks; block++) {
                double part = 0.0, scale = a[i * blocks + block] * b[j * blocks + block];
                for (uint64_t l = block * width; l < p.k && l < (block + 1) * width; l++) {
                    double term = x[i * p.k + l] * y[j * p.k + l];
                    part = cut_sums ? (double)cut_sum((float)part, &term, 1) : part + term;
                }
                sum += part * scale;
            }
            put_sum(p, 0, i, j, sum);
        }
}

inline void multiply(const Product &p) {
    if (is_narrow(p)) return multiply_narrow(p);
    for (int64_t z = 0; z < batch_of(p.D); z++)
        for (uint64_t j = 0; j < p.n; j++)
            for (uint64_t i = 0; i < p.m; i++) {
                double sum = 0.0;
                for (uint64_t l = 0; l < p.k; l++) {
                    uint64_t at = p.ta ? l + i * (uint64_t)p.A.ld : i + l * (uint64_t)p.A.ld;
                    uint64_t bt = p.tb ? j + l * (uint64_t)p.B.ld : l + j * (uint64_t)p.B.ld;
                    double term = get(p.a, p.A.type, z * stride_of(p.A) + (int64_t)at) *
                                  get(p.b, p.B.type, z * stride_of(p.B) + (int64_t)bt);
                    sum = !cut_sums                 ? sum + term
                          : p.A.type == CUDA_R_32F ? (double)(float)(sum + term)
                                                   : (double)cut_sum((float)sum, &term, 1);
                }
                put_sum(p, z, i, j, sum);
            }
    if (p.epilogue == CUBLASLT_EPILOGUE_BGRADB) column_sums(p);
}

/* Takes alpha and beta, which are host memory and are read now, or device memory and are read when
 * the product runs. */
inline bool take_factors(Product &p, const void *alpha, const void *beta) {
    int mode = attribute<int32_t>(p.d, CUBLASLT_MATMUL_DESC_POINTER_MODE,
                                  CUBLASLT_POINTER_MODE_HOST);
    if (mode == CUBLASLT_POINTER_MODE_HOST) {
        std::memcpy(&p.here[0], alpha, 4);
        std::memcpy(&p.here[1], beta, 4);
        return !on_device(alpha, 4) && !on_device(beta, 4);
    }
    p.alpha = (const float *)alpha;
    p.beta = (const float *)beta;
    return mode == CUBLASLT_POINTER_MODE_DEVICE && on_device(alpha, 4) && on_device(beta, 4);
}

/* Of the three algorithms: what each needs of the workspace. */
const size_t needs[] = { 4u << 20, 64u << 10, 0 };
inline bool is_known(const cublasLtMatmulAlgo_t *algo)
{ return algo && algo->data[0] >= 0x51 && algo->data[0] <= 0x53; }

inline bool is_aligned(const void *p, uint64_t to) { return (uintptr_t)p % to == 0; }

/* To how many bytes, at most 256. */
inline uint64_t alignment_of(const void *p) {
    uint64_t to = 256;
    while (!is_aligned(p, to)) to /= 2;
    return to;
}

/* What each attribute's value must take; 0: one that is not simulated. */
inline size_t attribute_bytes(const Desc *, int key) {
    return key == CUBLASLT_MATMUL_DESC_BIAS_POINTER ||
           key == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER ||
           key == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD ||
           key == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER ||
           key == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER ? 8
         : key == CUBLASLT_MATMUL_DESC_TRANSA || key == CUBLASLT_MATMUL_DESC_TRANSB ||
           key == CUBLASLT_MATMUL_DESC_EPILOGUE || key == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE ||
           key == CUBLASLT_MATMUL_DESC_POINTER_MODE ||
           ((key == a_scale_mode || key == b_scale_mode) && library_version >= 120800)
         ? 4 : key == CUBLASLT_MATMUL_DESC_FAST_ACCUM ? 1 : 0;
}
inline size_t attribute_bytes(const Layout *, int key) {
    return key == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET ? 8
         : key == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT ? 4 : 0;
}
inline size_t attribute_bytes(const Attributes *, int key) {
    return key == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8
         : key == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK ||
           key == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES ||
           key == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES ||
           key == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES ||
           key == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES ? 4 : 0;
}

}   /* namespace cudasim */

extern "C" {

inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) {
    *h = nullptr;
    if (cudasim::breaks_capture() || cudasim::refused()) return CUBLAS_STATUS_ALLOC_FAILED;
    *h = (cublasLtHandle_t)new int(cudasim::machine().device);
    cudasim::machine().handles++;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) {
    delete (int *)h;
    cudasim::machine().handles--;
    return CUBLAS_STATUS_SUCCESS;
}
inline size_t cublasLtGetVersion(void) { return cudasim::library_version; }
inline const char *cublasLtGetStatusString(cublasStatus_t s) {
    return s == CUBLAS_STATUS_SUCCESS ? "success"
         : s == CUBLAS_STATUS_INTERNAL_ERROR ? "CUBLAS_STATUS_INTERNAL_ERROR" : "cuBLASLt error";
}

#define CUDASIM_OBJECT(Name, Key, Type)                                                   \
    inline cublasStatus_t cublasLt##Name##Destroy(cublasLt##Name##_t p) {                 \
        delete (cudasim::Type *)(void *)p;                                                \
        cudasim::machine().handles--;                                                     \
        return CUBLAS_STATUS_SUCCESS;                                                     \
    }                                                                                     \
    inline cublasStatus_t cublasLt##Name##SetAttribute(cublasLt##Name##_t p, Key key,     \
                                                       const void *value, size_t bytes) { \
        cudasim::Type *object = (cudasim::Type *)(void *)p;                               \
        if (!value || bytes != cudasim::attribute_bytes(object, (int)key))                \
            return CUBLAS_STATUS_INVALID_VALUE;                                           \
        object->set[(int)key].assign((const char *)value, bytes);                         \
        return CUBLAS_STATUS_SUCCESS;                                                     \
    }
CUDASIM_OBJECT(MatmulDesc, cublasLtMatmulDescAttributes_t, Desc)
CUDASIM_OBJECT(MatrixLayout, cublasLtMatrixLayoutAttribute_t, Layout)
CUDASIM_OBJECT(MatmulPreference, cublasLtMatmulPreferenceAttributes_t, Attributes)
#undef CUDASIM_OBJECT

inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *p, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
    *p = nullptr;
    if (cudasim::refused()) return CUBLAS_STATUS_ALLOC_FAILED;
    cudasim::Desc *d = new cudasim::Desc;
    d->compute = compute;
    d->scale = scale;
    cudasim::machine().handles++;
    *p = (cublasLtMatmulDesc_t)(void *)d;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *p, cudaDataType type,
                                                 uint64_t rows, uint64_t cols, int64_t ld) {
    *p = nullptr;
    if (cudasim::refused()) return CUBLAS_STATUS_ALLOC_FAILED;
    cudasim::Layout *l = new cudasim::Layout;
    l->type = type; l->rows = rows; l->cols = cols; l->ld = ld;
    cudasim::machine().handles++;
    *p = (cublasLtMatrixLayout_t)(void *)l;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
    *p = nullptr;
    if (cudasim::refused()) return CUBLAS_STATUS_ALLOC_FAILED;
    cudasim::machine().handles++;
    *p = (cublasLtMatmulPreference_t)(void *)new cudasim::Attributes;
    return CUBLAS_STATUS_SUCCESS;
}

/* Three algorithms, of 4 MiB, 64 KiB and no workspace, as far as the preference allows. Each
 * remembers the alignments that it was chosen for, the bias's included, and the types and modes of
 * narrow operands. While a stream is captured there is none, as in cuBLASLt 13.3. */
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
        cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
        cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int asked,
        cublasLtMatmulHeuristicResult_t *results, int *found) {
    static const int keys[] = { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES };
    const cudasim::Attributes &prefers = *(cudasim::Attributes *)(void *)preference;
    cudasim::Product p{};
    *found = 0;
    cublasStatus_t status = cudasim::read_product(p, desc, { a, b, c, d });
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (cudasim::capturing()) return CUBLAS_STATUS_INTERNAL_ERROR;
    if (cudasim::heuristic_says != CUBLAS_STATUS_SUCCESS) return cudasim::heuristic_says;
    cudasim::count.heuristics++;
    cudasim::reductions = cudasim::attribute<uint32_t>(
        prefers, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_MASK);
    if (cudasim::is_narrow(p) && !cudasim::narrow_products) return CUBLAS_STATUS_NOT_SUPPORTED;
    uint64_t room = cudasim::attribute<uint64_t>(prefers,
        CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, 0), packed = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t to = cudasim::attribute<uint32_t>(prefers, keys[i], 256);
        if (to < (cudasim::unaligned_algorithms && !cudasim::is_narrow(p) ? 1 : 16))
            return CUBLAS_STATUS_NOT_SUPPORTED;
        packed |= (uint64_t)(to > 256 ? 256 : to) << 16 * i;
    }
    for (int n = 0; n < 3 && *found < asked; n++) {
        int i = (n + cudasim::first_algorithm) % 3;
        if (cudasim::needs[i] > room) continue;
        cublasLtMatmulHeuristicResult_t &r = results[(*found)++];
        std::memset((void *)&r, 0, sizeof r);
        r.algo.data[0] = 0x51u + (unsigned)i;
        r.algo.data[1] = packed;
        r.algo.data[2] = p.bias ? cudasim::alignment_of(p.bias) : 1;
        r.algo.data[3] = p.aux ? cudasim::alignment_of(p.aux) : 1;
        r.algo.data[4] = cudasim::narrow_kind(p);
        r.workspaceSize = cudasim::needs[i];
        r.state = CUBLAS_STATUS_SUCCESS;
        r.wavesCount = 1.0f;
    }
    return *found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* Of an algorithm that was kept as bytes: is it one of those above, for such a product? */
inline cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
        cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
        cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo,
        cublasLtMatmulHeuristicResult_t *result) {
    cudasim::Product p{};
    cublasStatus_t status = cudasim::read_product(p, desc, { a, b, c, d });
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    cudasim::count.checks++;
    if (cudasim::check_says != CUBLAS_STATUS_SUCCESS) return cudasim::check_says;
    if (cudasim::is_narrow(p) && !cudasim::narrow_products) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!cudasim::is_known(algo) || algo->data[4] != cudasim::narrow_kind(p))
        return CUBLAS_STATUS_INVALID_VALUE;
    for (int i = 0; i < 4; i++) {
        uint64_t to = algo->data[1] >> 16 * i & 0xFFFFu;
        if (!to || (to & (to - 1))) return CUBLAS_STATUS_INVALID_VALUE;
    }
    std::memset((void *)result, 0, sizeof *result);
    result->algo = *algo;
    result->workspaceSize = cudasim::needs[algo->data[0] - 0x51] + cudasim::check_wants;
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t lt, cublasLtMatmulDesc_t desc,
        const void *alpha, const void *A, cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b,
        const void *beta, const void *C, cublasLtMatrixLayout_t c, void *D,
        cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo, void *workspace, size_t room,
        cudaStream_t stream) {
    cudasim::Product p{};
    cublasStatus_t status = cudasim::read_product(p, desc, { a, b, c, d });
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (!cudasim::is_known(algo) || algo->data[4] != cudasim::narrow_kind(p))
        return CUBLAS_STATUS_INVALID_VALUE;
    size_t need = cudasim::needs[algo->data[0] - 0x51];
    p.a = A; p.b = B; p.c = C; p.out = D;
    if (!cudasim::take_factors(p, alpha, beta)) return CUBLAS_STATUS_INVALID_VALUE;
    if (lt && *(int *)lt != cudasim::machine().device)      /* it is made for one GPU         */
        return CUBLAS_STATUS_ARCH_MISMATCH;
    if (need > room || (need && (!cudasim::on_device(workspace, need) ||
                                 !cudasim::is_aligned(workspace, 256))))
        return CUBLAS_STATUS_INVALID_VALUE;
    const void *given[4] = { A, B, C, D };
    for (int i = 0; i < 4; i++) {
        uint64_t to = algo->data[1] >> 16 * i & 0xFFFFu;
        if (!given[i] || !cudasim::on_device(given[i], 1)) return CUBLAS_STATUS_INVALID_VALUE;
        if (!cudasim::is_aligned(given[i], to)) return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    uint64_t values = p.epilogue == CUBLASLT_EPILOGUE_BGRADB ? p.n : p.m;
    size_t size = cudasim::type_bytes(p.D.type);
    if (cudasim::is_narrow(p)) status = cudasim::check_narrow_memory(p);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (cudasim::has_vector(p.epilogue) &&
        (!p.bias || !cudasim::on_device(p.bias, values * cudasim::type_bytes(p.bias_type))))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (cudasim::has_vector(p.epilogue) && !cudasim::is_aligned(p.bias, algo->data[2]))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (cudasim::has_aux(p.epilogue) &&
        !cudasim::on_device(p.aux, (size_t)p.aux_ld * p.n * size))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (cudasim::has_aux(p.epilogue) && !cudasim::is_aligned(p.aux, algo->data[3]))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (cudasim::batch_of(p.D) > 65535) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (cudasim::refused_products > 0 && cudasim::refused_products--) {
        cudasim::result(cudaErrorInvalidValue);     /* a kernel of its own could not be launched */
        return cudasim::refused_with;
    }
    if (cudasim::is_narrow(p) && cudasim::refused_narrow > 0 && cudasim::refused_narrow--) {
        cudasim::result(cudaErrorInvalidValue);
        return cudasim::refused_with;
    }
    cudasim::count.products++;
    cudasim::count.narrow += cudasim::is_narrow(p);
    cudasim::count.joined += cudasim::is_joined(p.epilogue);
    cudasim::count.algorithm = (int)algo->data[0] - 0x51;
    double took = cudasim::algorithm_ms[cudasim::count.algorithm] +
                  (cudasim::is_joined(p.epilogue) ? cudasim::joined_ms : 0);
    cudaError_t e = cudasim::enqueue(cudasim::stream_of(stream), [=] {
        cudasim::counted_ms += took;
        if (need) std::memset(workspace, 0xFF, need < 4096 ? need : 4096);
        cudasim::multiply(p);
    });
    return e == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}   /* extern "C" */

/* ==== a GPU's own functions ============================================================== *
 *
 * They are right to a unit or two in the last place, and not the host's. With other_libm each result
 * is one unit off, up or down by its own bits; 0, 1 and what is not finite stay, as on a GPU.
 */
namespace cudasim {

inline float nudged(float y) {
    uint32_t bits;
    if (!other_libm || !std::isfinite(y) || y == 0.0f || y == 1.0f) return y;
    std::memcpy(&bits, &y, 4);
    bits += bits * 2654435761u >> 31 ? 1u : (uint32_t)-1;
    std::memcpy(&y, &bits, 4);
    return y;
}

}   /* namespace cudasim */

#define expf(x)      cudasim::nudged((expf)(x))
#define log2f(x)     cudasim::nudged((log2f)(x))
#define logf(x)      cudasim::nudged((logf)(x))
#define log1pf(x)    cudasim::nudged((log1pf)(x))
#define tanhf(x)     cudasim::nudged((tanhf)(x))
#define powf(x, p)   cudasim::nudged((powf)(x, p))
#define sinf(x)      cudasim::nudged((sinf)(x))
#define cosf(x)      cudasim::nudged((cosf)(x))
#define normcdff(x)  cudasim::nudged((normcdff)(x))
#define log10f(x)    cudasim::nudged((log10f)(x))
#define acosf(x)     cudasim::nudged((acosf)(x))
#define asinf(x)     cudasim::nudged((asinf)(x))
#define tanf(x)      cudasim::nudged((tanf)(x))
#define sinhf(x)     cudasim::nudged((sinhf)(x))
#define coshf(x)     cudasim::nudged((coshf)(x))
#define erfinvf(x)   cudasim::nudged((erfinvf)(x))

#endif  /* CUDASIM_H */
