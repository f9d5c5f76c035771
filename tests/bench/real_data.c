/* real_data.c - data that others made: does a guarded fp16 or bf16 run end as f32 does?
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     build/bench/real_data [-s SEEDS] [-i IMPRECISE] [-v] FILE...
 *
 * FILE: a set that tests/bench/real_data.py wrote. A network of two hidden layers (64, ReLU) learns it
 * with AdamW at 1e-3, 600 steps of 32 rows, four fifths of the rows; the rest tests. Each seed gives all
 * ways the same weights, rows and batches. The loss is the mean of the last 20 steps, in the
 * way's own dtypes; the test is in them too: the share of wrong classes, or the mean squared error.
 * -i: mixp_guard_desc.imprecise. -v: prints the events.
 *
 * Behind each loss is its distance from f32's, with the standard error over the seeds. A few sets are
 * raw columns that hardly train; there f32 itself moves as far when its first weights move by one unit in
 * the last place: the row "f32, 1 ulp". ABOVE: a guarded way ends more than 2 % and more than
 * two standard errors above f32. The program then ends with 1.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 64, ROWS = 32, STEPS = 600, LAST = 20, MOST_SEEDS = 100, WAYS = 6 };

static const struct way {
    const char *name;
    mixp_dtype  dtype;
    int         guard, moved;   /* moved: the first weights are one unit in the last place larger */
} ways[WAYS] = {
    { "f32", MIXP_F32, 0, 0 },    { "f32, 1 ulp", MIXP_F32, 0, 1 },
    { "bf16", MIXP_BF16, 0, 0 },  { "bf16, guard", MIXP_BF16, 1, 0 },
    { "fp16", MIXP_F16, 0, 0 },   { "fp16, guard", MIXP_F16, 1, 0 },
};

typedef struct set {
    char   name[64];
    int    rows, columns, classes;
    float *x, *y;               /* x: rows by columns */
    int   *order;               /* the rows that train, then those that test */
} set;

typedef struct result {
    double loss, test;          /* NaN where the run ended early */
    int    skipped, events, imprecise;
} result;

static int verbose;
static float imprecise;

/* --- the data -------------------------------------------------------------------------------- */

static uint64_t next(uint64_t *s) {
    uint64_t z = *s += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}
static double uniform(uint64_t *s) { return (double)(next(s) >> 11) / 9007199254740992.0; }

static void *room(size_t n, size_t size) {
    void *p = calloc(n, size);
    if (!p) exit(2);
    return p;
}

static int set_read(set *d, const char *path) {
    FILE *f = fopen(path, "r");
    int   i, k, ok = f != NULL;
    memset(d, 0, sizeof *d);
    ok = ok && fscanf(f, "%63[^\n]%d%d%d", d->name, &d->rows, &d->columns, &d->classes) == 4;
    ok = ok && d->rows > 0 && d->rows < 1000000 && d->columns > 0 && d->columns < 10000;
    if (ok) {
        d->x = (float *)room((size_t)d->rows * (size_t)d->columns, sizeof *d->x);
        d->y = (float *)room((size_t)d->rows, sizeof *d->y);
        d->order = (int *)room((size_t)d->rows, sizeof *d->order);
    }
    for (i = 0; ok && i < d->rows; i++) {
        for (k = 0; k < d->columns; k++) ok &= fscanf(f, "%f", &d->x[i * d->columns + k]) == 1;
        ok &= fscanf(f, "%f", &d->y[i]) == 1;
    }
    if (f) fclose(f);
    return ok;
}

/* The order of the rows for a seed. */
static void set_shuffle(set *d, uint64_t seed) {
    for (int i = 0; i < d->rows; i++) d->order[i] = i;
    for (int i = d->rows - 1; i > 0; i--) {
        const int k = (int)(next(&seed) % (uint64_t)(i + 1)), held = d->order[i];
        d->order[i] = d->order[k];
        d->order[k] = held;
    }
}

/* --- the network ----------------------------------------------------------------------------- */

typedef struct net {
    mixp_context   *ctx;
    mixp_tensor    *w[3], *b[3];
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
} net;

/* Weights and biases of a linear of `in` inputs, as PyTorch draws them. */
static mixp_tensor *drawn(net *m, const char *name, int rank, const int64_t shape[2], int moved,
                          uint64_t *seed) {
    const int64_t  n = rank > 1 ? shape[0] * shape[1] : shape[0];
    const double   most = 1 / sqrt((double)shape[1]);
    mixp_tensor   *t = mixp_param(m->ctx, name, MIXP_F32, rank, shape);
    float         *host = (float *)room((size_t)n, sizeof *host);
    int64_t        i;
    for (i = 0; i < n; i++) host[i] = (float)((2 * uniform(seed) - 1) * most);
    for (i = 0; i < n && moved; i++) host[i] = nextafterf(host[i], 2 * host[i]);
    mixp_write(t, host, MIXP_F32, n);
    free(host);
    mixp_optimizer_add(m->opt, t, NULL);
    return t;
}

static net net_open(const set *d, const struct way *way, uint64_t seed) {
    static const char *const weights[3] = { "w0", "w1", "w2" }, *const biases[3] = { "b0", "b1", "b2" };
    const int64_t       sizes[4] = { d->columns, HIDDEN, HIDDEN, d->classes ? d->classes : 1 };
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_guard_desc     guard;
    net                 m;
    memset(&m, 0, sizeof m);
    memset(&guard, 0, sizeof guard);
    guard.imprecise = imprecise;
    adamw.lr = 1e-3;
    m.ctx = mixp_context_new(NULL);
    m.opt = mixp_optimizer_new(m.ctx, &adamw);
    for (int i = 0; i < 3; i++) {
        const int64_t shape[2] = { sizes[i + 1], sizes[i] };
        m.w[i] = drawn(&m, weights[i], 2, shape, way->moved, &seed);
        m.b[i] = drawn(&m, biases[i], 1, shape, way->moved, &seed);
    }
    if (way->dtype == MIXP_F16) m.scaler = mixp_scaler_new(m.ctx, NULL);
    if (way->guard) mixp_guard_start(m.ctx, &guard);
    return m;
}

static mixp_tensor *net_out(net *m, mixp_tensor *x) {
    for (int i = 0; i < 3; i++) {
        x = mixp_linear(m->ctx, x, m->w[i], m->b[i]);
        if (i < 2) x = mixp_relu(m->ctx, x);
    }
    return x;
}

static mixp_tensor *net_loss(net *m, const set *d, mixp_tensor *y, int n, const float *t) {
    const int64_t shape[2] = { n, 1 };
    int32_t       classes[ROWS];
    if (!d->classes) return mixp_mse(m->ctx, y, mixp_input(m->ctx, MIXP_F32, 2, shape, t));
    for (int i = 0; i < n; i++) classes[i] = (int32_t)t[i];
    return mixp_cross_entropy(m->ctx, y, mixp_input(m->ctx, MIXP_I32, 1, shape, classes), MIXP_IGNORE);
}

/* One update on a batch. */
static double net_learn(net *m, const set *d, mixp_dtype dtype, const float *x, const float *t) {
    const int64_t shape[2] = { ROWS, d->columns };
    mixp_tensor  *loss = NULL;
    do {
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt);
        MIXP_AUTOCAST(m->ctx, dtype) {
            loss = net_loss(m, d, net_out(m, mixp_input(m->ctx, MIXP_F32, 2, shape, x)), ROWS, t);
        }
        mixp_backward(m->ctx, m->scaler ? mixp_scaler_scale(m->scaler, loss) : loss);
        if (m->scaler) mixp_scaler_step(m->scaler, m->opt);
        else mixp_optimizer_step(m->opt);
        if (m->scaler) mixp_scaler_update(m->scaler);
    } while (m->scaler && mixp_retry(m->scaler, 3));
    return mixp_item(loss);
}

/* The share of wrong classes, or the mean squared error, of the rows that do not train. */
static double net_test(net *m, const set *d, mixp_dtype dtype) {
    const int     first = d->rows * 4 / 5, n = d->rows - first, outs = d->classes ? d->classes : 1;
    const int64_t shape[2] = { n, d->columns };
    float        *x = (float *)room((size_t)(n * d->columns), sizeof *x);
    float        *y = (float *)room((size_t)(n * outs), sizeof *y);
    double        sum = 0;
    for (int i = 0; i < n; i++)
        memcpy(x + i * d->columns, d->x + d->order[first + i] * d->columns,
               (size_t)d->columns * sizeof *x);
    mixp_eval_begin(m->ctx);
    MIXP_NO_GRAD(m->ctx) MIXP_AUTOCAST(m->ctx, dtype) {
        mixp_read(net_out(m, mixp_input(m->ctx, MIXP_F32, 2, shape, x)), y, MIXP_F32, n * outs);
    }
    for (int i = 0; i < n; i++) {
        const double target = (double)d->y[d->order[first + i]], off = (double)y[i * outs] - target;
        int          best = 0;
        for (int k = 1; k < outs; k++) if (y[i * outs + k] > y[i * outs + best]) best = k;
        sum += d->classes ? best != (int)target : off * off;
    }
    free(x);
    free(y);
    return sum / n;
}

static void tell(net *m, result *r) {
    mixp_event e;
    char       text[512];
    for (int i = 0; mixp_guard_event(m->ctx, i, &e); i++) {
        if (verbose) printf("    %s\n", mixp_event_text(&e, text, sizeof text));
        r->events += e.kind != MIXP_EVENT_SKIP;
        r->imprecise += e.kind == MIXP_EVENT_IMPRECISE;
    }
}

static result train(set *d, const struct way *way, int seed) {
    const char *why = "";
    uint64_t    draws = 1000003u * (uint64_t)seed;
    float      *x = (float *)room((size_t)(ROWS * d->columns), sizeof *x), t[ROWS];
    result      r;
    memset(&r, 0, sizeof r);
    set_shuffle(d, (uint64_t)seed);
    net m = net_open(d, way, (uint64_t)seed);
    for (int step = 0; step < STEPS && !mixp_context_error(m.ctx, NULL); step++) {
        for (int i = 0; i < ROWS; i++) {
            const int row = d->order[next(&draws) % (uint64_t)(d->rows * 4 / 5)];
            memcpy(x + i * d->columns, d->x + row * d->columns, (size_t)d->columns * sizeof *x);
            t[i] = d->y[row];
        }
        double loss = net_learn(&m, d, way->dtype, x, t);
        if (step >= STEPS - LAST) r.loss += loss / LAST;
    }
    r.test = net_test(&m, d, way->dtype);
    if (m.scaler) r.skipped = (int)mixp_scaler_verdict(m.scaler).skipped;
    tell(&m, &r);
    if (mixp_context_error(m.ctx, &why)) {
        if (verbose) printf("    %s\n", why);
        r.loss = r.test = NAN;
    }
    mixp_context_free(m.ctx);
    free(x);
    return r;
}

/* --- the table ------------------------------------------------------------------------------- */

/* The results of a way, added over the seeds. */
typedef struct row {
    double loss, test;          /* means */
    double apart, error;        /* mean of the distances from f32's loss, and its standard error */
    int    skipped, events, imprecise;
} row;

static row row_of(const result *each, const result *f32, int seeds) {
    row r;
    memset(&r, 0, sizeof r);
    for (int i = 0; i < seeds; i++) {
        r.loss += each[i].loss / seeds;
        r.test += each[i].test / seeds;
        r.apart += (each[i].loss - f32[i].loss) / seeds;
        r.skipped += each[i].skipped;
        r.events += each[i].events;
        r.imprecise += each[i].imprecise;
    }
    for (int i = 0; i < seeds; i++) r.error += pow(each[i].loss - f32[i].loss - r.apart, 2);
    r.error = seeds > 1 ? sqrt(r.error / (seeds - 1) / seeds) : 0;
    return r;
}

/* Trains a set in every way. Returns how many guarded ways end above f32. */
static int compare(set *d, int seeds) {
    static result f32[MOST_SEEDS], each[MOST_SEEDS];
    double        unit = 0;
    int           w, seed, above = 0;
    printf("%s (%d x %d)\n", d->name, d->rows, d->columns);
    for (w = 0; w < WAYS; w++) {
        for (seed = 0; seed < seeds; seed++) each[seed] = train(d, &ways[w], seed + 1);
        if (!w) memcpy(f32, each, sizeof f32);
        row r = row_of(each, f32, seeds);
        if (!w) unit = 0.01 * r.loss;
        int bad = ways[w].guard && !(r.apart <= 2 * unit || r.apart <= 2 * r.error);
        printf("  %-12s %10.4g %+7.1f +- %4.1f %%  test %9.4g  skipped %5d  events %4d, of precision %4d%s\n",
               ways[w].name, r.loss, r.apart / unit, r.error / unit, r.test, r.skipped, r.events,
               r.imprecise, bad ? "  ABOVE" : "");
        for (seed = 0; seed < seeds && verbose; seed++) printf("    seed %d: %g\n", seed + 1, each[seed].loss);
        fflush(stdout);
        above += bad;
    }
    return above;
}

int main(int argc, char **argv) {
    int i, seeds = 5, above = 0, runs = 0;
    for (i = 1; i < argc && argv[i][0] == '-'; i++) {
        if (!strcmp(argv[i], "-v")) verbose = 1;
        else if (!strcmp(argv[i], "-s") && i + 1 < argc) seeds = atoi(argv[++i]);
        else if (!strcmp(argv[i], "-i") && i + 1 < argc) imprecise = (float)atof(argv[++i]);
        else break;
    }
    if (i >= argc || argv[i][0] == '-' || seeds < 1 || seeds > MOST_SEEDS) {
        fprintf(stderr, "usage: real_data [-s SEEDS] [-i IMPRECISE] [-v] FILE...\n");
        return 2;
    }
    for (; i < argc; i++, runs += 2) {
        set d;
        if (!set_read(&d, argv[i])) {
            fprintf(stderr, "%s: not a set of real_data.py\n", argv[i]);
            return 2;
        }
        above += compare(&d, seeds);
        free(d.x);
        free(d.y);
        free(d.order);
    }
    printf("%d of %d guarded ways end above f32\n", above, runs);
    return above > 0;
}
