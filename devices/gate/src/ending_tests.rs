//! How servers and clients end, on a host that pretends to have the module: each call of it fails.

use std::{
    fs::File,
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::{UnixListener, UnixStream},
    },
    sync::{Arc, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use base::Unpoisoned;
use device_model::{bus::BusDevice, memory::GuestMemory};
use pci::{LifecycleError, PciFunction};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmfunc_gate::{
    host::ServerSettings,
    port::{Command, Reason, State, registers as at},
};

use super::{
    Event, KERNEL, Options, Side, WATCH,
    client::Client,
    function::Gate,
    hello::{self, Answer},
    server::{BREATH, Door, Server},
    side::End,
    tests::{FakeVcpu, resources},
};

const WINDOW: u64 = 0x40_0000_0000;
const PLACE: u64 = 1 << 40;
const CR3: u64 = 0x1000;
/// Page table of the fake vCPU's process.
const CALLER: u64 = 0;

fn settings(cr3: u64) -> ServerSettings {
    ServerSettings {
        cr3,
        fs_base: 0,
        gs_base: 0,
        pkru: 0,
        window: WINDOW,
        window_gpa: PLACE,
    }
}

/// Gives the process at [`CR3`] a page table with its window, or removes that.
fn map_window(memory: &GuestMemory, mapped: bool) {
    for (table, index, entry) in [(0, 0, 0x2067), (1, 256, 0x3067), (2, 0, 0x4067)] {
        let at = CR3 + table * 0x1000 + index * 8;
        let entry: u64 = entry;
        memory.memory().write_obj(entry, GuestAddress(at)).unwrap();
    }
    let last = if mapped { PLACE | 0x67 } else { 0 };
    memory
        .memory()
        .write_obj(last, GuestAddress(0x4000))
        .unwrap();
}

fn until(what: &str, is: impl Fn() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn read(end: &impl BusDevice, offset: u64) -> u32 {
    let mut data = [0; 4];
    end.read(offset, &mut data);
    u32::from_le_bytes(data)
}

fn command(end: &impl BusDevice, command: Command) {
    end.write(at::COMMAND, &(command as u32).to_le_bytes());
}

fn state(end: &impl BusDevice) -> (State, Reason) {
    (
        State::from_number(read(end, at::STATE)).unwrap(),
        Reason::from_number(read(end, at::REASON)).unwrap(),
    )
}

/// An end with its running thread.
struct Running<E: End + 'static> {
    end: Arc<E>,
    thread: Option<JoinHandle<()>>,
    memory: GuestMemory,
    vcpu: Arc<FakeVcpu>,
    events: Arc<std::sync::Mutex<Vec<Event>>>,
    folder: tempfile::TempDir,
}

/// The resources of an end that tests inspect.
type Given = (
    GuestMemory,
    Arc<FakeVcpu>,
    Arc<std::sync::Mutex<Vec<Event>>>,
);

impl<E: End + 'static> Running<E> {
    fn start(end: E, (memory, vcpu, events): Given, folder: tempfile::TempDir) -> Self {
        let end = Arc::new(end);
        let runs = Arc::clone(&end);
        Self {
            end,
            thread: Some(thread::spawn(move || runs.run())),
            memory,
            vcpu,
            events,
            folder,
        }
    }
}

impl<E: End + 'static> Drop for Running<E> {
    fn drop(&mut self) {
        self.end.stop();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn server() -> Running<Server> {
    let folder = tempfile::tempdir().unwrap();
    let (resources, vcpu, events) = resources(3);
    let memory = resources.memory.clone();
    let server = Server::new("gate", &folder.path().join("server"), 0, resources).unwrap();
    // As the process of `settings` wrote it.
    server.write(at::WINDOW, &WINDOW.to_le_bytes());
    Running::start(server, (memory, vcpu, events), folder)
}

impl Running<Server> {
    /// Connects as a client's VM, and returns the reply.
    fn client(&self) -> (UnixStream, Answer) {
        let stream = UnixStream::connect(self.folder.path().join("server")).unwrap();
        let answer = hello::receive_answer(&stream).unwrap();
        (stream, answer)
    }

    fn is_over(&self) -> bool {
        self.events.lock_unpoisoned().contains(&Event::Over)
    }
}

#[test]
fn a_client_that_has_gone_takes_neither_the_next_client_nor_the_next_server_along() {
    let server = server();
    server.end.pretend(&settings(CALLER), true).unwrap();
    let (stream, answer) = server.client();
    assert!(matches!(answer, Answer::Server(_)));
    let (_, answer) = server.client();
    assert!(matches!(answer, Answer::No(Reason::Taken)));
    drop(stream);
    until("it is over", || server.is_over());
    // No client is admitted while the VMM has not acted yet.
    let (_, answer) = server.client();
    assert!(matches!(answer, Answer::No(Reason::NotServing)));
    assert!(server.end.is_frozen());
    // Another thread gives the server up first, and the process serves again.
    let given_up = server.end.give_up(Reason::Resumed).unwrap();
    assert_eq!((given_up.standing, given_up.why), (true, Reason::Gone));
    server.end.pretend(&settings(CALLER), true).unwrap();
    let (_stream, answer) = server.client();
    assert!(matches!(answer, Answer::Server(_)));
    // The VMM now handles the event.
    assert_eq!(server.end.over(), None);
    assert!(server.end.is_frozen());
    assert_eq!(state(&*server.end).0, State::Frozen);
}

#[test]
fn a_machine_that_hears_of_the_end_lets_the_vcpu_go_once() {
    let server = server();
    server.end.pretend(&settings(CALLER), true).unwrap();
    drop(server.client());
    until("it is over", || server.is_over());
    assert_eq!(state(&*server.end), (State::Ended, Reason::Gone));
    let over = server.end.over().unwrap();
    assert_eq!((over.standing, over.why), (true, Reason::Gone));
    assert_eq!(server.end.over(), None);
    assert_eq!(server.end.give_up(Reason::Resumed), None);
}

#[test]
fn a_vcpu_that_asks_in_vain_does_not_stand_still_for_the_server_before() {
    let server = server();
    let before = ServerSettings {
        window: WINDOW + (1 << 30),
        ..settings(CALLER)
    };
    server.end.pretend(&before, true).unwrap();
    // Another process with the same page table, which the module refuses.
    command(&*server.end, Command::Freeze);
    assert_eq!(state(&*server.end).0, State::Failed);
    assert_eq!(server.end.give_up(Reason::Resumed), None);
    assert!(!server.end.is_frozen());
}

#[test]
fn a_process_at_slow_work_hears_of_its_clients_end_before_it_serves_the_next_one() {
    let server = server();
    server.end.pretend(&settings(CALLER), false).unwrap();
    drop(server.client());
    until("it is over", || server.is_over());
    command(&*server.end, Command::Freeze);
    assert_eq!(state(&*server.end), (State::Ended, Reason::Gone));
    assert!(!*server.vcpu.frozen.lock_unpoisoned());
    // Told once: after that it is a new server, for which there is no module.
    command(&*server.end, Command::Freeze);
    assert_eq!(state(&*server.end).0, State::Failed);
    // With a module, the VMM, which handles the event late, would leave the new server alone.
    server.end.pretend(&settings(CALLER), true).unwrap();
    assert_eq!(server.end.over(), None);
    assert!(server.end.is_frozen());
}

#[test]
fn a_server_whose_process_ends_at_slow_work_is_over() {
    let server = server();
    map_window(&server.memory, true);
    server.end.pretend(&settings(CR3), false).unwrap();
    let (stream, _) = server.client();
    thread::sleep(2 * WATCH);
    assert!(!server.is_over());
    map_window(&server.memory, false);
    until("it is over", || server.is_over());
    // Its client notices it.
    until("the connection ends", || {
        hello::receive_answer(&stream).is_err()
    });
    // The next process is not told of an end that is not its own, whatever pages it received.
    server.vcpu.cr3.store(CR3, Ordering::Relaxed);
    command(&*server.end, Command::Freeze);
    assert_eq!(state(&*server.end).0, State::Failed);
}

#[test]
fn a_process_that_has_the_page_table_of_one_that_served_is_another_one() {
    let changes: [fn(&Running<Server>); 4] = [
        |server| server.vcpu.fs_base.store(0x1000, Ordering::Relaxed),
        |server| server.end.write(at::WINDOW, &(2 * WINDOW).to_le_bytes()),
        |server| server.end.write(at::COUNT, &1_u32.to_le_bytes()),
        |server| server.end.write(at::PKRU, &1_u32.to_le_bytes()),
    ];
    for change in changes {
        let server = server();
        server.end.pretend(&settings(CALLER), false).unwrap();
        let (stream, _) = server.client();
        // The same process: the module, which is missing, is asked to let it sleep.
        command(&*server.end, Command::Freeze);
        assert_eq!(state(&*server.end).0, State::Failed);
        assert!(server.end.in_use());
        change(&server);
        // The other server has ended, and this is a new one, for which there is no module.
        command(&*server.end, Command::Freeze);
        assert_eq!(state(&*server.end).0, State::Failed);
        assert!(!server.end.in_use());
        until("the client hears of it", || {
            hello::receive_answer(&stream).is_err()
        });
    }
}

#[test]
fn a_process_does_not_hear_of_the_end_of_one_that_had_its_page_table() {
    let server = server();
    server.end.pretend(&settings(CALLER), false).unwrap();
    drop(server.client());
    until("it is over", || server.is_over());
    server.vcpu.fs_base.store(0x1000, Ordering::Relaxed);
    command(&*server.end, Command::Freeze);
    assert_eq!(state(&*server.end).0, State::Failed);
}

#[test]
fn a_port_that_can_accept_nobody_waits_before_it_tries_again() {
    let folder = tempfile::tempdir().unwrap();
    let (resources, ..) = resources(3);
    let server = Server::new("gate", &folder.path().join("server"), 0, resources).unwrap();
    // As for a VMM without free descriptors: the listener is always ready, and never accepted.
    let listener = server.socket.listener.as_raw_fd();
    // SAFETY: the listener is open.
    assert_eq!(unsafe { libc::shutdown(listener, libc::SHUT_RDWR) }, 0);
    let mut door = Door::default();
    assert_eq!(server.limit(&door), None);
    assert!(server.step(&mut door).unwrap());
    assert!(door.closed);
    assert_eq!(server.limit(&door), Some(BREATH));
    // After that it listens again.
    assert!(server.step(&mut door).unwrap());
    assert!(!door.closed);
    assert!(server.step(&mut door).unwrap());
    assert!(door.closed);
}

/// A client's end, and the listening socket of its server's VM.
fn client() -> (Running<Client>, UnixListener) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    let listener = UnixListener::bind(&path).unwrap();
    let (resources, vcpu, events) = resources(3);
    let memory = resources.memory.clone();
    let client = Client::new("gate", path, 2, 0, resources).unwrap();
    client.window_at(Some(PLACE));
    let running = Running::start(client, (memory, vcpu, events), folder);
    (running, listener)
}

/// Requests a connection, and accepts it as the server's VM.
fn connect(client: &impl BusDevice, listener: &UnixListener) -> UnixStream {
    command(client, Command::Connect);
    let (stream, _) = listener.accept().unwrap();
    let null = File::open("/dev/null").unwrap();
    hello::offer(&stream, WINDOW, &[0; KERNEL], null.as_fd(), null.as_fd()).unwrap();
    until("it is connected", || state(client).0 == State::Connected);
    stream
}

#[test]
fn a_client_is_in_use_while_it_has_a_server_or_a_pair() {
    let (client, listener) = client();
    assert!(!client.end.in_use());
    let stream = connect(&*client.end, &listener);
    assert!(client.end.in_use());
    command(&*client.end, Command::Unpair);
    assert!(!client.end.in_use());
    drop(stream);
    // The pages of a pair exist longer than its server.
    let stream = connect(&*client.end, &listener);
    client.end.pretend(CR3, WINDOW).unwrap();
    stream.shutdown(Shutdown::Both).unwrap();
    until("it hears", || state(&*client.end).0 == State::Failed);
    assert!(client.end.in_use());
    command(&*client.end, Command::Unpair);
    assert!(!client.end.in_use());
}

#[test]
fn a_guest_that_thinks_better_of_it_while_it_connects_has_no_server() {
    let (client, listener) = client();
    command(&*client.end, Command::Connect);
    let (stream, _) = listener.accept().unwrap();
    command(&*client.end, Command::Unpair);
    let null = File::open("/dev/null").unwrap();
    hello::offer(&stream, WINDOW, &[0; KERNEL], null.as_fd(), null.as_fd()).unwrap();
    let heard = hello::receive_shared(&stream);
    assert!(matches!(heard, Ok(None)), "{heard:?}");
    assert_eq!(state(&*client.end), (State::Idle, Reason::None));
    assert!(!client.end.in_use());
}

#[test]
fn a_connection_that_was_undone_meanwhile_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let (resources, ..) = resources(3);
    // It has no thread, so nothing happens by itself.
    let client = Client::new("gate", folder.path().join("server"), 2, 0, resources).unwrap();
    command(&client, Command::Connect);
    // The result of a connection that was ended before it was reported.
    client.connected(State::Connected, (Reason::None, 0));
    assert_eq!(state(&client), (State::Connecting, Reason::None));
    client.connected(State::Failed, (Reason::Unreachable, 0));
    assert_eq!(state(&client), (State::Failed, Reason::Unreachable));
}

#[test]
fn a_server_at_work_is_looked_after_whatever_the_guest_writes() {
    let folder = tempfile::tempdir().unwrap();
    let (resources, ..) = resources(3);
    let server = Server::new("gate", &folder.path().join("server"), 0, resources).unwrap();
    let door = Door::default();
    assert_eq!(server.limit(&door), None);
    server.pretend(&settings(CR3), false).unwrap();
    assert_eq!(server.limit(&door), Some(WATCH));
    // Another process of the guest, which changes the state register.
    server.write(at::COMMAND, &u32::MAX.to_le_bytes());
    assert_ne!(state(&server).0, State::Awake);
    assert_eq!(server.limit(&door), Some(WATCH));
}

#[test]
fn the_server_of_a_process_that_ends_without_a_word_is_free() {
    let (client, listener) = client();
    map_window(&client.memory, true);
    let stream = connect(&*client.end, &listener);
    client.end.pretend(CR3, WINDOW).unwrap();
    thread::sleep(2 * WATCH);
    assert_eq!(state(&*client.end).0, State::Paired);
    map_window(&client.memory, false);
    until("it is free", || state(&*client.end).0 == State::Idle);
    let heard = hello::receive_shared(&stream);
    assert!(matches!(heard, Ok(None)), "{heard:?}");
    until("nothing is left", || !client.end.in_use());
}

#[test]
fn a_port_that_has_a_server_is_saved_only_after_it_was_taken_away() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    let listener = UnixListener::bind(&path).unwrap();
    let (resources, ..) = resources(3);
    let options = Options {
        thread_name: "gate".to_owned(),
        side: Side::Client {
            server: path,
            shared: 8192,
        },
    };
    let mut gate = Gate::on(Vec::new(), options, resources).unwrap();
    gate.plugged(Default::default()).unwrap();
    let registers = gate.bar_device(pci::BarIndex::ZERO).unwrap();
    let write = |command: Command| {
        registers.write(at::COMMAND, &(command as u32).to_le_bytes());
    };
    gate.save().unwrap();
    write(Command::Connect);
    let (stream, _) = listener.accept().unwrap();
    let null = File::open("/dev/null").unwrap();
    hello::offer(&stream, WINDOW, &[0; KERNEL], null.as_fd(), null.as_fd()).unwrap();
    until("it is connected", || {
        let mut data = [0; 4];
        registers.read(at::STATE, &mut data);
        u32::from_le_bytes(data) == State::Connected as u32
    });
    let refused = gate.save();
    assert!(matches!(refused, Err(LifecycleError::WrongState(_))));
    gate.detach().unwrap();
    gate.save().unwrap();
}
