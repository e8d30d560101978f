//! `gantry ctl`: sends requests to a running VMM.

use std::{
    fs, io,
    io::{Read, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use base::Output;
use clap::{Args, Subcommand};
use serde::Serialize;
use vmm_api::{
    AccelInSnapshot, OnFailure, ResolveMigration, RestoreConfig, RunsAt, VmCoredumpData,
    VmRemoveDevice, VmResize, VmResizeDisk, VmResizeZone, VmSnapshotConfig, VmSwapDevice,
    model::to_url,
};

use super::{
    Client, ClientError,
    console::{self, ConsoleError, Which},
    devices::Add,
    find::{self, FindError},
    migrations::{self, ReceiveArgs, SendArgs},
    move_accel::MoveAccel,
    option,
    vm::Confinement,
};

/// Time limit for the answer to `ping`, which takes milliseconds unless the VMM is stopped or its host is overloaded.
const PING_PATIENCE: Duration = Duration::from_secs(5);

/// Send a request to a running Gantry.
#[derive(Args, Clone, Debug)]
#[command(disable_help_subcommand = true)]
pub struct Ctl {
    /// API socket of the VMM. Default: GANTRY_SOCKET, or the only VMM that is running.
    #[arg(long, visible_alias = "api-socket", value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// The request.
    #[command(subcommand)]
    pub action: Action,
}

/// The request.
#[derive(Clone, Debug, Subcommand)]
pub enum Action {
    /// List the VMMs that run here: API socket, process, state, vCPUs and memory.
    List,
    /// Connect this terminal to the guest's console; leave it with control and ].
    Console {
        /// The console to connect to.
        #[arg(value_enum, default_value = "any")]
        which: Which,
    },
    /// Show help for all commands, or for one of them.
    Help {
        /// Name of the command.
        command: Option<String>,
    },
    /// Show the VMM's version and process ID. Fails if it does not answer within 5 s.
    Ping,
    /// Show configuration and state of the VM.
    Info,
    /// Show the counters of the VM's devices and vCPUs.
    Counters,
    /// Show metrics in Prometheus' text format.
    Metrics,
    /// Create a VM.
    Create {
        /// JSON file with its configuration; - for standard input.
        #[arg(default_value = "-")]
        config: PathBuf,
    },
    /// Boot the VM.
    Boot,
    /// Pause the VM: stop its vCPUs.
    Pause,
    /// Resume the VM's vCPUs.
    Resume,
    /// Power off the VM.
    Shutdown,
    /// Power off the VM and boot it again.
    Reboot,
    /// Press the VM's power button.
    PowerButton,
    /// Send a non-maskable interrupt to all vCPUs.
    Nmi,
    /// Delete the VM.
    Delete,
    /// Stop the VMM.
    ShutdownVmm,
    /// Change the VM's vCPUs, memory or balloon.
    #[command(arg_required_else_help = true)]
    Resize {
        /// Number of vCPUs.
        #[arg(long, value_name = "N")]
        cpus: Option<u32>,
        /// Size of memory, such as 2G.
        #[arg(long, value_name = "SIZE", value_parser = super::size)]
        memory: Option<u64>,
        /// Size of the balloon, such as 512M.
        #[arg(long, value_name = "SIZE", value_parser = super::size)]
        balloon: Option<u64>,
    },
    /// Change the size of a disk.
    ResizeDisk {
        /// Name of the disk.
        #[arg(long, visible_alias = "id", value_name = "ID")]
        disk: String,
        /// New size, such as 10G.
        #[arg(long, value_name = "SIZE", value_parser = super::size)]
        size: u64,
    },
    /// Change the size of a memory zone.
    ResizeZone {
        /// Name of the zone.
        #[arg(long, value_name = "ID")]
        id: String,
        /// New size, such as 2G.
        #[arg(long, value_name = "SIZE", value_parser = super::size)]
        size: u64,
    },
    /// Add a device, with one command for each kind.
    #[command(flatten)]
    Add(Add),
    /// Unplug a device.
    RemoveDevice {
        /// Name of the device.
        id: String,
        /// Remove the device without asking the guest.
        #[arg(long, conflicts_with = "timeout")]
        force: bool,
        /// Keep the device after all: cancels an earlier removal or swap.
        #[arg(long, conflicts_with_all = ["timeout", "force"])]
        cancel: bool,
        /// Time limit in seconds, after which the device stays if the guest has not given it up.
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u64>,
    },
    /// Replace a physical device with another one of the same model.
    SwapDevice {
        /// Name of the device.
        id: String,
        /// The replacement: its address, a mediated device's UUID, or its directory in sysfs.
        #[arg(value_name = "DEVICE", value_parser = host_device)]
        path: PathBuf,
        /// Time limit in seconds, after which the old device stays if the guest has not given it up.
        #[arg(long, value_name = "SECONDS", default_value_t = 30)]
        timeout: u64,
        /// What happens if the replacement cannot be plugged in.
        #[arg(long, value_enum, default_value = "restore")]
        on_failure: OnFailure,
    },
    /// Move an accelerator's applications to other workers while they run.
    MoveAccel(MoveAccel),
    /// Save a paused VM.
    Snapshot {
        /// Directory, as a path or a file:// URL.
        destination: String,
        /// First remove from the guest what cannot be saved: physical devices; accelerators, whose applications see
        /// their device fail; and gate connections, which are closed.
        #[arg(long)]
        detach: bool,
        /// What happens to applications that use an accelerator: the VM is not saved, or they are saved in the
        /// snapshot.
        #[arg(long, value_enum, default_value = "refuse")]
        accel: AccelInSnapshot,
    },
    /// Restore a saved VM.
    Restore {
        /// Directory, or source_url=URL,resume=on|off,memory_restore_mode=copy|ondemand,...
        #[arg(value_name = "SOURCE", value_parser = option(RestoreConfig::parse))]
        config: RestoreConfig,
        #[command(flatten)]
        confinement: Confinement,
    },
    /// Migrate the VM to another Gantry while it runs.
    SendMigration(Box<SendArgs>),
    /// Receive a VM from another Gantry, and wait until it runs.
    ReceiveMigration(ReceiveArgs),
    /// Show the progress of a migration.
    Migration,
    /// Cancel a migration, or a wait for workers of accelerators; the VM stays where it is.
    CancelMigration,
    /// Decide which side runs the VM, when a migration cannot determine it.
    ResolveMigration {
        /// The side that runs it.
        #[arg(value_enum)]
        runs_at: RunsAt,
    },
    /// Write the memory of a paused VM to an ELF core file.
    Coredump {
        /// File, as a path or a file:// URL.
        destination: String,
    },
}

/// A request could not be sent or has failed.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// The VMM could not be reached or refuses the request.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// It is unclear which VMM is meant.
    #[error(transparent)]
    Find(#[from] FindError),
    /// The console cannot be shown.
    #[error(transparent)]
    Console(#[from] ConsoleError),
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// There is no such command.
    #[error("there is no command '{0}'; gantry ctl help lists all of them")]
    Help(String),
    /// The response cannot be written to the terminal.
    #[error("cannot write the answer")]
    Write(#[source] io::Error),
    /// The migration that was watched has failed.
    #[error("the VM has not moved: {0}")]
    NotMoved(String),
    /// The VMM that was asked is gone.
    #[error("whether the VM has moved is not known; ask the destination")]
    Unwatched(#[source] ClientError),
    /// The VMM that held contents which were to follow is gone.
    #[error(
        "the VM runs at the destination, but its VMM here has ended before all contents of its applications' memory \
         were seen to have followed: applications that need what is lost get an error"
    )]
    NotFollowed(#[source] ClientError),
    /// The request cannot be written as JSON.
    #[error("cannot write the request")]
    Json(#[from] serde_json::Error),
}

#[expect(clippy::unnecessary_wraps, reason = "clap's parsers may fail")]
fn host_device(text: &str) -> Result<PathBuf, String> {
    Ok(vmm_config::host_device(text).map_or_else(|| text.into(), Into::into))
}

impl Ctl {
    /// Sends the request and writes the response to `terminal`.
    pub fn run(&self, terminal: &mut dyn Write) -> Result<(), CtlError> {
        let out = &mut Output::to(&mut *terminal);
        match &self.action {
            Action::List => return list(out),
            Action::Help { command } => {
                let words = ["ctl"].into_iter().chain(command.as_deref());
                let text = super::help_of(words).map_err(CtlError::Help)?;
                return out.write_all(text.as_bytes()).map_err(CtlError::Write);
            }
            _ => {}
        }
        let client = Client::new(find::socket(self.socket.as_deref())?);
        let client = match self.action {
            Action::Ping => client.within(PING_PATIENCE),
            _ => client,
        };
        if let Action::Console { which } = self.action {
            return Ok(console::run(&client, which, terminal)?);
        }
        let (method, path, body, fds) = self.action.request()?;
        let answer = client.request(method, path, body.as_deref(), &fds)?;
        if let Action::SendMigration(send) = &self.action
            && send.watch
        {
            return migrations::watch(&client, out);
        }
        show(&answer, out).map_err(CtlError::Write)
    }
}

/// Lists the VMMs, one per line, with those that do not answer.
fn list(out: &mut dyn Write) -> Result<(), CtlError> {
    let lines = find::found(Path::new("/proc"));
    if lines.is_empty() {
        base::note!("gantry: no VMM with an API socket runs here that this user can see");
    }
    let lines = lines.iter().map(|found| format!("{found}\n"));
    out.write_all(lines.collect::<String>().as_bytes())
        .map_err(CtlError::Write)
}

/// Shows a response: JSON is indented, other text is unchanged.
fn show(answer: &[u8], out: &mut dyn Write) -> io::Result<()> {
    if answer.is_empty() {
        return Ok(());
    }
    match serde_json::from_slice::<serde_json::Value>(answer) {
        Ok(value) => {
            serde_json::to_writer_pretty(&mut *out, &value)?;
            writeln!(out)
        }
        Err(_) => out.write_all(answer),
    }
}

type Parts = (&'static str, &'static str, Option<Vec<u8>>, Vec<i32>);

impl Action {
    /// Method, path, body and descriptors of the request.
    fn request(&self) -> Result<Parts, CtlError> {
        let get = |path| Ok(("GET", path, None, Vec::new()));
        let put = |path| Ok(("PUT", path, None, Vec::new()));
        match self {
            // These do not correspond to exactly one request.
            Self::List | Self::Console { .. } | Self::Help { .. } | Self::Ping => get("vmm.ping"),
            Self::Info => get("vm.info"),
            Self::Counters => get("vm.counters"),
            Self::Metrics => get("vmm.metrics"),
            Self::Boot => put("vm.boot"),
            Self::Pause => put("vm.pause"),
            Self::Resume => put("vm.resume"),
            Self::Shutdown => put("vm.shutdown"),
            Self::Reboot => put("vm.reboot"),
            Self::PowerButton => put("vm.power-button"),
            Self::Nmi => put("vm.nmi"),
            Self::Delete => put("vm.delete"),
            Self::ShutdownVmm => put("vmm.shutdown"),
            Self::Create { config } => {
                let body = read(config).map_err(|source| CtlError::Read {
                    path: config.clone(),
                    source,
                })?;
                Ok(("PUT", "vm.create", Some(body), Vec::new()))
            }
            Self::Resize {
                cpus,
                memory,
                balloon,
            } => {
                let body = VmResize {
                    desired_vcpus: *cpus,
                    desired_ram: *memory,
                    desired_balloon: *balloon,
                };
                with_body("vm.resize", &body)
            }
            Self::ResizeDisk { disk, size } => {
                let body = VmResizeDisk {
                    id: disk.clone(),
                    desired_size: *size,
                };
                with_body("vm.resize-disk", &body)
            }
            Self::ResizeZone { id, size } => {
                let body = VmResizeZone {
                    id: id.clone(),
                    desired_ram: *size,
                };
                with_body("vm.resize-zone", &body)
            }
            Self::Add(Add { path, device }) => {
                let (method, path, body, _) = with_body(path, &device.to_json()?)?;
                Ok((method, path, body, device.descriptors()))
            }
            Self::RemoveDevice {
                id,
                force,
                cancel,
                timeout,
            } => {
                let body = VmRemoveDevice {
                    id: id.clone(),
                    force: *force,
                    cancel: *cancel,
                    timeout: *timeout,
                };
                with_body("vm.remove-device", &body)
            }
            Self::SwapDevice {
                id,
                path,
                timeout,
                on_failure,
            } => {
                let body = VmSwapDevice {
                    id: id.clone(),
                    path: path.clone(),
                    timeout: *timeout,
                    on_failure: *on_failure,
                };
                with_body("vm.swap-device", &body)
            }
            Self::MoveAccel(order) => with_body("vm.move-accel", &order.request()),
            Self::Snapshot {
                destination,
                detach,
                accel,
            } => {
                let body = VmSnapshotConfig {
                    destination_url: to_url(destination),
                    detach: *detach,
                    accel: *accel,
                };
                with_body("vm.snapshot", &body)
            }
            Self::Restore {
                config,
                confinement,
            } => {
                let mut config = config.clone();
                confinement.put_into(&mut config);
                let (method, path, body, _) = with_body("vm.restore", &config)?;
                let cards = config.net_fds.iter().flatten();
                let fds = cards.flat_map(|net| net.fds.iter().copied()).collect();
                Ok((method, path, body, fds))
            }
            Self::SendMigration(send) => with_body("vm.send-migration", &send.request()),
            Self::ReceiveMigration(receive) => {
                with_body("vm.receive-migration", &receive.request())
            }
            Self::Migration => get("vm.migration"),
            Self::CancelMigration => put("vm.cancel-migration"),
            Self::ResolveMigration { runs_at } => with_body(
                "vm.resolve-migration",
                &ResolveMigration { runs_at: *runs_at },
            ),
            Self::Coredump { destination } => {
                let destination_url = to_url(destination);
                with_body("vm.coredump", &VmCoredumpData { destination_url })
            }
        }
    }
}

fn with_body(path: &'static str, body: &impl Serialize) -> Result<Parts, CtlError> {
    Ok(("PUT", path, Some(serde_json::to_vec(body)?), Vec::new()))
}

fn read(path: &PathBuf) -> io::Result<Vec<u8>> {
    if path.as_os_str() != "-" {
        return fs::read(path);
    }
    let mut text = Vec::new();
    io::stdin().read_to_end(&mut text)?;
    Ok(text)
}
