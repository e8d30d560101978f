//! Reports the status of the arbiter.

use std::sync::atomic::Ordering;

use super::{Arbiter, Vm, Worker};
use crate::{
    Moment,
    policy::Delay,
    status::{self, Status},
};

impl Arbiter {
    /// Sends the status to one reader.
    pub(super) fn show(&mut self) {
        self.review_now();
        if let Some(stream) = self.accept_at(|arbiter| &arbiter.readers) {
            // A reader that has disconnected does not need it.
            let _ = self.status(Moment::now()).send(&stream);
        }
    }

    /// The longest delay of a client in the last two windows by one that is still here.
    fn longest_delay(&self, vm: &Vm) -> Option<status::Delay> {
        let is_here = |delay: &&Delay| self.vms.contains_key(&delay.by);
        let delays = vm.delays.iter().flatten().filter(is_here);
        let longest = delays.max_by_key(|delay| delay.time)?;
        Some(status::Delay {
            by: self.vms.get(&longest.by)?.name.clone(),
            nanos: u64::try_from(longest.time.as_nanos()).unwrap_or(u64::MAX),
        })
    }

    pub(super) fn status(&mut self, now: Moment) -> Status {
        let clients = self.vms.iter().map(|(&id, vm)| {
            let figures = self.scheduler.figures(id, now).unwrap_or_default();
            let workers = || self.members.values().filter(|member| member.vm == id);
            let sum = |value: fn(&Worker) -> u64| -> u64 {
                let values = workers().map(|member| value(&member.worker));
                values.fold(0, u64::saturating_add)
            };
            // For the holder, this includes what it has used in the current turn; no more than it will be charged for.
            let holds = self.scheduler.holder() == Some(id);
            let running = self
                .turn
                .and_then(|turn| self.members.get(&turn.member).filter(|_| holds))
                .map_or(0, |member| {
                    let busy = member.worker.account().busy.load(Ordering::Relaxed);
                    let held = self.scheduler.held(now).as_nanos();
                    let held = u64::try_from(held).unwrap_or(u64::MAX);
                    busy.saturating_sub(member.busy).min(held)
                });
            status::Client {
                name: vm.name.clone(),
                weight: vm.terms.number(),
                latency: vm.terms.latency(),
                workers: vm.workers,
                device_time: ((figures.device_time + vm.sliced).as_nanos() as u64)
                    .saturating_add(running),
                queueing_time: (figures.queueing_time + vm.delayed).as_nanos() as u64,
                turns: figures.turns,
                calls: vm
                    .calls
                    .saturating_add(sum(|worker| worker.account().calls.load(Ordering::Relaxed))),
                synchronous_calls: vm.synchronous_calls.saturating_add(sum(|worker| {
                    worker.account().synchronous.load(Ordering::Relaxed)
                })),
                memory: sum(|worker| worker.account().memory.load(Ordering::Relaxed)),
                killed: vm.killed,
                waits: vm
                    .tails
                    .recent(workers().map(|member| member.worker.account().waits.read())),
                delay: self.longest_delay(vm),
                holds,
                beside: self.is_beside(id),
            }
        });
        let mut clients: Vec<_> = clients.collect();
        // Workers write their accounts themselves. Who takes what was shown for a counter must not see it fall.
        for (client, vm) in clients.iter_mut().zip(self.vms.values_mut()) {
            let figures = [
                &mut client.device_time,
                &mut client.calls,
                &mut client.synchronous_calls,
            ];
            for (figure, shown) in figures.into_iter().zip(&mut vm.shown) {
                *shown = (*shown).max(*figure);
                *figure = *shown;
            }
        }
        Status {
            policy: self.policy.to_string(),
            uptime: now.since(self.started).as_nanos() as u64,
            clients,
        }
    }
}
