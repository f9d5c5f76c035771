/* disk.h - reads and writes whole files, in folders that may come from elsewhere: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A foreign folder may hold links and pipes in place of files. Links are followed, but only
 * regular files are read: a pipe or a device would block the program. A file is written under another name
 * and renamed: the rename replaces a link of that name, and leaves the link's target unchanged. ../plain_file.h does
 * both for all programs.
 */
#ifndef TRAINER_DISK_H
#define TRAINER_DISK_H

#include <stdint.h>
#include <stdlib.h>
#include "../plain_file.h"
#include "messages.h"

#define PATH_SPACE 1200                 /* a folder and the name of a file in it */

/* Is there a symbolic link of this name? */
static inline int is_link(const char *path) {
    struct stat info;
    return lstat(path, &info) == 0 && S_ISLNK(info.st_mode);
}

/* Opens a regular file for reading. Returns its descriptor, or -1 with errno set. */
static int open_regular(const char *path) { return plain_descriptor(path, O_RDONLY, 0); }

/* Reads from a descriptor to its end, and appends '\0'. Returns NULL with errno set on failure; EFBIG:
 * there are more than `most` bytes. */
static char *read_to_end(int file, int64_t most, int64_t *size) {
    char   *text = NULL;
    size_t  space = 1 << 16, n = 0;
    ssize_t got = 1;
    while (got > 0 && n <= (size_t)most) {
        char *bigger = (char *)realloc(text, space + 1);
        if (!bigger) { free(text); errno = ENOMEM; return NULL; }
        text = bigger;
        got = read(file, text + n, space - n);
        if (got < 0 && errno == EINTR) got = 1;
        else if (got > 0) n += (size_t)got;
        if (n == space) space *= 2;
    }
    if (got < 0 || n > (size_t)most) {
        if (got >= 0) errno = EFBIG;
        free(text);
        return NULL;
    }
    text[n] = '\0';
    *size = (int64_t)n;
    return text;
}

/* Reads a regular file into memory and appends '\0'. Returns NULL on failure: see plain_error. */
static char *read_file(const char *path, int64_t most, int64_t *size) {
    int   file = open_regular(path), why;
    char *text;
    if (file < 0) return NULL;
    text = read_to_end(file, most, size);
    why = errno;
    close(file);
    errno = why;
    return text;
}

/* Writes a temporary file, flushes it to the disk and renames it: after a crash, a full disk or a
 * power cut, either the old or the new file is complete. Returns 0 with errno set on failure, and
 * then leaves no temporary file. */
static int replace_file(const char *path, const char *text, size_t length) {
    char  temporary[PATH_SPACE + 8];
    FILE *f = plain_begin(path, temporary, sizeof temporary);
    if (!f) return 0;
    fwrite(text, 1, length, f);
    return plain_end(f, temporary, path) == 0;
}

/* Copies a regular file; otherwise as replace_file. */
static inline int copy_file(const char *from, const char *path) {
    char   temporary[PATH_SPACE + 8], buffer[1 << 16];
    size_t got = 1;
    int    why = 0;
    FILE  *source = plain_open(from), *f = source ? plain_begin(path, temporary, sizeof temporary) : NULL;
    if (!f) why = errno;
    while (f && got > 0 && !ferror(source)) {
        got = fread(buffer, 1, sizeof buffer, source);
        fwrite(buffer, 1, got, f);
    }
    if (f && ferror(source)) why = EIO;
    if (source) fclose(source);
    if (f) why = plain_end_after(f, temporary, path, why);
    errno = why;
    return !why;
}

/* Makes the temporary file of `path` for a writer that takes a name and would follow a link. Dies on failure; the
 * caller ends with plain_rename. */
static void begin_target(const char *path, char *temporary, size_t space) {
    FILE *f = plain_begin(path, temporary, space);
    if (!f) die(1, "cannot write %s: %s", path, plain_error());
    fclose(f);
}

/* Dies before any work if a file that will be written at `path` cannot be: a folder or a device has the name, or the
 * folder cannot be written. named_by: the option, for the message. */
static void check_target(const char *path, const char *named_by) {
    char  temporary[PATH_SPACE + 8];
    FILE *f = plain_begin(path, temporary, sizeof temporary);
    if (!f) die(1, "cannot write %s: %s. Check %s", path, plain_error(), named_by);
    fclose(f);
    remove(temporary);
}

#endif
