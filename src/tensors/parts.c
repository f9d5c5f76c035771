#pragma once
#include "../tensors.h"
#include "../macros.c"
/* ==== 5. TENSORS (implementation) ===================================================== */

/* One block of memory from the allocator. Pieces form a list that the context frees. */
typedef struct mixpi_piece {
    struct mixpi_piece *next;
    void   *data;               /* device or host memory, 64-byte aligned                  */
    size_t  size;
    size_t  part;               /* bytes of an arena's piece that one step may use         */
    size_t  used;               /* bytes that an arena has handed out                      */
    int     from_device;        /* 0: record and data are one host allocation              */
    int     on_device;          /* 1: data counts as device memory                         */
    const void *owner;          /* object with which the piece is freed; NULL: the context */
} mixpi_piece;

/* A bump allocator, freed all at once. Pieces stay in the order they were made, and a request takes
 * the first piece with room. The same requests therefore get the same addresses again, and a loop
 * that repeats itself allocates nothing after its first round. */
typedef struct mixpi_arena {
    mixpi_piece *first;
    size_t       used;          /* bytes handed out since the last reset and not given back */
    int          on_device;
    int          turns;         /* 0, or the parts of each piece; a step uses one part */
    int          turn;          /* the part that the current step uses                     */
    struct mixpi_free *free;    /* buffers given back within the step                      */
} mixpi_arena;

/* Parts of the arena that holds the records of activations. A step never reuses the part of the
 * previous step, so a pointer from the previous step never names a tensor of the current step. A
 * context in the caller's own block has little memory and uses two parts. */
enum { MIXPI_RECORD_TURNS = 3, MIXPI_RECORD_TURNS_IN_BLOCK = 2 };

typedef struct mixpi_free {
    struct mixpi_free *next;
    void *data;
    size_t size;
} mixpi_free;
typedef struct mixpi_block mixpi_block;
typedef struct mixpi_tape_entry mixpi_tape_entry;
typedef struct mixpi_casting mixpi_casting;
typedef struct mixpi_exchange mixpi_exchange;
typedef struct mixpi_crew mixpi_crew;
typedef mixp_tensor *(*mixpi_tensor_fn)(mixp_context *ctx, void *user);

/* Rows of device memory that collect the looks of a sampled step. The rows of the sites follow. */
enum {
    MIXPI_ROW_BACKWARD,         /* all gradients so far, of activations and of leaves */
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
                                   the variation over the batch; see watch/precision.c */
    MIXPI_LOOKS
};

enum {
    MIXPI_SITE_NAME = 96, MIXPI_SITE_FROM = 4, MIXPI_SITE_STATES = 4, MIXPI_MAX_PINS = 64,
    MIXPI_MAX_EVENTS = 1024,
    MIXPI_OPTIMIZER_BITS = 31,  /* optimizers with their own bit; further ones share bits */
    MIXPI_SITE_COUNT = 1 << 30  /* limit at which the counts of a site stop, far from an overflow */
};

/* State of one site under the guard. TAPE finds the site, AUTOCAST reads its dtype, WATCH
 * decides. */
typedef struct mixpi_site {
    uint64_t     hash;          /* hash of operator, scope and inputs; 0: slot unused */
    uint64_t     tensors;       /* hash of the tensors that it read when last applied */
    uint64_t     pass;          /* watch->pass when last applied */
    uint64_t     weights;       /* hash of the operator and the trained permanent tensors that it
                                   reads; 0: it reads none */
    int          next;          /* number of the next site in the same bucket; 0 = none */
    int          from[MIXPI_SITE_FROM]; /* numbers of the sites that it reads */
    int          turn;          /* position in its step when last sampled (1 = first) */
    int          stores;        /* 1: it owns its memory, and that memory holds real numbers */
    int          scalar;        /* 1: its result has one element */
    int          casts;         /* 1: autocast casts its inputs */
    int          carries;       /* 1: it stores f32 if its inputs are f32 */
    int          changed;       /* samples begun when its state changed; older ones do not count */
    mixp_dtype   dtype, low;    /* dtype it stored; dtype it would store without a fallback (low
                                   MIXP_F32: f32 in any case) */
    mixp_dtype   around;        /* the region's low dtype, for the look */
    int32_t      fallen;        /* 1: it stores f32; 2: it also reads f32 */
    int32_t      falls, clean;
    int32_t      for_grad;      /* 1: it fell back because its gradient was too large */
    int          pinned;        /* 0: no; 1: pinned to f32; 2: pinned to low */
    int          pin_told;      /* 1: an event has reported the pin */
    int          inspected;     /* newest sample that measured its precision */
    int32_t      imprecise;     /* 1: it fell back because rounding lost too much */
    double       lost;          /* share of the variation that rounding lost in the newest sample,
                                   on the rank that lost most; 0: not measured */
    int          verdict;       /* MIXPI_SAW_... bits from the sample being settled */
    int64_t      samples;
    mixp_tensor *read[2];       /* permanent tensors that it reads */
    mixp_look    value, grad;
    const char  *op;
    char         name[MIXPI_SITE_NAME];
} mixpi_site;

typedef struct mixpi_pin {
    char       pattern[MIXPI_SITE_NAME];
    mixp_dtype dtype;
    int        fits;            /* 1: a site with a fitting name exists */
} mixpi_pin;

/* State of the guard in one context, from mixp_guard_start on. Sites are numbered from 1. A window
 * is the steps between two updates. A probe is a sampled step that stores f32 everywhere. */
typedef struct mixpi_watch {
    int         on;             /* 0: stopped */
    int         sampled;        /* 1: the current step is sampled */
    int         begun;          /* samples so far */
    int         fresh;          /* number of the unread sample in rows; 0 = none */
    int         posted;         /* number of the sample on its way to the host; 0 = none */
    int         looked;         /* 1: a sample that walked back was settled since the update */
    int         whole;          /* 1: all walks of the newest update were sampled */
    int         settled;        /* 1: at least one sample was settled */
    int32_t     acted;          /* 1: a site fell back since the last skip */
    int32_t     falls;          /* number of fallbacks so far */
    int32_t     drawn;          /* sampled updates so far: key of the distance to the next one */
    void       *comparing;      /* state of a running mixp_compare, which stops sampling */
    int         turns;          /* sites to which this sample has stored */
    int32_t     force;          /* bits of optimizers whose newest step was skipped: all steps are
                                   sampled until their next update */
    int32_t     deep;           /* bits of optimizers whose newest skip had a loss that was not
                                   finite */
    int32_t     probe;          /* bits of optimizers whose last two skips had a loss that was not
                                   finite: their sampled steps are probes until their next update */
    int         repeat;         /* 1: the next step stores f32 everywhere: an evaluation repeats */
    int         repeated;       /* 1: the newest evaluation was a repetition */
    int         probing;        /* 1: the current step stores f32 everywhere */
    int         probed;         /* 1: a step since the update stored f32 everywhere and walked
                                   back */
    int         fresh_probe, posted_probe;  /* 1: the sample in rows is a probe; the sample on its
                                               way to the host is a probe */
    int         settling_probe; /* 1: the sample being settled is a probe */
    int         settling_bad;   /* 1: the loss of the sample being settled is not finite */
    int32_t     since;          /* updates since the newest sampled update, inclusive */
    int32_t     idle;           /* steps begun since the newest update or sampled step */
    int         in_turn;        /* 1: the next update is due to be sampled */
    int32_t     taken;          /* 1: a step since the update was sampled */
    int32_t     missed;         /* 1: a walk of an update that was due was not sampled */
    int32_t     window;         /* steps begun since the update */
    int         walked;         /* 1: a step of the window walked back */
    int         unseen;         /* 1: a step of the window walked back unsampled */
    int32_t     forced;         /* consecutive updates with `force` set */
    int32_t     met;            /* bits of optimizers that have updated under the guard */
    int32_t     barren[MIXPI_OPTIMIZER_BITS];   /* for each optimizer: consecutive skips that began
                                                   in the forward pass and that no fallback cured */
    int         every, clean, patience, capacity, n_sites, n_buckets;
    int         most_sites;     /* max_sites */
    int         filled;         /* sites whose rows a sample may have written */
    float       high, low_again, flushed, imprecise;
    int32_t     inspect_all;    /* 1: the next sample measures the precision of all sites */
    uint64_t    rows_step;      /* step whose sample is in rows */
    uint64_t    posted_step, event_step, updated_step;
    size_t      posted_bytes;   /* size of the sample on its way to the host */
    mixp_look  *rows, *seen;    /* looks in device memory; the host's copy */
    mixp_look  *row;            /* device memory for mixp_look_at, made at its first use */
    int64_t    *bins;           /* device memory: exponent histogram of each site; or NULL */
    int         counting;       /* 1: sampled steps fill bins */
    mixpi_site *sites;
    int        *buckets;
    uint64_t    pass;           /* incremented by each step and each walk back */
    mixpi_pin  *pins;
    int         n_pins;
    int         full, full_told;/* 1: a site found no room; 1: an event has reported it */
    int origin, found;  /* mixp_origin of the newest skip; mixp_origin found since the update */
    int         origin_site, found_site;
    const void *posted_scaler;  /* scaler whose state is on its way to the host */
    int32_t     posted_bits;    /* bits of the optimizers of the posted update */
    int64_t    *hashes;         /* for checkpoints: hashes of the sites, and their states */
    int32_t    *states;
    mixpi_happening *events;
    int64_t     n_events;
    int64_t     first_event;    /* number of the first event since a checkpoint was loaded */
    mixp_result (*settle)(mixp_context *ctx);   /* set by WATCH; called when a step begins */
    mixp_result (*updating)(mixp_context *ctx);     /* called before a scaler's update */
    mixp_result (*updated)(mixp_context *ctx, void *scaler);    /* called after an update; scaler
                                                                   NULL: a step without a scaler */
    void      (*tap)(mixp_context *ctx, int site, const mixp_tensor *t, int backward);
} mixpi_watch;

/* Unscaled f16 gradients of the newest walk that met any; see tape/walk.c. */
typedef struct mixpi_unscaled {
    int    walks;               /* number of walks that met such gradients                 */
    int    met;                 /* 1: the current walk has met one                         */
    int    counts;              /* 1: the current walk counts them                         */
    double values, flushed;     /* counted: values that are not 0; estimate of the values flushed */
} mixpi_unscaled;

struct mixp_context {
    const mixp_device *device;
    mixp_exec          exec;
    mixp_result  error;
    uint64_t     told;          /* errors reported so far                                  */
    char         message[512];
    void       (*on_error)(mixp_result code, const char *message, void *user);
    char         warning[320];  /* the first warning; "" = none                            */
    void       (*on_warning)(const char *message, void *user);
    int          unwarned;      /* 1: on_warning has not yet received the warning          */
    mixpi_unscaled unscaled;
    void        *user;          /* user pointer of the description                         */
    mixpi_block *block;         /* source of host memory; NULL: an allocator               */
    uint64_t     seed, step, generation;
    uint64_t     capture_step;  /* the step count when a capture began                     */
    int64_t      tensors_made;  /* ids of permanent tensors                                */
    int64_t      calls_made;    /* operators applied in this step: keys of their dropout   */
    int64_t      allocations;
    size_t       permanent, peak;
    size_t       allocated;     /* bytes of all pieces of device memory                    */
    mixpi_piece *pieces;        /* permanent memory                                        */
    mixpi_piece *scratch;       /* memory that exec.scratch hands out                      */
    mixpi_arena  host, dev, records;
    mixp_tensor *tensors;       /* permanent tensors, newest first                         */
    mixpi_casting *casting;     /* state of AUTOCAST, made at its first use                 */
    mixpi_watch   *watch;       /* NULL: no guard was ever started */
    struct mixpi_pool *pool;    /* threads, started by the first parallel loop             */
    /* tape */
    mixpi_tape_entry *tape;     /* newest first                                            */
    mixp_graph    *graphs;
    const mixpi_crew *crew;     /* door of the ranks; NULL: the context has no ranks       */
    mixp_ranks_desc  ranks;     /* set if crew is                                           */
    mixpi_exchange *exchange;  /* exchange of gradients between the ranks, made at its first use */
    uint64_t       replays;     /* replays of graphs that change a loss scale on the device only */
    uint64_t       replayed;    /* the step count after the newest replay */
    uint64_t       sites_moved; /* incremented when a site changes the dtype that it stores */
    int            capturing;
    int            busy;        /* 1: the other ranks know that this rank works without them */
    int64_t        drawn;       /* operator calls that applied dropout                     */
    int64_t        regions_low; /* regions of f16 or bf16 opened so far                    */
    int            inside;      /* operators and hooks now running: they may begin no step */
    uintptr_t      frame;       /* stack address of the outermost of them                  */
    int            refused;     /* 1: a step was refused because operators or hooks were running */
    int            walking;     /* 1: a walk back is running                               */
    int            depth;       /* nesting of calls: on_error waits for the outermost one  */
    int            untold;      /* 1: on_error has not yet received the error              */
    int            scale_moved; /* 1: a loss scale changed since the newest mixp_capture_begin */
    int            cast_recorded; /* 1: since then, a low copy was renewed by a recorded kernel,
                                     which runs only at replays */
    int            update_recorded; /* 1: since then, a step of an optimizer was recorded  */
    int            in_block;    /* 1: a block of mixp_recompute is running                 */
    int            evaluates;   /* 1: the step began with mixp_eval_begin, which counts none */
    int            averaged;    /* optimizers whose averages are in the weights            */
    int64_t        lows_made;   /* low copies of permanent tensors made so far             */
    const void    *tally_of;    /* optimizer whose counts are on their way to the host      */
    void          *scalers, *optimizers;    /* all of them, newest first                   */
    uint64_t       made_in;     /* generation in which the newest permanent tensor was made */
    uint64_t       walked_in;   /* generation of the newest walk back that succeeded       */
    uint64_t       updated_in;  /* generation of the newest update of an optimizer         */
    int            made_runs;   /* consecutive generations before made_in that made tensors */
    int            scale_asked; /* 1: the program has read or set a loss scale              */
    int            epilogues;   /* epilogues of the description                             */
};

