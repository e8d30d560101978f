//! A hostile application: `opencl_hostile SOCKET ATTACK` talks to a worker directly, without the
//! driver, and breaks one rule. The socket is a pool's or, in a guest, the agent's.
//!
//! | attack | what it does | output |
//! |---|---|---|
//! | `garbage` | writes random bytes to the call ring | `ended` |
//! | `index` | sets an index of the ring far ahead | `ended` |
//! | `length` | writes a frame that is longer than the data present | `ended` |
//! | `outside` | uses ranges outside and across the ends of the window and of shared virtual memory | `refused` |
//! | `quota` | allocates 100 MiB of device memory for each of a thousand buffers | `refused` |
//! | `files` | sends files whose close blocks while its input is open: with the hello, and (unread) later | `sent` |
//! | `memory` | on a CPU device, runs native code that allocates shared memory without end | `ended` |
//! | `processes` | runs native code that starts as many processes as it can, and then waits | `running` |
//! | `silent` | makes calls whose answers it does not read, until its input ends | `silent`, `gone` |
//! | a number | kills itself after this many steps of an ordinary run | nothing, or `whole` |
//!
//! `ended`: the connection to the worker has ended. `refused`: each call that had to fail has
//! failed.

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use remoting_proto::{
    apis::opencl::{
        OpenCl,
        calls::{
            self, BuildProgram, Call, ContextId, CreateBuffer, CreateContext, CreateKernel,
            CreateProgram, CreateQueue, DeviceId, Finish, Grid, KernelId, MemId, NdRange, Order,
            ProgramId, ProgramOrigin, QueueId, ReadBuffer, ReleaseMem, SvmAlloc, SvmFill, SvmFree,
            SvmRead, SvmWrite, WindowRange, WriteBuffer,
        },
        codes,
    },
    port,
    wire::{
        Blob, Flags, Header, Wire,
        hello::{Form, Hello},
    },
};
use remoting_transport::{
    bell::{Bell, Futex},
    endpoint::{Receiver, Sender},
    port_bell::{Doorbell, DoorbellPage},
    ring::{Consumer, Lines, Producer},
    socket,
    window::{Slice, Window},
};

type Failed = Box<dyn std::error::Error>;

/// The maximum sleep.
const PATIENCE: Duration = Duration::from_millis(20);
/// How long to wait for an end or an answer.
const LONG: Duration = Duration::from_secs(100);
const CONTEXT: ContextId = ContextId(0);
const QUEUE: QueueId = QueueId(0);
const PROGRAM: ProgramId = ProgramId(0);
const KERNEL: KernelId = KernelId(0);

/// Counts steps, and kills this process after the last step that it may make.
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

/// A connection to a worker.
struct Client {
    stream: UnixStream,
    /// The control words of its rings, which the window's own type does not expose.
    words: Words,
    window: Arc<Window>,
    bell: Doorbell,
    calls: Sender<Slice, Doorbell>,
    answers: Receiver<Slice, Doorbell>,
    sequence: u64,
    /// How long to wait for room in the call ring.
    patience: Duration,
    steps: Steps,
}

impl Client {
    fn connect(path: &str, mut steps: Steps) -> Result<Self, Failed> {
        steps.step();
        let stream = UnixStream::connect(path)?;
        steps.step();
        let hello = Hello::client::<OpenCl>().to_bytes();
        // In one piece, as the agent requires, unless this process is to be killed in between.
        let cut = match steps.0 {
            Some(0) => hello.len() / 2,
            _ => hello.len(),
        };
        (&stream).write_all(&hello[..cut])?;
        steps.step();
        let (bytes, files) = socket::receive_hello(&stream)?;
        steps.step();
        let hello = Hello::check_for::<OpenCl>(&bytes)?;
        let mut files = files.into_iter();
        let memory = files.next().ok_or("no window")?;
        let (at, bell) = match hello.form {
            Form::Port => {
                let mut place = [0; port::SliceOffsets::SIZE];
                (&stream).read_exact(&mut place)?;
                let place = port::SliceOffsets::from_bytes(place);
                let doorbells = files.next().ok_or("no doorbell")?;
                let bell = Doorbell::Port {
                    page: Arc::new(DoorbellPage::map(&doorbells, place.doorbell)?),
                    naps: Arc::default(),
                    patience: PATIENCE,
                };
                (place.slice, bell)
            }
            _ => (0, Doorbell::Futex(Futex { patience: PATIENCE })),
        };
        let window = Window::map_slice(&memory, at, hello.window, hello.ring)?;
        steps.step();
        let (calls, answers) = (window.calls(), window.answers());
        let spin = Duration::from_millis(1);
        Ok(Self {
            stream,
            words: Words::map(&memory, at)?,
            calls: Sender::new(Producer::new(calls, bell.clone()), spin),
            answers: Receiver::new(Consumer::new(answers, bell.clone())),
            bell,
            window,
            sequence: 0,
            patience: LONG,
            steps,
        })
    }

    /// Writes a call, and then a no-op call that notifies the worker: two steps.
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

    /// Sends a call and waits for its answer, which may be an error code.
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

    /// Creates a context and a queue.
    fn begin(&mut self) -> Result<(), Failed> {
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
        Ok(())
    }

    /// The same, and a kernel that does nothing.
    fn prepare(&mut self) -> Result<(), Failed> {
        self.prepare_with("kernel void nothing() {}")
    }

    /// The same, and a kernel with this source.
    fn prepare_with(&mut self, source: &str) -> Result<(), Failed> {
        self.begin()?;
        self.good(&CreateProgram {
            id: PROGRAM,
            context: CONTEXT,
            origin: ProgramOrigin::Source(Blob(source.as_bytes().to_vec())),
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

    /// Wakes the worker, as if there were something in its ring.
    fn ring(&self) {
        self.bell.ring(&self.window.calls().control().items.0);
    }

    /// Waits until the connection has ended.
    fn wait_for_end(&mut self) -> Result<&'static str, Failed> {
        self.ring();
        // The agent only looks when it is asked to.
        let step = Duration::from_millis(100);
        self.stream.set_read_timeout(Some(step))?;
        let start = Instant::now();
        while start.elapsed() < LONG {
            match self.stream.read(&mut [0; 64]) {
                Ok(0) => return Ok("ended"),
                Ok(_) => return Err("the worker nudges".into()),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok("ended"),
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
                Err(_) if matches!(self.bell, Doorbell::Port { .. }) => {
                    // Fails if the connection has just ended, which is noticed next.
                    let _ = self.stream.write(&[port::LOOK]);
                }
                Err(_) => {}
            }
        }
        Err("the worker goes on".into())
    }
}

/// The first control word of the answer ring, in which the application publishes its read position.
struct Words(*mut AtomicU32);

impl Words {
    /// Its offset in a slice.
    const READ: u64 = 4096;

    fn map(memory: &OwnedFd, slice: u64) -> Result<Self, Failed> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                memory.as_raw_fd(),
                libc::off_t::try_from(slice + Self::READ)?,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(Self(page.cast()))
    }

    fn read(&self) -> &AtomicU32 {
        // SAFETY: the page stays mapped, and is aligned.
        unsafe { &*self.0 }
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
    // A second writer of the same ring, which knows nothing about calls.
    Producer::new(client.window.calls(), client.bell.clone()).push(&[], &bytes)?;
    client.wait_for_end()
}

fn index(client: &mut Client) -> Result<&'static str, Failed> {
    client.words.read().store(0x8000_0000, Ordering::SeqCst);
    // The worker reads the word when the room that it knows of is used up.
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
    Producer::new(client.window.calls(), client.bell.clone())
        .push(&header.to_bytes(), &[1, 2, 3])?;
    client.wait_for_end()
}

fn buffer(id: u32, size: u64, lives: Option<u64>, contents: Option<WindowRange>) -> CreateBuffer {
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
    client.begin()?;
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
        let place = || WindowRange {
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
    // Valid ranges are served.
    let place = WindowRange {
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

/// Uses addresses of which all or some bytes are outside an allocation.
fn shared_addresses(client: &mut Client) -> Result<(), Failed> {
    const SIZE: u64 = 1 << 16;
    let allocation = client.ask(&SvmAlloc {
        context: CONTEXT,
        flags: 0,
        size: SIZE,
        retries: 0,
    })?;
    // Not every device supports such memory.
    let Ok(start) = allocation else {
        return Ok(());
    };
    let here = std::ptr::from_ref(client) as u64;
    let addresses = [0, start - 1, start + 1, start + SIZE, u64::MAX - SIZE, here];
    let to = || WindowRange {
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
        // Its number is in use as if the object existed.
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
    client.begin()?;
    for id in 0..1000 {
        match client.ask(&buffer(id, 100 << 20, None, None))? {
            Ok(()) => {}
            Err(codes::MEM_OBJECT_ALLOCATION_FAILURE) => return Ok("refused"),
            Err(code) => return Err(format!("an allocation gave {code}").into()),
        }
    }
    Err("a hundred GB are served".into())
}

/// A kernel that makes system calls: on a CPU device it is native code in the worker.
const NATIVE: &str = r#"
long call(long number, long a, long b, long c, long d) {
    long result;
    __asm__ volatile("movq %5, %%r10; movq $-1, %%r8; xorq %%r9, %%r9; syscall" : "=a"(result)
        : "a"(number), "D"(a), "S"(b), "d"(c), "r"(d)
        : "rcx", "r8", "r9", "r10", "r11", "memory");
    return result;
}
"#;

/// mmap: 16 MiB, readable and writable, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE.
const MEMORY: &str = "kernel void nothing() { while (call(9, 0, 16 << 20, 3, 0x8021) > 0); }";

/// Forked children wait in poll, and so does the parent once no more processes can be created.
const PROCESSES: &str =
    "kernel void nothing() { while (call(57, 0, 0, 0, 0) > 0); for (;;) call(7, 0, 0, -1, 0); }";

fn native(client: &mut Client, kernel: &str) -> Result<(), Failed> {
    client.prepare_with(&format!("{NATIVE}{kernel}"))?;
    client.enqueue()?;
    client.post(&calls::Flush { queue: QUEUE }, Flags::default())
}

fn memory(client: &mut Client) -> Result<&'static str, Failed> {
    native(client, MEMORY)?;
    client.wait_for_end()
}

/// A socket whose last close blocks until its peer is gone.
fn lingering() -> Result<(TcpStream, TcpStream), Failed> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut socket = TcpStream::connect(listener.local_addr()?)?;
    let (peer, _) = listener.accept()?;
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 60,
    };
    // SAFETY: the kernel reads the given number of bytes from a local.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of_val(&linger) as libc::socklen_t,
        );
    }
    socket.set_nonblocking(true)?;
    while socket.write(&[0; 1 << 16]).is_ok() {}
    Ok((socket, peer))
}

fn files(path: &str) -> Result<&'static str, Failed> {
    let [(first, _one), (second, _other)] = [lingering()?, lingering()?];
    let stream = UnixStream::connect(path)?;
    socket::send(
        &stream,
        &Hello::client::<OpenCl>().to_bytes(),
        &[first.as_fd()],
    )?;
    // Fails if the other side was faster.
    let _ = socket::send(&stream, &[0], &[second.as_fd()]);
    // Not the last references, if the files have arrived.
    thread::spawn(move || drop((first, second)));
    // Whether it is served or not.
    let _ = socket::receive_hello(&stream);
    drop(stream);
    println!("sent");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok("gone")
}

fn processes(client: &mut Client) -> Result<&'static str, Failed> {
    native(client, PROCESSES)?;
    println!("running");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok("gone")
}

fn silent(client: &mut Client) -> Result<&'static str, Failed> {
    client.prepare()?;
    // Until both rings are full: the client does not read answers, so the worker stops reading
    // calls.
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
        to: WindowRange {
            offset,
            length: 4096,
            stage: None,
        },
    })?;
    Ok("whole")
}

fn main() -> Result<(), Failed> {
    let mut arguments = std::env::args().skip(1);
    let (Some(socket), Some(attack)) = (arguments.next(), arguments.next()) else {
        return Err("usage: opencl_hostile SOCKET ATTACK".into());
    };
    let client = |steps| Client::connect(&socket, Steps(steps));
    let said = match attack.as_str() {
        "garbage" => garbage(&mut client(None)?),
        "files" => files(&socket),
        "index" => index(&mut client(None)?),
        "length" => length(&mut client(None)?),
        "outside" => outside(&mut client(None)?),
        "memory" => memory(&mut client(None)?),
        "processes" => processes(&mut client(None)?),
        "quota" => quota(&mut client(None)?),
        "silent" => silent(&mut client(None)?),
        number => whole(&mut client(Some(number.parse()?))?),
    }?;
    println!("{said}");
    Ok(())
}
