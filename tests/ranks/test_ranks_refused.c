/* test_ranks_refused.c - two ranks train; one of them is refused a request, each in turn: memory,
 * a kernel, a copy, or its own hook. That rank gets the error and leaks nothing. The other rank
 * learns that its peer is gone, or has finished. Neither waits for ever, and neither crashes. The
 * ranks are threads of this process, with one context each; their hooks meet in memory.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _XOPEN_SOURCE 700
#include <limits.h>
#include <pthread.h>
#include <unistd.h>
#include "mixprec.h"
#include "test.h"
#include "refusals.h"

/* --- where two ranks meet ------------------------------------------------------------------------ */

static pthread_mutex_t door = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t  bell = PTHREAD_COND_INITIALIZER;
static struct {
    void   *data[2];            /* of who is there */
    int64_t count[2];
    int     arrived, meetings, gone;
    int     unlike;             /* 1: the newest meeting was of two counts */
    int     stopped;            /* 1: rank 0 has said that it fails */
} room;

static void leave_room(void) {
    pthread_mutex_lock(&door);
    room.gone = 1;
    pthread_cond_broadcast(&bell);
    pthread_mutex_unlock(&door);
}

typedef void (*joining)(void *a, void *b, int64_t count, mixp_dtype dtype);

/* Both come with their data; the second joins them, and both go on. */
static const char *meet(void *user, void *data, int64_t count, mixp_dtype dtype, joining join) {
    const int rank = *(const int *)user;
    const char *why = NULL;
    int meeting;
    if (rank == 0 && refuses("hook")) return "the cable is cut";
    pthread_mutex_lock(&door);
    room.data[rank] = data;
    room.count[rank] = count;
    meeting = room.meetings;
    if (++room.arrived == 2 && !room.gone) {
        if (room.count[0] == room.count[1]) join(room.data[0], room.data[1], count, dtype);
        else room.gone = room.unlike = 1;
        room.arrived = 0;
        room.meetings++;
        pthread_cond_broadcast(&bell);
    }
    while (room.meetings == meeting && !room.gone) pthread_cond_wait(&bell, &door);
    if (room.meetings == meeting || room.unlike) why = "the other rank is gone";
    pthread_mutex_unlock(&door);
    return why;
}

static void join_sum(void *a, void *b, int64_t count, mixp_dtype dtype) {
    for (int64_t i = 0; i < count; i++) {
        if (dtype == MIXP_F64) ((double *)a)[i] += ((double *)b)[i];
        else if (dtype == MIXP_I32) ((int32_t *)a)[i] += ((int32_t *)b)[i];
        else mixp_put(mixpi_out_to(a, dtype, 1), i, mixp_get(mixpi_in(b, dtype), i));
    }
    memcpy(b, a, (size_t)count * mixp_dtype_size(dtype));
}
static void join_pieces_sum(void *a, void *b, int64_t count, mixp_dtype dtype)
{ join_sum(a, b, 2 * count, dtype); }
static void join_pieces(void *a, void *b, int64_t count, mixp_dtype dtype) {
    const size_t bytes = (size_t)count * mixp_dtype_size(dtype);
    memcpy(b, a, bytes);
    memcpy((char *)a + bytes, (char *)b + bytes, bytes);
}

static const char *sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double seconds) {
    (void)stream, (void)seconds;
    return meet(user, data, count, dtype, join_sum);
}
static const char *reduce_scatter(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                                  double seconds) {
    (void)stream, (void)seconds;
    return meet(user, data, count, dtype, join_pieces_sum);
}
static const char *all_gather(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,
                              double seconds) {
    (void)stream, (void)seconds;
    return meet(user, data, count, dtype, join_pieces);
}
static void stop(void *user, const char *why) {
    (void)why;
    if (*(const int *)user == 0) room.stopped = 1;
    leave_room();
}

/* --- a training ---------------------------------------------------------------------------------- */

enum { D = 64, ROWS = 4 };
/* From SHARDED on, all ranks save and load together. */
typedef enum way { SUMS, LOW_SUMS, APART, SHARDED, SCATTERED, BUFFERED, WAYS } way;
enum { OWN, ADDED, MEAN, CODE, BUFFERS };

typedef struct rank {
    int             number;
    way             how;
    mixp_result     error;      /* the first that it was told */
    const char     *met;        /* by a call in which ranks meet; NULL = by none */
    int             saving;     /* 1: by a save in which ranks meet */
    char            text[200];
    float           weights[2 * D];
} rank;

typedef struct training {
    mixp_context   *ctx;
    mixp_tensor    *w, *v, *bias, *b[BUFFERS];
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
    mixp_checkpoint all;
    char            path[64];
} training;

/* Nothing was said yet. */
static int fine(const training *t) { return t->ctx && mixp_context_error(t->ctx, NULL) == MIXP_OK; }

/* A call in which the other rank waits for this one. */
#define MEET(t, r, call)                                                                             \
    do {                                                                                          \
        if (!fine(t)) break;                                                                      \
        call;                                                                                     \
        if (!fine(t)) (r)->met = #call;                                                           \
    } while (0)

static void training_ranks(mixp_ranks_desc *d, rank *r) {
    memset(d, 0, sizeof *d);
    d->rank = r->number;
    d->size = 2;
    d->sum = sum;
    d->all_gather = all_gather;
    d->reduce_scatter = reduce_scatter;
    d->stop = stop;
    d->user = &r->number;
    d->bucket_bytes = 8192;     /* a matrix alone has as much */
    d->low_sums = r->how == LOW_SUMS;
    d->mean = r->how == LOW_SUMS ? MIXP_MEAN_AFTER : MIXP_MEAN_BEFORE;
    d->apart = r->how == APART;
    d->shard = r->how == SHARDED || r->how == SCATTERED;
    d->scatter = r->how == SCATTERED;
}

static void training_buffers(training *t) {
    static const int64_t many = 5000, odd = 37;
    t->b[OWN] = mixp_buffer(t->ctx, "own", MIXP_F32, 1, &many);
    t->b[ADDED] = mixp_buffer(t->ctx, "added", MIXP_F64, 1, &odd);
    t->b[MEAN] = mixp_buffer(t->ctx, "mean", MIXP_BF16, 1, &many);
    t->b[CODE] = mixp_buffer(t->ctx, "code", MIXP_U8, 1, &odd);
    mixp_buffer_set_ranks(t->b[MEAN], MIXP_BUFFER_MEAN);
    mixp_buffer_set_ranks(t->b[CODE], MIXP_BUFFER_RANK_0);
}

static void training_make(training *t, rank *r) {
    static const int64_t shape[2] = { D, D };
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_context_desc desc;
    mixp_ranks_desc ranks;
    mixp_guard_desc guard;
    memset(t, 0, sizeof *t);
    memset(&desc, 0, sizeof desc);
    memset(&guard, 0, sizeof guard);
    training_ranks(&ranks, r);
    snprintf(t->path, sizeof t->path, "/tmp/mixprec_ranks_refused_%ld.st", (long)getpid());
    desc.threads = 1;
    desc.ranks = &ranks;
    if (r->number == 0) {
        desc.device = &device;
        desc.allocate = host_allocate;
        desc.release = host_release;
    }
    t->ctx = mixp_context_new(&desc);
    if (!fine(t)) return;
    adamw.max_norm = 1;
    t->w = mixp_param(t->ctx, "w", MIXP_F32, 2, shape);
    t->v = mixp_param(t->ctx, "v", MIXP_BF16, 2, shape);
    t->bias = mixp_param(t->ctx, "bias", MIXP_F32, 1, shape);
    t->opt = mixp_optimizer_new(t->ctx, &adamw);
    t->scaler = mixp_scaler_new(t->ctx, NULL);
    guard.every = 2;
    guard.max_sites = 16;
    if (r->how == BUFFERED) training_buffers(t);
    if (!fine(t)) return;
    mixp_init_uniform(t->w, -0.2, 0.2);
    mixp_init_uniform(t->v, -0.2, 0.2);
    mixp_optimizer_add(t->opt, t->w, NULL);
    mixp_optimizer_add(t->opt, t->v, NULL);
    mixp_optimizer_add(t->opt, t->bias, NULL);
    mixp_guard_start(t->ctx, &guard);
    t->all.ctx = t->ctx;
    t->all.scaler = t->scaler;
    t->all.optimizers = &t->opt;
    t->all.n_optimizers = 1;
}

static void training_walk(training *t, rank *r, int walk) {
    static const int64_t shape[2] = { ROWS, D };
    float x[ROWS * D];
    mixp_tensor *h = NULL;
    for (int i = 0; i < ROWS * D; i++) x[i] = 0.125f * (float)((i * 7 + 3 * r->number + walk) % 11 - 5);
    MEET(t, r, mixp_step_begin(t->ctx));
    if (fine(t) && r->how == APART) mixp_ranks_hold(t->ctx, walk == 0);
    MIXP_AUTOCAST(t->ctx, MIXP_F16) {
        h = mixp_linear(t->ctx, mixp_input(t->ctx, MIXP_F32, 2, shape, x), t->w, t->bias);
        h = mixp_linear(t->ctx, mixp_gelu(t->ctx, h), t->v, NULL);
    }
    h = mixp_mean(t->ctx, mixp_mul(t->ctx, h, h), MIXP_ALL, 0);
    h = mixp_scaler_scale(t->scaler, h);
    MEET(t, r, mixp_backward(t->ctx, h));
}

/* Each buffer's first write takes memory for its old bytes. */
static void training_write(training *t, rank *r) {
    mixp_fill(t->b[OWN], r->number);
    if (fine(t)) mixp_fill(t->b[MEAN], r->number);
    if (fine(t)) mixp_fill(t->b[CODE], r->number);
    MEET(t, r, mixp_ranks_sum(t->b[ADDED]));
}

static void training_step(training *t, rank *r, int careful) {
    int walk = r->how == APART ? 0 : 1;
    for (; walk < 2 && fine(t); walk++) training_walk(t, r, walk);
    if (fine(t) && r->how == BUFFERED) training_write(t, r);
    if (careful) MEET(t, r, mixp_scaler_unscale(t->scaler, t->opt));
    if (careful) MEET(t, r, mixp_clip_grad_norm(t->opt, 0.5));
    MEET(t, r, mixp_scaler_step(t->scaler, t->opt));
    MEET(t, r, mixp_scaler_update(t->scaler));
    if (fine(t)) mixp_zero_grad(t->opt);
}

static void training_all(training *t, rank *r) {
    training_step(t, r, 0);
    training_step(t, r, 1);
    if (fine(t) && (r->how >= SHARDED || r->number == 0)) {
        mixp_checkpoint_save(t->path, &t->all);
        r->saving = r->how >= SHARDED && !fine(t);
    }
    if (fine(t) && r->how >= SHARDED) mixp_checkpoint_load(t->path, &t->all);
    training_step(t, r, 0);
}

static void *rank_run(void *user) {
    rank *r = user;
    const char *why = "";
    training t;
    training_make(&t, r);
    if (fine(&t)) training_all(&t, r);
    r->error = t.ctx ? mixp_context_error(t.ctx, &why) : MIXP_ERR_MEMORY;
    snprintf(r->text, sizeof r->text, "%s", why);
    if (r->error == MIXP_OK && t.w) memcpy(r->weights, t.w->data, sizeof r->weights);
    else leave_room();
    if (r->number == 0) requests.refuse = -1;
    mixp_context_free(t.ctx);
    return NULL;
}

/* --- what must hold ------------------------------------------------------------------------------- */

/* Both ranks, with requests of rank 0 from `from` on refused, `most` of them; 0: there were not so many. */
static int run_refused(way how, long from, long most) {
    rank ranks[2];
    pthread_t other;
    char path[64];
    memset(&requests, 0, sizeof requests);
    memset(&room, 0, sizeof room);
    memset(ranks, 0, sizeof ranks);
    requests.refuse = from;
    requests.most = most;
    ranks[0].how = ranks[1].how = how;
    ranks[1].number = 1;
    CHECK_INT(pthread_create(&other, NULL, rank_run, &ranks[1]), 0);
    rank_run(&ranks[0]);
    CHECK_INT(pthread_join(other, NULL), 0);
    int hit = requests.refused > 0;
    if (hit && ranks[0].error == MIXP_OK) {
        CHECK(hit == 0);
        TEST_SHOW("request %ld, %s: nobody was told", from, requests.what);
    }
    if (hit && ranks[1].error != MIXP_OK && ranks[1].error != MIXP_ERR_RANKS &&
        !strstr(ranks[1].text, "rank 0 failed")) {       /* write the file */
        CHECK(hit == 0);
        TEST_SHOW("request %ld, %s: the other rank says %s", from, requests.what, ranks[1].text);
    }
    if (ranks[0].met && !room.stopped) {
        CHECK(ranks[0].met == NULL);
        TEST_SHOW("request %ld, %s, in %s: the other rank would wait until its time is up", from,
                  requests.what, ranks[0].met);
    }
    if (ranks[0].saving && !room.stopped && !strstr(ranks[1].text, "rank 0 failed")) {
        CHECK(ranks[0].saving == 0);
        TEST_SHOW("request %ld, %s, in a save: the other rank would wait until its time is up; it says %s; this rank "
                  "says %s", from, requests.what, ranks[1].text, ranks[0].text);
    }
    if (!hit) {
        if (ranks[0].error || ranks[1].error)
            TEST_SHOW("no request refused: rank 0 says %s; rank 1 says %s", ranks[0].text, ranks[1].text);
        CHECK_INT(ranks[0].error, MIXP_OK);
        CHECK_INT(ranks[1].error, MIXP_OK);
        CHECK(memcmp(ranks[0].weights, ranks[1].weights, sizeof ranks[0].weights) == 0);
    }
    CHECK_INT(requests.alive, 0);
    snprintf(path, sizeof path, "/tmp/mixprec_ranks_refused_%ld.st", (long)getpid());
    remove(path);
    return hit;
}

static void each_once(way how, long most) {
    long k = 0, step = getenv("MIXPREC_TEST_QUICK") ? 7 : 3;
    device_make(1);
    while (run_refused(how, k, most)) k += step;
    CHECK(k > 100);
    printf("  %ld requests\n", requests.made);
}

static void one_of_sums(void)           { each_once(SUMS, 1); }
static void one_of_low_sums(void)       { each_once(LOW_SUMS, 1); }
static void one_of_held_walks(void)     { each_once(APART, 1); }
static void one_of_shards(void)         { each_once(SHARDED, 1); }
static void one_of_scattered_sums(void) { each_once(SCATTERED, 1); }
static void one_of_buffers(void)        { each_once(BUFFERED, 1); }
static void all_after_it(void) {
    for (int how = 0; how < WAYS; how++) each_once((way)how, LONG_MAX);
}

int main(void) {
    const uint16_t one = 1;
    (void)profile_begin, (void)profile_end, (void)profile_print, (void)profile_device;    /* not used */
    if (!*(const char *)&one) {
        printf("0 passed, 0 failed, 1 skipped\n");      /* no checkpoints there */
        return 0;
    }
    RUN(one_of_sums);
    RUN(one_of_low_sums);
    RUN(one_of_held_walks);
    RUN(one_of_shards);
    RUN(one_of_scattered_sums);
    RUN(one_of_buffers);
    RUN(all_after_it);
    return test_report();
}
