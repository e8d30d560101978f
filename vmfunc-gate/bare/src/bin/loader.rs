//! Loads a kernel: copies what the disk specifies into memory, and jumps to the kernel's 64-bit
//! entry. In an emulator this is faster than a boot loader that asks the BIOS for each track.

#![no_std]
#![no_main]

use core::arch::{asm, global_asm};

global_asm!(include_str!("../boot.s"), options(att_syntax));

/// The sector of the [`Plan`], behind what the boot sector loads.
const PLAN: u32 = 1024;
/// The address for the plan: between this program and the end of the first MiB.
const PLAN_AT: *mut u16 = 0x8_0000 as *mut u16;

/// What to load, in one sector. `cargo xtask test` writes it.
#[repr(C)]
struct Plan {
    /// The physical address of the kernel's 64-bit entry.
    entry: u64,
    /// The physical address of the boot parameters ("zero page").
    parameters: u64,
    count: u64,
    parts: [Part; 20],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Part {
    /// The first sector.
    sector: u32,
    sectors: u32,
    /// The physical address.
    address: u64,
}

fn inb(port: u16) -> u8 {
    let value;
    // SAFETY: registers of the disk controller, which change no memory.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value) };
    value
}

fn outb(port: u16, value: u8) {
    // SAFETY: as above; the controller is only told to do programmed I/O.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value) };
}

/// Reads up to 256 sectors.
///
/// # Safety
/// There is memory at `to`, and nothing else uses it.
unsafe fn read(sector: u32, sectors: u32, to: *mut u16) {
    let bytes = sector.to_le_bytes();
    outb(0x1f6, 0xe0 | bytes[3] & 15);
    // 0 means 256.
    outb(0x1f2, sectors.to_le_bytes()[0]);
    outb(0x1f3, bytes[0]);
    outb(0x1f4, bytes[1]);
    outb(0x1f5, bytes[2]);
    outb(0x1f7, 0x20);
    let mut to = to;
    for _ in 0..sectors {
        // Until it is not busy and has data.
        while inb(0x1f7) & 0x88 != 8 {}
        // SAFETY: the caller's promise.
        unsafe {
            asm!("rep insw", in("dx") 0x1f0, inout("rdi") to, inout("rcx") 256 => _);
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn main() -> ! {
    // SAFETY: the machine has this memory, and the plan is built so that its parts overlap neither
    // each other nor this program.
    unsafe {
        read(PLAN, 1, PLAN_AT);
        let plan = &*PLAN_AT.cast::<Plan>();
        for part in &plan.parts[..(plan.count as usize).min(plan.parts.len())] {
            let mut done = 0;
            while done < part.sectors {
                let count = (part.sectors - done).min(256);
                let to = part.address + u64::from(done) * 512;
                read(part.sector + done, count, to as *mut u16);
                done += count;
            }
        }
        asm!("jmp rax", in("rax") plan.entry, in("rsi") plan.parameters, options(noreturn));
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {
        // SAFETY: waits forever.
        unsafe { asm!("hlt") };
    }
}
