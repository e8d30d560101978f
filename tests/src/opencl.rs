//! A host with OpenCL: PoCL from its disk in a separate root, with a worker pool in that root, and an arbiter where
//! machines share the device by weight.

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

/// Mount point of the disk with PoCL.
pub const ROOT: &str = "/opencl";
/// The disk with PoCL.
pub const DISK: &str = "/dev/vda";
/// What a guest needs in addition to L2's other files.
const GUEST: &str = "/images/l2-opencl.cpio";
/// What a guest with native contexts needs in addition to that.
const NATIVE: &str = "/images/l2-native.cpio";
/// What a guest with systemd needs in addition to that.
const SYSTEMD: &str = "/images/l2-systemd.cpio";

/// Keys and certificates of a pool that other machines reach at [`HOST`].
const KEYS: &str = "/images/keys";
/// The port at which they reach it.
const PORT: u16 = 7070;
/// Folder in a guest with its certificate and the authority's.
const GUEST_KEYS: &str = "/keys";

/// Arguments that tell a pool where its root has the socket of the [`Arbiter`].
const IN_TURNS: [&str; 2] = ["--arbiter", "/run/arbiter"];

/// A CUDA driver for L1 that needs no GPU.
pub const STAND_IN: &str = "/lib/libgantry_cuda_driver.so";

/// A worker pool. It and its workers are killed when it is dropped.
pub struct Pool {
    child: Child,
    /// Its socket, unless it listens on a port.
    pub socket: PathBuf,
}

impl Pool {
    /// Mounts the disk with PoCL, unless it is mounted, and starts a pool. Its messages go to `gantry.log` in `dir`.
    pub fn start(dir: &Path) -> Result<Self> {
        Self::start_with(dir, &[])
    }

    /// Starts a pool for OpenCL and CUDA that uses PoCL and a stand-in for NVIDIA's driver, and takes turns given by an
    /// [`Arbiter`].
    pub fn start_for_both(dir: &Path) -> Result<Self> {
        let library = "/run/libcuda.so.1";
        mount()?;
        let place = Path::new(ROOT).join(&library[1..]);
        // A killed pool had the file open, so replace it by a complete file.
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

    /// Like [`Pool::start`], with further arguments.
    pub fn start_with(dir: &Path, more: &[&str]) -> Result<Self> {
        let pool = Self::launch(dir, &[&["--socket", "/run/pool.sock"], more].concat())?;
        until("the pool listens", || Ok(pool.socket.exists()))?;
        Ok(pool)
    }

    /// Starts a further pool that uses the same driver.
    pub fn start_other(dir: &Path) -> Result<Self> {
        let mut pool = Self::launch(dir, &["--socket", "/run/other.sock"])?;
        pool.socket = Path::new(ROOT).join("run/other.sock");
        until("the other pool listens", || Ok(pool.socket.exists()))?;
        Ok(pool)
    }

    /// Starts a pool for applications of other machines, which connect by TLS to this address of L1. [`by_tls`] has
    /// what they need.
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

    /// Like [`Pool::start_with`], in a control group that is delegated to it, as systemd does. Also returns the group's
    /// folder.
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
        // Another pool may start a worker at any moment, and a file that is open for writing cannot be executed. So the
        // program is replaced by a complete file.
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

    /// Process IDs of the workers, ascending.
    pub fn workers(&self) -> Result<Vec<u32>> {
        crate::processes::children(self.child.id())
    }

    /// The pool's process ID.
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

/// The address at which [`Pool::start_for_others`] serves.
pub fn tls_address() -> String {
    format!("tls://{HOST}:{PORT}")
}

/// Environment of a guest's application that authenticates it there.
pub fn tls_files() -> String {
    format!(
        "GANTRY_TLS_CA={GUEST_KEYS}/ca.pem GANTRY_TLS_CERT={GUEST_KEYS}/guest.pem \
         GANTRY_TLS_KEY={GUEST_KEYS}/guest.key"
    )
}

/// Environment of an application that connects there first.
pub fn by_tls() -> String {
    format!("GANTRY_OPENCL={} {}", tls_address(), tls_files())
}

/// The arbiter of a pool whose device machines share. It is killed when dropped.
pub struct Arbiter {
    child: Child,
    socket: PathBuf,
}

impl Arbiter {
    /// Starts an arbiter with this policy, and a pool for OpenCL that it gives turns to. Messages go to `gantry.log` in
    /// `dir`.
    pub fn start_with_pool(dir: &Path, policy: &str) -> Result<(Self, Pool)> {
        Ok((Self::start(dir, policy)?, Pool::start_with(dir, &IN_TURNS)?))
    }

    /// Starts only the arbiter.
    pub fn start(dir: &Path, policy: &str) -> Result<Self> {
        mount()?;
        let log = log(dir)?;
        let socket = Path::new(ROOT).join("run/arbiter");
        let child = Command::new("/bin/gantry-arbiter")
            .arg("--socket")
            .arg(&socket)
            .args(["--policy", policy])
            // Here the device is the CPU on which the guests' CPUs are emulated: an application that waits is back only
            // 15 to 40 ms later.
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

    /// The socket that workers reach it by.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The arbiter's process ID.
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

/// Kernels that an application has compiled.
pub struct Compiled {
    /// The file, padded to whole blocks like a disk.
    pub file: PathBuf,
    /// Size in bytes without the padding.
    pub size: u64,
}

impl Compiled {
    /// Makes an application compile its kernels, natively in L1, to the file that a variable names, and returns also
    /// what it prints. Compiling for each guest again would take this emulated CPU many seconds.
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

    /// The application that computes until a file exists; it computes once.
    pub fn moving() -> Result<Self> {
        Ok(Self::by("opencl-moving", "OPENCL_MOVING_BINARY", "/dev/null")?.0)
    }

    /// The application that an arbiter's machines run, and the nanoseconds that an iteration of its kernel takes if
    /// nothing else runs.
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

/// Waits until a condition holds.
pub fn until(what: &str, mut is: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is()? {
        ensure!(start.elapsed() < COMMAND, "{what}: not for {COMMAND:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Mounts the disk with PoCL, unless it is mounted.
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

/// Like [`guest_files`], with systemd and this repository's units.
pub fn guest_files_with_systemd(dir: &Path) -> Result<PathBuf> {
    guest_with(dir, &[GUEST, SYSTEMD])
}

/// Like [`guest_files`], with programs for native contexts.
pub fn guest_files_with_native(dir: &Path) -> Result<PathBuf> {
    guest_with(dir, &[GUEST, NATIVE])
}

/// Loads the modules that give an agent started afterwards the port's interrupts.
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
    let path = dir.join("l2.cpio");
    // The kernel unpacks several concatenated archives.
    let mut bytes = fs::read(crate::gantry::INITRAMFS)?;
    for archive in more {
        bytes.extend(fs::read(archive)?);
    }
    fs::write(&path, bytes)?;
    Ok(path)
}
