/* test_ranks_tcp.c - ranks over plain sockets on 127.0.0.1: examples/ddp_tcp.c.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define RANKS_MPI                       /* without test_ranks.c's own main */
#if defined(__GNUC__)
#  pragma GCC diagnostic ignored "-Wunused-function"
#endif
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
            mixp_ranks_desc ranks;
            const char *why;
            test_bad = 0;
            alarm(HANGS);
            set_rank(r, size);
            ranks = ddp_tcp(PATIENCE, &why);
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
    int way;
    for (way = 0; way < 5; way++) {
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
    CHECK_TEXT(why, "ranks do not ask alike: rank ");
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
    else CHECK_TEXT(ddp_tcp_sum(NULL, &x, 1, MIXP_F32, NULL, 0.3), "rank 1 did not come in time");
    return test_bad != 0;
}
static int is_killed(const mixp_ranks_desc *ranks) {
    float x = 1;
    if (ranks->rank == 2) leave(0);
    CHECK_TEXT(ddp_tcp_sum(NULL, &x, 1, MIXP_F32, NULL, PATIENCE), "is gone");
    return test_bad != 0;
}
static int stops(const mixp_ranks_desc *ranks) {
    float x = 1;
    if (ranks->rank == 1) ddp_tcp_stop(NULL, "its disk is full");
    else CHECK_TEXT(ddp_tcp_sum(NULL, &x, 1, MIXP_F32, NULL, PATIENCE), "rank 1 stopped: its disk is full");
    poll(NULL, 0, 200);
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
    CHECK_INT(each_rank(3, works_alone), 0);
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
    CHECK_TEXT(why, "not all ranks came in time");
    set_rank(1, 2);
    CHECK_INT(ddp_tcp(0.3, &why).size, 0);
    CHECK_TEXT(why, "rank 0 does not listen at MASTER_ADDR");
    fflush(stdout);
    if (fork() == 0) {                  /* a rank of another world */
        set_rank(1, 3);
        leave(ddp_tcp(2, &why).size != 0);
    }
    set_rank(0, 2);
    CHECK_INT(ddp_tcp(20, &why).size, 0);
    CHECK_TEXT(why, "ranks differ in WORLD_SIZE");
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
        leave(recv(c, bytes, 8, 0) != 8 || send(c, bytes, sizeof bytes, 0) < 0 || poll(NULL, 0, 500));
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

/* A word that a full socket takes a part of is completed before the next message begins. */
static void words_are_whole(void) {
    ddp_tcp_head got[2];
    ddp_tcp_way w;
    char data[5] = "";
    int ends[2];
    long takes;
    for (takes = 0; takes <= (long)sizeof got[0]; takes += 10) {
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
    RUN(dtypes);
    RUN(unlike);
    RUN(told);
    RUN(no_world);
    RUN(own_port);
    RUN(other_program);
    RUN(strangers);
    return test_report();
}
