// The softmax of each row; a block of 128 threads per row.
extern "C" __global__ void softmax(const float *rows, float *out, int columns)
{
    __shared__ float shared[128];
    const float *row = rows + (size_t)blockIdx.x * columns;
    float largest = __int_as_float(0xff800000);
    for (int at = threadIdx.x; at < columns; at += blockDim.x)
        largest = fmaxf(largest, row[at]);
    shared[threadIdx.x] = largest;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            shared[threadIdx.x] = fmaxf(shared[threadIdx.x], shared[threadIdx.x + half]);
        __syncthreads();
    }
    largest = shared[0];
    __syncthreads();
    float sum = 0.0f;
    for (int at = threadIdx.x; at < columns; at += blockDim.x)
        sum += expf(row[at] - largest);
    shared[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    for (int at = threadIdx.x; at < columns; at += blockDim.x)
        out[(size_t)blockIdx.x * columns + at] = expf(row[at] - largest) / shared[0];
}
