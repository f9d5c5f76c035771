/* terminal.h - messages, the bar of progress, and signals: a part of trainer.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_TERMINAL_H
#define TRAINER_TERMINAL_H

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>
#include "messages.h"

#define ABSENT (-1.0)                   /* a missing number: no loss is negative           */
enum { COLUMNS = 79, COLUMNS_LEAST = 40 };      /* the widest line, and the narrowest terminal */
static int line_columns = COLUMNS;           /* of a line on this terminal */

/* Set by a signal, or when the reader of our output has gone. The program then finishes the step,
 * saves the state and ends. */
static volatile sig_atomic_t stop_signal;
static int output_error;                        /* errno of a failed write to stdout */
enum { BAR_SHOWN = 1, WORK_SHOWN };
static int progress_bar, colour;                /* the terminal's state */

/* ==== Messages ====================================================================== */

/* Prints to stderr without filtering: the last message of a stopped run. */
static void tell(const char *format, ...) {
    va_list args;
    va_start(args, format);
    print_message("", format, args);
    va_end(args);
}

/* Prints to stdout, at most 4095 bytes. Returns what printf returns. */
static int say(const char *format, ...) {
    char    text[4096];
    va_list args;
    int     n;
    hide_bar();
    va_start(args, format);
    n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    tame(text, "\n\t");
    fputs(text, stdout);
    if (fflush(stdout) != 0 && !stop_signal) { output_error = errno; stop_signal = SIGPIPE; }
    return n;
}

/* Prints a line that begins with a word; breaks a longer line after a comma. */
static void say_line(const char *word, const char *format, ...) {
    enum { INDENT = 9 };
    char    text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    tame(text, "");
    for (const char *p = text; *p;) {
        size_t room = (size_t)(line_columns - INDENT), n = strlen(p);
        if (n > room) {
            for (n = room; n > 0 && !(p[n - 1] == ',' && p[n] == ' '); n--) {}
            if (n == 0) n = strlen(p);
        }
        say("%-*s%.*s\n", INDENT, word, (int)n, p);
        p += n;
        p += strspn(p, " ");
        word = "";
    }
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* A number in `width` line_columns, with at most the given decimals. */
static inline void number_text(char *text, size_t space, int width, int decimals, double value) {
    if (value == ABSENT) { snprintf(text, space, "-"); return; }
    if (isnan(value)) { snprintf(text, space, "nan"); return; }     /* nan of either sign */
    for (int d = decimals; d >= 0; d--) {
        snprintf(text, space, "%.*f", d, value);
        if (strlen(text) <= (size_t)width) return;
    }
    for (int d = 3; d >= 0; d--) {
        snprintf(text, space, "%.*e", d, value);
        if (strlen(text) <= (size_t)width) return;
    }
}

/* ==== Signals ======================================================================= */

static struct termios terminal_before;
static volatile sig_atomic_t terminal_is_quiet;

static void restore_terminal(void) {
    if (!terminal_is_quiet) return;
    terminal_is_quiet = 0;
    tcsetattr(STDIN_FILENO, TCSANOW, &terminal_before);
}

/* Turns off the terminal's echo: pressed keys, including Ctrl-C, would be printed into the bar. */
static void quiet_terminal(void) {
    struct termios quiet;
    if (!progress_bar || !isatty(STDIN_FILENO) || tcgetpgrp(STDIN_FILENO) != getpgrp()) return;
    if (tcgetattr(STDIN_FILENO, &terminal_before) != 0 || atexit(restore_terminal) != 0) return;
    quiet = terminal_before;
    quiet.c_lflag &= ~(tcflag_t)ECHO;
    terminal_is_quiet = tcsetattr(STDIN_FILENO, TCSANOW, &quiet) == 0;
}

static void on_signal(int number) {
    stop_signal = number;
    restore_terminal();
}

static const int stop_signals[] = {SIGINT, SIGTERM, SIGHUP};
enum { STOP_SIGNALS = (int)(sizeof stop_signals / sizeof stop_signals[0]) };

static void ignore_signals(void)
{ for (int i = 0; i < STOP_SIGNALS; i++) signal(stop_signals[i], SIG_IGN); }

/* A second signal of the same kind has its default action and ends the program. */
static void catch_signals(void) {
    struct sigaction action, old;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = (int)SA_RESETHAND;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < STOP_SIGNALS; i++)
        if (sigaction(stop_signals[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            sigaction(stop_signals[i], &action, NULL);
    signal(SIGPIPE, SIG_IGN);           /* a write to a closed pipe fails instead */
}

/* The columns of the terminal, or of the environment's COLUMNS; the last one stays empty. */
static void measure_terminal(void) {
    const char    *text = getenv("COLUMNS");
    long           wide = text ? strtol(text, NULL, 10) : 0;
#ifdef TIOCGWINSZ
    struct winsize size;
    if (wide <= 0 && isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) wide = size.ws_col;
#endif
    if (wide <= 0 || wide > COLUMNS) return;
    line_columns = wide > COLUMNS_LEAST ? (int)wide - 1 : COLUMNS_LEAST;
}

static void look_at_terminal(int quiet) {
    const char *term = getenv("TERM"), *no_colour = getenv("NO_COLOR");
    measure_terminal();
    progress_bar = isatty(STDOUT_FILENO) && !quiet && term && strcmp(term, "dumb") != 0;
    colour = progress_bar && !(no_colour && no_colour[0]);
}

/* ==== The bar ======================================================================= */

static void show_bar(int64_t step, int64_t steps, double seconds_left) {
    enum { WIDEST = 30, WORDS = 30 };
    char   bar[WIDEST + 1];
    int    width = line_columns - WORDS < WIDEST ? line_columns - WORDS : WIDEST;
    double done = (double)step / (double)steps;
    for (int i = 0; i < width; i++) bar[i] = i < done * width ? '#' : '.';
    bar[width] = '\0';
    printf("\r%s%s%s %3.0f%% step %lld, %.0f s left\033[K", colour ? "\033[36m" : "", bar,
           colour ? "\033[0m" : "", 100 * done, (long long)step, seconds_left);
    fflush(stdout);
    bar_shown = BAR_SHOWN;
}

/* Shows the current task and its completed share in place of the bar. of 0: the share is unknown.
 * The next message hides the line. */
static void show_work(const char *doing, const char *what, int64_t done, int64_t of) {
    static char last[COLUMNS + 1];
    char        text[COLUMNS + 1], share[8] = "";
    if (!progress_bar) return;
    if (of > 0) snprintf(share, sizeof share, " %3.0f%%", 100 * (double)done / (double)of);
    snprintf(text, (size_t)line_columns + 1 - sizeof share, "%s %s", doing, what);
    tame(text, "");
    strcat(text, share);
    if (bar_shown == WORK_SHOWN && strcmp(text, last) == 0) return;
    strcpy(last, text);
    printf("\r%s\033[K", text);
    fflush(stdout);
    bar_shown = WORK_SHOWN;
}

#endif
