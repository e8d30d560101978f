//! What is at a client's window while nobody is paired.
//!
//! A process that was paired may not know that it is not any more. Where nothing is, it would
//! execute a device's registers, which ends its VM. So it finds memory there, and in place of the
//! trampoline a function that says that the server is gone.

use std::io;

use base::{Access, Mapping};
use vmfunc_gate::trampoline::{ABORTED, SERVER_GONE};

/// Memory of its own, with that function at its start. It costs what is touched.
///
/// The guest's view of it is removed before it is dropped.
pub struct StandIn(Mapping);

impl StandIn {
    /// So many bytes, a page at least.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let memory = Mapping::anonymous(bytes as usize, Access::ReadWrite)?;
        let code = code();
        // SAFETY: a page is longer.
        unsafe {
            code.as_ptr()
                .copy_to_nonoverlapping(memory.start(), code.len())
        };
        Ok(Self(memory))
    }

    /// Where it is in this process.
    pub fn base(&self) -> *mut u8 {
        self.0.start()
    }

    /// How long it is.
    pub fn bytes(&self) -> u64 {
        self.0.len() as u64
    }
}

/// ENDBR64; MOV EAX, why; MOV EDX, status; RET: a trampoline's reply, by its calling convention.
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
        // SAFETY: something like the gate is there.
        let client = unsafe { Client::at(window, 0) };
        assert_eq!(client.delegate(0, 1, 2), Err(Failure::ServerGone));
    }
}
