#pragma once
#include "settings.c"
/* --- rows and states of parameters ------------------------------------------------------- */

static int mixpi_row_is_small(const mixp_param_row *row) {
    return row->m_dtype != MIXP_F32 || row->v_dtype != MIXP_F32 || row->master_dtype != MIXP_F32;
}

/* Does this rank update all of parameter i? */
static int mixpi_is_own(const mixp_optimizer *opt, int64_t i) {
    return opt->slot[i].where == MIXPI_HERE;
}

static void mixpi_sorted_move(mixpi_sorted *s, mixp_tensor **to) {
    if (s->count) memcpy(to, s->at, (size_t)s->count * sizeof *to);
    s->at = to;
}

static mixp_result mixpi_optimizer_grow(mixp_optimizer *opt) {
    int64_t n = opt->capacity ? 2 * opt->capacity : 32;
    size_t bytes = (size_t)n * sizeof(mixp_param_row);
    mixpi_slot *slot = (mixpi_slot *)mixpi_opt_host(opt, (size_t)n * sizeof *slot);
    mixp_param_row *rows = (mixp_param_row *)mixpi_opt_host(opt, bytes);
    mixp_param_row *device = (mixp_param_row *)mixpi_opt_device(opt, bytes);
    mixp_tensor **sorted = (mixp_tensor **)mixpi_opt_host(opt, 2 * (size_t)n * sizeof *sorted);
    if (!slot || !rows || !device || !sorted) return MIXP_ERR_MEMORY;
    if (MIXPI_SHARDS(opt, grow(opt, bytes)) != MIXP_OK) return MIXP_ERR_MEMORY;

    /* All memory is there: move into it. */
    if (opt->count) memcpy(slot, opt->slot, (size_t)opt->count * sizeof *slot);
    if (opt->count) memcpy(rows, opt->rows, (size_t)opt->count * sizeof *rows);
    mixpi_sorted_move(&opt->params, sorted);
    mixpi_sorted_move(&opt->grads, sorted + n);
    opt->slot = slot;
    opt->rows = rows;
    opt->device_rows = device;
    opt->capacity = n;

    /* Without shards, a rank's own rows are all rows. */
    if (!opt->shards) opt->own_rows = rows;
    if (!opt->shards) opt->device_own_rows = device;
    opt->rows_changed = 1; /* the new table was not sent yet */
    return MIXP_OK;
}

/* The current stage. A scaler's update resets it. */
static int mixpi_stage(const mixp_optimizer *opt) {
    return opt->scaler && opt->epoch == opt->scaler->epoch ? opt->stage : MIXPI_READY;
}

/* Does a parameter that is added now keep f32 states regardless of the description? */
static int mixpi_keeps_f32(const mixp_optimizer *opt, const mixp_tensor *p) {
    return p->rank < 2 || p->count < MIXP_STATE_SMALL ||
           opt->plan.groups[opt->plan.n_groups - 1].f32_states;
}

static int mixpi_master_is_split(const mixp_optimizer *opt, const mixp_tensor *p) {
    return opt->states.master != MIXP_MASTER_F32 && mixpi_is_low(p->dtype) &&
           !mixpi_keeps_f32(opt, p);
}

/* Do two tensors share an element? */
static int mixpi_overlaps(const mixp_tensor *a, const mixp_tensor *b) {
    const uintptr_t at = (uintptr_t)a->data, to = (uintptr_t)b->data;
    return at <= to ? to - at < mixpi_bytes(a) : at - to < mixpi_bytes(b);
}

/* How many tensors of an array in the order of addresses begin at `data` or before? */
static int64_t mixpi_sorted_before(const mixpi_sorted *s, const void *data) {
    int64_t low = 0, high = s->count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if ((uintptr_t)s->at[middle]->data <= (uintptr_t)data) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void mixpi_sorted_add(mixpi_sorted *s, mixp_tensor *t) {
    const int64_t i = mixpi_sorted_before(s, t->data);
    memmove(s->at + i + 1, s->at + i, (size_t)(s->count - i) * sizeof *s->at);
    s->at[i] = t;
    s->count++;
}

/* Returns why p, with gradient g or NULL, cannot join the existing parameters, or NULL. The
 * existing parameters share no memory, so only the neighbours of p's address can overlap p. */
static const char *mixpi_add_clash(
    const mixp_optimizer *opt, const mixp_tensor *p, const mixp_tensor *g) {
    const mixpi_sorted *s = &opt->params, *grads = &opt->grads;
    int64_t i = mixpi_sorted_before(s, p->data);
    if (i > 0 && s->at[i - 1] == p) return "was added before";
    if ((i > 0 && mixpi_overlaps(s->at[i - 1], p)) || (i < s->count && mixpi_overlaps(p, s->at[i])))
        return "shares memory with a parameter that was added before; create views once, before "
               "the loop";
    i = g ? mixpi_sorted_before(grads, g->data) : 0;
    if (opt->zero_grad && i > 0 && grads->at[i - 1]->data == g->data)
        return "shares its gradient with another parameter, and the first update would clear it; "
               "use separate gradients";
    return NULL;
}

/* Returns why this optimizer cannot train rows of p with padding, or NULL. */
static const char *mixpi_rows_wrong(
    const mixp_optimizer *opt, const mixp_tensor *p, const mixp_tensor *g) {
    if (!g || g->rank != p->rank || memcmp(g->shape, p->shape, sizeof g->shape))
        return "has rows with padding: grad is NULL or has another shape; pass a gradient of "
               "the same shape";
    if (opt->muon) return "has rows with padding, but Muon needs dense rows";
    if (mixpi_master_is_split(opt, p))
        return "has rows with padding: use MIXP_MASTER_F32, because smaller masters need dense "
               "rows";
    if (mixpi_crew_of(opt->ctx)) return "has rows with padding, which ranks do not exchange";
    return NULL;
}

/* Does p, or its gradient g, lie in the padding of another view, or another view in theirs? A step
 * clears padding while it reads a row, and puts it back. */
static int mixpi_padding_clash(
    const mixp_optimizer *opt, const mixp_tensor *p, const mixp_tensor *g, int64_t width) {
    if (width && mixpi_overlaps(p, g)) return 1;
    for (int64_t k = 0; (width || opt->has_padding) && k < opt->count; k++) {
        const mixpi_slot *there = &opt->slot[k];
        if (!width && !opt->rows[k].pitch) continue;
        if (g &&
            (mixpi_overlaps(there->param, g) || (there->grad && mixpi_overlaps(there->grad, g))))
            return 1;
        if (there->grad && mixpi_overlaps(there->grad, p)) return 1;
    }
    return 0;
}

/* Can p be added? width: elements of a row that count; 0 = all. Reports the first problem. */
static mixp_result mixpi_add_check(
    mixp_optimizer *opt, const mixp_tensor *p, const mixp_tensor *g, int64_t width) {
    mixp_result code = MIXP_ERR_ARGUMENT;
    const char *wrong = NULL;
    const int wide = p->dtype == MIXP_F64 || (g && g->dtype == MIXP_F64);
    if ((!mixpi_is_real(p->dtype) && p->dtype != MIXP_F64) ||
        (g && !mixpi_is_real(g->dtype) && g->dtype != MIXP_F64)) {
        code = MIXP_ERR_DTYPE;
        wrong = "and its gradient must be f32, f64, f16 or bf16";
    } else if (wide && (!g || mixpi_crew_of(opt->ctx))) {
        code = MIXP_ERR_DTYPE;
        wrong = g ? "or its gradient is f64, which ranks do not exchange: use f32"
                  : "is f64, which no operator differentiates: pass your own gradient, or use f32";
    } else if (g && g->count != p->count) {
        return mixp_context_fail(opt->ctx, MIXP_ERR_SHAPE,
            "mixp_optimizer_add: '%s' and its gradient differ in their number of elements: %.0f "
            "and %.0f",
            p->name, (double)p->count, (double)g->count);
    } else if (mixpi_stage(opt) != MIXPI_READY) {
        code = MIXP_ERR_ORDER;
        wrong = "was added in the middle of a step: call mixp_scaler_update first";
    } else if (g && g->data == p->data) wrong = "is its own gradient";
    else if (mixpi_backup_of(p)) wrong = "is a buffer, which no optimizer trains: use mixp_param";
    else if (p->own.generation || (g && g->own.generation))
        wrong = "lives for one step only; add a tensor of mixp_param or mixp_view";
    else if (p->ctx != opt->ctx || (g && g->ctx != opt->ctx)) wrong = "belongs to another context";
    else if (!g && !p->requires_grad && !p->own.is_param)
        wrong =
            "is a view without a gradient: pass a gradient, or call mixp_tensor_set_requires_grad";
    else wrong = mixpi_crew_add_wrong(opt, p, g);
    if (!wrong && width) wrong = mixpi_rows_wrong(opt, p, g);

    /* Refuse what this optimizer cannot train, though another could. */
    if (!wrong) wrong = mixpi_add_clash(opt, p, g);
    if (!wrong && mixpi_padding_clash(opt, p, g, width))
        wrong = "shares memory with the padding of rows, or its padding with another view: use "
                "separate memory for each view";
    if (!wrong && opt->muon && p->rank != 2) {
        code = MIXP_ERR_SHAPE;
        wrong = "is not a matrix, and Muon trains only matrices: add it to an AdamW optimizer";
    }
    if (!wrong && mixpi_master_is_split(opt, p) && p->dtype == MIXP_F16) {
        code = MIXP_ERR_DTYPE;
        wrong = "is f16, but this states.master completes bf16 weights only: use bf16, or "
                "MIXP_MASTER_F32";
    }

    if (!wrong) return MIXP_OK;
    return mixp_context_fail(opt->ctx, code, "mixp_optimizer_add: '%s' %s", p->name, wrong);
}

/* Sets the dtypes of a parameter's states, by which kernels distinguish their kinds. */
static void mixpi_row_kinds(const mixp_optimizer *opt, const mixp_tensor *p, mixp_param_row *row) {
    const mixp_optimizer_states *s = &opt->states;
    row->m_dtype = row->v_dtype = row->master_dtype = MIXP_F32;
    if (mixpi_keeps_f32(opt, p)) return;
    if (s->m == MIXP_MOMENT_BF16) row->m_dtype = MIXP_BF16;
    if (s->m == MIXP_MOMENT_8BIT) row->m_dtype = MIXP_F8_E4M3;
    if (s->v == MIXP_MOMENT_BF16) row->v_dtype = MIXP_BF16;
    if (s->v == MIXP_MOMENT_8BIT) row->v_dtype = MIXP_U8;
    if (!mixpi_has_m(&opt->plan)) row->m_dtype = MIXP_F32;
    if (!mixpi_has_v(opt->plan.kind)) row->v_dtype = MIXP_F32;
    if (!mixpi_master_is_split(opt, p)) return;
    row->master_dtype = s->master == MIXP_MASTER_16BIT ? MIXP_BF16 : MIXP_U8;
}

static int mixpi_is_8bit(mixp_dtype dtype) { return dtype == MIXP_F8_E4M3 || dtype == MIXP_U8; }
static int64_t mixpi_state_blocks(const mixp_param_row *row) {
    return mixpi_ceil_div(row->count, MIXP_STATE_BLOCK);
}

/* Arrays in a block of memory; without an address, the block is only measured. A gap after each
 * array keeps streams whose size is a power of two from falling into the same cache sets. Large
 * arrays start at multiples of MIXPI_LARGE_ALIGN. */
typedef struct mixpi_layout {
    char  *memory;
    size_t used;
} mixpi_layout;

/* Where n elements start: bytes from the start of the block. */
static size_t mixpi_layout_place(mixpi_layout *lay, int64_t n, mixp_dtype dtype) {
    const size_t bytes = (size_t)n * mixp_dtype_size(dtype), to = mixpi_alignment(bytes);
    const size_t at = (lay->used + to - 1) / to * to;
    lay->used = at + mixpi_round_up(bytes) + 320;
    return at;
}

static void *mixpi_layout_take(mixpi_layout *lay, int wanted, int64_t n, mixp_dtype dtype) {
    if (!wanted) return NULL;
    size_t at = mixpi_layout_place(lay, n, dtype);
    return lay->memory ? lay->memory + at : NULL;
}

/* Lays out the states of a row. */
static void mixpi_row_layout(const mixp_optimizer *opt, mixp_param_row *row, mixpi_layout *lay) {
    const int m = mixpi_has_m(&opt->plan), v = mixpi_has_v(opt->plan.kind);
    const int master = mixpi_is_low(row->weight_dtype) && !opt->no_master;
    const int64_t blocks = mixpi_state_blocks(row);
    row->missed = (int64_t *)(void *)lay->memory;
    lay->used = 64;
    row->m = mixpi_layout_take(lay, m, row->count, row->m_dtype);
    row->v = mixpi_layout_take(lay, v, row->count, row->v_dtype);
    row->master = mixpi_layout_take(lay, master, row->count, row->master_dtype);
    row->third = (float *)mixpi_layout_take(lay, mixpi_has_third(&opt->plan), row->count, MIXP_F32);
    row->m_scale =
        (uint8_t *)mixpi_layout_take(lay, mixpi_is_8bit(row->m_dtype), blocks, MIXP_F8_E8M0);
    row->v_scale =
        (uint8_t *)mixpi_layout_take(lay, mixpi_is_8bit(row->v_dtype), blocks, MIXP_F8_E8M0);
}

/* Starts the sums of an Adagrad row at the description's value. */
MIXPI_SELDOM
static mixp_result mixpi_sum_start(const mixp_optimizer *opt, const mixp_param_row *row) {
    const mixp_out v = mixpi_out_to(row->v, row->v_dtype, 0);
    const float root = sqrtf(opt->initial_sum);
    const uint32_t scale = mixpi_state_scale_v(mixp_bits_of_f32(root));
    if (row->v_dtype != MIXP_U8)
        return mixpi_fill_with(opt->ctx, v, row->count, (double)opt->initial_sum);
    MIXPI_TRY(mixpi_fill_with(
        opt->ctx, mixpi_out_to(row->v_scale, MIXP_U8, 0), mixpi_state_blocks(row), (double)scale));
    return mixpi_fill_with(opt->ctx, v, row->count, (double)mixpi_state_v(root, scale, 0x8000u));
}

/* Allocates a zeroed block of device memory for a row: missed steps, moments, master weight. */
static mixp_result mixpi_row_memory(mixp_optimizer *opt, mixp_param_row *row, int64_t joined_at) {
    const size_t part = (size_t)row->count * sizeof(float);
    mixpi_layout lay = { NULL, 0 };
    if (part > ((size_t)-1 - 4096) / 5) return mixpi_out_of_memory(opt->ctx, part);
    mixpi_row_layout(opt, row, &lay);
    lay.memory = (char *)mixpi_opt_device(opt, lay.used);
    if (!lay.memory) return MIXP_ERR_MEMORY;
    mixpi_row_layout(opt, row, &lay);
    if (opt->initial_sum > 0.0f && mixpi_sum_start(opt, row) != MIXP_OK) return MIXP_ERR_DEVICE;
    return joined_at ? mixpi_upload(opt->ctx, row->missed, &joined_at, sizeof joined_at) : MIXP_OK;
}

/* The array that is averaged: the f32 master weight if there is one, otherwise the weight. */
static mixp_in mixpi_average_of(const mixp_param_row *row) {
    if (row->master && row->master_dtype == MIXP_F32) return mixpi_in(row->master, MIXP_F32);
    return mixpi_in(row->weight, row->weight_dtype);
}

/* The row of an average. With sharded states, a rank averages what it updates: some parameters, and
 * pieces of others. */
static mixp_param_row mixpi_ema_row(const mixp_optimizer *opt, int64_t i, double decay) {
    const mixpi_slot *slot = &opt->slot[i];
    const mixp_param_row *all = &opt->rows[i];
    const mixp_param_row of = slot->where == MIXPI_IN_PIECES ? opt->ctx->crew->piece(opt, i) : *all;
    const size_t before = (size_t)((char *)of.weight - (char *)all->weight);
    mixp_param_row row = MIXPI_ZERO;
    row.weight = slot->ema + before / mixp_dtype_size(of.weight_dtype);
    row.weight_dtype = row.master_dtype = row.m_dtype = row.v_dtype = MIXP_F32;
    row.grad_dtype = mixpi_average_of(&of).dtype;
    row.grad = mixpi_average_of(&of).data == of.master ? of.master : of.weight;
    row.count = of.count;
    row.active = slot->where != MIXPI_AWAY && of.count > 0;
    row.rate = (float)(1.0 - decay);
    return row;
}

/* Starts average i at the weight, and at the master where this rank keeps it. */
static mixp_result mixpi_ema_start(mixp_optimizer *opt, int64_t i) {
    const mixp_param_row row = mixpi_ema_row(opt, i, 0.0);
    mixp_result r = mixpi_convert_to(opt->ctx, mixpi_out_to(opt->slot[i].ema, MIXP_F32, 0),
        mixpi_tensor_in(opt->slot[i].param), opt->rows[i].count);
    if (r != MIXP_OK || !row.active) return r;
    return mixpi_convert_to(opt->ctx, mixpi_out_to(row.weight, MIXP_F32, 0),
        mixpi_in(row.grad, row.grad_dtype), row.count);
}

/* Is average i still the weight from which it started? Then it follows a weight that is written. */
static int mixpi_ema_is_new(const mixp_optimizer *opt, int64_t i) {
    return i >= opt->ema_begun && i < opt->ema_count;
}

/* Copies elements of a written weight, n from `first` on, into an f32 master, if their value is no
 * longer the master's rounded value. The others keep the master's further digits, so that a program
 * that clips its weights after each step, or writes them back, does not stop their training.
 * scratch: n numbers of 16 bits, then n bytes. */
static mixp_result mixpi_master_follow(
    mixp_context *ctx, const mixp_param_row *row, int64_t first, int64_t n, char *scratch) {
    const mixp_kernels *kernels = ctx->device->kernels;
    const size_t size = mixp_dtype_size(row->weight_dtype);
    const mixp_in weight =
        mixpi_in((const char *)row->weight + (size_t)first * size, row->weight_dtype);
    const mixp_out master = mixpi_out_to((float *)row->master + first, MIXP_F32, 0);
    mixp_where_args choice;

    mixp_compare_args same = MIXPI_ZERO;
    same.how = MIXP_COMPARE_EQ;
    same.rank = 1;
    same.shape[0] = n;
    same.a = mixpi_in(scratch, row->weight_dtype);
    same.b = weight;
    same.a_strides[0] = same.b_strides[0] = 1;
    same.y = (uint8_t *)scratch + (size_t)n * size;

    /* The choice reads its mask as numbers. */
    memset(&choice, 0, sizeof choice);
    choice.rank = 1;
    choice.shape[0] = n;
    choice.mask = mixpi_in(scratch, MIXP_BF16);
    choice.a = mixpi_in(master.data, MIXP_F32);
    choice.b = weight;
    choice.mask_strides[0] = choice.a_strides[0] = choice.b_strides[0] = 1;
    choice.y = master;

    MIXPI_TRY(mixpi_convert_to(ctx, mixpi_out_to(scratch, row->weight_dtype, 0), choice.a, n));
    MIXPI_TRY(kernels->compare(&ctx->exec, &same));
    MIXPI_TRY(
        mixpi_convert_to(ctx, mixpi_out_to(scratch, MIXP_BF16, 0), mixpi_in(same.y, MIXP_U8), n));
    return kernels->where(&ctx->exec, &choice);
}

/* Can the master keep its further digits where its weight is written? A split master cannot: it
 * holds no copy of the weight's bits with which to compare the written ones. */
static int mixpi_master_can_keep(const mixp_context *ctx, const mixp_param_row *row) {
    const mixp_kernels *kernels = ctx->device->kernels;
    return row->master && !mixpi_row_is_split(row) && kernels->compare && kernels->where;
}

/* Does the master of parameter i lack all of the weight's present values? It is new, or all of the
 * weight was loaded since. */
static int mixpi_master_is_void(const mixp_optimizer *opt, int64_t i) {
    const mixpi_slot *slot = &opt->slot[i];
    return i >= opt->count || slot->version < slot->param->own.loaded;
}

/* Brings a master up to date with its weight, which was written. fresh 1: nothing in the master
 * counts. */
static mixp_result mixpi_master_take(mixp_context *ctx, const mixp_param_row *row, int fresh) {
    enum { PART = 1 << 16 };
    const int64_t part = mixpi_min(PART, row->count);
    mixp_result r = MIXP_OK;
    if (!row->master || !row->count) return MIXP_OK;
    if (mixpi_row_is_split(row)) /* no extra bits yet */
        return mixpi_device_zero(
            ctx, row->master, (size_t)row->count * mixp_dtype_size(row->master_dtype));
    if (fresh || !mixpi_master_can_keep(ctx, row))
        return mixpi_convert_to(ctx, mixpi_out_to(row->master, MIXP_F32, 0),
            mixpi_in(row->weight, row->weight_dtype), row->count);

    char *scratch = (char *)mixpi_context_scratch(ctx, (size_t)part * 3);
    if (!scratch) return MIXP_ERR_MEMORY;
    for (int64_t first = 0; first < row->count && r == MIXP_OK; first += part)
        r = mixpi_master_follow(ctx, row, first, mixpi_min(part, row->count - first), scratch);
    return r;
}

/* Brings the master of a weight that was written, and an average that has not begun, up to date. */
static mixp_result mixpi_master_sync(mixp_optimizer *opt, int64_t i) {
    mixpi_slot *slot = &opt->slot[i];
    mixp_param_row row = opt->rows[i];
    if (slot->where == MIXPI_IN_PIECES) row = opt->ctx->crew->piece(opt, i);
    MIXPI_TRY(mixpi_master_take(opt->ctx, &row, mixpi_master_is_void(opt, i)));
    if (mixpi_ema_is_new(opt, i)) MIXPI_TRY(mixpi_ema_start(opt, i));
    slot->version = slot->param->version;
    return MIXP_OK;
}
