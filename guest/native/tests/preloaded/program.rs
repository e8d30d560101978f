//! What a CUDA library does with device files, by hand.

use std::{ffi::CString, io, os::fd::RawFd, ptr};

pub const CONTROL: u32 = 0xc020_462a;
pub const ALLOCATE: u32 = 0xc030_462b;
pub const FREE: u32 = 0xc010_4629;
pub const MAP: u32 = 0xc038_464e;
pub const UNMAP: u32 = 0xc020_464f;
pub const DESCRIPTOR: u32 = 0xc038_4627;
pub const REGISTER: u32 = 0xc004_46c9;
pub const EVENT: u32 = 0xc010_46ce;

pub fn open(path: &str) -> io::Result<RawFd> {
    let path = CString::new(path).expect("no zero");
    // SAFETY: a valid string.
    let file = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    if file < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(file)
    }
}

pub fn call(file: RawFd, command: u32, block: &mut [u8]) -> io::Result<()> {
    // SAFETY: the block is as long as the command says.
    let result = unsafe { libc::ioctl(file, command.into(), block.as_mut_ptr()) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

pub fn put(block: &mut [u8], at: usize, value: u32) {
    block[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

pub fn put_long(block: &mut [u8], at: usize, value: u64) {
    block[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

pub fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"))
}

/// A client with a GPU: control file, GPU file, client.
pub struct Opened {
    pub control: RawFd,
    pub gpu: RawFd,
    pub client: u32,
}

pub const DEVICE: u32 = 0x5c00_0002;

impl Opened {
    pub fn new() -> Self {
        let control = open("/dev/nvidiactl").expect("it opens");
        let gpu = open("/dev/nvidia0").expect("it opens");
        let mut block = [0; 4];
        put(&mut block, 0, control.cast_unsigned());
        call(gpu, REGISTER, &mut block).expect("it registers");
        assert_eq!(
            word(&block, 0),
            control.cast_unsigned(),
            "the program's own number"
        );
        let mut block = [0; 48];
        put(&mut block, 12, 0x41);
        call(control, ALLOCATE, &mut block).expect("a client");
        let opened = Self {
            control,
            gpu,
            client: word(&block, 8),
        };
        assert_eq!(
            opened.allocate(opened.client, DEVICE, 0x80, &mut [0; 56]),
            0
        );
        opened
    }

    pub fn allocate(&self, parent: u32, handle: u32, class: u32, parameters: &mut [u8]) -> u32 {
        let mut block = [0; 48];
        for (at, value) in [(0, self.client), (4, parent), (8, handle), (12, class)] {
            put(&mut block, at, value);
        }
        let address = parameters.as_mut_ptr() as u64;
        put_long(&mut block, 16, address);
        call(self.control, ALLOCATE, &mut block).expect("the call is made");
        assert_eq!(
            block[16..24],
            address.to_le_bytes(),
            "the program's own pointer"
        );
        word(&block, 40)
    }

    pub fn memory(&self, handle: u32, class: u32, length: u64) -> u32 {
        let mut parameters = [0; 128];
        put_long(&mut parameters, 64, length);
        self.allocate(DEVICE, handle, class, &mut parameters)
    }

    pub fn control(&self, client: u32, object: u32, command: u32, parameters: &mut [u8]) -> u32 {
        let mut block = [0; 32];
        for (at, value) in [
            (0, client),
            (4, object),
            (8, command),
            (24, parameters.len() as u32),
        ] {
            put(&mut block, at, value);
        }
        put_long(&mut block, 16, parameters.as_mut_ptr() as u64);
        call(self.control, CONTROL, &mut block).expect("the call is made");
        word(&block, 28)
    }

    pub fn free(&self, handle: u32) -> u32 {
        self.try_free(handle).expect("the call is made")
    }

    pub fn try_free(&self, handle: u32) -> io::Result<u32> {
        let mut block = [0; 16];
        for (at, value) in [(0, self.client), (4, DEVICE), (8, handle)] {
            put(&mut block, at, value);
        }
        call(self.control, FREE, &mut block)?;
        Ok(word(&block, 12))
    }

    /// Asks for a mapping on a new file; answers the status, the mapping's number, and the file.
    pub fn map(&self, handle: u32, length: u64) -> (u32, u64, RawFd) {
        let file = open("/dev/nvidia0").expect("it opens");
        let mut block = [0; 56];
        for (at, value) in [
            (0, self.client),
            (4, DEVICE),
            (8, handle),
            (48, file.cast_unsigned()),
        ] {
            put(&mut block, at, value);
        }
        put_long(&mut block, 24, length);
        call(self.control, MAP, &mut block).expect("the call is made");
        assert_eq!(
            word(&block, 48),
            file.cast_unsigned(),
            "the program's own number"
        );
        (
            word(&block, 40),
            u64::from_le_bytes(block[32..40].try_into().expect("eight bytes")),
            file,
        )
    }

    /// Hands memory to the driver. Answers the status.
    pub fn describe(&self, handle: u32, address: *mut u64, length: u64) -> u32 {
        let described = self.try_describe(handle, address, length);
        described.expect("the call is made")
    }

    pub fn try_describe(&self, handle: u32, address: *mut u64, length: u64) -> io::Result<u32> {
        let mut block = [0; 56];
        let words = [
            (0, self.client),
            (4, DEVICE),
            (8, handle),
            (12, 0x71),
            (16, 0x4000_1010),
            (48, u32::MAX),
        ];
        for (at, value) in words {
            put(&mut block, at, value);
        }
        put_long(&mut block, 24, address as u64);
        put_long(&mut block, 32, length - 1);
        call(self.gpu, DESCRIPTOR, &mut block)?;
        assert_eq!(
            block[24..32],
            (address as u64).to_le_bytes(),
            "the program's own address"
        );
        Ok(word(&block, 40))
    }
}

pub fn mmap(file: RawFd, length: usize, flags: i32, offset: i64) -> io::Result<*mut u64> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping.
    let mapped = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, file, offset) };
    if mapped == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(mapped.cast())
    }
}

pub fn close(file: RawFd) {
    // SAFETY: the descriptor is the caller's.
    unsafe { libc::close(file) };
}
