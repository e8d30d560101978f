//! Network cards.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::OwnedFd,
    sync::Arc,
};

use devices::{vhost_user::Model, virtio::net};
use vmm_config::NetConfig;

use super::{
    super::{
        devices::{DeviceKind, Made, MadeFunction, Surroundings},
        error::DeviceError,
    },
    Handle, thread_name,
    vhost_user::{self, Served},
};

/// The default host address of an interface that Gantry creates. Clients that fill in the API's
/// defaults send it with every card, so it is not a request to change an existing interface.
const DEFAULT_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 168, 249, 1));

impl DeviceKind for NetConfig {
    const NAME: &'static str = "net";
    const CALLED: &'static str = "network card";

    fn shares_ram(&self) -> bool {
        !self.has_tap()
    }

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        if let Some(served) = served(self) {
            return vhost_user::make(served?, id, surroundings);
        }
        let given = surroundings.given.taps(id);
        let fds = match given.is_empty() {
            true => own_fds(self)?,
            false => given,
        };
        let options = net::Options {
            thread_name: thread_name(Self::NAME, id),
            tap: self.tap.clone(),
            fds,
            address: address(self),
            made_address: Some((DEFAULT_ADDRESS, mask_for(self, DEFAULT_ADDRESS))),
            mac: self.mac.as_deref().map(parse_mac).transpose()?,
            host_mac: self.host_mac.as_deref().map(parse_mac).transpose()?,
            mtu: self.mtu,
            num_queues: self.queues_in_pairs(),
            queue_size: self.queue_size,
            offload_tso: self.offload_tso,
            offload_ufo: self.offload_ufo,
            offload_csum: self.offload_csum,
            rate_limiter: self.rate_limiter_config,
        };
        let net = net::Net::new(options, Arc::clone(&surroundings.spawner));
        let net = net.map_err(DeviceError::of)?;
        let handle = Handle::Net(net.shared_queues());
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(net)),
            handle,
        })
    }
}

/// What another process serves for a card.
pub(super) fn served(net: &NetConfig) -> Option<Result<Served<'_>, DeviceError>> {
    let socket = net.vhost_socket.as_deref().filter(|_| !net.has_tap())?;
    let mac = match net.mac.as_deref().map(parse_mac) {
        Some(Err(error)) => return Some(Err(error)),
        Some(Ok(mac)) => mac,
        None => match net::random_mac() {
            Ok(mac) => mac,
            Err(source) => {
                let action = "make up an address";
                return Some(Err(DeviceError::Host { action, source }));
            }
        },
    };
    let offloads = [net.offload_csum, net.offload_tso, net.offload_ufo];
    let model = Model::net(mac, net.mtu, offloads, net.queue_size);
    Some(Ok(Served { socket, model }))
}

/// Duplicates descriptors for one machine: the configured ones stay open for the next boot.
fn own_fds(net: &NetConfig) -> Result<Vec<OwnedFd>, DeviceError> {
    net.fds
        .iter()
        .map(|fd| {
            fd.duplicate().map_err(|source| DeviceError::Host {
                action: "use the descriptor of a tap",
                source,
            })
        })
        .collect()
}

/// The explicitly requested host address, if any.
fn address(net: &NetConfig) -> Option<(IpAddr, IpAddr)> {
    let ip = net.ip.filter(|ip| *ip != DEFAULT_ADDRESS)?;
    Some((ip, mask_for(net, ip)))
}

fn mask_for(net: &NetConfig, ip: IpAddr) -> IpAddr {
    net.mask.unwrap_or(match ip {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::new(255, 255, 255, 0)),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from(u128::MAX << 64)),
    })
}

/// Parses six hexadecimal bytes separated by colons.
fn parse_mac(text: &str) -> Result<[u8; 6], DeviceError> {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|part| {
            u8::from_str_radix(part, 16)
                .ok()
                .filter(|_| part.len() <= 2)
        })
        .collect();
    bytes
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or_else(|| {
            DeviceError::Invalid(format!(
                "{text:?} is no MAC address such as 12:34:56:78:9a:bc"
            ))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_config::Configured;

    #[test]
    fn the_default_address_of_the_api_is_no_wish() {
        let address = |text| super::address(&NetConfig::parse(text).unwrap());
        assert_eq!(address("tap=t"), None);
        assert_eq!(address("tap=t,ip=192.168.249.1,mask=255.255.255.0"), None);
        let ip: IpAddr = "192.168.249.2".parse().unwrap();
        let mask: IpAddr = "255.255.255.0".parse().unwrap();
        assert_eq!(address("tap=t,ip=192.168.249.2"), Some((ip, mask)));
        let ip: IpAddr = "fd00::1".parse().unwrap();
        let mask: IpAddr = "ffff:ffff:ffff:ffff::".parse().unwrap();
        assert_eq!(address("tap=t,ip=fd00::1"), Some((ip, mask)));
    }
}
