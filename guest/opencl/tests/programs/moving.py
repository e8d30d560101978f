# Computes with objects of most kinds until the end given by its first argument (see until.py), and checks every
# result. Prints "ok" at the end, "error" if OpenCL failed, and "wrong" if a result was incorrect. With a second
# argument, nothing is in memory that the host and the device share.
import sys

import numpy as np
import pyopencl as cl
from until import ends

SOURCE = """
kernel void generate(global uint *a, uint n, uint k) {
    uint i = get_global_id(0);
    uint x = a[i];
    for (uint j = 0; j < k; j++) x = x * 1664525u + 1013904223u;
    a[i] = x;
}
kernel void total(global const uint *a, global uint *o, uint n) {
    uint s = 0;
    for (uint i = 0; i < n; i++) s += a[i];
    o[0] = s;
}
"""
COUNT = 1 << 14
# A move selects the parts of a buffer to copy in blocks of this many bytes.
BLOCK = 1 << 16
STEPS = 50


def equal(got, wanted):
    if not np.array_equal(got, wanted):
        print("wrong", flush=True)
        sys.exit(4)


def compute(until, unmapped):
    context = cl.Context(cl.get_platforms()[0].get_devices())
    measured = cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)
    plain = cl.CommandQueue(context)
    program = cl.Program(context, SOURCE).build()
    flags = cl.mem_flags
    values = np.arange(COUNT, dtype=np.uint32)
    buffer = cl.Buffer(context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=values)
    part = buffer.get_sub_region(4096, 4096)
    shared = 0 if unmapped else flags.ALLOC_HOST_PTR
    pinned = cl.Buffer(context, flags.READ_WRITE | shared, size=4 * COUNT)
    result = cl.Buffer(context, flags.WRITE_ONLY, 4)
    # Most of it is never written.
    sparse, marks = cl.Buffer(context, flags.READ_WRITE, 64 * BLOCK), {}
    pixels = np.random.randint(0, 255, (64, 64, 4)).astype(np.uint8)
    form = cl.ImageFormat(cl.channel_order.RGBA, cl.channel_type.UNSIGNED_INT8)
    image = cl.Image(context, flags.READ_WRITE, form, shape=(64, 64))
    cl.enqueue_copy(measured, image, pixels, origin=(0, 0), region=(64, 64))
    undecided = cl.UserEvent(context)
    generate, total = program.generate, program.total
    generate.set_args(buffer, np.uint32(COUNT), np.uint32(STEPS))
    total.set_args(buffer, result, np.uint32(COUNT))
    factor, addend = 1, 0
    for _ in range(STEPS):
        factor, addend = factor * 1664525 % 2**32, (addend * 1664525 + 1013904223) % 2**32
    factor, addend = np.uint32(factor), np.uint32(addend)

    def map_pinned():
        return cl.enqueue_map_buffer(
            measured, pinned, cl.map_flags.WRITE, 0, (COUNT,), np.uint32
        )[0]

    mapped = None if unmapped else map_pinned()
    print("running", flush=True)
    is_over = ends(until)
    rounds = 0
    while not is_over():
        events = []
        for _ in range(3):
            events.append(cl.enqueue_nd_range_kernel(measured, generate, (COUNT,), None))
            values = values * factor + addend
        summed = cl.enqueue_nd_range_kernel(plain, total, (1,), None, wait_for=[events[-1]])
        got = np.empty(1, np.uint32)
        cl.enqueue_copy(plain, got, result, wait_for=[summed])
        equal(got[0], int(values.sum(dtype=np.uint64)) % 2**32)
        if events[0].profile.end < events[0].profile.start:
            sys.exit(4)
        # Across the end of one of twelve blocks.
        at, mark = (5 * (rounds % 12) + 1) * BLOCK - 8, np.full(4, rounds + 1, np.uint32)
        if rounds % 2:
            cl.enqueue_copy(measured, sparse, mark, dst_offset=at)
        else:
            cl.enqueue_fill_buffer(measured, sparse, mark[:1], at, mark.nbytes)
        marks[at] = mark
        if rounds % 5 == 0:
            for at, mark in marks.items():
                got = np.empty_like(mark)
                cl.enqueue_copy(measured, got, sparse, src_offset=at)
                equal(got, mark)
            got = np.empty(COUNT, np.uint32)
            cl.enqueue_copy(measured, got, buffer)
            equal(got, values)
            got = np.empty(1024, np.uint32)
            cl.enqueue_copy(measured, got, part)
            equal(got, values[1024:2048])
            got = np.empty_like(pixels)
            cl.enqueue_copy(measured, got, image, origin=(0, 0), region=(64, 64))
            equal(got, pixels)
        if rounds % 5 == 0 and mapped is not None:
            # Written while a move may be in progress.
            mapped[:] = values
            mapped.base.release(measured)
            got = np.empty(COUNT, np.uint32)
            cl.enqueue_copy(measured, got, pinned)
            equal(got, values)
            mapped = map_pinned()
        rounds += 1
    undecided.set_status(cl.command_execution_status.COMPLETE)
    cl.wait_for_events([undecided])
    print("ok", flush=True)


try:
    compute(sys.argv[1], len(sys.argv) > 2)
except cl.Error:
    print("error", flush=True)
    sys.exit(3)
