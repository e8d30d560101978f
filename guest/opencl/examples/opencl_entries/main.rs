//! Calls the entry points that few programs use, and prints the result of each. The lines are the
//! same with every driver of a device, and thus the same natively and through Gantry's driver.
//!
//! At first one thread does so and prints each line at once: if a driver ends the process, it was
//! in the call after the last line. Then four threads do so, each with two contexts of its own, and
//! must see the same results. Finally they share one context.

mod added;
#[path = "../device/mod.rs"]
mod device;
mod devices;
mod images;
mod kernels;
mod lifetimes;
mod more;
mod refusals;
mod together;

use std::{
    ffi::{CStr, c_void},
    fmt::Display,
    ptr::{null, null_mut},
    thread,
};

use device::{Device, cl};
use more::More;
use remoting_opencl::driver::api::Handle;

/// The number of threads.
const THREADS: usize = 4;

const SOURCE: &CStr = c"
kernel void add(global int *numbers, int more) {
    numbers[get_global_id(0)] += more;
}

kernel void pixels(read_only image2d_t image, sampler_t sampler, global uint4 *out) {
    out[get_global_id(0)] = read_imageui(image, sampler, (int2)(get_global_id(0), 1));
}
";

/// What one thread works with, and its report.
struct Part {
    device: Device,
    more: More,
    /// Another context of the device, with its queue.
    other: (Handle, Handle),
    program: Handle,
    lines: Vec<String>,
    /// Whether lines are printed immediately as well.
    aloud: bool,
}

impl Part {
    fn new() -> Result<Self, String> {
        let device = Device::open(None)?;
        let mut code = 0;
        let context = cl!(
            device.api,
            clCreateContext(
                null(),
                1,
                &raw const device.id,
                None,
                null_mut(),
                &raw mut code
            )
        );
        device::check(code, "creating another context")?;
        let queue = cl!(
            device.api,
            clCreateCommandQueue(context, device.id, 0, &raw mut code)
        );
        device::check(code, "creating its queue")?;
        let text = SOURCE.as_ptr();
        let program = cl!(
            device.api,
            clCreateProgramWithSource(device.context, 1, &raw const text, null(), &raw mut code)
        );
        device::check(code, "creating a program")?;
        device.build(program)?;
        Ok(Self {
            more: More::open()?,
            other: (context, queue),
            program,
            lines: Vec::new(),
            aloud: false,
            device,
        })
    }

    /// Reports the result of a call.
    fn say(&mut self, call: &str, gave: impl Display) {
        let line = format!("{call}: {gave}");
        if self.aloud {
            println!("{line}");
        }
        self.lines.push(line);
    }

    /// Reports the code of a call, and whether it returned an object.
    fn made(&mut self, call: &str, object: Handle, code: i32) -> Option<Handle> {
        let there = if object == 0 { "none" } else { "one" };
        self.say(call, format_args!("{code}, {there}"));
        (code == 0 && object != 0).then_some(object)
    }

    /// Creates a buffer of this context that contains these numbers.
    fn numbers(&self, context: Handle, numbers: &[i32]) -> Result<Handle, String> {
        let mut code = 0;
        let buffer = cl!(
            self.device.api,
            clCreateBuffer(
                context,
                remoting_proto::apis::opencl::codes::MEM_COPY_HOST_PTR,
                size_of_val(numbers),
                numbers.as_ptr().cast_mut().cast(),
                &raw mut code
            )
        );
        device::check(code, "creating a buffer")?;
        Ok(buffer)
    }

    /// Reads the start of a buffer, through a queue of its context.
    fn contents<const N: usize>(&self, queue: Handle, buffer: Handle) -> Result<[i32; N], String> {
        let mut numbers = [0i32; N];
        let to: *mut c_void = numbers.as_mut_ptr().cast();
        let read = cl!(
            self.device.api,
            clEnqueueReadBuffer(queue, buffer, 1, 0, N * 4, to, 0, null(), null_mut())
        );
        device::check(read, "reading a buffer")?;
        Ok(numbers)
    }
}

fn all(part: &mut Part) -> Result<(), String> {
    lifetimes::run(part)?;
    kernels::run(part)?;
    devices::run(part)?;
    images::run(part)?;
    refusals::run(part)
}

fn main() -> Result<(), String> {
    // Also because since PoCL 3.1 a device is set up on first use, which two threads must not do at
    // once.
    let mut first = Part::new()?;
    first.aloud = true;
    all(&mut first)?;
    let others = thread::scope(|scope| {
        let run = || {
            let mut part = Part::new()?;
            all(&mut part).map(|()| part.lines)
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run)).collect();
        let ends = threads.into_iter().map(|thread| match thread.join() {
            Ok(end) => end,
            Err(_) => Err("a thread has panicked".to_owned()),
        });
        ends.collect::<Result<Vec<_>, String>>()
    })?;
    for other in &others {
        for (line, first) in other.iter().zip(&first.lines) {
            if line != first {
                return Err(format!("one thread saw `{first}` and another one `{line}`"));
            }
        }
        if other.len() != first.lines.len() {
            let (one, other) = (first.lines.len(), other.len());
            return Err(format!(
                "one thread said {one} lines and another one {other}"
            ));
        }
    }
    println!("{THREADS} threads saw the same");
    together::run(&first, THREADS)?;
    println!("all");
    Ok(())
}
