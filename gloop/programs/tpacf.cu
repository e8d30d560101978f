// Two-point angular correlation: a histogram of the angles between all pairs of points on a sphere.
// Few long-running blocks, with their histogram in shared memory.
#include <gloop/gloop.cuh>

using gloop::Loop;
using gloop::u32;
using gloop::u64;

constexpr u32 THREADS = 256;
constexpr u32 BINS = 64;

struct Sky {
  const float4* points;  // unit vectors
  const float* edges;    // cosines, descending: BINS - 1 of them
  u64* histogram;
  u32 tiles;             // of THREADS points
  u32 first, last;       // the tiles of a slice
};

struct Shared {
  u32 histogram[BINS];
  float4 tile[THREADS];
  float edges[BINS];
};

__device__ __forceinline__ void clear(Shared& shared, const Sky& sky) {
  if (threadIdx.x < BINS) shared.histogram[threadIdx.x] = 0;
  if (threadIdx.x < BINS - 1) shared.edges[threadIdx.x] = sky.edges[threadIdx.x];
  __syncthreads();
}

__device__ __forceinline__ void pairs(Shared& shared, const Sky& sky, float4 a, u32 tile) {
  __syncthreads();
  shared.tile[threadIdx.x] = sky.points[tile * THREADS + threadIdx.x];
  __syncthreads();
  for (u32 j = 0; j < THREADS; ++j) {
    const float4 b = shared.tile[j];
    const float cosine = a.x * b.x + a.y * b.y + a.z * b.z;
    u32 low = 0, high = BINS - 1;
    while (low < high) {
      const u32 middle = (low + high) / 2;
      if (cosine >= shared.edges[middle]) high = middle;
      else low = middle + 1;
    }
    atomicAdd(&shared.histogram[low], 1u);
  }
}

__device__ __forceinline__ void add(Shared& shared, const Sky& sky) {
  __syncthreads();
  if (threadIdx.x < BINS) atomicAdd(&sky.histogram[threadIdx.x], static_cast<u64>(shared.histogram[threadIdx.x]));
  __syncthreads();
}

__shared__ Shared shared_memory;

extern "C" __global__ void __launch_bounds__(256) vanilla(Sky sky) {
  Shared& shared = shared_memory;
  clear(shared, sky);
  const float4 a = sky.points[blockIdx.x * THREADS + threadIdx.x];
  for (u32 tile = 0; tile < sky.tiles; ++tile) pairs(shared, sky, a, tile);
  add(shared, sky);
}

// All blocks, with some of the tiles.
extern "C" __global__ void __launch_bounds__(256) split(Sky sky) {
  Shared& shared = shared_memory;
  clear(shared, sky);
  const float4 a = sky.points[blockIdx.x * THREADS + threadIdx.x];
  for (u32 tile = sky.first; tile < sky.last; ++tile) pairs(shared, sky, a, tile);
  add(shared, sky);
}

__device__ __forceinline__ void tiles(Loop& loop, Sky sky, u32 tile) {
  Shared& shared = shared_memory;
  const float4 a = sky.points[loop.block() * THREADS + threadIdx.x];
  while (tile < sky.tiles) {
    pairs(shared, sky, a, tile);
    ++tile;
    if (loop.post_if_needed([=](Loop& loop) { tiles(loop, sky, tile); })) return;
  }
  add(shared, sky);
}

extern "C" __global__ void __launch_bounds__(256) looped(gloop::Ctl ctl, Sky sky) {
  gloop::run(ctl, [=](Loop& loop) {
    loop.keep(shared_memory.histogram, sizeof(shared_memory.histogram));
    loop.keep(shared_memory.edges, sizeof(shared_memory.edges));
    clear(shared_memory, sky);
    tiles(loop, sky, 0);
  });
}
