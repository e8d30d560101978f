"""Builds and runs programs that have not been built before, if their number is new: `right` at the end."""

import sys

import numpy as np
import pyopencl as cl

first, count = int(sys.argv[1]), int(sys.argv[2])
context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context)
numbers = np.arange(1000, dtype=np.uint32)
buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, numbers.nbytes)
print("building", flush=True)
for number in range(first, first + count):
    source = f"""
        kernel void add(global uint *a) {{ a[get_global_id(0)] += {number}; }}
        kernel void multiply(global uint *a) {{ a[get_global_id(0)] *= {number}; }}
    """
    program = cl.Program(context, source).build()
    cl.enqueue_copy(queue, buffer, numbers)
    program.add(queue, numbers.shape, None, buffer)
    program.multiply(queue, numbers.shape, None, buffer)
    got = np.empty_like(numbers)
    cl.enqueue_copy(queue, got, buffer)
    assert (got == (numbers + np.uint32(number)) * np.uint32(number)).all(), number
print("right")
