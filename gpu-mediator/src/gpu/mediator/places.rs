//! Places on the GPU: VMs' channels are more than the physical ones. A channel gets a place when
//! something of it is to run, and loses it when another needs one. And memory: whose channels end when
//! a VM has used what it may.

use std::time::Duration;

use gf100::registers::interrupts::{Reason, unit};
use vfio_client::Failure;

use super::{Mediator, REQUEST, Turn, Vm, Wanted, warn};
use crate::gpu::wire::Event;

/// A channel ends, for its space has no memory for tables.
pub fn without_memory(channel: u8) -> Event {
    Event::Fault {
        channel,
        unit: unit::FIFO,
        reason: Reason::NoTable as u8,
        write: false,
        address: 0,
    }
}

/// How willingly a channel's place is given to another: first those that have nothing to do.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Rank {
    Idle,
    /// Its VM has no turn.
    Stopped,
    /// It runs, and completes nothing: maybe it waits for the channel that needs the place.
    Stuck,
}

impl Mediator {
    /// VMs and their channels that the GPU works for now.
    pub fn running(&self) -> impl Iterator<Item = (u32, u8)> {
        self.vms.iter().flat_map(|(id, vm)| {
            let channels = vm.channels.iter().filter(|(_, channel)| channel.runs());
            channels.map(|(number, _)| (*id, *number))
        })
    }

    /// Gives the channels of a turn's VM places and work. Of what is queued only one submission if
    /// `one`.
    pub(super) fn launch(&mut self, turn: &mut Turn, one: bool) -> Result<(), Failure> {
        let Some(vm) = self.vms.get_mut(&turn.vm) else {
            return Ok(());
        };
        if vm.dirty {
            self.gpu.flush()?;
            vm.dirty = false;
        }
        let channels = vm.channels.iter();
        let needy = channels.filter(|(_, channel)| channel.needs_place());
        let mut needy: Vec<_> = needy
            .map(|(number, channel)| (channel.used, *number))
            .collect();
        needy.sort_unstable();
        for (_, number) in needy {
            if !self.place(turn.vm, number)? {
                break;
            }
        }
        let Some(vm) = self.vms.get_mut(&turn.vm) else {
            return Ok(());
        };
        for channel in vm.channels.values_mut() {
            let Some(physical) = channel.physical else {
                continue;
            };
            if channel.frozen && !channel.ended {
                channel.frozen = false;
                let instance = Some(channel.instance);
                self.gpu.channel(physical, instance, true)?;
            }
            while channel.has_queued() && !(one && turn.launched > 0) {
                if let Some(put) = channel.launch(&self.reserve) {
                    self.gpu.doorbell(physical, put)?;
                    self.uses += 1;
                    channel.used = self.uses;
                    turn.launched += 1;
                }
            }
        }
        Ok(())
    }

    /// Gives a channel a place; whether there was one.
    fn place(&mut self, id: u32, number: u8) -> Result<bool, Failure> {
        let Some(vm) = self.vms.get(&id) else {
            return Ok(false);
        };
        let placed = vm.channels.values();
        let placed = placed.filter(|channel| channel.physical.is_some()).count();
        let is_full = placed >= usize::from(vm.most);
        let free = self.owners.iter().position(Option::is_none);
        let at = match free.filter(|_| !is_full) {
            Some(free) => free,
            None => match self.displaceable(id, is_full) {
                Some(at) => at,
                None => return Ok(false),
            },
        };
        // Below 128.
        let physical = at as u8;
        if self.owners[at].is_some() {
            self.gpu.stop(physical)?;
        }
        // Errors are told by this number alone: what is there now is of who had it, or of nobody.
        self.command_errors()?;
        self.displace(at)?;
        let channel = self
            .vms
            .get_mut(&id)
            .and_then(|vm| vm.channels.get_mut(&number));
        let Some(channel) = channel else {
            return Ok(false);
        };
        channel.physical = Some(physical);
        channel.frozen = false;
        channel.held = Duration::ZERO;
        self.uses += 1;
        channel.used = self.uses;
        self.owners[at] = Some((id, number));
        self.gpu.channel(physical, Some(channel.instance), true)?;
        self.write_list()?;
        Ok(true)
    }

    /// Whose place a channel of a VM gets: the one that was used the longest time ago, of those that
    /// need theirs the least. Of its own VM if that may have no more.
    fn displaceable(&self, id: u32, own: bool) -> Option<usize> {
        let owners = self.owners.iter().enumerate();
        let ranked = owners.filter_map(|(at, owner)| {
            let (vm, number) = (*owner)?;
            if own && vm != id {
                return None;
            }
            let channel = self.vms.get(&vm)?.channels.get(&number)?;
            let rank = match (channel.is_flying(), channel.runs()) {
                (false, _) => Rank::Idle,
                (true, false) => Rank::Stopped,
                (true, true) if channel.held > REQUEST => Rank::Stuck,
                (true, true) => return None,
            };
            Some((rank, channel.used, at))
        });
        ranked.min().map(|(_, _, at)| at)
    }

    /// A channel, if there is one, leaves its place, where it was stopped; what engines have of it, its
    /// instance block names.
    fn displace(&mut self, at: usize) -> Result<(), Failure> {
        let Some((id, number)) = self.owners[at].take() else {
            return Ok(());
        };
        // Below 128.
        let physical = at as u8;
        self.gpu.channel(physical, None, false)?;
        let Some(vm) = self.vms.get_mut(&id) else {
            return Ok(());
        };
        vm.figures.displaced += 1;
        if let Some(channel) = vm.channels.get_mut(&number) {
            channel.physical = None;
            channel.frozen = channel.is_flying();
        }
        Ok(())
    }

    /// Ends spaces of a VM until it has all of these pages, or `asker`, for which they are, has ended, or
    /// nothing is left to end.
    pub(super) fn make_room(
        &mut self,
        vm: &mut Vm,
        id: u32,
        asker: Option<u32>,
        wanted: &[Wanted],
    ) -> Result<(), Failure> {
        while !vm.spaces.quota.fits(wanted) {
            let Some(space) = vm.spaces.victim(asker, wanted) else {
                break;
            };
            self.end_space(vm, id, space)?;
            if asker == Some(space) {
                break;
            }
        }
        Ok(())
    }

    /// Ends a space and its channels: it needs more memory than its VM has left.
    pub(super) fn end_space(&mut self, vm: &mut Vm, id: u32, space: u32) -> Result<(), Failure> {
        if matches!(vm.spaces.directory(space), Ok(None) | Err(_)) {
            return Ok(());
        }
        let channels = vm.channels.iter_mut();
        for (number, channel) in channels.filter(|(_, its)| its.slot.space == space) {
            if let Some(physical) = channel.physical.take() {
                self.gpu.stop(physical)?;
                self.gpu.channel(physical, None, false)?;
                self.owners[usize::from(physical)] = None;
            }
            if !channel.ended {
                channel.end();
                vm.figures.ended += 1;
                vm.events.push_back(without_memory(*number));
            }
            channel.detached = true;
        }
        self.write_list()?;
        vm.spaces.end(space);
        // Nothing of it runs any more, and its memory is not used before this.
        self.gpu.flush()?;
        vm.figures.spaces_ended += 1;
        warn!(
            "virtual machine {id} needs more than {} pages for page tables: its space {space} ends",
            vm.spaces.quota.all().1
        );
        Ok(())
    }
}
