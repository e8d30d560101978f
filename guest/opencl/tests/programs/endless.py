"""Computes until a call fails; prints `running` once, and the error at the end."""

import numpy as np
import pyopencl as cl
import pyopencl.array as ca

context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context)
values = ca.to_device(queue, np.ones(1000, np.float32))
print("running", flush=True)
try:
    while True:
        values = values * 1
        queue.finish()
except cl.Error as error:
    print("error", error.code)
