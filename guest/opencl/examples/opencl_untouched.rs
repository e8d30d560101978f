//! Copies from and to memory of the window while the application's own process can neither read nor
//! write that memory: an intermediate copy in this process would raise a fatal signal.

use std::ptr::{null, null_mut};

use device::{Device, check, cl};

mod device;

const ALLOC_HOST_PTR: u64 = 1 << 4;
const MAP_READ_WRITE: u64 = 3;
/// The size of the largest copy in bytes.
const LARGEST: usize = 4 << 20;

fn byte(at: usize) -> u8 {
    (at * 7 + at / 4096) as u8
}

/// Memory of the window, mapped permanently.
struct Mapped {
    start: *mut u8,
    length: usize,
}

impl Mapped {
    fn new(device: &Device, length: usize) -> Result<Self, String> {
        let buffer = device.buffer(ALLOC_HOST_PTR, length, null_mut())?;
        let mut code = 0;
        let start = cl!(
            device.api,
            clEnqueueMapBuffer(
                device.queue,
                buffer,
                1,
                MAP_READ_WRITE,
                0,
                length,
                0,
                null(),
                null_mut(),
                &raw mut code
            )
        );
        check(code, "mapping")?;
        Ok(Self {
            start: start.cast(),
            length,
        })
    }

    /// Allows or forbids this process to access it.
    fn allow(&self, allowed: bool) -> Result<(), String> {
        let rights = if allowed {
            libc::PROT_READ | libc::PROT_WRITE
        } else {
            libc::PROT_NONE
        };
        // SAFETY: pages of a mapping of this process, to which it holds no references now.
        match unsafe { libc::mprotect(self.start.cast(), self.length, rights) } {
            0 => Ok(()),
            _ => Err(format!(
                "{:p} is not to be protected: {}",
                self.start,
                std::io::Error::last_os_error()
            )),
        }
    }

    /// Its bytes, while access is allowed.
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped permanently, and nobody else uses it meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }
}

fn main() -> Result<(), String> {
    let device = Device::open(None)?;
    let mut from = Mapped::new(&device, LARGEST)?;
    let mut to = Mapped::new(&device, LARGEST)?;
    for length in [4096, 64 << 10, 1 << 20, LARGEST] {
        for (at, byte_there) in from.bytes()[..length].iter_mut().enumerate() {
            *byte_there = byte(at);
        }
        to.bytes().fill(0);
        from.allow(false)?;
        to.allow(false)?;
        device.there_and_back(from.start, to.start, length)?;
        from.allow(true)?;
        to.allow(true)?;
        let mut bytes = to.bytes()[..length].iter().enumerate();
        if bytes.any(|(at, there)| *there != byte(at)) {
            return Err(format!("of {length} bytes, others came back"));
        }
        println!("{length} bytes there and back, untouched");
    }
    Ok(())
}
