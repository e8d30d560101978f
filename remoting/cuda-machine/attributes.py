"""What the driver says of pointers, a line for each kind of memory and attribute, with addresses as distances: to be run with the driver
and through Gantry, and compared. No attribute may differ whose reason measurements/cuda-beside-native-h200.md does not name."""
import ctypes
import mmap
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

import driver_api as cuda
from driver_api import Access, Location, Properties

SIZE = 1 << 21
ATTRIBUTES = {1: "context", 2: "memory type", 3: "device pointer", 4: "host pointer", 6: "sync memops", 7: "buffer id", 8: "managed",
              9: "ordinal", 10: "legacy cudaMalloc", 11: "range start", 12: "range size", 13: "mapped", 14: "handle types",
              15: "GPUDirect RDMA", 16: "access flags", 17: "mempool", 18: "mapping size", 19: "mapping base", 20: "memory block id"}
contexts = {}
count = c_int()
context = cuda.start()
contexts[context.value] = "context 0"
cuda.check("cuDeviceGetCount", byref(count))
print("devices", "several" if count.value > 1 else "one")


def places():
    yield "device", cuda.allocate(SIZE)
    at, pitch = c_uint64(), c_size_t()
    cuda.check("cuMemAllocPitch_v2", byref(at), byref(pitch), c_size_t(1000), c_size_t(64), 4)
    yield "pitch", at.value
    cuda.check("cuMemAllocManaged", byref(at), c_size_t(SIZE), 1)
    yield "managed", at.value
    host = c_void_p()
    for name, flags in [("pinned", 0), ("pinned portable", 1), ("pinned, write combined", 4)]:
        cuda.check("cuMemHostAlloc", byref(host), c_size_t(SIZE), flags)
        yield name, host.value
    own = mmap.mmap(-1, SIZE)
    keep.append(own)
    here = ctypes.addressof(ctypes.c_char.from_buffer(own))
    yield "unknown", here
    cuda.check("cuMemHostRegister_v2", c_void_p(here), c_size_t(SIZE), 0)
    yield "registered", here
    stream = cuda.stream()
    if cuda.call("cuMemAllocAsync", byref(at), c_size_t(SIZE), stream) == 0:
        cuda.check("cuStreamSynchronize", stream)
        yield "of a pool", at.value
    properties = Properties(type=1, location=Location(1, 0))
    size, handle = c_size_t(), c_uint64()
    if cuda.call("cuMemGetAllocationGranularity", byref(size), byref(properties), 0) == 0:
        if cuda.call("cuMemCreate", byref(handle), c_size_t(SIZE), byref(properties), c_uint64(0)) == 0:
            cuda.check("cuMemAddressReserve", byref(at), c_size_t(SIZE), c_size_t(0), c_uint64(0), c_uint64(0))
            yield "reserved", at.value
            cuda.check("cuMemMap", at, c_size_t(SIZE), c_size_t(0), handle, c_uint64(0))
            access = Access(Location(1, 0), 3)
            cuda.check("cuMemSetAccess", at, c_size_t(SIZE), byref(access), c_size_t(1))
            yield "mapped", at.value
    yield "null", 0
    if count.value > 1:
        other = c_void_p()
        device = c_int()
        cuda.check("cuDeviceGet", byref(device), 1)
        cuda.check("cuDevicePrimaryCtxRetain", byref(other), device)
        cuda.check("cuCtxSetCurrent", other)
        contexts[other.value] = "context 1"
        there = cuda.allocate(SIZE)
        yield "device 1, current", there
        cuda.check("cuCtxSetCurrent", context)
        yield "device 1, not current", there


keep, ids = [], {}
for name, place in places():
    for offset in (0, 4096):
        if place == 0 and offset:
            continue
        at = place + offset
        for number, attribute in ATTRIBUTES.items():
            out = (c_uint64 * 8)()
            code = cuda.call("cuPointerGetAttribute", byref(out), number, c_uint64(at))
            value = out[0]
            if code == 0 and number in (3, 4, 11, 19):
                value = f"at {value - place:+}" if abs(value - place) < 1 << 40 else "elsewhere" if value else 0
            elif code == 0 and number == 1:
                value = contexts.get(value, value if not value else "another")
            elif code == 0 and number == 7:
                value = f"id {ids.setdefault((number, value), len(ids))}"
            elif code == 0 and number in (17, 20):
                value = "some" if value else 0
            elif code == 0 and number in (2, 8, 9, 13, 6, 10, 14, 15, 16):
                value &= 0xffffffff
            print(f"{name} +{offset}: {attribute}: {code}{'' if code else f', {value}'}")
        start, size = c_uint64(), c_size_t()
        code = cuda.call("cuMemGetAddressRange_v2", byref(start), byref(size), c_uint64(at))
        print(f"{name} +{offset}: address range: {code}" + ("" if code else f", at {start.value - place:+}, {size.value}"))
        kinds = (c_int * 4)(2, 9, 8, 11)
        values = [c_uint64(77) for _ in kinds]
        pointers = (c_void_p * 4)(*[ctypes.addressof(value) for value in values])
        code = cuda.call("cuPointerGetAttributes", c_uint(4), kinds, pointers, c_uint64(at))
        said = [values[0].value & 0xffffffff, values[1].value & 0xffffffff, values[2].value & 0xff]
        print(f"{name} +{offset}: several at once: {code}" + ("" if code else f", {said}"))
