//! L1: Debian's kernel in QEMU, on an emulated processor with AMD-V.
//!
//! One processor each: QEMU's emulation loses a second one now and then, and two machines side by
//! side use two cores better than one machine with two processors.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

use super::images::Images;
use crate::report::Report;

/// Bytes of L1's NVMe disk.
const NVME_SIZE: u64 = 128 << 20;

/// A running L1.
pub struct L1 {
    qemu: Child,
    orders: ChildStdin,
    lines: mpsc::Receiver<String>,
    console: PathBuf,
}

/// What L1 says next.
pub enum Line {
    /// A report of the runner.
    Report(Report),
    /// QEMU has ended, or nothing was heard for too long.
    Dead(String),
}

impl L1 {
    /// Boots the L1 of this number, which tells its console's file from those of others.
    pub fn boot(images: &Images, number: usize) -> Result<Self> {
        let work = images.l1.parent().context("images are in no folder")?;
        let console = work.join(format!("l1-{number}-console.log"));
        let disk = work.join(format!("l1-{number}-nvme.raw"));
        fs::File::create(&disk)?.set_len(NVME_SIZE)?;
        let mut qemu = Command::new("qemu-system-x86_64")
            .args([
                "-machine",
                "q35,kernel-irqchip=off",
                "-accel",
                "tcg,thread=multi",
            ])
            .args(["-cpu", "max", "-smp", "1", "-m", "3072"])
            // An address width of 48 bits: with less, BARs of the devices cannot be mapped.
            .args(["-device", "intel-iommu,intremap=on,aw-bits=48"])
            .args(["-device", "edu,dma_mask=0xffffffffffff"])
            .args(["-device", "edu,dma_mask=0xffffffffffff"])
            .arg("-drive")
            .arg(format!(
                "file={},if=none,id=nvme,format=raw",
                disk.display()
            ))
            .args(["-device", "nvme,drive=nvme,serial=gantry"])
            .arg("-drive")
            .arg(format!(
                "file={},if=none,id=pocl,format=raw,readonly=on",
                images.pocl.display()
            ))
            .args(["-device", "virtio-blk-pci,drive=pocl"])
            .args([
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
                "-no-reboot",
            ])
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .args(["-serial", "stdio"])
            .arg("-kernel")
            .arg(&images.kernel.image)
            .arg("-initrd")
            .arg(&images.l1)
            // QEMU 7.2 keeps translated code by virtual address: programs at random addresses are
            // translated anew each time they start, which takes longer than what they do.
            .args([
                "-append",
                "console=ttyS0 panic=-1 mitigations=off quiet lsm=landlock intel_iommu=on \
                 no_timer_check norandmaps",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .context("cannot start qemu-system-x86_64")?;
        let stdout = qemu.stdout.take().context("QEMU has no output")?;
        let orders = qemu.stdin.take().context("QEMU has no input")?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            let mut line = Vec::new();
            while reader
                .read_until(b'\n', &mut line)
                .is_ok_and(|read| read > 0)
            {
                if sender
                    .send(String::from_utf8_lossy(&line).into_owned())
                    .is_err()
                {
                    return;
                }
                line.clear();
            }
        });
        Ok(Self {
            qemu,
            orders,
            lines,
            console,
        })
    }

    /// Has the runner do something: a scenario by name, [`DEMO`](crate::report::DEMO) or
    /// [`BENCH`](crate::report::BENCH). It takes orders after it has said that it is ready or that
    /// the last one is finished.
    pub fn order(&mut self, what: &str) -> Result<()> {
        writeln!(self.orders, "{what}").context("L1 takes no orders")
    }

    /// The next report, after at most `silence` without any.
    pub fn next(&mut self, silence: Duration) -> Result<Line> {
        loop {
            match self.lines.recv_timeout(silence) {
                Ok(line) => {
                    if let Some(report) = Report::parse(&line) {
                        return Ok(Line::Report(report));
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    return Ok(Line::Dead(format!("nothing was heard for {silence:?}")));
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let status = self.qemu.wait()?;
                    return Ok(Line::Dead(format!("QEMU ended with {status}")));
                }
            }
        }
    }

    /// The last lines of L1's console.
    pub fn console_tail(&self) -> Vec<String> {
        let bytes = fs::read(&self.console).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let lines: Vec<_> = text.lines().map(|line| format!("L1: {line}")).collect();
        lines[lines.len().saturating_sub(60)..].to_vec()
    }
}

impl Drop for L1 {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
