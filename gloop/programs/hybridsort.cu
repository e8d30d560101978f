// Sorts floats as Rodinia's hybridsort does, rewritten: many short blocks distribute the elements
// to buckets, and then one long block per bucket sorts it by merging.
#include <gloop/gloop.cuh>

using gloop::Loop;
using gloop::u32;

constexpr u32 THREADS = 256;
constexpr u32 BUCKETS = 1024;
constexpr u32 CHUNK = 8192;                // elements that a block distributes to buckets
constexpr u32 TILE = 2048;                 // elements that a block sorts or merges at a time
constexpr u32 EACH = TILE / THREADS;       // of which each thread handles this many
constexpr u32 MORE = BUCKETS / THREADS;    // buckets per thread
constexpr float LAST = 3.402823466e+38f;   // greater than all elements

struct Sort {
  const float* input;
  float* a;             // the elements by buckets; sorted at the end
  float* b;             // a second buffer of the same size
  const float* pivots;  // between the buckets, ascending: BUCKETS - 1 of them
  u32* count;           // of elements in each bucket; initially zero
  u32* start;           // of each bucket, and the end
  u32* cursor;          // where the next element of a bucket is written
  u32 elements;
};

struct Counting {
  float pivots[BUCKETS];
  u32 count[BUCKETS];
  u32 base[BUCKETS];
};

struct Merging {
  float keys[TILE];
  u32 split[2];
};

__shared__ union {
  Counting counting;
  Merging merging;
} shared_memory;

// ---- into buckets ----

__device__ __forceinline__ u32 bucket_of(const Counting& shared, float x) {
  u32 bucket = 0;
  for (u32 step = BUCKETS / 2; step != 0; step /= 2)
    if (shared.pivots[bucket + step - 1] <= x) bucket += step;
  return bucket;
}

// Counts the elements of a chunk.
__device__ __forceinline__ void count_chunk(Counting& shared, const Sort& sort, u32 first, u32 end) {
  __syncthreads();
  for (u32 i = threadIdx.x; i < BUCKETS; i += THREADS) {
    shared.pivots[i] = i < BUCKETS - 1 ? sort.pivots[i] : LAST;
    shared.count[i] = 0;
  }
  __syncthreads();
  for (u32 i = first + threadIdx.x; i < end; i += THREADS)
    atomicAdd(&shared.count[bucket_of(shared, sort.input[i])], 1u);
  __syncthreads();
}

__device__ __forceinline__ void count(const Sort& sort, u32 chunk) {
  Counting& shared = shared_memory.counting;
  const u32 first = chunk * CHUNK;
  count_chunk(shared, sort, first, min(first + CHUNK, sort.elements));
  for (u32 i = threadIdx.x; i < BUCKETS; i += THREADS)
    if (shared.count[i] != 0) atomicAdd(&sort.count[i], shared.count[i]);
}

// Computes the start of each bucket. Run by one block.
__device__ __forceinline__ void starts(const Sort& sort) {
  Counting& shared = shared_memory.counting;
  u32 mine = 0;
  for (u32 i = 0; i < MORE; ++i) mine += sort.count[threadIdx.x * MORE + i];
  u32 sum = mine;
  for (u32 step = 1; step < THREADS; step *= 2) {
    shared.base[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= step) sum += shared.base[threadIdx.x - step];
    __syncthreads();
  }
  u32 at = sum - mine;
  for (u32 i = 0; i < MORE; ++i) {
    const u32 bucket = threadIdx.x * MORE + i;
    sort.start[bucket] = at;
    sort.cursor[bucket] = at;
    at += sort.count[bucket];
  }
  if (threadIdx.x == THREADS - 1) sort.start[BUCKETS] = at;
}

__device__ __forceinline__ void scatter(const Sort& sort, u32 chunk) {
  Counting& shared = shared_memory.counting;
  const u32 first = chunk * CHUNK, end = min(first + CHUNK, sort.elements);
  count_chunk(shared, sort, first, end);
  for (u32 i = threadIdx.x; i < BUCKETS; i += THREADS) {
    if (shared.count[i] != 0) shared.base[i] = atomicAdd(&sort.cursor[i], shared.count[i]);
    shared.count[i] = 0;
  }
  __syncthreads();
  for (u32 i = first + threadIdx.x; i < end; i += THREADS) {
    const float x = sort.input[i];
    const u32 bucket = bucket_of(shared, x);
    sort.a[shared.base[bucket] + atomicAdd(&shared.count[bucket], 1u)] = x;
  }
}

// ---- within a bucket ----

// A bucket, and the number of phases of sorting it: first its tiles, then merging runs of one tile,
// of two and so on, alternating between both buffers. At the end it is copied if it is in the other
// buffer.
struct Bucket {
  float* a;
  float* b;
  u32 count;
  u32 merges;
};

__device__ __forceinline__ Bucket bucket_at(const Sort& sort, u32 which) {
  const u32 start = sort.start[which];
  Bucket bucket = {sort.a + start, sort.b + start, sort.start[which + 1] - start, 0};
  for (u32 width = TILE; width < bucket.count; width *= 2) bucket.merges += 1;
  return bucket;
}

__device__ __forceinline__ u32 phases(const Bucket& bucket) {
  return bucket.count == 0 ? 0 : 1 + bucket.merges + bucket.merges % 2;
}

__device__ __forceinline__ void sort_tile(Merging& shared, float* keys, u32 count) {
  for (u32 i = threadIdx.x; i < TILE; i += THREADS) shared.keys[i] = i < count ? keys[i] : LAST;
  for (u32 size = 2; size <= TILE; size *= 2)
    for (u32 gap = size / 2; gap != 0; gap /= 2) {
      __syncthreads();
      for (u32 i = threadIdx.x; i < TILE / 2; i += THREADS) {
        const u32 low = 2 * i - (i & (gap - 1)), high = low + gap;
        const float x = shared.keys[low], y = shared.keys[high];
        if ((x > y) == ((low & size) == 0)) {
          shared.keys[low] = y;
          shared.keys[high] = x;
        }
      }
    }
  __syncthreads();
  for (u32 i = threadIdx.x; i < count; i += THREADS) keys[i] = shared.keys[i];
}

// The number of the first `end` elements of two merged runs that are from the first run.
__device__ __forceinline__ u32 of_first(const float* a, u32 a_count, const float* b, u32 b_count, u32 end) {
  u32 low = end > b_count ? end - b_count : 0, high = min(end, a_count);
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (a[middle] <= b[end - 1 - middle]) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Computes the tile at `first` of merging runs of `width` elements.
__device__ __forceinline__ void merge_tile(Merging& shared, const float* from, float* to, u32 count,
                                           u32 width, u32 first) {
  const u32 pair = first / (2 * width) * (2 * width);
  const float* a = from + pair;
  const u32 a_count = min(width, count - pair), both = min(2 * width, count - pair);
  const float* b = a + a_count;
  const u32 b_count = both - a_count, begin = first - pair, end = min(begin + TILE, both);
  if (threadIdx.x < 2) shared.split[threadIdx.x] = of_first(a, a_count, b, b_count, threadIdx.x == 0 ? begin : end);
  __syncthreads();
  const u32 a_first = shared.split[0], a_here = shared.split[1] - a_first, here = end - begin;
  const u32 b_first = begin - a_first, b_here = here - a_here;
  for (u32 i = threadIdx.x; i < here; i += THREADS)
    shared.keys[i] = i < a_here ? a[a_first + i] : b[b_first + i - a_here];
  __syncthreads();
  float merged[EACH];
  const u32 mine = min(threadIdx.x * EACH, here);
  u32 i = of_first(shared.keys, a_here, shared.keys + a_here, b_here, mine), j = mine - i;
  for (u32 k = 0; k < EACH; ++k) {
    const bool first_run = i < a_here && (j >= b_here || shared.keys[i] <= shared.keys[a_here + j]);
    merged[k] = first_run ? shared.keys[i] : j < b_here ? shared.keys[a_here + j] : LAST;
    if (first_run) i += 1;
    else j += 1;
  }
  __syncthreads();
  for (u32 k = 0; k < EACH; ++k) shared.keys[threadIdx.x * EACH + k] = merged[k];
  __syncthreads();
  for (u32 k = threadIdx.x; k < here; k += THREADS) to[first + k] = shared.keys[k];
}

// One tile of a phase.
__device__ __forceinline__ void tile(const Bucket& bucket, u32 phase, u32 first) {
  Merging& shared = shared_memory.merging;
  __syncthreads();
  const u32 here = min(TILE, bucket.count - first);
  if (phase == 0) return sort_tile(shared, bucket.a + first, here);
  const bool back = phase % 2 == 0;
  if (phase <= bucket.merges)
    return merge_tile(shared, back ? bucket.b : bucket.a, back ? bucket.a : bucket.b, bucket.count,
                      TILE << (phase - 1), first);
  for (u32 i = threadIdx.x; i < here; i += THREADS) bucket.a[first + i] = bucket.b[first + i];
}

// ---- vanilla; the split version has the first three of these kernels too ----

extern "C" __global__ void __launch_bounds__(256) vanilla_count(Sort sort) { count(sort, blockIdx.x); }

extern "C" __global__ void __launch_bounds__(256) vanilla_starts(Sort sort) { starts(sort); }

extern "C" __global__ void __launch_bounds__(256) vanilla_scatter(Sort sort) { scatter(sort, blockIdx.x); }

extern "C" __global__ void __launch_bounds__(256) vanilla_merge(Sort sort) {
  const Bucket bucket = bucket_at(sort, blockIdx.x);
  for (u32 phase = 0; phase < phases(bucket); ++phase)
    for (u32 first = 0; first < bucket.count; first += TILE) tile(bucket, phase, first);
}

// One phase of all buckets.
extern "C" __global__ void __launch_bounds__(256) split_merge(Sort sort, u32 phase) {
  const Bucket bucket = bucket_at(sort, blockIdx.x);
  if (phase >= phases(bucket)) return;
  for (u32 first = 0; first < bucket.count; first += TILE) tile(bucket, phase, first);
}

// ---- loops: as many blocks at a time as the vanilla version has ----

extern "C" __global__ void __launch_bounds__(256, 8) looped_count(gloop::Ctl ctl, Sort sort) {
  gloop::run(ctl, [=](Loop& loop) { count(sort, static_cast<u32>(loop.block())); });
}

extern "C" __global__ void __launch_bounds__(256, 8) looped_starts(gloop::Ctl ctl, Sort sort) {
  gloop::run(ctl, [=](Loop&) { starts(sort); });
}

extern "C" __global__ void __launch_bounds__(256, 8) looped_scatter(gloop::Ctl ctl, Sort sort) {
  gloop::run(ctl, [=](Loop& loop) { scatter(sort, static_cast<u32>(loop.block())); });
}

__device__ __forceinline__ void tiles(Loop& loop, Bucket bucket, u32 phase, u32 first) {
  while (phase < phases(bucket)) {
    tile(bucket, phase, first);
    first += TILE;
    if (first >= bucket.count) {
      first = 0;
      phase += 1;
    }
    if (loop.post_if_needed([=](Loop& loop) { tiles(loop, bucket, phase, first); })) return;
  }
}

extern "C" __global__ void __launch_bounds__(256, 8) looped_merge(gloop::Ctl ctl, Sort sort) {
  gloop::run(ctl, [=](Loop& loop) { tiles(loop, bucket_at(sort, static_cast<u32>(loop.block())), 0, 0); });
}
