"""Sparse matrices."""
from digest import run, show


def torch_rows():
    import deterministic
    import torch

    dense = torch.randn(500, 400) * (torch.rand(500, 400) < 0.05)
    rows = dense.cuda().to_sparse_csr()
    other = torch.randn(400, 64).cuda()
    show("by dense", rows @ other)
    show("by vector", rows @ other[:, 0])
    show("by sparse", (rows @ rows.to_dense().T.contiguous().to_sparse_csr()).to_dense())
    show("coalesced", dense.cuda().to_sparse().coalesce().values())
    show("sampled", torch.sparse.sampled_addmm(rows, torch.ones(500, 8).cuda(), torch.ones(8, 400).cuda()))


def torch_blocks():
    import deterministic
    import torch

    dense = torch.randn(256, 256).half().cuda()
    dense[64:128] = 0
    show("blocks", dense.to_sparse_bsr((16, 16)) @ torch.randn(256, 64).half().cuda())


def torch_half_empty():
    """Two of four values, as tensor cores take them: cuSPARSELt."""
    import deterministic
    import torch
    from torch.sparse import to_sparse_semi_structured

    pattern = torch.tensor([0, 0, 1, 1]).tile((128, 32)).half().cuda()
    sparse = to_sparse_semi_structured(torch.randn(128, 128).half().cuda() * pattern)
    show("product", sparse @ torch.randn(128, 128).half().cuda())


def cupy_rows():
    import cupy
    import cupyx.scipy.sparse
    import cupyx.scipy.sparse.linalg

    cupy.random.seed(5)
    a = cupyx.scipy.sparse.random(400, 400, 0.02, format="csr", random_state=5)
    s = a @ a.T + 10 * cupyx.scipy.sparse.eye(400, format="csr")
    b = cupy.arange(400, dtype=cupy.float64)
    show("by vector", s @ b)
    show("direct", cupyx.scipy.sparse.linalg.spsolve(s, b).round(9))
    show("conjugate gradients", cupyx.scipy.sparse.linalg.cg(s, b, rtol=1e-10)[0].round(6))
    show("transposed", s.T.tocsc())


def graph():
    import deterministic
    import torch
    import torch_geometric.nn
    import torch_geometric.utils

    edges = torch.randint(0, 200, (2, 1000))
    matrix = torch_geometric.utils.to_torch_csr_tensor(torch_geometric.utils.coalesce(edges), size=(200, 200)).cuda()
    first = torch_geometric.nn.GraphConv(32, 64).cuda()
    second = torch_geometric.nn.GraphConv(64, 8).cuda()
    features = torch.randn(200, 32).cuda()
    with torch.no_grad():
        show("graph", second(first(features, matrix).relu(), matrix))


if __name__ == "__main__":
    run(globals())
