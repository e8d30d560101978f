//! The loop that serves what blocks ask for: one thread, which looks at the rings of all blocks and
//! hands files and sockets to io_uring. Data goes into the pages that the GPU reads, without a copy
//! on the way.
//!
//! A kernel that is stopped is served as well: its answers wait in its rings.

use std::{
    collections::HashMap,
    ffi::CString,
    io,
    net::{Ipv4Addr, TcpListener},
    os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use io_uring::{IoUring, opcode, squeue, types};

use crate::{
    layout::SLOTS,
    memory::Memory,
    ring::{Consumer, Producer},
    slots::{Asked, Call, Data, How, Limits, Name, parse},
};

/// Files, sockets and servers that an application may have open.
const HANDLES: usize = 4096;
/// Entries of the ring to the kernel.
const DEPTH: u32 = 1024;
/// How long the loop looks for work without a pause.
const SPIN: Duration = Duration::from_millis(1);
/// The longest pause.
const PAUSE: Duration = Duration::from_millis(1);
/// The longest pause while a kernel runs: it gives its turn back when all of it has waited for 100 us.
const SHORT: Duration = Duration::from_micros(20);
/// How long the kernel has to give pages back that are in use when a job ends.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the loop needs of a job: rings and pages of its blocks.
#[derive(Debug)]
pub struct Area {
    /// The blocks' rings, [`crate::layout::Rings`] each.
    pub rings: Memory,
    /// The blocks' pages.
    pub pages: Memory,
    /// How many blocks there are.
    pub blocks: usize,
    /// What a block may use.
    pub limits: Limits,
    /// Told when an answer is there.
    pub answered: Answered,
}

/// Counts answers, for who waits for the next one while its kernel does not run.
#[derive(Debug, Default)]
pub struct Answered {
    count: Mutex<u64>,
    more: Condvar,
}

impl Answered {
    /// How many there were.
    pub fn count(&self) -> u64 {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.more.notify_all();
    }

    /// Waits until there are more than `seen`, for a while; whether there are.
    pub fn wait(&self, seen: u64, patience: Duration) -> bool {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .more
            .wait_timeout_while(count, patience, |count| *count == seen);
        let (count, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *count != seen
    }
}

/// Where files may be, and where servers listen.
#[derive(Clone, Debug)]
pub struct Reach {
    /// The folder whose files alone can be opened; all that the process may open if there is none.
    pub folder: Option<PathBuf>,
    /// The address that servers listen on.
    pub listen: Ipv4Addr,
}

impl Default for Reach {
    fn default() -> Self {
        Self {
            folder: None,
            listen: Ipv4Addr::LOCALHOST,
        }
    }
}

enum Order {
    Add(Arc<Area>, mpsc::Sender<usize>),
    Remove(usize, mpsc::Sender<()>),
    Port(u32, mpsc::Sender<Option<u16>>),
}

/// The loop's thread. Ends with its owner.
#[derive(Debug)]
pub struct Service {
    orders: Option<mpsc::Sender<Order>>,
    /// Whether a kernel runs: the loop stays awake then.
    awake: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Service {
    /// Starts the loop.
    ///
    /// # Errors
    /// There is no io_uring, no such folder, or no thread.
    pub fn start(reach: &Reach) -> io::Result<Self> {
        let (orders, inbox) = mpsc::channel();
        let awake = Arc::new(AtomicBool::new(false));
        let mut server = Server::new(reach)?;
        let until = Arc::clone(&awake);
        let thread = thread::Builder::new()
            .name("gloop".to_owned())
            .spawn(move || server.run(&inbox, &until))?;
        Ok(Self {
            orders: Some(orders),
            awake,
            thread: Some(thread),
        })
    }

    /// Serves an area until [`Self::remove`]; its number.
    ///
    /// # Errors
    /// The loop's thread has ended.
    pub fn add(&self, area: Arc<Area>) -> io::Result<usize> {
        self.ask(|answer| Order::Add(area, answer))
    }

    /// Serves an area no longer: nothing in it is written to after this.
    ///
    /// # Errors
    /// The loop's thread has ended.
    pub fn remove(&self, area: usize) -> io::Result<()> {
        self.ask(|answer| Order::Remove(area, answer))
    }

    /// The port that a server listens on.
    ///
    /// # Errors
    /// The loop's thread has ended, or there is no such server.
    pub fn port(&self, server: u32) -> io::Result<u16> {
        let port = self.ask(|answer| Order::Port(server, answer))?;
        port.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Says whether a kernel runs.
    pub fn stay_awake(&self, awake: bool) {
        self.awake.store(awake, Ordering::Relaxed);
        if awake && let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    fn ask<T>(&self, order: impl FnOnce(mpsc::Sender<T>) -> Order) -> io::Result<T> {
        let (answer, inbox) = mpsc::channel();
        let gone = || io::Error::other("the loop's thread has ended");
        let orders = self.orders.as_ref().ok_or_else(gone)?;
        orders.send(order(answer)).map_err(|_| gone())?;
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        inbox.recv().map_err(|_| gone())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // The loop ends when nobody can give it orders.
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
enum Handle {
    File(OwnedFd),
    Socket(OwnedFd),
    Server(TcpListener),
}

impl Handle {
    /// The descriptor of a file.
    fn file(&self) -> Option<i32> {
        match self {
            Self::File(file) => Some(file.as_raw_fd()),
            _ => None,
        }
    }

    /// The descriptor of a socket.
    fn socket(&self) -> Option<i32> {
        match self {
            Self::Socket(socket) => Some(socket.as_raw_fd()),
            _ => None,
        }
    }

    /// The descriptor of a socket that takes connections.
    fn server(&self) -> Option<i32> {
        match self {
            Self::Server(server) => Some(server.as_raw_fd()),
            _ => None,
        }
    }
}

/// What becomes of the kernel's result.
#[derive(Debug)]
enum Kind {
    /// It is the answer.
    Plain,
    /// A descriptor that gets a name.
    File,
    /// The same.
    Socket,
    /// A socket that is connected, and then gets a name.
    Connected(OwnedFd),
}

/// What the kernel works on.
#[derive(Debug)]
struct Operation {
    area: usize,
    block: usize,
    tag: u32,
    kind: Kind,
    /// What the kernel reads meanwhile.
    _path: Option<CString>,
    _how: Option<Box<types::OpenHow>>,
    _address: Option<Box<libc::sockaddr_in>>,
}

/// An area and what the host has counted of it, in private memory.
struct Served {
    area: Arc<Area>,
    blocks: Vec<Block>,
    /// Operations that the kernel works on.
    busy: usize,
    /// Gets no more answers.
    leaving: Option<mpsc::Sender<()>>,
    /// Its pages among the kernel's registered buffers.
    registered: bool,
}

#[derive(Default)]
struct Block {
    requests: Consumer<16>,
    completions: Producer<4>,
    /// Requests that were not answered: no more are read than there are slots.
    open: u32,
}

struct Server {
    uring: IoUring,
    areas: HashMap<usize, Served>,
    next_area: usize,
    handles: Vec<Option<Handle>>,
    operations: Vec<Option<Operation>>,
    free: Vec<usize>,
    folder: Option<OwnedFd>,
    listen: Ipv4Addr,
    /// Whether the kernel takes registered buffers.
    buffers: bool,
}

/// Buffers that can be registered: a job each.
const BUFFERS: u32 = 64;

impl Server {
    fn new(reach: &Reach) -> io::Result<Self> {
        let uring = IoUring::builder().dontfork().build(DEPTH)?;
        let folder = match &reach.folder {
            Some(path) => Some(std::fs::File::open(path)?.into()),
            None => None,
        };
        // Without them data is copied by other means.
        let buffers = uring.submitter().register_buffers_sparse(BUFFERS).is_ok();
        Ok(Self {
            uring,
            areas: HashMap::new(),
            next_area: 0,
            handles: Vec::new(),
            operations: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH as usize).rev().collect(),
            folder,
            listen: reach.listen,
            buffers,
        })
    }

    fn run(&mut self, inbox: &mpsc::Receiver<Order>, awake: &AtomicBool) {
        let mut last = Instant::now();
        let mut pause = SHORT;
        let mut runs = false;
        loop {
            // What a kernel asks for at its begin is waited for.
            let ran = std::mem::replace(&mut runs, awake.load(Ordering::Relaxed));
            let mut busy = runs && !ran;
            loop {
                match inbox.try_recv() {
                    Ok(order) => {
                        self.obey(order);
                        busy = true;
                    }
                    Err(mpsc::TryRecvError::Empty) => break,
                    Err(mpsc::TryRecvError::Disconnected) => return self.end(),
                }
            }
            busy |= self.turn();
            if busy {
                last = Instant::now();
                pause = SHORT;
            } else if runs && last.elapsed() < SPIN {
                std::hint::spin_loop();
            } else {
                thread::park_timeout(if runs { SHORT } else { pause });
                pause = (pause * 2).min(PAUSE);
            }
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Add(area, answer) => {
                let number = self.next_area;
                self.next_area += 1;
                let registered = self.register(number, &area);
                let blocks = (0..area.blocks).map(|_| Block::default()).collect();
                let served = Served {
                    area,
                    blocks,
                    busy: 0,
                    leaving: None,
                    registered,
                };
                self.areas.insert(number, served);
                let _ = answer.send(number);
            }
            Order::Remove(number, answer) => {
                let Some(served) = self.areas.get_mut(&number) else {
                    let _ = answer.send(());
                    return;
                };
                served.leaving = Some(answer);
                let cancel: Vec<_> = self.of(number).collect();
                for operation in cancel {
                    let cancel = opcode::AsyncCancel::new(operation as u64).build();
                    self.push(&cancel.user_data(u64::MAX));
                }
                self.forget(number);
            }
            Order::Port(name, answer) => {
                let port = match self.handles.get(name as usize) {
                    Some(Some(Handle::Server(server))) => server.local_addr().ok(),
                    _ => None,
                };
                let _ = answer.send(port.map(|address| address.port()));
            }
        }
    }

    /// The operations of an area.
    fn of(&self, area: usize) -> impl Iterator<Item = usize> + '_ {
        let named = self.operations.iter().enumerate();
        named.filter_map(move |(number, operation)| {
            operation
                .as_ref()
                .filter(|one| one.area == area)
                .map(|_| number)
        })
    }

    /// Forgets an area that leaves, once the kernel has nothing to do with it.
    fn forget(&mut self, number: usize) {
        let done = |served: &Served| served.busy == 0 && served.leaving.is_some();
        if !self.areas.get(&number).is_some_and(done) {
            return;
        }
        if let Some(served) = self.areas.remove(&number) {
            if served.registered {
                let none = libc::iovec {
                    iov_base: std::ptr::null_mut(),
                    iov_len: 0,
                };
                // SAFETY: takes the buffer away; nothing that uses it is under way.
                let _ = unsafe {
                    let submitter = self.uring.submitter();
                    submitter.register_buffers_update(number as u32 % BUFFERS, &[none], None)
                };
            }
            if let Some(answer) = served.leaving {
                drop(served.area);
                let _ = answer.send(());
            }
        }
    }

    fn register(&self, number: usize, area: &Area) -> bool {
        // One place for each area; with more areas at a time the later ones go without.
        let place = number as u32 % BUFFERS;
        let taken = |(other, served): (&usize, &Served)| {
            served.registered && *other as u32 % BUFFERS == place
        };
        if !self.buffers || self.areas.iter().any(taken) {
            return false;
        }
        let pages = libc::iovec {
            iov_base: area.pages.at().cast(),
            iov_len: area.pages.bytes(),
        };
        // SAFETY: the memory is the area's, which stays until the buffer is taken away.
        unsafe {
            let submitter = self.uring.submitter();
            submitter
                .register_buffers_update(place, &[pages], None)
                .is_ok()
        }
    }

    /// Looks at everything once; whether there was something.
    fn turn(&mut self) -> bool {
        let mut busy = false;
        let numbers: Vec<_> = self.areas.keys().copied().collect();
        for number in numbers {
            busy |= self.look(number);
        }
        if !self.uring.submission().is_empty() {
            // What could not be handed over stays, and is tried again.
            let _ = self.uring.submit();
        }
        loop {
            // Bound apart, so that the ring is not borrowed in the loop's body.
            let next = self.uring.completion().next();
            let Some(entry) = next else { break };
            busy = true;
            self.finish(entry.user_data(), entry.result());
        }
        busy
    }

    /// Takes the requests of an area's blocks.
    fn look(&mut self, number: usize) -> bool {
        let Some(served) = self.areas.get(&number) else {
            return false;
        };
        if served.leaving.is_some() {
            return false;
        }
        let area = Arc::clone(&served.area);
        let mut busy = false;
        for block in 0..area.blocks {
            let requests = area.rings.rings(block).0;
            loop {
                let Some(served) = self.areas.get_mut(&number) else {
                    return busy;
                };
                let mine = &mut served.blocks[block];
                // No room: later.
                if mine.open >= SLOTS || self.free.is_empty() {
                    break;
                }
                let Some(words) = mine.requests.take(requests) else {
                    break;
                };
                busy = true;
                let Some(Asked { tag, call }) = parse(&words, area.limits) else {
                    continue;
                };
                mine.open += 1;
                let call = call.and_then(|call| self.start(number, block, tag, call));
                match call {
                    Ok(None) => {}
                    Ok(Some(result)) => self.answer(number, block, tag, result),
                    Err(code) => self.answer(number, block, tag, -i64::from(code)),
                }
            }
        }
        busy
    }

    fn answer(&mut self, area: usize, block: usize, tag: u32, result: i64) {
        let Some(served) = self.areas.get_mut(&area) else {
            return;
        };
        let mine = &mut served.blocks[block];
        mine.open = mine.open.saturating_sub(1);
        let completions = served.area.rings.rings(block).1;
        let words = [result as u32, (result >> 32) as u32, tag, 0];
        mine.completions.push(completions, words);
        served.area.answered.add();
    }

    fn descriptor(&self, name: Name, which: fn(&Handle) -> Option<i32>) -> Result<i32, i32> {
        let handle = self.handles.get(name.0 as usize).and_then(Option::as_ref);
        handle.and_then(which).ok_or(libc::EBADF)
    }

    /// Begins what is asked for; the answer, if it is there at once.
    fn start(
        &mut self,
        area: usize,
        block: usize,
        tag: u32,
        call: Call,
    ) -> Result<Option<i64>, i32> {
        let mut operation = Operation {
            area,
            block,
            tag,
            kind: Kind::Plain,
            _path: None,
            _how: None,
            _address: None,
        };
        let entry = match call {
            Call::Open(data, how) => self.open(&mut operation, data, how)?,
            Call::Stat(name) => {
                return size_of_file(self.descriptor(name, Handle::file)?).map(Some);
            }
            Call::Truncate(name, bytes) => {
                return truncate(self.descriptor(name, Handle::file)?, bytes).map(Some);
            }
            Call::Close(name) => {
                self.descriptor(name, Handle::file)?;
                return self.close(name);
            }
            Call::HangUp(name) => {
                let socket = self.descriptor(name, Handle::socket)?;
                // Who waits for it is woken.
                // SAFETY: the descriptor is open.
                unsafe { libc::shutdown(socket, libc::SHUT_RDWR) };
                return self.close(name);
            }
            Call::Unbind(name) => {
                let server = self.descriptor(name, Handle::server)?;
                // SAFETY: the descriptor is open.
                unsafe { libc::shutdown(server, libc::SHUT_RDWR) };
                return self.close(name);
            }
            Call::Read(name, offset, data) => {
                let file = types::Fd(self.descriptor(name, Handle::file)?);
                let (at, buffer) = self.page(area, block, data)?;
                match buffer {
                    Some(buffer) => opcode::ReadFixed::new(file, at, data.length, buffer)
                        .offset(offset)
                        .build(),
                    None => opcode::Read::new(file, at, data.length)
                        .offset(offset)
                        .build(),
                }
            }
            Call::Write(name, offset, data) => {
                let file = types::Fd(self.descriptor(name, Handle::file)?);
                let (at, buffer) = self.page(area, block, data)?;
                match buffer {
                    Some(buffer) => opcode::WriteFixed::new(file, at, data.length, buffer)
                        .offset(offset)
                        .build(),
                    None => opcode::Write::new(file, at, data.length)
                        .offset(offset)
                        .build(),
                }
            }
            Call::Receive(name, data) => {
                let socket = types::Fd(self.descriptor(name, Handle::socket)?);
                let (at, _) = self.page(area, block, data)?;
                opcode::Recv::new(socket, at, data.length).build()
            }
            Call::Send(name, data) => {
                let socket = types::Fd(self.descriptor(name, Handle::socket)?);
                let (at, _) = self.page(area, block, data)?;
                let send = opcode::Send::new(socket, at, data.length);
                send.flags(libc::MSG_NOSIGNAL).build()
            }
            Call::Bind(port) => {
                let server =
                    TcpListener::bind((self.listen, port)).map_err(|error| code(&error))?;
                // Sockets that it accepts have it from there.
                send_at_once(server.as_raw_fd());
                return self.name(Handle::Server(server)).map(Some);
            }
            Call::Accept(name) => {
                let server = types::Fd(self.descriptor(name, Handle::server)?);
                operation.kind = Kind::Socket;
                opcode::Accept::new(server, std::ptr::null_mut(), std::ptr::null_mut())
                    .flags(libc::SOCK_CLOEXEC)
                    .build()
            }
            Call::Connect(address, port) => connect(&mut operation, address, port)?,
        };
        let number = self.free.pop().ok_or(libc::EAGAIN)?;
        self.operations[number] = Some(operation);
        if let Some(served) = self.areas.get_mut(&area) {
            served.busy += 1;
        }
        self.push(&entry.user_data(number as u64));
        Ok(None)
    }

    /// Opens a file, whose path is `data`.
    fn open(&self, operation: &mut Operation, data: Data, how: How) -> Result<squeue::Entry, i32> {
        let path = self.path(operation.area, operation.block, data)?;
        let (flags, mode) = match how {
            How::ReadOnly => (libc::O_RDONLY, 0),
            How::ReadWrite => (libc::O_RDWR | libc::O_CREAT, 0o644),
            How::Create => (libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC, 0o644),
        };
        let resolve = match self.folder {
            Some(_) => libc::RESOLVE_BENEATH | libc::RESOLVE_NO_MAGICLINKS,
            None => 0,
        };
        let folder = self
            .folder
            .as_ref()
            .map_or(libc::AT_FDCWD, AsRawFd::as_raw_fd);
        let flags = (flags | libc::O_CLOEXEC) as u64;
        let how = types::OpenHow::new()
            .flags(flags)
            .mode(mode)
            .resolve(resolve);
        let how = Box::new(how);
        let open = opcode::OpenAt2::new(types::Fd(folder), path.as_ptr(), &raw const *how);
        operation.kind = Kind::File;
        operation._path = Some(path);
        operation._how = Some(how);
        Ok(open.build())
    }

    /// Where data of a block is, and its buffer if that is registered.
    fn page(&self, area: usize, block: usize, data: Data) -> Result<(*mut u8, Option<u16>), i32> {
        let served = self.areas.get(&area).ok_or(libc::EFAULT)?;
        let limits = served.area.limits;
        let index = block * limits.page_count as usize + data.page as usize;
        let at = index * limits.page_bytes as usize;
        if at + data.length as usize > served.area.pages.bytes() {
            return Err(libc::EFAULT);
        }
        let buffer = served.registered.then_some((area as u32 % BUFFERS) as u16);
        // Within the pages: checked above.
        Ok((served.area.pages.at().wrapping_add(at), buffer))
    }

    fn path(&self, area: usize, block: usize, data: Data) -> Result<CString, i32> {
        if data.length as usize >= libc::PATH_MAX as usize {
            return Err(libc::ENAMETOOLONG);
        }
        let (at, _) = self.page(area, block, data)?;
        let mut path = vec![0; data.length as usize];
        // SAFETY: within the pages; the device may write meanwhile, and the bytes are then any: they
        // are copied once, before anybody looks at them.
        unsafe { std::ptr::copy_nonoverlapping(at, path.as_mut_ptr(), path.len()) };
        CString::new(path).map_err(|_| libc::EINVAL)
    }

    fn name(&mut self, handle: Handle) -> Result<i64, i32> {
        let place = match self.handles.iter().position(Option::is_none) {
            Some(place) => place,
            None if self.handles.len() < HANDLES => {
                self.handles.push(None);
                self.handles.len() - 1
            }
            None => return Err(libc::EMFILE),
        };
        self.handles[place] = Some(handle);
        Ok(place as i64)
    }

    /// Closes what was looked up before.
    fn close(&mut self, name: Name) -> Result<Option<i64>, i32> {
        // What was pushed names the descriptor, whose number may soon be another's.
        let _ = self.uring.submit();
        self.handles[name.0 as usize] = None;
        Ok(Some(0))
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: what the entry points to is kept by its operation, or the area that it counts in,
        // until the kernel has answered.
        while unsafe { self.uring.submission().push(entry) }.is_err() {
            let _ = self.uring.submit();
        }
    }

    /// The kernel has answered.
    fn finish(&mut self, number: u64, result: i32) {
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        let Some(operation) = self.operations.get_mut(number).and_then(Option::take) else {
            return;
        };
        self.free.push(number);
        if let Some(served) = self.areas.get_mut(&operation.area) {
            served.busy -= 1;
        }
        let made = |result| {
            // SAFETY: the kernel has just made it for us.
            unsafe { OwnedFd::from_raw_fd(result) }
        };
        let result = match operation.kind {
            _ if result < 0 => Err(-result),
            Kind::Plain => Ok(i64::from(result)),
            Kind::File => self.name(Handle::File(made(result))),
            Kind::Socket => self.name(Handle::Socket(made(result))),
            Kind::Connected(socket) => self.name(Handle::Socket(socket)),
        };
        let leaving = |served: &Served| served.leaving.is_some();
        if self.areas.get(&operation.area).is_some_and(leaving) {
            self.forget(operation.area);
            return;
        }
        let result = result.unwrap_or_else(|code| -i64::from(code));
        self.answer(operation.area, operation.block, operation.tag, result);
    }

    /// Takes everything back from the kernel.
    fn end(&mut self) {
        let cancel = opcode::AsyncCancel2::new(types::CancelBuilder::any()).build();
        self.push(&cancel.user_data(u64::MAX));
        let begun = Instant::now();
        while self.operations.iter().any(Option::is_some) && begun.elapsed() < PATIENCE {
            let _ = self.uring.submit();
            loop {
                // Bound apart, so that the ring is not borrowed in the loop's body.
                let next = self.uring.completion().next();
                let Some(entry) = next else { break };
                self.finish(entry.user_data(), entry.result());
            }
            thread::sleep(Duration::from_micros(50));
        }
        if self.operations.iter().any(Option::is_some) {
            // The kernel still writes to these pages: they may not be used for anything else.
            for (_, served) in self.areas.drain() {
                std::mem::forget(served.area);
            }
            for operation in self.operations.iter_mut().filter_map(Option::take) {
                if let Kind::Connected(socket) = operation.kind {
                    let _ = socket.into_raw_fd();
                }
                std::mem::forget((operation._path, operation._how, operation._address));
            }
        }
    }
}

fn last_error() -> i32 {
    code(&io::Error::last_os_error())
}

fn code(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Bytes of an open file.
fn size_of_file(file: i32) -> Result<i64, i32> {
    // SAFETY: all zeroes are a stat.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and the result is ours.
    match unsafe { libc::fstat(file, &mut stat) } {
        0 => Ok(stat.st_size),
        _ => Err(last_error()),
    }
}

/// Cuts an open file, or makes it longer.
fn truncate(file: i32, bytes: u64) -> Result<i64, i32> {
    let bytes = i64::try_from(bytes).map_err(|_| libc::EINVAL)?;
    // SAFETY: the descriptor is open.
    match unsafe { libc::ftruncate(file, bytes) } {
        0 => Ok(0),
        _ => Err(last_error()),
    }
}

/// What a kernel sends goes out at once: answers come in pieces of a page, and the last one would wait
/// for the other end's delayed acknowledgment otherwise, 40 ms.
fn send_at_once(socket: RawFd) {
    let on: libc::c_int = 1;
    // SAFETY: the value is ours, and as long as is said. Without the option it is only slower.
    unsafe {
        libc::setsockopt(
            socket,
            libc::IPPROTO_TCP,
            libc::TCP_NODELAY,
            (&raw const on).cast(),
            size_of_val(&on) as u32,
        );
    }
}

/// Connects a new socket.
fn connect(operation: &mut Operation, address: u32, port: u16) -> Result<squeue::Entry, i32> {
    // SAFETY: a new socket.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(last_error());
    }
    // SAFETY: it was just made, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    send_at_once(socket.as_raw_fd());
    let to = Box::new(libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: address.to_be(),
        },
        sin_zero: [0; 8],
    });
    let length = size_of::<libc::sockaddr_in>() as u32;
    let descriptor = types::Fd(socket.as_raw_fd());
    let connect = opcode::Connect::new(descriptor, (&raw const *to).cast(), length);
    operation.kind = Kind::Connected(socket);
    operation._address = Some(to);
    Ok(connect.build())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_that_a_server_accepts_send_at_once() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        send_at_once(server.as_raw_fd());
        let _client = std::net::TcpStream::connect(server.local_addr().unwrap()).unwrap();
        assert!(server.accept().unwrap().0.nodelay().unwrap());
    }
}
