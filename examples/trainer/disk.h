/* disk.h - reads and writes whole files, in folders that may come from elsewhere: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A foreign folder may hold links and pipes in place of files. Links are followed, but only
 * regular files are read: a pipe or a device would block the program. A file is written under another name
 * and renamed: the rename replaces a link of that name, and leaves the link's target unchanged.
 */
#ifndef TRAINER_DISK_H
#define TRAINER_DISK_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_SPACE 1200                 /* a folder and the name of a file in it */

/* Why a file cannot be read: the system's reason, or ours for what is no regular file. */
static const char *read_error(void) {
    return errno == ENXIO ? "not a regular file" : errno == EFBIG ? "too large" : strerror(errno);
}

/* Is there a symbolic link of this name? */
static int is_link(const char *path) {
    struct stat info;
    return lstat(path, &info) == 0 && S_ISLNK(info.st_mode);
}

/* Opens a regular file for reading. Returns its descriptor, or -1 with errno set; ENXIO: a folder, a
 * pipe or a device. Waits for no other program. */
static int open_regular(const char *path) {
    struct stat info;
    int         why, file = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (file < 0) return -1;
    why = fstat(file, &info) != 0 ? errno : S_ISREG(info.st_mode) ? 0 : ENXIO;
    if (!why) return file;
    close(file);
    errno = why;
    return -1;
}

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

/* Reads a regular file into memory and appends '\0'. Returns NULL on failure: see read_error. */
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

/* Creates a file that did not exist. A link or a file of that name is removed first. Returns NULL with
 * errno set on failure. */
static FILE *create_file(const char *path) {
    int   file;
    FILE *f;
    if (unlink(path) != 0 && errno != ENOENT) return NULL;
    file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0666);
    f = file < 0 ? NULL : fdopen(file, "wb");
    if (!f && file >= 0) close(file);
    return f;
}

/* Flushes a file to the disk and closes it. Returns 0, or the errno of the failed call. */
static int finish_file(FILE *f) {
    int why = ferror(f) ? EIO : 0;
    if (fflush(f) != 0 || (fsync(fileno(f)) != 0 && errno != EINVAL && errno != ENOTSUP && errno != ENOSYS))
        why = errno;
    if (fclose(f) != 0 && !why) why = errno;
    return why;
}

/* Gives the temporary file the name `path`. Returns 1, or 0 with errno set; why: what failed before. */
static int rename_file(const char *temporary, const char *path, int why) {
    if (!why && rename(temporary, path) != 0) why = errno;
    if (why) remove(temporary);
    errno = why;
    return !why;
}

/* Writes a temporary file, flushes it to the disk and renames it: after a crash, a full disk or a
 * power cut, either the old or the new file is complete. Returns 0 with errno set on failure, and
 * then leaves no temporary file. */
static int replace_file(const char *path, const char *text, size_t length) {
    char   temporary[PATH_SPACE + 8];
    FILE  *f;
    size_t written;
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    f = create_file(temporary);
    if (!f) return 0;
    written = fwrite(text, 1, length, f);
    return rename_file(temporary, path, written == length ? finish_file(f) : (finish_file(f), errno));
}

/* Copies a regular file; otherwise as replace_file. */
static int copy_file(const char *from, const char *path) {
    char    temporary[PATH_SPACE + 8], buffer[1 << 16];
    ssize_t got = 1;
    int     why = 0, source = open_regular(from);
    FILE   *f;
    if (source < 0) return 0;
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    f = create_file(temporary);
    while (f && !why && got > 0) {
        got = read(source, buffer, sizeof buffer);
        if (got < 0 || (got > 0 && fwrite(buffer, 1, (size_t)got, f) != (size_t)got)) why = errno;
    }
    if (!f) why = errno;
    close(source);
    if (!f) { errno = why; return 0; }
    return rename_file(temporary, path, why ? (finish_file(f), why) : finish_file(f));
}

#endif
