//! Descriptors of cuBLASLt: attributes that are kept in the guest and sent along with calls that
//! use them.

use std::ffi::c_void;

use cuda_definition::cublaslt::types::*;
use remoting_proto::apis::cuda::attributes::{Descriptor, LAYOUT, OPERATION, PREFERENCE, Table};

use crate::call::{INVALID_VALUE, NOT_SUPPORTED, Outcome, entry_points, put};

/// A type in which a program keeps a descriptor.
pub trait Kept {
    /// The attributes.
    const TABLE: Table;
    /// A value without any attribute set.
    const EMPTY: Self;
    /// The default value of an attribute that has not been set, in its low bytes.
    fn unset(_attribute: u32) -> u64 {
        0
    }
}

impl Kept for cublasLtMatmulDescOpaque_t {
    const TABLE: Table = OPERATION;
    const EMPTY: Self = Self { data: [0; 32] };

    fn unset(attribute: u32) -> u64 {
        match attribute {
            // The whole matrix; no epilogue; all multiprocessors.
            6 => 2,
            7 => 1,
            // The bias has the type of the result.
            22 | 26 => u64::MAX,
            _ => 0,
        }
    }
}

impl Kept for cublasLtMatrixLayoutOpaque_t {
    const TABLE: Table = LAYOUT;
    const EMPTY: Self = Self { data: [0; 8] };

    fn unset(attribute: u32) -> u64 {
        // A batch of one matrix.
        u64::from(attribute == 5)
    }
}

impl Kept for cublasLtMatmulPreferenceOpaque_t {
    const TABLE: Table = PREFERENCE;
    const EMPTY: Self = Self { data: [0; 8] };

    fn unset(attribute: u32) -> u64 {
        match attribute {
            // Any reduction scheme, the alignment of allocations, any implementation.
            3 => u64::MAX,
            5..=8 => 256,
            12 => u64::MAX,
            _ => 0,
        }
    }
}

/// A program's descriptor.
///
/// # Safety
/// It is null, or a descriptor that has been created or initialized and that nothing else uses
/// meanwhile.
pub unsafe fn of<'a, T: Kept>(at: *mut T) -> Outcome<Descriptor<'a>> {
    if at.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise; words consist of bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(at.cast::<u8>(), size_of::<T>()) };
    Ok(Descriptor::at(T::TABLE, bytes))
}

/// Initializes a descriptor in a program's memory.
///
/// # Safety
/// There is room for one.
unsafe fn begin<'a, T: Kept>(at: *mut T, size: usize) -> Outcome<Descriptor<'a>> {
    if at.is_null() || size < size_of::<T>() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe {
        at.write(T::EMPTY);
        of(at)
    }
}

/// Creates a descriptor, which belongs to the caller until it destroys it.
///
/// # Safety
/// `to` is null or valid for writing.
unsafe fn make<T: Kept>(to: *mut *mut T) -> Outcome<*mut T> {
    let made = Box::into_raw(Box::new(T::EMPTY));
    // SAFETY: the caller's promise.
    match unsafe { put(to, made) } {
        Ok(()) => Ok(made),
        Err(code) => {
            // SAFETY: created above, and nobody else has it.
            drop(unsafe { Box::from_raw(made) });
            Err(code)
        }
    }
}

/// Destroys a descriptor.
///
/// # Safety
/// It was created by [`make`], or is null.
unsafe fn destroy<T: Kept>(at: *mut T) -> Outcome {
    if at.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(at) });
    Ok(())
}

/// Sets an attribute.
///
/// # Safety
/// There are this many bytes at `value`.
unsafe fn set<T: Kept>(at: *mut T, attribute: u32, value: *const c_void, size: usize) -> Outcome {
    // SAFETY: the caller's descriptor.
    let mut descriptor = unsafe { of(at) }?;
    let wanted = descriptor.size(attribute).ok_or(NOT_SUPPORTED)?;
    if value.is_null() || size != wanted {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let value = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), size) };
    match descriptor.set(attribute, value) {
        true => Ok(()),
        false => Err(INVALID_VALUE),
    }
}

/// Reads an attribute.
///
/// # Safety
/// There is room for this many bytes, and for their number.
unsafe fn get<T: Kept>(
    at: *mut T,
    attribute: u32,
    to: *mut c_void,
    size: usize,
    written: *mut usize,
) -> Outcome {
    // SAFETY: the caller's descriptor.
    let descriptor = unsafe { of(at) }?;
    let wanted = descriptor.size(attribute).ok_or(NOT_SUPPORTED)?;
    if size == 0 {
        // SAFETY: the caller's promise.
        return unsafe { put(written, wanted) };
    }
    if to.is_null() || size != wanted {
        return Err(INVALID_VALUE);
    }
    let unset = T::unset(attribute).to_le_bytes();
    let value = descriptor.get(attribute).unwrap_or(&unset[..wanted]);
    // SAFETY: the caller's promise. The pointer for the number is optional.
    unsafe {
        to.cast::<u8>()
            .copy_from_nonoverlapping(value.as_ptr(), value.len());
        if !written.is_null() {
            written.write_unaligned(wanted);
        }
    }
    Ok(())
}

fn operation(descriptor: &mut Descriptor<'_>, compute: u32, scale: u32) {
    descriptor.set(0, &compute.to_le_bytes());
    descriptor.set(1, &scale.to_le_bytes());
}

fn layout(descriptor: &mut Descriptor<'_>, of: u32, rows: u64, columns: u64, leading: i64) {
    descriptor.set(0, &of.to_le_bytes());
    descriptor.set(2, &rows.to_le_bytes());
    descriptor.set(3, &columns.to_le_bytes());
    descriptor.set(4, &leading.to_le_bytes());
}

entry_points! { cublaslt:
    fn cublasLtMatmulDescCreate(
        matmulDesc: *mut cublasLtMatmulDesc_t,
        computeType: cublasComputeType_t,
        scaleType: cudaDataType_t,
    ) {
        let made = make(matmulDesc)?;
        operation(&mut of(made)?, computeType.0, scaleType.0);
        Ok(())
    }

    fn cublasLtMatmulDescInit_internal(
        matmulDesc: cublasLtMatmulDesc_t,
        size: usize,
        computeType: cublasComputeType_t,
        scaleType: cudaDataType_t,
    ) {
        operation(&mut begin(matmulDesc, size)?, computeType.0, scaleType.0);
        Ok(())
    }

    fn cublasLtMatmulDescInit(
        matmulDesc: cublasLtMatmulDesc_t,
        computeType: cublasComputeType_t,
        scaleType: cudaDataType_t,
    ) {
        let size = size_of::<cublasLtMatmulDescOpaque_t>();
        operation(&mut begin(matmulDesc, size)?, computeType.0, scaleType.0);
        Ok(())
    }

    fn cublasLtMatmulDescDestroy(matmulDesc: cublasLtMatmulDesc_t) {
        destroy(matmulDesc)
    }

    fn cublasLtMatmulDescSetAttribute(
        matmulDesc: cublasLtMatmulDesc_t,
        attr: cublasLtMatmulDescAttributes_t,
        buf: *const c_void,
        sizeInBytes: usize,
    ) {
        set(matmulDesc, attr.0, buf, sizeInBytes)
    }

    fn cublasLtMatmulDescGetAttribute(
        matmulDesc: cublasLtMatmulDesc_t,
        attr: cublasLtMatmulDescAttributes_t,
        buf: *mut c_void,
        sizeInBytes: usize,
        sizeWritten: *mut usize,
    ) {
        get(matmulDesc, attr.0, buf, sizeInBytes, sizeWritten)
    }

    fn cublasLtMatrixLayoutCreate(
        matLayout: *mut cublasLtMatrixLayout_t,
        r#type: cudaDataType,
        rows: u64,
        cols: u64,
        ld: i64,
    ) {
        let made = make(matLayout)?;
        layout(&mut of(made)?, r#type.0, rows, cols, ld);
        Ok(())
    }

    fn cublasLtMatrixLayoutInit_internal(
        matLayout: cublasLtMatrixLayout_t,
        size: usize,
        r#type: cudaDataType,
        rows: u64,
        cols: u64,
        ld: i64,
    ) {
        layout(&mut begin(matLayout, size)?, r#type.0, rows, cols, ld);
        Ok(())
    }

    fn cublasLtMatrixLayoutInit(
        matLayout: cublasLtMatrixLayout_t,
        r#type: cudaDataType,
        rows: u64,
        cols: u64,
        ld: i64,
    ) {
        let size = size_of::<cublasLtMatrixLayoutOpaque_t>();
        layout(&mut begin(matLayout, size)?, r#type.0, rows, cols, ld);
        Ok(())
    }

    fn cublasLtMatrixLayoutDestroy(matLayout: cublasLtMatrixLayout_t) {
        destroy(matLayout)
    }

    fn cublasLtMatrixLayoutSetAttribute(
        matLayout: cublasLtMatrixLayout_t,
        attr: cublasLtMatrixLayoutAttribute_t,
        buf: *const c_void,
        sizeInBytes: usize,
    ) {
        set(matLayout, attr.0, buf, sizeInBytes)
    }

    fn cublasLtMatrixLayoutGetAttribute(
        matLayout: cublasLtMatrixLayout_t,
        attr: cublasLtMatrixLayoutAttribute_t,
        buf: *mut c_void,
        sizeInBytes: usize,
        sizeWritten: *mut usize,
    ) {
        get(matLayout, attr.0, buf, sizeInBytes, sizeWritten)
    }

    fn cublasLtMatmulPreferenceCreate(pref: *mut cublasLtMatmulPreference_t) {
        make(pref).map(drop)
    }

    fn cublasLtMatmulPreferenceInit_internal(pref: cublasLtMatmulPreference_t, size: usize) {
        begin(pref, size).map(drop)
    }

    fn cublasLtMatmulPreferenceInit(pref: cublasLtMatmulPreference_t) {
        begin(pref, size_of::<cublasLtMatmulPreferenceOpaque_t>()).map(drop)
    }

    fn cublasLtMatmulPreferenceDestroy(pref: cublasLtMatmulPreference_t) {
        destroy(pref)
    }

    fn cublasLtMatmulPreferenceSetAttribute(
        pref: cublasLtMatmulPreference_t,
        attr: cublasLtMatmulPreferenceAttributes_t,
        buf: *const c_void,
        sizeInBytes: usize,
    ) {
        set(pref, attr.0, buf, sizeInBytes)
    }

    fn cublasLtMatmulPreferenceGetAttribute(
        pref: cublasLtMatmulPreference_t,
        attr: cublasLtMatmulPreferenceAttributes_t,
        buf: *mut c_void,
        sizeInBytes: usize,
        sizeWritten: *mut usize,
    ) {
        get(pref, attr.0, buf, sizeInBytes, sizeWritten)
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use super::*;

    #[test]
    fn attributes_are_read_as_they_were_set_and_have_their_defaults() {
        let mut made = null_mut();
        // SAFETY: all pointers are to the test's locals.
        unsafe {
            let single = cudaDataType_t::CUDA_R_32F;
            assert_eq!(cublasLtMatrixLayoutCreate(&mut made, single, 3, 4, 3).0, 0);
            let read = |attribute: u32, size: usize| {
                let (mut value, mut written) = (0u64, 0);
                let attribute = cublasLtMatrixLayoutAttribute_t(attribute);
                let at = (&raw mut value).cast();
                let status =
                    cublasLtMatrixLayoutGetAttribute(made, attribute, at, size, &mut written);
                (status.0, value, written)
            };
            assert_eq!(read(2, 8), (0, 3, 8));
            assert_eq!(read(5, 4), (0, 1, 4));
            assert_eq!(read(5, 8).0, 7);
            let batch = 6i32;
            let attribute = cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
            let at = (&raw const batch).cast();
            assert_eq!(
                cublasLtMatrixLayoutSetAttribute(made, attribute, at, 4).0,
                0
            );
            assert_eq!(read(5, 4), (0, 6, 4));
            assert_eq!(read(99, 4).0, 15);
            assert_eq!(cublasLtMatrixLayoutDestroy(made).0, 0);
            assert_eq!(cublasLtMatrixLayoutDestroy(null_mut()).0, 7);
        }
    }
}
