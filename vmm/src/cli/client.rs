//! A client of the REST API: one request on one connection.

use std::{
    io::{self, Read, Write},
    os::{fd::RawFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use vmm_api::PREFIX;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Maximum size of a response in bytes: enough for the description of a VM with very many devices.
const MAX_RESPONSE: usize = 64 << 20;

/// Maximum number of header lines in a response.
const MAX_HEADERS: usize = 32;

/// How long to wait before another attempt to connect to a socket whose queue is full.
const RETRY: Duration = Duration::from_millis(10);

/// A request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No VMM is listening.
    #[error("cannot connect to {}; is a VMM running with this API socket?", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The connection broke.
    #[error("lost the connection to the VMM")]
    Connection(#[from] io::Error),
    /// There is no response in time.
    #[error(
        "the VMM at {} does not answer within {patience:?}: it is stopped, or hangs",
        path.display()
    )]
    Silent {
        /// The socket.
        path: PathBuf,
        /// The time limit.
        patience: Duration,
    },
    /// The response is not HTTP.
    #[error("the VMM's answer cannot be understood")]
    NotHttp(#[from] httparse::Error),
    /// The response is truncated.
    #[error("the VMM's answer is not complete; it may have ended")]
    Incomplete,
    /// The VMM refuses the request.
    #[error("{} (HTTP status {status})", chain.join(": "))]
    Refused {
        /// HTTP status.
        status: u16,
        /// What happened and why, outermost first.
        chain: Vec<String>,
    },
}

/// A client of the REST API.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    /// Time limit for a request; unlimited if `None`.
    patience: Option<Duration>,
}

impl Client {
    /// Creates a client for the VMM that serves this socket.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            patience: None,
        }
    }

    /// Sets a time limit for each request.
    pub fn within(self, patience: Duration) -> Self {
        Self {
            patience: Some(patience),
            ..self
        }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a request, with descriptors if there are any, and returns the body of the response.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&[u8]>,
        fds: &[RawFd],
    ) -> Result<Vec<u8>, ClientError> {
        let end = self.patience.map(|patience| Instant::now() + patience);
        self.exchange(method, path, body, fds, end)
            .map_err(|error| self.silence(error))
    }

    /// Names a missed deadline as such.
    fn silence(&self, error: ClientError) -> ClientError {
        match (self.patience, error) {
            (
                Some(patience),
                ClientError::Connection(source) | ClientError::Connect { source, .. },
            ) if matches!(
                source.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
            ) =>
            {
                ClientError::Silent {
                    path: self.socket.clone(),
                    patience,
                }
            }
            (_, error) => error,
        }
    }

    /// Connects, until `end` if the socket's queue is full.
    fn connect(&self, end: Option<Instant>) -> io::Result<UnixStream> {
        let Some(end) = end else {
            return UnixStream::connect(&self.socket);
        };
        loop {
            match base::socket::connect(&self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                    thread::sleep(RETRY);
                }
                Err(error) => return Err(error),
                Ok(stream) => {
                    base::socket::set_blocking(&stream, true)?;
                    return Ok(stream);
                }
            }
        }
    }

    fn exchange(
        &self,
        method: &str,
        path: &str,
        body: Option<&[u8]>,
        fds: &[RawFd],
        end: Option<Instant>,
    ) -> Result<Vec<u8>, ClientError> {
        let mut stream = self.connect(end).map_err(|source| ClientError::Connect {
            path: self.socket.clone(),
            source,
        })?;
        stream.set_write_timeout(left(end)?)?;
        let length = match body {
            Some(body) => format!("Content-Length: {}\r\n", body.len()),
            None => String::new(),
        };
        let head = format!(
            "{method} {PREFIX}{path} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\
             Connection: close\r\n{length}\r\n"
        );
        if fds.is_empty() {
            stream.write_all(head.as_bytes())?;
        } else {
            let sent = stream
                .send_with_fds(&[head.as_bytes()], fds)
                .map_err(io::Error::from)?;
            stream.write_all(&head.as_bytes()[sent..])?;
        }
        if let Some(body) = body
            && let Err(error) = stream.write_all(body)
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            // A server that rejects a body closes the connection early, and its response gives the
            // reason.
            return Err(error.into());
        }
        let mut answer = Vec::new();
        let mut part = [0; 16 << 10];
        while answer.len() < MAX_RESPONSE {
            stream.set_read_timeout(left(end)?)?;
            match stream.read(&mut part) {
                Ok(0) => break,
                Ok(read) => answer.extend_from_slice(&part[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        parse(answer)
    }
}

/// The time until `end`, which is not zero; an error if it has passed.
fn left(end: Option<Instant>) -> io::Result<Option<Duration>> {
    let Some(end) = end else { return Ok(None) };
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(Some(left))
}

fn parse(mut answer: Vec<u8>) -> Result<Vec<u8>, ClientError> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(head) = response.parse(&answer)? else {
        return Err(ClientError::Incomplete);
    };
    let status = response.code.unwrap_or_default();
    let length = response
        .headers
        .iter()
        .find(|header| header.name.eq_ignore_ascii_case("content-length"))
        .and_then(|header| std::str::from_utf8(header.value).ok()?.trim().parse().ok())
        .unwrap_or(0);
    let mut body = answer.split_off(head);
    if body.len() < length {
        return Err(ClientError::Incomplete);
    }
    body.truncate(length);
    if (200..300).contains(&status) {
        return Ok(body);
    }
    let chain = serde_json::from_slice(&body)
        .unwrap_or_else(|_| vec![String::from_utf8_lossy(&body).into_owned()]);
    Err(ClientError::Refused { status, chain })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_vmm_is_shown_with_its_causes() {
        let text = "HTTP/1.1 404 \r\nContent-Length: 9\r\n\r\n[\"a\",\"b\"]";
        let error = parse(text.into()).unwrap_err();
        assert_eq!(error.to_string(), "a: b (HTTP status 404)");
    }

    #[test]
    fn an_answer_that_is_cut_off_is_an_error() {
        for text in [
            "",
            "HTTP/1.1 2",
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{",
        ] {
            let error = parse(text.into()).unwrap_err();
            assert!(matches!(error, ClientError::Incomplete), "{text}");
        }
        assert_eq!(parse("HTTP/1.1 204 \r\n\r\n".into()).unwrap(), b"");
    }
}
