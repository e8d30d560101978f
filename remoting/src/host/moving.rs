//! A pool that moves applications: starts the workers that take them up, and ends those that had
//! them.

use std::{io, os::fd::AsRawFd, sync::Arc, time::Duration};

use super::{
    control::{self, NotMoved},
    moves::{Asker, Event, Request, Which},
    pool::{Phase, Pool, Serving},
    worker::{self, New, Worker},
};
use crate::{descriptors, link::socket};

/// The worker that an application is being moved to.
pub(super) struct Destination {
    worker: Worker,
    /// Whether the worker that has had the application has ended.
    pub source_ended: bool,
}

impl Serving {
    /// The application's process id, as far as that is known: a machine's is that of its VMM.
    fn peer(&self) -> Option<i32> {
        socket::process(&self.connection).ok()
    }

    fn is_meant(&self, which: Which) -> bool {
        match which {
            Which::All => true,
            Which::Process(id) => self.peer() == Some(id) || self.worker.id() == id,
        }
    }
}

impl Pool<'_> {
    /// Does what was asked for, and what follows from moves that are over.
    pub fn move_applications(&mut self) {
        for event in self.moves.events() {
            match event {
                Event::Asked(Request::List, asker) => self.list(&asker),
                Event::Asked(Request::Move(which, drain), asker) => {
                    self.begin(which, drain, &asker);
                }
                Event::Over(number, outcome, asker) => self.over(number, &outcome, &asker),
            }
        }
    }

    /// A worker has ended whose application is being moved. What is saved by then goes on.
    pub fn source_ended(&mut self, index: usize) {
        if let Some(destination) = &mut self.serving[index].destination {
            destination.source_ended = true;
        }
    }

    /// Tells which applications are served.
    fn list(&self, asker: &Asker) {
        for serving in &self.serving {
            let process = serving.peer().map_or("-".to_owned(), |id| id.to_string());
            let worker = serving.worker.id();
            asker.tell(&format!("process {process} worker {worker}"));
        }
    }

    /// Begins to move applications to workers that are started for them.
    fn begin(&mut self, which: Which, drain: Duration, asker: &Asker) {
        let chosen = (0..self.serving.len()).filter(|&at| self.serving[at].is_meant(which));
        let chosen: Vec<_> = chosen.collect();
        if let (Which::Process(id), []) = (which, &chosen[..]) {
            asker.tell(&format!("error: no application of process {id} is served"));
        }
        for index in chosen {
            if self.serving[index].destination.is_some() {
                asker.tell("error: it is being moved already");
                continue;
            }
            if self.serving[index].phase == Phase::Ending {
                continue;
            }
            if let Err(error) = self.begin_one(index, drain, asker) {
                asker.tell(&format!("error: cannot start a worker for it: {error}"));
            }
        }
    }

    fn begin_one(&mut self, index: usize, drain: Duration, asker: &Asker) -> io::Result<()> {
        self.started += 1;
        let new = New {
            number: self.started,
            folder: self.cache.folder.join(self.started.to_string()),
            groups: self.groups.as_ref(),
            standby: true,
        };
        let worker = worker::start(&self.listener, self.program, &self.options, self.files, new)?;
        let serving = &mut self.serving[index];
        let channels = (&serving.worker.control, &worker.control);
        let connection = Arc::clone(&serving.connection);
        let number = serving.worker.number;
        let begun = self
            .moves
            .start(number, channels, connection, drain, asker.clone());
        if let Err(error) = begun {
            worker.end(None, &self.remover, &self.closer);
            return Err(error);
        }
        serving.destination = Some(Destination {
            worker,
            source_ended: false,
        });
        Ok(())
    }

    /// What becomes of an application that was carried over, or was not.
    fn over(&mut self, number: u64, outcome: &Result<(), NotMoved>, asker: &Asker) {
        let mut all = self.serving.iter();
        let Some(index) = all.position(|serving| serving.worker.number == number) else {
            return;
        };
        let serving = &mut self.serving[index];
        let Some(destination) = serving.destination.take() else {
            return;
        };
        let process = serving.peer().map_or("-".to_owned(), |id| id.to_string());
        if let Err(error) = outcome {
            let why = base::Chain(error);
            asker.tell(&format!("error: process {process} stays: {why}"));
        } else if serving.phase == Phase::Ending {
            asker.tell(&format!("process {process} has ended meanwhile"));
        }
        if outcome.is_err() || serving.phase == Phase::Ending {
            destination.worker.end(None, &self.remover, &self.closer);
            // The end of the source is looked for again from now on.
            return;
        }
        // From here on nobody else serves the window.
        serving.worker.kill();
        let mut exit = [libc::pollfd {
            fd: serving.worker.end.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        let _ = descriptors::poll(&mut exit, None);
        let source = std::mem::replace(&mut serving.worker, destination.worker);
        serving.phase = Phase::Speaking;
        // Fails if the worker has ended meanwhile, which is noticed as such.
        let _ = control::send(&serving.worker.control, &control::Command::Go(), &[]);
        let (from, to) = (source.id(), serving.worker.id());
        asker.tell(&format!(
            "process {process} moved from worker {from} to {to}"
        ));
        let folder = &serving.worker.remains.folder.0;
        let number = serving.worker.number;
        self.sweeper.serves(number, folder, &serving.connection);
        self.sweeper.ended(source.number);
        source.end(None, &self.remover, &self.closer);
    }
}
