//! A program for an NVIDIA GPU in L2, using nouveau's own system calls (`nouveau_drm.h`, and `nouveau_abi16.h` for the
//! older ones): a channel, push buffers, copies, semaphores, memory that the CPU accesses through BAR 1, and more
//! buffers than fit in the GPU's memory.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    os::fd::AsRawFd,
    path::Path,
    ptr::NonNull,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gf100::format::instruction::{Instruction, Operation, vector_add};

pub mod channels;

const NODE: &str = "/dev/dri/renderD128";

/// Memory domains: video memory, and system memory.
const VRAM: u32 = 2;
const GART: u32 = 4;
const MAPPABLE: u32 = 8;

/// Size of most buffers in bytes.
const BUFFER: u64 = 1 << 20;
/// Subchannels of the copy engine and of M2MF.
const COPY: u32 = 4;
const M2MF: u32 = 2;
const COPY_CLASS: u32 = 0x90b5;
const M2MF_CLASS: u32 = 0x9039;
const COMPUTE: u32 = 1;
const COMPUTE_CLASS: u32 = 0x90c0;

const READ_WRITE: u64 = 3;
const WRITE: u64 = 1;

const fn request(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | (b'd' as u64) << 8 | number
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Param {
    param: u64,
    value: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ChannelAlloc {
    vram_handle: u32,
    gart_handle: u32,
    channel: i32,
    domains: u32,
    notifier: u32,
    subchannels: [[u32; 2]; 8],
    count: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ObjectAlloc {
    channel: i32,
    handle: u32,
    class: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Info {
    handle: u32,
    domain: u32,
    size: u64,
    offset: u64,
    map_handle: u64,
    tile_mode: u32,
    tile_flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct New {
    info: Info,
    channel_hint: u32,
    align: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Used {
    private: u64,
    handle: u32,
    read: u32,
    write: u32,
    valid: u32,
    presumed_valid: u32,
    presumed_domain: u32,
    presumed_offset: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Push {
    buffer: u32,
    pad: u32,
    offset: u64,
    length: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PushBuffer {
    channel: u32,
    buffers_count: u32,
    buffers: u64,
    relocs_count: u32,
    pushes_count: u32,
    relocs: u64,
    pushes: u64,
    suffix: [u32; 2],
    vram_available: u64,
    gart_available: u64,
}

/// An open nouveau device.
struct Gpu {
    file: File,
}

impl Gpu {
    fn open() -> Result<Self> {
        let file = File::options().read(true).write(true).open(NODE);
        let file = file.with_context(|| format!("cannot open {NODE}: is nouveau there?"))?;
        Ok(Self { file })
    }

    fn ask<T>(&self, direction: u64, number: u64, data: &mut T) -> io::Result<()> {
        let request = request(direction, number, size_of::<T>());
        // SAFETY: the structure is the one for this request, and outlives the call; in each caller, so does what it
        // points to.
        let result = unsafe {
            libc::ioctl(
                self.file.as_raw_fd(),
                request as libc::Ioctl,
                std::ptr::from_mut(data),
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn param(&self, param: u64) -> Result<u64> {
        let mut data = Param { param, value: 0 };
        self.ask(READ_WRITE, 0x40, &mut data)
            .with_context(|| format!("nouveau does not tell parameter {param}"))?;
        Ok(data.value)
    }

    fn channel(&self) -> Result<i32> {
        let mut data = ChannelAlloc {
            vram_handle: 0xbeef_0201,
            gart_handle: 0xbeef_0202,
            ..Default::default()
        };
        self.ask(READ_WRITE, 0x42, &mut data)
            .context("nouveau makes no channel")?;
        Ok(data.channel)
    }

    fn free_channel(&self, channel: i32) -> Result<()> {
        let mut channel = channel;
        self.ask(WRITE, 0x43, &mut channel)
            .context("a channel cannot be freed")
    }

    fn object(&self, channel: i32, class: u32) -> Result<()> {
        let mut data = ObjectAlloc {
            channel,
            handle: class,
            class: class as i32,
        };
        self.ask(WRITE, 0x44, &mut data)
            .with_context(|| format!("nouveau makes no object of class {class:#x}"))
    }

    fn buffer(&self, domain: u32, size: u64) -> Result<Buffer<'_>> {
        let mut data = New::default();
        data.info.domain = domain;
        data.info.size = size;
        data.align = 0x1000;
        self.ask(READ_WRITE, 0x80, &mut data)
            .with_context(|| format!("no buffer of {size:#x} bytes in domain {domain}"))?;
        Ok(Buffer {
            gpu: self,
            info: data.info,
            domain: domain & (VRAM | GART),
        })
    }

    /// Submits words of a buffer. They use other buffers as well.
    fn submit(&self, channel: i32, push: &Mapped, words: &[u32], all: &[&Buffer]) -> Result<()> {
        push.write(0, words);
        let mut used: Vec<_> = all
            .iter()
            .map(|buffer| Used {
                handle: buffer.info.handle,
                read: buffer.domain,
                write: buffer.domain,
                valid: buffer.domain,
                presumed_valid: 1,
                presumed_domain: buffer.domain,
                presumed_offset: buffer.info.offset,
                ..Default::default()
            })
            .collect();
        let mut pushes = [Push {
            length: words.len() as u64 * 4,
            ..Default::default()
        }];
        let mut data = PushBuffer {
            channel: channel as u32,
            buffers_count: used.len() as u32,
            buffers: used.as_mut_ptr() as u64,
            pushes_count: 1,
            pushes: pushes.as_mut_ptr() as u64,
            ..Default::default()
        };
        self.ask(READ_WRITE, 0x81, &mut data)
            .context("nouveau refuses a push buffer")
    }
}

/// A buffer, with an address in the program's GPU address space.
struct Buffer<'a> {
    gpu: &'a Gpu,
    info: Info,
    domain: u32,
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        let mut close = [self.info.handle, 0];
        // Otherwise, closing the file frees it.
        let _ = self.gpu.ask(WRITE, 0x09, &mut close);
    }
}

impl Buffer<'_> {
    fn map(&self) -> Result<Mapped> {
        let len = self.info.size as usize;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                self.gpu.file.as_raw_fd(),
                self.info.map_handle as libc::off_t,
            )
        };
        ensure!(address != libc::MAP_FAILED, io::Error::last_os_error());
        let address = NonNull::new(address.cast()).context("mapped at 0")?;
        Ok(Mapped { address, len })
    }

    /// Waits until the GPU no longer uses it.
    fn wait(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            // For writing, so also after readers.
            let mut data = [self.info.handle, 4];
            match self.gpu.ask(WRITE, 0x82, &mut data) {
                Ok(()) => return Ok(()),
                // The call itself waits for a while.
                Err(_) if Instant::now() < deadline => {}
                Err(error) => return Err(error).context("the GPU does not finish"),
            }
        }
    }

    fn is_busy(&self) -> bool {
        let mut data = [self.info.handle, 5];
        self.gpu.ask(WRITE, 0x82, &mut data).is_err()
    }
}

/// A buffer as the CPU accesses it.
struct Mapped {
    address: NonNull<u32>,
    len: usize,
}

impl Mapped {
    fn write(&self, first: usize, words: &[u32]) {
        assert!((first + words.len()) * 4 <= self.len, "within the buffer");
        for (index, word) in words.iter().enumerate() {
            // SAFETY: within the mapping, as checked above.
            unsafe {
                self.address
                    .as_ptr()
                    .add(first + index)
                    .write_volatile(*word)
            };
        }
    }

    fn read(&self, index: usize) -> u32 {
        assert!((index + 1) * 4 <= self.len, "within the buffer");
        // SAFETY: within the mapping, as checked above.
        unsafe { self.address.as_ptr().add(index).read_volatile() }
    }

    /// FNV-1a of its words.
    fn checksum(&self) -> u64 {
        self.checksum_of(0..self.len / 4)
    }

    fn checksum_of(&self, words: Range<usize>) -> u64 {
        words.fold(0xcbf2_9ce4_8422_2325, |sum: u64, index| {
            (sum ^ u64::from(self.read(index))).wrapping_mul(0x100_0000_01b3)
        })
    }

    fn fill(&self, seed: u32) {
        let mut word = seed | 1;
        for index in 0..self.len / 4 {
            word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            self.write(index, &[word]);
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and not used after this.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

fn header(subchannel: u32, method: u32, count: usize) -> u32 {
    1 << 29 | (count as u32) << 16 | subchannel << 13 | method >> 2
}

fn method(subchannel: u32, method: u32, words: &[u32]) -> Vec<u32> {
    let mut all = vec![header(subchannel, method, words.len())];
    all.extend(words);
    all
}

fn halves(address: u64) -> [u32; 2] {
    [(address >> 32) as u32, address as u32]
}

fn bind(subchannel: u32, class: u32) -> Vec<u32> {
    method(subchannel, 0, &[class])
}

/// Copies lines of 4 KiB from one buffer to another with the copy engine.
fn copy(from: &Buffer, to: &Buffer) -> Vec<u32> {
    let [s1, s0] = halves(from.info.offset);
    let [d1, d0] = halves(to.info.offset);
    let lines = (from.info.size.min(to.info.size) / 4096) as u32;
    let mut words = method(COPY, 0x30c, &[s1, s0, d1, d0, 4096, 4096, 4096, lines]);
    words.extend(method(COPY, 0x300, &[0x110]));
    words
}

/// The channel's semaphore: releases a word (2), or waits until it has at least that value (4).
fn semaphore(buffer: &Buffer, word: u32, operation: u32) -> Vec<u32> {
    let [high, low] = halves(buffer.info.offset);
    method(0, 0x10, &[high, low, word, operation | 1 << 24])
}

/// Waits until a file exists.
fn wait_for(file: &str) {
    while !Path::new(file).exists() {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Lists the devices, as libdrm's `drmdevice` does, from the same files.
pub fn list() -> Result<()> {
    for node in fs::read_dir("/dev/dri").context("there is no /dev/dri")? {
        let name = node?.file_name();
        let name = name.to_string_lossy();
        let device = format!("/sys/class/drm/{name}/device");
        let Ok(place) = fs::read_link(&device) else {
            continue;
        };
        let read = |file: &str| fs::read_to_string(format!("{device}/{file}"));
        let driver = fs::read_link(format!("{device}/driver"))?;
        println!(
            "{name}: {} {}:{} {}",
            place.file_name().unwrap_or_default().display(),
            read("vendor")?.trim(),
            read("device")?.trim(),
            driver.file_name().unwrap_or_default().display(),
        );
    }
    let gpu = Gpu::open()?;
    println!(
        "chipset {:#x}, {} MiB of VRAM",
        gpu.param(11)?,
        gpu.param(8)? >> 20
    );
    Ok(())
}

/// Tests copies, semaphores and BAR 1.
pub fn check() -> Result<()> {
    let gpu = Gpu::open()?;
    ensure!(
        gpu.param(11)? == 0xc0,
        "this is chipset {:#x}",
        gpu.param(11)?
    );
    let channel = gpu.channel()?;
    gpu.object(channel, COPY_CLASS)?;
    let push = gpu.buffer(GART | MAPPABLE, 0x10000)?;
    let from = gpu.buffer(GART | MAPPABLE, BUFFER)?;
    let video = gpu.buffer(VRAM | MAPPABLE, BUFFER)?;
    let back = gpu.buffer(GART | MAPPABLE, BUFFER)?;
    let words = gpu.buffer(GART | MAPPABLE, 0x1000)?;
    let (pushed, source, result, word) = (push.map()?, from.map()?, back.map()?, words.map()?);
    let all = [&push, &from, &video, &back, &words];
    source.fill(1);
    result.fill(2);
    ensure!(
        source.checksum() != result.checksum(),
        "they differ at first"
    );

    let mut commands = bind(COPY, COPY_CLASS);
    commands.extend(copy(&from, &video));
    commands.extend(copy(&video, &back));
    commands.extend(semaphore(&words, 0x1234, 2));
    gpu.submit(channel, &pushed, &commands, &all)?;
    back.wait()?;
    let (sent, came) = (source.checksum(), result.checksum());
    ensure!(sent == came, "sent {sent:#x}, back came {came:#x}");
    ensure!(
        word.read(0) == 0x1234,
        "the semaphore is {:#x}",
        word.read(0)
    );
    println!("copies of {BUFFER:#x} bytes to VRAM and back: checksum {came:#x}");

    // The first page of video memory, through BAR 1.
    let screen = video.map()?;
    for index in 0..256 {
        ensure!(
            screen.read(index) == source.read(index),
            "BAR 1 shows otherwise"
        );
        screen.write(index, &[!source.read(index)]);
    }
    gpu.submit(channel, &pushed, &copy(&video, &back), &all)?;
    back.wait()?;
    for index in 0..512 {
        let expected = source.read(index) ^ if index < 256 { u32::MAX } else { 0 };
        ensure!(
            result.read(index) == expected,
            "word {index} through BAR 1 is wrong"
        );
    }
    println!("memory through BAR 1 is the memory that is copied");

    // The GPU waits for the CPU.
    word.write(0, &[0]);
    let mut commands = semaphore(&words, 7, 4);
    commands.extend(copy(&from, &back));
    gpu.submit(channel, &pushed, &commands, &all)?;
    std::thread::sleep(Duration::from_millis(100));
    ensure!(back.is_busy(), "the GPU did not wait");
    ensure!(result.checksum() != sent, "the GPU did not wait");
    word.write(0, &[9]);
    back.wait()?;
    if result.checksum() != sent {
        // The wait also ends if the channel does, and nouveau does not say so.
        gpu.submit(channel, &pushed, &bind(COPY, COPY_CLASS), &all)
            .context("the channel has ended")?;
        bail!("nothing was copied after the wait");
    }
    println!("the channel waited for its semaphore");
    println!("gpu works");
    Ok(())
}

/// Tests memory-to-memory copies by the graphics engine, including one with inline data from the push buffer.
pub fn m2mf() -> Result<()> {
    let gpu = Gpu::open()?;
    let channel = gpu.channel()?;
    gpu.object(channel, M2MF_CLASS)?;
    let push = gpu.buffer(GART | MAPPABLE, 0x10000)?;
    let from = gpu.buffer(GART | MAPPABLE, BUFFER)?;
    let video = gpu.buffer(VRAM, BUFFER)?;
    let back = gpu.buffer(GART | MAPPABLE, BUFFER)?;
    let (pushed, source, result) = (push.map()?, from.map()?, back.map()?);
    source.fill(3);
    let mut commands = bind(M2MF, M2MF_CLASS);
    let lines = (BUFFER / 4096) as u32;
    for (from, to) in [(&from, &video), (&video, &back)] {
        let [s1, s0] = halves(from.info.offset);
        let [d1, d0] = halves(to.info.offset);
        commands.extend(method(M2MF, 0x238, &[d1, d0]));
        commands.extend(method(M2MF, 0x30c, &[s1, s0, 4096, 4096, 4096, lines]));
        commands.extend(method(M2MF, 0x300, &[0x110]));
    }
    let [d1, d0] = halves(back.info.offset);
    commands.extend(method(M2MF, 0x238, &[d1, d0]));
    commands.extend(method(M2MF, 0x31c, &[8, 1]));
    commands.extend(method(M2MF, 0x300, &[0x101]));
    // Two words for the same register.
    commands.push(3 << 29 | 2 << 16 | M2MF << 13 | 0x304 >> 2);
    commands.extend([0xabcd, 0xef01]);
    gpu.submit(channel, &pushed, &commands, &[&push, &from, &video, &back])?;
    back.wait()?;
    ensure!(
        result.read(0) == 0xabcd && result.read(1) == 0xef01,
        "words of the push buffer did not arrive"
    );
    for index in 2..(BUFFER / 4) as usize {
        ensure!(
            result.read(index) == source.read(index),
            "word {index} is wrong"
        );
    }
    println!("m2mf works");
    Ok(())
}

/// Launches a kernel with this many threads.
fn launch(code: &Buffer, threads: u32) -> Vec<u32> {
    let mut words = method(COMPUTE, 0x1608, &halves(code.info.offset));
    // Blocks of 64 threads.
    words.extend(method(COMPUTE, 0x3ac, &[1 << 16 | 64, 1]));
    words.extend(method(COMPUTE, 0x3b4, &[0]));
    words.extend(method(COMPUTE, 0x238, &[1 << 16 | threads.div_ceil(64), 1]));
    words.extend(method(COMPUTE, 0x368, &[0x1000]));
    words
}

impl Mapped {
    fn write_code(&self, instructions: impl IntoIterator<Item = u64>) {
        for (index, instruction) in instructions.into_iter().enumerate() {
            self.write(index * 2, &[instruction as u32, (instruction >> 32) as u32]);
        }
    }
}

/// Compares a kernel that adds two vectors, one in system memory and one in video memory, with the CPU.
pub fn compute() -> Result<()> {
    const COUNT: u32 = 10_000;
    let gpu = Gpu::open()?;
    let channel = gpu.channel()?;
    gpu.object(channel, COMPUTE_CLASS)?;
    let push = gpu.buffer(GART | MAPPABLE, 0x10000)?;
    let code = gpu.buffer(GART | MAPPABLE, 0x1000)?;
    let constants = gpu.buffer(GART | MAPPABLE, 0x1000)?;
    let a = gpu.buffer(GART | MAPPABLE, 0x10000)?;
    let b = gpu.buffer(VRAM | MAPPABLE, 0x10000)?;
    let sum = gpu.buffer(GART | MAPPABLE, 0x10000)?;
    let (pushed, text) = (push.map()?, code.map()?);
    let (first, second, result) = (a.map()?, b.map()?, sum.map()?);
    text.write_code(vector_add());
    first.fill(11);
    second.fill(12);
    result.fill(13);
    let behind = result.read(COUNT as usize);
    let low_first = |buffer: &Buffer| {
        let [high, low] = halves(buffer.info.offset);
        [low, high]
    };
    let mut values = vec![0];
    for buffer in [&a, &b, &sum] {
        values.extend(low_first(buffer));
    }
    values.push(COUNT);
    let [high, low] = halves(constants.info.offset);
    let mut commands = bind(COMPUTE, COMPUTE_CLASS);
    for (address, words) in [
        (0x2380, &[0x100, high, low][..]),
        (0x1694, &[1]),
        (0x238c, &values),
    ] {
        commands.extend(method(COMPUTE, address, words));
    }
    commands.extend(launch(&code, COUNT));
    let all = [&push, &code, &constants, &a, &b, &sum];
    gpu.submit(channel, &pushed, &commands, &all)?;
    sum.wait()?;
    for index in 0..COUNT as usize {
        let expected = first.read(index).wrapping_add(second.read(index));
        ensure!(result.read(index) == expected, "word {index} is wrong");
    }
    ensure!(
        result.read(COUNT as usize) == behind,
        "written behind the end"
    );
    println!("{COUNT} sums are right");
    Ok(())
}

/// Makes this many small submissions, one system call each, and waits for the last one.
pub fn submits(count: u32) -> Result<()> {
    let gpu = Gpu::open()?;
    let channel = gpu.channel()?;
    gpu.object(channel, COPY_CLASS)?;
    let push = gpu.buffer(GART | MAPPABLE, 0x10000)?;
    let words = gpu.buffer(GART | MAPPABLE, 0x1000)?;
    let (pushed, word) = (push.map()?, words.map()?);
    for number in 1..=count {
        gpu.submit(
            channel,
            &pushed,
            &semaphore(&words, number, 2),
            &[&push, &words],
        )?;
        // The push buffer is about to be rewritten.
        let end = Instant::now() + Duration::from_secs(20);
        while word.read(0) != number {
            ensure!(Instant::now() < end, "submission {number} does not end");
            std::hint::spin_loop();
        }
    }
    println!("{count} submissions");
    Ok(())
}

/// Copies for this many seconds, in submissions of this many MiB each. The next ones are submitted before the previous
/// ones are done.
pub fn load(mebibytes: u32, seconds: u64) -> Result<()> {
    const DEPTH: usize = 4;
    let gpu = Gpu::open()?;
    let channel = gpu.channel()?;
    gpu.object(channel, COPY_CLASS)?;
    let from = gpu.buffer(VRAM, BUFFER)?;
    let to = gpu.buffer(VRAM, BUFFER)?;
    let pushes = (0..DEPTH)
        .map(|_| gpu.buffer(GART | MAPPABLE, 0x10000))
        .collect::<Result<Vec<_>>>()?;
    let mapped = pushes.iter().map(Buffer::map).collect::<Result<Vec<_>>>()?;
    let mut words = bind(COPY, COPY_CLASS);
    for _ in 0..mebibytes {
        words.extend(copy(&from, &to));
    }
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut count = 0;
    while Instant::now() < end {
        let (push, words_at) = (&pushes[count % DEPTH], &mapped[count % DEPTH]);
        push.wait()?;
        gpu.submit(channel, words_at, &words, &[push, &from, &to])?;
        count += 1;
    }
    for push in &pushes {
        push.wait()?;
    }
    println!("{count} submissions are done");
    Ok(())
}

/// Fills more buffers than fit in VRAM, and reads them again.
pub fn evict() -> Result<()> {
    let gpu = Gpu::open()?;
    let channel = gpu.channel()?;
    gpu.object(channel, COPY_CLASS)?;
    let size = 4 << 20;
    let count = (gpu.param(8)? / size + 3) as u32;
    let push = gpu.buffer(GART | MAPPABLE, 0x10000)?;
    let from = gpu.buffer(GART | MAPPABLE, size)?;
    let (pushed, shared) = (push.map()?, from.map()?);
    let mut buffers = Vec::new();
    gpu.submit(channel, &pushed, &bind(COPY, COPY_CLASS), &[&push])?;
    push.wait()?;
    for number in 0..count {
        let video = gpu.buffer(VRAM, size)?;
        shared.write(0, &[number; 16]);
        shared.write((size / 4) as usize - 1, &[!number]);
        gpu.submit(
            channel,
            &pushed,
            &copy(&from, &video),
            &[&push, &from, &video],
        )?;
        from.wait()?;
        buffers.push(video);
    }
    for (number, video) in buffers.iter().enumerate() {
        shared.write(0, &[u32::MAX; 16]);
        gpu.submit(
            channel,
            &pushed,
            &copy(video, &from),
            &[&push, &from, video],
        )?;
        from.wait()?;
        let seen = (shared.read(0), shared.read((size / 4) as usize - 1));
        let number = number as u32;
        ensure!(
            seen == (number, !number),
            "buffer {number} came back as {seen:x?}"
        );
    }
    println!("{count} buffers of {size:#x} bytes were kept");
    Ok(())
}

/// Does something that ends a channel, `fault`, `loop`, `kernel`, `wait` or `method`, and frees the channel: after a
/// while, or if `go` is given, once a file of that name exists.
pub fn misuse(what: &str, go: Option<&str>) -> Result<()> {
    let gpu = Gpu::open()?;
    let channel = gpu.channel()?;
    gpu.object(channel, COPY_CLASS)?;
    let push = gpu.buffer(GART | MAPPABLE, 0x10000)?;
    let code = gpu.buffer(GART | MAPPABLE, 0x1000)?;
    let pushed = push.map()?;
    let mut commands = bind(COPY, COPY_CLASS);
    commands.extend(match what {
        // An unmapped address.
        "fault" => {
            let copy = [0x77, 0, 0x77, 0x10_0000, 4096, 4096, 4096, 1];
            let mut words = method(COPY, 0x30c, &copy);
            words.extend(method(COPY, 0x300, &[0x110]));
            words
        }
        // Terabytes, from one page to itself.
        "loop" => {
            let [high, low] = halves(push.info.offset);
            let copy = [high, low, high, low, 0, 0, 0xffff, 0x1fff];
            let mut words = method(COPY, 0x30c, &copy);
            words.push(3 << 29 | 0x1fff << 16 | COPY << 13 | 0x300 >> 2);
            words.extend([0x110; 0x1fff]);
            words
        }
        // A jump to itself.
        "kernel" => {
            gpu.object(channel, COMPUTE_CLASS)?;
            let jump = Instruction::new(0, Operation::Branch(-8));
            code.map()?.write_code([jump.encode()]);
            let mut words = bind(COMPUTE, COMPUTE_CLASS);
            words.extend(launch(&code, 1));
            words
        }
        "wait" => semaphore(&push, 0xffff_fff0, 1),
        // Physical addresses.
        "method" => method(COPY, 0x250, &[1]),
        _ => bail!("fault, loop, kernel, method or wait, not {what}"),
    });
    gpu.submit(channel, &pushed, &commands, &[&push, &code])?;
    println!("{what} is submitted");
    match go {
        None => std::thread::sleep(Duration::from_millis(200)),
        Some(go) => wait_for(go),
    }
    gpu.free_channel(channel)?;
    println!("{what} is over");
    Ok(())
}
