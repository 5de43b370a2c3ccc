/* Makes system calls of a process fail, stop short or take long, by rules in a mapped file.
 *
 * Loaded with LD_PRELOAD. FAULTY_CALLS names the file: RULES records of struct rule, shared by all
 * processes, which may change while they run. faulty_calls.py writes them and says what they mean.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { RULES = 16, PATH_BYTES = 208 };
enum { FAIL = 1, SHORTEN, DELAY, SIGNAL };
enum { OPEN, READ, WRITE, SYNC, RENAME, LINK, REMOVE, ALLOCATE, TRUNCATE, MAKE_DIRECTORY };

struct rule {
    uint32_t calls;  /* a bit for each kind of call; 0: no rule */
    uint32_t action;
    uint32_t value;  /* errno, bytes, milliseconds or signal */
    uint32_t unused;
    uint64_t first, last; /* which of the calls that match, from 1 */
    uint64_t seen, met;   /* counted here */
    char path[PATH_BYTES]; /* part of the file's path */
};

static struct rule *rules;

static __attribute__((constructor)) void map_rules(void)
{
    const char *name = getenv("FAULTY_CALLS");
    if (!name)
        return;
    int (*plain_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int file = plain_open(name, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return;
    void *at = mmap(NULL, RULES * sizeof(struct rule), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at != MAP_FAILED)
        rules = at;
}

/* Returns errno, or 0; takes from *size where a call is to stop short. */
static int apply(int call, const char *path, size_t *size)
{
    for (int index = 0; rules && index < RULES; index++) {
        struct rule *rule = rules + index;
        uint32_t calls = __atomic_load_n(&rule->calls, __ATOMIC_ACQUIRE);
        if (!(calls >> call & 1) || !strstr(path, rule->path))
            continue;
        uint64_t number = __atomic_add_fetch(&rule->seen, 1, __ATOMIC_SEQ_CST);
        if (number < rule->first || number > rule->last)
            continue;
        __atomic_add_fetch(&rule->met, 1, __ATOMIC_SEQ_CST);
        if (rule->action == FAIL)
            return (int)rule->value;
        if (rule->action == SHORTEN && size && *size > rule->value)
            *size = rule->value;
        if (rule->action == DELAY) {
            struct timespec pause = {rule->value / 1000, rule->value % 1000 * 1000000L};
            while (nanosleep(&pause, &pause) && errno == EINTR)
                ;
        }
        if (rule->action == SIGNAL)
            kill(getpid(), (int)rule->value);
    }
    return 0;
}

static int apply_at(int call, int directory, const char *path, size_t *size)
{
    char whole[PATH_MAX], link[64];
    int kept = errno;
    if (!rules)
        return 0;
    if (path && (*path == '/' || directory == AT_FDCWD))
        return apply(call, path, size);
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, whole, sizeof whole - 1);
    errno = kept;
    if (length < 0)
        return 0;
    whole[length] = 0;
    if (path)
        snprintf(whole + length, sizeof whole - length, "/%s", path);
    return apply(call, whole, size);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define FAIL_IF(expression) \
    do { \
        int code = (expression); \
        if (code) { \
            errno = code; \
            return -1; \
        } \
    } while (0)

#define OPENS(name, before, at, directory, path) \
    int name(before const char *path, int flags, ...) \
    { \
        mode_t mode = 0; \
        REAL(name); \
        if (flags & (O_CREAT | __O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        FAIL_IF(apply_at(OPEN, directory, path, NULL)); \
        return real(at path, flags, mode); \
    }
#define COMMA ,
OPENS(open, , , AT_FDCWD, path)
OPENS(open64, , , AT_FDCWD, path)
OPENS(openat, int directory COMMA, directory COMMA, directory, path)
OPENS(openat64, int directory COMMA, directory COMMA, directory, path)

#define MOVES(name, call, type, offset, pass) \
    ssize_t name(int file, type data, size_t size offset) \
    { \
        REAL(name); \
        FAIL_IF(apply_at(call, file, NULL, &size)); \
        return real(file, data, size pass); \
    }
MOVES(read, READ, void *, , )
MOVES(write, WRITE, const void *, , )
MOVES(pread, READ, void *, COMMA off_t offset, COMMA offset)
MOVES(pread64, READ, void *, COMMA off64_t offset, COMMA offset)
MOVES(pwrite, WRITE, const void *, COMMA off_t offset, COMMA offset)
MOVES(pwrite64, WRITE, const void *, COMMA off64_t offset, COMMA offset)

/* Of several pieces the first alone is moved when a call is to stop short. */
#define MOVES_PIECES(name, call, type, flags, pass) \
    ssize_t name(int file, const struct iovec *pieces, int count, type offset flags) \
    { \
        struct iovec first = count > 0 ? *pieces : (struct iovec){0}; \
        size_t size = first.iov_len; \
        REAL(name); \
        FAIL_IF(apply_at(call, file, NULL, &size)); \
        if (size == first.iov_len) \
            return real(file, pieces, count, offset pass); \
        first.iov_len = size; \
        return real(file, &first, 1, offset pass); \
    }
MOVES_PIECES(preadv, READ, off_t, , )
MOVES_PIECES(preadv64, READ, off64_t, , )
MOVES_PIECES(preadv2, READ, off_t, COMMA int flags, COMMA flags)
MOVES_PIECES(preadv64v2, READ, off64_t, COMMA int flags, COMMA flags)
MOVES_PIECES(pwritev, WRITE, off_t, , )
MOVES_PIECES(pwritev64, WRITE, off64_t, , )
MOVES_PIECES(pwritev2, WRITE, off_t, COMMA int flags, COMMA flags)
MOVES_PIECES(pwritev64v2, WRITE, off64_t, COMMA int flags, COMMA flags)

#define ON_FILE(name, call, arguments, pass) \
    int name(int file arguments) \
    { \
        REAL(name); \
        FAIL_IF(apply_at(call, file, NULL, NULL)); \
        return real(file pass); \
    }
ON_FILE(fsync, SYNC, , )
ON_FILE(fdatasync, SYNC, , )
ON_FILE(ftruncate, TRUNCATE, COMMA off_t size, COMMA size)
ON_FILE(ftruncate64, TRUNCATE, COMMA off64_t size, COMMA size)
ON_FILE(fallocate, ALLOCATE, COMMA int mode COMMA off_t from COMMA off_t size, COMMA mode COMMA from COMMA size)
ON_FILE(fallocate64, ALLOCATE, COMMA int mode COMMA off64_t from COMMA off64_t size, COMMA mode COMMA from COMMA size)

/* The path that counts is the new one. */
#define NAMES(name, call, arguments, directory, path, pass) \
    int name(arguments) \
    { \
        REAL(name); \
        FAIL_IF(apply_at(call, directory, path, NULL)); \
        return real(pass); \
    }
NAMES(rename, RENAME, const char *old COMMA const char *new, AT_FDCWD, new, old COMMA new)
NAMES(renameat, RENAME, int from COMMA const char *old COMMA int to COMMA const char *new, to, new, from COMMA old COMMA to COMMA new)
NAMES(link, LINK, const char *old COMMA const char *new, AT_FDCWD, new, old COMMA new)
NAMES(linkat, LINK, int from COMMA const char *old COMMA int to COMMA const char *new COMMA int flags, to, new, from COMMA old COMMA to COMMA new COMMA flags)
NAMES(unlink, REMOVE, const char *path, AT_FDCWD, path, path)
NAMES(unlinkat, REMOVE, int directory COMMA const char *path COMMA int flags, directory, path, directory COMMA path COMMA flags)
NAMES(rmdir, REMOVE, const char *path, AT_FDCWD, path, path)
NAMES(mkdir, MAKE_DIRECTORY, const char *path COMMA mode_t mode, AT_FDCWD, path, path COMMA mode)
NAMES(mkdirat, MAKE_DIRECTORY, int directory COMMA const char *path COMMA mode_t mode, directory, path, directory COMMA path COMMA mode)
