// Arrays, textures, surfaces, constant memory, printf in kernels.
#include "check.h"

__constant__ float factors[4];

__global__ void sample(cudaTextureObject_t texture, float *out)
{
	int x = threadIdx.x, y = blockIdx.x;
	out[y * 64 + x] = tex2D<float>(texture, x + 0.25f, y + 0.75f) * factors[x % 4];
	if (x == 0 && y == 0) printf("in the kernel %d\n", gridDim.x);
}

__global__ void fill(cudaSurfaceObject_t surface)
{
	surf2Dwrite(float(threadIdx.x * blockIdx.x), surface, threadIdx.x * 4, blockIdx.x);
}

int main()
{
	float host[4] = {1, 2, 3, 4}, *out;
	CHECK(cudaMemcpyToSymbol(factors, host, sizeof(host)));
	auto kind = cudaCreateChannelDesc<float>();
	cudaArray_t array;
	CHECK(cudaMallocArray(&array, &kind, 64, 64, cudaArraySurfaceLoadStore));
	cudaResourceDesc resource = {};
	resource.resType = cudaResourceTypeArray;
	resource.res.array.array = array;
	cudaTextureDesc how = {};
	how.filterMode = cudaFilterModeLinear;
	how.readMode = cudaReadModeElementType;
	cudaTextureObject_t texture;
	cudaSurfaceObject_t surface;
	CHECK(cudaCreateTextureObject(&texture, &resource, &how, nullptr));
	CHECK(cudaCreateSurfaceObject(&surface, &resource));
	CHECK(cudaMalloc(&out, 64 * 64 * 4));
	fill<<<64, 64>>>(surface);
	sample<<<64, 64>>>(texture, out);
	CHECK(cudaDeviceSynchronize());
	show("samples", out, 64 * 64);
}
