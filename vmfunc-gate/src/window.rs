//! The window: pages that lie at one guest-virtual address in both address spaces.
//!
//! The client finds the trampoline there, and so does the CPU on the server's side when it
//! fetches the instruction after VMFUNC. The stack lies elsewhere, in the server's memory only.

/// Size of a page in bytes.
pub const PAGE: u64 = 4096;

/// Offset of the trampoline in the window. Execute-only in both EPTs, the same page in both.
pub const TRAMPOLINE: u64 = 0;

/// Offset of the [`Table`]. Read-only in both EPTs, the same page in both.
pub const TABLE: u64 = PAGE;

/// Offset of the page that tells the sides apart, a [`Private`]. Two different pages: the client may write
/// its own one, the server's is read-only.
pub const PRIVATE: u64 = 2 * PAGE;

/// Offset of the memory for arguments and results, readable and writable, the same in both.
pub const SHARED: u64 = 3 * PAGE;

/// Most handlers that a server can have: what fits into the table's page.
pub const HANDLERS: usize = 504;

/// The page that tells the trampoline how to enter the server. Written by the hypervisor while a
/// pair is built, read-only afterwards.
#[repr(C, align(4096))]
pub struct Table {
    /// Server's FS base.
    pub fs_base: u64,
    /// Server's GS base.
    pub gs_base: u64,
    /// Upper end of the stack of handlers, a multiple of 16. A server-virtual address.
    pub stack: u64,
    /// MXCSR for handlers; [`MXCSR`] unless the server's ABI says otherwise.
    pub mxcsr: u32,
    /// PKRU for handlers, used with [`FEATURE_PKU`].
    pub pkru: u32,
    /// What the client's vCPU has enabled: a sum of `FEATURE_` constants.
    pub features: u64,
    /// How many of the `handlers` are valid, at most [`HANDLERS`].
    pub count: u64,
    /// Reserved, 0.
    pub reserved: [u64; 2],
    /// Server-virtual addresses of the handlers.
    pub handlers: [u64; HANDLERS],
}

/// MXCSR as the System V ABI has it: all exceptions masked, round to nearest.
pub const MXCSR: u32 = 0x1f80;

/// The vCPU has AVX enabled in XCR0: vector registers are cleared with VZEROALL.
pub const FEATURE_AVX: u64 = 1;

/// The vCPU has protection keys enabled (CR4.PKE): PKRU is switched.
pub const FEATURE_PKU: u64 = 2;

/// The page that differs between the sides.
#[repr(C, align(4096))]
pub struct Private {
    /// [`CLIENT`] or [`SERVER`].
    pub side: u64,
    /// The client's stack pointer during a delegation; unused on the server's side.
    pub stack: u64,
}

/// [`Private::side`] in the client's address space.
pub const CLIENT: u64 = 1;

/// [`Private::side`] in the server view.
pub const SERVER: u64 = 2;

const _: () = assert!(size_of::<Table>() == PAGE as usize);
const _: () = assert!(size_of::<Private>() == PAGE as usize);
