//! The status of a process that shares a device, the arbiter or `gantry-gpu`: one JSON document for
//! each client that connects.

use std::{
    io::{self, Read},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    time::Duration,
};

use remoting_transport::socket;
use rustix::net::SendFlags;
use serde::{Deserialize, Serialize};

/// The state of a shared device at one point in time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The policy's name.
    pub policy: String,
    /// Nanoseconds since the start of the process.
    pub uptime: u64,
    /// The clients, by name.
    pub clients: Vec<Client>,
}

/// A client: a virtual machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Client {
    /// Its name.
    pub name: String,
    /// Its weight.
    pub weight: u32,
    /// Number of its workers, one per application; for a virtual GPU, number of its channels.
    pub workers: usize,
    /// Nanoseconds of device time that it had.
    pub device_time: u64,
    /// Nanoseconds for which it waited for the device.
    pub queueing_time: u64,
    /// Number of turns that it got.
    pub turns: u64,
    /// Number of requests that it submitted.
    pub calls: u64,
    /// Number of calls whose replies it waited for.
    pub synchronous_calls: u64,
    /// Device memory in bytes that it has.
    pub memory: u64,
    /// Workers that were killed because a request took too long; for a virtual GPU, channels that
    /// ended by an error.
    pub killed: u64,
    /// Whether it has the device now.
    pub holds: bool,
}

/// Path of the status socket of the process that serves at `socket`.
pub fn path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".status");
    path.into()
}

/// Opens a non-blocking socket that only this user can reach.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = socket::listen_privately(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Reads the status of the process that serves at `socket`.
pub fn read(socket: &Path) -> io::Result<Status> {
    let mut stream = UnixStream::connect(path(socket))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

impl Status {
    /// Sends the status to one reader, which must not delay the process: what does not fit into the
    /// socket's buffer at once (hundreds of clients do) is cut off.
    pub(crate) fn send(&self, stream: &UnixStream) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        rustix::net::send(stream, &text, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
        Ok(())
    }
}
