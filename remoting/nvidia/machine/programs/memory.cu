// Memory of each kind: refused, pitched, pinned, mapped, registered, asynchronous; what is left after errors.
#include <cstring>
#include "check.h"

__global__ void add(float *x, float value) { x[blockIdx.x * blockDim.x + threadIdx.x] += value; }

int main()
{
	void *none;
	std::printf("refused %d\n", cudaMalloc(&none, size_t(1) << 42));
	std::printf("last error %d, then %d\n", cudaGetLastError(), cudaGetLastError());
	float *x, *mapped, *seen, *own = static_cast<float *>(aligned_alloc(4096, 1 << 20));
	size_t pitch;
	CHECK(cudaMallocPitch(&x, &pitch, 1000, 64));
	CHECK(cudaMemset2D(x, pitch, 1, 1000, 64));
	show("pitched", x, 250);
	CHECK(cudaHostAlloc(&mapped, 1 << 20, cudaHostAllocMapped | cudaHostAllocWriteCombined));
	std::memset(mapped, 0, 1 << 20);
	CHECK(cudaHostGetDevicePointer(&seen, mapped, 0));
	add<<<1024, 256>>>(seen, 2);
	CHECK(cudaDeviceSynchronize());
	std::printf("mapped %g\n", mapped[1000]);
	std::memset(own, 0, 1 << 20);
	CHECK(cudaHostRegister(own, 1 << 20, cudaHostRegisterMapped));
	CHECK(cudaHostGetDevicePointer(&seen, own, 0));
	add<<<1024, 256>>>(seen, 3);
	CHECK(cudaDeviceSynchronize());
	std::printf("registered %g\n", own[1000]);
	CHECK(cudaHostUnregister(own));
	cudaStream_t stream;
	CHECK(cudaStreamCreate(&stream));
	for (int step = 0; step < 20; step++) {
		CHECK(cudaMallocAsync(&x, size_t(step + 1) << 20, stream));
		CHECK(cudaMemsetAsync(x, step, 1 << 20, stream));
		CHECK(cudaFreeAsync(x, stream));
	}
	CHECK(cudaStreamSynchronize(stream));
	std::printf("refused %d\n", cudaMallocAsync(&x, size_t(1) << 42, stream));
	CHECK(cudaMalloc(&x, 1 << 20));
	CHECK(cudaMemset(x, 0, 1 << 20));
	add<<<1024, 256>>>(x, 4);
	show("after", x, 1 << 18);
}
