//! The gate's port: the interface between a machine's PCI function and a guest's processes.
//!
//! | BAR | contents |
//! |---|---|
//! | 0 | [registers], trapped; and a page with the doorbell |
//! | 2 | the [window](crate::window), 64-bit: pages of the gate, where they exist |
//!
//! A process in ring 3 of the guest writes a [`Command`] with an instruction of its own: the
//! machine takes the page table and the segment bases from the vCPU that executes it.
//!
//! A server's process writes its handlers and freezes. It continues when it is woken for slow work
//! ([`State::Awake`]) or when the server was given up ([`State::Ended`]). A client's process
//! requests a connection, waits until it is established, and requests to be paired.

use crate::window;

/// The PCI vendor ID of the port.
pub const VENDOR: u16 = 0x4741;
/// The PCI device ID of the port.
pub const DEVICE: u16 = 0x4754;
/// The PCI class: another system peripheral.
pub const CLASS: u32 = 0x08_8000;

/// The registers in BAR 0: 32 bits each, little-endian, unless stated otherwise. Others read as
/// zero.
pub mod registers {
    /// The size of BAR 0.
    pub const SIZE: u64 = 0x4000;
    /// Reads [`MAGIC_VALUE`].
    pub const MAGIC: u64 = 0x00;
    /// Reads [`INTERFACE`].
    pub const VERSION: u64 = 0x04;
    /// Reads a [`Role`](super::Role).
    pub const ROLE: u64 = 0x08;
    /// Reads a [`State`](super::State).
    pub const STATE: u64 = 0x0c;
    /// Reads a [`Reason`](super::Reason) for the state, or for the last command's failure.
    pub const REASON: u64 = 0x10;
    /// Reads the corresponding error number, or 0.
    pub const ERROR: u64 = 0x14;
    /// Accepts a [`Command`](super::Command).
    pub const COMMAND: u64 = 0x18;
    /// For a server: the number of handlers.
    pub const COUNT: u64 = 0x1c;
    /// The virtual address of the window, 64 bits.
    pub const WINDOW: u64 = 0x20;
    /// For a client: a sum of `FEATURE_` constants of [`window`](crate::window).
    pub const FEATURES: u64 = 0x28;
    /// The number of pages of memory that client and server share; for a server, only while it has
    /// a client.
    pub const SHARED: u64 = 0x2c;
    /// Reads 1 while a client is paired and handlers can make system calls.
    pub const KERNEL: u64 = 0x30;
    /// For a server: PKRU for handlers.
    pub const PKRU: u64 = 0x34;
    /// Reads a sum of the [`Lack`](super::Lack)s of the host.
    pub const LACKS: u64 = 0x38;
    /// For a client: 1 to be paired only if handlers can make system calls.
    pub const NEEDS_KERNEL: u64 = 0x3c;
    /// For a client: reads the number of VM exits of the vCPU in the server, modulo 2^32. The
    /// host's interrupts are not counted.
    pub const EXITS: u64 = 0x40;
    /// For a server: addresses of handlers, 64 bits each.
    pub const HANDLERS: u64 = 0x1000;
    /// For a client: a write wakes the server, without an exit to the machine.
    pub const DOORBELL: u64 = 0x2000;

    /// "GATE".
    pub const MAGIC_VALUE: u32 = u32::from_le_bytes(*b"GATE");
    /// The version of the register interface.
    pub const INTERFACE: u32 = 1;
}

/// The size of BAR 2, a power of two that has room for the largest window.
pub const WINDOW_BAR: u64 = 32 << 20;

macro_rules! numbered {
    ($(#[$of:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $number:literal,)* }) => {
        $(#[$of])*
        #[derive(Clone, Copy, Debug, Eq, PartialEq)]
        #[repr(u32)]
        pub enum $name {
            $($(#[$doc])* $variant = $number,)*
        }

        impl $name {
            /// The variant with this number.
            #[must_use]
            pub const fn from_number(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

numbered! {
    /// The role of a port.
    Role {
        /// A process of this VM serves.
        Server = 1,
        /// A process of this VM delegates.
        Client = 2,
    }
}

numbered! {
    /// The state of a port.
    State {
        /// Nothing.
        Idle = 0,
        /// A client waits for the server's machine.
        Connecting = 1,
        /// A client can be paired.
        Connected = 2,
        /// A client is paired.
        Paired = 3,
        /// The last command failed.
        Failed = 4,
        /// A server's VM is frozen, and clients enter it. Its processes do not see this state.
        Frozen = 5,
        /// A server was woken for slow work, and clients wait.
        Awake = 6,
        /// A server was given up.
        Ended = 7,
    }
}

numbered! {
    /// A command.
    Command {
        /// For a server: register the handlers, unless that was done, and freeze.
        Freeze = 1,
        /// For a client: request the server from the server's machine.
        Connect = 2,
        /// For a client: pair the process that writes this.
        Pair = 3,
        /// For a client: end the pair and the connection.
        Unpair = 4,
        /// For a server: give it up.
        Stop = 5,
    }
}

numbered! {
    /// Why a port is in its state.
    Reason {
        /// There is nothing to explain.
        None = 0,
        /// The host lacks something: see [`registers::LACKS`].
        Host = 1,
        /// The module refused: see [`registers::ERROR`].
        Refused = 2,
        /// The server's machine cannot be reached: see [`registers::ERROR`].
        Unreachable = 3,
        /// The server already has a client.
        Taken = 4,
        /// No process serves in the server's VM now.
        NotServing = 5,
        /// The other side's machine or process has ended.
        Gone = 6,
        /// The server's VM was resumed by its owner.
        Resumed = 7,
        /// The module gave the server up: a client did something irreversible in its kernel.
        Lost = 8,
        /// The port was not given what it needs, or not by a process in ring 3.
        Invalid = 9,
        /// Handlers could not make system calls, which the client requires: another process of it
        /// may succeed.
        NoKernel = 10,
        /// The kernels differ: they are not the same image at the same addresses, with the same end
        /// of RAM. Handlers could not make system calls.
        OtherKernel = 11,
    }
}

numbered! {
    /// What a host may lack for the gate. The numbers can be added.
    Lack {
        /// VT-x.
        VtX = 1,
        /// VMFUNC.
        Vmfunc = 2,
        /// FSGSBASE.
        Fsgsbase = 4,
        /// EPT, or unrestricted guests.
        Ept = 8,
        /// A kernel that the module supports.
        Kernel = 16,
        /// The module.
        Module = 32,
    }
}

impl Lack {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::VtX,
        Self::Vmfunc,
        Self::Fsgsbase,
        Self::Ept,
        Self::Kernel,
        Self::Module,
    ];

    /// What is missing, with a remedy.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::VtX => "no VT-x: an Intel CPU, with VT-x switched on in the firmware",
            Self::Vmfunc => {
                "no VMFUNC: Intel CPUs since 2013 have it, most virtual machines do not"
            }
            Self::Fsgsbase => {
                "no FSGSBASE: a newer CPU, and no nofsgsbase on the kernel's command line"
            }
            Self::Ept => {
                "no EPT or no unrestricted guests: load kvm_intel without ept=0 and \
                 unrestricted_guest=0"
            }
            Self::Kernel => "another kernel than 6.1 or 6.12, which the module is made for",
            Self::Module => "no module: build and load gantry_gate (vmfunc-gate/module, with DKMS)",
        }
    }
}

/// Slow work, in the first page of the shared memory. Neither side trusts anything here.
#[repr(C, align(4096))]
pub struct Slow {
    /// One of the constants below.
    pub state: u64,
    /// The request's first argument.
    pub first: u64,
    /// Its second argument.
    pub second: u64,
    /// The answer.
    pub answer: u64,
}

/// [`Slow::state`]: there is no request.
pub const SLOW_NOTHING: u64 = 0;
/// [`Slow::state`]: a handler has requested it.
pub const SLOW_ASKED: u64 = 1;
/// [`Slow::state`]: the server's process is working.
pub const SLOW_BEGUN: u64 = 2;
/// [`Slow::state`]: the answer is available.
pub const SLOW_DONE: u64 = 3;

/// The number of bytes at the start of the shared memory that the library reserves for [`Slow`].
pub const SLOW_BYTES: u64 = size_of::<Slow>() as u64;

const _: () = assert!(window::SHARED + window::SHARED_PAGES * window::PAGE <= WINDOW_BAR);
const _: () = assert!(registers::HANDLERS + 8 * window::HANDLERS as u64 <= registers::DOORBELL);
const _: () = assert!(SLOW_BYTES == window::PAGE);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_and_others_are_nothing() {
        assert_eq!(State::from_number(6), Some(State::Awake));
        assert_eq!(State::from_number(8), None);
        assert_eq!(Command::from_number(0), None);
        for lack in Lack::ALL {
            assert_eq!(Lack::from_number(lack as u32), Some(lack));
        }
    }
}
