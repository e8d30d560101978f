//! The machine's consoles: opens their backends and runs the thread that serves them.

use std::sync::Arc;

use devices::{
    console::{
        ConsoleBackend, ConsoleError, ConsoleLine, ConsoleMode as Backend, ConsoleService,
        InputSink, Terminal,
    },
    named_socket::SharedSocket,
    thread::ThreadSpawner,
};
use vmm_config::{ConsoleMode, VmConfig};

use super::{
    devices::Devices,
    error::MachineError,
    handover::Given,
    kinds::{Handle, console::backend_mode},
    platform::Platform,
};

/// Backends of the configured consoles.
pub struct Backends {
    /// Backend of the serial port, if there is one.
    pub serial: Option<ConsoleBackend>,
    /// Backend of the virtio console, if there is one.
    pub console: Option<ConsoleBackend>,
    /// Backend of the debug console, if there is one.
    pub debug: Option<ConsoleBackend>,
}

/// Opens the backends of the consoles, or takes the descriptors in `given`. Records the names of newly created
/// terminals in the configuration.
pub fn open(config: &mut VmConfig, given: &Given) -> Result<Backends, MachineError> {
    if config.serial.mode == ConsoleMode::Tty && config.console.mode == ConsoleMode::Tty {
        return Err(MachineError::Invalid(
            "serial port and console cannot both use the terminal: switch one off \
             (--serial off or --console off)"
                .to_owned(),
        ));
    }
    let open = |what, mode: Option<Backend>| {
        mode.map(|mode| open_one(&mode, given))
            .transpose()
            .map_err(|source| MachineError::Console { what, source })
    };
    let (serial, console, debug) = (&config.serial, &config.console, &config.debug_console);
    let serial = backend_mode(serial.mode, serial.file.as_ref(), serial.socket.as_ref())?;
    let console = backend_mode(console.mode, console.file.as_ref(), console.socket.as_ref())?;
    let debug = backend_mode(debug.mode, debug.file.as_ref(), None)?;
    let serial = open("serial port", serial)?;
    let console = open("console", console)?;
    let debug = debug
        .map(|mode| ConsoleBackend::open_output(&mode))
        .transpose()
        .map_err(|source| MachineError::Console {
            what: "debug console",
            source,
        })?;
    let path = |backend: &Option<ConsoleBackend>| {
        backend
            .as_ref()
            .and_then(ConsoleBackend::pty_path)
            .map(std::path::Path::to_owned)
    };
    if let Some(path) = path(&serial) {
        config.serial.file = Some(path);
    }
    if let Some(path) = path(&console) {
        config.console.file = Some(path);
    }
    Ok(Backends {
        serial,
        console,
        debug,
    })
}

fn open_one(mode: &Backend, given: &Given) -> Result<ConsoleBackend, ConsoleError> {
    let socket = match mode {
        Backend::Socket(path) => given.socket(path)?,
        _ => None,
    };
    match socket {
        Some(socket) => ConsoleBackend::on_socket(socket),
        None => ConsoleBackend::open(mode),
    }
}

/// Truncates the files that consoles print to. For the first boot of a VM; output after a reboot is appended.
pub fn empty_files(config: &VmConfig) {
    let files = [
        (config.serial.mode, &config.serial.file),
        (config.console.mode, &config.console.file),
        (config.debug_console.mode, &config.debug_console.file),
    ];
    for (mode, file) in files {
        if let (ConsoleMode::File, Some(path)) = (mode, file)
            && path.is_file()
            && let Err(error) = std::fs::File::create(path)
        {
            // `open` will report the error, if it matters.
            log::debug!("{} keeps its contents: {error}", path.display());
        }
    }
}

/// Serves the consoles while the machine runs.
pub struct Consoles {
    /// Present until the first start.
    backends: Option<Backends>,
    service: Option<ConsoleService>,
    /// The terminal behind the virtio console.
    terminal: Option<Terminal>,
    sockets: Vec<SharedSocket>,
    spawner: Arc<dyn ThreadSpawner>,
}

impl Consoles {
    /// The consoles of a machine that does not run yet.
    pub fn new(backends: Backends, spawner: Arc<dyn ThreadSpawner>) -> Self {
        let both = [&backends.serial, &backends.console];
        let sockets = both.into_iter().flatten();
        Self {
            sockets: sockets.filter_map(ConsoleBackend::shared_socket).collect(),
            terminal: backends.console.as_ref().and_then(ConsoleBackend::terminal),
            backends: Some(backends),
            service: None,
            spawner,
        }
    }

    /// The sockets that consoles listen on.
    pub fn shared_sockets(&self) -> &[SharedSocket] {
        &self.sockets
    }

    /// Tells the virtio console the size of the terminal behind it.
    pub fn window_changed(&self, devices: &Devices) {
        let Some(size) = self.terminal.and_then(|terminal| terminal.size()) else {
            return;
        };
        for (_, plugged) in devices.iter() {
            if let Handle::Console { device, .. } = &plugged.handle {
                device.resize(size);
            }
        }
    }

    /// Connects the consoles to their devices on the first call, and starts serving them.
    pub fn start(&mut self, platform: &Platform, devices: &Devices) -> Result<(), MachineError> {
        if let Some(Backends {
            serial,
            console,
            debug,
        }) = self.backends.take()
        {
            let virtio = devices.iter().find_map(|(_, device)| match &device.handle {
                Handle::Console { input, .. } => Some(Arc::clone(input)),
                _ => None,
            });
            let serial_input = platform
                .serial()
                .map(|serial| serial.clone() as Arc<dyn InputSink>);
            let lines = [(serial, serial_input), (console, virtio), (debug, None)];
            let lines = lines
                .into_iter()
                .filter_map(|(backend, input)| Some(ConsoleLine::new(backend?, input)))
                .collect();
            self.service = Some(ConsoleService::new(lines));
        }
        match &mut self.service {
            Some(service) => service
                .start(&*self.spawner)
                .map_err(|source| MachineError::Host {
                    action: "start the console thread",
                    source,
                }),
            None => Ok(()),
        }
    }

    /// Stops serving; after that, devices may be saved.
    pub fn stop(&mut self) {
        if let Some(service) = &mut self.service {
            service.stop();
        }
    }
}
