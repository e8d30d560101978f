//! Moves of an accelerator's applications, as `gantry ctl` asks for them.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use crate::api::{AccelSeat, VmMoveAccel, model::DRAIN_MS};

/// Applications that are to move.
#[derive(Args, Clone, Debug)]
pub struct MoveAccel {
    /// Name of the accelerator.
    id: String,
    /// Socket of the pool that they move to; the port's own without it. Or who is to serve all of
    /// the guest's applications: its own pool on a device that was passed through to it (local;
    /// see gantry-agent --local), the host's (host), another host's (tls://HOST:PORT), or the
    /// server behind the guest's gate (gate). Or nobody: those of its own pool wait, their state in
    /// the guest's memory, until they are told where to go on (parked). Unless it is local, the
    /// guest does not use the device any more then, which can be removed.
    #[arg(long, value_name = "SOCKET|host|local|parked|tls://HOST:PORT|gate")]
    to: Option<PathBuf>,
    /// Part of the names of the devices that they get there; the port's own without it.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// The slice whose application moves; all of them, and those that come later, without it.
    #[arg(long, value_name = "NUMBER")]
    slice: Option<u32>,
    /// Milliseconds for which each may go on with what its device is at.
    #[arg(long, value_name = "MS", default_value_t = DRAIN_MS)]
    drain: u64,
    /// Go on before all memory has come (postcopy): each application stands still for a shorter time, contents
    /// of large buffers and images follow from the worker that had them, and commands wait for those that they
    /// name. If that worker or its pool is killed before, the application gets an error when it needs what is
    /// lost. The answer comes when all has followed.
    #[arg(long)]
    postcopy: bool,
}

impl MoveAccel {
    /// The request.
    pub(super) fn request(&self) -> VmMoveAccel {
        let text = self.to.as_deref().and_then(Path::to_str);
        let seat = text.and_then(|to| AccelSeat::from_str(to, false).ok());
        let address = text.filter(|to| to.contains("://") || *to == "gate");
        let is_socket = seat.is_none() && address.is_none();
        VmMoveAccel {
            id: self.id.clone(),
            slice: self.slice,
            socket: self.to.clone().filter(|_| is_socket),
            device: self.device.clone(),
            seat,
            address: address.map(str::to_owned),
            drain_ms: self.drain,
            postcopy: self.postcopy,
        }
    }
}
