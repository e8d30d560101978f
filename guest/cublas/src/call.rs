//! Forwards calls to the worker, and handles their results.

use std::{
    cell::Cell,
    collections::HashSet,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use cuda_definition::cublas::types::cublasStatus_t;
use remoting_proto::apis::cuda::{
    Kind, codes,
    libraries::{Library, STATUS},
    plan::{Outgoing, Plan, Scalars},
};

use crate::{
    interface::{interface, is_forked},
    learned::Learned,
};

/// A result. The error is the number of a `CUresult`, or a cuBLAS status plus [`STATUS`].
pub type Outcome<T = ()> = Result<T, i32>;

/// The statuses that these libraries return by themselves.
pub const NOT_INITIALIZED: i32 = STATUS + 1;
pub const INVALID_VALUE: i32 = STATUS + 7;
pub const NOT_SUPPORTED: i32 = STATUS + 15;
/// Room for the answer to a call: numbers for the host.
const ROOM: usize = 256;

static LEARNED: Learned = Learned::new();

thread_local! {
    /// The parameters of the current call.
    static ARGUMENTS: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Reports, once, that the host's library is missing.
fn missing() {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if !TOLD.swap(true, Ordering::Relaxed) {
        eprintln!(
            "gantry: the host has no cuBLAS for its guests (gantry-accel serve --cuda-libraries)"
        );
    }
}

/// Converts a result to a status for the caller.
pub fn status(outcome: Outcome) -> cublasStatus_t {
    use cublasStatus_t as S;
    if outcome == Err(codes::NOT_FOUND) {
        missing();
    }
    match outcome {
        Ok(()) => S::CUBLAS_STATUS_SUCCESS,
        Err(code) if code > STATUS => cublasStatus_t((code - STATUS).cast_unsigned()),
        Err(codes::OUT_OF_MEMORY) => S::CUBLAS_STATUS_ALLOC_FAILED,
        Err(codes::INVALID_VALUE) => S::CUBLAS_STATUS_INVALID_VALUE,
        Err(codes::NOT_SUPPORTED) => S::CUBLAS_STATUS_NOT_SUPPORTED,
        Err(
            codes::NOT_INITIALIZED
            | codes::NO_DEVICE
            | codes::INVALID_CONTEXT
            | codes::INVALID_HANDLE
            | codes::NOT_FOUND
            | codes::DEVICE_UNAVAILABLE,
        ) => S::CUBLAS_STATUS_NOT_INITIALIZED,
        Err(_) => S::CUBLAS_STATUS_EXECUTION_FAILED,
    }
}

/// Runs a call of the program's, unless this process is forked.
#[inline]
pub fn run(call: impl FnOnce() -> Outcome) -> cublasStatus_t {
    if is_forked() {
        return cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED;
    }
    status(call())
}

/// An entry point that is not supported. Reports this once.
pub fn unsupported(symbol: &'static str) -> cublasStatus_t {
    static TOLD: Mutex<Option<HashSet<&str>>> = Mutex::new(None);
    if is_forked() {
        return cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED;
    }
    let mut told = TOLD
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if told.get_or_insert_default().insert(symbol) {
        eprintln!("gantry: {symbol} is not supported by this cuBLAS");
    }
    status(Err(NOT_SUPPORTED))
}

/// Defines entry points that are written by hand, with the signatures of the API's definition.
macro_rules! entry_points {
    ($module:ident: $(fn $name:ident($($argument:ident: $of:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe, clippy::missing_safety_doc)]
        pub unsafe extern "C" fn $name($($argument: $of),*) -> cublasStatus_t {
            // SAFETY: callers keep the API's promises about the pointers that they pass, as callers
            // of any C library do.
            let status = $crate::call::run(|| -> $crate::call::Outcome { unsafe { $body } });
            cublasStatus_t(status.0)
        }
        const _: cuda_definition::$module::signatures::$name = $name;
    )*};
}
pub(crate) use entry_points;

/// Writes a result.
///
/// # Safety
/// `to` is null or valid for writing.
pub unsafe fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// The number of a handle's object.
pub fn number(kind: Kind, handle: u64) -> u32 {
    interface().map_or(remoting_proto::apis::cuda::NO_HANDLE, |interface| {
        (interface.number)(kind as u32, handle)
    })
}

/// Makes a call that returns no data. Waits for it unless a call of the same hash has succeeded
/// before.
pub fn post(library: Library, function: u16, arguments: &[u8], hash: Option<u64>) -> Outcome {
    let interface = interface()?;
    let waits = hash.is_none_or(|hash| !LEARNED.knows(hash));
    let (start, length) = (arguments.as_ptr(), arguments.len());
    // SAFETY: there are this many bytes.
    match unsafe { (interface.post)(library as u32, function.into(), start, length, waits) } {
        0 => {
            if let Some(hash) = hash.filter(|_| waits) {
                LEARNED.add(hash);
            }
            Ok(())
        }
        code => Err(code),
    }
}

/// Makes a call that returns data. Returns the length of the answer.
pub fn ask(library: Library, function: u16, arguments: &[u8], answer: &mut [u8]) -> Outcome<usize> {
    let interface = interface()?;
    let mut written = 0;
    // SAFETY: there are this many bytes, and this much room.
    let code = unsafe {
        (interface.call)(
            library as u32,
            function.into(),
            arguments.as_ptr(),
            arguments.len(),
            answer.as_mut_ptr(),
            answer.len(),
            &raw mut written,
        )
    };
    match code {
        0 => Ok(written.min(answer.len())),
        code => Err(code),
    }
}

/// Runs a call with this thread's parameter buffer, which is empty. A thread that is ending has no
/// such buffer any more, but its program may still make calls.
pub fn with_arguments<T>(call: impl FnOnce(&mut Vec<u8>) -> T) -> T {
    let mut arguments = ARGUMENTS.try_with(Cell::take).unwrap_or_default();
    arguments.clear();
    let result = call(&mut arguments);
    // The buffer is dropped if it cannot be kept.
    let _ = ARGUMENTS.try_with(|place| place.set(arguments));
    result
}

/// Forwards a function whose parameters are encoded according to the API's definition.
///
/// # Safety
/// `words` are the parameters, and pointers among them are valid as the API requires.
pub unsafe fn forward(library: Library, function: u16, words: &[u64], scalars: Scalars) -> Outcome {
    let plan = Plan::of_library(library, function).ok_or(NOT_SUPPORTED)?;
    let outgoing = Outgoing {
        plan,
        words,
        scalars,
    };
    with_arguments(|arguments| {
        // SAFETY: the caller's promise.
        if !unsafe { outgoing.encode(number, arguments) } {
            return Err(INVALID_VALUE);
        }
        if !plan.writes(scalars) {
            let seed = u64::from(function) << 8 | library as u64;
            let hash = plan.likeness(arguments) ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            return post(library, function, arguments, Some(hash));
        }
        let mut answer = [0; ROOM];
        let written = ask(library, function, arguments, &mut answer)?;
        let interface = interface()?;
        let handle = |kind: Kind, number| (interface.handle)(kind as u32, number);
        // SAFETY: as above; encoded above.
        unsafe { outgoing.write(&answer[..written], handle) }.map_err(|_| codes::UNKNOWN)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_may_be_made_while_a_thread_ends() {
        use std::sync::atomic::AtomicUsize;
        static LENGTH: AtomicUsize = AtomicUsize::new(0);
        struct Late;
        impl Drop for Late {
            fn drop(&mut self) {
                with_arguments(|arguments| {
                    arguments.push(7);
                    LENGTH.store(arguments.len(), Ordering::Relaxed);
                });
            }
        }
        thread_local!(static LATE: Late = const { Late });
        let thread = std::thread::spawn(|| {
            LATE.with(|_| {});
            // The thread-local that was first used last is destroyed first.
            with_arguments(|arguments| arguments.extend([1, 2]));
        });
        thread.join().expect("it ends");
        assert_eq!(LENGTH.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn statuses_are_the_library_s_own_or_what_the_driver_means() {
        assert_eq!(status(Err(STATUS + 14)).0, 14);
        assert_eq!(status(Err(codes::OUT_OF_MEMORY)).0, 3);
        assert_eq!(status(Err(codes::NOT_FOUND)).0, 1);
        assert_eq!(status(Err(719)).0, 13);
        assert_eq!(status(Ok(())).0, 0);
    }
}
