//! Leases: parts of devices for jobs of a scheduler, such as containers of Kubernetes.
//!
//! A lease is a pool of its own with a name, a weight and a sum of device memory, which the service has set and no program
//! of the job can change. The service starts the pool, starts it again when it ends, and ends it with the lease. It only
//! keeps accounts: programs connect to the pool's socket, which alone is in a folder that the job gets.
//!
//! ```text
//!   scheduler ──{"grant": ...}──> service ──starts──> gantry-accel serve --name ... --weight ... --memory-total ...
//!                                                        ^
//!   program of the job ──── FOLDER/sockets/NAME/pool.sock
//! ```
//!
//! Pools outlive a service that is killed: [`keeper`] writes down which process is whose. [`request`] is what is said.

mod admission;
mod keeper;
pub mod request;

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    net::Shutdown,
    os::{
        fd::AsFd,
        unix::{fs::DirBuilderExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use base::{Chain, Unpoisoned, gpus::Selection, paths::LEASES, socket};

use admission::{Refusal, admit, free};
use keeper::{FOREVER, Places, Record, Running, wait};
use request::{Answer, Api, Device, Grant, LONGEST, Lease, Listing, Name, Request, Until};

/// MiB that are set aside for what CUDA has of the device beside allocations.
const CUDA_RESERVE: u64 = 600;
/// How many connections of a user other than root are served at a time.
const CONNECTIONS: usize = 16;
/// The same of all users other than root together.
const ALL_CONNECTIONS: usize = 128;
/// How long somebody who does not read may hold up his own connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the end of a lease is waited for. Its processes may hang in a driver.
const ENDS: Duration = Duration::from_secs(30);
/// Number of leases at a time: each has a process.
const MOST: usize = 256;
/// Pause before a pool that has ended is started again, which doubles up to the longest as long as pools end early.
const AGAIN: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// Options of the service.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The folder of the service's socket (socket), of the sockets of leases (sockets/NAME/pool.sock) and of records of
    /// them. It should be in memory, as /run is: leases end when the machine does.
    #[arg(long, default_value = LEASES, value_name = "FOLDER")]
    pub folder: PathBuf,
    /// A device that is leased, as a pool's --devices names it, and its memory in MiB that leases may have together. Can be
    /// repeated.
    #[arg(long = "device", required = true, value_name = "NAME=MIB", value_parser = device)]
    pub devices: Vec<(String, u64)>,
    /// The APIs of leases that name none: opencl, cuda, or opencl,cuda.
    #[arg(
        long,
        default_value = "opencl,cuda",
        value_name = "API",
        value_delimiter = ','
    )]
    pub api: Vec<Api>,
    /// MiB of a device's memory that a lease takes beside its own memory, unless it says how many: for what is not
    /// counted, such as contexts of CUDA. 600 by default where CUDA is served, and none otherwise.
    #[arg(long, value_name = "MIB")]
    pub reserve: Option<u64>,
    /// Socket of the arbiter by which leases share devices by weight. Without it, weights have no effect.
    #[arg(long, value_name = "PATH")]
    pub arbiter: Option<PathBuf>,
    /// The folder for what workers of leases write.
    #[arg(
        long,
        default_value = "/var/cache/gantry-leases",
        value_name = "FOLDER"
    )]
    pub cache: PathBuf,
    /// The folder in which the pool of each lease tells its figures: NAME.pool.
    #[arg(long, value_name = "FOLDER")]
    pub metrics: Option<PathBuf>,
    /// Further options of gantry-accel serve for the pool of each lease.
    #[arg(last = true, value_name = "OPTION")]
    pub serve: Vec<String>,
}

fn device(text: &str) -> Result<(String, u64), String> {
    let parts = text.rsplit_once('=');
    let parsed = parts.and_then(|(name, memory)| Some((name, memory.parse::<u64>().ok()?)));
    match parsed {
        Some((name, memory @ 1..)) if !name.is_empty() => {
            let selection = name.parse::<Selection>();
            let checked = selection.map(|_| (name.to_owned(), memory));
            checked.map_err(|error| error.to_string())
        }
        _ => Err("use NAME=MIB, such as 0=81920".to_owned()),
    }
}

/// Why the service ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A folder cannot be used.
    #[error("cannot use {}: let this user write there, or name another folder", .0.display())]
    Folder(PathBuf, #[source] io::Error),
    /// Another service uses the folder.
    #[error("another service has the leases in {}: stop it, or name another --folder", .0.display())]
    Running(PathBuf),
    /// A device is named twice.
    #[error("device {0} is named twice: name it once, with its whole memory")]
    Twice(String),
    /// One arbiter for several devices, where it gives turns.
    #[error(
        "an arbiter gives turns on one device: name one --device, or start a service with another --folder and --arbiter for \
         each; with --api cuda, an arbiter with time slices has all GPUs"
    )]
    Devices,
    /// The socket.
    #[error("cannot listen on {}", .0.display())]
    Listen(PathBuf, #[source] io::Error),
}

/// A lease that is there.
struct Held {
    lease: Lease,
    /// Another one of its name has another number.
    number: u64,
    state: State,
    /// Shut down to end it.
    end: UnixStream,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Starts,
    Serves,
    Ends,
}

/// The service.
struct Service {
    options: Options,
    program: PathBuf,
    places: Places,
    leases: Mutex<BTreeMap<Name, Held>>,
    /// A lease has ended, or serves.
    changed: Condvar,
    /// The number of the last lease.
    last: AtomicU64,
    /// Connections by user.
    connections: Mutex<HashMap<u32, usize>>,
}

/// Grants leases until this process is killed; `program` is `gantry-accel`. Leases of an earlier service are taken up.
///
/// # Errors
/// The service cannot start.
pub fn run(options: Options, program: &Path) -> Result<(), Error> {
    for (index, (name, _)) in options.devices.iter().enumerate() {
        if options.devices[..index]
            .iter()
            .any(|(other, _)| other == name)
        {
            return Err(Error::Twice(name.clone()));
        }
    }
    if options.arbiter.is_some() && options.devices.len() > 1 && options.api != [Api::Cuda] {
        return Err(Error::Devices);
    }
    let folder = options.folder.clone();
    let places = Places {
        records: folder.join("records"),
        sockets: folder.join("sockets"),
        cache: options.cache.clone(),
    };
    for (path, mode) in [
        (&folder, 0o750),
        (&places.records, 0o700),
        (&places.sockets, 0o755),
        (&places.cache, 0o700),
    ] {
        let mut builder = fs::DirBuilder::new();
        let made = builder.recursive(true).mode(mode).create(path);
        made.map_err(|error| Error::Folder(path.clone(), error))?;
    }
    let lock = File::create(folder.join("lock"));
    let lock = lock.map_err(|error| Error::Folder(folder.clone(), error))?;
    if lock.try_lock().is_err() {
        return Err(Error::Running(folder));
    }
    let service = Arc::new(Service {
        options,
        program: program.to_owned(),
        places,
        leases: Mutex::default(),
        changed: Condvar::new(),
        last: AtomicU64::new(0),
        connections: Mutex::default(),
    });
    service.take_up();
    let path = folder.join("socket");
    let listener =
        socket::listen_for_group(&path).map_err(|error| Error::Listen(path.clone(), error))?;
    socket::refuse_files(&listener);
    base::note!("gantry-accel: granting leases at {}", path.display());
    loop {
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(PAUSE);
            continue;
        };
        let Some(seat) = Seat::of(&service, &stream) else {
            continue;
        };
        let thread = thread::Builder::new().name("client".to_owned());
        // Without a thread, it is closed.
        let _ = thread.spawn(move || seat.serve(&stream));
    }
}

/// A place for a connection of a user, until it is dropped.
struct Seat {
    service: Arc<Service>,
    user: u32,
}

impl Seat {
    fn of(service: &Arc<Service>, stream: &UnixStream) -> Option<Self> {
        let user = socket::user(stream).ok()?;
        let mut connections = service.connections.lock_unpoisoned();
        let others = connections.iter().filter(|(user, _)| **user != 0);
        let all: usize = others.map(|(_, count)| count).sum();
        let count = connections.get(&user).copied().unwrap_or(0);
        if user != 0 && (count >= CONNECTIONS || all >= ALL_CONNECTIONS) {
            return None;
        }
        connections.insert(user, count + 1);
        drop(connections);
        Some(Self {
            service: Arc::clone(service),
            user,
        })
    }

    /// Answers one client until it has gone, and ends what was to end with the connection.
    fn serve(&self, stream: &UnixStream) {
        let mut own = Vec::new();
        // Fails for a connection that has ended.
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let _ = self.answer_all(stream, &mut own);
        for (name, number) in own {
            self.service.end(&name, number);
        }
    }

    fn answer_all(&self, stream: &UnixStream, own: &mut Vec<(Name, u64)>) -> io::Result<()> {
        let mut reader = BufReader::new(stream);
        loop {
            let mut line = Vec::new();
            reader
                .by_ref()
                .take(LONGEST + 1)
                .read_until(b'\n', &mut line)?;
            let answer = match line.last() {
                None => return Ok(()),
                Some(b'\n') => self.answer(&line, own),
                Some(_) => Answer::Refused(format!(
                    "a request is a line of at most {LONGEST} bytes, which ends with a line feed"
                )),
            };
            let mut text = serde_json::to_vec(&answer)?;
            text.push(b'\n');
            let mut stream = stream;
            stream.write_all(&text)?;
            if line.last() != Some(&b'\n') {
                return Ok(());
            }
        }
    }

    fn answer(&self, line: &[u8], own: &mut Vec<(Name, u64)>) -> Answer {
        let request = match serde_json::from_slice(line) {
            Ok(request) => request,
            Err(error) => return Answer::Refused(format!("invalid request: {error}")),
        };
        match request {
            Request::List {} => Answer::Leases(self.service.list()),
            Request::Revoke { name } => match self.service.revoke(&name, self.user) {
                Ok(()) => Answer::Revoked(name),
                Err(refusal) => Answer::Refused(refusal.to_string()),
            },
            Request::Grant(grant) => {
                let closes = (grant.until == Until::Closed).then(|| grant.name.clone());
                match self.service.grant(grant, self.user) {
                    Ok((socket, number)) => {
                        own.extend(closes.map(|name| (name, number)));
                        Answer::Socket(socket)
                    }
                    Err(refusal) => Answer::Refused(refusal.to_string()),
                }
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut connections = self.service.connections.lock_unpoisoned();
        if let Some(count) = connections.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                connections.remove(&self.user);
            }
        }
    }
}

impl Service {
    /// Takes up the leases that an earlier service has left, and removes folders without a lease.
    fn take_up(self: &Arc<Self>) {
        let records = fs::read_dir(&self.places.records);
        let mut left = Vec::new();
        for path in records.into_iter().flatten().filter_map(Result::ok) {
            let path = path.path();
            let read = fs::read(&path).map(|text| serde_json::from_slice::<Record>(&text));
            match read {
                Ok(Ok(record)) if path == self.places.record(&record.lease.grant.name) => {
                    self.take_up_one(record);
                }
                // It was being written, and its pool has not begun; or it is a mark.
                _ => left.push(path),
            }
        }
        let leases = self.leases.lock_unpoisoned();
        for path in left {
            let of = path.file_name().unwrap_or_default().to_string_lossy();
            let of = of.strip_prefix('~').map(str::to_owned);
            let of = of.and_then(|name| Name::try_from(name).ok());
            if of.is_none_or(|name| !leases.contains_key(&name)) {
                let _ = fs::remove_file(path);
            }
        }
        for folder in [&self.places.sockets, &self.places.cache] {
            for entry in fs::read_dir(folder)
                .into_iter()
                .flatten()
                .filter_map(Result::ok)
            {
                let name = entry.file_name().to_string_lossy().into_owned();
                let name = Name::try_from(name).ok();
                if name.is_some_and(|name| !leases.contains_key(&name)) {
                    let _ = super::compiled::tree::remove(&entry.path());
                }
            }
        }
    }

    fn take_up_one(self: &Arc<Self>, record: Record) {
        let running = Running::found(&record);
        if running.is_none() {
            keeper::kill_session(record.process, record.started);
        }
        let name = record.lease.grant.name.clone();
        // The connection by which it was granted has ended with the service.
        let ends = record.lease.grant.until == Until::Closed || self.places.is_ending(&name);
        let how = match running {
            _ if ends => "it ends",
            Some(_) => "its programs go on",
            None => "its pool is started again",
        };
        base::note!("gantry-accel: lease {name} is taken up: {how}");
        let mut leases = self.leases.lock_unpoisoned();
        match self.keep(&mut leases, record.lease, running, None) {
            Ok(_) if ends => {
                if let Some(held) = leases.get_mut(&name) {
                    held.begin_to_end(&self.places);
                }
            }
            Ok(_) => {}
            Err(error) => base::note!("gantry-accel: cannot take up lease {name}: {error}"),
        }
    }

    /// Starts the thread that keeps the pool of a lease.
    fn keep(
        self: &Arc<Self>,
        leases: &mut BTreeMap<Name, Held>,
        lease: Lease,
        running: Option<Running>,
        told: Option<mpsc::SyncSender<Result<(), keeper::Error>>>,
    ) -> io::Result<u64> {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (end, ended) = UnixStream::pair()?;
        let (service, kept) = (Arc::clone(self), lease.clone());
        let thread = thread::Builder::new().name("lease".to_owned());
        thread.spawn(move || {
            service.kept(&kept, running, &ended, told);
            let name = &kept.grant.name;
            service.places.remove(name);
            service.leases.lock_unpoisoned().remove(name);
            service.changed.notify_all();
        })?;
        let held = Held {
            lease: lease.clone(),
            number,
            state: State::Starts,
            end,
        };
        leases.insert(lease.grant.name, held);
        Ok(number)
    }

    /// Keeps the pool of a lease running until the lease ends. A first one that does not start ends it, too; `told` is
    /// told whether it has.
    fn kept(
        &self,
        lease: &Lease,
        mut running: Option<Running>,
        ended: &UnixStream,
        mut told: Option<mpsc::SyncSender<Result<(), keeper::Error>>>,
    ) {
        let mut pause = AGAIN;
        loop {
            let begun = Instant::now();
            let ends = wait(&[ended.as_fd()], Duration::ZERO);
            let started = match running.take() {
                Some(running) if ends => return running.end(),
                // It may have been taken up before its socket was open to others.
                Some(running) => match running.listens(&lease.socket) {
                    Ok(()) => Ok(running),
                    Err(error) => {
                        running.end();
                        Err(error)
                    }
                },
                None if ends => return,
                None => Running::start(lease, self.command(lease), &self.places),
            };
            let name = &lease.grant.name;
            match started {
                Ok(pool) => {
                    if let Some(held) = self.leases.lock_unpoisoned().get_mut(name)
                        && held.state == State::Starts
                    {
                        held.state = State::Serves;
                    }
                    self.changed.notify_all();
                    if let Some(told) = told.take() {
                        // Whoever has asked waits for it.
                        let _ = told.send(Ok(()));
                    }
                    while !wait(&[pool.handle(), ended.as_fd()], FOREVER) {}
                    if wait(&[ended.as_fd()], Duration::ZERO) {
                        return pool.end();
                    }
                    base::note!(
                        "gantry-accel: the pool of lease {name} has ended, and is started again"
                    );
                    // Its memory is free before another pool counts anew.
                    pool.clear();
                }
                Err(error) => {
                    if let Some(told) = told.take() {
                        let _ = told.send(Err(error));
                        return;
                    }
                    base::note!("gantry-accel: lease {name}: {}", Chain(&error));
                }
            }
            if begun.elapsed() > 2 * LONGEST_PAUSE {
                pause = AGAIN;
            }
            if wait(&[ended.as_fd()], pause) {
                return;
            }
            pause = LONGEST_PAUSE.min(2 * pause);
        }
    }

    /// The pool of a lease.
    fn command(&self, lease: &Lease) -> Command {
        let Grant {
            name,
            device,
            weight,
            memory,
            api,
            ..
        } = &lease.grant;
        let api: Vec<_> = api.iter().map(|api| api.name()).collect();
        let mut command = Command::new(&self.program);
        command
            .args(["serve", "--leased", "--late", "--spare", "1"])
            .args(["--api", &api.join(",")])
            .arg("--socket")
            .arg(&lease.socket)
            .args(["--devices", device])
            .args(["--name", &name.to_string()])
            .args(["--weight", &weight.to_string()])
            .args(["--memory-total", &memory.to_string()])
            .arg("--cache")
            .arg(self.places.cache(name));
        if let Some(arbiter) = &self.options.arbiter {
            command.arg("--arbiter").arg(arbiter);
        }
        if let Some(folder) = &self.options.metrics {
            let path = folder.join(format!("{name}.pool"));
            command.arg("--metrics-socket").arg(path);
        }
        command.args(&self.options.serve);
        command
    }

    /// All leases and devices.
    fn list(&self) -> Listing {
        let leases = self.leases.lock_unpoisoned();
        let leases: Vec<_> = leases.values().map(|held| held.lease.clone()).collect();
        let problem = self.options.arbiter.as_ref().and_then(|arbiter| {
            let error = socket::is_served(arbiter).err()?;
            Some(format!(
                "no arbiter listens on {}: {error}",
                arbiter.display()
            ))
        });
        let devices = self.options.devices.iter().map(|(name, memory)| Device {
            name: name.clone(),
            memory: *memory,
            free: free(*memory, name, &leases),
            problem: problem.clone(),
        });
        Listing {
            devices: devices.collect(),
            leases,
        }
    }

    /// What was asked for, with what the service adds.
    fn completed(&self, grant: Grant) -> Grant {
        let api = match grant.api.is_empty() {
            true => self.options.api.clone(),
            false => grant.api,
        };
        let reserve = grant.reserve.or(self.options.reserve).unwrap_or_else(|| {
            match api.contains(&Api::Cuda) {
                true => CUDA_RESERVE,
                false => 0,
            }
        });
        Grant {
            api,
            reserve: Some(reserve),
            ..grant
        }
    }

    fn grant(self: &Arc<Self>, grant: Grant, user: u32) -> Result<(PathBuf, u64), Refusal> {
        let grant = self.completed(grant);
        let name = grant.name.clone();
        // SAFETY: a plain call.
        let own = unsafe { libc::geteuid() };
        if grant.until == Until::Revoked && user != 0 && user != own {
            return Err(Refusal::Root);
        }
        let lease = Lease {
            socket: self.places.folder(&name).join("pool.sock"),
            grant,
            user,
        };
        let mut leases = self.leases.lock_unpoisoned();
        let until = Instant::now() + ENDS;
        while let Some(held) = leases.get(&name) {
            let is_same = held.lease == lease && lease.grant.until == Until::Revoked;
            match held.state {
                State::Serves if is_same => return Ok((lease.socket, held.number)),
                State::Starts if is_same => {}
                State::Ends => {}
                _ => return Err(Refusal::Exists(name)),
            }
            leases = self
                .until_changed(leases, until)
                .ok_or(Refusal::Late(name.clone()))?;
        }
        if leases.len() >= MOST {
            return Err(Refusal::Many(MOST));
        }
        let all = leases.values().map(|held| &held.lease);
        admit(&lease.grant, &self.options.devices, all)?;
        let (told, heard) = mpsc::sync_channel(1);
        let socket = lease.socket.clone();
        let kept = self.keep(&mut leases, lease, None, Some(told));
        let number = kept.map_err(|error| Refusal::Start(error.to_string()))?;
        drop(leases);
        // The thread says it, or has panicked.
        match heard.recv() {
            Ok(Ok(())) => Ok((socket, number)),
            Ok(Err(error)) => Err(Refusal::Start(Chain(&error).to_string())),
            Err(_) => Err(Refusal::Start("its thread has ended".to_owned())),
        }
    }

    /// Waits until a lease has changed; none when it is too late.
    fn until_changed<'a>(
        &self,
        leases: MutexGuard<'a, BTreeMap<Name, Held>>,
        until: Instant,
    ) -> Option<MutexGuard<'a, BTreeMap<Name, Held>>> {
        let left = until.checked_duration_since(Instant::now())?;
        let waited = self.changed.wait_timeout(leases, left);
        Some(waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    fn revoke(&self, name: &Name, user: u32) -> Result<(), Refusal> {
        // SAFETY: a plain call.
        let own = unsafe { libc::geteuid() };
        let leases = self.leases.lock_unpoisoned();
        let Some(held) = leases.get(name) else {
            return Ok(());
        };
        if held.lease.user != user && user != 0 && user != own {
            return Err(Refusal::Others(name.clone()));
        }
        let number = held.number;
        drop(leases);
        match self.end(name, number) {
            true => Ok(()),
            false => Err(Refusal::Late(name.clone())),
        }
    }

    /// Ends a lease, if it is there. Returns whether all of it has ended.
    fn end(&self, name: &Name, number: u64) -> bool {
        let until = Instant::now() + ENDS;
        let mut leases = self.leases.lock_unpoisoned();
        while let Some(held) = leases.get_mut(name).filter(|held| held.number == number) {
            held.begin_to_end(&self.places);
            match self.until_changed(leases, until) {
                Some(again) => leases = again,
                None => return false,
            }
        }
        true
    }
}

impl Held {
    /// Has its thread end it.
    fn begin_to_end(&mut self, places: &Places) {
        if self.state != State::Ends {
            self.state = State::Ends;
            places.ends(&self.lease.grant.name);
            // Its thread sees that.
            let _ = self.end.shutdown(Shutdown::Both);
        }
    }
}
