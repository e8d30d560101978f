//! The client's objects, by the numbers that the worker assigns.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use remoting_proto::apis::cuda::{FIRST, Kind, LEGACY, codes};
use remoting_session::quota::{Charge, Uncharged};

use super::user_objects::Retained;

/// Maximum number of objects at a time, which bounds how far a client can grow the table.
const MOST: usize = 1 << 20;
/// This many numbers rest before reuse, so that a stale number denotes no object rather than
/// another one.
const RESTING: usize = 256;

/// Offset and size of each parameter of a kernel, and the total size.
#[derive(Debug, Default)]
pub(super) struct Layout {
    pub(super) parameters: Vec<(u32, u32)>,
    pub(super) size: u32,
    /// Whether the kernel may print.
    pub(super) prints: bool,
}

/// An object of the driver.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) kind: Kind,
    /// The driver's handle.
    pub(super) raw: usize,
    /// The context with which it is destroyed; 0 for none.
    pub(super) context: u32,
    /// The object with which it is destroyed; 0 for none.
    pub(super) owner: u32,
    /// Parameter layout of a function or kernel, once queried.
    pub(super) layout: Option<Arc<Layout>>,
    /// The charge for it.
    pub(super) charge: Option<Arc<Charge>>,
    /// Its machine code that is not charged.
    pub(super) uncharged: Option<Uncharged>,
    /// The device of a context.
    pub(super) device: i32,
    /// How many times the client has obtained this handle of physical memory.
    pub(super) references: u32,
    /// Whether kernels of this image are known not to print.
    pub(super) is_silent: bool,
    /// User objects that the client has made this graph retain.
    pub(super) retained: Vec<Retained>,
    /// Whether graphs belong to this node.
    has_graphs: bool,
}

/// All objects.
#[derive(Debug, Default)]
pub(super) struct Objects {
    slots: Vec<Option<Object>>,
    /// Free numbers, the one that has been free for longest first.
    free: VecDeque<u32>,
    by_raw: HashMap<(Kind, usize), u32>,
    /// The number of streams.
    streams: usize,
}

impl Objects {
    /// The object with a number, if it can serve as this kind.
    pub(super) fn get(&self, kind: Kind, id: u32) -> Result<&Object, i32> {
        let index = id.checked_sub(FIRST).ok_or(kind.invalid())? as usize;
        match self.slots.get(index) {
            Some(Some(object)) if object.kind.serves_as(kind) => Ok(object),
            _ => Err(kind.invalid()),
        }
    }

    /// Like [`get`](Self::get), for modification.
    pub(super) fn get_mut(&mut self, kind: Kind, id: u32) -> Result<&mut Object, i32> {
        let index = id.checked_sub(FIRST).ok_or(kind.invalid())? as usize;
        match self.slots.get_mut(index) {
            Some(Some(object)) if object.kind.serves_as(kind) => Ok(object),
            _ => Err(kind.invalid()),
        }
    }

    /// The driver's handle for a number. 0 is no handle; the predefined streams have numbers that
    /// are not objects.
    pub(super) fn raw(&self, kind: Kind, id: u32) -> Result<usize, i32> {
        match id {
            0 => Ok(0),
            LEGACY if kind == Kind::Stream => Ok(LEGACY as usize),
            id => self.get(kind, id).map(|object| object.raw),
        }
    }

    /// The number of a driver's handle, if it has one.
    pub(super) fn known(&self, kind: Kind, raw: usize) -> Option<u32> {
        self.by_raw.get(&(kind, raw)).copied()
    }

    /// Whether there are streams besides the legacy stream.
    pub(super) fn has_streams(&self) -> bool {
        self.streams > 0
    }

    /// Whether a function or kernel belongs to an image whose kernels do not print.
    pub(super) fn is_silent(&self, function: u32) -> bool {
        // The longest chain is a function of a library's kernel, or of a library's module.
        let mut id = function;
        for _ in 0..3 {
            let index = id.checked_sub(FIRST);
            let object = index.and_then(|index| self.slots.get(index as usize)?.as_ref());
            match object {
                Some(image) if image.owner == 0 => return image.is_silent,
                Some(object) => id = object.owner,
                None => break,
            }
        }
        false
    }

    /// All objects with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Object)> {
        let numbered = self.slots.iter().enumerate();
        numbered.filter_map(|(index, slot)| Some((index as u32 + FIRST, slot.as_ref()?)))
    }

    /// Whether there is no room for another object.
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty() && self.slots.len() >= MOST
    }

    /// The number of a driver's handle, which is assigned if the handle is new. 0 for no handle.
    pub(super) fn number(&mut self, kind: Kind, raw: usize, context: u32, owner: u32) -> u32 {
        if raw == 0 || kind == Kind::Stream && raw == LEGACY as usize {
            return raw as u32;
        }
        if let Some(known) = self.known(kind, raw) {
            return known;
        }
        let object = Object {
            kind,
            raw,
            context,
            owner,
            layout: None,
            charge: None,
            uncharged: None,
            device: 0,
            references: 1,
            is_silent: false,
            retained: Vec::new(),
            has_graphs: false,
        };
        if kind == Kind::Graph
            && let Ok(node) = self.get_mut(Kind::Node, owner)
        {
            node.has_graphs = true;
        }
        self.streams += usize::from(kind == Kind::Stream);
        let rested = self.free.len() > RESTING || self.slots.len() >= MOST;
        let index = match rested.then(|| self.free.pop_front()).flatten() {
            Some(index) => {
                self.slots[index as usize] = Some(object);
                index
            }
            None => {
                self.slots.push(Some(object));
                (self.slots.len() - 1) as u32
            }
        };
        self.by_raw.insert((kind, raw), index + FIRST);
        index + FIRST
    }

    /// Forgets an object and all that belong to it.
    pub(super) fn remove(&mut self, id: u32) -> Option<Object> {
        let index = id.checked_sub(FIRST)?;
        let object = self.slots.get_mut(index as usize)?.take()?;
        self.by_raw.remove(&(object.kind, object.raw));
        self.streams -= usize::from(object.kind == Kind::Stream);
        self.free.push_back(index);
        let owns = matches!(
            object.kind,
            Kind::Context
                | Kind::Module
                | Kind::Library
                | Kind::Graph
                | Kind::Kernel
                | Kind::Mipmap
        );
        // There are many nodes, but few have graphs.
        if owns || object.has_graphs {
            let is_context = object.kind == Kind::Context;
            let goes = |one: &Object| one.owner == id || is_context && one.context == id;
            let all: Vec<u32> = self
                .iter()
                .filter(|(_, one)| goes(one))
                .map(|(id, _)| id)
                .collect();
            for one in all {
                self.remove(one);
            }
        }
        Some(object)
    }

    /// Returns the error code if no further object can be created.
    pub(super) fn check_room(&self) -> Result<(), i32> {
        if self.is_full() {
            return Err(codes::OUT_OF_MEMORY);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_has_one_number_until_it_goes_with_its_owner() {
        let mut objects = Objects::default();
        let context = objects.number(Kind::Context, 0x10, 0, 0);
        let module = objects.number(Kind::Module, 0x20, context, 0);
        let function = objects.number(Kind::Function, 0x30, context, module);
        assert_eq!(
            objects.number(Kind::Function, 0x30, context, module),
            function
        );
        assert_eq!(objects.raw(Kind::Function, function), Ok(0x30));
        assert_eq!(
            objects.raw(Kind::Event, function),
            Err(codes::INVALID_HANDLE)
        );
        objects.remove(module);
        assert!(objects.get(Kind::Function, function).is_err());
        objects.number(Kind::Event, 0x40, context, 0);
        objects.remove(context);
        assert_eq!(objects.iter().count(), 0);
    }

    #[test]
    fn a_graph_of_a_node_goes_with_the_node_and_with_its_graph() {
        let mut objects = Objects::default();
        for by_node in [true, false] {
            let graph = objects.number(Kind::Graph, 0x10, 0, 0);
            let node = objects.number(Kind::Node, 0x20, 0, graph);
            let body = objects.number(Kind::Graph, 0x30, 0, node);
            let inner = objects.number(Kind::Node, 0x40, 0, body);
            objects.remove(if by_node { node } else { graph });
            assert!(objects.get(Kind::Graph, body).is_err());
            assert!(objects.get(Kind::Node, inner).is_err());
            assert_eq!(objects.get(Kind::Graph, graph).is_ok(), by_node);
            objects.remove(graph);
        }
        assert_eq!(objects.iter().count(), 0);
    }

    #[test]
    fn a_number_is_given_again_when_many_others_have_been() {
        let mut objects = Objects::default();
        let first = objects.number(Kind::Event, 0x10, 0, 0);
        objects.remove(first);
        for raw in 0..RESTING {
            let next = objects.number(Kind::Event, 0x20 + raw, 0, 0);
            assert_ne!(next, first, "after {raw} others");
            objects.remove(next);
        }
        assert_eq!(objects.number(Kind::Event, 0x10, 0, 0), first);
        assert_eq!(objects.slots.len(), RESTING + 1);
    }

    #[test]
    fn numbers_that_nobody_was_given_are_no_handles() {
        let objects = Objects::default();
        for id in [2, FIRST, FIRST + 7, u32::MAX] {
            assert!(objects.raw(Kind::Stream, id).is_err(), "{id}");
        }
        assert_eq!(objects.raw(Kind::Stream, 0), Ok(0));
        assert_eq!(objects.raw(Kind::Stream, LEGACY), Ok(1));
        assert!(objects.raw(Kind::Event, LEGACY).is_err());
    }
}
