"""Runs a kernel that never ends; prints `running` before it waits, and the error at the end."""

import numpy as np
import pyopencl as cl

SOURCE = "kernel void stuck(global volatile int *gate) { while (gate[0] == 0); }"

context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context)
gate = cl.Buffer(context, cl.mem_flags.COPY_HOST_PTR, hostbuf=np.zeros(1, np.int32))
kernel = cl.Program(context, SOURCE).build().stuck
try:
    kernel(queue, (1,), None, gate)
    print("running", flush=True)
    queue.finish()
except cl.Error as error:
    print("error", error.code)
