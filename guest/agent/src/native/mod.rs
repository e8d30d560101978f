//! Native contexts: the programs of this guest that use NVIDIA's own libraries, and the worker on the host that makes
//! their calls.
//!
//! ```text
//!   program ─ socket ─> agent ─ rings of the port's slice ─> worker
//! ```
//!
//! A port for native contexts has one slice, for all programs. It is opened when the first program connects, and closed
//! when the last program and the last device file are gone. When the worker ends, all connections and files end with
//! it, and the next program gets a new worker.
//!
//! A slice that is closed gets new memory, and a session's memory is given to others when it ends. So a session is ended
//! when its program's process has ended, not its connection, and a slice that any process still has mapped is neither
//! closed nor opened: not by the next agent either. Programs that connect meanwhile find no device.
//!
//! - `relay`: the thread that waits for programs, files and the port, and sends to the worker.
//! - `programs`: the programs' connections, the device files, and what the worker answers.
//! - `process`: the end of a program's process.
//! - `port_link`: the port's slice and its rings.
//! - `suspension`: programs that the host has suspended; `checkpointer`: the program that does it.
//! - `readiness`: waiting for many descriptors.
//! - `caching`: whether this machine caches the window.

mod caching;
mod checkpointer;
mod port_link;
mod process;
mod programs;
mod readiness;
mod relay;
mod suspension;
#[cfg(test)]
mod tests;

use std::{
    fs, io,
    path::Path,
    thread::{self, JoinHandle},
};

use base::limits::Limit;
use checkpointer::Checkpointer;
use relay::Relay;

use crate::{
    file_error::{FileError, failed},
    port::Port,
};

/// The port for native contexts that is served, in a thread of its own.
pub struct Served {
    /// The port's PCI address.
    pub address: String,
    thread: JoinHandle<()>,
}

impl Served {
    /// Serves programs at the socket `path` through the port, until that is removed. `permit` sets who may connect.
    ///
    /// # Errors
    /// The socket cannot be made, or `permit` has failed.
    pub fn start<E: From<FileError>>(
        path: &Path,
        port: Port,
        permit: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<Self, E> {
        let listen = failed("listen on", path);
        let listener = base::socket::listen_for_packets(path).map_err(listen)?;
        permit(path)?;
        // Each program and each device file is a descriptor.
        let _ = Limit::raise();
        let address = port.address.clone();
        let start = || -> io::Result<JoinHandle<()>> {
            let relay = Relay::new(listener, port, Checkpointer::new(path))?;
            let path = path.to_owned();
            thread::Builder::new().name("native".into()).spawn(move || {
                if let Err(error) = relay.run() {
                    base::note!(
                        "gantry-agent: programs with native contexts are not served: {error}"
                    );
                }
                let _ = fs::remove_file(path);
            })
        };
        let thread = start().map_err(failed("serve at", path))?;
        base::note!(
            "gantry-agent: serving native contexts at {}",
            path.display()
        );
        Ok(Self { address, thread })
    }

    /// Whether the port was removed.
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }
}
