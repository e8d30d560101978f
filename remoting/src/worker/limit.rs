//! A limit to the time that a command runs.
//!
//! A kernel that never ends keeps a device from everybody who does not share it by an arbiter. OpenCL
//! has no way to end a kernel alone; the end of its process does. So a thread looks at what the
//! driver has, and ends the worker whose command has been running for longer than it may.

use std::{
    io,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use super::server::{cl, status};
use crate::opencl::api::{Api, Handle};

/// `CL_RUNNING`.
const RUNNING: i32 = 1;
/// Commands are looked at so often within the limit: one that exceeds it has at most so small a part
/// of it more.
const LOOKS: u32 = 8;
/// The shortest time between two looks.
const SHORTEST: Duration = Duration::from_millis(1);

/// The thread that looks at commands; ends with this value.
#[derive(Debug)]
pub(super) struct Limit(mpsc::Sender<Handle>);

impl Limit {
    /// Starts the thread, which calls `exceeded` with the time that a command has run when that is
    /// more than `limit`.
    pub fn start(
        api: Arc<Api>,
        limit: Duration,
        exceeded: impl Fn(Duration) + Send + 'static,
    ) -> io::Result<Self> {
        let (sender, commands) = mpsc::channel();
        thread::Builder::new()
            .name("limit".to_owned())
            .spawn(move || look_after(&api, limit, &commands, exceeded))?;
        Ok(Self(sender))
    }

    /// Has a command looked after, by its event, a reference to which this takes over.
    pub fn order(&self, event: Handle) {
        // The thread ends only with this value.
        let _ = self.0.send(event);
    }
}

/// A command that the driver has, and when it was first seen to run.
struct Command {
    event: Handle,
    since: Option<Instant>,
}

fn look_after(
    api: &Api,
    limit: Duration,
    commands: &mpsc::Receiver<Handle>,
    exceeded: impl Fn(Duration),
) {
    let pause = (limit / LOOKS).max(SHORTEST);
    let mut known: Vec<Command> = Vec::new();
    let fresh = |event| Command { event, since: None };
    loop {
        if known.is_empty() {
            // Sleeps for good while nothing is under way.
            let Ok(event) = commands.recv() else {
                return;
            };
            known.push(fresh(event));
        }
        thread::sleep(pause);
        known.extend(commands.try_iter().map(fresh));
        known.retain_mut(|command| match status(api, command.event) {
            RUNNING => {
                let ran = command.since.get_or_insert_with(Instant::now).elapsed();
                if ran > limit {
                    exceeded(ran);
                }
                true
            }
            // Waits.
            2.. => true,
            _ => {
                cl!(api, clReleaseEvent(command.event));
                false
            }
        });
    }
}
