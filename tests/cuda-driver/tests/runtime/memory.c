/* Devices, memory of all kinds, rows and planes. */
#include <unistd.h>
#include "runtime.h"

/* Holds its stream up for long enough that a call which does not wait returns before. */
static void hold(void *unused) {
    (void)unused;
    usleep(200000);
}

/* Each fill of memory that the host sees has been done when the call returns. */
static void fills(char *at) {
    struct pitched two_rows = {at, 8, 8, 2};
    OK(cudaLaunchHostFunc(NULL, hold, NULL));
    OK(cudaMemset(at, 1, 16));
    HOLDS(at[0] == 1 && at[15] == 1);
    OK(cudaLaunchHostFunc(NULL, hold, NULL));
    OK(cudaMemset2D(at, 8, 2, 4, 2));
    HOLDS(at[0] == 2 && at[4] == 1 && at[11] == 2);
    OK(cudaLaunchHostFunc(NULL, hold, NULL));
    OK(cudaMemset3D(two_rows, 3, (struct extent){4, 2, 1}));
    HOLDS(at[0] == 3 && at[11] == 3);
    OK(cudaLaunchHostFunc(NULL, hold, NULL));
    OK(cudaMemset3D(two_rows, 4, (struct extent){4, 1, 2}));
    HOLDS(at[0] == 4 && at[11] == 3 && at[16] == 4);
    OK(cudaLaunchHostFunc_ptsz(NULL, hold, NULL));
    OK(cudaMemset_ptds(at, 5, 16));
    HOLDS(at[0] == 5 && at[15] == 5);
    OK(cudaLaunchHostFunc_ptsz(NULL, hold, NULL));
    OK(cudaMemset2D_ptds(at, 8, 6, 4, 2));
    HOLDS(at[0] == 6 && at[11] == 6);
    OK(cudaLaunchHostFunc_ptsz(NULL, hold, NULL));
    OK(cudaMemset3D_ptds(two_rows, 7, (struct extent){4, 2, 1}));
    HOLDS(at[0] == 7 && at[11] == 7);
}

int main(void) {
    int devices = 0, device = -1, value = 0;
    char properties[1008];
    OK(cudaGetDeviceCount(&devices));
    HOLDS(devices == 1);
    OK(cudaGetDevice(&device));
    HOLDS(device == 0);
    OK(cudaSetDevice(0));
    IS(InvalidDevice, cudaSetDevice(1));
    OK(cudaGetDeviceProperties(properties, 0));
    HOLDS(strncmp(properties, "Gantry", 6) == 0);
    HOLDS(*(int *)(properties + 308) == 32); /* warpSize */
    HOLDS(*(int *)(properties + 320) == 1024); /* maxThreadsPerBlock */
    OK(cudaDeviceGetAttribute(&value, 10, 0));
    HOLDS(value == 32);
    OK(cudaRuntimeGetVersion(&value));
    HOLDS(value == 13000);
    OK(cudaDriverGetVersion(&value));
    HOLDS(value >= 13000);

    char *at = (char *)1, *more, *managed, *pinned, own[4096];
    size_t free_bytes, total;
    OK(cudaMalloc(&at, 0));
    HOLDS(at == NULL);
    OK(cudaFree(NULL));
    OK(cudaMemGetInfo(&free_bytes, &total));
    IS(MemoryAllocation, cudaMalloc(&at, total * 2));
    OK(cudaMalloc(&at, 4096));
    OK(cudaMallocManaged(&managed, 4096, 1));
    OK(cudaMallocHost(&pinned, 4096));

    struct pointer pointer;
    OK(cudaPointerGetAttributes(&pointer, at + 5));
    HOLDS(pointer.type == 2 && pointer.device == 0 && pointer.device_pointer == at + 5 && !pointer.host_pointer);
    OK(cudaPointerGetAttributes(&pointer, managed));
    HOLDS(pointer.type == 3 && pointer.host_pointer == managed);
    OK(cudaPointerGetAttributes(&pointer, pinned));
    HOLDS(pointer.type == 1 && pointer.host_pointer == pinned);
    OK(cudaPointerGetAttributes(&pointer, own));
    HOLDS(pointer.type == 0 && pointer.device == -2 && !pointer.device_pointer);
    OK(cudaHostRegister(own, sizeof own, 0));
    OK(cudaPointerGetAttributes(&pointer, own));
    HOLDS(pointer.type == 1);
    OK(cudaHostUnregister(own));
    IS(713, cudaHostUnregister(own));

    fills(managed);
    fills(pinned);
    OK(cudaMemset(at, 0x15a, 4096));
    OK(cudaMemcpy(managed, at, 4096, Default));
    HOLDS(managed[0] == 0x5a && managed[4095] == 0x5a);
    OK(cudaMemcpy(at, own, 0, HostToDevice));
    IS(InvalidDirection, cudaMemcpy(at, own, 1, 9));
    memset(own, 1, sizeof own);
    OK(cudaMemcpyPeer(at, 0, managed, 0, 16));

    /* Memory of a stream, from the default pool and by name. */
    cudaMemPool_t pool;
    OK(cudaDeviceGetDefaultMemPool(&pool, 0));
    OK(cudaMallocAsync(&more, 64, NULL));
    OK(cudaMemsetAsync(more, 3, 64, NULL));
    OK(cudaMemcpy(own, more, 64, DeviceToHost));
    HOLDS(own[63] == 3);
    OK(cudaFreeAsync(more, NULL));
    OK(cudaMallocFromPoolAsync(&more, 64, pool, NULL));
    OK(cudaFree(more));

    /* Rows: 3 of 5 bytes, with pitches on both sides. */
    char rows[3][7], back[3][9];
    size_t pitch;
    for (int i = 0; i < 3; i++) memset(rows[i], 'a' + i, 7);
    OK(cudaMallocPitch(&more, &pitch, 5, 3));
    HOLDS(pitch >= 5);
    OK(cudaMemset2D(more, pitch, '.', 5, 3));
    OK(cudaMemcpy2D(more, pitch, rows, 7, 4, 3, HostToDevice));
    memset(back, '-', sizeof back);
    OK(cudaMemcpy2DAsync(back, 9, more, pitch, 5, 3, DeviceToHost, NULL));
    OK(cudaDeviceSynchronize());
    HOLDS(memcmp(back, "aaaa.----bbbb.----cccc.----", 27) == 0);
    IS(InvalidPitch, cudaMemcpy2D(more, pitch, rows, 7, 8, 3, HostToDevice));
    OK(cudaFree(more));

    /* Planes: 2 of 2 rows of 3 bytes, out of a volume of 4 by 3 by 2. */
    char volume[24], part[12];
    for (int i = 0; i < 24; i++) volume[i] = (char)i;
    struct volume copied = {0};
    copied.from = (struct pitched){volume, 4, 4, 3};
    copied.from_position = (struct position){1, 1, 0};
    copied.to = (struct pitched){at, 3, 3, 2};
    copied.extent = (struct extent){3, 2, 2};
    copied.kind = HostToDevice;
    OK(cudaMemcpy3D(&copied));
    OK(cudaMemcpy(part, at, 12, DeviceToHost));
    HOLDS(part[0] == 5 && part[2] == 7 && part[3] == 9 && part[6] == 17 && part[11] == 23);

    OK(cudaFree(at));
    IS(InvalidValue, cudaFree(at));
    OK(cudaFree(managed));
    OK(cudaFreeHost(pinned));
    OK(cudaProfilerStart());
    OK(cudaProfilerStop());

    /* The driver's functions by name: the one for this version. */
    cudaError_t (*count)(int *) = NULL;
    int status = -1;
    OK(cudaGetDriverEntryPointByVersion("cuDeviceGetCount", &count, 13000, 0, &status));
    HOLDS(status == 0 && count(&devices) == 0 && devices == 1);
    OK(cudaGetDriverEntryPointByVersion("cuNothing", &count, 13000, 0, &status));
    HOLDS(status == 1 && count == NULL);

    /* Refused, and said so once. */
    IS(NotSupported, cudaIpcGetMemHandle(part, at));
    IS(NotSupported, cudaIpcGetMemHandle(part, at));

    /* After a reset all begins anew. */
    OK(cudaDeviceReset());
    OK(cudaMalloc(&at, 16));
    OK(cudaFree(at));
    puts("done");
    return 0;
}
