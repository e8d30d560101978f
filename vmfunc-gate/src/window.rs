//! The window: pages at the same guest-virtual addresses in both address spaces.
//!
//! The client finds the trampoline there, and so does the CPU on the server's side when it fetches
//! the instruction after VMFUNC. `module/gate.h` contains the same numbers for the kernel module.
//!
//! Wormhole's stack is shared memory, mapped in both address spaces. This one is mapped at the same
//! address too, but only on the server's side: in the client's memory, other vCPUs and processes of
//! the client could change the return addresses of a handler while it runs. Nothing is lost by
//! that, since what the client has to save goes to its own stack, and arguments pass through the
//! shared memory.

/// The size of a page in bytes.
pub const PAGE: u64 = 4096;

/// The offset of the trampoline in the window. Execute-only in both EPTs, the same page in both.
pub const TRAMPOLINE: u64 = 0;

/// The offset of the [`Table`]. Read-only in both EPTs, the same page in both.
pub const TABLE: u64 = PAGE;

/// The offset of the page that distinguishes the sides, a [`Private`]. Two different pages: the
/// client may write its own one, and the server's is read-only.
pub const PRIVATE: u64 = 2 * PAGE;

/// The offset of the handlers' stack, in the server view only.
pub const STACK: u64 = 4 * PAGE;

/// The upper end of the handlers' stack. Nothing is mapped below and above it.
pub const STACK_END: u64 = 8 * PAGE;

/// The number of bytes at the stack's end that the kernel module leaves unused: functions that pass
/// arguments on may read some above their frame that were not passed.
pub const STACK_SPARE: u64 = 64;

/// The offset of the memory for arguments and results, readable and writable, the same in both.
pub const SHARED: u64 = 16 * PAGE;

/// The maximum number of pages of shared memory: 16 MiB.
pub const SHARED_PAGES: u64 = 4096;

/// The maximum number of handlers of a server: what fits into the table's page.
pub const HANDLERS: usize = 504;

/// The page that tells the trampoline how to enter the server. Written by the hypervisor while a
/// pair is built, read-only afterwards.
#[repr(C, align(4096))]
pub struct Table {
    /// The server's FS base.
    pub fs_base: u64,
    /// The server's GS base.
    pub gs_base: u64,
    /// The upper end of the handlers' stack, a multiple of 16. A server-virtual address.
    pub stack: u64,
    /// MXCSR for handlers; [`MXCSR`] unless the server's ABI says otherwise.
    pub mxcsr: u32,
    /// PKRU for handlers, used with [`FEATURE_PKU`].
    pub pkru: u32,
    /// What the client's vCPU has enabled: a sum of `FEATURE_` constants.
    pub features: u64,
    /// The number of valid `handlers`, at most [`HANDLERS`].
    pub count: u64,
    /// The size of the shared memory in bytes.
    pub shared: u64,
    /// Reserved, 0.
    pub reserved: u64,
    /// The server-virtual addresses of the handlers.
    pub handlers: [u64; HANDLERS],
}

/// MXCSR as specified by the System V ABI: all exceptions masked, round to nearest.
pub const MXCSR: u32 = 0x1f80;

/// The vCPU has AVX enabled in XCR0: vector registers are cleared with VZEROALL.
pub const FEATURE_AVX: u64 = 1;

/// The vCPU has protection keys enabled (CR4.PKE): PKRU is switched.
pub const FEATURE_PKU: u64 = 2;

/// A request to the kernel module: the server's kernel must not be in the view, so that a handler's
/// system call ends the delegation. The trampoline ignores it.
pub const USER_ONLY: u64 = 4;

/// The page that differs between the sides. All but the first field exist only for the client.
#[repr(C, align(4096))]
pub struct Private {
    /// [`CLIENT`] or [`SERVER`].
    pub side: u64,
    /// The client's stack pointer during a delegation.
    pub stack: u64,
    /// 1 during a delegation: another one on the same vCPU is refused.
    pub busy: u64,
    /// The client's FS base during a delegation.
    pub fs_base: u64,
    /// The client's GS base during a delegation.
    pub gs_base: u64,
    /// The client's PKRU during a delegation, with [`FEATURE_PKU`].
    pub pkru: u64,
}

/// [`Private::side`] in the client's address space.
pub const CLIENT: u64 = 1;

/// [`Private::side`] in the server view.
pub const SERVER: u64 = 2;

const _: () = assert!(size_of::<Table>() == PAGE as usize);
const _: () = assert!(size_of::<Private>() == PAGE as usize);

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    use super::*;
    use crate::trampoline;

    /// A number from the kernel module's header.
    fn defined(name: &str) -> u64 {
        let header = include_str!("../module/gate.h");
        let found = header.lines().find_map(|line| {
            let (found, value) = line.strip_prefix("#define ")?.split_once(' ')?;
            (found == name).then_some(value)
        });
        let value = found.unwrap();
        value.strip_prefix("0x").map_or_else(
            || value.parse().unwrap(),
            |digits| u64::from_str_radix(digits, 16).unwrap(),
        )
    }

    #[test]
    fn the_kernel_module_has_the_same_window() {
        for (name, here) in [
            ("GATE_TRAMPOLINE", TRAMPOLINE),
            ("GATE_TABLE", TABLE),
            ("GATE_PRIVATE", PRIVATE),
            ("GATE_STACK", STACK),
            ("GATE_STACK_END", STACK_END),
            ("GATE_STACK_SPARE", STACK_SPARE),
            ("GATE_SHARED", SHARED),
            ("GATE_SHARED_PAGES", SHARED_PAGES),
            ("GATE_MAX_HANDLERS", HANDLERS as u64),
            ("GATE_FS", offset_of!(Table, fs_base) as u64),
            ("GATE_GS", offset_of!(Table, gs_base) as u64),
            ("GATE_STACK_TOP", offset_of!(Table, stack) as u64),
            ("GATE_MXCSR", offset_of!(Table, mxcsr) as u64),
            ("GATE_PKRU", offset_of!(Table, pkru) as u64),
            ("GATE_FEATURES", offset_of!(Table, features) as u64),
            ("GATE_COUNT", offset_of!(Table, count) as u64),
            ("GATE_SHARED_BYTES", offset_of!(Table, shared) as u64),
            ("GATE_HANDLERS", offset_of!(Table, handlers) as u64),
            ("GATE_SIDE", offset_of!(Private, side) as u64),
            ("GATE_SAVED_STACK", offset_of!(Private, stack) as u64),
            ("GATE_BUSY", offset_of!(Private, busy) as u64),
            ("GATE_SAVED_FS", offset_of!(Private, fs_base) as u64),
            ("GATE_SAVED_GS", offset_of!(Private, gs_base) as u64),
            ("GATE_SAVED_PKRU", offset_of!(Private, pkru) as u64),
            ("GATE_CLIENT", CLIENT),
            ("GATE_SERVER", SERVER),
            ("GATE_FEATURE_AVX", FEATURE_AVX),
            ("GATE_FEATURE_PKU", FEATURE_PKU),
            ("GATE_USER_ONLY", USER_ONLY),
            ("GATE_DONE", trampoline::DONE),
            ("GATE_NO_HANDLER", trampoline::NO_HANDLER),
            ("GATE_ABORTED", trampoline::ABORTED),
            ("GATE_BUSY_REPLY", trampoline::BUSY),
            ("GATE_SERVER_GONE", trampoline::SERVER_GONE),
            ("GATE_VIOLATION", trampoline::VIOLATION),
            ("GATE_EXCEPTION", trampoline::EXCEPTION),
            ("GATE_EXIT", trampoline::EXIT),
            ("GATE_LOST", trampoline::LOST),
            ("GATE_AWAKE", trampoline::AWAKE),
        ] {
            assert_eq!(defined(name), here, "{name}");
        }
    }
}
