//! What the arbiter shows of itself: one JSON document to whoever connects.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

/// A device that is shared, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The policy's name.
    pub policy: String,
    /// Nanoseconds since the arbiter was started.
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
    /// How many workers it has: one for each application.
    pub workers: usize,
    /// Nanoseconds for which it has had the device.
    pub device_time: u64,
    /// Nanoseconds for which it has waited for the device.
    pub queueing_time: u64,
    /// How often it has been given the device.
    pub turns: u64,
    /// Requests that its workers have submitted.
    pub calls: u64,
    /// Calls whose answers it has waited for.
    pub synchronous_calls: u64,
    /// Bytes of device memory that it has.
    pub memory: u64,
    /// Workers that were ended because a request took too long.
    pub killed: u64,
    /// Whether it has the device now.
    pub holds: bool,
}

/// Where the status of the arbiter at `socket` is.
pub fn path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".status");
    path.into()
}

/// The status of the arbiter at `socket`.
pub fn read(socket: &Path) -> io::Result<Status> {
    let mut stream = UnixStream::connect(path(socket))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

impl Status {
    /// Sends it to one reader, who must not hold the arbiter up: what does not fit into the
    /// socket's buffer at once (hundreds of clients do) is cut off.
    pub(super) fn send(&self, mut stream: &UnixStream) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        stream.write_all(&serde_json::to_vec(self)?)
    }
}
