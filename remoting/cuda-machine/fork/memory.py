"""PyTorch that runs out of memory: its words say how much this process has, which it asks the management library for. Then
it goes on. Loaders with pinned memory, as most programs have them.
"""

import os
import re

import torch


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return torch.full((1024,), index, dtype=torch.int64)


def main():
    kept = torch.ones(1 << 20, device="cuda")
    try:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        words = str(error)
        said = re.search(r"this process has ([0-9.]+) ([KMG]iB) memory in use", words, re.IGNORECASE)
        print("out of memory:", "what this process has is said" if said else words.replace(str(os.getpid()), "PID"))
    print("goes on:", (kept + 1).sum().item())
    for way in ("fork", "forkserver", "spawn"):
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=16, num_workers=4, pin_memory=True, multiprocessing_context=way
        )
        total = sum(batch.cuda(non_blocking=True).sum().item() for batch in loader)
        print(f"{way}: a sum of {total}")


if __name__ == "__main__":
    main()
