//! What calls have made: the channel groups and channels of each context, and what they belong to.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::c_int,
};

use super::{
    Context,
    blocks::{Channels, Kind, Request},
};

/// The engine of groups that run kernels.
const COMPUTE: u32 = 1;
/// The most objects of a client that are noted, and the most contexts, of programs that are not trusted.
const MOST_OBJECTS: usize = 4096;
const MOST_CONTEXTS: usize = 256;

#[derive(Debug)]
struct Object {
    kind: Kind,
    parent: u32,
}

impl Object {
    /// What it ends with, besides its parent.
    fn needs(&self) -> Option<u32> {
        let needed = match self.kind {
            Kind::Group { space, .. } | Kind::Share { space } => space,
            Kind::Channel { share } => share,
            _ => 0,
        };
        (needed != 0).then_some(needed)
    }
}

/// The objects of a client that are noted.
#[derive(Debug)]
struct Client {
    /// The control file that it lives on.
    file: c_int,
    /// By handle.
    objects: BTreeMap<u32, Object>,
    /// What ends with an object: pairs of that one and the other.
    ends_with: BTreeSet<(u32, u32)>,
    /// Channels, by their parents, and subdevices, by their devices.
    channels: BTreeSet<(u32, u32)>,
    subdevices: BTreeSet<(u32, u32)>,
    /// Groups that run kernels, by device and address space.
    groups: BTreeSet<(u32, u32, u32)>,
}

/// What is noted, by client.
#[derive(Debug)]
pub struct Notes {
    clients: BTreeMap<u32, Client>,
    /// Whether nothing is believed that calls say of an object's place.
    guarded: bool,
}

impl Notes {
    /// `guarded`: of programs that are not trusted.
    pub const fn new(guarded: bool) -> Self {
        Self {
            clients: BTreeMap::new(),
            guarded,
        }
    }

    /// Whether the driver may wait for channels in this call, or channels are made that a stop would not include.
    pub fn waits(&self, request: &Request) -> bool {
        match *request {
            Request::Waits => true,
            Request::Allocate { kind, .. } => {
                matches!(kind, Some(Kind::Channel { .. } | Kind::Group { .. }))
            }
            Request::Free { client, .. } if self.guarded => self.has_channels(client),
            Request::Free {
                client,
                parent,
                object,
                ..
            } => self.clients.get(&client).is_some_and(|noted| {
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
                kind: Some(Kind::Client),
                status: 0,
                ..
            } => {
                self.clients.insert(object, Client::new(file));
            }
            Request::Allocate {
                client,
                parent,
                object,
                kind: Some(kind),
                status: 0,
            } => {
                let noted = match self.guarded {
                    // One that is not noted has ended, and its objects with it.
                    true => self.clients.get_mut(&client),
                    false => Some(
                        self.clients
                            .entry(client)
                            .or_insert_with(|| Client::new(file)),
                    ),
                };
                if let Some(noted) = noted {
                    noted.add(object, Object { kind, parent });
                }
            }
            Request::Free {
                client,
                object,
                status: 0,
                ..
            } => {
                if client == object {
                    self.clients.remove(&client);
                } else {
                    self.forget(client, object);
                }
            }
            _ => {}
        }
    }

    /// An object has ended.
    pub fn forget(&mut self, client: u32, object: u32) {
        if let Some(noted) = self.clients.get_mut(&client) {
            noted.free(object);
        }
    }

    /// Whether another object of this kind can be noted, so that no program makes looks at what is noted slow.
    pub fn has_room(&self, client: u32, kind: Kind) -> bool {
        let Some(noted) = self.clients.get(&client).filter(|_| self.guarded) else {
            return true;
        };
        let contexts = || self.clients.values().flat_map(Client::contexts).count();
        noted.objects.len() < MOST_OBJECTS
            && (!matches!(kind, Kind::Group { .. }) || contexts() < MOST_CONTEXTS)
    }

    /// Whether a client has channels.
    pub fn has_channels(&self, client: u32) -> bool {
        let noted = self.clients.get(&client);
        noted.is_some_and(|noted| !noted.channels.is_empty())
    }

    fn kind(&self, client: u32, object: u32) -> Option<Kind> {
        Some(self.clients.get(&client)?.objects.get(&object)?.kind)
    }

    /// Whether contexts cannot be stopped any more without this object: the part of a GPU by which that is done.
    pub fn is_needed(&self, client: u32, object: u32) -> bool {
        self.kind(client, object) == Some(Kind::Subdevice) && self.has_channels(client)
    }

    /// Whether an object is a group.
    pub fn is_group(&self, client: u32, object: u32) -> bool {
        matches!(self.kind(client, object), Some(Kind::Group { .. }))
    }

    /// The context whose kernels a channel runs; `None` if it runs none.
    pub fn context_of_channel(&self, client: u32, channel: u32) -> Option<Context> {
        let object = self.clients.get(&client)?.objects.get(&channel)?;
        matches!(object.kind, Kind::Channel { .. })
            .then(|| self.context_of(client, object.parent))?
    }

    /// The group that a channel is one of, and the part of the GPU by which it is controlled.
    pub fn controlled_by(&self, client: u32, channel: u32) -> Option<(u32, u32)> {
        let context = self.context_of_channel(client, channel)?;
        let noted = self.clients.get(&client)?;
        let group = noted.objects.get(&channel)?.parent;
        Some((noted.subdevice(context.device)?, group))
    }

    /// A file is closed, and its clients end with it.
    pub fn close(&mut self, file: c_int) {
        self.clients.retain(|_, client| client.file != file);
    }

    /// The context whose kernels a group runs; `None` if it runs none.
    pub fn context_of(&self, client: u32, group: u32) -> Option<Context> {
        let object = self.clients.get(&client)?.objects.get(&group)?;
        match object.kind {
            Kind::Group { space, engine } if engine == COMPUTE => Some(Context {
                client,
                device: object.parent,
                space,
            }),
            _ => None,
        }
    }

    /// The contexts that have compute channels, in order.
    pub fn contexts(&self) -> Vec<Context> {
        let all = self.clients.iter().flat_map(|(&client, noted)| {
            let contexts = noted.contexts().filter(|(device, space)| {
                let groups = noted.groups_of(*device, *space);
                let has_channels = |group| !below(&noted.channels, group).is_empty();
                noted.subdevice(*device).is_some() && groups.into_iter().any(has_channels)
            });
            contexts.map(move |(device, space)| Context {
                client,
                device,
                space,
            })
        });
        all.collect()
    }

    /// The control file of a client.
    pub fn file(&self, client: u32) -> Option<c_int> {
        Some(self.clients.get(&client)?.file)
    }

    /// The number of the context's GPU.
    pub fn gpu(&self, context: Context) -> Option<u32> {
        match self.kind(context.client, context.device)? {
            Kind::Device(gpu) => Some(gpu),
            _ => None,
        }
    }

    /// The compute groups of a context, each with its client's file.
    pub fn groups(&self, context: Context) -> Vec<(c_int, u32)> {
        let Some(noted) = self.clients.get(&context.client) else {
            return Vec::new();
        };
        let groups = noted.groups_of(context.device, context.space).into_iter();
        groups.map(|group| (noted.file, group)).collect()
    }

    /// All channels, each with its client and the client's file.
    pub fn all_channels(&self) -> Vec<(c_int, u32, u32)> {
        let all = self.clients.iter().flat_map(|(&client, noted)| {
            let channels = noted.channels.iter();
            channels.map(move |(_, channel)| (noted.file, client, *channel))
        });
        all.collect()
    }

    /// The compute channels of a context; `None` if it has none.
    pub fn channels(&self, context: Context) -> Option<Channels> {
        let noted = self.clients.get(&context.client)?;
        let groups = noted.groups_of(context.device, context.space).into_iter();
        let channels: Vec<u32> = groups
            .flat_map(|group| below(&noted.channels, group))
            .collect();
        (!channels.is_empty()).then_some(Channels {
            file: noted.file,
            client: context.client,
            subdevice: noted.subdevice(context.device)?,
            channels,
        })
    }
}

/// Whatever is paired with this one.
fn below(pairs: &BTreeSet<(u32, u32)>, one: u32) -> Vec<u32> {
    let pairs = pairs.range((one, 0)..=(one, u32::MAX));
    pairs.map(|(_, other)| *other).collect()
}

impl Client {
    fn new(file: c_int) -> Self {
        Self {
            file,
            objects: BTreeMap::new(),
            ends_with: BTreeSet::new(),
            channels: BTreeSet::new(),
            subdevices: BTreeSet::new(),
            groups: BTreeSet::new(),
        }
    }

    fn add(&mut self, handle: u32, object: Object) {
        // The driver has just given the handle, so that there is no other object of it.
        self.remove(handle);
        let parent = object.parent;
        match object.kind {
            Kind::Channel { .. } => drop(self.channels.insert((parent, handle))),
            Kind::Subdevice => drop(self.subdevices.insert((parent, handle))),
            Kind::Group {
                space,
                engine: COMPUTE,
            } => drop(self.groups.insert((parent, space, handle))),
            _ => {}
        }
        for other in [Some(parent), object.needs()].into_iter().flatten() {
            self.ends_with.insert((other, handle));
        }
        self.objects.insert(handle, object);
    }

    fn remove(&mut self, handle: u32) {
        let Some(object) = self.objects.remove(&handle) else {
            return;
        };
        let parent = object.parent;
        match object.kind {
            Kind::Channel { .. } => drop(self.channels.remove(&(parent, handle))),
            Kind::Subdevice => drop(self.subdevices.remove(&(parent, handle))),
            Kind::Group {
                space,
                engine: COMPUTE,
            } => drop(self.groups.remove(&(parent, space, handle))),
            _ => {}
        }
        for other in [Some(parent), object.needs()].into_iter().flatten() {
            self.ends_with.remove(&(other, handle));
        }
    }

    /// Removes an object, all below it, and what ends with it: groups and context shares of an address space, channels of a
    /// context share.
    fn free(&mut self, object: u32) {
        let mut freed = vec![object];
        while let Some(one) = freed.pop() {
            self.remove(one);
            freed.extend(below(&self.ends_with, one));
        }
    }

    /// Devices and address spaces of groups that run kernels, in order.
    fn contexts(&self) -> impl Iterator<Item = (u32, u32)> {
        let mut last = None;
        self.groups.iter().filter_map(move |&(device, space, _)| {
            let context = Some((device, space));
            (last != context).then(|| last = context).and(context)
        })
    }

    fn groups_of(&self, device: u32, space: u32) -> Vec<u32> {
        let groups = self
            .groups
            .range((device, space, 0)..=(device, space, u32::MAX));
        groups.map(|(.., group)| *group).collect()
    }

    fn subdevice(&self, device: u32) -> Option<u32> {
        let parts = self.subdevices.range((device, 0)..=(device, u32::MAX));
        parts.map(|(_, part)| *part).next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: u32 = 0xc1d0_0001;
    const DEVICE: u32 = 1;

    fn allocate(notes: &mut Notes, parent: u32, object: u32, kind: Kind) {
        let request = Request::Allocate {
            client: if kind == Kind::Client { 0 } else { CLIENT },
            parent,
            object,
            kind: Some(kind),
            status: 0,
        };
        notes.note(7, &request);
    }

    fn filled(guarded: bool) -> Notes {
        let mut notes = Notes::new(guarded);
        allocate(&mut notes, 0, CLIENT, Kind::Client);
        allocate(&mut notes, CLIENT, DEVICE, Kind::Device(0));
        allocate(&mut notes, DEVICE, 2, Kind::Subdevice);
        notes
    }

    fn context(notes: &mut Notes, space: u32, group: u32) {
        allocate(notes, DEVICE, space, Kind::AddressSpace);
        let kind = Kind::Group {
            space,
            engine: COMPUTE,
        };
        allocate(notes, DEVICE, group, kind);
        allocate(notes, group, group + 1, Kind::Channel { share: 0 });
    }

    #[test]
    fn a_look_at_contexts_does_not_depend_on_how_many_other_objects_there_are() {
        let mut notes = filled(false);
        for number in 0..200 {
            context(&mut notes, 100 + number, 1000 + 2 * number);
        }
        for space in 0..60_000 {
            allocate(&mut notes, DEVICE, 10_000 + space, Kind::AddressSpace);
        }
        let contexts = notes.contexts();
        assert_eq!(contexts.len(), 200);
        // Steps over all objects for each context would be 24 million for a look, and 12 billion here.
        for _ in 0..500 {
            assert!(contexts.iter().all(|one| notes.channels(*one).is_some()));
        }
    }

    #[test]
    fn an_untrusted_program_makes_no_more_objects_and_contexts_than_are_looked_at_soon() {
        let mut notes = filled(true);
        let group = |space| Kind::Group {
            space,
            engine: COMPUTE,
        };
        let most = MOST_CONTEXTS as u32;
        for number in 0..most {
            assert!(notes.has_room(CLIENT, group(100 + number)));
            context(&mut notes, 100 + number, 1000 + 2 * number);
        }
        assert!(!notes.has_room(CLIENT, group(99)));
        let mut space = 10_000;
        while notes.has_room(CLIENT, Kind::AddressSpace) {
            allocate(&mut notes, DEVICE, space, Kind::AddressSpace);
            space += 1;
        }
        assert_eq!(notes.clients[&CLIENT].objects.len(), MOST_OBJECTS);
        notes.forget(CLIENT, 1000);
        assert!(notes.has_room(CLIENT, group(99)));
        assert!(filled(false).has_room(CLIENT, Kind::AddressSpace));
    }

    #[test]
    fn what_is_made_in_an_ended_client_of_an_untrusted_program_is_not_noted() {
        for guarded in [false, true] {
            let mut notes = Notes::new(guarded);
            allocate(&mut notes, CLIENT, DEVICE, Kind::Device(0));
            assert_eq!(notes.clients.is_empty(), guarded);
        }
    }

    #[test]
    fn nothing_is_left_of_what_is_freed() {
        let mut notes = filled(true);
        context(&mut notes, 100, 1000);
        allocate(&mut notes, 1000, 50, Kind::Share { space: 100 });
        allocate(&mut notes, 1000, 51, Kind::Channel { share: 50 });
        notes.forget(CLIENT, DEVICE);
        let left = &notes.clients[&CLIENT];
        assert!(left.objects.is_empty() && left.ends_with.is_empty());
        assert!(left.channels.is_empty() && left.subdevices.is_empty() && left.groups.is_empty());
    }
}
