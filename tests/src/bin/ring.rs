//! `gantry-ring-bench [FOLDER] [--api opencl|cuda] [--library FILE] [--heap MIB] [--rounds N] [--check]`: prints a
//! table of what a call over the rings costs. FOLDER contains `gantry`, `gantry-accel` and `gantry-ring-guest`; the
//! default is this program's folder. `--library` names the API's driver, `--rounds` is how often everything is
//! measured, taking turns. With `--check` it only checks that a guest's calls cause no exits and no system calls.

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail};
use gantry_tests::ring::{Options, check, programs, run};
use remoting_proto::wire::api::ApiId;

/// Command line options.
#[derive(Default)]
struct Told {
    folder: Option<PathBuf>,
    options: Options,
    only_check: bool,
}

fn told(mut words: impl Iterator<Item = OsString>) -> Result<Told> {
    let mut told = Told::default();
    while let Some(word) = words.next() {
        let name = word.to_string_lossy().into_owned();
        let mut value = || {
            words
                .next()
                .with_context(|| format!("{name} needs a value"))
        };
        let number = |value: OsString| {
            let text = value.to_string_lossy().into_owned();
            text.parse().with_context(|| format!("{name} {text}"))
        };
        match &*name {
            "--check" => told.only_check = true,
            "--api" => {
                let wanted = value()?;
                let api = ApiId::REMOTED
                    .into_iter()
                    .find(|api| *api.name() == *wanted);
                told.options.api =
                    api.with_context(|| format!("{} is no API: opencl or cuda", wanted.display()))?;
            }
            "--library" => told.options.library = Some(value()?.into()),
            "--heap" => told.options.heap = Some(number(value()?)?),
            "--rounds" => told.options.rounds = number(value()?)? as usize,
            _ if name.starts_with('-') => bail!("there is no option {name}"),
            _ => told.folder = Some(word.into()),
        }
    }
    Ok(told)
}

fn work() -> Result<()> {
    let told = told(std::env::args_os().skip(1))?;
    let folder = match told.folder {
        Some(folder) => folder,
        None => {
            let program = std::env::current_exe()?;
            let folder = program.parent().context("this program has no folder")?;
            folder.to_owned()
        }
    };
    let programs = programs(folder)?;
    if told.only_check {
        check(&programs, &told.options)
    } else {
        run(&programs, &told.options)
    }
}

fn main() -> ExitCode {
    match work() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gantry-ring-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
