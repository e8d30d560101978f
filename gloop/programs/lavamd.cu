// Forces between particles of neighbouring boxes: one short block per box. The potential is that of
// Rodinia's LavaMD; the kernel has been rewritten.
#include <gloop/gloop.cuh>

using gloop::u32;
using gloop::u64;

constexpr u32 PARTICLES = 100;

struct Boxes {
  const float4* position;  // x, y, z and the squared length
  const float* charge;
  float4* force;
  u32 side;   // boxes along each axis
  u32 first;  // the first box of a slice
  float alpha;
};

__device__ __forceinline__ void box(const Boxes& boxes, u32 home) {
  __shared__ float4 others[PARTICLES];
  __shared__ float charges[PARTICLES];
  const u32 side = boxes.side;
  const int x = home % side, y = home / side % side, z = home / side / side;
  const u32 me = home * PARTICLES + threadIdx.x;
  const bool mine = threadIdx.x < PARTICLES;
  const float4 a = mine ? boxes.position[me] : make_float4(0, 0, 0, 0);
  const float a2 = 2.0f * boxes.alpha * boxes.alpha;
  float4 sum = make_float4(0, 0, 0, 0);
  for (int dz = -1; dz <= 1; ++dz)
    for (int dy = -1; dy <= 1; ++dy)
      for (int dx = -1; dx <= 1; ++dx) {
        const int nx = x + dx, ny = y + dy, nz = z + dz;
        const int end = static_cast<int>(side);
        if (nx < 0 || ny < 0 || nz < 0 || nx >= end || ny >= end || nz >= end) continue;
        const u32 other = (static_cast<u32>((nz * end + ny) * end + nx)) * PARTICLES;
        __syncthreads();
        if (mine) {
          others[threadIdx.x] = boxes.position[other + threadIdx.x];
          charges[threadIdx.x] = boxes.charge[other + threadIdx.x];
        }
        __syncthreads();
        if (!mine) continue;
        for (u32 j = 0; j < PARTICLES; ++j) {
          const float4 b = others[j];
          const float r2 = a.w + b.w - (a.x * b.x + a.y * b.y + a.z * b.z);
          const float v = __expf(-a2 * r2);
          const float q = charges[j];
          const float f = 2.0f * v * q;
          sum.x += f * (a.x - b.x);
          sum.y += f * (a.y - b.y);
          sum.z += f * (a.z - b.z);
          sum.w += q * v;
        }
      }
  if (mine) boxes.force[me] = sum;
}

extern "C" __global__ void __launch_bounds__(128) vanilla(Boxes boxes) { box(boxes, blockIdx.x); }

// A slice of the boxes.
extern "C" __global__ void __launch_bounds__(128) split(Boxes boxes) {
  box(boxes, boxes.first + blockIdx.x);
}

// As many blocks at a time as the vanilla version has.
extern "C" __global__ void __launch_bounds__(128, 16) looped(gloop::Ctl ctl, Boxes boxes) {
  gloop::run(ctl, [=](gloop::Loop& loop) { box(boxes, static_cast<u32>(loop.block())); });
}

// The same boxes repeatedly, along y.
extern "C" __global__ void __launch_bounds__(128, 16) repeated(gloop::Ctl ctl, Boxes boxes) {
  gloop::run(ctl, [=](gloop::Loop& loop) { box(boxes, loop.block_x()); });
}
