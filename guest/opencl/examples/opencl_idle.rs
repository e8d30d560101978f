//! Creates a context, a queue that has run commands, and 16 buffers of 256 KiB, half of them in the
//! window, and does nothing with them. Prints `idle` and its process ID, and ends when its input
//! ends. With an argument, a call waits meanwhile for an event of the application's own.

use std::{
    env,
    io::{Write, copy, sink, stdin, stdout},
    ptr::{null, null_mut},
    thread,
};

use device::{Device, check, cl};
use remoting_proto::apis::opencl::codes;

mod device;

const BUFFERS: u32 = 16;
const SIZE: usize = 256 << 10;

fn main() -> Result<(), String> {
    let device = Device::open(None)?;
    for number in 0..BUFFERS {
        let place = [0, codes::MEM_ALLOC_HOST_PTR][number as usize % 2];
        let buffer = device.buffer(codes::MEM_READ_WRITE | place, SIZE, null_mut())?;
        let pattern = (&raw const number).cast();
        let filled = cl!(
            device.api,
            clEnqueueFillBuffer(
                device.queue,
                buffer,
                pattern,
                4,
                0,
                SIZE,
                0,
                null(),
                null_mut()
            )
        );
        check(filled, "filling a buffer")?;
    }
    check(cl!(device.api, clFinish(device.queue)), "finishing")?;
    if env::args().len() == 1 {
        return rest();
    }
    let mut code = 0;
    let event = cl!(device.api, clCreateUserEvent(device.context, &raw mut code));
    check(code, "creating an event")?;
    let marked = cl!(
        device.api,
        clEnqueueMarkerWithWaitList(device.queue, 1, &raw const event, null_mut())
    );
    check(marked, "waiting for an event")?;
    thread::scope(|scope| {
        let waits = scope.spawn(|| check(cl!(device.api, clFinish(device.queue)), "finishing"));
        let rested = rest();
        let set = cl!(device.api, clSetUserEventStatus(event, 0));
        check(set, "setting an event")?;
        waits
            .join()
            .map_err(|_| "the waiting thread has panicked")??;
        rested
    })
}

/// Prints that it is idle, and waits for the end of its input.
fn rest() -> Result<(), String> {
    let mut out = stdout().lock();
    writeln!(out, "idle {}", std::process::id())
        .and_then(|()| out.flush())
        .and_then(|()| copy(&mut stdin(), &mut sink()))
        .map_err(|error| error.to_string())?;
    Ok(())
}
