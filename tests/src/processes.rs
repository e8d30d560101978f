//! Processes of this machine.

use std::fs;

use anyhow::{Context, Result};

/// Process IDs of the children of all of a process's threads, ascending.
///
/// # Errors
/// The process has ended.
pub fn children(id: u32) -> Result<Vec<u32>> {
    let mut all = Vec::new();
    let threads = fs::read_dir(format!("/proc/{id}/task"))
        .with_context(|| format!("process {id} has ended"))?;
    for thread in threads {
        // A thread may end meanwhile.
        let children = fs::read_to_string(thread?.path().join("children")).unwrap_or_default();
        all.extend(
            children
                .split_whitespace()
                .filter_map(|child| child.parse::<u32>().ok()),
        );
    }
    all.sort_unstable();
    Ok(all)
}
