//! The memory in a client's window while there is no pair.
//!
//! A process may not know that its pair has ended. Without memory in the window, it would execute
//! device registers, which ends its VM. So the window contains memory, with a function in place of
//! the trampoline that returns that the server is gone.

use std::io;

use base::{Access, Mapping};
use vmfunc_gate::trampoline::{ABORTED, SERVER_GONE};

/// Memory that starts with a function which returns that the server is gone. It costs only the pages
/// that are touched.
///
/// The guest's mapping of it must be removed before it is dropped.
pub struct StandIn(Mapping);

impl StandIn {
    /// Creates a stand-in of this many bytes, at least a page.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let memory = Mapping::anonymous(bytes as usize, Access::ReadWrite)?;
        let code = code();
        // SAFETY: a page is longer than the code.
        unsafe {
            code.as_ptr()
                .copy_to_nonoverlapping(memory.start(), code.len())
        };
        Ok(Self(memory))
    }

    /// Its address in this process.
    pub fn base(&self) -> *mut u8 {
        self.0.start()
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.len() as u64
    }
}

/// ENDBR64; MOV EAX, failure; MOV EDX, status; RET: a trampoline's reply, by its calling
/// convention.
fn code() -> [u8; 15] {
    let mut code = [0; 15];
    code[..5].copy_from_slice(&[0xf3, 0x0f, 0x1e, 0xfa, 0xb8]);
    code[5..9].copy_from_slice(&(SERVER_GONE as u32).to_le_bytes());
    code[9] = 0xba;
    code[10..14].copy_from_slice(&(ABORTED as u32).to_le_bytes());
    code[14] = 0xc3;
    code
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use vmfunc_gate::client::{Client, Failure};

    use super::*;

    #[test]
    fn a_delegation_finds_that_the_server_is_gone() {
        let stand_in = StandIn::new(1 << 16).unwrap();
        // SAFETY: makes the memory executable, as a guest's page table does.
        let done = unsafe {
            libc::mprotect(
                stand_in.base().cast(),
                4096,
                libc::PROT_READ | libc::PROT_EXEC,
            )
        };
        assert_eq!(done, 0);
        let window = NonNull::new(stand_in.base()).unwrap();
        // SAFETY: the window contains a valid stand-in for the gate.
        let client = unsafe { Client::at(window, 0) };
        assert_eq!(client.delegate(0, 1, 2), Err(Failure::ServerGone));
    }
}
