//! An accelerator port, through its files in sysfs.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::fd::OwnedFd,
    path::Path,
};

use base::{Access, Mapping};
use remoting_proto::{
    apis,
    port::{self, Apis, Command, DOORBELL, Outcome, SliceOffsets, State, Wish, registers},
    wire::{
        api::ApiId,
        hello::{self, Form, Hello},
    },
};
use remoting_transport::window::{CLIENT_HELLO, REPLY};

use crate::{
    file_error::{FileError, failed},
    interrupts::{self, Interrupts},
};

const PCI: &str = "/sys/bus/pci/devices";
const PAGE: u64 = 4096;

/// Why a port cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The registers are not those of a port.
    #[error(
        "the device at {address} reads {magic:#x} where an accelerator port says {:#x}: give \
         --device the address of an accelerator port (lspci), or leave it out",
        registers::MAGIC_VALUE
    )]
    NoPort {
        /// The PCI address.
        address: String,
        /// The value that was read.
        magic: u32,
    },
    /// The registers have an unknown version.
    #[error(
        "the accelerator port at {address} speaks version {theirs} of its registers and this agent \
         {} and {}: install the agent that belongs to the host's Gantry",
        registers::INTERFACE,
        registers::SEVERAL_APIS
    )]
    Interface {
        /// The PCI address.
        address: String,
        /// The port's version.
        theirs: u32,
    },
}

/// A mapped part of a BAR.
struct Mapped(Mapping);

impl Mapped {
    fn new(file: &File, offset: u64, len: u64) -> io::Result<Self> {
        Mapping::shared(file, offset, len as usize, Access::ReadWrite).map(Self)
    }

    fn read(&self, offset: u64) -> u32 {
        debug_assert!(offset as usize + 4 <= self.0.len());
        // SAFETY: within the mapping and aligned; every value is a valid number.
        unsafe {
            self.0
                .start()
                .add(offset as usize)
                .cast::<u32>()
                .read_volatile()
        }
    }

    fn write(&self, offset: u64, value: u32) {
        debug_assert!(offset as usize + 4 <= self.0.len());
        // SAFETY: as above.
        unsafe {
            let at = self.0.start().add(offset as usize).cast::<u32>();
            at.write_volatile(value);
        }
    }
}

/// An accelerator port.
pub struct Port {
    /// The PCI address.
    pub address: String,
    /// The APIs that the port's workers serve.
    apis: Apis,
    registers: Mapped,
    slices: u32,
    slice_size: u64,
    /// The window's file, for applications.
    pub window: OwnedFd,
    /// The doorbells' file, for applications.
    pub doorbells: OwnedFd,
    /// The file of the device pages (BAR 4), in a port for native contexts.
    pub pages: Option<OwnedFd>,
    /// Wakes sleepers of slices, if the guest's kernel has a driver for interrupts.
    pub interrupts: Option<Interrupts>,
    /// The last value that was read from the change register.
    changes: Option<u32>,
}

/// Whether a port is one for native contexts.
fn is_native(apis: Apis) -> bool {
    apis.first() == Some(ApiId::Nvidia)
}

/// The PCI addresses of all ports in this guest.
pub fn find() -> Vec<String> {
    let is_port = |folder: &Path| {
        let number = |file: &str| {
            let text = fs::read_to_string(folder.join(file)).unwrap_or_default();
            u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
        };
        number("vendor") == Some(port::VENDOR) && number("device") == Some(port::DEVICE)
    };
    let mut found: Vec<_> = fs::read_dir(PCI)
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .filter(|entry| is_port(&entry.path()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    found.sort();
    found
}

impl Port {
    /// Opens the port at a PCI address, and takes it over: applications of another agent lose their slices, except that
    /// the slice of a port for native contexts stays as it is.
    pub fn open(address: &str) -> Result<Self, Error> {
        let folder = Path::new(PCI).join(address);
        // Nothing else enables the function's BARs, unless an earlier agent has left it bound to a
        // driver.
        if !interrupts::is_bound(&folder) {
            let enable = folder.join("enable");
            fs::write(&enable, "1").map_err(failed("write to", &enable))?;
        }
        let open = |name: &str| {
            let path = folder.join(name);
            OpenOptions::new()
                .read(true)
                .write(true)
                .open(&path)
                .map_err(failed("open", &path))
        };
        let file = open("resource0")?;
        let registers = Mapped::new(&file, 0, registers::SIZE)
            .map_err(failed("map", &folder.join("resource0")))?;
        let magic = registers.read(registers::MAGIC);
        if magic != registers::MAGIC_VALUE {
            return Err(Error::NoPort {
                address: address.to_owned(),
                magic,
            });
        }
        let theirs = registers.read(registers::VERSION);
        if ![registers::INTERFACE, registers::SEVERAL_APIS].contains(&theirs) {
            return Err(Error::Interface {
                address: address.to_owned(),
                theirs,
            });
        }
        let apis = Apis::from_number(registers.read(registers::API));
        // A kernel without page attribute tables has no write-combining file: slower, but correct. Programs with native
        // contexts rely on the order of their stores.
        let is_native = is_native(apis);
        let window = match is_native {
            true => open("resource2"),
            false => open("resource2_wc").or_else(|_| open("resource2")),
        }?;
        let pages = is_native.then(|| open("resource4").ok()).flatten();
        let low = registers.read(registers::SLICE_SIZE_LOW);
        let high = registers.read(registers::SLICE_SIZE_HIGH);
        let mut port = Self {
            address: address.to_owned(),
            apis,
            slices: registers.read(registers::SLICES).min(port::MOST_SLICES),
            slice_size: u64::from(low) | u64::from(high) << 32,
            registers,
            window: window.into(),
            doorbells: open("resource1")?.into(),
            pages: pages.map(Into::into),
            interrupts: None,
            changes: None,
        };
        // Programs of an earlier agent may still have the memory of a slice for native contexts, which a reset would
        // replace under them: who serves it closes it.
        let begin = match is_native {
            true => (registers::LINE, 0),
            false => (registers::RESET, 1),
        };
        port.registers.write(begin.0, begin.1);
        port.take_interrupts(&folder);
        Ok(port)
    }

    /// Enables interrupts for sleepers of slices, if possible.
    fn take_interrupts(&mut self, folder: &Path) {
        let opened = Interrupts::open(folder, &self.address).and_then(|interrupts| {
            // One may have been raised for an earlier agent. A function without an interrupt line
            // fails here.
            let allowed = interrupts.heard().and_then(|_| interrupts.allow());
            allowed.map_err(failed("have interrupts of", folder))?;
            Ok(interrupts)
        });
        match opened {
            Ok(interrupts) => {
                self.registers.write(registers::LINE, 1);
                self.interrupts = Some(interrupts);
            }
            Err(error) => {
                let cause = std::error::Error::source(&error);
                let cause = cause.map(|cause| format!(": {cause}")).unwrap_or_default();
                base::note!(
                    "gantry-agent: applications of {} look for their answers again and again, as its \
                     interrupts wake nobody: {error}{cause}",
                    self.address
                );
            }
        }
    }

    /// Handles an interrupt, if there is one: calls `wake` with a bit mask of the slices that it is
    /// for, and then enables the next one. Returns whether the state of a slice may have changed.
    /// Once the function has been removed there are no more interrupts.
    pub fn interrupted(&mut self, wake: impl FnOnce(u64)) -> bool {
        let heard = self.interrupts.as_ref().map(Interrupts::heard);
        let Some(Ok(heard)) = heard else {
            self.interrupts = None;
            return false;
        };
        if !heard {
            return false;
        }
        wake(self.rung());
        let changed = self.changed();
        let allowed = self.interrupts.as_ref().map(Interrupts::allow);
        if !matches!(allowed, Some(Ok(()))) {
            self.interrupts = None;
        }
        changed
    }

    fn rung(&self) -> u64 {
        let low = self.registers.read(registers::RUNG_LOW);
        let high = match self.slices {
            0..=32 => 0,
            _ => self.registers.read(registers::RUNG_HIGH),
        };
        u64::from(low) | u64::from(high) << 32
    }

    /// Whether it is a port for native contexts. Other applications are not served through it.
    pub fn is_native(&self) -> bool {
        is_native(self.apis)
    }

    /// Whether the device is still present.
    pub fn is_there(&self) -> bool {
        self.registers.read(registers::MAGIC) == registers::MAGIC_VALUE
            && Path::new(PCI).join(&self.address).exists()
    }

    /// Whether a slice's state may have changed since the last call. Costs one exit.
    pub fn changed(&mut self) -> bool {
        let now = self.registers.read(registers::CHANGES);
        self.changes.replace(now) != Some(now)
    }

    /// The state of a slice. Costs one exit.
    pub fn state(&self, slice: u32) -> State {
        let number = self.registers.read(registers::SLICE + 4 * u64::from(slice));
        // A device that has been removed reads as something else.
        State::from_number(number).unwrap_or(State::Ended)
    }

    /// Whether the port's workers serve the API that this hello asks for. A client of another build
    /// does not state its API. A worker then tells it which build is expected.
    pub fn serves(&self, hello: &[u8; hello::SIZE]) -> bool {
        let wanted = Hello::api_number(hello);
        wanted == 0 || self.apis.may_have(wanted)
    }

    /// The answer to an application that wants another API: which one the port serves.
    pub fn refusal(&self) -> Option<Hello> {
        let api = self.apis.first()?;
        Some(Hello::answer(apis::spoken(api), Form::Port, (0, 0)))
    }

    /// Finds a free slice.
    pub fn free(&self) -> Option<u32> {
        (0..self.slices).find(|&slice| self.state(slice) == State::Free)
    }

    /// Whether a slice is being closed.
    pub fn is_closing(&self) -> bool {
        (0..self.slices).any(|slice| self.state(slice) == State::Closing)
    }

    /// Writes an application's hello to a slice and has the slice opened, for the application's
    /// user if that is known.
    pub fn open_slice(
        &self,
        slice: u32,
        hello: &[u8; hello::SIZE],
        user: Option<u32>,
    ) -> io::Result<()> {
        let page = self.first_page(slice)?;
        for (at, byte) in hello.iter().enumerate() {
            // SAFETY: within the page.
            unsafe {
                page.0
                    .start()
                    .add(CLIENT_HELLO as usize + at)
                    .write_volatile(*byte)
            };
        }
        // The window is write-combining, the registers are not: accessing them orders the writes.
        let owner = registers::OWNER + 4 * u64::from(slice);
        self.registers.write(owner, port::user_to_number(user));
        if self.apis.has_several() {
            let api = registers::SLICE_API + 4 * u64::from(slice);
            self.registers.write(api, Hello::api_number(hello));
        }
        self.command(slice, Command::Open);
        Ok(())
    }

    /// The worker's answer to the hello.
    pub fn reply(&self, slice: u32) -> io::Result<[u8; hello::SIZE]> {
        let page = self.first_page(slice)?;
        let mut reply = [0; hello::SIZE];
        for (at, byte) in reply.iter_mut().enumerate() {
            // SAFETY: within the page.
            *byte = unsafe { page.0.start().add(REPLY as usize + at).read_volatile() };
        }
        Ok(reply)
    }

    /// Where the host wants applications to be served, if it has a wish. For another place, with
    /// its address; for devices that are about to leave, with theirs.
    pub fn wish(&self) -> Option<(Wish, String)> {
        let read = || Wish::from_number(self.registers.read(registers::WISH));
        let wish = read()?;
        if !wish.by.is_at_address() {
            return Some((wish, String::new()));
        }
        let words = (0..registers::ADDRESS_SIZE).step_by(4);
        let bytes = words.flat_map(|at| self.registers.read(registers::ADDRESS + at).to_le_bytes());
        let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
        let address = String::from_utf8(bytes).ok()?;
        // The address may belong to a newer wish, which the change register announces.
        (read() == Some(wish)).then_some((wish, address))
    }

    /// Reports the outcome of a wish. The reason is truncated to the size of its register.
    pub fn tell(&self, outcome: Outcome, reason: &str) {
        let end = reason.floor_char_boundary(registers::REASON_SIZE as usize);
        let mut at = registers::REASON;
        for word in reason.as_bytes()[..end].chunks(4) {
            let mut bytes = [0; 4];
            bytes[..word.len()].copy_from_slice(word);
            self.registers.write(at, u32::from_le_bytes(bytes));
            at += 4;
        }
        self.registers
            .write(registers::OUTCOME, outcome.to_number());
    }

    /// The size of each slice in bytes.
    pub fn slice_size(&self) -> u64 {
        self.slice_size
    }

    /// Closes a slice.
    pub fn close_slice(&self, slice: u32) {
        self.command(slice, Command::Close);
    }

    fn command(&self, slice: u32, command: Command) {
        let at = registers::SLICE + 4 * u64::from(slice);
        self.registers.write(at, command as u32);
    }

    fn first_page(&self, slice: u32) -> io::Result<Mapped> {
        let file = File::from(self.window.try_clone()?);
        Mapped::new(&file, self.place(slice).slice, PAGE)
    }

    /// The offsets of a slice in the files.
    pub fn place(&self, slice: u32) -> SliceOffsets {
        SliceOffsets {
            slice: u64::from(slice) * self.slice_size,
            doorbell: u64::from(slice) * DOORBELL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;

    #[test]
    fn registers_of_a_device_that_has_gone_read_as_zeroes() {
        crate::survive::install();
        // SAFETY: a new descriptor that nobody else owns.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"bar".as_ptr(), 0)) };
        file.set_len(8192).unwrap();
        let registers = Mapped::new(&file, 0, 8192).unwrap();
        registers.write(4100, 7);
        assert_eq!(registers.read(4100), 7);
        // As the kernel does with a BAR's mapping when the function is removed.
        file.set_len(0).unwrap();
        assert_eq!(registers.read(4100), 0);
        registers.write(0, 1);
    }
}
