"""A model without matrix products, trained for 20 steps: what PyTorch computes without cuBLAS."""
import time

import torch

torch.manual_seed(1)
device = "cuda"
inputs = torch.randn(4096, 64).to(device)
wanted = torch.sin(inputs).sum(dim=1)
weights = (torch.randn(64, 32) * 0.1).to(device).requires_grad_()
bias = torch.zeros(32, device=device, requires_grad=True)
out = (torch.randn(32) * 0.1).to(device).requires_grad_()
optimizer = torch.optim.Adam([weights, bias, out], lr=1e-2)
torch.cuda.synchronize()
start = time.perf_counter()
for step in range(20):
    hidden = torch.tanh((inputs.unsqueeze(2) * weights).sum(dim=1) + bias)
    loss = ((hidden * out).sum(dim=1) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", step, repr(loss.item()))
print(f"# {(time.perf_counter() - start) / 20 * 1e3:.2f} ms a step")
