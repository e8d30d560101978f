//! Queues of host tap interfaces.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::fs::OpenOptionsExt,
    },
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

/// Size in bytes of the header before each frame (virtio 1.2, 5.1.6, with `num_buffers`).
pub const HEADER: usize = 12;

/// Why an interface cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The tap driver is unavailable.
    #[error("cannot open /dev/net/tun: load the module tun, and give Gantry access to the device")]
    Open(#[source] io::Error),
    /// The name is too long or empty.
    #[error("{0:?} is no name of an interface: use 1 to 15 bytes")]
    Name(String),
    /// The interface cannot be attached.
    #[error("cannot use interface {name:?}: {}", hint(source))]
    Attach {
        /// Name of the interface.
        name: String,
        /// The cause.
        source: io::Error,
    },
    /// The descriptor is of something else.
    #[error("invalid descriptor of a network card: not a tap interface")]
    Descriptor(#[source] io::Error),
    /// The interface cannot be configured.
    #[error("cannot {action} interface {name:?}")]
    Configure {
        /// The action that failed.
        action: &'static str,
        /// Name of the interface.
        name: String,
        /// The cause.
        source: io::Error,
    },
    /// The descriptor was opened with other flags.
    #[error(
        "the descriptor of interface {0:?} is not for frames with virtio headers: open it with \
         IFF_TAP, IFF_NO_PI and IFF_VNET_HDR"
    )]
    Flags(String),
    /// The netmask is of another address family.
    #[error("address and mask of interface {0:?} are not of the same kind")]
    Mask(String),
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EBUSY) => {
            "it is open already, by another process or by a card of this VM that the guest has yet to give up; \
             wait for that, or use another interface"
        }
        Some(libc::EPERM) => {
            "it needs CAP_NET_ADMIN, or an interface that was made for this user \
             (ip tuntap add NAME mode tap user USER)"
        }
        Some(libc::EINVAL) => {
            "it is no tap interface, or has another number of queues (multi_queue)"
        }
        _ => "the kernel refused",
    }
}

/// One queue of a tap interface.
#[derive(Debug)]
pub struct Tap {
    file: Arc<File>,
    name: String,
    /// The kernel delivers frames to this queue. Shared by all handles of the queue.
    attached: Arc<AtomicBool>,
    /// Set if this is not a real tap.
    #[cfg(any(test, feature = "test-support"))]
    substitute: Option<Arc<Substitute>>,
}

/// Records the requests of a card to a descriptor that substitutes for a tap.
#[cfg(any(test, feature = "test-support"))]
#[derive(Debug, Default)]
pub struct Substitute {
    /// `TUN_F_*` flags.
    pub offloads: std::sync::atomic::AtomicU32,
    /// Makes it refuse to be attached or detached.
    pub stubborn: AtomicBool,
    /// Number of read and of write calls.
    pub calls: (std::sync::atomic::AtomicU64, std::sync::atomic::AtomicU64),
}

pub(super) fn ioctl<T>(fd: RawFd, request: libc::Ioctl, argument: &mut T) -> io::Result<()> {
    // SAFETY: every request here reads or writes at most a struct of type `T`, which outlives the
    // call; what the kernel writes is valid for these plain structs.
    let result = unsafe { libc::ioctl(fd, request, std::ptr::from_mut(argument)) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

pub(super) fn request(name: &str) -> Result<libc::ifreq, TapError> {
    // SAFETY: all zeroes are a valid value of this plain struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.is_empty() || name.len() >= request.ifr_name.len() || name.contains('\0') {
        return Err(TapError::Name(name.to_owned()));
    }
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = byte.cast_signed();
    }
    Ok(request)
}

impl Tap {
    /// Opens `queues` queues of the interface `name`. The interface is created if it does not
    /// exist, and then disappears with the last descriptor. Without a name, the kernel chooses one.
    pub fn open(name: Option<&str>, queues: usize) -> Result<Vec<Self>, TapError> {
        let mut taps: Vec<Self> = Vec::new();
        for _ in 0..queues {
            let name = taps
                .first()
                .map_or(name, |first| Some(&first.name))
                .map(str::to_owned);
            taps.push(Self::open_queue(name.as_deref(), queues > 1)?);
        }
        Ok(taps)
    }

    fn open_queue(name: Option<&str>, several: bool) -> Result<Self, TapError> {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK);
        let file = options.open("/dev/net/tun").map_err(TapError::Open)?;
        let mut request = request(name.unwrap_or("vmtap%d"))?;
        let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if several {
            flags |= libc::IFF_MULTI_QUEUE;
        }
        // The flags fit, because they are bits of a short.
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request).map_err(|source| {
            TapError::Attach {
                name: name.unwrap_or("vmtap%d").to_owned(),
                source,
            }
        })?;
        Self::prepare(file, read_name(&request), true)
    }

    /// Takes over a queue that another process has opened.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, TapError> {
        let file = File::from(fd);
        let mut request = request("unknown")?;
        request.ifr_name = Default::default();
        ioctl(file.as_raw_fd(), libc::TUNGETIFF, &mut request).map_err(TapError::Descriptor)?;
        // SAFETY: the kernel filled in this member.
        let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
        let needed = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if flags & needed != needed {
            return Err(TapError::Flags(read_name(&request)));
        }
        // SAFETY: sets the flags of an open descriptor.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        let attached = flags & libc::IFF_DETACH_QUEUE == 0;
        Self::prepare(file, read_name(&request), attached)
    }

    /// Wraps a descriptor that substitutes for a tap. Each read and write moves one frame with its
    /// header. For tests and fuzz targets.
    #[cfg(any(test, feature = "test-support"))]
    pub fn substitute(fd: OwnedFd) -> Self {
        // SAFETY: sets the flags of an open descriptor.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        Self {
            file: Arc::new(File::from(fd)),
            name: "substitute".to_owned(),
            attached: Arc::new(AtomicBool::new(true)),
            substitute: Some(Arc::default()),
        }
    }

    /// The requests to a substitute.
    #[cfg(any(test, feature = "test-support"))]
    pub fn asked(&self) -> Option<Arc<Substitute>> {
        self.substitute.clone()
    }

    fn prepare(file: File, name: String, attached: bool) -> Result<Self, TapError> {
        let mut len = HEADER as libc::c_int;
        let failed = |source| TapError::Configure {
            action: "set the header size of",
            name: name.clone(),
            source,
        };
        ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &mut len).map_err(failed)?;
        Ok(Self {
            file: Arc::new(file),
            name,
            attached: Arc::new(AtomicBool::new(attached)),
            #[cfg(any(test, feature = "test-support"))]
            substitute: None,
        })
    }

    /// Name of the interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its file, for another process, while it is in use here.
    pub fn share(&self) -> Weak<File> {
        Arc::downgrade(&self.file)
    }

    /// Creates another handle of the same queue.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            file: Arc::new(self.file.try_clone()?),
            name: self.name.clone(),
            attached: Arc::clone(&self.attached),
            #[cfg(any(test, feature = "test-support"))]
            substitute: self.substitute.clone(),
        })
    }

    /// Whether the kernel delivers frames to this queue.
    pub fn is_attached(&self) -> bool {
        self.attached.load(Ordering::SeqCst)
    }

    /// Attaches or detaches the queue: whether the kernel distributes frames to it. Only for
    /// multi-queue interfaces.
    pub fn attach(&self, attach: bool) -> io::Result<()> {
        if self.is_attached() == attach {
            return Ok(());
        }
        #[cfg(any(test, feature = "test-support"))]
        if let Some(substitute) = &self.substitute {
            if substitute.stubborn.load(Ordering::SeqCst) {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            self.attached.store(attach, Ordering::SeqCst);
            return Ok(());
        }
        // SAFETY: all zeroes are a valid value of this plain struct.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let flag = if attach {
            libc::IFF_ATTACH_QUEUE
        } else {
            libc::IFF_DETACH_QUEUE
        };
        // The flag fits, because it is a bit of a short.
        request.ifr_ifru.ifru_flags = flag as libc::c_short;
        ioctl(self.file.as_raw_fd(), libc::TUNSETQUEUE, &mut request)?;
        self.attached.store(attach, Ordering::SeqCst);
        Ok(())
    }

    /// Lets the kernel deliver frames with these offloads (`TUN_F_*`).
    pub fn set_offloads(&self, offloads: u32) -> io::Result<()> {
        #[cfg(any(test, feature = "test-support"))]
        if let Some(substitute) = &self.substitute {
            substitute.offloads.store(offloads, Ordering::SeqCst);
            return Ok(());
        }
        // SAFETY: the argument is a number.
        let result = unsafe {
            libc::ioctl(
                self.file.as_raw_fd(),
                libc::TUNSETOFFLOAD,
                libc::c_ulong::from(offloads),
            )
        };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Reads one frame with its header into the buffers.
    pub(super) fn read(&self, buffers: &[libc::iovec]) -> io::Result<usize> {
        #[cfg(any(test, feature = "test-support"))]
        if let Some(substitute) = &self.substitute {
            substitute.calls.0.fetch_add(1, Ordering::SeqCst);
        }
        // SAFETY: the vectors describe guest memory, which stays mapped while the snapshot from
        // which they were made is held, or a buffer that is borrowed meanwhile (`Buffers`).
        let read = unsafe {
            libc::readv(
                self.file.as_raw_fd(),
                buffers.as_ptr(),
                buffers.len() as libc::c_int,
            )
        };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    /// Writes one frame with its header from guest memory.
    pub(super) fn write(&self, buffers: &[libc::iovec]) -> io::Result<usize> {
        #[cfg(any(test, feature = "test-support"))]
        if let Some(substitute) = &self.substitute {
            substitute.calls.1.fetch_add(1, Ordering::SeqCst);
        }
        // SAFETY: as in `read`.
        let written = unsafe {
            libc::writev(
                self.file.as_raw_fd(),
                buffers.as_ptr(),
                buffers.len() as libc::c_int,
            )
        };
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

fn read_name(request: &libc::ifreq) -> String {
    let bytes: Vec<u8> = request
        .ifr_name
        .iter()
        .map(|byte| byte.cast_unsigned())
        .take_while(|&byte| byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
