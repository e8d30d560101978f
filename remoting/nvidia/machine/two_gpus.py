"""Two GPUs: peer copies, NCCL between two processes, a model trained by both. Rates to stderr."""
import sys
import tempfile
import time

import torch
import torch.distributed as dist


def rate(name, size, turns, call):
    """Prints GB/s of a call that moves so many bytes."""
    call()
    for device in range(2):
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(turns):
        call()
    for device in range(2):
        torch.cuda.synchronize(device)
    print(f"TIME {name} {size * turns / (time.perf_counter() - begin) / 1e9:.1f} GB/s", file=sys.stderr, flush=True)


def rank(number, file):
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", init_method="file://" + file, rank=number, world_size=2)
    torch.backends.cudnn.deterministic = True

    def say(*words):
        if number == 0:
            print(*words, flush=True)

    x = torch.arange(1 << 28, device="cuda", dtype=torch.float32) % 1000 * (number + 1)
    dist.all_reduce(x)
    say("all_reduce", x[::10000001].tolist())
    x.fill_(1)
    begin = None
    for turn in range(13):
        if turn == 3:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        dist.all_reduce(x)
    torch.cuda.synchronize()
    if number == 0:
        seconds = (time.perf_counter() - begin) / 10
        print(f"TIME all_reduce {x.numel() * 4 / seconds / 1e9:.1f} GB/s", file=sys.stderr, flush=True)
    parts = [torch.empty(1000, device="cuda") for _ in range(2)]
    dist.all_gather(parts, torch.full((1000,), float(number), device="cuda"))
    say("all_gather", [part[7].item() for part in parts])
    if number == 0:
        dist.send(torch.arange(10.0, device="cuda"), 1)
    else:
        got = torch.empty(10, device="cuda")
        dist.recv(got, 0)
        assert got[9] == 9
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[number])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(number)
    images, labels = torch.randn(16, 3, 224, 224, device="cuda"), torch.arange(16, device="cuda") % 10
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        say(f"loss {loss.item():.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    print("devices", torch.cuda.device_count(), "peers", torch.cuda.can_device_access_peer(0, 1), flush=True)
    small = torch.arange(1 << 20, device="cuda:0")
    print("copied", int(small.to("cuda:1").sum()), int(small.to("cuda:1").to("cuda:0").sum()), flush=True)
    first = torch.ones(1 << 27, device="cuda:0")
    second = torch.empty_like(first, device="cuda:1")
    rate("peer copy", 1 << 29, 20, lambda: second.copy_(first))
    print("last", second[-1].item(), flush=True)
    torch.multiprocessing.spawn(rank, (tempfile.mktemp(),), 2)
