/* Stands before the C library's calls that change a disk, and kills the process or fails at the n-th of them.
 *
 * Loaded by LD_PRELOAD. Only calls on paths that begin with a prefix count. Armed by torture_arm, or from the start by
 * the environment variable TORTURE_ARM, "N MODE PREFIX". See shim.py for the modes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum mode { COUNT, KILL_BEFORE, KILL_AFTER, EIO_ONCE, FULL, SHORT };
enum verdict { GO, FAIL, HALF, THEN_DIE };
enum kind { CONTENT, ROOM, OTHER }; /* writes bytes; needs room otherwise; does neither */

static char prefix[4096];
static size_t length;
static long at, count;
static int mode, full;

void torture_arm(const char *path, long n, int how) {
    strncpy(prefix, path, sizeof prefix - 1);
    length = strlen(prefix), at = n, mode = how, count = 0, full = 0;
}

long torture_count(void) { return count; }

__attribute__((constructor)) static void from_environment(void) {
    char path[4096];
    long n;
    int how;
    const char *text = getenv("TORTURE_ARM");
    if (text && sscanf(text, "%ld %d %4095s", &n, &how, path) == 3) torture_arm(path, n, how);
}

static int watched(const char *path) { return length && path && strncmp(path, prefix, length) == 0; }

static int watched_fd(int fd) {
    char link[64], target[4096];
    if (!length) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, target, sizeof target - 1);
    if (n < 0) return 0;
    target[n] = 0;
    return watched(target);
}

static enum verdict step(enum kind kind) {
    long n = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (mode == FULL && (full || n == at)) {
        full = 1;
        if (kind == OTHER) return GO;
        errno = ENOSPC;
        return n == at && kind == CONTENT ? HALF : FAIL;
    }
    if (n != at) return GO;
    if (mode == KILL_BEFORE) kill(getpid(), SIGKILL);
    if (mode == KILL_AFTER) return THEN_DIE;
    if (mode == EIO_ONCE) {
        errno = EIO;
        return FAIL;
    }
    return mode == SHORT && kind == CONTENT ? HALF : GO;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define DIE_IF(verdict) \
    if ((verdict) == THEN_DIE) kill(getpid(), SIGKILL)

/* A write of half the bytes: all of a short write, and the last thing before a full disk or a death. */
#define WRITES(name, parameters, whole, half)                     \
    ssize_t name parameters {                                     \
        enum verdict v = watched_fd(fd) ? step(CONTENT) : GO;     \
        if (v == FAIL) return -1;                                 \
        ssize_t done = v == GO ? REAL(name) whole : REAL(name) half; \
        DIE_IF(v);                                                \
        return done;                                              \
    }
WRITES(write, (int fd, const void *b, size_t n), (fd, b, n), (fd, b, (n + 1) / 2))
WRITES(pwrite, (int fd, const void *b, size_t n, off_t o), (fd, b, n, o), (fd, b, (n + 1) / 2, o))
WRITES(pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o), (fd, b, (n + 1) / 2, o))
WRITES(writev, (int fd, const struct iovec *b, int n), (fd, b, n), (fd, b, (n + 1) / 2))

#define CALLS(name, kind, parameters, given, condition)     \
    int name parameters {                                   \
        enum verdict v = (condition) ? step(kind) : GO;     \
        if (v == FAIL) return -1;                           \
        int result = REAL(name) given;                      \
        DIE_IF(v);                                          \
        return result;                                      \
    }
CALLS(fsync, OTHER, (int fd), (fd), watched_fd(fd))
CALLS(fdatasync, OTHER, (int fd), (fd), watched_fd(fd))
CALLS(ftruncate, ROOM, (int fd, off_t n), (fd, n), watched_fd(fd))
CALLS(ftruncate64, ROOM, (int fd, off64_t n), (fd, n), watched_fd(fd))
CALLS(rename, OTHER, (const char *a, const char *b), (a, b), watched(b))
CALLS(renameat, OTHER, (int d, const char *a, int e, const char *b), (d, a, e, b), watched(b))
CALLS(mkdir, ROOM, (const char *p, mode_t m), (p, m), watched(p))
CALLS(unlink, OTHER, (const char *p), (p), watched(p))
CALLS(rmdir, OTHER, (const char *p), (p), watched(p))
CALLS(unlinkat, OTHER, (int d, const char *p, int f), (d, p, f), watched(p) || (d >= 0 && watched_fd(d)))

#define OPENS(name, parameters, ...)                                                     \
    int name parameters {                                                                \
        va_list more;                                                                    \
        va_start(more, flags);                                                           \
        mode_t m = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;           \
        va_end(more);                                                                    \
        enum verdict v = (flags & O_CREAT) && watched(path) ? step(ROOM) : GO;           \
        if (v == FAIL) return -1;                                                        \
        int result = REAL(name)(__VA_ARGS__, flags, m);                                  \
        DIE_IF(v);                                                                       \
        return result;                                                                   \
    }
OPENS(open, (const char *path, int flags, ...), path)
OPENS(open64, (const char *path, int flags, ...), path)
OPENS(openat, (int d, const char *path, int flags, ...), d, path)
OPENS(openat64, (int d, const char *path, int flags, ...), d, path)
