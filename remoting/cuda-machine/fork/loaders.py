"""Loaders of data in processes of their own, as PyTorch has them, with pinned memory, by each way in which Python starts
processes: run natively and through Gantry, the outputs are compared. Needs no package.

    python3 loaders.py [fork|forkserver|spawn ...]
"""

import ctypes
import multiprocessing
import os
import sys

WORDS = 1 << 14
SLOTS = 8
BATCHES = 64
WORKERS = 4

Words = ctypes.c_uint32 * WORDS


class Device:
    """The device's primary context, and a slot of its memory."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.context, self.memory = ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)
        self.call("cuMemAlloc_v2", ctypes.byref(self.memory), ctypes.c_size_t(4 * WORDS))

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {code}")

    def pinned(self):
        at = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(at), ctypes.c_size_t(4 * WORDS), 0)
        return Words.from_address(at.value)

    def there_and_back(self, words):
        """What the device has of these words, after it had something else."""
        got = Words()
        size = ctypes.c_size_t(4 * WORDS)
        self.call("cuMemsetD32_v2", self.memory, 0xDEAD, ctypes.c_size_t(WORDS))
        self.call("cuMemcpyHtoD_v2", self.memory, ctypes.byref(words), size)
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH_v2", ctypes.byref(got), self.memory, size)
        return got


def batch(number):
    return [(number * 2654435761 + index) & 0xFFFFFFFF for index in range(WORDS)]


def fill_slots(slots, todo, done):
    """A loader that inherits the slots: it writes where the device reads."""
    for number, slot in iter(todo.get, None):
        slots[slot][:] = batch(number)
        done.put((number, slot))


def send_batches(todo, done):
    """A loader that sends what it loads; what the parent pins is not its."""
    for number in iter(todo.get, None):
        done.put((number, batch(number)))


def asks_the_device(done):
    """A loader that calls the device against the rules."""
    cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    done.put((cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count))))


def load(way):
    context = multiprocessing.get_context(way)
    device = Device()
    slots = [device.pinned() for _ in range(SLOTS)]
    todo, done = context.Queue(), context.Queue()
    right = 0
    if way == "fork":
        workers = [context.Process(target=fill_slots, args=(slots, todo, done)) for _ in range(WORKERS)]
    else:
        workers = [context.Process(target=send_batches, args=(todo, done)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    free, next_batch = list(range(SLOTS)), 0
    for _ in range(BATCHES):
        while free and next_batch < BATCHES:
            todo.put((next_batch, free.pop()) if way == "fork" else next_batch)
            next_batch += 1
            if way != "fork":
                free.pop()
        number, got = done.get()
        if way == "fork":
            slot = got
        else:
            slot = number % SLOTS
            slots[slot][:] = got
        right += list(device.there_and_back(slots[slot])) == batch(number)
        free.append(slot)
    for _ in workers:
        todo.put(None)
    for worker in workers:
        worker.join()
    print(f"{way}: {right} of {BATCHES} batches are right, loaders ended with {[worker.exitcode for worker in workers]}")
    asking = context.Process(target=asks_the_device, args=(done,))
    asking.start()
    print(f"{way}: a loader that calls cuInit and cuDeviceGetCount gets {done.get()}")
    asking.join()
    words = Words(*range(WORDS))
    print(f"{way}: the parent's copies are {'right' if list(device.there_and_back(words)) == list(words) else 'WRONG'}")


if __name__ == "__main__":
    ways = sys.argv[1:] or ["fork", "forkserver", "spawn"]
    if len(ways) == 1:
        load(ways[0])
    else:
        for way in ways:
            # A process of its own for each.
            sys.stdout.flush()
            if os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, way]):
                print(f"{way}: failed")
