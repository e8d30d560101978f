//! Open device files.
//!
//! A program does not have a device file but one end of a socket pair; the worker has the other end and the file. The
//! kernel counts the copies of the program's end, whoever has them, and the worker's end hangs up after the last. In a
//! guest the agent makes the pair, and tells of the hang-up.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read},
    mem::ManuallyDrop,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use base::{Unpoisoned, socket};
use nvidia_abi::wire::TOKEN;

use crate::{
    device::Node, external::External, objects::Pages, quota::Charge, sharing::Gated, slice::Slice,
};

/// The most files of all programs.
const MOST: usize = 1 << 13;
/// Descriptors of the worker for each file: the device file and the worker's end.
pub const DESCRIPTORS: u64 = 2;

/// What a mapping of a file shows.
#[derive(Clone)]
pub enum View {
    /// Pages of a slice: of which, where, and how many bytes.
    Slice(Arc<Slice>, u64, u64),
    /// The device file itself.
    Device {
        /// How many bytes.
        length: u64,
        /// Whether programs may write.
        is_writable: bool,
    },
}

/// The identifier of a GPU.
pub type Uuid = [u8; 16];

/// How a GPU maps a range, as the driver wants it: its identifier, then five words.
pub type Attributes = [u8; 36];

/// An address space of a GPU that is registered with a file of unified memory.
#[derive(Clone, Copy)]
pub struct Space {
    /// The GPU.
    pub gpu: Uuid,
    /// The client of the address space.
    pub client: u32,
    /// The GPU as an object of the client.
    pub device: u32,
}

/// What a GPU knows the pages of a range by.
#[derive(Clone, Copy)]
pub struct Reached {
    /// The GPU.
    pub gpu: Uuid,
    /// The client.
    pub client: u32,
    /// The object.
    pub object: u32,
}

/// A range of unified memory whose pages are a slice's: a semaphore pool, or managed memory.
#[derive(Clone)]
pub struct SharedRange {
    /// The program's address of it.
    pub base: u64,
    /// Where and how long.
    pub pages: Pages,
    /// Whether it is managed memory.
    pub is_managed: bool,
    /// How GPUs map it, where the program has said so.
    pub attributes: Vec<Attributes>,
    /// The GPUs that map it.
    pub reached: Vec<Reached>,
}

impl SharedRange {
    /// Where in the range `length` bytes at the program's address `at` are. `None`: not all of them are in it.
    pub fn place(&self, at: u64, length: u64) -> Option<u64> {
        let place = at.checked_sub(self.base)?;
        (place.checked_add(length)? <= self.pages.length).then_some(place)
    }
}

/// What calls left at a file.
#[derive(Default)]
pub struct Left {
    /// A GPU's file: the control file that it was registered with.
    pub control: Option<u32>,
    /// What a mapping shows.
    pub view: Option<View>,
    /// Whether the file's last copy is closed, though a call may still have it.
    pub is_closed: bool,
    /// Unified memory: the registered address spaces, one a GPU.
    pub spaces: Vec<Space>,
    /// Unified memory: ranges whose pages are a slice's.
    pub ranges: Vec<SharedRange>,
    /// The video memory of objects that were exported to the file, by their place in it.
    pub exported: HashMap<u16, Charge>,
    /// Unified memory: video memory that GPUs map.
    pub external: External,
}

impl Left {
    /// Whether a program that maps the file gets it.
    pub fn shows_device(&self) -> bool {
        matches!(self.view, Some(View::Device { .. }))
    }
}

/// An open device file.
pub struct OpenFile {
    /// Its number in messages.
    pub number: u32,
    /// What it is.
    pub node: Node,
    /// Whoever has the token may use the file.
    pub token: [u8; TOKEN],
    device: ManuallyDrop<OwnedFd>,
    /// The gate that is told when it is closed.
    gated: Option<Gated>,
    /// `None`: the agent has the pair.
    end: Option<End>,
    left: Mutex<Left>,
    /// Whether the last copy of the program's end is closed.
    is_left: AtomicBool,
}

/// The worker's end of a socket pair.
struct End {
    socket: OwnedFd,
    /// What tells the program's end from all other sockets.
    cookie: u64,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        // SAFETY: nothing uses it afterwards.
        let device = unsafe { ManuallyDrop::take(&mut self.device) };
        match self.gated {
            Some(gated) => gated.close(device.as_raw_fd(), || drop(device)),
            None => drop(device),
        }
    }
}

impl OpenFile {
    /// The device file.
    pub fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// The worker's end of the socket pair. `None`: the agent has the pair.
    pub fn end(&self) -> Option<BorrowedFd<'_>> {
        self.end.as_ref().map(|end| end.socket.as_fd())
    }

    /// Notes that the last copy of the program's end is closed. Answers whether that was new.
    pub fn leave(&self) -> bool {
        !self.is_left.swap(true, Ordering::Relaxed)
    }

    /// What calls left.
    pub fn left(&self) -> MutexGuard<'_, Left> {
        self.left.lock_unpoisoned()
    }
}

/// All open files.
pub struct Files {
    /// The gate that is told of closed files.
    gated: Option<Gated>,
    random: File,
    open: HashMap<u32, Arc<OpenFile>>,
    last: u32,
    most: usize,
}

impl Files {
    /// No files. There may be `room` of them.
    pub fn new(room: usize, gated: Option<Gated>) -> io::Result<Self> {
        let random = File::open("/dev/urandom")?;
        Ok(Self {
            random,
            gated,
            open: HashMap::new(),
            last: 0,
            most: room.min(MOST),
        })
    }

    /// Adds a device file of a program on this machine. Answers the program's end, too.
    pub fn add(&mut self, node: Node, device: OwnedFd) -> io::Result<(Arc<OpenFile>, OwnedFd)> {
        let [socket, program] = socket::pair_for_packets()?;
        let cookie = socket::cookie(&program)?;
        let end = End { socket, cookie };
        Ok((self.insert(node, device, Some(end))?, program))
    }

    /// Adds a device file of a program in a guest.
    pub fn add_of_guest(&mut self, node: Node, device: OwnedFd) -> io::Result<Arc<OpenFile>> {
        self.insert(node, device, None)
    }

    fn insert(
        &mut self,
        node: Node,
        device: OwnedFd,
        end: Option<End>,
    ) -> io::Result<Arc<OpenFile>> {
        if self.open.len() >= self.most {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        let mut token = [0; TOKEN];
        self.random.read_exact(&mut token)?;
        let in_use = |number: &u32| *number == 0 || self.open.contains_key(number);
        // There is a number that is not in use, since less than 2^32 files are open.
        let mut number = self.last.wrapping_add(1);
        while in_use(&number) {
            number = number.wrapping_add(1);
        }
        self.last = number;
        let left = Mutex::default();
        let file = Arc::new(OpenFile {
            number,
            node,
            token,
            device: ManuallyDrop::new(device),
            gated: self.gated,
            end,
            left,
            is_left: AtomicBool::new(false),
        });
        self.open.insert(number, file.clone());
        Ok(file)
    }

    /// A file by its number.
    pub fn get(&self, number: u32) -> Option<Arc<OpenFile>> {
        self.open.get(&number).cloned()
    }

    /// The file whose program's end this is.
    pub fn of_end(&self, program: impl AsFd) -> Option<Arc<OpenFile>> {
        let cookie = socket::cookie(program).ok()?;
        self.open
            .values()
            .find(|file| file.end.as_ref().is_some_and(|end| end.cookie == cookie))
            .cloned()
    }

    /// The file with this token.
    pub fn of_token(&self, token: &[u8]) -> Option<Arc<OpenFile>> {
        self.open.values().find(|file| file.token == token).cloned()
    }

    /// A file of a GPU that was registered with a control file.
    pub fn gpu_of(&self, control: u32) -> Option<Arc<OpenFile>> {
        let is_registered = |file: &&Arc<OpenFile>| {
            matches!(file.node, Node::Gpu(_)) && file.left().control == Some(control)
        };
        let lowest = self
            .open
            .values()
            .filter(is_registered)
            .min_by_key(|file| file.number);
        lowest.cloned()
    }

    /// A file's last copy is closed.
    pub fn remove(&mut self, number: u32) -> Option<Arc<OpenFile>> {
        self.open.remove(&number)
    }
}
