//! Parking: the process has no worker for a while. Its state and its window are in its own memory, its calls wait, and
//! nothing uses the device on its behalf.
//!
//! ```text
//!   served ── order ──> the worker saves its state, which is read into a memory file; the used parts of
//!                       the window are copied to private memory of this process; the worker is left
//!   parked ── order ──> another worker creates the state again, and provides the window's memory
//! ```
//!
//! As in a move from one worker to another ([`carry`](super::carry)), a failure costs only time: a process that cannot
//! be parked is served as before, and one that cannot continue stays parked until the next order. If no more orders can
//! arrive, because whoever gave them has ended, the process returns to the address of its first worker, where a new one
//! may be about to start. If nobody serves there for half a minute, the process's worker counts as lost.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    sync::{Arc, MutexGuard},
    thread,
    time::{Duration, Instant},
};

use base::{
    Unpoisoned,
    lock::UnpoisonedRw,
    memory::{self, Spare, Steps},
};
use remoting_transport::{
    bell::Futex,
    control::{self, LONG},
    mapping,
    order::{self, Order, PARKED},
    port_bell::Doorbell,
    window::Window,
};

use crate::{
    carry::{self, Both, Carried},
    driver::Driver,
    event_fd,
    link::{LIVENESS_TIMEOUT, Link, Outgoing, Reader},
    peer::{Peer, Seat, Spins},
};

/// How long to try to reach a worker when nobody gives orders any more.
const ALONE: Duration = Duration::from_secs(30);
/// How long that worker may take to answer: others may be ahead of this process.
const OPENING: Duration = Duration::from_secs(60);
/// The retry interval.
const AGAIN: Duration = Duration::from_millis(500);

/// A process that has no worker. Its calls wait for as long as this exists.
struct Parked<'a, D: Driver> {
    link: &'a Link<D>,
    outgoing: MutexGuard<'a, Outgoing>,
    reader: Box<Reader>,
    image: File,
    length: u64,
}

/// Parks this process as ordered, answers the order, and waits for an order to continue. Returns the stream for further
/// orders, as [`change_seat`](carry::change_seat) does.
///
/// # Errors
/// The process is served as before, or its worker is lost because nobody serves it any more. Returns the reason.
pub(crate) fn park<D: Carried>(
    link: &Link<D>,
    order: &Order,
    orders: &UnixStream,
) -> Result<Option<UnixStream>, String> {
    let mut parked = Parked::new(link, order.patience.min(LONG), orders)?;
    order::answer(orders, &Ok(()));
    let outcome = parked.wait(orders);
    link.let_read(parked.reader);
    outcome
}

/// The next order. None if there will be none.
fn next(orders: &UnixStream) -> Option<Order> {
    loop {
        match event_fd::wait(None, [Some(orders), None], None) {
            // An order that has been carried out cannot be withdrawn.
            Ok([true, _]) if order::is_taken_back(orders) => {}
            Ok([true, _]) => return Order::take(orders).ok(),
            Ok(_) => {}
            Err(_) => return None,
        }
    }
}

impl<'a, D: Carried> Parked<'a, D> {
    /// Takes the state from the worker, once nothing is in the way. Waits for that for at most `patience`.
    fn new(link: &'a Link<D>, patience: Duration, orders: &'a UnixStream) -> Result<Self, String> {
        let until = Instant::now() + patience;
        let heap = || link.stages.lock_unpoisoned().pinned();
        let both = Both {
            link,
            there: link,
            orders: Some(orders),
            end: until + LONG,
        };
        let mut outgoing = both.hold(until, || D::pinned(&link.state).or_else(heap))?;
        let taken = save(&both, &mut outgoing, until).and_then(|saved| {
            both.check_wanted()?;
            let mut reader = carry::hold_readers(link)?;
            match leave(link, &mut outgoing, &mut reader) {
                Ok(()) => Ok((saved, reader)),
                Err(why) => {
                    link.let_read(reader);
                    Err(why)
                }
            }
        });
        match taken {
            Ok(((image, length), reader)) => Ok(Self {
                link,
                outgoing,
                reader,
                image,
                length,
            }),
            Err(why) => {
                drop(outgoing);
                both.give_up();
                Err(why)
            }
        }
    }

    /// Waits until a worker serves the process, or none ever will.
    fn wait(&mut self, orders: &UnixStream) -> Result<Option<UnixStream>, String> {
        while let Some(order) = next(orders) {
            if order.to == PARKED {
                order::answer(orders, &Ok(()));
                continue;
            }
            match self.go_on(&order.to, order.opening.min(LONG), Some(orders)) {
                Err(why) if !self.link.is_lost() => {
                    base::note!("{}: stays parked: {why}", D::NAME);
                    order::answer(orders, &Err(why));
                }
                outcome => return outcome,
            }
        }
        self.go_home()
    }

    /// Returns to the first worker's address, since whoever parked the process has ended.
    fn go_home(&mut self) -> Result<Option<UnixStream>, String> {
        let home = self.link.environment.home();
        let end = Instant::now() + ALONE;
        loop {
            match self.go_on(home, OPENING, None) {
                Err(_) if Instant::now() < end && !self.link.is_lost() => thread::sleep(AGAIN),
                Err(why) => {
                    self.link.lose();
                    return Err(format!(
                        "it was parked by a process that has ended, and {why}"
                    ));
                }
                further => return further,
            }
        }
    }

    /// Continues with a worker at this address, which has `opening` to answer. `orders` is the stream of the order, if
    /// there is one.
    fn go_on(
        &mut self,
        to: &str,
        opening: Duration,
        orders: Option<&UnixStream>,
    ) -> Result<Option<UnixStream>, String> {
        let link = self.link;
        let opened = carry::open(link, to, Instant::now() + opening)?;
        let there = carry::connection(link, &opened)?;
        if there.is_file() {
            // The worker needs the state once more, in this machine's memory. Control groups are not considered here:
            // the worker checks its own limits as the state is written.
            check_memory(self.length, memory::spare_of_machine())?;
        }
        let both = Both {
            link,
            there: &there,
            orders,
            end: Instant::now() + LONG,
        };
        // A thread that waits with a copy does so for as long as the process is parked.
        if !there.is_shared()
            && !link
                .stages
                .lock_unpoisoned()
                .in_use(&link.window)
                .is_empty()
        {
            return Err(carry::NOT_SHARED.to_owned());
        }
        both.compare(true)?;
        let mut bytes = vec![0; carry::PART.min(self.length) as usize];
        let mut at = 0;
        while at < self.length {
            both.check_wanted()?;
            let most = carry::PART.min(self.length - at) as usize;
            let read = self.image.read_exact_at(&mut bytes[..most], at);
            read.map_err(|error| format!("its state cannot be read: {error}"))?;
            at += both.write_part(true, at, &bytes[..most])?;
        }
        carry::come_to(&both, &mut self.outgoing, &mut self.reader, &opened)?;
        Ok(opened.orders)
    }
}

/// Checks that there is enough memory for a state of this size.
fn check_memory(length: u64, spare: Option<Spare>) -> Result<(), String> {
    match spare {
        Some(spare) if spare.bytes < length => Err(too_little(length, &spare)),
        _ => Ok(()),
    }
}

fn too_little(length: u64, spare: &Spare) -> String {
    format!("its state has {} MiB, and {spare}", length >> 20)
}

/// Has the worker save the state, and reads it. Returns the file and the number of bytes.
fn save<D: Carried>(
    both: &Both<'_, D>,
    outgoing: &mut Outgoing,
    until: Instant,
) -> Result<(File, u64), String> {
    let length = both.save(outgoing, (0, u64::MAX), until)?;
    let length = length.ok_or("the worker that serves it saves nothing")?;
    check_memory(length, memory::spare())?;
    let failed = |error: io::Error| format!("its memory takes no state: {error}");
    let image = control::image().map_err(failed)?;
    let mut bytes = Vec::new();
    // Other processes may be parked at the same time.
    let steps = Steps::default();
    let mut at = 0;
    while at < length {
        both.check_wanted()?;
        let most = carry::PART.min(length - at);
        steps
            .take(most, length)
            .map_err(|spare| too_little(length, &spare))?;
        let part = both.read_part(Some(&mut *outgoing), at, most, &mut bytes)?;
        image.write_all_at(part, at).map_err(failed)?;
        at += part.len() as u64;
    }
    Ok((image, length))
}

/// Leaves the worker, keeping the window's contents and addresses.
fn leave<D: Driver>(
    link: &Link<D>,
    outgoing: &mut Outgoing,
    reader: &mut Reader,
) -> Result<(), String> {
    let _writers = link.writers.write_unpoisoned();
    let mut stages = link.stages.lock_unpoisoned();
    if let Some(why) = stages.pinned() {
        return Err(why.to_owned());
    }
    let own =
        mapping::create(link.window.size()).map_err(|error| base::Chain(&error).to_string())?;
    for (start, end) in stages.in_use(&link.window) {
        keep(&link.window, &own, start, end)
            .map_err(|error| format!("its memory does not take its window: {error}"))?;
    }
    let nobody = Arc::new(Seat {
        bell: Doorbell::Futex(Futex {
            patience: LIVENESS_TIMEOUT,
        }),
        peer: Peer::Nobody,
        spins: Spins {
            spin: Duration::ZERO,
            attended: Duration::ZERO,
        },
        stream: None,
    });
    carry::change(
        link,
        (outgoing, reader),
        &mut stages,
        (&own, 0, false),
        nobody,
    )?;
    link.hold_up();
    Ok(())
}

/// Copies a stretch of a window to the same offset of a file.
fn keep(window: &Window, file: &OwnedFd, start: u64, end: u64) -> io::Result<()> {
    let mut at = start;
    while at < end {
        let from = window.at(at, end - at).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the window has this many bytes there. The kernel reads them, whoever writes to them.
        let written = unsafe {
            libc::pwrite(
                file.as_raw_fd(),
                from.cast(),
                (end - at) as usize,
                at as libc::off_t,
            )
        };
        match written {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written if written > 0 => at += written as u64,
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}
