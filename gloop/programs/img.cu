// Approximate image matching: for each of many images, finds the first similar image in several
// databases. The GPU opens and reads the databases, and writes the results. All blocks search the
// same databases: a block that reads a page leaves it in device memory for the others.
#include <gloop/gloop.cuh>

using gloop::i64;
using gloop::Loop;
using gloop::u32;
using gloop::u64;

constexpr u32 PATH = 256;        // bytes of a path
constexpr u32 IMAGE = 1024;      // bytes of an image: 32 x 32 grey pixels
constexpr u32 WORDS = IMAGE / 4;
constexpr u32 WARPS = 8;         // per block, each of which examines an image
constexpr u32 NONE = ~0u;

// An image: its database, and its number in there. NONE twice if there is none.
struct Found {
  u32 database, image;
};

// Pages of the databases that some block has read. All zero at the start, and again at the end.
struct Cache {
  char* pages;       // of all databases, one after the other
  u32* ready;        // of each page: its number of images plus 1; 0 until it is read
  u32* files;        // of each database: its handle plus 1; 0 until it is open
  u32* next;         // what to open or read next: the databases, then the pages
  u32* ended;        // blocks that need nothing else
  const u32* first;  // of each database: its first page; and the end
};

struct Match {
  const char* paths;    // of the databases
  const char* queries;  // the path of the images to search for
  const char* output;   // the path of the output: a Found for each of them
  char* buffers;        // for each physical block: an image to search for, and a Found
  u32 databases;
  u32 blocks;           // logical ones
  u32 limit;            // the maximum difference of two similar images
  // What the other versions have in memory.
  const u32* wanted;    // images
  const u32* images;    // of all databases
  const u32* first;     // the first image of each database, and the end
  Found* found;
  Cache cache;
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

// A part of one database, for all images that have not been found yet.
extern "C" __global__ void __launch_bounds__(256) split(Match match, u32 database, u32 first, u32 count) {
  if (match.found[blockIdx.x].image != NONE) return;
  const u32* images = match.images + (match.first[database] + first) * WORDS;
  const u32 image = first_similar(match.wanted + blockIdx.x * WORDS, images, count, match.limit);
  if (gloop::leader() && image != NONE) match.found[blockIdx.x] = Found{database, first + image};
}

constexpr u32 PAGE = 64;  // images
constexpr u32 ROOM = 16;  // bytes for a Found

// Passes what one thread knows to all threads.
template <class F>
__device__ __forceinline__ u32 told(F f) {
  __shared__ u32 value;
  __syncthreads();
  if (gloop::leader()) value = f();
  __syncthreads();
  return value;
}

__device__ __forceinline__ char* wanted_at(const Match& match) {
  return match.buffers + static_cast<u64>(blockIdx.x) * (IMAGE + ROOM);
}

__device__ __forceinline__ u32 database_of(const Match& match, u32 page) {
  u32 database = 0;
  while (page >= match.cache.first[database + 1]) ++database;
  return database;
}

// The last block restores the initial state.
__device__ __noinline__ void clean(Loop& loop, Match match, u32 database) {
  const Cache& cache = match.cache;
  if (database < match.databases) {
    // 0 is closed as well, which is an error.
    return gloop::fs::close(loop, static_cast<i64>(cache.files[database]) - 1, [=](Loop& loop, i64) { clean(loop, match, database + 1); });
  }
  for (u32 i = threadIdx.x; i < cache.first[match.databases]; i += blockDim.x) cache.ready[i] = 0;
  for (u32 i = threadIdx.x; i < match.databases; i += blockDim.x) cache.files[i] = 0;
  if (gloop::leader()) *cache.next = *cache.ended = 0;
}

__device__ __noinline__ void report(Loop& loop, Match match, Found found) {
  gloop::fs::open(loop, match.output, gloop::fs::READ_WRITE, [=](Loop& loop, i64 output) {
    Found* room = reinterpret_cast<Found*>(wanted_at(match) + IMAGE);
    if (gloop::leader()) *room = found;
    __syncthreads();
    gloop::fs::write(loop, output, loop.block() * sizeof(Found), sizeof(Found), room, [=](Loop& loop, i64) {
      gloop::fs::close(loop, output, [=](Loop& loop, i64) {
        const u32 ended = told([&] { return atomicAdd(match.cache.ended, 1) + 1; });
        if (ended == match.blocks) clean(loop, match, 0);
      });
    });
  });
}

__device__ __forceinline__ void next_page(Loop& loop, Match match, u32 page);

// Reads page `which` for all blocks, and continues with `page`.
__device__ __noinline__ void load(Loop& loop, Match match, u32 which, u32 page) {
  const u32 database = database_of(match, which);
  const u32 file = told([&] { return gloop::ptx::load_device(match.cache.files + database); });
  if (file == 0) return loop.post([=](Loop& loop) { load(loop, match, which, page); });
  const u64 offset = static_cast<u64>(which - match.cache.first[database]) * PAGE * IMAGE;
  char* to = match.cache.pages + static_cast<u64>(which) * PAGE * IMAGE;
  gloop::fs::read(loop, file - 1, offset, PAGE * IMAGE, to, [=](Loop& loop, i64 got) {
    const u32 images = got > 0 ? static_cast<u32>(got) / IMAGE : 0;
    __threadfence();
    __syncthreads();
    if (gloop::leader()) gloop::ptx::store_device(match.cache.ready + which, images + 1);
    next_page(loop, match, page);
  });
}

__device__ __noinline__ void open_database(Loop& loop, Match match, u32 database, u32 page) {
  gloop::fs::open(loop, match.paths + database * PATH, gloop::fs::READ_ONLY, [=](Loop& loop, i64 file) {
    // No page can be read of a file that cannot be opened.
    const u32 known = file < 0 ? NONE : static_cast<u32>(file) + 1;
    if (gloop::leader()) gloop::ptx::store_device(match.cache.files + database, known);
    next_page(loop, match, page);
  });
}

// Searches the pages from `page` on. If one is not there yet, reads one that no other block reads.
__device__ __forceinline__ void next_page(Loop& loop, Match match, u32 page) {
  const Cache& cache = match.cache;
  const u32 pages = cache.first[match.databases];
  for (; page < pages; ++page) {
    const u32 images = told([&] { return gloop::ptx::load_device(cache.ready + page); });
    if (images == 0) {
      const u32 all = match.databases + pages;
      const u32 which =
          told([&] { return gloop::ptx::load_device(cache.next) < all ? atomicAdd(cache.next, 1) : all; });
      if (which < match.databases) return open_database(loop, match, which, page);
      if (which < all) return load(loop, match, which - match.databases, page);
      if (gloop::leader()) gloop::ptx::sleep(500);
      return loop.post([=](Loop& loop) { next_page(loop, match, page); });
    }
    __threadfence();
    const u32* wanted = reinterpret_cast<const u32*>(wanted_at(match));
    const char* here = cache.pages + static_cast<u64>(page) * PAGE * IMAGE;
    const u32 image = first_similar(wanted, reinterpret_cast<const u32*>(here), images - 1, match.limit);
    if (image != NONE) {
      const u32 database = database_of(match, page);
      return report(loop, match, Found{database, (page - cache.first[database]) * PAGE + image});
    }
    if (loop.post_if_needed([=](Loop& loop) { next_page(loop, match, page + 1); })) return;
  }
  report(loop, match, Found{NONE, NONE});
}

extern "C" __global__ void __launch_bounds__(256) looped(gloop::Ctl ctl, Match match) {
  gloop::run(ctl, [=](Loop& loop) {
    gloop::fs::open(loop, match.queries, gloop::fs::READ_ONLY, [=](Loop& loop, i64 file) {
      if (file < 0) return;
      gloop::fs::read(loop, file, loop.block() * IMAGE, IMAGE, wanted_at(match), [=](Loop& loop, i64) {
        gloop::fs::close(loop, file, [=](Loop& loop, i64) { next_page(loop, match, 0); });
      });
    });
  });
}
