/* harness.h - runs an everyday program in a mode, and holds the run to laws that need no expected value.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A run with a guard applies at least the steps that the same run without it applies, ends no worse, and
 * ends as f32 does; where no site falls back both have the same bits. Evaluations and buffers are finite
 * whenever those in f32 are. A step that is skipped, or tried again, leaves the bytes of weights and
 * buffers. Each event names a site that left its range: its weights and batch are run once more
 * in f32, without autocast, beside it. A resumed run, two ranks and replays have the bits of a plain run.
 */
#ifndef PROGRAMS_HARNESS_H
#define PROGRAMS_HARNESS_H
#include "all.h"

enum { SITES = 512, BLOCK = PROGRAMS_UNIT * (1 << 17) /* more than 16 times the numbers of a program */ };

/* --- a session ---------------------------------------------------------------------------- */

enum { RULES = 4, UNSCALED = 4 /* no rule of the matrix */ };

static mixp_scaler_desc rule_of(int rule) {
    mixp_scaler_desc d;
    memset(&d, 0, sizeof d);
    if (rule == 1) d.init_scale = 16777216.0f;              /* far too large at first */
    if (rule == 1) d.growth_interval = 20;
    if (rule == 2) d.rule = MIXP_RULE_PREDICTIVE;
    if (rule == 3) d.rule = MIXP_RULE_APEX_HYSTERESIS;
    if (rule == UNSCALED) d.disabled = 1;
    return d;
}

static int turns_of(const program *p) { return p->turns ? p->turns : 1; }
static int scalers_of(const program *p) { return p->scalers ? p->scalers : 1; }
static mixp_scaler *scaler_at(const session *s, const program *p, int turn)
{ return s->scaler[turn < scalers_of(p) ? turn : 0]; }

static void start_guard(session *s, int guard) {
    mixp_guard_desc d;
    memset(&d, 0, sizeof d);
    if (guard == 2) d.every = 5;
    if (guard == 2) d.clean = 1;
    if (guard == 3) d.every = 1;
    if (guard) mixp_guard_start(s->ctx, guard == 1 ? NULL : &d);
}

static void start_recipe(session *s, const mode *how) {
    mixp_recipe r;
    memset(&r, 0, sizeof r);
    r.kind = (mixp_recipe_kind)how->recipe;
    r.codes = how->codes;
    if (how->recipe) mixp_autocast_set_recipe(s->ctx, &r);
}

static session *session_open(const program *p, const mode *how, const mixp_device *device,
                             const mixp_ranks_desc *ranks) {
    session          *s = (session *)calloc(1, sizeof *s);
    mixp_context_desc c;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_scaler_desc  scaler = rule_of(how->rule);
    memset(&c, 0, sizeof c);
    c.device = device;
    c.ranks = ranks;
    c.threads = 1;
    c.seed = 11;
    c.narrow_products = how->narrow;
    s->how = *how;
    s->program = p;
    s->model = calloc(1, p->size);
    s->ctx = mixp_context_new(&c);
    mixp_autocast_set_level(s->ctx, how->level);
    start_recipe(s, how);
    adamw.lr = p->lr;
    for (int i = 0; i < turns_of(p); i++) s->opt[i] = mixp_optimizer_new(s->ctx, &adamw);
    for (int i = 0; i < scalers_of(p); i++) s->scaler[i] = mixp_scaler_new(s->ctx, &scaler);
    p->open(s);
    start_guard(s, how->guard);
    return s;
}

static void session_close(session *s) {
    mixp_context_free(s->ctx);
    free(s->model);
    free(s);
}

/* Tensor i of the state of a program, which is its weights and then its buffers; NULL past the last. */
static mixp_tensor *state_at(const session *s, int i) {
    return i < s->params ? s->param[i] : i - s->params < s->buffers ? s->buffer[i - s->params] : NULL;
}

/* The state, one tensor behind the other. Returns the number of its floats. */
static int state_read(const session *s, float *to) {
    mixp_tensor *t;
    int          n = 0;
    for (int i = 0; (t = state_at(s, i)) != NULL; i++) {
        if (n + t->count > BLOCK) abort();
        mixp_read(t, to + n, MIXP_F32, t->count);
        n += (int)t->count;
    }
    return n;
}
static void state_write(session *s, const float *from) {
    mixp_tensor *t;
    for (int i = 0; (t = state_at(s, i)) != NULL; i++, from += t->count)
        mixp_write(t, from, MIXP_F32, t->count);
}
static int weights_count(const session *s) {
    int n = 0;
    for (int i = 0; i < s->params; i++) n += (int)s->param[i]->count;
    return n;
}

/* --- a step -------------------------------------------------------------------------------- */

static mixp_tensor *forward(session *s, const program *p, int turn, int training) {
    mixp_tensor *loss = NULL;
    MIXP_AUTOCAST(s->ctx, s->how.dtype) loss = p->loss(s, turn, training);
    return loss;
}

static void fill_batch(session *s, const program *p, int step, int part) {
    reseed(s, step, part);
    p->batch(s);
}

/* Micro-batches first to last - 1 of a step that has `of` of them, each walked back, then the update. */
static void walks(session *s, const program *p, int turn, int step, int first, int last, int of) {
    mixp_scaler *scaler = scaler_at(s, p, turn);
    for (int part = first; part < last; part++) {
        if (!s->filled) fill_batch(s, p, step, part);
        mixp_step_begin(s->ctx);
        for (int i = 0; part == first && i < turns_of(p); i++) mixp_zero_grad(s->opt[i]);
        if (s->apart) mixp_ranks_hold(s->ctx, part + 1 < last);
        mixp_tensor *loss = forward(s, p, turn, 1);
        if (of > 1) loss = mixp_scale(s->ctx, loss, 1.0f / (float)of);
        mixp_backward(s->ctx, mixp_scaler_scale(scaler, loss));
        if (p->carry) MIXP_NO_GRAD(s->ctx) p->carry(s);
    }
    mixp_scaler_step(scaler, s->opt[turn]);
    mixp_scaler_update(scaler);
}

/* --- what a program makes in f32 ----------------------------------------------------------- */

/* How large a site's values and gradients are where nothing is rounded to a low dtype. */
typedef struct truth {
    char   site[128];
    double value, grad;             /* the largest                                               */
    double flushed, grad_flushed;   /* shares of what is not 0 that f16 would flush              */
    int    nonfinite;
} truth;

typedef struct truths {
    truth  site[SITES];
    int    n, loss_bad;
    double largest_input, scale;
    double grad;                    /* the largest gradient of all                               */
} truths;

static double worse(double a, double b) { return a > b ? a : b; }

static void truths_take(truths *t, mixp_context *ctx) {
    mixp_site_info info;
    for (int i = 0; i < SITES && mixp_site(ctx, i, &info); i++) {
        truth *at = &t->site[i];
        snprintf(at->site, sizeof at->site, "%s", info.name);
        at->value = worse(at->value, (double)info.value.largest);
        at->grad = worse(at->grad, info.grad.nonfinite ? HUGE_VAL : (double)info.grad.largest);
        at->flushed = worse(at->flushed, mixp_look_flushed(&info.value, 0));
        at->grad_flushed = worse(at->grad_flushed, mixp_look_flushed(&info.grad, 0));
        at->nonfinite |= info.value.nonfinite > 0;
        if (i >= t->n) t->n = i + 1;
    }
}

/* The weights' gradients, under the names that the weights give their sites. */
static void truths_of_weights(truths *t, const session *s) {
    static float g[BLOCK];
    for (int i = 0; i < s->params && t->n < SITES; i++) {
        const mixp_tensor *grad = s->param[i]->grad;
        truth             *at = &t->site[t->n];
        if (!grad) continue;
        mixp_read(grad, g, MIXP_F32, grad->count);
        snprintf(at->site, sizeof at->site, "%s: gradient", s->param[i]->name);
        for (int64_t k = 0; k < grad->count; k++) at->grad = worse(at->grad, fabs((double)g[k]));
        t->n++;
    }
}

/* A session in f32 without autocast, with a given state. */
static session *mirror_open(const program *p, int guard, const float *state) {
    mode     how;
    memset(&how, 0, sizeof how);
    how.dtype = MIXP_F32;
    how.guard = guard;
    session *f32 = session_open(p, &how, NULL, NULL);
    state_write(f32, state);
    return f32;
}

/* A step from a state, in f32, at a loss scale; dropout draws as in the step with the number `began`. */
static void truths_of_step(truths *t, const program *p, const float *state, int turn, int step,
                           int parts, float scale, uint64_t began) {
    session          *f32 = mirror_open(p, 3, state);
    mixp_param_group  still;
    mixp_scaler_desc  fixed;
    memset(t, 0, sizeof *t);
    memset(&fixed, 0, sizeof fixed);
    fixed.rule = MIXP_RULE_STATIC;
    fixed.init_scale = scale;
    f32->scaler[turn < scalers_of(p) ? turn : 0] = mixp_scaler_new(f32->ctx, &fixed);
    mixp_optimizer_group(f32->opt[turn], 0, &still);
    still.lr = 0;
    mixp_optimizer_set_group(f32->opt[turn], 0, &still);
    while (mixp_context_steps(f32->ctx) < began) mixp_step_begin(f32->ctx);
    for (int part = 0; part < parts; part++) {
        walks(f32, p, turn, step, part, part + 1, parts);
        t->loss_bad |= mixp_scaler_verdict(scaler_at(f32, p, turn)).loss_bad;
        truths_take(t, f32->ctx);
    }
    if (parts > 1) {
        state_write(f32, state);
        walks(f32, p, turn, step, 0, parts, parts);
    }
    truths_of_weights(t, f32);
    for (int i = 0; i < t->n; i++) t->grad = worse(t->grad, t->site[i].grad);
    t->largest_input = f32->largest_input;
    t->scale = (double)scale;
    session_close(f32);
}

/* The loss of a given state on batches that no step had, in f32. */
static double score_of(const program *p, const float *state) {
    session *f32 = mirror_open(p, 0, state);
    double   sum = 0;
    for (int i = 0; i < 4; i++) {
        mixp_step_begin(f32->ctx);
        fill_batch(f32, p, 1000000 + i, 0);
        MIXP_NO_GRAD(f32->ctx) sum += mixp_item(forward(f32, p, 0, 0)) / 4;
    }
    session_close(f32);
    return sum;
}

/* --- is an event true? ---------------------------------------------------------------------- */

/* Where in "x: cast" or "x: var" begins the name of an operator that rounds what other operators of x
 * made, which f32 does not; NULL: the site is another operator's. */
static const char *rounds(const char *site) {
    static const char *const names[] = { ": cast", ": logsumexp", ": var", ": std", ": vector_norm" };
    const char *at = NULL;
    for (int i = 0; i < 5 && !at; i++) at = strstr(site, names[i]);
    return at;
}

/* "x: add #2" begins as "x: add" does, and "x: cast" is of what x's operators made. */
static int same_site(const char *event, const char *site, int loose) {
    const char *number = strstr(event, " #"), *cast = rounds(event);
    size_t      n = !loose ? strlen(event) + 1 : cast ? (size_t)(cast - event) + 2
                           : number ? (size_t)(number - event) : strlen(event);
    return strncmp(event, site, n) == 0;
}

/* What f32 makes at the event's site; of sites that it knows by no such name, at those alike. */
static truth truth_of(const truths *t, const char *site) {
    truth all;
    int   found = 0;
    memset(&all, 0, sizeof all);
    snprintf(all.site, sizeof all.site, "%s", site);
    if (strncmp(site, "cast", 4) == 0 || strstr(site, "cast of input")) all.value = t->largest_input;
    for (int loose = 0; loose < 2 && !found; loose++)
        for (int i = 0; i < t->n; i++) {
            const truth *at = &t->site[i];
            if (!same_site(site, at->site, loose)) continue;
            found = 1;
            all.value = worse(all.value, at->value);
            all.grad = worse(all.grad, at->grad);
            all.flushed = worse(all.flushed, at->flushed);
            all.grad_flushed = worse(all.grad_flushed, at->grad_flushed);
            all.nonfinite |= at->nonfinite;
        }
    return all;
}

/* Is all of it subnormal in f16? Then a share that is estimated from few values is granted. */
static int tiny(double largest) { return largest > 0 && largest < (double)MIXP_F16_MIN; }

/* Rounding moves what is near a border: a tenth is granted, of gradients, which roundings of
 * all that came before move, a half. */
static int event_is_true(const mixp_event *e, const truths *t, const session *s) {
    const mixp_dtype low = s->how.dtype;
    const double max = low == MIXP_BF16 ? (double)MIXP_BF16_MAX : (double)MIXP_F16_MAX;
    const truth  at = truth_of(t, e->site);
    const double largest = e->of_gradient ? at.grad : at.value;
    switch (e->kind) {
    case MIXP_EVENT_OVERFLOW: return largest > (e->of_gradient ? 0.5 : 0.9) * max;
    case MIXP_EVENT_HIGH:     return largest > 0.9 * 0.25 * max;
    case MIXP_EVENT_FLUSHED:
        return worse(at.flushed, at.grad_flushed) > 0.9 * 0.02 || tiny(at.value) || tiny(at.grad);
    case MIXP_EVENT_BACK:     return at.value < 0.25 * max && at.grad < max;
    case MIXP_EVENT_IMPRECISE: return s->program->offset;
    case MIXP_EVENT_SKIP:
        if (e->origin == MIXP_ORIGIN_FORWARD) return at.value > 0.9 * max;
        if (e->origin == MIXP_ORIGIN_BACKWARD) return t->grad > 0.5 * max;
        if (e->origin == MIXP_ORIGIN_UNSCALE) return t->scale < 1;
        if (e->origin == MIXP_ORIGIN_INPUT || e->origin == MIXP_ORIGIN_WEIGHT) return t->loss_bad;
        return 1;
    default: return 1;
    }
}

/* --- a run ---------------------------------------------------------------------------------- */

typedef struct outcome {
    mixp_result error;
    char        why[256];
    int64_t     applied[TURNS], skipped[TURNS];
    double      score;              /* f32's loss of the last weights                            */
    int         bad_losses;         /* skipped steps whose loss was not finite                   */
    int         evaluations, bad_evaluations;   /* bad: not finite though f32's is               */
    int         events, falls, false_events;
    int         dives;              /* updates after which the scale is less than one backoff down   */
    char        first_false[512];
    int         touched;            /* skipped steps that have changed a weight or a buffer      */
    int         bad_buffers;        /* steps after which a buffer has an Inf or a NaN            */
    uint64_t    bits;               /* of weights and loss scales                                */
    uint64_t    kept, shared;       /* of all buffers, and of those that the ranks share         */
} outcome;

static void hash_in(uint64_t *h, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) *h = (*h ^ ((const unsigned char *)data)[i]) * 1099511628211u;
}

static void outcome_take(outcome *o, const session *s, const program *p, int scored) {
    static float state[BLOCK];
    const char  *why = "";
    o->error = mixp_context_error(s->ctx, &why);
    snprintf(o->why, sizeof o->why, "%s", why);
    mixp_context_clear_error(s->ctx);
    for (int i = 0; i < turns_of(p); i++) {
        mixp_verdict v = mixp_optimizer_verdict(s->opt[i]);
        o->applied[i] = v.applied;
        o->skipped[i] = v.skipped;
    }
    const float *at = state + weights_count(s);
    state_read(s, state);
    o->bits = o->kept = o->shared = 14695981039346656037u;
    hash_in(&o->bits, state, (size_t)weights_count(s) * sizeof(float));
    for (int i = 0; i < s->buffers; at += s->buffer[i++]->count) {
        const size_t bytes = (size_t)s->buffer[i]->count * sizeof(float);
        hash_in(&o->kept, at, bytes);
        if (s->shared[i]) hash_in(&o->shared, at, bytes);
    }
    for (int i = 0; i < scalers_of(p); i++) {
        float scale = mixp_scaler_loss_scale(s->scaler[i]);
        hash_in(&o->bits, &scale, sizeof scale);
    }
    if (scored) o->score = score_of(p, state);
}

/* Events from number `known` on, each beside what f32 makes. Returns how many there are. */
static int64_t events_take(outcome *o, const session *s, const truths *t, int64_t known) {
    mixp_event e;
    char       text[420];
    int64_t    last = known;
    for (int i = 0; mixp_guard_event(s->ctx, i, &e); i++) {
        if (e.number < known) continue;
        last = e.number + 1;
        o->events++;
        o->falls += e.kind != MIXP_EVENT_SKIP;
        if (!t || event_is_true(&e, t, s)) continue;
        if (!o->false_events++) {
            truth at = truth_of(t, e.site);
            snprintf(o->first_false, sizeof o->first_false,
                     "%s (f32: value %.3g, gradient %.3g at scale %g)",
                     mixp_event_text(&e, text, sizeof text), at.value, at.grad, t->scale);
        }
    }
    return last;
}
static int64_t events_count(const session *s, int64_t known) {
    mixp_event e;
    for (int i = 0; mixp_guard_event(s->ctx, i, &e); i++)
        if (e.number >= known) known = e.number + 1;
    return known;
}

/* Two batches, as people evaluate. */
static void evaluate(session *s, const program *p, outcome *o, int step) {
    static float state[BLOCK];
    for (int i = 0; i < 2; i++) {
        double loss = 0;
        mixp_step_begin(s->ctx);
        fill_batch(s, p, 2000000 + step + i, 0);
        MIXP_NO_GRAD(s->ctx) loss = mixp_item(forward(s, p, 0, 0));
        o->evaluations++;
        if (fabs(loss) < HUGE_VAL) continue;
        state_read(s, state);
        if (fabs(score_of(p, state)) < HUGE_VAL) o->bad_evaluations++;
    }
}

/* Notes what the last try of a step did to the state, which was `before`. */
static void note_state(outcome *o, const session *s, const float *before, int skipped) {
    static float after[BLOCK];
    const int    n = state_read(s, after);
    int          bad = 0;
    for (int i = weights_count(s); i < n; i++) bad |= !(fabs((double)after[i]) < HUGE_VAL);
    o->bad_buffers += bad;
    o->touched += skipped && memcmp(before, after, (size_t)n * sizeof(float)) != 0;
}

/* One step of one network, with its retries; every try is followed by what there is to be told of it. */
static void train(session *s, const program *p, outcome *o, int turn, int step, int64_t *known) {
    static float  before[BLOCK];
    static truths t;
    const int     parts = s->how.parts ? s->how.parts : p->parts ? p->parts : 1;
    mixp_scaler  *scaler = scaler_at(s, p, turn);
    do {
        const float    scale = s->how.guard ? mixp_scaler_loss_scale(scaler) : 1.0f;
        const uint64_t began = mixp_context_steps(s->ctx);
        state_read(s, before);
        walks(s, p, turn, step, 0, parts, parts);
        mixp_verdict verdict = mixp_scaler_verdict(scaler);
        o->dives += s->how.guard && mixp_scaler_loss_scale(scaler) < 0.4f * scale;
        note_state(o, s, before, verdict.outcome == MIXP_STEP_SKIPPED);
        o->bad_losses += verdict.outcome == MIXP_STEP_SKIPPED && verdict.loss_bad;
        if (s->how.guard && events_count(s, *known) > *known) {
            truths_of_step(&t, p, before, turn, step, parts, scale, began);
            *known = events_take(o, s, &t, *known);
        }
    } while (s->how.retry && mixp_retry(scaler, 3));
    if (p->after) p->after(s, turn);
}

/* What a checkpoint takes beside context, scaler and optimizers: a second scaler. */
typedef struct extras {
    mixp_checkpoint_value value;
    mixp_scaler_saved     second;
} extras;

static mixp_checkpoint checkpoint_of(session *s, const program *p, extras *x) {
    mixp_checkpoint c;
    memset(&c, 0, sizeof c);
    c.ctx = s->ctx;
    c.scaler = s->scaler[0];
    c.optimizers = s->opt;
    c.n_optimizers = turns_of(p);
    x->value.name = "scaler_2";
    x->value.dtype = MIXP_U8;
    x->value.count = sizeof x->second;
    x->value.data = &x->second;
    c.values = &x->value;
    c.n_values = scalers_of(p) > 1;
    return c;
}

static session *resumed(session *s, const program *p, const char *path) {
    extras          x;
    mixp_checkpoint c = checkpoint_of(s, p, &x);
    if (scalers_of(p) > 1) mixp_scaler_save(s->scaler[1], &x.second);
    mixp_checkpoint_save(path, &c);
    session *next = session_open(p, &s->how, mixp_context_device(s->ctx), NULL);
    memset(&x, 0, sizeof x);
    c = checkpoint_of(next, p, &x);
    mixp_checkpoint_load(path, &c);
    if (scalers_of(p) > 1) mixp_scaler_load(next->scaler[1], &x.second);
    remove(path);
    session_close(s);
    return next;
}

static int steps_of(const program *p, const mode *how)
{ return how->steps < 0 ? 0 : how->steps ? how->steps : p->steps ? p->steps : 60; }

static void run(const program *p, const mode *how, outcome *o) {
    char     path[64];
    session *s = session_open(p, how, NULL, NULL);
    int64_t  known = 0;
    memset(o, 0, sizeof *o);
    snprintf(path, sizeof path, "everyday_%ld.safetensors", (long)getpid());
    for (int step = 0; step < steps_of(p, how); step++) {
        if (how->cut && step == how->cut) s = resumed(s, p, path);
        for (int turn = 0; turn < turns_of(p); turn++) train(s, p, o, turn, step, &known);
        if (how->evaluate && step % how->evaluate == how->evaluate - 1) evaluate(s, p, o, step);
        if (mixp_context_error(s->ctx, NULL) != MIXP_OK) break;
    }
    outcome_take(o, s, p, 1);
    session_close(s);
}
#endif
