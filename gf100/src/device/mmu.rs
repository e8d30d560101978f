//! Virtual addresses of the GPU: a walk of two levels, whose results are kept until they are flushed.

use std::{cell::RefCell, io};

use super::{
    ram::Ram,
    tlb::{Page, Tlb, User},
    vram::Vram,
};
use crate::{
    format::{
        Aperture, LARGE, LARGE_SHIFT, PAGE, PAGE_SHIFT, Target, VA_BITS,
        directory::{self, Pde, SMALL_ENTRIES, Table},
        instance::Space,
        pte::Pte,
    },
    registers::{Flush, interrupts::Reason},
};

/// Video memory and system memory.
pub struct Memory {
    /// Video memory.
    pub vram: Vram,
    /// System memory.
    pub ram: Ram,
    /// Translations are also kept when memory is only read.
    tlb: RefCell<Tlb>,
}

/// A physical address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PhysicalAddress {
    /// In video memory.
    Vram(u64),
    /// In system memory.
    Ram(u64),
}

impl PhysicalAddress {
    /// Address of the first byte of a page.
    pub fn of(target: Target) -> Self {
        match target {
            Target::Vram(page) => Self::Vram(page.address()),
            Target::Ram(page) => Self::Ram(page.address()),
        }
    }

    /// The address this many bytes further on. Addresses are below 2^40 and steps below 2^30, so
    /// this cannot overflow.
    pub fn after(self, bytes: u64) -> Self {
        match self {
            Self::Vram(at) => Self::Vram(at + bytes),
            Self::Ram(at) => Self::Ram(at + bytes),
        }
    }
}

/// A contiguous range.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Span {
    /// Its first byte.
    pub place: PhysicalAddress,
    /// Number of bytes, at least 1.
    pub len: u64,
}

/// Type of an access.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Access {
    /// A read.
    Read,
    /// A write.
    Write,
}

/// An address that cannot be used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BadAddress {
    /// The address.
    pub address: u64,
    /// The type of the access.
    pub access: Access,
    /// The reason.
    pub reason: Reason,
}

impl Memory {
    /// Video memory of this many bytes (whole MiB), and no system memory.
    pub fn new(vram: u64) -> io::Result<Self> {
        Ok(Self {
            vram: Vram::new(vram)?,
            ram: Ram::default(),
            tlb: RefCell::default(),
        })
    }

    /// Forgets the translations that any of these flushes covers.
    pub fn forget(&mut self, flushes: &[Flush]) {
        self.tlb.get_mut().forget(flushes);
    }

    /// Reads bytes. Returns whether all of them exist.
    pub fn read(&self, place: PhysicalAddress, data: &mut [u8]) -> bool {
        match place {
            PhysicalAddress::Vram(at) => self.vram.read(at, data),
            PhysicalAddress::Ram(at) => self.ram.read(at, data),
        }
    }

    /// Writes bytes. Returns whether all of them fit.
    pub fn write(&self, place: PhysicalAddress, data: &[u8]) -> bool {
        match place {
            PhysicalAddress::Vram(at) => self.vram.write(at, data),
            PhysicalAddress::Ram(at) => self.ram.write(at, data),
        }
    }

    /// Reads eight bytes, if they exist.
    pub fn word(&self, place: PhysicalAddress) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(place, &mut bytes)
            .then(|| u64::from_le_bytes(bytes))
    }

    /// Reads the page directory entry for an address of a space.
    pub fn directory_entry(&self, space: Space, address: u64) -> Option<Pde> {
        let index = address >> directory::SHIFT;
        let place = PhysicalAddress::of(space.directory()).after(index * 8);
        self.word(place).map(Pde::parse)
    }

    fn table_entry(&self, table: Table, index: u64) -> Option<Pte> {
        let place = PhysicalAddress::of(table.target()).after(index * 8);
        Pte::parse(self.word(place)?).ok()?
    }

    fn page(&self, entry: Pde, address: u64) -> Result<Page, Reason> {
        let small = (address >> PAGE_SHIFT) % SMALL_ENTRIES as u64;
        let large = small >> (LARGE_SHIFT - PAGE_SHIFT);
        let found = entry
            .small
            .and_then(|table| self.table_entry(table, small))
            .map(|entry| Page { entry, size: PAGE });
        match (found, entry.large) {
            (Some(found), _) => Ok(found),
            (None, None) => Err(Reason::NoPage),
            (None, Some(_)) if large >= entry.large_entries() as u64 => Err(Reason::TableTooShort),
            (None, Some(table)) => {
                let entry = self.table_entry(table, large).ok_or(Reason::NoPage)?;
                Ok(Page { entry, size: LARGE })
            }
        }
    }

    /// Translates an address of a space. The result extends to the end of its page.
    pub fn translate(
        &self,
        user: User,
        space: Space,
        address: u64,
        access: Access,
    ) -> Result<Span, BadAddress> {
        let bad = |reason| BadAddress {
            address,
            access,
            reason,
        };
        if address > space.limit || address >> VA_BITS != 0 {
            return Err(bad(Reason::Limit));
        }
        let mut tlb = self.tlb.borrow_mut();
        let mut kept = tlb.of(user, space.directory());
        let entry = kept.entry(address >> directory::SHIFT, || {
            self.directory_entry(space, address)
                .filter(|entry| entry.small.is_some() || entry.large.is_some())
                .ok_or(bad(Reason::NoTable))
        })?;
        let page = kept.page(address >> PAGE_SHIFT, || {
            self.page(entry, address).map_err(bad)
        })?;
        let Page { entry, size } = page;
        if access == Access::Write && entry.read_only {
            return Err(bad(Reason::ReadOnly));
        }
        // Every kind of storage is linear in this model, but system memory cannot be compressed.
        if entry.aperture != Aperture::Vram && entry.kind != 0 && entry.tag != 0 {
            return Err(bad(Reason::Kind));
        }
        let offset = address % size;
        Ok(Span {
            place: PhysicalAddress::of(entry.target()).after(offset),
            len: size - offset,
        })
    }

    /// Reads bytes at a virtual address.
    pub fn read_at(
        &self,
        user: User,
        space: Space,
        address: u64,
        data: &mut [u8],
    ) -> Result<(), BadAddress> {
        let mut done = 0;
        while done < data.len() {
            let address = address.wrapping_add(done as u64);
            let span = self.translate(user, space, address, Access::Read)?;
            let len = (data.len() - done).min(usize::try_from(span.len).unwrap_or(usize::MAX));
            if !self.read(span.place, &mut data[done..done + len]) {
                return Err(BadAddress {
                    address,
                    access: Access::Read,
                    reason: Reason::NoPage,
                });
            }
            done += len;
        }
        Ok(())
    }

    /// Writes bytes at a virtual address. If this fails, the bytes before the bad page have been
    /// written.
    pub fn write_at(
        &self,
        user: User,
        space: Space,
        address: u64,
        data: &[u8],
    ) -> Result<(), BadAddress> {
        let mut done = 0;
        while done < data.len() {
            let address = address.wrapping_add(done as u64);
            let span = self.translate(user, space, address, Access::Write)?;
            let len = (data.len() - done).min(usize::try_from(span.len).unwrap_or(usize::MAX));
            if !self.write(span.place, &data[done..done + len]) {
                return Err(BadAddress {
                    address,
                    access: Access::Write,
                    reason: Reason::NoPage,
                });
            }
            done += len;
        }
        Ok(())
    }
}
