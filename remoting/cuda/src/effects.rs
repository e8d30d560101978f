//! How the success of a forwarded call changes the client's state.

use std::sync::Arc;

use remoting_proto::apis::cuda::{Kind, plan::Argument};
use remoting_session::quota::Charge;

use super::{
    Server,
    cover::Extent,
    forwarding::{
        ARRAY_CREATE, ARRAY_CREATE_3D, ARRAY_DESTROY, BEGIN_CAPTURE, BEGIN_CAPTURE_TO,
        CONDITIONAL_CREATE, CREATE, DESTROY, END_CAPTURE, EVENT_DESTROY, EXECUTABLE_DESTROY,
        GRAPH_DESTROY, INSTANTIATE, LIBRARY_GLOBAL, LIBRARY_MANAGED, LIBRARY_UNLOAD, MAP,
        MEMORY_CREATE, MEMORY_RELEASE, MEMORY_RETAIN, MIPMAP_CREATE, MIPMAP_DESTROY, MODULE_GLOBAL,
        MODULE_UNLOAD, NODE_DESTROY, POOL_DESTROY, RELEASE, RESET, RETAIN, SET_LIMIT,
        STREAM_DESTROY, SURFACE_CREATE, SURFACE_DESTROY, TEXTURE_CREATE, TEXTURE_DESTROY, UNMAP,
        word,
    },
    instances::Cost,
    memory::Stretch,
    textures::Texture,
};

/// A call that the driver has executed.
pub(super) struct Call<'a> {
    pub(super) function: u16,
    /// The client's arguments, with the handles that the driver has written replaced by object
    /// numbers.
    pub(super) arguments: &'a [Argument],
    /// The parameters that the driver was given.
    pub(super) words: &'a [u64],
    pub(super) context: u32,
    /// The charge for the call.
    pub(super) charge: Option<Arc<Charge>>,
    /// What libraries cost in a context that the call has made.
    pub(super) made: Cost,
}

impl Call<'_> {
    fn number(&self, place: usize) -> u64 {
        word(self.arguments, place)
    }

    fn object(&self, place: usize) -> u32 {
        self.number(place) as u32
    }

    /// The handle that is the first parameter.
    fn handle(&self) -> usize {
        self.words.first().map_or(0, |word| *word as usize)
    }

    /// The device that is the last parameter.
    fn device(&self) -> i32 {
        self.words.last().map_or(0, |word| *word as i32)
    }
}

impl Server {
    /// Updates the state after a call.
    pub(super) fn after(&mut self, call: Call<'_>) {
        match call.function {
            RETAIN | RELEASE | RESET | CREATE | DESTROY => self.after_context(call),
            INSTANTIATE | CONDITIONAL_CREATE | GRAPH_DESTROY | NODE_DESTROY
            | EXECUTABLE_DESTROY | BEGIN_CAPTURE | BEGIN_CAPTURE_TO | END_CAPTURE => {
                self.after_graph(call)
            }
            MODULE_GLOBAL | LIBRARY_GLOBAL | LIBRARY_MANAGED | MEMORY_CREATE | MEMORY_RETAIN
            | MEMORY_RELEASE | MAP | UNMAP => self.after_memory(call),
            SET_LIMIT => self.limit_set(call),
            _ => self.after_object(call),
        }
    }

    /// Updates the state after a call on a context.
    fn after_context(&mut self, mut call: Call<'_>) {
        match call.function {
            RETAIN => {
                *self.backend.primary.entry(call.device()).or_default() += 1;
                if let Ok(context) = self.backend.objects.get_mut(Kind::Context, call.object(0)) {
                    (context.device, context.references) = (call.device(), 0);
                }
                self.context_created(call.object(0), std::mem::take(&mut call.made));
                self.cover_start(call.object(0));
            }
            RELEASE | RESET => {
                let count = self.backend.primary.entry(call.device()).or_default();
                *count = if call.function == RESET {
                    0
                } else {
                    count.saturating_sub(1)
                };
                if *count == 0
                    && let Some((id, _)) = self.primary(call.device())
                {
                    self.forget_context(id);
                }
            }
            CREATE => {
                self.backend.api.look();
                if let Ok(context) = self.backend.objects.get_mut(Kind::Context, call.object(0)) {
                    context.device = call.device();
                }
                self.context_created(call.object(0), std::mem::take(&mut call.made));
                self.cover_start(call.object(0));
            }
            DESTROY => self.forget_context(call.object(0)),
            _ => {}
        }
    }

    /// Updates the state after a call on a graph or a capture.
    fn after_graph(&mut self, call: Call<'_>) {
        match call.function {
            INSTANTIATE => {
                self.backend
                    .memory
                    .instantiated(call.object(1), call.object(0));
                self.costs(Kind::Executable, call.object(0), call.charge);
            }
            CONDITIONAL_CREATE => {
                self.backend
                    .conditionals
                    .insert(call.number(0), call.object(1));
            }
            // For a node this does nothing to memory: only graphs allocate.
            GRAPH_DESTROY | NODE_DESTROY => self.forget_graph(call.object(0)),
            EXECUTABLE_DESTROY => {
                self.backend.memory.forget_graph(call.object(0));
                let gone = self.backend.objects.remove(call.object(0));
                // Its launches share this charge for as long as they run.
                if let Some(charge) = gone.and_then(|gone| gone.charge) {
                    self.charge_until_done(0, None, charge);
                }
            }
            BEGIN_CAPTURE | BEGIN_CAPTURE_TO => {
                self.capture_begun(call.handle(), call.function == BEGIN_CAPTURE_TO);
            }
            END_CAPTURE => self.capture_ended(call.handle()),
            _ => {}
        }
    }

    /// Updates the state after a memory call.
    fn after_memory(&mut self, call: Call<'_>) {
        match call.function {
            MODULE_GLOBAL | LIBRARY_GLOBAL | LIBRARY_MANAGED => {
                let stretch = Stretch {
                    size: call.number(1),
                    context: call.context,
                    owner: call.object(2),
                    freed: false,
                    of_graph: false,
                    graphs: Vec::new(),
                    charge: None,
                };
                // A client that does not ask for both learns nothing that it could use.
                if call.number(0) != 0 && stretch.size != 0 {
                    self.backend.memory.insert(call.number(0), stretch);
                }
            }
            MEMORY_CREATE => self.costs(Kind::Physical, call.object(0), call.charge),
            MEMORY_RETAIN => {
                let charge = self.backend.memory.charge_at(call.number(1));
                if let Ok(memory) = self.backend.objects.get_mut(Kind::Physical, call.object(0)) {
                    match memory.charge {
                        Some(_) => memory.references += 1,
                        // It had been released: a new object, with its first reference, for the same memory.
                        None => memory.charge = charge,
                    }
                }
            }
            MEMORY_RELEASE => {
                if let Ok(memory) = self.backend.objects.get_mut(Kind::Physical, call.object(0)) {
                    memory.references -= 1;
                    if memory.references == 0 {
                        self.backend.objects.remove(call.object(0));
                    }
                }
            }
            MAP => {
                let memory = self.backend.objects.get(Kind::Physical, call.object(3));
                let stretch = Stretch {
                    size: call.number(1),
                    context: 0,
                    owner: 0,
                    freed: false,
                    of_graph: false,
                    graphs: Vec::new(),
                    // Mapped memory stays when its handle is released.
                    charge: memory.ok().and_then(|memory| memory.charge.clone()),
                };
                self.backend.memory.insert(call.number(0), stretch);
            }
            UNMAP => self
                .backend
                .memory
                .remove_within(call.number(0), call.number(1)),
            _ => {}
        }
    }

    /// Updates the state after a call on any other object.
    fn after_object(&mut self, call: Call<'_>) {
        match call.function {
            MODULE_UNLOAD | LIBRARY_UNLOAD => {
                self.backend.memory.forget_owner(call.object(0));
                self.backend.instances.forget_library(call.object(0));
                self.backend.objects.remove(call.object(0));
            }
            STREAM_DESTROY | EVENT_DESTROY | POOL_DESTROY | ARRAY_DESTROY | MIPMAP_DESTROY => {
                if call.function == STREAM_DESTROY {
                    self.capture_failed(call.handle());
                    let backend = &mut self.backend;
                    backend.backlog.forget_stream(&backend.api, call.handle());
                    backend.passages.leave_stream(&backend.api, call.handle());
                }
                self.backend.objects.remove(call.object(0));
            }
            ARRAY_CREATE | ARRAY_CREATE_3D => self.costs(Kind::Array, call.object(0), call.charge),
            MIPMAP_CREATE => self.costs(Kind::Mipmap, call.object(0), call.charge),
            TEXTURE_CREATE | SURFACE_CREATE => self.texture_made(Texture {
                context: call.context,
                is_surface: call.function == SURFACE_CREATE,
                handle: call.number(0),
            }),
            TEXTURE_DESTROY | SURFACE_DESTROY => self.texture_ended(Texture {
                context: call.context,
                is_surface: call.function == SURFACE_DESTROY,
                handle: call.number(0),
            }),
            _ => {}
        }
    }

    /// Ends the fences of a primary context that is about to be destroyed.
    pub(super) fn before_primary(&mut self, function: u16, ordinal: u64) {
        if let Some((_, raw)) = self.ended_primary(function, ordinal) {
            self.backend.api.fences_lock().forget(raw);
        }
    }

    /// Number and handle of the primary context that a release or reset of a device ends.
    pub(super) fn ended_primary(&self, function: u16, ordinal: u64) -> Option<(u32, usize)> {
        let device = self.device(ordinal).ok()?;
        let count = self.backend.primary.get(&device);
        let is_last = count.is_none_or(|count| *count <= 1);
        match function == RELEASE && !is_last {
            true => None,
            false => self.primary(device),
        }
    }

    /// Whether a context is a device's primary context.
    pub(super) fn is_primary(&self, context: u32) -> bool {
        let context = self.backend.objects.get(Kind::Context, context);
        context.is_ok_and(|context| context.references == 0)
    }

    /// Number and handle of a device's primary context, which is the one that holds no references
    /// of its own.
    pub(super) fn primary(&self, device: i32) -> Option<(u32, usize)> {
        let mut all = self.backend.objects.iter();
        let found = all.find(|(_, object)| {
            object.kind == Kind::Context && object.device == device && object.references == 0
        });
        found.map(|(id, object)| (id, object.raw))
    }

    /// Registers the first part of the window as soon as there is a context. This takes some
    /// milliseconds, which are better spent as part of the much longer context creation than in the
    /// first wait.
    fn cover_start(&mut self, context: u32) {
        let own = self.backend.api.current();
        if self.enter(context).is_ok() {
            let backend = &mut self.session.backend;
            let start = self.session.window.data();
            // Copies report what is wrong.
            let _ = backend.cover.reach(
                &backend.api,
                &self.session.window,
                context,
                (start, 1),
                Extent::Ahead,
            );
        }
        self.backend.api.enter(own);
    }

    /// Forgets a graph or a node, and the graphs that belong to it.
    pub(super) fn forget_graph(&mut self, id: u32) {
        self.backend.memory.forget_graph(id);
        self.backend.objects.remove(id);
        let (conditionals, objects) = (
            &mut self.session.backend.conditionals,
            &self.session.backend.objects,
        );
        conditionals.retain(|_, graph| objects.get(Kind::Graph, *graph).is_ok());
    }

    fn forget_context(&mut self, id: u32) {
        self.backend.memory.forget_context(id);
        let session = &mut self.session;
        let orphans = session.backend.cover.forget(&session.window, id);
        self.backend
            .textures
            .retain(|texture| texture.context != id);
        if let Some(context) = self.backend.objects.remove(id) {
            let backend = &mut self.session.backend;
            backend.pending.forget_context(context.raw);
            let gone = backend.uncalled.extract_if(|_, of| *of == context.raw);
            self.session.expected -= gone.count();
            backend.backlog.forget_context(&backend.api, context.raw);
            backend
                .passages
                .forget_context(&backend.api, id, context.raw);
        }
        self.end_captures_without_stream();
        self.backend.deferred.remove(&id);
        self.backend.left.remove(&id);
        self.forget_unfenced(id);
        self.backend.limits.retain(|(context, _), _| *context != id);
        self.backend.instances.forget_context(id);
        self.backend.api.context_ended();
        self.hand_over(orphans);
    }
}

#[cfg(test)]
mod tests {
    use remoting_proto::apis::cuda::codes;

    use super::{super::testing, *};

    #[test]
    fn a_client_has_so_many_contexts_and_no_more() {
        const MOST: usize = 16;
        let (mut server, ..) = testing::server();
        let make = |server: &mut Server| {
            let mut place = 0u64;
            let words = [&raw mut place as u64, 0, 0];
            let (function, bytes) = testing::arguments("cuCtxCreate_v2", &words);
            server.forward(0, function, &bytes.0)
        };
        let contexts: Vec<u32> = (0..MOST)
            .map(|_| testing::made(&mut server, 0, "cuCtxCreate_v2", &[0, 0]))
            .collect();
        let before = server.quota.used();
        assert_eq!(make(&mut server).unwrap_err(), codes::OUT_OF_MEMORY);
        assert_eq!(server.quota.used(), before);
        let (function, bytes) = testing::arguments("cuCtxDestroy_v2", &[contexts[3].into()]);
        server.forward(0, function, &bytes.0).unwrap();
        make(&mut server).unwrap();
    }

    #[test]
    fn physical_memory_is_charged_until_its_last_mapping_and_handle_are_gone() {
        const SIZE: u64 = 1 << 20;
        const RAW: usize = 0x1000;
        let (first, second) = (0x10_0000_0000, 0x20_0000_0000);
        let (mut server, ..) = testing::server();
        let after = |server: &mut Server, function, words: &[u64], charge| {
            let arguments: Vec<_> = words.iter().map(|word| Argument::Word(*word)).collect();
            server.after(Call {
                function,
                arguments: &arguments,
                words,
                context: 0,
                charge,
                made: Cost::default(),
            });
        };
        let named = |server: &mut Server| {
            let objects = &mut server.backend.objects;
            u64::from(objects.number(Kind::Physical, RAW, 0, 0))
        };
        let charge = server.charge(SIZE).unwrap();
        let handle = named(&mut server);
        after(&mut server, MEMORY_CREATE, &[handle], Some(charge));
        after(&mut server, MAP, &[first, SIZE, 0, handle], None);
        after(&mut server, MEMORY_RELEASE, &[handle], None);
        assert_eq!(server.quota.used(), SIZE);
        // The driver gives the same handle again, which has no number any more.
        let handle = named(&mut server);
        after(&mut server, MEMORY_RETAIN, &[handle, first], None);
        after(&mut server, MAP, &[second, SIZE, 0, handle], None);
        after(&mut server, UNMAP, &[first, SIZE], None);
        assert_eq!(server.quota.used(), SIZE);
        after(&mut server, UNMAP, &[second, SIZE], None);
        assert_eq!(server.quota.used(), SIZE);
        after(&mut server, MEMORY_RELEASE, &[handle], None);
        assert_eq!(server.quota.used(), 0);
    }
}
