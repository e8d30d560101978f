//! The event monitor: reports what happens in the machine as a stream of JSON objects.
//!
//! Format and names follow Cloud Hypervisor's `--event-monitor`: each object stands on its own,
//! followed by an empty line, with `timestamp` (seconds and nanoseconds since Gantry started),
//! `source`, `event` and `properties`. The stream never blocks the machine: an object that does not
//! fit into the reader's buffer is dropped, and the next one that fits reports how many were lost.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::Instant,
};

use serde::Serialize;

/// The stream could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the event monitor {}: give a file or a FIFO", path.display())]
pub struct OpenError {
    path: PathBuf,
    source: io::Error,
}

#[derive(Serialize)]
struct Timestamp {
    secs: u64,
    nanos: u32,
}

#[derive(Serialize)]
struct Event<'a> {
    timestamp: Timestamp,
    source: &'a str,
    event: &'a str,
    properties: Option<BTreeMap<&'a str, &'a str>>,
}

/// Destination of events; discards them unless opened.
#[derive(Debug)]
pub struct EventMonitor {
    out: Option<File>,
    start: Instant,
    dropped: u64,
    /// Remainder of an object of which only a part could be written.
    pending: Vec<u8>,
}

impl EventMonitor {
    /// A monitor that discards all events.
    pub fn disabled(start: Instant) -> Self {
        Self {
            out: None,
            start,
            dropped: 0,
            pending: Vec::new(),
        }
    }

    /// Writes to a file (appended to, created if needed) or a FIFO. A FIFO buffers as much as it
    /// has room for until a reader opens it.
    pub fn open(path: &Path, start: Instant) -> Result<Self, OpenError> {
        let open = || {
            let fifo = fs::metadata(path).is_ok_and(|file| file.file_type().is_fifo());
            OpenOptions::new()
                // Linux can open a FIFO for both directions even if there is no reader.
                .read(fifo)
                .append(true)
                .create(!fifo)
                // Writes to a full FIFO do not block.
                .custom_flags(libc::O_NONBLOCK)
                .open(path)
        };
        let out = open().map_err(|source| OpenError {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self::to_file(out, start))
    }

    /// Writes to an open file.
    pub fn to_file(out: File, start: Instant) -> Self {
        Self {
            out: Some(out),
            start,
            dropped: 0,
            pending: Vec::new(),
        }
    }

    /// Reports an event.
    pub fn emit(&mut self, source: &str, event: &str, properties: &[(&str, &str)]) {
        let Some(out) = &mut self.out else { return };
        if !self.pending.is_empty() {
            write_some(out, &mut self.pending);
        }
        if !self.pending.is_empty() {
            self.dropped += 1;
            return;
        }
        let elapsed = self.start.elapsed();
        let mut properties: BTreeMap<_, _> = properties.iter().copied().collect();
        let dropped = self.dropped.to_string();
        if self.dropped > 0 {
            properties.insert("dropped_before", &dropped);
        }
        let event = Event {
            timestamp: Timestamp {
                secs: elapsed.as_secs(),
                nanos: elapsed.subsec_nanos(),
            },
            source,
            event,
            properties: (!properties.is_empty()).then_some(properties),
        };
        // Strings and numbers always serialize.
        if let Ok(mut bytes) = serde_json::to_vec_pretty(&event) {
            bytes.extend_from_slice(b"\n\n");
            self.pending = bytes;
            self.dropped = 0;
            write_some(out, &mut self.pending);
        }
    }
}

/// Writes as much as fits and leaves the rest in `bytes`.
fn write_some(out: &mut File, bytes: &mut Vec<u8>) {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return,
            Ok(written) => {
                bytes.drain(..written);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                match error.kind() {
                    io::ErrorKind::BrokenPipe => log::debug!("nobody reads the events"),
                    _ => log::warn!("an event is lost: {error}"),
                }
                bytes.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_json_objects_apart_from_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events");
        let mut monitor = EventMonitor::open(&path, Instant::now()).unwrap();
        monitor.emit("vm", "booting", &[]);
        monitor.emit("vm", "device-removed", &[("id", "disk0")]);
        let text = std::fs::read_to_string(&path).unwrap();
        let events: Vec<serde_json::Value> = text
            .split("\n\n")
            .filter(|part| !part.is_empty())
            .map(|part| serde_json::from_str(part).unwrap())
            .collect();
        assert_eq!(events[0]["event"], "booting");
        assert!(events[0]["properties"].is_null());
        assert_eq!(events[1]["source"], "vm");
        assert_eq!(events[1]["properties"]["id"], "disk0");
    }

    #[test]
    fn a_fifo_keeps_events_until_its_reader_comes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let mut monitor = EventMonitor::open(&path, Instant::now()).unwrap();
        monitor.emit("vmm", "starting", &[]);
        let mut reader = File::open(&path).unwrap();
        let mut bytes = [0; 16];
        io::Read::read_exact(&mut reader, &mut bytes).unwrap();
        assert_eq!(bytes[0], b'{');
    }

    #[test]
    fn a_reader_that_does_not_read_holds_nobody_up_and_learns_what_it_missed() {
        let (reader, writer) = io::pipe().unwrap();
        let writer = File::from(std::os::fd::OwnedFd::from(writer));
        // SAFETY: sets plain flags of a descriptor that this test owns.
        unsafe {
            libc::fcntl(
                std::os::fd::AsRawFd::as_raw_fd(&writer),
                libc::F_SETFL,
                libc::O_NONBLOCK,
            )
        };
        let mut monitor = EventMonitor::to_file(writer, Instant::now());
        for _ in 0..10_000 {
            monitor.emit("vm", "paused", &[]);
        }
        assert!(monitor.dropped > 0);
        let mut reader = io::BufReader::new(reader);
        let mut bytes = vec![0; 60_000];
        io::Read::read_exact(&mut reader, &mut bytes).unwrap();
        monitor.emit("vm", "resumed", &[]);
        assert_eq!(monitor.dropped, 0);
        drop(monitor);
        let mut rest = String::new();
        io::Read::read_to_string(&mut reader, &mut rest).unwrap();
        assert!(rest.contains("dropped_before"), "{rest}");
    }
}
