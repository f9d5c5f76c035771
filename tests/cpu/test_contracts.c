/* test_contracts.c - the arguments that each kernel refuses, as its struct documents them: a dtype
 * or a number outside the contract, one at a time. The kernel returns the documented code and
 * writes no byte. The same call without the change is accepted. Runs on every instruction set of
 * this machine.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "mixprec.h"
#include "test.h"

enum { NUMBERS = 2048, MOST_SCRATCH = 1 << 20 };

/* What kernels are given: inputs of zeros, ids 0, and outputs that nobody may touch. */
static float   in[NUMBERS];
static int32_t ids[NUMBERS], bad_ids[NUMBERS];
static float   out[NUMBERS], untouched[NUMBERS];
static int32_t index_out[64];
static double  scratch_memory[MOST_SCRATCH / sizeof(double)];
static int     no_scratch;

static const mixp_kernels *table;
static mixp_exec x;

static void *scratch(void *user, size_t bytes) {
    (void)user;
    return no_scratch || bytes > MOST_SCRATCH ? NULL : scratch_memory;
}

static mixp_in f32_in(void) { return mixpi_in(in, MIXP_F32); }
static mixp_in none_in(void) { return mixpi_in(NULL, MIXP_F32); }
static mixp_out f32_out(void) { return mixpi_out_to(out, MIXP_F32, 0); }

static void memory_begin(void) {
    memset(&x, 0, sizeof x);
    x.threads = 1;
    x.scratch = scratch;
    no_scratch = 0;
    for (int i = 0; i < NUMBERS; i++) {
        bad_ids[i] = i == 1 ? -7 : 0;
        in[i] = 0.0f;
        untouched[i] = 77.0f;
    }
}

static void refused(mixp_result got, mixp_result want, const char *what) {
    int same = memcmp(out, untouched, sizeof out) == 0;
    if (got != want || !same) {
        test_bad++;
        TEST_SHOW("%s: %s, not %s%s", what, mixp_result_text(got), mixp_result_text(want), same ? "" : "; and written to");
    }
}

/* The kernels that were tried, in the order of their table. */
typedef mixp_result (*any_kernel)(const mixp_exec *x, const mixp_convert_args *k);
enum { KERNELS = sizeof(mixp_kernels) / sizeof(any_kernel) };
static char tried[KERNELS];
#define TRIED(kernel) (tried[offsetof(mixp_kernels, kernel) / sizeof(any_kernel)] = 1)

/* good is taken; with one change it is refused. */
#define TAKES(kernel, good) CHECK_INT(table->kernel(&x, &(good)), MIXP_OK)
#define REFUSES(kernel, good, change, code)                                                     \
    do {                                                                                        \
        k = good;                                                                               \
        TRIED(kernel);                                                                          \
        change;                                                                                 \
        memcpy(out, untouched, sizeof out);                                                     \
        refused(table->kernel(&x, &k), code, #kernel ": " #change);                             \
    } while (0)
#define REFUSES_DTYPE(kernel, good, member) REFUSES(kernel, good, k.member.dtype = MIXP_I32, MIXP_ERR_DTYPE)
/* A value that may be missing is looked at when it is there. */
#define REFUSES_GIVEN(kernel, good, member)                                                     \
    REFUSES(kernel, good, (k.member.data = in, k.member.dtype = MIXP_I64), MIXP_ERR_DTYPE)
#define REFUSES_NULL(kernel, good, member) REFUSES(kernel, good, k.member = NULL, MIXP_ERR_ARGUMENT)
#define REFUSES_NUMBER(kernel, good, change) REFUSES(kernel, good, change, MIXP_ERR_ARGUMENT)
#define LACKS_MEMORY(kernel, good)                                                              \
    do { no_scratch = 1; REFUSES(kernel, good, (void)0, MIXP_ERR_MEMORY); no_scratch = 0; } while (0)

#define NAN_F mixp_f32_of_bits(0x7FC00000u)
#define NO_DTYPE ((mixp_dtype)99)

/* --- one element after the other ------------------------------------------------------------- */

static void conversions(void) {
    mixp_convert_args good, k;
    memset(&good, 0, sizeof good);
    good.n = 4;
    good.src = f32_in();
    good.dst = f32_out();
    TAKES(convert, good);
    REFUSES(convert, good, k.src.dtype = NO_DTYPE, MIXP_ERR_DTYPE);
    REFUSES(convert, good, k.dst.dtype = NO_DTYPE, MIXP_ERR_DTYPE);
    REFUSES_NULL(convert, good, src.data);
    REFUSES_NULL(convert, good, dst.data);
    REFUSES_NUMBER(convert, good, k.n = -1);
    REFUSES_NUMBER(convert, good, k.dst.accumulate = 1);
    REFUSES(convert, good, (k.n = 0, k.src.data = NULL, k.dst.data = NULL), MIXP_OK);
}

static void fills(void) {
    mixp_fill_args good, k;
    memset(&good, 0, sizeof good);
    good.n = 4;
    good.dst = f32_out();
    TAKES(fill, good);
    REFUSES_NULL(fill, good, dst.data);
    REFUSES_NUMBER(fill, good, k.n = -1);
    REFUSES_NUMBER(fill, good, k.dst.accumulate = 1);
    REFUSES(fill, good, (k.n = 0, k.dst.data = NULL), MIXP_OK);
}

static void copies(void) {
    mixp_copy_args good, k;
    memset(&good, 0, sizeof good);
    good.rank = 2;
    good.shape[0] = good.shape[1] = 2;
    good.src = f32_in();
    good.dst = f32_out();
    good.src_strides[0] = good.dst_strides[0] = 2;
    good.src_strides[1] = good.dst_strides[1] = 1;
    TAKES(copy, good);
    REFUSES(copy, good, k.src.dtype = NO_DTYPE, MIXP_ERR_DTYPE);
    REFUSES(copy, good, k.dst.dtype = NO_DTYPE, MIXP_ERR_DTYPE);
    REFUSES_DTYPE(copy, good, src);
    REFUSES_DTYPE(copy, good, dst);
    REFUSES(copy, good, k.rank = -1, MIXP_ERR_SHAPE);
    REFUSES(copy, good, k.rank = MIXP_MAX_RANK + 1, MIXP_ERR_SHAPE);
    REFUSES(copy, good, k.shape[1] = -1, MIXP_ERR_SHAPE);
    REFUSES_NULL(copy, good, src.data);
    REFUSES_NULL(copy, good, dst.data);
    REFUSES(copy, good, (k.shape[1] = 0, k.src.data = NULL), MIXP_OK);
}

static void unaries(void) {
    mixp_unary_args good, k;
    memset(&good, 0, sizeof good);
    good.n = 4;
    good.a = f32_in();
    good.y = f32_out();
    TAKES(unary, good);
    REFUSES_NUMBER(unary, good, k.op = MIXP_UNARY_COUNT);
    REFUSES_NUMBER(unary, good, k.op = (mixp_unary)-1);
    REFUSES_DTYPE(unary, good, a);
    REFUSES_DTYPE(unary, good, y);
}

static void unary_slopes(void) {
    mixp_unary_backward_args good, k;
    memset(&good, 0, sizeof good);
    good.n = 4;
    good.dy = good.a = good.y = f32_in();
    good.da = f32_out();
    TAKES(unary_backward, good);
    REFUSES_NUMBER(unary_backward, good, k.op = MIXP_UNARY_COUNT);
    REFUSES_DTYPE(unary_backward, good, dy);
    REFUSES_DTYPE(unary_backward, good, a);
    REFUSES_DTYPE(unary_backward, good, da);
    good.op = MIXP_UNARY_TANH;          /* which is told by its result */
    TAKES(unary_backward, good);
    REFUSES_DTYPE(unary_backward, good, y);
}

static void binaries(void) {
    mixp_binary_args good, k;
    memset(&good, 0, sizeof good);
    good.rank = 1;
    good.shape[0] = 4;
    good.a = good.b = good.dy = f32_in();
    good.a_strides[0] = good.b_strides[0] = 1;
    good.y = good.dx = f32_out();
    TAKES(binary, good);
    TAKES(binary_backward, good);
    REFUSES_NUMBER(binary, good, k.op = MIXP_BINARY_COUNT);
    REFUSES_NUMBER(binary, good, k.rank = -1);
    REFUSES_NUMBER(binary, good, k.rank = MIXP_MAX_RANK + 1);
    REFUSES_DTYPE(binary, good, a);
    REFUSES_DTYPE(binary, good, b);
    REFUSES_DTYPE(binary, good, y);
    REFUSES_NUMBER(binary_backward, good, k.op = MIXP_BINARY_COUNT);
    REFUSES_NUMBER(binary_backward, good, k.rank = -1);
    REFUSES_DTYPE(binary_backward, good, dy);
    REFUSES_DTYPE(binary_backward, good, dx);
}

/* --- chosen ---------------------------------------------------------------------------------- */

static void choices(void) {
    mixp_where_args good, k;
    memset(&good, 0, sizeof good);
    good.rank = 1;
    good.shape[0] = 4;
    good.mask = good.a = good.b = good.dy = f32_in();
    good.mask_strides[0] = good.a_strides[0] = good.b_strides[0] = 1;
    good.y = good.dx = f32_out();
    TAKES(where, good);
    TAKES(where_backward, good);
    REFUSES_NUMBER(where, good, k.rank = -1);
    REFUSES_NUMBER(where, good, k.rank = MIXP_MAX_RANK + 1);
    REFUSES_NULL(where, good, mask.data);
    REFUSES_NUMBER(where, good, k.a.data = k.b.data = NULL);
    REFUSES_DTYPE(where, good, mask);
    REFUSES_DTYPE(where, good, a);
    REFUSES_DTYPE(where, good, b);
    REFUSES_DTYPE(where, good, y);
    REFUSES_NUMBER(where_backward, good, k.rank = -1);
    REFUSES_NUMBER(where_backward, good, k.rank = MIXP_MAX_RANK + 1);
    REFUSES_NULL(where_backward, good, mask.data);
    REFUSES_DTYPE(where_backward, good, dy);
    REFUSES_DTYPE(where_backward, good, dx);
}

/* The operand that is not there is `value` everywhere; rank 0 is one element. */
static void choices_of_one_operand(void) {
    static const float want_a[4] = { 1, 9, 3, 9 }, want_b[4] = { 9, 2, 9, 4 }, want_dx[4] = { 1, 0, 3, 0 };
    mixp_where_args k;
    memset(&k, 0, sizeof k);
    k.rank = 1;
    k.shape[0] = 4;
    k.mask = mixpi_in(in + 16, MIXP_F32);
    k.a = k.dy = f32_in();
    k.mask_strides[0] = k.a_strides[0] = k.b_strides[0] = 1;
    k.value = 9;
    k.y = k.dx = f32_out();
    for (int i = 0; i < 4; i++) {
        in[i] = (float)(i + 1);
        in[16 + i] = (float)(i % 2 == 0);
    }
    CHECK_INT(table->where(&x, &k), MIXP_OK);
    CHECK(memcmp(out, want_a, sizeof want_a) == 0);
    k.b = k.a;
    k.a.data = NULL;
    CHECK_INT(table->where(&x, &k), MIXP_OK);
    CHECK(memcmp(out, want_b, sizeof want_b) == 0);
    CHECK_INT(table->where_backward(&x, &k), MIXP_OK);
    CHECK(memcmp(out, want_dx, sizeof want_dx) == 0);
    k.rank = 0;
    out[0] = out[1] = 5;
    CHECK_INT(table->where_backward(&x, &k), MIXP_OK);
    CHECK(out[0] == 1 && out[1] == 5);
}

static void largest(void) {
    mixp_max_args good, k;
    memset(&good, 0, sizeof good);
    good.outer = good.n = good.inner = 2;
    good.a = f32_in();
    good.y = f32_out();
    good.index = index_out;
    TAKES(max, good);
    REFUSES_DTYPE(max, good, a);
    REFUSES_DTYPE(max, good, y);
    REFUSES_NULL(max, good, index);
    REFUSES_NUMBER(max, good, k.n = 0);
    REFUSES_NUMBER(max, good, k.n = (int64_t)1 << 31);
    REFUSES_NUMBER(max, good, k.y.accumulate = 1);
    good.y.data = NULL;                 /* which is not asked for */
    TAKES(max, good);
}

static void largest_slopes(void) {
    mixp_max_backward_args good, k;
    memset(&good, 0, sizeof good);
    good.outer = good.n = good.inner = 2;
    good.a = good.dy = f32_in();
    good.da = f32_out();
    good.index = ids;
    TAKES(max_backward, good);
    REFUSES_DTYPE(max_backward, good, dy);
    REFUSES_DTYPE(max_backward, good, da);
    REFUSES_NULL(max_backward, good, index);
    good.shared = 1;
    good.ties = ids + 16;
    REFUSES_DTYPE(max_backward, good, a);
    REFUSES_NULL(max_backward, good, ties);
}

static void gathers(void) {
    mixp_gather_args good, k;
    memset(&good, 0, sizeof good);
    good.outer = good.n = good.m = good.inner = 2;
    good.ids = ids;
    good.a = f32_in();
    good.y = f32_out();
    TAKES(gather, good);
    REFUSES_DTYPE(gather, good, a);
    REFUSES_DTYPE(gather, good, y);
    REFUSES_NUMBER(gather, good, k.y.accumulate = 1);
    REFUSES_NUMBER(gather, good, k.ids = bad_ids);
    REFUSES_NUMBER(gather_backward, good, k.y.accumulate = 0);
    good.y.accumulate = 1;
    TAKES(gather_backward, good);
    REFUSES_DTYPE(gather_backward, good, a);
    REFUSES_DTYPE(gather_backward, good, y);
    REFUSES_NUMBER(gather_backward, good, k.ids = bad_ids);
}

static void turns(void) {
    mixp_rope_args good, k;
    memset(&good, 0, sizeof good);
    good.rows = good.t = good.heads = 2;
    good.d = 4;
    good.base = 1e4;
    good.a = f32_in();
    good.y = f32_out();
    TAKES(rope, good);
    REFUSES_DTYPE(rope, good, a);
    REFUSES_DTYPE(rope, good, y);
    REFUSES_NUMBER(rope, good, k.d = 0);
    REFUSES_NUMBER(rope, good, k.d = 3);
    REFUSES_NUMBER(rope, good, k.base = 0);
    REFUSES_NUMBER(rope, good, k.base = (double)NAN_F);
    LACKS_MEMORY(rope, good);
}

static void comparisons(void) {
    mixp_compare_args good, k;
    memset(&good, 0, sizeof good);
    good.rank = 1;
    good.shape[0] = 4;
    good.a_strides[0] = 1;
    good.a = f32_in();
    good.b = mixpi_in(ids, MIXP_I32);
    good.y = (uint8_t *)out;
    TAKES(compare, good);
    REFUSES(compare, good, k.a.dtype = MIXP_F64, MIXP_ERR_DTYPE);
    REFUSES(compare, good, k.b.dtype = MIXP_I64, MIXP_ERR_DTYPE);
    REFUSES_NULL(compare, good, y);
    REFUSES_NUMBER(compare, good, k.how = MIXP_COMPARE_COUNT);
    REFUSES_NUMBER(compare, good, k.rank = -1);
    REFUSES_NUMBER(compare, good, k.rank = MIXP_MAX_RANK + 1);
}

static void best_ones(void) {
    mixp_topk_args good, k;
    memset(&good, 0, sizeof good);
    good.rows = 2;
    good.cols = 4;
    good.k = 3;
    good.a = f32_in();
    good.index = index_out;
    TAKES(topk, good);
    REFUSES_DTYPE(topk, good, a);
    REFUSES_NULL(topk, good, index);
    REFUSES_NUMBER(topk, good, k.k = 0);
    REFUSES_NUMBER(topk, good, k.k = 5);
    REFUSES_NUMBER(topk, good, k.cols = (int64_t)1 << 31);
}

static void randoms(void) {
    mixp_random_args good, k;
    memset(&good, 0, sizeof good);
    good.kind = MIXP_RANDOM_BERNOULLI;
    good.n = 4;
    good.at = 0.5f;
    good.y = f32_out();
    TAKES(random, good);
    REFUSES_DTYPE(random, good, y);
    REFUSES_NUMBER(random, good, k.y.accumulate = 1);
    REFUSES_NUMBER(random, good, k.kind = MIXP_RANDOM_COUNT);
    REFUSES_NUMBER(random, good, k.n = -1);
    REFUSES_NUMBER(random, good, k.at = 1.25f);
    REFUSES_NUMBER(random, good, k.at = NAN_F);
}

/* --- random, scaled, summed -------------------------------------------------------------------- */

static void dropouts(void) {
    mixp_dropout_args good, k;
    memset(&good, 0, sizeof good);
    good.n = 4;
    good.p = 0.5f;
    good.a = f32_in();
    good.y = f32_out();
    TAKES(dropout, good);
    REFUSES_DTYPE(dropout, good, a);
    REFUSES_DTYPE(dropout, good, y);
    REFUSES_NUMBER(dropout, good, k.p = -0.25f);
    REFUSES_NUMBER(dropout, good, k.p = 1.25f);
    REFUSES_NUMBER(dropout, good, k.p = NAN_F);
}

static void scales(void) {
    mixp_scale_by_args good, k;
    memset(&good, 0, sizeof good);
    good.n = 4;
    good.factor = in;
    good.a = f32_in();
    good.y = f32_out();
    TAKES(scale_by, good);
    REFUSES_NULL(scale_by, good, factor);
    REFUSES_DTYPE(scale_by, good, a);
    REFUSES_DTYPE(scale_by, good, y);
}

/* A long sum is made in runs, whose sums need memory. */
static void sums(void) {
    mixp_reduce_args good, k;
    memset(&good, 0, sizeof good);
    good.outer = good.inner = 1;
    good.n = NUMBERS;
    good.factor = 1;
    good.a = f32_in();
    good.y = f32_out();
    TAKES(reduce, good);
    REFUSES_DTYPE(reduce, good, a);
    REFUSES_DTYPE(reduce, good, y);
    REFUSES_DTYPE(reduce_backward, good, y);
    memset(scratch_memory, 0, sizeof scratch_memory);
    good.a = mixpi_in(scratch_memory, MIXP_F16);
    good.n = sizeof scratch_memory / 2;
    LACKS_MEMORY(reduce, good);
}

/* --- over rows --------------------------------------------------------------------------------- */

static void softmaxes(void) {
    mixp_softmax_args good, k;
    memset(&good, 0, sizeof good);
    good.rows = 2;
    good.cols = 4;
    good.a = f32_in();
    good.y = f32_out();
    TAKES(softmax, good);
    REFUSES_DTYPE(softmax, good, a);
    REFUSES_DTYPE(softmax, good, y);
    REFUSES_NUMBER(softmax, good, k.y.accumulate = 1);
}

static void softmax_slopes(void) {
    mixp_softmax_backward_args good, k;
    memset(&good, 0, sizeof good);
    good.rows = 2;
    good.cols = 4;
    good.dy = good.y = f32_in();
    good.da = f32_out();
    TAKES(softmax_backward, good);
    REFUSES_DTYPE(softmax_backward, good, dy);
    REFUSES_DTYPE(softmax_backward, good, y);
    REFUSES_DTYPE(softmax_backward, good, da);
}

static void norms(void) {
    static float mean[2], rstd[2];
    mixp_norm_args good, k;
    memset(&good, 0, sizeof good);
    good.rows = 2;
    good.cols = 4;
    good.eps = 1e-5f;
    good.a = good.b = f32_in();
    good.gamma = good.beta = none_in();
    good.y = f32_out();
    good.sum = mixpi_out_to(out + 64, MIXP_F32, 0);
    good.mean = mean;
    good.rstd = rstd;
    TAKES(norm, good);
    REFUSES_DTYPE(norm, good, a);
    REFUSES_DTYPE(norm, good, y);
    REFUSES_GIVEN(norm, good, gamma);
    REFUSES_GIVEN(norm, good, beta);
    REFUSES_NUMBER(norm, good, k.y.accumulate = 1);
    TAKES(add_norm, good);
    REFUSES_DTYPE(add_norm, good, a);
    REFUSES_DTYPE(add_norm, good, b);
    REFUSES_DTYPE(add_norm, good, sum);
    REFUSES_GIVEN(add_norm, good, gamma);
    REFUSES_NUMBER(add_norm, good, k.y.accumulate = 1);
    REFUSES_NUMBER(add_norm, good, k.sum.accumulate = 1);
    good.rms = 1;                       /* which has no beta to look at */
    good.beta = mixpi_in(in, MIXP_I64);
    TAKES(norm, good);
}

static void norm_slopes(void) {
    mixp_norm_backward_args good, k;
    memset(&good, 0, sizeof good);
    good.rows = 2;
    good.cols = 4;
    good.dy = good.a = f32_in();
    good.gamma = none_in();
    good.mean = good.rstd = in;
    good.da = f32_out();
    TAKES(norm_backward, good);
    REFUSES_DTYPE(norm_backward, good, dy);
    REFUSES_DTYPE(norm_backward, good, a);
    REFUSES_DTYPE(norm_backward, good, da);
    REFUSES_GIVEN(norm_backward, good, gamma);
    REFUSES_GIVEN(norm_backward, good, dgamma);
    REFUSES_GIVEN(norm_backward, good, dbeta);
    REFUSES_GIVEN(norm_backward, good, db);
    good.db = mixpi_out_to(out + 64, MIXP_F32, 0);
    TAKES(norm_backward, good);
    REFUSES_NULL(norm_backward, good, da.data);         /* db is da's, rounded */
    REFUSES_NUMBER(norm_backward, good, k.da.dtype = MIXP_F16);
    REFUSES_NUMBER(norm_backward, good, k.db.accumulate = 1);
    good.dgamma = mixpi_out_to(out + 128, MIXP_F32, 0);
    TAKES(norm_backward, good);
    LACKS_MEMORY(norm_backward, good);
}

static void embeddings(void) {
    mixp_embedding_args good, k;
    memset(&good, 0, sizeof good);
    good.rows = good.vocab = 2;
    good.cols = 4;
    good.ids = ids;
    good.table = f32_in();
    good.y = f32_out();
    TAKES(embedding, good);
    REFUSES_DTYPE(embedding, good, table);
    REFUSES_DTYPE(embedding, good, y);
    REFUSES_NUMBER(embedding, good, k.y.accumulate = 1);
    REFUSES_NUMBER(embedding, good, k.ids = bad_ids);
}

static void embedding_slopes(void) {
    mixp_embedding_backward_args good, k;
    memset(&good, 0, sizeof good);
    good.rows = good.vocab = 2;
    good.cols = 4;
    good.ids = ids;
    good.dy = f32_in();
    good.dtable = f32_out();
    TAKES(embedding_backward, good);
    REFUSES_DTYPE(embedding_backward, good, dy);
    REFUSES_DTYPE(embedding_backward, good, dtable);
    REFUSES_NUMBER(embedding_backward, good, k.ids = bad_ids);
    LACKS_MEMORY(embedding_backward, good);
}

static mixp_cross_entropy_args entropy(void) {
    static float loss, counted, stats[6];
    mixp_cross_entropy_args good;
    memset(&good, 0, sizeof good);
    good.rows = 2;
    good.cols = 4;
    good.ignore = -100;
    good.targets = ids;
    good.logits = f32_in();
    good.loss = &loss;
    good.counted = &counted;
    good.stats = stats;
    return good;
}

static void entropies(void) {
    mixp_cross_entropy_args good = entropy(), k;
    TAKES(cross_entropy, good);
    REFUSES_DTYPE(cross_entropy, good, logits);
    REFUSES_NUMBER(cross_entropy, good, k.targets = bad_ids);
    LACKS_MEMORY(cross_entropy, good);
}

static void entropy_slopes(void) {
    static float one = 1;
    mixp_cross_entropy_backward_args good, k;
    memset(&good, 0, sizeof good);
    good.rows = 2;
    good.cols = 4;
    good.ignore = -100;
    good.targets = ids;
    good.dloss = good.logits = f32_in();
    good.stats = in;
    good.counted = &one;
    good.dlogits = f32_out();
    TAKES(cross_entropy_backward, good);
    REFUSES_DTYPE(cross_entropy_backward, good, dloss);
    REFUSES_DTYPE(cross_entropy_backward, good, logits);
    REFUSES_DTYPE(cross_entropy_backward, good, dlogits);
    REFUSES_NUMBER(cross_entropy_backward, good, k.targets = bad_ids);
}

static void entropies_with_slopes(void) {
    static float one = 1;
    mixp_cross_entropy_both_args good, k;
    memset(&good, 0, sizeof good);
    good.loss = entropy();
    good.scale = &one;
    good.share = 1;
    good.dlogits = f32_out();
    TAKES(cross_entropy_both, good);
    REFUSES_DTYPE(cross_entropy_both, good, loss.logits);
    REFUSES_DTYPE(cross_entropy_both, good, dlogits);
    REFUSES_NUMBER(cross_entropy_both, good, k.dlogits.accumulate = 1);
    REFUSES_NUMBER(cross_entropy_both, good, k.loss.before = 1);
    REFUSES_NUMBER(cross_entropy_both, good, k.loss.targets = bad_ids);
    LACKS_MEMORY(cross_entropy_both, good);
}

static void losses(void) {
    mixp_loss_args good, k;
    memset(&good, 0, sizeof good);
    good.n = 4;
    good.a = good.target = f32_in();
    good.y = out;
    TAKES(loss, good);
    REFUSES_NUMBER(loss, good, k.kind = MIXP_LOSS_COUNT);
    REFUSES_DTYPE(loss, good, a);
    REFUSES_DTYPE(loss, good, target);
}

static void loss_slopes(void) {
    mixp_loss_backward_args good, k;
    memset(&good, 0, sizeof good);
    good.n = 4;
    good.dloss = good.a = good.target = f32_in();
    good.da = f32_out();
    TAKES(loss_backward, good);
    REFUSES_NUMBER(loss_backward, good, k.kind = MIXP_LOSS_COUNT);
    REFUSES_DTYPE(loss_backward, good, dloss);
    REFUSES_DTYPE(loss_backward, good, a);
    REFUSES_DTYPE(loss_backward, good, target);
    REFUSES_DTYPE(loss_backward, good, da);
}

/* --- products ---------------------------------------------------------------------------------- */

static void products(void) {
    mixp_gemm_args good, k;
    memset(&good, 0, sizeof good);
    good.m = good.n = good.k = 4;
    good.batch = 1;
    good.alpha = 1;
    good.a = good.b = f32_in();
    good.bias = none_in();
    good.c = f32_out();
    good.lda = good.ldb = good.ldc = 4;
    TAKES(gemm, good);
    REFUSES_DTYPE(gemm, good, a);
    REFUSES_DTYPE(gemm, good, b);
    REFUSES_DTYPE(gemm, good, c);
    REFUSES_GIVEN(gemm, good, bias);
    LACKS_MEMORY(gemm, good);
    good.k = 0;                         /* zeros, of whatever */
    good.a.dtype = good.b.dtype = MIXP_I64;
    TAKES(gemm, good);
    CHECK(out[0] == 0 && out[15] == 0);
}

static void indexed_products(void) {
    static const int64_t rows[4] = { 0, 4, 8, 12 }, columns[2] = { 0, 2 };
    const mixp_indexed   at = { rows, columns, 2 };
    mixp_gemm_indexed_args good, k;
    memset(&good, 0, sizeof good);
    good.gemm.m = good.gemm.n = good.gemm.k = good.gemm.lda = good.gemm.ldb = good.gemm.ldc = 4;
    good.gemm.batch = 1;
    good.gemm.a = good.gemm.b = f32_in();
    good.gemm.bias = none_in();
    good.gemm.c = f32_out();
    good.b = good.c = at;
    good.taps = 4;
    TAKES(gemm_indexed, good);
    REFUSES_DTYPE(gemm_indexed, good, gemm.a);
    REFUSES(gemm_indexed, good, k.gemm.b.dtype = MIXP_F16, MIXP_ERR_DTYPE);
    REFUSES(gemm_indexed, good, k.gemm.c.dtype = MIXP_F16, MIXP_ERR_DTYPE);
    REFUSES_NUMBER(gemm_indexed, good, k.b.run = 0);
    REFUSES_NUMBER(gemm_indexed, good, k.c.run = 0);
    REFUSES_NUMBER(gemm_indexed, good, k.taps = 0);
    REFUSES_NUMBER(gemm_indexed, good, k.gemm.bias = k.gemm.a);
    LACKS_MEMORY(gemm_indexed, good);
}

static mixp_attention_args attention_of_two(float *lse) {
    mixp_attention_args good;
    memset(&good, 0, sizeof good);
    good.b = 1;
    good.t = good.keys = good.heads = good.kv_heads = 2;
    good.d = 4;
    good.scale = 0.5f;
    good.q = good.k = good.v = f32_in();
    good.q_at.sequence = good.k_at.sequence = good.v_at.sequence = 16;
    good.q_at.head = good.k_at.head = good.v_at.head = 4;
    good.q_at.row = good.k_at.row = good.v_at.row = 8;
    good.mask = none_in();
    good.y = f32_out();
    good.lse = lse;
    return good;
}

static void attentions(void) {
    static float lse[4];
    static const int32_t few[1] = { -1 }, many[1] = { 3 }, right[1] = { 1 };
    mixp_attention_args good = attention_of_two(lse), k;
    TAKES(attention, good);
    REFUSES_DTYPE(attention, good, q);
    REFUSES_DTYPE(attention, good, k);
    REFUSES_DTYPE(attention, good, v);
    REFUSES_DTYPE(attention, good, y);
    REFUSES_GIVEN(attention, good, mask);
    REFUSES_NUMBER(attention, good, k.kv_heads = 0);
    REFUSES_NUMBER(attention, good, k.kv_heads = 3);
    REFUSES_NUMBER(attention, good, k.past = -1);
    REFUSES_NUMBER(attention, good, k.softcap = -1);
    REFUSES_NUMBER(attention, good, k.softcap = NAN_F);
    REFUSES_NUMBER(attention, good, k.dropout = -0.5f);
    REFUSES_NUMBER(attention, good, k.dropout = 1);
    REFUSES_NUMBER(attention, good, k.dropout = NAN_F);
    REFUSES_NUMBER(attention, good, k.lengths = few);
    REFUSES_NUMBER(attention, good, k.lengths = many);
    LACKS_MEMORY(attention, good);
    REFUSES(attention, good, k.b = 0, MIXP_OK);         /* nothing to do */
    REFUSES(attention, good, k.t = 0, MIXP_OK);
    good.lengths = right;
    TAKES(attention, good);
}

static void attention_slopes(void) {
    static float lse[4];
    mixp_attention_backward_args good, k;
    memset(&good, 0, sizeof good);
    good.forward = attention_of_two(lse);
    good.forward.y = mixpi_out_to(in, MIXP_F32, 0);
    good.dy = f32_in();
    good.dq = f32_out();
    good.dk = mixpi_out_to(out + 64, MIXP_F32, 0);
    good.dv = mixpi_out_to(out + 128, MIXP_F32, 0);
    TAKES(attention_backward, good);
    REFUSES_DTYPE(attention_backward, good, dy);
    REFUSES_DTYPE(attention_backward, good, dq);
    REFUSES_DTYPE(attention_backward, good, dk);
    REFUSES_DTYPE(attention_backward, good, dv);
    REFUSES_DTYPE(attention_backward, good, forward.q);
    REFUSES_NUMBER(attention_backward, good, k.forward.kv_heads = 0);
    REFUSES(attention_backward, good, k.forward.b = 0, MIXP_OK);
    LACKS_MEMORY(attention_backward, good);
}

/* --- a step without memory: nothing of it is done ------------------------------------------------- */

static void gradients(void) {
    mixp_param_row row;
    mixp_step_state step, before;
    mixp_grad_stats_args look;
    mixp_clip_args clip;
    mixp_update_args update;
    mixp_step_plan plan;
    memset(&row, 0, sizeof row);
    memset(&step, 0, sizeof step);
    memset(&plan, 0, sizeof plan);
    memset(&look, 0, sizeof look);
    memset(&clip, 0, sizeof clip);
    memset(&update, 0, sizeof update);
    for (int i = 0; i < 4; i++) in[i] = 3;
    memcpy(out, untouched, sizeof out);
    row.weight = out;
    row.grad = in;
    row.count = 4;
    row.active = 1;
    row.weight_dtype = row.grad_dtype = MIXP_F32;
    plan.kind = MIXP_OPTIMIZER_SGD;
    plan.groups[0].lr = 1;
    plan.n_groups = 1;
    step.stats.norm = 6;
    before = step;
    look.rows = clip.rows = update.rows = &row;
    look.count = clip.count = update.count = 1;
    look.step = clip.step = &step;
    look.plan = update.plan = &plan;
    look.unscale = 1;
    clip.max_norm = 1;
    update.step = &step;
    no_scratch = 1;
    CHECK_INT(table->grad_stats(&x, &look), MIXP_ERR_MEMORY);
    CHECK_INT(table->clip(&x, &clip), MIXP_ERR_MEMORY);
    CHECK_INT(table->update(&x, &update), MIXP_ERR_MEMORY);
    no_scratch = 0;
    CHECK(memcmp(&before, &step, sizeof step) == 0);
    CHECK(memcmp(out, untouched, sizeof out) == 0);
    CHECK(in[0] == 3 && in[3] == 3);
    CHECK_INT(table->clip(&x, &clip), MIXP_OK);     /* 1 / (6 + 1e-6) */
    CHECK_NEAR(in[0], 0.5, 1e-6);
    CHECK_NEAR(step.clipped, 1.0 / 6, 1e-6);
}

/* --- on every instruction set ---------------------------------------------------------------------- */

#define ON_EACH(name)                                                                           \
    static void each_##name(void) {                                                             \
        int isa;                                                                                \
        for (isa = 0; isa < MIXP_ISA_COUNT; isa++) {                                            \
            const mixp_device *device = mixp_cpu_with((mixp_isa)isa);                           \
            if (!device) continue;                                                              \
            table = device->kernels;                                                            \
            memory_begin();                                                                     \
            name();                                                                             \
        }                                                                                       \
    }
/* Those that are tested elsewhere: what a step decides (core/step, core/scaler, ranks), looks and recipes (core/watch,
 * core/recipes), products with an epilogue (core/operators) and buffers (core/step). A new kernel needs cases above. */
static void every_kernel_was_tried(void) {
    TRIED(grad_stats), TRIED(clip), TRIED(update);      /* by gradients */
    TRIED(prepare), TRIED(advance), TRIED(agree), TRIED(look), TRIED(quantise), TRIED(hadamard), TRIED(turn), TRIED(lose);
    TRIED(recode), TRIED(gemm_epilogue), TRIED(gemm_narrow), TRIED(restore), TRIED(check_buffers);
    for (int i = 0; i < KERNELS; i++) {
        if (tried[i]) continue;
        test_bad++;
        TEST_SHOW("kernel %d of mixp_kernels has no case here", i);
    }
}

#define CONTRACTS(WITH)                                                                         \
    WITH(conversions) WITH(fills) WITH(copies) WITH(unaries) WITH(unary_slopes) WITH(binaries)  \
    WITH(choices) WITH(choices_of_one_operand) WITH(largest) WITH(largest_slopes) WITH(gathers) \
    WITH(turns) WITH(comparisons) WITH(best_ones) WITH(randoms) WITH(dropouts) WITH(scales) WITH(sums) WITH(softmaxes) WITH(softmax_slopes)     \
    WITH(norms) WITH(norm_slopes) WITH(embeddings) WITH(embedding_slopes) WITH(entropies)                   \
    WITH(entropy_slopes) WITH(entropies_with_slopes) WITH(losses) WITH(loss_slopes)             \
    WITH(products) WITH(indexed_products) WITH(attentions) WITH(attention_slopes) WITH(gradients)
CONTRACTS(ON_EACH)

int main(void) {
#define RUN_EACH(name) RUN(each_##name);
    CONTRACTS(RUN_EACH)
    if (!getenv("MIXPREC_TEST_ONLY")) RUN(every_kernel_was_tried);
    return test_report();
}
