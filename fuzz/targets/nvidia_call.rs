//! Calls on NVIDIA's device files, in a program's memory and in the worker's message: both walks find the same, and
//! no walk reads what was not delivered.

#![no_main]

use libfuzzer_sys::fuzz_target;
use nvidia_abi::{Branch, Call, Kind, Refusal, Source, walk, wire};

/// A program whose memory are these bytes, from address 1 on.
struct Program<'a> {
    memory: &'a [u8],
    taken: Vec<u8>,
}

impl Source for Program<'_> {
    fn take(&mut self, address: u64, length: usize) -> Result<(), Refusal> {
        let start = usize::try_from(address - 1).map_err(|_| Refusal::Fault)?;
        let end = start.checked_add(length).ok_or(Refusal::Fault)?;
        self.taken
            .extend(self.memory.get(start..end).ok_or(Refusal::Fault)?);
        Ok(())
    }

    fn bytes(&self) -> &[u8] {
        &self.taken
    }
}

/// The worker with a message.
struct Worker<'a> {
    delivered: &'a [u8],
    taken: usize,
}

impl Source for Worker<'_> {
    fn take(&mut self, _: u64, length: usize) -> Result<(), Refusal> {
        let end = self.taken + length;
        self.delivered.get(..end).ok_or(Refusal::Malformed)?;
        self.taken = end;
        Ok(())
    }

    fn bytes(&self) -> &[u8] {
        &self.delivered[..self.taken]
    }
}

/// Whatever the walk found lies in the message.
fn check(call: &Call, length: usize) {
    assert!(length <= wire::MOST);
    assert!(
        call.segments()
            .all(|(start, bytes)| start + bytes <= length)
    );
    assert!(
        call.pointers()
            .iter()
            .all(|pointer| pointer.at + 8 <= length)
    );
    assert!(
        call.operands()
            .all(|operand| operand.at + operand.meaning.width() <= length)
    );
}

fuzz_target!(|bytes: &[u8]| {
    let Some((head, memory)) = bytes.split_first_chunk::<5>() else {
        return;
    };
    let kind = if head[0] & 1 == 0 {
        Kind::Frontend
    } else {
        Kind::Uvm
    };
    let command = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);

    let mut worker = Worker {
        delivered: memory,
        taken: 0,
    };
    if let Ok(call) = walk(Branch::R580, kind, command, 1, &mut worker) {
        check(&call, worker.taken);
    }
    let mut program = Program {
        memory,
        taken: Vec::new(),
    };
    let sent = walk(Branch::R580, kind, command, 1, &mut program);
    let mut worker = Worker {
        delivered: &program.taken,
        taken: 0,
    };
    match (sent, walk(Branch::R580, kind, command, 1, &mut worker)) {
        (Ok(sent), Ok(received)) => {
            check(&sent, program.taken.len());
            assert_eq!(worker.taken, program.taken.len());
            assert!(sent.segments().eq(received.segments()));
            assert!(sent.operands().eq(received.operands()));
        }
        // What the program cannot read, the worker is not sent.
        (Err(Refusal::Fault), Err(_)) => {}
        (sent, received) => assert_eq!(sent.err(), received.err()),
    }
});
