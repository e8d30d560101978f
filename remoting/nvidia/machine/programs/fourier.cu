// cuFFT: one to three dimensions, and 1,000 small transforms.
#include <cufft.h>
#include "check.h"

int main()
{
	auto *x = device(numbers(1 << 18));
	cufftComplex *y;
	CHECK(cudaMalloc(&y, sizeof(*y) << 18));
	cufftHandle plan;
	CHECK(cufftPlan1d(&plan, 4096, CUFFT_R2C, 32));
	CHECK(cufftExecR2C(plan, x, y));
	show("one", reinterpret_cast<float *>(y), 2 * 2049 * 32);
	CHECK(cufftDestroy(plan));
	CHECK(cufftPlan3d(&plan, 32, 48, 64, CUFFT_C2C));
	CHECK(cudaMemset(y, 0, sizeof(*y) << 18));
	CHECK(cudaMemcpy(y, x, sizeof(float) << 17, cudaMemcpyDeviceToDevice));
	CHECK(cufftExecC2C(plan, y, y, CUFFT_FORWARD));
	CHECK(cufftExecC2C(plan, y, y, CUFFT_INVERSE));
	show("three", reinterpret_cast<float *>(y), 2 * 32 * 48 * 64);
	CHECK(cufftDestroy(plan));
	CHECK(cufftPlan1d(&plan, 64, CUFFT_C2C, 1));
	for (int step = 0; step < 1000; step++) CHECK(cufftExecC2C(plan, y + step * 64, y + step * 64, CUFFT_FORWARD));
	show("small", reinterpret_cast<float *>(y), 2 * 64000);
	CHECK(cufftDestroy(plan));
}
