/* bench_busy.c - two threads beside one on a machine whose cores all have other work: a small network
 * as reinforcement learning has it, and one whose products are worth threads. Prints milliseconds a
 * step, turn by turn, and the median of the ratios.
 *     bench_busy [spinning programs, 2] [rounds, 9]
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _POSIX_C_SOURCE 200809L
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "../support/small_net.h"

enum { MOST_SPINNING = 64, MOST_ROUNDS = 99 };

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int spinning;
static pid_t spins[MOST_SPINNING];

static void spin_for_ever(void) {
    volatile unsigned i = 0;
    alarm(300);                 /* should we be killed */
    for (;;) i++;
}

static void spin_start(void) {
    for (int i = 0; i < spinning; i++) {
        spins[i] = fork();
        if (spins[i] == 0) spin_for_ever();
    }
}

static void spin_stop(void) {
    for (int i = 0; i < spinning; i++) {
        kill(spins[i], SIGKILL);
        waitpid(spins[i], NULL, 0);
    }
}

/* Milliseconds a step; no longer than five seconds in all. */
static double milliseconds(small_net *net, int steps) {
    double start = seconds();
    int i;
    for (i = 0; i < steps && seconds() - start < 5.0; i++) small_net_step(net);
    return 1e3 * (seconds() - start) / i;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void compare(int width, int batch, int steps, int rounds) {
    small_net one, two;
    double ratio[MOST_ROUNDS];
    small_net_init(&one, 1, width, batch);
    small_net_init(&two, 2, width, batch);
    for (int i = 0; i < rounds; i++) {
        double alone = milliseconds(&one, steps), both = milliseconds(&two, steps);
        ratio[i] = both / alone;
        printf("width %4d, batch %4d: 1 thread %8.3f ms, 2 threads %8.3f ms\n", width, batch, alone, both);
    }
    qsort(ratio, (size_t)rounds, sizeof *ratio, ascending);
    printf("    2 threads take %.2f of 1 thread's time (from %.2f to %.2f)\n", ratio[rounds / 2], ratio[0],
           ratio[rounds - 1]);
    small_net_free(&one);
    small_net_free(&two);
}

int main(int argc, char **argv) {
    int rounds = argc > 2 ? atoi(argv[2]) : 9;
    spinning = argc > 1 ? atoi(argv[1]) : 2;
    if (spinning < 0 || spinning > MOST_SPINNING || rounds < 1 || rounds > MOST_ROUNDS) return 2;
    printf("%d spinning programs\n", spinning);
    fflush(stdout);
    spin_start();
    compare(64, 64, 1000, rounds);
    compare(128, 256, 200, rounds);
    compare(512, 256, 20, rounds);
    spin_stop();
    return 0;
}
