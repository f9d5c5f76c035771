/* llama_codes.h - frozen matrices that are kept as codes of 8 bits (--frozen q8_0): a part of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Each 32 values of a row are Q8_0's codes, 128 added, and an f16 scale: w = (code - 128) scale. A product decodes its
 * whole matrix into memory that all products share, in their dtype, forward and backward. The bits are those
 * of a product with the decoded matrix. A matrix whose rows do not divide into blocks is stored in --dtype, as in GGUF.
 */
#ifndef TRAINER_LLAMA_CODES_H
#define TRAINER_LLAMA_CODES_H

/* ==== Reading ======================================================================= */

/* Memory of the device that lasts as long as the context, and that no checkpoint holds. */
static void *device_memory(size_t bytes) {
    const mixp_device *device = mixp_context_device(m.ctx);
    void              *memory = device->allocate ? device->allocate(mixp_context_exec(m.ctx), bytes) : malloc(bytes);
    if (!memory) die(1, "out of memory for --frozen q8_0%s", plan_text);
    m.code_bytes += (double)bytes;
    return memory;
}

static void to_device(void *to, const void *from, size_t bytes) {
    const mixp_device *device = mixp_context_device(m.ctx);
    if (!device->upload) memcpy(to, from, bytes);
    else if (device->upload(mixp_context_exec(m.ctx), to, from, bytes) != MIXP_OK)
        die(1, "%s refused the codes of --frozen q8_0", m.device_name);
}

/* The blocks of a matrix: those of a file of Q8_0, or new ones of the file's values. */
static void read_blocks(const mixp_tensor *t, unsigned char *to) {
    const char          *path;
    const mixp_st_entry *e = entry_of(t, &path);
    size_t               bytes = gguf_size(GGUF_Q8_0, t->shape[1]); /* of a row */
    if (e->dtype != MIXP_DTYPE_COUNT || strcmp(e->type, "Q8_0") != 0) {
        float *values = (float *)rows_memory(NULL, (size_t)t->count, sizeof *values);
        read_values(t, values);
        gguf_quantise(to, values, t->count);
        free(values);
    } else if (turned_heads(t->name)) gguf_turn_back(to, e->data, t->shape[0], bytes, turned_heads(t->name));
    else memcpy(to, e->data, bytes * (size_t)t->shape[0]);
}

/* Divides n blocks into codes and scales. Returns the largest size of a value. */
static float divide_blocks(const unsigned char *from, int64_t n, unsigned char *codes, mixp_f16 *scales) {
    float most = 0;
    for (int64_t b = 0; b < n; b++, from += 2 + GGUF_BLOCK) {
        float scale = fabsf(gguf_half(from));
        memcpy(&scales[b].bits, from, 2);
        for (int i = 0; i < GGUF_BLOCK; i++) {
            codes[b * GGUF_BLOCK + i] = (unsigned char)(from[2 + i] ^ 128); /* a signed code, 128 added */
            most = fmaxf(most, scale * fabsf((float)(signed char)from[2 + i]));
        }
    }
    return most;
}

/* Makes the codes of matrix name[rows, cols] and reads them. The scales lie after the codes. */
static void load_codes(layer *l, const char *name, int64_t rows, int64_t cols) {
    const int64_t  shape[2] = { rows, cols };
    size_t         n = (size_t)(rows * cols), blocks = n / GGUF_BLOCK;
    char          *memory = (char *)device_memory(n + 2 * blocks);
    unsigned char *bytes, *codes;
    mixp_f16      *scales;
    l->w = m.coded[m.n_coded++] = mixp_view(m.ctx, name, MIXP_U8, 2, shape, memory);
    l->scales = memory + n;
    check("making the model");
    if (m.is_measured) return;
    bytes = (unsigned char *)rows_memory(NULL, blocks, 2 + GGUF_BLOCK);
    codes = (unsigned char *)rows_memory(NULL, n, 1);
    scales = (mixp_f16 *)rows_memory(NULL, blocks, sizeof *scales);
    read_blocks(l->w, bytes);
    if (divide_blocks(bytes, (int64_t)blocks, codes, scales) >= 65520 && m.decoded.dtype == MIXP_F16)
        die(1, "%s: %s has values beyond f16's largest number: use --dtype bf16 or fp32", opt.model, name);
    to_device(memory, codes, n);
    to_device(l->scales, scales, 2 * blocks);
    add_to_base_hash(find_entry(name, NULL));
    free(bytes);
    free(codes);
    free(scales);
}

/* The list of matrices, and the memory for a decoded one, as large as the largest. */
static void make_decoded(void) {
    int64_t q = cfg.heads * cfg.head_dim, n = cfg.width * (q > cfg.inner ? q : cfg.inner);
    m.coded = (mixp_tensor **)rows_memory(NULL, (size_t)(cfg.layers * LINEARS), sizeof *m.coded);
    m.decoded.dtype = opt.level == 0 ? MIXP_F32 : m.dtype;
    m.decoded.data = device_memory((size_t)n * mixp_dtype_size(m.decoded.dtype));
}

/* ==== Products ====================================================================== */

/* On a device: decodes the matrix into m.decoded by three kernels. */
static mixp_result decode_on_device(mixp_context *ctx, const layer *l) {
    const mixp_kernels *kernels = mixp_context_device(ctx)->kernels;
    const mixp_exec    *exec = mixp_context_exec(ctx);
    const int64_t       n = l->w->count;
    mixp_in             codes = { l->w->data, MIXP_U8 }, scales = { l->scales, MIXP_F16 };
    mixp_in             decoded = { m.decoded.data, m.decoded.dtype };
    mixp_convert_args   whole = { .n = n, .src = codes, .dst = m.decoded };
    mixp_unary_args     shift = { .op = MIXP_UNARY_AFFINE, .p = 1, .q = -128, .n = n, .a = decoded, .y = m.decoded };
    mixp_binary_args    times = { .op = MIXP_BINARY_MUL, .rank = 2, .shape = { n / GGUF_BLOCK, GGUF_BLOCK }, .a = decoded,
                                  .b = scales, .a_strides = { GGUF_BLOCK, 1 }, .b_strides = { 1, 0 }, .y = m.decoded };
    mixp_result         result = kernels->convert(exec, &whole);
    if (result == MIXP_OK) result = kernels->unary(exec, &shift);
    if (result == MIXP_OK) result = kernels->binary(exec, &times);
    return result;
}

enum { PIECE = 128 * GGUF_BLOCK }; /* values */

/* Decodes piece i of the matrix arg on the CPU, with the same roundings. */
static void decode_piece(void *arg, int64_t i, int worker) {
    const layer         *l = (const layer *)arg;
    const int64_t        first = i * PIECE, n = l->w->count - first < PIECE ? l->w->count - first : PIECE;
    const unsigned char *codes = (const unsigned char *)l->w->data + first;
    const mixp_f16      *scales = (const mixp_f16 *)l->scales + first / GGUF_BLOCK;
    float                values[PIECE];
    (void)worker;
    for (int64_t b = 0; b < n / GGUF_BLOCK; b++) {
        float scale = mixp_f32_from_f16(scales[b]);
        for (int k = 0; k < GGUF_BLOCK; k++)
            values[b * GGUF_BLOCK + k] = scale * (float)(codes[b * GGUF_BLOCK + k] - 128);
    }
    mixp_convert((char *)m.decoded.data + (size_t)first * mixp_dtype_size(m.decoded.dtype), m.decoded.dtype, values,
                 MIXP_F32, n);
}

static mixp_result decode(mixp_context *ctx, const layer *l) {
    const mixp_exec *exec = mixp_context_exec(ctx);
    const int64_t    pieces = (l->w->count + PIECE - 1) / PIECE;
    layer            of_task = *l;
    if (mixp_context_device(ctx)->allocate) return decode_on_device(ctx, l);
    if (exec->parallel) exec->parallel(exec->user, pieces, decode_piece, &of_task);
    else
        for (int64_t i = 0; i < pieces; i++) decode_piece(&of_task, i, 0);
    return MIXP_OK;
}

/* y[n, rows] = x[n, cols] w' + bias. */
static mixp_result coded_infer(mixp_call *c) {
    const layer       *l = *(const layer *const *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int64_t            shape[MIXP_MAX_RANK];
    if (x->rank < 1 || x->shape[x->rank - 1] != l->w->shape[1])
        return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE, "%s: the rows of x do not have %lld values", l->w->name,
                                 (long long)l->w->shape[1]);
    memcpy(shape, x->shape, sizeof shape);
    shape[x->rank - 1] = l->w->shape[0];
    mixp_call_reads(c, 0, 0);
    return mixp_call_output(c, x->dtype, x->rank, shape);
}

static mixp_result coded_forward(mixp_call *c) {
    const layer   *l = *(const layer *const *)c->attrs;
    mixp_in        w = { m.decoded.data, m.decoded.dtype };
    int64_t        rows = l->w->shape[0], cols = l->w->shape[1];
    mixp_gemm_args g = { .m = c->out->count / rows, .n = rows, .k = cols, .batch = 1, .trans_b = 1, .alpha = 1,
                         .a = mixp_call_x(c, 0), .b = w, .bias = mixp_call_x(c, 1), .c = mixp_call_y(c),
                         .lda = cols, .ldb = cols, .ldc = rows };
    mixp_result    result = decode(c->ctx, l);
    return result == MIXP_OK ? mixp_context_device(c->ctx)->kernels->gemm(mixp_context_exec(c->ctx), &g) : result;
}

static mixp_result coded_backward(mixp_call *c) {
    const layer   *l = *(const layer *const *)c->attrs;
    mixp_in        w = { m.decoded.data, m.decoded.dtype };
    int64_t        rows = l->w->shape[0], cols = l->w->shape[1];
    mixp_gemm_args g = { .m = c->out->count / rows, .n = cols, .k = rows, .batch = 1, .alpha = 1,
                         .a = mixp_call_dy(c), .b = w, .c = mixp_call_dx(c, 0),
                         .lda = rows, .ldb = cols, .ldc = cols };
    mixp_result    result = g.c.data ? decode(c->ctx, l) : MIXP_OK;
    if (!g.c.data || result != MIXP_OK) return result;
    return mixp_context_device(c->ctx)->kernels->gemm(mixp_context_exec(c->ctx), &g);
}

static const mixp_op coded_linear = { "coded_linear", MIXP_CLASS_KEEP, sizeof(const layer *), coded_infer,
                                      coded_forward, coded_backward, NULL };

static mixp_tensor *with_dtype(mixp_tensor *t, mixp_dtype dtype)
{ return t && t->dtype != dtype ? mixp_cast(m.ctx, t, dtype) : t; }

/* mixp_linear with a matrix of codes. */
static mixp_tensor *linear_of_codes(mixp_tensor *x, const layer *l) {
    mixp_tensor *in[2] = { with_dtype(x, m.decoded.dtype), with_dtype(l->bias, m.decoded.dtype) };
    return mixp_apply(m.ctx, &coded_linear, 2, in, 1, &l);
}

#endif
