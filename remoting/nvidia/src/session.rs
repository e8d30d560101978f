//! A program, as the worker sees it: its requests, and what it may use.

use std::{
    collections::HashSet,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use base::{Unpoisoned, socket::has_unread};
use nvidia_abi::{
    status,
    wire::{Answer, DEVICE, HEADER, MANAGED, MOST, Operation, Request, SLICE, VERSION},
};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt::socket_peercred,
};

use crate::{
    check::Denied,
    device::Node,
    files::{OpenFile, View},
    server::Worker,
    slice::{Holder, Slice},
};

/// The most files of a program.
const MOST_FILES: usize = 1024;

/// How long an answer waits for files on their way to other programs to be read, and how often it tries.
const MOST_WAIT: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(10);

/// For how long the worker looks for the next request before it sleeps. A program that starts makes its calls one close
/// after the other, and in a virtual machine waking a processor takes longer than most of them.
const AWAKE: Duration = Duration::from_micros(50);

/// A failed request: an error number.
pub type Errno = i32;

/// A program.
pub struct Session {
    worker: Arc<Worker>,
    slice: Arc<Slice>,
    /// The user whose program it is.
    user: u32,
    /// Numbers of the files that it may use.
    files: HashSet<u32>,
    /// Where the pieces of the slice begin that it has taken.
    taken: HashSet<u64>,
    is_greeted: bool,
}

/// An answer with what comes along.
#[derive(Default)]
struct Reply {
    answer: Answer,
    file: Option<Along>,
}

/// A file that comes along with an answer.
pub enum Along {
    /// A new one.
    Owned(OwnedFd),
    /// The slice's.
    Slice(Arc<Slice>),
    /// A device file's.
    Device(Arc<OpenFile>),
}

impl AsFd for Along {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Owned(file) => file.as_fd(),
            Self::Slice(slice) => slice.as_fd(),
            Self::Device(file) => file.device(),
        }
    }
}

impl Session {
    /// Serves a program until it disconnects. Its files stay open while somebody has their sockets.
    pub fn serve(worker: &Arc<Worker>, connection: &OwnedFd) -> io::Result<()> {
        let user = socket_peercred(connection)?.uid.as_raw();
        let mut session = Self::new(worker, worker.make_slice()?, user);
        let mut packet = vec![0; HEADER + MOST];
        let mut answer = Vec::with_capacity(HEADER + MOST);
        loop {
            let (length, files) = receive(connection, &mut packet)?;
            if length == 0 {
                return Ok(());
            }
            // The kernel counts the files on their way to all programs together.
            if has_unread(connection) {
                return Err(io::Error::other(
                    "a request before the last answer was read",
                ));
            }
            let file = session.respond(&packet[..length], &files, &mut answer)?;
            send(connection, &answer, file.as_ref().map(Along::as_fd))?;
        }
    }

    /// A user's program that shares this slice with its devices.
    pub fn new(worker: &Arc<Worker>, slice: Arc<Slice>, user: u32) -> Self {
        Self {
            worker: worker.clone(),
            slice,
            user,
            files: HashSet::new(),
            taken: HashSet::new(),
            is_greeted: false,
        }
    }

    /// Answers a packet, with which files came along, by the packet that `answer` becomes, and the file that goes along.
    ///
    /// # Errors
    /// The packet is no request.
    pub fn respond(
        &mut self,
        packet: &[u8],
        files: &[OwnedFd],
        answer: &mut Vec<u8>,
    ) -> io::Result<Option<Along>> {
        let malformed = || io::Error::from(io::ErrorKind::InvalidData);
        let (request, follow) = Request::from_packet(packet).ok_or_else(malformed)?;
        let mut bytes = follow.to_vec();
        let result = self.answer(request, &mut bytes, files);
        let mut reply = result.unwrap_or_else(|error| {
            bytes.clear();
            Reply {
                answer: Answer {
                    result: -error,
                    ..Answer::default()
                },
                file: None,
            }
        });
        // At most MOST.
        reply.answer.length = bytes.len() as u32;
        answer.clear();
        answer.extend_from_slice(&reply.answer.to_bytes());
        answer.extend_from_slice(&bytes);
        Ok(reply.file)
    }

    /// The worker.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// The program's slice.
    pub fn slice(&self) -> &Arc<Slice> {
        &self.slice
    }

    /// The user whose program it is.
    pub fn user(&self) -> u32 {
        self.user
    }

    /// Whether the program may use a file.
    pub fn has(&self, number: u32) -> bool {
        self.files.contains(&number)
    }

    /// A file that the program may use.
    pub fn file(&self, number: u32) -> Option<Arc<OpenFile>> {
        let file = self
            .has(number)
            .then(|| self.worker.files.lock_unpoisoned().get(number));
        file.flatten()
    }

    /// Answers a request, whose bytes are replaced by the answer's.
    fn answer(
        &mut self,
        request: Request,
        bytes: &mut Vec<u8>,
        files: &[OwnedFd],
    ) -> Result<Reply, Errno> {
        if self.is_greeted == (request.operation == Operation::Hello) {
            return Err(libc::EPROTO);
        }
        match request.operation {
            Operation::Hello => {
                if request.a != VERSION.into() {
                    return Err(libc::EPROTONOSUPPORT);
                }
                self.is_greeted = true;
                bytes.clear();
                bytes.extend_from_slice(self.worker.version.as_bytes());
                let answer = Answer {
                    a: self.slice.length(),
                    ..Answer::default()
                };
                // A guest has the window.
                let is_ours = self.worker.machine.is_none();
                Ok(Reply {
                    answer,
                    file: is_ours.then(|| Along::Slice(self.slice.clone())),
                })
            }
            Operation::Open => self.open(bytes),
            Operation::Stat => {
                let node = Node::of_path(bytes).ok_or(libc::ENOENT)?;
                let attributes = self.worker.device.attributes(node).map_err(errno)?;
                bytes.clear();
                Ok(words(attributes.device, attributes.mode.into()))
            }
            Operation::Identify => {
                let [end] = files else {
                    return Err(libc::EINVAL);
                };
                let file = self.worker.files.lock_unpoisoned().of_end(end);
                bytes.clear();
                bytes.extend_from_slice(&file.ok_or(libc::ENOTTY)?.token);
                Ok(Reply::default())
            }
            Operation::Adopt => {
                let file = self.worker.files.lock_unpoisoned().of_token(bytes);
                let file = file.ok_or(libc::EBADF)?;
                self.note_file(file.number)?;
                bytes.clear();
                Ok(words(file.number.into(), file.node.kind().number()))
            }
            Operation::Call => {
                let file = self.file(request.file).ok_or(libc::EBADF)?;
                let command = u32::try_from(request.b).map_err(|_| libc::EINVAL)?;
                let lent = match files {
                    [] => None,
                    [lent] => Some(lent),
                    _ => return Err(libc::EINVAL),
                };
                let result = self.call(&file, command, request.a, lent, bytes)?;
                Ok(Reply {
                    answer: Answer {
                        result,
                        ..Answer::default()
                    },
                    file: None,
                })
            }
            Operation::Map => {
                let file = self.file(request.file).ok_or(libc::EBADF)?;
                bytes.clear();
                self.view(&file, request.a, request.b)
            }
            Operation::Pages => {
                bytes.clear();
                let offset = self
                    .slice
                    .take(request.a, Holder::Program)
                    .ok_or(libc::ENOMEM)?;
                self.taken.insert(offset);
                Ok(words(offset, 0))
            }
            Operation::Return => {
                bytes.clear();
                let start = self.slice.start_of(request.a);
                // Pieces of other programs are not its own to give.
                if let Some(start) = start.filter(|start| self.taken.remove(start)) {
                    self.slice.give(start, Holder::Program);
                }
                Ok(Reply::default())
            }
        }
    }

    fn open(&mut self, bytes: &mut Vec<u8>) -> Result<Reply, Errno> {
        let node = Node::of_path(bytes).ok_or(libc::ENOENT)?;
        let device = self.worker.device.open(node).map_err(errno)?;
        let mut files = self.worker.files.lock_unpoisoned();
        let added = match &self.worker.machine {
            None => files
                .add(node, device)
                .map(|(file, program)| (file, Some(Along::Owned(program)))),
            Some(_) => files.add_of_guest(node, device).map(|file| (file, None)),
        };
        drop(files);
        let (file, program) = added.map_err(errno)?;
        let noted = self.note_file(file.number);
        if let Err(error) = noted.and_then(|()| self.worker.events.watch_end(&file).map_err(errno))
        {
            self.worker.close(file.number);
            return Err(error);
        }
        if let Some(record) = &self.worker.record {
            record.open(&file);
        }
        bytes.clear();
        bytes.extend_from_slice(&file.token);
        let reply = words(file.number.into(), node.kind().number());
        Ok(Reply {
            file: program,
            ..reply
        })
    }

    fn note_file(&mut self, number: u32) -> Result<(), Errno> {
        if self.files.len() >= MOST_FILES {
            let files = self.worker.files.lock_unpoisoned();
            self.files.retain(|number| files.get(*number).is_some());
        }
        if self.files.len() >= MOST_FILES {
            return Err(libc::EMFILE);
        }
        self.files.insert(number);
        Ok(())
    }

    /// Where the program maps a file from.
    fn view(&self, file: &Arc<OpenFile>, offset: u64, length: u64) -> Result<Reply, Errno> {
        // What is shown to a guest is not freed meanwhile.
        let is_placed = self.worker.machine.is_some() && file.left().shows_device();
        let ordered = is_placed.then(|| self.worker.order.lock_unpoisoned());
        let left = file.left();
        let range = left.ranges.iter().find(|range| range.base == offset);
        let (view, offset) = match (range, &left.view) {
            // As the driver: the address is in use.
            (Some(range), _) if range.is_managed => return Err(libc::EINVAL),
            (Some(range), _) => {
                let pages = &range.pages;
                (
                    View::Slice(pages.slice.clone(), pages.offset, pages.length),
                    0,
                )
            }
            (None, Some(view)) => (view.clone(), offset),
            (None, None) if file.node == Node::Uvm => {
                drop(left);
                let made = self.make_managed(file, offset, length);
                return made
                    .map(|at| words(MANAGED, at))
                    .map_err(|denied| match denied {
                        Denied::Errno(error) => error,
                        Denied::Status(status::INVALID_ARGUMENT) => libc::EINVAL,
                        Denied::Status(_) => libc::ENOMEM,
                    });
            }
            (None, None) => return Err(libc::ENOMEM),
        };
        drop(left);
        let end = offset.checked_add(length).ok_or(libc::EINVAL)?;
        let (View::Slice(_, _, most) | View::Device { length: most, .. }) = &view;
        if length == 0 || end > most.checked_next_multiple_of(4096).ok_or(libc::EINVAL)? {
            return Err(libc::EINVAL);
        }
        match view {
            // Pages of another program's slice are not shown.
            View::Slice(slice, start, _) if Arc::ptr_eq(&slice, &self.slice) => {
                Ok(words(SLICE, start + offset))
            }
            View::Slice(..) => Err(libc::EACCES),
            View::Device {
                length,
                is_writable,
            } => match &self.worker.machine {
                None => Ok(Reply {
                    file: Some(Along::Device(file.clone())),
                    ..words(DEVICE, offset)
                }),
                // Another thread has just changed what the file shows.
                Some(_) if ordered.is_none() => Err(libc::ENOMEM),
                Some(machine) => {
                    let mut objects = self.worker.objects.lock_unpoisoned();
                    let (mapped, control) = objects.mapped_from(file.number).ok_or(libc::ENOMEM)?;
                    let control = self.worker.files.lock_unpoisoned().get(control);
                    let control = control.ok_or(libc::ENOMEM)?;
                    let place = match mapped.place.take() {
                        Some(place) => place,
                        None => machine
                            .place(file.device(), control.device(), length, is_writable)
                            .map_err(errno)?,
                    };
                    let at = mapped.place.insert(place).offset();
                    Ok(words(DEVICE, at + offset))
                }
            },
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.slice.is_common() {
            // It ends with the program, whose memory may still be there: the program may go on with another worker.
            return;
        }
        for offset in self.taken.drain() {
            self.slice.give(offset, Holder::Program);
        }
    }
}

fn words(a: u64, b: u64) -> Reply {
    Reply {
        answer: Answer {
            a,
            b,
            ..Answer::default()
        },
        file: None,
    }
}

/// The number of an error of the system.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub fn errno(error: io::Error) -> Errno {
    error.raw_os_error().unwrap_or(libc::EIO)
}

fn receive(connection: &OwnedFd, packet: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let asleep = Instant::now() + AWAKE;
    let mut flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = loop {
        let mut vectors = [IoSliceMut::new(packet)];
        match recvmsg(connection, &mut vectors, &mut ancillary, flags) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) if flags.contains(RecvFlags::DONTWAIT) => {
                if Instant::now() < asleep {
                    // Perhaps the program waits for this processor.
                    thread::yield_now();
                } else {
                    flags.remove(RecvFlags::DONTWAIT);
                }
            }
            result => break result?,
        }
    };
    let mut files = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    if received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((received.bytes, files))
}

fn send(connection: &OwnedFd, answer: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if let Some(file) = &file {
        // The space is for one file.
        ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(file)));
    }
    let vectors = [IoSlice::new(answer)];
    let mut waited = Duration::ZERO;
    loop {
        match sendmsg(connection, &vectors, &mut ancillary, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            // Too many files are on their way to programs of the worker's user.
            Err(rustix::io::Errno::TOOMANYREFS) if waited < MOST_WAIT => {
                thread::sleep(RETRY);
                waited += RETRY;
            }
            result => return Ok(result.map(|_| ())?),
        }
    }
}
