//! Ranges of BARs that show pages of VRAM: memory of the guest, without exits.
//!
//! Each is one range of addresses in this process, in which pages of the partition are mapped over
//! private zeroes. Pages that the guest's tables do not map show the zeroes.

use std::{io, sync::Arc};

use base::{Access, Mapping as Range};
use gf100::format::PAGE;
use vm_memory::GuestAddress;

use super::memory::Vram;
use crate::memory::{AddressSpace, HostMemory, Mapping};

/// Pieces that one range may be in, at most: a process may have 65,530 in all.
const MOST_PIECES: usize = 20_000;

/// A range of a BAR.
pub struct Aperture {
    /// The guest's view goes before the memory does.
    placed: Vec<Box<dyn Mapping>>,
    memory: Range,
    /// Pages of VRAM by page.
    shown: Vec<Option<u32>>,
    /// Pages that the guest cannot write without an exit: first and end.
    read_only: std::ops::Range<usize>,
    address: Option<u64>,
    space: Arc<dyn AddressSpace>,
    /// Pieces that were mapped, in all.
    pub mapped: u64,
}

impl Aperture {
    /// A range of so many bytes, which shows nothing.
    pub fn new(len: u64, space: Arc<dyn AddressSpace>) -> io::Result<Self> {
        let bytes = usize::try_from(len).map_err(io::Error::other)?;
        Ok(Self {
            placed: Vec::new(),
            memory: Range::anonymous(bytes, Access::ReadWrite)?,
            shown: vec![None; bytes / PAGE as usize],
            read_only: 0..0,
            address: None,
            space,
            mapped: 0,
        })
    }

    /// Pages.
    pub fn pages(&self) -> usize {
        self.shown.len()
    }

    /// The guest sees the range at an address from now on, or nowhere.
    pub fn place(&mut self, address: Option<u64>) -> io::Result<()> {
        self.placed.clear();
        self.address = address;
        let Some(address) = address else {
            return Ok(());
        };
        let end = self.shown.len();
        let middle = self.read_only.clone();
        for (pages, read_only) in [
            (0..middle.start, false),
            (middle.clone(), true),
            (middle.end..end, false),
        ] {
            if pages.is_empty() {
                continue;
            }
            let at = pages.start * PAGE as usize;
            let memory = HostMemory {
                address: self.memory.start().wrapping_add(at),
                len: pages.len() as u64 * PAGE,
                read_only,
            };
            let guest = GuestAddress(address + at as u64);
            self.placed.push(self.space.map(memory, PAGE, Some(guest))?);
        }
        Ok(())
    }

    /// The guest's writes to these pages come as exits from now on; reads do not.
    pub fn watch(&mut self, pages: std::ops::Range<usize>) -> io::Result<()> {
        let end = pages.end.min(self.shown.len());
        let pages = pages.start.min(end)..end;
        if pages == self.read_only {
            return Ok(());
        }
        self.read_only = pages;
        self.place(self.address)
    }

    /// The page of VRAM that is shown at an offset.
    pub fn at(&self, offset: u64) -> Option<u32> {
        let page = usize::try_from(offset / PAGE).ok()?;
        self.shown.get(page).copied().flatten()
    }

    /// Shows these pages, of as many as there are; each is within VRAM.
    pub fn show(&mut self, wanted: &[Option<u32>], vram: &Vram) -> io::Result<()> {
        let mut pieces = 0;
        let mut index = 0;
        let count = wanted.len().min(self.shown.len());
        while index < count {
            let first = wanted[index];
            let follows = |step: usize| match (first, wanted[index + step]) {
                (Some(first), Some(page)) => u64::from(page) == u64::from(first) + step as u64,
                (None, None) => true,
                _ => false,
            };
            let mut len = 1;
            while index + len < count && follows(len) {
                len += 1;
            }
            pieces += usize::from(first.is_some());
            let first = first.filter(|_| pieces <= MOST_PIECES);
            self.show_piece(index..index + len, first, vram)?;
            index += len;
        }
        Ok(())
    }

    /// Shows consecutive pages from `first`, or nothing. What is shown already is left as it is.
    fn show_piece(
        &mut self,
        pages: std::ops::Range<usize>,
        first: Option<u32>,
        vram: &Vram,
    ) -> io::Result<()> {
        let wanted = |nth: usize| first.map(|first| first + nth as u32);
        let differs = |nth: &usize| self.shown[pages.start + nth] != wanted(*nth);
        let Some(from) = (0..pages.len()).find(differs) else {
            return Ok(());
        };
        let to = (from..pages.len()).rfind(differs).unwrap_or(from) + 1;
        let at = (pages.start + from) * PAGE as usize;
        let len = (to - from) * PAGE as usize;
        self.mapped += 1;
        match wanted(from) {
            Some(page) => {
                let offset = u64::from(page) * PAGE;
                self.memory
                    .replace_from(at, vram.file(), offset, len, Access::ReadWrite)?;
            }
            None => self.memory.clear(at, len, Access::ReadWrite)?,
        }
        for nth in from..to {
            self.shown[pages.start + nth] = wanted(nth);
        }
        Ok(())
    }
}
