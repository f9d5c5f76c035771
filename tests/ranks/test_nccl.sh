#!/bin/sh
# test_nccl.sh - the watchdog of NCCL's sums in examples/ddp_nccl.c, with an engine and a GPU that
# only count: sums that are late, and sums that only seem late.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

mkdir "$tmp/fake"
cat >"$tmp/fake/cuda_runtime.h" <<'END_OF_HEADER'
/* A GPU that has done `passed` of the marks that were put on its streams. */
typedef enum cudaError { cudaSuccess, cudaErrorNotReady = 600 } cudaError_t;
typedef struct stream *cudaStream_t;
typedef struct mark { int at; } *cudaEvent_t;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
static struct mark marks_made[8];
static int made, marks, passed, capturing;
static const char *cudaGetErrorString(cudaError_t e) { (void)e; return "CUDA failed"; }
static cudaError_t cudaSetDevice(int n) { (void)n; return cudaSuccess; }
static cudaError_t cudaGetDevice(int *n) { *n = 0; return cudaSuccess; }
static cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { (void)f; *s = 0; return cudaSuccess; }
static cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f)
{ (void)f; *e = &marks_made[made++]; return cudaSuccess; }
static cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { (void)s; e->at = ++marks; return cudaSuccess; }
static cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f)
{ (void)s, (void)e, (void)f; return cudaSuccess; }
static cudaError_t cudaEventQuery(cudaEvent_t e) { return e->at <= passed ? cudaSuccess : cudaErrorNotReady; }
static cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status)
{ (void)s; *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; return cudaSuccess; }
END_OF_HEADER
cat >"$tmp/fake/nccl.h" <<'END_OF_HEADER'
#include <stddef.h>
typedef enum { ncclSuccess, ncclInProgress = 7, ncclRemoteError = 6 } ncclResult_t;
typedef enum { ncclFloat16, ncclBfloat16, ncclFloat64, ncclInt32, ncclFloat32 } ncclDataType_t;
typedef enum { ncclSum, ncclMax } ncclRedOp_t;
typedef struct world *ncclComm_t;
typedef struct { char key[128]; } ncclUniqueId;
static int aborts;
static ncclResult_t met_now, key_result;
static const char *ncclGetErrorString(ncclResult_t r) { return r == ncclRemoteError ? "remote process has ended" : "?"; }
static ncclResult_t ncclCommAbort(ncclComm_t c) { (void)c; aborts++; return ncclSuccess; }
static ncclResult_t ncclCommDestroy(ncclComm_t c) { (void)c; return ncclSuccess; }
static ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *r) { (void)c; *r = met_now; return ncclSuccess; }
static ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { id->key[0] = 1; return key_result; }
typedef struct { int blocking; } ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER {1}
static struct world { int unused; } the_world;
static ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId id, int r, ncclConfig_t *config)
{ (void)n, (void)id, (void)r; *c = config->blocking ? 0 : &the_world; return ncclInProgress; }
static ncclResult_t ncclCommFinalize(ncclComm_t c) { (void)c; return ncclSuccess; }
#define FAKE(name, ...) static ncclResult_t name(const void *a, void *b, size_t n, ncclDataType_t t, __VA_ARGS__ ncclComm_t c, cudaStream_t s)
FAKE(ncclAllReduce, ncclRedOp_t op,)     { (void)a, (void)b, (void)n, (void)t, (void)op, (void)c, (void)s; return ncclSuccess; }
FAKE(ncclReduceScatter, ncclRedOp_t op,) { (void)a, (void)b, (void)n, (void)t, (void)op, (void)c, (void)s; return ncclSuccess; }
FAKE(ncclAllGather, )                    { (void)a, (void)b, (void)n, (void)t, (void)c, (void)s; return ncclSuccess; }
END_OF_HEADER
cat >"$tmp/watch.c" <<'END_OF_PROGRAM'
#define _POSIX_C_SOURCE 200809L
#include "mixprec.h"
#include "examples/ddp_nccl.c"
#include "test.h"
#include <fcntl.h>

static double waited;
static float  x[4];

static void begin(void) {
    memset(&ddp_n, 0, sizeof ddp_n);
    cudaEventCreateWithFlags(&ddp_n.watched, 0);
    made = marks = passed = capturing = aborts = 0;
    met_now = ncclSuccess;
    ddp_n.comm = &the_world;
    waited = 0;
    ddp_n.seconds = 0.35;
}
static const char *sum(void) { return ddp_nccl_sum(NULL, x, 4, MIXP_F32, NULL, 0.2); }

/* The newest sum is never done when it is looked at; all those before it are. */
static void a_gpu_that_is_always_behind(void) {
    int i;
    begin();
    for (i = 0; i < 100; i++) {
        CHECK(sum() == NULL);
        ddp_nccl_look(&waited);
        passed = marks;
        CHECK(sum() == NULL);
        ddp_nccl_look(&waited);
    }
    CHECK(ddp_nccl_failed() == NULL);
    CHECK(marks > 50);
}

/* One that is never done, whichever hook put it there, or a replay. */
static void a_sum_that_is_late(void) {
    int way, i;
    for (way = 0; way < 3; way++) {
        begin();
        if (way == 0) CHECK(sum() == NULL);
        if (way == 1) CHECK(ddp_nccl_gather(NULL, x, 4, MIXP_F32, NULL, 0.2) == NULL);
        if (way == 2) CHECK(ddp_nccl_replayed(NULL, NULL) == NULL);
        for (i = 0; i < 3; i++) ddp_nccl_look(&waited);
        CHECK(ddp_nccl_failed() == NULL);
        CHECK(sum() == NULL);           /* what comes behind it is no sign of life */
        ddp_nccl_look(&waited);
        CHECK_TEXT(ddp_nccl_failed(), "another rank did not answer in time");
        CHECK_TEXT(sum(), "did not answer in time");
        ddp_nccl_look(&waited);
        CHECK_INT(aborts, 1);
    }
}

/* While another rank works alone no time runs; when it is back, it does. */
static void a_rank_that_is_busy(void) {
    int i;
    begin();
    snprintf(ddp_n.busy, sizeof ddp_n.busy, "%s.busy", MEET);
    CHECK(sum() == NULL);
    ddp_nccl_busy(NULL, 1);
    for (i = 0; i < 20; i++) ddp_nccl_look(&waited);
    CHECK(ddp_nccl_failed() == NULL);
    ddp_nccl_busy(NULL, 0);
    for (i = 0; i < 4; i++) ddp_nccl_look(&waited);
    CHECK_TEXT(ddp_nccl_failed(), "another rank did not answer in time");
}

static void recorded_sums(void) {
    begin();
    capturing = 1;
    CHECK(sum() == NULL);
    CHECK_INT(marks, 0);
}

/* The engine takes a sum up only when all are connected: a rank that never is ends the wait for it. */
static void a_call_that_goes_on(void) {
    begin();
    met_now = ncclInProgress;
    CHECK_TEXT(sum(), "another rank did not answer in time");
    CHECK_INT(aborts, 1);
    CHECK(ddp_n.comm == NULL);
    CHECK_TEXT(sum(), "another rank did not answer in time");
    CHECK_INT(aborts, 1);
}

/* Ranks that do not come together: after the limit, not never. */
static void a_world_that_does_not_meet(void) {
    const char *why = NULL;
    begin();
    met_now = ncclInProgress;
    CHECK_INT(ddp_nccl(0, 2, MEET, 0.2, &why).size, 0);
    CHECK_TEXT(why, "the ranks did not meet in time");
    CHECK(fopen(MEET, "rb") == NULL);
}

/* A key that an earlier run left behind is not taken for this one's. */
static void an_old_key(void) {
    const struct timespec old[2] = {{1000000000, 0}, {1000000000, 0}};
    const char *why = NULL;
    FILE *f = fopen(MEET, "wb");
    CHECK(f && fwrite("an old key, and as long as the struct that is read: "
                      "........................................................................................",
                      128, 1, f) == 1);
    if (f) fclose(f);
    CHECK_INT(utimensat(AT_FDCWD, MEET, old, 0), 0);
    begin();
    CHECK_INT(ddp_nccl(1, 2, MEET, 1, &why).size, 0);
    CHECK_TEXT(why, "rank 0 did not write the file");
    remove(MEET);
}

/* What the engine has met is told in its words, and this rank's own failure as that. */
static void what_is_told(void) {
    begin();
    met_now = ncclInProgress;
    ddp_nccl_look(&waited);
    CHECK(ddp_nccl_failed() == NULL);
    met_now = ncclRemoteError;
    ddp_nccl_look(&waited);
    CHECK_TEXT(ddp_nccl_failed(), "remote process has ended");
    begin();
    ddp_nccl_stop(NULL, "a text that is gone soon");
    CHECK_TEXT(ddp_nccl_failed(), "this rank failed");
    CHECK_INT(aborts, 1);
}

/* Rank 0 that has no key for the others does not wait for the file that it would write. */
static void no_key(void) {
    const char *why = NULL;
    begin();
    key_result = ncclRemoteError;
    CHECK_INT(ddp_nccl(0, 2, "/nowhere/at/all", 1e9, &why).size, 0);
    CHECK_TEXT(why, "remote process has ended");
    key_result = ncclSuccess;
    CHECK_INT(ddp_nccl(0, 2, "/nowhere/at/all", 1e9, &why).size, 0);
    CHECK_TEXT(why, "the file cannot be written");
}

int main(void) {
    RUN(a_gpu_that_is_always_behind);
    RUN(a_sum_that_is_late);
    RUN(recorded_sums);
    RUN(what_is_told);
    RUN(no_key);
    RUN(a_call_that_goes_on);
    RUN(a_world_that_does_not_meet);
    RUN(an_old_key);
    RUN(a_rank_that_is_busy);
    return test_report();
}
END_OF_PROGRAM
build=${BUILD:-build}
# By hand, without make's word for it: as the library was built.
[ -n "${OPENMP+set}" ] || ! grep -q -s -e -fopenmp "$build/flags" || OPENMP=-fopenmp
guard=; command -v timeout >/dev/null && guard='timeout 300'
check 'examples/ddp_nccl.c is compiled beside them' ${CC:-cc} -std=gnu99 -Wall -Wextra -Werror -Wno-unused-function \
    -DMIXPREC_IMPLEMENTATION_DONE -DMEET="\"$tmp/meet\"" -I. -Itests -Itests/support -I"$tmp/fake" "$tmp/watch.c" "$build/libmixprec.a" ${OPENMP-} -lpthread \
    -lm -o "$tmp/watch"
for name in a_gpu_that_is_always_behind a_sum_that_is_late recorded_sums what_is_told no_key a_call_that_goes_on \
    a_world_that_does_not_meet an_old_key a_rank_that_is_busy; do
    check "$name" sh -c "MIXPREC_TEST_ONLY=$name $guard '$tmp/watch' "
done

# An engine whose calls take a while, and which frees a communicator that is aborted, as NCCL does: the
# watcher ends the world while the main thread begins sums, and the other way round.
mkdir "$tmp/stub"
cp "$tmp/fake/cuda_runtime.h" "$tmp/stub"
cat >"$tmp/stub/nccl.h" <<'END_OF_HEADER'
#include <stdlib.h>
#include <time.h>
typedef enum { ncclSuccess, ncclInternalError = 3, ncclRemoteError = 6, ncclInProgress = 7 } ncclResult_t;
typedef enum { ncclFloat16, ncclBfloat16, ncclFloat64, ncclInt32, ncclFloat32 } ncclDataType_t;
typedef enum { ncclSum, ncclMax } ncclRedOp_t;
typedef struct { long calls; } *ncclComm_t;
typedef struct { char key[128]; } ncclUniqueId;
typedef struct { int blocking; } ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER {1}
static int gone;                                /* atomic: 1: another rank is */
static const char *ncclGetErrorString(ncclResult_t r) { return r == ncclRemoteError ? "remote process has ended" : "?"; }
static ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { id->key[0] = 1; return ncclSuccess; }
static ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId id, int r, ncclConfig_t *config)
{ (void)n, (void)id, (void)r, (void)config; *c = calloc(1, sizeof **c); return ncclSuccess; }
static ncclResult_t ncclCommAbort(ncclComm_t c) { free(c); return ncclSuccess; }
static ncclResult_t ncclCommFinalize(ncclComm_t c) { c->calls++; return ncclSuccess; }
static ncclResult_t ncclCommDestroy(ncclComm_t c) { free(c); return ncclSuccess; }
static ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *r)
{ c->calls++; *r = __atomic_load_n(&gone, __ATOMIC_SEQ_CST) ? ncclRemoteError : ncclSuccess; return ncclSuccess; }
static ncclResult_t use(ncclComm_t c) {
    const struct timespec nap = {0, 1000};
    for (int i = 0; i < 20; i++) c->calls++, nanosleep(&nap, NULL);
    return ncclSuccess;
}
#define STUB(name, ...) static ncclResult_t name(const void *a, void *b, size_t n, ncclDataType_t t, __VA_ARGS__ ncclComm_t c, cudaStream_t s)
STUB(ncclAllReduce, ncclRedOp_t op,)     { (void)a, (void)b, (void)n, (void)t, (void)op, (void)s; return use(c); }
STUB(ncclReduceScatter, ncclRedOp_t op,) { (void)a, (void)b, (void)n, (void)t, (void)op, (void)s; return use(c); }
STUB(ncclAllGather, )                    { (void)a, (void)b, (void)n, (void)t, (void)s; return use(c); }
END_OF_HEADER
cat >"$tmp/race.c" <<'END_OF_PROGRAM'
#define _POSIX_C_SOURCE 200809L
#include "mixprec.h"
#include "examples/ddp_nccl.c"
static int sums(const mixp_ranks_desc *d) {
    float x[4] = {0};
    const char *why = NULL;
    int n = 0;
    for (; !why && n < 100000; n++) {
        if (n == 40) __atomic_store_n(&gone, 1, __ATOMIC_SEQ_CST);
        why = d->sum(d->user, x, 4, MIXP_F32, NULL, 5);
    }
    return why && strcmp(why, "remote process has ended") == 0 && n > 39 ? 0 : 1;
}
int main(int argc, char **argv) {
    const struct timespec nap = {0, 130000000};
    const char *why = NULL;
    mixp_ranks_desc d = ddp_nccl(0, 1, argv[1], 5, &why);
    int bad = d.size != 1;
    if (!bad && argc == 2) bad = sums(&d);
    if (!bad && argc > 2) nanosleep(&nap, NULL), d.stop(d.user, "it ends");
    if (!bad) ddp_nccl_end();
    return bad;
}
END_OF_PROGRAM
# sane KIND: by which sanitizer; where it cannot run, that is skipped.
sane() {
    flags="-std=gnu99 -O1 -g -w -fsanitize=$1 -DMIXPREC_IMPLEMENTATION_DONE -I. -I$tmp/stub"
    echo 'int main(void) { return 0; }' >"$tmp/none.c"
    if ! ${CC:-cc} -fsanitize="$1" "$tmp/none.c" -o "$tmp/none" 2>/dev/null || ! "$tmp/none" 2>/dev/null; then
        skip "the watcher ends the world amid sums ($1)"
        skip "a rank stops while the watcher looks ($1)"
        return
    fi
    check "an engine that frees what is aborted is compiled ($1)" ${CC:-cc} $flags "$tmp/race.c" \
        "$build/libmixprec.a" ${OPENMP-} -lpthread -lm -o "$tmp/race_$1"
    check "the watcher ends the world amid sums ($1)" $guard "$tmp/race_$1" "$tmp/meet"
    check "a rank stops while the watcher looks ($1)" $guard "$tmp/race_$1" "$tmp/meet" stop
}
sane address
sane thread
report
