//! The Bochs emulator: Debian's, and one that is built without a debugger, which does the same in less than half of the
//! CPU time.

use std::{
    fs,
    path::{self, Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, Result};
use gantry_build::progress::Step;
use gantry_tests::rig::{Cache, packages};

/// Programs that the gate's tests need, and their Debian packages.
pub const PROGRAMS: &[(&str, &str)] = &[
    ("bochs", "bochs"),
    (
        "/usr/lib/x86_64-linux-gnu/bochs/plugins/libbx_term_gui.so",
        "bochs-term",
    ),
    ("/usr/share/bochs/BIOS-bochs-latest", "bochsbios"),
    ("/usr/share/bochs/VGABIOS-lgpl-latest", "vgabios"),
    ("script", "bsdutils"),
    ("cpio", "cpio"),
    ("/usr/sbin/dkms", "dkms"),
    ("modinfo", "kmod"),
    ("make", "make"),
    ("gcc-12", "gcc-12"),
    ("g++", "g++"),
    ("xz", "xz-utils"),
    // For a program that the kernel's build runs.
    ("/usr/lib/x86_64-linux-gnu/libelf.so.1", "libelf1"),
];

/// Cylinder size in bytes: 16 heads and 63 sectors. Bochs requires whole cylinders.
pub const CYLINDER: u64 = 16 * 63 * 512;

/// A newer Bochs than Debian 12 has: path in Debian's archive and SHA-256 of its source.
const SOURCE: (&str, &str) = (
    "pool/main/b/bochs/bochs_3.0+dfsg.orig.tar.xz",
    "78f6c73d4a6472d5130a87ab9dc306d02c7c71ed8e25b3a8ef642e2a7acd282b",
);

/// How it is built. A debugger would exclude most of the optimizations. The hosts' CPU model needs AVX, which does not
/// compile without EVEX. The display of instructions per second logs in a signal handler, which waits forever if the
/// signal interrupts a thread that holds the log's mutex.
const CONFIGURE: &[&str] = &[
    "--enable-all-optimizations",
    "--enable-avx",
    "--enable-cet",
    "--enable-cpu-level=6",
    "--enable-evex",
    "--enable-fpu",
    "--enable-memtype",
    "--enable-pci",
    "--enable-protection-keys",
    "--enable-vmx=2",
    "--enable-x86-64",
    "--disable-debugger",
    "--disable-docbook",
    "--disable-large-ramfile",
    "--disable-plugins",
    "--disable-show-ips",
    "--disable-svm",
    "--with-nogui",
    "CFLAGS=-O2 -pipe",
    "CXXFLAGS=-O2 -fomit-frame-pointer -pipe",
];

/// Its name in the cache, which differs for each way to build it.
const KEPT_AS: &str = "bochs-3.0-without-ips";

/// A Bochs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Emulator {
    /// Debian's, with a debugger.
    Debian,
    /// The program of [`SOURCE`].
    Built(PathBuf),
}

impl Emulator {
    /// The fastest one that can be had. Where the other one cannot be built, for want of its source for example, Debian's
    /// does the same.
    pub fn fastest(cache: &Cache) -> Self {
        Self::build(cache).unwrap_or_else(|error| {
            eprintln!("Debian's Bochs is used, which takes twice as long: {error:#}");
            Self::Debian
        })
    }

    fn build(cache: &Cache) -> Result<Self> {
        let built = cache.made(KEPT_AS, |work| {
            let step = Step::new("building Bochs (once)");
            let (source, archive) = (work.join("source"), work.join("source.tar.xz"));
            fs::create_dir(&source)?;
            cache.fetch(SOURCE, &archive)?;
            let mut unpack = Command::new("tar");
            unpack.args(["--strip-components=1", "-xJf"]).arg(&archive);
            packages::run(unpack.current_dir(&source))?;
            let mut configure = Command::new("./configure");
            packages::run(configure.args(CONFIGURE).current_dir(&source))?;
            let cores = thread::available_parallelism().map_or(1, usize::from);
            let mut make = Command::new("make");
            make.args(["-s", &format!("-j{cores}"), "bochs"]);
            packages::run(make.current_dir(&source))?;
            fs::rename(source.join("bochs"), work.join("bochs"))?;
            fs::remove_dir_all(source)?;
            fs::remove_file(archive)?;
            step.finish();
            Ok(())
        })?;
        // It runs in another directory.
        Ok(Self::Built(path::absolute(built.join("bochs"))?))
    }

    /// A command that runs the machine of `bochsrc` in its working directory.
    fn command(&self) -> Command {
        match self {
            Self::Debian => {
                // Its display is a terminal: the other ones listen on the network, or need a window system.
                let mut command = Command::new("script");
                command
                    .args(["-qec", "bochs -q -f bochsrc -rc commands", "/dev/null"])
                    .env("TERM", "vt100");
                command
            }
            Self::Built(program) => {
                let mut command = Command::new(program);
                command.args(["-q", "-f", "bochsrc"]);
                command
            }
        }
    }

    /// Its own lines of `bochsrc`.
    fn settings(&self) -> &'static str {
        match self {
            Self::Debian => {
                "display_library: term
sound: driver=dummy, waveoutdrv=dummy, waveout=none, wavein=none, midiout=none
"
            }
            Self::Built(_) => "display_library: nogui\n",
        }
    }
}

/// An emulated machine with one CPU.
pub struct Machine<'m> {
    /// What emulates it.
    pub emulator: &'m Emulator,
    /// Bochs's name of the CPU.
    pub cpu: &'static str,
    /// RAM in MiB.
    pub megabytes: u32,
    /// A second disk, of whole cylinders.
    pub disk: Option<&'m Path>,
    /// Maximum run time in seconds.
    pub seconds: u32,
}

impl Machine<'_> {
    /// Boots `disk.img` of a directory, which also receives the logs. Returns what was written to
    /// the serial port.
    ///
    /// # Errors
    /// The emulator cannot be started.
    pub fn run(&self, work: &Path) -> Result<String> {
        let serial = work.join("serial.txt");
        let _ = fs::remove_file(&serial);
        let boot = disk("master", &work.join("disk.img"))?;
        let second = match self.disk {
            Some(path) => disk("slave", path)?,
            None => String::new(),
        };
        let settings = format!(
            "cpu: model={}, count=1, ips=200000000
megs: {}
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
{boot}{second}boot: disk
com1: enabled=1, mode=file, dev=serial.txt
{}clock: sync=none
log: bochs.log
",
            self.cpu,
            self.megabytes,
            self.emulator.settings()
        );
        fs::write(work.join("bochsrc"), settings)?;
        // Debian's build starts in the debugger, which is told to continue.
        fs::write(work.join("commands"), "c\n")?;
        let emulator = self.emulator.command();
        let mut limited = Command::new("timeout");
        limited
            .args(["-k", "5", &self.seconds.to_string()])
            .arg(emulator.get_program())
            .args(emulator.get_args());
        for (name, value) in emulator.get_envs() {
            limited.env(name, value.unwrap_or_default());
        }
        // Its exit status is meaningless; what the guest printed counts.
        limited
            .current_dir(work)
            .stdin(Stdio::null())
            .output()
            .context("cannot run bochs")?;
        let printed = fs::read(&serial)
            .with_context(|| format!("Bochs wrote nothing: see {}/bochs.log", work.display()))?;
        Ok(String::from_utf8_lossy(&printed).into_owned())
    }
}

/// Configuration line of a disk, which nobody else uses.
fn disk(place: &str, path: &Path) -> Result<String> {
    let length = fs::metadata(path)
        .with_context(|| format!("no disk at {}", path.display()))?
        .len();
    let path = path::absolute(path)?.display().to_string();
    // The lock may be left over from a run that was stopped by its time limit.
    let _ = fs::remove_file(format!("{path}.lock"));
    Ok(format!(
        "ata0-{place}: type=disk, path={path}, mode=flat, cylinders={}, heads=16, spt=63\n",
        length / CYLINDER
    ))
}
