// The driver's checkpoint functions, for tests: the state of process N is in the file $STAND_IN/state-N, and what is
// called is added to $STAND_IN/calls. A file $STAND_IN/fail-FUNCTION-N has the answer of a function that fails; with 1000
// more, it fails after it has done its work; less than 0: the caller is killed by this signal. 2000: the program dies, and the
// function fails. Where there is a file $STAND_IN/uninitialized, all of them need cuInit first. A suspension replaces the file
// "gpu" of NVML's by "gpu-then", if there is one.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static FILE *file(const char *kind, int process, const char *mode) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s-%d", getenv("STAND_IN"), kind, process);
    return fopen(path, mode);
}

static int number(const char *kind, int process, int otherwise) {
    int value = otherwise;
    FILE *from = file(kind, process, "r");
    if (from) {
        if (fscanf(from, "%d", &value) != 1) value = otherwise;
        fclose(from);
    }
    return value;
}

static int dies(int process) {
    char path[64], kind = 0;
    kill(process, SIGKILL);
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    while (kind != 'Z') {
        FILE *stat = fopen(path, "r");
        if (!stat) break;
        if (fscanf(stat, "%*d (%*[^)]) %c", &kind) != 1) kind = 0;
        fclose(stat);
        usleep(1000);
    }
    return 999;
}

static int lacks_init(void);

static int step(const char *name, int process, int from, int to) {
    if (lacks_init()) return 3;
    char path[4096], failure[64];
    snprintf(path, sizeof path, "%s/calls", getenv("STAND_IN"));
    FILE *calls = fopen(path, "a");
    fprintf(calls, "%s %d\n", name, process);
    fclose(calls);
    snprintf(failure, sizeof failure, "fail-%s", name);
    int code = number(failure, process, 0);
    if (code < 0) raise(-code);
    if (code == 2000) return dies(process);
    if (code && code < 1000) return code;
    if (number("state", process, 0) != from) return 401;
    FILE *state = file("state", process, "w");
    fprintf(state, "%d", to);
    fclose(state);
    return code ? code - 1000 : 0;
}

static int is_initialized;

static int lacks_init(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s/uninitialized", getenv("STAND_IN"));
    return !is_initialized && !access(path, F_OK);
}

int cuInit(unsigned flags) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible && !*visible) return 100;
    is_initialized = 1;
    return number("fail-init", 0, flags);
}
int cuCheckpointProcessGetState(int process, int *state) {
    if (lacks_init()) return 3;
    int code = number("fail-state", process, 0);
    *state = number("state", process, 0);
    return code == 2000 ? dies(process) : code;
}
int cuCheckpointProcessLock(int process, void *block) { return block ? step("lock", process, 0, 1) : 1; }
int cuCheckpointProcessUnlock(int process, void *block) { return step("unlock", process, 1, 0); }
int cuCheckpointProcessCheckpoint(int process, void *block) {
    char from[4096], to[4096];
    snprintf(from, sizeof from, "%s/gpu-then", getenv("STAND_IN"));
    snprintf(to, sizeof to, "%s/gpu", getenv("STAND_IN"));
    int code = step("checkpoint", process, 1, 2);
    rename(from, to);
    return code;
}

int cuCheckpointProcessRestore(int process, void *block) {
    struct { const unsigned char (*pairs)[2][16]; unsigned count; } *words = block;
    for (unsigned at = 0; at < words->count; at++) {
        FILE *pairs = file("pairs", process, "a");
        fprintf(pairs, "%x=%x ", words->pairs[at][0][15], words->pairs[at][1][15]);
        fclose(pairs);
    }
    return step("restore", process, 2, 1);
}
