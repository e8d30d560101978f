//! Launches of kernels and graphs.

use std::{ffi::c_void, ptr::null_mut};

use cuda_definition::driver::types::*;
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{AddKernelNode, Clusters, Launch, LaunchGraph, SetKernelNode, Shape},
        codes,
    },
    wire::{Blob, Flags, Header},
};
use remoting_transport::endpoint::Gone;

use super::{
    Server,
    backend::Submitted,
    driver::{cu, outcome},
    objects::Layout,
};

/// Maximum number of attributes of a launch.
const ATTRIBUTES: usize = 64;
/// Whether an attribute of a launch, node or stream refers to no object and no host memory.
pub(super) fn is_plain(attribute: u32) -> bool {
    matches!(attribute, 0..=6 | 8..=11 | 14 | 16)
}

/// Up to this many parameters, and up to this many words in total, need no allocation.
const USUAL: usize = 24;

/// A kernel's parameters for the driver, one address each.
struct Parameters {
    few: [*mut c_void; USUAL],
    words: [u64; USUAL],
    /// For a kernel that takes more: the addresses and the words that they point into.
    many: Option<(Vec<*mut c_void>, Vec<u64>)>,
    count: usize,
}

impl Parameters {
    /// Takes the parameters that a client has sent, if their size matches the kernel's.
    fn new(layout: &Layout, sent: &Blob) -> Result<Self, i32> {
        if sent.0.len() != layout.size as usize {
            return Err(codes::INVALID_VALUE);
        }
        let (count, words) = (layout.parameters.len(), sent.0.len().div_ceil(8));
        let many =
            (count > USUAL || words > USUAL).then(|| (vec![null_mut(); count], vec![0u64; words]));
        let mut parameters = Self {
            few: [null_mut(); USUAL],
            words: [0; USUAL],
            many,
            count,
        };
        let (_, words) = parameters.parts();
        for (word, part) in words.iter_mut().zip(sent.0.chunks(8)) {
            let mut eight = [0; 8];
            eight[..part.len()].copy_from_slice(part);
            *word = u64::from_le_bytes(eight);
        }
        Ok(parameters)
    }

    fn parts(&mut self) -> (&mut [*mut c_void], &mut [u64]) {
        match &mut self.many {
            Some((each, words)) => (each, words),
            None => (&mut self.few, &mut self.words),
        }
    }

    /// The driver's `kernelParams`, valid while `self` does not move; null for a kernel without
    /// parameters.
    fn each(&mut self, layout: &Layout) -> *mut *mut c_void {
        if self.count == 0 {
            return null_mut();
        }
        let (each, words) = self.parts();
        let start = words.as_mut_ptr().cast::<u8>();
        for (place, (offset, _)) in each.iter_mut().zip(&layout.parameters) {
            *place = start.wrapping_add(*offset as usize).cast();
        }
        each.as_mut_ptr()
    }
}

/// The attributes for the driver, and a launch configuration that contains them.
fn configured(
    shape: &Shape,
    stream: usize,
    sent: &Blob,
) -> Result<(CUlaunchConfig, Vec<CUlaunchAttribute>), i32> {
    let size = size_of::<CUlaunchAttribute>();
    let count = sent.0.len() / size;
    if !sent.0.len().is_multiple_of(size) || count > ATTRIBUTES {
        return Err(codes::INVALID_VALUE);
    }
    let mut attributes = Vec::with_capacity(count);
    for bytes in sent.0.chunks(size) {
        // SAFETY: all variants that are accepted are plain numbers; the others are refused next.
        let attribute = unsafe { bytes.as_ptr().cast::<CUlaunchAttribute>().read_unaligned() };
        if !is_plain(attribute.id.0) {
            return Err(codes::NOT_SUPPORTED);
        }
        attributes.push(attribute);
    }
    let config = CUlaunchConfig {
        gridDimX: shape.grid[0],
        gridDimY: shape.grid[1],
        gridDimZ: shape.grid[2],
        blockDimX: shape.block[0],
        blockDimY: shape.block[1],
        blockDimZ: shape.block[2],
        sharedMemBytes: shape.shared,
        hStream: stream as CUstream,
        attrs: if count == 0 {
            null_mut()
        } else {
            attributes.as_mut_ptr()
        },
        numAttrs: count as u32,
    };
    Ok((config, attributes))
}

impl Server {
    pub(super) fn launch(&mut self, header: Header, call: &Launch) -> Result<(), Gone> {
        let outcome = (|| {
            let submitted = self.submit_to(call.context, call.stream)?;
            let layout = self.layout(call.function)?;
            self.backend.prints |= layout.prints;
            let function = self.backend.objects.get(Kind::Function, call.function)?;
            let function = function.raw as CUfunction;
            let mut parameters = Parameters::new(&layout, &call.parameters)?;
            let (api, shape) = (&self.backend.api, &call.shape);
            let ([x, y, z], [a, b, c]) = (shape.grid, shape.block);
            let stream = submitted.raw as CUstream;
            outcome(if !call.attributes.0.is_empty() {
                let (config, _attributes) = configured(shape, submitted.raw, &call.attributes)?;
                let config = &raw const config;
                cu!(
                    api,
                    cuLaunchKernelEx(config, function, parameters.each(&layout), null_mut())
                )
            } else if call.cooperative {
                let each = parameters.each(&layout);
                cu!(
                    api,
                    cuLaunchCooperativeKernel(
                        function,
                        x,
                        y,
                        z,
                        a,
                        b,
                        c,
                        shape.shared,
                        stream,
                        each,
                    )
                )
            } else {
                let each = parameters.each(&layout);
                cu!(
                    api,
                    cuLaunchKernel(
                        function,
                        x,
                        y,
                        z,
                        a,
                        b,
                        c,
                        shape.shared,
                        stream,
                        each,
                        null_mut(),
                    )
                )
            })?;
            self.backend.launched = Some(submitted.raw);
            Ok(submitted)
        })();
        self.conclude_launch(header, call.context, outcome)
    }

    /// Finishes a launch. A client that asks learns the result of the launch itself, without
    /// waiting for the launched work.
    fn conclude_launch(
        &mut self,
        header: Header,
        context: u32,
        outcome: Result<Submitted, i32>,
    ) -> Result<(), Gone> {
        if header.flags.has(Flags::ANSWER) {
            self.answer(header, &outcome.map(drop))?;
            if outcome.is_err() {
                return Ok(());
            }
        }
        let header = Header {
            flags: Flags::default(),
            ..header
        };
        // A failure that was not reported is deferred.
        self.conclude(header, context, None, outcome)
    }

    pub(super) fn launch_graph(&mut self, header: Header, call: &LaunchGraph) -> Result<(), Gone> {
        let outcome = (|| {
            let submitted = self.submit_to(call.context, call.stream)?;
            let graph = self.backend.objects.get(Kind::Executable, call.graph)?;
            let charge = graph.charge.clone();
            let (graph, stream) = (graph.raw as CUgraphExec, submitted.raw as CUstream);
            self.backend.passages.launches(call.context);
            outcome(cu!(self.backend.api, cuGraphLaunch(graph, stream)))?;
            if let Some(charge) = charge
                && !self.is_captured(submitted.raw)
            {
                self.backend.memory.launched(call.graph, &charge);
                self.charge_until_done(call.context, Some(call.stream), charge);
            }
            self.note_calling(submitted);
            Ok(submitted)
        })();
        self.conclude(header, call.context, None, outcome)
    }

    /// A kernel node's parameters, and the memory that they point to.
    fn node(
        &mut self,
        context: u32,
        function: u32,
        shape: &Shape,
        parameters: &Blob,
    ) -> Result<(CUDA_KERNEL_NODE_PARAMS, Box<Parameters>), i32> {
        self.enter(context)?;
        let layout = self.layout(function)?;
        self.backend.prints |= layout.prints;
        // Boxed, so that it stays in place when its owner moves.
        let mut parameters = Box::new(Parameters::new(&layout, parameters)?);
        let object = self.backend.objects.get(Kind::Function, function)?;
        let is_kernel = object.kind == Kind::Kernel;
        let node = CUDA_KERNEL_NODE_PARAMS {
            func: if is_kernel {
                null_mut()
            } else {
                object.raw as CUfunction
            },
            gridDimX: shape.grid[0],
            gridDimY: shape.grid[1],
            gridDimZ: shape.grid[2],
            blockDimX: shape.block[0],
            blockDimY: shape.block[1],
            blockDimZ: shape.block[2],
            sharedMemBytes: shape.shared,
            kernelParams: parameters.each(&layout),
            extra: null_mut(),
            kern: if is_kernel {
                object.raw as CUkernel
            } else {
                null_mut()
            },
            ctx: null_mut(),
        };
        Ok((node, parameters))
    }

    /// Looks up the driver's handles of nodes.
    pub(super) fn nodes(&self, ids: &[u32]) -> Result<Vec<CUgraphNode>, i32> {
        let node = |id: &u32| self.backend.objects.get(Kind::Node, *id);
        ids.iter()
            .map(|id| node(id).map(|node| node.raw as CUgraphNode))
            .collect()
    }

    pub(super) fn add_kernel_node(&mut self, call: &AddKernelNode) -> Result<u32, i32> {
        self.backend.objects.check_room()?;
        let (node, _parameters) =
            self.node(call.context, call.function, &call.shape, &call.parameters)?;
        let graph = self.backend.objects.get(Kind::Graph, call.graph)?.raw as CUgraph;
        let after = self.nodes(&call.after)?;
        let mut added = null_mut();
        outcome(cu!(
            self.backend.api,
            cuGraphAddKernelNode_v2(
                &raw mut added,
                graph,
                after.as_ptr(),
                after.len(),
                &raw const node,
            )
        ))?;
        let objects = &mut self.backend.objects;
        Ok(objects.number(Kind::Node, added as usize, 0, call.graph))
    }

    pub(super) fn set_kernel_node(&mut self, call: &SetKernelNode) -> Result<(), i32> {
        let (params, _parameters) =
            self.node(call.context, call.function, &call.shape, &call.parameters)?;
        let (api, objects) = (&self.backend.api, &self.backend.objects);
        let node = objects.get(Kind::Node, call.node)?.raw as CUgraphNode;
        outcome(match call.executable {
            0 => cu!(api, cuGraphKernelNodeSetParams_v2(node, &raw const params)),
            id => {
                let graph = objects.get(Kind::Executable, id)?.raw as CUgraphExec;
                cu!(
                    api,
                    cuGraphExecKernelNodeSetParams_v2(graph, node, &raw const params)
                )
            }
        })
    }

    pub(super) fn clusters(&mut self, call: &Clusters) -> Result<i32, i32> {
        self.enter(call.context)?;
        let function = self.backend.objects.get(Kind::Function, call.function)?;
        let function = function.raw as CUfunction;
        let (config, _attributes) = configured(&call.shape, 0, &call.attributes)?;
        let (api, config, mut count) = (&self.backend.api, &raw const config, 0);
        outcome(if call.potential {
            cu!(
                api,
                cuOccupancyMaxPotentialClusterSize(&raw mut count, function, config)
            )
        } else {
            cu!(
                api,
                cuOccupancyMaxActiveClusters(&raw mut count, function, config)
            )
        })?;
        Ok(count)
    }
}
