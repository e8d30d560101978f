//! Accelerators whose calls are served by worker processes, or by a server VM's process.

use std::path::{Path, PathBuf};

use base::{
    gpus::Selection,
    paths::{CUDA_SOCKET, NVIDIA_VM_SOCKET, OPENCL_SOCKET},
};
use devices::{
    accel::{ApiId, Apis, LONGEST_NAME, MOST_SLICES, SMALLEST_SLICE},
    gate::MOST_SHARED,
};
use serde::{Deserialize, Serialize};

use super::{
    VmConfig,
    check::{self, Invalid, Placement, Problem},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, HotPlug, Refused},
    syntax::{IOMMU, Key, PLACE, SyntaxError, ValueType, parse},
};

/// Default window size: address space, backed by memory only where it is used.
const WINDOW: u64 = 4 << 30;
/// Default number of concurrent applications.
const SLICES: u32 = 8;
/// Default size of the memory shared with a server.
pub const SHARED: u64 = 1 << 20;
/// Default window size for native contexts: what the programs of a guest share with their devices.
const NATIVE_WINDOW: u64 = 16 << 30;
/// Default time limit, in milliseconds, for an application to reach a point at which it can be moved.
pub const DRAIN_MS: u64 = 10_000;

/// Default size of the space in which device pages are shown, for native contexts.
const NATIVE_PAGES: u64 = 64 << 20;
/// Maximum window size.
const LARGEST_WINDOW: u64 = 1 << 40;

/// The accelerator APIs that the guest's applications may use.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum AccelApi {
    /// OpenCL, on any device that the host has an OpenCL driver for.
    #[default]
    Opencl,
    /// CUDA's driver API, on NVIDIA's devices.
    Cuda,
    /// Either one; each application chooses.
    OpenclCuda,
    /// NVIDIA's kernel interface: programs use NVIDIA's own libraries (native contexts).
    Nvidia,
}

impl AccelApi {
    /// The APIs that the port offers.
    pub fn offered(self) -> Apis {
        match self {
            Self::Opencl => Apis::one(ApiId::OpenCl),
            Self::Cuda => Apis::one(ApiId::Cuda),
            Self::OpenclCuda => Apis::ALL,
            Self::Nvidia => Apis::one(ApiId::Nvidia),
        }
    }

    /// Its name on the command line.
    fn name(self) -> &'static str {
        match self {
            Self::Opencl => "opencl",
            Self::Cuda => "cuda",
            Self::OpenclCuda => "opencl,cuda",
            Self::Nvidia => "nvidia",
        }
    }
}

/// How calls reach the process that executes them, in the form of configuration files.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum AccelTransport {
    /// Through rings in shared memory, which a worker process of the host polls.
    #[default]
    Ring,
    /// The caller's vCPU executes the code of a server VM's process, without an exit.
    Gate,
}

/// An accelerator port.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Flat", into = "Flat")]
pub struct AccelConfig {
    /// The API that its applications use.
    pub api: AccelApi,
    /// How calls reach the process that executes them.
    pub via: AccelVia,
    /// Behind a virtual IOMMU.
    pub iommu: bool,
    /// Its name and location.
    pub common: CommonConfig,
}

/// How calls reach the process that executes them, with the settings of that transport.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum AccelVia {
    /// Through rings in shared memory, to a worker process of the host.
    Ring(RingConfig),
    /// Through VMFUNC, to a process of a server VM.
    Gate(GateConfig),
}

impl Default for AccelVia {
    fn default() -> Self {
        Self::Ring(RingConfig::default())
    }
}

/// The workers of a pool, and the memory that is shared with them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RingConfig {
    /// Socket of the worker pool (`gantry-accel serve`).
    pub socket: PathBuf,
    /// The devices that the guest gets, as [`base::gpus`] names them; all that the pool lends if absent.
    pub device: Option<String>,
    /// Weight against other VMs when the device is shared, 1 to 10000; 0: only while nobody else has work.
    pub weight: u32,
    /// For how many milliseconds, 1 to 1000, applications wait at most for time slices of other VMs; no bound if absent.
    pub latency: Option<u32>,
    /// Maximum number of bytes of device memory for all of the VM's applications on this port
    /// together; unlimited if absent.
    pub memory: Option<u64>,
    /// Bytes of memory shared with workers, a power of two.
    pub window: u64,
    /// Maximum number of concurrent applications, a power of two up to 64; each gets an equal part
    /// of the window.
    pub slices: u32,
    /// The name under which the pool keeps the machine's compiled programs; `off` keeps none. If
    /// absent, they are kept as long as the machine runs.
    pub compiler_cache: Option<String>,
    /// Bytes of address space in which the guest sees pages of devices, a power of two from 1 MiB to
    /// 4 GiB; for native contexts alone.
    pub pages: Option<u64>,
}

impl Default for RingConfig {
    fn default() -> Self {
        Self {
            socket: OPENCL_SOCKET.into(),
            device: None,
            weight: 1,
            latency: None,
            memory: None,
            window: WINDOW,
            slices: SLICES,
            compiler_cache: None,
            pages: None,
        }
    }
}

/// A process of a server VM, and the memory that is shared with it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GateConfig {
    /// Socket of the server's machine (`--accel-server`).
    pub server: PathBuf,
    /// Bytes of memory shared with the server, whole pages from 8 KiB to 16 MiB.
    pub shared: u64,
}

/// The serialized form: one object with the fields of both transports.
#[derive(Default, Serialize, Deserialize)]
struct Flat {
    #[serde(default, alias = "backend")]
    api: AccelApi,
    #[serde(default)]
    transport: AccelTransport,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    server: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    socket: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weight: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    latency: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    window: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slices: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    compiler_cache: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pages: Option<u64>,
    #[serde(default)]
    iommu: bool,
    #[serde(flatten)]
    common: CommonConfig,
}

/// Fields that cannot be combined.
#[derive(Debug, thiserror::Error)]
enum FlatError {
    #[error(
        "server: transport=gate needs the socket of the server's machine (its --accel-server \
         socket=)"
    )]
    NoServer,
    #[error("{0}: only transport=gate uses it; add transport=gate, or leave {0} out")]
    OnlyGate(&'static str),
    #[error("{0}: only transport=ring uses it; leave {0} out")]
    OnlyRing(&'static str),
}

impl TryFrom<Flat> for AccelConfig {
    type Error = FlatError;

    // Earlier versions wrote the defaults of both transports, so those are accepted for either.
    fn try_from(flat: Flat) -> Result<Self, FlatError> {
        let ring = match (flat.api, flat.transport) {
            (AccelApi::Nvidia, AccelTransport::Ring) => RingConfig::native(),
            _ => RingConfig::default(),
        };
        let ring = RingConfig {
            socket: flat.socket.unwrap_or(ring.socket),
            device: flat.device,
            weight: flat.weight.unwrap_or(ring.weight),
            latency: flat.latency,
            memory: flat.memory,
            window: flat.window.unwrap_or(ring.window),
            slices: flat.slices.unwrap_or(ring.slices),
            compiler_cache: flat.compiler_cache,
            pages: flat.pages.or(ring.pages),
        };
        let shared = flat.shared.unwrap_or(SHARED);
        let via = match flat.transport {
            AccelTransport::Ring if flat.server.is_some() => {
                return Err(FlatError::OnlyGate("server"));
            }
            AccelTransport::Ring if shared != SHARED => return Err(FlatError::OnlyGate("shared")),
            AccelTransport::Ring => AccelVia::Ring(ring),
            AccelTransport::Gate => {
                if let Some(field) = ring.changed() {
                    return Err(FlatError::OnlyRing(field));
                }
                let server = flat.server.filter(|path| !path.as_os_str().is_empty());
                let server = server.ok_or(FlatError::NoServer)?;
                AccelVia::Gate(GateConfig { server, shared })
            }
        };
        Ok(Self {
            api: flat.api,
            via,
            iommu: flat.iommu,
            common: flat.common,
        })
    }
}

impl From<AccelConfig> for Flat {
    fn from(config: AccelConfig) -> Self {
        let flat = Self {
            api: config.api,
            iommu: config.iommu,
            common: config.common,
            ..Self::default()
        };
        match config.via {
            AccelVia::Ring(ring) => Self {
                transport: AccelTransport::Ring,
                socket: Some(ring.socket),
                device: ring.device,
                weight: Some(ring.weight),
                latency: ring.latency,
                memory: ring.memory,
                window: Some(ring.window),
                slices: Some(ring.slices),
                compiler_cache: ring.compiler_cache,
                pages: ring.pages,
                ..flat
            },
            AccelVia::Gate(gate) => Self {
                transport: AccelTransport::Gate,
                server: Some(gate.server),
                shared: Some(gate.shared),
                ..flat
            },
        }
    }
}

impl AccelConfig {
    /// Advice for the user if no process serves the port's applications.
    pub fn missing_pool(&self) -> Option<String> {
        let AccelVia::Ring(ring) = &self.via else {
            return None;
        };
        let path = ring.pool(self.api);
        let why = base::socket::is_served(path).err()?;
        let path = path.display();
        let start = match self.api {
            AccelApi::Nvidia => format!("gantry-nvidia --vm {path}"),
            AccelApi::Opencl => format!("gantry-accel serve --socket {path}"),
            api => format!("gantry-accel serve --api {} --socket {path}", api.name()),
        };
        Some(format!("no pool listens on {path} ({why}): start {start}"))
    }
}

impl RingConfig {
    /// The defaults for native contexts.
    fn native() -> Self {
        Self {
            socket: NVIDIA_VM_SOCKET.into(),
            window: NATIVE_WINDOW,
            slices: 1,
            pages: Some(NATIVE_PAGES),
            ..Self::default()
        }
    }

    /// The socket of the worker pool of an API: the configured one, or the default.
    pub fn pool(&self, api: AccelApi) -> &Path {
        match api {
            AccelApi::Cuda if self.socket == Path::new(OPENCL_SOCKET) => Path::new(CUDA_SOCKET),
            _ => &self.socket,
        }
    }

    /// The first field that differs from its default.
    fn changed(&self) -> Option<&'static str> {
        let default = Self::default();
        let changed = [
            (self.socket != default.socket, "socket"),
            (self.device != default.device, "device"),
            (self.weight != default.weight, "weight"),
            (self.latency != default.latency, "latency"),
            (self.memory != default.memory, "memory"),
            (self.window != default.window, "window"),
            (self.slices != default.slices, "slices"),
            (
                self.compiler_cache != default.compiler_cache,
                "compiler_cache",
            ),
            (self.pages != default.pages, "pages"),
        ];
        changed
            .into_iter()
            .find_map(|(differs, field)| differs.then_some(field))
    }

    /// Checks what applies to native contexts alone, and what does not apply to them.
    fn validate_native(&self, api: AccelApi) -> Result<(), Invalid> {
        if api != AccelApi::Nvidia {
            let (with, advice) = (
                "another api than nvidia",
                "leave pages out, or take api=nvidia",
            );
            return match self.pages {
                Some(_) => Err(Problem::Conflict { with, advice }.at("pages")),
                None => Ok(()),
            };
        }
        let with = "api=nvidia";
        for (wanted, place, advice) in [
            (
                self.slices != 1,
                "slices",
                "leave slices out: one worker serves all programs, with the whole window",
            ),
            (
                self.device.is_some(),
                "device",
                "leave device out: programs have all devices",
            ),
            (
                self.compiler_cache.is_some(),
                "compiler_cache",
                "leave compiler_cache out: programs compile in the guest",
            ),
        ] {
            if wanted {
                return Err(Problem::Conflict { with, advice }.at(place));
            }
        }
        let pages = self.pages.unwrap_or(NATIVE_PAGES);
        let valid = pages.is_power_of_two() && (1 << 20..=4 << 30).contains(&pages);
        let expected = "a power of two from 1 MiB (1048576) to 4 GiB (4294967296)";
        check::number("pages", pages, valid, expected)
    }

    fn validate(&self, api: AccelApi) -> Result<(), Invalid> {
        self.validate_native(api)?;
        if self.socket.as_os_str().is_empty() {
            return Err(Problem::Missing("name the worker pool's socket").at("socket"));
        }
        if let Some(device) = &self.device {
            let valid = (1..=LONGEST_NAME).contains(&device.len());
            let valid = valid && device.parse::<Selection>().is_ok();
            let expected = "an index, a UUID, a PCI address or a part of a model's name, joined by +, up to 64 bytes";
            check::text("device", device, valid, expected)?;
        }
        if let Some(name) = &self.compiler_cache {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
            let valid = (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(plain);
            let expected = "\"off\", or a name of letters, digits, - and _, up to 64 of them";
            check::text("compiler_cache", name, valid, expected)?;
        }
        let valid = self.weight <= 10_000;
        check::number("weight", self.weight, valid, "1 to 10000, or idle (0)")?;
        if self.weight == 0 && api == AccelApi::Nvidia {
            let (with, advice) = ("api=nvidia", "use a weight from 1 to 10000");
            return Err(Problem::Conflict { with, advice }.at("weight"));
        }
        if let Some(latency) = self.latency {
            check::range("latency", latency, 1, 1000)?;
            if self.weight == 0 {
                let (with, advice) = ("weight=idle", "leave one of them out");
                return Err(Problem::Conflict { with, advice }.at("latency"));
            }
        }
        if let Some(memory) = self.memory {
            let expected = "1 MiB (1048576) or more";
            check::number("memory", memory, memory >= 1 << 20, expected)?;
        }
        let valid = self.slices.is_power_of_two() && self.slices <= MOST_SLICES;
        check::number("slices", self.slices, valid, "a power of two up to 64")?;
        let smallest = u64::from(self.slices) * SMALLEST_SLICE;
        let valid =
            self.window.is_power_of_two() && (smallest..=LARGEST_WINDOW).contains(&self.window);
        let expected =
            "a power of two of at least 8 MiB (8388608) for each slice, and at most 1 TiB";
        check::number("window", self.window, valid, expected)
    }
}

impl GateConfig {
    fn validate(&self) -> Result<(), Invalid> {
        let valid = self.shared.is_multiple_of(4096) && (8192..=MOST_SHARED).contains(&self.shared);
        let expected = "whole pages of 4 KiB, two (8192) at least, and at most 16 MiB";
        check::number("shared", self.shared, valid, expected)
    }
}

const KEYS: &[Key] = &[
    Key::new(
        "api",
        ValueType::Choice(&[
            ("opencl", "Opencl"),
            ("cuda", "Cuda"),
            ("opencl,cuda", "OpenclCuda"),
            ("cuda,opencl", "OpenclCuda"),
            ("nvidia", "Nvidia"),
        ]),
    ),
    Key::new(
        "transport",
        ValueType::Choice(&[("ring", "Ring"), ("gate", "Gate")]),
    ),
    Key::new("server", ValueType::Text),
    Key::new("shared", ValueType::Size),
    Key::new("socket", ValueType::Text),
    Key::new("device", ValueType::Text),
    Key::new("weight", ValueType::NumberOr("idle", 0)),
    Key::new("latency", ValueType::Number),
    Key::new("memory", ValueType::Size),
    Key::new("window", ValueType::Size),
    Key::new("slices", ValueType::Number),
    Key::new("compiler_cache", ValueType::Text),
    Key::new("pages", ValueType::Size),
];

has_common_config!(AccelConfig);

impl Configured for AccelConfig {
    const HELP: &'static str = "Accelerators whose calls are served by gantry-accel: \
        api=opencl|cuda|opencl,cuda,socket=PATH,device=NAME,weight=N|idle,latency=MS,memory=SIZE,window=SIZE,slices=N, \
        compiler_cache=NAME|off,id=NAME; or, for native contexts, by gantry-nvidia --vm: \
        api=nvidia,socket=PATH,memory=SIZE,window=SIZE,pages=SIZE,id=NAME; or by a process of a server VM, without exits: transport=gate,server=PATH,shared=SIZE,id=NAME";

    const HOT_PLUG: Option<HotPlug> = Some(HotPlug {
        about: "Plug in an accelerator",
        help: "As for --accel: socket=PATH,device=NAME,weight=N|idle,latency=MS,window=SIZE,id=NAME,...",
    });

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, IOMMU, PLACE];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        parse("--accel", input, Self::SYNTAX)?.build()
    }
}

impl Device for AccelConfig {
    fn validate(&self) -> Result<(), Invalid> {
        match &self.via {
            AccelVia::Ring(ring) => ring.validate(self.api)?,
            AccelVia::Gate(_) if self.api == AccelApi::OpenclCuda => {
                let (with, advice) = ("transport=gate", "name the one that the server serves");
                return Err(Problem::Conflict { with, advice }.at("api"));
            }
            AccelVia::Gate(_) if self.api == AccelApi::Nvidia => {
                let (with, advice) = ("transport=gate", "leave transport out");
                return Err(Problem::Conflict { with, advice }.at("api"));
            }
            AccelVia::Gate(gate) => gate.validate()?,
        }
        self.placement().validate()
    }

    fn placement(&self) -> Placement<'_> {
        Placement {
            iommu: self.iommu,
            ..self.common.placement()
        }
    }

    /// The guest has already detected its CPU's features, and they do not change later.
    fn check_joins(&self, vm: &VmConfig, running: bool) -> Result<(), Refused> {
        if running && self.is_gate() && !vm.has_gate() && vm.cpus.nested {
            return Err(Refused(
                "the guest may run VMs of its own, and cannot use the gate then: start the VM with \
                 --cpus nested=off, or with the gate"
                    .to_owned(),
            ));
        }
        // A port that the VM starts with may wait for its pool; the log reports it.
        match self.missing_pool() {
            Some(missing) if running => Err(Refused(missing)),
            _ => Ok(()),
        }
    }

    fn cannot_move(&self) -> Option<&'static str> {
        Some("accelerator")
    }
}

impl AccelConfig {
    /// Whether its calls go through a gate.
    pub fn is_gate(&self) -> bool {
        matches!(self.via, AccelVia::Gate(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_accelerator_is_described_in_one_option() {
        let config = AccelConfig::parse(
            "api=opencl,socket=/s,device=H200,weight=3,latency=2,memory=8G,window=1G,slices=4,\
             compiler_cache=web-1,id=a",
        )
        .unwrap();
        let ring = RingConfig {
            socket: "/s".into(),
            device: Some("H200".to_owned()),
            weight: 3,
            latency: Some(2),
            memory: Some(8 << 30),
            window: 1 << 30,
            slices: 4,
            compiler_cache: Some("web-1".to_owned()),
            pages: None,
        };
        let expected = AccelConfig {
            via: AccelVia::Ring(ring),
            common: CommonConfig::named("a"),
            ..AccelConfig::default()
        };
        assert_eq!(config, expected);
        assert_eq!(config.validate(), Ok(()));
        assert!(AccelConfig::parse("api=direct3d").is_err());
    }

    #[test]
    fn a_port_is_for_one_api_or_for_both() {
        for (text, expected, pool) in [
            ("id=a", AccelApi::Opencl, OPENCL_SOCKET),
            ("api=cuda,id=a", AccelApi::Cuda, CUDA_SOCKET),
            ("api=opencl,cuda,id=a", AccelApi::OpenclCuda, OPENCL_SOCKET),
            ("id=a,api=cuda,opencl", AccelApi::OpenclCuda, OPENCL_SOCKET),
            ("api=opencl, cuda", AccelApi::OpenclCuda, OPENCL_SOCKET),
            (
                "api=\"opencl,cuda\",id=a",
                AccelApi::OpenclCuda,
                OPENCL_SOCKET,
            ),
        ] {
            let config = AccelConfig::parse(text).unwrap();
            assert_eq!(config.api, expected, "{text}");
            let AccelVia::Ring(ring) = &config.via else {
                panic!("{text}");
            };
            assert_eq!(ring.pool(config.api), Path::new(pool), "{text}");
            let written = serde_json::to_value(&config).unwrap();
            assert_eq!(
                serde_json::from_value::<AccelConfig>(written).unwrap(),
                config
            );
        }
        for (text, words) in [
            ("api=opencl,opencl", "unknown key 'opencl'"),
            ("api=opencl,cuda,cuda", "unknown key 'cuda'"),
            ("api=opencl,id=a,cuda", "unknown key 'cuda'"),
            ("api=opencl,direct3d", "unknown key 'direct3d'"),
        ] {
            let error = AccelConfig::parse(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
        let missing = AccelConfig::parse("api=opencl,cuda,socket=/nowhere/pool").unwrap();
        let said = missing.missing_pool().unwrap();
        assert!(
            said.contains("serve --api opencl,cuda --socket /nowhere"),
            "{said}"
        );
    }

    #[test]
    fn native_contexts_have_one_slice_and_space_for_device_pages() {
        let config = AccelConfig::parse("api=nvidia,id=gpu").unwrap();
        let AccelVia::Ring(ring) = &config.via else {
            panic!("no gate");
        };
        let native = (16 << 30, 1, Some(64 << 20));
        assert_eq!((ring.window, ring.slices, ring.pages), native);
        assert_eq!(ring.pool(config.api), Path::new(NVIDIA_VM_SOCKET));
        assert_eq!(config.validate(), Ok(()));
        let written = serde_json::to_value(&config).unwrap();
        assert_eq!(
            serde_json::from_value::<AccelConfig>(written).unwrap(),
            config
        );
        let said = config.missing_pool().unwrap();
        assert!(said.contains("start gantry-nvidia --vm /run"), "{said}");
        let valid = "api=nvidia,pages=4G,window=8M,memory=8G,weight=3,slices=1";
        assert_eq!(AccelConfig::parse(valid).unwrap().validate(), Ok(()));
    }

    #[test]
    fn a_running_vm_gets_no_accelerator_that_nobody_serves() {
        let config = AccelConfig::parse("socket=/nowhere/pool").unwrap();
        let vm = VmConfig::default();
        let Err(Refused(why)) = config.check_joins(&vm, true) else {
            panic!("nobody listens there");
        };
        assert!(
            why.contains("no pool listens on /nowhere/pool")
                && why.contains("gantry-accel serve --socket /nowhere/pool"),
            "{why}"
        );
        assert!(config.check_joins(&vm, false).is_ok());
    }

    #[test]
    fn settings_of_the_other_transport_are_refused() {
        let config = AccelConfig::parse("transport=gate,server=/s,shared=64K,id=a").unwrap();
        let gate = GateConfig {
            server: "/s".into(),
            shared: 64 << 10,
        };
        assert_eq!(config.via, AccelVia::Gate(gate));
        assert_eq!(config.validate(), Ok(()));
        for (text, field) in [
            ("transport=gate", "server"),
            ("server=/s", "server"),
            ("shared=64K", "shared"),
            ("transport=gate,server=/s,slices=2", "slices"),
            ("transport=gate,server=/s,socket=/s", "socket"),
        ] {
            let error = AccelConfig::parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{field}: ")), "{text}: {error}");
        }
        for shared in ["32M", "5000"] {
            let text = format!("transport=gate,server=/s,shared={shared}");
            let invalid = AccelConfig::parse(&text).unwrap().validate().unwrap_err();
            assert_eq!(invalid.place(), "shared", "{text}");
        }
    }

    #[test]
    fn what_earlier_versions_wrote_is_understood() {
        let written = serde_json::json!({
            "backend": "Opencl", "transport": "Gate", "server": "/s", "shared": 65536,
            "socket": OPENCL_SOCKET, "weight": 1, "window": WINDOW, "slices": 8, "iommu": false,
        });
        let config: AccelConfig = serde_json::from_value(written).unwrap();
        assert!(config.is_gate());
        let again = serde_json::to_value(&config).unwrap();
        assert_eq!(again["shared"], 65536);
        assert!(again.get("socket").is_none());
        let written = serde_json::json!({"transport": "Ring", "shared": SHARED, "weight": 2});
        let config: AccelConfig = serde_json::from_value(written).unwrap();
        assert_eq!(serde_json::to_value(&config).unwrap()["weight"], 2);
    }

    #[test]
    fn what_makes_no_port_is_refused_by_its_place() {
        for (text, place) in [
            ("window=24M,slices=1", "window"),
            ("window=8M,slices=2", "window"),
            ("window=2T", "window"),
            ("slices=3", "slices"),
            ("slices=128", "slices"),
            ("weight=10001", "weight"),
            ("latency=0", "latency"),
            ("weight=idle,latency=2", "latency"),
            ("api=nvidia,weight=idle", "weight"),
            ("compiler_cache=../x", "compiler_cache"),
            ("compiler_cache=run.7.1", "compiler_cache"),
            ("memory=1K", "memory"),
            ("iommu=on", "iommu"),
            ("transport=gate,server=/s,api=opencl,cuda", "api"),
            ("transport=gate,server=/s,api=nvidia", "api"),
            ("api=nvidia,slices=2", "slices"),
            ("api=nvidia,compiler_cache=web", "compiler_cache"),
            ("api=nvidia,device=H200", "device"),
            ("device=0+", "device"),
            ("device=GPU-1", "device"),
            ("api=nvidia,pages=512K", "pages"),
            ("api=nvidia,pages=3M", "pages"),
            ("api=nvidia,pages=8G", "pages"),
            ("api=nvidia,window=4M", "window"),
            ("api=cuda,pages=64M", "pages"),
        ] {
            let invalid = AccelConfig::parse(text).unwrap().validate().unwrap_err();
            assert_eq!(invalid.place(), place, "{text}: {invalid}");
        }
    }
}
