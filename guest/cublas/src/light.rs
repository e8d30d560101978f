//! cuBLASLt: handles, heuristics and products.

use std::{
    collections::HashMap,
    ffi::{c_int, c_void},
    sync::{Mutex, PoisonError},
};

use cuda_definition::cublaslt::types::*;
use remoting_proto::{
    apis::cuda::{
        Kind, NO_HANDLE,
        attributes::Descriptor,
        codes,
        libraries::{Heuristic, Library, Matmul, Scalar},
    },
    wire::{Blob, Wire, codec::with},
};

use crate::{
    call::{
        INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED, Outcome, ask, entry_points, number, post,
        put, with_arguments,
    },
    descriptors::of,
    handles::served,
    interface::interface,
    scalars::of_type,
};

/// The number of heuristics whose results are cached.
const KEPT: usize = 4096;
/// The maximum number of results to request for one.
const RESULTS: usize = 256;
/// The size of a result in bytes.
const RESULT: usize = size_of::<cublasLtMatmulHeuristicResult_t>();

fn handle(light: cublasLtHandle_t) -> Outcome<u32> {
    match number(Kind::BlasLt, light as u64) {
        0 | NO_HANDLE => Err(NOT_INITIALIZED),
        number => Ok(number),
    }
}

fn function(symbol: &str, known: &'static std::sync::OnceLock<Option<u16>>) -> Outcome<u16> {
    let number = *known.get_or_init(|| Library::BlasLt.number(symbol));
    number.ok_or(NOT_SUPPORTED)
}

fn sent(descriptor: &Descriptor<'_>) -> Blob {
    let mut bytes = Vec::with_capacity(128);
    descriptor.write(&mut bytes);
    Blob(bytes)
}

/// Whether alpha and beta are in host memory. Beta is not read in modes that define it as zero.
fn are_hosts(mode: u32) -> Outcome<(bool, bool)> {
    match mode {
        0 => Ok((true, true)),
        1..=3 => Ok((false, false)),
        4 => Ok((false, true)),
        _ => Err(INVALID_VALUE),
    }
}

/// Encodes a scalar.
///
/// # Safety
/// A scalar in host memory has this many bytes.
unsafe fn scalar(at: *const c_void, is_hosts: bool, bytes: usize) -> Outcome<Scalar> {
    let mut words = [0u64; 2];
    if !is_hosts {
        words[0] = at as u64;
        return Ok(Scalar {
            here: false,
            bytes: words,
        });
    }
    if at.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise; no type has more than 16 bytes.
    unsafe {
        words
            .as_mut_ptr()
            .cast::<u8>()
            .copy_from_nonoverlapping(at.cast(), bytes.min(16));
    }
    Ok(Scalar {
        here: true,
        bytes: words,
    })
}

/// An optional layout.
///
/// # Safety
/// It is null or a layout.
unsafe fn layout<'a>(at: cublasLtMatrixLayout_t) -> Outcome<Option<Descriptor<'a>>> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { of(at) }.map(Some)
}

/// The cached results of heuristics, by the hash of the request. Stores `found` if it is given.
fn kept(hash: u64, found: Option<&[u8]>) -> Option<Vec<u8>> {
    static ALL: Mutex<Option<HashMap<u64, Vec<u8>>>> = Mutex::new(None);
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    if let Some(found) = found {
        if all.len() >= KEPT {
            all.clear();
        }
        all.insert(hash, found.to_vec());
        return None;
    }
    all.get(&hash).cloned()
}

entry_points! { cublaslt:
    fn cublasLtCreate(lightHandle: *mut cublasLtHandle_t) {
        if lightHandle.is_null() {
            return Err(INVALID_VALUE);
        }
        match (interface()?.prepare)() {
            0 => {}
            code => return Err(code),
        }
        served!(BlasLt, "cublasLtCreate", &[lightHandle as u64])
    }

    fn cublasLtDestroy(lightHandle: cublasLtHandle_t) {
        let number = handle(lightHandle)?;
        if self::number(Kind::Blas, lightHandle as u64) == number {
            // A cuBLAS handle is accepted as well, but is destroyed by its own library.
            return Err(NOT_INITIALIZED);
        }
        (interface()?.forget)(lightHandle as u64);
        let function = Library::BlasLt.number("cublasLtDestroy").ok_or(NOT_SUPPORTED)?;
        post(Library::BlasLt, function, &number.to_le_bytes(), None)
    }

    fn cublasLtHeuristicsCacheGetCapacity(capacity: *mut usize) {
        put(capacity, KEPT)
    }

    fn cublasLtHeuristicsCacheSetCapacity(_capacity: usize) {
        Ok(())
    }

    fn cublasLtMatmulAlgoGetHeuristic(
        lightHandle: cublasLtHandle_t,
        operationDesc: cublasLtMatmulDesc_t,
        Adesc: cublasLtMatrixLayout_t,
        Bdesc: cublasLtMatrixLayout_t,
        Cdesc: cublasLtMatrixLayout_t,
        Ddesc: cublasLtMatrixLayout_t,
        preference: cublasLtMatmulPreference_t,
        requestedAlgoCount: c_int,
        heuristicResultsArray: *mut cublasLtMatmulHeuristicResult_t,
        returnAlgoCount: *mut c_int,
    ) {
        let handle = handle(lightHandle)?;
        let wanted = usize::try_from(requestedAlgoCount).unwrap_or(0).min(RESULTS);
        if wanted == 0 || heuristicResultsArray.is_null() || returnAlgoCount.is_null() {
            return Err(INVALID_VALUE);
        }
        let operation = of(operationDesc)?;
        let (a, b, c, d) = (of(Adesc)?, of(Bdesc)?, of(Cdesc)?, of(Ddesc)?);
        let preference = of(preference)?;
        let hash = [&operation, &a, &b, &c, &d, &preference]
            .into_iter()
            .fold(with(handle.into(), wanted as u64), |hash, one| one.likeness(hash));
        let found = match kept(hash, None) {
            Some(found) => found,
            None => {
                static FUNCTION: std::sync::OnceLock<Option<u16>> = std::sync::OnceLock::new();
                let function = function("cublasLtMatmulAlgoGetHeuristic", &FUNCTION)?;
                let call = Heuristic {
                    handle,
                    operation: sent(&operation),
                    a: sent(&a),
                    b: sent(&b),
                    c: sent(&c),
                    d: sent(&d),
                    preference: sent(&preference),
                    count: wanted as u32,
                };
                let mut answer = vec![0; wanted * RESULT];
                let written = with_arguments(|arguments| {
                    call.put(arguments);
                    ask(Library::BlasLt, function, arguments, &mut answer)
                })?;
                answer.truncate(written);
                kept(hash, Some(&answer));
                answer
            }
        };
        let count = found.len() / RESULT;
        if count > wanted {
            return Err(codes::UNKNOWN);
        }
        // The caller has room for as many results as it has requested. A result consists of plain
        // numbers.
        heuristicResultsArray
            .cast::<u8>()
            .copy_from_nonoverlapping(found.as_ptr(), count * RESULT);
        put(returnAlgoCount, count as c_int)
    }

    fn cublasLtMatmul(
        lightHandle: cublasLtHandle_t,
        computeDesc: cublasLtMatmulDesc_t,
        alpha: *const c_void,
        A: *const c_void,
        Adesc: cublasLtMatrixLayout_t,
        B: *const c_void,
        Bdesc: cublasLtMatrixLayout_t,
        beta: *const c_void,
        C: *const c_void,
        Cdesc: cublasLtMatrixLayout_t,
        D: *mut c_void,
        Ddesc: cublasLtMatrixLayout_t,
        algo: *const cublasLtMatmulAlgo_t,
        workspace: *mut c_void,
        workspaceSizeInBytes: usize,
        stream: cudaStream_t,
    ) {
        let handle = handle(lightHandle)?;
        let stream = match number(Kind::Stream, stream as u64) {
            NO_HANDLE => return Err(INVALID_VALUE),
            number => number,
        };
        let operation = of(computeDesc)?;
        let layouts = [layout(Adesc)?, layout(Bdesc)?, layout(Cdesc)?, layout(Ddesc)?];
        let hosts = are_hosts(operation.number(2).unwrap_or(0))?;
        let bytes = of_type(operation.number(1).ok_or(INVALID_VALUE)?);
        let matrices = [A as u64, B as u64, C as u64, D as u64];
        let algorithm: &[u64] = if algo.is_null() { &[] } else { &(*algo).data };
        let mut hash = operation.likeness(with(handle.into(), stream.into()));
        for layout in &layouts {
            hash = layout.as_ref().map_or(with(hash, 1), |layout| layout.likeness(hash));
        }
        for at in matrices {
            hash = with(hash, at % 256 + u64::from(at == 0) * 256);
        }
        for word in algorithm {
            hash = with(hash, *word);
        }
        hash = with(with(hash, workspaceSizeInBytes as u64), workspace as u64 % 256);
        let [a, b, c, d] = layouts.map(|layout| {
            layout.as_ref().map_or_else(Blob::default, sent)
        });
        let call = Matmul {
            handle,
            stream,
            operation: sent(&operation),
            a,
            b,
            c,
            d,
            alpha: scalar(alpha, hosts.0, bytes)?,
            beta: scalar(beta, hosts.1, bytes)?,
            matrices,
            algorithm: Blob(algorithm.iter().flat_map(|word| word.to_le_bytes()).collect()),
            workspace: (workspace as u64, workspaceSizeInBytes as u64),
        };
        static FUNCTION: std::sync::OnceLock<Option<u16>> = std::sync::OnceLock::new();
        let function = function("cublasLtMatmul", &FUNCTION)?;
        with_arguments(|arguments| {
            call.put(arguments);
            post(Library::BlasLt, function, arguments, Some(hash))
        })
    }
}
