//! The device files of a machine.

use std::{
    ffi::CString,
    fs, io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    os::unix::fs::MetadataExt,
};

use nvidia_abi::Kind;

/// A device file that programs may open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// The control file.
    Control,
    /// The file of a GPU.
    Gpu(u8),
    /// The file of unified memory.
    Uvm,
}

impl Node {
    /// The node with this path.
    #[must_use]
    pub fn of_path(path: &[u8]) -> Option<Self> {
        match path.strip_prefix(b"/dev/nvidia")? {
            b"ctl" => Some(Self::Control),
            b"-uvm" => Some(Self::Uvm),
            digits => {
                let number = str::from_utf8(digits).ok()?.parse().ok()?;
                let node = Self::Gpu(number);
                (node.path().as_bytes() == path).then_some(node)
            }
        }
    }

    /// Its path.
    #[must_use]
    pub fn path(self) -> String {
        match self {
            Self::Control => "/dev/nvidiactl".to_owned(),
            Self::Gpu(number) => format!("/dev/nvidia{number}"),
            Self::Uvm => "/dev/nvidia-uvm".to_owned(),
        }
    }

    /// The kind of its calls.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self {
            Self::Control | Self::Gpu(_) => Kind::Frontend,
            Self::Uvm => Kind::Uvm,
        }
    }
}

/// What `stat` says of a device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Major and minor number.
    pub device: u64,
    /// Type and permissions.
    pub mode: u32,
}

/// The device files of a machine, or a stand-in for tests.
pub trait Device: Send + Sync {
    /// The version of the driver, such as `580.159.04`.
    ///
    /// # Errors
    /// It is not known.
    fn version(&self) -> io::Result<String>;

    /// Opens a file for reading and writing.
    ///
    /// # Errors
    /// As of `open`.
    fn open(&self, node: Node) -> io::Result<OwnedFd>;

    /// What `stat` says.
    ///
    /// # Errors
    /// As of `stat`.
    fn attributes(&self, node: Node) -> io::Result<Attributes>;

    /// Whether programs see a node.
    fn shows(&self, _: Node) -> bool {
        true
    }

    /// Makes a call.
    ///
    /// # Errors
    /// As of `ioctl`.
    ///
    /// # Safety
    /// `argument` points to the block of `command`, and each pointer in it to what the tables of `nvidia-abi` say;
    /// all of it may be written.
    unsafe fn call(&self, file: BorrowedFd<'_>, command: u32, argument: *mut u8)
    -> io::Result<i32>;
}

/// A GPU that programs see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    /// The number N of its file `/dev/nvidiaN`.
    pub number: u8,
    /// What the driver calls it, after its PCI address: the domain, the bus and the device, from bit 16, 8 and 0.
    pub id: u32,
}

/// Some of a machine's GPUs. Programs find none of the others' files, as in a container that has not got them.
pub struct Visible<D> {
    /// The device files of the machine.
    pub device: D,
    /// Those that are seen.
    pub gpus: Vec<Shown>,
}

/// The call that has the driver start GPUs for a file (`NV_ESC_ATTACH_GPUS_TO_FD`): up to 32 of their identifiers, or
/// zeroes.
const ATTACH: u32 =
    3 << 30 | (size_of::<[u32; MOST_ATTACHED]>() as u32) << 16 | (b'F' as u32) << 8 | 212;
const MOST_ATTACHED: usize = 32;

impl<D: Device> Device for Visible<D> {
    fn version(&self) -> io::Result<String> {
        self.device.version()
    }

    fn open(&self, node: Node) -> io::Result<OwnedFd> {
        match self.shows(node) {
            true => self.device.open(node),
            false => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        }
    }

    fn attributes(&self, node: Node) -> io::Result<Attributes> {
        match self.shows(node) {
            true => self.device.attributes(node),
            false => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        }
    }

    fn shows(&self, node: Node) -> bool {
        match node {
            Node::Gpu(number) => self.gpus.iter().any(|gpu| gpu.number == number),
            Node::Control | Node::Uvm => true,
        }
    }

    unsafe fn call(
        &self,
        file: BorrowedFd<'_>,
        command: u32,
        argument: *mut u8,
    ) -> io::Result<i32> {
        if command == ATTACH {
            // The driver asks for no open file of the GPU there.
            // SAFETY: the caller vouches for the block, whose size in the tables this is.
            let ids = unsafe { argument.cast::<[u32; MOST_ATTACHED]>().read_unaligned() };
            let shown = |id: &u32| *id == 0 || self.gpus.iter().any(|gpu| gpu.id == *id);
            if !ids.iter().all(shown) {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
        }
        // SAFETY: the caller's.
        unsafe { self.device.call(file, command, argument) }
    }
}

/// NVIDIA's kernel modules.
pub struct Kernel;

impl Device for Kernel {
    fn version(&self) -> io::Result<String> {
        let text = fs::read_to_string("/proc/driver/nvidia/version")?;
        let mut words = text.split_ascii_whitespace();
        let version = words.find(|word| nvidia_abi::Branch::of_version(word).is_some());
        let unknown = || io::Error::other("the driver is of no known branch: 580");
        version.map(str::to_owned).ok_or_else(unknown)
    }

    fn open(&self, node: Node) -> io::Result<OwnedFd> {
        let path = CString::new(node.path()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a valid string.
        let file = unsafe {
            libc::open(
                path.as_ptr(),
                libc::O_RDWR | libc::O_CLOEXEC | libc::O_NOFOLLOW,
            )
        };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nothing else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    fn attributes(&self, node: Node) -> io::Result<Attributes> {
        let metadata = fs::metadata(node.path())?;
        Ok(Attributes {
            device: metadata.rdev(),
            mode: metadata.mode(),
        })
    }

    unsafe fn call(
        &self,
        file: BorrowedFd<'_>,
        command: u32,
        argument: *mut u8,
    ) -> io::Result<i32> {
        // SAFETY: the caller vouches for the argument.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), command.into(), argument) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::stand_in::StandIn;

    fn shown(number: u8) -> Shown {
        let id = u32::from(number) << 8;
        Shown { number, id }
    }

    #[test]
    fn a_gpu_that_is_not_visible_is_not_started() {
        let visible = Visible {
            device: StandIn::default(),
            gpus: vec![shown(1)],
        };
        let file = visible.open(Node::Control).expect("it is there");
        let attach = |ids: &[u32]| {
            let mut block = [0u32; MOST_ATTACHED];
            block[..ids.len()].copy_from_slice(ids);
            // SAFETY: a whole block.
            let made = unsafe { visible.call(file.as_fd(), ATTACH, block.as_mut_ptr().cast()) };
            made.map_err(|error| error.raw_os_error())
        };
        assert_ne!(attach(&[0x100]), Err(Some(libc::EINVAL)));
        assert_eq!(attach(&[0x200]), Err(Some(libc::EINVAL)));
        assert_eq!(attach(&[0x100, 0, 0x200]), Err(Some(libc::EINVAL)));
    }

    #[test]
    fn a_gpu_that_is_not_visible_has_no_file() {
        let visible = Visible {
            device: StandIn::default(),
            gpus: vec![shown(1), shown(2)],
        };
        let missing = |error: io::Error| assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
        missing(visible.open(Node::Gpu(0)).expect_err("it is hidden"));
        missing(visible.attributes(Node::Gpu(0)).expect_err("it is hidden"));
        for node in [Node::Control, Node::Uvm] {
            assert!(visible.open(node).is_ok() && visible.attributes(node).is_ok());
        }
        let shown = [0, 1, 2, 31].map(|number| visible.shows(Node::Gpu(number)));
        assert_eq!(shown, [false, true, true, false]);
        let all = StandIn::default();
        assert!(all.open(Node::Gpu(0)).is_ok() && all.shows(Node::Gpu(0)));
    }

    #[test]
    fn only_control_gpus_and_unified_memory_are_nodes() {
        for (path, node) in [
            ("/dev/nvidiactl", Some(Node::Control)),
            ("/dev/nvidia0", Some(Node::Gpu(0))),
            ("/dev/nvidia31", Some(Node::Gpu(31))),
            ("/dev/nvidia-uvm", Some(Node::Uvm)),
            ("/dev/nvidia-uvm-tools", None),
            ("/dev/nvidia-caps/nvidia-cap1", None),
            ("/dev/nvidia00", None),
            ("/dev/nvidia+1", None),
            ("/dev/nvidia", None),
            ("/dev/nvidia0/../kvm", None),
            ("/dev/kvm", None),
        ] {
            assert_eq!(Node::of_path(path.as_bytes()), node, "{path}");
        }
    }
}
