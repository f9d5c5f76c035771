#pragma once
#include "../cpu/device.c"
#include "block.c"
#include "crew.c"
#include "watcher.c"
#include "backups.c"
/* --- context --------------------------------------------------------------------------- */

/* Returns the error in a description; NULL = none. */
static const char *mixpi_desc_wrong(const mixp_context_desc *d) {
    const mixp_allocator *device = &d->device_allocator;
    if (!d->allocate != !d->release) return "allocate and release: set both or neither";
    if (d->memory && d->allocate) return "memory and allocate: set one of them";
    if (d->memory_bytes && !d->memory) return "memory_bytes is set, but memory is NULL";
    if (!device->allocate != !device->release)
        return "device_allocator: set both of its functions or neither";
    if (d->portable_bits && d->device)
        return "portable_bits selects the CPU's instruction set, and device is set: set one of "
               "them";
    if (d->threads < 0) return "threads is negative; 0 means the default number";
    if (d->threads > 4096) return "threads is above 4096; 0 means the default number";
    if (d->epilogues & ~(MIXP_EPILOGUES_BIAS | MIXP_EPILOGUES_GELU | MIXP_EPILOGUES_NONE |
                           MIXP_EPILOGUES_GELU_BF16))
        return "epilogues has an unknown flag; use MIXP_EPILOGUES_...";
    if ((d->epilogues & MIXP_EPILOGUES_NONE) && d->epilogues != MIXP_EPILOGUES_NONE)
        return "epilogues has MIXP_EPILOGUES_NONE and another flag; set one of them";
    return NULL;
}

static void mixpi_exec_fill(mixp_context *ctx, const mixp_context_desc *d) {
    mixp_exec *x = &ctx->exec;
    x->host.allocate = d->allocate;
    x->host.release = d->release;
    x->host.user = d->user;
    x->device = d->device_allocator;
    x->stream = d->stream;
    x->gemm_choices = d->gemm_choices;
    x->gemm_measure = d->gemm_measure;
    x->user = ctx;
    x->scratch = mixpi_context_scratch;
    x->threads = 1; /* without threads, no loop could use more */
    x->least_work = MIXPI_LEAST_WORK;
#if MIXPI_POOL || MIXPI_OPENMP
    x->threads = d->threads ? d->threads : mixpi_threads_available();
    if (x->threads > 1) x->parallel = mixpi_context_parallel;
#endif
}

/* The flags of the description, or those that its device names. The device is attached. */
static int mixpi_epilogues_of(const mixp_context *ctx, const mixp_context_desc *d) {
    if (d->epilogues) return d->epilogues;
    return ctx->device->epilogues ? ctx->device->epilogues(&ctx->exec) : 0;
}

static const mixp_device *mixpi_device_of(const mixp_context_desc *d) {
    if (d->device) return d->device;
    return d->portable_bits ? mixpi_cpu_portable() : mixp_cpu();
}

/* Makes a context with room behind it for the description of ranks, `ranks` bytes. Returns NULL on
 * failure, with the reason in *wrong. */
static mixp_context *mixpi_context_make(
    const mixp_context_desc *d, size_t ranks, const char **wrong) {
    mixp_context *ctx = (mixp_context *)d->allocate(sizeof *ctx + ranks, d->user);
    if (!ctx) {
        *wrong = d->memory ? "memory_bytes is too small"
                           : "out of memory: the allocator returned NULL for the context";
        return NULL;
    }

    memset((void *)ctx, 0, sizeof *ctx + ranks);
    ctx->ranks = (mixp_ranks_desc *)(void *)(ctx + 1);
    ctx->device = mixpi_device_of(d);
    ctx->seed = d->seed;
    ctx->walk.f32_gradients = d->f32_gradients;
    ctx->errors.on_error = d->on_error;
    ctx->errors.on_warning = d->on_warning;
    ctx->products.narrow = d->narrow_products && ctx->device->kernels->gemm_narrow;
    ctx->generation = 1;
    ctx->made.in = ctx->owners.in = 1;
    ctx->memory.allocations = 1;
    ctx->memory.dev.on_device = 1;
    ctx->memory.records.turns = d->memory ? MIXPI_RECORD_TURNS_IN_BLOCK : MIXPI_RECORD_TURNS;
    mixpi_exec_fill(ctx, d);

    /* The device comes last: what it refuses leaves nothing behind. */
    mixp_result r = ctx->device->attach ? ctx->device->attach(&ctx->exec) : MIXP_OK;
    if (r == MIXP_OK) {
        ctx->products.epilogues = mixpi_epilogues_of(ctx, d);
        return ctx;
    }
    mixpi_host_free(ctx, ctx);
    *wrong = r == MIXP_ERR_ARGUMENT ? "the stream does not belong to this device"
             : r == MIXP_ERR_MEMORY ? "the device has too little memory left for a context"
             : r == MIXP_ERR_FORMAT
                 ? "gemm_choices is truncated, or is not a text of mixp_context_gemm_choices"
             : r == MIXP_ERR_SHAPE
                 ? "gemm_choices is from another GPU, or another version of its libraries: omit "
                   "gemm_choices, and save it again after a step"
                 : "the device cannot be used; check whether another program uses it";
    return NULL;
}

struct mixp_graph {
    mixp_context *ctx;
    mixp_graph   *next;
    void         *handle;
    uint64_t      step;
    int           updates;      /* 1: it contains a step of an optimizer */
    int           moves_scale;  /* 0: gradients from before and after a replay may be added */
    uint64_t      sites_moved;  /* the context's value when the graph was recorded */
    int64_t       lows_made;    /* the context's value when the graph was recorded */
    int64_t       scaled_made;  /* the context's value when the graph was recorded */
};

/* Marks all low copies of parameters as stale, so that their next reader renews them. Needed
 * because the host does not see which copies a graph writes. */
static void mixpi_lows_doubt(mixp_context *ctx) {
    for (mixp_tensor *t = ctx->tensors; t; t = t->own.next)
        if (t->own.low[0] || t->own.low[1]) mixpi_note_write(t, "mixp_replay");
}

MIXPREC_API void mixp_context_free(mixp_context *ctx) {
    mixp_graph *g;
    if (!ctx) return;
    if (ctx->device->wait) ctx->device->wait(&ctx->exec);
    for (g = ctx->capture.graphs; g; g = g->next) ctx->device->graph_free(&ctx->exec, g->handle);
#if MIXPI_POOL
    mixpi_pool_stop(ctx->pool);
    if (ctx->pool) mixpi_host_free(ctx, ctx->pool);
#endif
    mixpi_piece_free(ctx, ctx->memory.host.first);
    mixpi_piece_free(ctx, ctx->memory.dev.first);
    mixpi_piece_free(ctx, ctx->memory.records.first);
    mixpi_piece_free(ctx, ctx->memory.scratch);
    mixpi_piece_free(ctx, ctx->memory.pieces);
    if (ctx->device->detach) ctx->device->detach(&ctx->exec);
    mixpi_host_free(ctx, ctx);
}

/* Fails during a capture, for calls that a graph must not repeat. */
static mixp_result mixpi_check_uncaptured(mixp_context *ctx, const char *who) {
    if (!ctx->capture.active) return MIXP_OK;
    return mixp_context_fail(
        ctx, MIXP_ERR_ORDER, "%s: a step is being captured; call mixp_capture_end first", who);
}

MIXPREC_API mixp_result mixp_capture_begin(mixp_context *ctx) {
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (!ctx->device->capture_begin)
        return mixp_context_fail(ctx, MIXP_ERR_DEVICE,
            "mixp_capture_begin: the device %s has no graphs; run each step without capturing",
            ctx->device->name);
    if (ctx->capture.active)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_capture_begin: a capture is already active; call mixp_capture_end first");

    /* The step to be recorded begins with what the last step leaves. */
    MIXPI_TRY(mixpi_window_recover(ctx));

    ctx->capture.step = ctx->step;
    ctx->capture.failures = ctx->errors.failures;
    ctx->capture.scale_moved = ctx->capture.cast_recorded = ctx->capture.update_recorded = 0;
    mixp_result r =
        mixpi_note_failure(ctx, "mixp_capture_begin", ctx->device->capture_begin(&ctx->exec));
    ctx->capture.active = r == MIXP_OK;

    /* A replay keeps the buffers' bytes itself: the graph holds the first write of a window. */
    if (ctx->capture.active) mixpi_window_new(ctx, ctx->buffers.state);
    if (ctx->capture.active && mixpi_watcher_of(ctx)) ctx->watcher->captured(ctx);
    /* Sharded steps write no copies, so each replay renews them. */
    if (ctx->capture.active && mixpi_is_sharded(ctx)) mixpi_lows_doubt(ctx);
    return r;
}

/* Undoes what the recording counted. Recorded work has not run, whether or not the capture
 * succeeds; replays count their own steps. The host does not know the scale of earlier
 * gradients. */
static void mixpi_capture_undo(mixp_context *ctx) {
    ctx->capture.active = 0;
    mixpi_window_new(ctx, MIXPI_OUTSIDE);
    ctx->step = ctx->capture.step;
    ctx->capture.replays += ctx->capture.scale_moved != 0;
}

/* Fails if a call failed since mixp_capture_begin: the recording lacks the work of that call. */
static mixp_result mixpi_capture_check(mixp_context *ctx) {
    if (ctx->errors.failures == ctx->capture.failures) return MIXP_OK;
    return mixp_context_fail(ctx, MIXP_ERR_ORDER,
        "mixp_capture_end: a call failed during the capture, so there is no graph; correct that "
        "call and capture the step again");
}

MIXPREC_API mixp_graph *mixp_capture_end(mixp_context *ctx) {
    void *handle = NULL;
    if (!ctx) return NULL;
    if (!ctx->capture.active) {
        mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_capture_end: no step is being captured; call mixp_capture_begin first");
        return NULL;
    }

    /* The recording ends in any case; the step that it counted did not run. */
    mixp_result r = mixpi_capture_check(ctx);
    mixp_graph *g = r == MIXP_OK ? (mixp_graph *)mixpi_owner_new(ctx, sizeof *g) : NULL;
    uint64_t step = ctx->step;
    mixpi_capture_undo(ctx);
    if (ctx->capture.cast_recorded) mixpi_lows_doubt(ctx);
    r = ctx->device->capture_end(&ctx->exec, &handle);
    if (!g && handle) ctx->device->graph_free(&ctx->exec, handle);
    if (!g || mixpi_note_failure(ctx, "mixp_capture_end", r) != MIXP_OK) {
        if (g) mixpi_owned_free(ctx, g);
        return NULL;
    }

    /* Note what a replay must count and compare. */
    g->ctx = ctx;
    g->next = ctx->capture.graphs;
    g->handle = handle;
    g->step = step;
    g->updates = ctx->capture.update_recorded;
    g->moves_scale = ctx->capture.scale_moved;
    g->sites_moved = ctx->capture.sites_moved;
    g->lows_made = ctx->low_copies.made;
    g->scaled_made = ctx->low_copies.scaled_made;
    ctx->capture.graphs = g;
    return g;
}

MIXPREC_API mixp_result mixp_replay(mixp_graph *graph) {
    mixp_context *ctx = graph ? graph->ctx : NULL;
    if (!ctx) return MIXP_ERR_ARGUMENT;
    if (mixpi_check_uncaptured(ctx, "mixp_replay") != MIXP_OK) return MIXP_ERR_ORDER;
    if (graph->updates && ctx->training.averaged)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_replay: the weights are the averages of mixp_optimizer_swap_ema: call "
            "mixp_optimizer_swap_ema again first");
    if (graph->updates && graph->scaled_made != ctx->low_copies.scaled_made)
        return mixp_context_fail(ctx, MIXP_ERR_ORDER,
            "mixp_replay: a linear has met delayed scaling since the graph was recorded, and the "
            "graph would not advance its history; record the step again");

    /* Count the step as an ordinary one. */
    MIXPI_TRY(mixpi_window_recover(ctx));
    MIXPI_TRY(MIXPI_WATCHER(ctx, replayed(ctx)));
    ctx->capture.replays += graph->moves_scale != 0;
    ctx->step += mixpi_world(ctx);
    ctx->capture.replayed = ctx->step;
    /* The graph does not know newer low copies; a sharded graph does not write low copies. */
    if (ctx->low_copies.made != graph->lows_made || mixpi_is_sharded(ctx)) mixpi_lows_doubt(ctx);

    MIXPI_TRY(mixpi_note_failure(ctx, "mixp_replay",
        ctx->device->replay(&ctx->exec, graph->handle, ctx->step - graph->step)));
    return MIXPI_CREW(ctx, replayed(ctx));
}

/* Call before freeing anything: fails during a capture, and waits for work that may use the
 * memory. */
static mixp_result mixpi_free_begin(mixp_context *ctx, const char *who) {
    if (mixpi_check_uncaptured(ctx, who) != MIXP_OK) return MIXP_ERR_ORDER;
    return ctx->device->wait ? mixpi_note_failure(ctx, who, ctx->device->wait(&ctx->exec))
                             : MIXP_OK;
}

MIXPREC_API mixp_result mixp_graph_free(mixp_graph *graph) {
    mixp_context *ctx = graph ? graph->ctx : NULL;
    mixp_graph **at = ctx ? &ctx->capture.graphs : NULL;
    mixp_result r = ctx ? mixpi_free_begin(ctx, "mixp_graph_free") : MIXP_OK;
    if (!ctx || r != MIXP_OK) return r;
    while (*at != graph) at = &(*at)->next;
    *at = graph->next;
    ctx->device->graph_free(&ctx->exec, graph->handle);
    mixpi_owned_free(ctx, graph);
    return MIXP_OK;
}

MIXPREC_API int mixp_graph_stale(const mixp_graph *graph) {
    return graph && graph->sites_moved != graph->ctx->capture.sites_moved;
}

MIXPREC_API mixp_memory mixp_context_memory(const mixp_context *ctx) {
    mixp_memory m = { 0, 0, 0, 0, 0 };
    if (!ctx) return m;
    m.used = ctx->memory.permanent + ctx->memory.dev.used;
    m.peak = ctx->memory.peak;
    m.allocations = ctx->memory.allocations;
    m.allocated = ctx->memory.allocated;
    if (ctx->memory.block) m.block = ctx->memory.block->before + ctx->memory.block->most;
    return m;
}

MIXPREC_API uint64_t mixp_context_steps(const mixp_context *ctx) { return ctx ? ctx->step : 0; }

MIXPREC_API mixp_gemm_count mixp_context_gemm_count(const mixp_context *ctx) {
    mixp_gemm_count none = { 0, 0, 0, 0, 0 };
    return ctx && ctx->device->gemm_count ? ctx->device->gemm_count(&ctx->exec) : none;
}

MIXPREC_API size_t mixp_context_gemm_choices(const mixp_context *ctx, char *text, size_t size) {
    if (text && size) text[0] = 0;
    if (!ctx || !ctx->device->gemm_choices) return 1;
    return ctx->device->gemm_choices(&ctx->exec, text, text ? size : 0);
}

MIXPREC_API const mixp_exec *mixp_context_exec(mixp_context *ctx) {
    return ctx ? &ctx->exec : NULL;
}
MIXPREC_API const mixp_device *mixp_context_device(const mixp_context *ctx) {
    return ctx ? ctx->device : NULL;
}
