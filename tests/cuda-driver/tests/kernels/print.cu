// Each thread of the first warp says where it is.
extern "C" __global__ void print(const char *word, double factor)
{
    if (threadIdx.x < 4)
        printf("%s: block %d thread %u of %u: %5.2f %c %llx %%\n", word, blockIdx.x, threadIdx.x, blockDim.x,
               factor * threadIdx.x, 'a' + (int)threadIdx.x, 0x123456789abcull + threadIdx.x);
}
