#pragma once
#include "../tensors.h"
#include "../macros.c"
#include "../cpu/float_mode.c"
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

/* A bump allocator, freed all at once. Pieces stay in the order they were made, and a request uses
 * the first piece with room. The same requests therefore get the same addresses again, and a loop
 * that repeats itself allocates nothing after its first round. */
typedef struct mixpi_arena {
    mixpi_piece *first;
    size_t       used;          /* bytes allocated since the last reset and not freed */
    int          on_device;
    int          turns;         /* 0, or the parts of each piece; a step uses one part */
    int          turn;          /* the part that the current step uses                     */
    struct mixpi_free *free;    /* buffers freed within the step                           */
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

typedef struct mixpi_watch mixpi_watch;
typedef struct mixpi_watcher mixpi_watcher;
typedef struct mixpi_recipes mixpi_recipes;
typedef struct mixpi_quantiser mixpi_quantiser;

enum { MIXPI_OPTIMIZER_BITS = 31 };     /* optimizers with their own bit; further ones share */
enum { MIXPI_BLOCK_NONE, MIXPI_BLOCK_RECORDED, MIXPI_BLOCK_NO_GRAD };  /* the block of
                                                                          mixp_recompute
                                                                          that is running    */

/* The parameters of a context, or its buffers. */
typedef struct mixpi_params {
    mixp_tensor **made;         /* `count` tensors, oldest first                           */
    mixp_tensor **named;        /* hash table of those with a name: 2 * room places; NULL = free */
    int64_t       count, room;  /* room: a power of 2; 0 = no memory yet                   */
} mixpi_params;

/* Unscaled f16 gradients of the last walk that met any; see walk/unscaled.c. */
typedef struct mixpi_unscaled {
    int    walks;               /* number of walks that met such gradients                 */
    int    met;                 /* 1: the current walk has met one                         */
    int    counts;              /* 1: the current walk counts them                         */
    double values, flushed;     /* counted: values that are not 0; estimate of the values flushed */
} mixpi_unscaled;

/* A buffer's record: see backups.c. */
typedef struct mixpi_backup {
    mixp_tensor *buffer;
    void        *data;          /* device memory: the buffer's bytes from before the window; NULL
                                   until a step writes the buffer                          */
    uint64_t     window;        /* the window whose first write filled data; 0 = none      */
    uint64_t     kept_in;       /* generation of that write                                */
    uint64_t     computed;      /* the last window that wrote computed values; 0 = none    */
    mixp_buffer_ranks ranks;
} mixpi_backup;

typedef struct mixpi_buffers {
    mixpi_params all;
    uint64_t window;            /* number of the current window                            */
    uint64_t first;             /* first window whose backups are valid                    */
    int      state;             /* MIXPI_OUTSIDE, ...                                      */
    int      retries;           /* 1: the program has called mixp_retry                    */
    const mixp_tensor *unbuffered;  /* a frozen parameter that a step of several ranks wrote */
    uint64_t sent;              /* hash of the shared buffers sent so far, in their order  */
    uint64_t failures;          /* errors.failures when the last step began                */
} mixpi_buffers;

/* The first error and the first warning; see errors.c. */
typedef struct mixpi_errors {
    mixp_result code;
    uint64_t reported;          /* errors reported so far                                  */
    uint64_t failures;          /* errors so far, reported or not                          */
    char     message[512];
    void   (*on_error)(mixp_result code, const char *message, void *user);
    char     warning[320];      /* "" = none                                               */
    void   (*on_warning)(const char *message, void *user);
    int      waits;             /* 1: on_error has not yet received the error              */
    int      warning_waits;     /* 1: on_warning has not yet received the warning          */
    int      depth;             /* nesting of calls: on_error waits for the outermost one  */
    mixpi_float_mode float_mode;    /* the caller's, from before the outermost call        */
} mixpi_errors;

/* Pieces and arenas; see memory.c.
 *
 *     pieces, permanent   |weights|masters|moments|backups|...   until the context is freed
 *     dev                 |activation|activation|.free.|...      until the next step; "free" is
 *                                                                taken again within the step
 *     records             |part 0|part 1|part 2|                 a step uses one part
 */
typedef struct mixpi_memory {
    mixpi_block *block;         /* source of host memory; NULL: an allocator               */
    mixpi_piece *pieces;        /* permanent memory                                        */
    mixpi_piece *scratch;       /* memory that exec.scratch hands out                      */
    mixpi_arena  host, dev, records;
    int64_t      allocations;
    size_t       permanent, peak;
    size_t       allocated;     /* bytes of all pieces of device memory                    */
} mixpi_memory;

/* Captures and replays; see context.c. */
typedef struct mixpi_capture {
    int         active;
    uint64_t    step;           /* the step count when the capture began                   */
    uint64_t    failures;       /* errors.failures when the capture began                  */
    mixp_graph *graphs;
    uint64_t    replays;        /* replays of graphs that change a loss scale on the device only */
    uint64_t    replayed;       /* the step count after the last replay                    */
    uint64_t    sites_moved;    /* incremented when a site changes the dtype that it stores */
    int         scale_moved;    /* 1: a loss scale changed since the last mixp_capture_begin */
    int         cast_recorded;  /* 1: since then, a low copy was renewed by a recorded kernel,
                                   which runs only at replays                              */
    int         update_recorded;    /* 1: since then, a step of an optimizer was recorded  */
} mixpi_capture;

/* The calls of this step; see ../tape. */
typedef struct mixpi_tape {
    mixpi_tape_entry *newest;
    mixpi_tape_entry *unrecorded;   /* calls of a block under MIXP_NO_GRAD, latest first   */
    int64_t     calls;          /* operators applied in this step, casts included          */
    int64_t     drawn;          /* calls of this step that drew random numbers: the next one's
                                   key, the same at each level and in each dtype           */
    int         in_block;       /* is a block of mixp_recompute running? MIXPI_BLOCK_...   */
    const char *tangent_of;     /* the operator whose tangent mixp_jvp makes; NULL: of none */
    int         inside;         /* operators and hooks now running: they may begin no step */
    uintptr_t   frame;          /* stack address of the outermost of them                  */
    int         refused;        /* 1: a step was refused because operators or hooks were running */
} mixpi_tape;

typedef struct mixpi_walk {
    int            running;     /* 1: a walk back is running                               */
    uint64_t       walked_in;   /* generation of the last walk back that succeeded         */
    mixpi_unscaled unscaled;
    int            f32_gradients;   /* the description's f32_gradients                     */
} mixpi_walk;

/* Scalers, optimizers and their updates; see ../step. */
typedef struct mixpi_training {
    void       *scalers, *optimizers;   /* all of them, latest first                       */
    uint64_t    updated_in;     /* generation of the last update of an optimizer           */
    int         scale_asked;    /* 1: the program has read or set a loss scale             */
    int         averaged;       /* optimizers whose averages are in the weights            */
    const void *tally_of;       /* optimizer whose counts are on their way to the host     */
} mixpi_training;

/* Counts of autocast, by which a graph knows that it is stale. */
typedef struct mixpi_low_copies {
    int64_t made;               /* low copies of permanent tensors made so far             */
    int64_t scaled_made;        /* states of delayed scaling made so far                   */
    int64_t regions;            /* regions of f16 or bf16 opened so far                    */
} mixpi_low_copies;

/* Choices of a GPU's products. */
typedef struct mixpi_products {
    int epilogues;              /* epilogues of the description                            */
    int narrow;                 /* narrow_products, and the device has them                */
} mixpi_products;

/* Permanent tensors, or scalers and optimizers, that every step makes are a mistake. */
typedef struct mixpi_made {
    uint64_t in;                /* generation in which the last one was made              */
    int      runs;              /* consecutive generations before it that made some        */
} mixpi_made;

struct mixp_context {
    const mixp_device *device;
    mixp_exec       exec;
    void           *user;       /* user pointer of the description                         */
    mixpi_errors    errors;
    mixpi_memory    memory;
    struct mixpi_pool *pool;    /* threads, started by the first parallel loop             */
    /* Where the program is. seed, step and tensors_made are here for files/list.c. */
    uint64_t        seed, step, generation;
    int64_t         tensors_made;   /* ids of permanent tensors                            */
    int             evaluates;  /* 1: the step began with mixp_eval_begin, which counts none */
    /* tensors */
    mixp_tensor    *tensors;    /* permanent tensors, latest first                         */
    mixpi_params    params;
    mixpi_buffers   buffers;
    mixpi_made      made, owners;   /* permanent tensors; scalers and optimizers           */
    /* the loop */
    mixpi_casting  *casting;    /* state of AUTOCAST, made at its first use                */
    mixpi_low_copies low_copies;
    mixpi_products  products;
    mixpi_tape      tape;
    mixpi_walk      walk;
    mixpi_training  training;
    mixpi_capture   capture;
    /* optional rooms */
    const mixpi_quantiser *quantiser;   /* functions of recipes; NULL: this build has none */
    mixpi_recipes  *recipes;    /* state of recipes; NULL: none was ever set               */
    const mixpi_watcher *watcher;   /* functions of the guard; NULL: this build has none   */
    mixpi_watch    *watch;      /* state of the guard; NULL: no guard was ever started     */
    const mixpi_crew *crew;     /* functions of the ranks; NULL: the context has no ranks  */
    mixp_ranks_desc *ranks;     /* their description, behind the context; zeros without ranks */
    int             place, world;   /* this rank, from 0, and the number of ranks, if crew is set */
    int             sharded;    /* 1: optimizers' states are sharded over the ranks         */
    mixpi_exchange *exchange;   /* exchange of gradients between the ranks, made at its first use */
    int             busy;       /* 1: the other ranks know that this rank works without them */
};

