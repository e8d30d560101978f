//! This process leaves the worker that serves it for another one, which may be anywhere: another
//! process of this machine, the host's, or another host's.
//!
//! ```text
//!   1  a connection with the other worker is made                            nothing has changed
//!   2  in rounds, what is new of the state is copied, and made there         all goes on
//!   3  no call is sent: who sends holds the lock; much new: back to 2         calls wait
//!   4  the worker saves the rest, its image is read and written there, part by part
//!   5  nobody reads answers or writes to the window
//!   6  what is in use of the window is copied; the other worker restores
//!   7  the other window's memory is mapped in the place of this one's, the rings' ends, doorbell
//!      and connection are the other's                                        the worker is left
//! ```
//!
//! Until the other worker is to restore who has given the order may take it back: all goes on as it was.
//!
//! The window keeps its addresses. Until 7 a failure costs nothing but the time: the worker still
//! serves, and all goes on with it. After it the old connection is closed, by which that worker ends;
//! what is in its rings by then nobody waits for, as every call before the save was carried out, and
//! answered or saved as one that waits.
//!
//! What the application has pointers to cannot be copied while it may write there: mapped memory,
//! shared virtual memory, a heap in the window. It stays then, or is waited for as long as the order
//! says.
//!
//! While nobody orders this, it costs a load for each call that waits and two atomic steps for each
//! stretch of memory that is copied into the window, beside what the copy takes.

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{Arc, MutexGuard, mpsc},
    thread,
    time::{Duration, Instant},
};

use base::{Unpoisoned, lock::UnpoisonedRw};
use gantry_remoting::{
    link::{
        control::{LONG, NotMoved, SILENT, SOON},
        mapping::Error,
        order::{self, Order, PARKED},
        rounds::Rounds,
    },
    wire::{
        Blob,
        messages::{Call, WindowRange},
    },
};

use crate::{
    connect::{FromAnother, Opened},
    driver::Driver,
    link::{Due, Link, Outgoing, Reader, ends},
    park,
    peer::Seat,
    stage::{HostRegion, Stages},
};

/// How often is looked for what has come or changed.
const LOOK: Duration = Duration::from_micros(100);
/// How many bytes of an image are carried at a time, at most.
pub(crate) const PART: u64 = 4 << 20;
/// The same while the application goes on: its calls wait while the worker copies a part.
const SMALL_PART: u64 = 512 << 10;

/// A driver whose state can be carried from one worker to another.
pub trait Carried: Driver {
    /// The call that saves what is new since the last round, while others are carried out: how many
    /// bytes the image has; or none, and why not.
    fn precopy(round: u32) -> impl Call<Answer = (u64, Blob)>;
    /// The call that saves what is new since so many rounds: the answer is the same, or how many bytes of memory
    /// objects were made since, and why they are too many, if that is more than `most`.
    fn save(patience: u64, rounds: u32, most: u64) -> impl Call<Answer = (u64, Blob)>;
    /// The call that reads a part of it.
    fn read(at: u64, to: WindowRange) -> impl Call<Answer = Blob>;
    /// The call that writes a part of it.
    fn write(at: u64, from: WindowRange) -> impl Call<Answer = Blob>;
    /// The call that makes what a round has.
    fn prepare() -> impl Call<Answer = Blob>;
    /// The call that makes the rest of the state.
    fn restore() -> impl Call<Answer = Blob>;
    /// The call that compares devices with what the application has been told of its own.
    fn compare() -> impl Call<Answer = Blob>;
    /// Why the window cannot get other memory now, if something is in the way. Nothing gets in the way
    /// while no call can be sent.
    fn pinned(state: &Self::State) -> Option<&'static str>;
}

/// Why not, if a worker says so.
fn refusal(Blob(why): Blob) -> Result<(), String> {
    match why.is_empty() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&why).into_owned()),
    }
}

/// Whichever of the two has ended.
fn gone<S>(which: &'static str) -> impl Fn(S) -> String {
    move |_| format!("{which} does not answer")
}

pub(crate) const NOT_SHARED: &str = "parts of its window are in use, which a stream does not share";
const OLD: &str = "the worker that serves it";
const NEW: &str = "the worker that was to serve it";

/// Has a process be served where the order says, which has come by `orders`. Where further ones come from,
/// if it was sent on from there.
///
/// # Errors
/// It stays where it is; why.
pub fn change_seat<D: Carried>(
    link: &Link<D>,
    order: &Order,
    orders: &UnixStream,
) -> Result<Option<UnixStream>, String> {
    let patience = order.patience.min(LONG);
    // No listener hears of its end meanwhile, nor of messages.
    link.be_deaf(true);
    let outcome = match order.to == PARKED {
        true => park::park(link, order, orders),
        false => open(link, &order.to, Instant::now() + order.opening.min(LONG))
            .and_then(|opened| go(link, &opened, patience, orders).map(|()| opened.orders)),
    };
    link.be_deaf(false);
    outcome
}

/// Connects with the worker at this address. What the one that serves says is heard meanwhile.
pub(crate) fn open<D: Carried>(link: &Link<D>, to: &str, until: Instant) -> Result<Opened, String> {
    thread::scope(|scope| {
        // As the listener, it blocks all signals.
        let opening = scope.spawn(|| {
            let window = link.window.size();
            let from = Some(FromAnother { window, until });
            Opened::to::<D>(to, &link.environment, from)
                .map_err(|error| format!("it cannot connect with {to}: {error}"))
        });
        while !opening.is_finished() {
            hear(link);
            thread::sleep(LOOK);
        }
        let panicked = |_| Err(format!("it cannot connect with {to}"));
        opening.join().unwrap_or_else(panicked)
    })
}

/// Reads what the worker says that no call waits for. Nothing is in the way of threads that wait if
/// nothing of the kind is expected.
fn hear<D: Driver>(link: &Link<D>) {
    if link.expects() || D::expects_messages(&link.state) {
        link.try_read_pending();
    }
}

/// The connection with the other worker, whose window is as large as this one's at least.
pub(crate) fn connection<D: Carried>(link: &Link<D>, opened: &Opened) -> Result<Link<D>, String> {
    // Nobody waits for callbacks of this one.
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
    // Ends whichever of the two workers is not its own any more: nobody else keeps a seat.
    let outcome = both
        .compare(false)
        .and_then(|()| go_in_rounds(&both, opened, patience));
    if outcome.is_err() {
        both.give_up();
    }
    outcome
}

/// Carries all over: in rounds what can be copied while the application goes on, which have time of their own.
fn go_in_rounds<D: Carried>(
    both: &Both<'_, D>,
    opened: &Opened,
    patience: Duration,
) -> Result<(), String> {
    let mut rounds = Rounds::default();
    loop {
        both.precopy(&mut rounds)?;
        let until = Instant::now().min(both.end) + patience;
        if carry(both, opened, &rounds, until)?.is_some() {
            return Ok(());
        }
    }
}

/// The connections with both workers.
pub(crate) struct Both<'a, D: Driver> {
    /// That with the one that serves.
    pub link: &'a Link<D>,
    /// That with the one that is to serve.
    pub there: &'a Link<D>,
    /// Where the order came from, and is taken back, if somebody has given one.
    pub orders: Option<&'a UnixStream>,
    /// By when all is to be answered.
    pub end: Instant,
}

impl<'a, D: Carried> Both<'a, D> {
    /// Whether the order still stands. Nobody asks once the other worker is to go on.
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
            // Who has it may wait for a worker that waits for somebody to read.
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

    /// Asks the worker that serves: `held` by who holds up all other calls, else beside them.
    fn ask<C: Call>(&self, held: Option<&mut Outgoing>, call: &C) -> Result<C::Answer, String> {
        let answer = match held {
            Some(outgoing) => self.link.ask_by(outgoing, call),
            None => {
                // A call whose stage is known already is sent in any case.
                let orders = None;
                let mut outgoing = Both { orders, ..*self }.hold(self.end, || None)?;
                let sent = self.link.send_beside(&mut outgoing, call);
                drop(outgoing);
                sent.and_then(|sequence| self.look_for::<C>(self.link, sequence))
            }
        };
        answer.map_err(gone(OLD))
    }

    /// Asks the other one, which has so long to answer.
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

    /// Has the other one make a state, for as long as it is at work on that.
    pub fn make<C: Call<Answer = Blob>>(&self, is_held: bool, call: &C) -> Result<(), String> {
        self.there.expire(Due::at_work(SILENT, self.end));
        let made = self.answer_there(is_held, call);
        refusal(made.map_err(|_| self.why_not_made())?)
    }

    /// Why the other one has not answered.
    fn why_not_made(&self) -> String {
        match self.there.is_late() && Instant::now() < self.end {
            true => NotMoved::Hangs {
                who: NEW,
                seconds: SILENT.as_secs(),
            }
            .to_string(),
            false => gone(NEW)(()),
        }
    }

    /// The other one's answer, as soon as it comes.
    fn answer_there<C: Call>(&self, is_held: bool, call: &C) -> Result<C::Answer, D::Status> {
        let there = self.there;
        if is_held {
            there.ask(call)
        } else {
            let sent = there.send_beside(&mut there.outgoing.lock_unpoisoned(), call);
            sent.and_then(|sequence| self.look_for::<C>(there, sequence))
        }
    }

    /// Whether the devices there have all that the application has been told of its own.
    pub fn compare(&self, is_held: bool) -> Result<(), String> {
        refusal(self.ask_there(is_held, &D::compare(), SOON)?)
    }

    /// Waits for an answer without being in the way of the application's threads, and hears what else
    /// the worker says that serves.
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

    /// Has the other worker make what can be copied while the application goes on: nothing if this worker copies
    /// nothing now.
    fn precopy(&self, rounds: &mut Rounds) -> Result<(), String> {
        loop {
            rounds.begin();
            let (length, why) = self.ask(None, &D::precopy(rounds.count()))?;
            match refusal(why) {
                // It is asked for the whole once it stands still, and says again what is in the way.
                Err(_) if rounds.count() == 0 => return Ok(()),
                copied => copied?,
            }
            self.copy_image(None, length)?;
            self.make(false, &D::prepare())?;
            if !rounds.another(length) {
                return Ok(());
            }
        }
    }

    /// Has the worker that serves keep nothing. If it has ended, that is noticed.
    pub fn give_up(&self) {
        let none = WindowRange {
            offset: self.link.window.data(),
            length: 0,
            stage: None,
        };
        let end = Instant::now() + SOON;
        let _ = Both { end, ..*self }.ask(None, &D::read(0, none));
    }

    /// Room in a window for a part of so many bytes at most: where, and how many.
    fn room(&self, window: &Link<D>, most: u64, is_held: bool) -> Option<(u64, u64)> {
        loop {
            let room = window.reserve_part(most);
            // The application gives some back.
            if room.is_some() || is_held || Instant::now() >= self.end {
                return room;
            }
            hear(self.link);
            thread::sleep(LOOK);
        }
    }

    /// Has the worker save what is new since so many rounds: how many bytes the image has. None if more than `most`
    /// bytes of memory objects were made since, and nothing is saved.
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

    /// Carries the image over, through both windows.
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

    /// Reads a part of the image, of `most` bytes at most, which then are the first ones of `bytes`.
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
        // SAFETY: the bytes live until the worker has released the stage, which is checked below,
        // or is not heard of any more.
        let to = unsafe { link.stage_into(offset, part, memory) };
        let stage = to.stage;
        let read = self.ask(held, &D::read(at, to));
        let landed = stage.is_some_and(|stage| !link.is_pending(stage));
        if !landed {
            // Nobody knows when.
            std::mem::forget(std::mem::take(bytes));
        }
        refusal(read?)?;
        match landed {
            true => Ok(&bytes[..part as usize]),
            false => Err(gone(OLD)(())),
        }
    }

    /// Writes a part of the image to the other worker: how many bytes.
    pub fn write_part(&self, is_held: bool, at: u64, bytes: &[u8]) -> Result<u64, String> {
        let (there, part) = (self.there, bytes.len() as u64);
        let (offset, _) = there
            .reserve_part(part)
            .filter(|(_, room)| *room == part)
            .ok_or("the window there has no room for its state")?;
        let memory = HostRegion::flat(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: it is read, and both have so many bytes.
        unsafe { there.fill(offset, &memory, there.reader()) }.map_err(gone(NEW))?;
        let from = there.stage(offset, part);
        refusal(self.ask_there(is_held, &D::write(at, from), SOON)?)?;
        Ok(part)
    }
}

/// Carries the rest over, once nothing is in the way, which lasts no longer than until then. Rounds have copied what
/// there was. None if so much was made since that another round is worth its time: all goes on.
fn carry<D: Carried>(
    both: &Both<'_, D>,
    opened: &Opened,
    rounds: &Rounds,
    until: Instant,
) -> Result<Option<()>, String> {
    let Both { link, there, .. } = *both;
    let heap = || link.stages.lock_unpoisoned().pinned();
    // Copies that are under way by the window are over a moment later in most programs, and no further ones
    // begin.
    let mut closed = None;
    let mut copied = || {
        if !there.is_shared() {
            closed = link.close_unused();
        }
        (!there.is_shared() && closed.is_none()).then_some(NOT_SHARED)
    };
    let in_the_way = || D::pinned(&link.state).or_else(heap).or_else(&mut copied);
    let mut outgoing = both.hold(until, in_the_way)?;
    let since = (rounds.count(), rounds.most_made());
    let Some(length) = both.save(&mut outgoing, since, until)? else {
        return Ok(None);
    };
    both.copy_image(Some(&mut outgoing), length)?;
    both.check_wanted()?;
    take_over(both, &mut outgoing, opened).map(Some)
}

/// Has no thread read answers until that is let.
pub(crate) fn hold_readers<D: Driver>(link: &Link<D>) -> Result<Box<Reader>, String> {
    link.hold_readers().ok_or_else(|| gone(OLD)(()))
}

/// Has the other worker go on where this one has stopped.
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

/// Has the other worker restore the state that it was brought and go on, with the window's contents and
/// addresses.
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
        // SAFETY: as many bytes of both windows. The worker that is left writes nothing any more,
        // and no thread of this process does, which has no pointers to mapped memory.
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
    // Fails if the other worker breaks the ring's rules, which the next call notices, too.
    let _ = outgoing.sender.go_on(written);
    if let Some(theirs) = &there.incoming.lock_unpoisoned().receiver {
        let (read, partial) = theirs.ring.read();
        reader.ring.go_on(read, partial.to_vec());
    }
    Ok(())
}

/// Gives the window other memory, from a place in a file on, which may be weak, and the rings other ends:
/// who has this seat serves from here on.
pub(crate) fn change<D: Driver>(
    link: &Link<D>,
    (outgoing, reader): (&mut Outgoing, &mut Reader),
    stages: &mut Stages,
    (file, offset, weak): (&OwnedFd, u64, bool),
    seat: Arc<Seat>,
) -> Result<(), String> {
    if let Err(error) = link.window.replace(file, offset, weak) {
        if let Error::Lost(_) = error {
            // What it had in the window is gone.
            link.lose();
        }
        return Err(base::Chain(&error).to_string());
    }
    stages.forget_pages();
    let (sender, other) = ends(&link.window, &seat.bell, seat.spins);
    (outgoing.sender, *reader) = (sender, other);
    // Before others get space, which is used as the worker sees it.
    link.take_seat(seat);
    Ok(())
}
