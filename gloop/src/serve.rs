//! The service that handles the blocks' requests: one thread, which polls the rings of all blocks
//! and passes file and socket operations to io_uring. Data goes directly into the pages that the
//! GPU reads, without a copy.
//!
//! A stopped kernel is served as well: its answers wait in its rings.

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

/// The maximum number of files, sockets and servers that an application may have open.
const HANDLES: usize = 4096;
/// The number of entries of the io_uring.
const DEPTH: u32 = 1024;
/// How long the thread polls for work before it pauses.
const SPIN: Duration = Duration::from_millis(1);
/// The maximum pause.
const PAUSE: Duration = Duration::from_millis(1);
/// The maximum pause while a kernel runs, which ends its turn when all of its blocks have waited
/// for 100 us.
const SHORT: Duration = Duration::from_micros(20);
/// How long the kernel may take to release pages that are in use when a job ends.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the service needs of a job: the rings and pages of its blocks.
#[derive(Debug)]
pub struct Area {
    /// The blocks' rings, one [`crate::layout::Rings`] each.
    pub rings: Memory,
    /// The blocks' pages.
    pub pages: Memory,
    /// The number of blocks.
    pub blocks: usize,
    /// What a block may use.
    pub limits: Limits,
    /// Notified when there is an answer.
    pub answered: Answered,
}

/// Counts answers, for a thread that waits for the next one while its kernel does not run.
#[derive(Debug, Default)]
pub struct Answered {
    count: Mutex<u64>,
    more: Condvar,
}

impl Answered {
    /// The number of answers so far.
    pub fn count(&self) -> u64 {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.more.notify_all();
    }

    /// Waits until there are more than `seen`, for at most `patience`. Returns whether there are.
    pub fn wait(&self, seen: u64, patience: Duration) -> bool {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .more
            .wait_timeout_while(count, patience, |count| *count == seen);
        let (count, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *count != seen
    }
}

/// Which files may be opened, and where servers listen.
#[derive(Clone, Debug)]
pub struct Reach {
    /// Only files in this folder can be opened. None: all files that the process may open.
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

/// The service's thread, which ends together with its owner.
#[derive(Debug)]
pub struct Service {
    orders: Option<mpsc::Sender<Order>>,
    /// Whether a kernel runs: the thread then stays awake.
    awake: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Service {
    /// Starts the service.
    ///
    /// # Errors
    /// There is no io_uring, no such folder, or the thread could not be created.
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

    /// Serves an area until [`Self::remove`]. Returns its number.
    ///
    /// # Errors
    /// The service's thread has ended.
    pub fn add(&self, area: Arc<Area>) -> io::Result<usize> {
        self.ask(|answer| Order::Add(area, answer))
    }

    /// Stops serving an area: nothing in it is written to after this.
    ///
    /// # Errors
    /// The service's thread has ended.
    pub fn remove(&self, area: usize) -> io::Result<()> {
        self.ask(|answer| Order::Remove(area, answer))
    }

    /// The port that a server listens on.
    ///
    /// # Errors
    /// The service's thread has ended, or there is no such server.
    pub fn port(&self, server: u32) -> io::Result<u16> {
        let port = self.ask(|answer| Order::Port(server, answer))?;
        port.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Sets whether a kernel runs.
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
        // The thread ends when nobody can give it orders any more.
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

    /// The descriptor of a listening socket.
    fn server(&self) -> Option<i32> {
        match self {
            Self::Server(server) => Some(server.as_raw_fd()),
            _ => None,
        }
    }
}

/// How the kernel's result is processed.
#[derive(Debug)]
enum Kind {
    /// It is the answer.
    Plain,
    /// A file descriptor, for which a name is allocated.
    File,
    /// A socket, for which a name is allocated.
    Socket,
    /// A socket that is being connected, for which a name is then allocated.
    Connected(OwnedFd),
}

/// An operation that the kernel is processing.
#[derive(Debug)]
struct Operation {
    area: usize,
    block: usize,
    tag: u32,
    kind: Kind,
    /// Memory that the kernel reads meanwhile.
    _path: Option<CString>,
    _how: Option<Box<types::OpenHow>>,
    _address: Option<Box<libc::sockaddr_in>>,
}

/// An area and the host's counters for it, in private memory.
struct Served {
    area: Arc<Area>,
    blocks: Vec<Block>,
    /// The number of operations that the kernel is processing.
    busy: usize,
    /// Set when the area gets no more answers.
    leaving: Option<mpsc::Sender<()>>,
    /// Whether its pages are among the kernel's registered buffers.
    registered: bool,
}

#[derive(Default)]
struct Block {
    requests: Consumer<16>,
    completions: Producer<4>,
    /// The number of requests that were not answered yet. No more are read than there are slots.
    open: u32,
}

struct Server {
    uring: IoUring,
    areas: HashMap<usize, Served>,
    next_area: usize,
    handles: Vec<Option<Handle>>,
    /// Handles that are closed, which entries may name that the kernel has not taken.
    closing: Vec<Handle>,
    operations: Vec<Option<Operation>>,
    free: Vec<usize>,
    folder: Option<OwnedFd>,
    listen: Ipv4Addr,
    /// Whether the kernel supports registered buffers.
    buffers: bool,
}

/// The maximum number of registered buffers, one per job.
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
            closing: Vec::new(),
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
            // A kernel's first requests are expected right after it starts.
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

    /// Drops a leaving area, once the kernel has no operation for it any more.
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
                // SAFETY: unregisters the buffer, which no operation in flight uses.
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
        // One place for each area. If there are more areas at a time, the later ones have none.
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
        // SAFETY: the memory is the area's, which exists until the buffer is unregistered.
        unsafe {
            let submitter = self.uring.submitter();
            submitter
                .register_buffers_update(place, &[pages], None)
                .is_ok()
        }
    }

    /// Polls everything once. Returns whether there was something to do.
    fn turn(&mut self) -> bool {
        let mut busy = false;
        let numbers: Vec<_> = self.areas.keys().copied().collect();
        for number in numbers {
            busy |= self.look(number);
        }
        if !self.uring.submission().is_empty() {
            // Entries that could not be submitted remain, and are tried again.
            self.submit();
        }
        loop {
            // Bound separately, so that the ring is not borrowed in the loop's body.
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
                // No room now; tries again later.
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

    /// Starts a request. Returns the answer, if it is available immediately.
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
                // Wakes operations that wait for it.
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
                // Accepted sockets inherit the option.
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

    /// Opens a file whose path is `data`.
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

    /// The address of a block's data, and its buffer if that is registered.
    fn page(&self, area: usize, block: usize, data: Data) -> Result<(*mut u8, Option<u16>), i32> {
        let served = self.areas.get(&area).ok_or(libc::EFAULT)?;
        let limits = served.area.limits;
        let index = block * limits.page_count as usize + data.page as usize;
        let at = index * limits.page_bytes as usize;
        if at + data.length as usize > served.area.pages.bytes() {
            return Err(libc::EFAULT);
        }
        let buffer = served.registered.then_some((area as u32 % BUFFERS) as u16);
        // Within the pages, as checked above.
        Ok((served.area.pages.at().wrapping_add(at), buffer))
    }

    fn path(&self, area: usize, block: usize, data: Data) -> Result<CString, i32> {
        if data.length as usize >= libc::PATH_MAX as usize {
            return Err(libc::ENAMETOOLONG);
        }
        let (at, _) = self.page(area, block, data)?;
        let mut path = vec![0; data.length as usize];
        // SAFETY: within the pages. The device may write concurrently, so the bytes may be
        // arbitrary: they are copied once, before they are examined.
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

    /// Closes a handle that was looked up before.
    fn close(&mut self, name: Name) -> Result<Option<i64>, i32> {
        self.closing.extend(self.handles[name.0 as usize].take());
        self.submit();
        Ok(Some(0))
    }

    /// Submits what is queued. The kernel may not take all of it now.
    fn submit(&mut self) {
        let _ = self.uring.submit();
        if self.uring.submission().is_empty() {
            // Nothing names these descriptors any more, whose numbers are reused from now on.
            self.closing.clear();
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: what the entry points to is kept by its operation, or by the area that counts it,
        // until the kernel has answered.
        while unsafe { self.uring.submission().push(entry) }.is_err() {
            self.submit();
        }
    }

    /// Handles the kernel's answer.
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
            // SAFETY: the kernel has just created it for us.
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

    /// Cancels all operations, and waits for the kernel to release everything.
    fn end(&mut self) {
        let cancel = opcode::AsyncCancel2::new(types::CancelBuilder::any()).build();
        self.push(&cancel.user_data(u64::MAX));
        let begun = Instant::now();
        while self.operations.iter().any(Option::is_some) && begun.elapsed() < PATIENCE {
            let _ = self.uring.submit();
            loop {
                // Bound separately, so that the ring is not borrowed in the loop's body.
                let next = self.uring.completion().next();
                let Some(entry) = next else { break };
                self.finish(entry.user_data(), entry.result());
            }
            thread::sleep(Duration::from_micros(50));
        }
        if self.operations.iter().any(Option::is_some) {
            // The kernel may still write to these pages, which therefore must not be reused.
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

/// The size of an open file in bytes.
fn size_of_file(file: i32) -> Result<i64, i32> {
    // SAFETY: all zeroes are a valid stat.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and the result is a local.
    match unsafe { libc::fstat(file, &mut stat) } {
        0 => Ok(stat.st_size),
        _ => Err(last_error()),
    }
}

/// Truncates or extends an open file.
fn truncate(file: i32, bytes: u64) -> Result<i64, i32> {
    let bytes = i64::try_from(bytes).map_err(|_| libc::EINVAL)?;
    // SAFETY: the descriptor is open.
    match unsafe { libc::ftruncate(file, bytes) } {
        0 => Ok(0),
        _ => Err(last_error()),
    }
}

/// Disables Nagle's algorithm for a socket: answers are sent in pieces of a page, and the last one
/// would otherwise wait for the peer's delayed acknowledgment, 40 ms.
fn send_at_once(socket: RawFd) {
    let on: libc::c_int = 1;
    // SAFETY: the value is a local of the given size. Without the option it is only slower.
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
    // SAFETY: it was just created, and nobody else has it.
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
    use std::io::Read;

    use super::*;

    #[test]
    fn sockets_that_a_server_accepts_send_at_once() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        send_at_once(server.as_raw_fd());
        let _client = std::net::TcpStream::connect(server.local_addr().unwrap()).unwrap();
        assert!(server.accept().unwrap().0.nodelay().unwrap());
    }

    #[test]
    fn a_file_that_an_entry_names_stays_open_until_the_kernel_has_taken_the_entry() {
        let reach = Reach {
            folder: None,
            listen: Ipv4Addr::LOCALHOST,
        };
        let mut server = match Server::new(&reach) {
            Ok(server) => server,
            Err(error) => return println!("skipped: there is no io_uring: {error}"),
        };
        let (mut ours, theirs) = std::io::pipe().unwrap();
        let descriptor = theirs.as_raw_fd();
        let name = server.name(Handle::File(theirs.into())).unwrap();
        // The kernel takes no more entries in this call after one that is wrong: there is nothing to limit.
        let time = types::Timespec::new();
        server.push(&opcode::LinkTimeout::new(&raw const time).build());
        let text = b"x";
        let write = opcode::Write::new(types::Fd(descriptor), text.as_ptr(), 1).build();
        server.push(&write);
        server.close(Name(name as u32)).unwrap();
        assert_eq!(server.closing.len(), 1);
        server.submit();
        assert!(server.closing.is_empty());
        // All of what was written before its end.
        let mut read = String::new();
        ours.read_to_string(&mut read).unwrap();
        assert_eq!(read, "x");
    }
}
