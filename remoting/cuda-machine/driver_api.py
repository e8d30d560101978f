"""The parts of the driver's API that attributes.py, quota.py and copier.py need."""
import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

library = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    try:
        function = getattr(library, name)
    except AttributeError:
        return -1
    function.restype = c_int
    return function(*arguments)


def check(name, *arguments):
    code = call(name, *arguments)
    if code:
        raise SystemExit(f"{name}: {code}")


def start(ordinal=0):
    device, context = c_int(), c_void_p()
    check("cuInit", 0)
    check("cuDeviceGet", byref(device), ordinal)
    check("cuDevicePrimaryCtxRetain", byref(context), device)
    check("cuCtxSetCurrent", context)
    return context


def allocate(size):
    at = c_uint64()
    check("cuMemAlloc_v2", byref(at), c_size_t(size))
    return at.value


def stream():
    made = c_void_p()
    check("cuStreamCreate", byref(made), 1)
    return made


def event():
    made = c_void_p()
    check("cuEventCreate", byref(made), 2)
    return made


class Copy2D(ctypes.Structure):
    _fields_ = [(name, kind) for side in ("src", "dst") for name, kind in (
        (side + "XInBytes", c_size_t), (side + "Y", c_size_t), (side + "MemoryType", c_uint), (side + "Host", c_void_p),
        (side + "Device", c_uint64), (side + "Array", c_void_p), (side + "Pitch", c_size_t))] + [
        ("WidthInBytes", c_size_t), ("Height", c_size_t)]


class Copy3D(ctypes.Structure):
    _fields_ = [(name, kind) for side in ("src", "dst") for name, kind in (
        (side + "XInBytes", c_size_t), (side + "Y", c_size_t), (side + "Z", c_size_t), (side + "LOD", c_size_t),
        (side + "MemoryType", c_uint), (side + "Host", c_void_p), (side + "Device", c_uint64), (side + "Array", c_void_p),
        (side + "Reserved", c_void_p), (side + "Pitch", c_size_t), (side + "Height", c_size_t))] + [
        ("WidthInBytes", c_size_t), ("Height", c_size_t), ("Depth", c_size_t)]


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Properties(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", Location), ("meta", c_void_p), ("flags", ctypes.c_ubyte * 8)]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


KERNEL = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 at, .param .u32 rounds)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [at];
    ld.param.u32 %r1, [rounds];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, 0;
again:
    mad.lo.s32 %r2, %r2, 1664525, 1013904223;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p, %r3, %r1;
    @%p bra again;
    mov.u32 %r4, %tid.x;
    mul.wide.u32 %rd2, %r4, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r2;
    ret;
}
"""


def kernel():
    module, function = c_void_p(), c_void_p()
    check("cuModuleLoadData", byref(module), KERNEL + b"\0")
    check("cuModuleGetFunction", byref(function), module, b"spin")
    return function
