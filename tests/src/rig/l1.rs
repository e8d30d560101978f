//! L1: Debian's kernel in QEMU on an emulated CPU with AMD-V, or two of them joined by networks and a shared disk.
//!
//! Each has a single CPU: QEMU's emulation loses a second one now and then, and two machines side by side use two cores
//! better than one machine with two CPUs.

use std::{
    fs,
    io::{self, BufRead, BufReader, Write},
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use super::{
    images::{Images, OtherKernel},
    nvrtc::SERIAL,
    packages::Kernel,
};
use crate::{
    beside::{LUN, NETWORKS, Number},
    report::{BESIDE, Report},
};

/// Size of L1's NVMe disk in bytes.
const NVME_SIZE: u64 = 128 << 20;

/// Size in bytes of the disk that two L1s share.
const LUN_SIZE: u64 = 64 << 20;

/// Size in bytes of the disk of the controller with virtual functions.
const FUNCTIONS_SIZE: u64 = 32 << 20;

/// The machine that L1 is emulated on. Boards differ in their IOMMU.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub enum Board {
    /// Intel's IOMMU with interrupt remapping and 48-bit addresses.
    #[default]
    Intel,
    /// The same with 39-bit addresses, as desktop processors have it.
    Intel39,
    /// AMD's IOMMU, which does not translate the last 12 GiB below 1 TiB.
    Amd,
    /// The paravirtual IOMMU, which has no interrupt remapping.
    Virtio,
    /// Intel's IOMMU under a kernel with iommufd.
    Iommufd,
    /// Intel's IOMMU under a kernel that guests can have, too, and that has GPU drivers.
    Gpu,
    /// Two hosts with Intel's IOMMU; [`beside`](crate::beside) says what they share.
    TwoHosts,
}

impl Board {
    /// The kernel that this board needs instead of the usual one.
    pub fn other_kernel(self) -> Option<OtherKernel> {
        match self {
            Self::Intel | Self::Intel39 | Self::TwoHosts => None,
            Self::Amd | Self::Virtio => Some(OtherKernel::AnyIommu),
            Self::Iommufd => Some(OtherKernel::Iommufd),
            Self::Gpu => Some(OtherKernel::Gpu),
        }
    }

    /// QEMU's arguments for the board's IOMMU.
    fn iommu(self) -> [&'static str; 2] {
        match self {
            Self::Intel | Self::Iommufd | Self::Gpu | Self::TwoHosts => {
                ["-device", "intel-iommu,intremap=on,aw-bits=48"]
            }
            Self::Intel39 => ["-device", "intel-iommu,intremap=on,aw-bits=39"],
            Self::Amd => ["-device", "amd-iommu,intremap=on"],
            Self::Virtio => ["-device", "virtio-iommu-pci"],
        }
    }
}

/// Name of the file that is served to the network card.
pub const FILE: &str = "file";
/// Size of the file in bytes.
pub const FILE_SIZE: usize = 1 << 20;
/// The line that the file repeats; its length divides the file's size.
pub const FILE_LINE: &str = "gantry.\n";
/// Address in QEMU's network that serves the file.
pub const FILE_SERVER: &str = "10.0.2.2";

/// L1 is interrupted after this time without a line.
///
/// QEMU 7.2 can lose an interrupt of an emulated AMD CPU that runs nested guests. According to its monitor, the timer's
/// interrupt was pending in the local APIC and interrupts were enabled, but the CPU kept sleeping until any other
/// interrupt made QEMU look again. The probable cause is that `svm_helper.c` changes `interrupt_request` without the
/// lock under which the timer's thread changes it.
const NUDGE: Duration = Duration::from_secs(1);

/// A running L1.
pub struct L1 {
    /// The board that it runs on.
    pub board: Board,
    qemu: Child,
    orders: ChildStdin,
    lines: mpsc::Receiver<String>,
    console: PathBuf,
    /// The second of two L1s.
    beside: Option<Box<Self>>,
}

/// What joins two L1s.
struct Joint {
    /// This L1's ends of the networks.
    ends: Vec<OwnedFd>,
    /// Which of the two L1s this is.
    number: Number,
    /// The file of the shared disk.
    lun: PathBuf,
}

impl Joint {
    /// Creates the joints of both L1s.
    fn new(work: &Path, number: usize) -> Result<[Self; 2]> {
        let lun = work.join(format!("l1-{number}-lun.raw"));
        fs::File::create(&lun)?.set_len(LUN_SIZE)?;
        let joint = |number| Self {
            ends: Vec::new(),
            number,
            lun: lun.clone(),
        };
        let mut both = [joint(Number::First), joint(Number::Second)];
        for _ in 0..NETWORKS {
            let (one, other) = UnixStream::pair()?;
            both[0].ends.push(one.into());
            both[1].ends.push(other.into());
        }
        Ok(both)
    }

    /// Adds the devices to QEMU's arguments.
    fn add_to(self, qemu: &mut Command) {
        for (network, end) in self.ends.iter().enumerate() {
            let mac = self.number.mac(network);
            qemu.arg("-netdev")
                .arg(format!("socket,id=net{network},fd={}", end.as_raw_fd()))
                .arg("-device")
                .arg(format!(
                    "virtio-net-pci,netdev=net{network},mac={mac},romfile="
                ));
        }
        // Both write to it, which QEMU would refuse by default.
        qemu.arg("-drive")
            .arg(format!(
                "file={},if=none,id=lun,format=raw,file.locking=off",
                self.lun.display()
            ))
            .arg("-device")
            .arg(format!("virtio-blk-pci,drive=lun,serial={LUN}"));
        let ends: Vec<RawFd> = self.ends.iter().map(AsRawFd::as_raw_fd).collect();
        let keep = move || {
            // Keeps them open until QEMU has started: the command owns them.
            let _ = &self.ends;
            for &end in &ends {
                // SAFETY: a system call without pointers.
                if unsafe { libc::fcntl(end, libc::F_SETFD, 0) } < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: the closure only makes system calls, and does not allocate.
        unsafe { qemu.pre_exec(keep) };
    }
}

/// What L1 says next.
pub enum Line {
    /// A report of the runner.
    Report(Report),
    /// QEMU has ended, or L1 was silent for too long.
    Dead(String),
}

impl L1 {
    /// Boots an L1. Its number distinguishes its console's file from those of other L1s.
    pub fn boot(images: &Images, board: Board, number: usize) -> Result<Self> {
        if board != Board::TwoHosts {
            return Self::boot_one(images, board, &number.to_string(), None);
        }
        let work = images.l1.parent().context("images are in no folder")?;
        let [first, second] = Joint::new(work, number)?;
        let beside = Self::boot_one(images, board, &format!("{number}-beside"), Some(second))?;
        let mut l1 = Self::boot_one(images, board, &number.to_string(), Some(first))?;
        l1.beside = Some(Box::new(beside));
        Ok(l1)
    }

    fn boot_one(images: &Images, board: Board, name: &str, joint: Option<Joint>) -> Result<Self> {
        let work = images.l1.parent().context("images are in no folder")?;
        let (kernel, initrd) = of_board(images, board)?;
        let console = work.join(format!("l1-{name}-console.log"));
        let disk = work.join(format!("l1-{name}-nvme.raw"));
        fs::File::create(&disk)?.set_len(NVME_SIZE)?;
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args([
                "-machine",
                "q35,kernel-irqchip=off",
                "-accel",
                "tcg,thread=multi",
            ])
            // KVM offers guests no AVX here. Without AVX, PoCL compiles for L1 what L2 can run, so that L1 and L2 can
            // exchange an application's compiled kernels.
            .args(["-cpu", "max,-avx", "-smp", "1", "-m", "3072"])
            .args(board.iommu())
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
            .args(compiler(board, images))
            .args(more_devices(board, work, name)?)
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
            .arg(&kernel.image)
            .arg("-initrd")
            .arg(initrd)
            // QEMU 7.2 caches translated code by virtual address: programs at random addresses are translated again
            // each time they start, which takes longer than what they do (a lazy restore in `cargo xtask bench
            // snapshot` takes 90 ms, and 30 ms with `norandmaps`).
            .arg("-append")
            .arg(format!(
                "console=ttyS0 panic=-1 mitigations=off quiet lsm=landlock intel_iommu=on \
                 no_timer_check norandmaps{}",
                joint
                    .as_ref()
                    .map_or_else(String::new, |_| time_stamp_rate())
            ))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        if let Some(joint) = joint {
            joint.add_to(&mut command);
        }
        let mut qemu = command.spawn().context("cannot start qemu-system-x86_64")?;
        let stdout = qemu.stdout.take().context("QEMU has no output")?;
        let orders = qemu.stdin.take().context("QEMU has no input")?;
        Ok(Self {
            board,
            qemu,
            orders,
            lines: lines(stdout),
            console,
            beside: None,
        })
    }

    /// Orders the runner to do something: a scenario by name, [`DEMO`](crate::report::DEMO) or
    /// [`BENCH`](crate::report::BENCH). It takes an order after it has reported that it is ready or that the previous
    /// order is finished.
    pub fn order(&mut self, what: &str) -> Result<()> {
        writeln!(self.orders, "{what}").context("L1 takes no orders")
    }

    /// The next report. Gives up after `silence` without any.
    pub fn next(&mut self, silence: Duration) -> Result<Line> {
        let mut heard = Instant::now();
        loop {
            if let Some(beside) = &mut self.beside {
                beside.attend();
            }
            match self.lines.recv_timeout(NUDGE) {
                Ok(line) => {
                    if let Some(report) = Report::parse(&line) {
                        return Ok(Line::Report(report));
                    }
                    heard = Instant::now();
                }
                Err(mpsc::RecvTimeoutError::Timeout) if heard.elapsed() < silence => self.nudge(),
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

    /// Makes the other host take orders from the first one as soon as it can, and keeps it awake.
    fn attend(&mut self) {
        while let Ok(line) = self.lines.try_recv() {
            if Report::parse(&line) == Some(Report::Ready) {
                // If QEMU has ended, the first host notices that it cannot reach it.
                let _ = self.order(BESIDE);
            }
        }
        self.nudge();
    }

    /// Interrupts L1 with an empty order.
    fn nudge(&mut self) {
        // If QEMU has ended, its output shows that.
        let _ = writeln!(self.orders);
    }

    /// The last lines of L1's console.
    pub fn console_tail(&self) -> Vec<String> {
        let bytes = fs::read(&self.console).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let lines: Vec<_> = text.lines().map(|line| format!("L1: {line}")).collect();
        let mut tail = lines[lines.len().saturating_sub(60)..].to_vec();
        if let Some(beside) = &self.beside {
            tail.push("the other host:".to_owned());
            tail.extend(beside.console_tail());
        }
        tail
    }
}

/// Kernel and initial file system of a board's L1.
fn of_board(images: &Images, board: Board) -> Result<(&Kernel, &Path)> {
    let Some(other) = board.other_kernel() else {
        return Ok((&images.kernel, &images.l1));
    };
    let other = images.others.get(&other);
    let other = other.context("there is no L1 with the board's kernel")?;
    Ok((&other.kernel, &other.l1))
}

/// The lines of an output as they arrive.
fn lines(output: ChildStdout) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        let mut reader = BufReader::new(output);
        let mut line = Vec::new();
        while reader
            .read_until(b'\n', &mut line)
            .is_ok_and(|read| read > 0)
        {
            let text = String::from_utf8_lossy(&line).into_owned();
            if sender.send(text).is_err() {
                return;
            }
            line.clear();
        }
    });
    lines
}

/// A disk with NVIDIA's compiler, in a high slot so that the other devices keep their slots.
fn compiler(board: Board, images: &Images) -> Vec<String> {
    let Some(disk) = images.nvrtc.as_ref().filter(|_| board == Board::Intel) else {
        return Vec::new();
    };
    vec![
        "-drive".to_owned(),
        format!(
            "file={},if=none,id=nvrtc,format=raw,readonly=on",
            disk.display()
        ),
        "-device".to_owned(),
        format!("virtio-blk-pci,drive=nvrtc,addr=0x1d,serial={SERIAL}"),
    ]
}

/// Size of the ROM in bytes; an image takes half of it.
const ROM_SIZE: usize = 8 << 10;

/// Devices that are not tested on every board, in high slots so that the others keep their slots.
fn more_devices(board: Board, work: &Path, name: &str) -> Result<Vec<String>> {
    if !matches!(board, Board::Intel | Board::Iommufd) {
        return Ok(Vec::new());
    }
    let rom = work.join("edu.rom");
    fs::write(&rom, rom_image())?;
    let served = work.join("tftp");
    fs::create_dir_all(&served)?;
    fs::write(
        served.join(FILE),
        FILE_LINE.repeat(FILE_SIZE / FILE_LINE.len()),
    )?;
    let devices = [
        "pci-testdev,addr=0x10".to_owned(),
        "pcie-root-port,id=rootport,chassis=1,addr=0x11".to_owned(),
        format!(
            "edu,dma_mask=0xffffffffffff,bus=rootport,romfile={}",
            rom.display()
        ),
        "edu,dma_mask=0xffffffffffff,addr=0x12.0,multifunction=on".to_owned(),
        "edu,dma_mask=0xffffffffffff,addr=0x12.1".to_owned(),
        "virtio-net-pci,netdev=card,iommu_platform=on,disable-legacy=on,romfile=,addr=0x13"
            .to_owned(),
        "pcie-root-port,id=twoport,chassis=2,addr=0x14".to_owned(),
        "edu,dma_mask=0xffffffffffff,bus=twoport,addr=0.0,multifunction=on".to_owned(),
        "edu,dma_mask=0xffffffffffff,bus=twoport,addr=0.1".to_owned(),
        // Extended capabilities: error reporting and a serial number; error reporting and address translation.
        "pcie-root-port,id=errorport,chassis=3,addr=0x15".to_owned(),
        "e1000e,bus=errorport,netdev=express,romfile=,mac=52:54:00:12:34:56".to_owned(),
        "pcie-root-port,id=atsport,chassis=4,addr=0x16".to_owned(),
        "virtio-rng-pci,bus=atsport,iommu_platform=on,disable-legacy=on,aer=on,ats=on".to_owned(),
    ];
    // A controller with virtual functions, and a disk that all of its functions share.
    let disk = work.join(format!("l1-{name}-functions.raw"));
    fs::File::create(&disk)?.set_len(FUNCTIONS_SIZE)?;
    let drive = format!("file={},if=none,id=functions,format=raw", disk.display());
    let functions = [
        "nvme-subsys,id=subsystem",
        "nvme,id=physical,serial=functions,subsys=subsystem,sriov_max_vfs=1,sriov_vq_flexible=2,\
         sriov_vi_flexible=1,addr=0x17",
        "nvme-ns,drive=functions,bus=physical,shared=on",
    ];
    let functions = functions.iter().filter(|_| board == Board::Intel);
    let devices = devices
        .into_iter()
        .chain(functions.map(|device| (*device).to_owned()));
    // A network without access to the outside, in which QEMU serves a file at FILE_SERVER.
    let card = format!("user,id=card,restrict=on,tftp={}", served.display());
    let arguments = devices.flat_map(|device| ["-device".to_owned(), device]);
    let express = "user,id=express,restrict=on".to_owned();
    let netdev = || "-netdev".to_owned();
    Ok([
        "-drive".to_owned(),
        drive,
        netdev(),
        card,
        netdev(),
        express,
    ]
    .into_iter()
    .chain(arguments)
    .collect())
}

/// The smallest ROM that a kernel exposes (PCI 3.0, 6.3.1): its header and a pattern. Firmware would not run it.
fn rom_image() -> Vec<u8> {
    const DATA: usize = 0x20;
    let mut rom: Vec<u8> = (0..ROM_SIZE).map(|at| at as u8 ^ 0x5a).collect();
    rom[..2].copy_from_slice(&[0x55, 0xaa]);
    rom[0x18..0x1a].copy_from_slice(&(DATA as u16).to_le_bytes());
    rom[DATA..DATA + 0x18].fill(0);
    rom[DATA..DATA + 4].copy_from_slice(b"PCIR");
    rom[DATA + 4..DATA + 8].copy_from_slice(&[0x34, 0x12, 0xe8, 0x11]);
    rom[DATA + 0xa] = 0x18;
    // Length in units of 512 bytes, code type EFI, last image.
    rom[DATA + 0x10] = (ROM_SIZE / 2 / 512) as u8;
    rom[DATA + 0x14] = 3;
    rom[DATA + 0x15] = 0x80;
    rom
}

impl Drop for L1 {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// Kernel parameter with the rate of L1's time-stamp counter, which is this machine's under TCG. On a busy machine, the
/// kernel would measure a different rate, and a guest does not move between hosts whose rates differ.
fn time_stamp_rate() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let rate = text.lines().find_map(|line| {
        let (_, megahertz) = line.strip_prefix("cpu MHz")?.split_once(':')?;
        megahertz.trim().parse::<f64>().ok()
    });
    rate.map_or_else(String::new, |rate| {
        format!(" tsc_early_khz={:.0}", rate * 1e3)
    })
}
