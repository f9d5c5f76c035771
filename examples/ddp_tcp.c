/* ddp_tcp.c - ranks over plain sockets: no MPI, started as torchrun and Slurm start programs
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./train & done
 *
 * Include this file after mixprec.h. Call ddp_tcp before mixp_context_new, and ddp_tcp_end at the
 * end of main. Each rank has a socket to every other rank. In a sum, each rank receives all ranks'
 * pieces of one part, adds them in the order of ranks (ddp_sum.h), and sends the result to all. So
 * the bits are those of one rank; f16 and bf16 are added in f32 and rounded once. At most 64 ranks;
 * use MPI or NCCL for more. Choose a MASTER_PORT from 1024 to 32767: the system gives higher ports
 * to outgoing connections of any program.
 *
 * Strangers. Rank 0 listens at MASTER_ADDR only. A process that greets with another WORLD_SIZE, of
 * another job, or with a RANK that is taken is refused; the others meet without it. The job is
 * MIXPREC_JOB, or else TORCHELASTIC_RUN_ID or SLURM_JOB_ID. With MIXPREC_SECRET, the same text on
 * all ranks, each connection begins with proofs that both ends know it. Nothing is encrypted, and
 * what follows the greeting is not authenticated: see SECURITY.md.
 *
 * If a rank dies or a machine vanishes, the other ranks end within the time limit of a sum, and each
 * names the rank that was the first. For a rank that is busy (it saves) the limit is DDP_BUSY_TIMES
 * as long.
 */
#ifndef MIXPREC_H_INCLUDED
#  include "../mixprec.h"
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include "ddp_secret.h"
#include "ddp_sum.h"

enum { DDP_TCP_MOST = 64, DDP_TCP_PIECE = 1 << 20 /* elements of a sum at once */ };
enum { DDP_TCP_DATA = 0x6D697870, DDP_TCP_BUSY, DDP_TCP_BACK, DDP_TCP_STOP, DDP_TCP_HELLO, DDP_TCP_CARD };

/* The header of each message: its kind, and for a sum the request. */
typedef struct ddp_tcp_head {
    int64_t kind, asked[3], bytes;
} ddp_tcp_head;

/* One side of an exchange with one rank. */
typedef struct ddp_tcp_way {
    ddp_tcp_head head;
    const char *from;
    char *to;
    size_t bytes, done; /* done: bytes of head and data moved so far */
} ddp_tcp_way;

/* A word to one rank that a full socket did not take, or not all of. */
typedef struct ddp_tcp_word {
    char text[sizeof(ddp_tcp_head) + 200];
    size_t bytes, done;
} ddp_tcp_word;

static struct ddp_tcp_state {
    ddp_tcp_word word[DDP_TCP_MOST];
    int rank, size, socket[DDP_TCP_MOST], busy[DDP_TCP_MOST];
    double busy_from[DDP_TCP_MOST]; /* when a busy rank said so                          */
    const char *secret;             /* MIXPREC_SECRET, or ""                             */
    uint64_t job;
    char refused[120];              /* the process that was refused last; "" = none      */
    char *pieces; /* the pieces of all ranks that this rank adds */
    size_t room;
    char why[340];
} ddp_t;

static double ddp_tcp_now(void) {
    struct timespec t;
    return clock_gettime(CLOCK_MONOTONIC, &t) ? 0 : (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static const char *ddp_tcp_fail(const char *text, int rank, const char *more) {
    if (!ddp_t.why[0]) snprintf(ddp_t.why, sizeof ddp_t.why, text, rank, more);
    return ddp_t.why;
}

/* The failure in its own words. */
static const char *ddp_tcp_say(const char *why) {
    if (!ddp_t.why[0]) snprintf(ddp_t.why, sizeof ddp_t.why, "%s", why);
    return ddp_t.why;
}

/* Keeps only letters, digits and signs of ASCII, because a text of another process may reach a terminal. */
static void ddp_tcp_tame(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < 32 || (unsigned char)*text > 126) *text = '?';
}

/* --- messages --------------------------------------------------------------------------------- */

/* Continues sending a word to rank r. Returns 0 when the rank is gone. */
static int ddp_tcp_speak(int r) {
    ddp_tcp_word *w = &ddp_t.word[r];
    while (w->done < w->bytes) {
        const ssize_t went = send(ddp_t.socket[r], w->text + w->done, w->bytes - w->done, MSG_NOSIGNAL);
        if (went < 0 && errno == EINTR) continue;
        if (went < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
        w->done += (size_t)went;
    }
    return 1;
}

/* Continues sending to rank r, after an unfinished word. Returns 0 when the rank is gone. */
static int ddp_tcp_push(int r, ddp_tcp_way *w) {
    const size_t head = sizeof w->head, all = head + w->bytes;
    if (!ddp_tcp_speak(r)) return 0;
    while (w->done < all && ddp_t.word[r].done == ddp_t.word[r].bytes) {
        const char *at =
            w->done < head ? (const char *)&w->head + w->done : w->from + (w->done - head);
        const size_t n = w->done < head ? head - w->done : all - w->done;
        const ssize_t went = send(ddp_t.socket[r], at, n, MSG_NOSIGNAL);
        if (went < 0 && errno == EINTR) continue;
        if (went < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
        w->done += (size_t)went;
    }
    return 1;
}

/* Handles the header of a message. Returns NULL, or why the sum cannot go on. */
static const char *ddp_tcp_heard(int r, ddp_tcp_way *w, const int64_t asked[3], size_t bytes) {
    static char text[200];
    w->done = sizeof w->head;
    if (w->head.kind == DDP_TCP_BUSY || w->head.kind == DDP_TCP_BACK) {
        ddp_t.busy[r] = w->head.kind == DDP_TCP_BUSY;
        ddp_t.busy_from[r] = ddp_tcp_now();
        w->done = 0; /* the next message follows */
    } else if (w->head.kind == DDP_TCP_STOP) {
        size_t n = w->head.bytes > 0 && w->head.bytes < 200 ? (size_t)w->head.bytes : 0;
        memset(text, 0, sizeof text);
        poll(NULL, 0, 20); /* the text is in flight, or lost */
        if (n && recv(ddp_t.socket[r], text, n, 0) < 0) text[0] = '\0';
        ddp_tcp_tame(text);
        if (strncmp(text, "rank ", 5) == 0) return ddp_tcp_say(text); /* it names the first */
        return ddp_tcp_fail("rank %d stopped: %s", r, text);
    } else if (w->head.kind != DDP_TCP_DATA)
        return ddp_tcp_fail("rank %d sent data that is not a message of mixprec%s", r, "");
    else if (!memcmp(w->head.asked, asked, sizeof w->head.asked) && (size_t)w->head.bytes != bytes)
        return ddp_tcp_fail("rank %d divides a sum into other pieces: run the same program on all ranks%s", r, "");
    else if (memcmp(w->head.asked, asked, sizeof w->head.asked))
        return ddp_unlike(ddp_t.why, sizeof ddp_t.why, ddp_t.rank, asked, r, w->head.asked);
    return NULL;
}

/* Continues receiving from rank r. */
static const char *ddp_tcp_pull(int r, ddp_tcp_way *w, const int64_t asked[3]) {
    const size_t head = sizeof w->head;
    const char *why = NULL;
    while (w->done < head + w->bytes && !why) {
        char *at = w->done < head ? (char *)&w->head + w->done : w->to + (w->done - head);
        const size_t n = w->done < head ? head - w->done : head + w->bytes - w->done;
        const ssize_t came = recv(ddp_t.socket[r], at, n, 0);
        if (came < 0 && errno == EINTR) continue;
        if (came < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return NULL;
        if (came <= 0) return ddp_tcp_fail("rank %d is gone%s", r, "");
        w->done += (size_t)came;
        if (w->done == head) why = ddp_tcp_heard(r, w, asked, w->bytes);
    }
    return why;
}

/* Why rank r has closed its socket: the word that it left behind its last message, or that it is gone. */
static const char *ddp_tcp_last_words(int r, ddp_tcp_way *w, const int64_t asked[3]) {
    const char *why = ddp_tcp_pull(r, w, asked);
    const ssize_t whole = (ssize_t)sizeof w->head;
    ddp_tcp_way next;
    memset(&next, 0, sizeof next);
    while (!why && w->done == sizeof w->head + w->bytes &&
           recv(ddp_t.socket[r], &next.head, sizeof next.head, MSG_PEEK) == whole && next.head.kind != DDP_TCP_DATA) {
        if (recv(ddp_t.socket[r], &next.head, sizeof next.head, 0) != whole) break;
        why = ddp_tcp_heard(r, &next, asked, 0);
    }
    return why ? why : ddp_tcp_fail("rank %d is gone%s", r, "");
}

/* Waits until a socket is ready. Returns NULL, or an error: the first missing rank is late. */
static const char *ddp_tcp_await(const ddp_tcp_way *out, const ddp_tcp_way *in, double *until,
                                 double seconds) {
    struct pollfd all[DDP_TCP_MOST];
    int missing = -1, busy = 0, n;
    for (int r = 0; r < ddp_t.size; r++) {
        const size_t head = sizeof in[r].head;
        all[r].fd = r == ddp_t.rank ? -1 : ddp_t.socket[r];
        all[r].events = (short)((in[r].done < head + in[r].bytes ? POLLIN : 0) |
                                (out[r].done < head + out[r].bytes ? POLLOUT : 0));
        if (!all[r].events) all[r].fd = -1;
        else if (missing < 0 && all[r].fd >= 0) missing = r;
        busy |= ddp_t.busy[r];
    }
    for (int r = 0; r < ddp_t.size; r++)
        if (ddp_t.busy[r] && ddp_tcp_now() > ddp_t.busy_from[r] + seconds * DDP_BUSY_TIMES)
            return ddp_tcp_fail("rank %d reported that it is busy, and did not return in time%s", r, "");
    if (busy) *until = ddp_tcp_now() + seconds;
    if (ddp_tcp_now() > *until) return ddp_tcp_fail("rank %d did not answer in time%s", missing, "");
    n = poll(all, (nfds_t)ddp_t.size, 100);
    return n < 0 && errno != EINTR
               ? ddp_tcp_fail("rank %d cannot wait for its sockets%s", ddp_t.rank, "")
               : NULL;
}

static void ddp_tcp_tell(int kind, const char *text);

/* After a failure: tells all ranks why, so that each names the same rank. A message that a rank has in
 * part is completed first, because words stand between messages. Gives up after a second. */
static void ddp_tcp_pass_on(ddp_tcp_way *out, const char *why) {
    const double until = ddp_tcp_now() + 1;
    char text[199];
    for (int left = 1; left && ddp_tcp_now() < until;) {
        left = 0;
        for (int r = 0; r < ddp_t.size; r++) {
            const size_t all = sizeof out[r].head + out[r].bytes;
            if (r == ddp_t.rank || !out[r].done || out[r].done == all) continue;
            if (!ddp_tcp_push(r, &out[r])) out[r].done = all;
            left |= out[r].done < all;
        }
        if (left) poll(NULL, 0, 5);
    }
    snprintf(text, sizeof text, "%.*s", (int)sizeof text - 1, why);
    ddp_tcp_tell(DDP_TCP_STOP, text);
}

/* Sends `out` to the ranks and receives `in` from them, at the same time: two ranks that only sent
 * would block each other. */
static const char *ddp_tcp_exchange(ddp_tcp_way *out, ddp_tcp_way *in, const int64_t asked[3],
                                    double seconds) {
    double until = ddp_tcp_now() + seconds;
    const char *why = ddp_t.why[0] ? ddp_t.why : NULL;
    const int told = why != NULL;
    for (int r = 0; r < ddp_t.size && !why; r++) { /* all ranks get this rank's request */
        memcpy(out[r].head.asked, asked, sizeof out[r].head.asked);
        out[r].head.kind = DDP_TCP_DATA;
        out[r].head.bytes = (int64_t)out[r].bytes;
        if (r != ddp_t.rank) ddp_tcp_push(r, &out[r]);
    }
    for (int left = 1; left && !why;) {
        left = 0;
        for (int r = 0; r < ddp_t.size && !why; r++) {
            const size_t head = sizeof in[r].head;
            if (r == ddp_t.rank) continue;
            why = ddp_tcp_pull(r, &in[r], asked);
            if (!why && !ddp_tcp_push(r, &out[r])) why = ddp_tcp_last_words(r, &in[r], asked);
            left |= in[r].done < head + in[r].bytes || out[r].done < head + out[r].bytes;
        }
        if (left && !why) why = ddp_tcp_await(out, in, &until, seconds);
    }
    if (why && !told) ddp_tcp_pass_on(out, why);
    return why;
}

/* --- sums ------------------------------------------------------------------------------------- */

/* Bytes of piece p of `bytes`, cut at every `each`. */
static size_t ddp_tcp_cut(int p, size_t each, size_t bytes) {
    const size_t at = (size_t)p * each;
    return at >= bytes ? 0 : bytes - at < each ? bytes - at : each;
}

/* Each rank receives all ranks' bytes [rank * stride, + each), cut at the end of the data, and adds
 * them. */
static const char *ddp_tcp_fold(const int64_t asked[3], char *data, size_t stride, size_t each,
                                size_t bytes, double seconds) {
    const mixp_dtype dtype = (mixp_dtype)asked[2];
    ddp_tcp_way out[DDP_TCP_MOST], in[DDP_TCP_MOST];
    const void *rows[DDP_TCP_MOST];
    const char *why;
    char *own = data + (size_t)ddp_t.rank * stride;
    size_t mine = ddp_tcp_cut(ddp_t.rank, stride, bytes);
    if (mine > each) mine = each;
    memset(out, 0, sizeof out), memset(in, 0, sizeof in);
    for (int r = 0; r < ddp_t.size; r++) {
        const size_t its = ddp_tcp_cut(r, stride, bytes);
        out[r].from = data + (size_t)r * stride;
        out[r].bytes = its < each ? its : each;
        in[r].to = ddp_t.pieces + (size_t)r * each;
        in[r].bytes = mine;
        rows[r] = r == ddp_t.rank ? own : in[r].to;
    }
    why = ddp_tcp_exchange(out, in, asked, seconds);
    if (!why && mine)
        ddp_fold(own, rows, ddp_t.size, (int64_t)(mine / mixp_dtype_size(dtype)), dtype,
                 asked[0] == DDP_MAX);
    return why;
}

/* Each rank sends its piece to all. */
static const char *ddp_tcp_share(const int64_t asked[3], char *data, size_t each, size_t bytes,
                                 double seconds) {
    ddp_tcp_way out[DDP_TCP_MOST], in[DDP_TCP_MOST];
    memset(out, 0, sizeof out), memset(in, 0, sizeof in);
    for (int r = 0; r < ddp_t.size; r++) {
        out[r].from = data + (size_t)ddp_t.rank * each;
        out[r].bytes = ddp_tcp_cut(ddp_t.rank, each, bytes);
        in[r].to = data + (size_t)r * each;
        in[r].bytes = ddp_tcp_cut(r, each, bytes);
    }
    return ddp_tcp_exchange(out, in, asked, seconds);
}

static const char *ddp_tcp_run(int what, char *data, int64_t count, mixp_dtype dtype,
                               double seconds) {
    const int64_t asked[3] = { what, count, dtype };
    const size_t size = mixp_dtype_size(dtype), total = (size_t)count * size,
                 n = (size_t)ddp_t.size;
    const size_t step = (what == DDP_SCATTER ? DDP_TCP_PIECE / n + 1 : DDP_TCP_PIECE) * size;
    const char *why = NULL;
    if (what == DDP_GATHER) return ddp_tcp_share(asked, data, total, n * total, seconds);
    for (size_t at = 0; at < total && !why; at += step) {
        const size_t bytes = total - at < step ? total - at : step;
        const size_t each = (bytes / size + n - 1) / n * size;
        if (what == DDP_SCATTER)
            why = ddp_tcp_fold(asked, data + at, total, bytes, n * total - at, seconds);
        else why = ddp_tcp_fold(asked, data + at, each, each, bytes, seconds);
        if (!why && what != DDP_SCATTER)
            why = ddp_tcp_share(asked, data + at, each, bytes, seconds);
    }
    return why;
}

#define DDP_TCP_HOOK(name, what)                                                                   \
  static const char *name(void *user, void *data, int64_t count, mixp_dtype dtype, void *stream,   \
                          double seconds) {                                                        \
    (void)user;                                                                                    \
    return stream ? "for CPUs alone" : ddp_tcp_run(what, data, count, dtype, seconds);             \
  }
DDP_TCP_HOOK(ddp_tcp_sum, DDP_SUM)
DDP_TCP_HOOK(ddp_tcp_max, DDP_MAX)
DDP_TCP_HOOK(ddp_tcp_gather, DDP_GATHER)
DDP_TCP_HOOK(ddp_tcp_scatter, DDP_SCATTER)

/* Sends a word to all ranks between sums. What a full socket does not take precedes the next message;
 * a further word is lost meanwhile, and a time limit then expires. */
static void ddp_tcp_tell(int kind, const char *text) {
    ddp_tcp_head head;
    memset(&head, 0, sizeof head);
    head.kind = kind;
    head.bytes = (int64_t)strlen(text);
    for (int r = 0; r < ddp_t.size; r++) {
        ddp_tcp_word *w = &ddp_t.word[r];
        if (r == ddp_t.rank || ddp_t.socket[r] <= 0 || w->done < w->bytes) continue;
        memcpy(w->text, &head, sizeof head);
        memcpy(w->text + sizeof head, text, (size_t)head.bytes);
        w->bytes = sizeof head + (size_t)head.bytes;
        w->done = 0;
        ddp_tcp_speak(r);
    }
}
static void ddp_tcp_busy(void *user, int on) {
    (void)user;
    ddp_tcp_tell(on ? DDP_TCP_BUSY : DDP_TCP_BACK, "");
}
static void ddp_tcp_stop(void *user, const char *why) {
    char text[199];
    (void)user;
    if (ddp_t.why[0]) return; /* they know */
    snprintf(text, sizeof text, "rank %d stopped: %s", ddp_t.rank, why);
    ddp_tcp_tell(DDP_TCP_STOP, text);
    ddp_tcp_say(text);
}

/* --- how ranks meet --------------------------------------------------------------------------- */

/* Sends or receives n bytes completely, within the limit; for use before the sums begin. */
static int ddp_tcp_all(int s, void *data, size_t n, int out, double until) {
    size_t done = 0;
    while (done < n && ddp_tcp_now() < until) {
        struct pollfd p = { s, 0, 0 };
        ssize_t went;
        p.events = out ? POLLOUT : POLLIN;
        if (poll(&p, 1, 100) < 1) continue;
        went = out ? send(s, (char *)data + done, n - done, MSG_NOSIGNAL)
                   : recv(s, (char *)data + done, n - done, 0);
        if (went == 0 || (went < 0 && errno != EINTR && errno != EAGAIN)) return 0;
        if (went > 0) done += (size_t)went;
    }
    return done == n;
}

/* Listens at one address of this machine. */
static int ddp_tcp_listen_at(struct in_addr own, int port, struct sockaddr_in *at) {
    socklen_t n = sizeof *at;
    int s = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    memset(at, 0, sizeof *at);
    at->sin_family = AF_INET;
    at->sin_port = htons((uint16_t)port);
    at->sin_addr = own;
    if (s < 0) return -1;
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(s, (struct sockaddr *)at, n) || listen(s, SOMAXCONN) || fcntl(s, F_SETFL, O_NONBLOCK) ||
        getsockname(s, (struct sockaddr *)at, &n)) {
        const int cause = errno;
        close(s);
        errno = cause;
        return -1;
    }
    return s;
}

/* Listens at all addresses of this machine. */
static int ddp_tcp_listen(int port, struct sockaddr_in *at) {
    struct in_addr any;
    any.s_addr = htonl(INADDR_ANY);
    return ddp_tcp_listen_at(any, port, at);
}

/* The system tells of a machine that has vanished, within about `seconds`. */
static void ddp_tcp_guard(int s, double seconds) {
    const int part = seconds < 6 ? 1 : seconds > 18000 ? 3000 : (int)(seconds / 6), on = 1;
    setsockopt(s, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
#ifdef TCP_KEEPIDLE
    setsockopt(s, IPPROTO_TCP, TCP_KEEPIDLE, &part, sizeof part);
#endif
#ifdef TCP_KEEPINTVL
    setsockopt(s, IPPROTO_TCP, TCP_KEEPINTVL, &part, sizeof part);
#endif
#ifdef TCP_KEEPCNT
    {
        const int most = 5;
        setsockopt(s, IPPROTO_TCP, TCP_KEEPCNT, &most, sizeof most);
    }
#endif
#ifdef TCP_USER_TIMEOUT
    {
        const unsigned limit = 6000u * (unsigned)part; /* milliseconds */
        setsockopt(s, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, sizeof limit);
    }
#endif
}

/* Has this socket connected to itself? A socket does so when no program listens at a port and the
 * system gives the socket that same port. */
static int ddp_tcp_is_self(int s) {
    struct sockaddr_in own, other;
    socklen_t n = sizeof own, m = sizeof other;
    memset(&own, 0, sizeof own), memset(&other, 0, sizeof other);
    if (getsockname(s, (struct sockaddr *)&own, &n) ||
        getpeername(s, (struct sockaddr *)&other, &m))
        return 0;
    return own.sin_port == other.sin_port && own.sin_addr.s_addr == other.sin_addr.s_addr;
}

/* Closes a socket without the wait that would keep its port. */
static void ddp_tcp_drop(int s) {
    const struct linger now = { 1, 0 };
    setsockopt(s, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close(s);
}

/* Connects to where something listens, within 5 s. Returns -1 if nothing does. */
static int ddp_tcp_reach(const struct sockaddr_in *at) {
    int s = socket(AF_INET, SOCK_STREAM, 0), error = 0;
    socklen_t n = sizeof error;
    struct pollfd p = {s, POLLOUT, 0};
    if (s < 0) return -1;
    if (fcntl(s, F_SETFL, O_NONBLOCK) == 0 &&
        (connect(s, (const struct sockaddr *)at, sizeof *at) == 0 ||
         (errno == EINPROGRESS && poll(&p, 1, 5000) == 1 &&
          getsockopt(s, SOL_SOCKET, SO_ERROR, &error, &n) == 0 && error == 0)) &&
        !ddp_tcp_is_self(s))
        return s;
    ddp_tcp_drop(s);
    return -1;
}

/* Connects; retries until a rank listens there. */
static int ddp_tcp_connect(const struct sockaddr_in *at, double until) {
    int s = -1;
    while (s < 0 && ddp_tcp_now() < until) {
        s = ddp_tcp_reach(at);
        if (s < 0) poll(NULL, 0, 50);
    }
    return s;
}

/* How two processes greet each other: who accepts says hello, with a new number; who has connected
 * sends its card; who accepts answers. The proofs of a card and of a welcome are made with the
 * secret from the other's number. */
typedef struct ddp_tcp_hello {
    int64_t word;
    unsigned char nonce[DDP_NONCE];
} ddp_tcp_hello;

/* A rank, and where it listens. An entry of the list that rank 0 sends to all. */
typedef struct ddp_tcp_card {
    int64_t word, rank, size;
    uint64_t job;
    struct sockaddr_in at;
    unsigned char nonce[DDP_NONCE];
} ddp_tcp_card;

typedef struct ddp_tcp_greeting {
    ddp_tcp_card card;
    unsigned char proof[DDP_PROOF];
} ddp_tcp_greeting;

typedef enum ddp_tcp_verdict {
    DDP_TCP_WELCOME, DDP_TCP_UNKNOWN, DDP_TCP_OTHER_SIZE, DDP_TCP_OTHER_JOB, DDP_TCP_TAKEN, DDP_TCP_VERDICTS
} ddp_tcp_verdict;

static const char *const ddp_tcp_refusals[DDP_TCP_VERDICTS] = {
    NULL, "MIXPREC_SECRET is not the same on all ranks", "ranks differ in WORLD_SIZE",
    "another job is meeting at MASTER_ADDR and MASTER_PORT: set another MASTER_PORT, or the same MIXPREC_JOB on all ranks",
    "two processes have the same RANK"};

typedef struct ddp_tcp_answer {
    int64_t word, verdict;
    unsigned char proof[DDP_PROOF];
} ddp_tcp_answer;

/* A connection whose greeting is not complete yet: a rank, or another program. */
typedef struct ddp_tcp_guest {
    int socket;
    size_t came; /* bytes of the greeting */
    ddp_tcp_hello hello;
    ddp_tcp_greeting greeting;
    struct in_addr host;
} ddp_tcp_guest;
enum { DDP_TCP_GUESTS = 256, DDP_TCP_SILENCE = 10 /* seconds until a connection is tried again */ };

/* Receives more of a guest's greeting, without waiting. Returns 1: it is complete; 0: bytes are missing; -1: the
 * guest is no rank. */
static int ddp_tcp_ask(ddp_tcp_guest *g) {
    char *to = (char *)&g->greeting + g->came;
    const ssize_t came = recv(g->socket, to, sizeof g->greeting - g->came, 0);
    if (came < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (came <= 0) return -1;
    g->came += (size_t)came;
    if (g->came >= sizeof(int64_t) && g->greeting.card.word != DDP_TCP_CARD) return -1;
    return g->came == sizeof g->greeting;
}

/* Accepts a connection and says hello. If there is no room, drops the guest that has been silent for the longest
 * time; a rank among them tries again. Returns the new count, or -1 if no connection is waiting. */
static int ddp_tcp_let_in(int listener, ddp_tcp_guest *guests, int count) {
    struct sockaddr_in from;
    socklen_t length = sizeof from;
    const int s = accept(listener, (struct sockaddr *)&from, &length);
    ddp_tcp_guest *g;
    if (s < 0) return -1;
    if (count == DDP_TCP_GUESTS) {
        ddp_tcp_drop(guests[0].socket);
        memmove(guests, guests + 1, (size_t)--count * sizeof *guests);
    }
    g = &guests[count];
    memset(g, 0, sizeof *g);
    g->socket = s;
    g->host = from.sin_addr;
    g->hello.word = DDP_TCP_HELLO;
    ddp_nonce(g->hello.nonce);
    if (fcntl(s, F_SETFL, O_NONBLOCK) == 0 &&
        send(s, &g->hello, sizeof g->hello, MSG_NOSIGNAL) == (ssize_t)sizeof g->hello)
        return count + 1;
    ddp_tcp_drop(s);
    return count;
}

/* Has the other end of a socket closed it? */
static int ddp_tcp_is_closed(int s) {
    char byte;
    const ssize_t came = recv(s, &byte, 1, MSG_PEEK);
    return came == 0 || (came < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

/* Judges a greeting. The secret comes first: a process that does not know it learns nothing else. */
static ddp_tcp_verdict ddp_tcp_judge(const ddp_tcp_guest *g) {
    const ddp_tcp_card *card = &g->greeting.card;
    unsigned char proof[DDP_PROOF];
    ddp_prove(ddp_t.secret, "card", g->hello.nonce, card, sizeof *card, proof);
    if (!ddp_is_proof(proof, g->greeting.proof)) return DDP_TCP_UNKNOWN;
    if (card->size != ddp_t.size) return DDP_TCP_OTHER_SIZE;
    if (card->job != ddp_t.job) return DDP_TCP_OTHER_JOB;
    if (card->rank <= ddp_t.rank || card->rank >= ddp_t.size) return DDP_TCP_TAKEN;
    if (ddp_t.socket[card->rank] >= 0 && !ddp_tcp_is_closed(ddp_t.socket[card->rank])) return DDP_TCP_TAKEN;
    return DDP_TCP_WELCOME;
}

/* Answers a guest, and enters it or lets it go. */
static void ddp_tcp_enter(const ddp_tcp_guest *g, ddp_tcp_card *list) {
    const ddp_tcp_card *card = &g->greeting.card;
    const ddp_tcp_verdict verdict = ddp_tcp_judge(g);
    ddp_tcp_answer answer;
    memset(&answer, 0, sizeof answer);
    answer.word = DDP_TCP_HELLO;
    answer.verdict = verdict;
    ddp_prove(ddp_t.secret, "welcome", card->nonce, &answer.verdict, sizeof answer.verdict, answer.proof);
    (void)!send(g->socket, &answer, sizeof answer, MSG_NOSIGNAL);
    if (verdict != DDP_TCP_WELCOME) {
        snprintf(ddp_t.refused, sizeof ddp_t.refused, "%.100s", ddp_tcp_refusals[verdict]);
        close(g->socket);
        return;
    }
    if (ddp_t.socket[card->rank] >= 0) close(ddp_t.socket[card->rank]); /* it has come again */
    ddp_t.socket[card->rank] = g->socket;
    list[card->rank] = *card;
    list[card->rank].at.sin_addr = g->host;
}

/* Waits for connections and for bytes, accepts and receives them, and answers complete greetings. */
static void ddp_tcp_greet(int listener, ddp_tcp_guest *guests, int *count, ddp_tcp_card *list) {
    struct pollfd all[DDP_TCP_GUESTS + 1];
    const int n = *count;
    for (int g = 0; g <= n; g++) {
        all[g].fd = g < n ? guests[g].socket : listener;
        all[g].events = POLLIN;
        all[g].revents = 0;
    }
    if (poll(all, (nfds_t)n + 1, 100) < 1) return;
    for (int g = n - 1; g >= 0; g--) {
        const int is = all[g].revents ? ddp_tcp_ask(&guests[g]) : 0;
        if (is == 0) continue;
        if (is > 0) ddp_tcp_enter(&guests[g], list);
        else close(guests[g].socket);
        memmove(guests + g, guests + g + 1, (size_t)(--*count - g) * sizeof *guests);
    }
    for (int left = 32, now; all[n].revents && left > 0; left--) {
        now = ddp_tcp_let_in(listener, guests, *count);
        if (now < 0) break;
        *count = now;
    }
}

/* Accepts the connections of all higher ranks. Reads from all connections at the same time: another
 * program that connects and sends nothing delays no rank. */
static const char *ddp_tcp_accept(int listener, ddp_tcp_card *list, double until) {
    static ddp_tcp_guest guests[DDP_TCP_GUESTS];
    char late[200];
    int count = 0, missing = 1;
    while (missing && ddp_tcp_now() < until) {
        missing = 0;
        for (int r = ddp_t.rank + 1; r < ddp_t.size; r++) missing |= ddp_t.socket[r] < 0;
        if (missing) ddp_tcp_greet(listener, guests, &count, list);
    }
    while (count > 0) close(guests[--count].socket);
    if (!missing) return NULL;
    if (!ddp_t.refused[0]) return "not all ranks connected in time";
    snprintf(late, sizeof late, "not all ranks connected in time; one was refused: %s", ddp_t.refused);
    return ddp_tcp_say(late);
}

/* Greets who listens at `at`. If *listener is -1, opens this rank's own listener, at the address of
 * this machine that the connection has. A connection that the other end drops is tried again.
 * Returns the socket, or -1 with the cause in *why. */
static int ddp_tcp_introduce(const struct sockaddr_in *at, ddp_tcp_card *own, int *listener, double until,
                             const char **why) {
    ddp_tcp_hello hello;
    ddp_tcp_greeting greeting;
    ddp_tcp_answer answer;
    unsigned char proof[DDP_PROOF];
    int silent = 0; /* 1: something listens there and says nothing */
    while (!*why && ddp_tcp_now() < until) {
        const double soon = ddp_tcp_now() + DDP_TCP_SILENCE;
        const int s = ddp_tcp_connect(at, until);
        struct sockaddr_in here;
        socklen_t n = sizeof here;
        if (s < 0) break;
        memset(&here, 0, sizeof here);
        if (*listener < 0 && getsockname(s, (struct sockaddr *)&here, &n) == 0) {
            *listener = ddp_tcp_listen_at(here.sin_addr, 0, &own->at);
            if (*listener < 0) *listener = ddp_tcp_listen(0, &own->at);
            if (*listener < 0) *why = "no free port to listen at";
        }
        memset(&hello, 0, sizeof hello), memset(&answer, 0, sizeof answer);
        ddp_nonce(own->nonce);
        greeting.card = *own;
        if (!*why && ddp_tcp_all(s, &hello, sizeof hello, 0, soon < until ? soon : until)) {
            ddp_prove(ddp_t.secret, "card", hello.nonce, own, sizeof *own, greeting.proof);
            if (hello.word != DDP_TCP_HELLO) *why = "another program than rank 0 answers at MASTER_ADDR and MASTER_PORT";
            else if (ddp_tcp_all(s, &greeting, sizeof greeting, 1, soon < until ? soon : until) &&
                     ddp_tcp_all(s, &answer, sizeof answer, 0, soon < until ? soon : until)) {
                ddp_prove(ddp_t.secret, "welcome", own->nonce, &answer.verdict, sizeof answer.verdict, proof);
                if (answer.verdict > DDP_TCP_WELCOME && answer.verdict < DDP_TCP_VERDICTS)
                    *why = ddp_tcp_refusals[answer.verdict];
                else if (answer.verdict != DDP_TCP_WELCOME || !ddp_is_proof(proof, answer.proof))
                    *why = ddp_tcp_refusals[DDP_TCP_UNKNOWN];
                else return s;
            }
        } else silent |= ddp_tcp_now() > soon;
        ddp_tcp_drop(s);
        if (!*why) poll(NULL, 0, 20 + 7 * ddp_t.rank % 50);
    }
    if (!*why && silent) *why = "another program than rank 0 answers at MASTER_ADDR and MASTER_PORT";
    return -1;
}

/* Rank 0's listener. A rank that has connected to itself holds MASTER_PORT for a moment: a port in
 * use is tried again for a second. Returns -1 on failure, with the cause in *why. */
static int ddp_tcp_open(struct in_addr own, int port, double until, const char **why) {
    const double soon = ddp_tcp_now() + 1;
    struct sockaddr_in at;
    int s = ddp_tcp_listen_at(own, port, &at);
    while (s < 0 && errno == EADDRINUSE && ddp_tcp_now() < (soon < until ? soon : until)) {
        poll(NULL, 0, 50);
        s = ddp_tcp_listen_at(own, port, &at);
    }
    if (s < 0 && errno == EADDRNOTAVAIL) s = ddp_tcp_listen(port, &at); /* behind a router */
    if (s < 0 && errno == EADDRINUSE)
        *why = "MASTER_PORT is in use by another program: set a free port from 1024 to 32767";
    else if (s < 0)
        *why = ddp_tcp_fail("rank %d cannot listen at MASTER_PORT: %s", 0, strerror(errno));
    return s;
}

/* Connects to rank 0, whose host has the address `at`, and gets the list of all ranks from rank 0.
 * This rank's own listener, which gets any free port, opens after rank 0 has MASTER_PORT. */
static const char *ddp_tcp_join(const struct sockaddr_in *at, ddp_tcp_card *list, int *listener,
                                double until) {
    const size_t bytes = (size_t)ddp_t.size * sizeof *list;
    unsigned char proof[DDP_PROOF], sent[DDP_PROOF];
    const char *why = NULL;
    ddp_tcp_card own, *mine = &list[ddp_t.rank];
    memset(&own, 0, sizeof own);
    own.word = DDP_TCP_CARD, own.rank = ddp_t.rank, own.size = ddp_t.size, own.job = ddp_t.job;
    ddp_t.socket[0] = ddp_tcp_introduce(at, &own, listener, until, &why);
    if (why) return why;
    if (ddp_t.socket[0] < 0) return "rank 0 does not listen at MASTER_ADDR and MASTER_PORT";
    if (!ddp_tcp_all(ddp_t.socket[0], list, bytes, 0, until) ||
        !ddp_tcp_all(ddp_t.socket[0], sent, sizeof sent, 0, until))
        return "rank 0 did not answer in time: is a rank missing?";
    ddp_prove(ddp_t.secret, "list", own.nonce, list, bytes, proof);
    if (!ddp_is_proof(proof, sent) || mine->rank != own.rank || mine->at.sin_port != own.at.sin_port)
        return "another program than rank 0 answers at MASTER_ADDR and MASTER_PORT";
    for (int r = 1; r < ddp_t.rank && !why; r++) {
        ddp_t.socket[r] = ddp_tcp_introduce(&list[r].at, &own, listener, until, &why);
        if (!why && ddp_t.socket[r] < 0) why = "a rank is gone";
    }
    return why;
}

/* Where rank 0 listens: at MASTER_ADDR. A machine often resolves its own name to 127.0.1.1, which other
 * machines cannot reach. */
static struct in_addr ddp_tcp_own(const char *host, const struct addrinfo *found) {
    struct in_addr own;
    own.s_addr = htonl(INADDR_ANY);
    if (!found) return own;
    if (ntohl(((struct sockaddr_in *)(void *)found->ai_addr)->sin_addr.s_addr) >> 24 == 127 &&
        strcmp(host, "localhost") && (host[0] < '0' || host[0] > '9'))
        return own;
    return ((struct sockaddr_in *)(void *)found->ai_addr)->sin_addr;
}

/* Rank 0 sends the list to all, with a proof for each. */
static const char *ddp_tcp_publish(ddp_tcp_card *list, double until) {
    const size_t bytes = (size_t)ddp_t.size * sizeof *list;
    unsigned char proof[DDP_PROOF];
    for (int r = 1; r < ddp_t.size; r++) {
        ddp_prove(ddp_t.secret, "list", list[r].nonce, list, bytes, proof);
        if (!ddp_tcp_all(ddp_t.socket[r], list, bytes, 1, until) ||
            !ddp_tcp_all(ddp_t.socket[r], proof, sizeof proof, 1, until))
            return "a rank is gone";
    }
    return NULL;
}

/* Connects all ranks. Rank 0 listens at MASTER_ADDR and sends all ranks the others' addresses. Each
 * rank then connects to all lower ranks. */
static const char *ddp_tcp_meet(const char *host, int port, double until) {
    static ddp_tcp_card list[DDP_TCP_MOST];
    struct addrinfo hints, *found = NULL;
    const char *why = NULL;
    int listener = -1, unknown;
    if (strchr(host, ':')) return "MASTER_ADDR is an IPv6 address, and ranks meet by IPv4: use an IPv4 address or a name";
    memset(&hints, 0, sizeof hints), memset(list, 0, sizeof list);
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    unknown = getaddrinfo(host, NULL, &hints, &found);
    if (ddp_t.rank == 0) listener = ddp_tcp_open(ddp_tcp_own(host, unknown ? NULL : found), port, until, &why);
    else if (unknown) why = "MASTER_ADDR is not known, or has no IPv4 address";
    else {
        struct sockaddr_in at = *(struct sockaddr_in *)(void *)found->ai_addr;
        at.sin_port = htons((uint16_t)port);
        why = ddp_tcp_join(&at, list, &listener, until);
    }
    if (!why) why = ddp_tcp_accept(listener, list, until);
    if (!why && ddp_t.rank == 0) why = ddp_tcp_publish(list, until);
    if (!unknown) freeaddrinfo(found);
    if (listener >= 0) close(listener);
    return why;
}

static int ddp_tcp_number(const char *name, const char *other) {
    const char *text = getenv(name);
    char *end = NULL;
    long n;
    if (!text && other) text = getenv(other);
    if (!text || *text < '0' || *text > '9') return -1;
    n = strtol(text, &end, 10);
    return *end || n > 1000000 ? -1 : (int)n;
}

/* A number of the job that this process belongs to, as far as its environment says. */
static uint64_t ddp_tcp_job(void) {
    static const char *const names[3] = {"MIXPREC_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"};
    uint64_t h = 14695981039346656037u;
    for (int i = 0; i < 3; i++) {
        const char *job = getenv(names[i]);
        if (!job || !*job) continue;
        for (; *job; job++) h = (h ^ (unsigned char)*job) * 1099511628211u; /* FNV-1a */
        break;
    }
    return h;
}

/* Joins the world given by RANK and WORLD_SIZE (or Slurm's names), MASTER_ADDR and MASTER_PORT.
 * seconds: the limit of a sum and of the meeting; 0 = 600. *why: NULL, or why it failed; the size
 * is then 0, which mixp_context_new refuses. */
static mixp_ranks_desc ddp_tcp(double seconds, const char **why) {
    mixp_ranks_desc d;
    const char *host = getenv("MASTER_ADDR");
    int on = 1, port = ddp_tcp_number("MASTER_PORT", NULL);
    memset(&d, 0, sizeof d), memset(&ddp_t, 0, sizeof ddp_t);
    for (int r = 0; r < DDP_TCP_MOST; r++) ddp_t.socket[r] = -1;
    if (!(seconds > 0)) seconds = 600;
    ddp_t.secret = getenv("MIXPREC_SECRET") ? getenv("MIXPREC_SECRET") : "";
    ddp_t.job = ddp_tcp_job();
    ddp_t.rank = ddp_tcp_number("RANK", "SLURM_PROCID");
    ddp_t.size = ddp_tcp_number("WORLD_SIZE", "SLURM_NTASKS");
    *why = ddp_t.size < 1 || ddp_t.size > DDP_TCP_MOST  ? "WORLD_SIZE must be a number from 1 to 64"
           : ddp_t.rank < 0 || ddp_t.rank >= ddp_t.size ? "RANK must be a number below WORLD_SIZE"
           : !host                                      ? "MASTER_ADDR is not set"
           : port < 1 || port > 65535                   ? "MASTER_PORT must be a port"
                                                        : NULL;
    if (ddp_t.size > DDP_TCP_MOST) ddp_t.size = 0; /* ddp_tcp_end then finds no ranks */
    if (!*why) *why = ddp_tcp_meet(host, port, ddp_tcp_now() + seconds);
    ddp_t.pieces = malloc(((size_t)DDP_TCP_PIECE + 2 * DDP_TCP_MOST) * sizeof(double));
    if (!*why && !ddp_t.pieces) *why = "out of memory";
    for (int r = 0; r < ddp_t.size && !*why; r++) {
        if (r == ddp_t.rank) continue;
        setsockopt(ddp_t.socket[r], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        ddp_tcp_guard(ddp_t.socket[r], seconds);
        if (fcntl(ddp_t.socket[r], F_SETFL, O_NONBLOCK)) *why = "a socket cannot be made non-blocking";
    }
    if (*why) return d;
    d.rank = ddp_t.rank, d.size = ddp_t.size, d.seconds = seconds;
    d.sum = ddp_tcp_sum, d.max = ddp_tcp_max, d.all_gather = ddp_tcp_gather;
    d.reduce_scatter = ddp_tcp_scatter, d.stop = ddp_tcp_stop, d.busy = ddp_tcp_busy;
    return d;
}

/* After a failure: lets the other ranks read what was said, for at most 2 s. A socket that is closed while it holds
 * unread bytes takes back what it has not yet sent. */
static void ddp_tcp_part(void) {
    const double until = ddp_tcp_now() + 2;
    struct pollfd all[DDP_TCP_MOST];
    char bytes[4096];
    int open = 0;
    for (int r = 0; r < ddp_t.size; r++) {
        all[r].fd = r == ddp_t.rank ? -1 : ddp_t.socket[r];
        all[r].events = POLLIN;
        if (all[r].fd >= 0) shutdown(all[r].fd, SHUT_WR), open++;
    }
    while (open > 0 && ddp_tcp_now() < until && poll(all, (nfds_t)ddp_t.size, 100) >= 0)
        for (int r = 0; r < ddp_t.size; r++) {
            ssize_t came = all[r].fd >= 0 && all[r].revents ? recv(all[r].fd, bytes, sizeof bytes, 0) : 1;
            if (came > 0 || (came < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))) continue;
            all[r].fd = -1;
            open--;
        }
}

/* For the end of main. A failed rank announces it, so no rank waits for it. Returns `failed`. */
static int ddp_tcp_end(int failed) {
    if (failed) ddp_tcp_stop(NULL, "its program has ended");
    if (ddp_t.why[0] && ddp_t.pieces) ddp_tcp_part();
    for (int r = 0; r < DDP_TCP_MOST; r++)
        if (ddp_t.size && ddp_t.socket[r] >= 0) close(ddp_t.socket[r]);
    free(ddp_t.pieces);
    ddp_t.pieces = NULL;
    return failed;
}
