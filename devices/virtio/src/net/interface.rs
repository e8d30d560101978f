//! The host side of a network interface: addresses, MTU and state.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use super::tap::{TapError, ioctl, request};

/// An interface, by name. Settings that are already in effect are not changed, so that an
/// unprivileged user can request the existing configuration.
pub struct Interface<'a> {
    name: &'a str,
    socket: OwnedFd,
}

impl<'a> Interface<'a> {
    /// Refers to the interface of that name, which need not exist yet.
    pub fn new(name: &'a str) -> Result<Self, TapError> {
        // SAFETY: no pointers are involved.
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

    /// Whether an interface of that name exists.
    pub fn exists(&self) -> Result<bool, TapError> {
        match self.get("find", libc::SIOCGIFINDEX) {
            Ok(_) => Ok(true),
            Err(TapError::Configure { source, .. })
                if source.raw_os_error() == Some(libc::ENODEV) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Sets the host's IP address and netmask.
    pub fn set_address(&self, ip: IpAddr, mask: IpAddr) -> Result<(), TapError> {
        match (ip, mask) {
            (IpAddr::V4(ip), IpAddr::V4(mask)) => {
                if self.v4(libc::SIOCGIFADDR) == Some(ip)
                    && self.v4(libc::SIOCGIFNETMASK) == Some(mask)
                {
                    return Ok(());
                }
                self.set_v4("set the address of", libc::SIOCSIFADDR, ip)?;
                self.set_v4("set the network mask of", libc::SIOCSIFNETMASK, mask)
            }
            (IpAddr::V6(ip), IpAddr::V6(mask)) => self.set_v6(ip, mask),
            _ => Err(TapError::Mask(self.name.to_owned())),
        }
    }

    /// The IPv4 address or netmask, if there is one.
    pub fn v4(&self, call: libc::c_ulong) -> Option<Ipv4Addr> {
        let request = self.get("read the address of", call).ok()?;
        // SAFETY: the kernel filled in this member.
        let data = unsafe { request.ifr_ifru.ifru_addr.sa_data };
        // struct sockaddr_in: port, address.
        let [_, _, a, b, c, d, ..] = data.map(libc::c_char::cast_unsigned);
        Some(Ipv4Addr::new(a, b, c, d))
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
        self.call(action, call, &mut request)
    }

    fn set_v6(&self, ip: Ipv6Addr, mask: Ipv6Addr) -> Result<(), TapError> {
        /// `struct in6_ifreq` of the kernel.
        #[repr(C)]
        struct Request {
            address: [u8; 16],
            prefix: u32,
            index: libc::c_int,
        }
        let request = self.get("find the number of", libc::SIOCGIFINDEX)?;
        // SAFETY: the kernel filled in this member.
        let index = unsafe { request.ifr_ifru.ifru_ifindex };
        let prefix = u128::from(mask).leading_ones();
        let mut address = Request {
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
        // SAFETY: no pointers are involved.
        let fd = unsafe { libc::socket(libc::AF_INET6, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        // SAFETY: the descriptor was created just now.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        match ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &mut address) {
            // The interface already has that address.
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            result => result.map_err(failed),
        }
    }

    /// The host's MAC address.
    pub fn mac(&self) -> Result<[u8; 6], TapError> {
        let request = self.get("read the MAC address of", libc::SIOCGIFHWADDR)?;
        // SAFETY: the kernel filled in this member.
        let data = unsafe { request.ifr_ifru.ifru_hwaddr.sa_data };
        let [a, b, c, d, e, f, ..] = data.map(libc::c_char::cast_unsigned);
        Ok([a, b, c, d, e, f])
    }

    /// Sets the host's MAC address.
    pub fn set_mac(&self, mac: [u8; 6]) -> Result<(), TapError> {
        if self.mac()? == mac {
            return Ok(());
        }
        let mut request = request(self.name)?;
        // SAFETY: all zeroes are a valid value of this plain struct.
        let mut address: libc::sockaddr = unsafe { std::mem::zeroed() };
        address.sa_family = libc::ARPHRD_ETHER;
        for (slot, byte) in address.sa_data.iter_mut().zip(mac) {
            *slot = byte.cast_signed();
        }
        request.ifr_ifru.ifru_hwaddr = address;
        self.call("set the MAC address of", libc::SIOCSIFHWADDR, &mut request)
    }

    /// Sets the MTU.
    pub fn set_mtu(&self, mtu: u16) -> Result<(), TapError> {
        if self.mtu()? == mtu {
            return Ok(());
        }
        let mut request = request(self.name)?;
        request.ifr_ifru.ifru_mtu = mtu.into();
        self.call("set the MTU of", libc::SIOCSIFMTU, &mut request)
    }

    /// The MTU.
    pub fn mtu(&self) -> Result<u16, TapError> {
        let request = self.get("read the MTU of", libc::SIOCGIFMTU)?;
        // SAFETY: the kernel filled in this member.
        let mtu = unsafe { request.ifr_ifru.ifru_mtu };
        Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
    }

    /// Brings the interface up.
    pub fn up(&self) -> Result<(), TapError> {
        let mut request = self.get("read the state of", libc::SIOCGIFFLAGS)?;
        // SAFETY: the kernel filled in this member.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        if libc::c_int::from(flags) & libc::IFF_UP != 0 {
            // Only the owner who prepared it may be permitted to change it.
            return Ok(());
        }
        request.ifr_ifru.ifru_flags = flags | (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        self.call("switch on", libc::SIOCSIFFLAGS, &mut request)
    }

    /// Lets the kernel fill in a request.
    fn get(&self, action: &'static str, call: libc::c_ulong) -> Result<libc::ifreq, TapError> {
        let mut request = request(self.name)?;
        self.call(action, call, &mut request)?;
        Ok(request)
    }

    fn call(
        &self,
        action: &'static str,
        call: libc::c_ulong,
        request: &mut libc::ifreq,
    ) -> Result<(), TapError> {
        ioctl(self.socket.as_raw_fd(), call, request).map_err(|source| TapError::Configure {
            action,
            name: self.name.to_owned(),
            source,
        })
    }
}
