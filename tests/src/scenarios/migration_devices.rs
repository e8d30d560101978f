//! A VM that migrates with everything that a guest can have: network, vsock, a balloon, and hot-plugged devices.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::TcpListener,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{
    Context, Entry,
    disks::{image, write_pattern},
    migration::{Waiting, go, phase_until, wait_with},
    network,
    small_devices::vsock_client,
};
use crate::{
    gantry::Gantry,
    guest::Guest,
    net::{HOST, exists},
    opencl::until,
};

pub const SCENARIOS: &[Entry] = &[(
    "migration: a guest keeps its network, its balloon, and the memory, vCPUs and disk that it was given later",
    all_devices,
)];

const MIB: u64 = 1 << 20;
/// Reverse ARP, which announces to a network where a guest is.
const ETH_P_RARP: u16 = 0x8035;
const MAC: [u8; 6] = [0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc];
/// Port of the stream that the guest writes to.
const PORT: u16 = 5002;
/// Port of the guest's vsock server.
const ECHO: u32 = 1234;

/// The host resources of one of the two Gantrys.
struct Place {
    dir: PathBuf,
    tap: PathBuf,
    vsock: PathBuf,
}

impl Place {
    fn new(context: &Context, number: u32) -> Self {
        let dir = context.dir.join(number.to_string());
        Self {
            tap: format!("tap-m{number}").into(),
            vsock: dir.join("vsock"),
            dir,
        }
    }

    /// Starts a Gantry here that waits for the VM from another place.
    fn awaits(&self, gantry: &Gantry, from: &Self) -> Result<Waiting> {
        let renames = [(&*from.tap, &*self.tap), (&*from.vsock, &*self.vsock)];
        wait_with(&self.dir, &gantry.serial, &renames)
    }
}

/// Numbers that a guest sends over TCP, as they arrive.
#[derive(Clone, Default)]
struct Numbers(Arc<Mutex<Vec<String>>>);

impl Numbers {
    /// Receives the numbers of whoever connects first.
    fn listen() -> Result<Self> {
        let numbers = Self::default();
        let listener = TcpListener::bind((HOST, PORT))?;
        let taken = numbers.clone();
        thread::spawn(move || -> io::Result<()> {
            let (stream, _) = listener.accept()?;
            for line in BufReader::new(stream).lines() {
                let line = line?;
                taken.all().push(line);
            }
            Ok(())
        });
        Ok(numbers)
    }

    fn all(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for more numbers, and checks that all have arrived in order.
    fn go_on(&self) -> Result<()> {
        let before = self.all().len();
        until("the guest's stream goes on", || {
            Ok(self.all().len() > before + 5)
        })?;
        for (number, line) in (1..).zip(self.all().iter()) {
            ensure!(*line == number.to_string(), "{line} where {number} follows");
        }
        Ok(())
    }
}

/// Receives all reverse ARP requests of this host's networks.
struct Announcements(std::fs::File);

impl Announcements {
    fn hear() -> Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let protocol = i32::from(ETH_P_RARP.to_be());
        // SAFETY: no pointers are involved.
        let socket = unsafe { libc::socket(libc::AF_PACKET, kind, protocol) };
        ensure!(socket >= 0, "no socket: {}", io::Error::last_os_error());
        // SAFETY: the descriptor has just been created.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(socket) }.into()))
    }

    /// Waits for an announcement of the guest on this interface.
    fn came_by(&mut self, tap: &Path) -> Result<()> {
        let index = std::fs::read_to_string(Path::new("/sys/class/net").join(tap).join("ifindex"))?;
        let index: i32 = index.trim().parse()?;
        until("the guest's new place is announced", || {
            Ok(self
                .next()?
                .is_some_and(|(by, from)| by == index && from == MAC))
        })
    }

    /// The next announcement: its interface and its hardware address.
    fn next(&mut self) -> Result<Option<(i32, [u8; 6])>> {
        let mut frame = [0; 64];
        // SAFETY: an all-zero value of this plain struct is valid.
        let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut length = size_of_val(&from) as libc::socklen_t;
        // SAFETY: frame and address have the lengths that are passed, and outlive the call.
        let got = unsafe {
            libc::recvfrom(
                self.0.as_raw_fd(),
                frame.as_mut_ptr().cast(),
                frame.len(),
                0,
                (&raw mut from).cast(),
                &raw mut length,
            )
        };
        let Ok(got) = usize::try_from(got) else {
            let error = io::Error::last_os_error();
            ensure!(error.kind() == io::ErrorKind::WouldBlock, "{error}");
            return Ok(None);
        };
        let sender = frame[..got].get(6..12).context("a short frame")?;
        Ok(Some((from.sll_ifindex, sender.try_into()?)))
    }
}

fn all_devices(context: &Context) -> Result<()> {
    let places = [0, 1, 2].map(|number| Place::new(context, number));
    let (mut gantry, mut guest) = boot(&places[0])?;
    let numbers = give(&places[0], &gantry, &mut guest)?;
    let disk = context.dir.join("plugged.raw");
    image(&disk, 4 << 20)?;
    gantry.put("vm.add-disk", json!({"path": disk, "id": "plugged"}))?;
    guest.eventually("ls /dev/vda", |text| text.contains("/dev/vda"))?;
    let on_disk = write_pattern(&mut guest, "/dev/vda", 2)?;
    // The kernel prefers plugged memory for movable pages.
    guest.run(
        "dd if=/dev/urandom of=/block bs=64k count=16 2>/dev/null; \
         for i in $(seq 64); do cat /block; done > /known",
    )?;
    let known = guest.md5_of("cat /known")?;
    stays_as_it_is(&gantry, &places)?;
    for at in [1, 2] {
        let (from, to) = (&places[at - 1], &places[at]);
        let mut open = connected(&mut guest, &from.vsock)?;
        let mut heard = Announcements::hear()?;
        let waiting = to.awaits(&gantry, from)?;
        (gantry, guest) = go(gantry, waiting, json!({"verify": true}))?;
        heard.came_by(&to.tap)?;
        ensure!(
            !exists(&from.tap.to_string_lossy()),
            "the source's tap is left"
        );
        numbers.go_on()?;
        // Vsock connections are closed on both sides, and can be opened again.
        let served = |text: &str| text.contains("vsock-echo");
        guest.eventually("ps", |text| !served(text))?;
        let end = open.read(&mut [0; 8]);
        let is_closed = match &end {
            Ok(count) => *count == 0,
            // Not a timeout.
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        };
        ensure!(is_closed, "{end:?}");
        drop(connected(&mut guest, &to.vsock)?);
        guest.eventually("ps", |text| !served(text))?;
        has_all(&gantry, &mut guest)?;
        let now = guest.md5_of("cat /known")?;
        ensure!(now == known, "memory differs after move {at}: {now}");
        guest.run("echo 3 > /proc/sys/vm/drop_caches")?;
        let now = guest.md5_of("dd if=/dev/vda bs=1M count=2 2>/dev/null")?;
        ensure!(now == on_disk, "the disk differs after move {at}: {now}");
    }
    takes_back(&gantry, &mut guest)
}

fn boot(place: &Place) -> Result<(Gantry, Guest)> {
    std::fs::create_dir_all(&place.dir)?;
    let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
    let more = json!({
        "cpus": {"boot_vcpus": 1, "max_vcpus": 4},
        "memory": {"hotplug_size": 256 * MIB, "hotplug_method": "VirtioMem"},
        "balloon": {"size": 0},
        "net": [{"tap": place.tap, "ip": HOST, "mask": "255.255.255.0", "mac": mac}],
        "vsock": {"cid": 3, "socket": place.vsock},
    });
    Gantry::boot(&place.dir, more)
}

/// Gives the guest vCPUs and memory, takes some by the balloon, and makes it count over TCP.
fn give(place: &Place, gantry: &Gantry, guest: &mut Guest) -> Result<Numbers> {
    guest.run("echo online_movable > /sys/devices/system/memory/auto_online_blocks")?;
    gantry.put(
        "vm.resize",
        json!({"desired_vcpus": 4, "desired_ram": 384 * MIB}),
    )?;
    gantry.info_until("memory has grown", |info| {
        info["memory_actual_size"] == 384 * MIB
    })?;
    guest.eventually(PRESENT, |text| text == "4")?;
    guest.run("for c in /sys/devices/system/cpu/cpu[1-9]/online; do echo 1 > $c; done; true")?;
    gantry.put("vm.resize", json!({"desired_balloon": 32 * MIB}))?;
    gantry.info_until("the balloon has inflated", |info| {
        info["memory_actual_size"] == 352 * MIB
    })?;
    has_all(gantry, guest)?;
    network::set_up(guest, "eth0").with_context(|| format!("by {}", place.tap.display()))?;
    let numbers = Numbers::listen()?;
    guest.run(&format!(
        "(i=0; while true; do i=$((i+1)); echo $i; sleep 0.1; done) | nc {HOST} {PORT} >/dev/null 2>&1 & true"
    ))?;
    numbers.go_on()?;
    Ok(numbers)
}

const PRESENT: &str = "ls -d /sys/devices/system/cpu/cpu[0-9]* | wc -l";

/// What it was given exists, according to the guest and to Gantry.
fn has_all(gantry: &Gantry, guest: &mut Guest) -> Result<()> {
    guest.eventually("nproc", |text| text == "4")?;
    let info = gantry.info()?;
    ensure!(info["memory_actual_size"] == 352 * MIB, "{info}");
    Ok(())
}

/// A migrating VM cannot be changed; after a cancellation, it stays.
fn stays_as_it_is(gantry: &Gantry, places: &[Place; 3]) -> Result<()> {
    let elsewhere = Place {
        dir: places[0].dir.join("cancelled"),
        tap: "tap-mc".into(),
        vsock: places[0].dir.join("cancelled/vsock"),
    };
    let waiting = elsewhere.awaits(gantry, &places[0])?;
    let slowly = json!({"destination_url": waiting.url, "bandwidth": MIB});
    gantry.put("vm.send-migration", slowly)?;
    phase_until(gantry, &["Rounds"])?;
    let moves = "being moved to another host";
    let disk = json!({"path": "/none"});
    gantry.refused("vm.add-disk", Some(disk), 405, moves)?;
    let vcpus = json!({"desired_vcpus": 2});
    gantry.refused("vm.resize", Some(vcpus), 405, moves)?;
    let device = json!({"id": "plugged"});
    gantry.refused("vm.remove-device", Some(device), 405, moves)?;
    gantry.act("vm.cancel-migration")?;
    phase_until(gantry, &["Failed"])?;
    ensure!(gantry.state()? == "Running");
    let answer = waiting
        .answer
        .join()
        .ok()
        .context("the client panicked")??;
    ensure!(answer.status >= 400, "{}", answer.text);
    ensure!(!exists(&elsewhere.tap.to_string_lossy()), "its tap is left");
    Ok(())
}

/// A stream to an echo server in the guest, which has already echoed something.
fn connected(guest: &mut Guest, socket: &Path) -> Result<UnixStream> {
    guest.run(&format!(
        "rm -f /tmp/echo; agent vsock-echo {ECHO} > /tmp/echo 2>&1 & true"
    ))?;
    guest.eventually("cat /tmp/echo", |text| text.contains("listening"))?;
    let mut stream = vsock_client(socket, ECHO)?;
    stream.write_all(b"over it")?;
    let mut back = [0; 7];
    stream.read_exact(&mut back)?;
    ensure!(&back == b"over it");
    Ok(stream)
}

/// What the guest was given can be taken away again.
fn takes_back(gantry: &Gantry, guest: &mut Guest) -> Result<()> {
    guest.run("rm /known; echo 3 > /proc/sys/vm/drop_caches")?;
    gantry.put("vm.resize", json!({"desired_balloon": 0}))?;
    gantry.info_until("the balloon has deflated", |info| {
        info["memory_actual_size"] == 384 * MIB
    })?;
    gantry.put(
        "vm.resize",
        json!({"desired_vcpus": 2, "desired_ram": 256 * MIB}),
    )?;
    gantry.info_until("memory has shrunk", |info| {
        info["memory_actual_size"] == 256 * MIB
    })?;
    guest.eventually(PRESENT, |text| text == "2")?;
    gantry.put("vm.remove-device", json!({"id": "plugged"}))?;
    guest.eventually("ls /dev/vda 2>&1", |text| text.contains("No such"))?;
    Ok(())
}
