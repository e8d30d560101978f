//! The alert rules for Prometheus, by its own tool.

use std::{path::Path, process::Command};

use anyhow::Result;
use gantry_tests::rig::packages::{Cache, output};

#[test]
fn promtool_accepts_the_alerts_and_their_tests_pass() -> Result<()> {
    let promtool = Cache::open()?
        .unpacked("prometheus")?
        .join("usr/bin/promtool");
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources/monitoring");
    for (what, file) in [("check", "gantry.rules.yml"), ("test", "gantry.test.yml")] {
        let mut command = Command::new(&promtool);
        output(command.args([what, "rules", file]).current_dir(&files))?;
    }
    Ok(())
}
