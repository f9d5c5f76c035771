/* faults.h - the system's calls with a fault at one of them, in front of the library; files of a test.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* --- the system's calls, with a fault at call number fault_at ------------------------------- */

/* What the call that fails does instead. */
typedef enum fault_kind {
    FAULT_ERROR,            /* fails with fault_errno                                       */
    FAULT_NOTHING,          /* a read or write of 0 bytes; of other calls an error          */
    FAULT_LIE,              /* a write that says all and does all but one byte              */
    FAULT_DEATH             /* the process dies                                             */
} fault_kind;

static int fault_at = -1, fault_calls, fault_errno;
static fault_kind fault_does;
static const char *fault_hit = "";     /* the call that failed                              */
static int in_pieces;       /* one byte a call, and every second call interrupted           */
static long disk_room = -1; /* bytes that still fit on the disk; -1 = any number            */
static long memory_left = -1;   /* requests of malloc that still succeed; -1 = all          */

static char trace[64];     /* of the newest calls: w(rite), s(ync), c(lose), r(ename)        */

static void note(char call) {
    size_t n = strlen(trace);
    if (n == sizeof trace - 1) memmove(trace, trace + 1, n--);
    trace[n] = call;
    trace[n + 1] = '\0';
}

static const char *refused_call;        /* each call of this name fails with refused_errno; NULL = none */
static int refused_errno;

static int fault(const char *call) {
    if (refused_call && strcmp(call, refused_call) == 0) {
        errno = refused_errno;
        return 1;
    }
    if (fault_calls++ != fault_at) return 0;
    if (fault_does == FAULT_DEATH) _exit(9);
    fault_hit = call;
    errno = fault_errno;
    return 1;
}

static int interrupted(void) {
    static unsigned calls;
    if (!in_pieces || calls++ % 2) return 0;
    errno = EINTR;
    return 1;
}

/* How many of n bytes the disk takes now; -1 and ENOSPC when it is full. */
static long room_for(size_t n) {
    long part = in_pieces && n > 1 ? 1 : (long)n;
    if (disk_room < 0) return part;
    if (disk_room == 0 && n > 0) {
        errno = ENOSPC;
        return -1;
    }
    if (part > disk_room) part = disk_room;
    disk_room -= part;
    return part;
}

static void *test_malloc(size_t bytes) {
    if (memory_left == 0) return NULL;
    if (memory_left > 0) memory_left--;
    return malloc(bytes);
}
#define malloc(bytes) test_malloc(bytes)

static int test_rename(const char *from, const char *to) {
    note('r');
    return fault("rename") ? -1 : rename(from, to);
}
#define rename(from, to) test_rename(from, to)

static mode_t created_with;     /* mode of the newest open that may create a file */

#ifdef MIXPREC_NO_POSIX
static size_t test_fwrite(const void *p, size_t size, size_t n, FILE *f) {
    note('w');
    if (fault("fwrite")) {
        if (fault_does != FAULT_LIE) return 0;
        return fwrite(p, 1, n - 1, f) + 1;
    }
    if (interrupted()) return 0;
    long part = room_for(n);
    if (part < (long)n) errno = ENOSPC;         /* stdio also writes the rest */
    return part < 0 ? 0 : fwrite(p, size, (size_t)part, f);
}
static size_t test_fread(void *p, size_t size, size_t n, FILE *f)
{ return fault("fread") || interrupted() ? 0 : fread(p, size, n, f); }
static int test_fflush(FILE *f) { return fault("fflush") ? EOF : fflush(f); }
static FILE *test_fopen(const char *path, const char *mode)
{ return fault("fopen") ? NULL : fopen(path, mode); }
static int test_fseek(FILE *f, long at, int from) { return fault("fseek") ? -1 : fseek(f, at, from); }
static long test_ftell(FILE *f) { return fault("ftell") ? -1 : ftell(f); }
static int test_fclose(FILE *f) {
    note('c');
    int bad = fault("fclose"), error = errno, r = fclose(f);
    if (bad) errno = error;
    return bad ? EOF : r;
}
#  define fwrite(p, size, n, f) test_fwrite(p, size, n, f)
#  define fread(p, size, n, f)  test_fread(p, size, n, f)
#  define fflush(f)             test_fflush(f)
#  define fclose(f)             test_fclose(f)
#  define fopen(path, mode)     test_fopen(path, mode)
/* Their names are what a macro of the header expands to, so they replace the bare words. */
#  define fseek test_fseek
#  define ftell test_ftell
#else
static int test_open(const char *path, int flags, mode_t mode) {
    if (flags & O_CREAT) created_with = mode;
    return fault("open") || interrupted() ? -1 : open(path, flags, mode);
}
static long test_read(int file, void *to, size_t n) {
    if (fault("read")) return fault_does == FAULT_NOTHING ? 0 : -1;
    if (interrupted()) return -1;
    return (long)read(file, to, in_pieces && n > 1 ? 1 : n);
}
static long test_write(int file, const void *from, size_t n) {
    note('w');
    if (fault("write")) {
        if (fault_does == FAULT_LIE) return (long)write(file, from, n - 1) + 1;
        return fault_does == FAULT_NOTHING ? 0 : -1;
    }
    if (interrupted()) return -1;
    long part = room_for(n);
    return part < 0 ? -1 : (long)write(file, from, (size_t)part);
}
static off_t test_lseek(int file, off_t at, int from)
{ return fault("lseek") ? -1 : lseek(file, at, from); }
static int test_stat(const char *path, struct stat *st) { return fault("stat") ? -1 : stat(path, st); }
static int test_fstat(int file, struct stat *st) { return fault("fstat") ? -1 : fstat(file, st); }
static int test_access(const char *path, int mode) { return fault("access") ? -1 : access(path, mode); }
static char *test_realpath(const char *path, char *out)
{ return fault("realpath") ? NULL : realpath(path, out); }
/* Nothing here outlives a power cut: the disk need not be waited for. */
static int test_fsync(int file) {
    struct stat st;
    int folder = fstat(file, &st) == 0 && S_ISDIR(st.st_mode);
    note('s');
    return fault(folder ? "fsync of a folder" : "fsync") || interrupted() ? -1 : 0;
}
static int test_close(int file) {
    note('c');
    int bad = fault("close"), error = errno, r = close(file);
    if (bad) errno = error;
    return bad ? -1 : r;
}
static int test_chmod(const char *path, mode_t mode) { return fault("chmod") ? -1 : chmod(path, mode); }
#  define open(path, flags, mode) test_open(path, flags, mode)
#  define read(file, to, n)       test_read(file, to, n)
#  define write(file, from, n)    test_write(file, from, n)
#  define lseek(file, at, from)   test_lseek(file, at, from)
#  define stat(path, st)          test_stat(path, st)
#  define fstat(file, st)         test_fstat(file, st)
#  define access(path, mode)      test_access(path, mode)
#  define fsync(file)             test_fsync(file)
#  define close(file)             test_close(file)
#  define chmod(path, mode)       test_chmod(path, mode)
/* The header declares it, where a strict C hides it. */
#  define realpath                test_realpath
#endif

#undef  MIXPREC_IMPLEMENTATION_DONE     /* its own copy, with the system's calls replaced */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"

#undef malloc
#undef rename
#ifdef MIXPREC_NO_POSIX
#  undef fwrite
#  undef fread
#  undef fflush
#  undef fclose
#  undef fopen
#  undef fseek
#  undef ftell
#else
#  undef open
#  undef read
#  undef write
#  undef lseek
#  undef stat
#  undef fstat
#  undef access
#  undef fsync
#  undef close
#  undef chmod
#  undef realpath
#endif
#include "test.h"
#include "new_optimizer.h"

#ifdef MIXPREC_NO_POSIX
#  define POSIX 0
#else
#  define POSIX 1
#endif

static void faults_off(void) {
    fault_at = -1;
    fault_calls = in_pieces = 0;
    fault_does = FAULT_ERROR;
    fault_hit = "";
    disk_room = -1;
}

/* --- files ---------------------------------------------------------------------------------- */

static void put_file(const char *path, const void *bytes, size_t n) {
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL);
    if (!f) return;
    if (n) CHECK_INT(fwrite(bytes, 1, n, f), n);
    CHECK(fclose(f) == 0);
}

/* The whole file, to be freed; NULL when there is none. */
static unsigned char *get_file(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    unsigned char *bytes = (unsigned char *)malloc(1 << 22);
    *n = f && bytes ? fread(bytes, 1, 1 << 22, f) : 0;
    if (f) { fclose(f); return bytes; }
    free(bytes);
    return NULL;
}

static int file_is(const char *path, const void *bytes, size_t n) {
    size_t got;
    unsigned char *b = get_file(path, &got);
    int same = b && got == n && memcmp(b, bytes, n) == 0;
    free(b);
    return same;
}

/* How many entries a folder has, "." and ".." apart. */
static int folder_count(const char *path) {
    DIR *d = opendir(path);
    int n = -2;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* A file of a header and n_data bytes 0, 1, 2, ... */
static size_t make(unsigned char *out, const char *header, size_t n_header, size_t n_data) {
    for (size_t i = 0; i < 8; i++) out[i] = (unsigned char)((uint64_t)n_header >> 8 * i & 0xFF);
    memcpy(out + 8, header, n_header);
    for (size_t i = 0; i < n_data; i++) out[8 + n_header + i] = (unsigned char)i;
    return 8 + n_header + n_data;
}

static mixp_result read_bytes(const void *bytes, size_t n, mixp_safetensors **f, char *error) {
    put_file("x.safetensors", bytes, n);
    return mixp_safetensors_read("x.safetensors", f, error, error ? MIXP_MESSAGE_SIZE : 0);
}
