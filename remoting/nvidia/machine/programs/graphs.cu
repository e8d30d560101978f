// Graphs with host nodes, copies, children and changed parameters; host functions; priorities; events.
#include "check.h"

__global__ void add(int *x, int value) { atomicAdd(x + threadIdx.x, value); }

static void CUDART_CB count(void *counter) { ++*static_cast<int *>(counter); }

int main()
{
	int *x, *host, counter = 0, low, high;
	CHECK(cudaMalloc(&x, 1024));
	CHECK(cudaMemset(x, 0, 1024));
	CHECK(cudaMallocHost(&host, 1024));
	CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
	cudaStream_t first, second;
	CHECK(cudaStreamCreateWithPriority(&first, cudaStreamNonBlocking, high));
	CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
	cudaEvent_t fork, join;
	CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
	CHECK(cudaEventCreateWithFlags(&join, cudaEventBlockingSync));
	cudaGraph_t graph;
	cudaGraphExec_t ready;
	CHECK(cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal));
	add<<<1, 256, 0, first>>>(x, 1);
	CHECK(cudaEventRecord(fork, first));
	CHECK(cudaStreamWaitEvent(second, fork));
	add<<<1, 256, 0, second>>>(x, 10);
	CHECK(cudaEventRecord(join, second));
	CHECK(cudaLaunchHostFunc(first, count, &counter));
	CHECK(cudaStreamWaitEvent(first, join));
	CHECK(cudaMemcpyAsync(host, x, 1024, cudaMemcpyDeviceToHost, first));
	CHECK(cudaStreamEndCapture(first, &graph));
	CHECK(cudaGraphInstantiate(&ready, graph, 0));
	for (int step = 0; step < 50; step++) CHECK(cudaGraphLaunch(ready, first));
	CHECK(cudaStreamSynchronize(first));
	std::printf("host %d %d counter %d\n", host[0], host[255], counter);
	size_t nodes;
	CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
	std::printf("nodes %zu\n", nodes);
	CHECK(cudaLaunchHostFunc(second, count, &counter));
	CHECK(cudaEventRecord(join, second));
	CHECK(cudaEventSynchronize(join));
	std::printf("counter %d\n", counter);
	show("x", x, 256);
}
