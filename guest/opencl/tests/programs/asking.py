# Queries its device's name, computes in groups of a given size, which its driver looks up, waits for the end of its
# input, and computes again. Prints "ok" if the device returns the same as before and the result is correct.
import sys

import numpy as np
import pyopencl as cl

context = cl.Context(cl.get_platforms()[0].get_devices())
queue = cl.CommandQueue(context)
device = context.devices[0]


def said():
    return [device.get_info(getattr(cl.device_info, name)) for name in sys.argv[1:]]


source = "kernel void twice(global uint *a) { a[get_global_id(0)] *= 2; }"
twice = cl.Program(context, source).build().twice
values = np.arange(64, dtype=np.uint32)
buffer = cl.Buffer(context, cl.mem_flags.COPY_HOST_PTR, hostbuf=values)
before = said()
twice(queue, (64,), (64,), buffer)
queue.finish()
print("running", flush=True)
sys.stdin.read()
twice(queue, (64,), (64,), buffer)
got = np.empty_like(values)
cl.enqueue_copy(queue, got, buffer)
print("ok" if said() == before and np.array_equal(got, 4 * values) else "wrong", flush=True)
