/* messages.h - what a program says on stderr: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_MESSAGES_H
#define TRAINER_MESSAGES_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *program_name = "trainer";    /* begins each message */
static int         bar_shown;                   /* 1: a line of progress must be hidden first */

static void hide_bar(void) {
    if (bar_shown) fputs("\r\033[K", stdout);
    bar_shown = 0;
}

/* File names, prompts and samples may contain control characters, which a terminal would obey. Each
 * becomes a question mark, except those in `kept`. U+0080 to U+009F are the bytes C2 80 to C2 9F;
 * some terminals read one of them as ESC [. */
static void tame(char *text, const char *kept) {
    for (char *p = text; *p; p++) {
        unsigned char c = (unsigned char)p[0], next = (unsigned char)p[1];
        if (c == 0xC2 && next >= 0x80 && next < 0xA0) p[0] = p[1] = '?';
        else if ((c < 32 || c == 127) && !strchr(kept, c)) *p = '?';
    }
}

/* Prints to stderr. A newline in the text also counts as a control character. */
static void print_message(const char *before, const char *format, va_list args) {
    char text[4096];
    hide_bar();
    fflush(stdout);
    vsnprintf(text, sizeof text, format, args);
    tame(text, "");
    fprintf(stderr, "%s: %s%s\n", program_name, before, text);
}

/* Every failure ends here, with a message that says what is wrong and what to do. */
static void die(int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    print_message("", format, args);
    va_end(args);
    exit(status);
}

/* For problems that do not stop training. */
static void warn(const char *format, ...) {
    va_list args;
    va_start(args, format);
    print_message("warning: ", format, args);
    va_end(args);
}

#endif
