/* Registration, launches and what a kernel is like, as a compiler's host code does it. */
#include "runtime.h"
#include "kernels.h"

static struct wrapper image = {0x466243b1, 1, NULL, NULL};
static void **registered;

static void vector_add(const float *a, const float *b, float *sum, int count) {
    static cudaKernel_t handle;
    void *arguments[] = {&a, &b, &sum, &count};
    stub((void *)vector_add, &handle, arguments);
}

static void missing(void) {
    static cudaKernel_t handle;
    void *arguments[1];
    stub((void *)missing, &handle, arguments);
}

__attribute__((constructor)) static void enter(void) {
    image.data = fat_binary(VECTOR_ADD);
    registered = __cudaRegisterFatBinary(&image);
    __cudaRegisterFunction(registered, (char *)vector_add, "vector_add", "vector_add", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFunction(registered, (char *)missing, "missing", "missing", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFatBinaryEnd(registered);
}

__attribute__((destructor)) static void leave(void) { __cudaUnregisterFatBinary(registered); }

enum { COUNT = 1000 };

static void sums(float *sum, float factor) {
    static float host[COUNT];
    OK(cudaMemcpy(host, sum, sizeof host, DeviceToHost));
    for (int i = 0; i < COUNT; i++) HOLDS(host[i] == factor * (float)i);
    OK(cudaMemset(sum, 0, sizeof host));
}

int main(void) {
    float host[COUNT], *a, *b, *sum;
    for (int i = 0; i < COUNT; i++) host[i] = (float)i;
    OK(cudaMalloc(&a, sizeof host));
    OK(cudaMalloc(&b, sizeof host));
    OK(cudaMalloc(&sum, sizeof host));
    OK(cudaMemcpy(a, host, sizeof host, HostToDevice));
    OK(cudaMemcpy(b, a, sizeof host, DeviceToDevice));

    /* vector_add<<<8, 128>>>(a, b, sum, COUNT) */
    HOLDS(__cudaPushCallConfiguration(of(8), of(128), 0, NULL) == 0);
    vector_add(a, b, sum, COUNT);
    OK(cudaGetLastError());
    sums(sum, 2);

    int count = COUNT;
    void *arguments[] = {&a, &b, &sum, &count};
    OK(cudaLaunchKernel((void *)vector_add, of(8), of(128), arguments, 0, NULL));
    sums(sum, 2);
    OK(cudaLaunchCooperativeKernel((void *)vector_add, of(8), of(128), arguments, 0, NULL));
    sums(sum, 2);
    struct config config = {of(8), of(128), 0, NULL, NULL, 0};
    OK(cudaLaunchKernelExC(&config, (void *)vector_add, arguments));
    sums(sum, 2);

    struct attributes attributes;
    OK(cudaFuncGetAttributes(&attributes, (void *)vector_add));
    HOLDS(attributes.threads == 1024 && attributes.registers > 0 && attributes.ptx > 0);
    OK(cudaFuncSetAttribute((void *)vector_add, 8, 64 << 10));
    OK(cudaFuncGetAttributes(&attributes, (void *)vector_add));
    HOLDS(attributes.dynamic == 64 << 10);
    int blocks = 0;
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, (void *)vector_add, 128, 0));
    HOLDS(blocks > 0);

    /* A library that the program loads itself: its kernel is launched by its handle. */
    cudaLibrary_t library;
    cudaKernel_t kernel;
    OK(cudaLibraryLoadData(&library, VECTOR_ADD, NULL, NULL, 0, NULL, NULL, 0));
    IS(500, cudaLibraryGetKernel(&kernel, library, "nothing"));
    OK(cudaLibraryGetKernel(&kernel, library, "vector_add"));
    OK(cudaLaunchKernel(kernel, of(8), of(128), arguments, 0, NULL));
    sums(sum, 2);
    OK(cudaLibraryUnload(library));

    /* What is wrong is said by the launch, and remembered. */
    HOLDS(cudaGetLastError() == 500);
    __cudaPushCallConfiguration(of(1), of(1025), 0, NULL);
    vector_add(a, b, sum, COUNT);
    IS(InvalidConfiguration, cudaPeekAtLastError());
    IS(InvalidConfiguration, cudaGetLastError());
    OK(cudaGetLastError());
    IS(InvalidConfiguration, cudaLaunchKernel((void *)vector_add, of(0), of(1), arguments, 0, NULL));
    IS(InvalidValue, cudaLaunchKernel((void *)vector_add, of(1), of(1), arguments, 1 << 20, NULL));
    IS(InvalidFunction, cudaLaunchKernel((void *)main, of(1), of(1), arguments, 0, NULL));
    cudaGetLastError();
    __cudaPushCallConfiguration(of(1), of(1), 0, NULL);
    missing();
    IS(InvalidFunction, cudaGetLastError());
    IS(52, __cudaPopCallConfiguration(&config.grid, &config.block, &config.shared, &config.stream));
    puts("done");
    return 0;
}
