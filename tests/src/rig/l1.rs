//! L1: Debian's kernel in QEMU, on an emulated processor with AMD-V.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

use super::images::{Images, names_archive};
use crate::report::Report;

/// A running L1.
pub struct L1 {
    qemu: Child,
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
    /// Boots L1, which runs the scenarios of these names and powers off.
    pub fn boot(images: &Images, names: &[String]) -> Result<Self> {
        let work = images.l1.parent().context("images are in no folder")?;
        let initramfs = work.join("l1-run.cpio.gz");
        let mut bytes = fs::read(&images.l1)?;
        bytes.extend(names_archive(names, work)?);
        fs::write(&initramfs, bytes)?;
        let console = work.join("l1-console.log");
        let mut qemu = Command::new("qemu-system-x86_64")
            .args([
                "-machine",
                "q35,kernel-irqchip=off",
                "-accel",
                "tcg,thread=multi",
            ])
            .args(["-cpu", "max", "-smp", "2", "-m", "4096"])
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
            .arg(&initramfs)
            .args([
                "-append",
                "console=ttyS0 panic=-1 mitigations=off quiet lsm=landlock",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .context("cannot start qemu-system-x86_64")?;
        let stdout = qemu.stdout.take().context("QEMU has no output")?;
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
            lines,
            console,
        })
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
