"""Shared virtual memory: what each entry point for it does, said in lines that are the same with
every driver that has it. With the word `refused`: what wrong calls give, where drivers look."""

import ctypes
import sys
import threading
import time

import numpy as np
import pyopencl as cl

SOURCE = """
typedef struct node { global struct node *next; int value; int seen; } node;

// Follows pointers that the host has written.
kernel void walk(global node *first, global int *count) {
    int steps = 0;
    for (global node *at = first; at; at = at->next) {
        at->seen = at->value + 1;
        ++steps;
    }
    *count = steps;
}

kernel void twice(global int *numbers) {
    numbers[get_global_id(0)] *= 2;
}
"""
READ, WRITE, INVALIDATE = 1, 2, 4
NODE = np.dtype([("next", np.uint64), ("value", np.int32), ("seen", np.int32)])

lib = ctypes.CDLL("libOpenCL.so.1")
lib.clSVMAlloc.restype = ctypes.c_void_p
pointer, size_t, uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32

context = cl.create_some_context(interactive=False)
device = context.devices[0]
queue = cl.CommandQueue(context)
apart = cl.CommandQueue(
    context, properties=cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
)
program = cl.Program(context, SOURCE).build()
assert device.svm_capabilities & 1, "the device has no shared virtual memory"


def good(code, what):
    assert code == 0, f"{what} gave {code}"


def alloc(size, flags=1, alignment=0, of=context):
    return lib.clSVMAlloc(
        pointer(of.int_ptr), ctypes.c_uint64(flags), size_t(size), uint(alignment)
    )


def free(address):
    lib.clSVMFree(pointer(context.int_ptr), pointer(address))


def after(events):
    raw = (pointer * len(events))(*[event.int_ptr for event in events])
    return uint(len(events)), raw if events else None


def call(name, *arguments, on=queue, after_these=()):
    """Enqueues a command and gives its event."""
    event = pointer()
    code = getattr(lib, name)(
        pointer(on.int_ptr), *arguments, *after(list(after_these)), ctypes.byref(event)
    )
    good(code, name)
    return cl.Event.from_int_ptr(event.value, retain=False)


def enqueue_map(address, size, flags=READ | WRITE, blocking=True, **options):
    return call(
        "clEnqueueSVMMap", uint(blocking), ctypes.c_uint64(flags), pointer(address),
        size_t(size), **options,
    )


def unmap(address, **options):
    return call("clEnqueueSVMUnmap", pointer(address), **options)


def copy(to, source, size, blocking=True, **options):
    return call(
        "clEnqueueSVMMemcpy", uint(blocking), pointer(to), pointer(source), size_t(size), **options
    )


def view(address, dtype, count):
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype, count)


def argument(kernel, index, address):
    return lib.clSetKernelArgSVMPointer(pointer(kernel.int_ptr), uint(index), pointer(address))


def lists():
    """A list whose nodes are in two allocations."""
    count = 1000
    halves = [alloc(count // 2 * NODE.itemsize) for _ in range(2)]
    total = alloc(4)
    nodes = [
        half + index * NODE.itemsize for index in range(count // 2) for half in halves
    ]
    for half in halves:
        enqueue_map(half, count // 2 * NODE.itemsize, INVALIDATE)
    views = [view(half, NODE, count // 2) for half in halves]
    for number, address in enumerate(nodes):
        entry = views[number % 2][number // 2 : number // 2 + 1]
        entry["next"] = nodes[number + 1] if number + 1 < count else 0
        entry["value"], entry["seen"] = number, 0
    for half in halves:
        unmap(half)
    kernel = cl.Kernel(program, "walk")
    # The first node may be inside an allocation, like any other.
    good(argument(kernel, 0, nodes[10]), "the first argument")
    good(argument(kernel, 1, total), "the second argument")
    others = (pointer * 1)(halves[1])
    good(
        lib.clSetKernelExecInfo(
            pointer(kernel.int_ptr), uint(0x11B6), size_t(8), others
        ),
        "clSetKernelExecInfo",
    )
    cl.enqueue_nd_range_kernel(queue, kernel, (1,), None)
    enqueue_map(total, 4, READ)
    print("steps:", view(total, np.int32, 1)[0])
    unmap(total)
    seen = 0
    for half in halves:
        enqueue_map(half, count // 2 * NODE.itemsize, READ)
        seen += int(view(half, NODE, count // 2)["seen"].sum())
        unmap(half)
    print("seen:", seen)
    queue.finish()
    for address in [*halves, total]:
        free(address)


def copies():
    """Sizes from a byte to more than any piece that data is cut into, between all kinds of memory."""
    for size in [1, 4095, 4096, 100_001, 3 << 20, 20_000_003]:
        one, other = alloc(size), alloc(size + 77)
        source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        back, third = np.zeros_like(source), np.zeros_like(source)
        copy(one, source.ctypes.data, size, blocking=False)
        copy(other + 77, one, size, blocking=False)
        copy(back.ctypes.data, other + 77, size)
        copy(third.ctypes.data, back.ctypes.data, size)
        assert (back == source).all() and (third == source).all(), size
        # A part in the middle, by a mapping.
        part = size // 3
        if part:
            enqueue_map(one + part, part)
            view(one + part, np.uint8, part)[:] ^= 0xFF
            unmap(one + part)
            copy(back.ctypes.data, one, size)
            source[part : 2 * part] ^= 0xFF
            assert (back == source).all(), size
        queue.finish()
        free(one)
        free(other)
    print("copies: right")


def fills():
    address = alloc(4096)
    pattern = (ctypes.c_uint32 * 2)(7, 9)
    call("clEnqueueSVMMemFill", pointer(address), pattern, size_t(8), size_t(4096))
    ranges = (pointer * 1)(address + 8)
    call("clEnqueueSVMMigrateMem", uint(1), ranges, None, ctypes.c_uint64(0))
    enqueue_map(address, 4096, READ)
    print("filled:", view(address, np.uint32, 1024)[[0, 1, 1022, 1023]].tolist())
    unmap(address)
    queue.finish()
    free(address)


def buffers():
    """A buffer in shared virtual memory is that memory."""
    count = 1024
    address = alloc(4 * count)
    enqueue_map(address, 4 * count, WRITE)
    view(address, np.int32, count)[:] = np.arange(count)
    unmap(address)
    host = view(address, np.int32, count)
    flags = cl.mem_flags
    buffer = cl.Buffer(context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=host)
    program.twice(queue, (count,), None, buffer)
    kernel = cl.Kernel(program, "twice")
    good(argument(kernel, 0, address), "an argument after a buffer")
    cl.enqueue_nd_range_kernel(queue, kernel, (count,), None)
    back = np.zeros(count, np.int32)
    cl.enqueue_copy(queue, back, buffer)
    uses = buffer.get_info(cl.mem_info.USES_SVM_POINTER)
    print("buffer:", (back == 4 * np.arange(count)).all(), bool(uses))
    mapped, _ = cl.enqueue_map_buffer(
        queue, buffer, cl.map_flags.READ | cl.map_flags.WRITE, 0, count, np.int32
    )
    mapped[:] += 1
    mapped.base.release(queue)
    enqueue_map(address, 4 * count, READ)
    print("mapped:", (host == 4 * np.arange(count) + 1).all())
    unmap(address)
    queue.finish()
    buffer.release()
    free(address)


def events():
    """Out of order, by events that wait for the host."""
    count = 4096
    address = alloc(4 * count)
    start = cl.UserEvent(context)
    data = np.arange(count, dtype=np.int32)
    first = copy(address, data.ctypes.data, 4 * count, False, on=apart, after_these=[start])
    kernel = cl.Kernel(program, "twice")
    good(argument(kernel, 0, address), "an argument")
    second = cl.enqueue_nd_range_kernel(apart, kernel, (count,), None, wait_for=[first])
    third = enqueue_map(address, 4 * count, READ, False, on=apart, after_these=[second])
    apart.flush()
    started = third.command_execution_status != 0
    start.set_status(0)
    third.wait()
    print("events:", started, (view(address, np.int32, count) == 2 * data).all(),
          [hex(event.command_type) for event in (first, third)])
    fourth = unmap(address, on=apart)
    print("unmapped:", hex(fourth.command_type))
    apart.finish()
    free(address)


def frees():
    addresses = [alloc(5000) for _ in range(3)]
    listed = (pointer * 3)(*addresses)
    freed = threading.Event()
    told = []

    @ctypes.CFUNCTYPE(None, pointer, uint, ctypes.POINTER(pointer), pointer)
    def by_callback(on, count, pointers, data):
        told.append((on == apart.int_ptr, count, pointers[:count] == addresses, data))
        for address in pointers[:count]:
            free(address)
        # Long enough to notice if the command's event does not wait for this callback.
        time.sleep(0.2)
        freed.set()

    start = cl.UserEvent(context)
    event = call("clEnqueueSVMFree", uint(3), listed, by_callback, pointer(99),
                 on=apart, after_these=[start])
    early = freed.is_set()
    start.set_status(0)
    event.wait()
    print("freed:", early, freed.is_set(), told, hex(event.command_type))
    address = alloc(5000)
    call("clEnqueueSVMFree", uint(1), (pointer * 1)(address), None, None).wait()
    queue.finish()
    # Many times what a small quota would hold.
    for _ in range(200):
        free(alloc(8 << 20))
    print("freed: all")


def elsewhere():
    """An address that the driver is likely to choose again, and that is taken then."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = pointer
    size = 64 << 20
    address = alloc(size)
    free(address)
    # The answer arrives after everything that was sent before.
    queue.finish()
    noreplace, anonymous, private = 0x100000, 0x20, 0x2
    taken = libc.mmap(
        pointer(address & ~0xFFF), size_t(size), 0, noreplace | anonymous | private, -1,
        ctypes.c_long(0),
    )
    assert taken == address & ~0xFFF, "the address is not free after clSVMFree"
    other = alloc(size)
    assert other and (other + size <= taken or other >= taken + size)
    data = np.arange(1000, dtype=np.int32)
    copy(other, data.ctypes.data, data.nbytes)
    enqueue_map(other, data.nbytes, READ)
    print("elsewhere:", (view(other, np.int32, 1000) == data).all())
    unmap(other)
    queue.finish()
    free(other)
    # So much is taken that the next ones would be there, too.
    size, step = 3 << 20, 1 << 20
    address = alloc(size)
    middle = address & ~(step - 1)
    for around in range(middle - 512 * step, middle + 512 * step, step):
        libc.mmap(
            pointer(around), size_t(step), 0, noreplace | anonymous | private | 0x4000, -1,
            ctypes.c_long(0),
        )
    others = [alloc(size) for _ in range(3)]
    print("far:", all(others))
    for other in [address, *others]:
        free(other)


def early():
    """What is unmapped before it has been mapped keeps what the device has made."""
    count = 300_000
    data = np.random.default_rng(1).integers(0, 256, count, np.uint8)
    hosts = [np.zeros(count, np.uint8) for _ in range(2)]
    address = alloc(count)
    flags = cl.mem_flags
    buffers = [
        cl.Buffer(context, flags.READ_WRITE, count),
        cl.Buffer(context, flags.USE_HOST_PTR, hostbuf=hosts[0]),
    ]
    start = cl.UserEvent(context)
    copy(address, data.ctypes.data, count, blocking=False, after_these=[start])
    enqueue_map(address, count, blocking=False)
    unmap(address)
    access = cl.map_flags.READ | cl.map_flags.WRITE
    # pyopencl waits for objects that it is asked to release.
    kept = []
    for buffer in buffers:
        kept.append(cl.enqueue_copy(queue, buffer, data, is_blocking=False))
        mapped, _ = cl.enqueue_map_buffer(
            queue, buffer, access, 0, count, np.uint8, is_blocking=False
        )
        kept.append(mapped.base.release(queue))
        kept.append(mapped)
    start.set_status(0)
    right = []
    back = np.zeros(count, np.uint8)
    copy(back.ctypes.data, address, count)
    right.append((back == data).all())
    for buffer in buffers:
        cl.enqueue_copy(queue, hosts[1], buffer)
        right.append((hosts[1] == data).all())
    print("early:", right)
    free(address)


def unheard():
    """An image that is mapped by now, though nobody has asked, keeps what the device has made."""
    width, height = 250, 300
    pixels = cl.ImageFormat(cl.channel_order.RGBA, cl.channel_type.UNSIGNED_INT8)
    image = cl.Image(context, cl.mem_flags.READ_WRITE, pixels, shape=(width, height))
    area = {"origin": (0, 0), "region": (width, height)}
    # Written by the device: no memory of the application has contained it before.
    cl.enqueue_fill_image(queue, image, np.array([7, 8, 9, 10], np.uint32), *area.values())
    access = cl.map_flags.READ | cl.map_flags.WRITE
    mapped, *_ = cl.enqueue_map_image(
        queue, image, access, *area.values(), (height, 4 * width), np.uint8, is_blocking=False
    )
    queue.flush()
    # A worker behind a stream only reports when asked: the image was read, but has not arrived yet.
    time.sleep(0.5)
    mapped.base.release(queue)
    back = np.zeros((height, width, 4), np.uint8)
    cl.enqueue_copy(queue, back, image, **area)
    print("unheard:", (back == [7, 8, 9, 10]).all())


def largest():
    """As large as the device says that there are, to the last byte."""
    size = device.max_mem_alloc_size
    address = alloc(size)
    assert address, f"there is none of {size} bytes"
    data = np.arange(1000, dtype=np.int32)
    last = address + size - data.nbytes
    copy(last, data.ctypes.data, data.nbytes)
    enqueue_map(last, data.nbytes, READ)
    print("largest:", (view(last, np.int32, 1000) == data).all(), alloc(size + 1))
    unmap(last)
    queue.finish()
    free(address)


def again():
    """What is refused changes nothing: the right call finds everything as it was."""
    address = alloc(4096)
    on = pointer(queue.int_ptr)
    enqueue_map(address, 4096, WRITE)
    view(address, np.int32, 1024)[:] = 77
    wrong = lib.clEnqueueSVMUnmap(on, pointer(address), uint(1), None, None)
    right = lib.clEnqueueSVMUnmap(on, pointer(address), uint(0), None, None)
    data = np.zeros(1024, dtype=np.int32)
    copy(data.ctypes.data, address, data.nbytes)
    queue.finish()
    pattern = np.zeros(1, dtype=np.int32)
    nothing = lib.clEnqueueSVMMemFill(
        on, pointer(address), pointer(pattern.ctypes.data), size_t(4), size_t(0), uint(0), None, None
    )
    print("again:", wrong, right, (data == 77).all(), nothing)
    free(address)


def refused():
    address = alloc(4096)
    other = cl.Context([device])
    foreign = alloc(4096, of=other)
    kernel = cl.Kernel(program, "twice")
    none = (uint(0), None, None)
    on = pointer(queue.int_ptr)
    # An object of another context, or of none, is not a valid argument.
    strangers = [argument(kernel, 0, stranger) for stranger in (foreign, address + 4096, 4096)]
    part = cl.Buffer(
        context,
        cl.mem_flags.USE_HOST_PTR,
        hostbuf=view(address, np.int32, 1024),
    ).get_sub_region(0, 1024)
    print("strangers:", strangers, bool(part.get_info(cl.mem_info.USES_SVM_POINTER)))
    print("refused:", [
        alloc(0), alloc(64, alignment=3), alloc(64, flags=3 << 62), alloc(1 << 62),
        lib.clEnqueueSVMMap(on, uint(1), ctypes.c_uint64(1), None, size_t(4), *none),
        lib.clEnqueueSVMMap(on, uint(1), ctypes.c_uint64(1), pointer(address), size_t(0), *none),
        lib.clEnqueueSVMMap(on, uint(1), ctypes.c_uint64(1 << 9), pointer(address), size_t(4), *none),
        lib.clEnqueueSVMMemcpy(on, uint(1), pointer(address), pointer(address + 8), size_t(64), *none),
        lib.clEnqueueSVMMemcpy(on, uint(1), None, pointer(address), size_t(64), *none),
        lib.clEnqueueSVMMemFill(on, pointer(address), None, size_t(4), size_t(64), *none),
        lib.clSetKernelArgSVMPointer(pointer(kernel.int_ptr), uint(9), pointer(address)),
    ])
    part.release()
    free(address)
    lib.clSVMFree(pointer(other.int_ptr), pointer(foreign))
    free(0)


parts = [refused] if "refused" in sys.argv else [lists, copies, fills, buffers, events, elsewhere, early, unheard, again, largest, frees]
for part in parts:
    part()
