// A physical block from its launch to its end: it starts anew or where it was stopped, runs logical
// blocks, and saves itself when it stops.
#pragma once

#include <gloop/loop.cuh>

namespace gloop {
namespace block {

GLOOP_DEVICE u64 index() {
  return blockIdx.x + static_cast<u64>(gridDim.x) * (blockIdx.y + static_cast<u64>(gridDim.y) * blockIdx.z);
}

GLOOP_DEVICE u32 pages(const Ctl& ctl) {
  return ctl.page_count >= 32 ? ~0u : (1u << ctl.page_count) - 1;
}

// Copies the shared memory that the block keeps out, or back.
GLOOP_DEVICE void kept(const Loop& loop, bool back) {
  unsigned char* room = loop.ctl.kept + index() * loop.ctl.kept_bytes;
  for (u32 i = 0; i < loop.kept_count; ++i) {
    void* shared = ptx::shared_pointer(loop.kept[i].offset);
    if (back) copy(shared, room, loop.kept[i].bytes);
    else copy(room, shared, loop.kept[i].bytes);
    room += (loop.kept[i].bytes + 15) & ~15u;
  }
}

// Returns false if this block was already done.
GLOOP_DEVICE bool enter(Loop& loop, const Ctl& ctl, u32& p) {
  Block* own = ctl.blocks + index();
  const u32 state = own->state;
  if (state == 2) return false;
  if (state == 1) copy(&loop, own->saved, sizeof(Loop));
  __syncthreads();
  if (leader()) {
    loop.ctl = ctl;
    loop.gate.at = ptx::clock();
    loop.gate.cycles = ctl.gate_cycles;
    loop.gate.stopping = 0;
    loop.polled = 0;
    loop.looked = 0;
    loop.fault = 0;
    loop.cell[0].stop = 0;
    loop.cell[1].stop = 0;
    if (state == 0) {
      loop.cell[0].code = 0;
      loop.cell[1].code = 0;
      loop.own = own;
      loop.rings = ctl.rings + index();
      loop.pages = ctl.pages + index() * ctl.page_count * ctl.page_bytes;
      loop.logical = 0;
      loop.batch_next = 0;
      loop.batch_end = 0;
      loop.parity = 0;
      loop.free_slots = ~0u;
      loop.free_pages = pages(ctl);
      loop.waiting = 0;
      loop.finished = 0;
      loop.ready_first = 0;
      loop.ready_count = 0;
      loop.sent = 0;
      loop.taken = 0;
      loop.counted = 0;
      loop.kept_count = 0;
      loop.kept_bytes = 0;
    }
    loop.next = loop.parity;
  }
  __syncthreads();
  p = loop.parity;
  if (state == 1) kept(loop, true);
  return true;
}

// Saves the remaining work, if there is any. Returns whether there is.
GLOOP_DEVICE bool save(Loop& loop) {
  if (leader() && loop.taken != loop.counted) {
    atomicAdd(&loop.ctl.board->taken, loop.taken - loop.counted);
    loop.counted = loop.taken;
  }
  __syncthreads();
  if (loop.finished != 0) return false;
  kept(loop, false);
  copy(loop.own->saved, &loop, sizeof(Loop));
  if (leader()) loop.own->state = 1;
  return true;
}

// Counts the block out. The last one reports how the launch ended.
GLOOP_DEVICE void leave(const Ctl& ctl, bool unfinished) {
  __syncthreads();
  if (!leader()) return;
  Board* board = ctl.board;
  const u32 blocks = gridDim.x * gridDim.y * gridDim.z;
  __threadfence();
  const u64 left = atomicAdd(&board->left, unfinished ? 1ull << 32 | 1 : 1ull);
  if (static_cast<u32>(left) != blocks - 1) return;
  __threadfence();
  const bool done = !unfinished && left >> 32 == 0;
  const u32 fault = ptx::load_device(&board->fault);
  const u32 waiting = ptx::load_device(&board->waiting);
  board->idle = 0;
  board->left = 0;
  ctl.exit->fault = fault;
  ctl.exit->launch = ctl.launch;
  ctl.exit->taken = ptx::load_device(&board->taken);
  ptx::store_host(&ctl.exit->code, fault != 0              ? EXIT_FAULT
                                   : done                  ? EXIT_DONE
                                   : waiting == ctl.launch ? EXIT_WAITING
                                                           : EXIT_STOPPED);
}

}  // namespace block
}  // namespace gloop
