// cuDNN: training steps of a residual block as ResNet-18 has it: convolution, batch normalization, rectifier, addition,
// pooling, and the way back.
#include <cudnn.h>
#include "check.h"

__global__ void descend(float *w, const float *slope, int count) { int at = blockIdx.x * blockDim.x + threadIdx.x; if (at < count) w[at] -= 0.001f * slope[at]; }

const int N = 8, C = 64, S = 28, count = N * C * S * S, weights = C * C * 9;

static float *block(int size) { return device(numbers(size)); }

int main()
{
	cudnnHandle_t handle;
	CHECK(cudnnCreate(&handle));
	std::printf("cudnn %zu\n", cudnnGetVersion() / 10000);
	cudnnTensorDescriptor_t t, p, pooled;
	CHECK(cudnnCreateTensorDescriptor(&t));
	CHECK(cudnnCreateTensorDescriptor(&p));
	CHECK(cudnnCreateTensorDescriptor(&pooled));
	CHECK(cudnnSetTensor4dDescriptor(t, CUDNN_TENSOR_NCHW, CUDNN_DATA_FLOAT, N, C, S, S));
	CHECK(cudnnSetTensor4dDescriptor(pooled, CUDNN_TENSOR_NCHW, CUDNN_DATA_FLOAT, N, C, S / 2, S / 2));
	CHECK(cudnnDeriveBNTensorDescriptor(p, t, CUDNN_BATCHNORM_SPATIAL));
	cudnnFilterDescriptor_t f;
	CHECK(cudnnCreateFilterDescriptor(&f));
	CHECK(cudnnSetFilter4dDescriptor(f, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW, C, C, 3, 3));
	cudnnConvolutionDescriptor_t c;
	CHECK(cudnnCreateConvolutionDescriptor(&c));
	CHECK(cudnnSetConvolution2dDescriptor(c, 1, 1, 1, 1, 1, 1, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT));
	cudnnActivationDescriptor_t r;
	CHECK(cudnnCreateActivationDescriptor(&r));
	CHECK(cudnnSetActivationDescriptor(r, CUDNN_ACTIVATION_RELU, CUDNN_NOT_PROPAGATE_NAN, 0));
	cudnnPoolingDescriptor_t pool;
	CHECK(cudnnCreatePoolingDescriptor(&pool));
	CHECK(cudnnSetPooling2dDescriptor(pool, CUDNN_POOLING_AVERAGE_COUNT_INCLUDE_PADDING, CUDNN_NOT_PROPAGATE_NAN, 2, 2, 0, 0, 2, 2));
	auto *x = block(count), *w = block(weights), *a = block(count), *b = block(count), *y = block(count), *out = block(count / 4);
	auto *da = block(count), *db = block(count), *dy = block(count), *dw = block(weights), *dx = block(count), *work = block(1 << 24);
	auto *scale = block(C), *bias = block(C), *ds = block(C), *dbias = block(C), *mean = block(C), *variance = block(C);
	float one = 1, zero = 0;
	size_t bytes = 4u << 24;
	for (int step = 0; step < 5; step++) {
		CHECK(cudnnConvolutionForward(handle, &one, t, x, f, w, c, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM, work, bytes, &zero, t, a));
		CHECK(cudnnBatchNormalizationForwardTraining(handle, CUDNN_BATCHNORM_SPATIAL, &one, &zero, t, a, t, b, p, scale, bias, 0.1, nullptr, nullptr, 1e-5, mean, variance));
		CHECK(cudnnAddTensor(handle, &one, t, x, &one, t, b));
		CHECK(cudnnActivationForward(handle, r, &one, t, b, &zero, t, y));
		CHECK(cudnnPoolingForward(handle, pool, &one, t, y, &zero, pooled, out));
		// The loss is half the sum of the squares of what comes out: its slope is that itself.
		CHECK(cudnnPoolingBackward(handle, pool, &one, pooled, out, pooled, out, t, y, &zero, t, dy));
		CHECK(cudnnActivationBackward(handle, r, &one, t, y, t, dy, t, b, &zero, t, db));
		CHECK(cudnnBatchNormalizationBackward(handle, CUDNN_BATCHNORM_SPATIAL, &one, &zero, &one, &zero, t, a, t, db, t, da, p, scale, ds, dbias, 1e-5, mean, variance));
		CHECK(cudnnConvolutionBackwardFilter(handle, &one, t, x, t, da, c, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1, work, bytes, &zero, f, dw));
		CHECK(cudnnConvolutionBackwardData(handle, &one, f, w, t, da, c, CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, work, bytes, &zero, t, dx));
		descend<<<weights / 256, 256>>>(w, dw, weights);
		descend<<<1, C>>>(scale, ds, C);
		show("out", out, count / 4);
	}
	show("weights", w, weights);
	show("slope", dx, count);
	CHECK(cudnnDestroy(handle));
}
