//! Registers of the boot processor at the kernel's entry. The other processors wait for a start-up
//! IPI and need only CPUID, MSRs and [`set_lint`].

use kvm_bindings::{kvm_dtable, kvm_fpu, kvm_lapic_state, kvm_regs, kvm_sregs};

use crate::boot::{self, BootProtocol, EntryPoint, code_segment, data_segment, task_segment};
use crate::layout::{BOOT_STACK_POINTER, GDT_START, IDT_START, PML4_START};

/// Bit 1 of RFLAGS is always set.
const RFLAGS_RESERVED: u64 = 1 << 1;
const CR0_PE: u64 = 1 << 0;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// x87 control word after FNINIT: all exceptions masked, extended precision.
const FPU_CONTROL: u16 = 0x37f;
/// MXCSR at reset: all exceptions masked.
const MXCSR: u32 = 0x1f80;

/// Offset of the local vector table's LINT0 entry (Intel SDM 3A, table 11-1).
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
const DELIVERY_MODE_SHIFT: u32 = 8;
const DELIVERY_MODE_MASK: u32 = 7 << DELIVERY_MODE_SHIFT;
const DELIVERY_NMI: u32 = 4;
const DELIVERY_EXTINT: u32 = 7;

/// General registers at `entry`.
pub fn regs(entry: &EntryPoint) -> kvm_regs {
    let common = kvm_regs {
        rflags: RFLAGS_RESERVED,
        rip: entry.rip.0,
        ..Default::default()
    };
    match entry.protocol {
        BootProtocol::Pvh => kvm_regs {
            rbx: entry.info.0,
            ..common
        },
        BootProtocol::Linux64 => kvm_regs {
            rsi: entry.info.0,
            rsp: BOOT_STACK_POINTER,
            rbp: BOOT_STACK_POINTER,
            ..common
        },
    }
}

/// Segments, control registers and EFER for `entry`. Everything else stays as in `reset`, the
/// vCPU's registers as KVM creates them (including the APIC base).
pub fn sregs(reset: kvm_sregs, entry: &EntryPoint) -> kvm_sregs {
    let data = data_segment();
    let common = kvm_sregs {
        cs: code_segment(entry.protocol),
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        tr: task_segment(),
        gdt: kvm_dtable {
            base: GDT_START,
            limit: boot::GDT_LIMIT,
            ..Default::default()
        },
        idt: kvm_dtable {
            base: IDT_START,
            limit: 7,
            ..Default::default()
        },
        ..reset
    };
    match entry.protocol {
        // All bits except PE and ET are clear, as the PVH ABI requires.
        BootProtocol::Pvh => kvm_sregs {
            cr0: CR0_PE | CR0_ET,
            cr4: 0,
            efer: 0,
            ..common
        },
        BootProtocol::Linux64 => kvm_sregs {
            cr0: CR0_PE | CR0_ET | CR0_PG,
            cr3: PML4_START,
            cr4: CR4_PAE,
            efer: EFER_LME | EFER_LMA,
            ..common
        },
    }
}

/// The floating point unit after initialization.
pub fn fpu() -> kvm_fpu {
    kvm_fpu {
        fcw: FPU_CONTROL,
        mxcsr: MXCSR,
        ..Default::default()
    }
}

/// Connects a local APIC's pins as firmware does: LINT0 to the legacy interrupt controller, LINT1
/// to NMI. Without this, an injected NMI is lost.
pub fn set_lint(lapic: &mut kvm_lapic_state) {
    set_delivery_mode(lapic, LVT_LINT0, DELIVERY_EXTINT);
    set_delivery_mode(lapic, LVT_LINT1, DELIVERY_NMI);
}

/// Changes the delivery mode of the LVT entry at `at`, which must be within the register page.
fn set_delivery_mode(lapic: &mut kvm_lapic_state, at: usize, mode: u32) {
    let mut bytes = [0; 4];
    for (byte, register) in bytes.iter_mut().zip(&lapic.regs[at..at + 4]) {
        *byte = register.cast_unsigned();
    }
    let value = u32::from_le_bytes(bytes) & !DELIVERY_MODE_MASK | mode << DELIVERY_MODE_SHIFT;
    for (register, byte) in lapic.regs[at..at + 4].iter_mut().zip(value.to_le_bytes()) {
        *register = byte.cast_signed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestAddress;

    fn entry(protocol: BootProtocol) -> EntryPoint {
        EntryPoint {
            protocol,
            rip: GuestAddress(0x10_0200),
            info: GuestAddress(0x7000),
        }
    }

    #[test]
    fn linux_is_entered_in_long_mode_with_its_parameters_in_rsi() {
        let regs = regs(&entry(BootProtocol::Linux64));
        assert_eq!((regs.rip, regs.rsi, regs.rflags), (0x10_0200, 0x7000, 2));
        let sregs = sregs(kvm_sregs::default(), &entry(BootProtocol::Linux64));
        assert_eq!((sregs.cs.l, sregs.cs.db), (1, 0));
        assert_eq!((sregs.cs.selector, sregs.ds.selector), (0x10, 0x18));
        assert_eq!((sregs.cr0, sregs.cr3), (0x8000_0011, PML4_START));
        assert_eq!((sregs.cr4, sregs.efer), (0x20, 0x500));
    }

    #[test]
    fn pvh_is_entered_in_flat_protected_mode_with_its_start_info_in_ebx() {
        let regs = regs(&entry(BootProtocol::Pvh));
        assert_eq!((regs.rip, regs.rbx, regs.rflags), (0x10_0200, 0x7000, 2));
        let reset = kvm_sregs {
            apic_base: 0xfee0_0900,
            cr0: 0x6000_0010,
            ..Default::default()
        };
        let sregs = sregs(reset, &entry(BootProtocol::Pvh));
        assert_eq!((sregs.cs.l, sregs.cs.db), (0, 1));
        assert_eq!((sregs.cr0, sregs.cr4, sregs.efer), (0x11, 0, 0));
        assert_eq!(sregs.apic_base, 0xfee0_0900);
    }

    #[test]
    fn local_interrupt_pins_are_connected_and_keep_their_masks() {
        let mut lapic = kvm_lapic_state::default();
        lapic.regs[LVT_LINT1 + 2] = 1;
        set_lint(&mut lapic);
        assert_eq!(lapic.regs[LVT_LINT0..LVT_LINT0 + 4], [0, 7, 0, 0]);
        assert_eq!(lapic.regs[LVT_LINT1..LVT_LINT1 + 4], [0, 4, 1, 0]);
    }
}
