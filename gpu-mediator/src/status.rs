//! The status of a process that shares a device, the arbiter or `gantry-gpu`: one JSON document for
//! each client that connects.

use std::{
    io::{self, Read},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    time::Duration,
};

use base::metrics_socket;
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
    /// Its weight; 0: it gets the device only while nobody else has work.
    pub weight: u32,
    /// For how many milliseconds it waits at most for time slices of others, as long as it has had no more than its part; 0: that
    /// does not matter.
    #[serde(default)]
    pub latency: u32,
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
    /// Whether it uses the device beside the others without being shared by weight: native contexts while others take turns,
    /// or whose use cannot be read. Its device time is then not known, and that of others includes what it takes.
    #[serde(default)]
    pub beside: bool,
    /// How long it has waited lately; for a virtual GPU, nothing.
    #[serde(default)]
    pub waits: Waits,
    /// With time slices: the longest time in the last 10 to 20 seconds, 20 ms at least, for which it had work and got nothing of the
    /// device.
    #[serde(default)]
    pub delay: Option<Delay>,
}

/// Who has delayed a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delay {
    /// The client that had the most of the device meanwhile.
    pub by: String,
    /// For how many nanoseconds.
    pub nanos: u64,
}

/// How long a client that has work has waited until some of it was done, over the last 10 to 20 seconds: from when it began to
/// have work, or from its last completion. In nanoseconds, rounded up by at most a quarter. The length of a kernel counts,
/// and so does a function of the client that its work waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// Number of waits.
    pub count: u64,
    /// Half of them were not longer than this.
    pub p50: u64,
    /// 95 % of them were not longer than this.
    pub p95: u64,
    /// 99 % of them were not longer than this.
    pub p99: u64,
    /// The longest.
    pub longest: u64,
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

/// Tells the status of the process that serves at `socket` at a further path, to which the group of the socket's file may
/// connect, too. A thread of its own reads it as any reader does: no stranger delays who shares the device.
///
/// # Errors
/// It cannot listen there, or cannot start a thread.
pub fn relay(socket: &Path, to: &Path) -> io::Result<()> {
    let socket = socket.to_owned();
    metrics_socket::serve(to, move || Ok(serde_json::to_vec(&read(&socket)?)?))
}

/// Size in bytes that the buffer of a connection to a reader is given: the status of as many clients as an arbiter
/// remembers fits into it, with what the kernel adds for itself.
const BUFFER: usize = 1 << 20;

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
    /// socket's buffer at once is cut off.
    pub(crate) fn send(&self, stream: &UnixStream) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        // If the machine permits less (net.core.wmem_max), or the process may not ask for it, less fits.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(stream, BUFFER);
        rustix::net::send(stream, &text, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_gets_all_clients_however_many_there_are() {
        let client = |number| Client {
            name: format!("{number:0>64}"),
            weight: 10_000,
            device_time: u64::MAX,
            queueing_time: u64::MAX,
            calls: u64::MAX,
            delay: Some(Delay {
                by: format!("{number:0>64}"),
                nanos: u64::MAX,
            }),
            ..Client::default()
        };
        let status = Status {
            clients: (0..1024).map(client).collect(),
            ..Status::default()
        };
        let (to, mut from) = UnixStream::pair().unwrap();
        status.send(&to).unwrap();
        drop(to);
        let mut text = Vec::new();
        from.read_to_end(&mut text).unwrap();
        assert_eq!(serde_json::from_slice::<Status>(&text).unwrap(), status);
    }

    #[test]
    fn the_group_is_told_what_the_own_user_is() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, to) = (folder.path().join("s"), folder.path().join("a.arbiter"));
        let readers = UnixListener::bind(path(&socket)).unwrap();
        relay(&socket, &to).unwrap();
        let status = Status {
            policy: "fair".to_owned(),
            ..Status::default()
        };
        let sent = status.clone();
        let arbiter = std::thread::spawn(move || sent.send(&readers.accept().unwrap().0).unwrap());
        let mut text = Vec::new();
        let mut stream = UnixStream::connect(&to).unwrap();
        stream.read_to_end(&mut text).unwrap();
        assert_eq!(serde_json::from_slice::<Status>(&text).unwrap(), status);
        arbiter.join().unwrap();
    }
}
