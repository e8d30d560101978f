"""Several processes or ranks: NCCL, DDP, FSDP. With one GPU, NCCL has one rank."""
import os
import tempfile

import deterministic
import torch
import torch.distributed as dist
from digest import run, show


def begin(backend="nccl", rank=0, ranks=1, file=None):
    file = file or tempfile.mktemp()
    dist.init_process_group(backend, init_method="file://" + file, rank=rank, world_size=ranks)


def nccl():
    begin()
    x = torch.arange(1000.0).cuda()
    dist.all_reduce(x)
    show("reduced", x)
    parts = [torch.empty_like(x)]
    dist.all_gather(parts, x)
    show("gathered", *parts)
    dist.broadcast(x, 0)
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, x)
    dist.all_to_all_single(out, x)
    show("scattered", out)
    dist.barrier()
    dist.destroy_process_group()


def train(model, count=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    x = torch.randn(32, 64).cuda()
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.9f}", flush=True)


def layers():
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)).cuda()


def ddp():
    begin()
    train(torch.nn.parallel.DistributedDataParallel(layers()))
    dist.destroy_process_group()


def fsdp():
    from torch.distributed.fsdp import fully_shard

    begin()
    model = layers()
    for layer in model:
        fully_shard(layer)
    train(fully_shard(model))
    dist.destroy_process_group()


def worker(rank, file):
    torch.cuda.set_device(0)
    begin("gloo", rank, 2, file)
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(layers())
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    train(model)
    dist.destroy_process_group()


def two_processes():
    """Two processes on one GPU, which NCCL refuses: gloo."""
    torch.multiprocessing.spawn(worker, (tempfile.mktemp(),), 2)


def cupy_nccl():
    import cupy
    from cupy.cuda import nccl

    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    x, y = cupy.arange(1000, dtype="f"), cupy.zeros(1000, "f")
    communicator.allReduce(x.data.ptr, y.data.ptr, 1000, nccl.NCCL_FLOAT, nccl.NCCL_SUM, cupy.cuda.Stream.null.ptr)
    cupy.cuda.Stream.null.synchronize()
    show("reduced", y)


if __name__ == "__main__":
    run(globals())
