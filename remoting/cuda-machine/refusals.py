"""What the driver's entry points answer where they have to refuse, as a table to compare two drivers by.

    refusals.py SYMBOLS > TABLE           asks the libcuda.so.1 that the loader finds
    refusals.py --compare NATIVE OTHER    the lines of two tables that differ, as Markdown

SYMBOLS has an entry point's name in each line. Each is called with zeros for all parameters: before cuInit, without a
context, and with one. Behind these come calls with memory and numbers that do not fit. Whoever calls is a process of its
own, so that a driver that crashes costs one line.
"""

import ctypes
import os
import selectors
import subprocess
import sys

STATES = ["before cuInit", "without a context", "with a context"]
CASES = "cases"
# These end or stop processes, or wait for something.
LEFT_OUT = ("cuCheckpoint", "cuCoredump", "cuLogs")
PATIENCE = 20


class Driver:
    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()

    def call(self, symbol, *arguments):
        try:
            function = getattr(self.library, symbol)
        except AttributeError:
            return "absent"
        function.restype = ctypes.c_int
        return function(*arguments)

    def start(self, state):
        if state != STATES[0]:
            assert self.call("cuInit", 0) == 0
        if state not in STATES[:2]:
            # Not the primary one, which calls with zeros reset.
            assert self.call("cuCtxCreate_v2", ctypes.byref(self.context), 0, 0) == 0

    def enter(self, state):
        if state != STATES[0]:
            self.call("cuCtxSetCurrent", None if state == STATES[1] else self.context)


def zeros():
    return [ctypes.c_void_p(0)] * 12


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


def cases(driver):
    """Names of calls, and the calls."""
    call, ref = driver.call, ctypes.byref
    size = 1 << 16

    def allocated(symbol, *rest):
        at = ctypes.c_void_p()
        assert call(symbol, ref(at), ctypes.c_size_t(size), *rest) == 0
        return at

    device = allocated("cuMemAlloc_v2")
    managed = allocated("cuMemAllocManaged", 1)
    pinned = allocated("cuMemHostAlloc", 0)
    own = ctypes.create_string_buffer(8 * 4096)
    pages = (ctypes.addressof(own) + 4095) & ~4095
    at = lambda offset: ctypes.c_void_p(pages + offset)
    bytes_of = ctypes.c_size_t
    out = (ctypes.c_uint64 * 4)()
    stream = ctypes.c_void_p()
    assert call("cuStreamCreate", ref(stream), 1) == 0

    def prefetch(pointer, count, location, flags=0):
        return call("cuMemPrefetchAsync_v2", pointer, bytes_of(count), location, flags, stream)

    def advise(pointer, count, advice, location):
        return call("cuMemAdvise_v2", pointer, bytes_of(count), advice, location)

    def text(code):
        return f"{code} {out[0] & 0xffffffff}" if code == 0 else code

    here, there, host = Location(1, 0), Location(1, 99), Location(2, 0)
    nonsense = ctypes.c_void_p(0x1234567)
    for what, pointer in [("managed", managed), ("device", device), ("pinned", pinned), ("no", nonsense), ("null", None)]:
        yield f"prefetch {what} memory", lambda p=pointer: prefetch(p, 4096, here)
        yield f"advise on {what} memory", lambda p=pointer: advise(p, 4096, 1, here)
        yield f"attach {what} memory", lambda p=pointer: call("cuStreamAttachMemAsync", stream, p, bytes_of(0), 4)
        yield f"flags of {what} memory", lambda p=pointer: text(call("cuMemHostGetFlags", out, p))
        yield f"unregister {what} memory", lambda p=pointer: call("cuMemHostUnregister", p)
        yield f"address range of {what} memory", lambda p=pointer: call("cuMemGetAddressRange_v2", None, None, p)
        yield f"attribute of {what} memory", lambda p=pointer: text(call("cuPointerGetAttribute", out, 9, p))
        yield f"no attribute of {what} memory", lambda p=pointer: call("cuPointerGetAttribute", out, 99, p)
    yield "prefetch nothing", lambda: prefetch(managed, 0, here)
    yield "prefetch too much", lambda: prefetch(managed, 1 << 30, here)
    yield "prefetch to the host", lambda: prefetch(managed, 4096, host)
    yield "prefetch to no device", lambda: prefetch(managed, 4096, there)
    yield "prefetch to no kind of location", lambda: prefetch(managed, 4096, Location(77, 0))
    yield "prefetch with flags", lambda: prefetch(managed, 4096, here, 1)
    yield "advise nothing", lambda: advise(managed, 0, 1, here)
    yield "advise too much", lambda: advise(managed, 1 << 30, 1, here)
    yield "advise what is no advice", lambda: advise(managed, 4096, 99, here)
    yield "advise for no device", lambda: advise(managed, 4096, 5, there)
    yield "attach with no kind", lambda: call("cuStreamAttachMemAsync", stream, managed, bytes_of(0), 0)
    yield "attach a part", lambda: call("cuStreamAttachMemAsync", stream, managed, bytes_of(4096), 4)
    for symbol, *rest in [("cuMemHostAlloc", 0), ("cuMemAllocHost_v2",), ("cuMemAlloc_v2",), ("cuMemAllocManaged", 1)]:
        yield f"{symbol} of nothing", lambda s=symbol, r=rest: text(call(s, out, bytes_of(0), *r))
    yield "cuMemHostAlloc with no flag", lambda: call("cuMemHostAlloc", out, bytes_of(64), 8)
    yield "cuMemAllocManaged without flags", lambda: call("cuMemAllocManaged", out, bytes_of(64), 0)
    yield "cuMemFreeHost of null", lambda: call("cuMemFreeHost", None)
    yield "cuMemFreeHost of device memory", lambda: call("cuMemFreeHost", device)
    yield "cuMemFree of pinned memory", lambda: call("cuMemFree_v2", pinned)
    yield "cuMemFree of no memory", lambda: call("cuMemFree_v2", nonsense)
    yield "cuMemFree of a middle", lambda: call("cuMemFree_v2", ctypes.c_void_p(device.value + 512))
    register = lambda offset, count, flags=0: call("cuMemHostRegister_v2", at(offset), bytes_of(count), flags)
    yield "register nothing", lambda: register(0, 0)
    yield "register with no flag", lambda: register(0, 4096, 0x100)
    yield "register", lambda: register(4096, 8192)
    yield "register again", lambda: register(4096, 8192)
    yield "register from below", lambda: register(0, 8192)
    yield "register from within", lambda: register(8192, 8192)
    yield "register around", lambda: register(0, 6 * 4096)
    yield "flags of registered memory", lambda: text(call("cuMemHostGetFlags", out, at(4096)))
    yield "device of registered memory", lambda: text(call("cuPointerGetAttribute", out, 9, at(4096)))
    yield "unregister a middle", lambda: call("cuMemHostUnregister", at(8192))
    yield "unregister", lambda: call("cuMemHostUnregister", at(4096))
    yield "unregister again", lambda: call("cuMemHostUnregister", at(4096))
    yield "copy beyond an allocation", lambda: call("cuMemcpyHtoD_v2", device, own, bytes_of(1 << 24))
    yield "copy to no memory", lambda: call("cuMemcpyHtoD_v2", nonsense, own, bytes_of(64))
    yield "fill beyond an allocation", lambda: call("cuMemsetD8_v2", device, 0, bytes_of(1 << 24))
    yield "no device", lambda: call("cuDeviceGet", out, 99)
    yield "no attribute of a device", lambda: call("cuDeviceGetAttribute", out, 9999, 0)
    yield "a context on no device", lambda: call("cuDevicePrimaryCtxRetain", out, 99)
    yield "no limit", lambda: call("cuCtxGetLimit", out, 99)
    yield "streams with no flag", lambda: call("cuStreamCreate", out, 99)
    yield "events with no flag", lambda: call("cuEventCreate", out, 0x100)
    yield "no image", lambda: call("cuModuleLoadData", out, ctypes.create_string_buffer(b"no image"))
    yield "the profiler", lambda: call("cuProfilerStart")
    yield "the profiler's end", lambda: call("cuProfilerStop")


def ask(state, symbols, begin):
    """Writes a line before and behind each call."""
    driver = Driver()
    driver.start(state)
    driver.enter(state)
    if state == CASES:
        calls = list(cases(driver))
    else:
        symbols = [symbol for symbol in symbols if state != STATES[0] or symbol != "cuInit"]
        calls = [(symbol, lambda s=symbol: driver.call(s, *zeros())) for symbol in symbols]
    for number, (name, call) in enumerate(calls):
        # What comes before may be what this refers to.
        if number < begin and (state != CASES or not name.startswith(("register", "unregister"))):
            continue
        driver.enter(state)
        print(f"?\t{number}\t{name}", flush=True)
        print(f"=\t{number}\t{name}\t{call()}", flush=True)


def table(path):
    for state in STATES + [CASES]:
        begin = 0
        while begin is not None:
            begin = run(state, path, begin)


def run(state, path, begin):
    """Has a process ask from this call on. The call to go on with, if it has not come to the end."""
    command = [sys.executable, __file__, "--ask", state, path, str(begin)]
    asking, is_over = None, False
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        selector = selectors.DefaultSelector()
        selector.register(child.stdout, selectors.EVENT_READ)
        rest = b""
        while selector.select(PATIENCE):
            read = os.read(child.stdout.fileno(), 1 << 16)
            if not read:
                is_over = True
                break
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                kind, number, name, *code = line.decode().split("\t")
                if kind not in "?=":
                    continue
                asking = (int(number), name) if kind == "?" else None
                if kind == "=" and int(number) >= begin:
                    print(state, name, code[0], sep="\t", flush=True)
        child.kill()
    if asking is None:
        return None if is_over else begin + 1
    print(state, asking[1], "crashes" if is_over else "hangs", sep="\t", flush=True)
    return asking[0] + 1


def compare(native, other):
    def read(path):
        with open(path, encoding="utf-8") as file:
            lines = [line.rstrip("\n").split("\t") for line in file]
        return {(state, name): code for state, name, code in lines}

    native, other = read(native), read(other)
    different = [key for key in native if native[key] != other.get(key)]
    print(f"{len(native)} calls, of which {len(different)} are answered differently.\n")
    print("| state | call | driver | Gantry |\n|---|---|---|---|")
    for key in different:
        print(f"| {key[0]} | {key[1]} | {native[key]} | {other.get(key, 'not asked')} |")


if sys.argv[1] == "--compare":
    compare(*sys.argv[2:])
elif sys.argv[1] == "--ask":
    with open(sys.argv[3], encoding="ascii") as file:
        ask(sys.argv[2], [line.strip() for line in file if not line.startswith(LEFT_OUT)], int(sys.argv[4]))
else:
    table(sys.argv[1])
