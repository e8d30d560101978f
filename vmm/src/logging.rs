//! The log: one line per record, to standard error or a file.
//!
//! `gantry: 1.234567s <vcpu0> WARN message`: seconds since the process started, and the thread.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    thread,
    time::Instant,
};

use log::{Level, LevelFilter, Log, Metadata, Record};

/// The log cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened.
    #[error("cannot open the log file {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is a log already.
    #[error("cannot start the log")]
    Twice(#[from] log::SetLoggerError),
}

struct Logger {
    /// Standard error if there is none.
    file: Option<File>,
    started: Instant,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata) -> bool {
        // A guest can have that crate warn of each of its accesses to a physical device.
        metadata.level() == Level::Error || !metadata.target().starts_with("vfio_ioctls")
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let thread = thread::current();
        let line = line(record, thread.name().unwrap_or("?"), self.started.elapsed());
        // One write for the whole line, so that lines of threads do not mix. If it fails, there
        // is nobody left to tell.
        let _ = match &self.file {
            Some(file) => (&*file).write_all(line.as_bytes()),
            None => io::stderr().write_all(line.as_bytes()),
        };
    }

    fn flush(&self) {}
}

fn line(record: &Record, thread: &str, elapsed: std::time::Duration) -> String {
    format!(
        "gantry: {}.{:06}s <{thread}> {} {}\n",
        elapsed.as_secs(),
        elapsed.subsec_micros(),
        record.level(),
        base::note::printable(record.args().to_string())
    )
}

/// Warnings and errors, and with each `-v` more: information, debugging, traces.
pub fn level(verbosity: u8) -> LevelFilter {
    match verbosity {
        0 => LevelFilter::Warn,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    }
}

/// Starts the log of the process. A file is appended to.
pub fn start(file: Option<&Path>, verbosity: u8, started: Instant) -> Result<(), Error> {
    let open = |path: &Path| {
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.map_err(|source| Error::Open {
            path: path.to_owned(),
            source,
        })
    };
    let file = file.map(open).transpose()?;
    log::set_boxed_logger(Box::new(Logger { file, started }))?;
    log::set_max_level(level(verbosity));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_line_says_when_who_and_how_bad() {
        let arguments = format_args!("disk {} is full", 3);
        let record = Record::builder()
            .level(log::Level::Warn)
            .args(arguments)
            .build();
        assert_eq!(
            line(&record, "vcpu0", Duration::from_micros(1_234_567)),
            "gantry: 1.234567s <vcpu0> WARN disk 3 is full\n"
        );
    }

    #[test]
    fn a_record_is_one_line_whatever_a_client_has_sent() {
        let sent = "no \x1b[1mdevice\ngantry: 9.9s <vmm> WARN forged";
        let arguments = format_args!("{sent}");
        let record = Record::builder()
            .level(log::Level::Info)
            .args(arguments)
            .build();
        let line = line(&record, "api", Duration::ZERO);
        assert!(!line.contains('\x1b'));
        assert_eq!(line.lines().count(), 1, "{line}");
    }

    #[test]
    fn each_v_says_more() {
        let levels: Vec<LevelFilter> = (0..5).map(level).collect();
        assert!(levels.is_sorted());
        assert_eq!(levels[0], LevelFilter::Warn);
        assert_eq!(levels[4], LevelFilter::Trace);
    }
}
