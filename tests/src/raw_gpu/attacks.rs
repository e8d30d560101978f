//! What root of a guest does that no driver would: each ends a channel of its own, or nothing.

use anyhow::{Context, Result, ensure};

use super::*;

/// Everything that ends a channel or nothing; then it works as before.
pub fn attack() -> Result<()> {
    type Attacks = fn(&mut Raw) -> Result<u32>;
    let mut raw = Raw::open()?;
    raw.start()?;
    raw.works(1)?;
    let mut done = 0;
    let all: [(&str, Attacks); 8] = [
        ("pages", pages),
        ("pointers", pointers),
        ("tables that the GPU writes", own_tables),
        ("a running channel's tables", running),
        ("tables that change while they are read", rewritten),
        ("commands", commands),
        ("storms", storms),
        ("BARs that move", moves::moves),
    ];
    for (what, attacks) in all {
        done += attacks(&mut raw).with_context(|| format!("attacks by {what}"))?;
        println!("{what}: {done} attacks so far, {:?}", raw.since.elapsed());
    }
    raw.start()?;
    raw.works(0x600d)?;
    raw.stop();
    let [faults, errors, neither] = raw.outcomes;
    println!("{faults} faults, {errors} errors, {neither} times neither");
    println!("{done} attacks did nothing");
    Ok(())
}

/// Pages of others', or partly of others'.
fn pages(raw: &mut Raw) -> Result<u32> {
    let (vram, ram) = (raw.vram, raw.ram);
    let mut done = 0;
    for (what, target) in [
        ("a page behind VRAM", Target::Vram(VramPage(vram))),
        ("the next partition", Target::Vram(VramPage(vram + 0x100))),
        (
            "the last page there is",
            Target::Vram(VramPage((1 << 28) - 1)),
        ),
        ("a page behind RAM", Target::Ram(Gfn(ram))),
        ("another machine's RAM", Target::Ram(Gfn(ram + 0x8000))),
        ("far behind RAM", Target::Ram(Gfn(1 << 27))),
        (
            "the last page of RAM there is",
            Target::Ram(Gfn((1 << 28) - 1)),
        ),
    ] {
        raw.map_one(SPARE_VA, target);
        raw.faults(what, SPARE_VA)?;
        done += 1;
    }
    raw.map_one(SPARE_VA, Target::Vram(VramPage(NEW)));
    // Large pages: each is looked at as a whole, and not at its first byte.
    let per = (LARGE / PAGE) as u32;
    for (what, target) in [
        (
            "a large page that begins on the last page",
            Target::Vram(VramPage(vram - 1)),
        ),
        (
            "a large page half behind VRAM",
            Target::Vram(VramPage(vram - per / 2)),
        ),
        ("a large page behind VRAM", Target::Vram(VramPage(vram))),
        (
            "a large page that begins in a page",
            Target::Vram(VramPage(1)),
        ),
        (
            "a large page half behind RAM",
            Target::Ram(Gfn(ram - per / 2)),
        ),
        (
            "a large page behind RAM",
            Target::Ram(Gfn(ram.next_multiple_of(per))),
        ),
    ] {
        raw.map(LARGE_TABLE, 0, std::iter::once(target));
        raw.faults(what, LARGE_VA)?;
        done += 1;
    }
    let own = Target::Vram(VramPage(VISIBLE / per * per - per));
    raw.map(LARGE_TABLE, 0, std::iter::once(own));
    raw.flush()?;
    raw.submit(&release(LARGE_VA, 7));
    let at = u64::from(VISIBLE / per * per - per) * PAGE;
    raw.until("a word in a large page", || raw.peek(at) == 7)?;
    raw.works(2)?;
    Ok(done)
}

/// Pointers to tables, rings and instance blocks, and how far a ring goes.
fn pointers(raw: &mut Raw) -> Result<u32> {
    let mut done = 0;
    for put in [u32::MAX, 512, 1 << 20] {
        raw.doorbell(put);
        ensure!(raw.get(0x04_0108) != 0, "{put:#x} is a ring's end");
        raw.channel();
        done += 1;
    }
    let end = u64::from(raw.vram) * PAGE;
    let instance = u64::from(INSTANCE) * PAGE;
    let directory = u64::from(DIRECTORY) * PAGE;
    for (at, word) in [
        // The directory: outside, partly outside, in RAM.
        (instance + 0x200, 0xff_ffff_f000_u64),
        (instance + 0x200, end - PAGE),
        (instance + 0x200, 0x2000 | 2),
        // Tables: outside, partly outside, in RAM, of both sizes.
        (directory, u64::MAX),
        (
            directory,
            ((end / PAGE - 1) << 4 | 1) << 32 | (end / PAGE - 1) << 4 | 1,
        ),
        (directory, (0x200 << 4 | 2) << 32 | 0x200 << 4 | 2),
        // Ring and submission page.
        (instance + 0x48, 0xff_ffff_fff8 | 31 << 48),
        (instance + 0x08, u64::MAX),
        (instance + 0x08, end - 8),
    ] {
        raw.channel();
        let old = u64::from(raw.peek(at)) | u64::from(raw.peek(at + 4)) << 32;
        raw.poke64(at, word);
        raw.flush()?;
        raw.submit(&release(RAM_VA, 0xbad));
        raw.carried_out()?;
        raw.set(0x00_2634, CHANNEL);
        raw.poke64(at, old);
        raw.channel();
        raw.flush()?;
        raw.works(0x100 + done)
            .with_context(|| format!("after {word:#x} at {at:#x}"))?;
        done += 1;
    }
    // Instance blocks and run lists anywhere.
    for value in [0xcfff_ffff_u32, 0xc000_0000 | (raw.vram - 1), 0xe000_0000] {
        raw.set(0x00_3000 + 8 * 9, value);
        raw.set(0x00_3004 + 8 * 9, 0x001f_0001);
        raw.set(0x00_2270, value & 0x3fff_ffff);
        raw.set(0x00_2274, 0x01f0_0fff);
        raw.set(0x00_1704, value);
        raw.set(0x00_1714, value);
        raw.set(0x00_2254, value);
        raw.set(0x00_3004 + 8 * 9, 0x001f_0000);
        raw.set(0x00_3000 + 8 * 9, 0);
        raw.show()?;
        raw.channel();
        raw.carried_out()?;
        raw.works(0x180 + done)?;
        done += 1;
    }
    // A channel behind the table's end, and its submission page.
    let at = 0x00_3000 + 8 * 128;
    raw.set(at, 0xc000_0000 | INSTANCE);
    raw.set(at + 4, 0x001f_0001);
    raw.bar1.set(128 * userd::STRIDE + userd::GP_PUT, 1);
    raw.set(0x00_2634, 128);
    raw.carried_out()?;
    // The window at VRAM's end, and behind it.
    raw.poke(0, WORD);
    raw.poke(end - 4, WORD);
    let half = 0x8_0000;
    for (base, behind) in [(end - half, half), (end, 0), (u64::MAX, 0)] {
        raw.set(0x00_1700, (base >> 16) as u32);
        raw.shown.set(None);
        for at in [behind, 0xf_fffc] {
            raw.registers.set(0x70_0000 + at, 0xbad);
        }
        let own = [0, end - 4].map(|at| raw.peek(at));
        ensure!(own == [WORD; 2], "VRAM is {own:x?} after a write behind it");
        done += 1;
    }
    raw.start()?;
    raw.works(3)?;
    Ok(done + 1)
}

/// The GPU writes the tables that it is told to use.
fn own_tables(raw: &mut Raw) -> Result<u32> {
    let table = SMALL + (SPARE_VA / PAGE / 512) as u32;
    let entry = VRAM_VA + u64::from(table) * PAGE + SPARE_VA / PAGE % 512 * 8;
    // What is beyond the pages that it sees of VRAM it gets for this.
    let own = Target::Vram(VramPage(table));
    raw.map_one(VRAM_VA + u64::from(table) * PAGE, own);
    raw.map_one(SPARE_VA, Target::Vram(VramPage(OLD)));
    raw.flush()?;
    raw.submit(&release(SPARE_VA, 1));
    raw.until("a word", || raw.peek(u64::from(OLD) * PAGE) == 1)?;
    let outside = Pte::linear(Target::Vram(VramPage(raw.vram))).encode();
    raw.submit(&release(entry, outside as u32));
    let at = u64::from(table) * PAGE + SPARE_VA / PAGE % 512 * 8;
    raw.until("the entry", || raw.peek(at) == outside as u32)?;
    // Nothing has changed until the guest says so; then it is a fault.
    raw.submit(&release(SPARE_VA, 2));
    raw.until("a word", || raw.peek(u64::from(OLD) * PAGE) == 2)?;
    raw.faults("an entry that the GPU wrote", SPARE_VA)?;
    // And one that is right is used.
    let inside = Pte::linear(Target::Vram(VramPage(NEW))).encode();
    raw.submit(&release(entry, inside as u32));
    raw.until("the entry", || raw.peek(at) == inside as u32)?;
    raw.flush()?;
    raw.submit(&release(SPARE_VA, 3));
    raw.until("a word", || raw.peek(u64::from(NEW) * PAGE) == 3)?;
    raw.works(4)?;
    Ok(2)
}

/// A channel that runs uses no table that was replaced: after a flush nothing gets to the old page.
fn running(raw: &mut Raw) -> Result<u32> {
    let mut done = 0;
    for end in [Some(Target::Vram(VramPage(NEW))), None] {
        for page in [OLD, NEW] {
            raw.fill(page, 0);
        }
        raw.fill(SOURCE, WORD);
        raw.map_one(SPARE_VA, Target::Vram(VramPage(OLD)));
        raw.flush()?;
        let from = VRAM_VA + u64::from(SOURCE) * PAGE;
        raw.submit(&copies(from, SPARE_VA, 0x1fff, 0x1000));
        raw.until("the first line", || raw.is_all(OLD, WORD))?;
        match end {
            Some(target) => raw.map_one(SPARE_VA, target),
            None => raw.poke64(u64::from(SMALL) * PAGE + SPARE_VA / PAGE * 8, 0),
        }
        raw.flush()?;
        raw.fill(OLD, 0);
        if end.is_some() {
            raw.until("a line at the new page", || raw.is_all(NEW, WORD))?;
        } else {
            raw.until("a fault", || raw.get(0x00_259c) != 0)?;
        }
        ensure!(raw.is_all(OLD, 0), "the old page was written after a flush");
        raw.channel();
        raw.fill(NEW, 0);
        std::thread::sleep(Duration::from_millis(20));
        ensure!(raw.is_all(NEW, 0), "a channel that was stopped runs");
        raw.works(0x200 + done)?;
        done += 1;
    }
    Ok(done)
}

/// Commands that would reach physical addresses, never end, or change what the channel is; and
/// microcode.
fn commands(raw: &mut Raw) -> Result<u32> {
    let mut done = 0;
    // Physical addresses in copies; methods of nobody's; a class that there is not.
    let mut physical = run(COPY, 0, &[0x90b5]);
    physical.extend(run(COPY, 0x250, &[1]));
    let bad = [physical, run(COPY, 0x250, &[1]), run(7, 0, &[0xffff])];
    for words in bad {
        raw.submit(&words);
        raw.until("a command error", || raw.get(0x04_0108) != 0)?;
        raw.channel();
        raw.works(0x300 + done)?;
        done += 1;
    }
    // Microcode for every processor that a driver may load: it is kept, and does nothing.
    for falcon in [
        0x08_7000_u32,
        0x10_4000,
        0x10_5000,
        0x10_a000,
        0x40_9000,
        0x41_a000,
    ] {
        // Both memories, by the port that goes on by itself; then start.
        for port in [0x180, 0x1c0] {
            raw.set(falcon + port, 1 << 24);
            for word in 0..64 {
                raw.set(falcon + port + 4, 0xf000_0000 | word);
            }
        }
        // DMA by physical addresses from memory, and to it.
        for (at, value) in [
            (0x110, 0),
            (0x114, 0),
            (0x11c, 0),
            (0x118, 0x620),
            (0x118, 0x600),
        ] {
            raw.set(falcon + at, value);
        }
        raw.set(falcon + 0x104, 0);
        raw.set(falcon + 0x100, 2);
        raw.works(0x310 + done)?;
        done += 1;
    }
    raw.start()?;
    // A semaphore that nobody releases; a chain of copies; a ring full of long push buffers.
    let from = VRAM_VA + u64::from(SOURCE) * PAGE;
    let chain = copies(from, VRAM_VA + u64::from(NEW) * PAGE, 0x1fff, 0x1000);
    let wait = run(0, 0x10, &[0, from as u32, 0xfff_fff0, 1]);
    raw.fill(NEW, 0);
    raw.fill(SOURCE, WORD);
    for words in [wait, chain] {
        raw.submit(&words);
        raw.carried_out()?;
        raw.channel();
        raw.works(0x320 + done)?;
        done += 1;
    }
    ensure!(raw.is_all(NEW, WORD), "the chain has not begun");
    let long = GpEntry {
        address: VRAM_VA + u64::from(PUSH) * PAGE,
        words: 1 << 20,
    };
    for at in 0..511 {
        raw.poke64(u64::from(RING) * PAGE + at * 8, long.encode());
    }
    raw.fill(PUSH, 0);
    raw.doorbell(511);
    raw.carried_out()?;
    raw.channel();
    raw.works(0x330)?;
    // The GPU writes the channel's own submission page and instance block.
    for page in [USERD + CHANNEL, INSTANCE] {
        let to = VRAM_VA + u64::from(page) * PAGE;
        raw.submit(&copies(from, to, 1, 1));
        // Nothing else is written there.
        let end = u64::from(page + 1) * PAGE - 4;
        raw.until("the channel's own page", || raw.peek(end) == WORD)?;
        raw.submit(&release(RAM_VA, 0x331));
        raw.carried_out()?;
        raw.set(0x00_2634, CHANNEL);
        raw.start()?;
        raw.works(0x332 + page)?;
        done += 1;
    }
    // The same instance block at other numbers.
    for number in [6, 127] {
        raw.set(0x00_3000 + number * 8, 0xc000_0000 | INSTANCE);
        raw.set(0x00_3004 + number * 8, 0x001f_0001);
        let at = u64::from(number) * userd::STRIDE + userd::GP_PUT;
        raw.bar1.set(at, 1);
        raw.carried_out()?;
        raw.set(0x00_3004 + number * 8, 0x001f_0000);
        raw.set(0x00_3000 + number * 8, 0);
        raw.channel();
        raw.works(0x340 + number)?;
        done += 1;
    }
    Ok(done + 1)
}

/// The GPU writes a table, good entries and bad ones in turn, while the table is read again and again for flushes.
fn rewritten(raw: &mut Raw) -> Result<u32> {
    const FLUSHES: u32 = 300;
    // A page of the table without the entries that works() and the attacks before use.
    let va = SPARE_VA + 0x40_0000;
    let table = SMALL + (va / PAGE / 512) as u32;
    raw.map_one(
        VRAM_VA + u64::from(table) * PAGE,
        Target::Vram(VramPage(table)),
    );
    raw.flush()?;
    // One page of entries that are the guest's to use, and one of others' pages.
    for (page, target) in [(OLD, NEW), (NEW, raw.vram)] {
        let entries = (0..512).map(|_| Target::Vram(VramPage(target)));
        raw.map(page, 0, entries);
    }
    let to = VRAM_VA + u64::from(table) * PAGE;
    let mut words = Vec::new();
    for _ in 0..32 {
        for page in [OLD, NEW] {
            words.extend(copies(VRAM_VA + u64::from(page) * PAGE, to, 0x400, 1));
        }
    }
    raw.submit(&words);
    raw.until("the first entry", || raw.peek(u64::from(table) * PAGE) != 0)?;
    let entry = || raw.peek(u64::from(table) * PAGE);
    let (mut last, mut changes) = (entry(), 0);
    for _ in 0..FLUSHES {
        raw.flush()?;
        let now = entry();
        changes += u32::from(now != last);
        last = now;
    }
    ensure!(changes > 0, "the table stayed the same while it was read");
    println!("a table changed {changes} times in {FLUSHES} flushes");
    raw.passed()?;
    raw.channel();
    // Whatever was read last: what is right afterwards is used, and what is not is a fault.
    raw.map_one(va, Target::Vram(VramPage(raw.vram)));
    raw.faults("an entry that has changed while it was read", va)?;
    raw.map_one(va, Target::Vram(VramPage(SOURCE)));
    raw.flush()?;
    raw.submit(&release(va, 10));
    raw.until("a word", || raw.peek(u64::from(SOURCE) * PAGE) == 10)?;
    raw.fill(SOURCE, WORD);
    raw.works(11)?;
    Ok(1)
}

/// Much of everything.
fn storms(raw: &mut Raw) -> Result<u32> {
    // One table in all of a directory.
    let entry = Pde {
        small: Some(Table {
            aperture: Aperture::Vram,
            number: SMALL,
        }),
        ..Pde::default()
    };
    for index in 2..8192 {
        raw.poke64(u64::from(DIRECTORY) * PAGE + index * 8, entry.encode());
    }
    raw.flush()?;
    raw.works(5)?;
    raw.submit(&release(RAM_VA + (100 << 27), 6));
    raw.until("a word by another entry", || raw.mine() == 6)?;
    // Flushes while a channel runs.
    let from = VRAM_VA + u64::from(SOURCE) * PAGE;
    raw.submit(&copies(
        from,
        VRAM_VA + u64::from(OLD) * PAGE,
        0x1fff,
        0x1000,
    ));
    raw.until("the first line", || raw.is_all(OLD, WORD))?;
    for _ in 0..100 {
        raw.flush()?;
    }
    // BARs go while it does.
    let config = raw.device.join("config");
    let command = fs::read(&config)?
        .get(4)
        .copied()
        .context("no configuration")?;
    let write = |value: u8| {
        use std::os::unix::fs::FileExt;
        let file = File::options().write(true).open(&config)?;
        file.write_all_at(&[value], 4)
    };
    for _ in 0..3 {
        write(command & !2)?;
        write(command | 2)?;
    }
    raw.passed()?;
    raw.channel();
    raw.works(7)?;
    // A BAR in as many pieces as it has pages.
    let pages = (0..4096_u32).map(|page| Target::Vram(VramPage(page * 2 % VISIBLE)));
    raw.map(BAR_SMALL, 1000, pages);
    raw.set(0x10_0cb8, BAR_DIRECTORY << 4);
    raw.set(0x10_0cbc, 1 << 31 | 5);
    raw.works(8)?;
    // Others' interrupts.
    for at in [
        0x00_0100, 0x00_2100, 0x00_259c, 0x00_25a8, 0x00_2a00, 0x04_0108,
    ] {
        raw.set(at, u32::MAX);
    }
    raw.works(9)?;
    Ok(4)
}
