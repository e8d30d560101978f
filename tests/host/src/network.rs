//! Two hosts on this machine: network namespaces, connected by a rate-limited link.

use std::{
    fs::File,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd,
    process::Command,
    thread,
    time::Instant,
};

use anyhow::{Context, Result, anyhow, ensure};
use gantry_tests::rig::packages;

/// Rate of the link, in `tc`'s notation.
pub const RATE: &str = "1gbit";
/// Number of bytes of a plain copy.
const COPIED: usize = 256 << 20;

/// Two namespaces. They are removed when the value is dropped.
pub struct Network {
    names: [String; 2],
}

/// The addresses of both, which are unknown outside.
const ADDRESSES: [&str; 2] = ["10.99.0.1", "10.99.0.2"];

impl Network {
    /// Creates both namespaces and the link.
    pub fn new() -> Result<Self> {
        let id = std::process::id();
        let network = Self {
            names: ["a", "b"].map(|side| format!("gantry-crane-{id}-{side}")),
        };
        let [a, b] = &network.names;
        for name in [a, b] {
            command("ip", &["netns", "add", name])?;
        }
        let pair = [
            "-n", a, "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", b,
        ];
        command("ip", &pair)?;
        for (name, address) in [a, b].into_iter().zip(ADDRESSES) {
            let address = format!("{address}/24");
            command("ip", &["-n", name, "addr", "add", &address, "dev", "link0"])?;
            command("ip", &["-n", name, "link", "set", "link0", "up"])?;
            let queue = ["-n", name, "qdisc", "add", "dev", "link0", "root", "tbf"];
            let shape = ["rate", RATE, "burst", "256kb", "latency", "20ms"];
            command("tc", &[&queue[..], &shape].concat())?;
        }
        Ok(network)
    }

    /// Runs a program on the first or the second host.
    pub fn command(&self, host: usize, program: &std::path::Path) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.names[host]])
            .arg(program);
        command
    }

    /// The address of the first or the second host.
    pub fn address(&self, host: usize) -> &'static str {
        ADDRESSES[host]
    }

    /// Measures the throughput in bytes per second of a plain copy over TCP.
    pub fn rate(&self) -> Result<f64> {
        let (to, from) = (self.names[1].clone(), self.names[0].clone());
        let (told, listens) = std::sync::mpsc::channel();
        let receives = thread::spawn(move || -> Result<()> {
            enter(&to)?;
            let listener = TcpListener::bind((ADDRESSES[1], 0))?;
            let _ = told.send(listener.local_addr()?);
            let (mut stream, _) = listener.accept()?;
            let mut chunk = vec![0; 1 << 20];
            let mut left = COPIED;
            while left > 0 {
                let got = stream.read(&mut chunk)?;
                ensure!(got > 0, "the copy is not whole");
                left = left.saturating_sub(got);
            }
            Ok(stream.write_all(&[0])?)
        });
        let sends = thread::spawn(move || -> Result<f64> {
            enter(&from)?;
            let to = listens.recv().context("nobody listens")?;
            let chunk = vec![1; 1 << 20];
            let begun = Instant::now();
            let mut stream = TcpStream::connect(to)?;
            for _ in 0..COPIED / chunk.len() {
                stream.write_all(&chunk)?;
            }
            stream.read_exact(&mut [0])?;
            Ok(COPIED as f64 / begun.elapsed().as_secs_f64())
        });
        let panicked = |_| anyhow!("a thread panicked");
        let rate = sends.join().map_err(panicked)?;
        receives.join().map_err(panicked)??;
        rate
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = command("ip", &["netns", "delete", name]);
        }
    }
}

fn command(program: &str, arguments: &[&str]) -> Result<()> {
    packages::output(Command::new(program).args(arguments)).map(drop)
}

/// Moves this thread to a host.
fn enter(name: &str) -> Result<()> {
    let file = File::open(format!("/run/netns/{name}"))?;
    // SAFETY: a plain call; from here on, only this thread is in the other namespace.
    let entered = unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) };
    let error = std::io::Error::last_os_error();
    ensure!(entered == 0, "cannot enter the network {name}: {error}");
    Ok(())
}
