//! Caches answers that libraries ask for before every launch: attributes and occupancy of kernels,
//! and whether a device's primary context is active. The answers are kept until something is set
//! that they may depend on, or until kernels may be unloaded.

use std::{
    collections::HashMap,
    ffi::{c_int, c_uint},
    sync::{PoisonError, RwLock},
};

use cuda_definition::driver::types::*;

use crate::{
    context,
    entry::{Outcome, connected, entry_points, put},
    forward::forward,
};

/// The maximum number of cached answers.
const MOST: usize = 1 << 14;

/// A question: the entry point, the context, and up to four numbers.
type Question = (&'static str, u32, [u64; 4]);

/// The answers, for one state of all attributes.
#[derive(Debug, Default)]
struct Known {
    answers: HashMap<Question, u64>,
    /// How often the answers have been discarded. An answer to an earlier question is not cached.
    forgotten: u64,
}

static KNOWN: RwLock<Option<Known>> = RwLock::new(None);

/// Discards all answers, since something may have changed them.
pub fn forget() {
    let mut known = KNOWN.write().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    known.answers.clear();
    known.forgotten += 1;
}

/// Returns the answer to a question, asking the worker if it is not cached.
fn answer(
    symbol: &'static str,
    numbers: [u64; 4],
    ask: impl FnOnce() -> Outcome<u64>,
) -> Outcome<u64> {
    // Fails without a worker, and in a forked child of the process that has one.
    connected()?;
    let question = (symbol, context::current(), numbers);
    let forgotten = {
        let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner);
        let found = known
            .as_ref()
            .and_then(|known| known.answers.get(&question));
        if let Some(answer) = found {
            return Ok(*answer);
        }
        known.as_ref().map_or(0, |known| known.forgotten)
    };
    let answer = ask()?;
    let mut known = KNOWN.write().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if known.forgotten == forgotten {
        if known.answers.len() >= MOST {
            known.answers.clear();
        }
        known.answers.insert(question, answer);
    }
    Ok(answer)
}

/// Writes a number that an entry point returns through its first parameter.
///
/// # Safety
/// `to` is null or valid for writing a number.
unsafe fn number(to: *mut c_int, symbol: &'static str, numbers: [u64; 4], count: usize) -> Outcome {
    let found = answer(symbol, numbers, || {
        let mut found: c_int = 0;
        let mut words = vec![&raw mut found as u64];
        words.extend(&numbers[..count]);
        // SAFETY: the pointer points to a local of the type that is written.
        unsafe { forward(symbol, &words) }?;
        Ok(found.cast_unsigned().into())
    })?;
    // SAFETY: the caller's promise. The value was written by the same call, so it fits.
    unsafe { put(to, (found as u32).cast_signed()) }
}

/// The number of blocks of a function that a multiprocessor runs at the same time.
///
/// # Errors
/// The driver's.
pub fn blocks(function: CUfunction, threads: c_int, dynamic: usize) -> Outcome<c_int> {
    let mut blocks = 0;
    let numbers = [
        function as u64,
        threads.cast_unsigned().into(),
        dynamic as u64,
        0,
    ];
    // SAFETY: valid for writing a number.
    unsafe {
        number(
            &raw mut blocks,
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            numbers,
            3,
        )
    }?;
    Ok(blocks)
}

entry_points! {
    fn cuDevicePrimaryCtxGetState(dev: CUdevice, flags: *mut c_uint, active: *mut c_int) {
        let symbol = "cuDevicePrimaryCtxGetState";
        let device = dev.cast_unsigned().into();
        let found = answer(symbol, [device, 0, 0, 0], || {
            let (mut flags, mut active) = (0u32, 0i32);
            forward(symbol, &[device, &raw mut flags as u64, &raw mut active as u64])?;
            Ok(u64::from(active.cast_unsigned()) << 32 | u64::from(flags))
        })?;
        put(flags, found as u32)?;
        put(active, ((found >> 32) as u32).cast_signed())
    }

    fn cuFuncGetAttribute(pi: *mut c_int, attrib: CUfunction_attribute, hfunc: CUfunction) {
        number(pi, "cuFuncGetAttribute", [attrib.0.into(), hfunc as u64, 0, 0], 2)
    }

    fn cuKernelGetAttribute(pi: *mut c_int, attrib: CUfunction_attribute, kernel: CUkernel, dev: CUdevice) {
        let numbers = [attrib.0.into(), kernel as u64, dev.cast_unsigned().into(), 0];
        number(pi, "cuKernelGetAttribute", numbers, 3)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        numBlocks: *mut c_int,
        func: CUfunction,
        blockSize: c_int,
        dynamicSMemSize: usize,
    ) {
        put(numBlocks, blocks(func, blockSize, dynamicSMemSize)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        numBlocks: *mut c_int,
        func: CUfunction,
        blockSize: c_int,
        dynamicSMemSize: usize,
        flags: c_uint,
    ) {
        let symbol = "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags";
        let threads = blockSize.cast_unsigned().into();
        number(numBlocks, symbol, [func as u64, threads, dynamicSMemSize as u64, flags.into()], 4)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(
        dynamicSmemSize: *mut usize,
        func: CUfunction,
        numBlocks: c_int,
        blockSize: c_int,
    ) {
        let symbol = "cuOccupancyAvailableDynamicSMemPerBlock";
        let (blocks, threads) = (numBlocks.cast_unsigned().into(), blockSize.cast_unsigned().into());
        let found = answer(symbol, [func as u64, blocks, threads, 0], || {
            let mut found = 0usize;
            forward(symbol, &[&raw mut found as u64, func as u64, blocks, threads])?;
            Ok(found as u64)
        })?;
        put(dynamicSmemSize, found as usize)
    }
}
