// What NVML tells of one device, for tests: $STAND_IN/gpu has its UUID, bytes free and bytes in use, then numbers of
// processes and bytes of each.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct process { unsigned number; unsigned long long bytes; unsigned instances[2]; };

static FILE *gpu(char *uuid, unsigned long long *free, unsigned long long *used) {
    char path[4096];
    snprintf(path, sizeof path, "%s/gpu", getenv("STAND_IN"));
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%95s %llu %llu", uuid, free, used) != 3) { fclose(file); file = 0; }
    return file;
}

int nvmlInit_v2(void) {
    char uuid[96];
    unsigned long long free, used;
    FILE *file = gpu(uuid, &free, &used);
    if (!file) return 9;
    fclose(file);
    return 0;
}
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    const char *given = getenv("STAND_IN_VERSION");
    snprintf(version, length, "%s", given ? given : "580.159.04");
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return nvmlInit_v2(); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = device; return index; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    unsigned long long free, used;
    FILE *file = gpu(uuid, &free, &used);
    fclose(file);
    return length < 96;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    const char *given = getenv("STAND_IN_MODEL");
    snprintf(name, length, "%s", given ? given : "NVIDIA H200");
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long memory[3]) {
    char uuid[96];
    FILE *file = gpu(uuid, &memory[1], &memory[2]);
    fclose(file);
    memory[0] = memory[1] + memory[2];
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *processes) {
    char uuid[96];
    unsigned long long free, used;
    FILE *file = gpu(uuid, &free, &used);
    unsigned found = 0;
    while (found < *count && fscanf(file, "%u %llu", &processes[found].number, &processes[found].bytes) == 2) found++;
    fclose(file);
    *count = found;
    return 0;
}
