//! Has a context, a queue that has run commands, and 16 buffers of 256 KiB, half of them in the window,
//! and does nothing with them: says `idle` and its process id, and ends with its input.

use std::{
    io::{Write, copy, sink, stdin, stdout},
    ptr::{null, null_mut},
};

use device::{Device, check, cl};
use gantry_remoting::opencl::codes;

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
    let mut out = stdout().lock();
    writeln!(out, "idle {}", std::process::id())
        .and_then(|()| out.flush())
        .and_then(|()| copy(&mut stdin(), &mut sink()))
        .map_err(|error| error.to_string())?;
    Ok(())
}
