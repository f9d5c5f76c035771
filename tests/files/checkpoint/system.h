/* system.h - paths, permissions, full disks, a fault and a death at each system call of a save and of a read.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* --- the system ------------------------------------------------------------------------------- */

static mixp_result save_number(const char *path, double d, char *error) {
    mixp_st_entry e = entry("x", NULL, MIXP_F64, 0, 0, 0, &d, sizeof d);
    return mixp_safetensors_write(path, &e, 1, NULL, 0, error, error ? MIXP_MESSAGE_SIZE : 0);
}

/* The number that save_number wrote; -1 when the file cannot be read. */
static double load_number(const char *path) {
    mixp_safetensors *f;
    double d = -1.0;
    if (mixp_safetensors_read(path, &f, NULL, 0) != MIXP_OK) return d;
    memcpy(&d, mixp_safetensors_find(f, "x")->data, sizeof d);
    mixp_safetensors_free(f);
    return d;
}

/* A tensor of more than the writer's buffer, each element the same number. */
enum { BIG = 140000 };

static mixp_result save_big(const char *path, double number, char *error) {
    static double data[BIG];
    mixp_st_entry e = entry("x", NULL, MIXP_F64, 1, BIG, 0, data, sizeof data);
    for (int i = 0; i < BIG; i++) data[i] = number;
    return mixp_safetensors_write(path, &e, 1, NULL, 0, error, error ? MIXP_MESSAGE_SIZE : 0);
}

/* The number that save_big wrote; -1 when the file cannot be read or holds two. */
static double load_big(const char *path) {
    mixp_safetensors *f;
    double d = -1.0;
    int i;
    if (mixp_safetensors_read(path, &f, NULL, 0) != MIXP_OK) return d;
    const double *data = (const double *)mixp_safetensors_at(f, 0)->data;
    for (i = 1; i < BIG && memcmp(&data[i], &data[0], sizeof d) == 0; i++) { }
    if (i == BIG) d = data[0];
    mixp_safetensors_free(f);
    return d;
}

static void test_bad_paths(void) {
    char error[MIXP_MESSAGE_SIZE], name[400];
    mixp_safetensors *f;
    static const char *const bad[] = { "", "nowhere/x", "folder", "folder/", "x/", "." };
    put_file("x", "old", 3);
    CHECK(mkdir("folder", 0777) == 0);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_INT(save_number(bad[i], 1.0, error), MIXP_ERR_IO);
        CHECK(error[0]);
        CHECK_INT(mixp_safetensors_read(bad[i], &f, error, MIXP_MESSAGE_SIZE), MIXP_ERR_IO);
    }
    memset(name, 'n', sizeof name);
    name[300] = '\0';
    CHECK_INT(save_number(name, 1.0, error), MIXP_ERR_IO);
    CHECK_INT(mixp_safetensors_read(name, &f, error, MIXP_MESSAGE_SIZE), MIXP_ERR_IO);
    if (POSIX) {    /* a device is no checkpoint: it must neither be read for ever nor replaced */
        CHECK_INT(mixp_safetensors_read("/dev/zero", &f, error, MIXP_MESSAGE_SIZE), MIXP_ERR_IO);
        CHECK_INT(save_number("/dev/full", 1.0, error), MIXP_ERR_IO);
        CHECK_TEXT(error, "not a regular file");
        CHECK(mkfifo("fifo", 0666) == 0);
        CHECK_INT(mixp_safetensors_read("fifo", &f, error, MIXP_MESSAGE_SIZE), MIXP_ERR_IO);
        CHECK_INT(save_number("fifo", 1.0, error), MIXP_ERR_IO);
        remove("fifo");
        name[250] = '\0';       /* the longest names are fine, though the temporary one is longer */
        CHECK_INT(save_number(name, 1.0, error), MIXP_OK);
        remove(name);
    }
    CHECK(file_is("x", "old", 3));
    CHECK_INT(folder_count("folder"), 0);
    CHECK(rmdir("folder") == 0);
}

static void test_no_permission(void) {
    char error[MIXP_MESSAGE_SIZE];
    mixp_safetensors *f;
    if (geteuid() == 0) {       /* everything is permitted: ask as nobody */
        pid_t child = fork();
        int status = 1;
        CHECK(chmod(".", 0777) == 0);
        if (child == 0) {
            if (setuid(65534) != 0) _exit(77);
            test_no_permission();
            _exit(test_bad ? 1 : 0);
        }
        waitpid(child, &status, 0);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77) SKIP("cannot become another user");
        CHECK_INT(status, 0);
        CHECK(chmod(".", 0700) == 0);
        return;
    }
    CHECK(mkdir("locked", 0777) == 0);
    CHECK_INT(save_number("locked/x", 5.0, error), MIXP_OK);
    CHECK(chmod("locked", 0555) == 0);
    CHECK_INT(save_number("locked/x", 6.0, error), MIXP_ERR_IO);
    CHECK_TEXT(error, strerror(EACCES));
    CHECK_NEAR(load_number("locked/x"), 5.0, 0.0);
    CHECK(chmod("locked", 0777) == 0 && chmod("locked/x", 0) == 0);
    CHECK_INT(mixp_safetensors_read("locked/x", &f, error, MIXP_MESSAGE_SIZE), MIXP_ERR_IO);
    CHECK_TEXT(error, strerror(EACCES));
    if (POSIX) CHECK_INT(save_number("locked/x", 6.0, error), MIXP_ERR_IO);     /* protected: kept */
    CHECK(remove("locked/x") == 0 && rmdir("locked") == 0);
}

/* On a disk of 64 KB: what does not fit leaves the old file and no other; nor does a disk that
 * has become read-only change. Run by the test below, in a mount namespace of its own. */
static int on_a_small_disk(void) {
    char error[MIXP_MESSAGE_SIZE];
    CHECK_INT(save_number("disk/x", 1.0, error), MIXP_OK);
    CHECK_INT(save_big("disk/x", 2.0, error), MIXP_ERR_IO);
    CHECK_TEXT(error, strerror(ENOSPC));
    CHECK_NEAR(load_number("disk/x"), 1.0, 0.0);
    CHECK_INT(folder_count("disk"), 1);
    CHECK_INT(save_number("disk/x", 3.0, error), MIXP_OK);
    if (system("mount -o remount,ro disk") != 0) return 77;
    CHECK_INT(save_number("disk/x", 4.0, error), MIXP_ERR_IO);
    CHECK_TEXT(error, strerror(EROFS));
    CHECK_NEAR(load_number("disk/x"), 3.0, 0.0);
    return test_bad != 0;
}

static char program[4096];      /* this one's path */

static void test_real_disks(void) {
    char command[4096 + 200];
    if (geteuid() != 0) SKIP("only root can mount");
    CHECK(mkdir("disk", 0777) == 0);
    snprintf(command, sizeof command, "unshare -m sh -c 'mount -t tmpfs -o size=64k tmpfs disk || exit 77; "
             "exec \"%s\" --small-disk' 2>mount.log", program);
    int status = system(command);
    CHECK(rmdir("disk") == 0 && remove("mount.log") == 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) > 1) SKIP("no file system can be mounted here");
    CHECK_INT(WEXITSTATUS(status), 0);
}

static mode_t mode_of(const char *path) {
    struct stat st;
    return lstat(path, &st) == 0 ? st.st_mode & 0777 : 0;
}

static void test_mode_and_links(void) {
    mode_t mask = umask(027);
    struct stat st;
    CHECK_INT(save_number("m", 1.0, NULL), MIXP_OK);
    CHECK_INT(mode_of("m"), 0640);      /* 0666 without the mask */
    if (POSIX) {
        CHECK(chmod("m", 0606) == 0);
        CHECK_INT(save_number("m", 2.0, NULL), MIXP_OK);
        CHECK_INT(mode_of("m"), 0606);
        CHECK_INT(created_with, 0600);  /* nobody else can open it before it has that mode */
        CHECK(mkdir("far", 0777) == 0 && symlink("far/real", "s1") == 0 && symlink("s1", "s2") == 0);
        CHECK_INT(save_number("far/real", 3.0, NULL), MIXP_OK);
        CHECK_INT(save_number("s2", 4.0, NULL), MIXP_OK);
        CHECK_NEAR(load_number("far/real"), 4.0, 0.0);
        CHECK(lstat("s1", &st) == 0 && S_ISLNK(st.st_mode) && lstat("s2", &st) == 0 && S_ISLNK(st.st_mode));
        CHECK(link("far/real", "hard") == 0);
        CHECK_INT(save_number("s1", 5.0, NULL), MIXP_OK);       /* a hard link keeps the old content */
        CHECK_NEAR(load_number("hard"), 4.0, 0.0);
        CHECK(symlink("loop", "loop") == 0);
        CHECK_INT(save_number("loop", 1.0, NULL), MIXP_ERR_IO);
        CHECK(remove("far/real") == 0 && rmdir("far") == 0 && remove("hard") == 0);
        CHECK(remove("s1") == 0 && remove("s2") == 0 && remove("loop") == 0);
    }
    umask(mask);
    CHECK(remove("m") == 0);
}

/* May a save be right although this call of it failed? */
static int may_pass(const char *call) {
    static const char *const posix[] = { "stat", "close", "chmod" };   /* a look ahead; the folder's */
    static const char *const stdio[] = { "fopen", "fclose", "rename" };   /* of the old file */
    for (size_t i = 0; POSIX && i < 3; i++) if (strcmp(call, posix[i]) == 0) return 1;
    for (size_t i = 0; !POSIX && i < 3; i++) if (strcmp(call, stdio[i]) == 0) return 1;
    return 0;
}

/* One fault in a save: an error and the old file, or the new one; no leftovers. Returns 0 when
 * the save has no call of that number. */
static int one_fault(int at, fault_kind kind, int reason) {
    char error[MIXP_MESSAGE_SIZE];
    int files = folder_count("."), hit;
    fault_calls = 0;
    fault_at = at;
    fault_does = kind;
    fault_errno = reason;
    mixp_result r = save_big("f", 2.0, error);
    hit = fault_calls > at;
    const char *call = fault_hit;
    faults_off();
    double now = load_big("f");
    CHECK_INT(folder_count("."), files);
    CHECK(now > 1.5 || r != MIXP_OK);
    CHECK(r == MIXP_OK || r == MIXP_ERR_IO);
    if (r != MIXP_OK) {
        CHECK_NEAR(now, strstr(error, "saved, but") ? 2.0 : 1.0, 0.0);
        if (strstr(error, strerror(0))) TEST_SHOW("%s: %s", call, error);
        CHECK(!strstr(error, strerror(0)));      /* "Success" is no reason */
        if (kind == FAULT_ERROR && strcmp(call, "access") != 0) CHECK_TEXT(error, strerror(reason));
    } else if (hit && reason != EINTR && !may_pass(call)) {
        TEST_SHOW("a failed %s passed unseen", call);
        CHECK(0);
    }
    return hit;
}

static void test_fault_at_each_call(void) {
    static const struct { fault_kind kind; int reason; } faults[] = {
        { FAULT_ERROR, ENOSPC }, { FAULT_ERROR, EIO }, { FAULT_ERROR, EDQUOT }, { FAULT_ERROR, EINTR },
        { FAULT_NOTHING, EIO }, { FAULT_LIE, EIO } };
    int at, cases = 0;
    for (size_t k = 0; k < sizeof faults / sizeof faults[0]; k++, cases += at) {
        at = 0;
        do {
            faults_off();
            CHECK_INT(save_big("f", 1.0, NULL), MIXP_OK);
        } while (one_fault(at++, faults[k].kind, faults[k].reason));
        CHECK(at > (POSIX ? 15 : 10));
    }
    trace[0] = '\0';       /* the file is on the disk before it gets its name, the name after */
    CHECK_INT(save_number("f", 1.0, NULL), MIXP_OK);
    if (POSIX) CHECK(strlen(trace) >= 6 && strcmp(trace + strlen(trace) - 6, "wscrsc") == 0);
    printf("  %d saves\n", cases);
    remove("f");
}

/* Drives that refuse what a save can do without: shared and network drives, containers. */
static void test_refused_niceties(void) {
#if POSIX
    static const char *const calls[] = { "chmod", "fsync of a folder", "fsync" };
    static const int offered_by_none[] = { EINVAL, ENOSYS, ENOTSUP, EOPNOTSUPP, EPERM, EACCES };
    char error[MIXP_MESSAGE_SIZE] = "";
    struct stat st;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        for (size_t k = 0; k < sizeof offered_by_none / sizeof offered_by_none[0]; k++) {
            CHECK_INT(save_number("f", 1.0, NULL), MIXP_OK);
            CHECK(chmod("f", 0640) == 0);
            refused_call = calls[i];
            refused_errno = offered_by_none[k];
            CHECK_INT(save_number("f", 2.0, error), MIXP_OK);
            refused_call = NULL;
            if (*error) TEST_SHOW("%s: %s", calls[i], error);
            CHECK_NEAR(load_number("f"), 2.0, 0.0);
            CHECK(stat("f", &st) == 0);
            CHECK_INT(st.st_mode & 0777, i ? 0640 : 0600);      /* never wider than it was */
            remove("f");
        }
    /* A flush that the drive has, and that fails, is told: whether the file is there or not. */
    refused_errno = EIO;
    for (size_t i = 1; i < 3; i++) {
        refused_call = NULL;
        CHECK_INT(save_number("f", 1.0, NULL), MIXP_OK);
        refused_call = calls[i];
        CHECK_INT(save_number("f", 2.0, error), MIXP_ERR_IO);
        CHECK(!strstr(error, "saved, but") == (i == 2));
        CHECK_NEAR(load_number("f"), i == 1 ? 2.0 : 1.0, 0.0);
    }
    refused_call = NULL;
    remove("f");
#else
    SKIP("stdio has no such calls");
#endif
}

/* A disk that is full after any number of bytes: the old file stays, and the message says why. */
static void test_full_disk(void) {
    char error[MIXP_MESSAGE_SIZE];
    struct stat st;
    long n;
    CHECK_INT(save_number("f", 1.0, NULL), MIXP_OK);
    int files = folder_count(".");
    CHECK(stat("f", &st) == 0 && st.st_size > 50);
    for (n = 0; n < (long)st.st_size; n++) {
        disk_room = n;
        CHECK_INT(save_number("f", 2.0, error), MIXP_ERR_IO);
        faults_off();
        CHECK_TEXT(error, strerror(ENOSPC));
        CHECK_NEAR(load_number("f"), 1.0, 0.0);
    }
    disk_room = n;
    CHECK_INT(save_number("f", 2.0, error), MIXP_OK);
    faults_off();
    CHECK_NEAR(load_number("f"), 2.0, 0.0);
    CHECK_INT(folder_count("."), files);
    printf("  %ld saves\n", n);
    remove("f");
}

/* Each call of a read fails, is interrupted, or finds less than there was. */
static void test_fault_at_each_call_of_a_read(void) {
    static const struct { fault_kind kind; int reason; } faults[] = {
        { FAULT_ERROR, EIO }, { FAULT_ERROR, EACCES }, { FAULT_ERROR, EINTR }, { FAULT_NOTHING, EIO } };
    int at, cases = 0;
    CHECK_INT(save_big("f", 3.0, NULL), MIXP_OK);
    for (size_t k = 0; k < sizeof faults / sizeof faults[0]; k++) {
        for (at = 0; ; at++) {
            char error[MIXP_MESSAGE_SIZE];
            mixp_safetensors *f;
            fault_calls = 0;
            fault_at = at;
            fault_does = faults[k].kind;
            fault_errno = faults[k].reason;
            mixp_result r = mixp_safetensors_read("f", &f, error, sizeof error);
            CHECK((r == MIXP_OK) == (f != NULL));
            CHECK(r == MIXP_OK || r == MIXP_ERR_IO);
            CHECK(r == MIXP_OK || !strstr(error, strerror(0)));
            if (r == MIXP_OK && faults[k].reason != EINTR && fault_calls > at)
                CHECK(strcmp(fault_hit, "stat") == 0 || strcmp(fault_hit, "close") == 0 ||
                      strcmp(fault_hit, "fclose") == 0);
            if (f) CHECK(((const double *)mixp_safetensors_at(f, 0)->data)[BIG - 1] > 2.9);
            mixp_safetensors_free(f);
            if (fault_calls <= at) break;
            faults_off();
        }
        faults_off();
        CHECK(at >= 7);
        cases += at;
    }
    printf("  %d reads\n", cases);
    remove("f");
}

/* Without memory at the k-th request of a write or a read: an error, and nothing is lost. */
static void test_out_of_memory_for_a_file(void) {
    static const char *const metadata[1][2] = { { "format", "pt" } };
    double d = 2.0;
    mixp_st_entry e = entry("x", NULL, MIXP_F64, 0, 0, 0, &d, sizeof d);
    char error[MIXP_MESSAGE_SIZE];
    mixp_safetensors *f = NULL;
    mixp_result r = MIXP_ERR_MEMORY;
    long k;
    CHECK_INT(save_number("f", 1.0, NULL), MIXP_OK);
    int files = folder_count(".");
    for (k = 0; r == MIXP_ERR_MEMORY && k < 100; k++) {
        CHECK_NEAR(load_number("f"), 1.0, 0.0);
        memory_left = k;
        r = mixp_safetensors_write("f", &e, 1, metadata, 1, error, sizeof error);
        memory_left = -1;
        if (r != MIXP_OK) CHECK_TEXT(error, "out of memory");
        CHECK_INT(folder_count("."), files);
    }
    CHECK_INT(r, MIXP_OK);
    CHECK(k > 4);
    for (k = 0, r = MIXP_ERR_MEMORY; r == MIXP_ERR_MEMORY && k < 100; k++) {
        memory_left = k;
        r = mixp_safetensors_read("f", &f, error, sizeof error);
        memory_left = -1;
        CHECK((r == MIXP_OK) == (f != NULL));
        if (r != MIXP_OK) CHECK_TEXT(error, "out of memory");
    }
    CHECK_INT(r, MIXP_OK);
    CHECK(k > 5);
    CHECK_TEXT(mixp_safetensors_metadata(f, "format"), "pt");
    mixp_safetensors_free(f);
    printf("  %ld requests of a read\n", k - 1);
    remove("f");
}

/* Death at each call: the old file or the new one, whole. */
static void test_death_at_each_call(void) {
    int at, status = 1, renamed = 0;
    if (!POSIX) SKIP("stdio cannot flush");
    CHECK(mkdir("dead", 0777) == 0);
    for (at = 0; status != 0 && at < 50; at++) {
        CHECK_INT(save_number("dead/f", 1.0, NULL), MIXP_OK);
        pid_t child = fork();
        if (child == 0) {
            fault_calls = 0;
            fault_at = at;
            fault_does = FAULT_DEATH;
            _exit(save_number("dead/f", 2.0, NULL) == MIXP_OK ? 0 : 1);
        }
        waitpid(child, &status, 0);
        CHECK(status == 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 9));
        CHECK_NEAR(load_number("dead/f"), status == 0 || renamed || load_number("dead/f") > 1.5 ? 2.0 : 1.0, 0.0);
        renamed = renamed || load_number("dead/f") > 1.5;   /* from the rename on it is the new one */
    }
    CHECK(at > 5 && at < 50);
    CHECK_INT(system("rm -rf dead"), 0);
}

/* Waits until another process has saved a file, as long as a busy machine may need. */
static void await_file(const char *path) {
    const struct timespec moment = { 0, 1000000L };
    struct stat st;
    for (long turns = 0; turns < 120000 && stat(path, &st) != 0; turns++) nanosleep(&moment, NULL);
}

/* Killed at any moment, and two processes saving the same file. */
static void test_killed(void) {
    enum { N = 40000 };
    static double d[N];
    mixp_safetensors *f;
    struct timespec wait_for = { 0, 0 };
    int round, i, whole, both;
    if (!POSIX) SKIP("stdio does not promise it");
    CHECK(mkdir("kill", 0777) == 0);
    for (round = 0; round < 80; round++) {
        pid_t child[2];
        for (both = 0; both < 2; both++) {
            child[both] = fork();
            for (i = 0; child[both] == 0; i++) {
                mixp_st_entry e = entry("x", NULL, MIXP_F64, 1, N, 0, d, sizeof d);
                for (int k = 0; k < N; k++) d[k] = i + 1000.0 * both;
                if (mixp_safetensors_write("kill/f", &e, 1, NULL, 0, NULL, 0) != MIXP_OK) _exit(1);
            }
        }
        wait_for.tv_nsec = 1000L * (500 + round * 137 % 6000);
        if (round > 4) await_file("kill/f");    /* however slow the machine is, one is saved */
        nanosleep(&wait_for, NULL);
        for (both = 0; both < 2; both++) {
            int status = 0;
            kill(child[both], SIGKILL);
            waitpid(child[both], &status, 0);
            CHECK(WIFSIGNALED(status));
        }
        if (mixp_safetensors_read("kill/f", &f, NULL, 0) != MIXP_OK) {
            struct stat st;
            CHECK(stat("kill/f", &st) != 0);    /* before the first save was done */
            continue;
        }
        memcpy(d, mixp_safetensors_find(f, "x")->data, sizeof d);
        for (i = 0, whole = 1; i < N; i++) whole &= !(d[i] < d[0]) && !(d[i] > d[0]);
        CHECK(whole);
        mixp_safetensors_free(f);
    }
    CHECK(mixp_safetensors_read("kill/f", &f, NULL, 0) == MIXP_OK);
    mixp_safetensors_free(f);
    CHECK_INT(system("rm -rf kill"), 0);
}

/* Short and interrupted reads and writes change nothing. Of stdio's nobody knows how much an
 * interrupted call has done: there they are errors, and the old file stays. */
static void test_in_pieces(void) {
    char error[MIXP_MESSAGE_SIZE];
    mixp_safetensors *f;
    size_t n;
    CHECK_INT(save_number("p", 3.0, NULL), MIXP_OK);
    unsigned char *whole = get_file("p", &n);
    in_pieces = 1;
    if (POSIX) {
        CHECK_INT(save_number("p", 3.0, NULL), MIXP_OK);
        CHECK_NEAR(load_number("p"), 3.0, 0.0);
    } else {
        CHECK_INT(save_number("p", 4.0, error), MIXP_ERR_IO);
        CHECK_INT(mixp_safetensors_read("p", &f, error, sizeof error), MIXP_ERR_IO);
    }
    faults_off();
    CHECK(whole && file_is("p", whole, n));
    free(whole);
    for (int i = 0; i < 2; i++) CHECK_INT(save_number("p", 4.0, NULL), MIXP_OK);    /* over a file in use */
    remove("p");
}

/* The message never runs over the room it is given, whatever that is. */
static void test_short_messages(void) {
    char all[MIXP_MESSAGE_SIZE], part[MIXP_MESSAGE_SIZE + 8];
    mixp_safetensors *f;
    put_file("m", "rubbish rubbish", 15);
    CHECK_INT(mixp_safetensors_read("m", &f, all, sizeof all), MIXP_ERR_FORMAT);
    CHECK_TEXT(all, "(m)");
    for (size_t n = 0; n <= MIXP_MESSAGE_SIZE; n++) {
        memset(part, 'x', sizeof part);
        CHECK_INT(mixp_safetensors_read("m", &f, part, n), MIXP_ERR_FORMAT);
        for (size_t i = n; i < sizeof part; i++) CHECK(part[i] == 'x');
        if (n) CHECK(memchr(part, 0, n) && strncmp(part, all, strlen(part)) == 0);
        memset(part, 'x', sizeof part);
        CHECK_INT(mixp_safetensors_write("", NULL, -1, NULL, 0, part, n), MIXP_ERR_ARGUMENT);
        for (size_t i = n; i < sizeof part; i++) CHECK(part[i] == 'x');
    }
    remove("m");
}
