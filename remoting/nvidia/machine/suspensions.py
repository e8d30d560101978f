"""Training that another process suspends at any time: suspensions.py READY STOP trains until the file STOP is there;
READY tells its process. suspensions.py STEPS trains as many steps."""
import hashlib
import os
import sys

import torch
import torchvision

torch.manual_seed(0)
torch.backends.cudnn.deterministic = True
model = torchvision.models.resnet18(num_classes=10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images, labels = torch.randn(32, 3, 224, 224).pin_memory(), torch.arange(32, device="cuda") % 10
counter = torch.zeros(1000, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    counter += 1
step = 0
while step < int(sys.argv[1]) if len(sys.argv) == 2 else not os.path.exists(sys.argv[2]):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images.cuda(non_blocking=True)), labels)
    loss.backward()
    optimizer.step()
    graph.replay()
    step += 1
    print(f"step {step} loss {loss.item():.9f} graph {counter[7].item()}", flush=True)
    if step == 4 and len(sys.argv) > 2:
        with open(sys.argv[1] + ".new", "w") as ready:
            ready.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".new", sys.argv[1])
weights = hashlib.sha1(model.fc.weight.detach().cpu().numpy().tobytes()).hexdigest()
print("weights", weights, "fft", f"{torch.fft.rfft(counter).abs().sum().item():.4f}")
print("solve", f"{torch.linalg.solve(torch.eye(64).cuda() * 2, torch.ones(64, 1).cuda()).sum().item():.4f}", flush=True)
