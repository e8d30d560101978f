//! A key-value server whose table and protocol are implemented in the kernel.

use std::{
    io::{Read, Write},
    net::Shutdown,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use gloop::{
    cuda::{Address, Args, Buffer},
    job::Grid,
};

use crate::{
    bed::{Bed, Stops},
    servers::{Listening, PAGE, connect, serve},
};

const CLIENTS: u32 = 16;
const BATCHES: u32 = 40;
const BATCH: usize = 1024;
/// The number of keys of a client.
const KEYS: u32 = 4096;
const PLACES: u32 = 1 << 18;

/// An operation of kv.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Operation {
    kind: u32,
    key: u32,
    value: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Table {
    keys: Address,
    values: Address,
    places: u32,
    padding: u32,
}

/// A client's operations, batch after batch. The keys of a batch are distinct and belong to this
/// client alone, so that each operation has exactly one correct answer.
fn operations(client: u32) -> Vec<Operation> {
    let mut random = fastrand::Rng::with_seed(u64::from(client));
    let mut keys: Vec<u32> = (0..KEYS).map(|key| 1 + client * KEYS + key).collect();
    let mut all = Vec::new();
    for _ in 0..BATCHES {
        random.shuffle(&mut keys);
        all.extend(keys.iter().take(BATCH).map(|key| Operation {
            kind: random.u32(0..2),
            key: *key,
            value: random.u64(..u64::MAX),
        }));
    }
    all
}

fn bytes(operations: &[Operation]) -> Vec<u8> {
    let words = |one: &Operation| {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&one.kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&one.key.to_le_bytes());
        bytes[8..].copy_from_slice(&one.value.to_le_bytes());
        bytes
    };
    operations.iter().flat_map(words).collect()
}

/// The answers of a table on the host.
fn right(all: &[Operation]) -> Vec<u64> {
    let mut table = std::collections::HashMap::new();
    let answer = |one: &Operation| {
        let old = table.get(&one.key).copied();
        if one.kind == 1 {
            table.insert(one.key, one.value);
        }
        old.unwrap_or(u64::MAX)
    };
    all.iter().map(answer).collect()
}

pub fn kv(bed: &Bed, stops: &mut Stops) -> Result<()> {
    let gpu = bed.runtime.gpu();
    let keys = gpu.allocate(PLACES as usize * 4)?;
    let values = gpu.allocate(PLACES as usize * 8)?;
    let table = Table {
        keys: keys.at(),
        values: values.at(),
        places: PLACES,
        padding: 0,
    };
    let clear = |answers: &Buffer| -> Result<()> {
        keys.clear()?;
        values.clear()?;
        Ok(answers.clear()?)
    };
    let asked: Vec<Vec<Operation>> = (0..CLIENTS).map(operations).collect();
    let expected: Vec<Vec<u64>> = asked.iter().map(|all| right(all)).collect();
    let sent = gpu.upload(&asked.concat())?;
    let answers = gpu.allocate(CLIENTS as usize * BATCHES as usize * BATCH * 8)?;
    let args = || {
        let args = Args::new().with(table).with(sent.at());
        args.with(answers.at()).with(BATCHES)
    };
    bed.native(&bed.kernel("kv", "vanilla")?, CLIENTS, 256, &args())?;
    ensure!(
        answers.download::<u64>()? == expected.concat(),
        "the vanilla version differs from the host's table"
    );
    clear(&answers)?;
    for batch in 0..BATCHES {
        let kernel = bed.kernel("kv", "split")?;
        bed.native(&kernel, CLIENTS, 256, &args().with(batch))?;
    }
    ensure!(
        answers.download::<u64>()? == expected.concat(),
        "the split version differs"
    );
    let listening = Listening::new(bed, "kv")?;
    let memory = gpu.allocate(CLIENTS as usize * BATCH * 24)?;
    let args = Args::new().with(table).with(listening.handle());
    let grid = Grid::logical(CLIENTS).threads(256).pages(2, PAGE);
    let kernel = bed.kernel("kv", "looped")?;
    let mut job = bed.runtime.prepare(&kernel, grid, args.with(memory.at()))?;
    let client = |number: u64| {
        let (asked, expected) = (&asked[number as usize], &expected[number as usize]);
        let mut stream = connect(listening.port())?;
        for (batch, answers) in asked.chunks(BATCH).zip(expected.chunks(BATCH)) {
            stream.write_all(&bytes(batch))?;
            let mut got = vec![0; BATCH * 8];
            stream.read_exact(&mut got).context("no answer came")?;
            let answers = answers.iter().flat_map(|one| one.to_le_bytes());
            ensure!(got.iter().copied().eq(answers), "another answer came");
        }
        stream.shutdown(Shutdown::Write)?;
        Ok(())
    };
    loop {
        clear(&answers)?;
        serve(&mut job, u64::from(CLIENTS), client, |job| {
            stops.run(job, Duration::from_micros(100))
        })?;
        job.rewind()?;
        if !stops.more() {
            return listening.close();
        }
    }
}
