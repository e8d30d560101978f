//! Measures how fairly policies share a virtual GPU among fronts, and the cost of that. It prints figures and is not a
//! test.
//!
//! Fronts are processes that talk to a mediator like `gantry` does. The mediator, its policies and the model of the GPU
//! are the real ones. Only the engine's clock is virtual: a command is a wait for a semaphore, which this program
//! releases when the command has had the engine for its length. Each run therefore gives the same figures on any
//! machine.
//!
//!     cargo run --release -p gpu-mediator --example gpu_turns

use std::{
    collections::{BTreeMap, VecDeque},
    error::Error,
    fs::File,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant},
};

use base::{Access, Mapping};
use gf100::{
    device::server::{Settings, serve},
    format::{
        Target, VramPage,
        push::{GpEntry, Header, Run as Words},
    },
};
use gpu_mediator::{
    Moment,
    gpu::{
        link::{Listener, Packets},
        mediator::Mediator,
        physical::Physical,
        wire::{Directory, Event, Request, Run, Size, VERSION},
    },
    policy::Name,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const VRAM: u64 = 64 << 20;
const VRAM_VA: u64 = 0x1000_0000;
/// Offsets of a front's semaphore and commands in its VRAM.
const SEMAPHORE: u64 = 0;
const PUSH: u64 = 0x1000;
const CHANNEL: u8 = 1;
/// Number of commands of a front in flight.
const DEPTH: u32 = 2;
/// Warm-up time before anything is counted.
const WARM: Duration = Duration::from_millis(200);
/// Time of a front from the end of a command to its next submission: an interrupt and an exit.
const THINK: Duration = Duration::from_micros(20);
/// Cost of a GPU register access for the mediator, number of accesses per interrupt, and cost for the engine of
/// switching to another VM's channels.
const REGISTER: Duration = Duration::from_micros(1);
const INTERRUPT: u32 = 5;
const SWITCH: Duration = Duration::from_micros(25);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, role, socket] = &arguments[..]
        && role == "front"
    {
        return front(Path::new(socket));
    }
    println!(
        "| commands | fronts | policy | MMR per 100 ms: mean | worst | per 500 ms: worst | engine idle, of all time |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (what, base, seconds) in [("0.25 to 2 ms", 250, 1), ("4 to 32 ms", 4000, 4)] {
        for count in [4, 8] {
            for name in [Name::Fifo, Name::Credit, Name::Band, Name::Fair] {
                let base = Duration::from_micros(base);
                let time = Duration::from_secs(seconds);
                let row = Bench::new(name, count, base, time)?.run()?;
                println!("| {what} | {count} | {name} | {row} |");
            }
        }
    }
    Ok(())
}

/// A front with one channel, which always has another command queued behind the current one.
fn front(socket: &Path) -> Result<()> {
    let packets = Packets::connect(socket)?;
    let say = |request: Request| packets.send(&request.encode(), &[]);
    say(Request::Hello {
        version: VERSION,
        vram: VRAM,
        channels: 1,
        weight: 1,
    })?;
    let welcome = packets.receive()?.ok_or("no welcome")?;
    let file = File::from(welcome.files.into_iter().next().ok_or("no memory")?);
    let memory = Mapping::shared(&file, 0, VRAM as usize, Access::ReadWrite)?;
    let (table, space, size) = (1, 1, Size::Small);
    say(Request::Space { space })?;
    say(Request::Table { table, size, space })?;
    let runs = vec![Run {
        index: (VRAM_VA >> 12) as u16 % 0x8000,
        count: 16,
        first: Some(Target::Vram(VramPage(0))),
        read_only: false,
        kind: 0,
    }];
    say(Request::Map { table, runs })?;
    let small = Some(table);
    say(Request::Link {
        space,
        index: (VRAM_VA >> 27) as u16,
        entry: Directory {
            small,
            ..Directory::default()
        },
    })?;
    say(Request::Bind {
        channel: CHANNEL,
        space,
        engines: Default::default(),
    })?;
    for number in 1_u32.. {
        let push = PUSH + u64::from(number) % 4 * 64;
        let header = Header::Increasing(Words {
            subchannel: 0,
            address: 0x10,
            count: 4,
        });
        let at = VRAM_VA + SEMAPHORE;
        // Waits until the semaphore has this number or a later one.
        let words = [header.encode(), (at >> 32) as u32, at as u32, number, 4];
        for (at, word) in (push..).step_by(4).zip(words) {
            write(&memory, at, word);
        }
        let entry = GpEntry {
            address: VRAM_VA + push,
            words: words.len() as u32,
        };
        let entries = vec![entry.encode()];
        let channel = CHANNEL;
        if say(Request::Submit { channel, entries }).is_err() {
            break;
        }
        if number < DEPTH {
            continue;
        }
        loop {
            let Some(packet) = packets.receive()? else {
                return Ok(());
            };
            match Event::parse(&packet.bytes)? {
                Event::Done { .. } => break,
                Event::NonStall => {}
                other => return Err(format!("{other:?}").into()),
            }
        }
    }
    Ok(())
}

fn write(memory: &Mapping, at: u64, word: u32) {
    assert!(at + 4 <= memory.len() as u64);
    // SAFETY: within the mapping and aligned.
    unsafe {
        memory
            .start()
            .add(at as usize)
            .cast::<u32>()
            .write_volatile(word)
    };
}

/// A front, as seen by this process.
struct Front {
    packets: Packets,
    memory: Mapping,
    length: Duration,
    /// Number of completed commands that the front has been told of, and the remaining time of the next one.
    done: u32,
    left: Duration,
    /// Its submissions, and when the mediator receives them.
    submitted: VecDeque<(Moment, Request)>,
    /// Engine time in each tenth of a second.
    used: Vec<Duration>,
}

struct Bench {
    mediator: Mediator,
    fronts: BTreeMap<u32, Front>,
    children: Vec<Child>,
    start: Moment,
    time: Duration,
    now: Moment,
    runs: Option<u32>,
    questions: u64,
    _folder: tempfile::TempDir,
}

impl Drop for Bench {
    fn drop(&mut self) {
        for child in &mut self.children {
            // They also end by themselves once nobody replies.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Receives the next message of a front.
fn next(packets: &Packets) -> Result<Request> {
    let mut entry = [libc::pollfd {
        fd: packets.as_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    }];
    base::poll::poll(&mut entry, Some(Duration::from_secs(20)))?;
    let packet = packets.receive()?.ok_or("a front has gone")?;
    Ok(Request::parse(&packet.bytes)?)
}

fn model(folder: &Path) -> Result<Physical> {
    let socket = folder.join("model.sock");
    let path = socket.clone();
    std::thread::spawn(move || {
        let settings = Settings {
            vram: 1 << 30,
            map: false,
            confine: false,
        };
        serve(&path, settings).map_err(|error| error.to_string())
    });
    let start = Instant::now();
    loop {
        match Physical::connect(&socket) {
            Ok(physical) => return Ok(physical),
            Err(_) if start.elapsed() < Duration::from_secs(10) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

impl Bench {
    fn new(name: Name, count: u32, base: Duration, time: Duration) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let limit = Duration::from_secs(3600);
        let mut mediator = Mediator::new(model(folder.path())?, name, limit)?;
        let socket = folder.path().join("gpu.sock");
        let listener = Listener::bind(&socket)?;
        let start = Moment::now();
        let mut fronts = BTreeMap::new();
        let mut children = Vec::new();
        for nth in 0..count {
            let program = std::env::current_exe()?;
            let mut command = Command::new(program);
            children.push(command.arg("front").arg(&socket).spawn()?);
            let packets = loop {
                match listener.accept() {
                    Ok(packets) => break packets,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Err(error) => return Err(error.into()),
                }
            };
            let Request::Hello { vram, weight, .. } = next(&packets)? else {
                return Err("no greeting".into());
            };
            let id = mediator.join(vram, 1, weight, None, start)?;
            let file = mediator.partition(id).ok_or("no memory")?;
            let memory = Mapping::shared(file, 0, VRAM as usize, Access::ReadWrite)?;
            let version = VERSION;
            let welcome = Event::Welcome { version, vram };
            packets.send(&welcome.encode(), &[file.as_fd()])?;
            let mut its = Front {
                packets,
                memory,
                length: base * 2_u32.pow(nth % 4),
                done: 0,
                left: base * 2_u32.pow(nth % 4),
                submitted: VecDeque::new(),
                used: Vec::new(),
            };
            // Everything before its first submission.
            let submitted = loop {
                match next(&its.packets)? {
                    submit @ Request::Submit { .. } => break submit,
                    other => mediator.request(id, other, Vec::<OwnedFd>::new(), start)?,
                }
            };
            its.submitted.push_back((start + THINK, submitted));
            for _ in 1..DEPTH {
                let submitted = next(&its.packets)?;
                its.submitted.push_back((start + THINK, submitted));
            }
            fronts.insert(id, its);
        }
        Ok(Self {
            questions: mediator.gpu().questions,
            mediator,
            fronts,
            children,
            start,
            time,
            now: start,
            runs: None,
            _folder: folder,
        })
    }

    /// The mediator handles what has arrived until now, and its own turns. Returns when it wants to be called again.
    /// Time advances for the registers that it accesses, unless it is called only because the model is slow.
    fn mediate(&mut self, passes: bool) -> Result<Moment> {
        for (id, front) in &mut self.fronts {
            let is_due = |(at, _): &(Moment, Request)| *at <= self.now;
            while front.submitted.front().is_some_and(is_due)
                && let Some((_, submit)) = front.submitted.pop_front()
            {
                self.mediator.request(*id, submit, Vec::new(), self.now)?;
            }
        }
        self.mediator.interrupt()?;
        let again = self.mediator.tick(self.now)?;
        let asked = self.mediator.gpu().questions;
        if passes {
            // At most a few dozen.
            self.now += REGISTER * (asked - self.questions) as u32;
        }
        self.questions = asked;
        for (id, front) in &mut self.fronts {
            while let Some(event) = self.mediator.event(*id) {
                front.packets.send(&event.encode(), &[])?;
                if matches!(event, Event::Done { .. }) {
                    front.done += 1;
                    front.left = front.length;
                    let submitted = next(&front.packets)?;
                    front.submitted.push_back((self.now + THINK, submitted));
                }
            }
        }
        Ok(self.now + again.unwrap_or(self.time))
    }

    fn run(mut self) -> Result<String> {
        let end = self.start + WARM + self.time;
        while self.now < end {
            let mut until = self.mediate(true)?.min(end);
            let coming = self.fronts.values();
            let coming = coming.filter_map(|front| front.submitted.front().map(|(at, _)| *at));
            until = coming.chain([until]).min().unwrap_or(until);
            let Some((id, _)) = self.mediator.running().next() else {
                self.now = until.max(self.now);
                continue;
            };
            if self.runs.replace(id) != Some(id) {
                self.now += SWITCH;
            }
            let Some(front) = self.fronts.get_mut(&id) else {
                return Err("a channel of nobody's runs".into());
            };
            let passed = front.left.min(until.since(self.now));
            let at = self.now.since(self.start + WARM);
            if self.now >= self.start + WARM {
                let window = (at.as_millis() / 100) as usize;
                let len = front.used.len().max(window + 1);
                front.used.resize(len, Duration::ZERO);
                front.used[window] += passed;
            }
            front.left -= passed;
            self.now += passed;
            if front.left.is_zero() {
                let number = front.done + 1;
                write(&front.memory, SEMAPHORE, number);
                self.finish(id, number)?;
            }
        }
        Ok(self.figures())
    }

    /// Waits, in real time, until the model has noticed that a command is over.
    fn finish(&mut self, id: u32, number: u32) -> Result<()> {
        let start = Instant::now();
        self.now += REGISTER * INTERRUPT;
        while self.fronts[&id].done < number {
            self.mediate(false)?;
            // Its turn has just ended: the end of the command is noticed in its next turn.
            if !self.mediator.running().any(|(vm, _)| vm == id) {
                break;
            }
            if start.elapsed() > Duration::from_secs(20) {
                return Err("a command does not end".into());
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn figures(&self) -> String {
        let ratio = |width: usize| -> Vec<f64> {
            let windows = (self.time.as_millis() / 100) as usize / width;
            let share = |front: &Front, window: usize| -> f64 {
                let parts = front.used.iter().skip(window * width).take(width);
                parts.map(Duration::as_secs_f64).sum()
            };
            (0..windows)
                .map(|window| {
                    let shares = self.fronts.values().map(|front| share(front, window));
                    let (min, max) = shares.fold((f64::MAX, 0.0_f64), |(min, max), share| {
                        (min.min(share), max.max(share))
                    });
                    if max > 0.0 { min / max } else { 1.0 }
                })
                .collect()
        };
        let worst = |ratios: &[f64]| ratios.iter().copied().fold(1.0, f64::min);
        let (short, long) = (ratio(1), ratio(5));
        let used = self.fronts.values().flat_map(|front| &front.used);
        let used: f64 = used.map(Duration::as_secs_f64).sum();
        format!(
            "{:.3} | {:.3} | {:.3} | {:.1} %",
            short.iter().sum::<f64>() / short.len() as f64,
            worst(&short),
            worst(&long),
            (1.0 - used / self.time.as_secs_f64()) * 100.0,
        )
    }
}
