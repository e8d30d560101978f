// cuBLAS: products of each type, batches, a triangular solve.
#include <cublas_v2.h>
#include "check.h"

int main()
{
	const int n = 256;
	cublasHandle_t handle;
	CHECK(cublasCreate(&handle));
	auto *a = device(numbers(n * n)), *b = device(numbers(n * n)), *c = device(numbers(n * n));
	float one = 1, zero = 0, dot;
	CHECK(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_T, n, n, n, &one, a, n, b, n, &zero, c, n));
	show("sgemm", c, n * n);
	CHECK(cublasSgemmStridedBatched(handle, CUBLAS_OP_N, CUBLAS_OP_N, 16, 16, 16, &one, a, 16, 256, b, 16, 256, &zero, c, 16, 256, 100));
	show("batches", c, n * n);
	CHECK(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, a, CUDA_R_32F, n, b, CUDA_R_32F, n, &zero, c, CUDA_R_32F, n,
	                   CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_GEMM_DEFAULT));
	show("tf32", c, n * n);
	CHECK(cublasSgemv(handle, CUBLAS_OP_N, n, n, &one, a, n, b, 1, &zero, c, 1));
	show("sgemv", c, n);
	CHECK(cublasSdot(handle, n * n, a, 1, b, 1, &dot));
	std::printf("dot %.6f\n", dot);
	CHECK(cublasDestroy(handle));
}
