/* ledger_gpt.h - GPTs, as examples/trainer/trainer.c trains them, on the device of ledger.h.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef LEDGER_GPT_H
#define LEDGER_GPT_H
#include "ledger.h"

typedef struct ledger_config {
    const char *name;
    int64_t     vocab, length, batch, layers, heads, width;
    mixp_dtype  dtype;
    int         level, accumulate;      /* micro-batches a step */
    int         epilogues;              /* MIXP_EPILOGUES_; with that of GELU, GELU is by tanh */
} ledger_config;

typedef struct ledger_layer { mixp_tensor *w, *b; } ledger_layer;
typedef struct ledger_part { ledger_layer norm1, qkv, proj, norm2, up, down; } ledger_part;

typedef struct ledger_gpt {
    ledger_config   c;
    mixp_context   *ctx;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_tensor    *wte, *wpe;
    ledger_layer    norm;
    ledger_part     parts[48];
    int32_t        *ids;
    int64_t         parameters;
} ledger_gpt;

typedef struct ledger_result {
    double  parameters;
    size_t  permanent, forward, peak;   /* bytes in use: between steps, after forward, at most */
    size_t  allocated, given;           /* bytes taken from the device: by the context, and by it */
    int64_t pieces;
    char    error[400];                 /* "" for none */
} ledger_result;

static mixp_tensor *ledger_parameter(ledger_gpt *m, const char *part, int i, int64_t rows,
                                     int64_t cols) {
    int64_t shape[2];
    char    name[48];
    mixp_tensor *t;
    shape[0] = rows;
    shape[1] = cols;
    snprintf(name, sizeof name, "%s.%d.%s", part, i, cols ? "weight" : "bias");
    t = mixp_param(m->ctx, name, MIXP_F32, cols ? 2 : 1, shape);
    mixp_optimizer_add(m->opt, t, NULL);
    m->parameters += rows * (cols ? cols : 1);
    return t;
}
static ledger_layer ledger_layer_of(ledger_gpt *m, const char *part, int i, int64_t rows,
                                    int64_t cols) {
    ledger_layer l;
    char name[32];
    snprintf(name, sizeof name, "%s.w", part);
    l.w = ledger_parameter(m, name, i, rows, cols);
    l.b = ledger_parameter(m, part, i, rows, 0);
    return l;
}

static void ledger_make(ledger_gpt *m) {
    mixp_context_desc desc = { 0 };
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_scaler_desc scaler = { 0 };
    int64_t w = m->c.width;
    desc.device = ledger_device();
    desc.threads = 1;
    desc.epilogues = m->c.epilogues;
    m->ctx = mixp_context_new(&desc);
    mixp_autocast_set_level(m->ctx, m->c.level);
    mixp_autocast_override(m->ctx, mixp_op_builtin(MIXP_OP_LAYER_NORM), MIXP_CLASS_LOW_OUT);
    adamw.max_norm = 1.0;
    m->opt = mixp_optimizer_new(m->ctx, &adamw);
    if (m->c.dtype != MIXP_F16) {
        scaler.rule = MIXP_RULE_STATIC;
        scaler.init_scale = 1;
    }
    m->scaler = mixp_scaler_new(m->ctx, &scaler);
    m->wte = ledger_parameter(m, "wte", 0, m->c.vocab, w);
    m->wpe = ledger_parameter(m, "wpe", 0, m->c.length, w);
    for (int i = 0; i < m->c.layers; i++) {
        ledger_part *p = &m->parts[i];
        p->norm1 = ledger_layer_of(m, "norm1", i, w, 0);
        p->qkv = ledger_layer_of(m, "qkv", i, 3 * w, w);
        p->proj = ledger_layer_of(m, "proj", i, w, w);
        p->norm2 = ledger_layer_of(m, "norm2", i, w, 0);
        p->up = ledger_layer_of(m, "up", i, 4 * w, w);
        p->down = ledger_layer_of(m, "down", i, w, 4 * w);
    }
    m->norm = ledger_layer_of(m, "norm", 0, w, 0);
    m->ids = (int32_t *)calloc((size_t)(m->c.batch * m->c.length), sizeof *m->ids);
}

static mixp_tensor *ledger_linear(ledger_gpt *m, mixp_tensor *h, ledger_layer l)
{ return mixp_linear(m->ctx, h, l.w, l.b); }
static mixp_tensor *ledger_normed(ledger_gpt *m, mixp_tensor *h, ledger_layer l)
{ return mixp_layer_norm(m->ctx, h, l.w, l.b, 1e-5f); }

static mixp_tensor *ledger_added(ledger_gpt *m, mixp_tensor **h, mixp_tensor *f, ledger_layer l)
{
    mixp_tensor_set_disposable(f, 1);
    return mixp_add_layer_norm(m->ctx, *h, f, l.w, l.b, 1e-5f, h);
}

/* GELU by erf, which no library's product makes, or by tanh. */
static mixp_tensor *ledger_mlp(ledger_gpt *m, mixp_tensor *y, const ledger_part *p) {
    if (m->c.epilogues & MIXP_EPILOGUES_GELU)
        return mixp_mlp(m->ctx, y, p->up.w, p->up.b, p->down.w, p->down.b);
    return ledger_linear(m, mixp_gelu(m->ctx, ledger_linear(m, y, p->up)), p->down);
}

/* y: the norm of *h, before and after. */
static mixp_tensor *ledger_part_of(ledger_gpt *m, const ledger_part *p, ledger_layer next,
                                   mixp_tensor **h, mixp_tensor *y) {
    y = mixp_attention(m->ctx, ledger_linear(m, y, p->qkv), (int)m->c.heads, 1, 0);
    y = ledger_added(m, h, ledger_linear(m, y, p->proj), p->norm2);
    return ledger_added(m, h, ledger_mlp(m, y, p), next);
}

/* The scaled loss of a micro-batch. */
static mixp_tensor *ledger_loss_of(ledger_gpt *m) {
    float share = 1.0f / (float)m->c.accumulate;
    int64_t shape[2];
    mixp_context *c = m->ctx;
    mixp_tensor *in, *h, *y, *loss = NULL;
    shape[0] = m->c.batch;
    shape[1] = m->c.length;
    in = mixp_input(c, MIXP_I32, 2, shape, m->ids);
    MIXP_AUTOCAST(c, m->c.dtype) {
        h = mixp_embedding(c, m->wpe, mixp_input(c, MIXP_I32, 1, &m->c.length, m->ids));
        h = mixp_add(c, mixp_embedding(c, m->wte, in), h);
        y = ledger_normed(m, h, m->parts[0].norm1);
        for (int i = 0; i < m->c.layers; i++) {
            ledger_layer next = i + 1 < m->c.layers ? m->parts[i + 1].norm1 : m->norm;
            y = ledger_part_of(m, &m->parts[i], next, &h, y);
        }
        h = mixp_linear(c, y, m->wte, NULL);
        mixp_tensor_set_disposable(h, 1);
        loss = mixp_scaler_cross_entropy(m->scaler, h, mixp_input(c, MIXP_I32, 2, shape, m->ids),
                                         MIXP_IGNORE, share, NULL);
    }
    return loss;
}

/* One step; used, if given: bytes in use after its first forward pass. */
static void ledger_step(ledger_gpt *m, size_t *used) {
    for (int i = 0; i < m->c.accumulate; i++) {
        if (i == 0) mixp_zero_grad(m->opt);
        mixp_step_begin(m->ctx);
        ledger.backward = 0;
        mixp_tensor *loss = ledger_loss_of(m);
        if (used && i == 0) *used = mixp_context_memory(m->ctx).used;
        ledger.backward = 1;
        mixp_backward(m->ctx, loss);
    }
    mixp_scaler_step(m->scaler, m->opt);
    mixp_scaler_update(m->scaler);
}

/* What the third step of c asks for, in `ledger`; the first two fill caches and settle memory. */
static ledger_result ledger_run(const ledger_config *c, FILE *calls) {
    static ledger_gpt m;
    ledger_result r;
    const char *why = "";
    memset(&m, 0, sizeof m);
    memset(&r, 0, sizeof r);
    ledger_clear();
    m.c = *c;
    if (m.c.accumulate < 1) m.c.accumulate = 1;
    ledger_make(&m);
    r.permanent = mixp_context_memory(m.ctx).used;
    for (int i = 0; i < 3; i++) {
        ledger.on = i == 2;
        ledger.calls = ledger.on ? calls : NULL;
        ledger_step(&m, &r.forward);
    }
    ledger.on = 0;
    r.parameters = (double)m.parameters;
    r.peak = mixp_context_memory(m.ctx).peak;
    r.allocated = mixp_context_memory(m.ctx).allocated;
    r.given = ledger.most;
    r.pieces = ledger.block_count;
    if (mixp_context_error(m.ctx, &why) != MIXP_OK) snprintf(r.error, sizeof r.error, "%s", why);
    mixp_context_free(m.ctx);
    free(m.ids);
    return r;
}

/* The two GPTs that figures are given for: GPT-2 124M with its rows padded, and the character GPT
 * that nanoGPT trains on a GPU. */
static ledger_config ledger_gpt2(mixp_dtype dtype, int level) {
    ledger_config c = { "GPT-2 124M", 50304, 1024, 64, 12, 12, 768, MIXP_F32, 0, 1, 0 };
    c.dtype = dtype;
    c.level = level;
    return c;
}
static ledger_config ledger_char(mixp_dtype dtype, int level) {
    ledger_config c = { "character GPT", 65, 256, 64, 6, 6, 384, MIXP_F32, 0, 1, 0 };
    c.dtype = dtype;
    c.level = level;
    return c;
}

#endif
