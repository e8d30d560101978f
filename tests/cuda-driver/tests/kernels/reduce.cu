// Sums integers: by shuffles in each warp, by shared memory among warps, by an atomic among blocks.
extern "C" __global__ void reduce(const int *values, int count, unsigned long long *total)
{
    __shared__ int of_warp[32];
    int sum = 0;
    for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x)
        sum += values[at];
    for (int distance = warpSize / 2; distance > 0; distance /= 2)
        sum += __shfl_down_sync(0xffffffff, sum, distance);
    if (threadIdx.x % warpSize == 0)
        of_warp[threadIdx.x / warpSize] = sum;
    __syncthreads();
    if (threadIdx.x < warpSize) {
        sum = threadIdx.x < (blockDim.x + warpSize - 1) / warpSize ? of_warp[threadIdx.x] : 0;
        for (int distance = warpSize / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(0xffffffff, sum, distance);
        if (threadIdx.x == 0)
            atomicAdd(total, (unsigned long long)sum);
    }
}
