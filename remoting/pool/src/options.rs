//! What a worker is told by its command line: what it serves, before which driver, and how much of the machine it may
//! have.

use std::{convert::Infallible, fmt, path::PathBuf, str::FromStr};

use base::gpus::Selection;
use remoting_proto::{
    apis,
    wire::api::{ApiId, Spoken},
};

use super::{compiled::Limit, confine::Pieces, stream};

/// Options of workers.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The APIs that are served: opencl, cuda, or opencl,cuda. Where both are, a worker opens the driver when its
    /// application has come, as the others of one API do in advance, and may do whatever CUDA's driver needs.
    #[arg(
        long = "api",
        default_value = "opencl",
        value_name = "API",
        value_delimiter = ',',
        value_parser = named_api
    )]
    pub apis: Vec<ApiId>,
    /// The library to open: the OpenCL loader, libOpenCL.so.1 by default, or the CUDA driver,
    /// libcuda.so.1 by default. Where both are served, with the API that it is for (may be given for each).
    #[arg(long, value_name = "FILE|API=FILE")]
    pub library: Vec<Library>,
    /// Which of this machine's devices are lent, joined by +: an index in the order of PCI addresses, a UUID or its
    /// beginning (GPU-1a2b3c4d), a PCI address, or a part of a model's name (H200). All of them by default. An
    /// accelerator's device= chooses among these.
    #[arg(
        long,
        default_value = "",
        hide_default_value = true,
        value_name = "DEVICE[+DEVICE...]"
    )]
    pub devices: Selection,
    /// Size of each application's window in MiB: address space, and memory only where it is used.
    #[arg(long, default_value_t = 2048, value_name = "MIB")]
    pub window: u64,
    /// Microseconds to poll before sleeping.
    #[arg(long, default_value_t = 50, value_name = "MICROSECONDS")]
    pub spin: u64,
    /// Folder below which each worker gets one of its own, and each owner of applications one for
    /// what drivers compile: the only ones that a worker may write to.
    #[arg(long, default_value = "/tmp", value_name = "FOLDER")]
    pub cache: PathBuf,
    /// How much of what drivers compile is kept for the next application of the same owner (a user
    /// of this machine, a virtual machine, a certificate's subject), or off.
    #[arg(long, default_value_t = Limit(Some(256 << 20)), value_name = "SIZE|off")]
    pub compiler_cache: Limit,
    /// The folder of all owners' compiled programs.
    #[arg(long, hide = true)]
    pub compiled: Option<PathBuf>,
    /// Open the driver when an application has come.
    #[arg(long, hide = true)]
    pub late: bool,
    /// Take up an application that another worker serves.
    #[arg(long, hide = true)]
    pub standby: bool,
    /// Device memory in MiB that each of this machine's own applications may have; all that there
    /// is by default. Applications in guests have what their machine's accelerator is given.
    #[arg(
        long,
        default_value_t = 0,
        hide_default_value = true,
        value_name = "MIB"
    )]
    pub memory: u64,
    /// Device memory in MiB that all of the pool's applications may have together, 63 at a time. Such a pool serves
    /// this machine's own programs alone, and no virtual machines, whose gantry says how much they may have.
    #[arg(long, conflicts_with = "memory", value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..))]
    pub memory_total: Option<u64>,
    /// Which counter of the pool's page of device memory is this worker's.
    #[arg(long, hide = true)]
    pub counter: Option<u32>,
    /// Parts of the confinement that workers go without: to find out which one a driver does not
    /// get along with (gantry-accel probe), and for nothing else.
    #[arg(long, hide = true, value_name = "PARTS")]
    pub without: Option<Pieces>,
    /// A folder or file that workers may read beside the usual ones (/usr, /opt and the like):
    /// where the host's driver is, if it is elsewhere.
    #[arg(long, value_name = "PATH")]
    pub readable: Vec<PathBuf>,
    /// The folder of the CUDA libraries that workers carry out calls of: libcublas.so.13 and
    /// libcublasLt.so.13. By default they are looked for where the loader, the vendor's toolkit
    /// (/usr/local/cuda*, /opt/cuda*) and Python's packages have them.
    #[arg(long, value_name = "FOLDER")]
    pub cuda_libraries: Option<PathBuf>,
    /// Memory in MiB that each worker may have beside the window, its driver's included; half of
    /// this machine's by default. What it starts may have as much each, and all of it together
    /// that, the window and 512 MiB where the pool has a control group to divide.
    #[arg(long, value_name = "MIB")]
    pub heap: Option<u64>,
    /// Socket of the arbiter (gantry-arbiter) by which the device is shared with other pools.
    #[arg(long, value_name = "PATH")]
    pub arbiter: Option<PathBuf>,
    /// Workers set the time slices of their contexts as the arbiter says: the pool has tried whether that works.
    #[arg(long, hide = true)]
    pub sliced: bool,
    /// Whose this machine's own applications are: those of one name share one part of the device.
    /// Applications in guests are their virtual machine's.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The part of the device that this machine's own applications get, in proportion to those of
    /// others: 1 to 10,000, or idle: only while nobody else has work.
    #[arg(long, default_value = "1", value_name = "NUMBER|idle", value_parser = remoting_turns::weight::parse)]
    pub weight: u32,
    /// For how many milliseconds, 1 to 1000, this machine's own applications wait at most for time slices of others, as long
    /// as they have had no more than their part.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub latency: Option<u32>,
    /// Milliseconds that a command may run on the device; one that runs longer costs its worker. No
    /// limit by default.
    #[arg(
        long,
        default_value_t = 0,
        hide_default_value = true,
        value_name = "MS"
    )]
    pub kernel_limit: u64,
    /// What streams need.
    #[command(flatten)]
    pub stream: stream::Options,
}

/// The API of this name.
fn named_api(name: &str) -> Result<ApiId, String> {
    let found = ApiId::REMOTED.into_iter().find(|api| api.name() == name);
    found.ok_or_else(|| {
        let all = ApiId::REMOTED.map(ApiId::name).join(" or ");
        format!("name {all}")
    })
}

/// A library to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Of which API it is; none if one alone is served.
    api: Option<ApiId>,
    /// Its name or path.
    file: String,
}

impl FromStr for Library {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let parts = text.split_once('=');
        let named = parts.and_then(|(api, file)| Some((named_api(api).ok()?, file)));
        Ok(Self {
            api: named.map(|(api, _)| api),
            file: named.map_or(text, |(_, file)| file).to_owned(),
        })
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.api {
            Some(api) => write!(f, "{}={}", api.name(), self.file),
            None => f.write_str(&self.file),
        }
    }
}

impl Options {
    /// The first library that is no served API's: of another one, or of one that is not said.
    pub(super) fn stray_library(&self) -> Option<&Library> {
        let strays = |library: &&Library| match library.api {
            Some(api) => !self.apis.contains(&api),
            None => self.apis.len() > 1,
        };
        self.library.iter().find(strays)
    }

    /// The library to open for an API that is served.
    pub(super) fn library(&self, api: ApiId) -> &str {
        let usual = match api {
            ApiId::OpenCl => "libOpenCL.so.1",
            ApiId::Cuda | ApiId::Nvidia => "libcuda.so.1",
        };
        self.named_library(api).unwrap_or(usual)
    }

    /// The same, if it was named.
    pub(super) fn named_library(&self, api: ApiId) -> Option<&str> {
        let is_its = |library: &&Library| library.api.is_none_or(|of| of == api);
        let named = self.library.iter().rfind(is_its);
        named.map(|library| library.file.as_str())
    }

    /// The API whose driver needs the most of what is served.
    pub(super) fn widest(&self) -> ApiId {
        let is_served = |api: &ApiId| self.apis.contains(api);
        [ApiId::Cuda]
            .into_iter()
            .find(is_served)
            .unwrap_or_default()
    }

    /// The served APIs' names, with this between them.
    pub(super) fn named_apis(&self, between: &str) -> String {
        let names: Vec<_> = self.apis.iter().map(|api| api.name()).collect();
        names.join(between)
    }

    /// These of each API alone.
    pub fn each(&self) -> impl Iterator<Item = Self> {
        self.apis.iter().map(|api| Self {
            apis: vec![*api],
            ..self.clone()
        })
    }

    /// What this build speaks of the APIs that are served.
    pub(super) fn spoken(&self) -> Vec<Spoken> {
        self.apis.iter().copied().map(apis::spoken).collect()
    }

    /// Parts of the confinement that are left out.
    pub(super) fn without(&self) -> Pieces {
        self.without.clone().unwrap_or_default()
    }

    /// Bytes of memory that each worker may have of its own.
    pub(super) fn heap(&self) -> u64 {
        self.heap.map_or_else(
            || {
                // SAFETY: plain calls.
                let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
                // SAFETY: as above.
                let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
                // Neither is negative on Linux.
                pages.unsigned_abs() * page.unsigned_abs() / 2
            },
            |mib| mib.saturating_mul(1 << 20),
        )
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Given {
        #[command(flatten)]
        options: Options,
    }

    fn given(line: &str) -> Options {
        let words = ["gantry-accel"].into_iter();
        Given::parse_from(words.chain(line.split_whitespace())).options
    }

    #[test]
    fn each_api_has_its_library() {
        let none = given("");
        assert_eq!(none.apis, [ApiId::OpenCl]);
        assert_eq!(none.library(ApiId::OpenCl), "libOpenCL.so.1");
        let one = given("--api cuda --library /a=b/libcuda.so");
        assert_eq!(one.library(ApiId::Cuda), "/a=b/libcuda.so");
        assert_eq!(one.stray_library(), None);
        let both = given("--api opencl,cuda --library cuda=c --library opencl=o");
        assert_eq!(both.library(ApiId::OpenCl), "o");
        assert_eq!(both.library(ApiId::Cuda), "c");
        assert_eq!(both.stray_library(), None);
        let alone: Vec<_> = both.each().map(|one| one.apis).collect();
        assert_eq!(alone, [[ApiId::OpenCl], [ApiId::Cuda]]);
    }

    #[test]
    fn a_library_of_no_served_api_is_found() {
        for line in [
            "--api opencl,cuda --library c",
            "--api opencl --library cuda=c",
        ] {
            assert!(given(line).stray_library().is_some(), "{line}");
        }
    }

    #[test]
    fn a_worker_may_do_what_any_driver_needs_that_it_may_open() {
        assert_eq!(given("").widest(), ApiId::OpenCl);
        for line in ["--api cuda", "--api opencl,cuda", "--api cuda,opencl"] {
            assert_eq!(given(line).widest(), ApiId::Cuda, "{line}");
        }
    }
}
