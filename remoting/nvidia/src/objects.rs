//! Clients and objects that programs created.

use std::{collections::HashMap, sync::Arc};

use crate::{
    bar::Place,
    quota::Charge,
    slice::{Holder, Slice},
};

/// The most objects of a client.
const MOST_OBJECTS: usize = 1 << 16;
/// Stands for the class of memory that lies elsewhere than in a slice: it was imported, or is a file that was lent.
pub const FOREIGN: u32 = 0;
/// The most clients of all programs.
const MOST_CLIENTS: usize = 1 << 12;

/// Pages of a slice behind an object or a range of addresses. Their piece is taken until they are released.
#[derive(Clone)]
pub struct Pages {
    /// The slice.
    pub slice: Arc<Slice>,
    /// Where they begin.
    pub offset: u64,
    /// How many bytes.
    pub length: u64,
}

impl Pages {
    /// Pages of a piece that somebody has taken. `None`: it is none.
    pub fn of(slice: &Arc<Slice>, offset: u64, length: u64) -> Option<Self> {
        slice.share(offset, length)?;
        Some(Self {
            slice: slice.clone(),
            offset,
            length,
        })
    }

    /// The same pages behind another object.
    pub fn share(&self) -> Option<Self> {
        Self::of(&self.slice, self.offset, self.length)
    }

    /// The driver does not use them any longer.
    pub fn release(self) {
        self.slice.give(self.offset, Holder::Object);
    }
}

/// An object.
pub struct Object {
    /// The object that contains it.
    pub parent: u32,
    /// Its class, or [`FOREIGN`].
    pub class: u32,
    /// Its size in bytes, where it is memory.
    pub size: u64,
    /// Whether no call has used it so far.
    pub is_fresh: bool,
    /// Whether other programs of the same user may duplicate it.
    pub is_shared: bool,
    /// The pages behind it, or those that are taken because it counts like them.
    pub pages: Option<Pages>,
    /// The video memory that it keeps.
    pub charge: Option<Charge>,
}

/// Memory that the driver is asked for outside of the order of calls. No other is made under its handle meanwhile.
pub struct Making {
    client: u32,
    handle: u32,
    number: u64,
}

/// How a program sees a mapping that it asked for.
pub struct Mapped {
    /// The object.
    pub object: u32,
    /// The driver's address. `None`: pages of the slice, of which the driver knows no mapping.
    pub address: Option<u64>,
    /// The number of the device file from which the program maps it.
    pub file: u32,
    /// Where a guest sees it. That stays when the file is closed.
    pub place: Option<Place>,
}

/// A root client.
pub struct Client {
    /// The number of the control file that it lives and dies with.
    pub file: u32,
    /// The user whose program created it.
    pub user: u32,
    objects: HashMap<u32, Object>,
    /// What is being made, by handle: the number of each, and what will contain it.
    making: HashMap<u32, (u64, u32)>,
    /// Mappings, by the number that the program has for each.
    pub mapped: HashMap<u64, Mapped>,
}

impl Client {
    /// An object.
    pub fn object(&mut self, handle: u32) -> Option<&mut Object> {
        self.objects.get_mut(&handle)
    }

    /// A handle that no object has.
    pub fn free_handle(&self) -> Option<u32> {
        (0xc0de_0001..=0xc0de_ffff).find(|handle| self.is_free(*handle))
    }

    fn is_free(&self, handle: u32) -> bool {
        !self.objects.contains_key(&handle) && !self.making.contains_key(&handle)
    }

    /// The first object of a class.
    pub fn of_class(&self, class: u32) -> Option<u32> {
        let mut of_class = self
            .objects
            .iter()
            .filter(|(_, object)| object.class == class);
        of_class.next().map(|(handle, _)| *handle)
    }
}

/// All clients.
#[derive(Default)]
pub struct Objects {
    clients: HashMap<u32, Client>,
    /// How much has begun to be made.
    begun: u64,
}

impl Objects {
    /// A client.
    pub fn client(&mut self, handle: u32) -> Option<&mut Client> {
        self.clients.get_mut(&handle)
    }

    /// Whether there is room for another object of a client, or for another client.
    pub fn has_room(&self, client: u32) -> bool {
        match self.clients.get(&client) {
            Some(client) => {
                client.objects.len() < MOST_OBJECTS && client.mapped.len() < MOST_OBJECTS
            }
            None => self.clients.len() < MOST_CLIENTS,
        }
    }

    /// Whether a client lives on this control file.
    pub fn has_client_of(&self, file: u32) -> bool {
        self.clients.values().any(|client| client.file == file)
    }

    /// A new client of a user's program on this control file.
    pub fn add_client(&mut self, handle: u32, file: u32, user: u32) {
        let client = Client {
            file,
            user,
            objects: HashMap::new(),
            making: HashMap::new(),
            mapped: HashMap::new(),
        };
        self.clients.insert(handle, client);
    }

    /// Memory is about to be made outside of the order of calls. `None`: there is no such client, or the handle is not free:
    /// what the driver has freed is noted until its pages are given back.
    pub fn begin(&mut self, client: u32, handle: u32, parent: u32) -> Option<Making> {
        let of = self.clients.get_mut(&client)?;
        if !of.is_free(handle) {
            return None;
        }
        self.begun += 1;
        of.making.insert(handle, (self.begun, parent));
        Some(Making {
            client,
            handle,
            number: self.begun,
        })
    }

    /// The driver has made it, or (`None`) has not. If its handle was freed meanwhile, or what was to contain it, it is not
    /// known whether the driver still has its pages: they stay taken as long as the slice is there.
    pub fn finish(&mut self, making: &Making, object: Option<Object>) {
        let Some(client) = self.clients.get_mut(&making.client) else {
            return;
        };
        let handle = making.handle;
        if client.making.get(&handle).map(|known| known.0) == Some(making.number) {
            client.making.remove(&handle);
            client.objects.extend(object.map(|object| (handle, object)));
        }
    }

    /// A new object. One that had the same handle is gone. Answers what pages are not behind an object any longer.
    pub fn add(&mut self, client: u32, handle: u32, object: Object) -> Vec<Pages> {
        let Some(known) = self.clients.get(&client) else {
            // It is gone with its client.
            return object.pages.into_iter().collect();
        };
        // Looking for what an object contained takes as long as there are objects.
        let is_known = known.objects.contains_key(&handle);
        let gone = if is_known {
            self.remove(client, handle)
        } else {
            Vec::new()
        };
        if let Some(client) = self.clients.get_mut(&client) {
            client.making.remove(&handle);
            client.objects.insert(handle, object);
        }
        gone
    }

    /// An object and all that it contains, or a client with all of its objects, is gone: what pages they had.
    pub fn remove(&mut self, client: u32, handle: u32) -> Vec<Pages> {
        let mut pages = Vec::new();
        if client == handle {
            let client = self.clients.remove(&client);
            let objects = client
                .into_iter()
                .flat_map(|client| client.objects.into_values());
            pages.extend(objects.filter_map(|object| object.pages));
            return pages;
        }
        let Some(client) = self.clients.get_mut(&client) else {
            return pages;
        };
        let mut parts = HashMap::<u32, Vec<u32>>::new();
        for (part, object) in &client.objects {
            parts.entry(object.parent).or_default().push(*part);
        }
        let mut gone = vec![handle];
        while let Some(handle) = gone.pop() {
            let is_below = |made: u32, parent: u32| made == handle || parent == handle;
            let making = &mut client.making;
            making.retain(|made, (_, parent)| !is_below(*made, *parent));
            if let Some(object) = client.objects.remove(&handle) {
                pages.extend(object.pages);
                gone.extend(parts.remove(&handle).into_iter().flatten());
            }
        }
        let objects = &client.objects;
        client
            .mapped
            .retain(|_, mapped| objects.contains_key(&mapped.object));
        pages
    }

    /// Where a guest sees an object, or what it contains; or what a client has, if `handle` is its own. It is not the
    /// objects' any longer.
    pub fn take_places(&mut self, client: u32, handle: u32) -> Vec<Place> {
        let Some(known) = self.clients.get_mut(&client) else {
            return Vec::new();
        };
        let objects = &known.objects;
        let is_below = |mapped: &Mapped| {
            let mut at = mapped.object;
            // No chain is longer than there are objects, unless it is a circle.
            for _ in 0..=objects.len() {
                if at == handle {
                    return true;
                }
                let Some(object) = objects.get(&at) else {
                    return false;
                };
                at = object.parent;
            }
            false
        };
        let mapped = known.mapped.values_mut();
        let mapped = mapped.filter(|mapped| mapped.place.is_some());
        mapped
            .filter(|mapped| client == handle || is_below(mapped))
            .filter_map(|mapped| mapped.place.take())
            .collect()
    }

    /// The same of all clients on a control file.
    pub fn take_places_of_file(&mut self, file: u32) -> Vec<Place> {
        let clients = self.clients.iter();
        let clients = clients.filter(|(_, client)| client.file == file);
        let clients: Vec<u32> = clients.map(|(handle, _)| *handle).collect();
        clients
            .into_iter()
            .flat_map(|client| self.take_places(client, client))
            .collect()
    }

    /// The mapping of a device's pages that a program makes from a file, and the control file of the client that has it.
    pub fn mapped_from(&mut self, file: u32) -> Option<(&mut Mapped, u32)> {
        let shows = |mapped: &&mut Mapped| mapped.address.is_some() && mapped.file == file;
        self.clients.values_mut().find_map(|client| {
            let mapped = client.mapped.values_mut().find(shows)?;
            Some((mapped, client.file))
        })
    }

    /// A control file is closed, and its clients are gone with it: what pages they had.
    pub fn remove_file(&mut self, file: u32) -> Vec<Pages> {
        let clients = self
            .clients
            .iter()
            .filter(|(_, client)| client.file == file);
        let clients: Vec<u32> = clients.map(|(handle, _)| *handle).collect();
        clients
            .into_iter()
            .flat_map(|client| self.remove(client, client))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(parent: u32) -> Object {
        Object {
            parent,
            class: 0x2080,
            size: 0,
            is_fresh: true,
            is_shared: false,
            pages: None,
            charge: None,
        }
    }

    #[test]
    fn what_an_object_contains_goes_with_it() {
        let mut objects = Objects::default();
        objects.add_client(1, 7, 0);
        for (handle, parent) in [(10, 1), (11, 10), (12, 11), (20, 1), (13, 13)] {
            objects.add(1, handle, object(parent));
        }
        objects.remove(1, 10);
        let client = objects.client(1).expect("it is there");
        let left = [10, 11, 12, 13, 20].map(|handle| client.object(handle).is_some());
        assert_eq!(left, [false, false, false, true, true]);
        // An object that says that it contains itself ends the walk all the same.
        objects.remove(1, 13);
    }

    #[test]
    fn what_is_freed_while_it_is_made_is_not_noted() {
        let mut objects = Objects::default();
        objects.add_client(1, 7, 0);
        objects.add(1, 10, object(1));
        assert!(objects.begin(1, 10, 1).is_none(), "it is noted");
        assert!(objects.begin(2, 11, 2).is_none(), "there is no such client");
        for freed in [11, 10] {
            let making = objects.begin(1, 11, 10).expect("the handle is free");
            assert!(objects.begin(1, 11, 10).is_none(), "it is being made");
            objects.remove(1, freed);
            let other = objects.begin(1, 11, 1).expect("the handle is free");
            objects.finish(&making, Some(object(10)));
            let client = objects.client(1).expect("it is there");
            assert!(client.object(11).is_none(), "{freed}");
            objects.finish(&other, None);
        }
        let making = objects.begin(1, 11, 1).expect("the handle is free");
        objects.finish(&making, Some(object(1)));
        assert!(objects.begin(1, 11, 1).is_none(), "it is noted");
    }

    #[test]
    fn a_closed_file_takes_its_clients_and_their_pages_along() {
        let slice = Arc::new(Slice::new(1 << 20).expect("there is memory"));
        let mut objects = Objects::default();
        objects.add_client(1, 7, 0);
        objects.add_client(2, 8, 0);
        let offset = slice.take(1 << 20, Holder::Object).expect("there is room");
        let pages = Pages {
            slice: slice.clone(),
            offset,
            length: 1 << 20,
        };
        objects.add(
            1,
            10,
            Object {
                pages: Some(pages),
                ..object(1)
            },
        );
        let gone = objects.remove_file(7);
        assert!(objects.client(1).is_none() && objects.client(2).is_some());
        gone.into_iter().for_each(Pages::release);
        assert_eq!(slice.take(1 << 20, Holder::Object), Some(0));
    }
}
