// Managed memory: by turns from the CPU and the GPU, a managed variable, hints, prefetch.
#include <cstring>
#include "check.h"

__managed__ int variable = 5;

__global__ void change(int *x, int count)
{
	int at = blockIdx.x * blockDim.x + threadIdx.x;
	if (at < count) x[at] = x[at] * 3 + variable;
}

int main(int, char **arguments)
{
	const int count = 1 << 20;
	if (arguments[1] && !std::strcmp(arguments[1], "variable")) {
		int *x = device(std::vector<int>(256, 1));
		variable = 8;
		change<<<1, 256>>>(x, 256);
		CHECK(cudaDeviceSynchronize());
		std::printf("variable %d\n", variable);
		show("x", x, 256);
		return 0;
	}
	int *x;
	CHECK(cudaMallocManaged(&x, count * sizeof(int)));
	for (int at = 0; at < count; at++) x[at] = at % 1000;
	if (arguments[1]) {
		cudaMemLocation where = {cudaMemLocationTypeDevice, 0};
		CHECK(cudaMemAdvise(x, count * sizeof(int), cudaMemAdviseSetPreferredLocation, where));
		CHECK(cudaMemPrefetchAsync(x, count * sizeof(int), where, 0, 0));
	}
	for (int turn = 0; turn < 3; turn++) {
		change<<<count / 256, 256>>>(x, count);
		CHECK(cudaDeviceSynchronize());
		x[turn] += 7;
		variable++;
	}
	show("by turns", x, count);
	CHECK(cudaFree(x));
}
