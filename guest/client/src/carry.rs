//! This process leaves the worker that serves it for another one, which may be anywhere: another
//! process of this machine, the host's, or another host's. The application's calls wait meanwhile.
//!
//! ```text
//!   1  a connection with the other worker is made                            nothing has changed
//!   2  no call is sent: who sends holds the lock                             calls wait
//!   3  the worker saves, its image is read and written there, part by part
//!   4  nobody reads answers or writes to the window
//!   5  what is in use of the window is copied; the other worker restores
//!   6  the other window's memory is mapped in the place of this one's, the rings' ends, doorbell
//!      and connection are the other's                                        the worker is left
//! ```
//!
//! The window keeps its addresses. Until 6 a failure costs nothing but the time: the worker still
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
    os::unix::net::UnixStream,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use base::{Unpoisoned, lock::UnpoisonedRw};
use gantry_remoting::{
    link::{
        control::{LONG, SOON},
        mapping::Error,
        order::Order,
    },
    wire::{
        Blob,
        messages::{Call, WindowRange},
    },
};

use crate::{
    connect::Opened,
    driver::Driver,
    link::{Link, Outgoing, ends},
    stage::HostRegion,
};

/// How often is looked whether the application has unmapped what it has.
const LOOK: Duration = Duration::from_micros(100);
/// How many bytes of an image are carried at a time, at most.
const PART: u64 = 4 << 20;

/// A driver whose state can be carried from one worker to another.
pub trait Carried: Driver {
    /// The call that saves the state: how many bytes it has; or none, and why not.
    fn save(patience: u64) -> impl Call<Answer = (u64, Blob)>;
    /// The call that reads a part of it.
    fn read(at: u64, to: WindowRange) -> impl Call<Answer = Blob>;
    /// The call that writes a part of it.
    fn write(at: u64, from: WindowRange) -> impl Call<Answer = Blob>;
    /// The call that makes the state again.
    fn restore() -> impl Call<Answer = Blob>;
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

const NOT_SHARED: &str = "parts of its window are in use, which a stream does not share";
const OLD: &str = "the worker that serves it";
const NEW: &str = "the worker that was to serve it";

/// Has a process be served where the order says. Where further orders come from, if it was sent on from
/// there.
///
/// # Errors
/// It stays where it is; why.
pub fn change_seat<D: Carried>(
    link: &Link<D>,
    order: &Order,
) -> Result<Option<UnixStream>, String> {
    let until = Instant::now() + order.patience.min(Duration::from_secs(600));
    // No listener hears of its end meanwhile, nor of messages.
    link.be_deaf(true);
    let outcome = open(link, &order.to, until)
        .and_then(|opened| go(link, &opened, until).map(|()| opened.orders));
    link.be_deaf(false);
    outcome
}

/// Connects with the worker at this address. What the one that serves says is heard meanwhile.
fn open<D: Carried>(link: &Link<D>, to: &str, until: Instant) -> Result<Opened, String> {
    thread::scope(|scope| {
        // As the listener, it blocks all signals.
        let opening = scope.spawn(|| {
            Opened::to::<D>(to, &link.environment, Some(until))
                .map_err(|error| format!("it cannot connect with {to}: {error}"))
        });
        while !opening.is_finished() {
            link.try_read_pending();
            thread::sleep(LOOK);
        }
        let panicked = |_| Err(format!("it cannot connect with {to}"));
        opening.join().unwrap_or_else(panicked)
    })
}

fn go<D: Carried>(link: &Link<D>, opened: &Opened, until: Instant) -> Result<(), String> {
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
    // Ends whichever of the two workers is not its own any more: nobody else keeps a seat.
    carry(link, &there, opened, until)
}

fn carry<D: Carried>(
    link: &Link<D>,
    there: &Link<D>,
    opened: &Opened,
    until: Instant,
) -> Result<(), String> {
    let mut outgoing = loop {
        // Who has it may wait for a worker that waits for somebody to read.
        let why = if let Ok(outgoing) = link.outgoing.try_lock() {
            let heap = || link.stages.lock_unpoisoned().pinned();
            match D::pinned(&link.state).or_else(heap) {
                None => break outgoing,
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
    };
    let left = until.saturating_duration_since(Instant::now());
    let saved = link.ask_by(&mut outgoing, &D::save(left.as_millis() as u64));
    let (length, why) = saved.map_err(gone(OLD))?;
    refusal(why)?;
    let in_use = !link
        .stages
        .lock_unpoisoned()
        .in_use(&link.window)
        .is_empty();
    let outcome = match in_use && !there.is_shared() {
        true => Err(NOT_SHARED.to_owned()),
        false => copy_image(link, &mut outgoing, there, length)
            .and_then(|()| take_over(link, &mut outgoing, there, opened)),
    };
    if outcome.is_err() {
        // Gives the image up. If the worker has ended, that is noticed.
        let none = WindowRange {
            offset: link.window.data(),
            length: 0,
            stage: None,
        };
        let _ = link.ask_by(&mut outgoing, &D::read(0, none));
    }
    outcome
}

/// Carries the image over, through both windows.
fn copy_image<D: Carried>(
    link: &Link<D>,
    outgoing: &mut Outgoing,
    there: &Link<D>,
    length: u64,
) -> Result<(), String> {
    let mut bytes = vec![0; PART.min(length) as usize];
    let mut at = 0;
    while at < length {
        let most = PART.min(length - at);
        let (offset, part) = link
            .reserve_part(most)
            .ok_or("its window has no room for its state")?;
        let memory = HostRegion::flat(bytes.as_mut_ptr(), part as usize);
        // SAFETY: the bytes live until the worker has released the stage, which is checked below,
        // or is not heard of any more.
        let to = unsafe { link.stage_into(offset, part, memory) };
        let stage = to.stage;
        let read = link.ask_by(outgoing, &D::read(at, to));
        let landed = stage.is_some_and(|stage| !link.is_pending(stage));
        if !landed {
            // Nobody knows when.
            std::mem::forget(std::mem::take(&mut bytes));
        }
        refusal(read.map_err(gone(OLD))?)?;
        if !landed {
            return Err(gone(OLD)(()));
        }
        let (offset, room) = there
            .reserve_part(part)
            .filter(|(_, room)| *room == part)
            .ok_or("the window there has no room for its state")?;
        debug_assert_eq!(room, part);
        // SAFETY: both have so many bytes.
        unsafe { there.fill(offset, &memory, there.reader()) }.map_err(gone(NEW))?;
        let from = there.stage(offset, part);
        let written = there.ask_within(&D::write(at, from), SOON);
        refusal(written.map_err(gone(NEW))?)?;
        at += part;
    }
    Ok(())
}

/// Has the other worker go on where this one has stopped, with the window's contents and addresses.
fn take_over<D: Carried>(
    link: &Link<D>,
    outgoing: &mut Outgoing,
    there: &Link<D>,
    opened: &Opened,
) -> Result<(), String> {
    let mut reader = link.hold_readers().ok_or_else(|| gone(OLD)(()))?;
    let outcome = (|| {
        let writers = link.writers.write_unpoisoned();
        let mut stages = link.stages.lock_unpoisoned();
        if let Some(why) = stages.pinned() {
            return Err(why.to_owned());
        }
        let in_use = stages.in_use(&link.window);
        if !in_use.is_empty() && !there.is_shared() {
            return Err(NOT_SHARED.to_owned());
        }
        for (start, end) in in_use {
            let place =
                (link.window.at(start, end - start)).zip(there.window.at(start, end - start));
            let (from, to) = place.ok_or("its window is in use where the other one ends")?;
            // SAFETY: as many bytes of both windows. The worker that is left writes nothing any more,
            // and no thread of this process does, which has no pointers to mapped memory.
            unsafe { std::ptr::copy_nonoverlapping(from, to, (end - start) as usize) };
        }
        let restored = there.ask_within(&D::restore(), LONG);
        refusal(restored.map_err(gone(NEW))?)?;
        let (file, offset) = opened
            .file
            .as_ref()
            .ok_or("the memory of the window there cannot be mapped once more")?;
        let weak = !there.is_file() && there.is_shared();
        if let Err(error) = link.window.replace(file, *offset, weak) {
            if let Error::Lost(_) = error {
                // What it had in the window is gone.
                link.lose();
            }
            return Err(base::Chain(&error).to_string());
        }
        stages.forget_pages();
        let seat = opened.seat.clone();
        // Before others get space, which is used as the worker sees it.
        link.take_seat(seat.clone());
        drop((stages, writers));
        let (mut sender, mut other) = ends(&link.window, &seat.bell, seat.spins);
        let written = there.outgoing.lock_unpoisoned().sender.written();
        // Fails if the other worker breaks the ring's rules, which the next call notices, too.
        let _ = sender.go_on(written);
        if let Some(theirs) = &there.incoming.lock_unpoisoned().receiver {
            let (read, partial) = theirs.ring.read();
            other.ring.go_on(read, partial.to_vec());
        }
        outgoing.sender = sender;
        *reader = other;
        Ok(())
    })();
    link.let_read(reader);
    outcome
}
