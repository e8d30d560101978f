"""Dense linear algebra."""
from digest import run, show


def torch_factors():
    import deterministic
    import torch

    a = torch.randn(300, 300).cuda()
    s = a @ a.T + 300 * torch.eye(300).cuda()
    show("cholesky", torch.linalg.cholesky(s))
    show("qr", *torch.linalg.qr(a))
    show("lu", *torch.linalg.lu(a))
    show("svd", *torch.linalg.svd(a))
    show("eigh", *torch.linalg.eigh(s))
    show("solve", torch.linalg.solve(a, s))
    show("inverse", torch.linalg.inv(s))
    show("least squares", torch.linalg.lstsq(a[:, :100], a[:, 100:103]).solution)
    show("determinant", torch.linalg.slogdet(s).logabsdet)
    show("exponential", torch.linalg.matrix_exp(a / 100))
    show("eigenvalues", torch.linalg.eigvals(a[:50, :50]))


def torch_kinds():
    """Products of matrices of each type."""
    import deterministic
    import torch

    a, b = torch.randn(512, 768).cuda(), torch.randn(768, 256).cuda()
    for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64):
        show(str(kind), a.to(kind) @ b.to(kind))
    torch.backends.cuda.matmul.allow_tf32 = True
    show("tf32", a @ b)
    show("int8", torch._int_mm((a * 10).to(torch.int8), (b * 10).to(torch.int8)))
    one = torch.ones((), device="cuda")
    eight = torch.float8_e4m3fn
    show("float8", torch._scaled_mm(a.to(eight), b.T.contiguous().to(eight).T, one, one, out_dtype=torch.bfloat16))


def cupy_factors():
    import cupy

    cupy.random.seed(4)
    a = cupy.random.standard_normal((200, 200))
    s = a @ a.T + 200 * cupy.eye(200)
    show("cholesky", cupy.linalg.cholesky(s))
    show("qr", *cupy.linalg.qr(a))
    show("svd", *cupy.linalg.svd(a))
    show("eigh", *cupy.linalg.eigh(s))
    show("solve", cupy.linalg.solve(a, s))
    show("einsum", cupy.einsum("ij,jk,kl->il", a, s, a))


def jax_factors():
    import jax

    numpy = jax.numpy
    a = jax.random.normal(jax.random.key(1), (200, 200))
    s = a @ a.T + 200 * numpy.eye(200)
    for name in ("cholesky", "eigh", "inv"):
        result = jax.jit(getattr(numpy.linalg, name))(s)
        show(name, *(result if isinstance(result, tuple) else (result,)))
    show("qr", *jax.jit(numpy.linalg.qr)(a))
    show("svd", *jax.jit(numpy.linalg.svd)(a))
    show("solve", jax.jit(jax.scipy.linalg.solve)(a, s))


def gaussian_process():
    import deterministic
    import gpytorch
    import torch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.linspace(0, 1, 200).cuda()
    y = torch.sin(6 * x)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().cuda()
    model = Model(x, y, likelihood).cuda()
    loss = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    for _ in range(5):
        optimizer.zero_grad()
        value = -loss(model(x), y)
        value.backward()
        optimizer.step()
        print(f"loss {value.item():.9f}")


if __name__ == "__main__":
    run(globals())
