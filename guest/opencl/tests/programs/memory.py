"""Allocates so many MiB of device memory, and says whether it has them; with a further argument, keeps them."""

import sys
import time

import numpy
import pyopencl as cl

mib = int(sys.argv[1])
context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
queue = cl.CommandQueue(context)
try:
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, mib << 20)
    cl.enqueue_fill_buffer(queue, buffer, numpy.uint32(1), 0, mib << 20)
    queue.finish()
except (cl.MemoryError, cl.Error) as error:
    print(cl.status_code.to_string(error.code))
    sys.exit()
print("running", flush=True)
if len(sys.argv) > 2:
    time.sleep(600)
