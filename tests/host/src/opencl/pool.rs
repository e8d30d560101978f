//! A pool of workers on this machine, and commands for its applications.

use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gantry_build::{programs, root};
use gantry_tests::rig::packages;

use crate::shared_device::PATIENCE;

/// Folder of piglit.
pub const PIGLIT: &str = "/usr/lib/x86_64-linux-gnu/piglit";

/// Folder that names the host's drivers.
const VENDORS: &str = "/etc/OpenCL/vendors";

/// Programs and files that the scenarios need, and the Debian packages that contain them.
pub const PROGRAMS: &[(&str, &str)] = &[
    ("/etc/OpenCL/vendors/pocl.icd", "pocl-opencl-icd"),
    (
        "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1",
        "ocl-icd-libopencl1",
    ),
    ("clinfo", "clinfo"),
    ("clpeak", "clpeak"),
    ("strace", "strace"),
    ("openssl", "openssl"),
    (PIGLIT, "piglit"),
    (
        "/usr/lib/python3/dist-packages/pyopencl",
        "python3-pyopencl",
    ),
    ("/usr/lib/python3/dist-packages/mako", "python3-mako"),
];

/// How applications reach a pool's workers.
#[derive(Clone, Copy)]
pub enum Way {
    /// Shared memory.
    Rings,
    /// Shared memory, with the workers on the applications' own CPUs.
    Delegated,
    /// Only a Unix socket.
    Unix,
    /// TLS.
    Tls,
}

/// A running pool of workers, and the programs that go with it.
pub struct Pool {
    process: Child,
    /// Folder of its socket, log and keys.
    pub folder: PathBuf,
    /// Folder of the built programs.
    pub release: PathBuf,
    /// The folder with the `.icd` file of the host's driver.
    pub vendors: PathBuf,
    /// The value of `GANTRY_OPENCL` for its applications.
    pub address: String,
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Pool {
    /// Installs and builds what is needed, and starts a pool.
    pub fn start_installed() -> Result<Self> {
        packages::install(PROGRAMS)?;
        Self::start(Way::Rings, "usual", programs::folder()?, &[])
    }

    /// Starts another pool from the same programs, using the same drivers.
    pub fn beside(&self, way: Way, name: &str, options: &[&str]) -> Result<Self> {
        let (release, vendors) = (self.release.clone(), self.vendors.clone());
        Self::launch(&[], way, name, release, vendors, options)
    }

    /// Runs `gantry-accel` for applications that connect this way, with further options.
    pub fn start(way: Way, name: &str, release: PathBuf, options: &[&str]) -> Result<Self> {
        Self::under(&[], way, name, release, options)
    }

    /// Like [`Pool::start`], executed by another program, which becomes the pool.
    pub fn under(
        program: &[&str],
        way: Way,
        name: &str,
        release: PathBuf,
        options: &[&str],
    ) -> Result<Self> {
        Self::launch(program, way, name, release, VENDORS.into(), options)
    }

    /// Like [`Pool::before`], executed by another program, which becomes the pool.
    pub fn before_under(
        program: &[&str],
        vendors: PathBuf,
        name: &str,
        release: PathBuf,
        options: &[&str],
    ) -> Result<Self> {
        Self::launch(program, Way::Rings, name, release, vendors, options)
    }

    /// Starts a pool that uses the drivers that this folder's `.icd` files name.
    pub fn before(
        vendors: PathBuf,
        way: Way,
        name: &str,
        release: PathBuf,
        options: &[&str],
    ) -> Result<Self> {
        Self::launch(&[], way, name, release, vendors, options)
    }

    fn launch(
        under: &[&str],
        way: Way,
        name: &str,
        release: PathBuf,
        vendors: PathBuf,
        options: &[&str],
    ) -> Result<Self> {
        // A socket's path has at most 107 bytes, so it is not placed below the target folder.
        let folder =
            std::env::temp_dir().join(format!("gantry-opencl-{}-{name}", std::process::id()));
        fs::create_dir_all(folder.join("vendors"))?;
        fs::write(
            folder.join("vendors/gantry.icd"),
            format!("{}\n", release.join("libgantry_opencl.so").display()),
        )?;
        let socket = folder.join("socket").display().to_string();
        // The heap is larger than the machine's memory: PoCL reports a worker's limit as the
        // device's memory.
        let mut serve = ["serve", "--heap", "1048576"].map(str::to_owned).to_vec();
        let (address, mut role) = match way {
            Way::Rings => {
                serve.extend(["--socket".to_owned(), socket.clone()]);
                (socket, serve)
            }
            Way::Delegated => (
                format!("messages:{socket}"),
                vec!["passive".to_owned(), "--messages".to_owned(), socket],
            ),
            Way::Unix => {
                let address = format!("unix:{socket}");
                serve.extend(["--listen".to_owned(), address.clone()]);
                (address, serve)
            }
            Way::Tls => {
                let keys = folder.join("keys");
                certificates(&keys)?;
                let file = |name: &str| keys.join(name).display().to_string();
                let port = free_port()?;
                serve.extend(["--listen".to_owned(), format!("tcp:127.0.0.1:{port}")]);
                serve.extend(["--tls-cert".to_owned(), file("localhost.pem")]);
                serve.extend(["--tls-key".to_owned(), file("localhost.key")]);
                serve.extend(["--tls-client-ca".to_owned(), file("ca.pem")]);
                (format!("tls://localhost:{port}"), serve)
            }
        };
        if !matches!(way, Way::Delegated) && !options.contains(&"--cache") {
            let caches = folder.join("caches");
            fs::create_dir_all(&caches)?;
            role.extend(["--cache".to_owned(), caches.display().to_string()]);
        }
        let program = release.join("gantry-accel");
        let mut command = match under.split_first() {
            Some((first, more)) => {
                let mut command = Command::new(first);
                command.args(more).arg(program);
                command
            }
            None => Command::new(program),
        };
        let process = command
            .args(role)
            .args(options)
            // Some loaders require a trailing slash, which the workers get.
            .env("OCL_ICD_VENDORS", &vendors)
            .env_remove("OCL_ICD_FILENAMES")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(folder.join("log"))?)
            .spawn()
            .context("cannot start gantry-accel")?;
        let pool = Self {
            process,
            folder,
            release,
            vendors,
            address,
        };
        let until = Instant::now() + PATIENCE;
        while !pool.listens() {
            ensure!(Instant::now() < until, "gantry-accel does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(pool)
    }

    fn listens(&self) -> bool {
        match self.address.strip_prefix("tls://localhost:") {
            Some(port) => TcpStream::connect(format!("127.0.0.1:{port}")).is_ok(),
            None => self.folder.join("socket").exists(),
        }
    }

    /// The pool's process ID.
    pub fn id(&self) -> i32 {
        self.process.id().cast_signed()
    }

    /// Whether the pool is still running.
    pub fn runs(&mut self) -> Result<bool> {
        Ok(self.process.try_wait()?.is_none())
    }

    /// What the pool and its workers have logged.
    pub fn log(&self) -> Result<String> {
        Ok(fs::read_to_string(self.folder.join("log"))?)
    }

    /// The workers' process IDs.
    pub fn workers(&self) -> Result<Vec<i32>> {
        let children = gantry_tests::processes::children(self.process.id())?;
        Ok(children.into_iter().map(u32::cast_signed).collect())
    }

    /// The workers' process IDs, once each has executed its final program, which the pool waits
    /// for.
    pub fn started_workers(&self) -> Result<Vec<i32>> {
        let command = |id: i32| fs::read(format!("/proc/{id}/cmdline"));
        let pool = command(self.id())?;
        let until = Instant::now() + PATIENCE;
        loop {
            let workers = self.workers()?;
            let started = |id: &i32| command(*id).is_ok_and(|own| own != pool && !own.is_empty());
            if workers.iter().all(started) {
                return Ok(workers);
            }
            ensure!(Instant::now() < until, "workers do not start");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// An empty folder of this name, which is removed with the pool.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder.join(name);
        fs::create_dir_all(&folder)?;
        Ok(folder)
    }

    /// A folder that every user of this machine can read, with a copy of the driver and the `.icd`
    /// file that names it. What was built may be accessible only to its builder.
    pub fn public_driver(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder(name)?;
        let driver = folder.join("libgantry_opencl.so");
        fs::copy(self.release.join("libgantry_opencl.so"), &driver)?;
        let icd = format!("{}\n", driver.display());
        fs::write(folder.join("gantry.icd"), icd)?;
        Ok(folder)
    }

    /// The version of the host's platform, as clinfo reports it.
    pub fn device(&self) -> Result<String> {
        let text = packages::output(self.native("clinfo").arg("--raw"))?;
        let version = text
            .lines()
            .find_map(|line| line.split_once("CL_PLATFORM_VERSION"))
            .context("clinfo names no platform natively")?;
        Ok(version.1.trim().to_owned())
    }

    /// A command of a program that uses the host's driver.
    pub fn native(&self, program: impl AsRef<Path>) -> Command {
        self.native_for(120, program)
    }

    /// Like [`Pool::native`], with a timeout in seconds.
    pub fn native_for(&self, seconds: u32, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("timeout");
        command
            .arg(seconds.to_string())
            .arg(program.as_ref())
            .env("OCL_ICD_VENDORS", self.vendors.join(""))
            .env_remove("OCL_ICD_FILENAMES")
            .env("GANTRY_OPENCL", "off")
            // A program killed while it holds that cache's lock would lock out all later ones.
            .env("PYOPENCL_NO_CACHE", "1");
        command
    }

    /// A command of a program that uses Gantry's driver and no other.
    pub fn remoted(&self, program: impl AsRef<Path>) -> Command {
        self.remoted_for(120, program)
    }

    /// Like [`Pool::remoted`], with a timeout in seconds.
    pub fn remoted_for(&self, seconds: u32, program: impl AsRef<Path>) -> Command {
        let mut command = self.native_for(seconds, program);
        command
            .env("OCL_ICD_VENDORS", self.folder.join("vendors/"))
            .env("GANTRY_OPENCL", &self.address);
        let keys = self.folder.join("keys");
        command
            .env("GANTRY_TLS_CA", keys.join("ca.pem"))
            .env("GANTRY_TLS_CERT", keys.join("guest.pem"))
            .env("GANTRY_TLS_KEY", keys.join("guest.key"));
        command
    }
}

/// A TCP port of this machine on which nobody listens.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Creates an authority and certificates that it has signed for this machine and for a guest.
pub fn certificates(folder: &Path) -> Result<()> {
    let mut make = Command::new("sh");
    make.arg(root().join("remoting/certificates.sh"))
        .arg(folder)
        .args(["localhost", "guest"]);
    packages::run(&mut make)
}
