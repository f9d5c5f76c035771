#pragma once
#include "../tensors/context.c"
#include "../autocast.c"
#include "../tape.h"
/* ==== 7. TAPE (implementation) ======================================================== */

enum { MIXPI_READS = 8 };       /* inputs whose gradients have their own read set          */

typedef struct mixpi_rerun mixpi_rerun;

/* One call of an operator. It is one piece of the arena of records:
 *
 *     | mixpi_tape_entry | versions        | call.in      | call.attrs   | inputs       |
 *       the struct below   inputs, result,   in[n_in],      attrs_size     a flag byte
 *                          to an even count  to 4 places    bytes          an input
 *
 * The tape is the list ctx->tape.newest -> older -> ... -> NULL, in the order of a walk. */
struct mixpi_tape_entry {
    mixp_call         call;     /* first, so that a call and its entry have the same address */
    mixpi_tape_entry *older;
    int               fixed_dtype;  /* 1: infer fixed the result's dtype; autocast keeps it */
    int               alias;    /* 1: the result shares its input's memory                 */
    int               site;     /* number of the site; 0: no guard watches */
    const char       *tangent_of;   /* the operator of whose tangent it is a part; or NULL   */
    mixpi_rerun      *block;    /* block that computes it again; NULL: it stays in memory   */
    int               again;    /* 1: forward runs again, and must not decide again         */
    int               made;     /* bit i: the next operator has made input i's gradient */
    mixp_result       lacks;    /* error of a gradient that backward asked for, or MIXP_OK */
    uint32_t          reads[MIXPI_READS];   /* for the gradient of input i, the tensors that
                                               backward reads, as a set of mixp_call_reads; the last
                                               set holds for all further inputs */
    uint64_t         *versions; /* versions of the inputs and the result at recording       */
    unsigned char    *inputs;   /* one byte of MIXPI_INPUT_... flags for each input         */
};

enum {
    MIXPI_INPUT_CONSTANT = 1,   /* the input needed no gradient at recording               */
    MIXPI_INPUT_ASKED = 2,      /* backward has asked for the input's gradient             */
    MIXPI_INPUT_PROBED = 4      /* that gradient holds a probe, which backward must overwrite */
};

static mixpi_tape_entry *mixpi_entry(mixp_call *c) { return (mixpi_tape_entry *)(void *)c; }
static const mixpi_tape_entry *mixpi_entry_of(const mixp_call *c) {
    return (const mixpi_tape_entry *)(const void *)c;
}
/* The entry recorded before c, or NULL. */
static mixpi_tape_entry *mixpi_entry_before(const mixp_call *c) {
    return ((const mixpi_tape_entry *)(const void *)c)->older;
}

/* Fails inside an operator's own functions, for calls that would recycle its memory. */
static mixp_result mixpi_check_outside(mixp_context *ctx, const char *who) {
    if (!ctx->tape.inside) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
        "%s: not possible inside an operator's infer, forward or backward, nor inside a hook of "
        "ranks. If an exception has left such a function, call mixp_step_begin%s. If another "
        "thread uses this context at the same time: one thread at a time, or a context for each",
        who, ctx->tape.refused ? " again" : "");
}

/* --- applying one operator ------------------------------------------------------------- */

/* Does a gradient flow to t? */
static int mixpi_wants_grad(const mixp_tensor *t) {
    return t && (t->requires_grad || t->own.from_tape);
}

/* Is it the tape's own cast operator, which operators/cast.c defines? */
static int mixpi_is_cast(const mixp_op *op);

/* A cast keeps its class, whatever class the user set: the other classes cast inputs by it. */
static mixp_op_class mixpi_class_of(const mixp_context *ctx, const mixp_op *op) {
    const mixpi_casting *c = mixpi_is_cast(op) ? NULL : ctx->casting;
    for (int i = 0; c && i < c->n_overrides; i++)
        if (c->overrides[i].op == op) return c->overrides[i].cls;
    return op->cls;
}

enum { MIXPI_QUOTED = 96 };     /* characters for a quoted name in a message */

/* " 'h.3.w'" for messages; "" if t has no name, or if its record may have been recycled. */
static const char *mixpi_quoted(const mixp_tensor *t, char *text) {
    *text = '\0';
    if (t && !t->own.generation && *t->name) snprintf(text, MIXPI_QUOTED, " '%.90s'", t->name);
    return text;
}

static mixp_result mixpi_check_input(
    mixp_context *ctx, const mixp_op *op, int i, int required, const mixp_tensor *t) {
    const char *wrong = NULL;
    char quoted[MIXPI_QUOTED], stale[192];
    if (mixpi_is_spilled(t))
        return mixp_context_fail(ctx, MIXP_ERR_ORDER, "%s: input %d " MIXPI_SPILLED, op->name, i);
    if (t && !mixpi_is_tensor(t))
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "%s: input %d is not a tensor: it is an invalid pointer, or a gradient that "
            "mixp_backward has released",
            op->name, i);

    /* The last reason that holds is reported. */
    if (!t && i < required) wrong = "is NULL";
    if (t && mixpi_is_stale(t)) wrong = mixpi_stale(t->ctx, stale);
    if (t && t->own.is_grad && !mixpi_is_no_grad(ctx))
        wrong = "is a gradient, which counts as a constant: there is no double backward; use "
                "gradients under MIXP_NO_GRAD only, and mixp_jvp for a derivative in a loss";
    if (t && t->own.spent)
        wrong = "no longer exists: it was disposable, and an operator that read it "
                "(mixp_scaler_cross_entropy, mixp_add_layer_norm, mixp_add_rms_norm, mixp_linear "
                "under a recipe with codes) or mixp_backward has freed or overwritten it; call "
                "mixp_tensor_set_disposable before its last reader only";
    if (t && t->ctx != ctx)
        wrong = "belongs to another context; copy it with mixp_read and mixp_input";

    if (!wrong) return MIXP_OK;
    return mixp_context_fail(ctx, t && t->ctx == ctx ? MIXP_ERR_ORDER : MIXP_ERR_ARGUMENT,
        "%s: input %d%s %s", op->name, i, mixpi_quoted(t, quoted), wrong);
}

static mixp_result mixpi_check_apply(mixp_context *ctx, const mixp_op *op, int n_in,
    mixp_tensor *const *in, int required, const void *attrs) {
    mixp_result r = MIXP_OK;
    if (!op || !op->name || !op->infer || !op->forward)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "mixp_apply: the operator, its name, infer or forward are missing");
    if (!in)
        return mixp_context_fail(
            ctx, MIXP_ERR_ARGUMENT, "%s: the inputs are missing: the array is NULL", op->name);
    if (op->attrs_size && !attrs)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "%s: attrs is NULL, but the operator's attrs_size is %.0f", op->name,
            (double)op->attrs_size);

    /* The class and the number of inputs, then each input. */
    if ((unsigned)op->cls >= MIXP_CLASS_COUNT)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "%s: the operator's class is %d, which is not a mixp_op_class", op->name, (int)op->cls);
    if (n_in < 1 || n_in > MIXP_MAX_INPUTS || required < 1 || required > n_in)
        return mixp_context_fail(ctx, MIXP_ERR_ARGUMENT,
            "%s: %d inputs, of which %d required; at least 1 must be required, and at most %d are "
            "allowed",
            op->name, n_in, required, MIXP_MAX_INPUTS);

    for (int i = 0; i < n_in && r == MIXP_OK; i++)
        r = mixpi_check_input(ctx, op, i, required, in[i]);
    return r;
}

/* Applies the tape's own cast operator, defined below. */
static mixp_tensor *mixpi_cast(mixp_context *ctx, mixp_tensor *x, mixp_dtype dtype);

