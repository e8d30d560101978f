//! Work that passes through parts of the window that another context has registered.
//!
//! A registration ends with its context. The context of a client therefore ends only after such work of its other contexts.
//! Each has a fence, which is recorded directly behind it: one that is recorded later might stand behind work that never
//! ends, or have other work wait for it.

use std::collections::HashMap;

use remoting_session::backend::Fences;

use super::{Server, driver::Api, fences::Fence};

/// Where work is submitted: the driver's context, and its handle of the stream.
type Place = (usize, usize);

/// How work uses what a context has registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Use {
    /// It passes through it.
    Passes,
    /// It may access pinned memory there.
    MayAccess,
}

/// What is used: by the context that has registered it.
type Used = (u32, Use);

/// The last such work of each stream.
#[derive(Debug, Default)]
pub(super) struct Passages {
    /// By stream.
    streams: HashMap<(Place, Used), Fence>,
    /// The same of streams that have been destroyed, whose handles others may get.
    left: Vec<(Used, Fence)>,
    /// The contexts through whose registrations the current request passes.
    now: Vec<u32>,
    /// The ranges of the window that are registered there, with the context of the request.
    ranges: Vec<(u32, (u64, u64))>,
    /// Those of the request that was taken last.
    taken: Vec<(u32, (u64, u64))>,
    /// The contexts through whose registrations nodes of graphs pass.
    in_graphs: Vec<u32>,
}

impl Passages {
    /// Records that the current request passes through a registration of this context.
    pub(super) fn passes(&mut self, registrar: u32) {
        if !self.now.contains(&registrar) {
            self.now.push(registrar);
        }
    }

    /// Through whose registrations the current request passes, which this forgets.
    pub(super) fn take(&mut self) -> Vec<u32> {
        self.taken = std::mem::take(&mut self.ranges);
        std::mem::take(&mut self.now)
    }

    /// Records that a node of some graph passes through registrations of these contexts.
    pub(super) fn in_graphs(&mut self, registrars: Vec<u32>) {
        for registrar in registrars {
            if !self.in_graphs.contains(&registrar) {
                self.in_graphs.push(registrar);
            }
        }
    }

    /// Records that the current request launches a graph in a context: it may have any of the nodes.
    pub(super) fn launches(&mut self, context: u32) {
        let others = self.in_graphs.iter().filter(|one| **one != context);
        self.now = others.copied().collect();
    }

    /// Records work behind which this fence has been recorded, references to which this adds.
    pub(super) fn add(
        &mut self,
        api: &Api,
        place: Place,
        (registrars, how): (&[u32], Use),
        fence: Fence,
    ) {
        for registrar in registrars {
            api.retain(fence);
            let used = (*registrar, how);
            if let Some(before) = self.streams.insert((place, used), fence) {
                api.release(before);
            }
        }
    }

    /// Keeps what is left of a stream that is destroyed.
    pub(super) fn leave_stream(&mut self, api: &Api, stream: usize) {
        let left = self.streams.extract_if(|((_, one), _), _| *one == stream);
        let left = left.map(|((_, used), fence)| (used, fence));
        self.left.extend(left);
        for (_, fence) in self
            .left
            .extract_if(.., |(_, fence)| api.poll(*fence).is_over())
        {
            api.release(fence);
        }
    }

    /// Forgets a context that has ended, and its work: the client's number, and the driver's handle.
    pub(super) fn forget_context(&mut self, api: &Api, id: u32, raw: usize) {
        let is_gone = |((context, _), (registrar, _)): &(Place, Used), _: &mut Fence| {
            *context == raw || *registrar == id
        };
        let streams = self.streams.extract_if(is_gone).map(|(_, fence)| fence);
        let left = self
            .left
            .extract_if(.., |((registrar, _), _)| *registrar == id);
        self.in_graphs.retain(|registrar| *registrar != id);
        let gone = streams.chain(left.map(|(_, fence)| fence));
        gone.for_each(|fence| api.release(fence));
    }

    /// The work that is not over and uses registrations of a context so; a reference to each fence is added. May change the
    /// current context.
    pub(super) fn through(&self, api: &Api, registrar: u32, how: &[Use]) -> Vec<Fence> {
        let streams = self.streams.iter();
        let streams = streams.map(|((_, used), fence)| (*used, *fence));
        let all = streams.chain(self.left.iter().copied());
        let own = all.filter(|((one, used), _)| *one == registrar && how.contains(used));
        let own = own.map(|(_, fence)| fence);
        let under_way: Vec<_> = own.filter(|fence| !api.poll(*fence).is_over()).collect();
        under_way.iter().for_each(|fence| api.retain(*fence));
        under_way
    }
}

impl Server {
    /// Records that the current request passes through a range of the window, for which the cover has been asked.
    pub(super) fn passes_through(&mut self, context: u32, (offset, length): (u64, u64)) {
        let backend = &mut self.session.backend;
        let registrars = backend
            .cover
            .registrars(&self.session.window, offset, length);
        let mut is_foreign = false;
        for registrar in registrars.filter(|one| *one != context) {
            is_foreign = true;
            backend.passages.passes(registrar);
        }
        if is_foreign {
            backend.passages.ranges.push((context, (offset, length)));
        }
    }

    /// Records that what [`Passages::take`] has taken is of nodes of graphs. A graph uses its places at each launch, so they
    /// are handed over like pinned memory when a context ends in which they were registered.
    pub(super) fn passes_in_graphs(&mut self, registrars: Vec<u32>) {
        let taken = std::mem::take(&mut self.backend.passages.taken);
        self.backend.passages.in_graphs(registrars);
        let session = &mut self.session;
        for (context, range) in taken {
            let cover = &mut session.backend.cover;
            cover.place(&session.window, context, range);
        }
    }

    /// Records a fence behind the current request, if it passes through registrations of other contexts.
    pub(super) fn note_passage(&mut self, place: Place) {
        let registrars = self.backend.passages.take();
        if registrars.is_empty() {
            return;
        }
        if self.is_captured(place.1) {
            return self.passes_in_graphs(registrars);
        }
        let backend = &mut self.backend;
        if let Ok(fence) = backend.api.fence(place.0, place.1) {
            backend
                .passages
                .add(&backend.api, place, (&registrars, Use::Passes), fence);
            backend.api.release(fence);
        }
    }

    /// Records a fence behind work that may access pinned memory in parts of other contexts, if there is any.
    pub(super) fn note_access(&mut self, context: u32, place: Place) {
        let lenders: Vec<u32> = self.backend.cover.lenders(context).collect();
        if lenders.is_empty() || self.is_captured(place.1) {
            return;
        }
        let backend = &mut self.session.backend;
        if let Ok(fence) = backend.api.fence(place.0, place.1) {
            let used = (&lenders[..], Use::MayAccess);
            backend.passages.add(&backend.api, place, used, fence);
            backend.api.release(fence);
        }
    }
}
