"""Kernels of Numba and Triton, and what PyTorch compiles."""
import numpy
from digest import run, show


def numba_shared():
    from numba import cuda, float32

    @cuda.jit
    def product(a, b, c):
        left, right = cuda.shared.array((16, 16), float32), cuda.shared.array((16, 16), float32)
        x, y = cuda.grid(2)
        i, j = cuda.threadIdx.x, cuda.threadIdx.y
        total = float32(0)
        for tile in range(a.shape[1] // 16):
            left[i, j], right[i, j] = a[x, tile * 16 + j], b[tile * 16 + i, y]
            cuda.syncthreads()
            for k in range(16):
                total += left[i, k] * right[k, j]
            cuda.syncthreads()
        c[x, y] = total

    a = numpy.random.default_rng(0).standard_normal((128, 128), numpy.float32)
    c = cuda.device_array_like(a)
    product[(8, 8), (16, 16)](cuda.to_device(a), cuda.to_device(a), c)
    show("product", c.copy_to_host())


def numba_atomics():
    from numba import cuda

    @cuda.jit
    def count(values, bins):
        at = cuda.grid(1)
        if at < values.size:
            cuda.atomic.add(bins, values[at] % 10, 1)

    bins = cuda.to_device(numpy.zeros(10, numpy.int32))
    count[40, 256](cuda.to_device(numpy.arange(10000, dtype=numpy.int32) ** 2 % 97), bins)
    show("bins", bins.copy_to_host())


def triton_add():
    import torch
    import triton
    import triton_kernels_here as own

    x, y = torch.arange(10000.0).cuda(), torch.ones(10000).cuda()
    out = torch.empty_like(x)
    own.add[(triton.cdiv(10000, 256),)](x, y, out, 10000, BLOCK=256)
    show("add", out)


def triton_softmax():
    import deterministic
    import torch
    import triton_kernels_here as own

    x = torch.randn(100, 500).cuda()
    out = torch.empty_like(x)
    own.softmax[(100,)](x, out, 500, BLOCK=512)
    show("softmax", out)


def triton_product():
    import deterministic
    import torch
    import triton_kernels_here as own

    a, b = torch.randn(256, 128).half().cuda(), torch.randn(128, 512).half().cuda()
    c = torch.empty(256, 512).cuda()
    own.product[(4, 8)](a, b, c, 256, 512, 128, M=64, N=64, K=32)
    show("product", c)


def triton_of_torch():
    """Kernels with which PyTorch tests its compiler."""
    import deterministic
    import torch
    from torch.testing._internal import triton_utils

    x, y = torch.randn(1000).cuda(), torch.randn(1000).cuda()
    out = torch.zeros_like(x)
    for name in ("add_kernel", "sub_kernel"):
        getattr(triton_utils, name)[(4,)](x, y, out, 1000, BLOCK_SIZE=256)
        show(name, out)
    triton_utils.mul2_kernel[(4,)](x, out, 1000, BLOCK_SIZE=256)
    show("mul2_kernel", out)
    triton_utils.add_kernel_autotuned[lambda meta: (-(-1000 // meta["BLOCK_SIZE"]),)](x, y, out, 1000)
    show("add_kernel_autotuned", out)


def triton_sparse():
    """Triton kernels of torch.sparse."""
    import deterministic
    import torch
    from torch.sparse._triton_ops import bsr_dense_addmm, bsr_softmax

    dense = torch.randn(256, 256).half().cuda()
    dense[:64] = 0
    blocks = dense.to_sparse_bsr((32, 32))
    show("addmm", bsr_dense_addmm(torch.zeros(256, 128).half().cuda(), blocks, torch.randn(256, 128).half().cuda()))
    show("softmax", bsr_softmax(blocks.detach()).values())


def torch_compile():
    import deterministic
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256),
                                torch.nn.Linear(256, 10)).cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(128, 64).cuda()
    for _ in range(4):
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9f}")


def torch_flex_attention():
    import deterministic
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = torch.randn(3, 1, 4, 256, 64).cuda().half().unbind()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
    show("flex", torch.compile(flex_attention)(q, k, v, block_mask=mask))


if __name__ == "__main__":
    run(globals())
