//! Two ports for debugging a guest before its drivers are running.

use std::{
    io::Write,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Instant,
};

use base::Unpoisoned;
use device_model::bus::BusDevice;

/// Maximum number of codes that are logged. Some kernels write to port 0x80 endlessly, as a delay.
const LOGGED_CODES: u32 = 256;

/// Value that reads return from the console port, as in Bochs; guests use it to detect the port.
const CONSOLE_PRESENT: u8 = 0xe9;

/// The POST code port (0x80): logs each code with the time since the VM started.
#[derive(Debug)]
pub struct DebugPort {
    start: Instant,
    codes: AtomicU32,
}

impl DebugPort {
    /// Creates a port that measures time from `start`.
    pub fn new(start: Instant) -> Self {
        Self {
            start,
            codes: AtomicU32::new(0),
        }
    }

    /// Number of codes that the guest has written; saturates at the maximum.
    pub fn codes(&self) -> u32 {
        self.codes.load(Ordering::Relaxed)
    }
}

/// The stage that writes a code, by the convention of Cloud Hypervisor's test kernels and firmware.
fn stage(code: u8) -> &'static str {
    match code {
        0x00..=0x1f => "firmware",
        0x20..=0x3f => "boot loader",
        0x40..=0x5f => "kernel",
        0x60..=0x7f => "user space",
        0x80..=0xff => "custom",
    }
}

impl BusDevice for DebugPort {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let (0, Some(&code)) = (offset, data.first()) else {
            return;
        };
        let seen = self
            .codes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_add(1))
            .unwrap_or(u32::MAX);
        if seen < LOGGED_CODES {
            let elapsed = self.start.elapsed();
            log::info!(
                "debug port: {} code {code:#04x} after {}.{:06} s",
                stage(code),
                elapsed.as_secs(),
                elapsed.subsec_micros()
            );
        } else if seen == LOGGED_CODES {
            log::info!("debug port: further codes are not logged");
        }
    }
}

/// The debug console (port 0xe9): every byte written is passed to the output unchanged.
pub struct DebugConsole {
    out: Mutex<Box<dyn Write + Send>>,
}

impl DebugConsole {
    /// Creates a console that writes to `out`, which must not block.
    pub fn new(out: Box<dyn Write + Send>) -> Self {
        Self {
            out: Mutex::new(out),
        }
    }
}

impl BusDevice for DebugConsole {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(CONSOLE_PRESENT);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        let mut out = self.out.lock_unpoisoned();
        if let Err(error) = out.write_all(data).and_then(|()| out.flush()) {
            log::debug!("debug console: {} bytes lost: {error}", data.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(data);
            Ok(data.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_debug_console_is_detectable_and_passes_bytes_on() {
        let sink = Sink::default();
        let console = DebugConsole::new(Box::new(sink.clone()));
        let mut data = [0; 1];
        console.read(0, &mut data);
        assert_eq!(data, [0xe9]);
        console.write(0, b"a");
        console.write(0, b"bc");
        assert_eq!(*sink.0.lock().unwrap(), b"abc");
    }

    #[test]
    fn the_debug_port_counts_codes_and_ignores_what_is_none() {
        let port = DebugPort::new(Instant::now());
        for _ in 0..=LOGGED_CODES {
            port.write(0, &[0x41]);
        }
        port.write(1, &[0x41]);
        port.write(0, &[]);
        assert_eq!(port.codes(), LOGGED_CODES + 1);
    }
}
