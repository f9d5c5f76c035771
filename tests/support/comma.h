/* comma.h - a locale with a decimal comma, made for one test by localedef in a folder of its own.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Define _POSIX_C_SOURCE 200809L before the first #include.
 */
#ifndef COMMA_H
#define COMMA_H
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define COMMA_SKIP "no localedef with the description of de_DE"
static char comma_folder[64];

/* Back to the locale "C". */
static void comma_end(void) {
    char command[128];
    setlocale(LC_ALL, "C");
    snprintf(command, sizeof command, "rm -rf %s", comma_folder);
    if (system(command) != 0) printf("  %s stays behind\n", comma_folder);
}

/* Returns 0, in the locale "C", if the system cannot make it. */
static int comma_begin(void) {
    char command[400], number[16] = "";
    snprintf(comma_folder, sizeof comma_folder, "/tmp/mixprec_comma_%ld", (long)getpid());
    snprintf(command, sizeof command, "rm -rf %s && mkdir %s && localedef -i de_DE -f UTF-8 %s/de_DE.UTF-8 >%s/log 2>&1",
             comma_folder, comma_folder, comma_folder, comma_folder);
    int made = system(command) == 0;
    if (made) setenv("LOCPATH", comma_folder, 1);
    if (made && setlocale(LC_ALL, "de_DE.UTF-8")) snprintf(number, sizeof number, "%.1f", 0.5);
    if (strcmp(number, "0,5") == 0) return 1;
    comma_end();
    return 0;
}
#endif
