// What the other programs do not reach: local arrays, recursion-free calls, votes, switches, doubles,
// globals and constants, 64-bit and byte arithmetic, compare-and-swap, nested and divergent loops.
__constant__ int weights[4] = {3, 5, 7, 11};
__device__ unsigned counter;
__device__ float table[8] = {1.5f, 2.5f};

struct Parameters {
    long long factor;
    short steps[3];
    unsigned char flag;
};

__device__ __noinline__ int collatz(unsigned long long n)
{
    int steps = 0;
    while (n != 1) {
        n = n % 2 ? 3 * n + 1 : n / 2;
        steps++;
    }
    return steps;
}

__device__ __noinline__ double power(double base, int exponent)
{
    double result = 1;
    for (; exponent; exponent >>= 1, base *= base)
        if (exponent & 1)
            result *= base;
    return result;
}

extern "C" __global__ void mixed(Parameters p, long long *out, double *real)
{
    int lane = threadIdx.x;
    int local[16];
    for (int i = 0; i < 16; i++)
        local[i] = i * lane + weights[i % 4];
    unsigned odd = __ballot_sync(0xffffffff, lane & 1);
    int any = __any_sync(0xffffffff, lane == 5), all = __all_sync(0xffffffff, lane >= 0);
    long long value = collatz(lane + 1) + local[(lane * 7) % 16];
    switch (lane % 7) {
    case 0: value += p.factor; break;
    case 1: value -= p.steps[0]; break;
    case 2: value *= p.steps[1]; break;
    case 3: value /= p.steps[2]; break;
    case 4: value <<= 3; break;
    case 5: value = -value >> 1; break;
    default: value ^= 0x5555;
    }
    value += __popc(odd) + any * 100 + all * 1000 + p.flag;
    value += __clz(lane + 1) + __ffs(lane + 1) + (long long)__brev(lane) % 97 + __byte_perm(lane, 0x12345678, 0x3210) % 13;
    value += __umulhi(lane * 0x01234567u, 0x89abcdefu) + __mul64hi(value, 0x123456789abcdefll) + min(lane, 9) + abs(lane - 16);
    real[lane] = power(1.0 + lane / 32.0, lane) + sqrt((double)lane) + fma(0.5, (double)lane, 0.25) + floor(lane * 0.3) + (float)table[lane % 8]
        + rsqrtf(lane + 1.0f) + (double)(long long)(lane * 1.7f) + __shfl_sync(0xffffffff, lane * 2, lane ^ 3) + fabsf(-lane) + sinf(lane * 0.1f) + logf(lane + 1.0f);
    unsigned seen = counter, assumed;
    do {
        assumed = seen;
        seen = atomicCAS(&counter, assumed, assumed + lane);
    } while (seen != assumed);
    atomicMax((int *)&table[7], lane);
    atomicExch(&table[6], 4.5f);
    atomicAdd(&table[5], 0.5f);
    out[lane] = value;
}
