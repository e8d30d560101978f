//! Contexts: a thread's current context and its default stream.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ffi::{c_int, c_uint, c_ulonglong},
    mem::ManuallyDrop,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use base::Unpoisoned;
use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{Kind, calls::ContextSynchronize, codes};

use crate::{
    capture,
    entry::{self, Outcome, connected, entry_points, put},
    forward::forward,
    handles,
    link::Link,
    signals,
    streams::exact,
    turns,
};

/// A per-thread list that exists as long as the thread: programs unregister their images and free memory when they
/// exit, after everything with a destructor is gone.
type Lasting<T> = RefCell<ManuallyDrop<Vec<T>>>;

thread_local! {
    /// The stack of contexts, by handle.
    static STACK: Lasting<u64> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
    /// Whether the null stream means the thread's own stream.
    static IS_PER_THREAD: Cell<bool> = const { Cell::new(false) };
    /// This thread's own streams.
    static STREAMS: Lasting<OwnStream> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
    /// Gives these back when the thread ends.
    static LEAVING: Leaving = const { Leaving };
}

/// A thread's own stream in a context.
#[derive(Clone, Copy, Debug)]
struct OwnStream {
    /// The context's handle.
    context: u64,
    number: u32,
    /// How many contexts had ended when it was last known to exist.
    ended: u64,
}

/// Streams of threads that have ended.
static LEFT: Mutex<Vec<OwnStream>> = Mutex::new(Vec::new());
/// The contexts that have ended, by handle, each with how many had ended with its last end.
static ENDS: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());
/// How many contexts have ended.
static ENDED: AtomicU64 = AtomicU64::new(0);

struct Leaving;

impl Drop for Leaving {
    fn drop(&mut self) {
        // In a child, another thread of its parent may have held the lock.
        if !entry::is_forked() {
            // The thread may still make calls, in the order of the same streams.
            let own = STREAMS.with_borrow(|all| all.to_vec());
            LEFT.lock_unpoisoned().extend(own);
        }
    }
}

impl OwnStream {
    /// Whether it exists still: it ends with its context.
    fn exists(&mut self) -> bool {
        let ended = ENDED.load(Ordering::Acquire);
        if self.ended == ended {
            return true;
        }
        let ends = ENDS.lock_unpoisoned();
        let exists = ends.get(&self.context).is_none_or(|end| *end <= self.ended);
        drop(ends);
        self.ended = ended;
        exists
    }

    /// Takes one of a context from a thread that has ended. It has no work, so that nothing of the other thread's is
    /// waited for.
    fn left(context: u64) -> Option<Self> {
        // A query would invalidate the capture that a stream takes part in.
        if capture::captures() {
            return None;
        }
        let mut busy = Vec::new();
        let found = loop {
            let mut left = LEFT.lock_unpoisoned();
            left.retain_mut(OwnStream::exists);
            let place = left.iter().position(|one| one.context == context);
            let Some(one) = place.map(|place| left.swap_remove(place)) else {
                break None;
            };
            drop(left);
            let handle = handles::handle(Kind::Stream, one.number);
            // SAFETY: no pointers.
            match unsafe { forward("cuStreamQuery", &[handle]) } {
                Ok(()) => break Some(one),
                Err(_) => busy.push(one),
            }
        };
        LEFT.lock_unpoisoned().extend(busy);
        found
    }
}

/// Records that a context is about to end, and with it the threads' own streams. Returns what was known of its last end.
fn streams_end(context: u64) -> Option<u64> {
    let mut ends = ENDS.lock_unpoisoned();
    let ended = ENDED.load(Ordering::Acquire) + 1;
    let before = ends.insert(context, ended);
    ENDED.store(ended, Ordering::Release);
    before
}

/// Records that a context has not ended after all.
fn streams_stay(context: u64, before: Option<u64>) {
    let mut ends = ENDS.lock_unpoisoned();
    match before {
        Some(before) => ends.insert(context, before),
        None => ends.remove(&context),
    };
}

/// The devices of contexts, by handle.
static DEVICES: Mutex<Vec<(u64, CUdevice)>> = Mutex::new(Vec::new());

/// Runs a call with the null stream meaning the thread's own stream.
pub fn per_thread(call: impl FnOnce() -> CUresult) -> CUresult {
    let before = IS_PER_THREAD.replace(true);
    let result = call();
    IS_PER_THREAD.set(before);
    result
}

/// Whether the null stream means the thread's own stream.
pub fn is_per_thread() -> bool {
    IS_PER_THREAD.get()
}

/// The number of this thread's own stream in the current context. The stream is created on first use.
pub fn own_stream() -> Option<u32> {
    let context = top()?;
    let known = STREAMS.with_borrow_mut(|all| {
        let place = all.iter().position(|one| one.context == context)?;
        if all[place].exists() {
            return Some(all[place].number);
        }
        all.swap_remove(place);
        None
    });
    if known.is_some() {
        return known;
    }
    let before = IS_PER_THREAD.replace(false);
    let own = OwnStream::left(context).or_else(|| {
        let ended = ENDED.load(Ordering::Acquire);
        let mut stream = 0u64;
        // SAFETY: the pointer is to a local.
        unsafe { forward("cuStreamCreate", &[&raw mut stream as u64, 0]) }.ok()?;
        Some(OwnStream {
            context,
            number: handles::number(Kind::Stream, stream),
            ended,
        })
    });
    IS_PER_THREAD.set(before);
    if let Some(own) = own {
        STREAMS.with_borrow_mut(|all| all.push(own));
        // While the thread ends, nobody gives it back any more.
        let _ = LEAVING.try_with(|_| {});
    }
    own.map(|own| own.number)
}

/// The current context's handle.
pub fn top() -> Option<u64> {
    STACK
        .with_borrow(|stack| stack.last().copied())
        .filter(|top| *top != 0)
}

/// The current context's number, or 0 if there is none.
pub fn current() -> u32 {
    top().map_or(0, |top| top as u32)
}

/// The current context's number. Fails if there is none.
pub fn need() -> Outcome<u32> {
    match current() {
        0 => Err(codes::INVALID_CONTEXT),
        number => Ok(number),
    }
}

/// Checks that there is a driver and a current context.
pub fn need_connected() -> Outcome {
    connected()?;
    need().map(drop)
}

/// The device of the current context.
pub fn device() -> Outcome<CUdevice> {
    let top = top().ok_or(codes::INVALID_CONTEXT)?;
    let devices = DEVICES.lock_unpoisoned();
    let found = devices.iter().find(|(context, _)| *context == top);
    Ok(found.map_or(0, |(_, device)| *device))
}

/// Whether a context is one of this device.
pub fn is_of(context: u64, device: CUdevice) -> bool {
    DEVICES.lock_unpoisoned().contains(&(context, device))
}

/// How the work of all contexts is, as far as it was there when it was waited for.
#[derive(Debug)]
pub enum Waited {
    /// Done, or failed, with the error of the current context: those of the others are not the caller's.
    Done(Outcome),
    /// Streams are being captured, beside which not all work can be waited for.
    Captured,
}

/// Waits for the work of all contexts, before host memory that any of them may use is given up. Leaves captures valid. What
/// the driver has refused is left to the waits of the program.
pub fn wait_for_all(link: &Link, current: u32) -> Waited {
    let others: Vec<u32> = DEVICES
        .lock_unpoisoned()
        .iter()
        .filter_map(|(context, _)| handles::valid(Kind::Context, *context).ok())
        .filter(|context| *context != current)
        .collect();
    let ask = |context| {
        link.ask(&ContextSynchronize {
            context,
            spares_captures: true,
        })
    };
    let waited = ask(current);
    let mut is_captured = waited == Err(codes::NOT_READY);
    for context in others {
        // It may have been destroyed meanwhile.
        is_captured |= ask(context) == Err(codes::NOT_READY);
    }
    match is_captured {
        true => Waited::Captured,
        false => Waited::Done(exact(link, current, 0, waited)),
    }
}

/// Waits for the work of other contexts than the current one, whose number is given, and tells whether there are any among
/// these handles. Leaves captures valid.
///
/// # Errors
/// The driver's, of any of that work. Beside captures, not all work can be waited for, and nothing may rely on that.
pub fn wait_for_others(link: &Link, current: u32, contexts: [CUcontext; 2]) -> Outcome<bool> {
    let mut is_any = false;
    for handle in contexts.map(|context| context as u64) {
        let context = handles::valid(Kind::Context, handle)?;
        if context == 0 || context == current {
            continue;
        }
        is_any = true;
        let waited = link.ask(&ContextSynchronize {
            context,
            spares_captures: true,
        });
        match waited {
            Err(codes::NOT_READY) => return Err(codes::NOT_SUPPORTED),
            waited => within(handle, || exact(link, context, 0, waited))?,
        }
    }
    Ok(is_any)
}

/// Runs a call with another context being current.
pub fn within<T>(context: u64, call: impl FnOnce() -> T) -> T {
    STACK.with_borrow_mut(|stack| stack.push(context));
    let done = call();
    STACK.with_borrow_mut(|stack| stack.pop());
    done
}

fn know(context: u64, device: CUdevice) {
    let mut devices = DEVICES.lock_unpoisoned();
    devices.retain(|(known, _)| *known != context);
    devices.push((context, device));
}

fn forget(context: u64) {
    STACK.with_borrow_mut(|stack| {
        if stack.last() == Some(&context) {
            stack.pop();
        }
    });
}

fn valid(context: CUcontext) -> Outcome<u64> {
    handles::valid(Kind::Context, context as u64)?;
    Ok(context as u64)
}

/// The number of times that each device's primary context is retained, and its handle.
static PRIMARY: Mutex<Vec<(CUdevice, u32, u64)>> = Mutex::new(Vec::new());

fn retained(device: CUdevice, context: u64) {
    let mut all = PRIMARY.lock_unpoisoned();
    match all.iter_mut().find(|(of, ..)| *of == device) {
        Some((_, count, _)) => *count += 1,
        None => all.push((device, 1, context)),
    }
}

/// Records that a primary context was released, once or (`all_at_once`) completely.
fn released(device: CUdevice, all_at_once: bool) {
    let mut all = PRIMARY.lock_unpoisoned();
    all.retain_mut(|(of, count, context)| {
        if *of != device {
            return true;
        }
        *count = if all_at_once { 0 } else { *count - 1 };
        if *count == 0 {
            capture::forget_context(*context);
            crate::memory::forget_context(*context);
        }
        *count > 0
    });
}

/// Has the worker release a primary context. If that destroys the context, its handle becomes invalid before another
/// thread can be given the same number.
fn release(symbol: &str, device: CUdevice, all_at_once: bool) -> Outcome {
    let ends =
        |(of, count, _): &&(CUdevice, u32, u64)| *of == device && (all_at_once || *count == 1);
    let ended = PRIMARY
        .lock_unpoisoned()
        .iter()
        .find(ends)
        .map(|(.., context)| *context);
    let mut before = None;
    if let Some(context) = ended {
        turns::forget_context(context);
        before = streams_end(context);
        handles::forget(context);
    }
    // SAFETY: no pointers.
    let asked = unsafe { forward(symbol, &[device.cast_unsigned().into()]) };
    match (ended, asked) {
        (_, Ok(())) => released(device, all_at_once),
        (Some(context), Err(_)) => {
            handles::revive(context);
            streams_stay(context, before);
        }
        (None, Err(_)) => {}
    }
    asked
}

unsafe fn create(pctx: *mut CUcontext, flags: c_uint, dev: CUdevice) -> Outcome {
    let mut context = 0u64;
    let words = [
        &raw mut context as u64,
        flags.into(),
        dev.cast_unsigned().into(),
    ];
    // SAFETY: the pointer is to a local; the caller's promise for the other one.
    unsafe {
        forward("cuCtxCreate_v2", &words)?;
        know(context, dev);
        STACK.with_borrow_mut(|stack| stack.push(context));
        put(pctx, context as CUcontext)
    }
}

entry_points! {
    fn cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: CUdevice) {
        let mut context = 0u64;
        forward("cuDevicePrimaryCtxRetain", &[&raw mut context as u64, dev.cast_unsigned().into()])?;
        know(context, dev);
        retained(dev, context);
        put(pctx, context as CUcontext)
    }

    fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) {
        release("cuDevicePrimaryCtxRelease_v2", dev, false)
    }

    fn cuCtxCreate_v2(pctx: *mut CUcontext, flags: c_uint, dev: CUdevice) {
        create(pctx, flags, dev)
    }

    fn cuCtxCreate_v3(
        pctx: *mut CUcontext,
        _paramsArray: *mut CUexecAffinityParam,
        numParams: c_int,
        flags: c_uint,
        dev: CUdevice,
    ) {
        if numParams != 0 {
            return Err(codes::NOT_SUPPORTED);
        }
        create(pctx, flags, dev)
    }

    fn cuCtxCreate_v4(pctx: *mut CUcontext, ctxCreateParams: *mut CUctxCreateParams, flags: c_uint, dev: CUdevice) {
        let plain = ctxCreateParams.is_null()
            || (*ctxCreateParams).execAffinityParams.is_null() && (*ctxCreateParams).cigParams.is_null();
        if !plain {
            return Err(codes::NOT_SUPPORTED);
        }
        create(pctx, flags, dev)
    }

    fn cuCtxDestroy_v2(ctx: CUcontext) {
        connected()?;
        let context = valid(ctx)?;
        turns::forget_context(context);
        // Before the call: another thread may then be given the same number.
        let before = streams_end(context);
        forward("cuCtxDestroy_v2", &[context]).inspect_err(|_| streams_stay(context, before))?;
        capture::forget_context(context);
        crate::memory::forget_context(context);
        forget(context);
        Ok(())
    }

    fn cuDevicePrimaryCtxReset_v2(dev: CUdevice) {
        release("cuDevicePrimaryCtxReset_v2", dev, true)
    }

    fn cuCtxPushCurrent_v2(ctx: CUcontext) {
        connected()?;
        let context = valid(ctx)?;
        if context == 0 {
            return Err(codes::INVALID_VALUE);
        }
        STACK.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(pctx: *mut CUcontext) {
        connected()?;
        let context = STACK.with_borrow_mut(|stack| stack.pop()).ok_or(codes::INVALID_CONTEXT)?;
        if !pctx.is_null() {
            put(pctx, context as CUcontext)?;
        }
        Ok(())
    }

    fn cuCtxSetCurrent(ctx: CUcontext) {
        connected()?;
        let context = valid(ctx)?;
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    }

    fn cuCtxGetCurrent(pctx: *mut CUcontext) {
        connected()?;
        put(pctx, top().unwrap_or(0) as CUcontext)
    }

    fn cuCtxGetDevice(device: *mut CUdevice) {
        connected()?;
        put(device, self::device()?)
    }

    fn cuCtxGetApiVersion(ctx: CUcontext, version: *mut c_uint) {
        connected()?;
        valid(ctx)?;
        put(version, 3020)
    }

    fn cuCtxGetId(ctx: CUcontext, ctxId: *mut c_ulonglong) {
        connected()?;
        let context = if ctx.is_null() { top().ok_or(codes::INVALID_CONTEXT)? } else { valid(ctx)? };
        put(ctxId, context)
    }

    fn cuCtxSynchronize() {
        let link = connected()?;
        let context = need()?;
        if !capture::captures() && signals::wait(link, context, None) {
            return Ok(());
        }
        exact(link, context, 0, link.ask(&ContextSynchronize { context, spares_captures: false }))
    }
}
