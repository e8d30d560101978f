extern crate std;

use std::{vec, vec::Vec};

use proptest::prelude::*;

use super::*;

/// A program whose whole memory is these bytes, again and again.
struct Program {
    memory: Vec<u8>,
    taken: Vec<u8>,
}

impl Source for Program {
    fn take(&mut self, address: u64, length: usize) -> Result<(), Refusal> {
        let start = address as usize % self.memory.len();
        let bytes = self.memory.iter().cycle().skip(start).take(length);
        self.taken.extend(bytes);
        Ok(())
    }

    fn bytes(&self) -> &[u8] {
        &self.taken
    }
}

/// A worker with what was delivered.
struct Worker<'a> {
    delivered: &'a [u8],
    taken: usize,
}

impl Source for Worker<'_> {
    fn take(&mut self, _: u64, length: usize) -> Result<(), Refusal> {
        let end = self.taken.checked_add(length).ok_or(Refusal::Malformed)?;
        self.delivered.get(..end).ok_or(Refusal::Malformed)?;
        self.taken = end;
        Ok(())
    }

    fn bytes(&self) -> &[u8] {
        &self.delivered[..self.taken]
    }
}

fn program(memory: Vec<u8>) -> Program {
    Program {
        memory,
        taken: Vec::new(),
    }
}

fn word(block: &mut [u8], at: usize, value: u32) {
    block[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// A block of a control command or class, with the pointer to what follows.
fn outer(command: u32, inner: u32, size: u32, pointer: u64) -> Vec<u8> {
    let mut block = vec![0; 1 << 14];
    let (inner_at, size_at) = if command == CONTROL {
        (8, 24)
    } else {
        (12, 32)
    };
    word(&mut block, inner_at, inner);
    word(&mut block, size_at, size);
    block[16..24].copy_from_slice(&pointer.to_le_bytes());
    block
}

const CONTROL: u32 = 0xc020_462a;
const ALLOCATE: u32 = 0xc030_462b;

fn walk_frontend(command: u32, source: &mut impl Source) -> Result<Call, Refusal> {
    walk(Branch::R580, Kind::Frontend, command, 0x4000, source)
}

/// Commands, half of them listed.
fn any_command() -> impl Strategy<Value = (Kind, u32)> {
    let escapes = ESCAPES
        .iter()
        .map(|escape| (Kind::Frontend, escape.command()));
    let uvm = Branch::R580
        .uvm()
        .iter()
        .map(|uvm| (Kind::Uvm, uvm.block.number));
    let listed: Vec<_> = escapes.chain(uvm).collect();
    prop_oneof![
        prop::sample::select(listed),
        (any::<bool>(), any::<u32>())
            .prop_map(|(uvm, word)| (if uvm { Kind::Uvm } else { Kind::Frontend }, word)),
    ]
}

/// Blocks of listed controls and classes with lists of random lengths, so that walks go deep.
fn any_memory() -> impl Strategy<Value = Vec<u8>> {
    let inner: Vec<_> = Branch::R580
        .controls()
        .iter()
        .map(|block| (CONTROL, block))
        .collect();
    let classes = Branch::R580.classes().iter().map(|block| (ALLOCATE, block));
    let inner = inner.into_iter().chain(classes).collect::<Vec<_>>();
    (
        prop::sample::select(inner),
        prop::collection::vec(0..4u8, 1 << 14),
        any::<bool>(),
    )
        .prop_map(|((command, block), random, is_random)| {
            if is_random {
                return random;
            }
            let mut memory = outer(command, block.number, block.size, 0x100);
            memory[0x100..].copy_from_slice(&random[0x100..]);
            memory[0x100..0x104].copy_from_slice(&[random[0], 0, 0, 0]);
            memory
        })
}

proptest! {
    #[test]
    fn both_sides_find_the_same_call((kind, command) in any_command(), memory in any_memory(), address: u64) {
        let mut program = program(memory);
        let sent = walk(Branch::R580, kind, command, address, &mut program);
        let mut worker = Worker { delivered: &program.taken, taken: 0 };
        let received = walk(Branch::R580, kind, command, address, &mut worker);
        match (sent, received) {
            (Ok(sent), Ok(received)) => {
                prop_assert_eq!(worker.taken, program.taken.len());
                prop_assert!(sent.segments().eq(received.segments()));
                prop_assert!(sent.operands().eq(received.operands()));
                prop_assert_eq!(sent.pointers(), received.pointers());
                prop_assert!(program.taken.len() <= crate::wire::MOST);
            }
            (Err(sent), Err(received)) => prop_assert_eq!(sent, received),
            (sent, received) => prop_assert!(false, "{sent:?} against {received:?}"),
        }
    }

    #[test]
    fn bytes_that_nobody_sent_are_not_read((kind, command) in any_command(), delivered: Vec<u8>, address: u64) {
        let mut worker = Worker { delivered: &delivered, taken: 0 };
        if let Ok(call) = walk(Branch::R580, kind, command, address, &mut worker) {
            let end = call.segments().map(|(start, length)| start + length).max().unwrap_or(0);
            prop_assert!(end <= delivered.len());
            for operand in call.operands() {
                prop_assert!(operand.at + operand.meaning.width() <= delivered.len());
            }
        }
    }
}

#[test]
fn the_longest_listed_call_fits_in_a_message() {
    let longest = |blocks: &[Block]| {
        let lengths = blocks.iter().map(|block| {
            let lists = block.fields.iter().map(|field| match field.meaning {
                Meaning::List { element, most, .. } => usize::from(element) * usize::from(most),
                _ => 0,
            });
            block.size as usize + lists.sum::<usize>()
        });
        lengths.max().expect("the list has entries")
    };
    let inner = longest(Branch::R580.controls()).max(longest(Branch::R580.classes()));
    let outer = ESCAPES
        .iter()
        .map(|escape| escape.block.size as usize)
        .max();
    let uvm = Branch::R580
        .uvm()
        .iter()
        .map(|uvm| uvm.block.size as usize)
        .max();
    for length in [outer.map(|outer| outer + inner), uvm] {
        assert!(length.expect("the list has entries") <= crate::wire::MOST);
    }
}

#[test]
fn a_control_that_no_list_names_is_answered_with_a_status() {
    let mut program = program(outer(CONTROL, 0x2080_0122, 48, 0x100));
    let refused = walk_frontend(CONTROL, &mut program).expect_err("registers are not listed");
    let expected = Refusal::Unlisted {
        list: Listed::Control,
        number: 0x2080_0122,
        status: Some((status::NOT_SUPPORTED, 28)),
    };
    assert_eq!(refused, expected);
    assert_eq!(program.taken.len(), 32, "its block is not read");
}

#[test]
fn a_checkpoint_can_schedule_a_channel() {
    let mut block = program(outer(CONTROL, 0xa06f_0103, 3, 0x100));
    let call = walk_frontend(CONTROL, &mut block).expect("it is listed");
    assert_eq!(call.inner_block(), Some(32..35));
}

#[test]
fn states_of_multiprocessors_are_read_of_an_own_channel() {
    let mut block = program(outer(CONTROL, 0x83de_030c, 4824, 0x100));
    let call = walk_frontend(CONTROL, &mut block).expect("it is listed");
    let meaning = Meaning::Object { client_at: None };
    let is_channel = |operand: Operand| operand.at == 32 && operand.meaning == meaning;
    assert!(call.operands().any(is_channel));
}

#[test]
fn a_control_of_another_size_or_with_flags_is_malformed() {
    for (size, flags) in [(4, 0), (0, 0), (16, 0), (12, 4)] {
        let mut block = outer(CONTROL, 0xd01, size, 0x100);
        word(&mut block, 12, flags);
        let refused = walk_frontend(CONTROL, &mut program(block))
            .expect_err("the table says 12 bytes, no flags");
        assert_eq!(refused, Refusal::Malformed, "{size} bytes, flags {flags}");
    }
}

#[test]
fn a_class_with_a_mask_of_rights_is_malformed() {
    let mut block = outer(ALLOCATE, 0x2080, 0, 0x100);
    block[24] = 1;
    assert_eq!(
        walk_frontend(ALLOCATE, &mut program(block)).expect_err("no rights are carried"),
        Refusal::Malformed
    );
}

#[test]
fn a_pointer_to_nothing_is_reported_so_that_it_is_hidden() {
    let call = walk_frontend(ALLOCATE, &mut program(outer(ALLOCATE, 0x90e6, 0, 0x100)))
        .expect("it is listed");
    assert_eq!(call.pointers(), [Pointer { at: 16, to: None }]);
    assert_eq!(call.inner_block(), None);
}

#[test]
fn a_list_longer_than_the_table_allows_is_malformed() {
    let mut block = outer(CONTROL, 0x0080_170d, 24, 0x100);
    word(&mut block, 0x100, 1025);
    assert_eq!(
        walk_frontend(CONTROL, &mut program(block)).expect_err("1024 is the most"),
        Refusal::Malformed
    );
}
