//! Plans a migration from a request: the offer to the destination, the parameters of the transfer, and what stays here.

use std::{path::PathBuf, time::Duration};

use base::paths::TUNNEL_SOCKET;
use devices::accel::rounds::Copied;
use vmm_api::{AccelMigration, ApiError, MigrationMode, SendMigration, Status, TimeoutStrategy};
use vmm_config::{AccelConfig, AccelVia, VmConfig};
use vmm_machine::{Machine, applications, moving::MovingRegion};
use vmm_memory::data::Pagemap;
use vmm_migration::{
    connection::{Address, STALL},
    gpu_driver::GpuDriver,
    lanes::MOST,
    offer::{HostId, Offer, OfferedRegion},
    source::{FIXED, Wishes},
    tunnel::Tls,
};

use super::{
    super::requests::failed,
    Applications,
    detach::{self, Leaves},
};

/// A migration that is about to start.
pub(super) struct Plan {
    pub(super) offer: Offer,
    pub(super) wishes: Wishes,
    pub(super) pagemap: Option<Pagemap>,
    pub(super) leaves: Leaves,
}

/// Plans a VM's migration, unless something prevents it.
pub(super) fn make(
    config: &VmConfig,
    machine: &Machine,
    is_paused: bool,
    request: &SendMigration,
    host: Option<HostId>,
) -> Result<(Plan, Applications), ApiError> {
    let mut reasons = Vec::new();
    let mut offered_config = Box::new(config.clone());
    let leaves = Leaves::take_from(&mut offered_config, machine, request, &mut reasons);
    if is_paused && !leaves.is_empty() && reasons.is_empty() {
        reasons.push(
            "the VM is paused, so that its guest cannot give devices up: resume it first \
             (vm.resume)"
                .to_owned(),
        );
    }
    let ports = machine.devices().ports();
    let takes_programs = request.accel() == AccelMigration::Move;
    let mut native = ports
        .iter()
        .filter(|(_, port)| takes_programs && port.has_native_programs());
    let native = native.next().map(|(id, _)| id.clone());
    if is_paused && let Some(id) = &native {
        reasons.push(format!(
            "the VM is paused, so that its guest cannot suspend the programs that use native contexts through {id:?}: \
             resume it first (vm.resume)"
        ));
    }
    reasons.extend(reasons_to_stay(&offered_config, machine, request));
    if !reasons.is_empty() {
        let error = vmm_migration::Error::Stays(reasons);
        return Err(ApiError::new(Status::BadRequest, &error));
    }
    let applications = match (request.accel(), ports) {
        (AccelMigration::Move, ports) if !ports.is_empty() => {
            Applications::Go(Copied::new(ports).with_postcopy(request.accel_postcopy))
        }
        _ => Applications::Stay,
    };
    let has_applications = matches!(applications, Applications::Go(_));
    let postcopy = has_applications && request.accel_postcopy;
    // A single connection carries everything.
    let lanes = match request.connections {
        1 => 0,
        count => count,
    };
    let offer = Offer {
        protocol: Offer::needed_version(lanes, has_applications, postcopy),
        lanes,
        state_version: machine.state_version(),
        gantry: env!("CARGO_PKG_VERSION").to_owned(),
        config: offered_config,
        regions: machine.moving_ram().iter().map(offered).collect(),
        verify: request.verify,
        dry_run: request.dry_run,
        paused: is_paused,
        cpu: Some(machine.cpu_needs().map_err(|error| failed(&error))?),
        local: request.local,
        // Set when they are sent.
        files: 0,
        host,
        copies: has_applications && request.accel_copies,
        postcopy,
        gpu_driver: takes_programs.then(|| gpu_driver(machine)).flatten(),
        tap_descriptors: config.unnamed_taps(),
    };
    let plan = Plan {
        offer,
        wishes: wishes(request, machine.last_move().unwrap_or(FIXED)),
        // Landlock may hide it; then every page is examined.
        pagemap: Pagemap::open(),
        leaves: match request.dry_run {
            true => Leaves::default(),
            false => leaves,
        },
    };
    Ok((plan, applications))
}

/// The driver that a machine's ports for native contexts need. Programs may be suspended already, or start later. `None`: there is
/// no such port, or the driver may not be read here, so that the destination cannot compare it.
fn gpu_driver(machine: &Machine) -> Option<GpuDriver> {
    let ports = machine.devices().ports();
    let mut native = ports.iter().filter(|(_, port)| port.is_native()).peekable();
    native.peek()?;
    Some(GpuDriver {
        is_used: native.any(|(_, port)| port.has_native_programs()),
        ..GpuDriver::read().ok()?
    })
}

/// Why a machine, without the devices that leave first, cannot be migrated as requested.
fn reasons_to_stay(config: &VmConfig, machine: &Machine, request: &SendMigration) -> Vec<String> {
    let mut judged = config.clone();
    let mut reasons = Vec::new();
    if let Some(accels) = &mut judged.accels {
        // Applications can leave workers of a pool, but not a process of another VM.
        let of_pool = accels.extract_if(.., |accel| matches!(accel.via, AccelVia::Ring(_)));
        let stays = |accel: AccelConfig| {
            let id = accel.common.id.unwrap_or_default();
            format!(
                "accelerator {id:?} cannot move: take its applications along (accel=Move, gantry ctl \
                 send-migration --accel move), have the guest give it up first (accel=Detach, --accel \
                 detach), or remove it (vm.remove-device)"
            )
        };
        match request.accel() {
            AccelMigration::Refuse => reasons.extend(of_pool.map(stays)),
            AccelMigration::Move | AccelMigration::Detach => of_pool.for_each(drop),
        }
    }
    reasons.extend(machine.reasons_to_stay(&judged));
    match request.local {
        true => reasons.extend(machine.reasons_not_to_share()),
        false => {
            let unnamed = judged.unnamed_taps().into_iter();
            reasons.extend(unnamed.map(|id| {
                format!(
                    "network card {id:?} has a tap that came as a descriptor, which another process cannot open: remove the \
                     card first (vm.remove-device), or migrate within this host (local)"
                )
            }));
        }
    }
    reasons
}

/// Converts a region for the offer.
pub(super) fn offered(region: &MovingRegion) -> OfferedRegion {
    OfferedRegion {
        guest: region.guest,
        len: region.mapping.size() as u64,
        hotplugged: region.hotplugged,
    }
}

/// The parameters of a migration; `fixed` is the known downtime apart from memory.
fn wishes(request: &SendMigration, fixed: Duration) -> Wishes {
    Wishes {
        downtime: Duration::from_millis(request.downtime_ms),
        timeout: Duration::from_secs(request.timeout_s),
        ignore_timeout: request.timeout_strategy == TimeoutStrategy::Ignore,
        stall: Duration::from_secs(request.stall_s),
        take_up: applications::LONG + STALL,
        bandwidth: request.bandwidth,
        max_throttle: request.max_throttle,
        fixed,
        to: (
            request.destination_url.clone(),
            tls(request.tls_dir.as_ref(), request.tunnel.as_ref()),
        ),
    }
}

/// Rejects parameters that are invalid or not supported.
pub(super) fn check(request: &SendMigration) -> Result<(), ApiError> {
    let bad = |message: String| Err(ApiError::message(Status::BadRequest, message));
    detach::check(request)?;
    if let Err(error) = Address::parse(&request.destination_url) {
        return Err(ApiError::new(Status::BadRequest, &error));
    }
    if request.local && !request.destination_url.starts_with("unix:") {
        return bad("local=on needs a destination at unix:PATH, on this host".into());
    }
    if request.local && request.verify {
        return bad("with local=on memory is not copied: there is nothing to verify".into());
    }
    if !(1..=MOST).contains(&request.connections) {
        return bad(format!("connections are 1 to {MOST}"));
    }
    if request.local && request.connections != 1 {
        return bad("with local=on memory is not copied: one connection is enough".into());
    }
    if request.tls_dir.is_some() && !request.destination_url.starts_with("tcp:") {
        return bad("tls_dir is for tcp:HOST:PORT".into());
    }
    if request.memory_mode != MigrationMode::Precopy {
        return bad("memory_mode=Postcopy is not supported: use Precopy".into());
    }
    for (wish, name) in [
        (request.accel_copies, "accel_copies"),
        (request.accel_postcopy, "accel_postcopy"),
    ] {
        if wish && request.accel() != AccelMigration::Move {
            return bad(format!(
                "{name}=true needs accel=Move, or passthrough=Remote or Park (gantry ctl: --accel move, or \
                 --passthrough remote or park): nothing else takes applications along"
            ));
        }
    }
    if request.bandwidth == Some(0) || request.max_throttle > 99 {
        return bad("bandwidth is at least 1, and max_throttle at most 99".into());
    }
    if request.downtime_ms == 0 || request.timeout_s == 0 || request.stall_s == 0 {
        return bad("downtime_ms, timeout_s and stall_s are at least 1".into());
    }
    Ok(())
}

/// The TLS settings of a migration, if it is encrypted.
pub(super) fn tls(dir: Option<&PathBuf>, tunnel: Option<&PathBuf>) -> Option<Tls> {
    Some(Tls {
        dir: dir?.clone(),
        tunnel: tunnel.cloned().unwrap_or_else(|| TUNNEL_SOCKET.into()),
    })
}
