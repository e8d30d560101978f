"""Managed memory."""
from digest import run, show


def cupy_managed():
    import cupy

    cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)
    x = cupy.arange(1 << 20, dtype="f")
    show("sum", (x * 2).sum(), x[::1000])


def numba_managed():
    import numpy
    from numba import cuda

    @cuda.jit
    def double(a):
        at = cuda.grid(1)
        if at < a.size:
            a[at] *= 2

    x = cuda.managed_array(10000, numpy.float32)
    x[:] = numpy.arange(10000)
    double[40, 256](x)
    cuda.synchronize()
    x += 1
    double[40, 256](x)
    cuda.synchronize()
    show("by turns", numpy.array(x))


def jax_unified():
    """JAX with TF_FORCE_UNIFIED_MEMORY."""
    import jax

    x = jax.random.normal(jax.random.key(0), (1000, 1000))
    show("product", x @ x)


if __name__ == "__main__":
    run(globals())
