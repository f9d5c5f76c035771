/* plain_file.h - opens files in folders that may come from elsewhere: only regular files, and writes through no link
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * C99 and C++11. The programs and add-ons of examples/ open every file here, so that a folder from another person can
 * neither make a program wait nor send what it writes elsewhere:
 *
 *     FILE *in = plain_open("chats.jsonl");                   through links; no FIFO, folder or device
 *     FILE *log = plain_log("run/metrics.jsonl", 1);          grows under its own name, which is no link
 *     char  temporary[1280];                                  a file that gets its name when it is complete
 *     FILE *out = plain_begin("model.gguf", temporary, sizeof temporary);
 *     ...
 *     if (plain_end(out, temporary, "model.gguf") != 0) perror("model.gguf");
 *
 * A failed call sets errno; ENXIO: the name is a folder, a FIFO or a device. A strict C (-std=c99 without
 * _POSIX_C_SOURCE) hides the calls for this: then stdio opens the files, a link is followed where a log is written,
 * and nothing is flushed to the disk. */
#ifndef PLAIN_FILE_H
#define PLAIN_FILE_H

#include <errno.h>
#include <stdio.h>
#include <string.h>
#if defined(_POSIX_C_SOURCE) && _POSIX_C_SOURCE >= 200809L
#  include <fcntl.h>
#  include <sys/stat.h>
#  include <unistd.h>
#  define PLAIN_POSIX 1
#else
#  define PLAIN_POSIX 0
#  if defined(__unix__) || defined(__APPLE__)
#    include <sys/stat.h>
#  endif
#endif

/* Why a file of plain_open cannot be read: the system's reason, or ours. */
static inline const char *plain_error(void) {
    return errno == ENXIO ? "not a regular file" : errno == EFBIG ? "too large" : strerror(errno);
}

#if PLAIN_POSIX
/* The one call of open: a descriptor of a regular file, or -1. Waits for no other program. also: one more kind of file
 * that may be read, such as S_IFIFO, or 0. */
static inline int plain_descriptor(const char *path, int flags, mode_t also) {
    struct stat info;
    int why, file = open(path, flags | (also ? 0 : O_NONBLOCK) | O_NOCTTY | O_CLOEXEC, 0666);
    if (file < 0) return -1;
    why = fstat(file, &info) != 0 ? errno : 0;
    if (!why && !S_ISREG(info.st_mode) && (!also || (info.st_mode & S_IFMT) != also)) why = ENXIO;
    if (!why) return file;
    close(file);
    errno = why;
    return -1;
}

static inline FILE *plain_stream(int file, const char *mode) {
    FILE *f = file < 0 ? NULL : fdopen(file, mode);
    if (!f && file >= 0) close(file);
    return f;
}

/* May plain_end give a file this name? A link may be replaced; its target does not change. */
static inline int plain_may_replace(const char *path) {
    struct stat info;
    if (lstat(path, &info) != 0) return errno == ENOENT;
    errno = S_ISDIR(info.st_mode) ? EISDIR : ENXIO;
    return S_ISREG(info.st_mode) || S_ISLNK(info.st_mode);
}

static inline FILE *plain_open(const char *path) { return plain_stream(plain_descriptor(path, O_RDONLY, 0), "rb"); }

/* A file that the program writes to while others may read it. append 0: an old file is emptied. A link is refused. */
static inline FILE *plain_log(const char *path, int append) {
    FILE *f = plain_stream(plain_descriptor(path, O_WRONLY | O_CREAT | O_NOFOLLOW | (append ? O_APPEND : 0), 0),
                           append ? "ab" : "wb");
    if (f && !append && ftruncate(fileno(f), 0) != 0) {
        fclose(f);
        return NULL;
    }
    return f;
}

/* Makes a new file that replaces anything with this name; a folder is refused. */
static inline FILE *plain_new(const char *path) {
    if (unlink(path) != 0 && errno != ENOENT) return NULL;
    return plain_stream(plain_descriptor(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0), "wb");
}

/* Writes the file's bytes to the disk, where the drive has such a call. Returns 0 or the errno. */
static inline int plain_flush(FILE *f) {
    if (ferror(f)) return EIO;
    if (fflush(f) != 0) return errno;
    return fsync(fileno(f)) != 0 && errno != EINVAL && errno != ENOTSUP && errno != ENOSYS ? errno : 0;
}

#else
static inline int plain_may_replace(const char *path) {
#  if defined(__unix__) || defined(__APPLE__)
    struct stat info;
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) {
        errno = ENXIO;
        return 0;
    }
#  endif
    return path[0] != 0;
}
static inline FILE *plain_open(const char *path) { return plain_may_replace(path) ? fopen(path, "rb") : NULL; }
static inline FILE *plain_log(const char *path, int append) {
    return plain_may_replace(path) ? fopen(path, append ? "ab" : "wb") : NULL;
}
static inline FILE *plain_new(const char *path) {
    if (!plain_may_replace(path)) return NULL;
    remove(path);
    return fopen(path, "wb");
}
static inline int plain_flush(FILE *f) { return ferror(f) ? EIO : fflush(f) != 0 ? errno : 0; }
#endif

/* Begins a file that plain_end names `path`: PATH.tmp, whose name is written to temporary[space]. */
static inline FILE *plain_begin(const char *path, char *temporary, size_t space) {
    if (!plain_may_replace(path)) return NULL;
    if (snprintf(temporary, space, "%s.tmp", path) < (int)space) return plain_new(temporary);
    errno = ENAMETOOLONG;
    return NULL;
}

/* Gives a complete temporary file the name `path`. why: 0, or the errno of what failed before; then the temporary
 * file is removed, and the file at `path` is unchanged. Returns 0, or an errno that it also sets. */
static inline int plain_rename(const char *temporary, const char *path, int why) {
    if (!why && !plain_may_replace(path)) why = errno;
#ifdef _WIN32
    if (!why) remove(path); /* rename replaces no file there */
#endif
    if (!why && rename(temporary, path) != 0) why = errno;
    if (why) remove(temporary);
    errno = why;
    return why;
}

/* Flushes the file of plain_begin to the disk, closes it and renames it: after a crash, a full disk or a power cut,
 * either the old or the new file is complete. why and result: as of plain_rename. */
static inline int plain_end_after(FILE *f, const char *temporary, const char *path, int why) {
    if (!why) why = plain_flush(f);
    if (fclose(f) != 0 && !why) why = errno;
    return plain_rename(temporary, path, why);
}

static inline int plain_end(FILE *f, const char *temporary, const char *path) {
    return plain_end_after(f, temporary, path, 0);
}

#endif
