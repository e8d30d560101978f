//! A relay between Gantry and an honest vfio-user server that corrupts what the server sends.

use std::{
    fs::File,
    io::{Read, Write},
    net::Shutdown,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU8, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use base::Unpoisoned;
use libc::iovec;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// What happens to the server's next messages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum Spoil {
    /// They pass unchanged.
    Nothing,
    /// They are dropped.
    Swallow,
    /// They reply to a different request.
    WrongId,
    /// They claim to be 4 GiB long.
    Huge,
    /// They end in the middle of the header, and so does the connection.
    Cut,
    /// They claim to be shorter than their header.
    Tiny,
    /// They are one byte short.
    Short,
    /// They are sent twice.
    Twice,
    /// They are random bytes.
    Noise,
    /// Each byte is delayed by a second.
    Drip,
    /// Each is delayed by [`DELAY`], but not corrupted.
    Late,
}

/// Delay of a message that is late.
pub const DELAY: Duration = Duration::from_millis(200);

/// All modes that corrupt something.
pub const SPOILS: [Spoil; 9] = [
    Spoil::Swallow,
    Spoil::WrongId,
    Spoil::Huge,
    Spoil::Cut,
    Spoil::Tiny,
    Spoil::Short,
    Spoil::Twice,
    Spoil::Noise,
    Spoil::Drip,
];

/// A relay that runs until this process ends.
#[derive(Clone)]
pub struct Liar {
    spoil: Arc<AtomicU8>,
    /// The most recent client.
    client: Arc<Mutex<Option<UnixStream>>>,
    /// Copies of the descriptors that clients have sent.
    descriptors: Arc<Mutex<Vec<OwnedFd>>>,
}

impl Liar {
    /// Listens on `socket` for clients of the server at `server`.
    pub fn start(socket: &Path, server: PathBuf) -> Result<Self> {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).context("cannot listen")?;
        let liar = Self {
            spoil: Arc::default(),
            client: Arc::default(),
            descriptors: Arc::default(),
        };
        let this = liar.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // A missing server looks like one that closes the connection.
                if let Ok(server) = UnixStream::connect(&server) {
                    this.relay(client, server);
                }
            }
        });
        Ok(liar)
    }

    /// Corrupts all messages of the server from now on.
    pub fn spoil(&self, how: Spoil) {
        self.spoil.store(how as u8, Ordering::SeqCst);
    }

    /// Does what a server may do to the descriptors that clients have sent so far: fills the
    /// counters of eventfds, and makes calls on all of them block. Returns the number of
    /// descriptors.
    pub fn misuse_descriptors(&self) -> Result<usize> {
        let all = self.descriptors.lock_unpoisoned();
        for descriptor in all.iter() {
            let fd = descriptor.as_raw_fd();
            let set = |flags: i32| {
                // SAFETY: a plain call.
                let set = unsafe { libc::fcntl(fd, libc::F_SETFL, flags) };
                anyhow::ensure!(set == 0, "cannot set its flags");
                Ok(())
            };
            let link = std::fs::read_link(format!("/proc/self/fd/{fd}"))?;
            if link.to_string_lossy().contains("eventfd") {
                set(libc::O_NONBLOCK)?;
                let mut event = File::from(descriptor.try_clone()?);
                // This drains the counter, so that the write below fills it.
                let _ = event.read(&mut [0; 8]);
                event.write_all(&(u64::MAX - 1).to_ne_bytes())?;
            }
            set(0)?;
        }
        Ok(all.len())
    }

    /// Closes the connection to the client, like a server that dies.
    pub fn hang_up(&self) {
        let mut client = self.client.lock_unpoisoned();
        if let Some(client) = client.take() {
            let _ = client.shutdown(Shutdown::Both);
        }
    }

    fn relay(&self, client: UnixStream, server: UnixStream) {
        let (Ok(to), Ok(from)) = (server.try_clone(), client.try_clone()) else {
            return;
        };
        *self.client.lock_unpoisoned() = client.try_clone().ok();
        let kept = Arc::clone(&self.descriptors);
        thread::spawn(move || {
            while forward(&from, &to, &kept).unwrap_or(0) > 0 {}
            let _ = to.shutdown(Shutdown::Both);
        });
        let this = self.clone();
        thread::spawn(move || {
            let _ = this.answers(&server, &client);
            let _ = client.shutdown(Shutdown::Both);
        });
    }

    /// Relays the server's messages, one by one.
    fn answers(&self, mut server: &UnixStream, mut client: &UnixStream) -> Result<()> {
        loop {
            let mut message = vec![0; 16];
            let descriptors = receive(server, &mut message)?;
            let size = u32::from_ne_bytes(message[4..8].try_into()?) as usize;
            message.resize(size.max(16), 0);
            server.read_exact(&mut message[16..])?;
            let how = self.spoil.load(Ordering::SeqCst);
            let mut all = SPOILS.into_iter().chain([Spoil::Late]);
            let spoil = all.find(|spoil| *spoil as u8 == how);
            let mut size = |size: u32| message[4..8].copy_from_slice(&size.to_ne_bytes());
            match spoil.unwrap_or(Spoil::Nothing) {
                Spoil::Nothing | Spoil::Twice | Spoil::Drip => {}
                Spoil::Late => thread::sleep(DELAY),
                Spoil::Swallow => continue,
                Spoil::WrongId => message[0] ^= 0x55,
                Spoil::Huge => size(u32::MAX),
                Spoil::Cut => {
                    client.write_all(&message[..8])?;
                    return Ok(());
                }
                Spoil::Tiny => size(3),
                Spoil::Short => {
                    message.pop();
                    let len = message.len() as u32;
                    message[4..8].copy_from_slice(&len.to_ne_bytes());
                }
                Spoil::Noise => {
                    for (at, byte) in message.iter_mut().enumerate() {
                        *byte = byte.wrapping_mul(31).wrapping_add(at as u8 ^ 0xa5);
                    }
                }
            }
            if spoil == Some(Spoil::Drip) {
                for byte in &message {
                    client.write_all(&[*byte])?;
                    thread::sleep(Duration::from_secs(1));
                }
                continue;
            }
            client.send_with_fds(&[&message[..]], &descriptors)?;
            close(&descriptors);
            if spoil == Some(Spoil::Twice) {
                client.write_all(&message)?;
            }
        }
    }
}

fn close(descriptors: &[RawFd]) {
    for fd in descriptors {
        // SAFETY: just received, and owned by nobody else.
        unsafe { libc::close(*fd) };
    }
}

/// Fills `bytes`, and returns the descriptors that came with them.
fn receive(mut from: &UnixStream, bytes: &mut [u8]) -> Result<Vec<RawFd>> {
    let (count, descriptors) = receive_some(from, bytes)?;
    anyhow::ensure!(count > 0, "closed");
    from.read_exact(&mut bytes[count..])?;
    Ok(descriptors)
}

fn receive_some(from: &UnixStream, bytes: &mut [u8]) -> Result<(usize, Vec<RawFd>)> {
    let mut descriptors = [-1; 16];
    let mut parts = [iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    }];
    // SAFETY: the part is the buffer, which is borrowed until the call is over.
    let (count, received) = unsafe { from.recv_with_fds(&mut parts, &mut descriptors) }?;
    Ok((count, descriptors[..received].to_vec()))
}

/// Forwards the available bytes, and keeps the descriptors. Returns the number of bytes.
fn forward(from: &UnixStream, mut to: &UnixStream, kept: &Mutex<Vec<OwnedFd>>) -> Result<usize> {
    let mut bytes = [0; 4096];
    let (count, descriptors) = receive_some(from, &mut bytes)?;
    if count > 0 {
        let sent = to.send_with_fds(&[&bytes[..count]], &descriptors)?;
        let descriptors = descriptors.into_iter();
        // SAFETY: just received, and owned by nobody else.
        let descriptors = descriptors.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let mut kept = kept.lock_unpoisoned();
        kept.extend(descriptors);
        to.write_all(&bytes[sent..count])?;
    }
    Ok(count)
}
