//! A GPU without a driver: what root of a guest can do with its registers and BARs, by sysfs. Page
//! tables, instance blocks and rings are written as they should be, and then as they should not be.

use std::{
    cell::Cell,
    fs::{self, File},
    os::fd::AsRawFd,
    path::PathBuf,
    ptr::NonNull,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gf100::format::{
    Aperture, Gfn, LARGE, PAGE, Target, VramPage,
    directory::{Pde, Table},
    instance::{self, InstanceBlock, Space},
    pte::Pte,
    push::{GpEntry, Header, Run},
    ramfc::{self, Ramfc},
    userd::{self, Window},
};

use crate::edu;

mod attacks;
mod moves;

pub use attacks::attack;

/// Where things are in VRAM, by page.
const INSTANCE: u32 = 0x300;
const LIST: u32 = 0x301;
const RING: u32 = 0x302;
const BAR_DIRECTORY: u32 = 0x400;
const BAR_SMALL: u32 = 0x500;
const BAR_INSTANCE: u32 = 0x600;
const USERD: u32 = 0x700;
const SOURCE: u32 = 0x800;
const OLD: u32 = 0x801;
const NEW: u32 = 0x802;
const PUSH: u32 = 0x900;
const DIRECTORY: u32 = 0x1100;
const SMALL: u32 = 0x1200;
const LARGE_TABLE: u32 = 0x1300;
/// What the GPU finds of VRAM at [`VRAM_VA`], in pages.
const VISIBLE: u32 = 0x1000;

/// GPU addresses: VRAM's first pages, the page of RAM, a page for attacks, large pages.
const VRAM_VA: u64 = 0x10_0000;
const RAM_VA: u64 = 0x600_0000;
const SPARE_VA: u64 = 0x610_0000;
/// In the second entry of the directory.
const LARGE_VA: u64 = 1 << 27;

const CHANNEL: u32 = 5;
/// A channel that is not attacked, with tables of its own where the other sees none of VRAM.
const WITNESS: u32 = 3;
const WITNESS_DIRECTORY: u32 = 0x1500;
const WITNESS_SMALL: u32 = 0x1600;
const WITNESS_INSTANCE: u32 = 0x1700;
const WITNESS_RING: u32 = 0x1701;
const WITNESS_PUSH: u32 = 0x1702;
/// Where it writes in this process's page.
const WITNESSED: u64 = 0x800;
const RING_LOG2: u32 = 9;
const COPY: u8 = 4;
/// What the page is full of that copies come from.
const WORD: u32 = 0x5eed_5eed;
/// For one step, and for all of them: a machine may be busy with other things.
const PATIENCE: Duration = Duration::from_secs(20);
const ALL: Duration = Duration::from_secs(120);

/// A BAR, mapped for as long as this process lives.
#[derive(Clone, Copy)]
struct Bar {
    start: NonNull<u8>,
    len: usize,
}

impl Bar {
    fn open(device: &std::path::Path, index: u8) -> Result<Self> {
        let path = device.join(format!("resource{index}"));
        let file = File::options().read(true).write(true).open(&path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        let len = file.metadata()?.len() as usize;
        Self::map(&file, len, 0).with_context(|| format!("cannot map {}", path.display()))
    }

    fn map(file: &File, len: usize, offset: u64) -> Result<Self> {
        // SAFETY: a new mapping, never unmapped.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        ensure!(start != libc::MAP_FAILED, std::io::Error::last_os_error());
        let start = NonNull::new(start.cast()).context("mapped at 0")?;
        Ok(Self { start, len })
    }

    fn word(&self, at: u64) -> *mut u32 {
        let at = at as usize;
        assert!(at + 4 <= self.len && at.is_multiple_of(4), "{at:#x}");
        self.start.as_ptr().wrapping_add(at).cast()
    }

    fn set(&self, at: u64, value: u32) {
        // SAFETY: within the mapping and aligned, checked by `word`.
        unsafe { self.word(at).write_volatile(value) };
    }

    fn get(&self, at: u64) -> u32 {
        // SAFETY: within the mapping and aligned, checked by `word`.
        unsafe { self.word(at).read_volatile() }
    }
}

/// The GPU.
struct Raw {
    device: PathBuf,
    registers: Bar,
    bar1: Bar,
    put: u32,
    /// What the witness has written.
    witnessed: u32,
    /// What came of commands that are no others' business: faults, errors, and neither.
    outcomes: [u32; 3],
    /// What the window in BAR 0 shows, in MiB.
    shown: Cell<Option<u32>>,
    /// Pages of VRAM, and of RAM.
    vram: u32,
    ram: u32,
    /// A page of this process, and its number.
    page: *mut u8,
    gfn: u32,
    since: Instant,
}

fn run(subchannel: u8, address: u16, words: &[u32]) -> Vec<u32> {
    let header = Header::Increasing(Run {
        subchannel,
        address,
        count: words.len() as u16,
    });
    let mut all = vec![header.encode()];
    all.extend(words);
    all
}

fn release(to: u64, word: u32) -> Vec<u32> {
    run(0, 0x10, &[(to >> 32) as u32, to as u32, word, 1 << 24 | 2])
}

/// So many lines of a page from one address to another, over and over.
fn copies(from: u64, to: u64, lines: u32, times: usize) -> Vec<u32> {
    let mut words = run(COPY, 0, &[0x90b5]);
    let halves = |at: u64| [(at >> 32) as u32, at as u32];
    let [s1, s0] = halves(from);
    let [d1, d0] = halves(to);
    words.extend(run(
        COPY,
        0x30c,
        &[s1, s0, d1, d0, 0, 0, PAGE as u32, lines],
    ));
    let header = Header::Constant(Run {
        subchannel: COPY,
        address: 0x300,
        count: times as u16,
    });
    words.push(header.encode());
    words.extend(vec![0x110; times]);
    words
}

/// Pages of RAM, by the end of what the kernel calls so: it is given whole blocks, and keeps the end
/// of them for tables.
fn ram() -> Result<u32> {
    let map = fs::read_to_string("/proc/iomem")?;
    let ends = map.lines().filter_map(|line| {
        let range = line.trim().strip_suffix(" : System RAM")?;
        u64::from_str_radix(range.split_once('-')?.1, 16).ok()
    });
    let end = ends.max().context("no RAM in /proc/iomem")?;
    Ok(((end + 1).next_multiple_of(32 << 20) / PAGE) as u32)
}

impl Raw {
    fn open() -> Result<Self> {
        let mut found = None;
        for entry in fs::read_dir("/sys/bus/pci/devices")? {
            let device = entry?.path();
            if fs::read_to_string(device.join("vendor"))?.trim() == "0x10de" {
                found = Some(device);
            }
        }
        let device = found.context("there is no GPU")?;
        ensure!(!device.join("driver").exists(), "it has a driver");
        fs::write(device.join("enable"), "1")?;
        let (page, address) = edu::page()?;
        let registers = Bar::open(&device, 0)?;
        let raw = Self {
            bar1: Bar::open(&device, 1)?,
            vram: registers.get(0x11_020c) << 8,
            registers,
            put: 0,
            witnessed: 0,
            outcomes: [0; 3],
            shown: Cell::new(None),
            ram: ram()?,
            page,
            gfn: (address / PAGE) as u32,
            since: Instant::now(),
            device,
        };
        // Messages that nobody takes are masked.
        raw.set(0x00_0140, 0);
        Ok(raw)
    }

    fn set(&self, at: u32, value: u32) {
        self.registers.set(at.into(), value);
    }

    fn get(&self, at: u32) -> u32 {
        self.registers.get(at.into())
    }

    /// Through the window in BAR 0.
    fn window(&self, at: u64) -> u64 {
        let wanted = (at >> 20) as u32;
        if self.shown.replace(Some(wanted)) != Some(wanted) {
            self.set(0x00_1700, wanted << 4);
        }
        0x70_0000 + (at & 0xf_ffff)
    }

    fn poke(&self, at: u64, word: u32) {
        let at = self.window(at);
        self.registers.set(at, word);
    }

    fn peek(&self, at: u64) -> u32 {
        let at = self.window(at);
        self.registers.get(at)
    }

    fn poke64(&self, at: u64, word: u64) {
        self.poke(at, word as u32);
        self.poke(at + 4, (word >> 32) as u32);
    }

    fn poke_all(&self, page: u32, words: &[u8]) {
        let at = u64::from(page) * PAGE;
        for (at, word) in (at..).step_by(4).zip(words.chunks_exact(4)) {
            self.poke(at, u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        }
    }

    fn fill(&self, page: u32, word: u32) {
        for at in (0..PAGE).step_by(4) {
            self.poke(u64::from(page) * PAGE + at, word);
        }
    }

    /// Whether every word of a page is this one.
    fn is_all(&self, page: u32, word: u32) -> bool {
        (0..PAGE)
            .step_by(4)
            .all(|at| self.peek(u64::from(page) * PAGE + at) == word)
    }

    fn map(&self, table: u32, first: u64, targets: impl Iterator<Item = Target>) {
        for (index, target) in (first..).zip(targets) {
            let at = u64::from(table) * PAGE + index * 8;
            self.poke64(at, Pte::linear(target).encode());
        }
    }

    /// One entry of the table of small pages.
    fn map_one(&self, va: u64, target: Target) {
        self.map(SMALL, va / PAGE, std::iter::once(target));
    }

    fn space(&self, directory: u32, table: u32) -> Space {
        let at = |aperture, number| Table { aperture, number };
        let small = Pde {
            small: Some(at(Aperture::Vram, table)),
            ..Pde::default()
        };
        self.poke64(u64::from(directory) * PAGE, small.encode());
        Space {
            aperture: Aperture::Vram,
            number: directory,
            limit: (1 << 40) - 1,
        }
    }

    fn instance(&self, page: u32, space: Space) -> [u8; instance::BYTES] {
        let mut bytes = [0; instance::BYTES];
        let engines = Default::default();
        InstanceBlock { space, engines }.encode(&mut bytes);
        self.poke_all(page, &bytes);
        bytes
    }

    /// The instance block of a channel, whose ring is at an address of its own.
    fn seat(&self, number: u32, page: u32, space: Space, gp_base: u64) {
        let mut bytes = self.instance(page, space);
        let mut head = [0; ramfc::BYTES];
        Ramfc {
            userd: u64::from(USERD + number) * PAGE,
            signature: ramfc::SIGNATURE,
            gp_base,
            gp_log2: RING_LOG2,
            ..Ramfc::default()
        }
        .encode(&mut head);
        bytes[..ramfc::BYTES].copy_from_slice(&head);
        self.poke_all(page, &bytes);
    }

    /// Makes the witness.
    fn witness(&mut self) {
        let at = 0x00_3000 + WITNESS * 8;
        self.set(at + 4, 0x001f_0000);
        self.set(0x00_2634, WITNESS);
        self.set(at, 0);
        for page in
            (WITNESS_DIRECTORY..WITNESS_DIRECTORY + 16).chain(WITNESS_SMALL..WITNESS_SMALL + 64)
        {
            self.fill(page, 0);
        }
        let own = [WITNESS_RING, WITNESS_PUSH].map(|page| Target::Vram(VramPage(page)));
        let all = own.into_iter().chain([Target::Ram(Gfn(self.gfn))]);
        self.map(WITNESS_SMALL, VRAM_VA / PAGE, all);
        let space = self.space(WITNESS_DIRECTORY, WITNESS_SMALL);
        self.seat(WITNESS, WITNESS_INSTANCE, space, VRAM_VA);
        self.witnessed = 0;
        self.set(at, 0xc000_0000 | WITNESS_INSTANCE);
        self.set(at + 4, 0x001f_0001);
    }

    /// The GPU has come to all that was submitted before: it gives the witness, which is submitted to
    /// afterwards, two slices of its time, and comes to all channels in between.
    fn passed(&mut self) -> Result<()> {
        for _ in 0..2 {
            let nth = self.witnessed % (1 << RING_LOG2);
            let words = release(VRAM_VA + 2 * PAGE + WITNESSED, self.witnessed + 1);
            let offset = u64::from(nth % 64) * 64;
            let push = u64::from(WITNESS_PUSH) * PAGE + offset;
            for (at, word) in (push..).step_by(4).zip(&words) {
                self.poke(at, *word);
            }
            let entry = GpEntry {
                address: VRAM_VA + PAGE + offset,
                words: words.len() as u32,
            };
            let ring = u64::from(WITNESS_RING) * PAGE + u64::from(nth) * 8;
            self.poke64(ring, entry.encode());
            self.witnessed += 1;
            let put = self.witnessed % (1 << RING_LOG2);
            let at = u64::from(WITNESS) * userd::STRIDE + userd::GP_PUT;
            self.bar1.set(at, put);
            let word = self.page.wrapping_add(WITNESSED as usize);
            // SAFETY: within the page, which is this process's own and never unmapped.
            let word = || unsafe { word.cast::<u32>().read_volatile() };
            self.until("the witness", || word() == self.witnessed)?;
        }
        Ok(())
    }

    /// The same, and what has come of it is counted.
    fn carried_out(&mut self) -> Result<()> {
        self.passed()?;
        let outcome = match (self.get(0x00_259c), self.get(0x04_0108)) {
            (0, 0) => 2,
            (0, _) => 1,
            _ => 0,
        };
        self.outcomes[outcome] += 1;
        Ok(())
    }

    fn start(&mut self) -> Result<()> {
        // Whatever was there before.
        for page in (DIRECTORY..LARGE_TABLE + 2).chain(BAR_SMALL..BAR_SMALL + 64) {
            self.fill(page, 0);
        }
        for page in [BAR_DIRECTORY, OLD, NEW] {
            self.fill(page, 0);
        }
        let pages = |first: u32, count: u32| (first..first + count).map(VramPage).map(Target::Vram);
        self.map(SMALL, VRAM_VA / PAGE, pages(0, VISIBLE));
        self.map_one(RAM_VA, Target::Ram(Gfn(self.gfn)));
        let space = self.space(DIRECTORY, SMALL);
        let large = Pde {
            large: Some(Table {
                aperture: Aperture::Vram,
                number: LARGE_TABLE,
            }),
            ..Pde::default()
        };
        self.poke64(u64::from(DIRECTORY) * PAGE + 8, large.encode());
        self.seat(CHANNEL, INSTANCE, space, VRAM_VA + u64::from(RING) * PAGE);
        self.map(BAR_SMALL, 0, pages(USERD, 128));
        let space = self.space(BAR_DIRECTORY, BAR_SMALL);
        self.instance(BAR_INSTANCE, space);
        self.witness();
        self.show()?;
        self.channel();
        Ok(())
    }

    /// BAR 1 shows the channels' submission pages. Waits until it does, as nouveau does.
    fn show(&self) -> Result<()> {
        self.set(0x00_1704, 1 << 31 | BAR_INSTANCE);
        self.set(0x07_0000, 1);
        self.until("the end of a BAR's flush", || self.get(0x07_0000) & 2 == 0)?;
        self.set(0x00_2254, Window { start: 0 }.encode());
        Ok(())
    }

    /// Makes the channel, anew if there was one.
    fn channel(&mut self) {
        let at = 0x00_3000 + CHANNEL * 8;
        self.stop();
        self.poke(u64::from(INSTANCE) * PAGE, 0);
        self.poke(u64::from(INSTANCE) * PAGE + 0x14, 0);
        self.put = 0;
        self.set(at, 0xc000_0000 | INSTANCE);
        self.set(at + 4, 0x001f_0001);
        for (at, number) in (u64::from(LIST) * PAGE..)
            .step_by(8)
            .zip([WITNESS, CHANNEL])
        {
            self.poke64(at, u64::from(number) | 4 << 32);
        }
        self.set(0x00_2270, LIST);
        self.set(0x00_2274, 0x01f0_0002);
    }

    /// Nothing of the channel's runs when this returns.
    fn stop(&self) {
        let at = 0x00_3000 + CHANNEL * 8;
        self.set(at + 4, 0x001f_0000);
        self.set(0x00_2634, CHANNEL);
        self.set(at, 0);
        // All that the registers tell of it.
        for (at, bits) in [
            (0x00_259c, u32::MAX),
            (0x04_0108, u32::MAX),
            (0x00_25a8, u32::MAX),
            (0x00_2a00, u32::MAX),
            (0x00_2100, u32::MAX),
        ] {
            self.set(at, bits);
        }
    }

    /// Flushes, and waits until that is done, as nouveau does.
    fn flush(&self) -> Result<()> {
        self.set(0x10_0cb8, DIRECTORY << 4);
        self.set(0x10_0cbc, 1 << 31 | 1);
        let is_done = || self.get(0x10_0c80) & 0x8000 != 0;
        self.until("the end of a flush", is_done)
    }

    fn doorbell(&self, put: u32) {
        let at = u64::from(CHANNEL) * userd::STRIDE + userd::GP_PUT;
        self.bar1.set(at, put);
    }

    fn submit(&mut self, words: &[u32]) {
        // Each has a page and more of its own.
        let page = PUSH + self.put * 16;
        for (at, word) in (u64::from(page) * PAGE..).step_by(4).zip(words) {
            self.poke(at, *word);
        }
        let entry = GpEntry {
            address: VRAM_VA + u64::from(page) * PAGE,
            words: words.len() as u32,
        };
        let at = u64::from(RING) * PAGE + u64::from(self.put) * 8;
        self.poke64(at, entry.encode());
        self.put += 1;
        self.doorbell(self.put);
    }

    fn until(&self, what: &str, is: impl Fn() -> bool) -> Result<()> {
        let start = Instant::now();
        while !is() {
            ensure!(start.elapsed() < PATIENCE, "{what} does not come");
            ensure!(
                self.since.elapsed() < ALL,
                "all of it takes too long: {what}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn mine(&self) -> u32 {
        // SAFETY: the page is this process's own, and never unmapped.
        unsafe { self.page.cast::<u32>().read_volatile() }
    }

    /// A word gets to this process's page.
    fn works(&mut self, word: u32) -> Result<()> {
        self.submit(&release(RAM_VA, word));
        self.until("a semaphore", || self.mine() == word)
    }

    /// What is at an address cannot be written: the channel ends, and is made anew.
    fn faults(&mut self, what: &str, va: u64) -> Result<()> {
        self.flush()?;
        self.submit(&release(va, 0xbad));
        let faulted = self.until(what, || self.get(0x00_259c) != 0);
        faulted.with_context(|| format!("no fault: {what}"))?;
        let unit = self.get(0x00_259c).trailing_zeros();
        let low = self.get(0x00_2804 + unit * 16);
        ensure!(low == va as u32, "{what}: a fault at {low:#x}");
        self.channel();
        Ok(())
    }
}

/// Flushes as nouveau does them, so many: the registers of the requests and of the clock.
pub fn flushes(count: u32) -> Result<()> {
    let raw = Raw::open()?;
    let wait = |at: u32, bits: u32| {
        // The clock, until its high half stays.
        let now = || loop {
            let high = raw.get(0x00_9410);
            let low = raw.get(0x00_9400);
            if raw.get(0x00_9410) == high {
                return u64::from(high) << 32 | u64::from(low);
            }
        };
        let start = now();
        while raw.get(at) & bits == 0 {
            if now() - start > 2_000_000_000 {
                bail!("register {at:#x} stays");
            }
        }
        Ok(())
    };
    for _ in 0..count {
        wait(0x10_0c80, 0x00ff_0000)?;
        raw.set(0x10_0cb8, DIRECTORY << 4);
        raw.set(0x10_0cbc, 1 << 31 | 1);
        wait(0x10_0c80, 0x0000_8000)?;
    }
    println!("{count} flushes");
    Ok(())
}

/// Whether anything is in VRAM: what a guest finds there that has just got it.
pub fn blank() -> Result<()> {
    let raw = Raw::open()?;
    let all = u64::from(raw.vram) * PAGE;
    let found = (0..all).step_by(4).find(|at| raw.peek(*at) != 0);
    match found {
        Some(at) => println!("VRAM has {:#x} at {at:#x}", raw.peek(at)),
        None => println!("{} MiB of VRAM are blank", all >> 20),
    }
    Ok(())
}
