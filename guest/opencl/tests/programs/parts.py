"""Uses most of OpenCL through pyopencl. Prints a line per part; the last is `all`."""

import os
import tempfile
import time

import numpy as np
import pyopencl as cl
import pyopencl.array as ca
import pyopencl.clmath as cm
from pyopencl.scan import GenericScanKernel

flags = cl.mem_flags
context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)
numbers = np.random.default_rng(1).random(100000).astype(np.float32)


def fetch(buffer, like):
    """The buffer's contents."""
    into = np.empty_like(like)
    cl.enqueue_copy(queue, into, buffer)
    return into


def arrays():
    device = ca.to_device(queue, numbers)
    assert np.allclose((device * 2 + 1).get(), numbers * 2 + 1)
    assert np.allclose(cm.sin(device).get(), np.sin(numbers), rtol=1e-5)
    assert abs(ca.sum(device).get() - numbers.sum()) < 1
    big = np.random.default_rng(2).random((5, 1 << 20))
    assert (ca.to_device(queue, big).get() == big).all()


def scan():
    kernel = GenericScanKernel(
        context,
        np.int32,
        arguments="__global int *ary",
        input_expr="ary[i]",
        scan_expr="a+b",
        neutral="0",
        output_statement="ary[i]=item;",
    )
    values = ca.arange(queue, 10000, dtype=np.int32)
    kernel(values)
    assert (values.get() == np.cumsum(np.arange(10000))).all()


def events():
    user = cl.UserEvent(context)
    marker = cl.enqueue_marker(queue, wait_for=[user])
    seen = []
    marker.set_callback(cl.command_execution_status.COMPLETE, seen.append)
    user.set_status(0)
    marker.wait()
    for _ in range(1000):
        if seen:
            break
        time.sleep(0.01)
    assert seen == [0]


def images():
    picture = np.random.default_rng(3).random((4, 16, 4)).astype(np.float32)
    image = cl.image_from_array(context, picture, 4)
    back = np.zeros_like(picture)
    cl.enqueue_copy(queue, back, image, origin=(0, 0), region=(16, 4))
    assert (back == picture).all()
    program = cl.Program(
        context,
        """kernel void line(read_only image2d_t image, sampler_t sampler, global float4 *out) {
            int x = get_global_id(0);
            out[x] = read_imagef(image, sampler, (int2)(x, 0));
        }""",
    ).build()
    sampler = cl.Sampler(context, False, cl.addressing_mode.CLAMP, cl.filter_mode.NEAREST)
    out = cl.Buffer(context, flags.WRITE_ONLY, 256)
    event = program.line(queue, (16,), None, image, sampler, out)
    event.wait()
    assert event.profile.end >= event.profile.start
    assert (fetch(out, picture[0]) == picture[0]).all()
    binaries = program.get_info(cl.program_info.BINARIES)
    again = cl.Program(context, context.devices, binaries).build()
    assert cl.Kernel(again, "line").num_args == 3


def maps():
    host = numbers.copy()
    buffer = cl.Buffer(context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=host)
    both = cl.map_flags.READ | cl.map_flags.WRITE
    mapped, _ = cl.enqueue_map_buffer(queue, buffer, both, 0, numbers.shape, np.float32)
    assert (mapped == numbers).all()
    mapped[:] = 5
    mapped.base.release(queue)
    part = buffer.get_sub_region(4096, 4096)
    cl.enqueue_fill_buffer(queue, part, np.float32(7), 0, 4096)
    now = fetch(buffer, numbers)
    assert (now[1024:2048] == 7).all() and (now[:1024] == 5).all() and (now[2048:] == 5).all()


def rectangles():
    square = np.arange(64 * 64, dtype=np.int32).reshape(64, 64)
    buffer = cl.Buffer(context, 0, square.nbytes)
    cl.enqueue_copy(queue, buffer, square)
    part = np.zeros((8, 8), np.int32)
    cl.enqueue_copy(
        queue,
        part,
        buffer,
        buffer_origin=(16, 4, 0),
        host_origin=(0, 0, 0),
        region=(32, 8, 1),
        buffer_pitches=(256,),
        host_pitches=(32,),
    )
    assert (part == square[4:12, 4:12]).all()


def headers():
    # In a folder of the application, which no worker can read.
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "outer.h"), "w") as file:
            file.write('#include "inner.h"\n')
        with open(os.path.join(folder, "inner.h"), "w") as file:
            file.write("#define ANSWER 42\n")
        source = '#include "outer.h"\nkernel void answer(global int *out) { out[0] = ANSWER; }'
        options = ["-I", folder]
        program = cl.Program(context, source).build(options=options)
        out = cl.Buffer(context, 0, 4)
        program.answer(queue, (1,), None, out)
        assert fetch(out, np.zeros(1, np.int32))[0] == 42
        given = program.get_build_info(context.devices[0], cl.program_build_info.OPTIONS)
        assert folder in given


def programs():
    one = cl.Program(context, "int next(int x) { return x + 1; }").compile()
    two = cl.Program(
        context, "int next(int); kernel void answer(global int *out) { out[0] = next(41); }"
    ).compile()
    linked = cl.link_program(context, [one, two])
    out = cl.Buffer(context, 0, 4)
    linked.answer(queue, (1,), None, out)
    assert fetch(out, np.zeros(1, np.int32))[0] == 42
    try:
        cl.Program(context, "kernel void broken() { nonsense }").build()
    except cl.RuntimeError as error:
        assert "nonsense" in str(error)
    else:
        raise AssertionError("nonsense was built")


def nothing():
    empty = cl.Program(context, "").build()
    assert empty.num_kernels == 0


for part in [arrays, scan, events, images, maps, rectangles, headers, programs, nothing]:
    part()
    print(part.__name__, flush=True)
print("all")
