/* test_ranks_state.c - buffers with several ranks: each rank's own, rank 0's, or the mean. Who has which bytes after an update, a
 * skipped step and a retry; what ranks compare; what a checkpoint keeps of each rank, and on how many ranks it loads; ranks that
 * make or write different buffers get an error that names one.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _POSIX_C_SOURCE 200809L
#if defined(__GNUC__)
#  pragma GCC diagnostic ignored "-Wunused-function"
#endif
#include "mixprec.h"
#include "../../examples/ddp_threads.c"
#include "test.h"
#include <stdarg.h>
#include <unistd.h>

enum { D = 6, ROWS = 3, STEPS = 8, MOST = 7, ROOM = 256, WEIGHTS = 2 * D * D };

/* The buffers. CODE has an odd number of bytes. */
enum { H, SEEN, MEAN, MEAN16, MEANB, COUNT, CODE, BUFFERS };
static const struct {
    const char *name;
    mixp_dtype dtype;
    mixp_buffer_ranks ranks;
    int64_t count;
} made[BUFFERS] = {
    { "h", MIXP_F32, MIXP_BUFFER_OWN, ROWS * D }, { "seen", MIXP_I64, MIXP_BUFFER_OWN, 5 },
    { "mean", MIXP_F32, MIXP_BUFFER_MEAN, D },    { "mean16", MIXP_F16, MIXP_BUFFER_MEAN, D },
    { "meanb", MIXP_BF16, MIXP_BUFFER_MEAN, D },  { "count", MIXP_F32, MIXP_BUFFER_MEAN, 1 },
    { "code", MIXP_U8, MIXP_BUFFER_RANK_0, 37 }
};

/* What rank 1 does otherwise than the other ranks. */
struct net;
typedef enum odd {
    ODD_NOT, ODD_KIND, ODD_OWN, ODD_MISSING, ODD_NAME, ODD_DTYPE, ODD_SHAPE,
    ODD_SILENT,                 /* in step 2 it does not write CODE */
    ODD_SWAPPED,                /* in step 2, after mixp_scaler_step, it writes MEANB, and rank 0 writes MEAN16 */
    ODD_LATE                    /* in step 2, after mixp_scaler_step, it alone writes CODE */
} odd;

typedef struct plan {
    int         from, end;      /* steps */
    int         plant;          /* the step in which the batch of rank 1 holds an Inf; -1 = none */
    int         spoil;          /* the step in which rank 1 makes H infinite, with finite gradients; 0 = none */
    float       scale;          /* the first loss scale; 0 = 1024 */
    int         retry;          /* 1: mixp_retry */
    int         plain;          /* 1: the scaler is disabled, so mixp_scaler_step ends the window */
    int         parts;          /* of a batch, each a step of its own; 0 = 1 */
    int         shard;
    int64_t     check_every;
    int64_t     rows;           /* of H; 0 = ROWS */
    odd         is;
    const char *save, *load;    /* at the end, at the begin; NULL = not */
    void      (*at_end)(struct net *n);
} plan;

typedef struct snapshot { unsigned char bytes[BUFFERS][ROOM]; float weights[WEIGHTS]; } snapshot;

/* What a rank has seen. */
typedef struct record {
    snapshot before, written, after;
    mixp_outcome outcome;
    mixp_verdict verdict;
    char bad[20];               /* verdict.bad_tensor */
    int tries;
} record;

typedef struct net {
    const plan     *p;
    mixp_context   *ctx;
    mixp_tensor    *w, *u, *b[BUFFERS];
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_checkpoint all;
    int             rank, size;
    char            said[600], warned[600];
} net;

static record records[MOST][STEPS];
static struct { mixp_result code; char said[600], warned[600]; } told[MOST];
static char path[64], path_2[64];

static plan plan_of(int end) {
    plan p;
    memset(&p, 0, sizeof p);
    p.end = end;
    p.plant = -1;
    return p;
}

static size_t bytes_of(const net *n, int i)
{ return (size_t)n->b[i]->count * mixp_dtype_size(n->b[i]->dtype); }

/* --- a recurrent net ------------------------------------------------------------------------------------ */

static void hear_warning(const char *message, void *user)
{ snprintf(((net *)user)->warned, sizeof told[0].warned, "%s", message); }

static void net_buffers(net *n) {
    const odd is = n->rank == 1 ? n->p->is : ODD_NOT;
    for (int i = 0; i < BUFFERS; i++) {
        int64_t shape[2] = { made[i].count, 1 };
        mixp_dtype dtype = is == ODD_DTYPE && i == MEAN16 ? MIXP_BF16 : made[i].dtype;
        mixp_buffer_ranks ranks = made[i].ranks;
        const char *name = is == ODD_NAME && i == MEAN ? "means" : made[i].name;
        if (is == ODD_KIND && i == MEAN) ranks = MIXP_BUFFER_RANK_0;
        if (is == ODD_OWN && i == COUNT) ranks = MIXP_BUFFER_OWN;
        if (i == H) shape[0] = n->p->rows ? n->p->rows : ROWS;
        if (i == H) shape[1] = D;
        if (is == ODD_MISSING && i == CODE) continue;
        n->b[i] = mixp_buffer(n->ctx, name, dtype, i == H || (is == ODD_SHAPE && i == CODE) ? 2 : 1, shape);
        CHECK_INT(mixp_buffer_set_ranks(n->b[i], ranks), MIXP_OK);
    }
}

static void net_open(net *n, const plan *p, const mixp_ranks_desc *given) {
    static const int64_t square[2] = { D, D };
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_context_desc d;
    mixp_scaler_desc s;
    memset(n, 0, sizeof *n);
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    n->p = p;
    n->size = 1;
    if (given) {
        mixp_ranks_desc ranks = *given;
        ranks.seconds = 60;
        ranks.shard = p->shard;
        ranks.check_every = p->check_every;
        ranks.bucket_bytes = 64;        /* buffers travel in several parts */
        d.ranks = &ranks;
        n->rank = ranks.rank;
        n->size = ranks.size;
    }
    d.threads = 1;
    d.seed = 3;
    d.on_warning = hear_warning;
    d.user = n;
    s.init_scale = p->scale > 0 ? p->scale : 1024;
    s.disabled = p->plain;
    adamw.lr = 0.05;
    n->ctx = mixp_context_new(&d);
    n->opt = mixp_optimizer_new(n->ctx, &adamw);
    n->scaler = mixp_scaler_new(n->ctx, &s);
    n->w = mixp_param(n->ctx, "w", MIXP_F32, 2, square);
    n->u = mixp_param(n->ctx, "u", MIXP_F32, 2, square);
    mixp_init_uniform(n->w, -0.5, 0.5);
    mixp_init_uniform(n->u, -0.5, 0.5);
    mixp_optimizer_add(n->opt, n->w, NULL);
    mixp_optimizer_add(n->opt, n->u, NULL);
    net_buffers(n);
    n->all.ctx = n->ctx;
    n->all.scaler = n->scaler;
    n->all.optimizers = &n->opt;
    n->all.n_optimizers = 1;
}

/* The error so far, which is cleared. */
static mixp_result net_hear(net *n) {
    const char *text = "";
    const mixp_result r = mixp_context_error(n->ctx, &text);
    snprintf(n->said, sizeof n->said, "%s", text);
    mixp_context_clear_error(n->ctx);
    return r;
}

static void net_see(const net *n, snapshot *s) {
    memset(s, 0, sizeof *s);
    for (int i = 0; i < BUFFERS; i++)
        if (n->b[i]) mixp_read(n->b[i], s->bytes[i], n->b[i]->dtype, n->b[i]->count);
    mixp_read(n->w, s->weights, MIXP_F32, D * D);
    mixp_read(n->u, s->weights + D * D, MIXP_F32, D * D);
}

/* 0.75 of the old value, and 0.25 of the batch's: of other numbers on each rank. */
static void net_average(net *n, mixp_tensor *to, mixp_tensor *batch) {
    mixp_tensor *old = mixp_scale(n->ctx, mixp_cast(n->ctx, to, MIXP_F32), 0.75f);
    mixp_copy(to, mixp_add(n->ctx, old, mixp_scale(n->ctx, batch, 0.25f)));
}

static void net_code(net *n, int step) {
    unsigned char code[37];
    for (int i = 0; i < 37; i++) code[i] = (unsigned char)(i * 7 + 31 * n->rank + 5 * step);
    mixp_write(n->b[CODE], code, MIXP_U8, 37);
}

/* Writes every buffer, the state twice. */
static void net_write(net *n, mixp_tensor *next, int step) {
    static const int64_t one_shape[1] = { 1 };
    const odd is = step == 2 ? n->p->is : ODD_NOT;
    int64_t seen[5];
    float one = 1;
    for (int i = 0; i < 5; i++) seen[i] = ((int64_t)step << 33) + i + 100 * n->rank;
    MIXP_NO_GRAD(n->ctx) {
        mixp_tensor *batch = mixp_mean(n->ctx, next, 0, 0);
        mixp_fill(n->b[H], 9);
        mixp_copy(n->b[H], next);
        mixp_write(n->b[SEEN], seen, MIXP_I64, 5);
        net_average(n, n->b[MEAN], batch);
        if (is != ODD_SWAPPED) net_average(n, n->b[MEAN16], batch);
        if (is != ODD_SWAPPED) net_average(n, n->b[MEANB], batch);
        mixp_copy(n->b[COUNT], mixp_add(n->ctx, n->b[COUNT], mixp_input(n->ctx, MIXP_F32, 1, one_shape, &one)));
    }
    if (is == ODD_LATE || (is == ODD_SILENT && n->rank == 1) || !n->b[CODE]) return;
    net_code(n, step);
}

/* What the odd ones do between mixp_scaler_step and mixp_scaler_update. */
static void net_write_late(net *n, int step) {
    if (step != 2) return;
    if (n->p->is == ODD_SWAPPED && n->rank < 2) mixp_fill(n->b[n->rank ? MEANB : MEAN16], 0.5);
    if (n->p->is == ODD_LATE && n->rank == 1) net_code(n, step);
}

static mixp_tensor *net_next(net *n, int step) {
    const int64_t rows = n->b[H]->shape[0], shape[2] = { rows, D };
    mixp_tensor *next = NULL;
    float x[4 * ROWS * D];
    for (int i = 0; i < rows * D; i++) x[i] = (float)((i * 37 + 11 * n->rank + 5 * step) % 101) / 50 - 1;
    if (step == n->p->plant && n->rank == 1) x[7] = INFINITY;
    MIXP_AUTOCAST(n->ctx, MIXP_F16) {
        mixp_tensor *in = mixp_linear(n->ctx, mixp_input(n->ctx, MIXP_F32, 2, shape, x), n->w, NULL);
        next = mixp_tanh(n->ctx, mixp_add(n->ctx, in, mixp_linear(n->ctx, n->b[H], n->u, NULL)));
    }
    return mixp_cast(n->ctx, next, MIXP_F32);
}

static void net_try(net *n, int step, record *r) {
    const int parts = n->p->parts ? n->p->parts : 1;
    mixp_zero_grad(n->opt);
    for (int part = 0; part < parts; part++) {
        mixp_step_begin(n->ctx);
        mixp_ranks_hold(n->ctx, part < parts - 1);
        mixp_tensor *next = net_next(n, step + part);
        mixp_backward(n->ctx,
                      mixp_scaler_scale(n->scaler, mixp_mean(n->ctx, mixp_mul(n->ctx, next, next), MIXP_ALL, 0)));
        net_write(n, next, step);
    }
    if (n->p->spoil && step == n->p->spoil && n->rank == 1)
        MIXP_NO_GRAD(n->ctx) mixp_copy(n->b[H], mixp_scale(n->ctx, mixp_scale(n->ctx, n->b[H], 3e38f), 3e38f));
    if (n->p->plain) net_see(n, &r->written);
    mixp_scaler_step(n->scaler, n->opt);
    net_write_late(n, step);
    if (!n->p->plain && mixp_context_error(n->ctx, NULL) == MIXP_OK) net_see(n, &r->written);
    mixp_scaler_update(n->scaler);
    r->tries++;
}

static void net_step(net *n, int step) {
    record *r = &records[n->rank][step];
    r->tries = 0;
    net_see(n, &r->before);
    do net_try(n, step, r);
    while (n->p->retry && mixp_retry(n->scaler, 20));
    r->verdict = mixp_scaler_verdict(n->scaler);
    r->outcome = r->verdict.outcome;
    snprintf(r->bad, sizeof r->bad, "%s", r->verdict.bad_tensor ? r->verdict.bad_tensor : "");
    net_see(n, &r->after);
}

static int rank_run(const mixp_ranks_desc *ranks, void *user) {
    const plan *p = user;
    net n;
    net_open(&n, p, ranks);
    if (p->load) mixp_checkpoint_load(p->load, &n.all);
    for (int step = p->from; step < p->end && mixp_context_error(n.ctx, NULL) == MIXP_OK; step++) net_step(&n, step);
    if (p->save && mixp_context_error(n.ctx, NULL) == MIXP_OK) mixp_checkpoint_save(p->save, &n.all);
    if (p->at_end) p->at_end(&n);
    told[n.rank].code = net_hear(&n);
    memcpy(told[n.rank].said, n.said, sizeof n.said);
    memcpy(told[n.rank].warned, n.warned, sizeof n.warned);
    mixp_context_free(n.ctx);
    return told[n.rank].code != MIXP_OK;
}

/* Runs the plan on `size` ranks. Returns 1 if a rank has failed. */
static int run(const plan *p, int size) {
    memset(told, 0, sizeof told);
    return ddp_threads(size, rank_run, (void *)(uintptr_t)p);
}

/* All ranks have succeeded. */
static void run_well(const plan *p, int size) {
    CHECK_INT(run(p, size), 0);
    for (int r = 0; r < size; r++)
        if (told[r].code != MIXP_OK) TEST_SHOW("rank %d: %s", r, told[r].said);
    for (int r = 0; r < size; r++)
        if (told[r].warned[0]) { CHECK(!"a warning"); TEST_SHOW("rank %d: %s", r, told[r].warned); }
}

/* --- after an update ------------------------------------------------------------------------------------ */

/* The value of element `at` of buffer i, of 16 and 32 bits, by the definition of the formats. */
static double value_of(const unsigned char *bytes, int i, int at) {
    uint32_t bits = 0;
    float x;
    if (made[i].dtype == MIXP_F32) memcpy(&bits, bytes + 4 * at, 4);
    else if (made[i].dtype == MIXP_BF16) memcpy((char *)&bits, bytes + 2 * at, 2), bits <<= 16;
    else {
        memcpy(&bits, bytes + 2 * at, 2);
        const int e = (int)(bits >> 10 & 31);
        const double m = ldexp(bits & 1023, -10);
        return (bits >> 15 ? -1 : 1) * (e ? ldexp(1 + m, e - 15) : ldexp(m, -14));
    }
    memcpy(&x, &bits, 4);
    return x;
}

/* The rounding of the last bit, and of the sum in f32. */
static double rounding_of(int i)
{ return made[i].dtype == MIXP_F32 ? 0 : made[i].dtype == MIXP_F16 ? ldexp(1, -11) : ldexp(1, -8); }

static void check_mean(int i, int step, int size) {
    for (int at = 0; at < made[i].count; at++) {
        double mean = 0, most = 0;
        for (int r = 0; r < size; r++) {
            const double x = value_of(records[r][step].written.bytes[i], i, at);
            mean += x / size;
            most += fabs(x) / size;
        }
        CHECK_NEAR(value_of(records[0][step].after.bytes[i], i, at), mean,
                   rounding_of(i) * fabs(mean) + size * ldexp(most, -24) + 6e-8 * (made[i].dtype == MIXP_F16));
    }
}

/* All ranks have rank 0's bytes of this buffer. */
static void check_same(int i, int step, int size) {
    for (int r = 1; r < size; r++)
        CHECK(memcmp(records[r][step].after.bytes[i], records[0][step].after.bytes[i], ROOM) == 0);
}

static void check_update(int step, int size) {
    for (int r = 0; r < size; r++) {
        const record *mine = &records[r][step];
        CHECK_INT(mine->outcome, MIXP_STEP_APPLIED);
        CHECK(memcmp(mine->after.bytes[H], mine->written.bytes[H], ROOM) == 0);
        CHECK(memcmp(mine->after.bytes[SEEN], mine->written.bytes[SEEN], ROOM) == 0);
        CHECK(r == 0 || memcmp(mine->after.bytes[H], records[0][step].after.bytes[H], ROOM) != 0);
        CHECK(r == 0 || memcmp(mine->written.bytes[CODE], records[0][step].written.bytes[CODE], ROOM) != 0);
        CHECK(memcmp(mine->after.bytes[CODE], records[0][step].written.bytes[CODE], ROOM) == 0);
        CHECK(memcmp(mine->before.bytes[MEAN], mine->after.bytes[MEAN], ROOM) != 0);
    }
    for (int i = MEAN; i <= COUNT; i++) check_mean(i, step, size);
    for (int i = MEAN; i < BUFFERS; i++) check_same(i, step, size);
    CHECK_NEAR(value_of(records[0][step].after.bytes[COUNT], COUNT, 0), step + 1, 0);
}

static void each_update(void) {
    static const int sizes[] = { 1, 2, 3, 5, 7 };
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        plan p = plan_of(STEPS);
        p.check_every = 1;
        run_well(&p, sizes[k]);
        for (int step = 0; step < STEPS; step++) check_update(step, sizes[k]);
    }
}

/* The same without a scaler: the optimizer's step is the update. */
static void each_update_without_a_scaler(void) {
    plan p = plan_of(STEPS);
    p.plain = 1;
    run_well(&p, 3);
    for (int step = 0; step < STEPS; step++) check_update(step, 3);
}

/* A step that one rank's batch spoils changes no byte on any rank; neither do both parts of its batch. */
static void skipped_step(void) {
    for (int way = 0; way < 3; way++) {
        plan p = plan_of(STEPS);
        p.plant = 3;
        p.shard = way == 1;
        p.parts = way == 2 ? 2 : 1;
        run_well(&p, 3);
        for (int r = 0; r < 3; r++) {
            const record *at = &records[r][3];
            CHECK_INT(at->outcome, MIXP_STEP_SKIPPED);
            CHECK(memcmp(&at->before, &at->written, sizeof at->before) != 0);
            CHECK(memcmp(&at->before, &at->after, sizeof at->before) == 0);
            CHECK_INT(records[r][4].outcome, MIXP_STEP_APPLIED);
            /* Of two parts, step 2 has the spoilt one, too. */
            CHECK_NEAR(value_of(records[r][STEPS - 1].after.bytes[COUNT], COUNT, 0), way == 2 ? 2 * 6 : 7, 0);
        }
    }
}

/* Rank 1's own state becomes infinite, with finite gradients: all ranks skip, and all verdicts name it. Without a
 * scaler all ranks apply the step, and warn. */
static void spoilt_step(void) {
    int way, r;
    for (way = 0; way < 4; way++) {
        plan p = plan_of(STEPS);
        p.spoil = 3;
        p.shard = way == 1;
        p.parts = way == 2 ? 2 : 1;
        p.plain = way == 3;
        if (way < 3) run_well(&p, 3);
        else CHECK_INT(run(&p, 3), 0);
        for (r = 0; r < 3; r++) {
            const record *at = &records[r][3];
            CHECK_INT(at->outcome, way < 3 ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
            CHECK_INT(at->verdict.reason, way < 3 ? MIXP_SKIP_BUFFER : MIXP_SKIP_NONE);
            CHECK_INT(at->verdict.bad_rank, 1);
            CHECK_INT(at->verdict.bad_is_nan, 0);
            CHECK_TEXT(at->bad, "h");
            CHECK((memcmp(&at->before, &at->after, sizeof at->before) == 0) == (way < 3));
            CHECK_INT(records[r][4].outcome, MIXP_STEP_APPLIED);
            if (way < 3) CHECK_NEAR(records[r][4].verdict.scale, 512, 0);
            else CHECK_TEXT(told[r].warned, "of the buffer 'h' on rank 1, and only a scaler");
        }
        for (r = 0; r < 3; r++) CHECK(memcmp(records[r][STEPS - 1].after.weights, records[0][STEPS - 1].after.weights,
                                             sizeof records[0][0].after.weights) == 0);
    }
}

/* A step that is abandoned belongs to the window of the next one: if that is skipped, so are both; if not,
 * the writes stay. */
static void end_abandoned(net *n) {
    for (int step = 5; step < 7; step++) {
        snapshot before;
        net_see(n, &before);
        mixp_step_begin(n->ctx);
        mixp_fill(n->b[H], 3);
        net_code(n, step);
        net_step(n, step);
        CHECK((memcmp(&before, &records[n->rank][step].after, sizeof before) == 0) == (step == 5));
        CHECK_INT(records[n->rank][step].outcome, step == 5 ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
    }
}
static void abandoned_step(void) {
    plan p = plan_of(2);
    p.plant = 5;
    p.at_end = end_abandoned;
    run_well(&p, 2);
}

/* A loss scale that is too large repeats the first step. The result has the bits of a run that began
 * with the scale that the retries arrive at, so each batch counts once. */
static void retried_step(void) {
    static record once[MOST][STEPS];
    plan p = plan_of(STEPS);
    p.scale = ldexpf(1, 30);
    p.retry = 1;
    run_well(&p, 2);
    int tries = records[0][0].tries;
    CHECK(tries > 3);
    memcpy(once, records, sizeof once);
    p.scale = ldexpf(1, 30 - (tries - 1));
    p.retry = 0;
    run_well(&p, 2);
    for (int r = 0; r < 2; r++) {
        CHECK_INT(records[r][0].tries, 1);
        CHECK_INT(once[r][0].tries, tries);
        CHECK(memcmp(&once[r][STEPS - 1].after, &records[r][STEPS - 1].after, sizeof(snapshot)) == 0);
    }
}

/* --- what is compared ----------------------------------------------------------------------------------- */

static void plant_check(net *n, mixp_tensor *t, const char *name, const char *hint) {
    if (n->rank == n->size - 1) mixp_fill(t, 3);
    if (!name) CHECK_INT(mixp_ranks_check(n->ctx), MIXP_OK);
    else CHECK_INT(mixp_ranks_check(n->ctx), MIXP_ERR_RANKS);
    net_hear(n);
    if (name) CHECK_TEXT(n->said, name);
    if (name && !*hint) CHECK(strstr(n->said, "mixp_buffer") == NULL);
    if (name && *hint) CHECK_TEXT(n->said, hint);
}
static void end_own(net *n) { plant_check(n, n->b[H], NULL, ""); }
static void end_mean(net *n) { plant_check(n, n->b[MEAN16], "'mean16' f16 [6]", ""); }
static void end_code(net *n) { plant_check(n, n->b[CODE], "'code' u8 [37]", ""); }
static void end_weight(net *n) { plant_check(n, n->w, "'w' f32 [6, 6]", ""); }
static void end_frozen(net *n) {
    mixp_tensor_set_requires_grad(n->w, 0);
    plant_check(n, n->w, "'w' f32 [6, 6]", "make it with mixp_buffer instead of mixp_param");
}
/* A step has begun: what it has not written is compared. */
static void end_begun(net *n) {
    mixp_step_begin(n->ctx);
    plant_check(n, n->b[H], NULL, "");
    mixp_fill(n->b[MEAN], n->rank);
    CHECK_INT(mixp_ranks_check(n->ctx), MIXP_OK);
    plant_check(n, n->b[MEAN], NULL, "");
    mixp_fill(n->b[H], n->rank);
    mixp_buffer_set_ranks(n->b[H], MIXP_BUFFER_RANK_0);
    CHECK_INT(mixp_ranks_check(n->ctx), MIXP_OK);   /* H was written, too */
    mixp_buffer_set_ranks(n->b[SEEN], MIXP_BUFFER_RANK_0);
    CHECK_INT(mixp_ranks_check(n->ctx), MIXP_ERR_RANKS);
    net_hear(n);
    CHECK_TEXT(n->said, "'seen' i64 [5]");
}

static void what_is_compared(void) {
    static void (*const ends[])(net *) = { end_own, end_mean, end_code, end_weight, end_frozen, end_begun };
    for (size_t k = 0; k < sizeof ends / sizeof ends[0]; k++) {
        plan p = plan_of(2);
        p.at_end = ends[k];
        run(&p, 2);
        CHECK_INT(told[0].code, MIXP_OK);
        CHECK_INT(told[1].code, MIXP_OK);
    }
}

/* mixp_ranks_from copies what ranks share, and leaves each rank its own; also in a step that has begun. */
static void end_from(net *n) {
    snapshot before, after;
    mixp_fill(n->b[MEAN], 10 + n->rank);
    mixp_fill(n->b[CODE], 20 + n->rank);
    net_see(n, &before);
    mixp_step_begin(n->ctx);
    CHECK_INT(mixp_ranks_from(n->ctx, 1), MIXP_OK);
    net_see(n, &after);
    CHECK(memcmp(before.bytes[H], after.bytes[H], ROOM) == 0);
    CHECK(memcmp(before.bytes[SEEN], after.bytes[SEEN], ROOM) == 0);
    CHECK_NEAR(value_of(after.bytes[MEAN], MEAN, 5), 11, 0);
    CHECK_INT(after.bytes[CODE][36], 21);
    CHECK_INT(mixp_ranks_check(n->ctx), MIXP_OK);
}
static void from_one_rank(void) {
    plan p = plan_of(2);
    p.at_end = end_from;
    run_well(&p, 3);
}

/* --- ranks that make or write different buffers --------------------------------------------------------- */

static void expect_differ(odd is, const char *text) {
    plan p = plan_of(5);
    p.is = is;
    run(&p, 2);
    for (int r = 0; r < 2; r++) {
        CHECK_INT(told[r].code, MIXP_ERR_RANKS);
        CHECK_TEXT(told[r].said, text);
    }
}

static void ranks_that_differ(void) {
    expect_differ(ODD_KIND, "buffer 2 is 'mean' f32 [6], MIXP_BUFFER_MEAN, written on rank 0 and 'mean' f32 [6], "
                            "MIXP_BUFFER_RANK_0, written on rank 1");
    expect_differ(ODD_OWN, "buffer 5 is 'count' f32 [1], MIXP_BUFFER_MEAN, written on rank 0 and 'count' f32 [1], "
                           "MIXP_BUFFER_OWN on rank 1");
    expect_differ(ODD_MISSING, "buffer 6 is 'code' u8 [37], MIXP_BUFFER_RANK_0, written on rank 0 and missing on rank 1");
    expect_differ(ODD_NAME, "buffer 2 is 'mean' f32 [6], MIXP_BUFFER_MEAN, written on rank 0 and 'means' f32 [6]");
    expect_differ(ODD_DTYPE, "buffer 3 is 'mean16' f16 [6], MIXP_BUFFER_MEAN, written on rank 0 and 'mean16' bf16 [6]");
    expect_differ(ODD_SHAPE, "buffer 6 is 'code' u8 [37], MIXP_BUFFER_RANK_0, written on rank 0 and 'code' u8 [37, 1]");
    expect_differ(ODD_SILENT, "buffer 6 is 'code' u8 [37], MIXP_BUFFER_RANK_0, written on rank 0 and 'code' u8 [37], "
                              "MIXP_BUFFER_RANK_0, not written on rank 1");
}

/* The step that finds it is skipped: no rank has moved. */
static void differing_step_is_skipped(void) {
    expect_differ(ODD_SILENT, "the step was skipped");
    for (int r = 0; r < 2; r++) {
        snapshot *s = &records[r][2].before, *t = &records[r][2].after;
        CHECK(memcmp(s->weights, t->weights, sizeof s->weights) == 0);
        CHECK(memcmp(s->weights, records[r][1].before.weights, sizeof s->weights) != 0);
    }
}

/* Without a walk, ranks do not know whether all run on CPUs, and the message gives no name. */
static int own_gradients(const mixp_ranks_desc *ranks, void *user) {
    const int64_t n = 3;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_context_desc d;
    const char *text = "";
    (void)user;
    memset(&d, 0, sizeof d);
    d.ranks = ranks;
    d.threads = 1;
    sgd.lr = 0.5;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, &n);
    mixp_tensor *g = mixp_param(ctx, "g", MIXP_F32, 1, &n);
    mixp_tensor *b = mixp_buffer(ctx, "b", MIXP_F32, 1, &n);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    mixp_optimizer_add(opt, w, g);
    mixp_buffer_set_ranks(b, ranks->rank ? MIXP_BUFFER_MEAN : MIXP_BUFFER_RANK_0);
    mixp_step_begin(ctx);
    mixp_fill(g, 1);
    mixp_fill(b, ranks->rank);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_ERR_RANKS);
    mixp_context_error(ctx, &text);
    CHECK_TEXT(text, "the buffers (shape, mixp_buffer_set_ranks, which the step writes) differ between rank 1 and rank 0");
    mixp_context_clear_error(ctx);
    CHECK_NEAR(mixp_item(mixp_sum(ctx, w, MIXP_ALL, 0)), 0, 0);
    mixp_context_free(ctx);
    return 0;
}
static void own_gradients_that_differ(void) { CHECK_INT(ddp_threads(2, own_gradients, NULL), 0); }

/* Writes after mixp_scaler_step are too late for that step's comparison. Sums of the same size are found
 * by the next step, and others by the transport. */
static void late_writes_that_differ(void) {
    plan p = plan_of(5);
    expect_differ(ODD_SWAPPED, "in an earlier step, some ranks wrote a shared buffer and others did not");
    p.is = ODD_LATE;
    run(&p, 2);
    for (int r = 0; r < 2; r++) CHECK_INT(told[r].code, MIXP_ERR_RANKS);
}

/* --- checkpoints ---------------------------------------------------------------------------------------- */

static void save_of(int size, int steps, int shard) {
    plan p = plan_of(steps);
    p.save = path;
    p.shard = shard;
    run_well(&p, size);
}

/* Stopped and resumed, with an applied and a skipped step behind it: the bits of an uninterrupted run. */
static void resumed(void) {
    static record whole[MOST][STEPS];
    for (int size = 1; size <= 3; size++)
        for (int shard = 0; shard < (size > 1 ? 2 : 1); shard++) {
            plan p = plan_of(STEPS);
            p.shard = shard;
            p.plant = size > 1 ? 2 : -1;
            p.check_every = 1;
            run_well(&p, size);
            memcpy(whole, records, sizeof whole);
            p.end = 4;
            p.save = path;
            run_well(&p, size);
            p.from = 4;
            p.end = STEPS;
            p.save = NULL;
            p.load = path;
            memset(records, 0, sizeof records);
            run_well(&p, size);
            for (int r = 0; r < size; r++)
                CHECK(memcmp(&whole[r][STEPS - 1].after, &records[r][STEPS - 1].after, sizeof(snapshot)) == 0);
        }
}

/* The file names each rank's own, and shared buffers once. */
static void names_in_the_file(void) {
    static const char *const there[] = { "h", "seen", "mean", "code", "mixprec.rank.1.h", "mixprec.rank.2.h",
                                         "mixprec.rank.2.seen" };
    static const char *const absent[] = { "mixprec.rank.0.h", "mixprec.rank.3.h", "mixprec.rank.1.mean",
                                          "mixprec.rank.1.code" };
    mixp_safetensors *f = NULL;
    size_t k;
    for (int shard = 0; shard < 2; shard++) {
        save_of(3, 3, shard);
        CHECK_INT(mixp_safetensors_read(path, &f, NULL, 0), MIXP_OK);
        for (k = 0; k < sizeof there / sizeof there[0]; k++) CHECK(mixp_safetensors_find(f, there[k]) != NULL);
        for (k = 0; k < sizeof absent / sizeof absent[0]; k++) CHECK(mixp_safetensors_find(f, absent[k]) == NULL);
        for (int r = 0; r < 3; r++) {
            char name[32];
            snprintf(name, sizeof name, r ? "mixprec.rank.%d.h" : "h", r);
            const mixp_st_entry *e = mixp_safetensors_find(f, name);
            CHECK(e && e->bytes == sizeof(float) * ROWS * D && !memcmp(e->data, records[r][2].after.bytes[H], e->bytes));
        }
        mixp_safetensors_free(f);
    }
}

/* What a load must leave unchanged: everything, by the bytes of a file. */
static size_t file_bytes(const char *name, unsigned char *to, size_t room) {
    FILE *f = fopen(name, "rb");
    const size_t n = f ? fread(to, 1, room, f) : 0;
    if (f) fclose(f);
    return n;
}
static size_t state_bytes(net *n, unsigned char *to, size_t room) {
    CHECK_INT(mixp_checkpoint_save(path_2, &n->all), MIXP_OK);
    return n->rank ? 0 : file_bytes(path_2, to, room);
}

static const char *expected[3];         /* parts of the message */
static mixp_result expected_code;

/* After some steps: the load is refused, nothing has changed, and training goes on. */
static void end_refused(net *n) {
    static unsigned char before[MOST][20000], after[MOST][20000];
    const size_t bytes = state_bytes(n, before[n->rank], sizeof before[0]);
    CHECK_INT(mixp_checkpoint_load(path, &n->all), expected_code);
    net_hear(n);
    for (int k = 0; k < 3; k++)
        if (expected[k]) CHECK_TEXT(n->said, expected[k]);
    CHECK_INT(state_bytes(n, after[n->rank], sizeof after[0]), bytes);
    CHECK(n->rank || bytes > 1000);
    CHECK(memcmp(before[n->rank], after[n->rank], bytes) == 0);
    net_step(n, 5);
    CHECK_INT(records[n->rank][5].outcome, MIXP_STEP_APPLIED);
}

static void refused_on(int size, mixp_result code, const char *a, const char *b, const char *c) {
    plan p = plan_of(2);
    p.at_end = end_refused;
    expected_code = code;
    expected[0] = a, expected[1] = b, expected[2] = c;
    run_well(&p, size);
}

static void other_numbers_of_ranks(void) {
    save_of(2, 3, 0);
    refused_on(3, MIXP_ERR_SHAPE, "own buffers of 2 ranks", "'h'", "this run has 3");
    refused_on(1, MIXP_ERR_SHAPE, "own buffers of 2 ranks", "'h'", "this run has 1");
    save_of(1, 3, 0);
    refused_on(2, MIXP_ERR_SHAPE, "own buffers of 1 rank,", "'h'", "this run has 2");
}

/* With fresh_buffers, the rest loads; also if each rank has other rows than before. */
static snapshot fresh_from;
static void end_fresh(net *n) {
    snapshot before, after;
    net_see(n, &before);
    n->all.fresh_buffers = 1;
    CHECK_INT(mixp_checkpoint_load(path, &n->all), MIXP_OK);
    net_see(n, &after);
    CHECK(memcmp(before.bytes[H], after.bytes[H], ROOM) == 0);
    CHECK(memcmp(before.bytes[SEEN], after.bytes[SEEN], ROOM) == 0);
    for (int i = MEAN; i < BUFFERS; i++) CHECK(memcmp(fresh_from.bytes[i], after.bytes[i], ROOM) == 0);
    CHECK(memcmp(fresh_from.weights, after.weights, sizeof after.weights) == 0);
    net_step(n, 5);
    CHECK_INT(records[n->rank][5].outcome, MIXP_STEP_APPLIED);
}
static void fresh_buffers(void) {
    static const struct { int from, to, shard; int64_t rows; } cases[] = {
        { 2, 3, 0, 0 }, { 2, 1, 0, 0 }, { 1, 2, 0, 0 }, { 2, 3, 1, 0 }, { 3, 1, 1, 0 }, { 2, 1, 0, 2 }, { 1, 3, 1, 1 } };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        plan p = plan_of(1);
        save_of(cases[k].from, 3, cases[k].shard && cases[k].from > 1);
        fresh_from = records[0][2].after;
        p.at_end = end_fresh;
        p.shard = cases[k].shard && cases[k].to > 1;
        p.rows = cases[k].rows;
        run_well(&p, cases[k].to);
    }
}

/* The same number of ranks: fresh_buffers changes nothing. */
static void end_not_fresh(net *n) {
    snapshot after;
    n->all.fresh_buffers = 1;
    CHECK_INT(mixp_checkpoint_load(path, &n->all), MIXP_OK);
    net_see(n, &after);
    CHECK(memcmp(&records[n->rank][2].after, &after, sizeof after) == 0);
}
static void fresh_buffers_of_as_many_ranks(void) {
    plan p = plan_of(1);
    save_of(2, 3, 0);
    p.at_end = end_not_fresh;
    run_well(&p, 2);
}

/* A description without shared buffers: the file's entries of other ranks are told, with what to do. */
static void end_unlike(net *n) {
    mixp_buffer_set_ranks(n->b[H], MIXP_BUFFER_RANK_0);
    end_refused(n);
}
static void own_in_the_file_only(void) {
    plan p = plan_of(2);
    save_of(2, 3, 0);
    p.at_end = end_unlike;
    expected_code = MIXP_ERR_SHAPE;
    expected[0] = "'mixprec.rank.1.h' is in the file only";
    expected[1] = "in the file this buffer is each rank's own";
    expected[2] = "mixp_buffer_set_ranks";
    run_well(&p, 2);
}

/* --- bad files ------------------------------------------------------------------------------------------ */

/* Writes the checkpoint at `path` again, with one entry changed. */
typedef enum spoil { SPOIL_NOT, SPOIL_DTYPE, SPOIL_SHAPE, SPOIL_MISSING, SPOIL_EXTRA } spoil;
static void spoil_file(const char *name, spoil how) {
    mixp_st_entry entries[200];
    const char *metadata[3][2] = { { "format", "pt" }, { "mixprec", NULL }, { "mixprec.optimizers", NULL } };
    mixp_safetensors *f = NULL;
    int64_t i, n = 0;
    int hit = 0;
    CHECK_INT(mixp_safetensors_read(path, &f, NULL, 0), MIXP_OK);
    metadata[1][1] = mixp_safetensors_metadata(f, "mixprec");
    metadata[2][1] = mixp_safetensors_metadata(f, "mixprec.optimizers");
    for (i = 0; i < mixp_safetensors_count(f) && n < 199; i++) {
        mixp_st_entry e = *mixp_safetensors_at(f, i);
        const int is = strcmp(e.name, name) == 0;
        hit += is;
        e.type = NULL;
        if (is && how == SPOIL_MISSING) continue;
        if (is && how == SPOIL_DTYPE) e.dtype = mixp_dtype_size(e.dtype) == 4 ? MIXP_I32
                                              : mixp_dtype_size(e.dtype) == 8 ? MIXP_F64 : MIXP_F8_E4M3;
        if (is && how == SPOIL_SHAPE) e.shape[e.rank++] = 1;
        entries[n++] = e;
        if (is && how == SPOIL_EXTRA) e.name = "mixprec.rank.1.x", entries[n++] = e;
    }
    CHECK_INT(hit, 1);
    CHECK_INT(mixp_safetensors_write(path_2, entries, n, (const char *const (*)[2])metadata, 3, NULL, 0), MIXP_OK);
    CHECK_INT(rename(path_2, path), 0);
    mixp_safetensors_free(f);
}

static void bad_entry(const char *name, spoil how, mixp_result code, const char *text) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "'%s'", name);
    save_of(2, 3, 0);
    spoil_file(name, how);
    refused_on(2, code, how == SPOIL_EXTRA ? "'mixprec.rank.1.x'" : quoted, text, NULL);
}

static void bad_files(void) {
    static const char *const names[] = { "h", "mixprec.rank.1.h", "mixprec.rank.1.seen", "mean", "code" };
    plan sound = plan_of(1);
    unsigned char all[20000];
    FILE *f;
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        bad_entry(names[k], SPOIL_DTYPE, MIXP_ERR_DTYPE, "not ");
        bad_entry(names[k], SPOIL_SHAPE, MIXP_ERR_SHAPE, "not ");
        /* Without rank 1's h, its entry `seen` still says two ranks. */
        bad_entry(names[k], SPOIL_MISSING, MIXP_ERR_SHAPE, "is missing");
    }
    bad_entry("h", SPOIL_EXTRA, MIXP_ERR_SHAPE, "in the file only");
    save_of(2, 3, 0);
    spoil_file("h", SPOIL_NOT);                 /* the way of writing again is sound */
    sound.at_end = end_not_fresh;
    run_well(&sound, 2);
    const size_t bytes = file_bytes(path, all, sizeof all);
    for (size_t k = 1; k < 8; k++) {
        f = fopen(path, "wb");
        CHECK_INT(fwrite(all, 1, bytes * k / 8, f), bytes * k / 8);
        fclose(f);
        refused_on(2, MIXP_ERR_FORMAT, "mixp_checkpoint_load", NULL, NULL);
    }
}

/* Names of ranks that no save writes: they are told, or count as ranks, and nothing else happens. */
static void names_that_no_save_writes(void) {
    static const char *const names[] = { "mixprec.rank.01.h", "mixprec.rank.99999999999999999999.h", "mixprec.rank.-1.h",
                                         "mixprec.rank..h", "mixprec.rank.1", "mixprec.rank.2147483646.h" };
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        mixp_st_entry entries[200];
        const char *metadata[3][2] = { { "format", "pt" }, { "mixprec", "1" }, { "mixprec.optimizers", NULL } };
        mixp_safetensors *f = NULL;
        int64_t n;
        save_of(1, 2, 0);
        CHECK_INT(mixp_safetensors_read(path, &f, NULL, 0), MIXP_OK);
        metadata[2][1] = mixp_safetensors_metadata(f, "mixprec.optimizers");
        for (n = 0; n < mixp_safetensors_count(f); n++) entries[n] = *mixp_safetensors_at(f, n), entries[n].type = NULL;
        entries[n] = *mixp_safetensors_find(f, "h");
        entries[n].type = NULL;
        entries[n].name = names[k];
        CHECK_INT(mixp_safetensors_write(path_2, entries, n + 1, (const char *const (*)[2])metadata, 3, NULL, 0), MIXP_OK);
        CHECK_INT(rename(path_2, path), 0);
        mixp_safetensors_free(f);
        refused_on(1, MIXP_ERR_SHAPE, k == 0 || k == 4 || k == 5 ? "ranks" : names[k], NULL, NULL);
    }
}

/* --- weights alone -------------------------------------------------------------------------------------- */

/* Every rank gets the file's buffers: rank 0's. */
static void end_weights(net *n) {
    snapshot after;
    CHECK_INT(mixp_checkpoint_load_weights(path, n->ctx, NULL), MIXP_OK);
    net_see(n, &after);
    CHECK(memcmp(&fresh_from, &after, sizeof after) == 0);
    net_step(n, 5);
    CHECK_INT(records[n->rank][5].outcome, MIXP_STEP_APPLIED);
}
static void weights_of_a_checkpoint(void) {
    for (int size = 1; size <= 3; size++) {
        plan p = plan_of(1);
        save_of(2, 3, 0);
        fresh_from = records[0][2].after;
        p.at_end = end_weights;
        run_well(&p, size);
    }
}

/* One rank saves its weights and buffers by pattern, with a prefix; all load them. */
static void end_pattern(net *n) {
    mixp_weights_desc some;
    mixp_safetensors *f = NULL;
    snapshot before, after;
    memset(&some, 0, sizeof some);

    some.pattern = "m*";
    some.prefix = "net.";
    net_see(n, &before);
    if (n->rank == n->size - 1) {
        CHECK_INT(mixp_checkpoint_save_weights_of(path_2, n->ctx, &some), MIXP_OK);
        CHECK_INT(mixp_safetensors_read(path_2, &f, NULL, 0), MIXP_OK);
        CHECK_INT(mixp_safetensors_count(f), 3);        /* mean, mean16, meanb */
        CHECK(mixp_safetensors_find(f, "net.meanb") != NULL);
        mixp_safetensors_free(f);
        CHECK_INT(mixp_checkpoint_save_weights(path, n->ctx), MIXP_OK);
    }
    mixp_ranks_check(n->ctx);           /* here all ranks wait for that file */
    mixp_fill(n->b[MEAN], 0.5);
    mixp_fill(n->b[CODE], 77);
    CHECK_INT(mixp_checkpoint_load_weights(path_2, n->ctx, &some), MIXP_OK);
    net_see(n, &after);
    CHECK(memcmp(before.bytes[MEAN], after.bytes[MEAN], ROOM) == 0);
    CHECK_INT(after.bytes[CODE][0], 77);
    CHECK_INT(mixp_checkpoint_load_weights(path, n->ctx, NULL), MIXP_OK);
    net_see(n, &after);
    CHECK(memcmp(before.bytes[CODE], after.bytes[CODE], ROOM) == 0);
    CHECK(memcmp(records[n->size - 1][1].after.bytes[H], after.bytes[H], ROOM) == 0);
}
static void weights_by_pattern(void) {
    plan p = plan_of(2);
    p.at_end = end_pattern;
    run_well(&p, 3);
}

/* A buffer that is not finite is told where it is loaded. */
static void end_spoilt(net *n) {
    if (n->rank == 1) mixp_fill(n->b[H], NAN);
    CHECK_INT(mixp_checkpoint_save(path, &n->all), MIXP_OK);
}
static void buffers_that_are_not_finite(void) {
    plan p = plan_of(2);
    p.at_end = end_spoilt;
    run_well(&p, 3);
    p = plan_of(0);
    p.load = path;
    CHECK_INT(run(&p, 3), 0);
    CHECK(!told[0].warned[0] && !told[2].warned[0]);
    CHECK_TEXT(told[1].warned, "'mixprec.rank.1.h' holds 18 values that are Inf or NaN");
}

/* --- a save that one rank makes ------------------------------------------------------------------------- */

static void end_alone(net *n) {
    if (n->rank == 0) mixp_checkpoint_save(path, &n->all);
    else net_step(n, 5);
}
static void save_of_one_rank(void) {
    plan p = plan_of(2);
    remove(path);
    p.at_end = end_alone;
    run(&p, 2);
    for (int r = 0; r < 2; r++) CHECK_INT(told[r].code, MIXP_ERR_RANKS);
    CHECK_TEXT(told[0].said, "mixp_checkpoint_save, which all ranks call");
    CHECK(access(path, F_OK) != 0);
}

/* The folder does not exist: all ranks are told, and go on. */
static void end_no_folder(net *n) {
    CHECK_INT(mixp_checkpoint_save("/nowhere/at/all.st", &n->all), MIXP_ERR_IO);
    net_hear(n);
    CHECK_TEXT(n->said, "mixp_checkpoint_save");
    net_step(n, 5);
    CHECK_INT(records[n->rank][5].outcome, MIXP_STEP_APPLIED);
}
static void save_that_fails(void) {
    plan p = plan_of(2);
    p.at_end = end_no_folder;
    run_well(&p, 3);
}

int main(void) {
    snprintf(path, sizeof path, "/tmp/mixprec_ranks_state_%ld.st", (long)getpid());
    snprintf(path_2, sizeof path_2, "/tmp/mixprec_ranks_state_%ld_2.st", (long)getpid());
    RUN(each_update);
    RUN(each_update_without_a_scaler);
    RUN(skipped_step);
    RUN(spoilt_step);
    RUN(abandoned_step);
    RUN(retried_step);
    RUN(what_is_compared);
    RUN(from_one_rank);
    RUN(ranks_that_differ);
    RUN(differing_step_is_skipped);
    RUN(own_gradients_that_differ);
    RUN(late_writes_that_differ);
    RUN(resumed);
    RUN(names_in_the_file);
    RUN(other_numbers_of_ranks);
    RUN(fresh_buffers);
    RUN(fresh_buffers_of_as_many_ranks);
    RUN(own_in_the_file_only);
    RUN(bad_files);
    RUN(names_that_no_save_writes);
    RUN(weights_of_a_checkpoint);
    RUN(weights_by_pattern);
    RUN(buffers_that_are_not_finite);
    RUN(save_of_one_rank);
    RUN(save_that_fails);
    remove(path);
    remove(path_2);
    return test_report();
}
