//! Device memory.

use std::{ptr::null_mut, sync::Arc};

use cuda_definition::driver::types::{CUmemoryPool, CUpointer_attribute, CUstream};
use remoting_proto::apis::cuda::{
    Kind,
    calls::{Allocate, AllocatePitch, Free, Pin, Source},
    codes,
};
use remoting_session::quota::Charge;

use super::{
    Server,
    cover::{Extent, Orphans, Pinned},
    driver::{cu, outcome},
    memory::Stretch,
    nodes::MOST,
};

impl Server {
    /// Looks up a stream for an allocation or free in stream order. Also returns the graph into
    /// which the stream is being captured, if any: the graph then allocates or frees with each
    /// launch.
    fn ordered(&mut self, stream: u32) -> Result<(CUstream, Option<u32>), i32> {
        let stream = self.backend.objects.raw(Kind::Stream, stream)?;
        if !self.is_captured(stream) {
            let context = self.backend.api.current();
            self.backend.backlog.submits(context, stream);
            return Ok((stream as CUstream, None));
        }
        self.backend.objects.check_room()?;
        let graph = self.captured_to(stream)?;
        let objects = &mut self.backend.objects;
        match objects.number(Kind::Graph, graph, 0, 0) {
            0 => Err(codes::INVALID_VALUE),
            // The body graph of a conditional node cannot allocate.
            graph if objects.get(Kind::Graph, graph)?.owner != 0 => Err(codes::NOT_SUPPORTED),
            graph => Ok((stream as CUstream, Some(graph))),
        }
    }

    pub(super) fn allocate(&mut self, call: &Allocate) -> Result<u64, i32> {
        if self.enter(call.context)? == 0 {
            return Err(codes::INVALID_CONTEXT);
        }
        let charge = self.charge(call.size)?;
        let (mut at, size) = (0, call.size as usize);
        let (stream, graph) = match call.source {
            Source::Device() => (null_mut(), None),
            Source::Stream(stream) | Source::Pool(stream, _) => self.ordered(stream)?,
        };
        if graph.is_some() && self.backend.memory.count() >= MOST {
            return Err(codes::OUT_OF_MEMORY);
        }
        let objects = &self.backend.objects;
        let api = &self.backend.api;
        outcome(match call.source {
            Source::Device() => cu!(api, cuMemAlloc_v2(&raw mut at, size)),
            Source::Stream(_) => cu!(api, cuMemAllocAsync(&raw mut at, size, stream)),
            Source::Pool(_, pool) => {
                let pool = objects.get(Kind::Pool, pool)?.raw as CUmemoryPool;
                cu!(
                    api,
                    cuMemAllocFromPoolAsync(&raw mut at, size, pool, stream)
                )
            }
        })?;
        if let Some(graph) = graph {
            // This charge only checked the quota: each executable graph is charged by itself.
            let memory = &mut self.backend.memory;
            memory.insert_of_graph(at, call.size, call.context, graph);
            return Ok(at);
        }
        // Memory from a pool outlives contexts.
        let context = match call.source {
            Source::Device() => call.context,
            Source::Stream(_) | Source::Pool(..) => 0,
        };
        self.keep(at, call.size, context, charge);
        Ok(at)
    }

    fn keep(&mut self, at: u64, size: u64, context: u32, charge: Arc<Charge>) {
        let stretch = Stretch {
            size,
            context,
            owner: 0,
            freed: true,
            of_graph: false,
            graphs: Vec::new(),
            charge: Some(charge),
        };
        self.backend.memory.insert(at, stretch);
    }

    pub(super) fn allocate_pitch(&mut self, call: &AllocatePitch) -> Result<(u64, u64), i32> {
        if self.enter(call.context)? == 0 {
            return Err(codes::INVALID_CONTEXT);
        }
        // The driver's pitch is known only afterwards. No driver aligns rows to more than this.
        const PITCH: u64 = 4096;
        let most = call.width.checked_next_multiple_of(PITCH);
        let size = most.and_then(|most| most.checked_mul(call.height));
        let charge = self.charge(size.ok_or(codes::OUT_OF_MEMORY)?)?;
        let (mut at, mut pitch) = (0, 0);
        outcome(cu!(
            self.backend.api,
            cuMemAllocPitch_v2(
                &raw mut at,
                &raw mut pitch,
                call.width as usize,
                call.height as usize,
                call.element,
            )
        ))?;
        let size = (pitch as u64).saturating_mul(call.height);
        // Returns the part of the charge that the actual pitch does not need.
        let charge = self.quota.charge(size).map_or(charge, Arc::new);
        self.keep(at, size, call.context, charge);
        Ok((at, pitch as u64))
    }

    pub(super) fn free(&mut self, call: &Free) -> Result<(), i32> {
        if self.enter(call.context)? == 0 {
            return Err(codes::INVALID_CONTEXT);
        }
        let stretch = self.backend.memory.get(call.address);
        let stretch = stretch.filter(|stretch| stretch.freed);
        let stretch = stretch.ok_or(codes::INVALID_VALUE)?;
        let (is_kept, is_of_graph) = (stretch.is_kept(), stretch.of_graph);
        match call.stream {
            None => outcome(cu!(self.backend.api, cuMemFree_v2(call.address)))?,
            Some(stream) => {
                let (stream, graph) = self.ordered(stream)?;
                if graph.is_some() && !is_of_graph {
                    return Err(codes::INVALID_VALUE);
                }
                outcome(cu!(self.backend.api, cuMemFreeAsync(call.address, stream)))?;
                if let Some(graph) = graph {
                    let memory = &mut self.backend.memory;
                    memory.freed_by_graph(call.address, graph);
                    return Ok(());
                }
            }
        }
        let charge = self.backend.memory.freed(call.address);
        if let Some(charge) = charge.filter(|_| is_kept) {
            self.charge_until_done(call.context, call.stream, charge);
        }
        Ok(())
    }

    pub(super) fn memory_info(&mut self, context: u32) -> Result<(u64, u64), i32> {
        self.enter(context)?;
        self.return_charges();
        let (mut free, mut all) = (0, 0);
        outcome(cu!(
            self.backend.api,
            cuMemGetInfo_v2(&raw mut free, &raw mut all)
        ))?;
        let all = (all as u64).min(self.quota.limit());
        Ok(((free as u64).min(self.quota.left()).min(all), all))
    }

    /// The client's ordinal of the device that an address of its memory belongs to.
    pub(super) fn pointer_device(&mut self, address: u64) -> Result<i32, i32> {
        if !self.is_clients(address, 1) {
            return Err(codes::INVALID_VALUE);
        }
        let mut device = 0i32;
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        outcome(cu!(
            self.backend.api,
            cuPointerGetAttribute((&raw mut device).cast(), attribute, address)
        ))?;
        self.ordinal(device)
    }

    /// Registers a range of the window with the driver and returns its device address.
    pub(super) fn pin(&mut self, call: &Pin) -> Result<u64, i32> {
        if self.enter(call.context)? == 0 {
            return Err(codes::INVALID_CONTEXT);
        }
        let at = self.window.at(call.offset, call.length);
        let at = at.ok_or(codes::INVALID_VALUE)?;
        let backend = &mut self.session.backend;
        let stretch = (call.offset, call.length);
        // A range that is already registered in several parts cannot become a single part.
        if call.whole
            && backend
                .cover
                .splits(&self.session.window, call.offset, call.length)
        {
            return Err(codes::NOT_SUPPORTED);
        }
        backend.cover.reach(
            &backend.api,
            &self.session.window,
            call.context,
            stretch,
            Extent::Exact,
        )?;
        let mut device = 0;
        outcome(cu!(
            backend.api,
            cuMemHostGetDevicePointer_v2(&raw mut device, at.cast(), 0)
        ))?;
        let pinned = Pinned {
            range: stretch,
            context: call.context,
            device,
        };
        backend.cover.pin(&self.session.window, pinned)?;
        Ok(device)
    }

    /// Registers pinned memory of other contexts again, and places of their graphs, as the context has ended in which they were
    /// registered. None of their work that may use it is under way, but what was submitted while that context's end waited.
    pub(super) fn hand_over(&mut self, orphans: Orphans) {
        let before = self.backend.api.current();
        for (context, range) in orphans.places {
            let registered = self.enter(context).and_then(|_| {
                let (backend, window) = (&mut self.session.backend, &self.session.window);
                let reached =
                    (backend.cover).reach(&backend.api, window, context, range, Extent::Exact);
                // Another context with places there may have come first.
                backend.cover.place(window, context, range);
                let registrars = backend.cover.registrars(window, range.0, range.1);
                let others = registrars.filter(|one| *one != context).collect();
                backend.passages.in_graphs(others);
                reached
            });
            if let Err(code) = registered {
                base::note!(
                    "gantry-accel: graphs of an application have lost memory, as the driver does not register it again \
                     (code {code}): a context was destroyed in which it was registered"
                );
            }
        }
        for pinned in orphans.pins {
            let (offset, length) = pinned.range;
            let call = Pin {
                context: pinned.context,
                offset,
                length,
                whole: false,
            };
            match self.pin(&call) {
                Ok(device) if device == pinned.device => {}
                other => base::note!(
                    "gantry-accel: {length} bytes of an application's pinned memory are lost to the device, as the driver \
                     does not register them again (code {}): a context was destroyed in which they were registered",
                    other.err().unwrap_or(0)
                ),
            }
        }
        self.backend.api.enter(before);
    }
}
