//! VMs that arrive from another host.

use std::{
    fs::File,
    io, mem,
    os::fd::OwnedFd,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use base::{Cancel, Chain, memfd, regular_file};
use devices::{
    accel::{left::Asking, rounds::CopiedPort},
    thread::ThreadRole,
};
use serde_json::Value;
use vmm_api::{ApiError, MigrationMode, ReceiveMigration, Reply, Response, Status};
use vmm_config::{Descriptor, FileAccess, VmConfig};
use vmm_machine::{Machine, applications, handover::Given, images::Images, moving::MovingRegion};
use vmm_memory::GivenMemory;
use vmm_migration::{
    destination::{Ended, Host as Receives, receive},
    files::{FileUse, GivenFile},
    gpu_driver::GpuDriver,
    lanes::Body,
    listener::Listener,
    offer::{HostId, Moment, Offer},
    pages::Region,
    progress::{Direction, Phase, Progress},
};

use super::{
    super::{
        Control,
        booting::SOON,
        compatible,
        host_names::renamed,
        life::{Life, RunState},
        requests::{failed, restrict, validate},
    },
    Incoming, Job, OnControl,
    allowed::Allowed,
    end, host_error,
    plan::{offered, tls},
    summary, words,
};

const UNPREPARED: &str = "no machine was prepared";
const CANCELLED: &str =
    "files of the VM were still waited for at the destination when it was cancelled";

/// What a thread does for a machine that arrives, which it returns.
type Apart<R> = Box<dyn FnOnce() -> Result<(Incoming, R), String> + Send>;

/// Waits for what a thread sends; `None` if the thread has ended, or the migration is cancelled before.
fn wait<T>(done: &Receiver<T>, cancel: &Cancel) -> Option<T> {
    /// Interval for looking at whether the migration is cancelled.
    const LOOK: Duration = Duration::from_millis(20);
    loop {
        match done.recv_timeout(LOOK) {
            Ok(done) => return Some(done),
            Err(RecvTimeoutError::Timeout) if !cancel.is_cancelled() => {}
            Err(_) => return None,
        }
    }
}

/// The control thread, as accessed by the thread of an incoming migration.
struct Coming {
    control: OnControl,
    number: u64,
    /// ID of this host.
    host: Option<HostId>,
}

impl Coming {
    fn on_incoming<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Control) -> Result<R, String> + Send + 'static,
    ) -> Result<R, String> {
        let number = self.number;
        let done = self.control.ask(move |control| {
            if control.migrations.is_current(number) {
                work(control)
            } else {
                Err("the destination does not wait for a VM any more".to_owned())
            }
        });
        done.unwrap_or_else(|| Err("the destination's VMM ends".to_owned()))
    }

    /// Does work on the machine that takes as long as storage likes: see [`Coming::apart`].
    fn on_machine_apart<R: Send + 'static>(
        &self,
        cancel: &Cancel,
        work: impl FnOnce(&mut Incoming) -> Result<R, String> + Send + 'static,
    ) -> Result<R, String> {
        self.apart(cancel, |control| {
            let Job::Incoming { machine, .. } = &mut control.migrations.job else {
                return Err(UNPREPARED.to_owned());
            };
            let mut incoming = machine.take().ok_or_else(|| UNPREPARED.to_owned())?;
            Ok(Box::new(move || {
                let done = work(&mut incoming)?;
                Ok((incoming, done))
            }))
        })
    }

    /// Does what takes as long as storage likes on a thread that may do what the control thread may. The job gets the machine
    /// afterwards. If the migration is cancelled, the thread is left behind, and the machine ends there.
    fn apart<R: Send + 'static>(
        &self,
        cancel: &Cancel,
        begin: impl FnOnce(&mut Control) -> Result<Apart<R>, String> + Send + 'static,
    ) -> Result<R, String> {
        let (sender, done) = mpsc::sync_channel(1);
        let of_thread = cancel.clone();
        self.on_incoming(move |control| {
            let (work, place) = (begin(control)?, control.queue.place());
            let body = move || {
                let done = match place.wait(&of_thread) {
                    true => work(),
                    false => Err(CANCELLED.to_owned()),
                };
                // Nobody waits for what was cancelled.
                let _ = sender.send((done, place));
            };
            let started = thread::Builder::new().name("_machine".to_owned());
            started.spawn(body).map_err(|error| error.to_string())?;
            Ok(())
        })?;
        let Some((done, place)) = wait(&done, cancel) else {
            self.control.tell(move |control| control.forget(done));
            return Err(CANCELLED.to_owned());
        };
        let (incoming, done) = done?;
        let number = self.number;
        let kept = self.control.ask(move |control| {
            // Left when the job has the machine.
            let _place = place;
            match &mut control.migrations.job {
                Job::Incoming {
                    number: of,
                    machine,
                    ..
                } if *of == number => {
                    *machine = Some(incoming);
                    true
                }
                _ => {
                    control.end(incoming.machine);
                    false
                }
            }
        });
        match kept {
            Some(true) => Ok(done),
            _ => Err(CANCELLED.to_owned()),
        }
    }

    fn on_machine<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Incoming) -> Result<R, String> + Send + 'static,
    ) -> Result<R, String> {
        self.on_incoming(|control| match &mut control.migrations.job {
            Job::Incoming {
                machine: Some(machine),
                ..
            } => work(machine),
            _ => Err(UNPREPARED.to_owned()),
        })
    }

    /// Does what takes as long as storage likes, on a thread of its own, which is restricted to the VM's files. It is left
    /// behind if the migration is cancelled; the result is `None` then.
    fn on_storage<R: Send + 'static>(
        &self,
        cancel: &Cancel,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Result<Option<R>, String> {
        let (sender, done) = mpsc::sync_channel(1);
        let body = move || {
            // Nobody waits for what was cancelled.
            let _ = sender.send(work());
        };
        let name = "_open".to_owned();
        self.control
            .start_as(ThreadRole::Restore, name, Box::new(body))?;
        Ok(wait(&done, cancel))
    }

    /// Opens the images of the machine's disks, whose locks the source has.
    fn open_images(&self, cancel: &Cancel) -> Result<Arc<Images>, String> {
        let images = Arc::<Images>::default();
        let disks = self.on_machine(|incoming| Ok(incoming.config.disks.clone()))?;
        let Some(disks) = disks.filter(|disks| !disks.is_empty()) else {
            return Ok(images);
        };
        let opens = Arc::clone(&images);
        let opened = self.on_storage(cancel, move || opens.open(&disks, true).map_err(words))?;
        match opened {
            Some(opened) => opened.map(|()| images),
            None => {
                // Its thread closes them.
                images.give_up();
                Err("the images of its disks were not open yet at the destination when it was cancelled".to_owned())
            }
        }
    }
}

impl Receives for Coming {
    fn examine(&mut self, offer: &Offer, cancel: &Cancel) -> Vec<String> {
        if let Some(reason) = too_many(&offer.config) {
            return vec![reason];
        }
        let examined = offer.clone();
        let answer = self
            .control
            .ask(move |control| control.reasons_to_refuse(&examined));
        let Some((mut reasons, config)) = answer else {
            return vec!["the destination's VMM ends".to_owned()];
        };
        if let Some(config) = config {
            let absent = self.on_storage(cancel, move || absent_files(&config));
            reasons.extend(match absent {
                Ok(Some(absent)) => absent,
                Ok(None) => vec![
                    "files of the VM were still looked for at the destination when it was cancelled".to_owned(),
                ],
                Err(why) => vec![why],
            });
        }
        reasons
    }

    fn is_here(&self, host: &HostId) -> bool {
        self.host.as_ref() == Some(host)
    }

    fn prepare(
        &mut self,
        offer: Offer,
        files: Vec<GivenFile>,
        cancel: Cancel,
    ) -> Result<Vec<Region>, String> {
        let given = match offer.local {
            true => Some(given_files(&offer, files)?),
            false => None,
        };
        self.apart(&cancel, move |control| {
            control.prepare_incoming(offer, given)
        })
    }

    fn copy(
        &mut self,
        ports: Vec<CopiedPort>,
        archive: File,
        cancel: Cancel,
    ) -> Result<(), String> {
        let ports = self.on_machine_apart(&cancel, move |incoming| {
            let ports = incoming.machine.ports_to_prepare(&incoming.config, ports);
            ports.map_err(words)
        })?;
        applications::prepare(&ports, &archive, cancel).map_err(words)
    }

    fn restore(
        &mut self,
        state: Vec<u8>,
        saved_at: Option<Moment>,
        archive: Option<File>,
        cancel: Cancel,
    ) -> Result<(), String> {
        let images = self.open_images(&cancel)?;
        let ports = self.on_machine_apart(&cancel, move |incoming| {
            let (config, machine) = (&mut incoming.config, &mut incoming.machine);
            // A machine that is to stay paused does not advance its clocks.
            let away = saved_at.filter(|_| !incoming.paused).map(Moment::ago);
            let arrived = machine.arrive(config, &state, away.unwrap_or_default(), archive, images);
            arrived.map_err(words)?;
            Ok(machine.ports_to_take_up())
        })?;
        applications::take_up(&ports, cancel).map_err(words)
    }

    fn start(&mut self, body: Body) -> Result<(), String> {
        self.control.start(body)
    }

    fn start_lane(&mut self, number: u32, body: Body) -> Result<(), String> {
        self.control.start_lane(number, body)
    }

    fn take_locks(&mut self) -> Result<(), String> {
        self.on_machine(|incoming| {
            let taken = incoming.machine.take_locks();
            taken.map_err(|error| Chain(&error).to_string())
        })
    }

    fn asking(&mut self) -> Result<Vec<Asking>, String> {
        self.on_machine(|incoming| applications::asking(incoming.machine.devices().ports()))
    }

    fn run(&mut self) -> Result<(), String> {
        self.on_incoming(Control::run_incoming)
    }

    fn has_moved(&mut self, fixed: Duration) {
        let number = self.number;
        self.control.ask(move |control| {
            if control.migrations.is_current(number)
                && let Some(machine) = control.life.machine_mut()
            {
                machine.set_last_move(fixed);
            }
        });
    }
}

impl Control {
    /// `vm.receive-migration`: replies when the VM runs or the migration has failed.
    pub(in super::super) fn receive_migration(&mut self, request: ReceiveMigration, reply: Reply) {
        match self.start_receiving(&request) {
            Err(error) => reply.send(Err(error)),
            Ok((number, progress)) => {
                self.monitor.emit("vm", "migration-receive-started", &[]);
                self.migrations.job = Job::Incoming {
                    number,
                    progress,
                    reply: Some(reply),
                    request,
                    machine: None,
                };
            }
        }
    }

    fn start_receiving(&mut self, request: &ReceiveMigration) -> Result<(u64, Progress), ApiError> {
        let bad = |message: &str| Err(ApiError::message(Status::BadRequest, message));
        if self.life.config().is_some() {
            return Err(ApiError::message(
                Status::Internal,
                "there is a VM already: delete it first (vm.delete)",
            ));
        }
        if !self.queue.is_empty_within(SOON) {
            return Err(ApiError::wrong_state(
                "an earlier machine of this VMM has not ended, because storage does not answer: try again later, or use \
                 another VMM",
            ));
        }
        if request.tls_dir.is_some() && !request.receiver_url.starts_with("tcp:") {
            return bad("tls_dir is for tcp:ADDRESS:PORT");
        }
        if request.insecure && request.tls_dir.is_some() {
            return bad("insecure is for tcp:ADDRESS:PORT without tls_dir");
        }
        if request.memory_mode != MigrationMode::Precopy {
            return bad("memory_mode=Postcopy is not supported: use Precopy");
        }
        let tls = tls(request.tls_dir.as_ref(), request.tunnel.as_ref());
        let mut listener =
            Listener::bind(&request.receiver_url, tls.as_ref()).map_err(|error| {
                let status = match error {
                    vmm_migration::Error::Url(_) => Status::BadRequest,
                    _ => Status::Internal,
                };
                ApiError::new(status, &error)
            })?;
        if listener.is_open_to_hosts() && !request.insecure {
            return bad(
                "any process that reaches this port could send a VM of its own: use TLS (tls_dir) or a loopback \
                 address, or ask for it with insecure (--insecure), and name what the VM may use with paths (--paths)",
            );
        }
        if let Some(path) = Allowed::missing(request) {
            let message = format!(
                "paths names {}, which does not exist: create it, or leave it out",
                path.display()
            );
            return bad(&message);
        }
        if let Some(allowed) = Allowed::of(request) {
            // Before there are threads that would not be restricted.
            let enforced = allowed.enforce();
            enforced.map_err(|error| ApiError::internal(&error))?;
        }
        let number = self.migrations.number();
        let progress = Progress::new(Direction::Incoming, &request.receiver_url);
        let host = |error: io::Error| host_error("prepare a migration", &error);
        let mut coming = Coming {
            control: self.migrations.on_control().map_err(host)?,
            number,
            host: self.migrations.host.clone(),
        };
        let of_thread = progress.clone();
        self.start_thread(move || {
            let ended = receive(&mut listener, &mut coming, &of_thread);
            drop(listener);
            coming
                .control
                .ask(move |control| control.received(number, ended));
        })?;
        Ok((number, progress))
    }

    /// Handles the end of an incoming migration.
    pub(super) fn received(&mut self, number: u64, ended: Result<(), Ended>) {
        if !self.migrations.is_current(number) {
            return;
        }
        let Job::Incoming {
            progress,
            reply,
            machine,
            ..
        } = mem::replace(&mut self.migrations.job, Job::None)
        else {
            return;
        };
        if let Some(incoming) = machine {
            self.end(incoming.machine);
        }
        let answer = match ended {
            Ok(()) => {
                log::info!("the VM has arrived: {}", summary(&progress.info()));
                end(&progress, Phase::Completed, None);
                self.monitor.emit("vm", "migration-receive-finished", &[]);
                Ok(Response::Empty)
            }
            Err(Ended::Asked) => Ok(Response::Empty),
            Err(Ended::Failed(error) | Ended::Stranger(error)) => {
                let text = Chain(&error).to_string();
                log::error!("no VM has arrived: {text}");
                end(&progress, Phase::Failed, Some(text));
                self.monitor.emit("vm", "migration-receive-failed", &[]);
                Err(ApiError::internal(&error).context("no VM has arrived"))
            }
        };
        self.migrations.last = Some(progress.info());
        if let Some(reply) = reply {
            reply.send(answer);
        }
    }

    /// Every reason why an offer cannot be accepted, but for files that are missing, and the configuration whose files
    /// those are.
    pub(super) fn reasons_to_refuse(
        &mut self,
        offer: &Offer,
    ) -> (Vec<String>, Option<Box<VmConfig>>) {
        let mut reasons = Vec::new();
        if self.life.config().is_some() {
            reasons.push("the destination has a VM already".to_owned());
        }
        let config = self.incoming_config(offer);
        let config = config.map_err(|more| reasons.extend(more)).ok();
        if let Some(driver) = &offer.gpu_driver {
            reasons.extend(driver.reasons(&GpuDriver::read()));
        }
        if let Some(needs) = &offer.cpu {
            match compatible::host(offer.config.cpus.features.amx) {
                Ok(host) => reasons.extend(compatible::reasons(needs, &host)),
                Err(error) => reasons.push(Chain(&error).to_string()),
            }
        }
        (reasons, config)
    }

    /// The configuration of an offer, adapted to this host, or everything that is wrong with it.
    fn incoming_config(&self, offer: &Offer) -> Result<Box<VmConfig>, Vec<String>> {
        let Job::Incoming { request, .. } = &self.migrations.job else {
            return Err(vec!["no VM is awaited".to_owned()]);
        };
        let renames = request.renames.as_deref().unwrap_or_default();
        let (mut config, _) =
            renamed(&offer.config, renames).map_err(|error| vec![error.to_string()])?;
        let mut reasons = Vec::new();
        for update in request.zone_updates.iter().flatten() {
            let zones = config.memory.zones.iter_mut().flatten();
            match zones.into_iter().find(|zone| zone.id == update.id) {
                Some(zone) => zone.host_numa_node = Some(update.host_numa_node),
                None => reasons.push(format!("the VM has no memory zone {:?}", update.id)),
            }
        }
        config.confine(request.landlock_enable, request.landlock_rules.as_deref());
        if let Err(error) = validate(&config) {
            reasons.push(format!("the configuration is not valid: {error}"));
        }
        if let Some(allowed) = Allowed::of(request) {
            reasons.extend(allowed.reasons(&config));
            // Who may not use them is not told which there are.
            if reasons.is_empty() {
                reasons.extend(Allowed::absent_taps(&config));
            }
            Allowed::keep_interfaces(&mut config);
        }
        match reasons.is_empty() {
            true => Ok(config),
            false => Err(reasons),
        }
    }

    /// What makes the machine of an offer, and returns its memory.
    fn prepare_incoming(
        &mut self,
        offer: Offer,
        given: Option<(Vec<GivenMemory>, Given)>,
    ) -> Result<Apart<Vec<Region>>, String> {
        let mut config = self
            .incoming_config(&offer)
            .map_err(|reasons| reasons.join("; "))?;
        let plugged: Vec<_> = offer
            .regions
            .iter()
            .filter(|region| region.hotplugged)
            .map(|region| (region.guest, region.len))
            .collect();
        // Before there are threads that would not be restricted.
        restrict(&config, None).map_err(|error| error.to_string())?;
        let mut host = self.host().map_err(|error| error.to_string())?;
        let is_given = given.is_some();
        if let Some((memory, others)) = given {
            let kept = keep_taps(&mut config, &offer.tap_descriptors, &others);
            kept.map_err(|error| format!("cannot keep the descriptors of taps: {error}"))?;
            host.memory = Some(memory);
            host.given = Arc::new(others);
        }
        Ok(Box::new(move || {
            let machine = Machine::arriving(&mut config, &plugged, host)
                .map_err(|error| failed(&error).to_string())?;
            let ram = machine.moving_ram();
            let here: Vec<_> = ram.iter().map(offered).collect();
            if here != offer.regions {
                return Err(
                    "the machine has its memory elsewhere here than at the source".to_owned(),
                );
            }
            if !is_given {
                // Nothing of a VM that is refused is changed.
                let cleared = machine.clear_memory();
                cleared.map_err(|error| failed(&error).to_string())?;
            }
            let incoming = Incoming {
                config,
                machine: Box::new(machine),
                paused: offer.paused,
            };
            let region = |moving: MovingRegion| Region {
                guest: moving.guest,
                mapping: moving.mapping,
            };
            Ok((incoming, ram.into_iter().map(region).collect()))
        }))
    }

    fn run_incoming(&mut self) -> Result<(), String> {
        let Job::Incoming { machine, .. } = &mut self.migrations.job else {
            return Err("no VM is awaited".to_owned());
        };
        let Some(Incoming {
            config,
            mut machine,
            paused,
        }) = machine.take()
        else {
            return Err(UNPREPARED.to_owned());
        };
        if !paused {
            machine
                .resume()
                .map_err(|error| failed(&error).to_string())?;
            // Devices and some vCPUs run, so the source must not resume, however late another vCPU is.
            if let Err(error) = machine.wait_running() {
                log::error!("a vCPU is late to go on: {}", base::Chain(&error));
            }
        }
        // Until now the files belonged to the source, if it is a process of this host.
        machine.set_owns_sockets(true);
        let run = match paused {
            true => RunState::Paused,
            false => RunState::Running,
        };
        self.life = Life::Live {
            config,
            machine,
            run,
        };
        Ok(())
    }
}

/// Why a configuration cannot be of any machine, so that it costs the control thread no time; `None` if it can.
pub(super) fn too_many(config: &VmConfig) -> Option<String> {
    /// All functions of all slots of all segments.
    const MOST: usize = 16 * 32 * 8;
    /// Of memory zones, processors, rules of Landlock and the like.
    const LONGEST_LIST: usize = 8192;
    const MOST_VALUES: usize = 200_000;
    let (longest, values) = serde_json::to_value(config).map_or((0, 0), |value| measure(&value));
    if longest > LONGEST_LIST || values > MOST_VALUES {
        return Some(format!(
            "the VM's configuration has a list of {longest} entries and {values} values in all, and no more than \
             {LONGEST_LIST} and {MOST_VALUES} are looked at"
        ));
    }
    let count = config.all_devices().len();
    (count > MOST)
        .then(|| format!("the VM has {count} devices, and no machine has more than {MOST}"))
}

/// The length of the longest list in a value, and how many values there are in all.
fn measure(value: &Value) -> (usize, usize) {
    let parts: Vec<&Value> = match value {
        Value::Array(list) => list.iter().collect(),
        Value::Object(fields) => fields.values().collect(),
        _ => return (0, 1),
    };
    let own = if value.is_array() { parts.len() } else { 0 };
    let all = parts.into_iter().map(measure);
    all.fold((own, 1), |(longest, sum), (length, values)| {
        (longest.max(length), sum + values)
    })
}

/// Keeps taps of these cards, which have no name, for the next boots of the VM.
pub(super) fn keep_taps(config: &mut VmConfig, cards: &[String], given: &Given) -> io::Result<()> {
    for card in config.net.iter_mut().flatten() {
        if let Some(id) = card.common.id.as_ref().filter(|id| cards.contains(id))
            && card.tap.is_none()
        {
            let taps = given.tap_duplicates(id)?;
            card.fds = taps.into_iter().map(Descriptor::from).collect();
        }
    }
    Ok(())
}

/// Device files that do not exist here, as texts for users.
fn absent_files(config: &VmConfig) -> Vec<String> {
    let devices = config.all_devices().into_iter();
    let files = devices.flat_map(|(_, device)| device.files());
    let needed = files.filter(|file| file.access != FileAccess::Create);
    let reason = |file: vmm_config::FileUse| {
        let error = file.path.metadata().err()?;
        Some(format!(
            "{} is not to be had at the destination ({error}): make it reachable, or name another \
             file (--rename)",
            file.path.display()
        ))
    };
    let rules = config.landlock_rules.iter().flatten();
    let rules = rules.filter(|_| config.landlock_enable);
    let rules = rules.map(|rule| vmm_config::FileUse::read(&rule.path));
    needed.chain(rules).filter_map(reason).collect()
}

/// Refuses a file that is not of the type that it is said to be: uses of it, even its end, might wait for ever for whoever
/// serves its file system. That is not asked here.
fn check_type(what: &FileUse, file: &OwnedFd) -> Result<(), String> {
    let is = |wanted| regular_file::type_of(file).is_ok_and(|(found, _)| found == wanted);
    let (fits, needed) = match what {
        FileUse::Memory { .. } => (
            memfd::is_shared_memory(file),
            "shared memory (memory zones whose files are on a disk move without `local` only)",
        ),
        FileUse::Socket { .. } => (is(libc::S_IFSOCK), "a socket"),
        FileUse::Tap { .. } => (is(libc::S_IFCHR), "a tap"),
    };
    match fits {
        true => Ok(()),
        false => Err(format!(
            "a file that came with the VM is not what it is said to be: {needed}"
        )),
    }
}

/// The memory of an offer, and whatever else is handed over with the machine, from the received files, which are
/// untrusted.
pub(super) fn given_files(
    offer: &Offer,
    files: Vec<GivenFile>,
) -> Result<(Vec<GivenMemory>, Given), String> {
    for GivenFile { what, file } in &files {
        check_type(what, file)?;
    }
    let mut regions = offer.regions.iter().enumerate();
    let mut memory = Vec::new();
    let others = Given::default();
    for GivenFile { what, file } in files {
        match what {
            FileUse::Memory { region, offset } => match regions.next() {
                Some((at, offered)) if region == at => memory.push(GivenMemory {
                    guest: offered.guest,
                    len: offered.len,
                    file: File::from(file),
                    offset,
                }),
                _ => return Err("the files of the memory did not come in its order".to_owned()),
            },
            FileUse::Socket { path } => others.add_socket(path, file),
            FileUse::Tap { id, queue } => others.add_tap(id, queue, file),
        }
    }
    match regions.next() {
        None => Ok((memory, others)),
        Some((at, _)) => Err(format!("no file came for region {at} of the memory")),
    }
}
