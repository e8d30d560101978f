// Multiplies matrices of 256 x 256 floats that it receives. Each logical block serves one
// connection.
#include "server.cuh"

constexpr u32 SIDE = 256;
constexpr u32 TILE = 16;
constexpr u64 MATRIX = static_cast<u64>(SIDE) * SIDE * sizeof(float);

// Computes one tile of c = a * b with 256 threads.
__device__ __forceinline__ void tile(const float* a, const float* b, float* c, u32 which) {
  __shared__ float left[TILE][TILE + 1], right[TILE][TILE + 1];
  const u32 row = which / (SIDE / TILE) * TILE, column = which % (SIDE / TILE) * TILE;
  const u32 y = threadIdx.x / TILE, x = threadIdx.x % TILE;
  float sum = 0;
  for (u32 k = 0; k < SIDE; k += TILE) {
    __syncthreads();
    left[y][x] = a[(row + y) * SIDE + k + x];
    right[y][x] = b[(k + y) * SIDE + column + x];
    __syncthreads();
    for (u32 i = 0; i < TILE; ++i) sum += left[y][i] * right[i][x];
  }
  c[(row + y) * SIDE + column + x] = sum;
}

constexpr u32 TILES = SIDE / TILE * (SIDE / TILE);

// One tile per block.
extern "C" __global__ void __launch_bounds__(256) vanilla(const float* a, const float* b, float* c) {
  tile(a, b, c, blockIdx.x);
}

// A row of tiles.
extern "C" __global__ void __launch_bounds__(256) split(const float* a, const float* b, float* c, u32 row) {
  tile(a, b, c, row * (SIDE / TILE) + blockIdx.x);
}

// The matrices of a physical block: a, b and c.
struct Serving {
  i64 socket;
  char* memory;
};

__device__ __forceinline__ void request(Loop& loop, Serving serving);

__device__ __forceinline__ void tiles(Loop& loop, Serving serving, u32 which) {
  const float* a = reinterpret_cast<const float*>(serving.memory);
  const float* b = reinterpret_cast<const float*>(serving.memory + MATRIX);
  float* c = reinterpret_cast<float*>(serving.memory + 2 * MATRIX);
  while (which < TILES) {
    tile(a, b, c, which);
    ++which;
    if (loop.post_if_needed([=](Loop& loop) { tiles(loop, serving, which); })) return;
  }
  __syncthreads();
  send_all(loop, serving.socket, serving.memory + 2 * MATRIX, MATRIX, [=](Loop& loop, bool sent) {
    if (sent) return request(loop, serving);
    gloop::net::close(loop, serving.socket, [](Loop&, i64) {});
  });
}

__device__ __forceinline__ void request(Loop& loop, Serving serving) {
  receive_all(loop, serving.socket, serving.memory, 2 * MATRIX, [=](Loop& loop, bool came) {
    if (came) return tiles(loop, serving, 0);
    gloop::net::close(loop, serving.socket, [](Loop&, i64) {});
  });
}

extern "C" __global__ void __launch_bounds__(256) looped(gloop::Ctl ctl, const i64* server, char* memory) {
  gloop::run(ctl, [=](Loop& loop) {
    gloop::net::accept(loop, *server, [=](Loop& loop, i64 socket) {
      if (socket < 0) return;
      request(loop, Serving{socket, memory + static_cast<u64>(blockIdx.x) * 3 * MATRIX});
    });
  });
}
