//! cuBLAS: handles, vectors, products.

use std::ffi::{c_int, c_longlong, c_void};

use cuda_definition::{cublas::types::*, driver::types::CUstream};

use crate::{
    INVALID_VALUE, NOT_INITIALIZED, Outcome, entry_points,
    numbers::{Matrix, Scalar, Type, check},
    product::{After, Product, is_transposed},
    stream,
};

/// The version that it reports: 13.1.0.
pub const VERSION: usize = 130_100;
const MAGIC: u64 = 0x0067_616e_7472_7942;

/// What a handle points to.
pub struct Handle {
    magic: u64,
    stream: usize,
    on_device: bool,
    math: u32,
}

/// Creates a handle.
pub fn make() -> *mut Handle {
    Box::into_raw(Box::new(Handle {
        magic: MAGIC,
        stream: 0,
        on_device: false,
        math: 0,
    }))
}

/// The handle at an address.
///
/// # Safety
/// The address is null or was returned by [`make`].
pub unsafe fn of<'a>(handle: *mut c_void) -> Outcome<&'a mut Handle> {
    // SAFETY: the caller's promise.
    let handle = unsafe { handle.cast::<Handle>().as_mut() }.ok_or(NOT_INITIALIZED)?;
    if handle.magic != MAGIC {
        return Err(NOT_INITIALIZED);
    }
    Ok(handle)
}

/// Destroys a handle.
///
/// # Safety
/// As for [`of`].
pub unsafe fn end(handle: *mut c_void) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe {
        of(handle)?.magic = 0;
        drop(Box::from_raw(handle.cast::<Handle>()));
    }
    Ok(())
}

impl Handle {
    fn stream(&self) -> CUstream {
        self.stream as CUstream
    }
}

/// # Safety
/// Handles and pointers meet the API's requirements.
unsafe fn product(
    handle: cublasHandle_t,
    operations: (cublasOperation_t, cublasOperation_t),
    shape: [c_int; 3],
    scalars: (Type, *const c_void, *const c_void),
    matrices: [(u32, *const c_void, c_int, i64); 3],
    batch: c_int,
) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe {
        let handle = of(handle.cast())?;
        let [a, b, c] = matrices;
        let matrix = |(of, at, leading, stride): (u32, *const c_void, c_int, i64)| {
            Ok::<_, u32>(Matrix {
                of: Type::of(of)?,
                at: at as u64,
                leading: leading.into(),
                stride,
            })
        };
        let c = matrix(c)?;
        let (of_scalars, alpha, beta) = scalars;
        Product {
            transposed: (
                is_transposed(operations.0.0)?,
                is_transposed(operations.1.0)?,
            ),
            shape: (shape[0].into(), shape[1].into(), shape[2].into()),
            alpha: Scalar::at(of_scalars, alpha, handle.on_device)?,
            beta: Scalar::at(of_scalars, beta, handle.on_device)?,
            a: matrix(a)?,
            b: matrix(b)?,
            c,
            d: c,
            batch: batch.into(),
            after: After::default(),
        }
        .submit(handle.stream())
    }
}

fn vector(at: *const f32, n: c_int, step: c_int) -> Outcome<Matrix> {
    let step = i64::from(step);
    if n < 0 || step < 1 {
        return Err(INVALID_VALUE);
    }
    let vector = Matrix {
        of: Type::Single,
        at: at as u64,
        leading: step,
        stride: 0,
    };
    vector.check(1, n.into(), 1)?;
    Ok(vector)
}

/// Writes a sum over one or two vectors to the host or to the device.
unsafe fn reduce(
    handle: cublasHandle_t,
    result: *mut f32,
    sum: impl Fn() -> f64 + Send + 'static,
) -> Outcome {
    // SAFETY: the caller's handle.
    let handle = unsafe { of(handle.cast()) }?;
    if result.is_null() {
        return Err(INVALID_VALUE);
    }
    let at = result as u64;
    if handle.on_device {
        check(at, 4)?;
        // SAFETY: checked.
        return stream::submit(handle.stream(), move || unsafe {
            Type::Single.store(at, sum());
        });
    }
    // Waits, like the real one. A stream that is being captured cannot be waited for.
    stream::wait(handle.stream())?;
    // SAFETY: the caller has room for the result.
    unsafe { Type::Single.store(at, sum()) };
    Ok(())
}

entry_points! { cublas:
    fn cublasCreate_v2(handle: *mut cublasHandle_t) {
        if handle.is_null() {
            return Err(INVALID_VALUE);
        }
        handle.write(make().cast());
        Ok(())
    }

    fn cublasDestroy_v2(handle: cublasHandle_t) {
        end(handle.cast())
    }

    fn cublasSetStream_v2(handle: cublasHandle_t, streamId: cudaStream_t) {
        of(handle.cast())?.stream = streamId as usize;
        Ok(())
    }

    fn cublasSetWorkspace_v2(handle: cublasHandle_t, workspace: *mut c_void, workspaceSizeInBytes: usize) {
        of(handle.cast())?;
        if workspaceSizeInBytes == 0 {
            return Ok(());
        }
        check(workspace as u64, workspaceSizeInBytes as u64).map_err(|_| INVALID_VALUE)
    }

    fn cublasSetPointerMode_v2(handle: cublasHandle_t, mode: cublasPointerMode_t) {
        of(handle.cast())?.on_device = mode.0 == 1;
        Ok(())
    }

    fn cublasSetMathMode(handle: cublasHandle_t, mode: cublasMath_t) {
        // Two modes, and the bit that forbids reductions at lower precision.
        if mode.0 & !0x13 != 0 {
            return Err(INVALID_VALUE);
        }
        of(handle.cast())?.math = mode.0;
        Ok(())
    }

    fn cublasGetVersion_v2(_handle: cublasHandle_t, version: *mut c_int) {
        version.write(VERSION as c_int);
        Ok(())
    }

    fn cublasSgemm_v2(
        handle: cublasHandle_t, transa: cublasOperation_t, transb: cublasOperation_t,
        m: c_int, n: c_int, k: c_int, alpha: *const f32, A: *const f32, lda: c_int,
        B: *const f32, ldb: c_int, beta: *const f32, C: *mut f32, ldc: c_int,
    ) {
        product(
            handle, (transa, transb), [m, n, k], (Type::Single, alpha.cast(), beta.cast()),
            [(0, A.cast(), lda, 0), (0, B.cast(), ldb, 0), (0, C.cast(), ldc, 0)], 1,
        )
    }

    fn cublasSgemmStridedBatched(
        handle: cublasHandle_t, transa: cublasOperation_t, transb: cublasOperation_t,
        m: c_int, n: c_int, k: c_int, alpha: *const f32, A: *const f32, lda: c_int, strideA: c_longlong,
        B: *const f32, ldb: c_int, strideB: c_longlong, beta: *const f32, C: *mut f32, ldc: c_int,
        strideC: c_longlong, batchCount: c_int,
    ) {
        product(
            handle, (transa, transb), [m, n, k], (Type::Single, alpha.cast(), beta.cast()),
            [(0, A.cast(), lda, strideA), (0, B.cast(), ldb, strideB), (0, C.cast(), ldc, strideC)],
            batchCount,
        )
    }

    fn cublasGemmEx(
        handle: cublasHandle_t, transa: cublasOperation_t, transb: cublasOperation_t,
        m: c_int, n: c_int, k: c_int, alpha: *const c_void, A: *const c_void, Atype: cudaDataType,
        lda: c_int, B: *const c_void, Btype: cudaDataType, ldb: c_int, beta: *const c_void,
        C: *mut c_void, Ctype: cudaDataType, ldc: c_int, computeType: cublasComputeType_t,
        _algo: cublasGemmAlgo_t,
    ) {
        product(
            handle, (transa, transb), [m, n, k], (Type::of_compute(computeType.0)?, alpha, beta),
            [(Atype.0, A, lda, 0), (Btype.0, B, ldb, 0), (Ctype.0, C, ldc, 0)], 1,
        )
    }

    fn cublasGemmStridedBatchedEx(
        handle: cublasHandle_t, transa: cublasOperation_t, transb: cublasOperation_t,
        m: c_int, n: c_int, k: c_int, alpha: *const c_void, A: *const c_void, Atype: cudaDataType,
        lda: c_int, strideA: c_longlong, B: *const c_void, Btype: cudaDataType, ldb: c_int,
        strideB: c_longlong, beta: *const c_void, C: *mut c_void, Ctype: cudaDataType, ldc: c_int,
        strideC: c_longlong, batchCount: c_int, computeType: cublasComputeType_t, _algo: cublasGemmAlgo_t,
    ) {
        product(
            handle, (transa, transb), [m, n, k], (Type::of_compute(computeType.0)?, alpha, beta),
            [(Atype.0, A, lda, strideA), (Btype.0, B, ldb, strideB), (Ctype.0, C, ldc, strideC)],
            batchCount,
        )
    }

    fn cublasSaxpy_v2(
        handle: cublasHandle_t, n: c_int, alpha: *const f32, x: *const f32, incx: c_int, y: *mut f32,
        incy: c_int,
    ) {
        let known = of(handle.cast())?;
        let alpha = Scalar::at(Type::Single, alpha.cast(), known.on_device)?;
        let (x, y) = (vector(x, n, incx)?, vector(y, n, incy)?);
        stream::submit(known.stream(), move || for index in 0..n.into() {
            let at = y.place(0, index, 0);
            y.of.store(at, alpha.value() * x.of.load(x.place(0, index, 0)) + y.of.load(at));
        })
    }

    fn cublasSscal_v2(handle: cublasHandle_t, n: c_int, alpha: *const f32, x: *mut f32, incx: c_int) {
        let known = of(handle.cast())?;
        let alpha = Scalar::at(Type::Single, alpha.cast(), known.on_device)?;
        let x = vector(x, n, incx)?;
        stream::submit(known.stream(), move || for index in 0..n.into() {
            let at = x.place(0, index, 0);
            x.of.store(at, alpha.value() * x.of.load(at));
        })
    }

    fn cublasSdot_v2(
        handle: cublasHandle_t, n: c_int, x: *const f32, incx: c_int, y: *const f32, incy: c_int,
        result: *mut f32,
    ) {
        let (x, y) = (vector(x, n, incx)?, vector(y, n, incy)?);
        let each = move |index| x.of.load(x.place(0, index, 0)) * y.of.load(y.place(0, index, 0));
        reduce(handle, result, move || (0..n.into()).map(each).sum())
    }

    fn cublasSnrm2_v2(handle: cublasHandle_t, n: c_int, x: *const f32, incx: c_int, result: *mut f32) {
        let x = vector(x, n, incx)?;
        let each = move |index| x.of.load(x.place(0, index, 0)).powi(2);
        reduce(handle, result, move || (0..n.into()).map(each).sum::<f64>().sqrt())
    }
}
