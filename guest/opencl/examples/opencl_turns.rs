//! Keeps a device busy: `opencl_turns MICROSECONDS IN_FLIGHT SECONDS [NANOSECONDS]` enqueues
//! kernels that take about MICROSECONDS when nothing else runs, IN_FLIGHT at a time, for SECONDS.
//! Several lengths (`20,400,8000`) are mixed at random. The duration of an iteration of a kernel is
//! measured first, unless it is given (NANOSECONDS).
//!
//! With `OPENCL_TURNS_THINK=MICROSECONDS` it runs a closed loop, as solvers and training steps do:
//! it enqueues IN_FLIGHT kernels, waits for all of them, sleeps for this time (0: not at all), and
//! starts again. It then also prints, after everything else, the 99th percentile of the duration of
//! such a batch in seconds.
//!
//! `OPENCL_TURNS_BINARY` names a file for the compiled kernels. It is written if it does not exist;
//! if it exists, nothing is compiled.
//!
//! When it is ready, it prints `running` and the nanoseconds of an iteration, and waits for a line
//! of input. At the end it prints the number of kernels and, in seconds, the time that they took,
//! the time that they take when nothing else runs, the longest time between the ends of two kernels
//! and, if `OPENCL_TURNS_PROFILE` is set, the time that they took by the device's clock. On an
//! error it prints `error`, a code and what failed with it. Zero seconds: until its input ends.
//! Zero microseconds: a kernel that never ends.

use std::{
    collections::VecDeque,
    path::PathBuf,
    ptr::null_mut,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use device::{Device, Failed, check, cl};
use remoting_proto::apis::opencl::codes;

mod device;

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

/// Kernels of one length.
#[derive(Clone, Copy)]
struct Length {
    iterations: i32,
    alone: Duration,
}

/// A device and the kernel that is enqueued.
struct Work {
    device: Device,
    kernel: usize,
    /// Whether the device measures the commands' times.
    profiled: bool,
}

impl Work {
    fn open(name: &std::ffi::CStr) -> Result<Self, Failed> {
        let mut device = Device::open(None)?;
        let profiled = std::env::var_os("OPENCL_TURNS_PROFILE").is_some();
        if profiled {
            let (mut code, timed) = (0, codes::QUEUE_PROFILING_ENABLE);
            let (context, id) = (device.context, device.id);
            let queue = cl!(
                device.api,
                clCreateCommandQueue(context, id, timed, &raw mut code)
            );
            check(code, "creating a queue")?;
            device.queue = queue;
        }
        let file = std::env::var_os("OPENCL_TURNS_BINARY").map(PathBuf::from);
        let [kernel] = device.kernels_kept(file.as_deref(), SOURCE, [name])?;
        let mut one = 1f32;
        let flags = codes::MEM_COPY_HOST_PTR;
        let values = device.buffer(flags, 4, (&raw mut one).cast())?;
        device.set(kernel, 0, values)?;
        let work = Self {
            device,
            kernel,
            profiled,
        };
        if let Some(file) = file.filter(|file| !file.exists()) {
            work.wait(work.enqueue(1)?)?;
            work.device.keep(&file, kernel)?;
        }
        Ok(work)
    }

    fn enqueue(&self, iterations: i32) -> Result<usize, Failed> {
        self.device.set(self.kernel, 1, iterations)?;
        let mut event = 0;
        let queue = self.device.queue;
        let enqueued = self.device.enqueue(queue, self.kernel, 1, &raw mut event);
        check(enqueued, "enqueuing")?;
        Ok(event)
    }

    /// Waits for a kernel. Returns its duration by the device's clock, if that is requested.
    fn wait(&self, event: usize) -> Result<Duration, Failed> {
        let api = &self.device.api;
        check(cl!(api, clWaitForEvents(1, &raw const event)), "waiting")?;
        let mut times = [0u64; 2];
        if self.profiled {
            let names = [codes::PROFILING_COMMAND_START, codes::PROFILING_COMMAND_END];
            for (name, time) in names.into_iter().zip(&mut times) {
                let value = (&raw mut *time).cast();
                let got = cl!(
                    api,
                    clGetEventProfilingInfo(event, name, 8, value, null_mut())
                );
                check(got, "asking for a time")?;
            }
        }
        check(cl!(api, clReleaseEvent(event)), "releasing")?;
        Ok(Duration::from_nanos(times[1].saturating_sub(times[0])))
    }

    /// The duration of this many iterations: the minimum of several runs, since others may use the
    /// device.
    fn time(&self, iterations: i32) -> Result<Duration, Failed> {
        let mut shortest = Duration::MAX;
        for _ in 0..5 {
            let start = Instant::now();
            self.wait(self.enqueue(iterations)?)?;
            shortest = shortest.min(start.elapsed());
        }
        Ok(shortest)
    }

    /// The duration of an iteration in nanoseconds.
    fn iteration(&self) -> Result<f64, Failed> {
        let (small, large) = (200_000, 4_200_000);
        let (mut short, mut long) = (Duration::MAX, Duration::MAX);
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until {
            (short, long) = (short.min(self.time(small)?), long.min(self.time(large)?));
            // On a busy machine the short run may have waited for longer than the long one ran.
            if long > short * 4 {
                return Ok((long - short).as_nanos() as f64 / f64::from(large - small));
            }
        }
        Err(Failed {
            what: "measuring on a busy machine",
            code: codes::OUT_OF_RESOURCES,
        })
    }
}

fn run(
    micros: &[u64],
    in_flight: usize,
    seconds: f64,
    iteration: Option<f64>,
) -> Result<(), Failed> {
    let endless = micros == [0];
    let work = Work::open(if endless { c"endless" } else { c"work" })?;
    let mut lengths = vec![Length {
        iterations: 0,
        alone: Duration::ZERO,
    }];
    let mut nanos = 0.0;
    if !endless {
        nanos = iteration.map_or_else(|| work.iteration(), Ok)?;
        let length = |&micros: &u64| {
            let iterations = (micros as f64 * 1e3 / nanos).max(1.0) as i32;
            let alone = Duration::from_nanos((f64::from(iterations) * nanos) as u64);
            Length { iterations, alone }
        };
        lengths = micros.iter().map(length).collect();
    }
    println!("running {nanos:.4}");
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
    let (mut events, mut done, mut alone) = (VecDeque::new(), 0u64, Duration::ZERO);
    let ended = Arc::new(AtomicBool::new(false));
    let end = Arc::clone(&ended);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        end.store(true, Ordering::Relaxed);
    });
    // Machines that were restored from one snapshot have the same process IDs.
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let clock = clock.map_or(0, |clock| clock.as_nanos() as u64);
    let (mut random, start) = (clock ^ u64::from(std::process::id()), Instant::now());
    let (mut last, mut pause, mut timed) = (start, Duration::ZERO, Duration::ZERO);
    let goes_on = || match seconds {
        0.0 => !ended.load(Ordering::Relaxed),
        seconds => start.elapsed().as_secs_f64() < seconds,
    };
    let think = std::env::var("OPENCL_TURNS_THINK").ok();
    let think = think.and_then(|micros| micros.parse().ok().map(Duration::from_micros));
    let (mut begun, mut batches) = (start, Vec::new());
    while goes_on() {
        // A closed loop starts again when all kernels are done.
        let begins = think.is_none() || events.is_empty();
        while begins && events.len() < in_flight {
            // Knuth's linear congruential generator, whose high bits are the better ones.
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let length = lengths[(random >> 33) as usize % lengths.len()];
            events.push_back((work.enqueue(length.iterations)?, length.alone));
        }
        if let Some((event, length)) = events.pop_front() {
            timed += work.wait(event)?;
            done += 1;
            alone += length;
            let now = Instant::now();
            pause = pause.max(now - last);
            last = now;
        }
        if let Some(think) = think.filter(|_| events.is_empty()) {
            batches.push(begun.elapsed());
            if !think.is_zero() {
                std::thread::sleep(think);
            }
            begun = Instant::now();
        }
    }
    batches.sort_unstable();
    let slowest = batches.get(batches.len().saturating_sub(1) * 99 / 100);
    let slowest = slowest.map(|time| format!(" {:.6}", time.as_secs_f64()));
    println!(
        "{done} {:.3} {:.3} {:.3} {:.3}{}",
        start.elapsed().as_secs_f64(),
        alone.as_secs_f64(),
        pause.as_secs_f64(),
        timed.as_secs_f64(),
        slowest.unwrap_or_default()
    );
    Ok(())
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = arguments.get(3).and_then(|nanos| nanos.parse().ok());
    let parsed = match &arguments[..] {
        [micros, in_flight, seconds] | [micros, in_flight, seconds, _] => micros
            .split(',')
            .map(str::parse)
            .collect::<Result<Vec<u64>, _>>()
            .ok()
            .zip(in_flight.parse::<usize>().ok())
            .zip(seconds.parse::<f64>().ok()),
        _ => None,
    };
    let Some(((micros, in_flight), seconds)) = parsed else {
        eprintln!(
            "usage: opencl_turns MICROSECONDS[,MICROSECONDS...] IN_FLIGHT SECONDS [NANOSECONDS]"
        );
        std::process::exit(2);
    };
    if let Err(failed) = run(&micros, in_flight.max(1), seconds, given) {
        println!("error {} {}", failed.code, failed.what);
    }
}
