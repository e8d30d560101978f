// Counts how often each byte occurs: in shared memory in each block, then in device memory.
extern "C" __global__ void histogram(const unsigned char *bytes, unsigned count, unsigned *bins)
{
    extern __shared__ unsigned own[];
    for (unsigned bin = threadIdx.x; bin < 256; bin += blockDim.x)
        own[bin] = 0;
    __syncthreads();
    for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x)
        atomicAdd(&own[bytes[at]], 1u);
    __syncthreads();
    for (unsigned bin = threadIdx.x; bin < 256; bin += blockDim.x)
        if (own[bin])
            atomicAdd(&bins[bin], own[bin]);
}
