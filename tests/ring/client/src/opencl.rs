//! The OpenCL measurements.

use alloc::{
    string::{String, ToString as _},
    sync::Arc,
    vec::Vec,
};

use remoting_proto::{
    apis::opencl::{
        calls::{
            CreateBuffer, DeviceId, Finish, Grid, Info, KernelId, MemId, NdRange, ReadBuffer,
            SetArgument, Target, Value, WriteBuffer,
        },
        codes,
    },
    wire::Blob,
};
use remoting_transport::{bell::Bell, window::Window};

use crate::{
    Connection, Failure, Surroundings,
    bench::{Direction, Samples, copies, count, time},
    connection::place,
    opened::{CONTEXT, QUEUE, open, order},
};

/// The kinds of calls for which exits and system calls are counted.
pub const KINDS: [&str; 1] = ["synchronous calls"];

const SOURCE: &str = "
kernel void add(global const int *a, global const int *b, global int *sum) {
    size_t i = get_global_id(0);
    sum[i] = a[i] + b[i];
}
kernel void nothing(int a, int b) {}
";

const ADD: KernelId = KernelId(0);
const NOTHING: KernelId = KernelId(1);

/// Count of numbers to add.
const NUMBERS: usize = 1 << 16;
/// Size of the buffers in bytes.
const BUFFER: u64 = 16 << 20;
/// Sizes of copies in bytes.
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

struct Bench<'a, B, S> {
    window: &'a Window,
    link: Connection<B>,
    here: &'a mut S,
}

impl<B: Bell + Clone, S: Surroundings> Bench<'_, B, S> {
    /// Opens the first device, and returns its ID.
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
        // The data has far more than three times these bytes: a window has at least 8 MiB.
        let Some(numbers) = self.window.at(at, 3 * bytes) else {
            return Err(Failure::NoDevice);
        };
        let numbers = numbers.cast::<i32>();
        for index in 0..NUMBERS {
            let value = index as i32;
            // SAFETY: within the window's data, which the worker does not read yet.
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
                from: place(self.window, offset, bytes),
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
            to: place(self.window, 2 * bytes, bytes),
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

    fn calls(&mut self, device: DeviceId) -> Result<(), Failure> {
        let (link, here) = (&mut self.link, &mut *self.here);
        let ask = Info {
            of: Target::WorkGroup(NOTHING, Some(device)),
            parameter: codes::KERNEL_PREFERRED_WORK_GROUP_SIZE_MULTIPLE,
        };
        time(here, "synchronous call", 100, || link.ask(&ask).map(drop))?;
        count(here, || link.ask(&ask).map(drop))?;

        for index in 0..2 {
            link.ask(&argument(index, 1))?;
        }
        let finish = Finish { queue: QUEUE };
        time(here, "finish of an idle queue", 10, || link.ask(&finish))?;
        let kernel = launch(NOTHING, 1);
        // The client's cost of an enqueue that it does not wait for. Both arguments change.
        let mut samples = Samples::new(here);
        while samples.goes_on(here) {
            let round = samples.count() as i32;
            let start = here.now();
            for _ in 0..20 {
                link.post_with_next(&argument(0, round))?;
                link.post_with_next(&argument(1, -round))?;
                link.post(&kernel)?;
            }
            samples.add([here.now().wrapping_sub(start) / 20]);
            link.ask(&finish)?;
        }
        let [(median, most)] = samples.summaries();
        here.time(
            "client's time for an enqueue with 2 arguments",
            median,
            most,
        );
        time(here, "enqueue + finish", 5, || {
            link.post(&kernel)?;
            link.ask(&finish)
        })?;
        // Calls without a wait, as fast as the worker takes them: the ring fills up.
        time(here, "2000 posted calls and an answer", 1, || {
            for value in 0..2000 {
                link.post(&argument(0, value))?;
            }
            link.ask(&ask).map(drop)
        })
    }

    fn copies(&mut self) -> Result<(), Failure> {
        let window = self.window;
        let sizes: Vec<_> = COPIES
            .into_iter()
            .filter(|size| window.data() + size <= window.size())
            .collect();
        let link = &mut self.link;
        copies(self.here, &sizes, |direction, size| {
            let place = place(window, 0, size);
            let (order, mem, offset) = (order(), MemId(0), 0);
            match direction {
                Direction::Write => link.ask(&WriteBuffer {
                    order,
                    mem,
                    offset,
                    from: place,
                }),
                Direction::Read => link.ask(&ReadBuffer {
                    order,
                    mem,
                    offset,
                    to: place,
                }),
            }
        })
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
