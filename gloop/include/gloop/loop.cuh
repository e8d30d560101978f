// A block's event loop: callbacks, points at which the block may be stopped, and its state while it
// does not run.
//
// The loop is in shared memory and is maintained by one thread, the leader. The callback that runs
// next is in one of two cells; a callback posts into the other one. All threads pass one barrier
// between two callbacks, which publishes one cell and frees the other.
//
// To stop a launch, its number is stored into the host's orders. Reading them over the bus takes a
// microsecond, and all such reads queue up. So the blocks read a copy in device memory, at
// intervals measured by the clock, and the first block that finds the copy outdated reads the
// orders for all.
#pragma once

#include <gloop/slots.cuh>

namespace gloop {

struct alignas(16) Cell {
  u64 code;    // the function to call; 0 for none
  u32 stop;    // whether to stop before it
  u32 unused;
  i64 result;  // the result of its event: two words before the closure
  u64 unused_too;
  unsigned char closure[CLOSURE];
};

// What a check of the clock needs, read at once.
struct alignas(16) Gate {
  u32 at;        // the clock at the last check of the board
  u32 cycles;    // until the next one
  u32 stopping;  // the launch has to stop
  u32 unused;
};

struct alignas(16) Loop {
  Cell cell[2];
  Gate gate;
  Ctl ctl;
  Block* own;
  Rings* rings;
  unsigned char* pages;
  u64 polled;       // when this block last read the orders
  u64 looked;       // when it last checked for answers
  u64 logical;      // the logical block that is running
  u64 batch_next;   // the range of logical blocks taken by this block
  u64 batch_end;
  u32 next;         // the cell to post into, with TAKEN if it is not free
  u32 parity;       // the cell that was next when the block stopped
  u32 act;          // the leader's decision
  u32 free_slots;
  u32 free_pages;
  u32 waiting;      // events in flight
  u32 ready_first;  // queue of slots whose events have arrived
  u32 ready_count;
  u32 sent;
  u32 taken;
  u32 counted;      // how many of those taken are counted on the board
  u32 page;         // the page that was last taken, passed to all threads
  u32 kept_count;
  u32 kept_bytes;
  u32 fault;
  u32 finished;     // all of this block is done
  u32 ready[SLOTS / 4];  // slots, a byte each
  struct { u32 offset, bytes; } kept[KEPT];

  // ---- what callbacks call, all threads of the block with the same arguments ----

  // The logical block, and its position in the logical grid.
  GLOOP_DEVICE u64 block() const { return logical; }
  GLOOP_DEVICE u32 block_x() const { return static_cast<u32>(logical % ctl.x); }
  GLOOP_DEVICE u32 block_y() const { return static_cast<u32>(logical / ctl.x % ctl.y); }
  GLOOP_DEVICE u32 block_z() const { return static_cast<u32>(logical / ctl.x / ctl.y); }
  // The maximum number of bytes that one call reads or writes.
  GLOOP_DEVICE u32 page_bytes() const { return ctl.page_bytes; }

  // Runs f(loop) after the calling callback has returned. Callbacks run in the order in which they
  // are posted.
  template <class F>
  GLOOP_DEVICE void post(F f) {
    // Without function calls, for which all threads would have to save registers.
    if (leader()) Closure<F>::store(claim(reinterpret_cast<u64>(&Closure<F>::run)), f);
  }

  // If the launch has to stop, posts f and returns true: the caller must return. Otherwise it
  // continues.
  template <class F>
  GLOOP_DEVICE bool post_if_needed(F f) {
    // All threads read the clock, so that the common path has no branch for the leader. What the
    // others see of a word that the leader writes concurrently only adds to the leader's own
    // result.
    const uint4 seen = *reinterpret_cast<const uint4*>(&gate);
    const u32 now = ptx::clock();
    int stop = seen.z != 0;
    if (now - seen.x >= seen.y && leader()) {
      gate.at = now;
      look();
      stop = gate.stopping != 0;
    }
    if (!__syncthreads_or(stop)) return false;
    post(f);
    return true;
  }

  // Keeps a piece of this kernel's shared memory across suspensions. Called once by a logical
  // block, forgotten when it ends. Copies in flight into it (bulk or asynchronous ones) must have
  // ended before a point at which the block may stop.
  GLOOP_DEVICE void keep(const void* at, u32 bytes) {
    if (!leader()) return;
    const u32 room = (bytes + 15) & ~15u;
    if (kept_count == KEPT || kept_bytes + room > ctl.kept_bytes) return fail(FAULT_KEPT);
    kept[kept_count].offset = ptx::shared_offset(at);
    kept[kept_count].bytes = bytes;
    kept_count += 1;
    kept_bytes += room;
  }

  // Makes a request to the host; runs f(loop, result) when it has answered. `request` is the
  // leader's.
  template <class F>
  GLOOP_DEVICE void ask(Request request, F f) {
    if (!leader()) return;
    const u32 slot = take_slot();
    if (slot == SLOTS) return;
    own->slots[slot].code = reinterpret_cast<u64>(&Closure<F>::run_with_result);
    Closure<F>::store(own->slots[slot].closure, f);
    waiting += 1;
    request.tag = slot;
    ring::push(rings, sent, request);
  }

  // Takes a page for data, the same one for all threads. Returns 32 if none is left; the launch
  // then ends with a fault.
  GLOOP_DEVICE u32 take_page() {
    __syncthreads();
    if (leader()) {
      const u32 found = __ffs(free_pages);
      page = found ? found - 1 : 32;
      if (found) free_pages &= free_pages - 1;
      else fail(FAULT_PAGES);
    }
    __syncthreads();
    return page;
  }
  GLOOP_DEVICE unsigned char* page_at(u32 index) const {
    return pages + static_cast<u64>(index) * ctl.page_bytes;
  }
  // After a barrier behind its last use.
  GLOOP_DEVICE void give_page(u32 index) {
    if (leader()) free_pages |= 1u << index;
  }

  // ---- the loop itself ----

  enum Act : u32 { CALL, BLOCK, LEAVE };
  static constexpr u32 TAKEN = 2;

  // Calls posted callbacks until there are none, and then returns whether a logical block begins or
  // this one leaves. `p` is the cell that is next, and CHECKED.
  GLOOP_DEVICE Act drain(u32& p) {
    for (;;) {
      if ((p & CHECKED) == 0) point(p);
      p &= ~CHECKED;
      const u64 code = runs(p);
      if (code != 0) {
        begin(p);
        p = reinterpret_cast<Code>(code)(*this, p);
        continue;
      }
      __syncthreads();
      if (leader()) {
        act = cell[p].code != 0 ? LEAVE : choose(p);
        parity = p;
        next = p;
      }
      __syncthreads();
      const Act chosen = static_cast<Act>(act);
      if (chosen != CALL) return chosen;
    }
  }

  // The point before a cell's callback, which is visible to all threads after it.
  GLOOP_DEVICE void point(u32 p) {
    if (leader() && due()) cell[p].stop = 1;
    __syncthreads();
  }

  // The code of the cell's callback, which runs now. 0 if there is none, or the block stops before
  // it.
  GLOOP_DEVICE u64 runs(u32 p) const {
    const uint4 head = *reinterpret_cast<const uint4*>(&cell[p]);
    return head.z == 0 ? static_cast<u64>(head.y) << 32 | head.x : 0;
  }

  // The callback begins: the other cell is free.
  GLOOP_DEVICE void begin(u32 p) {
    if (!leader()) return;
    cell[p ^ 1].code = 0;
    // What waits for its turn runs first.
    next = ready_count == 0 ? p ^ 1 : (p ^ 1) | TAKEN;
  }

  // ---- the leader's ----

  // Whether the launch has to stop. In most cases this only reads the clock.
  GLOOP_DEVICE bool due() {
    const uint4 seen = *reinterpret_cast<const uint4*>(&gate);
    const u32 now = ptx::clock();
    if (now - seen.x < seen.y) return seen.z != 0;
    gate.at = now;
    look();
    return gate.stopping != 0;
  }

  __device__ __noinline__ void look() {
    Board* board = ctl.board;
    const u32 stop = ptx::load_device(&board->stop);
    const u64 last = ptx::load_device(&board->polled);
    if (stop == ctl.launch) {
      gate.stopping = 1;
      return;
    }
    const u64 now = ptx::timer();
    if (static_cast<i64>(now - last) > static_cast<i64>(ctl.poll_ns) && now - polled > ctl.own_poll_ns &&
        atomicCAS(&board->polled, last, now) == last) {
      polled = now;
      const u64 orders = ptx::load_host(reinterpret_cast<const u64*>(ctl.orders));
      // The arbiter that shares the GPU between processes publishes the same. Both reads are in
      // flight at the same time.
      const u64 turns = ctl.turns != nullptr ? ptx::load_host(ctl.turns) : 0;
      const bool over = ctl.turns != nullptr && static_cast<u32>(turns) == ctl.turn;
      if (static_cast<u32>(orders >> 32) == ctl.launch || turns >> 32 != 0)
        ptx::store_device(&board->contended, ctl.launch);
      if (static_cast<u32>(orders) == ctl.launch || over) {
        ptx::store_device(&board->stop, ctl.launch);
        gate.stopping = 1;
      }
    }
    if (waiting != 0 && now - looked > 16000) {
      looked = now;
      take_answers();
    }
  }

  // Where the closure of a callback goes: the free cell, or a slot if something is already waiting.
  GLOOP_DEVICE void* claim(u64 code) {
    const u32 to = next;
    if ((to & TAKEN) == 0) {
      next = to | TAKEN;
      cell[to].code = code;
      return cell[to].closure;
    }
    const u32 slot = take_slot();
    if (slot == SLOTS) return own->slots[0].closure;  // nothing runs any more
    own->slots[slot].code = code;
    make_ready(slot);
    return own->slots[slot].closure;
  }

  GLOOP_DEVICE u32 take_slot() {
    const u32 found = __ffs(free_slots);
    if (found == 0) {
      fail(FAULT_SLOTS);
      return SLOTS;
    }
    free_slots &= free_slots - 1;
    return found - 1;
  }

  GLOOP_DEVICE void make_ready(u32 slot) {
    reinterpret_cast<unsigned char*>(ready)[(ready_first + ready_count) % SLOTS] =
        static_cast<unsigned char>(slot);
    ready_count += 1;
  }

  GLOOP_DEVICE void fail(u32 why) {
    fault = why;
    gate.stopping = 1;
    ptx::store_device(&ctl.board->fault, why);
    ptx::store_device(&ctl.board->stop, ctl.launch);
  }

  __device__ __noinline__ void take_answers() {
    u32 tag;
    i64 result;
    while (waiting != 0 && ring::take(rings, taken, tag, result)) {
      if (tag >= SLOTS || (free_slots >> tag & 1) != 0) continue;
      own->slots[tag].result = result;
      waiting -= 1;
      make_ready(tag);
    }
  }

  // Nothing is posted: selects an event that has arrived, a logical block, or waits. Fills the cell
  // `p`.
  __device__ __noinline__ u32 choose(u32 p) {
    u64 since = 0;
    bool idle = false;
    u32 act = LEAVE;
    for (u32 pause = 100;; pause = pause < 1000 ? pause * 2 : pause) {
      if (due()) break;
      if (waiting != 0 && ready_count == 0) take_answers();
      if (ready_count != 0) {
        const u32 slot = reinterpret_cast<unsigned char*>(ready)[ready_first];
        ready_first = (ready_first + 1) % SLOTS;
        ready_count -= 1;
        fill(cell[p], own->slots[slot]);
        free_slots |= 1u << slot;
        act = CALL;
        break;
      }
      if (waiting == 0) {
        kept_count = 0;
        kept_bytes = 0;
        if (batch_next == batch_end) take_batch();
        if (batch_next == batch_end) {
          own->state = 2;
          finished = 1;
          break;
        }
        logical = batch_next++;
        act = BLOCK;
        break;
      }
      // Nothing is left but waiting, which needs no GPU.
      const u64 now = ptx::timer();
      if (since == 0) since = now;
      if (!idle && now - since > ctl.idle_ns) {
        idle = true;
        atomicAdd(&ctl.board->idle, 1u);
      }
      if (idle && ptx::load_device(&ctl.board->contended) == ctl.launch &&
          ptx::load_device(&ctl.board->idle) + static_cast<u32>(ptx::load_device(&ctl.board->left)) >=
              gridDim.x * gridDim.y * gridDim.z) {
        ptx::store_device(&ctl.board->waiting, ctl.launch);
        ptx::store_device(&ctl.board->stop, ctl.launch);
      }
      ptx::sleep(pause);
    }
    if (idle) atomicSub(&ctl.board->idle, 1u);
    return act;
  }

  GLOOP_DEVICE static void fill(Cell& cell, const Slot& slot) {
    cell.code = slot.code;
    cell.stop = 0;
    cell.result = slot.result;
    const uint4* from = reinterpret_cast<const uint4*>(slot.closure);
    uint4* to = reinterpret_cast<uint4*>(cell.closure);
    for (u32 i = 0; i < CLOSURE / 16; ++i) to[i] = from[i];
  }

  // Fewer blocks at a time as fewer are left, so that the last ones are distributed evenly.
  GLOOP_DEVICE void take_batch() {
    const u64 blocks = static_cast<u64>(gridDim.x) * gridDim.y * gridDim.z;
    const u64 begun = ptx::load_device(&ctl.board->next);
    if (begun >= ctl.logical) return;
    const u64 share = (ctl.logical - begun) / (blocks * 4);
    const u64 many = share < 1 ? 1 : share < ctl.batch ? share : ctl.batch;
    const u64 first = atomicAdd(&ctl.board->next, many);
    if (first >= ctl.logical) return;
    batch_next = first;
    batch_end = first + many < ctl.logical ? first + many : ctl.logical;
  }
};

static_assert(sizeof(Loop) <= SAVED && sizeof(Loop) % 16 == 0, "a loop is saved whole");

template <class F>
__device__ u32 Closure<F>::run(Loop& loop, u32 p) {
  const u64 code = reinterpret_cast<u64>(&Closure<F>::run);
  for (;;) {
    F f = *reinterpret_cast<F*>(loop.cell[p].closure);
    f(loop);
    p ^= 1;
    loop.point(p);
    if (loop.runs(p) != code) return p | CHECKED;
    loop.begin(p);
  }
}

template <class F>
__device__ u32 Closure<F>::run_with_result(Loop& loop, u32 p) {
  F f = *reinterpret_cast<F*>(loop.cell[p].closure);
  f(loop, loop.cell[p].result);
  return p ^ 1;
}

}  // namespace gloop
