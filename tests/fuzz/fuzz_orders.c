/* fuzz_orders.c - calls in any order: begun, nested, crossed, left open, after an error, inside blocks, hooks and
 * operators, with tensors of older steps and of another context. Each call is right or a typed error with a message.
 * A failed call of a step changes neither weights nor counters, no call touches the other context, and after all
 * of them an ordinary step has the bits of the same step in a fresh context.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include <math.h>
#include "mixprec.h"
#include "examples/ops.h"
#include "examples/compare.h"
#include "fuzz.h"

enum { SIDE = 4, VALUES = SIDE * SIDE, WEIGHTS = 2, SLOTS = 8, OPENED = 4, DEPTH = 3, CONTEXTS = 2 };
static const int64_t square[2] = { SIDE, SIDE };

/* A context with a model, and what the calls have left in it. */
typedef struct world {
    mixp_context   *ctx;
    mixp_tensor    *w[WEIGHTS], *slot[SLOTS];
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    int             opened[OPENED], n_opened;   /* numbers of open regions */
} world;

static world    worlds[CONTEXTS];
static const uint8_t *input;
static size_t   left;               /* bytes of the input */
static int      depth;              /* of calls inside calls */
static long     alive;              /* pieces of memory */

static int next(int n) {
    if (!left) return 0;
    left--;
    return *input++ % n;
}

static void *take(size_t bytes, void *user) {
    void *p = malloc(bytes ? bytes : 1);
    (void)user;
    if (p) memset(p, 0xA5, bytes);
    alive += p != NULL;
    return p;
}
static void put(void *p, void *user) {
    (void)user;
    alive -= p != NULL;
    free(p);
}

/* --- one world ------------------------------------------------------------------------------------------- */

static void world_optimizer(world *m) {
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    sgd.lr = 0.125;
    m->opt = mixp_optimizer_new(m->ctx, &sgd);
    EXPECT(m->opt && mixp_optimizer_add_all(m->opt, "w*") == MIXP_OK);
}

static void world_open(world *m) {
    static const char *const names[WEIGHTS] = { "w0", "w1" };
    mixp_context_desc desc;
    memset(m, 0, sizeof *m);
    memset(&desc, 0, sizeof desc);
    desc.allocate = take;
    desc.release = put;
    desc.threads = 1;
    m->ctx = mixp_context_new(&desc);
    for (int i = 0; i < WEIGHTS; i++) {
        m->w[i] = mixp_param(m->ctx, names[i], MIXP_F32, 2, square);
        EXPECT(mixp_init_normal(m->w[i], 0, 0.5) == MIXP_OK);
    }
    m->scaler = mixp_scaler_new(m->ctx, NULL);
    world_optimizer(m);
}

static mixp_tensor *batch_of(world *m, int step) {
    float x[VALUES];
    for (int i = 0; i < VALUES; i++) x[i] = (float)((i * 7 + step * 5) % 11 - 5) / 8;
    return mixp_input(m->ctx, MIXP_F32, 2, square, x);
}

static mixp_tensor *loss_of(world *m, mixp_tensor *x) {
    mixp_tensor *h = mixp_gelu(m->ctx, mixp_linear(m->ctx, x, m->w[0], NULL));
    h = mixp_layer_norm(m->ctx, mixp_linear(m->ctx, h, m->w[1], NULL), NULL, NULL, 1e-5f);
    return mixp_mean(m->ctx, mixp_mul(m->ctx, h, x), MIXP_ALL, 0);
}

/* Weights, scale and counters: what a failed call of a step must not change. */
typedef struct state {
    float             w[WEIGHTS][VALUES];
    int64_t           applied;
    mixp_scaler_saved scaler;
} state;

static state state_of(const world *m) {
    state s;
    memset(&s, 0, sizeof s);
    for (int i = 0; i < WEIGHTS; i++) EXPECT(mixp_read(m->w[i], s.w[i], MIXP_F32, VALUES) == MIXP_OK);
    s.applied = mixp_optimizer_applied(m->opt);
    EXPECT(mixp_scaler_save(m->scaler, &s.scaler) == MIXP_OK);
    return s;
}

/* --- the calls --------------------------------------------------------------------------------------------- */

static mixp_result any_calls(world *m, int n);

static mixp_tensor *any_tensor(world *m) {
    const int k = next(SLOTS + WEIGHTS + 2);
    if (k < SLOTS) return m->slot[k];
    if (k < SLOTS + WEIGHTS) return m->w[k - SLOTS];
    return k & 1 ? worlds[next(CONTEXTS)].slot[next(SLOTS)] : NULL;
}

static mixp_result keep(world *m, mixp_tensor *t) {
    m->slot[next(SLOTS)] = t;
    return t ? MIXP_OK : mixp_context_error(m->ctx, NULL);
}

/* Calls within a call. The result is any tensor, or a new one. */
static mixp_tensor *inside(world *m, mixp_tensor *x) {
    depth++;
    if (depth < DEPTH) any_calls(m, next(6));
    depth--;
    return next(3) ? mixp_gelu(m->ctx, x) : any_tensor(m);
}
static mixp_tensor *block(mixp_context *ctx, mixp_tensor *x, void *user)
{ (void)ctx; return inside((world *)user, x); }
static mixp_tensor *called(mixp_context *ctx, void *user) {
    world *m = (world *)user;
    (void)ctx;
    return next(2) ? loss_of(m, batch_of(m, 0)) : inside(m, m->w[0]);
}
static void see(mixp_context *ctx, const mixp_sight *sight, void *user) {
    (void)ctx; (void)sight; (void)user;
}

/* An operator whose functions make calls: y = x. */
static mixp_result own_infer(mixp_call *c)
{ return mixp_call_output(c, c->in[0]->dtype, c->in[0]->rank, c->in[0]->shape); }
static mixp_result own_forward(mixp_call *c) {
    world *m = &worlds[c->ctx == worlds[1].ctx];
    mixp_tensor *y = c->out, *x = c->in[0];     /* a step that begins here, at its second try, recycles c */
    if (depth < DEPTH && c->ctx == m->ctx) {
        depth++;
        any_calls(m, next(4));
        depth--;
    }
    return mixp_copy(y, x);
}
static mixp_result own_backward(mixp_call *c) {
    int add;
    mixp_tensor *dx = mixp_call_grad(c, 0, &add);
    return dx ? mixp_copy(dx, c->out->grad) : MIXP_OK;
}
static const mixp_op own = { "own", MIXP_CLASS_KEEP, 0, own_infer, own_forward, own_backward, NULL };

static void region_close(world *m) {
    if (m->n_opened) mixp_autocast_close(m->ctx, m->opened[--m->n_opened]);
}

/* Opens and closes: regions, scopes, blocks left open. */
static mixp_result region_call(world *m) {
    const mixp_dtype dtype = next(3) ? MIXP_F16 : MIXP_BF16;
    mixp_autocast region;
    memset(&region, 0, sizeof region);
    region.dtype = next(4) ? dtype : MIXP_F32;
    region.level = next(4);
    switch (next(13)) {
    case 0:  if (m->n_opened < OPENED) m->opened[m->n_opened++] = mixp_autocast_open_with(m->ctx, &region);
             break;
    case 1:  region_close(m); break;
    case 2:  if (m->n_opened < OPENED) m->opened[m->n_opened++] = mixp_scope_open(m->ctx, "s");
             break;
    case 3:  region_close(m); break;
    case 4:  mixpi_autocast_enter(m->ctx, dtype); break;
    case 5:  mixpi_autocast_leave(m->ctx); break;
    case 6:  mixpi_no_grad_enter(m->ctx); break;
    case 7:  mixpi_no_grad_leave(m->ctx); break;
    case 8:  mixpi_scope_enter(m->ctx, "e"); break;
    case 9:  mixpi_scope_leave(m->ctx); break;
    case 10: mixpi_autocast_enter(m->ctx, dtype); break;
    case 11: if (m->n_opened < OPENED)
                 m->opened[m->n_opened++] = next(2) ? mixp_no_grad_open(m->ctx) : mixp_autocast_open(m->ctx, dtype);
             break;
    default: mixp_autocast_close(m->ctx, next(3) && m->n_opened ? m->opened[--m->n_opened] : next(70) - 3);
    }
    return mixp_context_error(m->ctx, NULL);
}

/* The guard, observers, comparisons, graphs. */
static mixp_result watch_call(world *m) {
    static const mixp_guard_desc often = { 1, 1, 0, 0, 0, 0, 0, 0 };
    mixp_observer observer = { see, NULL, 0 }, before;
    mixp_difference rows[4];
    mixp_compare_desc how;
    mixp_site_info site;
    int64_t n;
    memset(&how, 0, sizeof how);
    how.a.dtype = MIXP_F16;
    how.a.level = 1;
    how.fn = called;
    how.user = m;
    observer.trial = next(2);
    switch (next(9)) {
    case 0:  return mixp_guard_start(m->ctx, next(2) ? &often : NULL);
    case 1:  return mixp_guard_stop(m->ctx);
    case 2:  return mixp_observe(m->ctx, &observer, next(2) ? &before : NULL);
    case 3:  return mixp_observe(m->ctx, NULL, NULL);
    case 4:  return mixp_compare(m->ctx, &how, rows, 4, &n);
    case 5:  return mixp_guard_pin(m->ctx, next(2) ? "*" : "w0*", next(2) ? MIXP_F32 : MIXP_DTYPE_COUNT);
    case 6:  return mixp_capture_begin(m->ctx);
    case 7:  EXPECT(mixp_capture_end(m->ctx) == NULL); break;
    default: mixp_site(m->ctx, next(4), &site);
    }
    return mixp_context_error(m->ctx, NULL);
}

/* Makes tensors. */
static mixp_result tensor_call(world *m) {
    mixp_tensor *t = any_tensor(m), *in[1];
    in[0] = t;
    switch (next(15)) {
    case 0:  return keep(m, batch_of(m, next(3)));
    case 1:  return keep(m, mixp_gelu(m->ctx, t));
    case 2:  return keep(m, mixp_mul(m->ctx, t, any_tensor(m)));
    case 3:  return keep(m, mixp_linear(m->ctx, t, m->w[next(WEIGHTS)], NULL));
    case 4:  return keep(m, mixp_mean(m->ctx, t, MIXP_ALL, 0));
    case 5:  return keep(m, mixp_reshape(m->ctx, t, 2, square));
    case 6:  return keep(m, mixp_detach(m->ctx, t));
    case 7:  return keep(m, mixp_dropout(m->ctx, t, 0.5f, 1));
    case 8:  return keep(m, loss_of(m, next(2) ? batch_of(m, 1) : t));
    case 9:  return keep(m, mixp_jvp(m->ctx, t, any_tensor(m), NULL));
    case 10: return keep(m, mixp_recompute(m->ctx, block, m, t));
    case 11: return keep(m, mixp_apply(m->ctx, &own, 1, in, 1, NULL));
    case 12: return keep(m, mixp_exp(m->ctx, t));
    case 13: return keep(m, mixp_scaler_scale(m->scaler, t));
    default: return keep(m, t ? t->grad : NULL);
    }
}

/* Is t a weight, or another shape of one? */
static int is_weight(const mixp_tensor *t) {
    int i, known = 0;
    for (i = 0; t && i < CONTEXTS * WEIGHTS; i++) known |= t->data == worlds[i % CONTEXTS].w[i / CONTEXTS]->data;
    return known;
}

/* Does something with a tensor, and writes no weight. */
static mixp_result use_call(world *m) {
    mixp_tensor *t = any_tensor(m);
    float values[VALUES] = { 0.5f };
    double worst;
    switch (next(10)) {
    case 0:  return mixp_read(t, values, MIXP_F32, VALUES);
    case 1:  return is_weight(t) ? MIXP_OK : mixp_write(t, values, MIXP_F32, VALUES);
    case 2:  return is_weight(t) ? MIXP_OK : mixp_copy(t, any_tensor(m));
    case 3:  return mixp_tensor_set_disposable(t, next(2));
    case 4:  return mixp_tensor_set_requires_grad(t, next(2));
    case 5:  mixp_item(t); break;
    case 6:  mixp_retry_loss(m->ctx, t); break;
    case 7:  return mixp_optimizer_set_loss(m->opt, t);
    case 8:  return depth ? MIXP_OK : mixp_check_gradients(m->ctx, called, m, 1, m->w, 0, &worst);
    default: return mixp_fill(is_weight(t) ? NULL : t, 0.25);
    }
    return mixp_context_error(m->ctx, NULL);
}

/* The calls of a step. */
static mixp_result step_call(world *m) {
    const int k = next(16);
    switch (k) {
    case 0:  return mixp_step_begin(m->ctx);
    case 1:  return mixp_eval_begin(m->ctx);
    case 2: case 3:
             return mixp_backward(m->ctx, any_tensor(m));
    case 4:  return mixp_zero_grad(m->opt);
    case 5:  return mixp_scaler_unscale(m->scaler, m->opt);
    case 6:  return mixp_clip_grad_norm(m->opt, 0.5);
    case 7: case 8:
             return mixp_scaler_step(m->scaler, m->opt);
    case 9: case 10:
             return mixp_scaler_update(m->scaler);
    case 11: return mixp_optimizer_step(m->opt);
    case 12: mixp_retry(m->scaler, next(3)); break;
    case 13: return mixp_scaler_update_to(m->scaler, next(2) ? 1024.0f : 1e38f);
    case 14: return next(2) ? mixp_optimizer_set_ema(m->opt, 0.5) : mixp_optimizer_swap_ema(m->opt);
    default: return mixp_optimizer_sample(m->opt);
    }
    return mixp_context_error(m->ctx, NULL);
}

/* An ordinary start of a step, so that the rest often has something to do. */
static mixp_result whole_step(world *m) {
    mixp_tensor *loss = NULL;
    mixp_step_begin(m->ctx);
    mixp_zero_grad(m->opt);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) { loss = loss_of(m, batch_of(m, 2)); }
    keep(m, loss);
    return mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss));
}

static mixp_result free_call(world *m) {
    mixp_result r;
    if (depth) return MIXP_OK;
    if (next(2)) {
        r = mixp_scaler_free(m->scaler);
        if (r == MIXP_OK) m->scaler = mixp_scaler_new(m->ctx, NULL);
        EXPECT(m->scaler != NULL);
        return r;
    }
    r = mixp_optimizer_free(m->opt);
    if (r != MIXP_OK) return r;
    mixp_tensor_set_requires_grad(m->w[0], 1);
    mixp_tensor_set_requires_grad(m->w[1], 1);
    world_optimizer(m);
    return r;
}

/* r is a code of mixp_result, and an error of the context has a message. Clears the errors of both contexts. */
static void understood(world *m, mixp_result r) {
    const char *why = NULL;
    const mixp_result kept = mixp_context_error(m->ctx, &why);
    EXPECT((unsigned)r < MIXP_RESULT_COUNT && (unsigned)kept < MIXP_RESULT_COUNT);
    EXPECT(why && (kept == MIXP_OK) == !*why);
    for (int i = 0; i < CONTEXTS && !depth; i++) mixp_context_clear_error(worlds[i].ctx);
}

/* A report that comes with an update which has been made: a divergence, or a pin that fits no site. */
static int comes_late(mixp_result r) { return r == MIXP_ERR_DIVERGED || r == MIXP_ERR_ARGUMENT; }

static mixp_result any_call(world *m) {
    state before, after;
    mixp_result r = MIXP_OK;
    switch (next(8)) {
    case 0: case 1:
            before = state_of(m);
            r = step_call(m);
            after = state_of(m);
            if (r != MIXP_OK && !comes_late(r)) EXPECT(memcmp(&before, &after, sizeof before) == 0);
            break;
    case 2: r = region_call(m); break;
    case 3: r = watch_call(m); break;
    case 4: case 5:
            r = tensor_call(m); break;
    case 6: r = use_call(m); break;
    default: r = next(3) ? whole_step(m) : free_call(m);
    }
    understood(m, r);
    return r;
}

static mixp_result any_calls(world *m, int n) {
    mixp_result r = MIXP_OK;
    while (n-- > 0) r = any_call(m);
    return r;
}

/* --- afterwards -------------------------------------------------------------------------------------------- */

/* Ends whatever was left open. */
static void settle(world *m) {
    for (int i = 0; i < 3; i++) {
        mixp_context_clear_error(m->ctx);
        mixp_step_begin(m->ctx);
    }
    mixp_autocast_close(m->ctx, 0);
    EXPECT(mixp_autocast_current(m->ctx).level == 0);
    mixp_context_clear_error(m->ctx);
    mixp_scaler_update(m->scaler);
    mixp_context_clear_error(m->ctx);
    mixp_observe(m->ctx, NULL, NULL);
    mixp_guard_pin(m->ctx, "*", MIXP_DTYPE_COUNT);
    mixp_guard_stop(m->ctx);
    mixp_context_clear_error(m->ctx);
    for (int i = 0; i < WEIGHTS; i++) EXPECT(mixp_tensor_set_requires_grad(m->w[i], 1) == MIXP_OK);
    if (mixp_optimizer_set_ema(m->opt, 0.5) != MIXP_OK) {       /* the averages are in */
        mixp_context_clear_error(m->ctx);
        EXPECT(mixp_optimizer_swap_ema(m->opt) == MIXP_OK);
    }
    EXPECT(mixp_scaler_update_to(m->scaler, 1024.0f) == MIXP_OK);
    EXPECT(mixp_context_error(m->ctx, NULL) == MIXP_OK);
}

/* Two steps as users write them. */
static void ordinary(world *m, float *loss) {
    mixp_tensor *t = NULL;
    for (int i = 0; i < 2; i++) {
        EXPECT(mixp_step_begin(m->ctx) == MIXP_OK && mixp_zero_grad(m->opt) == MIXP_OK);
        MIXP_AUTOCAST(m->ctx, MIXP_F16) { t = loss_of(m, batch_of(m, i)); }
        EXPECT(mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, t)) == MIXP_OK);
        EXPECT(mixp_scaler_step(m->scaler, m->opt) == MIXP_OK && mixp_scaler_update(m->scaler) == MIXP_OK);
        loss[i] = (float)mixp_item(t);
    }
    EXPECT(mixp_context_error(m->ctx, NULL) == MIXP_OK);
}

static void as_in_a_fresh_context(world *m) {
    float got[2], want[2];
    world fresh;
    settle(m);
    state begin = state_of(m);
    world_open(&fresh);
    for (int i = 0; i < WEIGHTS; i++) EXPECT(mixp_write(fresh.w[i], begin.w[i], MIXP_F32, VALUES) == MIXP_OK);
    EXPECT(mixp_scaler_update_to(fresh.scaler, 1024.0f) == MIXP_OK);
    ordinary(m, got);
    ordinary(&fresh, want);
    state end = state_of(m);
    state fresh_end = state_of(&fresh);
    EXPECT(memcmp(got, want, sizeof got) == 0);
    EXPECT(memcmp(end.w, fresh_end.w, sizeof end.w) == 0);
    mixp_context_free(fresh.ctx);
}

static void fuzz_one(const uint8_t *data, size_t size) {
    input = data;
    left = size;
    depth = 0;
    for (int i = 0; i < CONTEXTS; i++) world_open(&worlds[i]);
    while (left) {
        int turn = next(4) == 0;
        state other = state_of(&worlds[!turn]);
        any_calls(&worlds[turn], 1 + next(6));
        state same = state_of(&worlds[!turn]);
        EXPECT(memcmp(&other, &same, sizeof other) == 0);
    }
    for (int i = 0; i < CONTEXTS; i++) as_in_a_fresh_context(&worlds[i]);
    for (int i = 0; i < CONTEXTS; i++) mixp_context_free(worlds[i].ctx);
    EXPECT(alive == 0);
}

static size_t fuzz_seed(int i, uint8_t *out) {
    uint32_t x = 2463534242u + (uint32_t)i * 7919u;
    if (i >= 20) return 0;
    for (size_t k = 0; k < 300; k++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        out[k] = (uint8_t)(x >> 11);
    }
    return 300;
}
