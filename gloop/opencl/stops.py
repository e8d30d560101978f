"""Programs for the poll-only tier, stopped at random moments: their outputs are those of kernels
that nobody stops.

usage: stops.py HEADER STOPS"""

import random
import sys
import time

import numpy as np
import pyopencl as cl

KERNELS = """
// A chain of steps for each work-item.
struct chain { uint i; };

uint step(uint x) { for (int k = 0; k < 200; ++k) x = x * 1664525u + 1013904223u; return x; }

__kernel void throttle_vanilla(__global uint *out, uint count) {
  uint x = get_global_id(0);
  for (uint i = 0; i < count; ++i) x = step(x);
  out[get_global_id(0)] = x;
}

__kernel void throttle(__global struct gloop *loop, __global struct chain *chains,
                       __global uint *out, uint count) {
  __local uint told;
  uint block;
  while ((block = gloop_begin(loop, &told)) != GLOOP_NONE) {
    const uint me = block * get_local_size(0) + get_local_id(0);
    uint i = chains[block].i;
    uint x = i == 0 ? me : out[me];
    int stopped = 0;
    while (i < count && !stopped) {
      x = step(x);
      ++i;
      stopped = gloop_poll(loop, &told);
    }
    out[me] = x;
    if (get_local_id(0) == 0) chains[block].i = i;
    gloop_end(loop, block, stopped);
  }
}

// Distances between all pairs of points, in a histogram that lies in local memory while it runs.
#define BINS 32

void tile(__global const int *points, uint a, uint first, uint size, __local uint *bins) {
  for (uint j = first; j < first + size; ++j) {
    const uint distance = abs(points[a] - points[j]);
    atomic_inc(&bins[min(distance / 64u, BINS - 1u)]);
  }
}

__kernel void pairs_vanilla(__global const int *points, uint tiles, __global uint *histogram) {
  __local uint bins[BINS];
  const uint me = get_local_id(0), size = get_local_size(0);
  if (me < BINS) bins[me] = 0;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (uint t = 0; t < tiles; ++t) tile(points, get_global_id(0), t * size, size, bins);
  barrier(CLK_LOCAL_MEM_FENCE);
  if (me < BINS) atomic_add(&histogram[me], bins[me]);
}

struct pairs { uint tile; uint bins[BINS]; };

__kernel void pairs(__global struct gloop *loop, __global struct pairs *states,
                    __global const int *points, uint tiles, __global uint *histogram) {
  __local uint told;
  __local uint bins[BINS];
  const uint me = get_local_id(0), size = get_local_size(0);
  uint block;
  while ((block = gloop_begin(loop, &told)) != GLOOP_NONE) {
    __global struct pairs *mine = &states[block];
    if (me < BINS) bins[me] = mine->bins[me];
    uint t = mine->tile;
    int stopped = 0;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    while (t < tiles && !stopped) {
      tile(points, block * size + me, t * size, size, bins);
      ++t;
      stopped = gloop_poll(loop, &told);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (me < BINS) {
      if (stopped) mine->bins[me] = bins[me];
      else atomic_add(&histogram[me], bins[me]);
    }
    if (me == 0) mine->tile = t;
    gloop_end(loop, block, stopped);
  }
}
"""

STOP, NEXT, SUSPENDED, DONE, BLOCKS, READY, LIST = 0, 1, 2, 3, 4, 5, 8


class Loop:
    """What host and device share of one program: fine-grained, as the header asks for."""

    def __init__(self, context, blocks):
        flags = cl.svm_mem_flags
        flags = flags.READ_WRITE | flags.SVM_FINE_GRAIN_BUFFER | flags.SVM_ATOMICS
        self.words = cl.svm_empty(context, flags, LIST + 2 * blocks, np.uint32)
        self.blocks = blocks
        self.words[:] = 0
        self.words[[BLOCKS, READY]] = blocks
        self.words[LIST : LIST + blocks] = np.arange(blocks)

    def done(self):
        return self.words[DONE] == self.blocks

    def again(self):
        """Before a launch: what was suspended first, then what nobody has begun."""
        words, blocks = self.words, self.blocks
        begun = min(int(words[NEXT]), int(words[READY]))
        count = int(words[SUSPENDED])
        left = words[LIST + begun : LIST + int(words[READY])].copy()
        todo = np.concatenate([words[LIST + blocks : LIST + blocks + count], left])
        words[LIST : LIST + len(todo)] = todo
        words[READY] = len(todo)
        words[[STOP, NEXT, SUSPENDED]] = 0


def main(header, stops):
    context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
    device = context.devices[0]
    atomics = cl.device_svm_capabilities.ATOMICS
    if not device.svm_capabilities & atomics:
        sys.exit(f"{device.name} has no fine-grained shared virtual memory with atomics")
    queue = cl.CommandQueue(context)
    with open(header) as text:
        program = cl.Program(context, text.read() + KERNELS).build(["-cl-std=CL3.0"])
    chance = random.Random(5)

    def zeros(count):
        buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, count * 4)
        cl.enqueue_fill_buffer(queue, buffer, np.uint32(0), 0, count * 4)
        return buffer

    def read(buffer, count):
        out = np.empty(count, np.uint32)
        cl.enqueue_copy(queue, out, buffer)
        return out

    def stopped(name, blocks, local, groups, state_words, args, longest):
        """Runs a kernel with random stops; how many there were."""
        loop = Loop(context, blocks)
        states = zeros(blocks * state_words)
        kernel = cl.Kernel(program, name)
        kernel.set_args(cl.SVM(loop.words), states, *args)
        count = 0
        while True:
            run = cl.enqueue_nd_range_kernel(queue, kernel, (groups * local,), (local,))
            queue.flush()
            time.sleep(chance.random() * longest)
            loop.words[STOP] = 1
            run.wait()
            if loop.done():
                return count
            count += 1
            loop.again()

    # Compared after each run.
    for name, run in programs(context, queue, program, zeros, read, stopped).items():
        total = runs = 0
        while total < stops:
            total += run()
            runs += 1
        print(f"{name}: outputs are equal after {total} random stops in {runs} runs")


def programs(context, queue, program, zeros, read, stopped):
    local = 32
    blocks, steps = 16, 3000
    out = zeros(blocks * local)
    vanilla = cl.Kernel(program, "throttle_vanilla")
    vanilla(queue, (blocks * local,), (local,), out, np.uint32(steps))
    chain = read(out, blocks * local)
    assert len(set(chain)) == blocks * local

    def throttle():
        out = zeros(blocks * local)
        count = stopped("throttle", blocks, local, 8, 1, [out, np.uint32(steps)], 0.004)
        assert (read(out, blocks * local) == chain).all(), "throttle differs"
        return count

    tiles = 64
    numbers = np.random.default_rng(3).integers(0, 2048, tiles * local, np.int32)
    flags = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
    points = cl.Buffer(context, flags, hostbuf=numbers)
    histogram = zeros(32)
    vanilla_pairs = cl.Kernel(program, "pairs_vanilla")
    vanilla_pairs(queue, (tiles * local,), (local,), points, np.uint32(tiles), histogram)
    bins = read(histogram, 32)
    assert bins.sum() == (tiles * local) ** 2

    def pairs():
        histogram = zeros(32)
        args = [points, np.uint32(tiles), histogram]
        count = stopped("pairs", tiles, local, 8, 33, args, 0.002)
        assert (read(histogram, 32) == bins).all(), "pairs differ"
        return count

    return {"throttle": throttle, "pairs": pairs}


main(sys.argv[1], int(sys.argv[2]))
