//! The migration commands of `gantry ctl`, and the display of their progress.

use std::{io::Write, path::PathBuf, thread};

use clap::Args;
use vmm_api::{
    AccelMigration, PassthroughMigration, ReceiveMigration, Rename, SendMigration, TimeoutStrategy,
};
use vmm_migration::progress::{LOOK, MigrationInfo, Phase};

use super::{Client, ClientError, CtlError, size, vm::Confinement};

/// Arguments for sending a VM.
#[derive(Args, Clone, Debug)]
pub struct SendArgs {
    /// Where the destination waits: unix:PATH or tcp:HOST:PORT.
    url: String,
    /// Migrate to another Gantry on this host, such as a newer version: memory is handed over, not copied. It must be
    /// shared (--memory shared=on).
    #[arg(long, conflicts_with = "verify")]
    local: bool,
    /// Show the progress until the migration is over; the exit status tells how it ended.
    #[arg(long)]
    pub(super) watch: bool,
    /// Only ask whether the destination would accept the VM.
    #[arg(long)]
    dry_run: bool,
    /// Maximum downtime of the VM in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 300)]
    downtime_ms: u64,
    /// Maximum duration of the migration in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    timeout_s: u64,
    /// What happens when that is exceeded.
    #[arg(long, value_enum, default_value = "cancel")]
    timeout_strategy: TimeoutStrategy,
    /// Keep the VMM running after the VM has left.
    #[arg(long)]
    preserve_source: bool,
    /// Compare a hash of all memory on both sides.
    #[arg(long)]
    verify: bool,
    /// Maximum bandwidth for memory while the VM runs, in bytes per second, such as 100M.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    bandwidth: Option<u64>,
    /// Maximum throttling of the vCPUs if the guest writes its memory faster than it can be sent, in percent of their
    /// time; 0 disables throttling.
    #[arg(long, value_name = "PERCENT", default_value_t = 99)]
    max_throttle: u8,
    /// Number of connections for memory, 1 to 128.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    connections: u32,
    /// What happens to accelerators: a VM that has one is not migrated, gives them up first, or takes their OpenCL
    /// applications along.
    #[arg(long, value_enum, default_value = "refuse")]
    accel: AccelMigration,
    /// Copy applications of accelerators to the destination while they run, to reduce the downtime. Needs --accel move,
    /// or --passthrough remote or park.
    #[arg(long)]
    accel_copies: bool,
    /// Let applications of accelerators continue at the destination before large contents of their memory have been
    /// transferred (postcopy), to reduce the downtime. The source's VMM stays until everything has followed; if it ends
    /// earlier, an application gets an error when it needs lost contents. Needs --accel move, or --passthrough remote
    /// or park.
    #[arg(long)]
    accel_postcopy: bool,
    /// What happens to physical devices: a VM that has one is not migrated; or its guest gives them up first, and
    /// applications on those with tracked=ACCEL continue on the host's pool meanwhile (remote), are suspended until the
    /// VM has a device again (park), or lose the device (detach).
    #[arg(long, value_enum, default_value = "refuse")]
    passthrough: PassthroughMigration,
    /// Directory with certificates and keys, for TLS over TCP.
    #[arg(long, value_name = "DIR")]
    tls_dir: Option<PathBuf>,
    /// Socket of the gantry-tunnel that reads them; /run/gantry-tunnel/socket if absent.
    #[arg(long, value_name = "PATH", requires = "tls_dir")]
    tunnel: Option<PathBuf>,
}

/// Arguments for receiving a VM.
#[derive(Args, Clone, Debug)]
pub struct ReceiveArgs {
    /// Where to wait for it: unix:PATH or tcp:ADDRESS:PORT.
    url: String,
    /// A socket, file or tap in the configuration that has another name on this host.
    #[arg(long = "rename", value_name = "FROM=TO", value_parser = rename)]
    renames: Vec<Rename>,
    /// Directory with certificates and keys, for TLS over TCP.
    #[arg(long, value_name = "DIR")]
    tls_dir: Option<PathBuf>,
    /// Socket of the gantry-tunnel that reads them; /run/gantry-tunnel/socket if absent.
    #[arg(long, value_name = "PATH", requires = "tls_dir")]
    tunnel: Option<PathBuf>,
    /// Listen at an address that other hosts can reach, without TLS: whoever connects first sends the VM. It uses only
    /// what --paths and --rename name.
    #[arg(long, conflicts_with = "tls_dir")]
    insecure: bool,
    /// Files, directories and taps of this host that the VM may use; the VMM has access to nothing else from now on.
    /// Without it: any, except at a TCP port without TLS.
    #[arg(long, value_name = "PATH", value_delimiter = ',')]
    paths: Option<Vec<PathBuf>>,
    #[command(flatten)]
    confinement: Confinement,
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
            insecure: self.insecure,
            paths: self.paths.clone(),
            landlock_enable: self.confinement.landlock,
            landlock_rules: self.confinement.rules(),
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

/// Shows the progress of a migration until it is over.
pub(super) fn watch(client: &Client, out: &mut dyn Write) -> Result<(), CtlError> {
    let mut is_followed = false;
    loop {
        let answer = match client.request("GET", "vm.migration", None, &[]) {
            Ok(answer) => answer,
            // A VMM that exits by itself waits until the watching client has seen the result.
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

/// Formats the progress of a migration as one line.
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
