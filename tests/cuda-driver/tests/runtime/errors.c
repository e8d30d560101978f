/* Errors: names, texts, the last one of each thread, and a fault that stays. */
#include "runtime.h"
#include "kernels.h"
#include <pthread.h>

static struct wrapper image = {0x466243b1, 1, NULL, NULL};
static struct wrapper damaged = {0x466243b1, 1, "no image", NULL};
static void beyond(void) {}
static void lost(void) {}

__attribute__((constructor)) static void enter(void) {
    image.data = fat_binary(ORDER);
    void **registered = __cudaRegisterFatBinary(&image);
    __cudaRegisterFunction(registered, (char *)beyond, "beyond", "beyond", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFatBinaryEnd(registered);
    registered = __cudaRegisterFatBinary(&damaged);
    __cudaRegisterFunction(registered, (char *)lost, "lost", "lost", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFatBinaryEnd(registered);
}

static void *thread(void *data) {
    OK(cudaGetLastError());
    IS(InvalidDevice, cudaSetDevice(5));
    return data;
}

int main(void) {
    HOLDS(strcmp(cudaGetErrorName(2), "cudaErrorMemoryAllocation") == 0);
    HOLDS(strcmp(cudaGetErrorName(0), "cudaSuccess") == 0);
    HOLDS(strlen(cudaGetErrorString(2)) > 0 && strlen(cudaGetErrorString(98)) > 0);
    HOLDS(strcmp(cudaGetErrorName(12345), "unrecognized error code") == 0);

    /* Nothing but the damaged image is lost by it, and the failure stays. */
    void *arguments[2];
    IS(218, cudaLaunchKernel((void *)lost, of(1), of(1), arguments, 0, NULL));
    IS(218, cudaLaunchKernel((void *)lost, of(1), of(1), arguments, 0, NULL));
    IS(218, cudaPeekAtLastError());

    pthread_t other;
    pthread_create(&other, NULL, thread, NULL);
    pthread_join(other, NULL);
    IS(218, cudaGetLastError());
    OK(cudaGetLastError());

    /* A kernel writes where it has no memory. The launch is well; what waits for it is told, and all
     * that comes later. */
    unsigned *values, far = 1 << 28;
    OK(cudaMalloc(&values, 4));
    arguments[0] = &values;
    arguments[1] = &far;
    OK(cudaLaunchKernel((void *)beyond, of(1), of(1), arguments, 0, NULL));
    IS(IllegalAddress, cudaDeviceSynchronize());
    IS(IllegalAddress, cudaGetLastError());
    IS(IllegalAddress, cudaMalloc(&values, 4));
    IS(IllegalAddress, cudaGetLastError());
    puts("done");
    return 0;
}
