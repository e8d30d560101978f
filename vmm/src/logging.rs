//! The log: one line per record, to standard error or a file.
//!
//! Example: `gantry: 1.234567s <vcpu0> WARN message`, with the seconds since the process started and the thread's name.
//! Each line for the journal begins with its priority (sd-daemon(3)). A line in JSON is an object.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    str::FromStr,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use base::Unpoisoned;
use log::{Level, LevelFilter, Log, Metadata, Record};

/// The log cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened.
    #[error("cannot open the log file {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The log was already started.
    #[error("cannot start the log")]
    Twice(#[from] log::SetLoggerError),
}

/// The form of a line.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Format {
    /// Text for people.
    #[default]
    Text,
    /// The same with a priority in front, which the journal takes off.
    Journal,
    /// A JSON object.
    Json,
}

impl Format {
    /// Text to standard error is for the journal if that is what standard error is connected to.
    #[must_use]
    pub fn for_standard_error(self) -> Self {
        match self {
            Self::Text if is_journal(std::env::var("JOURNAL_STREAM").ok().as_deref()) => {
                Self::Journal
            }
            other => other,
        }
    }
}

impl FromStr for Format {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "text" => Ok(Self::Text),
            "journal" => Ok(Self::Journal),
            "json" => Ok(Self::Json),
            _ => Err("use text, journal or json"),
        }
    }
}

/// Whether standard error is the stream to the journal that systemd names: `DEVICE:INODE`.
fn is_journal(named: Option<&str>) -> bool {
    let Some((device, inode)) = named.and_then(|named| named.split_once(':')) else {
        return false;
    };
    let path = format!("/proc/self/fd/{}", io::stderr().as_raw_fd());
    std::fs::metadata(path)
        .is_ok_and(|file| device.parse() == Ok(file.dev()) && inode.parse() == Ok(file.ino()))
}

/// How many lines a thread may log in a burst from one place in the code, and after how much time one more is allowed:
/// a guest can trigger some messages as often as it likes, and must neither fill the host's disk with them nor suppress
/// those of another device. Guests can choose neither the number of threads nor their names.
const BURST: u32 = 100;
const REFILL: Duration = Duration::from_secs(1);

/// Prefix of the names of vCPU threads.
const VCPU: &str = "vcpu";

/// The rate-limit state of one thread at one place in the code.
#[derive(Debug)]
struct Allowance {
    lines: u32,
    refilled: Instant,
    unsaid: u64,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self {
            lines: BURST,
            refilled: now,
            unsaid: 0,
        }
    }

    /// Returns how many lines were suppressed before this one, or `None` if this one is to be suppressed too.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let passed = now.saturating_duration_since(self.refilled).as_nanos() / REFILL.as_nanos();
        let more = u32::try_from(passed).unwrap_or(u32::MAX);
        if more >= BURST - self.lines {
            self.lines = BURST;
            self.refilled = now;
        } else {
            self.lines += more;
            self.refilled += more * REFILL;
        }
        if self.lines == 0 {
            self.unsaid += 1;
            return None;
        }
        self.lines -= 1;
        Some(std::mem::take(&mut self.unsaid))
    }
}

struct Logger {
    /// Standard error if `None`.
    file: Option<File>,
    /// A line could not be written to the file, which is reported once.
    lost: AtomicBool,
    started: Instant,
    format: Format,
    places: Mutex<BTreeMap<Place, Allowance>>,
}

/// File and line of the code, and the thread's name: a restarted thread, which a guest can cause, inherits what remains
/// of its predecessor's allowance.
type Place = (&'static str, u32, String);

impl Logger {
    /// Decides whether to log a record: returns how many records of its thread and place were suppressed before it, or
    /// `None` to suppress it.
    fn admit(&self, record: &Record, thread: &str) -> Option<u64> {
        // A user who asks for more than informational messages wants all of them.
        let limited = record.level() <= Level::Info;
        let Some((file, line)) = record.file_static().zip(record.line()).filter(|_| limited) else {
            return Some(0);
        };
        // A guest can make as many vCPUs as it likes do the same.
        let thread = match thread.starts_with(VCPU) {
            true => VCPU,
            false => thread,
        };
        let place = (file, line, thread.to_owned());
        let now = Instant::now();
        let mut places = self.places.lock_unpoisoned();
        let allowance = places.entry(place).or_insert_with(|| Allowance::new(now));
        allowance.take(now)
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata) -> bool {
        // A guest can make that crate log a warning for each of its accesses to a physical device.
        metadata.level() == Level::Error || !metadata.target().starts_with("vfio_ioctls")
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let thread = thread::current();
        let thread = thread.name().unwrap_or("?");
        let Some(unsaid) = self.admit(record, thread) else {
            return;
        };
        let mut message = record.args().to_string();
        if unsaid > 0 {
            message.push_str(&format!(" (and {unsaid} others before)"));
        }
        let line = line(
            self.format,
            record.level(),
            thread,
            self.started.elapsed(),
            message,
        );
        // Writes the whole line at once, so that lines of different threads do not mix.
        let Some(file) = &self.file else {
            // A failure cannot be reported anywhere.
            let _ = io::stderr().write_all(line.as_bytes());
            return;
        };
        if let Err(error) = (&*file).write_all(line.as_bytes())
            && !self.lost.swap(true, Ordering::Relaxed)
        {
            base::note!("gantry: lines of the log are lost: {error}");
        }
    }

    fn flush(&self) {}
}

fn line(format: Format, level: Level, thread: &str, elapsed: Duration, message: String) -> String {
    if format == Format::Json {
        let time = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let object = serde_json::json!({
            "time": time.as_secs_f64(),
            "since_start": elapsed.as_secs_f64(),
            "level": level.as_str(),
            "thread": thread,
            "message": message,
        });
        return format!("{}\n", without_orders(&object.to_string()));
    }
    let priority = match (format, level) {
        (Format::Journal, Level::Error) => "<3>",
        (Format::Journal, Level::Warn) => "<4>",
        (Format::Journal, Level::Info) => "<6>",
        (Format::Journal, _) => "<7>",
        _ => "",
    };
    format!(
        "{priority}gantry: {}.{:06}s <{thread}> {level} {}\n",
        elapsed.as_secs(),
        elapsed.subsec_micros(),
        base::note::printable(message)
    )
}

/// JSON whose text gives a terminal no orders, and does not change the order of what it shows: control characters, line
/// separators and marks of direction are escaped. (The text has them in strings only, and those below 0x20 not at all.)
fn without_orders(json: &str) -> String {
    let is_order = |letter: char| {
        letter.is_control()
            || matches!(letter, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut shown = String::with_capacity(json.len());
    for letter in json.chars() {
        match is_order(letter) {
            // All of them are below 0x10000.
            true => shown.push_str(&format!("\\u{:04x}", u32::from(letter))),
            false => shown.push(letter),
        }
    }
    shown
}

/// Reports the error that ends the process on standard error, in the form of the log's lines.
pub fn last_words(format: Format, error: &dyn std::error::Error, started: Instant) {
    if format == Format::Text {
        return base::note::error("gantry", error);
    }
    let message = base::Chain(error).to_string();
    let line = line(format, Level::Error, "main", started.elapsed(), message);
    // A failure cannot be reported anywhere.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Warnings and errors; each `-v` adds a level: information, debugging, traces.
pub fn level(verbosity: u8) -> LevelFilter {
    match verbosity {
        0 => LevelFilter::Warn,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    }
}

/// Starts the process's log. If it is a file, lines are appended to it.
pub fn start(
    file: Option<&Path>,
    format: Format,
    verbosity: u8,
    started: Instant,
) -> Result<(), Error> {
    let open = |path: &Path| {
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.map_err(|source| Error::Open {
            path: path.to_owned(),
            source,
        })
    };
    let file = file.map(open).transpose()?;
    let format = match file {
        None => format.for_standard_error(),
        Some(_) => format,
    };
    log::set_boxed_logger(Box::new(Logger {
        file,
        lost: AtomicBool::new(false),
        started,
        format,
        places: Mutex::default(),
    }))?;
    log::set_max_level(level(verbosity));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_when_who_and_how_bad() {
        let elapsed = Duration::from_micros(1_234_567);
        let of = |format| {
            line(
                format,
                Level::Warn,
                "vcpu0",
                elapsed,
                "disk 3 is full".into(),
            )
        };
        let text = "gantry: 1.234567s <vcpu0> WARN disk 3 is full\n";
        assert_eq!(of(Format::Text), text);
        assert_eq!(of(Format::Journal), format!("<4>{text}"));
    }

    #[test]
    fn a_line_in_json_is_an_object_whatever_a_client_has_sent() {
        let sent =
            "no \"device\"\n{\"level\":\"ERROR\"}\x1b \u{7f}\u{9b}31m\u{2028}\u{202e}\u{2066}";
        let line = line(
            Format::Json,
            Level::Info,
            "api",
            Duration::ZERO,
            sent.into(),
        );
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(
            line.trim_end()
                .chars()
                .all(|letter| matches!(letter, ' '..='~'))
        );
        let object: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            (&object["level"], &object["message"]),
            (&"INFO".into(), &sent.into())
        );
        assert!(object["time"].as_f64().unwrap() > 1e9);
    }

    #[test]
    fn standard_error_is_the_journal_only_if_it_is_the_stream_that_is_named() {
        let file = std::fs::metadata("/proc/self/fd/2").unwrap();
        let (device, inode) = (file.dev(), file.ino());
        assert!(is_journal(Some(&format!("{device}:{inode}"))));
        assert!(!is_journal(Some(&format!("{device}:{}", inode ^ 1))));
        assert!(!is_journal(Some("x")) && !is_journal(None));
    }

    #[test]
    fn a_record_is_one_line_whatever_a_client_has_sent() {
        let sent = "no \x1b[1mdevice\ngantry: 9.9s <vmm> WARN forged";
        let line = line(
            Format::Text,
            Level::Info,
            "api",
            Duration::ZERO,
            sent.into(),
        );
        assert!(!line.contains('\x1b'));
        assert_eq!(line.lines().count(), 1, "{line}");
    }

    fn logger(path: &Path) -> Logger {
        Logger {
            file: Some(File::create(path).unwrap()),
            lost: AtomicBool::new(false),
            started: Instant::now(),
            format: Format::Text,
            places: Mutex::default(),
        }
    }

    #[test]
    fn a_device_that_warns_without_an_end_does_not_silence_others() {
        let dir = tempfile::tempdir().unwrap();
        let logger = logger(&dir.path().join("log"));
        let arguments = format_args!("the queue is unusable");
        let record = Record::builder()
            .file_static(Some("queue.rs"))
            .line(Some(1))
            .args(arguments)
            .build();
        let floods = |thread| while logger.admit(&record, thread).is_some() {};
        floods("_disk0");
        assert_eq!(logger.admit(&record, "_disk1"), Some(0));
        // vCPUs act for any device, and there may be hundreds of them.
        floods("vcpu0");
        assert_ne!(logger.admit(&record, "vcpu1"), Some(0));
        assert_eq!(logger.admit(&record, "_net0"), Some(0));
        assert_eq!(logger.places.lock_unpoisoned().len(), 4);
    }

    #[test]
    fn what_a_guest_causes_at_will_does_not_fill_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let logger = logger(&path);
        let say = |level, line| {
            let mut record = Record::builder();
            record
                .level(level)
                .file_static(Some("queue.rs"))
                .line(Some(line));
            logger.log(&record.args(format_args!("the queue is unusable")).build());
        };
        (0..10 * BURST).for_each(|_| say(Level::Warn, 1));
        let logged = || std::fs::read_to_string(&path).unwrap().lines().count();
        // One or two may have been refilled meanwhile.
        assert!(
            (BURST as usize..2 * BURST as usize).contains(&logged()),
            "{}",
            logged()
        );
        let before = logged();
        say(Level::Error, 2);
        (0..2 * BURST).for_each(|_| say(Level::Debug, 1));
        assert_eq!(logged() - before, 1 + 2 * BURST as usize);
    }

    #[test]
    fn a_line_is_regained_with_time_and_says_how_many_were_lost() {
        let start = Instant::now();
        let mut allowance = Allowance::new(start);
        assert!((0..BURST).all(|_| allowance.take(start) == Some(0)));
        assert!((0..7).all(|_| allowance.take(start).is_none()));
        assert_eq!(allowance.take(start + REFILL), Some(7));
        assert_eq!(allowance.take(start + REFILL), None);
        let later = start + 1000 * REFILL;
        assert_eq!(allowance.take(later), Some(1));
        assert!((1..BURST).all(|_| allowance.take(later) == Some(0)));
        assert_eq!(allowance.take(later), None);
    }

    #[test]
    fn each_v_says_more() {
        let levels: Vec<LevelFilter> = (0..5).map(level).collect();
        assert!(levels.is_sorted());
        assert_eq!(levels[0], LevelFilter::Warn);
        assert_eq!(levels[4], LevelFilter::Trace);
    }
}
