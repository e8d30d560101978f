//! Scenarios with stock software that is built from source: minutes the first time, so only before a release.
//!
//! - [`firmware`]: a stock image boots by stock firmware.
//! - [`record`]: what a scenario has seen, kept in `measurements/`, and whether it still holds.

pub mod firmware;
mod host;
pub mod record;
mod vhost_user;

use anyhow::Result;
use record::Record;

/// A scenario.
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// Where its record is, relative to the root.
    record: &'static str,
    /// The files and folders that it depends on most, relative to the root.
    of: &'static [&'static str],
    run: fn(&mut Record) -> Result<()>,
}

/// All of them.
pub const ALL: &[Scenario] = &[
    Scenario {
        name: "firmware: a stock image boots by stock firmware, reboots, and is saved and restored",
        record: "measurements/product-firmware.txt",
        of: &[
            "arch/src/boot",
            "arch/src/layout",
            "devices/legacy/src",
            "devices/pci/src",
            "tests/product/src/firmware",
        ],
        run: firmware::stock_image,
    },
    Scenario {
        name: "vhost-user: stock back ends serve a stock guest, are killed, and come back",
        record: "measurements/product-vhost-user.txt",
        of: &["devices/vhost-user/src", "tests/product/src/vhost_user.rs"],
        run: vhost_user::stock_back_ends,
    },
];

impl Scenario {
    /// Runs it, and writes its record.
    ///
    /// # Errors
    /// It fails, or its record cannot be written.
    pub fn run(&self) -> Result<()> {
        let mut record = Record::new();
        (self.run)(&mut record)?;
        record.write(self.name, self.record, self.of)
    }

    /// Why its record does not hold any more.
    ///
    /// # Errors
    /// `git` cannot be run.
    pub fn outdated(&self) -> Result<Option<String>> {
        record::outdated(self.record, self.of)
    }
}
