//! Handles are numbers that are never dereferenced, so that an invalid handle is an error, not a
//! crash.

use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use cuda_definition::driver::types::CUresult;

use super::{
    Answer,
    array::Array,
    context::Context,
    module::{Kernel, Module},
    stream::{Condition, Event, Graph, Kept, Stream},
};

/// The object of a handle.
#[derive(Clone)]
pub enum Object {
    Context(Arc<Context>),
    Stream(Arc<Stream>),
    Event(Arc<Event>),
    Module(Arc<Module>),
    Kernel(Arc<Kernel>),
    Graph(Arc<Graph>),
    /// A graph that can be launched.
    Executable(Arc<Graph>),
    Array(Arc<Array>),
    /// Something that graphs keep alive.
    Kept(Kept),
    /// The value of a conditional node, and its optional default at the start of each launch.
    Condition(Arc<Condition>),
}

static ALL: LazyLock<RwLock<HashMap<u64, Object>>> = LazyLock::new(RwLock::default);
static NEXT: AtomicU64 = AtomicU64::new(0x7c00_0000_0000);

/// Allocates a handle.
pub fn number() -> u64 {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// Assigns an object to a handle.
pub fn insert(handle: u64, object: Object) {
    ALL.write()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(handle, object);
}

/// Removes a handle, and returns its object.
pub fn remove(handle: u64) -> Option<Object> {
    ALL.write()
        .unwrap_or_else(PoisonError::into_inner)
        .remove(&handle)
}

fn find(handle: u64) -> Option<Object> {
    ALL.read()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&handle)
        .cloned()
}

/// All contexts.
pub fn contexts() -> Vec<Arc<Context>> {
    let all = ALL.read().unwrap_or_else(PoisonError::into_inner);
    let contexts = all.values().filter_map(|object| match object {
        Object::Context(context) => Some(Arc::clone(context)),
        _ => None,
    });
    contexts.collect()
}

/// All streams created by programs.
pub fn streams() -> Vec<Arc<Stream>> {
    let all = ALL.read().unwrap_or_else(PoisonError::into_inner);
    let streams = all.values().filter_map(|object| match object {
        Object::Stream(stream) => Some(Arc::clone(stream)),
        _ => None,
    });
    streams.collect()
}

/// All graphs created by programs.
pub fn graphs() -> Vec<Arc<Graph>> {
    let all = ALL.read().unwrap_or_else(PoisonError::into_inner);
    let graphs = all.values().filter_map(|object| match object {
        Object::Graph(graph) => Some(Arc::clone(graph)),
        _ => None,
    });
    graphs.collect()
}

/// A graph by its handle, or a graph that is being captured.
pub fn any_graph<T>(handle: *mut T) -> Answer<Arc<Graph>> {
    let captured = || {
        let streams = streams();
        streams.iter().find_map(|stream| {
            let capture = stream.capture.lock();
            let capture = capture.unwrap_or_else(PoisonError::into_inner);
            capture
                .as_ref()
                .filter(|graph| graph.handle == handle as u64)
                .cloned()
        })
    };
    graph(handle).or_else(|error| captured().ok_or(error))
}

macro_rules! getter {
    ($(#[$doc:meta])* $name:ident, $variant:ident, $of:ty, $error:ident) => {
        $(#[$doc])*
        pub fn $name<T>(handle: *mut T) -> Answer<Arc<$of>> {
            match find(handle as u64) {
                Some(Object::$variant(object)) => Ok(object),
                _ => Err(CUresult::$error),
            }
        }
    };
}

getter!(
    /// A context by its handle.
    context, Context, Context, CUDA_ERROR_INVALID_CONTEXT
);
getter!(
    /// A stream by its handle, except for the default streams.
    stream, Stream, Stream, CUDA_ERROR_INVALID_HANDLE
);
getter!(
    /// An event by its handle.
    event, Event, Event, CUDA_ERROR_INVALID_HANDLE
);
getter!(
    /// A module or a library by its handle.
    module, Module, Module, CUDA_ERROR_INVALID_HANDLE
);
getter!(
    /// A function or a kernel by its handle.
    kernel, Kernel, Kernel, CUDA_ERROR_INVALID_HANDLE
);
getter!(
    /// An array by its handle.
    array, Array, Array, CUDA_ERROR_INVALID_HANDLE
);
getter!(
    /// A graph by its handle.
    graph, Graph, Graph, CUDA_ERROR_INVALID_HANDLE
);
getter!(
    /// A graph that can be launched, by its handle.
    executable, Executable, Graph, CUDA_ERROR_INVALID_HANDLE
);
getter!(
    /// A conditional node's value by its handle.
    condition, Condition, Condition, CUDA_ERROR_INVALID_VALUE
);
