//! The connection to the mediator.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::PathBuf,
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use base::Unpoisoned;
use gpu_mediator::gpu::{
    link::{Packet, Packets},
    wire::{Event, Request, VERSION},
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Error, deadline::Deadline, memory::Vram};

/// Timeout for the mediator. A vCPU waits, so it must be less than the 20 s after which a Linux
/// guest considers the vCPU dead.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Timeout for the handshake with a restarted mediator.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// Number of waiting events from which on failed commands are dropped: the registers show one at a
/// time. The others are limited by the number of submissions.
const MOST_EVENTS: usize = 1024;
/// Interval of the attempts to reconnect to a lost mediator.
const RETRY: Duration = Duration::from_millis(500);

/// Messages received from the mediator.
pub struct Inbox {
    events: Mutex<VecDeque<Event>>,
    synced: Mutex<Synced>,
    changed: Condvar,
    /// Readable when there is something to handle.
    pub wake: EventFd,
}

struct Synced {
    /// The last question that was answered.
    number: u32,
    /// When the mediator must have answered the next one, if there is one.
    due: Deadline,
    lost: bool,
    /// The connection has been ended for good.
    ended: bool,
}

impl Synced {
    /// Whether a question has been answered. Numbers wrap around.
    fn has_answered(&self, number: u32) -> bool {
        self.number.wrapping_sub(number) as i32 >= 0
    }
}

impl Inbox {
    fn new() -> io::Result<Self> {
        let synced = Synced {
            number: 0,
            due: Deadline::after(PATIENCE),
            lost: false,
            ended: false,
        };
        Ok(Self {
            events: Mutex::default(),
            synced: Mutex::new(synced),
            changed: Condvar::new(),
            wake: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// The next event.
    pub fn next(&self) -> Option<Event> {
        self.events.lock_unpoisoned().pop_front()
    }

    /// Takes the events of a channel, in order.
    pub fn take_of(&self, channel: u8) -> Vec<Event> {
        let mut events = self.events.lock_unpoisoned();
        let is_its = |event: &Event| match event {
            Event::Done { channel: its }
            | Event::Fault { channel: its, .. }
            | Event::Late { channel: its, .. } => *its == channel,
            _ => false,
        };
        let (its, others) = events.drain(..).partition(is_its);
        *events = others;
        VecDeque::into(its)
    }

    /// Whether a matching event has not been taken yet.
    #[cfg(test)]
    pub fn has(&self, is: impl Fn(&Event) -> bool) -> bool {
        self.events.lock_unpoisoned().iter().any(is)
    }

    /// Whether an event waits.
    pub fn has_more(&self) -> bool {
        !self.events.lock_unpoisoned().is_empty()
    }

    /// Adds an event of the mediator.
    fn add(&self, event: Event) {
        let mut events = self.events.lock_unpoisoned();
        let is_needed = match event {
            // One interrupt is as good as several.
            Event::NonStall => events.back() != Some(&Event::NonStall),
            Event::Command { .. } => events.len() < MOST_EVENTS,
            _ => true,
        };
        if is_needed {
            events.push_back(event);
        }
    }

    /// Whether the mediator is lost.
    pub fn is_lost(&self) -> bool {
        self.synced.lock_unpoisoned().lost
    }

    /// Whether the connection has been ended for good.
    pub fn has_ended(&self) -> bool {
        self.synced.lock_unpoisoned().ended
    }

    /// Waits before the next attempt to reconnect; false if the connection has been ended for good.
    fn pause(&self) -> bool {
        let end = Instant::now() + RETRY;
        let mut synced = self.synced.lock_unpoisoned();
        while !synced.ended {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            let waited = self.changed.wait_timeout(synced, left);
            synced = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        false
    }

    /// Resets the state for a reconnected mediator, which has sent nothing yet. Nobody waits for the
    /// answers to questions up to `number`.
    fn found(&self, number: u32) {
        self.events.lock_unpoisoned().clear();
        let mut synced = self.synced.lock_unpoisoned();
        synced.number = number;
        synced.lost = false;
    }

    /// Handles an answer.
    fn answer(&self, number: u32) {
        let mut synced = self.synced.lock_unpoisoned();
        synced.number = number;
        synced.due = Deadline::after(PATIENCE);
        self.changed.notify_all();
        self.look();
    }

    /// Wakes the worker.
    pub fn look(&self) {
        // Fails only if the counter is full, in which case the worker is awake.
        let _ = self.wake.write(1);
    }

    fn lose(&self) {
        self.synced.lock_unpoisoned().lost = true;
        self.changed.notify_all();
        self.look();
    }
}

/// What a front requests from a mediator.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The mediator's socket.
    pub socket: PathBuf,
    /// Size of VRAM in bytes.
    pub vram: u64,
    /// Maximum number of channels at a time.
    pub channels: u8,
    /// Weight in the sharing of the GPU.
    pub weight: u32,
}

impl Wanted {
    /// Connects to a mediator that may have been restarted, with the kept partition.
    pub fn again(&self, kept: BorrowedFd<'_>) -> Result<Again, Error> {
        self.handshake(Some(kept), HANDSHAKE)
            .map(|(packets, _)| Again(packets))
    }

    /// Performs the handshake with the mediator. With a kept partition, its contents stay;
    /// otherwise a new one is created.
    fn handshake(
        &self,
        kept: Option<BorrowedFd<'_>>,
        patience: Duration,
    ) -> Result<(Packets, Packet), Error> {
        let socket = |source| Error::Socket {
            path: self.socket.clone(),
            source,
        };
        let packets = Packets::connect(&self.socket).map_err(socket)?;
        let hello = Request::Hello {
            version: VERSION,
            vram: self.vram,
            channels: self.channels,
            weight: self.weight,
        };
        let files: Vec<_> = kept.into_iter().collect();
        packets.send(&hello.encode(), &files).map_err(socket)?;
        let mut entry = [libc::pollfd {
            fd: packets.as_fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        // After a hang-up, receiving returns an error.
        base::poll::poll(&mut entry, Some(patience)).map_err(socket)?;
        if entry[0].revents == 0 {
            return Err(socket(io::ErrorKind::TimedOut.into()));
        }
        let packet = packets.receive().map_err(socket)?.ok_or(Error::Refused)?;
        match Event::parse(&packet.bytes)? {
            Event::Welcome {
                version: VERSION,
                vram,
            } if vram == self.vram => Ok((packets, packet)),
            other => Err(Error::Welcome(other)),
        }
    }
}

/// The front's end of the connection.
pub struct Link {
    packets: Packets,
    wanted: Wanted,
    /// Received messages.
    pub inbox: Arc<Inbox>,
    number: u32,
    /// Number of messages sent.
    pub sent: u64,
}

/// A question that the mediator answers when it has executed all earlier requests.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    number: u32,
    end: Deadline,
}

/// A connection to a restarted mediator.
pub struct Again(Packets);

/// The receiving end: the body of a thread.
pub struct Receiver {
    packets: Packets,
    inbox: Arc<Inbox>,
}

impl Receiver {
    /// Receives until the mediator is lost, and then notifies the worker. After a pause, returns
    /// whether to reconnect.
    pub fn receive(&self) -> bool {
        while let Ok(Some(packet)) = self.packets.receive() {
            match Event::parse(&packet.bytes) {
                Ok(Event::Synced { number }) => {
                    self.inbox.answer(number);
                }
                Ok(event) => {
                    self.inbox.add(event);
                    self.inbox.look();
                }
                Err(error) => {
                    log::warn!("gantry-gpu has sent an invalid message: {error}");
                    break;
                }
            }
        }
        self.inbox.lose();
        self.inbox.pause()
    }

    /// Waits before another attempt; returns whether to make it.
    pub fn pause(&self) -> bool {
        self.inbox.pause()
    }
}

impl Link {
    /// Connects, and receives a partition.
    pub fn connect(wanted: Wanted) -> Result<(Self, Vram), Error> {
        let (packets, packet) = wanted.handshake(None, PATIENCE)?;
        let file = packet.files.into_iter().next().ok_or(Error::Refused)?;
        let memory = Vram::new(file.into(), wanted.vram).map_err(Error::Memory)?;
        let link = Self::over(packets, wanted).map_err(Error::Memory)?;
        Ok((link, memory))
    }

    fn over(packets: Packets, wanted: Wanted) -> io::Result<Self> {
        Ok(Self {
            packets,
            wanted,
            inbox: Arc::new(Inbox::new()?),
            number: 0,
            sent: 0,
        })
    }

    /// What is requested from a mediator.
    pub fn wanted(&self) -> Wanted {
        self.wanted.clone()
    }

    /// Creates the receiving end.
    pub fn receiver(&self) -> io::Result<Receiver> {
        Ok(Receiver {
            packets: self.packets.try_clone()?,
            inbox: Arc::clone(&self.inbox),
        })
    }

    /// Continues with a restarted mediator, which has no state.
    pub fn go_on(&mut self, again: Again) -> io::Result<Receiver> {
        self.packets = again.0;
        self.inbox.found(self.number);
        self.receiver()
    }

    /// Whether the mediator is lost.
    pub fn is_lost(&self) -> bool {
        self.inbox.is_lost()
    }

    /// Sends a request. If the mediator is lost, the worker is notified.
    pub fn send(&mut self, request: &Request) {
        self.send_with(request, &[]);
    }

    /// Sends a request with descriptors.
    pub fn send_with(&mut self, request: &Request, files: &[BorrowedFd<'_>]) {
        if self.is_lost() {
            return;
        }
        self.sent += 1;
        if self.packets.send(&request.encode(), files).is_err() {
            self.inbox.lose();
        }
    }

    /// Asks the mediator to answer when it has executed all requests.
    pub fn ask(&mut self) -> Question {
        let mut synced = self.inbox.synced.lock_unpoisoned();
        // While others are unanswered, another question gives the mediator no more time for them.
        if synced.has_answered(self.number) {
            synced.due = Deadline::after(PATIENCE);
        }
        drop(synced);
        self.number = self.number.wrapping_add(1);
        let number = self.number;
        self.send(&Request::Sync { number });
        let end = Deadline::after(PATIENCE);
        Question { number, end }
    }

    /// Waits for the answer until `until`; false if it has not come. A mediator that does not
    /// answer at all is given up as lost, and so is the question.
    pub fn wait(&self, question: Question, until: Deadline) -> bool {
        let mut synced = self.inbox.synced.lock_unpoisoned();
        while !synced.has_answered(question.number) && !synced.lost {
            let patience = question.end.left().min(synced.due.left());
            if patience.is_zero() {
                drop(synced);
                self.drop();
                return true;
            }
            let left = until.left().min(patience);
            if left.is_zero() {
                return false;
            }
            let waited = self.inbox.changed.wait_timeout(synced, left);
            synced = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        true
    }

    /// Waits until the mediator has executed all requests, or is lost.
    pub fn sync(&mut self) {
        let question = self.ask();
        self.wait(question, question.end);
    }

    /// Gives up the mediator as lost.
    pub fn drop(&self) {
        self.packets.shut_down();
        self.inbox.lose();
    }

    /// Ends the connection for good; the receiving thread ends, too.
    pub fn end(&self) {
        self.inbox.synced.lock_unpoisoned().ended = true;
        self.drop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link to a mediator of which this is the other end.
    fn link() -> (Link, Packets) {
        let (there, here) = Packets::pair().unwrap();
        let wanted = Wanted {
            socket: PathBuf::new(),
            vram: 0,
            channels: 1,
            weight: 1,
        };
        (Link::over(here, wanted).unwrap(), there)
    }

    fn now() -> Deadline {
        Deadline::after(Duration::ZERO)
    }

    #[test]
    fn questions_in_a_row_give_a_mediator_that_hangs_no_more_time() {
        let (mut link, _mediator) = link();
        let first = link.ask();
        assert!(!link.wait(first, now()) && !link.is_lost());
        link.inbox.synced.lock_unpoisoned().due = now();
        let second = link.ask();
        assert!(link.wait(second, now()));
        assert!(link.is_lost());
    }

    #[test]
    fn a_mediator_that_answers_has_the_whole_time_for_the_next_answer() {
        let (mut link, _mediator) = link();
        let first = link.ask();
        let second = link.ask();
        link.inbox.synced.lock_unpoisoned().due = now();
        link.inbox.answer(first.number);
        assert!(!link.wait(second, now()));
        link.inbox.answer(second.number);
        assert!(link.wait(second, now()));
        // A time without questions counts for nothing.
        link.inbox.synced.lock_unpoisoned().due = now();
        let third = link.ask();
        assert!(!link.wait(third, now()));
        assert!(!link.is_lost());
    }

    #[test]
    fn a_new_mediator_has_not_answered_what_is_asked_next() {
        let (mut link, _mediator) = link();
        let answered = link.ask();
        // One that answers what it was not asked.
        link.inbox.answer(answered.number.wrapping_add(100));
        assert!(link.wait(answered, now()));
        link.drop();
        let (_mediator, here) = Packets::pair().unwrap();
        link.go_on(Again(here)).unwrap();
        let question = link.ask();
        assert!(!link.wait(question, now()));
    }

    #[test]
    fn failed_commands_keep_out_failed_commands_only() {
        let inbox = Inbox::new().unwrap();
        let command = Event::Command {
            channel: 1,
            status: 0,
            method: 0,
            data: 0,
        };
        for _ in 0..2 * MOST_EVENTS {
            inbox.add(command);
        }
        for event in [Event::NonStall, command, Event::NonStall] {
            inbox.add(event);
        }
        inbox.add(Event::Done { channel: 1 });
        for _ in 0..MOST_EVENTS {
            assert_eq!(inbox.next(), Some(command));
        }
        let rest: Vec<_> = std::iter::from_fn(|| inbox.next()).collect();
        assert_eq!(rest, [Event::NonStall, Event::Done { channel: 1 }]);
    }
}
