// TCP over IPv4 through the host. As for files, f(loop, result) runs when the host has answered.
#pragma once

#include <gloop/fs.cuh>

namespace gloop {
namespace net {

// Listens on the host's loopback address, or on the address configured on the host. The result is a
// server.
template <class F>
GLOOP_DEVICE void bind(Loop& loop, u32 port, F f) {
  Request request = {};
  request.opcode = OP_BIND;
  request.flags = port;
  loop.ask(request, f);
}
template <class F>
GLOOP_DEVICE void unbind(Loop& loop, i64 server, F f) {
  io::plain(loop, OP_UNBIND, static_cast<u32>(server), 0, f);
}
// The result is a socket.
template <class F>
GLOOP_DEVICE void accept(Loop& loop, i64 server, F f) {
  io::plain(loop, OP_ACCEPT, static_cast<u32>(server), 0, f);
}
// `address` is a number: 127.0.0.1 is 0x7f000001.
template <class F>
GLOOP_DEVICE void connect(Loop& loop, u32 address, u32 port, F f) {
  Request request = {};
  request.opcode = OP_CONNECT;
  request.offset = address;
  request.flags = port;
  loop.ask(request, f);
}
template <class F>
GLOOP_DEVICE void close(Loop& loop, i64 socket, F f) {
  io::plain(loop, OP_HANG_UP, static_cast<u32>(socket), 0, f);
}
// At most loop.page_bytes() at a time. The result is the number of bytes received, 0 at the end.
template <class F>
GLOOP_DEVICE void receive(Loop& loop, i64 socket, u64 bytes, void* to, F f) {
  io::inward(loop, OP_RECEIVE, static_cast<u32>(socket), 0, bytes, to, f);
}
// The result is the number of bytes sent.
template <class F>
GLOOP_DEVICE void send(Loop& loop, i64 socket, u64 bytes, const void* from, F f) {
  io::outward(loop, OP_SEND, static_cast<u32>(socket), 0, bytes, from, 0, f);
}

}  // namespace net
}  // namespace gloop
