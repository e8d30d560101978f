//! How a running application is told to be served elsewhere from now on.
//!
//! Whoever serves an application (a pool, or the agent of a guest) sends one byte and one end of a
//! pair of sockets over the connection beside the rings, where the application's driver waits anyway:
//! an application that nobody moves does nothing for it. On the pair goes a line, `move`, the
//! milliseconds that it may take until nothing is under way, and the address, as `GANTRY_OPENCL` has it;
//! and back one line: `moved`, or `stays` and why. The pair stays, for who has given the order to give
//! further ones wherever the application is by then, until somebody else gives one. Neither side trusts
//! the other's.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use super::socket;
use crate::wire::hello::Hello;

/// The byte that comes with the pair's end. Others say that there is something to read.
pub const ORDER: u8 = 1;
/// The longest line, in bytes.
const LONGEST: u64 = 4096;
/// How long the other side may take to say what it wants.
const SOON: Duration = Duration::from_secs(5);

/// Where an application is to be served from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The address.
    pub to: String,
    /// How long what is under way may take to end.
    pub patience: Duration,
}

/// Leads to an application, wherever it is served.
#[derive(Debug)]
pub struct Lead(UnixStream);

/// A line of the other side, without its end.
fn line(stream: &UnixStream, patience: Duration) -> io::Result<String> {
    stream.set_read_timeout(Some(patience))?;
    let mut line = String::new();
    BufReader::new(stream.take(LONGEST)).read_line(&mut line)?;
    match line.pop() {
        Some('\n') => Ok(line),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl Order {
    /// Gives an order over the connection to an application.
    ///
    /// # Errors
    /// The application is gone, or hears nothing.
    pub fn give(&self, connection: &UnixStream) -> io::Result<Lead> {
        let (ours, theirs) = UnixStream::pair()?;
        let lead = Lead(ours);
        lead.give(self)?;
        socket::send(connection, &[ORDER], &[theirs.as_fd()])?;
        Ok(lead)
    }

    /// Reads an order.
    ///
    /// # Errors
    /// It is none.
    pub fn take(stream: &UnixStream) -> io::Result<Self> {
        let line = line(stream, SOON)?;
        let mut words = line.splitn(3, ' ');
        let order = match (words.next(), words.next(), words.next()) {
            (Some("move"), Some(patience), Some(to)) => {
                patience.parse().ok().map(|patience| Self {
                    to: to.to_owned(),
                    patience: Duration::from_millis(patience),
                })
            }
            _ => None,
        };
        Ok(order.ok_or(io::ErrorKind::InvalidData)?)
    }
}

/// Whether an order may come by this end of a pair, which has come over the connection: only from the
/// process that listens for connections, a pool or an agent, which has made the pair then, too. A worker
/// has the connection as well, is confined, and may not send its application anywhere.
pub fn may_come(pair: impl AsFd, connection: impl AsFd) -> bool {
    let both = (socket::process(pair), socket::process(connection));
    matches!(both, (Ok(pair), Ok(connection)) if pair == connection)
}

/// The longest address.
const ADDRESS: usize = LONGEST as usize / 2;

/// Tells an application that has just said hello where it is served. The connection leads to it then.
///
/// # Errors
/// It is gone, or the address is too long.
pub fn redirect(stream: &UnixStream, hello: Hello, to: &str) -> io::Result<()> {
    let length = u16::try_from(to.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut bytes = hello.to_bytes().to_vec();
    bytes.extend(length.to_le_bytes());
    bytes.extend(to.as_bytes());
    socket::send(stream, &bytes, &[])
}

/// Reads the address that follows a hello of this form.
///
/// # Errors
/// It is none.
pub fn redirected(mut stream: &UnixStream) -> io::Result<String> {
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let length = usize::from(u16::from_le_bytes(length));
    if length > ADDRESS {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut to = vec![0; length];
    stream.read_exact(&mut to)?;
    String::from_utf8(to).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Answers an order. Who has given it and is gone has nothing to be told.
pub fn answer(stream: &UnixStream, outcome: &Result<(), String>) {
    let _ = match outcome {
        Ok(()) => writeln!(&*stream, "moved"),
        Err(why) => writeln!(&*stream, "stays {}", why.replace('\n', " ")),
    };
}

impl Lead {
    /// One that the other side has opened, to be told where to go.
    pub fn new(stream: UnixStream) -> Self {
        Self(stream)
    }

    /// Gives an order.
    ///
    /// # Errors
    /// The application is gone, or somebody else leads it, or the address is none.
    pub fn give(&self, order: &Order) -> io::Result<()> {
        if order.to.contains('\n') || order.to.len() > ADDRESS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let line = format!("move {} {}\n", order.patience.as_millis(), order.to);
        socket::send(&self.0, line.as_bytes(), &[])
    }

    /// The answer to an order if it has come, without waiting.
    ///
    /// # Errors
    /// The application has ended, or follows somebody else, or says something else.
    pub fn heard(&self) -> io::Result<Option<Result<(), String>>> {
        let mut bytes = [0; LONGEST as usize];
        let flags = libc::MSG_DONTWAIT;
        // SAFETY: a buffer that is as long as is said.
        let got = unsafe {
            let fd = self.0.as_raw_fd();
            libc::recv(fd, bytes.as_mut_ptr().cast(), bytes.len(), flags)
        };
        let Ok(got) = usize::try_from(got) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        };
        // An answer is written at once.
        let text = String::from_utf8_lossy(&bytes[..got]);
        let line = text.strip_suffix('\n');
        let line = line.ok_or(io::ErrorKind::UnexpectedEof)?;
        outcome(line).map(Some)
    }

    /// Waits for the answer, at most for so long: why the application has not moved, if it has not.
    ///
    /// # Errors
    /// It says nothing that is an answer. It has ended, or takes longer.
    pub fn answer(&self, patience: Duration) -> io::Result<Result<(), String>> {
        outcome(&line(&self.0, patience)?)
    }
}

/// What an answer says.
fn outcome(line: &str) -> io::Result<Result<(), String>> {
    match line.split_once(' ') {
        None if line == "moved" => Ok(Ok(())),
        Some(("stays", why)) => Ok(Err(why.to_owned())),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

impl AsFd for Lead {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::wire::hello::Form;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn an_order_arrives_and_so_does_its_answer() {
        let (pool, application) = UnixStream::pair().unwrap();
        let order = Order {
            to: "/run/other pool".to_owned(),
            patience: Duration::from_millis(250),
        };
        let lead = order.give(&pool).unwrap();
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
            assert!(lead.heard().unwrap().is_none());
            assert_eq!(told, outcome.map_err(|why| why.replace('\n', " ")));
            // Another one, wherever it is now.
            lead.give(&order).unwrap();
        }
    }

    #[test]
    fn only_who_listens_may_give_orders() {
        let (pool, application) = UnixStream::pair().unwrap();
        let order = Order {
            to: "/run/other".to_owned(),
            patience: PATIENCE,
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
        let hello = Hello::answer(crate::apis::ALL[0], Form::Elsewhere, (0, 0));
        redirect(&agent, hello, "/run/local").unwrap();
        let (bytes, _) = socket::receive_hello(&application).unwrap();
        assert_eq!(
            Hello::check(&bytes, &crate::apis::ALL).unwrap().form,
            Form::Elsewhere
        );
        assert_eq!(redirected(&application).unwrap(), "/run/local");
        (&agent).write_all(&[255, 255]).unwrap();
        assert!(redirected(&application).is_err());
    }

    #[test]
    fn what_is_no_order_or_no_answer_is_an_error() {
        for text in ["", "move\n", "move x /a\n", "stay 1 /a\n", "move 1 /a"] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (&ours).write_all(text.as_bytes()).unwrap();
            drop(ours);
            assert!(Order::take(&theirs).is_err(), "{text:?}");
        }
        for text in ["", "moved ", "gone\n", "moved"] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (&ours).write_all(text.as_bytes()).unwrap();
            drop(ours);
            let lead = Lead(theirs);
            assert!(lead.answer(PATIENCE).is_err(), "{text:?}");
            assert!(lead.heard().is_err(), "{text:?}");
        }
    }
}
