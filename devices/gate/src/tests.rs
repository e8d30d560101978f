//! The port from the guest's perspective, on a host without the module or with one that refuses.

use std::{
    os::fd::{AsFd, BorrowedFd},
    os::unix::net::UnixStream,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use base::Unpoisoned;
use device_model::{
    bus::Bus,
    testing::{FakeDoorbells, FakeSpace, guest_memory},
    thread::Unconfined,
};
use pci::{BarIndex, PciFunction, PciSegment, Seat, SegmentConfig, Window};
use proptest::prelude::*;
use vmfunc_gate::port::{Command, Reason, Role, State, registers as at};

use super::*;

/// A fake vCPU at a privilege level, which can be frozen.
pub struct FakeVcpu {
    ring: u8,
    /// Page table of the process that it executes.
    pub cr3: AtomicU64,
    pub fs_base: AtomicU64,
    pub frozen: Mutex<bool>,
}

impl CallingVcpu for FakeVcpu {
    fn caller(&self) -> io::Result<Caller> {
        Ok(Caller {
            ring: self.ring,
            cr3: self.cr3.load(Ordering::Relaxed),
            fs_base: self.fs_base.load(Ordering::Relaxed),
            ..Caller::default()
        })
    }

    fn with_fd(&self, work: &mut dyn FnMut(BorrowedFd<'_>)) -> io::Result<()> {
        // Not a vCPU: the module, if present, refuses it.
        let file = std::fs::File::open("/dev/null")?;
        work(file.as_fd());
        Ok(())
    }

    fn freeze(&self, frozen: bool) -> io::Result<()> {
        *self.frozen.lock_unpoisoned() = frozen;
        Ok(())
    }
}

struct Rig {
    mmio: Arc<Bus>,
    registers: u64,
    vcpu: Arc<FakeVcpu>,
    events: Arc<Mutex<Vec<Event>>>,
    function: Arc<Mutex<Gate>>,
}

/// The resources of a port whose guest runs at a privilege level, with the vCPU and the events.
pub fn resources(ring: u8) -> (Resources, Arc<FakeVcpu>, Arc<Mutex<Vec<Event>>>) {
    let vcpu = Arc::new(FakeVcpu {
        ring,
        cr3: AtomicU64::new(0),
        fs_base: AtomicU64::new(0),
        frozen: Mutex::new(false),
    });
    let events = Arc::<Mutex<Vec<Event>>>::default();
    let heard = Arc::clone(&events);
    let resources = Resources {
        doorbells: Arc::new(FakeDoorbells::default()),
        memory: guest_memory(1 << 16),
        space: Arc::new(FakeSpace),
        vcpu: Arc::clone(&vcpu) as _,
        spawner: Arc::new(Unconfined),
        report: Arc::new(move |event| heard.lock_unpoisoned().push(event)),
    };
    (resources, vcpu, events)
}

fn rig(side: Side, ring: u8) -> Rig {
    let (resources, vcpu, events) = resources(ring);
    let options = Options {
        thread_name: "gate".to_owned(),
        side,
    };
    let function = Arc::new(Mutex::new(Gate::new(options, resources).unwrap()));
    let (mmio, pio) = (Arc::<Bus>::default(), Arc::<Bus>::default());
    let config = SegmentConfig {
        segment: 0,
        mmio32: Window::new(0xc000_0000, 1 << 28),
        mmio64: Window::new(1 << 40, 1 << 40),
        ..SegmentConfig::default()
    };
    let segment = PciSegment::new(config, Arc::clone(&mmio), pio);
    let bdf = segment.plug(function.clone(), Seat::ANY, &[]).unwrap();
    segment.write_config(bdf, 4, &6u16.to_le_bytes());
    let registers = {
        let function = function.lock_unpoisoned();
        let bar = BarIndex::new(0).unwrap();
        function.config().bar_address(bar).unwrap()
    };
    Rig {
        mmio,
        registers,
        vcpu,
        events,
        function,
    }
}

impl Rig {
    fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        assert!(self.mmio.read(self.registers + offset, &mut data));
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u64, value: u32) {
        self.mmio
            .write(self.registers + offset, &value.to_le_bytes());
    }

    fn command(&self, command: Command) {
        self.write(at::COMMAND, command as u32);
    }

    fn state(&self) -> (State, Reason) {
        (
            State::from_number(self.read(at::STATE)).unwrap(),
            Reason::from_number(self.read(at::REASON)).unwrap(),
        )
    }

    fn after_connecting(&self) -> (State, Reason) {
        let start = Instant::now();
        while self.state().0 == State::Connecting && start.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_millis(1));
        }
        self.state()
    }
}

fn server(folder: &tempfile::TempDir) -> Side {
    Side::Server {
        socket: folder.path().join("server"),
    }
}

#[test]
fn a_port_says_what_it_is_and_what_its_host_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let server = rig(server(&folder), 3);
    let client = rig(
        Side::Client {
            server: folder.path().join("server"),
            shared: 1 << 16,
        },
        3,
    );
    for (rig, role) in [(&server, Role::Server), (&client, Role::Client)] {
        assert_eq!(rig.read(at::MAGIC), at::MAGIC_VALUE);
        assert_eq!(rig.read(at::ROLE), role as u32);
        let lacks = vmfunc_gate::host::missing(std::path::Path::new("/"));
        let lacks = lacks.into_iter().fold(0, |sum, lack| sum | lack as u32);
        assert_eq!(rig.read(at::LACKS), lacks);
    }
    assert_eq!(client.read(at::SHARED), 16);
}

#[test]
fn a_vcpu_whose_server_is_refused_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    for (ring, count) in [(0, 1), (3, 0), (3, 1), (3, u32::MAX)] {
        let rig = rig(server(&folder), ring);
        rig.write(at::COUNT, count);
        rig.command(Command::Freeze);
        assert_eq!(rig.state().0, State::Failed);
        assert!(
            !*rig.vcpu.frozen.lock_unpoisoned(),
            "ring {ring}, {count} handlers"
        );
        let function = rig.function.lock_unpoisoned();
        let server = function.server().unwrap();
        assert!(!server.is_frozen());
        assert!(!server.thaw());
        assert_eq!(server.give_up(Reason::Resumed), None);
        assert_eq!(*rig.events.lock_unpoisoned(), []);
    }
}

#[test]
fn a_client_hears_why_there_is_no_server() {
    let folder = tempfile::tempdir().unwrap();
    let serving = rig(server(&folder), 3);
    let stream = UnixStream::connect(folder.path().join("server")).unwrap();
    let expected = if serving.read(at::LACKS) == 0 {
        Reason::NotServing
    } else {
        Reason::Host
    };
    match hello::receive_answer(&stream).unwrap() {
        hello::Answer::No(why) => assert_eq!(why, expected),
        hello::Answer::Server(offer) => panic!("{offer:?}"),
    }
    let client = rig(
        Side::Client {
            server: folder.path().join("nobody"),
            shared: 8192,
        },
        3,
    );
    client.command(Command::Connect);
    let (state, why) = client.after_connecting();
    assert_eq!(state, State::Failed);
    assert!(matches!(why, Reason::Host | Reason::Unreachable), "{why:?}");
    client.command(Command::Pair);
    assert_eq!(client.state(), (State::Failed, Reason::NotServing));
}

#[test]
fn a_machine_that_was_killed_does_not_keep_the_next_from_its_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let first = rig(server(&folder), 3);
    assert!(UnixStream::connect(&path).is_ok());
    // If a newer VM has taken over the socket's name, the end of the older one must not remove it.
    std::fs::rename(&path, folder.path().join("old")).unwrap();
    let second = rig(server(&folder), 3);
    drop(first);
    assert!(UnixStream::connect(&path).is_ok());
    drop(second);
}

#[test]
fn a_socket_goes_with_its_server_and_memory_has_limits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server");
    let first = rig(server(&folder), 3);
    assert!(path.exists());
    drop(first);
    assert!(!path.exists());
    for shared in [0, 4096, 8193, MOST_SHARED + 4096] {
        let side = Side::Client {
            server: path.clone(),
            shared,
        };
        let (resources, ..) = resources(3);
        let options = Options {
            thread_name: "gate".to_owned(),
            side,
        };
        assert!(matches!(
            Gate::new(options, resources),
            Err(Error::Shared(_))
        ));
    }
}

proptest! {
    #[test]
    fn whatever_a_guest_writes_is_survived(
        is_server in any::<bool>(),
        accesses in proptest::collection::vec(
            (0..at::SIZE, 0..4usize, any::<u64>()), 1..60
        ),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let side = if is_server {
            server(&folder)
        } else {
            Side::Client { server: folder.path().join("nobody"), shared: 8192 }
        };
        let rig = rig(side, 3);
        for (offset, size, value) in accesses {
            let len = 1 << size;
            let offset = (offset / len as u64) * len as u64;
            let mut data = value.to_le_bytes();
            rig.mmio.write(rig.registers + offset, &data[..len]);
            rig.mmio.read(rig.registers + offset, &mut data[..len]);
        }
        for command in 0..8 {
            rig.write(at::COMMAND, command);
        }
        prop_assert!(!*rig.vcpu.frozen.lock_unpoisoned());
    }
}
