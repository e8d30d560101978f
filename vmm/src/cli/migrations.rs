//! Migrations, as `gantry ctl` asks for them and shows them.

use std::{io::Write, path::PathBuf, thread};

use clap::Args;

use super::{Client, ClientError, CtlError, ctl::size};
use crate::{
    api::{
        AccelMigration, PassthroughMigration, ReceiveMigration, Rename, SendMigration,
        TimeoutStrategy,
    },
    migration::progress::{LOOK, MigrationInfo, Phase},
};

/// A VM that is to leave.
#[derive(Args, Clone, Debug)]
pub struct SendArgs {
    /// Where that waits: unix:PATH or tcp:HOST:PORT.
    url: String,
    /// To another Gantry of this host, such as a newer one: memory is handed over, not copied.
    /// It has to be shared (--memory shared=on).
    #[arg(long, conflicts_with = "verify")]
    local: bool,
    /// Show what is going on until it is over; the exit status says how it ended.
    #[arg(long)]
    pub(super) watch: bool,
    /// Only ask whether the destination would take the VM.
    #[arg(long)]
    dry_run: bool,
    /// Milliseconds for which the VM may stand still.
    #[arg(long, value_name = "MS", default_value_t = 300)]
    downtime_ms: u64,
    /// Seconds that it may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    timeout_s: u64,
    /// What happens then.
    #[arg(long, value_enum, default_value = "cancel")]
    timeout_strategy: TimeoutStrategy,
    /// Keep the VMM when the VM has left.
    #[arg(long)]
    preserve_source: bool,
    /// Compare a hash of all memory on both sides.
    #[arg(long)]
    verify: bool,
    /// Bytes of memory per second at most, such as 100M, while the VM runs.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    bandwidth: Option<u64>,
    /// How much of their time vCPUs may lose if the guest writes faster than its memory is sent,
    /// in percent; 0: none.
    #[arg(long, value_name = "PERCENT", default_value_t = 99)]
    max_throttle: u8,
    /// Connections that carry memory, 1 to 128.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    connections: u32,
    /// What becomes of accelerators: a VM that has one stays, gives them up first, or takes their
    /// OpenCL applications along.
    #[arg(long, value_enum, default_value = "refuse")]
    accel: AccelMigration,
    /// Copy applications of accelerators to the destination while they go on, so that the VM stands
    /// still for less of them. Needs --accel move, or --passthrough remote or park.
    #[arg(long)]
    accel_copies: bool,
    /// Applications of accelerators go on at the destination before large contents of their memory have come
    /// (postcopy): the VM stands still for less of them. Until all has followed, the source's VMM stays; if it ends
    /// before, an application gets an error when it needs what is lost. Needs --accel move, or --passthrough
    /// remote or park.
    #[arg(long)]
    accel_postcopy: bool,
    /// What becomes of physical devices: a VM that has one stays; or its guest gives them up first,
    /// and applications on those with tracked=ACCEL go on meanwhile (remote), stand still until the VM
    /// has a device again (park), or lose them (detach).
    #[arg(long, value_enum, default_value = "refuse")]
    passthrough: PassthroughMigration,
    /// Directory with certificates and keys, for TLS over TCP.
    #[arg(long, value_name = "DIR")]
    tls_dir: Option<PathBuf>,
    /// Socket of the gantry-tunnel that reads them; /run/gantry-tunnel/socket if absent.
    #[arg(long, value_name = "PATH", requires = "tls_dir")]
    tunnel: Option<PathBuf>,
}

/// A VM that is to come.
#[derive(Args, Clone, Debug)]
pub struct ReceiveArgs {
    /// Where to wait for it: unix:PATH or tcp:ADDRESS:PORT.
    url: String,
    /// A socket, file or tap of the configuration that is called something else here.
    #[arg(long = "rename", value_name = "FROM=TO", value_parser = rename)]
    renames: Vec<Rename>,
    /// Directory with certificates and keys, for TLS over TCP.
    #[arg(long, value_name = "DIR")]
    tls_dir: Option<PathBuf>,
    /// Socket of the gantry-tunnel that reads them; /run/gantry-tunnel/socket if absent.
    #[arg(long, value_name = "PATH", requires = "tls_dir")]
    tunnel: Option<PathBuf>,
}

impl SendArgs {
    /// The request.
    pub(super) fn request(&self) -> SendMigration {
        SendMigration {
            local: self.local,
            preserve_source: self.preserve_source,
            downtime_ms: self.downtime_ms,
            timeout_s: self.timeout_s,
            timeout_strategy: self.timeout_strategy,
            verify: self.verify,
            bandwidth: self.bandwidth,
            max_throttle: self.max_throttle,
            connections: self.connections,
            accel: self.accel,
            accel_copies: self.accel_copies,
            accel_postcopy: self.accel_postcopy,
            passthrough: self.passthrough,
            tls_dir: self.tls_dir.clone(),
            tunnel: self.tunnel.clone(),
            dry_run: self.dry_run,
            ..SendMigration::to(&self.url)
        }
    }
}

impl ReceiveArgs {
    /// The request.
    pub(super) fn request(&self) -> ReceiveMigration {
        ReceiveMigration {
            receiver_url: self.url.clone(),
            renames: (!self.renames.is_empty()).then(|| self.renames.clone()),
            tls_dir: self.tls_dir.clone(),
            tunnel: self.tunnel.clone(),
            ..ReceiveMigration::default()
        }
    }
}

fn rename(text: &str) -> Result<Rename, String> {
    let parts = text.split_once('=').ok_or("write FROM=TO")?;
    Ok(Rename {
        from: parts.0.to_owned(),
        to: parts.1.to_owned(),
    })
}

/// Shows a migration until it is over.
pub(super) fn watch(client: &Client, out: &mut dyn Write) -> Result<(), CtlError> {
    let mut is_followed = false;
    loop {
        let answer = match client.request("GET", "vm.migration", None, &[]) {
            Ok(answer) => answer,
            // One that ends by itself waits until whoever watches has heard how it was.
            Err(error) if is_followed && !matches!(error, ClientError::Refused { .. }) => {
                writeln!(out).map_err(CtlError::Write)?;
                return Err(CtlError::NotFollowed(error));
            }
            Err(error) => return Err(CtlError::Unwatched(error)),
        };
        let info: MigrationInfo = serde_json::from_slice(&answer)?;
        write!(out, "\r{}", bar(&info))
            .and_then(|()| out.flush())
            .map_err(CtlError::Write)?;
        match info.phase {
            Phase::Completed => return writeln!(out).map_err(CtlError::Write),
            Phase::Failed => {
                writeln!(out).map_err(CtlError::Write)?;
                return Err(CtlError::NotMoved(info.error.unwrap_or_default()));
            }
            phase => is_followed = phase == Phase::Postcopy,
        }
        thread::sleep(LOOK);
    }
}

/// One line about a migration.
fn bar(info: &MigrationInfo) -> String {
    const WIDTH: u64 = 30;
    let mib = |bytes: u64| bytes >> 20;
    let done = info.total_bytes.saturating_sub(info.remaining_bytes);
    let full = match info.phase {
        Phase::Completed | Phase::Postcopy => WIDTH,
        // Cannot overflow: memory is far below 2^59 bytes.
        _ => done * WIDTH / info.total_bytes.max(1),
    };
    let bar: String = (0..WIDTH)
        .map(|at| if at < full { '#' } else { '.' })
        .collect();
    let predicted = match (info.downtime_ms, info.predicted_downtime_ms) {
        (Some(stood), _) => format!(", stood still {stood} ms"),
        (None, Some(predicted)) => format!(", would stand still {predicted} ms"),
        (None, None) => String::new(),
    };
    format!(
        "[{bar}] {:?}, round {}, {} MiB sent, {} MiB left, {} MiB/s{predicted}    ",
        info.phase,
        info.rounds,
        mib(info.sent_bytes),
        mib(info
            .remaining_bytes
            .saturating_add(info.accel_remaining_bytes)),
        mib(info.bytes_per_second),
    )
}
