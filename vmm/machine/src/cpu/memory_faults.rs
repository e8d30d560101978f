//! Accesses of a vCPU for which the host has no memory.
//!
//! KVM then answers EFAULT, which need not last: a full file system gets room, a device wakes up, a
//! file gets its length back. So the access is repeated for a while. If that does not help, pages of
//! devices that the guest sees are replaced ([`DeviceMemory`]), and only if there are none, or that
//! does not help either, the guest is lost. There may be none because another vCPU, or the device's
//! end, has just had them replaced: so the access is then repeated once more.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hypervisor::Error;

/// The first pause before an access is repeated; each further one is twice as long, up to
/// [`LONGEST`].
const FIRST: Duration = Duration::from_millis(1);
/// The longest pause.
const LONGEST: Duration = Duration::from_millis(64);
/// For how long an access is repeated.
const LIMIT: Duration = Duration::from_secs(2);
/// A fault so long after the last one is another's: the vCPU has gone on meanwhile. More than the
/// longest pause, and than a busy host adds to it.
const APART: Duration = Duration::from_millis(300);

/// Memory of devices that the guest sees, which their drivers may take away for good.
pub trait DeviceMemory: Send + Sync {
    /// Replaces it by memory that is there; whoever uses the devices loses them. Returns false if
    /// there is none.
    fn revoke(&self) -> bool;
}

/// A vCPU's faults that follow each other.
pub struct MemoryFaults {
    devices: Arc<dyn DeviceMemory>,
    series: Option<Series>,
}

struct Series {
    begin: Instant,
    last: Instant,
    pause: Duration,
    /// No pages of devices were left to replace, and the access has been repeated since.
    last_try: bool,
}

impl MemoryFaults {
    /// Without any faults, in a guest that sees the memory of these devices.
    pub fn new(devices: Arc<dyn DeviceMemory>) -> Self {
        Self {
            devices,
            series: None,
        }
    }

    /// How long to stay out of the guest before the access is repeated.
    ///
    /// # Errors
    /// It has been repeated for two seconds, and once more after there was no memory of devices.
    pub fn pause(&mut self, vcpu: u8, address: Option<u64>) -> Result<Duration, Error> {
        self.pause_at(Instant::now(), vcpu, address)
    }

    fn pause_at(
        &mut self,
        now: Instant,
        vcpu: u8,
        address: Option<u64>,
    ) -> Result<Duration, Error> {
        let known = self
            .series
            .take_if(|series| now.saturating_duration_since(series.last) < APART);
        let Some(mut series) = known else {
            log::warn!("vCPU {vcpu} waits: {}", what(address));
            self.series = Some(Series {
                begin: now,
                last: now,
                pause: FIRST,
                last_try: false,
            });
            return Ok(FIRST);
        };
        if now.saturating_duration_since(series.begin) >= LIMIT {
            if self.devices.revoke() {
                log::warn!(
                    "vCPU {vcpu} goes on without the pages of devices: {}",
                    what(address)
                );
                return Ok(FIRST);
            }
            if series.last_try {
                return Err(Error::Stopped {
                    vcpu,
                    reason: what(address),
                });
            }
            series.last_try = true;
        }
        series.last = now;
        series.pause = (series.pause * 2).min(LONGEST);
        let pause = series.pause;
        self.series = Some(series);
        Ok(pause)
    }
}

fn what(address: Option<u64>) -> String {
    let at = address.map_or(String::new(), |address| format!(" at {address:#x}"));
    format!(
        "the host has no memory behind the guest's{at}: a file is too short, a file system or the \
         huge pages are used up, or a device's memory is gone"
    )
}

#[cfg(test)]
mod tests {
    #![allow(
        clippy::unwrap_used,
        reason = "a test that cannot be set up has failed"
    )]

    use std::{
        fs::File,
        os::unix::fs::FileExt,
        sync::{
            Arc, Mutex,
            atomic::{AtomicU32, Ordering},
            mpsc,
        },
    };

    use base::{Access, Mapping, memfd};
    use devices::thread::Unconfined;
    use hypervisor::{Exit, Exits, Kvm, MemorySlot, Vcpu, Vm, install_kick_handler};
    use kvm_bindings::kvm_segment;

    use super::*;
    use crate::cpu::thread::{CpuEvent, ReportCpuEvent, VcpuThread};

    const CODE: u64 = 0x1000;
    const DATA: u64 = 0x3000;
    const PAGE: usize = 0x1000;
    /// The page tables: three levels, which map the first 2 MiB.
    const TABLES: u64 = 0x4000;
    /// mov al, [0x3000]; mov [0x8000], al; jmp $
    const PROGRAM: [u8; 16] = [
        0x8a, 0x04, 0x25, 0x00, 0x30, 0x00, 0x00, 0x88, 0x04, 0x25, 0x00, 0x80, 0x00, 0x00, 0xeb,
        0xfe,
    ];

    /// Counts how often it is revoked, while there is any.
    #[derive(Default)]
    struct Pages {
        file: Mutex<Option<File>>,
        revoked: AtomicU32,
    }

    impl DeviceMemory for Pages {
        fn revoke(&self) -> bool {
            let file = self.file.lock().unwrap().take();
            let Some(file) = file else { return false };
            file.write_all_at(&[0x77], 0).unwrap();
            self.revoked.fetch_add(1, Ordering::Relaxed);
            true
        }
    }

    fn no_devices() -> MemoryFaults {
        MemoryFaults::new(Arc::<Pages>::default())
    }

    #[test]
    fn device_pages_are_replaced_before_the_guest_is_lost() {
        let pages = Arc::<Pages>::default();
        *pages.file.lock().unwrap() = Some(memfd::create(c"page").unwrap());
        let mut faults = MemoryFaults::new(Arc::clone(&pages) as Arc<_>);
        let begin = Instant::now();
        let mut now = begin;
        while let Ok(pause) = faults.pause_at(now, 0, None) {
            now += pause;
            let waits = now - begin < LIMIT;
            assert!(!waits || pages.revoked.load(Ordering::Relaxed) == 0);
        }
        assert_eq!(pages.revoked.load(Ordering::Relaxed), 1);
        assert!(now - begin >= 2 * LIMIT);
    }

    #[test]
    fn a_vcpu_goes_on_when_another_has_had_device_pages_replaced() {
        let pages = Arc::<Pages>::default();
        *pages.file.lock().unwrap() = Some(memfd::create(c"page").unwrap());
        let begin = Instant::now();
        let mut both = [0; 2].map(|_| MemoryFaults::new(Arc::clone(&pages) as Arc<_>));
        let mut now = begin;
        while pages.revoked.load(Ordering::Relaxed) == 0 {
            for (vcpu, faults) in (0..).zip(&mut both) {
                faults.pause_at(now, vcpu, None).unwrap();
            }
            now += LONGEST;
        }
        assert!(now - begin >= LIMIT);
        // The second one's access does not help either.
        let [_, second] = &mut both;
        assert!(second.pause_at(now, 1, None).is_err());
    }

    #[test]
    fn an_access_is_repeated_for_two_seconds() {
        let mut faults = no_devices();
        let begin = Instant::now();
        let mut now = begin;
        let mut pauses = Vec::new();
        let error = loop {
            match faults.pause_at(now, 3, Some(0x5000)) {
                Ok(pause) => {
                    pauses.push(pause.as_millis());
                    now += pause;
                }
                Err(error) => break error,
            }
        };
        assert_eq!(pauses[..8], [1, 2, 4, 8, 16, 32, 64, 64]);
        // Once more than that.
        assert!((LIMIT..LIMIT + 2 * LONGEST).contains(&(now - begin)));
        let text = error.to_string();
        assert!(text.starts_with("vCPU 3 stopped: "), "{text}");
        assert!(text.contains("at 0x5000: "), "{text}");
    }

    #[test]
    fn a_fault_long_after_another_begins_anew() {
        let mut faults = no_devices();
        let mut now = Instant::now();
        for _ in 0..100 {
            assert_eq!(faults.pause_at(now, 0, None).unwrap(), FIRST);
            now += APART;
        }
    }

    #[test]
    fn faults_between_which_the_guest_goes_on_do_not_add_up() {
        let mut faults = no_devices();
        let mut now = Instant::now();
        for _ in 0..100 {
            assert_eq!(faults.pause_at(now, 0, Some(0x5000)).unwrap(), FIRST);
            now += Duration::from_millis(500);
        }
    }

    /// What the guest has written to address 0x8000, or what its vCPU has reported.
    type Outcome = std::result::Result<u8, CpuEvent>;

    struct Register(mpsc::SyncSender<Outcome>);

    impl Exits for Register {
        fn pio_read(&self, _port: u16, _data: &mut [u8]) {}
        fn pio_write(&self, _port: u16, _data: &[u8]) {}
        fn mmio_read(&self, _address: u64, _data: &mut [u8]) {}
        fn mmio_write(&self, address: u64, data: &[u8]) {
            assert_eq!(address, 0x8000);
            self.0.send(Ok(data[0])).unwrap();
        }
    }

    /// A guest that reads from the first page of an empty file, which has faulted once. `None`
    /// without KVM.
    fn guest(register: &Register) -> Option<(Vm, Vcpu, File, Vec<Mapping>)> {
        let kvm = match Kvm::open() {
            Ok(kvm) => kvm,
            Err(error) => {
                eprintln!("skipped: {error}");
                return None;
            }
        };
        install_kick_handler().unwrap();
        let vm = kvm.create_vm(0xfffb_d000, 0xfffb_c000).unwrap();
        let code = memfd::sealed(c"code", PAGE as u64).unwrap();
        code.write_all_at(&PROGRAM, 0).unwrap();
        let data = memfd::create(c"data").unwrap();
        let tables = memfd::sealed(c"tables", 3 * PAGE as u64).unwrap();
        // Present, writable, for ring 3; the last one is a page of 2 MiB.
        for (level, entry) in [TABLES + 0x1007, TABLES + 0x2007, 0x87].iter().enumerate() {
            let at = (level * PAGE) as u64;
            tables.write_all_at(&u64::to_le_bytes(*entry), at).unwrap();
        }
        let mut mappings = Vec::new();
        for (file, guest, pages) in [(&code, CODE, 1), (&data, DATA, 1), (&tables, TABLES, 3)] {
            let mapping = Mapping::shared(file, 0, pages * PAGE, Access::ReadWrite).unwrap();
            let slot = MemorySlot {
                guest,
                len: (pages * PAGE) as u64,
                host: mapping.start(),
                read_only: false,
            };
            // SAFETY: the mappings outlive the VM: the caller drops them after it.
            unsafe { vm.map(slot) }.unwrap();
            mappings.push(mapping);
        }
        let mut vcpu = vm.create_vcpu(0, 0).unwrap();
        // 64 bits in ring 3: a KVM that emulates other code takes memory that is away for a device.
        let mut sregs = vcpu.sregs().unwrap();
        (sregs.cr0, sregs.cr3, sregs.cr4) = (0x8000_0033, TABLES, 0x20);
        sregs.efer = 0x500;
        let flat = kvm_segment {
            limit: u32::MAX,
            selector: 0x1b,
            type_: 0xb,
            present: 1,
            dpl: 3,
            db: 0,
            l: 1,
            s: 1,
            g: 1,
            ..sregs.cs
        };
        sregs.cs = kvm_segment { base: 0, ..flat };
        let writable = kvm_segment {
            base: 0,
            selector: 0x23,
            type_: 3,
            db: 1,
            l: 0,
            ..flat
        };
        (sregs.ds, sregs.es, sregs.ss) = (writable, writable, writable);
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.regs().unwrap();
        (regs.rip, regs.rflags) = (CODE, 2);
        vcpu.set_regs(&regs).unwrap();
        let exit = vcpu.run(register).unwrap();
        assert!(matches!(exit, Exit::MemoryFault { .. }), "{exit:?}");
        Some((vm, vcpu, data, mappings))
    }

    /// What comes of a guest whose file is 0 bytes long; `mend` is called while it runs.
    fn outcome(mend: impl FnOnce(&File)) -> Option<Outcome> {
        outcome_with(&Arc::default(), mend)
    }

    /// The same, with the memory of devices.
    fn outcome_with(devices: &Arc<Pages>, mend: impl FnOnce(&File)) -> Option<Outcome> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let register = Register(sender.clone());
        let (vm, vcpu, data, mappings) = guest(&register)?;
        let report: ReportCpuEvent = Arc::new(move |event| {
            sender.send(Err(event)).unwrap();
        });
        let devices = Arc::clone(devices) as Arc<_>;
        let register = Arc::new(register);
        let thread = VcpuThread::spawn(vcpu, register, report, devices, None, &Unconfined).unwrap();
        thread.resume();
        mend(&data);
        let outcome = receiver.recv().unwrap();
        let vcpu = thread.stop();
        drop((vcpu, vm, mappings));
        Some(outcome)
    }

    #[test]
    fn a_guest_goes_on_when_its_memory_is_there_again() {
        let outcome = outcome(|data| {
            data.write_all_at(&[0x5a], 0).unwrap();
        });
        assert!(outcome.is_none_or(|outcome| matches!(outcome, Ok(0x5a))));
    }

    #[test]
    fn a_guest_whose_memory_stays_away_is_lost() {
        if let Some(outcome) = outcome(|_data| {}) {
            let Err(CpuEvent::Failed(error)) = outcome else {
                panic!("{outcome:?}");
            };
            let reason = error.to_string();
            assert!(reason.contains("the host has no memory"), "{reason}");
        }
    }

    #[test]
    fn a_guest_whose_device_is_gone_goes_on_without_its_pages() {
        let pages = Arc::<Pages>::default();
        let outcome = outcome_with(&pages, |data| {
            *pages.file.lock().unwrap() = Some(data.try_clone().unwrap());
        });
        assert!(outcome.is_none_or(|outcome| matches!(outcome, Ok(0x77))));
    }
}
