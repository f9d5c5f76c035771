/* memory_disk.h - files in memory: the system's calls that mixprec.h makes, so that a fuzzer opens
 * thousands of files a second. Include it in place of mixprec.h: it has the implementation. Where
 * MEMORY_DISK_LINKED says so that is another object, this file compiled with MEMORY_DISK_OBJECT.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef MEMORY_DISK_H
#define MEMORY_DISK_H
#define _XOPEN_SOURCE 700
#define FUZZ_OF_FILES
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DISK_FILES = 8, DISK_FOLDER = 99 };

typedef struct disk_file { char name[300]; unsigned char *data; size_t size; int is_there; } disk_file;

#ifdef MEMORY_DISK_LINKED
extern disk_file disk[DISK_FILES];
int disk_find(const char *name);
void disk_put(const char *name, const void *bytes, size_t n);
int disk_remove(const char *path);
#  include "mixprec.h"
#else
#ifdef MEMORY_DISK_OBJECT
#  define DISK_API
#else
#  define DISK_API static
#endif

DISK_API disk_file disk[DISK_FILES];
static struct { int file; size_t at; } disk_open_files[DISK_FILES];    /* by descriptor */

DISK_API int disk_find(const char *name) {
    for (int i = 0; i < DISK_FILES; i++)
        if (disk[i].is_there && strcmp(disk[i].name, name) == 0) return i;
    errno = ENOENT;
    return -1;
}

static int disk_make(const char *name) {
    int i = 0;
    while (i < DISK_FILES && disk[i].is_there) i++;
    if (i == DISK_FILES || strlen(name) >= sizeof disk[i].name) abort();
    strcpy(disk[i].name, name);
    disk[i].size = 0;
    disk[i].is_there = 1;
    return i;
}

DISK_API void disk_put(const char *name, const void *bytes, size_t n) {
    int i = disk_find(name);
    if (i < 0) i = disk_make(name);
    disk[i].data = (unsigned char *)realloc(disk[i].data, n + 1);
    if (!disk[i].data) abort();
    if (n) memcpy(disk[i].data, bytes, n);
    disk[i].size = n;
}

static int disk_open(const char *path, int flags, mode_t mode) {
    int i, d = 0;
    (void)mode;
    if (strcmp(path, ".") == 0) return DISK_FOLDER;
    i = disk_find(path);
    if (flags & O_CREAT) {
        if (i >= 0) { errno = EEXIST; return -1; }
        i = disk_make(path);
    }
    if (i < 0) return -1;
    while (d < DISK_FILES && disk_open_files[d].file) d++;
    if (d == DISK_FILES) abort();
    disk_open_files[d].file = i + 1;
    disk_open_files[d].at = 0;
    return d;
}

static disk_file *disk_of(int descriptor) { return &disk[disk_open_files[descriptor].file - 1]; }

static long disk_read(int d, void *to, size_t n) {
    disk_file *f = disk_of(d);
    size_t at = disk_open_files[d].at, left = at < f->size ? f->size - at : 0;
    if (n > left) n = left;
    if (n) memcpy(to, f->data + at, n);
    disk_open_files[d].at += n;
    return (long)n;
}

static long disk_write(int d, const void *from, size_t n) {
    disk_file *f = disk_of(d);
    f->data = (unsigned char *)realloc(f->data, f->size + n + 1);
    if (!f->data) abort();
    memcpy(f->data + f->size, from, n);
    f->size += n;
    return (long)n;
}

static off_t disk_seek(int d, off_t at, int from) {
    if (from != SEEK_SET) abort();
    disk_open_files[d].at = (size_t)at;
    return at;
}

static void disk_describe(struct stat *st, size_t size) {
    memset(st, 0, sizeof *st);
    st->st_mode = S_IFREG | 0644;
    st->st_size = (off_t)size;
}

static int disk_stat(const char *path, struct stat *st) {
    int i = disk_find(path);
    if (i >= 0) disk_describe(st, disk[i].size);
    return i >= 0 ? 0 : -1;
}

static int disk_fstat(int d, struct stat *st) {
    disk_describe(st, disk_of(d)->size);
    return 0;
}

static int disk_close(int d) {
    if (d != DISK_FOLDER) disk_open_files[d].file = 0;
    return 0;
}

DISK_API int disk_remove(const char *path) {
    int i = disk_find(path);
    if (i >= 0) disk[i].is_there = 0;
    return i >= 0 ? 0 : -1;
}

static int disk_rename(const char *from, const char *to) {
    int i = disk_find(from);
    if (i < 0) return -1;
    disk_remove(to);
    strcpy(disk[i].name, to);
    return 0;
}

static char *disk_realpath(const char *path, char *out)
{ return disk_find(path) >= 0 ? strcpy(out, path) : NULL; }

#define open(path, flags, mode) disk_open(path, flags, mode)
#define read(d, to, n)          disk_read(d, to, n)
#define write(d, from, n)       disk_write(d, from, n)
#define lseek(d, at, from)      disk_seek(d, at, from)
#define stat(path, st)          disk_stat(path, st)
#define fstat(d, st)            disk_fstat(d, st)
#define close(d)                disk_close(d)
#define access(path, mode)      0
#define chmod(path, mode)       0
#define fsync(d)                ((void)(d), 0)
#define remove(path)            disk_remove(path)
#define rename(from, to)        disk_rename(from, to)
#define realpath                disk_realpath

#undef  MIXPREC_IMPLEMENTATION_DONE     /* its own copy, with the system's calls replaced */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#undef read
#undef write
#undef open
#undef close
#undef stat
#undef remove
#undef rename
#endif
#endif
