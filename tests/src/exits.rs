//! A guest's exits by KVM's own counters, and how many of them a block read from a disk costs.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{guest::Guest, net::sh};

/// Where KVM's statistics are (Documentation/virt/kvm/api.rst, 4.133 names the counters).
const STATISTICS: &str = "/sys/kernel/debug/kvm";

/// Counters of one VM, summed over its vCPUs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Exits {
    /// Exits for any reason.
    pub all: f64,
    /// Accesses that KVM handed to the VMM: trapped memory and I/O ports.
    pub to_vmm: f64,
    /// Interrupts of the host, from a device or its timer.
    pub interrupts: f64,
    /// Faults on guest pages that had no host memory yet.
    pub pages: f64,
    /// Writes to present but write-protected pages: the first write after KVM's log was cleared.
    pub write_faults: f64,
    /// The guest was idle.
    pub halts: f64,
}

impl Exits {
    /// The counters of a process's VM so far. KVM names the VM after the thread that created it.
    pub fn of(pid: u32) -> Result<Self> {
        sh(&format!(
            "[ -e {STATISTICS} ] || mount -t debugfs debug /sys/kernel/debug"
        ))?;
        let folder = fs::read_dir(STATISTICS)?
            .filter_map(Result::ok)
            .find(|entry| {
                let name = entry.file_name();
                let thread = name.to_str().and_then(|name| name.split_once('-'));
                thread.is_some_and(|(thread, _)| {
                    Path::new(&format!("/proc/{pid}/task/{thread}")).exists()
                })
            })
            .with_context(|| format!("KVM knows no VM of process {pid}"))?
            .path();
        let counter = |name: &str| -> Result<f64> {
            let text = fs::read_to_string(folder.join(name))
                .with_context(|| format!("KVM does not count {name}"))?;
            Ok(text.trim().parse()?)
        };
        Ok(Self {
            all: counter("exits")?,
            to_vmm: counter("mmio_exits")? + counter("io_exits")?,
            interrupts: counter("irq_exits")?,
            pages: counter("pf_fixed")?,
            write_faults: counter("pf_fast")?,
            halts: counter("halt_exits")?,
        })
    }

    fn each(self, other: Self, by: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            all: by(self.all, other.all),
            to_vmm: by(self.to_vmm, other.to_vmm),
            interrupts: by(self.interrupts, other.interrupts),
            pages: by(self.pages, other.pages),
            write_faults: by(self.write_faults, other.write_faults),
            halts: by(self.halts, other.halts),
        }
    }
}

/// Cost of reading one block.
#[derive(Clone, Copy, Debug)]
pub struct PerRead {
    /// Exits.
    pub exits: Exits,
    /// Time.
    pub time: Duration,
}

/// Makes the guest of process `pid` read blocks of 4 KiB from `disk`, one after the other: first
/// `count` of them, then three times as many. Costs that both runs have in common cancel out (the
/// command and its output cross the serial port at one exit per byte).
pub fn per_read(guest: &mut Guest, pid: u32, disk: &str, count: u32) -> Result<PerRead> {
    let mut run = |count: u32| -> Result<(Exits, f64)> {
        let before = Exits::of(pid)?;
        let said = guest.run(&format!("agent read-blocks {disk} {count}"))?;
        let spent = Exits::of(pid)?.each(before, |after, before| after - before);
        let seconds = said.trim().parse();
        Ok((
            spent,
            seconds.with_context(|| format!("no time: {said:?}"))?,
        ))
    };
    let (few, short) = run(count)?;
    let (many, long) = run(count.saturating_mul(3))?;
    let more = f64::from(count) * 2.0;
    Ok(PerRead {
        exits: many.each(few, |many, few| (many - few) / more),
        time: Duration::from_secs_f64(((long - short) / more).max(0.0)),
    })
}

/// Reads this many blocks with the page cache bypassed, and prints the seconds it took.
pub fn read_blocks(disk: &str, count: u32) -> Result<()> {
    use std::os::{fd::AsRawFd, unix::fs::OpenOptionsExt};

    let file = fs::File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(PathBuf::from(disk))
        .with_context(|| format!("cannot open {disk}"))?;
    let (page, _) = crate::edu::page()?;
    let start = std::time::Instant::now();
    for block in 0..count {
        // Within the first 32 MiB.
        let at = i64::from(block % 8192) * 4096;
        // SAFETY: the page has 4,096 bytes, and nobody else uses it.
        let read = unsafe { libc::pread(file.as_raw_fd(), page.cast(), 4096, at) };
        anyhow::ensure!(read == 4096, "block {block}: {read} bytes");
    }
    println!("{:.6}", start.elapsed().as_secs_f64());
    Ok(())
}
