#pragma once
#include "memory.c"
#include "crew.c"
/* --- backups of buffers -------------------------------------------------------------------- *
 *
 * A buffer's first write in a window of steps keeps the bytes from before the window. The update
 * that ends the window queues a copy back, which the device makes if the step was skipped.
 *
 *     mixp_step_begin     first write     mixp_scaler_update        mixp_step_begin
 *           |                  |                  |                       |
 *           |<-------------- window n ----------->|<----- window n+1 ---->|<-- n+2 ...
 *       first = n         backup of n         restore if skipped      first = n + 2
 *
 * Backups of all windows since `first` are valid, because two scalers may update in one step.
 */
enum {
    MIXPI_OUTSIDE,              /* before the first step: writes stay                      */
    MIXPI_IN_STEP,              /* the window has no update yet                            */
    MIXPI_AFTER_UPDATE,
    MIXPI_IN_EVALUATION
};

/* The backup of t, or of the tensor whose memory t shares; NULL: no buffer. */
static mixpi_backup *mixpi_backup_of(const mixp_tensor *t) {
    return t->own.origin ? t->own.origin->own.backup : t->own.backup;
}

/* The backup of buffer number i. */
static mixpi_backup *mixpi_backup_at(const mixp_context *ctx, int64_t i) {
    return ctx->buffers.all.made[i]->own.backup;
}

/* No backup made so far will be used again. */
static void mixpi_window_new(mixp_context *ctx, int state) {
    ctx->buffers.first = ++ctx->buffers.window;
    ctx->buffers.state = state;
}

/* A step or an evaluation begins. Steps without an update between them share a window, as the
 * micro-batches of one update do. An evaluation between such steps belongs to their window. */
static void mixpi_window_begin(mixp_context *ctx) {
    ctx->buffers.failures = ctx->errors.failures;
    if (ctx->buffers.state == MIXPI_IN_STEP) return;
    mixpi_window_new(ctx, ctx->evaluates ? MIXPI_IN_EVALUATION : MIXPI_IN_STEP);
}

/* An update ends the window. Its backups stay valid until a step begins: a second scaler may update
 * in the same step. */
static void mixpi_window_end(mixp_context *ctx) {
    ctx->buffers.window++;
    ctx->buffers.state = MIXPI_AFTER_UPDATE;
}

/* Was this backup filled since the step began? */
static int mixpi_backup_is_valid(const mixpi_backup *b) {
    return b->window && b->window >= b->buffer->ctx->buffers.first;
}

/* Memory for the bytes of a buffer. A captured step must not allocate. */
static mixp_result mixpi_backup_room(mixpi_backup *b) {
    mixp_tensor *t = b->buffer;
    if (b->data) return MIXP_OK;
    if (t->ctx->capture.active)
        return mixp_context_fail(t->ctx, MIXP_ERR_ORDER,
            "the first write of the buffer '%.60s' is in a capture, which must not allocate: run "
            "an ordinary step before the capture",
            t->name);
    b->data = mixpi_device_alloc(t->ctx, mixpi_bytes(t));
    return b->data ? MIXP_OK : MIXP_ERR_MEMORY;
}

/* Before a buffer is written: keeps its bytes, once in a window. */
static mixp_result mixpi_backup_keep(mixpi_backup *b) {
    mixp_context *ctx = b->buffer->ctx;
    if (ctx->buffers.state == MIXPI_OUTSIDE || b->window == ctx->buffers.window) return MIXP_OK;
    MIXPI_TRY(mixpi_backup_room(b));
    MIXPI_TRY(mixpi_copy_bytes(ctx, b->data, b->buffer->data, mixpi_bytes(b->buffer)));
    b->window = ctx->buffers.window;
    b->kept_in = ctx->generation;
    return MIXP_OK;
}

/* Warns of a frozen parameter that serves as a buffer: a retry would start from what the skipped
 * step wrote, and ranks that write different numbers resume with those of rank 0. */
static void mixpi_warn_unbuffered(const mixp_tensor *t, const char *who) {
    mixp_context *ctx = t->ctx;
    if (!t->own.is_param || t->requires_grad) return;
    if (ctx->buffers.state != MIXPI_IN_STEP || t->own.read_in != ctx->generation) return;
    if (mixpi_world(ctx) > 1) {
        ctx->buffers.unbuffered = t;
        mixpi_warn(ctx,
            "%s: the step reads the frozen parameter '%.60s' and writes it, and there are several "
            "ranks: a checkpoint holds the numbers of rank 0; make '%.60s' with mixp_buffer",
            who, t->name, t->name);
    }
    if (!ctx->buffers.retries) return;
    mixpi_warn(ctx,
        "%s: the step reads the frozen parameter '%.60s' and writes it, and mixp_retry may repeat "
        "the step: a repeat starts from what the skipped step wrote; make '%.60s' with mixp_buffer",
        who, t->name, t->name);
}

/* Every call that writes the whole of t begins here, before it changes t's memory. */
static mixp_result mixpi_write_begin(mixp_tensor *t, const char *who) {
    mixpi_backup *b = mixpi_backup_of(t);
    if (b) MIXPI_TRY(mixpi_backup_keep(b));
    if (!b) mixpi_warn_unbuffered(t->own.origin ? t->own.origin : t, who);
    mixpi_note_write(t, who);
    return MIXP_OK;
}

/* Like mixpi_write_begin, for a write of computed values: the step checks them. Writes by
 * mixp_write, mixp_fill or mixp_init_... are intended: an Inf there is not an overflow. */
static mixp_result mixpi_write_computed(mixp_tensor *t, const char *who) {
    mixpi_backup *b = mixpi_backup_of(t);
    MIXPI_TRY(mixpi_write_begin(t, who));
    if (b) b->computed = t->ctx->buffers.window;
    return MIXP_OK;
}

/* --- checking ------------------------------------------------------------------------------- */

static mixp_result mixpi_check_run(mixp_context *ctx, mixp_check_buffers_args *k) {
    const mixp_kernels *kernels = ctx->device->kernels;
    mixp_result r = MIXP_OK;
    if (k->n_parts && kernels->check_buffers)
        r = mixpi_note_failure(ctx, "check_buffers", kernels->check_buffers(&ctx->exec, k));
    k->n_parts = 0;
    return r;
}

/* Finds the first element, of the buffers computed since the step began, that was finite before
 * and is Inf or NaN now. found: device memory, raised to its mixpi_bad_word. only: 0, or the
 * generation whose writes are checked. */
static mixp_result mixpi_backups_check(mixp_context *ctx, uint64_t *found, uint64_t only) {
    mixp_result r = MIXP_OK;
    if (!ctx->buffers.all.count) return MIXP_OK;
    mixp_check_buffers_args k = MIXPI_ZERO;
    k.found = found;
    for (int64_t i = 0; i < ctx->buffers.all.count && r == MIXP_OK; i++) {
        const mixpi_backup *b = mixpi_backup_at(ctx, i);
        const mixp_tensor *t = b->buffer;
        mixp_check_part *part = &k.parts[k.n_parts];
        if (!mixpi_backup_is_valid(b) || b->computed < ctx->buffers.first) continue;
        if (!mixpi_is_real(t->dtype) && t->dtype != MIXP_F64) continue;
        if (only && b->kept_in != only) continue;
        part->now = t->data;
        part->before = b->data;
        part->count = t->count;
        part->number = i;
        part->dtype = t->dtype;
        if (++k.n_parts == MIXP_RESTORE_PARTS) r = mixpi_check_run(ctx, &k);
    }
    return r == MIXP_OK ? mixpi_check_run(ctx, &k) : r;
}

/* --- restoring ------------------------------------------------------------------------------ */

/* Where memory is not the host's and the device lacks the kernel: waits, and copies. */
static mixp_result mixpi_restore_by_hand(mixp_context *ctx, const mixp_restore_args *k) {
    int32_t flag = k->n_flags == 0;
    for (int i = 0; i < k->n_flags && !flag; i++)
        MIXPI_TRY(mixpi_download(ctx, &flag, k->flags[i], sizeof flag));
    for (int i = 0; i < k->n_parts && flag; i++)
        MIXPI_TRY(mixpi_copy_bytes(ctx, k->parts[i].to, k->parts[i].from, k->parts[i].bytes));
    return MIXP_OK;
}

static mixp_result mixpi_restore_run(mixp_context *ctx, mixp_restore_args *k) {
    const mixp_kernels *kernels = ctx->device->kernels;
    const int n = k->n_parts;
    if (!n) return MIXP_OK;
    mixp_result r = kernels->restore
                        ? mixpi_note_failure(ctx, "restore", kernels->restore(&ctx->exec, k))
                        : mixpi_restore_by_hand(ctx, k);
    k->n_parts = 0;
    return r;
}

/* Queues the restore of all buffers written since the step began. The device restores them if one
 * of the flags in k is not 0, or if k has no flags. */
static mixp_result mixpi_backups_restore(mixp_context *ctx, mixp_restore_args *k) {
    mixp_result r = MIXP_OK;
    for (int64_t i = 0; i < ctx->buffers.all.count && r == MIXP_OK; i++) {
        const mixpi_backup *b = mixpi_backup_at(ctx, i);
        mixp_restore_part *part = &k->parts[k->n_parts];
        if (!mixpi_backup_is_valid(b)) continue;
        part->to = b->buffer->data;
        part->from = b->data;
        part->bytes = mixpi_bytes(b->buffer);
        mixpi_note_write(b->buffer, "a skipped step");
        if (++k->n_parts == MIXP_RESTORE_PARTS) r = mixpi_restore_run(ctx, k);
    }
    return r == MIXP_OK ? mixpi_restore_run(ctx, k) : r;
}

/* Puts back the buffers whose first write in their window was in the current step or evaluation. */
static mixp_result mixpi_backups_rewind(mixp_context *ctx, const char *who) {
    mixp_result r = MIXP_OK;
    for (int64_t i = 0; i < ctx->buffers.all.count && r == MIXP_OK; i++) {
        mixpi_backup *b = mixpi_backup_at(ctx, i);
        if (!mixpi_backup_is_valid(b) || b->kept_in != ctx->generation) continue;
        mixpi_note_write(b->buffer, who);
        r = mixpi_copy_bytes(ctx, b->buffer->data, b->data, mixpi_bytes(b->buffer));
        b->window = 0; /* the next write keeps the bytes again */
    }
    return r;
}

/* Before a step, an evaluation, a capture or a replay begins: if a call of the step before has
 * failed, and no update has ended that step, undoes its writes. */
static mixp_result mixpi_window_recover(mixp_context *ctx) {
    const int failed = ctx->errors.failures != ctx->buffers.failures;
    if (!failed || ctx->buffers.state != MIXPI_IN_STEP) return MIXP_OK;
    return mixpi_backups_rewind(ctx, "a failed step");
}
