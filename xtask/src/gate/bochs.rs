//! The Bochs emulator.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};

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
    ("xz", "xz-utils"),
    // For a program that the kernel's build runs.
    ("/usr/lib/x86_64-linux-gnu/libelf.so.1", "libelf1"),
];

/// Cylinder size in bytes: 16 heads and 63 sectors. Bochs requires whole cylinders.
pub const CYLINDER: u64 = 16 * 63 * 512;

/// An emulated machine with one CPU.
pub struct Machine<'m> {
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
        // The display is a terminal: the other ones listen on the network, or need a window system.
        // Debian's build starts in the debugger, which is told to continue.
        let settings = format!(
            "cpu: model={}, count=1, ips=200000000
megs: {}
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
{boot}{second}boot: disk
com1: enabled=1, mode=file, dev=serial.txt
display_library: term
sound: driver=dummy, waveoutdrv=dummy, waveout=none, wavein=none, midiout=none
clock: sync=none
log: bochs.log
",
            self.cpu, self.megabytes
        );
        fs::write(work.join("bochsrc"), settings)?;
        fs::write(work.join("commands"), "c\n")?;
        // Its exit status is meaningless; what the guest printed counts.
        Command::new("timeout")
            .args(["-k", "5", &self.seconds.to_string()])
            .args(["script", "-qec", "bochs -q -f bochsrc -rc commands"])
            .arg("/dev/null")
            .current_dir(work)
            .env("TERM", "vt100")
            .stdin(std::process::Stdio::null())
            .output()
            .context("cannot run bochs under script")?;
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
    let path = std::path::absolute(path)?.display().to_string();
    // The lock may be left over from a run that was stopped by its time limit.
    let _ = fs::remove_file(format!("{path}.lock"));
    Ok(format!(
        "ata0-{place}: type=disk, path={path}, mode=flat, cylinders={}, heads=16, spt=63\n",
        length / CYLINDER
    ))
}
