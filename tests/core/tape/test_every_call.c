/* test_every_call.c - laws of every public function of mixprec.h and of the add-ons, over their declarations: no
 * call traps, or returns a result beside an error, whatever numbers and tensors it gets; and each pointer may be NULL: documented, or an error that names
 * the function. tests/support/every_call.txt has an argument for each parameter; a function that it does not know
 * does not build.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _GNU_SOURCE         /* feenableexcept */
#include <limits.h>
#include <setjmp.h>
#include <signal.h>
#include <unistd.h>
#include "mixprec.h"
#include "examples/compare.h"
#include "examples/conv.h"
#include "examples/ops.h"
#include "examples/recurrent.h"
#include "examples/trail.h"
#include "examples/qk_clip.h"
#include "test.h"
#include "traps.h"

/* --- the world of a call -------------------------------------------------------------------------- */

static const char *const every_metadata[1][2] = { { "format", "format" } };

/* What arguments are made of. Each call has a new world. */
static struct {
    mixp_context   *ctx;
    mixp_scaler    *scaler;
    mixp_optimizer *opt;
    mixp_tensor    *x, *spare, *buffer, *row, *ids, *ids44, *firsts, *mask, *packed, *heads, *y, *loss, *other, *state_of;
    mixp_tensor    *image, *kernel, *line, *line_kernel, *volume, *volume_kernel, *sequence, *h, *c;
    mixp_tensor    *list[2], *parts[2];
    mixp_call      *call;

    float    numbers[64], read[64];
    double   doubles[256];
    int32_t  whole[16];
    uint16_t halves_[64];
    mixp_f16 f16s[16];
    int64_t  longs[16];
    uint8_t  bytes[16];
    mixp_bf16 *halves;
    int64_t  shape[2], halves_of[2], cells[3], sides[3], n, counts[MIXP_EXPONENTS];
    int      dims[2], flag, named;
    char     text[400], path[64];
    const char *why;
    mixp_f16 f16;
    mixp_bf16 bf16;
    mixp_e4m3 e4m3;
    mixp_e5m2 e5m2;
    mixp_in  in;
    mixp_out out;

    mixp_rounding       rounding;
    mixp_scaler_rule    rule;
    mixp_look           look;
    mixp_context_desc   context;
    mixp_graph         *graph;
    mixp_gemm_args      gemm;
    mixp_quantise_args  quantise;
    mixp_autocast       region;
    mixp_recipe         recipe;
    mixp_recipe_rule    recipe_rule;
    mixp_attention_desc attention;
    mixp_rope_desc      rope;
    mixp_loss_desc      loss_desc;
    mixp_scaler_desc    scaler_desc;
    mixp_scaler_saved   saved;
    mixp_optimizer_desc optimizer_desc;
    mixp_param_group    group;
    mixp_underflow      underflow;
    mixp_checkpoint     checkpoint;
    mixp_weights_desc   weights;
    mixp_st_entry       entry;
    mixp_safetensors   *file, *file_out;
    mixp_guard_desc     guard;
    mixp_event          event;
    mixp_site_info      site;
    mixp_observer       observer, observer_before;

    mixp_compare_desc   compare;
    mixp_difference     differences[4];
    mixp_exponents     *exponents;
    conv_desc           conv;
    pool_desc           pool;
    interpolate_desc    interpolate;
    norm_statistics     statistics;
    recurrent_weights   lstm, gru, rnn;
    recurrent_desc      recurrent;
    mixp_trail         *trail;
    qk_clip_rows        qk;
} w;

typedef struct every_field {
    const char *name;
    size_t      at;
    enum { EVERY_OF_FLOAT, EVERY_OF_DOUBLE, EVERY_OF_INT, EVERY_OF_INT32_T, EVERY_OF_INT64_T, EVERY_OF_POINTER } kind;
} every_field;
/* Which argument is replaced, and by what. at -1, BY_TENSOR: every tensor. */
typedef enum replaced { NOTHING, BY_NULL, BY_NUMBER, BY_WHOLE, BY_TENSOR, BY_FIELD } replaced;
static struct { replaced by; int at; double number; uint32_t bits; long long whole; int which; const every_field *field; void *where; } odd;

static mixp_tensor *tensor_of(int rank, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e) {
    float v[256];
    int64_t shape[5];
    shape[0] = a; shape[1] = b; shape[2] = c; shape[3] = d; shape[4] = e;
    for (int i = 0; i < 256; i++) v[i] = (float)(i * 7 % 11 + 1) / 13.0f;
    mixp_tensor *t = mixp_param_named(w.ctx, MIXP_F32, rank, shape, "t%d", w.named++);
    if (mixp_write(t, v, MIXP_F32, t ? t->count : 0) != MIXP_OK) abort();
    return t;
}

static mixp_tensor *every_loss(mixp_context *ctx, void *user) {
    (void)user;
    return mixp_mean(ctx, mixp_linear(ctx, w.x, w.x, NULL), MIXP_ALL, 0);
}
static mixp_tensor *every_block(mixp_context *ctx, mixp_tensor *x, void *user) {
    (void)user;
    return mixp_tanh(ctx, x);
}
static void every_see(mixp_context *ctx, const mixp_sight *sight, void *user) {
    (void)ctx; (void)sight; (void)user;
}
static void every_walk(void) { (void)mixp_backward(w.ctx, w.loss); }
static void every_scaled_walk(void) { (void)mixp_backward(w.ctx, mixp_scaler_scale(w.scaler, w.loss)); }
static mixp_tensor *max_pool2d_of(mixp_tensor **indices) {
    pool_desc two;
    memset(&two, 0, sizeof two);
    two.size[0] = two.size[1] = 2;
    return max_pool(w.ctx, w.image, &two, indices);
}

static mixp_context *every_context(void) {
    mixp_context *ctx = w.ctx;
    w.ctx = NULL;
    return ctx;
}
static mixp_optimizer *every_spikes(void) {
    w.optimizer_desc.spike.of = MIXP_SPIKE_LOSS;
    return mixp_optimizer_new(w.ctx, &w.optimizer_desc);
}
static void every_read(void) {
    (void)mixp_checkpoint_save_weights(w.path, w.ctx);
    (void)mixp_safetensors_read(w.path, &w.file, NULL, 0);
}
static mixp_safetensors *every_file(void) {
    every_read();
    mixp_safetensors *file = w.file;
    w.file = NULL;
    return file;
}

static void make_descriptions(void) {
    w.shape[0] = w.shape[1] = 4;
    w.halves_of[0] = w.halves_of[1] = 2;
    w.cells[0] = w.cells[1] = 2;
    w.sides[0] = w.sides[1] = 4;
    w.dims[0] = 1;
    w.halves = (mixp_bf16 *)(void *)w.halves_;
    w.in = mixpi_in(w.read, MIXP_F32);
    w.out = mixpi_out_to(w.numbers, MIXP_F32, 0);
    w.rule.growth_factor = 2.0;
    (void)mixp_scaler_rule_resolve(NULL, &w.rule);
    w.gemm.m = w.gemm.n = w.gemm.k = w.gemm.lda = w.gemm.ldb = w.gemm.ldc = 4;
    w.gemm.batch = 1;
    w.gemm.alpha = 1.0f;
    w.gemm.a = w.gemm.b = w.in;
    w.gemm.bias = mixpi_in(NULL, MIXP_F32);
    w.gemm.c = w.out;
    w.quantise.rows = 1;
    w.quantise.cols = 16;
    w.quantise.x = w.in;
    w.quantise.y = w.halves;
    w.quantise.element = MIXP_F8_E4M3;
    w.region.dtype = MIXP_BF16;
    w.region.level = 1;
    w.recipe.kind = MIXP_RECIPE_FP8_CURRENT;
    w.recipe_rule.pattern = "*";
    w.recipe_rule.recipe = &w.recipe;
    w.rope.head_dim = 2;
    w.optimizer_desc = mixp_adamw_defaults();
    w.compare.fn = every_loss;
    w.compare.user = &w;
    w.compare.a.dtype = MIXP_BF16;
    w.compare.a.level = 1;
    w.pool.size[0] = w.pool.size[1] = 2;
    w.interpolate.size[0] = w.interpolate.size[1] = 3;
    w.guard.every = 1;
    w.observer.see = every_see;
    w.entry.name = "t";
    w.entry.dtype = MIXP_F32;
    w.entry.rank = 1;
    w.entry.shape[0] = 4;
    w.entry.data = w.read;
    w.entry.bytes = 16;
}

/* No call takes more than 64 MB: sizes without sense are refused. */
static void *take(size_t bytes, void *user) {
    (void)user;
    return bytes > (size_t)1 << 26 ? NULL : malloc(bytes);
}
static void put(void *p, void *user) {
    (void)user;
    free(p);
}

static void world_open(void) {
    static const int32_t firsts[2] = { 0, 2 };
    memset(&w, 0, sizeof w);
    for (int i = 0; i < 64; i++) w.read[i] = (float)(i % 5) / 8.0f;
    for (int i = 0; i < 16; i++) w.whole[i] = i % 4;
    snprintf(w.path, sizeof w.path, "/tmp/mixprec_every_%ld.st", (long)getpid());
    w.context.threads = odd.by == NOTHING ? 2 : 1;
    w.context.allocate = take;
    w.context.release = put;
    w.ctx = mixp_context_new(&w.context);
    make_descriptions();
    w.x = mixp_param(w.ctx, "x", MIXP_F32, 2, w.shape);
    w.spare = mixp_param(w.ctx, "spare", MIXP_F32, 2, w.shape);
    w.buffer = mixp_buffer(w.ctx, "buffer", MIXP_F32, 2, w.shape);
    (void)mixp_write(w.x, w.read + 1, MIXP_F32, 16);
    w.opt = mixp_optimizer_new(w.ctx, &w.optimizer_desc);
    (void)mixp_optimizer_add(w.opt, w.x, NULL);
    (void)mixp_optimizer_group(w.opt, 0, &w.group);
    w.scaler = mixp_scaler_new(w.ctx, NULL);
    w.row = tensor_of(1, 4, 0, 0, 0, 0);
    w.packed = tensor_of(3, 1, 2, 12, 0, 0);
    w.heads = tensor_of(4, 1, 2, 2, 2, 0);
    w.image = tensor_of(4, 1, 4, 4, 4, 0);
    w.kernel = tensor_of(4, 4, 4, 2, 2, 0);
    w.line = tensor_of(3, 1, 4, 4, 0, 0);
    w.line_kernel = tensor_of(3, 4, 4, 2, 0, 0);
    w.volume = tensor_of(5, 1, 4, 2, 2, 2);
    w.volume_kernel = tensor_of(5, 4, 4, 2, 2, 1);
    w.sequence = tensor_of(3, 4, 2, 4, 0, 0);
    w.state_of = tensor_of(2, 4, 4, 0, 0, 0);
    w.lstm.w_x = w.lstm.w_h = tensor_of(2, 16, 4, 0, 0, 0);
    w.lstm.b_x = w.lstm.b_h = tensor_of(1, 16, 0, 0, 0, 0);
    w.gru.w_x = w.gru.w_h = tensor_of(2, 12, 4, 0, 0, 0);
    w.rnn.w_x = w.rnn.w_h = w.x;
    w.statistics = batch_norm_statistics(w.ctx, "kept", 4);
    w.qk.q = w.qk.k = w.x;
    w.qk.heads = w.qk.kv_heads = 2;
    w.qk.d = 2;
    w.checkpoint.ctx = w.ctx;
    w.checkpoint.scaler = w.scaler;
    w.checkpoint.optimizers = &w.opt;
    w.checkpoint.n_optimizers = 1;
    (void)mixp_step_begin(w.ctx);
    w.ids = mixp_input(w.ctx, MIXP_I32, 1, w.shape, w.whole);
    w.firsts = mixp_input(w.ctx, MIXP_I32, 1, w.halves_of, firsts);
    w.ids44 = mixp_input(w.ctx, MIXP_I32, 2, w.shape, w.whole);
    w.mask = mixp_input(w.ctx, MIXP_I32, 2, w.shape, w.whole);
    w.y = mixp_tanh(w.ctx, w.x);
    w.h = w.c = w.state_of;
    w.list[0] = w.list[1] = w.x;
    w.loss = every_loss(w.ctx, NULL);
    w.exponents = NULL;
    if (mixp_context_error(w.ctx, &w.why) != MIXP_OK) { printf("  the world: %s\n", w.why); abort(); }
}

static void world_close(void) {
    mixp_safetensors_free(w.file_out);
    mixp_safetensors_free(w.file);
    mixp_context_free(w.ctx);
    remove(w.path);
}

/* A tensor of other numbers, another dtype or another shape. */
enum { ODD_TENSORS = 14 };
static mixp_tensor *odd_tensor(int k, mixp_tensor *like) {
    static const mixp_dtype dtypes[] = { MIXP_F16, MIXP_BF16, MIXP_I32, MIXP_U8, MIXP_I64 };
    static const uint32_t bits[] = { 0x7FC00000u, 0x7F800000u, 0xFF800000u, 0u, 0x00000001u, 0x7F7FFFFFu };
    static const double zeros[256];
    int64_t shape[MIXP_MAX_RANK];
    float v[256];
    if (k < 6 && like->dtype == MIXP_F32) {
        for (int i = 0; i < 256; i++) v[i] = mixp_f32_of_bits(bits[k]);
        mixp_tensor *t = mixp_param(w.ctx, NULL, MIXP_F32, like->rank, like->shape);
        (void)mixp_write(t, v, MIXP_F32, t->count);
        return t;
    }
    if (k < 6) return like;
    memcpy(shape, like->shape, sizeof shape);
    if (k < 11) return mixp_input(w.ctx, dtypes[k - 6], like->rank, shape, zeros);
    if (k == 11 && like->rank) shape[0] = 0;
    if (k == 12 && like->rank) shape[like->rank - 1] = 0;
    return mixp_input(w.ctx, like->dtype, k == 13 ? 0 : like->rank, shape, zeros);
}
static mixp_tensor *every_tensor(int i, const mixp_tensor *value) {
    mixp_tensor *t = (mixp_tensor *)(uintptr_t)value;
    return t && odd.by == BY_TENSOR && (odd.at == i || odd.at < 0) ? odd_tensor(odd.which, t) : t;
}

/* --- the calls ------------------------------------------------------------------------------------ */

enum { FAILED, WORKED, EITHER, BESIDE };      /* BESIDE: a result beside an error */
static int tensor_result(mixp_tensor *t) {
    if (t) w.y = t;
    return t ? WORKED : FAILED;
}
#define TENSOR_RESULT(call)  return tensor_result(call)
#define CODE_RESULT(call)    return (call) == MIXP_OK ? WORKED : FAILED
#define POINTER_RESULT(call) return (call) ? WORKED : FAILED
#define NO_RESULT            return EITHER
#define IS(i, what)              (odd.at == i && odd.by == what)
#define POINTER(i, type, value)  (IS(i, BY_NULL) ? NULL : (value))
#define TENSOR(i, type, value)   (IS(i, BY_NULL) ? NULL : every_tensor(i, value))
#define FLOAT(i, type, value)    (IS(i, BY_NUMBER) ? mixp_f32_of_bits(odd.bits) : (value))
#define DOUBLE(i, type, value)   (IS(i, BY_NUMBER) ? odd.number : (value))
#define WHOLE(i, type, value)    (IS(i, BY_WHOLE) ? (type)odd.whole : (type)(value))
#define SIZE(i, type, value)     WHOLE(i, type, value)
#define FIXED(i, type, value)    (value)

typedef enum every_kind { EVERY_FIXED, EVERY_POINTER, EVERY_TENSOR, EVERY_FLOAT, EVERY_DOUBLE, EVERY_WHOLE, EVERY_SIZE } every_kind;
typedef enum every_null { EVERY_ERROR, EVERY_OPTIONAL, EVERY_REQUIRED } every_null;
typedef struct every_row {
    const char *name;
    int       (*call)(void);
    void      (*before)(void);
    enum { EVERY_IN_CALL, EVERY_IN_INFER, EVERY_IN_FORWARD, EVERY_IN_BACKWARD } in;
    int         fails;
    enum { EVERY_MADE, EVERY_CODE, EVERY_OTHER } gives;     /* a tensor, a mixp_result */
    int         n;
    struct { const char *name; every_kind kind; every_null null;
             const every_field *fields; void *where; int sized; } of[12];
} every_row;
static const mixp_op every_op;
#include "every_call.h"
enum { EVERY = sizeof every_rows / sizeof every_rows[0] };

/* --- inside an operator --- */

static const every_row *running;
static int inside_gave;

static mixp_result every_infer(mixp_call *c) {
    const mixp_tensor *x = c->in[0];
    if (running->in == EVERY_IN_INFER) {
        w.call = c;
        inside_gave = running->call();
        if (inside_gave == WORKED) return MIXP_OK;
    }
    return mixp_call_output(c, x->dtype, x->rank, x->shape);
}
static mixp_result every_forward(mixp_call *c) {
    w.call = c;
    if (running->in == EVERY_IN_FORWARD) inside_gave = running->call();
    return mixp_fill(c->out, 0.5);
}
static mixp_result every_backward(mixp_call *c) {
    int add;
    w.call = c;
    if (running->in == EVERY_IN_BACKWARD) inside_gave = running->call();
    return mixp_fill(mixp_call_grad(c, 0, &add), 0.5);
}
static const mixp_op every_op = { "every", MIXP_CLASS_KEEP, 0, every_infer, every_forward, every_backward, NULL };

/* Replaces a number of a description, by the one of a list that odd.which says. */
static void field_set(void) {
    static const uint32_t bits[] = { 0u, 0xBF800000u, 0x000000FFu, 0x7F7FFFFFu, 0x7F800000u, 0xFF800000u, 0x7FC00000u, 0x7F7FFFFEu };
    static const int64_t wide[] = { 0, -1, 1, 3, INT64_MAX, INT64_MIN, (int64_t)1 << 61, 1 << 20 };
    static const int32_t narrow[] = { 0, -1, 1, 3, INT32_MAX, INT32_MIN, 1 << 20, 2 };
    const float  x = mixp_f32_of_bits(bits[odd.which]);
    const double wide_x = odd.which == 7 ? 1.7e308 : (double)x;
    char *to = (char *)odd.where + odd.field->at;
    if (odd.field->kind == EVERY_OF_POINTER) memset(to, 0, sizeof(void *));
    else if (odd.field->kind == EVERY_OF_FLOAT) memcpy(to, &x, sizeof x);
    else if (odd.field->kind == EVERY_OF_DOUBLE) memcpy(to, &wide_x, sizeof wide_x);
    else if (odd.field->kind == EVERY_OF_INT64_T) memcpy(to, &wide[odd.which], sizeof *wide);
    else memcpy(to, &narrow[odd.which], sizeof *narrow);
}

/* The call, in its world; and the walk back from its result. */
static int call_row(const every_row *row) {
    running = row;
    if (row->before) row->before();
    if (odd.by == BY_FIELD) field_set();
    if (row->in == EVERY_IN_CALL) {
        int gave = row->call();
        if (gave == WORKED && w.ctx && mixp_context_error(w.ctx, NULL) != MIXP_OK) gave = BESIDE;
        if (gave == WORKED && w.y && w.y->ctx == w.ctx && w.y->requires_grad && odd.by != BY_NULL)
            (void)mixp_backward(w.ctx, mixp_sum(w.ctx, w.y, MIXP_ALL, 0));
        return gave;
    }
    inside_gave = FAILED;
    w.y = mixp_apply(w.ctx, &every_op, 1, &w.x, 1, NULL);
    if (w.y && row->in == EVERY_IN_BACKWARD) (void)mixp_backward(w.ctx, mixp_sum(w.ctx, w.y, MIXP_ALL, 0));
    return inside_gave;
}

/* --- signals --- */

static sigjmp_buf out_of_call;
static void caught(int signal) { siglongjmp(out_of_call, signal); }

/* As call_row; -1: the call ended with a signal. Its world is then lost. */
static volatile int ended_by;
static int call_survives(const every_row *row, int trapping) {
    volatile int gave = -1;
    ended_by = sigsetjmp(out_of_call, 1);
    if (!ended_by) {
        if (trapping) traps_on(strncmp(row->name, "mixp_", 5) == 0);
        gave = call_row(row);
    }
    traps_off();
    return gave;
}

static void catch_signals(void) {
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_handler = caught;
    a.sa_flags = SA_NODEFER;
    sigaction(SIGFPE, &a, NULL);
    sigaction(SIGSEGV, &a, NULL);
    sigaction(SIGBUS, &a, NULL);
}

/* --- laws ----------------------------------------------------------------------------------------- */

/* A call with nothing replaced works, so that the other laws test what they say. */
static void each_call_works(void) {
    odd.by = NOTHING;
    for (int i = 0; i < EVERY; i++) {
        const every_row *row = &every_rows[i];
        world_open();
        int gave = call_survives(row, 0);
        w.why = "";
        if (gave >= 0) mixp_context_error(w.ctx, &w.why);
        if (gave < 0 || gave == (row->fails ? WORKED : FAILED)) {
            test_bad++;
            printf("  %s: %s%s\n", row->name, gave < 0 ? "a signal" : row->fails ? "works" : "fails: ", w.why);
        }
        if (gave >= 0) world_close();
    }
}

/* One replaced argument, under traps. */
static void trapped(const every_row *row, const char *by) {
    const int gave = call_survives(row, 1);
    if (gave < 0) {
        test_bad++;
        printf("  %s: signal %d, %s is %s\n", row->name, ended_by, odd.by == NOTHING ? "nothing" : odd.at < 0 ? "all" : row->of[odd.at].name, by);
        return;
    }
    if (gave == BESIDE && !row->fails) {
        mixp_context_error(w.ctx, &w.why);
        test_bad++;
        printf("  %s: a result beside an error, %s is %s: %s\n", row->name,
               odd.by == NOTHING ? "nothing" : odd.at < 0 ? "all" : row->of[odd.at].name, by, w.why);
    }
    world_close();
}

/* 0, -1, a subnormal, the largest, Inf, -Inf, NaN; of a double also 1e300. */
static void numbers_trap_in_no_call(const every_row *row) {
    static const uint32_t bits[] = { 0u, 0xBF800000u, 0x000000FFu, 0x7F7FFFFFu, 0x7F800000u, 0xFF800000u, 0x7FC00000u };
    char by[32];
    for (int k = 0; k < (row->of[odd.at].kind == EVERY_DOUBLE ? 8 : 7); k++) {
        odd.bits = bits[k % 7];
        odd.number = k < 7 ? (double)mixp_f32_of_bits(odd.bits) : 1e300;
        snprintf(by, sizeof by, "%g", odd.number);
        world_open();
        trapped(row, by);
    }
}

static void wholes_trap_in_no_call(const every_row *row) {
    static const long long wholes[] = { 0, -1, 3, INT_MAX, INT_MIN, LLONG_MAX, LLONG_MIN, 1LL << 61 };
    char by[32];
    for (int k = 0; k < (row->of[odd.at].kind == EVERY_SIZE ? 2 : 8); k++) {
        odd.whole = wholes[k];
        snprintf(by, sizeof by, "%lld", odd.whole);
        world_open();
        trapped(row, by);
    }
}

static void tensors_trap_in_no_call(const every_row *row) {
    char by[32];
    for (odd.which = 0; odd.which < ODD_TENSORS; odd.which++) {
        snprintf(by, sizeof by, "odd tensor %d", odd.which);
        world_open();
        trapped(row, by);
    }
}

/* Each number of a description, and each of its pointers: NULL. */
static void fields_trap_in_no_call(const every_row *row) {
    char by[100];
    odd.where = row->of[odd.at].where;
    for (odd.field = row->of[odd.at].fields; odd.field && odd.field->name; odd.field++)
        for (odd.which = 0; odd.which < 8; odd.which++) {
            if (odd.field->kind == EVERY_OF_POINTER ? odd.which > 0 : odd.field->kind > EVERY_OF_DOUBLE && row->of[odd.at].sized)
                continue;
            snprintf(by, sizeof by, "its %s number %d", odd.field->name, odd.which);
            world_open();
            trapped(row, by);
        }
}

static void no_call_traps(void) {
    if (!CAN_TRAP) SKIP("this system lets no exception trap");
    for (int i = 0; i < EVERY; i++) {
        const every_row *row = &every_rows[i];
        odd.by = NOTHING;
        world_open();
        trapped(row, "");
        for (odd.at = 0; odd.at < row->n; odd.at++)
            switch (row->of[odd.at].kind) {
            case EVERY_FLOAT:
            case EVERY_DOUBLE: odd.by = BY_NUMBER; numbers_trap_in_no_call(row); break;
            case EVERY_SIZE:
            case EVERY_WHOLE:  odd.by = BY_WHOLE; wholes_trap_in_no_call(row); break;
            case EVERY_TENSOR: odd.by = BY_TENSOR; tensors_trap_in_no_call(row); break;
            case EVERY_POINTER: odd.by = BY_FIELD; fields_trap_in_no_call(row); break;
            case EVERY_FIXED:  break;
            }
        odd.by = BY_TENSOR;
        odd.at = -1;
        tensors_trap_in_no_call(row);
    }
}

/* NULL for one pointer. A call that makes a tensor then puts an error with a message into the context; a call that
 * returns a mixp_result returns an error; any other only survives, and returns what its comment says. */
static void null_is_known(const every_row *row) {
    const int has_context = odd.at > 0;         /* the first pointer leads to the context */
    const char *name = strncmp(row->name, "mixp_", 5) == 0 ? row->name + 5 : row->name;
    const char *wrong = NULL;
    mixp_result code = MIXP_OK;
    world_open();
    int gave = call_survives(row, 0);
    w.why = "";
    if (gave >= 0 && w.ctx) code = mixp_context_error(w.ctx, &w.why);
    if (gave < 0) wrong = "a signal";
    else if (row->of[odd.at].null == EVERY_OPTIONAL) wrong = gave == FAILED || code ? "an error, but NULL is optional" : NULL;
    else if (row->gives == EVERY_CODE && gave == WORKED) wrong = "works: is it optional?";
    else if (row->gives == EVERY_MADE && gave == WORKED) wrong = "works: is it optional?";
    else if (row->gives == EVERY_MADE && has_context && !code) wrong = "no error in the context";
    else if (code && !strstr(w.why, "NULL") && !strstr(w.why, name)) wrong = "the message says neither NULL nor the name";
    if (wrong) {
        test_bad++;
        printf("  %s, %s: %s. %s\n", row->name, row->of[odd.at].name, wrong, w.why);
    }
    if (gave >= 0) world_close();
}

static void every_null_is_known(void) {
    odd.by = BY_NULL;
    for (int i = 0; i < EVERY; i++)
        for (odd.at = 0; odd.at < every_rows[i].n; odd.at++) {
            const every_kind kind = every_rows[i].of[odd.at].kind;
            if ((kind == EVERY_POINTER || kind == EVERY_TENSOR) && every_rows[i].of[odd.at].null != EVERY_REQUIRED)
                null_is_known(&every_rows[i]);
        }
}

int main(void) {
    catch_signals();
    RUN(each_call_works);
    RUN(no_call_traps);
    RUN(every_null_is_known);
    return test_report();
}
