// Approximate image matching: for each of many images, the first one in some databases that is
// similar to it. The GPU opens and reads the databases, and writes what it has found.
#include <gloop/gloop.cuh>

using gloop::i64;
using gloop::Loop;
using gloop::u32;
using gloop::u64;

constexpr u32 PATH = 256;        // bytes of a path
constexpr u32 IMAGE = 1024;      // bytes of an image: 32 x 32 grey pixels
constexpr u32 WORDS = IMAGE / 4;
constexpr u32 WARPS = 8;         // of a block, each of which looks at an image
constexpr u32 NONE = ~0u;

// Which image of which database; NONE twice if there is none.
struct Found {
  u32 database, image;
};

struct Match {
  const char* paths;    // of the databases
  const char* queries;  // the path of the images that are looked for
  const char* output;   // the path of the output: a Found for each of them
  char* buffers;        // for each physical block: an image that is looked for, and a page
  u32 databases;
  u32 page;             // bytes of a database that are read at a time
  u32 limit;            // how much two images differ at most that are similar
  // What the other versions have in memory.
  const u32* wanted;    // images
  const u32* images;    // of all databases
  const u32* first;     // the first image of each database, and the end
  Found* found;
};

// The sum of squared differences.
__device__ __forceinline__ u32 difference(const u32* a, const u32* b) {
  u32 sum = 0;
  for (u32 i = threadIdx.x % 32; i < WORDS; i += 32) {
    const u32 apart = __vabsdiffu4(a[i], b[i]);
    sum = __dp4a(apart, apart, sum);
  }
  for (u32 step = 16; step != 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// The first of `count` images that is similar to the wanted one, or NONE.
__device__ __forceinline__ u32 first_similar(const u32* wanted, const u32* images, u32 count, u32 limit) {
  __shared__ u32 similar;
  __syncthreads();
  if (gloop::leader()) similar = NONE;
  __syncthreads();
  for (u32 first = 0; first < count; first += WARPS) {
    const u32 image = first + threadIdx.x / 32;
    const bool is = image < count && difference(wanted, images + image * WORDS) <= limit;
    if (is && threadIdx.x % 32 == 0) atomicMin(&similar, image);
    if (__syncthreads_or(is)) break;
  }
  return similar;
}

extern "C" __global__ void __launch_bounds__(256) vanilla(Match match) {
  const u32* wanted = match.wanted + blockIdx.x * WORDS;
  Found found = {NONE, NONE};
  for (u32 database = 0; database < match.databases && found.image == NONE; ++database) {
    const u32 first = match.first[database];
    found.image = first_similar(wanted, match.images + first * WORDS, match.first[database + 1] - first, match.limit);
    if (found.image != NONE) found.database = database;
  }
  if (gloop::leader()) match.found[blockIdx.x] = found;
}

// A part of one database, for all that has not been found yet.
extern "C" __global__ void __launch_bounds__(256) split(Match match, u32 database, u32 first, u32 count) {
  if (match.found[blockIdx.x].image != NONE) return;
  const u32* images = match.images + (match.first[database] + first) * WORDS;
  const u32 image = first_similar(match.wanted + blockIdx.x * WORDS, images, count, match.limit);
  if (gloop::leader() && image != NONE) match.found[blockIdx.x] = Found{database, first + image};
}

// A database that is being read.
struct At {
  i64 file;
  u32 database;
  u32 image;  // the next one
};

__device__ __forceinline__ char* wanted_at(const Match& match) {
  return match.buffers + static_cast<u64>(blockIdx.x) * (IMAGE + match.page);
}

__device__ __noinline__ void report(Loop& loop, Match match, Found found) {
  gloop::fs::open(loop, match.output, gloop::fs::READ_WRITE, [=](Loop& loop, i64 output) {
    // The page is free: all that it held has been looked at.
    Found* room = reinterpret_cast<Found*>(wanted_at(match) + IMAGE);
    if (gloop::leader()) *room = found;
    __syncthreads();
    gloop::fs::write(loop, output, loop.block() * sizeof(Found), sizeof(Found), room, [=](Loop& loop, i64) {
      gloop::fs::close(loop, output, [](Loop&, i64) {});
    });
  });
}

__device__ __forceinline__ void next_database(Loop& loop, Match match, u32 database);

__device__ __forceinline__ void next_page(Loop& loop, Match match, At at) {
  gloop::fs::read(
      loop, at.file, static_cast<u64>(at.image) * IMAGE, match.page, wanted_at(match) + IMAGE,
      [=](Loop& loop, i64 got) {
        const u32 count = got > 0 ? static_cast<u32>(got) / IMAGE : 0;
        const u32* wanted = reinterpret_cast<const u32*>(wanted_at(match));
        const u32 image = first_similar(wanted, wanted + WORDS, count, match.limit);
        At next = at;
        next.image += count;
        if (image == NONE && count != 0) return next_page(loop, match, next);
        gloop::fs::close(loop, at.file, [=](Loop& loop, i64) {
          if (image != NONE) report(loop, match, Found{at.database, at.image + image});
          else next_database(loop, match, at.database + 1);
        });
      });
}

__device__ __noinline__ void next_database(Loop& loop, Match match, u32 database) {
  if (database == match.databases) return report(loop, match, Found{NONE, NONE});
  gloop::fs::open(loop, match.paths + database * PATH, gloop::fs::READ_ONLY, [=](Loop& loop, i64 file) {
    if (file >= 0) next_page(loop, match, At{file, database, 0});
  });
}

extern "C" __global__ void __launch_bounds__(256) looped(gloop::Ctl ctl, Match match) {
  gloop::run(ctl, [=](Loop& loop) {
    gloop::fs::open(loop, match.queries, gloop::fs::READ_ONLY, [=](Loop& loop, i64 file) {
      if (file < 0) return;
      gloop::fs::read(loop, file, loop.block() * IMAGE, IMAGE, wanted_at(match), [=](Loop& loop, i64) {
        gloop::fs::close(loop, file, [=](Loop& loop, i64) { next_database(loop, match, 0); });
      });
    });
  });
}
