//! Computes round after round on a given amount of device memory, and reports on demand how long
//! its rounds took: `opencl_pauses MIB CHANGED`. CHANGED MiB of the memory change in each round. If
//! CHANGED is 0, one buffer of 4 MiB changes, a different one in each round, so that all of the
//! memory changes over time.
//!
//! Each input line is answered by one line about the rounds since the last one: their number, their
//! total time in seconds, and the longest and the median round in milliseconds. When the input
//! ends, all of the memory is compared with its expected contents: `right after ROUNDS rounds`, or
//! an error.

use std::{
    env,
    io::{BufRead, Write, stdin, stdout},
    ptr::{null, null_mut},
    sync::mpsc::{self, TryRecvError},
    thread,
    time::{Duration, Instant},
};

use device::{Device, check, cl};
use remoting_opencl::driver::api::Handle;
use remoting_proto::apis::opencl::codes;

mod device;

const MIB: usize = 1 << 20;
/// The number of words in a buffer. As in most programs, there are several buffers.
const WORDS: usize = 4 * MIB / size_of::<u32>();
const SOURCE: &std::ffi::CStr = c"kernel void fill(global uint* a, uint first) {
    size_t i = get_global_id(0);
    a[i] = (first + (uint)i) * 2654435761u;
}
kernel void advance(global uint* a, uint step) {
    a[get_global_id(0)] += step;
}";

/// The computation.
struct Work {
    device: Device,
    kernel: Handle,
    buffers: Vec<Handle>,
    /// The number of words that change in a round, from the first one on. 0: those of the next
    /// buffer.
    changed: usize,
    rounds: u32,
}

impl Work {
    fn start(size: usize, changed: usize) -> Result<Self, String> {
        let device = Device::open(None)?;
        let [fill, kernel] = device.kernels(SOURCE, [c"fill", c"advance"])?;
        let count = (size * MIB).div_ceil(WORDS * size_of::<u32>());
        let mut buffers = Vec::with_capacity(count);
        for index in 0..count {
            let bytes = WORDS * size_of::<u32>();
            let buffer = device.buffer(codes::MEM_READ_WRITE, bytes, null_mut())?;
            device.set(fill, 0, buffer)?;
            device.set(fill, 1, (index * WORDS) as u32)?;
            let filled = device.enqueue(device.queue, fill, WORDS, null_mut());
            check(filled, "filling a buffer")?;
            buffers.push(buffer);
        }
        let changed = match changed {
            0 => 0,
            changed => (changed * MIB / size_of::<u32>()).clamp(1024, count * WORDS),
        };
        Ok(Self {
            device,
            kernel,
            buffers,
            changed,
            rounds: 0,
        })
    }

    /// The number of words of a buffer that change in a round.
    fn changing(&self, index: usize, round: u32) -> usize {
        match self.changed {
            0 if round as usize % self.buffers.len() == index => WORDS,
            0 => 0,
            changed => changed.saturating_sub(index * WORDS).min(WORDS),
        }
    }

    fn round(&mut self) -> Result<(), String> {
        self.rounds += 1;
        let (device, kernel) = (&self.device, self.kernel);
        for (index, &buffer) in self.buffers.iter().enumerate() {
            let words = self.changing(index, self.rounds);
            if words == 0 {
                continue;
            }
            device.set(kernel, 0, buffer)?;
            device.set(kernel, 1, self.rounds)?;
            let enqueued = device.enqueue(device.queue, kernel, words, null_mut());
            check(enqueued, "running a kernel")?;
        }
        let finished = cl!(device.api, clFinish(device.queue));
        Ok(check(finished, "waiting for a kernel")?)
    }

    /// Checks that all of the memory has its expected contents.
    fn verify(&self) -> Result<(), String> {
        let mut seen = vec![0u32; WORDS];
        for (index, buffer) in self.buffers.iter().enumerate() {
            let (bytes, to) = (WORDS * size_of::<u32>(), seen.as_mut_ptr().cast());
            let (queue, none, event) = (self.device.queue, null(), null_mut());
            let read = cl!(
                self.device.api,
                clEnqueueReadBuffer(queue, *buffer, 1, 0, bytes, to, 0, none, event)
            );
            check(read, "reading a buffer")?;
            let rounds = (1..=self.rounds).filter(|round| self.changing(index, *round) > 0);
            let sum = rounds.fold(0, u32::wrapping_add);
            let changed = match self.changed {
                0 => WORDS,
                _ => self.changing(index, 0),
            };
            for (at, word) in seen.iter().enumerate() {
                let first = ((index * WORDS + at) as u32).wrapping_mul(2_654_435_761);
                let expected = first.wrapping_add(if at < changed { sum } else { 0 });
                if *word != expected {
                    return Err(format!(
                        "word {at} of buffer {index} is {word:#x} after {} rounds, not \
                         {expected:#x}",
                        self.rounds
                    ));
                }
            }
        }
        Ok(())
    }
}

fn main() -> Result<(), String> {
    let mut arguments = env::args().skip(1);
    let mut number = |what: &str| {
        let word = arguments.next();
        let number = word.and_then(|word| word.parse().ok());
        number.ok_or_else(|| format!("say how many MiB {what}"))
    };
    let mut work = Work::start(number("there are")?, number("change in a round")?)?;
    let (asked, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in stdin().lock().lines() {
            if line.is_err() || asked.send(()).is_err() {
                return;
            }
        }
    });
    tell("running")?;
    let (mut since, mut times) = (Instant::now(), Vec::new());
    loop {
        let start = Instant::now();
        work.round()?;
        times.push(start.elapsed());
        match lines.try_recv() {
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => break,
            Ok(()) => {
                let seconds = since.elapsed().as_secs_f64();
                let count = times.len();
                times.sort_unstable();
                let millis = |time: Duration| time.as_secs_f64() * 1e3;
                let (longest, median) = (millis(times[count - 1]), millis(times[count / 2]));
                tell(&format!("{count} {seconds:.6} {longest:.3} {median:.4}"))?;
                (since, times) = (Instant::now(), Vec::new());
            }
        }
    }
    work.verify()?;
    tell(&format!("right after {} rounds", work.rounds))
}

fn tell(text: &str) -> Result<(), String> {
    let mut out = stdout().lock();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .map_err(|error| error.to_string())
}
