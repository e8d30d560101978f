//! cuBLAS Xt: products of matrices that are in host memory, or do not fit into the device's. Blocks of them are copied
//! to the device, multiplied and copied back, through the entry points that all programs use, on the device of the
//! thread's context. Matrices on the device are used in place.
//!
//! The number of devices affects how long the vendor's library takes, but not the result. Executing a part of the work
//! on the host's processors (`cublasXtSetCpuRoutine`, `cublasXtSetCpuRatio`) is refused. A block has at most 8192 rows,
//! whatever the program sets.

use std::{
    ffi::{c_int, c_void},
    ptr::null_mut,
};

use cuda_definition::{
    cublas::types::*,
    driver::{
        signatures,
        types::{CUpointer_attribute, CUresult},
    },
};
use remoting_proto::apis::cuda::codes;

use crate::{
    call::{INVALID_VALUE, NOT_INITIALIZED, Outcome, put, run, unsupported},
    copies::{cublasGetMatrix_64, cublasSetMatrix_64},
    generated::cublas::{cublasCgemm_v2, cublasDgemm_v2, cublasSgemm_v2, cublasZgemm_v2},
    handles::{cublasCreate_v2, cublasDestroy_v2},
    interface::symbol,
};

/// The rows and columns of a block, unless the program sets another number.
const USUAL: c_int = 2048;
/// The maximum: three blocks are on the device, with at most 16 bytes per element.
const MOST: c_int = 8192;

/// The object behind a program's handle.
pub struct Xt {
    blas: cublasHandle_t,
    block: c_int,
    pins: c_int,
}

/// A handle, which only its owner changes.
type Handle = *mut Xt;

/// Calls one of the driver's functions.
macro_rules! driver {
    ($name:ident($($argument:expr),*)) => {{
        let function = symbol(
            const {
                match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a name has no zero"),
                }
            },
        );
        // SAFETY: the driver's functions, if they exist, have the signatures of the API's definition.
        let function = unsafe {
            std::mem::transmute::<*mut c_void, Option<signatures::$name>>(function)
        };
        match function {
            // SAFETY: pointers are to locals.
            Some(function) => match unsafe { function($($argument),*) } {
                CUresult::CUDA_SUCCESS => Ok(()),
                error => Err(error.0.cast_signed()),
            },
            None => Err(codes::NOT_INITIALIZED),
        }
    }};
}

fn checked(status: cublasStatus_t) -> Outcome {
    match status.0 {
        0 => Ok(()),
        code => Err(remoting_proto::apis::cuda::libraries::STATUS + code.cast_signed()),
    }
}

/// Device memory for a block.
struct Room(u64);

impl Room {
    fn new(bytes: usize) -> Outcome<Self> {
        let mut at = 0;
        driver!(cuMemAlloc_v2(&raw mut at, bytes.max(1)))?;
        Ok(Self(at))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let _: Outcome = driver!(cuMemFree_v2(self.0));
    }
}

/// A matrix in column-major order, and the place of its blocks on the device.
struct Matrix {
    at: u64,
    /// The distance between two columns, in elements.
    leading: usize,
    /// The size of an element in bytes.
    size: usize,
    /// None if the matrix itself is on the device.
    room: Option<Room>,
}

impl Matrix {
    fn new(at: u64, leading: usize, size: usize, block: usize, is_used: bool) -> Outcome<Self> {
        let mut kind = 0u32;
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        // Memory that the driver does not know belongs to the program.
        let known: Outcome = driver!(cuPointerGetAttribute((&raw mut kind).cast(), attribute, at));
        let is_device = known.is_ok() && kind == 2;
        let bytes = block * block * size;
        let room = match is_device || !is_used {
            true => None,
            false => Some(Room::new(bytes)?),
        };
        Ok(Self {
            at,
            leading,
            size,
            room,
        })
    }

    fn element(&self, row: usize, column: usize) -> u64 {
        self.at + ((row + column * self.leading) * self.size) as u64
    }

    /// The address of a block on the device, and its leading dimension. With `filled`, the block contains the matrix's
    /// elements.
    ///
    /// # Safety
    /// The matrix contains the block.
    unsafe fn on_device(
        &self,
        (row, column): (usize, usize),
        (rows, columns): (usize, usize),
        filled: bool,
    ) -> Outcome<(u64, c_int)> {
        let at = self.element(row, column);
        let Some(room) = &self.room else {
            let leading = c_int::try_from(self.leading).map_err(|_| INVALID_VALUE)?;
            return Ok((at, leading));
        };
        if filled {
            // SAFETY: the caller's promise; the room has this many elements.
            checked(unsafe {
                cublasSetMatrix_64(
                    rows as i64,
                    columns as i64,
                    self.size as i64,
                    at as *const c_void,
                    self.leading as i64,
                    room.0 as *mut c_void,
                    rows.max(1) as i64,
                )
            })?;
        }
        Ok((room.0, rows.max(1) as c_int))
    }

    /// Copies a block back from the device.
    ///
    /// # Safety
    /// The matrix contains the block.
    unsafe fn back(&self, at: (usize, usize), (rows, columns): (usize, usize)) -> Outcome {
        let Some(room) = &self.room else {
            return Ok(());
        };
        // SAFETY: the caller's promise.
        checked(unsafe {
            cublasGetMatrix_64(
                rows as i64,
                columns as i64,
                self.size as i64,
                room.0 as *const c_void,
                rows.max(1) as i64,
                self.element(at.0, at.1) as *mut c_void,
                self.leading as i64,
            )
        })
    }
}

/// The starts and lengths of the parts of a length. Returns at least one part.
fn parts(length: usize, part: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..length.max(1))
        .step_by(part)
        .map(move |at| (at, part.min(length - at)))
}

/// A product: C = alpha op(A) op(B) + beta C.
struct Product {
    /// Whether A and B are transposed (conjugated or not).
    turned: [bool; 2],
    /// m, n, k.
    size: [usize; 3],
    /// The size of an element in bytes.
    element: usize,
    /// The addresses and leading dimensions of A, B and C.
    at: [(u64, usize); 3],
    /// Whether beta is zero, so that C is not read.
    is_new: bool,
    /// The rows and columns of a block.
    block: c_int,
}

/// A product of blocks: its size, the addresses of A, B and C on the device with their leading dimensions, and whether
/// C already contains a partial sum.
type Block = ([c_int; 3], [(u64, c_int); 3], bool);

impl Product {
    /// Computes the product block by block.
    ///
    /// # Safety
    /// The matrices exist.
    unsafe fn run(&self, multiply: impl Fn(Block) -> cublasStatus_t) -> Outcome {
        let [m, n, k] = self.size;
        let rows = [
            if self.turned[0] { k } else { m },
            if self.turned[1] { n } else { k },
            m,
        ];
        let fits = |(_, leading): &(u64, usize), rows: usize| *leading >= rows.max(1);
        if !self.at.iter().zip(rows).all(|(one, rows)| fits(one, rows)) {
            return Err(INVALID_VALUE);
        }
        if m == 0 || n == 0 {
            return Ok(());
        }
        let block = (self.block as usize).min(m.max(n).max(k));
        let of = |index: usize| {
            let (at, leading) = self.at[index];
            Matrix::new(at, leading, self.element, block, index == 2 || k > 0)
        };
        let (a, b, c) = (of(0)?, of(1)?, of(2)?);
        for (column, columns) in parts(n, block) {
            for (row, rows) in parts(m, block) {
                let (place, size) = ((row, column), (rows, columns));
                // SAFETY: the caller's promise.
                let to = unsafe { c.on_device(place, size, !self.is_new)? };
                for (inner, depth) in parts(k, block) {
                    let turn =
                        |turned: bool, (x, y): (usize, usize)| if turned { (y, x) } else { (x, y) };
                    let (ta, tb) = (self.turned[0], self.turned[1]);
                    let filled = depth > 0;
                    // SAFETY: as above.
                    let from = unsafe {
                        [
                            a.on_device(turn(ta, (row, inner)), turn(ta, (rows, depth)), filled)?,
                            b.on_device(
                                turn(tb, (inner, column)),
                                turn(tb, (depth, columns)),
                                filled,
                            )?,
                        ]
                    };
                    let size = [rows, columns, depth].map(|one| one as c_int);
                    checked(multiply((size, [from[0], from[1], to], inner > 0)))?;
                }
                // SAFETY: as above.
                unsafe { c.back(place, size)? };
            }
        }
        Ok(())
    }
}

macro_rules! entry_points {
    ($(fn $name:ident($($argument:ident: $of:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe, clippy::missing_safety_doc)]
        pub unsafe extern "C" fn $name($($argument: $of),*) -> cublasStatus_t {
            // SAFETY: callers keep the API's promises about the pointers that they pass, as callers of any C library
            // do.
            run(|| -> Outcome { unsafe { $body } })
        }
    )*};
}

macro_rules! products {
    ($($name:ident $multiply:ident $element:ty, $one:expr, $is_zero:expr;)*) => {
        entry_points! {$(
            fn $name(
                handle: Handle,
                transa: cublasOperation_t,
                transb: cublasOperation_t,
                m: usize,
                n: usize,
                k: usize,
                alpha: *const $element,
                A: *const $element,
                lda: usize,
                B: *const $element,
                ldb: usize,
                beta: *const $element,
                C: *mut $element,
                ldc: usize,
            ) {
                let &Xt { blas, block, .. } = handle.as_ref().ok_or(NOT_INITIALIZED)?;
                let (alpha, beta) = (alpha.as_ref().ok_or(INVALID_VALUE)?, beta.as_ref().ok_or(INVALID_VALUE)?);
                if transa.0 > 2 || transb.0 > 2 {
                    return Err(INVALID_VALUE);
                }
                let product = Product {
                    turned: [transa.0 != 0, transb.0 != 0],
                    size: [m, n, k],
                    element: size_of::<$element>(),
                    at: [(A as u64, lda), (B as u64, ldb), (C as u64, ldc)],
                    is_new: $is_zero(beta),
                    block,
                };
                let one = $one;
                product.run(|([m, n, k], [a, b, c], is_begun)| {
                    let beta = if is_begun { &one } else { beta };
                    $multiply(
                        blas, transa, transb, m, n, k, alpha, a.0 as *const _, a.1, b.0 as *const _, b.1,
                        beta, c.0 as *mut _, c.1,
                    )
                })
            }
        )*}
    };
}

products! {
    cublasXtSgemm cublasSgemm_v2 f32, 1.0, |beta: &f32| *beta == 0.0;
    cublasXtDgemm cublasDgemm_v2 f64, 1.0, |beta: &f64| *beta == 0.0;
    cublasXtCgemm cublasCgemm_v2 cuComplex, cuComplex { x: 1.0, y: 0.0 }, |beta: &cuComplex| beta.x == 0.0 && beta.y == 0.0;
    cublasXtZgemm cublasZgemm_v2 cuDoubleComplex, cuDoubleComplex { x: 1.0, y: 0.0 }, |beta: &cuDoubleComplex| beta.x == 0.0 && beta.y == 0.0;
}

entry_points! {
    fn cublasXtCreate(handle: *mut Handle) {
        let mut blas = null_mut();
        checked(cublasCreate_v2(&raw mut blas))?;
        let made = Box::into_raw(Box::new(Xt { blas, block: USUAL, pins: 0 }));
        put(handle, made).inspect_err(|_| {
            drop(Box::from_raw(made));
            cublasDestroy_v2(blas);
        })
    }

    fn cublasXtDestroy(handle: Handle) {
        if handle.is_null() {
            return Err(NOT_INITIALIZED);
        }
        checked(cublasDestroy_v2(Box::from_raw(handle).blas))
    }

    fn cublasXtDeviceSelect(handle: Handle, nbDevices: c_int, deviceId: *const c_int) {
        handle.as_ref().ok_or(NOT_INITIALIZED)?;
        let mut count = 0;
        driver!(cuDeviceGetCount(&raw mut count))?;
        let wanted = usize::try_from(nbDevices).map_err(|_| INVALID_VALUE)?;
        if wanted == 0 || deviceId.is_null() {
            return Err(INVALID_VALUE);
        }
        match (0..wanted).all(|index| (0..count).contains(&deviceId.add(index).read())) {
            true => Ok(()),
            false => Err(INVALID_VALUE),
        }
    }

    fn cublasXtMaxBoards(nbGpuBoards: *mut c_int) {
        let mut count = 0;
        driver!(cuDeviceGetCount(&raw mut count))?;
        put(nbGpuBoards, count)
    }

    fn cublasXtGetNumBoards(nbDevices: c_int, _deviceId: *const c_int, nbBoards: *mut c_int) {
        put(nbBoards, nbDevices)
    }

    fn cublasXtSetBlockDim(handle: Handle, blockDim: c_int) {
        let handle = handle.as_mut().ok_or(NOT_INITIALIZED)?;
        if blockDim <= 0 {
            return Err(INVALID_VALUE);
        }
        handle.block = blockDim.min(MOST);
        Ok(())
    }

    fn cublasXtGetBlockDim(handle: Handle, blockDim: *mut c_int) {
        put(blockDim, handle.as_ref().ok_or(NOT_INITIALIZED)?.block)
    }

    fn cublasXtSetPinningMemMode(handle: Handle, mode: c_int) {
        handle.as_mut().ok_or(NOT_INITIALIZED)?.pins = mode;
        Ok(())
    }

    fn cublasXtGetPinningMemMode(handle: Handle, mode: *mut c_int) {
        put(mode, handle.as_ref().ok_or(NOT_INITIALIZED)?.pins)
    }
}

/// The functions are defined without parameters: nothing reads them, and removing them is up to the caller.
macro_rules! refused {
    ($($name:ident)*) => {$(
        #[doc = "Refused."]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> cublasStatus_t {
            unsupported(stringify!($name))
        }
    )*};
}

refused! {
    cublasXtSetCpuRoutine cublasXtSetCpuRatio cublasXtCherk cublasXtZherk cublasXtSsyrk cublasXtDsyrk
    cublasXtCsyrk cublasXtZsyrk cublasXtCher2k cublasXtZher2k cublasXtSsyr2k cublasXtDsyr2k cublasXtCsyr2k
    cublasXtZsyr2k cublasXtCherkx cublasXtZherkx cublasXtStrsm cublasXtDtrsm cublasXtCtrsm cublasXtZtrsm
    cublasXtSsymm cublasXtDsymm cublasXtCsymm cublasXtZsymm cublasXtChemm cublasXtZhemm cublasXtSsyrkx
    cublasXtDsyrkx cublasXtCsyrkx cublasXtZsyrkx cublasXtSspmm cublasXtDspmm cublasXtCspmm cublasXtZspmm
    cublasXtStrmm cublasXtDtrmm cublasXtCtrmm cublasXtZtrmm
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_length_once_and_there_is_one_of_nothing() {
        assert_eq!(parts(7, 3).collect::<Vec<_>>(), [(0, 3), (3, 3), (6, 1)]);
        assert_eq!(parts(6, 3).collect::<Vec<_>>(), [(0, 3), (3, 3)]);
        assert_eq!(parts(0, 3).collect::<Vec<_>>(), [(0, 0)]);
    }
}
