// Many small steps, each followed by a point at which the kernel may be stopped. A step takes at
// least `cycles` clock cycles.
#include <gloop/gloop.cuh>

using gloop::Loop;
using gloop::u32;
using gloop::u64;

struct Steps {
  u32* out;     // one word per block
  u32 count;
  u32 cycles;
};

__device__ __forceinline__ u32 work(u32 x, u32 cycles) {
  if (cycles != 0) {
    const u32 start = gloop::ptx::clock();
    while (gloop::ptx::clock() - start < cycles) {}
  }
  return x * 1664525u + 1013904223u;
}

extern "C" __global__ void __launch_bounds__(1024) vanilla(Steps steps) {
  u32 x = blockIdx.x;
  for (u32 i = 0; i < steps.count; ++i) {
    x = work(x, steps.cycles);
    // Prevents computing anything in advance.
    asm volatile("" : "+r"(x));
  }
  if (gloop::leader()) steps.out[blockIdx.x] = x;
}

extern "C" __global__ void __launch_bounds__(1024) begin(Steps steps) {
  if (gloop::leader()) steps.out[blockIdx.x] = blockIdx.x;
}

// One step, launched once per step.
extern "C" __global__ void __launch_bounds__(1024) split(Steps steps) {
  const u32 x = work(steps.out[blockIdx.x], steps.cycles);
  __syncthreads();
  if (gloop::leader()) steps.out[blockIdx.x] = x;
}

__device__ __forceinline__ void step(Loop& loop, Steps steps, u32 x, u32 i) {
  if (i == steps.count) {
    if (gloop::leader()) steps.out[loop.block()] = x;
    return;
  }
  x = work(x, steps.cycles);
  loop.post([=](Loop& loop) { step(loop, steps, x, i + 1); });
}

// One callback per step.
extern "C" __global__ void __launch_bounds__(1024) posted(gloop::Ctl ctl, Steps steps) {
  gloop::run(ctl, [=](Loop& loop) { step(loop, steps, static_cast<u32>(loop.block()), 0); });
}

extern "C" __global__ void __launch_bounds__(1024) posted_device(gloop::Ctl ctl, Steps steps) {
  gloop::run<gloop::Memory::Device>(
      ctl, [=](Loop& loop) { step(loop, steps, static_cast<u32>(loop.block()), 0); });
}

__device__ __forceinline__ void checked_steps(Loop& loop, Steps steps, u32 x, u32 i) {
  while (i < steps.count) {
    x = work(x, steps.cycles);
    ++i;
    if (loop.post_if_needed([=](Loop& loop) { checked_steps(loop, steps, x, i); })) return;
  }
  if (gloop::leader()) steps.out[loop.block()] = x;
}

// A callback only when the kernel has to stop.
extern "C" __global__ void __launch_bounds__(1024) checked(gloop::Ctl ctl, Steps steps) {
  gloop::run(ctl, [=](Loop& loop) { checked_steps(loop, steps, static_cast<u32>(loop.block()), 0); });
}
