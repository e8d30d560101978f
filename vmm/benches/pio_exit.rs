//! Measures the overhead of Gantry's own code per port-I/O exit: a guest writes to a port in an
//! endless loop, once with a handler that does nothing and once through the machine's buses to a
//! device.

use std::{process::ExitCode, sync::Arc, time::Instant};

use devices::bus::BusDevice;
use hypervisor::{Exits, Kvm, MemorySlot, Vcpu, Vm};
use vmm_machine::buses::Buses;

const CODE: u64 = 0x1000;
const PORT: u64 = 0x80;
/// Number of exits per batch. Batches of both kinds alternate, and the fastest of each kind counts.
const EXITS: u32 = 20_000;
const BATCHES: usize = 15;

struct Nothing;

impl Exits for Nothing {
    fn pio_read(&self, _port: u16, _data: &mut [u8]) {}
    fn pio_write(&self, _port: u16, _data: &[u8]) {}
    fn mmio_read(&self, _address: u64, _data: &mut [u8]) {}
    fn mmio_write(&self, _address: u64, _data: &[u8]) {}
}

struct Sink;

impl BusDevice for Sink {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }
    fn write(&self, _offset: u64, data: &[u8]) {
        std::hint::black_box(data);
    }
}

fn guest() -> hypervisor::Result<(Vm, Vcpu)> {
    let vm = Kvm::open()?.create_vm(0xfffb_d000, 0xfffb_c000)?;
    // SAFETY: a fresh anonymous page that is never unmapped.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED);
    // out 0x80, al; jmp to it
    let code = [0xe6, PORT as u8, 0xeb, 0xfc];
    // SAFETY: the page is larger and not shared yet.
    unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), page.cast::<u8>(), code.len()) };
    let slot = MemorySlot {
        guest: CODE,
        len: 4096,
        host: page.cast(),
        read_only: false,
    };
    // SAFETY: as above.
    unsafe { vm.map(slot)? };
    let vcpu = vm.create_vcpu(0, 0)?;
    let mut sregs = vcpu.sregs()?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.regs()?;
    (regs.rip, regs.rflags) = (CODE, 2);
    vcpu.set_regs(&regs)?;
    Ok((vm, vcpu))
}

/// Nanoseconds per exit in one batch.
fn batch(vcpu: &mut Vcpu, exits: &impl Exits) -> hypervisor::Result<f64> {
    let start = Instant::now();
    for _ in 0..EXITS {
        vcpu.run(exits)?;
    }
    Ok(start.elapsed().as_nanos() as f64 / f64::from(EXITS))
}

fn measure() -> hypervisor::Result<(f64, f64)> {
    let (_vm, mut vcpu) = guest()?;
    let buses = Buses::default();
    // As many neighboring devices on the bus as a machine has.
    for port in [0x60, 0x70, PORT, 0xcf8, 0x3f8, 0x600, 0x608] {
        buses
            .pio
            .insert(port, 1, Arc::new(Sink))
            .unwrap_or_else(|error| panic!("{error}"));
    }
    let (mut empty, mut whole) = (f64::MAX, f64::MAX);
    for _ in 0..BATCHES {
        empty = empty.min(batch(&mut vcpu, &Nothing)?);
        whole = whole.min(batch(&mut vcpu, &buses)?);
    }
    Ok((empty, whole))
}

/// The same dispatch without the kernel in between, where microseconds of noise do not hide
/// nanoseconds.
fn dispatch() -> f64 {
    const CALLS: u32 = 2_000_000;
    let buses = Buses::default();
    for port in [0x60, 0x70, PORT, 0xcf8, 0x3f8, 0x600, 0x608] {
        buses
            .pio
            .insert(port, 1, Arc::new(Sink))
            .unwrap_or_else(|error| panic!("{error}"));
    }
    let start = Instant::now();
    for byte in 0..CALLS {
        buses.pio_write(std::hint::black_box(PORT as u16), &[byte as u8]);
    }
    start.elapsed().as_nanos() as f64 / f64::from(CALLS)
}

fn main() -> ExitCode {
    println!(
        "| dispatch of a port write to a device, without KVM (ns) | {:.1} |",
        dispatch()
    );
    match measure() {
        Ok((empty, whole)) => {
            println!("| port-I/O exit, empty handler (ns) | {empty:.0} |");
            println!(
                "| port-I/O exit, through the buses: more than that (ns) | {:.0} |",
                whole - empty
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("| port-I/O exit | not measured: {error} |");
            ExitCode::SUCCESS
        }
    }
}
