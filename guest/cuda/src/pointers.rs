//! Queries about pointers.

use std::ffi::{c_uint, c_void};

use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::codes;

use crate::{
    entry::{Outcome, connected, entry_points, put},
    link::Link,
    memory::{Known, What, device_of, find},
};

fn attribute(
    link: &Link,
    attribute: CUpointer_attribute,
    at: u64,
    found: Option<Known>,
    data: *mut c_void,
) -> Outcome {
    use CUpointer_attribute as A;
    let known = found.ok_or(codes::INVALID_VALUE)?;
    // SAFETY: the caller has room for a value of the attribute's type.
    unsafe {
        match attribute {
            A::CU_POINTER_ATTRIBUTE_CONTEXT => {
                // It belongs to the device.
                let of_device = matches!(known.what, What::Pooled | What::Mapped);
                put(data.cast(), if of_device { 0 } else { known.context })
            }
            A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
                let host = matches!(known.what, What::Host | What::Registered);
                put(data.cast::<u32>(), if host { 1 } else { 2 })
            }
            A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER => {
                if known.device == 0 {
                    return Err(codes::INVALID_VALUE);
                }
                put(data.cast(), known.device + (at - known.start))
            }
            A::CU_POINTER_ATTRIBUTE_HOST_POINTER if known.what.is_device() => {
                Err(codes::INVALID_VALUE)
            }
            A::CU_POINTER_ATTRIBUTE_HOST_POINTER => put(data.cast(), at),
            A::CU_POINTER_ATTRIBUTE_BUFFER_ID => put(data.cast(), known.id),
            // What the device does with managed memory is always synchronized.
            A::CU_POINTER_ATTRIBUTE_IS_MANAGED | A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => {
                put(data.cast(), u32::from(known.what == What::Managed))
            }
            A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put(data.cast(), device_of(link, at)?),
            A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => put(data.cast(), known.start),
            A::CU_POINTER_ATTRIBUTE_RANGE_SIZE => put(data.cast(), known.size),
            A::CU_POINTER_ATTRIBUTE_MAPPED => put(data.cast(), 1u32),
            A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => put(data.cast(), 0u64),
            A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => put(data.cast(), 0u64),
            A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
            | A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => put(data.cast(), 0u32),
            A::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => put(data.cast(), 3u32),
            A::CU_POINTER_ATTRIBUTE_P2P_TOKENS
            | A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE
            | A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR
            | A::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID
            | A::CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => Err(codes::NOT_SUPPORTED),
            _ => Err(codes::INVALID_VALUE),
        }
    }
}

/// Writes what `cuPointerGetAttributes` answers for an attribute that this memory does not have.
///
/// # Errors
/// There is no such attribute.
///
/// # Safety
/// There is room for a value of the attribute's type.
unsafe fn put_nothing(attribute: CUpointer_attribute, data: *mut c_void) -> Outcome {
    use CUpointer_attribute as A;
    // SAFETY: the caller's promise.
    unsafe {
        match attribute {
            A::CU_POINTER_ATTRIBUTE_P2P_TOKENS => put(data.cast(), [0u32; 3]),
            A::CU_POINTER_ATTRIBUTE_CONTEXT
            | A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER
            | A::CU_POINTER_ATTRIBUTE_HOST_POINTER
            | A::CU_POINTER_ATTRIBUTE_BUFFER_ID
            | A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
            | A::CU_POINTER_ATTRIBUTE_RANGE_SIZE
            | A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
            | A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
            | A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE
            | A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR
            | A::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => put(data.cast(), 0u64),
            // No device has this number.
            A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put(data.cast(), -2i32),
            A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE
            | A::CU_POINTER_ATTRIBUTE_IS_MANAGED
            | A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
            | A::CU_POINTER_ATTRIBUTE_MAPPED
            | A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
            | A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
            | A::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS
            | A::CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => put(data.cast(), 0u32),
            // There are no others.
            _ => Err(codes::INVALID_VALUE),
        }
    }
}

entry_points! {
    fn cuPointerGetAttribute(data: *mut c_void, attribute: CUpointer_attribute, ptr: CUdeviceptr) {
        let link = connected()?;
        self::attribute(link, attribute, ptr, find(link, ptr), data)
    }

    fn cuPointerGetAttributes(
        numAttributes: c_uint,
        attributes: *mut CUpointer_attribute,
        data: *mut *mut c_void,
        ptr: CUdeviceptr,
    ) {
        let link = connected()?;
        if attributes.is_null() || data.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let found = find(link, ptr);
        for number in 0..numAttributes as usize {
            let (one, to) = (attributes.add(number).read(), data.add(number).read());
            match self::attribute(link, one, ptr, found, to) {
                Err(codes::INVALID_VALUE | codes::NOT_SUPPORTED) if !to.is_null() => put_nothing(one, to)?,
                other => other?,
            }
        }
        Ok(())
    }

    // A worker's memory is always synchronized.
    fn cuPointerSetAttribute(_value: *const c_void, attribute: CUpointer_attribute, ptr: CUdeviceptr) {
        let link = connected()?;
        if attribute != CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS {
            return Err(codes::INVALID_VALUE);
        }
        find(link, ptr).map(drop).ok_or(codes::INVALID_VALUE)
    }
}
