// More memory than there is, of each kind; the program goes on with what there is.
#include "check.h"

__global__ void fill(int *x) { x[threadIdx.x] = threadIdx.x * 3; }

int main()
{
	size_t free, total;
	void *refused;
	CHECK(cudaMemGetInfo(&free, &total));
	std::printf("%d\n", cudaMalloc(&refused, total + (1 << 30)));
	std::printf("%s\n", cudaGetErrorString(cudaGetLastError()));
	std::printf("%d\n", cudaMallocManaged(&refused, size_t(1) << 50));
	cudaGetLastError();
	std::printf("%d\n", cudaMallocHost(&refused, size_t(1) << 46));
	cudaGetLastError();
	int *x;
	for (int turn = 0; turn < 100; turn++) {
		CHECK(cudaMalloc(&x, size_t(64) << 20));
		fill<<<1, 256>>>(x);
		CHECK(cudaFree(x));
	}
	CHECK(cudaMalloc(&x, 1024));
	fill<<<1, 256>>>(x);
	show("x", x, 256);
	fill<<<1, 2048>>>(x);
	std::printf("%s\n", cudaGetErrorString(cudaGetLastError()));
	fill<<<1, 256>>>(nullptr);
	std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
	std::printf("%d\n", cudaMalloc(&x, 1024));
}
