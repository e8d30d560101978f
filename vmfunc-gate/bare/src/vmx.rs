//! VMX root operation, as much of it as one guest in ring 3 needs (SDM volume 3, 24 to 27).

use core::arch::{asm, global_asm};

use crate::{Memory, cr, outb};

/// Why the guest stopped, and its state.
#[derive(Debug, Default)]
pub struct Exit {
    /// The basic exit reason.
    pub reason: u64,
    /// The exit qualification.
    pub qualification: u64,
    /// The vector and validity of an exception.
    pub interruption: u64,
    /// The EPT in use.
    pub view: u64,
    /// The guest's RAX.
    pub rax: u64,
    /// The guest's RBX.
    pub rbx: u64,
}

#[repr(C)]
#[derive(Default)]
struct Registers {
    rax: u64,
    rbx: u64,
    rdi: u64,
}

global_asm!(
    // rdi: registers. Returns 0 after a VM exit, 1 if the VM entry failed.
    "vm_enter:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "push rdi",
    "mov eax, 0x6c14",
    "vmwrite rax, rsp",
    "mov rdi, [rdi + 16]",
    "vmlaunch",
    "pop rdi",
    "mov eax, 1",
    "jmp 2f",
    "vm_exit:",
    "pop rdi",
    "mov [rdi], rax",
    "mov [rdi + 8], rbx",
    "xor eax, eax",
    "2:",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "cld",
    "ret",
);

unsafe extern "C" {
    fn vm_enter(registers: *mut Registers) -> u64;
    static vm_exit: u8;
    static mut gdt: [u64; 6];
}

fn read_msr(index: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: all MSRs read here exist where VMX does.
    unsafe { asm!("rdmsr", in("ecx") index, out("eax") low, out("edx") high) };
    u64::from(high) << 32 | u64::from(low)
}

fn write(field: u64, value: u64) {
    let failed: u8;
    // SAFETY: a VMCS is current; VM entry checks its contents.
    unsafe {
        asm!("vmwrite {}, {}", "setbe {}", in(reg) field, in(reg) value, out(reg_byte) failed)
    };
    assert!(failed == 0, "vmwrite {field:#x}");
}

fn read(field: u64) -> u64 {
    let value;
    // SAFETY: a VMCS is current.
    unsafe { asm!("vmread {}, {}", out(reg) value, in(reg) field) };
    value
}

/// The wanted controls, with those that the CPU requires.
fn controls(msr: u32, wanted: u64) -> u64 {
    let allowed = read_msr(msr);
    assert!(
        wanted & !(allowed >> 32) == 0,
        "controls of MSR {msr:#x}: {wanted:#x} of {allowed:#x}"
    );
    wanted | allowed & 0xffff_ffff
}

/// The only vCPU.
pub struct Vcpu {
    vmcs: u64,
}

impl Vcpu {
    /// Turns VMX on. Must be called only once.
    pub fn new(memory: &mut Memory) -> Self {
        let revision = read_msr(0x480) & 0x7fff_ffff;
        let (on, vmcs, task) = (memory.page(), memory.page(), memory.page());
        for page in [on, vmcs] {
            // SAFETY: pages of ours.
            unsafe { (page as *mut u64).write(revision) };
        }
        // SAFETY: ring 0 of a machine without an operating system: nobody else owns these.
        unsafe {
            // The base of the task state segment, in its descriptor.
            gdt[4] |= (task & 0xff_ffff) << 16 | (task >> 24 & 0xff) << 56;
            asm!("ltr {0:x}", in(reg) 0x20);
            if read_msr(0x3a) & 1 == 0 {
                asm!("wrmsr", in("ecx") 0x3a, in("eax") 5, in("edx") 0);
            }
            // VMX and FSGSBASE. NE, which VMX requires, was set at boot.
            asm!("mov cr4, {}", in(reg) cr!("cr4") | 1 << 13 | 1 << 16);
            let (on_failed, load_failed): (u8, u8);
            asm!("vmxon [{}]", "setbe {}", in(reg) &on, out(reg_byte) on_failed);
            asm!("vmclear [{}]", in(reg) &vmcs);
            asm!("vmptrld [{}]", "setbe {}", in(reg) &vmcs, out(reg_byte) load_failed);
            assert!(on_failed | load_failed == 0, "VMX cannot be turned on");
        }
        let vcpu = Self { vmcs };
        vcpu.describe(task);
        vcpu
    }

    fn describe(&self, task: u64) {
        let gdt_at = &raw const gdt as u64;
        for (field, value) in [
            (0x4000, controls(0x48d, 0)),
            // Secondary controls.
            (0x4002, controls(0x48e, 1 << 31)),
            // EPT, VM functions.
            (0x401e, controls(0x48b, 1 << 1 | 1 << 13)),
            // Host in 64-bit mode; guest in 64-bit mode.
            (0x400c, controls(0x483, 1 << 9)),
            (0x4012, controls(0x484, 1 << 9)),
            // All exceptions exit.
            (0x4004, 0xffff_ffff),
            // EPTP switching.
            (0x2018, 1),
            (0x2800, u64::MAX),
            // Host.
            (0x6c00, cr!("cr0")),
            (0x6c02, cr!("cr3")),
            (0x6c04, cr!("cr4")),
            (0x0c00, 0x10),
            (0x0c02, 8),
            (0x0c04, 0x10),
            (0x0c06, 0x10),
            (0x0c08, 0x10),
            (0x0c0a, 0x10),
            (0x0c0c, 0x20),
            (0x6c0a, task),
            (0x6c0c, gdt_at),
            (0x6c16, &raw const vm_exit as u64),
            // Guest: ring 3, 64-bit.
            (0x6800, cr!("cr0")),
            (0x0800, 0x13),
            (0x0802, 0x0b),
            (0x0804, 0x13),
            (0x0806, 0x13),
            (0x080e, 0x20),
            (0x4800, 0xffff_ffff),
            (0x4802, 0xffff_ffff),
            (0x4804, 0xffff_ffff),
            (0x4806, 0xffff_ffff),
            (0x480e, 0x67),
            (0x4814, 0xc0f3),
            (0x4816, 0xa0fb),
            (0x4818, 0xc0f3),
            (0x481a, 0xc0f3),
            // FS, GS and LDTR are not usable.
            (0x481c, 0x1_0000),
            (0x481e, 0x1_0000),
            (0x4820, 0x1_0000),
            (0x4822, 0x8b),
            (0x6820, 2),
        ] {
            write(field, value);
        }
    }

    /// Runs the guest from an address until it exits.
    pub fn run(&mut self, start: &Start) -> Exit {
        // SAFETY: the VMCS is ours. Clearing it allows VMLAUNCH again, and keeps its contents.
        unsafe {
            asm!("vmclear [{}]", in(reg) &self.vmcs);
            asm!("vmptrld [{}]", in(reg) &self.vmcs);
        }
        let protection_keys = if start.protection_keys { 1 << 22 } else { 0 };
        for (field, value) in [
            (0x681e, start.rip),
            (0x681c, start.stack),
            (0x6820, 2),
            (0x6802, start.cr3),
            (0x6804, cr!("cr4") | protection_keys),
            (0x201a, start.view),
            (0x2024, start.list),
        ] {
            write(field, value);
        }
        let mut registers = Registers {
            rdi: start.argument,
            ..Registers::default()
        };
        // SAFETY: the VMCS describes a guest whose EPTs confine it to its own pages.
        let failed = unsafe { vm_enter(&mut registers) };
        assert!(failed == 0, "VM entry failed: {}", read(0x4400));
        Exit {
            reason: read(0x4402) & 0xffff,
            qualification: read(0x6400),
            interruption: read(0x4404),
            view: read(0x201a),
            rax: registers.rax,
            rbx: registers.rbx,
        }
    }
}

/// How the guest starts.
pub struct Start {
    /// The instruction pointer.
    pub rip: u64,
    /// The upper end of its stack.
    pub stack: u64,
    /// Its page table.
    pub cr3: u64,
    /// Its EPT.
    pub view: u64,
    /// The page with the list of EPTs.
    pub list: u64,
    /// Passed in RDI.
    pub argument: u64,
    /// Whether CR4.PKE is set.
    pub protection_keys: bool,
}

/// Ends the emulator.
pub fn shut_down() -> ! {
    for byte in *b"Shutdown" {
        outb(0x8900, byte);
    }
    loop {
        // SAFETY: waits.
        unsafe { asm!("hlt") };
    }
}
