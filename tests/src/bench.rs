//! Measurements of whole runs in L1, printed as rows of a table. These are figures, not tests.

use std::{
    fs,
    io::{BufRead as _, BufReader, ErrorKind},
    net::{Shutdown, TcpListener},
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt},
    },
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::{
    agent::{drain, fill},
    exits::{Exits, PerRead, per_read},
    gantry::{BZIMAGE, CMDLINE, GANTRY, Gantry, INITRAMFS, VMLINUX},
    gpuvm,
    guest::{BOOT, COMMAND, Guest, READY, STATUS},
    host_device::{HostDevice, NVME},
    idle, moves,
    rig::images::BESIDE,
    starts,
};

/// Number of boots measured; the median counts.
const BOOTS: usize = 7;

/// Number of process starts measured in L1.
const STARTS: usize = 15;

/// Guest of the boot measurements, without modules or agent.
const LEAN: &str = "/images/lean.cpio";

/// A measurement: its name and the function that runs it.
type Measurement = (&'static str, fn(&mut dyn FnMut(&str, String)) -> Result<()>);

/// Measurements that run by default.
const ALL: &[Measurement] = &[
    ("boot", boots),
    ("process", process),
    ("snapshot", snapshots),
    ("net", networks),
    ("migration", moves::measure),
    ("passthrough", passthrough),
    ("idle", idle::measure),
];

/// Measurements that run only when named: they need a particular board, or take long.
const NAMED: &[Measurement] = &[
    ("gpuvm", gpuvm::measure),
    (gpuvm::record::NAME, gpuvm::record::measure),
    (gpuvm::shares::NAME, gpuvm::shares::measure),
];

/// Runs the measurements of these names (without names, all) and passes on each row: what was
/// measured, and the figure.
pub fn run(names: &[&str], mut row: impl FnMut(&str, String)) -> Result<()> {
    for (name, measure) in ALL {
        if names.is_empty() || names.contains(name) {
            measure(&mut row)?;
        }
    }
    for (name, measure) in NAMED {
        if names.contains(name) {
            measure(&mut row)?;
        }
    }
    Ok(())
}

/// Median of some figures.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Command lines that boot the lean guest with a disk, and their names.
fn contestants(disk: &Path) -> Result<Vec<(String, Command)>> {
    let disk = disk.display();
    let gantry = |program: &Path, kernel| {
        let mut command = Command::new(program);
        command
            .args(["--kernel", kernel, "--initramfs", LEAN])
            .args(["--cmdline", LEAN_CMDLINE])
            .args(["--cpus", "boot=1", "--memory", "size=256M"])
            .args(["--disk", &format!("path={disk},image_type=raw")])
            .args(["--console", "off", "--serial", "tty"]);
        command
    };
    let qemu = |machine, device| {
        let mut command = Command::new("/bin/qemu-system-x86_64");
        command
            .args(["-L", "/firmware", "-machine", machine, "-accel", "kvm"])
            .args(["-cpu", "host", "-smp", "1", "-m", "256", "-nodefaults"])
            .args(["-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-drive", &format!("file={disk},format=raw,if=none,id=d")])
            .args(["-device", device])
            .args(["-serial", "stdio", "-kernel", BZIMAGE, "-initrd", LEAN])
            .args(["-append", LEAN_CMDLINE]);
        command
    };
    let mut all = vec![
        (
            "gantry, bzImage".to_owned(),
            gantry(GANTRY.as_ref(), BZIMAGE),
        ),
        (
            "gantry, ELF (PVH)".to_owned(),
            gantry(GANTRY.as_ref(), VMLINUX),
        ),
    ];
    for vmm in fs::read_dir(BESIDE)? {
        let vmm = vmm?;
        let name = format!("{}, bzImage", vmm.file_name().to_string_lossy());
        all.push((name, gantry(&vmm.path(), BZIMAGE)));
    }
    all.push((
        "QEMU microvm, bzImage".to_owned(),
        qemu(
            "microvm,pit=off,pic=off,rtc=off",
            "virtio-blk-device,drive=d",
        ),
    ));
    all.push((
        "QEMU q35, bzImage".to_owned(),
        qemu("q35", "virtio-blk-pci,drive=d"),
    ));
    Ok(all)
}

/// Command line of the lean guest.
const LEAN_CMDLINE: &str = "console=ttyS0 panic=-1 quiet mitigations=off";

/// The cost of a boot.
struct Boot {
    /// Uptime of the guest in seconds when its init starts.
    init: f64,
    /// Seconds from the process's start to its end.
    run: f64,
    /// Exits until the guest sleeps.
    exits: Exits,
}

/// Boots the lean guest. The guest sleeps for a second after its init has reported, and its exits
/// are read in the middle of that.
fn boot(name: &str, command: &mut Command) -> Result<Boot> {
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let lines = BufReader::new(child.stdout.take().context("there is a pipe")?);
    let (mut text, mut idle) = (String::new(), None);
    for line in lines.split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        if let Some(init) = line.trim().strip_prefix("init at ") {
            thread::sleep(Duration::from_millis(500));
            idle = Some((init.trim().parse()?, Exits::of(child.id())?));
        }
        text += &line;
    }
    child.wait()?;
    let (init, exits) =
        idle.with_context(|| format!("{name}: the guest did not get to its init: {text}"))?;
    let run = start.elapsed().as_secs_f64();
    Ok(Boot { init, run, exits })
}

/// Measures the time from start to power-off with a second of sleep in the guest, the guest's
/// uptime at its init, and its exits until it sleeps. The contestants take turns so that other load
/// on the host affects all of them alike, and each one gets memory that contains no code of its
/// predecessor.
fn boots(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let dir = Path::new("/tmp/bench-boot");
    fs::create_dir_all(dir)?;
    let disk = dir.join("disk.raw");
    fs::File::create(&disk)?.set_len(16 << 20)?;
    let mut contestants = contestants(&disk)?;
    let mut figures: Vec<Vec<Boot>> = contestants.iter().map(|_| Vec::new()).collect();
    let _held = fill_memory(BOOT_MEMORY)?;
    for round in 1..=BOOTS {
        let mut runs = Vec::new();
        for ((name, command), boots) in contestants.iter_mut().zip(&mut figures) {
            drop(fill_memory(BOOT_MEMORY / 8)?);
            let boot = boot(name, command)?;
            runs.push(format!("{:.2}", boot.run));
            boots.push(boot);
        }
        // Print after each round: a caller that hears nothing from a busy machine for minutes gives
        // up on it.
        row(
            &format!("round {round} of {BOOTS}, start to power-off of each (s)"),
            runs.join("; "),
        );
    }
    for ((name, _), boots) in contestants.iter().zip(figures) {
        let of = |figure: fn(&Boot) -> f64| median(boots.iter().map(figure).collect());
        row(
            &format!("{name}, 1 vCPU, 256 MiB, 1 disk: guest uptime at /init (s)"),
            format!("{:.2}", of(|boot| boot.init)),
        );
        row(
            &format!("{name}: start to power-off, with 1 s of sleep (s)"),
            format!("{:.2}", of(|boot| boot.run)),
        );
        row(
            &format!(
                "{name}: exits until idle; of them to the VMM; for interrupts of the host; \
                 for memory's first use; halts"
            ),
            format!(
                "{:.0}; {:.0}; {:.0}; {:.0}; {:.0}",
                of(|boot| boot.exits.all),
                of(|boot| boot.exits.to_vmm),
                of(|boot| boot.exits.interrupts),
                of(|boot| boot.exits.pages),
                of(|boot| boot.exits.halts)
            ),
        );
    }
    Ok(())
}

/// Memory in bytes that boots have in addition to what [`fill_memory`] holds: enough for any
/// contestant.
const BOOT_MEMORY: u64 = 700 << 20;

/// Fills memory except for `leave` bytes, until the returned value is dropped.
///
/// The emulator under L1 keeps its translation of a page's code until the page is written. Thus a
/// guest whose RAM used to be another guest's boots a second slower than L1's first guest, mostly
/// because of stores to pages whose translations have to be found and dropped.
fn fill_memory(leave: u64) -> Result<Vec<u8>> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let free: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix("MemFree:")?.trim().strip_suffix(" kB"))
        .context("/proc/meminfo does not say what is free")?
        .trim()
        .parse()?;
    // Not zero, because zeroed memory would only be reserved, not written.
    Ok(vec![1; (free << 10).saturating_sub(leave) as usize])
}

/// CPU time of all threads of a process, in nanoseconds, without those that have ended.
///
/// # Errors
///
/// If there is no such process.
pub fn cpu_time(pid: u32) -> Result<u64> {
    let mut total = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = match fs::read_to_string(task?.path().join("schedstat")) {
            // The thread has ended since it was listed.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => continue,
            text => text?,
        };
        total += text
            .split_whitespace()
            .next()
            .unwrap_or("0")
            .parse::<u64>()?;
    }
    Ok(total)
}

/// Private dirty memory of a process in KiB, not counting mappings as large as guest RAM.
///
/// L1 runs from an initial RAM file system, whose pages are always dirty, including the program's
/// code. So only the anonymous part of a private mapping counts.
fn private_dirty(pid: u32, ram: u64) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let (mut total, mut size, mut dirty, mut shared) = (0, 0, 0, false);
    for line in text.lines() {
        let number = |rest: &str| {
            rest.trim()
                .trim_end_matches(" kB")
                .parse::<u64>()
                .unwrap_or(0)
        };
        let (field, rest) = line.split_once(' ').unwrap_or((line, ""));
        match field {
            "Size:" => size = number(rest),
            "Private_Dirty:" => dirty = number(rest),
            "Anonymous:" if size < ram >> 10 => {
                total += if shared {
                    dirty
                } else {
                    dirty.min(number(rest))
                };
            }
            // The first line of a mapping has its addresses and its permissions, as in "rw-p".
            _ if !field.ends_with(':') => {
                shared = rest
                    .split(' ')
                    .next()
                    .is_some_and(|access| access.ends_with('s'));
            }
            _ => {}
        }
    }
    Ok(total)
}

fn process(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let dir = Path::new("/tmp/bench");
    fs::create_dir_all(dir)?;
    let gantry = ("gantry in L1".to_owned(), GANTRY.into());
    starts::measure(&[gantry], dir, STARTS, row)?;
    let disk = dir.join("disk.raw");
    fs::File::create(&disk)?.set_len(16 << 20)?;
    let more =
        json!({"disks": [{"path": disk, "image_type": "Raw"}], "memory": {"size": 256 << 20}});
    let (gantry, mut guest) = Gantry::boot(dir, more)?;
    guest.run("dd if=/dev/vda of=/dev/null bs=1M 2>/dev/null")?;
    let dirty = private_dirty(gantry.pid(), 256 << 20)?;
    row(
        "private dirty memory without RAM, 1 vCPU, 1 disk (KiB)",
        dirty.to_string(),
    );
    Ok(())
}

/// Copies the data of a sparse file in large pieces, for comparison.
fn copy_data(from: &Path, to: &Path) -> Result<()> {
    let (from, to) = (fs::File::open(from)?, fs::File::create(to)?);
    let mut buffer = vec![0; 4 << 20];
    let seek = |offset, whence| {
        // SAFETY: a system call without pointers.
        let at = unsafe { libc::lseek(from.as_raw_fd(), offset, whence) };
        (at >= 0).then_some(at)
    };
    let mut end = 0;
    while let Some(start) = seek(end, libc::SEEK_DATA) {
        end = seek(start, libc::SEEK_HOLE).context("data without an end")?;
        let mut at = start.unsigned_abs();
        while at < end.unsigned_abs() {
            let len = buffer.len().min((end.unsigned_abs() - at) as usize);
            from.read_exact_at(&mut buffer[..len], at)?;
            to.write_all_at(&buffer[..len], at)?;
            at += len as u64;
        }
    }
    Ok(to.sync_all()?)
}

fn snapshots(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let dir = Path::new("/tmp/bench-snapshot");
    fs::create_dir_all(dir)?;
    let (mut gantry, mut guest) = Gantry::boot(dir, json!({"memory": {"size": 1 << 30}}))?;
    guest.run("dd if=/dev/urandom of=/tmp/fill bs=1M count=256 2>/dev/null")?;
    guest.run("(while true; do echo tick; sleep 0.01; done) & true")?;
    gantry.act("vm.pause")?;
    let url = format!("file://{}", dir.join("s").display());
    let start = Instant::now();
    gantry.put("vm.snapshot", json!({"destination_url": url}))?;
    let seconds = start.elapsed().as_secs_f64();
    let file = dir.join("s/memory-ranges");
    let written = fs::metadata(&file)?.blocks() * 512;
    row(
        &format!(
            "snapshot of 1 GiB, {} MiB of it not zero (s)",
            written >> 20
        ),
        format!("{seconds:.2}"),
    );
    let start = Instant::now();
    let copy = dir.join("copy");
    copy_data(&file, &copy)?;
    row(
        "the same data copied from file to file (s)",
        format!("{:.2}", start.elapsed().as_secs_f64()),
    );
    fs::remove_file(copy)?;
    gantry.kill()?;
    for mode in ["Copy", "OnDemand"] {
        let mut answers = Vec::new();
        let mut outputs = Vec::new();
        for round in 0..RESTORES {
            let new = dir.join(format!("{mode}{round}"));
            fs::create_dir_all(&new)?;
            let gantry = Gantry::start(&new, &[])?;
            // Give the process time to finish its preparations and wait for requests.
            thread::sleep(Duration::from_millis(300));
            let start = Instant::now();
            let body = json!({"source_url": url, "memory_restore_mode": mode, "resume": true});
            gantry.put("vm.restore", body)?;
            answers.push(start.elapsed().as_secs_f64() * 1e3);
            Guest::connect(&dir.join("serial.sock"))?.wait_for("tick", BOOT)?;
            outputs.push(start.elapsed().as_secs_f64() * 1e3);
        }
        row(
            &format!("restore, {mode}: the guest runs (ms; median of {RESTORES})"),
            format!("{:.0}", median(answers)),
        );
        row(
            &format!("restore, {mode}: first output of the guest (ms; median of {RESTORES})"),
            format!("{:.0}", median(outputs)),
        );
    }
    Ok(())
}

/// Number of restores measured in each mode.
const RESTORES: usize = 5;

/// Size of one TCP transfer in MiB.
const TRANSFER: usize = 40;
/// Number of transfers measured; the median counts.
const TRANSFERS: usize = 3;

/// TCP between guest and host over a tap, with and without offloads. Both cards belong to one guest
/// and take turns.
fn networks(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let dir = Path::new("/tmp/bench-net");
    fs::create_dir_all(dir)?;
    let card = |number: usize, offloads: bool| {
        json!({"ip": host_of(number), "mask": "255.255.255.0", "offload_tso": offloads,
            "offload_ufo": offloads, "offload_csum": offloads})
    };
    let cards = json!({"net": [card(0, true), card(1, false)]});
    let (_gantry, mut guest) = Gantry::boot(dir, cards)?;
    for number in 0..2 {
        guest.run(&format!(
            "ifconfig eth{number} 192.168.{}.2 netmask 255.255.255.0 up",
            80 + number
        ))?;
    }
    type Way = fn(&mut Guest, &TcpListener) -> Result<Duration>;
    let ways: [(&str, Way); 2] = [("guest to host", outwards), ("host to guest", inwards)];
    for (name, way) in ways {
        let mut rates = [Vec::new(), Vec::new()];
        for _ in 0..TRANSFERS {
            for (number, rates) in rates.iter_mut().enumerate() {
                let listener = TcpListener::bind((host_of(number).as_str(), 0))?;
                let took = way(&mut guest, &listener)?;
                rates.push(TRANSFER as f64 / took.as_secs_f64());
            }
        }
        let [with, without] = rates.map(median);
        row(
            &format!("TCP over tap, {name} (MiB/s; without offloads; ratio)"),
            format!("{with:.0}; {without:.0}; {:.1}", with / without),
        );
    }
    Ok(())
}

/// The host's address on the network of one of the guest's cards.
fn host_of(number: usize) -> String {
    format!("192.168.{}.1", 80 + number)
}

/// Time the host takes to receive what the guest sends.
fn outwards(guest: &mut Guest, listener: &TcpListener) -> Result<Duration> {
    let address = listener.local_addr()?;
    guest.send(&format!("agent tcp-send {address} {TRANSFER}"))?;
    let mut stream = listener.accept()?.0;
    let start = Instant::now();
    ensure!(drain(&mut stream)? == TRANSFER << 20, "bytes were lost");
    let took = start.elapsed();
    guest.wait_for(STATUS, COMMAND)?;
    Ok(took)
}

/// Time the guest takes to receive what the host sends.
fn inwards(guest: &mut Guest, listener: &TcpListener) -> Result<Duration> {
    let address = listener.local_addr()?;
    guest.send(&format!("agent tcp-receive {address}"))?;
    let mut stream = listener.accept()?.0;
    let start = Instant::now();
    fill(&mut stream, TRANSFER)?;
    stream.shutdown(Shutdown::Write)?;
    // The guest closes its end after it has read everything.
    drain(&mut stream)?;
    let took = start.elapsed();
    guest.wait_for(STATUS, COMMAND)?;
    Ok(took)
}

/// Number of reads in the shorter of two runs.
const READS: u32 = 500;

/// The cost for a guest of reading a block from an assigned NVMe disk under Gantry and under QEMU,
/// and from Gantry's own disk for comparison. The guest polls while it waits: otherwise, how often
/// it halts and sets timers would depend on how fast the disk happens to be.
fn passthrough(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let mut print = |what: &str, PerRead { exits, time }: PerRead| {
        row(
            &format!(
                "{what}, 4 KiB read: exits; for interrupts of the host; to the VMM; time (us)"
            ),
            format!(
                "{:.2}; {:.2}; {:.3}; {}",
                exits.all,
                exits.interrupts,
                exits.to_vmm,
                time.as_micros()
            ),
        );
    };
    let dir = Path::new("/tmp/bench-passthrough");
    fs::create_dir_all(dir)?;
    let disk = dir.join("disk.raw");
    fs::File::create(&disk)?.set_len(64 << 20)?;
    let nvme = HostDevice::take(NVME, 0)?;
    let cmdline = format!("{CMDLINE} idle=poll");
    let devices = json!({
        "memory": {"size": 512 << 20},
        "payload": {"cmdline": cmdline},
        "devices": [{"path": nvme.path}],
        "disks": [{"path": disk, "image_type": "Raw"}],
    });
    let (gantry, mut guest) = Gantry::boot(dir, devices)?;
    for (what, path) in [
        ("NVMe passed through by Gantry", "/dev/nvme0n1"),
        ("Gantry's virtio-blk", "/dev/vda"),
    ] {
        guest.eventually(&format!("ls {path}"), |text| text == path)?;
        print(what, per_read(&mut guest, gantry.pid(), path, READS)?);
    }
    drop((gantry, guest));
    let serial = dir.join("qemu.sock");
    let mut qemu = Command::new("/bin/qemu-system-x86_64")
        .args(["-L", "/firmware", "-machine", "q35", "-accel", "kvm"])
        .args(["-cpu", "host", "-smp", "1", "-m", "512", "-nodefaults"])
        .args(["-no-user-config", "-display", "none", "-no-reboot"])
        .arg("-serial")
        .arg(format!("unix:{},server=on,wait=off", serial.display()))
        .args(["-device", &format!("vfio-pci,host={}", nvme.address)])
        .args(["-kernel", BZIMAGE, "-initrd", INITRAMFS])
        .args(["-append", &cmdline])
        .stdin(Stdio::null())
        .spawn()
        .context("cannot start QEMU")?;
    let measured = (|| {
        let mut guest = Guest::connect(&serial)?;
        // A polling guest leaves the other threads, the firmware's and the loader's, little of L1's
        // only CPU.
        guest.wait_for(READY, 3 * BOOT)?;
        guest.eventually("ls /dev/nvme0n1", |text| text == "/dev/nvme0n1")?;
        per_read(&mut guest, qemu.id(), "/dev/nvme0n1", READS)
    })();
    qemu.kill()?;
    qemu.wait()?;
    print("NVMe passed through by QEMU", measured?);
    Ok(())
}
