#!/bin/sh
# test_nccl.sh - what watches NCCL's sums in examples/ddp_nccl.c, beside an engine and a GPU that only
# count: when a sum is late, and when it only seems so.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/check.sh

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
static ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId id, int r)
{ (void)n, (void)id, (void)r; *c = 0; return ncclSuccess; }
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

static double waited;
static float  x[4];

static void begin(void) {
    memset(&ddp_n, 0, sizeof ddp_n);
    cudaEventCreateWithFlags(&ddp_n.watched, 0);
    made = marks = passed = capturing = aborts = 0;
    met_now = ncclSuccess;
    waited = 0;
    ddp_n.seconds = 0.35;
}
static const char *sum(void) { return ddp_nccl_sum(NULL, x, 4, MIXP_F32, NULL, 0); }

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

/* One that is never done, whichever hook put it there. */
static void a_sum_that_is_late(void) {
    int way, i;
    for (way = 0; way < 2; way++) {
        begin();
        if (way) CHECK(ddp_nccl_gather(NULL, x, 4, MIXP_F32, NULL, 0) == NULL);
        else CHECK(sum() == NULL);
        for (i = 0; i < 3; i++) ddp_nccl_look(&waited);
        CHECK(ddp_nccl_failed() == NULL);
        CHECK(sum() == NULL);           /* what comes behind it is no sign of life */
        ddp_nccl_look(&waited);
        CHECK_TEXT(ddp_nccl_failed(), "another rank did not come in time");
        CHECK_TEXT(sum(), "did not come in time");
        ddp_nccl_look(&waited);
        CHECK_INT(aborts, 1);
    }
}

static void recorded_sums(void) {
    begin();
    capturing = 1;
    CHECK(sum() == NULL);
    CHECK_INT(marks, 0);
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
    return test_report();
}
END_OF_PROGRAM
build=${BUILD:-build}
# By hand, without make's word for it: as the library was built.
[ -n "${OPENMP+set}" ] || ! grep -q -s -e -fopenmp "$build/flags" || OPENMP=-fopenmp
guard=; command -v timeout >/dev/null && guard='timeout 300'
check 'examples/ddp_nccl.c is compiled beside them' ${CC:-cc} -std=gnu99 -Wall -Wextra -Werror -Wno-unused-function \
    -DMIXPREC_IMPLEMENTATION_DONE -I. -Itests -I"$tmp/fake" "$tmp/watch.c" "$build/libmixprec.a" ${OPENMP-} -lpthread \
    -lm -o "$tmp/watch"
for name in a_gpu_that_is_always_behind a_sum_that_is_late recorded_sums what_is_told no_key; do
    check "$name" sh -c "MIXPREC_TEST_ONLY=$name $guard '$tmp/watch' "
done
report
