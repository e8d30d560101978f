//! Copies of vectors and matrices between host and device, by the driver's copies of rectangles.

// The macro defines each function with sizes of 32 and of 64 bits.
#![allow(clippy::cast_lossless)]

use std::ffi::{c_int, c_void};

use cuda_definition::{
    cublas::types::*,
    driver::{
        signatures,
        types::{CUDA_MEMCPY2D, CUmemorytype, CUstream},
    },
};
use remoting_proto::apis::cuda::codes;

use crate::{
    call::{INVALID_VALUE, Outcome, entry_points},
    interface::symbol,
};

/// A rectangle: bytes per row, rows, and the distances between rows on both sides.
struct Shape {
    width: i64,
    rows: i64,
    from: i64,
    to: i64,
}

impl Shape {
    fn vector(n: i64, size: i64, from: i64, to: i64) -> Outcome<Self> {
        let pitch = |step: i64| step.checked_mul(size).filter(|_| step > 0);
        Ok(Self {
            width: size,
            rows: n,
            from: pitch(from).ok_or(INVALID_VALUE)?,
            to: pitch(to).ok_or(INVALID_VALUE)?,
        })
    }

    fn matrix(rows: i64, columns: i64, size: i64, from: i64, to: i64) -> Outcome<Self> {
        let pitch = |leading: i64| leading.checked_mul(size).filter(|_| leading >= rows.max(1));
        Ok(Self {
            width: rows.checked_mul(size).ok_or(INVALID_VALUE)?,
            rows: columns,
            from: pitch(from).ok_or(INVALID_VALUE)?,
            to: pitch(to).ok_or(INVALID_VALUE)?,
        })
    }

    /// Copies from the host to the device or back, in stream order if a stream is given.
    ///
    /// # Safety
    /// Both sides have what the shape describes.
    unsafe fn copy(
        &self,
        host: *mut c_void,
        device: *const c_void,
        to_device: bool,
        stream: Option<cudaStream_t>,
    ) -> Outcome {
        if self.width < 0 || self.rows < 0 {
            return Err(INVALID_VALUE);
        }
        if self.width == 0 || self.rows == 0 {
            return Ok(());
        }
        let (mut width, mut rows, mut from, mut to) = (
            self.width as usize,
            self.rows as usize,
            self.from as usize,
            self.to as usize,
        );
        if from == width && to == width {
            // A contiguous copy, to which no limit of pitches applies.
            width = width.checked_mul(rows).ok_or(INVALID_VALUE)?;
            (rows, from, to) = (1, width, width);
        }
        // SAFETY: all fields are numbers and addresses, for which zero is a valid value.
        let mut copy: CUDA_MEMCPY2D = unsafe { std::mem::zeroed() };
        (copy.WidthInBytes, copy.Height) = (width, rows);
        (copy.srcPitch, copy.dstPitch) = (from, to);
        let (on_host, on_device) = (
            CUmemorytype::CU_MEMORYTYPE_HOST,
            CUmemorytype::CU_MEMORYTYPE_DEVICE,
        );
        if to_device {
            (copy.srcMemoryType, copy.srcHost) = (on_host, host);
            (copy.dstMemoryType, copy.dstDevice) = (on_device, device as u64);
        } else {
            (copy.srcMemoryType, copy.srcDevice) = (on_device, device as u64);
            (copy.dstMemoryType, copy.dstHost) = (on_host, host);
        }
        // SAFETY: the driver's functions, if they exist, have the signatures of the API's definition.
        let result = unsafe {
            match stream {
                None => {
                    let function = symbol(c"cuMemcpy2D_v2");
                    let function = std::mem::transmute::<
                        *mut c_void,
                        Option<signatures::cuMemcpy2D_v2>,
                    >(function);
                    function.ok_or(codes::NOT_INITIALIZED)?(&raw const copy)
                }
                Some(stream) => {
                    let function = symbol(c"cuMemcpy2DAsync_v2");
                    let function = std::mem::transmute::<
                        *mut c_void,
                        Option<signatures::cuMemcpy2DAsync_v2>,
                    >(function);
                    let stream = stream as CUstream;
                    function.ok_or(codes::NOT_INITIALIZED)?(&raw const copy, stream)
                }
            }
        };
        match result.0 {
            0 => Ok(()),
            code => Err(code.cast_signed()),
        }
    }
}

macro_rules! copies {
    ($int:ty; $set_vector:ident $get_vector:ident $set_matrix:ident $get_matrix:ident
     $set_vector_async:ident $get_vector_async:ident $set_matrix_async:ident $get_matrix_async:ident) => {
        entry_points! { cublas:
            fn $set_vector(n: $int, elemSize: $int, x: *const c_void, incx: $int, devicePtr: *mut c_void, incy: $int) {
                let shape = Shape::vector(n as i64, elemSize as i64, incx as i64, incy as i64)?;
                shape.copy(x.cast_mut(), devicePtr, true, None)
            }

            fn $get_vector(n: $int, elemSize: $int, x: *const c_void, incx: $int, y: *mut c_void, incy: $int) {
                let shape = Shape::vector(n as i64, elemSize as i64, incx as i64, incy as i64)?;
                shape.copy(y, x, false, None)
            }

            fn $set_matrix(rows: $int, cols: $int, elemSize: $int, A: *const c_void, lda: $int, B: *mut c_void, ldb: $int) {
                let shape = Shape::matrix(rows as i64, cols as i64, elemSize as i64, lda as i64, ldb as i64)?;
                shape.copy(A.cast_mut(), B, true, None)
            }

            fn $get_matrix(rows: $int, cols: $int, elemSize: $int, A: *const c_void, lda: $int, B: *mut c_void, ldb: $int) {
                let shape = Shape::matrix(rows as i64, cols as i64, elemSize as i64, lda as i64, ldb as i64)?;
                shape.copy(B, A, false, None)
            }

            fn $set_vector_async(n: $int, elemSize: $int, hostPtr: *const c_void, incx: $int, devicePtr: *mut c_void, incy: $int, stream: cudaStream_t) {
                let shape = Shape::vector(n as i64, elemSize as i64, incx as i64, incy as i64)?;
                shape.copy(hostPtr.cast_mut(), devicePtr, true, Some(stream))
            }

            fn $get_vector_async(n: $int, elemSize: $int, devicePtr: *const c_void, incx: $int, hostPtr: *mut c_void, incy: $int, stream: cudaStream_t) {
                let shape = Shape::vector(n as i64, elemSize as i64, incx as i64, incy as i64)?;
                shape.copy(hostPtr, devicePtr, false, Some(stream))
            }

            fn $set_matrix_async(rows: $int, cols: $int, elemSize: $int, A: *const c_void, lda: $int, B: *mut c_void, ldb: $int, stream: cudaStream_t) {
                let shape = Shape::matrix(rows as i64, cols as i64, elemSize as i64, lda as i64, ldb as i64)?;
                shape.copy(A.cast_mut(), B, true, Some(stream))
            }

            fn $get_matrix_async(rows: $int, cols: $int, elemSize: $int, A: *const c_void, lda: $int, B: *mut c_void, ldb: $int, stream: cudaStream_t) {
                let shape = Shape::matrix(rows as i64, cols as i64, elemSize as i64, lda as i64, ldb as i64)?;
                shape.copy(B, A, false, Some(stream))
            }
        }
    };
}

copies!(c_int;
    cublasSetVector cublasGetVector cublasSetMatrix cublasGetMatrix
    cublasSetVectorAsync cublasGetVectorAsync cublasSetMatrixAsync cublasGetMatrixAsync);
copies!(i64;
    cublasSetVector_64 cublasGetVector_64 cublasSetMatrix_64 cublasGetMatrix_64
    cublasSetVectorAsync_64 cublasGetVectorAsync_64 cublasSetMatrixAsync_64 cublasGetMatrixAsync_64);
