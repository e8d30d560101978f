__constant__ int factor[4];
__device__ int counter = 3;
__managed__ int total = 5;

extern "C" __global__ void symbols(const int *from, int *to, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        to[i] = from[i] * factor[i % 4];
        atomicAdd(&counter, 1);
        atomicAdd(&total, from[i]);
    }
}
