//! Tests the module under Debian's kernel and KVM in the emulator: the host of a virtual machine.

use std::{
    collections::VecDeque,
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::{Mutex, mpsc},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use base::Unpoisoned;
use gantry_build::{programs, progress::Step, target};
use gantry_tests::{
    report::Outcome,
    rig::{Cache, images, root_fs},
};

use super::{Check, bare, bochs, check, module::Module, opencl};

/// The modules of KVM.
const MODULES: &[&str] = &["irqbypass", "kvm", "kvm-intel"];

/// These options save two thirds of the emulated boot time.
const COMMAND_LINE: &str = "console=ttyS0,115200 nokaslr mitigations=off noxsave panic=-1 \
    tsc=reliable quiet cryptomgr.notests oops=panic \
    initcall_blacklist=load_system_certificate_list,crypto_kdf108_init,trace_eval_init";

/// The kind of guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guests {
    /// A few pages of code.
    Small,
    /// Linux, with the host's kernel.
    Linux,
    /// The same, with OpenCL.
    Seats,
}

impl Guests {
    fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Linux => "linux",
            Self::Seats => "seats",
        }
    }

    /// Maximum run time in seconds; the emulator takes a quarter of that on an idle machine.
    fn seconds(self) -> u32 {
        match self {
            Self::Small => 900,
            Self::Linux => 1200,
            Self::Seats => 1500,
        }
    }

    /// The emulated host's RAM in MiB.
    fn megabytes(self) -> u32 {
        match self {
            // One of the servers has 1024.
            Self::Small | Self::Linux => 1536,
            // PoCL twice, and the pages of its disk.
            Self::Seats => 2048,
        }
    }
}

/// An emulated host whose disk has been written.
pub struct Host {
    /// Release of its kernel.
    release: String,
    guests: Guests,
    work: PathBuf,
    /// An additional disk.
    disk: Option<PathBuf>,
    emulator: bochs::Emulator,
}

impl Host {
    /// Builds a host that an emulator runs, with the checks of `vmfunc-gate/rig`, and a module and its kernel.
    ///
    /// # Errors
    /// Something cannot be built.
    pub fn build(
        cache: &Cache,
        module: &Module,
        guests: Guests,
        emulator: &bochs::Emulator,
    ) -> Result<Self> {
        let release = module.kernel.release.clone();
        let folder = format!("{release}-{}", guests.name());
        let work = target().join("gate-kvm").join(folder);
        fs::create_dir_all(&work)?;
        let loader = bare::build()?.join("vmfunc-gate-loader");
        let kernel = images::unpacked_kernel(cache, &module.kernel)?;
        let archive = initramfs(cache, module, guests, &kernel, &work)?;
        let memory = guests.megabytes();
        write_disk(&loader, &kernel, (&archive, memory), &work.join("disk.img"))?;
        let disk = match guests {
            Guests::Seats => Some(opencl::disk()?),
            Guests::Small | Guests::Linux => None,
        };
        Ok(Self {
            release,
            guests,
            work,
            disk,
            emulator: emulator.clone(),
        })
    }

    /// Runs the host. Returns its output and the time in seconds.
    fn run(&self) -> Result<(String, f64)> {
        let machine = bochs::Machine {
            emulator: &self.emulator,
            // The time-stamp counter of this model runs at the emulator's speed; others confuse the
            // kernel's timers.
            cpu: "corei7_haswell_4770",
            megabytes: self.guests.megabytes(),
            disk: self.disk.as_deref(),
            seconds: self.guests.seconds(),
        };
        let started = Instant::now();
        Ok((machine.run(&self.work)?, started.elapsed().as_secs_f64()))
    }
}

/// Runs hosts, `side_by_side` at a time, and passes on the checks of each when it ends. An emulator
/// has one thread, and its clock counts instructions, so its output does not depend on what else
/// runs.
///
/// # Errors
/// A host cannot be started.
/// One cannot be started.
pub fn run(hosts: Vec<Host>, side_by_side: usize, mut each: impl FnMut(Vec<Check>)) -> Result<()> {
    let step = Step::new(format!("running KVM in Bochs ({} hosts)", hosts.len()));
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let queue = Mutex::new(VecDeque::from(hosts));
    let next = || {
        let mut queue = queue.lock_unpoisoned();
        queue.pop_front()
    };
    thread::scope(|scope| {
        let (sender, results) = mpsc::channel();
        for _ in 0..side_by_side.min(cores) {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some(host) = next() {
                    let result = host.run();
                    // The receiver may have stopped with an error.
                    let _ = sender.send((host, result));
                }
            });
        }
        drop(sender);
        for (host, result) in results {
            let (printed, seconds) = result?;
            each(checks(&host, &printed, seconds));
        }
        step.finish();
        Ok(())
    })
}

/// The checks in the output of a host.
fn checks(host: &Host, printed: &str, seconds: f64) -> Vec<Check> {
    let Host {
        release,
        guests,
        work,
        disk: _,
        emulator: _,
    } = host;
    let guests = guests.name();
    eprintln!("KVM in Bochs, {release}, guests {guests}: done in {seconds:.1} s");
    let mut checks: Vec<_> = printed
        .lines()
        .filter_map(check)
        .map(|(name, outcome)| (format!("{name} (KVM, {release})"), outcome))
        .collect();
    for figure in printed.lines().filter(|line| line.starts_with("figure ")) {
        println!("{} (KVM, {release})", figure.trim_end());
    }
    let end = if printed.lines().any(|line| line.trim_end() == "end") {
        Outcome::Passed
    } else {
        let last: Vec<_> = printed.lines().rev().take(60).collect();
        let last: Vec<_> = last.into_iter().rev().collect();
        Outcome::Failed(vec![format!(
            "stopped after {seconds:.0} s; see {}:\n{}",
            work.display(),
            last.join("\n")
        )])
    };
    checks.push((
        format!("gate: the checks run to their end (KVM, {release})"),
        end,
    ));
    checks
}

/// Builds the emulated host's initramfs: KVM, the module, the program that checks it, and what
/// Linux guests start with.
fn initramfs(
    cache: &Cache,
    module: &Module,
    guests: Guests,
    kernel: &Path,
    work: &Path,
) -> Result<PathBuf> {
    let release = programs::folder()?;
    let root = work.join("root");
    let busybox = cache.unpacked("busybox-static")?.join("bin/busybox");
    root_fs::start(&root, &busybox)?;
    let mut wanted = MODULES.to_vec();
    if guests == Guests::Seats {
        wanted.extend(opencl::DISK_MODULES);
    }
    let loaded = root_fs::modules(&module.kernel, &wanted, &root.join("modules"))?;
    fs::copy(&module.file, root.join("modules/gantry_gate.ko"))?;
    let program = release.join("vmfunc-gate-rig");
    root_fs::program(&program, &root, "bin/gate-rig")?;
    if guests != Guests::Small {
        let guest = work.join("guest");
        root_fs::start(&guest, &busybox)?;
        root_fs::program(&program, &guest, "init")?;
        if guests == Guests::Seats {
            opencl::files(module, &release, &guest)?;
        }
        fs::create_dir_all(root.join("linux"))?;
        root_fs::pack(&guest, &root.join("linux/initramfs.cpio"))?;
        fs::copy(kernel, root.join("linux/vmlinux"))?;
        root_fs::program(&programs::gantry()?, &root, "bin/gantry")?;
    }
    let name = guests.name();
    let init = format!(
        "{}
exec 0</dev/console 1>/dev/console 2>&1
for m in {loaded}; do insmod /modules/$m.ko; done
/bin/gate-rig {name}
poweroff -f
",
        root_fs::INIT
    );
    root_fs::script(&root.join("init"), &init)?;
    let packed = work.join("initramfs.cpio");
    root_fs::pack(&root, &packed)?;
    Ok(packed)
}

const SECTOR: u64 = 512;
/// Offset of the loader's plan.
const PLAN: u64 = 1024;
/// Maximum number of parts in a plan.
const PARTS: usize = 20;
/// Physical addresses of the boot parameters, the command line and the initramfs.
const PARAMETERS: u64 = 0x9_0000;
const COMMAND_LINE_AT: u64 = 0x9_2000;
const INITRAMFS: u64 = 0x1000_0000;

/// Writes a disk that boots a kernel: the loader, its plan, and what it loads.
fn write_disk(
    loader: &Path,
    kernel: &Path,
    (archive, megabytes): (&Path, u32),
    disk: &Path,
) -> Result<()> {
    let elf = fs::read(kernel).with_context(|| format!("cannot read {}", kernel.display()))?;
    let archive = fs::read(archive)?;
    let mut parts = segments(&elf)?;
    let entry = number(&elf, 24, 8)?;
    parts.push((PARAMETERS, parameters(archive.len(), megabytes)?));
    parts.push((COMMAND_LINE_AT, format!("{COMMAND_LINE}\0").into_bytes()));
    parts.push((INITRAMFS, archive));
    ensure!(
        parts.len() <= PARTS,
        "the kernel has {} segments",
        parts.len()
    );
    let mut plan = Vec::new();
    for number in [entry, PARAMETERS, parts.len() as u64] {
        plan.extend(number.to_le_bytes());
    }
    let mut sector = PLAN + 1;
    for (address, bytes) in &parts {
        let sectors = (bytes.len() as u64).div_ceil(SECTOR);
        plan.extend(u32::try_from(sector)?.to_le_bytes());
        plan.extend(u32::try_from(sectors)?.to_le_bytes());
        plan.extend(address.to_le_bytes());
        sector += sectors;
    }
    let mut file = fs::File::create(disk)?;
    let mut image = fs::read(loader)?;
    image.resize((PLAN * SECTOR) as usize, 0);
    plan.resize(SECTOR as usize, 0);
    file.write_all(&image)?;
    file.write_all(&plan)?;
    for (_, mut bytes) in parts {
        bytes.resize(bytes.len().next_multiple_of(SECTOR as usize), 0);
        file.write_all(&bytes)?;
    }
    file.set_len((sector * SECTOR).next_multiple_of(bochs::CYLINDER))?;
    Ok(())
}

/// Reads a little-endian number from a file.
fn number(bytes: &[u8], at: usize, length: usize) -> Result<u64> {
    let bytes = bytes
        .get(at..at + length)
        .context("the kernel is truncated")?;
    Ok(bytes
        .iter()
        .rev()
        .fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

/// The memory contents that an ELF file requires, by physical address, including zero fill.
fn segments(elf: &[u8]) -> Result<Vec<(u64, Vec<u8>)>> {
    const LOAD: u64 = 1;
    ensure!(elf.starts_with(b"\x7fELF\x02"), "the kernel is no ELF file");
    let (table, size, count) = (
        number(elf, 32, 8)? as usize,
        number(elf, 54, 2)? as usize,
        number(elf, 56, 2)? as usize,
    );
    let mut parts = Vec::new();
    for header in (0..count).map(|index| table + index * size) {
        if number(elf, header, 4)? != LOAD {
            continue;
        }
        let offset = number(elf, header + 8, 8)? as usize;
        let address = number(elf, header + 24, 8)?;
        let length = number(elf, header + 32, 8)? as usize;
        if address % SECTOR != 0 {
            bail!("a segment of the kernel is at {address:#x}");
        }
        let bytes = elf
            .get(offset..offset + length)
            .context("the kernel is truncated")?;
        parts.push((address, bytes.to_vec()));
    }
    Ok(parts)
}

/// The boot parameters (Documentation/arch/x86/boot.rst and zero-page.rst of the kernel).
fn parameters(initramfs: usize, megabytes: u32) -> Result<Vec<u8>> {
    let mut page = vec![0; 4096];
    let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1fe, &0xaa55_u16.to_le_bytes());
    put(0x202, b"HdrS");
    put(0x206, &0x20f_u16.to_le_bytes());
    // A loader without a registered identifier.
    put(0x210, &[0xff]);
    put(0x211, &[1]);
    put(0x218, &u32::try_from(INITRAMFS)?.to_le_bytes());
    put(0x21c, &u32::try_from(initramfs)?.to_le_bytes());
    put(0x228, &u32::try_from(COMMAND_LINE_AT)?.to_le_bytes());
    let end = u64::from(megabytes) << 20;
    // The BIOS keeps its ACPI tables in the last 64 KiB.
    let tables = 64 << 10;
    let map = [
        (0, 0x9_fc00, 1_u32),
        (0xf_0000, 0x1_0000, 2),
        (0x10_0000, end - 0x10_0000 - tables, 1),
        (end - tables, tables, 3),
    ];
    put(0x1e8, &[map.len() as u8]);
    for (index, (start, length, kind)) in map.into_iter().enumerate() {
        let at = 0x2d0 + index * 20;
        put(at, &u64::to_le_bytes(start));
        put(at + 8, &u64::to_le_bytes(length));
        put(at + 16, &kind.to_le_bytes());
    }
    Ok(page)
}
