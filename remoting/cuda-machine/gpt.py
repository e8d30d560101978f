"""A model of GPT-2's shape (124M parameters by default), trained for 20 steps with bf16 autocast, flash
attention and fused AdamW, by algorithms that give the same each time."""
import sys
import time

import torch
from torch import nn
from torch.nn import functional

depth, width, heads, length, batch, words = (
    (int(sys.argv[1]) if len(sys.argv) > 1 else 12), 768, 12, 256, 8, 50304)
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
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def train():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        seen = model(tokens[:, :-1])
        loss = functional.cross_entropy(seen.reshape(-1, words), tokens[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


try:
    train()
except RuntimeError as error:
    print("# not by algorithms that give the same each time:", str(error).splitlines()[0])
    torch.use_deterministic_algorithms(False)
for step in range(20):
    print("loss", step, repr(train().item()), flush=True)
torch.cuda.synchronize()
start = time.perf_counter()
for _ in range(20):
    train()
torch.cuda.synchronize()
print(f"# {(time.perf_counter() - start) / 20 * 1e3:.2f} ms a step")
