#pragma once
#include "../optimizers/add.c"
#include "../tensors/quantiser.c"
#include "safetensors.c"
/* --- checkpoints: the list of what must survive --------------------------------------------- */

/* Condition that a number of a file must meet before it is accepted. */
typedef enum mixpi_must {
    MIXPI_ANY,
    MIXPI_FINITE,
    MIXPI_AT_LEAST_0,           /* finite, and at least 0                                  */
    MIXPI_BETA,                 /* at least 0 and below 1                                  */
    MIXPI_SCALE,                /* a loss scale that can be divided by                     */
    MIXPI_SCALE_OR_0,           /* such a scale, or 0 for none                             */
    MIXPI_COUNTER,              /* at least 0. 64 bits: small enough that counting on cannot
                                   overflow. 32 bits: any, because these counts saturate */
    MIXPI_FLAG,                 /* 0 or 1                                                  */
    MIXPI_AMAX,                 /* at least 0, or Inf                                      */
    MIXPI_ABOVE_0,              /* and finite                                              */
    MIXPI_LOSSY                 /* 0 to 2^30 - 1                                           */
} mixpi_must;

/* The structure that contains a number. */
typedef enum mixpi_owner {
    MIXPI_OF_CONTEXT, MIXPI_OF_SCALER, MIXPI_OF_OPTIMIZER, MIXPI_OF_GROUP,
    /* Present only if the scaler's rule predicts, or if spikes are skipped. If the file lacks them,
     * they keep their initial values; a program that does not use them ignores them. */
    MIXPI_OF_PREDICTION,
    MIXPI_OF_SPIKE,
    MIXPI_OF_WATCH,
    MIXPI_OF_FORGIVEN,          /* present with a scaler under a guard */
    MIXPI_OF_ADAGRAD,           /* present with a group of that kind */
    MIXPI_OF_NADAM
} mixpi_owner;

/* A number that a checkpoint must hold. %d in its name: the optimizer, then its group. */
typedef struct mixpi_field {
    mixpi_owner owner;
    const char *name;
    size_t      offset;
    mixp_dtype  dtype;
    mixpi_must  must;
    size_t      limit;          /* offset of the count that limits this count; 0 = none */
} mixpi_field;

#define MIXPI_FIELD_CONTEXT(member, dtype, must) \
    { MIXPI_OF_CONTEXT, "mixprec." #member, offsetof(mixp_context, member), dtype, must, 0 }
#define MIXPI_FIELD_SCALER(member, dtype, must) \
    { MIXPI_OF_SCALER, "scaler." #member, offsetof(mixp_scaler_state, member), dtype, must, 0 }
#define MIXPI_FIELD_SCALER_PART(member, dtype, of) \
    { MIXPI_OF_SCALER, "scaler." #member, offsetof(mixp_scaler_state, member), dtype, \
      MIXPI_COUNTER, offsetof(mixp_scaler_state, of) }
#define MIXPI_FIELD_OPTIMIZER(member) \
    { MIXPI_OF_OPTIMIZER, "optimizer.%d." #member, offsetof(mixp_step_state, member), \
      MIXP_I64, MIXPI_COUNTER, 0 }
#define MIXPI_FIELD_PREDICTION(member) \
    { MIXPI_OF_PREDICTION, "scaler.prediction." #member, \
      offsetof(mixp_scaler_state, member), MIXP_F32, MIXPI_AT_LEAST_0, 0 }
#define MIXPI_FIELD_FORGIVEN(member, dtype, must) \
    { MIXPI_OF_FORGIVEN, "mixprec.guard." #member, offsetof(mixp_scaler_state, member), \
      dtype, must, 0 }
#define MIXPI_FIELD_SPIKE(name, member, dtype, of) \
    { MIXPI_OF_SPIKE, "optimizer.%d.spike." name, \
      offsetof(mixp_step_state, spike) + offsetof(mixp_spike_state, member), dtype, \
      MIXPI_COUNTER, offsetof(mixp_step_state, of) }
#define MIXPI_FIELD_OF_KIND(kind, member, dtype, must) \
    { kind, "optimizer.%d.group.%d." #member, offsetof(mixp_param_group, member), dtype, must, 0 }
#define MIXPI_FIELD_GROUP(member, dtype, must) \
    MIXPI_FIELD_OF_KIND(MIXPI_OF_GROUP, member, dtype, must)

static const mixpi_field mixpi_fields[] = {
    MIXPI_FIELD_FORGIVEN(forgiven, MIXP_I32, MIXPI_COUNTER),
    MIXPI_FIELD_FORGIVEN(forgiven_at, MIXP_I32, MIXPI_COUNTER),
    MIXPI_FIELD_FORGIVEN(ahead, MIXP_F32, MIXPI_SCALE_OR_0),
    MIXPI_FIELD_CONTEXT(step, MIXP_I64, MIXPI_COUNTER),
    MIXPI_FIELD_CONTEXT(seed, MIXP_I64, MIXPI_ANY),
    MIXPI_FIELD_CONTEXT(tensors_made, MIXP_I64, MIXPI_COUNTER),
    MIXPI_FIELD_SCALER(scale, MIXP_F32, MIXPI_SCALE),
    MIXPI_FIELD_SCALER(growth_tracker, MIXP_I32, MIXPI_COUNTER),
    MIXPI_FIELD_SCALER(hysteresis_left, MIXP_I32, MIXPI_COUNTER),
    MIXPI_FIELD_SCALER_PART(floor_skips, MIXP_I32, skips),
    MIXPI_FIELD_SCALER(updates, MIXP_I64, MIXPI_COUNTER),
    MIXPI_FIELD_SCALER_PART(skips, MIXP_I64, updates),
    MIXPI_FIELD_OPTIMIZER(steps),
    MIXPI_FIELD_OPTIMIZER(applied),
    MIXPI_FIELD_OPTIMIZER(skipped),
    MIXPI_FIELD_PREDICTION(largest),
    MIXPI_FIELD_PREDICTION(peak),
    MIXPI_FIELD_SPIKE("norms", entered[0], MIXP_I64, applied),
    MIXPI_FIELD_SPIKE("losses", entered[1], MIXP_I64, applied),
    MIXPI_FIELD_SPIKE("in_a_row", in_a_row, MIXP_I32, skipped),
    MIXPI_FIELD_GROUP(lr, MIXP_F64, MIXPI_AT_LEAST_0),
    MIXPI_FIELD_GROUP(beta1, MIXP_F64, MIXPI_BETA),
    MIXPI_FIELD_GROUP(beta2, MIXP_F64, MIXPI_BETA),
    MIXPI_FIELD_GROUP(eps, MIXP_F64, MIXPI_AT_LEAST_0),
    MIXPI_FIELD_GROUP(weight_decay, MIXP_F64, MIXPI_AT_LEAST_0),
    MIXPI_FIELD_GROUP(momentum, MIXP_F64, MIXPI_AT_LEAST_0),
    MIXPI_FIELD_GROUP(dampening, MIXP_F64, MIXPI_FINITE),
    MIXPI_FIELD_GROUP(nesterov, MIXP_I32, MIXPI_FLAG),
    MIXPI_FIELD_OF_KIND(MIXPI_OF_ADAGRAD, lr_decay, MIXP_F64, MIXPI_AT_LEAST_0),
    MIXPI_FIELD_OF_KIND(MIXPI_OF_NADAM, momentum_decay, MIXP_F64, MIXPI_AT_LEAST_0)
};

#undef MIXPI_FIELD_CONTEXT
#undef MIXPI_FIELD_SCALER
#undef MIXPI_FIELD_SCALER_PART
#undef MIXPI_FIELD_OPTIMIZER
#undef MIXPI_FIELD_PREDICTION
#undef MIXPI_FIELD_SPIKE
#undef MIXPI_FIELD_GROUP
#undef MIXPI_FIELD_OF_KIND

/* A tensor or a number that a checkpoint must hold, and its address. */
typedef struct mixpi_state_item {
    mixp_st_entry e;            /* saving: address of the value; loading: the file's data */
    void         *memory;
    int           on_device;
    int           optional;     /* 1: a file may lack it                                */
    int           absent;       /* 1: the file lacks it; it starts with zeros           */
    mixpi_must    must;
    int         (*is_good)(const struct mixpi_state_item *item);    /* instead of must, or NULL */
    const void   *limit;        /* address of the count that limits it, or NULL            */
    mixp_tensor  *weight;       /* the tensor, if it is a weight; otherwise NULL           */
    const mixp_optimizer *lent; /* optimizer of a state in borrowed memory; otherwise NULL      */
    int64_t       row;          /* and its parameter's number                              */
    mixpi_st_item *from;        /* tensor of the file that a weight is loaded from; NULL = none  */
    int           added;        /* 1: of a parameter that a partial load does not find: kept  */
    int           elsewhere;    /* 1: of another rank's buffer: a load reads it, and leaves it */
} mixpi_state_item;

/* The list of all items. With items NULL, a walk only counts items and the bytes of their names. */
typedef struct mixpi_state {
    mixpi_report     *report;
    mixp_context     *ctx;
    mixpi_state_item *items;
    size_t            n_items;
    char             *names;
    size_t            names_used, names_size;
    const mixp_weights_desc *some;      /* selection and prefix of the weights; NULL = all */
    char             *own;      /* saving: the other ranks' own buffers, see mixpi_state_add_own */
    int               fresh;    /* loading: 1: own buffers keep their bytes                */
    int               partial;  /* loading: 1: parameters may have been added or removed   */
    int              *groups;   /* loading: the file's number of each group: see groups.c; NULL =
                                   the program's own numbers                               */
} mixpi_state;

static int mixpi_is_of_group(mixpi_owner owner) {
    return owner == MIXPI_OF_GROUP || owner == MIXPI_OF_ADAGRAD || owner == MIXPI_OF_NADAM;
}

/* An item of n elements. */
static mixpi_state_item mixpi_state_array(mixp_dtype dtype, int64_t n, void *memory) {
    mixpi_state_item item = MIXPI_ZERO;
    item.e.dtype = dtype;
    item.e.rank = 1;
    item.e.shape[0] = n;
    item.e.bytes = (size_t)n * mixp_dtype_size(dtype);
    item.memory = memory;
    return item;
}

static mixpi_state_item mixpi_state_number(const mixpi_field *field, void *base) {
    mixpi_state_item item = MIXPI_ZERO;
    item.e.dtype = field->dtype;
    item.e.bytes = mixp_dtype_size(field->dtype);
    item.memory = (char *)base + field->offset;
    item.on_device = field->owner != MIXPI_OF_CONTEXT && field->owner != MIXPI_OF_WATCH &&
                     !mixpi_is_of_group(field->owner);
    item.optional = field->owner == MIXPI_OF_PREDICTION || field->owner == MIXPI_OF_SPIKE ||
                    field->owner == MIXPI_OF_WATCH || field->owner == MIXPI_OF_FORGIVEN;
    item.must = field->must;
    if (field->limit) item.limit = (const char *)base + field->limit;
    return item;
}

/* An item with a parameter's shape: the parameter itself, or one of its moments. */
static mixpi_state_item mixpi_state_tensor(const mixp_tensor *t, mixp_dtype dtype, void *memory) {
    mixpi_state_item item = MIXPI_ZERO;
    item.e.dtype = dtype;
    item.e.rank = t->rank;
    memcpy(item.e.shape, t->shape, sizeof t->shape);
    item.e.bytes = (size_t)t->count * mixp_dtype_size(dtype);
    item.memory = memory;
    item.on_device = 1;
    return item;
}

/* A value of the caller: a scalar if it has one element, otherwise a vector. */
static mixpi_state_item mixpi_state_value(const mixp_checkpoint_value *value) {
    mixpi_state_item item = mixpi_state_array(value->dtype, value->count, value->data);
    if (value->count > 1) return item;
    item.e.rank = 0;
    item.e.shape[0] = 0;
    return item;
}

static void mixpi_state_add(mixpi_state *s, mixpi_state_item item, const char *name, ...) {
    char *to = s->items ? s->names + s->names_used : NULL;
    va_list args;
    va_start(args, name);
    int n = vsnprintf(to, to ? s->names_size - s->names_used : 0, name, args);
    va_end(args);
    s->names_used += (size_t)n + 1;
    item.e.name = to;
    item.e.data = item.memory;
    if (s->items) s->items[s->n_items] = item;
    s->n_items++;
}

static void mixpi_state_add_field(
    mixpi_state *s, const mixpi_field *field, void *base, int optimizer, int group) {
    mixpi_state_add(s, mixpi_state_number(field, base), field->name, optimizer, group);
}

static void mixpi_state_add_fields(
    mixpi_state *s, mixpi_owner owner, void *base, int optimizer, int group) {
    for (size_t i = 0; i < MIXPI_LENGTH(mixpi_fields); i++)
        if (mixpi_fields[i].owner == owner)
            mixpi_state_add_field(s, &mixpi_fields[i], base, optimizer, group);
}

/* The scales of a moment that is stored in blocks. */
static mixpi_state_item mixpi_state_scales(const mixp_param_row *row, uint8_t *scales) {
    mixpi_state_item item = mixpi_state_array(MIXP_F8_E8M0, mixpi_state_blocks(row), scales);
    item.on_device = 1;
    return item;
}

/* A master weight. The 16 or 8 bits besides a bf16 weight are not a number by themselves. */
static mixpi_state_item mixpi_state_master(const mixp_tensor *p, const mixp_param_row *row) {
    mixpi_state_item item = mixpi_state_tensor(p, row->master_dtype, row->master);
    if (row->master_dtype != MIXP_BF16) return item;
    item.e.dtype = MIXPI_OPAQUE;
    item.e.type = "U16";
    return item;
}

/* The number of applied steps that left a parameter unchanged. */
static mixpi_state_item mixpi_state_missed(const mixp_optimizer *opt, const mixp_param_row *row) {
    static const mixpi_field missed = { MIXPI_OF_OPTIMIZER, "", 0, MIXP_I64, MIXPI_COUNTER, 0 };
    mixpi_state_item item = mixpi_state_number(&missed, row->missed);
    item.limit = &opt->state->applied;
    return item;
}

static void mixpi_state_add_row(
    mixpi_state *s, const mixp_optimizer *opt, int64_t i, int optimizer) {
    const mixp_tensor *p = opt->slot[i].param;
    const mixp_param_row *row = &opt->rows[i];

    /* The moments; those of 8 bits have scales. */
    if (row->m)
        mixpi_state_add(s, mixpi_state_tensor(p, row->m_dtype, row->m), "optimizer.%d.m.%s",
            optimizer, p->name);
    if (row->m_scale)
        mixpi_state_add(s, mixpi_state_scales(row, row->m_scale), "optimizer.%d.m_scale.%s",
            optimizer, p->name);

    if (row->v)
        mixpi_state_add(s, mixpi_state_tensor(p, row->v_dtype, row->v), "optimizer.%d.v.%s",
            optimizer, p->name);
    if (row->v_scale)
        mixpi_state_add(s, mixpi_state_scales(row, row->v_scale), "optimizer.%d.v_scale.%s",
            optimizer, p->name);

    /* The master weight, the kind's other states, and the average. */
    if (row->master)
        mixpi_state_add(
            s, mixpi_state_master(p, row), "optimizer.%d.master.%s", optimizer, p->name);
    if (row->third)
        mixpi_state_add(s, mixpi_state_tensor(p, MIXP_F32, row->third),
            opt->plan.amsgrad ? "optimizer.%d.max_v.%s" : "optimizer.%d.mean.%s", optimizer,
            p->name);
    if (i < opt->ema_count)
        mixpi_state_add(s, mixpi_state_tensor(p, MIXP_F32, opt->slot[i].ema), "optimizer.%d.ema.%s",
            optimizer, p->name);
    mixpi_state_add(s, mixpi_state_missed(opt, row), "optimizer.%d.missed.%s", optimizer, p->name);
}

/* The history with which an optimizer that skips spikes compares its steps. */
static void mixpi_state_add_spike(mixpi_state *s, mixp_optimizer *opt, int number) {
    mixp_checkpoint_value window = { NULL, MIXP_F64, 0, NULL };
    if (!opt->plan.spike.of) return;
    window.count = (int64_t)opt->plan.spike.window * MIXPI_SPIKE_KINDS;
    window.data = opt->plan.spike_window;
    mixpi_state_item item = mixpi_state_value(&window);
    item.on_device = 1;
    item.optional = 1;
    item.must = MIXPI_FINITE;
    mixpi_state_add(s, item, "optimizer.%d.spike.window", number);
    mixpi_state_add_fields(s, MIXPI_OF_SPIKE, opt->state, number, 0);
}

/* Marks the items from number `from` on, of a parameter whose states this rank does not hold: their
 * memory is borrowed, see ranks/lent_states.c. Each rank has memory for all averages of weights. */
static void mixpi_state_lend(mixpi_state *s, const mixp_optimizer *opt, int64_t i, size_t from) {
    for (; from < s->n_items; from++) {
        mixpi_state_item *item = &s->items[from];
        if (i < opt->ema_count && item->memory == opt->slot[i].ema) continue;
        item->on_device = 0;
        item->lent = opt;
        item->row = i;
    }
}

static void mixpi_state_add_optimizer(mixpi_state *s, mixp_optimizer *opt, int number) {
    mixpi_state_add_fields(s, MIXPI_OF_OPTIMIZER, opt->state, number, 0);
    for (int g = 0; g < opt->plan.n_groups; g++) {
        const int there = s->groups ? s->groups[number * MIXP_MAX_GROUPS + g] : g;
        mixp_param_group *group = &opt->plan.groups[g];
        mixpi_state_add_fields(s, MIXPI_OF_GROUP, group, number, there);
        if (opt->plan.kind == MIXP_OPTIMIZER_ADAGRAD)
            mixpi_state_add_fields(s, MIXPI_OF_ADAGRAD, group, number, there);
        if (opt->plan.kind == MIXP_OPTIMIZER_NADAM)
            mixpi_state_add_fields(s, MIXPI_OF_NADAM, group, number, there);
    }
    for (int64_t i = 0; i < opt->count; i++) {
        size_t item = s->n_items;
        mixpi_state_add_row(s, opt, i, number);
        if (s->items && !mixpi_is_own(opt, i)) mixpi_state_lend(s, opt, i, item);
    }
    mixpi_state_add_spike(s, opt, number);
}

/* May the file have this name although the program has no use for it? */
static int mixpi_is_optional_name(const char *name) {
    if (strncmp(name, "mixprec.guard.", 14) == 0) return 1;
    if (strncmp(name, "scaler.prediction.", 18) == 0) return 1;

    /* "optimizer.0.spike.window" and "optimizer.0.ema.w", but not a parameter's
     * "optimizer.0.m.spike.w". */
    if (strncmp(name, "optimizer.", 10) != 0) return 0;
    name += 10;
    name += strspn(name, "0123456789");
    return strncmp(name, ".spike.", 7) == 0 || strncmp(name, ".ema.", 5) == 0;
}

/* Does a checkpoint hold this tensor? It holds a view while any optimizer trains the view. */
static int mixpi_is_weight(const mixp_tensor *t) {
    return t->own.is_param || t->own.backup || t->own.optimizers > 0;
}

static int mixpi_is_private(const mixp_tensor *t) {
    return t->own.backup && t->own.backup->ranks == MIXP_BUFFER_OWN;
}

/* Have several ranks each their own bytes of t? */
static int mixpi_is_of_rank(const mixp_tensor *t) {
    return mixpi_is_private(t) && mixpi_world(t->ctx) > 1;
}

/* Bytes of the own buffers of one rank; 0: no rank has own buffers, or the run has one rank. */
static size_t mixpi_own_bytes(const mixp_context *ctx) {
    size_t bytes = 0;
    for (int64_t i = 0; i < ctx->buffers.all.count; i++) {
        const mixp_tensor *t = ctx->buffers.all.made[i];
        if (mixpi_is_of_rank(t)) bytes += mixpi_round_up(mixpi_bytes(t));
    }
    return bytes;
}

static const char mixpi_rank_prefix[] = "mixprec.rank.";

static int mixpi_is_rank_name(const char *name) {
    return strncmp(name, mixpi_rank_prefix, sizeof mixpi_rank_prefix - 1) == 0;
}

/* Is this name in a file that of an own buffer of any rank? */
static int mixpi_is_private_name(const mixp_context *ctx, const char *name) {
    const mixp_tensor *t = mixp_context_find(ctx, name);
    return mixpi_is_rank_name(name) || (t && mixpi_is_private(t));
}

/* Own buffers: rank 0's has the buffer's name, rank 2's is "mixprec.rank.2.NAME". */
static void mixpi_state_add_own(mixpi_state *s) {
    char *at = s->own;
    for (int rank = 1; rank < (int)mixpi_world(s->ctx); rank++)
        for (int64_t i = 0; i < s->ctx->buffers.all.count; i++) {
            mixp_tensor *t = s->ctx->buffers.all.made[i];
            mixpi_state_item item = mixpi_state_tensor(t, t->dtype, t->data);
            if (!mixpi_is_of_rank(t)) continue;
            item.on_device = !at;
            item.elsewhere = rank != mixpi_place(s->ctx);
            item.weight = t;
            if (at) item.memory = at;
            if (at) at += mixpi_round_up(mixpi_bytes(t));
            mixpi_state_add(s, item, "%s%d.%s", mixpi_rank_prefix, rank, t->name);
        }
}

static int mixpi_is_chosen(const mixp_weights_desc *some, const char *name) {
    return !some || !some->pattern || mixpi_pattern_fits(some->pattern, name, strlen(name));
}

/* Adds all items: the same list for saving, checking and loading. what NULL: weights only. */
static void mixpi_state_add_all(mixpi_state *s, const mixp_checkpoint *what) {
    const mixpi_watcher *watcher = mixpi_watcher_of(s->ctx);
    const mixpi_quantiser *quantiser = mixpi_quantiser_of(s->ctx);
    s->n_items = s->names_used = 0;

    /* Weights and buffers. */
    for (mixp_tensor *t = s->ctx->tensors; t; t = t->own.next) {
        if (!mixpi_is_weight(t) || !mixpi_is_chosen(s->some, t->name)) continue;
        if (s->fresh && mixpi_is_private(t)) continue;
        if (what && what->only_trained && t->own.is_param && !t->own.optimizers) continue;
        mixpi_state_item item = mixpi_state_tensor(t, t->dtype, t->data);
        item.weight = t;
        if (what) item.elsewhere = mixpi_is_of_rank(t) && mixpi_place(s->ctx) > 0;
        mixpi_state_add(
            s, item, "%s%s", s->some && s->some->prefix ? s->some->prefix : "", t->name);
    }

    if (!what) return;

    /* Add the states beside them. */
    if (!s->fresh) mixpi_state_add_own(s);
    mixpi_state_add_fields(s, MIXPI_OF_CONTEXT, s->ctx, 0, 0);
    int guarded = watcher && watcher->items(s);
    if (quantiser) quantiser->items(s);
    for (int i = 0; i < what->n_values; i++)
        mixpi_state_add(s, mixpi_state_value(&what->values[i]), "value.%s", what->values[i].name);

    /* The scaler and the optimizers. */
    if (what->scaler && !what->scaler->desc.disabled)
        mixpi_state_add_fields(s, MIXPI_OF_SCALER, what->scaler->state, 0, 0);
    if (what->scaler && what->scaler->rule.predicts && !what->scaler->desc.disabled)
        mixpi_state_add_fields(s, MIXPI_OF_PREDICTION, what->scaler->state, 0, 0);
    if (what->scaler && guarded && !what->scaler->desc.disabled)
        mixpi_state_add_fields(s, MIXPI_OF_FORGIVEN, what->scaler->state, 0, 0);
    for (int i = 0; i < what->n_optimizers; i++)
        mixpi_state_add_optimizer(s, what->optimizers[i], i);
}

static int mixpi_state_by_name(const void *a, const void *b) {
    const mixpi_state_item *x = (const mixpi_state_item *)a, *y = (const mixpi_state_item *)b;
    return strcmp(x->e.name, y->e.name);
}

/* Makes the list in new memory, sorted by name: a first walk counts, a second walk fills. s->groups
 * is set. */
static void mixpi_state_list(mixpi_state *s, mixpi_report *r, mixp_context *ctx,
    const mixp_checkpoint *what, const mixp_weights_desc *some) {
    const int fresh = s->fresh, partial = s->partial;
    char *own = s->own;
    int *groups = s->groups;

    memset(s, 0, sizeof *s);
    s->groups = groups;
    s->report = r;
    s->ctx = ctx;
    s->some = some;
    s->own = own;
    s->fresh = fresh;
    s->partial = partial;

    /* A first pass counts; the second fills. */
    mixpi_state_add_all(s, what);
    s->names_size = s->names_used;
    s->names = (char *)mixpi_st_allocate(r, ctx, s->names_size, 1);
    s->items = (mixpi_state_item *)mixpi_st_allocate(r, ctx, s->n_items, sizeof s->items[0]);
    if (!s->items) return;
    mixpi_state_add_all(s, what);

    /* Sorted by name, so that two of one name are neighbours. */
    qsort(s->items, s->n_items, sizeof s->items[0], mixpi_state_by_name);
    for (size_t i = 1; i < s->n_items; i++)
        if (mixpi_state_by_name(&s->items[i - 1], &s->items[i]) == 0)
            mixpi_report_fail(
                r, MIXP_ERR_ARGUMENT, "two tensors have the name '%.60s'", s->items[i].e.name);
}

static void mixpi_state_free(mixpi_state *s) {
    mixpi_st_free(s->ctx, s->names);
    mixpi_st_free(s->ctx, s->items);
    mixpi_st_free(s->ctx, s->groups);
}
