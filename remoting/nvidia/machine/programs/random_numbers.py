"""Generators of random numbers."""
from digest import run, show


def torch_generators():
    import deterministic
    import torch

    show("normal", torch.randn(10000, device="cuda"))
    show("uniform", torch.rand(10000, device="cuda", dtype=torch.float64))
    show("integers", torch.randint(0, 1000, (10000,), device="cuda"))
    show("permutation", torch.randperm(10000, device="cuda"))
    show("multinomial", torch.multinomial(torch.rand(100, device="cuda"), 50))
    show("dropout", torch.nn.functional.dropout(torch.ones(10000, device="cuda")))
    show("exponential", torch.empty(10000, device="cuda").exponential_())
    own = torch.Generator("cuda").manual_seed(7)
    show("own", torch.randn(10000, device="cuda", generator=own))
    show("distribution", torch.distributions.Gamma(torch.ones(100).cuda(), 2.0).sample((10,)))


def cupy_generators():
    import cupy

    for kind in (cupy.random.XORWOW, cupy.random.MRG32k3a, cupy.random.Philox4x3210):
        generator = cupy.random.Generator(kind(seed=8))
        show(kind.__name__, generator.random(10000), generator.standard_normal(1000), generator.integers(0, 100, 1000))
    cupy.random.seed(9)
    show("state", cupy.random.normal(size=1000), cupy.random.poisson(5, 1000), cupy.random.gamma(2, size=1000))


def jax_keys():
    import jax

    key = jax.random.key(10)
    for name in ("normal", "uniform", "exponential", "laplace", "gumbel", "cauchy"):
        key, part = jax.random.split(key)
        show(name, getattr(jax.random, name)(part, (10000,)))
    show("permutation", jax.random.permutation(key, 1000))
    show("philox", jax.random.normal(jax.random.key(11, impl="rbg"), (1000,)))


def numba_xoroshiro():
    import numpy
    from numba import cuda
    from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_normal_float32

    @cuda.jit
    def draw(states, out):
        at = cuda.grid(1)
        if at < out.size:
            out[at] = xoroshiro128p_normal_float32(states, at)

    states = create_xoroshiro128p_states(1024, seed=12)
    out = cuda.device_array(1024, numpy.float32)
    for _ in range(3):
        draw[8, 128](states, out)
    show("normal", out.copy_to_host())


if __name__ == "__main__":
    run(globals())
