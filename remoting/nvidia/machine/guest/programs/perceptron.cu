// A training loop by cuBLAS and cuBLASLt: a perceptron with one hidden layer, in a graph.
#include <cublasLt.h>
#include <cublas_v2.h>
#include "check.h"

__global__ void rectify(float *x, int count) { int at = blockIdx.x * blockDim.x + threadIdx.x; if (at < count && x[at] < 0) x[at] = 0; }
__global__ void mask(float *slope, const float *x, int count) { int at = blockIdx.x * blockDim.x + threadIdx.x; if (at < count && x[at] <= 0) slope[at] = 0; }
__global__ void difference(float *out, const float *target, int count) { int at = blockIdx.x * blockDim.x + threadIdx.x; if (at < count) out[at] -= target[at]; }

int main()
{
	const int batch = 64, in = 128, hidden = 256, out = 16;
	cublasHandle_t handle;
	CHECK(cublasCreate(&handle));
	cudaStream_t stream;
	CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	void *workspace;
	CHECK(cudaMalloc(&workspace, 8 << 20));
	CHECK(cublasSetStream(handle, stream));
	CHECK(cublasSetWorkspace(handle, workspace, 8 << 20));
	auto *x = device(numbers(in * batch)), *target = device(numbers(out * batch)), *first = device(numbers(hidden * in)), *second = device(numbers(out * hidden));
	auto *h = device(numbers(hidden * batch)), *y = device(numbers(out * batch)), *slope = device(numbers(hidden * batch));
	float one = 1, zero = 0, rate = -0.0005f, loss;
	auto N = CUBLAS_OP_N, T = CUBLAS_OP_T;
	cudaGraph_t graph;
	cudaGraphExec_t step;
	CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
	CHECK(cublasSgemm(handle, N, N, hidden, batch, in, &one, first, hidden, x, in, &zero, h, hidden));
	rectify<<<hidden * batch / 256, 256, 0, stream>>>(h, hidden * batch);
	CHECK(cublasSgemm(handle, N, N, out, batch, hidden, &one, second, out, h, hidden, &zero, y, out));
	difference<<<out * batch / 256, 256, 0, stream>>>(y, target, out * batch);
	CHECK(cublasSgemm(handle, T, N, hidden, batch, out, &one, second, out, y, out, &zero, slope, hidden));
	mask<<<hidden * batch / 256, 256, 0, stream>>>(slope, h, hidden * batch);
	CHECK(cublasSgemm(handle, N, T, out, hidden, batch, &rate, y, out, h, hidden, &one, second, out));
	CHECK(cublasSgemm(handle, N, T, hidden, in, batch, &rate, slope, hidden, x, in, &one, first, hidden));
	CHECK(cudaStreamEndCapture(stream, &graph));
	CHECK(cudaGraphInstantiate(&step, graph, 0));
	for (int turn = 0; turn < 30; turn++) {
		CHECK(cudaGraphLaunch(step, stream));
		if (turn % 5) continue;
		CHECK(cublasSnrm2(handle, out * batch, y, 1, &loss));
		std::printf("loss %.6f\n", loss);
	}
	CHECK(cudaStreamSynchronize(stream));
	show("first", first, hidden * in);
	show("second", second, out * hidden);
	cublasLtHandle_t light;
	cublasLtMatmulDesc_t product;
	cublasLtMatrixLayout_t layout;
	CHECK(cublasLtCreate(&light));
	CHECK(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
	CHECK(cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 64, 64, 64));
	CHECK(cublasLtMatmul(light, product, &one, x, layout, h, layout, &zero, y, layout, slope, layout, nullptr, nullptr, 0, stream));
	CHECK(cudaStreamSynchronize(stream));
	show("light", slope, 64 * 64);
	CHECK(cublasDestroy(handle));
}
