/* test_ranks_tcp.c - ranks over plain sockets on 127.0.0.1: examples/ddp_tcp.c.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define RANKS_MPI                       /* without test_ranks.c's own main */
#if defined(__GNUC__)
#  pragma GCC diagnostic ignored "-Wunused-function"
#endif
#define DDP_BUSY_TIMES 4                /* of the limit, while a rank works on its own */
#include "test_ranks.c"
#include <netinet/in.h>
#include <sys/socket.h>

/* The system's choices of ports, at their worst. */
static int meeting, connects_to_self, listens_at_port;

/* The first connections leave from the port that they want to reach, where it is free. */
static int unlucky_connect(int s, const struct sockaddr *at, socklen_t n) {
    if (connects_to_self > 0 && connects_to_self--) (void)!bind(s, at, n);
    return connect(s, at, n);
}
/* Any free port is the one that rank 0 will ask for. */
static int unlucky_bind(int s, const struct sockaddr *at, socklen_t n) {
    struct sockaddr_in there;
    memcpy(&there, at, sizeof there);
    if (there.sin_port == 0 && listens_at_port) {
        there.sin_port = htons((uint16_t)meeting);
        if (bind(s, (const struct sockaddr *)&there, sizeof there) == 0) return 0;
    }
    return bind(s, at, n);
}
/* A socket that takes so many bytes, and then is full; -1: as it is. */
static long socket_takes = -1;
static ssize_t full_send(int s, const void *data, size_t n, int flags) {
    if (socket_takes < 0) return send(s, data, n, flags);
    if (n > (size_t)socket_takes) n = (size_t)socket_takes;
    socket_takes -= (long)n;
    if (n) return send(s, data, n, flags);
    errno = EAGAIN;
    return -1;
}
#define connect unlucky_connect
#define bind unlucky_bind
#define send full_send
#include "../../examples/ddp_tcp.c"
#undef connect
#undef bind
#undef send

/* A port that was free a moment ago, below those that the system gives to connections. */
static int free_port(void) {
    static int turn;
    struct sockaddr_in at;
    int s = -1, n = 0;
    while (s < 0) {
        n = 10000 + (int)((getpid() * 37L + turn++) % 20000);
        s = ddp_tcp_listen(n, &at);
    }
    close(s);
    return n;
}

static void set_number(const char *name, int n) {
    char text[16];
    sprintf(text, "%d", n);
    setenv(name, text, 1);
}

static void set_rank(int rank, int size) {
    set_number("RANK", rank);
    set_number("WORLD_SIZE", size);
    set_number("MASTER_PORT", meeting);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
}

/* `size` processes, each of which does fn; all end with 0. */
static int each_rank(int size, int (*fn)(const mixp_ranks_desc *)) {
    int r, status, bad = 0;
    meeting = free_port();
    fflush(stdout);
    for (r = size - 1; r >= 0; r--)
        if (fork() == 0) {
            const char *why;
            test_bad = 0;
            alarm(HANGS);
            set_rank(r, size);
            mixp_ranks_desc ranks = ddp_tcp(PATIENCE, &why);
            if (why) printf("  rank %d: %s\n", r, why);
            status = why ? 1 : fn(&ranks);
            fflush(stdout);
            leave(ddp_tcp_end(status));
        }
    for (r = 0; r < size; r++) {
        CHECK(wait(&status) > 0);
        bad += status != 0;
    }
    return bad;
}

static plan chosen;
static result *outcomes;
static int trains(const mixp_ranks_desc *ranks) {
    run_rank(&chosen, ranks, &outcomes[ranks->rank]);
    return 0;
}

/* The bits of ranks that ddp_fork carries, which are those of one; with shards, scattered sums, bf16
 * on the wire. */
static void bits(void) {
    static result want[MOST];
    for (int way = 0; way < 5; way++) {
        const int size = way == 4 ? 4 : 2;
        plan p = plan_of(3);
        p.wire = way == 1 ? MIXP_BF16 : MIXP_F32;
        p.shard = way > 1;
        p.scatter = way > 2;
        memcpy(want, run(&p, size), sizeof want);
        outcomes = results();
        chosen = p;
        CHECK_INT(each_rank(size, trains), 0);
        (p.scatter ? check_scattered : check_like)(outcomes, size, want);
    }
}

static void dtypes(void) {
    CHECK_INT(each_rank(2, sums_of_all_dtypes), 0);
    CHECK_INT(each_rank(3, sums_of_all_dtypes), 0);
}

static int asks_unlike(const mixp_ranks_desc *ranks) {
    float x[4] = {1, 2, 3, 4};
    const char *why = ddp_tcp_sum(NULL, x, ranks->rank == 1 ? 3 : 4, MIXP_F32, NULL, PATIENCE);
    CHECK_TEXT(why, "ranks request different operations: rank ");
    CHECK_TEXT(why, "a sum of 3 f32");
    CHECK_TEXT(why, "a sum of 4 f32");
    poll(NULL, 0, 200);
    return test_bad != 0;
}
static void unlike(void) { CHECK_INT(each_rank(3, asks_unlike), 0); }

/* A rank that is late, is killed, says that it stops: told, by its number. */
static int comes_late(const mixp_ranks_desc *ranks) {
    float x = 1;
    if (ranks->rank == 1) poll(NULL, 0, 1500);
    else CHECK_TEXT(ddp_tcp_sum(NULL, &x, 1, MIXP_F32, NULL, 0.3), "rank 1 did not answer in time");
    return test_bad != 0;
}
static int is_killed(const mixp_ranks_desc *ranks) {
    float x = 1;
    if (ranks->rank == 2) leave(0);
    CHECK_TEXT(ddp_tcp_sum(NULL, &x, 1, MIXP_F32, NULL, PATIENCE), "rank 2 is gone");
    return test_bad != 0;
}
static int stops(const mixp_ranks_desc *ranks) {
    float x = 1;
    if (ranks->rank == 1) ddp_tcp_stop(NULL, "its disk is full");
    else CHECK_TEXT(ddp_tcp_sum(NULL, &x, 1, MIXP_F32, NULL, PATIENCE), "rank 1 stopped: its disk is full");
    poll(NULL, 0, 200);
    return test_bad != 0;
}
/* A text of another process reaches no terminal as it is. */
static int stops_loudly(const mixp_ranks_desc *ranks) {
    float x = 1;
    if (ranks->rank == 1) ddp_tcp_stop(NULL, "\x1B]0;owned\a\x1B[31m\xC2\x9Bx\n");
    else CHECK_TEXT(ddp_tcp_sum(NULL, &x, 1, MIXP_F32, NULL, PATIENCE), "rank 1 stopped: ?]0;owned??[31m??x?");
    poll(NULL, 0, 200);
    return test_bad != 0;
}
/* Rank 1 says that it is busy, and is stopped for ever: the others have a limit. */
static int never_comes_back(const mixp_ranks_desc *ranks) {
    const double began = ddp_tcp_now();
    float x = 1;
    if (ranks->rank == 1) {
        ranks->busy(ranks->user, 1);
        poll(NULL, 0, 4000);
        return 0;
    }
    CHECK_TEXT(ddp_tcp_sum(NULL, &x, 1, MIXP_F32, NULL, 0.5), "rank 1 reported that it is busy, and did not return in time");
    CHECK(ddp_tcp_now() - began > 1.5 && ddp_tcp_now() - began < 5);
    return test_bad != 0;
}
/* The system looks after each connection. */
static int is_guarded(const mixp_ranks_desc *ranks) {
    int r, value;
    socklen_t n = sizeof value;
    for (r = 0; r < ranks->size; r++) {
        if (r == ranks->rank) continue;
        CHECK(getsockopt(ddp_t.socket[r], SOL_SOCKET, SO_KEEPALIVE, &value, &n) == 0 && value == 1);
#ifdef TCP_USER_TIMEOUT
        CHECK(getsockopt(ddp_t.socket[r], IPPROTO_TCP, TCP_USER_TIMEOUT, &value, &n) == 0);
        CHECK(value > 0 && value <= 1000 * PATIENCE);
#endif
    }
    return test_bad != 0;
}
static int works_alone(const mixp_ranks_desc *ranks) {
    float x = 1;
    if (ranks->rank == 0) {
        ranks->busy(ranks->user, 1);
        poll(NULL, 0, 2000);
        ranks->busy(ranks->user, 0);
    }
    CHECK_TEXT(ddp_tcp_sum(NULL, &x, 1, MIXP_F32, NULL, 1) ? ddp_t.why : "fine", "fine");
    CHECK_NEAR(x, ranks->size, 0);
    return test_bad != 0;
}
static void told(void) {
    CHECK_INT(each_rank(3, comes_late), 0);
    CHECK_INT(each_rank(3, is_killed), 0);
    CHECK_INT(each_rank(3, stops), 0);
    CHECK_INT(each_rank(3, stops_loudly), 0);
    CHECK_INT(each_rank(3, works_alone), 0);
    CHECK_INT(each_rank(3, never_comes_back), 0);
    CHECK_INT(each_rank(3, is_guarded), 0);
}

/* Rank 2 is killed amid large sums, at another moment in each round: the others name it. */
static int sums_until_it_ends(const mixp_ranks_desc *ranks) {
    static float x[300000];
    const char *why = NULL;
    if (ranks->rank == 2 && fork() == 0) {
        poll(NULL, 0, 1 + chosen.steps * 7);
        kill(getppid(), SIGKILL);
        leave(0);
    }
    for (int i = 0; i < 100000 && !why; i++) why = ddp_tcp_sum(NULL, x, 300000 - i % 7, MIXP_F32, NULL, PATIENCE);
    CHECK_TEXT(why, "rank 2 is gone");
    return test_bad != 0;
}
static void first_is_named(void) {
    for (int round = 0; round < 10; round++) {
        chosen.steps = round;
        CHECK_INT(each_rank(3, sums_until_it_ends), 1);     /* rank 2 itself */
    }
}

/* Worlds that do not come together say why, within the limit. */
static void no_world(void) {
    static const char *const names[4] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
    struct sockaddr_in at;
    const char *why = NULL;
    int i, status, s = ddp_tcp_listen(0, &at);
    meeting = ntohs(at.sin_port);
    set_rank(0, 2);
    CHECK_INT(ddp_tcp(1, &why).size, 0);
    CHECK_TEXT(why, "MASTER_PORT is in use");
    close(s);
    meeting = free_port();
    set_rank(0, 2);
    CHECK_INT(ddp_tcp(0.3, &why).size, 0);
    CHECK_TEXT(why, "not all ranks connected in time");
    set_rank(1, 2);
    CHECK_INT(ddp_tcp(0.3, &why).size, 0);
    CHECK_TEXT(why, "rank 0 does not listen at MASTER_ADDR");
    for (i = 0; i < 2; i++) {           /* on each rank, and at once */
        set_rank(i, 2);
        setenv("MASTER_ADDR", "::1", 1);
        CHECK_INT(ddp_tcp(60, &why).size, 0);
        CHECK_TEXT(why, "MASTER_ADDR is an IPv6 address");
    }
    fflush(stdout);
    if (fork() == 0) {                  /* a rank of another world */
        set_rank(1, 3);
        leave(ddp_tcp(2, &why).size != 0);
    }
    set_rank(0, 2);
    CHECK_INT(ddp_tcp(2, &why).size, 0);
    CHECK_TEXT(why, "not all ranks connected in time; one was refused: ranks differ in WORLD_SIZE");
    for (i = 0; i < DDP_TCP_MOST; i++) if (ddp_t.socket[i] >= 0) close(ddp_t.socket[i]);
    wait(&status);
    for (i = 0; i < 4; i++) {
        set_rank(0, 2);
        unsetenv(names[i]);
        CHECK_INT(ddp_tcp(1, &why).size, 0);
        CHECK_TEXT(why, names[i]);
    }
    fflush(stdout);
    if (fork() == 0) {                  /* too many ranks: the end of main sends them nothing */
        set_rank(0, 100000000);
        (void)ddp_tcp(1, &why);
        leave(!why || !strstr(why, "from 1 to 64") || ddp_tcp_end(1) != 1);
    }
    wait(&status);
    CHECK_INT(status, 0);
}

/* Rank 1 starts first, and the system gives its sockets the port that rank 0 needs. */
static void meets_unluckily(void) {
    const char *why;
    int status;
    meeting = free_port();
    fflush(stdout);
    if (fork() == 0) {
        alarm(HANGS);
        set_rank(1, 2);
        why = NULL;
        (void)ddp_tcp(PATIENCE, &why);
        if (why) printf("  rank 1: %s\n", why);
        fflush(stdout);
        leave(ddp_tcp_end(why != NULL));
    }
    poll(NULL, 0, 300);
    set_rank(0, 2);
    CHECK_INT(ddp_tcp(PATIENCE, &why).size, 2);
    CHECK_TEXT(why ? why : "fine", "fine");
    wait(&status);
    CHECK_INT(status, 0);
    ddp_tcp_end(0);
}
static void own_port(void) {
    connects_to_self = 2;
    meets_unluckily();
    connects_to_self = 1000;            /* as long as nobody listens there */
    meets_unluckily();
    connects_to_self = 0;
    listens_at_port = 1;
    meets_unluckily();
    listens_at_port = 0;
}

/* Another program listens where rank 0 should, and answers. */
static void other_program(void) {
    struct sockaddr_in at;
    struct pollfd p;
    char bytes[4096];
    const char *why;
    int status, s, c;
    meeting = free_port();
    s = ddp_tcp_listen(meeting, &at);
    p.fd = s, p.events = POLLIN;
    fflush(stdout);
    if (fork() == 0) {
        alarm(HANGS);
        if (poll(&p, 1, 20000) < 1) leave(1);
        c = accept(s, NULL, NULL);
        memset(bytes, 'x', sizeof bytes);
        leave(send(c, bytes, sizeof bytes, 0) < 0 || poll(NULL, 0, 500));
    }
    close(s);
    set_rank(1, 2);
    CHECK_INT(ddp_tcp(PATIENCE, &why).size, 0);
    CHECK_TEXT(why, "another program than rank 0 answers");
    wait(&status);
    CHECK_INT(status, 0);
    ddp_tcp_end(1);
}

/* Programs that are no ranks connect to MASTER_PORT first: most stay silent, one sends a few bytes, one
 * as many as a rank. The world meets all the same, long before the limit. */
static void strangers(void) {
    enum { STRANGERS = DDP_TCP_MOST + 6 };
    struct sockaddr_in at;
    const double began = ddp_tcp_now();
    const char *why;
    char bytes[256];
    int status, i, s, go[2];
    meeting = free_port();
    memset(bytes, 'x', sizeof bytes);
    CHECK_INT(pipe(go), 0);
    fflush(stdout);
    if (fork() == 0) {                  /* the strangers, and then rank 1 */
        alarm(HANGS);
        memset(&at, 0, sizeof at);
        at.sin_family = AF_INET;
        at.sin_port = htons((uint16_t)meeting);
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        for (i = 0; i < STRANGERS; i++) {
            s = ddp_tcp_connect(&at, ddp_tcp_now() + HANGS);
            if (i == 1) (void)!send(s, bytes, 5, MSG_NOSIGNAL);
            if (i == 2) (void)!send(s, bytes, sizeof bytes, MSG_NOSIGNAL);
        }
        set_rank(1, 2);
        (void)ddp_tcp(HANGS, &why);
        if (why) printf("  rank 1: %s\n", why);
        fflush(stdout);
        (void)!read(go[0], bytes, 1);   /* the strangers stay until rank 0 has met rank 1 */
        leave(ddp_tcp_end(why != NULL));
    }
    set_rank(0, 2);
    CHECK_INT(ddp_tcp(60, &why).size, 2);
    CHECK_TEXT(why ? why : "fine", "fine");
    CHECK(ddp_tcp_now() - began < 30);
    CHECK_INT(write(go[1], "x", 1), 1);
    wait(&status);
    CHECK_INT(status, 0);
    close(go[0]);
    close(go[1]);
    ddp_tcp_end(0);
}

static unsigned lie_seed;
static unsigned lie_number(void) { return lie_seed = lie_seed * 1664525u + 1013904223u; }

/* --- guests that are refused --------------------------------------------------------------------- */

/* A process that greets as this rank of a world of this size, of this job, with this secret; NULL: none. */
typedef struct impostor {
    int rank, size;
    const char *job, *secret, *refusal;
} impostor;

static void set_or_not(const char *name, const char *value) {
    if (value) setenv(name, value, 1);
    else unsetenv(name);
}

/* Tries to join; returns 0 if it is refused with its text, before the limit. */
static int is_refused(const impostor *i) {
    const double began = ddp_tcp_now();
    const char *why;
    set_rank(i->rank, i->size);
    set_or_not("MIXPREC_JOB", i->job);
    set_or_not("MIXPREC_SECRET", i->secret);
    (void)ddp_tcp(HANGS, &why);
    if (!why || !strstr(why, i->refusal) || ddp_tcp_now() - began > 20)
        printf("  rank %d of %d: %s, not: %s\n", i->rank, i->size, why ? why : "joined", i->refusal);
    return why && strstr(why, i->refusal) ? 0 : 1;
}

/* The world of two meets although impostors come between its ranks. */
static void world_with(const impostor *guests, int n, const char *job, const char *secret) {
    const char *why;
    int i, status;
    meeting = free_port();
    fflush(stdout);
    for (i = 0; i <= n; i++)
        if (fork() == 0) {
            alarm(HANGS);
            poll(NULL, 0, i < n ? 100 + 20 * i : 600);
            if (i < n) {
                status = is_refused(&guests[i]);
                fflush(stdout);
                leave(status);
            }
            set_rank(1, 2);
            set_or_not("MIXPREC_JOB", job);
            set_or_not("MIXPREC_SECRET", secret);
            (void)ddp_tcp(HANGS, &why);
            if (why) printf("  rank 1: %s\n", why);
            fflush(stdout);
            leave(ddp_tcp_end(why != NULL));
        }
    set_rank(0, 2);
    set_or_not("MIXPREC_JOB", job);
    set_or_not("MIXPREC_SECRET", secret);
    CHECK_INT(ddp_tcp(HANGS, &why).size, 2);
    CHECK_TEXT(why ? why : "fine", "fine");
    for (i = 0; i <= n; i++) {
        CHECK(wait(&status) > 0);
        CHECK_INT(status, 0);
    }
    ddp_tcp_end(0);
    unsetenv("MIXPREC_JOB");
    unsetenv("MIXPREC_SECRET");
}

static void impostors(void) {
    static const impostor plain[3] = {{1, 3, NULL, NULL, "ranks differ in WORLD_SIZE"},
                                      {1, 2, "other", NULL, "another job is meeting"},
                                      {1, 2, NULL, "guess", "MIXPREC_SECRET is not the same"}};
    static const impostor known[4] = {{1, 2, "j", NULL, "MIXPREC_SECRET is not the same"},
                                      {1, 2, "j", "", "MIXPREC_SECRET is not the same"},
                                      {1, 2, "j", "a secreT", "MIXPREC_SECRET is not the same"},
                                      {1, 2, "k", "a secret", "another job is meeting"}};
    world_with(plain, 3, NULL, NULL);
    world_with(known, 4, "j", "a secret");
}

/* Greetings with right proofs and numbers that no rank has, and with random bytes: refused, one by one. */
static void odd_greetings(void) {
    static const int64_t odd[8] = {0, -1, 2, 64, 65, INT64_MAX, INT64_MIN, 4294967297};
    struct sockaddr_in at;
    const char *why;
    int status, i, k;
    meeting = free_port();
    fflush(stdout);
    if (fork() == 0) {
        alarm(HANGS);
        set_rank(1, 2);
        memset(&ddp_t, 0, sizeof ddp_t);
        ddp_t.secret = "";
        ddp_t.job = ddp_tcp_job();
        memset(&at, 0, sizeof at);
        at.sin_family = AF_INET;
        at.sin_port = htons((uint16_t)meeting);
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        lie_seed = 7;
        for (i = 0; i < 64; i++) {
            const double until = ddp_tcp_now() + 20;
            int s = ddp_tcp_connect(&at, until);
            ddp_tcp_hello hello;
            ddp_tcp_greeting g;
            memset(&g, 0, sizeof g);
            if (!ddp_tcp_all(s, &hello, sizeof hello, 0, until)) leave(1);
            for (k = 0; k < (int)sizeof g && i % 2; k++) ((unsigned char *)&g)[k] = (unsigned char)(lie_number() >> 20);
            g.card.word = DDP_TCP_CARD;
            if (i % 2 == 0) g.card.rank = odd[i / 2 % 8], g.card.size = i / 16 ? 2 : odd[i / 2 % 8], g.card.job = ddp_t.job;
            if (i % 4 < 3) ddp_prove("", "card", hello.nonce, &g.card, sizeof g.card, g.proof);
            (void)!send(s, &g, sizeof g, MSG_NOSIGNAL);
            poll(NULL, 0, 2);
            close(s);
        }
        (void)ddp_tcp(HANGS, &why);
        if (why) printf("  rank 1: %s\n", why);
        fflush(stdout);
        leave(ddp_tcp_end(why != NULL));
    }
    set_rank(0, 2);
    CHECK_INT(ddp_tcp(HANGS, &why).size, 2);
    CHECK_TEXT(why ? why : "fine", "fine");
    wait(&status);
    CHECK_INT(status, 0);
    ddp_tcp_end(0);
}

/* Of two processes with one RANK, the second is refused, and the world meets. */
static void taken_rank(void) {
    const char *why;
    int r, status, refused = 0, bad = 0;
    meeting = free_port();
    fflush(stdout);
    for (r = 0; r < 3; r++)
        if (fork() == 0) {              /* rank 1, rank 1 again, rank 2 */
            alarm(HANGS);
            poll(NULL, 0, 100 + 200 * r);
            set_rank(r == 2 ? 2 : 1, 3);
            (void)ddp_tcp(HANGS, &why);
            leave(!why ? ddp_tcp_end(0) : strstr(why, "two processes have the same RANK") ? 7 : 1);
        }
    set_rank(0, 3);
    CHECK_INT(ddp_tcp(HANGS, &why).size, 3);
    CHECK_TEXT(why ? why : "fine", "fine");
    for (r = 0; r < 3; r++) {
        CHECK(wait(&status) > 0);
        refused += WIFEXITED(status) && WEXITSTATUS(status) == 7;
        bad += !WIFEXITED(status) || (WEXITSTATUS(status) != 0 && WEXITSTATUS(status) != 7);
    }
    CHECK_INT(refused, 1);
    CHECK_INT(bad, 0);
    ddp_tcp_end(0);
}

/* A greeting that a stranger has overheard is worth nothing at the next connection. */
static void replayed_greeting(void) {
    ddp_tcp_guest first, second;
    unsigned char proof[DDP_PROOF];
    memset(&ddp_t, 0, sizeof ddp_t), memset(&first, 0, sizeof first);
    ddp_t.size = 2;
    ddp_t.socket[1] = -1;
    ddp_t.secret = "a secret";
    first.greeting.card.word = DDP_TCP_CARD;
    first.greeting.card.rank = 1, first.greeting.card.size = 2;
    ddp_nonce(first.hello.nonce);
    ddp_prove(ddp_t.secret, "card", first.hello.nonce, &first.greeting.card, sizeof first.greeting.card, first.greeting.proof);
    CHECK_INT(ddp_tcp_judge(&first), DDP_TCP_WELCOME);
    second = first;
    ddp_nonce(second.hello.nonce);
    CHECK(memcmp(first.hello.nonce, second.hello.nonce, DDP_NONCE) != 0);
    CHECK_INT(ddp_tcp_judge(&second), DDP_TCP_UNKNOWN);
    second = first;
    second.greeting.card.at.sin_port ^= 1;
    CHECK_INT(ddp_tcp_judge(&second), DDP_TCP_UNKNOWN);
    ddp_prove(ddp_t.secret, "welcome", first.hello.nonce, &first.greeting.card, sizeof first.greeting.card, proof);
    CHECK(!ddp_is_proof(proof, first.greeting.proof));
    memset(&ddp_t, 0, sizeof ddp_t);
}

/* Python 3: hashlib.sha256(b"abc"), hmac.new(key, b"what\0" b"0123456789abcdef" b"data", "sha256") with the key b"key"
 * and with 100 times b"k". */
static void proofs(void) {
    static const char *const want[3] = {"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
                                        "22c1dbf1b02e88d53af00aed8d03a4fbbb8b4091aaff8832cf7af0f090aafdd4",
                                        "e05cfc1f62f8cffc01cff430c7e590d61e50a4e8f1737991b7bbfe64a5cea93c"};
    unsigned char out[DDP_PROOF], nonce[DDP_NONCE];
    char secret[101], text[2 * DDP_PROOF + 1];
    ddp_hash h = ddp_hash_begin();
    memcpy(nonce, "0123456789abcdef", sizeof nonce);
    for (int k = 0; k < 3; k++) {
        memset(secret, k == 2 ? 'k' : 0, sizeof secret);
        if (k == 1) strcpy(secret, "key");
        secret[100] = 0;
        ddp_hash_add(&h, "abc", 3);
        if (k == 0) ddp_hash_end(&h, out);
        else ddp_prove(secret, "what", nonce, "data", 4, out);
        for (int i = 0; i < DDP_PROOF; i++) sprintf(text + 2 * i, "%02x", out[i]);
        CHECK(strcmp(text, want[k]) == 0);
    }
}

/* Strangers connect as fast as they can while four ranks meet. Bounded: 20,000 connections or 20 seconds. */
static void flood(void) {
    struct sockaddr_in at;
    const char *why;
    int r, round, status;
    for (round = 0; round < 3; round++) {
        meeting = free_port();
        fflush(stdout);
        for (r = 4; r >= 1; r--)
            if (fork() == 0) {
                alarm(HANGS);
                if (r == 4) {
                    const double until = ddp_tcp_now() + 20;
                    int i, s, failed = 0;
                    memset(&at, 0, sizeof at);
                    at.sin_family = AF_INET;
                    at.sin_port = htons((uint16_t)meeting);
                    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
                    for (i = 0; i < 20000 && failed < 200 && ddp_tcp_now() < until; i++) {
                        s = socket(AF_INET, SOCK_STREAM, 0);
                        if (s >= 0 && connect(s, (struct sockaddr *)&at, sizeof at)) {
                            failed += i > 0;        /* rank 0 is there, or no longer */
                            poll(NULL, 0, 5);
                        }
                        if (i % 2 && s >= 0) (void)!send(s, "GET / HTTP/1.0\r\n\r\n", 18, MSG_NOSIGNAL);
                        if (s >= 0) ddp_tcp_drop(s);
                    }
                    leave(0);
                }
                poll(NULL, 0, 200);
                set_rank(r, 4);
                (void)ddp_tcp(HANGS, &why);
                if (why) printf("  rank %d: %s\n", r, why);
                fflush(stdout);
                leave(ddp_tcp_end(why != NULL));
            }
        set_rank(0, 4);
        CHECK_INT(ddp_tcp(HANGS, &why).size, 4);
        CHECK_TEXT(why ? why : "fine", "fine");
        for (r = 1; r <= 4; r++) {
            CHECK(wait(&status) > 0);
            CHECK_INT(status, 0);
        }
        ddp_tcp_end(0);
    }
}

/* Rank 0 listens where MASTER_ADDR says, and nowhere else: 127.0.0.2 is this machine as well. */
static void listens_there_only(void) {
    struct sockaddr_in at;
    const char *why;
    int s, status, there, elsewhere;
    meeting = free_port();
    fflush(stdout);
    if (fork() == 0) {
        alarm(HANGS);
        memset(&at, 0, sizeof at);
        at.sin_family = AF_INET;
        at.sin_port = htons((uint16_t)meeting);
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        there = ddp_tcp_connect(&at, ddp_tcp_now() + HANGS);
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
        s = socket(AF_INET, SOCK_STREAM, 0);
        elsewhere = connect(s, (struct sockaddr *)&at, sizeof at) == 0;
        leave(there < 0 || elsewhere);
    }
    set_rank(0, 2);
    CHECK_INT(ddp_tcp(1.5, &why).size, 0);
    wait(&status);
    CHECK_INT(status, 0);
    ddp_tcp_end(0);
}

/* Numbers of the environment are numbers from the first to the last character. */
static void strict_numbers(void) {
    static const char *const bad[] = {"", "x", "1x", " 1", "1 ", "-1", "+1", "0x1", "4294967297", "99999999999999999999", "1.0"};
    static const char *const names[] = {"RANK", "WORLD_SIZE", "MASTER_PORT"};
    const char *why;
    for (size_t k = 0; k < 3; k++)
        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
            meeting = 20000;
            set_rank(1, 2);
            setenv(names[k], bad[i], 1);
            CHECK_INT(ddp_tcp(0.2, &why).size, 0);
            CHECK_TEXT(why, names[k]);
            ddp_tcp_end(0);
        }
    set_rank(1, 2);
    setenv("MASTER_PORT", "4294987296", 1);
    CHECK_INT(ddp_tcp(0.2, &why).size, 0);
    CHECK_TEXT(why, "MASTER_PORT must be a port");
}

/* Ranks of ddp_fork have the same limit. */
static void forked_and_busy(void) {
    int status;
    fflush(stdout);
    if (fork() == 0) {
        mixp_ranks_desc d = ddp_fork(2);
        const double began = ddp_now();
        float x = 1;
        alarm(HANGS);
        test_bad = 0;
        if (d.rank == 1) {
            d.busy(d.user, 1);
            poll(NULL, 0, 4000);
            leave(0);
        }
        CHECK_TEXT(d.sum(d.user, &x, 1, MIXP_F32, NULL, 0.5), "rank 1 is busy, and did not return in time");
        CHECK(ddp_now() - began > 1.5 && ddp_now() - began < 3.5);
        fflush(stdout);
        (void)ddp_wait(0);
        leave(test_bad != 0);
    }
    wait(&status);
    CHECK_INT(status, 0);
}

/* A rank that sends other numbers than its own: any bits, or doubles that are no counts. */
static void lie(void *data, int64_t count, mixp_dtype dtype) {
    static const double wild[8] = {1e300, -1e300, HUGE_VAL, 9e15, -1, 0.5, 4294967296.0, 1e19};
    unsigned char *bytes = (unsigned char *)data;
    if ((lie_number() >> 16) % 3) return;
    for (int64_t i = 0; i < count; i++) {
        const unsigned r = lie_number();
        if ((r >> 28) % 2) continue;
        if (dtype == MIXP_F64) memcpy(bytes + 8 * i, &wild[(r >> 20) % 8], 8);
        else bytes[i * (int64_t)mixp_dtype_size(dtype)] = (unsigned char)(r >> 8);
    }
}
static const char *lying_sum(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double seconds) {
    lie(data, count, dtype);
    return ddp_tcp_sum(user, data, count, dtype, stream, seconds);
}
static const char *lying_max(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double seconds) {
    lie(data, count, dtype);
    return ddp_tcp_max(user, data, count, dtype, stream, seconds);
}
static const char *lying_gather(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream, double seconds) {
    lie((char *)data + (size_t)ddp_t.rank * (size_t)count * mixp_dtype_size(dtype), count, dtype);
    return ddp_tcp_gather(user, data, count, dtype, stream, seconds);
}
static int trains_with_a_liar(const mixp_ranks_desc *ranks) {
    mixp_ranks_desc d = *ranks;
    if (d.rank == 1) d.sum = lying_sum, d.max = lying_max, d.all_gather = lying_gather;
    test_shown = 100;                   /* its errors are not this test's */
    run_rank(&chosen, &d, &outcomes[d.rank]);
    return 0;
}

/* The other rank ends by itself: with an error, or without. Sanitizers look on. */
static void liars(void) {
    outcomes = results();
    for (int round = 0; round < 12; round++) {
        chosen = plan_of(3);
        chosen.seconds = 20;
        chosen.shard = round % 3 == 1;
        chosen.guard = round % 2;
        lie_seed = (unsigned)round;
        CHECK_INT(each_rank(2, trains_with_a_liar), 0);
    }
}

/* Two ranks of 300 micro-batches each, bf16 and f32 parameters: f32 gradients lose nothing on their way, with
 * sums, with shards and with scattered sums. The mean is that of 2 ranks. */
static int sums_many(const mixp_ranks_desc *ranks) {
    static const int64_t shapes[3] = {4, 5000, 700};
    static const mixp_dtype dtypes[3] = {MIXP_BF16, MIXP_BF16, MIXP_F32};
    mixp_context_desc desc;
    mixp_ranks_desc r = *ranks;
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_tensor *w[3], *y;
    static float got[5000];
    int i, k;
    r.shard = chosen.shard;
    r.scatter = chosen.scatter;
    r.bucket_bytes = 4096;
    memset(&desc, 0, sizeof desc);
    desc.ranks = &r;
    desc.threads = 1;
    desc.f32_gradients = 1;
    mixp_context *ctx = mixp_context_new(&desc);
    sgd.lr = 1.0 / 1024;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    for (k = 0; k < 3; k++) {
        w[k] = mixp_param_named(ctx, dtypes[k], 1, &shapes[k], "w%d", k);
        mixp_fill(w[k], 1.0);
        mixp_optimizer_add(opt, w[k], NULL);
    }
    for (i = 0; i < 300; i++) {
        mixp_step_begin(ctx);
        mixp_ranks_hold(ctx, i < 299);
        for (y = NULL, k = 0; k < 3; k++) {
            mixp_tensor *one = mixp_scale(ctx, mixp_sum(ctx, w[k], MIXP_ALL, 0), ranks->rank ? 3.0f : 1.0f);
            y = y ? mixp_add(ctx, y, one) : one;
        }
        CHECK_INT(mixp_backward(ctx, y), MIXP_OK);
    }
    for (k = 0; k < 3 && !chosen.scatter; k++) {
        CHECK_INT(mixp_read(w[k]->grad, got, MIXP_F32, shapes[k]), MIXP_OK);
        CHECK_NEAR(got[0], 600, 0);
        CHECK_NEAR(got[shapes[k] - 1], 600, 0);
    }
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    for (k = 0; k < 3; k++) {
        mixp_read(w[k], got, MIXP_F32, shapes[k]);
        CHECK_NEAR(got[0], 1 - 600.0 / 1024, 0.002);
        CHECK_NEAR(got[shapes[k] - 1], 1 - 600.0 / 1024, 0.002);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
    return test_bad != 0;
}
static void f32_gradients(void) {
    for (int way = 0; way < 3; way++) {
        chosen.shard = way > 0;
        chosen.scatter = way > 1;
        CHECK_INT(each_rank(2, sums_many), 0);
    }
}

/* Counts that another rank sends as doubles: any bits have a defined result. */
static void counts_of_others(void) {
    static const double sent[8] = {0, -5, 3.7, 9007199254740991.0, 1e300, -1e300, HUGE_VAL, -HUGE_VAL};
    static const int64_t want[8] = {0, -5, 3, INT64_C(9007199254740991), 0, 0, 0, 0};
    for (int i = 0; i < 8; i++) CHECK_INT(mixpi_whole_of(sent[i]), want[i]);
    CHECK_INT(mixpi_whole_of((double)NAN), 0);
    CHECK_INT(mixpi_whole_of(ldexp(1.0, 53)), 0);
    CHECK_INT(mixpi_whole_of(-ldexp(1.0, 63)), 0);
}

/* A word that a full socket takes a part of is completed before the next message begins. */
static void words_are_whole(void) {
    ddp_tcp_head got[2];
    ddp_tcp_way w;
    char data[5] = "";
    int ends[2];
    for (long takes = 0; takes <= (long)sizeof got[0]; takes += 10) {
        CHECK_INT(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
        memset(&ddp_t, 0, sizeof ddp_t), memset(&w, 0, sizeof w);
        ddp_t.size = 2;
        ddp_t.socket[1] = ends[0];
        w.head.kind = DDP_TCP_DATA;
        w.from = "abcd";
        w.bytes = 4;
        socket_takes = takes;
        ddp_tcp_busy(NULL, 1);
        CHECK_INT(ddp_tcp_push(1, &w), 1);
        socket_takes = -1;
        CHECK_INT(ddp_tcp_push(1, &w), 1);
        CHECK_INT(recv(ends[1], &got[0], sizeof got[0], MSG_DONTWAIT), (long)sizeof got[0]);
        CHECK_INT(recv(ends[1], &got[1], sizeof got[1], MSG_DONTWAIT), (long)sizeof got[1]);
        CHECK_INT(recv(ends[1], data, 4, MSG_DONTWAIT), 4);
        CHECK_INT(got[0].kind, DDP_TCP_BUSY);
        CHECK_INT(got[1].kind, DDP_TCP_DATA);
        CHECK(strcmp(data, "abcd") == 0);
        close(ends[0]), close(ends[1]);
    }
    memset(&ddp_t, 0, sizeof ddp_t);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    RUN(words_are_whole);
    RUN(bits);
    RUN_LATER(dtypes);
    RUN(unlike);
    RUN(told);
    RUN(no_world);
    RUN(own_port);
    RUN(other_program);
    RUN(strangers);
    RUN(first_is_named);
    RUN(forked_and_busy);
    RUN(liars);
    RUN(f32_gradients);
    RUN(counts_of_others);
    RUN(impostors);
    RUN(odd_greetings);
    RUN(taken_rank);
    RUN(replayed_greeting);
    RUN(proofs);
    RUN(flood);
    RUN(listens_there_only);
    RUN(strict_numbers);
    return test_report();
}
