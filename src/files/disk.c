#pragma once
#include "../tensors/threads.c"
#include "safetensors.c"
/* --- files: POSIX calls where they exist, else stdio ---------------------------------------- */

/* A file opened for reading. */
typedef struct mixpi_file {
    mixpi_report *report;
    uint64_t      size;
    uint64_t      at;                   /* of a stream: bytes that were read               */
#if MIXPI_POSIX
    int           descriptor;           /* -1: not open                                    */
#else
    FILE         *stream;               /* NULL: not open                                  */
#endif
} mixpi_file;

/* A file being written: buffered, next to the target, and renamed to the target at the end. */
typedef struct mixpi_save {
    mixpi_report *report;
    mixp_context *ctx;                  /* its device is read; may be NULL                 */
    char         *buffer;               /* MIXPI_SAVE_PIECE bytes                          */
    size_t        filled;
    uint64_t      expected;             /* bytes that the file must have                   */
    uint64_t      sent;                 /* of a stream: bytes that were written            */
    int           made;                 /* 1: the temporary file exists                    */
#if MIXPI_POSIX
    int           descriptor;
#else
    FILE         *stream;
#endif
    char          target[4096], temp[4096 + 256];
} mixpi_save;

static mixp_result mixpi_not_regular(mixpi_report *r) {
    return mixpi_report_fail(r, MIXP_ERR_IO, "not a regular file");
}

/* Fails if the file does not have the expected size, even if all earlier calls succeeded. */
static void mixpi_save_check_size(mixpi_save *s, uint64_t size) {
    if (size != s->expected)
        mixpi_report_fail(s->report, MIXP_ERR_IO, "the system kept %.0f of %.0f bytes",
            (double)size, (double)s->expected);
}

#if MIXPI_POSIX
#  if defined(__linux__) && !defined(__cplusplus)
char *realpath(const char *path, char *resolved);       /* declaration hidden under -std=c99 */
#  endif
#  ifdef O_CLOEXEC
#    define MIXPI_CLOEXEC O_CLOEXEC
#  else
#    define MIXPI_CLOEXEC 0
#  endif

/* A device, a FIFO or a folder: its opening may block, and its reading may never end. */
static int mixpi_is_special(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && !S_ISREG(st.st_mode);
}

static int mixpi_open(const char *path, int flags, mode_t mode) {
    int descriptor;
    do descriptor = open(path, flags | MIXPI_CLOEXEC, mode);
    while (descriptor < 0 && errno == EINTR);
    return descriptor;
}

/* Does errno say that this file system offers no such call? Network and shared drives, FUSE and
 * containers refuse a flush of a folder, or of any file. */
static int mixpi_is_not_offered(void) {
    return errno == EINVAL || errno == ENOSYS || errno == ENOTSUP || errno == EOPNOTSUPP ||
           errno == EPERM || errno == EACCES || errno == EBADF;
}

/* Flushes to the disk, if the file system can. On macOS, fsync stops at the drive's own cache. */
static int mixpi_sync(int descriptor) {
#  ifdef F_FULLFSYNC
    if (fcntl(descriptor, F_FULLFSYNC) == 0) return 0;
#  endif
    while (fsync(descriptor) != 0)
        if (errno != EINTR) return mixpi_is_not_offered() ? 0 : -1;
    return 0;
}

static mixp_result mixpi_file_open(mixpi_file *f, mixpi_report *r) {
    struct stat st;
    f->report = r;
    f->size = 0;
    f->descriptor = -1;
    if (mixpi_is_special(r->path)) return mixpi_not_regular(r);
    f->descriptor = mixpi_open(r->path, O_RDONLY | O_NONBLOCK, 0);
    if (f->descriptor < 0) return mixpi_report_system(r, "cannot open the file");
    if (fstat(f->descriptor, &st) != 0)
        return mixpi_report_system(r, "cannot read the file's status");
    if (!S_ISREG(st.st_mode)) return mixpi_not_regular(r);
    f->size = (uint64_t)st.st_size;
    return MIXP_OK;
}

static void mixpi_file_close(mixpi_file *f) {
    if (f->descriptor >= 0) close(f->descriptor);
}

/* Reads n bytes at an offset, across short reads and interruptions. */
static void mixpi_file_read(mixpi_file *f, uint64_t at, char *to, uint64_t n) {
    if (f->report->result != MIXP_OK) return;
    if (lseek(f->descriptor, (off_t)at, SEEK_SET) < 0)
        mixpi_report_system(f->report, "cannot read");
    while (f->report->result == MIXP_OK && n > 0) {
        size_t most = n < MIXPI_IO_MOST ? (size_t)n : MIXPI_IO_MOST;
        int64_t got = (int64_t)read(f->descriptor, to, most);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) mixpi_report_system(f->report, "cannot read");
        else if (got == 0 || (uint64_t)got > most)
            mixpi_report_fail(
                f->report, MIXP_ERR_IO, "cannot read: the file became shorter during the read");
        else {
            to += got;
            n -= (uint64_t)got;
        }
    }
}

/* Creates a new temporary file next to the target. */
static void mixpi_save_make(mixpi_save *s, mode_t mode) {
    const char *slash = strrchr(s->target, '/');
    const char *name = slash ? slash + 1 : s->target;
    errno = EEXIST;
    for (int number = 0; s->descriptor < 0 && errno == EEXIST && number < 10000; number++) {
        snprintf(s->temp, sizeof s->temp, "%.*s.%.200s.%ld.%d.tmp", (int)(name - s->target),
            s->target, name, (long)getpid(), number);
        s->descriptor = mixpi_open(s->temp, O_WRONLY | O_CREAT | O_EXCL, mode);
    }
    s->made = s->descriptor >= 0;
    if (!s->made) mixpi_report_system(s->report, "cannot create a file in the folder");
}

/* Sets the new file's mode to the old one's. Until then only its owner can read it. A drive that
 * refuses keeps its own mode: the save does not depend on it. */
static void mixpi_save_mode(mixpi_save *s, mode_t mode) {
    struct stat st;
    if (stat(s->temp, &st) == 0 && (st.st_mode & 0777) == (mode & 0777)) return;
    if (chmod(s->temp, mode & 0777) != 0) errno = 0; /* not an error */
}

/* Resolves symbolic links and creates the temporary file with the mode of the target. */
static void mixpi_save_open(mixpi_save *s) {
    mixpi_report *r = s->report;
    struct stat old;
    s->descriptor = -1;
    if (r->result != MIXP_OK) return;
    int exists = realpath(r->path, s->target) != NULL;
    if (!exists && errno != ENOENT) {
        mixpi_report_system(r, "cannot read the file's status");
        return;
    }
    if (!exists) snprintf(s->target, sizeof s->target, "%s", r->path);
    if (mixpi_is_special(s->target)) mixpi_not_regular(r);
    else if (exists && (access(s->target, W_OK) != 0 || stat(s->target, &old) != 0))
        mixpi_report_system(r, "cannot replace the file");
    else mixpi_save_make(s, exists ? 0600 : 0666);
    if (r->result == MIXP_OK && exists) mixpi_save_mode(s, old.st_mode);
}

/* Writes the buffer, across short writes and interruptions. */
static void mixpi_save_flush(mixpi_save *s) {
    const char *from = s->buffer;
    size_t left = s->filled;
    while (s->report->result == MIXP_OK && left > 0) {
        int64_t done = (int64_t)write(s->descriptor, from, left);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) mixpi_report_system(s->report, "cannot write");
        else if (done == 0 || (uint64_t)done > left)
            mixpi_report_fail(s->report, MIXP_ERR_IO,
                "cannot write: the system accepted %.0f of %.0f bytes", (double)done, (double)left);
        else {
            from += done;
            left -= (size_t)done;
        }
    }
    s->filled = 0;
}

/* Flushes the file to the disk, checks its size, and closes it, even if the close is
 * interrupted. */
static void mixpi_save_settle(mixpi_save *s) {
    struct stat st;
    if (s->report->result == MIXP_OK && mixpi_sync(s->descriptor) != 0)
        mixpi_report_system(s->report, "cannot flush the file");
    if (s->report->result == MIXP_OK && fstat(s->descriptor, &st) != 0)
        mixpi_report_system(s->report, "cannot read the new file's status");
    if (s->report->result == MIXP_OK) mixpi_save_check_size(s, (uint64_t)st.st_size);
    if (s->descriptor >= 0 && close(s->descriptor) != 0 && errno != EINTR)
        mixpi_report_system(s->report, "cannot close the file");
}

/* Flushes the folder of the target, which holds the new name. */
static void mixpi_save_sync_folder(mixpi_save *s) {
    char *slash = strrchr(s->target, '/');
    if (slash) slash[1] = '\0';
    int folder = mixpi_open(slash ? s->target : ".", O_RDONLY, 0);
    int done = folder >= 0 ? mixpi_sync(folder) == 0 : mixpi_is_not_offered();
    if (!done)
        mixpi_report_system(s->report, "saved, but the folder could not be flushed to the disk");
    if (folder >= 0) close(folder);
}

static void mixpi_save_rename(mixpi_save *s) {
    if (rename(s->temp, s->target) != 0) {
        mixpi_report_system(s->report, "cannot rename the file");
        return;
    }
    s->made = 0;
    mixpi_save_sync_folder(s);
}
#else
#  ifdef _WIN32
#    define mixpi_tell _ftelli64        /* long has 32 bits there */
#    define mixpi_seek _fseeki64
typedef long long mixpi_file_place;
#  else
#    define mixpi_tell ftell
#    define mixpi_seek fseek
typedef long mixpi_file_place;
#  endif

/* Size of an open file in bytes. Fails if the size cannot be determined. */
static uint64_t mixpi_stream_size(mixpi_report *r, FILE *stream) {
    int64_t size = -1;
    errno = 0;
    if (mixpi_seek(stream, 0, SEEK_END) == 0) size = (int64_t)mixpi_tell(stream);
    if (size < 0) mixpi_report_system(r, "cannot read the file's length");
    else if (size == INT64_MAX) mixpi_not_regular(r); /* perhaps a folder */
    return r->result == MIXP_OK ? (uint64_t)size : 0;
}

static mixp_result mixpi_file_open(mixpi_file *f, mixpi_report *r) {
    f->report = r;
    f->size = 0;
    errno = 0;
    f->stream = fopen(r->path, "rb");
    if (!f->stream) return mixpi_report_system(r, "cannot open the file");
    f->size = mixpi_stream_size(r, f->stream);
    return r->result;
}

static void mixpi_file_close(mixpi_file *f) {
    if (f->stream) fclose(f->stream);
}

static void mixpi_file_read(mixpi_file *f, uint64_t at, char *to, uint64_t n) {
    if (f->report->result != MIXP_OK) return;
    errno = 0;
    if (mixpi_seek(f->stream, (mixpi_file_place)at, SEEK_SET) != 0)
        mixpi_report_system(f->report, "cannot read");
    while (f->report->result == MIXP_OK && n > 0) {
        size_t most = n < MIXPI_IO_MOST ? (size_t)n : MIXPI_IO_MOST;
        if (fread(to, 1, most, f->stream) != most) {
            if (ferror(f->stream)) mixpi_report_system(f->report, "cannot read");
            mixpi_report_fail(
                f->report, MIXP_ERR_IO, "cannot read: the file became shorter during the read");
        }
        to += most;
        n -= most;
    }
}

static void mixpi_save_open(mixpi_save *s) {
    s->stream = NULL;
    if (s->report->result != MIXP_OK) return;
    int n = snprintf(s->target, sizeof s->target, "%s", s->report->path);
    snprintf(s->temp, sizeof s->temp, "%s.tmp", s->target);
    errno = 0;
    s->stream = n < (int)sizeof s->target ? fopen(s->temp, "wb") : NULL;
    s->made = s->stream != NULL;
    if (!s->made) mixpi_report_system(s->report, "cannot create a file in the folder");
}

/* Writes the buffer. stdio hides how much a failed call wrote, so every error is final. */
static void mixpi_save_flush(mixpi_save *s) {
    errno = 0;
    if (s->report->result == MIXP_OK && s->filled > 0 &&
        fwrite(s->buffer, 1, s->filled, s->stream) != s->filled)
        mixpi_report_system(s->report, "cannot write");
    s->filled = 0;
}

/* Closes the file, then reopens it to check its size. */
static void mixpi_save_settle(mixpi_save *s) {
    errno = 0;
    if (s->report->result == MIXP_OK && (fflush(s->stream) != 0 || ferror(s->stream)))
        mixpi_report_system(s->report, "cannot flush the file");
    if (s->stream && fclose(s->stream) != 0)
        mixpi_report_system(s->report, "cannot close the file");
    if (s->report->result != MIXP_OK) return;
    s->stream = fopen(s->temp, "rb");
    if (!s->stream) {
        mixpi_report_system(s->report, "cannot read the new file's status");
        return;
    }
    mixpi_save_check_size(s, mixpi_stream_size(s->report, s->stream));
    fclose(s->stream);
}

/* Renames the file. If rename cannot replace a file, first removes the old one, if it is
 * regular. */
static void mixpi_save_rename(mixpi_save *s) {
    FILE *old = fopen(s->target, "r+b");
    if (old) fclose(old);
    errno = 0;
    if (rename(s->temp, s->target) == 0) {
        s->made = 0;
        return;
    }
    if (!old || remove(s->target) != 0) {
        mixpi_report_system(s->report, "cannot rename the file");
        return;
    }
    if (rename(s->temp, s->target) != 0)
        mixpi_report_system(s->report, "the new file stays as NAME.tmp: cannot rename it");
    s->made = 0; /* renamed, or the only copy: must not be removed */
}
#endif

/* --- a file, or a stream of the program --- */

static mixp_result mixpi_source_open(mixpi_file *f, mixpi_report *r) {
    if (!r->stream) return mixpi_file_open(f, r);
    memset(f, 0, sizeof *f);
    f->report = r;
    f->size = UINT64_MAX / 2; /* not known */
#if MIXPI_POSIX
    f->descriptor = -1;
#endif
    return r->result;
}

/* Reads n bytes at an offset. The offsets in a stream do not decrease; the bytes between are
 * skipped. */
static void mixpi_source_read(mixpi_file *f, uint64_t at, char *to, uint64_t n) {
    const mixp_checkpoint *from = f->report->stream;
    char passed[512];
    if (!from) {
        mixpi_file_read(f, at, to, n);
        return;
    }
    while (f->report->result == MIXP_OK && f->at < at + n) {
        const int wanted = f->at >= at;
        const uint64_t left = wanted ? at + n - f->at : at - f->at;
        const uint64_t most = wanted ? MIXPI_IO_MOST : sizeof passed;
        const size_t part = (size_t)(left < most ? left : most);
        if (from->read_bytes(from->user, wanted ? to + (f->at - at) : passed, part) != 0)
            mixpi_report_fail(f->report, MIXP_ERR_IO,
                "cannot read: the program's read failed after %.0f bytes", (double)f->at);
        f->at += part;
    }
}

/* Sends the buffer to the file, or to the program's stream. */
static void mixpi_save_send(mixpi_save *s) {
    const mixp_checkpoint *to = s->report->stream;
    if (!to) {
        mixpi_save_flush(s);
        return;
    }
    if (s->report->result == MIXP_OK && s->filled &&
        to->write_bytes(to->user, s->buffer, s->filled) != 0)
        mixpi_report_fail(s->report, MIXP_ERR_IO,
            "cannot write: the program's write failed after %.0f of %.0f bytes", (double)s->sent,
            (double)s->expected);
    s->sent += s->filled;
    s->filled = 0;
}

/* Appends n bytes of host or device memory to the file. */
static void mixpi_save_put(mixpi_save *s, const void *data, uint64_t n, int on_device) {
    const char *from = (const char *)data;
    while (s->report->result == MIXP_OK && n > 0) {
        size_t room = MIXPI_SAVE_PIECE - s->filled;
        size_t part = n < room ? (size_t)n : room;
        char *to = s->buffer + s->filled;
        if (!on_device) memcpy(to, from, part);
        else if (mixpi_download(s->ctx, to, from, part) != MIXP_OK)
            mixpi_report_fail(s->report, MIXP_ERR_DEVICE, "the device could not be read");
        s->filled += part;
        from += part;
        n -= part;
        if (s->filled == MIXPI_SAVE_PIECE) mixpi_save_send(s);
    }
}

/* Renames the written file to the target; after an error, removes it. */
static void mixpi_save_end(mixpi_save *s) {
    mixpi_save_send(s);
    if (s->report->stream) return;
    mixpi_save_settle(s);
    if (s->report->result == MIXP_OK) mixpi_save_rename(s);
    if (s->made) remove(s->temp);
}
