// Copies to and from pinned memory beside kernels on four streams; two- and three-dimensional copies; memset.
#include "check.h"

__global__ void scale(float *x, int count, float by)
{
	int at = blockIdx.x * blockDim.x + threadIdx.x;
	if (at < count) x[at] = x[at] * by + at % 7;
}

int main()
{
	const int parts = 8, count = 1 << 17;
	float *host, *back, *x;
	CHECK(cudaMallocHost(&host, parts * count * sizeof(float)));
	CHECK(cudaMallocHost(&back, parts * count * sizeof(float)));
	CHECK(cudaMalloc(&x, parts * count * sizeof(float)));
	for (int at = 0; at < parts * count; at++) host[at] = at % 1009;
	cudaStream_t streams[4];
	for (auto &stream : streams) CHECK(cudaStreamCreate(&stream));
	for (int part = 0; part < parts; part++) {
		auto stream = streams[part % 4];
		size_t at = size_t(part) * count, bytes = count * sizeof(float);
		CHECK(cudaMemcpyAsync(x + at, host + at, bytes, cudaMemcpyHostToDevice, stream));
		scale<<<count / 256, 256, 0, stream>>>(x + at, count, part + 0.5f);
		CHECK(cudaMemcpyAsync(back + at, x + at, bytes, cudaMemcpyDeviceToHost, stream));
	}
	CHECK(cudaDeviceSynchronize());
	double sum = 0;
	for (int at = 0; at < parts * count; at++) sum += back[at];
	std::printf("sum %.9e\n", sum);
	show("all", x, parts * count);
	CHECK(cudaMemcpy2D(x, 512, host, 1024, 256, 100, cudaMemcpyHostToDevice));
	show("plane", x, 512 * 25);
	cudaPitchedPtr cube;
	CHECK(cudaMalloc3D(&cube, make_cudaExtent(100, 20, 10)));
	CHECK(cudaMemset3D(cube, 5, make_cudaExtent(100, 20, 10)));
	std::printf("cube %02x\n", [&] { unsigned char byte; CHECK(cudaMemcpy(&byte, cube.ptr, 1, cudaMemcpyDeviceToHost)); return byte; }());
}
