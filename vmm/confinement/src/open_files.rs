//! The process's limit of open files.
//!
//! Each guest socket, API client and queue takes one or more descriptors. The usual soft limit of
//! 1,024 exists for programs that use `select`; Gantry does not, and raises it as far as the hard
//! limit allows.

use std::{error::Error, io};

use base::limits::Limit;

/// Enough for anything that one VM can ask for: 1,023 streams of a socket device, 64 API clients,
/// 129 connections of a migration, about 60 devices with a few queues each, and the files of workers
/// for native contexts (up to 1,300 of a port: two for each range that is shown, and those that are
/// being closed).
const ENOUGH: u64 = 4096;

/// Raises the soft limit of open files to the hard limit and returns it. Logs a warning if that is
/// low. To be called before the process is confined.
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

/// What to tell a user whose request has failed for want of a descriptor.
pub fn advice(causes: &[&(dyn Error + 'static)]) -> Option<&'static str> {
    let is_short = |cause: &&(dyn Error + 'static)| {
        let error = cause.downcast_ref::<io::Error>();
        error.is_some_and(|error| error.raw_os_error() == Some(libc::EMFILE))
    };
    causes.iter().any(is_short).then_some(
        "this VMM has as many files open as it may: raise the hard limit (ulimit -Hn, or LimitNOFILE= of a service)",
    )
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
