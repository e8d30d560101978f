//! cuBLAS with what is no handle, with sizes and addresses that cannot be, and with bytes that no
//! library of ours would send.

use std::ptr::null_mut;

use cuda_definition::{cublas::types as blas, cublaslt::types as light, driver::types::CUresult};
use remoting_proto::{
    apis::cuda::{
        Kind,
        attributes::{Descriptor, LAYOUT, OPERATION, PREFERENCE},
        interface::{FINGERPRINT, Interface},
        libraries::{Heuristic, Library, Matmul, STATUS, Scalar},
        plan::{Parameter, Plan, Scalars},
    },
    wire::{Blob, Wire},
};

use crate::{
    driver::{context, device, ok, values},
    linear::{N, cublas, cublaslt, handle},
};

fn interface() -> &'static Interface {
    // SAFETY: the symbol is the library's own; its table stays.
    unsafe {
        let find = crate::library::library()
            .get::<extern "C" fn(u64) -> *const Interface>(b"gantry_cuda_interface")
            .unwrap();
        assert!(find(FINGERPRINT ^ 1).is_null());
        &*find(FINGERPRINT)
    }
}

/// Sends a call as it is, and waits: its result.
fn send(library: u32, function: u16, arguments: &[u8], answered: bool) -> i32 {
    let interface = interface();
    let (at, length, function) = (arguments.as_ptr(), arguments.len(), u32::from(function));
    let (mut answer, mut written) = ([0; 4096], 0);
    // SAFETY: so many bytes are there, and so much room.
    unsafe {
        if answered {
            let (to, room) = (answer.as_mut_ptr(), answer.len());
            (interface.call)(library, function, at, length, to, room, &raw mut written)
        } else {
            (interface.post)(library, function, at, length, true)
        }
    }
}

#[test]
fn forged_handles_are_none() {
    let _context = context();
    let handle = handle();
    for forged in [0u64, 3, 0x4710_0000_ffff, handle.0 as u64 + 1, u64::MAX] {
        let forged = forged as blas::cublasHandle_t;
        let mut mode = blas::cublasMath_t::CUBLAS_DEFAULT_MATH;
        assert_eq!(cublas!(cublasGetMathMode(forged, &mut mode)), 1);
        assert_eq!(cublas!(cublasDestroy_v2(forged)), 1);
        let mut version = 0;
        assert_eq!(cublas!(cublasGetVersion_v2(handle.0, &mut version)), 0);
        let alpha = 1f32;
        assert_eq!(cublas!(cublasSscal_v2(forged, 1, &alpha, null_mut(), 1)), 1);
    }
    let forged = 0x4711_0000_1234u64 as light::cublasLtHandle_t;
    assert_eq!(cublaslt!(cublasLtDestroy(forged)), 1);
    let mut light = null_mut();
    assert_eq!(cublaslt!(cublasLtCreate(&mut light)), 0);
    assert_eq!(cublaslt!(cublasLtDestroy(light)), 0);
    assert_eq!(cublaslt!(cublasLtDestroy(light)), 1);
    assert_eq!(cublaslt!(cublasLtDestroy(handle.0.cast())), 1);
    // A stream is no handle, and a handle no stream.
    let stream = handle.0.cast();
    assert_eq!(cublas!(cublasSetStream_v2(handle.0, stream)), 7);
}

#[test]
fn a_handle_is_none_any_more_when_it_is_destroyed() {
    let _context = context();
    let made = handle();
    let raw = made.0;
    drop(made);
    assert_eq!(cublas!(cublasDestroy_v2(raw)), 1);
    let again = handle();
    let mut mode = blas::cublasPointerMode_t::CUBLAS_POINTER_MODE_HOST;
    assert_eq!(cublas!(cublasGetPointerMode_v2(again.0, &mut mode)), 0);
}

#[test]
fn wild_sizes_and_addresses_are_refused() {
    let _context = context();
    let handle = handle();
    let (a, c) = (device(&[1f32; 16]), device(&[0f32; 16]));
    let (alpha, beta) = (1f32, 0f32);
    let multiply = |size: i32, leading: i32, a: u64, c: u64| {
        let (a, c) = (a as *const f32, c as *mut f32);
        cublas!(cublasSgemm_v2(
            handle.0, N, N, size, size, size, &alpha, a, leading, a, leading, &beta, c, leading,
        ))
    };
    assert_eq!(multiply(4, 4, a, c), 0);
    for (size, leading) in [(-1, 4), (i32::MIN, 1), (4, 3), (4, i32::MIN)] {
        assert_eq!(multiply(size, leading, a, c), 7, "{size} {leading}");
    }
    for (size, leading) in [(i32::MAX, i32::MAX), (5, 5), (4, i32::MAX)] {
        assert_ne!(multiply(size, leading, a, c), 0, "{size} {leading}");
    }
    let local = alpha;
    for wild in [
        0,
        1,
        0x2000_0000_0000,
        (&raw const local) as u64,
        u64::MAX - 3,
    ] {
        // Of a size that has not succeeded: those that have are not waited for.
        assert_eq!(multiply(3, 4, wild.wrapping_add(4096), c), 13, "{wild:x}");
    }
    // The worker is still there, and does what it is told.
    assert_eq!(multiply(4, 4, a, c), 0);
    assert_eq!(values::<f32>(c, 1), [4.0]);
}

#[test]
fn what_is_not_served_says_so() {
    let _context = context();
    let handle = handle();
    let status = cublas!(cublasSetSmCountTarget(handle.0, 4));
    assert_eq!(status, 15);
    assert_eq!(
        cublas!(cublasLoggerConfigure(1, 1, 0, std::ptr::null())),
        15
    );
    // The stand-in has not this one.
    let status = cublas!(cublasStrsm_v2(
        handle.0,
        blas::cublasSideMode_t::CUBLAS_SIDE_LEFT,
        blas::cublasFillMode_t::CUBLAS_FILL_MODE_LOWER,
        N,
        blas::cublasDiagType_t::CUBLAS_DIAG_UNIT,
        1,
        1,
        &1f32,
        null_mut(),
        1,
        null_mut(),
        1,
    ));
    assert_eq!(status, 15);
}

/// Bytes of a descriptor with these attributes.
fn attributes(table: remoting_proto::apis::cuda::attributes::Table, set: &[(u32, &[u8])]) -> Blob {
    let mut memory = [0; 256];
    let mut descriptor = Descriptor::empty(table, &mut memory);
    for (number, value) in set {
        assert!(descriptor.set(*number, value));
    }
    let mut bytes = Vec::new();
    descriptor.write(&mut bytes);
    Blob(bytes)
}

fn matmul(handle: u32, memory: u64) -> Matmul {
    let word = |value: u32| value.to_le_bytes();
    let layout = attributes(
        LAYOUT,
        &[
            (0, &word(0)),
            (2, &2u64.to_le_bytes()),
            (3, &2u64.to_le_bytes()),
            (4, &2u64.to_le_bytes()),
        ],
    );
    let one = Scalar {
        here: true,
        bytes: [1f32.to_bits().into(), 0],
    };
    Matmul {
        handle,
        stream: 0,
        operation: attributes(OPERATION, &[(0, &word(68)), (1, &word(0))]),
        a: layout.clone(),
        b: layout.clone(),
        c: layout.clone(),
        d: layout,
        alpha: one.clone(),
        beta: one,
        matrices: [memory; 4],
        algorithm: Blob::default(),
        workspace: (0, 0),
    }
}

#[test]
fn addresses_algorithms_and_attributes_of_a_client_s_own_make_are_refused() {
    let _context = context();
    let handle = handle();
    let memory = device(&[1f32; 16]);
    let number = (interface().number)(Kind::Blas as u32, handle.0 as u64);
    let function = Library::BlasLt.number("cublasLtMatmul").unwrap();
    let send = |call: &Matmul| {
        let mut bytes = Vec::new();
        call.put(&mut bytes);
        send(1, function, &bytes, false)
    };
    let good = matmul(number, memory);
    assert_eq!(send(&good), 0);
    let refused = |change: &dyn Fn(&mut Matmul)| {
        let mut call = good.clone();
        change(&mut call);
        assert_ne!(send(&call), 0, "{call:?}");
    };
    // An address where the library reads the host's memory.
    refused(&|call| call.alpha.here = false);
    refused(&|call| call.beta.here = false);
    // Algorithms that nobody has given.
    refused(&|call| call.algorithm = Blob(vec![7; 64]));
    refused(&|call| call.algorithm = Blob(vec![7; 63]));
    refused(&|call| call.algorithm = Blob(vec![0; 1 << 16]));
    refused(&|call| call.operation = Blob(vec![0xff; 16]));
    refused(&|call| call.operation = Blob::default());
    refused(&|call| call.a = Blob(vec![0; 8]));
    refused(&|call| call.b = Blob::default());
    refused(&|call| call.d.0.truncate(20));
    refused(&|call| call.handle += 1);
    refused(&|call| call.handle = 0);
    refused(&|call| call.stream = number);
    refused(&|call| call.matrices[3] = 0x2000_0000_0000);
    assert_eq!(send(&good), 0);
    // Heuristics.
    let word = |value: u32| value.to_le_bytes();
    let ask = |count: u32, preference: Blob| {
        let mut bytes = Vec::new();
        let Matmul {
            operation,
            a,
            b,
            c,
            d,
            ..
        } = good.clone();
        let handle = number;
        Heuristic {
            handle,
            operation,
            a,
            b,
            c,
            d,
            preference,
            count,
        }
        .put(&mut bytes);
        let function = Library::BlasLt
            .number("cublasLtMatmulAlgoGetHeuristic")
            .unwrap();
        self::send(1, function, &bytes, true)
    };
    assert_eq!(ask(1, attributes(PREFERENCE, &[(0, &word(0))])), 0);
    assert_eq!(ask(u32::MAX, attributes(PREFERENCE, &[])), 0);
    assert_ne!(ask(0, attributes(PREFERENCE, &[])), 0);
    assert_ne!(ask(1, Blob(vec![1])), 0);
    ok!(cuCtxSynchronize());
}

#[test]
fn an_address_is_no_scalar_of_a_handle_that_takes_the_host_s() {
    let _context = context();
    let handle = handle();
    let x = device(&[1f32; 4]);
    let number = (interface().number)(Kind::Blas as u32, handle.0 as u64);
    let scale = Library::Blas.number("cublasSscal_v2").unwrap();
    let call = |here: bool, scalar: &[u8]| {
        let mut bytes = Vec::new();
        number.put(&mut bytes);
        4u64.put(&mut bytes);
        here.put(&mut bytes);
        if here {
            bytes.push(scalar.len() as u8);
        }
        bytes.extend_from_slice(scalar);
        (x, 1u64).put(&mut bytes);
        send(0, scale, &bytes, false)
    };
    assert_ne!(
        call(
            false,
            &(interface() as *const Interface as u64).to_le_bytes()
        ),
        0
    );
    assert_ne!(call(true, &[0; 41]), 0);
    // Too short is zeros, and no memory of anybody's.
    assert_eq!(call(true, &[]), 0);
    assert_eq!(values::<f32>(x, 4), [0.0; 4]);
}

#[test]
fn bytes_that_are_no_call_cost_nobody_else_anything() {
    let _context = context();
    let handle = handle();
    let mut state = 88_172_645_463_325_252u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    // Destroying or redirecting the handle is what a client may do; these are of others.
    for _ in 0..2000 {
        let length = (random() % 96) as usize;
        let bytes: Vec<u8> = (0..length).map(|_| random() as u8).collect();
        let (library, function) = ((random() % 3) as u32, (random() % 520) as u16);
        let result = send(library, function, &bytes, random() % 2 == 0);
        let version =
            library == 1 && Library::BlasLt.number("cublasLtGetVersion") == Some(function);
        let creates = length == 5 || version;
        assert!(result != 0 || creates, "{library} {function} {bytes:?}");
    }
    let x = device(&[1f32, 2.0]);
    assert_eq!(
        cublas!(cublasSscal_v2(handle.0, 2, &3f32, x as *mut f32, 1)),
        0
    );
    assert_eq!(values::<f32>(x, 2), [3.0, 6.0]);
}

/// Numbers that are the same in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[(self.next() % all.len() as u64) as usize]
    }

    /// The parameters of a call that a worker can decode, with a handle that there is, and with sizes,
    /// places, scalars and arrays that cannot be.
    fn call(&mut self, plan: &Plan, handle: u32, memory: u64) -> Vec<u8> {
        let sizes = [0, 1, 2, 4, 16, 1 << 31, u64::MAX, 1 << 62, 0x7fff_ffff];
        let places = [
            memory,
            memory + 1,
            0,
            0x2000_0000_0000,
            u64::MAX - 7,
            self as *const Self as u64,
        ];
        let mut bytes = Vec::new();
        for parameter in &plan.parameters {
            match *parameter {
                Parameter::Value => self.of(&sizes).put(&mut bytes),
                Parameter::Address => self.of(&places).put(&mut bytes),
                Parameter::Handle(Kind::Blas | Kind::BlasLt) => handle.put(&mut bytes),
                Parameter::Handle(_) => self.of(&[0, 1, handle, 7777]).put(&mut bytes),
                Parameter::Scalar { .. } => {
                    let here = !self.next().is_multiple_of(4);
                    here.put(&mut bytes);
                    if here {
                        let length = self.of(&[0u8, 1, 4, 8, 16, 40]);
                        bytes.push(length);
                        bytes.extend((0..length).map(|_| self.next() as u8));
                    } else {
                        self.of(&places).put(&mut bytes);
                    }
                }
                Parameter::Array { element, input, .. } => {
                    true.put(&mut bytes);
                    let elements = self.of(&[0u32, 1, 3]);
                    elements.put(&mut bytes);
                    let size = if element.handle.is_some() {
                        4
                    } else {
                        element.size
                    };
                    let size = if input { elements as usize * size } else { 0 };
                    bytes.extend((0..size).map(|_| self.next() as u8));
                }
                Parameter::Device | Parameter::Text | Parameter::Null => 0u64.put(&mut bytes),
            }
        }
        bytes
    }
}

#[test]
fn calls_with_a_handle_that_there_is_cost_nobody_else_anything_either() {
    let _context = context();
    let (handle, others) = (handle(), handle());
    let (memory, theirs) = (device(&[1f32; 16]), device(&[1f32, 2.0]));
    let number = (interface().number)(Kind::Blas as u32, handle.0 as u64);
    let ends = Library::Blas.number("cublasDestroy_v2");
    let mut random = Random(2_463_534_242);
    let (mut sent, mut beyond) = (0, 0);
    for function in 0..Library::Blas.functions().count() as u16 {
        let Some(plan) = Plan::of_library(Library::Blas, function) else {
            continue;
        };
        let has_handle = matches!(plan.parameters.first(), Some(Parameter::Handle(Kind::Blas)));
        if Some(function) == ends || !has_handle {
            continue;
        }
        for _ in 0..6 {
            let bytes = random.call(plan, number, memory);
            let answered = plan.writes(Scalars::Host(8));
            let result = send(0, function, &bytes, answered);
            sent += 1;
            // What is told of a handle that is none.
            beyond += i32::from(result != STATUS + 1);
        }
    }
    assert_eq!(beyond, sent, "calls that got beyond the handle");
    // The pointers' mode may be another now.
    drop(handle);
    assert_eq!(
        cublas!(cublasSscal_v2(others.0, 2, &3f32, theirs as *mut f32, 1)),
        0
    );
    assert_eq!(values::<f32>(theirs, 2), [3.0, 6.0]);
}
