/* test_ranks.c - training on several ranks, which are processes forked by ddp_fork.c.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The test compares the results of 2 and 4 ranks bit by bit with sums that it computes itself from
 * the gradients of a context without ranks. An Inf on one rank skips the step on all. Ranks that
 * differ are refused. If a rank is killed, the others end, and training resumes with the bits of
 * an uninterrupted run.
 */
#define _POSIX_C_SOURCE 200809L         /* kill */
#include "mixprec.h"
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>

/* What the adapter writes texts by: a rank may be killed in the middle of one. */
static int dies_writing;
static int write_text(char *to, size_t room, const char *format, ...) {
    va_list values;
    int n;
    va_start(values, format);
    n = vsnprintf(to, dies_writing ? room / 20 : room, format, values);
    va_end(values);
    if (dies_writing) raise(SIGKILL);
    return n;
}
static double linger = 10;
#define DDP_LINGER linger
#undef snprintf
#define snprintf write_text
#include "../../examples/ddp_fork.c"
#undef snprintf

#include "test.h"
#include "new_optimizer.h"
#include "leave.h"

enum { VOCAB = 11, WIDTH = 24, ROWS = 16, PARAMS = 6, MOST = 4, STEPS = 5 };

/* Seconds that a rank waits for others, and the test for ranks: far more than a busy machine keeps a
 * process waiting. Who hangs is ended after the second. */
enum { PATIENCE = 120, HANGS = 300 };

/* Waits for what other processes do. */
#define AWAIT(event)                                                                                  \
    do {                                                                                              \
        long await_turns;                                                                             \
        for (await_turns = 0; await_turns < 1000L * PATIENCE && !(event); await_turns++)              \
            poll(NULL, 0, 1);                                                                         \
    } while (0)

/* --- a model ------------------------------------------------------------------------------ */

/* How a run is to be. */
enum { FORM_ADAMW, FORM_AMSGRAD, FORM_ADAGRAD, FORM_CENTERED };

typedef struct plan {
    int             steps, walks;       /* walks: of each rank in a step */
    mixp_dtype      dtype;              /* of the parameters */
    mixp_ranks_mean mean;
    int             low_sums, apart, parts;
    mixp_dtype      wire;
    int             plant_rank, plant_step;     /* where an Inf is put into a gradient; -1 = nowhere */
    int             plant_more;                 /* 1: into those of all ranks after it, too          */
    int             odd;                /* what rank 1 does differently */
    double          seconds;
    const char     *checkpoint;         /* NULL = none */
    double          max_norm;
    int             spikes;             /* 1: of the loss are looked for */
    int             shard;
    int             scatter;            /* 1: sums are scattered; 2: and begun before they are awaited */
    int             plant_at;           /* 0 = element 5 */
    double          plant_value;        /* 0 = Inf */
    int             unscaled;           /* 1: gradients are unscaled and clipped by calls of their own */
    int             cut_at;             /* the hooks' call that fails on rank 1, from 1; 0 = none */
    int             cut_kills;          /* 1: it kills rank 1 */
    int             muon;               /* 1: it has the matrices, AdamW the rest */
    int             form;               /* FORM_...; 0: AdamW */
    int             guard;              /* one step in so many is sampled; 0 = no guard */
    int             guard_pins;         /* 1: no site may fall back, and two skips are too many */
    int             guard_backward;     /* 1: what is planted is in a gradient all the same */
    int64_t         bucket;             /* bytes */
    const char     *copy;               /* where a loaded checkpoint is saved again; NULL = nowhere */
    int             held;               /* 1: the last two steps wait until the test lets them go */
    double          patience;           /* of rank 0 from step 2 on, which rank 1 exceeds; 0 = seconds */
    int             recomputes;         /* 1: the middle of the model is a block of mixp_recompute */
    int             ema;                /* 1: averages of weights are kept; the result ends with them  */
} plan;

/* What a rank has to tell, in memory that the test sees. */
typedef struct result {
    volatile int done, let_go;
    mixp_result  code;
    char         text[512];
    float        scale;
    double       loss;
    mixp_verdict verdict;
    char         bad_tensor[32];
    int64_t      allocations[2];        /* after the second step, and at the end */
    size_t       used;                  /* of memory */
    uint64_t     fallen;                /* sites, a bit each */
    int          calls;                 /* of hooks that could have been cut */
    volatile int step;
    int          began;                 /* the first step: not 0 where a checkpoint was loaded */
    volatile pid_t pid;
    unsigned char weights[49152];      /* and averages */
    size_t       bytes;
} result;

enum { ODD_NOT, ODD_SEED, ODD_VALUE, ODD_NAME, ODD_DTYPE, ODD_SHAPE, ODD_MEAN, ODD_RATE,
       ODD_FAILS, ODD_LEAVES_EARLY, ODD_SLEEPS, ODD_LOSS, ODD_KILLED, ODD_SIZE };

typedef struct model {
    mixp_context   *ctx;
    mixp_tensor    *p[PARAMS];
    mixp_optimizer *opt, *muon;         /* muon: NULL where there is none */
    mixp_scaler    *scaler;
    int             planted;            /* 1: the next walk has an Inf */
    int             plant_at;           /* where, and what in its place: as in a plan */
    double          plant_value;
    float           factor;             /* of an activation, under a guard; 0 = there is none */
    int             recomputes;
} model;

static plan plan_of(int steps) {
    plan p;
    memset(&p, 0, sizeof p);
    p.steps = steps;
    p.walks = 1;
    p.plant_rank = -1;
    p.seconds = PATIENCE;
    p.max_norm = 0.7;
    p.bucket = 4096;
    return p;
}

/* An optimizer with other states than AdamW's, or with another first one. */
static mixp_optimizer *form_of(mixp_context *ctx, int form, const mixp_optimizer_desc *adamw) {
    mixp_optimizer_desc d = form == FORM_ADAGRAD ? mixp_adagrad_defaults()
                          : form == FORM_CENTERED ? mixp_rmsprop_defaults() : *adamw;
    d.max_norm = adamw->max_norm;
    if (form == FORM_AMSGRAD) d.amsgrad = 1;
    if (form == FORM_ADAGRAD) d.initial_sum = 0.1;
    if (form == FORM_CENTERED) d.centered = 1;
    return mixp_optimizer_new(ctx, &d);
}

static void model_open(model *m, const plan *p, const mixp_ranks_desc *ranks, int odd) {
    static const char *const names[PARAMS] = {"embedding", "up", "up.bias", "gain", "shift", "down"};
    const int64_t shapes[PARAMS][2] = {{VOCAB, WIDTH}, {2 * WIDTH, WIDTH}, {2 * WIDTH, 0},
                                       {WIDTH, 0}, {WIDTH, 0}, {odd == ODD_SHAPE ? 12 : VOCAB, 2 * WIDTH}};
    mixp_context_desc d;
    mixp_scaler_desc  s;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    int i;
    memset(m, 0, sizeof *m);
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    d.seed = odd == ODD_SEED ? 6 : 5;
    d.threads = 1;
    d.ranks = ranks;
    s.init_scale = 1024;
    s.growth_interval = 3;
    adamw.lr = 0.01;
    adamw.max_norm = p->max_norm;
    adamw.spike.of = p->spikes ? MIXP_SPIKE_LOSS : MIXP_SPIKE_OFF;
    m->ctx = mixp_context_new(&d);
    m->opt = mixp_optimizer_new(m->ctx, &adamw);
    if (p->form) m->opt = form_of(m->ctx, p->form, &adamw);
    if (p->muon) m->muon = new_muon(m->ctx);
    m->scaler = mixp_scaler_new(m->ctx, &s);
    m->recomputes = p->recomputes;
    for (i = 0; i < PARAMS; i++) {
        const char *name = i == 3 && odd == ODD_NAME ? "profit" : names[i];
        mixp_dtype  dtype = i == 1 && odd == ODD_DTYPE ? MIXP_F16 : p->dtype;
        m->p[i] = mixp_param(m->ctx, name, dtype, shapes[i][1] ? 2 : 1, shapes[i]);
        if (i == 3) mixp_fill(m->p[i], 1);
        else if (i != 4) mixp_init_normal(m->p[i], 0, 0.1);
        if (i == 2 && odd == ODD_VALUE) mixp_fill(m->p[i], 0.25);
    }
}

/* The identity, whose backward puts an Inf at element 5, or what a plan says, when that is asked for. */
static mixp_result plant_infer(mixp_call *c) {
    return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape);
}
static mixp_result plant_forward(mixp_call *c) {
    return mixp_convert(c->out->data, c->out->dtype, c->in[0]->data, c->in[0]->dtype, c->out->count);
}
static mixp_result plant_backward(mixp_call *c) {
    model *m = *(model **)c->attrs;
    int accumulate;
    mixp_tensor *g = mixp_call_grad(c, 0, &accumulate);
    double planted = m->plant_value > 0 ? m->plant_value : HUGE_VAL;
    int64_t i, at = m->plant_at ? m->plant_at : 5;
    if (!g) return MIXP_OK;
    for (i = 0; i < g->count; i++) {
        size_t size = mixp_dtype_size(g->dtype);
        double a = 0, b = 0;
        char *to = (char *)g->data + (size_t)i * size;
        if (accumulate) mixp_convert(&a, MIXP_F64, to, g->dtype, 1);
        mixp_convert(&b, MIXP_F64, (char *)c->out->grad->data + (size_t)i * size, g->dtype, 1);
        a += m->planted && i == at ? planted : b;
        mixp_convert(to, g->dtype, &a, MIXP_F64, 1);
    }
    return MIXP_OK;
}
static const mixp_op plant_op = {"plant", MIXP_CLASS_KEEP, sizeof(model *), plant_infer, plant_forward,
                                 plant_backward, NULL};

/* The middle of the model: the matrix up with its bias, gelu and dropout. */
static mixp_tensor *model_middle(mixp_context *ctx, mixp_tensor *x, void *user) {
    model *m = (model *)user;
    mixp_tensor *up = mixp_apply(ctx, &plant_op, 1, &m->p[1], 1, &m);
    x = mixp_gelu(ctx, mixp_linear(ctx, x, up, m->p[2]));
    return mixp_dropout(ctx, x, 0.2f, 1);
}

/* The loss of rows [first, first + n) of the batch of a step. down is used twice: its gradient is a
 * sum within a walk. */
static mixp_tensor *model_loss(model *m, int step, int first, int n) {
    int32_t ids[ROWS], next[ROWS];
    int64_t rows[1] = {n};
    mixp_tensor *x, *loss = NULL;
    int i;
    for (i = 0; i < n; i++) {
        ids[i] = (step * 5 + (first + i) * 3) % VOCAB;
        next[i] = (ids[i] * ids[i] + 2) % VOCAB;
    }
    MIXP_AUTOCAST(m->ctx, MIXP_F16) {
        x = mixp_embedding(m->ctx, m->p[0], mixp_input(m->ctx, MIXP_I32, 1, rows, ids));
        x = mixp_layer_norm(m->ctx, x, m->p[3], m->p[4], 1e-5f);
        x = m->recomputes ? mixp_recompute(m->ctx, model_middle, m, x) : model_middle(m->ctx, x, m);
        if (m->factor > 0) x = mixp_scale(m->ctx, x, m->factor);
        x = mixp_linear(m->ctx, x, m->p[5], NULL);
        loss = mixp_cross_entropy(m->ctx, x, mixp_input(m->ctx, MIXP_I32, 1, rows, next), MIXP_IGNORE);
    }
    return loss;
}

/* Which optimizer a parameter has: of the matrices inside of the model, and of the rest. */
static mixp_optimizer *model_optimizer(const model *m, int i)
{ return m->muon && (i == 1 || i == 5) ? m->muon : m->opt; }

static void model_add(model *m) {
    int i;
    for (i = 0; i < PARAMS; i++) mixp_optimizer_add(model_optimizer(m, i), m->p[i], NULL);
}

static void model_averages(model *m) {
    mixp_optimizer_set_ema(m->opt, 0.75);
    if (m->muon) mixp_optimizer_set_ema(m->muon, 0.5);
}

static void model_swap(model *m) {
    mixp_optimizer_swap_ema(m->opt);
    if (m->muon) mixp_optimizer_swap_ema(m->muon);
}

static void model_zero_grad(model *m) {
    mixp_zero_grad(m->opt);
    if (m->muon) mixp_zero_grad(m->muon);
}

static mixp_result model_step(model *m, const plan *p) {
    mixp_result r = MIXP_OK;
    if (p->unscaled) r = mixp_scaler_unscale(m->scaler, m->opt);
    if (p->unscaled && r == MIXP_OK) r = mixp_clip_grad_norm(m->opt, 0.3);
    if (r == MIXP_OK) r = mixp_scaler_step(m->scaler, m->opt);
    if (r == MIXP_OK && m->muon) r = mixp_scaler_step(m->scaler, m->muon);
    return r == MIXP_OK ? mixp_scaler_update(m->scaler) : r;
}

static void result_weights(result *out, const model *m) {
    int i;
    for (i = 0; m->ctx && i < PARAMS; i++) {
        size_t bytes = (size_t)m->p[i]->count * mixp_dtype_size(m->p[i]->dtype);
        CHECK(out->bytes + bytes <= sizeof out->weights);
        memcpy(out->weights + out->bytes, m->p[i]->data, bytes);
        out->bytes += bytes;
    }
}

/* The weights; with averages, then these, and the weights again. */
static void result_take(result *out, model *m, int ema) {
    const char *text;
    mixp_site_info site;
    int i;
    out->bytes = 0;
    result_weights(out, m);
    for (i = 0; ema && i < 2; i++) {
        model_swap(m);
        result_weights(out, m);
    }
    out->code = mixp_context_error(m->ctx, &text);
    snprintf(out->text, sizeof out->text, "%s", text);
    out->verdict = mixp_scaler_verdict(m->scaler);
    snprintf(out->bad_tensor, sizeof out->bad_tensor, "%s",
             out->verdict.bad_tensor ? out->verdict.bad_tensor : "");
    out->scale = mixp_scaler_loss_scale(m->scaler);
    for (i = 0; i < 64 && mixp_site(m->ctx, i, &site); i++) out->fallen |= (uint64_t)(site.fallen != 0) << i;
}

/* --- runs --------------------------------------------------------------------------------- */

/* Hooks that begin what another ends: what was asked is done when it is awaited, in the same order. */
static struct { void *data; int64_t count; mixp_dtype dtype; int scattered; } begun[64];
static int n_begun;

static const char *begin_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                             double seconds) {
    (void)user, (void)stream, (void)seconds;
    if (n_begun == 64) return "too much was begun";
    begun[n_begun].data = data;
    begun[n_begun].count = count;
    begun[n_begun].dtype = dtype;
    begun[n_begun++].scattered = 0;
    return NULL;
}
static const char *begin_scatter(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                                 double seconds) {
    const char *why = begin_sum(user, data, count, dtype, stream, seconds);
    if (!why) begun[n_begun - 1].scattered = 1;
    return why;
}
static const char *end_all(void *user, void *stream, double seconds) {
    const char *why = NULL;
    int i;
    for (i = 0; i < n_begun && !why; i++)
        why = (begun[i].scattered ? ddp_scatter : ddp_sum)(user, begun[i].data, begun[i].count,
                                                          begun[i].dtype, stream, seconds);
    n_begun = 0;
    return why;
}
static void scatter_later(mixp_ranks_desc *d) {
    d->grad_ready = begin_sum;
    d->scatter_ready = begin_scatter;
    d->grad_wait = end_all;
}

/* Hooks of which one call fails. */
static int cut_calls, cut_at, cut_kills;
static const char *cut(const char *why) {
    if (++cut_calls != cut_at) return why;
    if (cut_kills) raise(SIGKILL);
    return "the cable is cut";
}
#define CUT(name, hook)                                                                               \
    static const char *name(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,    \
                            double seconds) {                                                         \
        const char *why = cut(NULL);                                                                  \
        return why ? why : hook(user, data, count, dtype, stream, seconds);                           \
    }
CUT(cut_sum, ddp_sum)
CUT(cut_gather, ddp_gather)
CUT(cut_scatter, ddp_scatter)
CUT(cut_begin, begin_sum)
CUT(cut_begin_scatter, begin_scatter)
static const char *cut_wait(void *user, void *stream, double seconds) {
    const char *why = cut(NULL);
    return why ? why : end_all(user, stream, seconds);
}

/* at: the call that fails, from 1; -1: none. */
static void cut_cable(mixp_ranks_desc *d, int at) {
    cut_at = at;
    cut_calls = 0;
    d->sum = cut_sum;
    d->all_gather = cut_gather;
    d->reduce_scatter = cut_scatter;
    if (d->grad_wait) d->grad_wait = cut_wait;
    if (d->grad_ready) d->grad_ready = cut_begin;
    if (d->scatter_ready) d->scatter_ready = cut_begin_scatter;
}

/* A rank that gives up early, once it is told. */
static double patience;
static const char *impatient_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                                 double seconds) {
    return ddp_sum(user, data, count, dtype, stream, patience > 0 ? patience : seconds);
}

/* Rank 1 comes late: when rank 0, whose result stands before its own, has given up; else in time. */
static void come_late(const plan *p, const result *own) {
    if (p->patience > 0) AWAIT(own[-1].done);
    else poll(NULL, 0, 300);
}

/* Of one rank: its walks of each step, then the step. */
static void run_rank(const plan *p, const mixp_ranks_desc *ranks, result *out) {
    const int parts = p->walks * ranks->size, rows = ROWS / parts;
    const int odd = ranks->rank == 1 ? p->odd : ODD_NOT;
    mixp_ranks_desc given = *ranks;
    mixp_optimizer *both[2];
    mixp_checkpoint save;
    mixp_param_group group;
    mixp_guard_desc look;
    mixp_tensor *mean = NULL;
    model m;
    int step, walk, steps = 0;
    out->pid = getpid();
    given.mean = odd == ODD_MEAN ? MIXP_MEAN_NONE : p->mean;
    given.low_sums = p->low_sums;
    given.wire = p->wire;
    given.apart = p->apart;
    given.parts = p->parts;
    given.seconds = p->seconds;
    given.bucket_bytes = p->bucket;
    given.shard = p->shard;
    given.scatter = p->scatter != 0;
    if (p->scatter == 2) scatter_later(&given);
    if (p->patience > 0 && ranks->rank == 0) given.sum = impatient_sum;
    if (p->cut_at) cut_cable(&given, ranks->rank == 1 ? p->cut_at : -1);
    if (p->cut_kills) cut_kills = 1;
    if (odd == ODD_SIZE) given.size++;
    model_open(&m, p, &given, odd);
    model_add(&m);
    if (p->ema) model_averages(&m);
    m.plant_at = p->plant_at;
    m.plant_value = p->plant_value;
    memset(&look, 0, sizeof look);
    look.every = p->guard;
    look.patience = p->guard_pins ? 2 : 0;
    if (p->guard) mixp_guard_start(m.ctx, &look);
    if (p->guard_pins) mixp_guard_pin(m.ctx, "*", MIXP_F16);
    memset(&save, 0, sizeof save);
    save.ctx = m.ctx;
    save.scaler = m.scaler;
    both[0] = m.opt;
    both[1] = m.muon;
    save.optimizers = both;
    save.n_optimizers = m.muon ? 2 : 1;
    if (p->checkpoint && access(p->checkpoint, R_OK) == 0) mixp_checkpoint_load(p->checkpoint, &save);
    if (p->copy && (p->shard || ranks->rank == 0)) mixp_checkpoint_save(p->copy, &save);
    out->began = (int)mixp_context_steps(m.ctx) / parts;
    for (step = out->began; step < p->steps; step++) {
        while (p->held && step == p->steps - 2 && !out->let_go) poll(NULL, 0, 1);
        model_zero_grad(&m);
        if (odd == ODD_LEAVES_EARLY && step == 2) break;
        if (odd == ODD_KILLED && step == 2) raise(SIGKILL);
        if (step == 2 && p->patience > 0) patience = p->patience;
        if (odd == ODD_SLEEPS && step == 2) come_late(p, out);
        if (odd == ODD_RATE && step == 2 && mixp_optimizer_group(m.opt, 0, &group) == MIXP_OK) {
            group.lr = 0.02;
            mixp_optimizer_set_group(m.opt, 0, &group);
        }
        for (walk = 0; walk < p->walks; walk++) {
            mixp_tensor *loss;
            mixp_step_begin(m.ctx);
            mixp_ranks_hold(m.ctx, walk < p->walks - 1);
            m.planted = (ranks->rank == p->plant_rank ||
                         (p->plant_more && ranks->rank > p->plant_rank)) &&
                        (step == p->plant_step || (p->guard_pins && step > p->plant_step));
            if (p->guard) m.factor = m.planted && !p->guard_backward ? 3e6f : 1.0f;
            if (p->guard && !p->guard_backward) m.planted = 0;
            loss = model_loss(&m, step, rows * (walk * ranks->size + ranks->rank), rows);
            if (odd == ODD_FAILS && step == 2) loss = NULL;
            mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, loss));
            mean = loss;
        }
        if (p->spikes) {
            if (odd == ODD_LOSS && step == 2) mixp_fill(mean, NAN);
            mixp_optimizer_set_loss(m.opt, mean);
        }
        if (model_step(&m, p) != MIXP_OK) break;
        if (mean && mean->ctx == m.ctx && mixp_ranks_sum(mean) == MIXP_OK) out->loss = mixp_item(mean);
        out->step = step;
        if (++steps == 2) out->allocations[0] = mixp_context_memory(m.ctx).allocations;
        if (p->checkpoint && (p->shard || ranks->rank == 0)) mixp_checkpoint_save(p->checkpoint, &save);
    }
    out->allocations[1] = mixp_context_memory(m.ctx).allocations;
    out->used = mixp_context_memory(m.ctx).used;
    out->calls = cut_calls;
    result_take(out, &m, p->ema);
    mixp_context_free(m.ctx);
    out->done = 1;
}

static result *results(void) {
    static result *all;
    int zero = open("/dev/zero", O_RDWR);
    if (!all) all = mmap(NULL, MOST * sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED, zero, 0);
    memset(all, 0, MOST * sizeof *all);
    close(zero);
    return all;
}

/* Starts `size` ranks; returns the process that is rank 0. */
static pid_t start(const plan *p, int size, result *out) {
    pid_t root;
    fflush(stdout);
    root = fork();
    if (root == 0) {
        mixp_ranks_desc ranks = ddp_fork(size);
        alarm(HANGS);
        run_rank(p, &ranks, &out[ranks.rank]);
        leave(ddp_wait(0));
    }
    return root;
}

static result *run(const plan *p, int size) {
    result *out = results();
    int status = 0;
    CHECK(waitpid(start(p, size, out), &status, 0) > 0);
    CHECK_INT(status, 0);
    return out;
}

/* The same without ranks: gradients of each part are read, summed here in the order of parts, and
 * given to the optimizer as views. low_sums, wire: the parts and their sum are rounded to bf16. */
static void reference(const plan *p, int size, result *out) {
    static float sum[PARAMS][2 * WIDTH * WIDTH], one[2 * WIDTH * WIDTH];
    const int parts = p->walks * size, rows = ROWS / parts;
    const float factor = 1.0f / (float)(p->parts ? p->parts : size);
    const int low = p->low_sums || p->wire == MIXP_BF16;
    static unsigned char views[PARAMS][4 * 2 * WIDTH * WIDTH];
    mixp_optimizer *forget;
    model m;
    int step, part, i, k;
    model_open(&m, p, NULL, ODD_NOT);
    forget = new_sgd(m.ctx);
    for (i = 0; i < PARAMS; i++) {
        mixp_optimizer_add(model_optimizer(&m, i), m.p[i],
                           mixp_view(m.ctx, "", p->dtype, m.p[i]->rank, m.p[i]->shape, views[i]));
        mixp_optimizer_add(forget, m.p[i], NULL);
    }
    if (p->ema) model_averages(&m);
    for (step = 0; step < p->steps; step++) {
        memset(sum, 0, sizeof sum);
        for (part = 0; part < parts; part++) {
            mixp_step_begin(m.ctx);
            mixp_zero_grad(forget);
            m.planted = step == p->plant_step && part % size == p->plant_rank;
            mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, model_loss(&m, step, rows * part, rows)));
            for (i = 0; i < PARAMS; i++) {
                mixp_read(m.p[i]->grad, one, MIXP_F32, m.p[i]->count);
                for (k = 0; k < m.p[i]->count; k++) {
                    const float before = p->mean == MIXP_MEAN_BEFORE ? factor : 1.0f;
                    const volatile float product = one[k] * before;     /* never joined with the sum */
                    float x = product;
                    if (low) x = mixp_f32_from_bf16(mixp_bf16_from_f32(x));
                    sum[i][k] = part ? sum[i][k] + x : x;
                }
            }
        }
        for (i = 0; i < PARAMS; i++) {
            float after = p->mean == MIXP_MEAN_AFTER ? factor : 1.0f;
            for (k = 0; k < m.p[i]->count; k++) {
                if (low) sum[i][k] = mixp_f32_from_bf16(mixp_bf16_from_f32(sum[i][k]));
                sum[i][k] *= after;
            }
            mixp_convert(views[i], p->dtype, sum[i], MIXP_F32, m.p[i]->count);
        }
        model_step(&m, p);
    }
    mixp_optimizer_free(forget);
    memset(out, 0, sizeof *out);
    result_take(out, &m, p->ema);
    mixp_context_free(m.ctx);
}

/* --- the bits of one rank ------------------------------------------------------------------- */

static void check_like(const result *got, int size, const result *want) {
    int r;
    CHECK_INT(want->code, MIXP_OK);
    for (r = 0; r < size; r++) {
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
    result *got, first;
    p.walks = 2;
    p.apart = 1;
    p.parts = 4;
    got = run(&p, 2);
    CHECK_INT(got[0].code, MIXP_OK);
    CHECK_TEXT(got[0].code ? got[0].text : "fine", "fine");
    CHECK(memcmp(got[0].weights, got[1].weights, got[0].bytes) == 0);
    first = got[0];
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
    int way;
    for (way = 0; way < 6; way++) {
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
    int which, i;
    memset(&ranks, 0, sizeof ranks);
    memset(&desc, 0, sizeof desc);
    ranks.size = ranks.apart = 1;
    ranks.bucket_bytes = 1;             /* each parameter is a range of its own */
    desc.ranks = &ranks;
    for (which = 0; which < 2; which++) {
        mixp_context *ctx = mixp_context_new(&desc);
        mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
        mixp_optimizer *opt = new_sgd(ctx);
        mixp_tensor *p[2], *loss;
        float g[64];
        for (i = 0; i < 2; i++) {
            p[i] = mixp_param(ctx, i ? "b" : "a", MIXP_F32, 1, n);
            mixp_fill(p[i], 1);
            mixp_optimizer_add(opt, p[i], NULL);
        }
        for (i = 0; i < 3; i++) {       /* both, one of them, both */
            mixp_ranks_hold(ctx, i < 2);
            mixp_step_begin(ctx);
            loss = i == 1 ? mixp_mul(ctx, p[which], p[which]) : mixp_add(ctx, p[0], p[1]);
            loss = mixp_sum(ctx, loss, MIXP_ALL, 0);
            CHECK_INT(mixp_backward(ctx, mixp_scaler_scale(scaler, loss)), MIXP_OK);
        }
        CHECK_INT(mixp_scaler_unscale(scaler, opt), MIXP_OK);
        for (i = 0; i < 2; i++) {
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
    size_t used;
    p.shard = 1;
    p.bucket = 320;                     /* weights go in many slices */
    plain.bucket = 320;
    check_bits(p, 2);
    check_bits(p, 3);                   /* pieces of another length, and an empty one */
    check_bits(p, 4);
    p.dtype = plain.dtype = MIXP_BF16;
    p.mean = MIXP_MEAN_AFTER;
    check_bits(p, 4);
    used = run(&plain, 4)[3].used;
    CHECK(run(&p, 4)[3].used + 8000 < used);
    p.plant_step = 2;
    p.plant_rank = 3;
    check_bits(p, 4);
}

/* Averages have the bits of one rank, and leave the weights as they were; one step is skipped. */
static void sharded_averages(void) {
    plan p = plan_of(STEPS);
    int way;
    p.shard = p.ema = 1;
    p.bucket = 320;
    p.plant_step = 2;
    p.plant_rank = 1;
    for (way = 0; way < 2; way++) {
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
    mixp_optimizer *opt;
    mixp_context *ctx;
    mixp_tensor *t[4];
    size_t used;
    int i;
    memset(&ranks, 0, sizeof ranks);
    memset(&d, 0, sizeof d);
    ranks.rank = rank;
    ranks.size = 8;
    ranks.sum = ranks.all_gather = no_hook;
    ranks.shard = 1;
    d.ranks = &ranks;
    d.threads = 1;
    ctx = mixp_context_new(&d);
    adamw.states.m = kind;
    opt = mixp_optimizer_new(ctx, &adamw);
    for (i = 0; i < 4; i++) t[i] = mixp_param(ctx, &"a\0b\0c\0d"[2 * i], MIXP_F32, 2, shapes[i]);
    used = mixp_context_memory(ctx).used;
    for (i = 0; i < 4; i++) mixp_optimizer_add(opt, t[i], NULL);
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
    int rank;
    for (rank = 0; rank < 8; rank++) {
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
    size_t used;
    CHECK_INT(mixp_checkpoint_save(path, &all), MIXP_OK);
    mixp_context_free(ctx);
    ctx = tables(4, &all, &opt);
    used = most_allocated = allocated;
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
    result *got;
    size_t n;
    int i;
    for (i = 0; i < 3; i++) {
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
    got = run(&p, 4);
    for (i = 0; i < 4; i++) CHECK_TEXT(got[i].code ? got[i].text : "fine", "fine");
    n = file_bytes(path[0], a, sizeof a);
    CHECK(n > 20000 && n < sizeof a);
    CHECK_INT(file_bytes(path[1], b, sizeof b), n);
    CHECK(memcmp(a, b, n) == 0);
    p.copy = path[2];
    p.steps = 6;                        /* 3 steps of 4 parts are 6 of 2 */
    for (i = 0; i < 2; i++) {
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
    for (i = 0; i < 3; i++) remove(path[i]);
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
    int r;
    for (r = 0; r < size; r++) {
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
    int size, way;
    p.max_norm = 0;
    p.shard = 1;
    for (way = 0; way < 6; way++) {
        p.ema = way % 2;
        static const int from[6] = {2, 2, 4, 2, 2, 4}, upto[6] = {4, 2, 4, 2, 2, 4};
        p.dtype = way < 2 ? MIXP_F32 : MIXP_BF16;
        p.mean = way == 2 ? MIXP_MEAN_AFTER : way == 3 ? MIXP_MEAN_NONE : MIXP_MEAN_BEFORE;
        p.low_sums = way == 4;
        p.muon = way == 5;
        for (size = from[way]; size <= upto[way]; size++) {
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
    size_t i;
    for (i = 0; i + 4 <= a->bytes; i += 4) {
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
    int r;
    p.shard = 1;
    p.max_norm = 0.05;
    for (p.unscaled = 0; p.unscaled < 2; p.unscaled++) {
        result *got;
        p.scatter = 0;
        want = run(&p, 4)[0];
        CHECK_INT(want.code, MIXP_OK);
        CHECK(want.verdict.clip < 0.9);
        p.scatter = 1;
        first = run(&p, 4)[0];
        CHECK_TEXT(first.code ? first.text : "fine", "fine");
        got = run(&p, 4);               /* again: the same bits */
        for (r = 0; r < 4; r++) {
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
    result *got;
    int r, way;
    p.shard = before.shard = p.scatter = before.scatter = 1;
    p.dtype = before.dtype = MIXP_F16;
    p.mean = before.mean = MIXP_MEAN_NONE;
    p.max_norm = before.max_norm = 0;
    for (way = 0; way < 6; way++) {
        p.unscaled = before.unscaled = way > 2;
        if (way % 3 == 0) kept = run(&before, 2)[0];
        CHECK_INT(kept.code, MIXP_OK);
        p.plant_step = 2;
        p.plant_rank = way % 3 ? 0 : 1;
        p.plant_more = way % 3 > 0;
        p.plant_at = way % 3 == 2 ? 100 : 700;  /* in rank 0's piece of 640 of 1152, in rank 1's */
        p.plant_value = way % 3 ? 40000 : 0;
        got = run(&p, 2);
        for (r = 0; r < 2; r++) {
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

/* --- one bad gradient ------------------------------------------------------------------------ */

static void planted_inf(void) {
    plan p = plan_of(3), before = plan_of(2);
    static result kept;
    int size, r;
    for (size = 2; size <= 4; size += 2) {
        result *got = run(&before, size);
        kept = got[0];
        p.plant_step = 2;
        p.plant_rank = size - 1;
        got = run(&p, size);
        for (r = 0; r < size; r++) {
            CHECK_INT(got[r].code, MIXP_OK);
            CHECK_INT(got[r].step, 2);
            CHECK_INT(got[r].verdict.outcome, MIXP_STEP_SKIPPED);
            CHECK_INT(got[r].verdict.skipped, 1);
            CHECK_TEXT(got[r].bad_tensor, "up");
            CHECK_INT(strlen(got[r].bad_tensor), 2);
            CHECK_INT(got[r].verdict.bad_rank, size - 1);
            CHECK_INT(got[r].verdict.bad_element, 5);
            CHECK_INT(got[r].verdict.bad_is_nan, 0);
            CHECK_NEAR(got[r].scale, kept.scale / 2, 0);
            CHECK(memcmp(got[r].weights, kept.weights, kept.bytes) == 0);
        }
    }
    /* Of several the lowest is named. */
    p.plant_rank = 1;
    p.plant_more = 1;
    CHECK_INT(run(&p, 4)[0].verdict.bad_rank, 1);
    /* And training goes on as that of one rank does. */
    p = plan_of(5);
    p.plant_step = 2;
    p.plant_rank = 1;
    reference(&p, 2, &kept);
    CHECK_INT(kept.verdict.skipped, 1);
    check_like(run(&p, 2), 2, &kept);
}

/* A loss that is no number on one rank is a spike on all; losses are compared by their mean. */
static void spikes(void) {
    plan p = plan_of(3);
    result *got;
    int r;
    p.spikes = 1;
    p.odd = ODD_LOSS;
    got = run(&p, 4);
    for (r = 0; r < 4; r++) {
        CHECK_INT(got[r].code, MIXP_OK);
        CHECK_INT(got[r].verdict.outcome, MIXP_STEP_SKIPPED);
        CHECK_INT(got[r].verdict.reason, MIXP_SKIP_SPIKE_LOSS);
        CHECK(memcmp(got[r].weights, got[0].weights, got[0].bytes) == 0);
    }
    p.odd = ODD_NOT;
    got = run(&p, 4);
    CHECK_INT(got[3].verdict.outcome, MIXP_STEP_APPLIED);
}

/* Gradients that the program makes itself, without a walk: their mean is taken in the step. */
static void own_gradients(void) {
    result *out = results();
    const int way = 3;
    int status, i, k;
    for (i = 0; i < way; i++) {
        pid_t root;
        fflush(stdout);
        root = fork();
        if (root == 0) {
            mixp_ranks_desc ranks = ddp_fork(2);
            mixp_optimizer_desc sgd = mixp_sgd_defaults();
            mixp_context_desc d;
            const int64_t shape[1] = {4};
            float w[4] = {1, 2, 3, 4}, g[4] = {1, 1, 1, 1};
            mixp_optimizer *opt;
            mixp_scaler *scaler;
            mixp_context *ctx;
            memset(&d, 0, sizeof d);
            d.ranks = &ranks;
            d.threads = 1;
            sgd.lr = 0.5;
            ctx = mixp_context_new(&d);
            opt = mixp_optimizer_new(ctx, &sgd);
            scaler = mixp_scaler_new(ctx, NULL);
            CHECK_NEAR(mixp_scaler_loss_scale(scaler), 65536.0, 0);
            mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, shape, w), mixp_view(ctx, "g", MIXP_F32, 1, shape, g));
            for (k = 0; k < 4; k++) g[k] = (float)(ranks.rank ? 3 * k : k) * (i ? 65536.0f : 1.0f);
            if (i == 0) mixp_optimizer_step(opt);           /* nobody looks at the gradients */
            if (i == 2) mixp_scaler_unscale(scaler, opt);   /* and the step does not sum them again */
            if (i) mixp_scaler_step(scaler, opt);
            if (i) mixp_scaler_update(scaler);
            memcpy(out[ranks.rank].weights, w, sizeof w);
            out[ranks.rank].code = mixp_context_error(ctx, NULL);
            mixp_context_free(ctx);
            leave(ddp_wait(0));
        }
        CHECK(waitpid(root, &status, 0) > 0);
        for (k = 0; k < 2; k++) {       /* w - 0.5 (k + 3 k) / 2 */
            static const float want[4] = {1, 1, 1, 1};
            CHECK_INT(out[k].code, MIXP_OK);
            CHECK(memcmp(out[k].weights, want, sizeof want) == 0);
        }
    }
}

/* What overflows on one rank falls back on all: their sites stay alike. */
static void guarded_sites(void) {
    plan p = plan_of(4);
    result *got;
    int r;
    p.guard = 1;
    got = run(&p, 4);
    CHECK_INT(got[0].code, MIXP_OK);
    CHECK_INT(got[0].fallen, 0);
    p.plant_step = 2;
    p.plant_rank = 2;
    got = run(&p, 4);
    CHECK(got[0].fallen != 0);
    for (r = 0; r < 4; r++) {
        CHECK_TEXT(got[r].code ? got[r].text : "fine", "fine");
        CHECK_INT(got[r].fallen, got[0].fallen);
        CHECK_INT(got[r].verdict.skipped, 1);
        CHECK(memcmp(got[r].weights, got[0].weights, got[0].bytes) == 0);
    }
}

/* A skip that began in the forward pass of one rank lowers the loss scale of none, sampled or not;
 * one that began in a gradient lowers it on all. The scale of 1024 doubles after three clean steps. */
static void guarded_skips(void) {
    plan p = plan_of(4);
    int way, r;
    p.plant_step = 2;
    p.plant_rank = 1;
    for (way = 0; way < 4; way++) {
        result *got;
        p.guard = way % 2 ? 16 : 1;
        p.guard_backward = way / 2;
        got = run(&p, 4);
        for (r = 0; r < 4; r++) {
            CHECK_TEXT(got[r].code ? got[r].text : "fine", "fine");
            CHECK_INT(got[r].verdict.skipped, 1);
            CHECK_NEAR(got[r].scale, p.guard_backward ? 512 : 2048, 0);
            CHECK(memcmp(got[r].weights, got[0].weights, got[0].bytes) == 0);
        }
    }
}

/* What nothing cures ends all ranks. Of two such skips in a row one is forgiven. */
static void guarded_to_the_end(void) {
    plan p = plan_of(12);
    result *got;
    int r;
    p.guard = 1;
    p.guard_pins = 1;
    p.plant_step = 1;
    p.plant_rank = 3;
    got = run(&p, 4);
    for (r = 0; r < 4; r++) {
        CHECK_INT(got[r].code, MIXP_ERR_DIVERGED);
        CHECK_TEXT(got[r].text, "2 steps in a row were skipped because of their forward pass");
        CHECK_INT(got[r].verdict.skipped, 2);
        CHECK_NEAR(got[r].scale, 512, 0);
    }
}

/* --- ranks that differ ------------------------------------------------------------------------ */

static void differs(int odd, int size, mixp_result code, const char *what, const char *where) {
    plan p = plan_of(4);
    result *got;
    int r;
    p.odd = odd;
    got = run(&p, size);
    for (r = 0; r < size; r++) {
        CHECK_INT(got[r].done, 1);
        if (odd == ODD_LEAVES_EARLY && r == 1) continue;
        if (odd == ODD_FAILS && r == 1) code = MIXP_ERR_ARGUMENT;
        CHECK_INT(got[r].code, code);
        CHECK_TEXT(got[r].text, what);
        CHECK_TEXT(got[r].text, where);
        if (odd == ODD_FAILS && r == 1) code = MIXP_ERR_RANKS;
    }
}

static void refused_at_the_start(void) {
    differs(ODD_SIZE, 2, MIXP_ERR_RANKS, "the sum of a table: ranks request different operations", "");
    differs(ODD_SEED, 2, MIXP_ERR_RANKS, "seed is 5 on rank 0", "6 on rank 1");
    differs(ODD_MEAN, 4, MIXP_ERR_RANKS, "mean is 0 on rank 0", "2 on rank 1");
    differs(ODD_VALUE, 2, MIXP_ERR_RANKS, "'up.bias' f32 [48], values", "on rank 1");
    differs(ODD_NAME, 2, MIXP_ERR_RANKS, "'gain' f32 [24]", "'profit' f32 [24]");
    differs(ODD_DTYPE, 2, MIXP_ERR_RANKS, "ranks differ: gradient", "on rank 1");
    differs(ODD_SHAPE, 2, MIXP_ERR_RANKS, "'down' f32 [11, 48]", "'down' f32 [12, 48]");
}

static void refused_later(void) {
    differs(ODD_RATE, 2, MIXP_ERR_RANKS, "ranks differ: the learning rate is 0.01 on rank 0 and 0.02 on rank 1; "
            "the step was skipped", "");
    differs(ODD_FAILS, 2, MIXP_ERR_RANKS, "mixp_backward: the loss must be one element", "");
    differs(ODD_LEAVES_EARLY, 2, MIXP_ERR_RANKS, "rank 0 of 2, the sum of a table: rank 1 is gone", "");
}

/* Two ranks with all that asks something of hooks, a save to path too. */
static plan plan_of_hooks(const char *path) {
    plan p = plan_of(2);
    p.shard = 1;
    p.guard = 2;
    p.bucket = 20000;
    p.checkpoint = path;
    return p;
}

/* Whichever call of a hook fails, and in whatever: both ranks end with an error, soon, and say where. */
static void any_hook_fails(void) {
    static const char *const sites[] = {"the sum of a table", "the sum of gradients",
        "the scattered sum of a gradient", "the wait for gradients", "the sum of the ranks' results",
        "the gather of weights", "the sum of states", "mixp_ranks_sum"};
    enum { SITES = sizeof sites / sizeof *sites };
    int seen[SITES] = {0}, way, i, calls;
    char path[64];
    plan p;
    result *got;
    snprintf(path, sizeof path, "ranks.cut.%d.tmp", (int)getpid());
    p = plan_of_hooks(path);
    for (way = 0; way < 3; way++) {
        p.scatter = way;
        p.cut_at = 1 << 20;
        remove(path);
        got = run(&p, 2);
        CHECK_TEXT(got[1].code ? got[1].text : "fine", "fine");
        calls = got[1].calls;
        CHECK(calls > 20);
        /* Hooks that begin sums ask for all else, too. */
        for (p.cut_at = 1; p.cut_at <= calls; p.cut_at += way == 2 ? 1 : 3) {
            remove(path);
            got = run(&p, 2);
            CHECK_INT(got[0].code, MIXP_ERR_RANKS);
            CHECK_INT(got[1].code, MIXP_ERR_RANKS);
            CHECK_TEXT(got[0].text, "rank 1 stopped: rank 1 of 2, ");
            CHECK_TEXT(got[1].text, "the cable is cut");
            for (i = 0; i < SITES; i++) seen[i] |= strstr(got[1].text, sites[i]) != NULL;
        }
    }
    remove(path);
    for (i = 0; i < SITES; i++) CHECK_TEXT(seen[i] ? sites[i] : "never seen", sites[i]);
}

/* A rank that is killed at whichever call: the other hears that it is gone, and ends as failed. */
static void dies_at_any_call(void) {
    char path[64];
    plan p;
    int way, calls;
    snprintf(path, sizeof path, "ranks.dies.%d.tmp", (int)getpid());
    p = plan_of_hooks(path);
    for (way = 0; way < 3; way++) {
        p.scatter = way;
        p.cut_at = 1 << 20;
        p.cut_kills = 0;
        remove(path);
        calls = run(&p, 2)[1].calls;
        CHECK(calls > 20);
        p.cut_kills = 1;
        for (p.cut_at = 1 + way; p.cut_at <= calls; p.cut_at += 4) {
            result *got = results();
            int status = 0;
            remove(path);
            CHECK(waitpid(start(&p, 2, got), &status, 0) > 0);
            CHECK(WIFEXITED(status));
            CHECK_INT(WEXITSTATUS(status), 1);
            CHECK_INT(got[0].code, MIXP_ERR_RANKS);
            CHECK_TEXT(got[0].text, "rank 1 is gone");
            CHECK_INT(got[1].done, 0);
        }
    }
    remove(path);
}

static void late_rank(void) {
    plan p = plan_of(4);
    result *got;
    p.odd = ODD_SLEEPS;
    p.patience = 0.4;
    got = run(&p, 2);
    CHECK_INT(got[0].code, MIXP_ERR_RANKS);
    CHECK_TEXT(got[0].text, "rank 0 of 2, the sum of a table: rank 1 did not answer in time");
    CHECK_TEXT(got[1].text, "rank 1 of 2, the sum of a table: rank 1 did not answer in time");
    p.patience = 0;
    got = run(&p, 2);
    CHECK_INT(got[0].code, MIXP_OK);
    CHECK_INT(got[1].step, 3);
}

/* --- a description that is wrong --------------------------------------------------------------- */

static const char *no_wait(void *user, void *stream, double seconds)
{ (void)user, (void)stream, (void)seconds; return NULL; }

static void refused(const mixp_ranks_desc *ranks, const char *what) {
    mixp_context_desc d;
    const char *why = NULL;
    memset(&d, 0, sizeof d);
    d.ranks = ranks;
    d.why = &why;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, what);
}

static void descriptions(void) {
    mixp_ranks_desc good, d;
    memset(&good, 0, sizeof good);
    good.size = 2;
    good.sum = no_hook;
    d = good; d.size = 0;           refused(&d, "size is below 1");
    d = good; d.rank = 2;           refused(&d, "rank must lie in [0, size)");
    d = good; d.rank = -1;          refused(&d, "rank must lie in [0, size)");
    d = good; d.sum = NULL;         refused(&d, "sum is missing");
    d = good; d.grad_ready = no_hook; refused(&d, "both or neither");
    d = good; d.grad_wait = no_wait; refused(&d, "both or neither");
    d = good; d.seconds = -1;       refused(&d, "seconds");
    d = good; d.seconds = NAN;      refused(&d, "seconds");
    d = good; d.bucket_bytes = -1;  refused(&d, "bucket_bytes");
    d = good; d.parts = -1;         refused(&d, "parts");
    d = good; d.shard = 1;          refused(&d, "shard needs all_gather");
    d = good; d.mean = (mixp_ranks_mean)3; refused(&d, "mean");
    d = good; d.scatter_ready = no_hook; refused(&d, "scatter_ready needs grad_wait");
    d = good; d.scatter = 1;        refused(&d, "scatter needs shard");
    d.shard = 1; d.all_gather = no_hook; refused(&d, "scatter needs reduce_scatter");
}

static void failing_hook(void) {
    plan p = plan_of(1);
    mixp_ranks_desc d;
    const char *text;
    model m;
    memset(&d, 0, sizeof d);
    d.size = 2;
    d.rank = 1;
    d.sum = no_hook;
    model_open(&m, &p, &d, ODD_NOT);
    model_add(&m);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 4)), MIXP_ERR_RANKS);
    CHECK_INT(mixp_context_error(m.ctx, &text), MIXP_ERR_RANKS);
    CHECK_TEXT(text, "rank 1 of 2, the sum of a table: the cable is cut");
    CHECK(m.p[0]->grad == NULL);
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_ranks_max(m.p[0]), MIXP_ERR_RANKS);
    CHECK_INT(mixp_context_error(m.ctx, &text), MIXP_ERR_RANKS);
    CHECK_TEXT(text, "lacks this hook");
    mixp_context_free(m.ctx);
}

/* The same of gradients that are the program's: the weights are as they were. */
static void failing_view(void) {
    const int64_t shape[1] = {2};
    float w[2] = {1, 2}, g[2] = {3, 4};
    mixp_ranks_desc ranks;
    mixp_context_desc d;
    mixp_optimizer *opt;
    mixp_context *ctx;
    const char *text;
    memset(&ranks, 0, sizeof ranks);
    memset(&d, 0, sizeof d);
    ranks.size = 2;
    ranks.sum = no_hook;
    d.ranks = &ranks;
    ctx = mixp_context_new(&d);
    opt = new_sgd(ctx);
    mixp_optimizer_add(opt, mixp_view(ctx, "w", MIXP_F32, 1, shape, w), mixp_view(ctx, "g", MIXP_F32, 1, shape, g));
    CHECK_INT(mixp_optimizer_step(opt), MIXP_ERR_RANKS);
    CHECK_INT(mixp_context_error(ctx, &text), MIXP_ERR_RANKS);
    CHECK_TEXT(text, "rank 0 of 2, the sum of a view: the cable is cut");
    CHECK(w[0] == 1 && w[1] == 2);
    mixp_context_free(ctx);
}

/* --- a world of two in one process: the other rank has the same gradients ------------------------ */

typedef struct mirror {
    int      ready, waits, tables, walked, late;    /* late: ranges that came after the last operator */
    int64_t  range[16];
    mixp_dtype dtype[16];
    const char *data[16];
    int64_t  word;                      /* of the first table: what the other has more there, plus 1 */
    int      table_rank, pieces;        /* this rank; how often pieces were summed */
    int      nudged;                    /* word of an agreement of which the other has one ulp more; 0 = none */
    int64_t  piece;                     /* elements of the newest */
    model   *m;
} mirror;

static const char *mirror_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                              double seconds) {
    mirror *w = user;
    float *x = data;
    double *table = data;
    int64_t i;
    (void)stream;
    CHECK_NEAR(seconds, 600, 0);
    if (dtype == MIXP_F64) {            /* a table: rank 0's row, and none yet */
        double *own = table + w->table_rank * (count / 2), *other = table + (1 - w->table_rank) * (count / 2);
        for (i = 0; i < count / 2; i++) other[i] = own[i];
        if (!w->tables++ && w->word) table[count / 2 + w->word - 1] += 1;
        if (w->nudged && w->tables > 1 && count / 2 == MIXP_AGREE_WORDS)
            other[w->nudged] = nextafter(own[w->nudged], HUGE_VAL);
        return NULL;
    }
    for (i = 0; i < count; i++) x[i] *= 2;
    return NULL;
}
/* A sum of pieces: what is the other's is spoilt. */
static const char *mirror_pieces(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                                 double seconds) {
    mirror *w = user;
    float *x = data;
    int64_t i;
    (void)dtype, (void)stream, (void)seconds;
    for (i = 0; i < 2 * count; i++) x[i] = i / count == w->table_rank ? 2 * x[i] : NAN;
    w->pieces++;
    w->piece = count;
    return NULL;
}
static const char *mirror_ready(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                                double seconds) {
    mirror *w = user;
    if (w->ready < 16) {
        w->range[w->ready] = count;
        w->dtype[w->ready] = dtype;
        w->data[w->ready] = data;
    }
    w->late += w->m->p[0]->grad != NULL;        /* the embedding's gradient comes last */
    w->ready++;
    return mirror_sum(user, data, count, dtype, stream, seconds);
}
static const char *mirror_wait(void *user, void *stream, double seconds) {
    (void)stream, (void)seconds;
    ((mirror *)user)->waits++;
    return NULL;
}

static void mirror_open(mirror *w, model *m, mixp_dtype dtype) {
    plan p = plan_of(1);
    mixp_ranks_desc d;
    p.dtype = dtype;
    memset(w, 0, sizeof *w);
    memset(&d, 0, sizeof d);
    w->m = m;
    d.size = 2;
    d.sum = mirror_sum;
    d.grad_ready = mirror_ready;
    d.grad_wait = mirror_wait;
    d.user = w;
    d.bucket_bytes = 1500;
    model_open(m, &p, &d, ODD_NOT);
    model_add(m);
}

/* Norms that differ in their last bit are told with digits that differ. */
static void norms_that_are_nearly_alike(void) {
    mirror w;
    model m;
    const char *text = "";
    char here[32] = "", there[32] = "";
    mirror_open(&w, &m, MIXP_F32);
    w.nudged = MIXP_AGREE_NORM;
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(m.opt), MIXP_ERR_RANKS);
    mixp_context_error(m.ctx, &text);
    CHECK_INT(sscanf(text, "ranks differ: the norm of the summed gradients is %31s on rank 0 and %31s on",
                     here, there), 2);
    CHECK(strcmp(here, there) != 0);
    mixp_context_free(m.ctx);
}

/* Ranges go out while the walk is under way, in the order of backward, and are the whole arena. */
static void buckets(void) {
    mirror w;
    model m;
    int i, total = 0;
    mirror_open(&w, &m, MIXP_F32);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_OK);
    CHECK_INT(w.waits, 1);
    CHECK_INT(w.ready, 3);
    CHECK_INT(w.late, 1);               /* the last alone */
    CHECK(w.data[0] == (char *)m.p[5]->grad->data);
    for (i = 0; i < 3; i++) {
        if (i) CHECK(w.data[i] == w.data[i - 1] + 4 * w.range[i - 1]);
        total += (int)w.range[i];
    }
    /* down; the bias of up, up; gain, shift, embedding: each fills up to 64 bytes. */
    CHECK_INT(total, 11 * 48 + 48 * 24 + 48 + 2 * 32 + 11 * 24 + 8);
    CHECK_INT(mixp_backward(m.ctx, mixp_sum(m.ctx, m.p[2], MIXP_ALL, 0)), MIXP_ERR_ORDER);
    { const char *text; mixp_context_error(m.ctx, &text); CHECK_TEXT(text, "was summed over the ranks already"); }
    mixp_context_clear_error(m.ctx);
    mixp_zero_grad(m.opt);
    mixp_step_begin(m.ctx);
    mixp_ranks_hold(m.ctx, 1);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 1, 0, 8)), MIXP_OK);
    CHECK_INT(w.ready, 3);              /* held back */
    mixp_ranks_hold(m.ctx, 0);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 1, 8, 8)), MIXP_OK);
    CHECK_INT(w.ready, 6);
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    mixp_context_free(m.ctx);
}

/* Narrow gradients travel in f32. */
static void wide_sums(void) {
    mirror w;
    model m;
    int i;
    mirror_open(&w, &m, MIXP_F16);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_OK);
    for (i = 0; i < w.ready && i < 16; i++) CHECK_INT(w.dtype[i], MIXP_F32);
    CHECK(w.ready > 1);
    mixp_context_free(m.ctx);
}

/* Another version, in the first table. */
static void other_version(void) {
    mirror w;
    model m;
    const char *text;
    mirror_open(&w, &m, MIXP_F32);
    w.word = 1;
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_ERR_RANKS);
    mixp_context_error(m.ctx, &text);
    CHECK_TEXT(text, "the version of mixprec is");
    mixp_context_free(m.ctx);
}

/* A parameter that no loss of this rank used counts as 0 where others may have it. */
static void unused_parameter(void) {
    mirror w;
    model m;
    float grad[2 * WIDTH];
    int i;
    mirror_open(&w, &m, MIXP_F32);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_OK);
    mixp_zero_grad(m.opt);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, mixp_sum(m.ctx, m.p[1], MIXP_ALL, 0)), MIXP_OK);
    CHECK(m.p[2]->grad != NULL);        /* in the bucket of up */
    if (m.p[2]->grad) mixp_read(m.p[2]->grad, grad, MIXP_F32, 2 * WIDTH);
    for (i = 0; i < 2 * WIDTH; i++) CHECK_NEAR(grad[i], 0, 0);
    CHECK(m.p[5]->grad == NULL);        /* in another */
    mixp_context_free(m.ctx);
}

/* A gradient that the program keeps itself could be read while it is in part as it was before. */
static void view_refused(model *m) {
    static float w[4] = {1, 2, 3, 4}, g[4] = {1, 1, 1, 1};
    const int64_t shape[1] = {4};
    mixp_optimizer *opt = new_sgd(m->ctx);
    mixp_tensor *weight = mixp_view(m->ctx, "w", MIXP_F32, 1, shape, w);
    const char *text;
    CHECK_INT(mixp_optimizer_add(opt, weight, mixp_view(m->ctx, "w.grad", MIXP_F32, 1, shape, g)), MIXP_ERR_ARGUMENT);
    mixp_context_error(m->ctx, &text);
    CHECK_TEXT(text, "'w' has a view as its gradient, but with `scatter` a rank unscales and clips only a part");
    mixp_context_clear_error(m->ctx);
    CHECK_INT(mixp_tensor_set_requires_grad(weight, 1), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(opt, weight, NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_free(opt), MIXP_OK);
}

/* What no rank has whole is not read; a parameter has one optimizer. */
static void in_pieces(void) {
    plan p = plan_of(1);
    mixp_ranks_desc d;
    mirror w;
    model m;
    float grad[2 * WIDTH * WIDTH];
    const char *text;
    int64_t k;
    int i, others = 0;
    memset(&w, 0, sizeof w);
    memset(&d, 0, sizeof d);
    w.m = &m;
    d.size = 2;
    d.rank = 1;
    d.sum = mirror_sum;
    d.all_gather = d.reduce_scatter = mirror_pieces;
    d.shard = d.scatter = 1;
    d.user = &w;
    d.bucket_bytes = 1 << 18;           /* up alone is at least a hundredth of it */
    model_open(&m, &p, &d, ODD_NOT);
    model_add(&m);
    CHECK_INT(mixp_optimizer_add(new_sgd(m.ctx), m.p[1], NULL), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &text);
    CHECK_TEXT(text, "'up' has, or had, another optimizer: with `scatter`");
    mixp_context_clear_error(m.ctx);
    view_refused(&m);
    mixp_step_begin(m.ctx);
    w.table_rank = 1;
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_OK);
    CHECK_INT(w.pieces, 1);
    CHECK_INT(w.piece, 640);            /* half of 48 * 24, in blocks of 128 */
    CHECK_INT(mixp_read(m.p[3]->grad, grad, MIXP_F32, WIDTH), MIXP_OK);
    CHECK_INT(mixp_read(m.p[1]->grad, grad, MIXP_F32, 2 * WIDTH * WIDTH), MIXP_ERR_ORDER);
    mixp_context_error(m.ctx, &text);
    CHECK_TEXT(text, "mixp_read: the gradient of 'up' is scattered over the ranks");
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_clip_grad_norm(m.opt, 1e-3), MIXP_OK);   /* each rank what it updates */
    for (i = 2; i < 5; i++) {
        double norm = 0;
        mixp_result code = mixp_read(m.p[i]->grad, grad, MIXP_F32, m.p[i]->count);
        if (code == MIXP_ERR_ORDER) others++;
        else CHECK_INT(code, MIXP_OK);
        for (k = 0; code == MIXP_OK && k < m.p[i]->count; k++) norm += (double)grad[k] * grad[k];
        CHECK(sqrt(norm) < 1.1e-3);
        mixp_context_clear_error(m.ctx);
    }
    CHECK(others > 0 && others < 3);
    mixp_zero_grad(m.opt);
    mixp_step_begin(m.ctx);
    mixp_ranks_hold(m.ctx, 1);          /* this rank's own, before any sum */
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 1, 0, 8)), MIXP_OK);
    for (i = 1; i < 5; i++) CHECK_INT(mixp_read(m.p[i]->grad, grad, MIXP_F32, m.p[i]->count), MIXP_OK);
    mixp_context_free(m.ctx);
}

/* --- numbers of the user's ------------------------------------------------------------------------ */

static void sums_of_yours(void) {
    result *out = results();
    pid_t root;
    int status = 0;
    fflush(stdout);
    root = fork();
    if (root == 0) {
        mixp_ranks_desc ranks = ddp_fork(4);
        mixp_context_desc d;
        const int64_t shape[1] = {3};
        float x[3];
        mixp_context *ctx;
        mixp_tensor *a, *b;
        memset(&d, 0, sizeof d);
        d.ranks = &ranks;
        d.threads = 1;
        ctx = mixp_context_new(&d);
        x[0] = 1;
        x[1] = (float)ranks.rank;
        x[2] = 1 - (float)ranks.rank;
        mixp_step_begin(ctx);
        a = mixp_input(ctx, MIXP_F32, 1, shape, x);
        b = mixp_input(ctx, MIXP_F32, 1, shape, x);
        mixp_ranks_sum(a);
        mixp_ranks_max(b);
        memcpy(out[ranks.rank].weights, a->data, 12);
        memcpy(out[ranks.rank].weights + 12, b->data, 12);
        out[ranks.rank].code = mixp_context_error(ctx, NULL);
        mixp_context_free(ctx);
        leave(ddp_wait(0));
    }
    CHECK(waitpid(root, &status, 0) > 0);
    for (status = 0; status < 4; status++) {
        static const float want[6] = {4, 6, -2, 1, 3, 1};
        CHECK_INT(out[status].code, MIXP_OK);
        CHECK(memcmp(out[status].weights, want, sizeof want) == 0);
    }
}

/* --- how ranks end ------------------------------------------------------------------------------ */

static void nothing(int number) { (void)number; }

/* Way 0: rank 0 fails, and rank 1 does not wait for it. Way 1: rank 1 fails, and rank 0 has looked for it
 * before. Way 2: it fails when signals have come. What rank 0 returns. */
static int end_of_ranks(int way) {
    mixp_ranks_desc ranks = ddp_fork(2);
    float x = 1;
    int i;
    alarm(HANGS);
    if (way == 0 && ranks.rank) return ddp_wait(ranks.sum(ranks.user, &x, 1, MIXP_F32, NULL, 1e9) != NULL);
    if (way == 0) return ddp_wait(7);
    for (i = 0; i < 50 && ranks.rank && way == 2; i++) {
        kill(ddp.first, SIGUSR1);
        poll(NULL, 0, 1);
    }
    if (ranks.rank) leave(1);
    while (way == 1 && !ddp.gone[1]) ddp_look_for_dead();
    return ddp_wait(0);
}

static void ends(void) {
    static const int want[3] = {7, 1, 1};
    int way, status;
    for (way = 0; way < 3; way++) {
        struct sigaction look;
        pid_t root;
        fflush(stdout);
        root = fork();
        if (root == 0) {
            memset(&look, 0, sizeof look);
            look.sa_handler = nothing;          /* without SA_RESTART */
            sigaction(SIGUSR1, &look, NULL);
            leave(end_of_ranks(way));
        }
        CHECK(waitpid(root, &status, 0) > 0);
        CHECK(WIFEXITED(status));
        CHECK_INT(WEXITSTATUS(status), want[way]);
    }
}

/* Who knows that another is gone leaves its question on the board, which a third may still read, and
 * gives the same answer again. */
static void asks_no_more(void) {
    int status;
    pid_t root;
    fflush(stdout);
    root = fork();
    if (root == 0) {
        mixp_ranks_desc ranks = ddp_fork(2);
        float x[2] = {1, 2};
        const char *first, *again;
        alarm(HANGS);
        if (ranks.rank) leave(0);
        first = ranks.sum(ranks.user, x, 1, MIXP_F32, NULL, 1e9);
        again = ranks.sum(ranks.user, x, 2, MIXP_F32, NULL, 1e9);
        CHECK_TEXT(first ? first : "", "rank 1 is gone");
        CHECK_TEXT(again ? again : "", "rank 1 is gone");
        CHECK_INT(ddp_board->asked[0][0][1], 1);
        leave(test_bad != 0);
    }
    CHECK(waitpid(root, &status, 0) > 0);
    CHECK_INT(status, 0);
}

/* A world of `size` ranks, each of which does fn; what rank 0 returns. */
static int world_of(int size, int (*fn)(const mixp_ranks_desc *)) {
    int status = 0;
    pid_t root;
    fflush(stdout);
    root = fork();
    if (root == 0) {
        mixp_ranks_desc ranks = ddp_fork(size);
        alarm(HANGS);
        leave(fn(&ranks));
    }
    CHECK(waitpid(root, &status, 0) > 0);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Rank 1 is killed while it writes why it stops: nobody waits for the end of that text. */
static int one_dies_telling(const mixp_ranks_desc *ranks) {
    float x = 1;
    const char *why;
    dies_writing = ranks->rank == 1;
    if (ranks->rank == 1) ranks->stop(ranks->user, "it has failed");
    why = ranks->sum(ranks->user, &x, 1, MIXP_F32, NULL, 1e9);
    CHECK_TEXT(why ? why : "", "rank 1 is gone");
    return ddp_wait(test_bad != 0) == 1 && !test_bad ? 5 : 1;
}
static void dies_telling(void) { CHECK_INT(world_of(3, one_dies_telling), 5); }

/* Where the program was started with SIGCHLD ignored, a rank's death is seen all the same, and that it
 * did not end well. */
static int one_dies_unseen(const mixp_ranks_desc *ranks) {
    float x = 1;
    const char *why;
    if (ranks->rank) raise(SIGKILL);
    why = ranks->sum(ranks->user, &x, 1, MIXP_F32, NULL, 1e9);
    CHECK_TEXT(why ? why : "", "rank 1 is gone");
    return ddp_wait(0) == 1 && !test_bad ? 5 : 1;
}
static void ignored_children(void) {
    struct sigaction ignore;
    memset(&ignore, 0, sizeof ignore);
    ignore.sa_handler = SIG_IGN;
    fflush(stdout);
    if (fork() == 0) {                      /* what ignores it is a process of its own */
        sigaction(SIGCHLD, &ignore, NULL);
        {
            mixp_ranks_desc ranks = ddp_fork(2);
            alarm(HANGS);
            leave(one_dies_unseen(&ranks));
        }
    }
    {
        int status = 0;
        CHECK(wait(&status) > 0);
        CHECK(WIFEXITED(status));
        CHECK_INT(WEXITSTATUS(status), 5);
    }
}

/* A rank that stands still does not keep rank 0 waiting once it has been told. */
static int one_stands_still(const mixp_ranks_desc *ranks) {
    const double began = ddp_now();
    float x = 1;
    const char *why;
    if (ranks->rank) raise(SIGSTOP);
    why = ranks->sum(ranks->user, &x, 1, MIXP_F32, NULL, 0.2);
    CHECK_TEXT(why ? why : "", "rank 1 did not answer in time");
    linger = 0.3;
    CHECK_INT(ddp_wait(1), 1);
    CHECK(ddp_now() - began < HANGS / 2);
    CHECK_INT(waitpid(-1, NULL, WNOHANG), -1);      /* nothing is left */
    return test_bad ? 1 : 5;
}
static void stands_still(void) { CHECK_INT(world_of(2, one_stands_still), 5); }

/* Sums of every dtype, as long as several chunks and a bit, beside plain loops: in the order of ranks,
 * those of 16 bits in f32 and rounded once. */
enum { LONG = DDP_CHUNK / 4 + 37 };

static double number_of(int rank, int i, mixp_dtype dtype) {
    const double x = (double)((i * 37 + rank * 101) % 509 - 250) * (1 + rank * 0.3);
    return dtype == MIXP_I32 ? floor(x) : mixp_decode(dtype, mixp_encode(dtype, x, 0));
}
static double sum_of(int size, int i, mixp_dtype dtype, int max) {
    double sum = number_of(0, i, dtype);
    for (int r = 1; r < size; r++) {
        const double x = number_of(r, i, dtype);
        if (max) sum = x > sum ? x : sum;
        else sum = dtype == MIXP_F64 || dtype == MIXP_I32 ? sum + x : (float)((float)sum + (float)x);
    }
    return dtype == MIXP_I32 ? sum : mixp_decode(dtype, mixp_encode(dtype, sum, 0));
}
static int numbers_differ(const double *got, int size, int first, int n, mixp_dtype dtype, int max) {
    int i, bad = 0;
    for (i = 0; i < n; i++) bad += got[i] < sum_of(size, first + i, dtype, max) ||
                                   got[i] > sum_of(size, first + i, dtype, max);
    return bad;
}

static int sums_by_hand(const mixp_ranks_desc *ranks, mixp_dtype dtype) {
    const int size = ranks->size, all = size * LONG;
    const size_t bytes = mixp_dtype_size(dtype), room = (size_t)all * sizeof(double);
    double *data = (double *)malloc(room), *got = (double *)malloc(room);
    int i, way, bad = 0;
    for (way = DDP_SUM; way <= DDP_SCATTER; way++) {
        const int n = way < DDP_GATHER ? LONG : all, mine = ranks->rank * LONG;
        char *own = (char *)data + (way == DDP_GATHER ? (size_t)mine * bytes : 0);
        const char *why;
        memset(data, 0, room);
        for (i = 0; i < (way == DDP_GATHER ? LONG : n); i++) {
            const double x = number_of(ranks->rank, i, dtype);
            mixp_convert(own + (size_t)i * bytes, dtype, &x, MIXP_F64, 1);
        }
        why = (way == DDP_SUM ? ranks->sum : way == DDP_MAX ? ranks->max : way == DDP_GATHER ?
               ranks->all_gather : ranks->reduce_scatter)(ranks->user, data, LONG, dtype, NULL, PATIENCE);
        CHECK_TEXT(why ? why : "fine", "fine");
        mixp_convert(got, MIXP_F64, data, dtype, n);
        if (way < DDP_GATHER) bad += numbers_differ(got, size, 0, n, dtype, way == DDP_MAX);
        if (way == DDP_SCATTER) bad += numbers_differ(got + mine, size, mine, LONG, dtype, 0);
        for (i = 0; way == DDP_GATHER && i < all; i++) {
            const double want = number_of(i / LONG, i % LONG, dtype);
            bad += got[i] < want || got[i] > want;
        }
    }
    free(data);
    free(got);
    return bad;
}

static int sums_of_all_dtypes(const mixp_ranks_desc *ranks) {
    static const mixp_dtype dtypes[] = {MIXP_F32, MIXP_BF16, MIXP_F16, MIXP_F64, MIXP_I32};
    size_t k;
    for (k = 0; k < sizeof dtypes / sizeof *dtypes; k++) CHECK_INT(sums_by_hand(ranks, dtypes[k]), 0);
    return test_bad != 0;
}
#ifndef RANKS_MPI
static int sums_of_fork(const mixp_ranks_desc *ranks) { return ddp_wait(sums_of_all_dtypes(ranks)); }
static void long_sums(void) {
    CHECK_INT(world_of(2, sums_of_fork), 0);
    CHECK_INT(world_of(3, sums_of_fork), 0);
}
#endif

/* A child of the program that is no rank is left to the program: it is not waited for, and how it ends
 * is not how ranks end. What was printed before is printed once. */
static void children_of_the_program(void) {
    int gate[2], text[2], status = 0;
    char got[64];
    ssize_t n;
    pid_t root;
    CHECK_INT(pipe(gate), 0);
    CHECK_INT(pipe(text), 0);
    fflush(stdout);
    root = fork();
    if (root == 0) {
        pid_t other = fork();
        char end;
        FILE *out = fdopen(text[1], "w");
        if (other == 0) {
            close(gate[1]);
            leave(read(gate[0], &end, 1) == 0 ? 3 : 4);     /* until the gate is closed */
        }
        fputs("once;", out);
        {
            mixp_ranks_desc ranks = ddp_fork(2);
            alarm(HANGS);
            fclose(out);
            if (ranks.rank) leave(ddp_wait(0));
            status = ddp_wait(0);
        }
        close(gate[0]);
        close(gate[1]);
        CHECK_INT(status, 0);
        CHECK_INT(waitpid(other, &status, 0), other);
        CHECK_INT(WEXITSTATUS(status), 3);
        leave(test_bad != 0);
    }
    close(gate[0]);
    close(gate[1]);
    close(text[1]);
    CHECK(waitpid(root, &status, 0) > 0);
    CHECK_INT(status, 0);
    n = read(text[0], got, sizeof got - 1);
    got[n > 0 ? n : 0] = '\0';
    CHECK(strcmp(got, "once;") == 0);
    close(text[0]);
}

/* --- ranks that go apart -------------------------------------------------------------------------- */

static mixp_result no_update(const mixp_exec *x, const mixp_update_args *k) {
    (void)x, (void)k;
    return MIXP_ERR_DEVICE;
}

/* Two parameters as large as a range, and a loss of one of them; rank 1 is odd in the second step. */
static int two_steps(const mixp_ranks_desc *given, int goes_apart, int fails, result *out) {
    static const int64_t n[1] = {256};
    mixp_kernels kernels = *mixp_cpu()->kernels;
    mixp_device device = *mixp_cpu();
    mixp_ranks_desc ranks = *given;
    mixp_context_desc d;
    mixp_tensor *p[2];
    mixp_optimizer *opt;
    mixp_context *ctx;
    const char *text;
    int i, step, odd = ranks.rank == 1;
    memset(&d, 0, sizeof d);
    device.kernels = &kernels;
    ranks.seconds = PATIENCE;
    ranks.bucket_bytes = 1;
    d.ranks = &ranks;
    d.threads = 1;
    d.device = &device;
    ctx = mixp_context_new(&d);
    opt = new_sgd(ctx);
    for (i = 0; i < 2; i++) {
        p[i] = mixp_param(ctx, i ? "b" : "a", MIXP_F32, 1, n);
        mixp_optimizer_add(opt, p[i], NULL);
    }
    for (step = 0; step < 3 && mixp_context_error(ctx, NULL) == MIXP_OK; step++) {
        mixp_tensor *loss;
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        if (step && odd && goes_apart == 2) mixp_tensor_set_requires_grad(p[1], 0);
        loss = mixp_sum(ctx, step && goes_apart < 2 ? p[odd && goes_apart] : mixp_add(ctx, p[0], p[1]),
                        MIXP_ALL, 0);
        if (mixp_backward(ctx, loss) != MIXP_OK) break;
        if (odd && fails && step) kernels.update = no_update;
        if (mixp_optimizer_step(opt) != MIXP_OK) break;
        out->step = step;
    }
    out->code = mixp_context_error(ctx, &text);
    snprintf(out->text, sizeof out->text, "%s", text);
    memcpy(out->weights, p[0]->data, 1024);
    memcpy(out->weights + 1024, p[1]->data, 1024);
    out->done = 1;
    if (odd) AWAIT(out[-1].done);           /* its end tells nothing that it has not told */
    mixp_context_free(ctx);
    return ddp_wait(0);
}

static result *apart;
static int other_loss(const mixp_ranks_desc *ranks) { return two_steps(ranks, 1, 0, &apart[ranks->rank]); }
static int freezes_alone(const mixp_ranks_desc *ranks) { return two_steps(ranks, 2, 0, &apart[ranks->rank]); }
static int fails_in_a_step(const mixp_ranks_desc *ranks) { return two_steps(ranks, 0, 1, &apart[ranks->rank]); }

/* A loss of other parameters on each rank: what a rank leaves out counts as 0, in ranges of its own. */
static void other_parameters(void) {
    const float lr = (float)mixp_sgd_defaults().lr, want = 0.0f - lr - 0.5f * lr - 0.5f * lr;
    int r, i;
    apart = results();
    CHECK_INT(world_of(2, other_loss), 0);
    for (r = 0; r < 2; r++) {
        float weights[512];
        CHECK_TEXT(apart[r].code ? apart[r].text : "fine", "fine");
        CHECK_INT(apart[r].step, 2);
        memcpy(weights, apart[r].weights, sizeof weights);
        for (i = 0; i < 512; i++) CHECK_NEAR(weights[i], want, 1e-6 * lr);
    }
}

/* A parameter that one rank alone has frozen: no sum can tell, the step does, and nothing moves. */
static void frozen_on_one(void) {
    int r;
    apart = results();
    CHECK_INT(world_of(2, freezes_alone), 0);
    for (r = 0; r < 2; r++) {
        CHECK_INT(apart[r].code, MIXP_ERR_RANKS);
        CHECK_INT(apart[r].step, 0);
        CHECK_TEXT(apart[r].text, "ranks differ: other parameters have gradients on rank 1 than on rank 0");
        CHECK(memcmp(apart[r].weights, apart[0].weights, 2048) == 0);
    }
}

/* A rank whose step fails after all have agreed, and which lives on, says so: the other does not wait
 * until its time is up. */
static void a_step_that_fails(void) {
    apart = results();
    CHECK_INT(world_of(2, fails_in_a_step), 0);
    CHECK_INT(apart[1].code, MIXP_ERR_DEVICE);
    CHECK_INT(apart[0].code, MIXP_ERR_RANKS);
    CHECK_TEXT(apart[0].text, "rank 1 stopped: ");
}

/* --- a rank that is killed ---------------------------------------------------------------------- */

/* kill -9 of one of four ranks at some moment of a run of `steps`: the others end with an error, and
 * from the last checkpoint training ends with the bits of a run that nobody disturbed. Each other time
 * states are sharded, and all ranks have a part in the file. */
static void kill_once(int round, const result *want, const char *path) {
    plan p = plan_of(24);
    result *out = results();
    char torn[128];
    pid_t root;
    int victim = round % 4, r;
    p.checkpoint = path;
    p.shard = round % 2;
    p.scatter = p.shard * 2;
    p.max_norm = 0;                     /* scattered or not: the same bits */
    p.held = 1;                         /* however fast it is, not all is done before the kill */
    remove(path);
    root = start(&p, 4, out);
    AWAIT(out[0].step >= 2 + round * 7 % 18 || out[0].done);
    poll(NULL, 0, round * 3 % 5);
    CHECK(out[victim].step >= 0);
    if (out[victim].pid) kill(out[victim].pid, SIGKILL);
    for (r = 0; r < 4; r++) out[r].let_go = 1;
    for (r = 0; r < 4; r++) {
        if (r == victim) continue;
        AWAIT(out[r].done);
        CHECK_INT(out[r].done, 1);
        CHECK_INT(out[r].code, MIXP_ERR_RANKS);
        CHECK_TEXT(out[r].text, "is gone");
    }
    waitpid(root, NULL, 0);
    snprintf(torn, sizeof torn, ".%s.%d.0.tmp", path, (int)out[0].pid);
    remove(torn);                       /* of a save that was killed */
    p.held = 0;
    out = run(&p, 4);
    (p.scatter ? check_scattered : check_like)(out, 4, want);
    for (r = 0; r < 4; r++) CHECK(out[r].began >= 2);   /* it is a resumed run, not one from the start */
    remove(path);
}

static void kill_rounds(int rounds) {
    static result want;
    char path[64];
    plan p = plan_of(24);
    int i;
    p.max_norm = 0;
    snprintf(path, sizeof path, "ranks.%d.tmp", (int)getpid());
    want = run(&p, 4)[0];
    for (i = 0; i < rounds; i++) kill_once(i, &want, path);
}
static void killed_rank(void) {
    const char *rounds = getenv("RANKS_KILLS");     /* the long tests ask for 50 */
    kill_rounds(rounds ? atoi(rounds) : 5);
}

#ifndef RANKS_MPI           /* ranks_mpi.c has its own */
int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    RUN(two_ranks);
    RUN(four_ranks);
    RUN(ways_to_sum);
    RUN(narrow_wire);
    RUN(held_walks);
    RUN(recomputed);
    RUN(held_walks_that_differ);
    RUN(sharded);
    RUN(sharded_averages);
    RUN(sharded_evenly);
    RUN(sharded_load_memory);
    RUN(sharded_muon);
    RUN(sharded_forms);
    RUN(sharded_checkpoints);
    RUN(scattered);
    RUN(scattered_and_clipped);
    RUN(scattered_inf);
    RUN(planted_inf);
    RUN(spikes);
    RUN(own_gradients);
    RUN(guarded_sites);
    RUN(guarded_skips);
    RUN(guarded_to_the_end);
    RUN(refused_at_the_start);
    RUN(refused_later);
    RUN(any_hook_fails);
    RUN(dies_at_any_call);
    RUN(late_rank);
    RUN(descriptions);
    RUN(failing_hook);
    RUN(failing_view);
    RUN(norms_that_are_nearly_alike);
    RUN(buckets);
    RUN(wide_sums);
    RUN(other_version);
    RUN(unused_parameter);
    RUN(in_pieces);
    RUN(sums_of_yours);
    RUN(ends);
    RUN(asks_no_more);
    RUN(dies_telling);
    RUN(stands_still);
    RUN_LATER(long_sums);
    RUN(ignored_children);
    RUN(children_of_the_program);
    RUN(other_parameters);
    RUN(frozen_on_one);
    RUN(a_step_that_fails);
    RUN(killed_rank);
    return test_report();
}
#endif
