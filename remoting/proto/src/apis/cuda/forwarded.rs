//! Entry points that are carried to the worker parameter by parameter, as the API's definition
//! describes them. Both sides name them by their place in [`ALL`].
//!
//! What is here takes and gives numbers, handles, texts, and arrays of plain data: nothing that holds
//! an address of a host's memory.

use crate::wire::codec::{named, with};

/// An entry point.
#[derive(Clone, Copy, Debug)]
pub struct Forwarded {
    /// Its symbol.
    pub symbol: &'static str,
    /// Parameters for which another rule holds than the definition has: `In`, `Out` or `InOut` with
    /// a count of elements, or `Null` for what is not passed on.
    pub rules: &'static [(&'static str, &'static str)],
    /// Whether it gives the device work of its own, for which it needs a turn where the device is shared.
    pub works: bool,
}

/// One that gives the device no work.
const fn plain(symbol: &'static str) -> Forwarded {
    ruled(symbol, &[])
}

/// The same, with other rules for its parameters.
const fn ruled(symbol: &'static str, rules: &'static [(&'static str, &'static str)]) -> Forwarded {
    Forwarded {
        symbol,
        rules,
        works: false,
    }
}

/// One that gives the device work: it copies to the device what had been kept on the host.
const fn working(symbol: &'static str) -> Forwarded {
    Forwarded {
        works: true,
        ..plain(symbol)
    }
}

/// After these nodes.
const AFTER: &[(&str, &str)] = &[("dependencies", "In(numDependencies)")];
const EDGES: &[(&str, &str)] = &[
    ("from", "In(numDependencies)"),
    ("to", "In(numDependencies)"),
];
const EDGES_DATA: &[(&str, &str)] = &[
    ("from", "In(numDependencies)"),
    ("to", "In(numDependencies)"),
    ("edgeData", "In(numDependencies)"),
];
/// What a graph has of them.
const ALL_EDGES: &[(&str, &str)] = &[
    ("from", "Out(*numEdges)"),
    ("to", "Out(*numEdges)"),
    ("numEdges", "InOut(1)"),
];
const ALL_EDGES_DATA: &[(&str, &str)] = &[
    ("from", "Out(*numEdges)"),
    ("to", "Out(*numEdges)"),
    ("edgeData", "Out(*numEdges)"),
    ("numEdges", "InOut(1)"),
];
/// What a node has of them.
const BEFORE: &[(&str, &str)] = &[
    ("dependencies", "Out(*numDependencies)"),
    ("edgeData", "Out(*numDependencies)"),
    ("numDependencies", "InOut(1)"),
];
const BEHIND: &[(&str, &str)] = &[
    ("dependentNodes", "Out(*numDependentNodes)"),
    ("edgeData", "Out(*numDependentNodes)"),
    ("numDependentNodes", "InOut(1)"),
];

/// All of them.
pub const ALL: &[Forwarded] = &[
    // Devices and contexts.
    plain("cuDeviceCanAccessPeer"),
    plain("cuDeviceGetP2PAttribute"),
    plain("cuDeviceGetDefaultMemPool"),
    plain("cuDeviceGetMemPool"),
    plain("cuDeviceSetMemPool"),
    plain("cuDeviceGraphMemTrim"),
    ruled("cuDeviceGetGraphMemAttribute", &[("value", "Out(8)")]),
    ruled("cuDeviceSetGraphMemAttribute", &[("value", "In(8)")]),
    plain("cuDeviceGetTexture1DLinearMaxWidth"),
    plain("cuDeviceGetExecAffinitySupport"),
    plain("cuDeviceGetProperties"),
    plain("cuDevicePrimaryCtxRetain"),
    plain("cuDevicePrimaryCtxRelease_v2"),
    plain("cuDevicePrimaryCtxSetFlags_v2"),
    plain("cuDevicePrimaryCtxGetState"),
    plain("cuDevicePrimaryCtxReset_v2"),
    plain("cuCtxCreate_v2"),
    plain("cuCtxDestroy_v2"),
    plain("cuCtxGetFlags"),
    plain("cuCtxSetFlags"),
    plain("cuCtxGetId"),
    plain("cuCtxSetLimit"),
    plain("cuCtxGetLimit"),
    plain("cuCtxGetCacheConfig"),
    plain("cuCtxSetCacheConfig"),
    plain("cuCtxGetSharedMemConfig"),
    plain("cuCtxSetSharedMemConfig"),
    plain("cuCtxGetApiVersion"),
    plain("cuCtxGetStreamPriorityRange"),
    plain("cuCtxResetPersistingL2Cache"),
    plain("cuCtxEnablePeerAccess"),
    plain("cuCtxDisablePeerAccess"),
    plain("cuCtxRecordEvent"),
    plain("cuCtxWaitEvent"),
    // Modules, libraries, kernels.
    plain("cuModuleUnload"),
    plain("cuModuleGetLoadingMode"),
    plain("cuModuleGetFunction"),
    plain("cuModuleGetFunctionCount"),
    plain("cuModuleGetGlobal_v2"),
    plain("cuLibraryUnload"),
    plain("cuLibraryGetKernel"),
    plain("cuLibraryGetKernelCount"),
    plain("cuLibraryGetModule"),
    plain("cuLibraryGetGlobal"),
    plain("cuLibraryGetManaged"),
    plain("cuKernelGetFunction"),
    plain("cuKernelGetLibrary"),
    plain("cuKernelGetAttribute"),
    plain("cuKernelSetAttribute"),
    plain("cuKernelSetCacheConfig"),
    plain("cuKernelGetParamInfo"),
    plain("cuFuncGetAttribute"),
    plain("cuFuncSetAttribute"),
    plain("cuFuncSetCacheConfig"),
    plain("cuFuncSetSharedMemConfig"),
    plain("cuFuncGetModule"),
    plain("cuFuncGetParamInfo"),
    plain("cuFuncIsLoaded"),
    plain("cuFuncLoad"),
    plain("cuOccupancyMaxActiveBlocksPerMultiprocessor"),
    plain("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags"),
    plain("cuOccupancyAvailableDynamicSMemPerBlock"),
    // Pools and physical memory.
    plain("cuMemPoolTrimTo"),
    ruled("cuMemPoolSetAttribute", &[("value", "In(8)")]),
    ruled("cuMemPoolGetAttribute", &[("value", "Out(8)")]),
    plain("cuMemPoolSetAccess"),
    ruled("cuMemPoolGetAccess", &[("location", "In(1)")]),
    plain("cuMemPoolCreate"),
    plain("cuMemPoolDestroy"),
    plain("cuMemAddressReserve"),
    plain("cuMemAddressFree"),
    plain("cuMemCreate"),
    plain("cuMemRelease"),
    plain("cuMemMap"),
    plain("cuMemUnmap"),
    plain("cuMemSetAccess"),
    plain("cuMemGetAccess"),
    plain("cuMemGetAllocationGranularity"),
    plain("cuMemGetAllocationPropertiesFromHandle"),
    plain("cuMemRetainAllocationHandle"),
    // Streams and events.
    plain("cuStreamCreate"),
    plain("cuStreamCreateWithPriority"),
    plain("cuStreamDestroy_v2"),
    plain("cuStreamQuery"),
    plain("cuStreamGetFlags"),
    plain("cuStreamGetPriority"),
    plain("cuStreamGetId"),
    plain("cuStreamGetCtx"),
    plain("cuStreamWaitEvent"),
    plain("cuStreamWriteValue32_v2"),
    plain("cuStreamWriteValue64_v2"),
    plain("cuStreamWaitValue32_v2"),
    plain("cuStreamWaitValue64_v2"),
    plain("cuStreamCopyAttributes"),
    plain("cuStreamGetAttribute"),
    plain("cuStreamSetAttribute"),
    plain("cuEventCreate"),
    plain("cuEventDestroy_v2"),
    plain("cuEventQuery"),
    plain("cuEventRecord"),
    plain("cuEventRecordWithFlags"),
    plain("cuEventElapsedTime"),
    plain("cuEventElapsedTime_v2"),
    // Capture and graphs.
    plain("cuStreamBeginCapture_v2"),
    plain("cuStreamBeginCaptureToGraph"),
    plain("cuStreamEndCapture"),
    plain("cuStreamIsCapturing"),
    ruled(
        "cuStreamUpdateCaptureDependencies",
        &[("dependencies", "In(numDependencies)")],
    ),
    ruled(
        "cuStreamUpdateCaptureDependencies_v2",
        &[
            ("dependencies", "In(numDependencies)"),
            ("dependencyData", "In(numDependencies)"),
        ],
    ),
    plain("cuGraphCreate"),
    plain("cuGraphDestroy"),
    ruled("cuGraphAddEmptyNode", AFTER),
    ruled("cuGraphAddChildGraphNode", AFTER),
    plain("cuGraphChildGraphNodeGetGraph"),
    ruled("cuGraphAddEventRecordNode", AFTER),
    plain("cuGraphEventRecordNodeGetEvent"),
    plain("cuGraphEventRecordNodeSetEvent"),
    ruled("cuGraphAddEventWaitNode", AFTER),
    plain("cuGraphEventWaitNodeGetEvent"),
    plain("cuGraphEventWaitNodeSetEvent"),
    ruled("cuGraphAddMemsetNode", AFTER),
    plain("cuGraphMemsetNodeSetParams"),
    plain("cuGraphExecMemsetNodeSetParams"),
    plain("cuGraphConditionalHandleCreate"),
    plain("cuGraphClone"),
    plain("cuGraphNodeFindInClone"),
    plain("cuGraphNodeGetType"),
    ruled("cuGraphGetNodes", &[("nodes", "Out(*numNodes)")]),
    ruled(
        "cuGraphGetRootNodes",
        &[("rootNodes", "Out(*numRootNodes)")],
    ),
    ruled("cuGraphGetEdges", ALL_EDGES),
    ruled("cuGraphGetEdges_v2", ALL_EDGES_DATA),
    ruled("cuGraphNodeGetDependencies", BEFORE),
    ruled("cuGraphNodeGetDependencies_v2", BEFORE),
    ruled("cuGraphNodeGetDependentNodes", BEHIND),
    ruled("cuGraphNodeGetDependentNodes_v2", BEHIND),
    ruled("cuGraphAddDependencies", EDGES),
    ruled("cuGraphAddDependencies_v2", EDGES_DATA),
    ruled("cuGraphRemoveDependencies", EDGES),
    ruled("cuGraphRemoveDependencies_v2", EDGES_DATA),
    plain("cuGraphDestroyNode"),
    plain("cuGraphInstantiateWithFlags"),
    plain("cuGraphExecGetFlags"),
    plain("cuGraphExecChildGraphNodeSetParams"),
    plain("cuGraphExecEventRecordNodeSetEvent"),
    plain("cuGraphExecEventWaitNodeSetEvent"),
    plain("cuGraphNodeSetEnabled"),
    plain("cuGraphNodeGetEnabled"),
    plain("cuGraphExecDestroy"),
    working("cuGraphUpload"),
    plain("cuGraphExecUpdate_v2"),
    plain("cuGraphKernelNodeCopyAttributes"),
    plain("cuGraphKernelNodeGetAttribute"),
    plain("cuGraphKernelNodeSetAttribute"),
    // Arrays, textures and surfaces.
    plain("cuArrayCreate_v2"),
    plain("cuArray3DCreate_v2"),
    plain("cuArrayDestroy"),
    plain("cuArrayGetDescriptor_v2"),
    plain("cuArray3DGetDescriptor_v2"),
    plain("cuMipmappedArrayCreate"),
    plain("cuMipmappedArrayDestroy"),
    plain("cuMipmappedArrayGetLevel"),
    plain("cuTexObjectCreate"),
    plain("cuTexObjectDestroy"),
    plain("cuSurfObjectCreate"),
    plain("cuSurfObjectDestroy"),
    // Tensor maps.
    ruled(
        "cuTensorMapEncodeTiled",
        &[("globalStrides", "In(tensorRank-1)")],
    ),
    ruled(
        "cuTensorMapEncodeIm2col",
        &[
            ("globalStrides", "In(tensorRank-1)"),
            ("pixelBoxLowerCorner", "In(tensorRank-2)"),
            ("pixelBoxUpperCorner", "In(tensorRank-2)"),
        ],
    ),
];

/// Hash of the list.
pub const FINGERPRINT: u64 = {
    let mut hash = named("forwarded");
    let mut at = 0;
    while at < ALL.len() {
        hash = with(hash, named(ALL[at].symbol));
        let mut rule = 0;
        while rule < ALL[at].rules.len() {
            hash = with(
                with(hash, named(ALL[at].rules[rule].0)),
                named(ALL[at].rules[rule].1),
            );
            rule += 1;
        }
        at += 1;
    }
    hash
};

/// The place of a symbol in the list.
///
/// # Panics
/// When it is not there: in a constant, the compiler says so.
pub const fn number(symbol: &str) -> u16 {
    let wanted = symbol.as_bytes();
    let mut at = 0;
    while at < ALL.len() {
        let name = ALL[at].symbol.as_bytes();
        let mut same = name.len() == wanted.len();
        let mut byte = 0;
        while same && byte < name.len() {
            same = name[byte] == wanted[byte];
            byte += 1;
        }
        if same {
            return at as u16;
        }
        at += 1;
    }
    panic!("no forwarded entry point has this symbol")
}
