//! For how long this process's contexts have had GPUs, by the driver's record of context switches.
//!
//! The GPU notes when it takes a context off its engine and when it begins the next one. The driver hands these records
//! to each process that asks for its own user's: it writes them into memory that the process reads (an NV_EVENT_BUFFER,
//! bound by GR_FECS_BIND_EVTBUF_FOR_UID_V2), about 30 times a second or when it is told to. A record has the channel's
//! number, which is unique on the machine. So use does not depend on what a program says of its kernels, as long as these can be
//! interrupted.
//!
//! While one context alone has work, it stays on the engine, and there are no records.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, OpenOptions},
    io,
    os::fd::AsRawFd,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use base::{Access, Chain, Mapping};
use remoting_turns::{Moment, slices::Use};

use super::{
    Kernel, Machine,
    blocks::{Allocation, Control, MapMemory, SwitchBuffer},
    work::Work,
};

/// The driver's control file.
const CONTROL: &str = "/dev/nvidiactl";
/// Records that the driver may write before they are read: more than a second of them. After that it overwrites the
/// oldest ones.
const RECORDS: u32 = 8192;
/// Words of a record.
const WORDS: usize = 4;
/// The kind of record that is bound here.
const SWITCH: u64 = 2;
/// What a record says.
const BEGIN: u64 = 6;
const END: u64 = 7;
/// Without a record of another process for so long, this one is alone on the GPU.
const ALONE: Duration = Duration::from_millis(100);
/// Nothing counts as longer, in nanoseconds: the end was lost, or the clock has changed.
const LONGEST: u64 = 1_000_000_000;

/// A context has begun to run, or has been taken off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Switch {
    begins: bool,
    /// The number of the channel.
    channel: u32,
    /// Nanoseconds of the GPU's clock.
    time: u64,
}

impl Switch {
    /// Reads a record; `None`: it is of another kind.
    fn read(record: &[AtomicU64; WORDS]) -> Option<Self> {
        let [header, what, _, time] = record;
        let what = what.load(Ordering::Relaxed);
        let begins = match what & 0xff {
            BEGIN => true,
            END => false,
            _ => return None,
        };
        let is_switch = header.load(Ordering::Relaxed) & 0xffff == SWITCH;
        is_switch.then_some(Self {
            begins,
            channel: (what >> 32) as u32,
            time: time.load(Ordering::Relaxed),
        })
    }
}

/// For how long the own channels of one GPU have run.
#[derive(Debug, Default)]
struct Tally {
    /// The time of the newest record, until which all is counted.
    until: u64,
    /// Whether an own channel has run since then.
    runs: bool,
    /// Nanoseconds.
    total: u64,
}

impl Tally {
    /// Returns whether the channel is an own one.
    fn note(&mut self, switch: Switch, own: &BTreeSet<u32>) -> bool {
        if self.until.saturating_sub(switch.time) > LONGEST {
            // The clock was set back.
            (self.until, self.runs) = (switch.time, false);
        }
        let now = switch.time.max(self.until);
        if self.runs && now - self.until <= LONGEST {
            self.total = self.total.saturating_add(now - self.until);
        }
        self.until = now;
        let is_own = own.contains(&switch.channel);
        // The engine runs one context at a time.
        self.runs = switch.begins && is_own;
        is_own
    }
}

/// What is written at the beginning of the record.
#[repr(C)]
struct Header {
    _get: AtomicU32,
    put: AtomicU32,
}

/// The records that the driver writes. Their memory is the driver's: nothing that is in it is relied upon.
#[derive(Debug)]
struct Ring {
    header: Mapping,
    records: Mapping,
    next: u32,
}

impl Ring {
    const BYTES: usize = RECORDS as usize * WORDS * size_of::<u64>();

    fn put(&self) -> u32 {
        // SAFETY: the mapping is at least a page, aligned, and lives as long as `self`; other processes' changes of
        // atomics are allowed.
        let header = unsafe { &*self.header.start().cast::<Header>() };
        header.put.load(Ordering::Acquire) % RECORDS
    }

    /// Takes what was written since the last time.
    fn take(&mut self, mut each: impl FnMut(Switch)) {
        let put = self.put();
        while self.next != put {
            // SAFETY: the index is below the number of records that the mapping has; as above.
            let record = unsafe {
                &*(self.records.start())
                    .cast::<[AtomicU64; WORDS]>()
                    .add(self.next as usize)
            };
            if let Some(switch) = Switch::read(record) {
                each(switch);
            }
            self.next = (self.next + 1) % RECORDS;
        }
    }
}

/// The driver's record of one GPU's context switches. The driver ends it when the file is closed.
#[derive(Debug)]
struct Log {
    control: File,
    client: u32,
    ring: Ring,
    tally: Tally,
    work: Work,
    clock: Clock,
    /// When records of others were last found.
    others: Option<Moment>,
}

/// The GPU's clock by this machine's.
#[derive(Debug, Default)]
struct Clock {
    /// By how much it is ahead, in nanoseconds, and when that was looked at.
    ahead: Option<(i128, Moment)>,
}

impl Clock {
    /// In one second, the clocks may come apart by so many nanoseconds.
    const DRIFT: u64 = 100_000;

    /// A record of this time was found. It is from the past, so that the clock is ahead by at least the difference.
    fn note(&mut self, time: u64, now: Moment) {
        let seen = i128::from(time) - i128::from(now.nanos());
        let ahead = match self.ahead {
            Some((ahead, since)) => {
                let drift = now.since(since).as_millis() * u128::from(Self::DRIFT) / 1000;
                let known = ahead - drift as i128;
                match seen < known - i128::from(LONGEST) {
                    // It was set back.
                    true => seen,
                    false => known.max(seen),
                }
            }
            None => seen,
        };
        self.ahead = Some((ahead, now));
    }

    /// What the GPU's clock shows about now; `None` if it is not known.
    fn at(&self, now: Moment) -> Option<u64> {
        let (ahead, _) = self.ahead?;
        u64::try_from(i128::from(now.nanos()) + ahead).ok()
    }
}

/// Why there is no record.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot open or map {CONTROL}")]
    File(#[source] io::Error),
    #[error("the driver does not take the call for {0}")]
    Call(&'static str, #[source] io::Error),
    #[error("the driver refuses {0} with status {1:#x}")]
    Refused(&'static str, u32),
}

/// Names of the objects that are made. They are the client's own.
const DEVICE: u32 = 0x6761_0001;
const SUBDEVICE: u32 = 0x6761_0002;
const HEADER: u32 = 0x6761_0003;
const BUFFER_MEMORY: u32 = 0x6761_0004;
const BUFFER: u32 = 0x6761_0005;

fn open() -> Result<File, Error> {
    let opened = OpenOptions::new().read(true).write(true).open(CONTROL);
    opened.map_err(Error::File)
}

fn call(
    file: &File,
    request: libc::c_ulong,
    block: *mut libc::c_void,
    what: &'static str,
) -> Result<(), Error> {
    // SAFETY: callers pass a block of this request that outlives the call.
    match unsafe { Machine.ioctl(file.as_raw_fd(), request, block) } {
        0 => Ok(()),
        _ => Err(Error::Call(what, io::Error::last_os_error())),
    }
}

fn made(file: &File, mut allocation: Allocation, what: &'static str) -> Result<u32, Error> {
    call(file, Allocation::REQUEST, allocation.block(), what)?;
    match allocation.status() {
        0 => Ok(allocation.object()),
        status => Err(Error::Refused(what, status)),
    }
}

fn controlled(file: &File, mut control: Control, what: &'static str) -> Result<(), Error> {
    call(file, Control::REQUEST, control.block(), what)?;
    match control.status() {
        0 => Ok(()),
        status => Err(Error::Refused(what, status)),
    }
}

/// Maps memory of the driver's for reading.
fn mapped(control: &File, client: u32, memory: u32, bytes: usize) -> Result<Mapping, Error> {
    let file = open()?;
    let mut map = MapMemory::new(client, memory, bytes as u64, file.as_raw_fd());
    call(control, MapMemory::REQUEST, map.block(), "a mapping")?;
    match map.status() {
        0 => Mapping::shared(&file, 0, bytes, Access::Read).map_err(Error::File),
        status => Err(Error::Refused("a mapping", status)),
    }
}

impl Log {
    /// Begins the record of this GPU, by the driver's number.
    fn open(gpu: u32) -> Result<Self, Error> {
        let control = open()?;
        let client = made(&control, Allocation::client(), "a client")?;
        let make = |allocation, what| made(&control, allocation, what).map(drop);
        make(Allocation::device(client, DEVICE, gpu), "a device")?;
        make(
            Allocation::subdevice(client, DEVICE, SUBDEVICE),
            "a subdevice",
        )?;
        let page = 4096;
        for (object, bytes) in [(HEADER, page), (BUFFER_MEMORY, Ring::BYTES)] {
            make(Allocation::memory(client, object, bytes as u64), "memory")?;
        }
        let ring = Ring {
            header: mapped(&control, client, HEADER, page)?,
            records: mapped(&control, client, BUFFER_MEMORY, Ring::BYTES)?,
            next: 0,
        };
        let buffer = SwitchBuffer {
            client,
            subdevice: SUBDEVICE,
            header: HEADER,
            records: BUFFER_MEMORY,
            count: RECORDS,
        };
        make(
            Allocation::switch_buffer(BUFFER, &buffer),
            "a buffer of events",
        )?;
        let bind = Control::bind_switches(client, SUBDEVICE, BUFFER);
        controlled(&control, bind, "context switches")?;
        controlled(&control, Control::enable_events(client, BUFFER), "events")?;
        Ok(Self {
            control,
            client,
            ring,
            tally: Tally::default(),
            work: Work::default(),
            clock: Clock::default(),
            others: None,
        })
    }

    /// Reads what the driver has written.
    fn take(&mut self, own: &BTreeSet<u32>, round: Duration, now: Moment) {
        let (tally, work, others) = (&mut self.tally, &mut self.work, &mut self.others);
        let mut newest = None;
        self.ring.take(|switch| {
            newest = newest.max(Some(switch.time));
            let is_own = tally.note(switch, own);
            work.note(switch.begins, is_own, switch.time, round);
            if !is_own {
                *others = Some(now);
            }
        });
        if let Some(newest) = newest {
            self.clock.note(newest, now);
        }
    }

    /// Reads what is new. Returns whether this process is alone.
    fn look(&mut self, own: &BTreeSet<u32>, round: Duration, now: Moment) -> bool {
        let recent = |others: Option<Moment>| others.is_some_and(|seen| now.since(seen) < ALONE);
        self.take(own, round, now);
        if recent(self.others) {
            // The driver has some that it has not written yet, also if it has just written: without them, a context that runs
            // seems to be away. Where it has none, the process is soon alone.
            let _ = controlled(
                &self.control,
                Control::flush_events(self.client, BUFFER),
                "events",
            );
            self.take(own, round, now);
        }
        let alone = !recent(self.others);
        if alone {
            // What has run until the next record is not known to have had work.
            self.tally.runs = false;
            if let Some(now) = self.clock.at(now) {
                self.work.alone(now);
            }
        }
        alone
    }
}

/// The records of all GPUs on which this process has contexts.
#[derive(Debug, Default)]
pub struct Switches {
    logs: BTreeMap<u32, Log>,
    /// What was counted in records that have ended: use in nanoseconds, and work.
    before: u64,
    worked: Duration,
    /// A record could not be begun. Each attempt would disturb those of other processes.
    failed: bool,
}

impl Switches {
    /// What the contexts with these channels have used of these GPUs and of those of earlier looks, without what they have
    /// used alone; `None` if there is no record of one of them. `round` is the sum of the others' slices.
    pub fn look(
        &mut self,
        gpus: BTreeSet<u32>,
        own: &BTreeSet<u32>,
        round: Duration,
    ) -> Option<Use> {
        if self.failed {
            return None;
        }
        let now = Moment::now();
        for gpu in gpus {
            if self.logs.contains_key(&gpu) {
                continue;
            }
            match Log::open(gpu) {
                Ok(log) => {
                    self.logs.insert(gpu, log);
                }
                Err(error) => {
                    self.failed = true;
                    self.end();
                    base::note!(
                        "cannot read context switches, so use is not known by the GPU's record: {}",
                        Chain(&error)
                    );
                    return None;
                }
            }
        }
        let mut alone = true;
        for log in self.logs.values_mut() {
            alone &= log.look(own, round, now);
        }
        let logs = self.logs.values().map(|log| log.tally.total);
        Some(Use {
            total: Duration::from_nanos(logs.sum::<u64>().saturating_add(self.before)),
            alone,
        })
    }

    /// For how long contexts have had work until the last look, as far as the record shows while others use the GPU.
    /// `stopped` tells whether they are stopped.
    pub fn worked(&mut self, stopped: bool, round: Duration) -> Duration {
        let now = Moment::now();
        let worked = self.logs.values_mut().filter_map(|log| {
            let now = log.clock.at(now)?;
            Some(log.work.until(now, stopped, round))
        });
        self.worked + worked.sum::<Duration>()
    }

    /// Ends all records.
    pub fn end(&mut self) {
        self.worked = self.worked(false, Duration::ZERO);
        let ended = std::mem::take(&mut self.logs);
        self.before += ended.values().map(|log| log.tally.total).sum::<u64>();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: u32 = 7;
    const OTHER: u32 = 8;

    fn tally(switches: &[(bool, u32, u64)]) -> Tally {
        let own = BTreeSet::from([OWN]);
        let mut tally = Tally::default();
        for &(begins, channel, time) in switches {
            let switch = Switch {
                begins,
                channel,
                time,
            };
            assert_eq!(tally.note(switch, &own), channel == OWN);
        }
        tally
    }

    #[test]
    fn the_gpus_clock_is_ahead_by_what_the_latest_records_show_and_may_be_set_back() {
        let at = |millis: u64| Moment::from_nanos(millis * 1_000_000);
        let mut clock = Clock::default();
        assert_eq!(clock.at(at(1)), None);
        // Found 3, 1 and 5 ms later than they were written.
        for (time, found) in [(1007, 10), (1019, 20), (1025, 30)] {
            clock.note(time * 1_000_000, at(found));
        }
        // What they may have come apart.
        assert_eq!(clock.at(at(40)), Some(1_039_000_000 - 1_000));
        clock.note(500, at(50));
        assert_eq!(clock.at(at(51)), Some(1_000_500));
        let mut early = Clock::default();
        early.note(0, at(50));
        assert_eq!(early.at(at(40)), None);
    }

    #[test]
    fn own_time_is_from_each_begin_to_its_end() {
        let counted = tally(&[
            // It ran before the first record.
            (false, OWN, 100),
            (true, OTHER, 110),
            (false, OTHER, 200),
            (true, OWN, 210),
            (false, OWN, 300),
            (true, OTHER, 310),
            (false, OTHER, 400),
            (true, OWN, 410),
        ]);
        assert_eq!((counted.total, counted.runs), (90, true));
    }

    #[test]
    fn lost_records_count_nothing_twice_and_nothing_of_others() {
        // The end of the first, and the begin of the second.
        let counted = tally(&[(true, OWN, 100), (true, OTHER, 200), (false, OWN, 300)]);
        assert_eq!(counted.total, 100);
        // Times that go backwards, as two records of one switch may.
        let counted = tally(&[(true, OWN, 100), (false, OWN, 200), (true, OWN, 150)]);
        assert_eq!(counted.total, 100);
        let late = 3 * LONGEST;
        let counted = tally(&[(true, OWN, 100), (false, OWN, late)]);
        assert_eq!(counted.total, 0);
        // The clock was set back.
        let counted = tally(&[(true, OWN, late), (true, OWN, 50), (false, OWN, 60)]);
        assert_eq!((counted.total, counted.until), (10, 60));
    }

    /// Memory as the driver's, and its writer's view of it.
    fn ring() -> Ring {
        Ring {
            header: Mapping::anonymous(4096, Access::ReadWrite).unwrap(),
            records: Mapping::anonymous(Ring::BYTES, Access::ReadWrite).unwrap(),
            next: 0,
        }
    }

    fn write(ring: &Ring, at: u32, words: [u64; WORDS]) {
        // SAFETY: within the mapping, and nobody reads meanwhile.
        unsafe {
            ring.records
                .start()
                .cast::<[u64; WORDS]>()
                .add(at as usize)
                .write(words);
        }
    }

    fn set_put(ring: &Ring, put: u32) {
        // SAFETY: as above.
        unsafe { ring.header.start().cast::<u32>().add(1).write(put) };
    }

    #[test]
    fn records_are_read_once_around_the_end_and_others_are_skipped() {
        let mut ring = ring();
        let record = |what: u64, channel: u64, time| [SWITCH, what | channel << 32, 0, time];
        ring.next = RECORDS - 1;
        write(&ring, RECORDS - 1, record(BEGIN, 3, 5));
        write(&ring, 0, [1, BEGIN, 0, 6]);
        write(&ring, 1, record(1, 3, 7));
        write(&ring, 2, record(END | 0xffff_ff00, 4, 8));
        set_put(&ring, 3);
        let mut read = Vec::new();
        ring.take(|switch| read.push(switch));
        let expected = [(true, 3, 5), (false, 4, 8)].map(|(begins, channel, time)| Switch {
            begins,
            channel,
            time,
        });
        assert_eq!(read, expected);
        ring.take(|_| panic!("nothing is new"));
    }

    #[test]
    fn a_place_outside_the_memory_is_inside() {
        let mut ring = ring();
        set_put(&ring, u32::MAX);
        let mut count = 0;
        ring.take(|_| count += 1);
        assert_eq!((count, ring.next), (0, u32::MAX % RECORDS));
    }
}
