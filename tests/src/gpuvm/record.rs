//! Records what a guest with nouveau does with a virtual GPU, so that it can be replayed without
//! the guest and without an emulated processor. Parts are distinguished by the number of preceding
//! accesses.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use gf100::recording::Recording;
use serde_json::json;

use super::{FLUSHES, SUBMISSIONS, counts, exits, start_and_copy};
use crate::{
    gantry::Gantry,
    scenarios::{Context, gf100::does, virtual_gpu::Mediated},
};

/// Name of the measurement in L1.
pub const NAME: &str = "gpuvm-record";
/// Prefixes of the lines with the recording.
const PART: &str = "part";
const BYTES: &str = "bytes";
/// Number of bytes per line.
const LINE: usize = 4096;

/// The parts in order. What both parts of a pair have in common is not a flush and not a
/// submission.
pub const FEW_FLUSHES: &str = "few flushes";
/// The same with [`MORE`] additional flushes.
pub const MANY_FLUSHES: &str = "many flushes";
/// The start of nouveau and the copy test.
pub const START: &str = "start";
/// Like [`FEW_FLUSHES`], for submissions.
pub const FEW_SUBMISSIONS: &str = "few submissions";
/// The same with [`MORE`] additional submissions.
pub const MANY_SUBMISSIONS: &str = "many submissions";
/// Number of additional flushes, or submissions.
pub const MORE: u64 = 2 * FLUSHES;
const _: () = assert!(FLUSHES == SUBMISSIONS);

/// A part of a recording.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Part {
    /// What the guest did.
    pub name: String,
    /// Number of accesses up to its end.
    pub end: u64,
}

/// Records, and passes the recording on.
pub fn measure(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let context = Context {
        dir: PathBuf::from("/tmp/bench-gpuvm-record"),
    };
    fs::create_dir_all(&context.dir)?;
    let file = context.dir.join("recording");
    let mediated = Mediated::start(&context)?;
    let switches = json!({"remap": false, "record": file});
    let (gantry, mut guest) = mediated.boot_with(&context, "guest", "", switches)?;
    let mut part = |name: &str, gantry: &Gantry| -> Result<()> {
        let end = exits(&counts(gantry)?);
        row(PART, format!("{name}: {end}"));
        Ok(())
    };
    part("boot", &gantry)?;
    for (name, count) in [(FEW_FLUSHES, FLUSHES), (MANY_FLUSHES, FLUSHES + MORE)] {
        does(&mut guest, &format!("gpu-flush {count}"), "flushes")?;
        part(name, &gantry)?;
    }
    start_and_copy(&gantry, &mut guest)?;
    wait_until_idle(&gantry)?;
    part(START, &gantry)?;
    for (name, count) in [
        (FEW_SUBMISSIONS, SUBMISSIONS),
        (MANY_SUBMISSIONS, SUBMISSIONS + MORE),
    ] {
        does(&mut guest, &format!("gpu-submit {count}"), "submissions")?;
        wait_until_idle(&gantry)?;
        part(name, &gantry)?;
    }
    let bytes = fs::read(&file)?;
    ensure!(bytes.len() > LINE, "the recording is {bytes:?}");
    for line in bytes.chunks(LINE) {
        row(BYTES, hex(line));
    }
    Ok(())
}

/// Waits until the guest is idle.
fn wait_until_idle(gantry: &Gantry) -> Result<()> {
    let start = Instant::now();
    let mut before = 0;
    loop {
        let now = exits(&counts(gantry)?);
        if now == before {
            return Ok(());
        }
        ensure!(
            start.elapsed() < Duration::from_secs(60),
            "the guest goes on"
        );
        before = now;
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let pairs = text.as_bytes().chunks(2);
    let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    pairs.map(byte).collect()
}

/// A recording and its parts, from the lines of [`measure`].
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Recorded {
    /// The parts in order.
    pub parts: Vec<Part>,
    /// The recording.
    pub bytes: Vec<u8>,
}

impl Recorded {
    /// Parses a line. Returns false if it does not belong to a recording.
    ///
    /// # Errors
    /// It does, but is invalid.
    pub fn take(&mut self, line: &str) -> Result<bool> {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        match cells[..] {
            ["", PART, text, ""] => self.parts.push(Part::parse(text)?),
            ["", BYTES, text, ""] => {
                let bytes = from_hex(text).context("a line of the recording is garbled")?;
                self.bytes.extend(bytes);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Parses the two files: the recording, and its parts as text.
    pub fn parse(bytes: Vec<u8>, parts: &str) -> Result<Self> {
        let parts = parts.lines().map(Part::parse).collect::<Result<_>>()?;
        Ok(Self { parts, bytes })
    }

    /// The parts as text, one line each.
    pub fn parts(&self) -> String {
        let line = |part: &Part| format!("{}: {}\n", part.name, part.end);
        self.parts.iter().map(line).collect()
    }

    /// The recording, after checking it against the parts.
    pub fn recording(&self) -> Result<Recording> {
        let recording = Recording::parse(&self.bytes)?;
        let accesses: u64 = recording
            .records
            .iter()
            .map(|record| match record {
                gf100::recording::Record::Access(run) => run.count,
                _ => 0,
            })
            .sum();
        let last = self.parts.last().context("the recording has no parts")?;
        let in_order = self.parts.is_sorted_by_key(|part| part.end);
        if !in_order || last.end > accesses {
            bail!(
                "the recording has {accesses} accesses, and its parts are {:?}",
                self.parts
            );
        }
        Ok(recording)
    }
}

impl Part {
    fn parse(text: &str) -> Result<Self> {
        let (name, end) = text
            .rsplit_once(": ")
            .with_context(|| format!("{text:?} is no part of a recording"))?;
        Ok(Self {
            name: name.to_owned(),
            end: end.trim().parse()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_in_lines_is_the_recording() {
        let mut recorded = Recorded::default();
        for line in ["| part | boot: 7 |", "| bytes | 00ff |", "| bytes | 10 |"] {
            assert!(recorded.take(line).unwrap(), "{line}");
        }
        assert!(!recorded.take("| another | figure |").unwrap());
        assert!(recorded.take("| bytes | xy |").is_err());
        assert_eq!(recorded.bytes, [0, 0xff, 0x10]);
        assert_eq!(hex(&recorded.bytes), "00ff10");
        let again = Recorded::parse(recorded.bytes.clone(), &recorded.parts()).unwrap();
        assert_eq!(again, recorded);
        assert!(recorded.recording().is_err());
    }
}
