// Sends back what it receives. Each logical block serves one connection.
#include "server.cuh"

__device__ __forceinline__ void echo(Loop& loop, i64 socket, char* buffer) {
  gloop::net::receive(loop, socket, loop.page_bytes(), buffer, [=](Loop& loop, i64 got) {
    if (got <= 0) return gloop::net::close(loop, socket, [](Loop&, i64) {});
    send_all(loop, socket, buffer, static_cast<u64>(got), [=](Loop& loop, bool sent) {
      if (sent) return echo(loop, socket, buffer);
      gloop::net::close(loop, socket, [](Loop&, i64) {});
    });
  });
}

extern "C" __global__ void __launch_bounds__(256) looped(gloop::Ctl ctl, const i64* server, char* buffers) {
  gloop::run(ctl, [=](Loop& loop) {
    gloop::net::accept(loop, *server, [=](Loop& loop, i64 socket) {
      if (socket < 0) return;
      echo(loop, socket, buffers + static_cast<u64>(blockIdx.x) * loop.page_bytes());
    });
  });
}
