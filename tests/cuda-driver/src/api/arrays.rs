//! Arrays: memory in rows without gaps. Textures and surfaces are handles that kernels cannot use.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
};

use cuda_definition::driver::types::*;

use super::{entry_points, put};
use crate::driver::{
    Answer,
    array::Array,
    memory::{Kind, memory, trusts},
    objects::{self, Object},
};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

fn create(described: CUDA_ARRAY3D_DESCRIPTOR) -> Answer<CUarray> {
    let array = Array::new(described)?;
    let handle = objects::number();
    objects::insert(handle, Object::Array(array));
    Ok(handle as CUarray)
}

/// Existing textures and surfaces.
static OBJECTS: Mutex<Option<HashSet<u64>>> = Mutex::new(None);

unsafe fn object(of: *const CUDA_RESOURCE_DESC) -> Answer<u64> {
    // SAFETY: the caller's promise.
    let of = unsafe { of.as_ref() }.ok_or(INVALID)?;
    // SAFETY: the kind says which field of the union is valid.
    unsafe {
        match of.resType {
            CUresourcetype::CU_RESOURCE_TYPE_ARRAY => drop(objects::array(of.res.array.hArray)?),
            CUresourcetype::CU_RESOURCE_TYPE_LINEAR => {
                let linear = of.res.linear;
                if !trusts() && !memory().holds(linear.devPtr, linear.sizeInBytes as u64) {
                    return Err(INVALID);
                }
            }
            _ => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }
    let handle = objects::number();
    let mut all = OBJECTS.lock().unwrap_or_else(PoisonError::into_inner);
    all.get_or_insert_default().insert(handle);
    Ok(handle)
}

fn destroy(handle: u64) -> Answer {
    let mut all = OBJECTS.lock().unwrap_or_else(PoisonError::into_inner);
    if all.get_or_insert_default().remove(&handle) {
        Ok(())
    } else {
        Err(INVALID)
    }
}

entry_points! {
    fn cuArrayCreate_v2(pHandle: *mut CUarray, pAllocateArray: *const CUDA_ARRAY_DESCRIPTOR) {
        let wanted = pAllocateArray.as_ref().ok_or(INVALID)?;
        put(pHandle, create(CUDA_ARRAY3D_DESCRIPTOR {
            Width: wanted.Width,
            Height: wanted.Height,
            Depth: 0,
            Format: wanted.Format,
            NumChannels: wanted.NumChannels,
            Flags: 0,
        })?)
    }

    fn cuArray3DCreate_v2(pHandle: *mut CUarray, pAllocateArray: *const CUDA_ARRAY3D_DESCRIPTOR) {
        put(pHandle, create(*pAllocateArray.as_ref().ok_or(INVALID)?)?)
    }

    fn cuArray3DGetDescriptor_v2(pArrayDescriptor: *mut CUDA_ARRAY3D_DESCRIPTOR, hArray: CUarray) {
        put(pArrayDescriptor, objects::array(hArray)?.described)
    }

    fn cuArrayDestroy(hArray: CUarray) {
        let array = objects::array(hArray)?;
        objects::remove(hArray as u64);
        memory().free(array.at, &[Kind::Device])
    }

    fn cuTexObjectCreate(
        pTexObject: *mut CUtexObject,
        pResDesc: *const CUDA_RESOURCE_DESC,
        pTexDesc: *const CUDA_TEXTURE_DESC,
        _pResViewDesc: *const CUDA_RESOURCE_VIEW_DESC,
    ) {
        if pTexDesc.is_null() {
            return Err(INVALID);
        }
        put(pTexObject, object(pResDesc)?)
    }

    fn cuTexObjectDestroy(texObject: CUtexObject) {
        destroy(texObject)
    }

    fn cuSurfObjectCreate(pSurfObject: *mut CUsurfObject, pResDesc: *const CUDA_RESOURCE_DESC) {
        put(pSurfObject, object(pResDesc)?)
    }

    fn cuSurfObjectDestroy(surfObject: CUsurfObject) {
        destroy(surfObject)
    }
}
