//! One program of a guest is started once, and then served in turn by everybody who can: the guest's own pool on a
//! passed-through device, the host's pool, and another host's pool over TLS on the guest's network.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    accelerator::counter,
    hotplug::gone,
    network::set_up,
    passthrough_tracked::{Computing, HOLDERS},
};
use crate::{
    net::HOST,
    opencl::{self, Pool, until},
};

pub const SCENARIOS: &[Entry] = &[(
    "passthrough: one program, started once, goes from its device to the host's, to another pool by TLS, and back",
    every_seat,
)];

/// Who serves the program.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Seat {
    Local,
    Host,
    Tls,
}

impl Seat {
    /// In the form that `vm.move-accel` accepts.
    fn named(self) -> Value {
        match self {
            Self::Local => json!({"seat": "Local"}),
            Self::Host => json!({"seat": "Host"}),
            Self::Tls => json!({"address": opencl::tls_address()}),
        }
    }
}

/// Numbers of workers, including those that wait for applications.
#[derive(Debug, Eq, PartialEq)]
struct Workers {
    /// Processes of the guest's own pool, which ends when nobody is to use it.
    local: usize,
    host: usize,
    tls: usize,
}

impl Workers {
    fn count(computing: &mut Computing, far: &Pool) -> Result<Self> {
        let local = computing.guest.run("pidof gantry-accel; true")?;
        Ok(Self {
            local: local.split_whitespace().count(),
            host: computing.pool.workers()?.len(),
            tls: far.workers()?.len(),
        })
    }

    /// The numbers with one more that serves the program at this seat.
    fn and_one_at(&self, seat: Seat) -> Self {
        let is = |other| usize::from(seat == other);
        Self {
            // Then nobody else has the device.
            local: match seat {
                Seat::Local => self.local + 1,
                Seat::Host | Seat::Tls => 0,
            },
            host: self.host + is(Seat::Host),
            tls: self.tls + is(Seat::Tls),
        }
    }
}

/// Waits until there are this many workers.
fn are(computing: &mut Computing, far: &Pool, expected: &Workers) -> Result<()> {
    let mut found = None;
    let all = until("the workers are those that serve", || {
        found = Some(Workers::count(computing, far)?);
        Ok(found.as_ref() == Some(expected))
    });
    all.map_err(|error| error.context(format!("{found:?} instead of {expected:?}")))
}

fn every_seat(context: &Context) -> Result<()> {
    const TAP: &str = "tap-seats";
    let mut computing = Computing::boot(&context.dir)?;
    let net = json!({"tap": TAP, "ip": HOST, "mask": "255.255.255.0", "id": "net"});
    computing.gantry.put("vm.add-net", net)?;
    let card = "/sys/class/net/eth0";
    (computing.guest).eventually(&format!("ls -d {card}"), |found| found.trim() == card)?;
    set_up(&mut computing.guest, "eth0")?;
    let far = Pool::start_for_others(&context.dir)?;
    let unused = Workers::count(&mut computing, &far)?;
    // Memory in the window cannot be transferred over TLS.
    computing.begins(&opencl::tls_files(), "device")?;
    let process = computing.guest.run("pidof opencl-moving")?;
    computing.is_local()?;
    are(&mut computing, &far, &unused.and_one_at(Seat::Local))?;
    for seat in [Seat::Host, Seat::Tls, Seat::Host, Seat::Local] {
        computing.goes_to(seat.named())?;
        computing.goes_on()?;
        are(&mut computing, &far, &unused.and_one_at(seat))?;
        let slices = counter(&computing.gantry, "slices_in_use")?;
        ensure!(
            slices == u64::from(seat == Seat::Host),
            "{seat:?}: {slices} slices are used"
        );
        let holders = computing.guest.run(HOLDERS)?;
        ensure!(
            (holders.trim() != "0") == (seat == Seat::Local),
            "{seat:?}: {holders} have the device"
        );
        computing.goes_on()?;
    }
    let still = computing.guest.run("pidof opencl-moving")?;
    ensure!(still == process, "process {process} has become {still}");
    computing.ends()?;
    are(&mut computing, &far, &unused)?;
    ensure!(counter(&computing.gantry, "workers_lost")? == 0);
    computing
        .gantry
        .put("vm.remove-device", json!({"id": "net"}))?;
    gone(&computing.gantry, "net")
}
