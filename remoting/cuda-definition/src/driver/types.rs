// Written by `cargo xtask cuda-definition`: change annotations.txt, not this.

//! C's types, each with the layout that the C compiler gives it.

use core::{ffi::*, mem::offset_of};

pub type CUDA_ARRAY3D_DESCRIPTOR = CUDA_ARRAY3D_DESCRIPTOR_v2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_ARRAY3D_DESCRIPTOR_st {
    pub Width: usize,
    pub Height: usize,
    pub Depth: usize,
    pub Format: CUarray_format,
    pub NumChannels: c_uint,
    pub Flags: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_ARRAY3D_DESCRIPTOR_st>() == 40 && align_of::<CUDA_ARRAY3D_DESCRIPTOR_st>() == 8);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_st, Width) == 0);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_st, Height) == 8);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_st, Depth) == 16);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_st, Format) == 24);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_st, NumChannels) == 28);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_st, Flags) == 32);
};

pub type CUDA_ARRAY3D_DESCRIPTOR_v1 = CUDA_ARRAY3D_DESCRIPTOR_v1_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_ARRAY3D_DESCRIPTOR_v1_st {
    pub Width: c_uint,
    pub Height: c_uint,
    pub Depth: c_uint,
    pub Format: CUarray_format,
    pub NumChannels: c_uint,
    pub Flags: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_ARRAY3D_DESCRIPTOR_v1_st>() == 24 && align_of::<CUDA_ARRAY3D_DESCRIPTOR_v1_st>() == 4);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_v1_st, Width) == 0);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_v1_st, Height) == 4);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_v1_st, Depth) == 8);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_v1_st, Format) == 12);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_v1_st, NumChannels) == 16);
    assert!(offset_of!(CUDA_ARRAY3D_DESCRIPTOR_v1_st, Flags) == 20);
};

pub type CUDA_ARRAY3D_DESCRIPTOR_v2 = CUDA_ARRAY3D_DESCRIPTOR_st;

pub type CUDA_ARRAY_DESCRIPTOR = CUDA_ARRAY_DESCRIPTOR_v2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_ARRAY_DESCRIPTOR_st {
    pub Width: usize,
    pub Height: usize,
    pub Format: CUarray_format,
    pub NumChannels: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_ARRAY_DESCRIPTOR_st>() == 24 && align_of::<CUDA_ARRAY_DESCRIPTOR_st>() == 8);
    assert!(offset_of!(CUDA_ARRAY_DESCRIPTOR_st, Width) == 0);
    assert!(offset_of!(CUDA_ARRAY_DESCRIPTOR_st, Height) == 8);
    assert!(offset_of!(CUDA_ARRAY_DESCRIPTOR_st, Format) == 16);
    assert!(offset_of!(CUDA_ARRAY_DESCRIPTOR_st, NumChannels) == 20);
};

pub type CUDA_ARRAY_DESCRIPTOR_v1 = CUDA_ARRAY_DESCRIPTOR_v1_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_ARRAY_DESCRIPTOR_v1_st {
    pub Width: c_uint,
    pub Height: c_uint,
    pub Format: CUarray_format,
    pub NumChannels: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_ARRAY_DESCRIPTOR_v1_st>() == 16 && align_of::<CUDA_ARRAY_DESCRIPTOR_v1_st>() == 4);
    assert!(offset_of!(CUDA_ARRAY_DESCRIPTOR_v1_st, Width) == 0);
    assert!(offset_of!(CUDA_ARRAY_DESCRIPTOR_v1_st, Height) == 4);
    assert!(offset_of!(CUDA_ARRAY_DESCRIPTOR_v1_st, Format) == 8);
    assert!(offset_of!(CUDA_ARRAY_DESCRIPTOR_v1_st, NumChannels) == 12);
};

pub type CUDA_ARRAY_DESCRIPTOR_v2 = CUDA_ARRAY_DESCRIPTOR_st;

pub type CUDA_ARRAY_MEMORY_REQUIREMENTS = CUDA_ARRAY_MEMORY_REQUIREMENTS_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_ARRAY_MEMORY_REQUIREMENTS_st {
    pub size: usize,
    pub alignment: usize,
    pub reserved: [c_uint; 4],
}
const _: () = {
    assert!(size_of::<CUDA_ARRAY_MEMORY_REQUIREMENTS_st>() == 32 && align_of::<CUDA_ARRAY_MEMORY_REQUIREMENTS_st>() == 8);
    assert!(offset_of!(CUDA_ARRAY_MEMORY_REQUIREMENTS_st, size) == 0);
    assert!(offset_of!(CUDA_ARRAY_MEMORY_REQUIREMENTS_st, alignment) == 8);
    assert!(offset_of!(CUDA_ARRAY_MEMORY_REQUIREMENTS_st, reserved) == 16);
};

pub type CUDA_ARRAY_MEMORY_REQUIREMENTS_v1 = CUDA_ARRAY_MEMORY_REQUIREMENTS_st;

pub type CUDA_ARRAY_SPARSE_PROPERTIES = CUDA_ARRAY_SPARSE_PROPERTIES_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_ARRAY_SPARSE_PROPERTIES_st {
    pub tileExtent: CUDA_ARRAY_SPARSE_PROPERTIES_st_unnamed1,
    pub miptailFirstLevel: c_uint,
    pub miptailSize: c_ulonglong,
    pub flags: c_uint,
    pub reserved: [c_uint; 4],
}
const _: () = {
    assert!(size_of::<CUDA_ARRAY_SPARSE_PROPERTIES_st>() == 48 && align_of::<CUDA_ARRAY_SPARSE_PROPERTIES_st>() == 8);
    assert!(offset_of!(CUDA_ARRAY_SPARSE_PROPERTIES_st, tileExtent) == 0);
    assert!(offset_of!(CUDA_ARRAY_SPARSE_PROPERTIES_st, miptailFirstLevel) == 12);
    assert!(offset_of!(CUDA_ARRAY_SPARSE_PROPERTIES_st, miptailSize) == 16);
    assert!(offset_of!(CUDA_ARRAY_SPARSE_PROPERTIES_st, flags) == 24);
    assert!(offset_of!(CUDA_ARRAY_SPARSE_PROPERTIES_st, reserved) == 28);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_ARRAY_SPARSE_PROPERTIES_st_unnamed1 {
    pub width: c_uint,
    pub height: c_uint,
    pub depth: c_uint,
}

pub type CUDA_ARRAY_SPARSE_PROPERTIES_v1 = CUDA_ARRAY_SPARSE_PROPERTIES_st;

pub type CUDA_BATCH_MEM_OP_NODE_PARAMS = CUDA_BATCH_MEM_OP_NODE_PARAMS_v1;

pub type CUDA_BATCH_MEM_OP_NODE_PARAMS_v1 = CUDA_BATCH_MEM_OP_NODE_PARAMS_v1_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_BATCH_MEM_OP_NODE_PARAMS_v1_st {
    pub ctx: CUcontext,
    pub count: c_uint,
    pub paramArray: *mut CUstreamBatchMemOpParams,
    pub flags: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_BATCH_MEM_OP_NODE_PARAMS_v1_st>() == 32 && align_of::<CUDA_BATCH_MEM_OP_NODE_PARAMS_v1_st>() == 8);
    assert!(offset_of!(CUDA_BATCH_MEM_OP_NODE_PARAMS_v1_st, ctx) == 0);
    assert!(offset_of!(CUDA_BATCH_MEM_OP_NODE_PARAMS_v1_st, count) == 8);
    assert!(offset_of!(CUDA_BATCH_MEM_OP_NODE_PARAMS_v1_st, paramArray) == 16);
    assert!(offset_of!(CUDA_BATCH_MEM_OP_NODE_PARAMS_v1_st, flags) == 24);
};

pub type CUDA_BATCH_MEM_OP_NODE_PARAMS_v2 = CUDA_BATCH_MEM_OP_NODE_PARAMS_v2_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_BATCH_MEM_OP_NODE_PARAMS_v2_st {
    pub ctx: CUcontext,
    pub count: c_uint,
    pub paramArray: *mut CUstreamBatchMemOpParams,
    pub flags: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_BATCH_MEM_OP_NODE_PARAMS_v2_st>() == 32 && align_of::<CUDA_BATCH_MEM_OP_NODE_PARAMS_v2_st>() == 8);
    assert!(offset_of!(CUDA_BATCH_MEM_OP_NODE_PARAMS_v2_st, ctx) == 0);
    assert!(offset_of!(CUDA_BATCH_MEM_OP_NODE_PARAMS_v2_st, count) == 8);
    assert!(offset_of!(CUDA_BATCH_MEM_OP_NODE_PARAMS_v2_st, paramArray) == 16);
    assert!(offset_of!(CUDA_BATCH_MEM_OP_NODE_PARAMS_v2_st, flags) == 24);
};

pub type CUDA_CHILD_GRAPH_NODE_PARAMS = CUDA_CHILD_GRAPH_NODE_PARAMS_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_CHILD_GRAPH_NODE_PARAMS_st {
    pub graph: CUgraph,
    pub ownership: CUgraphChildGraphNodeOwnership,
}
const _: () = {
    assert!(size_of::<CUDA_CHILD_GRAPH_NODE_PARAMS_st>() == 16 && align_of::<CUDA_CHILD_GRAPH_NODE_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_CHILD_GRAPH_NODE_PARAMS_st, graph) == 0);
    assert!(offset_of!(CUDA_CHILD_GRAPH_NODE_PARAMS_st, ownership) == 8);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_CONDITIONAL_NODE_PARAMS {
    pub handle: CUgraphConditionalHandle,
    pub r#type: CUgraphConditionalNodeType,
    pub size: c_uint,
    pub phGraph_out: *mut CUgraph,
    pub ctx: CUcontext,
}
const _: () = {
    assert!(size_of::<CUDA_CONDITIONAL_NODE_PARAMS>() == 32 && align_of::<CUDA_CONDITIONAL_NODE_PARAMS>() == 8);
    assert!(offset_of!(CUDA_CONDITIONAL_NODE_PARAMS, handle) == 0);
    assert!(offset_of!(CUDA_CONDITIONAL_NODE_PARAMS, r#type) == 8);
    assert!(offset_of!(CUDA_CONDITIONAL_NODE_PARAMS, size) == 12);
    assert!(offset_of!(CUDA_CONDITIONAL_NODE_PARAMS, phGraph_out) == 16);
    assert!(offset_of!(CUDA_CONDITIONAL_NODE_PARAMS, ctx) == 24);
};

pub type CUDA_EVENT_RECORD_NODE_PARAMS = CUDA_EVENT_RECORD_NODE_PARAMS_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EVENT_RECORD_NODE_PARAMS_st {
    pub event: CUevent,
}
const _: () = {
    assert!(size_of::<CUDA_EVENT_RECORD_NODE_PARAMS_st>() == 8 && align_of::<CUDA_EVENT_RECORD_NODE_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_EVENT_RECORD_NODE_PARAMS_st, event) == 0);
};

pub type CUDA_EVENT_WAIT_NODE_PARAMS = CUDA_EVENT_WAIT_NODE_PARAMS_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EVENT_WAIT_NODE_PARAMS_st {
    pub event: CUevent,
}
const _: () = {
    assert!(size_of::<CUDA_EVENT_WAIT_NODE_PARAMS_st>() == 8 && align_of::<CUDA_EVENT_WAIT_NODE_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_EVENT_WAIT_NODE_PARAMS_st, event) == 0);
};

pub type CUDA_EXTERNAL_MEMORY_BUFFER_DESC = CUDA_EXTERNAL_MEMORY_BUFFER_DESC_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_MEMORY_BUFFER_DESC_st {
    pub offset: c_ulonglong,
    pub size: c_ulonglong,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<CUDA_EXTERNAL_MEMORY_BUFFER_DESC_st>() == 88 && align_of::<CUDA_EXTERNAL_MEMORY_BUFFER_DESC_st>() == 8);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_BUFFER_DESC_st, offset) == 0);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_BUFFER_DESC_st, size) == 8);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_BUFFER_DESC_st, flags) == 16);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_BUFFER_DESC_st, reserved) == 20);
};

pub type CUDA_EXTERNAL_MEMORY_BUFFER_DESC_v1 = CUDA_EXTERNAL_MEMORY_BUFFER_DESC_st;

pub type CUDA_EXTERNAL_MEMORY_HANDLE_DESC = CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st {
    pub r#type: CUexternalMemoryHandleType,
    pub handle: CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st_unnamed1,
    pub size: c_ulonglong,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st>() == 104 && align_of::<CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st>() == 8);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st, r#type) == 0);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st, handle) == 8);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st, size) == 24);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st, flags) == 32);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st, reserved) == 36);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st_unnamed1 {
    pub fd: c_int,
    pub win32: CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st_unnamed1_unnamed1,
    pub nvSciBufObject: *const c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st_unnamed1_unnamed1 {
    pub handle: *mut c_void,
    pub name: *const c_void,
}

pub type CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1 = CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st;

pub type CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC = CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_st {
    pub offset: c_ulonglong,
    pub arrayDesc: CUDA_ARRAY3D_DESCRIPTOR,
    pub numLevels: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_st>() == 120 && align_of::<CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_st>() == 8);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_st, offset) == 0);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_st, arrayDesc) == 8);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_st, numLevels) == 48);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_st, reserved) == 52);
};

pub type CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_v1 = CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC_st;

pub type CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC = CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st {
    pub r#type: CUexternalSemaphoreHandleType,
    pub handle: CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st_unnamed1,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st>() == 96 && align_of::<CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st>() == 8);
    assert!(offset_of!(CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st, r#type) == 0);
    assert!(offset_of!(CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st, handle) == 8);
    assert!(offset_of!(CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st, flags) == 24);
    assert!(offset_of!(CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st, reserved) == 28);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st_unnamed1 {
    pub fd: c_int,
    pub win32: CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st_unnamed1_unnamed1,
    pub nvSciSyncObj: *const c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st_unnamed1_unnamed1 {
    pub handle: *mut c_void,
    pub name: *const c_void,
}

pub type CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_v1 = CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st;

pub type CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS = CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st {
    pub params: CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st_unnamed1,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st>() == 144 && align_of::<CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st, params) == 0);
    assert!(offset_of!(CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st, flags) == 72);
    assert!(offset_of!(CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st, reserved) == 76);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st_unnamed1 {
    pub fence: CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st_unnamed1_unnamed1,
    pub nvSciSync: CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st_unnamed1_unnamed2,
    pub keyedMutex: CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st_unnamed1_unnamed3,
    pub reserved: [c_uint; 12],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st_unnamed1_unnamed1 {
    pub value: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st_unnamed1_unnamed2 {
    pub fence: *mut c_void,
    pub reserved: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st_unnamed1_unnamed3 {
    pub key: c_ulonglong,
}

pub type CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_v1 = CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS_st;

pub type CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS = CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st {
    pub params: CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st_unnamed1,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st>() == 144 && align_of::<CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st, params) == 0);
    assert!(offset_of!(CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st, flags) == 72);
    assert!(offset_of!(CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st, reserved) == 76);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st_unnamed1 {
    pub fence: CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st_unnamed1_unnamed1,
    pub nvSciSync: CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st_unnamed1_unnamed2,
    pub keyedMutex: CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st_unnamed1_unnamed3,
    pub reserved: [c_uint; 10],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st_unnamed1_unnamed1 {
    pub value: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st_unnamed1_unnamed2 {
    pub fence: *mut c_void,
    pub reserved: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st_unnamed1_unnamed3 {
    pub key: c_ulonglong,
    pub timeoutMs: c_uint,
}

pub type CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_v1 = CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS_st;

pub type CUDA_EXT_SEM_SIGNAL_NODE_PARAMS = CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_st {
    pub extSemArray: *mut CUexternalSemaphore,
    pub paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS,
    pub numExtSems: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_st>() == 24 && align_of::<CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_st, extSemArray) == 0);
    assert!(offset_of!(CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_st, paramsArray) == 8);
    assert!(offset_of!(CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_st, numExtSems) == 16);
};

pub type CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v1 = CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_st;

pub type CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2 = CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2_st {
    pub extSemArray: *mut CUexternalSemaphore,
    pub paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS,
    pub numExtSems: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2_st>() == 24 && align_of::<CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2_st>() == 8);
    assert!(offset_of!(CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2_st, extSemArray) == 0);
    assert!(offset_of!(CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2_st, paramsArray) == 8);
    assert!(offset_of!(CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2_st, numExtSems) == 16);
};

pub type CUDA_EXT_SEM_WAIT_NODE_PARAMS = CUDA_EXT_SEM_WAIT_NODE_PARAMS_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXT_SEM_WAIT_NODE_PARAMS_st {
    pub extSemArray: *mut CUexternalSemaphore,
    pub paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
    pub numExtSems: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_EXT_SEM_WAIT_NODE_PARAMS_st>() == 24 && align_of::<CUDA_EXT_SEM_WAIT_NODE_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_EXT_SEM_WAIT_NODE_PARAMS_st, extSemArray) == 0);
    assert!(offset_of!(CUDA_EXT_SEM_WAIT_NODE_PARAMS_st, paramsArray) == 8);
    assert!(offset_of!(CUDA_EXT_SEM_WAIT_NODE_PARAMS_st, numExtSems) == 16);
};

pub type CUDA_EXT_SEM_WAIT_NODE_PARAMS_v1 = CUDA_EXT_SEM_WAIT_NODE_PARAMS_st;

pub type CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2 = CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2_st {
    pub extSemArray: *mut CUexternalSemaphore,
    pub paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
    pub numExtSems: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2_st>() == 24 && align_of::<CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2_st>() == 8);
    assert!(offset_of!(CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2_st, extSemArray) == 0);
    assert!(offset_of!(CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2_st, paramsArray) == 8);
    assert!(offset_of!(CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2_st, numExtSems) == 16);
};

pub type CUDA_GRAPH_INSTANTIATE_PARAMS = CUDA_GRAPH_INSTANTIATE_PARAMS_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_GRAPH_INSTANTIATE_PARAMS_st {
    pub flags: cuuint64_t,
    pub hUploadStream: CUstream,
    pub hErrNode_out: CUgraphNode,
    pub result_out: CUgraphInstantiateResult,
}
const _: () = {
    assert!(size_of::<CUDA_GRAPH_INSTANTIATE_PARAMS_st>() == 32 && align_of::<CUDA_GRAPH_INSTANTIATE_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_GRAPH_INSTANTIATE_PARAMS_st, flags) == 0);
    assert!(offset_of!(CUDA_GRAPH_INSTANTIATE_PARAMS_st, hUploadStream) == 8);
    assert!(offset_of!(CUDA_GRAPH_INSTANTIATE_PARAMS_st, hErrNode_out) == 16);
    assert!(offset_of!(CUDA_GRAPH_INSTANTIATE_PARAMS_st, result_out) == 24);
};

pub type CUDA_HOST_NODE_PARAMS = CUDA_HOST_NODE_PARAMS_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_HOST_NODE_PARAMS_st {
    pub r#fn: CUhostFn,
    pub userData: *mut c_void,
}
const _: () = {
    assert!(size_of::<CUDA_HOST_NODE_PARAMS_st>() == 16 && align_of::<CUDA_HOST_NODE_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_HOST_NODE_PARAMS_st, r#fn) == 0);
    assert!(offset_of!(CUDA_HOST_NODE_PARAMS_st, userData) == 8);
};

pub type CUDA_HOST_NODE_PARAMS_v1 = CUDA_HOST_NODE_PARAMS_st;

pub type CUDA_HOST_NODE_PARAMS_v2 = CUDA_HOST_NODE_PARAMS_v2_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_HOST_NODE_PARAMS_v2_st {
    pub r#fn: CUhostFn,
    pub userData: *mut c_void,
}
const _: () = {
    assert!(size_of::<CUDA_HOST_NODE_PARAMS_v2_st>() == 16 && align_of::<CUDA_HOST_NODE_PARAMS_v2_st>() == 8);
    assert!(offset_of!(CUDA_HOST_NODE_PARAMS_v2_st, r#fn) == 0);
    assert!(offset_of!(CUDA_HOST_NODE_PARAMS_v2_st, userData) == 8);
};

pub type CUDA_KERNEL_NODE_PARAMS = CUDA_KERNEL_NODE_PARAMS_v2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_KERNEL_NODE_PARAMS_st {
    pub func: CUfunction,
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub kernelParams: *mut *mut c_void,
    pub extra: *mut *mut c_void,
}
const _: () = {
    assert!(size_of::<CUDA_KERNEL_NODE_PARAMS_st>() == 56 && align_of::<CUDA_KERNEL_NODE_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_st, func) == 0);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_st, gridDimX) == 8);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_st, gridDimY) == 12);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_st, gridDimZ) == 16);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_st, blockDimX) == 20);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_st, blockDimY) == 24);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_st, blockDimZ) == 28);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_st, sharedMemBytes) == 32);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_st, kernelParams) == 40);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_st, extra) == 48);
};

pub type CUDA_KERNEL_NODE_PARAMS_v1 = CUDA_KERNEL_NODE_PARAMS_st;

pub type CUDA_KERNEL_NODE_PARAMS_v2 = CUDA_KERNEL_NODE_PARAMS_v2_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_KERNEL_NODE_PARAMS_v2_st {
    pub func: CUfunction,
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub kernelParams: *mut *mut c_void,
    pub extra: *mut *mut c_void,
    pub kern: CUkernel,
    pub ctx: CUcontext,
}
const _: () = {
    assert!(size_of::<CUDA_KERNEL_NODE_PARAMS_v2_st>() == 72 && align_of::<CUDA_KERNEL_NODE_PARAMS_v2_st>() == 8);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, func) == 0);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, gridDimX) == 8);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, gridDimY) == 12);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, gridDimZ) == 16);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, blockDimX) == 20);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, blockDimY) == 24);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, blockDimZ) == 28);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, sharedMemBytes) == 32);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, kernelParams) == 40);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, extra) == 48);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, kern) == 56);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v2_st, ctx) == 64);
};

pub type CUDA_KERNEL_NODE_PARAMS_v3 = CUDA_KERNEL_NODE_PARAMS_v3_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_KERNEL_NODE_PARAMS_v3_st {
    pub func: CUfunction,
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub kernelParams: *mut *mut c_void,
    pub extra: *mut *mut c_void,
    pub kern: CUkernel,
    pub ctx: CUcontext,
}
const _: () = {
    assert!(size_of::<CUDA_KERNEL_NODE_PARAMS_v3_st>() == 72 && align_of::<CUDA_KERNEL_NODE_PARAMS_v3_st>() == 8);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, func) == 0);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, gridDimX) == 8);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, gridDimY) == 12);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, gridDimZ) == 16);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, blockDimX) == 20);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, blockDimY) == 24);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, blockDimZ) == 28);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, sharedMemBytes) == 32);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, kernelParams) == 40);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, extra) == 48);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, kern) == 56);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS_v3_st, ctx) == 64);
};

pub type CUDA_LAUNCH_PARAMS = CUDA_LAUNCH_PARAMS_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_LAUNCH_PARAMS_st {
    pub function: CUfunction,
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub hStream: CUstream,
    pub kernelParams: *mut *mut c_void,
}
const _: () = {
    assert!(size_of::<CUDA_LAUNCH_PARAMS_st>() == 56 && align_of::<CUDA_LAUNCH_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_LAUNCH_PARAMS_st, function) == 0);
    assert!(offset_of!(CUDA_LAUNCH_PARAMS_st, gridDimX) == 8);
    assert!(offset_of!(CUDA_LAUNCH_PARAMS_st, gridDimY) == 12);
    assert!(offset_of!(CUDA_LAUNCH_PARAMS_st, gridDimZ) == 16);
    assert!(offset_of!(CUDA_LAUNCH_PARAMS_st, blockDimX) == 20);
    assert!(offset_of!(CUDA_LAUNCH_PARAMS_st, blockDimY) == 24);
    assert!(offset_of!(CUDA_LAUNCH_PARAMS_st, blockDimZ) == 28);
    assert!(offset_of!(CUDA_LAUNCH_PARAMS_st, sharedMemBytes) == 32);
    assert!(offset_of!(CUDA_LAUNCH_PARAMS_st, hStream) == 40);
    assert!(offset_of!(CUDA_LAUNCH_PARAMS_st, kernelParams) == 48);
};

pub type CUDA_LAUNCH_PARAMS_v1 = CUDA_LAUNCH_PARAMS_st;

pub type CUDA_MEMCPY2D = CUDA_MEMCPY2D_v2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMCPY2D_st {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcMemoryType: CUmemorytype,
    pub srcHost: *const c_void,
    pub srcDevice: CUdeviceptr,
    pub srcArray: CUarray,
    pub srcPitch: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstMemoryType: CUmemorytype,
    pub dstHost: *mut c_void,
    pub dstDevice: CUdeviceptr,
    pub dstArray: CUarray,
    pub dstPitch: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
}
const _: () = {
    assert!(size_of::<CUDA_MEMCPY2D_st>() == 128 && align_of::<CUDA_MEMCPY2D_st>() == 8);
    assert!(offset_of!(CUDA_MEMCPY2D_st, srcXInBytes) == 0);
    assert!(offset_of!(CUDA_MEMCPY2D_st, srcY) == 8);
    assert!(offset_of!(CUDA_MEMCPY2D_st, srcMemoryType) == 16);
    assert!(offset_of!(CUDA_MEMCPY2D_st, srcHost) == 24);
    assert!(offset_of!(CUDA_MEMCPY2D_st, srcDevice) == 32);
    assert!(offset_of!(CUDA_MEMCPY2D_st, srcArray) == 40);
    assert!(offset_of!(CUDA_MEMCPY2D_st, srcPitch) == 48);
    assert!(offset_of!(CUDA_MEMCPY2D_st, dstXInBytes) == 56);
    assert!(offset_of!(CUDA_MEMCPY2D_st, dstY) == 64);
    assert!(offset_of!(CUDA_MEMCPY2D_st, dstMemoryType) == 72);
    assert!(offset_of!(CUDA_MEMCPY2D_st, dstHost) == 80);
    assert!(offset_of!(CUDA_MEMCPY2D_st, dstDevice) == 88);
    assert!(offset_of!(CUDA_MEMCPY2D_st, dstArray) == 96);
    assert!(offset_of!(CUDA_MEMCPY2D_st, dstPitch) == 104);
    assert!(offset_of!(CUDA_MEMCPY2D_st, WidthInBytes) == 112);
    assert!(offset_of!(CUDA_MEMCPY2D_st, Height) == 120);
};

pub type CUDA_MEMCPY2D_v1 = CUDA_MEMCPY2D_v1_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMCPY2D_v1_st {
    pub srcXInBytes: c_uint,
    pub srcY: c_uint,
    pub srcMemoryType: CUmemorytype,
    pub srcHost: *const c_void,
    pub srcDevice: CUdeviceptr_v1,
    pub srcArray: CUarray,
    pub srcPitch: c_uint,
    pub dstXInBytes: c_uint,
    pub dstY: c_uint,
    pub dstMemoryType: CUmemorytype,
    pub dstHost: *mut c_void,
    pub dstDevice: CUdeviceptr_v1,
    pub dstArray: CUarray,
    pub dstPitch: c_uint,
    pub WidthInBytes: c_uint,
    pub Height: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_MEMCPY2D_v1_st>() == 96 && align_of::<CUDA_MEMCPY2D_v1_st>() == 8);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, srcXInBytes) == 0);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, srcY) == 4);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, srcMemoryType) == 8);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, srcHost) == 16);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, srcDevice) == 24);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, srcArray) == 32);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, srcPitch) == 40);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, dstXInBytes) == 44);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, dstY) == 48);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, dstMemoryType) == 52);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, dstHost) == 56);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, dstDevice) == 64);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, dstArray) == 72);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, dstPitch) == 80);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, WidthInBytes) == 84);
    assert!(offset_of!(CUDA_MEMCPY2D_v1_st, Height) == 88);
};

pub type CUDA_MEMCPY2D_v2 = CUDA_MEMCPY2D_st;

pub type CUDA_MEMCPY3D = CUDA_MEMCPY3D_v2;

pub type CUDA_MEMCPY3D_BATCH_OP = CUDA_MEMCPY3D_BATCH_OP_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMCPY3D_BATCH_OP_st {
    pub src: CUmemcpy3DOperand,
    pub dst: CUmemcpy3DOperand,
    pub extent: CUextent3D,
    pub srcAccessOrder: CUmemcpySrcAccessOrder,
    pub flags: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_MEMCPY3D_BATCH_OP_st>() == 112 && align_of::<CUDA_MEMCPY3D_BATCH_OP_st>() == 8);
    assert!(offset_of!(CUDA_MEMCPY3D_BATCH_OP_st, src) == 0);
    assert!(offset_of!(CUDA_MEMCPY3D_BATCH_OP_st, dst) == 40);
    assert!(offset_of!(CUDA_MEMCPY3D_BATCH_OP_st, extent) == 80);
    assert!(offset_of!(CUDA_MEMCPY3D_BATCH_OP_st, srcAccessOrder) == 104);
    assert!(offset_of!(CUDA_MEMCPY3D_BATCH_OP_st, flags) == 108);
};

pub type CUDA_MEMCPY3D_BATCH_OP_v1 = CUDA_MEMCPY3D_BATCH_OP_st;

pub type CUDA_MEMCPY3D_PEER = CUDA_MEMCPY3D_PEER_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMCPY3D_PEER_st {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcZ: usize,
    pub srcLOD: usize,
    pub srcMemoryType: CUmemorytype,
    pub srcHost: *const c_void,
    pub srcDevice: CUdeviceptr,
    pub srcArray: CUarray,
    pub srcContext: CUcontext,
    pub srcPitch: usize,
    pub srcHeight: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstZ: usize,
    pub dstLOD: usize,
    pub dstMemoryType: CUmemorytype,
    pub dstHost: *mut c_void,
    pub dstDevice: CUdeviceptr,
    pub dstArray: CUarray,
    pub dstContext: CUcontext,
    pub dstPitch: usize,
    pub dstHeight: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
    pub Depth: usize,
}
const _: () = {
    assert!(size_of::<CUDA_MEMCPY3D_PEER_st>() == 200 && align_of::<CUDA_MEMCPY3D_PEER_st>() == 8);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, srcXInBytes) == 0);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, srcY) == 8);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, srcZ) == 16);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, srcLOD) == 24);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, srcMemoryType) == 32);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, srcHost) == 40);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, srcDevice) == 48);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, srcArray) == 56);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, srcContext) == 64);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, srcPitch) == 72);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, srcHeight) == 80);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, dstXInBytes) == 88);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, dstY) == 96);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, dstZ) == 104);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, dstLOD) == 112);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, dstMemoryType) == 120);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, dstHost) == 128);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, dstDevice) == 136);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, dstArray) == 144);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, dstContext) == 152);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, dstPitch) == 160);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, dstHeight) == 168);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, WidthInBytes) == 176);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, Height) == 184);
    assert!(offset_of!(CUDA_MEMCPY3D_PEER_st, Depth) == 192);
};

pub type CUDA_MEMCPY3D_PEER_v1 = CUDA_MEMCPY3D_PEER_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMCPY3D_st {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcZ: usize,
    pub srcLOD: usize,
    pub srcMemoryType: CUmemorytype,
    pub srcHost: *const c_void,
    pub srcDevice: CUdeviceptr,
    pub srcArray: CUarray,
    pub reserved0: *mut c_void,
    pub srcPitch: usize,
    pub srcHeight: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstZ: usize,
    pub dstLOD: usize,
    pub dstMemoryType: CUmemorytype,
    pub dstHost: *mut c_void,
    pub dstDevice: CUdeviceptr,
    pub dstArray: CUarray,
    pub reserved1: *mut c_void,
    pub dstPitch: usize,
    pub dstHeight: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
    pub Depth: usize,
}
const _: () = {
    assert!(size_of::<CUDA_MEMCPY3D_st>() == 200 && align_of::<CUDA_MEMCPY3D_st>() == 8);
    assert!(offset_of!(CUDA_MEMCPY3D_st, srcXInBytes) == 0);
    assert!(offset_of!(CUDA_MEMCPY3D_st, srcY) == 8);
    assert!(offset_of!(CUDA_MEMCPY3D_st, srcZ) == 16);
    assert!(offset_of!(CUDA_MEMCPY3D_st, srcLOD) == 24);
    assert!(offset_of!(CUDA_MEMCPY3D_st, srcMemoryType) == 32);
    assert!(offset_of!(CUDA_MEMCPY3D_st, srcHost) == 40);
    assert!(offset_of!(CUDA_MEMCPY3D_st, srcDevice) == 48);
    assert!(offset_of!(CUDA_MEMCPY3D_st, srcArray) == 56);
    assert!(offset_of!(CUDA_MEMCPY3D_st, reserved0) == 64);
    assert!(offset_of!(CUDA_MEMCPY3D_st, srcPitch) == 72);
    assert!(offset_of!(CUDA_MEMCPY3D_st, srcHeight) == 80);
    assert!(offset_of!(CUDA_MEMCPY3D_st, dstXInBytes) == 88);
    assert!(offset_of!(CUDA_MEMCPY3D_st, dstY) == 96);
    assert!(offset_of!(CUDA_MEMCPY3D_st, dstZ) == 104);
    assert!(offset_of!(CUDA_MEMCPY3D_st, dstLOD) == 112);
    assert!(offset_of!(CUDA_MEMCPY3D_st, dstMemoryType) == 120);
    assert!(offset_of!(CUDA_MEMCPY3D_st, dstHost) == 128);
    assert!(offset_of!(CUDA_MEMCPY3D_st, dstDevice) == 136);
    assert!(offset_of!(CUDA_MEMCPY3D_st, dstArray) == 144);
    assert!(offset_of!(CUDA_MEMCPY3D_st, reserved1) == 152);
    assert!(offset_of!(CUDA_MEMCPY3D_st, dstPitch) == 160);
    assert!(offset_of!(CUDA_MEMCPY3D_st, dstHeight) == 168);
    assert!(offset_of!(CUDA_MEMCPY3D_st, WidthInBytes) == 176);
    assert!(offset_of!(CUDA_MEMCPY3D_st, Height) == 184);
    assert!(offset_of!(CUDA_MEMCPY3D_st, Depth) == 192);
};

pub type CUDA_MEMCPY3D_v1 = CUDA_MEMCPY3D_v1_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMCPY3D_v1_st {
    pub srcXInBytes: c_uint,
    pub srcY: c_uint,
    pub srcZ: c_uint,
    pub srcLOD: c_uint,
    pub srcMemoryType: CUmemorytype,
    pub srcHost: *const c_void,
    pub srcDevice: CUdeviceptr_v1,
    pub srcArray: CUarray,
    pub reserved0: *mut c_void,
    pub srcPitch: c_uint,
    pub srcHeight: c_uint,
    pub dstXInBytes: c_uint,
    pub dstY: c_uint,
    pub dstZ: c_uint,
    pub dstLOD: c_uint,
    pub dstMemoryType: CUmemorytype,
    pub dstHost: *mut c_void,
    pub dstDevice: CUdeviceptr_v1,
    pub dstArray: CUarray,
    pub reserved1: *mut c_void,
    pub dstPitch: c_uint,
    pub dstHeight: c_uint,
    pub WidthInBytes: c_uint,
    pub Height: c_uint,
    pub Depth: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_MEMCPY3D_v1_st>() == 144 && align_of::<CUDA_MEMCPY3D_v1_st>() == 8);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, srcXInBytes) == 0);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, srcY) == 4);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, srcZ) == 8);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, srcLOD) == 12);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, srcMemoryType) == 16);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, srcHost) == 24);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, srcDevice) == 32);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, srcArray) == 40);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, reserved0) == 48);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, srcPitch) == 56);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, srcHeight) == 60);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, dstXInBytes) == 64);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, dstY) == 68);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, dstZ) == 72);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, dstLOD) == 76);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, dstMemoryType) == 80);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, dstHost) == 88);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, dstDevice) == 96);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, dstArray) == 104);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, reserved1) == 112);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, dstPitch) == 120);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, dstHeight) == 124);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, WidthInBytes) == 128);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, Height) == 132);
    assert!(offset_of!(CUDA_MEMCPY3D_v1_st, Depth) == 136);
};

pub type CUDA_MEMCPY3D_v2 = CUDA_MEMCPY3D_st;

pub type CUDA_MEMCPY_NODE_PARAMS = CUDA_MEMCPY_NODE_PARAMS_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMCPY_NODE_PARAMS_st {
    pub flags: c_int,
    pub reserved: c_int,
    pub copyCtx: CUcontext,
    pub copyParams: CUDA_MEMCPY3D,
}
const _: () = {
    assert!(size_of::<CUDA_MEMCPY_NODE_PARAMS_st>() == 216 && align_of::<CUDA_MEMCPY_NODE_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_MEMCPY_NODE_PARAMS_st, flags) == 0);
    assert!(offset_of!(CUDA_MEMCPY_NODE_PARAMS_st, reserved) == 4);
    assert!(offset_of!(CUDA_MEMCPY_NODE_PARAMS_st, copyCtx) == 8);
    assert!(offset_of!(CUDA_MEMCPY_NODE_PARAMS_st, copyParams) == 16);
};

pub type CUDA_MEMSET_NODE_PARAMS = CUDA_MEMSET_NODE_PARAMS_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMSET_NODE_PARAMS_st {
    pub dst: CUdeviceptr,
    pub pitch: usize,
    pub value: c_uint,
    pub elementSize: c_uint,
    pub width: usize,
    pub height: usize,
}
const _: () = {
    assert!(size_of::<CUDA_MEMSET_NODE_PARAMS_st>() == 40 && align_of::<CUDA_MEMSET_NODE_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_st, dst) == 0);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_st, pitch) == 8);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_st, value) == 16);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_st, elementSize) == 20);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_st, width) == 24);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_st, height) == 32);
};

pub type CUDA_MEMSET_NODE_PARAMS_v1 = CUDA_MEMSET_NODE_PARAMS_st;

pub type CUDA_MEMSET_NODE_PARAMS_v2 = CUDA_MEMSET_NODE_PARAMS_v2_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMSET_NODE_PARAMS_v2_st {
    pub dst: CUdeviceptr,
    pub pitch: usize,
    pub value: c_uint,
    pub elementSize: c_uint,
    pub width: usize,
    pub height: usize,
    pub ctx: CUcontext,
}
const _: () = {
    assert!(size_of::<CUDA_MEMSET_NODE_PARAMS_v2_st>() == 48 && align_of::<CUDA_MEMSET_NODE_PARAMS_v2_st>() == 8);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_v2_st, dst) == 0);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_v2_st, pitch) == 8);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_v2_st, value) == 16);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_v2_st, elementSize) == 20);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_v2_st, width) == 24);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_v2_st, height) == 32);
    assert!(offset_of!(CUDA_MEMSET_NODE_PARAMS_v2_st, ctx) == 40);
};

pub type CUDA_MEM_ALLOC_NODE_PARAMS = CUDA_MEM_ALLOC_NODE_PARAMS_v1;

pub type CUDA_MEM_ALLOC_NODE_PARAMS_v1 = CUDA_MEM_ALLOC_NODE_PARAMS_v1_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEM_ALLOC_NODE_PARAMS_v1_st {
    pub poolProps: CUmemPoolProps,
    pub accessDescs: *const CUmemAccessDesc,
    pub accessDescCount: usize,
    pub bytesize: usize,
    pub dptr: CUdeviceptr,
}
const _: () = {
    assert!(size_of::<CUDA_MEM_ALLOC_NODE_PARAMS_v1_st>() == 120 && align_of::<CUDA_MEM_ALLOC_NODE_PARAMS_v1_st>() == 8);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS_v1_st, poolProps) == 0);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS_v1_st, accessDescs) == 88);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS_v1_st, accessDescCount) == 96);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS_v1_st, bytesize) == 104);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS_v1_st, dptr) == 112);
};

pub type CUDA_MEM_ALLOC_NODE_PARAMS_v2 = CUDA_MEM_ALLOC_NODE_PARAMS_v2_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEM_ALLOC_NODE_PARAMS_v2_st {
    pub poolProps: CUmemPoolProps,
    pub accessDescs: *const CUmemAccessDesc,
    pub accessDescCount: usize,
    pub bytesize: usize,
    pub dptr: CUdeviceptr,
}
const _: () = {
    assert!(size_of::<CUDA_MEM_ALLOC_NODE_PARAMS_v2_st>() == 120 && align_of::<CUDA_MEM_ALLOC_NODE_PARAMS_v2_st>() == 8);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS_v2_st, poolProps) == 0);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS_v2_st, accessDescs) == 88);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS_v2_st, accessDescCount) == 96);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS_v2_st, bytesize) == 104);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS_v2_st, dptr) == 112);
};

pub type CUDA_MEM_FREE_NODE_PARAMS = CUDA_MEM_FREE_NODE_PARAMS_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEM_FREE_NODE_PARAMS_st {
    pub dptr: CUdeviceptr,
}
const _: () = {
    assert!(size_of::<CUDA_MEM_FREE_NODE_PARAMS_st>() == 8 && align_of::<CUDA_MEM_FREE_NODE_PARAMS_st>() == 8);
    assert!(offset_of!(CUDA_MEM_FREE_NODE_PARAMS_st, dptr) == 0);
};

pub type CUDA_RESOURCE_DESC = CUDA_RESOURCE_DESC_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_RESOURCE_DESC_st {
    pub resType: CUresourcetype,
    pub res: CUDA_RESOURCE_DESC_st_unnamed1,
    pub flags: c_uint,
}
const _: () = {
    assert!(size_of::<CUDA_RESOURCE_DESC_st>() == 144 && align_of::<CUDA_RESOURCE_DESC_st>() == 8);
    assert!(offset_of!(CUDA_RESOURCE_DESC_st, resType) == 0);
    assert!(offset_of!(CUDA_RESOURCE_DESC_st, res) == 8);
    assert!(offset_of!(CUDA_RESOURCE_DESC_st, flags) == 136);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUDA_RESOURCE_DESC_st_unnamed1 {
    pub array: CUDA_RESOURCE_DESC_st_unnamed1_unnamed1,
    pub mipmap: CUDA_RESOURCE_DESC_st_unnamed1_unnamed2,
    pub linear: CUDA_RESOURCE_DESC_st_unnamed1_unnamed3,
    pub pitch2D: CUDA_RESOURCE_DESC_st_unnamed1_unnamed4,
    pub reserved: CUDA_RESOURCE_DESC_st_unnamed1_unnamed5,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_RESOURCE_DESC_st_unnamed1_unnamed1 {
    pub hArray: CUarray,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_RESOURCE_DESC_st_unnamed1_unnamed2 {
    pub hMipmappedArray: CUmipmappedArray,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_RESOURCE_DESC_st_unnamed1_unnamed3 {
    pub devPtr: CUdeviceptr,
    pub format: CUarray_format,
    pub numChannels: c_uint,
    pub sizeInBytes: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_RESOURCE_DESC_st_unnamed1_unnamed4 {
    pub devPtr: CUdeviceptr,
    pub format: CUarray_format,
    pub numChannels: c_uint,
    pub width: usize,
    pub height: usize,
    pub pitchInBytes: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_RESOURCE_DESC_st_unnamed1_unnamed5 {
    pub reserved: [c_int; 32],
}

pub type CUDA_RESOURCE_DESC_v1 = CUDA_RESOURCE_DESC_st;

pub type CUDA_RESOURCE_VIEW_DESC = CUDA_RESOURCE_VIEW_DESC_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_RESOURCE_VIEW_DESC_st {
    pub format: CUresourceViewFormat,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub firstMipmapLevel: c_uint,
    pub lastMipmapLevel: c_uint,
    pub firstLayer: c_uint,
    pub lastLayer: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<CUDA_RESOURCE_VIEW_DESC_st>() == 112 && align_of::<CUDA_RESOURCE_VIEW_DESC_st>() == 8);
    assert!(offset_of!(CUDA_RESOURCE_VIEW_DESC_st, format) == 0);
    assert!(offset_of!(CUDA_RESOURCE_VIEW_DESC_st, width) == 8);
    assert!(offset_of!(CUDA_RESOURCE_VIEW_DESC_st, height) == 16);
    assert!(offset_of!(CUDA_RESOURCE_VIEW_DESC_st, depth) == 24);
    assert!(offset_of!(CUDA_RESOURCE_VIEW_DESC_st, firstMipmapLevel) == 32);
    assert!(offset_of!(CUDA_RESOURCE_VIEW_DESC_st, lastMipmapLevel) == 36);
    assert!(offset_of!(CUDA_RESOURCE_VIEW_DESC_st, firstLayer) == 40);
    assert!(offset_of!(CUDA_RESOURCE_VIEW_DESC_st, lastLayer) == 44);
    assert!(offset_of!(CUDA_RESOURCE_VIEW_DESC_st, reserved) == 48);
};

pub type CUDA_RESOURCE_VIEW_DESC_v1 = CUDA_RESOURCE_VIEW_DESC_st;

pub type CUDA_TEXTURE_DESC = CUDA_TEXTURE_DESC_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_TEXTURE_DESC_st {
    pub addressMode: [CUaddress_mode; 3],
    pub filterMode: CUfilter_mode,
    pub flags: c_uint,
    pub maxAnisotropy: c_uint,
    pub mipmapFilterMode: CUfilter_mode,
    pub mipmapLevelBias: f32,
    pub minMipmapLevelClamp: f32,
    pub maxMipmapLevelClamp: f32,
    pub borderColor: [f32; 4],
    pub reserved: [c_int; 12],
}
const _: () = {
    assert!(size_of::<CUDA_TEXTURE_DESC_st>() == 104 && align_of::<CUDA_TEXTURE_DESC_st>() == 4);
    assert!(offset_of!(CUDA_TEXTURE_DESC_st, addressMode) == 0);
    assert!(offset_of!(CUDA_TEXTURE_DESC_st, filterMode) == 12);
    assert!(offset_of!(CUDA_TEXTURE_DESC_st, flags) == 16);
    assert!(offset_of!(CUDA_TEXTURE_DESC_st, maxAnisotropy) == 20);
    assert!(offset_of!(CUDA_TEXTURE_DESC_st, mipmapFilterMode) == 24);
    assert!(offset_of!(CUDA_TEXTURE_DESC_st, mipmapLevelBias) == 28);
    assert!(offset_of!(CUDA_TEXTURE_DESC_st, minMipmapLevelClamp) == 32);
    assert!(offset_of!(CUDA_TEXTURE_DESC_st, maxMipmapLevelClamp) == 36);
    assert!(offset_of!(CUDA_TEXTURE_DESC_st, borderColor) == 40);
    assert!(offset_of!(CUDA_TEXTURE_DESC_st, reserved) == 56);
};

pub type CUDA_TEXTURE_DESC_v1 = CUDA_TEXTURE_DESC_st;

pub type CUaccessPolicyWindow = CUaccessPolicyWindow_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUaccessPolicyWindow_st {
    pub base_ptr: *mut c_void,
    pub num_bytes: usize,
    pub hitRatio: f32,
    pub hitProp: CUaccessProperty,
    pub missProp: CUaccessProperty,
}
const _: () = {
    assert!(size_of::<CUaccessPolicyWindow_st>() == 32 && align_of::<CUaccessPolicyWindow_st>() == 8);
    assert!(offset_of!(CUaccessPolicyWindow_st, base_ptr) == 0);
    assert!(offset_of!(CUaccessPolicyWindow_st, num_bytes) == 8);
    assert!(offset_of!(CUaccessPolicyWindow_st, hitRatio) == 16);
    assert!(offset_of!(CUaccessPolicyWindow_st, hitProp) == 20);
    assert!(offset_of!(CUaccessPolicyWindow_st, missProp) == 24);
};

pub type CUaccessPolicyWindow_v1 = CUaccessPolicyWindow_st;

pub type CUaccessProperty = CUaccessProperty_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUaccessProperty_enum(pub u32);
impl CUaccessProperty_enum {
    pub const CU_ACCESS_PROPERTY_NORMAL: Self = Self(0);
    pub const CU_ACCESS_PROPERTY_STREAMING: Self = Self(1);
    pub const CU_ACCESS_PROPERTY_PERSISTING: Self = Self(2);
}

pub type CUaddress_mode = CUaddress_mode_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUaddress_mode_enum(pub u32);
impl CUaddress_mode_enum {
    pub const CU_TR_ADDRESS_MODE_WRAP: Self = Self(0);
    pub const CU_TR_ADDRESS_MODE_CLAMP: Self = Self(1);
    pub const CU_TR_ADDRESS_MODE_MIRROR: Self = Self(2);
    pub const CU_TR_ADDRESS_MODE_BORDER: Self = Self(3);
}

pub type CUarray = *mut CUarray_st;

pub type CUarrayMapInfo = CUarrayMapInfo_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUarrayMapInfo_st {
    pub resourceType: CUresourcetype,
    pub resource: CUarrayMapInfo_st_unnamed1,
    pub subresourceType: CUarraySparseSubresourceType,
    pub subresource: CUarrayMapInfo_st_unnamed2,
    pub memOperationType: CUmemOperationType,
    pub memHandleType: CUmemHandleType,
    pub memHandle: CUarrayMapInfo_st_unnamed3,
    pub offset: c_ulonglong,
    pub deviceBitMask: c_uint,
    pub flags: c_uint,
    pub reserved: [c_uint; 2],
}
const _: () = {
    assert!(size_of::<CUarrayMapInfo_st>() == 96 && align_of::<CUarrayMapInfo_st>() == 8);
    assert!(offset_of!(CUarrayMapInfo_st, resourceType) == 0);
    assert!(offset_of!(CUarrayMapInfo_st, resource) == 8);
    assert!(offset_of!(CUarrayMapInfo_st, subresourceType) == 16);
    assert!(offset_of!(CUarrayMapInfo_st, subresource) == 24);
    assert!(offset_of!(CUarrayMapInfo_st, memOperationType) == 56);
    assert!(offset_of!(CUarrayMapInfo_st, memHandleType) == 60);
    assert!(offset_of!(CUarrayMapInfo_st, memHandle) == 64);
    assert!(offset_of!(CUarrayMapInfo_st, offset) == 72);
    assert!(offset_of!(CUarrayMapInfo_st, deviceBitMask) == 80);
    assert!(offset_of!(CUarrayMapInfo_st, flags) == 84);
    assert!(offset_of!(CUarrayMapInfo_st, reserved) == 88);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUarrayMapInfo_st_unnamed1 {
    pub mipmap: CUmipmappedArray,
    pub array: CUarray,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUarrayMapInfo_st_unnamed2 {
    pub sparseLevel: CUarrayMapInfo_st_unnamed2_unnamed1,
    pub miptail: CUarrayMapInfo_st_unnamed2_unnamed2,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUarrayMapInfo_st_unnamed2_unnamed1 {
    pub level: c_uint,
    pub layer: c_uint,
    pub offsetX: c_uint,
    pub offsetY: c_uint,
    pub offsetZ: c_uint,
    pub extentWidth: c_uint,
    pub extentHeight: c_uint,
    pub extentDepth: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUarrayMapInfo_st_unnamed2_unnamed2 {
    pub layer: c_uint,
    pub offset: c_ulonglong,
    pub size: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUarrayMapInfo_st_unnamed3 {
    pub memHandle: CUmemGenericAllocationHandle,
}

pub type CUarrayMapInfo_v1 = CUarrayMapInfo_st;

pub type CUarraySparseSubresourceType = CUarraySparseSubresourceType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUarraySparseSubresourceType_enum(pub u32);
impl CUarraySparseSubresourceType_enum {
    pub const CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL: Self = Self(0);
    pub const CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL: Self = Self(1);
}

pub type CUarray_format = CUarray_format_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUarray_format_enum(pub u32);
impl CUarray_format_enum {
    pub const CU_AD_FORMAT_UNSIGNED_INT8: Self = Self(1);
    pub const CU_AD_FORMAT_UNSIGNED_INT16: Self = Self(2);
    pub const CU_AD_FORMAT_UNSIGNED_INT32: Self = Self(3);
    pub const CU_AD_FORMAT_SIGNED_INT8: Self = Self(8);
    pub const CU_AD_FORMAT_SIGNED_INT16: Self = Self(9);
    pub const CU_AD_FORMAT_SIGNED_INT32: Self = Self(10);
    pub const CU_AD_FORMAT_HALF: Self = Self(16);
    pub const CU_AD_FORMAT_FLOAT: Self = Self(32);
    pub const CU_AD_FORMAT_NV12: Self = Self(176);
    pub const CU_AD_FORMAT_UNORM_INT8X1: Self = Self(192);
    pub const CU_AD_FORMAT_UNORM_INT8X2: Self = Self(193);
    pub const CU_AD_FORMAT_UNORM_INT8X4: Self = Self(194);
    pub const CU_AD_FORMAT_UNORM_INT16X1: Self = Self(195);
    pub const CU_AD_FORMAT_UNORM_INT16X2: Self = Self(196);
    pub const CU_AD_FORMAT_UNORM_INT16X4: Self = Self(197);
    pub const CU_AD_FORMAT_SNORM_INT8X1: Self = Self(198);
    pub const CU_AD_FORMAT_SNORM_INT8X2: Self = Self(199);
    pub const CU_AD_FORMAT_SNORM_INT8X4: Self = Self(200);
    pub const CU_AD_FORMAT_SNORM_INT16X1: Self = Self(201);
    pub const CU_AD_FORMAT_SNORM_INT16X2: Self = Self(202);
    pub const CU_AD_FORMAT_SNORM_INT16X4: Self = Self(203);
    pub const CU_AD_FORMAT_BC1_UNORM: Self = Self(145);
    pub const CU_AD_FORMAT_BC1_UNORM_SRGB: Self = Self(146);
    pub const CU_AD_FORMAT_BC2_UNORM: Self = Self(147);
    pub const CU_AD_FORMAT_BC2_UNORM_SRGB: Self = Self(148);
    pub const CU_AD_FORMAT_BC3_UNORM: Self = Self(149);
    pub const CU_AD_FORMAT_BC3_UNORM_SRGB: Self = Self(150);
    pub const CU_AD_FORMAT_BC4_UNORM: Self = Self(151);
    pub const CU_AD_FORMAT_BC4_SNORM: Self = Self(152);
    pub const CU_AD_FORMAT_BC5_UNORM: Self = Self(153);
    pub const CU_AD_FORMAT_BC5_SNORM: Self = Self(154);
    pub const CU_AD_FORMAT_BC6H_UF16: Self = Self(155);
    pub const CU_AD_FORMAT_BC6H_SF16: Self = Self(156);
    pub const CU_AD_FORMAT_BC7_UNORM: Self = Self(157);
    pub const CU_AD_FORMAT_BC7_UNORM_SRGB: Self = Self(158);
    pub const CU_AD_FORMAT_P010: Self = Self(159);
    pub const CU_AD_FORMAT_P016: Self = Self(161);
    pub const CU_AD_FORMAT_NV16: Self = Self(162);
    pub const CU_AD_FORMAT_P210: Self = Self(163);
    pub const CU_AD_FORMAT_P216: Self = Self(164);
    pub const CU_AD_FORMAT_YUY2: Self = Self(165);
    pub const CU_AD_FORMAT_Y210: Self = Self(166);
    pub const CU_AD_FORMAT_Y216: Self = Self(167);
    pub const CU_AD_FORMAT_AYUV: Self = Self(168);
    pub const CU_AD_FORMAT_Y410: Self = Self(169);
    pub const CU_AD_FORMAT_Y416: Self = Self(177);
    pub const CU_AD_FORMAT_Y444_PLANAR8: Self = Self(178);
    pub const CU_AD_FORMAT_Y444_PLANAR10: Self = Self(179);
    pub const CU_AD_FORMAT_YUV444_8bit_SemiPlanar: Self = Self(180);
    pub const CU_AD_FORMAT_YUV444_16bit_SemiPlanar: Self = Self(181);
    pub const CU_AD_FORMAT_UNORM_INT_101010_2: Self = Self(80);
    pub const CU_AD_FORMAT_MAX: Self = Self(2147483647);
}

#[repr(C)]
pub struct CUarray_st {
    _opaque: [u8; 0],
}

pub type CUasyncCallback = Option<unsafe extern "C" fn(info: *mut CUasyncNotificationInfo, userData: *mut c_void, callback: CUasyncCallbackHandle)>;

#[repr(C)]
pub struct CUasyncCallbackEntry_st {
    _opaque: [u8; 0],
}

pub type CUasyncCallbackHandle = *mut CUasyncCallbackEntry_st;

pub type CUasyncNotificationInfo = CUasyncNotificationInfo_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUasyncNotificationInfo_st {
    pub r#type: CUasyncNotificationType,
    pub info: CUasyncNotificationInfo_st_unnamed1,
}
const _: () = {
    assert!(size_of::<CUasyncNotificationInfo_st>() == 16 && align_of::<CUasyncNotificationInfo_st>() == 8);
    assert!(offset_of!(CUasyncNotificationInfo_st, r#type) == 0);
    assert!(offset_of!(CUasyncNotificationInfo_st, info) == 8);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUasyncNotificationInfo_st_unnamed1 {
    pub overBudget: CUasyncNotificationInfo_st_unnamed1_unnamed1,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUasyncNotificationInfo_st_unnamed1_unnamed1 {
    pub bytesOverBudget: c_ulonglong,
}

pub type CUasyncNotificationType = CUasyncNotificationType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUasyncNotificationType_enum(pub u32);
impl CUasyncNotificationType_enum {
    pub const CU_ASYNC_NOTIFICATION_TYPE_OVER_BUDGET: Self = Self(1);
}

pub type CUatomicOperation = CUatomicOperation_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUatomicOperation_enum(pub u32);
impl CUatomicOperation_enum {
    pub const CU_ATOMIC_OPERATION_INTEGER_ADD: Self = Self(0);
    pub const CU_ATOMIC_OPERATION_INTEGER_MIN: Self = Self(1);
    pub const CU_ATOMIC_OPERATION_INTEGER_MAX: Self = Self(2);
    pub const CU_ATOMIC_OPERATION_INTEGER_INCREMENT: Self = Self(3);
    pub const CU_ATOMIC_OPERATION_INTEGER_DECREMENT: Self = Self(4);
    pub const CU_ATOMIC_OPERATION_AND: Self = Self(5);
    pub const CU_ATOMIC_OPERATION_OR: Self = Self(6);
    pub const CU_ATOMIC_OPERATION_XOR: Self = Self(7);
    pub const CU_ATOMIC_OPERATION_EXCHANGE: Self = Self(8);
    pub const CU_ATOMIC_OPERATION_CAS: Self = Self(9);
    pub const CU_ATOMIC_OPERATION_FLOAT_ADD: Self = Self(10);
    pub const CU_ATOMIC_OPERATION_FLOAT_MIN: Self = Self(11);
    pub const CU_ATOMIC_OPERATION_FLOAT_MAX: Self = Self(12);
    pub const CU_ATOMIC_OPERATION_MAX: Self = Self(13);
}

pub type CUcheckpointCheckpointArgs = CUcheckpointCheckpointArgs_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUcheckpointCheckpointArgs_st {
    pub reserved: [cuuint64_t; 8],
}
const _: () = {
    assert!(size_of::<CUcheckpointCheckpointArgs_st>() == 64 && align_of::<CUcheckpointCheckpointArgs_st>() == 8);
    assert!(offset_of!(CUcheckpointCheckpointArgs_st, reserved) == 0);
};

pub type CUcheckpointGpuPair = CUcheckpointGpuPair_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUcheckpointGpuPair_st {
    pub oldUuid: CUuuid,
    pub newUuid: CUuuid,
}
const _: () = {
    assert!(size_of::<CUcheckpointGpuPair_st>() == 32 && align_of::<CUcheckpointGpuPair_st>() == 1);
    assert!(offset_of!(CUcheckpointGpuPair_st, oldUuid) == 0);
    assert!(offset_of!(CUcheckpointGpuPair_st, newUuid) == 16);
};

pub type CUcheckpointLockArgs = CUcheckpointLockArgs_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUcheckpointLockArgs_st {
    pub timeoutMs: c_uint,
    pub reserved0: c_uint,
    pub reserved1: [cuuint64_t; 7],
}
const _: () = {
    assert!(size_of::<CUcheckpointLockArgs_st>() == 64 && align_of::<CUcheckpointLockArgs_st>() == 8);
    assert!(offset_of!(CUcheckpointLockArgs_st, timeoutMs) == 0);
    assert!(offset_of!(CUcheckpointLockArgs_st, reserved0) == 4);
    assert!(offset_of!(CUcheckpointLockArgs_st, reserved1) == 8);
};

pub type CUcheckpointRestoreArgs = CUcheckpointRestoreArgs_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUcheckpointRestoreArgs_st {
    pub gpuPairs: *mut CUcheckpointGpuPair,
    pub gpuPairsCount: c_uint,
    pub reserved: [c_char; 44],
    pub reserved1: cuuint64_t,
}
const _: () = {
    assert!(size_of::<CUcheckpointRestoreArgs_st>() == 64 && align_of::<CUcheckpointRestoreArgs_st>() == 8);
    assert!(offset_of!(CUcheckpointRestoreArgs_st, gpuPairs) == 0);
    assert!(offset_of!(CUcheckpointRestoreArgs_st, gpuPairsCount) == 8);
    assert!(offset_of!(CUcheckpointRestoreArgs_st, reserved) == 12);
    assert!(offset_of!(CUcheckpointRestoreArgs_st, reserved1) == 56);
};

pub type CUcheckpointUnlockArgs = CUcheckpointUnlockArgs_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUcheckpointUnlockArgs_st {
    pub reserved: [cuuint64_t; 8],
}
const _: () = {
    assert!(size_of::<CUcheckpointUnlockArgs_st>() == 64 && align_of::<CUcheckpointUnlockArgs_st>() == 8);
    assert!(offset_of!(CUcheckpointUnlockArgs_st, reserved) == 0);
};

pub type CUcigDataType = CUcigDataType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUcigDataType_enum(pub u32);
impl CUcigDataType_enum {
    pub const CIG_DATA_TYPE_D3D12_COMMAND_QUEUE: Self = Self(1);
    pub const CIG_DATA_TYPE_NV_BLOB: Self = Self(2);
}

pub type CUclusterSchedulingPolicy = CUclusterSchedulingPolicy_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUclusterSchedulingPolicy_enum(pub u32);
impl CUclusterSchedulingPolicy_enum {
    pub const CU_CLUSTER_SCHEDULING_POLICY_DEFAULT: Self = Self(0);
    pub const CU_CLUSTER_SCHEDULING_POLICY_SPREAD: Self = Self(1);
    pub const CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING: Self = Self(2);
}

pub type CUcontext = *mut CUctx_st;

pub type CUcoredumpSettings = CUcoredumpSettings_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUcoredumpSettings_enum(pub u32);
impl CUcoredumpSettings_enum {
    pub const CU_COREDUMP_ENABLE_ON_EXCEPTION: Self = Self(1);
    pub const CU_COREDUMP_TRIGGER_HOST: Self = Self(2);
    pub const CU_COREDUMP_LIGHTWEIGHT: Self = Self(3);
    pub const CU_COREDUMP_ENABLE_USER_TRIGGER: Self = Self(4);
    pub const CU_COREDUMP_FILE: Self = Self(5);
    pub const CU_COREDUMP_PIPE: Self = Self(6);
    pub const CU_COREDUMP_GENERATION_FLAGS: Self = Self(7);
    pub const CU_COREDUMP_MAX: Self = Self(8);
}

pub type CUctxCigParam = CUctxCigParam_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUctxCigParam_st {
    pub sharedDataType: CUcigDataType,
    pub sharedData: *mut c_void,
}
const _: () = {
    assert!(size_of::<CUctxCigParam_st>() == 16 && align_of::<CUctxCigParam_st>() == 8);
    assert!(offset_of!(CUctxCigParam_st, sharedDataType) == 0);
    assert!(offset_of!(CUctxCigParam_st, sharedData) == 8);
};

pub type CUctxCreateParams = CUctxCreateParams_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUctxCreateParams_st {
    pub execAffinityParams: *mut CUexecAffinityParam,
    pub numExecAffinityParams: c_int,
    pub cigParams: *mut CUctxCigParam,
}
const _: () = {
    assert!(size_of::<CUctxCreateParams_st>() == 24 && align_of::<CUctxCreateParams_st>() == 8);
    assert!(offset_of!(CUctxCreateParams_st, execAffinityParams) == 0);
    assert!(offset_of!(CUctxCreateParams_st, numExecAffinityParams) == 8);
    assert!(offset_of!(CUctxCreateParams_st, cigParams) == 16);
};

#[repr(C)]
pub struct CUctx_st {
    _opaque: [u8; 0],
}

pub type CUdevResource = CUdevResource_v1;

pub type CUdevResourceDesc = *mut CUdevResourceDesc_st;

#[repr(C)]
pub struct CUdevResourceDesc_st {
    _opaque: [u8; 0],
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUdevResourceType(pub u32);
impl CUdevResourceType {
    pub const CU_DEV_RESOURCE_TYPE_INVALID: Self = Self(0);
    pub const CU_DEV_RESOURCE_TYPE_SM: Self = Self(1);
    pub const CU_DEV_RESOURCE_TYPE_MAX: Self = Self(2);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUdevResource_st {
    pub r#type: CUdevResourceType,
    pub _internal_padding: [c_uchar; 92],
    pub anonymous2: CUdevResource_st_unnamed1,
}
const _: () = {
    assert!(size_of::<CUdevResource_st>() == 144 && align_of::<CUdevResource_st>() == 4);
    assert!(offset_of!(CUdevResource_st, r#type) == 0);
    assert!(offset_of!(CUdevResource_st, _internal_padding) == 4);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUdevResource_st_unnamed1 {
    pub sm: CUdevSmResource,
    pub _oversize: [c_uchar; 48],
}

pub type CUdevResource_v1 = CUdevResource_st;

pub type CUdevSmResource = CUdevSmResource_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUdevSmResource_st {
    pub smCount: c_uint,
    pub minSmPartitionSize: c_uint,
    pub smCoscheduledAlignment: c_uint,
}
const _: () = {
    assert!(size_of::<CUdevSmResource_st>() == 12 && align_of::<CUdevSmResource_st>() == 4);
    assert!(offset_of!(CUdevSmResource_st, smCount) == 0);
    assert!(offset_of!(CUdevSmResource_st, minSmPartitionSize) == 4);
    assert!(offset_of!(CUdevSmResource_st, smCoscheduledAlignment) == 8);
};

pub type CUdevice = CUdevice_v1;

pub type CUdevice_P2PAttribute = CUdevice_P2PAttribute_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUdevice_P2PAttribute_enum(pub u32);
impl CUdevice_P2PAttribute_enum {
    pub const CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: Self = Self(1);
    pub const CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED: Self = Self(2);
    pub const CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: Self = Self(3);
    pub const CU_DEVICE_P2P_ATTRIBUTE_ACCESS_ACCESS_SUPPORTED: Self = Self(4);
    pub const CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED: Self = Self(4);
    pub const CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED: Self = Self(5);
}

pub type CUdevice_attribute = CUdevice_attribute_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUdevice_attribute_enum(pub u32);
impl CUdevice_attribute_enum {
    pub const CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: Self = Self(1);
    pub const CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: Self = Self(2);
    pub const CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: Self = Self(3);
    pub const CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: Self = Self(4);
    pub const CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: Self = Self(5);
    pub const CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: Self = Self(6);
    pub const CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: Self = Self(7);
    pub const CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: Self = Self(8);
    pub const CU_DEVICE_ATTRIBUTE_SHARED_MEMORY_PER_BLOCK: Self = Self(8);
    pub const CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: Self = Self(9);
    pub const CU_DEVICE_ATTRIBUTE_WARP_SIZE: Self = Self(10);
    pub const CU_DEVICE_ATTRIBUTE_MAX_PITCH: Self = Self(11);
    pub const CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: Self = Self(12);
    pub const CU_DEVICE_ATTRIBUTE_REGISTERS_PER_BLOCK: Self = Self(12);
    pub const CU_DEVICE_ATTRIBUTE_CLOCK_RATE: Self = Self(13);
    pub const CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: Self = Self(14);
    pub const CU_DEVICE_ATTRIBUTE_GPU_OVERLAP: Self = Self(15);
    pub const CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: Self = Self(16);
    pub const CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT: Self = Self(17);
    pub const CU_DEVICE_ATTRIBUTE_INTEGRATED: Self = Self(18);
    pub const CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: Self = Self(19);
    pub const CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: Self = Self(20);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH: Self = Self(21);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH: Self = Self(22);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT: Self = Self(23);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH: Self = Self(24);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT: Self = Self(25);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH: Self = Self(26);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH: Self = Self(27);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT: Self = Self(28);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS: Self = Self(29);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_ARRAY_WIDTH: Self = Self(27);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_ARRAY_HEIGHT: Self = Self(28);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_ARRAY_NUMSLICES: Self = Self(29);
    pub const CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT: Self = Self(30);
    pub const CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: Self = Self(31);
    pub const CU_DEVICE_ATTRIBUTE_ECC_ENABLED: Self = Self(32);
    pub const CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: Self = Self(33);
    pub const CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: Self = Self(34);
    pub const CU_DEVICE_ATTRIBUTE_TCC_DRIVER: Self = Self(35);
    pub const CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: Self = Self(36);
    pub const CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: Self = Self(37);
    pub const CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: Self = Self(38);
    pub const CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: Self = Self(39);
    pub const CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: Self = Self(40);
    pub const CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: Self = Self(41);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_WIDTH: Self = Self(42);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS: Self = Self(43);
    pub const CU_DEVICE_ATTRIBUTE_CAN_TEX2D_GATHER: Self = Self(44);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_WIDTH: Self = Self(45);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_HEIGHT: Self = Self(46);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE: Self = Self(47);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE: Self = Self(48);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE: Self = Self(49);
    pub const CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: Self = Self(50);
    pub const CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT: Self = Self(51);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_WIDTH: Self = Self(52);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH: Self = Self(53);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS: Self = Self(54);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH: Self = Self(55);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_WIDTH: Self = Self(56);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_HEIGHT: Self = Self(57);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_WIDTH: Self = Self(58);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_HEIGHT: Self = Self(59);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_DEPTH: Self = Self(60);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_WIDTH: Self = Self(61);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_LAYERS: Self = Self(62);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_WIDTH: Self = Self(63);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_HEIGHT: Self = Self(64);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_LAYERS: Self = Self(65);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_WIDTH: Self = Self(66);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH: Self = Self(67);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS: Self = Self(68);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH: Self = Self(69);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH: Self = Self(70);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT: Self = Self(71);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH: Self = Self(72);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH: Self = Self(73);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT: Self = Self(74);
    pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: Self = Self(75);
    pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: Self = Self(76);
    pub const CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH: Self = Self(77);
    pub const CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: Self = Self(78);
    pub const CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED: Self = Self(79);
    pub const CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED: Self = Self(80);
    pub const CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: Self = Self(81);
    pub const CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: Self = Self(82);
    pub const CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: Self = Self(83);
    pub const CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD: Self = Self(84);
    pub const CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID: Self = Self(85);
    pub const CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED: Self = Self(86);
    pub const CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO: Self = Self(87);
    pub const CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS: Self = Self(88);
    pub const CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS: Self = Self(89);
    pub const CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED: Self = Self(90);
    pub const CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: Self = Self(91);
    pub const CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1: Self = Self(92);
    pub const CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1: Self = Self(93);
    pub const CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1: Self = Self(94);
    pub const CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: Self = Self(95);
    pub const CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH: Self = Self(96);
    pub const CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: Self = Self(97);
    pub const CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES: Self = Self(98);
    pub const CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: Self = Self(99);
    pub const CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: Self = Self(100);
    pub const CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST: Self = Self(101);
    pub const CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED: Self = Self(102);
    pub const CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: Self = Self(102);
    pub const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: Self = Self(103);
    pub const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED: Self = Self(104);
    pub const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED: Self = Self(105);
    pub const CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: Self = Self(106);
    pub const CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED: Self = Self(107);
    pub const CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE: Self = Self(108);
    pub const CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE: Self = Self(109);
    pub const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: Self = Self(110);
    pub const CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: Self = Self(111);
    pub const CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED: Self = Self(112);
    pub const CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED: Self = Self(113);
    pub const CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED: Self = Self(114);
    pub const CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: Self = Self(115);
    pub const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: Self = Self(116);
    pub const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: Self = Self(117);
    pub const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: Self = Self(118);
    pub const CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES: Self = Self(119);
    pub const CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: Self = Self(120);
    pub const CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED: Self = Self(121);
    pub const CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: Self = Self(122);
    pub const CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR: Self = Self(123);
    pub const CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: Self = Self(124);
    pub const CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: Self = Self(125);
    pub const CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT: Self = Self(126);
    pub const CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: Self = Self(127);
    pub const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: Self = Self(128);
    pub const CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS: Self = Self(129);
    pub const CU_DEVICE_ATTRIBUTE_NUMA_CONFIG: Self = Self(130);
    pub const CU_DEVICE_ATTRIBUTE_NUMA_ID: Self = Self(131);
    pub const CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: Self = Self(132);
    pub const CU_DEVICE_ATTRIBUTE_MPS_ENABLED: Self = Self(133);
    pub const CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: Self = Self(134);
    pub const CU_DEVICE_ATTRIBUTE_D3D12_CIG_SUPPORTED: Self = Self(135);
    pub const CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK: Self = Self(136);
    pub const CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_MAXIMUM_LENGTH: Self = Self(137);
    pub const CU_DEVICE_ATTRIBUTE_VULKAN_CIG_SUPPORTED: Self = Self(138);
    pub const CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID: Self = Self(139);
    pub const CU_DEVICE_ATTRIBUTE_GPU_PCI_SUBSYSTEM_ID: Self = Self(140);
    pub const CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: Self = Self(141);
    pub const CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED: Self = Self(142);
    pub const CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED: Self = Self(143);
    pub const CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED: Self = Self(144);
    pub const CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: Self = Self(145);
    pub const CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED: Self = Self(146);
    pub const CU_DEVICE_ATTRIBUTE_ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED: Self = Self(147);
    pub const CU_DEVICE_ATTRIBUTE_MAX: Self = Self(148);
}

pub type CUdevice_v1 = c_int;

pub type CUdeviceptr = CUdeviceptr_v2;

pub type CUdeviceptr_v1 = c_uint;

pub type CUdeviceptr_v2 = c_ulonglong;

pub type CUdevprop = CUdevprop_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUdevprop_st {
    pub maxThreadsPerBlock: c_int,
    pub maxThreadsDim: [c_int; 3],
    pub maxGridSize: [c_int; 3],
    pub sharedMemPerBlock: c_int,
    pub totalConstantMemory: c_int,
    pub SIMDWidth: c_int,
    pub memPitch: c_int,
    pub regsPerBlock: c_int,
    pub clockRate: c_int,
    pub textureAlign: c_int,
}
const _: () = {
    assert!(size_of::<CUdevprop_st>() == 56 && align_of::<CUdevprop_st>() == 4);
    assert!(offset_of!(CUdevprop_st, maxThreadsPerBlock) == 0);
    assert!(offset_of!(CUdevprop_st, maxThreadsDim) == 4);
    assert!(offset_of!(CUdevprop_st, maxGridSize) == 16);
    assert!(offset_of!(CUdevprop_st, sharedMemPerBlock) == 28);
    assert!(offset_of!(CUdevprop_st, totalConstantMemory) == 32);
    assert!(offset_of!(CUdevprop_st, SIMDWidth) == 36);
    assert!(offset_of!(CUdevprop_st, memPitch) == 40);
    assert!(offset_of!(CUdevprop_st, regsPerBlock) == 44);
    assert!(offset_of!(CUdevprop_st, clockRate) == 48);
    assert!(offset_of!(CUdevprop_st, textureAlign) == 52);
};

pub type CUdevprop_v1 = CUdevprop_st;

pub type CUdriverProcAddressQueryResult = CUdriverProcAddressQueryResult_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUdriverProcAddressQueryResult_enum(pub u32);
impl CUdriverProcAddressQueryResult_enum {
    pub const CU_GET_PROC_ADDRESS_SUCCESS: Self = Self(0);
    pub const CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND: Self = Self(1);
    pub const CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT: Self = Self(2);
}

pub type CUevent = *mut CUevent_st;

#[repr(C)]
pub struct CUevent_st {
    _opaque: [u8; 0],
}

pub type CUexecAffinityParam = CUexecAffinityParam_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUexecAffinityParam_st {
    pub r#type: CUexecAffinityType,
    pub param: CUexecAffinityParam_st_unnamed1,
}
const _: () = {
    assert!(size_of::<CUexecAffinityParam_st>() == 8 && align_of::<CUexecAffinityParam_st>() == 4);
    assert!(offset_of!(CUexecAffinityParam_st, r#type) == 0);
    assert!(offset_of!(CUexecAffinityParam_st, param) == 4);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUexecAffinityParam_st_unnamed1 {
    pub smCount: CUexecAffinitySmCount,
}

pub type CUexecAffinityParam_v1 = CUexecAffinityParam_st;

pub type CUexecAffinitySmCount = CUexecAffinitySmCount_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUexecAffinitySmCount_st {
    pub val: c_uint,
}
const _: () = {
    assert!(size_of::<CUexecAffinitySmCount_st>() == 4 && align_of::<CUexecAffinitySmCount_st>() == 4);
    assert!(offset_of!(CUexecAffinitySmCount_st, val) == 0);
};

pub type CUexecAffinitySmCount_v1 = CUexecAffinitySmCount_st;

pub type CUexecAffinityType = CUexecAffinityType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUexecAffinityType_enum(pub u32);
impl CUexecAffinityType_enum {
    pub const CU_EXEC_AFFINITY_TYPE_SM_COUNT: Self = Self(0);
    pub const CU_EXEC_AFFINITY_TYPE_MAX: Self = Self(1);
}

#[repr(C)]
pub struct CUextMemory_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUextSemaphore_st {
    _opaque: [u8; 0],
}

pub type CUextent3D = CUextent3D_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUextent3D_st {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}
const _: () = {
    assert!(size_of::<CUextent3D_st>() == 24 && align_of::<CUextent3D_st>() == 8);
    assert!(offset_of!(CUextent3D_st, width) == 0);
    assert!(offset_of!(CUextent3D_st, height) == 8);
    assert!(offset_of!(CUextent3D_st, depth) == 16);
};

pub type CUextent3D_v1 = CUextent3D_st;

pub type CUexternalMemory = *mut CUextMemory_st;

pub type CUexternalMemoryHandleType = CUexternalMemoryHandleType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUexternalMemoryHandleType_enum(pub u32);
impl CUexternalMemoryHandleType_enum {
    pub const CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD: Self = Self(1);
    pub const CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_WIN32: Self = Self(2);
    pub const CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_WIN32_KMT: Self = Self(3);
    pub const CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_HEAP: Self = Self(4);
    pub const CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_RESOURCE: Self = Self(5);
    pub const CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D11_RESOURCE: Self = Self(6);
    pub const CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D11_RESOURCE_KMT: Self = Self(7);
    pub const CU_EXTERNAL_MEMORY_HANDLE_TYPE_NVSCIBUF: Self = Self(8);
    pub const CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD: Self = Self(9);
}

pub type CUexternalSemaphore = *mut CUextSemaphore_st;

pub type CUexternalSemaphoreHandleType = CUexternalSemaphoreHandleType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUexternalSemaphoreHandleType_enum(pub u32);
impl CUexternalSemaphoreHandleType_enum {
    pub const CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD: Self = Self(1);
    pub const CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_WIN32: Self = Self(2);
    pub const CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_WIN32_KMT: Self = Self(3);
    pub const CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_D3D12_FENCE: Self = Self(4);
    pub const CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_D3D11_FENCE: Self = Self(5);
    pub const CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_NVSCISYNC: Self = Self(6);
    pub const CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_D3D11_KEYED_MUTEX: Self = Self(7);
    pub const CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_D3D11_KEYED_MUTEX_KMT: Self = Self(8);
    pub const CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD: Self = Self(9);
    pub const CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_WIN32: Self = Self(10);
}

pub type CUfilter_mode = CUfilter_mode_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUfilter_mode_enum(pub u32);
impl CUfilter_mode_enum {
    pub const CU_TR_FILTER_MODE_POINT: Self = Self(0);
    pub const CU_TR_FILTER_MODE_LINEAR: Self = Self(1);
}

pub type CUflushGPUDirectRDMAWritesScope = CUflushGPUDirectRDMAWritesScope_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUflushGPUDirectRDMAWritesScope_enum(pub u32);
impl CUflushGPUDirectRDMAWritesScope_enum {
    pub const CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER: Self = Self(100);
    pub const CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES: Self = Self(200);
}

pub type CUflushGPUDirectRDMAWritesTarget = CUflushGPUDirectRDMAWritesTarget_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUflushGPUDirectRDMAWritesTarget_enum(pub u32);
impl CUflushGPUDirectRDMAWritesTarget_enum {
    pub const CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX: Self = Self(0);
}

pub type CUfunc_cache = CUfunc_cache_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUfunc_cache_enum(pub u32);
impl CUfunc_cache_enum {
    pub const CU_FUNC_CACHE_PREFER_NONE: Self = Self(0);
    pub const CU_FUNC_CACHE_PREFER_SHARED: Self = Self(1);
    pub const CU_FUNC_CACHE_PREFER_L1: Self = Self(2);
    pub const CU_FUNC_CACHE_PREFER_EQUAL: Self = Self(3);
}

#[repr(C)]
pub struct CUfunc_st {
    _opaque: [u8; 0],
}

pub type CUfunction = *mut CUfunc_st;

pub type CUfunctionLoadingState = CUfunctionLoadingState_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUfunctionLoadingState_enum(pub u32);
impl CUfunctionLoadingState_enum {
    pub const CU_FUNCTION_LOADING_STATE_UNLOADED: Self = Self(0);
    pub const CU_FUNCTION_LOADING_STATE_LOADED: Self = Self(1);
    pub const CU_FUNCTION_LOADING_STATE_MAX: Self = Self(2);
}

pub type CUfunction_attribute = CUfunction_attribute_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUfunction_attribute_enum(pub u32);
impl CUfunction_attribute_enum {
    pub const CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: Self = Self(0);
    pub const CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: Self = Self(1);
    pub const CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: Self = Self(2);
    pub const CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: Self = Self(3);
    pub const CU_FUNC_ATTRIBUTE_NUM_REGS: Self = Self(4);
    pub const CU_FUNC_ATTRIBUTE_PTX_VERSION: Self = Self(5);
    pub const CU_FUNC_ATTRIBUTE_BINARY_VERSION: Self = Self(6);
    pub const CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: Self = Self(7);
    pub const CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: Self = Self(8);
    pub const CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: Self = Self(9);
    pub const CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET: Self = Self(10);
    pub const CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH: Self = Self(11);
    pub const CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT: Self = Self(12);
    pub const CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH: Self = Self(13);
    pub const CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: Self = Self(14);
    pub const CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: Self = Self(15);
    pub const CU_FUNC_ATTRIBUTE_MAX: Self = Self(16);
}

pub type CUgraph = *mut CUgraph_st;

pub type CUgraphChildGraphNodeOwnership = CUgraphChildGraphNodeOwnership_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUgraphChildGraphNodeOwnership_enum(pub u32);
impl CUgraphChildGraphNodeOwnership_enum {
    pub const CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE: Self = Self(0);
    pub const CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE: Self = Self(1);
}

pub type CUgraphConditionalHandle = cuuint64_t;

pub type CUgraphConditionalNodeType = CUgraphConditionalNodeType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUgraphConditionalNodeType_enum(pub u32);
impl CUgraphConditionalNodeType_enum {
    pub const CU_GRAPH_COND_TYPE_IF: Self = Self(0);
    pub const CU_GRAPH_COND_TYPE_WHILE: Self = Self(1);
    pub const CU_GRAPH_COND_TYPE_SWITCH: Self = Self(2);
}

pub type CUgraphDeviceNode = *mut CUgraphDeviceUpdatableNode_st;

#[repr(C)]
pub struct CUgraphDeviceUpdatableNode_st {
    _opaque: [u8; 0],
}

pub type CUgraphEdgeData = CUgraphEdgeData_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUgraphEdgeData_st {
    pub from_port: c_uchar,
    pub to_port: c_uchar,
    pub r#type: c_uchar,
    pub reserved: [c_uchar; 5],
}
const _: () = {
    assert!(size_of::<CUgraphEdgeData_st>() == 8 && align_of::<CUgraphEdgeData_st>() == 1);
    assert!(offset_of!(CUgraphEdgeData_st, from_port) == 0);
    assert!(offset_of!(CUgraphEdgeData_st, to_port) == 1);
    assert!(offset_of!(CUgraphEdgeData_st, r#type) == 2);
    assert!(offset_of!(CUgraphEdgeData_st, reserved) == 3);
};

pub type CUgraphExec = *mut CUgraphExec_st;

pub type CUgraphExecUpdateResult = CUgraphExecUpdateResult_enum;

pub type CUgraphExecUpdateResultInfo = CUgraphExecUpdateResultInfo_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUgraphExecUpdateResultInfo_st {
    pub result: CUgraphExecUpdateResult,
    pub errorNode: CUgraphNode,
    pub errorFromNode: CUgraphNode,
}
const _: () = {
    assert!(size_of::<CUgraphExecUpdateResultInfo_st>() == 24 && align_of::<CUgraphExecUpdateResultInfo_st>() == 8);
    assert!(offset_of!(CUgraphExecUpdateResultInfo_st, result) == 0);
    assert!(offset_of!(CUgraphExecUpdateResultInfo_st, errorNode) == 8);
    assert!(offset_of!(CUgraphExecUpdateResultInfo_st, errorFromNode) == 16);
};

pub type CUgraphExecUpdateResultInfo_v1 = CUgraphExecUpdateResultInfo_st;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUgraphExecUpdateResult_enum(pub u32);
impl CUgraphExecUpdateResult_enum {
    pub const CU_GRAPH_EXEC_UPDATE_SUCCESS: Self = Self(0);
    pub const CU_GRAPH_EXEC_UPDATE_ERROR: Self = Self(1);
    pub const CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED: Self = Self(2);
    pub const CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED: Self = Self(3);
    pub const CU_GRAPH_EXEC_UPDATE_ERROR_FUNCTION_CHANGED: Self = Self(4);
    pub const CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED: Self = Self(5);
    pub const CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED: Self = Self(6);
    pub const CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE: Self = Self(7);
    pub const CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED: Self = Self(8);
}

#[repr(C)]
pub struct CUgraphExec_st {
    _opaque: [u8; 0],
}

pub type CUgraphInstantiateResult = CUgraphInstantiateResult_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUgraphInstantiateResult_enum(pub u32);
impl CUgraphInstantiateResult_enum {
    pub const CUDA_GRAPH_INSTANTIATE_SUCCESS: Self = Self(0);
    pub const CUDA_GRAPH_INSTANTIATE_ERROR: Self = Self(1);
    pub const CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE: Self = Self(2);
    pub const CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED: Self = Self(3);
    pub const CUDA_GRAPH_INSTANTIATE_MULTIPLE_CTXS_NOT_SUPPORTED: Self = Self(4);
    pub const CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED: Self = Self(5);
}

pub type CUgraphMem_attribute = CUgraphMem_attribute_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUgraphMem_attribute_enum(pub u32);
impl CUgraphMem_attribute_enum {
    pub const CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: Self = Self(0);
    pub const CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: Self = Self(1);
    pub const CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: Self = Self(2);
    pub const CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: Self = Self(3);
}

pub type CUgraphNode = *mut CUgraphNode_st;

pub type CUgraphNodeParams = CUgraphNodeParams_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUgraphNodeParams_st {
    pub r#type: CUgraphNodeType,
    pub reserved0: [c_int; 3],
    pub anonymous2: CUgraphNodeParams_st_unnamed1,
    pub reserved2: c_longlong,
}
const _: () = {
    assert!(size_of::<CUgraphNodeParams_st>() == 256 && align_of::<CUgraphNodeParams_st>() == 8);
    assert!(offset_of!(CUgraphNodeParams_st, r#type) == 0);
    assert!(offset_of!(CUgraphNodeParams_st, reserved0) == 4);
    assert!(offset_of!(CUgraphNodeParams_st, reserved2) == 248);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUgraphNodeParams_st_unnamed1 {
    pub reserved1: [c_longlong; 29],
    pub kernel: CUDA_KERNEL_NODE_PARAMS_v3,
    pub memcpy: CUDA_MEMCPY_NODE_PARAMS,
    pub memset: CUDA_MEMSET_NODE_PARAMS_v2,
    pub host: CUDA_HOST_NODE_PARAMS_v2,
    pub graph: CUDA_CHILD_GRAPH_NODE_PARAMS,
    pub eventWait: CUDA_EVENT_WAIT_NODE_PARAMS,
    pub eventRecord: CUDA_EVENT_RECORD_NODE_PARAMS,
    pub extSemSignal: CUDA_EXT_SEM_SIGNAL_NODE_PARAMS_v2,
    pub extSemWait: CUDA_EXT_SEM_WAIT_NODE_PARAMS_v2,
    pub alloc: CUDA_MEM_ALLOC_NODE_PARAMS_v2,
    pub free: CUDA_MEM_FREE_NODE_PARAMS,
    pub memOp: CUDA_BATCH_MEM_OP_NODE_PARAMS_v2,
    pub conditional: CUDA_CONDITIONAL_NODE_PARAMS,
}

pub type CUgraphNodeType = CUgraphNodeType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUgraphNodeType_enum(pub u32);
impl CUgraphNodeType_enum {
    pub const CU_GRAPH_NODE_TYPE_KERNEL: Self = Self(0);
    pub const CU_GRAPH_NODE_TYPE_MEMCPY: Self = Self(1);
    pub const CU_GRAPH_NODE_TYPE_MEMSET: Self = Self(2);
    pub const CU_GRAPH_NODE_TYPE_HOST: Self = Self(3);
    pub const CU_GRAPH_NODE_TYPE_GRAPH: Self = Self(4);
    pub const CU_GRAPH_NODE_TYPE_EMPTY: Self = Self(5);
    pub const CU_GRAPH_NODE_TYPE_WAIT_EVENT: Self = Self(6);
    pub const CU_GRAPH_NODE_TYPE_EVENT_RECORD: Self = Self(7);
    pub const CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL: Self = Self(8);
    pub const CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT: Self = Self(9);
    pub const CU_GRAPH_NODE_TYPE_MEM_ALLOC: Self = Self(10);
    pub const CU_GRAPH_NODE_TYPE_MEM_FREE: Self = Self(11);
    pub const CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: Self = Self(12);
    pub const CU_GRAPH_NODE_TYPE_CONDITIONAL: Self = Self(13);
}

#[repr(C)]
pub struct CUgraphNode_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUgraph_st {
    _opaque: [u8; 0],
}

pub type CUgraphicsResource = *mut CUgraphicsResource_st;

#[repr(C)]
pub struct CUgraphicsResource_st {
    _opaque: [u8; 0],
}

pub type CUgreenCtx = *mut CUgreenCtx_st;

#[repr(C)]
pub struct CUgreenCtx_st {
    _opaque: [u8; 0],
}

pub type CUhostFn = Option<unsafe extern "C" fn(userData: *mut c_void)>;

pub type CUipcEventHandle = CUipcEventHandle_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUipcEventHandle_st {
    pub reserved: [c_char; 64],
}
const _: () = {
    assert!(size_of::<CUipcEventHandle_st>() == 64 && align_of::<CUipcEventHandle_st>() == 1);
    assert!(offset_of!(CUipcEventHandle_st, reserved) == 0);
};

pub type CUipcEventHandle_v1 = CUipcEventHandle_st;

pub type CUipcMemHandle = CUipcMemHandle_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUipcMemHandle_st {
    pub reserved: [c_char; 64],
}
const _: () = {
    assert!(size_of::<CUipcMemHandle_st>() == 64 && align_of::<CUipcMemHandle_st>() == 1);
    assert!(offset_of!(CUipcMemHandle_st, reserved) == 0);
};

pub type CUipcMemHandle_v1 = CUipcMemHandle_st;

pub type CUjitInputType = CUjitInputType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUjitInputType_enum(pub u32);
impl CUjitInputType_enum {
    pub const CU_JIT_INPUT_CUBIN: Self = Self(0);
    pub const CU_JIT_INPUT_PTX: Self = Self(1);
    pub const CU_JIT_INPUT_FATBINARY: Self = Self(2);
    pub const CU_JIT_INPUT_OBJECT: Self = Self(3);
    pub const CU_JIT_INPUT_LIBRARY: Self = Self(4);
    pub const CU_JIT_INPUT_NVVM: Self = Self(5);
    pub const CU_JIT_NUM_INPUT_TYPES: Self = Self(6);
}

pub type CUjit_option = CUjit_option_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUjit_option_enum(pub u32);
impl CUjit_option_enum {
    pub const CU_JIT_MAX_REGISTERS: Self = Self(0);
    pub const CU_JIT_THREADS_PER_BLOCK: Self = Self(1);
    pub const CU_JIT_WALL_TIME: Self = Self(2);
    pub const CU_JIT_INFO_LOG_BUFFER: Self = Self(3);
    pub const CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: Self = Self(4);
    pub const CU_JIT_ERROR_LOG_BUFFER: Self = Self(5);
    pub const CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: Self = Self(6);
    pub const CU_JIT_OPTIMIZATION_LEVEL: Self = Self(7);
    pub const CU_JIT_TARGET_FROM_CUCONTEXT: Self = Self(8);
    pub const CU_JIT_TARGET: Self = Self(9);
    pub const CU_JIT_FALLBACK_STRATEGY: Self = Self(10);
    pub const CU_JIT_GENERATE_DEBUG_INFO: Self = Self(11);
    pub const CU_JIT_LOG_VERBOSE: Self = Self(12);
    pub const CU_JIT_GENERATE_LINE_INFO: Self = Self(13);
    pub const CU_JIT_CACHE_MODE: Self = Self(14);
    pub const CU_JIT_NEW_SM3X_OPT: Self = Self(15);
    pub const CU_JIT_FAST_COMPILE: Self = Self(16);
    pub const CU_JIT_GLOBAL_SYMBOL_NAMES: Self = Self(17);
    pub const CU_JIT_GLOBAL_SYMBOL_ADDRESSES: Self = Self(18);
    pub const CU_JIT_GLOBAL_SYMBOL_COUNT: Self = Self(19);
    pub const CU_JIT_LTO: Self = Self(20);
    pub const CU_JIT_FTZ: Self = Self(21);
    pub const CU_JIT_PREC_DIV: Self = Self(22);
    pub const CU_JIT_PREC_SQRT: Self = Self(23);
    pub const CU_JIT_FMA: Self = Self(24);
    pub const CU_JIT_REFERENCED_KERNEL_NAMES: Self = Self(25);
    pub const CU_JIT_REFERENCED_KERNEL_COUNT: Self = Self(26);
    pub const CU_JIT_REFERENCED_VARIABLE_NAMES: Self = Self(27);
    pub const CU_JIT_REFERENCED_VARIABLE_COUNT: Self = Self(28);
    pub const CU_JIT_OPTIMIZE_UNUSED_DEVICE_VARIABLES: Self = Self(29);
    pub const CU_JIT_POSITION_INDEPENDENT_CODE: Self = Self(30);
    pub const CU_JIT_MIN_CTA_PER_SM: Self = Self(31);
    pub const CU_JIT_MAX_THREADS_PER_BLOCK: Self = Self(32);
    pub const CU_JIT_OVERRIDE_DIRECTIVE_VALUES: Self = Self(33);
    pub const CU_JIT_SPLIT_COMPILE: Self = Self(34);
    pub const CU_JIT_NUM_OPTIONS: Self = Self(35);
}

#[repr(C)]
pub struct CUkern_st {
    _opaque: [u8; 0],
}

pub type CUkernel = *mut CUkern_st;

pub type CUkernelNodeAttrID = CUlaunchAttributeID;

pub type CUkernelNodeAttrValue = CUkernelNodeAttrValue_v1;

pub type CUkernelNodeAttrValue_v1 = CUlaunchAttributeValue;

pub type CUlaunchAttribute = CUlaunchAttribute_st;

pub type CUlaunchAttributeID = CUlaunchAttributeID_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUlaunchAttributeID_enum(pub u32);
impl CUlaunchAttributeID_enum {
    pub const CU_LAUNCH_ATTRIBUTE_IGNORE: Self = Self(0);
    pub const CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW: Self = Self(1);
    pub const CU_LAUNCH_ATTRIBUTE_COOPERATIVE: Self = Self(2);
    pub const CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY: Self = Self(3);
    pub const CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: Self = Self(4);
    pub const CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: Self = Self(5);
    pub const CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: Self = Self(6);
    pub const CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT: Self = Self(7);
    pub const CU_LAUNCH_ATTRIBUTE_PRIORITY: Self = Self(8);
    pub const CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP: Self = Self(9);
    pub const CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN: Self = Self(10);
    pub const CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION: Self = Self(11);
    pub const CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT: Self = Self(12);
    pub const CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE: Self = Self(13);
    pub const CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: Self = Self(14);
    pub const CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING: Self = Self(16);
    pub const CU_LAUNCH_ATTRIBUTE_MAX: Self = Self(17);
}

pub type CUlaunchAttributeValue = CUlaunchAttributeValue_union;

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUlaunchAttributeValue_union {
    pub pad: [c_char; 64],
    pub accessPolicyWindow: CUaccessPolicyWindow,
    pub cooperative: c_int,
    pub syncPolicy: CUsynchronizationPolicy,
    pub clusterDim: CUlaunchAttributeValue_union_unnamed1,
    pub clusterSchedulingPolicyPreference: CUclusterSchedulingPolicy,
    pub programmaticStreamSerializationAllowed: c_int,
    pub programmaticEvent: CUlaunchAttributeValue_union_unnamed2,
    pub launchCompletionEvent: CUlaunchAttributeValue_union_unnamed3,
    pub priority: c_int,
    pub memSyncDomainMap: CUlaunchMemSyncDomainMap,
    pub memSyncDomain: CUlaunchMemSyncDomain,
    pub preferredClusterDim: CUlaunchAttributeValue_union_unnamed4,
    pub deviceUpdatableKernelNode: CUlaunchAttributeValue_union_unnamed5,
    pub sharedMemCarveout: c_uint,
    pub nvlinkUtilCentricScheduling: c_uint,
}
const _: () = {
    assert!(size_of::<CUlaunchAttributeValue_union>() == 64 && align_of::<CUlaunchAttributeValue_union>() == 8);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUlaunchAttributeValue_union_unnamed1 {
    pub x: c_uint,
    pub y: c_uint,
    pub z: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUlaunchAttributeValue_union_unnamed2 {
    pub event: CUevent,
    pub flags: c_int,
    pub triggerAtBlockStart: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUlaunchAttributeValue_union_unnamed3 {
    pub event: CUevent,
    pub flags: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUlaunchAttributeValue_union_unnamed4 {
    pub x: c_uint,
    pub y: c_uint,
    pub z: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUlaunchAttributeValue_union_unnamed5 {
    pub deviceUpdatable: c_int,
    pub devNode: CUgraphDeviceNode,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUlaunchAttribute_st {
    pub id: CUlaunchAttributeID,
    pub pad: [c_char; 4],
    pub value: CUlaunchAttributeValue,
}
const _: () = {
    assert!(size_of::<CUlaunchAttribute_st>() == 72 && align_of::<CUlaunchAttribute_st>() == 8);
    assert!(offset_of!(CUlaunchAttribute_st, id) == 0);
    assert!(offset_of!(CUlaunchAttribute_st, pad) == 4);
    assert!(offset_of!(CUlaunchAttribute_st, value) == 8);
};

pub type CUlaunchConfig = CUlaunchConfig_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUlaunchConfig_st {
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub hStream: CUstream,
    pub attrs: *mut CUlaunchAttribute,
    pub numAttrs: c_uint,
}
const _: () = {
    assert!(size_of::<CUlaunchConfig_st>() == 56 && align_of::<CUlaunchConfig_st>() == 8);
    assert!(offset_of!(CUlaunchConfig_st, gridDimX) == 0);
    assert!(offset_of!(CUlaunchConfig_st, gridDimY) == 4);
    assert!(offset_of!(CUlaunchConfig_st, gridDimZ) == 8);
    assert!(offset_of!(CUlaunchConfig_st, blockDimX) == 12);
    assert!(offset_of!(CUlaunchConfig_st, blockDimY) == 16);
    assert!(offset_of!(CUlaunchConfig_st, blockDimZ) == 20);
    assert!(offset_of!(CUlaunchConfig_st, sharedMemBytes) == 24);
    assert!(offset_of!(CUlaunchConfig_st, hStream) == 32);
    assert!(offset_of!(CUlaunchConfig_st, attrs) == 40);
    assert!(offset_of!(CUlaunchConfig_st, numAttrs) == 48);
};

pub type CUlaunchMemSyncDomain = CUlaunchMemSyncDomain_enum;

pub type CUlaunchMemSyncDomainMap = CUlaunchMemSyncDomainMap_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUlaunchMemSyncDomainMap_st {
    pub default_: c_uchar,
    pub remote: c_uchar,
}
const _: () = {
    assert!(size_of::<CUlaunchMemSyncDomainMap_st>() == 2 && align_of::<CUlaunchMemSyncDomainMap_st>() == 1);
    assert!(offset_of!(CUlaunchMemSyncDomainMap_st, default_) == 0);
    assert!(offset_of!(CUlaunchMemSyncDomainMap_st, remote) == 1);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUlaunchMemSyncDomain_enum(pub u32);
impl CUlaunchMemSyncDomain_enum {
    pub const CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT: Self = Self(0);
    pub const CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE: Self = Self(1);
}

#[repr(C)]
pub struct CUlib_st {
    _opaque: [u8; 0],
}

pub type CUlibrary = *mut CUlib_st;

pub type CUlibraryOption = CUlibraryOption_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUlibraryOption_enum(pub u32);
impl CUlibraryOption_enum {
    pub const CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE: Self = Self(0);
    pub const CU_LIBRARY_BINARY_IS_PRESERVED: Self = Self(1);
    pub const CU_LIBRARY_NUM_OPTIONS: Self = Self(2);
}

pub type CUlimit = CUlimit_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUlimit_enum(pub u32);
impl CUlimit_enum {
    pub const CU_LIMIT_STACK_SIZE: Self = Self(0);
    pub const CU_LIMIT_PRINTF_FIFO_SIZE: Self = Self(1);
    pub const CU_LIMIT_MALLOC_HEAP_SIZE: Self = Self(2);
    pub const CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH: Self = Self(3);
    pub const CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT: Self = Self(4);
    pub const CU_LIMIT_MAX_L2_FETCH_GRANULARITY: Self = Self(5);
    pub const CU_LIMIT_PERSISTING_L2_CACHE_SIZE: Self = Self(6);
    pub const CU_LIMIT_SHMEM_SIZE: Self = Self(7);
    pub const CU_LIMIT_CIG_ENABLED: Self = Self(8);
    pub const CU_LIMIT_CIG_SHMEM_FALLBACK_ENABLED: Self = Self(9);
    pub const CU_LIMIT_MAX: Self = Self(10);
}

pub type CUlinkState = *mut CUlinkState_st;

#[repr(C)]
pub struct CUlinkState_st {
    _opaque: [u8; 0],
}

pub type CUlogIterator = c_uint;

pub type CUlogLevel = CUlogLevel_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUlogLevel_enum(pub u32);
impl CUlogLevel_enum {
    pub const CU_LOG_LEVEL_ERROR: Self = Self(0);
    pub const CU_LOG_LEVEL_WARNING: Self = Self(1);
}

pub type CUlogsCallback = Option<unsafe extern "C" fn(data: *mut c_void, logLevel: CUlogLevel, message: *mut c_char, length: usize)>;

#[repr(C)]
pub struct CUlogsCallbackEntry_st {
    _opaque: [u8; 0],
}

pub type CUlogsCallbackHandle = *mut CUlogsCallbackEntry_st;

pub type CUmemAccessDesc = CUmemAccessDesc_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemAccessDesc_st {
    pub location: CUmemLocation,
    pub flags: CUmemAccess_flags,
}
const _: () = {
    assert!(size_of::<CUmemAccessDesc_st>() == 12 && align_of::<CUmemAccessDesc_st>() == 4);
    assert!(offset_of!(CUmemAccessDesc_st, location) == 0);
    assert!(offset_of!(CUmemAccessDesc_st, flags) == 8);
};

pub type CUmemAccessDesc_v1 = CUmemAccessDesc_st;

pub type CUmemAccess_flags = CUmemAccess_flags_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemAccess_flags_enum(pub u32);
impl CUmemAccess_flags_enum {
    pub const CU_MEM_ACCESS_FLAGS_PROT_NONE: Self = Self(0);
    pub const CU_MEM_ACCESS_FLAGS_PROT_READ: Self = Self(1);
    pub const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: Self = Self(3);
    pub const CU_MEM_ACCESS_FLAGS_PROT_MAX: Self = Self(2147483647);
}

pub type CUmemAllocationGranularity_flags = CUmemAllocationGranularity_flags_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemAllocationGranularity_flags_enum(pub u32);
impl CUmemAllocationGranularity_flags_enum {
    pub const CU_MEM_ALLOC_GRANULARITY_MINIMUM: Self = Self(0);
    pub const CU_MEM_ALLOC_GRANULARITY_RECOMMENDED: Self = Self(1);
}

pub type CUmemAllocationHandleType = CUmemAllocationHandleType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemAllocationHandleType_enum(pub u32);
impl CUmemAllocationHandleType_enum {
    pub const CU_MEM_HANDLE_TYPE_NONE: Self = Self(0);
    pub const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: Self = Self(1);
    pub const CU_MEM_HANDLE_TYPE_WIN32: Self = Self(2);
    pub const CU_MEM_HANDLE_TYPE_WIN32_KMT: Self = Self(4);
    pub const CU_MEM_HANDLE_TYPE_FABRIC: Self = Self(8);
    pub const CU_MEM_HANDLE_TYPE_MAX: Self = Self(2147483647);
}

pub type CUmemAllocationProp = CUmemAllocationProp_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemAllocationProp_st {
    pub r#type: CUmemAllocationType,
    pub requestedHandleTypes: CUmemAllocationHandleType,
    pub location: CUmemLocation,
    pub win32HandleMetaData: *mut c_void,
    pub allocFlags: CUmemAllocationProp_st_unnamed1,
}
const _: () = {
    assert!(size_of::<CUmemAllocationProp_st>() == 32 && align_of::<CUmemAllocationProp_st>() == 8);
    assert!(offset_of!(CUmemAllocationProp_st, r#type) == 0);
    assert!(offset_of!(CUmemAllocationProp_st, requestedHandleTypes) == 4);
    assert!(offset_of!(CUmemAllocationProp_st, location) == 8);
    assert!(offset_of!(CUmemAllocationProp_st, win32HandleMetaData) == 16);
    assert!(offset_of!(CUmemAllocationProp_st, allocFlags) == 24);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemAllocationProp_st_unnamed1 {
    pub compressionType: c_uchar,
    pub gpuDirectRDMACapable: c_uchar,
    pub usage: c_ushort,
    pub reserved: [c_uchar; 4],
}

pub type CUmemAllocationProp_v1 = CUmemAllocationProp_st;

pub type CUmemAllocationType = CUmemAllocationType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemAllocationType_enum(pub u32);
impl CUmemAllocationType_enum {
    pub const CU_MEM_ALLOCATION_TYPE_INVALID: Self = Self(0);
    pub const CU_MEM_ALLOCATION_TYPE_PINNED: Self = Self(1);
    pub const CU_MEM_ALLOCATION_TYPE_MANAGED: Self = Self(2);
    pub const CU_MEM_ALLOCATION_TYPE_MAX: Self = Self(2147483647);
}

pub type CUmemDecompressAlgorithm = CUmemDecompressAlgorithm_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemDecompressAlgorithm_enum(pub u32);
impl CUmemDecompressAlgorithm_enum {
    pub const CU_MEM_DECOMPRESS_UNSUPPORTED: Self = Self(0);
    pub const CU_MEM_DECOMPRESS_ALGORITHM_DEFLATE: Self = Self(1);
    pub const CU_MEM_DECOMPRESS_ALGORITHM_SNAPPY: Self = Self(2);
    pub const CU_MEM_DECOMPRESS_ALGORITHM_LZ4: Self = Self(4);
}

pub type CUmemDecompressParams = CUmemDecompressParams_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemDecompressParams_st {
    pub srcNumBytes: usize,
    pub dstNumBytes: usize,
    pub dstActBytes: *mut cuuint32_t,
    pub src: *const c_void,
    pub dst: *mut c_void,
    pub algo: CUmemDecompressAlgorithm,
    pub padding: [c_uchar; 20],
}
const _: () = {
    assert!(size_of::<CUmemDecompressParams_st>() == 64 && align_of::<CUmemDecompressParams_st>() == 8);
    assert!(offset_of!(CUmemDecompressParams_st, srcNumBytes) == 0);
    assert!(offset_of!(CUmemDecompressParams_st, dstNumBytes) == 8);
    assert!(offset_of!(CUmemDecompressParams_st, dstActBytes) == 16);
    assert!(offset_of!(CUmemDecompressParams_st, src) == 24);
    assert!(offset_of!(CUmemDecompressParams_st, dst) == 32);
    assert!(offset_of!(CUmemDecompressParams_st, algo) == 40);
    assert!(offset_of!(CUmemDecompressParams_st, padding) == 44);
};

pub type CUmemGenericAllocationHandle = CUmemGenericAllocationHandle_v1;

pub type CUmemGenericAllocationHandle_v1 = c_ulonglong;

pub type CUmemHandleType = CUmemHandleType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemHandleType_enum(pub u32);
impl CUmemHandleType_enum {
    pub const CU_MEM_HANDLE_TYPE_GENERIC: Self = Self(0);
}

pub type CUmemLocation = CUmemLocation_v1;

pub type CUmemLocationType = CUmemLocationType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemLocationType_enum(pub u32);
impl CUmemLocationType_enum {
    pub const CU_MEM_LOCATION_TYPE_INVALID: Self = Self(0);
    pub const CU_MEM_LOCATION_TYPE_NONE: Self = Self(0);
    pub const CU_MEM_LOCATION_TYPE_DEVICE: Self = Self(1);
    pub const CU_MEM_LOCATION_TYPE_HOST: Self = Self(2);
    pub const CU_MEM_LOCATION_TYPE_HOST_NUMA: Self = Self(3);
    pub const CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: Self = Self(4);
    pub const CU_MEM_LOCATION_TYPE_MAX: Self = Self(2147483647);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemLocation_st {
    pub r#type: CUmemLocationType,
    pub id: c_int,
}
const _: () = {
    assert!(size_of::<CUmemLocation_st>() == 8 && align_of::<CUmemLocation_st>() == 4);
    assert!(offset_of!(CUmemLocation_st, r#type) == 0);
    assert!(offset_of!(CUmemLocation_st, id) == 4);
};

pub type CUmemLocation_v1 = CUmemLocation_st;

pub type CUmemOperationType = CUmemOperationType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemOperationType_enum(pub u32);
impl CUmemOperationType_enum {
    pub const CU_MEM_OPERATION_TYPE_MAP: Self = Self(1);
    pub const CU_MEM_OPERATION_TYPE_UNMAP: Self = Self(2);
}

#[repr(C)]
pub struct CUmemPoolHandle_st {
    _opaque: [u8; 0],
}

pub type CUmemPoolProps = CUmemPoolProps_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemPoolProps_st {
    pub allocType: CUmemAllocationType,
    pub handleTypes: CUmemAllocationHandleType,
    pub location: CUmemLocation,
    pub win32SecurityAttributes: *mut c_void,
    pub maxSize: usize,
    pub usage: c_ushort,
    pub reserved: [c_uchar; 54],
}
const _: () = {
    assert!(size_of::<CUmemPoolProps_st>() == 88 && align_of::<CUmemPoolProps_st>() == 8);
    assert!(offset_of!(CUmemPoolProps_st, allocType) == 0);
    assert!(offset_of!(CUmemPoolProps_st, handleTypes) == 4);
    assert!(offset_of!(CUmemPoolProps_st, location) == 8);
    assert!(offset_of!(CUmemPoolProps_st, win32SecurityAttributes) == 16);
    assert!(offset_of!(CUmemPoolProps_st, maxSize) == 24);
    assert!(offset_of!(CUmemPoolProps_st, usage) == 32);
    assert!(offset_of!(CUmemPoolProps_st, reserved) == 34);
};

pub type CUmemPoolProps_v1 = CUmemPoolProps_st;

pub type CUmemPoolPtrExportData = CUmemPoolPtrExportData_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemPoolPtrExportData_st {
    pub reserved: [c_uchar; 64],
}
const _: () = {
    assert!(size_of::<CUmemPoolPtrExportData_st>() == 64 && align_of::<CUmemPoolPtrExportData_st>() == 1);
    assert!(offset_of!(CUmemPoolPtrExportData_st, reserved) == 0);
};

pub type CUmemPoolPtrExportData_v1 = CUmemPoolPtrExportData_st;

pub type CUmemPool_attribute = CUmemPool_attribute_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemPool_attribute_enum(pub u32);
impl CUmemPool_attribute_enum {
    pub const CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: Self = Self(1);
    pub const CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: Self = Self(2);
    pub const CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: Self = Self(3);
    pub const CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: Self = Self(4);
    pub const CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: Self = Self(5);
    pub const CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: Self = Self(6);
    pub const CU_MEMPOOL_ATTR_USED_MEM_CURRENT: Self = Self(7);
    pub const CU_MEMPOOL_ATTR_USED_MEM_HIGH: Self = Self(8);
}

pub type CUmemRangeHandleType = CUmemRangeHandleType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemRangeHandleType_enum(pub u32);
impl CUmemRangeHandleType_enum {
    pub const CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD: Self = Self(1);
    pub const CU_MEM_RANGE_HANDLE_TYPE_MAX: Self = Self(2147483647);
}

pub type CUmem_advise = CUmem_advise_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmem_advise_enum(pub u32);
impl CUmem_advise_enum {
    pub const CU_MEM_ADVISE_SET_READ_MOSTLY: Self = Self(1);
    pub const CU_MEM_ADVISE_UNSET_READ_MOSTLY: Self = Self(2);
    pub const CU_MEM_ADVISE_SET_PREFERRED_LOCATION: Self = Self(3);
    pub const CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: Self = Self(4);
    pub const CU_MEM_ADVISE_SET_ACCESSED_BY: Self = Self(5);
    pub const CU_MEM_ADVISE_UNSET_ACCESSED_BY: Self = Self(6);
}

pub type CUmem_range_attribute = CUmem_range_attribute_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmem_range_attribute_enum(pub u32);
impl CUmem_range_attribute_enum {
    pub const CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY: Self = Self(1);
    pub const CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: Self = Self(2);
    pub const CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY: Self = Self(3);
    pub const CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: Self = Self(4);
    pub const CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE: Self = Self(5);
    pub const CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID: Self = Self(6);
    pub const CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE: Self = Self(7);
    pub const CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: Self = Self(8);
}

pub type CUmemcpy3DOperand = CUmemcpy3DOperand_v1;

pub type CUmemcpy3DOperandType = CUmemcpy3DOperandType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemcpy3DOperandType_enum(pub u32);
impl CUmemcpy3DOperandType_enum {
    pub const CU_MEMCPY_OPERAND_TYPE_POINTER: Self = Self(1);
    pub const CU_MEMCPY_OPERAND_TYPE_ARRAY: Self = Self(2);
    pub const CU_MEMCPY_OPERAND_TYPE_MAX: Self = Self(2147483647);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemcpy3DOperand_st {
    pub r#type: CUmemcpy3DOperandType,
    pub op: CUmemcpy3DOperand_st_unnamed1,
}
const _: () = {
    assert!(size_of::<CUmemcpy3DOperand_st>() == 40 && align_of::<CUmemcpy3DOperand_st>() == 8);
    assert!(offset_of!(CUmemcpy3DOperand_st, r#type) == 0);
    assert!(offset_of!(CUmemcpy3DOperand_st, op) == 8);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUmemcpy3DOperand_st_unnamed1 {
    pub ptr: CUmemcpy3DOperand_st_unnamed1_unnamed1,
    pub array: CUmemcpy3DOperand_st_unnamed1_unnamed2,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemcpy3DOperand_st_unnamed1_unnamed1 {
    pub ptr: CUdeviceptr,
    pub rowLength: usize,
    pub layerHeight: usize,
    pub locHint: CUmemLocation,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemcpy3DOperand_st_unnamed1_unnamed2 {
    pub array: CUarray,
    pub offset: CUoffset3D,
}

pub type CUmemcpy3DOperand_v1 = CUmemcpy3DOperand_st;

pub type CUmemcpyAttributes = CUmemcpyAttributes_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemcpyAttributes_st {
    pub srcAccessOrder: CUmemcpySrcAccessOrder,
    pub srcLocHint: CUmemLocation,
    pub dstLocHint: CUmemLocation,
    pub flags: c_uint,
}
const _: () = {
    assert!(size_of::<CUmemcpyAttributes_st>() == 24 && align_of::<CUmemcpyAttributes_st>() == 4);
    assert!(offset_of!(CUmemcpyAttributes_st, srcAccessOrder) == 0);
    assert!(offset_of!(CUmemcpyAttributes_st, srcLocHint) == 4);
    assert!(offset_of!(CUmemcpyAttributes_st, dstLocHint) == 12);
    assert!(offset_of!(CUmemcpyAttributes_st, flags) == 20);
};

pub type CUmemcpyAttributes_v1 = CUmemcpyAttributes_st;

pub type CUmemcpySrcAccessOrder = CUmemcpySrcAccessOrder_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemcpySrcAccessOrder_enum(pub u32);
impl CUmemcpySrcAccessOrder_enum {
    pub const CU_MEMCPY_SRC_ACCESS_ORDER_INVALID: Self = Self(0);
    pub const CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: Self = Self(1);
    pub const CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL: Self = Self(2);
    pub const CU_MEMCPY_SRC_ACCESS_ORDER_ANY: Self = Self(3);
    pub const CU_MEMCPY_SRC_ACCESS_ORDER_MAX: Self = Self(2147483647);
}

pub type CUmemoryPool = *mut CUmemPoolHandle_st;

pub type CUmemorytype = CUmemorytype_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmemorytype_enum(pub u32);
impl CUmemorytype_enum {
    pub const CU_MEMORYTYPE_HOST: Self = Self(1);
    pub const CU_MEMORYTYPE_DEVICE: Self = Self(2);
    pub const CU_MEMORYTYPE_ARRAY: Self = Self(3);
    pub const CU_MEMORYTYPE_UNIFIED: Self = Self(4);
}

pub type CUmipmappedArray = *mut CUmipmappedArray_st;

#[repr(C)]
pub struct CUmipmappedArray_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUmod_st {
    _opaque: [u8; 0],
}

pub type CUmodule = *mut CUmod_st;

pub type CUmoduleLoadingMode = CUmoduleLoadingMode_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmoduleLoadingMode_enum(pub u32);
impl CUmoduleLoadingMode_enum {
    pub const CU_MODULE_EAGER_LOADING: Self = Self(1);
    pub const CU_MODULE_LAZY_LOADING: Self = Self(2);
}

pub type CUmulticastGranularity_flags = CUmulticastGranularity_flags_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUmulticastGranularity_flags_enum(pub u32);
impl CUmulticastGranularity_flags_enum {
    pub const CU_MULTICAST_GRANULARITY_MINIMUM: Self = Self(0);
    pub const CU_MULTICAST_GRANULARITY_RECOMMENDED: Self = Self(1);
}

pub type CUmulticastObjectProp = CUmulticastObjectProp_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmulticastObjectProp_st {
    pub numDevices: c_uint,
    pub size: usize,
    pub handleTypes: c_ulonglong,
    pub flags: c_ulonglong,
}
const _: () = {
    assert!(size_of::<CUmulticastObjectProp_st>() == 32 && align_of::<CUmulticastObjectProp_st>() == 8);
    assert!(offset_of!(CUmulticastObjectProp_st, numDevices) == 0);
    assert!(offset_of!(CUmulticastObjectProp_st, size) == 8);
    assert!(offset_of!(CUmulticastObjectProp_st, handleTypes) == 16);
    assert!(offset_of!(CUmulticastObjectProp_st, flags) == 24);
};

pub type CUmulticastObjectProp_v1 = CUmulticastObjectProp_st;

pub type CUoccupancyB2DSize = Option<unsafe extern "C" fn(blockSize: c_int) -> usize>;

pub type CUoffset3D = CUoffset3D_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUoffset3D_st {
    pub x: usize,
    pub y: usize,
    pub z: usize,
}
const _: () = {
    assert!(size_of::<CUoffset3D_st>() == 24 && align_of::<CUoffset3D_st>() == 8);
    assert!(offset_of!(CUoffset3D_st, x) == 0);
    assert!(offset_of!(CUoffset3D_st, y) == 8);
    assert!(offset_of!(CUoffset3D_st, z) == 16);
};

pub type CUoffset3D_v1 = CUoffset3D_st;

pub type CUoutput_mode = CUoutput_mode_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUoutput_mode_enum(pub u32);
impl CUoutput_mode_enum {
    pub const CU_OUT_KEY_VALUE_PAIR: Self = Self(0);
    pub const CU_OUT_CSV: Self = Self(1);
}

pub type CUpointer_attribute = CUpointer_attribute_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUpointer_attribute_enum(pub u32);
impl CUpointer_attribute_enum {
    pub const CU_POINTER_ATTRIBUTE_CONTEXT: Self = Self(1);
    pub const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: Self = Self(2);
    pub const CU_POINTER_ATTRIBUTE_DEVICE_POINTER: Self = Self(3);
    pub const CU_POINTER_ATTRIBUTE_HOST_POINTER: Self = Self(4);
    pub const CU_POINTER_ATTRIBUTE_P2P_TOKENS: Self = Self(5);
    pub const CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: Self = Self(6);
    pub const CU_POINTER_ATTRIBUTE_BUFFER_ID: Self = Self(7);
    pub const CU_POINTER_ATTRIBUTE_IS_MANAGED: Self = Self(8);
    pub const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: Self = Self(9);
    pub const CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: Self = Self(10);
    pub const CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: Self = Self(11);
    pub const CU_POINTER_ATTRIBUTE_RANGE_SIZE: Self = Self(12);
    pub const CU_POINTER_ATTRIBUTE_MAPPED: Self = Self(13);
    pub const CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: Self = Self(14);
    pub const CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: Self = Self(15);
    pub const CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: Self = Self(16);
    pub const CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: Self = Self(17);
    pub const CU_POINTER_ATTRIBUTE_MAPPING_SIZE: Self = Self(18);
    pub const CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: Self = Self(19);
    pub const CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: Self = Self(20);
    pub const CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE: Self = Self(21);
}

pub type CUprocessState = CUprocessState_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUprocessState_enum(pub u32);
impl CUprocessState_enum {
    pub const CU_PROCESS_STATE_RUNNING: Self = Self(0);
    pub const CU_PROCESS_STATE_LOCKED: Self = Self(1);
    pub const CU_PROCESS_STATE_CHECKPOINTED: Self = Self(2);
    pub const CU_PROCESS_STATE_FAILED: Self = Self(3);
}

pub type CUresourceViewFormat = CUresourceViewFormat_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUresourceViewFormat_enum(pub u32);
impl CUresourceViewFormat_enum {
    pub const CU_RES_VIEW_FORMAT_NONE: Self = Self(0);
    pub const CU_RES_VIEW_FORMAT_UINT_1X8: Self = Self(1);
    pub const CU_RES_VIEW_FORMAT_UINT_2X8: Self = Self(2);
    pub const CU_RES_VIEW_FORMAT_UINT_4X8: Self = Self(3);
    pub const CU_RES_VIEW_FORMAT_SINT_1X8: Self = Self(4);
    pub const CU_RES_VIEW_FORMAT_SINT_2X8: Self = Self(5);
    pub const CU_RES_VIEW_FORMAT_SINT_4X8: Self = Self(6);
    pub const CU_RES_VIEW_FORMAT_UINT_1X16: Self = Self(7);
    pub const CU_RES_VIEW_FORMAT_UINT_2X16: Self = Self(8);
    pub const CU_RES_VIEW_FORMAT_UINT_4X16: Self = Self(9);
    pub const CU_RES_VIEW_FORMAT_SINT_1X16: Self = Self(10);
    pub const CU_RES_VIEW_FORMAT_SINT_2X16: Self = Self(11);
    pub const CU_RES_VIEW_FORMAT_SINT_4X16: Self = Self(12);
    pub const CU_RES_VIEW_FORMAT_UINT_1X32: Self = Self(13);
    pub const CU_RES_VIEW_FORMAT_UINT_2X32: Self = Self(14);
    pub const CU_RES_VIEW_FORMAT_UINT_4X32: Self = Self(15);
    pub const CU_RES_VIEW_FORMAT_SINT_1X32: Self = Self(16);
    pub const CU_RES_VIEW_FORMAT_SINT_2X32: Self = Self(17);
    pub const CU_RES_VIEW_FORMAT_SINT_4X32: Self = Self(18);
    pub const CU_RES_VIEW_FORMAT_FLOAT_1X16: Self = Self(19);
    pub const CU_RES_VIEW_FORMAT_FLOAT_2X16: Self = Self(20);
    pub const CU_RES_VIEW_FORMAT_FLOAT_4X16: Self = Self(21);
    pub const CU_RES_VIEW_FORMAT_FLOAT_1X32: Self = Self(22);
    pub const CU_RES_VIEW_FORMAT_FLOAT_2X32: Self = Self(23);
    pub const CU_RES_VIEW_FORMAT_FLOAT_4X32: Self = Self(24);
    pub const CU_RES_VIEW_FORMAT_UNSIGNED_BC1: Self = Self(25);
    pub const CU_RES_VIEW_FORMAT_UNSIGNED_BC2: Self = Self(26);
    pub const CU_RES_VIEW_FORMAT_UNSIGNED_BC3: Self = Self(27);
    pub const CU_RES_VIEW_FORMAT_UNSIGNED_BC4: Self = Self(28);
    pub const CU_RES_VIEW_FORMAT_SIGNED_BC4: Self = Self(29);
    pub const CU_RES_VIEW_FORMAT_UNSIGNED_BC5: Self = Self(30);
    pub const CU_RES_VIEW_FORMAT_SIGNED_BC5: Self = Self(31);
    pub const CU_RES_VIEW_FORMAT_UNSIGNED_BC6H: Self = Self(32);
    pub const CU_RES_VIEW_FORMAT_SIGNED_BC6H: Self = Self(33);
    pub const CU_RES_VIEW_FORMAT_UNSIGNED_BC7: Self = Self(34);
}

pub type CUresourcetype = CUresourcetype_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUresourcetype_enum(pub u32);
impl CUresourcetype_enum {
    pub const CU_RESOURCE_TYPE_ARRAY: Self = Self(0);
    pub const CU_RESOURCE_TYPE_MIPMAPPED_ARRAY: Self = Self(1);
    pub const CU_RESOURCE_TYPE_LINEAR: Self = Self(2);
    pub const CU_RESOURCE_TYPE_PITCH2D: Self = Self(3);
}

pub type CUresult = cudaError_enum;

pub type CUsharedconfig = CUsharedconfig_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUsharedconfig_enum(pub u32);
impl CUsharedconfig_enum {
    pub const CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE: Self = Self(0);
    pub const CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE: Self = Self(1);
    pub const CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE: Self = Self(2);
}

pub type CUstream = *mut CUstream_st;

pub type CUstreamAttrID = CUlaunchAttributeID;

pub type CUstreamAttrValue = CUstreamAttrValue_v1;

pub type CUstreamAttrValue_v1 = CUlaunchAttributeValue;

pub type CUstreamBatchMemOpParams = CUstreamBatchMemOpParams_v1;

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUstreamBatchMemOpParams_union {
    pub operation: CUstreamBatchMemOpType,
    pub waitValue: CUstreamMemOpWaitValueParams_st,
    pub writeValue: CUstreamMemOpWriteValueParams_st,
    pub flushRemoteWrites: CUstreamMemOpFlushRemoteWritesParams_st,
    pub memoryBarrier: CUstreamMemOpMemoryBarrierParams_st,
    pub pad: [cuuint64_t; 6],
}
const _: () = {
    assert!(size_of::<CUstreamBatchMemOpParams_union>() == 48 && align_of::<CUstreamBatchMemOpParams_union>() == 8);
};

pub type CUstreamBatchMemOpParams_v1 = CUstreamBatchMemOpParams_union;

pub type CUstreamBatchMemOpType = CUstreamBatchMemOpType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUstreamBatchMemOpType_enum(pub u32);
impl CUstreamBatchMemOpType_enum {
    pub const CU_STREAM_MEM_OP_WAIT_VALUE_32: Self = Self(1);
    pub const CU_STREAM_MEM_OP_WRITE_VALUE_32: Self = Self(2);
    pub const CU_STREAM_MEM_OP_WAIT_VALUE_64: Self = Self(4);
    pub const CU_STREAM_MEM_OP_WRITE_VALUE_64: Self = Self(5);
    pub const CU_STREAM_MEM_OP_BARRIER: Self = Self(6);
    pub const CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES: Self = Self(3);
}

pub type CUstreamCallback = Option<unsafe extern "C" fn(hStream: CUstream, status: CUresult, userData: *mut c_void)>;

pub type CUstreamCaptureMode = CUstreamCaptureMode_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUstreamCaptureMode_enum(pub u32);
impl CUstreamCaptureMode_enum {
    pub const CU_STREAM_CAPTURE_MODE_GLOBAL: Self = Self(0);
    pub const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: Self = Self(1);
    pub const CU_STREAM_CAPTURE_MODE_RELAXED: Self = Self(2);
}

pub type CUstreamCaptureStatus = CUstreamCaptureStatus_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUstreamCaptureStatus_enum(pub u32);
impl CUstreamCaptureStatus_enum {
    pub const CU_STREAM_CAPTURE_STATUS_NONE: Self = Self(0);
    pub const CU_STREAM_CAPTURE_STATUS_ACTIVE: Self = Self(1);
    pub const CU_STREAM_CAPTURE_STATUS_INVALIDATED: Self = Self(2);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUstreamMemOpFlushRemoteWritesParams_st {
    pub operation: CUstreamBatchMemOpType,
    pub flags: c_uint,
}
const _: () = {
    assert!(size_of::<CUstreamMemOpFlushRemoteWritesParams_st>() == 8 && align_of::<CUstreamMemOpFlushRemoteWritesParams_st>() == 4);
    assert!(offset_of!(CUstreamMemOpFlushRemoteWritesParams_st, operation) == 0);
    assert!(offset_of!(CUstreamMemOpFlushRemoteWritesParams_st, flags) == 4);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUstreamMemOpMemoryBarrierParams_st {
    pub operation: CUstreamBatchMemOpType,
    pub flags: c_uint,
}
const _: () = {
    assert!(size_of::<CUstreamMemOpMemoryBarrierParams_st>() == 8 && align_of::<CUstreamMemOpMemoryBarrierParams_st>() == 4);
    assert!(offset_of!(CUstreamMemOpMemoryBarrierParams_st, operation) == 0);
    assert!(offset_of!(CUstreamMemOpMemoryBarrierParams_st, flags) == 4);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUstreamMemOpWaitValueParams_st {
    pub operation: CUstreamBatchMemOpType,
    pub address: CUdeviceptr,
    pub anonymous2: CUstreamMemOpWaitValueParams_st_unnamed1,
    pub flags: c_uint,
    pub alias: CUdeviceptr,
}
const _: () = {
    assert!(size_of::<CUstreamMemOpWaitValueParams_st>() == 40 && align_of::<CUstreamMemOpWaitValueParams_st>() == 8);
    assert!(offset_of!(CUstreamMemOpWaitValueParams_st, operation) == 0);
    assert!(offset_of!(CUstreamMemOpWaitValueParams_st, address) == 8);
    assert!(offset_of!(CUstreamMemOpWaitValueParams_st, flags) == 24);
    assert!(offset_of!(CUstreamMemOpWaitValueParams_st, alias) == 32);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUstreamMemOpWaitValueParams_st_unnamed1 {
    pub value: cuuint32_t,
    pub value64: cuuint64_t,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUstreamMemOpWriteValueParams_st {
    pub operation: CUstreamBatchMemOpType,
    pub address: CUdeviceptr,
    pub anonymous2: CUstreamMemOpWriteValueParams_st_unnamed1,
    pub flags: c_uint,
    pub alias: CUdeviceptr,
}
const _: () = {
    assert!(size_of::<CUstreamMemOpWriteValueParams_st>() == 40 && align_of::<CUstreamMemOpWriteValueParams_st>() == 8);
    assert!(offset_of!(CUstreamMemOpWriteValueParams_st, operation) == 0);
    assert!(offset_of!(CUstreamMemOpWriteValueParams_st, address) == 8);
    assert!(offset_of!(CUstreamMemOpWriteValueParams_st, flags) == 24);
    assert!(offset_of!(CUstreamMemOpWriteValueParams_st, alias) == 32);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union CUstreamMemOpWriteValueParams_st_unnamed1 {
    pub value: cuuint32_t,
    pub value64: cuuint64_t,
}

#[repr(C)]
pub struct CUstream_st {
    _opaque: [u8; 0],
}

pub type CUsurfObject = CUsurfObject_v1;

pub type CUsurfObject_v1 = c_ulonglong;

pub type CUsurfref = *mut CUsurfref_st;

#[repr(C)]
pub struct CUsurfref_st {
    _opaque: [u8; 0],
}

pub type CUsynchronizationPolicy = CUsynchronizationPolicy_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUsynchronizationPolicy_enum(pub u32);
impl CUsynchronizationPolicy_enum {
    pub const CU_SYNC_POLICY_AUTO: Self = Self(1);
    pub const CU_SYNC_POLICY_SPIN: Self = Self(2);
    pub const CU_SYNC_POLICY_YIELD: Self = Self(3);
    pub const CU_SYNC_POLICY_BLOCKING_SYNC: Self = Self(4);
}

pub type CUtensorMap = CUtensorMap_st;

pub type CUtensorMapDataType = CUtensorMapDataType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUtensorMapDataType_enum(pub u32);
impl CUtensorMapDataType_enum {
    pub const CU_TENSOR_MAP_DATA_TYPE_UINT8: Self = Self(0);
    pub const CU_TENSOR_MAP_DATA_TYPE_UINT16: Self = Self(1);
    pub const CU_TENSOR_MAP_DATA_TYPE_UINT32: Self = Self(2);
    pub const CU_TENSOR_MAP_DATA_TYPE_INT32: Self = Self(3);
    pub const CU_TENSOR_MAP_DATA_TYPE_UINT64: Self = Self(4);
    pub const CU_TENSOR_MAP_DATA_TYPE_INT64: Self = Self(5);
    pub const CU_TENSOR_MAP_DATA_TYPE_FLOAT16: Self = Self(6);
    pub const CU_TENSOR_MAP_DATA_TYPE_FLOAT32: Self = Self(7);
    pub const CU_TENSOR_MAP_DATA_TYPE_FLOAT64: Self = Self(8);
    pub const CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: Self = Self(9);
    pub const CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ: Self = Self(10);
    pub const CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: Self = Self(11);
    pub const CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ: Self = Self(12);
    pub const CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B: Self = Self(13);
    pub const CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B: Self = Self(14);
    pub const CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B: Self = Self(15);
}

pub type CUtensorMapFloatOOBfill = CUtensorMapFloatOOBfill_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUtensorMapFloatOOBfill_enum(pub u32);
impl CUtensorMapFloatOOBfill_enum {
    pub const CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: Self = Self(0);
    pub const CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA: Self = Self(1);
}

pub type CUtensorMapIm2ColWideMode = CUtensorMapIm2ColWideMode_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUtensorMapIm2ColWideMode_enum(pub u32);
impl CUtensorMapIm2ColWideMode_enum {
    pub const CU_TENSOR_MAP_IM2COL_WIDE_MODE_W: Self = Self(0);
    pub const CU_TENSOR_MAP_IM2COL_WIDE_MODE_W128: Self = Self(1);
}

pub type CUtensorMapInterleave = CUtensorMapInterleave_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUtensorMapInterleave_enum(pub u32);
impl CUtensorMapInterleave_enum {
    pub const CU_TENSOR_MAP_INTERLEAVE_NONE: Self = Self(0);
    pub const CU_TENSOR_MAP_INTERLEAVE_16B: Self = Self(1);
    pub const CU_TENSOR_MAP_INTERLEAVE_32B: Self = Self(2);
}

pub type CUtensorMapL2promotion = CUtensorMapL2promotion_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUtensorMapL2promotion_enum(pub u32);
impl CUtensorMapL2promotion_enum {
    pub const CU_TENSOR_MAP_L2_PROMOTION_NONE: Self = Self(0);
    pub const CU_TENSOR_MAP_L2_PROMOTION_L2_64B: Self = Self(1);
    pub const CU_TENSOR_MAP_L2_PROMOTION_L2_128B: Self = Self(2);
    pub const CU_TENSOR_MAP_L2_PROMOTION_L2_256B: Self = Self(3);
}

pub type CUtensorMapSwizzle = CUtensorMapSwizzle_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUtensorMapSwizzle_enum(pub u32);
impl CUtensorMapSwizzle_enum {
    pub const CU_TENSOR_MAP_SWIZZLE_NONE: Self = Self(0);
    pub const CU_TENSOR_MAP_SWIZZLE_32B: Self = Self(1);
    pub const CU_TENSOR_MAP_SWIZZLE_64B: Self = Self(2);
    pub const CU_TENSOR_MAP_SWIZZLE_128B: Self = Self(3);
    pub const CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B: Self = Self(4);
    pub const CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B_FLIP_8B: Self = Self(5);
    pub const CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B: Self = Self(6);
}

#[repr(C, align(128))]
#[derive(Clone, Copy)]
pub struct CUtensorMap_st {
    pub opaque: [cuuint64_t; 16],
}
const _: () = {
    assert!(size_of::<CUtensorMap_st>() == 128 && align_of::<CUtensorMap_st>() == 128);
    assert!(offset_of!(CUtensorMap_st, opaque) == 0);
};

pub type CUtexObject = CUtexObject_v1;

pub type CUtexObject_v1 = c_ulonglong;

pub type CUtexref = *mut CUtexref_st;

#[repr(C)]
pub struct CUtexref_st {
    _opaque: [u8; 0],
}

pub type CUuserObject = *mut CUuserObject_st;

#[repr(C)]
pub struct CUuserObject_st {
    _opaque: [u8; 0],
}

pub type CUuuid = CUuuid_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUuuid_st {
    pub bytes: [c_char; 16],
}
const _: () = {
    assert!(size_of::<CUuuid_st>() == 16 && align_of::<CUuuid_st>() == 1);
    assert!(offset_of!(CUuuid_st, bytes) == 0);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaError_enum(pub u32);
impl cudaError_enum {
    pub const CUDA_SUCCESS: Self = Self(0);
    pub const CUDA_ERROR_INVALID_VALUE: Self = Self(1);
    pub const CUDA_ERROR_OUT_OF_MEMORY: Self = Self(2);
    pub const CUDA_ERROR_NOT_INITIALIZED: Self = Self(3);
    pub const CUDA_ERROR_DEINITIALIZED: Self = Self(4);
    pub const CUDA_ERROR_PROFILER_DISABLED: Self = Self(5);
    pub const CUDA_ERROR_PROFILER_NOT_INITIALIZED: Self = Self(6);
    pub const CUDA_ERROR_PROFILER_ALREADY_STARTED: Self = Self(7);
    pub const CUDA_ERROR_PROFILER_ALREADY_STOPPED: Self = Self(8);
    pub const CUDA_ERROR_STUB_LIBRARY: Self = Self(34);
    pub const CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER: Self = Self(36);
    pub const CUDA_ERROR_DEVICE_UNAVAILABLE: Self = Self(46);
    pub const CUDA_ERROR_NO_DEVICE: Self = Self(100);
    pub const CUDA_ERROR_INVALID_DEVICE: Self = Self(101);
    pub const CUDA_ERROR_DEVICE_NOT_LICENSED: Self = Self(102);
    pub const CUDA_ERROR_INVALID_IMAGE: Self = Self(200);
    pub const CUDA_ERROR_INVALID_CONTEXT: Self = Self(201);
    pub const CUDA_ERROR_CONTEXT_ALREADY_CURRENT: Self = Self(202);
    pub const CUDA_ERROR_MAP_FAILED: Self = Self(205);
    pub const CUDA_ERROR_UNMAP_FAILED: Self = Self(206);
    pub const CUDA_ERROR_ARRAY_IS_MAPPED: Self = Self(207);
    pub const CUDA_ERROR_ALREADY_MAPPED: Self = Self(208);
    pub const CUDA_ERROR_NO_BINARY_FOR_GPU: Self = Self(209);
    pub const CUDA_ERROR_ALREADY_ACQUIRED: Self = Self(210);
    pub const CUDA_ERROR_NOT_MAPPED: Self = Self(211);
    pub const CUDA_ERROR_NOT_MAPPED_AS_ARRAY: Self = Self(212);
    pub const CUDA_ERROR_NOT_MAPPED_AS_POINTER: Self = Self(213);
    pub const CUDA_ERROR_ECC_UNCORRECTABLE: Self = Self(214);
    pub const CUDA_ERROR_UNSUPPORTED_LIMIT: Self = Self(215);
    pub const CUDA_ERROR_CONTEXT_ALREADY_IN_USE: Self = Self(216);
    pub const CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: Self = Self(217);
    pub const CUDA_ERROR_INVALID_PTX: Self = Self(218);
    pub const CUDA_ERROR_INVALID_GRAPHICS_CONTEXT: Self = Self(219);
    pub const CUDA_ERROR_NVLINK_UNCORRECTABLE: Self = Self(220);
    pub const CUDA_ERROR_JIT_COMPILER_NOT_FOUND: Self = Self(221);
    pub const CUDA_ERROR_UNSUPPORTED_PTX_VERSION: Self = Self(222);
    pub const CUDA_ERROR_JIT_COMPILATION_DISABLED: Self = Self(223);
    pub const CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY: Self = Self(224);
    pub const CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC: Self = Self(225);
    pub const CUDA_ERROR_CONTAINED: Self = Self(226);
    pub const CUDA_ERROR_INVALID_SOURCE: Self = Self(300);
    pub const CUDA_ERROR_FILE_NOT_FOUND: Self = Self(301);
    pub const CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND: Self = Self(302);
    pub const CUDA_ERROR_SHARED_OBJECT_INIT_FAILED: Self = Self(303);
    pub const CUDA_ERROR_OPERATING_SYSTEM: Self = Self(304);
    pub const CUDA_ERROR_INVALID_HANDLE: Self = Self(400);
    pub const CUDA_ERROR_ILLEGAL_STATE: Self = Self(401);
    pub const CUDA_ERROR_LOSSY_QUERY: Self = Self(402);
    pub const CUDA_ERROR_NOT_FOUND: Self = Self(500);
    pub const CUDA_ERROR_NOT_READY: Self = Self(600);
    pub const CUDA_ERROR_ILLEGAL_ADDRESS: Self = Self(700);
    pub const CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: Self = Self(701);
    pub const CUDA_ERROR_LAUNCH_TIMEOUT: Self = Self(702);
    pub const CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING: Self = Self(703);
    pub const CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: Self = Self(704);
    pub const CUDA_ERROR_PEER_ACCESS_NOT_ENABLED: Self = Self(705);
    pub const CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE: Self = Self(708);
    pub const CUDA_ERROR_CONTEXT_IS_DESTROYED: Self = Self(709);
    pub const CUDA_ERROR_ASSERT: Self = Self(710);
    pub const CUDA_ERROR_TOO_MANY_PEERS: Self = Self(711);
    pub const CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: Self = Self(712);
    pub const CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED: Self = Self(713);
    pub const CUDA_ERROR_HARDWARE_STACK_ERROR: Self = Self(714);
    pub const CUDA_ERROR_ILLEGAL_INSTRUCTION: Self = Self(715);
    pub const CUDA_ERROR_MISALIGNED_ADDRESS: Self = Self(716);
    pub const CUDA_ERROR_INVALID_ADDRESS_SPACE: Self = Self(717);
    pub const CUDA_ERROR_INVALID_PC: Self = Self(718);
    pub const CUDA_ERROR_LAUNCH_FAILED: Self = Self(719);
    pub const CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: Self = Self(720);
    pub const CUDA_ERROR_TENSOR_MEMORY_LEAK: Self = Self(721);
    pub const CUDA_ERROR_NOT_PERMITTED: Self = Self(800);
    pub const CUDA_ERROR_NOT_SUPPORTED: Self = Self(801);
    pub const CUDA_ERROR_SYSTEM_NOT_READY: Self = Self(802);
    pub const CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: Self = Self(803);
    pub const CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE: Self = Self(804);
    pub const CUDA_ERROR_MPS_CONNECTION_FAILED: Self = Self(805);
    pub const CUDA_ERROR_MPS_RPC_FAILURE: Self = Self(806);
    pub const CUDA_ERROR_MPS_SERVER_NOT_READY: Self = Self(807);
    pub const CUDA_ERROR_MPS_MAX_CLIENTS_REACHED: Self = Self(808);
    pub const CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED: Self = Self(809);
    pub const CUDA_ERROR_MPS_CLIENT_TERMINATED: Self = Self(810);
    pub const CUDA_ERROR_CDP_NOT_SUPPORTED: Self = Self(811);
    pub const CUDA_ERROR_CDP_VERSION_MISMATCH: Self = Self(812);
    pub const CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: Self = Self(900);
    pub const CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: Self = Self(901);
    pub const CUDA_ERROR_STREAM_CAPTURE_MERGE: Self = Self(902);
    pub const CUDA_ERROR_STREAM_CAPTURE_UNMATCHED: Self = Self(903);
    pub const CUDA_ERROR_STREAM_CAPTURE_UNJOINED: Self = Self(904);
    pub const CUDA_ERROR_STREAM_CAPTURE_ISOLATION: Self = Self(905);
    pub const CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: Self = Self(906);
    pub const CUDA_ERROR_CAPTURED_EVENT: Self = Self(907);
    pub const CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: Self = Self(908);
    pub const CUDA_ERROR_TIMEOUT: Self = Self(909);
    pub const CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE: Self = Self(910);
    pub const CUDA_ERROR_EXTERNAL_DEVICE: Self = Self(911);
    pub const CUDA_ERROR_INVALID_CLUSTER_SIZE: Self = Self(912);
    pub const CUDA_ERROR_FUNCTION_NOT_LOADED: Self = Self(913);
    pub const CUDA_ERROR_INVALID_RESOURCE_TYPE: Self = Self(914);
    pub const CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: Self = Self(915);
    pub const CUDA_ERROR_KEY_ROTATION: Self = Self(916);
    pub const CUDA_ERROR_UNKNOWN: Self = Self(999);
    /// Names with their values.
    pub const NAMES: &'static [(&'static str, Self)] = &[
        ("CUDA_SUCCESS", Self::CUDA_SUCCESS),
        ("CUDA_ERROR_INVALID_VALUE", Self::CUDA_ERROR_INVALID_VALUE),
        ("CUDA_ERROR_OUT_OF_MEMORY", Self::CUDA_ERROR_OUT_OF_MEMORY),
        ("CUDA_ERROR_NOT_INITIALIZED", Self::CUDA_ERROR_NOT_INITIALIZED),
        ("CUDA_ERROR_DEINITIALIZED", Self::CUDA_ERROR_DEINITIALIZED),
        ("CUDA_ERROR_PROFILER_DISABLED", Self::CUDA_ERROR_PROFILER_DISABLED),
        ("CUDA_ERROR_PROFILER_NOT_INITIALIZED", Self::CUDA_ERROR_PROFILER_NOT_INITIALIZED),
        ("CUDA_ERROR_PROFILER_ALREADY_STARTED", Self::CUDA_ERROR_PROFILER_ALREADY_STARTED),
        ("CUDA_ERROR_PROFILER_ALREADY_STOPPED", Self::CUDA_ERROR_PROFILER_ALREADY_STOPPED),
        ("CUDA_ERROR_STUB_LIBRARY", Self::CUDA_ERROR_STUB_LIBRARY),
        ("CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", Self::CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER),
        ("CUDA_ERROR_DEVICE_UNAVAILABLE", Self::CUDA_ERROR_DEVICE_UNAVAILABLE),
        ("CUDA_ERROR_NO_DEVICE", Self::CUDA_ERROR_NO_DEVICE),
        ("CUDA_ERROR_INVALID_DEVICE", Self::CUDA_ERROR_INVALID_DEVICE),
        ("CUDA_ERROR_DEVICE_NOT_LICENSED", Self::CUDA_ERROR_DEVICE_NOT_LICENSED),
        ("CUDA_ERROR_INVALID_IMAGE", Self::CUDA_ERROR_INVALID_IMAGE),
        ("CUDA_ERROR_INVALID_CONTEXT", Self::CUDA_ERROR_INVALID_CONTEXT),
        ("CUDA_ERROR_CONTEXT_ALREADY_CURRENT", Self::CUDA_ERROR_CONTEXT_ALREADY_CURRENT),
        ("CUDA_ERROR_MAP_FAILED", Self::CUDA_ERROR_MAP_FAILED),
        ("CUDA_ERROR_UNMAP_FAILED", Self::CUDA_ERROR_UNMAP_FAILED),
        ("CUDA_ERROR_ARRAY_IS_MAPPED", Self::CUDA_ERROR_ARRAY_IS_MAPPED),
        ("CUDA_ERROR_ALREADY_MAPPED", Self::CUDA_ERROR_ALREADY_MAPPED),
        ("CUDA_ERROR_NO_BINARY_FOR_GPU", Self::CUDA_ERROR_NO_BINARY_FOR_GPU),
        ("CUDA_ERROR_ALREADY_ACQUIRED", Self::CUDA_ERROR_ALREADY_ACQUIRED),
        ("CUDA_ERROR_NOT_MAPPED", Self::CUDA_ERROR_NOT_MAPPED),
        ("CUDA_ERROR_NOT_MAPPED_AS_ARRAY", Self::CUDA_ERROR_NOT_MAPPED_AS_ARRAY),
        ("CUDA_ERROR_NOT_MAPPED_AS_POINTER", Self::CUDA_ERROR_NOT_MAPPED_AS_POINTER),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", Self::CUDA_ERROR_ECC_UNCORRECTABLE),
        ("CUDA_ERROR_UNSUPPORTED_LIMIT", Self::CUDA_ERROR_UNSUPPORTED_LIMIT),
        ("CUDA_ERROR_CONTEXT_ALREADY_IN_USE", Self::CUDA_ERROR_CONTEXT_ALREADY_IN_USE),
        ("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", Self::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED),
        ("CUDA_ERROR_INVALID_PTX", Self::CUDA_ERROR_INVALID_PTX),
        ("CUDA_ERROR_INVALID_GRAPHICS_CONTEXT", Self::CUDA_ERROR_INVALID_GRAPHICS_CONTEXT),
        ("CUDA_ERROR_NVLINK_UNCORRECTABLE", Self::CUDA_ERROR_NVLINK_UNCORRECTABLE),
        ("CUDA_ERROR_JIT_COMPILER_NOT_FOUND", Self::CUDA_ERROR_JIT_COMPILER_NOT_FOUND),
        ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", Self::CUDA_ERROR_UNSUPPORTED_PTX_VERSION),
        ("CUDA_ERROR_JIT_COMPILATION_DISABLED", Self::CUDA_ERROR_JIT_COMPILATION_DISABLED),
        ("CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", Self::CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY),
        ("CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", Self::CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC),
        ("CUDA_ERROR_CONTAINED", Self::CUDA_ERROR_CONTAINED),
        ("CUDA_ERROR_INVALID_SOURCE", Self::CUDA_ERROR_INVALID_SOURCE),
        ("CUDA_ERROR_FILE_NOT_FOUND", Self::CUDA_ERROR_FILE_NOT_FOUND),
        ("CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", Self::CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND),
        ("CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", Self::CUDA_ERROR_SHARED_OBJECT_INIT_FAILED),
        ("CUDA_ERROR_OPERATING_SYSTEM", Self::CUDA_ERROR_OPERATING_SYSTEM),
        ("CUDA_ERROR_INVALID_HANDLE", Self::CUDA_ERROR_INVALID_HANDLE),
        ("CUDA_ERROR_ILLEGAL_STATE", Self::CUDA_ERROR_ILLEGAL_STATE),
        ("CUDA_ERROR_LOSSY_QUERY", Self::CUDA_ERROR_LOSSY_QUERY),
        ("CUDA_ERROR_NOT_FOUND", Self::CUDA_ERROR_NOT_FOUND),
        ("CUDA_ERROR_NOT_READY", Self::CUDA_ERROR_NOT_READY),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", Self::CUDA_ERROR_ILLEGAL_ADDRESS),
        ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", Self::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES),
        ("CUDA_ERROR_LAUNCH_TIMEOUT", Self::CUDA_ERROR_LAUNCH_TIMEOUT),
        ("CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING", Self::CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING),
        ("CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", Self::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED),
        ("CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", Self::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED),
        ("CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", Self::CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE),
        ("CUDA_ERROR_CONTEXT_IS_DESTROYED", Self::CUDA_ERROR_CONTEXT_IS_DESTROYED),
        ("CUDA_ERROR_ASSERT", Self::CUDA_ERROR_ASSERT),
        ("CUDA_ERROR_TOO_MANY_PEERS", Self::CUDA_ERROR_TOO_MANY_PEERS),
        ("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", Self::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
        ("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", Self::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
        ("CUDA_ERROR_HARDWARE_STACK_ERROR", Self::CUDA_ERROR_HARDWARE_STACK_ERROR),
        ("CUDA_ERROR_ILLEGAL_INSTRUCTION", Self::CUDA_ERROR_ILLEGAL_INSTRUCTION),
        ("CUDA_ERROR_MISALIGNED_ADDRESS", Self::CUDA_ERROR_MISALIGNED_ADDRESS),
        ("CUDA_ERROR_INVALID_ADDRESS_SPACE", Self::CUDA_ERROR_INVALID_ADDRESS_SPACE),
        ("CUDA_ERROR_INVALID_PC", Self::CUDA_ERROR_INVALID_PC),
        ("CUDA_ERROR_LAUNCH_FAILED", Self::CUDA_ERROR_LAUNCH_FAILED),
        ("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", Self::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE),
        ("CUDA_ERROR_TENSOR_MEMORY_LEAK", Self::CUDA_ERROR_TENSOR_MEMORY_LEAK),
        ("CUDA_ERROR_NOT_PERMITTED", Self::CUDA_ERROR_NOT_PERMITTED),
        ("CUDA_ERROR_NOT_SUPPORTED", Self::CUDA_ERROR_NOT_SUPPORTED),
        ("CUDA_ERROR_SYSTEM_NOT_READY", Self::CUDA_ERROR_SYSTEM_NOT_READY),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", Self::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH),
        ("CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", Self::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE),
        ("CUDA_ERROR_MPS_CONNECTION_FAILED", Self::CUDA_ERROR_MPS_CONNECTION_FAILED),
        ("CUDA_ERROR_MPS_RPC_FAILURE", Self::CUDA_ERROR_MPS_RPC_FAILURE),
        ("CUDA_ERROR_MPS_SERVER_NOT_READY", Self::CUDA_ERROR_MPS_SERVER_NOT_READY),
        ("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", Self::CUDA_ERROR_MPS_MAX_CLIENTS_REACHED),
        ("CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", Self::CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED),
        ("CUDA_ERROR_MPS_CLIENT_TERMINATED", Self::CUDA_ERROR_MPS_CLIENT_TERMINATED),
        ("CUDA_ERROR_CDP_NOT_SUPPORTED", Self::CUDA_ERROR_CDP_NOT_SUPPORTED),
        ("CUDA_ERROR_CDP_VERSION_MISMATCH", Self::CUDA_ERROR_CDP_VERSION_MISMATCH),
        ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", Self::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        ("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", Self::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
        ("CUDA_ERROR_STREAM_CAPTURE_MERGE", Self::CUDA_ERROR_STREAM_CAPTURE_MERGE),
        ("CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", Self::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED),
        ("CUDA_ERROR_STREAM_CAPTURE_UNJOINED", Self::CUDA_ERROR_STREAM_CAPTURE_UNJOINED),
        ("CUDA_ERROR_STREAM_CAPTURE_ISOLATION", Self::CUDA_ERROR_STREAM_CAPTURE_ISOLATION),
        ("CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", Self::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT),
        ("CUDA_ERROR_CAPTURED_EVENT", Self::CUDA_ERROR_CAPTURED_EVENT),
        ("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", Self::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD),
        ("CUDA_ERROR_TIMEOUT", Self::CUDA_ERROR_TIMEOUT),
        ("CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", Self::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE),
        ("CUDA_ERROR_EXTERNAL_DEVICE", Self::CUDA_ERROR_EXTERNAL_DEVICE),
        ("CUDA_ERROR_INVALID_CLUSTER_SIZE", Self::CUDA_ERROR_INVALID_CLUSTER_SIZE),
        ("CUDA_ERROR_FUNCTION_NOT_LOADED", Self::CUDA_ERROR_FUNCTION_NOT_LOADED),
        ("CUDA_ERROR_INVALID_RESOURCE_TYPE", Self::CUDA_ERROR_INVALID_RESOURCE_TYPE),
        ("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", Self::CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION),
        ("CUDA_ERROR_KEY_ROTATION", Self::CUDA_ERROR_KEY_ROTATION),
        ("CUDA_ERROR_UNKNOWN", Self::CUDA_ERROR_UNKNOWN),
    ];
}

pub type cuuint32_t = u32;

pub type cuuint64_t = u64;
