//! Measures the cost of a virtual GPU by what a guest's driver does with it: recorded in the nested
//! rig, and replayed on this machine's own KVM.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use gantry_build::{
    programs::{self, folder},
    root, target,
};
use gantry_host_tests::ring::guests;
use gantry_tests::{
    gpuvm::{
        record::{NAME, Recorded},
        replay,
    },
    report::BENCH,
    rig::{Board, Rig},
};

use crate::processors;

/// Path of the committed recording, and of its parts.
const RECORDING: &str = "tests/recordings/nouveau.bin";
const PARTS: &str = "tests/recordings/nouveau.parts";

/// The parts of `cargo xtask bench gpuvm`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Part {
    /// Counts in the nested rig, and how two guests share.
    Counts,
    /// Only how two guests share.
    Shares,
    /// Records what a guest with nouveau does, in the nested rig.
    Record,
    /// Replays it on this machine's /dev/kvm.
    Replay,
}

impl Part {
    /// Parses the words after `--part`.
    pub fn of(words: &[String]) -> Result<Self> {
        match words {
            [] => Ok(Self::Counts),
            [word] if word == "shares" => Ok(Self::Shares),
            [word] if word == "record" => Ok(Self::Record),
            [word] if word == "replay" => Ok(Self::Replay),
            _ => bail!("gpuvm has the parts shares, record and replay, and does one at a time"),
        }
    }
}

fn path(file: &str) -> PathBuf {
    root().join(file)
}

/// Creates the recording.
pub fn record(rig: &Rig) -> Result<()> {
    let mut recorded = Recorded::default();
    let mut garbled = None;
    rig.show_on(
        Board::Gpu,
        &format!("{BENCH} {NAME}"),
        |line| match recorded.take(line) {
            Ok(true) => {}
            Ok(false) => println!("{line}"),
            Err(error) => garbled = Some(error),
        },
    )?;
    if let Some(error) = garbled {
        return Err(error);
    }
    let recording = recorded.recording()?;
    let file = path(RECORDING);
    let folder = file.parent().context("it is in a folder")?;
    fs::create_dir_all(folder)?;
    fs::write(&file, &recorded.bytes)
        .with_context(|| format!("cannot write {}", file.display()))?;
    fs::write(path(PARTS), recorded.parts())?;
    print!("{}", recorded.parts());
    println!(
        "{} records, {} bytes, in {}",
        recording.records.len(),
        recorded.bytes.len(),
        file.display()
    );
    Ok(())
}

/// Replays the recording, and prints its cost.
pub fn replay() -> Result<()> {
    fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .context("/dev/kvm cannot be used")?;
    let file = path(RECORDING);
    let bytes = fs::read(&file).with_context(|| {
        format!(
            "cannot read {}: `cargo xtask bench gpuvm --part record` makes it",
            file.display()
        )
    })?;
    let recorded = Recorded::parse(bytes, &fs::read_to_string(path(PARTS))?)?;
    let (release, guests) = (folder()?, guests()?);
    let folder = target().join("gpuvm");
    fs::create_dir_all(&folder)?;
    for (program, name) in [
        (programs::gantry()?, "gantry"),
        (release.join("gantry-gpu"), "gantry-gpu"),
        (release.join("gantry-gf100"), "gantry-gf100"),
        (guests.join("gantry-gpu-guest"), "gantry-gpu-guest"),
    ] {
        gantry_build::copy(&program, &folder.join(name))?;
    }
    println!("{}\n", processors());
    replay::run(&replay::programs(folder)?, &recorded)
}
