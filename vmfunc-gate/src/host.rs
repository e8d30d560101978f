//! The host's side: what VMM processes request from the kernel module.
//!
//! A server's process registers it with [`Server::register`] and passes the file descriptor to
//! processes whose VMs may use it. A client's process creates a [`Client`], maps its window, adds
//! the pages to its VM as memory, and pairs it. `module/gate.h` describes the calls.

use std::{
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
    ptr::{self, NonNull},
    vec::Vec,
};

use thiserror::Error;

use crate::{
    port::Lack,
    window::{self, PAGE},
};

/// The module's device.
pub const DEVICE: &str = "/dev/gantry-gate";

/// Why the module did not do what was requested.
#[derive(Debug, Error)]
pub enum Error {
    /// The module is not loaded.
    #[error("there is no {DEVICE}: build and load the module gantry_gate (vmfunc-gate/module)")]
    NoModule,
    /// The device cannot be opened.
    #[error("{DEVICE} cannot be opened ({0}): give this user access to it")]
    Open(io::Error),
    /// A call was refused.
    #[error("the gate refused to {what}: {source}{cure}")]
    Refused {
        /// What was requested.
        what: &'static str,
        /// The module's answer.
        source: io::Error,
        /// What to do about it.
        cure: &'static str,
    },
}

impl Error {
    /// The underlying error number, if there is one.
    #[must_use]
    pub fn number(&self) -> Option<i32> {
        match self {
            Self::NoModule => None,
            Self::Open(source) | Self::Refused { source, .. } => source.raw_os_error(),
        }
    }

    fn refused(what: &'static str) -> Self {
        let source = io::Error::last_os_error();
        let cure = match source.raw_os_error() {
            Some(libc::EADDRINUSE) => {
                " (the server needs the memory where the client's page table or the window is: try \
                 another process of the client, or other memory for the server)"
            }
            Some(libc::EBUSY) => " (it is registered or paired already, or the vCPU runs)",
            Some(libc::ESRCH) => " (the server's process is gone, or the server was given up)",
            Some(libc::ENOMEM) => " (memory, or the limit of locked memory: ulimit -l)",
            Some(libc::EOPNOTSUPP) => " (the VM may have VMs of its own: take VMX from its CPUID)",
            Some(libc::EPERM) => " (the VM belongs to another process)",
            Some(libc::ENODEV) => " (kvm_intel was loaded anew: load gantry_gate anew, too)",
            _ => "",
        };
        Self::Refused { what, source, cure }
    }
}

/// What a host lacks for the gate. Empty if the gate can work. Looks at files under `root` (`/`,
/// except in tests). A module that has been loaded has checked the CPU and the kernel itself, and
/// sees more than the kernel's list of features contains.
#[must_use]
pub fn missing(root: &Path) -> Vec<Lack> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let cpu = read("proc/cpuinfo");
    let has = |line: &str, flag: &str| {
        cpu.lines()
            .filter(|text| {
                text.split(':')
                    .next()
                    .is_some_and(|name| name.trim() == line)
            })
            .any(|text| text.split_whitespace().any(|word| word == flag))
    };
    let mut missing = Vec::new();
    let loaded = root.join(DEVICE.trim_start_matches('/')).exists();
    let vtx = has("flags", "vmx");
    let vmfunc = has("vmx flags", "eptp_switching") || has("vmx flags", "vmfunc");
    if !loaded && !vtx {
        missing.push(Lack::VtX);
    } else if !loaded && !vmfunc {
        missing.push(Lack::Vmfunc);
    }
    if !loaded && !has("flags", "fsgsbase") {
        missing.push(Lack::Fsgsbase);
    }
    if read("sys/module/kvm_intel/parameters/unrestricted_guest").trim() == "N" {
        missing.push(Lack::Ept);
    }
    let release = read("proc/sys/kernel/osrelease");
    let version: Vec<_> = release.split('.').take(2).collect();
    if !loaded && version != ["6", "1"] && version != ["6", "12"] {
        missing.push(Lack::Kernel);
    }
    if !loaded {
        missing.push(Lack::Module);
    }
    missing
}

#[repr(C)]
struct ServerArguments {
    vcpu: i32,
    count: u32,
    handlers: u64,
    cr3: u64,
    fs_base: u64,
    gs_base: u64,
    window: u64,
    window_gpa: u64,
    mxcsr: u32,
    pkru: u32,
}

#[repr(C)]
struct ClientArguments {
    vcpu: i32,
    shared_pages: u32,
    cr3: u64,
    window: u64,
    window_gpa: u64,
    features: u64,
}

/// Counters of the module.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// VM exits of the client's vCPU since it was registered.
    pub exits: u64,
    /// Those of `exits` that occurred in the server.
    pub exits_inside: u64,
    /// Those of `exits` that were caused by host interrupts and timers.
    pub interrupts: u64,
    /// Those of `exits_inside` that were caused by host interrupts and timers.
    pub interrupts_inside: u64,
    /// Pages that were missing in the server view, and were found.
    pub violations: u64,
    /// Writes of handlers that went to an eventfd of the server's VM (ioeventfd).
    pub doorbells: u64,
    /// Delegations that were aborted.
    pub aborted: u64,
    /// Delegations that were interrupted by an event of the client.
    pub parked: u64,
    /// Those of `parked` that were resumed.
    pub resumed: u64,
    /// Faults that were injected into the client for what it tried at the gate.
    pub refused: u64,
    /// The size of the server view's page tables in bytes.
    pub tables: u64,
    /// 1 if the client's page table hides a page of the server's memory, so that the server's
    /// kernel is not in the view and handlers cannot make system calls. Otherwise 0.
    pub user_only: u64,
    /// Servers that exist.
    pub servers: u64,
    /// Clients that exist.
    pub clients: u64,
    /// Pages that the module has allocated.
    pub pages: u64,
    /// Pages of servers that are pinned.
    pub pinned: u64,
}

/// Linux's `_IOC` for this module's calls. Direction 1 writes, 2 reads.
const fn call(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0xb7 << 8 | number
}

const REGISTER_SERVER: u64 = call(1, 0, size_of::<ServerArguments>());
const REGISTER_CLIENT: u64 = call(1, 1, size_of::<ClientArguments>());
const PAIR: u64 = call(1, 2, size_of::<i32>());
const UNPAIR: u64 = call(0, 3, 0);
const STATUS: u64 = call(2, 4, size_of::<Status>());
const WAKE: u64 = call(0, 5, 0);
const SLEEP: u64 = call(0, 6, 0);
const RETIRE: u64 = call(0, 7, 0);

/// All calls, for fuzzing.
pub const CALLS: [u64; 8] = [
    REGISTER_SERVER,
    REGISTER_CLIENT,
    PAIR,
    UNPAIR,
    STATUS,
    WAKE,
    SLEEP,
    RETIRE,
];

/// An open file of the device.
#[derive(Debug)]
pub struct Gate(fs::File);

impl Gate {
    /// Opens the device.
    ///
    /// # Errors
    /// There is no module, or no access to it.
    pub fn open() -> Result<Self, Error> {
        let mut options = fs::File::options();
        options.read(true).write(true).custom_flags(libc::O_CLOEXEC);
        options.open(DEVICE).map(Self).map_err(|error| {
            if error.kind() == io::ErrorKind::NotFound {
                Error::NoModule
            } else {
                Error::Open(error)
            }
        })
    }

    /// Another descriptor of the same file, for instance for use by another process.
    ///
    /// # Errors
    /// There are too many descriptors.
    pub fn try_clone(&self) -> Result<Self, Error> {
        self.0.try_clone().map(Self).map_err(Error::Open)
    }

    /// A file that is not the module's device: calls fail, and its pages are zeroes.
    ///
    /// # Errors
    /// There is no `/dev/zero`.
    #[cfg(feature = "test-support")]
    pub fn without_module() -> io::Result<Self> {
        let mut options = fs::File::options();
        options.read(true).write(true).open("/dev/zero").map(Self)
    }

    /// Treats this file as a server.
    #[cfg(feature = "test-support")]
    #[must_use]
    pub fn pretend_server(self) -> Server {
        Server(self)
    }

    /// Treats this file as a client with this many pages of shared memory.
    #[cfg(feature = "test-support")]
    #[must_use]
    pub fn pretend_client(self, shared_pages: u32) -> Client {
        Client {
            gate: self,
            shared_pages,
        }
    }

    fn call<T>(&self, call: u64, argument: *mut T, what: &'static str) -> Result<(), Error> {
        // SAFETY: the module reads or writes a `T`, whose size is encoded in the call.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), call, argument) } {
            0 => Ok(()),
            _ => Err(Error::refused(what)),
        }
    }

    /// Counters of the module, and of the client if this file is one.
    ///
    /// # Errors
    /// No known ones.
    pub fn status(&self) -> Result<Status, Error> {
        let mut status = Status::default();
        self.call(STATUS, &raw mut status, "tell its counters")?;
        Ok(status)
    }

    /// Makes this file the server of handlers; see [`Server::register`].
    ///
    /// # Errors
    /// See [`Server::register`].
    pub fn into_server(
        self,
        vcpu: BorrowedFd<'_>,
        handlers: &[u64],
        settings: &ServerSettings,
    ) -> Result<Server, Error> {
        let mut arguments = ServerArguments {
            vcpu: vcpu.as_raw_fd(),
            count: u32::try_from(handlers.len()).unwrap_or(u32::MAX),
            handlers: handlers.as_ptr() as u64,
            cr3: settings.cr3,
            fs_base: settings.fs_base,
            gs_base: settings.gs_base,
            window: settings.window,
            window_gpa: settings.window_gpa,
            mxcsr: window::MXCSR,
            pkru: settings.pkru,
        };
        self.call(REGISTER_SERVER, &raw mut arguments, "register the server")?;
        Ok(Server(self))
    }

    /// For the server that is registered on this file; see [`Server::wake`].
    ///
    /// # Errors
    /// See [`Server::wake`]; or this process did not register it.
    pub fn wake(&self) -> Result<(), Error> {
        self.call::<()>(WAKE, ptr::null_mut(), "wake the server")
    }

    /// For the server that is registered on this file; see [`Server::sleep`].
    ///
    /// # Errors
    /// See [`Server::sleep`]; or this process did not register it.
    pub fn sleep(&self) -> Result<(), Error> {
        self.call::<()>(SLEEP, ptr::null_mut(), "let clients into the server")
    }

    /// For the server that is registered on this file; see [`Server::retire`].
    ///
    /// # Errors
    /// See [`Server::retire`].
    pub fn retire(&self) -> Result<(), Error> {
        self.call::<()>(RETIRE, ptr::null_mut(), "give the server up")
    }

    /// Makes this file the client of a vCPU; see [`Client::register`].
    ///
    /// # Errors
    /// See [`Client::register`].
    pub fn into_client(
        self,
        vcpu: BorrowedFd<'_>,
        settings: &ClientSettings,
    ) -> Result<Client, Error> {
        let mut arguments = ClientArguments {
            vcpu: vcpu.as_raw_fd(),
            shared_pages: settings.shared_pages,
            cr3: settings.cr3,
            window: settings.window,
            window_gpa: settings.window_gpa,
            features: settings.features,
        };
        self.call(REGISTER_CLIENT, &raw mut arguments, "register the client")?;
        Ok(Client {
            gate: self,
            shared_pages: settings.shared_pages,
        })
    }
}

/// The shared memory of a client that another process has registered, through a descriptor of its
/// file: for a server's VM, at the server's window.
///
/// # Errors
/// It is not a client, or has less shared memory.
pub fn shared_pages(client: BorrowedFd<'_>, pages: u32) -> Result<Pages, Error> {
    Pages::map(client, window::SHARED, u64::from(pages) * PAGE, false)
}

impl AsFd for Gate {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The environment of a server's handlers.
#[derive(Clone, Copy, Debug)]
pub struct ServerSettings {
    /// The guest-physical address of the server process's top-level page table.
    pub cr3: u64,
    /// The FS base.
    pub fs_base: u64,
    /// The GS base.
    pub gs_base: u64,
    /// PKRU, if the client has protection keys.
    pub pkru: u32,
    /// The virtual address of the window, the same in client and server.
    pub window: u64,
    /// The guest-physical address of the window, where the server has no memory.
    pub window_gpa: u64,
}

/// A server VM of this process. Once it is registered, its vCPUs must not run.
#[derive(Debug)]
pub struct Server(Gate);

impl Server {
    /// Registers handlers, by their virtual addresses. Pins all of the VM's memory.
    ///
    /// # Errors
    /// There is no module; the vCPU does not belong to a VM that this process has created; or the
    /// VM's memory cannot be pinned, or is where the window should be.
    pub fn register(
        vcpu: BorrowedFd<'_>,
        handlers: &[u64],
        settings: &ServerSettings,
    ) -> Result<Self, Error> {
        Gate::open()?.into_server(vcpu, handlers, settings)
    }

    /// To be called before the VM's vCPUs run: clients that delegate get [`Failure::Awake`]. Those
    /// that are in the server get some milliseconds to finish.
    ///
    /// [`Failure::Awake`]: crate::client::Failure::Awake
    ///
    /// # Errors
    /// A client remains in the server (`EBUSY`), and nothing has changed; or the server was given
    /// up (`ESRCH`).
    pub fn wake(&self) -> Result<(), Error> {
        self.0.wake()
    }

    /// To be called after the VM's vCPUs have stopped again: clients can delegate.
    ///
    /// # Errors
    /// The server was given up.
    pub fn sleep(&self) -> Result<(), Error> {
        self.0.sleep()
    }

    /// Gives the server up, no matter who else has its descriptor. The VM's vCPUs may run
    /// afterwards.
    ///
    /// # Errors
    /// A client was removed from the server's kernel (`EOWNERDEAD`): the server is given up, and
    /// that kernel may wait forever for what the client held; or this process did not register it.
    pub fn retire(&self) -> Result<(), Error> {
        self.0.retire()
    }

    /// Counters of the module.
    ///
    /// # Errors
    /// No known ones.
    pub fn status(&self) -> Result<Status, Error> {
        self.0.status()
    }
}

impl AsFd for Server {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The configuration of a client's vCPU.
#[derive(Clone, Copy, Debug)]
pub struct ClientSettings {
    /// The CR3 of the client process.
    pub cr3: u64,
    /// The virtual address of the window.
    pub window: u64,
    /// The guest-physical address at which the VM has the window's pages.
    pub window_gpa: u64,
    /// The number of pages of shared memory, 1 to [`window::SHARED_PAGES`].
    pub shared_pages: u32,
    /// The sum of any of [`window::FEATURE_AVX`] and [`window::FEATURE_PKU`].
    pub features: u64,
}

/// A vCPU of a VM of this process that can delegate.
#[derive(Debug)]
pub struct Client {
    gate: Gate,
    shared_pages: u32,
}

/// Pages of the window, mapped into this process until dropped. They become memory of the VM.
#[derive(Debug)]
pub struct Pages {
    at: NonNull<u8>,
    bytes: usize,
    /// The offset of the first page in the window.
    pub offset: u64,
    /// Whether the VM must not write them.
    pub readonly: bool,
}

// SAFETY: shared memory that nothing in this process owns; its users access it through raw
// pointers.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    fn map(file: BorrowedFd<'_>, offset: u64, bytes: u64, readonly: bool) -> Result<Self, Error> {
        let access = if readonly {
            libc::PROT_READ
        } else {
            libc::PROT_READ | libc::PROT_WRITE
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes as usize,
                access,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        match NonNull::new(at.cast::<u8>()) {
            Some(at) if at.as_ptr().cast() != libc::MAP_FAILED => Ok(Self {
                at,
                bytes: bytes as usize,
                offset,
                readonly,
            }),
            _ => Err(Error::refused("map the window")),
        }
    }

    /// Their address in this process, and their size in bytes.
    #[must_use]
    pub fn memory(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.at, self.bytes)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and not borrowed by anyone.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

impl Client {
    /// Registers the vCPU that delegates.
    ///
    /// # Errors
    /// There is no module; or the vCPU does not belong to a VM that this process has created, or is
    /// already registered.
    pub fn register(vcpu: BorrowedFd<'_>, settings: &ClientSettings) -> Result<Self, Error> {
        Gate::open()?.into_client(vcpu, settings)
    }

    /// The window's pages, for memory slots of the VM at the window's address plus their offsets.
    ///
    /// # Errors
    /// There is no address space left.
    pub fn window(&self) -> Result<[Pages; 3], Error> {
        let shared = u64::from(self.shared_pages) * PAGE;
        Ok([
            self.pages(window::TRAMPOLINE, window::PRIVATE, true)?,
            self.pages(window::PRIVATE, PAGE, false)?,
            self.pages(window::SHARED, shared, false)?,
        ])
    }

    fn pages(&self, offset: u64, bytes: u64, readonly: bool) -> Result<Pages, Error> {
        Pages::map(self.gate.as_fd(), offset, bytes, readonly)
    }

    /// Pairs it with a server, given by the descriptor of a [`Server`] of any process.
    ///
    /// # Errors
    /// It is already paired; the descriptor is not a server, or one that is gone; or the server's
    /// process needs the memory at the guest-physical address of the client's page table.
    pub fn pair(&self, server: BorrowedFd<'_>) -> Result<(), Error> {
        let mut server = server.as_raw_fd();
        self.gate.call(PAIR, &raw mut server, "pair")
    }

    /// Unpairs it. A delegation in progress ends with an error.
    ///
    /// # Errors
    /// It is not paired.
    pub fn unpair(&self) -> Result<(), Error> {
        self.gate.call::<()>(UNPAIR, ptr::null_mut(), "unpair")
    }

    /// The counters.
    ///
    /// # Errors
    /// No known ones.
    pub fn status(&self) -> Result<Status, Error> {
        self.gate.status()
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.gate.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(cpu: &str, release: &str, module: bool) -> Vec<Lack> {
        let name = std::format!(
            "gate-host-{}-{}",
            std::process::id(),
            cpu.len() + release.len()
        );
        let root = std::env::temp_dir().join(name);
        fs::create_dir_all(root.join("proc/sys/kernel")).unwrap();
        fs::create_dir_all(root.join("dev")).unwrap();
        fs::write(root.join("proc/cpuinfo"), cpu).unwrap();
        fs::write(root.join("proc/sys/kernel/osrelease"), release).unwrap();
        if module {
            fs::write(root.join("dev/gantry-gate"), "").unwrap();
        }
        let missing = missing(&root);
        fs::remove_dir_all(&root).unwrap();
        missing
    }

    #[test]
    fn a_host_that_has_everything_lacks_nothing() {
        let cpu = "flags\t\t: fpu vmx fsgsbase\nvmx flags\t: ept eptp_switching\n";
        assert_eq!(host(cpu, "6.1.0-1-amd64\n", true), []);
    }

    #[test]
    fn each_thing_that_is_missing_is_named() {
        let missing = host("flags\t\t: fpu svm\n", "6.18.0\n", false);
        let expected = [Lack::VtX, Lack::Fsgsbase, Lack::Kernel, Lack::Module];
        assert_eq!(missing, expected);
        let root = std::env::temp_dir().join(std::format!("gate-kvm-{}", std::process::id()));
        let parameters = root.join("sys/module/kvm_intel/parameters");
        fs::create_dir_all(&parameters).unwrap();
        fs::write(parameters.join("unrestricted_guest"), "N\n").unwrap();
        let found = super::missing(&root);
        fs::remove_dir_all(&root).unwrap();
        assert!(found.contains(&Lack::Ept));
        let cpu = "flags : vmx fsgsbase\nvmx flags : ept\n";
        assert_eq!(host(cpu, "6.12.1\n", false), [Lack::Vmfunc, Lack::Module]);
        // The kernel's list of features need not contain VMFUNC.
        assert_eq!(host(cpu, "6.12.1\n", true), []);
    }
}
