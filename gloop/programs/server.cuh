// What the servers share: a listening socket, and sending and receiving of whole messages.
#pragma once

#include <gloop/gloop.cuh>

using gloop::i64;
using gloop::Loop;
using gloop::u32;
using gloop::u64;

// Listens on a port, 0 for any, and returns the server's handle.
extern "C" __global__ void __launch_bounds__(256) listen(gloop::Ctl ctl, i64* server, u32 port) {
  gloop::run(ctl, [=](Loop& loop) {
    gloop::net::bind(loop, port, [=](Loop&, i64 handle) {
      if (gloop::leader()) *server = handle;
    });
  });
}

extern "C" __global__ void __launch_bounds__(256) unlisten(gloop::Ctl ctl, const i64* server) {
  gloop::run(ctl, [=](Loop& loop) { gloop::net::unbind(loop, *server, [](Loop&, i64) {}); });
}

// Sends all of `bytes`, then calls f(loop, whether it was sent).
template <class F>
__device__ __forceinline__ void send_all(Loop& loop, i64 socket, const char* from, u64 bytes, F f) {
  gloop::net::send(loop, socket, bytes, from, [=](Loop& loop, i64 sent) {
    if (sent <= 0) return f(loop, false);
    if (static_cast<u64>(sent) == bytes) return f(loop, true);
    send_all(loop, socket, from + sent, bytes - sent, f);
  });
}

// Receives all of `bytes`, then calls f(loop, whether they arrived).
template <class F>
__device__ __forceinline__ void receive_all(Loop& loop, i64 socket, char* to, u64 bytes, F f) {
  gloop::net::receive(loop, socket, bytes, to, [=](Loop& loop, i64 got) {
    if (got <= 0) return f(loop, false);
    if (static_cast<u64>(got) == bytes) return f(loop, true);
    receive_all(loop, socket, to + got, bytes - got, f);
  });
}
