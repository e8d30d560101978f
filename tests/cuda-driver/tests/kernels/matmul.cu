// Multiplies two square matrices, row by row in memory, by tiles in shared memory.
#define TILE 16

extern "C" __global__ void matmul(const float *a, const float *b, float *product, int size)
{
    __shared__ float of_a[TILE][TILE];
    __shared__ float of_b[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y;
    int column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int tile = 0; tile < (size + TILE - 1) / TILE; tile++) {
        int from_a = tile * TILE + threadIdx.x;
        int from_b = tile * TILE + threadIdx.y;
        of_a[threadIdx.y][threadIdx.x] = row < size && from_a < size ? a[row * size + from_a] : 0.0f;
        of_b[threadIdx.y][threadIdx.x] = from_b < size && column < size ? b[from_b * size + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; i++)
            sum += of_a[threadIdx.y][i] * of_b[i][threadIdx.x];
        __syncthreads();
    }
    if (row < size && column < size)
        product[row * size + column] = sum;
}
