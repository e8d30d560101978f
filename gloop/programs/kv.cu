// A table of keys and values in GPU memory. A request is a batch of operations on distinct keys.
// Each logical block of the server serves one connection.
#include "server.cuh"

constexpr u32 BATCH = 1024;
constexpr u64 NONE = ~0ull;

struct Operation {
  u32 kind;  // 0: get; 1: put
  u32 key;   // not zero
  u64 value;
};

struct Table {
  u32* keys;
  u64* values;
  u32 places;  // a power of two, more than there are keys
};

// The previous value, or NONE.
__device__ __forceinline__ u64 apply(const Table& table, const Operation& operation) {
  u32 place = operation.key * 2654435761u;
  for (u32 tried = 0; tried < table.places; ++tried, ++place) {
    u32* key = &table.keys[place & (table.places - 1)];
    u64* value = &table.values[place & (table.places - 1)];
    u32 there = gloop::ptx::load_device(key);
    if (there == 0 && operation.kind == 1) there = atomicCAS(key, 0u, operation.key);
    if (there != 0 && there != operation.key) continue;
    const bool mine = there == operation.key;
    if (operation.kind == 0) return mine ? gloop::ptx::load_device(value) : NONE;
    const u64 old = atomicExch(value, operation.value);
    return mine ? old : NONE;
  }
  return NONE;
}

__device__ __forceinline__ void part(const Table& table, const Operation* operations, u64* answers, u32 first) {
  const u32 mine = first + threadIdx.x;
  if (mine < BATCH) answers[mine] = apply(table, operations[mine]);
}

// All batches of a client, with one client per block.
extern "C" __global__ void __launch_bounds__(256) vanilla(Table table, const Operation* operations,
                                                          u64* answers, u32 batches) {
  for (u32 batch = 0; batch < batches; ++batch) {
    const u64 at = (static_cast<u64>(blockIdx.x) * batches + batch) * BATCH;
    for (u32 first = 0; first < BATCH; first += blockDim.x) part(table, operations + at, answers + at, first);
    __syncthreads();
  }
}

// One batch of each client.
extern "C" __global__ void __launch_bounds__(256) split(Table table, const Operation* operations,
                                                        u64* answers, u32 batches, u32 batch) {
  const u64 at = (static_cast<u64>(blockIdx.x) * batches + batch) * BATCH;
  for (u32 first = 0; first < BATCH; first += blockDim.x) part(table, operations + at, answers + at, first);
}

struct Serving {
  Table table;
  i64 socket;
  char* memory;
};

constexpr u64 ASKED = BATCH * sizeof(Operation);

__device__ __forceinline__ void request(Loop& loop, Serving serving);

__device__ __forceinline__ void parts(Loop& loop, Serving serving, u32 first) {
  const Operation* operations = reinterpret_cast<const Operation*>(serving.memory);
  u64* answers = reinterpret_cast<u64*>(serving.memory + ASKED);
  while (first < BATCH) {
    part(serving.table, operations, answers, first);
    first += blockDim.x;
    if (loop.post_if_needed([=](Loop& loop) { parts(loop, serving, first); })) return;
  }
  __syncthreads();
  send_all(loop, serving.socket, serving.memory + ASKED, BATCH * sizeof(u64), [=](Loop& loop, bool sent) {
    if (sent) return request(loop, serving);
    gloop::net::close(loop, serving.socket, [](Loop&, i64) {});
  });
}

__device__ __forceinline__ void request(Loop& loop, Serving serving) {
  receive_all(loop, serving.socket, serving.memory, ASKED, [=](Loop& loop, bool came) {
    if (came) return parts(loop, serving, 0);
    gloop::net::close(loop, serving.socket, [](Loop&, i64) {});
  });
}

extern "C" __global__ void __launch_bounds__(256) looped(gloop::Ctl ctl, Table table, const i64* server,
                                                         char* memory) {
  gloop::run(ctl, [=](Loop& loop) {
    gloop::net::accept(loop, *server, [=](Loop& loop, i64 socket) {
      if (socket < 0) return;
      const u64 own = static_cast<u64>(blockIdx.x) * (ASKED + BATCH * sizeof(u64));
      request(loop, Serving{table, socket, memory + own});
    });
  });
}
