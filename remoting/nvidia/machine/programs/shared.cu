// CUDA IPC in C++: memory and an event that a second process opens.
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

__global__ void add(int *x) { x[threadIdx.x] += 5; }

struct Handles {
	cudaIpcMemHandle_t memory;
	cudaIpcEventHandle_t event;
};

int main(int, char **arguments)
{
	Handles handles;
	cudaEvent_t event;
	int *x;
	if (arguments[1]) {
		if (read(0, &handles, sizeof(handles)) != sizeof(handles)) return 1;
		CHECK(cudaIpcOpenMemHandle(reinterpret_cast<void **>(&x), handles.memory, cudaIpcMemLazyEnablePeerAccess));
		CHECK(cudaIpcOpenEventHandle(&event, handles.event));
		CHECK(cudaStreamWaitEvent(0, event));
		add<<<1, 256>>>(x);
		CHECK(cudaDeviceSynchronize());
		CHECK(cudaIpcCloseMemHandle(x));
		return 0;
	}
	CHECK(cudaMalloc(&x, 1024));
	CHECK(cudaMemset(x, 1, 1024));
	CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
	CHECK(cudaEventRecord(event));
	CHECK(cudaIpcGetMemHandle(&handles.memory, x));
	CHECK(cudaIpcGetEventHandle(&handles.event, event));
	int ends[2], status;
	if (pipe(ends)) return 1;
	pid_t child = fork();
	if (!child) {
		dup2(ends[0], 0);
		execl("/proc/self/exe", arguments[0], "child", nullptr);
		_exit(9);
	}
	if (write(ends[1], &handles, sizeof(handles)) != sizeof(handles)) return 1;
	waitpid(child, &status, 0);
	std::printf("child %d\n", WEXITSTATUS(status));
	show("x", x, 256);
	return WEXITSTATUS(status);
}
