/* runtime.cpp - stands in for libcudart and libcublasLt: nvcc's programs run without a GPU. Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A program that nvcc compiled with PTX alone and --no-compress (-gencode arch=compute_80,
 * code=compute_80) is linked with this object in place of the two libraries. Streams, captures, memory
 * and products are those of cudasim.h; a launch runs the kernel's PTX, which the program carries.
 *
 *     PTX_ROUGH=1         approximations and tensor sums are as inexact as the ISA allows
 *     PTX_SCHEDULE=NAME   forward (default), reversed or permuted order of blocks and warps
 *     PTX_MANAGED=0       no managed memory, as on some virtual GPUs
 *     PTX_REPORT=1        one line of counts at the end
 *     PTX_COVERAGE=FILE   adds which instructions were reached, for each kernel, to FILE
 *     PTX_SAVE=FOLDER     writes the PTX texts there
 *     PTX_FILE=FILE       takes this PTX for the module that has its first kernel
 *     PTX_GPU=70          the GPU is an older one than the PTX names: each newer opcode is refused;
 *                         or a newer one
 *
 * The program fails when there was a race or a read of shared memory that no thread has written.
 */
#include "ptx.h"
#include <chrono>
#include <csignal>
#include <deque>
#include <fstream>
#include <functional>
#include <sys/file.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cublasLt.h>
/* cudasim.h's functions are inline; here they are compiled, so that a program finds them. */
#define inline inline __attribute__((used))
#include "../support/cudasim.h"
#undef inline
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace {

/* ---- modules ---------------------------------------------------------------------------- */

struct Kernel { ptx::Module *module; std::string name; };

struct Program {
    std::vector<std::unique_ptr<ptx::Module>> modules;
    std::unordered_map<const void *, Kernel> kernels;
    ~Program();
};
Program &program() {
    static Program p;
    return p;
}

std::string file_text(const char *path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) ptx::stop(1, "cannot read %s", path);
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
}

/* What nvcc's fatbinary wraps: a head, then entries with a head each. Kind 1 is PTX. */
struct Wrapper { int magic, version; const char *data; void *file; };
struct Head { uint32_t magic; uint16_t version, head_bytes; uint64_t bytes; };
struct Entry { uint16_t kind, version; uint32_t head_bytes; uint64_t bytes; };
const uint16_t kind_ptx = 1;

template <class T> T read_at(const char *p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

std::string ptx_of(const void *fat) {
    const char *data = read_at<Wrapper>((const char *)fat).data;
    Head head = read_at<Head>(data);
    const char *end = data + head.head_bytes + head.bytes;
    for (const char *at = data + head.head_bytes; at < end;) {
        Entry entry = read_at<Entry>(at);
        const char *text = at + entry.head_bytes;
        at = text + entry.bytes;
        if (entry.kind != kind_ptx) continue;
        std::string ptx(text, strnlen(text, entry.bytes));
        if (ptx.find(".version") != std::string::npos) return ptx;
        ptx::stop(1, "the PTX in the program is compressed: compile with nvcc --no-compress");
    }
    ptx::stop(1, "the program carries no PTX: compile with -gencode arch=compute_80,code=compute_80");
}

std::string first_kernel(const std::string &text) {
    size_t at = text.find(".entry "), end = text.find('(', at);
    return at == std::string::npos ? "" : ptx::trimmed(text.substr(at + 7, end - at - 7));
}

/* PTX_FILE: is this the module that the file replaces? */
std::string replaced(const std::string &text) {
    const char *path = std::getenv("PTX_FILE");
    if (!path) return text;
    std::string other = file_text(path), kernel = first_kernel(other);
    bool same = kernel.empty() || text.find(".entry " + kernel + "(") != std::string::npos;
    return same ? other : text;
}

void save(const std::string &text) {
    static int n;
    const char *folder = std::getenv("PTX_SAVE");
    if (!folder) return;
    std::ofstream out(std::string(folder) + "/" + std::to_string(n++) + ".ptx");
    out << text;
}

/* The simulated GPU is the newest that the program was compiled for, or PTX_GPU if that is newer. */
void become_gpu(int target) {
    static int newest;
    const char *newer = std::getenv("PTX_GPU");
    if (newer) target = std::max(target, std::atoi(newer));
    if (target <= newest) return;
    newest = target;
    cudasim::capability_major = target / 10;
    cudasim::capability_minor = target % 10;
    cudasim::max_shared = 1024 * (target < 75 ? 96 : target < 80 ? 64 : target < 86 ? 163
                                  : target < 90 ? 99 : 227);
}

/* PTX_GPU: nvcc 13 makes no PTX for 7.0. That of 7.5 stands in for it where it uses no newer opcode. */
void become_older(ptx::Module &m) {
    const char *older = std::getenv("PTX_GPU");
    if (!older || std::atoi(older) >= m.target) return;
    m.target = std::atoi(older);
    m.text_name = "sm_" + std::to_string(m.target);
}

/* ---- what the interpreter asks ---------------------------------------------------------- */

bool find_range(uint64_t address, ptx::Range *range) {
    cudasim::Machine &m = cudasim::machine();
    auto region = m.memory.upper_bound((uintptr_t)address);
    if (region != m.memory.begin()) {
        --region;
        *range = { region->first, region->first + region->second.bytes, true };
        bool reachable = region->second.pinned || region->second.device == m.device;
        if (address < range->last) return reachable;
    }
    for (const std::unique_ptr<ptx::Module> &module : program().modules) {
        auto variable = module->ranges.upper_bound((uintptr_t)address);
        if (variable == module->ranges.begin()) continue;
        --variable;
        *range = { variable->first, variable->first + variable->second, false };
        if (address < range->last) return true;
    }
    return false;
}

void choose_memory() {
    const char *managed = std::getenv("PTX_MANAGED");
    cudasim::touches_managed = !managed || std::strcmp(managed, "0");
}

void choose_schedule() {
    const char *name = std::getenv("PTX_SCHEDULE");
    std::string s = name ? name : "forward";
    if (s == "forward") cudasim::schedule = cudasim::forward;
    else if (s == "reversed") cudasim::schedule = cudasim::reversed;
    else if (s == "permuted") cudasim::schedule = cudasim::permuted;
    else ptx::stop(2, "PTX_SCHEDULE=%s: forward, reversed and permuted are known", name);
}

/* ---- what is reported at the end -------------------------------------------------------- */

/* One line for each kernel: target, kernel, instructions, reached, and a bit for each in hex. */
struct Reached { size_t total = 0; std::string bits; };
typedef std::map<std::string, Reached> Coverage;

const char digits[] = "0123456789abcdef";

std::string reached_bits(const ptx::Function &f) {
    std::string bits((f.code.size() + 3) / 4, '0');
    for (size_t i = 0; i < f.code.size(); i++)
        if (f.code[i].count)
            bits[i / 4] = digits[(std::strchr(digits, bits[i / 4]) - digits) | 1 << i % 4];
    return bits;
}
void merge(Reached &into, size_t total, const std::string &bits) {
    if (into.total < total) into.total = total;
    if (into.bits.size() < bits.size()) into.bits.resize(bits.size(), '0');
    for (size_t i = 0; i < bits.size(); i++)
        into.bits[i] = digits[(std::strchr(digits, into.bits[i]) - digits) |
                              (std::strchr(digits, bits[i]) - digits)];
}
void read_coverage(Coverage &all, const char *path) {
    std::ifstream in(path);
    std::string target, kernel, bits;
    size_t total, reached;
    while (in >> target >> kernel >> total >> reached >> bits)
        merge(all[target + " " + kernel], total, bits);
}
/* A test's own kernels, a few in a module, are left out. */
void add_coverage(Coverage &all, const ptx::Module &m) {
    if (m.functions.size() < 20) return;
    for (const auto &entry : m.functions) {
        const ptx::Function &f = *entry.second;
        std::string bits = reached_bits(f);
        if (f.is_entry) merge(all[m.text_name + " " + f.name], f.code.size(),
                              bits.empty() ? "0" : bits);
    }
}
size_t count_bits(const std::string &bits) {
    size_t n = 0;
    for (char c : bits) n += (size_t)__builtin_popcount((unsigned)(std::strchr(digits, c) - digits));
    return n;
}
/* Programs may end at the same time. */
void write_coverage(const Program &p, const char *path) {
    std::string lock_path = std::string(path) + ".lock";
    FILE *lock = std::fopen(lock_path.c_str(), "w");
    Coverage all;
    if (!lock || flock(fileno(lock), LOCK_EX)) ptx::stop(1, "cannot lock %s", lock_path.c_str());
    read_coverage(all, path);
    for (const std::unique_ptr<ptx::Module> &m : p.modules) add_coverage(all, *m);
    std::ofstream out(path);
    for (const auto &entry : all)
        out << entry.first << ' ' << entry.second.total << ' ' << count_bits(entry.second.bits)
            << ' ' << entry.second.bits << '\n';
    out.close();
    std::fclose(lock);
}

Program::~Program() {
    const ptx::Counts &c = ptx::counts;
    const char *path = std::getenv("PTX_COVERAGE");
    bool bad = c.races || c.unwritten;
    if (path && c.launches) write_coverage(*this, path);
    if (bad || std::getenv("PTX_REPORT"))
        std::fprintf(stderr, "ptx: %ld launches, %.1f M warp instructions, %.1f M of lanes, "
                     "%ld races, %ld reads of unwritten shared memory\n", c.launches,
                     (double)c.warps / 1e6, (double)c.lanes / 1e6, c.races, c.unwritten);
    std::fflush(nullptr);
    if (bad) _exit(1);
}

/* ---- launches --------------------------------------------------------------------------- */

ptx::Function &kernel_of(const void *host) {
    auto found = program().kernels.find(host);
    if (found == program().kernels.end()) ptx::stop(1, "a kernel that was never registered");
    ptx::Function &f = *found->second.module->functions.at(found->second.name);
    ptx::decode(f);
    return f;
}
size_t static_bytes_of(const void *host) { return kernel_of(host).shared_bytes; }
int most_threads_of(const void *host) {
    int bound = kernel_of(host).most_threads;
    return bound ? bound : 1024;
}
std::vector<char> parameters_of(const ptx::Function &f, void **arguments) {
    std::vector<char> bytes(f.parameter_bytes);
    for (size_t k = 0; k < f.parameters.size(); k++)
        std::memcpy(bytes.data() + f.parameters[k].offset, arguments[k], f.parameters[k].bytes);
    return bytes;
}
ptx::Three three(dim3 d) { return { d.x, d.y, d.z }; }

cudaError_t launch(const void *host, const cudaLaunchConfig_t &how, void **arguments) {
    using namespace cudasim;
    CUDASIM_LIVE();
    size_t dynamic = how.dynamicSmemBytes, limit;
    CUstream_st *s = stream_of(how.stream);
    cudaError_t e = check_launch(host, how.gridDim, how.blockDim, dynamic, &limit);
    if (!s || s->device != machine().device) return result(cudaErrorInvalidResourceHandle);
    if (e != cudaSuccess) return result(e);
    ptx::Function &f = kernel_of(host);
    if (f.shared_bytes + dynamic > limit) return result(cudaErrorInvalidValue);
    ptx::Three grid = three(how.gridDim), size = three(how.blockDim);
    std::vector<char> parameters = parameters_of(f, arguments);
    need_context();
    machine().loaded.insert({ machine().device, host });
    count.launches++;
    return enqueue(s, [=, &f] {
        ptx::host.generation++;         /* memory may have come and gone since the last launch  */
        ptx::run_grid(f, grid, size, dynamic, parameters);
    });
}

/* <<<grid, block, bytes, stream>>> */
cudaLaunchConfig_t configured;

}   /* namespace */

extern "C" {

void **__cudaRegisterFatBinary(void *fat) {
    std::string text = ptx_of(fat);
    save(text);
    choose_schedule();
    choose_memory();
    ptx::host.find = find_range;
    ptx::host.order = cudasim::ordered;
    cudasim::static_shared_of = static_bytes_of;
    cudasim::most_threads_of = most_threads_of;
    program().modules.push_back(ptx::read_module(replaced(text)));
    become_older(*program().modules.back());
    become_gpu(program().modules.back()->target);
    return (void **)program().modules.back().get();
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
char __cudaInitModule(void **) { return 1; }

void __cudaRegisterFunction(void **handle, const char *host, char *, const char *name, int, uint3 *,
                            uint3 *, dim3 *, dim3 *, int *) {
    ptx::Module *m = (ptx::Module *)handle;
    if (!m->functions.count(name)) ptx::stop(1, "the PTX is truncated: it has no kernel %s", name);
    program().kernels[host] = Kernel{ m, name };
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, cudaStream_t stream) {
    configured = cudaLaunchConfig_t();
    configured.gridDim = grid;
    configured.blockDim = block;
    configured.dynamicSmemBytes = bytes;
    configured.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *bytes, void *stream) {
    *grid = configured.gridDim;
    *block = configured.blockDim;
    *bytes = configured.dynamicSmemBytes;
    *(cudaStream_t *)stream = configured.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    *kernel = (cudaKernel_t)(uintptr_t)host;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t bytes, cudaStream_t stream) {
    __cudaPushCallConfiguration(grid, block, bytes, stream);
    return launch((const void *)kernel, configured, arguments);
}
cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments,
                             size_t bytes, cudaStream_t stream) {
    __cudaPushCallConfiguration(grid, block, bytes, stream);
    return launch(host, configured, arguments);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *host, void **arguments)
{ return launch(host, *how, arguments); }

/* The host sees it, as it sees all memory here. */
cudaError_t cudaMallocManaged(void **p, size_t bytes, unsigned) {
    *p = nullptr;
    if (!cudasim::touches_managed) return cudasim::result(cudaErrorNotSupported);
    cudasim::need_context();
    *p = cudasim::allocate(bytes, false);
    return cudaSuccess;
}

}   /* extern "C" */
