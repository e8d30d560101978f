// Kernels that break every rule, to show that they harm only their own process.
#include <gloop/gloop.cuh>

using gloop::u32;
using gloop::u64;

__device__ __forceinline__ u32 random(u32& state) {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

// Reports that the launch is done, as the library's last block does.
__device__ __forceinline__ void say(const gloop::Ctl& ctl, u32 code, u32 launch) {
  ctl.exit->fault = 0;
  ctl.exit->launch = launch;
  ctl.exit->taken = 0x12345678;
  gloop::ptx::store_host(&ctl.exit->code, code);
}

// Requests of random words, far more than allowed, in rings that are overwritten again and again;
// and forged answers. No calls that would leave this machine or create files.
extern "C" __global__ void requests(gloop::Ctl ctl, u32 count) {
  u32 state = blockIdx.x + 1;
  gloop::Rings* rings = ctl.rings + blockIdx.x;
  for (u32 i = 0; i < count; ++i) {
    u32* words = reinterpret_cast<u32*>(&rings->requests[i % gloop::SLOTS]);
    for (u32 w = 0; w < 15; ++w) words[w] = random(state) << (random(state) % 24);
    words[0] = random(state) % 16;
    if (words[0] == gloop::OP_CONNECT) words[0] = gloop::OP_READ;
    words[1] = random(state) % 40;
    words[8] = 0;
    gloop::ptx::store_host(&words[15], random(state) % 8 == 0 ? random(state) : i + 1);
    u32* answer = reinterpret_cast<u32*>(&rings->completions[i % gloop::SLOTS]);
    gloop::ptx::store_host(&answer[random(state) % 4], random(state));
  }
  __shared__ u32 last;
  if (gloop::leader()) last = atomicAdd(&ctl.board->idle, 1u);
  if (last == gridDim.x - 1) say(ctl, gloop::EXIT_DONE, ctl.launch);
}

// Control words of all kinds: the board, saved loops, and the exit report.
extern "C" __global__ void words(gloop::Ctl ctl, u32 code, u32 launch) {
  u32 state = 7;
  u32* board = reinterpret_cast<u32*>(ctl.board);
  for (u32 i = 0; i < sizeof(gloop::Board) / 4; ++i) board[i] = random(state);
  u32* block = reinterpret_cast<u32*>(ctl.blocks);
  for (u32 i = 0; i < sizeof(gloop::Block) / 4; ++i) block[i] = random(state);
  say(ctl, code, launch);
}

// The words with which the arbiter ends its turns.
extern "C" __global__ void grants(gloop::Ctl ctl, u32 value) {
  if (ctl.turns != nullptr) {
    u64* words = const_cast<u64*>(ctl.turns);
    for (int i = -2; i < 500; ++i)
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(words + i), "l"(static_cast<u64>(value)) : "memory");
  }
  say(ctl, gloop::EXIT_DONE, ctl.launch);
}

// Addresses that it was never given.
extern "C" __global__ void wild(gloop::Ctl ctl, u64 at) {
  u32 state = 3;
  for (u32 i = 0; i < 1000; ++i) *reinterpret_cast<volatile u32*>(at + (static_cast<u64>(random(state)) << 12)) = i;
  say(ctl, gloop::EXIT_DONE, ctl.launch);
}

// No scheduling points at all.
extern "C" __global__ void endless(gloop::Ctl ctl, u32* out) {
  u32 x = blockIdx.x;
  for (;;) {
    x = x * 1664525u + 1013904223u;
    asm volatile("" : "+r"(x));
    if (x == 0 && *out == 1) break;
  }
  say(ctl, gloop::EXIT_DONE, ctl.launch);
}
