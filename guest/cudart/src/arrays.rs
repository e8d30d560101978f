//! Arrays, textures and surfaces.

use std::{
    ffi::{c_int, c_uint},
    ptr::{null, null_mut},
};

use cuda_definition::{
    driver::types::*,
    runtime::{signatures, types::*},
};

use crate::{
    api::{entry_points, get, put},
    context::ready,
    driver::driver,
    error::{Answer, Error},
};

/// Texture flags, as defined in `cuda.h`.
mod flags {
    pub const READ_AS_INTEGER: u32 = 1;
    pub const NORMALIZED_COORDINATES: u32 = 2;
    pub const SRGB: u32 = 0x10;
    pub const NO_TRILINEAR_OPTIMIZATION: u32 = 0x20;
    pub const SEAMLESS_CUBEMAP: u32 = 0x40;
}

/// The number of bits of a channel in this format, and the format's kind in a channel description.
fn bits(format: CUarray_format) -> Option<(c_int, cudaChannelFormatKind)> {
    use CUarray_format as F;
    use cudaChannelFormatKind as K;
    Some(match format {
        F::CU_AD_FORMAT_UNSIGNED_INT8 => (8, K::cudaChannelFormatKindUnsigned),
        F::CU_AD_FORMAT_UNSIGNED_INT16 => (16, K::cudaChannelFormatKindUnsigned),
        F::CU_AD_FORMAT_UNSIGNED_INT32 => (32, K::cudaChannelFormatKindUnsigned),
        F::CU_AD_FORMAT_SIGNED_INT8 => (8, K::cudaChannelFormatKindSigned),
        F::CU_AD_FORMAT_SIGNED_INT16 => (16, K::cudaChannelFormatKindSigned),
        F::CU_AD_FORMAT_SIGNED_INT32 => (32, K::cudaChannelFormatKindSigned),
        F::CU_AD_FORMAT_HALF => (16, K::cudaChannelFormatKindFloat),
        F::CU_AD_FORMAT_FLOAT => (32, K::cudaChannelFormatKindFloat),
        _ => return None,
    })
}

/// Converts a channel description for the driver: a format and a number of channels.
fn format(description: &cudaChannelFormatDesc) -> Answer<(CUarray_format, c_uint)> {
    use CUarray_format as F;
    use cudaChannelFormatKind as K;
    let invalid = Error::cudaErrorInvalidChannelDescriptor;
    let all = [description.x, description.y, description.z, description.w];
    let channels = all.iter().take_while(|bits| **bits != 0).count();
    let alike = all[..channels].iter().all(|bits| *bits == all[0]);
    if !matches!(channels, 1 | 2 | 4) || !alike || all[channels..].iter().any(|bits| *bits != 0) {
        return Err(invalid);
    }
    let format = match (description.f, all[0]) {
        (K::cudaChannelFormatKindUnsigned, 8) => F::CU_AD_FORMAT_UNSIGNED_INT8,
        (K::cudaChannelFormatKindUnsigned, 16) => F::CU_AD_FORMAT_UNSIGNED_INT16,
        (K::cudaChannelFormatKindUnsigned, 32) => F::CU_AD_FORMAT_UNSIGNED_INT32,
        (K::cudaChannelFormatKindSigned, 8) => F::CU_AD_FORMAT_SIGNED_INT8,
        (K::cudaChannelFormatKindSigned, 16) => F::CU_AD_FORMAT_SIGNED_INT16,
        (K::cudaChannelFormatKindSigned, 32) => F::CU_AD_FORMAT_SIGNED_INT32,
        (K::cudaChannelFormatKindFloat, 16) => F::CU_AD_FORMAT_HALF,
        (K::cudaChannelFormatKindFloat, 32) => F::CU_AD_FORMAT_FLOAT,
        _ => return Err(invalid),
    };
    Ok((format, c_uint::try_from(channels).unwrap_or(0)))
}

fn descriptor(array: CUarray) -> Answer<CUDA_ARRAY3D_DESCRIPTOR> {
    // SAFETY: numbers, for which zero is a valid value.
    let mut found: CUDA_ARRAY3D_DESCRIPTOR = unsafe { std::mem::zeroed() };
    // SAFETY: valid for writing the answer.
    unsafe { driver!(cuArray3DGetDescriptor_v2(&raw mut found, array))? };
    Ok(found)
}

/// The size of an array's element in bytes.
///
/// # Errors
/// The array is invalid, or its format does not consist of plain numbers.
pub fn element(array: CUarray) -> Answer<usize> {
    let found = descriptor(array)?;
    let (bits, _) = bits(found.Format).ok_or(Error::cudaErrorInvalidChannelDescriptor)?;
    Ok(usize::try_from(bits / 8).unwrap_or(0) * found.NumChannels as usize)
}

/// The size of an array's row in bytes.
///
/// # Errors
/// As for [`element`].
pub fn row(array: CUarray) -> Answer<usize> {
    let width = descriptor(array)?.Width;
    width
        .checked_mul(element(array)?)
        .ok_or(Error::cudaErrorInvalidValue)
}

fn channels(found: &CUDA_ARRAY3D_DESCRIPTOR) -> Answer<cudaChannelFormatDesc> {
    let (bits, f) = bits(found.Format).ok_or(Error::cudaErrorInvalidChannelDescriptor)?;
    let of = |number| if found.NumChannels > number { bits } else { 0 };
    Ok(cudaChannelFormatDesc {
        x: of(0),
        y: of(1),
        z: of(2),
        w: of(3),
        f,
    })
}

fn wanted(
    description: &cudaChannelFormatDesc,
    size: cudaExtent,
    flags: c_uint,
) -> Answer<CUDA_ARRAY3D_DESCRIPTOR> {
    let (format, channels) = format(description)?;
    Ok(CUDA_ARRAY3D_DESCRIPTOR {
        Width: size.width,
        Height: size.height,
        Depth: size.depth,
        Format: format,
        NumChannels: channels,
        // Layered 1, for surfaces 2, cubemap 4, gather 8: the same numbers as the driver's.
        Flags: flags,
    })
}

fn create(
    description: *const cudaChannelFormatDesc,
    size: cudaExtent,
    flags: c_uint,
) -> Answer<cudaArray_t> {
    ready()?;
    // SAFETY: the entry points' callers pass a description.
    let wanted = wanted(&unsafe { get(description) }?, size, flags)?;
    let mut array = null_mut();
    // SAFETY: valid for writing the answer, and a description.
    unsafe { driver!(cuArray3DCreate_v2(&raw mut array, &raw const wanted))? };
    Ok(array.cast())
}

/// Converts the resource of a texture or surface for the driver.
fn resource(from: &cudaResourceDesc) -> Answer<CUDA_RESOURCE_DESC> {
    use cudaResourceType as T;
    // SAFETY: numbers and pointers, for which zero is a valid value.
    let mut to: CUDA_RESOURCE_DESC = unsafe { std::mem::zeroed() };
    to.resType = CUresourcetype_enum(from.resType.0);
    // SAFETY: the kind determines which part of the union was written.
    unsafe {
        match from.resType {
            T::cudaResourceTypeArray => to.res.array.hArray = from.res.array.array.cast(),
            T::cudaResourceTypeMipmappedArray => {
                to.res.mipmap.hMipmappedArray = from.res.mipmap.mipmap.cast()
            }
            T::cudaResourceTypeLinear => {
                let linear = from.res.linear;
                to.res.linear.devPtr = linear.devPtr as CUdeviceptr;
                (to.res.linear.format, to.res.linear.numChannels) = format(&linear.desc)?;
                to.res.linear.sizeInBytes = linear.sizeInBytes;
            }
            T::cudaResourceTypePitch2D => {
                let rows = from.res.pitch2D;
                to.res.pitch2D.devPtr = rows.devPtr as CUdeviceptr;
                (to.res.pitch2D.format, to.res.pitch2D.numChannels) = format(&rows.desc)?;
                (to.res.pitch2D.width, to.res.pitch2D.height) = (rows.width, rows.height);
                to.res.pitch2D.pitchInBytes = rows.pitchInBytes;
            }
            _ => return Err(Error::cudaErrorInvalidValue),
        }
    }
    Ok(to)
}

/// Converts a texture's sampling parameters for the driver.
fn texture(from: &cudaTextureDesc) -> CUDA_TEXTURE_DESC {
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    let as_element = from.readMode == cudaTextureReadMode::cudaReadModeElementType;
    CUDA_TEXTURE_DESC {
        addressMode: from.addressMode.map(|mode| CUaddress_mode_enum(mode.0)),
        filterMode: CUfilter_mode_enum(from.filterMode.0),
        flags: flag(as_element, flags::READ_AS_INTEGER)
            | flag(from.normalizedCoords != 0, flags::NORMALIZED_COORDINATES)
            | flag(from.sRGB != 0, flags::SRGB)
            | flag(
                from.disableTrilinearOptimization != 0,
                flags::NO_TRILINEAR_OPTIMIZATION,
            )
            | flag(from.seamlessCubemap != 0, flags::SEAMLESS_CUBEMAP),
        maxAnisotropy: from.maxAnisotropy,
        mipmapFilterMode: CUfilter_mode_enum(from.mipmapFilterMode.0),
        mipmapLevelBias: from.mipmapLevelBias,
        minMipmapLevelClamp: from.minMipmapLevelClamp,
        maxMipmapLevelClamp: from.maxMipmapLevelClamp,
        borderColor: from.borderColor,
        reserved: [0; 12],
    }
}

/// Creates a channel description.
#[unsafe(no_mangle)]
pub extern "C" fn cudaCreateChannelDesc(
    x: c_int,
    y: c_int,
    z: c_int,
    w: c_int,
    f: cudaChannelFormatKind,
) -> cudaChannelFormatDesc {
    cudaChannelFormatDesc { x, y, z, w, f }
}
const _: signatures::cudaCreateChannelDesc = cudaCreateChannelDesc;

entry_points! {
    fn cudaMallocArray(
        array: *mut cudaArray_t,
        desc: *const cudaChannelFormatDesc,
        width: usize,
        height: usize,
        flags: c_uint,
    ) {
        put(array, create(desc, cudaExtent { width, height, depth: 0 }, flags)?)
    }

    fn cudaMalloc3DArray(
        array: *mut cudaArray_t,
        desc: *const cudaChannelFormatDesc,
        extent: cudaExtent,
        flags: c_uint,
    ) {
        put(array, create(desc, extent, flags)?)
    }

    fn cudaMallocMipmappedArray(
        mipmappedArray: *mut cudaMipmappedArray_t,
        desc: *const cudaChannelFormatDesc,
        extent: cudaExtent,
        numLevels: c_uint,
        flags: c_uint,
    ) {
        ready()?;
        let wanted = wanted(&get(desc)?, extent, flags)?;
        driver!(cuMipmappedArrayCreate(mipmappedArray.cast(), &raw const wanted, numLevels))
    }

    fn cudaFreeArray(array: cudaArray_t) {
        ready()?;
        if array.is_null() { Ok(()) } else { driver!(cuArrayDestroy(array.cast())) }
    }

    fn cudaFreeMipmappedArray(mipmappedArray: cudaMipmappedArray_t) {
        ready()?;
        if mipmappedArray.is_null() { Ok(()) } else { driver!(cuMipmappedArrayDestroy(mipmappedArray.cast())) }
    }

    fn cudaGetMipmappedArrayLevel(
        levelArray: *mut cudaArray_t,
        mipmappedArray: cudaMipmappedArray_const_t,
        level: c_uint,
    ) {
        ready()?;
        driver!(cuMipmappedArrayGetLevel(levelArray.cast(), mipmappedArray.cast_mut().cast(), level))
    }

    fn cudaArrayGetInfo(
        desc: *mut cudaChannelFormatDesc,
        extent: *mut cudaExtent,
        flags: *mut c_uint,
        array: cudaArray_t,
    ) {
        ready()?;
        let found = descriptor(array.cast())?;
        if !desc.is_null() {
            put(desc, channels(&found)?)?;
        }
        if !extent.is_null() {
            put(extent, cudaExtent { width: found.Width, height: found.Height, depth: found.Depth })?;
        }
        if flags.is_null() { Ok(()) } else { put(flags, found.Flags) }
    }

    fn cudaGetChannelDesc(desc: *mut cudaChannelFormatDesc, array: cudaArray_const_t) {
        ready()?;
        put(desc, channels(&descriptor(array.cast_mut().cast())?)?)
    }

    fn cudaCreateTextureObject(
        pTexObject: *mut cudaTextureObject_t,
        pResDesc: *const cudaResourceDesc,
        pTexDesc: *const cudaTextureDesc,
        pResViewDesc: *const cudaResourceViewDesc,
    ) {
        ready()?;
        let (resource, texture) = (resource(&get(pResDesc)?)?, texture(&get(pTexDesc)?));
        let view = if pResViewDesc.is_null() { null() } else { pResViewDesc.cast::<CUDA_RESOURCE_VIEW_DESC>() };
        driver!(cuTexObjectCreate(pTexObject, &raw const resource, &raw const texture, view))
    }

    fn cudaDestroyTextureObject(texObject: cudaTextureObject_t) {
        ready()?;
        driver!(cuTexObjectDestroy(texObject))
    }

    fn cudaCreateSurfaceObject(pSurfObject: *mut cudaSurfaceObject_t, pResDesc: *const cudaResourceDesc) {
        ready()?;
        let resource = resource(&get(pResDesc)?)?;
        driver!(cuSurfObjectCreate(pSurfObject, &raw const resource))
    }

    fn cudaDestroySurfaceObject(surfObject: cudaSurfaceObject_t) {
        ready()?;
        driver!(cuSurfObjectDestroy(surfObject))
    }
}
const _: () = {
    // A view is the same structure, with the same format numbers.
    assert!(size_of::<cudaResourceViewDesc>() <= size_of::<CUDA_RESOURCE_VIEW_DESC>());
    assert!(
        cudaResourceViewFormat::cudaResViewFormatUnsignedBlockCompressed7.0
            == CUresourceViewFormat::CU_RES_VIEW_FORMAT_UNSIGNED_BC7.0
    );
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_alike_and_one_two_or_four() {
        let of = |x, y, z, w, f| format(&cudaChannelFormatDesc { x, y, z, w, f }).ok();
        let float = cudaChannelFormatKind::cudaChannelFormatKindFloat;
        assert_eq!(
            of(32, 0, 0, 0, float),
            Some((CUarray_format::CU_AD_FORMAT_FLOAT, 1))
        );
        assert_eq!(
            of(16, 16, 16, 16, float),
            Some((CUarray_format::CU_AD_FORMAT_HALF, 4))
        );
        assert_eq!(of(32, 32, 32, 0, float), None);
        assert_eq!(of(32, 16, 0, 0, float), None);
        assert_eq!(of(0, 32, 0, 0, float), None);
        assert_eq!(of(64, 0, 0, 0, float), None);
    }
}
