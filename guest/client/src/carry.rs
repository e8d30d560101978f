//! Moves this process from the worker that serves it to another one, which may be anywhere: another process of this
//! machine, the host's, or another host's.
//!
//! ```text
//!   1  connect to the other worker                                           nothing has changed
//!   2  in rounds, copy new state and create it there                         everything continues
//!   3  stop sending calls by holding the lock; if much is new: back to 2     calls wait
//!   4  the worker saves the rest; its image is read and written there, part by part
//!   5  stop reading answers and writing to the window
//!   6  copy the used parts of the window; the other worker restores
//!   7  map the other window's memory in place of this one's, and take over the other's ring ends,
//!      doorbell and connection                                               the worker is left
//! ```
//!
//! Until the other worker is asked to restore, whoever gave the order may withdraw it. Everything then continues as
//! before.
//!
//! The window keeps its addresses. A failure before step 7 costs only time: the old worker still serves the process,
//! and everything continues with it. After step 7 the old connection is closed, which ends the old worker. No thread
//! waits for anything left in its rings: every call before the save was executed, and either answered or saved as a
//! waiting call.
//!
//! Memory that the application has pointers to cannot be copied while the application may write to it: mapped memory,
//! shared virtual memory, a heap in the window. The process then stays where it is, or the move waits for as long as
//! the order allows.
//!
//! Without an order, this costs one load for each call that waits, and two atomic operations for each stretch of memory
//! copied into the window, on top of the copy itself.

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{Arc, MutexGuard, mpsc},
    thread,
    time::{Duration, Instant},
};

use base::{Unpoisoned, lock::UnpoisonedRw};
use remoting_proto::wire::{
    Blob,
    messages::{Call, WindowRange},
};
use remoting_relocation::rounds::{APPLICATION, Rounds, TIME};
use remoting_transport::{
    control::{Failure, LONG, SILENT, SOON, Worker},
    mapping::Error,
    order::{self, Order, PARKED},
};

use crate::{
    connect::{FromAnother, Opened},
    driver::Driver,
    link::{Due, Link, Outgoing, Reader, ends},
    park,
    peer::Seat,
    stage::{HostRegion, Stages},
};

/// The polling interval for messages and changes.
const LOOK: Duration = Duration::from_micros(100);
/// The maximum number of image bytes to copy at a time.
pub(crate) const PART: u64 = 4 << 20;
/// The same while the application runs: its calls wait while the worker copies a part.
const SMALL_PART: u64 = 512 << 10;

/// A driver whose state can be moved from one worker to another.
pub trait Carried: Driver {
    /// The call that saves what is new since the last round, while other calls are executed. The answer is the size of
    /// the image in bytes, or the reason for a failure.
    fn precopy(round: u32) -> impl Call<Answer = (u64, Blob)>;
    /// The call that saves what is new since this many rounds. The answer is as for [`precopy`](Self::precopy). If
    /// memory objects of more than `most` bytes were created since, nothing is saved: the answer is their size, and a
    /// reason.
    fn save(patience: u64, rounds: u32, most: u64) -> impl Call<Answer = (u64, Blob)>;
    /// The call that reads a part of the image.
    fn read(at: u64, to: WindowRange) -> impl Call<Answer = Blob>;
    /// The call that writes a part of the image.
    fn write(at: u64, from: WindowRange) -> impl Call<Answer = Blob>;
    /// The call that creates the state contained in one round.
    fn prepare() -> impl Call<Answer = Blob>;
    /// The call that creates the rest of the state.
    fn restore() -> impl Call<Answer = Blob>;
    /// The call that compares the devices with those that the application has been told about.
    fn compare() -> impl Call<Answer = Blob>;
    /// What prevents the window's memory from being replaced now, if anything. No new obstacle can appear while no call
    /// can be sent.
    fn pinned(state: &Self::State) -> Option<&'static str>;
}

/// Turns a worker's refusal into an error that contains its reason.
fn refusal(Blob(why): Blob) -> Result<(), String> {
    match why.is_empty() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&why).into_owned()),
    }
}

/// The error for one of the two workers having ended.
fn gone<S>(which: &'static str) -> impl Fn(S) -> String {
    move |_| format!("{which} does not answer")
}

pub(crate) const NOT_SHARED: &str = "parts of its window are in use, which a stream does not share";
const OLD: &str = "the worker that serves it";
const NEW: &str = "the worker that was to serve it";

/// Moves the process to the worker named in the order, which arrived on `orders`. Returns the stream for further orders
/// if the process was redirected to another one.
///
/// # Errors
/// The process stays where it is, for the reason returned.
pub fn change_seat<D: Carried>(
    link: &Link<D>,
    order: &Order,
    orders: &UnixStream,
) -> Result<Option<UnixStream>, String> {
    let patience = order.patience.min(LONG);
    // Meanwhile no listener notices the worker's end or its messages.
    link.be_deaf(true);
    let outcome = match order.to == PARKED {
        true => park::park(link, order, orders),
        false => open(link, &order.to, Instant::now() + order.opening.min(LONG))
            .and_then(|opened| go(link, &opened, patience, orders).map(|()| opened.orders)),
    };
    link.be_deaf(false);
    outcome
}

/// Connects to the worker at this address. Messages of the current worker are handled meanwhile.
pub(crate) fn open<D: Carried>(link: &Link<D>, to: &str, until: Instant) -> Result<Opened, String> {
    let opening = || {
        let window = link.window.size();
        let from = Some(FromAnother { window, until });
        Opened::to::<D>(to, &link.environment, from)
            .map_err(|error| format!("it cannot connect with {to}: {error}"))
    };
    beside(opening, || hear(link)).unwrap_or_else(|| Err(format!("it cannot connect with {to}")))
}

/// Does something in a thread of its own, and something else again and again until that is done. `None` if the thread
/// panics.
fn beside<T: Send>(
    work: impl FnOnce() -> Result<T, String> + Send,
    meanwhile: impl Fn(),
) -> Option<Result<T, String>> {
    thread::scope(|scope| {
        // Like the listener, this thread blocks all signals.
        let working = match thread::Builder::new().spawn_scoped(scope, work) {
            Ok(working) => working,
            Err(error) => return Some(Err(format!("it cannot start a thread: {error}"))),
        };
        while !working.is_finished() {
            meanwhile();
            thread::sleep(LOOK);
        }
        working.join().ok()
    })
}

/// Reads messages of the worker that no call waits for. Does not get in the way of waiting threads if no such message
/// is expected.
fn hear<D: Driver>(link: &Link<D>) {
    if link.expects() || D::expects_messages(&link.state) {
        link.try_read_pending();
    }
}

/// Creates the connection to the other worker, whose window must be at least as large as this one.
pub(crate) fn connection<D: Carried>(link: &Link<D>, opened: &Opened) -> Result<Link<D>, String> {
    // No thread waits for callbacks of this connection.
    let (due, _) = mpsc::channel();
    let environment = link.environment.clone();
    let there = Link::<D>::new(opened.window.clone(), opened.seat.clone(), due, environment);
    if there.window.data() != link.window.data() || there.window.size() < link.window.size() {
        return Err(format!(
            "the window there has {} MiB, and this process's {}: serve windows of one size \
             (gantry-accel --window, window= and shared= of --accel)",
            there.window.size() >> 20,
            link.window.size() >> 20
        ));
    }
    there.be_deaf(true);
    Ok(there)
}

fn go<D: Carried>(
    link: &Link<D>,
    opened: &Opened,
    patience: Duration,
    orders: &UnixStream,
) -> Result<(), String> {
    let there = connection(link, opened)?;
    let both = Both {
        link,
        there: &there,
        orders: Some(orders),
        end: Instant::now() + LONG,
    };
    // When this is dropped, whichever of the two workers is no longer in use ends: nothing else keeps a seat.
    let outcome = both
        .compare(false)
        .and_then(|()| go_in_rounds(&both, opened, patience));
    if outcome.is_err() {
        both.give_up();
    }
    outcome
}

/// Moves everything. What can be copied while the application runs is copied in rounds, which have a time limit of
/// their own.
fn go_in_rounds<D: Carried>(
    both: &Both<'_, D>,
    opened: &Opened,
    patience: Duration,
) -> Result<(), String> {
    let mut rounds = Rounds::new(APPLICATION);
    let last = Instant::now() + TIME;
    loop {
        both.precopy(&mut rounds, last)?;
        let until = Instant::now().min(both.end) + patience;
        // When everything waits: that may have taken the time of another round.
        let since = || {
            let left = last.saturating_duration_since(Instant::now());
            (rounds.count(), rounds.most_new(left, u64::MAX))
        };
        if carry(both, opened, since, until)?.is_some() {
            return Ok(());
        }
    }
}

/// The connections to both workers.
pub(crate) struct Both<'a, D: Driver> {
    /// The connection to the current worker.
    pub link: &'a Link<D>,
    /// The connection to the worker that takes over.
    pub there: &'a Link<D>,
    /// The stream that the order came from and that withdraws it, if there was an order.
    pub orders: Option<&'a UnixStream>,
    /// The deadline for all answers.
    pub end: Instant,
}

impl<'a, D: Carried> Both<'a, D> {
    /// Fails if the order was withdrawn. Not called once the other worker is to continue.
    pub fn check_wanted(&self) -> Result<(), String> {
        match self.orders.is_some_and(order::is_taken_back) {
            true => Err("who has asked for its move is gone".to_owned()),
            false => Ok(()),
        }
    }

    /// Waits for the lock under which calls are sent, and until nothing is in the way.
    pub fn hold(
        &self,
        until: Instant,
        mut in_the_way: impl FnMut() -> Option<&'static str>,
    ) -> Result<MutexGuard<'a, Outgoing>, String> {
        let link = self.link;
        loop {
            self.check_wanted()?;
            // The lock's holder may wait for a worker that in turn waits for its messages to be read.
            let why = if let Ok(outgoing) = link.outgoing.try_lock() {
                match in_the_way() {
                    None => return Ok(outgoing),
                    Some(why) => why,
                }
            } else {
                "its calls do not end"
            };
            if Instant::now() >= until {
                return Err(why.to_owned());
            }
            // A callback may be what unmaps.
            link.try_read_pending();
            if !link.still_alive() {
                return Err(gone(OLD)(()));
            }
            thread::sleep(LOOK);
        }
    }

    /// Asks the current worker: with `held`, by the thread that blocks all other calls, otherwise concurrently with
    /// them.
    fn ask<C: Call>(&self, held: Option<&mut Outgoing>, call: &C) -> Result<C::Answer, String> {
        let answer = match held {
            Some(outgoing) => self.link.ask_by(outgoing, call),
            None => {
                // A call that names an already known stage is sent in any case.
                let orders = None;
                let mut outgoing = Both { orders, ..*self }.hold(self.end, || None)?;
                let sent = self.link.send_beside(&mut outgoing, call);
                drop(outgoing);
                sent.and_then(|sequence| self.look_for::<C>(self.link, sequence))
            }
        };
        answer.map_err(gone(OLD))
    }

    /// Asks the other worker, which has this long to answer.
    fn ask_there<C: Call>(
        &self,
        is_held: bool,
        call: &C,
        patience: Duration,
    ) -> Result<C::Answer, String> {
        self.there
            .expire(Due::at(self.end.min(Instant::now() + patience)));
        self.answer_there(is_held, call).map_err(gone(NEW))
    }

    /// Has the other worker create a state, for as long as it reports progress.
    pub fn make<C: Call<Answer = Blob>>(&self, is_held: bool, call: &C) -> Result<(), String> {
        self.there.expire(Due::at_work(SILENT, self.end));
        let made = self.answer_there(is_held, call);
        refusal(made.map_err(|_| self.why_not_made())?)
    }

    /// Why the other worker has not answered.
    fn why_not_made(&self) -> String {
        match self.there.is_late() && Instant::now() < self.end {
            true => Failure::Hangs {
                who: Worker::Destination,
                seconds: SILENT.as_secs(),
            }
            .to_string(),
            false => gone(NEW)(()),
        }
    }

    /// Returns the other worker's answer as soon as it arrives.
    fn answer_there<C: Call>(&self, is_held: bool, call: &C) -> Result<C::Answer, D::Status> {
        let there = self.there;
        if is_held {
            there.ask(call)
        } else {
            let sent = there.send_beside(&mut there.outgoing.lock_unpoisoned(), call);
            sent.and_then(|sequence| self.look_for::<C>(there, sequence))
        }
    }

    /// Checks that the devices there have everything that the application has been told about its own.
    pub fn compare(&self, is_held: bool) -> Result<(), String> {
        refusal(self.ask_there(is_held, &D::compare(), SOON)?)
    }

    /// Waits for an answer without blocking the application's threads, and handles other messages of the current worker
    /// meanwhile.
    fn look_for<C: Call>(&self, of: &Link<D>, sequence: u64) -> Result<C::Answer, D::Status> {
        loop {
            if let Some(answer) = of.answered::<C>(sequence) {
                return answer;
            }
            if Instant::now() >= self.end {
                return Err(D::WORKER_LOST);
            }
            hear(self.link);
            thread::sleep(LOOK);
        }
    }

    /// Has the other worker create what can be copied while the application runs. Does nothing if the current worker
    /// cannot copy anything now.
    fn precopy(&self, rounds: &mut Rounds, last: Instant) -> Result<(), String> {
        loop {
            let began = Instant::now();
            let (length, why) = self.ask(None, &D::precopy(rounds.count()))?;
            match refusal(why) {
                // The full save, after calls have stopped, reports the obstacle again.
                Err(_) if rounds.count() == 0 => return Ok(()),
                copied => copied?,
            }
            self.copy_image(None, length)?;
            self.make(false, &D::prepare())?;
            rounds.add(length, began);
            if !rounds.is_due(last.saturating_duration_since(Instant::now())) {
                return Ok(());
            }
        }
    }

    /// Has the current worker discard what it has saved. This also notices if it has ended.
    pub fn give_up(&self) {
        let none = WindowRange {
            offset: self.link.window.data(),
            length: 0,
            stage: None,
        };
        let end = Instant::now() + SOON;
        let _ = Both { end, ..*self }.ask(None, &D::read(0, none));
    }

    /// Reserves space in a window for a part of up to `most` bytes. Returns its offset and length.
    fn room(&self, window: &Link<D>, most: u64, is_held: bool) -> Option<(u64, u64)> {
        loop {
            let room = window.reserve_part(most);
            // The application may free some space.
            if room.is_some() || is_held || Instant::now() >= self.end {
                return room;
            }
            hear(self.link);
            thread::sleep(LOOK);
        }
    }

    /// Has the worker save what is new since this many rounds, and returns the size of the image in bytes. Returns
    /// None, with nothing saved, if memory objects of more than `most` bytes were created since.
    pub fn save(
        &self,
        outgoing: &mut Outgoing,
        (rounds, most): (u32, u64),
        until: Instant,
    ) -> Result<Option<u64>, String> {
        let left = until.saturating_duration_since(Instant::now());
        let save = D::save(left.as_millis() as u64, rounds, most);
        let (length, why) = self.ask(Some(outgoing), &save)?;
        match refusal(why) {
            Err(_) if length > most => Ok(None),
            saved => saved.map(|()| Some(length)),
        }
    }

    /// Copies the image to the other worker, through both windows.
    fn copy_image(&self, mut held: Option<&mut Outgoing>, length: u64) -> Result<(), String> {
        let is_held = held.is_some();
        let largest = if is_held { PART } else { SMALL_PART };
        let mut bytes = Vec::new();
        let mut at = 0;
        while at < length {
            self.check_wanted()?;
            let most = largest.min(length - at);
            let part = self.read_part(held.as_deref_mut(), at, most, &mut bytes)?;
            at += self.write_part(is_held, at, part)?;
        }
        Ok(())
    }

    /// Reads a part of the image, of at most `most` bytes, into the start of `bytes`.
    pub fn read_part<'b>(
        &self,
        held: Option<&mut Outgoing>,
        at: u64,
        most: u64,
        bytes: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], String> {
        let link = self.link;
        let (offset, part) = self
            .room(link, most, held.is_some())
            .ok_or("its window has no room for its state")?;
        bytes.resize(bytes.len().max(part as usize), 0);
        let memory = HostRegion::flat(bytes.as_mut_ptr(), part as usize);
        // SAFETY: the bytes live until the worker has released the stage, which is checked below; otherwise they are
        // leaked.
        let to = unsafe { link.stage_into(offset, part, memory) };
        let stage = to.stage;
        let read = self.ask(held, &D::read(at, to));
        let landed = stage.is_some_and(|stage| !link.is_pending(stage));
        if !landed {
            // The data may land at any later time.
            std::mem::forget(std::mem::take(bytes));
        }
        refusal(read?)?;
        match landed {
            true => Ok(&bytes[..part as usize]),
            false => Err(gone(OLD)(())),
        }
    }

    /// Writes a part of the image to the other worker. Returns the number of bytes.
    pub fn write_part(&self, is_held: bool, at: u64, bytes: &[u8]) -> Result<u64, String> {
        let (there, part) = (self.there, bytes.len() as u64);
        let (offset, _) = there
            .reserve_part(part)
            .filter(|(_, room)| *room == part)
            .ok_or("the window there has no room for its state")?;
        let memory = HostRegion::flat(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: the memory is only read, and both sides have this many bytes.
        unsafe { there.fill(offset, &memory, there.reader()) }.map_err(gone(NEW))?;
        let from = there.stage(offset, part);
        refusal(self.ask_there(is_held, &D::write(at, from), SOON)?)?;
        Ok(part)
    }
}

/// Moves the rest once nothing is in the way, which must be the case by `until`. Rounds have copied what existed
/// before. Returns None if so much is new that another round is worthwhile; everything then continues as before.
fn carry<D: Carried>(
    both: &Both<'_, D>,
    opened: &Opened,
    since: impl FnOnce() -> (u32, u64),
    until: Instant,
) -> Result<Option<()>, String> {
    let Both { link, there, .. } = *both;
    let heap = || link.stages.lock_unpoisoned().pinned();
    // In most programs, copies that are in flight through the window end a moment later, and no new ones start.
    let mut closed = None;
    let mut copied = || {
        if !there.is_shared() {
            closed = link.close_unused();
        }
        (!there.is_shared() && closed.is_none()).then_some(NOT_SHARED)
    };
    let in_the_way = || D::pinned(&link.state).or_else(heap).or_else(&mut copied);
    let mut outgoing = both.hold(until, in_the_way)?;
    let Some(length) = both.save(&mut outgoing, since(), until)? else {
        return Ok(None);
    };
    both.copy_image(Some(&mut outgoing), length)?;
    both.check_wanted()?;
    take_over(both, &mut outgoing, opened).map(Some)
}

/// Stops all threads from reading answers until reading is allowed again.
pub(crate) fn hold_readers<D: Driver>(link: &Link<D>) -> Result<Box<Reader>, String> {
    link.hold_readers().ok_or_else(|| gone(OLD)(()))
}

/// Has the other worker continue where this one has stopped.
fn take_over<D: Carried>(
    both: &Both<'_, D>,
    outgoing: &mut Outgoing,
    opened: &Opened,
) -> Result<(), String> {
    let mut reader = hold_readers(both.link)?;
    let outcome = come_to(both, outgoing, &mut reader, opened);
    both.link.let_read(reader);
    outcome
}

/// Has the other worker restore the state that was copied to it and continue with the window's contents and addresses.
pub(crate) fn come_to<D: Carried>(
    both: &Both<'_, D>,
    outgoing: &mut Outgoing,
    reader: &mut Reader,
    opened: &Opened,
) -> Result<(), String> {
    let Both { link, there, .. } = *both;
    let _writers = link.writers.write_unpoisoned();
    let mut stages = link.stages.lock_unpoisoned();
    if let Some(why) = stages.pinned() {
        return Err(why.to_owned());
    }
    let in_use = stages.in_use(&link.window);
    if !in_use.is_empty() && !there.is_shared() {
        return Err(NOT_SHARED.to_owned());
    }
    for (start, end) in in_use {
        let place = (link.window.at(start, end - start)).zip(there.window.at(start, end - start));
        let (from, to) = place.ok_or("its window is in use where the other one ends")?;
        // SAFETY: both windows have this many bytes. The old worker no longer writes, nor does any thread of this
        // process, which has no pointers to mapped memory.
        unsafe { std::ptr::copy_nonoverlapping(from, to, (end - start) as usize) };
    }
    both.make(true, &D::restore())?;
    let (file, offset) = opened
        .file
        .as_ref()
        .ok_or("the memory of the window there cannot be mapped once more")?;
    let weak = !there.is_file() && there.is_shared();
    let ends = (&mut *outgoing, &mut *reader);
    change(
        link,
        ends,
        &mut stages,
        (file, *offset, weak),
        opened.seat.clone(),
    )?;
    let written = there.outgoing.lock_unpoisoned().sender.written();
    // Fails if the other worker breaks the ring's rules. The next call notices that, too.
    let _ = outgoing.sender.go_on(written);
    if let Some(theirs) = &there.incoming.lock_unpoisoned().receiver {
        let (read, partial) = theirs.ring.read();
        reader.ring.go_on(read, partial.to_vec());
    }
    Ok(())
}

/// Replaces the window's memory by a file from an offset on (which may be weakly ordered), and replaces the ends of the
/// rings. From here on the worker of this seat serves the process.
pub(crate) fn change<D: Driver>(
    link: &Link<D>,
    (outgoing, reader): (&mut Outgoing, &mut Reader),
    stages: &mut Stages,
    (file, offset, weak): (&OwnedFd, u64, bool),
    seat: Arc<Seat>,
) -> Result<(), String> {
    if let Err(error) = link.window.replace(file, offset, weak) {
        if let Error::Lost(_) = error {
            // The previous contents of the window are lost.
            link.lose();
        }
        return Err(base::Chain(&error).to_string());
    }
    link.window.keep_from_children();
    stages.forget_pages();
    let (sender, other) = ends(&link.window, &seat.bell, seat.spins);
    (outgoing.sender, *reader) = (sender, other);
    // Before other threads get space, which is used according to what the worker sees.
    link.take_seat(seat);
    Ok(())
}

#[cfg(test)]
mod tests {
    use base::confine::{ONE_THREAD, confine};

    use super::*;

    #[test]
    fn a_process_without_a_thread_for_the_connection_stays() {
        let confined = thread::spawn(|| {
            confine(&[ONE_THREAD]).expect("the kernel has seccomp and Landlock");
            beside(|| Ok(()), || ())
        });
        let outcome = confined.join().expect("it has not panicked");
        let reason = outcome.expect("no thread has panicked").unwrap_err();
        assert!(reason.starts_with("it cannot start a thread: "), "{reason}");
        assert_eq!(beside(|| Ok(7), || ()), Some(Ok(7)));
    }
}
