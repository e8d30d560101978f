//! cuBLASLt: descriptors, one algorithm, and products with epilogues.

use std::{
    collections::HashMap,
    ffi::{c_int, c_void},
    ptr::null_mut,
};

use cuda_definition::{cublaslt::types::*, driver::types::CUstream};

use crate::{
    INVALID_VALUE, NOT_SUPPORTED, Outcome,
    api::{VERSION, end as end_handle, make, of},
    entry_points,
    numbers::{Matrix, Scalar, Type},
    product::{After, Product, is_transposed},
};

/// First word of the only algorithm.
const ALGORITHM: u64 = 0x6761_6e74_7279;

/// Attributes by number.
#[derive(Default)]
struct Descriptor(HashMap<u32, u64>);

impl Descriptor {
    fn number(&self, attribute: u32) -> u64 {
        self.0.get(&attribute).copied().unwrap_or(0)
    }
}

/// # Safety
/// It is null or a descriptor of this library.
unsafe fn known<'a, T>(at: *mut T) -> Outcome<&'a mut Descriptor> {
    // SAFETY: the caller's promise.
    unsafe { at.cast::<Descriptor>().as_mut() }.ok_or(INVALID_VALUE)
}

/// # Safety
/// There is room for a descriptor's address.
unsafe fn begin<T>(to: *mut *mut T, attributes: &[(u32, u64)]) -> Outcome {
    let made = Descriptor(attributes.iter().copied().collect());
    // SAFETY: the caller's promise.
    unsafe { to.write(Box::into_raw(Box::new(made)).cast()) };
    Ok(())
}

/// # Safety
/// As for [`known`].
unsafe fn end<T>(at: *mut T) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe {
        known(at)?;
        drop(Box::from_raw(at.cast::<Descriptor>()));
    }
    Ok(())
}

/// # Safety
/// As for [`known`]; `size` bytes can be read.
unsafe fn set<T>(at: *mut T, attribute: u32, value: *const c_void, size: usize) -> Outcome {
    if value.is_null() || size == 0 || size > 8 {
        return Err(INVALID_VALUE);
    }
    let mut word = 0u64;
    // SAFETY: the caller's promise.
    unsafe {
        (&raw mut word)
            .cast::<u8>()
            .copy_from_nonoverlapping(value.cast(), size);
        known(at)?.0.insert(attribute, word);
    }
    Ok(())
}

fn matrix(layout: &Descriptor, at: *const c_void) -> Outcome<Matrix> {
    // Only column order.
    if layout.number(1) != 0 {
        return Err(NOT_SUPPORTED);
    }
    Ok(Matrix {
        of: Type::of(layout.number(0) as u32)?,
        at: at as u64,
        leading: layout.number(4).cast_signed(),
        stride: layout.number(6).cast_signed(),
    })
}

fn after(operation: &Descriptor, result: Type) -> Outcome<After> {
    let epilogue = match operation.number(7) {
        0 => 1,
        epilogue => epilogue,
    };
    let bias = match epilogue & 4 {
        0 => None,
        _ => {
            let of = operation.0.get(&26).filter(|of| **of as u32 != u32::MAX);
            let of = of.map_or(Ok(result), |of| Type::of(*of as u32))?;
            Some((of, operation.number(8)))
        }
    };
    match epilogue {
        1 | 4 => Ok(After {
            bias,
            relu: false,
            gelu: false,
        }),
        2 | 6 => Ok(After {
            bias,
            relu: true,
            gelu: false,
        }),
        32 | 36 => Ok(After {
            bias,
            relu: false,
            gelu: true,
        }),
        _ => Err(NOT_SUPPORTED),
    }
}

/// The library's version.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    VERSION
}

entry_points! { cublaslt:
    fn cublasLtCreate(lightHandle: *mut cublasLtHandle_t) {
        lightHandle.write(make().cast());
        Ok(())
    }

    fn cublasLtDestroy(lightHandle: cublasLtHandle_t) { end_handle(lightHandle.cast()) }

    fn cublasLtMatmulDescCreate(
        matmulDesc: *mut cublasLtMatmulDesc_t, computeType: cublasComputeType_t, scaleType: cudaDataType_t,
    ) {
        begin(matmulDesc, &[(0, computeType.0.into()), (1, scaleType.0.into())])
    }

    fn cublasLtMatmulDescDestroy(matmulDesc: cublasLtMatmulDesc_t) { end(matmulDesc) }

    fn cublasLtMatmulDescSetAttribute(
        matmulDesc: cublasLtMatmulDesc_t, attr: cublasLtMatmulDescAttributes_t, buf: *const c_void,
        sizeInBytes: usize,
    ) {
        set(matmulDesc, attr.0, buf, sizeInBytes)
    }

    fn cublasLtMatrixLayoutCreate(
        matLayout: *mut cublasLtMatrixLayout_t, r#type: cudaDataType, rows: u64, cols: u64, ld: i64,
    ) {
        let leading = ld.cast_unsigned();
        begin(matLayout, &[(0, r#type.0.into()), (2, rows), (3, cols), (4, leading), (5, 1)])
    }

    fn cublasLtMatrixLayoutDestroy(matLayout: cublasLtMatrixLayout_t) { end(matLayout) }

    fn cublasLtMatrixLayoutSetAttribute(
        matLayout: cublasLtMatrixLayout_t, attr: cublasLtMatrixLayoutAttribute_t, buf: *const c_void,
        sizeInBytes: usize,
    ) {
        set(matLayout, attr.0, buf, sizeInBytes)
    }

    fn cublasLtMatmulPreferenceCreate(pref: *mut cublasLtMatmulPreference_t) { begin(pref, &[]) }

    fn cublasLtMatmulPreferenceDestroy(pref: cublasLtMatmulPreference_t) { end(pref) }

    fn cublasLtMatmulPreferenceSetAttribute(
        pref: cublasLtMatmulPreference_t, attr: cublasLtMatmulPreferenceAttributes_t, buf: *const c_void,
        sizeInBytes: usize,
    ) {
        set(pref, attr.0, buf, sizeInBytes)
    }

    fn cublasLtMatmulAlgoGetHeuristic(
        lightHandle: cublasLtHandle_t, operationDesc: cublasLtMatmulDesc_t, Adesc: cublasLtMatrixLayout_t,
        Bdesc: cublasLtMatrixLayout_t, Cdesc: cublasLtMatrixLayout_t, Ddesc: cublasLtMatrixLayout_t,
        preference: cublasLtMatmulPreference_t, requestedAlgoCount: c_int,
        heuristicResultsArray: *mut cublasLtMatmulHeuristicResult_t, returnAlgoCount: *mut c_int,
    ) {
        of(lightHandle.cast())?;
        let operation = known(operationDesc)?;
        for layout in [Adesc, Bdesc, Cdesc, Ddesc] {
            matrix(known(layout)?, null_mut())?;
        }
        known(preference)?;
        Type::of_compute(operation.number(0) as u32)?;
        after(operation, Type::Single)?;
        if requestedAlgoCount < 1 {
            return Err(INVALID_VALUE);
        }
        let mut algo = cublasLtMatmulAlgo_t { data: [0; 8] };
        algo.data[0] = ALGORITHM;
        heuristicResultsArray.write(cublasLtMatmulHeuristicResult_t {
            algo,
            workspaceSize: 0,
            state: cublasStatus_t::CUBLAS_STATUS_SUCCESS,
            wavesCount: 1.0,
            reserved: [0; 4],
        });
        returnAlgoCount.write(1);
        Ok(())
    }

    fn cublasLtMatmul(
        lightHandle: cublasLtHandle_t, computeDesc: cublasLtMatmulDesc_t, alpha: *const c_void,
        A: *const c_void, Adesc: cublasLtMatrixLayout_t, B: *const c_void, Bdesc: cublasLtMatrixLayout_t,
        beta: *const c_void, C: *const c_void, Cdesc: cublasLtMatrixLayout_t, D: *mut c_void,
        Ddesc: cublasLtMatrixLayout_t, algo: *const cublasLtMatmulAlgo_t, _workspace: *mut c_void,
        _workspaceSizeInBytes: usize, stream: cudaStream_t,
    ) {
        of(lightHandle.cast())?;
        if algo.as_ref().is_some_and(|algo| algo.data[0] != ALGORITHM) {
            return Err(INVALID_VALUE);
        }
        let operation = known(computeDesc)?;
        let (a, b, d) = (known(Adesc)?, known(Bdesc)?, known(Ddesc)?);
        let on_device = match operation.number(2) {
            0 => false,
            1 => true,
            _ => return Err(NOT_SUPPORTED),
        };
        let transposed = (
            is_transposed(operation.number(3) as u32)?,
            is_transposed(operation.number(4) as u32)?,
        );
        let size = |layout: &Descriptor, turned: bool| {
            let (rows, columns) = (layout.number(2).cast_signed(), layout.number(3).cast_signed());
            if turned { (columns, rows) } else { (rows, columns) }
        };
        let ((m, k), (inner, n)) = (size(a, transposed.0), size(b, transposed.1));
        if k != inner || size(d, false) != (m, n) {
            return Err(INVALID_VALUE);
        }
        let scale = Type::of(operation.number(1) as u32)?;
        let to = matrix(d, D)?;
        Product {
            transposed,
            shape: (m, n, k),
            alpha: Scalar::at(scale, alpha, on_device)?,
            beta: Scalar::at(scale, beta, on_device)?,
            a: matrix(a, A)?,
            b: matrix(b, B)?,
            c: matrix(known(Cdesc)?, C)?,
            d: to,
            batch: (d.number(5) as i32).into(),
            after: after(operation, to.of)?,
        }
        .submit(stream as CUstream)
    }
}
