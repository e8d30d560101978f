//! A second host, for VMs that move between hosts.
//!
//! Both hosts are L1s. Scenarios run in the first. The second takes its orders over a network that is never cut. A
//! second network carries migrations, and scenarios cut it. Both hosts have the same disk, as hosts share one in a
//! storage network: each writes to it, and neither sees the other's locks.

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::{
    gantry::{GANTRY, Gantry},
    guest::BOOT,
    net,
};

/// Number of networks between the two hosts.
pub const NETWORKS: usize = 2;
/// The network for orders, and the one for migrations.
const ORDERS: usize = 0;
const LINK: usize = 1;

/// Serial number of the shared disk.
pub const LUN: &str = "lun";

/// Port on which the second host takes orders.
const PORT: u16 = 7000;

/// Precedes a program's exit status in its output.
const ENDED: &str = "@ended=";

/// Interval at which a running program is polled.
const AGAIN: Duration = Duration::from_millis(50);

/// Which of the two hosts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Number {
    /// The host in which scenarios run.
    First = 1,
    /// The other host.
    Second = 2,
}

impl Number {
    /// MAC address of the host's card for a network.
    pub fn mac(self, network: usize) -> String {
        format!("52:54:00:77:{network:02}:{:02}", self as u8)
    }

    fn address(self, network: usize) -> String {
        format!("10.77.{network}.{}", self as u8)
    }

    /// The host's address on the migration network.
    pub fn link(self) -> String {
        self.address(LINK)
    }

    /// Folder of the host's certificates and keys.
    pub fn tls_dir(self) -> PathBuf {
        format!("/images/tls/{}", self as u8).into()
    }

    /// A shell command that sets the variable `i` to the interface of a network.
    fn interface(self, network: usize) -> String {
        let mac = self.mac(network);
        format!("i=$(basename $(dirname $(grep -l {mac} /sys/class/net/*/address)))")
    }

    /// Loads drivers and sets the addresses of both networks.
    fn set_up(self) -> Result<()> {
        const MODULES: &str = "virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev \
             virtio_pci virtio_blk failover net_failover virtio_net";
        net::sh(&format!(
            "for m in {MODULES}; do [ ! -e /modules/$m.ko ] || [ -d /sys/module/$m ] || \
             insmod /modules/$m.ko || exit 1; done"
        ))?;
        for network in [ORDERS, LINK] {
            let (interface, address) = (self.interface(network), self.address(network));
            net::sh(&format!(
                "{interface}; ifconfig $i {address} netmask 255.255.255.0 up"
            ))?;
        }
        Ok(())
    }
}

/// Creates a certificate authority, and the certificates that the hosts show each other when a VM moves.
pub fn keys(to: &Path) -> Result<()> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../remoting/certificates.sh");
    let work = tempfile::tempdir()?;
    for number in [Number::First, Number::Second] {
        let (host, client) = (number.link(), format!("client{}", number as u8));
        let made = Command::new("sh")
            .arg(&script)
            .arg(work.path())
            .args([&host, &client])
            .status()?;
        ensure!(made.success(), "no certificates for {host}: {made}");
        let folder = to.join((number as u8).to_string());
        fs::create_dir_all(&folder)?;
        for (from, name) in [
            ("ca.pem".to_owned(), "ca-cert.pem"),
            (format!("{host}.pem"), "server-cert.pem"),
            (format!("{host}.key"), "server-key.pem"),
            (format!("{client}.pem"), "client-cert.pem"),
            (format!("{client}.key"), "client-key.pem"),
        ] {
            fs::copy(work.path().join(from), folder.join(name))?;
        }
    }
    Ok(())
}

/// What a connection to the second host is for. Sent as its first line.
#[derive(Serialize, Deserialize)]
enum Order {
    /// Run a program, and send its output and then its exit status. The program is killed when the connection ends.
    Run(Vec<String>),
    /// Relay bytes to and from a Unix socket on the second host.
    Connect(PathBuf),
}

/// Takes orders from the first host from now on.
pub fn serve() -> Result<()> {
    Number::Second.set_up()?;
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    thread::spawn(move || {
        for stream in listener.incoming().filter_map(Result::ok) {
            thread::spawn(move || {
                if let Err(error) = obey(stream) {
                    eprintln!("an order of the first host: {error:#}");
                }
            });
        }
    });
    Ok(())
}

fn obey(mut stream: TcpStream) -> Result<()> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    // Byte by byte: what follows the line is for the socket.
    while stream.read(&mut byte)? == 1 && byte != *b"\n" {
        line.extend(byte);
    }
    match serde_json::from_slice(&line)? {
        Order::Run(words) => run_here(stream, &words),
        Order::Connect(path) => Ok(relay(&stream, &UnixStream::connect(path)?)?),
    }
}

fn run_here(mut stream: TcpStream, words: &[String]) -> Result<()> {
    let (program, arguments) = words.split_first().context("no program is named")?;
    let output = || -> io::Result<Stdio> { Ok(OwnedFd::from(stream.try_clone()?).into()) };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(output()?)
        .stderr(output()?)
        .spawn()?;
    stream.set_read_timeout(Some(AGAIN))?;
    loop {
        let gone = match stream.read(&mut [0; 64]) {
            Ok(0) => true,
            Ok(_) => false,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        };
        if gone {
            child.kill()?;
        }
        if gone || child.try_wait()?.is_some() {
            let status = child.wait()?.code().unwrap_or(255);
            // The peer may already be gone.
            let _ = write!(stream, "\n{ENDED}{status}\n");
            // Processes that it left behind may keep the connection open.
            let _ = stream.shutdown(Shutdown::Both);
            return Ok(());
        }
    }
}

/// Relays bytes in both directions until both have ended.
fn relay(tcp: &TcpStream, unix: &UnixStream) -> io::Result<()> {
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut from, mut to) = (unix, tcp);
            // An error means that one side has ended.
            let _ = io::copy(&mut from, &mut to);
            let _ = tcp.shutdown(Shutdown::Write);
        });
        let (mut from, mut to) = (tcp, unix);
        let _ = io::copy(&mut from, &mut to);
        unix.shutdown(Shutdown::Both)
    })
}

fn order(order: &Order) -> Result<TcpStream> {
    let address = (Number::Second.address(ORDERS), PORT);
    let mut stream = TcpStream::connect((&*address.0, address.1)).context("the other host")?;
    writeln!(stream, "{}", serde_json::to_string(order)?)?;
    Ok(stream)
}

/// Runs a program on the second host, prints its output, and returns its exit status.
pub fn run(words: &[&str]) -> Result<i32> {
    let words = words.iter().map(ToString::to_string).collect();
    let reader = BufReader::new(order(&Order::Run(words))?);
    let mut out = io::stdout().lock();
    let mut before: Option<Vec<u8>> = None;
    for line in reader.split(b'\n') {
        let line = line?;
        let text = String::from_utf8_lossy(&line);
        if let Some(status) = text.strip_prefix(ENDED) {
            // The line end before the marker belongs to the status, not to the output.
            out.write_all(&before.unwrap_or_default())?;
            out.flush()?;
            return Ok(status.parse()?);
        }
        if let Some(before) = before.replace(line) {
            out.write_all(&before)?;
            out.write_all(b"\n")?;
            out.flush()?;
        }
    }
    bail!("the other host has not said how the program ended")
}

/// A command that runs a program on the second host, with whatever arguments are added.
pub fn command(program: &str) -> Command {
    let mut command = Command::new("/bin/runner");
    command.args(["beside", program]);
    command
}

/// The second host, for a scenario in the first one.
pub struct Beside(());

impl Beside {
    /// Sets up the networks, removes whatever earlier scenarios left on the second host, and creates a folder for this
    /// scenario there, too.
    pub fn reach(dir: &Path) -> Result<Self> {
        Number::First.set_up()?;
        let deadline = Instant::now() + BOOT;
        let beside = Self(());
        let clean = format!(
            "killall gantry gantry-tunnel; rm -rf {0}; mkdir -p {0}",
            dir.display()
        );
        while let Err(error) = beside.sh(&clean) {
            ensure!(Instant::now() < deadline, "no second host: {error:#}");
            thread::sleep(Duration::from_millis(500));
        }
        Ok(beside)
    }

    /// Runs a command on the second host that must succeed.
    pub fn sh(&self, line: &str) -> Result<String> {
        let output = command("/bin/sh").args(["-c", line]).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{line:?} failed there: {text}");
        Ok(text)
    }

    /// Starts Gantry on the second host, in a folder of that name. Its sockets can be reached in the same folder here.
    pub fn gantry(&self, dir: &Path) -> Result<Gantry> {
        fs::create_dir_all(dir)?;
        self.sh(&format!("mkdir -p {}", dir.display()))?;
        for name in ["api.sock", "serial.sock"] {
            pass_on(dir.join(name))?;
        }
        Gantry::start_by(dir, command(GANTRY))
    }

    /// Path of the shared disk. It is the same on both hosts, because they have the same devices.
    pub fn lun(&self) -> Result<PathBuf> {
        let find = format!("basename $(dirname $(grep -l ^{LUN}$ /sys/block/*/serial))");
        let names = [net::sh(&find)?, self.sh(&find)?];
        let [here, there] = names.each_ref().map(|name| name.trim());
        ensure!(here == there, "the disk is {here} here and {there} there");
        Ok(Path::new("/dev").join(here))
    }
}

/// Cuts the migration network: nothing arrives any more.
pub fn cut() -> Result<()> {
    let interface = Number::First.interface(LINK);
    net::sh(&format!("{interface}; ifconfig $i down")).map(drop)
}

/// Restores the migration network.
pub fn mend() -> Result<()> {
    let interface = Number::First.interface(LINK);
    net::sh(&format!("{interface}; ifconfig $i up")).map(drop)
}

/// Listens on a socket here and relays its connections to the second host's socket of the same path.
fn pass_on(path: PathBuf) -> Result<()> {
    let listener = UnixListener::bind(&path)?;
    thread::spawn(move || {
        for client in listener.incoming().filter_map(Result::ok) {
            let path = path.clone();
            thread::spawn(move || {
                // If no process listens there, the client's connection is closed.
                if let Ok(stream) = order(&Order::Connect(path)) {
                    let _ = relay(&stream, &client);
                }
            });
        }
    });
    Ok(())
}
