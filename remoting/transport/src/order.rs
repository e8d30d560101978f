//! How a running application is told to be served elsewhere from now on.
//!
//! The server (a pool, or the agent of a guest) sends one byte and one end of a socket pair over the connection beside
//! the rings, where the application's driver listens anyway; an application that is never moved does nothing for this.
//! The server then sends a line on the pair: `move`, the maximum milliseconds until no work is outstanding, the maximum
//! milliseconds until the new worker answers, and the address in the format of `GANTRY_OPENCL`. The application replies
//! with one line: `moved`, or `stays` and the reason. A line `stay` cancels an order: the application stays if it has
//! not moved yet, and replies in any case. The pair stays open, so that the server can send further orders wherever the
//! application is by then, until another server sends one. A server that redirects an application during the handshake
//! gives it such a pair at once. Neither side trusts the other's end.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::LazyLock,
    time::{Duration, Instant},
};

use remoting_proto::wire::hello::Hello;

use super::{
    closer::{Closer, Connection},
    socket,
};

/// The byte that comes with the pair's end. Other bytes say that there is something to read.
pub const ORDER: u8 = 1;
/// Takes the place of an address: the application keeps its state in its own memory, and its calls wait until another
/// order says where to continue.
pub const PARKED: &str = "parked";
/// The line that cancels an order.
const TAKEN_BACK: [u8; 5] = *b"stay\n";
/// Maximum size of a line in bytes.
const LONGEST: usize = 4096;
/// Timeout for the other side to send a line.
const SOON: Duration = Duration::from_secs(5);

/// Where an application is to be served from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The address.
    pub to: String,
    /// Maximum time for outstanding work to finish.
    pub patience: Duration,
    /// Maximum time for the new worker to answer. The application continues meanwhile.
    pub opening: Duration,
}

/// Closes the pairs, and the files that applications have sent.
static CLOSER: LazyLock<Closer> = LazyLock::new(Closer::default);

/// The server's end of a pair, which reaches an application wherever it is served.
#[derive(Debug)]
pub struct Lead {
    stream: Connection,
    /// Bytes that have arrived and were not consumed yet.
    come: Vec<u8>,
}

/// Reads one line from the other side, without its end. What follows stays in the socket.
fn line(mut stream: &UnixStream, patience: Duration) -> io::Result<String> {
    let until = Instant::now() + patience;
    let mut line = Vec::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut byte = [0];
        match stream.read(&mut byte) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) if byte == *b"\n" => break,
            Ok(_) if line.len() == LONGEST => return Err(io::ErrorKind::InvalidData.into()),
            Ok(_) => line.extend(byte),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    String::from_utf8(line).map_err(|_| io::ErrorKind::InvalidData.into())
}

impl Order {
    /// Sends an order over the connection to an application.
    ///
    /// # Errors
    /// The application is gone, or does not listen.
    pub fn give(&self, connection: &UnixStream) -> io::Result<Lead> {
        let (lead, theirs) = Lead::pair()?;
        lead.give(self)?;
        socket::send(connection, &[ORDER], &[theirs.as_fd()])?;
        Ok(lead)
    }

    /// Reads an order.
    ///
    /// # Errors
    /// The line is not an order, or does not come in time.
    pub fn take(stream: &UnixStream) -> io::Result<Self> {
        let line = line(stream, SOON)?;
        let words: Vec<_> = line.splitn(4, ' ').collect();
        let time = |word: &str| word.parse().ok().map(Duration::from_millis);
        let order = match words[..] {
            ["move", patience, opening, to] => {
                time(patience)
                    .zip(time(opening))
                    .map(|(patience, opening)| Self {
                        to: to.to_owned(),
                        patience,
                        opening,
                    })
            }
            _ => None,
        };
        Ok(order.ok_or(io::ErrorKind::InvalidData)?)
    }
}

/// Whether the order that came through this end of a pair is cancelled; true only once per cancellation. An order that
/// has been carried out by then is not cancelled.
pub fn is_taken_back(mut stream: &UnixStream) -> bool {
    let taken_back = socket::peek(stream) == Some(TAKEN_BACK);
    // It has arrived: this does not block.
    taken_back && stream.read_exact(&mut [0; TAKEN_BACK.len()]).is_ok()
}

/// Whether orders are accepted through this end of a pair, which came over the connection. They are accepted only from
/// the process that listens for connections, a pool or an agent, which must also have created the pair. A worker has
/// the connection as well, but it is confined and must not send its application anywhere.
pub fn may_come(pair: impl AsFd, connection: impl AsFd) -> bool {
    let both = (socket::process(pair), socket::process(connection));
    matches!(both, (Ok(pair), Ok(connection)) if pair == connection)
}

/// Maximum size of an address in bytes.
const ADDRESS: usize = LONGEST / 2;

/// Tells an application that has just sent its hello where it is served. Returns the lead to it.
///
/// # Errors
/// The application is gone, or the address is too long.
pub fn redirect(stream: &UnixStream, hello: Hello, to: &str) -> io::Result<Lead> {
    let length = u16::try_from(to.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let (lead, theirs) = Lead::pair()?;
    let mut bytes = hello.to_bytes().to_vec();
    bytes.extend(length.to_le_bytes());
    bytes.extend(to.as_bytes());
    socket::send(stream, &bytes, &[theirs.as_fd()])?;
    Ok(lead)
}

/// Reads the address that follows a hello of this form, which came with these files. The first file is the pair's end.
///
/// # Errors
/// There is no valid address, or its sender may not redirect the application.
pub fn redirected(
    mut stream: &UnixStream,
    files: Vec<OwnedFd>,
) -> io::Result<(String, UnixStream)> {
    let orders = files.into_iter().next().map(UnixStream::from);
    let orders = orders.ok_or(io::ErrorKind::InvalidData)?;
    if !may_come(&orders, stream) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let length = usize::from(u16::from_le_bytes(length));
    if length > ADDRESS {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut to = vec![0; length];
    stream.read_exact(&mut to)?;
    let to = String::from_utf8(to).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok((to, orders))
}

/// Replies to an order. If its sender is gone, nobody needs the reply.
pub fn answer(stream: &UnixStream, outcome: &Result<(), String>) {
    let _ = match outcome {
        Ok(()) => writeln!(&*stream, "moved"),
        Err(why) => {
            // The text may come from a worker; the line must be one that the other side accepts.
            let end = why.floor_char_boundary(LONGEST / 2);
            writeln!(&*stream, "stays {}", why[..end].replace('\n', " "))
        }
    };
}

impl Lead {
    /// Creates a pair, and returns both ends.
    fn pair() -> io::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        socket::refuse_files(&ours);
        let lead = Self {
            stream: Connection::new(ours, &CLOSER),
            come: Vec::new(),
        };
        Ok((lead, theirs))
    }

    /// Makes all methods non-blocking except [`answer`](Self::answer).
    ///
    /// # Errors
    /// The system refuses.
    pub fn be_nonblocking(&self) -> io::Result<()> {
        self.stream.set_nonblocking(true)
    }

    /// Sends an order.
    ///
    /// # Errors
    /// The application is gone, another server leads it, or the address is invalid.
    pub fn give(&self, order: &Order) -> io::Result<()> {
        if order.to.contains('\n') || order.to.len() > ADDRESS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (patience, opening) = (order.patience.as_millis(), order.opening.as_millis());
        let line = format!("move {patience} {opening} {}\n", order.to);
        socket::send(&self.stream, line.as_bytes(), &[])
    }

    /// Cancels the last order. The application replies all the same.
    ///
    /// # Errors
    /// The application is gone, or another server leads it.
    pub fn take_back(&self) -> io::Result<()> {
        socket::send(&self.stream, &TAKEN_BACK, &[])
    }

    /// Returns the next reply to an order if one has arrived. Does not wait if the lead is
    /// [non-blocking](Self::be_nonblocking). Skips lines that are not replies.
    ///
    /// # Errors
    /// The application has ended, or follows another server.
    pub fn heard(&mut self) -> io::Result<Option<Result<(), String>>> {
        let mut bytes = [0; LONGEST];
        let mut read = false;
        loop {
            while let Some(end) = self.come.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.come.drain(..=end).collect();
                if let Ok(answer) = outcome(&String::from_utf8_lossy(&line[..end])) {
                    return Ok(Some(answer));
                }
            }
            // A peer that never ends its line is read one piece at a time.
            if std::mem::replace(&mut read, true) {
                return Ok(None);
            }
            if self.come.len() >= LONGEST {
                self.come.clear();
            }
            match self.stream.receive(&mut bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => self.come.extend(&bytes[..got]),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return Ok(None),
                    _ => return Err(error),
                },
            }
        }
    }

    /// Waits for the reply, at most for `patience`. The inner error is the reason why the application has not moved.
    ///
    /// # Errors
    /// The application sends something else, has ended, or takes longer.
    pub fn answer(&self, patience: Duration) -> io::Result<Result<(), String>> {
        outcome(&line(&self.stream, patience)?)
    }
}

/// Parses a reply.
fn outcome(line: &str) -> io::Result<Result<(), String>> {
    match line.split_once(' ') {
        None if line == "moved" => Ok(Ok(())),
        Some(("stays", why)) => Ok(Err(why.to_owned())),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

impl AsFd for Lead {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use remoting_proto::wire::hello::Form;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn an_order_arrives_and_so_does_its_answer() {
        let (pool, application) = UnixStream::pair().unwrap();
        let order = Order {
            to: "/run/other pool".to_owned(),
            patience: Duration::from_millis(250),
            opening: Duration::from_secs(60),
        };
        let mut lead = order.give(&pool).unwrap();
        let mut byte = [0];
        let (_, mut files) = socket::receive(&application, &mut byte).unwrap();
        assert_eq!(byte, [ORDER]);
        let stream = UnixStream::from(files.remove(0));
        for outcome in [Ok(()), Err("it has\nno time".to_owned())] {
            assert_eq!(Order::take(&stream).unwrap(), order);
            answer(&stream, &outcome);
            let told = match &outcome {
                Ok(()) => lead.answer(PATIENCE).unwrap(),
                Err(_) => lead.heard().unwrap().unwrap(),
            };
            lead.be_nonblocking().unwrap();
            assert!(lead.heard().unwrap().is_none());
            assert_eq!(told, outcome.map_err(|why| why.replace('\n', " ")));
            // Another order, wherever the application is now.
            lead.give(&order).unwrap();
        }
    }

    #[test]
    fn orders_and_answers_that_come_together_are_taken_one_by_one() {
        let (mut lead, application) = Lead::pair().unwrap();
        lead.be_nonblocking().unwrap();
        let orders = ["/run/one", "/run/two"].map(|to| Order {
            to: to.to_owned(),
            patience: PATIENCE,
            opening: PATIENCE,
        });
        orders.iter().for_each(|order| lead.give(order).unwrap());
        for order in &orders {
            assert_eq!(Order::take(&application).unwrap(), *order);
        }
        // Half a reply, something that is not a reply, and an unexpected file, where the kernel accepts it.
        let text = b"moved\nhello\n\nstays here\nmov";
        let sent = socket::send(&application, text, &[application.as_fd()]);
        if sent.is_err() {
            socket::send(&application, text, &[]).unwrap();
        }
        assert_eq!(lead.heard().unwrap(), Some(Ok(())));
        assert_eq!(lead.heard().unwrap(), Some(Err("here".to_owned())));
        assert_eq!(lead.heard().unwrap(), None);
        (&application).write_all(b"ed\n").unwrap();
        // More than any line holds.
        (&application).write_all(&[b'x'; 3 * LONGEST]).unwrap();
        assert_eq!(lead.heard().unwrap(), Some(Ok(())));
        for _ in 0..4 {
            assert_eq!(lead.heard().unwrap(), None);
        }
        assert!(lead.come.len() <= 2 * LONGEST);
        drop(application);
        assert!(lead.heard().is_err());
    }

    #[test]
    fn an_order_is_taken_back_once_and_later_ones_are_not() {
        let (lead, application) = Lead::pair().unwrap();
        assert!(!is_taken_back(&application), "nothing was said");
        let order = Order {
            to: "/run/one".to_owned(),
            patience: PATIENCE,
            opening: PATIENCE,
        };
        lead.give(&order).unwrap();
        lead.take_back().unwrap();
        lead.give(&order).unwrap();
        assert!(!is_taken_back(&application), "it is an order");
        assert_eq!(Order::take(&application).unwrap(), order);
        assert!(is_taken_back(&application));
        assert!(!is_taken_back(&application), "it was heard");
        assert_eq!(Order::take(&application).unwrap(), order);
        // Half a cancellation, and a sender that has ended.
        lead.stream.set_nonblocking(true).unwrap();
        socket::send(&lead.stream, b"sta", &[]).unwrap();
        assert!(!is_taken_back(&application));
        drop(lead);
        assert!(!is_taken_back(&application));
    }

    #[test]
    fn a_reason_of_any_length_is_an_answer() {
        let (mut lead, application) = Lead::pair().unwrap();
        let why = "é".repeat(LONGEST);
        answer(&application, &Err(why.clone()));
        let told = lead.answer(PATIENCE).unwrap().unwrap_err();
        assert!(told.starts_with("éé") && told.len() < LONGEST);
        answer(&application, &Err(why));
        lead.be_nonblocking().unwrap();
        let told = lead.heard().unwrap().unwrap().unwrap_err();
        assert!(told.starts_with("éé") && told.len() < LONGEST);
    }

    #[test]
    fn only_who_listens_may_give_orders() {
        let (pool, application) = UnixStream::pair().unwrap();
        let order = Order {
            to: "/run/other".to_owned(),
            patience: PATIENCE,
            opening: PATIENCE,
        };
        let ends = || {
            let mut byte = [0];
            let (_, mut files) = socket::receive(&application, &mut byte).unwrap();
            UnixStream::from(files.remove(0))
        };
        let _lead = order.give(&pool).unwrap();
        assert!(may_come(ends(), &application));
        // A process that has the connection as this one has it, as a worker does.
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut pair = [0; 2];
            // SAFETY: as above; room for two descriptors, which nobody else has.
            unsafe {
                if libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()) == 0 {
                    let end = BorrowedFd::borrow_raw(pair[0]);
                    let _ = socket::send(&pool, &[ORDER], &[end]);
                }
                libc::_exit(0);
            }
        }
        assert!(child > 0);
        drop(pool);
        assert!(!may_come(ends(), &application));
        // SAFETY: this process's child.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    }

    #[test]
    fn who_is_served_elsewhere_learns_where() {
        let (agent, application) = UnixStream::pair().unwrap();
        let hello = Hello::answer(remoting_proto::apis::ALL[0], Form::Elsewhere, (0, 0));
        let lead = redirect(&agent, hello, "/run/local").unwrap();
        let (bytes, files) = socket::receive_hello(&application).unwrap();
        assert_eq!(
            Hello::check(&bytes, &remoting_proto::apis::ALL)
                .unwrap()
                .form,
            Form::Elsewhere
        );
        let (to, orders) = redirected(&application, files).unwrap();
        assert_eq!(to, "/run/local");
        let order = Order {
            to: "/run/other".to_owned(),
            patience: PATIENCE,
            opening: PATIENCE,
        };
        lead.give(&order).unwrap();
        assert_eq!(Order::take(&orders).unwrap(), order);
        for (text, files) in [(&[255, 255][..], vec![orders.into()]), (&[0, 0], vec![])] {
            (&agent).write_all(text).unwrap();
            assert!(redirected(&application, files).is_err());
        }
    }

    #[test]
    fn what_is_no_order_or_no_answer_is_an_error() {
        for text in [
            "",
            "move\n",
            "move x 1 /a\n",
            "move 1 /a\n",
            "stay 1 1 /a\n",
            "move 1 1 /a",
        ] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (&ours).write_all(text.as_bytes()).unwrap();
            drop(ours);
            assert!(Order::take(&theirs).is_err(), "{text:?}");
        }
        for text in ["", "moved ", "gone\n", "moved"] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (&ours).write_all(text.as_bytes()).unwrap();
            drop(ours);
            let mut lead = Lead {
                stream: Connection::new(theirs, &CLOSER),
                come: Vec::new(),
            };
            assert!(lead.answer(PATIENCE).is_err(), "{text:?}");
            assert!(lead.heard().is_err(), "{text:?}");
        }
    }
}
