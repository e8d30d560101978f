//! A PCI device seen from user space, whatever its driver.

use std::{
    fs,
    io::{Read, Seek, SeekFrom, Write},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

const CAPABILITIES: usize = 0x34;
const POWER_MANAGEMENT: u8 = 1;
const EXPRESS: u8 = 0x10;
/// Device Control in the PCI Express capability; its upper byte has the bit that starts a
/// function-level reset.
const DEVICE_CONTROL: u64 = 8;
const FUNCTION_RESET: u8 = 0x80;
/// The power state, in the power management control register.
const STATE: u8 = 3;

struct Function(PathBuf);

impl Function {
    fn config(&self) -> Result<fs::File> {
        let path = self.0.join("config");
        Ok(fs::File::options().read(true).write(true).open(path)?)
    }

    /// Offset of a capability.
    fn capability(&self, id: u8) -> Result<u64> {
        let mut header = [0; 256];
        self.config()?.read_exact(&mut header)?;
        let mut at = usize::from(header[CAPABILITIES]);
        while at != 0 && header[at] != id {
            at = usize::from(header[at + 1]);
        }
        ensure!(at != 0, "the device has no capability {id:#x}");
        Ok(at as u64)
    }

    fn set_power_state(&self, state: u8) -> Result<u8> {
        let control = self.capability(POWER_MANAGEMENT)? + 4;
        let mut config = self.config()?;
        config.seek(SeekFrom::Start(control))?;
        config.write_all(&[state, 0])?;
        config.seek(SeekFrom::Start(control))?;
        let mut now = [0];
        config.read_exact(&mut now)?;
        Ok(now[0] & STATE)
    }

    /// The first word of BAR 0.
    fn first_word(&self) -> Result<u32> {
        let file = fs::File::open(self.0.join("resource0"))?;
        // SAFETY: a new mapping of one page, at an address that the kernel picks.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        ensure!(page != libc::MAP_FAILED, "cannot map BAR 0");
        // SAFETY: within the mapping, aligned.
        let word = unsafe { page.cast::<u32>().read_volatile() };
        // SAFETY: mapped above, and not used any more.
        unsafe { libc::munmap(page, 4096) };
        Ok(word)
    }
}

/// Puts the device at an address in sysfs into D3hot, reads its memory, and wakes it.
pub fn sleep(path: &str) -> Result<()> {
    let function = Function(Path::new(path).to_owned());
    fs::write(function.0.join("enable"), "1").context("cannot enable the device")?;
    let awake = function.first_word()?;
    ensure!(function.set_power_state(3)? == 3, "it does not sleep");
    function.first_word()?;
    ensure!(function.set_power_state(0)? == 0, "it does not wake up");
    let word = function.first_word()?;
    ensure!(word == awake, "{word:#x} after sleep, {awake:#x} before");
    println!("slept well");
    Ok(())
}

/// Resets the device at an address in sysfs (PCI Express 6.6.2), and prints how long the write that
/// requests the reset took. The reset continues after the write; until it ends, the device does not
/// answer.
pub fn reset(path: &str) -> Result<()> {
    let function = Function(Path::new(path).to_owned());
    let control = function.capability(EXPRESS)? + DEVICE_CONTROL + 1;
    let mut config = function.config()?;
    let id = || -> Result<u32> {
        let mut id = [0; 4];
        let mut config = function.config()?;
        config.read_exact(&mut id)?;
        Ok(u32::from_le_bytes(id))
    };
    let before = id()?;
    config.seek(SeekFrom::Start(control))?;
    let start = Instant::now();
    config.write_all(&[FUNCTION_RESET])?;
    let written = start.elapsed();
    ensure!(
        id()? == u32::MAX,
        "the device was reset while it was written to, which took {written:?}"
    );
    while id()? == u32::MAX {
        ensure!(start.elapsed().as_secs() < 20, "the reset does not end");
        thread::sleep(Duration::from_millis(1));
    }
    ensure!(id()? == before, "it is another device: {:#x}", id()?);
    let taken = start.elapsed();
    println!("reset in {taken:?}, {written:?} of them for the write");
    Ok(())
}

/// Registers of the hot-plug controller (the DSDT has its address). Offsets in them: slots to
/// eject, segment, and the arguments of `_OST`.
const HOTPLUG: libc::off_t = 0xfe80_3000;
const DOWN: usize = 1;
const SEGMENT: usize = 3;
const EVENT: usize = 4;
const STATUS: usize = 5;
const SLOT: usize = 6;
const EJECT_REQUEST: u32 = 3;

/// Answers the next eject request in place of the guest's kernel, as `_OST` would: the device will
/// not be ejected. Keeps the kernel from running meanwhile.
pub fn refuse_eject(slot: u32, status: u32) -> Result<()> {
    const RUNTIME: &str = "/proc/sys/kernel/sched_rt_runtime_us";
    let memory = fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/mem")?;
    // SAFETY: a new mapping of one page, at an address that the kernel picks.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            memory.as_raw_fd(),
            HOTPLUG,
        )
    };
    ensure!(
        page != libc::MAP_FAILED,
        "cannot map the hot-plug controller"
    );
    let registers = page.cast::<u32>();
    // SAFETY: within the mapping, aligned.
    let read = |register: usize| unsafe { registers.add(register).read_volatile() };
    // SAFETY: as above.
    let write = |register: usize, value| unsafe { registers.add(register).write_volatile(value) };
    let usual = fs::read_to_string(RUNTIME)?;
    fs::write(RUNTIME, "-1")?;
    let highest = libc::sched_param { sched_priority: 99 };
    // SAFETY: the parameter outlives the call.
    ensure!(unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const highest) } == 0);
    write(SEGMENT, 0);
    // Printed to the console, whose driver needs only interrupts.
    println!("nothing else runs");
    let start = Instant::now();
    // Reading the register takes the request, so the kernel does not see it.
    while read(DOWN) & 1 << slot == 0 && start.elapsed() < Duration::from_secs(60) {}
    write(EVENT, EJECT_REQUEST);
    write(STATUS, status);
    write(SLOT, slot);
    let normal = libc::sched_param { sched_priority: 0 };
    // SAFETY: as above.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const normal) };
    fs::write(RUNTIME, usual)?;
    println!("refused");
    Ok(())
}
