//! Shows progress: nothing is silent for more than two seconds.

use std::{
    io::{IsTerminal, Write},
    sync::mpsc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Interval at which a long step reports progress if there is no terminal.
const REMIND: Duration = Duration::from_secs(20);

/// A named step, shown until it is dropped.
pub struct Step {
    done: mpsc::Sender<()>,
    display: Option<JoinHandle<()>>,
    name: String,
    start: Instant,
}

impl Step {
    /// Shows a step.
    pub fn new(name: impl Into<String>) -> Self {
        let name = name.into();
        let (done, ended) = mpsc::channel();
        let start = Instant::now();
        let terminal = std::io::stderr().is_terminal();
        if !terminal {
            eprintln!("{name} ...");
        }
        let shown = name.clone();
        let display = std::thread::spawn(move || {
            let every = if terminal {
                Duration::from_millis(100)
            } else {
                REMIND
            };
            for mark in ["|", "/", "-", "\\"].into_iter().cycle() {
                if terminal {
                    eprint!("\r\x1b[K{mark} {shown} ({} s)", start.elapsed().as_secs());
                    // This is only decoration.
                    let _ = std::io::stderr().flush();
                }
                match ended.recv_timeout(every) {
                    Err(mpsc::RecvTimeoutError::Timeout) if !terminal => {
                        eprintln!("{shown}: {} s so far", start.elapsed().as_secs());
                    }
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    _ => break,
                }
            }
            if terminal {
                eprint!("\r\x1b[K");
            }
        });
        Self {
            done,
            display: Some(display),
            name,
            start,
        }
    }

    /// Ends the step and prints how long it took.
    pub fn finish(self) {
        let (name, took) = (self.name.clone(), self.start.elapsed());
        drop(self);
        eprintln!("{name}: done in {:.1} s", took.as_secs_f64());
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        // The display may already have ended.
        let _ = self.done.send(());
        if let Some(display) = self.display.take() {
            let _ = display.join();
        }
    }
}
