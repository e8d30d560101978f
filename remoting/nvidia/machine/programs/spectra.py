"""Fourier transforms."""
from digest import run, show


def torch_transforms():
    import deterministic
    import torch

    for size in ((1000,), (128, 128), (16, 30, 50), (3, 7, 11, 13)):
        given = torch.randn(size).cuda()
        show(f"fftn {size}", torch.fft.fftn(given))
        show(f"rfftn {size}", torch.fft.rfftn(given))
        show(f"back {size}", torch.fft.irfftn(torch.fft.rfftn(given), s=size))
        show(f"double {size}", torch.fft.ifftn(given.double()))
    show("half", torch.fft.fft(torch.randn(64, 256).cuda().half()))


def torch_audio():
    import deterministic
    import torch
    import torchaudio

    sound = torch.randn(2, 16000).cuda()
    window = torch.hann_window(400).cuda()
    spectrum = torch.stft(sound, 400, window=window, return_complex=True)
    show("stft", spectrum)
    show("istft", torch.istft(spectrum, 400, window=window))
    show("mel", torchaudio.transforms.MelSpectrogram().cuda()(sound))


def cupy_transforms():
    import cupy
    import cupyx.scipy.fft

    cupy.random.seed(3)
    given = cupy.random.standard_normal((64, 100, 30))
    show("fftn", cupy.fft.fftn(given))
    show("dct", cupyx.scipy.fft.dctn(given))
    plan = cupyx.scipy.fft.get_fft_plan(given.astype(cupy.complex64), axes=(1, 2))
    with plan:
        show("planned", cupyx.scipy.fft.fftn(given.astype(cupy.complex64), axes=(1, 2)))


def jax_transforms():
    import jax

    given = jax.random.normal(jax.random.key(0), (32, 60, 100))
    show("fft2", jax.jit(jax.numpy.fft.fft2)(given))
    show("rfft", jax.jit(jax.numpy.fft.rfft)(given))
    show("gradient", jax.grad(lambda x: jax.numpy.abs(jax.numpy.fft.fft(x)).sum())(given))


if __name__ == "__main__":
    run(globals())
