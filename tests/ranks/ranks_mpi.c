/* ranks_mpi.c - the checks of test_ranks.c over MPI. tests/ranks/ranks_mpi.sh runs it with mpiexec.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     ranks_mpi           all tests; rank 0 reports
 *     ranks_mpi kill      rank 1 kills itself
 *     ranks_mpi late      the last rank comes late
 */
#define RANKS_MPI
#include "test_ranks.c"
#include "../../examples/ddp_mpi.c"

static mixp_ranks_desc world;           /* with sums in order */

/* Are the weights of all ranks those of rank 0? */
static int same_everywhere(const result *out) {
    static result first;
    int same, all = 0;
    first = *out;
    MPI_Bcast(&first, (int)sizeof first, MPI_BYTE, 0, MPI_COMM_WORLD);
    same = memcmp(first.weights, out->weights, out->bytes) == 0;
    MPI_Allreduce(&same, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return all;
}

static result *train(const plan *p, const mixp_ranks_desc *ranks) {
    static result out;
    memset(&out, 0, sizeof out);
    run_rank(p, ranks, &out);
    return &out;
}

/* In the order of ranks: the bits of one. */
static void in_order(void) {
    static result want;
    plan p = plan_of(STEPS);
    result *got = train(&p, &world);
    CHECK(same_everywhere(got));
    reference(&p, world.size, &want);
    check_like(got, 1, &want);
}

/* In the engine's order, in the background. */
static void by_the_engine(void) {
    static result want;
    const mixp_ranks_desc ranks = world;
    plan p = plan_of(STEPS);
    ddp_m.ordered = 0;
    result *got = train(&p, &ranks);
    CHECK_INT(got->code, MIXP_OK);
    CHECK(same_everywhere(got));
    reference(&p, world.size, &want);
    CHECK_NEAR(got->verdict.grad_norm, want.verdict.grad_norm, 1e-3 * want.verdict.grad_norm);
    p.dtype = MIXP_BF16;                /* low sums are in the order of ranks all the same */
    p.low_sums = 1;
    got = train(&p, &ranks);
    CHECK(same_everywhere(got));
    reference(&p, world.size, &want);
    check_like(got, 1, &want);
    ddp_m.ordered = 1;
}

/* ZeRO-1: each rank updates tensors of its own, and gathers the others'. Muon's matrices, too. */
static void in_shards(void) {
    static result want;
    plan p = plan_of(STEPS);
    for (int way = 0; way < 2; way++) {
        p.muon = way;
        p.shard = 0;
        want = *train(&p, &world);
        p.shard = 1;
        result *got = train(&p, &world);
        CHECK(same_everywhere(got));
        check_like(got, 1, &want);
    }
}

/* Each rank gets the sums of what it updates alone: in the order of ranks the same bits, in the
 * engine's, in the background, near to them. */
static void in_pieces_alone(void) {
    static result want;
    const mixp_ranks_desc ranks = world;
    plan p = plan_of(STEPS);
    p.max_norm = 0;
    p.shard = 1;
    want = *train(&p, &world);
    p.scatter = 1;
    result *got = train(&p, &world);
    CHECK(same_everywhere(got));
    check_scattered(got, 1, &want);
    ddp_m.ordered = 0;
    got = train(&p, &ranks);
    CHECK_INT(got->code, MIXP_OK);
    CHECK(same_everywhere(got));
    CHECK_NEAR(got->verdict.grad_norm, want.verdict.grad_norm, 1e-3 * want.verdict.grad_norm);
    p.dtype = MIXP_BF16;
    p.low_sums = 1;
    got = train(&p, &ranks);
    CHECK_INT(got->code, MIXP_OK);
    CHECK(same_everywhere(got));
    ddp_m.ordered = 1;
}

static void long_sums(void) { CHECK_INT(sums_of_all_dtypes(&world), 0); }

/* Ranks that ask for sums of other lengths are told who asks for what; nothing is sent. */
static void unlike(void) {
    float x[4] = {1, 2, 3, 4};
    const char *why = ddp_mpi_sum(NULL, x, world.rank == 1 ? 3 : 4, MIXP_F32, NULL, PATIENCE);
    CHECK_TEXT(why, "ranks request different operations: rank ");
    CHECK_TEXT(why, "rank 1");
    CHECK_TEXT(why, "a sum of 3 f32");
    CHECK_TEXT(why, "a sum of 4 f32");
    CHECK_NEAR(x[0], 1, 0);
    ddp_m.failed = 0;
}

/* Rank 0 announces that it is busy, for longer than the time limit: no rank gives up, neither then nor in the
 * later operations of the sum. The sum is too long to end at the first poll. */
static void busy(void) {
    enum { LONG = 1 << 18 };
    static float x[LONG];
    int i;
    for (i = 0; i < LONG; i++) x[i] = 1;
    MPI_Barrier(MPI_COMM_WORLD);        /* else a rank that is slow to say so is late before it is busy */
    double began = MPI_Wtime();
    if (world.rank == 0) {
        world.busy(world.user, 1);
        while (MPI_Wtime() - began < 7) poll(NULL, 0, 10);
        world.busy(world.user, 0);
    }
    CHECK_TEXT(ddp_mpi_sum(NULL, x, LONG, MIXP_F32, NULL, 5) ? ddp_m.why : "fine", "fine");
    for (i = 0; i < LONG && x[i] == (float)world.size; i++) {}
    CHECK_INT(i, LONG);
}

/* Ranks that wait name the rank that is missing. All ranks begin together. Rank 1 announces late that it waits, as on
 * a busy machine; the last rank stays away until the others have ended the world. */
static void late(void) {
    float x = 1;
    const char *why = NULL;
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    while (world.rank == 1 && MPI_Wtime() - began < 3) poll(NULL, 0, 10);
    if (world.rank != world.size - 1) {
        char want[48];
        why = ddp_mpi_sum(NULL, &x, 1, MIXP_F32, NULL, 0.3);
        sprintf(want, "rank %d did not answer in time", world.size - 1);
        CHECK_TEXT(why, want);
        if (!test_bad) printf("named\n");
    } else while (MPI_Wtime() - began < 120) poll(NULL, 0, 10);
}

static void inf_on_the_last(void) {
    plan p = plan_of(3);
    p.plant_step = 2;
    p.plant_rank = world.size - 1;
    result *got = train(&p, &world);
    CHECK_INT(got->code, MIXP_OK);
    CHECK_INT(got->verdict.outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(got->verdict.bad_rank, world.size - 1);
    CHECK_TEXT(got->bad_tensor, "up");
    CHECK(same_everywhere(got));
}

static void largest(void) {
    float x[2] = {(float)world.rank, 1 - (float)world.rank};
    CHECK(ddp_mpi_max(NULL, x, 2, MIXP_F32, NULL, PATIENCE) == NULL);
    CHECK_NEAR(x[0], world.size - 1, 0);
    CHECK_NEAR(x[1], 1, 0);
}

int main(int argc, char **argv) {
    plan p = plan_of(50);
    int bad, all = 0;
    world = ddp_mpi(&argc, &argv, 1);
    if (argc > 1 && strcmp(argv[1], "late") == 0) {
        late();
        fflush(stdout);
        MPI_Abort(MPI_COMM_WORLD, test_bad ? 2 : 1);
    }
    if (argc > 1) {
        p.seconds = 5;
        p.odd = ODD_KILLED;
        return ddp_mpi_end(train(&p, &world)->code != MIXP_OK);
    }
    if (world.rank) freopen("/dev/null", "w", stdout);
    RUN(in_order);
    RUN(by_the_engine);
    RUN(in_shards);
    RUN(in_pieces_alone);
    RUN(inf_on_the_last);
    RUN(largest);
    RUN(long_sums);
    RUN(unlike);
    RUN(busy);
    bad = test_failed;
    MPI_Allreduce(&bad, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (all && !test_failed) test_failed = 1;
    bad = test_report();
    ddp_mpi_end(0);
    return bad;
}
