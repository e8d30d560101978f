//! The walk over what a call carries.

use crate::{
    branch::Branch,
    field::{Block, Field, Meaning},
    status,
    tables::{ESCAPES, Inner},
};

/// A kind of device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The control file, or that of a GPU.
    Frontend,
    /// The file of unified memory.
    Uvm,
}

/// Where the walk takes the blocks of a call from.
pub trait Source {
    /// Appends `length` bytes to [`Source::bytes`]: in the program those at `address` (never 0), in the worker the
    /// next that were delivered.
    ///
    /// # Errors
    ///
    /// The address cannot be read, or fewer bytes were delivered.
    fn take(&mut self, address: u64, length: usize) -> Result<(), Refusal>;

    /// All bytes that were taken.
    fn bytes(&self) -> &[u8];
}

/// A list of what is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listed {
    /// Commands on a control or GPU file.
    Escape,
    /// Commands on the file of unified memory.
    Uvm,
    /// Control commands.
    Control,
    /// Classes of objects.
    Class,
}

/// Why a call is not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Its memory cannot be read.
    Fault,
    /// A size, a flag or a count is not what the tables say.
    Malformed,
    /// A list does not name it.
    Unlisted {
        /// Which list.
        list: Listed,
        /// The number that it does not name.
        number: u32,
        /// What to answer: the status and where the first block has it. `None`: the call itself fails.
        status: Option<(u32, u16)>,
    },
}

/// The most blocks and lists of a call.
const MOST_SEGMENTS: usize = 5;
/// The most pointers of a call.
const MOST_POINTERS: usize = 4;

/// A block or list among the bytes of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Segment {
    start: usize,
    length: usize,
}

/// A pointer among the bytes of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pointer {
    /// Where it is.
    pub at: usize,
    /// Where what it points to is. `None`: nothing follows, and the driver must not see the pointer.
    pub to: Option<usize>,
}

/// A field of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Where it is.
    pub at: usize,
    /// Where its block begins.
    pub block: usize,
    /// What it means.
    pub meaning: Meaning,
}

/// A call as the walk found it. All places are offsets in the bytes of its [`Source`].
#[derive(Clone, Debug)]
pub struct Call {
    /// The number of the escape or of the command on unified memory.
    pub number: u32,
    /// The number of the control or class, where there is one.
    pub inner: Option<u32>,
    kind: Kind,
    status_at: Option<u16>,
    outer_fields: &'static [Field],
    inner_fields: &'static [Field],
    segments: [Segment; MOST_SEGMENTS],
    segment_count: usize,
    pointers: [Pointer; MOST_POINTERS],
    pointer_count: usize,
}

impl Call {
    /// Where the status is, if the call has one.
    #[must_use]
    pub fn status_at(&self) -> Option<usize> {
        self.status_at.map(usize::from)
    }

    /// The kind of file that it is for.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The block of the control or class, where it has bytes.
    #[must_use]
    pub fn inner_block(&self) -> Option<core::ops::Range<usize>> {
        let is_followed = self.inner.is_some() && self.pointers[0].to.is_some();
        is_followed
            .then(|| self.segments[1].start..self.segments[1].start + self.segments[1].length)
    }

    /// Its blocks and lists in the order in which they were taken: where each begins, and its length.
    pub fn segments(&self) -> impl Iterator<Item = (usize, usize)> {
        let segments = &self.segments[..self.segment_count];
        segments
            .iter()
            .map(|segment| (segment.start, segment.length))
    }

    /// Its pointers.
    #[must_use]
    pub fn pointers(&self) -> &[Pointer] {
        &self.pointers[..self.pointer_count]
    }

    /// Its fields that are not plain data.
    pub fn operands(&self) -> impl Iterator<Item = Operand> {
        let inner = self.inner_block().map_or(0, |block| block.start);
        let inner_fields = if inner == 0 { &[] } else { self.inner_fields };
        let of = |block: usize| {
            move |field: &Field| Operand {
                at: block + usize::from(field.at),
                block,
                meaning: field.meaning,
            }
        };
        self.outer_fields
            .iter()
            .map(of(0))
            .chain(inner_fields.iter().map(of(inner)))
    }

    /// Where the list that begins with the pointer at `at` is, if it has elements.
    #[must_use]
    pub fn list(&self, at: usize) -> Option<usize> {
        self.pointers().iter().find(|pointer| pointer.at == at)?.to
    }

    fn take(
        &mut self,
        source: &mut impl Source,
        address: u64,
        length: usize,
    ) -> Result<usize, Refusal> {
        let start = source.bytes().len();
        let slot = self
            .segments
            .get_mut(self.segment_count)
            .ok_or(Refusal::Malformed)?;
        source.take(address, length)?;
        // A source that takes another number of bytes is not believed either.
        if source.bytes().len() != start + length {
            return Err(Refusal::Malformed);
        }
        *slot = Segment { start, length };
        self.segment_count += 1;
        Ok(start)
    }

    /// Follows the pointer at `at` to `length` bytes. Nothing follows a null pointer, or one to no bytes.
    fn follow(
        &mut self,
        source: &mut impl Source,
        at: usize,
        length: usize,
    ) -> Result<Option<usize>, Refusal> {
        let address = read_u64(source.bytes(), at)?;
        let to = match (address, length) {
            (0, _) | (_, 0) => None,
            _ => Some(self.take(source, address, length)?),
        };
        let slot = self
            .pointers
            .get_mut(self.pointer_count)
            .ok_or(Refusal::Malformed)?;
        *slot = Pointer { at, to };
        self.pointer_count += 1;
        Ok(to)
    }

    fn follow_lists(
        &mut self,
        source: &mut impl Source,
        start: usize,
        block: &Block,
    ) -> Result<(), Refusal> {
        for field in block.fields {
            let Meaning::List {
                count_at,
                element,
                most,
                ..
            } = field.meaning
            else {
                continue;
            };
            let count = read_u32(source.bytes(), start + usize::from(count_at))?;
            if count > u32::from(most) {
                return Err(Refusal::Malformed);
            }
            // Cannot overflow: at most 65535 times 65535.
            let length = count as usize * usize::from(element);
            self.follow(source, start + usize::from(field.at), length)?;
        }
        Ok(())
    }
}

/// Walks over the call `command` with the argument `argument`, an address of the program, on a file of this kind.
///
/// # Errors
///
/// The call is not made, and why.
pub fn walk(
    branch: Branch,
    kind: Kind,
    command: u32,
    argument: u64,
    source: &mut impl Source,
) -> Result<Call, Refusal> {
    if !source.bytes().is_empty() {
        return Err(Refusal::Malformed);
    }
    let (block, status_at, inner) = match kind {
        Kind::Frontend => {
            let listed = ESCAPES.iter().find(|escape| escape.command() == command);
            let escape = listed.ok_or(unlisted(Listed::Escape, command, None))?;
            (&escape.block, escape.status_at, escape.inner)
        }
        Kind::Uvm => {
            let listed = branch.uvm().iter().find(|uvm| uvm.block.number == command);
            let uvm = listed.ok_or(unlisted(Listed::Uvm, command, None))?;
            (&uvm.block, uvm.status_at, Inner::None)
        }
    };
    let mut call = Call {
        number: block.number,
        inner: None,
        kind,
        status_at,
        outer_fields: block.fields,
        inner_fields: &[],
        segments: Default::default(),
        segment_count: 0,
        pointers: Default::default(),
        pointer_count: 0,
    };
    if block.size == 0 {
        return Ok(call);
    }
    if argument == 0 {
        return Err(Refusal::Fault);
    }
    call.take(source, argument, block.size as usize)?;
    match inner {
        Inner::None => {}
        Inner::Control => {
            let [number, flags, size] = [8, 12, 24].map(|at| read_u32(source.bytes(), at));
            let number = number?;
            let refused = unlisted(Listed::Control, number, Some((status::NOT_SUPPORTED, 28)));
            let control = find(branch.controls(), number).ok_or(refused)?;
            // A flag would change how the driver reads the block.
            if flags? != 0 || size? != control.size {
                return Err(Refusal::Malformed);
            }
            call.inner = Some(number);
            call.inner_fields = control.fields;
            if let Some(start) = call.follow(source, 16, control.size as usize)? {
                call.follow_lists(source, start, control)?;
            }
        }
        Inner::Class => {
            let number = read_u32(source.bytes(), 12)?;
            let refused = unlisted(Listed::Class, number, Some((status::INVALID_CLASS, 40)));
            let class = find(branch.classes(), number).ok_or(refused)?;
            let [size, flags] = [32, 36].map(|at| read_u32(source.bytes(), at));
            let size = size?;
            // The driver takes 0 for the size that it knows. Masks of rights are not carried.
            if (size != 0 && size != class.size)
                || flags? != 0
                || read_u64(source.bytes(), 24)? != 0
            {
                return Err(Refusal::Malformed);
            }
            call.inner = Some(number);
            call.inner_fields = class.fields;
            call.follow(source, 16, class.size as usize)?;
        }
    }
    Ok(call)
}

fn find(blocks: &'static [Block], number: u32) -> Option<&'static Block> {
    let at = blocks
        .binary_search_by_key(&number, |block| block.number)
        .ok()?;
    blocks.get(at)
}

const fn unlisted(list: Listed, number: u32, status: Option<(u32, u16)>) -> Refusal {
    Refusal::Unlisted {
        list,
        number,
        status,
    }
}

fn read_u32(bytes: &[u8], at: usize) -> Result<u32, Refusal> {
    let word = bytes.get(at..).and_then(|bytes| bytes.first_chunk());
    word.map(|word| u32::from_le_bytes(*word))
        .ok_or(Refusal::Malformed)
}

fn read_u64(bytes: &[u8], at: usize) -> Result<u64, Refusal> {
    let word = bytes.get(at..).and_then(|bytes| bytes.first_chunk());
    word.map(|word| u64::from_le_bytes(*word))
        .ok_or(Refusal::Malformed)
}

#[cfg(test)]
#[path = "walk_tests.rs"]
mod tests;
