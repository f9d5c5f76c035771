/* model.h - a model, its plan, and runs on one rank and on several.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
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
    for (int i = 0; i < PARAMS; i++) {
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
    for (int i = 0; i < n; i++) {
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
    for (int i = 0; i < PARAMS; i++) mixp_optimizer_add(model_optimizer(m, i), m->p[i], NULL);
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
    for (int i = 0; m->ctx && i < PARAMS; i++) {
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
    out->bytes = 0;
    result_weights(out, m);
    for (int i = 0; ema && i < 2; i++) {
        model_swap(m);
        result_weights(out, m);
    }
    out->code = mixp_context_error(m->ctx, &text);
    snprintf(out->text, sizeof out->text, "%s", text);
    out->verdict = mixp_scaler_verdict(m->scaler);
    snprintf(out->bad_tensor, sizeof out->bad_tensor, "%s",
             out->verdict.bad_tensor ? out->verdict.bad_tensor : "");
    out->scale = mixp_scaler_loss_scale(m->scaler);
    for (int i = 0; i < 64 && mixp_site(m->ctx, i, &site); i++) out->fallen |= (uint64_t)(site.fallen != 0) << i;
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
            mixp_step_begin(m.ctx);
            mixp_ranks_hold(m.ctx, walk < p->walks - 1);
            m.planted = (ranks->rank == p->plant_rank ||
                         (p->plant_more && ranks->rank > p->plant_rank)) &&
                        (step == p->plant_step || (p->guard_pins && step > p->plant_step));
            if (p->guard) m.factor = m.planted && !p->guard_backward ? 3e6f : 1.0f;
            if (p->guard && !p->guard_backward) m.planted = 0;
            mixp_tensor *loss = model_loss(&m, step, rows * (walk * ranks->size + ranks->rank), rows);
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
    fflush(stdout);
    pid_t root = fork();
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
    model m;
    model_open(&m, p, NULL, ODD_NOT);
    mixp_optimizer *forget = new_sgd(m.ctx);
    for (int i = 0; i < PARAMS; i++) {
        mixp_optimizer_add(model_optimizer(&m, i), m.p[i],
                           mixp_view(m.ctx, "", p->dtype, m.p[i]->rank, m.p[i]->shape, views[i]));
        mixp_optimizer_add(forget, m.p[i], NULL);
    }
    if (p->ema) model_averages(&m);
    for (int step = 0; step < p->steps; step++) {
        memset(sum, 0, sizeof sum);
        for (int part = 0; part < parts; part++) {
            mixp_step_begin(m.ctx);
            mixp_zero_grad(forget);
            m.planted = step == p->plant_step && part % size == p->plant_rank;
            mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, model_loss(&m, step, rows * part, rows)));
            for (int i = 0; i < PARAMS; i++) {
                mixp_read(m.p[i]->grad, one, MIXP_F32, m.p[i]->count);
                for (int k = 0; k < m.p[i]->count; k++) {
                    const float before = p->mean == MIXP_MEAN_BEFORE ? factor : 1.0f;
                    const volatile float product = one[k] * before;     /* never joined with the sum */
                    float x = product;
                    if (low) x = mixp_f32_from_bf16(mixp_bf16_from_f32(x));
                    sum[i][k] = part ? sum[i][k] + x : x;
                }
            }
        }
        for (int i = 0; i < PARAMS; i++) {
            float after = p->mean == MIXP_MEAN_AFTER ? factor : 1.0f;
            for (int k = 0; k < m.p[i]->count; k++) {
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
