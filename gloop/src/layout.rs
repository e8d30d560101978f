//! The structures that host and GPU share, byte for byte. They are defined here, and written out as
//! the C++ header `include/gloop/layout.cuh`. A test checks that the two agree, and assertions in
//! the header check that the CUDA compiler lays out the structures identically.
//!
//! Addresses are the device's, and plain numbers for the host. Nothing that the device writes is
//! trusted: [`crate::slots`] checks requests, and the words that report how a kernel ended are read
//! once.

use std::fmt::Write;

/// The maximum number of events that a block may wait for at a time.
pub const SLOTS: u32 = 32;
/// The number of entries of a block's rings: as many as there are slots, so that neither ring can
/// overflow.
pub const ENTRIES: usize = SLOTS as usize;
/// The size of a closure in bytes.
pub const CLOSURE: usize = 384;
/// The size of a suspended block's loop in bytes.
pub const SAVED: usize = 2048;
/// The maximum number of pieces of shared memory that a block may keep across a suspension.
pub const KEPT: u32 = 8;

/// How a launch ended, as reported by the last block to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ExitCode {
    /// All logical blocks are done, and no event is waited for.
    Done = 1,
    /// It was stopped, and continues when it is launched again.
    Stopped = 2,
    /// It has left the GPU because all blocks wait for events.
    Waiting = 3,
    /// A block has broken the library's rules; see [`Fault`].
    Fault = 4,
}

/// Why a launch ended with [`ExitCode::Fault`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    /// A block waits for more than [`SLOTS`] events.
    Slots = 1,
    /// A block has more I/O operations with data in flight than it has pages.
    Pages = 2,
    /// A block keeps more shared memory than the launch has room for.
    Kept = 3,
}

macro_rules! layout {
    ($(
        $(#[doc = $about:literal])+
        struct $name:ident, $bytes:literal bytes, aligned to $align:literal {
            $( $(#[doc = $what:literal])+ $field:ident: $type:ty = $c:literal, )+
        }
    )+) => {
        $(
            $(#[doc = $about])+
            #[repr(C, align($align))]
            #[derive(Clone, Copy, Debug)]
            pub struct $name { $( $(#[doc = $what])+ pub $field: $type, )+ }
            const _: () = assert!(size_of::<$name>() == $bytes);
        )+

        fn structures(header: &mut String) -> std::fmt::Result {
            $(
                writeln!(header)?;
                $( writeln!(header, "//{}", $about)?; )+
                writeln!(header, "struct alignas({}) {} {{", $align, stringify!($name))?;
                $(
                    $( writeln!(header, "  //{}", $what)?; )+
                    writeln!(header, "  {};", $c.replace('$', stringify!($field)))?;
                )+
                writeln!(header, "}};")?;
                writeln!(header, "static_assert(sizeof({}) == {}, \"\");", stringify!($name), $bytes)?;
                $( writeln!(
                    header,
                    "static_assert(GLOOP_OFFSET({0}, {1}) == {2}, \"\");",
                    stringify!($name),
                    stringify!($field),
                    std::mem::offset_of!($name, $field),
                )?; )+
            )+
            Ok(())
        }
    };
}

layout! {
    /// A request to the host: sixteen words, the last one the entry's number plus one, which is
    /// written after all others.
    struct Request, 64 bytes, aligned to 64 {
        /// What is asked for: see the opcodes.
        opcode: u32 = "u32 $",
        /// The slot of who waits.
        tag: u32 = "u32 $",
        /// A file, socket or server, as the host has named it.
        handle: u32 = "u32 $",
        /// The page with the data, among the block's.
        page: u32 = "u32 $",
        /// Where in the file; or an address.
        offset: u64 = "u64 $",
        /// Bytes of data.
        length: u64 = "u64 $",
        /// How to open; or a port.
        flags: u32 = "u32 $",
        /// Zero.
        reserved: [u32; 6] = "u32 $[6]",
        /// The entry's number plus one, modulo 2^32.
        sequence: u32 = "u32 $",
    }
    /// An answer: four words, the last one the entry's number plus one.
    struct Completion, 16 bytes, aligned to 16 {
        /// What the call returns, negative for an error (errno), the lower half.
        low: u32 = "u32 $",
        /// The upper half.
        high: u32 = "u32 $",
        /// The slot of who waits.
        tag: u32 = "u32 $",
        /// The entry's number plus one, modulo 2^32.
        sequence: u32 = "u32 $",
    }
    /// A block's rings, in the host's memory.
    struct Rings, 2560 bytes, aligned to 64 {
        /// Written by the block.
        requests: [Request; ENTRIES] = "Request $[32]",
        /// Written by the host.
        completions: [Completion; ENTRIES] = "Completion $[32]",
    }
    /// What is said to a launch: in the host's memory, never written by the GPU.
    struct Orders, 64 bytes, aligned to 64 {
        /// The number of the launch that is to stop.
        stop: u32 = "u32 $",
        /// The number of the launch that is to end when all of it waits: others want the GPU.
        contended: u32 = "u32 $",
        /// Zero.
        reserved: [u32; 14] = "u32 $[14]",
    }
    /// How a launch ended: in the host's memory, written by the last block to leave.
    struct Exit, 64 bytes, aligned to 64 {
        /// See the exit codes.
        code: u32 = "u32 $",
        /// See the faults.
        fault: u32 = "u32 $",
        /// The launch that the others are about.
        launch: u32 = "u32 $",
        /// Answers that all blocks have taken so far, modulo 2^32: more have come since if the host has
        /// given more.
        taken: u32 = "u32 $",
        /// Zero.
        reserved: [u32; 12] = "u32 $[12]",
    }
    /// What the blocks of a launch share, in the device's memory.
    struct Board, 128 bytes, aligned to 128 {
        /// The number of the launch that is to stop: a copy of the order, read by all blocks.
        stop: u32 = "u32 $",
        /// The copy of the other order.
        contended: u32 = "u32 $",
        /// When the orders were last read by anybody (ns, global timer).
        polled: u64 = "u64 $",
        /// The next logical block that nobody has.
        next: u64 = "u64 $",
        /// Blocks that have left this launch, and in the upper half those with something to do.
        left: u64 = "u64 $",
        /// Blocks that have waited for a while.
        idle: u32 = "u32 $",
        /// The launch that stops because it waits.
        waiting: u32 = "u32 $",
        /// The fault of a block, if not zero.
        fault: u32 = "u32 $",
        /// Answers that blocks have taken in all launches.
        taken: u32 = "u32 $",
        /// Zero.
        reserved: [u32; 16] = "u32 $[16]",
    }
    /// A closure that waits for an event.
    struct Slot, 400 bytes, aligned to 16 {
        /// The function that runs it.
        code: u64 = "u64 $",
        /// What the event has brought.
        result: u64 = "i64 $",
        /// What it has captured.
        closure: [u8; CLOSURE] = "unsigned char $[384]",
    }
    /// A physical block, in the device's memory.
    struct Block, 14880 bytes, aligned to 16 {
        /// 0 before its first launch, 1 if its loop was saved, 2 when it is done.
        state: u32 = "u32 $",
        /// Zero.
        reserved: [u32; 7] = "u32 $[7]",
        /// Its loop while it does not run.
        saved: [u8; SAVED] = "unsigned char $[2048]",
        /// What it waits for.
        slots: [Slot; ENTRIES] = "Slot $[32]",
    }
    /// What a kernel gets as its first parameter, by value.
    struct Ctl, 144 bytes, aligned to 16 {
        /// Orders to this launch.
        orders: u64 = "const Orders* $",
        /// Where to say how it ended.
        exit: u64 = "Exit* $",
        /// What the blocks share.
        board: u64 = "Board* $",
        /// The physical blocks.
        blocks: u64 = "Block* $",
        /// Room for kept shared memory, the same for each block.
        kept: u64 = "unsigned char* $",
        /// The blocks' rings.
        rings: u64 = "Rings* $",
        /// The blocks' pages for data, in the host's memory.
        pages: u64 = "unsigned char* $",
        /// How many logical blocks there are: the product of the three below.
        logical: u64 = "u64 $",
        /// Logical blocks along x.
        x: u32 = "u32 $",
        /// Logical blocks along y.
        y: u32 = "u32 $",
        /// Logical blocks along z.
        z: u32 = "u32 $",
        /// Bytes of a page.
        page_bytes: u32 = "u32 $",
        /// Pages of a block, at most 32.
        page_count: u32 = "u32 $",
        /// Bytes of kept shared memory of a block.
        kept_bytes: u32 = "u32 $",
        /// The number of this launch, not zero.
        launch: u32 = "u32 $",
        /// Clock cycles between a block's looks at the board.
        gate_cycles: u32 = "u32 $",
        /// Nanoseconds between looks at the orders, by whichever block.
        poll_ns: u32 = "u32 $",
        /// Nanoseconds between looks at the orders by the same block.
        own_poll_ns: u32 = "u32 $",
        /// Nanoseconds after which a block that waits counts as idle.
        idle_ns: u32 = "u32 $",
        /// The most logical blocks that a physical block takes at a time.
        batch: u32 = "u32 $",
        /// Where the arbiter of the GPU says that a turn is over (the lower half: its number), and that
        /// others wait (the upper half, not zero); 0 if there is no arbiter, or the host looks.
        turns: u64 = "const u64* $",
        /// The turn in which this launch runs, if `turns` is not 0.
        turn: u32 = "u32 $",
        /// Zero.
        reserved: [u32; 5] = "u32 $[5]",
    }
}

// A whole number of words, since it is copied word by word.
const _: () = assert!(size_of::<Block>().is_multiple_of(16) && SAVED.is_multiple_of(16));

/// The requests that a block may make: name and number.
pub const OPCODES: &[(&str, u32)] = &[
    ("OPEN", 1),
    ("CLOSE", 2),
    ("STAT", 3),
    ("TRUNCATE", 4),
    ("READ", 5),
    ("WRITE", 6),
    ("CONNECT", 7),
    ("BIND", 8),
    ("UNBIND", 9),
    ("ACCEPT", 10),
    ("HANG_UP", 11),
    ("RECEIVE", 12),
    ("SEND", 13),
];

/// Generates the header `include/gloop/layout.cuh`.
///
/// # Errors
/// None: writing to a string does not fail.
pub fn header() -> Result<String, std::fmt::Error> {
    let mut header = String::new();
    writeln!(
        header,
        "// Generated from gloop/src/layout.rs (cargo run -p gantry-gloop -- header): do not edit.\n\
         #pragma once\n\n\
         // NVRTC has no offsetof.\n\
         #ifdef __CUDACC_RTC__\n\
         #define GLOOP_OFFSET(type, field) __INTADDR__(&static_cast<type*>(nullptr)->field)\n\
         #else\n\
         #define GLOOP_OFFSET(type, field) __builtin_offsetof(type, field)\n\
         #endif\n\n\
         namespace gloop {{\n\
         using u32 = unsigned int;\n\
         using u64 = unsigned long long;\n\
         using i64 = long long;\n\n\
         constexpr u32 SLOTS = {SLOTS};\n\
         constexpr u32 CLOSURE = {CLOSURE};\n\
         constexpr u32 SAVED = {SAVED};\n\
         constexpr u32 KEPT = {KEPT};\n"
    )?;
    for (name, code) in [
        ("EXIT_DONE", ExitCode::Done as u32),
        ("EXIT_STOPPED", ExitCode::Stopped as u32),
        ("EXIT_WAITING", ExitCode::Waiting as u32),
        ("EXIT_FAULT", ExitCode::Fault as u32),
        ("FAULT_SLOTS", Fault::Slots as u32),
        ("FAULT_PAGES", Fault::Pages as u32),
        ("FAULT_KEPT", Fault::Kept as u32),
    ] {
        writeln!(header, "constexpr u32 {name} = {code};")?;
    }
    for (name, code) in OPCODES {
        writeln!(header, "constexpr u32 OP_{name} = {code};")?;
    }
    structures(&mut header)?;
    writeln!(header, "}}  // namespace gloop")?;
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_for_the_gpu_is_the_one_that_is_generated() {
        assert!(
            header().unwrap() == crate::nvrtc::header("gloop/layout.cuh"),
            "write it anew: cargo run -p gantry-gloop -- header > gloop/include/gloop/layout.cuh"
        );
    }
}
