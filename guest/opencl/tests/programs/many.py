"""Has forty thousand kernels under way before it waits; prints how many have run."""

import numpy as np
import pyopencl as cl

SOURCE = "kernel void count(global int *counter) { counter[0] += 1; }"

context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context)
counter = cl.Buffer(context, cl.mem_flags.COPY_HOST_PTR, hostbuf=np.zeros(1, np.int32))
kernel = cl.Program(context, SOURCE).build().count
kernel.set_arg(0, counter)
for _ in range(40_000):
    cl.enqueue_nd_range_kernel(queue, kernel, (1,), None)
result = np.zeros(1, np.int32)
cl.enqueue_copy(queue, result, counter)
print(result[0], "have run")
