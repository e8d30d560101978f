//! What a process does whose time slices are tried: kernels that say how far they are and whose results are known.
//!
//! It reads commands, one a line, and answers each with a line: `ok` and a number, or `failed` and why.

use std::{
    collections::BTreeSet,
    ffi::{c_int, c_void},
    io::{self, BufRead, Write},
    ptr::null_mut,
    str::FromStr,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use base::{Chain, gpus::Choice};
use cuda_definition::driver::types::*;

use remoting_timeslice::{
    Context, Error, Gate, Machine, Slice, Stopped, of_this_process, switches::Switches,
};

use crate::{driver::Api, probe::ask, start::devices};

/// A kernel whose threads each advance a generator of numbers, in registers and through shared memory, until a word of
/// the page is not 0. Its first thread counts rounds in the word behind that one. Results: rounds and number, by thread.
const KERNEL: &[u8] = b".version 6.0\n.target sm_50\n.address_size 64\n\
    .visible .entry spin(.param .u64 page, .param .u64 results)\n{\n\
    .reg .pred %p<4>;\n.reg .b32 %r<11>;\n.reg .b64 %rd<4>;\n\
    .shared .align 4 .b32 ended;\n.shared .align 4 .b8 kept[1024];\n\
    ld.param.u64 %rd1, [page];\nld.param.u64 %rd2, [results];\n\
    cvta.to.global.u64 %rd1, %rd1;\ncvta.to.global.u64 %rd2, %rd2;\n\
    mov.u32 %r1, %tid.x;\nmov.u32 %r2, %ctaid.x;\nmov.u32 %r3, %ntid.x;\n\
    mad.lo.u32 %r4, %r2, %r3, %r1;\nmov.u32 %r5, %r4;\nmov.u32 %r6, 0;\n\
    mov.u32 %r9, kept;\nshl.b32 %r10, %r1, 2;\nadd.u32 %r9, %r9, %r10;\n\
    setp.ne.u32 %p2, %r1, 0;\nsetp.ne.u32 %p3, %r4, 0;\n\
    ROUND:\nmov.u32 %r7, 0;\n\
    STEP:\nmad.lo.u32 %r5, %r5, 1664525, 1013904223;\nadd.u32 %r7, %r7, 1;\n\
    setp.lt.u32 %p1, %r7, 4096;\n@%p1 bra STEP;\n\
    add.u32 %r6, %r6, 1;\nst.volatile.shared.u32 [%r9], %r5;\n\
    @%p2 bra WAIT;\nld.volatile.global.u32 %r8, [%rd1];\nst.volatile.shared.u32 [ended], %r8;\n\
    @%p3 bra WAIT;\nst.volatile.global.u32 [%rd1+4], %r6;\n\
    WAIT:\nbar.sync 0;\nld.volatile.shared.u32 %r8, [ended];\nld.volatile.shared.u32 %r5, [%r9];\nbar.sync 0;\n\
    setp.eq.u32 %p1, %r8, 0;\n@%p1 bra ROUND;\n\
    mul.wide.u32 %rd3, %r4, 8;\nadd.s64 %rd2, %rd2, %rd3;\n\
    st.global.u32 [%rd2], %r6;\nst.global.u32 [%rd2+4], %r5;\nret;\n}\n\0";
/// The generator, and its steps in a round.
const FACTOR: u32 = 1_664_525;
const ADDEND: u32 = 1_013_904_223;
const STEPS: u32 = 4096;
/// Threads of a block, as many as the kernel has shared memory for.
const THREADS: u32 = 256;
const MULTIPROCESSORS: CUdevice_attribute_enum = CUdevice_attribute_enum(16);

/// Bytes of the largest copy of a soak.
const COPY: usize = 4 << 20;

/// The blocks of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// One.
    One,
    /// One for each multiprocessor.
    Full,
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Starts the kernel, which does not end by itself.
    Spin(Grid),
    /// How many rounds the kernel has done.
    Count,
    /// Sets the time slice, in microseconds. Answers with the microseconds that it took.
    Slice(u32),
    /// Stops the context. Answers likewise.
    Stop,
    /// Renews the stop. Answers 1 if the context is still stopped, and 0 if not.
    Renew,
    /// Starts the context. Answers with the microseconds that it took.
    Start,
    /// Ends the kernel, and checks its results. Answers with the number of rounds.
    End,
    /// Runs kernels of one round for this many milliseconds, and waits for each. Answers with their number.
    Short(u32),
    /// Stops and starts the context so often, while memory is allocated and freed, copied and compared, and kernels run.
    /// Answers with the number of rounds of that.
    Soak(u32),
    /// Answers with the microseconds that the GPU's record of context switches has for this process, beside others.
    Used,
    /// Destroys the context, whose kernel ends as soon as it is started, and creates another. Answers with the
    /// microseconds that destroying took.
    Remake,
    /// The same on another GPU, by its number among those that are tried.
    Gpu(u32),
}

/// An unknown command.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown command {0:?}")]
pub struct Unknown(String);

impl std::fmt::Display for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Spin(Grid::One) => f.write_str("spin one"),
            Self::Spin(Grid::Full) => f.write_str("spin full"),
            Self::Count => f.write_str("count"),
            Self::Slice(micros) => write!(f, "slice {micros}"),
            Self::Stop => f.write_str("stop"),
            Self::Renew => f.write_str("renew"),
            Self::Start => f.write_str("start"),
            Self::End => f.write_str("end"),
            Self::Short(millis) => write!(f, "short {millis}"),
            Self::Soak(count) => write!(f, "soak {count}"),
            Self::Used => f.write_str("used"),
            Self::Remake => f.write_str("remake"),
            Self::Gpu(number) => write!(f, "gpu {number}"),
        }
    }
}

impl FromStr for Command {
    type Err = Unknown;

    fn from_str(line: &str) -> Result<Self, Unknown> {
        let unknown = || Unknown(line.to_owned());
        let (word, number) = line.split_once(' ').unwrap_or((line, ""));
        let number = || number.parse().map_err(|_| unknown());
        Ok(match word {
            "slice" => Self::Slice(number()?),
            "short" => Self::Short(number()?),
            "soak" => Self::Soak(number()?),
            "gpu" => Self::Gpu(number()?),
            _ => match line {
                "spin one" => Self::Spin(Grid::One),
                "spin full" => Self::Spin(Grid::Full),
                "remake" => Self::Remake,
                "used" => Self::Used,
                "count" => Self::Count,
                "stop" => Self::Stop,
                "renew" => Self::Renew,
                "start" => Self::Start,
                "end" => Self::End,
                _ => return Err(unknown()),
            },
        })
    }
}

/// Memory that the kernel reads and writes: whether it ends, and its rounds.
#[repr(align(4096))]
struct Page([AtomicU32; 1024]);

static PAGE: Page = Page([const { AtomicU32::new(0) }; 1024]);

impl Page {
    fn ends(&self) -> &AtomicU32 {
        &self.0[0]
    }

    fn rounds(&self) -> &AtomicU32 {
        &self.0[1]
    }
}

/// A process with a context and the kernel.
struct Trial {
    api: Api,
    gate: &'static Gate<Machine>,
    stopped: Option<Stopped<Machine>>,
    switches: Switches,
    /// The blocks of the last kernel.
    blocks: u32,
    /// The driver's numbers of the GPUs that are tried, and of the one that the context is on.
    gpus: Vec<c_int>,
    gpu: c_int,
    work: Work,
}

/// What is made in a context.
struct Work {
    context: Context,
    function: CUfunction,
    multiprocessors: u32,
    results: CUdeviceptr,
}

/// Serves commands until there are no more, at first on the first of these GPUs, whose number is the first answer. `library` is
/// the driver's.
///
/// # Errors
/// An answer cannot be written.
pub fn serve(
    library: &str,
    gpus: &Choice,
    input: impl BufRead,
    output: &mut impl Write,
) -> io::Result<()> {
    let mut trial = match Trial::new(library, gpus) {
        Ok(trial) => trial,
        Err(why) => return writeln!(output, "failed {why}"),
    };
    writeln!(output, "ok {}", trial.gpus.len())?;
    for line in input.lines() {
        let command: Result<Command, Unknown> = line?.parse();
        let answer = match command {
            Ok(command) => trial.obey(command),
            Err(unknown) => Err(unknown.to_string()),
        };
        match answer {
            Ok(number) => writeln!(output, "ok {number}")?,
            Err(why) => writeln!(output, "failed {why}")?,
        }
    }
    Ok(())
}

/// The duration of a call in microseconds, and its result.
fn timed<T>(call: impl FnOnce() -> T) -> (u64, T) {
    let begin = Instant::now();
    let result = call();
    // Lossless for half a million years.
    (begin.elapsed().as_micros() as u64, result)
}

impl Work {
    fn new(api: &Api, gate: &Gate<Machine>, gpu: c_int) -> Result<Self, String> {
        let mut current = null_mut();
        ask!(api, cuDevicePrimaryCtxRetain(&raw mut current, gpu))?;
        ask!(api, cuCtxSetCurrent(current))?;
        let contexts = gate.contexts();
        let &[context] = &contexts[..] else {
            return Err(format!(
                "the driver makes {} contexts with compute channels, and not 1",
                contexts.len()
            ));
        };
        let mut count: c_int = 0;
        ask!(
            api,
            cuDeviceGetAttribute(&raw mut count, MULTIPROCESSORS, gpu)
        )?;
        let multiprocessors = count.unsigned_abs();
        let page = (&raw const PAGE).cast::<c_void>().cast_mut();
        ask!(api, cuMemHostRegister_v2(page, size_of::<Page>(), 1 | 2))?;
        let mut results = 0;
        let bytes = words(multiprocessors) * size_of::<u32>();
        ask!(api, cuMemAlloc_v2(&raw mut results, bytes))?;
        let mut module = null_mut();
        let image = KERNEL.as_ptr().cast();
        ask!(
            api,
            cuModuleLoadDataEx(&raw mut module, image, 0, null_mut(), null_mut())
        )?;
        let mut function = null_mut();
        let name = c"spin".as_ptr();
        ask!(api, cuModuleGetFunction(&raw mut function, module, name))?;
        Ok(Self {
            context,
            function,
            multiprocessors,
            results,
        })
    }
}

/// The number of words of the results.
fn words(blocks: u32) -> usize {
    (blocks * THREADS) as usize * 2
}

impl Trial {
    fn new(library: &str, gpus: &Choice) -> Result<Self, String> {
        let gate = of_this_process().map_err(|error| Chain(&error).to_string())?;
        gate.number_channels();
        let api = Api::open(library, None).map_err(|error| Chain(&error).to_string())?;
        let gpus = devices(&api, gpus).map_err(|error| Chain(&error).to_string())?;
        let gpu = *gpus.first().ok_or("there is no GPU")?;
        let work = Work::new(&api, gate, gpu)?;
        Ok(Self {
            api,
            gpus,
            gpu,
            gate,
            stopped: None,
            switches: Switches::default(),
            blocks: 0,
            work,
        })
    }

    fn obey(&mut self, command: Command) -> Result<u64, String> {
        match command {
            Command::Spin(grid) => {
                PAGE.ends().store(0, Ordering::SeqCst);
                PAGE.rounds().store(0, Ordering::SeqCst);
                self.launch(grid).map(|()| 0)
            }
            Command::Count => Ok(PAGE.rounds().load(Ordering::SeqCst).into()),
            Command::Slice(micros) => {
                let slice = Slice::from_micros(micros).ok_or("use 100 to 100000 us")?;
                let (micros, set) = timed(|| self.gate.set(self.work.context, slice));
                set.map(|()| micros)
                    .map_err(|error| Chain(&error).to_string())
            }
            Command::Stop => {
                let (micros, stopped) = timed(|| self.gate.stop(self.work.context));
                self.stopped = Some(stopped.map_err(|error| Chain(&error).to_string())?);
                Ok(micros)
            }
            Command::Renew => {
                let renewed = self.stopped.as_ref().is_some_and(Stopped::renew);
                Ok(renewed.into())
            }
            Command::Start => Ok(timed(|| self.stopped = None).0),
            Command::End => {
                PAGE.ends().store(1, Ordering::SeqCst);
                self.check()
            }
            Command::Short(millis) => {
                PAGE.ends().store(1, Ordering::SeqCst);
                let end = Instant::now() + Duration::from_millis(millis.into());
                let mut count = 0;
                while Instant::now() < end {
                    self.launch(Grid::Full)?;
                    ask!(self.api, cuCtxSynchronize())?;
                    count += 1;
                }
                Ok(count)
            }
            Command::Soak(count) => self.soak(count),
            Command::Used => {
                let gpus = self.gate.gpu(self.work.context).into_iter().collect();
                let numbers = self.gate.numbers().ok_or("channels have no numbers")?;
                // The second look has the driver write what it still has.
                self.switches
                    .look(BTreeSet::clone(&gpus), &numbers, Duration::ZERO);
                let used = self.switches.look(gpus, &numbers, Duration::ZERO);
                let used = used.ok_or("there is no record of context switches")?;
                Ok(used.total.as_micros() as u64)
            }
            Command::Remake => self.remake(self.gpu),
            Command::Gpu(number) => {
                let gpu = self.gpus.get(number as usize).copied();
                self.remake(gpu.ok_or("there is no such GPU")?)
            }
        }
    }

    /// Creates a context on this GPU instead of the one that there is. Returns the microseconds that destroying that took.
    fn remake(&mut self, gpu: c_int) -> Result<u64, String> {
        PAGE.ends().store(1, Ordering::SeqCst);
        let (micros, released) = timed(|| ask!(self.api, cuDevicePrimaryCtxRelease_v2(self.gpu)));
        released?;
        self.gpu = gpu;
        self.work = Work::new(&self.api, self.gate, gpu)?;
        Ok(micros)
    }

    fn launch(&mut self, grid: Grid) -> Result<(), String> {
        self.blocks = match grid {
            Grid::One => 1,
            Grid::Full => self.work.multiprocessors,
        };
        // The same address for host and device, as all of its kind.
        let mut page = (&raw const PAGE) as u64;
        let mut results = self.work.results;
        let mut parameters = [
            (&raw mut page).cast::<c_void>(),
            (&raw mut results).cast::<c_void>(),
        ];
        let parameters = parameters.as_mut_ptr();
        let (stream, none) = (null_mut(), null_mut());
        ask!(
            self.api,
            cuLaunchKernel(
                self.work.function,
                self.blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream,
                parameters,
                none
            )
        )
    }

    /// Waits for the kernel, and checks the number of each thread.
    fn check(&self) -> Result<u64, String> {
        let mut results = vec![0u32; words(self.blocks)];
        self.fetch(&mut results, self.work.results)?;
        for (thread, result) in results.chunks_exact(2).enumerate() {
            let expected = advance(thread as u32, u64::from(result[0]) * u64::from(STEPS));
            if result[1] != expected {
                return Err(format!("thread {thread} has a wrong result"));
            }
        }
        Ok(results[0].into())
    }

    /// Copies words from the device behind all that is enqueued, and waits.
    fn fetch(&self, words: &mut [u32], from: CUdeviceptr) -> Result<(), String> {
        let (target, bytes) = (words.as_mut_ptr().cast(), size_of_val(words));
        ask!(
            self.api,
            cuMemcpyDtoHAsync_v2(target, from, bytes, null_mut())
        )?;
        ask!(self.api, cuCtxSynchronize())
    }

    fn soak(&mut self, count: u32) -> Result<u64, String> {
        let (gate, context) = (self.gate, self.work.context);
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let stops = scope.spawn(|| {
                let mut done = 0;
                // Pauses of up to a millisecond, each of another length.
                let pause = |number: u32| {
                    thread::sleep(Duration::from_micros((advance(number, 1) >> 22).into()));
                };
                let result = loop {
                    if done == count || ended.load(Ordering::Relaxed) {
                        break Ok(());
                    }
                    match gate.stop(context) {
                        Ok(stopped) => {
                            pause(done);
                            drop(stopped);
                            done += 1;
                        }
                        // Something is being freed or created.
                        Err(Error::Busy) => {}
                        Err(error) => break Err(Chain(&error).to_string()),
                    }
                    pause(!done);
                };
                ended.store(true, Ordering::Relaxed);
                result
            });
            let mut rounds = 0;
            let worked = loop {
                if ended.load(Ordering::Relaxed) {
                    break Ok(rounds);
                }
                if let Err(why) = self.round(rounds as u32) {
                    break Err(why);
                }
                rounds += 1;
            };
            ended.store(true, Ordering::Relaxed);
            let stopped = stops
                .join()
                .unwrap_or(Err("a thread has panicked".to_owned()));
            stopped.and(worked)
        })
    }

    /// Copies words to new memory, from there to other memory and back, beside a kernel, and compares.
    fn round(&mut self, number: u32) -> Result<(), String> {
        PAGE.ends().store(1, Ordering::SeqCst);
        let length = 1 + advance(number, 2) as usize % (COPY / size_of::<u32>());
        let words: Vec<u32> = (0..length as u32).map(|word| word ^ number).collect();
        let bytes = size_of_val(&words[..]);
        let mut both = [0; 2];
        for at in &mut both {
            ask!(self.api, cuMemAlloc_v2(at, bytes))?;
        }
        let [first, second] = both;
        let (source, stream) = (words.as_ptr().cast(), null_mut());
        ask!(self.api, cuMemcpyHtoDAsync_v2(first, source, bytes, stream))?;
        self.launch(Grid::Full)?;
        ask!(self.api, cuMemcpyDtoDAsync_v2(second, first, bytes, stream))?;
        let mut back = vec![0; length];
        self.fetch(&mut back, second)?;
        for at in both {
            ask!(self.api, cuMemFree_v2(at))?;
        }
        if back != words {
            return Err(format!("{length} words have come back changed"));
        }
        self.check().map(drop)
    }
}

/// The generator's number so many steps after `from`.
fn advance(from: u32, steps: u64) -> u32 {
    // The steps of 1, 2, 4, ... together are a multiplication and an addition, too.
    let (mut number, mut steps) = (from, steps);
    let (mut factor, mut addend) = (FACTOR, ADDEND);
    while steps > 0 {
        if steps & 1 == 1 {
            number = number.wrapping_mul(factor).wrapping_add(addend);
        }
        addend = addend.wrapping_mul(factor).wrapping_add(addend);
        factor = factor.wrapping_mul(factor);
        steps >>= 1;
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_steps_at_a_time_give_what_single_steps_give() {
        let mut number = 7u32;
        for steps in 0..100 {
            assert_eq!(advance(7, steps), number);
            number = number.wrapping_mul(FACTOR).wrapping_add(ADDEND);
        }
    }

    #[test]
    fn a_command_is_read_as_it_was_written() {
        let all = [
            Command::Spin(Grid::One),
            Command::Spin(Grid::Full),
            Command::Count,
            Command::Slice(2000),
            Command::Stop,
            Command::Renew,
            Command::Start,
            Command::End,
            Command::Short(50),
            Command::Soak(1000),
            Command::Used,
            Command::Remake,
            Command::Gpu(1),
        ];
        for command in all {
            assert_eq!(command.to_string().parse(), Ok(command));
        }
        for line in ["", "slice", "slice x", "spin", "spin 1", "stopped"] {
            assert!(line.parse::<Command>().is_err(), "{line}");
        }
    }
}
