// What the tests of streams and errors use.
extern "C" __global__ void spin(unsigned *word, unsigned until)
{
    while (atomicAdd(word, 0u) != until)
        ;
}

extern "C" __global__ void twice(unsigned *values, unsigned count)
{
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count)
        values[at] *= 2;
}

extern "C" __global__ void beyond(unsigned *values, unsigned at)
{
    values[at] = 1;
}

// Blocks wait for each other: all run at once.
extern "C" __global__ void meet(unsigned *arrived, unsigned *seen)
{
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1u);
        while (atomicAdd(arrived, 0u) != gridDim.x)
            ;
        seen[blockIdx.x] = atomicAdd(arrived, 0u);
    }
}
