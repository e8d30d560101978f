//! Device files of no hardware: they keep clients, objects and descriptor memory as the driver does, and look at the
//! memory that calls point to.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Write},
    os::fd::{BorrowedFd, FromRawFd, OwnedFd},
    sync::{Arc, Barrier, Mutex, PoisonError},
    thread,
};

use base::event::Event;

use crate::device::{Attributes, Device, Kernel, Node};

/// What has happened.
#[derive(Default)]
pub struct State {
    next: u32,
    /// Classes of objects, by client and handle.
    pub objects: HashMap<(u32, u32), u32>,
    /// What contains descriptor memory, by client and handle.
    pub parents: HashMap<(u32, u32), u32>,
    /// Commands that fail, with an error number.
    pub failing: HashMap<u32, i32>,
    /// External ranges that GPUs map: the address, the GPU, and the client and handle of the memory.
    pub mapped: Vec<(u64, [u8; 16], (u32, u32))>,
    /// What was done to channel groups and channels, in order.
    pub scheduled: Vec<Scheduled>,
    /// Types of share policies that reached the driver.
    pub share_types: Vec<u16>,
    /// Ranges of unified memory: commands and their first words.
    pub ranges: Vec<(u32, u64)>,
    /// The size that all video memory gets, if it is larger than what is asked for.
    pub least_size: u64,
    /// Where the next free waits twice when it has freed.
    pub after_free: Option<Arc<Barrier>>,
    /// The doorbell's file.
    pub doorbell: Option<File>,
    /// Files to be opened, of a process that can make none when it is confined.
    spare: Vec<OwnedFd>,
    /// Whether the control file and the GPU's are this machine's: a device whose pages a guest is shown.
    has_pages: bool,
}

/// A call that matters for when channels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduled {
    /// The time slice of a group, in microseconds.
    Slice(u32, u64),
    /// So many channels are stopped: their kernels are taken off the GPU.
    Stop(u32),
    /// So many channels get no further slice.
    Unschedule(u32),
    /// How kernels of a channel are interrupted; `None`: the flag that this is set is missing, so that nothing changes.
    Preemption(Option<u32>),
    /// So many channels are started.
    Start(u32),
    /// An object is freed.
    Free(u32),
}

/// The device files.
#[derive(Clone, Default)]
pub struct StandIn(pub Arc<Mutex<State>>);

/// The address that the driver has for a mapping.
pub const MAPPED: u64 = 0xffff_8880_1234_5000;
/// The call that makes an object.
const ALLOCATE: u32 = 0xc030_462b;
/// The handle of an object whose allocation never ends.
pub const HANGS: u32 = 0x5c00_dead;
/// What the device adds to the first word of descriptor memory, into the second.
pub const ADDED: u64 = 1;

unsafe fn word(block: *mut u8, at: usize) -> u32 {
    // SAFETY: the caller's.
    unsafe { block.add(at).cast::<u32>().read_unaligned() }
}

unsafe fn long(block: *mut u8, at: usize) -> u64 {
    // SAFETY: the caller's.
    unsafe { block.add(at).cast::<u64>().read_unaligned() }
}

unsafe fn put(block: *mut u8, at: usize, value: u32) {
    // SAFETY: the caller's.
    unsafe { block.add(at).cast::<u32>().write_unaligned(value) }
}

unsafe fn put_long(block: *mut u8, at: usize, value: u64) {
    // SAFETY: the caller's.
    unsafe { block.add(at).cast::<u64>().write_unaligned(value) }
}

fn event() -> OwnedFd {
    Event::new().expect("there are descriptors").into()
}

impl StandIn {
    /// Device files of a process that will be confined. They can be opened `count` times.
    #[must_use]
    pub fn confined(count: usize) -> Self {
        let new = Self::default();
        let mut state = new.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.spare.extend((0..count).map(|_| event()));
        drop(state);
        new
    }

    /// With this machine's `/dev/nvidiactl` and `/dev/nvidia0`, which have pages and no calls.
    #[must_use]
    pub fn with_pages() -> Self {
        let new = Self::default();
        new.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .has_pages = true;
        new
    }
}

impl Device for StandIn {
    fn version(&self) -> io::Result<String> {
        Ok("580.159.04".to_owned())
    }

    fn open(&self, node: Node) -> io::Result<OwnedFd> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match node {
            Node::Control | Node::Gpu(0) if state.has_pages => Kernel.open(node),
            // SAFETY: calls without pointers but a valid name; the descriptor is new.
            Node::Gpu(0) => unsafe {
                let file = libc::memfd_create(c"doorbell".as_ptr(), libc::MFD_CLOEXEC);
                assert_eq!(libc::ftruncate(file, 0x10000), 0);
                Ok(OwnedFd::from_raw_fd(file))
            },
            Node::Gpu(_) => Err(io::Error::from_raw_os_error(libc::ENXIO)),
            Node::Control | Node::Uvm => Ok(state.spare.pop().unwrap_or_else(event)),
        }
    }

    fn attributes(&self, node: Node) -> io::Result<Attributes> {
        let minor = match node {
            Node::Gpu(0) => 0,
            Node::Gpu(_) => return Err(io::Error::from_raw_os_error(libc::ENOENT)),
            Node::Control => 255,
            Node::Uvm => 1,
        };
        Ok(Attributes {
            device: libc::makedev(195, minor),
            mode: libc::S_IFCHR | 0o666,
        })
    }

    unsafe fn call(&self, _: BorrowedFd<'_>, command: u32, block: *mut u8) -> io::Result<i32> {
        // SAFETY: the worker has checked the block.
        while command == ALLOCATE && unsafe { word(block, 8) } == HANGS {
            thread::park();
        }
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = state.failing.get(&command) {
            return Err(io::Error::from_raw_os_error(*error));
        }
        // SAFETY: the worker has checked the block and what it points to.
        unsafe {
            if command >> 8 & 0xff != u32::from(b'F') {
                if !block.is_null() {
                    state.ranges.push((command, long(block, 0)));
                }
                if command == 0x21 {
                    let memory = (word(block, 9252), word(block, 9256));
                    let gpu = block.add(24).cast::<[u8; 16]>().read();
                    if matches!(state.objects.get(&memory), Some(0x40 | 0x71)) {
                        state.mapped.push((long(block, 0), gpu, memory));
                    } else {
                        put(block, 9260, 0x57);
                    }
                }
                return Ok(0);
            }
            match command & 0xff {
                0x27 => {
                    let key = (word(block, 0), word(block, 8));
                    let (address, length) = (long(block, 24) as *mut u64, long(block, 32) + 1);
                    // All of it can be read.
                    let words = (0..length / 8).map(|at| address.add(at as usize).read_volatile());
                    std::hint::black_box(words.fold(0, u64::wrapping_add));
                    if length >= 16 {
                        let sum = address.read_volatile().wrapping_add(ADDED);
                        address.add(1).write_volatile(sum);
                    }
                    state.objects.insert(key, 0x71);
                    state.parents.insert(key, word(block, 4));
                }
                0x29 => {
                    let (client, handle) = (word(block, 0), word(block, 8));
                    state.scheduled.push(Scheduled::Free(handle));
                    if client == handle {
                        state.objects.retain(|key, _| key.0 != client);
                    } else if state.objects.remove(&(client, handle)).is_none() {
                        put(block, 12, 0x57);
                    }
                    if let Some(barrier) = state.after_free.take() {
                        drop(state);
                        barrier.wait();
                        barrier.wait();
                    }
                }
                0x2a => {
                    let parameters = long(block, 16) as *mut u8;
                    match word(block, 8) {
                        _ if parameters.is_null() => put(block, 28, 0x1f),
                        0xd04 => state.share_types.push(word(parameters, 8) as u16),
                        0x101 => {
                            for at in [8, 16, 24] {
                                let text = long(parameters, at) as *mut u8;
                                if !text.is_null() {
                                    text.write_bytes(b'v', word(parameters, 0) as usize);
                                }
                            }
                        }
                        0x3d0c => {
                            let client = word(block, 0);
                            for at in 0..word(parameters, 648) as usize & 0x7f {
                                let handle = word(parameters, 8 + 4 * at);
                                state.objects.insert((client, handle), 0);
                            }
                        }
                        0xa06c_0103 => {
                            let slice = Scheduled::Slice(word(block, 4), long(parameters, 0));
                            state.scheduled.push(slice);
                        }
                        0x2080_110b => {
                            let count = word(parameters, 4);
                            let [stops, unscheduled] =
                                [0, 8].map(|at| word(parameters, at) & 0xff != 0);
                            state.scheduled.push(match (stops, unscheduled) {
                                (false, _) => Scheduled::Start(count),
                                (true, false) => Scheduled::Stop(count),
                                (true, true) => Scheduled::Unschedule(count),
                            });
                        }
                        0x2080_1210 => {
                            let is_set = word(parameters, 0) & 1 != 0;
                            let mode = is_set.then(|| word(parameters, 12));
                            state.scheduled.push(Scheduled::Preemption(mode));
                        }
                        0x2080_018d => {
                            put(parameters, 8, 1);
                            put(parameters, 12, std::process::id());
                        }
                        _ => {}
                    }
                }
                0x2b => {
                    let class = word(block, 12);
                    assert!(class != 0x3e, "system memory is descriptor memory");
                    let parameters = long(block, 16) as *mut u8;
                    if class == 0x40 && !parameters.is_null() {
                        let size = long(parameters, 64).max(state.least_size);
                        put_long(parameters, 64, size);
                    }
                    if class == 0x41 {
                        state.next += 1;
                        let client = 0xc1d0_0000 + state.next;
                        put(block, 8, client);
                        state.objects.insert((client, client), class);
                    } else {
                        state
                            .objects
                            .insert((word(block, 0), word(block, 8)), class);
                    }
                }
                0x34 => match state.objects.get(&(word(block, 12), word(block, 16))) {
                    Some(&class) => {
                        let key = (word(block, 0), word(block, 8));
                        state.objects.insert(key, class);
                    }
                    None => put(block, 24, 0x57),
                },
                0x35 => state.share_types.push(word(block, 16) as u16),
                0x4e => {
                    put_long(block, 32, MAPPED);
                    // The file in the block is one of this process.
                    let target =
                        libc::fcntl(word(block, 48).cast_signed(), libc::F_DUPFD_CLOEXEC, 0);
                    assert!(target >= 0, "a descriptor of this process");
                    state.doorbell = Some(File::from_raw_fd(target));
                }
                0x4f => assert_eq!(long(block, 16), MAPPED),
                206 => {
                    let target = word(block, 8).cast_signed();
                    let target = libc::fcntl(target, libc::F_DUPFD_CLOEXEC, 0);
                    if target < 0 {
                        put(block, 12, 0x1f);
                    } else {
                        File::from_raw_fd(target).write_all(&1u64.to_ne_bytes())?;
                    }
                }
                _ => {}
            }
        }
        Ok(0)
    }
}
