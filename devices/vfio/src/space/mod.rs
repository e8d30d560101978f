//! An I/O address space.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, MutexGuard},
};

use base::limits;
use device_model::fair_lock::FairLock;
use vfio_ioctls::VfioDevice;
use virtio::{
    discard,
    iommu::{Access, Endpoint, MapError, Reserved},
    plugged::Blocks,
};
use vm_memory::GuestAddress;

use super::{
    Error,
    host_device::HostDevice,
    reach::Reach,
    reachable::{Piece, Reachable},
    tables::Tables,
};

const BOTH: Access = Access {
    read: true,
    write: true,
};

/// Limits behind a virtual IOMMU: number of pieces, and how many times the guest's total memory may
/// be mapped.
const MAX_PIECES: usize = 1 << 17;
const MAX_TIMES: u64 = 16;

/// Maximum number of pieces that are other devices' memory: when the guest moves that memory, they
/// are unmapped one by one on a vCPU thread.
const MAX_PEER_PIECES: usize = 1024;

/// The mappings of an address space, and the devices in it.
///
/// It maps RAM at its own addresses and, as soon as there are two devices, the memory of the others
/// (identity). Behind a virtual IOMMU, it maps what the guest maps. Memory that the guest loses (a
/// block that it unplugs, a BAR that moves) is unmapped here as well, at whatever address it is
/// mapped.
///
/// Lock order: blocks of memory, an address space, peers.
pub struct Space {
    tables: Box<dyn Tables>,
    reachable: Arc<Reachable>,
    /// Called when there is work for [`Space::map_peers`].
    peers_changed: Arc<dyn Fn() + Send + Sync>,
    /// What the limit of locked memory applies to, and the limit.
    limit: (&'static str, String),
    contents: FairLock<Contents>,
}

#[derive(Default)]
struct Contents {
    /// RAM is mapped at its own addresses.
    identity: bool,
    /// The mappings, by I/O address.
    pieces: BTreeMap<u64, Mapped>,
    /// Total length of all mappings in bytes.
    bytes: u64,
    /// Number of mappings that are other devices' memory.
    peers: usize,
    reach: Reach,
    /// An unreachable peer is logged once: the guest could move its BARs at will.
    warned: bool,
}

/// A mapped piece of memory.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    guest: u64,
    len: u64,
    is_peer: bool,
}

impl Contents {
    fn insert(&mut self, at: u64, piece: Mapped) {
        self.remove(at);
        self.bytes += piece.len;
        self.peers += usize::from(piece.is_peer);
        self.pieces.insert(at, piece);
    }

    fn remove(&mut self, at: u64) {
        if let Some(piece) = self.pieces.remove(&at) {
            self.bytes -= piece.len;
            self.peers -= usize::from(piece.is_peer);
        }
    }

    fn forget_all(&mut self) {
        self.pieces.clear();
        self.bytes = 0;
        self.peers = 0;
    }
}

impl Space {
    /// Creates an empty address space. `limit_of`: what the limit of locked memory applies to, for
    /// messages.
    pub fn new(
        tables: Box<dyn Tables>,
        limit_of: &'static str,
        reachable: Arc<Reachable>,
        peers_changed: Arc<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self {
            tables,
            reachable,
            peers_changed,
            limit: (limit_of, memory_limit()),
            contents: FairLock::default(),
        }
    }

    /// Opens a device, which can reach what is mapped.
    pub fn open_device(&self, host_device: &HostDevice) -> Result<VfioDevice, Error> {
        let blocks = self.reachable.discards().blocks().lock();
        let mut contents = self.lock();
        let device = self.tables.open_device(host_device)?;
        // Known only when there is a device.
        let reach = self.tables.reach().map_err(|source| Error::Host {
            action: "ask the IOMMU what it translates",
            source,
        })?;
        if contents.reach != reach {
            log::info!("devices reach the addresses {reach}");
            contents.reach = reach;
        }
        if contents.identity {
            self.map_ram(&mut contents, &blocks)?;
        }
        Ok(device)
    }

    /// Maps RAM at its own addresses from now on, including RAM that is added later; maps nothing
    /// after an error.
    pub fn begin_identity(&self) -> Result<(), Error> {
        let blocks = self.reachable.discards().blocks().lock();
        let mut contents = self.lock();
        contents.identity = true;
        let mapped = self.map_ram(&mut contents, &blocks);
        if mapped.is_err() {
            // Mappings that could not be removed go away with the address space.
            let _ = self.clear_all(&mut contents);
        }
        drop(contents);
        (self.peers_changed)();
        mapped
    }

    /// Like [`Space::begin_identity`], before there is a device: RAM is mapped when the first one
    /// is opened.
    pub fn with_identity(self) -> Self {
        self.lock().identity = true;
        self
    }

    /// Maps RAM that was added.
    pub fn memory_changed(&self, blocks: &Blocks) -> Result<(), Error> {
        let mut contents = self.lock();
        match contents.identity {
            true => self.map_ram(&mut contents, blocks),
            false => Ok(()),
        }
    }

    /// Maps a block of memory that the guest has plugged.
    pub fn plugged(&self, guest: u64, len: u64) -> Result<(), Error> {
        let mut contents = self.lock();
        let ram = self.reachable.ram();
        let host = vm_memory::GuestMemoryBackend::get_host_address(&*ram, GuestAddress(guest));
        match host {
            Ok(host) if contents.identity => {
                let is_peer = false;
                self.map_own(
                    &mut contents,
                    Piece {
                        guest,
                        len,
                        host,
                        is_peer,
                    },
                )
            }
            _ => Ok(()),
        }
    }

    /// Maps device memory that was offered to other devices since the last call.
    pub fn map_peers(&self) {
        let mut contents = self.lock();
        if !contents.identity {
            return;
        }
        let peers = self.reachable.peers().clone();
        for (guest, memory) in peers {
            let len = memory.len;
            if contents.pieces.contains_key(&guest) {
                continue;
            }
            let mapped = if contents.reach.covers(guest, len) {
                // SAFETY: the device that offered it keeps it mapped until the offer is withdrawn,
                // which unmaps it from the other devices first.
                unsafe { self.tables.map(guest, len, memory.address, BOTH) }
                    .map_err(|error| error.to_string())
            } else {
                Err(format!(
                    "the host's IOMMU translates {} only",
                    contents.reach
                ))
            };
            match mapped {
                Ok(()) => {
                    let is_peer = true;
                    contents.insert(
                        guest,
                        Mapped {
                            guest,
                            len,
                            is_peer,
                        },
                    );
                }
                Err(why) if !contents.warned => {
                    contents.warned = true;
                    log::warn!(
                        "devices cannot reach {len:#x} bytes of another one's memory at \
                         {guest:#x} (peer-to-peer), and have to go through RAM: {why}"
                    );
                }
                Err(_) => {}
            }
        }
    }

    /// Unmaps memory that the guest loses, at whatever address it is mapped.
    pub fn withdraw(&self, guest: u64, len: u64) -> io::Result<()> {
        let mut contents = self.lock();
        let last = guest.saturating_add(len - 1);
        let lost = contents.pieces.iter();
        let lost = lost.filter(|(_, piece)| (guest..=last).contains(&piece.guest));
        let lost: Vec<_> = lost.map(|(at, piece)| (*at, piece.len)).collect();
        self.unmap_all(&mut contents, lost)
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock()
    }

    fn map_ram(&self, contents: &mut Contents, blocks: &Blocks) -> Result<(), Error> {
        let all = self.reachable.all_ram(blocks);
        all.into_iter()
            .try_for_each(|piece| self.map_own(contents, piece))
    }

    /// Maps RAM at its own address, unless it is already mapped.
    fn map_own(&self, contents: &mut Contents, piece: Piece) -> Result<(), Error> {
        let Piece { guest, len, .. } = piece;
        if contents.pieces.contains_key(&guest) {
            return Ok(());
        }
        contents.reach.check(guest, len)?;
        self.map_piece(contents, guest, piece, BOTH)
            .map_err(|source| self.explain(guest, len, source))
    }

    fn map_piece(
        &self,
        contents: &mut Contents,
        at: u64,
        piece: Piece,
        access: Access,
    ) -> io::Result<()> {
        let Piece {
            guest,
            len,
            host,
            is_peer,
        } = piece;
        // SAFETY: guest RAM stays mapped until the VM ends, which is after its devices; memory of a
        // device stays mapped until its offer is withdrawn, which unmaps it here first. Both are
        // accessed only as bytes that may change at any time.
        unsafe { self.tables.map(at, len, host, access) }?;
        contents.insert(
            at,
            Mapped {
                guest,
                len,
                is_peer,
            },
        );
        Ok(())
    }

    /// Unmaps everything that is mapped within `len` bytes at `at`.
    fn unmap_within(&self, contents: &mut Contents, at: u64, len: u64) -> io::Result<()> {
        let last = at.saturating_add(len - 1);
        // Gapless runs: the kernel unmaps each of them with one call.
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (&start, piece) in contents.pieces.range(at..=last) {
            match runs.last_mut() {
                Some((from, len)) if start - *from == *len => *len += piece.len,
                _ => runs.push((start, piece.len)),
            }
        }
        self.unmap_all(contents, runs)
    }

    /// Unmaps runs of whole pieces. Continues after an error, and returns the first one.
    fn unmap_all(&self, contents: &mut Contents, runs: Vec<(u64, u64)>) -> io::Result<()> {
        let runs = runs.into_iter();
        runs.map(|(at, len)| self.unmap_exactly(contents, at, len))
            .fold(Ok(()), io::Result::and)
    }

    /// Unmaps a run of whole pieces.
    fn unmap_exactly(&self, contents: &mut Contents, at: u64, len: u64) -> io::Result<()> {
        self.tables.unmap(at, len)?;
        let last = at.saturating_add(len - 1);
        let starts: Vec<_> = contents
            .pieces
            .range(at..=last)
            .map(|(at, _)| *at)
            .collect();
        for start in starts {
            contents.remove(start);
        }
        Ok(())
    }

    /// Removes all mappings: with one call if the kernel can, or else run by run.
    fn clear_all(&self, contents: &mut Contents) -> io::Result<()> {
        contents.identity = false;
        if contents.pieces.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.tables.clear() {
            log::debug!("the kernel does not unmap everything at once: {error}");
            return self.unmap_within(contents, 0, u64::MAX);
        }
        contents.forget_all();
        Ok(())
    }

    /// Explains why the kernel does not map memory.
    fn explain(&self, guest: u64, len: u64, source: io::Error) -> Error {
        let (of, limit) = &self.limit;
        match source.raw_os_error() {
            Some(libc::ENOMEM) => Error::MemoryLimit {
                guest,
                len,
                of,
                limit: limit.clone(),
            },
            Some(libc::ENOSPC) => Error::TooManyMappings { guest, len },
            _ => Error::MapRam { guest, len, source },
        }
    }
}

/// The address space of a device behind a virtual IOMMU.
impl Endpoint for Space {
    fn reserved(&self) -> Vec<Reserved> {
        self.lock().reach.reserved()
    }

    fn page_size(&self) -> u64 {
        self.lock().reach.page()
    }

    fn map(&self, iova: u64, guest: u64, len: u64, access: Access) -> Result<(), MapError> {
        let blocks = self.reachable.discards().blocks().lock();
        let mut contents = self.lock();
        if !contents.reach.covers(iova, len) {
            return Err(MapError::OutOfRange { iova, len });
        }
        let pieces = self.reachable.pieces(&blocks, guest, len);
        let pieces = pieces.map_err(|guest| MapError::NotMemory { guest })?;
        self.check_room(&contents, &pieces, len)?;
        let mut at = iova;
        for piece in pieces {
            let mapped = self
                .populate(piece, access)
                .and_then(|()| self.map_piece(&mut contents, at, piece, access));
            if let Err(source) = mapped {
                if at > iova {
                    let undone = self.unmap_within(&mut contents, iova, at - iova);
                    undone.map_err(MapError::Stuck)?;
                }
                return Err(self.explain(piece.guest, piece.len, source).into());
            }
            // Wraps around only after the last piece.
            at = at.wrapping_add(piece.len);
        }
        Ok(())
    }

    fn unmap(&self, iova: u64, len: u64) -> io::Result<()> {
        self.unmap_within(&mut self.lock(), iova, len)
    }

    fn clear(&self) -> io::Result<()> {
        self.clear_all(&mut self.lock())
    }

    fn identity(&self, on: bool) -> Result<(), MapError> {
        if on {
            return Ok(self.begin_identity()?);
        }
        self.clear_all(&mut self.lock()).map_err(MapError::Host)
    }
}

impl Space {
    /// Checks the limits of what the guest may map. The kernel counts locked pages, but not how
    /// often they are mapped: a guest could make it allocate page tables without bound.
    fn check_room(&self, contents: &Contents, new: &[Piece], len: u64) -> Result<(), MapError> {
        let ram = self.reachable.ram();
        let ram: u64 = vm_memory::GuestMemoryBackend::iter(&*ram)
            .map(vm_memory::GuestMemoryRegion::len)
            .sum();
        let peers: u64 = self.reachable.peers().values().map(|peer| peer.len).sum();
        let most = ram.saturating_add(peers).saturating_mul(MAX_TIMES);
        let refused = |what: String| Err(MapError::NoMemory(what));
        if contents.bytes.saturating_add(len) > most {
            return refused(format!(
                "all that the guest maps for the device is more than {MAX_TIMES} times its memory"
            ));
        }
        let new_peers = new.iter().filter(|piece| piece.is_peer).count();
        if new_peers > 0 && contents.peers + new_peers > MAX_PEER_PIECES {
            return refused(format!(
                "what the guest maps of other devices' memory for the device has more than \
                 {MAX_PEER_PIECES} pieces"
            ));
        }
        if contents.pieces.len() + new.len() > MAX_PIECES {
            return refused(format!(
                "what the guest maps for the device has more than {MAX_PIECES} pieces"
            ));
        }
        Ok(())
    }

    /// Populates memory before it is mapped read-only: for a page that was never written, the
    /// kernel (before Linux 6.2) would let the device read a zero page forever, while the guest's
    /// next write goes to another page.
    fn populate(&self, piece: Piece, access: Access) -> io::Result<()> {
        if access.write {
            return Ok(());
        }
        // Parts that are not RAM are skipped.
        discard::populate(&self.reachable.ram(), GuestAddress(piece.guest), piece.len)
    }
}

impl From<Error> for MapError {
    fn from(error: Error) -> Self {
        match error {
            Error::MapRam { source, .. } => Self::Host(source),
            Error::BeyondWidth { guest, len, .. } | Error::Reserved { guest, len, .. } => {
                Self::OutOfRange { iova: guest, len }
            }
            other => Self::NoMemory(other.to_string()),
        }
    }
}

/// The limit of memory that this process may lock, as text.
fn memory_limit() -> String {
    match limits::locked_memory() {
        Ok(None) => "not set".to_owned(),
        Ok(Some(limit)) => limit.to_string(),
        Err(_) => "unknown".to_owned(),
    }
}
