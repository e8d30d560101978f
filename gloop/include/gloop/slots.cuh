// Closures in memory, and the two rings between a block and the host.
#pragma once

#include <gloop/ptx.cuh>

namespace gloop {
struct Loop;

// Selects the operator that constructs an object in existing memory.
struct Place { void* at; };
}  // namespace gloop

GLOOP_DEVICE void* operator new(decltype(sizeof(0)), gloop::Place place) { return place.at; }
GLOOP_DEVICE void operator delete(void*, gloop::Place) {}

namespace gloop {

// What runs the closure of a cell: takes the loop, and which of its two cells. Returns which cell
// is next, with CHECKED if all threads have already passed the point before it. The result of its
// event is stored before the closure.
using Code = u32 (*)(Loop&, u32);
constexpr u32 CHECKED = 2;

// A closure is copied as bytes: all threads of a block run it with the same captured values.
template <class F>
struct Closure {
  static_assert(sizeof(F) <= CLOSURE, "a closure captures at most 384 bytes: capture a pointer");
  static_assert(__is_trivially_copyable(F), "a closure is copied as bytes");
  static_assert(alignof(F) <= 16, "a closure is aligned to 16 bytes at most");

  // A callback that repeatedly posts itself, as a loop's body does, continues without a return: a
  // call costs all threads their registers.
  static __device__ u32 run(Loop& loop, u32 p);
  static __device__ u32 run_with_result(Loop& loop, u32 p);
  GLOOP_DEVICE static void store(void* at, const F& f) { new (Place{at}) F(f); }
};

namespace ring {

// Publishes a request. Its entry is free: there are as many as slots, and each slot uses at most
// one.
GLOOP_DEVICE void push(Rings* rings, u32& sent, const Request& request) {
  Request* entry = &rings->requests[sent % SLOTS];
  entry->opcode = request.opcode;
  entry->tag = request.tag;
  entry->handle = request.handle;
  entry->page = request.page;
  entry->offset = request.offset;
  entry->length = request.length;
  entry->flags = request.flags;
  sent += 1;
  ptx::store_host(&entry->sequence, sent);
}

// The next answer, if there is one: one read over the bus.
GLOOP_DEVICE bool take(Rings* rings, u32& taken, u32& tag, i64& result) {
  const Completion* entry = &rings->completions[taken % SLOTS];
  u32 low, high, who, sequence;
  // One read of 16 bytes. Even if it returns the new sequence number, the other words need not be
  // their newest values, so they are read again after an acquire.
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(low), "=r"(high), "=r"(who), "=r"(sequence)
               : "l"(entry)
               : "memory");
  if (sequence != taken + 1) return false;
  ptx::load_host(&entry->sequence);
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(low), "=r"(high), "=r"(who), "=r"(sequence)
               : "l"(entry)
               : "memory");
  taken += 1;
  tag = who;
  result = static_cast<i64>(static_cast<u64>(high) << 32 | low);
  return true;
}

}  // namespace ring
}  // namespace gloop
