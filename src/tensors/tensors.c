#pragma once
#include "backups.c"
/* --- tensors --------------------------------------------------------------------------- */

/* A tensor as an argument of kernels. NULL makes an argument without data. */
static mixp_in mixpi_tensor_in(const mixp_tensor *t) {
    return t ? mixpi_in(t->data, t->dtype) : mixpi_in(NULL, MIXP_F32);
}
static mixp_out mixpi_tensor_out(const mixp_tensor *t, int accumulate) {
    return t ? mixpi_out_to(t->data, t->dtype, accumulate) : mixpi_out_to(NULL, MIXP_F32, 0);
}

/* "[2, 3, 4]" for messages. */
static const char *mixpi_shape_text(int rank, const int64_t *shape, char *text, size_t room) {
    size_t at = 0;
    for (int i = 0; i < rank && at + 24 < room; i++)
        at += (size_t)snprintf(text + at, room - at, i ? ", %.0f" : "[%.0f", (double)shape[i]);
    snprintf(text + at, room - at, "%s", rank ? "]" : "[]");
    return text;
}

/* Checks that every dimension is at least `least` (0 or 1) and that the size in bytes fits
 * ptrdiff_t. */
static mixp_result mixpi_check_shape(mixp_context *ctx, const char *who, mixp_dtype dtype, int rank,
    const int64_t *shape, int least) {
    int64_t n = 1, size = (int64_t)mixp_dtype_size(dtype);
    if (!size)
        return mixp_context_fail(
            ctx, MIXP_ERR_DTYPE, "%s: %d is not a mixp_dtype", who, (int)dtype);
    if (rank < 0 || rank > MIXP_MAX_RANK || (rank > 0 && !shape))
        return mixp_context_fail(ctx, MIXP_ERR_SHAPE,
            "%s: rank %d with shape %s; the rank must be 0 to %d", who, rank,
            shape ? "given" : "NULL", MIXP_MAX_RANK);

    /* The size in bytes must stay one that memory can have. */
    for (int i = 0; i < rank; i++) {
        if (shape[i] < least)
            return mixp_context_fail(ctx, MIXP_ERR_SHAPE,
                "%s: dimension %d is %.0f; every dimension must be at least %d", who, i,
                (double)shape[i], least);
        if (shape[i] > PTRDIFF_MAX / size / n)
            return mixp_context_fail(ctx, MIXP_ERR_SHAPE,
                "%s: dimension %d (%.0f) makes the tensor larger than memory can be", who, i,
                (double)shape[i]);
        if (shape[i]) n *= shape[i];
    }
    return MIXP_OK;
}

static void mixpi_set_shape(mixp_tensor *t, int rank, const int64_t *shape) {
    t->rank = rank;
    t->count = 1;
    for (int i = 0; i < MIXP_MAX_RANK; i++) {
        t->shape[i] = i < rank ? shape[i] : 1;
        t->count *= t->shape[i];
    }
    MIXPI_ASSERT(t->count >= 0);
}

/* Allocates a zeroed record for a tensor, permanent or for this step. */
static mixp_tensor *mixpi_record(mixp_context *ctx, size_t n, int permanent) {
    void *p = permanent ? mixpi_host_alloc(ctx, n) : mixpi_arena_take(ctx, &ctx->memory.records, n);
    return (mixp_tensor *)(permanent || !p ? p : memset(p, 0, n));
}

static void *mixpi_data_alloc(const mixp_tensor *t) {
    return t->own.generation ? mixpi_arena_take(t->ctx, &t->ctx->memory.dev, mixpi_bytes(t))
                             : mixpi_device_alloc(t->ctx, mixpi_bytes(t));
}

/* Makes a tensor without data that has t's name, shape and lifetime. */
static mixp_tensor *mixpi_twin(const mixp_tensor *t, mixp_dtype dtype) {
    mixp_tensor *twin = mixpi_record(t->ctx, sizeof *twin, !t->own.generation);
    if (!twin) return NULL;
    twin->own.self = twin;
    twin->own.of = t->ctx;
    twin->ctx = t->ctx;
    twin->name = t->name;
    twin->dtype = dtype;
    twin->own.generation = t->own.generation;
    mixpi_set_shape(twin, t->rank, t->shape);
    return twin;
}

/* The dtype of t's gradient. */
static mixp_dtype mixpi_grad_dtype(const mixp_tensor *t) {
    return t->ctx->walk.f32_gradients && !t->own.generation ? MIXP_F32 : t->dtype;
}

/* Makes a permanent tensor, with a copy of its name, or one for this step. NULL: the error is
 * set. */
static mixp_tensor *mixpi_tensor_new(mixp_context *ctx, const char *name, mixp_dtype dtype,
    int rank, const int64_t *shape, int permanent, int with_data) {
    size_t length = name ? strlen(name) : 0;
    const char *who = length ? name : permanent && with_data ? "mixp_param" : "tensor";
    mixp_tensor *t;
    if (!ctx || mixpi_check_shape(ctx, who, dtype, rank, shape, permanent != 0) != MIXP_OK)
        return NULL;
    t = mixpi_record(ctx, sizeof *t + (permanent ? length + 1 : 0), permanent);
    if (!t) return NULL;

    t->own.self = t;
    t->own.of = ctx;
    t->ctx = ctx;
    t->name = "";
    t->dtype = dtype;
    /* Version 0 means: a low copy that holds nothing yet. */
    t->version = 1;
    t->own.generation = permanent ? 0 : ctx->generation;
    mixpi_set_shape(t, rank, shape);

    /* Allocate the data first: a tensor without memory must never enter the context's list. */
    if (with_data) t->data = mixpi_data_alloc(t);
    if (with_data && !t->data) return NULL;

    /* The context lists what lasts. */
    if (!permanent) return t;
    if (length) {
        memcpy(t + 1, name, length + 1);
        t->name = (const char *)(t + 1);
    }
    MIXPI_ASSERT(t->data || !with_data);
    t->own.id = ++ctx->tensors_made;
    t->own.next = ctx->tensors;
    ctx->tensors = t;
    return t;
}

/* Reports a loop that makes a permanent tensor in every step, before memory runs out. */
static mixp_result mixpi_check_made(mixp_context *ctx, const char *who, const char *name) {
    int trained = ctx->generation == ctx->made.in + 1 && ctx->training.updated_in == ctx->made.in;
    int runs = trained ? ctx->made.runs + 1 : 0;
    if (ctx->generation == ctx->made.in) return MIXP_OK;
    ctx->made.in = ctx->generation;
    ctx->made.runs = runs;
    if (runs < 3) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
        "%s '%s': four training steps in a row have created one; parameters and views live as long "
        "as the context: create them once, before the loop, and create batches with mixp_input",
        who, name ? name : "");
}

/* Warns of a loop that makes a scaler or an optimizer in every step, before or within the step. */
static void mixpi_warn_of_made(mixp_context *ctx, const char *who) {
    mixpi_made *made = &ctx->owners;
    const int trained = ctx->generation == made->in + 1 && ctx->training.updated_in >= made->in;
    if (ctx->generation == made->in) return;
    made->in = ctx->generation;
    made->runs = trained ? made->runs + 1 : 0;
    if (made->runs == 3)
        mixpi_warn(ctx,
            "%s: four training steps in a row have created a scaler or an optimizer. A new one "
            "starts from nothing: create each once, before the loop",
            who);
}

static const char *mixpi_view_wrong(const mixp_context *ctx, mixp_dtype dtype, const void *data) {
    size_t size = mixp_dtype_size(dtype);
    if (!data) return "data is NULL; pass your memory";
    if (size && (uintptr_t)data % size) return "data is not aligned to its elements";
    if (ctx && ctx->device->check && (ctx->device->check)(&ctx->exec, data, 1) != MIXP_OK)
        return "data is not device memory; allocate it on the device (cudaMalloc)";
    return NULL;
}

MIXPREC_API mixp_tensor *mixp_view(mixp_context *ctx, const char *name, mixp_dtype dtype, int rank,
    const int64_t *shape, void *data) {
    const char *wrong = mixpi_view_wrong(ctx, dtype, data);
    mixp_tensor *t = NULL;
    if (ctx && mixpi_check_made(ctx, "mixp_view", name) != MIXP_OK) return NULL;
    if (wrong)
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_view '%s': %s", name ? name : "", wrong);
    else t = mixpi_tensor_new(ctx, name, dtype, rank, shape, 1, 0);
    if (t) t->data = data;
    return t;
}

MIXPREC_API mixp_tensor *mixp_activation(
    mixp_context *ctx, mixp_dtype dtype, int rank, const int64_t *shape) {
    return mixpi_tensor_new(ctx, "", dtype, rank, shape, 0, 1);
}

MIXPREC_API mixp_tensor *mixp_input(
    mixp_context *ctx, mixp_dtype dtype, int rank, const int64_t *shape, const void *host_data) {
    if (!host_data) {
        mixp_context_fail(
            ctx, MIXP_ERR_ARGUMENT, "mixp_input: host_data is NULL; pass the batch to copy");
        return NULL;
    }
    mixp_tensor *t = mixp_activation(ctx, dtype, rank, shape);
    return t && mixpi_feed(ctx, t->data, host_data, mixpi_bytes(t)) == MIXP_OK ? t : NULL;
}

MIXPREC_API mixp_tensor *mixp_input_view(
    mixp_context *ctx, mixp_dtype dtype, int rank, const int64_t *shape, void *data) {
    const char *wrong = mixpi_view_wrong(ctx, dtype, data);
    mixp_tensor *t = NULL;
    if (wrong) mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_input_view: %s", wrong);
    else t = mixpi_tensor_new(ctx, "", dtype, rank, shape, 0, 0);
    if (t) t->data = data;
    return t;
}

/* Returns what is wrong with a product, or NULL. */
static const char *mixpi_gemm_wrong(const mixp_gemm_args *k) {
    if (!k) return "the arguments are NULL";
    if (k->m < 0 || k->n < 0 || k->k < 0 || k->batch < 0) return "a size is negative";
    if (k->batch == 0) return "batch is 0; set it to 1 for one product";
    if (k->alpha == 0.0f && !k->alpha_at) return "alpha is 0; set it to 1 for the plain product";
    if (k->stride_a < 0 || k->stride_b < 0 || k->stride_c < 0) return "a stride is negative";
    if (!k->c.data || (k->k > 0 && (!k->a.data || !k->b.data))) return "a, b or c has no data";
    if (k->c.data == k->a.data || k->c.data == k->b.data) return "c's memory is a's or b's";
    return NULL;
}

/* Is each leading dimension at least as long as a row as stored? */
static int mixpi_gemm_fits(const mixp_gemm_args *k) {
    return k->lda >= (k->trans_a ? k->m : k->k) && k->ldb >= (k->trans_b ? k->k : k->n) &&
           k->ldc >= k->n;
}

MIXPREC_API mixp_result mixp_gemm(mixp_context *ctx, const mixp_gemm_args *k) {
    const char *wrong = mixpi_gemm_wrong(k);
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (wrong) return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "mixp_gemm: %s", wrong);
    if (!mixpi_gemm_fits(k))
        return mixp_context_fail(ctx, MIXP_ERR_SHAPE,
            "mixp_gemm: lda %.0f, ldb %.0f or ldc %.0f is shorter than a row of its matrix: m "
            "%.0f, n %.0f, k %.0f%s%s",
            (double)k->lda, (double)k->ldb, (double)k->ldc, (double)k->m, (double)k->n,
            (double)k->k, k->trans_a ? ", a transposed" : "", k->trans_b ? ", b transposed" : "");
    return mixpi_note_failure(ctx, "mixp_gemm", ctx->device->kernels->gemm(&ctx->exec, k));
}

MIXPREC_API mixp_result mixp_tensor_set_requires_grad(mixp_tensor *t, int on) {
    MIXPI_TRY(mixpi_check_live(t, "mixp_tensor_set_requires_grad"));
    if (on && mixpi_backup_of(t))
        return mixp_context_fail(t->ctx, MIXP_ERR_ARGUMENT,
            "mixp_tensor_set_requires_grad '%s': a buffer gets no gradient; use mixp_param for a "
            "tensor that trains",
            t->name);
    if (on && !mixpi_is_real(t->dtype))
        return mixp_context_fail(t->ctx, MIXP_ERR_DTYPE,
            "mixp_tensor_set_requires_grad '%s': gradients need f32, f16 or bf16, not %s", t->name,
            mixp_dtype_name(t->dtype));
    if (!on && !t->requires_grad && t->own.from_tape)
        return mixp_context_fail(t->ctx, MIXP_ERR_ARGUMENT,
            "mixp_tensor_set_requires_grad: the result of an operator keeps its gradient; to cut "
            "the gradient, use mixp_detach");

    t->requires_grad = on != 0;
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_tensor_set_disposable(mixp_tensor *t, int on) {
    MIXPI_TRY(mixpi_check_live(t, "mixp_tensor_set_disposable"));
    if (!t->own.generation)
        return mixp_context_fail(t->ctx, MIXP_ERR_ARGUMENT,
            "mixp_tensor_set_disposable '%s': only an activation can be disposable; this tensor "
            "lives as long as its context",
            t->name);
    t->own.disposable = on != 0;
    return MIXP_OK;
}

MIXPREC_API void mixp_tensor_touch(mixp_tensor *t) {
    if (mixpi_check_live(t, "mixp_tensor_touch") != MIXP_OK) return;
    mixpi_backup *b = mixpi_backup_of(t);
    if (b && t->ctx->buffers.state == MIXPI_IN_STEP && b->window != t->ctx->buffers.window)
        mixpi_warn(t->ctx,
            "mixp_tensor_touch: your code wrote the buffer '%.60s' in a step, and a skip cannot "
            "restore it: call mixp_buffer_save before the write",
            b->buffer->name);
    if (b) b->computed = t->ctx->buffers.window;
    mixpi_note_write(t, "mixp_tensor_touch");
}

static mixp_result mixpi_transfer_check(
    const mixp_tensor *t, const void *host, mixp_dtype dtype, int64_t count, const char *who) {
    char shape[224];
    MIXPI_TRY(mixpi_check_whole(t, who));
    mixpi_shape_text(t->rank, t->shape, shape, sizeof shape);
    if (!host)
        return mixp_context_fail(
            t->ctx, MIXP_ERR_ARGUMENT, "%s '%s': the host memory is NULL", who, t->name);
    if (!mixp_dtype_size(dtype))
        return mixp_context_fail(
            t->ctx, MIXP_ERR_DTYPE, "%s '%s': %d is not a mixp_dtype", who, t->name, (int)dtype);
    if (count == t->count) return MIXP_OK;
    return mixp_context_fail(t->ctx, MIXP_ERR_SHAPE,
        "%s '%s': count is %.0f, but the tensor %s has %.0f elements; count must be equal", who,
        t->name, (double)count, shape, (double)t->count);
}

/* The device converts. A device with its own memory stages the converted copy in scratch memory. */
MIXPREC_API mixp_result mixp_read(
    const mixp_tensor *t, void *host, mixp_dtype dtype, int64_t count) {
    MIXPI_TRY(mixpi_transfer_check(t, host, dtype, count, "mixp_read"));
    size_t bytes = (size_t)count * mixp_dtype_size(dtype);
    if (dtype == t->dtype) return mixpi_download(t->ctx, host, t->data, bytes);
    void *stage = t->ctx->device->download ? mixpi_context_scratch(t->ctx, bytes) : host;
    if (!stage) return MIXP_ERR_MEMORY;
    mixp_result r =
        mixpi_convert_to(t->ctx, mixpi_out_to(stage, dtype, 0), mixpi_tensor_in(t), count);
    return r != MIXP_OK || stage == host ? r : mixpi_download(t->ctx, host, stage, bytes);
}

MIXPREC_API mixp_result mixp_write(
    mixp_tensor *t, const void *host, mixp_dtype dtype, int64_t count) {
    MIXPI_TRY(mixpi_transfer_check(t, host, dtype, count, "mixp_write"));
    size_t bytes = (size_t)count * mixp_dtype_size(dtype);
    mixp_in src = mixpi_in(host, dtype);
    MIXPI_TRY(mixpi_write_begin(t, "mixp_write"));
    if (dtype == t->dtype) return mixpi_feed(t->ctx, t->data, host, bytes);
    if (t->ctx->device->upload) {
        void *stage = mixpi_context_scratch(t->ctx, bytes);
        if (!stage) return MIXP_ERR_MEMORY;
        MIXPI_TRY(mixpi_feed(t->ctx, stage, host, bytes));
        src.data = stage;
    }
    return mixpi_convert_to(t->ctx, mixpi_tensor_out(t, 0), src, count);
}

/* Can `from` be copied to `to`? Reports the reason if not. */
static mixp_result mixpi_copy_check(const mixp_tensor *to, const mixp_tensor *from) {
    MIXPI_TRY(mixpi_check_memory(to, "mixp_copy"));
    if (!from) return mixp_context_fail(to->ctx, MIXP_ERR_ARGUMENT, "mixp_copy: `from` is NULL");
    MIXPI_TRY(mixpi_check_whole(from, "mixp_copy"));
    if (to->ctx != from->ctx)
        return mixp_context_fail(to->ctx, MIXP_ERR_ARGUMENT,
            "mixp_copy: `from` belongs to another context; copy it with mixp_read and mixp_write");
    if (to->count == from->count) return MIXP_OK;
    char here[224], there[224];
    return mixp_context_fail(to->ctx, MIXP_ERR_SHAPE,
        "mixp_copy: '%.60s' is %s with %.0f elements, but `from` is %s with %.0f; pass tensors "
        "with as many elements",
        to->name, mixpi_shape_text(to->rank, to->shape, here, sizeof here), (double)to->count,
        mixpi_shape_text(from->rank, from->shape, there, sizeof there), (double)from->count);
}

MIXPREC_API mixp_result mixp_copy(mixp_tensor *to, const mixp_tensor *from) {
    mixp_result r = mixpi_copy_check(to, from);
    if (r != MIXP_OK || to->data == from->data) return r;
    MIXPI_TRY(mixpi_write_computed(to, "mixp_copy"));
    return mixpi_convert_to(to->ctx, mixpi_tensor_out(to, 0), mixpi_tensor_in(from), to->count);
}

MIXPREC_API double mixp_item(const mixp_tensor *t) {
    double value = 0.0;
    char shape[224];
    if (t && mixpi_is_tensor(t) && mixpi_is_stale(t)) {
        mixp_context_fail(t->ctx, MIXP_ERR_ORDER,
            "mixp_item: the tensor is from an earlier step, and %s has recycled it: call mixp_item "
            "before %s",
            mixpi_beginner(t->ctx), mixpi_beginner(t->ctx));
        t = NULL;
    }

    if (mixpi_check_memory(t, "mixp_item") != MIXP_OK) t = NULL;
    if (t && t->count != 1)
        mixp_context_fail(t->ctx, MIXP_ERR_SHAPE,
            "mixp_item '%s': %s has %.0f elements, not one; take the mean or sum, or use mixp_read",
            t->own.generation ? "" : t->name,
            mixpi_shape_text(t->rank, t->shape, shape, sizeof shape), (double)t->count);
    else if (t && mixp_read(t, &value, MIXP_F64, 1) == MIXP_OK) return value;

    /* Any failure returns NaN, as bits: fast-math would fold 0/0. */
    return (double)mixp_f32_of_bits(0x7FC00000u);
}

/* Does a finite value become Inf or NaN in this dtype, or leave the range of an integer dtype? */
static int mixpi_overflows(mixp_dtype dtype, double value) {
    double low = 0.0; /* memory for any dtype */
    if (!mixpi_f64_is_finite(value)) return 0;
    if (dtype == MIXP_U8) return value <= -1.0 || value >= 256.0;
    if (dtype == MIXP_I32) return value <= -2147483649.0 || value >= 2147483648.0;
    if (dtype == MIXP_I64) return value < -9223372036854775808.0 || value >= 9223372036854775808.0;
    mixp_convert(&low, dtype, &value, MIXP_F64, 1);
    mixp_convert(&value, MIXP_F64, &low, dtype, 1);
    return !mixpi_f64_is_finite(value);
}

/* The largest number of a dtype. */
static double mixpi_largest(mixp_dtype dtype) {
    if (dtype == MIXP_U8) return 255.0;
    if (dtype == MIXP_I32) return 2147483647.0;
    if (dtype == MIXP_I64) return 9223372036854775807.0;
    return mixp_decode(dtype, mixpi_max_code(mixp_format_of(dtype)));
}

MIXPREC_API mixp_result mixp_fill(mixp_tensor *t, double value) {
    MIXPI_TRY(mixpi_check_memory(t, "mixp_fill"));
    if (mixpi_overflows(t->dtype, value))
        return mixp_context_fail(t->ctx, MIXP_ERR_ARGUMENT,
            "mixp_fill: %g is beyond the range of %s, whose largest number is %g; use a number in "
            "that range%s",
            value, mixp_dtype_name(t->dtype), mixpi_largest(t->dtype),
            mixpi_is_real(t->dtype) ? ", or INFINITY" : "");
    MIXPI_TRY(mixpi_write_begin(t, "mixp_fill"));
    return mixpi_fill_with(t->ctx, mixpi_tensor_out(t, 0), t->count, value);
}

/* Uniform in (0, 1): the centre of one of 2^32 cells, so the logarithm is finite. */
static double mixpi_uniform(const mixp_tensor *t, int64_t element) {
    uint32_t u = mixp_random_u32(t->ctx->seed, 0, (uint64_t)t->own.id, (uint64_t)element);
    return ((double)u + 0.5) * (1.0 / 4294967296.0);
}

/* Standard normal from two uniform numbers, after Box and Muller, 1958. */
static double mixpi_normal(const mixp_tensor *t, int64_t element) {
    const double two_pi = 6.283185307179586;
    double radius = sqrt(-2.0 * log(mixpi_uniform(t, 2 * element)));
    return radius * cos(two_pi * mixpi_uniform(t, 2 * element + 1));
}

/* Writes a + b * (uniform or standard normal) to every element. */
static mixp_result mixpi_init(mixp_tensor *t, int normal, double a, double b) {
    double value[256], narrow[256]; /* narrow: aligned memory for any dtype */
    int64_t n;
    MIXPI_TRY(mixpi_check_memory(t, "mixp_init"));
    MIXPI_TRY(mixpi_write_begin(t, "mixp_init"));
    for (int64_t i = 0; i < t->count; i += n) {
        n = mixpi_min(256, t->count - i);
        for (int64_t j = 0; j < n; j++) {
            double x = normal ? mixpi_normal(t, i + j) : mixpi_uniform(t, 2 * (i + j));
            value[j] = a + b * x;
        }
        if (mixp_convert(narrow, t->dtype, value, MIXP_F64, n) != MIXP_OK) return MIXP_ERR_DTYPE;
        if (mixpi_upload(t->ctx, mixpi_out_at(mixpi_tensor_out(t, 0), i).data, narrow,
                (size_t)n * mixp_dtype_size(t->dtype)) != MIXP_OK)
            return MIXP_ERR_DEVICE;
    }
    return MIXP_OK;
}

MIXPREC_API mixp_result mixp_init_normal(mixp_tensor *t, double mean, double std) {
    MIXPI_TRY(mixpi_check_memory(t, "mixp_init_normal"));
    const int before = mixpi_enter(t->ctx); /* mean and std may be Inf, mean NaN, as in PyTorch */
    if (std >= 0.0) return mixpi_leave(t->ctx, before, mixpi_init(t, 1, mean, std));
    return mixpi_leave(t->ctx, before,
        mixp_context_fail(
            t->ctx, MIXP_ERR_ARGUMENT, "mixp_init_normal: std is %g; it must be at least 0", std));
}

MIXPREC_API mixp_result mixp_init_uniform(mixp_tensor *t, double low, double high) {
    MIXPI_TRY(mixpi_check_memory(t, "mixp_init_uniform"));
    const int before = mixpi_enter(t->ctx); /* high - low may be beyond f64 */
    if (mixpi_f64_is_finite(low) && mixpi_f64_is_finite(high) && low <= high &&
        mixpi_f64_is_finite(high - low) && !mixpi_overflows(t->dtype, low) &&
        !mixpi_overflows(t->dtype, high))
        return mixpi_leave(t->ctx, before, mixpi_init(t, 0, low, high - low));
    return mixpi_leave(t->ctx, before,
        mixp_context_fail(t->ctx, MIXP_ERR_ARGUMENT,
            "mixp_init_uniform: low is %g and high is %g; both must be finite and in the range of "
            "%s, as must their difference, and low must not be above high",
            low, high, mixp_dtype_name(t->dtype)));
}

/* Initialises t, normal or uniform, with standard deviation gain / sqrt(fan). fan is fan_in if fans
 * is 0, otherwise the mean of fan_in and fan_out. */
static mixp_result mixpi_init_fan(mixp_tensor *t, int normal, int fans, double gain) {
    MIXPI_TRY(mixpi_check_memory(t, "mixp_init"));
    if (t->rank < 2)
        return mixp_context_fail(t->ctx, MIXP_ERR_SHAPE,
            "mixp_init: '%.60s' has rank %d; xavier and kaiming need weights [out, in, ...]",
            t->name, t->rank);
    if (!t->count) return MIXP_OK;
    double in = (double)(t->count / t->shape[0]);
    double out = (double)(t->count / t->shape[1]);
    const int before = mixpi_enter(t->ctx); /* gain may be any number */
    double std = gain / sqrt(fans ? (in + out) / 2.0 : in);
    double bound = sqrt(3.0) * std;
    return mixpi_leave(t->ctx, before,
        normal ? mixp_init_normal(t, 0.0, std) : mixp_init_uniform(t, -bound, bound));
}

MIXPREC_API mixp_result mixp_init_xavier_normal(mixp_tensor *t, double gain) {
    return mixpi_init_fan(t, 1, 1, gain);
}
MIXPREC_API mixp_result mixp_init_xavier_uniform(mixp_tensor *t, double gain) {
    return mixpi_init_fan(t, 0, 1, gain);
}
MIXPREC_API mixp_result mixp_init_kaiming_normal(mixp_tensor *t, double gain) {
    return mixpi_init_fan(t, 1, 0, gain);
}
MIXPREC_API mixp_result mixp_init_kaiming_uniform(mixp_tensor *t, double gain) {
    return mixpi_init_fan(t, 0, 0, gain);
}
