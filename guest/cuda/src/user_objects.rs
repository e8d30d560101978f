//! User objects: objects that graphs of the program keep, and destructors that are called when
//! nobody refers to them any more. The worker counts references. The destructor is called by the
//! callback thread, since nobody waits for it.

use std::ffi::{c_uint, c_void};

use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{
    Kind,
    calls::{CreateUserObject, ReleaseUserObject, RetainUserObject},
    codes,
};

use crate::{
    entry::{Outcome, connected, entry_points, put},
    handles,
};

/// The base of handles, to which the callback's number is added.
const BASE: u64 = 0x4780 << 40;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which is required.
const NO_SYNC: c_uint = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`
const MOVE: c_uint = 1;

/// The number of a handle. The worker knows whether the object exists.
fn number(object: CUuserObject) -> Outcome<u64> {
    match (object as u64).checked_sub(BASE) {
        Some(number) if number < 1 << 40 => Ok(number),
        _ => Err(codes::INVALID_VALUE),
    }
}

/// The number of a graph.
fn graph(graph: CUgraph) -> Outcome<u32> {
    match handles::valid(Kind::Graph, graph as u64)? {
        0 => Err(codes::INVALID_VALUE),
        number => Ok(number),
    }
}

entry_points! {
    fn cuUserObjectCreate(
        object_out: *mut CUuserObject,
        ptr: *mut c_void,
        destroy: CUhostFn,
        initialRefcount: c_uint,
        flags: c_uint,
    ) {
        let link = connected()?;
        let destroy = destroy.ok_or(codes::INVALID_VALUE)?;
        if object_out.is_null() || flags != NO_SYNC {
            return Err(codes::INVALID_VALUE);
        }
        let data = ptr as u64;
        let number = link.register_unawaited_callback(Box::new(move |_| {
            // SAFETY: the program's function is called with the argument that it expects.
            unsafe { destroy(data as *mut c_void) };
        }));
        let made = link.ask(&CreateUserObject { number, count: initialRefcount });
        made.inspect_err(|_| link.cancel_callback(number))?;
        put(object_out, (BASE + number) as CUuserObject)
    }

    fn cuUserObjectRetain(object: CUuserObject, count: c_uint) {
        let (graph, number) = (0, number(object)?);
        connected()?.ask(&RetainUserObject { graph, number, count, moves: false })
    }

    fn cuUserObjectRelease(object: CUuserObject, count: c_uint) {
        let (graph, number) = (0, number(object)?);
        connected()?.ask(&ReleaseUserObject { graph, number, count })
    }

    fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint) {
        if flags & !MOVE != 0 {
            return Err(codes::INVALID_VALUE);
        }
        let (graph, number) = (self::graph(graph)?, number(object)?);
        connected()?.ask(&RetainUserObject { graph, number, count, moves: flags == MOVE })
    }

    fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: c_uint) {
        let (graph, number) = (self::graph(graph)?, number(object)?);
        connected()?.ask(&ReleaseUserObject { graph, number, count })
    }
}
