/* Captured graphs and graphs made node by node. */
#include "runtime.h"
#include "kernels.h"

static struct wrapper image = {0x466243b1, 1, NULL, NULL};
static void twice(void) {}

__attribute__((constructor)) static void enter(void) {
    image.data = fat_binary(ORDER);
    void **registered = __cudaRegisterFatBinary(&image);
    __cudaRegisterFunction(registered, (char *)twice, "twice", "twice", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFatBinaryEnd(registered);
}

static void increase(void *data) { ++*(int *)data; }

int main(void) {
    unsigned host[4] = {1, 2, 3, 4}, *values, count = 4;
    OK(cudaMalloc(&values, sizeof host));
    OK(cudaMemcpy(values, host, sizeof host, HostToDevice));
    void *doubles[] = {&values, &count};

    cudaStream_t stream;
    cudaGraph_t graph, into = NULL;
    cudaGraphExec_t executable;
    int state = -1, mode = 2, calls = 0;
    unsigned long long id = 0;
    size_t nodes = 0;
    OK(cudaStreamCreateWithFlags(&stream, 1));
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    OK(cudaStreamBeginCapture(stream, 1));
    OK(cudaStreamIsCapturing(stream, &state));
    HOLDS(state == 1);
    OK(cudaStreamGetCaptureInfo(stream, &state, &id, &into, NULL, NULL, &nodes));
    HOLDS(state == 1 && id != 0 && into != NULL);
    OK(cudaLaunchKernel((void *)twice, of(1), of(4), doubles, 0, stream));
    OK(cudaLaunchKernel((void *)twice, of(1), of(4), doubles, 0, stream));
    OK(cudaLaunchHostFunc(stream, increase, &calls));
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaStreamIsCapturing(stream, &state));
    HOLDS(state == 0);
    OK(cudaGraphGetNodes(graph, NULL, &nodes));
    HOLDS(nodes == 3);
    OK(cudaMemcpy(host, values, sizeof host, DeviceToHost));
    HOLDS(host[0] == 1 && calls == 0);
    OK(cudaGraphInstantiateWithFlags(&executable, graph, 0));
    OK(cudaGraphDestroy(graph));
    for (int i = 0; i < 3; i++) OK(cudaGraphLaunch(executable, stream));
    OK(cudaStreamSynchronize(stream));
    OK(cudaMemcpy(host, values, sizeof host, DeviceToHost));
    HOLDS(host[0] == 64 && host[3] == 256 && calls == 3);
    OK(cudaGraphExecDestroy(executable));

    /* Fill, double, copy back, count. */
    cudaGraphNode_t fill, kernel, copy, function;
    struct fill_node filled = {values, 0, 3, 4, 4, 1};
    struct kernel_node launched = {(void *)twice, of(1), of(4), 0, doubles, NULL};
    struct host_node counted = {increase, &calls};
    OK(cudaGraphCreate(&graph, 0));
    OK(cudaGraphAddMemsetNode(&fill, graph, NULL, 0, &filled));
    OK(cudaGraphAddKernelNode(&kernel, graph, &fill, 1, &launched));
    OK(cudaGraphAddMemcpyNode1D(&copy, graph, &kernel, 1, host, values, sizeof host, DeviceToHost));
    OK(cudaGraphAddHostNode(&function, graph, &copy, 1, &counted));
    launched.function = (void *)main;
    IS(InvalidFunction, cudaGraphAddKernelNode(&kernel, graph, NULL, 0, &launched));
    OK(cudaGraphInstantiate(&executable, graph, 0));
    OK(cudaGraphLaunch(executable, stream));
    OK(cudaStreamSynchronize(stream));
    HOLDS(host[0] == 6 && host[3] == 6 && calls == 4);
    OK(cudaGraphExecDestroy(executable));
    OK(cudaGraphDestroy(graph));
    OK(cudaStreamDestroy(stream));
    puts("done");
    return 0;
}
