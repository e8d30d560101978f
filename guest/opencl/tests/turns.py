"""A closed loop by a library that nobody here wrote: pyopencl.

turns.py MICROSECONDS IN_FLIGHT SECONDS NANOSECONDS does what examples/opencl_turns does with
OPENCL_TURNS_THINK (0 if it is not set), and prints the same: it enqueues so many kernels of so many
microseconds, calls finish, sleeps, and begins again. NANOSECONDS is what an iteration of a kernel takes,
as opencl_turns prints it.
"""

import os
import sys
import time

import numpy
import pyopencl as cl

SOURCE = """
kernel void work(global float *out, int count) {
    float x = out[0];
    for (int i = 0; i != count; i++) x = x * 0.999f + 0.5f;
    out[0] = x;
}
"""


def main():
    micros, in_flight, seconds, nanos = (float(word) for word in sys.argv[1:])
    think = float(os.environ.get("OPENCL_TURNS_THINK", "0")) / 1e6
    context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
    queue = cl.CommandQueue(context)
    kernel = cl.Kernel(cl.Program(context, SOURCE).build(), "work")
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    out = cl.Buffer(context, flags, hostbuf=numpy.ones(1, numpy.float32))
    iterations = int(max(micros * 1e3 / nanos, 1))
    kernel.set_args(out, numpy.int32(iterations))
    print(f"running {nanos:.4f}", flush=True)
    sys.stdin.readline()
    batches = []
    start = last = time.monotonic()
    while last - start < seconds:
        begun = time.monotonic()
        for _ in range(int(in_flight)):
            cl.enqueue_nd_range_kernel(queue, kernel, (1,), None)
        queue.finish()
        last = time.monotonic()
        batches.append(last - begun)
        if think:
            time.sleep(think)
    done = len(batches) * int(in_flight)
    batches.sort()
    slowest = batches[(len(batches) - 1) * 99 // 100]
    alone = done * iterations * nanos / 1e9
    print(f"{done} {last - start:.3f} {alone:.3f} {batches[-1]:.3f} 0.000 {slowest:.6f}")


main()
