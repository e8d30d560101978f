//! A host with OpenCL: PoCL from its disk, in a root of its own, and a worker pool in there; and an
//! arbiter, where machines share it by weight.

use std::{
    fs,
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use gpu_mediator::status::{self, Client};
use rustix::fs::XattrFlags;

use crate::{
    guest::{COMMAND, Guest},
    net::{HOST, sh},
};

/// Where the disk with PoCL is mounted.
pub const ROOT: &str = "/opencl";
/// That disk.
pub const DISK: &str = "/dev/vda";
/// What a guest needs beside L2's other files.
const GUEST: &str = "/images/l2-opencl.cpio.lz4";
/// What one with systemd needs besides.
const SYSTEMD: &str = "/images/l2-systemd.cpio.lz4";

/// Keys and certificates of a pool that other machines reach at [`HOST`].
const KEYS: &str = "/images/keys";
/// The port at which they do.
const PORT: u16 = 7070;
/// Where a guest has a certificate of its own, and the authority's.
const GUEST_KEYS: &str = "/keys";

/// Where a pool finds the [`Arbiter`] in its root.
const IN_TURNS: [&str; 2] = ["--arbiter", "/run/arbiter"];

/// CUDA's driver for L1, which needs no GPU.
pub const STAND_IN: &str = "/lib/libgantry_cuda_driver.so";

/// A worker pool. It is killed when dropped, and its workers with it.
pub struct Pool {
    child: Child,
    /// Where it listens, if that is no port.
    pub socket: PathBuf,
}

impl Pool {
    /// Mounts the disk with PoCL, if that is not done yet, and starts a pool. Its messages go to
    /// `gantry.log` in `dir`.
    pub fn start(dir: &Path) -> Result<Self> {
        Self::start_with(dir, &[])
    }

    /// A pool for OpenCL and CUDA, before PoCL and a stand-in for NVIDIA's driver, in the turns of an
    /// [`Arbiter`].
    pub fn start_for_both(dir: &Path) -> Result<Self> {
        let library = "/run/libcuda.so.1";
        mount()?;
        let place = Path::new(ROOT).join(&library[1..]);
        // A pool that was killed had it open: it is whole when it takes its place.
        fs::copy(STAND_IN, place.with_extension("new"))?;
        fs::rename(place.with_extension("new"), &place)?;
        let mut arguments = vec!["--api", "opencl,cuda", "--readable", library];
        let named = format!("cuda={library}");
        arguments.extend(["--library", &named]);
        // The stand-in reserves addresses that count as memory.
        arguments.extend(["--heap", "262144"]);
        arguments.extend(IN_TURNS);
        Self::start_with(dir, &arguments)
    }

    /// The same with further arguments.
    pub fn start_with(dir: &Path, more: &[&str]) -> Result<Self> {
        let pool = Self::launch(dir, &[&["--socket", "/run/pool.sock"], more].concat())?;
        until("the pool listens", || Ok(pool.socket.exists()))?;
        Ok(pool)
    }

    /// A further pool before the same driver.
    pub fn start_other(dir: &Path) -> Result<Self> {
        let mut pool = Self::launch(dir, &["--socket", "/run/other.sock"])?;
        pool.socket = Path::new(ROOT).join("run/other.sock");
        until("the other pool listens", || Ok(pool.socket.exists()))?;
        Ok(pool)
    }

    /// A pool for applications of other machines, which come by TLS to this address of L1. What
    /// they need is in [`by_tls`].
    pub fn start_for_others(dir: &Path) -> Result<Self> {
        let listen = format!("tcp:{HOST}:{PORT}");
        let (certificate, key) = (format!("/run/{HOST}.pem"), format!("/run/{HOST}.key"));
        mount()?;
        sh(&format!("cp {KEYS}/* {ROOT}/run/"))?;
        let pool = Self::launch(
            dir,
            &[
                "--listen",
                &listen,
                "--tls-cert",
                &certificate,
                "--tls-key",
                &key,
                "--tls-client-ca",
                "/run/ca.pem",
            ],
        )?;
        until("the pool listens", || {
            Ok(TcpStream::connect((HOST, PORT)).is_ok())
        })?;
        Ok(pool)
    }

    /// The same in a control group that is given to it, as systemd does; and where that is.
    pub fn start_in_group(dir: &Path, more: &[&str]) -> Result<(Self, PathBuf)> {
        mount()?;
        let all = Path::new(ROOT).join("sys/fs/cgroup");
        let group = all.join("accel");
        sh(&format!(
            "[ -e {0}/cgroup.procs ] || mount -t cgroup2 none {0}; \
             echo +memory +pids >{0}/cgroup.subtree_control && mkdir -p {0}/accel && \
             echo -memory -pids >{0}/accel/cgroup.subtree_control",
            all.display()
        ))
        .context("cannot make control groups")?;
        rustix::fs::setxattr(&group, "trusted.delegate", b"1", XattrFlags::empty())?;
        let enter = format!("echo 0 >{}/cgroup.procs && exec \"$@\"", group.display());
        let arguments = [&["--socket", "/run/pool.sock"], more].concat();
        let mut command = Command::new("sh");
        command.args(["-c", &enter, "sh", "chroot"]);
        let pool = Self::spawn(dir, command, &arguments)?;
        until("the pool listens", || Ok(pool.socket.exists()))?;
        Ok((pool, group))
    }

    fn launch(dir: &Path, arguments: &[&str]) -> Result<Self> {
        mount()?;
        Self::spawn(dir, Command::new("chroot"), arguments)
    }

    fn spawn(dir: &Path, mut command: Command, arguments: &[&str]) -> Result<Self> {
        let program = Path::new(ROOT).join("run/gantry-accel");
        // Another pool may start a worker at any moment, and a file that is being written cannot be
        // executed: it is whole when it takes its place.
        let whole = program.with_extension("new");
        fs::copy("/bin/gantry-accel", &whole)?;
        fs::rename(&whole, &program)?;
        let log = log(dir)?;
        let child = command
            .args([ROOT, "/run/gantry-accel", "serve", "--spare", "1"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start the worker pool")?;
        Ok(Self {
            child,
            socket: Path::new(ROOT).join("run/pool.sock"),
        })
    }

    /// The programs that PoCL has compiled for an owner.
    pub fn compiled(&self, owner: &str) -> Result<Vec<String>> {
        let folder = format!("{ROOT}/tmp/gantry-compiled-0/{owner}");
        let found = crate::net::sh(&format!("find {folder} -name program.bc"))?;
        Ok(found.lines().map(str::to_owned).collect())
    }

    /// Processes of workers, ascending.
    pub fn workers(&self) -> Result<Vec<u32>> {
        let of = format!("/proc/{0}/task/{0}/children", self.child.id());
        let text = fs::read_to_string(of)?;
        Ok(text
            .split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect())
    }

    /// Its own process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}

/// Where [`Pool::start_for_others`] serves.
pub fn tls_address() -> String {
    format!("tls://{HOST}:{PORT}")
}

/// What a guest's application has in its environment to be let in there.
pub fn tls_files() -> String {
    format!(
        "GANTRY_TLS_CA={GUEST_KEYS}/ca.pem GANTRY_TLS_CERT={GUEST_KEYS}/guest.pem \
         GANTRY_TLS_KEY={GUEST_KEYS}/guest.key"
    )
}

/// The environment of one that comes there at first.
pub fn by_tls() -> String {
    format!("GANTRY_OPENCL={} {}", tls_address(), tls_files())
}

/// The arbiter of a pool whose device machines share. It is killed when dropped.
pub struct Arbiter {
    child: Child,
    socket: PathBuf,
}

impl Arbiter {
    /// Starts it, with this policy, and a pool for OpenCL that it gives turns to. Messages go to
    /// `gantry.log` in `dir`.
    pub fn start_with_pool(dir: &Path, policy: &str) -> Result<(Self, Pool)> {
        Ok((Self::start(dir, policy)?, Pool::start_with(dir, &IN_TURNS)?))
    }

    /// Starts it alone.
    pub fn start(dir: &Path, policy: &str) -> Result<Self> {
        mount()?;
        let log = log(dir)?;
        let socket = Path::new(ROOT).join("run/arbiter");
        let child = Command::new("/bin/gantry-arbiter")
            .arg("--socket")
            .arg(&socket)
            .args(["--policy", policy])
            // Here the device is the processor that the guests' are emulated on: an application that
            // waits is back 15 to 40 ms later.
            .args(["--longest-pause", "100"])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start gantry-arbiter")?;
        let arbiter = Self { child, socket };
        until("the arbiter listens", || {
            Ok(status::read(&arbiter.socket).is_ok())
        })?;
        Ok(arbiter)
    }

    /// The arbiter's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What each machine has had of the device.
    pub fn clients(&self) -> Result<Vec<Client>> {
        let status = status::read(&self.socket)
            .with_context(|| format!("the arbiter ({}) shows no figures", self.pid()))?;
        Ok(status.clients)
    }
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What an application has compiled its kernels to.
pub struct Compiled {
    /// A file whose size is whole blocks, as a disk has.
    pub file: PathBuf,
    /// Bytes of it.
    pub size: u64,
}

impl Compiled {
    /// Has an application compile its kernels, natively in L1, to the file that a variable names; and what
    /// it says. For each guest anew, that takes this emulated processor many seconds.
    fn by(program: &str, variable: &str, arguments: &str) -> Result<(Self, String)> {
        mount()?;
        let kept = format!("/tmp/{program}.compiled");
        let file = Path::new(ROOT).join(&kept[1..]);
        let _ = fs::remove_file(&file);
        let copy = Path::new(ROOT).join("run").join(program);
        fs::copy(Path::new("/bin").join(program), copy)?;
        let said = sh(&format!(
            "echo | {variable}={kept} POCL_CACHE_DIR=/tmp HOME=/tmp \
             chroot {ROOT} /run/{program} {arguments}"
        ))?;
        let size = fs::metadata(&file)
            .with_context(|| format!("nothing was compiled: {said:?}"))?
            .len();
        let disk = fs::File::options().write(true).open(&file)?;
        disk.set_len(size.next_multiple_of(512))?;
        Ok((Self { file, size }, said))
    }

    /// The application that computes until a file is there: it computes once.
    pub fn moving() -> Result<Self> {
        Ok(Self::by("opencl-moving", "OPENCL_MOVING_BINARY", "/dev/null")?.0)
    }

    /// The application that the machines of an arbiter run; and the nanoseconds that an iteration of its
    /// kernel takes, if nothing else runs.
    pub fn turns() -> Result<(Self, String)> {
        let (compiled, said) = Self::by("opencl-turns", "OPENCL_TURNS_BINARY", "1 1 0.001")?;
        let iteration = said
            .lines()
            .find_map(|line| line.strip_prefix("running "))
            .with_context(|| format!("the application said {said:?}"))?;
        Ok((compiled, iteration.to_owned()))
    }
}

fn log(dir: &Path) -> Result<fs::File> {
    let path = dir.join("gantry.log");
    let opened = fs::File::options().create(true).append(true).open(&path);
    opened.with_context(|| format!("cannot open {}", path.display()))
}

/// Waits until something is so.
pub fn until(what: &str, mut is: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is()? {
        ensure!(start.elapsed() < COMMAND, "{what}: not for {COMMAND:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Mounts the disk with PoCL, if that is not done yet.
pub fn mount() -> Result<()> {
    if Path::new(ROOT).join("dev/null").exists() {
        return Ok(());
    }
    let modules =
        "virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_blk";
    sh(&format!(
        "for m in {modules}; do [ -e /modules/$m.ko ] && insmod /modules/$m.ko 2>/dev/null; done; \
         mkdir -p {ROOT} && mount -t ext4 -o ro {DISK} {ROOT} && \
         mount -t proc proc {ROOT}/proc && mount -t sysfs sys {ROOT}/sys && \
         mount -o bind /dev {ROOT}/dev && mount -t tmpfs run {ROOT}/run && \
         mount -t tmpfs tmp {ROOT}/tmp"
    ))
    .context("cannot mount the disk with PoCL")?;
    Ok(())
}

/// L2's initial file system with agent and programs, in `dir`.
pub fn guest_files(dir: &Path) -> Result<PathBuf> {
    guest_with(dir, &[GUEST])
}

/// The same with systemd and this repository's units.
pub fn guest_files_with_systemd(dir: &Path) -> Result<PathBuf> {
    guest_with(dir, &[GUEST, SYSTEMD])
}

/// Loads what gives an agent that is started afterwards the port's interrupts.
pub fn load_uio(guest: &mut Guest) -> Result<()> {
    guest.run("insmod /modules/uio.ko && insmod /modules/uio_pci_generic.ko")?;
    Ok(())
}

/// Where a guest's agent listens.
pub const AGENT: &str = "/run/gantry/opencl.sock";

/// Starts an agent, and waits until it listens.
pub fn start_agent(guest: &mut Guest, program: &str) -> Result<()> {
    guest.run(&format!("{program} >/tmp/agent.log 2>&1 & true"))?;
    guest.eventually(&format!("ls {AGENT}"), |text| text == AGENT)?;
    Ok(())
}

fn guest_with(dir: &Path, more: &[&str]) -> Result<PathBuf> {
    let path = dir.join("l2.cpio.lz4");
    // The kernel unpacks one archive after the other.
    let mut bytes = fs::read(crate::gantry::INITRAMFS)?;
    for archive in more {
        bytes.extend(fs::read(archive)?);
    }
    fs::write(&path, bytes)?;
    Ok(path)
}
