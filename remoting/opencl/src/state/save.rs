//! Converts the records of objects to the log.

use remoting_proto::{
    apis::opencl::{
        calls::{self, CreateKernel, EventId, MemId, SamplerId, SetArgument, Value},
        codes,
    },
    wire::Blob,
};
use remoting_session::{
    image::{Immovable, Writer},
    postcopy::Remaining,
    table::Table,
};

use super::{
    Mapping, Names, Objects, Precopied, Refused, SavedEvent, Status, contents,
    copies::Copies,
    log::{Log, lost},
    postcopy::{self, LARGE},
};
use crate::{
    Server,
    driver::{cl, status},
    objects::{Event, Kernel},
    records::Argument,
    written::Written,
};

/// The parameters of an event's profiling times.
const TIMES: [u32; 5] = [
    codes::PROFILING_COMMAND_QUEUED,
    codes::PROFILING_COMMAND_SUBMIT,
    codes::PROFILING_COMMAND_START,
    codes::PROFILING_COMMAND_END,
    codes::PROFILING_COMMAND_COMPLETE,
];

/// The objects of a table by the application's numbers. `add` returns each object's number in the
/// log, given its birth and the object.
fn names<T>(
    table: &Table<T>,
    mut add: impl FnMut(u64, &T) -> Result<u32, Immovable>,
) -> Result<Names, Immovable> {
    let (mut made, mut failed) = (Vec::new(), Vec::new());
    for (id, entry) in table.entries() {
        match entry {
            Ok(object) => made.push((add(table.birth(id), object)?, id)),
            Err(code) => failed.push((id, code)),
        }
    }
    Ok(Names { made, failed })
}

/// The numbers of all objects that others are made from, or that are made from others.
pub(super) struct AllNames {
    devices: Names,
    pub contexts: Names,
    queues: Names,
    mems: Names,
    samplers: Names,
    programs: Names,
    kernels: Names,
}

impl Server {
    /// The kinds of the offered devices, by platform.
    pub(super) fn offered_kinds(&self) -> Vec<Vec<u64>> {
        let platforms = self.backend.platforms.iter();
        platforms
            .map(|platform| platform.devices.iter().map(|device| device.kind).collect())
            .collect()
    }

    /// A log without entries.
    pub(super) fn empty_log(&self) -> Log {
        let platforms = self.backend.platforms.iter();
        let count: usize = platforms.map(|platform| platform.devices.len()).sum();
        Log::new(count as u32)
    }

    /// Checks that all objects can be recreated.
    pub(in super::super) fn check_objects(&self) -> Result<(), Immovable> {
        self.log_objects(&mut self.empty_log()).map(drop)
    }

    /// Writes to the log what it does not contain yet. A kernel whose build is not told comes later: of which build it is
    /// may change.
    pub(super) fn log_objects(&self, log: &mut Log) -> Result<AllNames, Immovable> {
        if !self.backend.svm.is_empty() {
            return lost("it has shared virtual memory");
        }
        log.begin();
        let backend = &self.backend;
        let devices = names(&backend.devices, |_, device| {
            Ok(log.device(&device.record)?.0)
        })?;
        let contexts = names(&backend.contexts, |_, context| {
            Ok(log.context(&context.record)?.0)
        })?;
        let queues = names(&backend.queues, |birth, queue| {
            let device = log.device(&queue.device)?;
            let context = log.context(&queue.context)?;
            let (number, is_new) = log.queues.number(birth);
            if is_new {
                log.add(&calls::CreateQueue {
                    id: calls::QueueId(number),
                    context,
                    device,
                    ..queue.made.clone()
                });
            }
            Ok(number)
        })?;
        let mems = names(&backend.mems, |_, mem| Ok(log.mem(&mem.record)?.0))?;
        let samplers = names(&backend.samplers, |birth, sampler| {
            let context = log.context(&sampler.context)?;
            let (number, is_new) = log.samplers.number(birth);
            if is_new {
                log.add(&calls::CreateSampler {
                    id: SamplerId(number),
                    context,
                    ..sampler.made.clone()
                });
            }
            Ok(number)
        })?;
        let programs = names(&backend.programs, |_, program| {
            Ok(log.program(&program.record)?.0)
        })?;
        let kernels = names(&backend.kernels, |birth, kernel| {
            if kernel.is_untold {
                return Ok(u32::MAX);
            }
            let program = log.program(&kernel.program)?;
            let (number, is_new) = log.kernels.number(birth);
            if is_new {
                log.add(&CreateKernel {
                    id: calls::KernelId(number),
                    program,
                    name: kernel.name.clone(),
                });
            }
            Ok(number)
        })?;
        Ok(AllNames {
            devices,
            contexts,
            queues,
            mems,
            samplers,
            programs,
            kernels,
        })
    }

    /// The state of a server without outstanding work, except what has been written before.
    pub(in super::super) fn save_objects(
        &mut self,
        precopied: Option<Precopied>,
        image: &mut Writer,
        postcopy: bool,
    ) -> Result<(Objects, Option<Remaining>), Immovable> {
        let (mut log, mut copies, written) = match precopied {
            Some(known) => known.into_parts()?,
            None => (self.empty_log(), Copies::default(), Written::all()),
        };
        if self.backend.kernels.iter().any(|kernel| kernel.is_untold) {
            return Err(Immovable::Has("its programs are being built".to_owned()));
        }
        let all = self.log_objects(&mut log)?;
        let (arguments, refused) = self.arguments()?;
        let (events, failed_events) = self.events(&mut log)?;
        let mut destructors = Vec::new();
        for (record, number) in self.backend.destructors() {
            // If nothing is made from it any more, its end is reported as soon as the application
            // continues.
            let known = record.and_then(|record| log.known_mem(&record));
            destructors.push((known.unwrap_or(u32::MAX), number));
        }
        let maps = self.maps();
        let queues_of = self.backend.queues.entries();
        let deferred = queues_of
            .filter_map(|(id, queue)| Some((calls::QueueId(id), queue.ok()?.deferred?)))
            .collect();
        contents::sync(self)?;
        let (left, roots): (Vec<_>, Vec<_>) = contents::roots(self, &log, &written)?
            .into_iter()
            .partition(|root| postcopy && root.bytes() >= LARGE && copies.is_due(root));
        let contents = copies.save(&self.backend.api, &roots, image)?;
        let missing = left.iter().map(|root| root.number).collect();
        let remaining = postcopy::remaining(&self.backend.api, copies, left);
        let objects = Objects {
            offered: self.offered_kinds(),
            told: self.backend.told.all(),
            log: log.entries,
            devices: all.devices,
            contexts: all.contexts,
            queues: all.queues,
            mems: all.mems,
            samplers: all.samplers,
            programs: all.programs,
            kernels: all.kernels,
            failed_events,
            deferred,
            arguments,
            refused,
            maps,
            events,
            destructors,
            contents,
            missing,
        };
        Ok((objects, remaining))
    }

    /// Mappings of buffers in the window.
    fn maps(&self) -> Vec<Mapping> {
        let mems = self.backend.mems.entries();
        let mems = mems.filter_map(|(id, mem)| Some((MemId(id), mem.ok()?)));
        mems.flat_map(|(mem, object)| {
            object.maps.iter().map(move |map| Mapping {
                mem,
                offset: map.offset,
                size: map.size,
            })
        })
        .collect()
    }

    /// The kernels' arguments. An argument whose object was released stays without a value.
    fn arguments(&self) -> Result<(Vec<SetArgument>, Vec<Refused>), Immovable> {
        let (mut arguments, mut refused) = (Vec::new(), Vec::new());
        for (id, kernel) in self.backend.kernels.entries() {
            let Ok(kernel) = kernel else {
                continue;
            };
            let id = calls::KernelId(id);
            for (index, argument) in kernel.arguments.all() {
                if let Some(value) = self.value(argument)? {
                    arguments.push(SetArgument {
                        kernel: id,
                        index,
                        value,
                    });
                }
            }
            let Kernel { refused: codes, .. } = kernel;
            refused.extend(codes.iter().map(|(index, code)| Refused {
                kernel: id,
                index: *index,
                code: *code,
            }));
        }
        Ok((arguments, refused))
    }

    fn value(&self, argument: &Argument) -> Result<Option<Value>, Immovable> {
        Ok(match argument {
            Argument::Bytes(bytes) => Some(Value::Bytes(Blob(bytes.clone()))),
            Argument::Mem(None) => Some(Value::Mem(None)),
            Argument::Mem(Some(mem)) => {
                let lives = self.backend.mems.birth(mem.id.0) == mem.birth;
                lives.then_some(Value::Mem(Some(mem.id)))
            }
            Argument::Sampler(sampler) => {
                let lives = self.backend.samplers.birth(sampler.id.0) == sampler.birth;
                lives.then_some(Value::Sampler(sampler.id))
            }
            Argument::Local(size) => Some(Value::Local(*size)),
            Argument::Svm(None) => Some(Value::Svm(None)),
            Argument::Svm(Some(_)) => return lost("it has shared virtual memory"),
            Argument::Lost => return lost("it has a kernel with too many or too large arguments"),
        })
    }

    fn events(&self, log: &mut Log) -> Result<(Vec<SavedEvent>, Vec<(u32, i32)>), Immovable> {
        let (mut events, mut failed) = (Vec::new(), Vec::new());
        for (id, event) in self.backend.events.entries() {
            let event = match event {
                Ok(event) => event,
                Err(code) => {
                    failed.push((id, code));
                    continue;
                }
            };
            let context = log.context(&event.context)?;
            let api = &self.backend.api;
            let code = status(api, event.raw);
            let status = if event.is_undecided() {
                Status::Undecided(event.callbacks.clone())
            } else if code <= 0 {
                Status::Over(code, self.times(event))
            } else {
                return lost("a command has begun after all had ended");
            };
            events.push(SavedEvent {
                id: EventId(id),
                queue: event.queue,
                context: context.0,
                status,
            });
        }
        Ok((events, failed))
    }

    /// The profiling times of an event's command that its driver knows.
    fn times(&self, event: &Event) -> Vec<(u32, u64)> {
        if let Some(times) = &event.times {
            return times.clone();
        }
        let queue = event
            .queue
            .and_then(|id| self.backend.queues.get(id.0).ok());
        if queue.is_some_and(|queue| !queue.profiles()) || event.queue.is_none() {
            return Vec::new();
        }
        let known = TIMES.into_iter().filter_map(|name| {
            let mut time = 0u64;
            let code = cl!(
                self.backend.api,
                clGetEventProfilingInfo(
                    event.raw,
                    name,
                    size_of::<u64>(),
                    (&raw mut time).cast(),
                    std::ptr::null_mut(),
                )
            );
            (code == 0).then_some((name, time))
        });
        known.collect()
    }
}
