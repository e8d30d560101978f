//! What is tested in L1, one file per topic.

mod accelerator;
mod accelerator_postcopy;
mod boot;
mod clients;
mod cuda;
mod disks;
mod errors;
mod foreign;
pub(crate) mod gf100;
mod hotplug;
mod lifecycle;
mod memory;
pub(crate) mod migration;
mod migration_devices;
mod native_contexts;
mod network;
mod passthrough;
mod passthrough_boards;
mod passthrough_drivers;
mod passthrough_iommu;
mod passthrough_iommufd;
mod passthrough_kinds;
mod passthrough_leave;
mod passthrough_move;
mod passthrough_resets;
mod passthrough_seats;
mod passthrough_state;
mod passthrough_topology;
pub(crate) mod passthrough_tracked;
mod passthrough_unprivileged;
mod passthrough_user;
mod process;
mod services;
mod sharing;
mod small_devices;
mod snapshots;
mod streams;
mod ten_minutes;
mod two_hosts;
pub(crate) mod virtual_gpu;
mod virtual_gpu_starts;
mod virtual_iommu;

use std::path::PathBuf;

use anyhow::Result;

use crate::rig::Board;

/// What a scenario works with.
pub struct Context {
    /// An empty folder of its own, in memory. Its files are the logs of a failure.
    pub dir: PathBuf,
}

/// A scenario.
pub struct Scenario {
    /// What it protects, in the words of the summary.
    pub name: &'static str,
    /// Runs it.
    pub run: fn(&Context) -> Result<()>,
    /// What it needs.
    pub board: Board,
}

/// A table of scenarios that share a board.
fn on(board: Board, entries: &[Entry]) -> impl Iterator<Item = Scenario> {
    let scenario = move |&(name, run): &Entry| Scenario { name, run, board };
    entries.iter().map(scenario)
}

/// All scenarios.
pub fn all() -> Vec<Scenario> {
    [
        boot::SCENARIOS,
        clients::SCENARIOS,
        lifecycle::SCENARIOS,
        disks::SCENARIOS,
        network::SCENARIOS,
        small_devices::SCENARIOS,
        memory::SCENARIOS,
        hotplug::SCENARIOS,
        snapshots::SCENARIOS,
        migration::SCENARIOS,
        migration_devices::SCENARIOS,
        errors::SCENARIOS,
        process::SCENARIOS,
        passthrough::SCENARIOS,
        accelerator::SCENARIOS,
        accelerator_postcopy::SCENARIOS,
        ten_minutes::SCENARIOS,
        cuda::SCENARIOS,
        native_contexts::SCENARIOS,
        services::SCENARIOS,
        foreign::SCENARIOS,
        streams::SCENARIOS,
        sharing::SCENARIOS,
        passthrough_state::SCENARIOS,
        passthrough_user::SCENARIOS,
        passthrough_leave::SCENARIOS,
        passthrough_kinds::SCENARIOS,
        passthrough_drivers::SCENARIOS,
        passthrough_topology::SCENARIOS,
        passthrough_tracked::SCENARIOS,
        passthrough_seats::SCENARIOS,
        passthrough_resets::SCENARIOS,
        passthrough_move::SCENARIOS,
        passthrough_unprivileged::SCENARIOS,
    ]
    .into_iter()
    .flat_map(|entries| on(Board::Intel, entries))
    .chain(passthrough_boards::scenarios())
    .chain(on(Board::Iommufd, passthrough_iommufd::SCENARIOS))
    .chain(on(Board::Iommufd, virtual_iommu::SCENARIOS))
    .chain(on(Board::Iommufd, passthrough_iommu::SCENARIOS))
    .chain(on(Board::Iommufd, snapshots::COPIES))
    .chain(on(Board::Gpu, gf100::SCENARIOS))
    .chain(on(Board::Gpu, virtual_gpu::SCENARIOS))
    .chain(on(Board::Gpu, virtual_gpu_starts::SCENARIOS))
    .chain(on(Board::TwoHosts, two_hosts::SCENARIOS))
    .collect()
}

/// A table entry: name and function.
type Entry = (&'static str, fn(&Context) -> Result<()>);
