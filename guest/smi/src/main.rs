//! `gantry-smi`: see the library.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::process::ExitCode;

use base::Output;
use clap::{CommandFactory, Parser};
use gantry_smi::{Arguments, Error};

fn main() -> ExitCode {
    base::limits::file_size_is_an_error();
    let arguments = Arguments::parse();
    let outcome = match &arguments.manual {
        Some(manual) => manual
            .write(Arguments::command(), &mut Output::standard())
            .map_err(Error::Output),
        None => arguments.run(&mut Output::standard()),
    };
    let Err(error) = outcome else {
        return ExitCode::SUCCESS;
    };
    base::note::error("gantry-smi", &error);
    ExitCode::from(error.status())
}
