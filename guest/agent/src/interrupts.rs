//! A port's interrupts, through the kernel's driver for devices that are driven by a program
//! (`uio_pci_generic`; see "The Userspace I/O HOWTO" in the kernel's documentation).
//!
//! On an interrupt, the kernel sets the function's interrupt-disable bit and increments a count.
//! The program reads the count, looks at the device, and then clears the bit.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::Path,
};

use crate::file_error::{FileError, failed};

/// The driver's name.
pub const DRIVER: &str = "uio_pci_generic";
const PROBE: &str = "/sys/bus/pci/drivers_probe";
/// The upper byte of the command register, and its interrupt-disable bit (PCI 3.0, 6.2.2).
const COMMAND: u64 = 5;
const DISABLE: u8 = 1 << 2;

/// Why interrupts are not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The kernel did not bind the function to the driver.
    #[error("{DRIVER} did not take it: load that module (modprobe {DRIVER}) before this agent")]
    NoDriver,
}

/// The interrupts of a port.
#[derive(Debug)]
pub struct Interrupts {
    count: File,
    config: File,
}

/// Whether a function is bound to [`DRIVER`].
pub fn is_bound(function: &Path) -> bool {
    let driver = fs::read_link(function.join("driver"));
    driver.is_ok_and(|driver| driver.ends_with(DRIVER))
}

/// Binds a function that has no driver to [`DRIVER`].
fn bind(function: &Path, address: &str) -> Result<(), Error> {
    let only = function.join("driver_override");
    let write = |path: &Path, text: &str| fs::write(path, text).map_err(failed("write to", path));
    write(&only, DRIVER)?;
    let probed = write(Path::new(PROBE), address);
    if is_bound(function) {
        return Ok(());
    }
    // So that another driver can bind to it.
    write(&only, "\n")?;
    probed?;
    Err(Error::NoDriver)
}

impl Interrupts {
    /// Opens the interrupts of the function at an address, whose files are in this folder.
    pub fn open(function: &Path, address: &str) -> Result<Self, Error> {
        if !is_bound(function) {
            bind(function, address)?;
        }
        let uio = function.join("uio");
        let mut names = fs::read_dir(&uio).map_err(failed("look into", &uio))?;
        let Some(Ok(name)) = names.next() else {
            return Err(Error::NoDriver);
        };
        let device = Path::new("/dev").join(name.file_name());
        let open = |path: &Path| {
            let mut options = OpenOptions::new();
            options
                .read(true)
                .write(true)
                .custom_flags(libc::O_NONBLOCK);
            options.open(path).map_err(failed("open", path))
        };
        Ok(Self {
            count: open(&device)?,
            config: open(&function.join("config"))?,
        })
    }

    /// The descriptor to poll for interrupts.
    pub fn fd(&self) -> RawFd {
        self.count.as_raw_fd()
    }

    /// The same, borrowed.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.count.as_fd()
    }

    /// Whether there has been an interrupt since the last call. Fails when the function has been
    /// removed.
    pub fn heard(&self) -> io::Result<bool> {
        match (&self.count).read(&mut [0; 4]) {
            Ok(got) => Ok(got > 0),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Enables the next interrupt.
    pub fn allow(&self) -> io::Result<()> {
        let mut command = [0];
        self.config.read_exact_at(&mut command, COMMAND)?;
        self.config.write_all_at(&[command[0] & !DISABLE], COMMAND)
    }
}
