//! CUDA calls over the rings, as `libcuda.so.1` makes them in a guest.

use alloc::{string::String, sync::Arc, vec::Vec};
use core::sync::atomic::{AtomicU32, Ordering};

use remoting_proto::{
    apis::cuda::{
        NEVER,
        calls::{
            Allocate, EventSynchronize, Forward, Launch, Load, MemoryInfo, Pin, Post, Read, Shape,
            Signal, Source, Start, StreamSynchronize, Write,
        },
        codes,
        forwarded::number,
    },
    wire::{Blob, Wire},
};
use remoting_transport::{bell::Bell, window::Window};

use super::{
    ADD, ADD_NAME, BLOCK, BUFFER, COPIES, Calls, DISABLE_TIMING, NON_BLOCKING, NOTHING,
    NOTHING_NAME, NUMBERS, measure,
};
use crate::{Connection, Failure, Surroundings, bench::Direction, connection::place};

/// Bytes at the start of the window's data, before the copied data: the words for waits.
const WORDS: u64 = 4096;

/// Parameters of a forwarded entry point, in the encoding of `remoting_proto::apis::cuda::plan`,
/// which needs an operating system.
#[derive(Default)]
struct Arguments(Vec<u8>);

impl Arguments {
    fn put(mut self, value: &impl Wire) -> Self {
        value.put(&mut self.0);
        self
    }

    /// A place for a returned handle.
    fn place() -> Self {
        Self::default().put(&true).put(&1u32)
    }

    fn text(mut self, text: &str) -> Self {
        (text.len() as u32).put(&mut self.0);
        self.0.extend_from_slice(text.as_bytes());
        self
    }
}

struct Rings<'a, B> {
    window: &'a Window,
    link: Connection<B>,
    context: u32,
    stream: u32,
    launch: Launch,
    query: Forward,
    record: Post,
    query_event: Forward,
    event: u32,
    /// The device's memory.
    memory: u64,
    /// The words for waits, and the value of the last wait.
    words: [&'a AtomicU32; 2],
    value: u32,
    /// Number of waits that ended by a word, and of all waits.
    by_word: u64,
    waits: u64,
}

/// Accepts an answer that says that something is not ready yet.
fn ready(answer: Result<Blob, Failure>) -> Result<(), Failure> {
    match answer {
        Err(Failure::Code {
            code: codes::NOT_READY,
            ..
        })
        | Ok(_) => Ok(()),
        Err(why) => Err(why),
    }
}

/// State while the first calls are made.
struct Opening<B> {
    link: Connection<B>,
    context: u32,
}

impl<B: Bell + Clone> Opening<B> {
    fn forward(&self, symbol: &str, arguments: Arguments) -> Forward {
        Forward {
            context: self.context,
            function: number(symbol),
            arguments: Blob(arguments.0),
        }
    }

    /// Makes a call whose first parameter returns an object, and returns the object's number.
    fn made(&mut self, symbol: &str, arguments: Arguments) -> Result<u32, Failure> {
        let call = self.forward(symbol, arguments);
        let Blob(answer) = self.link.ask(&call)?;
        // The number of objects, then each of them.
        Ok(<(u32, u32)>::from_bytes(&answer)?.1)
    }

    fn kernel(&mut self, ptx: &str, name: &str) -> Result<u32, Failure> {
        let mut image = Vec::from(ptx.as_bytes());
        image.push(0);
        let loaded = self.link.ask(&Load {
            context: self.context,
            image: Blob(image),
            library: false,
            options: Vec::new(),
            room: (0, 0),
        })?;
        if loaded.code != 0 {
            return Err(Failure::Code {
                call: "cuModuleLoadData",
                code: loaded.code,
            });
        }
        let arguments = Arguments::place().put(&loaded.id).text(name);
        self.made("cuModuleGetFunction", arguments)
    }
}

impl<'a, B: Bell + Clone> Rings<'a, B> {
    fn open(
        window: &'a Arc<Window>,
        bell: B,
        here: &mut impl Surroundings,
    ) -> Result<(Self, u32), Failure> {
        let mut opening = Opening {
            link: Connection::new(window, bell),
            context: 0,
        };
        let started = opening.link.ask(&Start {})?;
        let device = started.devices.first().ok_or(Failure::NoDevice)?;
        here.note("device", &String::from_utf8_lossy(&device.name.0));
        let primary = Arguments::place().put(&0u64);
        opening.context = opening.made("cuDevicePrimaryCtxRetain", primary)?;
        let flags = |flags: u32| Arguments::place().put(&u64::from(flags));
        let stream = opening.made("cuStreamCreate", flags(NON_BLOCKING))?;
        let event = opening.made("cuEventCreate", flags(DISABLE_TIMING))?;
        let (add, nothing) = (
            opening.kernel(ADD, ADD_NAME)?,
            opening.kernel(NOTHING, NOTHING_NAME)?,
        );
        let context = opening.context;
        let memory = opening.link.ask(&Allocate {
            context,
            size: BUFFER,
            source: Source::Device(),
        })?;
        let known = place(window, 0, WORDS + BUFFER);
        let length = known.length.min(window.size() - known.offset);
        opening.link.ask(&Pin {
            context,
            offset: known.offset,
            length,
            whole: false,
        })?;
        let words = window
            .at(window.data(), WORDS)
            .ok_or(Failure::NoDevice)?
            .cast::<AtomicU32>();
        // SAFETY: within the window's data, which starts at a page boundary and lives as long as
        // the window is borrowed. Both sides access the words only by atomic operations.
        let words = unsafe { [&*words, &*words.add(1)] };
        words
            .iter()
            .for_each(|word| word.store(0, Ordering::Relaxed));
        let of = |object: u32| Arguments::default().put(&object);
        let recorded = opening.forward("cuEventRecord", of(event).put(&stream));
        let rings = Self {
            window,
            context,
            stream,
            launch: launch(context, stream, nothing, &[0; 20]),
            query: opening.forward("cuStreamQuery", of(stream)),
            record: Post {
                context,
                function: recorded.function,
                arguments: recorded.arguments,
            },
            query_event: opening.forward("cuEventQuery", of(event)),
            event,
            link: opening.link,
            memory,
            words,
            value: 0,
            by_word: 0,
            waits: 0,
        };
        Ok((rings, add))
    }

    /// Adds numbers on the device, and checks the sums.
    fn compute(&mut self, add: u32) -> Result<(), Failure> {
        let bytes = u64::from(NUMBERS) * 4;
        let numbers = self.window.at(self.window.data() + WORDS, bytes);
        let numbers = numbers.ok_or(Failure::NoDevice)?.cast::<f32>();
        for (part, factor) in [(0, 1), (1, 3)] {
            for index in 0..NUMBERS {
                // SAFETY: within the window's data, which the worker does not read now.
                unsafe {
                    numbers
                        .add(index as usize)
                        .write_volatile((index * factor) as f32)
                };
            }
            self.copy_at(Direction::Write, part * bytes, bytes)?;
            self.synchronize()?;
        }
        let mut parameters = Vec::new();
        for part in 0..3 {
            (self.memory + part * bytes).put(&mut parameters);
        }
        NUMBERS.put(&mut parameters);
        let mut call = launch(self.context, self.stream, add, &parameters);
        call.shape.grid[0] = NUMBERS / BLOCK;
        call.shape.block[0] = BLOCK;
        self.link.post(&call)?;
        self.copy_at(Direction::Read, 2 * bytes, bytes)?;
        self.synchronize()?;
        for index in 0..NUMBERS {
            // SAFETY: as above; the read has completed.
            let sum = unsafe { numbers.add(index as usize).read_volatile() };
            if sum != (index * 4) as f32 {
                return Err(Failure::Wrong { at: index as usize });
            }
        }
        Ok(())
    }

    /// Copies between the window and a part of the device's memory.
    fn copy_at(&mut self, direction: Direction, at: u64, size: u64) -> Result<(), Failure> {
        let (context, stream, device) = (self.context, self.stream, self.memory + at);
        let window = place(self.window, WORDS, size);
        match direction {
            Direction::Write => self.link.post(&Write {
                context,
                stream,
                to: device,
                from: window,
            }),
            Direction::Read => self.link.post(&Read {
                context,
                stream,
                from: device,
                to: window,
            }),
        }
    }
}

fn launch(context: u32, stream: u32, function: u32, parameters: &[u8]) -> Launch {
    Launch {
        context,
        stream,
        function,
        shape: Shape {
            grid: [1; 3],
            block: [32, 1, 1],
            shared: 0,
        },
        cooperative: false,
        attributes: Blob::default(),
        parameters: Blob(Vec::from(parameters)),
    }
}

impl<B: Bell + Clone> Calls for Rings<'_, B> {
    type Error = Failure;

    fn query(&mut self) -> Result<(), Failure> {
        ready(self.link.ask(&self.query))
    }

    fn memory(&mut self) -> Result<(), Failure> {
        let context = self.context;
        self.link.ask(&MemoryInfo { context }).map(drop)
    }

    fn launch(&mut self) -> Result<(), Failure> {
        self.link.post(&self.launch)
    }

    /// Waits for a word that the device writes, or, if the worker refuses that, by asking the
    /// worker.
    fn synchronize(&mut self) -> Result<(), Failure> {
        let (context, stream) = (self.context, self.stream);
        let [done, refused] = self.words;
        self.value = match self.value.wrapping_add(1) {
            0 | NEVER => 1,
            value => value,
        };
        self.link.post(&Signal {
            context,
            stream: Some(stream),
            words: self.window.data(),
            value: self.value,
        })?;
        self.waits += 1;
        loop {
            if done.load(Ordering::Acquire) == self.value {
                self.by_word += 1;
                return Ok(());
            }
            let refused = refused.load(Ordering::Acquire);
            if refused == self.value || refused == NEVER {
                return self.link.ask(&StreamSynchronize { context, stream });
            }
            core::hint::spin_loop();
        }
    }

    fn record(&mut self) -> Result<(), Failure> {
        self.link.post(&self.record)
    }

    fn query_event(&mut self) -> Result<(), Failure> {
        ready(self.link.ask(&self.query_event))
    }

    fn synchronize_event(&mut self) -> Result<(), Failure> {
        let (context, event) = (self.context, self.event);
        self.link.ask(&EventSynchronize { context, event })
    }

    fn copy(&mut self, direction: Direction, size: u64) -> Result<(), Failure> {
        self.copy_at(direction, 0, size)
    }
}

/// Computes, checks and measures over a window whose worker has answered the hello.
///
/// # Errors
/// A call has failed, or a sum is wrong.
pub fn run<B: Bell + Clone, S: Surroundings>(
    window: &Arc<Window>,
    bell: B,
    here: &mut S,
) -> Result<(), Failure> {
    let (mut rings, add) = Rings::open(window, bell, here)?;
    rings.compute(add)?;
    here.note("computed", "65536 sums, all right");
    let room = window.size() - window.data() - WORDS;
    let sizes: Vec<_> = COPIES.into_iter().filter(|size| *size <= room).collect();
    measure(&mut rings, here, &sizes)?;
    let waits = alloc::format!("{} of {}", rings.by_word, rings.waits);
    here.note("waits that a word of the device's ended", &waits);
    Ok(())
}
