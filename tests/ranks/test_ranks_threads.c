/* test_ranks_threads.c - threads of one process as ranks: examples/ddp_threads.c.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * `tests/tools/variant.sh threads` runs it under the thread sanitizer: contexts share nothing.
 */
#define RANKS_MPI                       /* without test_ranks.c's own main */
#if defined(__GNUC__)
#  pragma GCC diagnostic ignored "-Wunused-function"
#endif
#include "test_ranks.c"
#include "../../examples/ddp_threads.c"

/* What each rank of a world does. */
typedef struct job {
    plan    p;
    result *out;                        /* one for each rank */
} job;

static int trains(const mixp_ranks_desc *ranks, void *user) {
    const job *j = (const job *)user;
    run_rank(&j->p, ranks, &j->out[ranks->rank]);
    return 0;
}

/* The bits of ranks that ddp_fork carries, which are those of one. */
static void bits(void) {
    static result want[MOST], got[MOST];
    for (int way = 0; way < 7; way++) {
        const int size = way == 4 ? 4 : way == 5 ? 3 : 2;
        job j;
        j.p = plan_of(3);
        j.p.wire = way == 1 ? MIXP_BF16 : MIXP_F32;
        j.p.shard = way > 1 && way < 6;
        j.p.scatter = way > 2 && way < 6;
        j.p.low_sums = way == 6;
        if (way == 6) j.p.dtype = MIXP_BF16;
        memcpy(want, run(&j.p, size), sizeof want);
        memset(got, 0, sizeof got);
        j.out = got;
        CHECK_INT(ddp_threads(size, trains, &j), 0);
        (j.p.scatter ? check_scattered : check_like)(got, size, want);
    }
}

static int adds(const mixp_ranks_desc *ranks, void *user) {
    (void)user;
    return sums_of_all_dtypes(ranks);
}
static void dtypes(void) {
    CHECK_INT(ddp_threads(1, adds, NULL), 0);
    CHECK_INT(ddp_threads(2, adds, NULL), 0);
    CHECK_INT(ddp_threads(3, adds, NULL), 0);
}

/* Two worlds at once, in one process. */
static void *second_world(void *user) {
    return ddp_threads(2, trains, user) ? user : NULL;
}
static void two_worlds(void) {
    static result want[2][MOST], got[2][MOST];
    job j[2];
    pthread_t other;
    void *failed = NULL;
    for (int i = 0; i < 2; i++) {
        j[i].p = plan_of(4 + i);
        j[i].p.shard = i;
        memcpy(want[i], run(&j[i].p, 2), sizeof want[i]);
        j[i].out = got[i];
    }
    CHECK_INT(pthread_create(&other, NULL, second_world, &j[1]), 0);
    CHECK_INT(ddp_threads(2, trains, &j[0]), 0);
    pthread_join(other, &failed);
    CHECK(failed == NULL);
    for (int i = 0; i < 2; i++) check_like(got[i], 2, want[i]);
}

/* What each rank was told, for rank 0's thread to check. */
typedef struct told { char why[3][400]; } told;
static void hear(told *t, const mixp_ranks_desc *ranks, const char *why)
{ sprintf(t->why[ranks->rank], "%.399s", why ? why : "fine"); }
static const char *asks(const mixp_ranks_desc *ranks, int64_t n, double seconds) {
    float x[4] = {1, 2, 3, 4};
    return ranks->sum(ranks->user, x, n, MIXP_F32, NULL, seconds);
}

static int asks_unlike(const mixp_ranks_desc *ranks, void *user) {
    hear((told *)user, ranks, asks(ranks, ranks->rank == 1 ? 3 : 4, PATIENCE));
    return asks(ranks, 4, PATIENCE) == NULL;      /* the world stays failed */
}
static int comes_late(const mixp_ranks_desc *ranks, void *user) {
    if (ranks->rank == 1) poll(NULL, 0, 900);
    hear((told *)user, ranks, asks(ranks, 4, 0.3));
    return 0;
}
static int leaves(const mixp_ranks_desc *ranks, void *user) {
    if (ranks->rank == 2) return 0;
    hear((told *)user, ranks, asks(ranks, 4, PATIENCE));
    return 0;
}
static int fails(const mixp_ranks_desc *ranks, void *user) {
    if (ranks->rank == 2) return 1;
    hear((told *)user, ranks, asks(ranks, 4, PATIENCE));
    return 0;
}
static int works_alone(const mixp_ranks_desc *ranks, void *user) {
    if (ranks->rank == 0) {
        ranks->busy(ranks->user, 1);
        poll(NULL, 0, 1500);
        ranks->busy(ranks->user, 0);
    } else poll(NULL, 0, 100);          /* rank 0 has said so first */
    hear((told *)user, ranks, asks(ranks, 4, 0.5));
    return 0;
}
static void failures(void) {
    static const struct { ddp_threads_fn *fn; const char *why; int ranks, failed; } all[] = {
        {asks_unlike, "ranks request different operations: rank ", 3, 0},
        {comes_late, "rank 1 did not answer in time", 3, 0}, {leaves, "rank 2 is gone", 2, 0},
        {fails, "rank 2 stopped: its function has failed", 2, 1}, {works_alone, "fine", 3, 0}
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        told t;
        memset(&t, 0, sizeof t);
        CHECK_INT(ddp_threads(3, all[i].fn, &t), all[i].failed);
        for (int r = 0; r < all[i].ranks; r++) CHECK_TEXT(t.why[r], all[i].why);
    }
    CHECK_INT(ddp_threads(0, adds, NULL), 1);
    CHECK_INT(ddp_threads(DDP_THREADS_MOST + 1, adds, NULL), 1);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    RUN(bits);
    RUN(dtypes);
    RUN(two_worlds);
    RUN(failures);
    return test_report();
}
