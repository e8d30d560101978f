# Executes random commands until the end given by its first argument (see until.py), each also on a copy in this
# process, and compares all memory now and then. Prints "ok" at the end, "error" if OpenCL failed, and "wrong" if
# memory was incorrect. The second argument is the seed of the random numbers.
import sys
import time

import numpy as np
import pyopencl as cl
from until import ends

SOURCE = """
kernel void advance(global uint *a, uint from, uint step) { a[from + get_global_id(0)] += step; }
kernel void blend(global const uint *from, global uint *to) {
    size_t i = get_global_id(0);
    to[i] ^= from[i] * 2654435761u;
}
kernel void spread(constant uint *from, global uint *to) {
    size_t i = get_global_id(0);
    to[i] += from[i & 1023];
}
kernel void paint(read_only image2d_t from, write_only image2d_t to) {
    int2 at = (int2)(get_global_id(0), get_global_id(1));
    write_imageui(to, at, (read_imageui(from, at) + 1) & 255u);
}
"""
# Several of the blocks that are checked for changes, and a part of one.
WORDS = 70000
TABLE = 1024
SIDE = 96


def check(got, wanted):
    if not np.array_equal(got, wanted):
        print("wrong", flush=True)
        sys.exit(4)


class Memory:
    def __init__(self, chance):
        self.chance = chance
        self.context = cl.Context(cl.get_platforms()[0].get_devices())
        self.queues = [cl.CommandQueue(self.context) for _ in range(2)]
        program = cl.Program(self.context, SOURCE).build()
        self.advance, self.blend, self.spread, self.paint = (
            cl.Kernel(program, name) for name in ("advance", "blend", "spread", "paint")
        )
        flags = cl.mem_flags
        start = flags.READ_WRITE | flags.COPY_HOST_PTR
        self.words = [chance.integers(0, 2**32, WORDS, np.uint32) for _ in range(6)]
        self.buffers = [cl.Buffer(self.context, start, hostbuf=words) for words in self.words]
        self.table = chance.integers(0, 2**32, TABLE, np.uint32)
        self.read_only = cl.Buffer(
            self.context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=self.table
        )
        form = cl.ImageFormat(cl.channel_order.RGBA, cl.channel_type.UNSIGNED_INT8)
        self.pixels = [np.zeros((SIDE, SIDE, 4), np.uint8) for _ in range(3)]
        self.images = [
            cl.Image(self.context, flags.READ_WRITE, form, shape=(SIDE, SIDE)) for _ in range(3)
        ]
        for at in range(3):
            self.fill_image(self.queues[0], at)

    def number(self, below):
        return int(self.chance.integers(below))

    def stretch(self):
        length = 1 + self.number(WORDS // 4)
        return self.number(WORDS - length), length

    def fill_image(self, queue, at):
        colour = self.chance.integers(0, 256, 4, np.uint32)
        cl.enqueue_fill_image(queue, self.images[at], colour, (0, 0), (SIDE, SIDE))
        self.pixels[at][:] = colour.astype(np.uint8)

    def command(self, queue):
        kind, at, other = self.number(10), self.number(6), self.number(6)
        buffer, words = self.buffers[at], self.words[at]
        start, length = self.stretch()
        step = np.uint32(self.number(2**32))
        if kind == 0:
            cl.enqueue_fill_buffer(queue, buffer, step, 4 * start, 4 * length)
            words[start : start + length] = step
        elif kind == 1:
            data = self.chance.integers(0, 2**32, length, np.uint32)
            cl.enqueue_copy(queue, buffer, data, dst_offset=4 * start)
            words[start : start + length] = data
        elif kind == 2 and other != at:
            cl.enqueue_copy(
                queue, self.buffers[other], buffer, byte_count=4 * length, src_offset=4 * start, dst_offset=4 * start
            )
            self.words[other][start : start + length] = words[start : start + length]
        elif kind == 3:
            self.advance.set_args(buffer, np.uint32(start), step)
            cl.enqueue_nd_range_kernel(queue, self.advance, (length,), None)
            words[start : start + length] += step
        elif kind == 4 and other != at:
            self.blend.set_args(self.buffers[other], buffer)
            cl.enqueue_nd_range_kernel(queue, self.blend, (WORDS,), None)
            words ^= self.words[other] * np.uint32(2654435761)
        elif kind == 5:
            self.spread.set_args(self.read_only, buffer)
            cl.enqueue_nd_range_kernel(queue, self.spread, (WORDS,), None)
            words += np.resize(self.table, WORDS)
        elif kind == 6:
            self.table = self.chance.integers(0, 2**32, TABLE, np.uint32)
            cl.enqueue_copy(queue, self.read_only, self.table)
        elif kind == 7:
            # A part that is released before the kernel that writes it is enqueued again.
            part = buffer.get_sub_region(4096, 65536)
            self.advance.set_args(part, np.uint32(0), step)
            cl.enqueue_nd_range_kernel(queue, self.advance, (16384,), None)
            del part
            words[1024 : 1024 + 16384] += step
        elif kind == 8:
            self.fill_image(queue, at % 3)
        elif kind == 9 and other % 3 != at % 3:
            self.paint.set_args(self.images[other % 3], self.images[at % 3])
            cl.enqueue_nd_range_kernel(queue, self.paint, (SIDE, SIDE), None)
            self.pixels[at % 3][:] = self.pixels[other % 3] + np.uint8(1)

    def compare(self, queue):
        for buffer, words in zip(self.buffers + [self.read_only], self.words + [self.table]):
            got = np.empty_like(words)
            cl.enqueue_copy(queue, got, buffer)
            check(got, words)
        for image, pixels in zip(self.images, self.pixels):
            got = np.empty_like(pixels)
            cl.enqueue_copy(queue, got, image, origin=(0, 0), region=(SIDE, SIDE))
            check(got, pixels)


def main(until, seed):
    memory = Memory(np.random.default_rng(seed))
    print("running", flush=True)
    is_over = ends(until)
    rounds = 0
    while not is_over():
        queue = memory.queues[rounds % 2]
        for _ in range(memory.number(30)):
            memory.command(queue)
        queue.finish()
        if rounds % 20 == 0:
            memory.compare(queue)
        # Moves happen while it computes and while it does not.
        time.sleep(memory.number(4) / 1000)
        rounds += 1
    memory.compare(memory.queues[0])
    print("ok", flush=True)


try:
    main(sys.argv[1], int(sys.argv[2]))
except cl.Error:
    print("error", flush=True)
    sys.exit(3)
