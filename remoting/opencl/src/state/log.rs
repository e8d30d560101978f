//! The log of calls that recreate an application's objects, from the records of these.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use remoting_proto::{
    apis::opencl::calls::{
        self, Call, ContextId, CreateProgram, CreateSubBuffer, CreateSubDevices, DeviceId,
        LinkProgram, MemId, ProgramId, ProgramOrigin, Specialize,
    },
    wire::Blob,
};
use remoting_session::image::Immovable;

use super::Entry;
use crate::{
    objects::MadeMem,
    provenance::{ContextRecord, DeviceRecord, MemRecord},
    records::{Build, Built, Linked, Origin, ProgramRecord},
};

/// An object that cannot be recreated.
pub(super) fn lost<T>(what: &str) -> Result<T, Immovable> {
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
pub(super) struct Leaves(HashMap<u64, u32>);

impl Leaves {
    /// The number of an object, and whether it is new.
    pub fn number(&mut self, birth: u64) -> (u32, bool) {
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
    pub queues: Leaves,
    pub samplers: Leaves,
    pub kernels: Leaves,
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
    pub fn begin(&mut self) {
        self.needed.clear();
    }

    /// The buffers and images of the log that nothing has needed in this part.
    pub fn dropped(&self) -> Vec<u32> {
        let all = 0..self.mems.next;
        all.filter(|number| !self.needed.contains(number)).collect()
    }

    pub fn add<C: Call>(&mut self, call: &C) {
        let mut bytes = Vec::new();
        call.put(&mut bytes);
        self.entries.push(Entry {
            opcode: C::OPCODE,
            call: Blob(bytes),
        });
    }

    pub fn device(&mut self, record: &DeviceRecord) -> Result<DeviceId, Immovable> {
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
