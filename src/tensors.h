#pragma once
#include "device.h"
/* ==== 5. TENSORS ======================================================= >>tensors ====
 *
 * Everything made from a context lives until the context is freed. Graphs, scalers and optimizers
 * can be freed earlier. Activations live until the next mixp_step_begin. A context and everything
 * made from it belong to one thread at a time. Two contexts are independent.
 */
typedef struct mixp_context mixp_context;
typedef struct mixp_ranks_desc mixp_ranks_desc;     /* see RANKS */
typedef struct mixp_tensor  mixp_tensor;

/* A gradient's scale tag: the loss scale that the gradient was multiplied by. The backward walk
 * writes the tag; clip, unscale and step read it. No other code reads it. */
typedef struct mixpi_mark {
    const void *by;             /* the scaler, or NULL                                     */
    uint64_t    at;             /* which of the scaler's scales                            */
    uint64_t    seen;           /* the scaler's update count when it unscaled or stepped this
                                   gradient; 0 = not yet */
    int         kind;
} mixpi_mark;

/* Fields are read-only: write through functions. Data is always row-major and dense. */
struct mixp_tensor {
    mixp_context *ctx;
    const char   *name;         /* "" = no name                                            */
    mixp_dtype    dtype;
    int           rank;         /* 0 = a scalar                                            */
    int64_t       shape[MIXP_MAX_RANK];
    int64_t       count;        /* product of shape                                        */
    void         *data;         /* device memory                                           */
    mixp_tensor  *grad;         /* NULL until a backward pass fills it                     */
    int           requires_grad;
    uint64_t      version;      /* incremented by every write; keys the cast cache         */
    struct mixpi_tensor_private {
        const mixp_tensor *self;/* sanity check: own address; differs in recycled memory    */
        const mixp_context *of; /* second check: the arena may have overwritten only the front of a
                                   dead tensor */
        mixp_tensor *grad;      /* storage of the gradient, filled or not                  */
        mixp_tensor *low[2];    /* cached f16 and bf16 copies                              */
        struct mixpi_weight_copy *quantised[2]; /* values for a recipe's products over the
                                   columns, the rows; blocks that suit both: over the columns */
        mixp_tensor *master;    /* tensor that a cached copy was cast from                  */
        mixp_tensor *origin;    /* tensor whose memory a reshape shares                     */
        const char  *writer;    /* the call that last wrote this tensor; NULL = unknown    */
        mixp_tensor *next;      /* next in the context's list of permanent tensors         */
        mixp_tensor *kept;      /* gradient that the user asked to keep of an activation      */
        int          pending;   /* 1: own.grad holds a gradient that is not yet walked back. Of a
                                   leaf: the current walk has written to own.grad          */
        mixpi_mark   mark;      /* scale tag: what a gradient was multiplied by             */
        uint64_t     low_version[2]; /* version of this tensor in each copy                 */
        uint64_t     generation;/* arena generation; 0 = permanent                         */
        int          walked;    /* 1: this loss was walked back                            */
        int          scaled;    /* 1: a scaler has multiplied this loss                    */
        int64_t      id;        /* key of this tensor's random numbers                     */
        int          from_tape; /* 1: result of a recorded operator: backward walks it     */
        const char  *made;      /* name of the operator that made the values; a cast, a view and
                                   detach pass it on; NULL = none                          */
        const char  *cut;       /* name of the operator without backward that blocks the gradient
                                   here */
        int          is_param;  /* 1: made by mixp_param                                   */
        int          is_grad;   /* 1: a gradient that a backward walk made                 */
        mixp_tensor *lent;      /* another gradient that reads this gradient's memory      */
        int          borrowed;  /* 1: a gradient whose memory belongs to another tensor    */
        int          disposable;/* 1: the program does not read the values again           */
        mixp_tensor *tangent;   /* while mixp_jvp runs: the derivative along its direction   */
        int          leads;     /* while mixp_jvp runs: 1: y depends on this tensor        */
        int          derivative;/* 1: mixp_jvp made it: if not recorded, it is a constant  */
        int          spilled;   /* 1: made in a block of mixp_recompute, and freed with it  */
        int          aliased;   /* 1: a tensor that is not on the tape reads this memory   */
        int          spent;     /* 1: the values are overwritten by their gradient, or freed */
        int          optimizers;/* number of a parameter's optimizers                      */
        struct mixpi_backup *backup;    /* record of a buffer; otherwise NULL              */
        uint64_t     loaded;    /* version of a weight when a file or another rank last wrote all of
                                   it; 0 = never */
        uint64_t     read_in;   /* generation of a frozen parameter's last reader          */
        uint64_t     walks;     /* number of writes to a gradient by backward walks  */
        uint64_t     walks_then;/* `walks` at the last update, if no optimizer had the parameter */
        uint64_t     others_then;   /* 1 + other writes at the last update; 0 = the gradient did not
                                       exist                                               */
        struct mixpi_tensor_of_watch {  /* 0 without a guard                               */
            mixp_tensor *seen;  /* input of a cast, reshape or dropout                     */
            int site;           /* site that made an activation, from 1; 0 = data            */
            float written;      /* magnitude of a constant that an operator wrote here: a mask's
                                   Inf; 0 = none */
            mixp_dtype raised;  /* the low dtype without a guard's fallback; MIXP_F32 = the guard
                                   changed nothing                                         */
        } watch;
        struct mixpi_tensor_of_ranks {  /* 0 without ranks                                 */
            int64_t leaf;       /* 1 + place in the arena of gradients; 0 = none           */
            int     divided;    /* 1: a parameter's optimizer states are sharded           */
            int     in_pieces;  /* 1: only this rank's piece of a gradient is valid        */
        } ranks;
    } own;
};

typedef struct mixp_context_desc {
    const mixp_device *device;                      /* NULL = mixp_cpu()                   */
    void *(*allocate)(size_t bytes, void *user);    /* aligned as malloc's; NULL = malloc  */
    void  (*release)(void *p, void *user);          /* NULL = free; both or neither        */
    void     *user;
    uint64_t  seed;                                 /* seed of dropout, initialisation, rounding */
    int       threads;                              /* 0 = OpenMP's number, or the number of cores
                                                       (MIXPREC_THREADS); without both, any number
                                                       means 1                             */
    void     *stream;                               /* GPU: your cudaStream_t; NULL = a stream of
                                                       the context: see below              */
    mixp_allocator device_allocator;                /* GPU: unset = cudaMalloc             */
    const char **why;                               /* set to the reason when no context is made: a
                                                       constant string, or ""              */
    void (*on_error)(mixp_result code, const char *message, void *user);
                                                    /* called with the first error, and with the
                                                       next one after a clear, when the outermost
                                                       call returns. It may read and clear the
                                                       error. In C++ it may throw. NULL = not
                                                       called                              */
    void (*on_warning)(const char *message, void *user);
                                                    /* called once, like on_error, with the text of
                                                       mixp_context_warning. NULL = not called */
    const mixp_ranks_desc *ranks;                   /* NULL = one rank; copied             */
    void     *memory;                               /* your block for all host memory: see below.
                                                       NULL = use the allocator            */
    size_t    memory_bytes;
    int       epilogues;                            /* GPU: MIXP_EPILOGUES_ flags; 0 = those
                                                       measured to be faster on this kind of GPU
                                                       (9.0: GELU_BF16)                     */
    const char *gemm_choices;                       /* GPU: a text from mixp_context_gemm_choices,
                                                       or NULL; copied                     */
    int       gemm_measure;                         /* GPU: 1: time the library's algorithms once
                                                       for each new shape and keep the fastest: see
                                                       mixp_context_gemm_choices           */
    int       narrow_products;                      /* GPU: 1: products of recipes in the library's
                                                       fp8 and fp4: see below              */
    int       f32_gradients;                        /* 1: the gradients of f16 and bf16 parameters
                                                       are f32, so that sums of many micro-batches
                                                       lose nothing; 4 bytes per element. The same
                                                       on all ranks. 0: the parameter's dtype */
    int       portable_bits;                        /* 1: the context's device is the CPU with the
                                                       fastest instruction set that is bit-identical
                                                       on all machines with SIMD: neither AMX nor
                                                       AVX512_BF16; `device` must be NULL.
                                                       0: `device`, or mixp_cpu()          */
} mixp_context_desc;

/* NARROW PRODUCTS. A recipe's products are bf16 products of decoded values. With narrow_products =
 * 1 a GPU multiplies their codes, where cuBLASLt has the format:
 *
 *     FP8_CURRENT, FP8_DELAYED   capability 8.9 and up
 *     FP8_BLOCK                  9.0, cuBLASLt 12.9
 *     MXFP8, NVFP4               10.0 and up, cuBLASLt 12.8
 *
 * mixprec asks cuBLASLt once for each shape. A product that cuBLASLt refuses stays a bf16 product;
 * one warning names the first, and mixp_context_gemm_count counts both kinds. The operands have the
 * same values either way, but the sums may round more: on capability 9.0 the tensor cores keep
 * about 14 bits of fp8 sums between additions in f32 (DeepSeek-V3, 3.3.2). An Inf in MXFP8 becomes
 * NaN; bf16 products preserve the Inf. Codes and scales need scratch memory: about 1 byte for each
 * element of both operands. On an H100 narrow_products saved no time (docs/gpu.md): keep it off
 * until you have measured it on your GPU. The CPU ignores narrow_products. */

/* Operations that a matrix product on a GPU can do in its own pass. If a description has epilogues
 * 0, the device chooses the flags: GELU_BF16 on capability 9.0, none elsewhere (docs/gpu.md).
 * Measure others on your GPU with gemm_measure or tests/bench/bench_cuda. cuBLASLt's tanh may be
 * off by 2^-11, which is less than the rounding of bf16. A CPU ignores all flags. */
enum {
    MIXP_EPILOGUES_BIAS = 1,    /* the bias gradient, in the product of the weight gradient */
    MIXP_EPILOGUES_GELU = 2,    /* GELU by tanh, and its slope, in mixp_mlp                 */
    MIXP_EPILOGUES_NONE = 4,    /* no epilogue, even if the device would choose one; do not combine
                                   it with other flags                                     */
    MIXP_EPILOGUES_GELU_BF16 = 8    /* GELU, where mixp_mlp computes in bf16               */
};

/* EXCEPTIONS. on_error, on_warning, an operator's functions and a hook may throw (or longjmp).
 * Other callbacks (allocators, observers) must not. After an
 * exception, call mixp_context_clear_error and then mixp_step_begin: the state is then consistent.
 * The walk in progress has failed, and its gradients are forgotten. Call mixp_context_clear_error
 * where you catch, or further up the stack. A call from deeper on the stack is refused once,
 * because the function cannot know that the abandoned calls are gone. Compile the implementation
 * as C++ or with -fexceptions (not needed on x86-64 and AArch64).
 *
 * On a GPU all work of a context runs on one stream. Your own kernels and copies are ordered with
 * it if they are on the same stream. If the stream is the context's own, work on the legacy default
 * stream (plain <<<grid, block>>> and cudaMemcpy) is ordered with it as well. With any other
 * stream, use events. A program compiled with --default-stream per-thread passes
 * cudaStreamPerThread.
 *
 * desc NULL = all defaults. Returns NULL on error and sets desc->why: out of memory, half an
 * allocator, threads below 0 or above 4096, an unknown epilogue, portable_bits with a device, or a
 * device or stream that cannot be used.
 *
 * Threads: their default number is OpenMP's, or that of the cores. On Linux it obeys the affinity
 * mask (taskset) and a container's CPU quota, unless OMP_NUM_THREADS is set. On POSIX systems the
 * threads are the context's own, unless OMP_PROC_BIND is set, which selects OpenMP's. Waiting
 * threads sleep, and a loop does not wait for a thread that has no core, so on a busy machine two
 * threads are no slower than one. Small work runs in the calling thread, with the same bits.
 *
 * fork: a child starts its own threads. OpenMP's threads may hang in a child once the parent has
 * used them: fork before the first step, or set threads 1 for the child's context.
 *
 * pthread_cancel: do not cancel a thread during a call of mixprec. Locks of the context's threads
 * and the temporary file of a save would remain. Ask the thread to stop between steps.
 *
 * memory: a block, such as a static array, instead of an allocator. On a CPU all memory of the
 * context is in the block, including buffers of checkpoints. mixprec then never calls malloc;
 * libc and OpenMP's threads may (compile without -fopenmp, or set threads 1). To find the size, run
 * once with a large block and read mixp_context_memory(ctx).block. If the block is too small, a
 * call fails with MIXP_ERR_MEMORY, or there is no context. You may reuse the block after
 * mixp_context_free.
 *
 * device_allocator supplies GPU memory, aligned to 256 bytes. It is called with that GPU current.
 * It gets memory back only after all queued work that uses it. Pinned memory always comes from
 * cudaMallocHost. */
MIXPREC_API mixp_context *mixp_context_new(const mixp_context_desc *desc);

/* Frees the context and everything made from it. NULL is allowed. */
MIXPREC_API void mixp_context_free(mixp_context *ctx);

/* Returns the first error since the context was made or mixp_context_clear_error cleared it;
 * MIXP_OK = none. mixp_context_error sets *message (if message is not NULL) to the error's text,
 * "" for none. The text lives in the context. */
MIXPREC_API mixp_result mixp_context_error(const mixp_context *ctx, const char **message);
MIXPREC_API void        mixp_context_clear_error(mixp_context *ctx);

/* Returns the context's first warning, "" for none. The text lives in the context. A warning
 * changes nothing and is no error. It has one of these causes:
 *
 * - f16 gradients of a loss that no scaler has multiplied become 0. The 1st, 2nd, 4th, ... 64th
 *   mixp_backward that meets unscaled f16 gradients counts them. It warns if more than 5 % of the
 *   values that were not 0 were flushed, in gradients whose largest value is below 2^-10, by the
 *   estimate of mixp_look. Not counted: steps under a guard, which stores such gradients in f32,
 *   captured steps, and comparisons. On a GPU those walks wait for the device.
 * - A training step's regions of f16 or bf16 stored nothing in that dtype, because their operators
 *   keep the dtype of their f32 inputs. The next mixp_step_begin or mixp_eval_begin gives this
 *   warning.
 * - A recipe does not fit the sizes of a linear: see mixp_recipe.
 * - narrow_products is set, but cuBLASLt has no such product: see NARROW PRODUCTS.
 * - A recipe has `codes`, but no linear of a training step kept its input as codes. The next
 *   mixp_step_begin or mixp_eval_begin gives this warning.
 * - A loss gets values of the wrong kind: mixp_cross_entropy or mixp_bce_with_logits of a softmax
 *   or an activation (relu, tanh, ...), mixp_nll or mixp_kl_div of one of those or of a linear, and
 *   a target of mixp_kl_div that does not fit log_target.
 * - On the CPU: no target of a cross entropy or of mixp_nll counts. On each device: a step was
 *   applied although its loss is not finite (mixp_scaler_verdict gives this warning).
 * - A step reads and writes a frozen parameter in a loop of mixp_retry: use mixp_buffer.
 * - mixp_tensor_touch declares a write of a buffer that mixp_buffer_save has not kept.
 * - A step without a scaler, or with a disabled one, has made an element of a buffer Inf or NaN. A
 *   replay does not give this warning.
 * - mixp_sub broadcasts [n, 1] and [n] to [n, n], as for predictions less targets.
 * - Dropout is on in a step of mixp_eval_begin.
 * - max_norm of mixp_clip_grad_norm is 0, or all rates of an optimizer are 0 at its step 20.
 * - On the CPU: two weights and their gradients are 0 at their optimizer's step 20. On each
 *   device: a trainable parameter has had no gradient before its optimizer's step 100.
 * - Each of four training steps in a row has made a scaler or an optimizer.
 * - A loaded weight is Inf or NaN in the file, or becomes Inf in the parameter's dtype, or an fp8
 *   weight's scale was ignored.
 * - A group of an optimizer has no parameter at a step. Group 0 may be empty.
 * - A parameter whose master has 16 or 8 bits is written before each of four steps in a row: the
 *   master loses all digits that the weight lacks.
 * - A bf16 or f16 weight has no master, and the rate is below half a unit in the last place of most
 *   of its elements. Given at the first step.
 * - A step of several ranks reads and writes a frozen parameter. Given at the write and at a save.
 * - A checkpoint was saved between the micro-batches of an update.
 * - A loaded checkpoint was saved by an instruction set whose products of f16 and bf16 round
 *   differently (AMX, AMX_F16, any other set of a CPU). */
MIXPREC_API const char *mixp_context_warning(const mixp_context *ctx);

/* Reports an error from your own operator. Keeps the first error, formats like printf, returns
 * code. */
MIXPREC_API mixp_result mixp_context_fail(mixp_context *ctx, mixp_result code,
                                          const char *format, ...)
#if MIXPI_GNU
    __attribute__((__format__(__printf__, 3, 4), __cold__))
#endif
    ;

/* Records a complete step as a GPU graph; a replay needs no work of the host. Capture the calls
 * from mixp_step_begin to mixp_scaler_update, after an ordinary step has allocated all memory. A
 * capture records and does not run.
 *
 * A replay first re-reads the host memory that mixp_input and mixp_write were given, then runs the
 * step. Keep that memory, with the next batch in it. Each call has its own memory, so a step may
 * hold several batches. Random numbers are fresh in each replay. Schedule, loss scale and skipped
 * steps continue as usual, but replays do not detect MIXP_ERR_DIVERGED. A replay ignores later
 * changes to groups, the scaler's rule and autocast. A parameter that you write between replays
 * keeps its old low copy and master weight; a buffer may be written. Launch your own kernels on the
 * stream of mixp_context_exec(ctx), which is a different stream during a capture. During a
 * capture call no CUDA function that allocates or waits (cudaMalloc, cudaEventSynchronize): it ends
 * the capture. The graph lives until you free it or the context. After a replay you may read the
 * tensors of its step, until the next mixp_step_begin; the capture of a second graph calls it too.
 * With two graphs, copy each loss to your own tensor within its step (mixp_copy).
 *
 * mixp_capture_end returns NULL on error, also if a call has failed since mixp_capture_begin: the
 * graph would lack the work of that call. The context keeps the first error.
 *
 * MIXP_ERR_DEVICE: the device has no graphs (no CPU has). MIXP_ERR_ORDER: a call in the capture
 * allocated, waited, or multiplied shapes that no earlier step had; a low weight was written since
 * the last ordinary step, which would copy it into its master; a low weight has two optimizers with
 * masters; a capture is already in progress; or mixp_capture_end was called without one. A failed
 * capture leaves the step count unchanged. */
typedef struct mixp_graph mixp_graph;
MIXPREC_API mixp_result mixp_capture_begin(mixp_context *ctx);
MIXPREC_API mixp_graph *mixp_capture_end(mixp_context *ctx);
MIXPREC_API mixp_result mixp_replay(mixp_graph *graph);
/* Waits until the device has finished the graph, then frees it. NULL is allowed. MIXP_ERR_ORDER: a
 * capture is in progress. */
MIXPREC_API mixp_result mixp_graph_free(mixp_graph *graph);
/* 1: a site changed its stored dtype (see WATCH) after the graph was recorded. The graph still
 * replays safely with the old dtypes. To use the new ones, run an ordinary step, which allocates
 * what the new dtypes need, and record again. A guard samples no replay: when mixp_guard_due
 * returns 1, run an ordinary step instead. */
MIXPREC_API int         mixp_graph_stale(const mixp_graph *graph);

/* Device memory of a context, in bytes. used: in use now. peak: most ever in use. allocations:
 * number made since the context was made. allocated: bytes obtained from the device, including
 * kernels' scratch memory and gaps between buffers: a GPU needs at least this much free memory. */
typedef struct mixp_memory {
    size_t  used, peak;
    int64_t allocations;
    size_t  allocated;
    size_t  block;              /* of mixp_context_desc.memory: bytes ever used, from the start of
                                   the block. A block of this size is enough for the same run, at
                                   an address that is a multiple of 64 (elsewhere: up to 63 bytes
                                   more); 0 = no block */
} mixp_memory;
/* All zeros if ctx is NULL. */
MIXPREC_API mixp_memory mixp_context_memory(const mixp_context *ctx);
/* The step count; 0 if ctx is NULL. With ranks each step adds their number: one for each part of
 * the batch. */
MIXPREC_API uint64_t    mixp_context_steps(const mixp_context *ctx);
/* How the context's products were computed so far: read this when a GPU is slow. Zeros on a CPU. */
MIXPREC_API mixp_gemm_count mixp_context_gemm_count(const mixp_context *ctx);
/* Writes the library's algorithms of the context's products as text, one line for each shape. Pass
 * the text as gemm_choices of the next context, on this GPU or another GPU of the same kind with
 * the same libraries. Shapes in the text then get the same algorithm, so the same bits, without a
 * query. Other shapes are chosen as usual. Returns the bytes needed, including the final 0, and
 * writes as many as fit in size. The text is "" on a CPU. Call it after a step.
 *
 * If the text does not match, mixp_context_new fails, and desc->why states whether the text is
 * truncated, not one of these texts, or from another GPU or library. A choice that the library
 * refuses later is MIXP_ERR_DEVICE at its product. Lines are passed to the library unchecked: pass
 * only texts that you trust.
 *
 * Determinism. Without gemm_measure a shape gets the first algorithm that the library offers and
 * accepts: the same in each run on one kind of GPU with one version of the library. With
 * gemm_measure the first product of a shape times what the library offers (24 at most). It keeps
 * the fastest one that is at least 2 % faster than the first. Two measuring runs may choose
 * differently, so their bits may differ. For the same bits, measure once, save this text, and
 * pass it to every later run, every resumed run and all ranks. Shapes in the text are not
 * measured again. The flags of desc->epilogues are measured as well: if a product followed by a
 * separate kernel is faster, the text says "none" for the fused form, and the two run
 * separately. Measuring warms the GPU up, waits for it and takes some seconds in the first step.
 * For products that add to their result it borrows memory for one result; without that memory
 * the first algorithm stays. */
MIXPREC_API size_t mixp_context_gemm_choices(const mixp_context *ctx, char *text, size_t size);
/* mixp_context_exec: the execution settings that the context passes to kernels.
 * mixp_context_device: its device. Both are for your own operators. Both live as long as the
 * context; NULL if ctx is NULL. */
MIXPREC_API const mixp_exec   *mixp_context_exec(mixp_context *ctx);
MIXPREC_API const mixp_device *mixp_context_device(const mixp_context *ctx);

/* MIXP_SHAPE(64, 16): two arguments of a call, the rank and the sizes, in C and in C++:
 * mixp_param(ctx, "w", MIXP_F32, MIXP_SHAPE(64, 16)). The sizes last until the call returns. C++
 * evaluates each size twice, and refuses one that int64_t may not hold, such as a size_t. */
#ifdef __cplusplus
#  define MIXP_SHAPE(...)                                                \
    static_cast<int>(std::initializer_list<int64_t>{ __VA_ARGS__ }.size()), \
        std::initializer_list<int64_t>{ __VA_ARGS__ }.begin()
#else
#  define MIXP_SHAPE(...)                                             \
    (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (int64_t[]){ __VA_ARGS__ }
#endif

/* Makes a trainable tensor: zeroed, permanent, requires_grad. dtype: f32, f16 or bf16. rank: 0..8.
 * Every dimension >= 1. name is copied, and must be unique among the context's parameters unless it
 * is "". Call it before the loop: parameters or views made in four consecutive training steps are
 * MIXP_ERR_ORDER. Add a parameter that gets gradients to an optimizer (see mixp_optimizer_add), or
 * freeze it with mixp_tensor_set_requires_grad(t, 0). NULL on error. */
MIXPREC_API mixp_tensor *mixp_param(mixp_context *ctx, const char *name, mixp_dtype dtype,
                                    int rank, const int64_t *shape);
/* Like mixp_param, with a name made as by printf: mixp_param_named(ctx, MIXP_F32, 2, shape,
 * "h.%d.w", i). MIXP_ERR_ARGUMENT: format is NULL, or the name has more than 255 bytes. */
MIXPREC_API mixp_tensor *mixp_param_named(mixp_context *ctx, mixp_dtype dtype, int rank,
                                          const int64_t *shape, const char *format, ...)
#if MIXPI_GNU
    __attribute__((__format__(__printf__, 5, 6)))
#endif
    ;

/* BUFFERS. A buffer is a tensor that a step writes besides the weights: the state that a recurrent
 * net carries from step to step, running statistics, a codebook, a queue, a teacher. (The word is
 * PyTorch's.) A buffer has no gradient and no optimizer. Checkpoints and files of weights store it
 * under its name. A guard names sites as if the buffer were a batch. It reports a buffer that is
 * not finite as MIXP_ORIGIN_WEIGHT.
 *
 * A write is visible at once to the operators that follow in the step. If the update skips the
 * step, every buffer gets back the bytes from before the step. So a skipped batch does not count,
 * and a batch that mixp_retry tries three times counts once.
 *
 *     mixp_tensor *h = mixp_buffer(ctx, "h", MIXP_F32, 2, shape);         before the loop
 *     do {
 *         mixp_step_begin(ctx);  mixp_zero_grad(opt);
 *         ...  next = cell(ctx, x, h);  loss = ...
 *         mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
 *         mixp_copy(h, next);                   after mixp_backward, which reads h
 *         mixp_scaler_step(scaler, opt);
 *         mixp_scaler_update(scaler);           skipped: h is what it was
 *     } while (mixp_retry(scaler, 3));          a repeat starts from the same h
 *
 * Running statistics are written in the forward pass, by batch_norm of examples/conv.h:
 *
 *     norm_statistics kept = batch_norm_statistics(ctx, "bn", channels);  before the loop
 *     do {
 *         mixp_step_begin(ctx);  mixp_zero_grad(opt);
 *         ...  y = batch_norm(ctx, conv2d(ctx, x, w, NULL, NULL), gamma, beta, &kept, 1, 1e-5f);
 *         mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
 *         mixp_scaler_step(scaler, opt);
 *         mixp_scaler_update(scaler);           skipped: the batch does not count
 *     } while (mixp_retry(scaler, 3));
 *
 * INF AND NAN. A step that makes an element of a buffer Inf or NaN has overflowed, even if its loss
 * and its gradients are finite, for example if only tanh reads the state. The device skips the step
 * and restores the buffers. The verdict has MIXP_SKIP_BUFFER, the buffer's name and the element. A
 * guard treats this as an overflow in the forward pass: the loss scale stays, and the site that
 * overflowed falls back to f32. Without a guard the skip lowers the scale, as a loss of Inf does.
 * Without a scaler, or with a disabled one, the step is applied, with a warning and the same fields
 * in the verdict. mixp_retry_loss repeats an evaluation that does this.
 *
 * An element that was Inf or NaN before the window may stay so or change to the other: a mask, or a
 * running maximum that begins at -Inf. Writes by mixp_write, mixp_fill or mixp_init_... are
 * intended and not checked, unless mixp_copy, mixp_ranks_sum, mixp_ranks_max or your own code
 * writes the buffer in the same window. Integers are not checked, nor are writes after
 * mixp_scaler_step. A table that a step computes with new Inf, such as a mask, is no buffer: use an
 * activation, or a frozen parameter.
 *
 * THE WINDOW. A window begins with mixp_step_begin. It ends with the update: mixp_scaler_update, or
 * mixp_optimizer_step without a scaler. Several steps before one update (micro-batches) are one
 * window. A window's first write keeps the old bytes, in memory that the buffer then allocates and
 * keeps. The update restores the buffers, on the device and without a wait of the host, if it has
 * skipped any optimizer's step, or if its scaler has found Inf or NaN: where mixp_scaler_verdict
 * reports MIXP_STEP_SKIPPED. This holds in replays too; a captured step is a separate window.
 *
 * A write after the update stays: a teacher that follows the weights, for example. Two scalers may
 * update in one step: if either skips, a buffer gets the bytes from before the step, or, if the
 * step wrote it again after the first update, from before that write. A write before the first
 * mixp_step_begin stays. A program that never calls mixp_step_begin has no windows, and its buffers
 * are not restored. MIXP_NO_GRAD changes nothing. A write in an evaluation (mixp_eval_begin) stays;
 * mixp_retry_loss undoes it before the repeat, unless a micro-batch of the same window wrote the
 * buffer first. An evaluation between two micro-batches belongs to their window. Loading a file
 * ends a window. If a call fails in a step, and no update ends that step, the next
 * mixp_step_begin, mixp_eval_begin, mixp_capture_begin or mixp_replay undoes the step's writes,
 * except into buffers that a micro-batch before it in the window wrote first. A step that is left
 * without an error and without an update belongs to the window of the next step.
 *
 * RANKS. mixp_buffer_set_ranks says whose bytes count. An update sends the shared buffers that its
 * window has written. So all ranks must make the same buffers, and write a shared one in the same
 * steps, before mixp_scaler_step: each step compares this. If ranks differ, the step is skipped
 * with MIXP_ERR_RANKS, which names the buffer if all ranks run on CPUs: the weights are untouched.
 * If a buffer of any rank becomes Inf or NaN, all ranks skip, and their verdicts name that rank. A
 * write outside a window or after the update (a teacher) is not sent: all ranks must write the same
 * bytes there. */
typedef enum mixp_buffer_ranks {
    MIXP_BUFFER_OWN,            /* each rank has its own (an RNN's state). Not compared. A
                                   checkpoint stores one per rank: see mixp_checkpoint_save */
    MIXP_BUFFER_RANK_0,         /* at the update, all ranks get rank 0's bytes, as with PyTorch's
                                   broadcast_buffers. Compared by mixp_ranks_check         */
    MIXP_BUFFER_MEAN            /* at the update, all ranks get the mean (running statistics):
                                   summed in f32, divided, rounded once. f32, f16, bf16. Compared
                                   by mixp_ranks_check                                     */
} mixp_buffer_ranks;

/* Makes a buffer: zeroed, permanent, without a gradient. dtype: f32, f64, f16, bf16, i32, i64, u8.
 * Shape and name as in mixp_param, which shares its names with mixp_buffer. With ranks it is
 * MIXP_BUFFER_OWN. For a constant table use a frozen parameter, which a checkpoint stores once for
 * all ranks. NULL on error. */
MIXPREC_API mixp_tensor *mixp_buffer(mixp_context *ctx, const char *name, mixp_dtype dtype,
                                     int rank, const int64_t *shape);
/* Call it on all ranks, before the loop. MIXP_ERR_ARGUMENT: not a buffer, or a mean of integers. */
MIXPREC_API mixp_result mixp_buffer_set_ranks(mixp_tensor *buffer, mixp_buffer_ranks ranks);
/* Keeps the bytes of a buffer, as the first mixp_copy, mixp_write, mixp_fill or mixp_init_... of a
 * window does by itself. Call it before your own code writes buffer->data, and mixp_tensor_touch
 * afterwards. (mixp_recompute runs an operator's forward twice: do not write a buffer there.)
 * MIXP_ERR_ARGUMENT: not a buffer. MIXP_ERR_MEMORY: nothing changes. */
MIXPREC_API mixp_result mixp_buffer_save(mixp_tensor *buffer);
/* Returns buffer number i, from 0, in the order of mixp_buffer calls; NULL past the last.
 * mixp_context_find finds a buffer by its name; mixp_context_param and mixp_init_all leave buffers
 * out. */
MIXPREC_API mixp_tensor *mixp_context_buffer(const mixp_context *ctx, int64_t i);

/* Makes a permanent tensor over your memory (device memory of the context's device). mixprec never
 * copies or frees the memory; it must live as long as the context. Call it once, not in every step.
 * Call mixp_tensor_touch after you write to the memory. NULL on error. */
MIXPREC_API mixp_tensor *mixp_view(mixp_context *ctx, const char *name, mixp_dtype dtype,
                                   int rank, const int64_t *shape, void *data);

/* Makes an activation from a copy of host data of this dtype, valid until the next step: use it for
 * each batch. Every dimension >= 0. NULL on error. */
MIXPREC_API mixp_tensor *mixp_input(mixp_context *ctx, mixp_dtype dtype, int rank,
                                    const int64_t *shape, const void *host_data);

/* Like mixp_input without a copy: the activation uses your device memory, which must stay unchanged
 * until the next step. NULL on error. */
MIXPREC_API mixp_tensor *mixp_input_view(mixp_context *ctx, mixp_dtype dtype, int rank,
                                         const int64_t *shape, void *data);

/* Makes an activation with uninitialised data, valid until the next step. NULL on error. */
MIXPREC_API mixp_tensor *mixp_activation(mixp_context *ctx, mixp_dtype dtype, int rank,
                                         const int64_t *shape);

/* Matrix product for programs with their own backward pass. The matrices are in device memory, in
 * any mix of f32, f16 and bf16. Sums are f32: see mixp_gemm_args. On a GPU the product is queued on
 * the context's stream.
 *
 * MIXP_ERR_ARGUMENT: k is NULL; batch or alpha is 0 (usually both are 1: a 0 means that it was not
 * set); a size or a stride is negative; an array is missing; or c is a or b. MIXP_ERR_SHAPE: rows
 * are longer than their stride. MIXP_ERR_DTYPE: another dtype. */
MIXPREC_API mixp_result mixp_gemm(mixp_context *ctx, const mixp_gemm_args *k);

/* on 1: lets gradients flow into a view or an input (f32, f16 or bf16), from operators applied
 * after this call; an activation then keeps its gradient. on 0: freezes t, also for later walks
 * back of operators applied earlier.
 *
 * MIXP_ERR_ARGUMENT: on 1 for a buffer; on 0 for the result of an operator without an earlier on 1
 * (use mixp_detach). MIXP_ERR_DTYPE: on 1 for integers or fp8. MIXP_ERR_ORDER: t is from an
 * earlier step. */
MIXPREC_API mixp_result mixp_tensor_set_requires_grad(mixp_tensor *t, int on);

/* Declares that the program will not read t's values again. t must be an activation
 * (MIXP_ERR_ARGUMENT otherwise). The declaration saves memory in three places.
 *
 * mixp_cross_entropy writes the gradient over the logits, if a product made the logits and no other
 * operator reads them. With a large vocabulary, the logits are the largest array of a step. A
 * second walk back through such logits is MIXP_ERR_ORDER.
 *
 * mixp_add_layer_norm and mixp_add_rms_norm free their input b at once, if a product made b and no
 * operator read it before. A later read of b is MIXP_ERR_ORDER.
 *
 * mixp_linear frees its input x at once under a recipe with codes: see mixp_recipe. */
MIXPREC_API mixp_result mixp_tensor_set_disposable(mixp_tensor *t, int on);

/* Declares that you wrote t's data without a function of mixprec: cached low copies become stale.
 * If t is from an earlier step, the context gets the error MIXP_ERR_ORDER. */
MIXPREC_API void mixp_tensor_touch(mixp_tensor *t);

/* mixp_read copies all t->count elements to host memory of any dtype, mixp_write from host memory,
 * which mixprec does not keep. Both wait for the device.
 *
 * MIXP_ERR_ARGUMENT: host is NULL. MIXP_ERR_SHAPE: count is not t->count. MIXP_ERR_DTYPE: dtype is
 * not a mixp_dtype. MIXP_ERR_ORDER: t is from an earlier step. */
MIXPREC_API mixp_result mixp_read(const mixp_tensor *t, void *host, mixp_dtype dtype,
                                  int64_t count);
MIXPREC_API mixp_result mixp_write(mixp_tensor *t, const void *host, mixp_dtype dtype,
                                   int64_t count);
/* The same calls with typed pointers: mixp_view_f32(ctx, name, rank, shape, data),
 * mixp_input_i32(ctx, rank, shape, host_data), mixp_input_view_bf16, mixp_read_f64(t, host, count),
 * mixp_write_f16; for f32, f64, f16 (mixp_f16 *), bf16, i32, i64 and u8. Prefer them: a C compiler
 * warns of a pointer to another type (gcc 14: an error), and a C++ compiler refuses it. */
#define MIXPI_TYPED(type, element, dtype) \
    MIXPI_HOST mixp_tensor *mixp_view_##type(mixp_context *ctx, const char *name, int rank, \
        const int64_t *shape, element *data) \
    { return mixp_view(ctx, name, dtype, rank, shape, data); } \
    MIXPI_HOST mixp_tensor *mixp_input_##type(mixp_context *ctx, int rank, const int64_t *shape, \
        const element *host_data) \
    { return mixp_input(ctx, dtype, rank, shape, host_data); } \
    MIXPI_HOST mixp_tensor *mixp_input_view_##type(mixp_context *ctx, int rank, \
        const int64_t *shape, element *data) \
    { return mixp_input_view(ctx, dtype, rank, shape, data); } \
    MIXPI_HOST mixp_result mixp_read_##type(const mixp_tensor *t, element *host, int64_t count) \
    { return mixp_read(t, host, dtype, count); } \
    MIXPI_HOST mixp_result mixp_write_##type(mixp_tensor *t, const element *host, int64_t count) \
    { return mixp_write(t, host, dtype, count); }
MIXPI_TYPED(f32, float, MIXP_F32)
MIXPI_TYPED(f64, double, MIXP_F64)
MIXPI_TYPED(f16, mixp_f16, MIXP_F16)
MIXPI_TYPED(bf16, mixp_bf16, MIXP_BF16)
MIXPI_TYPED(i32, int32_t, MIXP_I32)
MIXPI_TYPED(i64, int64_t, MIXP_I64)
MIXPI_TYPED(u8, uint8_t, MIXP_U8)
#undef MIXPI_TYPED

/* Copies all elements of `from` to `to` on the device, without a gradient. The dtypes may differ;
 * the counts must be equal. Use mixp_copy to carry a state from one step to the next: `to` is then
 * a buffer (see BUFFERS). Copy after mixp_backward if mixp_backward reads `to`. Returns at once;
 * the copy runs in the order of the stream.
 *
 * MIXP_ERR_ORDER: a tensor is from an earlier step. MIXP_ERR_SHAPE: the counts differ. */
MIXPREC_API mixp_result mixp_copy(mixp_tensor *to, const mixp_tensor *from);
/* Returns the value of a one-element tensor; waits for the device. Read a loss of a training step
 * before mixp_eval_begin. NaN if t is NULL. NaN and MIXP_ERR_SHAPE if t has more than one element.
 * NaN and MIXP_ERR_ORDER if t is from an earlier step or evaluation. */
MIXPREC_API double mixp_item(const mixp_tensor *t);

/* mixp_fill sets every element to a value. mixp_init_normal and mixp_init_uniform are keyed by
 * (seed, t's id, element): the same values on every device. uniform: in (low, high), then rounded
 * to t's dtype, so that the result may be the rounded low or high. Numbers of normal beyond the
 * range of t's dtype become Inf, as PyTorch's do.
 *
 * MIXP_ERR_ARGUMENT: a finite value or a bound is beyond the range of t's dtype, low > high, or
 * std < 0. */
MIXPREC_API mixp_result mixp_fill(mixp_tensor *t, double value);
MIXPREC_API mixp_result mixp_init_normal(mixp_tensor *t, double mean, double std);
MIXPREC_API mixp_result mixp_init_uniform(mixp_tensor *t, double low, double high);
/* mixp_init_xavier_normal, _xavier_uniform, mixp_init_kaiming_normal and _kaiming_uniform are for
 * weights [out, in, ...], with fan_in = in * ... and fan_out = out * ... . The variance is
 * gain^2 * 2 / (fan_in + fan_out) (xavier: Glorot and Bengio, 2010) or gain^2 / fan_in (kaiming: He
 * et al., 2015). Values are normal, or uniform in +-sqrt(3 variance). gain: sqrt(2) before relu,
 * 5/3 before tanh, 1 elsewhere. MIXP_ERR_SHAPE: fewer than two dimensions. */
MIXPREC_API mixp_result mixp_init_xavier_normal(mixp_tensor *t, double gain);
MIXPREC_API mixp_result mixp_init_xavier_uniform(mixp_tensor *t, double gain);
MIXPREC_API mixp_result mixp_init_kaiming_normal(mixp_tensor *t, double gain);
MIXPREC_API mixp_result mixp_init_kaiming_uniform(mixp_tensor *t, double gain);

/* mixp_context_param returns parameter number i, from 0, in the order of mixp_param calls; NULL
 * past the last. mixp_context_find returns the parameter or buffer of this name, or NULL. NULL is
 * not an error here. Views are not included. The time of a call does not depend on their number. */
MIXPREC_API mixp_tensor *mixp_context_param(const mixp_context *ctx, int64_t i);
MIXPREC_API mixp_tensor *mixp_context_find(const mixp_context *ctx, const char *name);
/* Calls init(t, value) for each parameter whose name fits the pattern (* matches any characters, ?
 * matches one), oldest first: mixp_init_all(ctx, "*.weight", mixp_init_kaiming_normal, 1.4),
 * mixp_init_all(ctx, "*.bias", mixp_fill, 0). Stops at the first error and returns it.
 * MIXP_ERR_ARGUMENT: the pattern fits no parameter. */
MIXPREC_API mixp_result mixp_init_all(mixp_context *ctx, const char *pattern,
                                      mixp_result (*init)(mixp_tensor *, double), double value);
/* on 1: freezes each parameter whose name fits the pattern; on 0: they train again. The same as
 * mixp_tensor_set_requires_grad(t, !on) for each: mixp_freeze_all(ctx, "encoder.*", 1).
 * MIXP_ERR_ARGUMENT: the pattern fits no parameter. */
MIXPREC_API mixp_result mixp_freeze_all(mixp_context *ctx, const char *pattern, int on);

