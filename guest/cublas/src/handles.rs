//! cuBLAS handles: their settings are sent to the worker and kept here, where queries are answered.

use std::{
    collections::HashMap,
    ffi::{c_int, c_void},
    sync::{PoisonError, RwLock},
};

use cuda_definition::cublas::types::*;
use remoting_proto::apis::cuda::{FIRST, Kind, NO_HANDLE, libraries::Library, plan::Scalars};

use crate::{
    call::{INVALID_VALUE, NOT_INITIALIZED, Outcome, entry_points, forward, number, put, run},
    interface::interface,
};

/// Calls a forwarded function by its symbol, whose number is looked up only once.
macro_rules! served {
    ($library:ident, $symbol:literal, $words:expr) => {{
        static NUMBER: std::sync::OnceLock<Option<u16>> = std::sync::OnceLock::new();
        let library = remoting_proto::apis::cuda::libraries::Library::$library;
        let number = *NUMBER.get_or_init(|| library.number($symbol));
        let number = number.ok_or($crate::call::NOT_SUPPORTED)?;
        $crate::call::forward(
            library,
            number,
            $words,
            remoting_proto::apis::cuda::plan::Scalars::Device,
        )
    }};
}
pub(crate) use served;

/// A handle's settings, and what the worker knows of them. Programs set the same things before each
/// call. What the worker already knows is not sent again.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    stream: u64,
    /// The stream's number.
    number: u32,
    /// Its address and size, if there is one.
    workspace: Option<(u64, u64)>,
    /// The stream has been set again, which resets the workspace, and the worker has not been told
    /// yet.
    is_behind: bool,
    pointer_mode: u32,
    math_mode: u32,
    atomics_mode: u32,
}

impl State {
    /// Whether a stream has to be sent to the worker. The worker may already know a stream that is
    /// not an object and therefore cannot change.
    fn wants_stream(&mut self, stream: u64, number: u32) -> bool {
        if number < FIRST && (self.stream, self.number) == (stream, number) {
            self.is_behind = self.workspace.is_some();
            return false;
        }
        true
    }

    /// Whether a workspace has to be sent to the worker.
    fn wants_workspace(&mut self, workspace: (u64, u64)) -> bool {
        if self.workspace == Some(workspace) {
            // The worker still has it.
            self.is_behind = false;
            return false;
        }
        true
    }
}

static ALL: RwLock<Option<HashMap<u64, State>>> = RwLock::new(None);

fn state(handle: u64) -> Outcome<State> {
    let all = ALL.read().unwrap_or_else(PoisonError::into_inner);
    let found = all.as_ref().and_then(|all| all.get(&handle)).copied();
    found.ok_or(NOT_INITIALIZED)
}

fn change<T>(handle: u64, change: impl FnOnce(&mut State) -> T) -> Outcome<T> {
    let mut all = ALL.write().unwrap_or_else(PoisonError::into_inner);
    let state = all.get_or_insert_default().get_mut(&handle);
    state.map(change).ok_or(NOT_INITIALIZED)
}

/// Sends a stream to the worker.
fn tell_stream(handle: u64, stream: u64, number: u32) -> Outcome {
    // SAFETY: no pointers.
    unsafe { served!(Blas, "cublasSetStream_v2", &[handle, stream]) }?;
    change(handle, |state| {
        (state.stream, state.number) = (stream, number);
        (state.workspace, state.is_behind) = (None, false);
    })
}

/// Where the scalars of a call are. `typed` is the size of those whose type is a parameter.
///
/// # Errors
/// The handle is invalid.
pub fn scalars(handle: u64, typed: usize) -> Outcome<Scalars> {
    let state = state(handle)?;
    if state.is_behind {
        tell_stream(handle, state.stream, state.number)?;
    }
    Ok(match state.pointer_mode {
        0 => Scalars::Host(typed),
        _ => Scalars::Device,
    })
}

/// Forwards a function of cuBLAS that begins with a handle.
///
/// # Safety
/// As for [`forward`](crate::call::forward).
pub unsafe fn blas(function: u16, words: &[u64], typed: usize) -> cublasStatus_t {
    run(|| {
        let handle = words.first().copied().ok_or(INVALID_VALUE)?;
        let scalars = scalars(handle, typed)?;
        // SAFETY: the caller's promise.
        unsafe { forward(Library::Blas, function, words, scalars) }
    })
}

entry_points! { cublas:
    fn cublasCreate_v2(handle: *mut cublasHandle_t) {
        if handle.is_null() {
            return Err(INVALID_VALUE);
        }
        match (interface()?.prepare)() {
            0 => {}
            code => return Err(code),
        }
        served!(Blas, "cublasCreate_v2", &[handle as u64])?;
        let made = handle.read_unaligned() as u64;
        let mut all = ALL.write().unwrap_or_else(PoisonError::into_inner);
        all.get_or_insert_default().insert(made, State::default());
        Ok(())
    }

    fn cublasDestroy_v2(handle: cublasHandle_t) {
        state(handle as u64)?;
        // Waited for, as it is natively: work that used the handle may still be in progress.
        let arguments = number(Kind::Blas, handle as u64).to_le_bytes();
        // Before the call: as soon as the worker has ended it, another thread may be given its
        // number.
        (interface()?.forget)(handle as u64);
        let mut all = ALL.write().unwrap_or_else(PoisonError::into_inner);
        all.get_or_insert_default().remove(&(handle as u64));
        drop(all);
        let function = Library::Blas.number("cublasDestroy_v2").ok_or(INVALID_VALUE)?;
        crate::call::post(Library::Blas, function, &arguments, None)
    }

    fn cublasSetStream_v2(handle: cublasHandle_t, streamId: cudaStream_t) {
        let (handle, stream) = (handle as u64, streamId as u64);
        state(handle)?;
        let number = number(Kind::Stream, stream);
        if number == NO_HANDLE {
            return Err(INVALID_VALUE);
        }
        if !change(handle, |state| state.wants_stream(stream, number))? {
            return Ok(());
        }
        tell_stream(handle, stream, number)
    }

    fn cublasGetStream_v2(handle: cublasHandle_t, streamId: *mut cudaStream_t) {
        put(streamId, state(handle as u64)?.stream as cudaStream_t)
    }

    fn cublasSetWorkspace_v2(handle: cublasHandle_t, workspace: *mut c_void, workspaceSizeInBytes: usize) {
        let (handle, at, size) = (handle as u64, workspace as u64, workspaceSizeInBytes as u64);
        if !change(handle, |state| state.wants_workspace((at, size)))? {
            return Ok(());
        }
        served!(Blas, "cublasSetWorkspace_v2", &[handle, at, size])?;
        change(handle, |state| (state.workspace, state.is_behind) = (Some((at, size)), false))
    }

    fn cublasSetPointerMode_v2(handle: cublasHandle_t, mode: cublasPointerMode_t) {
        if mode.0 > 1 {
            return Err(INVALID_VALUE);
        }
        if state(handle as u64)?.pointer_mode == mode.0 {
            return Ok(());
        }
        served!(Blas, "cublasSetPointerMode_v2", &[handle as u64, mode.0.into()])?;
        change(handle as u64, |state| state.pointer_mode = mode.0)
    }

    fn cublasGetPointerMode_v2(handle: cublasHandle_t, mode: *mut cublasPointerMode_t) {
        put(mode, cublasPointerMode_t(state(handle as u64)?.pointer_mode))
    }

    fn cublasSetMathMode(handle: cublasHandle_t, mode: cublasMath_t) {
        if state(handle as u64)?.math_mode == mode.0 {
            return Ok(());
        }
        served!(Blas, "cublasSetMathMode", &[handle as u64, mode.0.into()])?;
        change(handle as u64, |state| state.math_mode = mode.0)
    }

    fn cublasGetMathMode(handle: cublasHandle_t, mode: *mut cublasMath_t) {
        put(mode, cublasMath_t(state(handle as u64)?.math_mode))
    }

    // The host's library keeps its default, which is not to use atomic operations. A permission
    // that it is not told about changes no result.
    fn cublasSetAtomicsMode(handle: cublasHandle_t, mode: cublasAtomicsMode_t) {
        state(handle as u64)?;
        if mode.0 > 1 {
            return Err(INVALID_VALUE);
        }
        change(handle as u64, |state| state.atomics_mode = mode.0)
    }

    fn cublasGetAtomicsMode(handle: cublasHandle_t, mode: *mut cublasAtomicsMode_t) {
        put(mode, cublasAtomicsMode_t(state(handle as u64)?.atomics_mode))
    }

    fn cublasGetVersion_v2(_handle: cublasHandle_t, version: *mut c_int) {
        put(version, crate::names::version()? as c_int)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_worker_knows_is_not_told_again() {
        let mut state = State::default();
        assert!(!state.wants_stream(0, 0) && !state.is_behind);
        assert!(state.wants_workspace((0x1000, 64)));
        state.workspace = Some((0x1000, 64));
        // As PyTorch does before each call: the stream, then the workspace.
        assert!(!state.wants_stream(0, 0) && state.is_behind);
        assert!(!state.wants_workspace((0x1000, 64)) && !state.is_behind);
        // Without the workspace, or with another one, the worker is told.
        assert!(!state.wants_stream(0, 0) && state.is_behind);
        assert!(state.wants_workspace((0x2000, 64)));
        // The number of a stream object may have belonged to another stream before.
        (state.stream, state.number) = (0x4702_0000_0014, 20);
        assert!(state.wants_stream(0x4702_0000_0014, 20));
        assert!(state.wants_stream(0, 0));
    }
}
