#pragma once
#include "../watch.h"
#include "../operators/cast.c"
/* --- the state of the guard ------------------------------------------------------------------ */

/* Rows of device memory that collect the looks of a sampled step. The rows of the sites follow. */
enum {
    MIXPI_ROW_WIDE,             /* all f32 gradients so far, of activations and of leaves */
    MIXPI_ROW_NARROW,           /* all f16 and bf16 gradients so far */
    MIXPI_ROW_WEIGHT,           /* a weight that is under suspicion */
    MIXPI_ROW_SITES
};

typedef struct mixpi_happening mixpi_happening;     /* an event, as WATCH stores it */

enum {                          /* the rows of one site */
    MIXPI_LOOK_VALUE,           /* the values that the site stored */
    MIXPI_LOOK_GRAD,            /* the gradient of the site */
    MIXPI_LOOK_LEAF,            /* the gradients of leaves that the site wrote */
    MIXPI_LOOK_DATA,            /* the batch: inputs that come from no site and no parameter */
    MIXPI_LOOK_LOSS,            /* two floats: mean square of the rounding error, and mean square of
                                   the variation over the batch; see watch/precision.c. Then, from a
                                   device, the mixp_losses of a linear's operands. Of attention,
                                   which has neither: a look at the log-sum-exp of scores */
    MIXPI_LOOKS
};

enum {
    MIXPI_SITE_NAME = 96, MIXPI_SITE_FROM = 4, MIXPI_SITE_STATES = 4, MIXPI_MAX_PINS = 64,
    MIXPI_MAX_EVENTS = 1024,
    MIXPI_FIRST_EVENTS = 16,    /* events for which there is memory at first; it doubles */
    MIXPI_SITE_CHUNK = 16,      /* sites of one allocation; their addresses never change */
    MIXPI_LOSSY_FALLS = 511,    /* limit of the fallbacks of an operand */
    MIXPI_LOSSY_CLEAN = (1 << 20) - 1,  /* limit of its clean samples */
    MIXPI_SITE_COUNT = 1 << 30  /* limit at which the counts of a site stop, far from an overflow */
};

/* Reasons of a fallback that the values of a site do not show. Checkpoints contain these bits. */
enum {
    MIXPI_FELL_GRAD_LARGE = 1,  /* the gradient was too large */
    MIXPI_FELL_IMPRECISE = 2,   /* rounding lost too much */
    MIXPI_FELL_GRAD_FLUSHED = 4,    /* the gradient was flushed to zero */
    MIXPI_FELL_GRAD = MIXPI_FELL_GRAD_LARGE | MIXPI_FELL_GRAD_FLUSHED,
    MIXPI_FELL_ANY = MIXPI_FELL_GRAD | MIXPI_FELL_IMPRECISE
};

/* State of one site under the guard. TAPE finds the site, AUTOCAST reads its dtype, WATCH
 * decides. */
typedef struct mixpi_site {
    uint64_t     hash;          /* hash of operator, scope and inputs; 0: slot unused */
    uint64_t     tensors;       /* hash of the tensors that it read when last applied */
    uint64_t     pass;          /* watch->pass when last applied */
    uint64_t     weights;       /* hash of the operator and the trained permanent tensors that it
                                   reads; 0: it reads none */
    int          first;         /* number of the first site in the bucket of this record's place;
                                   0 = none: the records hold the hash table as well */
    int          next;          /* number of the next site in the same bucket; 0 = none */
    int          from[MIXPI_SITE_FROM]; /* numbers of the sites that it reads */
    int          reader;        /* of autocast's cast of a tensor that no site made, such as the
                                   batch: the number of the site that reads the cast; otherwise 0 */
    int          place;         /* position in its step when last sampled (1 = first) */
    int          stores;        /* 1: it owns its memory, and that memory holds real numbers */
    int          scalar;        /* 1: its result has one element */
    float        written;       /* magnitude of a constant that the operator wrote to its result, or
                                   mixp_full to an input: Inf counts as no overflow; 0 = none */
    int          casts;         /* 1: autocast casts its inputs */
    int          carries;       /* 1: it stores f32 if its inputs are f32 */
    int          changed;       /* samples begun when its state changed; older ones do not count */
    mixp_dtype   dtype, low;    /* dtype it stored; dtype it would store without a fallback (low
                                   MIXP_F32: f32 in any case) */
    mixp_dtype   around;        /* the region's low dtype, for the look */
    int32_t      fallen;        /* 1: the site stores f32; 2: it also reads f32 */
    int32_t      falls, clean;
    int32_t      why;           /* MIXPI_FELL_... bits */
    int          pinned;        /* 0: no; 1: pinned to f32; 2: pinned to low */
    int          pin_reported;      /* 1: an event has reported the pin */
    int          inspected;     /* last sample that measured its precision */
    double       lost;          /* share of the variation that rounding lost in the last sample,
                                   on the rank that lost most; 0: not measured */
    int          verdict;       /* MIXPI_SAW_... bits from the sample being settled */
    int64_t      samples;
    mixpi_lossy  operands[MIXPI_ROLES];
    mixp_tensor *read[2];       /* permanent tensors that the site reads */
    mixp_look    value, grad;
    float        scores;        /* of attention: the largest log-sum-exp in the last sample */
    const char  *op;
    int          traits;        /* traits of its operator: see watch/traits.c */
    char         name[MIXPI_SITE_NAME];
} mixpi_site;

typedef struct mixpi_pin {
    char       pattern[MIXPI_SITE_NAME];
    mixp_dtype dtype;
    int        fits;            /* 1: a site with a fitting name exists */
} mixpi_pin;

/* State of the guard in one context, from mixp_guard_start on. Sites are numbered from 1. A window
 * is the steps between two updates. A probe is a sampled step that stores f32 everywhere. */
struct mixpi_watch {
    int         on;             /* 0: stopped */
    int         sampled;        /* 1: the current step is sampled */
    int         begun;          /* samples so far */
    int         fresh;          /* number of the unread sample in rows; 0 = none */
    int         posted;         /* number of the sample on its way to the host; 0 = none */
    int         looked;         /* 1: a sample that walked back was settled since the update */
    int         whole;          /* 1: all walks of the last update were sampled */
    int         settled;        /* 1: at least one sample was settled */
    int32_t     acted;          /* 1: a site fell back since the last skip */
    int32_t     falls;          /* number of fallbacks so far */
    int32_t     drawn;          /* sampled updates so far: key of the distance to the next one */
    mixp_observer observer;     /* zeros: none */
    uint64_t    trial_step;     /* the context's step when the trial began */
    int         stored;         /* sites to which this sample has stored */
    int32_t     force;          /* bits of optimizers whose last step was skipped: all steps are
                                   sampled until their next update */
    int32_t     deep;           /* bits of optimizers whose last skip had a loss that was not
                                   finite */
    int32_t     probe;          /* bits of optimizers whose last two skips had a loss that was not
                                   finite: their sampled steps are probes until their next update */
    int         repeat;         /* 1: the next step stores f32 everywhere: an evaluation repeats */
    int         repeated;       /* 1: the last evaluation was a repetition */
    int         probing;        /* 1: the current step stores f32 everywhere */
    int         probed;         /* 1: a step since the update stored f32 everywhere and walked
                                   back */
    int         fresh_probe, posted_probe;  /* 1: the sample in rows is a probe; the sample on its
                                               way to the host is a probe */
    int         settling_probe; /* 1: the sample being settled is a probe */
    int         settling_bad;   /* 1: the loss of the sample being settled is not finite */
    int32_t     since;          /* updates since the last sampled update, inclusive */
    int32_t     idle;           /* steps begun since the last update or sampled step */
    int         update_due;     /* 1: the next update is due to be sampled */
    int32_t     taken;          /* 1: a step since the update was sampled */
    int32_t     missed;         /* 1: a walk of an update that was due was not sampled */
    int32_t     window;         /* steps begun since the update */
    int         walked;         /* 1: a step of the window walked back */
    int         unseen;         /* 1: a step of the window walked back unsampled */
    int32_t     forced;         /* consecutive updates with `force` set */
    int32_t     met;            /* bits of optimizers that have updated under the guard */
    int32_t     barren[MIXPI_OPTIMIZER_BITS];   /* for each optimizer: consecutive skips that began
                                                   in the forward pass and that no fallback cured */
    int         every, clean, patience, n_sites;
    int         capacity;       /* most sites that may be entered; 0: no memory was taken yet */
    int         most_sites;     /* max_sites */
    int         room;           /* sites for which there is memory: whole chunks */
    int         n_buckets;      /* largest power of two up to room */
    int         rows_room;      /* sites for which rows and seen have memory */
    int         events_room;    /* events for which there is memory */
    int         packed, packed_room;    /* rows of hashes and states; rows that have memory */
    int         filled;         /* sites whose rows a sample may have written */
    float       high, low_again, flushed, imprecise;
    int32_t     inspect_all;    /* 1: the next sample measures the precision of all sites */
    uint64_t    rows_step;      /* step whose sample is in rows */
    uint64_t    posted_step, event_step, updated_step;
    size_t      posted_bytes;   /* size of the sample on its way to the host */
    mixp_look  *rows, *seen;    /* looks in device memory; the host's copy */
    mixpi_site **sites;         /* chunks of the table of sites */
    uint64_t    pass;           /* incremented by each step and each walk back */
    int         reader, input;  /* the site whose input autocast is about to cast, and which input;
                                   0 = autocast casts nothing */
    mixpi_pin  *pins;
    int         n_pins;
    int         full, full_reported;/* 1: a site found no room; 1: an event has reported it */
    int origin, found;  /* mixp_origin of the last skip; mixp_origin found since the update */
    int         overflowed;     /* first site that overflowed since the update; 0 = none      */
    int         origin_site, found_site;
    const void *posted_scaler;  /* scaler whose state is on its way to the host */
    int32_t     posted_bits;    /* bits of the optimizers of the posted update */
    int64_t    *hashes;         /* for checkpoints, made at the first: hashes of the sites, and
                                   their states */
    int32_t    *states;
    int32_t    *operands;       /* for checkpoints: states of operands, [packed, MIXPI_ROLES] */
    mixpi_happening *events;
    int64_t     n_events;
    int64_t     first_event;    /* number of the first event since a checkpoint was loaded */
};

static size_t mixpi_rows_bytes(int sites) {
    return (MIXPI_ROW_SITES + (size_t)sites * MIXPI_LOOKS) * sizeof(mixp_look);
}

/* Number of sites whose rows may not be zero. A sample costs what its sites cost. */
static int mixpi_rows_to_clear(const mixpi_watch *w) {
    return w->n_sites > w->filled ? w->n_sites : w->filled;
}

static int mixpi_guard_is_on(const mixp_context *ctx) { return ctx->watch && ctx->watch->on; }

/* Distance in updates to the next sample: about `every`. The distance varies because a constant
 * even distance would always hit the same one of two networks that train alternately. */
static int mixpi_watch_distance(const mixpi_watch *w) {
    const uint64_t h = ((uint64_t)(uint32_t)w->drawn + 1u) * 0x9E3779B97F4A7C15u;
    const int part = w->every / 4;
    if (w->every == 1) return 1;
    if (!part) return w->every + (int)(h >> 63);
    return w->every - part + (int)((h >> 33) % (2u * (unsigned)part + 1u));
}

/* Must the guard sample the next update? All ranks agree. */
static int mixpi_update_is_due(const mixpi_watch *w) {
    return w->force || w->since >= mixpi_watch_distance(w);
}

/* Must the next step be sampled? Every step of an update that is due is sampled. Steps without an
 * update, as in an evaluation, are sampled about once in `every` steps, as often as updates are. Of
 * many steps that walk nothing back only one is sampled, unless the walk after them was missed
 * before. Ranks count updates only, because one rank may evaluate on its own. */
static int mixpi_watch_is_due(const mixp_context *ctx) {
    const mixpi_watch *w = ctx->watch;
    const int blank = w->taken && !w->walked && !w->missed && !w->force;
    if (mixpi_world(ctx) > 1) return mixpi_update_is_due(w);
    if (w->idle >= w->every - 1) return 1;
    return mixpi_update_is_due(w) && !blank && w->window < 64;
}

/* A hash, of 53 bits, of the guard's settings and of whether the guard has looked since the update.
 * Ranks combine their looks only if the hash is the same on all ranks. 0: the guard is off. */
MIXPI_SELDOM
static uint64_t mixpi_guard_mark(const mixp_context *ctx) {
    const mixpi_watch *w = ctx->watch;
    uint64_t words[6];
    if (!mixpi_guard_is_on(ctx)) return 0;
    words[0] = (uint64_t)w->every << 32 | (uint32_t)w->clean;
    words[1] = (uint64_t)(uint32_t)w->patience << 32 | (uint32_t)w->most_sites;
    words[2] = (uint64_t)mixp_bits_of_f32(w->high) << 32 | mixp_bits_of_f32(w->low_again);
    words[3] = (uint64_t)mixp_bits_of_f32(w->imprecise) << 32 | mixp_bits_of_f32(w->flushed);
    words[4] = w->fresh != 0;
    words[5] = w->probing != 0;
    return (mixpi_hash(1469598103934665603u, words, sizeof words) >> 11) | 1u;
}

/* Is the current step sampled? mixp_step_begin decides; without a guard the answer is 0. */
static int mixpi_context_is_sampled(const mixp_context *ctx) {
    return ctx->watch && ctx->watch->sampled;
}

static int mixpi_pin_fits(const mixpi_pin *pin, const char *name) {
    const char *end = strstr(name, ": ");
    if (mixpi_pattern_fits(pin->pattern, name, strlen(name))) return 1;
    return end && mixpi_pattern_fits(pin->pattern, name, (size_t)(end - name));
}

/* Pins a site according to the last pattern that fits. */
static void mixpi_site_pin(mixpi_watch *w, mixpi_site *site) {
    int i, was = site->pinned;
    site->pinned = 0;
    for (i = 0; i < w->n_pins; i++) {
        mixp_dtype to = w->pins[i].dtype;
        if (!mixpi_pin_fits(&w->pins[i], site->name)) continue;
        w->pins[i].fits = 1;
        site->pinned = to == MIXP_F32 ? 1 : to == MIXP_DTYPE_COUNT ? 0 : 2;
    }
    if (site->pinned != was) site->pin_reported = 0;
}

/* Does the site's own state make it store f32? */
static int mixpi_site_stays_f32(const mixpi_site *site) {
    if (!site || site->pinned == 2) return 0;
    return site->pinned == 1 || site->fallen;
}

/* Must the site store f32 in this step? */
static int mixpi_site_holds_f32(const mixp_context *ctx, const mixpi_site *site) {
    if (site && site->pinned != 2 && ctx->watch->probing) return 1;
    return mixpi_site_stays_f32(site);
}

/* Does a result of this class become f32 if an input was raised to f32? Yes for classes that only
 * pass values on or add them. */
static int mixpi_class_carries(mixp_op_class cls) {
    return cls == MIXP_CLASS_KEEP || cls == MIXP_CLASS_PROMOTE;
}

/* The dtype in which a result is stored under a guard. plain: autocast's choice. */
static mixp_dtype mixpi_guarded_dtype(const mixp_context *ctx, const mixpi_site *site,
    mixp_op_class cls, int n, mixp_tensor *const *in, mixp_dtype plain) {
    if (!mixpi_is_low(plain)) return plain;
    if (mixpi_site_holds_f32(ctx, site)) return MIXP_F32;

    /* An input that was raised to f32 raises the result, unless a pin forbids it. */
    int raised = 0;
    for (int i = 0; i < n; i++) raised |= in[i] && in[i]->own.watch.raised != MIXP_F32;
    if (site && site->pinned == 2) return plain;
    return raised && mixpi_class_carries(cls) ? MIXP_F32 : plain;
}
