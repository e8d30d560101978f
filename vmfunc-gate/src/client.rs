//! The client's side, inside a guest: calls handlers.

use core::{mem, ptr::NonNull};

use thiserror::Error;

use crate::{trampoline, window};

/// Why a handler did not return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// There is no handler with this index.
    #[error("the server has no handler {0}")]
    NoHandler(u64),
    /// Another thread on this vCPU was interrupted in the server, and has to finish first.
    #[error("the vCPU is in the server for another thread: try again, or use another vCPU")]
    Busy,
    /// The server is gone, or was unpaired.
    #[error("the server is gone, or was unpaired: pair with another one")]
    ServerGone,
    /// The handler used memory that the server does not have.
    #[error("the handler used memory that the server does not have")]
    Violation,
    /// An exception in the handler ended it.
    #[error("an exception in the handler ended it")]
    Exception,
    /// The handler executed something that needs the hypervisor.
    #[error("the handler did what needs the hypervisor, and was ended")]
    Exit,
    /// The thread was interrupted in the server, and continued on another vCPU.
    #[error("the thread was moved to another vCPU inside the server: pin it")]
    Lost,
    /// The server's own vCPU is running slow work.
    #[error("the server is at slow work: try again")]
    Awake,
    /// A reply that this version does not know.
    #[error("the gate replied {status} with {value:#x}, which this library does not know")]
    Unknown {
        /// [`trampoline::Reply::status`].
        status: u64,
        /// [`trampoline::Reply::value`].
        value: u64,
    },
}

/// A window that is paired with a server.
#[derive(Debug)]
pub struct Client {
    window: NonNull<u8>,
    shared: usize,
}

impl Client {
    /// The client whose window is at this address, with this many bytes of shared memory.
    ///
    /// # Safety
    /// The gate's module, or an equivalent, has mapped a window there, which exists for as long as
    /// this is used, and FSGSBASE is enabled. Threads that use it are pinned to the window's vCPU.
    #[must_use]
    pub const unsafe fn at(window: NonNull<u8>, shared: usize) -> Self {
        Self { window, shared }
    }

    /// Executes a handler in the server, on this vCPU. Causes no exit, and executes fewer than 150
    /// instructions in addition to the handler's.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn delegate(&self, handler: u64, first: u64, second: u64) -> Result<u64, Failure> {
        // SAFETY: the trampoline's code is at the start of a window.
        let delegate: trampoline::Delegate =
            unsafe { mem::transmute(self.window.as_ptr().cast_const()) };
        // SAFETY: the code follows the ABI. Handlers are confined to the server and to the shared
        // memory, which is only accessed through raw pointers.
        let reply = unsafe { delegate(handler, first, second) };
        outcome(handler, reply)
    }

    /// The memory that both sides read and write, at the same address. The server may change it at
    /// any time: read each value once, then check it.
    #[must_use]
    pub fn shared(&self) -> NonNull<[u8]> {
        // SAFETY: the window extends that far.
        let start = unsafe { self.window.add(window::SHARED as usize) };
        NonNull::slice_from_raw_parts(start, self.shared)
    }
}

fn outcome(handler: u64, reply: trampoline::Reply) -> Result<u64, Failure> {
    let trampoline::Reply { value, status } = reply;
    Err(match (status, value) {
        (trampoline::DONE, value) => return Ok(value),
        (trampoline::NO_HANDLER, _) => Failure::NoHandler(handler),
        (trampoline::BUSY, _) => Failure::Busy,
        (trampoline::ABORTED, trampoline::SERVER_GONE) => Failure::ServerGone,
        (trampoline::ABORTED, trampoline::VIOLATION) => Failure::Violation,
        (trampoline::ABORTED, trampoline::EXCEPTION) => Failure::Exception,
        (trampoline::ABORTED, trampoline::EXIT) => Failure::Exit,
        (trampoline::ABORTED, trampoline::LOST) => Failure::Lost,
        (trampoline::ABORTED, trampoline::AWAKE) => Failure::Awake,
        (status, value) => Failure::Unknown { status, value },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_told_apart() {
        let reply = |value, status| outcome(7, trampoline::Reply { value, status });
        assert_eq!(reply(5, trampoline::DONE), Ok(5));
        assert_eq!(reply(0, trampoline::NO_HANDLER), Err(Failure::NoHandler(7)));
        assert_eq!(reply(0, trampoline::BUSY), Err(Failure::Busy));
        let gone = reply(trampoline::SERVER_GONE, trampoline::ABORTED);
        assert_eq!(gone, Err(Failure::ServerGone));
        let unknown = Failure::Unknown {
            status: trampoline::ABORTED,
            value: 99,
        };
        assert_eq!(reply(99, trampoline::ABORTED), Err(unknown));
    }
}
