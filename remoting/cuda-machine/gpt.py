"""A model of GPT-2's shape (124M parameters by default), trained for 20 steps with autocast and fused AdamW,
by algorithms that give the same each time."""
import argparse
import time

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("depth", type=int, nargs="?", default=12)
parser.add_argument("--attention", choices=["flash", "efficient", "math"], default="flash")
parser.add_argument("--half", action="store_true", help="fp16 with scaled gradients, not bf16")
parser.add_argument("--compile", action="store_true", help="by torch.compile")
parser.add_argument("--graph", action="store_true", help="each step as one CUDA graph")
options = parser.parse_args()
depth, width, heads, length, batch, words = options.depth, 768, 12, 256, 8, 50304
attention = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
             "math": SDPBackend.MATH}[options.attention]
torch.use_deterministic_algorithms(True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.queries(self.first(x)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.second(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block() for _ in range(depth)])
        self.last = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight
        return functional.linear(self.last(self.blocks(x)), self.words.weight)


torch.manual_seed(1)
model = Model().to("cuda")
tokens = torch.randint(0, words, (batch, length + 1)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=options.graph)
scaler = torch.amp.GradScaler("cuda", enabled=options.half)
forward = torch.compile(model) if options.compile else model


def train():
    with sdpa_kernel(attention), torch.autocast("cuda", dtype=torch.float16 if options.half else torch.bfloat16):
        seen = forward(tokens[:, :-1])
        loss = functional.cross_entropy(seen.reshape(-1, words), tokens[:, 1:].reshape(-1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def captured():
    """What runs all of a step by one launch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train()

    def replay():
        graph.replay()
        return loss

    return replay


try:
    train()
except RuntimeError as error:
    print("# not by algorithms that give the same each time:", str(error).splitlines()[0])
    torch.use_deterministic_algorithms(False)
if options.graph:
    train = captured()
for step in range(20):
    print("loss", step, repr(train().item()), flush=True)
torch.cuda.synchronize()
start = time.perf_counter()
for _ in range(20):
    train()
torch.cuda.synchronize()
print(f"# {(time.perf_counter() - start) / 20 * 1e3:.2f} ms a step")
