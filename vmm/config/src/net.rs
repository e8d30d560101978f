//! Network cards.

use std::{
    os::fd::{AsRawFd, OwnedFd, RawFd},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

use super::{
    VmConfig,
    check::{self, Invalid, Placement, Problem},
    common::{CommonConfig, has_common_config},
    descriptor::Descriptor,
    kind::{
        Configured, Device, FileUse, HotPlug, Refused, check_shared_memory, needs_shared_memory,
    },
    syntax::{IOMMU, Key, LIMITS, PLACE, SyntaxError, ValueType, parse},
};

/// A network card.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct NetConfig {
    /// Name of the tap interface; one is created if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// IP address of the host's side. An existing tap keeps its address, unless this differs from
    /// the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<std::net::IpAddr>,
    /// Network mask of that address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<std::net::IpAddr>,
    /// MAC address of the guest's side; random if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// MAC address of the host's side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_mac: Option<String>,
    /// Maximum packet size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Number of queues, two for each pair. One more stands for the control queue, which a card has anyway.
    #[serde(default = "two")]
    pub num_queues: u16,
    /// Number of entries per queue, a power of two.
    #[serde(default = "queue_size")]
    pub queue_size: u16,
    /// Another process serves the device.
    #[serde(default)]
    pub vhost_user: bool,
    /// That process's socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_socket: Option<PathBuf>,
    /// `Client` or `Server`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_mode: Option<String>,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
    /// Rate limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limiter_config: Option<devices::rate_limiter::RateLimiterConfig>,
    /// TCP segmentation offload.
    #[serde(default = "yes")]
    pub offload_tso: bool,
    /// UDP fragmentation offload.
    #[serde(default = "yes")]
    pub offload_ufo: bool,
    /// Checksum offload.
    #[serde(default = "yes")]
    pub offload_csum: bool,
    /// Descriptors of an open tap, one for each pair of queues; never part of a request body.
    #[serde(skip)]
    pub fds: Vec<Descriptor>,
}

fn two() -> u16 {
    2
}

fn queue_size() -> u16 {
    256
}

fn yes() -> bool {
    true
}

impl Default for NetConfig {
    fn default() -> Self {
        Self {
            tap: None,
            ip: None,
            mask: None,
            mac: None,
            host_mac: None,
            mtu: None,
            iommu: false,
            num_queues: two(),
            queue_size: queue_size(),
            vhost_user: false,
            vhost_socket: None,
            vhost_mode: None,
            common: CommonConfig::default(),
            rate_limiter_config: None,
            offload_tso: true,
            offload_ufo: true,
            offload_csum: true,
            fds: Vec::new(),
        }
    }
}

const KEYS: &[Key] = &[
    Key::new("tap", ValueType::Text),
    Key::new("ip", ValueType::Text),
    Key::new("mask", ValueType::Text),
    Key::new("mac", ValueType::Text),
    Key::new("host_mac", ValueType::Text),
    Key::new("mtu", ValueType::Number),
    Key::named("fd", "", ValueType::Numbers),
    Key::new("num_queues", ValueType::Number),
    Key::new("queue_size", ValueType::Number),
    Key::new("vhost_user", ValueType::Switch),
    Key::named("socket", "vhost_socket", ValueType::Text),
    Key::new(
        "vhost_mode",
        ValueType::Choice(&[("client", "Client"), ("server", "Server")]),
    ),
    Key::new("offload_tso", ValueType::Switch),
    Key::new("offload_ufo", ValueType::Switch),
    Key::new("offload_csum", ValueType::Switch),
];

has_common_config!(NetConfig);

impl Configured for NetConfig {
    const HELP: &'static str = "Network cards: tap=NAME,mac=MAC,host_mac=MAC,ip=ADDRESS,mask=MASK,fd=[N,N],num_queues=N, \
        queue_size=N,mtu=N,offload_tso=on|off,offload_ufo=on|off,offload_csum=on|off,bw_size=SIZE, \
        bw_one_time_burst=SIZE,bw_refill_time=MS,ops_size=N,ops_one_time_burst=N, \
        ops_refill_time=MS,id=NAME. A card of another process (vhost-user): vhost_user=on,socket=PATH, \
        vhost_mode=client,mac=MAC,mtu=N,id=NAME. The memory has to be shared (see --memory)";

    const HOT_PLUG: Option<HotPlug> = Some(HotPlug {
        about: "Plug in a network card",
        help: "As for --net: tap=NAME,mac=MAC,fd=[N,N],id=NAME,...; descriptors are passed on",
    });

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, LIMITS, IOMMU, PLACE];

    /// Parses the value of `--net`. `num_queues` defaults to two for each descriptor.
    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let mut parsed = parse("--net", input, Self::SYNTAX)?;
        let fds: Vec<i32> = parsed.take("fd").unwrap_or_default();
        if !fds.is_empty() {
            parsed.default("num_queues", 2 * fds.len());
        }
        let mut config: Self = parsed.build()?;
        config.fds = fds.into_iter().map(Descriptor::Inherited).collect();
        Ok(config)
    }
}

impl Device for NetConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.has_tap() {
            if self.vhost_socket.is_some() {
                return Err(
                    Problem::Missing("a socket is that of a vhost-user card").at("vhost_user")
                );
            }
        } else {
            self.validate_served()?;
        }
        check::range("num_queues", self.num_queues, 2, self.max_queues())?;
        check::queue_size(self.queue_size)?;
        if let Some(tap) = &self.tap {
            // IFNAMSIZ, including the terminating zero.
            let valid = (1..16).contains(&tap.len())
                && !tap.contains(|c: char| c == '/' || c.is_whitespace());
            check::text("tap", tap, valid, "an interface name of 1 to 15 bytes")?;
        }
        for (place, mac) in [("mac", &self.mac), ("host_mac", &self.host_mac)] {
            if let Some(mac) = mac {
                let expected = "a unicast MAC address such as 52:54:00:12:34:56";
                check::text(place, mac, is_unicast_mac(mac), expected)?;
            }
        }
        if let Some(mtu) = self.mtu {
            // The minimum for IPv4.
            check::range("mtu", mtu, 68, u64::from(u16::MAX))?;
        }
        if let (Some(ip), Some(mask)) = (self.ip, self.mask)
            && ip.is_ipv4() != mask.is_ipv4()
        {
            let expected = "a network mask of the address's family";
            check::text("mask", &mask.to_string(), false, expected)?;
        }
        if !self.fds.is_empty() {
            if self.tap.is_some() {
                let advice = "leave tap out";
                let with = "descriptors (fd)";
                return Err(Problem::Conflict { with, advice }.at("tap"));
            }
            check::number(
                "num_queues",
                self.num_queues,
                usize::from(self.num_queues) == 2 * self.fds.len(),
                "twice the number of descriptors",
            )?;
        }
        self.placement().validate()
    }

    fn placement(&self) -> Placement<'_> {
        Placement {
            iommu: self.iommu,
            ..self.common.placement()
        }
    }

    fn files(&self) -> Vec<FileUse> {
        match self.has_tap() {
            true => vec![FileUse::open("/dev/net/tun", false)],
            false => Vec::new(),
        }
    }

    fn validate_in(&self, vm: &VmConfig) -> Result<(), Invalid> {
        match self.has_tap() {
            true => Ok(()),
            false => needs_shared_memory(vm, "vhost_user"),
        }
    }

    fn check_joins(&self, vm: &VmConfig, _running: bool) -> Result<(), Refused> {
        match self.has_tap() {
            true => Ok(()),
            false => check_shared_memory(vm),
        }
    }

    fn cannot_move(&self) -> Option<&'static str> {
        (!self.has_tap()).then_some("network card of another process")
    }

    fn cannot_be_saved(&self) -> bool {
        !self.has_tap()
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.fds.iter().map(AsRawFd::as_raw_fd).collect()
    }

    fn take_descriptors(&mut self, descriptors: Vec<OwnedFd>) -> Result<(), Refused> {
        if usize::from(self.num_queues) != 2 * descriptors.len() {
            return Err(Refused(format!(
                "{} descriptors came with the request, but num_queues is {}: one is needed for each \
                 pair of queues",
                descriptors.len(),
                self.num_queues
            )));
        }
        self.fds = descriptors.into_iter().map(Descriptor::from).collect();
        Ok(())
    }
}

impl NetConfig {
    /// Maximum number of queues: 128 pairs; Linux's tap supports up to 256.
    const MAX_QUEUES: u64 = 256;

    /// Whether Gantry serves the card, by a tap; otherwise another process does.
    pub fn has_tap(&self) -> bool {
        !self.vhost_user
    }

    /// A back end serves one pair, as queues for control are not passed on; a third one stands for that.
    fn max_queues(&self) -> u64 {
        match self.has_tap() {
            true => Self::MAX_QUEUES,
            false => 3,
        }
    }

    /// Checks a card that another process serves.
    fn validate_served(&self) -> Result<(), Invalid> {
        let is_named = |path: &PathBuf| !path.as_os_str().is_empty();
        if !self.vhost_socket.as_ref().is_some_and(is_named) {
            return Err(Problem::Missing("name the socket of its back end").at("vhost_socket"));
        }
        check::unsupported(
            self.vhost_mode.as_deref() == Some("Server"),
            "vhost_mode",
            "sockets to which a back end connects",
            "let the back end listen, and use client",
        )?;
        let is_of_taps = [
            ("tap", self.tap.is_some()),
            ("fds", !self.fds.is_empty()),
            ("host_mac", self.host_mac.is_some()),
            ("rate_limiter_config", self.rate_limiter_config.is_some()),
        ];
        match is_of_taps.iter().find(|(_, is_set)| *is_set) {
            Some((place, _)) => {
                let with = "vhost_user";
                let advice = "the card's back end decides about that";
                Err(Problem::Conflict { with, advice }.at(*place))
            }
            None => Ok(()),
        }
    }

    /// Number of queues without the control queue.
    pub fn queues_in_pairs(&self) -> u16 {
        self.num_queues & !1
    }
}

/// Whether the text consists of six hexadecimal bytes separated by colons, not all zero and without
/// the group bit.
fn is_unicast_mac(text: &str) -> bool {
    let byte = |part: &str| match part.len() {
        1 | 2 if part.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            u8::from_str_radix(part, 16).ok()
        }
        _ => None,
    };
    let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
    bytes.is_some_and(|bytes| {
        bytes.len() == 6 && bytes[0] & 1 == 0 && bytes.iter().any(|byte| *byte != 0)
    })
}
