// Waits that sleep: blocking synchronization of the device, of events and streams, from several threads; callbacks.
#include <thread>
#include "check.h"

__global__ void work(int *x, int turns)
{
	int value = x[threadIdx.x];
	for (int turn = 0; turn < turns; turn++) value = value * 5 + turn;
	x[threadIdx.x] = value;
}

static void CUDART_CB called(cudaStream_t, cudaError_t, void *counter) { ++*static_cast<int *>(counter); }

static void run(int *x, int *counter)
{
	cudaStream_t stream;
	cudaEvent_t event;
	CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	CHECK(cudaEventCreateWithFlags(&event, cudaEventBlockingSync | cudaEventDisableTiming));
	for (int turn = 0; turn < 20; turn++) {
		work<<<1, 256, 0, stream>>>(x, 200000);
		CHECK(cudaEventRecord(event, stream));
		CHECK(cudaEventSynchronize(event));
		CHECK(cudaStreamAddCallback(stream, called, counter, 0));
		CHECK(cudaStreamSynchronize(stream));
	}
	CHECK(cudaEventDestroy(event));
	CHECK(cudaStreamDestroy(stream));
}

int main()
{
	CHECK(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync));
	int counters[2] = {}, *x = device(std::vector<int>(512, 3));
	std::thread first(run, x, &counters[0]), second(run, x + 256, &counters[1]);
	first.join();
	second.join();
	std::printf("callbacks %d %d\n", counters[0], counters[1]);
	cudaEvent_t begin, end;
	float ms;
	CHECK(cudaEventCreate(&begin));
	CHECK(cudaEventCreateWithFlags(&end, cudaEventBlockingSync));
	CHECK(cudaEventRecord(begin));
	work<<<1, 256>>>(x, 1000000);
	CHECK(cudaEventRecord(end));
	CHECK(cudaEventSynchronize(end));
	CHECK(cudaEventElapsedTime(&ms, begin, end));
	std::printf("time %s\n", ms > 0 ? "passed" : "stood still");
	CHECK(cudaDeviceSynchronize());
	show("x", x, 512);
}
