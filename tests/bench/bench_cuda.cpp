/* bench_cuda.cpp - the CUDA companion on a GPU: every kernel of the table against a copy of as many
 * bytes, products and attention as TFLOP/s, and whole GPT-2 training steps.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     make bench-cuda                                   or build/bench_cuda [OPTION]...
 *
 *     --batch N       sequences of 1024 tokens, 64 when left out; 8 GB of memory want 4
 *     --rounds N      samples of each kernel, 21
 *     --only TEXT     lines whose name contains it
 *     --peak N        dense TFLOP/s of f16 and bf16 by the data sheet, where the GPU is not known
 *     --part PART     kernels (products too) or training; both when left out. first: what decides
 *                     most, in two minutes: steps in bf16 at level 2 without epilogues, with GELU's,
 *                     with both, and measured; the 15 products by the first algorithm and by the best one; attention;
 *                     the loss both ways
 *     --model MODEL   gpt2, or char: nanoGPT's character GPT for a GPU, 256 tokens a sequence
 *     --dtype DTYPE   of GPT-2's steps, of products and of attention: f32, f16 or bf16; each in turn when left out
 *     --epilogues N   of GPT-2's steps: 0 none, 1 bias gradients, 2 GELU, 3 both, in the products'
 *                     passes; each in turn when left out, so that the table says which pay
 *     --choices TEXT  reads the algorithms of their products from TEXT_DTYPE_LEVEL[_EPILOGUES].txt
 *                     where that is there, and writes them afterwards; --part first measures them
 *                     and writes TEXT_measured.txt
 *     --tiny          small shapes and one round: does everything run?
 *
 * Times are CUDA events'. A kernel and its copy take turns; the median is shown, [least most],
 * and how much of the copy's speed it reaches. Bytes are the floor: what has to be read and
 * written once, however the kernel does it; the copy reads half and writes half as many.
 * Beside each figure stand the time that the model of tests/support/ledger.h predicts for this GPU, and its
 * roofline. tests/bench/torch_cuda.py prints the same lines for PyTorch.
 */
#include "mixprec.h"
#include "../support/args.h"
#include "../support/ledger.h"
#ifdef MIXPREC_CUDASIM
#include "cudasim.h"
#else
#include <cuda_runtime.h>
#include <dlfcn.h>
#endif
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

extern "C" const mixp_device *mixp_cuda(int ordinal, const char **why);

typedef std::function<mixp_result()> Work;

static const mixp_device  *gpu;
static const mixp_kernels *table;
static mixp_exec           x;               /* of single kernels                             */
static mixp_exec           measuring;       /* the same, with algorithms chosen by measuring */
static bool                modelled;        /* the ledger knows this GPU                     */
static cudaStream_t        stream;
static std::string         only, part, model = "gpt2", choices, one_dtype;
static int                  epilogues = -1, failures;   /* -1: each in turn                  */
static double              peak;            /* TFLOP/s; 0: not known                         */
static int                 rounds = 21, tiny, lines;
static int64_t             batch = 64, length = 1024, width = 768, heads = 12, vocab = 50304;
static int                 layers = 12;

[[noreturn]] static void die(const char *what, const char *why) {
    fprintf(stderr, "bench_cuda: %s: %s\n", what, why);
    exit(1);
}
static void cuda(cudaError_t e, const char *what) {
    if (e != cudaSuccess) die(what, cudaGetErrorString(e));
}
static void good(mixp_result r, const char *what) {
    if (r == MIXP_OK) return;
    die(what, gpu->message(&x)[0] ? gpu->message(&x) : "failed");
}

/* --- launches ----------------------------------------------------------------------------
 *
 * Those of mixprec_cuda.cu pass by here: this program's function is found before the library's.
 * cuBLASLt's own are none of them.
 */
#ifdef MIXPREC_CUDASIM
static long launches() { return cudasim::count.launches; }
#else
static long launched;
static long launches() { return launched; }
extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel,
                                           void **arguments) {
    typedef cudaError_t (*Launch)(const cudaLaunchConfig_t *, const void *, void **);
    static const Launch launch = (Launch)dlsym(RTLD_NEXT, "cudaLaunchKernelExC");
    if (!launch) die("cudaLaunchKernelExC", "it is not in the CUDA library");
    launched++;
    return launch(how, kernel, arguments);
}
#endif

/* --- memory ------------------------------------------------------------------------------ */

static std::vector<void *> taken;

static void *take(size_t bytes) {
    void *p = gpu->allocate(&x, bytes);
    if (!p) die("out of memory", "use a smaller --batch");
    taken.push_back(p);
    return p;
}
/* Gives back what was taken since `mark` were. */
static void give_back(size_t mark) {
    good(gpu->wait(&x), "wait");
    for (; taken.size() > mark; taken.pop_back()) gpu->release(&x, taken.back());
}

static void *scratch(void *, size_t bytes) {
    static void  *memory;
    static size_t room;
    if (bytes > room) {
        if (memory) gpu->release(&x, memory);
        memory = gpu->allocate(&x, room = bytes);
    }
    return memory;
}

/* n numbers about 1 in size: zeros would let a GPU clock higher. The first are made on the host,
 * the rest are their copies. */
static test_array numbers(mixp_dtype dtype, int64_t n) {
    test_array a = { take((size_t)n * mixp_dtype_size(dtype)), dtype };
    size_t size = mixp_dtype_size(dtype), all = (size_t)n * size, done;
    int64_t first = n < 1 << 20 ? n : 1 << 20;
    std::vector<char> host((size_t)first * size);
    for (int64_t i = 0; i < first; i++) {
        uint64_t u = mixp_random_u32(1, 2, 3, (uint64_t)i);
        uint64_t code = mixp_encode(dtype, ((double)u / 4294967296.0 - 0.5) * 3.0, 0);
        memcpy(&host[(size_t)i * size], &code, size);
    }
    good(gpu->upload(&x, a.data, host.data(), host.size()), "upload");
    for (done = host.size(); done < all; done *= 2)
        cuda(cudaMemcpyAsync((char *)a.data + done, a.data, std::min(done, all - done),
                             cudaMemcpyDeviceToDevice, stream), "copy");
    return a;
}
static int32_t *indexes(int64_t n, int64_t limit) {
    std::vector<int32_t> host((size_t)n);
    void *p = take((size_t)n * 4);
    for (int64_t i = 0; i < n; i++)
        host[(size_t)i] = (int32_t)(mixp_random_u32(4, 5, 6, (uint64_t)i) % (uint64_t)limit);
    good(gpu->upload(&x, p, host.data(), host.size() * 4), "upload");
    return (int32_t *)p;
}
static float *floats(int64_t n) { return (float *)numbers(MIXP_F32, n).data; }

/* --- time -------------------------------------------------------------------------------- */

struct Times { double least, median, most; };

static Times times_of(std::vector<double> ms) {
    std::sort(ms.begin(), ms.end());
    return Times{ ms.front(), ms[ms.size() / 2], ms.back() };
}

/* Milliseconds of a call, over `calls` of them on stream `on`. */
static double sample(const Work &f, int calls, cudaStream_t on) {
    static cudaEvent_t from, to;
    float ms = 0.0f;
    if (!from) cuda(cudaEventCreateWithFlags(&from, cudaEventDefault), "event");
    if (!to) cuda(cudaEventCreateWithFlags(&to, cudaEventDefault), "event");
    cuda(cudaEventRecord(from, on), "event");
    for (int i = 0; i < calls; i++) good(f(), "kernel");
    cuda(cudaEventRecord(to, on), "event");
    cuda(cudaEventSynchronize(to), "kernel");
    cuda(cudaEventElapsedTime(&ms, from, to), "event");
    return (double)ms / calls;
}

/* So many calls that a sample takes some milliseconds. Runs them for 200 ms first: a step runs on a hot GPU, whose clock
 * is lower than that of a cool one. */
static int calls_for(const Work &f) {
    if (tiny) return 1;
    sample(f, 2, stream);
    const double once = sample(f, 1, stream);
    const int    calls = once > 5.0 ? 1 : once < 0.02 ? 250 : (int)(5.0 / once);
    for (double ms = 0.0; ms < 200.0;) ms += calls * sample(f, calls, stream);
    return calls;
}

static bool wanted(const std::string &name) {
    bool yes = name.find(only) != std::string::npos;
    lines += yes;
    return yes;
}

static bool wanted_dtype(mixp_dtype dtype) {
    return one_dtype.empty() || one_dtype == mixp_dtype_name(dtype);
}

/* --- what the ledger says ------------------------------------------------------------------ */

static std::vector<mixp_param_row> optimizer_rows;

/* The same calls on the ledger's device, which only counts. */
static ledger_line predicted(const Work &f) {
    const mixp_kernels *real = table;
    ledger_clear();
    if (!optimizer_rows.empty())
        ledger_upload(NULL, NULL, optimizer_rows.data(),
                      optimizer_rows.size() * sizeof optimizer_rows[0]);
    ledger.on = 1;
    table = ledger_device()->kernels;
    f();
    table = real;
    return ledger.sum;
}
static void print_model(const ledger_line &p)
{ if (modelled) printf("; model %.4f ms, roofline %.4f", 1e3 * p.seconds, 1e3 * p.roof); }

/* A line that says how a kernel stands to the copy of as many bytes. */
static void by_bytes(const std::string &name, const char *shape, double bytes, const Work &f) {
    size_t mark = taken.size(), half = ((size_t)bytes / 2 + 15) / 16 * 16;
    std::vector<double> ours, copies;
    if (!wanted(name)) return;
    void *from = take(half), *to = take(half);
    Work copy = [=] {
        return cudaMemcpyAsync(to, from, half, cudaMemcpyDeviceToDevice, stream) == cudaSuccess
             ? MIXP_OK : MIXP_ERR_DEVICE;
    };
    int calls = calls_for(f), copy_calls = calls_for(copy);
    for (int i = 0; i < rounds; i++) {
        ours.push_back(sample(f, calls, stream));
        copies.push_back(sample(copy, copy_calls, stream));
    }
    Times a = times_of(ours), b = times_of(copies);
    printf("%-30s %-22s %8.1f MB %9.4f ms [%.4f %.4f] %7.0f GB/s, the copy %7.0f: %.2f of it",
           name.c_str(), shape, bytes / 1e6, a.median, a.least, a.most, bytes / a.median / 1e6,
           bytes / b.median / 1e6, b.median / a.median);
    print_model(predicted(f));
    printf("\n");
    give_back(mark);
}

static void print_rate(double flops, const Times &t) {
    double rate = flops / t.median / 1e9;
    printf("%9.4f ms [%.4f %.4f] %7.1f TFLOP/s", t.median, t.least, t.most, rate);
    if (peak > 0.0) printf(", %.1f%% of the peak", 100.0 * rate / peak);
}

static Times times_by_calls(const Work &f) {
    std::vector<double> ours;
    int calls = calls_for(f);
    for (int i = 0; i < rounds; i++) ours.push_back(sample(f, calls, stream));
    return times_of(ours);
}

/* A line in TFLOP/s. */
static void by_flops(const std::string &name, const char *shape, double flops, const Work &f) {
    if (!wanted(name)) return;
    printf("%-30s %-22s %8.2f GFLOP ", name.c_str(), shape, flops / 1e9);
    print_rate(flops, times_by_calls(f));
    print_model(predicted(f));
    printf("\n");
}

/* The same of a product: the first algorithm and the best of those that cuBLASLt offers alternate. */
static void by_algorithm(const std::string &name, const char *shape, double flops, const Work &f) {
    if (!wanted(name)) return;
    std::swap(x, measuring);
    good(f(), "measuring");
    std::swap(x, measuring);
    const int calls = calls_for(f);
    std::vector<double> by_first, by_best;
    for (int i = 0; i < rounds; i++) {
        by_first.push_back(sample(f, calls, stream));
        std::swap(x, measuring);
        by_best.push_back(sample(f, calls, stream));
        std::swap(x, measuring);
    }
    const Times best = times_of(by_best);
    printf("%-30s %-22s %8.2f GFLOP ", name.c_str(), shape, flops / 1e9);
    print_rate(flops, times_of(by_first));
    printf("; best offer %.4f ms, %.1f TFLOP/s", best.median, flops / best.median / 1e9);
    print_model(predicted(f));
    printf("\n");
}

/* A line for what only costs a launch. */
static void by_time(const std::string &name, const Work &f) {
    std::vector<double> ours;
    if (!wanted(name)) return;
    int calls = calls_for(f);
    for (int i = 0; i < rounds; i++) ours.push_back(sample(f, calls, stream));
    Times t = times_of(ours);
    printf("%-30s %22s %9.2f us [%.2f %.2f]", name.c_str(), "", 1e3 * t.median, 1e3 * t.least,
           1e3 * t.most);
    print_model(predicted(f));
    printf("\n");
}

static const char *shape_text(int64_t a, int64_t b, int64_t c = 0) {
    static char text[64];
    if (c) snprintf(text, sizeof text, "%lldx%lldx%lld", (long long)a, (long long)b, (long long)c);
    else snprintf(text, sizeof text, "%lldx%lld", (long long)a, (long long)b);
    return text;
}

/* --- elementwise ------------------------------------------------------------------------- */

static const test_array none = { NULL, MIXP_F32 };

/* where, max, gather and rope, and the watch's look. */
static void picks(int64_t rows) {
    int64_t n = rows * width;
    size_t mark = taken.size();
    test_array a = numbers(MIXP_BF16, n), b = numbers(MIXP_BF16, n), y = numbers(MIXP_BF16, n);
    test_array mask = numbers(MIXP_BF16, n), sums = numbers(MIXP_F32, n);
    test_array line = numbers(MIXP_F32, rows);
    int32_t *index = (int32_t *)take((size_t)n * sizeof *index);
    int32_t *ties = (int32_t *)take((size_t)rows * sizeof *ties);
    mixp_look *found = (mixp_look *)take(sizeof *found);
    double e = (double)n;
    std::string s = shape_text(rows, width);
    mixp_where_args where;
    mixp_max_args max;
    mixp_max_backward_args max_back;
    mixp_gather_args gather, gather_back;
    mixp_rope_args rope;
    mixp_compare_args compare;
    mixp_topk_args topk;
    mixp_random_args random;
    mixp_look_args look;
    memset((void *)&where, 0, sizeof where);
    where.rank = 1;
    where.shape[0] = n;
    where.mask_strides[0] = where.a_strides[0] = where.b_strides[0] = 1;
    where.mask = args_in(mask); where.a = args_in(a); where.b = args_in(b);
    where.y = args_out(y, 0);
    mixp_where_args where_back = where;
    where_back.dy = args_in(a); where_back.dx = args_out(y, 0);
    memset((void *)&max, 0, sizeof max);
    max.outer = rows; max.n = width; max.inner = 1;
    max.a = args_in(a); max.y = args_out(line, 0);
    max.index = index; max.ties = ties;
    memset((void *)&max_back, 0, sizeof max_back);
    max_back.outer = rows; max_back.n = width; max_back.inner = 1;
    max_back.a = args_in(a); max_back.dy = args_in(line);
    max_back.index = index; max_back.ties = ties; max_back.da = args_out(y, 0);
    memset((void *)&gather, 0, sizeof gather);
    gather.outer = 1; gather.n = gather.m = rows; gather.inner = width;
    gather.ids = index; gather.a = args_in(a); gather.y = args_out(y, 0);
    gather_back = gather;
    gather_back.y = args_out(sums, 1);
    memset((void *)&rope, 0, sizeof rope);
    rope.rows = 1; rope.t = rows; rope.heads = 1; rope.d = width; rope.base = 10000.0;
    rope.a = args_in(a); rope.y = args_out(y, 0);
    memset((void *)&compare, 0, sizeof compare);
    compare.how = MIXP_COMPARE_GT; compare.rank = 1; compare.shape[0] = n;
    compare.a = args_in(a); compare.b = args_in(b);
    compare.a_strides[0] = compare.b_strides[0] = 1;
    memset((void *)&topk, 0, sizeof topk);
    topk.rows = n / 64; topk.cols = 64; topk.k = 2;
    topk.a = args_in(a); topk.index = index;
    memset((void *)&random, 0, sizeof random);
    random.kind = MIXP_RANDOM_NORMAL; random.n = n; random.by = 1.0f; random.y = args_out(y, 0);
    memset((void *)&look, 0, sizeof look);
    look.n = n; look.x = args_in(sums); look.low = MIXP_F16; look.row = found;
    by_bytes("where bf16", s.c_str(), 8 * e, [=] { return table->where(&x, &where); });
    by_bytes("where backward bf16", s.c_str(), 6 * e,
             [=] { return table->where_backward(&x, &where_back); });
    by_bytes("max over rows bf16", s.c_str(), 2 * e, [=] { return table->max(&x, &max); });
    by_bytes("max backward bf16", s.c_str(), 2 * e,
             [=] { return table->max_backward(&x, &max_back); });
    by_bytes("look f32", s.c_str(), 4 * e, [=] { return table->look(&x, &look); });
    by_bytes("rope bf16", s.c_str(), 4 * e, [=] { return table->rope(&x, &rope); });
    compare.y = (uint8_t *)take((size_t)n);
    by_bytes("compare bf16", s.c_str(), 5 * e, [=] { return table->compare(&x, &compare); });
    by_bytes("topk 2 of 64 bf16", s.c_str(), 2 * e, [=] { return table->topk(&x, &topk); });
    mixp_topk_args sort = topk;
    sort.rows = 1; sort.cols = sort.k = n < 2048 ? n : 2048;
    if (n > 2048) sort.rows = n / 2048;
    by_bytes("sort of 2048 bf16", s.c_str(), 2 * e, [=] { return table->topk(&x, &sort); });
    mixp_topk_args long_sort = topk;
    long_sort.rows = n > 65536 ? n / 65536 : 1;
    long_sort.cols = long_sort.k = n < 65536 ? n : 65536;
    by_bytes("sort of 65536 bf16", s.c_str(), 2 * e, [=] { return table->topk(&x, &long_sort); });
    by_bytes("random normal bf16", s.c_str(), 2 * e, [=] { return table->random(&x, &random); });
    good(table->fill(&x, args_fill(test_array{ index, MIXP_I32 }, n, 0.0)), "fill");
    by_bytes("gather bf16", s.c_str(), 8 * e, [=] { return table->gather(&x, &gather); });
    by_bytes("gather backward f32", s.c_str(), 14 * e,
             [=] { return table->gather_backward(&x, &gather_back); });
    give_back(mark);
}

static void converts(int64_t rows) {
    int64_t n = rows * width;
    size_t mark = taken.size();
    test_array wide = numbers(MIXP_F32, n), low = numbers(MIXP_BF16, n);
    test_array half = numbers(MIXP_F16, n), f8 = numbers(MIXP_F8_E4M3, n);
    int64_t shape[2] = { width, rows }, to[2] = { rows, 1 }, from[2] = { 1, width };
    double e = (double)n;
    std::string s = shape_text(rows, width);
    by_bytes("convert f32 bf16", s.c_str(), 6 * e,
             [=] { return table->convert(&x, args_convert(low, wide, n, NULL)); });
    by_bytes("convert bf16 f32", s.c_str(), 6 * e,
             [=] { return table->convert(&x, args_convert(wide, low, n, NULL)); });
    by_bytes("convert f32 f16", s.c_str(), 6 * e,
             [=] { return table->convert(&x, args_convert(half, wide, n, NULL)); });
    by_bytes("convert f32 e4m3", s.c_str(), 5 * e,
             [=] { return table->convert(&x, args_convert(f8, wide, n, NULL)); });
    by_bytes("fill bf16", s.c_str(), 2 * e, [=] { return table->fill(&x,
            args_fill(low, n, 1.0)); });
    by_bytes("copy transposed bf16", s.c_str(), 4 * e,
             [=] { return table->copy(&x, args_copy(2, shape, half, to, low, from, 0)); });
    give_back(mark);
}

static void maps(int64_t rows) {
    int64_t n = rows * 4 * width;
    size_t mark = taken.size();
    test_array a = numbers(MIXP_BF16, n), b = numbers(MIXP_BF16, n), y = numbers(MIXP_BF16, n);
    const float *factor = floats(1);
    int64_t shape[2] = { rows, 4 * width }, dense[2] = { 4 * width, 1 }, row[2] = { 0, 1 };
    test_array bias = numbers(MIXP_F32, 4 * width);
    double e = (double)n;
    std::string s = shape_text(rows, 4 * width);
    auto line = [&](const char *name, double bytes, const Work &f)
    { by_bytes(name, s.c_str(), bytes, f); };
    line("gelu_tanh", 4 * e, [=] { return table->unary(&x,
            args_unary(MIXP_UNARY_GELU_TANH, n, y, a, 0)); });
    line("gelu_tanh backward", 6 * e, [=] {
        return table->unary_backward(&x,
                args_unary_backward(MIXP_UNARY_GELU_TANH, n, y, 0, b, a, none, 0)); });
    line("add", 6 * e, [=] {
        return table->binary(&x, args_binary(MIXP_BINARY_ADD, 2, shape, y, a, dense, b,
                dense)); });
    line("add backward, of a bias", 2 * e, [=] {
        return table->binary_backward(&x,
                args_binary_backward(MIXP_BINARY_ADD, 1, 2, shape, bias, 0, a, a, dense, bias,
                                      row)); });
    line("reduce", 2 * e, [=] { return table->reduce(&x,
            args_reduce(1, rows, shape[1], bias, 0, a, 1.0f)); });
    line("reduce backward", 2 * e, [=] {
        return table->reduce_backward(&x, args_reduce(1, rows, shape[1], y, 0, bias, 1.0f)); });
    line("dropout", 4 * e, [=] { return table->dropout(&x,
            args_dropout(n, y, 0, a, 0.1f, 1, 2, 3)); });
    line("scale_by", 4 * e, [=] { return table->scale_by(&x, args_scale_by(n, y, 0, a, factor)); });
    give_back(mark);
}

/* The quantisers of recipes: the blocks of each, along rows and down columns. */
static void quantisers(int64_t all_rows) {
    struct Form { const char *name; mixp_dtype element; mixp_block_scale scale; int64_t n, passes; };
    const Form forms[] = { { "fp8 current", MIXP_F8_E4M3, MIXP_SCALE_TENSOR, 0, 2 },
                           { "mxfp8", MIXP_F8_E4M3, MIXP_SCALE_E8M0, 32, 1 },
                           { "nvfp4", MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16, 2 } };
    int64_t rows = (all_rows + 31) / 32 * 32, n = rows * width;
    size_t mark = taken.size();
    test_array a = numbers(MIXP_BF16, n), turned = numbers(MIXP_BF16, n);
    mixp_bf16 *y = (mixp_bf16 *)take((size_t)n * sizeof *y);
    std::string s = shape_text(rows, width);
    mixp_hadamard_args h = { rows, width, args_in(a), (mixp_bf16 *)turned.data };
    mixp_quantise_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows; k.cols = width; k.x = args_in(a); k.y = y;
    for (const Form &f : forms)
        for (int down = 0; down < (f.n ? 2 : 1); down++) {
            k.element = f.element; k.scale = f.scale;
            k.block_rows = down ? f.n : f.n != 0; k.block_cols = down ? 1 : f.n;
            k.stochastic = f.element == MIXP_F4_E2M1;
            by_bytes(std::string("quantise ") + f.name + (down ? ", down" : ""), s.c_str(),
                     (double)(2 * f.passes + 2) * (double)n,
                     [=] { return table->quantise(&x, &k); });
        }
    mixp_recode_args c;
    memset((void *)&c, 0, sizeof c);
    c.rows = rows; c.cols = width; c.y = y;
    c.codes = (uint8_t *)take((size_t)n);
    for (const Form &f : forms)
        for (c.decodes = 0; c.decodes < 2; c.decodes++) {
            double bytes = f.element == MIXP_F4_E2M1 ? 0.5 : 1.0;
            c.element = f.element; c.scale = f.scale; c.block_rows = f.n;
            if (f.n) {
                k.element = f.element; k.scale = f.scale; k.block_rows = f.n; k.block_cols = 1;
                c.scales = k.scales = (uint8_t *)take((size_t)(n / f.n));
                table->quantise(&x, &k);
            }
            by_bytes(std::string(c.decodes ? "decode " : "encode ") + f.name, s.c_str(),
                     (2 + bytes + (f.n ? 1.0 / (double)f.n : 0.0)) * (double)n,
                     [=] { return table->recode(&x, &c); });
        }
    by_bytes("hadamard bf16", s.c_str(), 4.0 * (double)n,
             [=] { return table->hadamard(&x, &h); });
    mixp_lose_args l;
    memset((void *)&l, 0, sizeof l);
    l.n = n;
    l.x = args_in(a);
    l.y = y;
    l.out = (mixp_losses *)take(sizeof *l.out);
    by_bytes("lose bf16", s.c_str(), 4.0 * (double)n, [=] { return table->lose(&x, &l); });
    mixp_turn_args t;
    memset((void *)&t, 0, sizeof t);
    t.n = 3;
    t.length = 1024;
    t.history = (float *)take((size_t)(3 * t.length + 3) * sizeof(float));
    t.scales = t.history + 3 * t.length;
    for (int i = 0; i < t.n; i++) t.limits[i] = 448.0f;
    by_bytes("turn, histories of 1024", "3 x 1024", 8.0 * 3 * 1024,
             [=] { return table->turn(&x, &t); });
    give_back(mark);
}

static void losses(int64_t rows) {
    int64_t n = rows * width;
    size_t mark = taken.size();
    test_array a = numbers(MIXP_BF16, n), b = numbers(MIXP_BF16, n), da = numbers(MIXP_BF16, n);
    test_array one = numbers(MIXP_F32, 1);
    float *loss = floats(1);
    std::string s = shape_text(rows, width);
    by_bytes("mse", s.c_str(), 4.0 * (double)n,
             [=] { return table->loss(&x, args_loss(MIXP_LOSS_MSE, n, loss, a, b)); });
    by_bytes("mse backward", s.c_str(), 6.0 * (double)n,
             [=] { return table->loss_backward(&x, args_loss_backward(MIXP_LOSS_MSE, n,
                     da, 0, one,
                 a, b)); });
    give_back(mark);
}

/* --- rows -------------------------------------------------------------------------------- */

static void norms(int64_t rows) {
    int64_t n = rows * width;
    size_t mark = taken.size();
    test_array a = numbers(MIXP_BF16, n), y = numbers(MIXP_BF16, n), da = numbers(MIXP_BF16, n);
    test_array gamma = numbers(MIXP_F32, width), beta = numbers(MIXP_F32, width);
    test_array dgamma = numbers(MIXP_F32, width), dbeta = numbers(MIXP_F32, width);
    float *mean = floats(rows), *rstd = floats(rows);
    double e = (double)n;
    std::string s = shape_text(rows, width);
    by_bytes("layer norm", s.c_str(), 4 * e, [=] {
        return table->norm(&x, args_norm(rows, width, 0, 1e-5f, y, a, gamma, beta, mean,
            rstd)); });
    by_bytes("sum and layer norm", s.c_str(), 8 * e, [=] {
        return table->add_norm(&x, args_add_norm(args_norm(rows, width, 0, 1e-5f, y, a, gamma,
            beta, mean, rstd), da, y)); });
    by_bytes("layer norm backward, adds", s.c_str(), 8 * e, [=] {
        return table->norm_backward(&x, args_norm_backward(rows, width, 0, args_out(da, 1),
            args_out(dgamma, 0), args_out(dbeta, 0), y, a, gamma, mean, rstd)); });
    by_bytes("softmax", s.c_str(), 4 * e,
             [=] { return table->softmax(&x, args_softmax(rows, width, 0, y, a)); });
    by_bytes("softmax backward", s.c_str(), 6 * e,
             [=] { return table->softmax_backward(&x, args_softmax_backward(rows, width,
                     0, da, 0,
                 a, y)); });
    give_back(mark);
}

static void embeddings(int64_t rows) {
    size_t mark = taken.size();
    int64_t n = rows * width;
    test_array wte = numbers(MIXP_BF16, vocab * width), y = numbers(MIXP_BF16, n);
    test_array dwte = numbers(MIXP_F32, vocab * width);
    const int32_t *ids = indexes(rows, vocab);
    double e = (double)n, all = (double)(vocab * width);
    std::string s = shape_text(rows, width);
    by_bytes("embedding", s.c_str(), 4 * e,
             [=] { return table->embedding(&x, args_embedding(rows, width, vocab, y, wte,
                     ids)); });
    by_bytes("embedding backward", s.c_str(), 2 * e + 4 * all, [=] {
        return table->embedding_backward(&x, args_embedding_backward(rows, width, vocab,
                dwte, 0,
            y, ids)); });
    give_back(mark);
}

static void cross_entropies(int64_t rows) {
    size_t mark = taken.size();
    test_array logits = numbers(MIXP_BF16, rows * vocab), one = numbers(MIXP_F32, 1);
    const int32_t *targets = indexes(rows, vocab);
    float *loss = floats(1), *stats = floats(3 * rows), *counted = floats(1), *scale = floats(1);
    double e = (double)(rows * vocab);
    std::string s = shape_text(rows, vocab);
    by_bytes("cross entropy", s.c_str(), 2 * e, [=] {
        return table->cross_entropy(&x, args_cross_entropy(rows, vocab, MIXP_IGNORE, loss, stats,
            counted, logits, targets)); });
    by_bytes("cross entropy backward", s.c_str(), 4 * e, [=] {
        return table->cross_entropy_backward(&x, args_cross_entropy_backward(rows, vocab,
            MIXP_IGNORE, args_out(logits, 0), one, logits, targets, stats, counted)); });
    by_bytes("cross entropy and its gradient", s.c_str(), 4 * e, [=] {
        return table->cross_entropy_both(&x, args_cross_entropy_both(args_cross_entropy(rows, vocab,
            MIXP_IGNORE, loss, stats, counted, logits, targets), logits, scale, 1.0f)); });
    give_back(mark);
}

/* --- optimizer --------------------------------------------------------------------------- */

/* What a plan says for AdamW with f32 weights. */
static mixp_step_plan make_plan() {
    mixp_step_plan p;
    memset((void *)&p, 0, sizeof p);
    p.kind = MIXP_OPTIMIZER_ADAMW;
    p.check = 1;
    p.n_groups = 1;
    p.groups[0].lr = 1e-4;
    p.groups[0].beta1 = 0.9;
    p.groups[0].beta2 = 0.95;
    p.groups[0].eps = 1e-8;
    p.groups[0].weight_decay = 0.1;
    return p;
}

/* The shapes of GPT-2's parameters. */
static std::vector<int64_t> parameter_sizes() {
    std::vector<int64_t> n = { vocab * width, length * width, width, width };
    for (int i = 0; i < layers; i++)
        for (int64_t k : { 3, 1, 4, 4 }) {
            n.push_back(k * width * width);
            n.push_back(k == 4 && n.size() % 2 ? width : k * width);
            n.push_back(width);
        }
    return n;
}

static mixp_param_row *make_rows(const std::vector<int64_t> &sizes, int64_t *total) {
    std::vector<mixp_param_row> rows(sizes.size());
    void *p = take(rows.size() * sizeof rows[0]);
    *total = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        mixp_param_row &r = rows[i];
        memset((void *)&r, 0, sizeof r);
        r.count = sizes[i];
        r.weight = floats(r.count);
        r.grad = floats(r.count);
        r.m = floats(r.count);
        r.v = floats(r.count);
        r.low_bf16 = (mixp_bf16 *)numbers(MIXP_BF16, r.count).data;
        r.weight_dtype = r.grad_dtype = MIXP_F32;
        r.active = 1;
        good(table->fill(&x, args_fill(test_array{ r.v, MIXP_F32 }, r.count, 0.1)), "fill");
        *total += r.count;
    }
    good(gpu->upload(&x, p, rows.data(), rows.size() * sizeof rows[0]), "upload");
    optimizer_rows = rows;
    return (mixp_param_row *)p;
}

/* clip takes what gather found before it; no look follows it that would find nothing to clip. */
static void optimizer() {
    size_t mark = taken.size();
    std::vector<int64_t> sizes = parameter_sizes();
    int64_t total, count = (int64_t)sizes.size();
    mixp_param_row *rows = make_rows(sizes, &total);
    mixp_step_plan plan = make_plan();
    mixp_step_state *step = (mixp_step_state *)take(sizeof *step);
    mixp_scaler_state *scaler = (mixp_scaler_state *)take(sizeof *scaler);
    mixp_scaler_state begin;
    mixp_scaler_rule rule;
    memset((void *)&begin, 0, sizeof begin);
    begin.scale = 1024.0f;
    mixp_scaler_rule_resolve(NULL, &rule);
    good(gpu->upload(&x, scaler, &begin, sizeof begin), "upload");
    good(table->fill(&x,
            args_fill(test_array{ step, MIXP_U8 }, (int64_t)sizeof *step, 0.0)), "fill");
    good(table->grad_stats(&x,
            args_grad_stats(rows, count, NULL, 0, step, NULL, NULL)), "grad_stats");
    double e = (double)total;
    std::string s = shape_text(count, total);
    by_bytes("grad_stats", s.c_str(), 4 * e,
             [=] { return table->grad_stats(&x, args_grad_stats(rows, count, NULL, 0,
                     step, NULL, NULL)); });
    mixp_agree_args agree;
    memset((void *)&agree, 0, sizeof agree);
    agree.plan = &plan; agree.scaler = scaler; agree.step = step; agree.size = 1;
    agree.table = (double *)take(MIXP_AGREE_WORDS * sizeof(double));
    by_time("agree", [=] { return table->agree(&x, &agree); });
    mixp_restore_args restore;      /* of an applied step: the kernel reads the flags only */
    memset((void *)&restore, 0, sizeof restore);
    restore.n_flags = 1;
    restore.flags[0] = &step->skip;
    restore.n_parts = 1;
    restore.parts[0].to = take(4096);
    restore.parts[0].from = take(4096);
    restore.parts[0].bytes = 4096;
    by_time("restore", [=] { return table->restore(&x, &restore); });
    mixp_check_buffers_args check;  /* nothing has changed, so nothing is found */
    memset((void *)&check, 0, sizeof check);
    check.found = &step->buffer_found;
    check.n_parts = 1;
    check.parts[0].now = check.parts[0].before = restore.parts[0].from;
    check.parts[0].count = 1024;
    check.parts[0].dtype = MIXP_F32;
    by_time("check_buffers", [=] { return table->check_buffers(&x, &check); });
    by_bytes("clip", s.c_str(), 8 * e,
             [=] { return table->clip(&x, args_clip(rows, count, 1e-3, step)); });
    by_time("prepare", [=] { return table->prepare(&x, args_prepare(&plan, step, scaler)); });
    good(table->prepare(&x, args_prepare(&plan, step, scaler)), "prepare");
    by_bytes("update, AdamW", s.c_str(), 30 * e,
             [=] { return table->update(&x, args_update(&plan, rows, count, step)); });
    by_time("advance", [=] { return table->advance(&x, args_advance(&rule, scaler)); });
    give_back(mark);
}

/* --- products, attention ----------------------------------------------------------------- */

/* A product with an epilogue in its pass, and the same by two kernels: what decides whether
 * MIXP_EPILOGUES_BIAS and _GELU are switched on. */
static void epilogues_of(const std::string &start, const std::string &s, double flops,
                         const mixp_gemm_args &forward, const mixp_gemm_args &back,
                         const mixp_gemm_args &weights) {
    test_array sums = numbers(MIXP_F32, weights.m);
    test_array up = numbers(forward.c.dtype, forward.m * forward.n);
    test_array down = numbers(back.c.dtype, back.m * back.n);
    mixp_gemm_epilogue_args bias, gelu, slope;
    memset((void *)&bias, 0, sizeof bias);
    gelu = slope = bias;
    bias.kind = MIXP_EPILOGUE_ROW_SUMS;
    bias.gemm = weights;
    bias.gemm.c.accumulate = 0;
    bias.sums = args_out(sums, 0);
    gelu.kind = MIXP_EPILOGUE_GELU;
    gelu.gemm = forward;
    gelu.before = args_out(up, 0);
    slope.kind = MIXP_EPILOGUE_GELU_BACK;
    slope.gemm = back;
    slope.before = args_out(down, 0);
    by_flops(start + ", dw and sums", s.c_str(), flops,
             [=] { return table->gemm_epilogue(&x, &bias); });
    by_flops(start + ", dw, then sums", s.c_str(), flops, [=] {
        mixp_result r = table->gemm(&x, &bias.gemm);
        return r != MIXP_OK ? r : table->reduce(&x, args_reduce(1, weights.k, weights.m, sums, 0,
            test_array{ (void *)weights.a.data, weights.a.dtype }, 1.0f)); });
    by_flops(start + ", y and gelu", s.c_str(), flops,
             [=] { return table->gemm_epilogue(&x, &gelu); });
    by_flops(start + ", dx and gelu's slope", s.c_str(), flops,
             [=] { return table->gemm_epilogue(&x, &slope); });
}

/* What a linear layer needs: y = x w', dx = dy w, dw += dy' x. first: these alone, by the first
 * algorithm and by the best. */
static void linear(const char *name, int64_t m, int64_t n, int64_t k, mixp_dtype dtype,
                   bool first = false) {
    void (*line)(const std::string &, const char *, double, const Work &) =
        first ? by_algorithm : by_flops;
    size_t mark = taken.size();
    test_array in = numbers(dtype, m * k), w = numbers(dtype, n * k), y = numbers(dtype, m * n);
    test_array dw = numbers(MIXP_F32, n * k), bias = numbers(dtype, n), dx = numbers(dtype, m * k);
    std::string start = std::string("linear ") + name + " " + mixp_dtype_name(dtype);
    std::string s = shape_text(m, n, k);
    double flops = 2.0 * (double)m * (double)n * (double)k;
    mixp_gemm_args g;
    memset((void *)&g, 0, sizeof g);
    g.alpha = 1.0f;
    g.batch = 1;
    mixp_gemm_args forward = g, back = g, weights = g;
    forward.m = m; forward.n = n; forward.k = k; forward.trans_b = 1;
    forward.a = args_in(in); forward.b = args_in(w); forward.bias = args_in(bias);
    forward.c = args_out(y, 0);
    forward.lda = forward.ldb = k; forward.ldc = n;
    back.m = m; back.n = k; back.k = n;
    back.a = args_in(y); back.b = args_in(w); back.c = args_out(dx, 0);
    back.lda = n; back.ldb = back.ldc = k;
    weights.m = n; weights.n = k; weights.k = m; weights.trans_a = 1;
    weights.a = args_in(y); weights.b = args_in(in); weights.c = args_out(dw, 1);
    weights.lda = n; weights.ldb = weights.ldc = k;
    line(start + ", y", s.c_str(), flops, [=] { return table->gemm(&x, &forward); });
    line(start + ", dx", s.c_str(), flops, [=] { return table->gemm(&x, &back); });
    line(start + ", dw", s.c_str(), flops, [=] { return table->gemm(&x, &weights); });
    if (!first) epilogues_of(start, s, flops, forward, back, weights);
    give_back(mark);
}

/* A quantised operand in blocks of 1 x n or n x n; n = 0: one scale. */
static mixp_narrow quantised(test_array values, int64_t rows, int64_t cols, mixp_dtype element,
                             mixp_block_scale scale, int64_t n, bool square) {
    mixp_narrow how = { element, scale, square ? n : n != 0, n, NULL };
    mixp_quantise_args k;
    memset((void *)&k, 0, sizeof k);
    k.rows = rows; k.cols = cols; k.x = args_in(numbers(MIXP_BF16, rows * cols));
    k.y = (mixp_bf16 *)values.data;
    k.element = element; k.scale = scale; k.block_rows = how.block_rows; k.block_cols = n;
    if (n) how.scales = k.scales = (uint8_t *)take((size_t)(rows * cols / n));
    good(table->quantise(&x, &k), "quantise");
    return how;
}

/* y = x w' by narrow products, the time for writing codes included: set narrow_products if these are faster
 * than bf16. If cuBLASLt has no such product, the line is the bf16 product's. */
static void narrow(const char *name, int64_t rows, int64_t n, int64_t k) {
    struct Form { const char *name; mixp_dtype element; mixp_block_scale scale; int64_t unit; };
    const Form forms[] = { { "fp8", MIXP_F8_E4M3, MIXP_SCALE_TENSOR, 0 },
                           { "fp8 in blocks", MIXP_F8_E4M3, MIXP_SCALE_POWER, 128 },
                           { "mxfp8", MIXP_F8_E4M3, MIXP_SCALE_E8M0, 32 },
                           { "nvfp4", MIXP_F4_E2M1, MIXP_SCALE_E4M3, 16 } };
    int64_t m = (rows + 127) / 128 * 128;
    size_t mark = taken.size();
    test_array in = numbers(MIXP_BF16, m * k), w = numbers(MIXP_BF16, n * k), y = numbers(MIXP_BF16, m * n);
    std::string s = shape_text(m, n, k);
    for (const Form &f : forms) {
        mixp_gemm_narrow_args g;
        if (f.unit && (n % f.unit || k % f.unit)) continue;
        memset((void *)&g, 0, sizeof g);
        g.gemm.m = m; g.gemm.n = n; g.gemm.k = k; g.gemm.trans_b = 1; g.gemm.batch = 1;
        g.gemm.a = args_in(in); g.gemm.b = args_in(w); g.gemm.c = args_out(y, 0);
        g.gemm.lda = g.gemm.ldb = k; g.gemm.ldc = n; g.gemm.alpha = 1.0f;
        g.a = quantised(in, m, k, f.element, f.scale, f.unit, false);
        g.b = quantised(w, n, k, f.element, f.scale, f.unit, f.scale != MIXP_SCALE_E8M0);
        by_flops(std::string("linear ") + name + " " + f.name + ", y", s.c_str(),
                 2.0 * (double)m * (double)n * (double)k, [=] { return table->gemm_narrow(&x, &g); });
    }
    give_back(mark);
}

/* FLOP as they are usually counted: 4 T^2 d a head forward, half of that when causal, 2.5 times
 * as much backward, whatever is computed again. */
static void attention(mixp_dtype dtype, int causal) {
    size_t mark = taken.size();
    int64_t n = batch * length * width, d = width / heads;
    test_array qkv = numbers(dtype, 3 * n), y = numbers(dtype, n), dy = numbers(dtype, n);
    test_array dqkv = numbers(dtype, 3 * n);
    float *lse = floats(batch * heads * length), scale = 1.0f / std::sqrt((float)d);
    double flops = 4.0 * (double)(batch * heads) * (double)length * (double)length * (double)d;
    std::string name = std::string("attention ") + mixp_dtype_name(dtype) +
                       (causal ? " causal" : "");
    std::string s = shape_text(batch * heads, length, d);
    if (causal) flops /= 2.0;
    mixp_attention_args k = args_attention(batch, length, heads, d, qkv, y, lse);
    k.causal = causal;
    k.scale = scale;
    mixp_attention_backward_args back = args_attention_backward(&k, dy, dqkv, 0);
    by_flops(name, s.c_str(), flops, [=] { return table->attention(&x, &k); });
    by_flops(name + ", backward", s.c_str(), 2.5 * flops, [=] {
        return table->attention_backward(&x, &back); });
    give_back(mark);
}

/* --- GPT-2 ------------------------------------------------------------------------------- */

struct Layer { mixp_tensor *w, *b; };
struct Block { Layer norm1, qkv, proj, norm2, up, down; };

struct Model {
    mixp_context        *ctx;
    mixp_optimizer      *opt;
    mixp_scaler         *scaler;
    mixp_dtype           dtype;
    mixp_tensor         *wte, *wpe;
    Layer                norm;
    std::vector<Block>   blocks;
    std::vector<int32_t> in, out, places;
    int64_t              parameters;
    int                  joins;         /* MIXP_EPILOGUES_ */
    bool                 counted;       /* on the ledger's device: nothing is drawn */
    bool                 measured;      /* algorithms are chosen by measuring */
};

/* Uniform in +-0.035, whose deviation is 0.02. The first are drawn on the host, once; the rest are
 * their copies. */
static void draw(Model &m, mixp_tensor *t) {
    static std::vector<float> some;
    cudaStream_t on = (cudaStream_t)mixp_context_exec(m.ctx)->stream;
    size_t all = (size_t)t->count, done;
    for (size_t i = some.size(); i < std::min(all, (size_t)1 << 20); i++)
        some.push_back(((float)mixp_random_u32(1, 9, 3, i) / 4294967296.0f - 0.5f) * 0.07f);
    done = std::min(all, some.size());
    cuda(cudaMemcpyAsync(t->data, some.data(), done * 4, cudaMemcpyHostToDevice, on), "copy");
    cuda(cudaStreamSynchronize(on), "copy");
    for (; done < all; done *= 2)
        cuda(cudaMemcpyAsync((float *)t->data + done, t->data, std::min(done, all - done) * 4,
                             cudaMemcpyDeviceToDevice, on), "copy");
}

static mixp_tensor *parameter(Model &m, const char *name, int64_t rows, int64_t cols, double fill) {
    int64_t shape[2] = { rows, cols };
    mixp_tensor *t = mixp_param(m.ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    if (!cols) mixp_fill(t, fill);
    else if (!m.counted) draw(m, t);
    mixp_optimizer_add(m.opt, t, NULL);
    m.parameters += rows * (cols ? cols : 1);
    return t;
}
static Layer layer(Model &m, const std::string &name, int64_t rows, int64_t cols) {
    Layer l;
    l.w = parameter(m, (name + ".weight").c_str(), rows, cols, 1.0);
    l.b = parameter(m, (name + ".bias").c_str(), rows, 0, 0.0);
    return l;
}

static void make_optimizer(Model &m) {
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_scaler_desc scaler;
    memset((void *)&scaler, 0, sizeof scaler);
    if (m.dtype != MIXP_F16) { scaler.rule = MIXP_RULE_STATIC; scaler.init_scale = 1; }
    adamw.lr = 3e-4;
    adamw.max_norm = 1.0;
    m.opt = mixp_optimizer_new(m.ctx, &adamw);
    m.scaler = mixp_scaler_new(m.ctx, &scaler);
}

/* The file with the algorithms of such a step's products: --choices PREFIX. */
static std::string choices_file(mixp_dtype dtype, int level, int joins) {
    return choices + "_" + mixp_dtype_name(dtype) + "_" + std::to_string(level) +
           (joins ? "_" + std::to_string(joins) : "") + ".txt";
}

/* What it holds; "" without one. */
static std::string choices_of(mixp_dtype dtype, int level, int joins) {
    std::string text;
    FILE *f = choices.empty() ? NULL : fopen(choices_file(dtype, level, joins).c_str(), "r");
    if (!f) return text;
    for (int c = getc(f); c != EOF; c = getc(f)) text += (char)c;
    fclose(f);
    return text;
}
static void keep_choices(const Model &m, int level) {
    std::string text(mixp_context_gemm_choices(m.ctx, NULL, 0), 0);
    FILE *f = choices.empty() ? NULL : fopen(choices_file(m.dtype, level, m.joins).c_str(), "w");
    if (!f) return;
    mixp_context_gemm_choices(m.ctx, &text[0], text.size());
    fputs(text.c_str(), f);
    fclose(f);
}

static void make_model(Model &m, mixp_dtype dtype, int level, int joins) {
    mixp_context_desc desc;
    const char *why = "";
    std::string text = m.counted || m.measured ? "" : choices_of(dtype, level, joins);
    memset((void *)&desc, 0, sizeof desc);
    desc.device = m.counted ? ledger_device() : gpu;
    desc.gemm_measure = m.measured;
    desc.seed = 1;
    desc.why = &why;
    desc.epilogues = joins ? joins : MIXP_EPILOGUES_NONE;
    desc.gemm_choices = text.empty() ? NULL : text.c_str();
    m.parameters = 0;
    m.dtype = dtype;
    m.joins = joins;
    if (!(m.ctx = mixp_context_new(&desc))) throw std::runtime_error(why);
    mixp_autocast_set_level(m.ctx, level);
    mixp_autocast_override(m.ctx, mixp_op_builtin(MIXP_OP_LAYER_NORM), MIXP_CLASS_LOW_OUT);
    make_optimizer(m);
    m.wte = parameter(m, "wte", vocab, width, 0.0);
    m.wpe = parameter(m, "wpe", length, width, 0.0);
    for (int i = 0; i < layers; i++) {
        std::string h = "h." + std::to_string(i);
        m.blocks.push_back(Block{
            layer(m, h + ".ln_1", width, 0), layer(m, h + ".attn.c_attn", 3 * width, width),
            layer(m, h + ".attn.c_proj", width, width), layer(m, h + ".ln_2", width, 0),
            layer(m, h + ".mlp.c_fc", 4 * width, width),
            layer(m, h + ".mlp.c_proj", width, 4 * width) });
    }
    m.norm = layer(m, "ln_f", width, 0);
    m.in.resize((size_t)(batch * length));
    m.out.resize(m.in.size());
    for (int64_t i = 0; i < length; i++) m.places.push_back((int32_t)i);
}

/* A text that can be learned: each token follows from the one before. */
static void next_batch(Model &m, uint64_t step) {
    for (size_t i = 0; i < m.in.size(); i++) {
        uint64_t u = mixp_random_u32(7, step, 8, i) % (uint64_t)vocab;
        m.in[i] = (int32_t)u;
        m.out[i] = (int32_t)((u * 31 + 7) % (uint64_t)vocab);
    }
}

/* h: the norm of *x, before and after. */
static mixp_tensor *block_of(Model &m, const Block &b, const Layer &next, mixp_tensor **x,
                             mixp_tensor *h) {
    mixp_context *c = m.ctx;
    h = mixp_attention(c, mixp_linear(c, h, b.qkv.w, b.qkv.b), (int)heads, 1, 0);
    h = mixp_linear(c, h, b.proj.w, b.proj.b);
    mixp_tensor_set_disposable(h, 1);
    h = mixp_add_layer_norm(c, *x, h, b.norm2.w, b.norm2.b, 1e-5f, x);
    h = mixp_mlp(c, h, b.up.w, b.up.b, b.down.w, b.down.b);
    mixp_tensor_set_disposable(h, 1);
    return mixp_add_layer_norm(c, *x, h, next.w, next.b, 1e-5f, x);
}

/* The scaled loss, and in *plain the loss itself. */
static mixp_tensor *loss_of(Model &m, mixp_tensor **plain) {
    int64_t shape[2] = { batch, length };
    mixp_context *c = m.ctx;
    mixp_tensor *x, *h, *loss = NULL;
    MIXP_AUTOCAST(c, m.dtype) {
        x = mixp_add(c, mixp_embedding(c, m.wte, mixp_input(c, MIXP_I32, 2, shape, m.in.data())),
                     mixp_embedding(c, m.wpe, mixp_input(c, MIXP_I32, 1, &length,
                                                         m.places.data())));
        h = mixp_layer_norm(c, x, m.blocks[0].norm1.w, m.blocks[0].norm1.b, 1e-5f);
        for (size_t i = 0; i < m.blocks.size(); i++)
            h = block_of(m, m.blocks[i], i + 1 < m.blocks.size() ? m.blocks[i + 1].norm1 : m.norm,
                         &x, h);
        h = mixp_linear(c, h, m.wte, NULL);
        mixp_tensor_set_disposable(h, 1);
        loss = mixp_scaler_cross_entropy(m.scaler, h, mixp_input(c, MIXP_I32, 2, shape,
                                                                 m.out.data()),
                                         MIXP_IGNORE, 1.0f, plain);
    }
    return loss;
}

static mixp_tensor *train_step(Model &m) {
    mixp_tensor *loss, *scaled;
    mixp_step_begin(m.ctx);
    mixp_zero_grad(m.opt);
    scaled = loss_of(m, &loss);
    mixp_backward(m.ctx, scaled);
    mixp_scaler_step(m.scaler, m.opt);
    mixp_scaler_update(m.scaler);
    return loss;
}

static mixp_result error_of(const Model &m) {
    const char *why = "";
    if (mixp_context_error(m.ctx, &why) != MIXP_OK) throw std::runtime_error(why);
    return MIXP_OK;
}

static mixp_graph *record(Model &m) {
    mixp_capture_begin(m.ctx);
    train_step(m);
    mixp_graph *g = mixp_capture_end(m.ctx);
    error_of(m);
    return g;
}

/* What the ledger says of such a step: of the third, as the first two fill caches. */
static ledger_line predicted_step(mixp_dtype dtype, int level, int joins) {
    Model m = Model();
    ledger_clear();
    m.counted = true;
    make_model(m, dtype, level, joins);
    next_batch(m, 0);
    for (int i = 0; i < 3; i++) {
        ledger.on = i == 2;
        train_step(m);
    }
    ledger.on = 0;
    error_of(m);
    ledger_line sum = ledger.sum;
    mixp_context_free(m.ctx);
    return sum;
}

static const char *const joined[] = { "", ", sums in products", ", GELU in products",
                                      ", sums and GELU in products" };

/* FLOP of a step: 6 N a token; and with attention, as PaLM's paper counts, 12 L C T more. */
static void print_step(const Model &m, const char *how, int level, const Times &t) {
    double tokens = (double)(batch * length), plain = 6.0 * (double)m.parameters * tokens;
    double full = plain + 12.0 * layers * (double)width * (double)length * tokens;
    printf("GPT-2 %s %.1fM %s level %d, %s%s%s %9.3f ms [%.3f %.3f], %.0f tokens/s", model.c_str(),
           (double)m.parameters / 1e6, mixp_dtype_name(m.dtype), level, how, joined[m.joins],
           m.measured ? ", measured" : "", t.median, t.least, t.most, tokens / t.median * 1e3);
    if (peak > 0.0)
        printf(", MFU %.1f%% (6N), %.1f%% (6N + attention)",
               plain / t.median / 1e7 / peak, full / t.median / 1e7 / peak);
    print_model(modelled ? predicted_step(m.dtype, level, m.joins) : ledger_line());
    printf("\n");
}

/* The last should be 0: see mixp_gemm_count. */
static void print_ways(const mixp_gemm_count &n) {
    printf("  products: %lld as they are, %lld in fp8 or fp4, %lld with packed operands, "
           "%lld without tensor cores\n", (long long)n.direct, (long long)n.narrow, (long long)n.packed,
           (long long)n.plain);
}

/* Launches of a step, products apart. */
static void print_launches(Model &m) {
    mixp_gemm_count before = mixp_context_gemm_count(m.ctx), after;
    long began = launches(), ended;
    train_step(m);
    ended = launches();
    after = mixp_context_gemm_count(m.ctx);
    printf("  a step: %ld launches and %lld products\n", ended - began,
           (long long)(after.direct + after.packed + after.plain - before.direct - before.packed -
                       before.plain));
}

/* Steps and replays of the step take turns. */
static void measure_steps(Model &m, int level) {
    std::vector<double> plain, replayed;
    next_batch(m, 0);
    double first = mixp_item(train_step(m));
    error_of(m);
    mixp_graph *graph = record(m);
    cudaStream_t on = (cudaStream_t)mixp_context_exec(m.ctx)->stream;
    Work step = [&] { train_step(m); return error_of(m); };
    Work replay = [&] { return mixp_replay(graph); };
    int calls = tiny ? 1 : m.dtype == MIXP_F32 ? 2 : 5;
    for (int i = 0; i < rounds; i++) {
        next_batch(m, (uint64_t)i + 1);
        plain.push_back(sample(step, calls, on));
        replayed.push_back(sample(replay, calls, on));
    }
    double last = mixp_item(train_step(m));
    error_of(m);
    print_step(m, "step by step", level, times_of(plain));
    print_step(m, "as a graph", level, times_of(replayed));
    printf("  loss %.4f -> %.4f, %.2f GB of device memory\n", first, last,
           (double)mixp_context_memory(m.ctx).allocated / 1e9);
    print_launches(m);
    print_ways(mixp_context_gemm_count(m.ctx));
    if (!std::isfinite(first) || !std::isfinite(last))
        throw std::runtime_error("the loss is not finite");
}

/* What fails, for want of memory say, is told, and the rest is measured. */
static void gpt2(mixp_dtype dtype, int level, int joins, bool measured = false) {
    Model m = Model();
    if (epilogues >= 0 && joins != epilogues) return;
    if (!wanted_dtype(dtype) || !wanted("GPT-2")) return;
    m.measured = measured;
    try {
        make_model(m, dtype, level, joins);
        measure_steps(m, level);
        keep_choices(m, level);
    } catch (const std::runtime_error &e) {
        printf("GPT-2 %s %s level %d%s was not measured: %s\n", model.c_str(),
               mixp_dtype_name(dtype), level, joined[joins], e.what());
        failures++;
    }
    if (m.ctx) mixp_context_free(m.ctx);
}

/* What decides comes first, for a run may be cut: bf16 with every epilogue, then f16 with none and
 * with all, then f32. With --epilogues those alone. */
static void steps() {
    int some = epilogues >= 0 ? 1 : 3, most = tiny && epilogues < 0 ? 0 : 3;
    for (int level = 2; level >= 1; level--)
        for (int joins = 0; joins <= (level == 2 ? 3 : most); joins++)
            gpt2(MIXP_BF16, level, joins);
    for (int level = 2; level >= 1; level--)
        for (int joins = 0; joins <= most; joins += some) gpt2(MIXP_F16, level, joins);
    for (int joins = 0; joins <= (epilogues >= 0 ? 3 : 0); joins++) gpt2(MIXP_F32, 1, joins);
}

/* --- the program ------------------------------------------------------------------------- */

/* Dense f16 and bf16 TFLOP/s with f32 sums, by NVIDIA's data sheets; 0: look it up, --peak. */
static double peak_of(const char *name) {
    const ledger_gpu *known = ledger_gpu_of(name);
#ifdef MIXPREC_CUDASIM
    known = &ledger_gpus[0];
#endif
    if (!known) return 0.0;
    modelled = true;
    ledger_on = known;
    return known->tensor / 1e12;
}

static void open_gpu() {
    const char *why = "";
    cudaDeviceProp p;
    gpu = mixp_cuda(0, &why);
    if (!gpu) die("nothing was measured, there is no GPU to use", why);
    if (why[0]) printf("%s\n", why);
    table = gpu->kernels;
    cuda(cudaGetDeviceProperties(&p, 0), "properties");
    double published = peak_of(p.name);
    if (peak <= 0.0) peak = published;
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    x.threads = 1;
    x.stream = (void *)stream;
    x.scratch = scratch;
    measuring = x;
    measuring.gemm_measure = 1;
    if (gpu->attach(&x) != MIXP_OK || gpu->attach(&measuring) != MIXP_OK)
        die("the GPU cannot be used", "attach failed");
    printf("mixprec %s on %s, %d SMs; ", MIXPREC_VERSION, p.name, p.multiProcessorCount);
    if (peak > 0.0) printf("peak taken as %.0f TFLOP/s dense\n", peak);
    else printf("its peak is not known: --peak\n");
#ifdef MIXPREC_CUDASIM
    printf("SIMULATED: this shows that the program runs; its times mean nothing.\n");
#endif
}

static void set_tiny() {
    tiny = rounds = 1;
    batch = heads = 1;
    layers = 1;
    length = 17;
    width = 32;
    vocab = 72;
}

static void set_char() {
    layers = 6;
    heads = 6;
    width = 384;
    length = 256;
    vocab = 72;         /* 65 letters, padded */
}

static void read_options(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        std::string name = argv[i];
        if (name == "--tiny") { tiny = 1; continue; }
        if (i + 1 == argc) die(argv[i], "no such option, or its value is missing");
        if (name == "--batch") batch = atoll(argv[++i]);
        else if (name == "--rounds") rounds = atoi(argv[++i]);
        else if (name == "--only") only = argv[++i];
        else if (name == "--peak") peak = atof(argv[++i]);
        else if (name == "--part") part = argv[++i];
        else if (name == "--model") model = argv[++i];
        else if (name == "--dtype") one_dtype = argv[++i];
        else if (name == "--epilogues") epilogues = atoi(argv[++i]);
        else if (name == "--choices") choices = argv[++i];
        else die(argv[i], "no such option: see the head of tests/bench/bench_cuda.cpp");
    }
    if (batch < 1 || rounds < 1) die("--batch and --rounds", "at least 1");
    if (epilogues < -1 || epilogues > 3) die("--epilogues", "0, 1, 2 or 3");
    if (!one_dtype.empty() && one_dtype != "f32" && one_dtype != "f16" && one_dtype != "bf16")
        die("--dtype", "f32, f16 or bf16");
    if (!part.empty() && part != "kernels" && part != "training" && part != "first")
        die("--part", "kernels, training or first");
    if (model != "gpt2" && model != "char") die("--model", "gpt2 or char");
    if (model == "char") set_char();
    if (tiny) set_tiny();
}

static void kernels(int64_t rows) {
    converts(rows);
    picks(rows);
    quantisers(rows);
    maps(rows);
    losses(rows);
    norms(rows);
    embeddings(rows);
    cross_entropies(rows);
    optimizer();
}

static void products(int64_t rows) {
    for (mixp_dtype dtype : { MIXP_F16, MIXP_BF16 }) {
        if (!wanted_dtype(dtype)) continue;
        linear("qkv", rows, 3 * width, width, dtype);
        linear("proj", rows, width, width, dtype);
        linear("up", rows, 4 * width, width, dtype);
        linear("down", rows, width, 4 * width, dtype);
        linear("logits", rows, vocab, width, dtype);
        attention(dtype, 1);
        attention(dtype, 0);
    }
    narrow("qkv", rows, 3 * width, width);
    narrow("down", rows, width, 4 * width);
}

/* What the measuring context chose, for --choices. */
static void keep_measured() {
    std::string text(gpu->gemm_choices ? gpu->gemm_choices(&measuring, NULL, 0) : 0, 0);
    FILE *f = choices.empty() || text.empty() ? NULL : fopen((choices + "_measured.txt").c_str(), "w");
    if (!f) return;
    gpu->gemm_choices(&measuring, &text[0], text.size());
    fputs(text.c_str(), f);
    fclose(f);
}

/* What decides most, most important first. */
static void first(int64_t rows) {
    for (int epilogues : { 0, (int)MIXP_EPILOGUES_GELU, MIXP_EPILOGUES_BIAS | MIXP_EPILOGUES_GELU })
        gpt2(MIXP_BF16, 2, epilogues);
    gpt2(MIXP_BF16, 2, MIXP_EPILOGUES_BIAS | MIXP_EPILOGUES_GELU, true);
    linear("qkv", rows, 3 * width, width, MIXP_BF16, true);
    linear("proj", rows, width, width, MIXP_BF16, true);
    linear("up", rows, 4 * width, width, MIXP_BF16, true);
    linear("down", rows, width, 4 * width, MIXP_BF16, true);
    linear("logits", rows, vocab, width, MIXP_BF16, true);
    keep_measured();
    attention(MIXP_BF16, 1);
    embeddings(rows);
    cross_entropies(rows);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 1 << 12);     /* a run that is cut keeps its lines */
    read_options(argc, argv);
    open_gpu();
    if (part == "first") first(batch * length);
    else if (part != "training") {
        kernels(batch * length);
        products(batch * length);
        if (gpu->gemm_count) print_ways(gpu->gemm_count(&x));
        give_back(0);
    }
    if (part != "kernels" && part != "first") steps();
    gpu->detach(&measuring);
    gpu->detach(&x);
    cuda(cudaStreamDestroy(stream), "stream");
    if (!lines) die("nothing was measured", "no line has this name");
    printf("%d lines\n", lines);
    return failures != 0;
}
