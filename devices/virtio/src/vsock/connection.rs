//! One stream: its credit in both directions, and what waits for the host's socket.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::Shutdown,
    num::Wrapping,
    os::unix::net::UnixStream,
    time::Instant,
};

use super::packet::{Header, shutdown};

/// Bytes from the guest that wait for the host's socket at most; the guest is told.
pub const BUFFER: u32 = 64 << 10;

/// How far a connection is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Stage {
    /// The host asked; the guest has not answered yet.
    Connecting(Instant),
    /// Bytes flow.
    Open,
    /// The host's socket is gone; the guest was told and has a moment to agree.
    Closing(Instant),
}

/// A stream between a port of the guest and a Unix socket.
pub struct Connection {
    pub stream: UnixStream,
    pub stage: Stage,
    /// Token in the event loop.
    pub token: u32,
    /// What the guest can take, and has taken.
    peer_buf_alloc: u32,
    peer_fwd_cnt: Wrapping<u32>,
    /// Bytes sent to the guest.
    sent: Wrapping<u32>,
    /// Bytes of the guest on their way to the socket.
    waiting: VecDeque<u8>,
    /// Bytes of the guest that the socket has taken, and how many of them the guest knows of.
    fwd_cnt: Wrapping<u32>,
    told: Wrapping<u32>,
    /// The guest sends no more, or takes no more (flags of SHUTDOWN).
    guest_shutdown: u32,
    /// The socket had its end.
    pub host_ended: bool,
    /// The socket takes no more; there may still be something to read from it.
    host_deaf: bool,
    /// Flags of SHUTDOWN that the guest has been sent.
    told_end: u32,
}

/// What the socket gave.
#[derive(Debug, Eq, PartialEq)]
pub enum Got {
    /// So many bytes.
    Bytes(usize),
    /// Nothing at the moment.
    Nothing,
    /// The guest has no room.
    NoCredit,
    /// The host's side sends no more.
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

    /// Takes over what every packet of the guest says about its room.
    pub fn update_credit(&mut self, header: &Header) {
        self.peer_buf_alloc = header.buf_alloc;
        self.peer_fwd_cnt = Wrapping(header.fwd_cnt);
    }

    /// What every packet to the guest says about room here.
    pub fn credit(&mut self) -> (u32, u32) {
        self.told = self.fwd_cnt;
        (BUFFER, self.fwd_cnt.0)
    }

    /// The guest should hear that there is room again.
    pub fn owes_credit(&self) -> bool {
        (self.fwd_cnt - self.told).0 >= BUFFER / 2
    }

    fn room_in_guest(&self) -> usize {
        // A guest that claims to have taken more than it got has no room.
        let in_flight = (self.sent - self.peer_fwd_cnt).0;
        self.peer_buf_alloc.saturating_sub(in_flight) as usize
    }

    /// Reads what the guest has room for.
    pub fn read(&mut self, buffer: &mut [u8]) -> Got {
        if self.guest_shutdown & shutdown::RECEIVE != 0 {
            // The guest takes no more; that the socket is gone it hears all the same.
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

    /// Takes bytes of the guest; false if it had no room for them, or said that it sends no
    /// more.
    pub fn accept(&mut self, bytes: &[u8]) -> bool {
        let room = (BUFFER as usize).saturating_sub(self.waiting.len());
        if bytes.len() > room || self.guest_shutdown & shutdown::SEND != 0 {
            return false;
        }
        if self.host_deaf {
            // On its way before the guest heard of it. At most the buffer's size.
            self.fwd_cnt += Wrapping(bytes.len() as u32);
        } else {
            self.waiting.extend(bytes);
        }
        true
    }

    /// Hands what waits to the socket, as much as it takes. An error means that it takes no more.
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
            // The other side may be gone already.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        Ok(())
    }

    /// The socket takes no more: drops what waits for it. What it gave before it was closed still
    /// belongs to the guest. The flags of SHUTDOWN that the guest should be sent; `None` if it
    /// knows.
    pub fn stop_output(&mut self) -> Option<u32> {
        self.host_deaf = true;
        // At most the buffer's size.
        self.fwd_cnt += Wrapping(self.waiting.len() as u32);
        self.waiting = VecDeque::new();
        self.tell(shutdown::RECEIVE)
    }

    /// The guest shuts down; true if that leaves nothing to do for the connection.
    pub fn shut_down(&mut self, flags: u32) -> bool {
        self.guest_shutdown |= flags & shutdown::BOTH;
        self.is_finished()
    }

    /// The flags of SHUTDOWN that the guest should be sent, now that nothing more can be read;
    /// `None` if it knows.
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

    /// The guest neither sends nor receives any more, and the socket has got everything.
    pub fn is_finished(&self) -> bool {
        self.guest_shutdown == shutdown::BOTH && self.waiting.is_empty()
    }
}
