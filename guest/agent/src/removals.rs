//! Kernel events about devices that are added to this guest, bound to drivers, or removed.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

/// The group of the kernel's own messages about devices (uevents).
const KERNEL: u32 = 1;
/// The number of bytes of a message to look at. A message begins with `remove@` and the device's
/// path. udev's own messages, which are longer, are for another group.
const LOOK: usize = 512;

/// What has happened to PCI functions.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct News {
    /// A function was removed.
    pub removed: bool,
    /// A function was added.
    pub added: bool,
    /// The addresses of functions that were bound to a driver. An empty address stands for any
    /// function.
    pub bound: Vec<String>,
}

/// Receives events about PCI functions.
#[derive(Debug)]
pub struct Removals(OwnedFd);

impl Removals {
    /// Starts listening.
    pub fn listen() -> io::Result<Self> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no pointers.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_KOBJECT_UEVENT) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just created and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: all zeroes are a valid address.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
        address.nl_groups = KERNEL;
        // SAFETY: the address outlives the call and has the length that is passed.
        let bound = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        };
        if bound < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(socket))
    }

    /// The descriptor to poll for messages.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// The same, borrowed.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Receives the events that have arrived. A forged message only makes the agent look once more.
    pub fn heard(&self) -> News {
        let mut news = News::default();
        let mut message = [0; LOOK];
        loop {
            // SAFETY: the buffer has the length that is passed.
            let got = unsafe { libc::recv(self.fd(), message.as_mut_ptr().cast(), LOOK, 0) };
            match usize::try_from(got) {
                Ok(got) => {
                    let message = &message[..got];
                    news.removed |= function(message, b"remove@").is_some();
                    news.added |= function(message, b"add@").is_some();
                    news.bound.extend(function(message, b"bind@"));
                }
                Err(_) => match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR) => {}
                    // Messages were lost.
                    Some(libc::ENOBUFS) => {
                        (news.removed, news.added) = (true, true);
                        news.bound.push(String::new());
                    }
                    _ => return news,
                },
            }
        }
    }
}

/// The address of the PCI function that this message is about, if it reports an event of this kind.
fn function(message: &[u8], what: &[u8]) -> Option<String> {
    let text = message.split(|byte| *byte == 0).next()?;
    let path = text.strip_prefix(what)?;
    path.starts_with(b"/devices/pci").then_some(())?;
    let name = path.rsplit(|byte| *byte == b'/').next()?;
    Some(String::from_utf8_lossy(name).into_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_to_a_function_is_told_from_other_news() {
        for what in [&b"remove@"[..], b"add@", b"bind@"] {
            let path = b"/devices/pci0000:00/0000:00:05.0\0ACTION=remove\0";
            let message = [what, path].concat();
            assert_eq!(function(&message, what).as_deref(), Some("0000:00:05.0"));
            assert_eq!(function(&message, b"change@"), None);
        }
        for other in [
            &b"add@/devices/pci0000:00/0000:00:05.0\0ACTION=add\0"[..],
            b"remove@/devices/virtual/block/loop0\0ACTION=remove\0",
            b"libudev\0remove@/devices/pci0000:00",
            b"",
        ] {
            assert_eq!(
                function(other, b"remove@"),
                None,
                "{}",
                String::from_utf8_lossy(other)
            );
        }
    }

    #[test]
    fn who_listens_and_hears_nothing_does_not_wait() {
        assert_eq!(Removals::listen().unwrap().heard(), News::default());
    }
}
