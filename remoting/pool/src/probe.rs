//! Whether this machine's driver works in a worker, confined as workers are, and if not, which part of
//! the confinement it does not get along with: one is left out at a time, each in a process of its own.

use std::{
    io::{self, Write},
    path::Path,
    process::{Command, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use remoting_proto::wire::api::ApiId;

use super::{
    compiled,
    confine::{Piece, Pieces},
    drivers,
    folders::Folder,
    options::Options,
    process::{self, Worker},
};

/// How long a driver may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often is looked whether it has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Why nothing was tried.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder.
    #[error("cannot make a folder for what a driver writes: name another by --cache")]
    Folder(#[source] io::Error),
    /// The process.
    #[error("cannot start a process that tries the driver")]
    Start(#[source] io::Error),
    /// The output.
    #[error("cannot write to the standard output")]
    Output(#[source] io::Error),
}

/// Tries the driver in processes of `program` with the argument `tried`, and prints what each step
/// says and what follows: whether a worker as it is by default can use the driver.
///
/// # Errors
/// Nothing was tried, or it cannot be said what came of it.
pub fn run(program: &Path, options: &Options, out: &mut impl Write) -> Result<bool, Error> {
    let mut works = |without: Option<&Pieces>| -> Result<bool, Error> {
        match without {
            None => writeln!(out, "as workers are confined:"),
            Some(without) => writeln!(out, "without {without}:"),
        }
        .map_err(Error::Output)?;
        let status = try_once(program, options, without)?;
        match status {
            Some(status) if status.success() => Ok(()),
            Some(status) => writeln!(out, "  failed ({status})"),
            None => writeln!(out, "  failed: not done after {} s", PATIENCE.as_secs()),
        }
        .map_err(Error::Output)?;
        Ok(status.is_some_and(|status| status.success()))
    };
    if works(options.without.as_ref())? {
        writeln!(out, "the driver works in a worker").map_err(Error::Output)?;
        return Ok(true);
    }
    if options.without.is_some() {
        return Ok(false);
    }
    let mut at_fault = None;
    for piece in Piece::ALL {
        if works(Some(&Pieces::one(piece)))? {
            at_fault = Some(piece);
            break;
        }
    }
    match at_fault {
        Some(piece) => writeln!(
            out,
            "the driver does not get along with a part of the confinement: {}",
            piece.name()
        ),
        None if works(Some(&Pieces::all()))? => writeln!(
            out,
            "the driver does not get along with several parts of the confinement together"
        ),
        None => writeln!(
            out,
            "the driver does not work for this user, confined or not"
        ),
    }
    .map_err(Error::Output)?;
    Ok(false)
}

/// Tries once: how the process has ended, if it has.
fn try_once(
    program: &Path,
    options: &Options,
    without: Option<&Pieces>,
) -> Result<Option<ExitStatus>, Error> {
    let api = options.apis[0];
    let name = format!("gantry-probe-{}", std::process::id());
    let folder = Folder::create(options.cache.join(name)).map_err(Error::Folder)?;
    let mut command = Command::new(program);
    command
        .arg("tried")
        .args(["--api", api.name()])
        .args(["--library", options.library(api)])
        .args(["--heap", &(options.heap() >> 20).to_string()])
        .arg("--cache")
        .arg(&folder.0)
        .envs(compiled::variables(&folder.0))
        .env("TMPDIR", &folder.0)
        .envs(drivers::environment());
    for path in &options.readable {
        command.arg("--readable").arg(path);
    }
    if let Some(without) = without {
        command.arg("--without").arg(without.to_string());
    }
    let mut child = command.spawn().map_err(Error::Start)?;
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if let Some(status) = child.try_wait().map_err(Error::Start)? {
            return Ok(Some(status));
        }
        thread::sleep(LOOK);
    }
    let _ = child.kill();
    let _ = child.wait();
    Ok(None)
}

/// Tries the driver in this process, which is confined first as a worker is. What cannot be said is not: how the
/// process ends says it all the same.
///
/// # Errors
/// It cannot be confined, or the driver does not open.
pub fn tried(options: &Options, out: &mut impl Write) -> Result<bool, process::Error> {
    let mut worker = Worker::confined(options)?;
    worker.send_no_files()?;
    let _ = writeln!(out, "  confinement: done");
    match options.apis[0] {
        ApiId::Nvidia => Err(process::Error::Native),
        ApiId::OpenCl => {
            worker.api()?;
            let _ = writeln!(out, "  driver: open");
            Ok(true)
        }
        ApiId::Cuda => {
            let arena = !options.without().has(Piece::Arena);
            let tell = |step: &str, found: &remoting_cuda::probe::Found| {
                let _ = match found {
                    Ok(found) => writeln!(out, "  {step}: {found}"),
                    Err(why) => writeln!(out, "  {step}: FAILED: {why}"),
                };
            };
            Ok(remoting_cuda::probe::steps(
                options.library(ApiId::Cuda),
                arena,
                tell,
            ))
        }
    }
}
