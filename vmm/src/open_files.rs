//! How many files the process may have open.
//!
//! Sockets to the guest, API clients and queues take a descriptor or several each. The usual soft
//! limit of 1,024 exists for programs that use `select`; Gantry does not, and takes what the hard
//! limit allows.

use std::io;

use base::limits::Limit;

/// What suffices for whatever one VM can ask for: 1,023 streams of a socket device, 64 API
/// clients, 129 connections of a migration, and some 60 devices with a few queues each.
const ENOUGH: u64 = 4096;

/// Raises the soft limit of open files up to the hard one and returns it. Says in the log if that
/// is little. Before the process is confined.
pub fn raise_limit() -> io::Result<u64> {
    let limit = Limit::raise()?.hard;
    if let Some(warning) = shortage(limit) {
        log::warn!("{warning}");
    }
    Ok(limit)
}

fn shortage(limit: u64) -> Option<String> {
    (limit < ENOUGH).then(|| {
        format!(
            "this process may open {limit} files only: a VM with many devices or sockets may need \
             {ENOUGH}; raise the hard limit (ulimit -Hn, or LimitNOFILE= of a service)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_rises_to_the_hard_one() {
        let raised = raise_limit().unwrap();
        let limit = Limit::now().unwrap();
        assert_eq!((limit.soft, limit.hard), (raised, raised));
    }

    #[test]
    fn a_limit_that_is_too_low_is_named_with_its_cure() {
        assert_eq!(shortage(ENOUGH), None);
        let warning = shortage(1024).unwrap();
        assert!(warning.contains("1024 files"), "{warning}");
        assert!(warning.contains("LimitNOFILE"), "{warning}");
    }
}
