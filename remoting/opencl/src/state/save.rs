//! Converts the records of objects to the log.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use remoting_proto::{
    apis::opencl::{
        calls::{
            self, Call, ContextId, CreateKernel, CreateProgram, CreateSubBuffer, CreateSubDevices,
            DeviceId, EventId, LinkProgram, MemId, ProgramId, ProgramOrigin, SamplerId,
            SetArgument, Specialize, Value,
        },
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
    Entry, Mapping, Names, Objects, Precopied, Refused, SavedEvent, Status, contents,
    copies::Copies,
    postcopy::{self, LARGE},
};
use crate::{
    Server,
    driver::{cl, status},
    objects::{Event, Kernel, MadeMem},
    provenance::{ContextRecord, DeviceRecord, MemRecord},
    records::{Argument, Build, Built, Linked, Origin, ProgramRecord},
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

/// An object that cannot be recreated.
fn lost<T>(what: &str) -> Result<T, Immovable> {
    Err(Immovable::Has(what.to_owned()))
}

/// Numbers of objects that are identified by their records. The records are kept, so that no two
/// have the same address.
#[derive(Debug)]
struct Numbers<R> {
    by_record: HashMap<usize, (u32, Arc<R>)>,
    next: u32,
}

impl<R> Numbers<R> {
    fn from(next: u32) -> Self {
        Self {
            by_record: HashMap::new(),
            next,
        }
    }

    /// The number of an object that is in the log.
    fn known(&self, record: &Arc<R>) -> Option<u32> {
        let known = self.by_record.get(&Arc::as_ptr(record).addr());
        known.map(|(number, _)| *number)
    }

    /// Assigns a number to a new object.
    fn give(&mut self, record: &Arc<R>) -> u32 {
        let number = self.anonymous();
        let key = Arc::as_ptr(record).addr();
        self.by_record.insert(key, (number, Arc::clone(record)));
        number
    }

    /// A number without a record.
    fn anonymous(&mut self) -> u32 {
        self.next += 1;
        self.next - 1
    }
}

/// Numbers of objects from which nothing is made, by their births.
#[derive(Debug, Default)]
struct Leaves(HashMap<u64, u32>);

impl Leaves {
    /// The number of an object, and whether it is new.
    fn number(&mut self, birth: u64) -> (u32, bool) {
        let next = self.0.len() as u32;
        let number = *self.0.entry(birth).or_insert(next);
        (number, number == next)
    }
}

/// The log as far as it is written. It can be written in several parts, while the application
/// creates and releases objects: a part does not repeat what an earlier one contains.
#[derive(Debug)]
pub(super) struct Log {
    /// Entries that have not been taken yet.
    pub entries: Vec<Entry>,
    /// By the calls that made them.
    parts: Numbers<CreateSubDevices>,
    contexts: Numbers<ContextRecord>,
    mems: Numbers<MemRecord>,
    programs: Numbers<ProgramRecord>,
    queues: Leaves,
    samplers: Leaves,
    kernels: Leaves,
    /// Buffers and images that something has needed since [`begin`](Self::begin).
    needed: HashSet<u32>,
}

impl Log {
    /// `offered` devices exist without any call.
    pub fn new(offered: u32) -> Self {
        Self {
            entries: Vec::new(),
            parts: Numbers::from(offered),
            contexts: Numbers::from(0),
            mems: Numbers::from(0),
            programs: Numbers::from(0),
            queues: Leaves::default(),
            samplers: Leaves::default(),
            kernels: Leaves::default(),
            needed: HashSet::new(),
        }
    }

    /// Begins another part.
    fn begin(&mut self) {
        self.needed.clear();
    }

    /// The buffers and images of the log that nothing has needed in this part.
    pub fn dropped(&self) -> Vec<u32> {
        let all = 0..self.mems.next;
        all.filter(|number| !self.needed.contains(number)).collect()
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
        let first = match self.parts.known(&part.call) {
            Some(first) => first,
            None => {
                let Some(of) = &part.of else {
                    return lost("it has parts of devices that are themselves parts, too deep");
                };
                let device = self.device(of)?;
                let first = self.parts.give(&part.call);
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
        if let Some(known) = self.contexts.known(record) {
            return Ok(ContextId(known));
        }
        let devices = self.devices(&record.devices)?;
        let id = ContextId(self.contexts.give(record));
        self.add(&calls::CreateContext {
            id,
            devices,
            platform: record.call.platform,
        });
        Ok(id)
    }

    /// The number of a buffer or image that is in the log.
    pub fn known_mem(&self, record: &Arc<MemRecord>) -> Option<u32> {
        self.mems.known(record)
    }

    pub fn mem(&mut self, record: &Arc<MemRecord>) -> Result<MemId, Immovable> {
        let of = record.of.as_ref().map(|of| self.mem(of)).transpose()?;
        if let Some(known) = self.known_mem(record) {
            self.needed.insert(known);
            return Ok(MemId(known));
        }
        let context = self.context(&record.context)?;
        let id = MemId(self.mems.give(record));
        self.needed.insert(id.0);
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

    /// A program that was not made from programs, from its record.
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

    /// A header, which was a program once. Each use adds one.
    fn header(&mut self, origin: &Arc<Origin>, context: ContextId) -> Result<ProgramId, Immovable> {
        let Origin::Created(call, devices) = &**origin else {
            return lost("it has a linked program for a header");
        };
        let id = ProgramId(self.programs.anonymous());
        self.created(id, context, call, devices)?;
        Ok(id)
    }

    pub fn program(&mut self, record: &Arc<ProgramRecord>) -> Result<ProgramId, Immovable> {
        if let Some(known) = self.programs.known(record) {
            return Ok(ProgramId(known));
        }
        if record.has_lost {
            return lost("it has a program with too many specialization constants");
        }
        let context = self.context(&record.context)?;
        let id = match &*record.origin {
            Origin::Created(call, devices) => {
                let id = ProgramId(self.programs.give(record));
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
                let id = ProgramId(self.programs.give(record));
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
        let none = BTreeMap::new();
        let of_build = record.built.as_ref().map(|built| &built.constants);
        let of_build = of_build.unwrap_or(&none);
        self.specialize(id, of_build.iter());
        if let Some(built) = &record.built {
            self.built(id, context, built)?;
        }
        // What has been set since.
        let now = record.constants.iter();
        self.specialize(
            id,
            now.filter(|(at, value)| of_build.get(at) != Some(value)),
        );
        Ok(id)
    }

    fn specialize<'a>(
        &mut self,
        id: ProgramId,
        constants: impl Iterator<Item = (&'a u32, &'a Blob)>,
    ) {
        for (constant, value) in constants {
            self.add(&Specialize {
                id,
                constant: *constant,
                value: value.clone(),
            });
        }
    }

    fn built(
        &mut self,
        id: ProgramId,
        context: ContextId,
        Built { call, devices, .. }: &Built,
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
