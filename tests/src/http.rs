//! A minimal client of the REST API for tests.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Timeout for an answer: a snapshot takes a while in the rig, and moving an application even
/// longer.
const TIMEOUT: Duration = Duration::from_secs(150);

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// The body as JSON; null if empty.
    pub body: Value,
    /// The body as text.
    pub text: String,
}

/// Sends a request to `/api/v1/<path>` and waits for the answer.
pub fn request(socket: &Path, method: &str, path: &str, body: Option<&str>) -> Result<Answer> {
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut request =
        format!("{method} /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n");
    if let Some(body) = body {
        request.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    request.push_str("\r\n");
    request.push_str(body.unwrap_or_default());
    // A server that refuses a large body may answer before it has read all of it.
    let sent = stream.write_all(request.as_bytes());
    read_answer(&mut stream)
        .or_else(|error| sent.map_err(Into::into).and(Err(error)))
        .with_context(|| format!("no answer to {method} {path}"))
}

/// Reads one answer.
pub fn read_answer(stream: &mut UnixStream) -> Result<Answer> {
    let mut bytes = Vec::new();
    let head = loop {
        if let Some(end) = find(&bytes, b"\r\n\r\n") {
            break end;
        }
        read_more(stream, &mut bytes)?;
    };
    let text = String::from_utf8_lossy(&bytes[..head]).into_owned();
    let status = text
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .with_context(|| format!("no status line: {text:?}"))?;
    let len = text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .map_or(Ok(0), |(_, value)| value.trim().parse::<usize>())?;
    let mut body = bytes.split_off(head + 4);
    while body.len() < len {
        read_more(stream, &mut body)?;
    }
    let text = String::from_utf8_lossy(&body).into_owned();
    let body = serde_json::from_str(&text).unwrap_or(Value::Null);
    Ok(Answer { status, body, text })
}

fn read_more(stream: &mut UnixStream, bytes: &mut Vec<u8>) -> Result<()> {
    let mut buffer = [0; 4096];
    match stream.read(&mut buffer)? {
        0 => bail!("the connection was closed after {} bytes", bytes.len()),
        read => bytes.extend_from_slice(&buffer[..read]),
    }
    Ok(())
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}
