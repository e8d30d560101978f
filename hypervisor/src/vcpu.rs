//! One virtual processor.

use std::{
    fmt,
    ptr::NonNull,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
};

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, Xsave, kvm_cpuid_entry2, kvm_fpu, kvm_lapic_state,
    kvm_msr_entry, kvm_regs, kvm_run, kvm_sregs, kvm_xsave,
};
use kvm_ioctls::{VcpuExit, VcpuFd};

use crate::{
    CpuNeeds, Error, Result, VcpuState, VcpuStats, emulation::Instruction, nested, state::IA32_TSC,
};

/// The MSR in which firmware enables VMX and locks that setting.
const IA32_FEATURE_CONTROL: u32 = 0x3a;

/// The signal that makes a vCPU leave the guest. Its handler does nothing.
fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN()
}

/// Handles the accesses that the kernel does not handle itself.
///
/// Called on the vCPU's thread while the guest waits. `data` has 1, 2, 4 or 8 bytes.
pub trait Exits {
    /// The guest reads from an I/O port.
    fn pio_read(&self, port: u16, data: &mut [u8]);
    /// The guest writes to an I/O port.
    fn pio_write(&self, port: u16, data: &[u8]);
    /// The guest reads from an address that is not backed by memory.
    fn mmio_read(&self, address: u64, data: &mut [u8]);
    /// The guest writes to an address that is not backed by memory.
    fn mmio_write(&self, address: u64, data: &[u8]);
}

/// Why [`Vcpu::run`] returned.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Exit {
    /// An access was handled; run again.
    Handled,
    /// A [`Kicker`] or a signal asked for attention.
    Interrupted,
    /// The guest reset itself (triple fault).
    Shutdown,
    /// The guest executed HLT and no in-kernel local APIC caught it.
    Halted,
    /// The guest asked for a debugger.
    Debug,
    /// The host has no memory behind a slot at the moment: its file is shorter than the mapping, its
    /// file system is full, or a device's mapping was taken away. The access was not made; running
    /// again repeats it.
    MemoryFault {
        /// The guest-physical address, from Linux 6.8 on.
        address: Option<u64>,
    },
}

/// A vCPU. One thread runs it; others interrupt it through a [`Kicker`].
#[derive(Debug)]
pub struct Vcpu {
    fd: VcpuFd,
    id: u8,
    run_page: NonNull<kvm_run>,
    kicker: Kicker,
    /// Size of the vector state beyond `kvm_xsave`, in words. KVM transfers no more than that.
    xsave_rest: usize,
}

// SAFETY: `run_page` points into the mapping that `fd` owns; it moves with it.
unsafe impl Send for Vcpu {}

impl Vcpu {
    /// `vector_state` is the VM's `KVM_CAP_XSAVE2`: the size of a vCPU's vector state in bytes.
    pub(crate) fn new(mut fd: VcpuFd, id: u8, vector_state: usize) -> Self {
        let run_page = NonNull::from(fd.get_kvm_run());
        let target = Target {
            run_page,
            thread: None,
        };
        Self {
            fd,
            id,
            run_page,
            kicker: Kicker(Arc::new(Mutex::new(Some(target)))),
            xsave_rest: vector_state
                .saturating_sub(size_of::<kvm_xsave>())
                .div_ceil(size_of::<u32>()),
        }
    }

    /// Number of the vCPU, from 0.
    pub fn id(&self) -> u8 {
        self.id
    }

    /// Opens KVM's counters of this vCPU, if this host's KVM has any.
    pub fn stats(&self) -> Option<VcpuStats> {
        VcpuStats::open(&self.fd).ok()
    }

    /// A handle that interrupts [`Vcpu::run`] from any thread.
    pub fn kicker(&self) -> Kicker {
        self.kicker.clone()
    }

    /// Binds the vCPU to the calling thread. A [`Kicker`] signals that thread.
    pub fn enter_thread(&self) {
        // SAFETY: gettid has no preconditions.
        let thread = unsafe { libc::gettid() };
        let mut target = self.kicker.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(target) = target.as_mut() {
            target.thread = Some(thread);
        }
        crate::current::set(&self.fd);
    }

    /// Runs the guest until an exit, and passes port and MMIO accesses to `exits`.
    ///
    /// Apart from the ioctl, this costs one branch on the exit reason and one call.
    pub fn run(&mut self, exits: &impl Exits) -> Result<Exit> {
        let run_page = self.run_page;
        let exit = match self.fd.run() {
            Ok(exit) => exit,
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                return Ok(Exit::Interrupted);
            }
            Err(error) if error.errno() == libc::EFAULT => {
                return Ok(Exit::MemoryFault { address: None });
            }
            Err(error) => return Err(Error::ioctl("run a vCPU")(error)),
        };
        match exit {
            VcpuExit::IoOut(port, data) => {
                let width = pio_width(run_page);
                for item in data.chunks(width) {
                    exits.pio_write(port, item);
                }
            }
            VcpuExit::IoIn(port, data) => {
                let width = pio_width(run_page);
                for item in data.chunks_mut(width) {
                    exits.pio_read(port, item);
                }
            }
            VcpuExit::MmioRead(address, data) => exits.mmio_read(address, data),
            VcpuExit::MmioWrite(address, data) => exits.mmio_write(address, data),
            VcpuExit::Intr => return Ok(Exit::Interrupted),
            VcpuExit::Shutdown => return Ok(Exit::Shutdown),
            VcpuExit::Hlt => return Ok(Exit::Halted),
            VcpuExit::Debug(_) => return Ok(Exit::Debug),
            VcpuExit::MemoryFault { gpa, .. } => {
                return Ok(Exit::MemoryFault { address: Some(gpa) });
            }
            VcpuExit::InternalError => {
                // SAFETY: the page is mapped as long as `self.fd` lives, and KVM filled in this
                // member of the union for this exit reason.
                let internal = unsafe { run_page.as_ref().__bindgen_anon_1.internal };
                let data = internal.data.get(..internal.ndata as usize);
                let data = data.unwrap_or_default();
                let reason = match Instruction::of_error(internal.suberror, data) {
                    Some(instruction) => {
                        let address = self.regs().map_or(0, |regs| regs.rip);
                        format!("KVM cannot emulate the instruction at {address:#x}, {instruction}")
                    }
                    None => format!("KVM internal error {} (data {data:x?})", internal.suberror),
                };
                return Err(Error::Stopped {
                    vcpu: self.id,
                    reason,
                });
            }
            other => {
                let reason = format!("unexpected exit {other:?}");
                return Err(Error::Stopped {
                    vcpu: self.id,
                    reason,
                });
            }
        }
        Ok(Exit::Handled)
    }

    /// Lets KVM complete the last access that was handled, without running the guest. Required
    /// before the state is saved. If the access consists of several parts, `exits` handles all of
    /// them.
    pub fn complete_access(&mut self, exits: &impl Exits) -> Result<()> {
        loop {
            self.fd.set_kvm_immediate_exit(1);
            let exit = self.run(exits);
            self.fd.set_kvm_immediate_exit(0);
            if exit? != Exit::Handled {
                return Ok(());
            }
        }
    }

    /// Clears the request of a [`Kicker`]. Call it after handling an interruption.
    pub fn clear_kick(&mut self) {
        self.fd.set_kvm_immediate_exit(0);
    }

    /// Returns the CPUID leaves that the guest sees. Some KVM versions add host features to the
    /// leaves that were set.
    pub fn cpuid(&self) -> Result<Vec<kvm_cpuid_entry2>> {
        let cpuid = self
            .fd
            .get_cpuid2(KVM_MAX_CPUID_ENTRIES)
            .map_err(Error::ioctl("read a vCPU's CPUID"))?;
        Ok(filled(cpuid.as_slice()).to_vec())
    }

    /// Sets the CPUID leaves that the guest sees.
    pub fn set_cpuid(&self, entries: &[kvm_cpuid_entry2]) -> Result<()> {
        let cpuid = CpuId::from_entries(entries).map_err(|_| Error::Ioctl {
            action: "take so many CPUID leaves",
            source: std::io::Error::from_raw_os_error(libc::E2BIG),
        })?;
        self.fd
            .set_cpuid2(&cpuid)
            .map_err(Error::ioctl("set a vCPU's CPUID"))
    }

    /// Sets the general registers.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<()> {
        self.fd
            .set_regs(regs)
            .map_err(Error::ioctl("set a vCPU's registers"))
    }

    /// Reads the general registers.
    pub fn regs(&self) -> Result<kvm_regs> {
        self.fd
            .get_regs()
            .map_err(Error::ioctl("read a vCPU's registers"))
    }

    /// Sets the segment and control registers.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<()> {
        self.fd
            .set_sregs(sregs)
            .map_err(Error::ioctl("set a vCPU's control registers"))
    }

    /// Reads the segment and control registers.
    pub fn sregs(&self) -> Result<kvm_sregs> {
        self.fd
            .get_sregs()
            .map_err(Error::ioctl("read a vCPU's control registers"))
    }

    /// Sets the floating-point registers.
    pub fn set_fpu(&self, fpu: &kvm_fpu) -> Result<()> {
        self.fd
            .set_fpu(fpu)
            .map_err(Error::ioctl("set a vCPU's floating-point registers"))
    }

    /// Reads the local APIC.
    pub fn lapic(&self) -> Result<kvm_lapic_state> {
        self.fd
            .get_lapic()
            .map_err(Error::ioctl("read a vCPU's local APIC"))
    }

    /// Sets the local APIC.
    pub fn set_lapic(&self, lapic: &kvm_lapic_state) -> Result<()> {
        self.fd
            .set_lapic(lapic)
            .map_err(Error::ioctl("set a vCPU's local APIC"))
    }

    /// Sets model-specific registers. Fails at the first one that KVM rejects.
    pub fn set_msrs(&self, entries: &[kvm_msr_entry]) -> Result<()> {
        // KVM accepts at most KVM_MAX_MSR_ENTRIES per call.
        for chunk in entries.chunks(kvm_bindings::KVM_MAX_MSR_ENTRIES) {
            let msrs = Msrs::from_entries(chunk).map_err(|_| Error::Ioctl {
                action: "take so many MSRs",
                source: std::io::Error::from_raw_os_error(libc::E2BIG),
            })?;
            let done = self
                .fd
                .set_msrs(&msrs)
                .map_err(Error::ioctl("set a vCPU's MSRs"))?;
            if let Some(refused) = chunk.get(done) {
                return Err(Error::Msr {
                    index: refused.index,
                    value: refused.data,
                });
            }
        }
        Ok(())
    }

    /// Reads the registers in `indices`; those that the vCPU lacks are left out.
    fn msrs(&self, indices: &[u32]) -> Result<Vec<kvm_msr_entry>> {
        let mut entries = Vec::with_capacity(indices.len());
        let mut rest = indices;
        while !rest.is_empty() {
            let chunk = &rest[..rest.len().min(kvm_bindings::KVM_MAX_MSR_ENTRIES)];
            let wanted: Vec<_> = chunk
                .iter()
                .map(|&index| kvm_msr_entry {
                    index,
                    ..Default::default()
                })
                .collect();
            let mut msrs = Msrs::from_entries(&wanted).map_err(|_| Error::Ioctl {
                action: "read so many MSRs",
                source: std::io::Error::from_raw_os_error(libc::E2BIG),
            })?;
            let done = self
                .fd
                .get_msrs(&mut msrs)
                .map_err(Error::ioctl("read a vCPU's MSRs"))?;
            entries.extend_from_slice(&msrs.as_slice()[..done]);
            // KVM stops at the first register that this vCPU lacks; skip that one.
            rest = &rest[(done + 1).min(chunk.len()).max(done)..];
        }
        Ok(entries)
    }

    /// Injects a non-maskable interrupt.
    pub fn nmi(&self) -> Result<()> {
        self.fd.nmi().map_err(Error::ioctl("raise an NMI"))
    }

    /// Frequency of the guest's TSC in kHz.
    pub fn tsc_khz(&self) -> Result<u32> {
        self.fd
            .get_tsc_khz()
            .map_err(Error::ioctl("read a vCPU's TSC frequency"))
    }

    /// Tells a guest with a paravirtual clock that it was paused, so that its watchdogs do not
    /// mistake the gap for a lockup. Has no effect on guests without that clock.
    pub fn tell_paused(&self) {
        if let Err(error) = self.fd.kvmclock_ctrl() {
            log::debug!("vCPU {}: no paused flag set: {error}", self.id);
        }
    }

    /// Saves the vCPU's state; `msr_indices` are those of [`crate::Kvm::msr_indices`]. The vCPU
    /// must not be running, and its last access must be complete.
    pub fn save(&self, msr_indices: &[u32]) -> Result<VcpuState> {
        // The order matters: reading the run state first makes KVM deliver pending events.
        let mp_state = self
            .fd
            .get_mp_state()
            .map_err(Error::ioctl("read a vCPU's run state"))?;
        let regs = self.regs()?;
        let sregs = self.sregs()?;
        let (xsave, xsave_rest) = self.vector_state()?;
        let xcrs = self
            .fd
            .get_xcrs()
            .map_err(Error::ioctl("read a vCPU's XCRs"))?;
        let debug = self
            .fd
            .get_debug_regs()
            .map_err(Error::ioctl("read a vCPU's debug registers"))?;
        let lapic = self.lapic()?;
        let msrs = self.msrs(msr_indices)?;
        let events = self
            .fd
            .get_vcpu_events()
            .map_err(Error::ioctl("read a vCPU's pending events"))?;
        Ok(VcpuState {
            cpuid: self.cpuid()?,
            tsc_khz: self.tsc_khz().ok(),
            mp_state,
            regs,
            sregs,
            xsave,
            xsave_rest,
            xcrs,
            debug,
            lapic,
            msrs,
            events,
            nested: nested::save(&self.fd, self.id, &sregs)?,
        })
    }

    /// The vector state, and what of it does not fit into `kvm_xsave`.
    fn vector_state(&self) -> Result<(kvm_xsave, Vec<u32>)> {
        let failed = "read a vCPU's vector state";
        if self.xsave_rest == 0 {
            let xsave = self.fd.get_xsave().map_err(Error::ioctl(failed))?;
            return Ok((xsave, Vec::new()));
        }
        let mut whole = self.vector_buffer()?;
        // SAFETY: the buffer has the size that KVM gave for this VM. Nothing adds features to the
        // process afterwards: the kernel permits none once there is a vCPU.
        unsafe { self.fd.get_xsave2(&mut whole) }.map_err(Error::ioctl(failed))?;
        let xsave = kvm_xsave {
            region: whole.as_fam_struct_ref().xsave.region,
            ..Default::default()
        };
        // Nothing that the guest does not use: another host may have less room.
        Ok((xsave, without_zeroes(whole.as_slice()).to_vec()))
    }

    /// Sets a saved vector state, which is untrusted; KVM checks its content.
    fn set_vector_state(&self, state: &VcpuState) -> Result<()> {
        let rest = without_zeroes(&state.xsave_rest);
        let saved = rest.len();
        if saved > self.xsave_rest {
            let bytes = |words: usize| size_of::<kvm_xsave>() + words * size_of::<u32>();
            return Err(Error::VectorState {
                vcpu: self.id,
                saved: bytes(saved),
                here: bytes(self.xsave_rest),
            });
        }
        let set = if self.xsave_rest == 0 {
            // SAFETY: KVM reads no more than a `kvm_xsave`: this VM's vector state is no larger.
            unsafe { self.fd.set_xsave(&state.xsave) }
        } else {
            let mut whole = self.vector_buffer()?;
            whole.as_mut_slice()[..saved].copy_from_slice(rest);
            // SAFETY: the length stays as it is.
            unsafe { whole.as_mut_fam_struct() }.xsave.region = state.xsave.region;
            // SAFETY: the buffer has the size that KVM gave for this VM.
            unsafe { self.fd.set_xsave2(&whole) }
        };
        set.map_err(Error::ioctl("set a vCPU's vector state"))
    }

    /// A buffer for the whole vector state, of zeroes.
    fn vector_buffer(&self) -> Result<Xsave> {
        Xsave::new(self.xsave_rest).map_err(|_| {
            let source = kvm_ioctls::Error::new(libc::ENOMEM);
            Error::ioctl("hold a vCPU's vector state")(source)
        })
    }

    /// Returns what another host must support to run this vCPU; `msr_indices` as for
    /// [`Vcpu::save`].
    pub fn needs(&self, msr_indices: &[u32]) -> Result<CpuNeeds> {
        let msrs = self.msrs(msr_indices)?;
        Ok(CpuNeeds {
            cpuid: self.cpuid()?,
            msrs: msrs.iter().map(|msr| msr.index).collect(),
            tsc_khz: self.tsc_khz().ok(),
        })
    }

    /// Sets the time-stamp counter. If the value is 0, or is within one second of what this counter
    /// or the VM's other counters would be by now, KVM treats the write as an attempt to
    /// synchronize the counters, and makes them equal.
    pub fn set_tsc(&self, ticks: u64) -> Result<()> {
        self.set_msrs(&[kvm_msr_entry {
            index: IA32_TSC,
            data: ticks,
            ..Default::default()
        }])
    }

    /// Restores a saved state, before the first run.
    pub fn restore(&self, state: &VcpuState) -> Result<()> {
        self.set_cpuid(&state.cpuid)?;
        if let Some(khz) = state.tsc_khz
            && self.tsc_khz().ok() != Some(khz)
        {
            self.fd
                .set_tsc_khz(khz)
                .map_err(Error::ioctl("scale the TSC to the saved frequency"))?;
        }
        self.fd
            .set_mp_state(state.mp_state)
            .map_err(Error::ioctl("set a vCPU's run state"))?;
        self.set_regs(&state.regs)?;
        self.set_sregs(&state.sregs)?;
        if !state.nested.is_empty() {
            // KVM accepts no VMX state before the guest's feature-control MSR is locked, and no SVM
            // state before EFER.SVME, which is in `sregs`, is set.
            let lock = |msr: &&kvm_msr_entry| msr.index == IA32_FEATURE_CONTROL;
            if let Some(lock) = state.msrs.iter().find(lock) {
                self.set_msrs(std::slice::from_ref(lock))?;
            }
            nested::restore(&self.fd, self.id, &state.nested)?;
        }
        self.set_vector_state(state)?;
        self.fd
            .set_xcrs(&state.xcrs)
            .map_err(Error::ioctl("set a vCPU's XCRs"))?;
        self.fd
            .set_debug_regs(&state.debug)
            .map_err(Error::ioctl("set a vCPU's debug registers"))?;
        // The APIC before the MSRs: KVM accepts IA32_TSC_DEADLINE only in the right timer mode.
        self.set_lapic(&state.lapic)?;
        self.set_msrs(&state.msrs)?;
        self.fd
            .set_vcpu_events(&state.events)
            .map_err(Error::ioctl("set a vCPU's pending events"))
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        *self.kicker.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Width in bytes of each item of a port access. A string instruction transfers several items at
/// once.
fn pio_width(run_page: NonNull<kvm_run>) -> usize {
    // SAFETY: called while `run` borrows the `Vcpu` that owns the mapping, for an exit for which
    // KVM filled in this member of the union.
    let size = unsafe { run_page.as_ref().__bindgen_anon_1.io.size };
    usize::from(size).max(1)
}

struct Target {
    run_page: NonNull<kvm_run>,
    thread: Option<libc::pid_t>,
}

// SAFETY: the page is only accessed atomically, through `immediate_exit`, under the mutex that
// `Vcpu`'s drop takes before the page is unmapped.
unsafe impl Send for Target {}

/// Interrupts a vCPU, which may be running the guest.
#[derive(Clone)]
pub struct Kicker(Arc<Mutex<Option<Target>>>);

impl fmt::Debug for Kicker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kicker")
    }
}

impl Kicker {
    /// Makes the current or the next [`Vcpu::run`] return [`Exit::Interrupted`].
    ///
    /// The flag is set before the signal is sent. A thread that is about to enter the guest sees
    /// the flag; a thread that is in the guest gets the signal.
    pub fn kick(&self) {
        let target = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(target) = target.as_ref() else {
            return;
        };
        // SAFETY: the page is mapped while the target is present; KVM and the vCPU's thread
        // treat this byte as one that changes at any time.
        let flag =
            unsafe { AtomicU8::from_ptr(&raw mut (*target.run_page.as_ptr()).immediate_exit) };
        flag.store(1, Ordering::SeqCst);
        if let Some(thread) = target.thread {
            // SAFETY: a plain system call. The thread owns the `Vcpu`, which is alive, so the ID
            // has not been reused.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, kick_signal()) };
        }
    }
}

/// Installs the handler of the signal that a [`Kicker`] sends. Call it once, before any vCPU runs.
pub fn install_kick_handler() -> Result<()> {
    extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    vmm_sys_util::signal::register_signal_handler(kick_signal(), ignore)
        .map_err(Error::ioctl("have its threads signalled"))
}

/// The words up to the last one that is not zero.
fn without_zeroes(words: &[u32]) -> &[u32] {
    let last = words.iter().rposition(|word| *word != 0);
    &words[..last.map_or(0, |last| last + 1)]
}

/// The entries that KVM filled in. Kernels before 6.3 leave the requested number of entries
/// unchanged.
fn filled(entries: &[kvm_cpuid_entry2]) -> &[kvm_cpuid_entry2] {
    let last = entries
        .iter()
        .rposition(|entry| *entry != kvm_cpuid_entry2::default());
    &entries[..last.map_or(0, |last| last + 1)]
}
