//! The pool's part of moving applications: starts the destination workers, and ends the source workers.

use std::{io, mem, sync::Arc, time::Duration};

use remoting_relocation::{
    destination::Arrival,
    failure::{Failure, NotMoved, Worker as Part},
    transfer::Plan,
};
use remoting_transport::{
    order::{Lead, Order, PARKED},
    socket,
    worker_control::{self, Source},
};

use super::{
    log::Client,
    moves::{Asker, Departure, Event, Request, To, Way, Which},
    place,
    pool::{Phase, Pool, Serving},
    worker::{self, New, Worker},
};

/// The worker that an application is being moved to.
pub(super) struct Destination {
    worker: Worker,
    /// Whether the source worker has ended.
    pub source_ended: bool,
}

/// The number of no worker.
const NOBODY: u64 = 0;

/// An application that has left, has not ended since, and has had no orders from others.
pub(super) struct Departed {
    process: Option<i32>,
    to: String,
    pub lead: Lead,
}

/// An application that is to be served elsewhere.
pub(super) enum Leaving {
    /// It has been ordered to leave.
    Ordered,
    /// It has left, and its worker is about to end.
    Left(Departure),
}

impl Serving {
    /// The application's process id, if it is known. For a machine, that of its VMM.
    fn peer(&self) -> Option<i32> {
        // Zero means a process outside this one's PID namespace.
        socket::process(&self.connection).ok().filter(|id| *id > 0)
    }

    fn is_meant(&self, which: Which) -> bool {
        match which {
            Which::All => true,
            Which::Process(id) => self.peer() == Some(id) || self.worker.id() == id,
        }
    }
}

impl Pool<'_> {
    /// Handles requests, and the outcomes of moves.
    pub fn move_applications(&mut self) {
        for event in self.moves.events() {
            match event {
                Event::Asked(Request::List, asker) => self.list(&asker),
                Event::Asked(Request::Move(which, drain, to), asker) => {
                    self.begin(which, drain, &to, &asker);
                }
                Event::Left(departure) => self.left(departure),
                Event::Answered(number) => {
                    let mut all = self.serving.iter_mut();
                    if let Some(one) = all.find(|one| one.worker.number == number) {
                        one.is_busy = false;
                    }
                }
                Event::Over(number, outcome, plan, asker) => {
                    self.over(number, outcome, plan, &asker);
                }
                Event::Fetched(number, outcome, asker) => self.fetched(number, &outcome, &asker),
            }
        }
    }

    /// Records that a source worker has ended during a move. What has been saved by then is still used.
    pub fn source_ended(&mut self, index: usize) {
        if let Some(destination) = &mut self.serving[index].destination {
            destination.source_ended = true;
        }
    }

    /// Lists the applications that are served.
    fn list(&self, asker: &Asker) {
        for serving in &self.serving {
            let process = serving.peer().map_or("-".to_owned(), |id| id.to_string());
            let worker = serving.worker.id();
            asker.tell(&format!("process {process} worker {worker}"));
        }
        for departed in &self.departed {
            let process = departed.process.map_or("-".to_owned(), |id| id.to_string());
            asker.tell(&format!("process {process} at {}", departed.to));
        }
    }

    /// Begins to move applications to workers that are started for them.
    fn begin(&mut self, which: Which, drain: Duration, to: &To, asker: &Asker) {
        let chosen = (0..self.serving.len()).filter(|&at| self.serving[at].is_meant(which));
        let chosen: Vec<_> = chosen.collect();
        let is_here = matches!(which, Which::Process(_)) && !chosen.is_empty();
        if let To::Address(to) = to
            && !is_here
            && self.lead(which, drain, to, asker)
            && chosen.is_empty()
        {
            return;
        }
        if let (Which::Process(id), []) = (which, &chosen[..]) {
            asker.tell(&format!("error: no application of process {id} is served"));
        }
        for index in chosen {
            let serving = &self.serving[index];
            let is_moving = serving.destination.is_some() || serving.source.is_some();
            if is_moving || serving.leaving.is_some() {
                asker.tell("error: it is being moved already");
                continue;
            }
            if serving.is_busy {
                asker.tell("error: its worker is busy, and has yet to answer to an earlier move");
                continue;
            }
            if self.serving[index].phase == Phase::Ending {
                continue;
            }
            let postcopy = *to == To::WorkerFirst;
            let begun = match to {
                To::Address(to) => self.send_away(index, drain, to, asker),
                To::Worker | To::WorkerFirst => {
                    self.begin_one(index, Plan { drain, postcopy }, asker)
                }
            };
            if let Err(error) = begun {
                asker.tell(&format!("error: cannot begin to move it: {error}"));
            }
        }
    }

    /// The number of connections of a process that are served.
    fn served_of(&self, process: Option<i32>) -> usize {
        let of = |serving: &&Serving| process.is_some() && serving.peer() == process;
        self.serving.iter().filter(of).count()
    }

    /// Sends an application elsewhere.
    fn send_away(
        &mut self,
        index: usize,
        patience: Duration,
        to: &str,
        asker: &Asker,
    ) -> io::Result<()> {
        let serving = &self.serving[index];
        let channel = serving.worker.control.try_clone()?;
        let connection = Arc::clone(&serving.connection);
        let way = Way::Here(channel, connection, serving.place.clone());
        let order = Order {
            to: to.to_owned(),
            patience,
            opening: patience,
        };
        let (number, process) = (serving.worker.number, serving.peer());
        let others = self.served_of(process).saturating_sub(1);
        self.moves
            .send_away(way, number, (process, others), order, asker.clone())?;
        self.serving[index].leaving = Some(Leaving::Ordered);
        Ok(())
    }

    /// Sends applications that have left somewhere else, perhaps back here. Returns whether there is one.
    fn lead(&mut self, which: Which, patience: Duration, to: &str, asker: &Asker) -> bool {
        let is_meant = |one: &Departed| match which {
            // Applications that others serve are under their control.
            Which::All => one.to == PARKED && to != PARKED,
            Which::Process(id) => one.process == Some(id),
        };
        let (meant, others) = mem::take(&mut self.departed)
            .into_iter()
            .partition::<Vec<_>, _>(is_meant);
        self.departed = others;
        let is_any = !meant.is_empty();
        for one in meant {
            let order = Order {
                to: to.to_owned(),
                patience,
                opening: patience,
            };
            let way = Way::There(one.lead, one.to);
            let of = (one.process, self.served_of(one.process));
            let begun = self.moves.send_away(way, NOBODY, of, order, asker.clone());
            if let Err(error) = begun {
                asker.tell(&format!("error: cannot begin to move it: {error}"));
            }
        }
        is_any
    }

    /// Handles the outcome for an application that was to be served elsewhere.
    fn left(&mut self, departure: Departure) {
        let mut all = self.serving.iter_mut();
        let found = all.find(|serving| serving.worker.number == departure.number);
        match (found, &departure.outcome) {
            (Some(serving), Ok(())) => serving.leaving = Some(Leaving::Left(departure)),
            (Some(serving), Err(_)) => {
                serving.leaving = None;
                departure.tell();
            }
            (None, _) => self.has_left(departure),
        }
    }

    /// An application is served elsewhere, and its worker here, if it had one, has ended.
    pub fn has_left(&mut self, departure: Departure) {
        departure.tell();
        // An application that has come back gets orders over its worker's connection.
        let served = self.served_of(departure.process);
        if departure.outcome.is_ok() && served > departure.others {
            return;
        }
        let place = match departure.outcome {
            Ok(()) => Some(departure.order.to),
            Err(_) => departure.before,
        };
        if let (Some(to), Some(lead)) = (place, departure.lead) {
            self.departed.push(Departed {
                process: departure.process,
                to,
                lead,
            });
        }
    }

    fn begin_one(&mut self, index: usize, plan: Plan, asker: &Asker) -> io::Result<()> {
        self.started += 1;
        let new = New {
            number: self.started,
            folder: self.cache.folder.join(self.started.to_string()),
            groups: self.groups.as_ref(),
            log: &self.log,
            starter: &self.starter,
            counter: self.serving[index].worker.counter.clone(),
            standby: true,
        };
        let worker = worker::start(&self.listener, self.program, &self.options, self.files, new)?;
        let serving = &mut self.serving[index];
        let is_local = self.listener.is_of_this_machine();
        let client = Client::of(&serving.connection, is_local);
        self.log.serves(worker.id().cast_unsigned(), client);
        let application = (Arc::clone(&serving.connection), serving.place.clone());
        let number = serving.worker.number;
        let begun = (|| {
            let source = serving.worker.control.try_clone()?;
            let source = Source::child(source, serving.worker.end.try_clone()?);
            let workers = (source, worker.control.try_clone()?);
            self.moves
                .start(number, workers, application, plan, asker.clone())
        })();
        if let Err(error) = begun {
            worker.end_aside(&self.remover, &self.closer);
            return Err(error);
        }
        serving.destination = Some(Destination {
            worker,
            source_ended: false,
        });
        Ok(())
    }

    /// Handles the outcome of a move between workers.
    fn over(
        &mut self,
        number: u64,
        outcome: Result<Arrival<worker_control::Destination>, NotMoved>,
        plan: Plan,
        asker: &Asker,
    ) {
        let mut all = self.serving.iter();
        let Some(index) = all.position(|serving| serving.worker.number == number) else {
            return;
        };
        let serving = &mut self.serving[index];
        let Some(destination) = serving.destination.take() else {
            return;
        };
        let process = serving.peer().map_or("-".to_owned(), |id| id.to_string());
        let arrival = match outcome {
            _ if serving.phase == Phase::Ending => {
                asker.tell(&format!("process {process} has ended meanwhile"));
                None
            }
            Err(NotMoved::Stays(error)) if error.is_end_of(Part::Serving) => {
                asker.tell(&format!(
                    "error: process {process} has ended meanwhile, or its worker has"
                ));
                None
            }
            Err(error) => {
                let why = base::Chain(&error);
                asker.tell(&format!("error: process {process} {why}"));
                serving.is_busy = matches!(error, NotMoved::Stays(Failure::Busy(_)));
                None
            }
            Ok(arrival) => Some(arrival),
        };
        let Some(arrival) = arrival else {
            destination.worker.end_aside(&self.remover, &self.closer);
            // The end of the source is looked for again from now on.
            return;
        };
        if !plan.postcopy {
            serving.worker.kill();
        }
        let source = mem::replace(&mut serving.worker, destination.worker);
        serving.phase = Phase::Speaking;
        let (from, to) = (source.id(), serving.worker.id());
        // Its end is noticed as such.
        asker.tell(&match place::go(arrival, || serving.worker.kill()) {
            Ok(()) => format!("process {process} moved from worker {from} to {to}"),
            Err(lost) => format!("error: process {process} {}", base::Chain(&lost)),
        });
        let folder = &serving.worker.remains.folder.0;
        let number = serving.worker.number;
        self.sweeper.serves(number, folder, &serving.connection);
        match plan.postcopy {
            true => serving.source = Some(source),
            false => self.end_source(source),
        }
    }

    /// Ends the worker from which an application was moved.
    pub fn end_source(&self, source: Worker) {
        self.sweeper.ended(source.number);
        source.end_aside(&self.remover, &self.closer);
    }

    /// A moved application has fetched everything that it can from its source, or has ended.
    fn fetched(&mut self, number: u64, outcome: &Result<(), Failure>, asker: &Asker) {
        let has_left = |serving: &&mut Serving| {
            let source = serving.source.as_ref();
            source.is_some_and(|source| source.number == number)
        };
        // It has ended if it needed what was lost.
        let mut serving = self.serving.iter_mut().find(has_left);
        if let Err(error) = outcome {
            let process = serving.as_ref().and_then(|serving| serving.peer());
            let process = process.map_or("-".to_owned(), |id| id.to_string());
            let why = base::Chain(error);
            asker.tell(&format!(
                "error: process {process} has lost contents of its memory: {why}"
            ));
        }
        if let Some(source) = serving.as_mut().and_then(|serving| serving.source.take()) {
            self.end_source(source);
        }
    }
}
