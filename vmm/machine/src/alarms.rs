//! Alarms of physical devices: the host wants one back, one has failed, or the IOMMU has blocked an
//! access of one.
//!
//! ```text
//!   vfio-pci ──eventfd per device──┐
//!   kernel log (/dev/kmsg) ────────┴──> epoll ──> control loop
//! ```

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    os::{
        fd::{AsRawFd, RawFd},
        unix::fs::OpenOptionsExt,
    },
    sync::{Arc, Mutex, MutexGuard},
};

use base::Unpoisoned;
use devices::{pci::Bdf, vfio::Physical};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_NONBLOCK, EventFd},
};

const KERNEL_LOG: &str = "/dev/kmsg";
/// Epoll token of the kernel log; tokens of devices start at 1.
const LOG_TOKEN: u64 = 0;
/// Maximum size of a kernel log record in bytes (`PRINTKRB_RECORD_MAX`).
const RECORD: usize = 8192;
/// Maximum number of records to read at once: the host may write faster than they are read.
const MAX_RECORDS: usize = 1000;
/// Number of faults of a device that are reported one by one; the guest can cause as many as it
/// likes.
const FIRST_FAULTS: u64 = 10;

/// What has happened to a device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Alarm {
    /// The host wants the device back: its driver is being unbound, or the device is being removed.
    Wanted(String),
    /// The device has reported an uncorrectable error (AER).
    Failed(String),
    /// The IOMMU has blocked an access that the device is not allowed to make.
    Fault {
        /// The device.
        id: String,
        /// How often this has happened.
        count: u64,
        /// The kernel's message.
        text: String,
    },
}

struct Source {
    id: String,
    address: String,
    wanted: EventFd,
    failed: EventFd,
    faults: u64,
}

#[derive(Default)]
struct State {
    next: u64,
    sources: BTreeMap<u64, Source>,
    log: Option<File>,
}

/// All watched devices.
pub struct Alarms {
    epoll: Epoll,
    state: Mutex<State>,
}

/// Keeps a device watched until it is dropped.
pub struct Watch {
    alarms: Arc<Alarms>,
    token: u64,
}

impl Alarms {
    /// Watches no device yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new()?,
            state: Mutex::default(),
        })
    }

    /// A descriptor that becomes readable when [`Alarms::take`] has something to return.
    pub fn fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Starts watching a device, which is called `id` in the API.
    pub fn watch(self: &Arc<Self>, id: &str, device: &Physical) -> io::Result<Watch> {
        let mut state = self.lock();
        if state.log.is_none() {
            state.log = self
                .open_log()
                .inspect_err(|error| {
                    log::info!(
                        "faults of the IOMMU are in the host's log only: {KERNEL_LOG}: {error}"
                    );
                })
                .ok();
        }
        state.next += 1;
        let token = state.next;
        let source = Source {
            id: id.to_owned(),
            address: device.address().to_owned(),
            wanted: EventFd::new(EFD_NONBLOCK)?,
            failed: EventFd::new(EFD_NONBLOCK)?,
            faults: 0,
        };
        for eventfd in [&source.wanted, &source.failed] {
            self.add(eventfd.as_raw_fd(), token)?;
        }
        device.report(&source.wanted, &source.failed)?;
        state.sources.insert(token, source);
        Ok(Watch {
            alarms: Arc::clone(self),
            token,
        })
    }

    fn add(&self, fd: RawFd, token: u64) -> io::Result<()> {
        let event = EpollEvent::new(EventSet::IN, token);
        self.epoll.ctl(ControlOperation::Add, fd, event)
    }

    /// Opens the kernel log, starting with records written from now on.
    fn open_log(&self) -> io::Result<File> {
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let mut log = options.open(KERNEL_LOG)?;
        log.seek(SeekFrom::End(0))?;
        self.add(log.as_raw_fd(), LOG_TOKEN)?;
        Ok(log)
    }

    /// Returns what has happened since the last call.
    pub fn take(&self) -> Vec<Alarm> {
        let mut state = self.lock();
        let mut alarms = Vec::new();
        for source in state.sources.values() {
            let rang = |eventfd: &EventFd| eventfd.read().is_ok();
            if rang(&source.failed) {
                alarms.push(Alarm::Failed(source.id.clone()));
            }
            if rang(&source.wanted) {
                alarms.push(Alarm::Wanted(source.id.clone()));
            }
        }
        let State { sources, log, .. } = &mut *state;
        let mut record = [0; RECORD];
        for _ in 0..MAX_RECORDS {
            let Some(log) = log else { break };
            match log.read(&mut record) {
                Ok(len) => {
                    let text = String::from_utf8_lossy(&record[..len]);
                    alarms.extend(sources.values_mut().find_map(|source| source.fault(&text)));
                }
                // Some records were overwritten before they were read.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(_) => break,
            }
        }
        alarms
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock_unpoisoned()
    }
}

impl Source {
    /// Returns an alarm if a kernel log record reports a fault of this device.
    fn fault(&mut self, record: &str) -> Option<Alarm> {
        let text = fault_of(record, &self.address)?;
        self.faults += 1;
        let count = self.faults;
        (count <= FIRST_FAULTS || count.is_power_of_two()).then(|| Alarm::Fault {
            id: self.id.clone(),
            count,
            text: text.to_owned(),
        })
    }
}

/// Extracts what a kernel log record (Documentation/ABI/testing/dev-kmsg) says about a fault of the
/// device at an address such as `0000:01:00.0`.
fn fault_of<'a>(record: &'a str, address: &str) -> Option<&'a str> {
    let text = record.split_once(';')?.1.lines().next()?;
    let iommu = ["DMAR", "AMD-Vi", "iommu"]
        .iter()
        .any(|name| text.contains(name));
    let fault = text.to_ascii_lowercase().contains("fault");
    // Intel's driver omits the segment.
    let short = address.split_once(':').map_or(address, |(_, short)| short);
    let ours = text.contains(address)
        || text.contains(&format!("[{short}]"))
        || endpoint(address).is_some_and(|number| text.contains(&format!(" EP {number} ")));
    (iommu && fault && ours).then_some(text)
}

/// The endpoint number in messages of the virtio-iommu driver: segment and requester ID.
fn endpoint(address: &str) -> Option<u32> {
    let bdf: Bdf = address.parse().ok()?;
    Some(u32::from(bdf.segment) << 16 | u32::from(bdf.requester_id()))
}

impl Drop for Watch {
    fn drop(&mut self) {
        let source = self.alarms.lock().sources.remove(&self.token);
        // vfio-pci keeps the eventfds open until its device is closed.
        for eventfd in source
            .iter()
            .flat_map(|source| [&source.wanted, &source.failed])
        {
            let none = EpollEvent::default();
            let fd = eventfd.as_raw_fd();
            if let Err(error) = self.alarms.epoll.ctl(ControlOperation::Delete, fd, none) {
                log::warn!("a device that has gone is still watched: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTEL: &str = "3,431,5140900,-;DMAR: [DMA Write NO_PASID] Request device [00:03.0] fault \
                         addr 0x30000000 [fault reason 0x05] PTE Write access is not set\n";
    const VIRTIO: &str =
        "3,40,9,-;virtio_iommu virtio0: page fault from EP 24 at 0x30000000 [write ]\n";
    const AMD: &str = "4,9,1,-;vfio-pci 0000:00:03.0: AMD-Vi: Event logged [IO_PAGE_FAULT \
                       domain=0x0001 address=0x30000000 flags=0x0020]\n SUBSYSTEM=pci\n";

    #[test]
    fn faults_are_those_of_the_device_and_of_the_iommu() {
        for record in [INTEL, AMD, VIRTIO] {
            let text = fault_of(record, "0000:00:03.0").unwrap();
            assert!(text.contains("0x30000000") && !text.contains("SUBSYSTEM"));
            assert_eq!(fault_of(record, "0000:00:04.0"), None);
        }
        for other in [
            "",
            "6,1,1,-;page fault of 0000:00:03.0",
            "6,1,1,-;DMAR: [00:03.0]",
        ] {
            assert_eq!(fault_of(other, "0000:00:03.0"), None);
        }
    }

    #[test]
    fn a_guest_that_causes_faults_for_ever_does_not_fill_the_log() {
        let mut source = Source {
            id: "gpu".to_owned(),
            address: "0000:00:03.0".to_owned(),
            wanted: EventFd::new(EFD_NONBLOCK).unwrap(),
            failed: EventFd::new(EFD_NONBLOCK).unwrap(),
            faults: 0,
        };
        let reported = (0..1000).filter(|_| source.fault(INTEL).is_some());
        assert_eq!(reported.count(), 10 + 6, "ten, then 16, 32 ... 512");
    }
}
