//! Executes the log.

use std::{collections::HashMap, sync::Arc, thread, time::Duration};

use remoting_proto::{
    apis::opencl::{
        calls::{Answered, ContextId, Request},
        codes,
    },
    wire::{Flags, Header, Wire},
};
use remoting_session::{
    image::{Contents, Immovable},
    notice::Notice,
};

use super::{Entry, Names, Objects, SavedEvent, Status, contents};
use crate::{
    Server,
    callbacks::{self, DriverNotice, Leaf, Reporter},
    driver::{api::Handle, cl},
    objects::{Event, Map, made},
    programs::MOST_BUILDS,
};

/// Interval between checks of builds.
const LOOK: Duration = Duration::from_micros(200);
/// A context number that no application uses: theirs are below 256.
const NO_CONTEXT: u32 = 1 << 31;

/// An object that the driver does not recreate.
fn refused<T>(what: &str, id: u32) -> impl FnOnce(i32) -> Result<T, Immovable> {
    let what = format!("{what} {id}");
    move |code| Err(Immovable::Refused { what, code })
}

impl Server {
    pub(in super::super) fn restore_objects(
        &mut self,
        state: &[u8],
        contents: &Contents,
    ) -> Result<(), Immovable> {
        let objects = Objects::from_bytes(state)?;
        let contexts = &objects.contexts.made;
        let numbers =
            self.make_objects((&objects.offered, &objects.told), &objects.log, contexts)?;
        contents::restore(self, &objects.contents, contents)?;
        self.await_contents(&objects.missing)?;
        for (mem, number) in &objects.destructors {
            self.restore_destructor(*mem, *number);
        }
        let events = self.restore_events(&objects.events)?;
        // Before objects are dropped that the application has released since an earlier round.
        self.quota.level();
        self.renumber(&objects, &numbers)?;
        for (id, event) in events {
            if self.backend.events.put(id, Ok(event)).is_some() {
                return Err(Immovable::Wrong("an event's number"));
            }
        }
        for (id, code) in &objects.failed_events {
            self.backend.events.put(*id, Err(*code));
        }
        for call in &objects.arguments {
            self.set_argument(call)
                .or_else(refused("an argument of kernel", call.kernel.0))?;
        }
        for one in &objects.refused {
            let kernel = self.backend.kernels.get_mut(one.kernel.0);
            let kernel = kernel.map_err(|_| Immovable::Wrong("an argument of no kernel"))?;
            kernel.refuse(one.index, one.code);
        }
        for (queue, code) in &objects.deferred {
            let queue = self.backend.queues.get_mut(queue.0);
            queue
                .map_err(|_| Immovable::Wrong("an error of no queue"))?
                .deferred = Some(*code);
        }
        if self.is_prepared {
            contents::renew(self, &objects.maps)?;
        }
        self.restore_maps(&objects)
    }

    /// Makes objects from a log, in a session that only has those of earlier parts of it. Returns
    /// the application's numbers of contexts.
    pub(super) fn make_objects(
        &mut self,
        (offered, told): (&[Vec<u64>], &[Answered]),
        log: &[Entry],
        contexts: &[(u32, u32)],
    ) -> Result<HashMap<u32, u32>, Immovable> {
        if !self.is_prepared && self.backend.has_objects() {
            return Err(Immovable::Wrong("it is for an application without objects"));
        }
        if self.offered_kinds() != offered {
            return Err(Immovable::Has(
                "it was offered other devices than there are here".to_owned(),
            ));
        }
        self.compare(told)?;
        // Reports about a context use the application's number for it.
        let numbers = contexts.iter().copied().collect();
        for entry in log {
            self.carry_out_entry(entry, &numbers)?;
        }
        self.wait_for_builds(0)?;
        Ok(numbers)
    }

    /// Executes a call of the log.
    fn carry_out_entry(
        &mut self,
        Entry { opcode, call }: &Entry,
        contexts: &HashMap<u32, u32>,
    ) -> Result<(), Immovable> {
        self.works()?;
        let header = Header {
            length: 0,
            opcode: *opcode,
            flags: Flags::default(),
            sequence: 0,
        };
        let request = Request::decode(*opcode, &call.0)?;
        // One-step builds and compilations run concurrently.
        let most = match &request {
            Request::BuildProgram(_) | Request::CompileProgram(_) => MOST_BUILDS - 1,
            Request::LinkProgram(_) | Request::CreateKernel(_) => 0,
            _ => usize::MAX,
        };
        self.wait_for_builds(most)?;
        match request {
            Request::CreateSubDevices(call) => {
                let made = self.create_sub_devices(&call);
                made.or_else(refused("parts of device", call.device.0))?;
            }
            Request::CreateContext(call) => {
                let id = call.id.0;
                // The driver has the reporter of one that there is.
                let is_free = self.backend.contexts.check(id);
                is_free.or_else(refused("context", id))?;
                let known = contexts.get(&id).copied();
                let named = ContextId(known.unwrap_or(NO_CONTEXT | id));
                let reporter = Reporter::new(&self.board, named);
                self.backend.reporters.insert(call.id, reporter);
                self.create_context(call).or_else(refused("context", id))?;
            }
            Request::CreateQueue(call) => {
                let id = call.id.0;
                self.create_queue(call).or_else(refused("queue", id))?;
            }
            Request::CreateBuffer(call) if call.contents.is_none() && call.svm.is_none() => {
                let id = call.id.0;
                self.create_buffer(call).or_else(refused("buffer", id))?;
            }
            Request::CreateSubBuffer(call) => {
                let id = call.id.0;
                self.create_sub_buffer(call)
                    .or_else(refused("sub-buffer", id))?;
            }
            Request::CreateImage(call) if call.contents.is_none() => {
                let id = call.id.0;
                self.create_image(call).or_else(refused("image", id))?;
            }
            Request::CreateSampler(call) => {
                let id = call.id.0;
                self.create_sampler(call).or_else(refused("sampler", id))?;
            }
            Request::CreateProgram(call) => {
                let id = call.id.0;
                let made = self.create_program(call);
                made.or_else(refused("program", id))?;
            }
            Request::Specialize(call) => {
                let set = self.specialize(&call);
                set.or_else(refused("a constant of program", call.id.0))?;
            }
            // Whether they succeed shows in what is made from them.
            Request::BuildProgram(call) => self.build_program(header, &call)?,
            Request::CompileProgram(call) => self.compile_program(header, &call)?,
            Request::LinkProgram(call) => {
                let id = call.id.0;
                self.link_program(header, call)?;
                self.wait_for_builds(0)?;
                let linked = self.backend.programs.get(id).map(drop);
                linked.or_else(refused("linked program", id))?;
            }
            Request::CreateKernel(call) => {
                let made = self.create_kernel(&call);
                made.or_else(refused("kernel", call.id.0))?;
            }
            _ => return Err(Immovable::Wrong("a call that makes nothing")),
        }
        Ok(())
    }

    /// Waits until at most this many builds are in progress. None of them is answered: it is not
    /// yet known whose session will go on. A client that has brought the state is told that this is
    /// still in progress.
    fn wait_for_builds(&mut self, most: usize) -> Result<(), Immovable> {
        let mut kept = Vec::new();
        while self.backend.building > most {
            for notice in self.board.take() {
                match notice {
                    Notice::Backend(DriverNotice::Built(header, rebuilt, code)) => {
                        self.built(header, &rebuilt, code)?;
                    }
                    Notice::Backend(DriverNotice::Linked(header, linked, code)) => {
                        self.linked(header, linked, code)?;
                    }
                    // The application received it with the first build.
                    Notice::Backend(DriverNotice::Report(..)) => {}
                    notice => kept.push(notice),
                }
            }
            if self.backend.building > most {
                self.works()?;
                thread::sleep(LOOK);
            }
        }
        for notice in kept {
            self.board.leave(notice);
        }
        Ok(())
    }

    /// Arranges for the destruction of an object that the application has released to be reported;
    /// immediately if the object was not recreated.
    fn restore_destructor(&mut self, mem: u32, number: u64) {
        self.expected += 1;
        let Ok(mem) = self.backend.mems.get(mem) else {
            self.board.leave(Notice::Callback(number, 0));
            return;
        };
        let record = Arc::downgrade(&mem.record);
        let leaf = Leaf::into_raw(&self.board, number);
        let code = cl!(
            self.backend.api,
            clSetMemObjectDestructorCallback(mem.raw, Some(callbacks::mem), leaf)
        );
        if code == 0 {
            self.backend.destructors.insert(number, record);
        } else {
            // SAFETY: the driver refused it.
            unsafe { Leaf::drop_raw(leaf) };
            self.board.leave(Notice::Callback(number, 0));
        }
    }

    /// Recreates events as user events. Completed ones get their status immediately, and their
    /// times are kept here.
    fn restore_events(&mut self, events: &[SavedEvent]) -> Result<Vec<(u32, Event)>, Immovable> {
        let mut restored = Vec::with_capacity(events.len().min(1 << 20));
        for event in events {
            let context = self.backend.contexts.get(event.context);
            let context = context.map_err(|_| Immovable::Wrong("an event of no context"))?;
            let record = Arc::clone(&context.record);
            let mut code = 0;
            let raw = cl!(
                self.backend.api,
                clCreateUserEvent(context.raw, &raw mut code)
            );
            let raw = made(raw, code).or_else(refused("event", event.id.0))?;
            let (mut decided, mut times, mut waiting) = (None, None, Vec::new());
            match &event.status {
                Status::Over(status, known) => {
                    if *status > 0 {
                        return Err(Immovable::Wrong("a status that is none"));
                    }
                    let code = cl!(self.backend.api, clSetUserEventStatus(raw, *status));
                    crate::driver::outcome(code)
                        .or_else(refused("the status of event", event.id.0))?;
                    decided = Some(*status);
                    times = Some(known.clone());
                }
                Status::Undecided(all) => {
                    self.undecided += 1;
                    waiting.clone_from(all);
                    for (at, number) in all {
                        self.restore_callback(raw, *at, *number);
                    }
                }
            }
            let event_of = Event {
                raw,
                queue: event.queue,
                context: record,
                decided,
                callbacks: waiting,
                times,
            };
            restored.push((event.id.0, event_of));
        }
        Ok(restored)
    }

    fn restore_callback(&mut self, event: Handle, at: i32, number: u64) {
        self.expected += 1;
        let leaf = Leaf::into_raw(&self.board, number);
        let code = cl!(
            self.backend.api,
            clSetEventCallback(event, at, Some(callbacks::event), leaf)
        );
        if code != 0 {
            // SAFETY: the driver refused it.
            unsafe { Leaf::drop_raw(leaf) };
            self.board.leave(Notice::Callback(number, code));
        }
    }

    /// Gives the objects the application's numbers, and releases objects without one.
    fn renumber(
        &mut self,
        objects: &Objects,
        contexts: &HashMap<u32, u32>,
    ) -> Result<(), Immovable> {
        let offered: u32 = objects.offered.iter().map(|all| all.len() as u32).sum();
        let has_offered = |names: &Names| {
            let own = |(from, to): &(u32, u32)| (*from < offered || *to < offered) && from != to;
            names
                .made
                .iter()
                .filter(|(from, _)| *from < offered)
                .count()
                == offered as usize
                && !names.made.iter().any(own)
        };
        if !has_offered(&objects.devices) {
            return Err(Immovable::Wrong("devices that are not offered"));
        }
        let api = Arc::clone(&self.backend.api);
        macro_rules! renumber {
            ($($kind:ident $release:ident)*) => {$(
                let Names { made, failed } = &objects.$kind;
                let left = self.backend.$kind.renumber(made);
                if self.backend.$kind.iter().count() != made.len() {
                    return Err(Immovable::Wrong("numbers of objects"));
                }
                for object in left {
                    cl!(api, $release(object.raw));
                }
                for (id, code) in failed {
                    self.backend.$kind.put(*id, Err(*code));
                }
            )*};
        }
        renumber! {
            kernels clReleaseKernel
            programs clReleaseProgram
            samplers clReleaseSampler
            mems clReleaseMemObject
            queues clReleaseCommandQueue
            contexts clReleaseContext
            devices clReleaseDevice
        }
        // Errors of a queue's commands are reported under its context's number.
        for queue in self.backend.queues.iter_mut() {
            let number = queue.made.context.0;
            let known = contexts.get(&number).copied();
            queue.made.context = ContextId(known.unwrap_or(NO_CONTEXT | number));
        }
        let reporters = std::mem::take(&mut self.backend.reporters);
        let renamed = reporters.into_iter().map(|(id, reporter)| {
            let known = contexts.get(&id.0).copied();
            (ContextId(known.unwrap_or(NO_CONTEXT | id.0)), reporter)
        });
        self.backend.reporters = renamed.collect();
        Ok(())
    }

    /// Maps buffers in the window again. What the application sees there is authoritative, and the
    /// device receives it when each mapping ends.
    fn restore_maps(&mut self, objects: &Objects) -> Result<(), Immovable> {
        let mut queues = contents::Queues::default();
        for one in &objects.maps {
            let mem = self.backend.mems.get(one.mem.0);
            let mem = mem.map_err(|_| Immovable::Wrong("a mapping of no buffer"))?;
            let (raw, home) = (mem.raw, mem.home.raw);
            let queue = queues.of(self, home, &mem.record.context)?;
            let map = |flags: u64| {
                let mut code = 0;
                let pointer = cl!(
                    self.backend.api,
                    clEnqueueMapBuffer(
                        queue,
                        raw,
                        1,
                        flags,
                        one.offset as usize,
                        one.size as usize,
                        0,
                        std::ptr::null(),
                        std::ptr::null_mut(),
                        &raw mut code,
                    )
                );
                if code == 0 { Ok(pointer) } else { Err(code) }
            };
            let pointer = map(codes::MAP_WRITE_INVALIDATE_REGION)
                // The host may only read this buffer: both sides have the same contents.
                .or_else(|_| map(codes::MAP_READ))
                .or_else(refused("a mapping of buffer", one.mem.0))?;
            let mem = self.backend.mems.get_mut(one.mem.0);
            mem.map_err(|_| Immovable::Wrong("a mapping"))?
                .maps
                .push(Map {
                    offset: one.offset,
                    size: one.size,
                    pointer: pointer as usize,
                });
        }
        queues.end(&self.backend.api);
        Ok(())
    }
}
