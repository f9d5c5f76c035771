/* end.h - how ranks end: in peace, telling, standing still, apart, or killed; the others go on from there.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* --- how ranks end ------------------------------------------------------------------------------ */

static void nothing(int number) { (void)number; }

/* Way 0: rank 0 fails, and rank 1 does not wait for it. Way 1: rank 1 fails, and rank 0 has looked for it
 * before. Way 2: it fails when signals have come. What rank 0 returns. */
static int end_of_ranks(int way) {
    mixp_ranks_desc ranks = ddp_fork(2);
    float x = 1;
    alarm(HANGS);
    if (way == 0 && ranks.rank) return ddp_wait(ranks.sum(ranks.user, &x, 1, MIXP_F32, NULL, 1e9) != NULL);
    if (way == 0) return ddp_wait(7);
    for (int i = 0; i < 50 && ranks.rank && way == 2; i++) {
        kill(ddp.first, SIGUSR1);
        poll(NULL, 0, 1);
    }
    if (ranks.rank) leave(1);
    while (way == 1 && !ddp.gone[1]) ddp_look_for_dead();
    return ddp_wait(0);
}

static void ends(void) {
    static const int want[3] = {7, 1, 1};
    int way, status;
    for (way = 0; way < 3; way++) {
        struct sigaction look;
        fflush(stdout);
        pid_t root = fork();
        if (root == 0) {
            memset(&look, 0, sizeof look);
            look.sa_handler = nothing;          /* without SA_RESTART */
            sigaction(SIGUSR1, &look, NULL);
            leave(end_of_ranks(way));
        }
        CHECK(waitpid(root, &status, 0) > 0);
        CHECK(WIFEXITED(status));
        CHECK_INT(WEXITSTATUS(status), want[way]);
    }
}

/* Who knows that another is gone leaves its question on the board, which a third may still read, and
 * gives the same answer again. */
static void asks_no_more(void) {
    int status;
    fflush(stdout);
    pid_t root = fork();
    if (root == 0) {
        mixp_ranks_desc ranks = ddp_fork(2);
        float x[2] = {1, 2};
        alarm(HANGS);
        if (ranks.rank) leave(0);
        const char *first = ranks.sum(ranks.user, x, 1, MIXP_F32, NULL, 1e9);
        const char *again = ranks.sum(ranks.user, x, 2, MIXP_F32, NULL, 1e9);
        CHECK_TEXT(first ? first : "", "rank 1 is gone");
        CHECK_TEXT(again ? again : "", "rank 1 is gone");
        CHECK_INT(ddp_board->asked[0][0][1], 1);
        leave(test_bad != 0);
    }
    CHECK(waitpid(root, &status, 0) > 0);
    CHECK_INT(status, 0);
}

/* A world of `size` ranks, each of which does fn; what rank 0 returns. */
static int world_of(int size, int (*fn)(const mixp_ranks_desc *)) {
    int status = 0;
    fflush(stdout);
    pid_t root = fork();
    if (root == 0) {
        mixp_ranks_desc ranks = ddp_fork(size);
        alarm(HANGS);
        leave(fn(&ranks));
    }
    CHECK(waitpid(root, &status, 0) > 0);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Rank 1 is killed while it writes why it stops: nobody waits for the end of that text. */
static int one_dies_telling(const mixp_ranks_desc *ranks) {
    float x = 1;
    dies_writing = ranks->rank == 1;
    if (ranks->rank == 1) ranks->stop(ranks->user, "it has failed");
    const char *why = ranks->sum(ranks->user, &x, 1, MIXP_F32, NULL, 1e9);
    CHECK_TEXT(why ? why : "", "rank 1 is gone");
    return ddp_wait(test_bad != 0) == 1 && !test_bad ? 5 : 1;
}
static void dies_telling(void) { CHECK_INT(world_of(3, one_dies_telling), 5); }

/* Where the program was started with SIGCHLD ignored, a rank's death is seen all the same, and that it
 * did not end well. */
static int one_dies_unseen(const mixp_ranks_desc *ranks) {
    float x = 1;
    if (ranks->rank) raise(SIGKILL);
    const char *why = ranks->sum(ranks->user, &x, 1, MIXP_F32, NULL, 1e9);
    CHECK_TEXT(why ? why : "", "rank 1 is gone");
    return ddp_wait(0) == 1 && !test_bad ? 5 : 1;
}
static void ignored_children(void) {
    struct sigaction ignore;
    memset(&ignore, 0, sizeof ignore);
    ignore.sa_handler = SIG_IGN;
    fflush(stdout);
    if (fork() == 0) {                      /* what ignores it is a process of its own */
        sigaction(SIGCHLD, &ignore, NULL);
        {
            mixp_ranks_desc ranks = ddp_fork(2);
            alarm(HANGS);
            leave(one_dies_unseen(&ranks));
        }
    }
    {
        int status = 0;
        CHECK(wait(&status) > 0);
        CHECK(WIFEXITED(status));
        CHECK_INT(WEXITSTATUS(status), 5);
    }
}

/* A rank that stands still does not keep rank 0 waiting once it has been told. */
static int one_stands_still(const mixp_ranks_desc *ranks) {
    const double began = ddp_now();
    float x = 1;
    if (ranks->rank) raise(SIGSTOP);
    const char *why = ranks->sum(ranks->user, &x, 1, MIXP_F32, NULL, 0.2);
    CHECK_TEXT(why ? why : "", "rank 1 did not answer in time");
    linger = 0.3;
    CHECK_INT(ddp_wait(1), 1);
    CHECK(ddp_now() - began < HANGS / 2);
    CHECK_INT(waitpid(-1, NULL, WNOHANG), -1);      /* nothing is left */
    return test_bad ? 1 : 5;
}
static void stands_still(void) { CHECK_INT(world_of(2, one_stands_still), 5); }

/* Sums of every dtype, as long as several chunks and a bit, beside plain loops: in the order of ranks,
 * those of 16 bits in f32 and rounded once. */
enum { LONG = DDP_CHUNK / 4 + 37 };

static double number_of(int rank, int i, mixp_dtype dtype) {
    const double x = (double)((i * 37 + rank * 101) % 509 - 250) * (1 + rank * 0.3);
    return dtype == MIXP_I32 ? floor(x) : mixp_decode(dtype, mixp_encode(dtype, x, 0));
}
static double sum_of(int size, int i, mixp_dtype dtype, int max) {
    double sum = number_of(0, i, dtype);
    for (int r = 1; r < size; r++) {
        const double x = number_of(r, i, dtype);
        if (max) sum = x > sum ? x : sum;
        else sum = dtype == MIXP_F64 || dtype == MIXP_I32 ? sum + x : (float)((float)sum + (float)x);
    }
    return dtype == MIXP_I32 ? sum : mixp_decode(dtype, mixp_encode(dtype, sum, 0));
}
static int numbers_differ(const double *got, int size, int first, int n, mixp_dtype dtype, int max) {
    int i, bad = 0;
    for (i = 0; i < n; i++) bad += got[i] < sum_of(size, first + i, dtype, max) ||
                                   got[i] > sum_of(size, first + i, dtype, max);
    return bad;
}

static int sums_by_hand(const mixp_ranks_desc *ranks, mixp_dtype dtype) {
    const int size = ranks->size, all = size * LONG;
    const size_t bytes = mixp_dtype_size(dtype), room = (size_t)all * sizeof(double);
    double *data = (double *)malloc(room), *got = (double *)malloc(room);
    int i, way, bad = 0;
    for (way = DDP_SUM; way <= DDP_SCATTER; way++) {
        const int n = way < DDP_GATHER ? LONG : all, mine = ranks->rank * LONG;
        char *own = (char *)data + (way == DDP_GATHER ? (size_t)mine * bytes : 0);
        memset(data, 0, room);
        for (i = 0; i < (way == DDP_GATHER ? LONG : n); i++) {
            const double x = number_of(ranks->rank, i, dtype);
            mixp_convert(own + (size_t)i * bytes, dtype, &x, MIXP_F64, 1);
        }
        const char *why = (way == DDP_SUM ? ranks->sum : way == DDP_MAX ? ranks->max : way == DDP_GATHER ?
               ranks->all_gather : ranks->reduce_scatter)(ranks->user, data, LONG, dtype, NULL, PATIENCE);
        CHECK_TEXT(why ? why : "fine", "fine");
        mixp_convert(got, MIXP_F64, data, dtype, n);
        if (way < DDP_GATHER) bad += numbers_differ(got, size, 0, n, dtype, way == DDP_MAX);
        if (way == DDP_SCATTER) bad += numbers_differ(got + mine, size, mine, LONG, dtype, 0);
        for (i = 0; way == DDP_GATHER && i < all; i++) {
            const double want = number_of(i / LONG, i % LONG, dtype);
            bad += got[i] < want || got[i] > want;
        }
    }
    free(data);
    free(got);
    return bad;
}

static int sums_of_all_dtypes(const mixp_ranks_desc *ranks) {
    static const mixp_dtype dtypes[] = {MIXP_F32, MIXP_BF16, MIXP_F16, MIXP_F64, MIXP_I32};
    for (size_t k = 0; k < sizeof dtypes / sizeof *dtypes; k++) CHECK_INT(sums_by_hand(ranks, dtypes[k]), 0);
    return test_bad != 0;
}
#ifndef RANKS_MPI
static int sums_of_fork(const mixp_ranks_desc *ranks) { return ddp_wait(sums_of_all_dtypes(ranks)); }
static void long_sums(void) {
    CHECK_INT(world_of(2, sums_of_fork), 0);
    CHECK_INT(world_of(3, sums_of_fork), 0);
}
#endif

/* A child of the program that is no rank is left to the program: it is not waited for, and how it ends
 * is not how ranks end. What was printed before is printed once. */
static void children_of_the_program(void) {
    int gate[2], text[2], status = 0;
    char got[64];
    CHECK_INT(pipe(gate), 0);
    CHECK_INT(pipe(text), 0);
    fflush(stdout);
    pid_t root = fork();
    if (root == 0) {
        pid_t other = fork();
        char end;
        FILE *out = fdopen(text[1], "w");
        if (other == 0) {
            close(gate[1]);
            leave(read(gate[0], &end, 1) == 0 ? 3 : 4);     /* until the gate is closed */
        }
        fputs("once;", out);
        {
            mixp_ranks_desc ranks = ddp_fork(2);
            alarm(HANGS);
            fclose(out);
            if (ranks.rank) leave(ddp_wait(0));
            status = ddp_wait(0);
        }
        close(gate[0]);
        close(gate[1]);
        CHECK_INT(status, 0);
        CHECK_INT(waitpid(other, &status, 0), other);
        CHECK_INT(WEXITSTATUS(status), 3);
        leave(test_bad != 0);
    }
    close(gate[0]);
    close(gate[1]);
    close(text[1]);
    CHECK(waitpid(root, &status, 0) > 0);
    CHECK_INT(status, 0);
    ssize_t n = read(text[0], got, sizeof got - 1);
    got[n > 0 ? n : 0] = '\0';
    CHECK(strcmp(got, "once;") == 0);
    close(text[0]);
}

/* --- ranks that go apart -------------------------------------------------------------------------- */

static mixp_result no_update(const mixp_exec *x, const mixp_update_args *k) {
    (void)x, (void)k;
    return MIXP_ERR_DEVICE;
}

/* Two parameters as large as a range, and a loss of one of them; rank 1 is odd in the second step. */
static int two_steps(const mixp_ranks_desc *given, int goes_apart, int fails, result *out) {
    static const int64_t n[1] = {256};
    mixp_kernels kernels = *mixp_cpu()->kernels;
    mixp_device device = *mixp_cpu();
    mixp_ranks_desc ranks = *given;
    mixp_context_desc d;
    mixp_tensor *p[2];
    const char *text;
    int i, step, odd = ranks.rank == 1;
    memset(&d, 0, sizeof d);
    device.kernels = &kernels;
    ranks.seconds = PATIENCE;
    ranks.bucket_bytes = 1;
    d.ranks = &ranks;
    d.threads = 1;
    d.device = &device;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_optimizer *opt = new_sgd(ctx);
    for (i = 0; i < 2; i++) {
        p[i] = mixp_param(ctx, i ? "b" : "a", MIXP_F32, 1, n);
        mixp_optimizer_add(opt, p[i], NULL);
    }
    for (step = 0; step < 3 && mixp_context_error(ctx, NULL) == MIXP_OK; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        if (step && odd && goes_apart == 2) mixp_tensor_set_requires_grad(p[1], 0);
        mixp_tensor *loss = mixp_sum(ctx, step && goes_apart < 2 ? p[odd && goes_apart] : mixp_add(ctx, p[0], p[1]),
                        MIXP_ALL, 0);
        if (mixp_backward(ctx, loss) != MIXP_OK) break;
        if (odd && fails && step) kernels.update = no_update;
        if (mixp_optimizer_step(opt) != MIXP_OK) break;
        out->step = step;
    }
    out->code = mixp_context_error(ctx, &text);
    snprintf(out->text, sizeof out->text, "%s", text);
    memcpy(out->weights, p[0]->data, 1024);
    memcpy(out->weights + 1024, p[1]->data, 1024);
    out->done = 1;
    if (odd) AWAIT(out[-1].done);           /* its end tells nothing that it has not told */
    mixp_context_free(ctx);
    return ddp_wait(0);
}

static result *apart;
static int other_loss(const mixp_ranks_desc *ranks) { return two_steps(ranks, 1, 0, &apart[ranks->rank]); }
static int freezes_alone(const mixp_ranks_desc *ranks) { return two_steps(ranks, 2, 0, &apart[ranks->rank]); }
static int fails_in_a_step(const mixp_ranks_desc *ranks) { return two_steps(ranks, 0, 1, &apart[ranks->rank]); }

/* A loss of other parameters on each rank: what a rank leaves out counts as 0, in ranges of its own. */
static void other_parameters(void) {
    const float lr = (float)mixp_sgd_defaults().lr, want = 0.0f - lr - 0.5f * lr - 0.5f * lr;
    apart = results();
    CHECK_INT(world_of(2, other_loss), 0);
    for (int r = 0; r < 2; r++) {
        float weights[512];
        CHECK_TEXT(apart[r].code ? apart[r].text : "fine", "fine");
        CHECK_INT(apart[r].step, 2);
        memcpy(weights, apart[r].weights, sizeof weights);
        for (int i = 0; i < 512; i++) CHECK_NEAR(weights[i], want, 1e-6 * lr);
    }
}

/* A parameter that one rank alone has frozen: no sum can tell, the step does, and nothing moves. */
static void frozen_on_one(void) {
    apart = results();
    CHECK_INT(world_of(2, freezes_alone), 0);
    for (int r = 0; r < 2; r++) {
        CHECK_INT(apart[r].code, MIXP_ERR_RANKS);
        CHECK_INT(apart[r].step, 0);
        CHECK_TEXT(apart[r].text, "ranks differ: other parameters have gradients on rank 1 than on rank 0");
        CHECK(memcmp(apart[r].weights, apart[0].weights, 2048) == 0);
    }
}

/* A rank whose step fails after all have agreed, and which lives on, says so: the other does not wait
 * until its time is up. */
static void a_step_that_fails(void) {
    apart = results();
    CHECK_INT(world_of(2, fails_in_a_step), 0);
    CHECK_INT(apart[1].code, MIXP_ERR_DEVICE);
    CHECK_INT(apart[0].code, MIXP_ERR_RANKS);
    CHECK_TEXT(apart[0].text, "rank 1 stopped: ");
}

/* --- a rank that is killed ---------------------------------------------------------------------- */

/* kill -9 of one of four ranks at some moment of a run of `steps`: the others end with an error, and
 * from the last checkpoint training ends with the bits of a run that nobody disturbed. Each other time
 * states are sharded, and all ranks have a part in the file. */
static void kill_once(int round, const result *want, const char *path) {
    plan p = plan_of(24);
    result *out = results();
    char torn[128];
    int victim = round % 4, r;
    p.checkpoint = path;
    p.shard = round % 2;
    p.scatter = p.shard * 2;
    p.max_norm = 0;                     /* scattered or not: the same bits */
    p.held = 1;                         /* however fast it is, not all is done before the kill */
    remove(path);
    pid_t root = start(&p, 4, out);
    AWAIT(out[0].step >= 2 + round * 7 % 18 || out[0].done);
    poll(NULL, 0, round * 3 % 5);
    CHECK(out[victim].step >= 0);
    if (out[victim].pid) kill(out[victim].pid, SIGKILL);
    for (r = 0; r < 4; r++) out[r].let_go = 1;
    for (r = 0; r < 4; r++) {
        if (r == victim) continue;
        AWAIT(out[r].done);
        CHECK_INT(out[r].done, 1);
        CHECK_INT(out[r].code, MIXP_ERR_RANKS);
        CHECK_TEXT(out[r].text, "is gone");
    }
    waitpid(root, NULL, 0);
    snprintf(torn, sizeof torn, ".%s.%d.0.tmp", path, (int)out[0].pid);
    remove(torn);                       /* of a save that was killed */
    p.held = 0;
    out = run(&p, 4);
    (p.scatter ? check_scattered : check_like)(out, 4, want);
    for (r = 0; r < 4; r++) CHECK(out[r].began >= 2);   /* it is a resumed run, not one from the start */
    remove(path);
}

static void kill_rounds(int rounds) {
    static result want;
    char path[64];
    plan p = plan_of(24);
    p.max_norm = 0;
    snprintf(path, sizeof path, "ranks.%d.tmp", (int)getpid());
    want = run(&p, 4)[0];
    for (int i = 0; i < rounds; i++) kill_once(i, &want, path);
}
static void killed_rank(void) {
    const char *rounds = getenv("RANKS_KILLS");     /* the long tests ask for 50 */
    kill_rounds(rounds ? atoi(rounds) : 5);
}
