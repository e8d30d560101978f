//! The gate ports of a server VM and of a client VM, connected, on a host whose module refuses
//! everything. Guests write to registers, configuration space and page tables; a machine resumes,
//! saves and resets; and strangers connect to the server's socket.

#![no_main]

use std::{
    fs::File,
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use devices::{
    gate::{Caller, CallingVcpu, Gate, Options, Resources, Server, Side},
    pci::{BarIndex, Bdf, PciFunction, Seat},
    testing::{FakeSpace, Rig},
    thread::Unconfined,
};
use gantry_fuzz::{input::Input, scratch};
use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmfunc_gate::{
    host::ServerSettings,
    port::{Reason, registers as at},
};

const STRANGERS: usize = 4;

/// The vCPU of both guests.
#[derive(Default)]
struct Vcpu {
    cr3: AtomicU64,
    in_kernel: AtomicBool,
    frozen: AtomicBool,
}

impl CallingVcpu for Vcpu {
    fn caller(&self) -> io::Result<Caller> {
        let in_kernel = self.in_kernel.load(Ordering::Relaxed);
        Ok(Caller {
            cr3: self.cr3.load(Ordering::Relaxed),
            ring: if in_kernel { 0 } else { 3 },
            ..Caller::default()
        })
    }

    fn with_fd(&self, work: &mut dyn FnMut(BorrowedFd<'_>)) -> io::Result<()> {
        work(File::open("/dev/null")?.as_fd());
        Ok(())
    }

    fn freeze(&self, frozen: bool) -> io::Result<()> {
        self.frozen.store(frozen, Ordering::Relaxed);
        Ok(())
    }
}

struct Port {
    bdf: Bdf,
    function: Arc<Mutex<Gate>>,
}

impl Port {
    fn plug(rig: &Rig, side: Side, vcpu: &Arc<Vcpu>) -> Self {
        let options = Options {
            thread_name: "gate".to_owned(),
            side,
        };
        let resources = Resources {
            doorbells: Arc::new(rig.doorbells.clone()),
            memory: rig.memory.clone(),
            space: Arc::new(FakeSpace),
            vcpu: Arc::clone(vcpu) as _,
            spawner: Arc::new(Unconfined),
            report: Arc::new(|_| ()),
        };
        let gate = Gate::on(Vec::new(), options, resources).expect("there is memory");
        let function = Arc::new(Mutex::new(gate));
        let plugged = rig.segment.plug(function.clone(), Seat::ANY, &[]);
        let bdf = plugged.expect("there is room");
        rig.enable(bdf, true);
        Self { bdf, function }
    }

    fn with<R>(&self, work: impl FnOnce(&mut Gate) -> R) -> R {
        work(&mut self.function.lock().expect("nobody panics"))
    }

    fn registers(&self, rig: &Rig) -> u64 {
        u64::from(rig.config_read(self.bdf, BarIndex::ZERO.offset() as u16) & !0xf)
    }
}

struct World {
    rig: Rig,
    vcpu: Arc<Vcpu>,
    ports: [Port; 2],
    server: Arc<Server>,
    strangers: Vec<UnixStream>,
}

impl World {
    /// The module has taken a process, which is stopped or does slow work.
    fn serve(&self, input: &mut Input, standing: bool) {
        let window = u64::from(input.u8()) << 30;
        let settings = ServerSettings {
            cr3: u64::from(input.u8()) << 12,
            fs_base: 0,
            gs_base: 0,
            pkru: 0,
            window,
            window_gpa: u64::from(input.u16()) << 12,
        };
        self.server.pretend(&settings, standing).expect("a file");
    }

    fn step(&mut self, input: &mut Input) {
        let kind = input.u8();
        let port = &self.ports[usize::from(kind >> 7)];
        let len = [1, 2, 4, 8][usize::from(kind >> 4) % 4];
        let mut data = [0; 8];
        match kind & 0xf {
            // Commands, most of them valid.
            0..=3 => {
                let command = u32::from(kind & 3) + u32::from(kind >> 6 & 1);
                let address = port.registers(&self.rig) + at::COMMAND;
                self.rig.write(address, &command.to_le_bytes());
                assert!(!self.vcpu.frozen.load(Ordering::Relaxed), "nobody serves");
            }
            4 | 5 => {
                let offset = u64::from(input.u16()) % at::SIZE;
                let address = port.registers(&self.rig).wrapping_add(offset);
                self.rig.doorbells.ring(address);
                self.rig.write(address, input.bytes(len));
                self.rig.mmio.read(address, &mut data[..len]);
            }
            6 => {
                let offset = u16::from(input.u8());
                self.rig.config_write(port.bdf, offset, input.bytes(len));
                self.rig
                    .config_read_bytes(port.bdf, offset, &mut data[..len]);
            }
            7 => self.rig.enable(port.bdf, kind & 0x40 != 0),
            8 => {
                let (address, entry) = (u64::from(input.u16()) * 8, input.u64());
                let ram = self.rig.memory.memory();
                ram.write_obj(entry, GuestAddress(address)).expect("RAM");
            }
            9 => {
                let cr3 = u64::from(input.u8()) << 12;
                self.vcpu.cr3.store(cr3, Ordering::Relaxed);
                let in_kernel = kind & 0x70 == 0x70;
                self.vcpu.in_kernel.store(in_kernel, Ordering::Relaxed);
            }
            10 => self.serve(input, kind & 0x10 != 0),
            11 => self.machine(kind >> 4 & 7),
            12 if self.strangers.len() < STRANGERS => {
                let stranger = UnixStream::connect(scratch::path("gate"));
                self.strangers.push(stranger.expect("it listens"));
            }
            13 if !self.strangers.is_empty() => {
                let at = usize::from(kind >> 4) % self.strangers.len();
                let _ = self.strangers[at].write(input.bytes(len));
            }
            14 if !self.strangers.is_empty() => {
                let at = usize::from(kind >> 4) % self.strangers.len();
                self.strangers.remove(at);
            }
            // Gives the ports' threads time to run.
            _ => thread::sleep(Duration::from_micros(u64::from(kind >> 4) * 100)),
        }
    }

    /// What a machine does, triggered by its control loop or by its user.
    fn machine(&self, what: u8) {
        let port = &self.ports[usize::from(what & 1)];
        match what >> 1 {
            0 => {
                self.server.thaw();
                let over = self.server.over();
                assert!(over.is_none_or(|over| over.why != Reason::Resumed));
            }
            1 => {
                let given_up = self.server.give_up(Reason::Resumed);
                assert!(!self.server.is_frozen(), "after {given_up:?}");
                assert_eq!(self.server.over(), None);
            }
            2 => port.with(|gate| {
                gate.detach().expect("it can be taken away");
                gate.save().expect("nobody uses it");
            }),
            _ => port.with(|gate| gate.reset().expect("it can be reset")),
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let socket = scratch::path("gate");
    let rig = Rig::new();
    let vcpu = Arc::<Vcpu>::default();
    let ports = [
        Side::Server {
            socket: socket.clone(),
        },
        Side::Client {
            server: socket.clone(),
            shared: 8192,
        },
    ]
    .map(|side| Port::plug(&rig, side, &vcpu));
    let server = ports[0].with(|gate| gate.server().map(Arc::clone));
    let mut world = World {
        server: server.expect("it is one"),
        rig,
        vcpu,
        ports,
        strangers: Vec::new(),
    };
    while !input.is_empty() {
        world.step(&mut input);
    }
    // The client's port first, since the connection also belongs to the server.
    for port in world.ports.iter().rev() {
        let unplugged = world.rig.segment.unplug(port.bdf);
        unplugged.expect("it is where it was plugged");
    }
    assert!(
        world.rig.doorbells.addresses().is_empty(),
        "no doorbell is left"
    );
    drop(world);
    assert!(!socket.exists(), "the socket is left");
});
