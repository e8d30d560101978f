//! How programs and kernels were made, as far as recreating them needs it.
//!
//! The objects that a kernel or a linked program was made from may be released before it, and their
//! numbers may be reused. A record therefore holds the records of what it needs, including its
//! context and devices, and names no such object by its number alone. It is immutable while shared:
//! a program that is rebuilt gets another record.
//!
//! What a client can make them grow to is bounded. Besides the calls about itself and its context,
//! each at most one frame, a program keeps [`MOST_KEPT`] bytes of others and [`MOST_CONSTANTS`]
//! constants, and a kernel [`MOST_ARGUMENTS`] values. Anything beyond is recorded as lost.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::AtomicBool},
};

use remoting_proto::{
    apis::opencl::calls::{
        BuildProgram, CompileProgram, CreateProgram, HeaderFile, LinkProgram, MemId, ProgramId,
        ProgramOrigin, SamplerId, Value,
    },
    wire::Blob,
};

use super::provenance::{ContextRecord, DEEPEST, DeviceRecord};

/// Maximum bytes that a program keeps of its linked inputs and included headers.
const MOST_KEPT: usize = 64 << 20;
/// Bytes that a program counts for at least.
const RECORD: usize = 512;
/// Maximum number of constants kept per program.
const MOST_CONSTANTS: usize = 256;
/// Maximum size of a constant in bytes: it is a number.
const LONGEST_CONSTANT: usize = 8;
/// Maximum number of arguments kept per kernel.
pub(crate) const MOST_ARGUMENTS: usize = 1024;
/// Maximum total bytes of plain arguments kept per kernel.
const MOST_PLAIN: usize = 64 << 10;

/// What a program was made from.
#[derive(Debug)]
pub enum Origin {
    /// From something other than programs, with its target devices if the call names them.
    Created(CreateProgram, Vec<Arc<DeviceRecord>>),
    /// From programs.
    Linked(Linked),
}

/// How a program was linked.
#[derive(Debug)]
pub struct Linked {
    /// The call.
    pub call: LinkProgram,
    /// The target devices; those of its context if empty.
    pub devices: Vec<Arc<DeviceRecord>>,
    /// Its inputs as they were then; `None` if they are lost.
    pub inputs: Option<Vec<Arc<ProgramRecord>>>,
    /// Bytes of the inputs that it keeps, and the depth of linking. Both are computed once, because
    /// the same input may occur often, and so may its own inputs.
    bytes: usize,
    depth: usize,
}

impl Linked {
    /// With inputs as they are now; `None` if that is not known.
    pub fn new(
        call: LinkProgram,
        devices: Vec<Arc<DeviceRecord>>,
        inputs: Option<Vec<Arc<ProgramRecord>>>,
    ) -> Self {
        let Some(inputs) = inputs else {
            return Self {
                call,
                devices,
                inputs: None,
                bytes: 0,
                depth: 1,
            };
        };
        let bytes = sum(inputs.iter().map(|input| input.bytes()));
        let depth = inputs.iter().map(|input| input.origin.depth()).max();
        let depth = depth.unwrap_or(0);
        let few = bytes <= MOST_KEPT && depth < DEEPEST;
        Self {
            call,
            devices,
            inputs: few.then_some(inputs),
            bytes: if few { bytes } else { 0 },
            depth: if few { depth + 1 } else { 1 },
        }
    }
}

/// How a program was last built.
#[derive(Debug)]
pub struct Built {
    /// The call.
    pub call: Build,
    /// The target devices; those of its context if empty.
    pub devices: Vec<Arc<DeviceRecord>>,
    /// Its specialization constants when the build was asked for: those of later calls count from the next build on.
    pub constants: BTreeMap<u32, Blob>,
}

/// How a program was built.
#[derive(Debug)]
pub enum Build {
    /// In one step.
    Whole(BuildProgram),
    /// Compiled for linking, with the origins of its headers; `None` if they are lost.
    Compiled(CompileProgram, Option<Vec<Arc<Origin>>>),
}

impl Build {
    /// Compiled with headers as they are now.
    pub fn compiled(call: CompileProgram, headers: Vec<Arc<Origin>>) -> Self {
        // Headers are sources: a linked program cannot be one.
        let few = sum(headers.iter().map(|header| header.bytes())) <= MOST_KEPT
            && headers.iter().all(|header| header.depth() == 0);
        Self::Compiled(call, few.then_some(headers))
    }

    fn bytes(&self) -> usize {
        let files = |options: &Blob, files: &[HeaderFile]| {
            let files = files
                .iter()
                .map(|file| file.name.0.len() + file.contents.0.len());
            options.0.len() + sum(files)
        };
        match self {
            Self::Whole(call) => files(&call.options, &call.included),
            Self::Compiled(call, headers) => {
                let headers = headers.iter().flatten().map(|header| header.bytes());
                files(&call.options, &call.included).saturating_add(sum(headers))
            }
        }
    }
}

/// A saturating sum.
fn sum(all: impl Iterator<Item = usize>) -> usize {
    all.fold(0, usize::saturating_add)
}

impl Origin {
    fn depth(&self) -> usize {
        match self {
            Self::Created(..) => 0,
            Self::Linked(linked) => linked.depth,
        }
    }

    fn bytes(&self) -> usize {
        let own = match self {
            Self::Created(call, _) => match &call.origin {
                ProgramOrigin::Source(text) => text.0.len(),
                ProgramOrigin::Il(words) => words.0.len(),
                ProgramOrigin::Binary(all) => sum(all.iter().map(|(_, one)| one.0.len())),
                ProgramOrigin::BuiltIn(_, names) => names.0.len(),
            },
            Self::Linked(linked) => linked.bytes.saturating_add(linked.call.options.0.len()),
        };
        own.saturating_add(RECORD)
    }
}

/// How a program was made.
#[derive(Clone, Debug)]
pub struct ProgramRecord {
    /// Its context.
    pub context: Arc<ContextRecord>,
    /// What it was made from.
    pub origin: Arc<Origin>,
    /// Its specialization constants.
    pub constants: BTreeMap<u32, Blob>,
    /// How it was last built.
    pub built: Option<Arc<Built>>,
    /// Whether it has constants that are not recorded here.
    pub has_lost: bool,
    /// Whether it has been built with variables that kernels may change. All records of the program share this.
    pub has_variables: Arc<AtomicBool>,
}

impl ProgramRecord {
    /// The record of a program that has just been made.
    pub fn new(context: Arc<ContextRecord>, origin: Origin) -> Arc<Self> {
        Arc::new(Self {
            context,
            origin: Arc::new(origin),
            constants: BTreeMap::new(),
            built: None,
            has_lost: false,
            has_variables: Arc::default(),
        })
    }

    /// Records the value of a constant.
    pub fn specialize(&mut self, constant: u32, value: &Blob) {
        let is_known = self.constants.contains_key(&constant);
        if value.0.len() <= LONGEST_CONSTANT && (is_known || self.constants.len() < MOST_CONSTANTS)
        {
            self.constants.insert(constant, value.clone());
        } else {
            self.constants.remove(&constant);
            self.has_lost = true;
        }
    }

    fn bytes(&self) -> usize {
        let built = self.built.as_ref().map_or(0, |built| built.call.bytes());
        self.origin.bytes().saturating_add(built)
    }
}

/// The builds of a program in progress: each holds a clone of this.
#[derive(Clone, Debug, Default)]
pub struct Builds(Arc<()>);

impl Builds {
    /// Whether any is in progress.
    pub fn any(&self) -> bool {
        self.count() > 1
    }

    /// How many hold a clone, the program included.
    pub fn count(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

/// A program with the record that it has if the driver takes a build.
#[derive(Clone, Debug)]
pub struct Rebuilt {
    /// The program's number, which another one may have by then.
    pub program: ProgramId,
    /// The record.
    pub record: Arc<ProgramRecord>,
    /// Held until the outcome is recorded.
    pub untold: Builds,
}

impl Rebuilt {
    /// A program with this record, built in another way: by this call, for these devices.
    pub fn new(
        program: ProgramId,
        record: &ProgramRecord,
        untold: Builds,
        (call, devices): (Build, Vec<Arc<DeviceRecord>>),
    ) -> Self {
        let mut record = record.clone();
        record.built = Some(Arc::new(Built {
            call,
            devices,
            constants: record.constants.clone(),
        }));
        Self {
            program,
            record: Arc::new(record),
            untold,
        }
    }

    /// Whether this is a record of the program.
    pub fn is_of(&self, record: &ProgramRecord) -> bool {
        Arc::ptr_eq(&record.has_variables, &self.record.has_variables)
    }

    /// Records how the program was built. Does nothing if this is another program's record.
    pub fn apply_to(&self, record: &mut Arc<ProgramRecord>) {
        if self.is_of(record) {
            Arc::make_mut(record).built.clone_from(&self.record.built);
        }
    }
}

/// An object that had a number, which others may have had before or since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named<I> {
    /// The number.
    pub id: I,
    /// Identifies the object among those that had the number.
    pub birth: u64,
}

/// An argument's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// Plain bytes.
    Bytes(Vec<u8>),
    /// A buffer or image, which may have been released since, or null.
    Mem(Option<Named<MemId>>),
    /// A sampler.
    Sampler(Named<SamplerId>),
    /// An amount of local memory, in bytes.
    Local(u64),
    /// An address in shared virtual memory, or null.
    Svm(Option<u64>),
    /// The value is not known any more.
    Lost,
}

/// The values of a kernel's arguments that the driver accepted last, by index.
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    values: Vec<Option<Argument>>,
    /// Bytes of the plain values.
    plain: usize,
}

impl Arguments {
    /// The value of an argument, if it has one.
    pub fn get(&self, index: u32) -> Option<&Argument> {
        self.values.get(index as usize)?.as_ref()
    }

    /// All arguments that have a value, by index.
    pub fn all(&self) -> impl Iterator<Item = (u32, &Argument)> {
        let values = (0..).zip(&self.values);
        values.filter_map(|(index, value)| Some((index, value.as_ref()?)))
    }

    /// Sets an argument's value. `birth` identifies the object with that number. Plain bytes need
    /// no allocation if there were as many before.
    pub fn set(&mut self, index: u32, value: &Value, birth: u64) {
        let index = index as usize;
        if index >= MOST_ARGUMENTS {
            return;
        }
        if index >= self.values.len() {
            self.values.resize(index + 1, None);
        }
        let slot = &mut self.values[index];
        let mut old = match slot.take() {
            Some(Argument::Bytes(bytes)) => bytes,
            _ => Vec::new(),
        };
        self.plain -= old.len();
        *slot = Some(match value {
            Value::Bytes(Blob(bytes)) if bytes.len() <= MOST_PLAIN - self.plain => {
                self.plain += bytes.len();
                old.clone_from(bytes);
                Argument::Bytes(old)
            }
            Value::Bytes(_) => Argument::Lost,
            Value::Mem(id) => Argument::Mem(id.map(|id| Named { id, birth })),
            Value::Sampler(id) => Argument::Sampler(Named { id: *id, birth }),
            Value::Local(size) => Argument::Local(*size),
            Value::Svm(address) => Argument::Svm(*address),
        });
    }
}

#[cfg(test)]
#[path = "records_tests.rs"]
mod tests;
