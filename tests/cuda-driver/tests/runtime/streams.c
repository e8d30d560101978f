/* Streams, events, host functions, and each thread's default stream. */
#include "runtime.h"
#include "kernels.h"
#include <pthread.h>

static struct wrapper image = {0x466243b1, 1, NULL, NULL};
static void spin(void) {}
static void twice(void) {}

__attribute__((constructor)) static void enter(void) {
    image.data = fat_binary(ORDER);
    void **registered = __cudaRegisterFatBinary(&image);
    __cudaRegisterFunction(registered, (char *)spin, "spin", "spin", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFunction(registered, (char *)twice, "twice", "twice", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFatBinaryEnd(registered);
}

static unsigned *word, *values;

static void release(void *data) { *(volatile unsigned *)data = 1; }

static void told(cudaStream_t stream, cudaError_t status, void *data) {
    *(int *)data = stream != NULL && status == Success ? 7 : -1;
}

static void *thread(void *data) {
    /* Another thread's own stream does not wait for the first one's. */
    unsigned one = 1, count = 1;
    void *doubled[] = {&data, &count};
    OK(cudaMemcpyAsync_ptsz(data, &one, 4, HostToDevice, NULL));
    OK(cudaLaunchKernel_ptsz((void *)twice, of(1), of(1), doubled, 0, NULL));
    OK(cudaStreamSynchronize_ptsz(NULL));
    OK(cudaMemcpy_ptds(&one, data, 4, DeviceToHost));
    HOLDS(one == 2);
    return NULL;
}

int main(void) {
    unsigned until = 1, host[4] = {1, 2, 3, 4}, count = 4;
    OK(cudaMallocHost(&word, 4));
    OK(cudaMalloc(&values, sizeof host));
    *word = 0;
    cudaStream_t first, second;
    cudaEvent_t start, end;
    OK(cudaStreamCreateWithFlags(&first, 1));
    OK(cudaStreamCreateWithPriority(&second, 1, -3));
    int priority;
    OK(cudaStreamGetPriority(second, &priority));
    HOLDS(priority == -3);
    OK(cudaEventCreate(&start));
    OK(cudaEventCreateWithFlags(&end, 0));

    /* The first stream waits in a kernel, the second for the first's event. */
    void *waits[] = {&word, &until}, *doubles[] = {&values, &count};
    OK(cudaMemcpyAsync(values, host, sizeof host, HostToDevice, second));
    OK(cudaEventRecord(start, first));
    OK(cudaLaunchKernel((void *)spin, of(1), of(1), waits, 0, first));
    OK(cudaEventRecord(end, first));
    OK(cudaStreamWaitEvent(second, end, 0));
    OK(cudaLaunchKernel((void *)twice, of(1), of(4), doubles, 0, second));
    IS(NotReady, cudaStreamQuery(second));
    IS(NotReady, cudaEventQuery(end));
    /* Natively as well, what is not ready is a last error. */
    IS(NotReady, cudaGetLastError());
    release(word);
    OK(cudaEventSynchronize(end));
    float milliseconds = -1;
    OK(cudaEventElapsedTime(&milliseconds, start, end));
    HOLDS(milliseconds >= 0);
    OK(cudaStreamSynchronize(second));
    OK(cudaStreamQuery(first));
    OK(cudaMemcpy(host, values, sizeof host, DeviceToHost));
    HOLDS(host[0] == 2 && host[3] == 8);

    int status = 0;
    *word = 0;
    OK(cudaLaunchHostFunc(first, release, word));
    OK(cudaStreamAddCallback(first, told, &status, 0));
    OK(cudaStreamSynchronize(first));
    HOLDS(*word == 1 && status == 7);

    /* This thread's own stream is busy; another thread's is not. */
    *word = 0;
    OK(cudaLaunchKernel_ptsz((void *)spin, of(1), of(1), waits, 0, NULL));
    IS(NotReady, cudaStreamQuery_ptsz(NULL));
    pthread_t other;
    void *own;
    OK(cudaMalloc(&own, 4));
    pthread_create(&other, NULL, thread, own);
    pthread_join(other, NULL);
    IS(NotReady, cudaStreamQuery_ptsz(NULL));
    release(word);
    OK(cudaStreamSynchronize_ptsz(NULL));

    OK(cudaEventDestroy(start));
    OK(cudaEventDestroy(end));
    OK(cudaStreamDestroy(first));
    OK(cudaStreamDestroy(second));
    IS(InvalidHandle, cudaStreamDestroy(first));
    IS(InvalidHandle, cudaStreamDestroy(NULL));
    puts("done");
    return 0;
}
