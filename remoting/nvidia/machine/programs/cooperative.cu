// A grid that synchronizes, kernels that launch kernels, cudaOccupancy, thrust.
#include <cooperative_groups.h>
#include <thrust/device_vector.h>
#include <thrust/reduce.h>
#include <thrust/sort.h>
#include "check.h"

__global__ void together(int *x, int steps)
{
	auto grid = cooperative_groups::this_grid();
	int at = grid.thread_rank(), count = grid.size();
	for (int step = 0; step < steps; step++) {
		int next = x[(at + 1) % count];
		grid.sync();
		x[at] = next + step;
		grid.sync();
	}
}

__global__ void child(int *x, int value) { x[threadIdx.x] = value + threadIdx.x; }

__global__ void parent(int *x)
{
	if (threadIdx.x == 0)
		for (int part = 0; part < 4; part++) child<<<1, 32>>>(x + part * 32, part * 1000);
}

int main()
{
	std::vector<int> host(2048);
	for (int at = 0; at < 2048; at++) host[at] = at * 37 % 211;
	int *x = device(host), steps = 10, blocks;
	void *arguments[] = {&x, &steps};
	CHECK(cudaLaunchCooperativeKernel((void *)together, dim3(8), dim3(256), arguments));
	show("together", x, 2048);
	parent<<<1, 32>>>(x);
	CHECK(cudaDeviceSynchronize());
	show("children", x, 128);
	CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, together, 256, 0));
	std::printf("blocks %d\n", blocks);
	thrust::device_vector<int> sorted(host.begin(), host.end());
	thrust::sort(sorted.begin(), sorted.end());
	show("sorted", thrust::raw_pointer_cast(sorted.data()), 2048);
	std::printf("sum %d\n", thrust::reduce(sorted.begin(), sorted.end()));
}
