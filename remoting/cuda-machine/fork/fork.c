/* What a child of fork may do with CUDA, and that its parent does not notice: run natively and through Gantry, the
   outputs are compared.

       fork [SCENARIO...]

   Each scenario runs in a process of its own, of a parent that never calls CUDA. Compiled as `cc -O1 -o fork fork.c
   -ldl -lpthread`, without the vendor's headers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Only something that hangs takes so long. */
#define LIMIT 100
#define WORDS 4096
#define BYTES (4 * WORDS)

extern char **environ;
static char *self;

/* A function of a library, by its name. The driver's numbers and pointers all fit in words. */
static void *library(const char *name) {
    void *found = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (!found) {
        printf("%s\n", dlerror());
        fflush(stdout);
        _exit(77);
    }
    return found;
}

static void *driver, *runtime, *management;
static void *symbol(void *of, const char *name) {
    void *found = dlsym(of, name);
    if (!found) {
        printf("no %s\n", name);
        fflush(stdout);
        _exit(77);
    }
    return found;
}
typedef int (*function)(uint64_t, uint64_t, uint64_t, uint64_t);
#define CU4(name, a, b, c, d) \
    ((function)symbol(driver, #name))((uint64_t)(a), (uint64_t)(b), (uint64_t)(c), (uint64_t)(d))
#define CU(name) CU4(name, 0, 0, 0, 0)
#define CU1(name, a) CU4(name, a, 0, 0, 0)
#define CU2(name, a, b) CU4(name, a, b, 0, 0)
#define CU3(name, a, b, c) CU4(name, a, b, c, 0)
#define RT3(name, a, b, c) \
    ((function)symbol(runtime, #name))((uint64_t)(a), (uint64_t)(b), (uint64_t)(c), 0)

/* Ends the scenario with the line of a call that should have succeeded. */
#define OK(call) ok(call, #call)
static void ok(int code, const char *what) {
    if (code) {
        printf("%s: %d\n", what, code);
        fflush(stdout);
        _exit(1);
    }
}

static uint64_t context;
static void start(void) {
    driver = library("libcuda.so.1");
    OK(CU1(cuInit, 0));
    OK(CU2(cuDevicePrimaryCtxRetain, &context, 0));
    OK(CU1(cuCtxSetCurrent, context));
}

/* Whether memory that the device fills has the value everywhere. */
static const char *computes(uint32_t value) {
    static uint32_t got[WORDS];
    uint64_t at = 0;
    OK(CU2(cuMemAlloc_v2, &at, BYTES));
    OK(CU3(cuMemsetD32_v2, at, value, WORDS));
    OK(CU(cuCtxSynchronize));
    memset(got, 0, sizeof got);
    OK(CU3(cuMemcpyDtoH_v2, got, at, BYTES));
    OK(CU1(cuMemFree_v2, at));
    for (int i = 0; i < WORDS; i++)
        if (got[i] != value)
            return "WRONG";
    return "right";
}

/* Waits for a child: what it ended with. */
static const char *ended(pid_t child) {
    static char text[64];
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return "lost";
    if (WIFSIGNALED(status))
        snprintf(text, sizeof text, "signal %d", WTERMSIG(status));
    else
        snprintf(text, sizeof text, "status %d", WEXITSTATUS(status));
    return text;
}

/* Flushes what the parent has printed, so that the child does not print it again. */
static pid_t forked(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        alarm(LIMIT / 2);
    return child;
}

/* What calls of all kinds answer in a child. */
static void calls(uint64_t at) {
    uint64_t word = 0, other = 0;
    char room[64];
#define SAY(call) printf("  %s: %d\n", #call, call)
    SAY(CU1(cuInit, 0));
    SAY(CU1(cuDeviceGetCount, &word));
    SAY(CU2(cuDeviceGet, &word, 0));
    SAY(CU3(cuDeviceGetName, room, sizeof room, 0));
    SAY(CU1(cuCtxGetCurrent, &word));
    SAY(CU1(cuCtxSetCurrent, context));
    SAY(CU1(cuCtxPushCurrent_v2, context));
    SAY(CU1(cuCtxGetDevice, &word));
    SAY(CU2(cuDevicePrimaryCtxRetain, &word, 0));
    SAY(CU1(cuDevicePrimaryCtxRelease_v2, 0));
    SAY(CU2(cuMemAlloc_v2, &word, BYTES));
    SAY(CU2(cuMemGetInfo_v2, &word, &other));
    SAY(CU3(cuMemsetD32_v2, at, 9, WORDS));
    SAY(CU3(cuMemcpyDtoH_v2, room, at, sizeof room));
    SAY(CU3(cuMemcpyHtoD_v2, at, room, sizeof room));
    SAY(CU3(cuMemHostAlloc, &word, BYTES, 0));
    SAY(CU3(cuMemHostRegister_v2, room, sizeof room, 0));
    SAY(CU2(cuStreamCreate, &word, 0));
    SAY(CU2(cuEventCreate, &word, 0));
    SAY(CU2(cuGraphCreate, &word, 0));
    SAY(CU1(cuStreamSynchronize, 0));
    SAY(CU1(cuStreamQuery, 0));
    SAY(CU2(cuLaunchHostFunc, 0, calls));
    SAY(CU(cuCtxSynchronize));
    SAY(CU1(cuMemFree_v2, at));
    const char *name = "none";
    SAY(CU2(cuGetErrorName, 3, &name));
    printf("  its name: %s\n", name);
#undef SAY
}

static void one_child_calls(void) {
    uint64_t at = 0;
    start();
    OK(CU2(cuMemAlloc_v2, &at, BYTES));
    OK(CU3(cuMemsetD32_v2, at, 1, WORDS));
    pid_t child = forked();
    if (child == 0) {
        calls(at);
        fflush(stdout);
        _exit(5);
    }
    printf("child: %s\n", ended(child));
    printf("parent: %s\n", computes(7));
    OK(CU1(cuMemFree_v2, at));
    printf("parent again: %s\n", computes(8));
}

/* Children call while the parent computes. */
static void many_children_call(void) {
    start();
    int right = 0, refused = 0;
    for (int round = 0; round < 20; round++) {
        pid_t children[3];
        for (int i = 0; i < 3; i++) {
            children[i] = forked();
            if (children[i] == 0) {
                uint64_t at = 0;
                int all = 1;
                for (int call = 0; call < 100; call++)
                    all &= CU2(cuMemAlloc_v2, &at, BYTES) == 3 && CU3(cuMemsetD32_v2, at, 9, WORDS) == 3 &&
                           CU(cuCtxSynchronize) == 3;
                _exit(all ? 6 : 1);
            }
        }
        for (int i = 0; i < 20; i++)
            right += !strcmp(computes(100 * round + i), "right");
        for (int i = 0; i < 3; i++)
            refused += !strcmp(ended(children[i]), "status 6");
    }
    printf("parent: %d of 400 right; %d of 60 children were refused\n", right, refused);
}

static void pinned_memory_is_shared(void) {
    int to[2], from[2];
    uint32_t *pinned = 0;
    uint64_t at = 0;
    char byte = 0;
    start();
    OK(CU3(cuMemHostAlloc, &pinned, BYTES, 0));
    OK(CU2(cuMemAlloc_v2, &at, BYTES));
    for (int i = 0; i < WORDS; i++)
        pinned[i] = i;
    ok(pipe(to) | pipe(from), "pipe");
    pid_t child = forked();
    if (child == 0) {
        int right = 1;
        for (int i = 0; i < WORDS; i++) {
            right &= pinned[i] == (uint32_t)i;
            pinned[i] = 3 * i;
        }
        ok(write(from[1], "a", 1) != 1, "write");
        ok(read(to[0], &byte, 1) != 1, "read");
        for (int i = 0; i < WORDS; i++)
            right &= pinned[i] == 55;
        printf("child: what it finds is %s\n", right ? "right" : "WRONG");
        fflush(stdout);
        _exit(0);
    }
    ok(read(from[0], &byte, 1) != 1, "read");
    int right = 1;
    for (int i = 0; i < WORDS; i++)
        right &= pinned[i] == 3 * (uint32_t)i;
    printf("parent: what the child wrote is %s\n", right ? "right" : "WRONG");
    /* To the device and back, then what the device writes. */
    static uint32_t got[WORDS];
    OK(CU3(cuMemcpyHtoD_v2, at, pinned, BYTES));
    OK(CU3(cuMemcpyDtoH_v2, got, at, BYTES));
    printf("device: it is %s\n", memcmp(got, pinned, BYTES) ? "WRONG" : "right");
    OK(CU3(cuMemsetD32_v2, at, 55, WORDS));
    OK(CU3(cuMemcpyDtoH_v2, pinned, at, BYTES));
    ok(write(to[1], "b", 1) != 1, "write");
    printf("child: %s\n", ended(child));
    OK(CU1(cuMemFreeHost, pinned));
    printf("parent: %s\n", computes(3));
}

static void registered_memory_is_private(void) {
    uint32_t *own = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t at = 0;
    start();
    OK(CU2(cuMemAlloc_v2, &at, BYTES));
    OK(CU3(cuMemHostRegister_v2, own, BYTES, 0));
    own[5] = 1;
    pid_t child = forked();
    if (child == 0) {
        int found = own[5];
        own[5] = 2;
        printf("child: it finds %d\n", found);
        fflush(stdout);
        _exit(0);
    }
    printf("child: %s\n", ended(child));
    printf("parent: it finds %d\n", own[5]);
    OK(CU3(cuMemsetD32_v2, at, 4, WORDS));
    OK(CU3(cuMemcpyDtoH_v2, own, at, BYTES));
    printf("parent: it finds %d\n", own[5]);
    OK(CU1(cuMemHostUnregister, own));
}

static void last_words(void) {
    uint64_t at;
    printf("  at its exit: %d\n", CU2(cuMemAlloc_v2, &at, 4));
    fflush(stdout);
}

/* Exit handlers, and a grandchild. */
static void children_exit(void) {
    start();
    uint64_t stream = 0;
    OK(CU2(cuStreamCreate, &stream, 0));
    pid_t child = forked();
    if (child == 0) {
        atexit(last_words);
        exit(9);
    }
    printf("child that exits: %s\n", ended(child));
    child = forked();
    if (child == 0) {
        uint64_t at;
        pid_t grandchild = forked();
        if (grandchild == 0) {
            ok(setsid() < 0, "setsid");
            _exit(CU2(cuMemAlloc_v2, &at, 4));
        }
        printf("grandchild: %s\n", ended(grandchild));
        exit(CU1(cuStreamDestroy_v2, stream));
    }
    printf("child: %s\n", ended(child));
    printf("parent: %s\n", computes(10));
    OK(CU1(cuStreamSynchronize, stream));
    OK(CU1(cuStreamDestroy_v2, stream));
}

/* Programs that the parent starts are processes of their own. */
static void children_execute(void) {
    start();
    pid_t child = forked();
    if (child == 0) {
        execl("/proc/self/exe", self, "-", (char *)0);
        _exit(1);
    }
    printf("fork and exec: %s\n", ended(child));
    fflush(stdout);
    child = vfork();
    if (child == 0) {
        execl("/proc/self/exe", self, "-", (char *)0);
        _exit(1);
    }
    printf("vfork and exec: %s\n", ended(child));
    fflush(stdout);
    char *line[] = {self, "-", 0};
    ok(posix_spawn(&child, "/proc/self/exe", 0, 0, line, environ), "posix_spawn");
    printf("posix_spawn: %s\n", ended(child));
    printf("parent: %s\n", computes(11));
}

static atomic_int stops;
static atomic_int wrong;
static void *thread(void *number) {
    if (CU1(cuCtxSetCurrent, context))
        wrong++;
    for (uint32_t i = 0; !stops; i++) {
        uint32_t word = 0, want = 1000 * (uint32_t)(uintptr_t)number + i;
        uint64_t at = 0, pinned = 0;
        if (CU2(cuMemAlloc_v2, &at, 4) || CU3(cuMemsetD32_v2, at, want, 1) || CU3(cuMemcpyDtoH_v2, &word, at, 4) ||
            CU1(cuMemFree_v2, at) || CU3(cuMemHostAlloc, &pinned, BYTES, 0) || CU1(cuMemFreeHost, pinned) ||
            word != want)
            wrong++;
    }
    return 0;
}

/* A child finds whatever lock another thread held locked for ever. */
static void one_of_many_threads_forks(void) {
    pthread_t threads[4];
    int refused = 0;
    start();
    for (uintptr_t i = 0; i < 4; i++)
        pthread_create(&threads[i], 0, thread, (void *)(i + 1));
    for (int i = 0; i < 50; i++) {
        pid_t child = forked();
        if (child == 0) {
            uint64_t at = 0;
            int all = CU2(cuMemAlloc_v2, &at, 4) == 3 && CU3(cuMemHostAlloc, &at, 4, 0) == 3 &&
                      CU(cuCtxSynchronize) == 3 && CU2(cuStreamCreate, &at, 0) == 3 &&
                      CU1(cuCtxGetCurrent, &at) == 3 && CU2(cuDevicePrimaryCtxRetain, &at, 0) == 3;
            exit(all ? 6 : 1);
        }
        refused += !strcmp(ended(child), "status 6");
    }
    stops = 1;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], 0);
    printf("%d of 50 children were refused; %d wrong\n", refused, wrong);
    printf("parent: %s\n", computes(12));
}

static atomic_int in_handler;
static void handler(int number) {
    (void)number;
    static function alloc;
    if (!alloc)
        alloc = (function)symbol(driver, "cuMemAlloc_v2");
    int before = errno;
    uint64_t at = 0;
    pid_t child = fork();
    if (child == 0)
        _exit(alloc((uint64_t)&at, 4, 0, 0) == 3 ? 6 : 1);
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    in_handler += WIFEXITED(status) && WEXITSTATUS(status) == 6;
    errno = before;
}

static void a_signal_handler_forks(void) {
    start();
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &action, 0);
    pid_t parent = getpid();
    pid_t sender = forked();
    if (sender == 0) {
        for (int i = 0; i < 20; i++) {
            usleep(3000);
            kill(parent, SIGUSR1);
        }
        _exit(0);
    }
    int right = 1, status;
    uint32_t value = 0;
    while (waitpid(sender, &status, WNOHANG) == 0)
        right &= !strcmp(computes(++value), "right");
    printf("in the handler's child: %s; parent: %s\n", in_handler ? "refused" : "NOT refused", right ? "right" : "WRONG");
}

static void a_child_of_clone_calls(void) {
    start();
    uint64_t at = 0;
    function alloc = (function)symbol(driver, "cuMemAlloc_v2");
    fflush(stdout);
    pid_t child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0)
        _exit(alloc((uint64_t)&at, 4, 0, 0));
    printf("child: %s\n", ended(child));
    printf("parent: %s\n", computes(13));
}

/* A parent that has only asked which devices there are. */
static void after_nvml_children_compute(void) {
    uint32_t count = 0;
    uint64_t device = 0, memory[3] = {0};
    management = library("libnvidia-ml.so.1");
    OK(((function)symbol(management, "nvmlInit_v2"))(0, 0, 0, 0));
    OK(((function)symbol(management, "nvmlDeviceGetCount_v2"))((uint64_t)&count, 0, 0, 0));
    OK(((function)symbol(management, "nvmlDeviceGetHandleByIndex_v2"))(0, (uint64_t)&device, 0, 0));
    OK(((function)symbol(management, "nvmlDeviceGetMemoryInfo"))(device, (uint64_t)memory, 0, 0));
    printf("parent: devices: %s\n", count && memory[0] ? "some" : "NONE");
    for (int i = 0; i < 2; i++) {
        pid_t child = forked();
        if (child == 0) {
            start();
            printf("child: %s\n", computes(20 + i));
            exit(0);
        }
        printf("child: %s\n", ended(child));
    }
    OK(((function)symbol(management, "nvmlDeviceGetCount_v2"))((uint64_t)&count, 0, 0, 0));
    start();
    printf("parent: %s\n", computes(22));
    pid_t child = forked();
    if (child == 0)
        _exit(CU1(cuInit, 0));
    printf("child: %s\n", ended(child));
    printf("parent: %s\n", computes(23));
}

/* A parent that has only asked for the driver's version. */
static void after_the_version_a_child_computes(void) {
    int version = 0;
    driver = library("libcuda.so.1");
    OK(CU1(cuDriverGetVersion, &version));
    pid_t child = forked();
    if (child == 0) {
        start();
        printf("child: %s\n", computes(30));
        exit(0);
    }
    printf("child: %s\n", ended(child));
    start();
    printf("parent: %s\n", computes(31));
}

/* The runtime. */
static void the_runtime_is_refused(void) {
    uint32_t *pinned = 0;
    uint64_t at = 0;
    runtime = library("libcudart.so.13");
    OK(RT3(cudaMalloc, &at, BYTES, 0));
    OK(RT3(cudaMallocHost, &pinned, BYTES, 0));
    pinned[1] = 1;
    pid_t child = forked();
    if (child == 0) {
        int count = 0;
        uint64_t word = 0;
        int code = RT3(cudaGetDeviceCount, &count, 0, 0);
        printf("  cudaGetDeviceCount: %d, %s device\n", code, count == 1 ? "1" : count ? "more than 1" : "no");
        printf("  cudaSetDevice: %d\n", RT3(cudaSetDevice, 0, 0, 0));
        printf("  cudaMalloc: %d\n", RT3(cudaMalloc, &word, 4, 0));
        printf("  cudaMemset: %d\n", RT3(cudaMemset, at, 1, 4));
        printf("  cudaDeviceSynchronize: %d\n", RT3(cudaDeviceSynchronize, 0, 0, 0));
        printf("  cudaStreamCreate: %d\n", RT3(cudaStreamCreate, &word, 0, 0));
        printf("  cudaGetLastError: %d\n", RT3(cudaGetLastError, 0, 0, 0));
        pinned[1] = 2;
        exit(0);
    }
    printf("child: %s\n", ended(child));
    printf("parent: it finds %d\n", pinned[1]);
    OK(RT3(cudaMemset, at, 0x11, BYTES));
    OK(((function)symbol(runtime, "cudaMemcpy"))((uint64_t)pinned, at, BYTES, 2));
    printf("parent: %s\n", pinned[WORDS - 1] == 0x11111111 ? "right" : "WRONG");
}

static const struct {
    const char *name;
    void (*run)(void);
} SCENARIOS[] = {
    {"one-child-calls", one_child_calls},
    {"many-children-call", many_children_call},
    {"pinned-memory-is-shared", pinned_memory_is_shared},
    {"registered-memory-is-private", registered_memory_is_private},
    {"children-exit", children_exit},
    {"children-execute", children_execute},
    {"one-of-many-threads-forks", one_of_many_threads_forks},
    {"a-signal-handler-forks", a_signal_handler_forks},
    {"a-child-of-clone-calls", a_child_of_clone_calls},
    {"after-nvml-children-compute", after_nvml_children_compute},
    {"after-the-version-a-child-computes", after_the_version_a_child_computes},
    {"the-runtime-is-refused", the_runtime_is_refused},
};

int main(int count, char **arguments) {
    self = arguments[0];
    if (count == 2 && !strcmp(arguments[1], "-")) {
        start();
        printf("  a program of its own: %s\n", computes(99));
        return 0;
    }
    int failed = 0;
    for (size_t i = 0; i < sizeof SCENARIOS / sizeof *SCENARIOS; i++) {
        int wanted = count == 1;
        for (int j = 1; j < count; j++)
            wanted |= !strcmp(arguments[j], SCENARIOS[i].name);
        if (!wanted)
            continue;
        printf("== %s\n", SCENARIOS[i].name);
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            alarm(LIMIT);
            SCENARIOS[i].run();
            exit(0);
        }
        const char *how = ended(child);
        failed |= strcmp(how, "status 0") != 0;
        printf("%s\n", how);
    }
    return failed;
}
