//! Ten thousand synchronous calls between two marks, so that other events during them can be
//! counted. Prints `ready` and its process ID, waits for a line, prints `begin`, makes the calls,
//! prints `end`, and waits for the end of its input.

use std::{
    io::{Write, stdin, stdout},
    ptr::null_mut,
};

use device::{Device, Failed, check, cl};
use remoting_proto::apis::opencl::codes;

mod device;

const CALLS: u32 = 10_000;

fn say(word: &str) -> Result<(), String> {
    let mut out = stdout().lock();
    writeln!(out, "{word}")
        .and_then(|()| out.flush())
        .map_err(|error| error.to_string())
}

fn main() -> Result<(), String> {
    let device = Device::open(None)?;
    let [kernel] = device.kernels(c"kernel void nothing(int a) {}", [c"nothing"])?;
    let mut word = 0usize;
    let mut ask = || -> Result<(), Failed> {
        let to = (&raw mut word).cast();
        let code = cl!(
            device.api,
            clGetKernelWorkGroupInfo(
                kernel,
                device.id,
                codes::KERNEL_PREFERRED_WORK_GROUP_SIZE_MULTIPLE,
                8,
                to,
                null_mut()
            )
        );
        check(code, "asking")
    };
    for _ in 0..1000 {
        ask()?;
    }
    say(&format!("ready {}", std::process::id()))?;
    stdin()
        .read_line(&mut String::new())
        .map_err(|error| error.to_string())?;
    // The work of waking up is done before the mark.
    for _ in 0..100 {
        ask()?;
    }
    say("begin")?;
    for _ in 0..CALLS {
        ask()?;
    }
    say("end")?;
    stdin()
        .read_line(&mut String::new())
        .map_err(|error| error.to_string())?;
    Ok(())
}
