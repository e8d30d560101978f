//! BARs that root of a guest moves while a channel works: to where RAM, other devices, other BARs or nothing
//! is, by halves, and off and on. Nothing of it is seen by others, and back in its place the GPU works.

use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};

use super::*;

/// The command register, and its bit for memory.
const COMMAND: u64 = 4;
const MEMORY: u8 = 2;
/// The local and the I/O APICs are in the 16 MiB from here on.
const APICS: u64 = 0xfe00_0000;
/// Where in BAR 1 and BAR 3 the table of small pages is shown, by page.
const SHOWN: u64 = 1000;
/// What the GPU's first register says.
const BOOT: u64 = 0;

/// A BAR: its register in configuration space, its bytes, and whether it has 64 bits.
#[derive(Clone, Copy)]
struct Place {
    register: u64,
    size: u64,
    wide: bool,
}

const BARS: [Place; 3] = [
    Place {
        register: 0x10,
        size: 16 << 20,
        wide: false,
    },
    Place {
        register: 0x14,
        size: 128 << 20,
        wide: true,
    },
    Place {
        register: 0x1c,
        size: 64 << 20,
        wide: true,
    },
];

impl Bar {
    /// Memory at a physical address, whatever is there.
    fn at(address: u64, len: u64) -> Result<Self> {
        let file = File::options().read(true).write(true).open("/dev/mem")?;
        Self::map(&file, len as usize, address).with_context(|| format!("nothing at {address:#x}"))
    }
}

impl Raw {
    fn config(&self) -> Result<File> {
        let path = self.device.join("config");
        Ok(File::options().read(true).write(true).open(path)?)
    }

    /// Where a BAR is.
    fn address(&self, bar: Place) -> Result<u64> {
        let mut bytes = [0; 8];
        let len = if bar.wide { 8 } else { 4 };
        self.config()?
            .read_exact_at(&mut bytes[..len], bar.register)?;
        Ok(u64::from_le_bytes(bytes) & !0xf)
    }

    /// Moves a BAR, its lower half first: for a moment it is somewhere else.
    fn move_to(&self, bar: Place, address: u64) -> Result<()> {
        let config = self.config()?;
        let bytes = address.to_le_bytes();
        config.write_all_at(&bytes[..4], bar.register)?;
        if bar.wide {
            config.write_all_at(&bytes[4..], bar.register + 4)?;
        }
        Ok(())
    }

    fn switch(&self, memory: bool) -> Result<()> {
        let config = self.config()?;
        let mut command = [0];
        config.read_exact_at(&mut command, COMMAND)?;
        let command = command[0] & !MEMORY | if memory { MEMORY } else { 0 };
        Ok(config.write_all_at(&[command], COMMAND)?)
    }

    /// An entry that is written through a BAR has the GPU write to another page.
    fn lands(&mut self, bar: Bar, page: u32, word: u32) -> Result<()> {
        let entry = Pte::linear(Target::Vram(VramPage(page))).encode();
        let at = SHOWN * PAGE + SPARE_VA / PAGE * 8;
        bar.set(at, entry as u32);
        bar.set(at + 4, (entry >> 32) as u32);
        self.flush()?;
        self.submit(&release(SPARE_VA, word));
        self.until("a word at the page of an entry", || {
            self.peek(u64::from(page) * PAGE) == word
        })
    }

    /// A place of a BAR's size, not far from its own, where it is decoded, and the BAR as it is there.
    fn elsewhere(&self, bar: Place, is: impl Fn(&Bar) -> bool) -> Result<Bar> {
        let own = self.address(bar)?;
        for step in 1..16 {
            for address in [own + step * bar.size, own.wrapping_sub(step * bar.size)] {
                let fits = bar.wide || address < 1 << 32;
                if !fits || address < u64::from(self.ram) * PAGE {
                    continue;
                }
                self.move_to(bar, address)?;
                let there = Bar::at(address, bar.size)?;
                if is(&there) {
                    return Ok(there);
                }
            }
        }
        self.move_to(bar, own)?;
        anyhow::bail!("there is no other place than {own:#x}")
    }
}

/// Moves each BAR to each place and back.
pub(super) fn moves(raw: &mut Raw) -> Result<u32> {
    let own = BARS.map(|bar| raw.address(bar));
    let [first, second, third] = own;
    let own = [first?, second?, third?];
    let tables = (SMALL..SMALL + 64).map(VramPage).map(Target::Vram);
    raw.map(BAR_SMALL, SHOWN, tables);
    raw.set(0x00_1714, 1 << 31 | BAR_INSTANCE);
    raw.show()?;
    let mut done = nowhere(raw, own)?;
    done += others(raw, own)?;
    done += free(raw, own)?;
    raw.set(0x00_1714, 0);
    raw.start()?;
    Ok(done)
}

/// Where none of them is decoded.
fn nowhere(raw: &mut Raw, own: [u64; 3]) -> Result<u32> {
    let mut done = 0;
    let mine = u64::from(raw.gfn) * PAGE;
    for (bar, home) in BARS.into_iter().zip(own) {
        let far = if bar.wide { 1 << 60 } else { 0 };
        for place in [0, mine, APICS, u64::MAX, far] {
            let word = 0x400 + 4 * done;
            raw.works(word)?;
            // The GPU is at work meanwhile.
            let from = VRAM_VA + u64::from(SOURCE) * PAGE;
            let to = VRAM_VA + u64::from(OLD) * PAGE;
            raw.submit(&copies(from, to, 0x1fff, 0x100));
            raw.move_to(bar, place & !(bar.size - 1))?;
            raw.switch(false)?;
            raw.switch(true)?;
            // What is no BAR is written all the same, and the page is still RAM.
            raw.doorbell(raw.put + 1);
            raw.set(0x00_2634, CHANNEL);
            let seen = raw.mine();
            raw.move_to(bar, home)?;
            ensure!(seen == word, "the page is {seen:#x} below a BAR");
            raw.passed()?;
            raw.channel();
            raw.works(word + 1)
                .with_context(|| format!("after {place:#x}"))?;
            let page = if done % 2 == 0 { NEW } else { OLD };
            raw.lands(raw.bar1, page, word + 2)?;
            raw.channel();
            done += 1;
        }
    }
    Ok(done)
}

/// Where another BAR is: it is decoded when that one goes, as what it is itself.
fn others(raw: &mut Raw, own: [u64; 3]) -> Result<u32> {
    let table = u64::from(SMALL) * PAGE;
    let entry = table + VRAM_VA / PAGE * 8;
    let expected = raw.peek(entry);
    raw.move_to(BARS[2], own[1])?;
    raw.works(0x500)?;
    // BAR 1 goes, and BAR 3 is seen where it was. That has no submissions.
    raw.move_to(BARS[1], !(BARS[1].size - 1))?;
    let seen = raw.bar1.get(SHOWN * PAGE + VRAM_VA / PAGE * 8);
    raw.doorbell(raw.put + 1);
    raw.move_to(BARS[2], own[2])?;
    raw.move_to(BARS[1], own[1])?;
    ensure!(seen == expected, "BAR 3 shows {seen:#x}, not {expected:#x}");
    // The registers, where BAR 1 and BAR 3 are.
    for place in [own[1], own[2]] {
        raw.move_to(BARS[0], place)?;
        raw.move_to(BARS[0], own[0])?;
    }
    raw.channel();
    raw.works(0x501)?;
    Ok(3)
}

/// Where there is room: the GPU works there, by what is mapped and by what is trapped.
fn free(raw: &mut Raw, own: [u64; 3]) -> Result<u32> {
    let boot = raw.registers.get(BOOT);
    let there = raw.elsewhere(BARS[0], |bar| bar.get(BOOT) == boot)?;
    let gone = raw.registers.get(BOOT);
    ensure!(gone == u32::MAX, "{gone:#x} is still where BAR 0 was");
    let here = std::mem::replace(&mut raw.registers, there);
    raw.works(0x600)?;
    raw.registers = here;
    raw.move_to(BARS[0], own[0])?;

    let entry = u64::from(SMALL) * PAGE + VRAM_VA / PAGE * 8;
    let expected = raw.peek(entry);
    let at = SHOWN * PAGE + VRAM_VA / PAGE * 8;
    for (bar, home, word) in [(BARS[1], own[1], 0x610), (BARS[2], own[2], 0x620)] {
        raw.channel();
        let there = raw.elsewhere(bar, |bar| bar.get(at) == expected)?;
        // Submissions are BAR 1's.
        let here = raw.bar1;
        if bar.register == BARS[1].register {
            raw.bar1 = there;
        }
        raw.lands(there, NEW, word)?;
        raw.bar1 = here;
        raw.move_to(bar, home)?;
        raw.works(word + 1)?;
    }
    Ok(3)
}
