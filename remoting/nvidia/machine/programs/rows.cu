// cuSPARSE: a matrix by a vector and by a matrix.
#include <cusparse.h>
#include "check.h"

int main()
{
	const int n = 1000;
	std::vector<int> starts, columns;
	for (int row = 0; row <= n; row++) starts.push_back(row * 3);
	for (int row = 0; row < n; row++)
		for (int k = 0; k < 3; k++) columns.push_back((row + k * k) % n);
	auto *values = device(numbers(3 * n)), *x = device(numbers(n * 8)), *y = device(numbers(n * 8));
	auto *s = device(starts), *c = device(columns);
	cusparseHandle_t handle;
	CHECK(cusparseCreate(&handle));
	cusparseSpMatDescr_t matrix;
	cusparseDnVecDescr_t in, out;
	cusparseDnMatDescr_t many, results;
	CHECK(cusparseCreateCsr(&matrix, n, n, 3 * n, s, c, values, CUSPARSE_INDEX_32I, CUSPARSE_INDEX_32I, CUSPARSE_INDEX_BASE_ZERO, CUDA_R_32F));
	CHECK(cusparseCreateDnVec(&in, n, x, CUDA_R_32F));
	CHECK(cusparseCreateDnVec(&out, n, y, CUDA_R_32F));
	CHECK(cusparseCreateDnMat(&many, n, 8, n, x, CUDA_R_32F, CUSPARSE_ORDER_COL));
	CHECK(cusparseCreateDnMat(&results, n, 8, n, y, CUDA_R_32F, CUSPARSE_ORDER_COL));
	float one = 1, zero = 0;
	void *work;
	CHECK(cudaMalloc(&work, 16 << 20));
	auto plain = CUSPARSE_OPERATION_NON_TRANSPOSE;
	CHECK(cusparseSpMV(handle, plain, &one, matrix, in, &zero, out, CUDA_R_32F, CUSPARSE_SPMV_CSR_ALG2, work));
	show("vector", y, n);
	CHECK(cusparseSpMM(handle, plain, plain, &one, matrix, many, &zero, results, CUDA_R_32F, CUSPARSE_SPMM_CSR_ALG3, work));
	show("matrix", y, n * 8);
	CHECK(cusparseDestroy(handle));
}
