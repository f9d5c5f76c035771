/* conv.h - convolution, pooling, resizing, batch and group norm for mixprec. It uses only the public API.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Include this file after mixprec.h, in C or C++. It runs on every device, because it uses only the kernels `copy`,
 * `convert`, `fill` and the products of the context's device. Images are [batch, channels, ...] with one, two or three
 * dimensions after the channels, as in PyTorch: [l], [h, w], [d, h, w]. A function returns NULL on an error, and the
 * context keeps the error: MIXP_ERR_ARGUMENT if a pointer is NULL and its comment does not call it optional. Under
 * autocast, products are low (class LOW, as torch.nn.functional.conv2d) and norms are f32. The only state is
 * batch_norm's, in buffers that you pass; threads and determinism are those of mixprec's operators.
 *
 * A convolution is a product with the image's columns: the values under each tap of the kernel. Columns are computed
 * for a few samples at a time, at most CONV_COLUMNS values (so that a CPU's cache keeps them; on a GPU eight times as
 * many), and again in backward. One copy makes them from an image with its padding around it. In f32 on a CPU
 * the product reads the columns from the padded image, unless the gradient of a large image does not fit (CONV_COLUMNS). */
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

#define CONV_SAME (-1)          /* padding="same": the result has the image's size; needs stride 1           */

/* Zeroed: stride 1, no padding, dilation 1, one group. Number i is for dimension i after the channels: for a conv2d the
 * first is for the height, the second for the width: PyTorch's stride=2, padding=1 is { 2, 2 } and { 1, 1 } (a stride
 * of { 2 } is an error; a padding of { 1 } pads the height only). Numbers for dimensions that x lacks are 0. */
typedef struct conv_desc {
    int stride[3], padding[3], dilation[3];
    int groups;                 /* number of independent groups of channels                                 */
    int output_padding[3];      /* conv_transpose: extra size at the end, below the stride or the dilation  */
} conv_desc;

/* A window of max_pool and avg_pool. Zeroed except for size: PyTorch's defaults. Numbers as in conv_desc. */
typedef struct pool_desc {
    int size[3];
    int stride[3];              /* 0 = size                                                                 */
    int padding[3];             /* at most half of the size                                                 */
    int dilation[3];            /* 0 = 1                                                                    */
    int ceil_mode;              /* 1: also the last window, which ends beyond the padded image              */
    int image_only;             /* avg_pool, 1: the mean over what lies in the image (count_include_pad=False) */
    int divisor;                /* avg_pool: divides by this number (divisor_override); 0 = the values counted */
} pool_desc;

typedef enum interpolate_mode {
    INTERPOLATE_NEAREST, INTERPOLATE_NEAREST_EXACT, INTERPOLATE_LINEAR, INTERPOLATE_AREA
} interpolate_mode;

/* Numbers as in conv_desc. LINEAR is PyTorch's "linear", "bilinear" or "trilinear". */
typedef struct interpolate_desc {
    interpolate_mode mode;
    int64_t size[3];            /* of the result; 0: floor(scale times the image's)                         */
    double  scale[3];           /* used where size is 0; 0 = 1                                              */
    int     align_corners;      /* LINEAR: 1: the corners' centres keep their places                        */
} interpolate_desc;

/* batch_norm's running statistics: two buffers, f32 [channels] each. */
typedef struct norm_statistics { mixp_tensor *mean, *variance; } norm_statistics;

CONV_API mixp_tensor *conv1d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                             const conv_desc *desc);
CONV_API mixp_tensor *conv2d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                             const conv_desc *desc);
CONV_API mixp_tensor *conv3d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                             const conv_desc *desc);
CONV_API mixp_tensor *conv_transpose1d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                                       const conv_desc *desc);
CONV_API mixp_tensor *conv_transpose2d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                                       const conv_desc *desc);
CONV_API mixp_tensor *conv_transpose3d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                                       const conv_desc *desc);
CONV_API mixp_tensor *max_pool(mixp_context *ctx, mixp_tensor *x, const pool_desc *desc, mixp_tensor **indices);
CONV_API mixp_tensor *avg_pool(mixp_context *ctx, mixp_tensor *x, const pool_desc *desc);
CONV_API mixp_tensor *max_pool2d(mixp_context *ctx, mixp_tensor *x, int size, int stride, int padding);
CONV_API mixp_tensor *avg_pool2d(mixp_context *ctx, mixp_tensor *x, int size, int stride, int padding);
CONV_API mixp_tensor *adaptive_max_pool(mixp_context *ctx, mixp_tensor *x, const int64_t *size,
                                        mixp_tensor **indices);
CONV_API mixp_tensor *adaptive_avg_pool(mixp_context *ctx, mixp_tensor *x, const int64_t *size);
CONV_API mixp_tensor *max_unpool(mixp_context *ctx, mixp_tensor *x, mixp_tensor *indices, const int64_t *size);
CONV_API mixp_tensor *interpolate(mixp_context *ctx, mixp_tensor *x, const interpolate_desc *desc);
CONV_API mixp_tensor *upsample_nearest2d(mixp_context *ctx, mixp_tensor *x, int rows, int cols);
CONV_API mixp_tensor *pixel_shuffle(mixp_context *ctx, mixp_tensor *x, int factor);
CONV_API mixp_tensor *pixel_unshuffle(mixp_context *ctx, mixp_tensor *x, int factor);
CONV_API mixp_tensor *group_norm(mixp_context *ctx, mixp_tensor *x, int groups, mixp_tensor *gamma, mixp_tensor *beta,
                                 float eps);
CONV_API norm_statistics batch_norm_statistics(mixp_context *ctx, const char *name, int64_t channels);
CONV_API mixp_tensor *batch_norm(mixp_context *ctx, mixp_tensor *x, mixp_tensor *gamma, mixp_tensor *beta,
                                 const norm_statistics *keep, int training, float eps);
#ifndef CONV_NO_IMPLEMENTATION
#ifndef CONV_COLUMNS
#  define CONV_COLUMNS (1 << 19)
#endif

/* The sizes of the image, and of the other side: one place per position of the kernel. There are always three axes:
 * those that an image lacks come first and have the size 1. */
typedef struct conv_shape {
    int64_t batch, channels, maps, groups;
    int64_t size[3], places[3], taps[3];
    int64_t stride[3], padding[3], dilation[3];
    int64_t more[3];            /* output_padding                                                           */
} conv_shape;

static int64_t conv_volume(const int64_t n[3]) { return n[0] * n[1] * n[2]; }
static int64_t conv_taps(const conv_shape *s) { return conv_volume(s->taps); }
static int64_t conv_places(const conv_shape *s) { return conv_volume(s->places); }

/* The extent of the padded image along an axis: the image, and all that taps reach. */
static int64_t conv_extent(const conv_shape *s, int axis) {
    int64_t reach = (s->places[axis] - 1) * s->stride[axis] + (s->taps[axis] - 1) * s->dilation[axis] + 1;
    int64_t image = s->padding[axis] + s->size[axis];
    return reach > image ? reach : image;
}
/* With a stride, the padded image is stored by phases: position i of an axis has the phase i % stride and the quotient
 * i / stride, and a phase's values are neighbours. So a tap reads neighbours, whatever the stride. */
static int64_t conv_quotients(const conv_shape *s, int axis)
{ return (conv_extent(s, axis) + s->stride[axis] - 1) / s->stride[axis]; }

static int64_t conv_padded_volume(const conv_shape *s) {
    int64_t product = conv_volume(s->stride);
    int     axis;
    for (axis = 0; axis < 3; axis++) product *= conv_quotients(s, axis);
    return product;
}

/* Does the padded image differ from the image? */
static int conv_padded(const conv_shape *s)
{ return conv_volume(s->stride) > 1 || conv_padded_volume(s) != conv_volume(s->size); }

/* Are the columns the image itself? So it is for kernels of one tap with stride 1. */
static int conv_plain(const conv_shape *s) {
    return conv_taps(s) == 1 && !conv_padded(s);
}

/* At most 2^56 values a tensor, and 2^60 positions along an axis: so no size, no sum of two and no offset in bytes
 * overflows. */
#define CONV_MOST_VALUES    72057594037927936.0
#define CONV_MOST_POSITIONS 1152921504606846976.0

/* Do the columns or the padded image of the convolution, or of its transpose, have too many values? */
static int conv_too_large(const conv_shape *s) {
    double columns = (double)(s->channels > s->maps ? s->channels : s->maps) * (s->batch > 1 ? (double)s->batch : 1.0);
    double padded = columns;
    int    axis;
    for (axis = 0; axis < 3; axis++) {
        const int64_t places = s->places[axis] > s->size[axis] ? s->places[axis] : s->size[axis];
        columns *= (double)s->taps[axis] * (double)places;
        padded *= 2.0 * (double)conv_extent(s, axis);
    }
    return columns > CONV_MOST_VALUES || padded > CONV_MOST_VALUES;
}

/* --- columns: the values under each tap --------------------------------------------------------------- */

static mixp_in conv_in_at(mixp_in a, int64_t i) {
    a.data = (const char *)a.data + (ptrdiff_t)i * (ptrdiff_t)mixp_dtype_size(a.dtype);
    return a;
}
static mixp_out conv_out_at(mixp_out a, int64_t i) {
    a.data = (char *)a.data + (ptrdiff_t)i * (ptrdiff_t)mixp_dtype_size(a.dtype);
    return a;
}
static mixp_in conv_in_of(mixp_out a) {
    mixp_in b;
    b.data = a.data;
    b.dtype = a.dtype;
    return b;
}
static mixp_out conv_whole(const mixp_tensor *t) {
    mixp_out y;
    y.data = t->data;
    y.dtype = t->dtype;
    y.accumulate = 0;
    return y;
}
/* For a side of a copy that is only read. */
static mixp_out conv_read_only(mixp_in a) {
    mixp_out b;
    b.data = (void *)(uintptr_t)a.data;
    b.dtype = a.dtype;
    b.accumulate = 0;
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

/* Rows of an image are short: a copy of them takes about four times as long as a pass over a dense array, by which
 * least_work is counted. */
static mixp_result conv_copy(mixp_context *ctx, const mixp_copy_args *k) {
    mixp_exec x = *mixp_context_exec(ctx);
    x.least_work /= 4;
    return mixp_context_device(ctx)->kernels->copy(&x, k);
}

/* Copies between the padded image of n samples and its columns. The columns have strides for channel, sample and
 * tap. back 1: adds the columns to the image. */
typedef struct conv_move {
    const conv_shape *s;
    int64_t  n;
    int64_t  by_channel, by_sample, by_tap;
    mixp_out image, columns;
    int      back;
} conv_move;

/* Copies the taps from first[i] on, count[i] along axis i. They have one quotient, or the stride is 1. */
static mixp_result conv_move_taps(mixp_context *ctx, const conv_move *m, const int64_t *first, const int64_t *count) {
    const conv_shape *s = m->s;
    int64_t *image, *columns, pixel = 1, tap = m->by_tap, place = 1, at = 0, there = 0;
    mixp_copy_args k;
    int      axis;
    memset(&k, 0, sizeof k);
    image = m->back ? k.dst_strides : k.src_strides;
    columns = m->back ? k.src_strides : k.dst_strides;
    k.rank = 8;
    for (axis = 2; axis >= 0; axis--) {
        const int64_t stride = s->stride[axis], phase = conv_quotients(s, axis) * pixel;
        const int64_t reach = first[axis] * s->dilation[axis];
        k.shape[2 + axis] = count[axis];
        k.shape[5 + axis] = s->places[axis];
        image[2 + axis] = stride == 1 ? s->dilation[axis] * pixel : phase;
        image[5 + axis] = pixel;
        columns[2 + axis] = tap;
        columns[5 + axis] = place;
        at += reach % stride * phase + reach / stride * pixel;
        there += first[axis] * tap;
        pixel = stride * phase;
        tap *= s->taps[axis];
        place *= s->places[axis];
    }
    k.shape[0] = s->channels;
    k.shape[1] = m->n;
    image[0] = pixel;
    image[1] = s->channels * pixel;
    columns[0] = m->by_channel;
    columns[1] = m->by_sample;
    k.src = m->back ? conv_in_at(conv_in_of(m->columns), there) : conv_in_at(conv_in_of(m->image), at);
    k.dst = m->back ? conv_out_at(m->image, at) : conv_out_at(m->columns, there);
    k.dst.accumulate = m->back;
    return conv_copy(ctx, &k);
}

/* The taps along an axis that one copy takes: those of one quotient. With stride 1 a copy from the image takes all, and
 * one that adds to the image takes taps that do not meet. */
static int64_t conv_side(const conv_move *m, int axis) {
    const conv_shape *s = m->s;
    if (s->stride[axis] == 1) return m->back && s->places[axis] > 1 ? 1 : s->taps[axis];
    return s->dilation[axis] == 1 ? s->stride[axis] : 1;
}

static mixp_result conv_move_all(mixp_context *ctx, const conv_move *m) {
    const conv_shape *s = m->s;
    int64_t     side[3], boxes[3], first[3], count[3], box;
    mixp_result r = MIXP_OK;
    int         axis;
    for (axis = 0; axis < 3; axis++) {
        side[axis] = conv_side(m, axis);
        boxes[axis] = (s->taps[axis] + side[axis] - 1) / side[axis];
    }
    for (box = 0; r == MIXP_OK && box < conv_volume(boxes); box++) {
        first[0] = box / (boxes[1] * boxes[2]) * side[0];
        first[1] = box / boxes[2] % boxes[1] * side[1];
        first[2] = box % boxes[2] * side[2];
        for (axis = 0; axis < 3; axis++) {
            count[axis] = s->taps[axis] - first[axis];
            if (count[axis] > side[axis]) count[axis] = side[axis];
        }
        r = conv_move_taps(ctx, m, first, count);
    }
    return r;
}

/* Copies between n samples of an image and the interior of the padded one. back 1: from the padded image. */
typedef struct conv_inside {
    const conv_shape *s;
    int64_t  n;
    mixp_out image, padded;
    int      back;
} conv_inside;

/* Is there a tap with this phase? */
static int conv_phase_used(const conv_shape *s, int axis, int64_t phase) {
    int64_t tap;
    for (tap = 0; tap < s->taps[axis] && tap < s->stride[axis]; tap++)
        if (tap * s->dilation[axis] % s->stride[axis] == phase) return 1;
    return 0;
}

/* Copies the values with a phase along each axis. */
static mixp_result conv_place_phase(mixp_context *ctx, const conv_inside *p, const int64_t *phase) {
    const conv_shape *s = p->s;
    int64_t *in, *out, size = 1, pixel = 1, at = 0, there = 0;
    mixp_copy_args k;
    int      axis;
    memset(&k, 0, sizeof k);
    in = p->back ? k.dst_strides : k.src_strides;
    out = p->back ? k.src_strides : k.dst_strides;
    k.rank = 4;
    for (axis = 2; axis >= 0; axis--) {
        const int64_t stride = s->stride[axis], quotients = conv_quotients(s, axis);
        const int64_t first = (phase[axis] + stride - s->padding[axis] % stride) % stride;
        if (first >= s->size[axis] || (!p->back && !conv_phase_used(s, axis, phase[axis]))) return MIXP_OK;
        k.shape[1 + axis] = (s->size[axis] - first + stride - 1) / stride;
        in[1 + axis] = stride * size;
        out[1 + axis] = pixel;
        at += first * size;
        there += (phase[axis] * quotients + (first + s->padding[axis]) / stride) * pixel;
        size *= s->size[axis];
        pixel *= stride * quotients;
    }
    k.shape[0] = p->n * s->channels;
    in[0] = size;
    out[0] = pixel;
    k.src = conv_in_of(p->back ? conv_out_at(p->padded, there) : conv_out_at(p->image, at));
    k.dst = p->back ? conv_out_at(p->image, at) : conv_out_at(p->padded, there);
    return conv_copy(ctx, &k);
}

static mixp_result conv_place(mixp_context *ctx, const conv_shape *s, int64_t n, mixp_out image, mixp_out padded,
                              int back) {
    const int64_t phases = conv_volume(s->stride);
    int64_t       phase[3], i;
    conv_inside   p;
    mixp_result   r = MIXP_OK;
    p.s = s;
    p.n = n;
    p.image = image;
    p.padded = padded;
    p.back = back;
    for (i = 0; r == MIXP_OK && i < phases; i++) {
        phase[0] = i / (s->stride[1] * s->stride[2]);
        phase[1] = i / s->stride[2] % s->stride[1];
        phase[2] = i % s->stride[2];
        r = conv_place_phase(ctx, &p, phase);
    }
    return r;
}

/* --- the three products: of a convolution, of its transpose, and of the weight's gradient ----------- */

/* The state of a call. Columns have the layout [channels * taps, samples, places]. In f32, a device with the kernel
 * gemm_indexed reads them from the padded image, or adds them to it, and there is no copy of them. */
typedef struct conv_work {
    mixp_context *ctx;
    conv_shape    s;
    int64_t       samples;      /* samples at a time                                                         */
    mixp_tensor  *columns, *padded;     /* for those samples; NULL if not needed                             */
    mixp_tensor  *rows, *runs;  /* gemm_indexed: where each tap of each channel is, and each row of places;
                                   NULL: not used                                                            */
    mixp_in       b;            /* the columns that a product reads                                          */
    int64_t       row, sample;  /* elements from one row of b, from one sample of b, to the next             */
} conv_work;

static int64_t conv_room(mixp_context *ctx)
{ return (mixp_context_device(ctx)->download ? 8 : 1) * (int64_t)CONV_COLUMNS; }

static int64_t conv_part(const conv_work *w, int64_t first)
{ return w->s.batch - first < w->samples ? w->s.batch - first : w->samples; }

/* Computes where gemm_indexed finds each tap of each channel, and each row of places of each sample. */
static mixp_result conv_find_columns(conv_work *w) {
    const conv_shape *s = &w->s;
    int64_t step[3], phase[3], channel = 1, count[2], *rows, *runs, i;
    int     axis;
    for (axis = 2; axis >= 0; axis--) {
        step[axis] = channel;
        phase[axis] = conv_quotients(s, axis) * channel;
        channel = s->stride[axis] * phase[axis];
    }

    count[0] = s->channels * conv_taps(s);
    count[1] = w->samples * s->places[0] * s->places[1];
    w->rows = mixp_activation(w->ctx, MIXP_I64, 1, &count[0]);
    w->runs = mixp_activation(w->ctx, MIXP_I64, 1, &count[1]);
    if (!w->rows || !w->runs) return MIXP_ERR_MEMORY;
    rows = (int64_t *)w->rows->data;
    runs = (int64_t *)w->runs->data;

    for (i = 0; i < count[0]; i++) {
        int64_t tap = i % conv_taps(s);
        rows[i] = i / conv_taps(s) * channel;
        for (axis = 2; axis >= 0; axis--) {
            const int64_t reach = tap % s->taps[axis] * s->dilation[axis];
            rows[i] += reach % s->stride[axis] * phase[axis] + reach / s->stride[axis] * step[axis];
            tap /= s->taps[axis];
        }
    }
    for (i = 0; i < count[1]; i++) {
        const int64_t plane = i / s->places[1];
        runs[i] = plane / s->places[0] * s->channels * channel;
        runs[i] += plane % s->places[0] * step[0] + i % s->places[1] * step[1];
    }
    return MIXP_OK;
}

/* Does the product a b use gemm_indexed? If it adds to the image, a task holds all places of all maps. */
static int conv_is_indexed(mixp_context *ctx, const conv_shape *s, mixp_in a, mixp_in b, int reads) {
    if (a.dtype != MIXP_F32 || b.dtype != MIXP_F32) return 0;
    if (!reads && s->maps * conv_places(s) > CONV_COLUMNS) return 0;
    return mixp_context_device(ctx)->kernels->gemm_indexed != NULL;
}

/* For the product a b. reads: b are columns of the image, which is padded only if it has to be. Otherwise the product
 * is columns. The padded image's border stays 0. */
static mixp_result conv_work_begin(conv_work *w, mixp_context *ctx, const conv_shape *s, mixp_in a, mixp_in b,
                                   int reads) {
    int64_t one = s->channels * conv_taps(s) * conv_places(s), shape[1];
    const mixp_dtype dtype = reads ? b.dtype : MIXP_F32;
    memset(w, 0, sizeof *w);
    w->ctx = ctx;
    w->s = *s;
    w->samples = conv_room(ctx) / one > 0 ? conv_room(ctx) / one : 1;
    if (w->samples > s->batch) w->samples = s->batch;
    if (conv_is_indexed(ctx, s, a, b, reads)) {
        if (conv_find_columns(w) != MIXP_OK) return MIXP_ERR_MEMORY;
    } else {
        shape[0] = one * w->samples;
        w->columns = mixp_activation(ctx, dtype, 1, shape);
        if (!w->columns) return MIXP_ERR_MEMORY;
    }
    if (reads && !conv_padded(s)) return MIXP_OK;
    shape[0] = s->channels * conv_padded_volume(s) * w->samples;
    w->padded = mixp_activation(ctx, dtype, 1, shape);
    return w->padded ? conv_fill(ctx, conv_whole(w->padded), shape[0], 0) : MIXP_ERR_MEMORY;
}

/* The copies between the columns of n samples and their image. */
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

/* Computes the columns of n samples of an image, or only the padded image. */
static mixp_result conv_gather_columns(conv_work *w, int64_t n, mixp_in image) {
    mixp_out    from = conv_read_only(image);
    mixp_result r = MIXP_OK;
    conv_move   m;
    if (w->padded) {
        r = conv_place(w->ctx, &w->s, n, from, conv_whole(w->padded), 0);
        from = conv_whole(w->padded);
    }
    w->b = conv_in_of(from);
    w->sample = w->s.channels * conv_padded_volume(&w->s);
    if (r != MIXP_OK || w->rows) return r;
    m = conv_moves(w, n, from, 0);
    w->b = conv_in_of(m.columns);
    w->row = m.by_tap;
    w->sample = m.by_sample;
    return conv_move_all(w->ctx, &m);
}

static mixp_result conv_product(mixp_context *ctx, mixp_gemm_args *k) {
    k->alpha = 1;
    return mixp_context_device(ctx)->kernels->gemm(mixp_context_exec(ctx), k);
}

/* The product k by gemm_indexed. The columns, from row `first` on, are c, or b. */
static mixp_result conv_product_indexed(const conv_work *w, mixp_gemm_args *k, int64_t first, int are_c) {
    mixp_gemm_indexed_args x;
    mixp_indexed *columns = are_c ? &x.c : &x.b;
    memset(&x, 0, sizeof x);
    k->alpha = 1;
    x.gemm = *k;
    columns->rows = (const int64_t *)w->rows->data + first;
    columns->runs = (const int64_t *)w->runs->data;
    columns->run = w->s.places[2];
    x.taps = conv_taps(&w->s);
    return mixp_context_device(w->ctx)->kernels->gemm_indexed(mixp_context_exec(w->ctx), &x);
}

/* The product k with the columns as b, from row `first` on. */
static mixp_result conv_product_of_columns(const conv_work *w, mixp_gemm_args *k, int64_t first) {
    k->b = conv_in_at(w->b, first * w->row);
    k->ldb = w->row;
    return w->rows ? conv_product_indexed(w, k, first, 0) : conv_product(w->ctx, k);
}

/* y (+)= weight columns of n samples, for each group. */
static mixp_result conv_multiply(const conv_work *w, int64_t n, mixp_in weight, mixp_out y) {
    const conv_shape *s = &w->s;
    int64_t maps = s->maps / s->groups, inner = s->channels / s->groups * conv_taps(s), g;
    mixp_result r = MIXP_OK;
    for (g = 0; r == MIXP_OK && g < s->groups; g++) {
        mixp_gemm_args k;
        memset(&k, 0, sizeof k);
        k.m = maps;
        k.n = k.ldc = conv_places(s);
        k.k = k.lda = inner;
        k.batch = n;
        k.a = conv_in_at(weight, g * maps * inner);
        k.stride_b = w->sample;
        k.c = conv_out_at(y, g * maps * k.n);
        k.stride_c = s->maps * k.n;
        r = conv_product_of_columns(w, &k, g * inner);
    }
    return r;
}

/* y[batch, maps, places] (+)= weight columns(image). */
static mixp_result conv_gather(mixp_context *ctx, const conv_shape *s, mixp_in image, mixp_in weight, mixp_out y) {
    int64_t places = conv_places(s), one = s->channels * conv_volume(s->size), first;
    mixp_result r;
    conv_work w;
    if (s->batch < 1) return MIXP_OK;
    if (conv_plain(s)) {
        memset(&w, 0, sizeof w);
        w.ctx = ctx;
        w.s = *s;
        w.b = image;
        w.row = places;
        w.sample = s->channels * places;
        return conv_multiply(&w, s->batch, weight, y);
    }
    r = conv_work_begin(&w, ctx, s, weight, image, 1);
    for (first = 0; r == MIXP_OK && first < s->batch; first += w.samples) {
        int64_t n = conv_part(&w, first);
        r = conv_gather_columns(&w, n, conv_in_at(image, first * one));
        if (r == MIXP_OK)
            r = conv_multiply(&w, n, weight, conv_out_at(y, first * s->maps * places));
    }
    return r;
}

/* The columns of n samples = weight' x, or padded image += those columns. */
static mixp_result conv_columns_of(conv_work *w, int64_t n, mixp_in x, mixp_in weight) {
    const conv_shape *s = &w->s;
    int64_t places = conv_places(s), maps = s->maps / s->groups, g;
    int64_t inner = s->channels / s->groups * conv_taps(s);
    mixp_result r = MIXP_OK;
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
        k.b = conv_in_at(x, g * maps * places);
        k.ldb = places;
        k.stride_b = s->maps * places;
        k.c = conv_whole(w->padded);
        k.stride_c = s->channels * conv_padded_volume(s);
        if (w->columns) {
            k.c = conv_out_at(conv_whole(w->columns), g * inner * n * places);
            k.ldc = n * places;
            k.stride_c = places;
        }
        r = w->columns ? conv_product(w->ctx, &k) : conv_product_indexed(w, &k, g * inner, 1);
    }
    return r;
}

/* image (+)= the sums of weight' x at each place, made in f32 and rounded once. */
static mixp_result conv_scatter(mixp_context *ctx, const conv_shape *s, mixp_in x, mixp_in weight, mixp_out image) {
    int64_t one = s->channels * conv_volume(s->size), first;
    conv_work w;
    mixp_result r = s->batch < 1 ? MIXP_OK : conv_work_begin(&w, ctx, s, weight, x, 0);
    for (first = 0; r == MIXP_OK && first < s->batch; first += w.samples) {
        int64_t   n = conv_part(&w, first);
        mixp_out  padded = conv_whole(w.padded);
        if (first) r = conv_fill(ctx, padded, n * s->channels * conv_padded_volume(s), 0);
        if (r == MIXP_OK) r = conv_columns_of(&w, n, conv_in_at(x, first * s->maps * conv_places(s)), weight);
        if (r == MIXP_OK && w.columns) {
            conv_move m = conv_moves(&w, n, padded, 1);
            r = conv_move_all(ctx, &m);
        }
        if (r == MIXP_OK) r = conv_place(ctx, s, n, conv_out_at(image, first * one), padded, 1);
    }
    return r;
}

/* The convolution of the other side with the mirrored kernel, which is the transpose of one with stride 1. Returns 0
 * if no convolution equals the transpose, or if the columns of that convolution would be much larger. */
static int conv_mirrored(const conv_shape *s, conv_shape *t) {
    int axis;
    *t = *s;
    t->channels = s->maps;
    t->maps = s->channels;
    for (axis = 0; axis < 3; axis++) {
        t->size[axis] = s->places[axis];
        t->places[axis] = s->size[axis];
        t->padding[axis] = s->dilation[axis] * (s->taps[axis] - 1) - s->padding[axis];
        if (s->stride[axis] != 1 || t->padding[axis] < 0) return 0;
    }
    return conv_plain(t) || s->maps <= 2 * s->channels;
}

/* Mirrors w[groups, maps, channels, taps] to [groups, channels, maps, taps]. */
static mixp_result conv_mirror(mixp_context *ctx, const conv_shape *s, mixp_in weight, mixp_out to) {
    int64_t taps = conv_taps(s), maps = s->maps / s->groups, channels = s->channels / s->groups;
    mixp_copy_args k;
    memset(&k, 0, sizeof k);
    k.rank = 4;
    k.shape[0] = s->groups;
    k.shape[1] = channels;
    k.shape[2] = maps;
    k.shape[3] = taps;
    k.src = conv_in_at(weight, taps - 1);
    k.src_strides[0] = k.dst_strides[0] = maps * channels * taps;
    k.src_strides[1] = k.dst_strides[2] = taps;
    k.src_strides[2] = channels * taps;
    k.src_strides[3] = -1;
    k.dst = to;
    k.dst_strides[1] = maps * taps;
    k.dst_strides[3] = 1;
    return conv_copy(ctx, &k);
}

/* image (+)= the transpose of conv_gather. */
static mixp_result conv_transposed(mixp_context *ctx, const conv_shape *s, mixp_in x, mixp_in weight, mixp_out image) {
    int64_t      count = s->maps * (s->channels / s->groups) * conv_taps(s);
    mixp_tensor *mirrored;
    conv_shape   t;
    mixp_result  r;
    if (!conv_mirrored(s, &t)) return conv_scatter(ctx, s, x, weight, image);
    mirrored = mixp_activation(ctx, weight.dtype, 1, &count);
    if (!mirrored) return MIXP_ERR_MEMORY;
    r = conv_mirror(ctx, s, weight, conv_whole(mirrored));
    return r == MIXP_OK ? conv_gather(ctx, &t, x, conv_in_of(conv_whole(mirrored)), image) : r;
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
    return conv_copy(w->ctx, &k);
}

/* sum (+)= x columns' of n samples, for each group. */
static mixp_result conv_weight_part(conv_work *w, int64_t n, mixp_in x, mixp_out sum) {
    const conv_shape *s = &w->s;
    int64_t maps = s->maps / s->groups, inner = s->channels / s->groups * conv_taps(s), g;
    mixp_result r = MIXP_OK;
    for (g = 0; r == MIXP_OK && g < s->groups; g++) {
        mixp_gemm_args k;
        memset(&k, 0, sizeof k);
        k.m = maps;
        k.n = k.ldc = inner;
        k.k = k.lda = n * conv_places(s);
        k.batch = 1;
        k.trans_b = 1;
        k.a = conv_in_at(x, g * maps * k.k);
        k.c = conv_out_at(sum, g * maps * inner);
        r = conv_product_of_columns(w, &k, g * inner);
    }
    return r;
}

/* dw (+)= x columns(image)', summed over samples in f32. */
static mixp_result conv_weight(mixp_context *ctx, const conv_shape *s, mixp_in image, mixp_in x, mixp_out dw) {
    int64_t other = s->maps * conv_places(s), one = s->channels * conv_volume(s->size), first, shape[1];
    int64_t count = s->maps * (s->channels / s->groups) * conv_taps(s);
    mixp_tensor *turned, *sum;
    mixp_copy_args put;
    conv_work   w;
    mixp_result r;
    if (s->batch < 1) return dw.accumulate ? MIXP_OK : conv_fill(ctx, dw, count, 0);
    r = conv_work_begin(&w, ctx, s, x, image, 1);
    shape[0] = w.samples > 1 ? w.samples * other : 1;
    turned = mixp_activation(ctx, x.dtype, 1, shape);
    sum = mixp_activation(ctx, MIXP_F32, 1, &count);
    if (!turned || !sum) return MIXP_ERR_MEMORY;
    for (first = 0; r == MIXP_OK && first < s->batch; first += w.samples) {
        int64_t  n = conv_part(&w, first);
        mixp_in  from = conv_in_at(x, first * other);
        mixp_out to = conv_whole(sum);
        to.accumulate = first > 0;
        r = conv_gather_columns(&w, n, conv_in_at(image, first * one));
        if (r == MIXP_OK && n > 1) {
            r = conv_turn(&w, n, from, conv_whole(turned));
            from = conv_in_of(conv_whole(turned));
        }
        if (r == MIXP_OK) r = conv_weight_part(&w, n, from, to);
    }
    memset(&put, 0, sizeof put);
    put.rank = 1;
    put.shape[0] = count;
    put.src = conv_in_of(conv_whole(sum));
    put.dst = dw;
    put.src_strides[0] = put.dst_strides[0] = 1;
    return r == MIXP_OK ? conv_copy(ctx, &put) : r;
}

/* --- operators ---------------------------------------------------------------------------------------- */

static mixp_result conv_refuse(mixp_call *c, const char *what) {
    const mixp_tensor *x = c->in[0], *w = c->in[1];
    return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
                             "%s: x of rank %d with %lld channels and w of rank %d with %lld: %s", c->op->name,
                             x->rank, x->rank > 1 ? (long long)x->shape[1] : 0LL, w->rank,
                             w->rank > 1 ? (long long)w->shape[1] : 0LL, what);
}

/* The dimensions after the channels, at the end of to[3]. */
static void conv_sizes(const mixp_tensor *t, int64_t *to) {
    int i;
    to[0] = to[1] = to[2] = 1;
    for (i = 2; i < t->rank; i++) to[5 - t->rank + i - 2] = t->shape[i];
}

#define CONV_TOO_LARGE "the padded image or its columns are too large; use a smaller stride, padding or dilation"

/* Fills in the sizes from x and w; the description's numbers are in s already. */
static const char *conv_shape_wrong(conv_shape *s, const mixp_tensor *x, const mixp_tensor *w, int transposed) {
    int64_t sizes[3];
    int     i;
    conv_sizes(w, s->taps);
    conv_sizes(x, sizes);
    for (i = 0; i < 3; i++) {
        if (s->stride[i] < 1 || s->dilation[i] < 1 || s->padding[i] < CONV_SAME)
            return "strides and dilations are at least 1, padding at least 0";
        if (s->padding[i] == CONV_SAME && (transposed || s->stride[i] != 1))
            return "padding CONV_SAME needs stride 1, and no transpose";
    }
    s->batch = x->shape[0];
    s->maps = w->shape[0];
    s->channels = w->shape[1] * s->groups;
    if (s->groups < 1 || s->maps % s->groups) return "groups must divide the channels of both sides";
    if (x->shape[1] != (transposed ? s->maps : s->channels))
        return transposed ? "x[b, in, ...] needs w[in, out / groups, ...]"
                          : "x[b, in, ...] needs w[out, in / groups, ...]";
    if (s->maps < 1 || s->channels < 1) return "x and w need at least 1 channel on each side";
    for (i = 0; i < 3; i++) {
        if (s->taps[i] < 1 || sizes[i] < 1)
            return "x and w need at least 1 value along each dimension; only b may be 0";
        if ((double)sizes[i] * (double)s->stride[i] > CONV_MOST_POSITIONS ||
            (double)s->taps[i] * (double)s->dilation[i] > CONV_MOST_POSITIONS)
            return CONV_TOO_LARGE;
    }
    return NULL;
}

/* A stride to no further place is 1. */
static void conv_calm_strides(conv_shape *s) {
    int i;
    for (i = 0; i < 3; i++)
        if (s->places[i] == 1) s->stride[i] = 1;
}

/* The result [batch, channels, size...], with as many dimensions as x. */
static mixp_result conv_output(mixp_call *c, int64_t channels, const int64_t *size) {
    const mixp_tensor *x = c->in[0];
    int64_t shape[5];
    int     i;
    shape[0] = x->shape[0];
    shape[1] = channels;
    for (i = 2; i < x->rank; i++) shape[i] = size[5 - x->rank + i - 2];
    return mixp_call_output(c, x->dtype, x->rank, shape);
}

static mixp_result conv_infer(mixp_call *c) {
    conv_shape *s = (conv_shape *)c->attrs;
    const char *wrong = conv_shape_wrong(s, c->in[0], c->in[1], 0);
    int i;
    if (wrong) return conv_refuse(c, wrong);
    conv_sizes(c->in[0], s->size);
    for (i = 0; i < 3; i++) {
        int64_t around = s->dilation[i] * (s->taps[i] - 1);
        int64_t room = s->size[i] - 1 + (s->padding[i] == CONV_SAME ? around : 2 * s->padding[i]) - around;
        if (s->padding[i] == CONV_SAME) s->padding[i] = around / 2;
        if (room < 0) return conv_refuse(c, "the kernel is larger than the padded image");
        s->places[i] = room / s->stride[i] + 1;
    }
    conv_calm_strides(s);
    if (conv_too_large(s)) return conv_refuse(c, CONV_TOO_LARGE);
    return conv_output(c, s->maps, s->places);
}

static mixp_result conv_forward(mixp_call *c) {
    return conv_gather(c->ctx, (const conv_shape *)c->attrs, mixp_call_x(c, 0), mixp_call_x(c, 1), mixp_call_y(c));
}

static mixp_result conv_backward(mixp_call *c) {
    const conv_shape *s = (const conv_shape *)c->attrs;
    mixp_out    dx = mixp_call_dx(c, 0), dw = mixp_call_dx(c, 1);
    mixp_result r = MIXP_OK;
    if (dx.data) r = conv_transposed(c->ctx, s, mixp_call_dy(c), mixp_call_x(c, 1), dx);
    if (dw.data && r == MIXP_OK) r = conv_weight(c->ctx, s, mixp_call_x(c, 0), mixp_call_dy(c), dw);
    return r;
}

/* The image is the result, and x is the other side. */
static mixp_result conv_transpose_infer(mixp_call *c) {
    conv_shape *s = (conv_shape *)c->attrs;
    const char *wrong = conv_shape_wrong(s, c->in[0], c->in[1], 1);
    int i;
    if (wrong) return conv_refuse(c, wrong);
    conv_sizes(c->in[0], s->places);
    for (i = 0; i < 3; i++) {
        if (s->more[i] < 0 || (s->more[i] >= s->stride[i] && s->more[i] >= s->dilation[i]))
            return conv_refuse(c, "output_padding is at least 0, and below the stride or the dilation");
        s->size[i] = (s->places[i] - 1) * s->stride[i] - 2 * s->padding[i] + s->dilation[i] * (s->taps[i] - 1) +
                     s->more[i] + 1;
        if (s->size[i] < 1) return conv_refuse(c, "the padding leaves nothing of the result");
    }
    conv_calm_strides(s);
    if (conv_too_large(s)) return conv_refuse(c, CONV_TOO_LARGE);
    return conv_output(c, s->channels, s->size);
}

static mixp_result conv_transpose_forward(mixp_call *c) {
    return conv_transposed(c->ctx, (const conv_shape *)c->attrs, mixp_call_x(c, 0), mixp_call_x(c, 1),
                           mixp_call_y(c));
}

static mixp_result conv_transpose_backward(mixp_call *c) {
    const conv_shape *s = (const conv_shape *)c->attrs;
    mixp_out    dx = mixp_call_dx(c, 0), dw = mixp_call_dx(c, 1);
    mixp_in     dy = mixp_call_dy(c);
    mixp_result r = MIXP_OK;
    if (dx.data) r = conv_gather(c->ctx, s, dy, mixp_call_x(c, 1), dx);
    if (dw.data && r == MIXP_OK) r = conv_weight(c->ctx, s, dy, mixp_call_x(c, 0), dw);
    return r;
}

/* Puts numbers for `dims` dimensions at the end of to[3]; 0 counts as `zero`. Returns 0 if there are more. */
static int conv_numbers_of(const int *from, int dims, int64_t zero, int64_t *to) {
    int i;
    to[0] = to[1] = to[2] = zero;
    for (i = 0; i < 3; i++) {
        if (i < dims) to[3 - dims + i] = from[i] ? from[i] : zero;
        else if (from[i]) return 0;
    }
    return 1;
}

/* PyTorch's stride=2 is { 2, 2 } in two dimensions. A list that ends early would set only the first. */
static int conv_is_whole(mixp_context *ctx, const char *name, const char *what, const int *from, int dims) {
    int i, given = 0;
    for (i = 0; i < dims && i < 3; i++) given += from[i] != 0;
    if (!given || given == dims) return 1;
    mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "%s: %s is { %d, %d, %d }: set a number for each of %d dimensions", name,
                      what, from[0], from[1], from[2], dims);
    return 0;
}

/* Axes that an image lacks have stride and dilation 1, and no padding. */
static int conv_described(conv_shape *s, const conv_desc *desc, int dims) {
    conv_desc d;
    int       fits;
    memset(&d, 0, sizeof d);
    memset(s, 0, sizeof *s);
    if (desc) d = *desc;
    s->groups = d.groups ? d.groups : 1;
    fits = conv_numbers_of(d.stride, dims, 1, s->stride);
    fits &= conv_numbers_of(d.dilation, dims, 1, s->dilation);
    fits &= conv_numbers_of(d.padding, dims, 0, s->padding);
    return fits & conv_numbers_of(d.output_padding, dims, 0, s->more);
}

/* Is the description for images of `dims` dimensions, and x such an image? */
static int conv_fits(mixp_context *ctx, const char *name, const mixp_tensor *x, int dims, int described) {
    if (x->rank == dims + 2 && described) return 1;
    mixp_context_fail(ctx, MIXP_ERR_SHAPE, x->rank == dims + 2
                      ? "%s: rank %d has %d dimensions after the channels; set the description's numbers for further "
                        "ones to 0"
                      : "%s: pass tensors of rank %d, with %d dimensions after the first two; the rank of this one "
                        "is %d",
                      name, dims + 2, dims, x->rank);
    return 0;
}

static int conv_given(mixp_context *ctx, const char *name, const char *what, const void *pointer) {
    if (!pointer) mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "%s: %s is NULL", name, what);
    return pointer != NULL;
}

/* y + bias[channels], along the channels. The sum has the dtype of y: under autocast PyTorch casts the bias too. */
static mixp_tensor *conv_bias(mixp_context *ctx, mixp_tensor *y, mixp_tensor *bias) {
    int64_t shape[4] = { 1, 1, 1, 1 };
    if (!y || !bias) return y;
    if (bias->rank != 1 || bias->count != y->shape[1]) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "conv: a bias has one value for each of %lld channels; it has %lld",
                          (long long)y->shape[1], (long long)bias->count);
        return NULL;
    }
    shape[0] = bias->count;
    if (bias->dtype != y->dtype) bias = mixp_cast(ctx, bias, y->dtype);
    return mixp_add(ctx, y, mixp_reshape(ctx, bias, y->rank - 1, shape));
}

static mixp_tensor *conv_run(mixp_context *ctx, const mixp_op *row, int dims, mixp_tensor *const *in,
                             mixp_tensor *bias, const conv_desc *desc) {
    conv_shape s;
    int        described = conv_described(&s, desc, dims);
    if (!conv_given(ctx, row->name, "x", in[0]) || !conv_given(ctx, row->name, "w", in[1])) return NULL;
    if (!conv_fits(ctx, row->name, in[0], dims, described) || !conv_fits(ctx, row->name, in[1], dims, 1)) return NULL;
    if (desc && (!conv_is_whole(ctx, row->name, "stride", desc->stride, dims) ||
                 !conv_is_whole(ctx, row->name, "dilation", desc->dilation, dims)))
        return NULL;
    return conv_bias(ctx, mixp_apply(ctx, row, 2, in, 2, &s), bias);
}

/* The body of a convolution: `row` is its operator, whose functions are `infer`, `forward` and `backward`. */
#define CONV_BODY(name, dimensions, infer, forward, backward)                                                       \
    static const mixp_op row = { name, MIXP_CLASS_LOW, sizeof(conv_shape), infer, forward, backward, NULL };        \
    mixp_tensor *in[2];                                                                                             \
    in[0] = x;                                                                                                      \
    in[1] = w;                                                                                                      \
    return conv_run(ctx, &row, dimensions, in, bias, desc)

/* y[b, out, ...] of x[b, in, ...], w[out, in / groups, taps...] and bias[out], which may be NULL; desc NULL: as zeroed:
 * torch.nn.functional.conv1d, conv2d and conv3d, for images of one, two and three dimensions. The result has
 * (size + 2 padding - dilation (taps - 1) - 1) / stride + 1 places along a dimension, rounded down. MIXP_ERR_SHAPE:
 * channels, groups, ranks or sizes that do not fit, 0 channels or values along a dimension (a batch of 0 is valid), or
 * a padded image of more than about 2^53 values or columns of more than 2^56. */
CONV_API mixp_tensor *conv1d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                             const conv_desc *desc)
{ CONV_BODY("conv1d", 1, conv_infer, conv_forward, conv_backward); }
CONV_API mixp_tensor *conv2d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                             const conv_desc *desc)
{ CONV_BODY("conv2d", 2, conv_infer, conv_forward, conv_backward); }
CONV_API mixp_tensor *conv3d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                             const conv_desc *desc)
{ CONV_BODY("conv3d", 3, conv_infer, conv_forward, conv_backward); }

/* The transposes, as torch.nn.functional.conv_transpose1d, 2d and 3d: x[b, in, ...], w[in, out / groups, taps...]. The
 * result has (places - 1) stride - 2 padding + dilation (taps - 1) + output_padding + 1 values along a dimension.
 * Errors as conv2d; MIXP_ERR_SHAPE also for an output_padding that reaches both stride and dilation. */
CONV_API mixp_tensor *conv_transpose1d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                                       const conv_desc *desc)
{ CONV_BODY("conv_transpose1d", 1, conv_transpose_infer, conv_transpose_forward, conv_transpose_backward); }
CONV_API mixp_tensor *conv_transpose2d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                                       const conv_desc *desc)
{ CONV_BODY("conv_transpose2d", 2, conv_transpose_infer, conv_transpose_forward, conv_transpose_backward); }
CONV_API mixp_tensor *conv_transpose3d(mixp_context *ctx, mixp_tensor *x, mixp_tensor *w, mixp_tensor *bias,
                                       const conv_desc *desc)
{ CONV_BODY("conv_transpose3d", 3, conv_transpose_infer, conv_transpose_forward, conv_transpose_backward); }
#undef CONV_BODY

/* --- positions: small f32 tables that the device computes, so that a captured step needs no host memory ---- */

/* 0, 1, ... n - 1; exact to 2^24. */
static mixp_tensor *conv_count(mixp_context *ctx, int64_t n)
{ return mixp_add_scalar(ctx, mixp_cumsum(ctx, mixp_full(ctx, MIXP_F32, 1, &n, 1), 0), -1.0f); }

/* A vector as [n, 1], so that it meets each column. */
static mixp_tensor *conv_upright(mixp_context *ctx, mixp_tensor *x) { return mixp_unsqueeze(ctx, x, 1); }

static mixp_result conv_index_infer(mixp_call *c)
{ return mixp_call_output(c, MIXP_I32, c->in[0]->rank, c->in[0]->shape); }

static mixp_result conv_index_forward(mixp_call *c) {
    mixp_convert_args k;
    memset(&k, 0, sizeof k);
    k.n = c->in[0]->count;
    k.src = mixp_call_x(c, 0);
    k.dst = mixp_call_y(c);
    return mixp_context_device(c->ctx)->kernels->convert(mixp_context_exec(c->ctx), &k);
}

/* Integers in f32 as i32. */
static mixp_tensor *conv_index(mixp_context *ctx, mixp_tensor *x) {
    static const mixp_op row = { "index", MIXP_CLASS_KEEP, 0, conv_index_infer, conv_index_forward, NULL, NULL };
    return mixp_apply(ctx, &row, 1, &x, 1, NULL);
}

/* x as [before, n, after], where n is dimension `dim`. */
static mixp_tensor *conv_around(mixp_context *ctx, mixp_tensor *x, int dim) {
    int64_t shape[3] = { 1, 1, 1 };
    int     i;
    if (!x) return NULL;
    for (i = 0; i < x->rank; i++) shape[i < dim ? 0 : i == dim ? 1 : 2] *= x->shape[i];
    return mixp_reshape(ctx, x, 3, shape);
}

/* y with the dimensions of x, but n along `dim`. */
static mixp_tensor *conv_as_before(mixp_context *ctx, mixp_tensor *y, const mixp_tensor *x, int dim, int64_t n) {
    int64_t shape[MIXP_MAX_RANK];
    memcpy(shape, x->shape, sizeof shape);
    shape[dim] = n;
    return mixp_reshape(ctx, y, x->rank, shape);
}

/* x at positions[m] along `dim`. */
static mixp_tensor *conv_pick(mixp_context *ctx, mixp_tensor *x, int dim, mixp_tensor *positions) {
    mixp_tensor *flat = conv_around(ctx, x, dim), *ids;
    int64_t      shape[3] = { 1, 1, 1 };
    if (!flat || !positions) return NULL;
    shape[1] = positions->count;
    ids = mixp_reshape(ctx, conv_index(ctx, positions), 3, shape);
    shape[0] = flat->shape[0];
    shape[2] = flat->shape[2];
    return conv_as_before(ctx, mixp_gather(ctx, flat, 1, mixp_expand(ctx, ids, 3, shape)), x, dim, positions->count);
}

/* by[m, n] x along `dim`, in f32. */
static mixp_tensor *conv_along(mixp_context *ctx, mixp_tensor *x, int dim, mixp_tensor *by) {
    mixp_tensor *flat = conv_around(ctx, x, dim), *y;
    int64_t      lines[2];
    if (!flat || !by) return NULL;
    lines[0] = flat->shape[0];
    lines[1] = flat->shape[1];
    if (flat->shape[2] > 1) y = mixp_matmul(ctx, by, flat, 0, 0);
    else y = mixp_matmul(ctx, mixp_reshape(ctx, flat, 2, lines), by, 0, 1);
    return conv_as_before(ctx, y, x, dim, by->shape[0]);
}

/* --- pooling ------------------------------------------------------------------------------------------- */

/* The values of all windows: [b * channels, taps, places]. The border is the lowest finite number,
 * or 0 for a mean. */
typedef struct conv_window {
    conv_shape s;
    int        lowest, ceil_mode;
} conv_window;

static double conv_lowest(mixp_dtype d)
{ return d == MIXP_F16 ? -65504.0 : d == MIXP_BF16 ? -3.3895313892515355e38 : -3.4028234663852886e38; }

/* The places of a window along an axis; 0 if the window fits nowhere. In ceil_mode the last place begins before the
 * image ends. */
static int64_t conv_window_places(const conv_window *k, int i) {
    const conv_shape *s = &k->s;
    int64_t room = s->size[i] + 2 * s->padding[i] - s->dilation[i] * (s->taps[i] - 1) - 1, places;
    if (s->stride[i] < 1 || s->dilation[i] < 1 || s->taps[i] < 1 || s->padding[i] < 0) return 0;
    if (s->size[i] < 1) return 0;
    if (room < 0 || 2 * s->padding[i] > s->taps[i]) return 0;
    places = room / s->stride[i] + 1;
    if (!k->ceil_mode || room % s->stride[i] == 0) return places;
    return places * s->stride[i] < s->size[i] + s->padding[i] ? places + 1 : places;
}

static mixp_result conv_window_infer(mixp_call *c) {
    conv_window *k = (conv_window *)c->attrs;
    const mixp_tensor *x = c->in[0];
    int64_t shape[3];
    int i;
    k->s.batch = x->shape[0] * x->shape[1];
    k->s.channels = 1;
    conv_sizes(x, k->s.size);
    for (i = 0; i < 3; i++) {
        k->s.places[i] = conv_window_places(k, i);
        if (k->s.places[i] < 1)
            return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE,
                                     "%s: sizes, strides and dilations are at least 1, a window is within the padded "
                                     "image, and padding at most half of its size", c->op->name);
    }
    conv_calm_strides(&k->s);
    if (conv_too_large(&k->s))
        return mixp_context_fail(c->ctx, MIXP_ERR_SHAPE, "%s: the windows have too many values; use a smaller size, "
                                 "padding or dilation", c->op->name);
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

static mixp_tensor *conv_window_padded(mixp_context *ctx, const conv_window *k, mixp_dtype dtype) {
    int64_t count = k->s.batch * conv_padded_volume(&k->s);
    return mixp_activation(ctx, dtype, 1, &count);
}

static mixp_result conv_window_forward(mixp_call *c) {
    const conv_window *k = (const conv_window *)c->attrs;
    mixp_tensor *padded = NULL;
    conv_move    m = conv_window_move(k, conv_read_only(mixp_call_x(c, 0)), mixp_call_y(c), 0);
    mixp_result  r = MIXP_OK;
    if (conv_padded(&k->s)) {
        padded = conv_window_padded(c->ctx, k, c->in[0]->dtype);
        if (!padded) return MIXP_ERR_MEMORY;
        r = conv_fill(c->ctx, conv_whole(padded), padded->count, k->lowest ? conv_lowest(padded->dtype) : 0);
        if (r == MIXP_OK) r = conv_place(c->ctx, &k->s, m.n, m.image, conv_whole(padded), 0);
        m.image = conv_whole(padded);
    }
    return r == MIXP_OK ? conv_move_all(c->ctx, &m) : r;
}

/* Overlapping windows add up in f32. */
static mixp_result conv_window_backward(mixp_call *c) {
    const conv_window *k = (const conv_window *)c->attrs;
    mixp_out     dx = mixp_call_dx(c, 0);
    mixp_tensor *padded;
    conv_move    m;
    mixp_result  r;
    if (!dx.data) return MIXP_OK;
    padded = conv_window_padded(c->ctx, k, MIXP_F32);
    if (!padded) return MIXP_ERR_MEMORY;
    m = conv_window_move(k, conv_whole(padded), conv_read_only(mixp_call_dy(c)), 1);
    r = conv_fill(c->ctx, m.image, padded->count, 0);
    if (r == MIXP_OK) r = conv_move_all(c->ctx, &m);
    return r == MIXP_OK ? conv_place(c->ctx, &k->s, m.n, dx, m.image, 1) : r;
}

/* Fills in a window, and makes the values of all windows. */
static mixp_tensor *conv_windows(mixp_context *ctx, mixp_tensor *x, const pool_desc *desc, conv_window *k) {
    static const mixp_op row = { "pool", MIXP_CLASS_KEEP, sizeof(conv_window), conv_window_infer, conv_window_forward,
                                 conv_window_backward, NULL };
    const int dims = x->rank - 2;
    int       fits, i;
    if (dims < 1 || dims > 3) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "pool: x is [batch, channels, ...] of rank 3 to 5; its rank is %d",
                          x->rank);
        return NULL;
    }
    k->s.groups = 1;
    k->ceil_mode = desc->ceil_mode;
    fits = conv_numbers_of(desc->size, dims, 1, k->s.taps);
    fits &= conv_numbers_of(desc->stride, dims, 0, k->s.stride);
    fits &= conv_numbers_of(desc->dilation, dims, 1, k->s.dilation);
    fits &= conv_numbers_of(desc->padding, dims, 0, k->s.padding);
    for (i = 0; i < 3; i++)
        if (!k->s.stride[i]) k->s.stride[i] = k->s.taps[i];
    conv_sizes(x, k->s.size);
    for (i = 0; i < 3; i++) k->s.places[i] = conv_window_places(k, i);
    if (!conv_fits(ctx, "pool", x, dims, fits) || !conv_is_whole(ctx, "pool", "size", desc->size, dims) ||
        !conv_is_whole(ctx, "pool", "stride", desc->stride, dims) ||
        !conv_is_whole(ctx, "pool", "dilation", desc->dilation, dims))
        return NULL;
    if (!desc->size[0]) {
        mixp_context_fail(ctx, MIXP_ERR_ARGUMENT, "pool: size is 0: set the size of the window");
        return NULL;
    }
    return mixp_apply(ctx, &row, 1, &x, 1, k);
}

/* y[b channels, ...] as [b, channels, places...], with as many dimensions as x. */
static mixp_tensor *conv_pooled(mixp_context *ctx, mixp_tensor *y, const mixp_tensor *x, const int64_t *places) {
    int64_t shape[5];
    int     i;
    shape[0] = x->shape[0];
    shape[1] = x->shape[1];
    for (i = 2; i < x->rank; i++) shape[i] = places[5 - x->rank + i - 2];
    return mixp_reshape(ctx, y, x->rank, shape);
}

/* Positions in the image of each tap at each place along an axis: [taps, places]. For a tap in the border it is the
 * first position of the window that is in the image. */
static mixp_tensor *conv_positions(mixp_context *ctx, const conv_shape *s, int axis) {
    mixp_tensor *place = mixp_scale(ctx, conv_count(ctx, s->places[axis]), (float)s->stride[axis]);
    mixp_tensor *tap = mixp_scale(ctx, conv_count(ctx, s->taps[axis]), (float)s->dilation[axis]);
    mixp_tensor *at = mixp_add(ctx, conv_upright(ctx, tap), mixp_add_scalar(ctx, place, (float)-s->padding[axis]));
    mixp_tensor *zero, *last, *first;
    if (conv_extent(s, axis) == s->size[axis]) return at;
    zero = mixp_full(ctx, MIXP_F32, 0, NULL, 0);
    last = mixp_full(ctx, MIXP_F32, 0, NULL, (double)(s->size[axis] - 1));
    first = mixp_min(ctx, mixp_where(ctx, mixp_lt(ctx, at, zero), last, mixp_minimum(ctx, at, last)), 0, 1);
    return mixp_where(ctx, mixp_lt(ctx, at, zero), first, mixp_where(ctx, mixp_gt(ctx, at, last), first, at));
}

/* The index in its channel of each tap at each place, f32 [taps, places], from the positions along each axis. */
static mixp_tensor *conv_flat_positions(mixp_context *ctx, const conv_shape *s, mixp_tensor *const *along) {
    mixp_tensor *sum = NULL;
    int64_t shape[6], size = 1;
    int     axis, i;
    for (axis = 2; axis >= 0; axis--) {
        mixp_tensor *one = mixp_scale(ctx, along[axis], (float)size);
        for (i = 0; i < 6; i++) shape[i] = 1;
        shape[axis] = s->taps[axis];
        shape[3 + axis] = s->places[axis];
        one = mixp_reshape(ctx, one, 6, shape);
        sum = sum ? mixp_add(ctx, sum, one) : one;
        size *= s->size[axis];
    }
    shape[0] = conv_taps(s);
    shape[1] = conv_places(s);
    return mixp_reshape(ctx, sum, 2, shape);
}

/* The largest of each window, and where it is. along: positions, or NULL if no index is wanted. */
static mixp_tensor *conv_largest(mixp_context *ctx, mixp_tensor *windows, const conv_shape *s,
                                 mixp_tensor *const *along, mixp_tensor **indices) {
    if (!windows) return NULL;
    if (indices) MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, MIXP_F32) {
        mixp_tensor *table = mixp_expand(ctx, conv_flat_positions(ctx, s, along), 3, windows->shape);
        mixp_tensor *first = mixp_argmax(ctx, windows, 1, 1);
        *indices = conv_index(ctx, mixp_gather(ctx, table, 1, first));
    }
    return mixp_max(ctx, windows, 1, 0);
}

/* The maximum of each window of x[b, channels, ...]: torch.nn.functional.max_pool1d, 2d and 3d, for images of one, two
 * and three dimensions. *indices (unless NULL): i32, where the maximum is in its channel, the first one if several are
 * equal; a channel has at most 2^24 values then. The border counts as the lowest finite number; where it is the maximum
 * (the window's values are -INFINITY), the index is that of the window's first value in the image. Class KEEP.
 * MIXP_ERR_SHAPE: a window larger than the padded image, padding of more than half the size, or numbers for dimensions
 * that x lacks. MIXP_ERR_ARGUMENT: desc is NULL. */
CONV_API mixp_tensor *max_pool(mixp_context *ctx, mixp_tensor *x, const pool_desc *desc, mixp_tensor **indices) {
    mixp_tensor *windows, *along[3] = { NULL, NULL, NULL };
    conv_window  k;
    int          i;
    if (indices) *indices = NULL;
    if (!conv_given(ctx, "max_pool", "x", x) || !conv_given(ctx, "max_pool", "desc", desc)) return NULL;
    memset(&k, 0, sizeof k);
    k.lowest = 1;
    windows = conv_windows(ctx, x, desc, &k);
    if (!windows) return NULL;
    if (indices) MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, MIXP_F32)
        for (i = 0; i < 3; i++) along[i] = conv_positions(ctx, &k.s, i);
    windows = conv_largest(ctx, windows, &k.s, along, indices);
    if (indices) *indices = conv_pooled(ctx, *indices, x, k.s.places);
    return conv_pooled(ctx, windows, x, k.s.places);
}

/* The number of values of each window along an axis that lie in the padded image, or in the image: f32 [places]. */
static mixp_tensor *conv_counted(mixp_context *ctx, const conv_shape *s, int axis, int image_only) {
    const float  end = (float)(s->size[axis] + (image_only ? 0 : s->padding[axis]));
    const float  first = image_only ? 0.0f : (float)-s->padding[axis];
    mixp_tensor *from = mixp_scale(ctx, conv_count(ctx, s->places[axis]), (float)s->stride[axis]), *to;
    from = mixp_add_scalar(ctx, from, (float)-s->padding[axis]);
    to = mixp_clamp(ctx, mixp_add_scalar(ctx, from, (float)s->taps[axis]), first, end);
    return mixp_sub(ctx, to, mixp_clamp(ctx, from, first, end));
}

/* 1 / (the number of values counted), [places]. */
static mixp_tensor *conv_shares(mixp_context *ctx, const conv_shape *s, int image_only) {
    mixp_tensor *y = NULL;
    MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, MIXP_F32) {
        mixp_tensor *plane = mixp_mul(ctx, conv_upright(ctx, conv_counted(ctx, s, 1, image_only)),
                                      conv_counted(ctx, s, 2, image_only));
        mixp_tensor *depth = conv_upright(ctx, conv_upright(ctx, conv_counted(ctx, s, 0, image_only)));
        const int64_t flat = conv_places(s);
        y = mixp_reciprocal(ctx, mixp_reshape(ctx, mixp_mul(ctx, depth, plane), 1, &flat));
    }
    return y;
}

/* The mean of each window of x[b, channels, ...], made in f32: torch.nn.functional.avg_pool1d, 2d and 3d. Class KEEP.
 * Errors as max_pool; MIXP_ERR_SHAPE also for a dilation. */
CONV_API mixp_tensor *avg_pool(mixp_context *ctx, mixp_tensor *x, const pool_desc *desc) {
    mixp_tensor *windows, *y = NULL;
    conv_window  k;
    if (!conv_given(ctx, "avg_pool", "x", x) || !conv_given(ctx, "avg_pool", "desc", desc)) return NULL;
    memset(&k, 0, sizeof k);
    windows = conv_windows(ctx, x, desc, &k);
    if (windows && conv_volume(k.s.dilation) != 1) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "avg_pool: a window of a mean has no dilation");
        return NULL;
    }
    if (!windows) return NULL;
    if (desc->divisor || (!desc->image_only && !desc->ceil_mode) || !conv_padded(&k.s)) {
        y = mixp_mean(ctx, windows, 1, 0);
        if (desc->divisor) y = mixp_scale(ctx, y, (float)((double)conv_taps(&k.s) / desc->divisor));
    } else MIXP_AUTOCAST(ctx, MIXP_F32)
        y = mixp_mul(ctx, mixp_sum(ctx, windows, 1, 0), conv_shares(ctx, &k.s, desc->image_only));
    if (y && y->dtype != x->dtype) y = mixp_cast(ctx, y, x->dtype);
    return conv_pooled(ctx, y, x, k.s.places);
}

static pool_desc conv_square(int size, int stride, int padding) {
    pool_desc d;
    memset(&d, 0, sizeof d);
    d.size[0] = d.size[1] = size;
    d.stride[0] = d.stride[1] = stride;
    d.padding[0] = d.padding[1] = padding;
    return d;
}

/* max_pool and avg_pool of images by windows of size x size; stride 0 = size. */
CONV_API mixp_tensor *max_pool2d(mixp_context *ctx, mixp_tensor *x, int size, int stride, int padding) {
    const pool_desc d = conv_square(size, stride, padding);
    return conv_given(ctx, "max_pool2d", "x", x) && conv_fits(ctx, "max_pool2d", x, 2, 1) ? max_pool(ctx, x, &d, NULL) : NULL;
}
CONV_API mixp_tensor *avg_pool2d(mixp_context *ctx, mixp_tensor *x, int size, int stride, int padding) {
    const pool_desc d = conv_square(size, stride, padding);
    return conv_given(ctx, "avg_pool2d", "x", x) && conv_fits(ctx, "avg_pool2d", x, 2, 1) ? avg_pool(ctx, x, &d) : NULL;
}

/* Puts the sizes of a result at the end of to[3]; 1 for axes that x lacks. Returns 0 after an error. */
static int conv_sizes_asked(mixp_context *ctx, const char *name, const mixp_tensor *x, const int64_t *size,
                            int64_t *to) {
    const int dims = x->rank - 2;
    double    volume = 1;
    int       i;
    to[0] = to[1] = to[2] = 1;
    for (i = 0; dims > 0 && dims < 4 && size && i < dims; i++) {
        to[3 - dims + i] = size[i];
        volume *= (double)size[i];
        if (size[i] < 1 || volume > CONV_MOST_VALUES) break;
    }
    if (dims > 0 && i == dims) return 1;
    mixp_context_fail(ctx, MIXP_ERR_SHAPE, "%s: x is [batch, channels, ...] of rank 3 to 5 (its rank is %d), and each "
                      "size of the result is at least 1, with at most 2^56 values in a channel", name, x->rank);
    return 0;
}

/* Windows of an adaptive pooling: window i of m covers floor(i n / m) to ceil((i + 1) n / m) - 1. first and end are
 * f32 [m], counted by comparisons of exact products. */
static mixp_tensor *conv_first_of(mixp_context *ctx, int64_t n, int64_t m) {
    mixp_tensor *at = mixp_scale(ctx, mixp_add_scalar(ctx, conv_count(ctx, n), 1.0f), (float)m);
    mixp_tensor *from = mixp_scale(ctx, conv_count(ctx, m), (float)n);
    return mixp_sum(ctx, mixp_cast(ctx, mixp_le(ctx, at, conv_upright(ctx, from)), MIXP_F32), 1, 0);
}
static mixp_tensor *conv_end_of(mixp_context *ctx, int64_t n, int64_t m) {
    mixp_tensor *at = mixp_scale(ctx, conv_count(ctx, n), (float)m);
    mixp_tensor *to = mixp_scale(ctx, mixp_add_scalar(ctx, conv_count(ctx, m), 1.0f), (float)n);
    return mixp_sum(ctx, mixp_cast(ctx, mixp_lt(ctx, at, conv_upright(ctx, to)), MIXP_F32), 1, 0);
}

/* The positions [taps, m] of the windows along an axis; the last one of a window repeats. */
static mixp_tensor *conv_adaptive_positions(mixp_context *ctx, int64_t n, int64_t m, int64_t taps) {
    mixp_tensor *tap = conv_upright(ctx, conv_count(ctx, taps));
    mixp_tensor *last = mixp_add_scalar(ctx, conv_end_of(ctx, n, m), -1.0f);
    return mixp_minimum(ctx, mixp_add(ctx, tap, conv_first_of(ctx, n, m)), last);
}

/* The largest number of values of a window. Windows are n / m long; with a rest r, a window meets one more value, or
 * two if a multiple of n / m lies inside of a value's two bounds: if r does not divide m. */
static int64_t conv_adaptive_taps(int64_t n, int64_t m) {
    const int64_t r = n % m, most = n / m + (r ? 1 + (m % r != 0) : 0);
    return most ? most : 1;
}

/* torch.nn.functional.adaptive_max_pool1d, 2d and 3d: the result has size[i] values along dimension i after the
 * channels. *indices as of max_pool. MIXP_ERR_SHAPE: a size below 1, or x of another rank. */
CONV_API mixp_tensor *adaptive_max_pool(mixp_context *ctx, mixp_tensor *x, const int64_t *size, mixp_tensor **indices) {
    static const int order[7] = { 0, 1, 3, 5, 2, 4, 6 };    /* b channels, taps, places */
    mixp_tensor *along[3], *y;
    int64_t      shape[7];
    conv_shape   s;
    int          i;
    if (indices) *indices = NULL;
    memset(&s, 0, sizeof s);
    if (!conv_given(ctx, "adaptive_max_pool", "x", x) || !conv_sizes_asked(ctx, "adaptive_max_pool", x, size, s.places)) return NULL;
    conv_sizes(x, s.size);
    shape[0] = x->shape[0] * x->shape[1];
    memcpy(shape + 1, s.size, sizeof s.size);
    y = mixp_reshape(ctx, x, 4, shape);
    for (i = 0; i < 3; i++) {
        s.taps[i] = conv_adaptive_taps(s.size[i], s.places[i]);
        MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, MIXP_F32)
            along[i] = conv_adaptive_positions(ctx, s.size[i], s.places[i], s.taps[i]);
        if (s.size[i] > 1 || s.places[i] > 1) y = conv_pick(ctx, y, 1 + i, along[i]);
        shape[1 + 2 * i] = s.taps[i];
        shape[2 + 2 * i] = s.places[i];
    }
    y = mixp_permute(ctx, mixp_reshape(ctx, y, 7, shape), 7, order);
    shape[1] = conv_taps(&s);
    shape[2] = conv_places(&s);
    y = conv_largest(ctx, mixp_reshape(ctx, y, 3, shape), &s, along, indices);
    if (indices) *indices = conv_pooled(ctx, *indices, x, s.places);
    return conv_pooled(ctx, y, x, s.places);
}

/* x[b, channels, ...] at `indices` (i32, in its channel, as max_pool returns them) of an image with size[i] values
 * along dimension i, zeros elsewhere: torch.nn.functional.max_unpool1d, 2d and 3d. Values with one index, which
 * max_pool returns if windows overlap, are equal: their mean is taken, and they share its gradient. MIXP_ERR_SHAPE:
 * indices of another shape than x; MIXP_ERR_ARGUMENT: an index beyond the image. */
CONV_API mixp_tensor *max_unpool(mixp_context *ctx, mixp_tensor *x, mixp_tensor *indices, const int64_t *size) {
    int64_t      flat[2], whole[2], places[3];
    mixp_tensor *y, *count = NULL;
    if (!conv_given(ctx, "max_unpool", "x", x) || !conv_given(ctx, "max_unpool", "indices", indices)) return NULL;
    if (!conv_sizes_asked(ctx, "max_unpool", x, size, places)) return NULL;
    if (indices->rank != x->rank || memcmp(indices->shape, x->shape, (size_t)x->rank * sizeof *x->shape) != 0) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "max_unpool: pass indices of the shape of x, as max_pool makes them; "
                          "x has rank %d and %lld values, indices have rank %d and %lld", x->rank, (long long)x->count,
                          indices->rank, (long long)indices->count);
        return NULL;
    }
    flat[0] = whole[0] = x->shape[0] * x->shape[1];
    conv_sizes(x, places);
    flat[1] = conv_volume(places);
    conv_sizes_asked(ctx, "max_unpool", x, size, places);
    whole[1] = conv_volume(places);
    indices = mixp_reshape(ctx, indices, 2, flat);
    y = mixp_full(ctx, x->dtype, 2, whole, 0);
    MIXP_NO_GRAD(ctx) {
        count = mixp_scatter_add(ctx, y, 1, indices, mixp_full(ctx, x->dtype, 2, flat, 1));
        count = mixp_maximum(ctx, count, mixp_full(ctx, x->dtype, 0, NULL, 1));
    }
    y = mixp_div(ctx, mixp_scatter_add(ctx, y, 1, indices, mixp_reshape(ctx, x, 2, flat)), count);
    return conv_pooled(ctx, y, x, places);
}

/* --- resizing ------------------------------------------------------------------------------------------ */

/* What interpolate does along an axis of n values, which becomes m. */
typedef struct conv_resize { int64_t n, m; double ratio; } conv_resize;

/* The floor of each position, at most n - 1: f32 [m]. */
static mixp_tensor *conv_floors(mixp_context *ctx, mixp_tensor *position, int64_t n) {
    mixp_tensor *step = mixp_add_scalar(ctx, conv_count(ctx, n), 1.0f), *least = conv_upright(ctx, position);
    mixp_tensor *below = mixp_cast(ctx, mixp_le(ctx, step, least), MIXP_F32);
    return mixp_clamp(ctx, mixp_sum(ctx, below, 1, 0), 0.0f, (float)(n - 1));
}

/* The source of each result, as PyTorch computes it in f32. */
static mixp_tensor *conv_nearest(mixp_context *ctx, const conv_resize *r, int exact) {
    mixp_tensor *at = conv_count(ctx, r->m);
    if (exact) at = mixp_add_scalar(ctx, at, 0.5f);
    return conv_floors(ctx, mixp_scale(ctx, at, (float)r->ratio), r->n);
}

/* The shares [m, n] of linear interpolation: 1 - |position - j|, at least 0. */
static mixp_tensor *conv_linear(mixp_context *ctx, const conv_resize *r, int align_corners) {
    mixp_tensor *at = conv_count(ctx, r->m);
    const float  corner = r->m > 1 ? (float)(r->n - 1) / (float)(r->m - 1) : 0.0f;
    if (align_corners) at = mixp_scale(ctx, at, corner);
    else at = mixp_add_scalar(ctx, mixp_scale(ctx, mixp_add_scalar(ctx, at, 0.5f), (float)r->ratio), -0.5f);
    at = conv_upright(ctx, mixp_clamp(ctx, at, 0.0f, (float)(r->n - 1)));
    return mixp_relu(ctx, mixp_rsub(ctx, mixp_abs(ctx, mixp_sub(ctx, at, conv_count(ctx, r->n))), 1.0f));
}

/* The shares [m, n] of a mean over each adaptive window. */
static mixp_tensor *conv_area(mixp_context *ctx, const conv_resize *r) {
    mixp_tensor *first = conv_upright(ctx, conv_first_of(ctx, r->n, r->m));
    mixp_tensor *end = conv_upright(ctx, conv_end_of(ctx, r->n, r->m)), *at = conv_count(ctx, r->n);
    mixp_tensor *from = mixp_cast(ctx, mixp_ge(ctx, at, first), MIXP_F32);
    mixp_tensor *to = mixp_cast(ctx, mixp_lt(ctx, at, end), MIXP_F32);
    return mixp_div(ctx, mixp_mul(ctx, from, to), mixp_sub(ctx, end, first));
}

/* x resized along one dimension. */
static mixp_tensor *conv_resized(mixp_context *ctx, mixp_tensor *x, int dim, const conv_resize *r,
                                 const interpolate_desc *d) {
    const int    nearest = d->mode == INTERPOLATE_NEAREST || d->mode == INTERPOLATE_NEAREST_EXACT;
    mixp_tensor *by = NULL;
    MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, MIXP_F32) {
        if (nearest) by = conv_nearest(ctx, r, d->mode == INTERPOLATE_NEAREST_EXACT);
        else if (d->mode == INTERPOLATE_LINEAR) by = conv_linear(ctx, r, d->align_corners);
        else by = conv_area(ctx, r);
    }
    if (nearest) return conv_pick(ctx, x, dim, by);
    MIXP_AUTOCAST(ctx, MIXP_F32) x = conv_along(ctx, mixp_cast(ctx, x, MIXP_F32), dim, by);
    return x;
}

/* x[b, channels, ...] resized: torch.nn.functional.interpolate with mode nearest, nearest-exact, linear (bilinear,
 * trilinear) or area. Class KEEP. LINEAR and AREA are a product with a small table along each dimension, summed in f32;
 * a NaN or Inf of x reaches its line along each resized dimension. MIXP_ERR_SHAPE: x is not of rank 3 to 5, or a size
 * or scale is not positive. */
CONV_API mixp_tensor *interpolate(mixp_context *ctx, mixp_tensor *x, const interpolate_desc *desc) {
    mixp_tensor *y = x;
    int64_t      size[3] = { 0, 0, 0 }, places[3];
    int          i;
    if (!conv_given(ctx, "interpolate", "x", x) || !conv_given(ctx, "interpolate", "desc", desc)) return NULL;
    for (i = 2; i < x->rank && i < 5; i++) {
        const double scale = desc->scale[i - 2] != 0 ? desc->scale[i - 2] : 1.0;
        size[i - 2] = desc->size[i - 2];
        if (!size[i - 2] && (mixp_bits_of_f64(scale) >> 52) < 1023 + 31) {     /* bits: no NaN, 0 to 2^31 */
            const double wide = scale * (double)x->shape[i];
            if (wide >= 1 && wide < 2147483648.0) size[i - 2] = (int64_t)wide;
        }
    }
    if (!conv_sizes_asked(ctx, "interpolate", x, size, places)) return NULL;
    for (i = 2; y && i < x->rank; i++) {
        conv_resize r;
        r.n = x->shape[i];
        r.m = size[i - 2];
        r.ratio = (double)r.n / (double)r.m;
        if (!desc->size[i - 2] && desc->scale[i - 2] != 0) r.ratio = 1.0 / desc->scale[i - 2];
        if (r.n != r.m || r.ratio < 1 || r.ratio > 1) y = conv_resized(ctx, y, i, &r, desc);
    }
    return y && y->dtype != x->dtype ? mixp_cast(ctx, y, x->dtype) : y;
}

/* torch.nn.functional.adaptive_avg_pool1d, 2d and 3d: the result has size[i] values along dimension i after the
 * channels. Errors as of interpolate, whose AREA it is. */
CONV_API mixp_tensor *adaptive_avg_pool(mixp_context *ctx, mixp_tensor *x, const int64_t *size) {
    interpolate_desc d;
    int64_t          places[3];
    memset(&d, 0, sizeof d);
    if (!conv_given(ctx, "adaptive_avg_pool", "x", x) || !conv_sizes_asked(ctx, "adaptive_avg_pool", x, size, places)) return NULL;
    d.mode = INTERPOLATE_AREA;
    memcpy(d.size, size, (size_t)(x->rank - 2) * sizeof *size);
    if (conv_volume(places) > 1) return interpolate(ctx, x, &d);
    conv_sizes(x, places);
    places[1] = conv_volume(places);
    places[0] = x->shape[0] * x->shape[1];
    d.size[0] = d.size[1] = d.size[2] = 1;
    return conv_pooled(ctx, mixp_mean(ctx, mixp_reshape(ctx, x, 2, places), 1, 0), x, d.size);
}

/* Each value becomes rows x cols equal ones: torch.nn.Upsample(scale_factor=(rows, cols), mode="nearest"). KEEP. */
CONV_API mixp_tensor *upsample_nearest2d(mixp_context *ctx, mixp_tensor *x, int rows, int cols) {
    int64_t apart[5], wide[5], shape[4];
    if (!conv_given(ctx, "upsample_nearest2d", "x", x)) return NULL;
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

/* x[b, channels factor^2, h, w] as [b, channels, h factor, w factor]: torch.nn.functional.pixel_shuffle. KEEP, of any
 * dtype. MIXP_ERR_SHAPE: another rank, or channels that factor^2 does not divide. */
CONV_API mixp_tensor *pixel_shuffle(mixp_context *ctx, mixp_tensor *x, int factor) {
    static const int order[6] = { 0, 1, 4, 2, 5, 3 };
    int64_t          apart[6], shape[4];
    if (!conv_given(ctx, "pixel_shuffle", "x", x) || !conv_fits(ctx, "pixel_shuffle", x, 2, 1)) return NULL;
    if (factor < 1 || x->shape[1] % ((int64_t)factor * factor)) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "pixel_shuffle: factor * factor must divide the channels; they are %d * "
                          "%d and %lld", factor, factor, (long long)x->shape[1]);
        return NULL;
    }
    apart[0] = x->shape[0];
    apart[1] = x->shape[1] / factor / factor;
    apart[2] = apart[3] = factor;
    apart[4] = x->shape[2];
    apart[5] = x->shape[3];
    shape[0] = apart[0];
    shape[1] = apart[1];
    shape[2] = apart[4] * factor;
    shape[3] = apart[5] * factor;
    return mixp_reshape(ctx, mixp_permute(ctx, mixp_reshape(ctx, x, 6, apart), 6, order), 4, shape);
}

/* The inverse of pixel_shuffle: torch.nn.functional.pixel_unshuffle. MIXP_ERR_SHAPE: factor must divide h and w. */
CONV_API mixp_tensor *pixel_unshuffle(mixp_context *ctx, mixp_tensor *x, int factor) {
    static const int order[6] = { 0, 1, 3, 5, 2, 4 };
    int64_t          apart[6], shape[4];
    if (!conv_given(ctx, "pixel_unshuffle", "x", x) || !conv_fits(ctx, "pixel_unshuffle", x, 2, 1)) return NULL;
    if (factor < 1 || x->shape[2] % factor || x->shape[3] % factor) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "pixel_unshuffle: factor must divide h and w; they are %d, %lld and "
                          "%lld", factor, (long long)x->shape[2], (long long)x->shape[3]);
        return NULL;
    }
    apart[0] = x->shape[0];
    apart[1] = x->shape[1];
    apart[2] = x->shape[2] / factor;
    apart[4] = x->shape[3] / factor;
    apart[3] = apart[5] = factor;
    shape[0] = apart[0];
    shape[1] = apart[1] * factor * factor;
    shape[2] = apart[2];
    shape[3] = apart[4];
    return mixp_reshape(ctx, mixp_permute(ctx, mixp_reshape(ctx, x, 6, apart), 6, order), 4, shape);
}

/* --- norms ---------------------------------------------------------------------------------------------- */

static mixp_tensor *conv_affine(mixp_context *ctx, mixp_tensor *x, mixp_tensor *gamma, mixp_tensor *beta) {
    const int64_t ones[MIXP_MAX_RANK] = { -1, 1, 1, 1, 1, 1, 1, 1 };
    if (x && gamma) x = mixp_mul(ctx, x, mixp_reshape(ctx, gamma, x->rank - 1, ones));
    return x && beta ? mixp_add(ctx, x, mixp_reshape(ctx, beta, x->rank - 1, ones)) : x;
}

/* Has t, if there is one, a value for each channel of x? */
static int conv_by_channels(mixp_context *ctx, const char *name, const char *what, const mixp_tensor *t,
                            const mixp_tensor *x) {
    if (!t || t->count == x->shape[1]) return 1;
    mixp_context_fail(ctx, MIXP_ERR_SHAPE, "%s: pass one value of %s for each of %lld channels; it has %lld", name,
                      what, (long long)x->shape[1], (long long)t->count);
    return 0;
}

/* Mean 0 and variance 1 over each sample's `groups` parts of the channels of x[b, channels, ...], then gamma[channels]
 * and beta[channels], which may be NULL: torch.nn.functional.group_norm; with a group for each channel, instance_norm.
 * MIXP_ERR_SHAPE: x of rank 1, groups that do not divide the channels, or gamma or beta of another count. */
CONV_API mixp_tensor *group_norm(mixp_context *ctx, mixp_tensor *x, int groups, mixp_tensor *gamma, mixp_tensor *beta,
                               float eps) {
    int64_t shape[3];
    mixp_tensor *y;
    int i;
    if (!conv_given(ctx, "group_norm", "x", x)) return NULL;
    if (x->rank < 2 || groups < 1 || x->shape[1] % groups) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "group_norm: x is [b, channels, ...] (its rank is %d), and "
                          "groups divide its channels (they are %d and %.0f)", x->rank, groups,
                          x->rank > 1 ? (double)x->shape[1] : 0.0);
        return NULL;
    }
    if (!conv_by_channels(ctx, "group_norm", "gamma", gamma, x)) return NULL;
    if (!conv_by_channels(ctx, "group_norm", "beta", beta, x)) return NULL;
    shape[0] = x->shape[0];
    shape[1] = groups;
    shape[2] = x->shape[1] / groups;
    for (i = 2; i < x->rank; i++) shape[2] *= x->shape[i];
    y = mixp_layer_norm(ctx, mixp_reshape(ctx, x, 3, shape), NULL, NULL, eps);
    return conv_affine(ctx, mixp_reshape(ctx, y, x->rank, x->shape), gamma, beta);
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

/* x[b, channels, ...] as [channels, b ...]. */
static mixp_tensor *conv_by_channel(mixp_context *ctx, mixp_tensor *x) {
    int64_t shape[2];
    if (!x) return NULL;
    shape[0] = x->shape[1];
    shape[1] = -1;
    return mixp_reshape(ctx, mixp_transpose(ctx, x, 0, 1), 2, shape);
}

/* kept += momentum (batch - kept), on the device. */
static mixp_result conv_remember(mixp_context *ctx, mixp_tensor *kept, mixp_tensor *of_batch, float momentum) {
    mixp_tensor *moved = mixp_add(ctx, mixp_scale(ctx, kept, 1.0f - momentum), mixp_scale(ctx, of_batch, momentum));
    return moved ? mixp_copy(kept, moved) : mixp_context_error(ctx, NULL);
}

/* In f32 at every level of autocast: a variance may exceed fp16's largest number, 65,504. */
static mixp_result conv_statistics(mixp_context *ctx, mixp_tensor *rows, const norm_statistics *keep, float momentum) {
    mixp_result r = MIXP_OK;
    MIXP_NO_GRAD(ctx) MIXP_AUTOCAST(ctx, MIXP_F32) {
        mixp_tensor *x = mixp_cast(ctx, rows, MIXP_F32), *mean = mixp_mean(ctx, x, -1, 1);
        mixp_tensor *d = mixp_sub(ctx, x, mean);
        float n = rows ? (float)rows->shape[1] : 1.0f;
        mixp_tensor *variance = mixp_scale(ctx, mixp_mean(ctx, mixp_mul(ctx, d, d), -1, 0), n > 1 ? n / (n - 1) : 1);
        r = conv_remember(ctx, keep->mean, mixp_reshape(ctx, mean, 1, keep->mean->shape), momentum);
        if (r == MIXP_OK) r = conv_remember(ctx, keep->variance, variance, momentum);
    }
    return r;
}

/* (x - mean) / sqrt(variance + eps), in f32 at every level of autocast. */
static mixp_tensor *conv_normalize(mixp_context *ctx, mixp_tensor *x, const norm_statistics *keep, float eps) {
    mixp_tensor *root, *y = NULL;
    const int64_t by[MIXP_MAX_RANK] = { -1, 1, 1, 1, 1, 1, 1, 1 };
    MIXP_AUTOCAST(ctx, MIXP_F32) {
        root = mixp_pow(ctx, mixp_add_scalar(ctx, keep->variance, eps), -0.5f);
        y = mixp_sub(ctx, x, mixp_reshape(ctx, keep->mean, x->rank - 1, by));
        y = mixp_mul(ctx, y, mixp_reshape(ctx, root, x->rank - 1, by));
    }
    return y;
}

/* Are both f32 of rank 1? */
static int conv_is_statistics(mixp_context *ctx, const norm_statistics *keep) {
    const mixp_tensor *m = keep->mean, *v = keep->variance;
    if (m->dtype == MIXP_F32 && v->dtype == MIXP_F32 && m->rank == 1 && v->rank == 1) return 1;
    mixp_context_fail(ctx, m->rank == 1 && v->rank == 1 ? MIXP_ERR_DTYPE : MIXP_ERR_SHAPE,
                      "batch_norm: keep->mean and keep->variance are f32 [channels]; they are %s of rank %d and %s of "
                      "rank %d", mixp_dtype_name(m->dtype), m->rank, mixp_dtype_name(v->dtype), v->rank);
    return 0;
}

/* Mean 0 and variance 1 of each channel of x[b, channels, ...] over the batch, then gamma[channels] and beta[channels],
 * which may be NULL: torch.nn.functional.batch_norm with momentum 0.1. training 1: uses the batch's mean and variance,
 * and updates `keep`. 0: uses `keep`. keep NULL: no running statistics; evaluation uses the batch's. MIXP_ERR_SHAPE:
 * the rank of x is not 2 to 5, gamma, beta or `keep` have another count than the channels, `keep` another rank than 1, or
 * one value in each channel
 * where the batch's variance is used, as in PyTorch. A batch of none leaves `keep` as it is.
 *
 * A skipped step leaves `keep` as it was, and a batch that mixp_retry tries three times counts once. PyTorch differs:
 * there a skipped step counts, and one overflow makes the running statistics NaN for ever. Frozen parameters as
 * `keep`, which earlier versions asked for, behave as in PyTorch. */
CONV_API mixp_tensor *batch_norm(mixp_context *ctx, mixp_tensor *x, mixp_tensor *gamma, mixp_tensor *beta,
                               const norm_statistics *keep, int training, float eps) {
    int64_t turned[MIXP_MAX_RANK];
    mixp_tensor *rows;
    if (!conv_given(ctx, "batch_norm", "x", x)) return NULL;
    if (keep && !conv_given(ctx, "batch_norm", "keep->mean", keep->mean)) return NULL;
    if (keep && !conv_given(ctx, "batch_norm", "keep->variance", keep->variance)) return NULL;
    if (x->rank < 2 || x->rank > 5) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "batch_norm: x is [b, channels, ...] of rank 2 to 5; its rank is %d",
                          x->rank);
        return NULL;
    }
    if (!conv_by_channels(ctx, "batch_norm", "gamma", gamma, x)) return NULL;
    if (!conv_by_channels(ctx, "batch_norm", "beta", beta, x)) return NULL;
    if (keep && !conv_by_channels(ctx, "batch_norm", "keep->mean", keep->mean, x)) return NULL;
    if (keep && !conv_by_channels(ctx, "batch_norm", "keep->variance", keep->variance, x)) return NULL;
    if (keep && !conv_is_statistics(ctx, keep)) return NULL;
    if (!x->count) return conv_affine(ctx, x, gamma, beta);
    if (!training && keep) return conv_affine(ctx, conv_normalize(ctx, x, keep, eps), gamma, beta);
    if (x->count == x->shape[1]) {
        mixp_context_fail(ctx, MIXP_ERR_SHAPE, "batch_norm: each channel of x has one value, so its variance is 0 and "
                          "the result 0 for any x; use a larger batch, or omit a last batch of one");
        return NULL;
    }
    memcpy(turned, x->shape, sizeof turned);
    turned[0] = x->shape[1];
    turned[1] = x->shape[0];
    rows = conv_by_channel(ctx, x);
    if (keep && conv_statistics(ctx, rows, keep, 0.1f) != MIXP_OK) return NULL;
    rows = mixp_reshape(ctx, mixp_layer_norm(ctx, rows, NULL, NULL, eps), x->rank, turned);
    return conv_affine(ctx, mixp_transpose(ctx, rows, 0, 1), gamma, beta);
}

#endif  /* CONV_NO_IMPLEMENTATION */
#endif
