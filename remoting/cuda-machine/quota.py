"""What counts as used memory, in 64ths of what cuMemGetInfo says there is in all; to be run with
the driver and, with a quota, through Gantry, and compared."""
import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import driver_api as cuda
from driver_api import Access, Location, Properties

cuda.start()
free, total = c_size_t(), c_size_t()


def info():
    cuda.check("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value


UNIT = 1 << 21
info()
part = total.value // 64 // UNIT * UNIT
last = free.value


def say(what, code=0):
    global last
    now = info()
    print(f"{what}: {code}, {round((last - now) / part):+} used")
    last = now


def allocate(parts):
    at = c_uint64()
    return cuda.call("cuMemAlloc_v2", byref(at), c_size_t(parts * part)), at


code, first = allocate(24)
say("24 of 64", code)
code, second = allocate(24)
say("24 more", code)
code, none = allocate(24)
say("24 more, too much", code)
say("one freed", cuda.call("cuMemFree_v2", first))
say("freed twice", cuda.call("cuMemFree_v2", first))
code, first = allocate(24)
say("again", code)
say("both freed", cuda.call("cuMemFree_v2", first) or cuda.call("cuMemFree_v2", second))
code, whole = allocate(65)
say("more than all", code)
# Physical memory, retained and mapped twice.
properties = Properties(type=1, location=Location(1, 0))
handle, again, at, other = c_uint64(), c_uint64(), c_uint64(), c_uint64()
size = c_size_t(16 * part)
zero, zero64 = c_size_t(0), c_uint64(0)
access = Access(Location(1, 0), 3)
code = cuda.call("cuMemCreate", byref(handle), size, byref(properties), zero64)
say("physical memory", code)
if code == 0:
    for place in (at, other):
        cuda.check("cuMemAddressReserve", byref(place), size, zero, zero64, zero64)
        say("  mapped", cuda.call("cuMemMap", place, size, zero, handle, zero64))
        say("  accessible", cuda.call("cuMemSetAccess", place, size, byref(access), c_size_t(1)))
    say("  retained", cuda.call("cuMemRetainAllocationHandle", byref(again), c_void_p(at.value)))
    say("  released", cuda.call("cuMemRelease", handle))
    say("  unmapped", cuda.call("cuMemUnmap", at, size))
    code, none = allocate(56)
    say("  56 beside it", code)
    say("  unmapped, too", cuda.call("cuMemUnmap", other, size))
    say("  released, too", cuda.call("cuMemRelease", again))
    code, most = allocate(56)
    say("  56 after it", code)
    say("  freed", cuda.call("cuMemFree_v2", most))
# Memory of a stream's pool.
stream = cuda.stream()
code = cuda.call("cuMemAllocAsync", byref(at), size, stream)
cuda.check("cuStreamSynchronize", stream)
say("of a pool", code)
if code == 0:
    code, none = allocate(56)
    say("  56 beside it", code)
    cuda.check("cuMemFreeAsync", at, stream)
    cuda.check("cuStreamSynchronize", stream)
    pool = c_void_p()
    cuda.check("cuDeviceGetDefaultMemPool", byref(pool), 0)
    cuda.call("cuMemPoolTrimTo", pool, zero)
    say("  freed, and the pool trimmed")
# Variables of modules.
bytes_ = 8 * part
text = f""".version 6.0
.target sm_50
.address_size 64
.visible .global .align 8 .b8 large[{bytes_}];
.visible .entry nothing() {{ ret; }}
"""
module = c_void_p()
if bytes_ < 1 << 31:
    code = cuda.call("cuModuleLoadData", byref(module), text.encode() + b"\0")
    say("a variable of 8", code)
    if code == 0:
        say("  unloaded", cuda.call("cuModuleUnload", module))
# Heap of kernels.
code = cuda.call("cuCtxSetLimit", 2, c_size_t(8 * part))
say("a heap of 8", code)
