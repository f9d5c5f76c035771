/* mixprec.h - automatic mixed-precision training for C, C++ and CUDA C
 * SPDX-License-Identifier: MIT OR Unlicense          (full texts: the file LICENSE)
 *
 * Mixed-precision training like torch.amp, in one header that needs only libc and libm: number
 * formats, autocast, a dynamic loss scaler, fused optimizers on fp32 master weights, a tape of
 * operators, and checkpoints.
 *
 * In ONE source file of your program:
 *
 *     #define MIXPREC_IMPLEMENTATION
 *     #include "mixprec.h"
 *
 * In all other files, only the #include. Compile with -O2 and link with -lm. -fopenmp uses all
 * cores. If the compiler has no OpenMP, -DMIXPREC_THREADS -pthread does the same.
 *
 * A complete program, y = 3x learned in fp16:
 *
 *     #define MIXPREC_IMPLEMENTATION
 *     #include "mixprec.h"
 *     #include <stdio.h>
 *
 *     int main(void)
 *     {
 *         int64_t shape[2] = { 1, 1 }, batch[2] = { 4, 1 };
 *         float x[4] = { 1, 2, 3, 4 }, y[4] = { 3, 6, 9, 12 };
 *         mixp_context    *ctx    = mixp_context_new(NULL);
 *         mixp_tensor     *w      = mixp_param(ctx, "w", MIXP_F32, 2, shape), *loss = NULL;
 *         mixp_scaler     *scaler = mixp_scaler_new(ctx, NULL);
 *         mixp_optimizer_desc adamw  = mixp_adamw_defaults();
 *         mixp_optimizer  *opt;
 *         const char      *why;
 *         int              step;
 *
 *         adamw.lr = 0.1;
 *         opt = mixp_optimizer_new(ctx, &adamw);
 *         mixp_optimizer_add(opt, w, NULL);
 *         for (step = 0; step < 200; step++) {
 *             mixp_step_begin(ctx);
 *             mixp_zero_grad(opt);
 *             MIXP_AUTOCAST(ctx, MIXP_F16) {
 *                 mixp_tensor *in = mixp_input(ctx, MIXP_F32, 2, batch, x);
 *                 loss = mixp_mse(ctx, mixp_linear(ctx, in, w, NULL),
 *                                 mixp_input(ctx, MIXP_F32, 2, batch, y));
 *             }
 *             mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
 *             mixp_scaler_step(scaler, opt);
 *             mixp_scaler_update(scaler);
 *         }
 *         if (mixp_context_error(ctx, &why) != MIXP_OK) { fprintf(stderr, "%s\n", why); return 1; }
 *         printf("w = %.2f, loss scale %g\n", mixp_item(w),
 *                (double)mixp_scaler_loss_scale(scaler));
 *         mixp_context_free(ctx);
 *         return 0;
 *     }
 *
 * CONTENTS: each section has a banner; search for its tag
 *
 *      1. results      >>results       codes and texts
 *      2. formats      >>formats       f16, bf16, fp8, tf32: scalars; random numbers
 *      3. arithmetic   >>arithmetic    what the host and all devices compute alike
 *      4. kernels      >>kernels       a device is a table of kernels; the CPU's; mixp_convert
 *      5. tensors      >>tensors       context, memory, parameters, buffers, activations
 *      6. autocast     >>autocast      operator classes, regions, recipes below 16 bits, cast cache
 *      7. tape         >>tape          applying, walking back, recomputing blocks, own operators
 *      8. operators    >>operators     linear, attention, norms, losses, ...
 *      9. scaler       >>scaler        dynamic loss scaling and its rules
 *     10. optimizers   >>optimizers    AdamW, SGD, Muon and seven more, groups, averages
 *     11. step         >>step          unscale, clip, step, update; the verdict and its cause
 *     12. checkpoint   >>checkpoint    safetensors, crash-safe save, exact resume
 *     13. watch        >>watch         falling back to f32, where a step went wrong, observers
 *     14. ranks        >>ranks         many machines: exchange of gradients, sharded states
 *
 * The public half comes first, in this order. The implementation follows, in the same order. A
 * section uses only the sections above it.
 *
 * GLOSSARY: our own words. All other terms are the field's
 *
 *     site      one application of an operator that recurs in every step; see WATCH
 *     look      one kernel pass that counts the values of an array near the ends of a dtype's
 *               range: overflowed, flushed, subnormal
 *     walk      one pass of mixp_backward back over the recorded calls
 *     buffer    state that a step writes besides the weights, such as an RNN's state or running
 *               statistics; a skipped step leaves its bytes. See BUFFERS in section 5
 *     level     0 to 3: what is stored in 16 bits. 0 nothing, 1 what PyTorch's autocast stores, 2
 *               every activation, 3 the parameters as well; see AUTOCAST
 *     scale tag note on a gradient: the scaler and the scale that multiplied it; see SCALER
 *     window    the steps that belong to one update, of the guard and of buffers
 *     history   of the spike check: the last norms or losses, which a new step is compared with
 *     skip      a step that is not applied: a gradient is non-finite, a buffer became non-finite,
 *               the loss or norm is a spike, or an index is out of range; see mixp_skip_reason
 *     retry     a repeat of a skipped step with the same batch; see mixp_retry
 *     room      a section of this file; it is one file in src/
 *
 * OPTIONS: define them before the #include
 *
 *     MIXPREC_IMPLEMENTATION   one file          the implementation
 *     MIXPREC_PART             implementation    one part of it: MIXPREC_HOST, MIXPREC_SCALAR,
 *                                                MIXPREC_AVX2, MIXPREC_AVX512 or MIXPREC_NEON.
 *                                                Five source files, with equal options, make the
 *                                                implementation, and cores compile them at the
 *                                                same time: src/parts/. A set that the compiler's
 *                                                target does not have is an empty file. Not with
 *                                                MIXPREC_STATIC
 *     MIXPREC_STATIC           every file        everything static: a private copy
 *     MIXPREC_API              every file        your own linkage, such as __declspec(dllexport)
 *     MIXPREC_HD               one file          defined as extern, in a file without the
 *                                                implementation: the API's inline functions
 *                                                become real ones, for a shared library
 *     MIXPREC_ONLY_FORMATS     every file        only formats and conversions of arrays: a
 *                                                fifteenth of the compile time
 *     MIXPREC_NO_SIMD          implementation    scalar code only
 *     MIXPREC_ALL_ISAS         implementation    all instruction sets. Without it, flags that
 *                                                guarantee one (-march=native) leave out older
 *                                                ones
 *     MIXPREC_CBLAS            implementation    f32 products by cblas_sgemm of your BLAS
 *     MIXPREC_THREADS          implementation    POSIX threads without OpenMP, one for each core
 *                                                that the process may use
 *     MIXPREC_NO_POSIX         implementation    checkpoints by stdio only: see CHECKPOINT
 *     MIXPREC_NO_RANKS         every file        leaves out many ranks: mixp_ranks_... functions
 *                                                are not declared, and mixp_context_new fails if
 *                                                `ranks` of its description is set
 *     MIXPREC_NO_WATCH         every file        leaves out the guard: no function of watch, retry
 *                                                or mixp_observe is declared
 *     MIXPREC_NO_RECIPES       every file        leaves out products below 16 bits: no function of
 *                                                recipes is declared, and a region with a recipe
 *                                                fails
 *     MIXPREC_NO_CHECKPOINT    every file        leaves out files: checkpoints and safetensors,
 *                                                whose functions are not declared
 *     MIXPREC_SMALL            implementation    clang optimises all but conversions and products
 *                                                for size; other compilers ignore it
 *     MIXPREC_ASSERT(x)        implementation    internal checks; off unless defined. A
 *                                                failed check is a bug in mixprec
 *     MIXPREC_SELF             implementation    this file's name, if you renamed it
 *
 * Memory comes from the allocator in mixp_context_desc.
 *
 * INSTRUCTION SETS: at run time a context uses the fastest set that the CPU supports (mixp_cpu)
 *
 *     x86-64     AMX (AMX_F16 with AMX-FP16), else AVX-512, on AMD with AVX512_BF16, else AVX2 with
 *                F16C, else plain C
 *     AArch64    NEON, with FMLAL and BFMLAL where Linux reports them
 *     others     plain C
 *
 * You need no -march. Products and attention of f16 and bf16 give different results with AMX than
 * without it, and AVX512_BF16 flushes subnormals: see SAME BITS. For bit-identical results on every
 * machine with SIMD set portable_bits of mixp_context_desc. The context then uses the fastest of
 * AVX-512, AVX2 and NEON, which are bit-identical. mixp_cpu_with selects a set by name. If ranks on
 * CPUs differ in AMX (none, AMX, AMX_F16), their first step fails with MIXP_ERR_RANKS. A checkpoint
 * that was saved with AMX loads on every machine. If the context's products round differently from
 * those of the file, the load gives a warning.
 *
 * AMX is used on Linux, if the system saves tiles and grants them to the process, and if test
 * products have the known results. Otherwise the context uses AVX-512, without an error;
 * mixp_self_check reports why. mixp_cpu requests the tiles. From then on Linux refuses signal
 * stacks below AT_MINSIGSTKSZ (some 12 KB; see getauxval), and it refuses tiles if a thread has a
 * smaller one already. A signal may arrive in any product, and a child of fork may use tiles. Each
 * thread configures its tiles for an operator and releases them after it: tiles of your own,
 * configured before a call of mixprec in the same thread, are lost. Tiles round to nearest even and
 * flush subnormals of bf16 and f32 whatever MXCSR says; all other instructions follow MXCSR.
 *
 * Several processes or machines train one model through mixp_ranks_desc. With mixprec_cuda.cu
 * beside this file, the same programs run on a GPU: see mixp_cuda, and mixp_capture_begin for
 * graphs.
 *
 * SAME BITS: results that are bit-identical in one build of a program, without fast-math
 *
 *                                            runs, threads,  instruction      CPU and
 *                                            resume          sets             CUDA
 *     conversions, casts, copies             same            same             same
 *     random numbers, dropout                same            same             same
 *     + - * / relu sqrt scale, embedding     same            same             same
 *     maximum, minimum, abs, clamp, where,
 *     max, gather, squares of relu,
 *     comparisons, topk, prod, cumsum,
 *     scatter_add                            same            same             same
 *     quantised operands of recipes          same            same             same
 *     unscale, clip, scaler, optimizers
 *     but Muon                               same            same             same; norm: 2^-22
 *     other elementwise, sums, softmax,
 *     norms, losses                          same            same             close
 *     products of f16 and bf16               same            same but AMX     close
 *     products with an f32 factor            same            all SIMD same    close
 *     attention                              same            SIMD but AMX     close
 *
 * ANY BATCH: on a CPU a row's result is bit-identical whatever other rows are in its batch,
 * whatever follows it in its sequence, and with or without a cache of keys and values (the field
 * `past` of mixp_attention_desc, `first` of mixp_rope_desc). So training, evaluation and
 * generation token by token are bit-identical. This covers the forward pass of every operator, on
 * each instruction set (also AMX), at each level, at any number of threads. Exceptions: results
 * made from the batch (means, batch norm in training), dropout, recipes whose scales are made from
 * the batch (FP8_CURRENT, NVFP4 without row_scaled), MIXPREC_CBLAS, and a GPU,
 * where cuBLASLt chooses by shape. Under the other recipes (MXFP8, FP8_BLOCK, FP8_DELAYED, NVFP4
 * with row_scaled, each also with 4over6) the rule holds among batches that they quantise, whose
 * numbers of rows are multiples of 16, 32 or 128; in other batches a linear stays bf16. Under a
 * guard or FP8_DELAYED the rule holds between two updates. With a cache under a guard it holds only
 * while no site has fallen back, because attention with a cache, and the operators after it, are
 * other sites.
 *
 * The first row holds under any flags, rounding mode and FTZ/DAZ. The first column holds in each
 * rounding mode, and with FTZ or DAZ set or not: all threads of a call run in the caller's mode.
 * For + - * / the table covers the forward pass.
 *
 * Exceptions that a host lets trap (feenableexcept, -ffpe-trap; all but inexact) do not trap in a
 * call of mixprec, on x86-64 and AArch64: an overflow of f16 is an ordinary event of loss scaling.
 * They do trap where your own code computes with an Inf or NaN that a call returned.
 *
 * The last two rows: SIMD rounds a product and its sum once. Plain C rounds twice where fmaf would
 * be a function call. A product of two f16 or bf16 numbers is exact, so both are bit-identical. A
 * product with an f32 factor is not exact, and attention multiplies v by probabilities in f32 (AMX:
 * by 16 bits of each probability).
 *
 * AVX512_BF16 counts a subnormal as 0, and AMX has its own order of sums. Each set is bit-identical
 * on every machine that has it, at any number of threads. docs/bits.md has the order of each sum.
 *
 * With portable_bits every row of the second column is bit-identical on all machines with SIMD.
 *
 * AMX, AVX512_BF16, FMLAL and BFMLAL each compute a product with a known answer before they are
 * used.
 *
 * `close`: tests/cuda/ has the bounds. A NaN is a NaN everywhere; its payload depends on the
 * processor. With MIXPREC_CBLAS, f32 products are those of your BLAS.
 *
 * NOT DETECTED: these mistakes have no error, because each may be intended. The right column lists
 * their symptoms. All other known mistakes of users are errors, with a message that says what to
 * do.
 *
 *     mixp_zero_grad is missing, without a         gradients add up: the verdict's grad_norm grows
 *       scaler or with a constant scale              from step to step
 *     a weight is written without                  under autocast nothing changes; a low weight
 *       mixp_tensor_touch                            with a master has its old value after a step
 *     host data has another dtype than you         mixp_read returns other numbers than your data;
 *       passed: mixp_input_f32 and its relatives     not seen if only mixp_input reads them
 *       let the compiler see it
 *     a view has another dtype than its memory,    training continues, but weights and losses
 *       such as doubles under MIXP_F32: use          differ from the same program with arrays of
 *       mixp_view_f32, mixp_view_f64 ...             float
 *     a parameter is not initialised               it is 0, and earlier layers get gradients of 0;
 *                                                  a warning, on the CPU, if both stay 0
 *     q, k and v are in PyTorch's layout: use      the shapes are the same if t equals heads;
 *       mixp_scaled_dot_product_attention            otherwise each row mixes heads with time
 *     your operator reads or writes float          its numbers are wrong in a region of f16 or
 *       arrays without MIXP_CLASS_ALL_F32            bf16, and right outside of it
 *     your operator's forward leaves elements      they have the values that the memory had before
 *       of its result unwritten
 *     you read the loss scale, but do not          grad_norm is too small, by the factor of the
 *       multiply your own gradients by it            scale
 *     the losses of n micro-batches are not        grad_norm is n times as large as with one batch
 *       divided by n
 *     micro-batches (or ranks) with unequal        the mean of their means is not the mean of the
 *       numbers of targets have equal weights        batch: a target of a small micro-batch counts
 *                                                    more
 *     the memory of mixp_input_view changes        gradients belong to the new values
 *       before mixp_backward
 *     a recipe or a guard is on, but no region     mixp_autocast_recipe_counts stay 0; mixp_site
 *       is open                                      finds no site
 *     schedule.total counts epochs                 mixp_optimizer_lr reaches its end early
 *     the second of two scalers is not saved       after a resume its loss scale is init_scale
 *     a tensor is used two steps later or more     usually an error; otherwise its values are those
 *                                                    of a tensor of this step
 *     another number, such as a probability,       mixp_context_warning, if a built-in operator
 *       is passed to a loss of logits                made it
 *     attention has a mask of 0 and 1              no key is hidden: the mask is added to the
 *                                                    scores; write 0 and -Inf
 *     mixp_zero_grad in each micro-batch           only the last micro-batch counts: grad_norm is
 *                                                    that of one
 *     two threads use one context at a time        errors that name other causes, or a crash: one
 *                                                    thread at a time, or a context for each
 *     two optimizers step the same parameter       it moves twice per step
 *     targets of mixp_bce_with_logits are not      the loss becomes negative, and logits grow
 *       in [0, 1], such as bytes
 *     batch_norm has training 1 in an              the running statistics move, and results depend
 *       evaluation                                   on the batch
 *     a scaler or an optimizer is freed after      a crash: free them before the context, or not at
 *       its context                                  all
 *
 * FROM PYTORCH: docs/pytorch.md has mixprec's call for each call of PyTorch. examples/amp has one
 * program for each section of PyTorch's page of AMP examples.
 *
 * DOES NOT: compile graphs, run Python, convolve, stride (tensors are row-major and dense), train
 * tokenizers, print, exit or abort. There is no double backward: a gradient is a constant and never
 * part of a loss, so operators accept a gradient only under MIXP_NO_GRAD. A derivative by an input
 * or a weight, or the norm of a gradient, may be part of a loss: see mixp_jvp and penalty.c.
 */
