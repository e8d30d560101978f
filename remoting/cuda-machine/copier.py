"""copier.py rows|volumes|kernels: takes steps of about 2 ms of the device, one ahead. It says "ready"; for each line with a
number of seconds it takes steps for so long, and prints how many commands a second."""
import ctypes
import os
import sys
import time
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p

import driver_api as cuda

kind = sys.argv[1]
cuda.start()
stream, events = cuda.stream(), [cuda.event(), cuda.event()]
DEVICE = 2
PITCH = 1 << 16
ROWS = int(os.environ.get("ROWS", str(1 << 14)))
WIDTH = PITCH - 256
to, from_ = cuda.allocate(PITCH * ROWS), cuda.allocate(PITCH * ROWS)
small = ROWS < 1 << 10

if kind == "rows":
    copy = cuda.Copy2D(srcMemoryType=DEVICE, srcDevice=from_, srcPitch=PITCH, dstMemoryType=DEVICE, dstDevice=to, dstPitch=PITCH,
                       WidthInBytes=WIDTH, Height=ROWS)
    work = lambda: cuda.check("cuMemcpy2DAsync_v2", byref(copy), stream)
elif kind == "volumes":
    copy = cuda.Copy3D(srcMemoryType=DEVICE, srcDevice=from_, srcPitch=PITCH, srcHeight=64, dstMemoryType=DEVICE, dstDevice=to,
                       dstPitch=PITCH, dstHeight=64, WidthInBytes=WIDTH, Height=64, Depth=max(ROWS // 64, 1))
    work = lambda: cuda.check("cuMemcpy3DAsync_v2", byref(copy), stream)
else:
    function = cuda.kernel()
    at, rounds = c_uint64(to), c_uint(10 if small else 50_000)
    values = (c_void_p * 2)(ctypes.cast(byref(at), c_void_p), ctypes.cast(byref(rounds), c_void_p))
    grid = 2 if small else 1056
    work = lambda: cuda.check("cuLaunchKernel", function, grid, 1, 1, 256, 1, 1, 0, stream, values, None)


def step(number):
    for _ in range(steps):
        work()
    cuda.check("cuEventRecord", events[number % 2], stream)
    cuda.check("cuEventSynchronize", events[(number + 1) % 2])


# As many as take about 2 ms.
steps = 1
for _ in range(3):
    work()
cuda.check("cuStreamSynchronize", stream)
begin = time.monotonic()
for _ in range(4):
    work()
cuda.check("cuStreamSynchronize", stream)
one = (time.monotonic() - begin) / 4
steps = max(1, min(64, round(0.002 / one)))
print("ready", steps, round(one * 1e3, 3), flush=True)
for line in sys.stdin:
    seconds = float(line)
    end = time.monotonic() + seconds
    # The first quarter is for the arbiter to see who is there.
    counted, since = 0, time.monotonic() + seconds / 4
    number, began = 0, None
    while True:
        now = time.monotonic()
        if began is None and now >= since:
            counted, began = 0, now
        if now >= end:
            break
        step(number)
        number += 1
        counted += 1
    cuda.check("cuStreamSynchronize", stream)
    print(counted * steps / (time.monotonic() - began), flush=True)
