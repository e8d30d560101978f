//! `gantry-nvidia --vm SOCKET` on a stand-in for the driver, with the pages of this machine's `/dev/nvidia0`, which
//! has no calls: `nvidia_stand_in SOCKET [ARBITER]`.

use std::{env, path::PathBuf, process::ExitCode};

use base::{limits::Limit, note};
use gantry_nvidia::{machine, pool, server::Worker, sharing::introducer, stand_in::StandIn};

fn main() -> ExitCode {
    let Some(path) = env::args_os().nth(1).map(PathBuf::from) else {
        note!("nvidia_stand_in: name the socket to listen on");
        return ExitCode::FAILURE;
    };
    if let Err(error) = Limit::raise() {
        note::error("nvidia_stand_in", &error);
    }
    let arbiter = env::args_os().nth(2).map(PathBuf::from);
    let error = pool::serve(&path, |connection| {
        let control = match arbiter.as_deref().map(introducer).transpose() {
            Ok(control) => control,
            Err(error) => return note::error("nvidia_stand_in", &error),
        };
        let served = machine::serve(&connection, |machine, limit, account| {
            let device = Box::new(StandIn::with_pages());
            Worker::of_machine(device, machine, limit, account, control)
        });
        if let Err(error) = served {
            note::error("nvidia_stand_in", &error);
        }
    });
    note::error("nvidia_stand_in", &error);
    ExitCode::FAILURE
}
