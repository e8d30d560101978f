//! From the records of objects to the log.

use std::{collections::HashMap, hash::Hash, sync::Arc};

use super::{Entry, Mapping, Names, Objects, Refused, SavedEvent, Status, contents};
use crate::{
    apis::opencl::{
        calls::{
            self, Call, ContextId, CreateKernel, CreateProgram, CreateSubBuffer, CreateSubDevices,
            DeviceId, EventId, LinkProgram, MemId, ProgramId, ProgramOrigin, SamplerId,
            SetArgument, Specialize, Value,
        },
        codes,
    },
    backends::opencl::{
        Server,
        driver::{cl, status},
        objects::{Event, Kernel, MadeMem},
        provenance::{ContextRecord, DeviceRecord, MemRecord},
        records::{Argument, Build, Built, Linked, Origin, ProgramRecord},
    },
    session::{
        image::{Immovable, Writer},
        table::Table,
    },
    wire::Blob,
};

/// What an event's times are asked for by.
const TIMES: [u32; 5] = [
    codes::PROFILING_COMMAND_QUEUED,
    codes::PROFILING_COMMAND_SUBMIT,
    codes::PROFILING_COMMAND_START,
    codes::PROFILING_COMMAND_END,
    codes::PROFILING_COMMAND_COMPLETE,
];

/// Something that cannot be made again.
fn lost<T>(what: &str) -> Result<T, Immovable> {
    Err(Immovable::Has(what.to_owned()))
}

/// Numbers of objects that are known by their records.
#[derive(Debug)]
struct Numbers<K> {
    by_record: HashMap<K, u32>,
    next: u32,
}

impl<K: Eq + Hash> Numbers<K> {
    fn from(next: u32) -> Self {
        Self {
            by_record: HashMap::new(),
            next,
        }
    }

    /// The number of an object that is in the log.
    fn known(&self, record: &K) -> Option<u32> {
        self.by_record.get(record).copied()
    }

    /// A number for a new object.
    fn give(&mut self, record: K) -> u32 {
        let number = self.anonymous();
        self.by_record.insert(record, number);
        number
    }

    /// A number that is no record's.
    fn anonymous(&mut self) -> u32 {
        self.next += 1;
        self.next - 1
    }
}

/// The log as far as it is written.
#[derive(Debug)]
pub(super) struct Log {
    pub entries: Vec<Entry>,
    /// By the calls that have made them.
    parts: Numbers<*const CreateSubDevices>,
    contexts: Numbers<*const ContextRecord>,
    mems: Numbers<*const MemRecord>,
    programs: Numbers<*const ProgramRecord>,
    queues: u32,
    samplers: u32,
    kernels: u32,
}

impl Log {
    /// `offered` devices are there without any call.
    fn new(offered: u32) -> Self {
        Self {
            entries: Vec::new(),
            parts: Numbers::from(offered),
            contexts: Numbers::from(0),
            mems: Numbers::from(0),
            programs: Numbers::from(0),
            queues: 0,
            samplers: 0,
            kernels: 0,
        }
    }

    fn add<C: Call>(&mut self, call: &C) {
        let mut bytes = Vec::new();
        call.put(&mut bytes);
        self.entries.push(Entry {
            opcode: C::OPCODE,
            call: Blob(bytes),
        });
    }

    fn device(&mut self, record: &DeviceRecord) -> Result<DeviceId, Immovable> {
        let part = match record {
            DeviceRecord::Offered(id) => return Ok(*id),
            DeviceRecord::Part(part) => part,
        };
        let key = Arc::as_ptr(&part.call);
        let first = match self.parts.known(&key) {
            Some(first) => first,
            None => {
                let Some(of) = &part.of else {
                    return lost("it has parts of devices that are themselves parts, too deep");
                };
                let device = self.device(of)?;
                let first = self.parts.give(key);
                let ids = (first..).map(DeviceId).take(part.call.ids.len()).collect();
                self.parts.next = first + part.call.ids.len() as u32;
                self.add(&CreateSubDevices {
                    device,
                    properties: part.call.properties.clone(),
                    ids,
                });
                first
            }
        };
        Ok(DeviceId(first + part.place as u32))
    }

    fn devices(&mut self, records: &[Arc<DeviceRecord>]) -> Result<Vec<DeviceId>, Immovable> {
        records.iter().map(|record| self.device(record)).collect()
    }

    pub fn context(&mut self, record: &Arc<ContextRecord>) -> Result<ContextId, Immovable> {
        let key = Arc::as_ptr(record);
        if let Some(known) = self.contexts.known(&key) {
            return Ok(ContextId(known));
        }
        let devices = self.devices(&record.devices)?;
        let id = ContextId(self.contexts.give(key));
        self.add(&calls::CreateContext {
            id,
            devices,
            platform: record.call.platform,
        });
        Ok(id)
    }

    /// The number of a buffer or image that is in the log.
    pub fn known_mem(&self, record: &Arc<MemRecord>) -> Option<u32> {
        self.mems.known(&Arc::as_ptr(record))
    }

    pub fn mem(&mut self, record: &Arc<MemRecord>) -> Result<MemId, Immovable> {
        if let Some(known) = self.known_mem(record) {
            return Ok(MemId(known));
        }
        let context = self.context(&record.context)?;
        let of = record.of.as_ref().map(|of| self.mem(of)).transpose()?;
        let id = MemId(self.mems.give(Arc::as_ptr(record)));
        match &record.call {
            MadeMem::Buffer(call) if call.svm.is_some() => {
                return lost("it has buffers in shared virtual memory");
            }
            MadeMem::Buffer(call) => self.add(&calls::CreateBuffer {
                id,
                context,
                contents: None,
                ..call.clone()
            }),
            MadeMem::Sub(call) => {
                let Some(of) = of else {
                    return lost("it has parts of parts of buffers, too deep");
                };
                self.add(&CreateSubBuffer {
                    id,
                    of,
                    ..call.clone()
                });
            }
            MadeMem::Image(call) => {
                if call.shape.of.is_some() && of.is_none() {
                    return lost("it has images of images, too deep");
                }
                let mut call = calls::CreateImage {
                    id,
                    context,
                    contents: None,
                    ..call.clone()
                };
                call.shape.of = of;
                self.add(&call);
            }
        }
        Ok(id)
    }

    /// A program of something that is no program, as its record has it.
    fn created(
        &mut self,
        id: ProgramId,
        context: ContextId,
        call: &CreateProgram,
        devices: &[Arc<DeviceRecord>],
    ) -> Result<(), Immovable> {
        let devices = self.devices(devices)?;
        let origin = match &call.origin {
            ProgramOrigin::Binary(binaries) => {
                let blobs = binaries.iter().map(|(_, blob)| blob.clone());
                ProgramOrigin::Binary(devices.into_iter().zip(blobs).collect())
            }
            ProgramOrigin::BuiltIn(_, names) => ProgramOrigin::BuiltIn(devices, names.clone()),
            other => other.clone(),
        };
        self.add(&CreateProgram {
            id,
            context,
            origin,
        });
        Ok(())
    }

    /// A header, which was a program once: one for each use.
    fn header(&mut self, origin: &Arc<Origin>, context: ContextId) -> Result<ProgramId, Immovable> {
        let Origin::Created(call, devices) = &**origin else {
            return lost("it has a linked program for a header");
        };
        let id = ProgramId(self.programs.anonymous());
        self.created(id, context, call, devices)?;
        Ok(id)
    }

    pub fn program(&mut self, record: &Arc<ProgramRecord>) -> Result<ProgramId, Immovable> {
        let key = Arc::as_ptr(record);
        if let Some(known) = self.programs.known(&key) {
            return Ok(ProgramId(known));
        }
        if record.has_lost {
            return lost("it has a program with too many specialization constants");
        }
        let context = self.context(&record.context)?;
        let id = match &*record.origin {
            Origin::Created(call, devices) => {
                let id = ProgramId(self.programs.give(key));
                self.created(id, context, call, devices)?;
                id
            }
            Origin::Linked(Linked {
                call,
                devices,
                inputs,
                ..
            }) => {
                let Some(inputs) = inputs else {
                    return lost("it has a program that was linked of too many or too large ones");
                };
                let inputs: Result<_, _> = inputs.iter().map(|one| self.program(one)).collect();
                let (inputs, devices) = (inputs?, self.devices(devices)?);
                let id = ProgramId(self.programs.give(key));
                self.add(&LinkProgram {
                    id,
                    context,
                    devices,
                    options: call.options.clone(),
                    inputs,
                });
                id
            }
        };
        for (constant, value) in &record.constants {
            self.add(&Specialize {
                id,
                constant: *constant,
                value: value.clone(),
            });
        }
        if let Some(built) = &record.built {
            self.built(id, context, built)?;
        }
        Ok(id)
    }

    fn built(
        &mut self,
        id: ProgramId,
        context: ContextId,
        Built { call, devices }: &Built,
    ) -> Result<(), Immovable> {
        let devices = self.devices(devices)?;
        match call {
            Build::Whole(call) => self.add(&calls::BuildProgram {
                id,
                devices,
                ..call.clone()
            }),
            Build::Compiled(_, None) => {
                return lost("it has a program with too many or too large headers");
            }
            Build::Compiled(call, Some(origins)) => {
                let mut headers = Vec::with_capacity(origins.len());
                for (origin, (_, name)) in origins.iter().zip(&call.headers) {
                    headers.push((self.header(origin, context)?, name.clone()));
                }
                self.add(&calls::CompileProgram {
                    id,
                    devices,
                    headers,
                    ..call.clone()
                });
            }
        }
        Ok(())
    }
}

/// The objects of a table by the application's numbers, and what `add` makes of each: its number in
/// the log.
fn names<T>(
    table: &Table<T>,
    mut add: impl FnMut(u32, &T) -> Result<u32, Immovable>,
) -> Result<Names, Immovable> {
    let (mut made, mut failed) = (Vec::new(), Vec::new());
    for (id, entry) in table.entries() {
        match entry {
            Ok(object) => made.push((add(id, object)?, id)),
            Err(code) => failed.push((id, code)),
        }
    }
    Ok(Names { made, failed })
}

impl Server {
    pub(in super::super) fn save_objects(
        &mut self,
        image: &mut Writer,
    ) -> Result<Objects, Immovable> {
        if !self.backend.svm.is_empty() {
            return lost("it has shared virtual memory");
        }
        let backend = &self.backend;
        let platforms = backend.platforms.iter();
        let offered: Vec<Vec<_>> = platforms
            .map(|platform| platform.devices.iter().map(|device| device.kind).collect())
            .collect();
        let count: usize = offered.iter().map(Vec::len).sum();
        let mut log = Log::new(count as u32);
        // The records live as long as the objects, so that no two have the same address.
        let devices = names(&backend.devices, |_, device| {
            Ok(log.device(&device.record)?.0)
        })?;
        let contexts = names(&backend.contexts, |_, context| {
            Ok(log.context(&context.record)?.0)
        })?;
        let queues = names(&backend.queues, |_, queue| {
            let device = log.device(&queue.device)?;
            let context = log.context(&queue.context)?;
            let number = log.queues;
            log.queues += 1;
            log.add(&calls::CreateQueue {
                id: calls::QueueId(number),
                context,
                device,
                ..queue.made.clone()
            });
            Ok(number)
        })?;
        let mems = names(&backend.mems, |_, mem| Ok(log.mem(&mem.record)?.0))?;
        let samplers = names(&backend.samplers, |_, sampler| {
            let context = log.context(&sampler.context)?;
            let number = log.samplers;
            log.samplers += 1;
            log.add(&calls::CreateSampler {
                id: SamplerId(number),
                context,
                ..sampler.made.clone()
            });
            Ok(number)
        })?;
        let programs = names(&backend.programs, |_, program| {
            Ok(log.program(&program.record)?.0)
        })?;
        let kernels = names(&backend.kernels, |_, kernel| {
            let program = log.program(&kernel.program)?;
            let number = log.kernels;
            log.kernels += 1;
            log.add(&CreateKernel {
                id: calls::KernelId(number),
                program,
                name: kernel.name.clone(),
            });
            Ok(number)
        })?;
        let (arguments, refused) = self.arguments()?;
        let (events, failed_events) = self.events(&mut log)?;
        let mut destructors = Vec::new();
        for (record, number) in self.backend.destructors() {
            // Of one that nothing is made of any more, the end is told as soon as it goes on.
            destructors.push((log.known_mem(&record).unwrap_or(u32::MAX), number));
        }
        let maps = self.maps();
        let queues_of = self.backend.queues.entries();
        let deferred = queues_of
            .filter_map(|(id, queue)| Some((calls::QueueId(id), queue.ok()?.deferred?)))
            .collect();
        let contents = contents::save(self, &log, image)?;
        Ok(Objects {
            offered,
            log: log.entries,
            devices,
            contexts,
            queues,
            mems,
            samplers,
            programs,
            kernels,
            failed_events,
            deferred,
            arguments,
            refused,
            maps,
            events,
            destructors,
            contents,
        })
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

    /// What the kernels' arguments are. One whose object was released stays without a value.
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

    /// The times of an event's command that its driver knows.
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
