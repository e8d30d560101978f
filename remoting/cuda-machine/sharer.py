"""A program that shares a GPU with others: sharer.py train|decode|hog|serve|convolve|pause|endless. It says "ready", and for each
line with a number of seconds takes steps for so long, and prints their rate and times (milliseconds) as JSON."""
import json
import sys
import time
from random import Random

import torch

torch.manual_seed(1)
WIDTH = 2048


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def train():
    """Small kernels; each step waits for its loss."""
    layers = [(random(WIDTH, WIDTH) * 0.02).requires_grad_() for _ in range(4)]
    x = random(4096, WIDTH)

    def step():
        y = x
        for layer in layers:
            y = torch.relu(y @ layer)
        loss = (y * y).mean()
        gradients = torch.autograd.grad(loss, layers)
        with torch.no_grad():
            for layer, gradient in zip(layers, gradients):
                layer.sub_(gradient, alpha=1e-3)
        loss.item()
    return step


def decode():
    """Smallest kernels; each step waits for its result."""
    layers = [random(WIDTH, WIDTH) * 0.02 for _ in range(12)]
    x = random(8, WIDTH)

    @torch.no_grad()
    def step():
        y = x
        for layer in layers:
            y = torch.relu(y @ layer)
        y.float().sum().item()
    return step


def hog():
    """Two kernels of 1.6 ms a step; two more steps are enqueued before one is waited for."""
    a, b, c = random(8192, 8192), random(8192, 8192), random(8192, 8192)
    ahead = []

    def step():
        while len(ahead) < 3:
            torch.mm(a, b, out=c)
            torch.mm(a, b, out=c)
            event = torch.cuda.Event()
            event.record()
            ahead.append(event)
        ahead.pop(0).synchronize()
    return step


def serve():
    """Requests that arrive at random, 60 a second in the mean, each a step of `train`; a step's time is that from its arrival."""
    compute, arrivals = train(), Random(1)
    due = ended = 0.0

    def step():
        nonlocal due, ended
        now = time.perf_counter()
        # Requests of a time in which none were taken are not made up for.
        due = (due if now - ended < 0.3 else now) + arrivals.expovariate(60)
        if due > now:
            time.sleep(due - now)
        compute()
        ended = time.perf_counter()
        return due
    return step


def convolve():
    """A convolution network: forward, backward; each step waits for its loss."""
    layers = [torch.nn.Conv2d(3 if i == 0 else 64, 64, 3, padding=1) for i in range(8)]
    network = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.BatchNorm2d(64), torch.nn.ReLU()))).cuda()
    images = torch.randn(32, 3, 56, 56, device="cuda")

    def step():
        network.zero_grad()
        loss = network(images).square().mean()
        loss.backward()
        loss.item()
    return step


def pause():
    """Steps of `train` with 5 ms of something else between them; a step's time is without the pause."""
    compute = train()

    def step():
        time.sleep(0.005)
        begin = time.perf_counter()
        compute()
        return begin
    return step


def endless():
    """One kernel, practically for ever."""
    torch.ones(1, device="cuda").item()

    def step():
        torch.cuda._sleep(10**14)
        torch.cuda.synchronize()
    return step


kind = sys.argv[1]
kinds = [train, decode, hog, serve, convolve, pause, endless]
step = next(one for one in kinds if one.__name__ == kind)()
if kind != "endless":
    for _ in range(30):
        step()
    torch.cuda.synchronize()
print("ready", flush=True)
for line in sys.stdin:
    took, begin = [], time.perf_counter()
    last = begin
    while last - begin < float(line):
        since = step() or last
        now = time.perf_counter()
        took.append(now - since)
        last = now
    took.sort()
    part = {f"p{place}": took[min(len(took) - 1, len(took) * place // 100)] * 1e3 for place in (50, 95, 99)}
    part["longest"] = took[-1] * 1e3
    rounded = {name: round(value, 2) for name, value in part.items()}
    print(json.dumps({"rate": round(len(took) / (last - begin), 1), **rounded}), flush=True)
