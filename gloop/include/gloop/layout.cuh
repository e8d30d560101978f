// Generated from gloop/src/layout.rs (cargo run -p gantry-gloop -- header): do not edit.
#pragma once

// NVRTC has no offsetof.
#ifdef __CUDACC_RTC__
#define GLOOP_OFFSET(type, field) __INTADDR__(&static_cast<type*>(nullptr)->field)
#else
#define GLOOP_OFFSET(type, field) __builtin_offsetof(type, field)
#endif

namespace gloop {
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 SLOTS = 32;
constexpr u32 CLOSURE = 384;
constexpr u32 SAVED = 2048;
constexpr u32 KEPT = 8;

constexpr u32 EXIT_DONE = 1;
constexpr u32 EXIT_STOPPED = 2;
constexpr u32 EXIT_WAITING = 3;
constexpr u32 EXIT_FAULT = 4;
constexpr u32 FAULT_SLOTS = 1;
constexpr u32 FAULT_PAGES = 2;
constexpr u32 FAULT_KEPT = 3;
constexpr u32 OP_OPEN = 1;
constexpr u32 OP_CLOSE = 2;
constexpr u32 OP_STAT = 3;
constexpr u32 OP_TRUNCATE = 4;
constexpr u32 OP_READ = 5;
constexpr u32 OP_WRITE = 6;
constexpr u32 OP_CONNECT = 7;
constexpr u32 OP_BIND = 8;
constexpr u32 OP_UNBIND = 9;
constexpr u32 OP_ACCEPT = 10;
constexpr u32 OP_HANG_UP = 11;
constexpr u32 OP_RECEIVE = 12;
constexpr u32 OP_SEND = 13;

// A request to the host: sixteen words, the last one the entry's number plus one, which is
// written after all others.
struct alignas(64) Request {
  // What is asked for: see the opcodes.
  u32 opcode;
  // The slot of who waits.
  u32 tag;
  // A file, socket or server, as the host has named it.
  u32 handle;
  // The page with the data, among the block's.
  u32 page;
  // Where in the file; or an address.
  u64 offset;
  // Bytes of data.
  u64 length;
  // How to open; or a port.
  u32 flags;
  // Zero.
  u32 reserved[6];
  // The entry's number plus one, modulo 2^32.
  u32 sequence;
};
static_assert(sizeof(Request) == 64, "");
static_assert(GLOOP_OFFSET(Request, opcode) == 0, "");
static_assert(GLOOP_OFFSET(Request, tag) == 4, "");
static_assert(GLOOP_OFFSET(Request, handle) == 8, "");
static_assert(GLOOP_OFFSET(Request, page) == 12, "");
static_assert(GLOOP_OFFSET(Request, offset) == 16, "");
static_assert(GLOOP_OFFSET(Request, length) == 24, "");
static_assert(GLOOP_OFFSET(Request, flags) == 32, "");
static_assert(GLOOP_OFFSET(Request, reserved) == 36, "");
static_assert(GLOOP_OFFSET(Request, sequence) == 60, "");

// An answer: four words, the last one the entry's number plus one.
struct alignas(16) Completion {
  // What the call returns, negative for an error (errno), the lower half.
  u32 low;
  // The upper half.
  u32 high;
  // The slot of who waits.
  u32 tag;
  // The entry's number plus one, modulo 2^32.
  u32 sequence;
};
static_assert(sizeof(Completion) == 16, "");
static_assert(GLOOP_OFFSET(Completion, low) == 0, "");
static_assert(GLOOP_OFFSET(Completion, high) == 4, "");
static_assert(GLOOP_OFFSET(Completion, tag) == 8, "");
static_assert(GLOOP_OFFSET(Completion, sequence) == 12, "");

// A block's rings, in the host's memory.
struct alignas(64) Rings {
  // Written by the block.
  Request requests[32];
  // Written by the host.
  Completion completions[32];
};
static_assert(sizeof(Rings) == 2560, "");
static_assert(GLOOP_OFFSET(Rings, requests) == 0, "");
static_assert(GLOOP_OFFSET(Rings, completions) == 2048, "");

// What is said to a launch: in the host's memory, never written by the GPU.
struct alignas(64) Orders {
  // The number of the launch that is to stop.
  u32 stop;
  // The number of the launch that is to end when all of it waits: others want the GPU.
  u32 contended;
  // Zero.
  u32 reserved[14];
};
static_assert(sizeof(Orders) == 64, "");
static_assert(GLOOP_OFFSET(Orders, stop) == 0, "");
static_assert(GLOOP_OFFSET(Orders, contended) == 4, "");
static_assert(GLOOP_OFFSET(Orders, reserved) == 8, "");

// How a launch ended: in the host's memory, written by the last block to leave.
struct alignas(64) Exit {
  // See the exit codes.
  u32 code;
  // See the faults.
  u32 fault;
  // The launch that the others are about.
  u32 launch;
  // Answers that all blocks have taken so far, modulo 2^32: more have come since if the host has
  // given more.
  u32 taken;
  // Zero.
  u32 reserved[12];
};
static_assert(sizeof(Exit) == 64, "");
static_assert(GLOOP_OFFSET(Exit, code) == 0, "");
static_assert(GLOOP_OFFSET(Exit, fault) == 4, "");
static_assert(GLOOP_OFFSET(Exit, launch) == 8, "");
static_assert(GLOOP_OFFSET(Exit, taken) == 12, "");
static_assert(GLOOP_OFFSET(Exit, reserved) == 16, "");

// What the blocks of a launch share, in the device's memory.
struct alignas(128) Board {
  // The number of the launch that is to stop: a copy of the order, read by all blocks.
  u32 stop;
  // The copy of the other order.
  u32 contended;
  // When the orders were last read by anybody (ns, global timer).
  u64 polled;
  // The next logical block that nobody has.
  u64 next;
  // Blocks that have left this launch, and in the upper half those with something to do.
  u64 left;
  // Blocks that have waited for a while.
  u32 idle;
  // The launch that stops because it waits.
  u32 waiting;
  // The fault of a block, if not zero.
  u32 fault;
  // Answers that blocks have taken in all launches.
  u32 taken;
  // Zero.
  u32 reserved[16];
};
static_assert(sizeof(Board) == 128, "");
static_assert(GLOOP_OFFSET(Board, stop) == 0, "");
static_assert(GLOOP_OFFSET(Board, contended) == 4, "");
static_assert(GLOOP_OFFSET(Board, polled) == 8, "");
static_assert(GLOOP_OFFSET(Board, next) == 16, "");
static_assert(GLOOP_OFFSET(Board, left) == 24, "");
static_assert(GLOOP_OFFSET(Board, idle) == 32, "");
static_assert(GLOOP_OFFSET(Board, waiting) == 36, "");
static_assert(GLOOP_OFFSET(Board, fault) == 40, "");
static_assert(GLOOP_OFFSET(Board, taken) == 44, "");
static_assert(GLOOP_OFFSET(Board, reserved) == 48, "");

// A closure that waits for an event.
struct alignas(16) Slot {
  // The function that runs it.
  u64 code;
  // What the event has brought.
  i64 result;
  // What it has captured.
  unsigned char closure[384];
};
static_assert(sizeof(Slot) == 400, "");
static_assert(GLOOP_OFFSET(Slot, code) == 0, "");
static_assert(GLOOP_OFFSET(Slot, result) == 8, "");
static_assert(GLOOP_OFFSET(Slot, closure) == 16, "");

// A physical block, in the device's memory.
struct alignas(16) Block {
  // 0 before its first launch, 1 if its loop was saved, 2 when it is done.
  u32 state;
  // Zero.
  u32 reserved[7];
  // Its loop while it does not run.
  unsigned char saved[2048];
  // What it waits for.
  Slot slots[32];
};
static_assert(sizeof(Block) == 14880, "");
static_assert(GLOOP_OFFSET(Block, state) == 0, "");
static_assert(GLOOP_OFFSET(Block, reserved) == 4, "");
static_assert(GLOOP_OFFSET(Block, saved) == 32, "");
static_assert(GLOOP_OFFSET(Block, slots) == 2080, "");

// What a kernel gets as its first parameter, by value.
struct alignas(16) Ctl {
  // Orders to this launch.
  const Orders* orders;
  // Where to say how it ended.
  Exit* exit;
  // What the blocks share.
  Board* board;
  // The physical blocks.
  Block* blocks;
  // Room for kept shared memory, the same for each block.
  unsigned char* kept;
  // The blocks' rings.
  Rings* rings;
  // The blocks' pages for data, in the host's memory.
  unsigned char* pages;
  // How many logical blocks there are: the product of the three below.
  u64 logical;
  // Logical blocks along x.
  u32 x;
  // Logical blocks along y.
  u32 y;
  // Logical blocks along z.
  u32 z;
  // Bytes of a page.
  u32 page_bytes;
  // Pages of a block, at most 32.
  u32 page_count;
  // Bytes of kept shared memory of a block.
  u32 kept_bytes;
  // The number of this launch, not zero.
  u32 launch;
  // Clock cycles between a block's looks at the board.
  u32 gate_cycles;
  // Nanoseconds between looks at the orders, by whichever block.
  u32 poll_ns;
  // Nanoseconds between looks at the orders by the same block.
  u32 own_poll_ns;
  // Nanoseconds after which a block that waits counts as idle.
  u32 idle_ns;
  // The most logical blocks that a physical block takes at a time.
  u32 batch;
  // Where the arbiter of the GPU says that a turn is over (the lower half: its number), and that
  // others wait (the upper half, not zero); 0 if there is no arbiter, or the host looks.
  const u64* turns;
  // The turn in which this launch runs, if `turns` is not 0.
  u32 turn;
  // Zero.
  u32 reserved[5];
};
static_assert(sizeof(Ctl) == 144, "");
static_assert(GLOOP_OFFSET(Ctl, orders) == 0, "");
static_assert(GLOOP_OFFSET(Ctl, exit) == 8, "");
static_assert(GLOOP_OFFSET(Ctl, board) == 16, "");
static_assert(GLOOP_OFFSET(Ctl, blocks) == 24, "");
static_assert(GLOOP_OFFSET(Ctl, kept) == 32, "");
static_assert(GLOOP_OFFSET(Ctl, rings) == 40, "");
static_assert(GLOOP_OFFSET(Ctl, pages) == 48, "");
static_assert(GLOOP_OFFSET(Ctl, logical) == 56, "");
static_assert(GLOOP_OFFSET(Ctl, x) == 64, "");
static_assert(GLOOP_OFFSET(Ctl, y) == 68, "");
static_assert(GLOOP_OFFSET(Ctl, z) == 72, "");
static_assert(GLOOP_OFFSET(Ctl, page_bytes) == 76, "");
static_assert(GLOOP_OFFSET(Ctl, page_count) == 80, "");
static_assert(GLOOP_OFFSET(Ctl, kept_bytes) == 84, "");
static_assert(GLOOP_OFFSET(Ctl, launch) == 88, "");
static_assert(GLOOP_OFFSET(Ctl, gate_cycles) == 92, "");
static_assert(GLOOP_OFFSET(Ctl, poll_ns) == 96, "");
static_assert(GLOOP_OFFSET(Ctl, own_poll_ns) == 100, "");
static_assert(GLOOP_OFFSET(Ctl, idle_ns) == 104, "");
static_assert(GLOOP_OFFSET(Ctl, batch) == 108, "");
static_assert(GLOOP_OFFSET(Ctl, turns) == 112, "");
static_assert(GLOOP_OFFSET(Ctl, turn) == 120, "");
static_assert(GLOOP_OFFSET(Ctl, reserved) == 124, "");
}  // namespace gloop
