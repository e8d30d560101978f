//! Two Linux guests with one stock kernel: a process of the server registers handlers that make
//! system calls, a process of the client delegates to them. `guest` is what runs in both.
//!
//! The server's kernel works on the client's vCPU, and finds its own data there if both kernels
//! have the same virtual addresses for what the CPU leads them to: system calls, exceptions,
//! per-CPU data. Guests of one kernel, one size and without address randomization do. The page
//! table of the client's process must not hide memory of the server, which its kernel might need:
//! the server's RAM has a hole where much of the client's free memory is, and the client forks
//! until the page table of a child is there.

use std::{fs::File, io::Write, os::fd::AsFd, ptr::NonNull, thread, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use arch::{
    boot,
    layout::{AddressMap, EBDA_START, PVH_INFO_START, PVH_MEMMAP_START},
    msrs, registers,
};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry, kvm_pit_config};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmfunc_gate::host::{Client, ClientSettings, Gate, Pages, Server, ServerSettings};

use crate::{
    Check, checks,
    guest::{self, Call},
    vm,
};

const KERNEL: &str = "/linux/vmlinux";
const INITRAMFS: &str = "/linux/initramfs.cpio";
const COMMAND_LINE: &str = "earlyprintk=serial,0x3f8,115200,keep quiet nokaslr mitigations=off \
    noxsave acpi=off pci=off tsc=reliable no_timer_check cryptomgr.notests random.trust_cpu=on \
    initcall_blacklist=load_system_certificate_list,crypto_kdf108_init,trace_eval_init \
    panic=-1 reboot=t --";

const MIB: u64 = 1 << 20;
/// RAM of a client, and where that of a server ends.
const RAM: u64 = 256 * MIB;
/// What a server has no RAM for. The kernel is below.
const HOLE: (u64, u64) = (64 * MIB, 192 * MIB);

/// All checks.
pub fn all(check: Check<'_>) {
    if !check("the module loads", &mut checks::load) {
        return;
    }
    let mut server = None;
    let registered = check("a process of a Linux guest registers handlers", &mut || {
        let mut machine = Machine::new("server", &[(0, HOLE.0), (HOLE.1, RAM)])?;
        let registered = machine.serve()?;
        server = Some((machine, registered));
        Ok(())
    });
    let Some((mut machine, registered)) = server.filter(|_| registered) else {
        return;
    };
    // The guests' own checks are printed while they run.
    check("a process of a Linux guest delegates to them", &mut || {
        Machine::new("client", &[(0, RAM)])?.delegate(&machine, &registered)
    });
    drop(registered);
    check(
        "the server's guest goes on where it was stopped",
        &mut || match machine.run()? {
            (Call::Done, 0, _) => Ok(()),
            other => bail!("it said {other:x?}"),
        },
    );
}

/// A server's process, registered twice.
struct Servers {
    /// With the memory that its kernel knows.
    known: Server,
    /// And with memory in the hole.
    whole: Server,
}

struct Machine {
    name: &'static str,
    vm: VmFd,
    vcpu: VcpuFd,
    memory: GuestMemoryMmap<()>,
    /// Memory of a server that its kernel was not told of.
    _filling: Option<GuestMemoryMmap<()>>,
    line: String,
    /// The process that serves.
    pid: u32,
    /// What its next read of the port gets.
    answer: u32,
}

impl Machine {
    /// A guest with RAM in some ranges.
    fn new(name: &'static str, ram: &[(u64, u64)]) -> Result<Self> {
        let kvm = Kvm::new()?;
        let vm = kvm.create_vm()?;
        vm.set_identity_map_address(0xfeff_c000)?;
        vm.set_tss_address(0xfeff_d000)?;
        vm.create_irq_chip()?;
        vm.create_pit2(kvm_pit_config::default())?;
        let ranges: Vec<_> = ram
            .iter()
            .map(|&(start, end)| (GuestAddress(start), (end - start) as usize))
            .collect();
        let memory = GuestMemoryMmap::<()>::from_ranges(&ranges)?;
        add(&vm, 0, &memory)?;
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid2(&vm::features(
            &kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?,
        )?)?;

        let map = AddressMap::new(RAM, 0, 39, 1)?;
        let mut kernel = File::open(KERNEL).context(KERNEL)?;
        let mut initramfs = File::open(INITRAMFS).context(INITRAMFS)?;
        let command_line = format!("{COMMAND_LINE} {name}");
        let loaded = boot::load(
            &memory,
            &map,
            &mut kernel,
            Some(&mut initramfs),
            &command_line,
        )?;
        let entry = boot::write_boot_data(&memory, &map, &loaded, GuestAddress(0))?;
        describe(&memory, ram)?;
        vcpu.set_regs(&registers::regs(&entry))?;
        vcpu.set_sregs(&registers::sregs(vcpu.get_sregs()?, &entry))?;
        vcpu.set_fpu(&registers::fpu())?;
        vcpu.set_msrs(&Msrs::from_entries(&msrs::boot())?)?;
        let mut lapic = vcpu.get_lapic()?;
        registers::set_lint(&mut lapic);
        vcpu.set_lapic(&lapic)?;
        Ok(Self {
            name,
            vm,
            vcpu,
            memory,
            _filling: None,
            line: String::new(),
            pid: 0,
            answer: 0,
        })
    }

    /// Runs it until it calls; what, and two arguments.
    fn run(&mut self) -> Result<(Call, u64, u64)> {
        loop {
            let (port, value) = match self.vcpu.run() {
                Ok(VcpuExit::IoOut(port, data)) => (port, data.to_vec()),
                Ok(VcpuExit::IoIn(port, data)) => {
                    let answer = match port {
                        guest::PORT => self.answer,
                        // The serial port's transmitter is always empty.
                        0x3fd => 0x60,
                        0x3f8..=0x3ff => 0,
                        _ => u32::MAX,
                    };
                    for (to, from) in data.iter_mut().zip(answer.to_le_bytes()) {
                        *to = from;
                    }
                    continue;
                }
                Ok(VcpuExit::MmioRead(_, data)) => {
                    data.fill(0xff);
                    continue;
                }
                Ok(VcpuExit::MmioWrite(..) | VcpuExit::Intr) => continue,
                Ok(other) => {
                    let what = format!("{other:?}");
                    bail!(
                        "the {}'s VM ended with {what} at {:#x}",
                        self.name,
                        self.vcpu.get_regs()?.rip
                    )
                }
                Err(error) if error.errno() == libc::EINTR => continue,
                Err(error) => return Err(error).context("KVM_RUN"),
            };
            match (port, &value[..]) {
                (guest::PORT, &[call, ..]) => {
                    let registers = self.vcpu.get_regs()?;
                    let call = Call::of(call).context("a call that does not exist")?;
                    return Ok((call, registers.rdi, registers.rsi));
                }
                (guest::TEXT | 0x3f8, text) => self.print(text),
                _ => {}
            }
        }
    }

    /// Lines of the guest; its checks are this program's.
    fn print(&mut self, text: &[u8]) {
        for byte in text {
            if *byte != b'\n' {
                self.line.push(char::from(*byte));
                continue;
            }
            let line = std::mem::take(&mut self.line);
            if line.starts_with("check ") || line.starts_with("figure ") {
                println!("{}", line.trim_end());
            } else {
                println!("{}: {}", self.name, line.trim_end());
            }
            let _ = std::io::stdout().flush();
        }
    }

    /// Runs a server until its process registers handlers. It does not run afterwards.
    fn serve(&mut self) -> Result<Servers> {
        let (call, handlers, count) = self.run()?;
        ensure!(call == Call::Serve, "the server's process says {call:?}");
        let (pid, count) = (count >> 32, count & 0xffff_ffff);
        self.pid = pid as u32;
        ensure!(count <= 16, "{count} handlers");
        let handlers = (0..count)
            .map(|index| {
                let at = self.vcpu.translate_gva(handlers + index * 8)?;
                ensure!(at.valid != 0, "handlers that are not mapped");
                Ok(self.memory.read_obj(GuestAddress(at.physical_address))?)
            })
            .collect::<Result<Vec<u64>>>()?;
        let special = self.vcpu.get_sregs()?;
        let settings = ServerSettings {
            cr3: special.cr3 & !0xfff,
            fs_base: special.fs.base,
            gs_base: special.gs.base,
            pkru: 0,
            window: vm::WINDOW,
            window_gpa: guest::WINDOW_GPA,
        };
        let vcpu = vm::borrow(&self.vcpu);
        let known = Server::register(vcpu, &handlers, &settings)?;
        let hole = (GuestAddress(HOLE.0), (HOLE.1 - HOLE.0) as usize);
        let filling = GuestMemoryMmap::from_ranges(&[hole])?;
        add(&self.vm, 4, &filling)?;
        self._filling = Some(filling);
        Ok(Servers {
            known,
            whole: Server::register(vcpu, &handlers, &settings)?,
        })
    }

    /// Where the CPU leads a kernel to: system calls, per-CPU data, exceptions, segments, task.
    fn kernel(&self) -> Result<[u64; 5]> {
        const LSTAR: u32 = 0xc000_0082;
        const KERNEL_GS_BASE: u32 = 0xc000_0102;
        let mut found = Msrs::from_entries(&[LSTAR, KERNEL_GS_BASE].map(|index| kvm_msr_entry {
            index,
            ..kvm_msr_entry::default()
        }))?;
        ensure!(self.vcpu.get_msrs(&mut found)? == 2, "no LSTAR");
        let [system_call, data] = [0, 1].map(|at| found.as_slice()[at].data);
        let special = self.vcpu.get_sregs()?;
        let (exceptions, segments) = (special.idt.base, special.gdt.base);
        Ok([system_call, data, exceptions, segments, special.tr.base])
    }

    /// Runs a client to its end. Its processes come one after the other until one is paired.
    fn delegate(mut self, machine: &Self, servers: &Servers) -> Result<()> {
        let mut pair: Option<(Client, [Pages; 3])> = None;
        let mut tries = 0;
        loop {
            match self.run()? {
                (Call::Pair, ..) if pair.is_none() => {
                    let (ours, theirs) = (self.kernel()?, machine.kernel()?);
                    ensure!(ours == theirs, "kernels differ: {ours:x?}, {theirs:x?}");
                    tries += 1;
                    pair = self.pair(servers)?;
                    self.answer = if pair.is_some() { machine.pid } else { 0 };
                }
                (Call::Again, ..) => {
                    let (client, _) = pair.as_ref().context("no process could be paired")?;
                    client.unpair()?;
                    client.pair(servers.known.as_fd())?;
                    self.answer = machine.pid;
                }
                (Call::Done, failed, _) => {
                    let (client, _) = pair.as_ref().context("no process could be paired")?;
                    let status = client.status()?;
                    println!(
                        "figure processes of the client until one was paired: {tries}; \
                         delegations parked {}, resumed {}, ended {}",
                        status.parked, status.resumed, status.aborted
                    );
                    ensure!(failed == 0, "{failed} of its checks failed");
                    ensure!(status.parked == status.resumed, "{status:?}");
                    return Ok(());
                }
                (Call::Exits, ..) => {
                    let (client, _) = pair.as_ref().context("no process could be paired")?;
                    let status = client.status()?;
                    // Those that the host's own interrupts are not the reason of.
                    self.answer = (status.exits_inside - status.interrupts_inside) as u32;
                }
                other => bail!("the client said {other:x?}"),
            }
        }
    }

    /// Pairs the process that runs, if its page table hides nothing of the memory that the server's
    /// kernel knows; at first with the server that has memory there.
    fn pair(&self, servers: &Servers) -> Result<Option<(Client, [Pages; 3])>> {
        let settings = ClientSettings {
            cr3: self.vcpu.get_sregs()?.cr3,
            window: vm::WINDOW,
            window_gpa: guest::WINDOW_GPA,
            shared_pages: guest::SHARED_PAGES,
            features: 0,
        };
        // That of the process before goes away in the background.
        let gate = Gate::open()?;
        while gate.status()?.clients > 0 {
            thread::sleep(Duration::from_millis(5));
        }
        let client = Client::register(vm::borrow(&self.vcpu), &settings)?;
        let paired = client.pair(servers.known.as_fd());
        println!("client: CR3 {:#x}: {paired:?}", settings.cr3);
        if paired.is_err() || client.status()?.user_only != 0 {
            return Ok(None);
        }
        client.unpair()?;
        client.pair(servers.whole.as_fd())?;
        let status = client.status()?;
        ensure!(status.user_only == 1, "nothing is hidden: {status:?}");
        let window = client.window()?;
        for (slot, pages) in (8..).zip(&window) {
            let gpa = guest::WINDOW_GPA + pages.offset;
            vm::add_memory(&self.vm, slot, gpa, pages.memory(), pages.readonly)?;
        }
        Ok(Some((client, window)))
    }
}

/// Gives a VM memory, in slots from one on.
fn add(vm: &VmFd, first: u32, memory: &GuestMemoryMmap<()>) -> Result<()> {
    for (slot, region) in (first..).zip(memory.iter()) {
        let at = memory.get_host_address(region.start_addr())?;
        let bytes = NonNull::new(at).context("no memory")?;
        let bytes = NonNull::slice_from_raw_parts(bytes, region.len() as usize);
        vm::add_memory(vm, slot, region.start_addr().0, bytes, false)?;
    }
    Ok(())
}

/// A memory map of some ranges, besides the first MiB, for the guest that was told of one range.
fn describe(memory: &GuestMemoryMmap<()>, ram: &[(u64, u64)]) -> Result<()> {
    const RAM_TYPE: u64 = 1;
    /// Offset in `hvm_start_info`.
    const ENTRIES: u64 = 48;
    let mut entries = vec![(0, EBDA_START)];
    entries.extend(ram.iter().map(|&(start, end)| (start.max(MIB), end)));
    for (at, &(start, end)) in (PVH_MEMMAP_START..).step_by(24).zip(&entries) {
        for (offset, value) in [(0, start), (8, end - start), (16, RAM_TYPE)] {
            memory.write_obj(value, GuestAddress(at + offset))?;
        }
    }
    let count = entries.len() as u32;
    Ok(memory.write_obj(count, GuestAddress(PVH_INFO_START + ENTRIES))?)
}
