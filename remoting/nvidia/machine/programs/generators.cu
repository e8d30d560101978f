// cuRAND: from the host and in a kernel.
#include <curand.h>
#include <curand_kernel.h>
#include "check.h"

__global__ void draw(float *out)
{
	int at = blockIdx.x * blockDim.x + threadIdx.x;
	curandState state;
	curand_init(42, at, 0, &state);
	out[at] = curand_normal(&state) + curand_uniform(&state);
}

int main()
{
	float *out;
	CHECK(cudaMalloc(&out, 40000));
	for (auto kind : {CURAND_RNG_PSEUDO_XORWOW, CURAND_RNG_PSEUDO_PHILOX4_32_10, CURAND_RNG_PSEUDO_MRG32K3A}) {
		curandGenerator_t generator;
		CHECK(curandCreateGenerator(&generator, kind));
		CHECK(curandSetPseudoRandomGeneratorSeed(generator, 1234));
		CHECK(curandGenerateNormal(generator, out, 10000, 0, 1));
		show("normal", out, 10000);
		CHECK(curandDestroyGenerator(generator));
	}
	draw<<<40, 250>>>(out);
	CHECK(cudaDeviceSynchronize());
	show("kernel", out, 10000);
}
