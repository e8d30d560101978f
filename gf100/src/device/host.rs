//! Host methods, which every channel has below 0x100 on all subchannels: NVIDIA's `cl906f.h`.

use log::debug;

use super::{
    copy::Release,
    mmu::{BadAddress, Memory},
    tlb::User,
};
use crate::format::instance::Space;

const SEMAPHORE_HIGH: u16 = 0x10;
const SEMAPHORE_LOW: u16 = 0x14;
const SEMAPHORE_WORD: u16 = 0x18;
const SEMAPHORE: u16 = 0x1c;
const NON_STALL: u16 = 0x20;
const REFERENCE: u16 = 0x50;

/// The semaphore's registers.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Host {
    address: u64,
    word: u32,
}

/// The condition under which a channel that waits for a semaphore continues.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Acquire {
    address: u64,
    word: u32,
    how: How,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum How {
    Equal,
    NotBefore,
    AnyBit,
}

/// What a method requests.
#[derive(Debug, Eq, PartialEq)]
pub enum Work {
    /// Nothing.
    None,
    /// Wait for a semaphore.
    Acquire(Acquire),
    /// Write a word.
    Release(Release),
    /// Raise an interrupt.
    NonStall,
    /// Show a reference count to the CPU.
    Reference(u32),
}

impl Acquire {
    /// Whether the semaphore lets the channel continue.
    pub fn is_met(self, memory: &Memory, space: Space) -> Result<bool, BadAddress> {
        let mut bytes = [0; 4];
        memory.read_at(User::Engine, space, self.address, &mut bytes)?;
        let word = u32::from_le_bytes(bytes);
        Ok(match self.how {
            How::Equal => word == self.word,
            // Compares modulo 2^32.
            How::NotBefore => word.wrapping_sub(self.word) as i32 >= 0,
            How::AnyBit => word & self.word != 0,
        })
    }
}

impl Host {
    /// Executes a method below 0x100, other than 0.
    pub fn method(&mut self, address: u16, data: u32) -> Work {
        match address {
            SEMAPHORE_HIGH => {
                self.address = self.address & 0xffff_ffff | u64::from(data & 0xff) << 32;
            }
            SEMAPHORE_LOW => {
                self.address = self.address & 0xff_0000_0000 | u64::from(data & !3);
            }
            SEMAPHORE_WORD => self.word = data,
            SEMAPHORE => return self.semaphore(data),
            NON_STALL => return Work::NonStall,
            REFERENCE => return Work::Reference(data),
            _ => debug!("host method {address:#x} with {data:#x} does nothing"),
        }
        Work::None
    }

    fn semaphore(self, data: u32) -> Work {
        let acquire = |how| {
            Work::Acquire(Acquire {
                address: self.address,
                word: self.word,
                how,
            })
        };
        match data & 0xf {
            1 => acquire(How::Equal),
            2 => Work::Release(Release {
                address: self.address,
                payload: self.word,
                with_time: data & 1 << 24 == 0,
            }),
            4 => acquire(How::NotBefore),
            8 => acquire(How::AnyBit),
            _ => Work::None,
        }
    }
}
