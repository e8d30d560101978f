//! Entry points whose parameters are encoded according to the API's definition.

use cuda_definition::driver::types::CUresult;
use remoting_proto::{
    apis::cuda::{
        NO_HANDLE,
        calls::{Forward, Post},
        codes,
        forwarded::ALL,
        plan::{Outgoing, Parameter, Plan, Scalars},
    },
    wire::Blob,
};

use crate::{
    answers, context,
    entry::{Outcome, connected, run},
    handles, launch, memory,
};

/// Entry points that are not waited for: work in a stream that writes no result for the caller.
const POSTED: &[&str] = &[
    "cuEventRecord",
    "cuEventRecordWithFlags",
    "cuStreamWaitEvent",
    "cuStreamWriteValue32_v2",
    "cuStreamWriteValue64_v2",
    "cuStreamWaitValue32_v2",
    "cuStreamWaitValue64_v2",
];

/// Entry points whose success ends the object of their first parameter.
const ENDING: &[&str] = &[
    "cuCtxDestroy_v2",
    "cuModuleUnload",
    "cuLibraryUnload",
    "cuStreamDestroy_v2",
    "cuEventDestroy_v2",
    "cuGraphDestroy",
    "cuGraphDestroyNode",
    "cuGraphExecDestroy",
    "cuMemPoolDestroy",
    "cuArrayDestroy",
    "cuMipmappedArrayDestroy",
];

/// Entry points after which cached information about kernels and contexts may be wrong.
const CHANGING: &[&str] = &[
    "cuCtxSetCacheConfig",
    "cuCtxSetFlags",
    "cuCtxSetSharedMemConfig",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxSetFlags_v2",
    "cuFuncSetAttribute",
    "cuFuncSetCacheConfig",
    "cuFuncSetSharedMemConfig",
    "cuKernelSetAttribute",
    "cuKernelSetCacheConfig",
];

/// Entry points whose success may unload functions.
const UNLOADING: &[&str] = &[
    "cuModuleUnload",
    "cuLibraryUnload",
    "cuCtxDestroy_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset_v2",
];

/// An entry point that only forwards its call.
///
/// # Safety
/// `words` are the parameters, and pointers among them are valid as the API requires.
pub unsafe fn entry(symbol: &'static str, words: &[u64]) -> CUresult {
    // SAFETY: the caller's promise.
    run(|| unsafe { forward(symbol, words) })
}

/// The index of a symbol in the list of forwarded ones.
fn number(symbol: &str) -> Outcome<u16> {
    use std::{collections::HashMap, sync::OnceLock};
    static NUMBERS: OnceLock<HashMap<&str, u16>> = OnceLock::new();
    let numbers = NUMBERS.get_or_init(|| {
        let all = ALL.iter().enumerate();
        all.map(|(index, entry)| (entry.symbol, index as u16))
            .collect()
    });
    numbers.get(symbol).copied().ok_or(codes::NOT_SUPPORTED)
}

/// Refuses what the driver would refuse at once, and a later call would report.
fn check_posted(symbol: &str, words: &[u64]) -> Outcome {
    let is_null = |index: usize| words.get(index) == Some(&0);
    match symbol {
        "cuEventRecord" | "cuEventRecordWithFlags" if is_null(0) => Err(codes::INVALID_HANDLE),
        "cuStreamWaitEvent" if is_null(1) => Err(codes::INVALID_HANDLE),
        "cuEventRecord" | "cuEventRecordWithFlags" | "cuStreamWaitEvent" => Ok(()),
        // They name a word of memory.
        _ if is_null(1) => Err(codes::INVALID_VALUE),
        _ => Ok(()),
    }
}

/// Forwards a call to the worker.
///
/// # Safety
/// As for [`entry`].
pub unsafe fn forward(symbol: &str, words: &[u64]) -> Outcome {
    let link = connected()?;
    let function = number(symbol)?;
    let plan = Plan::of(function).ok_or(codes::NOT_SUPPORTED)?;
    let scalars = Scalars::default();
    let outgoing = Outgoing {
        plan,
        words,
        scalars,
    };
    // Invalid handles are reported here, since not all calls are waited for.
    for (parameter, word) in plan.parameters.iter().zip(words) {
        if let Parameter::Handle(kind) = parameter
            && handles::number(*kind, *word) == NO_HANDLE
        {
            return Err(kind.invalid());
        }
    }
    let mut arguments = Vec::with_capacity(64);
    // SAFETY: the caller's promise.
    if !unsafe { outgoing.encode(handles::number, &mut arguments) } {
        return Err(codes::INVALID_VALUE);
    }
    let (context, arguments) = (context::current(), Blob(arguments));
    if POSTED.contains(&symbol) {
        if context == 0 {
            return Err(codes::INVALID_CONTEXT);
        }
        check_posted(symbol, words)?;
        return link.post(&Post {
            context,
            function,
            arguments,
        });
    }
    let ended = words.first().filter(|_| ENDING.contains(&symbol));
    if let Some(handle) = ended {
        // Before the call: as soon as the worker has ended the object, another thread may be given
        // its number.
        handles::forget(*handle);
    }
    let asked = link.ask(&Forward {
        context,
        function,
        arguments,
    });
    if CHANGING.contains(&symbol) {
        answers::forget();
    }
    if let (Some(handle), Err(_)) = (ended, &asked) {
        handles::revive(*handle);
    }
    let Blob(answer) = asked?;
    // SAFETY: the caller's promise; encoded above.
    let written = unsafe { outgoing.write(&answer, handles::handle) };
    written.map_err(|_| codes::UNKNOWN)?;
    if UNLOADING.contains(&symbol) {
        // Numbers are reused.
        launch::forget_all(link);
    }
    // SAFETY: the caller's promise.
    unsafe { memory::note(symbol, words) };
    Ok(())
}
