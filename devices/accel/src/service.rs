//! The thread that finds workers for slices and notices their end.
//!
//! The pool keeps a worker's connection open until it has seen the process end. The end of a
//! connection therefore is the end of a worker, whatever runs in it. Only then is a slice free for
//! the next one, so a guest has at most as many workers as slices.

use std::{
    cell::RefCell,
    fmt, io, mem,
    net::Shutdown,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use base::note::Seldom;
use device_model::shared_event;
use pci::MsixTable;
use remoting_proto::{
    apis,
    port::{Apis, READY, State},
    wire::{
        api::{ApiId, Spoken},
        hello::{self, Hello, Refused},
    },
};
use remoting_transport::socket::{self, FilesLost};
use vmm_sys_util::eventfd::EventFd;

use super::{
    attach::Attach,
    lend::{Borrowed, Desk, Order},
    line::PortLine,
    page_requests::{Fault, Requests},
    slices::{Claim, Slices},
    window::Window,
};

/// Minimum time between the openings of two slices. It limits the rate of process starts on the
/// host, even if a guest opens and closes slices as fast as it can.
pub const PACE: Duration = Duration::from_millis(20);
/// Delay before another attempt to replace the memory of a closing slice.
const RETRY: Duration = Duration::from_secs(1);
/// Number of attempts to take device pages from the guest, and the time between two of them.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// State and resources of the thread.
pub struct Service {
    /// States.
    pub slices: Arc<Slices>,
    /// Memory.
    pub window: Arc<Window>,
    /// Interrupts.
    pub msix: Arc<MsixTable>,
    /// Interrupts while MSI-X is off.
    pub line: Arc<PortLine>,
    /// Hands slices to workers.
    pub attach: Arc<Attach>,
    /// Lends workers to other threads.
    pub desk: Arc<Desk>,
    /// What the worker of a port for native contexts asks of BAR 4.
    pub requests: Option<RefCell<Requests>>,
    /// Name for log messages.
    pub name: String,
    /// Limits the rate of warnings that a guest can cause at will.
    pub warnings: RefCell<Seldom>,
}

/// Who has received a slice's memory.
enum Link {
    /// Nobody since it was created.
    None,
    /// A worker that has not replied yet.
    Asked(UnixStream),
    /// A worker that serves.
    Serving(UnixStream),
    /// A worker that serves, and with which another thread communicates at present: it is being
    /// saved or replaced.
    Borrowed(UnixStream),
    /// A worker that was told to end.
    Ending(UnixStream),
    /// A worker that has ended. No other worker gets the same memory.
    Gone,
}

impl Link {
    fn stream(&self) -> Option<&UnixStream> {
        match self {
            // The replies of a borrowed worker are not for this thread.
            Self::None | Self::Gone | Self::Borrowed(_) => None,
            Self::Asked(stream) | Self::Serving(stream) | Self::Ending(stream) => Some(stream),
        }
    }

    /// Whether there is a worker that may signal an interrupt.
    fn has_worker(&self) -> bool {
        !matches!(self, Self::None | Self::Gone)
    }

    /// The connection to a worker, however it stands with it.
    fn into_stream(self) -> Option<UnixStream> {
        match self {
            Self::None | Self::Gone => None,
            Self::Asked(stream)
            | Self::Serving(stream)
            | Self::Borrowed(stream)
            | Self::Ending(stream) => Some(stream),
        }
    }

    /// Asks a worker to end, and checks whether it has ended. What is no longer needed is added to
    /// `done`.
    fn finish(&mut self, done: &mut Vec<OwnedFd>) {
        *self = match mem::replace(self, Self::Gone) {
            Self::Asked(stream) | Self::Serving(stream) => {
                // Fails if it has already ended.
                let _ = stream.shutdown(Shutdown::Write);
                Self::Ending(stream)
            }
            // The borrower gives it back when it notices.
            Self::Borrowed(stream) => {
                let _ = stream.shutdown(Shutdown::Write);
                Self::Borrowed(stream)
            }
            Self::Ending(stream) => {
                let lives = match receive(&stream, &mut [0; 8], done) {
                    Ok(count) => count > 0,
                    Err(error) => matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ),
                };
                if lives {
                    Self::Ending(stream)
                } else {
                    done.push(stream.into());
                    Self::Gone
                }
            }
            other => other,
        }
    }
}

/// Receives bytes from a worker. The files that came with them are not wanted: they are added to
/// `done`. (A plain read would close them.)
fn receive(stream: &UnixStream, bytes: &mut [u8], done: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let received = socket::receive(stream, bytes);
    let (count, mut files) = received.or_else(FilesLost::arrived)?;
    done.append(&mut files);
    Ok(count)
}

/// What a worker has said.
enum Heard {
    Nothing,
    /// It serves.
    Ready,
    /// It is gone, and why.
    End(String),
    /// It must end, and why.
    Fault(String),
}

impl Heard {
    /// For an error of its connection.
    fn failed(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Self::Nothing,
            _ => Self::End(Fault::Connection(error).to_string()),
        }
    }
}

impl Service {
    /// Serves until it is told to stop. Closing the connections then ends the workers.
    pub fn run(self) {
        let mut links: Vec<Link> = (0..self.slices.count()).map(|_| Link::None).collect();
        let mut not_before = Instant::now();
        while !self.slices.stopping() {
            self.at_the_desk(&mut links);
            let next = self.step(&mut links, &mut not_before);
            if let Err(error) = self.wait(&links, next) {
                log::error!("{}: no application is served any more: {error}", self.name);
                self.slices.close_all();
                break;
            }
        }
        self.desk.close();
        // Borrowers notice that their workers are of no use any more.
        let hidden = links.iter_mut().all(|link| self.finish(link));
        if hidden {
            let streams = links.into_iter().filter_map(Link::into_stream);
            self.close(streams.map(OwnedFd::from).collect());
        } else {
            // Its worker stays: it would give the guest's pages to others as it ends.
            mem::forget(links);
        }
    }

    /// Asks a worker to end, after the guest has ceased to see anything of its devices: a worker that
    /// is told to end, or has ended, need not have had its pages removed. Returns false if that is
    /// not possible yet.
    fn finish(&self, link: &mut Link) -> bool {
        let hidden = self.hide();
        // Files that it sends, although it was told to end, stay in its connection if there are too
        // many.
        if hidden && !(matches!(link, Link::Ending(_)) && self.is_full()) {
            self.tell_to_end(link);
        }
        hidden
    }

    fn tell_to_end(&self, link: &mut Link) {
        let mut done = Vec::new();
        link.finish(&mut done);
        self.close(done);
    }

    /// Whether a worker for native contexts has sent more files than could be closed.
    fn is_full(&self) -> bool {
        self.requests.is_some() && self.desk.closing.is_full()
    }

    /// Makes sure that the guest sees nothing of devices.
    fn hide(&self) -> bool {
        let Some(requests) = &self.requests else {
            return true;
        };
        let mut requests = requests.borrow_mut();
        for _ in 0..ATTEMPTS {
            match requests.pages().clear() {
                Ok(()) => {
                    let mut done = Vec::new();
                    requests.forget(&mut done);
                    self.close(done);
                    return true;
                }
                Err(error) => self.warn(format_args!(
                    "cannot take a device's pages from the guest yet: {error}"
                )),
            }
            thread::sleep(PAUSE);
        }
        false
    }

    /// Closes files of a worker, and the connections in which there may be more; those of a worker for
    /// native contexts on other threads. Others send none, where the kernel can refuse them.
    fn close(&self, files: Vec<OwnedFd>) {
        if self.requests.is_none() {
            return drop(files);
        }
        if let Err(error) = self.desk.closing.close(files) {
            self.warn(format_args!(
                "what a worker has sent stays open for now: {error}"
            ));
        }
    }

    /// Lends workers, and takes back borrowed ones.
    fn at_the_desk(&self, links: &mut [Link]) {
        for order in self.desk.orders() {
            match order {
                Order::Lend(of, to) => {
                    let borrowed = self.lend(links, of);
                    // If the borrower no longer waits, they are given back immediately.
                    let _ = to.send(borrowed);
                }
                Order::Forget(slice, to) => {
                    if let Some(link @ Link::Borrowed(_)) = links.get_mut(slice) {
                        *link = Link::Gone;
                        // If the borrower no longer waits, the worker ends.
                        let _ = to.send(());
                    }
                }
                Order::Back(slice, stream) => {
                    let Some(link) = links.get_mut(slice) else {
                        continue;
                    };
                    // The worker of a restored slice was never borrowed from this thread.
                    if matches!(link, Link::Borrowed(_) | Link::None) {
                        *link = Link::Serving(stream);
                    }
                }
            }
        }
    }

    fn lend(&self, links: &mut [Link], of: Option<u32>) -> Vec<Borrowed> {
        let mut borrowed = Vec::new();
        if self.requests.is_some() {
            // Its requests are answered here.
            return borrowed;
        }
        for (slice, link) in links.iter_mut().enumerate() {
            let meant = of.is_none_or(|of| of as usize == slice);
            if !meant || self.slices.get(slice) != State::Open {
                continue;
            }
            let Link::Serving(stream) = link else {
                continue;
            };
            let Ok(copy) = stream.try_clone() else {
                continue;
            };
            if let Link::Serving(stream) = mem::replace(link, Link::Borrowed(copy)) {
                borrowed.push(Borrowed::new(slice, stream, Arc::clone(&self.desk)));
            }
        }
        borrowed
    }

    /// Checks every slice once. Returns when to check again, if not upon an event.
    fn step(&self, links: &mut [Link], not_before: &mut Instant) -> Option<Duration> {
        let mut next: Option<Duration> = None;
        let before = self.slices.changes();
        for (slice, link) in links.iter_mut().enumerate() {
            match self.slices.get(slice) {
                State::Opening if matches!(link, Link::None) => {
                    let mut wait = not_before.saturating_duration_since(Instant::now());
                    if wait.is_zero() {
                        *not_before = Instant::now() + PACE;
                        self.open(slice, link);
                        wait = PACE;
                    }
                    if matches!(link, Link::None) {
                        next = Some(next.map_or(wait, |other| other.min(wait)));
                    }
                }
                State::Opening | State::Open => self.listen(slice, link),
                State::Ended => {
                    if !self.finish(link) || self.is_full() {
                        next = Some(RETRY);
                    }
                    if matches!(link, Link::Gone) {
                        self.attach.account.0.clear(slice as u32);
                    }
                }
                State::Closing => {
                    if !self.finish(link) || self.is_full() {
                        next = Some(RETRY);
                    }
                    if matches!(link, Link::Gone) {
                        self.attach.account.0.clear(slice as u32);
                        match self.window.renew(slice) {
                            Ok(()) => *link = Link::None,
                            Err(error) => {
                                self.warn(format_args!("slice {slice} is not free yet: {error}"));
                                next = Some(next.map_or(RETRY, |other| other.min(RETRY)));
                            }
                        }
                    }
                    // Memory that no worker has received is unchanged: a guest that opens and
                    // closes slices faster than workers arrive costs the host no memory and no
                    // mappings.
                    if matches!(link, Link::None) {
                        self.slices.set_claim(slice, Claim::default());
                        self.slices.change(slice, State::Closing, State::Free);
                    }
                }
                State::Free => {}
            }
        }
        if self.slices.changes() != before || self.slices.take_news() {
            self.raise();
        }
        next
    }

    fn warn(&self, what: fmt::Arguments<'_>) {
        if let Some(unsaid) = self.warnings.borrow_mut().due() {
            log::warn!("{}: {what}{unsaid}", self.name);
        }
    }

    /// Notifies the agent that a state has changed.
    fn raise(&self) {
        if self.line.is_wanted() && !self.msix.is_enabled() {
            return self.line.note_change();
        }
        if let Err(error) = self.msix.trigger(0) {
            self.warn(format_args!("cannot raise an interrupt: {error}"));
        }
    }

    /// Passes a slice to a worker.
    fn open(&self, slice: usize, link: &mut Link) {
        if let Some(requests) = &self.requests {
            if self.is_full() {
                // They would be ever more, if files never close.
                self.warn(format_args!(
                    "no worker for slice {slice} yet: too many files of earlier ones do not close"
                ));
                // They may have got no thread.
                return self.close(Vec::new());
            }
            requests.borrow().pages().begin();
        }
        match self.attach.open(slice) {
            Ok(stream) => *link = Link::Asked(stream),
            // The pool is busy: this slice is retried later.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                self.warn(format_args!("no worker for slice {slice}: {error}"));
                self.end(slice, State::Opening);
            }
            Err(error) => {
                self.warn(format_args!(
                    "no worker for slice {slice}: cannot reach the pool at {}: {error}; is {} serving \
                     there?",
                    self.attach.pool().socket.display(),
                    match self.requests {
                        None => "gantry-accel",
                        Some(_) => "gantry-nvidia --vm",
                    }
                ));
                self.end(slice, State::Opening);
            }
        }
    }

    /// Handles a worker's message that it serves, which it sends once, its requests for pages, and its
    /// end.
    fn listen(&self, slice: usize, link: &mut Link) {
        let Some(stream) = link.stream() else { return };
        let (from, why) = match link {
            Link::Asked(_) => (State::Opening, self.hear_first(stream)),
            _ => (State::Open, self.hear(stream)),
        };
        let why = match why {
            Heard::Nothing => return,
            Heard::Ready => {
                self.slices.opened.fetch_add(1, Ordering::Relaxed);
                if let Link::Asked(stream) = mem::replace(link, Link::Gone) {
                    *link = Link::Serving(stream);
                }
                self.slices.change(slice, State::Opening, State::Open);
                return;
            }
            // What it has shown of devices goes before its end is told.
            Heard::End(_) | Heard::Fault(_) if !self.hide() => return,
            Heard::End(why) => {
                let stream = mem::replace(link, Link::Gone).into_stream();
                self.close(stream.map(OwnedFd::from).into_iter().collect());
                why
            }
            Heard::Fault(why) => {
                self.tell_to_end(link);
                why
            }
        };
        self.warn(format_args!("the worker of slice {slice} {why}"));
        self.end(slice, from);
    }

    /// Hears whether a worker serves. What follows that message is left.
    fn hear_first(&self, stream: &UnixStream) -> Heard {
        let mut said = [0; hello::SIZE];
        let (first, rest) = said.split_at_mut(1);
        let mut done = Vec::new();
        let heard = match receive(stream, first, &mut done) {
            Ok(0) => Heard::End("has ended".to_owned()),
            Ok(_) if *first == [READY] => Heard::Ready,
            Ok(_) => {
                // A refusal is sent at once.
                let more = receive(stream, rest, &mut done).unwrap_or(0);
                Heard::Fault(refusal(&said[..=more], self.attach.apis))
            }
            Err(error) => Heard::failed(error),
        };
        self.close(done);
        heard
    }

    /// Hears a worker that serves.
    fn hear(&self, stream: &UnixStream) -> Heard {
        let Some(requests) = &self.requests else {
            return match receive(stream, &mut [0; 1], &mut Vec::new()) {
                Ok(0) => Heard::End("has ended".to_owned()),
                Ok(_) => Heard::Fault("talks too much".to_owned()),
                Err(error) => Heard::failed(error),
            };
        };
        let mut requests = requests.borrow_mut();
        if requests.pages().is_revoked() {
            let why = "has shown the guest pages behind which the host has no memory any longer";
            return Heard::Fault(why.to_owned());
        }
        if self.is_full() {
            return Heard::Fault("sends files faster than they can be closed".to_owned());
        }
        let mut done = Vec::new();
        let served = requests.serve(stream, &mut done);
        self.close(done);
        match served {
            Ok(()) => Heard::Nothing,
            Err(fault @ (Fault::Gone | Fault::Connection(_))) => Heard::End(fault.to_string()),
            Err(fault) => Heard::Fault(fault.to_string()),
        }
    }

    /// Marks a slice as ended, unless the guest has closed it meanwhile.
    fn end(&self, slice: usize, from: State) {
        if self.slices.change(slice, from, State::Ended) {
            self.slices.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The eventfds of the current workers, if neither KVM nor another thread handles them.
    fn interrupts(&self, links: &[Link]) -> Vec<(usize, &EventFd)> {
        if !self.line.is_wanted() || self.msix.is_enabled() {
            return Vec::new();
        }
        let served = links.iter().enumerate();
        let served = served.filter(|(_, link)| link.has_worker());
        let vectors = self.msix.vectors();
        // Vector 0 is the port's own; at most MOST_SLICES follow.
        let event = |slice: usize| vectors?.made_irqfd(slice as u16 + 1);
        served
            .filter_map(|(slice, _)| Some((slice, event(slice)?)))
            .collect()
    }

    /// Waits until a slice has an event, or up to `limit`.
    fn wait(&self, links: &[Link], limit: Option<Duration>) -> io::Result<()> {
        let poll = |fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let interrupts = self.interrupts(links);
        let served = self.line.served();
        // poll ignores negative descriptors.
        let end = served.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let mut polled = vec![poll(self.slices.kick.as_raw_fd()), poll(end)];
        polled.extend(interrupts.iter().map(|(_, event)| poll(event.as_raw_fd())));
        // A worker that has been told to end is heard again once its files have been closed.
        let is_full = self.is_full();
        let heard = links
            .iter()
            .filter(|link| !(is_full && matches!(link, Link::Ending(_))));
        let streams = heard.filter_map(Link::stream);
        polled.extend(streams.map(|stream| poll(stream.as_raw_fd())));
        // Rounded up, so that the time has passed when the wait ends.
        let limit = limit.map_or(-1, |limit| limit.as_millis() as libc::c_int + 1);
        // SAFETY: the array has the given length.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, limit) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        // Fails if the event is not signalled.
        let _ = self.slices.kick.read();
        for ((slice, event), polled) in interrupts.iter().zip(&polled[2..]) {
            if polled.revents != 0 && shared_event::take(event).is_ok() {
                self.line.note(*slice);
            }
        }
        if served.is_some_and(|served| polled[1].revents != 0 && served.read().is_ok()) {
            self.line.update();
        }
        Ok(())
    }
}

/// Describes the message of a worker that refuses to serve a port for these APIs.
fn refusal(said: &[u8], ours: Apis) -> String {
    let native = ours.first() == Some(ApiId::Nvidia);
    let (spoken, program): (&[Spoken], _) = match native {
        true => (&[apis::nvidia::SPOKEN], "gantry-nvidia"),
        false => (&apis::ALL, "gantry-accel"),
    };
    match said.try_into().map(|said| Hello::check(said, spoken)) {
        Ok(Err(Refused::Version { api, ours, theirs })) => format!(
            "speaks version {theirs} of the remoting protocol for {api} and this machine {ours}: install \
             gantry and {program} of one release"
        ),
        Ok(Ok(hello)) if !native => format!(
            "is of a pool for {}, and the application calls another API: name a pool that serves it, too \
             (gantry-accel serve --api opencl,cuda)",
            hello.api
        ),
        _ => "refused it: see its log".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use remoting_proto::{
        apis::opencl::OpenCl,
        port::REFUSED,
        wire::{Api, hello::Version},
    };

    use super::*;

    #[test]
    fn a_worker_of_another_build_or_for_another_api_is_reported_with_what_it_serves() {
        let cl = Apis::one(ApiId::OpenCl);
        let theirs = Version {
            number: OpenCl::VERSION.number + 1,
            ..OpenCl::VERSION
        };
        let hello = Hello {
            version: theirs,
            ..Hello::client::<OpenCl>()
        };
        let text = refusal(&hello.to_bytes(), cl);
        for version in [theirs, OpenCl::VERSION] {
            assert!(text.contains(&version.to_string()), "{text}");
        }
        assert!(refusal(&[REFUSED], cl).contains("log"));
        let text = refusal(&Hello::client::<OpenCl>().to_bytes(), cl);
        assert!(text.contains("a pool for opencl"), "{text}");
    }
}
