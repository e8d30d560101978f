//! cuBLAS and cuBLASLt from a guest's libraries to the stand-in behind a worker, compared with the CPU.

use std::ptr::{null, null_mut};

use cuda_definition::{
    cublas::types as blas,
    cublaslt::types as light,
    driver::types::{CUresult, CUstreamCaptureMode, CUstreamCaptureStatus},
};

use crate::driver::{context, cuda, device, ok, stream, values};

/// Calls a function of cuBLAS by its symbol.
macro_rules! cublas {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the signature is the definition's; tests pass what it wants.
        #[allow(unused_unsafe)]
        unsafe {
            let function = $crate::library::blas().0
                .get::<cuda_definition::cublas::signatures::$name>(stringify!($name).as_bytes())
                .expect("it is exported");
            function($($argument),*).0
        }
    }};
}
pub(crate) use cublas;

/// The same of cuBLASLt.
macro_rules! cublaslt {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: as above.
        #[allow(unused_unsafe)]
        unsafe {
            let function = $crate::library::blas().1
                .get::<cuda_definition::cublaslt::signatures::$name>(stringify!($name).as_bytes())
                .expect("it is exported");
            function($($argument),*).0
        }
    }};
}
pub(crate) use cublaslt;

/// A handle of cuBLAS in the current context.
pub struct Handle(pub blas::cublasHandle_t);

pub fn handle() -> Handle {
    let mut handle = null_mut();
    assert_eq!(cublas!(cublasCreate_v2(&mut handle)), 0);
    Handle(handle)
}

impl Drop for Handle {
    fn drop(&mut self) {
        assert_eq!(cublas!(cublasDestroy_v2(self.0)), 0);
    }
}

pub const N: blas::cublasOperation_t = blas::cublasOperation_t::CUBLAS_OP_N;
const T: blas::cublasOperation_t = blas::cublasOperation_t::CUBLAS_OP_T;

/// Numbers that are the same in each run.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state % 2001) as f32 / 1000.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// op(A) op(B) by columns.
fn product(
    (m, n, k): (usize, usize, usize),
    (a, lda, ta): (&[f32], usize, bool),
    (b, ldb, tb): (&[f32], usize, bool),
) -> Vec<f32> {
    let at = |of: &[f32], leading: usize, turned: bool, row: usize, column: usize| {
        if turned {
            of[row * leading + column]
        } else {
            of[column * leading + row]
        }
    };
    let mut out = Vec::new();
    for column in 0..n {
        for row in 0..m {
            let each = (0..k).map(|i| at(a, lda, ta, row, i) * at(b, ldb, tb, i, column));
            out.push(each.sum());
        }
    }
    out
}

fn near(a: &[f32], b: &[f32], tolerance: f32) {
    assert_eq!(a.len(), b.len());
    for (place, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            (a - b).abs() <= tolerance * (1.0 + b.abs()),
            "{place}: {a} and not {b}"
        );
    }
}

#[test]
fn products_are_those_of_the_cpu_whichever_is_transposed() {
    let _context = context();
    let handle = handle();
    let (m, n, k) = (5, 4, 3);
    for (ta, tb) in [(N, N), (T, N), (N, T), (T, T)] {
        let (lda, ldb) = (if ta == N { 7 } else { 6 }, if tb == N { 8 } else { 9 });
        let (a, b, c) = (numbers(7 * 6, 1), numbers(8 * 9, 2), numbers(m * n, 3));
        let (on_a, on_b, on_c) = (device(&a), device(&b), device(&c));
        let (alpha, beta) = (1.5f32, -0.5f32);
        let status = cublas!(cublasSgemm_v2(
            handle.0,
            ta,
            tb,
            m as i32,
            n as i32,
            k as i32,
            &alpha,
            on_a as *const f32,
            lda,
            on_b as *const f32,
            ldb,
            &beta,
            on_c as *mut f32,
            m as i32,
        ));
        assert_eq!(status, 0);
        let raw = product(
            (m, n, k),
            (&a, lda as usize, ta == T),
            (&b, ldb as usize, tb == T),
        );
        let expected: Vec<f32> = raw
            .iter()
            .zip(&c)
            .map(|(p, c)| alpha * p + beta * c)
            .collect();
        near(&values::<f32>(on_c, m * n), &expected, 1e-5);
    }
}

#[test]
fn short_numbers_and_batches_are_multiplied() {
    let _context = context();
    let handle = handle();
    let short = |value: &f32| (value.to_bits() >> 16) as u16;
    let long = |value: u16| f32::from_bits(u32::from(value) << 16);
    let a: Vec<u16> = numbers(2 * 6, 1).iter().map(short).collect();
    let b: Vec<u16> = numbers(2 * 6, 2).iter().map(short).collect();
    let (on_a, on_b, on_c) = (device(&a), device(&b), device(&[0f32; 8]));
    let (alpha, beta) = (1f32, 0f32);
    let (of, to) = (
        blas::cudaDataType_t::CUDA_R_16BF,
        blas::cudaDataType_t::CUDA_R_32F,
    );
    let status = cublas!(cublasGemmStridedBatchedEx(
        handle.0,
        T,
        N,
        2,
        2,
        3,
        (&raw const alpha).cast(),
        on_a as *const _,
        of,
        3,
        6,
        on_b as *const _,
        of,
        3,
        6,
        (&raw const beta).cast(),
        on_c as *mut _,
        to,
        2,
        4,
        2,
        blas::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        blas::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
    ));
    assert_eq!(status, 0);
    let (a, b): (Vec<f32>, Vec<f32>) = (
        a.into_iter().map(long).collect(),
        b.into_iter().map(long).collect(),
    );
    let mut expected = Vec::new();
    for batch in 0..2 {
        let part = 6 * batch..6 * batch + 6;
        let (a, b) = (&a[part.clone()], &b[part]);
        expected.extend(product((2, 2, 3), (a, 3, true), (b, 3, false)));
    }
    near(&values::<f32>(on_c, 8), &expected, 1e-5);
    // Half precision all through: alpha has two bytes.
    let half = [0x3c00u16, 0x4000, 0x4200, 0x4400];
    let (on_a, on_c) = (device(&half), device(&[0u16; 4]));
    let (alpha, beta) = (0x4000u16, 0u16);
    let of = blas::cudaDataType_t::CUDA_R_16F;
    let status = cublas!(cublasGemmEx(
        handle.0,
        N,
        N,
        2,
        2,
        2,
        (&raw const alpha).cast(),
        on_a as *const _,
        of,
        2,
        on_a as *const _,
        of,
        2,
        (&raw const beta).cast(),
        on_c as *mut _,
        of,
        2,
        blas::cublasComputeType_t::CUBLAS_COMPUTE_16F,
        blas::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
    ));
    assert_eq!(status, 0);
    // Twice [1 3; 2 4] squared: 14 30; 20 44.
    assert_eq!(values::<u16>(on_c, 4), [0x4b00, 0x4d00, 0x4f80, 0x5180]);
}

#[test]
fn scalars_are_the_host_s_or_the_device_s_by_the_handle_s_mode() {
    let _context = context();
    let handle = handle();
    let (x, y) = (device(&[1f32, 2.0, 3.0]), device(&[10f32, 20.0, 30.0]));
    let (x, y) = (x as *const f32, y as *mut f32);
    let mut dot = 0f32;
    assert_eq!(cublas!(cublasSdot_v2(handle.0, 3, x, 1, y, 1, &mut dot)), 0);
    assert_eq!(dot, 140.0);
    let device_mode = blas::cublasPointerMode_t::CUBLAS_POINTER_MODE_DEVICE;
    assert_eq!(cublas!(cublasSetPointerMode_v2(handle.0, device_mode)), 0);
    let mut mode = blas::cublasPointerMode_t::CUBLAS_POINTER_MODE_HOST;
    assert_eq!(cublas!(cublasGetPointerMode_v2(handle.0, &mut mode)), 0);
    assert_eq!(mode, device_mode);
    let alpha = device(&[0.5f32]);
    assert_eq!(
        cublas!(cublasSaxpy_v2(handle.0, 3, alpha as *const f32, x, 1, y, 1)),
        0
    );
    let norm = device(&[0f32]);
    assert_eq!(
        cublas!(cublasSnrm2_v2(handle.0, 3, x, 1, norm as *mut f32)),
        0
    );
    assert_eq!(values::<f32>(y as u64, 3), [10.5, 21.0, 31.5]);
    near(&values::<f32>(norm, 1), &[14f32.sqrt()], 1e-6);
}

/// One matrix of a product: columns follow each other.
fn layout(rows: u64, columns: u64) -> light::cublasLtMatrixLayout_t {
    let mut made = null_mut();
    let of = light::cudaDataType_t::CUDA_R_32F;
    let leading = rows.cast_signed();
    assert_eq!(
        cublaslt!(cublasLtMatrixLayoutCreate(
            &mut made, of, rows, columns, leading
        )),
        0
    );
    made
}

fn set<V>(operation: light::cublasLtMatmulDesc_t, attribute: u32, value: &V) {
    let (attribute, at) = (
        light::cublasLtMatmulDescAttributes_t(attribute),
        std::ptr::from_ref(value),
    );
    let size = size_of::<V>();
    let status = cublaslt!(cublasLtMatmulDescSetAttribute(
        operation,
        attribute,
        at.cast(),
        size
    ));
    assert_eq!(status, 0);
}

/// D = epilogue(Aᵀ B + bias), as a linear layer is computed, with the algorithm that a heuristic gives.
fn layer(
    handle: light::cublasLtHandle_t,
    (outputs, batch, inputs): (u64, u64, u64),
    (weights, bias, input, output): (u64, u64, u64, u64),
    epilogue: u32,
) {
    let mut operation = null_mut();
    let (compute, scale) = (
        light::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        light::cudaDataType_t::CUDA_R_32F,
    );
    assert_eq!(
        cublaslt!(cublasLtMatmulDescCreate(&mut operation, compute, scale)),
        0
    );
    set(operation, 3, &1i32);
    set(operation, 7, &epilogue);
    set(operation, 8, &bias);
    let (a, b, d) = (
        layout(inputs, outputs),
        layout(inputs, batch),
        layout(outputs, batch),
    );
    let mut preference = null_mut();
    assert_eq!(
        cublaslt!(cublasLtMatmulPreferenceCreate(&mut preference)),
        0
    );
    let workspace = 1u64 << 20;
    let attribute =
        light::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
    let at = (&raw const workspace).cast();
    assert_eq!(
        cublaslt!(cublasLtMatmulPreferenceSetAttribute(
            preference, attribute, at, 8
        )),
        0
    );
    // SAFETY: plain numbers.
    let mut found: light::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
    let mut count = 0;
    let status = cublaslt!(cublasLtMatmulAlgoGetHeuristic(
        handle, operation, a, b, d, d, preference, 1, &mut found, &mut count,
    ));
    assert_eq!((status, count, found.state.0), (0, 1, 0));
    let (alpha, beta) = (1f32, 0f32);
    let status = cublaslt!(cublasLtMatmul(
        handle,
        operation,
        (&raw const alpha).cast(),
        weights as *const _,
        a,
        input as *const _,
        b,
        (&raw const beta).cast(),
        output as *const _,
        d,
        output as *mut _,
        d,
        &found.algo,
        null_mut(),
        0,
        null_mut(),
    ));
    assert_eq!(status, 0);
    assert_eq!(cublaslt!(cublasLtMatmulPreferenceDestroy(preference)), 0);
    for layout in [a, b, d] {
        assert_eq!(cublaslt!(cublasLtMatrixLayoutDestroy(layout)), 0);
    }
    assert_eq!(cublaslt!(cublasLtMatmulDescDestroy(operation)), 0);
}

/// Two layers of a perceptron, as they are by columns: inputs times outputs each.
struct Perceptron {
    first: Vec<f32>,
    second: Vec<f32>,
    bias: Vec<f32>,
    none: Vec<f32>,
}

const INPUTS: usize = 6;
const HIDDEN: usize = 8;
const OUTPUTS: usize = 3;
const BATCH: usize = 5;
const RATE: f32 = 0.02;

impl Perceptron {
    fn new() -> Self {
        Self {
            first: numbers(INPUTS * HIDDEN, 11),
            second: numbers(HIDDEN * OUTPUTS, 12),
            bias: numbers(HIDDEN, 13),
            none: vec![0.0; OUTPUTS],
        }
    }

    /// A step of gradient descent on the CPU: the loss before it.
    fn step(&mut self, input: &[f32], target: &[f32]) -> f32 {
        let mut hidden = product(
            (HIDDEN, BATCH, INPUTS),
            (&self.first, INPUTS, true),
            (input, INPUTS, false),
        );
        for (place, value) in hidden.iter_mut().enumerate() {
            *value = (*value + self.bias[place % HIDDEN]).max(0.0);
        }
        let output = product(
            (OUTPUTS, BATCH, HIDDEN),
            (&self.second, HIDDEN, true),
            (&hidden, HIDDEN, false),
        );
        let error: Vec<f32> = output.iter().zip(target).map(|(o, t)| o - t).collect();
        let slope = product(
            (HIDDEN, OUTPUTS, BATCH),
            (&hidden, HIDDEN, false),
            (&error, OUTPUTS, true),
        );
        for (weight, slope) in self.second.iter_mut().zip(slope) {
            *weight -= RATE * slope;
        }
        error.iter().map(|error| error * error).sum()
    }
}

/// Several steps of training through ring, worker and stand-in: the layers by cuBLASLt, the error and the
/// gradient by cuBLAS, all in one stream; every loss is that of the CPU.
#[test]
fn a_perceptron_is_trained_as_on_the_cpu() {
    let _context = context();
    let handle = handle();
    let (input, target) = (numbers(INPUTS * BATCH, 21), numbers(OUTPUTS * BATCH, 22));
    let mut here = Perceptron::new();
    let (first, second) = (device(&here.first), device(&here.second));
    let (bias, none) = (device(&here.bias), device(&here.none));
    let (on_input, on_target) = (device(&input), device(&target));
    let hidden = device(&[0f32; HIDDEN * BATCH]);
    let output = device(&[0f32; OUTPUTS * BATCH]);
    let workspace = device(&[0u8; 4096]);
    assert_eq!(
        cublas!(cublasSetWorkspace_v2(handle.0, workspace as *mut _, 4096)),
        0
    );
    // A handle of cuBLAS is one of cuBLASLt, as PyTorch uses it.
    let light = handle.0.cast();
    let (minus, one, rate) = (-1f32, 1f32, -RATE);
    let mut losses = Vec::new();
    for _ in 0..12 {
        // 6: bias, then the positive part; 4: bias alone.
        let shape = (HIDDEN as u64, BATCH as u64, INPUTS as u64);
        layer(light, shape, (first, bias, on_input, hidden), 6);
        let shape = (OUTPUTS as u64, BATCH as u64, HIDDEN as u64);
        layer(light, shape, (second, none, hidden, output), 4);
        // The output becomes the error.
        let size = (OUTPUTS * BATCH) as i32;
        let (error, target) = (output as *mut f32, on_target as *const f32);
        assert_eq!(
            cublas!(cublasSaxpy_v2(handle.0, size, &minus, target, 1, error, 1)),
            0
        );
        let mut loss = 0f32;
        assert_eq!(
            cublas!(cublasSdot_v2(handle.0, size, error, 1, error, 1, &mut loss)),
            0
        );
        let status = cublas!(cublasSgemm_v2(
            handle.0,
            N,
            T,
            HIDDEN as i32,
            OUTPUTS as i32,
            BATCH as i32,
            &rate,
            hidden as *const f32,
            HIDDEN as i32,
            error,
            OUTPUTS as i32,
            &one,
            second as *mut f32,
            HIDDEN as i32,
        ));
        assert_eq!(status, 0);
        losses.push(loss);
    }
    let expected: Vec<f32> = losses.iter().map(|_| here.step(&input, &target)).collect();
    near(&losses, &expected, 1e-4);
    assert!(losses[11] < losses[0] / 2.0, "{losses:?}");
    near(&values::<f32>(second, HIDDEN * OUTPUTS), &here.second, 1e-4);
}

/// A function of cuBLAS Xt, of which there is no definition.
macro_rules! xt {
    ($name:ident($($argument:expr => $of:ty),* $(,)?)) => {{
        // SAFETY: the types are those of the vendor's header; tests pass what it wants.
        unsafe {
            let function = $crate::library::blas().0
                .get::<unsafe extern "C" fn($($of),*) -> u32>(stringify!($name).as_bytes())
                .expect("it is exported");
            function($($argument),*)
        }
    }};
}

#[test]
fn products_of_the_host_s_matrices_go_through_the_device_block_by_block() {
    let _context = context();
    let mut handle: *mut std::ffi::c_void = null_mut();
    assert_eq!(
        xt!(cublasXtCreate(&raw mut handle => *mut *mut std::ffi::c_void)),
        0
    );
    let (first, wrong) = ([0i32], [7i32]);
    for (devices, status) in [(&first, 0), (&wrong, 7)] {
        let selected = xt!(cublasXtDeviceSelect(
            handle => *mut std::ffi::c_void, 1 => i32, devices.as_ptr() => *const i32
        ));
        assert_eq!(selected, status);
    }
    let (m, n, k) = (5usize, 4usize, 7usize);
    let (ldc, alpha) = (6usize, 1.5f32);
    for block in [2, 3, 2048] {
        let set = xt!(cublasXtSetBlockDim(handle => *mut std::ffi::c_void, block => i32));
        assert_eq!(set, 0);
        for (ta, tb) in [(N, N), (T, N), (N, T), (T, T)] {
            for beta in [0.0f32, -0.5] {
                let (lda, ldb) = (9usize, 8usize);
                let (a, b, c) = (numbers(9 * 7, 1), numbers(8 * 7, 2), numbers(ldc * n, 3));
                let mut got = c.clone();
                // One of the matrices is on the device.
                let on_device = device(&b);
                let from = if beta == 0.0 {
                    on_device as *const f32
                } else {
                    b.as_ptr()
                };
                let status = xt!(cublasXtSgemm(
                    handle => *mut std::ffi::c_void, ta.0 => u32, tb.0 => u32,
                    m => usize, n => usize, k => usize, &raw const alpha => *const f32,
                    a.as_ptr() => *const f32, lda => usize, from => *const f32, ldb => usize,
                    &raw const beta => *const f32, got.as_mut_ptr() => *mut f32, ldc => usize
                ));
                assert_eq!(status, 0);
                let products = product((m, n, k), (&a, lda, ta == T), (&b, ldb, tb == T));
                let mut wanted = c;
                for (place, one) in products.iter().enumerate() {
                    let at = place / m * ldc + place % m;
                    wanted[at] = alpha * one + beta * wanted[at];
                }
                near(&got, &wanted, 1e-5);
                ok!(cuMemFree_v2(on_device));
            }
        }
    }
    // What is not carried out says so, and is not missing.
    let refused = xt!(cublasXtSsyrk(handle => *mut std::ffi::c_void));
    assert_eq!(refused, 15);
    assert_eq!(xt!(cublasXtDestroy(handle => *mut std::ffi::c_void)), 0);
}

#[test]
fn products_are_captured_into_graphs() {
    let _context = context();
    let handle = handle();
    let stream = stream(1);
    assert_eq!(cublas!(cublasSetStream_v2(handle.0, stream.cast())), 0);
    let mut again = null_mut();
    assert_eq!(cublas!(cublasGetStream_v2(handle.0, &mut again)), 0);
    assert_eq!(again.cast(), stream);
    let (a, c) = (device(&[2f32]), device(&[1f32]));
    let (alpha, beta) = (3f32, 1f32);
    let multiply = || {
        let (a, c) = (a as *const f32, c as *mut f32);
        cublas!(cublasSgemm_v2(
            handle.0, N, N, 1, 1, 1, &alpha, a, 1, a, 1, &beta, c, 1
        ))
    };
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let is_captured = || {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        ok!(cuStreamIsCapturing(stream, &mut status));
        status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
    };
    assert!(!is_captured());
    ok!(cuStreamBeginCapture_v2(stream, mode));
    assert!(is_captured());
    assert_eq!((multiply(), multiply()), (0, 0));
    let (mut graph, mut executable) = (null_mut(), null_mut());
    ok!(cuStreamEndCapture(stream, &mut graph));
    assert!(!is_captured());
    assert_eq!(values::<f32>(c, 1), [1.0]);
    ok!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    for _ in 0..3 {
        ok!(cuGraphLaunch(executable, stream));
    }
    ok!(cuStreamSynchronize(stream));
    assert_eq!(values::<f32>(c, 1), [1.0 + 6.0 * 12.0]);
    ok!(cuGraphExecDestroy(executable));
    ok!(cuGraphDestroy(graph));
    // A stream that goes leaves its handles.
    ok!(cuStreamDestroy_v2(stream));
    assert_eq!(multiply(), 0);
    assert_eq!(values::<f32>(c, 1), [85.0]);
}

#[test]
fn vectors_and_matrices_are_copied_with_their_distances() {
    let _context = context();
    let on_device = device(&[0f32; 12]);
    let vector = [1f32, -1.0, 2.0, -1.0, 3.0];
    let status = cublas!(cublasSetVector(
        3,
        4,
        vector.as_ptr().cast(),
        2,
        on_device as *mut _,
        3
    ));
    assert_eq!(status, 0);
    assert_eq!(
        values::<f32>(on_device, 7),
        [1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 3.0]
    );
    let mut matrix = [0f32; 6];
    let (from, to) = (on_device as *const _, matrix.as_mut_ptr().cast());
    assert_eq!(cublas!(cublasGetMatrix(2, 3, 4, from, 3, to, 2)), 0);
    assert_eq!(matrix, [1.0, 0.0, 2.0, 0.0, 3.0, 0.0]);
    let status = cublas!(cublasGetVectorAsync(3, 4, from, 3, to, 1, null_mut()));
    assert_eq!(status, 0);
    ok!(cuCtxSynchronize());
    assert_eq!(matrix[..3], [1.0, 2.0, 3.0]);
    assert_eq!(
        cublas!(cublasSetMatrix(3, 1, 4, null(), 2, on_device as *mut _, 3)),
        7
    );
}

#[test]
fn versions_and_names_are_told() {
    let handle = { crate::driver::context() };
    let mut version = 0;
    assert_eq!(cublas!(cublasGetVersion_v2(null_mut(), &mut version)), 0);
    assert_eq!(version, 130_100);
    let property = blas::libraryPropertyType_t::MINOR_VERSION;
    assert_eq!(cublas!(cublasGetProperty(property, &mut version)), 0);
    assert_eq!(version, 1);
    drop(handle);
}

#[test]
fn what_nobody_waited_for_is_told_by_the_next_wait() {
    let _context = context();
    let handle = handle();
    let (a, c) = (device(&[2f32; 512]), device(&[0f32; 512]));
    let (alpha, beta) = (1f32, 0f32);
    let multiply = || {
        let (a, c) = (a as *const f32, c as *mut f32);
        cublas!(cublasSgemm_v2(
            handle.0, N, N, 2, 2, 2, &alpha, a, 2, a, 2, &beta, c, 2
        ))
    };
    assert_eq!(multiply(), 0);
    ok!(cuCtxSynchronize());
    ok!(cuMemFree_v2(a));
    // Its like has succeeded.
    assert_eq!(multiply(), 0);
    let told = cuda!(cuCtxSynchronize());
    assert_eq!(told, CUresult::CUDA_ERROR_LAUNCH_FAILED);
    // And once.
    ok!(cuCtxSynchronize());
}

#[test]
fn every_entry_point_is_exported_in_the_version_that_programs_ask_for_and_nothing_else() {
    use cuda_definition::{cublas, cublaslt};
    for (file, entries) in [
        ("libcublas.so.13", cublas::ENTRY_POINTS),
        ("libcublasLt.so.13", cublaslt::ENTRY_POINTS),
    ] {
        let output = std::process::Command::new("nm")
            .args(["-D", "--defined-only"])
            .arg(crate::library::shims().join(file))
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let mut found: Vec<&str> = text
            .lines()
            .filter_map(|line| line.split_whitespace().nth(2))
            .filter(|symbol| *symbol != file)
            .collect();
        found.sort_unstable();
        let mut expected: Vec<String> = entries
            .iter()
            .map(|entry| format!("{}@@{file}", entry.symbol))
            .collect();
        expected.sort_unstable();
        let missing: Vec<_> = expected
            .iter()
            .filter(|one| !found.contains(&one.as_str()))
            .collect();
        let of_xt: Vec<_> = found
            .iter()
            .filter(|one| one.starts_with("cublasXt"))
            .collect();
        // Of cuBLAS Xt there is no definition.
        assert_eq!(of_xt.len(), if file == "libcublas.so.13" { 51 } else { 0 });
        let more: Vec<_> = found
            .iter()
            .filter(|one| !expected.iter().any(|e| e == *one) && !of_xt.contains(one))
            .collect();
        assert!(
            missing.is_empty() && more.is_empty(),
            "{missing:?} {more:?}"
        );
    }
}
