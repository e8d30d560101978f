//! Tap interfaces of the host.

use std::{
    fs::{File, OpenOptions},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::OpenOptionsExt,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Bytes of the header before each frame (virtio 1.2, 5.1.6, with `num_buffers`).
pub const HEADER: usize = 12;

/// Why an interface cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// No tap driver.
    #[error("cannot open /dev/net/tun: load the module tun, and give Gantry access to the device")]
    Open(#[source] io::Error),
    /// The name is too long or empty.
    #[error("{0:?} is no name of an interface: use 1 to 15 bytes")]
    Name(String),
    /// The interface cannot be attached.
    #[error("cannot use interface {name:?}: {}", hint(source))]
    Attach {
        /// The interface.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// The interface cannot be set up.
    #[error("cannot {action} interface {name:?}")]
    Configure {
        /// What was tried.
        action: &'static str,
        /// The interface.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// A descriptor that was opened in another way.
    #[error(
        "the descriptor of interface {0:?} is not for frames with virtio headers: open it with \
         IFF_TAP, IFF_NO_PI and IFF_VNET_HDR"
    )]
    Flags(String),
    /// A mask for another kind of address.
    #[error("address and mask of interface {0:?} are not of the same kind")]
    Mask(String),
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EBUSY) => "another process has it open; stop that, or use another interface",
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
    file: File,
    name: String,
    /// The kernel hands frames to this queue; shared by all handles on it.
    attached: Arc<AtomicBool>,
}

fn ioctl<T>(fd: RawFd, request: libc::Ioctl, argument: &T) -> io::Result<()> {
    // SAFETY: every request here reads or writes a struct of type `T` at most, which outlives
    // the call; what the kernel writes is valid for these plain structs.
    let result = unsafe { libc::ioctl(fd, request, std::ptr::from_ref(argument)) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn request(name: &str) -> Result<libc::ifreq, TapError> {
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
    /// Opens `queues` queues of the interface `name`, which is made if it is not there (and goes
    /// with the last descriptor). Without a name the kernel makes one up.
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
        // The flags fit: they are bits of a short.
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        ioctl(file.as_raw_fd(), libc::TUNSETIFF, &request).map_err(|source| TapError::Attach {
            name: name.unwrap_or("vmtap%d").to_owned(),
            source,
        })?;
        Self::prepare(file, read_name(&request))
    }

    /// Takes over a queue that somebody else has opened.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, TapError> {
        let file = File::from(fd);
        let mut request = request("unknown")?;
        request.ifr_name = Default::default();
        ioctl(file.as_raw_fd(), libc::TUNGETIFF, &request).map_err(|source| TapError::Attach {
            name: format!("of descriptor {}", file.as_raw_fd()),
            source,
        })?;
        // SAFETY: the kernel filled in this member.
        let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
        let needed = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if flags & needed != needed {
            return Err(TapError::Flags(read_name(&request)));
        }
        // SAFETY: flags of an open descriptor.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        Self::prepare(file, read_name(&request))
    }

    fn prepare(file: File, name: String) -> Result<Self, TapError> {
        let len = HEADER as libc::c_int;
        let failed = |source| TapError::Configure {
            action: "set the header size of",
            name: name.clone(),
            source,
        };
        ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &len).map_err(failed)?;
        let attached = Arc::new(AtomicBool::new(true));
        Ok(Self {
            file,
            name,
            attached,
        })
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Another handle on the same queue.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            file: self.file.try_clone()?,
            name: self.name.clone(),
            attached: Arc::clone(&self.attached),
        })
    }

    /// Has the kernel spread frames to this queue, or not. Only for interfaces with several.
    pub fn attach(&self, attach: bool) -> io::Result<()> {
        if self.attached.load(Ordering::SeqCst) == attach {
            return Ok(());
        }
        // SAFETY: all zeroes are a valid value of this plain struct.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let flag = if attach {
            libc::IFF_ATTACH_QUEUE
        } else {
            libc::IFF_DETACH_QUEUE
        };
        // A bit of a short.
        request.ifr_ifru.ifru_flags = flag as libc::c_short;
        ioctl(self.file.as_raw_fd(), libc::TUNSETQUEUE, &request)?;
        self.attached.store(attach, Ordering::SeqCst);
        Ok(())
    }

    /// Lets the kernel hand over frames with these offloads (`TUN_F_*`).
    pub fn set_offloads(&self, offloads: u32) -> io::Result<()> {
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

    /// Reads one frame with its header into memory of the guest.
    pub fn read(&self, buffers: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: the caller's vectors describe guest memory, which stays mapped while the
        // snapshot that they were made from is held.
        let read = unsafe {
            libc::readv(
                self.file.as_raw_fd(),
                buffers.as_ptr(),
                buffers.len() as libc::c_int,
            )
        };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    /// Writes one frame with its header from memory of the guest.
    pub fn write(&self, buffers: &[libc::iovec]) -> io::Result<usize> {
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

/// The host's side of an interface: addresses, size of packets, state.
pub struct Interface<'a> {
    name: &'a str,
    socket: OwnedFd,
}

impl<'a> Interface<'a> {
    /// An interface that exists.
    pub fn new(name: &'a str) -> Result<Self, TapError> {
        // SAFETY: no pointers involved.
        let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            let source = io::Error::last_os_error();
            return Err(TapError::Configure {
                action: "reach",
                name: name.to_owned(),
                source,
            });
        }
        Ok(Self {
            name,
            // SAFETY: the descriptor was created just now.
            socket: unsafe { OwnedFd::from_raw_fd(fd) },
        })
    }

    /// Sets the host's address and mask.
    pub fn set_address(&self, ip: IpAddr, mask: IpAddr) -> Result<(), TapError> {
        match (ip, mask) {
            (IpAddr::V4(ip), IpAddr::V4(mask)) => {
                self.set_v4("set the address of", libc::SIOCSIFADDR, ip)?;
                self.set_v4("set the network mask of", libc::SIOCSIFNETMASK, mask)
            }
            (IpAddr::V6(ip), IpAddr::V6(mask)) => self.set_v6(ip, mask),
            _ => Err(TapError::Mask(self.name.to_owned())),
        }
    }

    fn set_v4(
        &self,
        action: &'static str,
        call: libc::c_ulong,
        ip: Ipv4Addr,
    ) -> Result<(), TapError> {
        let mut request = request(self.name)?;
        let bytes = [0; 2].into_iter().chain(ip.octets());
        // SAFETY: all zeroes are a valid value of this plain struct.
        let mut address: libc::sockaddr = unsafe { std::mem::zeroed() };
        address.sa_family = libc::AF_INET as libc::sa_family_t;
        // struct sockaddr_in: port, address.
        for (slot, byte) in address.sa_data.iter_mut().zip(bytes) {
            *slot = byte.cast_signed();
        }
        request.ifr_ifru.ifru_addr = address;
        self.call(action, call, &request)
    }

    fn set_v6(&self, ip: Ipv6Addr, mask: Ipv6Addr) -> Result<(), TapError> {
        /// `struct in6_ifreq` of the kernel.
        #[repr(C)]
        struct Request {
            address: [u8; 16],
            prefix: u32,
            index: libc::c_int,
        }
        let request = request(self.name)?;
        self.call("find the number of", libc::SIOCGIFINDEX, &request)?;
        // SAFETY: the kernel filled in this member.
        let index = unsafe { request.ifr_ifru.ifru_ifindex };
        let prefix = u128::from(mask).leading_ones();
        let address = Request {
            address: ip.octets(),
            prefix,
            index,
        };
        let action = "set the address of";
        let failed = |source| TapError::Configure {
            action,
            name: self.name.to_owned(),
            source,
        };
        // SAFETY: no pointers involved.
        let fd = unsafe { libc::socket(libc::AF_INET6, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        // SAFETY: the descriptor was created just now.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &address).map_err(failed)
    }

    /// Sets the host's MAC address.
    pub fn set_mac(&self, mac: [u8; 6]) -> Result<(), TapError> {
        let mut request = request(self.name)?;
        // SAFETY: all zeroes are a valid value of this plain struct.
        let mut address: libc::sockaddr = unsafe { std::mem::zeroed() };
        address.sa_family = libc::ARPHRD_ETHER;
        for (slot, byte) in address.sa_data.iter_mut().zip(mac) {
            *slot = byte.cast_signed();
        }
        request.ifr_ifru.ifru_hwaddr = address;
        self.call("set the MAC address of", libc::SIOCSIFHWADDR, &request)
    }

    /// Sets the largest packet.
    pub fn set_mtu(&self, mtu: u16) -> Result<(), TapError> {
        let mut request = request(self.name)?;
        request.ifr_ifru.ifru_mtu = mtu.into();
        self.call("set the MTU of", libc::SIOCSIFMTU, &request)
    }

    /// The largest packet.
    pub fn mtu(&self) -> Result<u16, TapError> {
        let request = request(self.name)?;
        self.call("read the MTU of", libc::SIOCGIFMTU, &request)?;
        // SAFETY: the kernel filled in this member.
        let mtu = unsafe { request.ifr_ifru.ifru_mtu };
        Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
    }

    /// Switches the interface on.
    pub fn up(&self) -> Result<(), TapError> {
        let mut request = request(self.name)?;
        self.call("read the state of", libc::SIOCGIFFLAGS, &request)?;
        // SAFETY: the kernel filled in this member.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        if libc::c_int::from(flags) & libc::IFF_UP != 0 {
            // Whoever prepared it may be the only one who may change it.
            return Ok(());
        }
        request.ifr_ifru.ifru_flags = flags | (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        self.call("switch on", libc::SIOCSIFFLAGS, &request)
    }

    fn call(
        &self,
        action: &'static str,
        call: libc::c_ulong,
        request: &libc::ifreq,
    ) -> Result<(), TapError> {
        ioctl(self.socket.as_raw_fd(), call, request).map_err(|source| TapError::Configure {
            action,
            name: self.name.to_owned(),
            source,
        })
    }
}
