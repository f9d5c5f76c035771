#pragma once
#include "../optimizers.h"
#include "../cpu/passes.c"
#include "../tensors/crew.c"
#include "../scaler.c"
/* ==== 10. OPTIMIZERS (implementation) ================================================== */

/* A parameter on the host. Kernels see the row with the same index. */
typedef struct mixpi_slot {
    mixp_tensor *param;
    mixp_tensor *grad;          /* the caller's view, or a copy of it; NULL: use param->grad */
    mixp_tensor *from;          /* the caller's view, of which grad is a copy that
                                   mixp_optimizer_feed fills; or NULL                      */
    int          fed;           /* 1: grad holds a gradient of the coming step             */
    uint64_t     version;       /* version of param for which the master weight is current */
    int          where;         /* where its states are: MIXPI_HERE ...                    */
    float       *ema;           /* device memory: average of the weight, or NULL           */
    void        *shelf;         /* device memory: the weight while its average is in, or NULL */
    uint64_t     written_for;   /* number of the last step before which param was written */
    int          written;       /* number of steps in a row of which that is true          */
    /* Used by the ranks. */
    int          owner;         /* rank that updates it; -1: each updates a piece          */
    void        *piece;         /* device memory: states of this rank's piece              */
} mixpi_slot;

/* Who updates a parameter: this rank, another rank, or each rank a piece. */
enum { MIXPI_HERE, MIXPI_AWAY, MIXPI_IN_PIECES };

/* Counts of one parameter's gradient in its low dtype. */
typedef struct mixpi_grad_tally {
    mixp_look look;
    int64_t   exponents[MIXP_EXPONENTS];
} mixpi_grad_tally;

enum { MIXPI_READY, MIXPI_UNSCALED, MIXPI_STEPPED };

/* A matrix is updated in three passes of the kernel `update`, each with its own row. */
enum { MIXPI_MUON_MOMENTUM, MIXPI_MUON_UNIT, MIXPI_MUON_LAST, MIXPI_MUON_PASSES };

/* Working memory of Muon: device memory for the largest matrix, and the rows of its passes. */
typedef struct mixpi_muon {
    mixp_muon_settings settings;
    double (*coefficients)[3];  /* a, b and c of each iteration, or NULL                   */
    int64_t  elements, side;    /* capacity: elements of a matrix; its smaller side        */
    mixp_out x, gram, poly;     /* X, A and b A + c A A, in the iteration's dtype          */
    float   *x_sum, *poly_sum;  /* x and poly in f32                                       */
    int64_t  room;              /* number of the optimizer's rows that fit                 */
    int64_t  tried;             /* number of parameters whose products have scratch memory */
    mixp_param_row  *rows, *device_rows;
    mixp_step_state *look;      /* step state for the norm of the direction                */
} mixpi_muon;

/* Tensors in the order of their addresses, with room for the optimizer's capacity. */
typedef struct mixpi_sorted {
    mixp_tensor **at;
    int64_t       count;
} mixpi_sorted;

struct mixp_optimizer {
    mixp_context    *ctx;
    mixp_step_plan   plan;
    mixp_optimizer_states states;
    int              no_master, zero_grad;
    int              has_padding;   /* 1: a parameter has rows with a pitch             */
    float            initial_sum;   /* Adagrad: where a sum starts                         */
    int64_t          issued;    /* MIXP_SCHEDULE_FUNCTION: steps that the device was given; -1 = not
                                   known                                                   */
    int64_t          count, capacity;
    mixpi_slot      *slot;
    mixpi_sorted     params, grads; /* the parameters; the callers' gradients              */
    mixp_param_row  *rows, *device_rows;    /* table on the host; table that kernels read  */
    mixp_param_row  *own_rows, *device_own_rows;    /* the rows that this rank updates: the same
                                                       tables unless the states are sharded */
    int              looks_own; /* 1: this rank looks at own rows only                     */
    int              rows_changed;
    int              clipped;   /* 1: the statistics come from the last clip: keep them    */
    uint64_t         clipped_versions;  /* sum of the gradients' versions at that clip     */
    mixp_step_state *state;     /* device memory                                           */
    uint64_t         loss_of;   /* the context's generation when plan.loss was set      */
    /* Counts of each parameter: one block in device memory, and a copy on the host. */
    mixp_lost       *lost, *lost_copy;
    mixpi_grad_tally *tally, *tally_copy;
    int              tally_here;    /* 1: the copy is up to date                        */
    int              tally_recorded; /* 1: a graph counts as well, without notice to the host */
    int64_t          tallies;   /* capacity in parameters                               */
    int64_t          tally_count;   /* number of parameters at the last count               */
    int              tally_due; /* 1: the next look at the gradients counts as well     */
    int              tallied;   /* 1: the gradients of this step are counted            */
    int64_t          tally_step;    /* the context's step then, plus 1                  */
    /* The last call of a scaler on this optimizer. Valid until that scaler's update, which covers
     * all optimizers in its list. */
    mixp_scaler     *scaler;
    uint64_t         epoch;
    int              stage;
    mixp_optimizer  *next_checked;
    mixpi_muon      *muon;      /* NULL: not Muon                                          */
    struct mixpi_shards *shards;    /* NULL: the states are not sharded over ranks         */
    uint64_t         views_summed;  /* generation in which clip summed the views; 0 = none */
    uint64_t         cleared_in;    /* the context's generation at the last mixp_zero_grad */
    uint64_t         stepped;       /* number of steps so far                              */
    uint64_t         stepped_in;    /* the context's generation at the last update         */
    int64_t          stepped_after; /* operators applied in that generation before the update */
    mixp_optimizer  *next;      /* next in the context's list                              */
    /* Used by the ranks. */
    double          *table;     /* device memory in which ranks agree, made at its first use */
    int64_t          taken;     /* steps begun since it was made, the same on all ranks    */
    int              loaded;    /* 1: a checkpoint was loaded: the next step compares weights */
    double           clip_norm; /* max_norm of the last mixp_clip_grad_norm                */
    int              bit;       /* bit of this optimizer in a guard's sets of optimizers   */
    /* Averages of the first ema_count parameters, and the rows of the pass that updates them. */
    int64_t          ema_count, ema_room;
    int64_t          ema_begun; /* no step has yet changed the averages from this number on */
    mixp_param_row  *ema_rows, *device_ema_rows;
    int              swapped;   /* 1: the weights are the averages                         */
};

/* Allocates zeroed memory that is freed with the optimizer. Returns NULL with the error set. */
static void *mixpi_opt_host(const mixp_optimizer *opt, size_t bytes) {
    return mixpi_owned_alloc(opt->ctx, opt, bytes, 0);
}
static void *mixpi_opt_device(const mixp_optimizer *opt, size_t bytes) {
    return mixpi_owned_alloc(opt->ctx, opt, bytes, 1);
}

/* Fails while the averages are in the weights. */
static mixp_result mixpi_need_weights(const mixp_optimizer *opt, const char *who) {
    if (!opt->swapped) return MIXP_OK;
    return mixp_context_fail(opt->ctx, MIXP_ERR_ORDER,
        "%s: the weights are the averages of mixp_optimizer_swap_ema: call mixp_optimizer_swap_ema "
        "again first",
        who);
}

/* Calls a function of the ranks' table; MIXP_OK without sharded states. */
#define MIXPI_SHARDS(opt, call) ((opt)->shards ? (opt)->ctx->crew->call : MIXP_OK)

static const char *mixpi_crew_add_wrong(
    const mixp_optimizer *opt, const mixp_tensor *p, const mixp_tensor *g) {
    return mixpi_crew_of(opt->ctx) ? opt->ctx->crew->add_wrong(opt, p, g) : NULL;
}
