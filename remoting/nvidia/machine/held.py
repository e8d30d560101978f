"""Device memory that a program holds: held.py READY GO GIB. READY tells its process; when GO is there, the memory is compared."""
import os
import sys
import time

import torch

ready, go, gib = sys.argv[1], sys.argv[2], int(sys.argv[3])
blocks = [torch.full((1 << 28,), value, dtype=torch.int32, device="cuda") for value in range(gib)]
torch.cuda.synchronize()
with open(ready + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(ready + ".new", ready)
while not os.path.exists(go):
    time.sleep(0.02)
for value, block in enumerate(blocks):
    assert bool((block == value).all()), value
print("all", gib, "GiB are right")
