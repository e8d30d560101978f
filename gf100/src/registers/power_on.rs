//! Register values after power-on: those that nouveau reads before it writes anything.

use std::collections::BTreeMap;

/// Values by address, for a GPU with `vram` bytes of memory.
pub fn values(vram: u64) -> BTreeMap<u32, u32> {
    let mebibytes = u32::try_from(vram >> 20).unwrap_or(u32::MAX);
    let mut values = BTreeMap::from(VALUES);
    // Size of the memory behind the first memory controller.
    values.insert(0x11_020c, mebibytes);
    values
}

const VALUES: [(u32, u32); 33] = [
    // GF100, revision A3.
    (0x00_0000, 0x0c00_00a3),
    // Straps: a crystal of 27 MHz.
    (0x10_1000, 0x0040_0000),
    // The VBIOS initialization has been run.
    (0x02_240c, 0x0000_0002),
    // Fused off: display, video decoders and encoders. Both copy engines are available.
    (0x02_2500, 0x0000_000f),
    // One memory controller, none disabled.
    (0x02_2438, 1),
    (0x02_2554, 0),
    // One L2 cache slice.
    (0x17_e8dc, 1 << 28),
    // Falcons: version 3 with one port each; 1,536 bytes of code and 768 bytes of data memory in a
    // copy engine.
    (0x10_412c, 3),
    (0x10_512c, 3),
    (0x10_4108, 0x606),
    (0x10_5108, 0x606),
    (0x10_a12c, 3),
    (0x10_a108, 0x2_0040),
    (0x40_912c, 3),
    (0x40_9108, 0x2_0040),
    (0x41_a12c, 3),
    (0x41_a108, 0x2_0040),
    // Locations of the power manager's queues after its code has started.
    (0x10_a4d0, 1),
    (0x10_a4dc, 1),
    (0x10_a04c, 0),
    (0x10_a10c, 0),
    // One shader cluster with one multiprocessor, one raster unit.
    (0x40_9604, 0x0001_0001),
    (0x50_2608, 1),
    (0x50_0c30, 1),
    // Context switching of the graphics engine: ready, 32 KiB per context.
    (0x40_9800, 0x8000_0000),
    (0x40_9804, 0x0000_8000),
    // Nothing is busy.
    (0x40_0700, 0),
    (0x00_2640, 0),
    (0x00_2644, 0),
    (0x00_2648, 0),
    (0x00_264c, 0),
    (0x00_2650, 0),
    (0x00_2654, 0),
];
