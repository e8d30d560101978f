"""A server: loads 2 GiB of weights, and answers each line, a seed, with a checksum of a forward pass."""
import sys
import time

began = time.monotonic()

import torch

LAYERS, WIDTH = 32, 4096


def note(text):
    """Where the time goes."""
    print(f"at {time.monotonic() - began:.1f} s: {text}", flush=True)


@torch.no_grad()
def main():
    note("PyTorch is imported")
    torch.cuda.init()
    note("the driver is initialized")
    torch.manual_seed(1)
    # Of a variance with which activations keep theirs.
    weights = [torch.randn(WIDTH, WIDTH, device="cuda") * (2 / WIDTH) ** 0.5 for _ in range(LAYERS)]
    torch.cuda.synchronize()
    note(f"{torch.cuda.memory_allocated() >> 20} MiB of weights are loaded")
    print("GUEST loaded", flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        torch.manual_seed(int(line))
        x = torch.randn(64, WIDTH, device="cuda")
        for weight in weights:
            x = torch.relu(x @ weight)
        # Each bit of the result counts.
        print(f"answer {line.strip()} {x.view(torch.int32).to(torch.int64).sum().item()}", flush=True)


main()
