/* ddp_tcp.c - ranks over plain sockets: no MPI, started as torchrun and Slurm start programs
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./train & done
 *
 * Include this file after mixprec.h. Call ddp_tcp before mixp_context_new, and ddp_tcp_end at the
 * end of main. Each rank has a socket to every other rank. In a sum, each rank receives all ranks'
 * pieces of one part, adds them in the order of ranks (ddp_sum.h), and sends the result to all. So
 * the bits are those of one rank; f16 and bf16 are added in f32 and rounded once. There is no
 * encryption and no authentication: use it only in networks of your own. At most 64 ranks; use MPI
 * or NCCL for more. Choose a MASTER_PORT from 1024 to 32767: the system gives higher ports to
 * outgoing connections of any program.
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
#include "ddp_sum.h"

enum { DDP_TCP_MOST = 64, DDP_TCP_PIECE = 1 << 20 /* elements of a sum at once */ };
enum { DDP_TCP_DATA = 0x6D697870, DDP_TCP_BUSY, DDP_TCP_BACK, DDP_TCP_STOP };

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
        w->done = 0; /* the next message follows */
    } else if (w->head.kind == DDP_TCP_STOP) {
        size_t n = w->head.bytes > 0 && w->head.bytes < 200 ? (size_t)w->head.bytes : 0;
        memset(text, 0, sizeof text);
        poll(NULL, 0, 20); /* the text is in flight, or lost */
        if (n && recv(ddp_t.socket[r], text, n, 0) < 0) text[0] = '\0';
        return ddp_tcp_fail("rank %d stopped: %s", r, text);
    } else if (w->head.kind != DDP_TCP_DATA)
        return ddp_tcp_fail("rank %d sends no message of mixprec's%s", r, "");
    else if (memcmp(w->head.asked, asked, sizeof w->head.asked) || (size_t)w->head.bytes != bytes)
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
    if (busy) *until = ddp_tcp_now() + seconds;
    if (ddp_tcp_now() > *until) return ddp_tcp_fail("rank %d did not come in time%s", missing, "");
    n = poll(all, (nfds_t)ddp_t.size, 100);
    return n < 0 && errno != EINTR
               ? ddp_tcp_fail("rank %d cannot wait for its sockets%s", ddp_t.rank, "")
               : NULL;
}

/* Sends `out` to the ranks and receives `in` from them, at the same time: two ranks that only sent
 * would block each other. */
static const char *ddp_tcp_exchange(ddp_tcp_way *out, ddp_tcp_way *in, const int64_t asked[3],
                                    double seconds) {
    double until = ddp_tcp_now() + seconds;
    const char *why = ddp_t.why[0] ? ddp_t.why : NULL;
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
            if (!why && !ddp_tcp_push(r, &out[r])) why = ddp_tcp_fail("rank %d is gone%s", r, "");
            left |= in[r].done < head + in[r].bytes || out[r].done < head + out[r].bytes;
        }
        if (left && !why) why = ddp_tcp_await(out, in, &until, seconds);
    }
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
    snprintf(text, sizeof text, "%s", why);
    if (!ddp_t.why[0]) ddp_tcp_tell(DDP_TCP_STOP, text);
    ddp_tcp_fail("rank %d stopped: %s", ddp_t.rank, text);
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

static int ddp_tcp_listen(int port, struct sockaddr_in *at) {
    socklen_t n = sizeof *at;
    int s = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    memset(at, 0, sizeof *at);
    at->sin_family = AF_INET;
    at->sin_port = htons((uint16_t)port);
    at->sin_addr.s_addr = htonl(INADDR_ANY);
    if (s < 0) return -1;
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(s, (struct sockaddr *)at, n) || listen(s, DDP_TCP_MOST) ||
        getsockname(s, (struct sockaddr *)at, &n)) {
        const int cause = errno;
        close(s);
        errno = cause;
        return -1;
    }
    return s;
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

/* Connects; retries until a rank listens there. */
static int ddp_tcp_connect(const struct sockaddr_in *at, double until) {
    while (ddp_tcp_now() < until) {
        int s = socket(AF_INET, SOCK_STREAM, 0);
        const int met = s >= 0 && connect(s, (const struct sockaddr *)at, sizeof *at) == 0;
        if (met && !ddp_tcp_is_self(s)) return s;
        if (s >= 0) ddp_tcp_drop(s);
        poll(NULL, 0, 50);
    }
    return -1;
}

/* A rank's first message when it connects, and an entry of the list that rank 0 sends back: where
 * the rank listens. */
typedef struct ddp_tcp_card {
    int64_t word, rank, size;
    struct sockaddr_in at;
} ddp_tcp_card;

/* A connection whose card is not complete yet: a rank, or another program. */
typedef struct ddp_tcp_guest {
    int socket;
    size_t came; /* bytes of the card */
    ddp_tcp_card card;
    struct in_addr host;
} ddp_tcp_guest;

/* Accepts a connection. If there is no room, drops the oldest guest. Returns the new count. */
static int ddp_tcp_let_in(int listener, ddp_tcp_guest *guests, int count) {
    struct sockaddr_in from;
    socklen_t length = sizeof from;
    const int s = accept(listener, (struct sockaddr *)&from, &length);
    if (s < 0) return count;
    if (count == DDP_TCP_MOST) {
        ddp_tcp_drop(guests[0].socket);
        memmove(guests, guests + 1, (size_t)--count * sizeof *guests);
    }
    memset(&guests[count], 0, sizeof *guests);
    guests[count].socket = s;
    guests[count].host = from.sin_addr;
    return count + 1;
}

/* Receives more of a guest's card, without waiting. Returns 1: the card is complete and its sender
 * is a rank; 0: bytes are missing; -1: the guest is no rank. */
static int ddp_tcp_ask(ddp_tcp_guest *g) {
    const ssize_t came = recv(g->socket, (char *)&g->card + g->came, sizeof g->card - g->came, 0);
    if (came < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (came <= 0) return -1;
    g->came += (size_t)came;
    if (g->came < sizeof g->card) return 0;
    return g->card.word == DDP_TCP_DATA && g->card.rank >= 0 && g->card.rank < ddp_t.size ? 1 : -1;
}

/* Enters a guest that is a rank. */
static const char *ddp_tcp_enter(const ddp_tcp_guest *g, ddp_tcp_card *list) {
    const int64_t rank = g->card.rank;
    if (g->card.size != ddp_t.size) return "ranks differ in WORLD_SIZE";
    if (ddp_t.socket[rank] >= 0 || rank == ddp_t.rank) return "two processes have one RANK";
    ddp_t.socket[rank] = g->socket;
    list[rank] = g->card;
    list[rank].at.sin_addr = g->host;
    return NULL;
}

/* Waits for a connection or for bytes, and accepts and receives them. Returns the index of a guest
 * whose card is complete, or -1. */
static int ddp_tcp_greet(int listener, ddp_tcp_guest *guests, int *count) {
    struct pollfd all[DDP_TCP_MOST + 1];
    const int n = *count;
    for (int g = 0; g <= n; g++) {
        all[g].fd = g < n ? guests[g].socket : listener;
        all[g].events = POLLIN;
    }
    if (poll(all, (nfds_t)n + 1, 100) < 1) return -1;
    for (int g = n - 1; g >= 0; g--) {
        const int is = all[g].revents ? ddp_tcp_ask(&guests[g]) : 0;
        if (is > 0) return g;
        if (is == 0) continue;
        close(guests[g].socket);
        guests[g] = guests[--*count];
    }
    if (all[n].revents) *count = ddp_tcp_let_in(listener, guests, *count);
    return -1;
}

/* Accepts the connections of `n` ranks. Reads from all connections at the same time: another
 * program that connects and sends nothing delays no rank. */
static const char *ddp_tcp_accept(int listener, int n, ddp_tcp_card *list, double until) {
    static ddp_tcp_guest guests[DDP_TCP_MOST];
    const char *why = NULL;
    int count = 0;
    while (n > 0 && !why && ddp_tcp_now() < until) {
        const int g = ddp_tcp_greet(listener, guests, &count);
        if (g < 0) continue;
        why = ddp_tcp_enter(&guests[g], list);
        if (why) break;
        guests[g] = guests[--count];
        n--;
    }
    while (count > 0) close(guests[--count].socket);
    return why ? why : n > 0 ? "not all ranks came in time" : NULL;
}

/* Rank 0's listener. A rank that has connected to itself holds MASTER_PORT for a moment: a port in
 * use is tried again for a second. Returns -1 on failure, with the cause in *why. */
static int ddp_tcp_open(int port, double until, const char **why) {
    const double soon = ddp_tcp_now() + 1;
    struct sockaddr_in at;
    int s = ddp_tcp_listen(port, &at);
    while (s < 0 && errno == EADDRINUSE && ddp_tcp_now() < (soon < until ? soon : until)) {
        poll(NULL, 0, 50);
        s = ddp_tcp_listen(port, &at);
    }
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
    ddp_tcp_card own, *mine = &list[ddp_t.rank];
    memset(&own, 0, sizeof own);
    own.word = DDP_TCP_DATA, own.rank = ddp_t.rank, own.size = ddp_t.size;
    ddp_t.socket[0] = ddp_tcp_connect(at, until);
    if (ddp_t.socket[0] < 0) return "rank 0 does not listen at MASTER_ADDR and MASTER_PORT";
    *listener = ddp_tcp_listen(0, &own.at);
    if (*listener < 0) return "no port to listen at";
    if (!ddp_tcp_all(ddp_t.socket[0], &own, sizeof own, 1, until) ||
        !ddp_tcp_all(ddp_t.socket[0], list, bytes, 0, until))
        return "rank 0 did not answer in time: is a rank missing, or are two alike?";
    if (mine->word != own.word || mine->rank != own.rank || mine->at.sin_port != own.at.sin_port)
        return "another program than rank 0 answers at MASTER_ADDR and MASTER_PORT";
    for (int r = 1; r < ddp_t.rank; r++) {
        ddp_t.socket[r] = ddp_tcp_connect(&list[r].at, until);
        if (ddp_t.socket[r] < 0 || !ddp_tcp_all(ddp_t.socket[r], &own, sizeof own, 1, until))
            return "a rank is gone";
    }
    return NULL;
}

/* Connects all ranks. Rank 0 listens at MASTER_ADDR and sends all ranks the others' addresses. Each
 * rank then connects to all lower ranks. */
static const char *ddp_tcp_meet(const char *host, int port, double until) {
    static ddp_tcp_card list[DDP_TCP_MOST];
    const size_t bytes = (size_t)ddp_t.size * sizeof *list;
    struct addrinfo hints, *found = NULL;
    const char *why = NULL;
    int listener = -1;
    memset(&hints, 0, sizeof hints), memset(list, 0, sizeof list);
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    if (ddp_t.rank == 0) listener = ddp_tcp_open(port, until, &why);
    else if (getaddrinfo(host, NULL, &hints, &found)) why = "MASTER_ADDR is not known";
    else {
        struct sockaddr_in at = *(struct sockaddr_in *)(void *)found->ai_addr;
        at.sin_port = htons((uint16_t)port);
        why = ddp_tcp_join(&at, list, &listener, until);
    }
    if (!why) why = ddp_tcp_accept(listener, ddp_t.size - 1 - ddp_t.rank, list, until);
    for (int r = 1; r < ddp_t.size && !why && ddp_t.rank == 0; r++)
        if (!ddp_tcp_all(ddp_t.socket[r], list, bytes, 1, until)) why = "a rank is gone";
    if (found) freeaddrinfo(found);
    if (listener >= 0) close(listener);
    return why;
}

static int ddp_tcp_number(const char *name, const char *other) {
    const char *text = getenv(name);
    if (!text && other) text = getenv(other);
    return text ? atoi(text) : -1;
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
        if (fcntl(ddp_t.socket[r], F_SETFL, O_NONBLOCK)) *why = "a socket is of no use";
    }
    if (*why) return d;
    d.rank = ddp_t.rank, d.size = ddp_t.size, d.seconds = seconds;
    d.sum = ddp_tcp_sum, d.max = ddp_tcp_max, d.all_gather = ddp_tcp_gather;
    d.reduce_scatter = ddp_tcp_scatter, d.stop = ddp_tcp_stop, d.busy = ddp_tcp_busy;
    return d;
}

/* For the end of main. A failed rank announces it, so no rank waits for it. Returns `failed`. */
static int ddp_tcp_end(int failed) {
    if (failed) ddp_tcp_stop(NULL, "its program has ended");
    for (int r = 0; r < DDP_TCP_MOST; r++)
        if (ddp_t.size && ddp_t.socket[r] >= 0) close(ddp_t.socket[r]);
    free(ddp_t.pieces);
    ddp_t.pieces = NULL;
    return failed;
}
