//! What is measured, and how.

use alloc::{
    string::{String, ToString as _},
    sync::Arc,
    vec::Vec,
};

use gantry_remoting::{
    apis::opencl::{
        calls::{
            CreateBuffer, DeviceId, Finish, Grid, Info, KernelId, MemId, NdRange, ReadBuffer,
            SetArgument, Target, Value, WindowRange, WriteBuffer,
        },
        codes,
    },
    link::{bell::Bell, window::Window},
    wire::Blob,
};

use crate::{
    Connection, Failure,
    opened::{CONTEXT, QUEUE, open, order},
};

/// What the client needs besides the window.
pub trait Surroundings {
    /// Counts of the time stamp counter, or of another clock of about a gigahertz.
    fn now(&mut self) -> u64;
    /// Hands on what something is called.
    fn note(&mut self, what: &str, is: &str);
    /// Hands on how long one took of something that was measured, in counts: the median, and what
    /// 99 of 100 did not exceed.
    fn time(&mut self, what: &str, median: u64, most: u64);
    /// Hands on how many counts it took to copy so many bytes.
    fn copy(&mut self, what: &str, bytes: u64, median: u64);
    /// A stretch of [`COUNTED`] synchronous calls begins (`true`), or is over; there are two.
    fn counted(&mut self, begins: bool);
}

/// Calls in the stretch in which exits and system calls are counted.
pub const COUNTED: u32 = 10_000;

const SOURCE: &str = "
kernel void add(global const int *a, global const int *b, global int *sum) {
    size_t i = get_global_id(0);
    sum[i] = a[i] + b[i];
}
kernel void nothing(int a, int b) {}
";

const ADD: KernelId = KernelId(0);
const NOTHING: KernelId = KernelId(1);

/// Numbers that are added.
const NUMBERS: usize = 1 << 16;
/// Bytes of the buffers.
const BUFFER: u64 = 16 << 20;
/// Samples of each figure, if they can be had in [`LONGEST`].
const SAMPLES: usize = 400;
/// Samples in any case.
const FEWEST: usize = 20;
/// Counts after which there are samples enough: about a second.
const LONGEST: u64 = 2_500_000_000;
/// Sizes that are copied.
const COPIES: [u64; 4] = [4 << 10, 64 << 10, 1 << 20, BUFFER];

fn launch(kernel: KernelId, size: u64) -> NdRange {
    NdRange {
        order: order(),
        kernel,
        grid: Grid::line(size),
    }
}

fn argument(index: u32, value: i32) -> SetArgument {
    SetArgument {
        kernel: NOTHING,
        index,
        value: Value::Bytes(Blob(value.to_le_bytes().to_vec())),
    }
}

/// The median, and what 99 of 100 do not exceed; of one sample at least.
fn summary(mut samples: Vec<u64>) -> (u64, u64) {
    samples.sort_unstable();
    let count = samples.len();
    (samples[count / 2], samples[count * 99 / 100])
}

struct Bench<'a, B, S> {
    window: &'a Window,
    link: Connection<B>,
    here: &'a mut S,
}

impl<B: Bell + Clone, S: Surroundings> Bench<'_, B, S> {
    /// A stretch of the window's data, from `offset` of the data on.
    fn place(&self, offset: u64, length: u64) -> WindowRange {
        WindowRange {
            offset: self.window.data() + offset,
            length,
            stage: None,
        }
    }

    /// Opens the first device; its id.
    fn open(&mut self) -> Result<DeviceId, Failure> {
        let kernels = [(ADD, "add"), (NOTHING, "nothing")];
        let device = open(&mut self.link, SOURCE, kernels)?;
        let name = self.link.ask(&Info {
            of: Target::Device(device),
            parameter: codes::DEVICE_NAME,
        })?;
        let name = String::from_utf8_lossy(&name.0).to_string();
        self.here.note("device", name.trim_end_matches('\0'));
        for id in 0..3 {
            self.link.ask(&CreateBuffer {
                id: MemId(id),
                context: CONTEXT,
                flags: codes::MEM_READ_WRITE,
                size: BUFFER,
                contents: None,
                lives: None,
                svm: None,
            })?;
        }
        Ok(device)
    }

    /// Adds numbers on the device, and checks the sums.
    fn compute(&mut self) -> Result<(), Failure> {
        let bytes = NUMBERS as u64 * 4;
        let at = self.window.data();
        // The data holds three times the bytes by far: a window has at least 8 MiB.
        let Some(numbers) = self.window.at(at, 3 * bytes) else {
            return Err(Failure::NoDevice);
        };
        let numbers = numbers.cast::<i32>();
        for index in 0..NUMBERS {
            let value = index as i32;
            // SAFETY: within the window's data, of which the worker reads nothing yet.
            unsafe {
                numbers.add(index).write_volatile(value);
                numbers.add(NUMBERS + index).write_volatile(value * 3 + 1);
            }
        }
        for (mem, offset) in [(0, 0), (1, bytes)] {
            self.link.post(&WriteBuffer {
                order: order(),
                mem: MemId(mem),
                offset: 0,
                from: self.place(offset, bytes),
            })?;
        }
        for index in 0..3 {
            self.link.ask(&SetArgument {
                kernel: ADD,
                index,
                value: Value::Mem(Some(MemId(index))),
            })?;
        }
        self.link.post(&launch(ADD, NUMBERS as u64))?;
        self.link.ask(&ReadBuffer {
            order: order(),
            mem: MemId(2),
            offset: 0,
            to: self.place(2 * bytes, bytes),
        })?;
        for at in 0..NUMBERS {
            // SAFETY: as above; the read has completed.
            let sum = unsafe { numbers.add(2 * NUMBERS + at).read_volatile() };
            if sum != at as i32 * 4 + 1 {
                return Err(Failure::Wrong { at });
            }
        }
        self.here.note("computed", "65536 sums, all right");
        Ok(())
    }

    /// Counts that one of `batch` takes: the median of many, and what 99 of 100 do not exceed.
    fn sample(
        &mut self,
        batch: u32,
        mut work: impl FnMut(&mut Connection<B>) -> Result<(), Failure>,
    ) -> Result<(u64, u64), Failure> {
        let mut samples = Vec::with_capacity(SAMPLES);
        let begin = self.here.now();
        while self.goes_on(begin, samples.len()) {
            let start = self.here.now();
            for _ in 0..batch {
                work(&mut self.link)?;
            }
            samples.push(self.here.now().wrapping_sub(start) / u64::from(batch));
        }
        Ok(summary(samples))
    }

    /// Whether there are not samples enough.
    fn goes_on(&mut self, begin: u64, samples: usize) -> bool {
        let late = self.here.now().wrapping_sub(begin) > LONGEST;
        samples < FEWEST || (samples < SAMPLES && !late)
    }

    fn calls(&mut self, device: DeviceId) -> Result<(), Failure> {
        let ask = Info {
            of: Target::WorkGroup(NOTHING, Some(device)),
            parameter: codes::KERNEL_PREFERRED_WORK_GROUP_SIZE_MULTIPLE,
        };
        let (median, most) = self.sample(100, |link| link.ask(&ask).map(drop))?;
        self.here.time("synchronous call", median, most);
        // Once for each kind of thing that is counted: counting one would disturb the other.
        for _ in 0..2 {
            self.here.counted(true);
            for _ in 0..COUNTED {
                self.link.ask(&ask)?;
            }
            self.here.counted(false);
        }

        for index in 0..2 {
            self.link.ask(&argument(index, 1))?;
        }
        let finish = Finish { queue: QUEUE };
        let (median, most) = self.sample(10, |link| link.ask(&finish))?;
        self.here.time("finish of an idle queue", median, most);
        let kernel = launch(NOTHING, 1);
        // What a client spends on an enqueue that it does not wait for: both arguments change.
        let mut samples = Vec::with_capacity(SAMPLES);
        let begin = self.here.now();
        while self.goes_on(begin, samples.len()) {
            let round = samples.len() as i32;
            let start = self.here.now();
            for _ in 0..20 {
                self.link.post_with_next(&argument(0, round))?;
                self.link.post_with_next(&argument(1, -round))?;
                self.link.post(&kernel)?;
            }
            samples.push(self.here.now().wrapping_sub(start) / 20);
            self.link.ask(&finish)?;
        }
        let (median, most) = summary(samples);
        self.here.time(
            "client's time for an enqueue with 2 arguments",
            median,
            most,
        );
        let (median, most) = self.sample(5, |link| {
            link.post(&kernel)?;
            link.ask(&finish)
        })?;
        self.here.time("enqueue + finish", median, most);
        // Calls that nobody waits for, as fast as the worker takes them: the ring fills up.
        let (median, most) = self.sample(1, |link| {
            for value in 0..2000 {
                link.post(&argument(0, value))?;
            }
            link.ask(&ask).map(drop)
        })?;
        self.here
            .time("2000 posted calls and an answer", median, most);
        Ok(())
    }

    fn copies(&mut self) -> Result<(), Failure> {
        let mut sizes: Vec<_> = COPIES.into_iter().collect();
        sizes.retain(|size| self.window.data() + size <= self.window.size());
        for size in sizes {
            let write = WriteBuffer {
                order: order(),
                mem: MemId(0),
                offset: 0,
                from: self.place(0, size),
            };
            let read = ReadBuffer {
                order: order(),
                mem: MemId(0),
                offset: 0,
                to: self.place(0, size),
            };
            let mut samples = [const { Vec::new() }; 2];
            let begin = self.here.now();
            while self.goes_on(begin, samples[0].len()) {
                let start = self.here.now();
                self.link.ask(&write)?;
                let half = self.here.now();
                self.link.ask(&read)?;
                samples[0].push(half.wrapping_sub(start));
                samples[1].push(self.here.now().wrapping_sub(half));
            }
            for (what, samples) in ["write", "read"].into_iter().zip(samples) {
                self.here.copy(what, size, summary(samples).0);
            }
        }
        Ok(())
    }
}

/// Computes, checks and measures over a window whose worker has answered the hello.
pub fn run<B: Bell + Clone, S: Surroundings>(
    window: &Arc<Window>,
    bell: B,
    here: &mut S,
) -> Result<(), Failure> {
    let mut bench = Bench {
        window,
        link: Connection::new(window, bell),
        here,
    };
    let device = bench.open()?;
    bench.compute()?;
    bench.calls(device)?;
    bench.copies()
}
