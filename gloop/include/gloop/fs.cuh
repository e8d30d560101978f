// Files of the host. Calls return immediately; f(loop, result) runs when the host has answered,
// with a negative errno for an error. All threads make the calls, with the same arguments.
#pragma once

#include <gloop/loop.cuh>

namespace gloop {

namespace io {

// Runs f when data has arrived in a page, after copying it to its destination.
template <class F>
struct Inward {
  F f;
  void* to;
  u32 page;
  GLOOP_DEVICE void operator()(Loop& loop, i64 got) {
    if (got > 0) copy(to, loop.page_at(page), static_cast<u64>(got));
    __syncthreads();
    loop.give_page(page);
    f(loop, got);
  }
};

// Runs f when the data of a page is no longer needed.
template <class F>
struct Outward {
  F f;
  u32 page;
  GLOOP_DEVICE void operator()(Loop& loop, i64 result) {
    loop.give_page(page);
    f(loop, result);
  }
};

GLOOP_DEVICE u64 fits(const Loop& loop, u64 bytes) {
  return bytes < loop.page_bytes() ? bytes : loop.page_bytes();
}

template <class F>
GLOOP_DEVICE void inward(Loop& loop, u32 opcode, u32 handle, u64 offset, u64 bytes, void* to, F f) {
  const u32 page = loop.take_page();
  if (page == 32) return;
  Request request = {};
  request.opcode = opcode;
  request.handle = handle;
  request.page = page;
  request.offset = offset;
  request.length = fits(loop, bytes);
  loop.ask(request, Inward<F>{f, to, page});
}

template <class F>
GLOOP_DEVICE void outward(Loop& loop, u32 opcode, u32 handle, u64 offset, u64 bytes,
                          const void* from, u32 flags, F f) {
  const u32 page = loop.take_page();
  if (page == 32) return;
  Request request = {};
  request.opcode = opcode;
  request.handle = handle;
  request.page = page;
  request.offset = offset;
  request.length = fits(loop, bytes);
  request.flags = flags;
  copy(loop.page_at(page), from, request.length);
  __syncthreads();
  loop.ask(request, Outward<F>{f, page});
}

template <class F>
GLOOP_DEVICE void plain(Loop& loop, u32 opcode, u32 handle, u64 length, F f) {
  Request request = {};
  request.opcode = opcode;
  request.handle = handle;
  request.length = length;
  loop.ask(request, f);
}

}  // namespace io

namespace fs {

// For reading; for reading and writing, created if it does not exist; the same, truncated first.
constexpr u32 READ_ONLY = 0, READ_WRITE = 1, CREATE = 2;

// Opens a file by its zero-terminated path. The result is the file's handle for the other calls.
template <class F>
GLOOP_DEVICE void open(Loop& loop, const char* path, u32 how, F f) {
  u64 bytes = 0;
  while (path[bytes] != 0 && bytes < loop.page_bytes()) ++bytes;
  io::outward(loop, OP_OPEN, 0, 0, bytes, path, how, f);
}
template <class F>
GLOOP_DEVICE void close(Loop& loop, i64 file, F f) {
  io::plain(loop, OP_CLOSE, static_cast<u32>(file), 0, f);
}
// The result is the file's size in bytes.
template <class F>
GLOOP_DEVICE void fstat(Loop& loop, i64 file, F f) {
  io::plain(loop, OP_STAT, static_cast<u32>(file), 0, f);
}
template <class F>
GLOOP_DEVICE void ftruncate(Loop& loop, i64 file, u64 bytes, F f) {
  io::plain(loop, OP_TRUNCATE, static_cast<u32>(file), bytes, f);
}
// At most loop.page_bytes() at a time. The result is the number of bytes read or written.
template <class F>
GLOOP_DEVICE void read(Loop& loop, i64 file, u64 offset, u64 bytes, void* to, F f) {
  io::inward(loop, OP_READ, static_cast<u32>(file), offset, bytes, to, f);
}
template <class F>
GLOOP_DEVICE void write(Loop& loop, i64 file, u64 offset, u64 bytes, const void* from, F f) {
  io::outward(loop, OP_WRITE, static_cast<u32>(file), offset, bytes, from, 0, f);
}

}  // namespace fs
}  // namespace gloop
