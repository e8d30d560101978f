//! Records the guest's accesses, all of which are trapped for this purpose: see
//! [`gf100::recording`].
//!
//! The guest's writes to its RAM are not trapped. What the GPU reads there for a submission (rings
//! and push buffers) is recorded when the submission is sent to the mediator. A word for which a
//! channel waits is recorded when the waiting submission is done. Data that is copied is not
//! recorded.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Write as _},
    path::Path,
};

use device_model::memory::GuestMemory;
use gf100::{
    format::{
        Target,
        instance::Space,
        push::{Decoder, GpEntry, Method, Word},
    },
    recording::{Access, Encoder, Place},
    registers::CHANNELS,
};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{memory::Vram, tables};

/// Maximum size of a recording in bytes.
const MOST: u64 = 64 << 20;
/// Amount of data that is written to the file at a time.
const CHUNK: usize = 64 << 10;
/// Maximum total size of a submission's push buffers that are examined; longer ones end the
/// recording.
const MOST_PUSHED: u64 = 1 << 20;
/// Methods of a channel's semaphore: its address and operation.
const SEMAPHORE_HIGH: u16 = 0x10;
const SEMAPHORE_LOW: u16 = 0x14;
const SEMAPHORE_DO: u16 = 0x1c;
/// Operations that wait until the semaphore equals a value, is at least a value, or has a bit set.
const ACQUIRES: [u32; 3] = [1, 4, 8];

/// Memory, as a channel's commands address it.
pub struct Memory<'a> {
    /// The channel's address space.
    pub space: Space,
    /// The VM's VRAM.
    pub vram: &'a Vram,
    /// Its RAM.
    pub ram: &'a GuestMemory,
}

impl Memory<'_> {
    /// Translates an address, and returns how many bytes follow there.
    fn find(&self, address: u64) -> Option<(Target, u64, u64)> {
        let (target, offset, len) = tables::translate(self.space, address, self.vram)?;
        Some((target, target.address() + offset, len))
    }

    fn read(&self, target: Target, at: u64, data: &mut [u8]) -> bool {
        match target {
            Target::Vram(_) => self.vram.read(at, data),
            Target::Ram(_) => {
                let ram = self.ram.memory();
                ram.read_slice(data, GuestAddress(at)).is_ok()
            }
        }
    }
}

/// A recording in progress.
pub struct Recorder {
    file: File,
    encoder: Encoder,
    written: u64,
    /// Words of RAM for which channels' submissions wait, by channel, oldest submission first.
    waits: Vec<VecDeque<Vec<u64>>>,
    ended: bool,
}

impl Recorder {
    /// Creates a recording in a new file, for a GPU with `vram` bytes of VRAM.
    pub fn create(path: &Path, vram: u64) -> io::Result<Self> {
        Ok(Self {
            file: base::regular_file::create(path)?,
            encoder: Encoder::new(vram),
            written: 0,
            waits: vec![VecDeque::new(); usize::from(CHANNELS)],
            ended: false,
        })
    }

    /// Records a guest access to a BAR. It is recorded after its effects: a submission's commands
    /// are in RAM before its doorbell.
    pub fn access(&mut self, place: Place, offset: u64, access: Access<'_>) {
        if !self.ended {
            self.encoder.access(place, offset, access);
            self.save(CHUNK);
        }
    }

    /// Starts a new binding of a channel.
    pub fn begin(&mut self, channel: u8) {
        if let Some(waits) = self.waits.get_mut(usize::from(channel)) {
            waits.clear();
        }
    }

    /// Records ring entries that a channel submits, with their addresses.
    pub fn submit(
        &mut self,
        channel: u8,
        ring: impl Iterator<Item = u64>,
        entries: &[u64],
        memory: &Memory<'_>,
    ) {
        if self.ended {
            return;
        }
        for (address, entry) in ring.zip(entries) {
            if let Some((Target::Ram(_), at, _)) = memory.find(address) {
                self.encoder.ram(at, &entry.to_le_bytes());
            }
        }
        let mut commands = Commands::default();
        let mut pushed = 0;
        for entry in entries.iter().map(|raw| GpEntry::parse(*raw)) {
            // 40 and 23 bits, so there is no overflow.
            let end = entry.address + u64::from(entry.words) * 4;
            let mut address = entry.address;
            while address < end {
                // What is not mapped is not recorded: to fetch it causes a fault.
                let Some((target, at, len)) = memory.find(address) else {
                    break;
                };
                let len = len.min(end - address);
                pushed += len;
                if pushed > MOST_PUSHED {
                    self.end("a submission's push buffers are too long");
                    return;
                }
                let mut bytes = vec![0; len as usize];
                if !memory.read(target, at, &mut bytes) {
                    break;
                }
                if matches!(target, Target::Ram(_)) {
                    self.encoder.ram(at, &bytes);
                }
                commands.look(&bytes);
                address += len;
            }
        }
        let waits = commands.waits.into_iter();
        let waits = waits.filter_map(|address| match memory.find(address)? {
            (Target::Ram(_), at, _) => Some(at),
            (Target::Vram(_), ..) => None,
        });
        if let Some(all) = self.waits.get_mut(usize::from(channel)) {
            all.push_back(waits.collect());
        }
    }

    /// Records that a channel's oldest submission is done.
    pub fn done(&mut self, channel: u8, get: u32, entries: u32, ram: &GuestMemory) {
        if self.ended {
            return;
        }
        let waits = self.waits.get_mut(usize::from(channel));
        for at in waits.and_then(VecDeque::pop_front).into_iter().flatten() {
            let mut word = [0; 4];
            if ram.memory().read_slice(&mut word, GuestAddress(at)).is_ok() {
                self.encoder.ram(at, &word);
            }
        }
        self.encoder.done(channel, get, entries);
    }

    /// Writes everything that was recorded to the file.
    pub fn flush(&mut self) {
        self.save(0);
    }

    /// Writes pending data if it has at least `least` bytes; 0: writes all of it.
    fn save(&mut self, least: usize) {
        if self.ended || self.encoder.len() < least {
            return;
        }
        let bytes = self.encoder.take(least == 0);
        self.written += bytes.len() as u64;
        if self.written > MOST {
            self.end("it is as long as it may be");
        } else if let Err(error) = self.file.write_all(&bytes) {
            self.end(&error.to_string());
        }
    }

    fn end(&mut self, why: &str) {
        self.ended = true;
        log::warn!("the recording of a GPU's driver ends here: {why}");
    }
}

/// Finds the semaphores for which a submission waits.
#[derive(Default)]
struct Commands {
    decoder: Decoder,
    semaphore: u64,
    /// Addresses of these semaphores.
    waits: Vec<u64>,
}

impl Commands {
    fn look(&mut self, bytes: &[u8]) {
        for word in bytes.chunks_exact(4) {
            let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            if let Ok(Word::Method(method)) = self.decoder.next(word) {
                self.method(method);
            }
        }
    }

    fn method(&mut self, method: Method) {
        let data = u64::from(method.data);
        match method.address {
            SEMAPHORE_HIGH => self.semaphore = self.semaphore & 0xffff_ffff | (data & 0xff) << 32,
            SEMAPHORE_LOW => self.semaphore = self.semaphore & !0xffff_ffff | data & !3,
            SEMAPHORE_DO if ACQUIRES.contains(&(method.data & 0xf)) => {
                self.waits.push(self.semaphore);
            }
            _ => {}
        }
    }
}
