//! Small VMs: a client's with one vCPU that runs code of `guest.s`, and a server's that never runs.

use std::{
    arch::global_asm,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    ptr::NonNull,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MEM_READONLY, Msrs, kvm_dtable, kvm_msr_entry, kvm_segment,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, Kvm, VcpuExit, VcpuFd, VmFd};
use vmfunc_gate::{
    host::{Client, ClientSettings, Gate, Pages, Server, ServerSettings},
    window::{self, PAGE},
};
use vmm_sys_util::eventfd::EventFd;

global_asm!(include_str!("round_trips.s"), include_str!("guest.s"));

macro_rules! code {
    ($($name:ident)*) => {
        mod symbols { unsafe extern "C" { pub static rig_client: u8; $(pub static $name: u8;)* } }
        $(
            /// The offset of this code from the start of the guests' code.
            pub fn $name() -> u64 {
                (&raw const symbols::$name as u64) - (&raw const symbols::rig_client as u64)
            }
        )*
    };
}
pub mod at {
    //! The addresses of the guests' code.
    code!(
        rig_call rig_many rig_transfer rig_timer rig_timer_kernel rig_timer_spin rig_kernel rig_tick rig_undefined
        rig_protection rig_page rig_wrong_index rig_wrong_entry rig_write_table
        rig_write_trampoline rig_false_resume rig_add rig_sum rig_handler_compute rig_read
        rig_write rig_spin rig_fail rig_hypercall rig_system_call rig_driver
        rig_server_end
    );

    /// The code of all guests.
    pub fn code() -> &'static [u8] {
        let length = rig_server_end() as usize;
        // SAFETY: the symbols enclose data that nothing writes.
        unsafe { std::slice::from_raw_parts(&raw const symbols::rig_client, length) }
    }
}

/// The address of the window in both guests.
pub const WINDOW: u64 = 0x40_0000_0000;
/// The number of pages of shared memory: 1 MiB and some more.
pub const SHARED_PAGES: u32 = 272;

/// Present, writable, for ring 3, accessed.
const ENTRY: u64 = 0x27;
const LARGE: u64 = 0x80;
/// For ring 3.
const USER: u64 = 4;
const LARGE_BYTES: u64 = 2 << 20;
const DIRTY: u64 = 0x40;

/// Memory of this process that belongs to a VM.
pub struct Memory {
    at: NonNull<u8>,
    bytes: usize,
    gpa: u64,
}

impl Memory {
    fn new(gpa: u64, bytes: usize) -> Result<Self> {
        // Aligned to a large page, of which it consists if the kernel has them.
        let spare = (LARGE_BYTES - PAGE) as usize;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes + spare,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        ensure!(at != libc::MAP_FAILED, "no memory");
        let before = at.align_offset(LARGE_BYTES as usize);
        // SAFETY: inside the mapping. The parts before and behind it are unmapped.
        let at = unsafe {
            let start = at.cast::<u8>().add(before);
            libc::munmap(at, before);
            libc::munmap(start.add(bytes).cast(), spare - before);
            libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE);
            start
        };
        let at = NonNull::new(at).context("no memory")?;
        Ok(Self { at, bytes, gpa })
    }

    /// The host address of a guest-physical address.
    pub fn host(&self, gpa: u64) -> *mut u8 {
        assert!(gpa >= self.gpa && gpa - self.gpa < self.bytes as u64);
        // SAFETY: inside the mapping, as was just checked.
        unsafe { self.at.as_ptr().add((gpa - self.gpa) as usize) }
    }

    pub fn write(&self, gpa: u64, value: u64) {
        // SAFETY: memory of the mapping, which is only accessed through raw pointers.
        unsafe { self.host(gpa).cast::<u64>().write_volatile(value) };
    }

    pub fn read(&self, gpa: u64) -> u64 {
        // SAFETY: as above.
        unsafe { self.host(gpa).cast::<u64>().read_volatile() }
    }

    fn copy(&self, gpa: u64, bytes: &[u8]) {
        assert!(gpa - self.gpa + bytes.len() as u64 <= self.bytes as u64);
        // SAFETY: as above; the whole range was checked.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host(gpa), bytes.len()) };
    }

    /// Maps the window, whose page tables are at `tables`.
    fn map_window(&self, pml4: u64, pdpt: u64, tables: u64, gpa: u64) {
        self.write(pml4, pdpt | ENTRY);
        self.write(pdpt + (WINDOW >> 30 & 511) * 8, tables | ENTRY);
        self.write(tables, (tables + PAGE) | ENTRY);
        for page in 0..512 {
            let entry = (gpa + page * PAGE) | ENTRY | DIRTY;
            self.write(tables + PAGE + page * 8, entry);
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; no VM uses it any more.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

/// Adds memory to a VM.
pub fn add_memory(
    vm: &VmFd,
    slot: u32,
    gpa: u64,
    memory: NonNull<[u8]>,
    readonly: bool,
) -> Result<()> {
    let region = kvm_userspace_memory_region {
        slot,
        flags: if readonly { KVM_MEM_READONLY } else { 0 },
        guest_phys_addr: gpa,
        memory_size: memory.len() as u64,
        userspace_addr: memory.cast::<u8>().as_ptr() as u64,
    };
    // SAFETY: mappings of this process that outlive the VM.
    unsafe { vm.set_user_memory_region(region) }.context("cannot add memory")
}

/// The place of a server's memory in the guest-physical address space, whose layout is the same in
/// all VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLayout {
    /// Where the client has none.
    Apart,
    /// The same, with 1 GiB.
    Large,
    /// Where the client has its own, including its page table. Ring 3 does not use that page.
    Same,
    /// The same, but ring 3 has that page mapped.
    Needed,
}

impl MemoryLayout {
    /// The memory's first address.
    pub fn gpa(self) -> u64 {
        match self {
            Self::Apart | Self::Large => 0x1000_0000,
            Self::Same | Self::Needed => 0,
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::Large => 1 << 30,
            _ => SERVER_BYTES,
        }
    }

    /// A page that the host discards, and one that holds a word.
    pub fn data(self) -> u64 {
        self.gpa() + 0x60_0000
    }

    /// A page that the host unmaps, and maps to something else. Nothing else is within 2 MiB of it.
    pub fn unmapped(self) -> u64 {
        self.gpa() + 0xc0_0000
    }

    /// The server's device registers.
    pub fn registers(self) -> u64 {
        self.data() + PAGE
    }

    fn code(self) -> u64 {
        self.gpa() + 0x20_0000
    }

    /// The server's page table.
    pub fn tables(self) -> u64 {
        self.gpa() + 0x40_0000
    }
}

/// The memory size of most servers in bytes.
pub const SERVER_BYTES: usize = 16 << 20;
/// A word of the server in the page where the client has its page table.
pub const HIDDEN: u64 = 0x0dd_ba11;
/// A virtual address of the server that is mapped to an address without memory.
pub const SERVER_HOLE: u64 = 0x6000_0000;
/// A virtual address of the server, mapped to its device's doorbell.
pub const SERVER_DOORBELL: u64 = 0x6020_0000;
const DOORBELL_GPA: u64 = 0xd000_0000;
const SERVER_WINDOW: u64 = 0x8000_0000;

/// The handlers, by index.
pub const ADD: u64 = 0;
pub const COMPUTE: u64 = 2;
pub const READ: u64 = 3;
pub const WRITE: u64 = 4;
pub const SPIN: u64 = 5;
pub const FAIL: u64 = 6;
pub const HYPERCALL: u64 = 7;
pub const SYSTEM_CALL: u64 = 8;
pub const DRIVER: u64 = 9;

/// A server's VM.
pub struct ServerVm {
    pub memory: Memory,
    doorbell: EventFd,
    pub server: Server,
    _vcpu: VcpuFd,
    _vm: VmFd,
}

impl ServerVm {
    /// Registers it as a file of the device.
    pub fn new(gate: Gate, place: MemoryLayout) -> Result<Self> {
        let vm = Kvm::new()?.create_vm()?;
        let memory = Memory::new(place.gpa(), place.bytes())?;
        add_memory(
            &vm,
            0,
            place.gpa(),
            NonNull::slice_from_raw_parts(memory.at, memory.bytes),
            false,
        )?;
        let vcpu = vm.create_vcpu(0)?;
        memory.copy(place.code(), at::code());
        let tables = place.tables();
        let (pml4, pdpt) = (tables, tables + PAGE);
        memory.map_window(pml4, pdpt, tables + 2 * PAGE, SERVER_WINDOW);
        // The first GiB: its memory, identity-mapped. The second: the hole.
        let directory = tables + 4 * PAGE;
        memory.write(pdpt, directory | ENTRY);
        for page in 0..SERVER_BYTES as u64 / LARGE_BYTES {
            let gpa = place.gpa() + page * LARGE_BYTES;
            let hidden = place == MemoryLayout::Same && gpa <= CLIENT_PML4;
            let entry = gpa | ENTRY | DIRTY | LARGE;
            let entry = if hidden { entry & !USER } else { entry };
            memory.write(directory + gpa / LARGE_BYTES * 8, entry);
        }
        let directory = tables + 5 * PAGE;
        memory.write(pdpt + 8, directory | ENTRY);
        memory.write(
            directory + (SERVER_HOLE / LARGE_BYTES % 512) * 8,
            0x7000_0000 | ENTRY | DIRTY | LARGE,
        );
        memory.write(
            directory + (SERVER_DOORBELL / LARGE_BYTES % 512) * 8,
            DOORBELL_GPA | ENTRY | DIRTY | LARGE,
        );
        let doorbell = EventFd::new(0)?;
        vm.register_ioevent(&doorbell, &IoEventAddress::Mmio(DOORBELL_GPA), 0x5a_u32)?;
        vm.register_ioevent(
            &doorbell,
            &IoEventAddress::Mmio(DOORBELL_GPA + 0x20),
            0x1122_3344_5566_7788_u64,
        )?;
        memory.write(place.data(), 0x5e7);
        memory.write(place.unmapped(), 0x5e8);
        if place.gpa() <= CLIENT_PML4 {
            memory.write(CLIENT_PML4, HIDDEN);
        }
        let handlers = [
            at::rig_add(),
            at::rig_sum(),
            at::rig_handler_compute(),
            at::rig_read(),
            at::rig_write(),
            at::rig_spin(),
            at::rig_fail(),
            at::rig_hypercall(),
            at::rig_system_call(),
            at::rig_driver(),
        ]
        .map(|offset| place.code() + offset);
        let settings = ServerSettings {
            cr3: pml4,
            fs_base: 0x1234_5000,
            gs_base: 0x1234_6000,
            pkru: 0,
            window: WINDOW,
            window_gpa: SERVER_WINDOW,
        };
        let server = gate.into_server(borrow(&vcpu), &handlers, &settings)?;
        Ok(Self {
            memory,
            doorbell,
            server,
            _vcpu: vcpu,
            _vm: vm,
        })
    }
}

impl ServerVm {
    /// A device: computes the factorial of its first register into the second one whenever its
    /// doorbell rings. Never returns.
    fn device(&self, registers: u64) -> Result<()> {
        loop {
            self.doorbell.read()?;
            let number = self.memory.read(registers);
            self.memory.write(registers + 8, (1..=number).product());
        }
    }

    /// Allows ring 3 to use the page where the client has its page table.
    pub fn expose(&self) {
        let entry = MemoryLayout::Same.tables() + 4 * PAGE;
        self.memory.write(entry, self.memory.read(entry) | USER);
    }
}

impl AsFd for ServerVm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.server.as_fd()
    }
}

/// The descriptor of a vCPU.
pub fn borrow(vcpu: &VcpuFd) -> BorrowedFd<'_> {
    // SAFETY: open for as long as the vCPU exists.
    unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) }
}

const CLIENT_BYTES: usize = 2 << 20;
/// The client's page table.
pub const CLIENT_PML4: u64 = PAGE;
const CLIENT_CODE: u64 = 0x1_0000;
const CLIENT_GDT: u64 = 0x8000;
const CLIENT_TSS: u64 = 0x8800;
const CLIENT_IDT: u64 = 0x9000;
const CLIENT_RESULTS: u64 = 0x4_0000;
/// The number of the client's timer ticks.
pub const CLIENT_TICKS: u64 = 0x4_1000;
/// The address of the kernels' data, which is their GS base.
pub const KERNEL_DATA: u64 = 0xffff_8000_1234_0000;
const CLIENT_WINDOW: u64 = 0x4000_0000;

const CLIENT: ClientSettings = ClientSettings {
    cr3: CLIENT_PML4,
    window: WINDOW,
    window_gpa: CLIENT_WINDOW,
    shared_pages: SHARED_PAGES,
    features: 0,
};

/// How a client's code starts.
#[derive(Clone, Copy)]
pub struct Start {
    /// The offset of the code.
    pub code: u64,
    /// Passed in RDI, RSI and RDX.
    pub arguments: [u64; 3],
    /// Whether interrupts are enabled.
    pub interrupts: bool,
    /// Whether it runs in ring 0.
    pub kernel: bool,
}

impl Start {
    /// Starts in ring 3 without interrupts: then even the emulated host gets none.
    pub fn new(code: u64, arguments: [u64; 3]) -> Self {
        Self {
            code,
            arguments,
            interrupts: false,
            kernel: false,
        }
    }

    /// Calls a handler.
    pub fn call(handler: u64, first: u64, second: u64) -> Self {
        Self::new(at::rig_call(), [handler, first, second])
    }

    /// Enables interrupts.
    pub fn interrupted(self) -> Self {
        Self {
            interrupts: true,
            ..self
        }
    }
}

/// A client's VM.
pub struct ClientVm {
    pub client: Arc<Client>,
    pub memory: Memory,
    pub vcpu: VcpuFd,
    window: [Pages; 3],
    vm: VmFd,
}

// SAFETY: the memory is accessed through raw pointers, and by one thread at a time.
unsafe impl Send for ClientVm {}

impl ClientVm {
    pub fn new() -> Result<Self> {
        let kvm = Kvm::new()?;
        let vm = kvm.create_vm()?;
        vm.create_irq_chip()?;
        let memory = Memory::new(0, CLIENT_BYTES)?;
        let all = NonNull::slice_from_raw_parts(memory.at, memory.bytes);
        add_memory(&vm, 0, 0, all, false)?;
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid2(&features(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?)?;
        // System calls of handlers enter the server's kernel.
        let entry = MemoryLayout::Apart.code() + at::rig_kernel();
        let registers = [
            (0xc000_0081, 0x10 << 48 | 8 << 32),
            (0xc000_0082, entry),
            (0xc000_0084, 0x700),
            (0xc000_0102, KERNEL_DATA),
        ]
        .map(|(index, data)| kvm_msr_entry {
            index,
            data,
            ..kvm_msr_entry::default()
        });
        let set = vcpu.set_msrs(&Msrs::from_entries(&registers)?)?;
        ensure!(set == registers.len(), "MSR {set} cannot be set");
        let client = Client::register(borrow(&vcpu), &CLIENT)?;
        let window = client.window()?;
        for (slot, pages) in (1..).zip(&window) {
            let gpa = CLIENT_WINDOW + pages.offset;
            add_memory(&vm, slot, gpa, pages.memory(), pages.readonly)?;
        }
        describe(&memory);
        Ok(Self {
            client: Arc::new(client),
            memory,
            vcpu,
            window,
            vm,
        })
    }

    /// Another vCPU of the VM that is a client, supports PCIDs, and does not run.
    pub fn sibling(&self) -> Result<(Client, VcpuFd)> {
        let vcpu = self.vm.create_vcpu(1)?;
        let mut cpuid = features(&Kvm::new()?.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
        for entry in cpuid.as_mut_slice() {
            if entry.function == 1 {
                entry.ecx |= 1 << 17;
            }
        }
        vcpu.set_cpuid2(&cpuid)?;
        Ok((Client::register(borrow(&vcpu), &CLIENT)?, vcpu))
    }

    /// The address of the window's shared memory in this process.
    pub fn shared(&self) -> *mut u64 {
        self.window[2].memory().cast().as_ptr()
    }

    /// Sets whether the trampoline considers the vCPU to be in the server.
    pub fn set_busy(&self, busy: bool) {
        let private = self.window[1].memory().cast::<window::Private>().as_ptr();
        // SAFETY: the client's page of the window, which stays mapped.
        unsafe { (&raw mut (*private).busy).write_volatile(u64::from(busy)) };
    }

    fn set(&mut self, start: &Start) -> Result<()> {
        let mut special = self.vcpu.get_sregs()?;
        let ring = if start.kernel { 0 } else { 3 };
        let (code, data) = if start.kernel {
            (8, 0x10)
        } else {
            (0x23, 0x1b)
        };
        special.cs = segment(code, 11, ring, true);
        special.ss = segment(data, 3, ring, false);
        (special.ds, special.es) = (special.ss, special.ss);
        special.tr = kvm_segment {
            base: CLIENT_TSS,
            limit: 0x67,
            selector: 0x28,
            type_: 11,
            present: 1,
            ..kvm_segment::default()
        };
        special.gdt = kvm_dtable {
            base: CLIENT_GDT,
            limit: 0x37,
            ..kvm_dtable::default()
        };
        special.idt = kvm_dtable {
            base: CLIENT_IDT,
            limit: 0xfff,
            ..kvm_dtable::default()
        };
        special.cr0 = 0x8001_0033;
        special.cr3 = CLIENT_PML4;
        // PAE, SSE, FSGSBASE.
        special.cr4 = 0x1_0620;
        special.efer = 0xd01;
        // The registers of the interrupt controller are MSRs.
        special.apic_base |= 0xc00;
        self.vcpu.set_sregs(&special)?;
        let mut registers = self.vcpu.get_regs()?;
        registers.rip = CLIENT_CODE + start.code;
        registers.rsp = if start.kernel { 0x2_8000 } else { 0x3_8000 };
        [registers.rdi, registers.rsi, registers.rdx] = start.arguments;
        registers.rflags = if start.interrupts { 0x202 } else { 2 };
        self.vcpu.set_regs(&registers)?;
        Ok(())
    }

    /// Runs code to its end. Returns its two results.
    pub fn run(&mut self, start: &Start) -> Result<(u64, u64)> {
        // An earlier run that was cut off is over.
        self.memory.write(CLIENT_TICKS, 0);
        self.set(start)?;
        self.go_on()
    }

    /// Makes the client's next timer interrupt stop the run.
    pub fn stop_at_tick(&self) {
        self.memory.write(CLIENT_TICKS + 8, 1);
    }

    /// Runs until the next stop or the end.
    pub fn go_on(&mut self) -> Result<(u64, u64)> {
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::MmioWrite(0xd010_0000, _)) => break,
                Ok(VcpuExit::Intr) => {}
                Ok(other) => {
                    let what = format!("{other:?}");
                    let registers = self.vcpu.get_regs()?;
                    bail!("the client's VM ended with {what} at {:#x}", registers.rip)
                }
                Err(error) if error.errno() == libc::EINTR => {}
                Err(error) => return Err(error).context("KVM_RUN"),
            }
        }
        Ok((
            self.memory.read(CLIENT_RESULTS),
            self.memory.read(CLIENT_RESULTS + 8),
        ))
    }
}

/// The CPU features of guests: no VMX, x2APIC, and no PCIDs, since a server's kernel must not run
/// with PCIDs on a client's vCPU.
pub fn features(cpuid: &CpuId) -> Result<CpuId> {
    let mut entries = cpuid.as_slice().to_vec();
    for entry in &mut entries {
        match entry.function {
            1 => entry.ecx = entry.ecx & !(1 << 5 | 1 << 17) | 1 << 21,
            // INVPCID.
            7 if entry.index == 0 => entry.ebx &= !(1 << 10),
            _ => {}
        }
    }
    CpuId::from_entries(&entries)
        .ok()
        .context("too many entries")
}

fn segment(selector: u16, type_: u8, ring: u8, code: bool) -> kvm_segment {
    kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: ring,
        s: 1,
        l: u8::from(code),
        db: u8::from(!code),
        g: 1,
        ..kvm_segment::default()
    }
}

/// Writes the client's page tables, descriptors and code.
fn describe(memory: &Memory) {
    memory.copy(CLIENT_CODE, at::code());
    memory.map_window(CLIENT_PML4, 2 * PAGE, 4 * PAGE, CLIENT_WINDOW);
    memory.write(2 * PAGE, (3 * PAGE) | ENTRY);
    // The first 2 MiB identity-mapped; at 4 MiB a device that does not exist.
    memory.write(3 * PAGE, ENTRY | DIRTY | LARGE);
    memory.write(3 * PAGE + 16, 0xd000_0000 | ENTRY | DIRTY | LARGE);
    for (index, entry) in [
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        // As required by SYSRET.
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
        // The task state segment.
        0x0000_8b00_0000_0067 | CLIENT_TSS << 16,
        0,
    ]
    .into_iter()
    .enumerate()
    {
        memory.write(CLIENT_GDT + index as u64 * 8, entry);
    }
    // The stack of ring 0.
    memory.copy(CLIENT_TSS + 4, &0x2_8000_u64.to_le_bytes());
    for (vector, code) in [
        (6, at::rig_undefined()),
        (13, at::rig_protection()),
        (14, at::rig_page()),
        (32, at::rig_tick()),
    ] {
        let code = CLIENT_CODE + code;
        let gate = code & 0xffff | 8 << 16 | 0x8e00 << 32 | (code >> 16 & 0xffff) << 48;
        memory.write(CLIENT_IDT + vector * 16, gate);
        memory.write(CLIENT_IDT + vector * 16 + 8, code >> 32);
    }
}

/// Another process, which is killed and waited for when dropped.
pub struct Process(libc::pid_t);

impl Process {
    /// Runs a function there, which reports once that it is ready. The process then sleeps.
    pub fn start(run: impl FnOnce(&dyn Fn()) -> Result<()>) -> Result<Self> {
        let mut ends = [0; 2];
        // SAFETY: fills in both ends.
        ensure!(unsafe { libc::pipe(ends.as_mut_ptr()) } == 0, "no pipe");
        // SAFETY: this program has only one thread at this time.
        let pid = unsafe { libc::fork() };
        ensure!(pid >= 0, "no process");
        let [read, write] = ends;
        if pid == 0 {
            let ready = || {
                // SAFETY: one byte of a literal.
                unsafe { libc::write(write, b"!".as_ptr().cast(), 1) };
            };
            if let Err(error) = run(&ready) {
                println!("another process: {error:#}");
                std::process::exit(1);
            }
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
        let mut byte = 0_u8;
        // SAFETY: closes this process's copy, and reads one byte, or until the other end is closed.
        let got = unsafe {
            libc::close(write);
            let got = libc::read(read, (&raw mut byte).cast(), 1);
            libc::close(read);
            got
        };
        let process = Self(pid);
        ensure!(got == 1, "another process ended at its start");
        Ok(process)
    }

    pub fn pid(&self) -> libc::pid_t {
        self.0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SAFETY: a child of this process that was not waited for.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// A server in a process of its own.
pub struct OtherServer {
    process: Option<Process>,
    /// The server's file, which the other process has registered.
    pub gate: Gate,
}

impl OtherServer {
    /// A server whose memory is apart from the clients'.
    pub fn start() -> Result<Self> {
        Self::at(MemoryLayout::Apart)
    }

    /// On one signal, its process discards a page of its memory, and changes its contents. On
    /// another signal, it unmaps a page, and maps memory of its own there.
    pub fn at(place: MemoryLayout) -> Result<Self> {
        let gate = Gate::open()?;
        let theirs = gate.try_clone()?;
        let process = Process::start(move |ready| {
            let vm = ServerVm::new(theirs, place)?;
            // SAFETY: addresses that the signal handlers read.
            unsafe {
                DISCARDED = vm.memory.host(place.data());
                libc::signal(libc::SIGUSR1, discard as *const () as libc::sighandler_t);
                UNMAPPED = vm.memory.host(place.unmapped());
                libc::signal(libc::SIGUSR2, unmap as *const () as libc::sighandler_t);
            }
            ready();
            vm.device(place.registers())
        })?;
        Ok(Self {
            process: Some(process),
            gate,
        })
    }

    pub fn kill(&mut self) {
        self.process = None;
    }

    pub fn discard(&self) {
        self.signal(libc::SIGUSR1);
    }

    pub fn unmap(&self) {
        self.signal(libc::SIGUSR2);
    }

    fn signal(&self, number: libc::c_int) {
        if let Some(process) = &self.process {
            // SAFETY: a child of this process.
            unsafe { libc::kill(process.pid(), number) };
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl AsFd for OtherServer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.gate.as_fd()
    }
}

static mut DISCARDED: *mut u8 = std::ptr::null_mut();

/// What a balloon does: discards a page, and writes a new value to the page that replaces it.
extern "C" fn discard(_: libc::c_int) {
    // SAFETY: a page of the server's memory, which this process does not use otherwise.
    unsafe {
        libc::madvise(DISCARDED.cast(), PAGE as usize, libc::MADV_DONTNEED);
        DISCARDED.cast::<u64>().write_volatile(0xbeef);
    }
}

static mut UNMAPPED: *mut u8 = std::ptr::null_mut();

/// What happens when a VMM removes memory while its process continues: its heap is allocated there.
extern "C" fn unmap(_: libc::c_int) {
    // SAFETY: a page of the server's memory, which this process does not use otherwise.
    unsafe {
        libc::munmap(UNMAPPED.cast(), PAGE as usize);
        libc::mmap(
            UNMAPPED.cast(),
            PAGE as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        );
        UNMAPPED.cast::<u64>().write_volatile(0x5ec2e7);
    }
}

const _: () = assert!(window::SHARED / PAGE + SHARED_PAGES as u64 <= 512);
