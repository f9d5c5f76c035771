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

typedef struct mixpi_watch mixpi_watch;
typedef struct mixpi_watcher mixpi_watcher;

enum { MIXPI_OPTIMIZER_BITS = 31 };     /* optimizers with their own bit; further ones share */
enum { MIXPI_BLOCK_NONE, MIXPI_BLOCK_RECORDED, MIXPI_BLOCK_NO_GRAD };  /* of mixp_recompute */

/* The parameters of a context, or its buffers. */
typedef struct mixpi_params {
    mixp_tensor **made;         /* `count` tensors, oldest first                           */
    mixp_tensor **named;        /* hash table of those with a name: 2 * room places; NULL = free */
    int64_t       count, room;  /* room: a power of 2; 0 = no memory yet                   */
} mixpi_params;

/* Unscaled f16 gradients of the newest walk that met any; see tape/walk.c. */
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
    mixp_buffer_ranks ranks;
} mixpi_backup;

typedef struct mixpi_buffers {
    mixpi_params all;
    uint64_t window;            /* number of the current window                            */
    uint64_t first;             /* first window whose backups are valid                    */
    int      state;             /* MIXPI_OUTSIDE, ...                                      */
    int      retries;           /* 1: the program has called mixp_retry                    */
} mixpi_buffers;

struct mixp_context {
    const mixp_device *device;
    mixp_exec          exec;
    mixp_result  error;
    uint64_t     told;          /* errors reported so far                                  */
    uint64_t     failures;      /* errors so far, reported or not                          */
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
    uint64_t     capture_failures;  /* `failures` when a capture began                     */
    int64_t      tensors_made;  /* ids of permanent tensors                                */
    int64_t      calls_made;    /* operators applied in this step: keys of their dropout   */
    int64_t      allocations;
    size_t       permanent, peak;
    size_t       allocated;     /* bytes of all pieces of device memory                    */
    mixpi_piece *pieces;        /* permanent memory                                        */
    mixpi_piece *scratch;       /* memory that exec.scratch hands out                      */
    mixpi_arena  host, dev, records;
    mixp_tensor *tensors;       /* permanent tensors, newest first                         */
    mixpi_params params;
    mixpi_buffers buffers;
    mixpi_casting *casting;     /* state of AUTOCAST, made at its first use                 */
    const mixpi_watcher *watcher;   /* door of the guard; NULL: this build has none        */
    mixpi_watch   *watch;       /* state of the guard; NULL: no guard was ever started     */
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
    mixpi_float_mode float_mode;    /* the caller's, from before the outermost call        */
    int            untold;      /* 1: on_error has not yet received the error              */
    int            scale_moved; /* 1: a loss scale changed since the newest mixp_capture_begin */
    int            cast_recorded; /* 1: since then, a low copy was renewed by a recorded kernel,
                                     which runs only at replays */
    int            update_recorded; /* 1: since then, a step of an optimizer was recorded  */
    const char    *tangent_of;  /* the operator whose tangent mixp_jvp makes; NULL: of none */
    int            in_block;    /* is a block of mixp_recompute running? MIXPI_BLOCK_...   */
    mixpi_tape_entry *unrecorded;   /* calls of a block under MIXP_NO_GRAD, newest first   */
    int            evaluates;   /* 1: the step began with mixp_eval_begin, which counts none */
    int            averaged;    /* optimizers whose averages are in the weights            */
    int64_t        lows_made;   /* low copies of permanent tensors made so far             */
    int64_t        scaled_made; /* states of delayed scaling made so far                   */
    const void    *tally_of;    /* optimizer whose counts are on their way to the host      */
    void          *scalers, *optimizers;    /* all of them, newest first                   */
    uint64_t       made_in;     /* generation in which the newest permanent tensor was made */
    uint64_t       walked_in;   /* generation of the newest walk back that succeeded       */
    uint64_t       updated_in;  /* generation of the newest update of an optimizer         */
    int            made_runs;   /* consecutive generations before made_in that made tensors */
    int            scale_asked; /* 1: the program has read or set a loss scale              */
    int            epilogues;   /* epilogues of the description                             */
    int            narrow;      /* narrow_products, and the device has them                 */
    int            wide_told;   /* 1: a warning has said that one stays a bf16 product      */
};

