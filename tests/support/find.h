/* find.h - finds bytes in bytes: memmem, which not every C library has.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef FIND_H
#define FIND_H
#include <string.h>

/* The first place of what[n] in in[bytes], or NULL. */
static char *find_bytes(char *in, size_t bytes, const char *what, size_t n) {
    for (size_t i = 0; i + n <= bytes; i++)
        if (memcmp(in + i, what, n) == 0) return in + i;
    return NULL;
}
#endif
