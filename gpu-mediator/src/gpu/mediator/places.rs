//! Assigns places on the GPU: VMs have more channels than there are physical ones. A channel gets a place when
//! something of it is to run, and loses it when another one needs a place. This module also handles memory: which
//! channels end when a VM has used up its quota.

use std::time::Duration;

use gf100::registers::interrupts::{Reason, unit};

use super::{Mediator, REQUEST, Turn, Vm, Wanted, warn};
use crate::gpu::{physical::Failure, wire::Event};

/// The event of a channel that ends because its space has no memory for page tables.
pub fn without_memory(channel: u8) -> Event {
    Event::Fault {
        channel,
        unit: unit::FIFO,
        reason: Reason::NoTable as u8,
        write: false,
        address: 0,
    }
}

/// Order in which channels lose their places, starting with those that have nothing to do.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Rank {
    Idle,
    /// Its VM does not have the turn.
    Stopped,
    /// It runs but completes nothing: it may be waiting for the channel that needs the place.
    Stuck,
}

impl Mediator {
    /// The VMs and channels that the GPU works for now.
    pub fn running(&self) -> impl Iterator<Item = (u32, u8)> {
        self.vms.iter().flat_map(|(id, vm)| {
            let channels = vm.channels.iter().filter(|(_, channel)| channel.runs());
            channels.map(|(number, _)| (*id, *number))
        })
    }

    /// Gives places and work to the channels of the turn's VM. With `one`, only one queued submission is started.
    pub(super) fn launch(&mut self, turn: &mut Turn, one: bool) -> Result<(), Failure> {
        let Some(vm) = self.vms.get_mut(&turn.vm) else {
            return Ok(());
        };
        vm.flush(&mut self.gpu)?;
        let channels = vm.channels.iter();
        let needy = channels.filter(|(_, channel)| channel.needs_place());
        let mut needy: Vec<_> = needy
            .map(|(number, channel)| (channel.used, *number))
            .collect();
        needy.sort_unstable();
        let mut placed = false;
        for (_, number) in needy {
            if !self.place(turn.vm, number)? {
                break;
            }
            placed = true;
        }
        if placed {
            self.write_list()?;
        }
        let Some(vm) = self.vms.get_mut(&turn.vm) else {
            return Ok(());
        };
        for channel in vm.channels.values_mut() {
            let Some(physical) = channel.physical.filter(|_| !channel.stopped) else {
                continue;
            };
            if self.gpu.is_leaving(physical) {
                continue;
            }
            if channel.frozen && channel.has_work() {
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

    /// Gives a channel a place. Returns whether there was one. The run list must be written then.
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
        // Less than 128.
        let physical = at as u8;
        if let Some((vm, number)) = self.owners[at] {
            self.freeze(vm, number)?;
            self.gpu.leaving()?;
            if self.gpu.is_leaving(physical) {
                // It gets the place when a command of this one is over.
                return Ok(false);
            }
        }
        // Command errors only identify this number, so those present now belong to the previous owner, or to nobody.
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
        Ok(true)
    }

    /// Chooses the place that a channel of a VM gets: among the places whose channels need them the least, the one that
    /// was used the longest time ago. With `own`, only places of the VM itself, since it may not have any more.
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

    /// Removes the channel, if there is one, from its place, where it has been stopped. Its instance block identifies
    /// what the engines keep of it.
    fn displace(&mut self, at: usize) -> Result<(), Failure> {
        let Some((id, number)) = self.owners[at].take() else {
            return Ok(());
        };
        // Less than 128.
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

    /// Ends spaces of a VM until it can allocate all of these pages, or until `asker`, which needs them, has ended, or
    /// nothing is left to end.
    pub(super) fn make_room(
        &mut self,
        vm: &mut Vm,
        id: u32,
        asker: Option<u32>,
        wanted: &[Wanted],
    ) -> Result<(), Failure> {
        if !vm.spaces.quota.fits(wanted) {
            // Pages that were freed may be enough.
            vm.flush(&mut self.gpu)?;
        }
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

    /// Ends a space and its channels, because it needs more memory than its VM has left.
    pub(super) fn end_space(&mut self, vm: &mut Vm, id: u32, space: u32) -> Result<(), Failure> {
        if matches!(vm.spaces.directory(space), Ok(None) | Err(_)) {
            return Ok(());
        }
        let channels = vm.channels.iter();
        let channels = channels.filter(|(_, its)| its.slot.space == space);
        let channels: Vec<_> = channels.map(|(number, _)| *number).collect();
        for number in channels {
            self.stop(vm, number)?;
            let Some(channel) = vm.channels.get_mut(&number) else {
                continue;
            };
            if let Some(physical) = channel.physical.take() {
                self.gpu.channel(physical, None, false)?;
                self.owners[usize::from(physical)] = None;
            }
            if !channel.ended {
                channel.end();
                vm.figures.ended += 1;
                vm.events.push_back(without_memory(number));
            }
            channel.detached = true;
        }
        self.write_list()?;
        vm.spaces.end(space);
        // Nothing of it runs any more. Its memory is not reused before this.
        vm.flush(&mut self.gpu)?;
        vm.figures.spaces_ended += 1;
        warn!(
            "virtual machine {id} needs more than {} pages for page tables: its space {space} ends",
            vm.spaces.quota.all().1
        );
        Ok(())
    }
}
