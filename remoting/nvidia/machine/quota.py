"""How much memory a program finds and gets, and that it goes on after an error: quota.py."""
import gc
import subprocess

import torch

free, total = (size >> 20 for size in torch.cuda.mem_get_info())
print(f"total {total} MiB, free {free} MiB")
blocks = []
try:
    while True:
        blocks.append(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as error:
    print("blocks of 256 MiB:", len(blocks), "then:", str(error).split(". ")[1])
count = len(blocks)
used = subprocess.run(
    ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], capture_output=True, text=True
).stdout.strip()
print("nvidia-smi: total", used, "MiB")
blocks.clear()
gc.collect()
torch.cuda.empty_cache()
again = [torch.full((256 << 20,), index % 256, dtype=torch.uint8, device="cuda") for index in range(count)]
print("again:", count, "blocks, all right:", all(int(block[12345]) == index % 256 for index, block in enumerate(again)))
del again
torch.cuda.empty_cache()
streams = [torch.cuda.Stream() for _ in range(32)]
for stream in streams:
    with torch.cuda.stream(stream):
        torch.ones(1 << 20, device="cuda").sum()
torch.cuda.synchronize()
before = torch.cuda.mem_get_info()[0]
print("with 32 streams: free", before >> 20, "MiB")
