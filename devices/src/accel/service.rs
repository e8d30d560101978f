//! The thread that finds workers for slices and sees them end.

use std::{
    io::{self, Read},
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use gantry_remoting::{
    port::{Attachment, READY, State},
    transport::socket,
};
use vmm_sys_util::eventfd::EventFd;

use super::{slices::Slices, window::Window};
use crate::pci::MsixTable;

/// The shortest time between two slices' openings: a guest that opens and closes them as fast as
/// it can has the host start this many processes and not more.
pub const PACE: Duration = Duration::from_millis(20);
/// How long a slice whose memory could not be replaced stays closed before that is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// What the thread works with.
pub struct Service {
    /// States.
    pub slices: Arc<Slices>,
    /// Memory.
    pub window: Arc<Window>,
    /// Doorbells, one for each slice.
    pub doorbells: Arc<[EventFd]>,
    /// Interrupts.
    pub msix: Arc<MsixTable>,
    /// Where the worker pool listens.
    pub socket: PathBuf,
    /// What every worker is told.
    pub attachment: Attachment,
    /// Name in the log.
    pub name: String,
}

/// A slice's worker, as far as there is one.
enum Link {
    None,
    /// It has not answered yet.
    Asked(UnixStream),
    /// It serves.
    Serving(UnixStream),
}

impl Link {
    fn stream(&self) -> Option<&UnixStream> {
        match self {
            Self::None => None,
            Self::Asked(stream) | Self::Serving(stream) => Some(stream),
        }
    }
}

impl Service {
    /// Serves until it is told to stop. The end of its connections ends the workers.
    pub fn run(self) {
        let mut links: Vec<Link> = (0..self.slices.count()).map(|_| Link::None).collect();
        let mut not_before = Instant::now();
        while !self.slices.stopping() {
            let next = self.step(&mut links, &mut not_before);
            if let Err(error) = self.wait(&links, next) {
                log::error!("{}: no application is served any more: {error}", self.name);
                self.slices.close_all();
                return;
            }
        }
    }

    /// Looks at every slice once. When to look again, if that is not up to an event.
    fn step(&self, links: &mut [Link], not_before: &mut Instant) -> Option<Duration> {
        let mut next: Option<Duration> = None;
        let before = self.slices.changes();
        for (slice, link) in links.iter_mut().enumerate() {
            match self.slices.get(slice) {
                State::Opening if link.stream().is_none() => {
                    let mut wait = not_before.saturating_duration_since(Instant::now());
                    if wait.is_zero() {
                        *not_before = Instant::now() + PACE;
                        self.open(slice, link);
                        wait = PACE;
                    }
                    if link.stream().is_none() {
                        next = Some(next.map_or(wait, |other| other.min(wait)));
                    }
                }
                State::Opening | State::Open => self.listen(slice, link),
                State::Closing => {
                    *link = Link::None;
                    if let Err(error) = self.window.renew(slice) {
                        log::warn!("{}: slice {slice} is not free yet: {error}", self.name);
                        next = Some(next.map_or(RETRY, |other| other.min(RETRY)));
                    } else {
                        self.slices.change(slice, State::Closing, State::Free);
                    }
                }
                State::Free | State::Ended => *link = Link::None,
            }
        }
        if self.slices.changes() != before {
            self.raise();
        }
        next
    }

    /// Tells the agent that a state has changed.
    fn raise(&self) {
        if let Err(error) = self.msix.trigger(0) {
            log::warn!("{}: cannot raise an interrupt: {error}", self.name);
        }
    }

    /// Hands a slice to a worker.
    fn open(&self, slice: usize, link: &mut Link) {
        match self.attach(slice) {
            Ok(stream) => *link = Link::Asked(stream),
            // The pool has many to serve, and this slice comes later.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                log::warn!(
                    "{}: no worker for slice {slice}: cannot reach the pool at {}: {error}; is \
                     gantry-accel serving there?",
                    self.name,
                    self.socket.display()
                );
                self.end(slice, State::Opening);
            }
        }
    }

    fn attach(&self, slice: usize) -> io::Result<UnixStream> {
        // Vector 0 is the port's own.
        let vector = slice as u16 + 1;
        let interrupt = self
            .msix
            .vectors()
            .ok_or_else(|| io::Error::other("there are no interrupt vectors"))?
            .irqfd(vector)?;
        let doorbell = self
            .doorbells
            .get(slice)
            .ok_or_else(|| io::Error::other("there is no doorbell"))?;
        // What was rung for an application before is not for this one.
        let _ = doorbell.read();
        let stream = socket::connect(&self.socket)?;
        let bytes = self.attachment.to_bytes();
        self.window
            .with_file(slice, |memory| {
                socket::send(
                    &stream,
                    &bytes,
                    &[memory, borrowed(doorbell), borrowed(interrupt)],
                )
            })
            .ok_or_else(|| io::Error::other("there is no such slice"))??;
        Ok(stream)
    }

    /// Hears what a worker has to say: that it serves, once, and its end.
    fn listen(&self, slice: usize, link: &mut Link) {
        let Some(stream) = link.stream() else { return };
        let mut byte = [0];
        let heard = match (&mut &*stream).read(&mut byte) {
            Ok(0) => Err("has ended".to_owned()),
            Ok(_) => Ok(byte[0]),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return,
                _ => Err(error.to_string()),
            },
        };
        match (heard, std::mem::replace(link, Link::None)) {
            (Ok(READY), Link::Asked(stream)) => {
                self.slices.opened.fetch_add(1, Ordering::Relaxed);
                *link = Link::Serving(stream);
                self.slices.change(slice, State::Opening, State::Open);
            }
            (Ok(_), Link::Asked(_)) => {
                log::warn!(
                    "{}: the worker of slice {slice} refused it: see its log",
                    self.name
                );
                self.end(slice, State::Opening);
            }
            (Ok(_), _) => {
                log::warn!("{}: the worker of slice {slice} talks too much", self.name);
                self.end(slice, State::Open);
            }
            (Err(why), Link::Asked(_)) => {
                log::warn!("{}: the worker of slice {slice}: {why}", self.name);
                self.end(slice, State::Opening);
            }
            (Err(why), _) => {
                log::warn!("{}: the worker of slice {slice}: {why}", self.name);
                self.end(slice, State::Open);
            }
        }
    }

    /// A slice has no worker any more, unless the guest has closed it meanwhile.
    fn end(&self, slice: usize, from: State) {
        if self.slices.change(slice, from, State::Ended) {
            self.slices.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until a slice has something new, or for `limit`.
    fn wait(&self, links: &[Link], limit: Option<Duration>) -> io::Result<()> {
        let poll = |fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let mut polled = vec![poll(self.slices.kick.as_raw_fd())];
        let streams = links.iter().filter_map(Link::stream);
        polled.extend(streams.map(|stream| poll(stream.as_raw_fd())));
        // Rounded up, so that the time has passed when the wait ends.
        let limit = limit.map_or(-1, |limit| limit.as_millis() as libc::c_int + 1);
        // SAFETY: the array is as long as is said.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, limit) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        // An event that is not signalled says so.
        let _ = self.slices.kick.read();
        Ok(())
    }
}

fn borrowed(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the event is open as long as the result borrows it.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}
