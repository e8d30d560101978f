// Counts words in files: the GPU opens, reads and closes the files, and writes the results.
#include <gloop/gloop.cuh>

using gloop::i64;
using gloop::Loop;
using gloop::u32;
using gloop::u64;

constexpr u32 PATH = 256;   // bytes of a path
constexpr u32 WORD = 32;    // bytes of a word, a zero at the end
constexpr u32 RECORD = 24;  // bytes of a line of output

struct Search {
  const char* paths;    // of the files
  const char* words;
  const char* output;   // the path of the output file
  u32* counts;          // of each word in each file
  char* buffers;        // one chunk for each physical block
  u32 word_count;
  u32 chunk;            // bytes to read at a time, WORD less than a page
  // What the vanilla version has in memory.
  const char* text;
  const u64* offsets;   // of each file in the text, and of the end
};

// The number of times that a word begins in the first `begins` of `bytes` bytes.
__device__ __forceinline__ void count(const char* text, u64 begins, u64 bytes, const char* word, u32* sum) {
  u32 length = 0;
  while (word[length] != 0) ++length;
  u32 found = 0;
  for (u64 i = threadIdx.x; i < begins && i + length <= bytes; i += blockDim.x) {
    u32 same = 0;
    while (same < length && text[i + same] == word[same]) ++same;
    found += same == length;
  }
  if (found != 0) atomicAdd(sum, found);
}

// A line: file, word and count, in hexadecimal digits.
__device__ __forceinline__ void line(char* at, u32 file, u32 word, u32 count) {
  const char* digits = "0123456789abcdef";
  for (u32 i = 0; i < 8; ++i) at[i] = digits[file >> (28 - 4 * i) & 15];
  at[8] = ' ';
  for (u32 i = 0; i < 4; ++i) at[9 + i] = digits[word >> (12 - 4 * i) & 15];
  at[13] = ' ';
  for (u32 i = 0; i < 8; ++i) at[14 + i] = digits[count >> (28 - 4 * i) & 15];
  at[22] = ' ';
  at[23] = '\n';
}

extern "C" __global__ void __launch_bounds__(256) vanilla(Search search, char* lines) {
  const u32 file = blockIdx.x;
  const char* text = search.text + search.offsets[file];
  const u64 size = search.offsets[file + 1] - search.offsets[file];
  u32* counts = search.counts + file * search.word_count;
  for (u32 word = 0; word < search.word_count; ++word)
    count(text, size, size, search.words + word * WORD, counts + word);
  __syncthreads();
  for (u32 word = threadIdx.x; word < search.word_count; word += blockDim.x)
    line(lines + (file * search.word_count + word) * RECORD, file, word, counts[word]);
}

// One word, in all files.
extern "C" __global__ void __launch_bounds__(256) split(Search search, u32 word) {
  const u32 file = blockIdx.x;
  const u64 size = search.offsets[file + 1] - search.offsets[file];
  count(search.text + search.offsets[file], size, size, search.words + word * WORD,
        search.counts + file * search.word_count + word);
}

// The lines for what they have counted.
extern "C" __global__ void __launch_bounds__(256) split_lines(Search search, char* lines) {
  const u32 file = blockIdx.x;
  for (u32 word = threadIdx.x; word < search.word_count; word += blockDim.x) {
    const u32 which = file * search.word_count + word;
    line(lines + which * RECORD, file, word, search.counts[which]);
  }
}

// A file in progress.
struct At {
  i64 file;
  u64 size;
  u64 offset;
};

__device__ __forceinline__ char* buffer(const Search& search) {
  return search.buffers + static_cast<u64>(blockIdx.x) * (search.chunk + WORD);
}

__device__ __forceinline__ void next_chunk(Loop& loop, Search search, At at);

__device__ __forceinline__ void words(Loop& loop, Search search, At at, u64 got, u32 word) {
  if (word == search.word_count) {
    at.offset += search.chunk;
    next_chunk(loop, search, at);
    return;
  }
  const u32 file = static_cast<u32>(loop.block());
  count(buffer(search), got < search.chunk ? got : search.chunk, got, search.words + word * WORD,
        search.counts + file * search.word_count + word);
  loop.post([=](Loop& loop) { words(loop, search, at, got, word + 1); });
}

__device__ __noinline__ void finish(Loop& loop, Search search, At at) {
  gloop::fs::close(loop, at.file, [=](Loop& loop, i64) {
    gloop::fs::open(loop, search.output, gloop::fs::READ_WRITE, [=](Loop& loop, i64 output) {
      const u32 file = static_cast<u32>(loop.block());
      char* lines = buffer(search);
      for (u32 word = threadIdx.x; word < search.word_count; word += blockDim.x)
        line(lines + word * RECORD, file, word, search.counts[file * search.word_count + word]);
      __syncthreads();
      const u64 bytes = static_cast<u64>(search.word_count) * RECORD;
      gloop::fs::write(loop, output, file * bytes, bytes, lines, [=](Loop& loop, i64) {
        gloop::fs::close(loop, output, [](Loop&, i64) {});
      });
    });
  });
}

__device__ __forceinline__ void next_chunk(Loop& loop, Search search, At at) {
  if (at.offset >= at.size) return finish(loop, search, at);
  gloop::fs::read(loop, at.file, at.offset, search.chunk + WORD, buffer(search),
                  [=](Loop& loop, i64 got) {
                    if (got <= 0) return finish(loop, search, at);
                    words(loop, search, at, static_cast<u64>(got), 0);
                  });
}

extern "C" __global__ void __launch_bounds__(256) looped(gloop::Ctl ctl, Search search) {
  gloop::run(ctl, [=](Loop& loop) {
    gloop::fs::open(loop, search.paths + loop.block() * PATH, gloop::fs::READ_ONLY,
                    [=](Loop& loop, i64 file) {
                      if (file < 0) return;
                      gloop::fs::fstat(loop, file, [=](Loop& loop, i64 size) {
                        next_chunk(loop, search, At{file, static_cast<u64>(size), 0});
                      });
                    });
  });
}
