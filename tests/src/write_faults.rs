//! What it costs a guest that a page is armed, so that KVM logs the next write to it ([`DirtyLog`]). Measured by a
//! guest of a few bytes, whose loop writes to each of several pages.

use std::{sync::Arc, time::Instant};

use anyhow::{Context as _, Result, ensure};
use hypervisor::{DirtyLog, Exit, Exits, Kvm, MemorySlot, Vcpu, Vm, install_kick_handler};

/// Addresses of the guest's code and of the pages that it writes to.
const CODE: u64 = 0x1000;
const DATA: u64 = 0x1_0000;
/// As many pages as a real-mode segment has.
const PAGES: usize = 16;
const PAGE: usize = 4096;
/// How often all pages are written armed, alternating with unarmed.
const ROUNDS: usize = 201;

/// mov byte [di], 1; add di, 0x1000; loop back to the first; out 0x80, al
const PROGRAM: [u8; 11] = [
    0xc6, 0x05, 0x01, 0x81, 0xc7, 0x00, 0x10, 0xe2, 0xf7, 0xe6, 0x80,
];

/// No device is at the port.
struct Nothing;

impl Exits for Nothing {
    fn pio_read(&self, _port: u16, _data: &mut [u8]) {}
    fn pio_write(&self, _port: u16, _data: &[u8]) {}
    fn mmio_read(&self, _address: u64, _data: &mut [u8]) {}
    fn mmio_write(&self, _address: u64, _data: &[u8]) {}
}

/// Guest memory, which stays mapped for the life of the process. Only two pieces are ever made.
fn memory(vm: &Vm, guest: u64, pages: usize) -> Result<(hypervisor::SlotId, *mut u8)> {
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
    let host = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            pages * PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    ensure!(
        host != libc::MAP_FAILED,
        "no memory: {}",
        std::io::Error::last_os_error()
    );
    let host = host.cast();
    let slot = MemorySlot {
        guest,
        len: (pages * PAGE) as u64,
        host,
        read_only: false,
    };
    // SAFETY: it is never unmapped, and only the guest uses it once it contains code.
    Ok((unsafe { vm.map(slot) }?, host))
}

/// A guest that writes to [`PAGES`] pages on every run.
struct Writer {
    vcpu: Vcpu,
    log: DirtyLog,
}

impl Writer {
    fn new() -> Result<Self> {
        install_kick_handler()?;
        let vm = Arc::new(Kvm::open()?.create_vm(0xfffb_d000, 0xfffb_c000)?);
        let (_, code) = memory(&vm, CODE, 1)?;
        // SAFETY: the page is larger, and no guest runs yet.
        unsafe { code.copy_from_nonoverlapping(PROGRAM.as_ptr(), PROGRAM.len()) };
        let (slot, _) = memory(&vm, DATA, PAGES)?;
        let vcpu = vm.create_vcpu(0, 0)?;
        let mut sregs = vcpu.sregs()?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        (sregs.ds.base, sregs.ds.selector) = (DATA, (DATA >> 4) as u16);
        vcpu.set_sregs(&sregs)?;
        let log = vm.watch(slot)?;
        Ok(Self { vcpu, log })
    }

    /// Writes to all pages, and returns the time in microseconds.
    fn run(&mut self) -> Result<f64> {
        let mut regs = self.vcpu.regs()?;
        (regs.rip, regs.rflags) = (CODE, 2);
        (regs.rdi, regs.rcx) = (0, PAGES as u64);
        self.vcpu.set_regs(&regs)?;
        let start = Instant::now();
        let exit = self.vcpu.run(&Nothing)?;
        let took = start.elapsed().as_secs_f64() * 1e6;
        ensure!(exit == Exit::Handled, "the guest ends by {exit:?}");
        Ok(took)
    }

    fn arm(&self) -> Result<()> {
        Ok(self.log.arm(0, &mut [(1 << PAGES) - 1])?)
    }

    fn written(&self) -> Result<u64> {
        let words = self.log.read()?;
        Ok(words.iter().map(|word| u64::from(word.count_ones())).sum())
    }
}

/// The median time in microseconds that a write to an armed page takes longer than a write to an unarmed page.
///
/// # Errors
/// There is no KVM that keeps such a log.
pub fn cost() -> Result<f64> {
    let mut writer = Writer::new().context("cannot make a guest that writes")?;
    writer.run()?;
    let mut more = Vec::new();
    for _ in 0..ROUNDS {
        writer.arm()?;
        ensure!(writer.written()? == 0, "nothing is armed");
        let armed = writer.run()?;
        ensure!(writer.written()? == PAGES as u64, "a write is not logged");
        more.push((armed - writer.run()?) / PAGES as f64);
    }
    more.sort_by(f64::total_cmp);
    Ok(more[more.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_write_to_an_armed_page_is_logged_once() {
        if let Err(error) = Kvm::open() {
            return eprintln!("not tested: {error}");
        }
        // The cost depends on the host: a guest whose instructions KVM emulates takes no faults.
        assert!(cost().unwrap().is_finite());
    }
}
