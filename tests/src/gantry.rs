//! The program under test, as a process.

use std::{
    fs::File,
    os::unix::{fs::chown, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::{
    guest::Guest,
    http::{self, Answer},
};

/// The binary in L1.
pub const GANTRY: &str = "/bin/gantry";
/// Debian's kernel as shipped.
pub const BZIMAGE: &str = "/images/vmlinuz";
/// The same kernel, unpacked.
pub const VMLINUX: &str = "/images/vmlinux";
/// L2's initial file system.
pub const INITRAMFS: &str = "/images/l2.cpio";
/// A Debian kernel with virtual IOMMU drivers and an initial file system for it, on the board with
/// iommufd. Unpacked: it unpacks its zstd slowly in the rig.
const IOMMU_KERNEL: (&str, &str) = ("/images/vmlinux-iommu", "/images/l2-iommu.cpio");
/// A Debian kernel with GPU drivers and an initial file system for it, on the board for GPUs.
/// Unpacked: it unpacks its xz slowly in the rig.
const GPU_KERNEL: (&str, &str) = ("/images/vmlinux-gpu", "/images/l2-gpu.cpio");
/// Command line that makes L2 boot fast in the rig.
pub const CMDLINE: &str = "console=ttyS0 panic=-1 quiet tsc=reliable no_timer_check \
     cryptomgr.notests random.trust_cpu=on nokaslr mitigations=off";

/// Timeout for operations that should take only moments: only a hang reaches it, on any machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The user that runs Gantry, if not root.
#[derive(Clone, Copy)]
pub struct User {
    /// ID of the user and of the group.
    pub id: u32,
    /// Maximum number of bytes that it may lock in memory.
    pub memlock: u64,
}

impl User {
    /// Makes a command run as this user.
    fn run(self, command: &mut Command) {
        let become_it = move || {
            let limit = libc::rlimit {
                rlim_cur: self.memlock,
                rlim_max: self.memlock,
            };
            // SAFETY: the limit outlives the call, and an empty list of groups is not read.
            let done = unsafe {
                libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) == 0
                    && libc::setgroups(0, std::ptr::null()) == 0
                    && libc::setgid(self.id) == 0
                    && libc::setuid(self.id) == 0
            };
            match done {
                true => Ok(()),
                false => Err(std::io::Error::last_os_error()),
            }
        };
        // SAFETY: the closure only makes system calls, and does not allocate.
        unsafe { command.pre_exec(become_it) };
    }
}

/// A Gantry process. It is killed when dropped.
pub struct Gantry {
    child: Child,
    /// The scenario's folder.
    dir: PathBuf,
    /// Its API socket.
    pub socket: PathBuf,
    /// The serial port's socket.
    pub serial: PathBuf,
}

/// Configuration of a small guest whose console is at `serial`.
pub fn vm(serial: &Path) -> Value {
    json!({
        "cpus": {"boot_vcpus": 1, "max_vcpus": 1},
        "memory": {"size": 256_u64 << 20},
        "payload": {"kernel": BZIMAGE, "initramfs": INITRAMFS, "cmdline": CMDLINE},
        "serial": {"mode": "Socket", "socket": serial},
        "console": {"mode": "Off"},
    })
}

/// Configuration of a guest with virtual IOMMU drivers, with further words on its command line; to
/// be merged into another configuration.
pub fn with_iommu_driver(words: &str) -> Value {
    let (kernel, initramfs) = IOMMU_KERNEL;
    let cmdline = format!("{CMDLINE} {words}");
    json!({"payload": {"kernel": kernel, "initramfs": initramfs, "cmdline": cmdline}})
}

/// Configuration of a guest with GPU drivers, with further words on its command line; to be merged
/// into another configuration.
pub fn with_gpu_driver(words: &str) -> Value {
    let (kernel, initramfs) = GPU_KERNEL;
    let cmdline = format!("{CMDLINE} {words}");
    json!({"payload": {"kernel": kernel, "initramfs": initramfs, "cmdline": cmdline}})
}

/// Merges `more` into `config`: objects are merged, everything else is replaced.
pub fn merge(config: &mut Value, more: Value) {
    match (config, more) {
        (Value::Object(config), Value::Object(more)) => {
            for (key, value) in more {
                merge(config.entry(key).or_insert(Value::Null), value);
            }
        }
        (config, more) => *config = more,
    }
}

impl Gantry {
    /// Starts Gantry with an API socket in `dir` and further arguments, and waits until it
    /// answers.
    pub fn start(dir: &Path, args: &[&str]) -> Result<Self> {
        Self::spawn(dir, args)?.answering()
    }

    /// Like [`Gantry::start`], with another binary.
    pub fn start_binary(dir: &Path, binary: &Path) -> Result<Self> {
        Self::start_by(dir, Command::new(binary))
    }

    /// Like [`Gantry::start`], with a command that starts it with the arguments that are added.
    pub fn start_by(dir: &Path, command: Command) -> Result<Self> {
        Self::spawn_command(dir, &[], command)?.answering()
    }

    /// Like [`Gantry::start`], as a user that gets access to KVM and to `dir`.
    pub fn start_as(dir: &Path, user: User) -> Result<Self> {
        for path in [dir, Path::new("/dev/kvm")] {
            chown(path, Some(user.id), None)?;
        }
        Self::spawn_by(dir, &[], Some(user))?.answering()
    }

    fn answering(mut self) -> Result<Self> {
        self.wait_api()?;
        Ok(self)
    }

    /// Starts Gantry without waiting.
    pub fn spawn(dir: &Path, args: &[&str]) -> Result<Self> {
        Self::spawn_by(dir, args, None)
    }

    fn spawn_by(dir: &Path, args: &[&str], user: Option<User>) -> Result<Self> {
        let mut command = Command::new(GANTRY);
        if let Some(user) = user {
            user.run(&mut command);
        }
        Self::spawn_command(dir, args, command)
    }

    fn spawn_command(dir: &Path, args: &[&str], mut command: Command) -> Result<Self> {
        let socket = dir.join("api.sock");
        let log = File::options()
            .create(true)
            .append(true)
            .open(dir.join("gantry.log"))?;
        command
            .arg("--api-socket")
            .arg(&socket)
            .args(["-v", "--seccomp", "true"])
            .args(args)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = command.spawn().context("cannot start gantry")?;
        Ok(Self {
            child,
            dir: dir.to_owned(),
            socket,
            serial: dir.join("serial.sock"),
        })
    }

    /// Starts Gantry, creates a guest like [`vm`] with `more` merged in, boots it and waits for its
    /// shell.
    pub fn boot(dir: &Path, more: Value) -> Result<(Self, Guest)> {
        let gantry = Self::start(dir, &[])?;
        let guest = gantry.create_and_boot(more)?;
        Ok((gantry, guest))
    }

    /// Creates and boots a guest like [`vm`] with `more` merged in, and waits for its shell.
    pub fn create_and_boot(&self, more: Value) -> Result<Guest> {
        let mut config = vm(&self.serial);
        merge(&mut config, more);
        self.ok("PUT", "vm.create", Some(&config))?;
        self.ok("PUT", "vm.boot", None)?;
        let mut guest = Guest::connect(&self.serial)?;
        guest.wait_ready()?;
        Ok(guest)
    }

    fn wait_api(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if http::request(&self.socket, "GET", "vmm.ping", None).is_ok() {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("gantry ended with {status}:\n{}", self.log());
            }
            ensure!(
                Instant::now() < deadline,
                "gantry does not answer:\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Gantry's log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("gantry.log")).unwrap_or_default()
    }

    /// Waits until Gantry's log contains `words`, and returns the log.
    pub fn log_until(&self, words: &str) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if log.contains(words) {
                return Ok(log);
            }
            ensure!(
                Instant::now() < deadline,
                "Gantry never logged {words:?}:\n{log}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Names of its threads.
    pub fn thread_names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for task in std::fs::read_dir(format!("/proc/{}/task", self.pid()))? {
            // The thread may have ended.
            if let Ok(name) = std::fs::read_to_string(task?.path().join("comm")) {
                names.push(name.trim().to_owned());
            }
        }
        Ok(names)
    }

    /// Sends a request.
    pub fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer> {
        let body = body.map(ToString::to_string);
        http::request(&self.socket, method, path, body.as_deref())
    }

    /// Sends a request that must succeed.
    pub fn ok(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let answer = self.request(method, path, body)?;
        ensure!(
            matches!(answer.status, 200 | 204),
            "{method} {path} was answered with {}: {}\n{}",
            answer.status,
            answer.text,
            self.log()
        );
        Ok(answer.body)
    }

    /// Sends a PUT request that must succeed.
    pub fn put(&self, path: &str, body: Value) -> Result<Value> {
        self.ok("PUT", path, Some(&body))
    }

    /// Sends a PUT request without a body that must succeed.
    pub fn act(&self, path: &str) -> Result<()> {
        self.ok("PUT", path, None).map(|_| ())
    }

    /// Sends a PUT request that must fail with `status` and a text that contains `words`.
    pub fn refused(&self, path: &str, body: Option<Value>, status: u16, words: &str) -> Result<()> {
        let answer = self.request("PUT", path, body.as_ref())?;
        ensure!(
            answer.status == status && answer.text.contains(words),
            "{path} was answered with {} instead of {status} ({words:?}): {}",
            answer.status,
            answer.text
        );
        ensure!(
            answer.body.is_array(),
            "the error is no list of causes: {}",
            answer.text
        );
        Ok(())
    }

    /// `vm.info`.
    pub fn info(&self) -> Result<Value> {
        self.ok("GET", "vm.info", None)
    }

    /// State of the VM according to `vm.info`.
    pub fn state(&self) -> Result<String> {
        Ok(self.info()?["state"]
            .as_str()
            .unwrap_or_default()
            .to_owned())
    }

    /// Waits until `vm.info` satisfies `is`.
    pub fn info_until(&self, what: &str, is: impl Fn(&Value) -> bool) -> Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let info = self.info()?;
            if is(&info) {
                return Ok(info);
            }
            ensure!(
                Instant::now() < deadline,
                "vm.info never said that {what}: {info}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Swaps a physical device for another one, and waits until the guest has the new one.
    pub fn swap_device(&self, id: &str, to: &Path) -> Result<Value> {
        self.put("vm.swap-device", json!({"id": id, "path": to}))?;
        self.info_until("the swap is over", |info| {
            let devices = info["config"]["devices"].as_array();
            let mut devices = devices.into_iter().flatten();
            let now = devices.find(|device| device["id"] == id);
            let path = now.and_then(|device| device["path"].as_str());
            info["device_tree"][id]["state"].is_null() && path.map(Path::new) == Some(to)
        })
    }

    /// Waits for the process to end.
    pub fn wait_exit(&mut self) -> Result<ExitStatus> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ensure!(
                Instant::now() < deadline,
                "gantry is still there after {PATIENCE:?}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills the process with SIGKILL and waits for it to end.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// CPU time of the whole process so far.
    pub fn cpu_time(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        let fields: Vec<_> = stat
            .rsplit(')')
            .next()
            .unwrap_or("")
            .split_whitespace()
            .collect();
        let ticks: u64 = [11, 12]
            .iter()
            .filter_map(|&field| fields.get(field)?.parse::<u64>().ok())
            .sum();
        // SAFETY: sysconf has no preconditions.
        let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }
            .max(1)
            .unsigned_abs();
        Ok(Duration::from_millis(ticks * 1000 / per_second))
    }
}

impl Drop for Gantry {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
