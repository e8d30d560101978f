//! All vCPUs of a machine.

use std::{
    collections::BTreeMap,
    io, mem,
    sync::Arc,
    time::{Duration, Instant},
};

use arch::{boot::EntryPoint, cpuid::CpuidError, registers};
use devices::thread::ThreadSpawner;
use hypervisor::{CpuNeeds, Kvm, Vcpu, VcpuState, VcpuStats, Vm};
use kvm_bindings::{kvm_cpuid_entry2, kvm_regs, kvm_sregs};
use vmm_config::CoreScheduling;

use super::{
    core_scheduling,
    memory_faults::DeviceMemory,
    thread::{ReportCpuEvent, VcpuThread},
    throttle::Throttle,
};
use crate::buses::Buses;

/// How long to wait for vCPUs to end their accesses before the caller has to ask again later.
pub const ACCESS: Duration = Duration::from_millis(100);

/// The same for what is refused otherwise.
const LONG_ACCESS: Duration = Duration::from_secs(2);

/// A time-stamp counter value that is far from any guest's: KVM ignores a new value that is close to the vCPU's
/// previous one ([`Vcpu::set_tsc`]).
const NOBODYS_TSC: u64 = 1 << 62;

/// vCPUs could not be started, stopped or saved.
#[derive(Debug, thiserror::Error)]
pub enum CpusError {
    /// The CPUID leaves could not be computed.
    #[error("cannot make up the CPUID of vCPU {vcpu}")]
    Cpuid {
        /// The vCPU.
        vcpu: u32,
        /// Why.
        source: CpuidError,
    },
    /// A KVM operation failed.
    #[error("cannot set up vCPU {vcpu}")]
    Kvm {
        /// The vCPU.
        vcpu: u32,
        /// Why.
        source: hypervisor::Error,
    },
    /// The thread could not be started.
    #[error("cannot start the thread of vCPU {vcpu}")]
    Thread {
        /// The vCPU.
        vcpu: u32,
        /// Why.
        source: io::Error,
    },
    /// An access of the vCPU's to a device, or to memory, is not over.
    #[error(
        "vCPU {vcpu} waits for the host in an access to a device or to memory: the storage of a console's file, or of \
         memory that is restored on demand, may not answer"
    )]
    InAccess {
        /// The vCPU.
        vcpu: u32,
    },
    /// The vCPU's thread has ended or is running the guest.
    #[error("vCPU {vcpu} does not answer")]
    Unresponsive {
        /// The vCPU.
        vcpu: u32,
    },
    /// The snapshot has a vCPU that the machine cannot have.
    #[error("the snapshot has a vCPU {vcpu}, the machine has at most {max}")]
    TooMany {
        /// The vCPU.
        vcpu: u32,
        /// Maximum number of vCPUs of the machine.
        max: u32,
    },
    /// The saved guest has seen features that this host lacks.
    #[error("the snapshot's guest uses features that this host lacks: {missing}")]
    MissingFeatures {
        /// Names of the features.
        missing: String,
    },
}

/// A saved vCPU.
#[derive(serde::Serialize, serde::Deserialize)]
pub struct SavedCpu {
    /// Its number.
    pub vcpu: u32,
    /// Its state.
    pub state: VcpuState,
}

/// General and control registers.
pub type Registers = (kvm_regs, kvm_sregs);

/// Settings that all vCPUs share.
pub struct CpuSetup {
    /// CPUID leaves that KVM supports.
    pub supported_cpuid: Vec<kvm_cpuid_entry2>,
    /// The CPUID configuration of the guest.
    pub cpuid: arch::cpuid::Config,
    /// Host CPUs for each vCPU; a vCPU without an entry may run anywhere.
    pub affinity: BTreeMap<u32, Vec<usize>>,
    /// Which vCPUs may share physical cores.
    pub core_scheduling: CoreScheduling,
    /// Receives reports of vCPUs that cannot continue.
    pub report: ReportCpuEvent,
    /// Memory of devices that the guest sees.
    pub devices: Arc<dyn DeviceMemory>,
    /// Starts the threads.
    pub spawner: Arc<dyn ThreadSpawner>,
}

/// All vCPUs of a machine.
pub struct Cpus {
    vm: Arc<Vm>,
    buses: Arc<Buses>,
    setup: CpuSetup,
    msrs: Vec<u32>,
    running: bool,
    /// All are out of the guest, and know that it was paused.
    paused: bool,
    throttle: Option<Throttle>,
    threads: BTreeMap<u32, VcpuThread>,
    /// Created before the states that they will get have arrived.
    expected: BTreeMap<u32, VcpuThread>,
    /// Statistics of all vCPUs that were ever created.
    stats: BTreeMap<u32, VcpuStats>,
    /// Given up by the guest, and not yet out of an access.
    leaving: BTreeMap<u32, VcpuThread>,
    /// Have left since somebody asked ([`Cpus::left`]).
    left: Vec<u32>,
    /// Unplugged vCPUs: KVM cannot remove a vCPU from a VM, so they are kept for another plug.
    spares: BTreeMap<u32, Vcpu>,
}

impl Cpus {
    /// A machine without vCPUs.
    pub fn new(
        kvm: &Kvm,
        vm: Arc<Vm>,
        buses: Arc<Buses>,
        setup: CpuSetup,
    ) -> Result<Self, CpusError> {
        let msrs = kvm
            .msr_indices()
            .map_err(|source| CpusError::Kvm { vcpu: 0, source })?;
        core_scheduling::before_machine(setup.core_scheduling, &*setup.spawner)
            .map_err(|source| CpusError::Thread { vcpu: 0, source })?;
        Ok(Self {
            vm,
            buses,
            setup,
            msrs: arch::msrs::to_save(&msrs),
            running: false,
            paused: false,
            throttle: None,
            threads: BTreeMap::new(),
            expected: BTreeMap::new(),
            stats: BTreeMap::new(),
            leaving: BTreeMap::new(),
            left: Vec::new(),
            spares: BTreeMap::new(),
        })
    }

    /// Number of vCPUs.
    pub fn count(&self) -> u32 {
        // At most 255.
        self.threads.len() as u32
    }

    /// Maximum number of vCPUs.
    pub fn max(&self) -> u32 {
        self.setup.cpuid.topology.vcpus()
    }

    /// Whether there is a vCPU with this number.
    pub fn is_present(&self, vcpu: u32) -> bool {
        self.threads.contains_key(&vcpu)
    }

    /// Adds vCPUs 0 to `count` (exclusive) for a boot, paused; the first one starts at `entry`.
    pub fn boot(&mut self, count: u32, entry: &EntryPoint) -> Result<(), CpusError> {
        for index in 0..count {
            let vcpu = self.create(index)?;
            if index == 0 {
                let kvm = |source| CpusError::Kvm {
                    vcpu: index,
                    source,
                };
                let reset = vcpu.sregs().map_err(kvm)?;
                vcpu.set_sregs(&registers::sregs(reset, entry))
                    .map_err(kvm)?;
                vcpu.set_regs(&registers::regs(entry)).map_err(kvm)?;
            }
            self.start(index, vcpu)?;
        }
        Ok(())
    }

    /// Checks that a vCPU that is to be added is not still in an access after the guest has given it up.
    pub fn check_plug(&mut self, index: u32) -> Result<(), CpusError> {
        self.await_leaving(Instant::now());
        match self.leaving.contains_key(&index) {
            true => Err(CpusError::InAccess { vcpu: index }),
            false => Ok(()),
        }
    }

    /// Adds a vCPU that waits for the guest to start it.
    ///
    /// # Errors
    /// The guest has given it up, and it is still in an access, among others.
    pub fn plug(&mut self, index: u32) -> Result<(), CpusError> {
        self.check_plug(index)?;
        let vcpu = match self.spares.remove(&index) {
            Some(vcpu) => vcpu,
            None => self.create(index)?,
        };
        self.start(index, vcpu)?;
        if self.running
            && let Some(thread) = self.threads.get(&index)
        {
            thread.resume();
        }
        Ok(())
    }

    /// Removes a vCPU that the guest has given up. It leaves later if its access takes long ([`Cpus::left`]).
    pub fn unplug(&mut self, index: u32) {
        let Some(thread) = self.threads.remove(&index) else {
            return;
        };
        thread.request_stop();
        // Only once, if the guest gives up many.
        let patience = match self.leaving.is_empty() {
            true => ACCESS,
            false => Duration::ZERO,
        };
        self.leaves(index, thread, Instant::now() + patience);
    }

    /// The vCPUs that have left since the last call, and whether others are leaving.
    pub fn left(&mut self) -> (Vec<u32>, bool) {
        self.await_leaving(Instant::now());
        (mem::take(&mut self.left), !self.leaving.is_empty())
    }

    /// Takes back vCPUs that leave until then.
    fn await_leaving(&mut self, deadline: Instant) {
        for (index, thread) in mem::take(&mut self.leaving) {
            self.leaves(index, thread, deadline);
        }
    }

    fn leaves(&mut self, index: u32, thread: VcpuThread, deadline: Instant) {
        match thread.stopped_until(deadline) {
            Ok(vcpu) => {
                self.spares.extend(vcpu.map(|vcpu| (index, vcpu)));
                self.left.push(index);
            }
            Err(thread) => {
                self.leaving.insert(index, thread);
            }
        }
    }

    /// Lets all vCPUs run.
    pub fn resume(&mut self) {
        (self.running, self.paused) = (true, false);
        self.threads.values().for_each(VcpuThread::resume);
    }

    /// Waits until all vCPUs that were told to run have left their parking loop. This takes as long as the host needs
    /// to wake a thread.
    pub fn wait_running(&self) -> Result<(), CpusError> {
        /// A thread that is not woken by then never will be.
        const PATIENCE: Duration = Duration::from_secs(5);
        for (&vcpu, thread) in &self.threads {
            if !thread.wait_running(PATIENCE) {
                return Err(CpusError::Unresponsive { vcpu });
            }
        }
        Ok(())
    }

    /// Throttles all current vCPUs by this percentage of their time; 0 disables throttling.
    pub fn throttle(&mut self, percent: u8) -> io::Result<()> {
        match &self.throttle {
            _ if percent == 0 => self.throttle = None,
            Some(throttle) => throttle.set(percent),
            None => {
                let vcpus = self.threads.values().map(VcpuThread::napper).collect();
                let throttle = Throttle::start(percent, vcpus, &*self.setup.spawner)?;
                self.throttle = Some(throttle);
            }
        }
        Ok(())
    }

    /// Makes all vCPUs leave the guest, and tells the guest that it was paused.
    ///
    /// # Errors
    /// The access of one of them takes longer than `patience`. All leave when their accesses are over: to be repeated,
    /// or undone by [`Cpus::resume`].
    pub fn pause(&mut self, patience: Duration) -> Result<(), CpusError> {
        self.running = false;
        if self.paused {
            return Ok(());
        }
        let deadline = Instant::now() + patience;
        self.park(deadline)?;
        self.await_leaving(deadline);
        if let Some((&vcpu, _)) = self.leaving.first_key_value() {
            return Err(CpusError::InAccess { vcpu });
        }
        for thread in self.threads.values() {
            thread.with(|vcpu| vcpu.tell_paused());
        }
        self.paused = true;
        Ok(())
    }

    /// Makes the vCPUs that the guest has leave it.
    fn park(&self, deadline: Instant) -> Result<(), CpusError> {
        // All of them first, so that they leave at the same time.
        self.threads.values().for_each(VcpuThread::request_park);
        for (&vcpu, thread) in &self.threads {
            if !thread.wait_parked_until(deadline) {
                return Err(CpusError::InAccess { vcpu });
            }
        }
        Ok(())
    }

    /// Resumes vCPUs that a device has frozen, and tells the guest that it was paused. They are on their way out of the
    /// guest; others may be in an access that takes long.
    pub fn thaw(&self) {
        for thread in self.threads.values().filter(|thread| thread.is_frozen()) {
            thread.wait_parked();
            thread.with(|vcpu| vcpu.tell_paused());
            thread.thaw();
        }
    }

    /// Raises a non-maskable interrupt on every vCPU.
    pub fn nmi(&mut self) -> Result<(), CpusError> {
        let parked = self.park(Instant::now() + LONG_ACCESS);
        let result = parked.and_then(|()| self.for_each(|vcpu| vcpu.nmi()));
        if self.running {
            self.resume();
        }
        result.map(drop)
    }

    /// The states of all vCPUs, which must be paused.
    pub fn save(&self) -> Result<Vec<SavedCpu>, CpusError> {
        let msrs = Arc::new(self.msrs.clone());
        let states = self.for_each(move |vcpu| vcpu.save(&msrs))?;
        Ok(states
            .into_iter()
            .map(|(vcpu, state)| SavedCpu { vcpu, state })
            .collect())
    }

    /// The CPU requirements of these vCPUs on another host. If they run, one of them leaves the guest for a moment.
    pub fn needs(&self) -> Result<CpuNeeds, CpusError> {
        let Some((&vcpu, thread)) = self.threads.first_key_value() else {
            return Ok(CpuNeeds::default());
        };
        let msrs = self.msrs.clone();
        thread.request_park();
        let is_parked = thread.wait_parked_until(Instant::now() + LONG_ACCESS);
        let needs = thread.with(move |vcpu| vcpu.needs(&msrs));
        if self.running {
            thread.resume();
        }
        if !is_parked {
            return Err(CpusError::InAccess { vcpu });
        }
        let needs = needs.ok_or(CpusError::Unresponsive { vcpu })?;
        needs.map_err(|source| CpusError::Kvm { vcpu, source })
    }

    /// Creates `count` vCPUs for states that have not arrived yet ([`Cpus::restore`]): creating them takes longer than
    /// setting their states.
    pub fn expect(&mut self, count: u32) -> Result<(), CpusError> {
        for index in 0..count.min(self.max()) {
            let vcpu = self.create(index)?;
            vcpu.set_tsc(NOBODYS_TSC).map_err(|source| CpusError::Kvm {
                vcpu: index,
                source,
            })?;
            let thread = self.spawn(index, vcpu)?;
            self.expected.insert(index, thread);
        }
        Ok(())
    }

    /// Adds vCPUs with saved states, paused. If their time goes on, the states are as of `since`.
    pub fn restore(
        &mut self,
        saved: Vec<SavedCpu>,
        since: Option<Instant>,
    ) -> Result<(), CpusError> {
        let max = self.max();
        let supported = Arc::new(self.setup.supported_cpuid.clone());
        for SavedCpu {
            vcpu: index,
            mut state,
        } in saved
        {
            if index >= max || self.is_present(index) {
                return Err(CpusError::TooMany { vcpu: index, max });
            }
            let thread = match self.expected.remove(&index) {
                Some(thread) => thread,
                None => self
                    .create(index)
                    .and_then(|vcpu| self.spawn(index, vcpu))?,
            };
            thread.wait_parked();
            let supported = Arc::clone(&supported);
            let restored = thread.with(move |vcpu| {
                let given = vcpu.cpuid()?;
                let missing = arch::cpuid::missing(&state.cpuid, &supported, &given);
                if missing.is_empty() {
                    if let Some(since) = since {
                        state.advance(since.elapsed());
                    }
                    vcpu.restore(&state)?;
                    // Its time may have stopped or jumped.
                    vcpu.tell_paused();
                }
                Ok(missing)
            });
            self.threads.insert(index, thread);
            let missing = restored
                .ok_or(CpusError::Unresponsive { vcpu: index })?
                .map_err(|source| CpusError::Kvm {
                    vcpu: index,
                    source,
                })?;
            if !missing.is_empty() {
                let names: Vec<_> = missing.iter().map(ToString::to_string).collect();
                return Err(CpusError::MissingFeatures {
                    missing: names.join(", "),
                });
            }
        }
        // vCPUs that the guest had given up.
        for (index, thread) in mem::take(&mut self.expected) {
            if let Some(vcpu) = thread.stop() {
                // Like those of the other vCPUs, in case it is plugged in again.
                vcpu.set_tsc(0).map_err(|source| CpusError::Kvm {
                    vcpu: index,
                    source,
                })?;
                self.spares.insert(index, vcpu);
            }
        }
        Ok(())
    }

    /// General and control registers of every vCPU; all must be paused.
    pub fn registers(&self) -> Result<Vec<(u32, Registers)>, CpusError> {
        self.for_each(|vcpu| Ok((vcpu.regs()?, vcpu.sregs()?)))
    }

    fn for_each<R: Send + 'static>(
        &self,
        work: impl Fn(&mut Vcpu) -> hypervisor::Result<R> + Clone + Send + 'static,
    ) -> Result<Vec<(u32, R)>, CpusError> {
        self.threads
            .iter()
            .map(|(&vcpu, thread)| {
                let result = thread
                    .with(work.clone())
                    .ok_or(CpusError::Unresponsive { vcpu })?;
                Ok((
                    vcpu,
                    result.map_err(|source| CpusError::Kvm { vcpu, source })?,
                ))
            })
            .collect()
    }

    /// Creates a vCPU in its power-on state: the first one would start at the reset vector, the others wait for a
    /// start-up interrupt.
    fn create(&self, index: u32) -> Result<Vcpu, CpusError> {
        let kvm = |source| CpusError::Kvm {
            vcpu: index,
            source,
        };
        let topology = &self.setup.cpuid.topology;
        // `for_vcpu` refuses numbers that the topology does not have, all of which fit a u8.
        let mut cpuid = self.setup.cpuid.clone();
        let vcpu = self
            .vm
            .create_vcpu(index as u8, topology.apic_id(index))
            .map_err(kvm)?;
        cpuid.tsc_khz = vcpu.tsc_khz().ok().filter(|&khz| khz > 0);
        let leaves = arch::cpuid::for_vcpu(&self.setup.supported_cpuid, &cpuid, index).map_err(
            |source| CpusError::Cpuid {
                vcpu: index,
                source,
            },
        )?;
        vcpu.set_cpuid(&leaves).map_err(kvm)?;
        vcpu.set_msrs(&arch::msrs::boot()).map_err(kvm)?;
        vcpu.set_fpu(&registers::fpu()).map_err(kvm)?;
        let mut lapic = vcpu.lapic().map_err(kvm)?;
        registers::set_lint(&mut lapic);
        vcpu.set_lapic(&lapic).map_err(kvm)?;
        Ok(vcpu)
    }

    /// KVM's statistics of each vCPU.
    pub fn counters(&self) -> impl Iterator<Item = (u32, Vec<(&'static str, u64)>)> {
        let stats = self.stats.iter();
        stats.map(|(index, stats)| (*index, stats.read()))
    }

    fn start(&mut self, index: u32, vcpu: Vcpu) -> Result<(), CpusError> {
        let thread = self.spawn(index, vcpu)?;
        // It may not have come to where it waits yet.
        self.paused = false;
        self.threads.insert(index, thread);
        Ok(())
    }

    /// Starts the thread of a vCPU, parked.
    fn spawn(&mut self, index: u32, vcpu: Vcpu) -> Result<VcpuThread, CpusError> {
        if !self.stats.contains_key(&index) {
            self.stats.extend(vcpu.stats().map(|stats| (index, stats)));
        }
        let spawner = &*self.setup.spawner;
        let prepared = core_scheduling::before_vcpu(self.setup.core_scheduling, spawner);
        let started = prepared.and_then(|()| {
            VcpuThread::spawn(
                vcpu,
                Arc::clone(&self.buses),
                Arc::clone(&self.setup.report),
                Arc::clone(&self.setup.devices),
                self.setup.affinity.get(&index).cloned(),
                spawner,
            )
        });
        started.map_err(|source| CpusError::Thread {
            vcpu: index,
            source,
        })
    }
}

impl Drop for Cpus {
    fn drop(&mut self) {
        // Devices and memory are dropped after this.
        let others = [&mut self.expected, &mut self.leaving].map(mem::take);
        let threads = mem::take(&mut self.threads).into_values();
        for thread in threads.chain(others.into_iter().flatten().map(|(_, thread)| thread)) {
            thread.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(
        clippy::unwrap_used,
        reason = "a test that cannot be set up has failed"
    )]

    use std::{
        io,
        os::unix::fs::FileExt,
        sync::{Mutex, mpsc},
    };

    use base::{Access, Mapping, memfd};
    use devices::thread::{ThreadRole, Unconfined};
    use hypervisor::{Exits, MemorySlot, install_kick_handler};

    use super::*;

    const CODE: u64 = 0x1000;
    const PAGE: usize = 0x1000;
    /// out 0xe9, al; jmp back
    const PROGRAM: [u8; 4] = [0xe6, 0xe9, 0xeb, 0xfc];

    /// Writes hang until the sender is dropped.
    struct Hanging {
        begun: mpsc::SyncSender<()>,
        over: Mutex<mpsc::Receiver<()>>,
    }

    impl Exits for Hanging {
        fn pio_read(&self, _port: u16, _data: &mut [u8]) {}
        fn pio_write(&self, _port: u16, _data: &[u8]) {
            let _ = self.begun.try_send(());
            self.over.lock().unwrap().recv().unwrap_err();
        }
        fn mmio_read(&self, _address: u64, _data: &mut [u8]) {}
        fn mmio_write(&self, _address: u64, _data: &[u8]) {}
    }

    struct NoDevices;

    impl DeviceMemory for NoDevices {
        fn revoke(&self) -> bool {
            false
        }
    }

    fn setup(report: ReportCpuEvent, devices: Arc<dyn DeviceMemory>) -> CpuSetup {
        CpuSetup {
            supported_cpuid: Vec::new(),
            cpuid: arch::cpuid::Config {
                topology: arch::topology::Topology::flat(2).unwrap(),
                profile: arch::cpuid::Profile::Host,
                phys_bits: 36,
                nested: false,
                gate: false,
                amx: false,
                tsc_khz: None,
            },
            affinity: BTreeMap::new(),
            core_scheduling: CoreScheduling::Off,
            report,
            devices,
            spawner: Arc::new(Unconfined),
        }
    }

    /// Notes which threads it starts, and when it is prepared.
    struct Noting(Arc<Mutex<Vec<String>>>);

    impl ThreadSpawner for Noting {
        fn spawn(
            &self,
            role: ThreadRole,
            name: &str,
            body: Box<dyn FnOnce() + Send>,
        ) -> io::Result<std::thread::JoinHandle<()>> {
            self.0.lock().unwrap().push(name.to_owned());
            Unconfined.spawn(role, name, body)
        }

        fn prepare(&self, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
            self.0.lock().unwrap().push("prepared".to_owned());
            Unconfined.prepare(work)
        }
    }

    #[test]
    fn a_cookie_is_taken_before_the_vcpus_of_a_vm_or_each_vcpu() {
        let kvm = match Kvm::open() {
            Ok(kvm) => kvm,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        install_kick_handler().unwrap();
        let (vm, vcpu) = ("prepared", ["vcpu0", "vcpu1"]);
        for (mode, expected) in [
            (CoreScheduling::Off, vec![vcpu[0], vcpu[1]]),
            (CoreScheduling::Vm, vec![vm, vcpu[0], vcpu[1]]),
            (CoreScheduling::Vcpu, vec![vm, vcpu[0], vm, vcpu[1]]),
        ] {
            let noted = Arc::new(Mutex::new(Vec::new()));
            let report: ReportCpuEvent = Arc::new(|event| panic!("{event:?}"));
            let setup = CpuSetup {
                core_scheduling: mode,
                spawner: Arc::new(Noting(Arc::clone(&noted))),
                ..setup(report, Arc::new(NoDevices))
            };
            let machine = Arc::new(kvm.create_vm(0xfffb_d000, 0xfffb_c000).unwrap());
            let mut cpus = Cpus::new(&kvm, Arc::clone(&machine), Arc::default(), setup).unwrap();
            for index in [0u8, 1] {
                let vcpu = machine.create_vcpu(index, index.into()).unwrap();
                cpus.spawn(index.into(), vcpu).unwrap().stop();
            }
            assert_eq!(*noted.lock().unwrap(), expected, "{mode:?}");
        }
    }

    #[test]
    fn a_vcpu_that_is_given_up_in_an_access_leaves_when_that_is_over() {
        let kvm = match Kvm::open() {
            Ok(kvm) => kvm,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        install_kick_handler().unwrap();
        let code = memfd::sealed(c"code", PAGE as u64).unwrap();
        code.write_all_at(&PROGRAM, 0).unwrap();
        let mapping = Mapping::shared(&code, 0, PAGE, Access::ReadWrite).unwrap();
        let vm = kvm.create_vm(0xfffb_d000, 0xfffb_c000).unwrap();
        let slot = MemorySlot {
            guest: CODE,
            len: PAGE as u64,
            host: mapping.start(),
            read_only: false,
        };
        // SAFETY: the mapping outlives the VM, which is dropped before it.
        unsafe { vm.map(slot) }.unwrap();
        let vcpu = vm.create_vcpu(0, 0).unwrap();
        let mut sregs = vcpu.sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.regs().unwrap();
        (regs.rip, regs.rflags) = (CODE, 2);
        vcpu.set_regs(&regs).unwrap();

        let report: ReportCpuEvent = Arc::new(|event| panic!("{event:?}"));
        let devices: Arc<dyn DeviceMemory> = Arc::new(NoDevices);
        let setup = setup(Arc::clone(&report), Arc::clone(&devices));
        let mut cpus = Cpus::new(&kvm, Arc::new(vm), Arc::default(), setup).unwrap();
        let (begun, has_begun) = mpsc::sync_channel(1);
        let (end, over) = mpsc::channel();
        let exits = Arc::new(Hanging {
            begun,
            over: Mutex::new(over),
        });
        let thread = VcpuThread::spawn(vcpu, exits, report, devices, None, &Unconfined).unwrap();
        cpus.threads.insert(1, thread);
        cpus.resume();
        has_begun.recv().unwrap();
        // It is not frozen, and in an access.
        cpus.thaw();
        cpus.unplug(1);
        assert!(!cpus.is_present(1));
        assert_eq!(cpus.left(), (vec![], true));
        let in_access = |result| matches!(result, Err(CpusError::InAccess { vcpu: 1 }));
        assert!(in_access(cpus.plug(1)));
        assert!(in_access(cpus.pause(Duration::ZERO)));
        cpus.nmi().unwrap();
        drop::<mpsc::Sender<()>>(end);
        cpus.pause(Duration::from_secs(60)).unwrap();
        assert_eq!(cpus.left(), (vec![1], false));
        cpus.plug(1).unwrap();
        assert!(cpus.is_present(1));
        drop((cpus, mapping));
    }
}
