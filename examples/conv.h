/* conv.h - convolution, pooling, batch and group norm for mixprec. It uses only the public API.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include this file after mixprec.h, in C or C++. It runs on every device, because it uses only the kernels `copy`,
 * `fill` and the product of the context's device. Arrays are [batch, channels, height, width], as in PyTorch. A
 * function returns NULL on an error, and the context keeps the error. Under autocast, products are low (class LOW, as
 * torch.nn.functional.conv2d) and norms are f32. The only state is batch_norm's, in buffers that you pass; threads and
 * determinism are those of mixprec's operators.
 *
 * A convolution is a product with the image's columns: the values under each tap of the kernel. Columns are computed
 * for a few samples at a time, at most CONV_COLUMNS values (so that a CPU's cache keeps them; on a GPU eight times as
 * many), and again in backward. */
#ifndef CONV_H
#define CONV_H

#include <stdio.h>

/* To export the functions from a library, define CONV_API as what declares them, such as extern or
 * __attribute__((visibility("default"))), before one file of the library includes this file. Its users define the same
 * CONV_API and CONV_NO_IMPLEMENTATION. */
#if defined(CONV_API)
#elif defined(__GNUC__)
#  define CONV_API static __attribute__((__unused__))
#else
#  define CONV_API static
#endif

/* --- the API: each function has its comment at its definition ------------------------------------------ */

/* Zeroed: stride 1, no padding, dilation 1, one group. The first number is for the height, the
 * second for the width. */
typedef struct conv_desc {
    int stride[2], padding[2], dilation[2];
    int groups;                 /* number of independent groups of channels                                 */
    int output_padding[2];      /* conv_transpose2d: extra rows and columns, below the stride               */
} conv_desc;

/* batch_norm's running statistics: two buffers, f32 [channels] each. */
typedef struct norm_statistics { mixp_tensor *mean, *variance; } norm_statistics;

CONV_API mixp_tensor *conv2d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                             const conv_desc *desc);
CONV_API mixp_tensor *conv_transpose2d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                                       const conv_desc *desc);
CONV_API mixp_tensor *conv1d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                             const conv_desc *desc);
CONV_API mixp_tensor *max_pool2d(mixp_context *ctx, mixp_tensor *x, int size, int stride, int padding);
CONV_API mixp_tensor *avg_pool2d(mixp_context *ctx, mixp_tensor *x, int size, int stride, int padding);
CONV_API mixp_tensor *upsample_nearest2d(mixp_context *ctx, mixp_tensor *x, int rows, int cols);
CONV_API mixp_tensor *group_norm(mixp_context *ctx, mixp_tensor *x, int groups, mixp_tensor *gamma, mixp_tensor *beta,
                                 float eps);
CONV_API norm_statistics batch_norm_statistics(mixp_context *ctx, const char *name, int64_t channels);
CONV_API mixp_tensor *batch_norm(mixp_context *ctx, mixp_tensor *x, mixp_tensor *gamma, mixp_tensor *beta,
                                 const norm_statistics *keep, int training, float eps);
#ifndef CONV_NO_IMPLEMENTATION
#ifndef CONV_COLUMNS
#  define CONV_COLUMNS (1 << 19)
#endif

/* The sizes of the image, and of the other side: one place per position of the kernel. */
typedef struct conv_shape {
    int64_t batch, channels, height, width;
    int64_t maps, rows, columns;
    int64_t taps[2];
    int64_t stride[2], padding[2], dilation[2], groups;
} conv_shape;

static int64_t conv_taps(const conv_shape *s) { return s->taps[0] * s->taps[1]; }
static int64_t conv_places(const conv_shape *s) { return s->rows * s->columns; }

/* --- columns: the values under each tap --------------------------------------------------------------- */

static mixp_in conv_in_at(mixp_in a, int64_t i) {
    a.data = (const char *)a.data + (size_t)i * mixp_dtype_size(a.dtype);
    return a;
}
static mixp_out conv_out_at(mixp_out a, int64_t i) {
    a.data = (char *)a.data + (size_t)i * mixp_dtype_size(a.dtype);
    return a;
}
static mixp_in conv_in_of(mixp_out a) {
    mixp_in b;
    b.data = a.data;
    b.dtype = a.dtype;
    return b;
}

static mixp_result conv_fill(mixp_context *ctx, mixp_out y, int64_t n, double value) {
    mixp_fill_args k;
    memset(&k, 0, sizeof k);
    k.n = n;
    k.value = value;
    k.dst = y;
    k.dst.accumulate = 0;
    return mixp_context_device(ctx)->kernels->fill(mixp_context_exec(ctx), &k);
}

/* Along one axis: the positions [*from, *to) of the kernel whose tap `tap` is inside the image. */
static void conv_reach(const conv_shape *s, int axis, int64_t tap, int64_t *from, int64_t *to) {
    int64_t size = axis ? s->width : s->height, places = axis ? s->columns : s->rows;
    int64_t shift = s->padding[axis] - tap * s->dilation[axis];     /* position p meets p stride - shift */
    *from = shift > 0 ? (shift + s->stride[axis] - 1) / s->stride[axis] : 0;
    *to = size - 1 + shift < 0 ? 0 : (size - 1 + shift) / s->stride[axis] + 1;
    if (*to > places) *to = places;
}

/* Copies the values of a tap, for n samples, between the image and its columns. The columns have
 * strides for channel, sample and tap. back 1: adds the columns to the image. */
typedef struct conv_move {
    const conv_shape *s;
    int64_t  n;
    int64_t  by_channel, by_sample, by_tap;
    mixp_out image, columns;
    int      back;
} conv_move;

static mixp_result conv_move_tap(mixp_context *ctx, const conv_move *m, int64_t i, int64_t j) {
    const conv_shape *s = m->s;
    int64_t image_strides[4], column_strides[4], from[2], to[2], at, there;
    mixp_copy_args k;
    memset(&k, 0, sizeof k);
    conv_reach(s, 0, i, &from[0], &to[0]);
    conv_reach(s, 1, j, &from[1], &to[1]);
    if (from[0] >= to[0] || from[1] >= to[1]) return MIXP_OK;
    k.rank = 4;
    k.shape[0] = s->channels;
    k.shape[1] = m->n;
    k.shape[2] = to[0] - from[0];
    k.shape[3] = to[1] - from[1];
    image_strides[0] = s->height * s->width;
    image_strides[1] = s->channels * image_strides[0];
    image_strides[2] = s->stride[0] * s->width;
    image_strides[3] = s->stride[1];
    column_strides[0] = m->by_channel;
    column_strides[1] = m->by_sample;
    column_strides[2] = s->columns;
    column_strides[3] = 1;
    at = (from[0] * s->stride[0] - s->padding[0] + i * s->dilation[0]) * s->width +
         from[1] * s->stride[1] - s->padding[1] + j * s->dilation[1];
    there = (i * s->taps[1] + j) * m->by_tap + from[0] * s->columns + from[1];
    k.src = m->back ? conv_in_at(conv_in_of(m->columns), there) : conv_in_at(conv_in_of(m->image), at);
    k.dst = m->back ? conv_out_at(m->image, at) : conv_out_at(m->columns, there);
    k.dst.accumulate = m->back;
    memcpy(k.src_strides, m->back ? column_strides : image_strides, sizeof image_strides);
    memcpy(k.dst_strides, m->back ? image_strides : column_strides, sizeof image_strides);
    return mixp_context_device(ctx)->kernels->copy(mixp_context_exec(ctx), &k);
}

static mixp_result conv_move_all(mixp_context *ctx, const conv_move *m) {
    mixp_result r = MIXP_OK;
    int64_t i, j;
    for (i = 0; i < m->s->taps[0]; i++)
        for (j = 0; r == MIXP_OK && j < m->s->taps[1]; j++) r = conv_move_tap(ctx, m, i, j);
    return r;
}

/* --- the three products: of a convolution, of its transpose, and of the weight's gradient ----------- */

/* The state of a call. Columns have the layout [channels * taps, samples, places]. */
typedef struct conv_work {
    mixp_context *ctx;
    conv_shape    s;
    int64_t       samples;      /* samples at a time                                                         */
    mixp_tensor  *columns, *image;      /* for those samples; image: f32, NULL if not accumulated             */
} conv_work;

static mixp_out conv_whole(const mixp_tensor *t) {
    mixp_out y;
    y.data = t->data;
    y.dtype = t->dtype;
    y.accumulate = 0;
    return y;
}

static int64_t conv_room(mixp_context *ctx)
{ return (mixp_context_device(ctx)->download ? 8 : 1) * (int64_t)CONV_COLUMNS; }

static mixp_result conv_work_begin(conv_work *w, mixp_context *ctx, const conv_shape *s, mixp_dtype columns,
                                   int with_image) {
    int64_t one = s->channels * conv_taps(s) * conv_places(s), shape[1];
    w->ctx = ctx;
    w->s = *s;
    w->image = NULL;
    w->samples = conv_room(ctx) / one > 0 ? conv_room(ctx) / one : 1;
    if (w->samples > s->batch) w->samples = s->batch;
    shape[0] = one * w->samples;
    w->columns = mixp_activation(ctx, columns, 1, shape);
    shape[0] = s->channels * s->height * s->width * w->samples;
    if (with_image) w->image = mixp_activation(ctx, MIXP_F32, 1, shape);
    return w->columns && (w->image || !with_image) ? MIXP_OK : MIXP_ERR_MEMORY;
}

static conv_move conv_moves(const conv_work *w, int64_t n, mixp_out image, int back) {
    conv_move m;
    m.s = &w->s;
    m.n = n;
    m.by_sample = conv_places(&w->s);
    m.by_tap = n * m.by_sample;
    m.by_channel = conv_taps(&w->s) * m.by_tap;
    m.image = image;
    m.columns = conv_whole(w->columns);
    m.back = back;
    return m;
}

/* Computes the columns of n samples of an image. */
static mixp_result conv_gather_columns(conv_work *w, int64_t n, mixp_in image) {
    const conv_shape *s = &w->s;
    mixp_out  from;
    conv_move m;
    int64_t   count = s->channels * conv_taps(s) * n * conv_places(s);
    from.data = (void *)(uintptr_t)image.data;      /* read only: back is 0 */
    from.dtype = image.dtype;
    from.accumulate = 0;
    m = conv_moves(w, n, from, 0);
    if (conv_fill(w->ctx, conv_whole(w->columns), count, 0) != MIXP_OK) return MIXP_ERR_DEVICE;
    return conv_move_all(w->ctx, &m);
}

static mixp_result conv_product(mixp_context *ctx, mixp_gemm_args *k) {
    k->alpha = 1;
    return mixp_context_device(ctx)->kernels->gemm(mixp_context_exec(ctx), k);
}

/* y[batch, maps, places] (+)= weight columns(image). */
static mixp_result conv_gather(conv_work *w, mixp_in image, mixp_in weight, mixp_out y) {
    const conv_shape *s = &w->s;
    int64_t places = conv_places(s), maps = s->maps / s->groups, first, g;
    int64_t inner = s->channels / s->groups * conv_taps(s);
    mixp_result r = MIXP_OK;
    for (first = 0; r == MIXP_OK && first < s->batch; first += w->samples) {
        int64_t n = s->batch - first < w->samples ? s->batch - first : w->samples;
        r = conv_gather_columns(w, n, conv_in_at(image, first * s->channels * s->height * s->width));
        for (g = 0; r == MIXP_OK && g < s->groups; g++) {
            mixp_gemm_args k;
            memset(&k, 0, sizeof k);
            k.m = maps;
            k.n = places;
            k.k = k.lda = inner;
            k.batch = n;
            k.a = conv_in_at(weight, g * maps * inner);
            k.b = conv_in_at(conv_in_of(conv_whole(w->columns)), g * inner * n * places);
            k.ldb = n * places;
            k.stride_b = k.ldc = places;
            k.c = conv_out_at(y, (first * s->maps + g * maps) * places);
            k.stride_c = s->maps * places;
            r = conv_product(w->ctx, &k);
        }
    }
    return r;
}

/* Writes the f32 sums to the image of n samples, from sample `first` on. */
static mixp_result conv_put_image(conv_work *w, int64_t first, int64_t n, mixp_out image) {
    int64_t one = w->s.channels * w->s.height * w->s.width;
    mixp_copy_args k;
    memset(&k, 0, sizeof k);
    k.rank = 1;
    k.shape[0] = n * one;
    k.src = conv_in_of(conv_whole(w->image));
    k.dst = conv_out_at(image, first * one);
    k.src_strides[0] = k.dst_strides[0] = 1;
    return mixp_context_device(w->ctx)->kernels->copy(mixp_context_exec(w->ctx), &k);
}

/* image (+)= the sums of weight' x at each place: the transpose of conv_gather. */
static mixp_result conv_scatter(conv_work *w, mixp_in x, mixp_in weight, mixp_out image) {
    const conv_shape *s = &w->s;
    int64_t places = conv_places(s), maps = s->maps / s->groups, first, g;
    int64_t inner = s->channels / s->groups * conv_taps(s);
    mixp_result r = MIXP_OK;
    for (first = 0; r == MIXP_OK && first < s->batch; first += w->samples) {
        int64_t n = s->batch - first < w->samples ? s->batch - first : w->samples;
        conv_move m = conv_moves(w, n, conv_whole(w->image), 1);
        for (g = 0; r == MIXP_OK && g < s->groups; g++) {
            mixp_gemm_args k;
            memset(&k, 0, sizeof k);
            k.m = inner;
            k.n = places;
            k.k = maps;
            k.batch = n;
            k.trans_a = 1;
            k.a = conv_in_at(weight, g * maps * inner);
            k.lda = inner;
            k.b = conv_in_at(x, (first * s->maps + g * maps) * places);
            k.ldb = places;
            k.stride_b = s->maps * places;
            k.c = conv_out_at(conv_whole(w->columns), g * inner * n * places);
            k.ldc = n * places;
            k.stride_c = places;
            r = conv_product(w->ctx, &k);
        }
        if (r == MIXP_OK) r = conv_fill(w->ctx, m.image, n * s->channels * s->height * s->width, 0);
        if (r == MIXP_OK) r = conv_move_all(w->ctx, &m);
        if (r == MIXP_OK) r = conv_put_image(w, first, n, image);
    }
    return r;
}

/* Transposes x of n samples from [n, maps, places] to [maps, n, places], so that a weight's
 * gradient is one product. */
static mixp_result conv_turn(conv_work *w, int64_t n, mixp_in x, mixp_out to) {
    int64_t places = conv_places(&w->s), maps = w->s.maps;
    mixp_copy_args k;
    memset(&k, 0, sizeof k);
    k.rank = 3;
    k.shape[0] = maps;
    k.shape[1] = n;
    k.shape[2] = places;
    k.src = x;
    k.src_strides[0] = places;
    k.src_strides[1] = maps * places;
    k.dst = to;
    k.dst_strides[0] = n * places;
    k.dst_strides[1] = places;
    k.src_strides[2] = k.dst_strides[2] = 1;
    return mixp_context_device(w->ctx)->kernels->copy(mixp_context_exec(w->ctx), &k);
}

/* dw (+)= x columns(image)', summed over samples in f32. */
static mixp_result conv_weight(conv_work *w, mixp_in image, mixp_in x, mixp_out dw) {
    const conv_shape *s = &w->s;
    int64_t places = conv_places(s), maps = s->maps / s->groups, first, g, shape[1];
    int64_t inner = s->channels / s->groups * conv_taps(s);
    mixp_tensor *turned, *sum;
    mixp_copy_args put;
    mixp_result r = MIXP_OK;
    shape[0] = w->samples * s->maps * places;
    turned = mixp_activation(w->ctx, x.dtype, 1, shape);
    shape[0] = s->maps * inner;
    sum = mixp_activation(w->ctx, MIXP_F32, 1, shape);
    if (!turned || !sum) return MIXP_ERR_MEMORY;
    for (first = 0; r == MIXP_OK && first < s->batch; first += w->samples) {
        int64_t n = s->batch - first < w->samples ? s->batch - first : w->samples;
        r = conv_gather_columns(w, n, conv_in_at(image, first * s->channels * s->height * s->width));
        if (r == MIXP_OK) r = conv_turn(w, n, conv_in_at(x, first * s->maps * places), conv_whole(turned));
        for (g = 0; r == MIXP_OK && g < s->groups; g++) {
            mixp_gemm_args k;
            memset(&k, 0, sizeof k);
            k.m = maps;
            k.n = k.ldc = inner;
            k.k = k.lda = k.ldb = n * places;
            k.batch = 1;
            k.trans_b = 1;
            k.a = conv_in_at(conv_in_of(conv_whole(turned)), g * maps * n * places);
            k.b = conv_in_at(conv_in_of(conv_whole(w->columns)), g * inner * n * places);
            k.c = conv_out_at(conv_whole(sum), g * maps * inner);
            k.c.accumulate = first > 0;
            r = conv_product(w->ctx, &k);
        }
    }
    memset(&put, 0, sizeof put);
    put.rank = 1;
    put.shape[0] = s->maps * inner;
    put.src = conv_in_of(conv_whole(sum));
    put.dst = dw;
    put.src_strides[0] = put.dst_strides[0] = 1;
    if (r != MIXP_OK) return r;
    return mixp_context_device(w->ctx)->kernels->copy(mixp_context_exec(w->ctx), &put);
}

/* --- operators ---------------------------------------------------------------------------------------- */

static mixp_result conv_refuse(mixp_call *c, const char *what) {
    const mixp_tensor *x = c->in[0], *w = c->in[1];
    return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE, "%s: x of rank %d with %lld channels and w of rank %d with %lld: %s",
                             c->op->name, x->rank, x->rank > 1 ? (long long)x->shape[1] : 0LL, w->rank,
                             w->rank > 1 ? (long long)w->shape[1] : 0LL, what);
}

/* Fills in the sizes from x and w; the description's numbers are in s already. */
static const char *conv_shape_wrong(conv_shape *s, const mixp_tensor *x, const mixp_tensor *w, int transposed) {
    int i;
    if (x->rank != 4 || w->rank != 4) return "both have four dimensions";
    for (i = 0; i < 2; i++) {
        s->taps[i] = w->shape[2 + i];
        if (s->stride[i] < 1 || s->dilation[i] < 1 || s->padding[i] < 0)
            return "strides and dilations are at least 1, padding at least 0";
    }
    s->batch = x->shape[0];
    s->maps = w->shape[0];
    s->channels = w->shape[1] * s->groups;
    if (s->groups < 1 || s->maps % s->groups) return "groups must divide the channels of both sides";
    if (x->shape[1] != (transposed ? s->maps : s->channels))
        return transposed ? "x[b, in, h, w] needs w[in, out / groups, kh, kw]"
                          : "x[b, in, h, w] needs w[out, in / groups, kh, kw]";
    return NULL;
}

static mixp_result conv2d_infer(mixp_call *c) {
    conv_shape *s = (conv_shape *)c->attrs;
    const char *wrong = conv_shape_wrong(s, c->in[0], c->in[1], 0);
    int64_t shape[4];
    int i;
    if (wrong) return conv_refuse(c, wrong);
    s->height = c->in[0]->shape[2];
    s->width = c->in[0]->shape[3];
    shape[0] = s->batch;
    shape[1] = s->maps;
    for (i = 0; i < 2; i++) {
        int64_t room = c->in[0]->shape[2 + i] + 2 * s->padding[i] - s->dilation[i] * (s->taps[i] - 1) - 1;
        if (room < 0) return conv_refuse(c, "the kernel is larger than the padded image");
        shape[2 + i] = room / s->stride[i] + 1;
    }
    s->rows = shape[2];
    s->columns = shape[3];
    return mixp_call_output(c, c->in[0]->dtype, 4, shape);
}

static mixp_result conv2d_forward(mixp_call *c) {
    conv_work w;
    mixp_result r = conv_work_begin(&w, c->ctx, (const conv_shape *)c->attrs, c->in[0]->dtype, 0);
    return r == MIXP_OK ? conv_gather(&w, mixp_call_x(c, 0), mixp_call_x(c, 1), mixp_call_y(c)) : r;
}

static mixp_result conv2d_backward(mixp_call *c) {
    mixp_out dx = mixp_call_dx(c, 0), dw = mixp_call_dx(c, 1);
    conv_work w;
    mixp_result r = MIXP_OK;
    if (dx.data) r = conv_work_begin(&w, c->ctx, (const conv_shape *)c->attrs, MIXP_F32, 1);
    if (dx.data && r == MIXP_OK) r = conv_scatter(&w, mixp_call_dy(c), mixp_call_x(c, 1), dx);
    if (dw.data && r == MIXP_OK) r = conv_work_begin(&w, c->ctx, (const conv_shape *)c->attrs, c->in[0]->dtype, 0);
    if (dw.data && r == MIXP_OK) r = conv_weight(&w, mixp_call_x(c, 0), mixp_call_dy(c), dw);
    return r;
}

/* The image is the result, and x is the other side. On entry, height and width hold
 * output_padding. */
static mixp_result conv_transpose2d_infer(mixp_call *c) {
    conv_shape *s = (conv_shape *)c->attrs;
    const char *wrong = conv_shape_wrong(s, c->in[0], c->in[1], 1);
    int64_t shape[4], more[2];
    int i;
    if (wrong) return conv_refuse(c, wrong);
    more[0] = s->height;
    more[1] = s->width;
    s->rows = c->in[0]->shape[2];
    s->columns = c->in[0]->shape[3];
    shape[0] = s->batch;
    shape[1] = s->channels;
    for (i = 0; i < 2; i++) {
        if (more[i] < 0 || more[i] >= s->stride[i]) return conv_refuse(c, "output_padding is at least 0, below stride");
        shape[2 + i] = (c->in[0]->shape[2 + i] - 1) * s->stride[i] - 2 * s->padding[i] +
                       s->dilation[i] * (s->taps[i] - 1) + more[i] + 1;
        if (shape[2 + i] < 1) return conv_refuse(c, "the padding leaves nothing of the result");
    }
    s->height = shape[2];
    s->width = shape[3];
    return mixp_call_output(c, c->in[0]->dtype, 4, shape);
}

static mixp_result conv_transpose2d_forward(mixp_call *c) {
    conv_work w;
    mixp_result r = conv_work_begin(&w, c->ctx, (const conv_shape *)c->attrs, MIXP_F32, 1);
    return r == MIXP_OK ? conv_scatter(&w, mixp_call_x(c, 0), mixp_call_x(c, 1), mixp_call_y(c)) : r;
}

static mixp_result conv_transpose2d_backward(mixp_call *c) {
    mixp_out dx = mixp_call_dx(c, 0), dw = mixp_call_dx(c, 1);
    mixp_in dy = mixp_call_dy(c);
    conv_work w;
    mixp_result r = conv_work_begin(&w, c->ctx, (const conv_shape *)c->attrs, dy.dtype, 0);
    if (dx.data && r == MIXP_OK) r = conv_gather(&w, dy, mixp_call_x(c, 1), dx);
    if (dw.data && r == MIXP_OK) r = conv_weight(&w, dy, mixp_call_x(c, 0), dw);
    return r;
}

static conv_shape conv_described(const conv_desc *desc) {
    conv_desc  d;
    conv_shape s;
    int i;
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    if (desc) d = *desc;
    for (i = 0; i < 2; i++) {
        s.stride[i] = d.stride[i] ? d.stride[i] : 1;
        s.dilation[i] = d.dilation[i] ? d.dilation[i] : 1;
        s.padding[i] = d.padding[i];
    }
    s.groups = d.groups ? d.groups : 1;
    s.height = d.output_padding[0];
    s.width = d.output_padding[1];
    return s;
}

/* y + bias[channels], along the channels of y[b, channels, h, w]. */
static mixp_tensor *conv_bias(mixp_context *ctx, mixp_tensor *y, mixp_tensor *bias) {
    int64_t shape[3];
    if (!y || !bias) return y;
    shape[0] = bias->count;
    shape[1] = shape[2] = 1;
    return mixp_add(ctx, y, mixp_reshape(ctx, bias, 3, shape));
}

/* y[b, out, h', w'] of x[b, in, h, w], w[out, in / groups, kh, kw] and bias[out], which may be NULL:
 * torch.nn.functional.conv2d. h' = (h + 2 padding - dilation (kh - 1) - 1) / stride + 1. MIXP_ERR_SHAPE: channels,
 * groups or sizes that do not fit. */
CONV_API mixp_tensor *conv2d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias, const conv_desc *desc) {
    static const mixp_op row = { "conv2d", MIXP_CLASS_LOW, sizeof(conv_shape), conv2d_infer, conv2d_forward,
                                 conv2d_backward, NULL };
    conv_shape   s = conv_described(desc);
    mixp_tensor *in[2];
    in[0] = x;
    in[1] = w;
    return conv_bias(ctx, mixp_apply(ctx, &row, 2, in, 2, &s), bias);
}

/* The transpose of conv2d, as torch.nn.functional.conv_transpose2d: x[b, in, h, w], w[in, out / groups, kh, kw].
 * h' = (h - 1) stride - 2 padding + dilation (kh - 1) + output_padding + 1. Errors as conv2d. */
CONV_API mixp_tensor *conv_transpose2d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                                     const conv_desc *desc) {
    static const mixp_op row = { "conv_transpose2d", MIXP_CLASS_LOW, sizeof(conv_shape), conv_transpose2d_infer,
                                 conv_transpose2d_forward, conv_transpose2d_backward, NULL };
    conv_shape   s = conv_described(desc);
    mixp_tensor *in[2];
    in[0] = x;
    in[1] = w;
    return conv_bias(ctx, mixp_apply(ctx, &row, 2, in, 2, &s), bias);
}

/* Reshapes [a, b, l] to [a, b, 1, l]. */
static void conv_as_image(const mixp_tensor *t, int64_t shape[4]) {
    shape[0] = t->shape[0];
    shape[1] = t->shape[1];
    shape[2] = 1;
    shape[3] = t->shape[2];
}

/* x[b, in, l], w[out, in / groups, k]: conv2d of images with one row; uses the second numbers of
 * the description. */
CONV_API mixp_tensor *conv1d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias, const conv_desc *desc) {
    conv_desc    flat;
    int64_t      image[4], kernel[4], back[3];
    mixp_tensor *y;
    memset(&flat, 0, sizeof flat);
    if (desc) flat = *desc;
    flat.stride[0] = flat.dilation[0] = 1;
    flat.padding[0] = 0;
    if (!x || !w) return NULL;
    if (x->rank != 3 || w->rank != 3) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "conv1d: x[b, in, l] and w[out, in / groups, k] have three dimensions");
        return NULL;
    }
    conv_as_image(x, image);
    conv_as_image(w, kernel);
    y = conv2d(ctx, mixp_reshape(ctx, x, 4, image), mixp_reshape(ctx, w, 4, kernel), bias, &flat);
    if (!y) return NULL;
    back[0] = y->shape[0];
    back[1] = y->shape[1];
    back[2] = y->shape[3];
    return mixp_reshape(ctx, y, 3, back);
}

/* --- pooling ------------------------------------------------------------------------------------------- */

/* The values of all windows: [b * channels, taps, places]. The border is the lowest finite number,
 * or 0 for a mean. */
typedef struct conv_window {
    conv_shape s;
    int        lowest;
} conv_window;

static double conv_lowest(mixp_dtype d)
{ return d == MIXP_F16 ? -65504.0 : d == MIXP_BF16 ? -3.3895313892515355e38 : -3.4028234663852886e38; }

static mixp_result conv_window_infer(mixp_call *c) {
    conv_window *k = (conv_window *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int64_t shape[3];
    int i;
    if (x->rank != 4) return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE, "%s: x is [b, channels, h, w]", c->op->name);
    k->s.batch = x->shape[0] * x->shape[1];
    k->s.channels = 1;
    k->s.height = x->shape[2];
    k->s.width = x->shape[3];
    for (i = 0; i < 2; i++) {
        int64_t room = x->shape[2 + i] + 2 * k->s.padding[i] - k->s.taps[i];
        if (room < 0 || k->s.stride[i] < 1 || k->s.taps[i] < 1 || 2 * k->s.padding[i] > k->s.taps[i])
            return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
                                     "%s: a window is within the padded image, and padding at most half of it",
                                     c->op->name);
        *(i ? &k->s.columns : &k->s.rows) = room / k->s.stride[i] + 1;
    }
    shape[0] = k->s.batch;
    shape[1] = conv_taps(&k->s);
    shape[2] = conv_places(&k->s);
    return mixp_call_output(c, x->dtype, 3, shape);
}

static conv_move conv_window_move(const conv_window *k, mixp_out image, mixp_out columns, int back) {
    conv_move m;
    m.s = &k->s;
    m.n = k->s.batch;
    m.by_tap = conv_places(&k->s);
    m.by_sample = conv_taps(&k->s) * m.by_tap;
    m.by_channel = 0;
    m.image = image;
    m.columns = columns;
    m.back = back;
    return m;
}

static mixp_result conv_window_forward(mixp_call *c) {
    const conv_window *k = (const conv_window *)c->attrs;
    conv_move   m = conv_window_move(k, conv_whole(c->in[0]), mixp_call_y(c), 0);
    mixp_result r = conv_fill(c->ctx, m.columns, c->out->count, k->lowest ? conv_lowest(c->out->dtype) : 0);
    return r == MIXP_OK ? conv_move_all(c->ctx, &m) : r;
}

/* Overlapping windows add up in f32. */
static mixp_result conv_window_backward(mixp_call *c) {
    const conv_window *k = (const conv_window *)c->attrs;
    mixp_out    dx = mixp_call_dx(c, 0), dy;
    conv_work   w;
    conv_move   m;
    mixp_result r;
    if (!dx.data) return MIXP_OK;
    memset(&w, 0, sizeof w);
    w.ctx = c->ctx;
    w.s = k->s;
    w.image = mixp_activation(c->ctx, MIXP_F32, 1, &c->in[0]->count);
    if (!w.image) return MIXP_ERR_MEMORY;
    dy.data = (void *)(uintptr_t)mixp_call_dy(c).data;      /* read only: back is 1 */
    dy.dtype = mixp_call_dy(c).dtype;
    dy.accumulate = 0;
    m = conv_window_move(k, conv_whole(w.image), dy, 1);
    r = conv_fill(c->ctx, m.image, c->in[0]->count, 0);
    if (r == MIXP_OK) r = conv_move_all(c->ctx, &m);
    return r == MIXP_OK ? conv_put_image(&w, 0, k->s.batch, dx) : r;
}

static mixp_tensor *conv_pool(mixp_context *ctx, mixp_tensor *x, int size, int stride, int padding, int largest) {
    static const mixp_op row = { "pool2d", MIXP_CLASS_KEEP, sizeof(conv_window), conv_window_infer, conv_window_forward,
                                 conv_window_backward, NULL };
    conv_window  k;
    mixp_tensor *windows;
    int64_t      shape[4];
    memset(&k, 0, sizeof k);
    k.s.taps[0] = k.s.taps[1] = size;
    k.s.stride[0] = k.s.stride[1] = stride ? stride : size;
    k.s.dilation[0] = k.s.dilation[1] = k.s.groups = 1;
    k.s.padding[0] = k.s.padding[1] = padding;
    k.lowest = largest;
    windows = mixp_apply(ctx, &row, 1, &x, 1, &k);
    if (!windows) return NULL;
    shape[0] = x->shape[0];
    shape[1] = x->shape[1];
    shape[2] = (x->shape[2] + 2 * padding - size) / (int64_t)k.s.stride[0] + 1;
    shape[3] = -1;
    windows = largest ? mixp_max(ctx, windows, 1, 0) : mixp_mean(ctx, windows, 1, 0);
    return mixp_reshape(ctx, windows, 4, shape);
}

/* The maximum or the mean of each window of size x size; stride 0 = size. A mean counts the border
 * as 0: torch.nn.functional.max_pool2d and avg_pool2d. MIXP_ERR_SHAPE: a window larger than the
 * padded image, or padding of more than half a window. */
CONV_API mixp_tensor *max_pool2d(mixp_context *ctx, mixp_tensor *x, int size, int stride, int padding)
{ return conv_pool(ctx, x, size, stride, padding, 1); }
CONV_API mixp_tensor *avg_pool2d(mixp_context *ctx, mixp_tensor *x, int size, int stride, int padding)
{ return conv_pool(ctx, x, size, stride, padding, 0); }

/* Each value becomes rows x cols equal ones: torch.nn.Upsample(scale_factor=(rows, cols), mode="nearest"). KEEP. */
CONV_API mixp_tensor *upsample_nearest2d(mixp_context *ctx, mixp_tensor *x, int rows, int cols) {
    int64_t apart[5], wide[5], shape[4];
    if (!x) return NULL;
    if (x->rank != 4 || rows < 1 || cols < 1) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "upsample_nearest2d: x is [b, channels, h, w] (its rank is %d), and rows "
                          "and cols are at least 1 (they are %d and %d)", x->rank, rows, cols);
        return NULL;
    }
    apart[0] = wide[0] = x->shape[0] * x->shape[1];
    apart[1] = wide[1] = x->shape[2];
    apart[3] = wide[3] = x->shape[3];
    apart[2] = apart[4] = 1;
    wide[2] = rows;
    wide[4] = cols;
    memcpy(shape, x->shape, sizeof shape);
    shape[2] *= rows;
    shape[3] *= cols;
    return mixp_reshape(ctx, mixp_expand(ctx, mixp_reshape(ctx, x, 5, apart), 5, wide), 4, shape);
}

/* --- norms ---------------------------------------------------------------------------------------------- */

static mixp_tensor *conv_affine(mixp_context *ctx, mixp_tensor *x, mixp_tensor *gamma, mixp_tensor *beta) {
    int64_t shape[3];
    if (!x || !gamma) return conv_bias(ctx, x, beta);
    shape[0] = gamma->count;
    shape[1] = shape[2] = 1;
    return conv_bias(ctx, mixp_mul(ctx, x, mixp_reshape(ctx, gamma, 3, shape)), beta);
}

/* Mean 0 and variance 1 over each sample's `groups` parts of the channels, then gamma[channels] and beta[channels],
 * which may be NULL: torch.nn.functional.group_norm. */
CONV_API mixp_tensor *group_norm(mixp_context *ctx, mixp_tensor *x, int groups, mixp_tensor *gamma, mixp_tensor *beta,
                               float eps) {
    int64_t shape[3];
    mixp_tensor *y;
    if (!x) return NULL;
    if (x->rank != 4 || groups < 1 || x->shape[1] % groups) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "group_norm: x is [b, channels, h, w] (its rank is %d), and "
                          "groups divide its channels (they are %d and %.0f)", x->rank, groups,
                          x->rank > 1 ? (double)x->shape[1] : 0.0);
        return NULL;
    }
    shape[0] = x->shape[0];
    shape[1] = groups;
    shape[2] = -1;
    y = mixp_layer_norm(ctx, mixp_reshape(ctx, x, 3, shape), NULL, NULL, eps);
    return conv_affine(ctx, mixp_reshape(ctx, y, 4, x->shape), gamma, beta);
}


static mixp_tensor *conv_statistic(mixp_context *ctx, const char *name, const char *part, int64_t channels,
                                   double value) {
    char full[256];
    mixp_tensor *t;
    if (snprintf(full, sizeof full, "%s.%s", name, part) >= (int)sizeof full) {
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "batch_norm_statistics '%.60s...': use a name of at most 200 bytes", name);
        return NULL;
    }
    t = mixp_buffer(ctx, full, MIXP_F32, 1, &channels);
    if (t) mixp_buffer_set_ranks(t, MIXP_BUFFER_MEAN);
    return t && mixp_fill(t, value) == MIXP_OK ? t : NULL;
}

/* Makes the buffers NAME.running_mean, of 0, and NAME.running_var, of 1, as in torch.nn.BatchNorm2d. Checkpoints
 * contain them, and ranks average them at each update. Call it before the loop. The members are NULL on an error. */
CONV_API norm_statistics batch_norm_statistics(mixp_context *ctx, const char *name, int64_t channels) {
    norm_statistics s;
    s.mean = conv_statistic(ctx, name, "running_mean", channels, 0);
    s.variance = conv_statistic(ctx, name, "running_var", channels, 1);
    return s;
}

/* x[b, channels, h, w] as [channels, b h w]. */
static mixp_tensor *conv_by_channel(mixp_context *ctx, mixp_tensor *x) {
    int64_t shape[2];
    if (!x) return NULL;
    shape[0] = x->shape[1];
    shape[1] = -1;
    return mixp_reshape(ctx, mixp_transpose(ctx, x, 0, 1), 2, shape);
}

/* kept += momentum (batch - kept), on the device. */
static void conv_remember(mixp_context *ctx, mixp_tensor *kept, mixp_tensor *of_batch, float momentum) {
    mixp_tensor *moved = mixp_add(ctx, mixp_scale(ctx, kept, 1.0f - momentum), mixp_scale(ctx, of_batch, momentum));
    if (moved) mixp_copy(kept, moved);
}

/* In f32 at every level of autocast: a variance may exceed fp16's largest number, 65,504. */
static void conv_statistics(mixp_context *ctx, mixp_tensor *rows, const norm_statistics *keep, float momentum) {
    MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, MIXP_F32) {
        mixp_tensor *x = mixp_cast(ctx, rows, MIXP_F32), *mean = mixp_mean(ctx, x, -1, 1);
        mixp_tensor *d = mixp_sub(ctx, x, mean);
        float n = rows ? (float)rows->shape[1] : 1.0f;
        mixp_tensor *variance = mixp_scale(ctx, mixp_mean(ctx, mixp_mul(ctx, d, d), -1, 0), n > 1 ? n / (n - 1) : 1);
        conv_remember(ctx, keep->mean, mixp_reshape(ctx, mean, 1, keep->mean->shape), momentum);
        conv_remember(ctx, keep->variance, variance, momentum);
    }
}

/* (x - mean) / sqrt(variance + eps), in f32 at every level of autocast. */
static mixp_tensor *conv_normalize(mixp_context *ctx, mixp_tensor *x, const norm_statistics *keep, float eps) {
    mixp_tensor *root, *y = NULL;
    int64_t by[3];
    by[0] = x->shape[1];
    by[1] = by[2] = 1;
    MIXP_AUTOCAST(ctx, MIXP_F32) {
        root = mixp_pow(ctx, mixp_add_scalar(ctx, keep->variance, eps), -0.5f);
        y = mixp_sub(ctx, x, mixp_reshape(ctx, keep->mean, 3, by));
        y = mixp_mul(ctx, y, mixp_reshape(ctx, root, 3, by));
    }
    return y;
}

/* Mean 0 and variance 1 of each channel over the batch, then gamma[channels] and beta[channels], which may be NULL:
 * torch.nn.functional.batch_norm with momentum 0.1. training 1: uses the batch's mean and variance, and updates `keep`.
 * 0: uses `keep`. keep NULL: no running statistics; evaluation uses the batch's. MIXP_ERR_SHAPE: x has another rank, or
 * one value in each channel where the batch's variance is used, as in PyTorch.
 *
 * A skipped step leaves `keep` as it was, and a batch that mixp_retry tries three times counts once. PyTorch differs:
 * there a skipped step counts, and one overflow makes the running statistics NaN for ever. Frozen parameters as
 * `keep`, which earlier versions asked for, behave as in PyTorch. */
CONV_API mixp_tensor *batch_norm(mixp_context *ctx, mixp_tensor *x, mixp_tensor *gamma, mixp_tensor *beta,
                               const norm_statistics *keep, int training, float eps) {
    int64_t turned[4];
    mixp_tensor *rows;
    if (!x || (keep && (!keep->mean || !keep->variance))) return NULL;
    if (x->rank != 4) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "batch_norm: x is [b, channels, h, w]");
        return NULL;
    }
    if (!training && keep) return conv_affine(ctx, conv_normalize(ctx, x, keep, eps), gamma, beta);
    if (x->shape[0] * x->shape[2] * x->shape[3] == 1) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "batch_norm: each channel of x has one value, so its variance is 0 and "
                          "the result 0 for any x; take a larger batch, or leave out a last batch of one");
        return NULL;
    }
    turned[0] = x->shape[1];
    turned[1] = x->shape[0];
    turned[2] = x->shape[2];
    turned[3] = x->shape[3];
    rows = conv_by_channel(ctx, x);
    if (keep) conv_statistics(ctx, rows, keep, 0.1f);
    rows = mixp_reshape(ctx, mixp_layer_norm(ctx, rows, NULL, NULL, eps), 4, turned);
    return conv_affine(ctx, mixp_transpose(ctx, rows, 0, 1), gamma, beta);
}

#endif  /* CONV_NO_IMPLEMENTATION */
#endif
