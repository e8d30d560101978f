//! The `gantry` binary: parses the command line and runs what it asks for.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{FromRawFd, RawFd},
    process::ExitCode,
    time::Instant,
};

use base::{Chain, Output, limits::file_size_is_an_error};
use vmm::cli::{
    Cli, Command, CtlError, Deferred, EventTarget, FindError, Places, TopError, VmArgsError,
    command, help_all, help_of, write_manual,
};
use vmm::doctor::{Finding, Host, Verdict};
use vmm::logging;
use vmm_api::{ListenError, Listener, Server};
use vmm_confinement::{
    open_files,
    seccomp::{self, Filters, Spawner},
};
use vmm_control::{
    ExitReason, Start, StartOptions,
    events::{self, EventMonitor},
};
use vmm_machine::EXIT_GUEST_LOST;

/// Exit status: the command line is invalid.
const USAGE: u8 = 2;

/// Exit status: it is unclear which VMM a request is for, and none has received it.
const AMBIGUOUS: u8 = 4;

/// Gantry cannot do what was requested.
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
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    #[error("cannot prepare for signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Control(#[from] vmm_control::Error),
    #[error("there is no command '{0}'; gantry help lists all of them")]
    NoCommand(String),
    #[error("cannot write what was asked for")]
    Output(#[source] io::Error),
}

/// Limits malloc to two arenas. Without a limit it creates one for each thread that finds the
/// others busy, which costs memory, and it reads the number of processors from a file, which a
/// confined thread must not do.
fn limit_arenas() {
    // SAFETY: sets a parameter before other threads exist.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 2) };
    // Before malloc shrinks an arena other than the first, it opens a file in /proc, and the
    // seccomp filters would kill the thread for that. So large allocations get mappings of their
    // own, and arenas never shrink.
    // SAFETY: as above.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

fn main() -> ExitCode {
    let started = Instant::now();
    limit_arenas();
    file_size_is_an_error();
    let cli = Cli::from_process();
    let format = cli.log_format.for_standard_error();
    if cli.asks_for_all_help() {
        let printed = print(&help_all());
        return ended(printed.map(|()| ExitCode::SUCCESS), format, started);
    }
    if cli.is_idle() {
        base::note!("gantry: nothing to do; describe a VM (--kernel ...) or wait for requests");
        base::note!("  (--api-socket PATH); gantry --help has examples");
        return ExitCode::from(USAGE);
    }
    ended(run(cli, started), format, started)
}

/// Reports an error, if any, in this form, and returns the exit status of the process.
fn ended(outcome: Result<ExitCode, Error>, format: logging::Format, started: Instant) -> ExitCode {
    match outcome {
        Ok(code) => code,
        Err(error) => {
            logging::last_words(format, &error, started);
            match error {
                Error::Vm(_) => ExitCode::from(USAGE),
                Error::Ctl(CtlError::Find(FindError::Several(_))) => ExitCode::from(AMBIGUOUS),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn print(text: &str) -> Result<(), Error> {
    Output::standard()
        .write_all(text.as_bytes())
        .map_err(Error::Output)
}

/// Runs a subcommand.
fn answer(asked: Command) -> Result<ExitCode, Error> {
    match asked {
        Command::Ctl(Deferred(ctl)) => ctl.run(&mut io::stdout().lock())?,
        Command::Doctor => {
            let findings = Host::this().examine();
            let lines = findings.iter().map(|finding| format!("{finding}\n"));
            print(&lines.collect::<String>())?;
            let missing = |finding: &Finding| finding.verdict == Verdict::Missing;
            if findings.iter().any(missing) {
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Top(Deferred(top)) => return Err(top.exec().into()),
        Command::Values(values) => {
            let lines = values.list(&Places::default()).into_iter();
            print(&lines.map(|value| value + "\n").collect::<String>())?;
        }
        Command::Version => {
            let name = std::env::args_os().next().unwrap_or_default();
            print(&command(&name).render_version())?;
        }
        Command::Help { command } => {
            let text = help_of(command.iter().map(String::as_str)).map_err(Error::NoCommand)?;
            print(&text)?;
        }
        Command::Manual(manual) => {
            write_manual(&manual, &mut Output::standard()).map_err(Error::Output)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn run(cli: Cli, started: Instant) -> Result<ExitCode, Error> {
    if let Some(command) = cli.command {
        return answer(command);
    }
    vmm_control::block_signals().map_err(Error::Signals)?;
    logging::start(
        cli.log_file.as_deref(),
        cli.log_format,
        cli.verbosity,
        started,
    )?;
    if let Err(error) = open_files::raise_limit() {
        log::warn!("the limit of open files stays as it is: {error}");
    }
    let monitor = match &cli.event_monitor {
        None => EventMonitor::disabled(started),
        Some(EventTarget::Path(path)) => EventMonitor::open(path, started)?,
        Some(EventTarget::Fd(fd)) => EventMonitor::to_file(event_file(*fd)?, started),
    };
    let mut restore = cli.restore;
    let config = cli.vm.into_config(restore.as_mut())?;
    let start = match (config, restore) {
        (Some(config), _) => Start::Boot(config),
        (None, Some(restore)) => Start::Restore(restore),
        (None, None) => Start::Wait,
    };
    let filters = Filters::new(cli.seccomp);
    let (sender, receiver) = vmm_api::channel().map_err(Error::Api)?;
    let listener = cli.api_socket.as_ref().map(Listener::open).transpose()?;
    // Others may write to the folder of metrics sockets, and may have taken the name: the VM runs nevertheless.
    let metrics = cli.metrics_socket.as_deref().and_then(|path| {
        let opened = Listener::open_for_metrics(path);
        opened.inspect_err(|error| not_watched(error)).ok()
    });
    // Once, here: threads that are started from now on inherit the restriction.
    filters.confine()?;
    let mut servers = Vec::new();
    if listener.is_some() || metrics.is_some() {
        let spawner = Spawner::new(filters.clone()).map_err(Error::Thread)?;
        let start = |listener| Server::start(listener, sender.try_clone()?, &spawner);
        if let Some(listener) = listener {
            servers.push(start(listener).map_err(Error::Api)?);
        }
        if let Some(listener) = metrics {
            let started = start(listener);
            servers.extend(started.inspect_err(|error| not_watched(error)));
        }
    }
    let options = StartOptions {
        start,
        filters,
        started,
        no_shutdown: cli.no_shutdown,
    };
    let result = vmm_control::run(options, receiver, monitor);
    // After an error too: pending responses are sent, and the sockets' files are removed.
    for server in servers {
        server.stop();
    }
    Ok(match result? {
        ExitReason::GuestFailed => ExitCode::from(EXIT_GUEST_LOST),
        ExitReason::GuestShutdown | ExitReason::Request | ExitReason::Signal => ExitCode::SUCCESS,
    })
}

/// Metrics are not served, and the VM runs without.
fn not_watched(error: &dyn std::error::Error) {
    log::warn!("metrics are not served: {}", Chain(error));
}

/// Takes an inherited descriptor for events and makes it non-blocking.
fn event_file(fd: RawFd) -> Result<File, Error> {
    // SAFETY: reads and sets the flags of whatever the number refers to; failures are checked.
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
    // SAFETY: the descriptor is open, and whoever started this process handed it over for events.
    Ok(unsafe { File::from_raw_fd(fd) })
}
