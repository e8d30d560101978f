"""PyTorch, imported once: each line of the input names what is then trained on the GPU. Prints losses."""
import time

began = time.monotonic()

import sys

import torch
import torch.nn.functional as F


def note(text):
    """Where the time goes."""
    print(f"at {time.monotonic() - began:.1f} s: {text}", flush=True)


@torch.no_grad()
def descend(momentum, rate=0.01, kept=0.9):
    """A step of SGD with momentum, as torch.optim.SGD makes it: importing that would import the compiler, twice as many modules."""
    for parameter, velocity in momentum:
        velocity.mul_(kept).add_(parameter.grad)
        parameter.sub_(velocity, alpha=rate)


def steps(model, loss_of, count=5):
    note("the model is made")
    momentum = [(parameter, torch.zeros_like(parameter)) for parameter in model.parameters()]
    for _ in range(count):
        begin = time.monotonic()
        model.zero_grad()
        loss = loss_of(model)
        if not took:
            note("forward")
        loss.backward()
        if not took:
            note("backward")
        descend(momentum)
        print(f"loss {loss.item():.9f}", flush=True)
        took.append(time.monotonic() - begin)


def perceptron(size=4096):
    layers = [torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, size), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(size, 10))
    inputs, classes = torch.randn(64, size), torch.arange(64) % 10
    steps(model, lambda model: F.cross_entropy(model(inputs), classes), 20)


class Residual(torch.nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.conv2 = torch.nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = torch.nn.BatchNorm2d(width), torch.nn.BatchNorm2d(width)
        self.short = None
        if before != width:
            short = torch.nn.Conv2d(before, width, 1, stride, bias=False)
            self.short = torch.nn.Sequential(short, torch.nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (self.short(x) if self.short else x))


def resnet18():
    """As torchvision has it."""
    layers = [torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width in (64, 128, 256, 512):
        layers += [Residual(before, width, 1 if width == before else 2), Residual(width, width, 1)]
        before = width
    model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 100))
    images, classes = torch.randn(16, 3, 224, 224), torch.arange(16) % 100
    steps(model, lambda model: F.cross_entropy(model(images), classes))


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attend, self.project = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.widen, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.project(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))


class Gpt2(torch.nn.Module):
    """GPT-2's small model: twelve blocks."""

    def __init__(self, words=50257, width=768, heads=12, blocks=12, length=256):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(words, width), torch.nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = torch.nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = torch.nn.LayerNorm(width)
        torch.nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, text):
        x = self.norm(self.blocks(self.words(text) + self.places[: text.shape[1]]))
        return x @ self.words.weight.T


def gpt2(words=50257, **more):
    model = Gpt2(words, **more)
    text = torch.randint(0, words, (2, 257))

    def loss(model):
        with torch.autocast("cuda", torch.bfloat16):
            scores = model(text[:, :-1])
        return F.cross_entropy(scores.float().flatten(0, 1), text[:, 1:].flatten())

    steps(model, loss)


took = []


def main():
    global began
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Its attention is not deterministic.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # As torch.use_deterministic_algorithms does, which would import the compiler.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    note("PyTorch is imported")
    print("GUEST imported", flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name == "end":
            break
        began = time.monotonic()
        took.clear()
        print(f"GUEST begin {name}", flush=True)
        with torch.device("cuda"):
            torch.cuda.init()
            note("the driver is initialized")
            torch.zeros(1)
            note("the GPU has computed")
            torch.manual_seed(1)
            {"perceptron": perceptron, "resnet18": resnet18, "gpt2": gpt2}[name]()
        steady = sorted(took)[len(took) // 2]
        print(f"GUEST done {name} {time.monotonic() - began:.3f} {steady:.4f}", flush=True)


main()
