//! The `gantry` binary: reads the command line and starts what it asks for.

use std::{
    error::Error as StdError,
    fs::File,
    io::{self, Write},
    os::fd::{FromRawFd, RawFd},
    process::ExitCode,
    time::Instant,
};

use vmm::{
    api::{self, ListenError, Listener, Server},
    cli::{
        Cli, Command, CtlError, Deferred, EventTarget, Places, TopError, VmArgsError, command,
        help_all, help_of, write_manual,
    },
    control::{self, ExitReason, Start, StartOptions},
    doctor::{Finding, Host, Verdict},
    events::{self, EventMonitor},
    logging, open_files,
    seccomp::{self, Filters, Spawner},
};

/// The command line is wrong.
const USAGE: u8 = 2;

/// The guest was lost.
const LOST: u8 = 3;

/// Gantry cannot do what it is asked for.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Ctl(#[from] CtlError),
    #[error(transparent)]
    Top(#[from] TopError),
    #[error(transparent)]
    Vm(#[from] VmArgsError),
    #[error(transparent)]
    Log(#[from] logging::Error),
    #[error(transparent)]
    Events(#[from] events::OpenError),
    #[error("descriptor {fd} for events cannot be used")]
    EventFd { fd: RawFd, source: io::Error },
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Seccomp(#[from] seccomp::Error),
    #[error("cannot serve the API")]
    Api(#[source] io::Error),
    #[error("cannot prepare for signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Control(#[from] control::Error),
    #[error("there is no command '{0}'; gantry help lists all of them")]
    NoCommand(String),
    #[error("cannot write what was asked for")]
    Output(#[source] io::Error),
}

/// Gives malloc two arenas. Without a limit it makes one for each thread that finds others busy,
/// which costs memory, and reads the number of processors from a file, which a confined thread
/// must not.
fn limit_arenas() {
    // SAFETY: sets a number, before other threads exist.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 2) };
    // Before an arena other than the first shrinks, malloc opens a file of /proc, for which threads
    // are killed by their filters. So large pieces have mappings of their own, and arenas stay.
    // SAFETY: as above.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

fn main() -> ExitCode {
    let started = Instant::now();
    limit_arenas();
    let cli = Cli::from_process();
    if cli.asks_for_all_help() {
        // Whoever reads it has seen enough of it, if this fails.
        let _ = io::stdout().write_all(help_all().as_bytes());
        return ExitCode::SUCCESS;
    }
    if cli.is_idle() {
        eprintln!("gantry: nothing to do; describe a VM (--kernel ...) or wait for requests");
        eprintln!("  (--api-socket PATH); gantry --help has examples");
        return ExitCode::from(USAGE);
    }
    match run(cli, started) {
        Ok(code) => code,
        Err(error) => {
            complain(&error);
            match error {
                Error::Vm(_) => ExitCode::from(USAGE),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Prints an error and its causes, outermost first.
fn complain(error: &dyn StdError) {
    let mut text = String::from("gantry: ");
    text.push_str(&base::Chain(error).texts().join("\n  because: "));
    text.push('\n');
    // If standard error is closed, the exit status has to do.
    let _ = io::stderr().write_all(text.as_bytes());
}

fn run(cli: Cli, started: Instant) -> Result<ExitCode, Error> {
    match cli.command {
        Some(Command::Ctl(Deferred(ctl))) => {
            ctl.run(&mut io::stdout().lock())?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(Command::Doctor) => {
            let findings = Host::this().examine();
            let lines = findings.iter().map(|finding| format!("{finding}\n"));
            let text: String = lines.collect();
            io::stdout()
                .write_all(text.as_bytes())
                .map_err(Error::Output)?;
            let missing = |finding: &Finding| finding.verdict == Verdict::Missing;
            return Ok(match findings.iter().any(missing) {
                true => ExitCode::FAILURE,
                false => ExitCode::SUCCESS,
            });
        }
        Some(Command::Top(Deferred(top))) => return Err(top.exec().into()),
        Some(Command::Values(values)) => {
            let lines = values.list(&Places::default()).into_iter();
            let text: String = lines.map(|value| value + "\n").collect();
            io::stdout()
                .write_all(text.as_bytes())
                .map_err(Error::Output)?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(Command::Version) => {
            let name = std::env::args_os().next().unwrap_or_default();
            let text = command(&name).render_version();
            io::stdout()
                .write_all(text.as_bytes())
                .map_err(Error::Output)?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(Command::Help { command }) => {
            let text = help_of(command.iter().map(String::as_str)).map_err(Error::NoCommand)?;
            io::stdout()
                .write_all(text.as_bytes())
                .map_err(Error::Output)?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(Command::Manual(manual)) => {
            write_manual(&manual, &mut io::stdout()).map_err(Error::Output)?;
            return Ok(ExitCode::SUCCESS);
        }
        None => {}
    }
    control::block_signals().map_err(Error::Signals)?;
    logging::start(cli.log_file.as_deref(), cli.verbosity, started)?;
    if let Err(error) = open_files::raise_limit() {
        log::warn!("the limit of open files stays as it is: {error}");
    }
    let monitor = match &cli.event_monitor {
        None => EventMonitor::disabled(started),
        Some(EventTarget::Path(path)) => EventMonitor::open(path, started)?,
        Some(EventTarget::Fd(fd)) => EventMonitor::to_file(event_file(*fd)?, started),
    };
    let config = cli.vm.into_config(cli.restore.is_some())?;
    let start = match (config, cli.restore) {
        (Some(config), _) => Start::Boot(config),
        (None, Some(restore)) => Start::Restore(restore),
        (None, None) => Start::Wait,
    };
    let filters = Filters::new(cli.seccomp);
    let (sender, receiver) = api::channel().map_err(Error::Api)?;
    let listener = cli.api_socket.as_ref().map(Listener::open).transpose()?;
    // Once: threads that are started from now on inherit it.
    filters.confine()?;
    let server = match listener {
        None => None,
        Some(listener) => {
            let spawner = Spawner::new(filters.clone()).map_err(Error::Api)?;
            Some(Server::start(listener, sender, &spawner).map_err(Error::Api)?)
        }
    };
    let options = StartOptions {
        start,
        filters,
        started,
    };
    let result = control::run(options, receiver, monitor);
    // Also after an error: responses leave, and the socket's file goes.
    if let Some(server) = server {
        server.stop();
    }
    Ok(match result? {
        ExitReason::GuestFailed => ExitCode::from(LOST),
        ExitReason::GuestShutdown | ExitReason::Request | ExitReason::Signal => ExitCode::SUCCESS,
    })
}

/// An inherited descriptor for events. Writing to it must not block.
fn event_file(fd: RawFd) -> Result<File, Error> {
    // SAFETY: asks for and sets flags of whatever the number stands for; failures are checked.
    let result = unsafe {
        match libc::fcntl(fd, libc::F_GETFL) {
            -1 => -1,
            flags => libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK),
        }
    };
    if result < 0 {
        let source = io::Error::last_os_error();
        return Err(Error::EventFd { fd, source });
    }
    // SAFETY: the descriptor is open, and whoever started this process gave it away for events.
    Ok(unsafe { File::from_raw_fd(fd) })
}
