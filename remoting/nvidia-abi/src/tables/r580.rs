//! Branch 580: sizes and offsets as of its first release; equal up to 580.159.04 for what is listed.
//!
//! The lists hold what CUDA programs (driver and runtime API, PyTorch, JAX) and `nvidia-smi` were seen to issue on
//! an H200. Privileged classes, register access, debugging by others and descriptor memory of other kinds than the
//! program's own pages are not among it.

use super::{
    Uvm, block, client, field, file, file64, handle_list, list, masked, object, object_of, plain,
};
use crate::field::{Block, Field, Meaning};

/// Control commands, by number.
pub const CONTROLS: &[Block] = &[
    block(
        0x0000_0101,
        40,
        &[
            list(8, 0, 1, 4096),
            list(16, 0, 1, 4096),
            list(24, 0, 1, 4096),
        ],
    ),
    plain(0x0000_012b, 8348),
    plain(0x0000_013a, 1352),
    plain(0x0000_01f0, 4),
    plain(0x0000_0201, 128),
    plain(0x0000_0202, 40),
    plain(0x0000_0205, 32),
    plain(0x0000_0214, 384),
    plain(0x0000_0215, 132),
    plain(0x0000_0216, 128),
    plain(0x0000_021b, 12),
    plain(0x0000_0279, 12),
    plain(0x0000_027b, 4),
    plain(0x0000_0288, 3076),
    plain(0x0000_0289, 4),
    plain(0x0000_0a04, 2244),
    plain(0x0000_0b02, 12),
    block(0x0000_0d01, 12, &[object(0)]),
    plain(0x0000_0d04, 12),
    block(0x0000_3d08, 80, &[file(0)]),
    block(
        0x0000_3d0b,
        2128,
        &[
            file(0),
            object(4),
            field(
                76,
                Meaning::Objects {
                    count: 512,
                    used_at: Some(2124),
                },
            ),
        ],
    ),
    block(
        0x0000_3d0c,
        652,
        &[
            file(0),
            object(4),
            field(
                8,
                Meaning::NewObjects {
                    count: 128,
                    used_at: 648,
                },
            ),
        ],
    ),
    block(0x0041_0110, 16, &[list(8, 0, 8, 256)]),
    plain(0x0080_0280, 4),
    plain(0x0080_0288, 4),
    plain(0x0080_0289, 8),
    plain(0x0080_0292, 804),
    plain(0x0080_1307, 3),
    plain(0x0080_1402, 3),
    block(
        0x0080_170d,
        24,
        &[handle_list(8, 0, 1024), list(16, 0, 4, 1024)],
    ),
    plain(0x0080_1909, 1),
    plain(0x00de_0001, 8),
    plain(0x2080_0102, 564),
    plain(0x2080_0110, 132),
    plain(0x2080_0111, 64),
    plain(0x2080_0119, 4),
    plain(0x2080_012f, 1464),
    plain(0x2080_0131, 4),
    plain(0x2080_0133, 8),
    plain(0x2080_013f, 136),
    plain(0x2080_0145, 0),
    plain(0x2080_0146, 0),
    plain(0x2080_014a, 268),
    plain(0x2080_014b, 5),
    plain(0x2080_0156, 16),
    plain(0x2080_0157, 0),
    plain(0x2080_0170, 340),
    plain(0x2080_018d, 3812),
    plain(0x2080_0195, 260),
    plain(0x2080_01a3, 56),
    plain(0x2080_01a4, 16),
    plain(0x2080_01b2, 4),
    plain(0x2080_0406, 264),
    block(0x2080_0802, 16, &[list(8, 0, 8, 256)]),
    block(0x2080_1201, 32, &[list(8, 0, 8, 256)]),
    block(0x2080_1210, 32, &[object(4)]),
    block(0x2080_1218, 16, &[object(0)]),
    plain(0x2080_121b, 9240),
    plain(0x2080_1227, 48),
    plain(0x2080_122a, 24),
    plain(0x2080_122b, 24),
    plain(0x2080_1230, 32),
    plain(0x2080_1303, 1028),
    plain(0x2080_1322, 2056),
    plain(0x2080_1357, 4),
    plain(0x2080_1701, 16),
    plain(0x2080_1702, 4),
    plain(0x2080_1801, 16),
    block(0x2080_1802, 16, &[list(8, 0, 8, 256)]),
    plain(0x2080_1803, 200),
    plain(0x2080_1813, 76),
    plain(0x2080_1819, 32),
    plain(0x2080_1823, 420),
    plain(0x2080_1829, 12),
    plain(0x2080_182a, 112),
    plain(0x2080_182b, 28),
    plain(0x2080_1830, 4),
    plain(0x2080_200a, 8),
    plain(0x2080_2209, 4),
    plain(0x2080_220c, 0),
    plain(0x2080_2210, 0),
    plain(0x2080_2a0a, 136),
    plain(0x2080_3001, 48),
    plain(0x2080_3002, 13344),
    plain(0x2080_3083, 39),
    plain(0x2080_3404, 2),
    plain(0x2080_3601, 72),
    plain(0x2080_3801, 1928),
    plain(0x2080_8159, 332),
    plain(0x2080_8162, 1),
    plain(0x2080_852e, 528),
    plain(0x2080_852f, 776),
    plain(0x2080_9001, 8),
    plain(0x2080_9009, 8),
    plain(0x2080_9038, 4),
    plain(0x2080_9064, 520),
    plain(0x2080_a026, 532),
    plain(0x2080_a084, 4),
    plain(0x2080_a612, 11680),
    plain(0x2080_a618, 8620),
    plain(0x2081_0108, 992),
    plain(0x2081_0110, 1),
    block(0x503c_0102, 16, &[object(0)]),
    block(0x503c_0104, 32, &[object(0)]),
    block(0x503c_0105, 4, &[object(0)]),
    plain(0x83de_0309, 4),
    // What has stopped multiprocessors: read when a context fails.
    block(0x83de_030c, 4824, &[object(0)]),
    block(0x906f_0101, 16, &[object(0)]),
    // A channel of a context that has failed is reset.
    plain(0x906f_0102, 12),
    plain(0x90e6_0102, 8),
    plain(0x90e7_0113, 16),
    plain(0xa06c_0101, 3),
    plain(0xa06c_0103, 8),
    plain(0xa06c_0105, 8),
    // One channel is scheduled: a checkpoint does that, with channels of its own.
    plain(0xa06f_0103, 3),
    plain(0xc36f_0108, 4),
    plain(0xcb33_0101, 6),
];

/// Memory of any kind: its virtual address space is an object, and the kernel's address and flags are masked.
const MEMORY: &[Field] = &[masked(96, 8), object(108), masked(112, 4)];

/// A channel: notifiers, buffers, contexts and pages are objects; what the driver fills in for itself is masked.
const CHANNEL: &[Field] = &[
    object(0),
    object(4),
    object(24),
    object(28),
    field(
        32,
        Meaning::Objects {
            count: 8,
            used_at: None,
        },
    ),
    object(140),
    masked(144, 96),
    masked(240, 64),
];

/// Classes of objects, by number, with the block that creates them.
pub const CLASSES: &[Block] = &[
    // Root clients. Their parameter is not read.
    plain(0x0000, 0),
    plain(0x0001, 0),
    // System memory, which becomes descriptor memory; video memory.
    block(0x003e, 128, MEMORY),
    block(0x0040, 128, MEMORY),
    plain(0x0041, 0),
    // An event that a device file reports.
    block(0x0079, 24, &[client(0), object_of(4, 0), file64(16)]),
    // A GPU and its parts.
    block(0x0080, 56, &[client(4), client(8), object_of(12, 8)]),
    plain(0x00de, 8),
    // Video memory as other GPUs of a fabric reach it.
    block(0x00f8, 48, &[object(40)]),
    plain(0x2080, 4),
    plain(0x2081, 4),
    // Two GPUs of a client, as peers. The page in the register window is the driver's affair.
    block(0x503b, 72, &[object(0), object(4), masked(16, 56)]),
    plain(0x503c, 4),
    block(0x50a0, 128, MEMORY),
    block(0x83de, 12, &[client(0), client(4), object_of(8, 4)]),
    block(0x9067, 12, &[object(0)]),
    plain(0x90e6, 0),
    plain(0x90e7, 0),
    plain(0x90f1, 56),
    // Channel groups; channels, doorbells, copy and compute engines of each generation since Volta.
    block(0xa06c, 20, &[object(0), object(4), object(8)]),
    plain(0xc361, 0),
    block(0xc36f, 368, CHANNEL),
    plain(0xc461, 0),
    block(0xc46f, 368, CHANNEL),
    plain(0xc561, 0),
    block(0xc56f, 368, CHANNEL),
    plain(0xc5b5, 8),
    plain(0xc5c0, 16),
    plain(0xc661, 2),
    plain(0xc6b5, 8),
    plain(0xc6c0, 16),
    plain(0xc7b5, 8),
    plain(0xc7c0, 16),
    block(0xc86f, 368, CHANNEL),
    plain(0xc8b5, 8),
    plain(0xc9c0, 16),
    // What confidential computing offers.
    block(0xcb33, 4, &[client(0)]),
    plain(0xcbc0, 16),
];

/// Commands on the file of unified memory, by number. The addresses that they name are the program's.
pub const UVM: &[Uvm] = &[
    uvm(0x17, 16, 8, &[]),
    uvm(0x18, 16, 8, &[]),
    uvm(0x19, 32, 28, &[file(16), client(20), object_of(24, 20)]),
    uvm(0x1a, 20, 16, &[]),
    uvm(0x1b, 56, 48, &[file(16), client(20), object_of(24, 20)]),
    uvm(0x1c, 28, 24, &[client(16), object_of(20, 16)]),
    uvm(0x1d, 36, 32, &[]),
    uvm(0x1e, 36, 32, &[]),
    uvm(0x1f, 32, 24, &[]),
    uvm(
        0x21,
        9264,
        9260,
        &[file(9248), client(9252), object_of(9256, 9252)],
    ),
    uvm(0x22, 24, 16, &[]),
    uvm(0x25, 40, 36, &[file(24), client(28), object_of(32, 28)]),
    uvm(0x26, 20, 16, &[]),
    uvm(0x27, 8, 4, &[]),
    uvm(0x28, 272, 264, &[]),
    uvm(0x29, 272, 264, &[]),
    uvm(0x2a, 40, 36, &[]),
    uvm(0x2b, 24, 16, &[]),
    uvm(0x2c, 24, 16, &[]),
    uvm(0x2d, 24, 16, &[]),
    uvm(0x2e, 40, 32, &[]),
    uvm(0x2f, 40, 32, &[]),
    uvm(0x33, 80, 72, &[]),
    uvm(0x35, 32, 24, &[]),
    uvm(0x41, 40, 32, &[]),
    uvm(0x42, 40, 32, &[]),
    uvm(0x44, 9248, 9240, &[]),
    uvm(0x46, 24, 20, &[]),
    uvm(0x48, 24, 16, &[]),
    uvm(0x49, 24, 16, &[]),
    uvm(0x4b, 8, 4, &[file(0)]),
    uvm(0x3000_0001, 16, 8, &[]),
    Uvm {
        block: plain(0x3000_0002, 0),
        status_at: None,
    },
];

const fn uvm(number: u32, size: u32, status_at: u16, fields: &'static [Field]) -> Uvm {
    Uvm {
        block: block(number, size, fields),
        status_at: Some(status_at),
    }
}
