// cuSOLVER: LU, QR, eigenvalues, singular values.
#include <cusolverDn.h>
#include "check.h"

int main()
{
	const int n = 128;
	cusolverDnHandle_t handle;
	CHECK(cusolverDnCreate(&handle));
	auto host = numbers(n * n);
	for (int i = 0; i < n; i++)
		for (int j = 0; j < i; j++) host[i * n + j] = host[j * n + i];
	for (int i = 0; i < n; i++) host[i * n + i] += n;
	int size, *pivots, *info;
	float *work, *w;
	CHECK(cudaMalloc(&pivots, n * sizeof(int)));
	CHECK(cudaMalloc(&info, sizeof(int)));
	CHECK(cudaMalloc(&work, 64 << 20));
	CHECK(cudaMalloc(&w, n * sizeof(float)));
	auto *a = device(host);
	CHECK(cusolverDnSgetrf_bufferSize(handle, n, n, a, n, &size));
	CHECK(cusolverDnSgetrf(handle, n, n, a, n, work, pivots, info));
	show("lu", a, n * n);
	show("pivots", pivots, n);
	a = device(host);
	CHECK(cusolverDnSgeqrf_bufferSize(handle, n, n, a, n, &size));
	CHECK(cusolverDnSgeqrf(handle, n, n, a, n, w, work, size, info));
	show("qr", a, n * n);
	a = device(host);
	CHECK(cusolverDnSsyevd_bufferSize(handle, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, n, a, n, w, &size));
	CHECK(cusolverDnSsyevd(handle, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, n, a, n, w, work, size, info));
	show("eigenvalues", w, n);
	a = device(host);
	CHECK(cusolverDnSpotrf_bufferSize(handle, CUBLAS_FILL_MODE_LOWER, n, a, n, &size));
	CHECK(cusolverDnSpotrf(handle, CUBLAS_FILL_MODE_LOWER, n, a, n, work, size, info));
	show("cholesky", a, n * n);
	CHECK(cusolverDnDestroy(handle));
}
