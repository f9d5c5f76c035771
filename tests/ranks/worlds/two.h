/* two.h - the other rank has the same gradients: norms, buckets, pieces, numbers of the user's.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* --- a world of two in one process: the other rank has the same gradients ------------------------ */

typedef struct mirror {
    int      ready, waits, tables, walked, late;    /* late: ranges that came after the last operator */
    int64_t  range[16];
    mixp_dtype dtype[16];
    const char *data[16];
    int64_t  word;                      /* of the first table: what the other has more there, plus 1 */
    int      table_rank, pieces;        /* this rank; how often pieces were summed */
    int      nudged;                    /* word of an agreement of which the other has one ulp more; 0 = none */
    int64_t  piece;                     /* elements of the newest */
    model   *m;
} mirror;

static const char *mirror_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                              double seconds) {
    mirror *w = user;
    float *x = data;
    double *table = data;
    int64_t i;
    (void)stream;
    CHECK_NEAR(seconds, 600, 0);
    if (dtype == MIXP_F64) {            /* a table: rank 0's row, and none yet */
        double *own = table + w->table_rank * (count / 2), *other = table + (1 - w->table_rank) * (count / 2);
        for (i = 0; i < count / 2; i++) other[i] = own[i];
        if (!w->tables++ && w->word) table[count / 2 + w->word - 1] += 1;
        if (w->nudged && w->tables > 1 && count / 2 == MIXP_AGREE_WORDS)
            other[w->nudged] = nextafter(own[w->nudged], HUGE_VAL);
        return NULL;
    }
    for (i = 0; i < count; i++) x[i] *= 2;
    return NULL;
}
/* A sum of pieces: what is the other's is spoilt. */
static const char *mirror_pieces(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                                 double seconds) {
    mirror *w = user;
    float *x = data;
    int64_t i;
    (void)dtype, (void)stream, (void)seconds;
    for (i = 0; i < 2 * count; i++) x[i] = i / count == w->table_rank ? 2 * x[i] : NAN;
    w->pieces++;
    w->piece = count;
    return NULL;
}
static const char *mirror_ready(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                                double seconds) {
    mirror *w = user;
    if (w->ready < 16) {
        w->range[w->ready] = count;
        w->dtype[w->ready] = dtype;
        w->data[w->ready] = data;
    }
    w->late += w->m->p[0]->grad != NULL;        /* the embedding's gradient comes last */
    w->ready++;
    return mirror_sum(user, data, count, dtype, stream, seconds);
}
static const char *mirror_wait(void *user, void *stream, double seconds) {
    (void)stream, (void)seconds;
    ((mirror *)user)->waits++;
    return NULL;
}

static void mirror_open(mirror *w, model *m, mixp_dtype dtype) {
    plan p = plan_of(1);
    mixp_ranks_desc d;
    p.dtype = dtype;
    memset(w, 0, sizeof *w);
    memset(&d, 0, sizeof d);
    w->m = m;
    d.size = 2;
    d.sum = mirror_sum;
    d.grad_ready = mirror_ready;
    d.grad_wait = mirror_wait;
    d.user = w;
    d.bucket_bytes = 1500;
    model_open(m, &p, &d, ODD_NOT);
    model_add(m);
}

/* Norms that differ in their last bit are told with digits that differ. */
static void norms_that_are_nearly_alike(void) {
    mirror w;
    model m;
    const char *text = "";
    char here[32] = "", there[32] = "";
    mirror_open(&w, &m, MIXP_F32);
    w.nudged = MIXP_AGREE_NORM;
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(m.opt), MIXP_ERR_RANKS);
    mixp_context_error(m.ctx, &text);
    CHECK_INT(sscanf(text, "ranks differ: the norm of the summed gradients is %31s on rank 0 and %31s on",
                     here, there), 2);
    CHECK(strcmp(here, there) != 0);
    mixp_context_free(m.ctx);
}

/* Ranges go out while the walk is under way, in the order of backward, and are the whole arena. */
static void buckets(void) {
    mirror w;
    model m;
    int i, total = 0;
    mirror_open(&w, &m, MIXP_F32);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_OK);
    CHECK_INT(w.waits, 1);
    CHECK_INT(w.ready, 3);
    CHECK_INT(w.late, 1);               /* the last alone */
    CHECK(w.data[0] == (char *)m.p[5]->grad->data);
    for (i = 0; i < 3; i++) {
        if (i) CHECK(w.data[i] == w.data[i - 1] + 4 * w.range[i - 1]);
        total += (int)w.range[i];
    }
    /* down; the bias of up, up; gain, shift, embedding: each fills up to 64 bytes. */
    CHECK_INT(total, 11 * 48 + 48 * 24 + 48 + 2 * 32 + 11 * 24 + 8);
    CHECK_INT(mixp_backward(m.ctx, mixp_sum(m.ctx, m.p[2], MIXP_ALL, 0)), MIXP_ERR_ORDER);
    { const char *text; mixp_context_error(m.ctx, &text); CHECK_TEXT(text, "was summed over the ranks already"); }
    mixp_context_clear_error(m.ctx);
    mixp_zero_grad(m.opt);
    mixp_step_begin(m.ctx);
    mixp_ranks_hold(m.ctx, 1);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 1, 0, 8)), MIXP_OK);
    CHECK_INT(w.ready, 3);              /* held back */
    mixp_ranks_hold(m.ctx, 0);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 1, 8, 8)), MIXP_OK);
    CHECK_INT(w.ready, 6);
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    mixp_context_free(m.ctx);
}

/* Narrow gradients travel in f32. */
static void wide_sums(void) {
    mirror w;
    model m;
    mirror_open(&w, &m, MIXP_F16);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_OK);
    for (int i = 0; i < w.ready && i < 16; i++) CHECK_INT(w.dtype[i], MIXP_F32);
    CHECK(w.ready > 1);
    mixp_context_free(m.ctx);
}

/* Another version, in the first table. */
static void other_version(void) {
    mirror w;
    model m;
    const char *text;
    mirror_open(&w, &m, MIXP_F32);
    w.word = 1;
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_ERR_RANKS);
    mixp_context_error(m.ctx, &text);
    CHECK_TEXT(text, "the version of mixprec is");
    mixp_context_free(m.ctx);
}

/* A parameter that no loss of this rank used counts as 0 where others may have it. */
static void unused_parameter(void) {
    mirror w;
    model m;
    float grad[2 * WIDTH];
    mirror_open(&w, &m, MIXP_F32);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_OK);
    mixp_zero_grad(m.opt);
    mixp_step_begin(m.ctx);
    CHECK_INT(mixp_backward(m.ctx, mixp_sum(m.ctx, m.p[1], MIXP_ALL, 0)), MIXP_OK);
    CHECK(m.p[2]->grad != NULL);        /* in the bucket of up */
    if (m.p[2]->grad) mixp_read(m.p[2]->grad, grad, MIXP_F32, 2 * WIDTH);
    for (int i = 0; i < 2 * WIDTH; i++) CHECK_NEAR(grad[i], 0, 0);
    CHECK(m.p[5]->grad == NULL);        /* in another */
    mixp_context_free(m.ctx);
}

/* A gradient that the program keeps itself could be read while it is in part as it was before. */
static void view_refused(model *m) {
    static float w[4] = {1, 2, 3, 4}, g[4] = {1, 1, 1, 1};
    const int64_t shape[1] = {4};
    mixp_optimizer *opt = new_sgd(m->ctx);
    mixp_tensor *weight = mixp_view(m->ctx, "w", MIXP_F32, 1, shape, w);
    const char *text;
    CHECK_INT(mixp_optimizer_add(opt, weight, mixp_view(m->ctx, "w.grad", MIXP_F32, 1, shape, g)), MIXP_ERR_ARGUMENT);
    mixp_context_error(m->ctx, &text);
    CHECK_TEXT(text, "'w' has a view as its gradient, but with `scatter` a rank unscales and clips only a part");
    mixp_context_clear_error(m->ctx);
    CHECK_INT(mixp_tensor_set_requires_grad(weight, 1), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(opt, weight, NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_free(opt), MIXP_OK);
}

/* What no rank has whole is not read; a parameter has one optimizer. */
static void in_pieces(void) {
    plan p = plan_of(1);
    mixp_ranks_desc d;
    mirror w;
    model m;
    float grad[2 * WIDTH * WIDTH];
    const char *text;
    int i, others = 0;
    memset(&w, 0, sizeof w);
    memset(&d, 0, sizeof d);
    w.m = &m;
    d.size = 2;
    d.rank = 1;
    d.sum = mirror_sum;
    d.all_gather = d.reduce_scatter = mirror_pieces;
    d.shard = d.scatter = 1;
    d.user = &w;
    d.bucket_bytes = 1 << 18;           /* up alone is at least a hundredth of it */
    model_open(&m, &p, &d, ODD_NOT);
    model_add(&m);
    CHECK_INT(mixp_optimizer_add(new_sgd(m.ctx), m.p[1], NULL), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &text);
    CHECK_TEXT(text, "'up' has, or had, another optimizer: with `scatter`");
    mixp_context_clear_error(m.ctx);
    view_refused(&m);
    mixp_step_begin(m.ctx);
    w.table_rank = 1;
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 0, 0, 8)), MIXP_OK);
    CHECK_INT(w.pieces, 1);
    CHECK_INT(w.piece, 640);            /* half of 48 * 24, in blocks of 128 */
    CHECK_INT(mixp_read(m.p[3]->grad, grad, MIXP_F32, WIDTH), MIXP_OK);
    CHECK_INT(mixp_read(m.p[1]->grad, grad, MIXP_F32, 2 * WIDTH * WIDTH), MIXP_ERR_ORDER);
    mixp_context_error(m.ctx, &text);
    CHECK_TEXT(text, "mixp_read: the gradient of 'up' is scattered over the ranks");
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_clip_grad_norm(m.opt, 1e-3), MIXP_OK);   /* each rank what it updates */
    for (i = 2; i < 5; i++) {
        double norm = 0;
        mixp_result code = mixp_read(m.p[i]->grad, grad, MIXP_F32, m.p[i]->count);
        if (code == MIXP_ERR_ORDER) others++;
        else CHECK_INT(code, MIXP_OK);
        for (int64_t k = 0; code == MIXP_OK && k < m.p[i]->count; k++) norm += (double)grad[k] * grad[k];
        CHECK(sqrt(norm) < 1.1e-3);
        mixp_context_clear_error(m.ctx);
    }
    CHECK(others > 0 && others < 3);
    mixp_zero_grad(m.opt);
    mixp_step_begin(m.ctx);
    mixp_ranks_hold(m.ctx, 1);          /* this rank's own, before any sum */
    CHECK_INT(mixp_backward(m.ctx, model_loss(&m, 1, 0, 8)), MIXP_OK);
    for (i = 1; i < 5; i++) CHECK_INT(mixp_read(m.p[i]->grad, grad, MIXP_F32, m.p[i]->count), MIXP_OK);
    mixp_context_free(m.ctx);
}

/* --- numbers of the user's ------------------------------------------------------------------------ */

static void sums_of_yours(void) {
    result *out = results();
    int status = 0;
    fflush(stdout);
    pid_t root = fork();
    if (root == 0) {
        mixp_ranks_desc ranks = ddp_fork(4);
        mixp_context_desc d;
        const int64_t shape[1] = {3};
        float x[3];
        memset(&d, 0, sizeof d);
        d.ranks = &ranks;
        d.threads = 1;
        mixp_context *ctx = mixp_context_new(&d);
        x[0] = 1;
        x[1] = (float)ranks.rank;
        x[2] = 1 - (float)ranks.rank;
        mixp_step_begin(ctx);
        mixp_tensor *a = mixp_input(ctx, MIXP_F32, 1, shape, x);
        mixp_tensor *b = mixp_input(ctx, MIXP_F32, 1, shape, x);
        mixp_ranks_sum(a);
        mixp_ranks_max(b);
        memcpy(out[ranks.rank].weights, a->data, 12);
        memcpy(out[ranks.rank].weights + 12, b->data, 12);
        out[ranks.rank].code = mixp_context_error(ctx, NULL);
        mixp_context_free(ctx);
        leave(ddp_wait(0));
    }
    CHECK(waitpid(root, &status, 0) > 0);
    for (status = 0; status < 4; status++) {
        static const float want[6] = {4, 6, -2, 1, 3, 1};
        CHECK_INT(out[status].code, MIXP_OK);
        CHECK(memcmp(out[status].weights, want, sizeof want) == 0);
    }
}
