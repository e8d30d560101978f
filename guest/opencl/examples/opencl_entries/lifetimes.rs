//! Callbacks on the end of objects, and two contexts whose objects must not be mixed.

use std::{
    ffi::c_void,
    ptr::{null, null_mut},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use remoting_opencl::driver::api::Handle;

use super::{Part, device::check, device::cl, more::more};

/// The arguments of callbacks that were called: the handle, and the callback's number.
type Calls = Mutex<Vec<(Handle, usize)>>;

/// The data of a callback.
struct Told<'a> {
    calls: &'a Calls,
    number: usize,
}

unsafe extern "C" fn gone(object: Handle, data: *mut c_void) {
    // SAFETY: the pointer is from `told`, and what it points to outlives the object.
    let told = unsafe { &*data.cast::<Told<'_>>() };
    if let Ok(mut calls) = told.calls.lock() {
        calls.push((object, told.number));
    }
}

/// The data of two callbacks, which may be called at any time until the process ends.
fn told(calls: &'static Calls) -> [*mut c_void; 2] {
    [1, 2].map(|number| Box::into_raw(Box::new(Told { calls, number })).cast())
}

fn no_calls() -> &'static Calls {
    Box::leak(Box::default())
}

/// Waits until this many calls have arrived. Returns their order, and whether they were for this
/// object.
fn wait(calls: &Calls, count: usize, object: Handle) -> String {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let calls = calls.lock().map(|calls| calls.clone()).unwrap_or_default();
        if calls.len() >= count || Instant::now() > until {
            let numbers: Vec<_> = calls.iter().map(|(_, number)| number).collect();
            let right = calls.iter().all(|(about, _)| *about == object);
            return format!("{numbers:?}, about it: {right}");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn count(calls: &Calls) -> usize {
    calls.lock().map_or(0, |calls| calls.len())
}

pub fn run(part: &mut Part) -> Result<(), String> {
    if part.has("clSetContextDestructorCallback") {
        contexts(part)?;
    }
    context_from_type(part);
    buffers(part)?;
    strangers(part)
}

fn contexts(part: &mut Part) -> Result<(), String> {
    let calls = no_calls();
    let mut code = 0;
    let context = cl!(
        part.device.api,
        clCreateContext(
            null(),
            1,
            &raw const part.device.id,
            None,
            null_mut(),
            &raw mut code
        )
    );
    check(code, "creating a context")?;
    for data in told(calls) {
        let set = more!(
            part,
            clSetContextDestructorCallback(context, Some(gone), data)
        );
        part.say("clSetContextDestructorCallback", set);
    }
    let set = more!(
        part,
        clSetContextDestructorCallback(context, None, null_mut())
    );
    part.say("clSetContextDestructorCallback without one", set);
    let retained = cl!(part.device.api, clRetainContext(context));
    part.say("clRetainContext", retained);
    let released = cl!(part.device.api, clReleaseContext(context));
    part.say("clReleaseContext", released);
    part.say("called while it is kept", count(calls));
    // A buffer keeps its context alive.
    let buffer = part.numbers(context, &[1])?;
    check(cl!(part.device.api, clReleaseContext(context)), "releasing")?;
    part.say("called while its buffer is there", count(calls));
    check(
        cl!(part.device.api, clReleaseMemObject(buffer)),
        "releasing",
    )?;
    part.say("the context's callbacks", wait(calls, 2, context));
    Ok(())
}

fn context_from_type(part: &mut Part) {
    let mut code = 0;
    let kind = u64::from(u32::MAX);
    let made = more!(
        part,
        clCreateContextFromType(null(), kind, null(), null_mut(), &raw mut code)
    );
    if let Some(context) = part.made("clCreateContextFromType", made, code) {
        let released = cl!(part.device.api, clReleaseContext(context));
        part.say("clReleaseContext", released);
    }
}

fn buffers(part: &mut Part) -> Result<(), String> {
    let (context, queue) = (part.device.context, part.device.queue);
    let calls = no_calls();
    let buffer = part.numbers(context, &[1, 2, 3, 4])?;
    for data in told(calls) {
        let set = cl!(
            part.device.api,
            clSetMemObjectDestructorCallback(buffer, Some(gone), data)
        );
        part.say("clSetMemObjectDestructorCallback", set);
    }
    let set = cl!(
        part.device.api,
        clSetMemObjectDestructorCallback(buffer, None, null_mut())
    );
    part.say("clSetMemObjectDestructorCallback without one", set);
    let retained = more!(part, clRetainMemObject(buffer));
    part.say("clRetainMemObject", retained);
    check(
        cl!(part.device.api, clReleaseMemObject(buffer)),
        "releasing",
    )?;
    part.say("called while it is kept", count(calls));
    // A command that has not run keeps its buffer alive.
    let mut code = 0;
    let user = cl!(part.device.api, clCreateUserEvent(context, &raw mut code));
    check(code, "creating a user event")?;
    let zero = 0i32;
    let filled = cl!(
        part.device.api,
        clEnqueueFillBuffer(
            queue,
            buffer,
            (&raw const zero).cast(),
            4,
            0,
            16,
            1,
            &raw const user,
            null_mut(),
        )
    );
    check(filled, "filling")?;
    check(
        cl!(part.device.api, clReleaseMemObject(buffer)),
        "releasing",
    )?;
    part.say("called while a command uses it", count(calls));
    let decided = cl!(part.device.api, clSetUserEventStatus(user, 0));
    part.say("clSetUserEventStatus", decided);
    check(cl!(part.device.api, clFinish(queue)), "waiting")?;
    part.say("the buffer's callbacks", wait(calls, 2, buffer));
    check(cl!(part.device.api, clReleaseEvent(user)), "releasing")?;

    // A sub-buffer keeps its buffer alive.
    let calls = no_calls();
    let whole = part.numbers(context, &[7; 1024])?;
    let set = cl!(
        part.device.api,
        clSetMemObjectDestructorCallback(whole, Some(gone), told(calls)[0])
    );
    check(set, "setting a callback")?;
    let region = [2048usize, 1024];
    let sub = cl!(
        part.device.api,
        clCreateSubBuffer(whole, 0, 0x1220, region.as_ptr().cast(), &raw mut code)
    );
    let sub = part.made("clCreateSubBuffer", sub, code);
    check(cl!(part.device.api, clReleaseMemObject(whole)), "releasing")?;
    if let Some(sub) = sub {
        part.say("called while a part of it is there", count(calls));
        let there = part.contents::<2>(queue, sub)?;
        part.say("the part's contents", format_args!("{there:?}"));
        check(cl!(part.device.api, clReleaseMemObject(sub)), "releasing")?;
    }
    part.say("the whole's callback", wait(calls, 1, whole));
    if part.has("clCreateBufferWithProperties") {
        let made = more!(
            part,
            clCreateBufferWithProperties(context, null(), 0, 64, null_mut(), &raw mut code)
        );
        if let Some(buffer) = part.made("clCreateBufferWithProperties", made, code) {
            check(
                cl!(part.device.api, clReleaseMemObject(buffer)),
                "releasing",
            )?;
        }
    }
    Ok(())
}

/// Passes objects of one context to another context's queue.
fn strangers(part: &mut Part) -> Result<(), String> {
    let (context, queue) = (part.device.context, part.device.queue);
    let (other, other_queue) = part.other;
    let ours = part.numbers(context, &[1, 2])?;
    let theirs = part.numbers(other, &[3, 4])?;
    let mut numbers = [0i32; 2];
    let to: *mut c_void = numbers.as_mut_ptr().cast();
    let read = cl!(
        part.device.api,
        clEnqueueReadBuffer(queue, theirs, 1, 0, 8, to, 0, null(), null_mut())
    );
    part.say("reading another context's buffer", read);
    let copied = cl!(
        part.device.api,
        clEnqueueCopyBuffer(other_queue, ours, theirs, 0, 0, 8, 0, null(), null_mut())
    );
    part.say("copying from another context's buffer", copied);
    let mut code = 0;
    let event = cl!(part.device.api, clCreateUserEvent(other, &raw mut code));
    check(code, "creating a user event")?;
    let marked = cl!(
        part.device.api,
        clEnqueueMarkerWithWaitList(queue, 1, &raw const event, null_mut())
    );
    part.say("a marker after another context's event", marked);
    check(
        cl!(part.device.api, clSetUserEventStatus(event, 0)),
        "deciding",
    )?;
    check(cl!(part.device.api, clReleaseEvent(event)), "releasing")?;
    let both = (
        part.contents::<2>(queue, ours)?,
        part.contents::<2>(other_queue, theirs)?,
    );
    part.say("both contexts' buffers", format_args!("{both:?}"));
    for buffer in [ours, theirs] {
        check(
            cl!(part.device.api, clReleaseMemObject(buffer)),
            "releasing",
        )?;
    }
    Ok(())
}
