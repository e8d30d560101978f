//! Arrays: memory in rows without gaps. Textures and surfaces are handles that kernels cannot use.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
};

use cuda_definition::driver::types::*;

use super::{entry_points, memory::trusts, put};
use crate::driver::{
    Answer, context,
    memory::{Kind, memory},
    objects::{self, Object},
};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// An array.
pub struct Array {
    /// Its start address.
    pub at: u64,
    /// Size of a row in bytes.
    pub row: usize,
    described: CUDA_ARRAY3D_DESCRIPTOR,
}

impl Array {
    fn new(described: CUDA_ARRAY3D_DESCRIPTOR) -> Answer<Arc<Self>> {
        use CUarray_format as F;
        let bytes = match described.Format {
            F::CU_AD_FORMAT_UNSIGNED_INT8 | F::CU_AD_FORMAT_SIGNED_INT8 => 1,
            F::CU_AD_FORMAT_UNSIGNED_INT16
            | F::CU_AD_FORMAT_SIGNED_INT16
            | F::CU_AD_FORMAT_HALF => 2,
            F::CU_AD_FORMAT_UNSIGNED_INT32
            | F::CU_AD_FORMAT_SIGNED_INT32
            | F::CU_AD_FORMAT_FLOAT => 4,
            _ => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        };
        if !matches!(described.NumChannels, 1 | 2 | 4) || described.Width == 0 {
            return Err(INVALID);
        }
        let row = described
            .Width
            .checked_mul(bytes * described.NumChannels as usize);
        let rows = described.Height.max(1).checked_mul(described.Depth.max(1));
        let size = row.zip(rows).and_then(|(row, rows)| row.checked_mul(rows));
        let context = context::current()?;
        let at = memory().allocate(
            size.ok_or(INVALID)? as u64,
            Kind::Device,
            0,
            context.owner(),
        )?;
        Ok(Arc::new(Self {
            at,
            row: row.ok_or(INVALID)?,
            described,
        }))
    }

    /// Number of rows in a plane.
    pub fn height(&self) -> usize {
        self.described.Height.max(1)
    }
}

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
