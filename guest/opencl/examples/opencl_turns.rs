//! Keeps a device busy: `opencl_turns MICROSECONDS IN_FLIGHT SECONDS` enqueues kernels that take
//! about so long when nothing else runs, so many at a time, for so many seconds.
//!
//! Prints `running` when it is ready, waits for a line of input, and prints the number of kernels,
//! the time they took in seconds, and how long one takes alone in microseconds: or `error` and
//! the code of the call that failed. No seconds: until it is killed. Zero microseconds: a kernel
//! that never ends.

use std::{
    collections::VecDeque,
    ffi::c_void,
    ptr::{null, null_mut},
    time::{Duration, Instant},
};

use gantry_remoting::opencl::{Api, codes};

const SOURCE: &std::ffi::CStr = c"
kernel void work(global float *out, int count) {
    float x = out[0];
    for (int i = 0; i != count; i++) x = x * 0.999f + 0.5f;
    out[0] = x;
}
kernel void endless(global volatile float *out, int count) {
    while (out[0] == 1.0f) ;
}
";

/// Calls the driver.
macro_rules! cl {
    ($api:expr, $name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: handles are live until the end of the program, and pointers are to locals of the
        // sizes that are passed beside them.
        unsafe { $api.$name($($arg),*) }
    };
}

fn check(code: i32) -> Result<(), i32> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// A queue and a kernel whose iterations are set.
struct Work {
    api: Api,
    queue: usize,
    kernel: usize,
}

impl Work {
    fn open(api: Api, name: &std::ffi::CStr) -> Result<Self, i32> {
        let (mut platform, mut device, mut code) = (0, 0, 0);
        check(cl!(api, clGetPlatformIDs(1, &raw mut platform, null_mut())))?;
        let all = u64::from(u32::MAX);
        check(cl!(
            api,
            clGetDeviceIDs(platform, all, 1, &raw mut device, null_mut())
        ))?;
        let context = cl!(
            api,
            clCreateContext(
                null(),
                1,
                &raw const device,
                None,
                null_mut(),
                &raw mut code
            )
        );
        check(code)?;
        let queue = cl!(api, clCreateCommandQueue(context, device, 0, &raw mut code));
        check(code)?;
        let (text, length) = (SOURCE.as_ptr(), SOURCE.count_bytes());
        let program = cl!(
            api,
            clCreateProgramWithSource(
                context,
                1,
                &raw const text,
                &raw const length,
                &raw mut code
            )
        );
        check(code)?;
        check(cl!(
            api,
            clBuildProgram(program, 0, null(), c"".as_ptr(), None, null_mut())
        ))?;
        let kernel = cl!(api, clCreateKernel(program, name.as_ptr(), &raw mut code));
        check(code)?;
        let mut one = 1f32;
        let flags = codes::MEM_COPY_HOST_PTR;
        let values = cl!(
            api,
            clCreateBuffer(context, flags, 4, (&raw mut one).cast(), &raw mut code)
        );
        check(code)?;
        let pointer: *const c_void = (&raw const values).cast();
        check(cl!(
            api,
            clSetKernelArg(kernel, 0, size_of::<usize>(), pointer)
        ))?;
        Ok(Self { api, queue, kernel })
    }

    fn set(&self, count: i32) -> Result<(), i32> {
        let pointer: *const c_void = (&raw const count).cast();
        check(cl!(self.api, clSetKernelArg(self.kernel, 1, 4, pointer)))
    }

    fn enqueue(&self) -> Result<usize, i32> {
        let (mut event, size) = (0, 1usize);
        check(cl!(
            self.api,
            clEnqueueNDRangeKernel(
                self.queue,
                self.kernel,
                1,
                null(),
                &raw const size,
                null(),
                0,
                null(),
                &raw mut event,
            )
        ))?;
        Ok(event)
    }

    fn wait(&self, event: usize) -> Result<(), i32> {
        check(cl!(self.api, clWaitForEvents(1, &raw const event)))?;
        check(cl!(self.api, clReleaseEvent(event)))
    }

    /// How long so many iterations take: the shortest of several, since others may use the device.
    fn time(&self, count: i32) -> Result<Duration, i32> {
        self.set(count)?;
        let mut shortest = Duration::MAX;
        for _ in 0..5 {
            let start = Instant::now();
            self.wait(self.enqueue()?)?;
            shortest = shortest.min(start.elapsed());
        }
        Ok(shortest)
    }
}

fn run(micros: u64, in_flight: usize, seconds: f64) -> Result<(), i32> {
    let loader = std::env::var("OPENCL_LOADER");
    let loader = loader.as_deref().unwrap_or("libOpenCL.so.1");
    // -1001 is what loaders answer if there is no platform.
    let api = Api::open(loader).map_err(|_| -1001)?;
    let name = if micros == 0 { c"endless" } else { c"work" };
    let work = Work::open(api, name)?;
    let mut alone = Duration::ZERO;
    if micros == 0 {
        work.set(0)?;
    } else {
        let (small, large) = (200_000, 4_200_000);
        let difference = work.time(large)?.saturating_sub(work.time(small)?);
        let nanos = difference.as_nanos().max(1) as f64 / f64::from(large - small);
        work.set((micros as f64 * 1e3 / nanos) as i32)?;
        alone = Duration::from_nanos((nanos * (micros as f64 * 1e3 / nanos).floor()) as u64);
    }
    println!("running");
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
    let (mut events, mut done, start) = (VecDeque::new(), 0u64, Instant::now());
    while seconds == 0.0 || start.elapsed().as_secs_f64() < seconds {
        while events.len() < in_flight {
            events.push_back(work.enqueue()?);
        }
        if let Some(event) = events.pop_front() {
            work.wait(event)?;
            done += 1;
        }
    }
    println!(
        "{done} {:.3} {:.1}",
        start.elapsed().as_secs_f64(),
        alone.as_secs_f64() * 1e6
    );
    Ok(())
}

fn main() {
    let numbers: Vec<f64> = std::env::args()
        .skip(1)
        .filter_map(|argument| argument.parse().ok())
        .collect();
    let &[micros, in_flight, seconds] = &numbers[..] else {
        eprintln!("usage: opencl_turns MICROSECONDS IN_FLIGHT SECONDS");
        std::process::exit(2);
    };
    if let Err(code) = run(micros as u64, (in_flight as usize).max(1), seconds) {
        println!("error {code}");
    }
}
