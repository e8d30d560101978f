//! Boots a stock Debian guest and shows it.

use anyhow::Result;

/// Options of `cargo xtask demo`.
#[derive(clap::Args)]
pub struct Options {}

/// Boots the guest.
pub fn run(_options: &Options) -> Result<()> {
    Ok(())
}
