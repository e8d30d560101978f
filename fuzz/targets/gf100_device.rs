//! What a guest may do to the model of a GPU: access registers, write memory that the GPU
//! interprets, and submit.

#![no_main]

use gantry_fuzz::input::Input;
use gf100::{
    device::gpu::{Delays, Gpu},
    registers::Bar,
};
use libfuzzer_sys::fuzz_target;

const VRAM: u64 = 2 << 20;
/// Registers with effects: windows, run lists, channels, kicks, flushes, interrupts.
const REGISTERS: [u32; 16] = [
    0x00_0140, 0x00_1700, 0x00_1704, 0x00_1714, 0x00_2140, 0x00_2254, 0x00_2270, 0x00_2274,
    0x00_2634, 0x00_3000, 0x00_3004, 0x04_0108, 0x10_0cb8, 0x10_0cbc, 0x70_0000, 0x00_9420,
];

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let Ok(mut gpu) = Gpu::new(VRAM, input.u8() & 1 != 0, Delays::default(), 0) else {
        return;
    };
    let mut now = 0;
    while !input.is_empty() {
        now += 1000;
        match input.u8() % 7 {
            0 => {
                let at = REGISTERS[usize::from(input.u8()) % REGISTERS.len()];
                gpu.write_register(at, input.u32(), now);
            }
            1 => gpu.write_register(input.u32(), input.u32(), now),
            2 => {
                gpu.read_register(input.u32(), now);
            }
            3 => {
                // Page tables, instance blocks, rings, push buffers.
                let at = u64::from(input.u16()) * 32;
                let len = usize::from(input.u8());
                gpu.write_vram(at, input.bytes(len));
            }
            4 => {
                let at = u64::from(input.u32());
                gpu.write_bar(Bar::One, at, &input.u32().to_le_bytes(), now);
            }
            5 => {
                let mut data = [0; 8];
                gpu.read_bar(Bar::Three, u64::from(input.u32()), &mut data, now);
            }
            _ => {
                gpu.work(now);
            }
        }
        gpu.line(now);
    }
});
