//! Graph nodes that allocate memory, or have graphs of their own.

use std::ptr::null_mut;

use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{
    Kind,
    calls::{AddAllocNode, AddConditionalNode, AddFreeNode},
    codes,
};

use super::{
    Server,
    driver::{cu, outcome},
};

/// Maximum number of memory ranges, including those of graphs.
pub(super) const MOST: usize = 1 << 20;
/// Maximum number of body graphs of a conditional node.
const MOST_GRAPHS: u32 = 1024;

impl Server {
    /// Looks up a graph that is not part of another: only for these is it known when their memory
    /// is released.
    fn own_graph(&self, graph: u32) -> Result<CUgraph, i32> {
        let graph = self.backend.objects.get(Kind::Graph, graph)?;
        match graph.owner {
            0 => Ok(graph.raw as CUgraph),
            _ => Err(codes::NOT_SUPPORTED),
        }
    }

    pub(super) fn add_alloc_node(&mut self, call: &AddAllocNode) -> Result<(u32, u64), i32> {
        self.backend.objects.check_room()?;
        if self.backend.memory.count() >= MOST {
            return Err(codes::OUT_OF_MEMORY);
        }
        self.enter(call.context)?;
        let device = self
            .backend
            .objects
            .get(Kind::Context, call.context)?
            .device;
        let graph = self.own_graph(call.graph)?;
        let after = self.nodes(&call.after)?;
        // This only checks the quota: each executable graph is charged by itself.
        drop(self.charge(call.size)?);
        // SAFETY: numbers and pointers, for which zero is a valid value.
        let mut params: CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { std::mem::zeroed() };
        params.poolProps.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        params.poolProps.location.r#type = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        params.poolProps.location.id = device;
        params.bytesize = call.size as usize;
        let mut node = null_mut();
        outcome(cu!(
            self.backend.api,
            cuGraphAddMemAllocNode(
                &raw mut node,
                graph,
                after.as_ptr(),
                after.len(),
                &raw mut params,
            )
        ))?;
        let memory = &mut self.backend.memory;
        memory.insert_of_graph(params.dptr, call.size, call.context, call.graph);
        let objects = &mut self.backend.objects;
        let number = objects.number(Kind::Node, node as usize, 0, call.graph);
        Ok((number, params.dptr))
    }

    pub(super) fn add_free_node(&mut self, call: &AddFreeNode) -> Result<u32, i32> {
        self.backend.objects.check_room()?;
        self.enter(call.context)?;
        let graph = self.own_graph(call.graph)?;
        let after = self.nodes(&call.after)?;
        let stretch = self.backend.memory.get(call.address);
        if stretch.is_none_or(|stretch| !stretch.of_graph) {
            return Err(codes::INVALID_VALUE);
        }
        let mut node = null_mut();
        outcome(cu!(
            self.backend.api,
            cuGraphAddMemFreeNode(
                &raw mut node,
                graph,
                after.as_ptr(),
                after.len(),
                call.address,
            )
        ))?;
        self.backend.memory.freed_by_graph(call.address, call.graph);
        let objects = &mut self.backend.objects;
        Ok(objects.number(Kind::Node, node as usize, 0, call.graph))
    }

    pub(super) fn add_conditional_node(
        &mut self,
        call: &AddConditionalNode,
    ) -> Result<(u32, Vec<u32>), i32> {
        self.backend.objects.check_room()?;
        let context = self.enter(call.context)? as CUcontext;
        if !(1..=MOST_GRAPHS).contains(&call.size) {
            return Err(codes::INVALID_VALUE);
        }
        let graph = self.backend.objects.get(Kind::Graph, call.graph)?;
        let graph = graph.raw as CUgraph;
        // The driver checks which graph it belongs to: the node may be in a body of that graph.
        if !self.backend.conditionals.contains_key(&call.handle) {
            return Err(codes::INVALID_VALUE);
        }
        let after = self.nodes(&call.after)?;
        // SAFETY: numbers and pointers, for which zero is a valid value.
        let mut params: CUgraphNodeParams = unsafe { std::mem::zeroed() };
        params.r#type = CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL;
        params.anonymous2.conditional = CUDA_CONDITIONAL_NODE_PARAMS {
            handle: call.handle,
            r#type: CUgraphConditionalNodeType_enum(call.kind),
            size: call.size,
            phGraph_out: null_mut(),
            ctx: context,
        };
        let mut node = null_mut();
        outcome(cu!(
            self.backend.api,
            cuGraphAddNode_v2(
                &raw mut node,
                graph,
                after.as_ptr(),
                std::ptr::null(),
                after.len(),
                &raw mut params,
            )
        ))?;
        // SAFETY: the variant that was written, in which the driver has stored its array.
        let bodies = unsafe { params.anonymous2.conditional.phGraph_out };
        let objects = &mut self.backend.objects;
        let node = objects.number(Kind::Node, node as usize, 0, call.graph);
        // The bodies are destroyed with the node.
        let mut numbers = Vec::new();
        for index in 0..call.size as usize {
            objects.check_room()?;
            // SAFETY: the array has `call.size` graphs, for as long as the node exists.
            let body = unsafe { bodies.add(index).read() };
            numbers.push(objects.number(Kind::Graph, body as usize, 0, node));
        }
        Ok((node, numbers))
    }
}
