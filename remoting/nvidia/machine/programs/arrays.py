"""CuPy: kernels, memory, sorting."""
import cupy
from digest import run, show


def kernels():
    x = cupy.arange(100000, dtype=cupy.float32)
    out = cupy.empty_like(x)
    source = 'extern "C" __global__ void f(const float *x, float *y, int n) {' \
             "int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = x[i] * 0.5f + 3; }"
    cupy.RawKernel(source, "f")((391,), (256,), (x, out, 100000))
    show("raw", out)
    show("elements", cupy.ElementwiseKernel("T x, T y", "T z", "z = x * y - 1", "k")(x, out))
    show("reduction", cupy.ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "n")(out.astype("d")))

    @cupy.fuse()
    def fused(a, b):
        return cupy.where(a > b, a * b, a - b)

    show("fused", fused(x, out))


def memory():
    pool = cupy.get_default_memory_pool()
    for size in (1 << 20, 1 << 24, 1 << 26):
        block = cupy.full(size, 3, cupy.uint8)
        show(f"block {size}", block[::4096])
        del block
    print("used", pool.used_bytes())
    pool.free_all_blocks()
    print("kept", pool.total_bytes())
    pinned = cupy.cuda.alloc_pinned_memory(1 << 20)
    host = __import__("numpy").frombuffer(pinned, "f", 1 << 18)
    host[:] = 7
    device = cupy.empty(1 << 18, "f")
    device.set(host)
    show("pinned", device)
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        show("asynchronous", cupy.arange(1 << 20) * 2)


def order():
    cupy.random.seed(13)
    x = cupy.random.randint(0, 1000, 100000)
    show("sort", cupy.sort(x))
    show("argsort", cupy.argsort(x, kind="stable"))
    show("unique", *cupy.unique(x, return_counts=True))
    show("histogram", cupy.histogram(x, 50)[0])
    show("prefix", cupy.cumsum(x))
    show("partition", cupy.sort(cupy.partition(x, 500)[:500]))


def interchange():
    """One piece of memory, seen by CuPy, PyTorch and Numba."""
    import torch
    from numba import cuda

    x = cupy.arange(1000, dtype=cupy.float32)
    tensor = torch.from_dlpack(x)
    tensor += 1
    show("torch", x)

    @cuda.jit
    def double(a):
        at = cuda.grid(1)
        if at < a.size:
            a[at] *= 2

    double[8, 128](x)
    cuda.synchronize()
    show("numba", tensor)


if __name__ == "__main__":
    run(globals())
