//! How the parameters of a forwarded entry point travel.
//!
//! In: for each parameter in order a number (8 bytes), a handle (its object's number, 4 bytes), a text
//! (length and bytes), or an array: whether there is one, how many elements, and these if they are
//! read. Scalars of linear algebra: whether one of the host's is there, then its length and bytes, or
//! its address on the device. Out: for each array or scalar of the host's that is there and written,
//! its elements. Lists of handles are lists of objects' numbers.

use std::sync::OnceLock;

use cuda_definition::{EntryPoint, Rule, by_symbol, driver};

use super::{
    attributes::{self, LAYOUT, OPERATION},
    forwarded::{ALL, Forwarded},
    kind::Kind,
    libraries::{Library, Matmul},
};
use crate::wire::{Malformed, Reader, Wire, codec::with};

/// The most bytes of all arrays and texts of a call.
pub const LARGEST: usize = 16 << 20;
/// The length of a text that is not there.
const NO_TEXT: u32 = u32::MAX;

/// What an array is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element {
    /// Bytes in memory.
    pub size: usize,
    /// Handles of this kind.
    pub handle: Option<Kind>,
    /// Its type's name in C.
    pub of: &'static str,
}

/// How many elements an array has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// So many.
    Fixed(usize),
    /// As the parameter of this place says, less so many.
    Parameter(usize, usize),
    /// As the array of this place says in its first element, a number of 8 bytes.
    First(usize),
}

/// What a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// A number.
    Value,
    /// A device's ordinal.
    Device,
    /// An address on the device.
    Address,
    /// A handle.
    Handle(Kind),
    /// A text that ends in a zero.
    Text,
    /// Not passed on.
    Null,
    /// A number of linear algebra, the host's or the device's by the mode of its handle.
    Scalar {
        /// Its bytes; 0 where another parameter says its type.
        bytes: usize,
        /// Whether it is written.
        written: bool,
    },
    /// An array.
    Array {
        /// Of what.
        element: Element,
        /// How many.
        count: Count,
        /// Whether it is read.
        input: bool,
        /// Whether it is written.
        output: bool,
    },
}

/// The most bytes of a scalar: five numbers of 64 bits, of a modified rotation.
pub const SCALAR: usize = 40;

/// Where a call's scalars are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scalars {
    /// On the device.
    #[default]
    Device,
    /// With the caller; so many bytes has one whose type a parameter says.
    Host(usize),
}

/// An entry point's parameters.
#[derive(Debug)]
pub struct Plan {
    /// Its symbol.
    pub symbol: &'static str,
    /// Its parameters.
    pub parameters: Vec<Parameter>,
}

macro_rules! sizes {
    ($name:expr; $($type:ident)*) => {
        match $name {
            "c_void" | "c_char" | "c_uchar" => Some(1),
            "c_int" | "c_uint" | "f32" => Some(4),
            "usize" | "c_ulonglong" | "i64" | "f64" | "cuComplex" => Some(8),
            "cuDoubleComplex" => Some(16),
            $(stringify!($type) => Some(size_of::<driver::types::$type>()),)*
            _ => None,
        }
    };
}

/// The size of a type of C.
fn size(name: &str) -> Option<usize> {
    sizes!(name;
        cuuint32_t cuuint64_t CUdevice CUdeviceptr CUdevprop CUmoduleLoadingMode
        CUfunctionLoadingState CUstreamCaptureStatus CUgraphNodeType CUmemAccess_flags CUfunc_cache
        CUsharedconfig CUmemAllocationProp CUmemAccessDesc CUmemLocation CUmemPoolProps
        CUstreamAttrValue CUkernelNodeAttrValue CUDA_MEMSET_NODE_PARAMS CUgraphEdgeData
        CUgraphExecUpdateResultInfo CUtensorMap CUDA_ARRAY_DESCRIPTOR CUDA_ARRAY3D_DESCRIPTOR
        CUDA_RESOURCE_DESC CUDA_TEXTURE_DESC CUDA_RESOURCE_VIEW_DESC CUtexObject CUsurfObject
        CUgraphConditionalHandle
    )
}

impl Plan {
    /// The plan of a list's entry. None where definition and list do not fit.
    fn new(entry: &Forwarded) -> Option<Self> {
        let known = by_symbol(driver::ENTRY_POINTS, entry.symbol)?;
        Self::made(known, entry.rules, false)
    }

    /// The plan of an entry point. Of a library's, addresses that may be the host's are scalars.
    fn made(
        known: &EntryPoint,
        rules: &[(&'static str, &'static str)],
        scalars: bool,
    ) -> Option<Self> {
        let place = |name: &str| known.parameters.iter().position(|one| one.name == name);
        let count = |text: &str| {
            if let Ok(fixed) = text.parse() {
                return Some(Count::Fixed(fixed));
            }
            if let Some(name) = text.strip_prefix('*') {
                return place(name).map(Count::First);
            }
            let (name, less) = text.split_once('-').unwrap_or((text, "0"));
            Some(Count::Parameter(place(name)?, less.parse().ok()?))
        };
        let mut parameters = Vec::new();
        for one in known.parameters {
            let of = one
                .of
                .trim_start_matches("*mut ")
                .trim_start_matches("*const ");
            let other = rules.iter().find(|(name, _)| *name == one.name);
            let (rule, amount) = match other {
                Some((_, "Null")) => {
                    parameters.push(Parameter::Null);
                    continue;
                }
                Some((_, "Device")) => ("Address", ""),
                Some((_, text)) => text.strip_suffix(')')?.split_once('(')?,
                None => match one.rule {
                    Rule::In(amount) => ("In", amount),
                    Rule::Out(amount) => ("Out", amount),
                    Rule::InOut(amount) => ("InOut", amount),
                    Rule::Text => ("Text", ""),
                    Rule::Unified if scalars => ("Scalar", ""),
                    Rule::Device | Rule::Unified => ("Address", ""),
                    Rule::Value | Rule::Handle => ("Value", ""),
                    Rule::Callback | Rule::Unwritten => return None,
                },
            };
            let element = || {
                let handle = Kind::of_type(of);
                let size = if handle.is_some() { Some(8) } else { size(of) }?;
                Some(Element { size, handle, of })
            };
            parameters.push(match rule {
                "Text" => Parameter::Text,
                "Scalar" => {
                    let numbers = if one.name == "param" { 5 } else { 1 };
                    let size = if of == "c_void" { 0 } else { size(of)? };
                    Parameter::Scalar {
                        bytes: Some(numbers * size).filter(|bytes| *bytes <= SCALAR)?,
                        written: one.of.starts_with("*mut"),
                    }
                }
                // Floating-point numbers by value are passed in other registers.
                "Value" if matches!(of, "f32" | "f64" | "cuComplex" | "cuDoubleComplex") => {
                    return None;
                }
                "Address" => Parameter::Address,
                "Value" if of == "CUdevice" => Parameter::Device,
                "Value" => Kind::of_type(of).map_or(Parameter::Value, Parameter::Handle),
                _ => Parameter::Array {
                    element: element()?,
                    count: count(amount)?,
                    input: rule != "Out",
                    output: rule != "In",
                },
            });
        }
        Some(Self {
            symbol: known.symbol,
            parameters,
        })
    }

    /// The plan of a library's function of this number, if there is one. Those that take descriptors
    /// have none.
    pub fn of_library(library: Library, number: u16) -> Option<&'static Self> {
        static PLANS: OnceLock<[Vec<Option<Plan>>; 2]> = OnceLock::new();
        let plans = PLANS.get_or_init(|| {
            Library::ALL.map(|library| {
                let functions = library.functions();
                functions
                    .map(|entry| Self::made(entry, library.rules(entry.symbol), true))
                    .collect()
            })
        });
        plans[library as usize].get(usize::from(number))?.as_ref()
    }

    /// The plan of the entry point of this number, if there is one.
    pub fn of(number: u16) -> Option<&'static Self> {
        static PLANS: OnceLock<Vec<Option<Plan>>> = OnceLock::new();
        let plans = PLANS.get_or_init(|| ALL.iter().map(Self::new).collect());
        plans.get(usize::from(number))?.as_ref()
    }

    /// Whether anything is written to the caller's memory.
    pub fn writes(&self, scalars: Scalars) -> bool {
        let writes = |one: &Parameter| match one {
            Parameter::Array { output, .. } => *output,
            Parameter::Scalar { written, .. } => *written && scalars != Scalars::Device,
            _ => false,
        };
        self.parameters.iter().any(writes)
    }

    /// Hash of encoded parameters without what does not decide whether they are acceptable: of
    /// addresses the alignment counts, and of scalars nothing.
    pub fn likeness(&self, bytes: &[u8]) -> u64 {
        let mut reader = Reader::new(bytes);
        let mut hash = bytes.len() as u64;
        let mut all = || {
            for parameter in &self.parameters {
                let part = match parameter {
                    Parameter::Value | Parameter::Device => u64::take(&mut reader)?,
                    Parameter::Address => u64::take(&mut reader)? % 256,
                    Parameter::Handle(_) => u64::from(u32::take(&mut reader)?),
                    Parameter::Null => 0,
                    Parameter::Scalar { .. } => {
                        if bool::take(&mut reader)? {
                            let length = usize::from(u8::take(&mut reader)?);
                            reader.bytes(length)?;
                        } else {
                            u64::take(&mut reader)?;
                        }
                        1
                    }
                    // Functions with these are waited for.
                    Parameter::Text | Parameter::Array { .. } => break,
                };
                hash = with(hash, part);
            }
            Ok::<(), Malformed>(())
        };
        // What is malformed is so for whoever decodes it.
        let _ = all();
        hash
    }
}

/// [`Plan::likeness`] of a library's call; of a product by descriptors, hash of types, layouts and
/// algorithm. None of one that gives the device nothing to do.
pub fn likeness(library: u8, function: u16, arguments: &[u8]) -> Option<u64> {
    static MATMUL: OnceLock<Option<u16>> = OnceLock::new();
    let library = Library::numbered(library)?;
    match Plan::of_library(library, function) {
        None => {
            let matmul = *MATMUL.get_or_init(|| Library::BlasLt.number("cublasLtMatmul"));
            let is_product = library == Library::BlasLt && matmul == Some(function);
            let product = Matmul::from_bytes(arguments).ok().filter(|_| is_product)?;
            let hash = attributes::likeness(OPERATION, &product.operation.0, 0);
            let layouts = [&product.a, &product.b, &product.c, &product.d];
            let layouts = layouts.into_iter();
            let hash = layouts.fold(hash, |hash, one| {
                attributes::likeness(LAYOUT, &one.0, with(hash, 1))
            });
            let algorithm = product.algorithm.0.chunks(8);
            Some(algorithm.fold(hash, |hash, part| {
                let mut word = [0; 8];
                word[..part.len()].copy_from_slice(part);
                with(hash, u64::from_le_bytes(word))
            }))
        }
        Some(plan) if plan.parameters.len() <= 3 => None,
        Some(plan) => Some(plan.likeness(arguments)),
    }
}

/// Elements of an array, given the words that the parameters are and the first words of arrays.
fn count(count: Count, words: &[u64], first: impl Fn(usize) -> Option<u64>) -> Option<usize> {
    let most = |number: u64| usize::try_from(number).ok().filter(|n| *n <= LARGEST);
    match count {
        Count::Fixed(fixed) => Some(fixed),
        Count::Parameter(place, less) => most(words.get(place)?.saturating_sub(less as u64)),
        Count::First(place) => most(first(place)?),
    }
}

/// A call in a guest: its parameters as words.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// The plan.
    pub plan: &'static Plan,
    /// A word for each parameter; pointers are the caller's.
    pub words: &'a [u64],
    /// Where scalars are.
    pub scalars: Scalars,
}

impl Outgoing<'_> {
    /// The bytes of a scalar that is the caller's.
    fn scalar(&self, bytes: usize) -> Option<usize> {
        match self.scalars {
            Scalars::Device => None,
            Scalars::Host(typed) => Some(if bytes == 0 { typed.min(SCALAR) } else { bytes }),
        }
    }

    fn elements(&self, amount: Count) -> Option<usize> {
        count(amount, self.words, |place| {
            let pointer = *self.words.get(place)? as *const u64;
            // SAFETY: `encode` and `write` are told that pointers are as the API wants them.
            (!pointer.is_null()).then(|| unsafe { pointer.read_unaligned() })
        })
    }

    /// Appends the parameters; `number` gives the number of a handle's object. False if they cannot
    /// travel.
    ///
    /// # Safety
    /// Pointers are null or to what the API wants there.
    pub unsafe fn encode(&self, number: impl Fn(Kind, u64) -> u32, out: &mut Vec<u8>) -> bool {
        for (parameter, word) in self.plan.parameters.iter().zip(self.words) {
            match *parameter {
                Parameter::Value | Parameter::Device | Parameter::Address => word.put(out),
                Parameter::Null => {}
                Parameter::Handle(kind) => number(kind, *word).put(out),
                Parameter::Scalar { bytes, .. } => match self.scalar(bytes) {
                    None => {
                        false.put(out);
                        word.put(out);
                    }
                    Some(_) if *word == 0 => return false,
                    Some(bytes) => {
                        true.put(out);
                        (bytes as u8).put(out);
                        // SAFETY: a number of so many bytes is there, whether it is read or written.
                        out.extend_from_slice(unsafe {
                            std::slice::from_raw_parts(*word as *const u8, bytes)
                        });
                    }
                },
                Parameter::Text if *word == 0 => NO_TEXT.put(out),
                Parameter::Text => {
                    // SAFETY: a text that ends in a zero.
                    let text = unsafe { std::ffi::CStr::from_ptr(*word as *const _) }.to_bytes();
                    if text.len() > LARGEST {
                        return false;
                    }
                    (text.len() as u32).put(out);
                    out.extend_from_slice(text);
                }
                Parameter::Array {
                    element,
                    count,
                    input,
                    ..
                } => {
                    (*word != 0).put(out);
                    if *word == 0 {
                        continue;
                    }
                    let Some(elements) = self.elements(count) else {
                        return false;
                    };
                    let Some(size) = elements.checked_mul(element.size).filter(|s| *s <= LARGEST)
                    else {
                        return false;
                    };
                    (elements as u32).put(out);
                    if !input {
                        continue;
                    }
                    // SAFETY: so many elements are there.
                    let bytes = unsafe { std::slice::from_raw_parts(*word as *const u8, size) };
                    match element.handle {
                        None => out.extend_from_slice(bytes),
                        Some(kind) => {
                            for value in bytes.as_chunks::<8>().0 {
                                number(kind, u64::from_le_bytes(*value)).put(out);
                            }
                        }
                    }
                }
            }
        }
        true
    }

    /// Writes what the worker has answered to where the caller wants it; `handle` gives the handle
    /// of an object's number.
    ///
    /// # Errors
    /// The answer is not one to this call.
    ///
    /// # Safety
    /// As for [`encode`](Self::encode), which must have succeeded.
    pub unsafe fn write(
        &self,
        answer: &[u8],
        handle: impl Fn(Kind, u32) -> u64,
    ) -> Result<(), Malformed> {
        let mut reader = Reader::new(answer);
        for (parameter, word) in self.plan.parameters.iter().zip(self.words) {
            if let Parameter::Scalar {
                bytes,
                written: true,
            } = *parameter
                && let Some(bytes) = self.scalar(bytes)
            {
                let value = reader.bytes(bytes)?;
                // SAFETY: the caller has room for a number of so many bytes.
                unsafe { (*word as *mut u8).copy_from_nonoverlapping(value.as_ptr(), bytes) };
            }
            let Parameter::Array {
                element,
                count,
                output: true,
                ..
            } = *parameter
            else {
                continue;
            };
            if *word == 0 {
                continue;
            }
            let elements = u32::take(&mut reader)?;
            // Before what says how many there were is written: it comes later in every call.
            let room = self.elements(count).unwrap_or(0);
            if elements as usize > room {
                return Err(Malformed::Tag {
                    what: "elements of an array",
                    tag: elements,
                });
            }
            let elements = elements as usize;
            let to = *word as *mut u8;
            match element.handle {
                None => {
                    let bytes = reader.bytes(elements * element.size)?;
                    // SAFETY: the caller has room for as many elements as it has asked for, which are no fewer.
                    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
                }
                Some(kind) => {
                    for index in 0..elements {
                        let value = handle(kind, u32::take(&mut reader)?);
                        // SAFETY: as above.
                        unsafe { to.cast::<u64>().add(index).write_unaligned(value) };
                    }
                }
            }
        }
        reader.end()
    }
}

/// A parameter as a worker has it.
#[derive(Debug)]
pub enum Argument {
    /// A number, address, ordinal, or null.
    Word(u64),
    /// An object's number.
    Object(Kind, u32),
    /// An array or text: its memory, and its elements. The memory is what the driver gets.
    Memory {
        /// Aligned for every type.
        words: Vec<u64>,
        /// Elements.
        elements: usize,
    },
}

impl Argument {
    /// The memory's bytes.
    pub fn bytes(&mut self, size: usize) -> Option<&mut [u8]> {
        match self {
            // SAFETY: words are bytes, and as many are there.
            Self::Memory { words, .. } if size <= words.len() * 8 => Some(unsafe {
                std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), size)
            }),
            _ => None,
        }
    }
}

impl Plan {
    /// Reads a call's parameters. Arrays of handles hold objects' numbers, 8 bytes each.
    ///
    /// # Errors
    /// They are not this entry point's.
    pub fn decode(&self, bytes: &[u8]) -> Result<Vec<Argument>, Malformed> {
        const WRONG: Malformed = Malformed::Tag {
            what: "a forwarded parameter",
            tag: 0,
        };
        let mut reader = Reader::new(bytes);
        let mut arguments = Vec::with_capacity(self.parameters.len());
        let mut total = 0usize;
        for parameter in &self.parameters {
            arguments.push(match *parameter {
                Parameter::Value | Parameter::Device | Parameter::Address => {
                    Argument::Word(u64::take(&mut reader)?)
                }
                Parameter::Null => Argument::Word(0),
                Parameter::Scalar { .. } => {
                    if bool::take(&mut reader)? {
                        let length = usize::from(u8::take(&mut reader)?);
                        let bytes = reader.bytes(length)?;
                        if length > SCALAR {
                            return Err(WRONG);
                        }
                        // As long as any: what a library reads or writes of it is there.
                        let mut words = vec![0u64; SCALAR.div_ceil(8)];
                        for (word, part) in words.iter_mut().zip(bytes.chunks(8)) {
                            let mut eight = [0; 8];
                            eight[..part.len()].copy_from_slice(part);
                            *word = u64::from_le_bytes(eight);
                        }
                        Argument::Memory {
                            words,
                            elements: length,
                        }
                    } else {
                        Argument::Word(u64::take(&mut reader)?)
                    }
                }
                Parameter::Handle(kind) => Argument::Object(kind, u32::take(&mut reader)?),
                Parameter::Text => match u32::take(&mut reader)? {
                    NO_TEXT => Argument::Word(0),
                    length => {
                        let text = reader.bytes(length as usize)?;
                        let mut words = vec![0u64; text.len() / 8 + 1];
                        for (word, part) in words.iter_mut().zip(text.chunks(8)) {
                            let mut bytes = [0; 8];
                            bytes[..part.len()].copy_from_slice(part);
                            *word = u64::from_le_bytes(bytes);
                        }
                        Argument::Memory {
                            words,
                            elements: text.len(),
                        }
                    }
                },
                Parameter::Array { element, input, .. } => {
                    if !bool::take(&mut reader)? {
                        arguments.push(Argument::Word(0));
                        continue;
                    }
                    let elements = u32::take(&mut reader)? as usize;
                    let size = elements.checked_mul(element.size).ok_or(WRONG)?;
                    total = total
                        .checked_add(size)
                        .filter(|t| *t <= LARGEST)
                        .ok_or(WRONG)?;
                    let mut words = vec![0u64; size.div_ceil(8).max(1)];
                    if input && element.handle.is_some() {
                        for word in words.iter_mut().take(elements) {
                            *word = u64::from(u32::take(&mut reader)?);
                        }
                    } else if input {
                        let bytes = reader.bytes(size)?;
                        for (word, part) in words.iter_mut().zip(bytes.chunks(8)) {
                            let mut eight = [0; 8];
                            eight[..part.len()].copy_from_slice(part);
                            *word = u64::from_le_bytes(eight);
                        }
                    }
                    Argument::Memory { words, elements }
                }
            });
        }
        reader.end()?;
        self.check(&arguments).ok_or(WRONG)?;
        Ok(arguments)
    }

    /// That each array has as many elements as the driver will take it to have.
    fn check(&self, arguments: &[Argument]) -> Option<()> {
        let words: Vec<u64> = arguments
            .iter()
            .map(|one| match one {
                Argument::Word(word) => *word,
                Argument::Object(..) | Argument::Memory { .. } => 0,
            })
            .collect();
        let first = |place: usize| match arguments.get(place) {
            Some(Argument::Memory { words, .. }) => words.first().copied(),
            _ => None,
        };
        for (parameter, argument) in self.parameters.iter().zip(arguments) {
            if let (Parameter::Array { count: amount, .. }, Argument::Memory { elements, .. }) =
                (parameter, argument)
            {
                // The driver reads 32 bits of some counts.
                (count(*amount, &words, first)? == *elements).then_some(())?;
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apis::cuda::forwarded::number;

    #[test]
    fn every_entry_of_the_list_has_a_plan() {
        for (index, entry) in ALL.iter().enumerate() {
            assert!(Plan::of(index as u16).is_some(), "{}", entry.symbol);
            // Calls of the driver take so many words at most.
            assert!(Plan::of(index as u16).unwrap().parameters.len() <= 16);
        }
        assert!(Plan::of(ALL.len() as u16).is_none());
    }

    #[test]
    fn products_are_alike_by_shapes_and_types_and_not_by_addresses() {
        let word = |value: u32| value.to_le_bytes();
        let attributes = |table, set: &[(u32, &[u8])]| {
            let mut memory = [0; 256];
            let mut descriptor = attributes::Descriptor::empty(table, &mut memory);
            for (number, value) in set {
                assert!(descriptor.set(*number, value));
            }
            let mut bytes = Vec::new();
            descriptor.write(&mut bytes);
            crate::wire::Blob(bytes)
        };
        let product = |rows: u64, of: u32, bias: u64, at: u64| {
            let rows = rows.to_le_bytes();
            let layout = attributes(
                LAYOUT,
                &[(0, &word(of)), (2, &rows), (3, &rows), (4, &rows)],
            );
            let one = crate::apis::cuda::libraries::Scalar {
                here: true,
                bytes: [0; 2],
            };
            let set: [(u32, &[u8]); 3] = [(0, &word(68)), (1, &word(0)), (8, &bias.to_le_bytes())];
            let call = Matmul {
                handle: 20,
                stream: 0,
                operation: attributes(OPERATION, &set),
                a: layout.clone(),
                b: layout.clone(),
                c: layout.clone(),
                d: layout,
                alpha: one.clone(),
                beta: one,
                matrices: [at; 4],
                algorithm: crate::wire::Blob::default(),
                workspace: (at, 0),
            };
            let mut bytes = Vec::new();
            call.put(&mut bytes);
            let number = Library::BlasLt.number("cublasLtMatmul").unwrap();
            likeness(Library::BlasLt as u8, number, &bytes).unwrap()
        };
        let one = product(64, 0, 0x1000, 0x2000);
        assert_eq!(product(64, 0, 0x3000, 0x4000), one);
        assert_ne!(product(4096, 0, 0x1000, 0x2000), one);
        assert_ne!(product(64, 14, 0x1000, 0x2000), one);
        assert_eq!(likeness(Library::BlasLt as u8, u16::MAX, &[]), None);
    }

    #[test]
    fn parameters_arrive_as_they_were_sent() {
        let plan = Plan::of(number("cuModuleGetFunction")).unwrap();
        let (mut function, name) = (0u64, c"kernel");
        let words = [&raw mut function as u64, 77, name.as_ptr() as u64];
        let outgoing = Outgoing {
            plan,
            words: &words,
            scalars: Scalars::Device,
        };
        let mut bytes = Vec::new();
        // SAFETY: both pointers are to locals.
        assert!(unsafe { outgoing.encode(|_, value| value as u32 + 1, &mut bytes) });
        let mut arguments = plan.decode(&bytes).unwrap();
        assert!(matches!(arguments[1], Argument::Object(Kind::Module, 78)));
        assert_eq!(arguments[2].bytes(7).unwrap(), b"kernel\0");
        let mut answer = Vec::new();
        1u32.put(&mut answer);
        9u32.put(&mut answer);
        // SAFETY: as above.
        let written = unsafe { outgoing.write(&answer, |_, number| u64::from(number) << 32) };
        assert_eq!((written, function), (Ok(()), 9 << 32));
    }

    #[test]
    fn every_function_of_libraries_that_is_served_has_a_plan() {
        // What a guest answers itself, and copies.
        let guests = |entry: &&EntryPoint| {
            entry.class == cuda_definition::Class::Guest || entry.symbol.ends_with("Async")
        };
        for entry in Library::Blas.functions().filter(|entry| !guests(entry)) {
            let number = Library::Blas.number(entry.symbol).unwrap();
            let plan = Plan::of_library(Library::Blas, number);
            // Calls of libraries take so many words at most.
            let fits = plan.is_some_and(|plan| plan.parameters.len() <= 24);
            assert!(fits, "{}", entry.symbol);
        }
        let factors = Library::Blas.number("cublasSgetrfBatched").unwrap();
        let plan = Plan::of_library(Library::Blas, factors).unwrap();
        assert!(!plan.writes(Scalars::Host(4)));
    }

    #[test]
    fn scalars_are_bytes_or_addresses_by_the_mode_of_the_caller() {
        let number = Library::Blas.number("cublasSaxpy_v2").unwrap();
        let plan = Plan::of_library(Library::Blas, number).unwrap();
        let alpha = 2.5f32;
        let words = [20, 3, &raw const alpha as u64, 0x2000, 1, 0x3000, 1];
        let encoded = |scalars| {
            let mut bytes = Vec::new();
            let outgoing = Outgoing {
                plan,
                words: &words,
                scalars,
            };
            // SAFETY: the pointer is to a local.
            assert!(unsafe { outgoing.encode(|_, value| value as u32, &mut bytes) });
            bytes
        };
        let (host, device) = (encoded(Scalars::Host(0)), encoded(Scalars::Device));
        let mut arguments = plan.decode(&host).unwrap();
        assert_eq!(arguments[2].bytes(4).unwrap(), alpha.to_le_bytes());
        let arguments = plan.decode(&device).unwrap();
        assert!(matches!(arguments[2], Argument::Word(at) if at == words[2]));
        // Another factor is alike; another length is not.
        let mut other = host.clone();
        other[14] ^= 1;
        assert_eq!(plan.likeness(&host), plan.likeness(&other));
        other[4] ^= 1;
        assert_ne!(plan.likeness(&host), plan.likeness(&other));
    }

    #[test]
    fn a_pool_that_answers_more_than_it_was_asked_for_writes_nothing() {
        let plan = Plan::of(number("cuGraphGetNodes")).unwrap();
        let (mut nodes, mut count) = ([7u64; 4], 2u64);
        let words = [3, nodes.as_mut_ptr() as u64, &raw mut count as u64];
        let outgoing = Outgoing {
            plan,
            words: &words,
            scalars: Scalars::Device,
        };
        let answer = |nodes: u32| {
            let mut answer = Vec::new();
            nodes.put(&mut answer);
            (0..nodes).for_each(|node| node.put(&mut answer));
            1u32.put(&mut answer);
            2u64.put(&mut answer);
            answer
        };
        // SAFETY: the pointers are to locals, with room for as many nodes as the count says.
        let write = |nodes| unsafe { outgoing.write(&answer(nodes), |_, id| id.into()) };
        assert!(write(3).is_err());
        assert!(write(2).is_ok());
        assert_eq!(nodes, [0, 1, 7, 7]);
    }

    #[test]
    fn results_of_the_host_come_back_in_their_length() {
        let number = Library::Blas.number("cublasSdot_v2").unwrap();
        let plan = Plan::of_library(Library::Blas, number).unwrap();
        let mut result = [0f32; 2];
        let words = [20, 3, 0x2000, 1, 0x3000, 1, result.as_mut_ptr() as u64];
        let outgoing = Outgoing {
            plan,
            words: &words,
            scalars: Scalars::Host(0),
        };
        assert!(plan.writes(outgoing.scalars) && !plan.writes(Scalars::Device));
        // SAFETY: the pointer is to a local.
        let written = unsafe { outgoing.write(&7.5f32.to_le_bytes(), |_, _| 0) };
        assert_eq!((written, result), (Ok(()), [7.5, 0.0]));
    }

    #[test]
    fn a_scalar_longer_than_any_is_refused() {
        let number = Library::Blas.number("cublasSscal_v2").unwrap();
        let plan = Plan::of_library(Library::Blas, number).unwrap();
        let mut bytes = Vec::new();
        20u32.put(&mut bytes);
        3u64.put(&mut bytes);
        true.put(&mut bytes);
        bytes.push(41);
        bytes.extend_from_slice(&[0; 41 + 16]);
        assert!(plan.decode(&bytes).is_err());
    }

    #[test]
    fn an_array_of_another_length_than_its_count_is_refused() {
        let plan = Plan::of(number("cuGraphAddEmptyNode")).unwrap();
        let (mut node, after) = (0u64, [1u64, 2]);
        let encode = |claimed: u64| {
            let words = [&raw mut node as u64, 3, after.as_ptr() as u64, 2];
            let mut bytes = Vec::new();
            let outgoing = Outgoing {
                plan,
                words: &words,
                scalars: Scalars::Device,
            };
            // SAFETY: both pointers are to locals.
            assert!(unsafe { outgoing.encode(|_, value| value as u32, &mut bytes) });
            let end = bytes.len();
            bytes[end - 8..].copy_from_slice(&claimed.to_le_bytes());
            plan.decode(&bytes).map(drop)
        };
        let mut encode = encode;
        assert!(encode(2).is_ok());
        assert!(encode(3).is_err() && encode(u64::MAX).is_err());
    }
}
