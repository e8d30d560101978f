//! What a process that shares a device shows of itself, the arbiter or `gantry-gpu`: one JSON document to
//! whoever connects.

use std::{
    fs,
    io::{self, Read},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use gantry_remoting::link::socket;
use rustix::net::SendFlags;
use serde::{Deserialize, Serialize};

/// A device that is shared, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The policy's name.
    pub policy: String,
    /// Nanoseconds since the process was started.
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
    /// How many workers it has, one for each application; channels of a virtual GPU.
    pub workers: usize,
    /// Nanoseconds for which it has had the device.
    pub device_time: u64,
    /// Nanoseconds for which it has waited for the device.
    pub queueing_time: u64,
    /// How often it has been given the device.
    pub turns: u64,
    /// Requests that it has submitted.
    pub calls: u64,
    /// Calls whose answers it has waited for.
    pub synchronous_calls: u64,
    /// Bytes of device memory that it has.
    pub memory: u64,
    /// Workers that were ended because a request took too long; channels that have ended by an error.
    pub killed: u64,
    /// Whether it has the device now.
    pub holds: bool,
}

/// Where the status of the process that serves at `socket` is.
pub fn path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".status");
    path.into()
}

/// Opens a socket that only this user reaches, and that does not block.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = socket::listen(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The status of the process that serves at `socket`.
pub fn read(socket: &Path) -> io::Result<Status> {
    let mut stream = UnixStream::connect(path(socket))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

impl Status {
    /// Sends it to one reader, who must not hold the process up: what does not fit into the
    /// socket's buffer at once (hundreds of clients do) is cut off.
    pub(crate) fn send(&self, stream: &UnixStream) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        rustix::net::send(stream, &text, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
        Ok(())
    }
}
