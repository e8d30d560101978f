"""Loaders of data in processes of their own, beside a GPU that is in use."""
import multiprocessing

import torch
from digest import run, show
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, at):
        return torch.full((3, 32, 32), float(at)), at * at


class Pinned(Dataset):
    """Data in pinned memory, which workers read."""

    def __init__(self):
        self.data = torch.arange(64000.0).reshape(64, 1000).pin_memory()

    def __len__(self):
        return 64

    def __getitem__(self, at):
        return self.data[at] * 2


def consume(data, **options):
    start = torch.ones(1, device="cuda")
    weight = torch.arange(32.0, device="cuda")
    for epoch in range(2):
        total = start.clone()
        for images, labels in DataLoader(data, 32, pin_memory=True, **options):
            images = images.to("cuda", non_blocking=True)
            total += (images * weight).sum() + labels.to("cuda", non_blocking=True).sum()
        print("epoch", epoch, total.item(), flush=True)


def fork():
    consume(Squares(), num_workers=3, multiprocessing_context="fork")


def forkserver():
    consume(Squares(), num_workers=2, multiprocessing_context="forkserver")


def spawn():
    consume(Squares(), num_workers=2, multiprocessing_context="spawn")


def persistent():
    consume(Squares(), num_workers=3, multiprocessing_context="fork", persistent_workers=True, prefetch_factor=4)


def pinned():
    x = torch.ones(1, device="cuda")
    for batch in DataLoader(Pinned(), 16, num_workers=2, pin_memory=True, multiprocessing_context="fork"):
        x = x + batch.cuda().sum()
    show("sum", x)


def first_cuda_in_a_child():
    """CUDA in a child of fork, before the parent has used it."""
    def work(queue):
        queue.put(float(torch.ones(1000, device="cuda").sum()))

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print("child", queue.get(timeout=60))
    child.join()
    show("parent", torch.ones(1000, device="cuda"))


def refused_in_a_child():
    """CUDA in a child of fork, after the parent has used it."""
    torch.ones(1, device="cuda")

    def work(queue):
        try:
            queue.put(float(torch.ones(1000, device="cuda").sum()))
        except RuntimeError as error:
            queue.put(str(error).split(".")[0])

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print("child", queue.get(timeout=60))
    child.join()
    show("parent", torch.ones(1000, device="cuda") * 2)


def lightning():
    import logging

    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3072, 10)

        def training_step(self, batch, _):
            return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1) / 256), batch[1] % 10)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    L.seed_everything(3, verbose=False)
    model = Model()
    trainer = L.Trainer(max_epochs=2, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, deterministic=True)
    trainer.fit(model, DataLoader(Squares(), 32, num_workers=2))
    show("weights", model.layer.weight)


if __name__ == "__main__":
    run(globals())
