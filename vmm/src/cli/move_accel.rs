//! The `gantry ctl` command that moves an accelerator's applications.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use vmm_api::{AccelSeat, VmMoveAccel};
use vmm_config::DRAIN_MS;

/// Arguments for moving applications.
#[derive(Args, Clone, Debug)]
pub struct MoveAccel {
    /// Name of the accelerator.
    id: String,
    /// Socket of the destination pool; the port's own if absent. Or the side that is to serve all of the guest's
    /// applications: its own pool on a device that is passed through to it (local; see gantry-agent --local), the
    /// host's (host), another host's (tls://HOST:PORT), or the server behind the guest's gate (gate). Or neither:
    /// applications of the guest's own pool are suspended, with their state in the guest's memory, until they are told
    /// where to continue (parked). Unless it is local, the guest then no longer uses the device, which can be removed.
    /// Programs with native contexts are suspended (parked) and resumed (host).
    #[arg(long, value_name = "SOCKET|host|local|parked|tls://HOST:PORT|gate")]
    to: Option<PathBuf>,
    /// The devices to use there, as for --accel device=; the port's own if absent.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// The slice whose application is moved; if absent, all applications, including later ones.
    #[arg(long, value_name = "NUMBER")]
    slice: Option<u32>,
    /// How long each application's outstanding device work may take, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = DRAIN_MS)]
    drain: u64,
    /// Continue before all memory has been transferred (postcopy): this shortens the pause of each application.
    /// Contents of large buffers and images follow from the previous worker, and commands wait for those that they use.
    /// If that worker or its pool is killed earlier, the application gets an error when it needs lost contents. The
    /// command returns when everything has followed.
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
