//! One stream: its credit in both directions, and the data that waits for the host's socket.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::Shutdown,
    num::Wrapping,
    os::unix::net::UnixStream,
    time::Instant,
};

use super::packet::{Header, shutdown};

/// Maximum number of bytes from the guest that wait for the host's socket; the guest is told this
/// limit.
pub const BUFFER: u32 = 64 << 10;

/// Stage of a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Stage {
    /// The host has requested it; the guest has not responded yet.
    Connecting(Instant),
    /// Data flows.
    Open,
    /// The host's socket is closed; the guest has been told and has a limited time to agree.
    Closing(Instant),
}

/// A stream between a port of the guest and a Unix socket.
pub struct Connection {
    pub stream: UnixStream,
    pub stage: Stage,
    /// Token in the event loop.
    pub token: u32,
    /// The guest's buffer size, and how many bytes it has consumed.
    peer_buf_alloc: u32,
    peer_fwd_cnt: Wrapping<u32>,
    /// Number of bytes sent to the guest.
    sent: Wrapping<u32>,
    /// Bytes from the guest that wait for the socket.
    waiting: VecDeque<u8>,
    /// Number of bytes from the guest that the socket has accepted, and how many of them the guest
    /// has been told.
    fwd_cnt: Wrapping<u32>,
    told: Wrapping<u32>,
    /// The guest sends no more, or receives no more (flags of SHUTDOWN).
    guest_shutdown: u32,
    /// The socket has been closed by its peer.
    pub host_ended: bool,
    /// The socket accepts no more data; there may still be data to read from it.
    host_deaf: bool,
    /// Flags of SHUTDOWN that have been sent to the guest.
    told_end: u32,
}

/// Result of reading from the socket.
#[derive(Debug, Eq, PartialEq)]
pub enum Got {
    /// This many bytes were read.
    Bytes(usize),
    /// No data at present.
    Nothing,
    /// The guest has no buffer space.
    NoCredit,
    /// The host side sends no more.
    End,
}

impl Connection {
    pub fn new(stream: UnixStream, stage: Stage, token: u32) -> Self {
        Self {
            stream,
            stage,
            token,
            peer_buf_alloc: 0,
            peer_fwd_cnt: Wrapping(0),
            sent: Wrapping(0),
            waiting: VecDeque::new(),
            fwd_cnt: Wrapping(0),
            told: Wrapping(0),
            guest_shutdown: 0,
            host_ended: false,
            host_deaf: false,
            told_end: 0,
        }
    }

    /// Updates the credit from the header, which every packet of the guest carries.
    pub fn update_credit(&mut self, header: &Header) {
        self.peer_buf_alloc = header.buf_alloc;
        self.peer_fwd_cnt = Wrapping(header.fwd_cnt);
    }

    /// The credit fields for a packet to the guest.
    pub fn credit(&mut self) -> (u32, u32) {
        self.told = self.fwd_cnt;
        (BUFFER, self.fwd_cnt.0)
    }

    /// Whether the guest should be told that there is buffer space again.
    pub fn owes_credit(&self) -> bool {
        (self.fwd_cnt - self.told).0 >= BUFFER / 2
    }

    fn room_in_guest(&self) -> usize {
        // A guest that claims to have consumed more than it received has no buffer space.
        let in_flight = (self.sent - self.peer_fwd_cnt).0;
        self.peer_buf_alloc.saturating_sub(in_flight) as usize
    }

    /// Reads at most as much as the guest has buffer space for.
    pub fn read(&mut self, buffer: &mut [u8]) -> Got {
        if self.guest_shutdown & shutdown::RECEIVE != 0 {
            // The guest receives no more, but still learns that the socket is closed.
            return if self.host_ended {
                Got::End
            } else {
                Got::Nothing
            };
        }
        let room = self.room_in_guest().min(buffer.len());
        if room == 0 {
            return Got::NoCredit;
        }
        loop {
            match self.stream.read(&mut buffer[..room]) {
                Ok(0) => return Got::End,
                Ok(len) => {
                    // At most the buffer's size.
                    self.sent += Wrapping(len as u32);
                    return Got::Bytes(len);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Got::Nothing,
                Err(_) => {
                    self.host_ended = true;
                    return Got::End;
                }
            }
        }
    }

    /// Accepts bytes from the guest; false if it exceeded its credit, or had announced that it
    /// sends no more.
    pub fn accept(&mut self, bytes: &[u8]) -> bool {
        let room = (BUFFER as usize).saturating_sub(self.waiting.len());
        if bytes.len() > room || self.guest_shutdown & shutdown::SEND != 0 {
            return false;
        }
        if self.host_deaf {
            // Sent before the guest learned of it. At most the buffer's size.
            self.fwd_cnt += Wrapping(bytes.len() as u32);
        } else {
            self.waiting.extend(bytes);
        }
        true
    }

    /// Passes waiting bytes to the socket, as many as it accepts. An error means that it accepts no
    /// more.
    pub fn flush(&mut self) -> io::Result<()> {
        while !self.waiting.is_empty() {
            let (front, _) = self.waiting.as_slices();
            match self.stream.write(front) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => {
                    self.waiting.drain(..len);
                    // At most the buffer's size.
                    self.fwd_cnt += Wrapping(len as u32);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        if self.guest_shutdown & shutdown::SEND != 0 {
            // The peer may already have closed it.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        Ok(())
    }

    /// Handles a socket that accepts no more: drops the bytes that wait for it. Data that the peer
    /// sent before it closed the socket is still delivered to the guest. Returns the flags of
    /// SHUTDOWN to send to the guest; `None` if they have been sent already.
    pub fn stop_output(&mut self) -> Option<u32> {
        self.host_deaf = true;
        // At most the buffer's size.
        self.fwd_cnt += Wrapping(self.waiting.len() as u32);
        self.waiting = VecDeque::new();
        self.tell(shutdown::RECEIVE)
    }

    /// Handles a shutdown by the guest; true if the connection is finished.
    pub fn shut_down(&mut self, flags: u32) -> bool {
        self.guest_shutdown |= flags & shutdown::BOTH;
        self.is_finished()
    }

    /// The flags of SHUTDOWN to send to the guest, now that nothing more can be read; `None` if
    /// they have been sent already.
    pub fn tell_end(&mut self) -> Option<u32> {
        let flags = if self.host_ended || self.host_deaf {
            self.stage = Stage::Closing(Instant::now());
            shutdown::BOTH
        } else {
            shutdown::SEND
        };
        self.tell(flags)
    }

    fn tell(&mut self, flags: u32) -> Option<u32> {
        let news = flags & !self.told_end != 0;
        self.told_end |= flags;
        news.then_some(self.told_end)
    }

    /// Whether the guest neither sends nor receives any more, and the socket has accepted
    /// everything.
    pub fn is_finished(&self) -> bool {
        self.guest_shutdown == shutdown::BOTH && self.waiting.is_empty()
    }
}
