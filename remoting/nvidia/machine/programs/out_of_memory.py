"""Programs that ask for more memory than there is, and go on."""
from digest import run, show


def torch_caught():
    import torch

    try:
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        print("caught", "out of memory" in str(error))
    show("after", torch.arange(1000).cuda() * 2)


def torch_fraction():
    import torch

    torch.cuda.set_per_process_memory_fraction(0.02)
    blocks = []
    try:
        while True:
            blocks.append(torch.ones(1 << 28, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        print("blocks", len(blocks))
    del blocks[1:]
    torch.cuda.empty_cache()
    show("after", blocks[0][:1000] + 1)


def torch_filled():
    """All memory in blocks of 8 GiB."""
    import torch

    blocks = []
    try:
        while True:
            blocks.append(torch.empty(1 << 33, dtype=torch.uint8, device="cuda"))
            blocks[-1][::1 << 21] = len(blocks)
    except torch.cuda.OutOfMemoryError:
        print("blocks", len(blocks))
    show("first and last", blocks[0][::1 << 28], blocks[-1][::1 << 28])
    del blocks
    torch.cuda.empty_cache()
    show("after", torch.ones(1 << 20, device="cuda"))


def cupy_limit():
    import cupy

    cupy.get_default_memory_pool().set_limit(size=1 << 30)
    for size in (1 << 31, 1 << 42):
        try:
            cupy.zeros(size, cupy.uint8)
        except cupy.cuda.memory.OutOfMemoryError:
            print("caught", size)
    show("after", cupy.arange(1000))


def jax_caught():
    import jax

    try:
        jax.numpy.zeros((1 << 20, 1 << 20)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        print("caught", "RESOURCE_EXHAUSTED" in str(error))
    show("after", jax.numpy.arange(1000) * 2)


def accelerate_batches():
    """accelerate halves the batch until it fits."""
    import torch
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=1 << 14)
    def train(batch):
        print("batch", batch)
        torch.empty(batch, 1 << 26, dtype=torch.uint8, device="cuda")[:, ::1 << 20].fill_(1)
        return batch

    torch.cuda.set_per_process_memory_fraction(0.1)
    print("fits", train())


if __name__ == "__main__":
    run(globals())
