//! The formats that a guest may place in memory for its GPU: whatever is parsed is encoded the same
//! way again.

#![no_main]

use gantry_fuzz::input::Input;
use gf100::format::{
    directory::Pde,
    instance::{self, InstanceBlock},
    instruction::Instruction,
    pte::Pte,
    push::{Decoder, GpEntry, Header, Word},
    ramfc::{self, Ramfc},
    userd::Window,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let raw = input.u64();
    if let Ok(Some(page)) = Pte::parse(raw) {
        assert_eq!(Pte::parse(page.encode()), Ok(Some(page)));
    }
    if let Ok(instruction) = Instruction::parse(raw) {
        assert_eq!(Instruction::parse(instruction.encode()), Ok(instruction));
    }
    let entry = Pde::parse(raw);
    assert_eq!(Pde::parse(entry.encode()), entry);
    let entry = GpEntry::parse(raw);
    assert_eq!(GpEntry::parse(entry.encode()), entry);
    if let Some(window) = Window::parse(raw as u32)
        && let Some((channel, offset)) = window.channel(input.u64(), 128)
    {
        assert!(channel < 128 && offset < 0x1000);
    }
    let mut block = [0; instance::BYTES];
    let given = input.bytes(instance::BYTES);
    block[..given.len()].copy_from_slice(given);
    if let Some(parsed) = InstanceBlock::parse(&block) {
        parsed.encode(&mut block);
        assert_eq!(InstanceBlock::parse(&block), Some(parsed));
    }
    let mut head = [0; ramfc::BYTES];
    head.copy_from_slice(&block[..ramfc::BYTES]);
    let parsed = Ramfc::parse(&head);
    parsed.encode(&mut head);
    assert_eq!(Ramfc::parse(&head), parsed);
    let mut decoder = Decoder::default();
    while !input.is_empty() {
        let word = input.u32();
        if let Ok(header) = Header::parse(word) {
            assert_eq!(Header::parse(header.encode()), Ok(header));
        }
        if let Ok(Word::Method(method)) = decoder.next(word) {
            assert!(method.subchannel < 8 && method.address < 0x4000 && method.address % 4 == 0);
        }
    }
});
