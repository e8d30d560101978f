//! Finds the port and maps it.

use std::{
    format, fs,
    io::{self, ErrorKind},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    ptr::{null_mut, with_exposed_provenance_mut},
    vec::Vec,
};

use super::{Error, WINDOW, failed};
use crate::{
    port::{self, Command, Lack, Reason, Role, State, registers as at},
    window,
};

/// All PCI functions.
const FUNCTIONS: &str = "/sys/bus/pci/devices";

/// The port's registers, mapped.
#[derive(Debug)]
pub struct Port {
    registers: *mut u8,
    /// Its folder in sysfs.
    folder: PathBuf,
}

// SAFETY: device registers, which can be accessed from any thread.
unsafe impl Send for Port {}

/// Opens the file that contains the gate's pages, at their guest-physical addresses.
pub fn open_memory() -> Result<fs::File, Error> {
    let opened = fs::File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open("/dev/mem");
    opened.map_err(|source| Error::Guest {
        what: "open /dev/mem, which has the gate's pages",
        source,
    })
}

impl Port {
    /// The first port with this role.
    pub fn find(role: Role) -> Result<Self, Error> {
        let named = match role {
            Role::Server => "server",
            Role::Client => "client",
        };
        let functions = fs::read_dir(FUNCTIONS).map_err(|source| Error::Guest {
            what: "list PCI functions (is sysfs mounted?)",
            source,
        })?;
        for function in functions.filter_map(Result::ok) {
            let folder = function.path();
            if !is_port(&folder) {
                continue;
            }
            let port = Self::open(folder)?;
            let fits = port.read(at::MAGIC) == at::MAGIC_VALUE
                && port.read(at::VERSION) == at::INTERFACE
                && port.read(at::ROLE) == role as u32;
            if !fits {
                continue;
            }
            let lacks = port.read(at::LACKS);
            if lacks != 0 {
                let all = Lack::ALL.into_iter();
                let lacks: Vec<_> = all.filter(|lack| lacks & *lack as u32 != 0).collect();
                return Err(Error::Host(lacks));
            }
            return Ok(port);
        }
        Err(Error::NoPort(named))
    }

    fn open(folder: PathBuf) -> Result<Self, Error> {
        let guest = |what| move |source| Error::Guest { what, source };
        fs::write(folder.join("enable"), "1").map_err(guest("enable the gate's port"))?;
        let file = fs::File::options()
            .read(true)
            .write(true)
            .open(folder.join("resource0"))
            .map_err(guest("open the gate's registers"))?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let registers = unsafe {
            libc::mmap(
                null_mut(),
                at::SIZE as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if registers == libc::MAP_FAILED {
            return Err(failed("map the gate's registers"));
        }
        Ok(Self {
            registers: registers.cast(),
            folder,
        })
    }

    /// Maps the window where the trampoline expects it.
    pub fn map_window(&self, shared_pages: u64) -> Result<Window, Error> {
        let at_gpa = self.window_address()?;
        let memory = open_memory()?;
        let length = (window::SHARED + shared_pages * window::PAGE) as usize;
        // SAFETY: nothing of this process is at that address, or the call fails.
        let at = unsafe {
            libc::mmap(
                with_exposed_provenance_mut(WINDOW as usize),
                length,
                libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
                libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE,
                memory.as_raw_fd(),
                at_gpa as libc::off_t,
            )
        };
        if at as u64 != WINDOW {
            return Err(failed("map the gate's pages (/dev/mem)"));
        }
        Ok(Window(length))
    }

    /// The guest-physical address of BAR 2, whose start is in the third line of the file.
    pub fn window_address(&self) -> Result<u64, Error> {
        let path = self.folder.join("resource");
        let unclear = || Error::Sysfs(format!("{}", path.display()));
        let text = fs::read_to_string(&path).map_err(|_| unclear())?;
        let start = text.lines().nth(2).and_then(|line| line.split(' ').next());
        let start =
            start.and_then(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
        start.filter(|start| *start != 0).ok_or_else(unclear)
    }

    pub fn read(&self, offset: u64) -> u32 {
        // SAFETY: a register of the mapping.
        unsafe {
            self.registers
                .add(offset as usize)
                .cast::<u32>()
                .read_volatile()
        }
    }

    pub fn write(&self, offset: u64, value: u32) {
        // SAFETY: a register of the mapping.
        unsafe {
            self.registers
                .add(offset as usize)
                .cast::<u32>()
                .write_volatile(value)
        };
    }

    pub fn write_wide(&self, offset: u64, value: u64) {
        // SAFETY: a register of the mapping.
        unsafe {
            self.registers
                .add(offset as usize)
                .cast::<u64>()
                .write_volatile(value)
        };
    }

    pub fn command(&self, command: Command) {
        self.write(at::COMMAND, command as u32);
    }

    pub fn state(&self) -> Option<State> {
        State::from_number(self.read(at::STATE))
    }

    pub fn reason(&self) -> Reason {
        Reason::from_number(self.read(at::REASON)).unwrap_or(Reason::None)
    }

    /// Why the last command failed.
    pub fn refusal(&self) -> Error {
        Error::Refused {
            reason: self.reason(),
            number: self.read(at::ERROR),
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`, and nobody else has it.
        unsafe { libc::munmap(self.registers.cast(), at::SIZE as usize) };
    }
}

/// The window's pages in this process, until dropped.
#[derive(Debug)]
pub struct Window(usize);

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: mapped by `map_window`. Users of pointers into it have been told that it will be
        // unmapped.
        unsafe { libc::munmap(with_exposed_provenance_mut(WINDOW as usize), self.0) };
    }
}

fn is_port(folder: &Path) -> bool {
    let number = |name| -> io::Result<u16> {
        let text = fs::read_to_string(folder.join(name))?;
        u16::from_str_radix(text.trim().trim_start_matches("0x"), 16)
            .map_err(|_| ErrorKind::InvalidData.into())
    };
    number("vendor").is_ok_and(|vendor| vendor == port::VENDOR)
        && number("device").is_ok_and(|device| device == port::DEVICE)
}
