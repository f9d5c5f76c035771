/* option_kinds.h - what an option of a command line is: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A program defines `config`, then the table `options`; command_line.h reads and prints it.
 */
#ifndef TRAINER_OPTION_KINDS_H
#define TRAINER_OPTION_KINDS_H

#include <stddef.h>
#include <stdint.h>

#define AUTO (-1)                       /* the value of "auto": the program chooses      */

/* TEXT is copied into its field; POINTER: the field points to the text, or is NULL. */
typedef enum option_kind { WHOLE, REAL, TEXT, CHOICE, FLAG, POINTER } option_kind;

typedef struct option {
    const char *name;
    option_kind kind;
    size_t      offset;                 /* offset of its field in struct config */
    const char *initial;
    double      low, high;              /* range of a number; high: longest text */
    const char *choices;                /* "a|b|c": stored as 0, 1, 2 */
    const char *help;
} option;

#define AT(field)  offsetof(config, field)
#define GROUP(title)                          {NULL, FLAG, 0, NULL, 0, 0, NULL, title}
#define WHOLE_OPT(name, field, initial, low, high, help) \
    {name, WHOLE, AT(field), initial, low, high, NULL, help}
#define REAL_OPT(name, field, initial, low, high, help) \
    {name, REAL, AT(field), initial, low, high, NULL, help}
#define TEXT_OPT(name, field, what, help) \
    {name, TEXT, AT(field), "", 0, sizeof ((config *)0)->field - 1, what, help}
#define POINTER_OPT(name, field, initial, what, help) \
    {name, POINTER, AT(field), initial, 0, 0, what, help}
#define CHOICE_OPT(name, field, initial, choices, help) \
    {name, CHOICE, AT(field), initial, 0, 0, choices, help}
#define FLAG_OPT(name, field, help)           {name, FLAG, AT(field), "0", 0, 1, NULL, help}

#endif
