//! A graph in the language of Graphviz, as the driver writes it without any flags.

use std::{
    ffi::{CStr, OsStr, c_char, c_uint},
    fmt::Write,
    os::unix::ffi::OsStrExt,
};

use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{Kind, codes};

use crate::{
    entry::{Outcome, entry_points},
    forward::forward,
    handles, landing,
};

/// The names of `CUgraphNodeType`.
const KINDS: &[&str] = &[
    "KERNEL",
    "MEMCPY",
    "MEMSET",
    "HOST",
    "GRAPH",
    "EMPTY",
    "WAIT_EVENT",
    "EVENT_RECORD",
    "EXT_SEMAS_SIGNAL",
    "EXT_SEMAS_WAIT",
    "MEM_ALLOC",
    "MEM_FREE",
    "BATCH_MEM_OP",
    "CONDITIONAL",
];

/// The handles of a graph's nodes.
fn nodes(graph: u64) -> Outcome<Vec<u64>> {
    let mut count = 0usize;
    // SAFETY: the pointer is to a local.
    unsafe { forward("cuGraphGetNodes", &[graph, 0, &raw mut count as u64])? };
    let mut nodes = vec![0u64; count];
    let words = [graph, nodes.as_mut_ptr() as u64, &raw mut count as u64];
    // SAFETY: the array has as many elements as are requested.
    unsafe { forward("cuGraphGetNodes", &words)? };
    nodes.truncate(count);
    Ok(nodes)
}

/// The kind of a node. Empty if the driver does not say.
fn kind(node: u64) -> &'static str {
    let mut kind = u32::MAX;
    // SAFETY: the pointer is to a local.
    let told = unsafe { forward("cuGraphNodeGetType", &[node, &raw mut kind as u64]) };
    let name = KINDS.get(kind as usize).filter(|_| told.is_ok());
    name.copied().unwrap_or_default()
}

/// Writes a graph's nodes and edges.
fn dot(graph: u64) -> Outcome<String> {
    let all = nodes(graph)?;
    let number = |node: u64| all.iter().position(|one| *one == node);
    let mut text = String::from(
        "digraph dot {\nsubgraph cluster_1 {\nlabel=\"graph_1\" graph[style=\"dashed\"];\n",
    );
    for (number, node) in all.iter().enumerate() {
        let kind = kind(*node);
        let _ = writeln!(
            text,
            "\"graph_1_node_{number}\"[style=\"solid\" shape=\"rectangle\" label=\"{number}\\n{kind}\"];"
        );
    }
    for (from, to) in landing::edges(handles::valid(Kind::Graph, graph)?)? {
        let ends = [from, to].map(|node| number(handles::handle(Kind::Node, node)));
        if let [Some(from), Some(to)] = ends {
            let _ = writeln!(text, "\"graph_1_node_{from}\" -> \"graph_1_node_{to}\";");
        }
    }
    text.push_str("}\n}\n");
    Ok(text)
}

entry_points! {
    fn cuGraphDebugDotPrint(hGraph: CUgraph, path: *const c_char, flags: c_uint) {
        // The flags only ask for more details of each node.
        let _ = flags;
        if path.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let text = dot(hGraph as u64)?;
        let path = OsStr::from_bytes(CStr::from_ptr(path).to_bytes());
        std::fs::write(path, text).map_err(|_| codes::OPERATING_SYSTEM)
    }
}
