//! Devices that are removed from this guest, or get their drivers, as its kernel tells.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

/// The group of the kernel's own messages about devices (uevents).
const KERNEL: u32 = 1;
/// Bytes of a message that are looked at: it begins with `remove@` and the device's path, and udev's
/// own messages, which are longer, are for another group.
const LOOK: usize = 512;

/// Hears of PCI functions.
#[derive(Debug)]
pub struct Removals(OwnedFd);

impl Removals {
    /// Begins to listen.
    pub fn listen() -> io::Result<Self> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no pointers.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_KOBJECT_UEVENT) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: all zeroes are a valid address.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
        address.nl_groups = KERNEL;
        // SAFETY: the address outlives the call and is as long as is said.
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

    /// What to poll for messages.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Takes what has come: whether a PCI function has been removed, and whether one has got a driver,
    /// as far as is known. Who makes up such a message has the agent look once more.
    pub fn heard(&self) -> (bool, bool) {
        let (mut removed, mut bound) = (false, false);
        let mut message = [0; LOOK];
        loop {
            // SAFETY: the buffer is as long as is said.
            let got = unsafe { libc::recv(self.fd(), message.as_mut_ptr().cast(), LOOK, 0) };
            match usize::try_from(got) {
                Ok(got) => {
                    removed |= is_removal(&message[..got]);
                    bound |= is_bind(&message[..got]);
                }
                Err(_) => match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR) => {}
                    // Messages were lost.
                    Some(libc::ENOBUFS) => (removed, bound) = (true, true),
                    _ => return (removed, bound),
                },
            }
        }
    }
}

/// Whether a PCI function has got a driver.
fn is_bind(message: &[u8]) -> bool {
    let path = message.split(|byte| *byte == 0).next().unwrap_or_default();
    path.starts_with(b"bind@/devices/pci")
}

fn is_removal(message: &[u8]) -> bool {
    let path = message.split(|byte| *byte == 0).next().unwrap_or_default();
    path.starts_with(b"remove@/devices/pci")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_function_is_told_from_other_news() {
        assert!(is_removal(
            b"remove@/devices/pci0000:00/0000:00:05.0\0ACTION=remove\0"
        ));
        for other in [
            &b"add@/devices/pci0000:00/0000:00:05.0\0ACTION=add\0"[..],
            b"remove@/devices/virtual/block/loop0\0ACTION=remove\0",
            b"libudev\0remove@/devices/pci0000:00",
            b"",
        ] {
            assert!(!is_removal(other), "{}", String::from_utf8_lossy(other));
            assert!(!is_bind(other), "{}", String::from_utf8_lossy(other));
        }
        assert!(is_bind(
            b"bind@/devices/pci0000:00/0000:00:05.0\0ACTION=bind\0"
        ));
    }

    #[test]
    fn who_listens_and_hears_nothing_does_not_wait() {
        assert_eq!(Removals::listen().unwrap().heard(), (false, false));
    }
}
