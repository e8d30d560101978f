// Adds two vectors element by element.
extern "C" __global__ void vector_add(const float *a, const float *b, float *sum, int count)
{
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count)
        sum[at] = a[at] + b[at];
}
