//! The device against a back end of the tests, which answers rightly, wrongly or not at all.

use std::{
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use base::{Chain, Unpoisoned, memfd, socket};
use device_model::{
    memory::{GuestMemory, GuestRam},
    shared_event,
    thread::Unconfined,
};
use vhost::vhost_user::message::FrontendReq as Req;
use virtio::{
    VirtioDevice,
    testing::simple::{Guest, GuestQueue},
};
use virtio_queue::QueueT;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryBackend};
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::{
    connection::{Connection, Deadline},
    device::REMAP_PATIENCE,
};

const MIB: usize = 1 << 20;
/// Far more than anything here takes.
const LONG: Duration = Duration::from_secs(60);

/// What the back end does about a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Does {
    Answers,
    Nothing,
    Closes,
    /// Sends one byte after the other, slowly.
    Drips,
    SendsFiles,
    AnswersAnother,
    IsTooLong,
    IsTooShort,
    SendsAFile,
    Refuses,
    ForgetsTheFlag,
}

const LIES: [Does; 6] = [
    Does::Closes,
    Does::AnswersAnother,
    Does::IsTooLong,
    Does::IsTooShort,
    Does::SendsAFile,
    Does::ForgetsTheFlag,
];

/// A message that the back end has received.
struct Received {
    request: u32,
    body: Vec<u8>,
    files: Vec<OwnedFd>,
}

type Behaviour = Box<dyn FnMut(u32) -> Does + Send>;

struct Inner {
    behaviour: Mutex<Behaviour>,
    received: Mutex<Vec<Received>>,
    protocol: u64,
    slots: u64,
    queues: u64,
    base: Mutex<u32>,
}

/// A back end.
struct BackEnd {
    _dir: tempfile::TempDir,
    socket: PathBuf,
    inner: Arc<Inner>,
    /// Its end of the connection.
    streams: Arc<Mutex<Vec<UnixStream>>>,
    connections: Arc<AtomicUsize>,
}

/// All protocol features that Gantry uses: MQ, REPLY_ACK, CONFIG, INFLIGHT_SHMFD, CONFIGURE_MEM_SLOTS.
const ALL: u64 = 1 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 15;
const NO_SLOTS: u64 = ALL & !(1 << 15);
const NO_IN_FLIGHT: u64 = ALL & !(1 << 12);

impl BackEnd {
    fn new(protocol: u64, behaviour: impl FnMut(u32) -> Does + Send + 'static) -> Self {
        Self::with(protocol, 32, behaviour)
    }

    fn with(
        protocol: u64,
        slots: u64,
        behaviour: impl FnMut(u32) -> Does + Send + 'static,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let inner = Arc::new(Inner {
            behaviour: Mutex::new(Box::new(behaviour)),
            received: Mutex::default(),
            protocol,
            slots,
            queues: 4,
            base: Mutex::new(7),
        });
        let (streams, connections) = (Arc::<Mutex<Vec<_>>>::default(), Arc::default());
        let back_end = Self {
            _dir: dir,
            socket,
            inner: Arc::clone(&inner),
            streams: Arc::clone(&streams),
            connections: Arc::clone(&connections),
        };
        // Ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                connections.fetch_add(1, Ordering::SeqCst);
                streams.lock_unpoisoned().push(stream.try_clone().unwrap());
                let inner = Arc::clone(&inner);
                thread::spawn(move || inner.serve(stream));
            }
        });
        back_end
    }

    fn obedient(protocol: u64) -> Self {
        Self::new(protocol, |_| Does::Answers)
    }

    fn behave(&self, behaviour: impl FnMut(u32) -> Does + Send + 'static) {
        *self.inner.behaviour.lock_unpoisoned() = Box::new(behaviour);
    }

    /// Dies, as far as the other side sees.
    fn hang_up(&self) {
        for stream in self.streams.lock_unpoisoned().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn connect(&self, model: &Model, limit: Duration) -> Result<Backend, Error> {
        let connection = Connection::open(&self.socket).unwrap();
        Backend::agree(connection, &self.socket, model, Deadline::after(limit))
    }

    /// The bodies of all messages of a kind.
    fn bodies(&self, request: Req) -> Vec<Vec<u8>> {
        let all = self.inner.received.lock_unpoisoned();
        let all = all.iter().filter(|one| one.request == u32::from(request));
        all.map(|one| one.body.clone()).collect()
    }

    /// Waits until this many queues were enabled.
    fn enabled(&self, count: usize) {
        until("queues are enabled", || {
            self.bodies(Req::SET_VRING_ENABLE).len() == count
        });
    }

    /// The eventfd of the last message of a kind for a queue.
    fn event(&self, request: Req, queue: u64) -> EventFd {
        let all = self.inner.received.lock_unpoisoned();
        let mut all = all.iter().rev();
        let is_it =
            |one: &&Received| one.request == u32::from(request) && one.body == queue.to_ne_bytes();
        let found = all.find(is_it).unwrap();
        let file = found.files[0].try_clone().unwrap();
        // SAFETY: a descriptor of an eventfd, without another owner.
        unsafe { EventFd::from_raw_fd(file.into_raw_fd()) }
    }
}

impl Inner {
    fn serve(&self, stream: UnixStream) {
        let _ = self.try_serve(stream);
    }

    fn try_serve(&self, mut stream: UnixStream) -> std::io::Result<()> {
        loop {
            let mut header = [0; 12];
            let files = socket::receive_exact(&stream, &mut header)?;
            let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
            let (request, flags) = (word(0), word(4));
            let mut body = vec![0; word(8) as usize];
            stream.read_exact(&mut body)?;
            let acknowledged = flags & 8 != 0;
            let answer = self.answer(request, &body);
            let answer = answer.or_else(|| acknowledged.then(|| vec![0; 8]));
            let does = (self.behaviour.lock_unpoisoned())(request);
            self.received.lock_unpoisoned().push(Received {
                request,
                body,
                files,
            });
            let Some(mut answer) = answer else {
                if does == Does::Closes {
                    return Ok(());
                }
                continue;
            };
            let mut of = request;
            let mut size = answer.len() as u32;
            let mut flags = 1_u32 | 4;
            let mut file = request == u32::from(Req::GET_INFLIGHT_FD);
            match does {
                Does::Nothing => continue,
                Does::Closes => return Ok(()),
                Does::AnswersAnother => of += 1,
                Does::IsTooLong => size += 4,
                Does::IsTooShort => size -= 4,
                Does::SendsAFile => file = !file,
                Does::ForgetsTheFlag => flags = 1,
                Does::Refuses => answer = 1_u64.to_ne_bytes().to_vec(),
                Does::Answers | Does::Drips | Does::SendsFiles => {}
            }
            let mut message = Vec::new();
            for word in [of, flags, size] {
                message.extend_from_slice(&word.to_ne_bytes());
            }
            answer.resize(size as usize, 0);
            message.extend_from_slice(&answer);
            if does == Does::SendsFiles {
                // Of its long answer, this is all that comes.
                let a_file = File::open("/dev/null")?;
                socket::send(&stream, &message[..1], &[a_file.as_fd(), a_file.as_fd()])?;
                continue;
            }
            if does == Does::Drips {
                for byte in message {
                    stream.write_all(&[byte])?;
                    thread::sleep(Duration::from_millis(50));
                }
                continue;
            }
            let a_file = File::open("/dev/null")?;
            let files = [a_file.as_fd()];
            socket::send(&stream, &message, if file { &files } else { &[] })?;
        }
    }

    fn answer(&self, request: u32, body: &[u8]) -> Option<Vec<u8>> {
        let is = |one: Req| request == u32::from(one);
        let number = |value: u64| Some(value.to_ne_bytes().to_vec());
        if is(Req::GET_FEATURES) {
            // VERSION_1, PROTOCOL_FEATURES, and one of each feature that is not passed on.
            return number(1 << 32 | 1 << 30 | 1 << 28 | 1 << 26 | 1 << 12 | 1 << 11 | 1 << 9);
        }
        if is(Req::GET_PROTOCOL_FEATURES) {
            return number(self.protocol);
        }
        if is(Req::GET_QUEUE_NUM) {
            return number(self.queues);
        }
        if is(Req::GET_MAX_MEM_SLOTS) {
            return number(self.slots);
        }
        if is(Req::GET_CONFIG) {
            let mut answer = body.to_vec();
            answer[12..].fill(0xc5);
            return Some(answer);
        }
        if is(Req::GET_VRING_BASE) {
            let mut answer = body.to_vec();
            let base = *self.base.lock_unpoisoned();
            answer[4..].copy_from_slice(&base.to_ne_bytes());
            return Some(answer);
        }
        is(Req::GET_INFLIGHT_FD).then(|| body.to_vec())
    }
}

/// A region of memory that can be shared.
fn region(at: usize, len: usize) -> (GuestAddress, usize, Option<FileOffset>) {
    let file = memfd::create(c"test").unwrap();
    file.set_len(len as u64).unwrap();
    (GuestAddress(at as u64), len, Some(FileOffset::new(file, 0)))
}

/// A guest whose memory consists of 32 MiB and of further regions of 1 MiB.
fn guest(more: usize) -> Guest {
    let first = std::iter::once(region(0, 32 * MIB));
    let others = (0..more).map(|number| region((64 + 2 * number) * MIB, MIB));
    let ranges: Vec<_> = first.chain(others).collect();
    let ram = GuestRam::from_ranges_with_files(ranges).unwrap();
    Guest {
        memory: GuestMemory::new(ram),
        interrupts: Arc::default(),
    }
}

/// A device, and what was said about losses of its back end.
struct Rig {
    device: VhostUser,
    handle: Handle,
    losses: mpsc::Receiver<String>,
}

fn device(back_end: &BackEnd, guest: &Guest) -> Rig {
    device_with(back_end, guest, LONG)
}

fn device_with(back_end: &BackEnd, guest: &Guest, patience: Duration) -> Rig {
    device_of(Model::disk(2, 64), back_end, guest, patience)
}

fn device_of(model: Model, back_end: &BackEnd, guest: &Guest, patience: Duration) -> Rig {
    let backend = back_end.connect(&model, LONG).unwrap();
    let (sender, losses) = mpsc::channel();
    let options = Options {
        thread_name: "_vu_test".to_owned(),
        socket: back_end.socket.clone(),
        model,
        lost: Box::new(move |why| drop(sender.send(why))),
        patience,
    };
    let made = VhostUser::new(backend, options, &guest.memory, &Unconfined);
    let (device, handle) = made.unwrap();
    Rig {
        device,
        handle,
        losses,
    }
}

impl Rig {
    fn start(&mut self, guest: &Guest, queues: &[&GuestQueue]) {
        self.device.activate(guest.activation(queues)).unwrap();
    }

    /// Waits for the end of a step that the device does not wait for.
    fn quiesce(&mut self) {
        let start = Instant::now();
        while self.device.quiesce(Duration::ZERO).is_err() {
            assert!(start.elapsed() < LONG, "it does not stop");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < LONG, "it never happened that {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn driver_and_back_end_agree_on_what_both_have() {
    let back_end = BackEnd::obedient(ALL);
    let guest = guest(0);
    let rig = device(&back_end, &guest);
    // Neither LOG_ALL, nor PROTOCOL_FEATURES, nor CONFIG_WCE.
    let features = 1 << 32 | 1 << 28 | 1 << 12 | 1 << 9;
    assert_eq!(rig.device.features(), features);
    let mut config = [0; 64];
    rig.device.read_config(0, &mut config);
    // Its own but for the number of queues, and nothing beyond its end.
    let mut expected = [0xc5; 64];
    expected[34..36].copy_from_slice(&[2, 0]);
    expected[60..].fill(0);
    assert_eq!(config, expected);
    let agreed = &back_end.bodies(Req::SET_PROTOCOL_FEATURES)[0];
    assert_eq!(agreed[..], ALL.to_ne_bytes());
}

#[test]
fn a_folder_has_its_name_and_a_card_its_address() {
    let guest = guest(0);
    let config = |model| {
        // Neither asks for the back end's configuration.
        let back_end = BackEnd::obedient(ALL & !(1 << 9));
        let rig = device_of(model, &back_end, &guest, LONG);
        let mut config = [0; 40];
        rig.device.read_config(0, &mut config);
        (
            config,
            rig.device.features(),
            rig.device.queue_sizes().len(),
        )
    };
    let (folder, features, queues) = config(Model::fs("shared", 2, 64));
    assert_eq!(
        (&folder[..7], &folder[36..]),
        (&b"shared\0"[..], &[2, 0, 0, 0][..])
    );
    assert_eq!((features, queues), (1 << 32 | 1 << 28, 3));
    let mac = [2, 0, 0, 0, 0, 7];
    let (card, features, _) = config(Model::net(mac, Some(1400), [true; 3], 64));
    // The address, a link that is up, one pair of queues, the MTU.
    let expected = [2, 0, 0, 0, 0, 7, 1, 0, 1, 0, 0x78, 5];
    assert_eq!(card[..12], expected);
    // MTU, MAC and STATUS are Gantry's, the offloads the back end's.
    assert_eq!(
        features,
        1 << 32 | 1 << 28 | 1 << 3 | 1 << 5 | 1 << 16 | 3 << 11 | 1 << 9
    );
}

#[test]
fn what_is_not_the_back_ends_is_not_asked_of_it() {
    let (back_end, guest) = (BackEnd::obedient(ALL), guest(0));
    let model = Model::net([2, 0, 0, 0, 0, 7], None, [true; 3], 64);
    let mut rig = device_of(model, &back_end, &guest, LONG);
    let queues = [guest.queue(0, 64), guest.queue(1, 64)];
    let features = rig.device.features();
    let queues: Vec<_> = queues.iter().collect();
    let activation = guest.activation_with(&queues, features);
    rig.device.activate(activation).unwrap();
    back_end.enabled(2);
    let told = &back_end.bodies(Req::SET_FEATURES)[0];
    let told = u64::from_ne_bytes(told[..].try_into().unwrap());
    assert_eq!(
        told & (1 << 5 | 1 << 16 | 1 << 30 | 1 << 12),
        1 << 30 | 1 << 12
    );
}

#[test]
fn kicks_and_calls_reach_the_other_side() {
    let back_end = BackEnd::obedient(ALL);
    let guest = guest(0);
    let mut rig = device(&back_end, &guest);
    let (one, two) = (guest.queue(0, 64), guest.queue(1, 64));
    rig.start(&guest, &[&one, &two]);
    back_end.enabled(2);
    let features = &back_end.bodies(Req::SET_FEATURES)[0];
    // What the driver has accepted, and PROTOCOL_FEATURES.
    assert_eq!(
        u64::from_ne_bytes(features[..].try_into().unwrap()) >> 30 & 1,
        1
    );
    // A kick by the kernel, and one that came as an exit.
    let kick = back_end.event(Req::SET_VRING_KICK, 1);
    until("it is told to look", || shared_event::take(&kick).is_ok());
    rig.device.doorbell(1).unwrap().write(1).unwrap();
    until("the kernel's kick is there", || {
        shared_event::take(&kick).is_ok()
    });
    two.submit(&[(two.buffers(), 8, true)]);
    until("the other kick is there", || {
        shared_event::take(&kick).is_ok()
    });
    let queue = &guest.interrupts.queue;
    let before = queue.load(Ordering::SeqCst);
    let call = back_end.event(Req::SET_VRING_CALL, 1);
    call.write(1).unwrap();
    until("it is interrupted", || {
        queue.load(Ordering::SeqCst) > before
    });
    assert_eq!(guest.interrupts.resets.load(Ordering::SeqCst), 0);
}

#[test]
fn a_device_that_stops_goes_on_where_it_was() {
    let back_end = BackEnd::obedient(ALL);
    let guest = guest(0);
    let mut rig = device(&back_end, &guest);
    let queue = guest.queue(0, 64);
    rig.start(&guest, &[&queue]);
    rig.quiesce();
    // Refused by another device: it goes on.
    rig.device.carry_on();
    rig.quiesce();
    let queues = rig.device.deactivate();
    assert_eq!(queues[0].queue.next_avail(), 7);
    let mut again = guest.activation(&[]);
    again.queues = queues;
    rig.device.activate(again).unwrap();
    rig.quiesce();
    let bases = back_end.bodies(Req::SET_VRING_BASE);
    let bases: Vec<_> = bases.iter().map(|body| body[4]).collect();
    assert_eq!(bases, [0, 7, 7]);
    // The same memory for notes all along; another one for the next driver.
    assert_eq!(back_end.bodies(Req::GET_INFLIGHT_FD).len(), 1);
    rig.device.deactivate();
    rig.device.reset();
    rig.start(&guest, &[&queue]);
    rig.quiesce();
    assert_eq!(back_end.bodies(Req::GET_INFLIGHT_FD).len(), 2);
    assert!(rig.losses.try_recv().is_err());
}

/// The messages by which a back end is met.
const FIRST: [Req; 6] = [
    Req::GET_FEATURES,
    Req::GET_PROTOCOL_FEATURES,
    Req::GET_QUEUE_NUM,
    Req::GET_MAX_MEM_SLOTS,
    Req::GET_CONFIG,
    // All of them.
    Req::SET_OWNER,
];

#[test]
fn a_back_end_that_is_silent_at_first_is_refused() {
    for request in FIRST {
        for does in [Does::Nothing, Does::Drips] {
            let silent = u32::from(request);
            let all = request == Req::SET_OWNER;
            let back_end = BackEnd::new(ALL, move |request| match request == silent || all {
                true => does,
                false => Does::Answers,
            });
            let limit = Duration::from_millis(300);
            let error = back_end.connect(&Model::disk(1, 64), limit).unwrap_err();
            let error = Chain(&error).to_string();
            assert!(error.contains("has not answered"), "{request:?}: {error}");
        }
    }
}

#[test]
fn descriptors_are_counted_as_they_come() {
    let back_end = BackEnd::new(ALL, |_| Does::SendsFiles);
    let error = back_end.connect(&Model::disk(1, 64), LONG).unwrap_err();
    let error = Chain(&error).to_string();
    assert!(error.contains("the number of descriptors"), "{error}");
}

#[test]
fn a_back_end_that_lies_at_first_is_refused() {
    for request in &FIRST[..5] {
        for does in LIES {
            let of = u32::from(*request);
            let back_end = BackEnd::new(ALL, move |request| match request == of {
                true => does,
                false => Does::Answers,
            });
            // A long answer does not come whole, as the rest of it is missing.
            let limit = Duration::from_millis(500);
            let error = back_end.connect(&Model::disk(1, 64), limit);
            assert!(error.is_err(), "{request:?} {does:?}");
        }
    }
}

#[test]
fn a_back_end_without_what_is_needed_is_refused() {
    let refusal = |protocol, queues| {
        let back_end = BackEnd::obedient(protocol);
        let model = Model::disk(queues, 64);
        let error = back_end.connect(&model, LONG).unwrap_err();
        Chain(&error).to_string()
    };
    assert!(refusal(ALL, 5).contains("has 4 queues, and 5 are wanted"));
    assert!(refusal(ALL & !1, 2).contains("has 1 queues, and 2 are wanted"));
    assert!(refusal(ALL & !(1 << 9), 1).contains("F_CONFIG"));
}

/// The messages that start, change and stop a device.
const LATER: [Req; 10] = [
    Req::SET_FEATURES,
    Req::GET_INFLIGHT_FD,
    Req::SET_INFLIGHT_FD,
    Req::ADD_MEM_REG,
    Req::SET_VRING_NUM,
    Req::SET_VRING_BASE,
    Req::SET_VRING_ADDR,
    Req::SET_VRING_KICK,
    Req::SET_VRING_CALL,
    Req::SET_VRING_ENABLE,
];

#[test]
fn a_back_end_that_fails_later_costs_its_device_only() {
    let ways = LIES
        .iter()
        .chain(&[Does::Nothing, Does::Drips, Does::Refuses]);
    for does in ways.copied() {
        for request in LATER.iter().chain(&[Req::GET_VRING_BASE]) {
            if (does, *request) == (Does::Refuses, Req::GET_INFLIGHT_FD) {
                // Whatever it says is for back ends only.
                continue;
            }
            let back_end = BackEnd::obedient(ALL);
            let guest = guest(0);
            let mut rig = device_with(&back_end, &guest, Duration::from_millis(100));
            let of = u32::from(*request);
            back_end.behave(move |request| match request == of {
                true => does,
                // What comes after it would go well.
                false => Does::Answers,
            });
            let queue = guest.queue(0, 64);
            let start = Instant::now();
            rig.start(&guest, &[&queue]);
            assert!(start.elapsed() < LONG / 2, "a vCPU does not wait");
            rig.quiesce();
            let why = rig.losses.recv_timeout(LONG);
            let why = why.unwrap_or_else(|_| panic!("{request:?} {does:?}"));
            assert!(why.contains("its back end"), "{request:?} {does:?}: {why}");
            assert_eq!(rig.device.deactivate().len(), 1, "{request:?} {does:?}");
        }
    }
}

#[test]
fn a_back_end_that_says_what_nobody_asked_is_cut_off() {
    let back_end = BackEnd::obedient(ALL);
    let guest = guest(0);
    let rig = device(&back_end, &guest);
    let stream = back_end.streams.lock_unpoisoned()[0].try_clone().unwrap();
    (&stream).write_all(&[0; 20]).unwrap();
    let why = rig.losses.recv_timeout(LONG).unwrap();
    assert!(why.contains("nobody has asked for"), "{why}");
}

/// Lets the device have returned `count` buffers.
fn return_buffers(guest: &Guest, used_ring: u64, count: u16) {
    let memory = guest.memory.memory();
    memory
        .write_obj(count, GuestAddress(used_ring + 2))
        .unwrap();
}

#[test]
fn another_back_end_goes_on_with_what_one_has_noted() {
    let back_end = BackEnd::obedient(ALL);
    let guest = guest(0);
    let mut rig = device(&back_end, &guest);
    let queue = guest.queue(0, 64);
    let activation = guest.activation(&[&queue]);
    let used_ring = activation.queues[0].queue.used_ring();
    rig.device.activate(activation).unwrap();
    back_end.enabled(1);
    return_buffers(&guest, used_ring, 3);
    back_end.hang_up();
    let why = rig.losses.recv_timeout(LONG).unwrap();
    assert!(why.contains("the device goes on"), "{why}");
    back_end.enabled(2);
    assert_eq!(back_end.bodies(Req::SET_VRING_BASE)[1][4], 3);
    let notes = back_end.bodies(Req::SET_INFLIGHT_FD);
    assert_eq!((notes.len(), &notes[0]), (2, &notes[1]));
    assert_eq!(back_end.bodies(Req::GET_INFLIGHT_FD).len(), 1);
    assert!(!rig.handle.is_lost());
    assert_eq!(rig.device.counters(), [("reconnects", 1)]);
    assert_eq!(guest.interrupts.resets.load(Ordering::SeqCst), 0);
}

/// Puts a used element into a ring, and tells of it.
fn use_head(guest: &Guest, used_ring: u64, number: u16, head: u32) {
    let memory = guest.memory.memory();
    let element = GuestAddress(used_ring + 4 + 8 * u64::from(number % 64));
    memory.write_obj(head, element).unwrap();
    return_buffers(guest, used_ring, number + 1);
}

#[test]
fn another_back_end_goes_on_with_what_the_rings_tell() {
    let back_end = BackEnd::obedient(NO_IN_FLIGHT);
    let guest = guest(0);
    let mut rig = device(&back_end, &guest);
    let queue = guest.queue(0, 64);
    let activation = guest.activation(&[&queue]);
    let (used, available) = {
        let queue = &activation.queues[0].queue;
        (queue.used_ring(), queue.avail_ring())
    };
    rig.device.activate(activation).unwrap();
    back_end.enabled(1);
    let seen = || guest.interrupts.queue.load(Ordering::SeqCst);
    let call = back_end.event(Req::SET_VRING_CALL, 0);
    // Head 0 waits all the time, and the others are used: more than the ring has entries.
    for number in 0..100_u16 {
        queue.submit(&[(queue.buffers(), 8, true)]);
        if number % 64 == 0 && number > 0 {
            // The entry of the request that waits is another's by now.
            let memory = guest.memory.memory();
            let at = GuestAddress(available + 4);
            memory.write_obj(63_u16, at).unwrap();
        }
        if number > 0 {
            let head = if number == 64 {
                63
            } else {
                u32::from(number % 64)
            };
            let before = seen();
            use_head(&guest, used, number - 1, head);
            call.write(1).unwrap();
            until("the driver is interrupted", || seen() > before);
        }
    }
    // Two more, of which the second is used before the first.
    for _ in 0..2 {
        queue.submit(&[(queue.buffers(), 8, true)]);
    }
    use_head(&guest, used, 99, 101 % 64);
    back_end.hang_up();
    let why = rig.losses.recv_timeout(LONG).unwrap();
    assert!(why.contains("the device goes on"), "{why}");
    back_end.enabled(2);
    assert_eq!(back_end.bodies(Req::SET_VRING_BASE)[1][4], 100);
    let entry = |number: u64| -> u16 {
        let at = GuestAddress(available + 4 + 2 * (number % 64));
        guest.memory.memory().read_obj(at).unwrap()
    };
    assert_eq!([entry(100), entry(101)], [0, 100 % 64]);
    assert_eq!(guest.interrupts.resets.load(Ordering::SeqCst), 0);
}

#[test]
fn one_that_was_cut_off_may_still_write_so_no_other_goes_on() {
    let back_end = BackEnd::obedient(ALL);
    let guest = guest(0);
    let rig = started(&back_end, &guest);
    let stream = back_end.streams.lock_unpoisoned()[0].try_clone().unwrap();
    (&stream).write_all(&[0; 20]).unwrap();
    let why = rig.losses.recv_timeout(LONG).unwrap();
    assert!(why.contains("remove the device"), "{why}");
}

fn started(back_end: &BackEnd, guest: &Guest) -> Rig {
    let mut rig = device(back_end, guest);
    let queue = guest.queue(0, 64);
    rig.start(guest, &[&queue]);
    back_end.enabled(1);
    rig
}

#[test]
fn without_what_was_outstanding_the_driver_has_to_start_anew() {
    let back_end = BackEnd::obedient(NO_IN_FLIGHT);
    let guest = guest(0);
    let mut rig = device(&back_end, &guest);
    let queue = guest.queue(0, 64);
    let activation = guest.activation(&[&queue]);
    let used = activation.queues[0].queue.used_ring();
    rig.device.activate(activation).unwrap();
    back_end.enabled(1);
    // A driver that polls: nobody is interrupted for what is used.
    queue.submit(&[(queue.buffers(), 8, true)]);
    queue.submit(&[(queue.buffers(), 8, true)]);
    use_head(&guest, used, 0, 1);
    back_end.hang_up();
    let why = rig.losses.recv_timeout(LONG).unwrap();
    assert!(why.contains("remove the device"), "{why}");
    let resets = &guest.interrupts.resets;
    until("the driver is told", || resets.load(Ordering::SeqCst) == 1);
    until("it is found again", || {
        back_end.connections.load(Ordering::SeqCst) == 2
    });
    // The driver resets the device.
    rig.quiesce();
    rig.device.deactivate();
    rig.device.reset();
    rig.start(&guest, &[&queue]);
    back_end.enabled(2);
}

#[test]
fn a_driver_may_start_before_the_back_end_is_back() {
    let back_end = BackEnd::obedient(NO_IN_FLIGHT);
    let guest = guest(0);
    let mut rig = device(&back_end, &guest);
    let path = back_end.socket.with_extension("away");
    std::fs::rename(&back_end.socket, &path).unwrap();
    back_end.hang_up();
    rig.losses.recv_timeout(LONG).unwrap();
    let queue = guest.queue(0, 64);
    rig.start(&guest, &[&queue]);
    std::fs::rename(&path, &back_end.socket).unwrap();
    back_end.enabled(1);
    assert_eq!(guest.interrupts.resets.load(Ordering::SeqCst), 0);
}

fn add_region(guest: &Guest, at: usize) {
    let one = GuestRam::from_ranges_with_files([region(at, MIB)]).unwrap();
    let memory = guest.memory.memory();
    let region = one.iter().next().map(|_| one.clone()).unwrap();
    let (_, region) = region
        .remove_region(GuestAddress(at as u64), MIB as u64)
        .unwrap();
    let more = memory.insert_region(region).unwrap();
    guest.memory.lock().unwrap().replace(more);
}

fn change(rig: &Rig) {
    let change = rig.handle.memory_changed().unwrap();
    change.wait(Instant::now() + LONG);
}

#[test]
fn new_memory_is_mapped_one_region_at_a_time() {
    let back_end = BackEnd::obedient(ALL);
    let guest = guest(9);
    let mut rig = device(&back_end, &guest);
    assert_eq!(rig.handle.slots(), 32);
    // Not before there is a driver.
    add_region(&guest, 48 * MIB);
    change(&rig);
    assert_eq!(back_end.bodies(Req::ADD_MEM_REG).len(), 0);
    let queue = guest.queue(0, 64);
    rig.start(&guest, &[&queue]);
    back_end.enabled(1);
    add_region(&guest, 50 * MIB);
    change(&rig);
    let regions = back_end.bodies(Req::ADD_MEM_REG);
    assert_eq!(regions.len(), 12);
    assert_eq!(regions[11][8..16], (50 * MIB as u64).to_ne_bytes());
    let all = back_end.inner.received.lock_unpoisoned();
    let add = u32::from(Req::ADD_MEM_REG);
    assert!(
        all.iter()
            .filter(|one| one.request == add)
            .all(|one| one.files.len() == 1)
    );
}

#[test]
fn a_table_of_memory_is_replaced_while_queues_are_stopped() {
    let back_end = BackEnd::obedient(NO_SLOTS);
    let guest = guest(2);
    let mut rig = device(&back_end, &guest);
    assert_eq!(rig.handle.slots(), 8);
    let queue = guest.queue(0, 64);
    rig.start(&guest, &[&queue]);
    back_end.enabled(1);
    add_region(&guest, 48 * MIB);
    change(&rig);
    let tables = back_end.bodies(Req::SET_MEM_TABLE);
    let counts: Vec<_> = tables.iter().map(|body| body[0]).collect();
    assert_eq!(counts, [3, 4]);
    assert_eq!(back_end.bodies(Req::GET_VRING_BASE).len(), 1);
    assert_eq!(back_end.bodies(Req::SET_VRING_BASE)[1][4], 7);
}

#[test]
fn more_regions_than_a_back_end_maps_are_refused() {
    for (back_end, more) in [
        (BackEnd::obedient(NO_SLOTS), 8),
        (BackEnd::with(ALL, 2, |_| Does::Answers), 2),
    ] {
        let guest = guest(more);
        let model = Model::disk(1, 64);
        let backend = back_end.connect(&model, LONG).unwrap();
        let options = Options {
            thread_name: "_vu_test".to_owned(),
            socket: back_end.socket.clone(),
            model,
            lost: Box::new(|_| ()),
            patience: LONG,
        };
        let made = VhostUser::new(backend, options, &guest.memory, &Unconfined);
        let error = made.err().unwrap().to_string();
        assert!(error.contains("regions of memory"), "{error}");
    }
}

#[test]
fn private_memory_is_refused_with_what_to_do() {
    let back_end = BackEnd::obedient(ALL);
    let model = Model::disk(1, 64);
    let backend = back_end.connect(&model, LONG).unwrap();
    let options = Options {
        thread_name: "_vu_test".to_owned(),
        socket: back_end.socket.clone(),
        model,
        lost: Box::new(|_| ()),
        patience: LONG,
    };
    let made = VhostUser::new(backend, options, &Guest::new().memory, &Unconfined);
    assert!(made.err().unwrap().to_string().contains("shared=on"));
}

#[test]
fn a_back_end_that_does_not_map_new_memory_is_cut_off() {
    let back_end = BackEnd::obedient(ALL);
    let guest = guest(0);
    let mut rig = device(&back_end, &guest);
    let queue = guest.queue(0, 64);
    rig.start(&guest, &[&queue]);
    back_end.enabled(1);
    back_end.behave(|_| Does::Nothing);
    add_region(&guest, 48 * MIB);
    let change = rig.handle.memory_changed().unwrap();
    change.wait(Instant::now());
    let why = rig.losses.recv_timeout(REMAP_PATIENCE + LONG).unwrap();
    assert!(why.contains("its back end"), "{why}");
    // It may still use what was outstanding.
    assert!(why.contains("remove the device"), "{why}");
}

#[test]
fn a_back_end_that_blocks_an_eventfd_blocks_no_vcpu() {
    let back_end = BackEnd::obedient(ALL);
    let guest = guest(0);
    let mut rig = device_with(&back_end, &guest, Duration::from_secs(1));
    let queue = guest.queue(0, 64);
    rig.start(&guest, &[&queue]);
    back_end.enabled(1);
    let before = guest.interrupts.queue.load(Ordering::SeqCst);
    for request in [Req::SET_VRING_KICK, Req::SET_VRING_CALL] {
        let event = back_end.event(request, 0);
        // SAFETY: calls without pointers, on a descriptor that is open.
        unsafe {
            let flags = libc::fcntl(event.as_raw_fd(), libc::F_GETFL);
            libc::fcntl(event.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK);
        }
        let _ = shared_event::take(&event);
        event.write(u64::MAX - 1).unwrap();
    }
    queue.submit(&[(queue.buffers(), 8, true)]);
    until("it is interrupted nevertheless", || {
        guest.interrupts.queue.load(Ordering::SeqCst) > before
    });
    rig.quiesce();
    assert_eq!(rig.device.deactivate().len(), 1);
    rig.device.reset();
}

#[test]
fn nothing_of_a_device_is_left_when_it_is_gone() {
    let back_end = BackEnd::obedient(ALL);
    let guest = guest(0);
    let mut rig = device(&back_end, &guest);
    let queue = guest.queue(0, 64);
    rig.start(&guest, &[&queue]);
    back_end.enabled(1);
    let Rig {
        device,
        handle,
        losses,
    } = rig;
    drop(device);
    // The thread drops its end when it ends, although others still know the device.
    assert!(losses.recv_timeout(LONG).is_err());
    assert!(handle.memory_changed().is_none());
    assert_eq!(back_end.connections.load(Ordering::SeqCst), 1);
}

#[test]
fn a_back_end_that_listens_soon_is_waited_for() {
    let back_end = BackEnd::obedient(ALL);
    let away = back_end.socket.with_extension("away");
    std::fs::rename(&back_end.socket, &away).unwrap();
    let socket = back_end.socket.clone();
    let other = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        std::fs::rename(&away, &socket).unwrap();
    });
    let model = Model::disk(1, 64);
    assert!(Backend::connect_within(&back_end.socket, &model, LONG).is_ok());
    other.join().unwrap();
}

#[test]
fn nobody_listens_is_said_with_what_to_do() {
    let path = Path::new("/nonexistent/socket");
    let error = Backend::connect_within(path, &Model::disk(1, 64), Duration::ZERO);
    let error = Chain(&error.unwrap_err()).to_string();
    assert!(
        error.contains("start the device's back end first"),
        "{error}"
    );
}
