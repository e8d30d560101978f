//! What is allowed: strict lists of numbers.

pub mod r580;

use crate::field::{Block, Field, Meaning};

/// What follows the block of an escape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inner {
    /// Nothing.
    None,
    /// The block of a control command.
    Control,
    /// The block of a class.
    Class,
}

/// A command on a control or GPU file.
#[derive(Clone, Copy, Debug)]
pub struct Escape {
    /// Its block. The number is the low byte of the command word.
    pub block: Block,
    /// Where the block has the status. `None`: it has none.
    pub status_at: Option<u16>,
    /// What the block refers to.
    pub inner: Inner,
}

impl Escape {
    /// Its command word: read and write, the size, type `F`, the number.
    pub const fn command(&self) -> u32 {
        0xc000_0000 | self.block.size << 16 | 0x4600 | self.block.number
    }
}

/// A command on the file of unified memory.
#[derive(Clone, Copy, Debug)]
pub struct Uvm {
    /// Its block. The number is the whole command word.
    pub block: Block,
    /// Where the block has the status. `None`: it has none.
    pub status_at: Option<u16>,
}

/// Commands on control and GPU files. Their blocks are the same in all branches so far.
pub const ESCAPES: &[Escape] = &[
    // Descriptor memory; the file is for a mapping that is not made.
    escape(
        0x27,
        56,
        40,
        &[client(0), object(4), field(8, Meaning::NewObject), file(48)],
        Inner::None,
    ),
    // Free, control, allocate.
    escape(
        0x29,
        16,
        12,
        &[client(0), object(4), object(8)],
        Inner::None,
    ),
    escape(0x2a, 32, 28, &[client(0), object(4)], Inner::Control),
    escape(
        0x2b,
        48,
        40,
        &[client(0), object(4), field(8, Meaning::NewObject)],
        Inner::Class,
    ),
    // Duplicate, whose source the worker checks by itself; share.
    escape(
        0x34,
        28,
        24,
        &[client(0), object(4), field(8, Meaning::NewObject)],
        Inner::None,
    ),
    escape(0x35, 24, 20, &[client(0), object(4)], Inner::None),
    // Map, unmap, tell where it was mapped.
    escape(
        0x4e,
        56,
        40,
        &[client(0), object(4), object(8), file(48)],
        Inner::None,
    ),
    escape(
        0x4f,
        32,
        24,
        &[client(0), object(4), object(8)],
        Inner::None,
    ),
    escape(
        0x5e,
        40,
        32,
        &[client(0), object(4), object(8)],
        Inner::None,
    ),
    // Cards; the control file of a GPU's file; events.
    unchecked(200, 2304, &[]),
    unchecked(201, 4, &[file(0)]),
    escape(206, 16, 12, &[client(0), object(4), file(8)], Inner::None),
    escape(207, 16, 12, &[client(0), object(4), file(8)], Inner::None),
    // Version, attached GPUs, parameters of the system, of memory; the end of an opening.
    unchecked(210, 72, &[]),
    unchecked(212, 128, &[]),
    unchecked(214, 8, &[]),
    unchecked(215, 560, &[]),
    escape(218, 8, 4, &[], Inner::None),
];

const fn escape(
    number: u32,
    size: u32,
    status_at: u16,
    fields: &'static [Field],
    inner: Inner,
) -> Escape {
    Escape {
        block: block(number, size, fields),
        status_at: Some(status_at),
        inner,
    }
}

const fn unchecked(number: u32, size: u32, fields: &'static [Field]) -> Escape {
    Escape {
        block: block(number, size, fields),
        status_at: None,
        inner: Inner::None,
    }
}

const fn plain(number: u32, size: u32) -> Block {
    block(number, size, &[])
}

const fn block(number: u32, size: u32, fields: &'static [Field]) -> Block {
    Block {
        number,
        size,
        fields,
    }
}

const fn field(at: u16, meaning: Meaning) -> Field {
    Field { at, meaning }
}

const fn list(at: u16, count_at: u16, element: u16, most: u16) -> Field {
    field(
        at,
        Meaning::List {
            count_at,
            element,
            most,
            handles: false,
        },
    )
}

const fn handle_list(at: u16, count_at: u16, most: u16) -> Field {
    field(
        at,
        Meaning::List {
            count_at,
            element: 4,
            most,
            handles: true,
        },
    )
}

const fn file(at: u16) -> Field {
    field(at, Meaning::File32)
}

const fn file64(at: u16) -> Field {
    field(at, Meaning::File64)
}

const fn client(at: u16) -> Field {
    field(at, Meaning::Client)
}

const fn object(at: u16) -> Field {
    field(at, Meaning::Object { client_at: None })
}

const fn object_of(at: u16, client_at: u16) -> Field {
    field(
        at,
        Meaning::Object {
            client_at: Some(client_at),
        },
    )
}

const fn masked(at: u16, length: u16) -> Field {
    field(at, Meaning::Masked { length })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Branch;

    fn blocks() -> impl Iterator<Item = &'static Block> {
        let lists = [Branch::R580.controls(), Branch::R580.classes()];
        let escapes = ESCAPES.iter().map(|escape| &escape.block);
        let uvm = Branch::R580.uvm().iter().map(|uvm| &uvm.block);
        lists.into_iter().flatten().chain(escapes).chain(uvm)
    }

    #[test]
    fn each_list_is_in_ascending_order() {
        let numbers = |blocks: &[Block]| -> bool {
            blocks.windows(2).all(|two| two[0].number < two[1].number)
        };
        assert!(numbers(Branch::R580.controls()));
        assert!(numbers(Branch::R580.classes()));
        assert!(
            Branch::R580
                .uvm()
                .windows(2)
                .all(|two| two[0].block.number < two[1].block.number)
        );
        assert!(
            ESCAPES
                .windows(2)
                .all(|two| two[0].block.number < two[1].block.number)
        );
    }

    #[test]
    fn each_field_lies_in_its_block_and_in_no_other_field() {
        for block in blocks() {
            let mut end = 0;
            let mut fields: [Option<&Field>; 16] = [None; 16];
            for (slot, field) in fields.iter_mut().zip(block.fields) {
                *slot = Some(field);
            }
            fields.sort_by_key(|field| field.map_or(u16::MAX, |field| field.at));
            for field in fields.into_iter().flatten() {
                let at = usize::from(field.at);
                assert!(at >= end, "{:#x} at {at}", block.number);
                end = at + field.meaning.width();
                assert!(end <= block.size as usize, "{:#x} at {at}", block.number);
                let (beside, width) = match field.meaning {
                    Meaning::List { count_at, .. } => (Some(count_at), 4),
                    Meaning::Object { client_at } => (client_at, 4),
                    Meaning::Objects { used_at, .. } => (used_at, 2),
                    Meaning::NewObjects { used_at, .. } => (Some(used_at), 2),
                    _ => (None, 0),
                };
                let beside = beside.map_or(0, |at| usize::from(at) + width);
                assert!(beside <= block.size as usize, "{:#x} at {at}", block.number);
            }
        }
    }

    #[test]
    fn whoever_names_an_objects_client_checks_that_client_too() {
        for block in blocks() {
            for field in block.fields {
                if let Meaning::Object {
                    client_at: Some(at),
                } = field.meaning
                {
                    assert!(block.fields.contains(&client(at)), "{:#x}", block.number);
                }
            }
        }
    }

    #[test]
    fn commands_that_reach_other_programs_or_hardware_are_not_listed() {
        // Stop and start of channels by lists of clients; registers; memory by the debugger.
        for control in [
            0x2080_110a,
            0x2080_110b,
            0x2080_0122,
            0x83de_0315,
            0x83de_0316,
        ] {
            assert!(
                Branch::R580
                    .controls()
                    .iter()
                    .all(|block| block.number != control)
            );
        }
        for escape in [0x28, 0x41, 0x4a, 0x4d, 211, 217] {
            assert!(ESCAPES.iter().all(|listed| listed.block.number != escape));
        }
        assert!(
            Branch::R580
                .classes()
                .iter()
                .all(|class| class.number != 0x71)
        );
    }
}
