// GLoop: kernels made of callbacks, which can be stopped between two of them and continue later.
//
//   __device__ void step(gloop::Loop& loop, Args args, unsigned i) {
//     for (; i < args.count; ++i) {
//       work(loop.block(), args, i);
//       if (loop.post_if_needed([=](gloop::Loop& loop) { step(loop, args, i + 1); })) return;
//     }
//   }
//   __global__ void serve(gloop::Ctl ctl, Args args) {
//     gloop::run(ctl, [=](gloop::Loop& loop) { step(loop, args, 0); });
//   }
//
// All threads of a block make the same calls with the same arguments, and a callback's captured
// values are the same for all of them; values that differ must be in memory. Shared memory is lost at
// a suspension unless it was passed to loop.keep().
#pragma once

#include <gloop/block.cuh>
#include <gloop/fs.cuh>
#include <gloop/net.cuh>

namespace gloop {

// Where a block's loop is while it runs: shared memory (1.5 KiB) is faster, device memory leaves
// all shared memory to kernels that need much of it.
enum class Memory { Shared, Device };

// Runs `begin` once for each logical block, and the callbacks that it posts. Must be the kernel's
// last statement; all threads call it.
template <Memory memory = Memory::Shared, class F>
__device__ __forceinline__ void run(const Ctl& ctl, F begin) {
  Loop* loop;
  if constexpr (memory == Memory::Shared) {
    __shared__ alignas(16) unsigned char room[sizeof(Loop)];
    loop = reinterpret_cast<Loop*>(room);
  } else {
    // The place where it is saved, so that it is there when the block continues.
    loop = reinterpret_cast<Loop*>(ctl.blocks[block::index()].saved);
  }
  u32 p = 0;
  bool unfinished = false;
  if (block::enter(*loop, ctl, p)) {
    while (loop->drain(p) == Loop::BLOCK) begin(*loop);
    unfinished = block::save(*loop);
  }
  block::leave(ctl, unfinished);
}

}  // namespace gloop
