/* test_cuda_buffers.cpp - buffers on the GPU, simulated or real: the kernel that puts old bytes back, next to the CPU's; skipped steps,
 * captured steps whose replays skip, two scalers, and steps that a bad index stops. No step waits for the device.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "cuda_pair.h"
#include "gpu_context.h"
#include <vector>

/* --- the kernel ---------------------------------------------------------------------------------------- */

static Pair to, from, flags;
struct Part { int64_t to, from, bytes; };

/* The arguments of one side. */
static const mixp_restore_args *restore_of(const std::vector<Part> &parts, int n_flags) {
    static mixp_restore_args k;
    memset((void *)&k, 0, sizeof k);
    k.n_flags = n_flags;
    k.n_parts = (int)parts.size();
    for (int i = 0; i < n_flags; i++) k.flags[i] = AT(int32_t, flags) + i;
    for (int i = 0; i < k.n_parts; i++) {
        k.parts[i].to = AT(char, to) + parts[(size_t)i].to;
        k.parts[i].from = AT(char, from) + parts[(size_t)i].from;
        k.parts[i].bytes = (size_t)parts[(size_t)i].bytes;
    }
    return &k;
}

/* Parts of these sizes, each behind a gap; `off` bytes past a multiple of 16 in `to`, and twice that in `from`. */
static std::vector<Part> parts_of(int n, int first, int off, int64_t most) {
    static const int64_t sizes[] = { 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 63, 100, 255, 1000, 4099, 12345 };
    std::vector<Part> parts;
    int64_t at = 16;
    for (int i = 0; i < n; i++) {
        int64_t bytes = sizes[(size_t)(first + 5 * i) % (sizeof sizes / sizeof sizes[0])];
        if (bytes > most) bytes = most;
        parts.push_back({ at + off, at + 2 * off, bytes });
        at += (bytes + 16 + 2 * off + 15) / 16 * 16;
    }
    return parts;
}

/* flag: which of the flags is set; -1 = none. A set flag is 1, or a number with zeros in its low bits. */
static void restores(int n, int first, int off, int n_flags, int flag) {
    const std::vector<Part> parts = parts_of(n, first, off, n > 4 ? 300 : 20000);
    const int64_t bytes = parts.back().to + parts.back().bytes + 2 * off + 9;
    to = empty(MIXP_U8, bytes, 0);
    from = empty(MIXP_U8, bytes, 0);
    flags = empty(MIXP_I32, 4, 0);
    std::vector<unsigned char> expected((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) {
        set_code(to, i, (uint64_t)(i * 7 + 1) & 255);
        set_code(from, i, (uint64_t)(i * 13 + 5) & 255);
        expected[(size_t)i] = (unsigned char)(i * 7 + 1);
    }
    for (int i = 0; i < 4; i++) set_code(flags, i, i != flag ? 0 : i % 2 ? 1u << 30 : 1u);
    for (const Part &p : parts)
        for (int64_t i = 0; i < p.bytes && (flag >= 0 || !n_flags); i++)
            expected[(size_t)(p.to + i)] = (unsigned char)((p.from + i) * 13 + 5);
    BOTH(restore(X, restore_of(parts, n_flags)));
    same_bits(to);
    CHECK(memcmp(to.gpu, expected.data(), (size_t)bytes) == 0);
    finish(to);
    finish(from);
    finish(flags);
}

static void kernel_body(void) {
    static const int offs[] = { 0, 1, 4, 8, 15 };
    for (int n = 1; n <= MIXP_RESTORE_PARTS; n += n < 3 ? 1 : 6)
        for (int n_flags = 0; n_flags <= MIXP_RESTORE_FLAGS; n_flags++)
            for (int flag = -1; flag < n_flags; flag++)
                restores(n, 3 * n_flags + flag, offs[(n + n_flags + flag + 1) % 5], n_flags, flag);
    for (int first = 0; first < 17; first++)
        for (int off : offs) restores(1, first, off, 1, 0);
}
static void kernel(void) { in_all_schedules(kernel_body); }

/* --- the kernel that finds what became Inf or NaN ------------------------------------------------------- */

static Pair now, before, found;

/* The arguments of one side: parts of `counts` numbers, each at a multiple of 64 bytes. */
static const mixp_check_buffers_args *check_of(mixp_dtype dtype, const std::vector<int64_t> &counts, int64_t room) {
    static mixp_check_buffers_args k;
    memset((void *)&k, 0, sizeof k);
    k.found = AT(uint64_t, found);
    k.n_parts = (int)counts.size();
    for (int i = 0; i < k.n_parts; i++) {
        k.parts[i].now = AT(char, now) + i * room;
        k.parts[i].before = AT(char, before) + i * room;
        k.parts[i].count = counts[(size_t)i];
        k.parts[i].number = 3 * i + 1;
        k.parts[i].dtype = dtype;
    }
    return &k;
}

/* Number `i` of a kind: 0 = finite, 1 = Inf, 2 = -Inf, 3 and 4 = NaN, 5 = the largest number, 6 = NaN of one low bit. */
static uint64_t number_of(mixp_dtype dtype, int kind, int64_t i) {
    const int bits = 8 * (int)mixp_dtype_size(dtype), mantissa = dtype == MIXP_F64 ? 52 : dtype == MIXP_F32 ? 23
                                                                 : dtype == MIXP_F16 ? 10 : 7;
    const uint64_t sign = (uint64_t)1 << (bits - 1), inf = sign - ((uint64_t)1 << mantissa);
    const uint64_t all[] = { (uint64_t)(i * 37 + 1) % inf, inf, sign | inf, sign | (sign - 1), inf | inf >> 4, inf - 1, inf | 1 };
    return all[kind];
}

/* Numbers turn bad at some places, and were bad before at others. The expected word comes from a loop over them. */
static void checks(mixp_dtype dtype, const std::vector<int64_t> &counts, uint64_t seed, int had) {
    const int64_t size = (int64_t)mixp_dtype_size(dtype);
    int64_t most = 0, bad = -1, element = 0;
    int kind_of_bad = 0;
    for (int64_t n : counts) most = n > most ? n : most;
    const int64_t room = (most * size + 127) / 64 * 64, each = room / size;     /* behind a part lies Inf */
    now = empty(dtype, each * (int64_t)counts.size(), 0);
    before = empty(dtype, each * (int64_t)counts.size(), 0);
    found = empty(MIXP_I64, 1, 0);
    uint64_t start = had ? mixpi_bad_word(had == 1 ? 0 : 1000, 5, 1) : 0;
    set_code(found, 0, start);
    for (size_t p = 0; p < counts.size(); p++)
        for (int64_t i = 0; i < each; i++) {
            const uint32_t r = mixp_random_u32(seed, p, 1, (uint64_t)i), rare = r % 512;
            const int was = r >> 9 & 1 && rare < 40 ? 1 + (int)(r >> 10) % 4 : 0;
            const int is = i >= counts[p] ? 1 : rare < 20 ? was : rare == 25 ? 1 + (int)(r >> 16) % 4 : rare == 26 ? 6 : rare < 200 ? 5 : 0;
            const int64_t at = (int64_t)p * each + i;
            set_code(now, at, number_of(dtype, is, i));
            set_code(before, at, number_of(dtype, was, i));
            if (bad >= 0 || i >= counts[p] || !is || is == 5 || was) continue;
            bad = 3 * (int64_t)p + 1;
            element = i;
            kind_of_bad = is > 2;
        }
    BOTH(check_buffers(X, check_of(dtype, counts, room)));
    same_bits(found);
    uint64_t want = bad < 0 ? 0 : ((uint64_t)1 << 63) - ((uint64_t)bad << 41 | (uint64_t)element << 1 | (uint64_t)kind_of_bad), got;
    memcpy(&got, found.gpu, sizeof got);
    CHECK(got == (want > start ? want : start));
    CHECK(mixpi_bad_number(got ? got : 1) >= 0);
    finish(now);
    finish(before);
    finish(found);
}

static void check_body(void) {
    static const mixp_dtype dtypes[] = { MIXP_F32, MIXP_F64, MIXP_F16, MIXP_BF16 };
    static const int64_t sizes[] = { 1, 2, 3, 5, 7, 8, 63, 64, 65, 127, 255, 257, 512, 513, 1025, 2049 };
    for (mixp_dtype dtype : dtypes) {
        for (int64_t n : sizes) checks(dtype, { n }, (uint64_t)n, 0);
        for (int had = 0; had < 3; had++)
            for (int n : { 2, 5, MIXP_RESTORE_PARTS })
                checks(dtype, std::vector<int64_t>(sizes, sizes + n), 77 + (uint64_t)(n + had), had);
        checks(dtype, { 40000 }, 5, 0);
    }
}
static void check_kernel(void) { in_all_schedules(check_body); }

/* --- a recurrent net ------------------------------------------------------------------------------------ */

enum { D = 8, ROWS = 4, WORDS = 6, CODES = 37 };

struct Net {
    mixp_context   *ctx;
    mixp_tensor    *w, *emb, *h, *stat, *code, *count;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    float           x[ROWS * D], gain[D], one;
    int32_t         ids[ROWS];
    unsigned char   codes[CODES];
};

typedef std::vector<unsigned char> Bytes;

static Net *net_open(const mixp_device *device) {
    const int64_t square[2] = { D, D }, words[2] = { WORDS, D }, rows[2] = { ROWS, D }, codes = CODES, one = 1, d = D;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_scaler_desc s = mixp_scaler_desc();
    mixp_context_desc desc = mixp_context_desc();
    Net *n = new Net();
    desc.device = device;
    desc.seed = 5;
    s.init_scale = 256;
    adamw.lr = 0.05;
    n->ctx = mixp_context_new(&desc);
    n->opt = mixp_optimizer_new(n->ctx, &adamw);
    n->scaler = mixp_scaler_new(n->ctx, &s);
    n->w = mixp_param(n->ctx, "w", MIXP_F32, 2, square);
    n->emb = mixp_param(n->ctx, "emb", MIXP_F32, 2, words);
    mixp_init_uniform(n->w, -0.5, 0.5);
    mixp_init_uniform(n->emb, -0.5, 0.5);
    mixp_optimizer_add(n->opt, n->w, NULL);
    mixp_optimizer_add(n->opt, n->emb, NULL);
    n->h = mixp_buffer(n->ctx, "h", MIXP_F32, 2, rows);
    n->stat = mixp_buffer(n->ctx, "stat", MIXP_BF16, 1, &d);
    n->code = mixp_buffer(n->ctx, "code", MIXP_U8, 1, &codes);
    n->count = mixp_buffer(n->ctx, "count", MIXP_F32, 1, &one);
    n->one = 1;
    return n;
}
static void net_close(Net *n) {
    mixp_context_free(n->ctx);
    delete n;
}

static void net_batch(Net *n, int step, int bad) {
    for (int i = 0; i < ROWS * D; i++) n->x[i] = (float)((i * 7 + step * 5) % 11) / 11 - 0.4f;
    if (bad) n->x[9] = INFINITY;
    for (int i = 0; i < ROWS; i++) n->ids[i] = (step + 2 * i) % WORDS;
    for (int i = 0; i < CODES; i++) n->codes[i] = (unsigned char)(i * 3 + step * 17);
}

/* The state is read and written, and read and written again, as by two unrolled segments. */
static mixp_tensor *net_forward(Net *n) {
    const int64_t rows[2] = { ROWS, D }, ids = ROWS;
    mixp_context *c = n->ctx;
    mixp_tensor *x = mixp_input(c, MIXP_F32, 2, rows, n->x), *h = n->h;
    x = mixp_add(c, x, mixp_embedding(c, n->emb, mixp_input(c, MIXP_I32, 1, &ids, n->ids)));
    MIXP_AUTOCAST(c, MIXP_F16)
        for (int i = 0; i < 2; i++) h = mixp_tanh(c, mixp_linear(c, mixp_add(c, x, h), n->w, NULL));
    return mixp_cast(c, h, MIXP_F32);
}

static void net_write(Net *n, mixp_tensor *h) {
    const int64_t one = 1;
    mixp_context *c = n->ctx;
    mixp_fill(n->h, 7);
    mixp_copy(n->h, h);
    mixp_write(n->code, n->codes, MIXP_U8, CODES);
    MIXP_NO_GRAD(c) {
        mixp_tensor *old = mixp_scale(c, mixp_cast(c, n->stat, MIXP_F32), 0.75f);
        mixp_copy(n->stat, mixp_add(c, old, mixp_scale(c, mixp_mean(c, h, 0, 0), 0.25f)));
        mixp_copy(n->count, mixp_add(c, n->count, mixp_input(c, MIXP_F32, 1, &one, &n->one)));
    }
}

static void net_step(Net *n) {
    mixp_step_begin(n->ctx);
    mixp_zero_grad(n->opt);
    mixp_tensor *h = net_forward(n);
    mixp_backward(n->ctx, mixp_scaler_scale(n->scaler, mixp_mean(n->ctx, mixp_mul(n->ctx, h, h), MIXP_ALL, 0)));
    net_write(n, h);
    mixp_scaler_step(n->scaler, n->opt);
    mixp_scaler_update(n->scaler);
}

static Bytes net_bytes(const Net *n) {
    mixp_tensor *const all[] = { n->w, n->emb, n->h, n->stat, n->code, n->count };
    Bytes bytes;
    for (mixp_tensor *t : all) {
        Bytes one((size_t)t->count * mixp_dtype_size(t->dtype));
        CHECK_INT(mixp_read(t, one.data(), t->dtype, t->count), MIXP_OK);
        bytes.insert(bytes.end(), one.begin(), one.end());
    }
    return bytes;
}

static void net_fine(const Net *n) {
    const char *why = "";
    if (mixp_context_error(n->ctx, &why) == MIXP_OK) return;
    test_bad++;
    TEST_SHOW("%s", why);
}

static double net_count(const Net *n) { return mixp_item(n->count); }

/* --- steps ---------------------------------------------------------------------------------------------- */

/* Steps on the GPU beside those on the CPU. A bad batch leaves every byte. */
static void as_on_the_cpu(void) {
    Net *a = net_open(gpu()), *b = net_open(mixp_cpu());
    for (int step = 0; step < 8; step++) {
        const Bytes before = net_bytes(a);
        float x[ROWS * D], y[ROWS * D];
        for (Net *n : { a, b }) {
            net_batch(n, step, step % 3 == 2);
            net_step(n);
        }
        CHECK((net_bytes(a) == before) == (step % 3 == 2));
        CHECK_INT(mixp_read(a->h, x, MIXP_F32, ROWS * D), MIXP_OK);
        CHECK_INT(mixp_read(b->h, y, MIXP_F32, ROWS * D), MIXP_OK);
        for (int i = 0; i < ROWS * D; i++) CHECK_NEAR(x[i], y[i], 4e-3);
    }
    CHECK_NEAR(net_count(a), 6, 0);
    CHECK_NEAR(net_count(b), 6, 0);
    net_fine(a);
    net_fine(b);
    net_close(a);
    net_close(b);
    CHECK_INT(cudasim::leaks(), 0);
}

/* Replays, some of which skip, beside ordinary steps: the same bits. Between replays the program writes a buffer, which stays. */
static void replays_equal_steps(void) {
    Net *a = net_open(gpu()), *b = net_open(gpu());
    for (int step = 0; step < 2; step++)
        for (Net *n : { a, b }) {
            net_batch(n, step, 0);
            net_step(n);
        }
    CHECK_INT(mixp_capture_begin(a->ctx), MIXP_OK);
    net_step(a);
    mixp_graph *graph = mixp_capture_end(a->ctx);
    CHECK(graph != NULL);
    for (int step = 2; step < 12; step++) {
        const int bad = step == 2 || step == 5 || step == 6;
        if (step == 8)
            for (Net *n : { a, b }) CHECK_INT(mixp_fill(n->count, 100), MIXP_OK);
        const Bytes before = net_bytes(a);
        net_batch(a, step, bad);
        net_batch(b, step, bad);
        CHECK_INT(mixp_replay(graph), MIXP_OK);
        net_step(b);
        CHECK(net_bytes(a) == net_bytes(b));
        CHECK((net_bytes(a) == before) == bad);
    }
    CHECK_NEAR(net_count(a), 104, 0);
    for (Net *n : { a, b }) {           /* an ordinary step again, skipped, then applied */
        const Bytes before = net_bytes(n);
        net_batch(n, 12, 1);
        net_step(n);
        CHECK(net_bytes(n) == before);
        net_batch(n, 13, 0);
        net_step(n);
    }
    CHECK(net_bytes(a) == net_bytes(b));
    net_fine(a);
    net_fine(b);
    net_close(a);
    net_close(b);
    CHECK_INT(cudasim::leaks(), 0);
}

/* A step whose gradients are finite makes a buffer Inf: skipped on both devices and in replays, and no loss scale
 * is at fault. The state is read through tanh. Without a scaler the step is applied. */
struct Tanh {
    mixp_context   *ctx;
    mixp_tensor    *w, *h;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    float           x[ROWS];
};
static void tanh_open(Tanh *t, const mixp_device *device) {
    const int64_t rows = ROWS;
    mixp_scaler_desc s = mixp_scaler_desc();
    mixp_context_desc desc = mixp_context_desc();
    desc.device = device;
    s.init_scale = 256;
    t->ctx = mixp_context_new(&desc);
    t->opt = mixp_optimizer_new(t->ctx, NULL);
    t->scaler = mixp_scaler_new(t->ctx, &s);
    t->w = mixp_param(t->ctx, "w", MIXP_F32, 1, &rows);
    t->h = mixp_buffer(t->ctx, "h", MIXP_F32, 1, &rows);
    mixp_fill(t->w, 0.5);
    mixp_optimizer_add(t->opt, t->w, NULL);
}
static void tanh_step(Tanh *t, int scaled) {
    const int64_t rows = ROWS;
    mixp_tensor *next, *loss;
    mixp_step_begin(t->ctx);
    mixp_zero_grad(t->opt);
    next = mixp_mul(t->ctx, mixp_input(t->ctx, MIXP_F32, 1, &rows, t->x), mixp_add(t->ctx, t->w, t->h));
    loss = mixp_mean(t->ctx, mixp_mul(t->ctx, t->w, mixp_tanh(t->ctx, mixp_detach(t->ctx, next))), MIXP_ALL, 0);
    CHECK_INT(mixp_backward(t->ctx, scaled ? mixp_scaler_scale(t->scaler, loss) : loss), MIXP_OK);
    mixp_copy(t->h, next);
    if (!scaled) CHECK_INT(mixp_optimizer_step(t->opt), MIXP_OK);
    if (scaled) CHECK_INT(mixp_scaler_step(t->scaler, t->opt), MIXP_OK);
    if (scaled) CHECK_INT(mixp_scaler_update(t->scaler), MIXP_OK);
}
static Bytes tanh_bytes(const Tanh *t) {
    Bytes all(2 * ROWS * 4);
    mixp_read(t->w, &all[0], MIXP_F32, ROWS);
    mixp_read(t->h, &all[ROWS * 4], MIXP_F32, ROWS);
    return all;
}
/* A GPU's tanh has other last bits than the CPU's. */
static void tanh_agrees(const Tanh *a, const Tanh *b, double tolerance) {
    float x[2 * ROWS], y[2 * ROWS];
    memcpy(x, &tanh_bytes(a)[0], sizeof x);
    memcpy(y, &tanh_bytes(b)[0], sizeof y);
    for (int i = 0; i < 2 * ROWS; i++) CHECK_NEAR(x[i], y[i], tolerance);
}
static void tanh_batch(Tanh *t, int step, int bad) {
    for (int i = 0; i < ROWS; i++) t->x[i] = 0.5f + 0.1f * (float)((i + step) % 3);
    if (bad) t->x[2] = -3e38f;
    if (bad) t->x[3] = 3e38f;
}
static void bad_states(void) {
    Tanh t[2];
    mixp_graph *graph = NULL;
    for (int replays = 0; replays < 2; replays++) {
        tanh_open(&t[0], gpu());
        tanh_open(&t[1], replays ? gpu() : mixp_cpu());
        for (int step = 0; step < 10; step++) {
            const int bad = step == 4 || step == 7;
            const Bytes before = tanh_bytes(&t[0]);
            for (Tanh *of : { &t[0], &t[1] }) {
                tanh_batch(of, step, bad);
                if (bad) mixp_fill(of->h, 2);   /* after an update: stays */
                if (replays && of == &t[0] && step == 2) {
                    CHECK_INT(mixp_capture_begin(of->ctx), MIXP_OK);
                    tanh_step(of, 1);
                    graph = mixp_capture_end(of->ctx);
                    CHECK(graph != NULL);
                }
                if (replays && of == &t[0] && step >= 2) CHECK_INT(mixp_replay(graph), MIXP_OK);
                else tanh_step(of, 1);
                (void)tanh_bytes(of);   /* waits */
                const mixp_verdict v = mixp_scaler_verdict(of->scaler);
                CHECK_INT(v.outcome, bad ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
                CHECK_INT(v.reason, bad ? MIXP_SKIP_BUFFER : MIXP_SKIP_NONE);
                CHECK(bad ? v.bad_tensor && !strcmp(v.bad_tensor, "h") && v.bad_element == 2 && !v.bad_is_nan
                          : !v.bad_tensor);
            }
            tanh_agrees(&t[0], &t[1], replays ? 0 : 1e-5);
            if (bad) CHECK(memcmp(&tanh_bytes(&t[0])[0], &before[0], ROWS * 4) == 0);
        }
        CHECK_NEAR(mixp_scaler_loss_scale(t[0].scaler), 64, 0);
        for (Tanh *of : { &t[0], &t[1] }) {
            const char *why = "";
            tanh_batch(of, 0, 1);
            mixp_fill(of->h, 2);
            tanh_step(of, 0);
            const Bytes after = tanh_bytes(of);
            float h[ROWS];
            memcpy(h, &after[ROWS * 4], sizeof h);
            CHECK(h[2] < -3.4e38f && h[3] > 3.4e38f && h[0] < 10);
            tanh_batch(of, 0, 0);
            tanh_step(of, 0);           /* on a GPU the verdict comes later */
            CHECK_TEXT(mixp_context_warning(of->ctx), "Inf at element 2 of the buffer 'h'");
            CHECK_INT(mixp_context_error(of->ctx, &why), MIXP_OK);
            if (*why) printf("  %s\n", why);
            mixp_context_free(of->ctx);
        }
    }
    CHECK_INT(cudasim::leaks(), 0);
}

/* A capture right after a step that wrote, without a begun step between: each replay keeps the bytes itself. */
static void two_graphs(void) {
    Net *a = net_open(gpu());
    mixp_graph *graphs[2];
    for (int step = 0; step < 2; step++) {
        net_batch(a, step, 0);
        net_step(a);
    }
    for (mixp_graph *&g : graphs) {
        CHECK_INT(mixp_capture_begin(a->ctx), MIXP_OK);
        net_step(a);
        g = mixp_capture_end(a->ctx);
        CHECK(g != NULL);
    }
    for (int step = 2; step < 8; step++) {
        const Bytes before = net_bytes(a);
        net_batch(a, step, step == 3 || step == 6);
        CHECK_INT(mixp_replay(graphs[step % 2]), MIXP_OK);
        CHECK((net_bytes(a) == before) == (step == 3 || step == 6));
    }
    net_fine(a);
    net_close(a);
    CHECK_INT(cudasim::leaks(), 0);
}

/* --- mistakes ------------------------------------------------------------------------------------------- */

static void failed_step(Net *n) {
    const int64_t odd = 3;
    const float x[3] = { 1, 2, 3 };
    mixp_step_begin(n->ctx);
    mixp_zero_grad(n->opt);
    CHECK_INT(mixp_fill(n->h, 7), MIXP_OK);
    CHECK(!mixp_add(n->ctx, n->h, mixp_input(n->ctx, MIXP_F32, 1, &odd, x)));
    mixp_context_clear_error(n->ctx);
}

/* A failed step before a capture, and before a replay, is undone as before an ordinary step. */
static void after_a_failed_step(void) {
    Net *a = net_open(gpu()), *b = net_open(gpu());
    mixp_graph *graph = NULL;
    for (int step = 0; step < 6; step++) {
        for (Net *n : { a, b }) {
            if (step >= 2) failed_step(n);
            net_batch(n, step, step == 4);
        }
        if (step == 2) {
            CHECK_INT(mixp_capture_begin(a->ctx), MIXP_OK);
            net_step(a);
            graph = mixp_capture_end(a->ctx);
            CHECK(graph != NULL);
        }
        if (graph) CHECK_INT(mixp_replay(graph), MIXP_OK);
        else net_step(a);
        net_step(b);
        CHECK(net_bytes(a) == net_bytes(b));
    }
    net_fine(a);
    net_fine(b);
    net_close(a);
    net_close(b);
    CHECK_INT(cudasim::leaks(), 0);
}

static void first_write_in_a_capture(void) {
    Net *a = net_open(gpu());
    const char *why = "";
    net_batch(a, 0, 0);
    for (int i = 0; i < 2; i++) {       /* all but the writes */
        mixp_step_begin(a->ctx);
        mixp_zero_grad(a->opt);
        mixp_tensor *h = net_forward(a);
        mixp_backward(a->ctx, mixp_scaler_scale(a->scaler, mixp_mean(a->ctx, mixp_mul(a->ctx, h, h), MIXP_ALL, 0)));
        mixp_scaler_step(a->scaler, a->opt);
        mixp_scaler_update(a->scaler);
    }
    const Bytes before = net_bytes(a);
    CHECK_INT(mixp_capture_begin(a->ctx), MIXP_OK);
    net_step(a);
    CHECK(mixp_capture_end(a->ctx) == NULL);
    CHECK_INT(mixp_context_error(a->ctx, &why), MIXP_ERR_ORDER);
    CHECK_TEXT(why, "the first write of the buffer 'h' is in a capture");
    CHECK_TEXT(why, "run an ordinary step before the capture");
    mixp_context_clear_error(a->ctx);
    CHECK(net_bytes(a) == before);
    net_step(a);
    CHECK_NEAR(net_count(a), 1, 0);
    CHECK_INT(mixp_capture_begin(a->ctx), MIXP_OK);
    net_step(a);
    mixp_graph *graph = mixp_capture_end(a->ctx);
    CHECK_INT(mixp_replay(graph), MIXP_OK);
    CHECK_NEAR(net_count(a), 2, 0);
    net_fine(a);
    net_close(a);
    CHECK_INT(cudasim::leaks(), 0);
}

/* A bad index stops the step on the device: it is skipped, so the buffers are as before. */
static void stopped_steps(void) {
    for (int replayed = 0; replayed < 2; replayed++) {
        Net *a = net_open(gpu());
        mixp_graph *graph = NULL;
        const char *why = "";
        for (int step = 0; step < 2; step++) {
            net_batch(a, step, 0);
            net_step(a);
        }
        if (replayed) {
            CHECK_INT(mixp_capture_begin(a->ctx), MIXP_OK);
            net_step(a);
            graph = mixp_capture_end(a->ctx);
        }
        const Bytes before = net_bytes(a);
        for (int step = 2; step < 4; step++) {      /* and the next one, until the program asks */
            net_batch(a, step, 0);
            if (step == 2) a->ids[1] = WORDS;
            if (replayed) mixp_replay(graph);
            else if (step == 2) net_step(a);
        }
        CHECK(mixp_item(a->count) != mixp_item(a->count));      /* NaN: the wait tells */
        CHECK_INT(mixp_context_error(a->ctx, &why), MIXP_ERR_ARGUMENT);
        CHECK_TEXT(why, "embedding");
        mixp_context_clear_error(a->ctx);
        CHECK(net_bytes(a) == before);
        net_batch(a, 4, 0);
        if (replayed) CHECK_INT(mixp_replay(graph), MIXP_OK);
        else net_step(a);
        CHECK_NEAR(net_count(a), 3, 0);
        net_fine(a);
        net_close(a);
        CHECK_INT(cudasim::leaks(), 0);
    }
}

/* --- waits, and devices without the kernel --------------------------------------------------------------- */

static void no_step_waits(void) {
    NEEDS_SIMULATION;
    Net *a = net_open(gpu());
    for (int step = 0; step < 2; step++) {
        net_batch(a, step, 0);
        net_step(a);
    }
    cudasim::eager = true;
    const cudasim::Count before = cudasim::count;
    for (int step = 2; step < 6; step++) {
        net_batch(a, step, step == 3);
        net_step(a);
    }
    CHECK_INT(cudasim::count.waits, before.waits);
    CHECK_INT(cudasim::count.resources, before.resources);
    cudasim::eager = false;
    CHECK_NEAR(net_count(a), 5, 0);
    net_fine(a);
    net_close(a);
}

/* A device of an older source: the host waits for the flag, and copies. */
static void without_the_kernel(void) {
    mixp_device device = *gpu();
    mixp_kernels kernels = *device.kernels;
    kernels.restore = NULL;
    device.kernels = &kernels;
    Net *a = net_open(&device);
    for (int step = 0; step < 6; step++) {
        const Bytes before = net_bytes(a);
        net_batch(a, step, step == 3);
        net_step(a);
        CHECK((net_bytes(a) == before) == (step == 3));
    }
    net_fine(a);
    net_close(a);
    CHECK_INT(cudasim::leaks(), 0);
}

/* --- two scalers ---------------------------------------------------------------------------------------- */

/* One step trains two models, each with a scaler. If either update skips, the buffers have the bytes from before the step. Ordinary
 * steps, then replays. */
static void two_scalers_step(Net *n, mixp_scaler *second, mixp_optimizer *of_emb) {
    const int64_t rows[2] = { ROWS, D }, ids = ROWS;
    mixp_context *c = n->ctx;
    mixp_step_begin(c);
    mixp_zero_grad(n->opt);
    mixp_zero_grad(of_emb);
    mixp_tensor *x = mixp_input(c, MIXP_F32, 2, rows, n->x);
    mixp_tensor *y = mixp_linear(c, mixp_add(c, x, n->h), n->w, NULL);
    mixp_backward(c, mixp_scaler_scale(n->scaler, mixp_mean(c, mixp_mul(c, y, y), MIXP_ALL, 0)));
    mixp_tensor *e = mixp_embedding(c, n->emb, mixp_input(c, MIXP_I32, 1, &ids, n->ids));
    e = mixp_mul(c, e, mixp_input(c, MIXP_F32, 1, &rows[1], n->gain));
    mixp_backward(c, mixp_scaler_scale(second, mixp_mean(c, mixp_mul(c, e, e), MIXP_ALL, 0)));
    mixp_copy(n->h, mixp_tanh(c, y));
    mixp_write(n->code, n->codes, MIXP_U8, CODES);
    mixp_scaler_step(n->scaler, n->opt);
    mixp_scaler_step(second, of_emb);
    mixp_scaler_update(n->scaler);
    mixp_scaler_update(second);
}

static Bytes buffers_of(const Net *n) {
    Bytes all((size_t)n->h->count * 4 + CODES);
    CHECK_INT(mixp_read(n->h, all.data(), MIXP_F32, n->h->count), MIXP_OK);
    CHECK_INT(mixp_read(n->code, all.data() + n->h->count * 4, MIXP_U8, CODES), MIXP_OK);
    return all;
}

static void two_scalers(void) {
    Net *n = net_open(gpu());
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_graph *graph = NULL;
    mixp_optimizer_free(n->opt);
    n->opt = mixp_optimizer_new(n->ctx, &adamw);
    mixp_optimizer *of_emb = mixp_optimizer_new(n->ctx, &adamw);
    mixp_scaler *second = mixp_scaler_new(n->ctx, NULL);
    mixp_optimizer_add(n->opt, n->w, NULL);
    mixp_optimizer_add(of_emb, n->emb, NULL);
    for (int step = 0; step < 12; step++) {
        const int first_bad = step % 4 == 1 || step % 4 == 3, second_bad = step % 4 >= 2;
        net_batch(n, step, first_bad);
        for (int i = 0; i < D; i++) n->gain[i] = (float)(i + 1);
        if (second_bad) n->gain[3] = INFINITY;
        if (step == 8) {
            CHECK_INT(mixp_capture_begin(n->ctx), MIXP_OK);
            two_scalers_step(n, second, of_emb);
            graph = mixp_capture_end(n->ctx);
            CHECK(graph != NULL);
        }
        const Bytes before = buffers_of(n);
        if (graph) CHECK_INT(mixp_replay(graph), MIXP_OK);
        else two_scalers_step(n, second, of_emb);
        CHECK((buffers_of(n) == before) == (first_bad || second_bad));
        CHECK_INT(mixp_scaler_verdict(n->scaler).outcome, first_bad ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
        CHECK_INT(mixp_scaler_verdict(second).outcome, second_bad ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
    }
    net_fine(n);
    net_close(n);
    CHECK_INT(cudasim::leaks(), 0);
}

int main(void) {
    RUN(kernel);
    RUN(check_kernel);
    RUN(as_on_the_cpu);
    RUN(replays_equal_steps);
    RUN(bad_states);
    RUN(two_graphs);
    RUN(after_a_failed_step);
    RUN(first_write_in_a_capture);
    RUN(stopped_steps);
    RUN(no_step_waits);
    RUN(without_the_kernel);
    RUN(two_scalers);
    return test_report();
}
