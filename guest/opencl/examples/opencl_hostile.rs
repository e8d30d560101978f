//! An application without scruples: `opencl_hostile SOCKET MISDEED` talks to a worker by itself,
//! without the driver, and breaks one rule.
//!
//! | misdeed | what | printed |
//! |---|---|---|
//! | `garbage` | random bytes in the ring of calls | `ended` |
//! | `index` | an index of the ring far ahead | `ended` |
//! | `length` | a frame that is longer than what is there | `ended` |
//! | `outside` | places before, beyond and across the ends of the window and of shared virtual memory | `refused` |
//! | `quota` | device memory of 1 GiB for each of a hundred buffers | `refused` |
//! | `silent` | calls whose answers it does not read, until its input ends | `silent`, `gone` |
//! | a number | is killed by itself after so many steps of an ordinary run | nothing, or `whole` |
//!
//! `ended`: the worker has closed the connection. `refused`: each call had an error, or had to.

use std::{
    fs::File,
    io::{Read, Write},
    os::{fd::OwnedFd, unix::fs::FileExt, unix::net::UnixStream},
    sync::Arc,
    time::{Duration, Instant},
};

use gantry_remoting::{
    opencl::codes,
    protocol::{
        Blob, Call, Flags, Header, Wire,
        calls::{
            self, BuildProgram, ContextId, CreateBuffer, CreateContext, CreateKernel,
            CreateProgram, CreateQueue, DeviceId, Finish, Grid, KernelId, MemId, NdRange, Order,
            Place, ProgramId, ProgramOrigin, QueueId, ReadBuffer, ReleaseMem, SvmAlloc, SvmFill,
            SvmFree, SvmRead, SvmWrite, WriteBuffer,
        },
        hello::Hello,
    },
    transport::{
        bell::{Bell, Futex},
        link::{Receiver, Sender},
        ring::{Consumer, Lines, Producer},
        socket,
        window::{Slice, Window},
    },
};

type Failed = Box<dyn std::error::Error>;

const BELL: Futex = Futex {
    patience: Duration::from_millis(20),
};
/// How long an end or an answer is waited for.
const LONG: Duration = Duration::from_secs(20);
const CONTEXT: ContextId = ContextId(0);
const QUEUE: QueueId = QueueId(0);
const PROGRAM: ProgramId = ProgramId(0);
const KERNEL: KernelId = KernelId(0);

/// Counts steps, and kills this process after the last one that it is to make.
struct Steps(Option<u32>);

impl Steps {
    fn step(&mut self) {
        match &mut self.0 {
            None => {}
            Some(0) => {
                // SAFETY: ends this process.
                unsafe { libc::raise(libc::SIGKILL) };
            }
            Some(left) => *left -= 1,
        }
    }
}

/// A connection with a worker.
struct Client {
    stream: UnixStream,
    memory: File,
    window: Arc<Window>,
    calls: Sender<Slice, Futex>,
    answers: Receiver<Slice, Futex>,
    sequence: u64,
    /// How long room in the ring of calls is waited for.
    patience: Duration,
    steps: Steps,
}

impl Client {
    fn connect(path: &str, mut steps: Steps) -> Result<Self, Failed> {
        steps.step();
        let stream = UnixStream::connect(path)?;
        steps.step();
        let hello = Hello::client().to_bytes();
        (&stream).write_all(&hello[..hello.len() / 2])?;
        steps.step();
        (&stream).write_all(&hello[hello.len() / 2..])?;
        steps.step();
        let (bytes, files) = socket::receive_hello(&stream)?;
        steps.step();
        let hello = Hello::check(&bytes)?;
        let file: OwnedFd = files.into_iter().next().ok_or("no window")?;
        let window = Window::map(&file, hello.window, hello.ring)?;
        steps.step();
        let (calls, answers) = (window.calls(), window.answers());
        let spin = Duration::from_millis(1);
        Ok(Self {
            stream,
            memory: file.into(),
            calls: Sender::new(Producer::new(calls, BELL), spin),
            answers: Receiver::new(Consumer::new(answers, BELL)),
            window,
            sequence: 0,
            patience: LONG,
            steps,
        })
    }

    /// Writes a call, and then tells the worker of it by another one that does nothing: two steps.
    fn post<C: Call>(&mut self, call: &C, flags: Flags) -> Result<(), Failed> {
        let mut body = Vec::new();
        call.put(&mut body);
        self.sequence += 1;
        let header = Header {
            length: 0,
            opcode: C::OPCODE,
            flags: flags.with(Flags::ALONE),
            sequence: self.sequence,
        };
        let until = Instant::now() + self.patience;
        self.calls.write(header, &body, || Instant::now() < until)?;
        self.steps.step();
        let mut nothing = Vec::new();
        calls::Flush { queue: QUEUE }.put(&mut nothing);
        let header = Header {
            opcode: calls::Flush::OPCODE,
            flags: Flags::default(),
            ..header
        };
        self.calls
            .send(header, &nothing, || Instant::now() < until)?;
        self.steps.step();
        Ok(())
    }

    /// Sends a call and waits for its answer; the code that it gives.
    fn ask<C: Call>(&mut self, call: &C) -> Result<Result<C::Answer, i32>, Failed> {
        self.post(call, Flags::ANSWER)?;
        let sequence = self.sequence;
        let mut body = Vec::new();
        let start = Instant::now();
        while start.elapsed() < LONG {
            match self.answers.poll(&mut body)? {
                Some(header) if header.opcode == calls::ANSWER && header.sequence == sequence => {
                    self.steps.step();
                    return Ok(Wire::from_bytes(&body)?);
                }
                Some(_) => {}
                None => self.answers.sleep(|| false),
            }
        }
        Err("no answer".into())
    }

    fn good<C: Call>(&mut self, call: &C) -> Result<C::Answer, Failed> {
        let code = |code| format!("{} gave {code}", C::NAME);
        Ok(self.ask(call)?.map_err(code)?)
    }

    /// A context, a queue, and a kernel.
    fn prepare(&mut self) -> Result<(), Failed> {
        self.good(&calls::Platforms {})?;
        let device = DeviceId(0);
        self.good(&CreateContext {
            id: CONTEXT,
            devices: vec![device],
            platform: None,
        })?;
        self.good(&CreateQueue {
            id: QUEUE,
            context: CONTEXT,
            device,
            properties: 0,
            further: Vec::new(),
        })?;
        self.good(&CreateProgram {
            id: PROGRAM,
            context: CONTEXT,
            origin: ProgramOrigin::Source(Blob(b"kernel void nothing() {}".to_vec())),
        })?;
        self.good(&BuildProgram {
            id: PROGRAM,
            devices: Vec::new(),
            options: Blob::default(),
            folders: 0,
            included: Vec::new(),
        })?;
        self.good(&CreateKernel {
            id: KERNEL,
            program: PROGRAM,
            name: Blob(b"nothing".to_vec()),
        })?;
        Ok(())
    }

    fn enqueue(&mut self) -> Result<(), Failed> {
        self.post(
            &NdRange {
                order: order(),
                kernel: KERNEL,
                grid: Grid::line(1),
            },
            Flags::default(),
        )
    }

    /// Wakes the worker: there seems to be something in its ring.
    fn ring(&self) {
        BELL.ring(&self.window.calls().control().items.0);
    }

    /// Waits until the worker has closed the connection.
    fn wait_for_end(&mut self) -> Result<&'static str, Failed> {
        self.ring();
        self.stream.set_read_timeout(Some(LONG))?;
        match self.stream.read(&mut [0; 64]) {
            Ok(0) => Ok("ended"),
            Ok(_) => Err("the worker nudges".into()),
            Err(error) => Err(format!("the worker goes on: {error}").into()),
        }
    }
}

fn order() -> Order {
    Order {
        queue: QUEUE,
        wait: Vec::new(),
        event: None,
    }
}

fn garbage(client: &mut Client) -> Result<&'static str, Failed> {
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut bytes = [0; 1024];
    for byte in &mut bytes {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        *byte = (random >> 56) as u8;
    }
    // A second writer of the same ring, with no idea of calls.
    Producer::new(client.window.calls(), BELL).push(&[], &bytes)?;
    client.wait_for_end()
}

/// Where the application says how far it has read: the first control word of the ring of answers.
const READ: u64 = 4096;

fn index(client: &mut Client) -> Result<&'static str, Failed> {
    client
        .memory
        .write_all_at(&0x8000_0000u32.to_le_bytes(), READ)?;
    // The worker looks there when the room is used up that it knows of.
    for _ in 0..=client.window.answers().count() {
        client.post(&Finish { queue: QUEUE }, Flags::ANSWER)?;
    }
    client.wait_for_end()
}

fn length(client: &mut Client) -> Result<&'static str, Failed> {
    let header = Header {
        length: 1 << 20,
        opcode: Finish::OPCODE,
        flags: Flags::ANSWER,
        sequence: 1,
    };
    Producer::new(client.window.calls(), BELL).push(&header.to_bytes(), &[1, 2, 3])?;
    client.wait_for_end()
}

fn buffer(id: u32, size: u64, lives: Option<u64>, contents: Option<Place>) -> CreateBuffer {
    CreateBuffer {
        id: MemId(id),
        context: CONTEXT,
        flags: 0,
        size,
        contents,
        lives,
        svm: None,
    }
}

fn outside(client: &mut Client) -> Result<&'static str, Failed> {
    client.prepare()?;
    client.good(&buffer(0, 4096, None, None))?;
    let (start, end) = (client.window.data(), client.window.size());
    let places = [
        (0, 64),
        (start - 4096, 4096),
        (start - 64, 128),
        (end - 64, 128),
        (end, 4096),
        (u64::MAX - 63, 64),
        (u64::MAX - 63, 4096),
    ];
    for (number, (offset, length)) in (1..).zip(places) {
        let place = || Place {
            offset,
            length,
            stage: None,
        };
        let refused = [
            client.ask(&ReadBuffer {
                order: order(),
                mem: MemId(0),
                offset: 0,
                to: place(),
            })?,
            client.ask(&WriteBuffer {
                order: order(),
                mem: MemId(0),
                offset: 0,
                from: place(),
            })?,
            client.ask(&buffer(2 * number, length, Some(offset), None))?,
            client.ask(&buffer(2 * number + 1, length, None, Some(place())))?,
        ];
        if refused.iter().any(Result::is_ok) {
            return Err(format!("{length} bytes at {offset} are served: {refused:?}").into());
        }
    }
    shared_addresses(client)?;
    // What lies within is served.
    let place = Place {
        offset: end - 4096,
        length: 4096,
        stage: None,
    };
    client.good(&ReadBuffer {
        order: order(),
        mem: MemId(0),
        offset: 0,
        to: place,
    })?;
    Ok("refused")
}

/// Addresses that are none of an allocation's, of all or of some bytes.
fn shared_addresses(client: &mut Client) -> Result<(), Failed> {
    const SIZE: u64 = 1 << 16;
    let allocation = client.ask(&SvmAlloc {
        context: CONTEXT,
        flags: 0,
        size: SIZE,
        vain: 0,
    })?;
    // Not every device has such memory.
    let Ok(start) = allocation else {
        return Ok(());
    };
    let here = std::ptr::from_ref(client) as u64;
    let addresses = [0, start - 1, start + 1, start + SIZE, u64::MAX - SIZE, here];
    let to = || Place {
        offset: 8 << 20,
        length: SIZE,
        stage: None,
    };
    for address in addresses {
        let refused = [
            client.ask(&SvmRead {
                order: order(),
                address,
                to: to(),
            })?,
            client.ask(&SvmWrite {
                order: order(),
                address,
                from: to(),
            })?,
            client.ask(&SvmFill {
                order: order(),
                address,
                pattern: Blob(vec![0]),
                size: SIZE,
            })?,
            client.ask(&CreateBuffer {
                svm: Some(address),
                ..buffer(99, SIZE, None, None)
            })?,
        ];
        if refused.iter().any(Result::is_ok) {
            return Err(format!("{SIZE} bytes at {address:#x} are served: {refused:?}").into());
        }
        // Its number is in use as if it were there.
        client.good(&ReleaseMem {
            id: MemId(99),
            callback: None,
        })?;
    }
    client.good(&SvmRead {
        order: order(),
        address: start,
        to: to(),
    })?;
    client.good(&SvmFree { address: start })
}

fn quota(client: &mut Client) -> Result<&'static str, Failed> {
    client.prepare()?;
    for id in 0..100 {
        match client.ask(&buffer(id, 1 << 30, None, None))? {
            Ok(()) => {}
            Err(codes::MEM_OBJECT_ALLOCATION_FAILURE) => return Ok("refused"),
            Err(code) => return Err(format!("an allocation gave {code}").into()),
        }
    }
    Err("a hundred GiB are served".into())
}

fn silent(client: &mut Client) -> Result<&'static str, Failed> {
    client.prepare()?;
    // Until both rings are full: nobody reads the answers, and so nobody the calls.
    client.patience = Duration::from_secs(4);
    while client.enqueue().is_ok() && client.post(&calls::Platforms {}, Flags::ANSWER).is_ok() {}
    println!("silent");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok("gone")
}

/// An ordinary run.
fn whole(client: &mut Client) -> Result<&'static str, Failed> {
    client.prepare()?;
    client.good(&buffer(0, 4096, None, None))?;
    client.enqueue()?;
    client.good(&Finish { queue: QUEUE })?;
    let offset = client.window.data();
    client.good(&ReadBuffer {
        order: order(),
        mem: MemId(0),
        offset: 0,
        to: Place {
            offset,
            length: 4096,
            stage: None,
        },
    })?;
    Ok("whole")
}

fn main() -> Result<(), Failed> {
    let mut arguments = std::env::args().skip(1);
    let (Some(socket), Some(misdeed)) = (arguments.next(), arguments.next()) else {
        return Err("usage: opencl_hostile SOCKET MISDEED".into());
    };
    let client = |steps| Client::connect(&socket, Steps(steps));
    let said = match misdeed.as_str() {
        "garbage" => garbage(&mut client(None)?),
        "index" => index(&mut client(None)?),
        "length" => length(&mut client(None)?),
        "outside" => outside(&mut client(None)?),
        "quota" => quota(&mut client(None)?),
        "silent" => silent(&mut client(None)?),
        number => whole(&mut client(Some(number.parse()?))?),
    }?;
    println!("{said}");
    Ok(())
}
