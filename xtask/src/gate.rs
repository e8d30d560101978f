//! Tries the exitless gate (`vmfunc-gate`) in Bochs, which emulates VMX with EPT and VMFUNC.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use gantry_tests::{report::Outcome, rig::packages};

use crate::{
    programs::{cargo, root, target},
    progress::Step,
};

/// Programs that the gate's tests need, and the Debian packages that have them.
pub const PROGRAMS: &[(&str, &str)] = &[
    ("bochs", "bochs"),
    (
        "/usr/lib/x86_64-linux-gnu/bochs/plugins/libbx_term_gui.so",
        "bochs-term",
    ),
    ("/usr/share/bochs/BIOS-bochs-latest", "bochsbios"),
    ("/usr/share/bochs/VGABIOS-lgpl-latest", "vgabios"),
    ("script", "bsdutils"),
];

/// Cylinders have 16 heads and 63 sectors; Bochs wants whole ones.
const CYLINDER: u64 = 16 * 63 * 512;

/// Checks of the program, by its count: fewer mean that it did not reach its end.
const CHECKS: usize = 20;

/// A check's name and how it ended.
pub type Check = (String, Outcome);

/// Runs the program without an operating system; its checks.
///
/// # Errors
/// It cannot be built or started.
pub fn bare() -> Result<Vec<Check>> {
    let image = build()?;
    let work = target().join("gate-logs");
    fs::create_dir_all(&work)?;
    let disk = work.join("disk.img");
    fs::copy(&image, &disk).with_context(|| format!("cannot copy {}", image.display()))?;
    let file = fs::OpenOptions::new().write(true).open(&disk)?;
    ensure!(
        file.metadata()?.len() <= CYLINDER,
        "{} does not fit on the emulated disk",
        image.display()
    );
    file.set_len(CYLINDER)?;
    let printed = bochs(&work)?;
    let mut checks: Vec<_> = printed.lines().filter_map(check).collect();
    let complete = printed.lines().last() == Some("end") && checks.len() == CHECKS;
    let end = if complete {
        Outcome::Passed
    } else {
        Outcome::Failed(vec![format!(
            "{} of {CHECKS} checks; see {}:\n{printed}",
            checks.len(),
            work.join("bochs.log").display()
        )])
    };
    checks.push(("gate: the program runs to its end".to_owned(), end));
    Ok(checks)
}

/// The image of a disk: a boot sector and the program.
fn build() -> Result<std::path::PathBuf> {
    let step = Step::new("building the gate's program for bare metal");
    let folder = target().join("gate");
    let triple = "x86_64-unknown-linux-gnu";
    packages::run(
        cargo()
            .args(["build", "--release", "--quiet", "--target", triple])
            .current_dir(root().join("vmfunc-gate/bare"))
            .env("CARGO_TARGET_DIR", &folder)
            // Not for build scripts and macros: those are not of a named target.
            .env("RUSTFLAGS", "-Crelocation-model=static"),
    )?;
    step.finish();
    Ok(folder.join(triple).join("release/vmfunc-gate-bare"))
}

/// Boots the disk; what it wrote to the serial port.
fn bochs(work: &Path) -> Result<String> {
    let serial = work.join("serial.txt");
    let _ = fs::remove_file(&serial);
    // The display is a terminal: others listen on the network, or want a window system. The
    // debugger, which Debian's build starts in, is told to go on.
    let settings = "cpu: model=corei7_icelake_u, count=1, ips=200000000
megs: 256
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=disk, path=disk.img, mode=flat, cylinders=1, heads=16, spt=63
boot: disk
com1: enabled=1, mode=file, dev=serial.txt
display_library: term
sound: driver=dummy, waveoutdrv=dummy, waveout=none, wavein=none, midiout=none
clock: sync=none
log: bochs.log
";
    fs::write(work.join("bochsrc"), settings)?;
    fs::write(work.join("commands"), "c\n")?;
    // Its exit status says nothing; what the program printed does.
    Command::new("timeout")
        .args(["60", "script", "-qec", "bochs -q -f bochsrc -rc commands"])
        .arg("/dev/null")
        .current_dir(work)
        .env("TERM", "vt100")
        .stdin(std::process::Stdio::null())
        .output()
        .context("cannot run bochs under script")?;
    fs::read_to_string(&serial)
        .with_context(|| format!("Bochs wrote nothing: see {}/bochs.log", work.display()))
}

/// A line of the program that tells of a check.
fn check(line: &str) -> Option<Check> {
    let (name, result) = line.strip_prefix("check ")?.rsplit_once(" ... ")?;
    let outcome = match result {
        "ok" => Outcome::Passed,
        found => Outcome::Failed(vec![found.to_owned()]),
    };
    Some((format!("gate: {name}"), outcome))
}
