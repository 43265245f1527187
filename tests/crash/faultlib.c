/* Counts the mutating calls of a process and makes one of them go wrong (glibc, by LD_PRELOAD).
 *
 * Only calls that touch a path under one directory count, over all threads, from faults_arm() to
 * faults_disarm(). Call N, or the Nth of those that a regular expression matches, is, as configured,
 * not made because the process is killed right before it, or answered with an errno (before or
 * after it was made), or cut to half its bytes; or it is made once the process, which is stopped
 * right before it, is continued.
 * Every counted call becomes one line of the log: number, verdict, name, path, second path.
 *
 * Calls that the C library makes by itself (fwrite, fclose) and calls through a handle of
 * dlopen("libc.so.6") are not seen; those through dlopen(NULL) are.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <regex.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum mode { COUNT, KILL, ERROR, ERROR_AFTER, SHORT, STOP };
enum verdict { GO, FAIL, FAIL_AFTER, HALF, STOPS, DIES };

/* A direct write is cut at a multiple of this: the kernel refuses other lengths. */
enum { DIRECT_ALIGNMENT = 4096, IOV_LIMIT = 1024 };

static char prefix[PATH_MAX];
static size_t prefix_length;
static char only[1024]; /* ",write,fsync,", or empty for every call */
static enum mode mode = COUNT;
static long chosen; /* N, from 1 */
static regex_t where; /* which calls N counts, as lines "name path second-path" below the prefix */
static int has_where;
static int chosen_errno = EIO;
static int persistent;
static int log_fd = -1;
static volatile int armed;
static long counted;
static long matched;        /* of these, the ones that N counts */
static volatile int struck; /* whether call N was reached */

#define RESOLVE(pointer, name)                                                                     \
    do {                                                                                           \
        if (!(pointer)) *(void **)(&(pointer)) = dlsym(RTLD_NEXT, name);                           \
    } while (0)

static ssize_t log_write(const char *line, size_t length) {
    static ssize_t (*real)(int, const void *, size_t);
    RESOLVE(real, "write");
    return real(log_fd, line, length);
}

static void path_of_fd(int fd, char out[PATH_MAX]) {
    char link_name[64];
    snprintf(link_name, sizeof link_name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link_name, out, PATH_MAX - 1);
    out[length < 0 ? 0 : length] = '\0';
}

/* `out` is `path` as seen from `dirfd`, without resolving links or "..". */
static void absolute(int dirfd, const char *path, char out[PATH_MAX]) {
    out[0] = '\0';
    if (path == NULL) return;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    if (dirfd != AT_FDCWD) {
        path_of_fd(dirfd, out);
    } else if (getcwd(out, PATH_MAX) == NULL) {
        out[0] = '\0';
    }
    if (path[0] == '\0') return;
    size_t length = strlen(out);
    snprintf(out + length, PATH_MAX - length, "/%s", path);
}

static int is_under_prefix(const char *path) {
    if (prefix_length == 0 || strncmp(path, prefix, prefix_length) != 0) return 0;
    char next = path[prefix_length];
    return next == '\0' || next == '/';
}

static int is_wanted(const char *name) {
    if (only[0] == '\0') return 1;
    char item[64];
    snprintf(item, sizeof item, ",%s,", name);
    return strstr(only, item) != NULL;
}

static const char *below_prefix(const char *path) {
    return is_under_prefix(path) ? path + prefix_length : path;
}

/* Which of the calls that N counts this one is, from 1; 0 for a call that it does not count. */
static long position(const char *name, const char *one, const char *two, long number) {
    char line[2 * PATH_MAX + 128];
    if (!has_where) return number;
    snprintf(line, sizeof line, "%s %s %s", name, below_prefix(one), below_prefix(two));
    if (regexec(&where, line, 0, NULL, 0) != 0) return 0;
    return __atomic_add_fetch(&matched, 1, __ATOMIC_SEQ_CST);
}

static void printable(char *text) {
    for (; *text; text++) {
        if ((unsigned char)*text < ' ') *text = '?';
    }
}

static const char *const verdict_names[] = {"go", "fail", "fail-after", "short", "stop", "kill"};

static void log_call(long number, const char *verdict, const char *name, char *one, char *two) {
    char line[2 * PATH_MAX + 128];
    if (log_fd < 0) return;
    printable(one);
    printable(two);
    int n = snprintf(line, sizeof line, "%ld\t%s\t%s\t%s\t%s\n", number, verdict, name, one, two);
    if (n > 0 && (size_t)n < sizeof line) (void)!log_write(line, (size_t)n);
}

/* Count the call that is about to be made and say what becomes of it; does not return from a kill. */
static enum verdict judge(const char *name, char one[PATH_MAX], char two[PATH_MAX]) {
    enum verdict verdict = GO;
    if (!(is_under_prefix(one) || is_under_prefix(two)) || !is_wanted(name)) return GO;
    long number = __atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST);
    long nth = position(name, one, two, number);
    int now = chosen > 0 && nth == chosen;
    if (chosen > 0 && nth >= chosen) struck = 1;
    /* Other threads get no call in between the signal and their end. */
    while (mode == KILL && struck && !now) pause();
    int hit = now || (persistent && struck);
    if (hit && mode == ERROR) verdict = FAIL;
    if (hit && mode == ERROR_AFTER) verdict = FAIL_AFTER;
    if (hit && mode == SHORT) verdict = HALF;
    if (now && mode == KILL) verdict = DIES;
    if (now && mode == STOP) verdict = STOPS;
    log_call(number, verdict_names[verdict], name, one, two);
    if (verdict == DIES) kill(getpid(), SIGKILL);
    if (verdict == STOPS) kill(getpid(), SIGSTOP);
    return verdict;
}

static enum verdict on_paths(const char *name, int fd1, const char *path1, int fd2,
                             const char *path2) {
    char one[PATH_MAX], two[PATH_MAX];
    int saved = errno;
    absolute(fd1, path1, one);
    absolute(fd2, path2, two);
    enum verdict verdict = judge(name, one, two);
    errno = saved;
    return verdict;
}

static enum verdict on_path(const char *name, int fd, const char *path) {
    return on_paths(name, fd, path, AT_FDCWD, NULL);
}

static enum verdict on_fd(const char *name, int fd) {
    return on_paths(name, fd, "", AT_FDCWD, NULL);
}

static long failed(void) {
    errno = chosen_errno;
    return -1;
}

/* What a write of `length` bytes is cut to; the whole where a cut is not possible. */
static size_t half_of(int fd, size_t length) {
    size_t half = length / 2;
    int flags = fcntl(fd, F_GETFL);
    if (flags >= 0 && (flags & O_DIRECT)) half -= half % DIRECT_ALIGNMENT;
    return half > 0 ? half : length;
}

/* The first part of `in`, with half of its bytes, in `out`; returns the number of parts. */
static int half_of_parts(int fd, const struct iovec *in, int count, struct iovec *out) {
    size_t total = 0;
    int used = 0;
    for (int i = 0; i < count; i++) total += in[i].iov_len;
    size_t left = half_of(fd, total);
    for (; used < count && used < IOV_LIMIT && left > 0; used++) {
        out[used] = in[used];
        if (out[used].iov_len > left) out[used].iov_len = left;
        left -= out[used].iov_len;
    }
    return used;
}

/* A wrapper of `name`; `verdict_call` is evaluated only while armed. */
#define WRAP(type, name, params, args, verdict_call)                                               \
    type name params {                                                                             \
        static type(*real) params;                                                                 \
        RESOLVE(real, #name);                                                                      \
        enum verdict verdict = armed ? (verdict_call) : GO;                                        \
        if (verdict == FAIL) return (type)failed();                                                \
        type result = real args;                                                                   \
        return verdict == FAIL_AFTER ? (type)failed() : result;                                    \
    }

#define WRAP_WRITE(name, params, args)                                                             \
    ssize_t name params {                                                                          \
        static ssize_t(*real) params;                                                              \
        RESOLVE(real, #name);                                                                      \
        enum verdict verdict = armed ? on_fd(#name, fd) : GO;                                      \
        if (verdict == FAIL) return failed();                                                      \
        if (verdict == HALF) length = half_of(fd, length);                                         \
        ssize_t result = real args;                                                                \
        return verdict == FAIL_AFTER ? failed() : result;                                          \
    }

#define WRAP_WRITEV(name, params, args)                                                            \
    ssize_t name params {                                                                          \
        static ssize_t(*real) params;                                                              \
        struct iovec cut[IOV_LIMIT];                                                               \
        RESOLVE(real, #name);                                                                      \
        enum verdict verdict = armed ? on_fd(#name, fd) : GO;                                      \
        if (verdict == FAIL) return failed();                                                      \
        if (verdict == HALF) {                                                                     \
            count = half_of_parts(fd, parts, count, cut);                                          \
            parts = cut;                                                                           \
        }                                                                                          \
        ssize_t result = real args;                                                                \
        return verdict == FAIL_AFTER ? failed() : result;                                          \
    }

WRAP_WRITE(write, (int fd, const void *data, size_t length), (fd, data, length))
WRAP_WRITE(pwrite, (int fd, const void *data, size_t length, off_t at), (fd, data, length, at))
WRAP_WRITE(pwrite64, (int fd, const void *data, size_t length, off64_t at), (fd, data, length, at))
WRAP_WRITEV(writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
WRAP_WRITEV(pwritev, (int fd, const struct iovec *parts, int count, off_t at),
            (fd, parts, count, at))
WRAP_WRITEV(pwritev64, (int fd, const struct iovec *parts, int count, off64_t at),
            (fd, parts, count, at))
WRAP_WRITEV(pwritev2, (int fd, const struct iovec *parts, int count, off_t at, int flags),
            (fd, parts, count, at, flags))
WRAP_WRITEV(pwritev64v2, (int fd, const struct iovec *parts, int count, off64_t at, int flags),
            (fd, parts, count, at, flags))
WRAP(ssize_t, copy_file_range,
     (int in, off64_t *in_at, int out, off64_t *out_at, size_t length, unsigned flags),
     (in, in_at, out, out_at, length, flags), on_fd("copy_file_range", out))
WRAP(ssize_t, sendfile, (int out, int in, off_t *at, size_t length), (out, in, at, length),
     on_fd("sendfile", out))
WRAP(ssize_t, sendfile64, (int out, int in, off64_t *at, size_t length), (out, in, at, length),
     on_fd("sendfile64", out))

WRAP(int, fsync, (int fd), (fd), on_fd("fsync", fd))
WRAP(int, fdatasync, (int fd), (fd), on_fd("fdatasync", fd))
WRAP(int, syncfs, (int fd), (fd), on_fd("syncfs", fd))
WRAP(int, sync_file_range, (int fd, off64_t at, off64_t length, unsigned flags),
     (fd, at, length, flags), on_fd("sync_file_range", fd))

WRAP(int, ftruncate, (int fd, off_t length), (fd, length), on_fd("ftruncate", fd))
WRAP(int, ftruncate64, (int fd, off64_t length), (fd, length), on_fd("ftruncate64", fd))
WRAP(int, truncate, (const char *path, off_t length), (path, length),
     on_path("truncate", AT_FDCWD, path))
WRAP(int, truncate64, (const char *path, off64_t length), (path, length),
     on_path("truncate64", AT_FDCWD, path))
WRAP(int, fallocate, (int fd, int how, off_t at, off_t length), (fd, how, at, length),
     on_fd("fallocate", fd))
WRAP(int, fallocate64, (int fd, int how, off64_t at, off64_t length), (fd, how, at, length),
     on_fd("fallocate64", fd))

/* These two return the error and leave errno alone. */
#define WRAP_POSIX_FALLOCATE(name, offset)                                                         \
    int name(int fd, offset at, offset length) {                                                   \
        static int (*real)(int, offset, offset);                                                   \
        RESOLVE(real, #name);                                                                      \
        enum verdict verdict = armed ? on_fd(#name, fd) : GO;                                      \
        if (verdict == FAIL) return chosen_errno;                                                  \
        int result = real(fd, at, length);                                                         \
        return verdict == FAIL_AFTER ? chosen_errno : result;                                      \
    }
WRAP_POSIX_FALLOCATE(posix_fallocate, off_t)
WRAP_POSIX_FALLOCATE(posix_fallocate64, off64_t)

WRAP(int, rename, (const char *from, const char *to), (from, to),
     on_paths("rename", AT_FDCWD, from, AT_FDCWD, to))
WRAP(int, renameat, (int from_fd, const char *from, int to_fd, const char *to),
     (from_fd, from, to_fd, to), on_paths("renameat", from_fd, from, to_fd, to))
WRAP(int, renameat2, (int from_fd, const char *from, int to_fd, const char *to, unsigned flags),
     (from_fd, from, to_fd, to, flags), on_paths("renameat2", from_fd, from, to_fd, to))
WRAP(int, link, (const char *from, const char *to), (from, to),
     on_paths("link", AT_FDCWD, from, AT_FDCWD, to))
WRAP(int, linkat, (int from_fd, const char *from, int to_fd, const char *to, int flags),
     (from_fd, from, to_fd, to, flags), on_paths("linkat", from_fd, from, to_fd, to))
WRAP(int, symlink, (const char *text, const char *to), (text, to), on_path("symlink", AT_FDCWD, to))
WRAP(int, symlinkat, (const char *text, int fd, const char *to), (text, fd, to),
     on_path("symlinkat", fd, to))
WRAP(int, unlink, (const char *path), (path), on_path("unlink", AT_FDCWD, path))
WRAP(int, unlinkat, (int fd, const char *path, int flags), (fd, path, flags),
     on_path("unlinkat", fd, path))
WRAP(int, rmdir, (const char *path), (path), on_path("rmdir", AT_FDCWD, path))
WRAP(int, mkdir, (const char *path, mode_t bits), (path, bits), on_path("mkdir", AT_FDCWD, path))
WRAP(int, mkdirat, (int fd, const char *path, mode_t bits), (fd, path, bits),
     on_path("mkdirat", fd, path))
WRAP(int, chmod, (const char *path, mode_t bits), (path, bits), on_path("chmod", AT_FDCWD, path))
WRAP(int, fchmod, (int fd, mode_t bits), (fd, bits), on_fd("fchmod", fd))
WRAP(int, fchmodat, (int fd, const char *path, mode_t bits, int flags), (fd, path, bits, flags),
     on_path("fchmodat", fd, path))

/* An open for reading changes nothing and does not count. */
static enum verdict on_open(const char *name, int dirfd, const char *path, int flags) {
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)) != 0;
    return writes ? on_path(name, dirfd, path) : GO;
}

static int opened(int fd, enum verdict verdict) {
    if (verdict != FAIL_AFTER) return fd;
    if (fd >= 0) close(fd);
    return (int)failed();
}

static mode_t bits_of(int flags, va_list more) {
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? (mode_t)va_arg(more, int) : 0;
}

#define WRAP_OPEN(name)                                                                            \
    int name(const char *path, int flags, ...) {                                                   \
        static int (*real)(const char *, int, ...);                                                \
        va_list more;                                                                              \
        RESOLVE(real, #name);                                                                      \
        va_start(more, flags);                                                                     \
        mode_t bits = bits_of(flags, more);                                                        \
        va_end(more);                                                                              \
        enum verdict verdict = armed ? on_open(#name, AT_FDCWD, path, flags) : GO;                 \
        if (verdict == FAIL) return (int)failed();                                                 \
        return opened(real(path, flags, bits), verdict);                                           \
    }
WRAP_OPEN(open)
WRAP_OPEN(open64)

#define WRAP_OPENAT(name)                                                                          \
    int name(int dirfd, const char *path, int flags, ...) {                                        \
        static int (*real)(int, const char *, int, ...);                                           \
        va_list more;                                                                              \
        RESOLVE(real, #name);                                                                      \
        va_start(more, flags);                                                                     \
        mode_t bits = bits_of(flags, more);                                                        \
        va_end(more);                                                                              \
        enum verdict verdict = armed ? on_open(#name, dirfd, path, flags) : GO;                    \
        if (verdict == FAIL) return (int)failed();                                                 \
        return opened(real(dirfd, path, flags, bits), verdict);                                    \
    }
WRAP_OPENAT(openat)
WRAP_OPENAT(openat64)

WRAP(int, creat, (const char *path, mode_t bits), (path, bits), on_path("creat", AT_FDCWD, path))
WRAP(int, creat64, (const char *path, mode_t bits), (path, bits),
     on_path("creat64", AT_FDCWD, path))
/* What programs built with _FORTIFY_SOURCE call instead of open. */
WRAP(int, __open_2, (const char *path, int flags), (path, flags),
     on_open("open", AT_FDCWD, path, flags))
WRAP(int, __open64_2, (const char *path, int flags), (path, flags),
     on_open("open64", AT_FDCWD, path, flags))
WRAP(int, __openat_2, (int fd, const char *path, int flags), (fd, path, flags),
     on_open("openat", fd, path, flags))
WRAP(int, __openat64_2, (int fd, const char *path, int flags), (fd, path, flags),
     on_open("openat64", fd, path, flags))

static enum verdict on_syscall(long number, long a, long b, long c, long d) {
    switch (number) {
    case SYS_renameat2:
        return on_paths("renameat2", (int)a, (const char *)b, (int)c, (const char *)d);
    case SYS_renameat:
        return on_paths("renameat", (int)a, (const char *)b, (int)c, (const char *)d);
    case SYS_linkat:
        return on_paths("linkat", (int)a, (const char *)b, (int)c, (const char *)d);
    case SYS_openat:
        return on_open("openat", (int)a, (const char *)b, (int)c);
    case SYS_unlinkat:
        return on_path("unlinkat", (int)a, (const char *)b);
    case SYS_mkdirat:
        return on_path("mkdirat", (int)a, (const char *)b);
    case SYS_write:
        return on_fd("write", (int)a);
    case SYS_pwrite64:
        return on_fd("pwrite64", (int)a);
    case SYS_writev:
        return on_fd("writev", (int)a);
    case SYS_pwritev:
        return on_fd("pwritev", (int)a);
    case SYS_pwritev2:
        return on_fd("pwritev2", (int)a);
    case SYS_fsync:
        return on_fd("fsync", (int)a);
    case SYS_fdatasync:
        return on_fd("fdatasync", (int)a);
    case SYS_ftruncate:
        return on_fd("ftruncate", (int)a);
    case SYS_fallocate:
        return on_fd("fallocate", (int)a);
    default:
        return GO;
    }
}

long syscall(long number, ...) {
    static long (*real)(long, ...);
    va_list more;
    long argument[6];
    RESOLVE(real, "syscall");
    va_start(more, number);
    for (int i = 0; i < 6; i++) argument[i] = va_arg(more, long);
    va_end(more);
    enum verdict verdict =
        armed ? on_syscall(number, argument[0], argument[1], argument[2], argument[3]) : GO;
    if (verdict == FAIL) return failed();
    if (verdict == HALF && (number == SYS_write || number == SYS_pwrite64))
        argument[2] = (long)half_of((int)argument[0], (size_t)argument[2]);
    long result = real(number, argument[0], argument[1], argument[2], argument[3], argument[4],
                       argument[5]);
    return verdict == FAIL_AFTER ? failed() : result;
}

/* Everything about the next run; the counts start at 0 again. Empty `names` count every call, and
 * an empty `pattern` lets `number` count all of these. */
void faults_configure(const char *directory, int how, long number, int error, int stays,
                      const char *names, const char *pattern, int log) {
    armed = 0;
    snprintf(prefix, sizeof prefix, "%s", directory);
    prefix_length = strlen(prefix);
    only[0] = '\0';
    if (names[0] != '\0') snprintf(only, sizeof only, ",%s,", names);
    if (has_where) regfree(&where);
    has_where = pattern[0] != '\0';
    if (has_where && regcomp(&where, pattern, REG_EXTENDED | REG_NOSUB) != 0) abort();
    mode = (enum mode)how;
    chosen = number;
    chosen_errno = error;
    persistent = stays;
    log_fd = log;
    struck = 0;
    matched = 0;
    __atomic_store_n(&counted, 0, __ATOMIC_SEQ_CST);
}

void faults_arm(void) { armed = 1; }

void faults_disarm(void) { armed = 0; }

long faults_count(void) { return __atomic_load_n(&counted, __ATOMIC_SEQ_CST); }

static long number_from(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text != NULL && text[0] != '\0' ? strtol(text, NULL, 10) : otherwise;
}

/* For a program that cannot configure itself: armed from its start if ASYNCCKPT_FAULTS_PREFIX is set. */
__attribute__((constructor)) static void configure_from_environment(void) {
    const char *directory = getenv("ASYNCCKPT_FAULTS_PREFIX");
    const char *names = getenv("ASYNCCKPT_FAULTS_ONLY");
    const char *log = getenv("ASYNCCKPT_FAULTS_LOG");
    int fd = -1;
    if (directory == NULL || directory[0] == '\0') return;
    if (log != NULL) fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    faults_configure(directory, (int)number_from("ASYNCCKPT_FAULTS_MODE", COUNT),
                     number_from("ASYNCCKPT_FAULTS_N", 0),
                     (int)number_from("ASYNCCKPT_FAULTS_ERRNO", EIO),
                     (int)number_from("ASYNCCKPT_FAULTS_PERSISTENT", 0), names ? names : "", "", fd);
    faults_arm();
}
