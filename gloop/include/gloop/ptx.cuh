// Loads, stores and clocks whose memory order matters, as defined by PTX (PTX ISA 7.0, sm_80 and
// later). Host memory is only ever read and written: PCIe need not support atomic operations.
#pragma once

#include <gloop/layout.cuh>

#define GLOOP_DEVICE __device__ __forceinline__

namespace gloop {
namespace ptx {

// A word in device memory that other blocks write.
GLOOP_DEVICE u32 load_device(const u32* at) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

GLOOP_DEVICE u64 load_device(const u64* at) {
  u64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

GLOOP_DEVICE void store_device(u32* at, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// A word in host memory. Earlier writes of its writer are visible afterwards.
GLOOP_DEVICE u32 load_host(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// Both words of a pair in host memory, with one read over the bus.
GLOOP_DEVICE u64 load_host(const u64* at) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

// Publishes to the host what this block has written; other threads' writes require a barrier
// before.
GLOOP_DEVICE void store_host(u32* at, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

GLOOP_DEVICE u32 clock() {
  u32 value;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(value));
  return value;
}

// Nanoseconds, the same clock for all multiprocessors.
GLOOP_DEVICE u64 timer() {
  u64 value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

GLOOP_DEVICE void sleep(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// The offset of an object in the block's shared memory.
GLOOP_DEVICE u32 shared_offset(const void* at) {
  u64 offset;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(offset) : "l"(at));
  return static_cast<u32>(offset);
}

GLOOP_DEVICE void* shared_pointer(u32 offset) {
  u64 pointer;
  asm("cvta.shared.u64 %0, %1;" : "=l"(pointer) : "l"(static_cast<u64>(offset)));
  return reinterpret_cast<void*>(pointer);
}

}  // namespace ptx

// The thread that maintains its block's loop.
GLOOP_DEVICE bool leader() { return (threadIdx.x | threadIdx.y | threadIdx.z) == 0; }
GLOOP_DEVICE u32 thread() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
GLOOP_DEVICE u32 threads() { return blockDim.x * blockDim.y * blockDim.z; }

// Copied by all threads of the block, 16 bytes at a time if both addresses allow it.
GLOOP_DEVICE void copy(void* to, const void* from, u64 bytes) {
  struct alignas(16) Line { u32 words[4]; };
  u64 done = 0;
  if (((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) & 15) == 0) {
    for (u64 i = thread(); i < bytes / 16; i += threads())
      static_cast<Line*>(to)[i] = static_cast<const Line*>(from)[i];
    done = bytes & ~15ull;
  }
  for (u64 i = done + thread(); i < bytes; i += threads())
    static_cast<unsigned char*>(to)[i] = static_cast<const unsigned char*>(from)[i];
}

}  // namespace gloop
