//! What calls have made: the channel groups and channels of each context, and what they belong to.

use std::{collections::BTreeMap, ffi::c_int};

use super::{
    Context,
    blocks::{CLIENTS, Channels, DEVICE, Request, SUBDEVICE, is_channel},
};

/// The class of address spaces.
const ADDRESS_SPACE: u32 = 0x90f1;
/// The engine of groups that run kernels.
const COMPUTE: u32 = 1;

/// An object that is noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// This GPU.
    Device(u32),
    Subdevice,
    AddressSpace,
    /// A channel group in this address space, on this engine.
    Group {
        space: u32,
        engine: u32,
    },
    /// A channel with this context share; zero: none.
    Channel {
        share: u32,
    },
}

#[derive(Debug)]
struct Object {
    kind: Kind,
    parent: u32,
}

/// The objects of a client that are noted, by handle.
#[derive(Debug)]
struct Client {
    /// The control file that it lives on.
    file: c_int,
    objects: BTreeMap<u32, Object>,
}

/// What is noted, by client.
#[derive(Debug)]
pub struct Notes(BTreeMap<u32, Client>);

/// What is noted about an object of a class; `None`: nothing.
fn kind(
    class: u32,
    group: Option<(u32, u32)>,
    gpu: Option<u32>,
    share: Option<u32>,
) -> Option<Kind> {
    match class {
        DEVICE => Some(Kind::Device(gpu.unwrap_or_default())),
        SUBDEVICE => Some(Kind::Subdevice),
        ADDRESS_SPACE => Some(Kind::AddressSpace),
        class if is_channel(class) => {
            let share = share.unwrap_or_default();
            Some(Kind::Channel { share })
        }
        _ => group.map(|(space, engine)| Kind::Group { space, engine }),
    }
}

impl Notes {
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Whether the driver may wait for channels in this call, or channels are made that a stop would not include. `guarded`: what
    /// calls say of an object's place is not believed.
    pub fn waits(&self, request: &Request, guarded: bool) -> bool {
        match *request {
            Request::Waits => true,
            Request::Allocate {
                class,
                group,
                gpu,
                share,
                ..
            } => {
                matches!(
                    kind(class, group, gpu, share),
                    Some(Kind::Channel { .. } | Kind::Group { .. })
                )
            }
            Request::Free { client, .. } if guarded => self.has_channels(client),
            Request::Free {
                client,
                parent,
                object,
                ..
            } => self.0.get(&client).is_some_and(|noted| {
                // Engines lie below channels, and what they share below groups.
                let parent = noted.objects.get(&parent).map(|parent| parent.kind);
                object == client
                    || noted.objects.contains_key(&object)
                    || matches!(parent, Some(Kind::Channel { .. } | Kind::Group { .. }))
            }),
        }
    }

    /// Notes a call that the kernel has taken.
    pub fn note(&mut self, file: c_int, request: &Request) {
        match *request {
            Request::Allocate {
                object,
                class,
                status: 0,
                ..
            } if CLIENTS.contains(&class) => {
                let objects = BTreeMap::new();
                self.0.insert(object, Client { file, objects });
            }
            Request::Allocate {
                client,
                parent,
                object,
                class,
                group,
                gpu,
                share,
                status: 0,
            } => {
                if let Some(kind) = kind(class, group, gpu, share) {
                    let noted = self.0.entry(client).or_insert_with(|| Client {
                        file,
                        objects: BTreeMap::new(),
                    });
                    noted.objects.insert(object, Object { kind, parent });
                }
            }
            Request::Free {
                client,
                object,
                status: 0,
                ..
            } => {
                if client == object {
                    self.0.remove(&client);
                } else if let Some(noted) = self.0.get_mut(&client) {
                    noted.free(object);
                }
            }
            _ => {}
        }
    }

    /// Whether a client has channels.
    pub fn has_channels(&self, client: u32) -> bool {
        let objects = self.0.get(&client).map(|client| client.objects.values());
        let is_channel = |object: &Object| matches!(object.kind, Kind::Channel { .. });
        objects.into_iter().flatten().any(is_channel)
    }

    /// Whether contexts cannot be stopped any more without this object: the part of a GPU by which that is done.
    pub fn is_needed(&self, client: u32, object: u32) -> bool {
        let noted = self
            .0
            .get(&client)
            .and_then(|noted| noted.objects.get(&object));
        noted.is_some_and(|object| object.kind == Kind::Subdevice) && self.has_channels(client)
    }

    /// Whether an object is a group.
    pub fn is_group(&self, client: u32, object: u32) -> bool {
        let noted = self
            .0
            .get(&client)
            .and_then(|noted| noted.objects.get(&object));
        noted.is_some_and(|object| matches!(object.kind, Kind::Group { .. }))
    }

    /// The context whose kernels a channel runs; `None` if it runs none.
    pub fn context_of_channel(&self, client: u32, channel: u32) -> Option<Context> {
        let object = self.0.get(&client)?.objects.get(&channel)?;
        matches!(object.kind, Kind::Channel { .. })
            .then(|| self.context_of(client, object.parent))?
    }

    /// A file is closed, and its clients end with it.
    pub fn close(&mut self, file: c_int) {
        self.0.retain(|_, client| client.file != file);
    }

    /// The context whose kernels a group runs; `None` if it runs none.
    pub fn context_of(&self, client: u32, group: u32) -> Option<Context> {
        let object = self.0.get(&client)?.objects.get(&group)?;
        match object.kind {
            Kind::Group { space, engine } if engine == COMPUTE => Some(Context {
                client,
                device: object.parent,
                space,
            }),
            _ => None,
        }
    }

    /// The contexts that have compute channels.
    pub fn contexts(&self) -> Vec<Context> {
        let mut contexts = Vec::new();
        for (&client, noted) in &self.0 {
            for group in noted.objects.values() {
                if let Kind::Group {
                    space,
                    engine: COMPUTE,
                } = group.kind
                {
                    contexts.push(Context {
                        client,
                        device: group.parent,
                        space,
                    });
                }
            }
        }
        contexts.sort_unstable();
        contexts.dedup();
        contexts.retain(|context| self.channels(*context).is_some());
        contexts
    }

    /// The control file of a client.
    pub fn file(&self, client: u32) -> Option<c_int> {
        Some(self.0.get(&client)?.file)
    }

    /// The number of the context's GPU.
    pub fn gpu(&self, context: Context) -> Option<u32> {
        let device = self.0.get(&context.client)?.objects.get(&context.device)?;
        match device.kind {
            Kind::Device(gpu) => Some(gpu),
            _ => None,
        }
    }

    /// The compute groups of a context, each with its client's file.
    pub fn groups(&self, context: Context) -> Vec<(c_int, u32)> {
        let Some(noted) = self.0.get(&context.client) else {
            return Vec::new();
        };
        let kind = Kind::Group {
            space: context.space,
            engine: COMPUTE,
        };
        let own = |object: &Object| object.kind == kind && object.parent == context.device;
        let groups = noted.objects.iter().filter(|(_, object)| own(object));
        groups.map(|(handle, _)| (noted.file, *handle)).collect()
    }

    /// All channels, each with its client and the client's file.
    pub fn all_channels(&self) -> Vec<(c_int, u32, u32)> {
        let mut all = Vec::new();
        for (&client, noted) in &self.0 {
            let channels = noted
                .objects
                .iter()
                .filter(|(_, one)| matches!(one.kind, Kind::Channel { .. }));
            all.extend(channels.map(|(channel, _)| (noted.file, client, *channel)));
        }
        all
    }

    /// The compute channels of a context; `None` if it has none.
    pub fn channels(&self, context: Context) -> Option<Channels> {
        let noted = self.0.get(&context.client)?;
        let of = |is: fn(Kind) -> bool, parent: u32| {
            let objects = noted.objects.iter();
            let own = move |object: &Object| is(object.kind) && object.parent == parent;
            objects.filter_map(move |(handle, object)| own(object).then_some(*handle))
        };
        let is_channel = |kind| matches!(kind, Kind::Channel { .. });
        let subdevice = of(|kind| kind == Kind::Subdevice, context.device).next()?;
        let groups = self.groups(context);
        let channels: Vec<u32> = groups
            .iter()
            .flat_map(|(_, group)| of(is_channel, *group))
            .collect();
        (!channels.is_empty()).then_some(Channels {
            file: noted.file,
            client: context.client,
            subdevice,
            channels,
        })
    }
}

impl Client {
    /// Removes an object, all below it, and what ends with it: groups of an address space, channels of a context share.
    fn free(&mut self, object: u32) {
        let mut freed = vec![object];
        while let Some(one) = freed.pop() {
            self.objects.remove(&one);
            let ends = |child: &Object| match child.kind {
                _ if child.parent == one => true,
                Kind::Group { space, .. } => space == one,
                Kind::Channel { share } => share == one && share != 0,
                _ => false,
            };
            let children = self.objects.iter().filter(|(_, child)| ends(child));
            freed.extend(children.map(|(handle, _)| *handle));
        }
    }
}
