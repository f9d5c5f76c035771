#pragma once
#include "../cpu/shared.c"
#include "memory.c"
/* --- threads ----------------------------------------------------------------------------- */

#if defined(MIXPREC_THREADS) && !defined(__GNUC__)
#  error "MIXPREC_THREADS needs gcc or clang, and POSIX threads: do not define it"
#endif
/* OpenMP sets the number of threads. The threads are mixprec's own if POSIX threads exist: a loop
 * of OpenMP ends with a barrier, where a thread without a core delays all other threads, so that
 * two threads are slower than one on a busy machine. */
#if defined(_OPENMP) && !defined(MIXPREC_THREADS)
#  define MIXPI_OPENMP 1
#  include <omp.h>
#else
#  define MIXPI_OPENMP 0
#endif
#if defined(MIXPREC_THREADS) || (MIXPI_OPENMP && defined(__GNUC__) && MIXPI_POSIX)
#  define MIXPI_POOL 1
#  include <pthread.h>
#  include <sched.h>
#  include <unistd.h>
#else
#  define MIXPI_POOL 0
#endif

#if MIXPI_OPENMP
static void mixpi_openmp_parallel(
    const mixp_context *ctx, int64_t tasks, mixp_task task, void *arg) {
    int64_t i;
#  pragma omp parallel for schedule(dynamic, 1) num_threads(ctx->exec.threads)
    for (i = 0; i < tasks; i++) task(arg, i, omp_get_thread_num());
}

#  if MIXPI_POOL
/* Has the user bound OpenMP's threads to cores (OMP_PROC_BIND)? A new thread inherits the core of
 * its creator, so all threads of the pool would share one core. */
static int mixpi_openmp_is_bound(void) {
#    if _OPENMP >= 201307
    return omp_get_proc_bind() != omp_proc_bind_false;
#    else
    return 0;
#    endif
}
#  endif
#endif

#if MIXPI_POOL
/* Threads of one context, started by its first parallel loop. A loop is a round: the caller opens
 * the gate, workers pass the gate and take tasks, the caller takes tasks as well, closes the gate
 * and waits for the workers inside. The caller does not wait for a worker that has not passed the
 * gate when it closes, so a worker without a core delays no other thread. A waiting worker first
 * spins, then yields its core to other programs, then sleeps.
 *
 * The gate is one word: the number of the round, an open bit, and the number of workers inside. */
#define MIXPI_GATE_OPEN  ((uint64_t)1 << 16)
#define MIXPI_GATE_ROUND ((uint64_t)1 << 17)
#define MIXPI_GATE_INSIDE(gate) ((gate) & (MIXPI_GATE_OPEN - 1))
enum {
    MIXPI_SPINS = 1000,         /* 20 to 50 us                                             */
    MIXPI_YIELDS = 200,         /* 100 us if no other program wants the core               */
    MIXPI_WORKERS_MOST = 1024
};

typedef struct mixpi_pool mixpi_pool;

typedef struct mixpi_worker {
    mixpi_pool *pool;
    pthread_t   thread;
    int         number;         /* 1, 2, ...; the caller is 0                               */
} mixpi_worker;

struct mixpi_pool {
    uint64_t  gate;
    char      after_gate[MIXPI_LINE]; /* gate, next and the rest: on different cache lines */
    int64_t   next;             /* next task of the round                                  */
    char      after_next[MIXPI_LINE];
    int64_t   tasks;            /* number of tasks of the round                            */
    mixp_task task;
    void     *arg;
    pthread_mutex_t lock;
    pthread_cond_t  wake, left;
    int       asleep;           /* workers that wait for `wake`                            */
    int       quit;
    int       started;          /* threads that were created                               */
    pid_t     owner;            /* process that started them: fork does not copy threads   */
    mixpi_worker worker[1];     /* one element for each worker                             */
};

static void mixpi_pause(void) {
#  if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#  elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#  endif
}

/* Waits for a moment, the i-th time in a row. Returns 0 when the caller should sleep instead. */
static int mixpi_wait_awake(int i) {
    if (i < MIXPI_SPINS) mixpi_pause();
    else sched_yield();
    return i < MIXPI_SPINS + MIXPI_YIELDS;
}

static uint64_t mixpi_gate(mixpi_pool *p) { return __atomic_load_n(&p->gate, __ATOMIC_SEQ_CST); }

static void mixpi_take_tasks(mixpi_pool *p, int worker) {
    int64_t i;
    while ((i = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->tasks)
        p->task(p->arg, i, worker);
}

/* Passes the gate if it is open for a round other than *seen. Returns 1 and sets *seen to that
 * round; 0 otherwise. */
static int mixpi_gate_pass(mixpi_pool *p, uint64_t *seen) {
    uint64_t gate = mixpi_gate(p);
    while (gate & MIXPI_GATE_OPEN && gate / MIXPI_GATE_ROUND != *seen) {
        if (!__atomic_compare_exchange_n(
                &p->gate, &gate, gate + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue; /* gate now has the current value */
        *seen = gate / MIXPI_GATE_ROUND;
        return 1;
    }
    return 0;
}

/* Leaves the gate. The last worker to leave a closed gate wakes the caller, which may be asleep. */
static void mixpi_gate_leave(mixpi_pool *p) {
    uint64_t gate = __atomic_sub_fetch(&p->gate, 1, __ATOMIC_SEQ_CST);
    if (gate & MIXPI_GATE_OPEN || MIXPI_GATE_INSIDE(gate) > 0) return;
    pthread_mutex_lock(&p->lock);
    pthread_cond_signal(&p->left);
    pthread_mutex_unlock(&p->lock);
}

/* Waits for a round. Returns 1 inside the round, 0 when the pool ends. A worker announces its sleep
 * before its last look at the gate, and the caller opens the gate before it counts the sleepers: at
 * least one of the two sees the other, and no wake-up is lost. */
static int mixpi_pool_await(mixpi_pool *p, uint64_t *seen) {
    int entered;
    for (int i = 0; !__atomic_load_n(&p->quit, __ATOMIC_RELAXED) && mixpi_wait_awake(i); i++)
        if (mixpi_gate_pass(p, seen)) return 1;
    pthread_mutex_lock(&p->lock);
    __atomic_add_fetch(&p->asleep, 1, __ATOMIC_SEQ_CST);
    while (!(entered = mixpi_gate_pass(p, seen)) && !p->quit) pthread_cond_wait(&p->wake, &p->lock);
    __atomic_sub_fetch(&p->asleep, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&p->lock);
    return entered;
}

static void *mixpi_pool_worker(void *arg) {
    mixpi_worker *self = (mixpi_worker *)arg;
    uint64_t seen = 0;
    while (mixpi_pool_await(self->pool, &seen)) {
        mixpi_take_tasks(self->pool, self->number);
        mixpi_gate_leave(self->pool);
    }
    return NULL;
}

/* Starts the workers. If the system starts fewer threads than requested, these do all the work. */
static void mixpi_pool_start(mixpi_pool *p, int workers) {
    memset(p, 0, sizeof *p);
    p->gate = MIXPI_GATE_ROUND;
    p->owner = getpid();
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_cond_init(&p->left, NULL);
    while (p->started < workers) {
        mixpi_worker *w = &p->worker[p->started];
        w->pool = p;
        w->number = p->started + 1;
        if (pthread_create(&w->thread, NULL, mixpi_pool_worker, w) != 0) return;
        p->started++;
    }
}

/* Opens the gate, and wakes a sleeping worker for each task but the caller's first. */
static void mixpi_pool_open(mixpi_pool *p) {
    uint64_t round = mixpi_gate(p) / MIXPI_GATE_ROUND + 1;
    __atomic_store_n(&p->gate, round * MIXPI_GATE_ROUND | MIXPI_GATE_OPEN, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&p->asleep, __ATOMIC_SEQ_CST) == 0) return;
    pthread_mutex_lock(&p->lock);
    if (p->tasks > p->asleep) pthread_cond_broadcast(&p->wake);
    else
        for (int64_t i = 1; i < p->tasks; i++) pthread_cond_signal(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

static void mixpi_pool_close(mixpi_pool *p) {
    uint64_t gate = __atomic_and_fetch(&p->gate, ~MIXPI_GATE_OPEN, __ATOMIC_SEQ_CST);
    for (int i = 0; MIXPI_GATE_INSIDE(gate) > 0 && mixpi_wait_awake(i); i++) gate = mixpi_gate(p);
    if (MIXPI_GATE_INSIDE(gate) == 0) return;
    pthread_mutex_lock(&p->lock);
    while (MIXPI_GATE_INSIDE(mixpi_gate(p)) > 0) pthread_cond_wait(&p->left, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

static void mixpi_pool_stop(mixpi_pool *p) {
    if (!p || p->owner != getpid()) return;
    pthread_mutex_lock(&p->lock);
    __atomic_store_n(&p->quit, 1, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->started; i++) pthread_join(p->worker[i].thread, NULL);
    pthread_cond_destroy(&p->left);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
}

/* Returns the context's pool; a child of fork starts its own threads. NULL: out of memory. */
static mixpi_pool *mixpi_context_pool(mixp_context *ctx) {
    int workers = ctx->exec.threads - 1;
    mixpi_pool *p = ctx->pool;
    if (p && p->owner == getpid()) return p;
    if (!p)
        p = (mixpi_pool *)mixpi_host_take(ctx, sizeof *p + (size_t)workers * sizeof p->worker[0]);
    if (p) mixpi_pool_start(p, workers);
    ctx->pool = p;
    return p;
}

static void mixpi_pool_run(mixpi_pool *p, int64_t tasks, mixp_task task, void *arg) {
    p->task = task;
    p->arg = arg;
    p->tasks = tasks;
    p->next = 0;
    mixpi_pool_open(p);
    mixpi_take_tasks(p, 0);
    mixpi_pool_close(p);
}
#endif

#if MIXPI_POOL && MIXPI_OPENMP
/* Uses no pool inside a parallel region of the user's, where all cores already have work. */
static void mixpi_context_parallel(void *user, int64_t tasks, mixp_task task, void *arg) {
    mixp_context *ctx = (mixp_context *)user;
    mixpi_pool *p = NULL;
    if (!omp_in_parallel() && !mixpi_openmp_is_bound()) p = mixpi_context_pool(ctx);
    if (p) mixpi_pool_run(p, tasks, task, arg);
    else mixpi_openmp_parallel(ctx, tasks, task, arg);
}
#elif MIXPI_POOL
static void mixpi_context_parallel(void *user, int64_t tasks, mixp_task task, void *arg) {
    mixpi_pool *p = mixpi_context_pool((mixp_context *)user);
    if (p) mixpi_pool_run(p, tasks, task, arg);
    else
        for (int64_t i = 0; i < tasks; i++) task(arg, i, 0);
}
#elif MIXPI_OPENMP
static void mixpi_context_parallel(void *user, int64_t tasks, mixp_task task, void *arg) {
    mixpi_openmp_parallel((const mixp_context *)user, tasks, task, arg);
}
#endif

#if MIXPI_POOL && defined(__linux__)
#  include <sys/syscall.h>
#  ifndef __cplusplus
long syscall(long number, ...);         /* declaration hidden under -std=c99 */
#  endif

/* The number of cores in the affinity mask of the calling thread. 0: unknown. */
static int64_t mixpi_cores_in_mask(void) {
    unsigned char mask[1024];
    long cores = 0, bytes;
    memset(mask, 0, sizeof mask);
    bytes = syscall(SYS_sched_getaffinity, 0L, sizeof mask, mask);
    for (long i = 0; i < bytes; i++)
        for (unsigned left = mask[i]; left; left &= left - 1) cores++;
    return cores;
}

/* Reads one or two numbers from a file. *first becomes 0 if the file starts with a word. */
static void mixpi_read_numbers(const char *path, long *first, long *second) {
    FILE *f = fopen(path, "r");
    if (!f) return;
    if (fscanf(f, "%ld %ld", first, second) < 1) *first = 0;
    fclose(f);
}

/* The CPU quota of a container in cores, rounded up. 0: none. cpu.max has "quota period" or
 * "max period"; version 1 of cgroups has a file for each number, and -1 for no quota. */
static int64_t mixpi_cores_in_quota(void) {
    long quota = 0, period = 0, none;
    mixpi_read_numbers("/sys/fs/cgroup/cpu.max", &quota, &period);
    mixpi_read_numbers("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", &quota, &none);
    mixpi_read_numbers("/sys/fs/cgroup/cpu/cpu.cfs_period_us", &period, &none);
    return quota > 0 && period > 0 ? mixpi_ceil_div(quota, period) : 0;
}
#endif

#if MIXPI_POOL
/* The number of cores that the process may use, at least 1. */
static int mixpi_cores_allowed(void) {
    int64_t cores = sysconf(_SC_NPROCESSORS_ONLN);
#  ifdef __linux__
    const int64_t mask = mixpi_cores_in_mask(), quota = mixpi_cores_in_quota();
    if (mask > 0) cores = mask;
    if (quota > 0) cores = mixpi_min(cores, quota);
#  endif
    return cores < 1 ? 1 : (int)mixpi_min(cores, MIXPI_WORKERS_MOST);
}
#endif

#if MIXPI_OPENMP
/* OpenMP's default obeys the affinity mask but no quota. A number that the user chose stays. */
static int mixpi_threads_available(void) {
    const int threads = omp_get_max_threads();
#  if MIXPI_POOL
    if (threads == omp_get_num_procs() && !getenv("OMP_NUM_THREADS"))
        return (int)mixpi_min(threads, mixpi_cores_allowed());
#  endif
    return threads;
}
#elif MIXPI_POOL
static int mixpi_threads_available(void) { return mixpi_cores_allowed(); }
#endif

/* A copy between host and device memory, as a device's upload and download make it. */
typedef mixp_result (*mixpi_transfer)(const mixp_exec *x, void *to, const void *from,
                                      size_t bytes);

/* Copies with a function of the device; NULL: device memory is host memory. */
static mixp_result mixpi_copy_by(
    mixp_context *ctx, mixpi_transfer by, void *to, const void *from, size_t bytes) {
    if (by) return mixpi_note_failure(ctx, ctx->device->name, by(&ctx->exec, to, from, bytes));
    if (bytes) memcpy(to, from, bytes);
    return MIXP_OK;
}

static mixp_result mixpi_upload(mixp_context *ctx, void *device, const void *host, size_t bytes) {
    return mixpi_copy_by(ctx, ctx->device->upload, device, host, bytes);
}

/* Uploads from the program's own memory, which each replay of a captured step reads again. */
static mixp_result mixpi_feed(mixp_context *ctx, void *device, const void *host, size_t bytes) {
    const mixp_device *d = ctx->device;
    return mixpi_copy_by(ctx, d->feed ? d->feed : d->upload, device, host, bytes);
}

static mixp_result mixpi_download(mixp_context *ctx, void *host, const void *device, size_t bytes) {
    return mixpi_copy_by(ctx, ctx->device->download, host, device, bytes);
}

/* Downloads what recent kernels of the step wrote, without waiting. */
static mixp_result mixpi_peek(mixp_context *ctx, void *host, const void *device, size_t bytes) {
    const mixp_device *d = ctx->device;
    return mixpi_copy_by(ctx, d->peek ? d->peek : d->download, host, device, bytes);
}
