/* bits.h - several ranks compute the bits of one: sums, ZeRO-1, scattered sums.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* --- the bits of one rank ------------------------------------------------------------------- */

static void check_like(const result *got, int size, const result *want) {
    CHECK_INT(want->code, MIXP_OK);
    for (int r = 0; r < size; r++) {
        CHECK_INT(got[r].done, 1);
        CHECK_INT(got[r].code, MIXP_OK);
        CHECK_TEXT(got[r].code ? got[r].text : "fine", "fine");
        CHECK_INT(got[r].bytes, want->bytes);
        CHECK(memcmp(got[r].weights, want->weights, want->bytes) == 0);
        CHECK_NEAR(got[r].scale, want->scale, 0);
        CHECK_INT(got[r].verdict.outcome, want->verdict.outcome);
        CHECK_NEAR(got[r].verdict.grad_norm, want->verdict.grad_norm, 0);
        CHECK_NEAR(got[r].verdict.largest, want->verdict.largest, 0);
        CHECK_INT(got[r].allocations[1], got[r].allocations[0]);
    }
}

/* size ranks, one rank that takes as many parts one after the other, and sums taken here. */
static void check_bits(plan p, int size) {
    static result want;
    plan one = p;
    reference(&p, size, &want);
    check_like(run(&p, size), size, &want);
    one.apart = 1;
    one.shard = 0;
    if (p.plant_rank >= 0) return;      /* it would be in another part */
    one.walks = size;
    one.parts = size;
    check_like(run(&one, 1), 1, &want);
}

static void two_ranks(void) { check_bits(plan_of(STEPS), 2); }
static void four_ranks(void) { check_bits(plan_of(STEPS), 4); }

static void ways_to_sum(void) {
    plan p = plan_of(3);
    p.mean = MIXP_MEAN_AFTER;
    check_bits(p, 4);
    p.mean = MIXP_MEAN_NONE;
    check_bits(p, 2);
    p.dtype = MIXP_BF16;
    p.mean = MIXP_MEAN_BEFORE;
    check_bits(p, 4);
    p.mean = MIXP_MEAN_AFTER;
    check_bits(p, 2);
    p.low_sums = 1;
    check_bits(p, 4);
    p.mean = MIXP_MEAN_BEFORE;
    check_bits(p, 4);
}

/* Gradients of f32 that travel as bf16: each rank's part is rounded, and the sum, once. */
static void narrow_wire(void) {
    plan p = plan_of(3);
    p.wire = MIXP_BF16;
    check_bits(p, 2);
    check_bits(p, 3);
    p.mean = MIXP_MEAN_AFTER;
    check_bits(p, 4);
    p.dtype = MIXP_BF16;                /* as they are: as low_sums */
    check_bits(p, 2);
    p.dtype = MIXP_F32;
    p.shard = 1;
    check_bits(p, 2);
}

/* Two ranks that add up two walks each, in place, then their sums. */
static void held_walks(void) {
    plan p = plan_of(3), want = p;
    p.walks = 2;
    p.apart = 1;
    p.parts = 4;
    result *got = run(&p, 2);
    CHECK_INT(got[0].code, MIXP_OK);
    CHECK_TEXT(got[0].code ? got[0].text : "fine", "fine");
    CHECK(memcmp(got[0].weights, got[1].weights, got[0].bytes) == 0);
    result first = got[0];
    reference(&want, 4, &got[1]);       /* the same batch: ((a + c) + (b + d)), not a + b + c + d */
    CHECK_INT(got[1].bytes, first.bytes);
    CHECK(memcmp(got[1].weights, first.weights, first.bytes) != 0);
    CHECK_NEAR(got[1].verdict.grad_norm, first.verdict.grad_norm, 1e-3 * first.verdict.grad_norm);
    p.apart = 0;
    got = run(&p, 2);
    CHECK(memcmp(got[0].weights, got[1].weights, got[0].bytes) == 0);
    CHECK_NEAR(got[0].verdict.grad_norm, first.verdict.grad_norm, 1e-3 * first.verdict.grad_norm);
    CHECK_INT(got[0].allocations[1], got[0].allocations[0]);
}

/* A block whose activations are computed again in backward has the bits that it has without, however
 * its gradients are sent: they become ready while the block runs again. */
static void recomputed(void) {
    static result want[MOST];
    for (int way = 0; way < 6; way++) {
        const int size = way == 5 ? 4 : 2;
        plan p = plan_of(STEPS);
        if (way == 1) p.bucket = 320;
        p.shard = way > 1;
        p.scatter = way < 3 ? 0 : way == 4 ? 2 : 1;
        p.walks = way == 5 ? 2 : 1;
        memcpy(want, run(&p, size), sizeof want);
        p.recomputes = 1;
        check_like(run(&p, size), size, want);
    }
}

/* Walks that are held back may differ in the parameters that they reach, whatever the order of these: a
 * parameter that one of them left out counts as 0 there, at the same loss scale. */
static void held_walks_that_differ(void) {
    static const int64_t n[1] = {64};
    mixp_ranks_desc ranks;
    mixp_context_desc desc;
    memset(&ranks, 0, sizeof ranks);
    memset(&desc, 0, sizeof desc);
    ranks.size = ranks.apart = 1;
    ranks.bucket_bytes = 1;             /* each parameter is a range of its own */
    desc.ranks = &ranks;
    for (int which = 0; which < 2; which++) {
        mixp_context *ctx = mixp_context_new(&desc);
        mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
        mixp_optimizer *opt = new_sgd(ctx);
        mixp_tensor *p[2], *loss;
        float g[64];
        for (int i = 0; i < 2; i++) {
            p[i] = mixp_param(ctx, i ? "b" : "a", MIXP_F32, 1, n);
            mixp_fill(p[i], 1);
            mixp_optimizer_add(opt, p[i], NULL);
        }
        for (int i = 0; i < 3; i++) {       /* both, one of them, both */
            mixp_ranks_hold(ctx, i < 2);
            mixp_step_begin(ctx);
            loss = i == 1 ? mixp_mul(ctx, p[which], p[which]) : mixp_add(ctx, p[0], p[1]);
            loss = mixp_sum(ctx, loss, MIXP_ALL, 0);
            CHECK_INT(mixp_backward(ctx, mixp_scaler_scale(scaler, loss)), MIXP_OK);
        }
        CHECK_INT(mixp_scaler_unscale(scaler, opt), MIXP_OK);
        for (int i = 0; i < 2; i++) {
            CHECK_INT(mixp_read(p[i]->grad, g, MIXP_F32, 64), MIXP_OK);
            CHECK_NEAR(g[63], i == which ? 4 : 2, 0);
        }
        mixp_context_free(ctx);
    }
}

/* --- ZeRO-1 ---------------------------------------------------------------------------------- */

/* Every rank updates tensors of its own: the bits are the same, the memory is less. */
static void sharded(void) {
    plan p = plan_of(STEPS), plain = p;
    p.shard = 1;
    p.bucket = 320;                     /* weights go in many slices */
    plain.bucket = 320;
    check_bits(p, 2);
    check_bits(p, 3);                   /* pieces of another length, and an empty one */
    check_bits(p, 4);
    p.dtype = plain.dtype = MIXP_BF16;
    p.mean = MIXP_MEAN_AFTER;
    check_bits(p, 4);
    size_t used = run(&plain, 4)[3].used;
    CHECK(run(&p, 4)[3].used + 8000 < used);
    p.plant_step = 2;
    p.plant_rank = 3;
    check_bits(p, 4);
}

/* Averages have the bits of one rank, and leave the weights as they were; one step is skipped. */
static void sharded_averages(void) {
    plan p = plan_of(STEPS);
    p.shard = p.ema = 1;
    p.bucket = 320;
    p.plant_step = 2;
    p.plant_rank = 1;
    for (int way = 0; way < 2; way++) {
        p.dtype = way ? MIXP_BF16 : MIXP_F32;
        check_bits(p, 2);
        check_bits(p, 4);
    }
    check_bits(p, 3);                   /* pieces of another length, and an empty one */
    p.shard = 0;
    check_bits(p, 2);
}

static const char *no_hook(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                           double seconds) {
    (void)user, (void)data, (void)count, (void)dtype, (void)stream, (void)seconds;
    return "the cable is cut";
}

/* Bytes that AdamW's states take on this rank of 8, of a model whose first table is half of it. */
static size_t states_of(int rank, mixp_moment_kind kind) {
    static const int64_t shapes[4][2] = {{5025, 80}, {500, 301}, {301, 500}, {96, 96}};
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_ranks_desc ranks;
    mixp_context_desc d;
    mixp_tensor *t[4];
    memset(&ranks, 0, sizeof ranks);
    memset(&d, 0, sizeof d);
    ranks.rank = rank;
    ranks.size = 8;
    ranks.sum = ranks.all_gather = no_hook;
    ranks.shard = 1;
    d.ranks = &ranks;
    d.threads = 1;
    mixp_context *ctx = mixp_context_new(&d);
    adamw.states.m = kind;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    for (int i = 0; i < 4; i++) t[i] = mixp_param(ctx, &"a\0b\0c\0d"[2 * i], MIXP_F32, 2, shapes[i]);
    size_t used = mixp_context_memory(ctx).used;
    for (int i = 0; i < 4; i++) mixp_optimizer_add(opt, t[i], NULL);
    used = mixp_context_memory(ctx).used - used;
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
    return used;
}

/* It burdens no rank: each has an eighth of the moments, 8 bytes an element, but for the tables of
 * rows, and what rounds up. States of fewer bytes are of whole tensors still. */
static void sharded_evenly(void) {
    const double each = 8.0 * (5025 * 80 + 2 * 500 * 301 + 96 * 96) / 8;
    size_t most = 0;
    for (int rank = 0; rank < 8; rank++) {
        size_t small = states_of(rank, MIXP_MOMENT_BF16);
        CHECK_NEAR((double)states_of(rank, MIXP_MOMENT_F32), each, 0.04 * each);
        if (small > most) most = small;
    }
    CHECK(most >= 6u * 5025 * 80);
}

static size_t allocated, most_allocated;
static void *counted(size_t bytes, void *user) {
    char *p = (char *)malloc(bytes + 64);
    (void)user;
    if (!p) return NULL;
    memcpy(p, &bytes, sizeof bytes);
    allocated += bytes;
    if (allocated > most_allocated) most_allocated = allocated;
    return p + 64;
}
static void uncounted(void *p, void *user) {
    size_t bytes = 0;
    (void)user;
    if (!p) return;
    memcpy(&bytes, (char *)p - 64, sizeof bytes);
    allocated -= bytes;
    free((char *)p - 64);
}

/* 8 tables of 64 KiB with AdamW's states, in a file of 1.5 MiB; size 4 with parts of the states. */
static mixp_context *tables(int size, mixp_checkpoint *all, mixp_optimizer **opt) {
    static const int64_t shape[2] = {128, 128};
    static mixp_ranks_desc ranks;
    mixp_context_desc d;
    char name[2] = "a";
    memset(&d, 0, sizeof d);
    memset(all, 0, sizeof *all);
    memset(&ranks, 0, sizeof ranks);
    ranks.size = size;
    ranks.rank = size - 1;
    ranks.sum = ranks.all_gather = no_hook;
    ranks.shard = 1;
    d.ranks = &ranks;
    d.threads = 1;
    d.allocate = counted;
    d.release = uncounted;
    all->ctx = mixp_context_new(&d);
    all->optimizers = opt;
    all->n_optimizers = 1;
    *opt = mixp_optimizer_new(all->ctx, NULL);
    for (; name[0] < 'i'; name[0]++) mixp_optimizer_add(*opt, mixp_param(all->ctx, name, MIXP_F32, 2, shape), NULL);
    return all->ctx;
}

/* A rank that loads needs memory for the file, and for the states of one table beside it. */
static void sharded_load_memory(void) {
    static const char path[] = "tables.safetensors";
    const size_t file = 8 * 3 * 65536, one = 3 * 65536;
    mixp_checkpoint all;
    mixp_optimizer *opt;
    mixp_context *ctx = tables(1, &all, &opt);
    CHECK_INT(mixp_checkpoint_save(path, &all), MIXP_OK);
    mixp_context_free(ctx);
    ctx = tables(4, &all, &opt);
    size_t used = most_allocated = allocated;
    CHECK_INT(mixp_checkpoint_load(path, &all), MIXP_OK);
    CHECK(most_allocated > used + file);
    CHECK(most_allocated < used + file + 2 * one);
    CHECK_INT(allocated, used);
    mixp_context_free(ctx);
    remove(path);
}

/* Muon looks at whole matrices: each is one rank's. A step that is skipped, a smaller world. */
static void sharded_muon(void) {
    plan p = plan_of(STEPS);
    p.muon = 1;
    p.shard = 1;
    p.bucket = 320;
    check_bits(p, 2);
    check_bits(p, 4);
    p.dtype = MIXP_BF16;
    check_bits(p, 4);
    p.plant_step = 2;
    p.plant_rank = 1;
    check_bits(p, 2);
}

/* A third state, and sums that begin above 0, in pieces and whole. */
static void sharded_forms(void) {
    plan p = plan_of(STEPS);
    p.shard = 1;
    p.bucket = 320;
    for (p.form = FORM_AMSGRAD; p.form <= FORM_CENTERED; p.form++) {
        p.dtype = p.form == FORM_AMSGRAD ? MIXP_BF16 : MIXP_F32;
        check_bits(p, 3);
    }
}

static size_t file_bytes(const char *path, unsigned char *to, size_t most) {
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(to, 1, most, f) : 0;
    if (f) fclose(f);
    return n;
}

/* The file is that of ranks that share everything, and loads on another number of them. */
static void sharded_checkpoints_of(int muon, int ema, int form) {
    static unsigned char a[1 << 17], b[1 << 17];
    char path[3][64];
    plan p = plan_of(3);
    for (int i = 0; i < 3; i++) {
        snprintf(path[i], sizeof path[i], "ranks%d.%d.tmp", i, (int)getpid());
        remove(path[i]);
    }
    p.muon = muon;
    p.ema = ema;
    p.form = form;
    p.dtype = MIXP_BF16;
    p.bucket = 320;
    p.checkpoint = path[0];
    CHECK_INT(run(&p, 4)[0].code, MIXP_OK);
    p.shard = 1;
    p.checkpoint = path[1];
    result *got = run(&p, 4);
    for (int i = 0; i < 4; i++) CHECK_TEXT(got[i].code ? got[i].text : "fine", "fine");
    size_t n = file_bytes(path[0], a, sizeof a);
    CHECK(n > 20000 && n < sizeof a);
    CHECK_INT(file_bytes(path[1], b, sizeof b), n);
    CHECK(memcmp(a, b, n) == 0);
    p.copy = path[2];
    p.steps = 6;                        /* 3 steps of 4 parts are 6 of 2 */
    for (int i = 0; i < 2; i++) {
        p.shard = !i;
        got = run(&p, 2);
        CHECK_TEXT(got[0].code ? got[0].text : "fine", "fine");
        CHECK_INT(file_bytes(path[2], b, sizeof b), n);
        CHECK(memcmp(a, b, n) == 0);
        remove(path[2]);
    }
    p.copy = "/nowhere/at/all";         /* what rank 0 cannot write, all are told of */
    p.shard = 1;
    got = run(&p, 2);
    CHECK_INT(got[0].code, MIXP_ERR_IO);
    CHECK_INT(got[1].code, MIXP_ERR_IO);
    CHECK_TEXT(got[1].text, "rank 0 failed");
    for (int i = 0; i < 3; i++) remove(path[i]);
}
static void sharded_checkpoints(void) {
    sharded_checkpoints_of(0, 0, 0);
    sharded_checkpoints_of(1, 0, 0);
    sharded_checkpoints_of(0, 1, 0);
    sharded_checkpoints_of(1, 1, 0);
    sharded_checkpoints_of(0, 0, FORM_AMSGRAD);
    sharded_checkpoints_of(0, 1, FORM_CENTERED);
}

/* --- scattered sums ---------------------------------------------------------------------------- */

/* As check_like, but for the norm, whose last bits may be others. */
static void check_scattered(const result *got, int size, const result *want) {
    for (int r = 0; r < size; r++) {
        CHECK_INT(got[r].done, 1);
        CHECK_TEXT(got[r].code ? got[r].text : "fine", "fine");
        CHECK(memcmp(got[r].weights, want->weights, want->bytes) == 0);
        CHECK_NEAR(got[r].scale, want->scale, 0);
        CHECK_INT(got[r].verdict.outcome, want->verdict.outcome);
        CHECK_INT(got[r].verdict.applied, want->verdict.applied);
        CHECK_NEAR(got[r].verdict.largest, want->verdict.largest, 0);
        CHECK_NEAR(got[r].verdict.grad_norm, got[0].verdict.grad_norm, 0);
        CHECK_NEAR(got[r].verdict.grad_norm, want->verdict.grad_norm, want->verdict.grad_norm / (1 << 22));
        CHECK_INT(got[r].allocations[1], got[r].allocations[0]);
    }
}

/* Where nothing is clipped, the bits of sums that all get: 2, 3 and 4 ranks, at once and begun early,
 * gradients in f32 and bf16, each way of the mean, walks that are held back, and matrices of Muon's. */
static void scattered(void) {
    static result want;
    plan p = plan_of(STEPS);
    p.max_norm = 0;
    p.shard = 1;
    for (int way = 0; way < 6; way++) {
        p.ema = way % 2;
        static const int from[6] = {2, 2, 4, 2, 2, 4}, upto[6] = {4, 2, 4, 2, 2, 4};
        p.dtype = way < 2 ? MIXP_F32 : MIXP_BF16;
        p.mean = way == 2 ? MIXP_MEAN_AFTER : way == 3 ? MIXP_MEAN_NONE : MIXP_MEAN_BEFORE;
        p.low_sums = way == 4;
        p.muon = way == 5;
        for (int size = from[way]; size <= upto[way]; size++) {
            p.scatter = 0;
            reference(&p, size, &want);
            p.scatter = 1;
            check_scattered(run(&p, size), size, &want);
            p.scatter = 2;
            check_scattered(run(&p, size), size, &want);
        }
    }
    p = plan_of(3);
    p.max_norm = 0;
    p.shard = 1;
    p.walks = 2;
    for (p.apart = 0; p.apart < 2; p.apart++) {
        p.scatter = 0;
        want = run(&p, 2)[1];
        CHECK_INT(want.code, MIXP_OK);
        p.scatter = 2;
        check_scattered(run(&p, 2), 2, &want);
    }
}

/* How far a's weights, in f32, are from b's. */
static double furthest(const result *a, const result *b) {
    double most = 0;
    for (size_t i = 0; i + 4 <= a->bytes; i += 4) {
        float x, y;
        memcpy(&x, a->weights + i, 4);
        memcpy(&y, b->weights + i, 4);
        if (!(fabs((double)x - y) <= most)) most = fabs((double)x - y);
    }
    return most;
}

/* Clipped, inside of a step and by calls of their own: the same on all ranks, and near to what is
 * without; what is gathered of a checkpoint is whole. A sum of squares that one part alone had would
 * be far off. */
static void scattered_and_clipped(void) {
    static result want, first;
    plan p = plan_of(STEPS);
    p.shard = 1;
    p.max_norm = 0.05;
    for (p.unscaled = 0; p.unscaled < 2; p.unscaled++) {
        p.scatter = 0;
        want = run(&p, 4)[0];
        CHECK_INT(want.code, MIXP_OK);
        CHECK(want.verdict.clip < 0.9);
        p.scatter = 1;
        first = run(&p, 4)[0];
        CHECK_TEXT(first.code ? first.text : "fine", "fine");
        result *got = run(&p, 4);               /* again: the same bits */
        for (int r = 0; r < 4; r++) {
            CHECK(memcmp(got[r].weights, first.weights, first.bytes) == 0);
            CHECK_NEAR(got[r].verdict.grad_norm, want.verdict.grad_norm, 1e-6 * want.verdict.grad_norm);
            CHECK_NEAR(got[r].verdict.clip, want.verdict.clip, 1e-6);
        }
        CHECK(furthest(&first, &want) < 1e-5);
    }
}

/* An Inf on one rank, and finite gradients whose sum overflows in one rank's piece alone: all skip, and
 * the tensor is named with its element, which counts from the tensor's beginning; also where unscaling
 * and clipping are calls of their own. */
static void scattered_inf(void) {
    plan p = plan_of(3), before = plan_of(2);
    static result kept;
    p.shard = before.shard = p.scatter = before.scatter = 1;
    p.dtype = before.dtype = MIXP_F16;
    p.mean = before.mean = MIXP_MEAN_NONE;
    p.max_norm = before.max_norm = 0;
    for (int way = 0; way < 6; way++) {
        p.unscaled = before.unscaled = way > 2;
        if (way % 3 == 0) kept = run(&before, 2)[0];
        CHECK_INT(kept.code, MIXP_OK);
        p.plant_step = 2;
        p.plant_rank = way % 3 ? 0 : 1;
        p.plant_more = way % 3 > 0;
        p.plant_at = way % 3 == 2 ? 100 : 700;  /* in rank 0's piece of 640 of 1152, in rank 1's */
        p.plant_value = way % 3 ? 40000 : 0;
        result *got = run(&p, 2);
        for (int r = 0; r < 2; r++) {
            CHECK_TEXT(got[r].code ? got[r].text : "fine", "fine");
            CHECK_INT(got[r].verdict.outcome, MIXP_STEP_SKIPPED);
            CHECK_TEXT(got[r].bad_tensor, "up");
            CHECK_INT(strlen(got[r].bad_tensor), 2);
            CHECK_INT(got[r].verdict.bad_element, p.plant_at);
            CHECK_INT(got[r].verdict.bad_rank, way % 3 ? -1 : 1);
            CHECK_INT(got[r].verdict.bad_is_nan, 0);
            CHECK_NEAR(got[r].scale, kept.scale / 2, 0);
            CHECK(memcmp(got[r].weights, kept.weights, kept.bytes) == 0);
        }
    }
}
