//! `gantry-smi`: see the library.

use std::{io, process::ExitCode};

use clap::{CommandFactory, Parser};
use gantry_smi::{Arguments, Error};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match &arguments.manual {
        Some(manual) => manual
            .write(Arguments::command(), &mut io::stdout())
            .map_err(Error::Output),
        None => arguments.run(&mut io::stdout()),
    };
    let Err(error) = outcome else {
        return ExitCode::SUCCESS;
    };
    base::note::error("gantry-smi", &error);
    ExitCode::from(error.status())
}
