//! One context, queue and program, used by several threads at once.

use std::{
    ffi::c_void,
    ptr::{null, null_mut},
    sync::mpsc,
    thread,
};

use remoting_opencl::driver::api::Handle;

use super::{
    Part,
    device::{check, cl},
    more::more,
};

/// The number of computations of each thread.
const ROUNDS: usize = 50;
const NUMBERS: usize = 256;

pub fn run(part: &Part, threads: usize) -> Result<(), String> {
    let buffer = part.numbers(part.device.context, &vec![0; threads * NUMBERS])?;
    let right = thread::scope(|scope| {
        let all: Vec<_> = (0..threads)
            .map(|index| scope.spawn(move || compute(part, buffer, index)))
            .collect();
        let ends = all.into_iter().map(|thread| match thread.join() {
            Ok(end) => end,
            Err(_) => Err("a thread has panicked".to_owned()),
        });
        ends.collect::<Result<Vec<_>, _>>()
    })?;
    println!("computed with one queue: {right:?}");
    println!("{}", decided(part)?);
    Ok(())
}

/// Computes with temporary objects, alongside those that all threads share. Returns the result.
fn compute(part: &Part, buffer: Handle, index: usize) -> Result<i32, String> {
    let (api, queue) = (&part.device.api, part.device.queue);
    let offset = index * NUMBERS * 4;
    let mut numbers = [0i32; NUMBERS];
    let to: *mut c_void = numbers.as_mut_ptr().cast();
    for round in 0..ROUNDS {
        let own = part.numbers(part.device.context, &[round as i32; NUMBERS])?;
        let [kernel] = part.device.kernels_of(part.program, [c"add"])?;
        part.device.set(kernel, 0, own)?;
        part.device.set(kernel, 1, index as i32)?;
        check(
            more!(part, clRetainCommandQueue(queue)),
            "keeping the queue",
        )?;
        let mut event = 0;
        let run = part.device.enqueue(queue, kernel, NUMBERS, &raw mut event);
        check(run, "enqueuing")?;
        let copied = cl!(
            *api,
            clEnqueueCopyBuffer(
                queue,
                own,
                buffer,
                0,
                offset,
                NUMBERS * 4,
                1,
                &raw const event,
                null_mut()
            )
        );
        check(copied, "copying")?;
        check(cl!(*api, clWaitForEvents(1, &raw const event)), "waiting")?;
        let read = cl!(
            *api,
            clEnqueueReadBuffer(
                queue,
                buffer,
                1,
                offset,
                NUMBERS * 4,
                to,
                0,
                null(),
                null_mut()
            )
        );
        check(read, "reading")?;
        if numbers != [(round + index) as i32; NUMBERS] {
            return Err(format!("round {round} of thread {index} gave {numbers:?}"));
        }
        for code in [
            cl!(*api, clReleaseEvent(event)),
            cl!(*api, clReleaseKernel(kernel)),
            cl!(*api, clReleaseMemObject(own)),
            cl!(*api, clReleaseCommandQueue(queue)),
        ] {
            check(code, "releasing")?;
        }
    }
    Ok(numbers[0])
}

/// One thread waits for a command that waits for another thread's decision, in the other context.
fn decided(part: &Part) -> Result<String, String> {
    let api = &part.device.api;
    let (context, queue) = part.other;
    let mut code = 0;
    let user = cl!(*api, clCreateUserEvent(context, &raw mut code));
    check(code, "creating a user event")?;
    let mut marker = 0;
    let marked = cl!(
        *api,
        clEnqueueMarkerWithWaitList(queue, 1, &raw const user, &raw mut marker)
    );
    check(marked, "enqueuing a marker")?;
    let (sender, receiver) = mpsc::channel();
    let waited = thread::scope(|scope| {
        let waits = scope.spawn(move || {
            let _ = sender.send(());
            cl!(*api, clWaitForEvents(1, &raw const marker))
        });
        let _ = receiver.recv();
        let decided = cl!(*api, clSetUserEventStatus(user, 0));
        (decided, waits.join())
    });
    match waited {
        (decided, Ok(waited)) => Ok(format!(
            "an event that another thread decides: {decided}, {waited}"
        )),
        (_, Err(_)) => Err("a thread has panicked".to_owned()),
    }
}
